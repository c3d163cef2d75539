"""Images of one's own, root/<class>/*.jpg, or root/train/<class>/* and root/val/<class>/*."""

import os
from contextlib import suppress
from pathlib import Path
from statistics import median

import torch
from tqdm import tqdm

from common import InputError, print0, set_missing
from data.batches import Split
from data.files import decode, name_hash, read_bytes, scan_folders


def find_photos(root):
    """Find the images: (class names, {"train": [(path, label)], "val": [...]}).

    Without a folder val/ all are "train". Raises InputError at fewer than two classes.
    """
    folders = dict(train=root, val=None)
    if Path(root, "val").is_dir():
        folders = dict(train=Path(root, "train"), val=Path(root, "val"))
    found = {split: scan_folders(folder) if folder and os.path.isdir(folder) else {}
             for split, folder in folders.items()}
    classes = sorted({*found["train"], *found["val"]})
    if len(classes) < 2:
        raise InputError(f"--data_dir {root} has {len(classes)} folders with images, expected 2 or "
                         f"more: {root}/<class>/*.jpg")
    return classes, {split: [(path, classes.index(name)) for name in paths for path in paths[name]]
                     for split, paths in found.items()}


def choose(args):
    """Set the flags that the recipe of a folder leaves open; prints what was chosen."""
    classes, files = find_photos(args.data_dir)
    if not files["val"] and not args.holdout:
        args.holdout = round(len(files["train"]) / 5)               # without val/: a fifth
    chosen = recipe(len(files["train"]) - args.holdout, median_side(files["train"][::7]))
    chosen["pad"] = (args.image_size or chosen["image_size"]) // 8
    print0(f"{args.data_dir}: {len(files['train'] + files['val'])} images in {len(classes)} "
           f"classes; chosen for them: holdout={args.holdout} attn={args.attn} "
           f"{set_missing(args, chosen)}")


def recipe(n, side):
    """Choose flags to train on n images, their median short side in pixels: 64 patches an image.

    Epochs: 1.8 sqrt(n), so that few images are not learned by heart (the table in docs/data.md),
    and no more than 3,000 steps.
    """
    size = max(s for s in (32, 64, 96) if s == 32 or s <= side)
    batch = max(b for b in (2, 4, 8, 16, 32, 64) if b == 2 or 5 * b <= n)
    epochs = max(min(round(1.8 * n ** 0.5), 3000 * batch // max(n, 1)), 8)
    return dict(model="nano" if n < 20_000 else "micro", image_size=size, patch_size=size // 8,
                epochs=epochs, batch_size=batch, pad=size // 8)


def median_side(files):
    """Measure the median short side in pixels of image files, by their headers; 0: none is read."""
    from PIL import Image
    sides = []
    for path, _ in files[:200]:
        with suppress(OSError), Image.open(path) as image:          # what is broken, decode names
            sides.append(min(image.size))
    return median(sides) if sides else 0


def load_photos(root, split, size, holdout=0):
    """Load "train" or "test" of a folder: resized to `size` on the short side, cropped; a Split.

    "test": the first `holdout` images, in an order by their names, so that a file which comes or
    goes moves no other; without holdout val/, or all.
    """
    classes, files = find_photos(root)
    order = sorted(files["train"], key=lambda file: name_hash(os.path.relpath(file[0], root)))
    wanted = order[holdout:]
    if split == "test":
        wanted = order[:holdout] or files["val"] or order
    found = decode_all(wanted, classes, size)
    missing = set(range(len(classes))) - set(found.labels.tolist())
    if not len(found.labels) or split == "train" and missing:
        raise InputError(f"--data_dir {root}: no image of "
                         f"{classes[min(missing)]} can be read to {split} on")
    if split == "test" and wanted is order:
        print0(f"{root}: nothing of it was held out: all of its {len(order)} images are evaluated")
    return found


def decode_all(files, classes, size):
    """Load the files that can be read, naming the others: a Split."""
    from torchvision.transforms.v2 import functional as F
    images, labels = [], []
    for path, label in tqdm(files, "decoding", leave=False, disable=len(files) < 500):
        try:
            image = decode(read_bytes(path), path)
        except InputError as error:
            print0(f"skipping: {error}")
            continue
        image = F.resize(image, [size], F.InterpolationMode.BICUBIC, antialias=True)
        images.append(F.center_crop(image, [size, size]))
        labels.append(label)
    images = torch.stack(images) if images else torch.empty(0, 3, size, size, dtype=torch.uint8)
    return Split(images, torch.tensor(labels, dtype=torch.int64), list(classes))
