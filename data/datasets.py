"""The data sets of train_cls.py: --data NAME selects a loader and a recipe of default flags.

A loader is a function (part, args) -> `Split` or a Dataset like `ImageTree`, see data/images.py.
"""

import os
from argparse import Namespace
from pathlib import Path
from typing import Callable, NamedTuple

import torch

from common import InputError, bar, print0
from data.images import (ImageTree, Split, central_square, choose_part, composed_name,
                         file_pixels, hash_pixels, image_hashes, list_images, part_folders,
                         read_image)
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
    tree = ImageTree(args.data_dir, folder_of(part))
    images = torch.empty(len(tree), 3, 32, 32, dtype=torch.uint8)
    for i, path in enumerate(bar(tree.files, "decoding CIFAR-10", leave=False)):
        images[i] = central_square(read_image(path), 32)
    return Split(images, tree.labels, tree.classes)


def imagenet(part, args):
    return ImageTree(args.data_dir, folder_of(part), args.classes, args.image_size,
                     part == "train", args.seed)


def folder_of(part):
    """Return the folder of a part in ImageNet's layout, which has no test images."""
    return "train" if part == "train" else "val"


def folder(part, args):
    """Load your own images as squares. Unreadable files, and images in args.seen, are left out."""
    classes, files = find_photos(args.data_dir, part)
    size = args.image_size
    seen = set(args.seen)
    images = torch.empty(len(files), 3, size, size, dtype=torch.uint8)      # more than needed
    labels = []
    hashes = []
    unreadable = []
    for path, label in bar(files, "decoding", leave=False):
        try:
            image = read_image(path)
        except InputError:
            unreadable.append(path)
            continue
        both = image_hashes(path, image)
        if both.isdisjoint(seen):
            images[len(labels)] = central_square(image, size, args.crop)
            labels.append(label)
            hashes += sorted(both)

    n = len(labels)
    total = len(files)
    if n == 0:
        raise InputError(f"--data_dir {args.data_dir}: no image is left for {part!r}; the "
                         f"network was trained on all of them, or they cannot be read")
    present = set(labels)
    for k, name in enumerate(classes):
        if part == "train" and k not in present:
            raise InputError(f"--data_dir {args.data_dir}: no training image of {name} can be "
                             f"read; expected one or more")
    if part == "all":
        print_unreadable(unreadable, total)
        place = Path(files[0][0]).parents[1]
        ending = "without images of the training"
        if not seen:
            ending = "and which images the training used is not known"
        print0(f"{place}/: {n} of {total} images are evaluated, {ending}")
    return Split(images[:n], torch.tensor(labels), classes, hashes=hashes)


def print_unreadable(paths, total):
    """Print how many of your own images cannot be read, in one line, with the first error."""
    for path in paths[:1]:
        try:
            read_image(path)
        except InputError as error:
            print0(f"{len(paths)} of {total} files are left out; the first: {error}")


def photo_groups(root):
    """List root/<class>/* or root/{train,val,test}/<class>/*: {part, or "": {class: paths}}.

    A folder without class folders is no part.
    """
    groups = {part: list_images(path) for part, path in part_folders(root).items()}
    return {part: group for part, group in groups.items() if group}


def find_photos(root, part):
    """List the images of a part of your own folder: class names, [(path, label)]."""
    groups = photo_groups(root)
    classes = sorted(set().union(*groups.values()))
    if len(classes) < 2:
        raise InputError(f"--data_dir {root} has {len(classes)} folders with images, expected "
                         f"2 or more: {root}/<class>/*.jpg, or {root}/train/<class>/*.jpg")
    divided = groups.get("train", groups.get("", {}))
    missing = sorted(set(classes) - set(divided))
    if missing and part != "all":
        names = ", ".join(missing[:5])
        raise InputError(f"--data_dir {root} has no training images of {names}")
    paths = []
    for group in groups.values():
        for images in group.values():
            paths += images
            if not any(file_pixels(path) for path in images):
                folder = os.path.dirname(images[0])
                raise InputError(f"{folder}: none of {len(images)} images can be read; replace "
                                 f"them, or move the folder elsewhere")
    if part == "train":                                 # which is loaded first
        unreadable = [path for path in paths if not file_pixels(path)]
        print_unreadable(unreadable, len(paths))

    def name(path):
        return os.path.relpath(path, root)

    def content(path):
        return file_pixels(path) or path                # an unreadable file has no copy

    chosen = choose_part(groups, part, name, content)
    labels = [classes.index(composed_name(Path(path).parent.name)) for path in chosen]
    return classes, list(zip(chosen, labels))


class DataSet(NamedTuple):
    load: Callable                              # (part, args) -> Split or Dataset
    recipe: dict                                # default flags
    crop: float = 1.0                           # share of the short side in the evaluation crop


# To add a data set, write a function, and add an entry here. --data NAME selects the entry.
DATASETS = {
    # accuracy after 3.2 minutes on 2 CPU cores: rpc 96.8 %, symmetric 96.8 %, softmax 96.1 %
    "shapes": DataSet(shapes, dict(
        model="nano", image_size=32, patch_size=4, epochs=8, batch_size=64, lr=2e-3,
        smoothing=0.0, flip=True)),
    # accuracy after 25 minutes on 2 CPU cores: 70 %
    "cifar10": DataSet(cifar10, dict(
        model="micro", image_size=32, patch_size=4, epochs=8, batch_size=64, lr=1e-3,
        pad=4, flip=True)),
    # The paper's training, 300 epochs on 4 GPUs. We have not run it. Accuracy in the paper: rpc
    # 70.94 %, symmetric 70.44 %. lr = 5e-4 * batch_size / 512.
    "imagenet": DataSet(imagenet, dict(
        model="tiny", image_size=224, patch_size=16, epochs=300, batch_size=1024,
        lr=1e-3, warmup_epochs=5, clip=0.0, drop_path=0.1, num_ops=2, erase=0.25,
        mixup=0.8, cutmix=1.0, repeats=3, flip=True, eval_every=5), crop=0.875),
    # your own photos, root/<class>/*.jpg; train_cls.py chooses the number of epochs
    "folder": DataSet(folder, dict(
        model="nano", image_size=64, patch_size=8, batch_size=16, pad=8, lr=1e-3,
        attn="symmetric", flip=True)),
}


# --- load a part ----------------------------------------------------------------------------------

def load_part(part, flags, device):
    """Load a part of the data set flags["data"]: a Split on the device, or a Dataset of files.

    flags: a dict, such as the flags of train_cls.py. classes: ImageNet's. seen: `image_hashes` of
    your own images to leave out. crop: as in the network's training.
    """
    name = flags["data"]
    data = DATASETS[name]
    settings = dict(num_images=16000, seed=0, download=False, classes=None, seen=(),
                    crop=data.crop)
    settings.update(flags)
    settings["device"] = device
    loaded = data.load(part, Namespace(**settings))
    in_memory = isinstance(loaded, Split)
    images = loaded.images if in_memory else loaded[0, 0][0]
    if images.dtype != torch.uint8:                     # the training divides by 255
        raise InputError(f"--data {name} loads images of {images.dtype}; expected torch.uint8, "
                         f"0 to 255")
    if in_memory:
        labels = loaded.labels.to(device)
        return loaded._replace(images=images.to(device), labels=labels)
    return loaded


def load_data(args, device, seen=()):
    """Load the training images, and the held-out or test images to evaluate on during training.

    seen: `image_hashes` of your own images that the initial weights were trained on. Images of the
    training and images in `seen` are never held out.
    """
    train = load_part("train", vars(args), device)
    kind = "validation"
    if args.data == "folder":
        trained = set(seen).union(train.hashes)
        val = load_part("val", vars(args) | dict(seen=trained), device)
        folders = part_folders(args.data_dir)
        test = "a tenth of each class"
        for part in ("val", "test"):
            if part in photo_groups(args.data_dir):
                test = folders[part]
        print0(f"test images, which only eval_robust.py uses: {test}")
    elif args.holdout:
        train, val = hold_out(train, args.holdout)
    else:
        val = load_part("test", vars(args), device)
        kind = "test"
    if list(train.classes) != list(val.classes):
        differ = sorted(set(train.classes) ^ set(val.classes))[:5]
        raise InputError(f"--data_dir {args.data_dir}: the classes to train on and to evaluate "
                         f"on differ: {differ}")
    names = ", ".join(train.classes[:12])
    print0(f"{args.data}: {len(train.labels)} training, {len(val.labels)} {kind} images, "
           f"{len(train.classes)} classes: {names}")
    return train, val


def hold_out(train, n):
    """Hold out n images of a Split, a fixed random choice, without copies of the other images."""
    pixels = [hash_pixels(image) for image in train.images.cpu()]
    order = epoch_order(len(pixels), 0, seed=0).tolist()
    kept = order[n:]
    trained = {pixels[i] for i in kept}
    held = [i for i in order[:n] if pixels[i] not in trained]
    if not held:
        raise InputError(f"--holdout {n}: all held-out images are copies of training images")

    def part(index):
        return Split(train.images[index], train.labels[index], train.classes)

    return part(kept), part(held)
