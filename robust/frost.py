"""Textures of the corruption "frost": ImageNet-C's five photographs, or synthetic noise."""

from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from data.rng import FROST_NOISE, normal, uniform
from robust.filters import quantise

FROST_FILES = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")
# Per photograph: means and standard deviations of red, green and blue, and b; the power spectrum
# is proportional to frequency^-b. The second and the third photograph have equal numbers.
FROST = (((.305, .585, .650), (.106, .065, .060), 1.23),
         ((.787, .805, .841), (.084, .087, .089), 1.93),
         ((.787, .805, .841), (.084, .087, .089), 1.93),
         ((.540, .599, .648), (.112, .112, .117), 1.48),
         ((.441, .484, .528), (.174, .170, .163), 1.96))


def synthetic_frost(number):
    """Draw noise, (3, 600, 900) uint8, with the spectrum and colours of photograph `number`."""
    H, W = 600, 900
    mean, std, b = FROST[number]
    mean = torch.tensor(mean)
    std = torch.tensor(std)
    frequency = torch.hypot(torch.fft.fftfreq(H)[:, None], torch.fft.rfftfreq(W))
    amplitude = torch.where(frequency > 0, frequency.clamp(min=1 / W) ** (-b / 2), 0)
    numbers = uniform(torch.tensor([number]), H * W, FROST_NOISE)
    white = normal(numbers).view(H, W)

    def standardise(x):
        return (x - x.mean()) / x.std()

    spectrum = torch.fft.rfft2(white) * amplitude
    field = standardise(torch.fft.irfft2(spectrum, s=(H, W)))
    ridges = standardise(1 - 2 * field.abs())                   # high where the field is near 0
    field = standardise(0.6 * field + 0.4 * ridges)
    return quantise(255 * (mean[:, None, None] + std[:, None, None] * field))


@lru_cache(maxsize=2)
def load_frost(frost_dir):
    """Load the five photographs in frost_dir, or make synthetic ones: (3, h, w) uint8 each."""
    if frost_dir is None:
        return [synthetic_frost(number) for number in range(len(FROST))]
    from PIL import Image
    textures = []
    for name in FROST_FILES:
        photograph = Image.open(Path(frost_dir, name)).convert("RGB")
        pixels = torch.from_numpy(np.array(photograph))
        textures.append(pixels.permute(2, 0, 1).contiguous())
    return textures


@lru_cache(maxsize=8)
def scaled_frost(frost_dir, scale, H, W, device):
    """Load and scale the textures; enlarge a texture that is too small for crops of H x W px."""
    textures = []
    for texture in load_frost(frost_dir):
        x = texture[None].to(device).float()
        if scale != 1:
            x = F.interpolate(x, scale_factor=scale, mode="bilinear").round_()
        least_factor = max((H + 1) / x.shape[2], (W + 1) / x.shape[3])
        if least_factor > 1:                # 10 % more leaves room for crops at random places
            x = F.interpolate(x, scale_factor=1.1 * least_factor, mode="bicubic")
            x = x.round_().clamp_(0, 255)   # bicubic interpolation can overshoot
        textures.append(x[0].byte())
    return textures
