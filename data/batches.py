"""How images are held and handed out: small sets in memory, large ones by DataLoader workers."""

import os
from functools import cache, partial
from typing import NamedTuple

import torch
from torch.utils.data import DataLoader, default_collate
from tqdm import tqdm

from common import InputError
from data.rng import epoch_order


class Split(NamedTuple):
    """Hold a small set of images, all of it in memory."""
    images: torch.Tensor                     # (N, 3, H, W) uint8
    labels: torch.Tensor                     # (N,) int64
    classes: list                            # class names, str; labels index it
    masks: torch.Tensor | None = None        # shapes: (N, H, W) uint8, 0: none, k + 1: class k


def send(x, device):
    """Send a small tensor or list to the device; the host does not wait."""
    return torch.as_tensor(x).to(device, non_blocking=True)


@cache
def constant(numbers, device):
    """Give a tuple of numbers as a tensor that was sent to the device once."""
    return torch.tensor(numbers, device=device)


def progress(items, title, many):
    """Return a progress bar over items; rank 0 shows it in a terminal, for `many` items or more."""
    hidden = len(items) < many or os.environ.get("RANK", "0") != "0"
    return tqdm(items, title, leave=False, disable=hidden or None)      # None: if not a terminal


def hold_out(split, n):
    """Split into (the rest, n held out), by a fixed random order."""
    if not 0 < n < len(split.labels):
        raise InputError(f"--holdout {n}: there are {len(split.labels)} training images")
    order = epoch_order(len(split.labels), 0, seed=0)
    parts = (order[n:], order[:n])
    return tuple(Split(split.images[part], split.labels[part], split.classes) for part in parts)


def collate(transform, samples):
    """Stack [(image, label, position)]; transform(images, positions) runs here, in a worker."""
    images, labels, positions = default_collate(samples)
    return transform(images, positions) if transform else images, labels, positions


def image_batches(dataset, batches, num_workers=4, device="cpu", transform=None):
    """Make a DataLoader over samples (image, label, position): a batch of each, on the CPU.

    batches: iterable of lists of the dataset's keys, (position, index). transform: applied to
    (images, positions) of a batch in the worker; leave it out if a GPU can do that. Workers run
    torch with one thread each (DataLoader's own rule); num_workers=0 loads in this process.
    """
    return DataLoader(dataset, batch_sampler=batches, num_workers=num_workers,
                      prefetch_factor=4 if num_workers else None,
                      pin_memory=torch.device(device).type == "cuda",
                      collate_fn=partial(collate, transform))
