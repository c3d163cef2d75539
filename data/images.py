"""Images: read files, list your own photos, crop, and the rule that divides data into parts.

A data set is a `Split`, whose images are in memory, or a Dataset like `ImageFiles` in datasets.py,
whose files are decoded by the workers of a DataLoader.
"""

import os
import zlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps

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

def read_image(path):
    """Read an image file, upright by its EXIF data: (3, H, W) uint8 RGB. Errors name the file."""
    try:
        image = ImageOps.exif_transpose(Image.open(path))
        if image.mode.startswith(("I", "F")):   # 16 or 32 bits, which Pillow would clip to 255
            raise ValueError("more than 8 bits per channel")
        pixels = np.array(image.convert("RGB"))
    except Exception as error:                  # Pillow raises many types
        reason = str(error) or type(error).__name__
        raise InputError(f"cannot read {path}: {reason}") from None
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


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


# --- your own images: their bytes decide their part -----------------------------------------------

def part_of(data):
    """Return the part of bytes: a tenth of all files is "test", a tenth is "val", the rest "train".

    The part depends on the bytes alone. So a new name, a new folder and other files change nothing,
    and equal files are in one part.
    """
    remainder = zlib.crc32(data) % 10
    return {0: "test", 1: "val"}.get(remainder, "train")


def divide(root):
    """Divide the files root/<class>/* into parts. Returns {part: [path]} and {reason: [path]}.

    A folder root/train, root/val or root/test is this part as it is. A part without a folder gets
    the files of `part_of`, from root/train or else from root. Of equal files, only the first one
    counts. reason: why paths were passed over, such as "subfolders".
    """
    root = Path(root)
    folders = {}                                # {part: its folder}
    for part in PARTS:
        folder = root / part
        if folder.is_dir():
            folders[part] = folder
        elif os.path.lexists(folder):
            raise InputError(f"{folder} is no folder that can be opened; remove or "
                             "repair it")
    own = set(folders)                          # parts with a folder
    folders.setdefault("train", root)
    parts = {part: [] for part in PARTS}
    seen = {}                                   # {content: class of the file}
    passed = {}                                 # {reason: paths}
    for place in PARTS:                         # the test images first: they stay test images
        for path, kind in list_classes(folders.get(place)):
            data = path.read_bytes() if kind == "image" else b""
            content = zlib.crc32(data), len(data)
            if kind == "image" and content in seen:
                same = seen[content] == path.parent.name
                kind = "copies" if same else "copies of files of another class"
            if kind != "image":
                passed.setdefault(kind, []).append(path)
                continue
            seen[content] = path.parent.name
            part = place
            if place == "train" and part_of(data) not in own:
                part = part_of(data)
            parts[part].append(path)
    return parts, passed


def list_classes(folder):
    """List what folder/<class>/ contains: [(path, kind)]. kind: "image", or why it is passed over.

    Hidden files are left out, and so are the folders of parts, which are no classes.
    """
    found = []
    if folder is None:
        return found
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}; --data_dir selects it")
    for class_folder in sorted(folder.iterdir()):
        if not class_folder.is_dir() or class_folder.name in PARTS:
            continue
        for path in sorted(class_folder.iterdir()):
            kind = "image"
            if path.is_dir():
                kind = "subfolders"
            elif not path.name.lower().endswith(ENDINGS):
                kind = "files with other endings"
            if not path.name.startswith("."):
                found.append((path, kind))
    return found
