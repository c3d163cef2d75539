"""The DeiT augmentation of batches: shift, flip, RandAugment, random erasing, mixup, cutmix.

The recipe is facebookresearch/deit:main.py's, whose timm takes one PIL image at a time. Here
no loop runs over images, and pixels stay on their device. What happens to a sample depends on
(seed, its position) alone, not on batch, worker or rank. Decisions are drawn on the CPU, as tables
`u` of uniform numbers, so nobody waits for a GPU.

    images = to_float(augment_uint8(images, positions, seed), positions, seed)  # float32, in [0, 1]
    images, targets = mixup_cutmix(images, labels, 1000, np.random.default_rng((seed, step)))

Images are (B, 3, H, W). No function changes its input. RandAugment and erasing, which only the
recipe of ImageNet uses, are in randaugment.py.
"""

import math

import torch
import torch.nn.functional as F

from data.rng import uniform

CROP, FLIP, RAND_AUGMENT, ERASE = range(20, 24)               # keys of `uniform` after the seed


def send(x, device):
    """Send a small tensor or list to the device; the host does not wait."""
    return torch.as_tensor(x).to(device, non_blocking=True)


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
        images = random_crop(images, uniform(positions, 2, seed, CROP), pad)
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


def partner(x):
    """Swap neighbours: 2i + 1 for 2i and the other way round."""
    return x.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


def mixup_cutmix(images, labels, num_classes, rng, mixup=0.8, cutmix=1.0, smoothing=0.1):
    """Mix each image and label with its neighbour's: timm's Mixup in mode "batch".

    One lambda ~ Beta(alpha, alpha) for the batch, alpha = `mixup` or `cutmix`; if both are > 0,
    a fair coin decides. mixup: lambda * image + (1 - lambda) * partner.
    cutmix: a box of a share 1 - lambda is pasted from the partner, its centre anywhere; lambda
    becomes the share of the pixels kept, because the border clips the box. Both 0: nothing is
    mixed. timm's partner is of the reversed batch. Neighbours let even slices of a batch (of a
    process, or an accumulation step) mix as the whole does; copies of one image should not be
    neighbours.

    images: float. labels: (B,) int64. rng: numpy Generator of the caller's (seed, step). Returns
    mixed images and targets (B, K), K = num_classes: smoothing / K, and 1 - smoothing more for the
    label. Raises ValueError if a batch to be mixed is odd.
    """
    off = smoothing / num_classes
    targets = torch.full((len(labels), num_classes), off, device=images.device)
    targets.scatter_(1, labels[:, None], 1 - smoothing + off)
    if mixup == 0 and cutmix == 0:
        return images, targets
    if len(images) % 2:
        raise ValueError(f"batch of {len(images)} images: mixing neighbours needs an even number")

    H, W = images.shape[2:]
    use_cutmix = cutmix > 0 and (mixup == 0 or rng.random() < 0.5)
    lam = float(rng.beta(cutmix, cutmix) if use_cutmix else rng.beta(mixup, mixup))
    if use_cutmix:
        h, w = int(H * math.sqrt(1 - lam)), int(W * math.sqrt(1 - lam))
        y, x = int(rng.integers(H)), int(rng.integers(W))                       # centre
        top, bottom = max(y - h // 2, 0), min(y + (h + 1) // 2, H)
        left, right = max(x - w // 2, 0), min(x + (w + 1) // 2, W)
        lam = 1 - (bottom - top) * (right - left) / (H * W)
        mixed = images.clone()
        mixed[:, :, top:bottom, left:right] = partner(images[:, :, top:bottom, left:right])
    else:
        mixed = torch.lerp(partner(images), images, lam)
    return mixed, torch.lerp(partner(targets), targets, lam)
