"""The DeiT augmentation on whole uint8 batches, on any device: crop, flip, RandAugment, random erasing, mixup, cutmix.

The recipe is facebookresearch/deit:main.py's, which is timm's `create_transform(auto_augment="rand-m9-mstd0.5-inc1")`
and `Mixup`; there every step runs on one PIL image at a time. Here

- the pixels never leave their device and no loop runs over images: RandAugment groups the samples by operation;
- what happens to a sample depends on (seed, its position) alone, so neither batch size, worker nor rank matters;
- all decisions are drawn on the CPU, as small tables `u` of uniform numbers (`common.uniform`), so the host knows which
  samples go where without waiting for a GPU;
- the operations compute what PIL computes: the tone operations bit for bit, the geometric ones up to float32 rounding
  (see tests/test_augment.py).

    images = augment(images, positions, seed)                                       # uint8 -> float32 in [0, 1]
    images, targets = mixup_cutmix(images, labels, 1000, np.random.default_rng((seed, step)))

Images are (B, 3, H, W) everywhere. No function but random_erase changes its input.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F

from data.rng import uniform

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)                # ImageNet's, in [0, 1] pixel units
FILL = (124, 116, 104)                                                  # MEAN in grey levels, for what lies outside
CROP, FLIP, RAND_AUGMENT, ERASE, ERASE_NOISE = range(20, 25)            # purposes: the key after the seed in `uniform`
RAND_AUGMENT_COLUMNS = 4                                                # per op: which op, apply it?, level, sign
ERASE_TRIES = 10
ERASE_COLUMNS = 3 + 2 * ERASE_TRIES                                     # apply?, top, left, areas, ratios


def send(x, device):
    """Small host tensor or list to the device; the host does not wait."""
    return torch.as_tensor(x).to(device, non_blocking=True)


def normal(u):
    """Standard normal numbers from uniform ones (multiples of 2**-24 in [0, 1)), by the inverse distribution function.

    Half a step is added to u, so both ends are finite (|result| < 5.5). Same shape and float dtype as u.
    """
    return math.sqrt(2) * torch.erfinv(2 * u - 1 + 2 ** -24)


def replace(images, indices, parts):
    """Copy of images in which images[indices[k]] is parts[k]; indices: int64 on the CPU, all different.

    Concatenation and one index_select, because index_copy on the CPU goes value by value: ten times slower.
    """
    place = torch.arange(len(images))
    if len(indices):
        index = torch.cat(indices)
        place[index] = torch.arange(len(images), len(images) + len(index))
    return torch.cat([images, *parts]).index_select(0, send(place, images.device))


# --- crop and flip --------------------------------------------------------------------------------------------------

def random_crop(images, u, pad=4):
    """Shift by up to `pad` pixels each way, black outside: torchvision's RandomCrop(size, pad), as DeiT does for CIFAR.

    images: uint8. u: (B, 2) on the CPU, for top and left. Returns the same shape.
    """
    B, _, H, W = images.shape
    top, left = send((u.double() * (2 * pad + 1)).long(), images.device).unbind(1)
    y = top[:, None] + torch.arange(H, device=images.device)
    x = left[:, None] + torch.arange(W, device=images.device)
    index = (y[:, :, None] * (W + 2 * pad) + x[:, None, :]).view(B, 1, H * W)
    return F.pad(images, (pad, pad, pad, pad)).flatten(2).gather(2, index.expand(B, 3, -1)).view_as(images)


def random_hflip(images, u):
    """Mirror left and right where u < 0.5. images: any dtype. u: (B,) on the CPU."""
    index = (u < 0.5).nonzero()[:, 0]
    return replace(images, [index], [images.index_select(0, send(index, images.device)).flip(3)])


# --- the 15 operations: op(images, argument) -> images ----------------------------------------------------------------
# images: (b, 3, H, W) uint8, in and out. argument: (b, 1, 1, 1) float32 on the same device, one number per image.
# Results are truncated, not rounded, wherever PIL truncates.

def lookup(images, table):
    """Replace value v of a channel by table[..., v]. table: (b, 1 or 3, 1, 256), clipped to 0..255 and truncated."""
    table = table.clamp(0, 255).byte().squeeze(2).expand(-1, 3, -1)
    return table.gather(2, images.flatten(2).long()).view_as(images)


def values(images):
    """0..255, the row of pixel values that a table for `lookup` is computed from. (256,) int64."""
    return torch.arange(256, device=images.device)


def blend(base, x, factor):
    """base + factor * (x - base) in float32: PIL's Image.blend before clipping. base, x: signed integers."""
    return (x - base).mul(factor).add_(base)


def grey(images):
    """PIL's luma of an RGB image, in 16-bit fixed point. Returns (b, 1, H, W) int32 in 0..255."""
    r, g, b = images.int().split(1, dim=1)
    return (19595 * r + 38470 * g + 7471 * b + 0x8000) >> 16


def autocontrast(images, _):
    """Stretch each channel so that its smallest value becomes 0 and its largest 255 (ImageOps.autocontrast)."""
    real = torch.float32 if images.device.type == "mps" else torch.float64          # float64 is PIL's, mps has none
    lo, hi = images.amin((2, 3), True).to(real), images.amax((2, 3), True).to(real)
    scale = torch.full_like(hi, 255) / (hi - lo)                            # 255 / tensor is 255 * (1 / tensor)
    return lookup(images, torch.where(hi > lo, values(images) * scale - lo * scale, values(images)))


def equalize(images, _):
    """Make each channel's histogram as flat as a table can (ImageOps.equalize, in its integer arithmetic)."""
    ones = torch.ones((), dtype=torch.int32, device=images.device).expand(images.flatten(2).shape)
    count = torch.zeros(len(images), 3, 256, dtype=torch.int32, device=images.device)
    count.scatter_add_(2, images.flatten(2).long(), ones)                                      # (b, 3, 256) histogram
    below = count.cumsum(2) - count                                                            # pixels darker than v
    step = below.gather(2, images.flatten(2).amax(2, True).long()) // 255
    table = torch.where(step > 0, (step // 2 + below) // step.clamp(min=1), values(images))
    return lookup(images, table.unsqueeze(2))


def invert(images, _):
    return 255 - images


def posterize(images, bits):
    """Keep the `bits` highest bits of each value. 0 bits (level 10) give black, as in older PIL; PIL now refuses 0."""
    return images & (256 - 2 ** (8 - bits.int())).byte()


def solarize(images, threshold):
    """Invert the values >= threshold (0..256)."""
    v = values(images)
    return lookup(images, torch.where(v < threshold, v, 255 - v))


def solarize_add(images, amount):
    """Add `amount` to the values below 128."""
    v = values(images)
    return lookup(images, torch.where(v < 128, v + amount, v))


def brightness(images, factor):
    """Blend with black. factor 0: black, 1: unchanged (ImageEnhance, like the next three)."""
    return lookup(images, blend(0, values(images), factor))


def contrast(images, factor):
    """Blend with the mean of the grey image, rounded half up."""
    total, n = grey(images).sum((2, 3), keepdim=True), images[0, 0].numel()
    return lookup(images, blend((2 * total + n) // (2 * n), values(images), factor))


def color(images, factor):
    """Blend with the grey image."""
    return blend(grey(images).short(), images.short(), factor).clamp_(0, 255).byte()


def sharpness(images, factor):
    """Blend with a 3 x 3 smoothing, weights 1 and 5 in the centre; the border, which PIL does not smooth, stays."""
    x = images.short()
    rows = x[..., :-2] + x[..., 1:-1] + x[..., 2:]
    centre = x[..., 1:-1, 1:-1]
    total = rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:] + 4 * centre                    # weights sum to 13
    smooth = ((total + 6.5) / 13).short()                                                       # rounded: 13 is odd
    images = images.clone()
    images[..., 1:-1, 1:-1] = blend(smooth, centre, factor).clamp_(0, 255).byte()
    return images


def cubic(p0, p1, p2, p3, d):
    """PIL's bicubic in one direction, between p1 (d = 0) and p2 (d = 1): Keys' kernel with a = -1.

    (PIL resizes with a = -0.5 but transforms with -1; torch.nn.functional.grid_sample has -0.75.) Horner's scheme
    keeps flat areas exact: with weights that sum to 1 - 1e-7, truncation would darken them by one level.
    """
    s = p0 - p1
    t = s + p2 - p3
    return p1 + d * (p2 - p0 + d * (s + t - d * t))


def finish(images, inside):
    """float32 images to uint8; pixels whose source lies outside the image become FILL. inside: (b, 1, H, W) bool."""
    fill = send(FILL, images.device).view(3, 1, 1).float()
    return torch.where(inside, images.clamp_(0, 255), fill).byte()


def shift(images, offset, dim):
    """Output pixel x shows the source at x + offset along `dim`, bicubic between pixels, FILL outside.

    offset: float32, (b, 1, H or 1, 1) for dim 3, (b, 1, 1, W or 1) for dim 2. So each line moves as a whole, with one
    sub-pixel part for all its pixels: one gather of size + 3 pixels per line holds all four taps.
    """
    size = images.shape[dim]
    whole = offset.floor()
    x = torch.arange(-1, size + 2, device=images.device).view((-1, 1) if dim == 2 else (1, -1))
    index = (x + whole.long()).clamp_(0, size - 1)
    shape = list(images.shape)
    shape[dim] += 3
    lines = images.gather(dim, index.expand(shape)).short()
    taps = [lines.narrow(dim, k, size) for k in range(4)]
    centre = x.narrow(dim - 2, 1, size) + 0.5 + offset
    return finish(cubic(*taps, offset - whole), (centre >= 0) & (centre < size))


def shear(images, factor, dim):
    """Shift each line along `dim` by factor times its distance from the top (dim 3) or left (dim 2) border."""
    lines = torch.arange(images.shape[5 - dim], device=images.device) + 0.5
    return shift(images, factor * lines.view((1, -1) if dim == 2 else (-1, 1)), dim)


def translate(images, share, dim):
    """Shift by `share` of the side."""
    return shift(images, share * images.shape[dim], dim)


def rotate(images, degrees):
    """Rotate counter-clockwise about the image centre, same size: PIL's rotate(degrees, BICUBIC, fillcolor=FILL)."""
    H, W = images.shape[2:]
    cos, sin = torch.cos(degrees * (math.pi / 180)), torch.sin(degrees * (math.pi / 180))
    y = torch.arange(H, device=images.device).view(-1, 1) + 0.5 - H / 2                        # from the centre
    x = torch.arange(W, device=images.device) + 0.5 - W / 2
    x, y = cos * x - sin * y + W / 2, sin * x + cos * y + H / 2                                # (B, 1, H, W) source
    inside = (x >= 0) & (x < W) & (y >= 0) & (y < H)
    x, y = (x - 0.5).clamp_(-0.5, W - 0.5), (y - 0.5).clamp_(-0.5, H - 0.5)
    x0, y0 = x.floor(), y.floor()                                                              # left and upper pixel

    # Two repeated pixels all round: then tap (i, j) of every pixel is one constant further in the flat image.
    rows = torch.arange(-2, H + 2, device=images.device).clamp_(0, H - 1)
    columns = torch.arange(-2, W + 2, device=images.device).clamp_(0, W - 1)
    padded = images.flatten(2).index_select(2, (rows.view(-1, 1) * W + columns).flatten()).float()
    index = ((y0.long() + 1) * (W + 4) + x0.long() + 1).flatten(2).expand(-1, 3, -1)

    def tap(i, j):
        return padded[:, :, i * (W + 4) + j:].gather(2, index).view_as(images)
    lines = [cubic(*(tap(i, j) for j in range(4)), x - x0) for i in range(4)]
    return finish(cubic(*lines, y - y0), inside)


def enhance_factor(x, sign):
    return (1 + sign * 0.9 * x).clamp(min=0.1)


OPS = {  # name in timm: (operation, its argument from x = level / 10 in [0, 1] and sign = +-1, both float64)
    "AutoContrast": (autocontrast, lambda x, sign: x),                                          # argument unused
    "Equalize": (equalize, lambda x, sign: x),
    "Invert": (invert, lambda x, sign: x),
    "Rotate": (rotate, lambda x, sign: sign * 30 * x),                                          # degrees
    "PosterizeIncreasing": (posterize, lambda x, sign: 4 - (4 * x).floor()),                    # bits
    "SolarizeIncreasing": (solarize, lambda x, sign: 256 - (256 * x).floor()),
    "SolarizeAdd": (solarize_add, lambda x, sign: (110 * x).floor()),
    "ColorIncreasing": (color, enhance_factor),
    "ContrastIncreasing": (contrast, enhance_factor),
    "BrightnessIncreasing": (brightness, enhance_factor),
    "SharpnessIncreasing": (sharpness, enhance_factor),
    "ShearX": (partial(shear, dim=3), lambda x, sign: sign * 0.3 * x),
    "ShearY": (partial(shear, dim=2), lambda x, sign: sign * 0.3 * x),
    "TranslateXRel": (partial(translate, dim=3), lambda x, sign: sign * 0.45 * x),
    "TranslateYRel": (partial(translate, dim=2), lambda x, sign: sign * 0.45 * x),
}


def rand_augment(images, u, magnitude=9.0, std=0.5, num_ops=2, prob=0.5):
    """timm's rand-m9-mstd0.5-inc1: num_ops draws from OPS, each applied with probability prob at a random level.

    The level is normal(magnitude, std) clipped to [0, 10], the sign a fair coin, both drawn anew for each draw.
    images: uint8. u: (B, 4 * num_ops) on the CPU; per draw: which op, apply it?, level, sign. Returns uint8.
    Raises ValueError if u has another shape.
    """
    if u.shape != (len(images), RAND_AUGMENT_COLUMNS * num_ops):
        raise ValueError(f"u has shape {tuple(u.shape)}, expected {(len(images), RAND_AUGMENT_COLUMNS * num_ops)}")
    chunk = 2 if images.device.type == "cpu" else len(images)               # images per call: what fits into the caches
    for which, apply, level, sign in u.double().view(-1, num_ops, RAND_AUGMENT_COLUMNS).permute(1, 2, 0):   # (B,) each
        x = (magnitude + std * normal(level)).clamp(0, 10) / 10
        sign = torch.where(sign < 0.5, 1.0, -1.0)
        which = torch.where(apply < prob, (which * len(OPS)).floor(), -1)
        indices, parts = [], []
        for i, (op, argument) in enumerate(OPS.values()):
            members = (which == i).nonzero()[:, 0]                          # on the CPU: no wait for the device
            for index in members.split(chunk) if len(members) else ():
                a = send(argument(x[index], sign[index]).float().view(-1, 1, 1, 1), images.device)
                indices.append(index)
                parts.append(op(images.index_select(0, send(index, images.device)), a))
        images = replace(images, indices, parts)
    return images


# --- random erasing ---------------------------------------------------------------------------------------------------

def random_erase(images, u, positions, seed, prob=0.25, area=(0.02, 1 / 3), min_ratio=0.3, mean=MEAN, std=STD):
    """Replace one box by noise in a share `prob` of the images: timm's RandomErasing(mode="pixel") and DeiT's reprob.

    The box covers a uniform share of the image within `area`; its height / width is log-uniform in [min_ratio,
    1 / min_ratio]; the first of 10 tries that fits is taken, if none does the image stays. Each value of the box is
    standard normal after normalisation by mean and std; as pixel, mean + std * n, which may leave [0, 1].
    images: float, in [0, 1], changed in place and returned. u: (B, 23) on the CPU, see ERASE_COLUMNS. positions: (B,)
    int64 on the CPU: with the seed they determine the noise.
    """
    B, _, H, W = images.shape
    u = u.double()
    share, ratio = u[:, 3:].split(ERASE_TRIES, dim=1)
    pixels = (area[0] + (area[1] - area[0]) * share) * H * W                                    # (B, 10)
    ratio = torch.exp((1 - 2 * ratio) * math.log(min_ratio))
    h, w = (pixels * ratio).sqrt().round().long(), (pixels / ratio).sqrt().round().long()
    fits = (h < H) & (w < W)
    chosen = ((u[:, 0] < prob) & fits.any(1)).nonzero()[:, 0]                                   # (b,) the erased ones
    attempt = fits[chosen].int().argmax(1, keepdim=True)                                        # first that fits
    h, w = h[chosen].gather(1, attempt)[:, 0], w[chosen].gather(1, attempt)[:, 0]
    top, left = (u[chosen, 1] * (H - h + 1)).long(), (u[chosen, 2] * (W - w + 1)).long()

    # One entry per erased pixel, all boxes behind each other. Their number is known on the host: no wait.
    n, first = int((h * w).sum()), (h * w).cumsum(0) - h * w
    boxes = send(torch.stack([chosen, positions[chosen], top, left, w, first, h * w]), images.device)
    sample, position, top, left, w, first, _ = boxes.repeat_interleave(boxes[6], dim=1, output_size=n)
    i = torch.arange(n, device=images.device) - first
    y, x = top + i // w, left + i % w
    noise = normal(uniform(y * W + x, 3, seed, ERASE_NOISE, position.int()))                    # (n, 3)
    noise = noise * send(std, images.device) + send(mean, images.device)
    images[sample, :, y, x] = noise.to(images.dtype)
    return images


# --- mixup and cutmix -------------------------------------------------------------------------------------------------

def mixup_cutmix(images, labels, num_classes, rng, mixup=0.8, cutmix=1.0, switch_prob=0.5, smoothing=0.1):
    """Mix each image and label with its neighbour's: timm's Mixup in mode "batch", with another partner.

    One lambda ~ Beta(alpha, alpha) for the whole batch, alpha = `mixup` or `cutmix`; if both are > 0, cutmix is taken
    with probability switch_prob. mixup: lambda * image + (1 - lambda) * partner. cutmix: a box of a share 1 - lambda,
    its centre anywhere, is pasted from the partner; lambda is then the share of the pixels kept, because the box is
    clipped at the border. Both 0: nothing is mixed.
    The partner of 2i is 2i + 1 and vice versa; timm takes the reversed batch. So a slice of the batch that begins and
    ends at even numbers mixes as it does within the batch, and splitting over processes or accumulation steps changes
    nothing as long as each gives a generator in the same state. Copies of one image (repeated augmentation) should
    not be neighbours.

    images: float. labels: (B,) int64. rng: numpy Generator, seeded by the caller with (seed, step).
    Returns mixed images and targets (B, num_classes) float32, smoothed: (1 - smoothing + smoothing / K) for the label,
    smoothing / K for others, K = num_classes. Raises ValueError if a batch to be mixed is odd.
    """
    off = smoothing / num_classes
    targets = torch.full((len(labels), num_classes), off, device=images.device)
    targets.scatter_(1, labels[:, None], 1 - smoothing + off)
    if mixup == 0 and cutmix == 0:
        return images, targets
    if len(images) % 2:
        raise ValueError(f"batch of {len(images)} images: mixing pairs of neighbours needs an even number")

    def partner(x):
        return x.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)
    H, W = images.shape[2:]
    use_cutmix = cutmix > 0 and (mixup == 0 or rng.random() < switch_prob)
    lam = float(rng.beta(cutmix, cutmix) if use_cutmix else rng.beta(mixup, mixup))
    if use_cutmix:
        h, w = int(H * math.sqrt(1 - lam)), int(W * math.sqrt(1 - lam))
        y, x = int(rng.integers(H)), int(rng.integers(W))                                       # the box's centre
        top, bottom = max(y - h // 2, 0), min(y + (h + 1) // 2, H)
        left, right = max(x - w // 2, 0), min(x + (w + 1) // 2, W)
        lam = 1 - (bottom - top) * (right - left) / (H * W)
        mixed = images.clone()
        mixed[:, :, top:bottom, left:right] = partner(images[:, :, top:bottom, left:right])
    else:
        mixed = torch.lerp(partner(images), images, lam)
    return mixed, torch.lerp(partner(targets), targets, lam)


# --- all of it, in the recipe's order ---------------------------------------------------------------------------------

def augment_uint8(images, positions, seed, pad=0, num_ops=2, magnitude=9.0):
    """First half: crop (if pad > 0), flip, RandAugment (if num_ops > 0).

    images: uint8, after the random resized crop. positions: (B,) int64 on the CPU, each sample's number in the whole
    run (not in its epoch), below 2**31: with the seed it determines everything drawn. So it does not matter where this
    runs: on the device, or in a worker process if the device is the CPU. Returns uint8.
    """
    def draw(n, purpose):
        return uniform(positions, n, seed, purpose)
    if pad:
        images = random_crop(images, draw(2, CROP), pad)
    images = random_hflip(images, draw(1, FLIP)[:, 0])
    if num_ops:
        images = rand_augment(images, draw(RAND_AUGMENT_COLUMNS * num_ops, RAND_AUGMENT), magnitude, num_ops=num_ops)
    return images


def to_float(images, positions, seed, erase_prob=0.25):
    """Second half: uint8 to float32 in [0, 1], random erasing (if erase_prob > 0; its noise may leave [0, 1])."""
    images = images / 255
    if erase_prob:
        images = random_erase(images, uniform(positions, ERASE_COLUMNS, seed, ERASE), positions, seed, erase_prob)
    return images


def augment(images, positions, seed, pad=0, num_ops=2, magnitude=9.0, erase_prob=0.25):
    """Both halves: uint8 images to augmented float32 ones, on their device."""
    return to_float(augment_uint8(images, positions, seed, pad, num_ops, magnitude), positions, seed, erase_prob)
