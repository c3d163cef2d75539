"""Images for a classifier: folders of one's own, ImageNet's layout, what the flags of a run mean.

Small sets are a `Split`, all of it in memory as uint8. Large ones are an `ImageTree`, whose files
are decoded and cropped by DataLoader workers. What follows the crop happens in batches: on the
device, or where that is the CPU, partly in the workers. Every random number is a function of (seed,
sample), see rng.py: no worker, batch or process matters.
"""

import io
import math
import os
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from tqdm import tqdm

from data.files import Split, decode, name_hash, read_bytes, same_folder, scan_folders
from data.rng import epoch_order, uniform
from data.shapes import load_shapes

CROP = 12                                    # what a random number is for: the last part of its key


# --- images of one's own --------------------------------------------------------------------------

class Photos(NamedTuple):
    """What find_photos has found: the files to train on, and those of val/, if there is one."""
    classes: list
    train: list                              # [(path, label)]
    val: list
    root: str
    notes: str = ""                          # what a user should know of it

    def median_side(self, n=200):
        """Measure the median short side in pixels of some training images, by their headers."""
        from PIL import Image
        sides = []
        for path, _ in self.train[::math.ceil(len(self.train) / n)]:
            try:
                sides.append(min(Image.open(io.BytesIO(read_bytes(path))).size))
            except (OSError, ValueError, Image.DecompressionBombError):
                continue                     # broken, or too large for PIL, which decode is not
        return float(np.median(sides)) if sides else 0.0

    def recipe(self, n):
        """Choose flags to train on n of these images: about 3,000 steps, 64 patches an image."""
        if not self.train:
            raise ValueError(f"--data_dir {self.root} has no folder train: nothing to train on")
        side = self.median_side()
        size = max(s for s in (32, 64, 96) if s == 32 or s <= side)
        batch = max(b for b in (2, 4, 8, 16, 32, 64) if b == 2 or 5 * b <= n)
        epochs = min(max(3000 * batch // max(n, 1), 8), 200)
        return dict(model="nano" if n < 20_000 else "micro", image_size=size, patch_size=size // 8,
                    epochs=epochs, batch_size=batch, pad=size // 8)


def split_folders(root):
    """Find {"train": folder, "val": folder} in root; {} where its folders are classes.

    train/, val/ or test/ is a split if it holds folders, else a class of that name. test/ is taken
    where there is no val/. Raises ValueError where there are classes beside the splits.
    """
    def holds_folders(path):
        return path.is_dir() and any(p.is_dir() and p.name[0] != "." for p in path.iterdir())

    there = {name: Path(root, name) for name in ("train", "val", "test")}
    there = {name: str(path) for name, path in there.items() if holds_folders(path)}
    if not there.keys() - {"train"}:
        return there
    folders = dict(val=there.get("val") or there["test"])
    if "train" in there:
        return dict(train=there["train"], **folders)
    beside = [name for name, images in scan_folders(root)[0].items() if images]
    if beside:
        raise ValueError(f"--data_dir {root} has images in {', '.join(beside[:3])} beside class "
                         f"folders in {folders['val']}; expected {root}/train/<class>/*.jpg")
    return folders


def find_photos(root):
    """Find the images of root/<class>/*, or of root/train/<class>/* and root/val/<class>/*.

    Where there is no val/, test/ is taken for it; either may be there alone, to evaluate on.
    Returns Photos. Raises FileNotFoundError or ValueError, one line: no folder, one class, a class
    without images.
    """
    root = str(root)
    if not os.path.isdir(root):
        raise FileNotFoundError(f"--data_dir {root} is not a folder; expected {root}/<class>/*.jpg")
    parts = split_folders(root) or dict(train=root)
    found, others = {}, Counter()
    for split, folder in parts.items():
        found[split], more = scan_folders(folder)
        others += more
        classes = list(next(iter(found.values())))
        if len(classes) < 2:
            raise ValueError(f"--data_dir {folder} has {len(classes)} class folders, expected 2 or "
                             f"more: {folder}/<class>/*.jpg")
        empty = [name for name, files in found[split].items() if not files]
        if empty:
            raise ValueError(f"--data_dir {root}: no image in the class folder {empty[0]}")
        if list(found[split]) != classes:
            raise ValueError(f"--data_dir {root}: train has the classes {', '.join(classes)}, "
                             f"{os.path.basename(folder)} {', '.join(found[split])}")

    notes = ""
    if others:
        kinds = ", ".join(sorted(kind or "without ending" for kind in others))
        notes = f", {others.total()} other files left out ({kinds})"
    if parts.get("val", "").endswith("test"):
        notes += ", test/ taken for val/"
    lists = {split: [(os.path.join(folder, name, file), classes.index(name))
                     for name in classes for file in found[split][name]]
             for split, folder in parts.items()}
    return Photos(classes, lists.get("train", []), lists.get("val", []), root, notes)


def load_photos(photos, size, holdout=0):
    """Decode what find_photos has found: (training Split, evaluation Split, unreadable files).

    Each is resized to `size` on its short side and cropped. holdout: so many training images, the
    same ones each time, are held out to evaluate on; 0: the val folder is for that.
    """
    order = sorted(photos.train, key=lambda file: name_hash(os.path.relpath(file[0], photos.root)))
    train, val = (decode_all(files, photos.classes, size) for files in (order, photos.val))
    bad = len(photos.train) + len(photos.val) - len(train.labels) - len(val.labels)
    missing = set(range(len(photos.classes))) - set(train.labels.tolist())
    if missing:
        raise ValueError(f"--data_dir {photos.root}: no image of the class "
                         f"{photos.classes[min(missing)]} can be read")
    if holdout:
        train, val = hold_out(train, holdout, torch.arange(len(train.labels)))
    if not len(val.labels):
        raise ValueError(f"--data_dir {photos.root}: no readable image to evaluate on; --holdout N "
                         f"takes N of the training images")
    return train, val, bad


def decode_all(files, classes, size):
    """Load the files that can be read, resized to `size` on the short side and cropped: a Split."""
    from torchvision.transforms.v2 import functional as F
    images, labels = [], []
    for path, label in tqdm(files, "decoding", leave=False, disable=len(files) < 500):
        try:
            image = decode(read_bytes(path), path)
        except (ValueError, OSError) as error:
            tqdm.write(f"skipping: {error}")
            continue
        image = F.resize(image, [size], F.InterpolationMode.BICUBIC, antialias=True)
        images.append(F.center_crop(image, [size, size]))
        labels.append(label)
    images = torch.stack(images) if images else torch.empty(0, 3, size, size, dtype=torch.uint8)
    return Split(images, torch.tensor(labels, dtype=torch.int64), list(classes))


def hold_out(split, n, order=None):
    """Split into (the rest, n held out): the first in `order`; by default a fixed random one."""
    if not 0 < n < len(split.labels):
        raise ValueError(f"--holdout {n}: there are {len(split.labels)} training images")
    order = epoch_order(len(split.labels), 0, seed=0) if order is None else order
    parts = (order[n:], order[:n])
    return tuple(Split(split.images[part], split.labels[part], split.classes) for part in parts)


# --- ImageNet's layout ----------------------------------------------------------------------------

def random_crop_box(width, height, draw, area=(0.08, 1.0), ratio=(3 / 4, 4 / 3)):
    """Choose the box (left, top, width, height) of a random resized crop, inside the image.

    draw: 22 numbers in [0, 1). Area uniform, aspect ratio log-uniform; ten tries to fit in the
    image, then the largest central box of legal ratio.
    """
    for a, b in zip(draw[:10], draw[10:20]):
        target = width * height * (area[0] + (area[1] - area[0]) * a)
        aspect = ratio[0] * (ratio[1] / ratio[0]) ** b
        w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = draw[20] * (width - w + 1), draw[21] * (height - h + 1)
            return int(left), int(top), w, h
    w, h = min(width, round(height * ratio[1])), min(height, round(width / ratio[0]))
    return (width - w) // 2, (height - h) // 2, w, h


class ImageTree(Dataset):
    """Images in root/<split>/<class>/<file>, as ImageNet has them; tree[position, index] is one.

    `index` says which file, `position` (the sample's number in the whole run) which random crop.
    Returns the image (3, size, size) uint8, its label and position, ints. train: random resized
    crop. Otherwise: short side resized to size / crop_pct, then the central crop, and tree[index]
    will do. Both bicubic, antialiased; resample="bilinear" is how ImageNet-C was resized.

    classes: class names in label order, from the training split; by default this split's folders,
    sorted. With them, every folder must be one of the classes, and every class must have a folder
    unless subset=True. skip_bad_images: instead of an error, training takes the next readable file
    (mostly the same class), so that batches stay full; evaluation returns a black image with label
    -1, to be left out of the count.
    Raises FileNotFoundError and ValueError, one line that names the folder or file.
    """

    def __init__(self, root, split, classes=None, size=224, train=False, seed=0,
                 skip_bad_images=False, crop_pct=0.875, subset=False, resample="bicubic"):
        self.folder = os.path.join(str(root), split)
        self.size, self.train, self.seed, self.skip_bad_images = size, train, seed, skip_bad_images
        self.resize, self.resample = math.floor(size / crop_pct), resample
        self.skipped = torch.zeros(1, dtype=torch.int64).share_memory_()  # by all workers
        if not os.path.isdir(self.folder):
            raise FileNotFoundError(f"--data_dir {root} has no folder {split!r}; expected "
                                    f"{self.folder}/<class>/*.JPEG")
        files, _ = scan_folders(self.folder)
        self.classes = list(files) if classes is None else list(classes)
        self.check(files, subset)

        # arrays, not lists of a million str, which forked workers copy as they count references
        names = [(k, file) for k, name in enumerate(self.classes) for file in files.get(name, ())]
        self.labels = torch.tensor([k for k, _ in names])
        self.names = np.array([os.fsencode(file) for _, file in names])

    def check(self, files, subset):
        """Raise ValueError unless the class folders, {name: files}, are those of self.classes."""
        unknown = sorted(set(files) - set(self.classes))
        missing = sorted(set(self.classes) - set(files))
        problems = {"has class folders that the training split has not": unknown,
                    "lacks class folders of the training split": [] if subset else missing,
                    "has class folders without images": sorted(k for k in files if not files[k])}
        for problem, names in problems.items():
            if names:
                more = f" and {len(names) - 5} more" if len(names) > 5 else ""
                raise ValueError(f"--data_dir {self.folder} {problem}: "
                                 f"{', '.join(names[:5])}{more}")
        if not files:
            raise ValueError(f"--data_dir {self.folder} is empty; expected "
                             f"{self.folder}/<class>/*.JPEG")

    def __len__(self):
        return len(self.names)

    def path(self, index):
        name = os.fsdecode(self.names[index])
        return os.path.join(self.folder, self.classes[self.labels[index]], name)

    def load(self, index, draw):
        """Decode and crop one file: (3, size, size) uint8."""
        # 1.0 ms per ImageNet file of 500 x 375 on one core; with PIL's decoder and resize 2.0 ms.
        # Beside those the evaluation crop differs by at most 1 grey level, an enlarging training
        # crop by more in 1 pixel of 20,000.
        from torchvision.transforms.v2 import functional as F
        path, resample = self.path(index), F.InterpolationMode(self.resample)
        image = decode(read_bytes(path), path)
        if self.train:
            left, top, width, height = random_crop_box(image.shape[2], image.shape[1], draw)
            return F.resized_crop(image, top, left, height, width, [self.size, self.size], resample,
                                  antialias=True)
        image = F.resize(image, [self.resize], resample, antialias=True)
        return F.center_crop(image, [self.size, self.size])

    def __getitem__(self, key):
        return self.__getitems__([key])[0]

    def __getitems__(self, keys):
        """Load a whole batch for DataLoader: its random numbers are drawn in one call."""
        keys = [(key, key) if isinstance(key, int) else key for key in keys]
        positions = torch.tensor([position for position, _ in keys])
        draws = uniform(positions, 22, self.seed, CROP).tolist()
        return [self.load_or_skip(*key, draw) for key, draw in zip(keys, draws)]

    def load_or_skip(self, position, index, draw):
        """Load one (image, label, position); what happens to an unreadable file, see the class."""
        for i in range(index, index + len(self)):
            i = i % len(self)
            try:
                return self.load(i, draw), int(self.labels[i]), position
            except (ValueError, OSError) as error:
                if not self.skip_bad_images:
                    raise ValueError(f"{error}; --skip_bad_images goes on without such "
                                     f"files") from None
                print(f"skipping: {error}", flush=True)
                if not self.train:
                    return torch.zeros(3, self.size, self.size, dtype=torch.uint8), -1, position
                self.skipped += 1
        raise ValueError(f"--data_dir {self.folder}: none of the {len(self)} images can be read")


# --- what a run is trained and evaluated on -------------------------------------------------------

def load_data(args, device, rank=0):
    """Load the training and evaluation set, Splits on the device or ImageTrees; describe them."""
    if args.data in ("cifar10", "imagenet") and not args.data_dir:
        raise ValueError(f"--data {args.data} needs --data_dir")
    notes = ""
    if args.data == "imagenet":
        if args.holdout:
            raise ValueError("--holdout does not go with --data imagenet: make a val folder "
                             "instead")
        how = dict(size=args.image_size, seed=args.seed, skip_bad_images=args.skip_bad_images)
        train = ImageTree(args.data_dir, "train", train=True, **how)
        test = ImageTree(args.data_dir, "val", classes=train.classes, **how)
    elif args.data == "folder":
        photos = find_photos(args.data_dir)
        train, test, bad = load_photos(photos, args.image_size, args.holdout)
        notes = f", {bad} unreadable files{photos.notes}"
    elif args.data == "cifar10":
        from data.cifar import load_cifar10
        if args.download and rank == 0:
            load_cifar10(args.data_dir, "train", download=True)
        if dist.is_initialized():
            dist.barrier()                                          # the others wait for it
        train, test = (load_cifar10(args.data_dir, split) for split in ("train", "test"))
        if args.image_size != 32:
            raise ValueError(f"--image_size {args.image_size}: CIFAR-10 images have 32 pixels")
    else:
        train = load_shapes("train", args.num_images, args.image_size, device=device)
        test = load_shapes("test", max(args.num_images // 5, 1), args.image_size, device=device)

    if args.holdout and args.data != "folder":
        train, test = hold_out(train, args.holdout)
    if args.data != "imagenet":
        train, test = (Split(split.images.to(device), split.labels.to(device), split.classes)
                       for split in (train, test))
    if rank == 0:
        if args.data == "folder":
            warn_of_few(train)
        print(f"{args.data}: {len(train.labels)} training, {len(test.labels)} {split_name(args)} "
              f"images, {len(train.classes)} classes{notes}", flush=True)
    return train, test


def warn_of_few(train):
    """Print a warning for classes that have no training image, or a single one."""
    counts = train.labels.bincount(minlength=len(train.classes)).tolist()
    for name, count in zip(train.classes, counts):
        if not count:
            print(f"warning: no image of the class {name} is left to train on, all are held out "
                  f"(--holdout)")
    single = [name for name, count in zip(train.classes, counts) if count == 1]
    if single:
        print(f"warning: a single training image in {len(single)} of {len(counts)} classes "
              f"({', '.join(single[:3])}{', ...' * (len(single) > 3)}): too few to learn from")


def split_name(args):
    """Name what a run is evaluated on."""
    if args.holdout:
        return "held-out"
    return "val" if args.data in ("folder", "imagenet") else "test"


def load_test(args, trained, size, classes):
    """Load what to evaluate on: a Split on args.device or an ImageTree, images of `size` pixels.

    args: its data and data_dir. trained: the flags of the run, as a dict. classes: ImageNet's.
    Of the folder that the run was trained on it is what was held out, or val/; of another folder
    val/, or all of it.
    """
    if args.data == "shapes":
        few = max(trained.get("num_images", 16000) // 5, 1)
        return load_shapes("test", few, size, device=args.device)
    if not args.data_dir:
        raise ValueError(f"--data {args.data} needs --data_dir")
    if args.data == "imagenet":
        return ImageTree(args.data_dir, "val", classes=classes, size=size)
    if args.data == "cifar10":
        from data.cifar import load_cifar10
        source = load_cifar10(args.data_dir, "test")
    else:
        photos, theirs = find_photos(args.data_dir), trained.get("data_dir")
        own = trained.get("data") == "folder" and same_folder(theirs, args.data_dir)
        holdout = trained.get("holdout", 0) if own else 0
        if holdout:
            if holdout >= len(photos.train):
                raise ValueError(f"--data_dir {args.data_dir} has {len(photos.train)} images, but "
                                 f"training held {holdout} of them out")
            source = load_photos(photos, size, holdout)[1]
        else:
            source = decode_all(photos.val or photos.train, photos.classes, size)
            if not photos.val and getattr(args, "rank", 0) == 0:
                print(f"{args.data_dir}: not the folder of training ({theirs or 'none'}): all of "
                      f"its {len(source.labels)} images are evaluated", flush=True)
        if not len(source.labels):
            raise ValueError(f"--data_dir {args.data_dir}: no image can be read")
    return Split(source.images.to(args.device), source.labels.to(args.device), source.classes)
