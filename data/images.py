"""Images: read files, list folders, hold images out, crop, and load batches.

A data set is a `Split`, whose images are in memory, or a Dataset like `ImageTree`, whose files are
decoded by the workers of a DataLoader.
"""

import hashlib
import json
import math
import os
import sys
import zlib
from functools import cache
from itertools import chain
from typing import NamedTuple
from unicodedata import normalize

import numpy as np
import torch
from PIL import Image, ImageOps
from torch.utils.data import DataLoader, Dataset

from common import InputError
from data.rng import RANDOM_CROP, uniform

IMAGE_EXTENSIONS = (".jpeg", ".jpg", ".png", ".webp")
PARTS = {                                    # folders of your own data: the part
    "train": "train", "training": "train",
    "val": "val", "valid": "val", "validation": "val",
    "test": "test",
}


class Split(NamedTuple):
    """A small set of images, all in memory."""
    images: torch.Tensor                     # (N, 3, H, W) uint8
    labels: torch.Tensor                     # (N,) int64
    classes: list                            # class names, str; labels are indices into it
    masks: torch.Tensor | None = None        # scenes: (N, H, W) uint8, 0: none, k + 1: class k
    hashes: list = []                        # your own images: `image_hashes` of every file


def send(x, device):
    """Copy a tensor or list to the device; the CPU does not wait for the copy."""
    x = torch.as_tensor(x)
    if torch.device(device).type == "cuda" and x.device.type == "cpu":
        x = x.pin_memory()                   # the CPU waits while a GPU copies any other memory
    return x.to(device, non_blocking=True)


@cache
def constant(numbers, device):
    """Return a tuple of numbers as a tensor, which is copied to the device once."""
    return torch.tensor(numbers, device=device)


# --- files ----------------------------------------------------------------------------------------

def read_image(path):
    """Read an image file, upright by its EXIF data: (3, H, W) uint8 RGB. Errors name the file."""
    try:
        data = np.fromfile(path, np.uint8)
        if data[:3].tobytes() == b"\xff\xd8\xff":     # JPEG: decoded faster, into the same pixels
            from torchvision.io import decode_image
            data = torch.from_numpy(data)
            return decode_image(data, "RGB", apply_exif_orientation=True)
        image = ImageOps.exif_transpose(Image.open(path))
        if image.mode.startswith(("I", "F")):   # 16 or 32 bits, which Pillow would clip to 255
            raise ValueError("more than 8 bits per channel")
        pixels = np.array(image.convert("RGB"))
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
    except Exception as error:                  # Pillow and torchvision raise many types
        reason = str(error) or type(error).__name__
        raise InputError(f"cannot read {path}: {reason}") from None


def composed_name(name):
    """Return a name in Unicode's composed form with /, so that it is the same on every system."""
    return normalize("NFC", str(name).replace(os.sep, "/"))


def entries(folder):
    """List what a folder contains as os.DirEntry, sorted by name, without hidden names."""
    folder = folder or ""                       # None: the user gave no --data_dir
    if not os.path.isdir(folder):
        raise InputError(f"there is no folder {folder!r}; --data_dir selects it")
    with os.scandir(folder) as scanned:
        visible = [entry for entry in scanned if not entry.name.startswith(".")]

    def sort_key(entry):
        return composed_name(entry.name)

    return sorted(visible, key=sort_key)


def file_entries(folder, endings=IMAGE_EXTENSIONS):
    """List the files directly inside a folder as os.DirEntry, broken links too."""
    named = [entry for entry in entries(folder) if entry.name.lower().endswith(endings)]
    return [entry for entry in named if entry.is_file() or entry.is_symlink()]


def class_entries(folder):
    """List the images of a class, the files directly inside its folder, as os.DirEntry."""
    images = file_entries(folder)
    if not images:                                      # else the class would vanish
        expected = ", ".join(IMAGE_EXTENSIONS)
        raise InputError(f"{folder} contains no image, expected {expected}; convert its "
                         f"files, or move the folder elsewhere")
    return images


def subfolders(root):
    """Return {name: path} of the folders and linked folders in a folder."""
    paths = [entry.path for entry in entries(root) if entry.is_dir()]
    folders = {composed_name(os.path.basename(path)): path for path in paths}
    if len(folders) < len(paths):                       # one class would replace another
        raise InputError(f"{root} contains two folders with one name in different forms of "
                         f"Unicode; rename one of them")
    return folders


def walk_images(folder, visited=None):
    """List the images in a folder and in its subfolders.

    Every folder is listed once, even if several links lead to it.
    visited: a set, the real paths of the folders that are already listed; this call adds to it.
    """
    visited = set() if visited is None else visited
    visited.add(os.path.realpath(folder))
    inner = []
    for inside in subfolders(folder).values():
        if os.path.realpath(inside) not in visited:
            inner += walk_images(inside, visited)
    return [entry.path for entry in file_entries(folder)] + inner


def part_folders(root):
    """Return {part: path} of the folders in root whose names are in PARTS, or else {"": root}."""
    folders = {}
    for name, path in subfolders(root).items():
        part = PARTS.get(name.lower())
        if part is None:
            continue
        if part in folders:
            raise InputError(f"{root} contains two folders for one part: {folders[part]}, "
                             f"{path}")
        folders[part] = path
    return folders or {"": root}


# --- held-out images ------------------------------------------------------------------------------

def hash_pixels(image):
    """Hash the pixels of an image, a tensor: 16 hex digits."""
    data = image.contiguous().flatten().numpy()
    return hashlib.sha256(data).hexdigest()[:16]


def image_hashes(path, image):
    """Return two hashes of an image (3, H, W), by which an evaluation recognises training images.

    The hash of the pixels recognises a file that was renamed, moved or copied. The hash of the path
    recognises a file that was edited.
    """
    place = composed_name(os.path.realpath(path)).encode()
    return {hash_pixels(image), hashlib.sha256(place).hexdigest()[:16]}


def hash_file(path):
    """Return `hash_pixels` of an image file, or None if the file cannot be read."""
    try:
        status = os.stat(path)
    except OSError:                                     # a broken link
        return None
    return hash_file_version(path, status.st_size, status.st_mtime_ns)


@cache
def hash_file_version(path, size, time):
    """Compute `hash_file` once per version of a file.

    size, time: the file's size and modification time. A changed file has other values, so the cache
    does not contain it, and it is decoded again.
    """
    try:
        return hash_pixels(read_image(path))
    except InputError:
        return None


class File(NamedTuple):
    """One of your own images."""
    path: str
    name: str                                # orders the files of a class, see choose_part
    class_name: str = ""                     # images with masks have no class
    mask_path: str | None = None


def folder_of_test(groups):
    """Return the folder of the test images: "test", else "val"; None if there is neither.

    groups: see choose_part.
    """
    for folder in ("test", "val"):
        if folder in groups:
            return folder
    return None


def files_to_divide(groups):
    """Return the Files in train/, or else in the only folder. groups: see choose_part."""
    return groups.get("train", groups.get("", []))


def choose_part(groups, part):
    """Return the Files of one part of your own data: "train", "val", "test" or "all".

    groups: {folder: [File]}, with the folders of `part_folders`.
    The files to divide are those in train/, or in the only folder.
    "test": the folder test/, else val/, else a tenth of the files to divide.
    "val": the folder val/ if there is also test/, else a tenth of the files to divide.
    "train": the rest of the files to divide.
    "all": the files of test, if it has a folder, else all files.

    A hash of their names orders the files of a class; the first tenth becomes test and the last
    tenth val, at least one file each. So a new file moves at most one other file into or out of
    each part. Files with equal pixels count once, and go into one part.
    """
    parts = dict(train=[], val=[], test=[])
    test_folder = folder_of_test(groups)
    if test_folder:
        parts["test"] = groups[test_folder]
    has_own_val = test_folder == "test" and "val" in groups
    if has_own_val:
        parts["val"] = groups["val"]
    to_divide = files_to_divide(groups)
    if part == "all":
        return parts["test"] or to_divide

    def name_hash(file):
        return zlib.crc32(composed_name(file.name).encode())

    def content_of(file):
        return hash_file(file.path) or file.path      # an unreadable file has no copy

    classes = {}                                        # {class: [File]}
    for file in to_divide:
        classes.setdefault(file.class_name, []).append(file)
    part_of = {}                                        # {content: part}
    for class_name, files in classes.items():
        order = sorted(files, key=name_hash)
        contents = dict.fromkeys(content_of(file) for file in order)    # each one once
        unassigned = [content for content in contents if content not in part_of]
        tenth = max(round(len(unassigned) / 10), 1)
        n_test = 0 if test_folder else tenth
        n_val = 0 if has_own_val else tenth
        if len(unassigned) <= n_test + n_val:
            least = n_test + n_val + 1
            raise InputError(f"{class_name or 'the folder'} has {len(unassigned)} images, expected "
                             f"at least {least} different ones, for the training, the choice "
                             f"of best.pt and the test")
        last = len(unassigned) - n_val
        part_of.update(dict.fromkeys(unassigned[:n_test], "test"))
        part_of.update(dict.fromkeys(unassigned[n_test:last], "train"))
        part_of.update(dict.fromkeys(unassigned[last:], "val"))
        for file in order:
            parts[part_of[content_of(file)]].append(file)
    return parts[part]


def fingerprint(dataset):
    """Hash a data set: 16 hex digits that depend on its classes, labels, and images or files.

    The hash covers the name and the size of every file, and the bytes of every file. Of more than
    2,000 files, it covers the bytes of about 100 only, because reading all of them would take long.
    """
    # A Split has images and labels. An ImageTree has labels, files and sizes. A SegTree has pairs
    # of files.
    digest = hashlib.sha256()
    for name in ("images", "labels"):
        if hasattr(dataset, name):
            array = getattr(dataset, name).cpu().numpy()
            digest.update(np.ascontiguousarray(array).reshape(-1))
    names = json.dumps(list(dataset.classes))
    digest.update(names.encode())

    files = getattr(dataset, "files", [])
    if len(files) and not isinstance(files[0], (str, os.PathLike)):     # pairs: image, mask
        files = list(chain.from_iterable(files))
    sizes = getattr(dataset, "sizes", None)             # of ImageTree, from its listing
    if sizes is None:
        sizes = [os.path.getsize(path) for path in files]
    step = len(files) // 100 if len(files) > 2000 else 1
    for i, (path, size) in enumerate(zip(files, sizes)):
        text = f"{composed_name(os.path.basename(path))} {size}"
        digest.update(text.encode())
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
    mode = F.InterpolationMode(resample)
    image = F.resize(image, [int(size / share)], mode, antialias=True)
    return F.center_crop(image, [size, size])


def random_crop_box(width, height, draw):
    """Choose the box (left, top, width, height) of a random resized crop.

    draw: 22 numbers in [0, 1). The area is uniform from 8 % to 100 % of the image, and the aspect
    ratio is log-uniform from 3:4 to 4:3. The first of ten tries that fits in the image is taken,
    else the largest central box with a ratio from 3:4 to 4:3.
    """
    narrow = 3 / 4                              # the smallest and the largest width / height
    wide = 4 / 3
    for share, stretch in zip(draw[:10], draw[10:20]):
        area = width * height * (0.08 + (1.0 - 0.08) * share)
        aspect = narrow * (wide / narrow) ** stretch
        w = round(math.sqrt(area * aspect))
        h = round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left = int(draw[20] * (width - w + 1))
            top = int(draw[21] * (height - h + 1))
            return left, top, w, h
    w = min(width, round(height * wide))
    h = min(height, round(width / narrow))
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
    hashes = []                     # `image_hashes` are for your own images, in a Split

    def __init__(self, root, split, classes=None, size=224, train=False, seed=0, crop=0.875,
                 subset=False, resample="bicubic"):
        if not root:
            raise InputError(f"there is no --data_dir; expected the folder that contains {split}/")
        self.resample = resample
        self.size = size
        self.train = train
        self.seed = seed
        self.crop = crop
        folder = os.path.join(str(root), split)
        folders = subfolders(folder)
        self.classes = list(folders) if classes is None else list(classes)
        unknown = folders.keys() - set(self.classes)
        missing = set() if subset else set(self.classes) - folders.keys()
        if unknown or missing or not folders:
            differ = ", ".join(sorted(unknown | missing)[:5])
            raise InputError(f"{folder} has {len(folders)} folders, expected one per class "
                             f"with its images; they differ: {differ}")

        # Store the folder once per class, and the names in an array of bytes: this needs little
        # memory. With a list of strings, every worker would get its own copy of the list, because
        # Python writes a reference count into each string that it reads.
        self.folders = [folders.get(name) for name in self.classes]
        labels = []
        names = []
        sizes = []
        for k, class_folder in enumerate(self.folders):
            images = class_entries(class_folder) if class_folder else []
            labels += [k] * len(images)
            encoded = [os.fsencode(image.name) for image in images]
            names.append(np.array(encoded, dtype=bytes))
            sizes += [image.stat().st_size for image in images]
        self.labels = torch.tensor(labels)
        self.names = np.concatenate(names)
        self.sizes = np.array(sizes)

    @property
    def files(self):
        """The paths of all images, as a new list."""
        pairs = zip(self.labels.tolist(), self.names.tolist())
        return [os.path.join(self.folders[k], os.fsdecode(name)) for k, name in pairs]

    def path(self, index):
        """Return the path of one image."""
        folder = self.folders[self.labels[index]]
        return os.path.join(folder, os.fsdecode(self.names[index]))

    def __len__(self):
        return len(self.names)

    def __getitem__(self, key):
        return self.__getitems__([key])[0]

    def __getitems__(self, keys):
        """Load a batch, and draw its random numbers in one call. DataLoader calls this."""
        from torchvision.transforms.v2 import functional as F
        mode = F.InterpolationMode(self.resample)
        square = [self.size, self.size]
        positions = torch.tensor([position for position, _ in keys])
        draws = uniform(positions, 22, self.seed, RANDOM_CROP).tolist()
        samples = []
        for (position, index), draw in zip(keys, draws):
            image = read_image(self.path(index))
            if self.train:
                left, top, w, h = random_crop_box(image.shape[2], image.shape[1], draw)
                image = F.resized_crop(image, top, left, h, w, square, mode, antialias=True)
            else:
                image = central_square(image, self.size, self.crop, self.resample)
            samples.append((image, int(self.labels[index]), position))
        return samples


def image_batches(dataset, pairs, num_workers=4, device="cpu"):
    """Make a DataLoader of batches of what `dataset` returns for (position, index) on the CPU.

    pairs: an iterable of (position, index), (b,) int64 each. num_workers: processes; 0 loads the
    images in this process. device: the device that trains; for CUDA, the memory is pinned.
    """
    keys = (list(zip(position.tolist(), index.tolist())) for position, index in pairs)
    workers = dict(num_workers=num_workers)
    if num_workers:
        workers["prefetch_factor"] = 4
        if sys.platform == "linux":             # a fork shares the file names and the imports
            workers["multiprocessing_context"] = "fork"
    pin_memory = torch.device(device).type == "cuda"
    return DataLoader(dataset, batch_sampler=keys, pin_memory=pin_memory, **workers)
