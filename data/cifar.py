"""CIFAR-10 in memory: from torchvision's files, from folders of images, or from tars of those."""

import os
import tarfile
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from common import InputError
from data.batches import Split
from data.files import IMAGE_EXTENSIONS, decode, read_bytes, scan_folders

CIFAR10_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship",
                   "truck"]


def read_tar(path, splits):
    """Read {(class, file): bytes} of the images <split>/<class>/<file> in an uncompressed tar.

    Raises ValueError naming a file that is no tar, compressed, cut short or damaged.
    """
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
    folders = [path for path in (os.path.join(data_dir, name) for name in splits)
               if os.path.isdir(path)]
    if folders:
        found, _ = scan_folders(folders[0])
        files = [(label, name) for label in found for name in found[label]]
        if files:
            return {file: read_bytes(os.path.join(folders[0], *file)) for file in files}
    tars = sorted(Path(data_dir).glob("*.tar"),                                 # the likely first
                  key=lambda path: (not any(part in path.name for part in splits), path))
    return next(filter(None, (read_tar(path, splits) for path in tars)), {})


def load_cifar10(data_dir, split, download=False):
    """Load CIFAR-10 from data_dir, in the first of three forms that is there. Returns a Split.

    torchvision's folder cifar-10-batches-py (download=True fetches it); folders train/<class>/ and
    test/<class>/ (or val/); uncompressed tars of such folders, cifar10_train.tar, cifar10_val.tar
    or others, read without unpacking. Raises FileNotFoundError when nothing of the kind is there,
    ValueError when the files are not CIFAR-10's.
    """
    data_dir, splits = str(data_dir), {"train": ["train"], "test": ["test", "val"]}[split]
    if not os.path.isdir(data_dir) and not download:
        raise InputError(f"--data_dir {data_dir} is not a folder; expected one that holds "
                                f"CIFAR-10")
    if download or os.path.isdir(os.path.join(data_dir, "cifar-10-batches-py")):
        return torchvisions_cifar10(data_dir, split, download)

    files = cifar10_files(data_dir, splits)
    if not files:
        folders = " or ".join(f"{name}/<class>/*" for name in splits)
        raise InputError(f"--data_dir {data_dir} holds no CIFAR-10 {split} images; looked "
                                f"for cifar-10-batches-py/, {folders}, and a .tar of such folders")
    found = sorted({label for label, _ in files})
    if found != CIFAR10_CLASSES:
        raise InputError(f"--data_dir {data_dir}: the {split} images are in {len(found)} class "
                         f"folders ({', '.join(found)}), expected CIFAR-10's 10 "
                         f"({', '.join(CIFAR10_CLASSES)})")

    images = []
    few = len(files) < 20000
    progress = tqdm(files.items(), f"decoding CIFAR-10 {split}", leave=False, disable=few)
    for (label, name), content in progress:
        images.append(decode(content, f"{data_dir} {label}/{name}"))
        if images[-1].shape != (3, 32, 32):
            raise InputError(f"--data_dir {data_dir}: {label}/{name} is "
                             f"{tuple(images[-1].shape)}, expected (3, 32, 32)")
    labels = torch.tensor([CIFAR10_CLASSES.index(label) for label, _ in files])
    return Split(torch.stack(images), labels, list(CIFAR10_CLASSES))


def torchvisions_cifar10(data_dir, split, download):
    from torchvision.datasets import CIFAR10
    try:
        dataset = CIFAR10(data_dir, train=split == "train", download=download)
    except RuntimeError as error:
        raise InputError(f"--data_dir {data_dir}: cifar-10-batches-py is incomplete or damaged "
                         f"({error})") from None
    images = torch.from_numpy(dataset.data).permute(0, 3, 1, 2).contiguous()
    return Split(images, torch.tensor(dataset.targets), list(dataset.classes))
