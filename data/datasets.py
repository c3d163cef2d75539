"""The data sets of train_cls.py: --data NAME selects a loader and a recipe of default flags.

A loader is a function (split, args). It returns a `Split`, which is uint8 images in memory, or a
Dataset like `ImageTree`, whose files are decoded and cropped by the workers of a DataLoader. Every
random number is a function of (seed, sample), see rng.py. So workers, processes and batch size do
not change the random numbers.
"""

import os
from argparse import Namespace
from pathlib import Path
from typing import Callable, NamedTuple

import torch

from common import InputError, bar, print0
from data.images import (ImageTree, Split, central_square, divide, file_hash, list_images,
                         part_folders, read_image)
from data.rng import epoch_order
from data.shapes import load_shapes

CIFAR10_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship",
                   "truck"]


# --- loaders --------------------------------------------------------------------------------------

def shapes(split, args):
    n = args.num_images if split == "train" else max(args.num_images // 5, 1)
    return load_shapes(split, n, args.image_size, device=args.device)


def cifar10(split, args):
    return load_cifar10(args.data_dir, split, args.download)


def load_cifar10(data_dir, split, download=False):
    """Load "train" or "test" of CIFAR-10 as a Split.

    data_dir contains torchvision's folder cifar-10-batches-py (download=True fetches it), or
    folders train/<class>/ and test/<class>/ (or val/<class>/) of images.
    """
    if download or Path(data_dir, "cifar-10-batches-py").is_dir():
        from torchvision.datasets import CIFAR10
        dataset = CIFAR10(data_dir, train=split == "train", download=download)
        images = torch.from_numpy(dataset.data).permute(0, 3, 1, 2).contiguous()
        return Split(images, torch.tensor(dataset.targets), list(dataset.classes))

    parts = part_folders(data_dir)
    found = list_images(parts.get(split) or split == "test" and parts.get("val") or data_dir)
    if list(found) != CIFAR10_CLASSES:
        raise InputError(f"--data_dir {data_dir} has no CIFAR-10 {split} images, or not all 10 "
                         f"classes: expected cifar-10-batches-py/ or {split}/<class>/*")
    files = [(path, label) for label, paths in enumerate(found.values()) for path in paths]
    images = [read_image(path) for path, _ in bar(files, f"decoding CIFAR-10 {split}", leave=False)]
    return Split(torch.stack(images), torch.tensor([label for _, label in files]), list(found))


def imagenet(split, args):
    return ImageTree(args.data_dir, {"test": "val"}.get(split, split), args.classes,
                     args.image_size, split == "train", args.seed, args.crop)


def folder(split, args):
    if split == "train":
        parts = part_folders(args.data_dir)
        print0(f"{args.data_dir}: the test images, which only eval_robust.py uses, are "
               f"{parts.get('test') or parts.get('val') or 'a tenth of each class'}")
    return load_photos(args.data_dir, split, args.image_size, args.crop, args.seen)


def find_photos(root, part):
    """List images of root/<class>/ or root/{train,val,test}/<class>/: class names, [(path, label)].

    part: "train", "val" or "test", see `divide`; or "all", which is test/ if it exists, else val/,
    else all images. InputError if there are fewer than two classes.
    """
    found = {name: list_images(path) for name, path in part_folders(root).items()}
    classes = sorted({name for images in found.values() for name in images})
    if len(classes) < 2:
        raise InputError(f"--data_dir {root} has {len(classes)} folders with images, expected 2 or "
                         f"more: {root}/<class>/*.jpg, or {root}/train/<class>/*.jpg")
    missing = sorted(set(classes) - set(found.get("train", found.get("", ()))))
    if missing and part != "all":
        raise InputError(f"--data_dir {root} has no training images of {', '.join(missing[:5])}")
    labelled = {name: {one: [(path, classes.index(one)) for path in paths]
                       for one, paths in images.items()} for name, images in found.items()}
    if part == "all":
        reported = next(name for name in ("test", "val", "train", "") if name in found)
        return classes, sum(labelled[reported].values(), [])
    return classes, divide(labelled, lambda file: os.path.relpath(file[0], root))[part]


def load_photos(root, part, size, crop=1.0, seen=()):
    """Load a part of a folder (see find_photos) as a Split of squares of `size` pixels.

    seen: hashes of files that are left out, because a network was trained on them. A file that
    cannot be read is left out, and a line names it.
    """
    classes, files = find_photos(root, part)
    images, labels, hashes = [], [], []
    for path, label in bar(files, "decoding", leave=False):
        try:
            image = read_image(path)
        except InputError as error:
            print0(f"skipping: {error}")
            continue
        if (name := file_hash(path)) not in seen:
            images.append(central_square(image, size, crop))
            labels.append(label)
            hashes.append(name)
    if not images:
        raise InputError(f"--data_dir {root}: no image can be read, or the network was trained on "
                         f"all of them")
    if part == "all":
        print0(f"{os.path.dirname(os.path.dirname(files[0][0]))}/: {len(images)} of {len(files)} "
               f"images are evaluated, without images of the training")
    return Split(torch.stack(images), torch.tensor(labels), classes, hashes=hashes)


class DataSet(NamedTuple):
    """A data set of train_cls.py."""
    load: Callable                              # (split, args) -> Split or Dataset
    recipe: dict                                # default flags
    crop: float = 1.0                           # share of the short side in the evaluation crop


# To add a data set, write a function, and add an entry here. --data NAME selects the entry.
DATASETS = {
    # accuracy after 3.2 minutes on 2 CPU cores: rpc 96.8 %, symmetric 96.8 %, softmax 96.1 %
    "shapes": DataSet(shapes, dict(model="nano", image_size=32, patch_size=4, epochs=8,
                                   batch_size=64, lr=2e-3, smoothing=0.0)),
    # accuracy after 25 minutes on 2 CPU cores: 70 %
    "cifar10": DataSet(cifar10, dict(model="micro", image_size=32, patch_size=4, epochs=8,
                                     batch_size=64, lr=1e-3, pad=4)),
    # The paper's training, 300 epochs on 4 GPUs. We have not run it. Accuracy in the paper: rpc
    # 70.94 %, symmetric 70.44 %. lr = 5e-4 * batch_size / 512.
    "imagenet": DataSet(imagenet, dict(
        model="tiny", image_size=224, patch_size=16, epochs=300, batch_size=1024, lr=1e-3,
        warmup_epochs=5, clip=0.0, drop_path=0.1, num_ops=2, erase=0.25, mixup=0.8, cutmix=1.0,
        repeats=3), crop=0.875),
    # your own photos, root/<class>/*.jpg; train_cls.py chooses the number of epochs
    "folder": DataSet(folder, dict(model="nano", image_size=64, patch_size=8, batch_size=16,
                                   pad=8, lr=1e-3, attn="symmetric")),
}


# --- the doors ------------------------------------------------------------------------------------

def load_part(split, args, device):
    """Load one part of the data set args.data: "train" or "test"; for a folder also "val", "all".

    args: a run's flags.
    """
    args = Namespace(**{"classes": None, "seen": (), "crop": DATASETS[args.data].crop,
                        **vars(args), "device": device})
    if args.data in ("cifar10", "imagenet", "folder") and not args.data_dir:
        raise InputError(f"--data {args.data} needs --data_dir")
    found = DATASETS[args.data].load(split, args)
    if isinstance(found, Split):
        return found._replace(images=found.images.to(device), labels=found.labels.to(device))
    return found


def load_data(args, device):
    """Load (training images, images to evaluate on during training), and print their numbers.

    Images to evaluate on are validation images, which choose best.pt, for your own folder and with
    --holdout; so the test images of load_test influence nothing. Otherwise they are the test
    images.
    """
    train = load_part("train", args, device)
    if args.holdout:
        if args.data == "folder" or not isinstance(train, Split):
            raise InputError(f"--holdout does not go with --data {args.data}")
        train, val = hold_out(train, args.holdout)
    else:
        val = load_part("val" if args.data == "folder" else "test", args, device)
    if list(train.classes) != list(val.classes):
        odd = sorted(set(train.classes) ^ set(val.classes))[:5]
        raise InputError(f"--data_dir {args.data_dir}: the classes to train on and to evaluate on "
                         f"differ: {', '.join(odd)}")
    print0(f"{args.data}: {len(train.labels)} training, {len(val.labels)} {split_name(args)} "
           f"images, {len(train.classes)} classes: {', '.join(train.classes[:12])}")
    return train, val


def hold_out(split, n):
    """Divide a Split into (training images, n held-out images), by a fixed random order."""
    if not 0 < n < len(split.labels):
        raise InputError(f"--holdout {n}: expected 1 to {len(split.labels) - 1}, because there are "
                         f"{len(split.labels)} training images")
    order = epoch_order(len(split.labels), 0, seed=0)
    parts = (order[n:], order[:n])
    return tuple(Split(split.images[part], split.labels[part], split.classes) for part in parts)


def load_test(args, trained, size, classes, seen=()):
    """Load the test images of a network; each side has `size` pixels.

    args: the flags data, data_dir and device of an evaluation. trained: a dict, the flags of the
    network's training; its data set also determines the crop. classes: ImageNet's classes in the
    network's order. seen: hashes of the files that the training used, as its checkpoint stores
    them. With --data folder every image of data_dir is tested that is not in `seen`, so training
    images are left out even if they were renamed, moved or copied.
    """
    crop = DATASETS[trained.get("data", args.data)].crop
    flags = dict(num_images=16000, seed=0, download=False)
    flags.update(trained, data=args.data, data_dir=args.data_dir, image_size=size, crop=crop,
                 classes=classes, seen=seen)
    return load_part("all" if args.data == "folder" else "test", Namespace(**flags), args.device)


def split_name(args):
    """Return the name of the images on which a run is evaluated during training."""
    if args.holdout or args.data == "folder":
        return "validation"
    return "val" if args.data == "imagenet" else "test"
