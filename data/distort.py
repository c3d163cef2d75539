"""Distort the colours of whole batches of training images, as mmsegmentation 0.14.1 does.

Images are (B, 3, H, W), on any device. The amounts are a table `u` of uniform numbers, see rng.py.
"""

import torch

from data.batches import constant

COLUMNS = 9                                  # of u


def scale_and_shift(x, factor, amount=0.0):
    """Compute factor * x + amount in grey levels, clip and round down; the result is float."""
    return (x * factor + amount).clamp(0, 255).floor()


def scale_hsv(x, saturation, turn):
    """Multiply S of HSV and add `turn` half degrees to H. x: (B, 3, H, W) float, grey levels.

    H has whole half degrees and S 256 levels, as in OpenCV's 8-bit images. The divisors are
    tensors: a GPU multiplies by the inverse of a Python number, and this rounding error can change
    a grey level.
    """
    # Convert to hue, in sixths of the circle, and saturation. In a grey pixel all numerators are 0.
    red, green, blue = x.unbind(1)
    value, low = x.amax(1), x.amin(1)
    span = (value - low).clamp(min=1)
    hue = torch.where(value == green, 2 + (blue - red) / span, 4 + (red - green) / span)
    hue = torch.where(value == red, (green - blue) / span, hue)
    s = (255 * (value - low) / value.clamp(min=1) + 0.5).floor()

    # Change both and convert back: R, G, B = V - V S (0 to 1).
    hue = ((hue * 30 + 0.5).floor()[:, None] + turn) % 180
    sixth, most = constant((30.0, 255.0), x.device)
    s, value = scale_and_shift(s[:, None], saturation) / most, value[:, None]
    k = (hue / sixth + constant((5, 3, 1), x.device).view(3, 1, 1)) % 6
    return (value - value * s * torch.minimum(k, 4 - k).clamp(0, 1)).floor()


def distort(images, u):
    """Distort brightness, contrast, saturation and hue, each with probability 0.5.

    images: (B, 3, H, W) uint8. u: (B, COLUMNS). Returns uint8. A fair coin decides whether contrast
    comes second or last. If saturation and hue both change, the image is converted to HSV once; the
    source converts it twice.
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
