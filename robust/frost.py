"""Textures for the corruption "frost": ImageNet-C's five photographs, or noise of their kind."""

from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from common import InputError
from data.decode import decode
from data.rng import FROST_NOISE, normal, uniform
from robust.filters import quantise

FROST_FILES = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")
# Of the five photographs: mean and std of red, green, blue, and b in spectrum ~ frequency^-b.
FROST = (((.305, .585, .650), (.106, .065, .060), 1.23),
         ((.787, .805, .841), (.084, .087, .089), 1.93),
         ((.787, .805, .841), (.084, .087, .089), 1.93),
         ((.540, .599, .648), (.112, .112, .117), 1.48),
         ((.441, .484, .528), (.174, .170, .163), 1.96))


def synthetic_frost(number):
    """Draw a stand-in for photograph `number`: noise of its spectrum and colours, ridges.

    Returns (3, 600, 900) uint8.
    """
    H, W = 600, 900
    mean, std, b = torch.tensor(FROST[number][0]), torch.tensor(FROST[number][1]), FROST[number][2]
    frequency = torch.hypot(torch.fft.fftfreq(H)[:, None], torch.fft.rfftfreq(W))
    amplitude = torch.where(frequency > 0, frequency.clamp(min=1 / W) ** (-b / 2), 0)
    white = normal(uniform(torch.tensor([number]), H * W, FROST_NOISE)).view(H, W)

    def standardise(x):
        return (x - x.mean()) / x.std()
    field = standardise(torch.fft.irfft2(torch.fft.rfft2(white) * amplitude, s=(H, W)))
    field = standardise(0.6 * field + 0.4 * standardise(1 - 2 * field.abs()))
    return quantise(255 * (mean[:, None, None] + std[:, None, None] * field))


@lru_cache(maxsize=2)
def load_frost(frost_dir):
    """Load the five textures, (3, h, w) uint8 each: ImageNet-C's; None: synthetic ones."""
    if frost_dir is None:
        return [synthetic_frost(number) for number in range(len(FROST))]
    paths = [Path(frost_dir, name) for name in FROST_FILES]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise InputError(f"--frost_dir {frost_dir} lacks {', '.join(missing)}; "
                         f"expected ImageNet-C's {', '.join(FROST_FILES)}")
    return [decode(np.fromfile(path, dtype=np.uint8), path.name) for path in paths]


@lru_cache(maxsize=8)
def scaled_frost(frost_dir, scale, H, W, device):
    """Scale the textures, 10 % larger than needed where H x W does not fit in."""
    textures = []
    for texture in load_frost(frost_dir):
        x = texture[None].to(device).float()
        if scale != 1:
            x = F.interpolate(x, scale_factor=scale, mode="bilinear").round_()
        need = max((H + 1) / x.shape[2], (W + 1) / x.shape[3])
        if need > 1:
            x = F.interpolate(x, scale_factor=1.1 * need, mode="bicubic").round_().clamp_(0, 255)
        textures.append(x[0].byte())
    return textures
