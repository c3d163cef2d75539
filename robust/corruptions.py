"""The 15 image corruptions of ImageNet-C on whole uint8 batches, on any device, at any image size.

    images = corrupt(images, "fog", 3, seed=0, index=positions)     # (B, 3, H, W) uint8 -> the same

Hendrycks & Dietterich 2019. Sources: `hendrycks/robustness:ImageNet-C/create_c/make_imagenet_c.py`
(224 px), `make_tinyimagenet_c.py` (64 px), `make_cifar_c.py` (32 px), and for other sizes
`bethgelab/imagecorruptions`. For the same random numbers, the result agrees with the sources within
one grey level.

A corruption is a function of (images, c, draw), an entry in CORRUPTIONS, and an entry in CONSTANTS
in severities.py. images: uint8. c: the severity's constant or constants. draw: a function; draw(n)
returns (B, n) uniform numbers in [0, 1). Grey levels from 0 to 255 are float32 inside; results are
truncated, not rounded. The functions draw_* are separate, so that tests can replace their numbers
by the numbers of the sources.
"""

import math
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial

import numpy as np
import torch
import torch.nn.functional as F

from common import default_workers
from data.rng import CORRUPTION, normal, uniform
from robust.filters import (bilinear, box_shrink, disk, displace, enlarge, gaussian_blur,
                            motion, pixel_grid, quantise)
from robust.frost import scaled_frost
from robust.severities import CONSTANTS


# --- noise ----------------------------------------------------------------------------------------

def draw_values(images, draw):
    """Draw one uniform number per pixel and channel: (B, 3, H, W)."""
    return draw(images[0].numel()).view_as(images)


def gaussian_noise(images, c, draw):
    """Add Gaussian noise of standard deviation c, where white is 1."""
    noise = normal(draw_values(images, draw))
    return quantise(noise.mul_(255 * c).add_(images))


@lru_cache(maxsize=10)
def shot_table(photons, device):
    """Tabulate the noisy value of each pixel value at 2^16 quantiles: (256 * 2^16,) uint8."""
    k = torch.arange(photons, dtype=torch.float64)
    rate = torch.arange(256, dtype=torch.float64)[:, None] * photons / 255
    below = (torch.xlogy(k, rate) - rate - torch.lgamma(k + 1)).exp().cumsum(1)   # Poisson: P(<= k)
    # Column k of edges: the quantile at which k photons end. The last column, `photons` or more, is
    # white and ends at 2^16. count: how many quantiles have k photons.
    edges = F.pad((below * 2 ** 16).round().long(), (0, 1), value=2 ** 16)
    count = edges.diff(dim=1, prepend=edges.new_zeros(256, 1)).flatten()
    value = (torch.arange(photons + 1, dtype=torch.float64) / photons * 255).byte()
    return value.repeat(256).repeat_interleave(count).to(device)


def shot_noise(images, c, draw):
    """Replace x by a draw of Poisson(c * x) / c, by table lookup; white is 1."""
    quantile = (draw_values(images, draw) * 2 ** 16).int()
    index = images.int().mul_(2 ** 16).add_(quantile)
    table = shot_table(c, images.device)
    return table.index_select(0, index.flatten()).view_as(images)


def impulse_noise(images, c, draw):
    """Set a share c of the values to 0 or 255, each channel of a pixel independently."""
    values = draw_values(images, draw)
    return images.masked_fill(values < c, 255).masked_fill_(values < c / 2, 0)


# --- blur -----------------------------------------------------------------------------------------

def defocus_blur(images, c, draw):
    """Convolve with a disk; the image is reflected at its border pixels.

    Some kernels sum to slightly less than 1, as in the source, so white becomes 254. Float32 is too
    coarse for this. So add pixels of equal weight first, which is exact, then weight the sums in
    float64 (float32 on mps).
    """
    H, W = images.shape[2:]
    kernel = disk(*c)
    x = F.pad(images.float(), [len(kernel) // 2] * 4, mode="reflect")
    sum_dtype = torch.float32 if images.device.type == "mps" else torch.float64
    total = torch.zeros_like(images, dtype=sum_dtype)
    same = torch.empty_like(images, dtype=torch.float32)
    for weight in kernel[kernel > 0].unique().tolist():
        same.zero_()
        for i, j in (kernel == weight).nonzero().tolist():
            same.add_(x[:, :, i:i + H, j:j + W])
        total.add_(same, alpha=weight)
    return quantise(total, guard=0)


def draw_glass_blur(draw, H, W, c):
    """Draw shifts dy * W + dx with dy and dx from -d to d - 1: (B, rounds, H - 2d, W - 2d)."""
    _, d, rounds = c
    # One number serves both shifts: its whole part gives dy, and its fraction gives dx.
    numbers = draw(rounds * (H - 2 * d) * (W - 2 * d)).mul_(2 * d)
    dy = numbers.floor() - d
    dx = numbers.frac().mul_(2 * d).floor_() - d
    shift = dy.mul_(W).add_(dx).long()
    return shift.view(-1, rounds, H - 2 * d, W - 2 * d)


def glass_blur(images, c, draw):
    """Blur with a Gaussian, shuffle pixels locally, blur again.

    The source visits the pixels from the last to the first and overwrites each with the pixel at a
    random shift, the target. (It wants to swap them, but swaps two views of one array.) The copies
    form chains. For example, pixel a copies b; b was visited earlier and copied c; so a receives c.
    A chain continues with probability < 0.43 per step. Chains of more than 32 steps are too rare to
    matter. 5 doublings make 2^5 = 32 steps.
    """
    sigma, d, _ = c
    B, C, H, W = images.shape
    shift = draw_glass_blur(draw, H, W, c)
    pixel = torch.arange(H * W, device=images.device).expand(B, -1)
    border = (d + 1, d - 1, d + 1, d - 1)       # left, right, top, bottom: pixels without a shift
    inside = F.pad(torch.ones_like(shift[:, 0], dtype=torch.bool), border).flatten(1)
    doublings = 5 if d > 1 else 0       # d = 1 has no chains: its targets are visited later
    source = pixel
    for step in shift.unbind(1):
        target = pixel + F.pad(step, border).flatten(1)
        visited_earlier = (target > pixel) & inside.gather(1, target)
        end = torch.where(visited_earlier, target, pixel)       # one step along the chain
        for _ in range(doublings):
            end = end.gather(1, end)                            # twice as many steps
        source = source.gather(1, target.gather(1, end))
    x = quantise(gaussian_blur(images.float(), sigma))
    source = source[:, None].expand(-1, C, -1)
    x = x.flatten(2).gather(2, source).view_as(images)
    return quantise(gaussian_blur(x.float(), sigma))


def motion_blur(images, c, draw):
    """Smear along a line at an angle from -45 to 45 degrees."""
    return quantise(motion(images.float(), *c, draw(1)[:, 0] * 90 - 45))


def visible_side(side, factor):
    """Return how many pixels of a side stay visible after zooming in by `factor`."""
    return math.ceil(side / float(factor))


def zoom_blur(images, c, draw):
    """Average the image and enlarged copies of its centre."""
    H, W = images.shape[2:]
    x = images.float()
    total = x.clone()
    # By rounding, arange(1, 1.11, 0.01) includes the end 1.11 (severity 1), as in the source.
    end, step = c
    factors = np.arange(1, end, step).tolist()
    for f in factors:
        h = visible_side(H, f)
        w = visible_side(W, f)
        top = (H - h) // 2
        left = (W - w) // 2
        total += enlarge(x[:, :, top:top + h, left:left + w], f, H, W)
    return quantise(total.div_(len(factors) + 1))


# --- weather --------------------------------------------------------------------------------------

def draw_snow(draw, H, W, c):
    """Draw the visible part of a standard normal field, (B, h, w), and angles (B,) in degrees."""
    zoom = c[2]
    h = visible_side(H, zoom)
    w = visible_side(W, zoom)
    numbers = draw(h * w + 1)
    angle = numbers[:, 0] * 90 - 135
    field = normal(numbers[:, 1:]).view(-1, h, w)
    return field, angle


def snow(images, c, draw):
    """Whiten the image, then add flakes: zoomed, thresholded and smeared noise."""
    mean, std, zoom, threshold, radius, sigma, keep = c
    field, angle = draw_snow(draw, *images.shape[2:], c)
    flakes = enlarge((field * std + mean)[:, None], zoom, *images.shape[2:])
    flakes = flakes.masked_fill(flakes < threshold, 0).clamp(0, 1)
    flakes = motion((flakes * 255).floor(), radius, sigma, angle).floor_()
    x = images.float()
    grey = 0.299 * x[:, :1] + 0.587 * x[:, 1:2] + 0.114 * x[:, 2:]
    x = keep * x + (1 - keep) * torch.maximum(x, 1.5 * grey + 127.5)
    return quantise(x + (flakes + flakes.flip(2, 3)))           # also rotated by 180 degrees


def frost(images, c, draw, frost_dir=None):
    """Return the weighted sum of the image and a random part of a random texture of frost."""
    H, W = images.shape[2:]
    image_weight, frost_weight, scale = c
    numbers = draw(3)
    textures = scaled_frost(frost_dir, scale, H, W, images.device)
    which = (numbers[:, 0] * len(textures)).long().tolist()
    room = torch.tensor([textures[i].shape[1:] for i in which]) - torch.tensor([H, W])
    corners = (numbers[:, 1:].cpu() * room).long().tolist()
    parts = [textures[i][:, y:y + H, x:x + W] for i, (y, x) in zip(which, corners)]
    crops = torch.stack(parts).float()
    return quantise(image_weight * images.float() + frost_weight * crops)


def draw_fog(draw, H, W, c):
    """Draw a plasma fractal in [0, 1], (B, H, W): midpoint displacement on a torus of side 2^k."""
    _, decay = c
    side = 2 ** math.ceil(math.log2(max(H, W)))
    step = side
    noise = 2 * draw(side * side) - 1
    used = 0                                                            # columns of noise
    amplitude = 100.0
    field = torch.zeros(len(noise), side, side, device=noise.device)
    while step >= 2:
        n = side // step
        half = step // 2
        numbers = noise[:, used:used + 3 * n * n].unflatten(1, (3, n, n))
        numbers = numbers.mul(amplitude ** 2)                           # the source squares it, too
        noise_centre, noise_top, noise_left = numbers.unbind(1)
        # Each square has a corner at its top left, a centre, and the middles of its top and left
        # side. A new point is the mean of its four neighbours, plus noise.
        corner = field[:, ::step, ::step].clone()
        corner_right = corner.roll(-1, 2)
        corner_below = corner.roll(-1, 1)
        left_side = corner + corner_below
        centre = (left_side + left_side.roll(-1, 2)) / 4 + noise_centre
        centre_above = centre.roll(1, 1)
        centre_left = centre.roll(1, 2)
        top = (centre + centre_above + corner + corner_right) / 4 + noise_top
        left = (centre + centre_left + corner + corner_below) / 4 + noise_left
        field[:, half::step, half::step] = centre
        field[:, ::step, half::step] = top
        field[:, half::step, ::step] = left
        step = half
        amplitude = amplitude / decay
        used += 3 * n * n
    field -= field.amin((1, 2), keepdim=True)
    return field[:, :H, :W] / field.amax((1, 2), keepdim=True)


def fog(images, c, draw):
    """Return (x + a * plasma) * M / (M + a), where white is 1.

    a: the amount of fog. M: the image's largest value.
    """
    amount, _ = c
    plasma = draw_fog(draw, *images.shape[2:], c)
    largest = images.amax((1, 2, 3), keepdim=True).float()
    x = images + 255 * amount * plasma[:, None]
    return quantise(x.mul_(largest / (largest + 255 * amount)))


# --- colour, shape, coding ------------------------------------------------------------------------

def brightness(images, c, draw):
    """Raise the HSV value V to V' = min(V + c, white): scale all three channels by V' / V."""
    value = images.amax(1, keepdim=True).float()
    brighter = (value + 255 * c).clamp_(max=255)
    return quantise(torch.where(value > 0, images * (brighter / value), brighter))


def contrast(images, c, draw):
    """Multiply each channel's distance from its mean by c."""
    x = images.float()
    total = x.sum(3).long().sum(2)[..., None, None]            # whole numbers: exact in any order
    mean = total / x[0, 0].numel()
    return quantise((x - mean).mul_(c).add_(mean))


def draw_elastic_transform(draw, H, W, c):
    """Draw shifts of 3 corners, (B, 3, 2) up to +-jitter, and fields in [-1, 1), (B, 2, H, W)."""
    _, _, jitter = c
    numbers = 2 * draw(6 + 2 * H * W) - 1
    shifts = jitter * numbers[:, :6].view(-1, 3, 2)
    field = numbers[:, 6:].view(-1, 2, H, W)
    return shifts, field


def elastic_transform(images, c, draw):
    """Move three corners by `jitter` (an affine map), then all pixels by alpha * smoothed field."""
    H, W = images.shape[2:]
    alpha, sigma, _ = c
    x = images.float()
    shifts, field = draw_elastic_transform(draw, H, W, c)
    y0 = H // 2
    x0 = W // 2
    s = min(H, W) // 3
    corners = torch.tensor([[x0 + s, y0 + s], [x0 + s, y0 - s], [x0 - s, y0 - s]]).to(x)
    moved = F.pad(corners + shifts, (0, 1), value=1)
    inverse = torch.linalg.inv_ex(moved)[0]             # inv would wait for a GPU
    # This is inverse @ corners, (B, 3, 2), but @ would round differently for other batch sizes.
    to_source = (inverse[..., None] * corners).sum(2)
    # rows of to_source: factors of across, factors of down, shift; columns: x and y of the source
    a, b, t = to_source[..., None, None].unbind(1)                               # (B, 2, 1, 1) each
    across, down = pixel_grid(H, W, x.device)
    source = a * across + b * down + t                                                # (B, 2, H, W)
    x = bilinear(x, source[:, 0], source[:, 1], align_corners=True)
    return quantise(displace(x, (sigma, sigma), alpha * field))


def elastic_any_size(images, c, draw):
    """Apply smoothed random shifts that grow with the image, as imagecorruptions does."""
    H, W = images.shape[2:]
    field = 2 * draw(2 * H * W).view(-1, 2, H, W) - 1
    shift = c * 0.005 * H * field
    return quantise(displace(images.float(), (0.01 * W, 0.01 * H), shift))


def pixelate(images, c, draw):
    """Shrink by c with a box filter, first across, then down; enlarge by repeating pixels."""
    H, W = images.shape[2:]
    h = int(H * c)
    w = int(W * c)
    # The new pixel at i reads the small pixel in which its centre lies: int((i + 1/2) h / H).
    row = (2 * torch.arange(H, device=images.device) + 1) * h // (2 * H)
    column = (2 * torch.arange(W, device=images.device) + 1) * w // (2 * W)
    x = box_shrink(images.mT, w).mT             # columns: the rows of the transposed image
    x = box_shrink(x, h)                        # rows
    return x[:, :, row][:, :, :, column]


def jpeg_compression(images, c, draw):
    """Encode at quality c, with colours at half resolution, and decode, on CPU threads."""
    from torchvision.io import decode_jpeg, encode_jpeg

    def code(image):
        return decode_jpeg(encode_jpeg(image, c))

    x = images.cpu().contiguous(memory_format=torch.channels_last)      # the encoder's layout
    # One thread per core; torchrun sets PyTorch's own number of threads to 1.
    with ThreadPoolExecutor(default_workers()) as pool:
        decoded = list(pool.map(code, x))
    return torch.stack(decoded).to(images.device)


# --- all of them ----------------------------------------------------------------------------------

ELASTIC_SIZES = (224, 64, 32)         # sides of squares that elastic_transform supports
CORRUPTIONS = {
    "gaussian_noise": gaussian_noise,
    "shot_noise": shot_noise,
    "impulse_noise": impulse_noise,
    "defocus_blur": defocus_blur,
    "glass_blur": glass_blur,
    "motion_blur": motion_blur,
    "zoom_blur": zoom_blur,
    "snow": snow,
    "frost": frost,
    "fog": fog,
    "brightness": brightness,
    "contrast": contrast,
    "elastic_transform": elastic_transform,
    "pixelate": pixelate,
    "jpeg_compression": jpeg_compression,
}
NAMES = tuple(CORRUPTIONS)            # ImageNet-C's 15: means and mCE are taken over these only
# Enter your own corruption here, such as CORRUPTIONS["rain"] = rain.


def table_of(H, W):
    """Return 224, 64 or 32, the table of constants for the shorter side of the images."""
    side = min(H, W)
    if side >= 128:
        return 224
    if side >= 48:
        return 64
    return 32


def choose_function(name, H, W, frost_dir):
    """Return the function of a corruption for images of H x W pixels, and its five constants.

    The function is the entry in CORRUPTIONS, with two exceptions: frost also gets frost_dir, and
    elastic_transform supports three sizes, so other sizes get elastic_any_size.
    """
    function = CORRUPTIONS[name]
    constants = CONSTANTS[name]
    if name == "frost":
        function = partial(frost, frost_dir=frost_dir)
    if name == "elastic_transform" and not (H == W and H in ELASTIC_SIZES):
        function = elastic_any_size
        constants = CONSTANTS["elastic_any_size"]
    if isinstance(constants, dict):
        constants = constants[table_of(H, W)]
    return function, constants


def corrupt(images, name, severity, *, seed=0, index=None, frost_dir=None):
    """Corrupt a batch. An image's random numbers depend on (seed, name, severity, index) alone.

    images: (B, 3, H, W) uint8, RGB, at least 16 pixels per side. name: a key of CORRUPTIONS.
    severity: 1 to 5. index: (B,) ints in [0, 2**31), the numbers of the images in their data set;
    None: 0, 1, 2, ... frost_dir: folder of ImageNet-C's frost photographs; None: synthetic
    textures. Returns new images, (B, 3, H, W) uint8.
    """
    if images.dtype != torch.uint8 or images.shape[1] != 3:
        raise ValueError(f"images are {images.dtype} {tuple(images.shape)}, "
                         f"expected uint8 (B, 3, H, W)")
    if severity not in (1, 2, 3, 4, 5):
        raise ValueError(f"severity is {severity}, expected 1 to 5")
    B, _, H, W = images.shape
    device = images.device
    if index is None:
        index = range(B)
    index = torch.as_tensor(index, dtype=torch.int64).to(device)
    function, constants = choose_function(name, H, W, frost_dir)
    c = constants[severity - 1]
    if name in NAMES:
        purpose = CORRUPTION + NAMES.index(name)
    else:
        purpose = zlib.crc32(name.encode()) // 2        # your own corruption; keys are below 2^31

    # Corrupt slices of the batch that fit into the caches of a CPU, or the memory of a GPU.
    out = torch.empty_like(images, memory_format=torch.contiguous_format)
    pixels = 2 ** 18 if device.type == "cpu" else 2 ** 23
    size = max(1, pixels // (H * W))
    for first in range(0, B, size):
        part = slice(first, first + size)

        def draw(n):
            return uniform(index[part], n, seed, purpose, severity)

        out[part] = function(images[part].contiguous(), c, draw)
    return out
