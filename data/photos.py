"""Images of one's own, root/<class>/*.jpg: what counts, what is held out, what is evaluated."""

import io
import math
import os
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from common import InputError
from data.batches import Split, hold_out
from data.files import decode, name_hash, read_bytes, same_folder, scan_folders


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
            raise InputError(f"--data_dir {self.root} has no folder train: nothing to train on")
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
        raise InputError(f"--data_dir {root} has images in {', '.join(beside[:3])} beside class "
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
        raise InputError(f"--data_dir {root} is not a folder; expected {root}/<class>/*.jpg")
    parts = split_folders(root) or dict(train=root)
    found, others = {}, Counter()
    for split, folder in parts.items():
        found[split], more = scan_folders(folder)
        others += more
        classes = list(next(iter(found.values())))
        if len(classes) < 2:
            raise InputError(f"--data_dir {folder} has {len(classes)} class folders, expected 2 or "
                             f"more: {folder}/<class>/*.jpg")
        empty = [name for name, files in found[split].items() if not files]
        if empty:
            raise InputError(f"--data_dir {root}: no image in the class folder {empty[0]}")
        if list(found[split]) != classes:
            raise InputError(f"--data_dir {root}: train has the classes {', '.join(classes)}, "
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
        raise InputError(f"--data_dir {photos.root}: no image of the class "
                         f"{photos.classes[min(missing)]} can be read")
    if holdout:
        train, val = hold_out(train, holdout, torch.arange(len(train.labels)))
    if not len(val.labels):
        raise InputError(f"--data_dir {photos.root}: no readable image to evaluate on; --holdout N "
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


def warn_of_few(train):
    """Print a warning that names the classes with fewer than 5 training images, if any."""
    counts = train.labels.bincount(minlength=len(train.classes)).tolist()
    few = [f"{name} {count}" for name, count in zip(train.classes, counts) if count < 5]
    if few:
        print(f"warning: training images of {len(few)} of {len(counts)} classes are few "
              f"({', '.join(few[:5])}{', ...' * (len(few) > 5)}): from fewer than 5 of a class a "
              f"network learns little")


def photos_to_evaluate(root, trained, size, rank=0):
    """Load what an evaluation of a run with the flags `trained`, a dict, looks at in root: a Split.

    Of the folder that it was trained on this is what was held out, or val/; of another folder val/,
    or all of it.
    """
    photos, theirs = find_photos(root), trained.get("data_dir")
    own = trained.get("data") == "folder" and same_folder(theirs, root)
    holdout = trained.get("holdout", 0) if own else 0
    if holdout and holdout >= len(photos.train):
        raise InputError(f"--data_dir {root} has {len(photos.train)} images, but training held "
                         f"{holdout} of them out")
    if holdout:
        return load_photos(photos, size, holdout)[1]
    split = decode_all(photos.val or photos.train, photos.classes, size)
    if not len(split.labels):
        raise InputError(f"--data_dir {root}: no image can be read")
    if not photos.val and rank == 0:
        print(f"{root}: not the folder of training ({theirs or 'none'}): all of its "
              f"{len(split.labels)} images are evaluated", flush=True)
    return split
