"""Replace a few patches per image by noise, and return which: a robust attention should find them.

    images, noisy = noisy_patches(images, patch=4)      # 6 patches of 4 x 4 pixels

Patches are the input patches of a ViT, numbered row by row. Random numbers depend on the image's
position in the batch alone. studies/patches.py has five more corruptions.
"""

import torch

from data.rng import PATCH_PLACES, PATCH_VALUES, uniform


def noisy_patches(images, patch, n=6):
    """Replace n patches of images (B, 3, S, S), float in [0, 1], by uniform noise.

    patch: the side of a patch in pixels, a divisor of S.
    Returns the changed images, and which patches are noise, (B, P) bool.
    """
    B, _, _, size = images.shape
    index = torch.arange(B, device=images.device)
    values = uniform(index, images[0].numel(), 0, PATCH_VALUES).view_as(images)
    per_row = size // patch                                             # patches
    noisy = random_places(index, n, per_row * per_row)
    where = patches_to_pixels(noisy, per_row, patch)
    return torch.where(where, values, images), noisy


def random_places(index, n, total):
    """Choose n of `total` places per image, all equally likely: (B, total) bool."""
    numbers = uniform(index, total, 0, PATCH_PLACES)
    rank = numbers.argsort(1).argsort(1)
    return rank < n


def patches_to_pixels(patches, per_row, patch):
    """Expand patches (B, P) to pixels (B, 1, S, S)."""
    grid = patches.view(-1, 1, per_row, per_row)
    return grid.repeat_interleave(patch, 2).repeat_interleave(patch, 3)
