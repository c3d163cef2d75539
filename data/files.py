"""Image files and what becomes of them, whatever they are for: decoded, in batches, as a picture."""

import io
import os
import zlib
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, default_collate

IMAGE_EXTENSIONS = (".jpeg", ".jpg", ".png", ".webp")


class Split(NamedTuple):
    images: torch.Tensor                     # (N, 3, H, W) uint8
    labels: torch.Tensor                     # (N,) int64
    classes: list                            # class names, str; labels index it
    masks: torch.Tensor | None = None     # shapes: (N, H, W) uint8, 0: none, k + 1: class k


def read_bytes(path):
    """What is in a file, (n,) uint8. A pipe is refused: reading one would wait for ever."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path} is not a file")
    return np.fromfile(path, np.uint8)


def decode_with_pil(data):
    image = Image.open(io.BytesIO(data))
    if image.mode.startswith("I"):           # 16 bit grey, which convert() would clip at 255
        image = Image.fromarray((np.array(image) / 257).round().astype(np.uint8))
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def decode(data, name):
    """Bytes of a JPEG, PNG or WebP file of any colours, uint8 (n,) -> (3, H, W) uint8 RGB.

    Raises ValueError, one line with the file's name, for broken, truncated or foreign files.
    torchvision's decoder gives the same pixels as PIL in less time, and refuses what PIL refuses.
    """
    try:
        try:
            from torchvision.io import ImageReadMode, decode_image
            image = decode_image(torch.from_numpy(data), ImageReadMode.RGB)
        except ImportError:                  # later torchvisions may have none; PIL: 1.3 x the time
            image = decode_with_pil(data)
    except (RuntimeError, OSError) as error:
        raise ValueError(f"cannot decode {name}: {str(error).splitlines()[0]}") from None
    if image.ndim == 4:                      # an animated GIF by another name: its first frame
        image = image[0]
    if image.dtype == torch.uint8:
        return image
    return (image.int() / 257).round().to(torch.uint8)              # 16 bit: 65535 -> 255


def name_hash(name):
    """What decides which files are held out: a file that comes or goes leaves the others there."""
    return zlib.crc32(os.fsencode(name))


def collate(transform, samples):
    """[(image, label, position)] -> batch; transform(images, positions) runs here, in a worker."""
    images, labels, positions = default_collate(samples)
    if transform:
        images = transform(images, positions)
    return images, labels, positions


def image_batches(tree, batches, num_workers=4, device="cpu", transform=None):
    """DataLoader over an ImageTree: images (B, 3, size, size) uint8, labels, positions (B,) int64.

    batches: iterable of lists of (position, index). transform: applied to (images, positions) of a
    batch in the worker; leave it out if a GPU can do that. Workers run torch with one thread each
    (DataLoader's own rule); num_workers=0 loads in this process.
    """
    return DataLoader(tree, batch_sampler=batches, num_workers=num_workers,
                      prefetch_factor=4 if num_workers else None,
                      pin_memory=torch.device(device).type == "cuda",
                      collate_fn=partial(collate, transform))


def save_grid(path, images, columns=8, zoom=1):
    """Write images (N, 3, H, W), uint8 or float in [0, 1], as one PNG, each pixel `zoom` wide."""
    from torchvision.utils import make_grid, save_image
    images = images.cpu() / 255 if images.dtype == torch.uint8 else images.cpu()
    images = images.repeat_interleave(zoom, 2).repeat_interleave(zoom, 3)
    save_image(make_grid(images, nrow=columns, padding=2, pad_value=1.0), path)
