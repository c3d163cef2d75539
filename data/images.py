"""Images: read files, list folders, hold images out, crop, and load batches.

A data set is a `Split`, whose images are in memory, or a Dataset like `ImageTree`, whose files are
decoded by the workers of a DataLoader.
"""

import hashlib
import json
import math
import os
import zlib
from functools import cache, partial
from typing import NamedTuple
from unicodedata import normalize

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from common import InputError
from data.rng import RANDOM_CROP, uniform

IMAGE_EXTENSIONS = (".jpeg", ".jpg", ".png", ".webp")


class Split(NamedTuple):
    """A small set of images, all in memory."""
    images: torch.Tensor                     # (N, 3, H, W) uint8
    labels: torch.Tensor                     # (N,) int64
    classes: list                            # class names, str; labels are indices into it
    masks: torch.Tensor | None = None        # scenes: (N, H, W) uint8, 0: none, k + 1: class k
    hashes: list = []                        # your own images: `marks` of every file

    def content(self):
        """Return what `fingerprint` hashes."""
        return self.images, self.labels, self.classes


def send(x, device):
    """Copy a small tensor or list to the device; the CPU does not wait."""
    return torch.as_tensor(x).to(device, non_blocking=True)


@cache
def constant(numbers, device):
    """Return a tuple of numbers as a tensor, which is copied to the device once."""
    return torch.tensor(numbers, device=device)


# --- files ----------------------------------------------------------------------------------------

def read_image(path):
    """Read an image file, upright by its EXIF data: (3, H, W) uint8 RGB. An error names the file.

    torchvision decodes JPEG files, because it is faster than Pillow and returns the same pixels.
    """
    from PIL import Image, ImageOps
    try:
        data = np.fromfile(path, np.uint8)
        if data[:3].tobytes() == b"\xff\xd8\xff":                           # JPEG
            from torchvision.io import ImageReadMode, decode_image
            return decode_image(torch.from_numpy(data), ImageReadMode.RGB,
                                apply_exif_orientation=True)
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
    folders = [entry for entry in entries(root) if os.path.isdir(entry.path)]
    found = {composed(entry.name): entry.path for entry in folders}
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


PARTS = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val",
         "test": "test"}


def part_folders(root):
    """Return {"train", "val" or "test": path} of the folders with these names, else {"": root}."""
    found = [(PARTS[name.lower()], path) for name, path in subfolders(root).items()
             if name.lower() in PARTS]
    if len(dict(found)) < len(found):
        raise InputError(f"{root} contains two folders for one part: {[path for _, path in found]}")
    return dict(found) or {"": root}


# --- held-out images ------------------------------------------------------------------------------

def name_hash(name):
    """Hash a name, equally on every system."""
    return zlib.crc32(composed(name).encode("utf-8", "surrogateescape"))


def file_hash(path):
    """Hash the bytes of a file: 16 hex digits."""
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()[:16]


def marks(path, image):
    """Return two hashes of an image (3, H, W), by which an evaluation recognises training images.

    The hash of the pixels finds a file that was renamed, moved or copied. The hash of the path
    finds a file that was edited or saved again.
    """
    place = composed(os.path.realpath(path)).encode("utf-8", "surrogateescape")
    return {hashlib.sha256(data).hexdigest()[:16] for data in (image.numpy().tobytes(), place)}


def choose_part(found, part, name):
    """Return the files of one part of your own data: "train", "val", "test" or "all".

    found: {folder: {class: [file]}}, with the folders of `part_folders`. val chooses best.pt, and
    test is reported. A hash of name(file) orders the files of a class: the first tenth becomes test
    and the last tenth val, at least one file each. So a new file moves at most one other file into
    or out of each part. The folder test/ replaces the first tenth, and val/ the last tenth; val/
    without test/ is reported as test. "all" is test/ or val/ if they exist, else all files.
    """
    given = {one: sum(found[one].values(), []) for one in ("test", "val") if one in found}
    if list(given) == ["val"]:
        given = {"test": given["val"]}
    divided = found.get("train", found.get("", {}))
    if part == "all":
        return given.get("test") or sum(divided.values(), [])
    if part in given:
        return given[part]
    chosen = []
    for group, files in divided.items():
        order = sorted(files, key=lambda file: name_hash(name(file)))
        tenth = max(round(len(order) / 10), 1)
        n_test, n_val = (0 if one in given else tenth for one in ("test", "val"))
        if len(order) <= n_test + n_val:
            raise InputError(f"{group or 'the folder'} has {len(order)} images, expected at least "
                             f"{n_test + n_val + 1}: to train on, to choose best.pt, to test")
        last = len(order) - n_val
        chosen += dict(test=order[:n_test], train=order[n_test:last], val=order[last:])[part]
    return chosen


def fingerprint(dataset):
    """Hash a data set: 16 hex digits that depend on its pixels or files, labels and class names.

    Its method `content` returns a tuple of tensors and lists. Files that are not in memory count by
    name and size, and some by their bytes.
    """
    digest = hashlib.sha256()
    for part in dataset.content():
        digest.update(part.cpu().numpy().tobytes() if isinstance(part, torch.Tensor)
                      else json.dumps(part).encode())
    return digest.hexdigest()[:16]


# --- crops ----------------------------------------------------------------------------------------

def central_square(image, size, share=1.0, resample="bicubic"):
    """Crop the evaluation view: resize the short side to size / share, then crop the middle.

    image: (3, h, w) uint8. Returns (3, size, size) uint8.
    """
    from torchvision.transforms.v2 import functional as F
    height, width = image.shape[1:]
    most = 2 * min(height, width)               # a resized 30000 x 1 image would need gigabytes
    image = F.center_crop(image, [min(height, most), min(width, most)])
    image = F.resize(image, [math.floor(size / share)], F.InterpolationMode(resample),
                     antialias=True)
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
    sample's number in the whole run. train=False: `central_square`; tree[index] suffices. The
    authors of ImageNet-C used resample="bilinear". Images are turned upright by their EXIF data,
    unlike in torchvision's ImageFolder and timm.
    classes: names in label order, from the training split (default: this split's folders). Every
    folder must be one of them, and every class must have a folder unless subset=True.
    """
    hashes = []

    def __init__(self, root, split, classes=None, size=224, train=False, seed=0, crop=0.875,
                 subset=False, resample="bicubic"):
        self.folder = os.path.join(str(root), split) if root else ""
        self.size, self.train, self.seed = size, train, seed
        self.crop, self.resample = crop, resample
        files = list_images(self.folder)
        if not files:
            raise InputError(f"there are no images in {self.folder}/<class>/")
        self.classes = list(files) if classes is None else list(classes)
        unknown = sorted(files.keys() - set(self.classes))
        missing = [] if subset else sorted(set(self.classes) - files.keys())
        if unknown or missing:
            raise InputError(f"the classes of {self.folder} and of the training differ: "
                             f"{', '.join((unknown + missing)[:5])}")

        # Use arrays: forked workers would copy a list, because they change reference counts.
        found = [(k, path) for k, name in enumerate(self.classes) for path in files.get(name, ())]
        self.labels = torch.tensor([k for k, _ in found])
        start = len(os.path.join(self.folder, ""))
        self.names = np.array([path[start:] for _, path in found])

    def __len__(self):
        return len(self.names)

    def path(self, index):
        return os.path.join(self.folder, self.names[index])

    def content(self):
        """Return what `fingerprint` hashes."""
        sizes = [os.path.getsize(self.path(i)) for i in range(len(self))]
        some = [file_hash(self.path(i)) for i in range(0, len(self), len(self) // 100 + 1)]
        return [composed(name) for name in self.names], sizes, some, self.labels, self.classes

    def load(self, index, draw):
        """Decode and crop one file: (3, size, size) uint8."""
        # The evaluation crop differs from Pillow's by at most 1 grey level. A training crop that is
        # enlarged differs by more than 1 grey level in 1 of 20,000 pixels.
        image = read_image(self.path(index))
        if not self.train:
            return central_square(image, self.size, self.crop, self.resample)
        from torchvision.transforms.v2 import functional as F
        left, top, width, height = random_crop_box(image.shape[2], image.shape[1], draw)
        return F.resized_crop(image, top, left, height, width, [self.size, self.size],
                              F.InterpolationMode(self.resample), antialias=True)

    def __getitem__(self, key):
        return self.__getitems__([key])[0]

    def __getitems__(self, keys):
        """Load a whole batch, and draw its random numbers in one call. DataLoader calls this."""
        keys = [(key, key) if isinstance(key, int) else key for key in keys]
        positions = torch.tensor([position for position, _ in keys])
        draws = uniform(positions, 22, self.seed, RANDOM_CROP).tolist()
        return [(self.load(index, draw), int(self.labels[index]), position)
                for (position, index), draw in zip(keys, draws)]


def collate(transform, samples):
    """Stack samples [(image, label, position)] and transform them; a worker calls this function."""
    images, labels, positions = default_collate(samples)
    return transform(images, positions) if transform else images, labels, positions


def image_batches(dataset, batches, num_workers=4, device="cpu", transform=None):
    """Make a DataLoader of batches (images, labels, positions) on the CPU.

    batches: an iterable of lists of keys (position, index). num_workers: processes; 0 loads the
    images in this process. device: the device that trains; for CUDA, the memory is pinned.
    transform: a function of a batch's (images, positions) that runs in the worker.
    """
    return DataLoader(dataset, batch_sampler=batches, num_workers=num_workers,
                      prefetch_factor=4 if num_workers else None,
                      pin_memory=torch.device(device).type == "cuda",
                      collate_fn=partial(collate, transform))
