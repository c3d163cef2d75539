"""The 15 image corruptions of ImageNet-C on whole uint8 batches, on any device, at any image size.

Hendrycks & Dietterich 2019. Sources: `hendrycks/robustness:ImageNet-C/create_c/make_imagenet_c.py` (224 px),
`make_tinyimagenet_c.py` (64 px), `make_cifar_c.py` (32 px), and for other sizes
`bethgelab/imagecorruptions:imagecorruptions/corruptions.py`; there they take one PIL image at a time. Here

    images = corrupt(images, "fog", 3, seed=0, index=positions)                     # (B, 3, H, W) uint8 -> the same

Every random corruption is two functions, `draw_<name>` and `<name>`. What is drawn for an image depends on (seed,
corruption, severity, its index) alone: batch size, order, worker, process and device change nothing. What is then done
with it is deterministic and agrees with the sources within one grey level (tests/test_corruptions.py).
Inside, pixels are float32 in grey levels, 0 to 255; results are truncated, not rounded, as the sources do.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from data.augment import normal
from data.rng import uniform
from data import decode

NAMES = ("gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur",
         "snow", "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression")
FROST_FILES = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")     # frost6.jpg is never drawn
MIN_SIDE = 16                                                                   # pixels; the sources need 32
PURPOSE = 50                                                                    # first of our keys in common.uniform

# CONSTANTS[name][table] has one entry per severity. Tables: 224 for images whose shorter side is at least 128 px, 64
# from 48 px on, 32 below. The 244 in elastic_transform is ImageNet-C's own.
CONSTANTS = {
    "gaussian_noise": {                                                         # standard deviation, white is 1
        224: (.08, .12, .18, .26, .38), 64: (.04, .08, .12, .15, .18), 32: (.04, .06, .08, .09, .10)},
    "shot_noise": {                                                             # photons of a white pixel
        224: (60, 25, 12, 5, 3), 64: (250, 100, 50, 30, 15), 32: (500, 250, 100, 75, 50)},
    "impulse_noise": {                                                          # share of the values hit
        224: (.03, .06, .09, .17, .27), 64: (.01, .02, .05, .08, .14), 32: (.01, .02, .03, .05, .07)},
    "defocus_blur": {                                                           # radius, sigma of its edge
        224: ((3, .1), (4, .5), (6, .5), (8, .5), (10, .5)), 64: ((.5, .6), (1, .1), (1.5, .1), (2.5, .01), (3, .1)),
        32: ((.3, .4), (.4, .5), (.5, .6), (1, .2), (1.5, .1))},
    "glass_blur": {                                                             # sigma, largest shift, iterations
        224: ((.7, 1, 2), (.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
        64: ((.1, 1, 1), (.5, 1, 1), (.6, 1, 2), (.7, 2, 1), (.9, 2, 2)),
        32: ((.05, 1, 1), (.25, 1, 1), (.4, 1, 1), (.25, 1, 2), (.4, 1, 2))},
    "motion_blur": {                                                            # radius, sigma
        224: ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)), 64: ((10, 1), (10, 1.5), (10, 2), (10, 2.5), (12, 3)),
        32: ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))},
    "zoom_blur": {                                                              # factors: from 1 to below, in steps of
        224: ((1.11, .01), (1.16, .01), (1.21, .02), (1.26, .02), (1.31, .03)),
        64: ((1.06, .01), (1.11, .01), (1.16, .01), (1.21, .01), (1.26, .01)),
        32: ((1.06, .01), (1.11, .01), (1.16, .01), (1.21, .01), (1.26, .01))},
    "snow": {                                                   # mean, std, zoom, threshold, radius, sigma, image kept
        224: ((.1, .3, 3, .5, 10, 4, .8), (.2, .3, 2, .5, 12, 4, .7), (.55, .3, 4, .9, 12, 8, .7),
              (.55, .3, 4.5, .85, 12, 8, .65), (.55, .3, 2.5, .85, 12, 12, .55)),
        64: ((.1, .2, 1, .6, 8, 3, .8), (.1, .2, 1, .5, 10, 4, .8), (.15, .3, 1.75, .55, 10, 4, .7),
             (.25, .3, 2.25, .6, 12, 6, .65), (.3, .3, 1.25, .65, 14, 12, .6)),
        32: ((.1, .2, 1, .6, 8, 3, .95), (.1, .2, 1, .5, 10, 4, .9), (.15, .3, 1.75, .55, 10, 4, .9),
             (.25, .3, 2.25, .6, 12, 6, .85), (.3, .3, 1.25, .65, 14, 12, .8))},
    "frost": {                                                                  # weights of image, frost; frost's size
        224: ((1, .4, 1), (.8, .6, 1), (.7, .7, 1), (.65, .7, 1), (.6, .75, 1)),
        64: ((1, .3, .3), (.9, .4, .3), (.8, .45, .3), (.75, .5, .3), (.7, .55, .3)),
        32: ((1, .2, .2), (1, .3, .2), (.9, .4, .2), (.85, .4, .2), (.75, .45, .2))},
    "fog": {                                                                    # amount, decay per octave
        224: ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
        64: ((.4, 3), (.7, 3), (1, 2.5), (1.5, 2), (2, 1.75)),
        32: ((.2, 3), (.5, 3), (.75, 2.5), (1, 2), (1.5, 1.75))},
    "brightness": {                                                             # added to the value, white is 1
        224: (.1, .2, .3, .4, .5), 64: (.1, .2, .3, .4, .5), 32: (.05, .1, .15, .2, .3)},
    "contrast": {                                                               # factor
        224: (.4, .3, .2, .1, .05), 64: (.4, .3, .2, .1, .05), 32: (.75, .5, .4, .3, .15)},
    "elastic_transform": {                                                      # alpha, sigma, jitter of the corners
        224: [(244 * a, 244 * s, 244 * j) for a, s, j in
              ((2, .7, .1), (2, .08, .2), (.05, .01, .02), (.07, .01, .02), (.12, .01, .02))],
        64: [(64 * a, 64 * s, 64 * j) for a, s, j in
             ((0, 0, .08), (.05, .3, .06), (.1, .08, .06), (.1, .03, .03), (.16, .03, .02))],
        32: [(32 * a, 32 * s, 32 * j) for a, s, j in
             ((0, 0, .08), (.05, .2, .07), (.08, .06, .06), (.1, .04, .05), (.1, .03, .03))]},
    "elastic_any_size": {table: (12.5, 16.25, 21.25, 25, 30) for table in (224, 64, 32)},          # alpha
    "pixelate": {                                                               # scale
        224: (.6, .5, .4, .3, .25), 64: (.9, .8, .7, .6, .5), 32: (.95, .9, .85, .75, .65)},
    "jpeg_compression": {                                                       # quality
        224: (25, 18, 15, 10, 7), 64: (65, 58, 50, 40, 25), 32: (80, 65, 58, 50, 40)},
    "saturate": {                                                               # saturation times, plus
        224: ((.3, 0), (.1, 0), (2, 0), (5, .1), (20, .2)), 64: ((.3, 0), (.1, 0), (2, 0), (5, .1), (30, .2)),
        32: ((.3, 0), (.1, 0), (1.5, 0), (2, .1), (2.5, .2))},
}


def quantise(x, guard=2 ** -12):
    """Grey levels to uint8: clipped and truncated. x is used up.

    The guard is added, so that float32 noise does not darken flat areas; int32 in between is faster on the CPU.
    """
    return x.add_(guard).clamp_(0, 255).int().byte()


# --- noise ------------------------------------------------------------------------------------------------------------
# From here on: u(n) gives (B, n) uniform numbers in [0, 1); c is the severity's entry in CONSTANTS; images are uint8.

def draw_values(u, H, W, c):
    """One uniform number for each value of the images."""
    return u(3 * H * W).view(-1, 3, H, W)


def gaussian_noise(images, c, u):
    """x + N(0, c)."""
    return quantise(normal(u).mul_(255 * c).add_(images))


@lru_cache(maxsize=10)
def shot_table(photons, device):
    """Inverse distribution function, at 2^16 points, of what each pixel value becomes: (256 * 2^16,) uint8."""
    k = torch.arange(photons, dtype=torch.float64)
    rate = torch.arange(256, dtype=torch.float64)[:, None] * photons / 255
    below = (torch.xlogy(k, rate) - rate - torch.lgamma(k + 1)).exp().cumsum(1)                 # Poisson: P(<= k)
    edges = F.pad((below * 2 ** 16).round().long(), (0, 1), value=2 ** 16)
    value = (torch.arange(photons + 1, dtype=torch.float64) / photons * 255).byte()             # k >= photons: white
    return value.repeat(256).repeat_interleave(edges.diff(dim=1, prepend=edges.new_zeros(256, 1)).flatten()).to(device)


def shot_noise(images, c, u):
    """Poisson(c * x) / c, by inversion; probabilities are multiples of 2^-16."""
    index = images.int().mul_(2 ** 16).add_((u * 2 ** 16).int())
    return shot_table(c, images.device).index_select(0, index.flatten()).view_as(images)


def impulse_noise(images, c, u):
    """A share c of the values, each channel on its own, becomes 0 or 255."""
    return images.masked_fill(u < c, 255).masked_fill_(u < c / 2, 0)


# --- blur -------------------------------------------------------------------------------------------------------------

def blur(x, kernel):
    """Filter each channel of each image with the same (h, w) kernel; x is already padded. float32."""
    B, C, H, W = x.shape
    return F.conv2d(x.view(1, B * C, H, W), kernel.expand(B * C, 1, -1, -1), groups=B * C).unflatten(1, (B, C))[0]


def gaussian(radius, sigma):
    """Gaussian at -radius .. radius, sum 1; (2 * radius + 1,) float64."""
    k = torch.arange(-radius, radius + 1, dtype=torch.float64)
    weight = (-k ** 2 / (2 * max(sigma, 1e-9) ** 2)).exp()
    return weight / weight.sum()


@lru_cache(maxsize=None)
def disk(radius, sigma):
    """Disk of lattice points, its edge smoothed by a small Gaussian.

    The Gaussian reflects at the grid's border, so the sum is 1.013 for radius 8 and 1.011 for 10: as in the source,
    images become a little brighter.
    """
    half, edge = (8, 1) if radius <= 8 else (radius, 2)
    x, side = torch.arange(-half, half + 1), 2 * half + 1
    kernel = (x ** 2 + x[:, None] ** 2 <= radius ** 2).float()
    kernel = F.pad((kernel / kernel.sum())[None, None], [edge] * 4, mode="reflect")[0, 0]
    g = gaussian(edge, sigma).float().double()
    for _ in range(2):                                                      # rows, columns, rounded as by OpenCV
        kernel = kernel.T
        total = kernel[edge:edge + side] * g[edge].float()
        for i in range(1, edge + 1):
            pair = kernel[edge - i:][:side] + kernel[edge + i:][:side]
            total = (total + pair * g[edge + i]).float()
        kernel = total
    kernel = (kernel.double() + kernel.mT) / 2                              # equal weights are equal; the sum is kept
    empty = int((kernel.sum(0) > 0).int().argmax())                                             # cut off what is zero
    return kernel[empty:side - empty, empty:side - empty]


def defocus_blur(images, c):
    """Convolution with a disk; the image is reflected about its border pixels.

    Some kernels sum to a little below 1, as the source's: white becomes 254. Float32 cannot tell, so pixels of equal
    weight are added first, which is exact, and then weighted in float64 (which MPS has not).
    """
    H, W = images.shape[2:]
    kernel = disk(*c)
    x = F.pad(images.float(), [len(kernel) // 2] * 4, mode="reflect")
    exact = torch.float32 if images.device.type == "mps" else torch.float64
    total, same = torch.zeros_like(images, dtype=exact), torch.empty_like(images, dtype=torch.float32)
    for weight in kernel[kernel > 0].unique().tolist():
        same.zero_()
        for i, j in (kernel == weight).nonzero().tolist():
            same.add_(x[:, :, i:i + H, j:j + W])
        total.add_(same, alpha=weight)
    return quantise(total, guard=0)


def gaussian_blur(x, sigma):
    """Gaussian filter cut off at 4 sigma, borders repeated (skimage.filters.gaussian); x: float32."""
    radius = int(4 * sigma + 0.5)
    g = gaussian(radius, sigma).float().to(x.device)
    x = F.pad(x, [radius] * 4, mode="replicate")
    return blur(blur(x, g[None, :]), g[:, None])


def draw_glass_blur(u, H, W, c):
    """Shifts dx, dy in -d .. d - 1, as dy * W + dx, of pixels d + 1 .. side - d: (B, iterations, H - 2d, W - 2d)."""
    d = c[1]
    u = u(c[2] * (H - 2 * d) * (W - 2 * d)).mul_(2 * d)                                         # one number for both
    dy, dx = u.floor() - d, u.frac().mul_(2 * d).floor_() - d
    return dy.mul_(W).add_(dx).long().view(-1, c[2], H - 2 * d, W - 2 * d)


def glass_blur(images, c, shift):
    """Gaussian blur, local shuffling, Gaussian blur.

    The source scans from the last pixel to the first and copies to each one the pixel at its shift: it means to swap,
    but swaps two views of one array. What is copied from a pixel scanned before is what that one had just received:
    a chain of pointers, followed by doubling; one step goes on with probability < 0.43, so 32 are enough.
    """
    sigma, d, _ = c
    B, C, H, W = images.shape
    here, border = torch.arange(H * W, device=images.device).expand(B, -1), (d + 1, d - 1, d + 1, d - 1)
    inside = F.pad(torch.ones_like(shift[:, 0], dtype=torch.bool), border).flatten(1)
    source = here
    for step in shift.unbind(1):
        target = here + F.pad(step, border).flatten(1)
        before = (target > here) & inside.gather(1, target)                                     # scanned before here?
        chain = torch.where(before, target, here)
        for _ in range(5 if d > 1 else 0):                                                      # d = 1: never
            chain = chain.gather(1, chain)
        source = source.gather(1, target.gather(1, chain))
    x = quantise(gaussian_blur(images.float(), sigma)).flatten(2)
    x = x.gather(2, source[:, None].expand(-1, C, -1)).view_as(images)
    return quantise(gaussian_blur(x.float(), sigma))


def motion(x, radius, sigma, angle):
    """One-sided Gaussian smear over 2 * radius + 1 pixels in whole-pixel shifts, borders repeated.

    x: (B, C, H, W) float32; angle: (B,) in degrees. As ImageMagick's MotionBlur.
    """
    (B, C, H, W), reach = x.shape, 2 * radius
    i = torch.arange(reach + 1, device=x.device, dtype=angle.dtype)[:, None]
    weight = [math.exp(-k ** 2 / (2 * sigma ** 2)) for k in range(reach + 1)]
    dy = (i * torch.sin(angle * (math.pi / 180)) - 0.5).ceil().long()                           # (taps, B)
    dx = (i * torch.cos(angle * (math.pi / 180)) - 0.5).ceil().long()
    padded = F.pad(x, [reach] * 4, mode="replicate")
    Hp, Wp = padded.shape[2:]
    rows = padded.flatten().unfold(0, W, 1)                                 # row p: the W values from position p on
    first = torch.arange(B * C, device=x.device).view(B, C, 1) * (Hp * Wp) + reach * (Wp + 1)
    first = (first + torch.arange(H, device=x.device) * Wp).flatten(1) + (dy * Wp + dx)[..., None]  # (taps, B, C * H)
    out = torch.zeros_like(x).view(-1, W)
    for k, index in zip(weight, first.flatten(1)):
        out.add_(rows.index_select(0, index), alpha=k / sum(weight))
    return out.view_as(x)


def draw_motion_blur(u, H, W, c):
    """Angle in degrees, (B,)."""
    return u(1)[:, 0] * 90 - 45


def motion_blur(images, c, angle):
    """Smear along a line."""
    return quantise(motion(images.float(), *c, angle))


def sample(x, across, down, align_corners):
    """Bilinear lookup at pixel coordinates, which broadcast to (B, H, W).

    Beyond the image: reflected, about the centres of the border pixels (align_corners) or about their outer edges.
    """
    (B, _, h, w), edge = x.shape, 0 if align_corners else 0.5                               # grid_sample wants [-1, 1]
    across, down = ((t + edge) * (2 / (n - 1 + 2 * edge)) - 1 for t, n in ((across, w), (down, h)))
    grid = torch.stack(torch.broadcast_tensors(across, down), -1)
    return F.grid_sample(x, grid.expand(B, -1, -1, -1), padding_mode="reflection", align_corners=align_corners)


def pixel_grid(H, W, device):
    """Coordinates of the pixels: across (W,), down (H, 1); float32."""
    return torch.arange(W, device=device).float(), torch.arange(H, device=device).float()[:, None]


def cropped(side, factor):
    """Part of a side that is seen after zooming in, in pixels."""
    return math.ceil(side / float(factor))


def enlarge(x, factor, H, W):
    """Bilinear zoom, end on end, of (B, C, h, w) by `factor`, of which the first H x W pixels are returned."""
    h, w = x.shape[2:]
    across, down = pixel_grid(H, W, x.device)
    return sample(x, across * ((w - 1) / (round(w * factor) - 1)), down * ((h - 1) / (round(h * factor) - 1)), True)


def zoom_blur(images, c):
    """Mean of the image and its zooms about the centre."""
    H, W = images.shape[2:]
    x = images.float()
    factors, total = np.arange(1, *c).tolist(), x.clone()       # at 224, severity 1 this has 1.11 in it, as the source
    for f in factors:
        h, w = cropped(H, f), cropped(W, f)
        top, left = (H - h) // 2, (W - w) // 2
        total += enlarge(x[:, :, top:top + h, left:left + w], f, H, W)
    return quantise(total.div_(len(factors) + 1))


# --- weather ----------------------------------------------------------------------------------------------------------

def draw_snow(u, H, W, c):
    """Standard normal field, of which only the part seen after zooming is drawn, and the angle in degrees."""
    h, w = cropped(H, c[2]), cropped(W, c[2])
    u = u(h * w + 1)
    return normal(u[:, 1:]).view(-1, h, w), u[:, 0] * 90 - 135


def snow(images, c, field, angle):
    """Whiten the image, then add flakes: a zoomed, thresholded, smeared noise field, and the same upside down."""
    mean, std, zoom, threshold, radius, sigma, keep = c
    flakes = enlarge((field * std + mean)[:, None], zoom, *images.shape[2:])
    flakes = flakes.masked_fill(flakes < threshold, 0).clamp(0, 1)
    flakes = motion((flakes * 255).floor(), radius, sigma, angle).floor_()
    x = images.float()
    grey = 0.299 * x[:, :1] + 0.587 * x[:, 1:2] + 0.114 * x[:, 2:]
    x = keep * x + (1 - keep) * torch.maximum(x, 1.5 * grey + 127.5)
    return quantise(x + (flakes + flakes.flip(2, 3)))


# Statistics of the five photographs of frost: mean and std of red, green, blue, and b in spectrum ~ frequency^-b.
FROST = (((.305, .585, .650), (.106, .065, .060), 1.23), ((.787, .805, .841), (.084, .087, .089), 1.93),
         ((.787, .805, .841), (.084, .087, .089), 1.93), ((.540, .599, .648), (.112, .112, .117), 1.48),
         ((.441, .484, .528), (.174, .170, .163), 1.96))


def synthetic_frost(number, H=600, W=900):
    """Stand-in for photograph `number`, (3, H, W) uint8: Gaussian noise with its spectrum and colours, and ridges."""
    mean, std, b = FROST[number]
    frequency = torch.hypot(torch.fft.fftfreq(H)[:, None], torch.fft.rfftfreq(W))
    amplitude = torch.where(frequency > 0, frequency.clamp(min=1 / W) ** (-b / 2), 0)
    white = normal(uniform(torch.tensor([number]), H * W, PURPOSE)).view(H, W)

    def standardise(x):
        return (x - x.mean()) / x.std()
    field = standardise(torch.fft.irfft2(torch.fft.rfft2(white) * amplitude, s=(H, W)))
    field = standardise(0.6 * field + 0.4 * standardise(1 - 2 * field.abs()))
    return quantise(255 * (torch.tensor(mean)[:, None, None] + torch.tensor(std)[:, None, None] * field))


@lru_cache(maxsize=2)
def load_frost(frost_dir):
    """The five textures, (3, h, w) uint8 each: ImageNet-C's files, or synthetic ones if frost_dir is None."""
    if frost_dir is None:
        return [synthetic_frost(number) for number in range(len(FROST))]
    missing = [name for name in FROST_FILES if not Path(frost_dir, name).is_file()]
    if missing:
        raise ValueError(f"frost_dir {frost_dir} lacks {', '.join(missing)}; "
                         f"expected ImageNet-C's {', '.join(FROST_FILES)}")
    return [decode(np.fromfile(Path(frost_dir, name), dtype=np.uint8), name) for name in FROST_FILES]


@lru_cache(maxsize=8)
def scaled_frost(frost_dir, scale, H, W, device):
    """The textures at `scale`, enlarged where H x W does not fit in (by 10 % more than needed, bicubic).

    Returns (all values behind each other, start of each texture, heights, widths).
    """
    textures = []
    for texture in load_frost(frost_dir):
        x = texture[None].to(device).float()
        if scale != 1:
            x = F.interpolate(x, scale_factor=scale, mode="bilinear").round_()
        need = max((H + 1) / x.shape[2], (W + 1) / x.shape[3])
        if need > 1:
            x = F.interpolate(x, scale_factor=1.1 * need, mode="bicubic").round_().clamp_(0, 255)
        textures.append(x[0].byte())
    starts = np.cumsum([0] + [t.numel() for t in textures[:-1]])
    return (torch.cat([t.flatten() for t in textures]),
            *(torch.as_tensor(n, device=device) for n in (starts, *zip(*(t.shape[1:] for t in textures)))))


def draw_frost(u, H, W, c, frost_dir=None):
    """A random part of a random texture: (B, 3, H, W) uint8."""
    which, top, left = u(3).unbind(1)
    values, start, height, width = scaled_frost(frost_dir, c[2], H, W, which.device)
    which = (which * len(start)).long()
    start, height, width = start[which], height[which], width[which]
    top, left = (top * (height - H)).long(), (left * (width - W)).long()
    rows = start[:, None] + torch.arange(3, device=which.device) * (height * width)[:, None]
    rows = rows[..., None] + (top[:, None] + torch.arange(H, device=which.device))[:, None] * width[:, None, None]
    return values.unfold(0, W, 1).index_select(0, (rows + left[:, None, None]).flatten()).view(-1, 3, H, W)


def frost(images, c, texture):
    """Weighted sum with a photograph of frost."""
    return quantise(c[0] * images.float() + c[1] * texture.float())


def draw_fog(u, H, W, c):
    """Plasma, (B, H, W) in [0, 1]: diamond-square midpoint displacement on a torus whose side is a power of two."""
    step = side = 2 ** math.ceil(math.log2(max(H, W)))
    noise, wibble = 2 * u(side * side) - 1, 100.0
    m = torch.zeros(len(noise), side, side, device=noise.device)
    used = 0
    while step >= 2:
        n, half = side // step, step // 2
        a, b, d = noise[:, used:used + 3 * n * n].unflatten(1, (3, n, n)).mul(wibble ** 2).unbind(1)  # squared: theirs
        corner = m[:, ::step, ::step].clone()
        square = corner + corner.roll(-1, 1)
        centre = (square + square.roll(-1, 2)) / 4 + a
        m[:, half::step, half::step] = centre
        m[:, ::step, half::step] = (centre + centre.roll(1, 1) + corner + corner.roll(-1, 2)) / 4 + b
        m[:, half::step, ::step] = (centre + centre.roll(1, 2) + corner + corner.roll(-1, 1)) / 4 + d
        step, wibble, used = half, wibble / c[1], used + 3 * n * n
    m -= m.amin((1, 2), keepdim=True)
    return m[:, :H, :W] / m.amax((1, 2), keepdim=True)


def fog(images, c, plasma):
    """(x + c * plasma) * M / (M + c), where M is the image's largest value."""
    white = images.amax((1, 2, 3), keepdim=True).float()
    return quantise((images + 255 * c[0] * plasma[:, None]).mul_(white / (white + 255 * c[0])))


# --- colour, shape, coding --------------------------------------------------------------------------------------------

def brightness(images, c):
    """Add c to the V of HSV: all three channels are scaled by V' / V."""
    value = images.amax(1, keepdim=True).float()
    brighter = (value + 255 * c).clamp_(max=255)
    return quantise(torch.where(value > 0, images * (brighter / value), brighter))


def contrast(images, c):
    """Move each channel towards its mean."""
    x = images.float()
    mean = x.sum(3).long().sum(2)[..., None, None] / x[0, 0].numel()            # whole numbers: exact in any order
    return quantise((x - mean).mul_(c).add_(mean))


@lru_cache(maxsize=32)
def smoothing(size, sigma, device):
    """Matrix (size, size) of a Gaussian filter cut off at 3 sigma, with reflected borders (scipy's mode "reflect")."""
    radius = int(3 * sigma + 0.5)
    source = (torch.arange(size)[:, None] + torch.arange(-radius, radius + 1)) % (2 * size)
    matrix = torch.zeros(size, size, dtype=torch.float64)
    matrix.scatter_add_(1, torch.minimum(source, 2 * size - 1 - source), gaussian(radius, sigma).expand(size, -1))
    return matrix.float().to(device)


def displace(x, sigma, shift):
    """Move each pixel by smoothed random shifts. shift: (B, 2, H, W) in pixels before smoothing, across and down."""
    B, _, H, W = x.shape
    S, T = smoothing(H, sigma[0], x.device), smoothing(W, sigma[1], x.device)
    shift = shift.flatten(0, 1)
    shift = (S.expand(2 * B, -1, -1) @ shift @ T.mT.expand(2 * B, -1, -1)).unflatten(0, (B, 2))
    across, down = pixel_grid(H, W, x.device)
    return sample(x, across + shift[:, 0], down + shift[:, 1], align_corners=False)


def draw_elastic_transform(u, H, W, c):
    """Shifts of the triangle's corners, (B, 3, 2), uniform up to +-c[2] pixels; and fields in [-1, 1), (B, 2, H, W)."""
    u = 2 * u(6 + 2 * H * W) - 1
    return c[2] * u[:, :6].view(-1, 3, 2), u[:, 6:].view(-1, 2, H, W)


def elastic_transform(images, c, jitter, field):
    """Affine map that moves a triangle's corners by jitter, then smoothed random shifts: ImageNet-C's."""
    (H, W), (alpha, sigma, _), x = images.shape[2:], c, images.float()
    y0, x0, s = H // 2, W // 2, min(H, W) // 3
    corners = torch.tensor([[x0 + s, y0 + s], [x0 + s, y0 - s], [x0 - s, y0 - s]], device=x.device, dtype=x.dtype)
    moved = corners + jitter
    to_source = torch.linalg.inv_ex(torch.cat([moved, torch.ones_like(moved[..., :1])], 2))[0] @ corners    # (B, 3, 2)
    a, b, t = to_source[..., None, None].unbind(1)                                              # (B, 2, 1, 1) each
    across, down = pixel_grid(H, W, x.device)
    source = a * across + b * down + t                                                          # (B, 2, H, W)
    x = sample(x, source[:, 0], source[:, 1], align_corners=True)
    return quantise(displace(x, (sigma, sigma), alpha * field))


def draw_elastic_any_size(u, H, W, c):
    """Fields in [-1, 1), (B, 2, H, W)."""
    return 2 * u(2 * H * W).view(-1, 2, H, W) - 1


def elastic_any_size(images, c, field):
    """Smoothed random shifts that grow with the image: imagecorruptions'."""
    H, W = images.shape[2:]
    return quantise(displace(images.float(), (0.01 * H, 0.01 * W), c * 0.005 * H * field))


@lru_cache(maxsize=32)
def boxes(size, n, device):
    """Windows [int(i * s + 0.5), int((i + 1) * s + 0.5)), s = size / n.

    Returns their members, (widest, n), filled up with `size`, and their lengths, (n, 1) float32.
    """
    edge = torch.tensor([int(i * size / n + 0.5) for i in range(n + 1)])
    member = edge[:-1] + torch.arange(int(edge.diff().max()))[:, None]
    return torch.where(member < edge[1:], member, size).to(device), edge.diff()[:, None].float().to(device)


def shrink(images, n):
    """Mean over n windows of rows, rounded: PIL's BOX filter. (B, 3, H, W) -> (B, 3, n, W) uint8."""
    member, length = boxes(images.shape[2], n, images.device)
    x = F.pad(images, (0, 0, 0, 1))
    total = x.index_select(2, member[0]).float()
    for rows in member[1:]:
        total += x.index_select(2, rows).float()
    return total.mul_(1 / length).add_(0.5).short().byte()


def pixelate(images, c):
    """Shrink by c with a box filter, across and then down; enlarge by repeating pixels.

    Columns are worked on as rows of the transposed image: whole rows of memory are faster than single pixels.
    """
    H, W = images.shape[2:]
    h, w = int(H * c), int(W * c)
    row, column = ((2 * torch.arange(n, device=images.device) + 1) * m // (2 * n) for n, m in ((H, h), (W, w)))
    x = shrink(images.mT.contiguous(), w)
    x = shrink(x.mT.contiguous(), h)
    x = x.mT.contiguous().index_select(2, column)
    return x.mT.contiguous().index_select(2, row)


def jpeg_compression(images, c):
    """Encode at quality c, with colours at half resolution, and decode; on the CPU, on as many threads as torch."""
    from torchvision.io import decode_jpeg, encode_jpeg

    def recode(part):
        part = torch.stack(part.unbind(1), -1).permute(0, 3, 1, 2)              # red, green, blue together in memory
        return torch.stack([decode_jpeg(encode_jpeg(image, c)) for image in part])
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads) as pool:
        parts = (pool.map if threads > 1 else map)(recode, images.cpu().chunk(threads))
        return torch.cat(list(parts)).to(images.device)


def jpeg85(images):
    """JPEG of quality 85, as which ImageNet-C's files are saved after their corruption."""
    return jpeg_compression(images, 85)


def saturate(images, c):
    """Saturation S of HSV becomes c[0] * S + c[1]; greys, which have no hue, count as red. Not one of the 15."""
    value, low = images.amax(1, keepdim=True).float(), images.amin(1, keepdim=True)
    span = value - low
    red = torch.tensor([0.0, 1, 1], device=images.device).view(3, 1, 1)
    distance = torch.where(span > 0, (value - images) / span, red)                              # 0: channel is V
    saturation = (c[0] * torch.where(value > 0, span / value, 0) + c[1]).clamp_(0, 1)
    return quantise(value * (1 - distance * saturation))


# --- all of them ------------------------------------------------------------------------------------------------------

DRAW = dict(gaussian_noise=draw_values, shot_noise=draw_values, impulse_noise=draw_values, glass_blur=draw_glass_blur,
            motion_blur=draw_motion_blur, snow=draw_snow, frost=draw_frost, fog=draw_fog,
            elastic_transform=draw_elastic_transform, elastic_any_size=draw_elastic_any_size)
APPLY = {f.__name__: f for f in (
    gaussian_noise, shot_noise, impulse_noise, defocus_blur, glass_blur, motion_blur, zoom_blur, snow, frost, fog,
    brightness, contrast, elastic_transform, elastic_any_size, pixelate, jpeg_compression, saturate)}


def corrupt(images, name, severity, *, seed=0, index=None, table=None, frost_dir=None, elastic=None):
    """Corrupt a batch; with the same seed and index an image always comes out the same.

    images: (B, 3, H, W) uint8, RGB, at least 16 pixels a side. name: of NAMES, or "saturate". severity: 1 to 5. index:
    (B,) ints in [0, 2**31), the images' numbers in their data set; None: 0, 1, 2, ... table: 224, 64 or 32, whose
    constants to take; None: by the shorter side. frost_dir: folder with ImageNet-C's frost photographs; None: synthetic
    textures. elastic: "h" for ImageNet-C's elastic_transform, "i" for imagecorruptions'; None: "h" for squares of 224,
    64 and 32 pixels, which is what it was made for, else "i".
    Returns the same shape, dtype and device; images stays as it is. Raises ValueError for other input.
    """
    if not (torch.is_tensor(images) and images.dtype == torch.uint8 and images.ndim == 4 and images.shape[1] == 3):
        what = f"{tuple(images.shape)} {images.dtype}" if torch.is_tensor(images) else type(images).__name__
        raise ValueError(f"images are {what}, expected a tensor (B, 3, H, W) of torch.uint8")
    B, _, H, W = images.shape
    if min(H, W) < MIN_SIDE:
        raise ValueError(f"images are {H} x {W} pixels, expected at least {MIN_SIDE} a side")
    if name not in (*NAMES, "saturate"):
        raise ValueError(f"unknown corruption {name!r}, expected one of {', '.join(NAMES)}, saturate")
    if not isinstance(severity, int) or isinstance(severity, bool) or not 1 <= severity <= 5:
        raise ValueError(f"severity is {severity!r}, expected an int from 1 to 5")
    if table not in (None, 224, 64, 32):
        raise ValueError(f"table is {table!r}, expected 224, 64, 32 or None")
    if elastic not in (None, "h", "i"):
        raise ValueError(f"elastic is {elastic!r}, expected 'h', 'i' or None")
    index = torch.as_tensor(range(B) if index is None else index, dtype=torch.int64).to(images.device)
    if index.shape != (B,):
        raise ValueError(f"index has shape {tuple(index.shape)}, expected ({B},), one number per image")

    kind, options = name, dict(frost_dir=frost_dir) if name == "frost" else {}
    if name == "elastic_transform" and (elastic or ("h" if H == W and H in (224, 64, 32) else "i")) == "i":
        kind = "elastic_any_size"
    c = CONSTANTS[kind][table or (224 if min(H, W) >= 128 else 64 if min(H, W) >= 48 else 32)][severity - 1]
    number = PURPOSE + (*NAMES, "saturate").index(name) + 1
    out = torch.empty_like(images, memory_format=torch.contiguous_format)
    pixels = 2 ** 18 if images.device.type == "cpu" else 2 ** 23                # of a slice: cache, or memory's bound
    size = max(1, pixels // (H * W))
    for part in (slice(i, i + size) for i in range(0, B, size)):
        draws = ()
        if kind in DRAW:
            draws = DRAW[kind](lambda n: uniform(index[part], n, seed, number, severity), H, W, c, **options)
        out[part] = APPLY[kind](images[part].contiguous(), c, *(draws if isinstance(draws, tuple) else (draws,)))
    return out
