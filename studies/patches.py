"""Corrupt a few patches per image, and return which patches: a robust attention should find them.

    images, corrupted = corrupt_patches(images, "black", patch=4)     # 6 patches of 4 x 4 pixels

Patches are the input patches of a ViT, numbered row by row. Random numbers depend on the image's
position in the batch alone. The programs that need one of these corruptions import this file;
look.py needs noise only, which is in robust/patches.py.
"""

import torch
import torch.nn.functional as F

from data.rng import PATCH_PLACES, PATCH_VALUES, normal, uniform
from robust.attacks import cross_entropy, input_gradient
from robust.patches import noisy_patches, patches_to_pixels, random_places


@torch.no_grad()
def corrupt_patches(images, kind, patch, *, n=6, model=None, labels=None):
    """Corrupt patches of images (B, 3, S, S), float in [0, 1].

    kind: "noise", "black" and "white" replace n patches. "gaussian" adds noise of standard
        deviation 0.3 to n patches. "pixels" gives 12 single pixels random colours. "adversarial"
        changes one block of 2 x 2 patches to raise the model's loss, in 20 steps.
    patch: the side of a patch in pixels, a divisor of S.
    n: the number of patches; "pixels" and "adversarial" do not use it.
    Returns the corrupted images, and which patches were corrupted, (B, P) bool.
    """
    B, _, _, size = images.shape
    per_row = size // patch                                             # patches
    index = torch.arange(B, device=images.device)
    if kind == "noise":
        return noisy_patches(images, patch, n)

    if kind == "adversarial":
        corrupted = random_block(index, per_row)
        where = patches_to_pixels(corrupted, per_row, patch)
        x = images.masked_fill(where, 0.5)                              # start grey
        for step in range(20):
            _, _, grad = input_gradient(cross_entropy, model, x, labels)
            moved = x + 0.2 * (1 - step / 20) * grad.sign()
            x = torch.where(where, moved.clamp(0, 1), x)
        return x, corrupted

    values = uniform(index, images[0].numel(), 0, PATCH_VALUES).view_as(images)
    if kind == "pixels":
        where = random_places(index, 12, size * size).view(B, 1, size, size)
        corrupted = F.max_pool2d(where.float(), patch) > 0  # patches with one of the pixels or more
        return torch.where(where, values, images), corrupted.flatten(1)

    match kind:
        case "black":
            new = torch.zeros_like(images)
        case "white":
            new = torch.ones_like(images)
        case "gaussian":
            new = (images + 0.3 * normal(values)).clamp(0, 1)
        case _:
            raise ValueError(f"kind is {kind!r}, expected noise, black, white, gaussian, pixels or "
                             f"adversarial")
    corrupted = random_places(index, n, per_row * per_row)
    where = patches_to_pixels(corrupted, per_row, patch)
    return torch.where(where, new, images), corrupted


def random_block(index, per_row):
    """Choose a block of 2 x 2 patches per image: (B, per_row * per_row) bool."""
    corner = (uniform(index, 2, 0, PATCH_PLACES) * (per_row - 1)).long()
    top, left = corner[:, :, None].unbind(1)                            # (B, 1) each
    place = torch.arange(per_row, device=index.device)
    rows = (place == top) | (place == top + 1)                          # (B, per_row)
    columns = (place == left) | (place == left + 1)
    return (rows[:, :, None] & columns[:, None, :]).flatten(1)
