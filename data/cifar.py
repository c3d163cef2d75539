"""CIFAR-10 in memory: from torchvision's files, from folders of images, or from tars of those."""

import os
import tarfile
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from common import InputError
from data.batches import Split
from data.decode import IMAGE_EXTENSIONS, decode, read_bytes, scan_folders

CIFAR10_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship",
                   "truck"]


def read_tar(path, splits):
    """Read {(class, file): bytes} of the images <split>/<class>/<file> in an uncompressed tar."""
    files = {}
    try:
        with open(path, "rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                split, *place = member.name.split("/")[-3:]
                image = member.isfile() and member.name.lower().endswith(IMAGE_EXTENSIONS)
                if image and split in splits and len(place) == 2:
                    content = bytearray(tar.extractfile(member).read())
                    files[tuple(place)] = np.frombuffer(content, np.uint8)
            file.seek(tar.offset)          # tarfile stops in silence at a header that is damaged
            if file.read(512) != bytes(512):
                raise tarfile.ReadError("it does not end in a block of zeros")
    except (tarfile.TarError, ValueError) as error:
        raise InputError(f"{path} is not a whole uncompressed tar: {error}") from None
    return dict(sorted(files.items()))


def cifar10_files(data_dir, splits):
    """Read {(class, file): bytes} of the first folder of these splits, else of the first tar."""
    for folder in (Path(data_dir, name) for name in splits if Path(data_dir, name).is_dir()):
        return {(label, os.path.basename(path)): read_bytes(path)
                for label, paths in scan_folders(folder).items() for path in paths}
    tars = sorted(Path(data_dir).glob("*.tar"),                                 # the likely first
                  key=lambda path: (not any(part in path.name for part in splits), path))
    return next(filter(None, (read_tar(path, splits) for path in tars)), {})


def load_cifar10(data_dir, split, download=False):
    """Load CIFAR-10 from data_dir, in the first of three forms that is there. Returns a Split.

    torchvision's folder cifar-10-batches-py (download=True fetches it); folders train/<class>/ and
    test/<class>/ (or val/); uncompressed tars of such folders, cifar10_train.tar, cifar10_val.tar
    or others, read without unpacking.
    """
    if download or Path(data_dir, "cifar-10-batches-py").is_dir():
        from torchvision.datasets import CIFAR10
        try:
            dataset = CIFAR10(data_dir, train=split == "train", download=download)
        except RuntimeError as error:
            raise InputError(f"--data_dir {data_dir}: {error}") from None
        images = torch.from_numpy(dataset.data).permute(0, 3, 1, 2).contiguous()
        return Split(images, torch.tensor(dataset.targets), list(dataset.classes))

    splits = {"train": ["train"], "test": ["test", "val"]}[split]
    files = cifar10_files(data_dir, splits)
    found = sorted({label for label, _ in files})
    if found != CIFAR10_CLASSES:
        folders = " or ".join(f"{name}/<class>/*" for name in splits)
        raise InputError(f"--data_dir {data_dir} holds no CIFAR-10 {split} images, or not all its "
                         f"10 classes; looked for cifar-10-batches-py/, {folders}, and a .tar of "
                         f"such folders")
    few = len(files) < 20000
    progress = tqdm(files.items(), f"decoding CIFAR-10 {split}", leave=False, disable=few)
    images = torch.stack([decode(content, "/".join(file)) for file, content in progress])
    labels = torch.tensor([CIFAR10_CLASSES.index(label) for label, _ in files])
    return Split(images, labels, list(CIFAR10_CLASSES))
