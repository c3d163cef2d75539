"""Colours of training images distorted as mmsegmentation 0.14.1 does, in whole batches.

Images are (B, 3, H, W), on any device. Amounts come as a table `u` of uniform numbers, see rng.py.
"""

import torch

from data.batches import constant

COLUMNS = 9                                  # of u


def scale_and_shift(x, factor, amount=0.0):
    """Compute factor * x + amount in grey levels, clipped, cut to whole ones; x stays float."""
    return (x * factor + amount).clamp(0, 255).floor()


def scale_hsv(x, saturation, turn):
    """Multiply S of HSV, add `turn` half degrees to H. x: (B, 3, H, W) float, grey levels.

    H is kept in whole half degrees and S in 256 levels, as OpenCV's 8-bit images do. Divided by
    tensors: by a number a GPU multiplies with its inverse, and a rounding off is a grey level off.
    """
    # to hue, in sixths of the circle, and saturation; grey: all numerators are 0
    red, green, blue = x.unbind(1)
    value, low = x.amax(1), x.amin(1)
    span = (value - low).clamp(min=1)
    hue = torch.where(value == green, 2 + (blue - red) / span, 4 + (red - green) / span)
    hue = torch.where(value == red, (green - blue) / span, hue)
    s = (255 * (value - low) / value.clamp(min=1) + 0.5).floor()

    # changed, and back: R, G, B = V - V S (0 to 1)
    hue = ((hue * 30 + 0.5).floor()[:, None] + turn) % 180
    sixth, most = constant((30.0, 255.0), x.device)
    s, value = scale_and_shift(s[:, None], saturation) / most, value[:, None]
    k = (hue / sixth + constant((5, 3, 1), x.device).view(3, 1, 1)) % 6
    return (value - value * s * torch.minimum(k, 4 - k).clamp(0, 1)).floor()


def distort(images, u):
    """Distort brightness, contrast, saturation, hue, each with probability 0.5.

    images: (B, 3, H, W) uint8. u: (B, COLUMNS). Returns uint8. Contrast comes second or last, by a
    fair coin. Where saturation and hue both change, HSV is entered once, not twice as in the
    source.
    """
    u = u.to(images.device, non_blocking=True)[:, :, None, None, None]

    def drawn(j, low, high, neutral):
        return torch.where(u[:, j] < 0.5, low + (high - low) * u[:, j + 1], neutral)

    contrast, saturation = drawn(2, 0.5, 1.5, 1.0), drawn(5, 0.5, 1.5, 1.0)
    turn = torch.where(u[:, 7] < 0.5, (u[:, 8] * 36).floor() - 18, 0.0)
    early, coloured = u[:, 4] < 0.5, (u[:, 5] < 0.5) | (u[:, 7] < 0.5)
    x = scale_and_shift(images.float(), 1.0, drawn(0, -32, 32, 0.0))            # brightness
    x = scale_and_shift(x, torch.where(early, contrast, 1.0))
    x = torch.where(coloured, scale_hsv(x, saturation, turn), x)
    return scale_and_shift(x, torch.where(early, 1.0, contrast)).byte()
