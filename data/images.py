"""Images: read files, list your own photos, crop, and the rule that divides data into parts.

A data set is a `Split`, whose images are in memory, or a Dataset like `ImageFiles` in datasets.py,
whose files are decoded by the workers of a DataLoader.
"""

import sys
import zlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import ExifTags, Image
from torch.utils.data import DataLoader

from common import InputError

ENDINGS = (".jpeg", ".jpg", ".png", ".webp")
PARTS = ("test", "val", "train")


class Split(NamedTuple):
    """A small set of images, all in memory."""
    images: torch.Tensor                     # (N, 3, H, W) uint8
    labels: torch.Tensor                     # (N,) int64
    classes: list                            # class names, str; labels are indices into it
    masks: torch.Tensor | None = None        # scenes: (N, H, W) uint8, 0: none, k + 1: class k


@cache
def constant(numbers, device):
    """Return a tuple of numbers as a tensor, which is copied to the device once."""
    return torch.tensor(numbers, device=device)


# --- files ----------------------------------------------------------------------------------------

# {orientation of a camera: the axes to flip}. The orientations 5 to 8 are also transposed.
FLIPS = {2: [2], 3: [1, 2], 4: [1], 6: [2], 7: [1, 2], 8: [1]}


def read_image(path):
    """Read an image file, upright by its EXIF data: (3, H, W) uint8 RGB. Errors name the file."""
    from torchvision.io import decode_image     # here, because robust/ and the attentions need none
    try:
        image = Image.open(path)                # reads only the head of the file
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
        if image.format in ("JPEG", "MPO"):     # torchvision decodes the same pixels, but faster
            data = torch.from_numpy(np.fromfile(path, np.uint8))
            pixels = decode_image(data, "RGB")
        elif image.mode.startswith(("I", "F")):     # 16 or 32 bits; Pillow would clip them to 255
            raise ValueError("more than 8 bits per channel")
        else:
            pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
    except Exception as error:                  # Pillow and torchvision raise many types
        reason = str(error) or type(error).__name__
        raise InputError(f"cannot read {path}: {reason}") from None
    if orientation in (5, 6, 7, 8):
        pixels = pixels.mT
    return pixels.flip(FLIPS.get(orientation, [])).contiguous()


def central_square(image, size, share=1.0, resample="bicubic"):
    """Crop the evaluation view: resize the short side to size / share, then crop the middle.

    image: (3, h, w) uint8. Returns (3, size, size) uint8, within 1 grey level of Pillow's result.
    """
    from torchvision.transforms.v2 import functional as F
    height, width = image.shape[1:]
    most = 2 * min(height, width)               # a resized 30000 x 1 image would need gigabytes
    image = F.center_crop(image, [min(height, most), min(width, most)])
    mode = F.InterpolationMode(resample)
    image = F.resize(image, [int(size / share)], mode, antialias=True)
    return F.center_crop(image, [size, size])


def image_batches(dataset, batches, num_workers, device):
    """Make a DataLoader of batches on the CPU. Each batch combines dataset[key] of its keys.

    batches: an iterable of lists of keys. num_workers: processes; 0 loads the images in this
    process. device: the device that gets the images; for CUDA, the memory is pinned.
    """
    workers = dict(num_workers=num_workers)
    if num_workers:
        workers["prefetch_factor"] = 4
        if sys.platform == "linux":             # a fork shares the file names and the imports
            workers["multiprocessing_context"] = "fork"
    pin_memory = torch.device(device).type == "cuda"
    return DataLoader(dataset, batch_sampler=batches, pin_memory=pin_memory, **workers)


# --- your own photos: their bytes decide their part -----------------------------------------------

def part_of(data):
    """Return the part of bytes: a tenth of all files is "test", a tenth is "val", the rest "train".

    The part depends on the bytes alone. So a new name, a new folder and other files change nothing,
    and equal files are in one part. The bytes of a JPEG begin at its last scan, the marker ff da,
    because programs write ratings into the head of a file.
    """
    scan = max(data.rfind(b"\xff\xda"), 0)
    remainder = zlib.crc32(data[scan:]) % 10
    return {0: "test", 1: "val"}.get(remainder, "train")


def entries(folder):
    """List a folder, sorted, without hidden names. InputError for a link that leads nowhere."""
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}; --data_dir selects it")
    found = [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")]
    for path in found:
        if not path.exists():
            raise InputError(f"{path} is a link that leads nowhere; repair or remove it")
    return found


def list_photos(folder):
    """List folder/<class>/* without the folders of parts: [(path, reason)].

    reason: why a path is passed over; "" for a photo.
    """
    found = []
    for class_folder in entries(folder):
        if class_folder.name in PARTS:
            continue
        if not class_folder.is_dir():
            found.append((class_folder, "files outside a class folder"))
            continue
        for path in entries(class_folder):
            reason = ""
            if path.is_dir():
                reason = "subfolders of a class"
            elif not path.name.lower().endswith(ENDINGS):
                reason = f"files that end in none of {' '.join(ENDINGS)}"
            found.append((path, reason))
    return found


def divide(root):
    """Divide photos into parts. Returns {part: [path]} and {reason: [paths that are passed over]}.

    The folders root/train, root/val and root/test, each with class folders, are parts as they are.
    Without test/, val/ is the test, too. Without val/, `part_of` takes "val" from the training
    photos, which are in root/train or else in root; without test/ and val/, it takes both parts.
    Equal files count once. A copy of a test photo is no training photo.
    """
    root = Path(root)
    folders = {path.name: path for path in entries(root) if path.name in PARTS}
    own = set(folders)                          # the parts with a folder
    drawn = set() if "val" in own else {"val", "test"} - own        # by part_of
    passed = {}
    if "train" in own:
        beside = [path for path in entries(root) if path.name not in PARTS]
        if beside:
            passed["files or folders beside train/"] = beside
    folders.setdefault("train", root)

    parts = {part: [] for part in PARTS}
    seen = {}                                   # {content: (part, class)}
    for place in PARTS:                         # the test photos first
        photos = list_photos(folders[place]) if place in folders else []
        for path, reason in photos:
            data = b"" if reason else path.read_bytes()
            content = zlib.crc32(data), len(data)
            class_name = path.parent.name
            if not reason and content in seen:
                part, first_class = seen[content]
                reason = f"copies of {part} photos"
                if class_name != first_class:
                    reason = "copies of photos of another class"
            if reason:
                passed.setdefault(reason, []).append(path)
                continue
            part = place
            if place == "train" and part_of(data) in drawn:
                part = part_of(data)
            parts[part].append(path)
            seen[content] = part, class_name
    if "val" in own and "test" not in own:
        parts["test"] = parts["val"]
    return parts, passed
