"""Render scenes of shapes from formulas: images, labels and masks, without a download.

A shape fills about the unit disc; the y axis points up. It is given by the signed distance from the
points (x, y) to its edge, negative inside. Near the edge, the distance has slope one, so
`render_scenes` can soften the edge over one pixel at every image size.
"""

import math
from functools import partial

import torch

from common import bar
from data.images import Split, constant
from data.rng import SCENE, SCENE_NOISE, uniform


def fold(x, y, n):
    """Fold the plane onto half a wedge, so that a figure there is repeated in 2 n half wedges.

    n equal wedges fill the plane. The first lies around the positive y axis. All points move to
    its half with x >= 0.
    """
    wedge = 2 * math.pi / n
    r = torch.hypot(x, y)
    angle = (torch.atan2(x, y) + math.pi / n) % wedge - math.pi / n     # from the y axis
    return r * angle.sin().abs(), r * angle.cos()


def box(x, y, half_width, half_height):
    return torch.maximum(x.abs() - half_width, y.abs() - half_height)


SHAPES = ("arrow", "circle", "crescent", "cross", "flower", "heart", "ring", "square", "star",
          "triangle")
TEXTURES = ("plain", "gradient", "stripes", "checks", "dots", "waves")


def signed_distance(shape, x, y):
    """Return the signed distance from the points (x, y) to the edge of a shape, a name in SHAPES.

    The factors of x and y in a slanted line, such as 0.71 (cos 45 degrees), make its slope one.
    """
    match shape:
        case "arrow":
            head = torch.maximum((x.abs() + y - 0.95) * 0.71, -y)
            shaft = box(x, y + 0.4, 0.3, 0.5)
            return torch.minimum(head, shaft)
        case "circle":
            return torch.hypot(x, y) - 0.85
        case "crescent":
            disc = torch.hypot(x, y) - 0.95
            hole = 0.75 - torch.hypot(x - 0.45, y)
            return torch.maximum(disc, hole)
        case "cross":
            return torch.minimum(box(x, y, 0.27, 0.88), box(x, y, 0.88, 0.27))
        case "flower":
            x, y = fold(x, y, 5)
            return torch.hypot(x, y - 0.58) - 0.4
        case "heart":
            tip = (x.abs() + (y + 0.1).abs()) * 0.71
            discs = torch.hypot(x.abs() - 0.39, y - 0.29)
            return torch.minimum(tip, discs) - 0.55
        case "ring":
            return (torch.hypot(x, y) - 0.68).abs() - 0.24
        case "square":
            return box(x, y, 0.75, 0.75)
        case "star":
            x, y = fold(x, y, 5)
            return 0.92 * x + 0.39 * (y - 1)        # the line from a tip to the next inner corner
        case "triangle":
            return torch.maximum(x.abs() * 0.87 + y * 0.5, -y) - 0.5


def second_share(texture, x, y):
    """Return the share of a texture's second colour, in [0, 1]. texture: a name in TEXTURES.

    x and y are in radians.
    """
    match texture:
        case "plain":
            return torch.zeros_like(x)
        case "gradient":
            return (0.5 + 0.1 * x).clamp(0, 1)
        case "stripes":
            return (0.5 + 2 * x.sin()).clamp(0, 1)
        case "checks":
            return (0.5 + 3 * x.sin() * y.sin()).clamp(0, 1)
        case "dots":
            return (0.5 + 2 * (x.cos() + y.cos() - 0.6)).clamp(0, 1)
        case "waves":
            return 0.5 + 0.5 * (x + 2 * (0.7 * y).sin()).sin()


# --- scenes ---------------------------------------------------------------------------------------

NUM_LAYERS = 5                              # back to front: background, three small shapes, main
COLUMNS = (                                 # the random numbers of a layer
    "luminance", "saturation", "hue", "similar hue", "darker",
    "scale", "place 1", "place 2", "turn", "stretch",
    "texture angle", "texture frequency", "texture",
    "class or noise",                       # of a shape: its class; of the background: the amount
)                                           # of pixel noise in the scene


def apply_each(function, names, which, x, y):
    """Call function(names[which[i]], x[i], y[i]) for every row i.

    which: (B,) int64. x, y: (B, H, W).
    """
    out = torch.empty_like(x)
    for k, name in enumerate(names):
        rows = (which == k).nonzero()[:, 0]
        out[rows] = function(name, x[rows], y[rows])
    return out


def colour(hue, saturation, luminance):
    """Return RGB (B, 3, 1, 1) with this luminance, 0.3 R + 0.59 G + 0.11 B. All are in [0, 1]."""
    hue = hue[:, None]                                      # (B, 1, 1, 1)
    saturation = saturation[:, None]
    luminance = luminance[:, None]
    shift = constant((0.0, 4.0, 2.0), hue.device).view(3, 1, 1)
    weight = constant((0.3, 0.59, 0.11), hue.device).view(3, 1, 1)
    rgb = ((hue * 6 + shift) % 6 - 3).abs() - 1             # the pure colour, as in HSV
    rgb = rgb.clamp(0, 1)
    grey = (rgb * weight).sum(1, keepdim=True)
    darker = rgb * luminance / grey
    lighter = 1 - (1 - rgb) * (1 - luminance) / (1 - grey)
    saturated = torch.where(luminance < grey, darker, lighter)
    return torch.lerp(luminance, saturated, saturation)


def scaled_column(numbers, low, high, column):
    """Return the numbers of a column of COLUMNS, scaled to [low, high): (B, 1, 1).

    numbers: (B, len(COLUMNS)) in [0, 1), the random numbers of a layer.
    """
    return low + (high - low) * numbers[:, COLUMNS.index(column), None, None]


def textured(draw, first, second, u, v):
    """Paint a random pattern of two colours at the points (u, v): (B, 3, H, W).

    draw: `scaled_column` of the layer, a function (low, high, column).
    """
    angle = draw(0, 2 * math.pi, "texture angle")
    frequency = draw(4, 9, "texture frequency")
    cos = angle.cos() * frequency
    sin = angle.sin() * frequency
    which = (draw(0, 1, "texture") * len(TEXTURES)).long().flatten()
    share = apply_each(second_share, TEXTURES, which, cos * u + sin * v, cos * v - sin * u)
    return torch.lerp(first, second, share[:, None])


def render_scenes(index, size=32, seed=0):
    """Draw scenes: a large textured shape in front, whose class is the label, and three behind.

    index: (B,) int64 in [0, 2**31), the scenes' numbers. size: side in pixels. Returns images
    (B, 3, size, size) uint8, labels (B,) int64, and masks (B, size, size) uint8; 0 is background,
    k + 1 is class k of the frontmost shape.
    A scene depends on (seed, index) only. Another size gives the same scene at another resolution,
    with other pixel noise. Place, size, rotation, colours and textures do not depend on the class.
    """
    B = len(index)
    device = index.device
    draws = uniform(index, NUM_LAYERS * len(COLUMNS), seed, SCENE)
    draws = draws.view(B, NUM_LAYERS, len(COLUMNS))
    axis = (torch.arange(size, device=device) + 0.5) * (2 / size) - 1           # pixel centres
    x = axis.expand(B, size, size)
    y = -axis[:, None].expand(B, size, size)
    masks = torch.zeros(B, size, size, dtype=torch.uint8, device=device)

    for layer in range(NUM_LAYERS):
        draw = partial(scaled_column, draws[:, layer])      # draw(low, high, column)

        # Two similar colours. Shapes are light, else small networks need far more images.
        if layer == 0:
            luminance = draw(0.1, 0.36, "luminance")
            saturation = draw(0.2, 0.6, "saturation")
        else:
            luminance = draw(0.62, 0.92, "luminance")
            saturation = draw(0.35, 0.95, "saturation")
        hue = draw(0, 1, "hue")
        similar_hue = (hue + draw(-0.12, 0.12, "similar hue")) % 1
        darker = luminance * draw(0.75, 0.98, "darker")
        first = colour(hue, saturation, luminance)
        second = colour(similar_hue, saturation, darker)
        if layer == 0:
            images = textured(draw, first, second, x, y)
            continue

        # The place of the shape. u and v are x and y in its own frame.
        if layer == NUM_LAYERS - 1:                         # anywhere inside the image
            scale = draw(0.52, 0.78, "scale")
            centre_x = draw(-1, 1, "place 1") * (0.95 - scale)
            centre_y = draw(-1, 1, "place 2") * (0.95 - scale)
        else:                                               # near the border, one sector per shape
            scale = draw(0.14, 0.22, "scale")
            angle = (layer + draw(0, 0.9, "place 1")) * (2 * math.pi / (NUM_LAYERS - 2))
            radius = draw(0.75, 1.05, "place 2")
            centre_x = (radius * angle.cos()).clamp(-0.85, 0.85)
            centre_y = (radius * angle.sin()).clamp(-0.85, 0.85)
        turn = draw(-0.35, 0.35, "turn")
        stretch = draw(-0.12, 0.12, "stretch").exp()
        cos = turn.cos() / scale
        sin = turn.sin() / scale
        dx = x - centre_x
        dy = y - centre_y
        u = (cos * dx + sin * dy) * stretch
        v = (cos * dy - sin * dx) / stretch

        # Draw the shape and its shadow on the layers behind it.
        fill = textured(draw, first, second, u, v)
        shape_number = (draw(0, 1, "class or noise") * len(SHAPES)).long().flatten()
        if layer == NUM_LAYERS - 1:
            labels = shape_number
        distance = apply_each(signed_distance, SHAPES, shape_number, u, v) * scale
        coverage = (0.5 - distance * (size / 2)).clamp(0, 1)                    # one pixel soft
        shadow = 1 - 0.45 * (1 - distance / 0.16).clamp(0, 1) ** 2
        images = torch.lerp(images * shadow[:, None], fill, coverage[:, None])
        masks = torch.where(coverage > 0.5, (shape_number + 1).byte().view(B, 1, 1), masks)

    noise = uniform(index, 3 * size * size, seed, SCENE_NOISE) - 0.5
    noise = noise.view(B, 3, size, size)
    amount = draws[:, 0, COLUMNS.index("class or noise")].view(B, 1, 1, 1)
    images = images + noise * amount * 0.1
    return (images.clamp(0, 1) * 255).round().byte(), labels, masks


FIRST_SCENE = {"train": 0, "test": 2 ** 30}         # numbers so far apart that no scene is in both


def load_shapes(part, num_images, size=32, device="cpu"):
    """Render "train" or "test" on `device`. Returns a Split on this device."""
    first = FIRST_SCENE[part]
    index = torch.arange(first, first + num_images, device=device)
    chunks = index.split(max(1, 2 ** 18 // size ** 2))              # to stay in a CPU's cache
    progress = bar(chunks, f"rendering {part}", leave=False)
    rendered = [render_scenes(chunk, size) for chunk in progress]
    images, labels, masks = (torch.cat(tensors) for tensors in zip(*rendered))
    return Split(images, labels, list(SHAPES), masks)
