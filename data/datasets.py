"""The data sets of train_cls.py: --data NAME selects a loader and a recipe of default flags.

A loader is a function (part, args) -> `Split` or a Dataset like `ImageTree`, see data/images.py.
"""

import os
from argparse import Namespace
from pathlib import Path
from typing import Callable, NamedTuple

import torch

from common import InputError, bar, print0
from data.images import (File, ImageTree, Split, central_square, choose_part, class_entries,
                         files_to_divide, folder_of_test, hash_file, hash_pixels, image_hashes,
                         part_folders, read_image, subfolders)
from data.rng import epoch_order
from data.shapes import load_shapes


# --- loaders --------------------------------------------------------------------------------------

def shapes(part, args):
    """Render --num_images training scenes, or a fifth as many test scenes."""
    n = args.num_images if part == "train" else max(args.num_images // 5, 1)
    return load_shapes(part, n, args.image_size, device=args.device)


def cifar10(part, args):
    """Load torchvision's cifar-10-batches-py, or images in train/<class>/ and val/<class>/."""
    if not args.data_dir:
        raise InputError("--data cifar10 needs --data_dir, its folder")
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
    """Open ImageNet's folder; its images are decoded when they are needed."""
    return ImageTree(args.data_dir, folder_of(part), args.classes, args.image_size,
                     train=part == "train", seed=args.seed, crop=args.crop)


def folder_of(part):
    """Return the folder of a part in ImageNet's layout, which has no test images."""
    return "train" if part == "train" else "val"


def folder(part, args):
    """Load your own images as squares. Unreadable files, and images in args.seen, are left out."""
    classes, files = find_photos(args.data_dir, part)
    size = args.image_size
    seen = set(args.seen)
    # Memory for all files; the images that are left out leave room at the end.
    images = torch.empty(len(files), 3, size, size, dtype=torch.uint8)
    labels = []
    hashes = []
    unreadable = []
    for path, label in bar(files, "decoding", leave=False):
        try:
            image = read_image(path)
        except InputError:
            unreadable.append(path)
            continue
        own_hashes = image_hashes(path, image)
        if own_hashes.isdisjoint(seen):
            images[len(labels)] = central_square(image, size, args.crop)
            labels.append(label)
            hashes += sorted(own_hashes)

    n = len(labels)
    if n == 0:
        raise InputError(f"--data_dir {args.data_dir}: no image is left for {part!r}; the "
                         f"network was trained on all of them, or they cannot be read")
    present = set(labels)
    missing = [name for k, name in enumerate(classes) if k not in present]
    if part == "train" and missing:
        raise InputError(f"--data_dir {args.data_dir}: no training image of {missing[0]} "
                         f"can be read; expected one or more")
    if part == "all":
        print_unreadable(unreadable, len(files))
        if seen:
            ending = "without images of the training"
        else:
            ending = "and which images the training used is not known"
        first_path, _ = files[0]                        # PLACE/<class>/<file>
        place = Path(first_path).parents[1]
        print0(f"{place}/: {n} of {len(files)} images are evaluated, {ending}")
    return Split(images[:n], torch.tensor(labels), classes, hashes=hashes)


def print_unreadable(paths, total):
    """Print how many of your own images cannot be read, in one line, with the first error."""
    if not paths:
        return
    try:
        read_image(paths[0])                            # again, for its error
    except InputError as error:
        print0(f"{len(paths)} of {total} files are left out; the first: {error}")


def photo_groups(root):
    """List root/{train,val,test}/<class>/*: {part: [File]}, or root/<class>/*: {"": [File]}.

    A folder without class folders is no part.
    """
    groups = {}
    for part, part_folder in part_folders(root).items():
        files = []
        for class_name, class_folder in subfolders(part_folder).items():
            for entry in class_entries(class_folder):
                name = os.path.relpath(entry.path, root)
                files.append(File(entry.path, name, class_name))
        if files:
            groups[part] = files
    return groups


def find_photos(root, part):
    """List the images of a part of your own folder: class names, [(path, label)].

    InputError unless an image of every folder can be read.
    """
    groups = photo_groups(root)
    files = sum(groups.values(), [])
    classes = sorted({file.class_name for file in files})       # names in any part
    if len(classes) < 2:
        parts = part_folders(root)
        hint = ""
        if "" not in parts:
            reserved = ", ".join(parts.values())
            hint = (f"; a folder with the name train, val or test is a part, no class "
                    f"({reserved}); if it is a class, rename it")
        raise InputError(f"--data_dir {root} has {len(classes)} folders with images, "
                         f"expected 2 or more: {root}/<class>/*.jpg, or "
                         f"{root}/train/<class>/*.jpg{hint}")
    trained_classes = {file.class_name for file in files_to_divide(groups)}
    missing = [name for name in classes if name not in trained_classes]
    if missing and part != "all":
        names = ", ".join(missing[:5])
        raise InputError(f"--data_dir {root} has no training images of {names}")
    check_readable([file.path for file in files])
    chosen = choose_part(groups, part)
    return classes, [(file.path, classes.index(file.class_name)) for file in chosen]


def check_readable(paths):
    """Raise InputError unless one image or more in every folder can be read."""
    paths_in = {}                                               # {folder: paths}
    for path in paths:
        paths_in.setdefault(os.path.dirname(path), []).append(path)
    for class_folder, inside in paths_in.items():
        if not any(hash_file(path) for path in inside):
            raise InputError(f"{class_folder}: none of {len(inside)} images can be read; replace "
                             f"them, or move the folder elsewhere")


class DataSource(NamedTuple):
    load: Callable                              # (part, args) -> Split or Dataset
    recipe: dict                                # default flags
    crop: float = 1.0                           # share of the short side in the evaluation crop


# To add a data set, write a function, and add an entry here. --data NAME selects the entry.
DATASETS = {
    # accuracy after 3.2 minutes on 2 CPU cores: rpc 96.8 %, symmetric 96.8 %, softmax 96.1 %
    "shapes": DataSource(shapes, dict(
        model="nano", image_size=32, patch_size=4, epochs=8, batch_size=64, lr=2e-3,
        smoothing=0.0, flip=True)),
    # accuracy after 25 minutes on 2 CPU cores: 70 %
    "cifar10": DataSource(cifar10, dict(
        model="micro", image_size=32, patch_size=4, epochs=8, batch_size=64, lr=1e-3,
        pad=4, flip=True)),
    # The paper's training, 300 epochs on 4 GPUs. We have not run it. Accuracy in the paper: rpc
    # 70.94 %, symmetric 70.44 %. lr = 5e-4 * batch_size / 512.
    "imagenet": DataSource(imagenet, dict(
        model="tiny", image_size=224, patch_size=16, epochs=300, batch_size=1024,
        lr=1e-3, warmup_epochs=5, clip=0.0, drop_path=0.1, num_ops=2, erase=0.25,
        mixup=0.8, cutmix=1.0, repeats=3, flip=True, eval_every=5), crop=0.875),
    # your own photos, root/<class>/*.jpg; train_cls.py chooses the number of epochs
    "folder": DataSource(folder, dict(
        model="nano", image_size=64, patch_size=8, batch_size=16, pad=8, lr=1e-3,
        attn="symmetric", flip=True)),
}


def trained_crop(flags):
    """Return the evaluation crop of the data set of a training, None if it is not in DATASETS.

    flags: the flags of the training.
    """
    source = DATASETS.get(flags.get("data"))
    if source is None:
        return None
    return source.crop


# --- load a part ----------------------------------------------------------------------------------

# The flags of load_part that a caller may leave out. classes and seen are no flags of train_cls.py,
# and neither is crop, whose default is the data set's.
DEFAULTS = dict(num_images=16000, seed=0, download=False, classes=None, seen=())


def load_part(part, flags, device):
    """Load a part of the data set flags["data"]: a Split on the device, or a Dataset of files.

    flags: a dict of flags of train_cls.py, and of three settings: classes, ImageNet's class names
    in the order of the labels; seen, `image_hashes` of your own images to leave out; crop, the
    share of the short side in the evaluation crop. See DEFAULTS for those that may be left out.
    """
    name = flags["data"]
    source = DATASETS[name]
    settings = DEFAULTS | dict(crop=source.crop) | flags
    settings["device"] = device
    loaded = source.load(part, Namespace(**settings))
    in_memory = isinstance(loaded, Split)
    if in_memory:
        images = loaded.images
    else:
        images, *_ = loaded[0, 0]                       # the first image, for its dtype
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
        groups = photo_groups(args.data_dir)
        paths = [file.path for files in groups.values() for file in files]
        unreadable = [path for path in paths if not hash_file(path)]
        print_unreadable(unreadable, len(paths))
        test_folder = folder_of_test(groups)
        test = "a tenth of each class"
        if test_folder:
            test = part_folders(args.data_dir)[test_folder]
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
    """Divide a Split into two: training images, and n held-out images, a fixed random choice.

    A held-out image whose pixels equal a training image is left out.
    """
    hashes = [hash_pixels(image) for image in train.images.cpu()]
    order = epoch_order(len(hashes), 0, seed=0).tolist()
    kept = order[n:]
    trained = {hashes[i] for i in kept}
    held = [i for i in order[:n] if hashes[i] not in trained]
    if not held:
        raise InputError(f"--holdout {n}: all held-out images are copies of training "
                         f"images")

    def part(index):
        return Split(train.images[index], train.labels[index], train.classes)

    return part(kept), part(held)
