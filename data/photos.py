"""Images of one's own, root/<class>/*.jpg, or root/train/<class>/* and root/val/<class>/*."""

import os
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from statistics import median

import torch
from tqdm import tqdm

from common import InputError, print0
from data.batches import Split
from data.decode import name_hash, read_image, scan_folders


def find_photos(root, quiet=False):
    """Find the images: (class names, {"train": [(path, label)], "val": [...]}).

    Without a folder val/ all are "train". Raises InputError at fewer than two classes.
    """
    folders = dict(train=root, val=None)
    if Path(root, "val").is_dir():
        folders = dict(train=Path(root, "train"), val=Path(root, "val"))
    found = {split: scan_folders(folder, quiet) if folder and os.path.isdir(folder) else {}
             for split, folder in folders.items()}
    classes = sorted({*found["train"], *found["val"]})
    if len(classes) < 2:
        raise InputError(f"--data_dir {root} has {len(classes)} folders with images, expected 2 or "
                         f"more: {root}/<class>/*.jpg")
    return classes, {split: [(path, classes.index(name)) for name in paths for path in paths[name]]
                     for split, paths in found.items()}


# --- what is held out, what is chosen -------------------------------------------------------------

def by_names(files, root):
    """Order [(path, label)] by a hash of their names: a file that comes or goes moves no other."""
    return sorted(files, key=lambda file: name_hash(os.path.relpath(file[0], root)))


def held_out(files, n):
    """Choose n of the files [(path, label)], in the order of `by_names`: a set.

    First one of every class, then as large a share of each; a class keeps one to train on.
    """
    classes = defaultdict(list)
    for file in files:
        classes[file[1]].append(file)
    place = {}                              # smaller: sooner
    for own in classes.values():
        for i, file in enumerate(own):
            place[file] = i + 1 == len(own), i > 0, (i + 0.5) / len(own)
    return {*sorted(files, key=place.get)[:n]}


def fifth(files):
    """Count a fifth of each class, at least one where there are two: so many are held out."""
    counts = torch.tensor([label for _, label in files]).bincount().tolist()
    return sum(min(max(round(count / 5), 1), count - 1) for count in counts if count)


def choose(args):
    """Choose for a folder of photos what args leave open (None): {flag: value}; prints it."""
    classes, files = find_photos(args.data_dir, quiet=True)
    holdout = args.holdout
    if holdout is None:
        holdout = 0 if files["val"] else fifth(files["train"])
    chosen = recipe(len(files["train"]) - holdout, median_side(files["train"][::7]))
    chosen.update(holdout=holdout, pad=(args.image_size or chosen["image_size"]) // 8)
    chosen = {name: value for name, value in chosen.items() if getattr(args, name) is None}
    if chosen:
        print0(f"{args.data_dir}: {len(files['train'] + files['val'])} images in {len(classes)} "
               f"classes; chosen for them: {' '.join(f'{k}={v}' for k, v in chosen.items())}")
    return chosen


def recipe(n, side):
    """Choose flags to train on n images, their median short side in pixels: 64 patches an image.

    Epochs: 1.8 sqrt(n), so that few images are not learned by heart (the table in docs/data.md),
    and no more than 3,000 steps.
    """
    size = max(s for s in (32, 64, 96) if s == 32 or s <= side)
    batch = max(b for b in (2, 4, 8, 16, 32, 64) if b == 2 or 5 * b <= n)
    epochs = max(min(round(1.8 * n ** 0.5), 3000 * batch // max(n, 1)), 8)
    return dict(model="nano" if n < 20_000 else "micro", image_size=size, patch_size=size // 8,
                epochs=epochs, batch_size=batch)


def median_side(files):
    """Measure the median short side in pixels of image files, by their headers; 0: none is read."""
    from PIL import Image
    sides = []
    for path, _ in files[:200]:
        with suppress(OSError), Image.open(path) as image:          # what is broken, decode names
            sides.append(min(image.size))
    return median(sides) if sides else 0


# --- images ---------------------------------------------------------------------------------------

def load_photos(root, split, size, holdout=0):
    """Load "train" or "test" of a folder: resized to `size` on the short side, cropped; a Split.

    "test": the `holdout` images of `held_out`; without holdout val/, or all.
    """
    classes, files = find_photos(root, quiet=split == "train")
    order = by_names(files["train"], root)
    held = held_out(order, holdout)
    wanted = [file for file in order if (file in held) == (split == "test")]
    if split == "test" and not held:
        wanted = files["val"] or order
    found = decode_all(wanted, classes, size)
    missing = set(range(len(classes))) - set(found.labels.tolist())
    if not len(found.labels) or split == "train" and missing:
        inner = "val" if split == "test" and not held else "train"
        folder = Path(root, inner) if files["val"] else root
        raise InputError(f"--data_dir {root}: no image of {classes[min(missing)]} can be read in "
                         f"{folder} to {split} on")
    if wanted is order:
        print0(f"{root}: nothing of it was held out: all of its {len(order)} images are evaluated")
    return found


def square(image, size):
    """Make (3, h, w) uint8 (3, size, size): the short side resized, then the middle."""
    from torchvision.transforms.v2 import functional as F
    image = F.resize(image, [size], F.InterpolationMode.BICUBIC, antialias=True)
    return F.center_crop(image, [size, size])


def decode_all(files, classes, size):
    """Load the files that can be read, naming the others: a Split."""
    images, labels = [], []
    for path, label in tqdm(files, "decoding", leave=False, disable=len(files) < 500):
        try:
            image = read_image(path)
        except InputError as error:
            print0(f"skipping: {error}")
            continue
        images.append(square(image, size))
        labels.append(label)
    images = torch.stack(images) if images else torch.empty(0, 3, size, size, dtype=torch.uint8)
    return Split(images, torch.tensor(labels, dtype=torch.int64), list(classes))
