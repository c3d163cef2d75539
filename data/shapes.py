"""Scenes of shapes drawn from formulas: images, labels and masks, nothing to download.

    python -m data.shapes          # draw the picture of the data set into shapes.png
"""

import math

import torch
from tqdm import tqdm

from data.images import Split, save_grid
from data.rng import uniform

SCENE, NOISE = 10, 11                        # what a random number is for: the last part of its key


# --- shapes: scenes drawn from formulas -----------------------------------------------------------------------------
# Points (x, y) have y upwards; a shape fills about the unit disc. A shape is its signed distance: negative inside, and
# of slope one near the edge, so that the edge can be made one pixel soft at every size.

def fold(x, y, n):
    """Map the plane to one half sector of an n-fold symmetry: n equal wedges around 0, the first along +y, mirrored."""
    r, angle = torch.hypot(x, y), (torch.atan2(x, y) + math.pi / n) % (2 * math.pi / n) - math.pi / n
    return r * angle.sin().abs(), r * angle.cos()


def box(x, y, width, height):
    return torch.maximum(x.abs() - width, y.abs() - height)


def star(x, y):
    x, y = fold(x, y, 5)
    return 0.92 * x + 0.39 * (y - 1)                                     # the line from a tip to the next inner corner


def flower(x, y):
    x, y = fold(x, y, 5)
    return torch.hypot(x, y - 0.58) - 0.4


SHAPES = {
    "arrow": lambda x, y: torch.minimum(torch.maximum((x.abs() + y - 0.95) * 0.71, -y), box(x, y + 0.4, 0.3, 0.5)),
    "circle": lambda x, y: torch.hypot(x, y) - 0.85,
    "crescent": lambda x, y: torch.maximum(torch.hypot(x, y) - 0.95, 0.75 - torch.hypot(x - 0.45, y)),
    "cross": lambda x, y: torch.minimum(box(x, y, 0.27, 0.88), box(x, y, 0.88, 0.27)),
    "flower": flower,
    "heart": lambda x, y: torch.minimum((x.abs() + (y + 0.1).abs()) * 0.71 - 0.55,
                                        torch.hypot(x.abs() - 0.39, y - 0.29) - 0.55),
    "ring": lambda x, y: (torch.hypot(x, y) - 0.68).abs() - 0.24,
    "square": lambda x, y: box(x, y, 0.75, 0.75),
    "star": star,
    "triangle": lambda x, y: torch.maximum(x.abs() * 0.87 + y * 0.5, -y) - 0.5,
}
TEXTURES = [                                 # share of the second colour, in [0, 1], at a point in radians
    lambda x, y: torch.zeros_like(x),                                                    # plain
    lambda x, y: (0.5 + 0.1 * x).clamp(0, 1),                                            # gradient
    lambda x, y: (0.5 + 2 * x.sin()).clamp(0, 1),                                        # stripes
    lambda x, y: (0.5 + 3 * x.sin() * y.sin()).clamp(0, 1),                              # checks
    lambda x, y: (0.5 + 2 * (x.cos() + y.cos() - 0.6)).clamp(0, 1),                      # dots
    lambda x, y: 0.5 + 0.5 * (x + 2 * (0.7 * y).sin()).sin(),                            # waves
]
NUM_LAYERS = 5                               # of a scene, back to front: background, three small shapes, the main shape


def apply_each(functions, which, x, y):
    """functions[which[i]](x[i], y[i]) for every row i. which: (B,) int64; x, y: (B, H, W). Returns (B, H, W)."""
    out = torch.empty_like(x)
    for k, function in enumerate(functions):
        rows = (which == k).nonzero()[:, 0]
        out[rows] = function(x[rows], y[rows])
    return out


def colour(hue, saturation, luminance):
    """RGB (B, 3, 1, 1) in [0, 1] of exactly this luminance (0.3 R + 0.59 G + 0.11 B); arguments (B,) in [0, 1]."""
    hue, saturation, luminance = hue[:, None], saturation[:, None], luminance[:, None]
    rgb = ((hue * 6 + torch.tensor([0, 4, 2], device=hue.device)) % 6 - 3).abs().sub(1).clamp(0, 1)
    grey = (rgb * torch.tensor([0.3, 0.59, 0.11], device=hue.device)).sum(1, keepdim=True)
    rgb = torch.where(luminance < grey, rgb * luminance / grey, 1 - (1 - rgb) * (1 - luminance) / (1 - grey))
    return torch.lerp(luminance, rgb, saturation)[:, :, None, None]


def render_scenes(index, size=32, seed=0):
    """Draw scenes of textured shapes: one large one in front, whose class is the label, and three small ones behind it.

    index: (B,) int64 in [0, 2**31), the scenes' numbers; size: side in pixels. A scene depends on (seed, its index)
    only; another size is the same scene at another resolution, with other pixel noise. Runs on index's device. Returns
    images (B, 3, size, size) uint8, labels (B,) int64 and masks (B, size, size) uint8: 0 = background, k + 1 = class k
    of the frontmost shape there.
    Place, size, turn, colours and textures are drawn independently of the class.
    """
    B, device = len(index), index.device
    draws = uniform(index, NUM_LAYERS * 14, seed, SCENE).view(B, NUM_LAYERS, 14)
    axis = (torch.arange(size, device=device) + 0.5) * (2 / size) - 1                    # pixel centres in [-1, 1]
    x, y = axis.expand(B, size, size), -axis[:, None].expand(B, size, size)
    masks = torch.zeros(B, size, size, dtype=torch.uint8, device=device)

    def column(t):
        return t[:, None, None]                                                          # (B,) -> (B, 1, 1)

    for layer in range(NUM_LAYERS):
        def between(low, high, j):                                                       # (B,), from the j-th draw
            return low + (high - low) * draws[:, layer, j]

        is_background, is_main = layer == 0, layer == NUM_LAYERS - 1
        # shapes are lighter than the background: without that, small networks need far more images to find them
        luminance = between(0.1, 0.36, 0) if is_background else between(0.62, 0.92, 0)
        saturation = between(0.2, 0.6, 1) if is_background else between(0.35, 0.95, 1)
        hue = between(0, 1, 2)
        first = colour(hue, saturation, luminance)
        second = colour((hue + between(-0.12, 0.12, 3)) % 1, saturation, luminance * between(0.75, 0.98, 4))

        u, v = x, y                                                                      # background: the whole image
        if not is_background:
            if is_main:                                                                  # anywhere inside the image
                scale = between(0.52, 0.78, 5)
                centre_x, centre_y = between(-1, 1, 6) * (0.95 - scale), between(-1, 1, 7) * (0.95 - scale)
            else:                                                                        # near the rim, a sector each
                scale, radius = between(0.14, 0.22, 5), between(0.75, 1.05, 7)
                angle = (layer + between(0, 0.9, 6)) * (2 * math.pi / (NUM_LAYERS - 2))
                centre_x, centre_y = ((radius * t).clamp(-0.85, 0.85) for t in (angle.cos(), angle.sin()))
            turn, stretch = between(-0.35, 0.35, 8), column(between(-0.12, 0.12, 9).exp())
            cos, sin = column(turn.cos() / scale), column(turn.sin() / scale)
            dx, dy = x - column(centre_x), y - column(centre_y)
            u, v = (cos * dx + sin * dy) * stretch, (cos * dy - sin * dx) / stretch      # the shape's own frame

        angle, frequency = between(0, 2 * math.pi, 10), between(4, 9, 11)
        cos, sin = column(angle.cos() * frequency), column(angle.sin() * frequency)
        which = (draws[:, layer, 12] * len(TEXTURES)).long()
        texture = apply_each(TEXTURES, which, cos * u + sin * v, cos * v - sin * u)      # (B, size, size) in [0, 1]
        fill = torch.lerp(first, second, texture[:, None])                               # (B, 3, size, size)
        if is_background:
            images = fill
            continue
        labels = (draws[:, layer, 13] * len(SHAPES)).long()                              # in the end: the main shape's
        distance = apply_each(SHAPES.values(), labels, u, v) * column(scale)             # half the image is 1
        coverage = (0.5 - distance * (size / 2)).clamp(0, 1)                             # an edge one pixel soft
        shadow = 1 - 0.45 * (1 - distance / 0.16).clamp(0, 1) ** 2
        images = torch.lerp(images * shadow[:, None], fill, coverage[:, None])
        masks = torch.where(coverage > 0.5, column(labels + 1).to(torch.uint8), masks)

    noise = uniform(index, 3 * size * size, seed, NOISE).view(B, 3, size, size) - 0.5
    images = images + noise * draws[:, 0, 13].view(B, 1, 1, 1) * 0.1
    return (images.clamp(0, 1) * 255).round().to(torch.uint8), labels, masks


def load_shapes(split, num_images, size=32, seed=0, device="cpu"):
    """Render one split, "train" or "test", of the shapes data set on `device` and keep it there. Returns a Split."""
    if split not in ("train", "test"):
        raise ValueError(f"split is {split!r}, expected 'train' or 'test'")
    index = torch.arange(num_images, device=device) + (2 ** 30 if split == "test" else 0)    # the splits never overlap
    pixels = 2 ** 18 if index.device.type == "cpu" else 2 ** 23                          # of a chunk, to stay in cache
    chunks = tqdm(index.split(max(1, pixels // size ** 2)), f"rendering shapes {split}", leave=False,
                  disable=num_images * size ** 2 < 2 ** 25)                              # under a few seconds: no bar
    images, labels, masks = (torch.cat(t) for t in zip(*(render_scenes(chunk, size, seed) for chunk in chunks)))
    return Split(images, labels, list(SHAPES), masks)


if __name__ == "__main__":
    save_grid("shapes.png", load_shapes("train", 24, size=160).images, columns=8)
