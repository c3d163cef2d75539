"""The data sets of train_cls.py: --data NAME selects a loader and a recipe of default flags.

A loader is a function (split, args). It returns a `Split`, which is uint8 images in memory, or a
Dataset like `ImageTree`, whose files are decoded and cropped by the workers of a DataLoader. Every
random number is a function of (seed, sample), see rng.py. So workers, processes and batch size do
not change the random numbers.
"""

from argparse import Namespace
from typing import Callable, NamedTuple

import torch

from common import InputError, print0
from data.batches import Split, hold_out
from data.folders import same_folder
from data.shapes import load_shapes


def shapes(split, args):
    n = args.num_images if split == "train" else max(args.num_images // 5, 1)
    return load_shapes(split, n, args.image_size, device=args.device)


def cifar10(split, args):
    from data.cifar import load_cifar10
    return load_cifar10(args.data_dir, split, args.download)


def imagenet(split, args):
    from data.imagenet import ImageTree
    return ImageTree(args.data_dir, dict(train="train", test="val")[split], args.classes,
                     args.image_size, split == "train", args.seed)


def folder(split, args):
    from data.photos import load_photos
    return load_photos(args.data_dir, split, args.image_size, args.keep_best)


class DataSet(NamedTuple):
    """A data set of train_cls.py."""
    load: Callable                              # (split, args) -> Split or Dataset
    recipe: dict                                # flags; None: data/photos.py chooses a value


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
        repeats=3)),
    # your own photos, root/<class>/*.jpg
    "folder": DataSet(folder, dict(model="nano", image_size=64, patch_size=8, batch_size=16,
                                   pad=8, lr=1e-3, attn="symmetric")),
}


def load_part(split, args):
    """Load one part of the data set args.data: "train" or "test"; for a folder also "val", "all".

    args: a run's flags.
    """
    if args.data in ("cifar10", "imagenet", "folder") and not args.data_dir:
        raise InputError(f"--data {args.data} needs --data_dir")
    found = DATASETS[args.data].load(split, args)
    if isinstance(found, Split):
        return Split(found.images.to(args.device), found.labels.to(args.device), found.classes)
    return found


def load_data(args, device):
    """Load (training images, images to evaluate on during training), and print their numbers.

    With --holdout or --keep_best, the images to evaluate on are held out from the training images,
    and --keep_best stores the network with the lowest loss on them as best.pt. So the test images
    of load_test influence nothing. Without these flags, the images to evaluate on are the test
    images.
    """
    args = Namespace(**{**vars(args), "device": device, "classes": None,
                        "keep_best": args.data == "folder"})
    train = load_part("train", args)
    if args.data == "folder":
        if args.holdout:
            raise InputError("--holdout does not go with --data folder: use --keep_best, which "
                             "holds out a tenth of each class")
        val = load_part("val" if args.keep_best else "test", args)
    elif args.holdout:
        if not isinstance(train, Split):
            raise InputError(f"--holdout and --keep_best do not go with --data {args.data}, whose "
                             f"images are not all in memory: leave both out")
        train, val = hold_out(train, args.holdout or -(-len(train.labels) // 10))
    else:
        val = load_part("test", args)
    if list(train.classes) != list(val.classes):
        odd = sorted(set(train.classes) ^ set(val.classes))[:5]
        raise InputError(f"--data_dir {args.data_dir}: the classes to train on and to evaluate on "
                         f"differ: {', '.join(odd)}")
    print0(f"{args.data}: {len(train.labels)} training, {len(val.labels)} {split_name(args)} "
           f"images, {len(train.classes)} classes: {class_counts(train, val)}")
    return train, val


def class_counts(train, val):
    """Return the numbers of images per class as text, training + evaluation: "star 90 + 10"."""
    counts = [torch.as_tensor(split.labels).bincount(minlength=len(train.classes)).tolist()
              for split in (train, val)]
    if len(train.classes) > 12:
        return " + ".join(f"{min(count)} to {max(count)}" for count in counts) + " each"
    return ", ".join(f"{name} {n} + {m}" for name, n, m in zip(train.classes, *counts))


def load_test(args, trained, size, classes):
    """Load the test images of a network; each side has `size` pixels.

    args: the flags data, data_dir and device of an evaluation. trained: a dict, the flags of the
    network's training. classes: ImageNet's classes in the network's order. With --data folder, a
    network that was not trained on --data_dir is tested on val/, or on all images if there is no
    val/.
    """
    flags = dict(num_images=16000, seed=0, download=False, keep_best=args.data == "folder")
    flags.update(trained, data=args.data, data_dir=args.data_dir, device=args.device,
                 image_size=size, classes=classes)
    own = trained.get("data") == "folder" and same_folder(trained.get("data_dir"), args.data_dir)
    return load_part("all" if args.data == "folder" and not own else "test", Namespace(**flags))


def split_name(args):
    """Return the name of the images on which a run is evaluated during training."""
    if args.holdout or args.data == "folder":
        return "validation"
    return "val" if args.data == "imagenet" else "test"


def largest_share(split):
    """Return the majority-class rate in per cent: the accuracy of always guessing that class."""
    labels = torch.as_tensor(split.labels)
    return 100 * labels.bincount().max().item() / len(labels)
