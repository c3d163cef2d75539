"""Distort the colours of whole batches of training images, as mmsegmentation 0.14.1 does.

Images are (B, 3, H, W), on any device. A table `u` of uniform numbers (rng.py) sets the amounts.
"""

import torch

from data.batches import constant

COLUMNS = 9                                  # of u


def scale_and_shift(x, factor, amount=0.0):
    """Compute factor * x + amount in grey levels, clip and round down; the result is float."""
    return (x * factor + amount).clamp(0, 255).floor()


def scale_hsv(x, saturation, turn):
    """Multiply S of HSV by `saturation` and add `turn` half degrees to H.

    x and the result: (B, 3, H, W), float with values 0 to 255. As in OpenCV's 8-bit images, H is a
    whole number of half degrees, and S is a whole number from 0 to 255. The divisors are tensors,
    because a GPU does not divide by a Python number but multiplies by its inverse. This rounding
    error could change a grey level.
    """
    # Convert to hue, in sixths of the circle, and saturation. A grey pixel gets 0 and 0.
    red, green, blue = x.unbind(1)
    value, low = x.amax(1), x.amin(1)
    span = (value - low).clamp(min=1)
    hue = torch.where(value == green, 2 + (blue - red) / span, 4 + (red - green) / span)
    hue = torch.where(value == red, (green - blue) / span, hue)
    s = (255 * (value - low) / value.clamp(min=1) + 0.5).floor()

    # Change hue and saturation, and convert back: R, G, B = V - V S times a number from 0 to 1.
    hue = ((hue * 30 + 0.5).floor()[:, None] + turn) % 180
    sixth, most = constant((30.0, 255.0), x.device)
    s, value = scale_and_shift(s[:, None], saturation) / most, value[:, None]
    k = (hue / sixth + constant((5, 3, 1), x.device).view(3, 1, 1)) % 6
    return (value - value * s * torch.minimum(k, 4 - k).clamp(0, 1)).floor()


def distort(images, u):
    """Distort brightness, contrast, saturation and hue, each with probability 0.5.

    images: (B, 3, H, W) uint8. u: (B, COLUMNS). Returns uint8. A fair coin decides whether contrast
    comes second or last. If saturation and hue both change, the image is converted to HSV once;
    mmsegmentation converts it twice.
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
