"""Images: read files, list folders, hold images out, crop, and load batches.

A data set is a `Split`, whose images are in memory, or a Dataset like `ImageTree`, whose files are
decoded by the workers of a DataLoader.
"""

import hashlib
import json
import math
import os
import zlib
from functools import cache
from typing import NamedTuple
from unicodedata import normalize

import numpy as np
import torch
from PIL import Image, ImageOps
from torch.utils.data import DataLoader, Dataset

from common import InputError
from data.rng import RANDOM_CROP, uniform

IMAGE_EXTENSIONS = (".jpeg", ".jpg", ".png", ".webp")
PARTS = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val",
         "test": "test"}                     # folders of your own data


class Split(NamedTuple):
    """A small set of images, all in memory."""
    images: torch.Tensor                     # (N, 3, H, W) uint8
    labels: torch.Tensor                     # (N,) int64
    classes: list                            # class names, str; labels are indices into it
    masks: torch.Tensor | None = None        # scenes: (N, H, W) uint8, 0: none, k + 1: class k
    hashes: list = []                        # your own images: `marks` of every file


def send(x, device):
    """Copy a small tensor or list to the device; the CPU does not wait."""
    return torch.as_tensor(x).to(device, non_blocking=True)


@cache
def constant(numbers, device):
    """Return a tuple of numbers as a tensor, which is copied to the device once."""
    return torch.tensor(numbers, device=device)


# --- files ----------------------------------------------------------------------------------------

def read_image(path):
    """Read an image file, upright by its EXIF data: (3, H, W) uint8 RGB. Errors name the file."""
    try:
        data = np.fromfile(path, np.uint8)
        if data[:3].tobytes() == b"\xff\xd8\xff":     # JPEG: Pillow is slower, with equal pixels
            from torchvision.io import decode_image
            return decode_image(torch.from_numpy(data), "RGB", apply_exif_orientation=True)
        image = ImageOps.exif_transpose(Image.open(path))
        if image.mode[0] in "IF":               # Pillow would clip these values to 255, white
            raise ValueError("more than 8 bits per channel")
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).contiguous()
    except Exception as error:                  # Pillow and torchvision raise many types
        raise InputError(f"cannot read {path}: {error or type(error).__name__}") from None


def composed(name):
    """Return a name in Unicode's composed form with /, so that it is the same on every system."""
    return normalize("NFC", str(name).replace(os.sep, "/"))


def entries(folder):
    """List what a folder contains as os.DirEntry, sorted by name, without hidden names."""
    if not os.path.isdir(folder or ""):
        raise InputError(f"there is no folder {folder or ''!r}; --data_dir selects the images")
    with os.scandir(folder) as found:
        return sorted((entry for entry in found if not entry.name.startswith(".")),
                      key=lambda entry: composed(entry.name))


def list_files(folder, endings=IMAGE_EXTENSIONS):
    """List the paths of the files directly inside a folder."""
    return [entry.path for entry in entries(folder)
            if entry.name.lower().endswith(endings) and entry.is_file()]


def subfolders(root):
    """Return {name: path} of the folders and linked folders in a folder."""
    folders = [entry.path for entry in entries(root) if entry.is_dir()]
    found = {composed(os.path.basename(path)): path for path in folders}
    if len(found) < len(folders):                       # one class would replace the other
        raise InputError(f"{root} contains two folders of one name in different Unicode forms")
    return found


def list_images(root):
    """List root/<class>/<image>: {class: paths}. Folders without images are no classes."""
    files = {name: list_files(path) for name, path in subfolders(root).items()}
    return {name: found for name, found in files.items() if found}


def walk_images(folder):
    """List the images in a folder and in its subfolders, except links to a folder around them."""
    here = os.path.join(os.path.realpath(folder), "")
    inner = [path for inside in subfolders(folder).values()
             if not here.startswith(os.path.join(os.path.realpath(inside), ""))
             for path in walk_images(inside)]
    return list_files(folder) + inner


def part_folders(root):
    """Return {"train", "val" or "test": path} of the folders with these names, else {"": root}."""
    found = [(PARTS[name.lower()], path) for name, path in subfolders(root).items()
             if name.lower() in PARTS]
    if len(dict(found)) < len(found):
        raise InputError(f"{root} contains two folders for one part: {[path for _, path in found]}")
    return dict(found) or {"": root}


# --- held-out images ------------------------------------------------------------------------------

def marks(path, image):
    """Return two hashes of an image (3, H, W), by which an evaluation recognises training images.

    The pixels find a file that was renamed, moved or copied; the path, a file that was edited.
    """
    place = composed(os.path.realpath(path)).encode()
    return {hashlib.sha256(data).hexdigest()[:16] for data in (image.numpy().tobytes(), place)}


def choose_part(found, part, name):
    """Return the files of one part of your own data: "train", "val", "test" or "all".

    found: {folder: {class: [file]}}, with the folders of `part_folders`. The folders test/ and val/
    are these parts; val/ without test/ is test. Otherwise a hash of name(file) orders the files of
    a class: the first tenth becomes test and the last tenth val, at least one file each. So a new
    file moves at most one other file into or out of each part. "all": the folder of test, if there
    is one, else all files.
    """
    test, val = (sum(found[one].values(), []) if one in found else None for one in ("test", "val"))
    if test is None:
        test, val = val, None
    divided = found.get("train", found.get("", {}))
    if part == "all":
        return test or sum(divided.values(), [])
    parts = dict(train=[], val=val or [], test=test or [])
    for group, files in divided.items():
        order = sorted(files, key=lambda file: zlib.crc32(composed(name(file)).encode()))
        tenth = max(round(len(order) / 10), 1)
        n_test, n_val = tenth * (test is None), tenth * (val is None)
        if len(order) <= n_test + n_val:
            raise InputError(f"{group or 'the folder'} has {len(order)} images, expected at least "
                             f"{n_test + n_val + 1}: to train on, to choose best.pt, to test")
        last = len(order) - n_val
        parts["test"] += order[:n_test]
        parts["train"] += order[n_test:last]
        parts["val"] += order[last:]
    return parts[part]


def fingerprint(dataset):
    """Hash a data set: 16 hex digits that depend on its classes, labels, and images or files.

    Files count by name and size, and by their bytes; of more than 2,000 files, about 100 are read.
    """
    digest = hashlib.sha256()
    for name in ("images", "labels"):
        if hasattr(dataset, name):
            digest.update(getattr(dataset, name).cpu().numpy().tobytes())
    digest.update(json.dumps(list(dataset.classes)).encode())
    files = np.ravel(getattr(dataset, "files", []))
    step = len(files) // 100 if len(files) > 2000 else 1
    for i, path in enumerate(files):
        digest.update(f"{composed(os.path.basename(path))} {os.path.getsize(path)}".encode())
        if i % step == 0:
            with open(path, "rb") as file:
                digest.update(file.read())
    return digest.hexdigest()[:16]


# --- crops ----------------------------------------------------------------------------------------

def central_square(image, size, share=1.0, resample="bicubic"):
    """Crop the evaluation view: resize the short side to size / share, then crop the middle.

    image: (3, h, w) uint8. Returns (3, size, size) uint8, within 1 grey level of Pillow's result.
    """
    from torchvision.transforms.v2 import functional as F
    height, width = image.shape[1:]
    most = 2 * min(height, width)               # a resized 30000 x 1 image would need gigabytes
    image = F.center_crop(image, [min(height, most), min(width, most)])
    image = F.resize(image, [int(size / share)], F.InterpolationMode(resample), antialias=True)
    return F.center_crop(image, [size, size])


def random_crop_box(width, height, draw):
    """Choose the box (left, top, width, height) of a random resized crop.

    draw: 22 numbers in [0, 1). The area is uniform from 8 % to 100 % of the image, and the aspect
    ratio is log-uniform from 3:4 to 4:3. The first of ten tries that fits in the image is taken,
    else the largest central box with a ratio from 3:4 to 4:3.
    """
    low, high = 3 / 4, 4 / 3
    for a, b in zip(draw[:10], draw[10:20]):
        target = width * height * (0.08 + (1.0 - 0.08) * a)
        aspect = low * (high / low) ** b
        w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = draw[20] * (width - w + 1), draw[21] * (height - h + 1)
            return int(left), int(top), w, h
    w, h = min(width, round(height * high)), min(height, round(width / low))
    return (width - w) // 2, (height - h) // 2, w, h


# --- files that are not in memory -----------------------------------------------------------------

class ImageTree(Dataset):
    """Images in root/<split>/<class>/<file>, ImageNet's layout.

    tree[position, index] returns an image (3, size, size) uint8 and two ints, label and position.
    `index` chooses the file. train=True: a random resized crop, which depends on `position`, the
    sample's number in the whole run. train=False: `central_square`. Images are turned upright,
    unlike in torchvision's ImageFolder and timm. classes: names in label order (default: the
    folders). Every folder must be a class, and every class a folder unless subset=True.
    """
    hashes, resample = [], "bicubic"

    def __init__(self, root, split, classes=None, size=224, train=False, seed=0, crop=0.875,
                 subset=False):
        self.size, self.train, self.seed, self.crop = size, train, seed, crop
        folder = os.path.join(str(root), split) if root else ""
        files = list_images(folder)
        self.classes = list(files) if classes is None else list(classes)
        unknown = sorted(files.keys() - set(self.classes))
        missing = [] if subset else sorted(set(self.classes) - files.keys())
        if unknown or missing or not files:
            raise InputError(f"{folder} has {len(files)} folders with images, expected one per "
                             f"class; they differ: {', '.join(sorted(unknown + missing)[:5])}")

        # Use arrays: forked workers would copy a list, because they change reference counts.
        found = [(k, path) for k, name in enumerate(self.classes) for path in files.get(name, ())]
        self.labels = torch.tensor([k for k, _ in found])
        self.files = np.array([path for _, path in found])

    def __len__(self):
        return len(self.files)

    def __getitem__(self, key):
        return self.__getitems__([key])[0]

    def __getitems__(self, keys):
        """Load a batch, and draw its random numbers in one call. DataLoader calls this."""
        from torchvision.transforms.v2 import functional as F
        positions = torch.tensor([position for position, _ in keys])
        draws = uniform(positions, 22, self.seed, RANDOM_CROP).tolist()
        samples = []
        for (position, index), draw in zip(keys, draws):
            image = read_image(self.files[index])
            if self.train:
                left, top, w, h = random_crop_box(image.shape[2], image.shape[1], draw)
                image = F.resized_crop(image, top, left, h, w, [self.size, self.size],
                                       F.InterpolationMode(self.resample), antialias=True)
            else:
                image = central_square(image, self.size, self.crop, self.resample)
            samples.append((image, int(self.labels[index]), position))
        return samples


def image_batches(dataset, pairs, num_workers=4, device="cpu"):
    """Make a DataLoader of batches (images, labels, positions) on the CPU.

    pairs: an iterable of (position, index), (b,) int64 each. num_workers: processes; 0 loads the
    images in this process. device: the device that trains; for CUDA, the memory is pinned.
    """
    keys = (list(zip(position.tolist(), index.tolist())) for position, index in pairs)
    return DataLoader(dataset, batch_sampler=keys, num_workers=num_workers,
                      prefetch_factor=4 if num_workers else None,
                      pin_memory=torch.device(device).type == "cuda")
