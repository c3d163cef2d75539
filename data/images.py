"""Images: read files, list your own photos, crop, and the rule that divides data into parts.

A data set is a `Split`, whose images are in memory, or a Dataset like `ImageFiles` in datasets.py,
whose files are decoded by the workers of a DataLoader.
"""

import sys
import zlib
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import ExifTags, Image
from torch.utils.data import DataLoader

from common import InputError, check_folder, print0

ENDINGS = (".jpeg", ".jpg", ".png", ".webp")
PARTS = ("test", "val", "train")         # in this order: a copy of a test image is not trained on


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
    # The longer side beyond 2 : 1 is cropped away in any case. Crop it first, because a resized
    # image of 30000 x 1 pixels would need gigabytes.
    most = 2 * min(height, width)
    image = F.center_crop(image, [min(height, most), min(width, most)])
    mode = F.InterpolationMode(resample)
    image = F.resize(image, [int(size / share)], mode, antialias=True)
    return F.center_crop(image, [size, size])


def image_batches(dataset, batches, num_workers, device):
    """Make a DataLoader of batches on the CPU. Each batch combines dataset[key] of its keys.

    batches: an iterable of lists of keys. num_workers: processes; 0 loads the images in this
    process. device: the device that gets the images; for CUDA, the memory is pinned.
    """
    # Its own generator, because a DataLoader draws a number for each of its epochs.
    workers = dict(num_workers=num_workers, generator=torch.Generator())
    if num_workers:
        workers["prefetch_factor"] = 4
        if sys.platform == "linux":             # a fork shares the file names and the imports
            workers["multiprocessing_context"] = "fork"
    pin_memory = torch.device(device).type == "cuda"
    return DataLoader(dataset, batch_sampler=batches, pin_memory=pin_memory, **workers)


# --- your own images: their bytes decide their part -----------------------------------------------

def part_of(data):
    """Return the part of bytes: a tenth of all files is "test", a tenth is "val", the rest "train".

    The part depends on the bytes alone. So a new name, a new folder and other files change nothing,
    and equal files are in one part. The bytes of a JPEG begin at a scan, the marker ff da, because
    programs write ratings into the head of a file. A thumbnail in the head has such a marker, too,
    so the last one counts.
    """
    scan = max(data.rfind(b"\xff\xda"), 0)
    remainder = zlib.crc32(data[scan:]) % 10
    return {0: "test", 1: "val"}.get(remainder, "train")


def divide(folders):
    """Divide images into parts. Returns {part: [path]} and {copy: the image with equal bytes}.

    folders: {part: images in the folder of this part}. "train" also has the images that are in no
    folder of a part. Equal images count once, in the first part of PARTS. `part_of` draws a part
    from train:

        folders with images     drawn by part_of    test
        train                   val and test        drawn
        train, test             val                 the folder test
        train, val              nothing             val is the test, too
        train, val, test        nothing             the folder test
    """
    drawn = []                                  # the parts that part_of takes from train
    if "val" not in folders:
        drawn.append("val")
        if "test" not in folders:
            drawn.append("test")
    parts = {part: [] for part in PARTS}
    copies = {}
    first = {}                                  # {content: the first path that has it}
    for folder in PARTS:
        for path in folders.get(folder, []):
            data = path.read_bytes()
            content = (zlib.crc32(data), len(data))
            if content in first:
                copies[path] = first[content]
                continue
            first[content] = path
            part = folder
            if folder == "train" and part_of(data) in drawn:
                part = part_of(data)
            parts[part].append(path)
    if "val" in folders and "test" not in folders:
        parts["test"] = parts["val"]
    return parts, copies


def print_passed(passed):
    """Print how many files are passed over: {reason: [path]}."""
    for reason, paths in passed.items():
        if paths:
            print0(f"passed over: {len(paths)} {reason}, the first: {paths[0]}")


def print_parts(root, parts, passed):
    """Print how many images each part has, and which files are passed over: {reason: [path]}."""
    counts = ", ".join(f"{len(paths)} {part}" for part, paths in parts.items())
    print0(f"{root}: {counts} images")
    print_passed(passed)
    if parts["test"] and parts["test"] == parts["val"]:
        print0("there is no folder test, so val is the test")
    n = len(set().union(*parts.values()))               # a set, because val can be the test
    if parts["train"] and n < 50:
        print0(f"{n} images are few: without the folders train, val and test, a part can be "
               f"empty")


def entries(folder):
    """List a folder, sorted, without hidden names. InputError for a link that leads nowhere."""
    check_folder(folder)
    found = [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")]
    for path in found:
        if not path.exists():
            raise InputError(f"{path} is a link that leads nowhere; repair or remove it")
    return found


def files_below(folder):
    """List all files in a folder and its subfolders, sorted, without hidden names."""
    files = []
    for path in entries(folder):
        files += files_below(path) if path.is_dir() else [path]
    return files


def own_photos(root):
    """Divide the photos root/<class>/*, or root/<part>/<class>/*. A part is a name in PARTS.

    Returns {part: [path]} and {reason: [paths that are passed over]}.
    """
    root = Path(root)
    place = {}                                  # {folder of a part, which has class folders: part}
    for part in PARTS:
        folder = root / part
        if folder.is_dir() and any(path.is_dir() for path in entries(folder)):
            place[folder] = part
    if root / "train" not in place:
        place[root] = "train"                   # the class folders are in root itself
    folders = {part: [] for part in place.values()}
    passed = defaultdict(list)
    for path in files_below(root):
        class_folder = path.parent
        if path.suffix.lower() not in ENDINGS:
            passed[f"files that end in none of {' '.join(ENDINGS)}"].append(path)
        # not in a class folder, or in a class folder of no part
        elif class_folder in place or class_folder.parent not in place:
            passed["photos in other folders"].append(path)
        else:
            folders[place[class_folder.parent]].append(path)
    parts, copies = divide(folders)
    for copy, photo in copies.items():
        same_class = copy.parent.name == photo.parent.name
        reason = "copies" if same_class else "copies of photos of another class"
        passed[reason].append(copy)
    return parts, passed
