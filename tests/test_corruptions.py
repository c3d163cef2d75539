"""Compare corruptions with ImageNet-C's code: live, by recorded outputs, and by statistics."""

import zlib
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data.shapes import render_scenes
from robust import corruptions
from robust.corruptions import CONSTANTS, NAMES, corrupt
from robust.filters import quantise

pytestmark = pytest.mark.filterwarnings("ignore")           # of imagecorruptions
FROST = Path(find_spec("imagecorruptions").submodule_search_locations[0], "frost")
DETERMINISTIC = ("defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate",
                 "jpeg_compression")
RANDOM = tuple(name for name in NAMES if name not in DETERMINISTIC)
DRAWN = {"glass_blur": "draw_glass_blur", "elastic_transform": "draw_elastic_transform",
         "snow": "draw_snow", "fog": "draw_fog"}            # the functions that draw, to replace
random_ones = pytest.mark.parametrize("name", RANDOM)


def scenes(n, height, width=None):
    """Render scenes (n, 3, height, width), uint8."""
    images = render_scenes(torch.arange(n), max(height, width or height))[0]
    return images[:, :, :height, :width or height].contiguous()


def assert_one_step(out, expected, equal=0.998):
    """Compare one image with (3, H, W); results are truncated, so a few pixels differ by 1."""
    difference = (out[0].int() - expected.int()).abs()
    assert difference.max() <= 1 and (difference == 0).double().mean() >= equal


def theirs(name, image, severity):
    """Return the corruption of one image by imagecorruptions, (3, H, W)."""
    import imagecorruptions.corruptions as module
    picture = Image.fromarray(image[0].permute(1, 2, 0).numpy())
    changed = np.array(getattr(module, name)(picture, severity), np.uint8)
    return torch.from_numpy(changed).permute(2, 0, 1)


@pytest.fixture
def large(monkeypatch):
    """Use the constants for 224 pixels at every image size."""
    monkeypatch.setattr(corruptions, "table_of", lambda H, W: 224)


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_deterministic_corruptions_equal_imagenet_c(name):
    equal = dict(defocus_blur=0.97, brightness=0.92).get(name, 0.998)
    for size, severity in ((224,), 1), ((224,), 3), ((224,), 5), ((150, 232), 4):
        image = scenes(1, *size)
        assert_one_step(corrupt(image, name, severity), theirs(name, image, severity), equal)


def test_random_corruptions_equal_imagenet_c_for_its_numbers(golden, monkeypatch):
    z, image = golden("robustness_corruptions_b"), scenes(1, 24)
    cases = [key.removesuffix("/image") for key in z if key.endswith("/image")]
    for case in cases:
        name, severity = case.split("/")
        drawn = [z[key] for key in sorted(z) if key.startswith(f"{case}/draw")]
        if name in DRAWN:
            numbers = drawn if len(drawn) > 1 else drawn[0].long() if "glass" in name else drawn[0]
            monkeypatch.setattr(corruptions, DRAWN[name], lambda *_: numbers)
        c = CONSTANTS[name][224][int(severity[0]) - 1]
        out = getattr(corruptions, name)(image, c, lambda n: drawn[0])
        assert_one_step(out, z[f"{case}/image"], equal=0.995)
    assert len(cases) == 9 and {case.split("/")[0] for case in cases} == {*DRAWN, "motion_blur"}


def statistics(out, clean):
    """Return 37 statistics per image; the last 32 are power spectra in rings."""
    x, y = out.double() / 255, clean.double() / 255
    d = (x - y).flatten(1)
    first = torch.stack([x.flatten(1).mean(1), x.flatten(1).std(1, correction=0), d.abs().mean(1),
                         -10 * d.square().mean(1).clamp(min=1e-12).log10(), d.mean(1)], 1)
    H, W = x.shape[2:]
    r = torch.hypot(torch.fft.fftfreq(H)[:, None], torch.fft.fftfreq(W)).flatten()
    ring = torch.where((r > 0) & (r < 0.5), (r * 32).long(), 16)
    spectra = []
    for g in ((x - y).mean(1), x.mean(1)):
        power = torch.fft.fft2(g - g.mean((1, 2), keepdim=True)).abs().square().flatten(1) / (H * W)
        total = torch.zeros(len(g), 17, dtype=power.dtype).index_add_(1, ring, power)
        spectra.append((total / ring.bincount(minlength=17))[:, :16].add(1e-12).log10())
    return torch.cat([first, *spectra], 1).nan_to_num()                 # 32 px: ring 0 is empty


@random_ones
def test_random_corruptions_have_imagenet_c_statistics(golden, name, monkeypatch):
    """I: imagecorruptions' elastic transform, which other image sizes have."""
    z, slack = golden("robustness_corruptions_a"), torch.tensor([0.002, 0.002, 0.002, 0.05, 0.002])
    cases = [("H", 224, 12), ("C", 32, 12 if name == "frost" else 50)]
    for reference, size, n in cases + [("I", 224, 12)] * (name == "elastic_transform"):
        monkeypatch.setattr(corruptions, "ELASTIC_SIZES", () if reference == "I" else (224, 64, 32))
        clean, of = scenes(1, size), f"stats/{reference}/{name}"
        for i, severity in enumerate((1, 5)):
            out = corrupt(clean.expand(n, -1, -1, -1), name, severity, frost_dir=FROST)
            mean, sd = (z[f"{of}/{k}"][4 * i].double().nan_to_num() for k in ("mean", "sd"))
            error = (statistics(out, clean).mean(0) - mean).abs()
            noise = sd * (1 / z[f"{of}/draws"].flatten()[0] + 1 / n) ** 0.5
            assert (error[:5] <= 5 * noise[:5] + slack).all(), (severity, error[:5], noise[:5])
            assert (error[5:] <= 0.1 + 5 * noise[5:]).all(), (severity, error[5:])


def test_synthetic_frost_resembles_the_photographs(golden):
    z, clean = golden("robustness_corruptions_a"), scenes(1, 32)
    for severity in range(1, 6):
        s = statistics(corrupt(clean.expand(200, -1, -1, -1), "frost", severity), clean).mean(0)
        mean, sd = (z[f"stats/C/frost/{k}"][severity - 1].double().nan_to_num()
                    for k in ("mean", "sd"))
        assert ((s - mean).abs()[:5] <= 0.5 * sd[:5]).all() and ((s - mean).abs()[5:] <= 0.5).all()


def test_flat_areas_are_defocused_as_by_imagecorruptions(large):
    """Truncation would make a white area grey, within the tolerance of the tests above."""
    for level in (0, 1, 100, 254, 255):
        image = torch.full((1, 3, 40, 40), level, dtype=torch.uint8)
        for severity in range(1, 6):
            assert_one_step(corrupt(image, "defocus_blur", severity),
                            theirs("defocus_blur", image, severity), equal=1)


@pytest.mark.parametrize("name", NAMES)
def test_batch_size_order_and_memory_layout_change_nothing(name):
    for images, severity in ((scenes(2, 224), 4), (scenes(100, 32), 2), (scenes(5, 47, 33), 5)):
        n, before = len(images), images.clone()
        index, strided = torch.arange(n) * 7 + 3, images.to(memory_format=torch.channels_last)
        whole = corrupt(strided, name, severity, seed=5, index=index)
        order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
        parts = [corrupt(images[part], name, severity, seed=5, index=index[part].tolist())
                 for part in order.split([1, n - 1])]
        assert torch.equal(whole[order], torch.cat(parts))
        assert torch.equal(images, before) and not torch.equal(whole[0], images[0])


@random_ones
def test_numbers_depend_on_seed_image_severity(large, name, monkeypatch):
    images, keys, uniform = scenes(1, 64).expand(3, -1, -1, -1), [], corruptions.uniform
    monkeypatch.setattr(corruptions, "uniform", lambda index, n, *key: keys.append(key) or
                        uniform(index, n, *key))
    run = partial(corrupt, images, name, 2)               # `large`: short motions can be equal
    first = run()
    assert torch.equal(first, run(seed=0, index=[0, 1, 2]))
    others = first[1], first[2], run(seed=1)[0], run(index=[100, 1, 2])[0]
    assert not any(torch.equal(first[0], other) for other in others)
    corrupt(images, name, 3)
    assert keys[-1] not in keys[:-1]                      # another severity draws other numbers


def test_table_follows_the_shorter_side():
    for size, table in (((128, 200), 224), ((200, 127), 64), ((48, 64), 64), ((47, 200), 32)):
        images = scenes(1, *size)
        expected = corruptions.contrast(images, CONSTANTS["contrast"][table][1], None)
        assert torch.equal(corrupt(images, "contrast", 2), expected)
    any_size = corruptions.elastic_any_size               # the other elastic transform
    for side, width, other in ((224, 224, 0), (64, 64, 0), (32, 32, 0), (96, 96, 1), (64, 80, 1)):
        function, _ = corruptions.choose_function("elastic_transform", side, width, None)
        assert (function is any_size) == other


def test_parameters_equal_the_three_scripts():
    """Pin CONSTANTS. They were compared once with the three published scripts, number by number."""
    assert zlib.crc32(repr(CONSTANTS).encode()) == 0x06394fcc


def test_frost_enlarges_photographs_for_large_images():
    black = torch.zeros(16, 3, 32, 32, dtype=torch.uint8)
    photographs, synthetic = (corrupt(black, "frost", 5, frost_dir=f) for f in (FROST, None))
    assert not torch.equal(photographs, synthetic)
    for textures in (photographs, synthetic):
        assert textures.float().mean((1, 2, 3)).std() > 10             # five different textures
    large = corrupt(scenes(1, 400, 700), "frost", 3, frost_dir=FROST)   # four photos are smaller
    assert large.shape == (1, 3, 400, 700) and large.float().std() > 10


def test_wrong_calls_are_errors_quantise_keeps_its_argument():
    images = scenes(2, 32)
    for wrong, severity, words in ((images.float() / 255, 1, "expected uint8"),
                                   (images[:, :1], 1, "expected uint8"),
                                   (images, 0, "severity is 0, expected 1 to 5")):
        with pytest.raises(ValueError, match=words):
            corrupt(wrong, "fog", severity)
    x = torch.tensor([-3.0, 0.9999, 254.9999, 300.0])
    before = x.clone()
    assert quantise(x).tolist() == [0, 1, 255, 255] and torch.equal(x, before)
