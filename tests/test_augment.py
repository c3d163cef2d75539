"""Compare batched augmentations with PIL and timm; test how random numbers determine them."""

import math

import numpy as np
import pytest
import torch

from data.augment import (ERASE_COLUMNS, FILL, MEAN, OPS, STD, augment_uint8, rand_augment,
                          random_crop, random_erase, random_hflip, to_float)
from data.rng import uniform

Image, ImageEnhance, ImageOps = (pytest.importorskip(f"PIL.{name}")
                                 for name in ("Image", "ImageEnhance", "ImageOps"))
LEVELS = (0.0, 0.31, 0.62, 0.83, 0.9, 0.957, 1.0)                        # x = level / 10


def augment(images, positions, seed, erase=0.25):
    """Run both parts of the recipe, uint8 and float, with the random shift of small images."""
    return to_float(augment_uint8(images, positions, seed, pad=4, num_ops=2), positions, seed,
                    erase)


def make_images(n=6, H=48, W=64, seed=0):
    """Make uint8 images: smooth colours of different contrast, white noise, one flat image."""
    rng = torch.Generator().manual_seed(seed)
    coarse = torch.rand(n, 3, 6, 8, generator=rng)
    low, span = (torch.rand(n, 3, 1, 1, generator=rng) for _ in range(2))
    low, span = low * 0.5, 0.2 + 0.6 * span
    images = low + span * torch.nn.functional.interpolate(coarse, (H, W), mode="bicubic")
    images[-2] = torch.rand(3, H, W, generator=rng)
    images[-1] = 0.5
    return (images * 255).clamp(0, 255).byte()


def on_pil(images, f):
    """Apply f to each image as PIL image; return a batch."""
    out = [np.asarray(f(Image.fromarray(image.permute(1, 2, 0).numpy()))) for image in images]
    return torch.from_numpy(np.stack(out)).permute(0, 3, 1, 2)


def full(images, value):
    return torch.full((len(images), 1, 1, 1), value, dtype=torch.float32)


def ours(name, images, x, sign):
    """Run operation `name` at level 10 x; return its result and its argument."""
    op, argument = OPS[name]
    a = argument(torch.tensor(x, dtype=torch.float64), torch.tensor(sign, dtype=torch.float64))
    return op(images, full(images, a)), a.item()


# --- RandAugment: each operation ------------------------------------------------------------------

PIL_TONE = {
    "AutoContrast": lambda image, a: ImageOps.autocontrast(image),
    "Equalize": lambda image, a: ImageOps.equalize(image),
    "Invert": lambda image, a: ImageOps.invert(image),
    "PosterizeIncreasing": lambda image, a: ImageOps.posterize(image, int(a)) if a
    else image.point(lambda v: 0),
    "SolarizeIncreasing": lambda image, a: ImageOps.solarize(image, int(a)),
    "SolarizeAdd": lambda image, a: image.point([min(255, v + int(a)) if v < 128 else v
                                                 for v in range(256)] * 3),
    "ColorIncreasing": lambda image, a: ImageEnhance.Color(image).enhance(a),
    "ContrastIncreasing": lambda image, a: ImageEnhance.Contrast(image).enhance(a),
    "BrightnessIncreasing": lambda image, a: ImageEnhance.Brightness(image).enhance(a),
    "SharpnessIncreasing": lambda image, a: ImageEnhance.Sharpness(image).enhance(a),
}


def pil_affine(image, matrix):
    return image.transform(image.size, Image.Transform.AFFINE, matrix,
                           resample=Image.Resampling.BICUBIC, fillcolor=FILL)


PIL_GEOMETRIC = {
    "Rotate": lambda image, a: image.rotate(a, resample=Image.Resampling.BICUBIC, fillcolor=FILL),
    "ShearX": lambda image, a: pil_affine(image, (1, a, 0, 0, 1, 0)),
    "ShearY": lambda image, a: pil_affine(image, (1, 0, 0, a, 1, 0)),
    "TranslateXRel": lambda image, a: pil_affine(image, (1, 0, a * image.size[0], 0, 1, 0)),
    "TranslateYRel": lambda image, a: pil_affine(image, (1, 0, 0, 0, 1, a * image.size[1])),
}


def worst(name, images, pil):
    """Return the largest error over levels and signs, and the largest share of wrong values."""
    errors = []
    for x in LEVELS:
        for sign in (1.0, -1.0):
            out, a = ours(name, images, x, sign)
            errors.append((out.int() - on_pil(images, lambda image: pil(image, a)).int()).abs())
    return max(e.max() for e in errors), max((e > 0).float().mean() for e in errors)


@pytest.mark.parametrize("name", OPS)
def test_an_operation_equals_pils(name):
    """Compare each operation with PIL's.

    Tone operations are equal. Only AutoContrast may differ by one level, because PIL rounds its
    slope before it truncates. Geometric operations compute in float32, PIL computes in double, and
    both truncate. So under 1 % of the values differ, by one level. Most of these values differ
    where the exact result is a whole number at many pixels, for example in a shift by 0.45 * 96 =
    43.2 pixels.
    """
    if name in PIL_TONE:
        for images in (make_images(), make_images(4, 8, 8, seed=1), make_images(4, 33, 20, seed=2)):
            assert worst(name, images, PIL_TONE[name])[0] <= (name == "AutoContrast")
        return
    images = make_images(8, 61, 96)
    error, share = worst(name, images, PIL_GEOMETRIC[name])
    assert error <= 1 and share < 0.01 and torch.equal(ours(name, images, 0.0, 1.0)[0], images)


def test_operations_and_arguments_equal_timm():
    timm = pytest.importorskip("timm.data.auto_augment")
    assert list(OPS) == timm._RAND_INCREASING_TRANSFORMS
    assert FILL == tuple(round(255 * mean) for mean in (0.485, 0.456, 0.406))
    assert STD == (0.229, 0.224, 0.225)
    for name, (_, argument) in OPS.items():
        level_to_arg = timm.LEVEL_TO_ARG[name]
        if level_to_arg is None:
            continue
        for level in (0.0, 3.3, 7.77, 8.9, 9.0, 9.41, 10.0):
            args = {round(float(argument(torch.tensor(level / 10, dtype=torch.float64), sign)), 9)
                    for sign in (1, -1)}
            # 40 draws contain both signs
            theirs = {round(float(level_to_arg(level, {})[0]), 9) for _ in range(40)}
            assert args == theirs, (name, level)


# --- RandAugment: the mixture ---------------------------------------------------------------------

def test_each_draw_has_own_operation_level_sign(monkeypatch):
    seen = []
    for name in OPS:
        def note(images, a, name=name):
            seen.append((name, a.item()))
            return images
        monkeypatch.setitem(OPS, name, (note, lambda x, sign: 10 * x * sign))
    rotate, invert = (list(OPS).index(name) + 0.5 for name in ("Rotate", "Invert"))
    high = 0.5 + 0.5 * math.erf(1 / math.sqrt(2))  # one standard deviation above the mean
    rand_augment(make_images()[:1], torch.tensor([[rotate / 15, 0.49, 0.5, 0.7, invert / 15, 0.49,
                                                   high, 0.3]]))
    assert [name for name, _ in seen] == ["Rotate", "Invert"]
    assert torch.allclose(torch.tensor([a for _, a in seen]), torch.tensor([-9.0, 9.5]), atol=1e-4)
    ends = torch.tensor([[0.0, 0, 0, 0.49, 1 - 2 ** -24, 0, 1 - 2 ** -24, 0.51]],
                        dtype=torch.float64)
    rand_augment(make_images()[:1], ends)  # levels are clipped to [0, 10]
    assert [name for name, _ in seen[2:]] == [list(OPS)[0], list(OPS)[-1]]
    assert 6 < seen[2][1] < 6.5 and seen[3][1] == -10
    del seen[2:]
    rand_augment(make_images()[:1], torch.tensor([[rotate / 15, 0.51, 0.5, 0.7, invert / 15, 0.52,
                                                   high, 0.3]]))
    assert len(seen) == 2                                        # 0.51 and 0.52: not applied


def test_samples_do_not_depend_on_their_batch():
    images, positions = make_images(12, 40, 40), torch.arange(100, 112)
    before, whole = images.clone(), augment(images, positions, seed=3, erase=0.5)
    parts = [augment(images[i:j], positions[i:j], seed=3, erase=0.5)
             for i, j in ((0, 1), (1, 6), (6, 12))]
    assert torch.equal(whole, torch.cat(parts))
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    assert torch.equal(whole[order], augment(images[order], positions[order], seed=3, erase=0.5))
    assert not torch.equal(whole, augment(images, positions, seed=4, erase=0.5))
    augment(images, positions, seed=0, erase=1)
    out = augment(images, positions, seed=0, erase=0)
    assert torch.equal(images, before) and out.dtype == torch.float32 and 0 <= out.min()
    assert out.max() <= 1


# --- crop and flip --------------------------------------------------------------------------------

def test_flip_and_shift_follow_their_numbers():
    images = make_images(5)[:4]  # without the flat image, the last
    flipped = random_hflip(images, torch.tensor([0.1, 0.5, 0.9, 0.4999]))
    assert torch.equal(flipped[[0, 3]], images[[0, 3]].flip(3))
    assert torch.equal(flipped[1:3], images[1:3])
    out = random_crop(images[:3], torch.tensor([[0.5, 0.5], [0.0, 0.0], [1 - 2 ** -24, 0.5]]))
    assert torch.equal(out[0], images[0])
    assert torch.equal(out[1, :, 4:, 4:], images[1, :, :-4, :-4]) and not out[1, :, :4].any()
    assert torch.equal(out[2, :, :-4], images[2, :, 4:]) and not out[2, :, -4:].any()


# --- random erasing -------------------------------------------------------------------------------

def erase(positions):
    """Erase constant images (2.0, unlike noise); return them and the erased pixels (n, H, W)."""
    images = torch.full((len(positions), 3, 32, 32), 2.0)
    u = uniform(positions, ERASE_COLUMNS, 0, 1)
    out = random_erase(images, u, positions, 0, 1.0)
    return out, (out != 2).any(1)


def erased_box(prob_u, top_u, left_u, area_u, ratio_u, misses=0):
    """Return the box (top, left, height, width) in 96 x 96 pixels, after `misses` failed tries."""
    tall = 0.5 - 0.5 * math.log(3) / math.log(0.3)  # three times as high as wide: 96 x 32
    u = torch.tensor([[prob_u, top_u, left_u, *[1 - 2 ** -24] * misses, *[area_u] * (10 - misses),
                       *[tall] * misses, *[ratio_u] * (10 - misses)]])
    changed = (random_erase(torch.full((1, 3, 96, 96), 2.0), u, torch.arange(1), 0,
                            0.25)[0] != 2).any(0).nonzero()
    # every pixel of the box is erased
    assert len(changed) == 0 or len(changed) == (changed.amax(0) - changed.amin(0) + 1).prod()
    return (*changed.amin(0).tolist(), *(changed.amax(0) - changed.amin(0)
                                         + 1).tolist()) if len(changed) else None


def test_erased_box_follows_its_numbers():
    end, pixels = 1 - 2 ** -24, 96 * 96
    small, large = math.sqrt(0.02 * pixels), math.sqrt(pixels / 3)
    # the probability is exactly 0.25
    assert erased_box(0.2499, 0, 0, 0, 0.5) == (0, 0, round(small), round(small))
    assert erased_box(0.2501, 0, 0, 0, 0.5) is None
    assert erased_box(0, 0, 0, end, 0.5) == (0, 0, round(large), round(large))
    h, w = round(small * math.sqrt(0.3)), round(small / math.sqrt(0.3))  # the flattest box
    assert erased_box(0, end, 0, 0, 0) == (96 - h, 0, h, w)
    assert erased_box(0, 0, end, 0, 0) == (0, 96 - w, h, w)
    for misses in (1, 9):  # the first of ten tries that fits is taken
        assert erased_box(0, end, 0, 0, 0, misses) == (96 - h, 0, h, w)
    assert erased_box(0, 0, 0, 0, 0, misses=10) is None


def test_erased_pixels_are_standard_normal_after_normalisation():
    out, mask = erase(torch.arange(200))
    for c in range(3):
        noise = (out[:, c][mask] - MEAN[c]) / STD[c]
        assert abs(noise.mean()) < 0.03 and abs(noise.std() - 1) < 0.03
        assert abs((noise.abs() < 1).float().mean() - 0.683) < 0.01
    a, b = out[:, 0][mask], out[:, 1][mask]
    for pair in ((a, b), (a[1:], a[:-1])):  # channels and neighbours are independent
        assert abs(torch.corrcoef(torch.stack(pair))[0, 1]) < 0.03
