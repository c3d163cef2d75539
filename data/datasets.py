"""The data sets of train_cls.py and eval_robust.py: one function per data set.

    data = load_part("train", args, device)             # "train", "val" or "test"

A function returns a `Split`, whose images are in memory, or a `Dataset` like `ImageFiles`. The
training uses "train" and evaluates on "val"; eval_robust.py uses "test". Your own data set is a
function here, an entry in DATASETS, and an entry in RECIPES of train_cls.py.

    name       images of a part
    shapes     rendered scenes: --num_images to train on, a fifth as many in val and test
    cifar10    torchvision's CIFAR10 in --data_dir; val and test: its test images
    imagenet   --data_dir/train/<class>/*; val and test: --data_dir/val/<class>/*
    folder     your own photos, --data_dir/<class>/*; their bytes decide their part
"""

import os
import zlib
from pathlib import Path

import torch
from torchvision.datasets import CIFAR10, ImageFolder
from torchvision.transforms import v2

from common import InputError, bar, check_folder, print0, send
from data.images import (Split, central_square, image_batches, own_photos, print_parts,
                         read_image)
from data.rng import RANDOM_CROP, seed_from
from data.shapes import load_shapes


# --- the data sets: functions of (part, args, device, classes) ------------------------------------
# classes: names in the order of a network's logits, in an evaluation; None: the data choose them.

def shapes(part, args, device, classes=None):
    """Render scenes."""
    n = args.num_images
    if part != "train":
        n = max(n // 5, 1)
    return load_shapes(part, n, args.image_size, device=device)


def cifar10(part, args, device, classes=None):
    """Load CIFAR-10, which has no validation images: "val" are the test images, too."""
    if not args.download and not Path(args.data_dir, "cifar-10-batches-py").is_dir():
        raise InputError(f"{args.data_dir} contains no folder cifar-10-batches-py; "
                         "choose another --data_dir, or add --download to the training")
    dataset = CIFAR10(args.data_dir, train=part == "train", download=args.download)
    images = torch.from_numpy(dataset.data).permute(0, 3, 1, 2).contiguous()
    labels = torch.tensor(dataset.targets)
    return Split(images.to(device), labels.to(device), dataset.classes)


def imagenet(part, args, device, classes=None):
    """Open ImageNet's folders, which have no test images: "test" is val/, too."""
    if os.path.realpath(f"{args.data_dir}/train") == os.path.realpath(f"{args.data_dir}/val"):
        raise InputError(f"{args.data_dir}: train and val are one folder; expected two")
    if part == "train":
        return ImageFiles(f"{args.data_dir}/train", args, seed=args.seed)
    return ImageFiles(f"{args.data_dir}/val", args, classes)


def folder(part, args, device, classes=None):
    """Decode your own photos into memory, as squares, and print what was passed over."""
    parts, passed = own_photos(args.data_dir)
    found = sorted({path.parent.name for paths in parts.values() for path in paths})
    if part != "val":                       # a training loads train and val, and prints once
        print_parts(args.data_dir, parts, passed)
    if part == "test":
        total = len(set().union(*parts.values()))
        print0(f"{len(parts[part])} of {total} photos: the part test; to test all of some new "
               f"photos, move them into {args.data_dir}/test/<class>/")
    names = list(classes or found)
    if len(names) < 2 or not set(found) <= set(names):
        expected = ", ".join(names[:5]) if classes else "two or more"
        raise InputError(f"{args.data_dir} has photos of the classes {found[:5]}, "
                         f"expected {expected}, as in {args.data_dir}/<class>/*.jpg or "
                         f"{args.data_dir}/train/<class>/*.jpg")
    # Memory for all files; unreadable ones leave room at the end.
    images = torch.zeros(len(parts[part]), 3, args.image_size, args.image_size,
                         dtype=torch.uint8)
    labels = []
    unreadable = []
    for path in bar(parts[part], f"decoding {part}", leave=False):
        try:
            image = read_image(path)
        except InputError as error:
            unreadable.append(error)
            continue
        images[len(labels)] = central_square(image, args.image_size)
        labels.append(names.index(path.parent.name))
    if unreadable:
        print0(f"{part}: {len(unreadable)} files are passed over: {unreadable[0]}")
    missing = [name for k, name in enumerate(names) if k not in labels]
    if missing:
        print0(f"{part}: no photo of {', '.join(missing[:5])}")
    if part != "val" and not labels:
        raise InputError(f"the part {part} has no photo; add photos, for example to "
                         f"{args.data_dir}/{part}/<class>/")
    labels = torch.tensor(labels, dtype=torch.long, device=device)
    return Split(images[:len(labels)].to(device), labels, names)


DATASETS = dict(shapes=shapes, cifar10=cifar10, imagenet=imagenet, folder=folder)


def load_part(part, args, device, classes=None):
    """Load a part of the data set args.data: a Split on the device, or a Dataset of files."""
    if args.data in ("cifar10", "imagenet", "folder") and not args.data_dir:
        raise InputError(f"--data {args.data} needs --data_dir, the folder of the images")
    data = DATASETS[args.data](part, args, device, classes)
    if isinstance(data, Split):
        images = data.images
    else:
        images, _, _ = data[0, 0]                       # position 0, index 0
    if images.dtype != torch.uint8:                     # floats would be divided by 255
        raise InputError(f"--data {args.data} loads images of {images.dtype}; "
                         "expected torch.uint8, 0 to 255")
    return data


# --- files that are not in memory -----------------------------------------------------------------

class ImageFiles(ImageFolder):
    """Photos in folder/<class>/*, ImageNet's layout, decoded when they are needed.

    files[position, index] is (image (3, size, size) uint8, label, position). index: the number of
    the file. classes: all names in label order, of which the folder may contain some; None: the
    folder's. seed: None for an evaluation. Otherwise the crop is random; it depends on the seed and
    on position, the number of the sample in the whole run.
    crop, resample: of the evaluation's view, see central_square. flag: the flag that names the
    folder.
    """

    def __init__(self, folder, args, classes=None, seed=None, crop=0.875, resample="bicubic",
                 flag="data_dir"):
        check_folder(folder, flag)
        super().__init__(folder, loader=read_image)
        self.size = args.image_size
        self.num_workers = args.num_workers
        self.seed = seed
        self.crop = crop
        self.resample = resample
        found = self.classes
        if classes:
            self.classes = list(classes)
        number = {name: i for i, name in enumerate(self.classes)}
        unknown = [name for name in found if name not in number]
        if unknown:
            raise InputError(f"{folder} has the folders {unknown[:5]}, which are not "
                             f"class names; expected some of {self.classes[:3]}, ...")
        # ImageFolder numbers the folders that it finds; a label is the number in self.classes.
        self.labels = torch.tensor([number[found[k]] for k in self.targets])

    def __getitem__(self, key):
        position, index = key
        path, _ = self.samples[index]
        image = read_image(path)
        if self.seed is None:
            image = central_square(image, self.size, self.crop, self.resample)
        else:
            torch.manual_seed(seed_from(self.seed, RANDOM_CROP, position))
            bicubic = v2.InterpolationMode.BICUBIC
            crop = v2.RandomResizedCrop(self.size, interpolation=bicubic)
            image = crop(image)
        return image, int(self.labels[index]), position


# --- batches --------------------------------------------------------------------------------------

def load_batches(data, pairs, device):
    """Yield images (b, 3, S, S) uint8 and labels (b,) on the device, and positions (b,) on the CPU.

    pairs: (positions, indices) of each batch, (b,) int64 each. position: the number of the sample
    in the whole run, step * batch_size + its place in the batch. index: the number of the image.
    """
    if isinstance(data, Split):
        for position, index in pairs:
            index = send(index, device)
            yield data.images[index], data.labels[index], position
        return
    keys = (list(zip(position.tolist(), index.tolist())) for position, index in pairs)
    for images, labels, position in image_batches(data, keys, data.num_workers, device):
        yield send(images, device), send(labels, device), position


def data_crc(data):
    """Return a CRC-32 of a data set: of its labels, and of its pixels or the names of its files."""
    crc = zlib.crc32(data.labels.cpu().numpy())
    if isinstance(data, Split):
        return zlib.crc32(data.images.cpu().contiguous().numpy(), crc)
    names = ["/".join(Path(path).parts[-3:]) for path, _ in data.samples]      # train/dog/1.JPEG
    return zlib.crc32("\n".join(names).encode("utf-8", "surrogateescape"), crc)
