"""The DeiT augmentation of batches: shift, flip, soft targets; the rest of it in randaugment.py.

The recipe is facebookresearch/deit:main.py's, whose timm takes one PIL image at a time. Here
no loop runs over images, and pixels stay on their device. What happens to a sample depends on
(seed, its position) alone, not on batch, worker or rank. Decisions are drawn on the CPU, as tables
`u` of uniform numbers, so nobody waits for a GPU.

    images = to_float(augment_uint8(images, positions, seed), positions, seed)  # float32, in [0, 1]
    targets = soft_targets(labels, num_classes=10, smoothing=0.1)

Images are (B, 3, H, W). No function changes its input. What only the recipe of ImageNet uses,
RandAugment, random erasing, mixup and cutmix, is in randaugment.py.
"""

import torch
import torch.nn.functional as F

from data.batches import send
from data.rng import ERASE, FLIP, RAND_AUGMENT, SHIFT, uniform


def random_crop(images, u, pad=4):
    """Shift by up to `pad` pixels each way, black outside: torchvision's RandomCrop(size, pad).

    images: uint8. u: (B, 2) on the CPU, for top and left. Returns the same shape.
    """
    B, _, H, W = images.shape
    top, left = send((u.double() * (2 * pad + 1)).long(), images.device).unbind(1)
    crops = F.pad(images, [pad] * 4).unfold(2, H, 1).unfold(3, W, 1)    # all, as views: no memory
    return crops[torch.arange(B, device=images.device), :, top, left]


def random_hflip(images, u):
    """Mirror left and right where u < 0.5. images: any dtype. u: (B,) on the CPU."""
    left_right = send(u < 0.5, images.device)[:, None, None, None]
    return torch.where(left_right, images.flip(3), images)


def augment_uint8(images, positions, seed, pad=0, num_ops=0):
    """Shift (if pad > 0), flip, RandAugment (if num_ops > 0): the half that stays in uint8.

    images: uint8, after the random resized crop. positions: (B,) int64 on the CPU, below 2**31:
    each sample's number in the whole run, which with the seed determines all that is drawn. So this
    may run on the device or in a worker process.
    """
    if pad:
        images = random_crop(images, uniform(positions, 2, seed, SHIFT), pad)
    images = random_hflip(images, uniform(positions, 1, seed, FLIP)[:, 0])
    if num_ops:
        from data.randaugment import rand_augment
        images = rand_augment(images, uniform(positions, 4 * num_ops, seed, RAND_AUGMENT))
    return images


def to_float(images, positions, seed, erase=0.0):
    """Turn uint8 to float32 in [0, 1], then erase boxes of a share `erase` of the images."""
    images = images / 255
    if erase:
        from data.randaugment import ERASE_COLUMNS, random_erase
        u = uniform(positions, ERASE_COLUMNS, seed, ERASE)
        images = random_erase(images, u, positions, seed, erase)
    return images


def soft_targets(labels, num_classes, smoothing=0.0):
    """Make distributions of labels (B,) int64: (B, K), smoothing / K, the rest for the label."""
    off = smoothing / num_classes
    targets = torch.full((len(labels), num_classes), off, device=labels.device)
    return targets.scatter_(1, labels[:, None], 1 - smoothing + off)
