"""The data sets of train_cls.py: --data NAME selects a loader and a recipe of default flags.

A loader is a function (part, args) -> `Split` or a Dataset like `ImageTree`, see data/images.py.
"""

import os
from argparse import Namespace
from pathlib import Path
from typing import Callable, NamedTuple

import torch

from common import InputError, bar, print0
from data.images import (ImageTree, Split, central_square, choose_part, composed, list_images,
                         marks, part_folders, read_image)
from data.rng import epoch_order
from data.shapes import load_shapes


# --- loaders --------------------------------------------------------------------------------------

def shapes(part, args):
    n = args.num_images if part == "train" else max(args.num_images // 5, 1)
    return load_shapes(part, n, args.image_size, device=args.device)


def cifar10(part, args):
    """Load torchvision's cifar-10-batches-py, or images in train/<class>/ and val/<class>/."""
    if args.download or os.path.isdir(f"{args.data_dir}/cifar-10-batches-py"):
        from torchvision.datasets import CIFAR10
        dataset = CIFAR10(args.data_dir, train=part == "train", download=args.download)
        images = torch.from_numpy(dataset.data).permute(0, 3, 1, 2).contiguous()
        return Split(images, torch.tensor(dataset.targets), list(dataset.classes))
    tree = ImageTree(args.data_dir, "train" if part == "train" else "val")
    files = bar(tree.files, "decoding CIFAR-10", leave=False)
    images = torch.stack([central_square(read_image(path), 32) for path in files])
    return Split(images, tree.labels, tree.classes)


def imagenet(part, args):
    return ImageTree(args.data_dir, "train" if part == "train" else "val", args.classes,
                     args.image_size, part == "train", args.seed)


def folder(part, args):
    """Load your own images as squares. Unreadable files, and marks in args.seen, are left out."""
    classes, files = find_photos(args.data_dir, part)
    images, labels, hashes, seen = [], [], [], {*args.seen}
    for path, label in bar(files, "decoding", leave=False):
        try:
            image = read_image(path)
        except InputError as error:
            print0(f"skipping: {error}")
            continue
        found = marks(path, image)
        if not found & seen:
            images.append(central_square(image, args.image_size, args.crop))
            labels.append(label)
            hashes += sorted(found)
    if not images:
        raise InputError(f"--data_dir {args.data_dir}: no image can be read, or the network was "
                         f"trained on all of them")
    if part == "all":
        print0(f"{Path(files[0][0]).parents[1]}/: {len(images)} of {len(files)} images are "
               f"evaluated, without images of the training")
    return Split(torch.stack(images), torch.tensor(labels), classes, hashes=hashes)


def find_photos(root, part):
    """List root/<class>/* or root/{train,val,test}/<class>/*: class names, [(path, label)]."""
    found = {name: list_images(path) for name, path in part_folders(root).items()}
    classes = sorted({name for images in found.values() for name in images})
    if len(classes) < 2:
        raise InputError(f"--data_dir {root} has {len(classes)} folders with images, expected 2 or "
                         f"more: {root}/<class>/*.jpg, or {root}/train/<class>/*.jpg")
    missing = sorted(set(classes) - set(found.get("train", found.get("", ()))))
    if missing and part != "all":
        raise InputError(f"--data_dir {root} has no training images of {', '.join(missing[:5])}")
    files = choose_part(found, part, lambda path: os.path.relpath(path, root))
    return classes, [(path, classes.index(composed(Path(path).parent.name))) for path in files]


class DataSet(NamedTuple):
    load: Callable                              # (part, args) -> Split or Dataset
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


# --- load a part ----------------------------------------------------------------------------------

def load_part(part, flags, device):
    """Load a part of the data set flags["data"]: a Split on the device, or a Dataset of files.

    flags: a dict, such as the flags of train_cls.py. classes: ImageNet's. seen: `marks` of your own
    images to leave out. crop: as in the network's training.
    """
    data = DATASETS[flags["data"]]
    default = dict(num_images=16000, seed=0, download=False, classes=None, seen=(), crop=data.crop)
    found = data.load(part, Namespace(**default | flags | dict(device=device)))
    if isinstance(found, Split):
        return found._replace(images=found.images.to(device), labels=found.labels.to(device))
    return found


def load_data(args, device):
    """Load the training images, and the held-out or test images to evaluate on during training."""
    train, kind = load_part("train", vars(args), device), "validation"
    if args.data == "folder":
        val, parts = load_part("val", vars(args), device), part_folders(args.data_dir)
        print0(f"test images, which only eval_robust.py uses: "
               f"{parts.get('test') or parts.get('val') or 'a tenth of each class'}")
    elif args.holdout:                                  # a fixed random choice
        order = epoch_order(len(train.labels), 0, seed=0)
        val, train = (Split(train.images[part], train.labels[part], train.classes)
                      for part in (order[:args.holdout], order[args.holdout:]))
    else:
        val, kind = load_part("test", vars(args), device), "test"
    if list(train.classes) != list(val.classes):
        raise InputError(f"--data_dir {args.data_dir}: the classes to train on and to evaluate on "
                         f"differ: {sorted({*train.classes} ^ {*val.classes})[:5]}")
    print0(f"{args.data}: {len(train.labels)} training, {len(val.labels)} {kind} images, "
           f"{len(train.classes)} classes: {', '.join(train.classes[:12])}")
    return train, val
