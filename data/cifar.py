"""CIFAR-10 in memory: from torchvision's files or from folders of images."""

from pathlib import Path

import torch

from common import InputError
from data.batches import Split, progress
from data.decode import printable, read_image
from data.folders import scan_folders

CIFAR10_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship",
                   "truck"]


def load_cifar10(data_dir, split, download=False):
    """Load "train" or "test" of CIFAR-10 as a Split.

    data_dir contains torchvision's folder cifar-10-batches-py (download=True fetches it), or
    folders train/<class>/ and test/<class>/ (or val/<class>/) of images.
    """
    if download or Path(data_dir, "cifar-10-batches-py").is_dir():
        from torchvision.datasets import CIFAR10
        try:
            dataset = CIFAR10(data_dir, train=split == "train", download=download)
        except (RuntimeError, OSError) as error:                            # OSError: no network
            raise InputError(f"--data_dir {data_dir}: CIFAR-10 cannot be "
                             f"{'downloaded' if download else 'read'} ({error}); unpack "
                             f"cifar-10-python.tar.gz there yourself") from None
        images = torch.from_numpy(dataset.data).permute(0, 3, 1, 2).contiguous()
        return Split(images, torch.tensor(dataset.targets), list(dataset.classes))

    folders = [Path(data_dir, name) for name in dict(train=["train"], test=["test", "val"])[split]]
    found = next(filter(None, map(scan_folders, folders)), {})
    if sorted(found) != CIFAR10_CLASSES:
        expected = " or ".join(f"{folder.name}/<class>/*" for folder in folders)
        tars = "; unpack the .tar files there with tar -xf" * any(Path(data_dir).glob("*.tar"))
        raise InputError(f"--data_dir {printable(data_dir)} has no CIFAR-10 {split} images, or not "
                         f"all 10 classes: expected cifar-10-batches-py/ or {expected}{tars}")
    files = [(path, label) for label, name in enumerate(CIFAR10_CLASSES) for path in found[name]]
    images = [read_image(path) for path, _ in progress(files, f"decoding CIFAR-10 {split}", 20000)]
    labels = torch.tensor([label for _, label in files])
    return Split(torch.stack(images), labels, list(CIFAR10_CLASSES))
