"""Augment whole batches: shift, flip, RandAugment, random erasing, mixup, cutmix.

The recipe comes from `facebookresearch/deit:main.py`, where timm transforms one PIL image at a
time. Here no loop runs over images (B, 3, H, W). Except for mixup and cutmix, the result for a
sample depends on (seed, position) only; the position is its number in the whole run. Random
decisions are drawn on the CPU as tables `u` of uniform numbers, so the CPU does not wait for a GPU.

    images = augment_uint8(images, positions, seed, pad=4)
    images = to_float_and_erase(images, positions, seed, erase=0.25)
    targets = soft_targets(labels, num_classes=10, smoothing=0.1)
"""

import math

import torch
import torch.nn.functional as F

from common import send
from data.images import constant
from data.rng import (ERASE, ERASE_NOISE, FLIP, MIX, RAND_AUGMENT, SHIFT, normal, seed_from,
                      uniform)

MEAN = (0.485, 0.456, 0.406)                        # ImageNet's, of pixels in [0, 1]
STD = (0.229, 0.224, 0.225)
LUMA = (0.299, 0.587, 0.114)                        # shares of red, green, blue in a grey value
FILL = (124, 116, 104)                              # MEAN as 0..255, outside a warped image
ERASE_TRIES = 10
ERASE_COLUMNS = 3 + 2 * ERASE_TRIES                 # random numbers per image, see random_erase


def augment_uint8(images, positions, seed, pad=0, num_ops=0, flip=False):
    """Shift by up to `pad` pixels, flip, and apply `num_ops` RandAugment operations per image.

    images: uint8. positions: (B,) int64 on the CPU, below 2**31. flip: mirror half of the images.
    """
    if pad:
        u = uniform(positions, 2, seed, SHIFT)
        images = random_crop(images, u, pad)
    if flip:
        u = uniform(positions, 1, seed, FLIP)
        images = random_hflip(images, u[:, 0])
    if num_ops:
        u = uniform(positions, 4 * num_ops, seed, RAND_AUGMENT)
        images = rand_augment(images, u)
    return images


def to_float_and_erase(images, positions, seed, erase=0.0):
    """Convert uint8 to float32 in [0, 1], then erase a box in each image with probability erase."""
    images = images / 255
    if erase:
        u = uniform(positions, ERASE_COLUMNS, seed, ERASE)
        images = random_erase(images, u, positions, seed, erase)
    return images


def soft_targets(labels, num_classes, smoothing=0.0):
    """Turn labels (B,) into distributions (B, K): smoothing / K per class, rest on the label."""
    off = smoothing / num_classes
    targets = torch.full((len(labels), num_classes), off, device=labels.device)
    return targets.scatter_(1, labels[:, None], 1 - smoothing + off)


def random_crop(images, u, pad):
    """Shift images by up to `pad` pixels, black outside. u: (B, 2) on the CPU, for top and left."""
    B, _, H, W = images.shape
    # The product is exact in float64, so rounding cannot move an image to the next place.
    corner = (u.double() * (2 * pad + 1)).long()
    top, left = send(corner, images.device).unbind(1)
    # crops: all crops of each image, (B, C, tops, lefts, H, W), a view without copies.
    crops = F.pad(images, [pad] * 4).unfold(2, H, 1).unfold(3, W, 1)
    return crops[torch.arange(B, device=images.device), :, top, left]       # (B, C, H, W)


def random_hflip(images, u):
    """Mirror the images with u < 0.5 left to right. u: (B,) on the CPU."""
    left_right = send(u < 0.5, images.device)[:, None, None, None]
    return torch.where(left_right, images.flip(3), images)


# --- RandAugment ----------------------------------------------------------------------------------
# These are timm's names of the operations. TONE changes each value of a channel by a table.
TONE = ("AutoContrast", "Equalize", "Invert", "PosterizeIncreasing",
        "SolarizeIncreasing", "SolarizeAdd", "ContrastIncreasing", "BrightnessIncreasing")
BLEND = ("ColorIncreasing", "SharpnessIncreasing")      # with the grey or the smooth image
GEOMETRIC = ("Rotate", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel")
OPS = TONE + BLEND + GEOMETRIC


def rand_augment(images, u):
    """Draw operations of OPS and apply each with probability 1/2: timm's rand-m9-mstd0.5-inc1.

    The level is drawn from N(9, 0.5) and clipped to [0, 10]; a fair coin decides its sign. images:
    uint8. u: (B, 4 * operations) on the CPU: which operation, apply or not, level, sign.
    """
    images = images.clone()
    device = images.device
    u = u.double()
    for columns in u.split(4, dim=1):
        u_which, u_apply, u_level, u_sign = columns.unbind(1)                       # (B,) each
        number = torch.where(u_apply < 0.5, (u_which * len(OPS)).long(), -1)        # in OPS
        strength = (9 + 0.5 * normal(u_level)).clamp(0, 10) / 10
        strength = strength.float()
        sign = torch.where(u_sign < 0.5, 1.0, -1.0)
        for change, names in ((change_tone, TONE), (blend, BLEND), (warp, GEOMETRIC)):
            # The number in `names`: Rotate is 10 in OPS and 0 in GEOMETRIC. Numbers that are too
            # small or too large belong to other groups, or to images without this operation.
            which = number - OPS.index(names[0])
            rows = ((which >= 0) & (which < len(names))).nonzero()[:, 0]
            if len(rows):                               # `rows` is on the CPU: no wait for a GPU
                chosen = [send(t[rows], device) for t in (which, strength, sign)]
                rows = send(rows, device)
                images[rows] = change(images[rows], *chosen)
    return images


def change_tone(images, which, strength, sign):
    """Apply the operations TONE[which] at the levels 10 * strength: a table per image and channel.

    images: (b, 3, H, W) uint8. which, strength, sign: (b,) on the same device. `blend` and `warp`
    have the same arguments.
    """
    b = len(images)
    pixels = images[0, 0].numel()
    device = images.device
    index = images.view(3 * b, pixels).long()
    counts = torch.zeros(3 * b, 256, device=device)                 # whole numbers
    counts.scatter_add_(1, index, counts.new_ones(1).expand_as(index))
    counts = counts.view(b, 3, 256)                                 # pixels of each grey level
    value = torch.arange(256.0, device=device)                      # the grey levels
    strength = strength.view(b, 1, 1)
    sign = sign.view(b, 1, 1)

    # Each table has a new value for each grey level, (b, 3, 256) or a shape that expands to it.
    low = torch.where(counts > 0, value, 255.0).amin(2, keepdim=True)
    high = torch.where(counts > 0, value, 0.0).amax(2, keepdim=True)
    stretched = (value - low) * (255 / (high - low).clamp(min=1))
    # Equalize, as in PIL: a new level gets `step` pixels. Pixels of the highest level do not count.
    # The new level of a pixel is the number of darker pixels, divided by step and rounded.
    step = ((pixels - counts.gather(2, high.long())) / 255).floor()
    below = counts.cumsum(2) - counts
    equal = (((step / 2).floor() + below) / step.clamp(min=1)).floor()
    channel_mean = (counts * value).sum(2) / pixels                         # (b, 3)
    mean = (channel_mean * constant(LUMA, device)).sum(1)                   # of the grey image
    mean = mean.add(0.5).floor().view(b, 1, 1)
    factor = (1 + sign * 0.9 * strength).clamp(min=0.1)      # of PIL's ImageEnhance, 0.1 to 1.9
    merged = 2 ** (4 + (4 * strength).floor())               # so many grey levels become one
    threshold = 256 - (256 * strength).floor()
    added = (110 * strength).floor()
    tables = [torch.where(high > low, stretched, value),                # AutoContrast
              torch.where(step > 0, equal, value),                      # Equalize
              255 - value,                                              # Invert
              (value / merged).floor() * merged,                        # Posterize
              torch.where(value < threshold, value, 255 - value),       # Solarize
              torch.where(value < 128, value + added, value),           # SolarizeAdd
              mean + factor * (value - mean),                           # Contrast
              factor * value]                                           # Brightness
    tables = torch.stack([table.expand(b, 3, 256) for table in tables])
    table = tables[which, torch.arange(b, device=device)].clamp(0, 255).byte()
    return table.view(3 * b, 256).gather(1, index).view_as(images)


def blend(images, which, strength, sign):
    """Apply BLEND[which]: move each image towards its grey or its smooth version, or away from it.

    which: 0, the grey version (Color); 1, the smooth version (Sharpness).
    """
    images = images.float()
    luma = constant(LUMA, images.device).view(3, 1, 1)
    grey = (images * luma).sum(1, keepdim=True)
    smooth = images.clone()                     # a 3 x 3 mean; the centre has weight 5, others 1
    rows = images[..., :-2] + images[..., 1:-1] + images[..., 2:]
    total = rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:]
    total = total + 4 * images[..., 1:-1, 1:-1]
    smooth[..., 1:-1, 1:-1] = total / 13
    base = torch.where(which.view(-1, 1, 1, 1) == 0, grey.round(), smooth.round())
    factor = (1 + sign * 0.9 * strength).clamp(min=0.1).view(-1, 1, 1, 1)   # see change_tone
    return (base + factor * (images - base)).clamp(0, 255).byte()


def warp(images, which, strength, sign):
    """Rotate, shear or shift each image by GEOMETRIC[which]: bicubic, FILL outside the image."""
    H, W = images.shape[2:]
    device = images.device
    tall = H / W
    amount = sign * strength
    angle = amount * (math.pi / 6)
    cos = angle.cos()
    sin = angle.sin()
    shear = 0.3 * amount
    shift = 0.9 * amount
    zero = torch.zeros_like(sign)
    one = torch.ones_like(sign)
    # The positions p (across) and q (down) go from -1 to 1. A row (a, b, c, d, e, f) reads at
    # (a p + b q + c, d p + e q + f). ShearX does not move the first row (q = -1), and
    # ShearY does not move the first column (p = -1), as in PIL.
    maps = [(cos, -sin * tall, zero, sin / tall, cos, zero),        # Rotate
            (one, shear * tall, shear * tall, zero, one, zero),     # ShearX
            (one, zero, zero, shear / tall, one, shear / tall),     # ShearY
            (one, zero, shift, zero, one, zero),                    # TranslateX
            (one, zero, zero, zero, one, shift)]                    # TranslateY
    maps = [torch.stack(row, 1) for row in maps]
    maps = torch.stack(maps)                                                # (5, b, 6)
    maps = maps[which, torch.arange(len(sign), device=device)].view(-1, 1, 1, 2, 3)
    p = (2 * torch.arange(W, device=device) + 1) / W - 1
    q = (2 * torch.arange(H, device=device) + 1) / H - 1
    by_p, by_q, moved = maps.unbind(4)                                      # (b, 1, 1, 2) each
    grid = by_p * p[:, None] + by_q * q[:, None, None] + moved              # (b, H, W, 2)
    fill = constant(FILL, device).view(3, 1, 1)
    out = F.grid_sample(images.float() - fill, grid, "bicubic", align_corners=False)
    return (out + fill).round().clamp(0, 255).byte()


# --- random erasing -------------------------------------------------------------------------------

def random_erase(images, u, positions, seed, prob):
    """Put a box of noise into images with probability `prob`: timm's RandomErasing(mode="pixel").

    The area of the box is uniform from 2 % to a third of the image, and height / width is
    log-uniform from 0.3 to 1 / 0.3. The first of 10 tries that fits is taken; if none fits, the
    image stays unchanged. The noise is standard normal after normalisation by MEAN and STD.
    images: float in [0, 1], changed in place. u: (B, ERASE_COLUMNS) on the CPU: apply or not, top,
    left, 10 areas, 10 ratios.
    """
    B, _, H, W = images.shape
    u = u.double()
    u_apply, u_top, u_left = u[:, :3].unbind(1)                                     # (B,) each
    u_area, u_ratio = u[:, 3:].split(ERASE_TRIES, dim=1)                            # (B, 10) each
    tried_areas = (0.02 + (1 / 3 - 0.02) * u_area) * H * W                          # (B, 10)
    ratio = torch.exp((1 - 2 * u_ratio) * math.log(0.3))                            # height / width
    tried_h = (tried_areas * ratio).sqrt().round().long()
    tried_w = (tried_areas / ratio).sqrt().round().long()
    fits = (tried_h < H) & (tried_w < W)                # smaller than the image, as timm demands
    chosen = ((u_apply < prob) & fits.any(1)).nonzero()[:, 0]                       # (b,)
    first_fit = fits[chosen].int().argmax(1, keepdim=True)
    h = tried_h[chosen].gather(1, first_fit)[:, 0]
    w = tried_w[chosen].gather(1, first_fit)[:, 0]
    top = (u_top[chosen] * (H - h + 1)).long()
    left = (u_left[chosen] * (W - w + 1)).long()

    # Repeat the numbers of each box once for every pixel in it, so that each column describes one
    # erased pixel. The sizes are on the CPU: no wait for a GPU.
    area = h * w
    first = area.cumsum(0) - area                       # the column of the box's first pixel
    boxes = torch.stack([chosen, positions[chosen], top, left, w, first, area])     # (7, b)
    boxes = send(boxes, images.device)
    total = int(area.sum())
    area_on_device = boxes[-1]
    pixels = boxes.repeat_interleave(area_on_device, dim=1, output_size=total)      # (7, total)
    sample, position, top, left, w, first, _ = pixels
    i = torch.arange(total, device=images.device) - first           # the pixel's number in its box
    y = top + i // w
    x = left + i % w
    # The part `position` of the key is a tensor: each pixel has the position of its own image.
    noise = normal(uniform(y * W + x, 3, seed, ERASE_NOISE, position.int()))        # (total, 3)
    noise = noise * constant(STD, images.device) + constant(MEAN, images.device)
    images[sample, :, y, x] = noise.to(images.dtype)
    return images


# --- mixup and cutmix -----------------------------------------------------------------------------

def mix(images, targets, seed, step, mixup=0.8, cutmix=1.0):
    """Mix each image and its target with the previous image of the batch: MixUp or CutMix.

    targets: (B, K). The previous image of the first one is the last one.
    mixup, cutmix: alpha of Beta(alpha, alpha), from which the batch's share is drawn; 0: not used.
    If both are > 0, a fair coin chooses MixUp or CutMix. seed and step determine all draws.
    """
    from torchvision.transforms.v2 import CutMix, MixUp
    with torch.random.fork_rng(devices=[]):             # torchvision has no argument `generator`
        torch.manual_seed(seed_from(seed, MIX, step))
        use_cutmix = cutmix > 0
        if cutmix and mixup:
            use_cutmix = torch.rand(()) < 0.5
        if use_cutmix:
            return CutMix(alpha=cutmix)(images, targets)
        return MixUp(alpha=mixup)(images, targets)
