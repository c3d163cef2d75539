"""The DeiT augmentation of whole batches: shift, flip, RandAugment, random erasing, mixup, cutmix.

The recipe comes from `facebookresearch/deit:main.py`, where timm transforms one PIL image at a
time. Here no loop runs over images, and pixels stay on their device. The result for a sample
depends on (seed, position) only, not on batch, worker or rank; the position is the sample's number
in the whole run. Random decisions are drawn on the CPU as tables `u` of uniform numbers, so the CPU
does not wait for a GPU.

    images = to_float(augment_uint8(images, positions, seed), positions, seed)  # float32, in [0, 1]
    targets = soft_targets(labels, num_classes=10, smoothing=0.1)

Images are (B, 3, H, W). No function changes its input, except random_erase.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F

from data.batches import constant, send
from data.rng import ERASE, ERASE_NOISE, FLIP, RAND_AUGMENT, SHIFT, normal, uniform

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)           # ImageNet's, of pixels in [0, 1]
FILL = (124, 116, 104)                                    # MEAN as 0..255, outside a warped image
ERASE_TRIES = 10
ERASE_COLUMNS = 3 + 2 * ERASE_TRIES                 # of u: apply, top, left, 10 areas, 10 ratios


# --- the recipe -----------------------------------------------------------------------------------

def augment_uint8(images, positions, seed, pad=0, num_ops=0):
    """Run the half of the recipe that stays in uint8: shift (pad > 0), flip, RandAugment.

    images: uint8, after the random resized crop. positions: (B,) int64 on the CPU, below 2**31,
    each sample's number in the whole run. Seed and position determine all random numbers, so this
    function can run on the device or in a worker process. pad: largest shift in pixels. num_ops:
    RandAugment operations per image.
    """
    if pad:
        images = random_crop(images, uniform(positions, 2, seed, SHIFT), pad)
    images = random_hflip(images, uniform(positions, 1, seed, FLIP)[:, 0])
    if num_ops:
        images = rand_augment(images, uniform(positions, 4 * num_ops, seed, RAND_AUGMENT))
    return images


def to_float(images, positions, seed, erase=0.0):
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


# --- shift and flip -------------------------------------------------------------------------------

def random_crop(images, u, pad=4):
    """Shift images by up to `pad` pixels, black outside: torchvision's RandomCrop(size, pad).

    images: uint8. u: (B, 2) on the CPU, one number for top and one for left. Returns the same
    shape.
    """
    B, _, H, W = images.shape
    top, left = send((u.double() * (2 * pad + 1)).long(), images.device).unbind(1)
    crops = F.pad(images, [pad] * 4).unfold(2, H, 1).unfold(3, W, 1)    # all crops, as views
    return crops[torch.arange(B, device=images.device), :, top, left]


def random_hflip(images, u):
    """Mirror the images with u < 0.5 left to right. images: any dtype. u: (B,) on the CPU."""
    left_right = send(u < 0.5, images.device)[:, None, None, None]
    return torch.where(left_right, images.flip(3), images)


# --- RandAugment ----------------------------------------------------------------------------------
# An operation takes (b, 3, H, W) uint8 and an argument (b, 1, 1, 1) float32. It returns uint8,
# truncated as in PIL.

def blend(base, images, factor):
    """Interpolate from base (factor 0) to images (factor 1) and beyond, as PIL's ImageEnhance."""
    return (base + factor * (images - base)).clamp_(0, 255).byte()


def grey(images):
    """Compute PIL's luma of RGB images, (b, 1, H, W) int32 in 0..255."""
    r, g, b = images.int().split(1, dim=1)
    return (19595 * r + 38470 * g + 7471 * b + 0x8000) >> 16


def adjust_contrast(images, factor):
    """Blend with the mean of the grey image."""
    mean = grey(images).sum((2, 3), keepdim=True) / images[0, 0].numel()
    return blend((mean + 0.5).floor(), images, factor)


def adjust_sharpness(images, factor):
    """Blend with a 3 x 3 mean that has weight 5 in the centre and 1 around; keep the border."""
    x, out = images.short(), images.clone()
    rows = x[..., :-2] + x[..., 1:-1] + x[..., 2:]
    centre = x[..., 1:-1, 1:-1]
    total = rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:] + 4 * centre
    out[..., 1:-1, 1:-1] = blend((total / 13).round_(), centre, factor)
    return out


def axes(images):
    """Return the coordinates of the pixels: x (W,) and y (H, 1)."""
    H, W = images.shape[2:]
    return torch.arange(W, device=images.device), torch.arange(H, device=images.device)[:, None]


def taps(pixel, shift, size):
    """Find the neighbours that PIL's bicubic warp reads at the place pixel + shift in a line.

    pixel: indices in a line of `size` pixels. shift: in pixels, or None for no shift.

    Returns:
        the index of the first neighbour, if the line is padded by two pixels at each end
        the weights of the four neighbours (Keys' kernel, a = -1), or (1,) without a shift
        whether the place is inside the line
    """
    if shift is None:
        return pixel + 2, (1,), torch.ones_like(pixel, dtype=torch.bool)
    place = pixel + shift
    inside = (place >= -0.5) & (place < size - 0.5)
    place = place.clamp(-0.5, size - 0.5)
    first = place.floor()
    d = place - first
    e = 1 - d
    weights = -d * e * e, 1 + d * d * (d - 2), 1 + e * e * (e - 2), -e * d * d
    return first.long() + 1, weights, inside


def warp(images, dx=None, dy=None):
    """Set each pixel (x, y) to the image at (x + dx, y + dy): bicubic, FILL outside the image.

    dx, dy: float32 in pixels, broadcast to (b, 1, H, W). None means 0, and is four times faster.
    """
    (H, W), (x, y) = images.shape[2:], axes(images)
    left, across, inside = taps(x, dx, W)
    top, down, within = taps(y, dy, H)

    # In the flat padded image, neighbour (i, j) is i * (W + 4) + j entries after the first one.
    flat = F.pad(images.float(), [2] * 4, mode="replicate").flatten(2)
    index = (top * (W + 4) + left).expand(len(images), 3, H, W).flatten(2)
    total = torch.full_like(images, 2 ** -10, dtype=torch.float32)  # so flat areas do not change
    for i in range(len(down)):
        for j in range(len(across)):
            tap = flat[:, :, i * (W + 4) + j:].gather(2, index).view_as(images)
            total += tap.mul_(down[i] * across[j])
    fill = constant(FILL, images.device).view(3, 1, 1).float()
    return torch.where(inside & within, total.clamp_(0, 255), fill).byte()


def rotate(images, degrees):
    """Rotate counter-clockwise about the centre."""
    (H, W), angle = images.shape[2:], degrees * (math.pi / 180)
    x, y = axes(images)
    x, y, cos, sin = x - (W - 1) / 2, y - (H - 1) / 2, torch.cos(angle), torch.sin(angle)
    return warp(images, cos * x - sin * y - x, sin * x + cos * y - y)


def torchvisions(name):
    """Wrap an operation of torchvision, so that the slow import happens at its first call."""
    def op(images, _):
        from torchvision.transforms.v2 import functional
        return getattr(functional, name)(images)
    return op


def signed(most):
    """Return a function for OPS that computes an argument from -most to most."""
    return lambda x, sign: sign * most * x


def enhance_factor(x, sign):
    """Compute a factor for `blend`, from 0.1 to 1.9; 1 changes nothing."""
    return (1 + sign * 0.9 * x).clamp(min=0.1)


# name in timm: (operation, function of x = level / 10 and sign = +-1 that returns the argument)
OPS = {
    "AutoContrast": (torchvisions("autocontrast"), signed(0)),
    "Equalize": (torchvisions("equalize"), signed(0)),
    "Invert": (lambda images, _: 255 - images, signed(0)),
    "Rotate": (rotate, signed(30)),
    "PosterizeIncreasing": (lambda images, bits: images & (256 - 2 ** (8 - bits.int())).byte(),
                            lambda x, sign: 4 - (4 * x).floor()),
    "SolarizeIncreasing": (lambda images, low: torch.where(images < low, images, 255 - images),
                           lambda x, sign: 256 - (256 * x).floor()),
    "SolarizeAdd": (lambda images, amount: (images + amount * (images < 128)).byte(),
                    lambda x, sign: (110 * x).floor()),
    "ColorIncreasing": (lambda images, f: blend(grey(images), images, f), enhance_factor),
    "ContrastIncreasing": (adjust_contrast, enhance_factor),
    "BrightnessIncreasing": (lambda images, f: blend(0, images, f), enhance_factor),
    "SharpnessIncreasing": (adjust_sharpness, enhance_factor),
    "ShearX": (lambda images, a: warp(images, dx=a * (axes(images)[1] + 0.5)), signed(0.3)),
    "ShearY": (lambda images, a: warp(images, dy=a * (axes(images)[0] + 0.5)), signed(0.3)),
    "TranslateXRel": (lambda images, a: warp(images, dx=a * images.shape[3]), signed(0.45)),
    "TranslateYRel": (lambda images, a: warp(images, dy=a * images.shape[2]), signed(0.45)),
}


def rand_augment(images, u):
    """Draw operations of OPS and apply each with probability 1/2: timm's rand-m9-mstd0.5-inc1.

    The level of an operation is drawn from N(9, 0.5) and clipped to [0, 10]; a fair coin decides
    its sign. images: uint8. u: (B, 4 * operations) on the CPU, four columns per operation: which
    operation, apply or not, level, sign. Returns uint8.
    """
    size = len(images)
    if images.device.type == "cpu":                                 # images that fit in the cache
        size = max(1, 2 ** 15 // (images.shape[2] * images.shape[3]))

    images, u = images.clone(), u.double().unflatten(1, (-1, 4))
    for which, apply, level, sign in u.permute(1, 2, 0):            # (B,) each
        x = (9 + 0.5 * normal(level)).clamp(0, 10) / 10
        sign = torch.where(sign < 0.5, 1.0, -1.0)
        which = torch.where(apply < 0.5, (which * len(OPS)).floor(), -1)
        for i, (op, argument) in enumerate(OPS.values()):
            chosen = (which == i).nonzero()[:, 0]               # `which` is on the CPU: no wait
            for index in chosen.split(size) if len(chosen) else ():
                a = send(argument(x[index], sign[index]).float().view(-1, 1, 1, 1), images.device)
                index = send(index, images.device)
                images[index] = op(images[index], a)
    return images


# --- random erasing -------------------------------------------------------------------------------

def random_erase(images, u, positions, seed, prob):
    """Put a box of noise into images with probability `prob`: timm's RandomErasing(mode="pixel").

    The area of the box is uniform from 2 % to a third of the image, and height / width is
    log-uniform from 0.3 to 1 / 0.3. The first of 10 tries that fits is taken; if none fits, the
    image stays unchanged. The noise is standard normal after normalisation by MEAN and STD, so
    pixels in the box can be outside [0, 1].

    images: float in [0, 1], changed in place and returned. u: (B, ERASE_COLUMNS) on the CPU.
    positions: (B,) int64 on the CPU; together with the seed they determine the noise.
    """
    B, _, H, W = images.shape
    u = u.double()
    share, ratio = u[:, 3:].split(ERASE_TRIES, dim=1)
    pixels = (0.02 + (1 / 3 - 0.02) * share) * H * W                        # (B, 10)
    ratio = torch.exp((1 - 2 * ratio) * math.log(0.3))
    h, w = (pixels * ratio).sqrt().round().long(), (pixels / ratio).sqrt().round().long()
    fits = (h < H) & (w < W)
    chosen = ((u[:, 0] < prob) & fits.any(1)).nonzero()[:, 0]                       # (b,)
    attempt = fits[chosen].int().argmax(1, keepdim=True)
    h, w = h[chosen].gather(1, attempt)[:, 0], w[chosen].gather(1, attempt)[:, 0]
    top, left = (u[chosen, 1] * (H - h + 1)).long(), (u[chosen, 2] * (W - w + 1)).long()

    # Make one column per erased pixel, box after box. The sizes are on the CPU: no wait for a GPU.
    first = (h * w).cumsum(0) - h * w
    boxes = [chosen, positions[chosen], top, left, w, first, h * w]
    boxes = send(torch.stack(boxes), images.device)
    columns = boxes[:6].repeat_interleave(boxes[6], dim=1, output_size=int((h * w).sum()))
    sample, position, top, left, w, first = columns
    i = torch.arange(len(first), device=images.device) - first
    y, x = top + i // w, left + i % w
    noise = normal(uniform(y * W + x, 3, seed, ERASE_NOISE, position.int()))            # (n, 3)
    noise = noise * constant(STD, images.device) + constant(MEAN, images.device)
    images[sample, :, y, x] = noise.to(images.dtype)
    return images


# --- mixup and cutmix -----------------------------------------------------------------------------

def partner(x):
    """Swap neighbours: rows 2i and 2i + 1."""
    return x.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


def mix(images, targets, key, mixup=0.8, cutmix=1.0):
    """Mix each image and target with its neighbour: timm's Mixup in mode "batch".

    A batch is mixed by mixup or by cutmix; if both arguments are > 0, a fair coin decides. The
    batch has one lambda ~ Beta(alpha, alpha), where alpha is the argument `mixup` or `cutmix`.
    mixup: lambda * image + (1 - lambda) * partner. cutmix: copy a box of the partner that covers a
    share 1 - lambda. The centre of the box is anywhere, so the border can clip the box; then lambda
    becomes the share of pixels that are kept.

    The partner is the neighbour in the batch; in timm it comes from the reversed batch. So a slice
    of a batch, such as the part of one process, is mixed as within the whole batch, if the slice
    begins and ends at an even index. Copies of one image should not be neighbours.

    images: float; B is even. targets: (B, K). key: ints (seed, step) that determine all random
    numbers. Returns mixed images and targets.
    """
    rng = np.random.default_rng(key)
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
