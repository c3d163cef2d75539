"""Sets of images in memory, and batches of larger sets from DataLoader workers."""

import os
from functools import cache, partial
from typing import NamedTuple

import torch
from torch.utils.data import DataLoader, default_collate
from tqdm import tqdm

from common import InputError
from data.rng import epoch_order


class Split(NamedTuple):
    """A small set of images, all in memory."""
    images: torch.Tensor                     # (N, 3, H, W) uint8
    labels: torch.Tensor                     # (N,) int64
    classes: list                            # class names, str; labels are indices into it
    masks: torch.Tensor | None = None        # scenes: (N, H, W) uint8, 0: none, k + 1: class k


def send(x, device):
    """Copy a small tensor or list to the device; the CPU does not wait."""
    return torch.as_tensor(x).to(device, non_blocking=True)


@cache
def constant(numbers, device):
    """Return a tuple of numbers as a tensor, which is copied to the device once."""
    return torch.tensor(numbers, device=device)


def progress(items, title, many):
    """Return a progress bar over items; rank 0 shows it in a terminal, for `many` items or more."""
    hidden = len(items) < many or os.environ.get("RANK", "0") != "0"
    return tqdm(items, title, leave=False, disable=hidden or None)      # None: only in a terminal


def hold_out(split, n):
    """Divide a Split into (training images, n held-out images), by a fixed random order."""
    if not 0 < n < len(split.labels):
        raise InputError(f"--holdout {n}: expected 1 to {len(split.labels) - 1}, because there are "
                         f"{len(split.labels)} training images")
    order = epoch_order(len(split.labels), 0, seed=0)
    parts = (order[n:], order[:n])
    return tuple(Split(split.images[part], split.labels[part], split.classes) for part in parts)


def collate(transform, samples):
    """Stack samples [(image, label, position)] and transform them; a worker calls this function."""
    images, labels, positions = default_collate(samples)
    return transform(images, positions) if transform else images, labels, positions


def image_batches(dataset, batches, num_workers=4, device="cpu", transform=None):
    """Make a DataLoader of batches (images, labels, positions) on the CPU.

    batches: an iterable; each batch is a list of keys (position, index) of the dataset.
    transform: a function of a batch's (images, positions) that runs in the worker. If a GPU can
    run the function, call it on the GPU yourself, and leave transform out.
    num_workers: processes, in which DataLoader lets torch use one thread each; 0 loads the images
    in this process. device: the device that trains; for CUDA, the memory is pinned.
    """
    return DataLoader(dataset, batch_sampler=batches, num_workers=num_workers,
                      prefetch_factor=4 if num_workers else None,
                      pin_memory=torch.device(device).type == "cuda",
                      collate_fn=partial(collate, transform))
