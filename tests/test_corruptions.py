"""Compare corruptions with ImageNet-C's code in imagecorruptions, and with its statistics."""

import inspect
import os
import zlib
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter, map_coordinates

from data.shapes import render_scenes
from robust import corruptions
from robust.corruptions import CONSTANTS, NAMES, corrupt
from robust.filters import quantise

pytestmark = pytest.mark.filterwarnings("ignore")           # of imagecorruptions
FROST = Path(find_spec("imagecorruptions").submodule_search_locations[0], "frost")
DETERMINISTIC = ("defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate",
                 "jpeg_compression")
RANDOM = tuple(name for name in NAMES if name not in DETERMINISTIC)


def scenes(n, height, width=None):
    """Render scenes (n, 3, height, width), uint8."""
    images = render_scenes(torch.arange(n), max(height, width or height))[0]
    return images[:, :, :height, :width or height].contiguous()


def assert_one_step(out, expected, equal=0.998):
    """Compare one image with an array (H, W, 3); results are truncated, so a few differ by 1."""
    expected = torch.from_numpy(np.array(expected, np.uint8)).permute(2, 0, 1)
    difference = (out[0].int() - expected.int()).abs()
    assert difference.max() <= 1 and (difference == 0).double().mean() >= equal


@pytest.fixture(scope="module")
def theirs():
    """Yield imagecorruptions' functions, patched for current numpy and scikit-image."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "float_", np.float64, raising=False)
        import imagecorruptions.corruptions as module
        gaussian = module.gaussian
        if "multichannel" not in inspect.signature(gaussian).parameters:
            patch.setattr(module, "gaussian", lambda *args, multichannel=False, **kwargs: gaussian(
                *args, **kwargs, **({"channel_axis": -1} if multichannel else {})))
        yield module


SIDE = 96


@pytest.fixture(scope="module")
def image():
    """Return an image as a batch, and as imagecorruptions expects it."""
    x = scenes(1, SIDE)
    return x, x[0].permute(1, 2, 0).numpy()


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_deterministic_corruptions_equal_imagenet_c(theirs, name):
    for size, severities in (((224,), (1, 3, 5)), ((150, 232), (4,))):
        x = scenes(1, *size)
        picture = Image.fromarray(x[0].permute(1, 2, 0).numpy())
        for severity in severities:
            assert_one_step(corrupt(x, name, severity), getattr(theirs, name)(picture, severity),
                            dict(defocus_blur=0.97, brightness=0.92).get(name, 0.998))


def test_motion_blur_equals_imagenet_c(theirs, image):
    for severity in (1, 3, 5):
        for angle in (-37.5, 20.0):
            c = CONSTANTS["motion_blur"][224][severity - 1]
            out = corruptions.motion_blur(image[0], c,
                                          lambda n: torch.tensor([[(angle + 45) / 90]]))
            assert_one_step(out, np.clip(theirs._motion_blur(image[1], *c, angle), 0, 255))


def test_glass_blur_equals_imagenet_c(theirs, image, monkeypatch):
    for severity in (1, 5):                                 # d = 1: no chains of copies
        c = _, d, rounds = CONSTANTS["glass_blur"][224][severity - 1]
        shift = np.random.default_rng(1).integers(-d, d, (rounds, SIDE - 2 * d, SIDE - 2 * d, 2))
        numbers = iter(shift.reshape(-1, 2))                            # in the order of the scan
        monkeypatch.setattr(np.random, "randint", lambda *_, **__: next(numbers))
        dx, dy = torch.from_numpy(shift).flip(1, 2).unbind(-1)
        monkeypatch.setattr(corruptions, "draw_glass_blur", lambda *_: (dy * SIDE + dx)[None])
        assert_one_step(corruptions.glass_blur(image[0], c, None),
                        theirs.glass_blur(image[1], severity))


def elastic(image, c, jitter, field):
    """Apply ImageNet-C's elastic transform with OpenCV and SciPy; imagecorruptions has another."""
    (H, W), (alpha, sigma, _) = image.shape[:2], c
    centre, s = np.float32((H // 2, W // 2)), min(H, W) // 3
    corners = centre + np.float32([[s, s], [s, -s], [-s, -s]])
    matrix = cv2.getAffineTransform(corners, corners + np.float32(jitter))
    image = cv2.warpAffine(np.float32(image) / 255, matrix, (W, H),
                           borderMode=cv2.BORDER_REFLECT_101)
    across, down = (alpha * gaussian_filter(np.float64(f), sigma, mode="reflect", truncate=3)
                    for f in field)
    y, x = np.mgrid[:H, :W]
    planes = [map_coordinates(image[..., k], (y + down, x + across), order=1, mode="reflect")
              for k in range(3)]
    return 255 * np.clip(np.stack(planes, 2), 0, 1)


def test_elastic_transform_equals_imagenet_c(image, monkeypatch):
    rng = np.random.default_rng(1)
    for severity in (2, 5):
        c = CONSTANTS["elastic_transform"][224][severity - 1]
        jitter = np.float32(rng.uniform(-c[2], c[2], (3, 2)))
        field = np.float32(rng.uniform(-1, 1, (2, SIDE, SIDE)))
        drawn = torch.from_numpy(jitter)[None], torch.from_numpy(field)[None]
        monkeypatch.setattr(corruptions, "draw_elastic_transform", lambda *_: drawn)
        assert_one_step(corruptions.elastic_transform(image[0], c, None),
                        elastic(image[1], c, jitter, field))


def test_snow_equals_imagenet_c(theirs, image, monkeypatch):
    smear = theirs._motion_blur                 # ImageNet-C rounds down before and after
    monkeypatch.setattr(theirs, "_motion_blur", lambda x, **how: np.floor(
        smear(np.floor(255 * x[:SIDE, :SIDE]), **how)) / 255)
    for severity, angle in ((1, -62.0), (4, -100.0)):
        c = CONSTANTS["snow"][224][severity - 1]
        field = np.float32(np.random.default_rng(1).normal(size=(SIDE, SIDE)))
        monkeypatch.setattr(np.random, "normal",
                            lambda size, loc, scale: loc + scale * np.float64(field))
        monkeypatch.setattr(np.random, "uniform", lambda *_: angle)
        side = corruptions.visible_side(SIDE, c[2])
        seen = slice((SIDE - side) // 2, (SIDE - side) // 2 + side)
        drawn = torch.from_numpy(field)[None, seen, seen], torch.tensor([angle])
        monkeypatch.setattr(corruptions, "draw_snow", lambda *_: drawn)
        assert_one_step(corruptions.snow(image[0], c, None), theirs.snow(image[1], severity))


def test_fog_equals_imagenet_c(theirs, image, monkeypatch):
    plasma = np.random.default_rng(1).uniform(size=(SIDE, SIDE))
    monkeypatch.setattr(theirs, "plasma_fractal", lambda **_: plasma)
    monkeypatch.setattr(corruptions, "draw_fog", lambda *_: torch.from_numpy(plasma).float()[None])
    assert_one_step(corruptions.fog(image[0], CONSTANTS["fog"][224][2], None),
                    theirs.fog(image[1], 3))


@pytest.fixture(scope="module")
def z(golden):
    return golden("robustness_corruptions_a")


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


def assert_same_statistics(z, reference, name, clean, n=12, **options):
    for severity in (1, 5):
        s = statistics(corrupt(clean.expand(n, -1, -1, -1), name, severity, **options), clean)
        mean, sd = (z[f"stats/{reference}/{name}/{k}"][severity - 1].double().nan_to_num()
                    for k in ("mean", "sd"))
        draws = z[f"stats/{reference}/{name}/draws"].flatten()[0]
        slack = torch.tensor([0.002, 0.002, 0.002, 0.05, 0.002])
        error = (s.mean(0) - mean).abs()
        noise = sd * (1 / draws + 1 / n) ** 0.5
        assert (error[:5] <= 5 * noise[:5] + slack).all(), (severity, error[:5], noise[:5])
        assert (error[5:] <= 0.1 + 5 * noise[5:]).all(), (severity, error[5:])


@pytest.mark.parametrize("name", RANDOM)
def test_random_corruptions_have_imagenet_c_statistics(z, name):
    for reference, size, n in ("H", 224, 12), ("C", 32, 12 if name == "frost" else 50):
        assert_same_statistics(z, reference, name, scenes(1, size), n=n, frost_dir=FROST)


def test_other_elastic_has_imagecorruptions_statistics(z, monkeypatch):
    monkeypatch.setattr(corruptions, "ELASTIC_SIZES", ())
    assert_same_statistics(z, "I", "elastic_transform", scenes(1, 224))


def test_synthetic_frost_resembles_the_photographs(z):
    clean = scenes(1, 32)
    for severity in range(1, 6):
        s = statistics(corrupt(clean.expand(200, -1, -1, -1), "frost", severity), clean).mean(0)
        mean, sd = (z[f"stats/C/frost/{k}"][severity - 1].double().nan_to_num()
                    for k in ("mean", "sd"))
        assert ((s - mean).abs()[:5] <= 0.5 * sd[:5]).all() and ((s - mean).abs()[5:] <= 0.5).all()


@pytest.fixture
def large(monkeypatch):
    """Use the constants for 224 pixels at every image size."""
    monkeypatch.setattr(corruptions, "table_of", lambda H, W: 224)


def test_flat_areas_are_defocused_as_by_imagecorruptions(theirs, large):
    """Truncation would make a white area grey, within the tolerance of the tests above."""
    for level in (0, 1, 100, 254, 255):
        for severity in range(1, 6):
            image = torch.full((1, 3, 40, 40), level, dtype=torch.uint8)
            picture = Image.fromarray(image[0].permute(1, 2, 0).numpy())
            assert_one_step(corrupt(image, "defocus_blur", severity),
                            theirs.defocus_blur(picture, severity), equal=1)


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


@pytest.mark.parametrize("name", RANDOM)
def test_numbers_depend_on_seed_image_severity(large, name):
    images = scenes(1, 64).expand(3, -1, -1, -1)
    run = partial(corrupt, images, name, 2)               # `large`: short motions can be equal
    first = run()
    assert torch.equal(first, run(seed=0, index=[0, 1, 2]))
    others = first[1], first[2], run(seed=1)[0], run(index=[100, 1, 2])[0]
    assert not any(torch.equal(first[0], other) for other in others)


def test_table_follows_the_shorter_side():
    for size, table in (((128, 200), 224), ((200, 127), 64), ((48, 64), 64), ((47, 200), 32)):
        images = scenes(1, *size)
        expected = corruptions.contrast(images, CONSTANTS["contrast"][table][1], None)
        assert torch.equal(corrupt(images, "contrast", 2), expected)


def test_parameters_equal_the_three_scripts():
    """Pin CONSTANTS. They were compared once with the three published scripts, number by number."""
    assert zlib.crc32(repr(CONSTANTS).encode()) == 0x06394fcc


def test_elastic_is_imagenet_c_at_three_sizes(monkeypatch):
    used = []
    monkeypatch.setitem(corruptions.CORRUPTIONS, "elastic_transform",
                        lambda images, *_: used.append(True) or images)
    monkeypatch.setattr(corruptions, "elastic_any_size",
                        lambda images, *_: used.append(False) or images)
    for size in (224, 224), (64, 64), (32, 32), (96, 96), (64, 80):
        corrupt(scenes(1, *size), "elastic_transform", 3)
    assert used == [True, True, True, False, False]


def test_frost_enlarges_photographs_for_large_images():
    black = torch.zeros(16, 3, 32, 32, dtype=torch.uint8)
    photographs, synthetic = (corrupt(black, "frost", 5, frost_dir=f) for f in (FROST, None))
    assert not torch.equal(photographs, synthetic)
    for textures in (photographs, synthetic):
        assert textures.float().mean((1, 2, 3)).std() > 10             # five different textures
    large = corrupt(scenes(1, 400, 700), "frost", 3, frost_dir=FROST)   # four photos are smaller
    assert large.shape == (1, 3, 400, 700) and large.float().std() > 10


def test_float_images_and_severity_0_are_errors():
    images = scenes(2, 32)
    for wrong in images.float() / 255, images[:, :1]:
        with pytest.raises(ValueError, match="expected uint8"):
            corrupt(wrong, "fog", 1)
    with pytest.raises(ValueError, match="severity is 0, expected 1 to 5"):
        corrupt(images, "fog", 0)


@pytest.mark.parametrize("allowed, expected", [(3, 3), (64, 10), (None, 5)])
def test_jpeg_uses_all_cores_that_it_may_use(monkeypatch, allowed, expected):
    """Also if torchrun leaves PyTorch one thread; None: a system without affinity, 5 cores."""
    asked = []

    class Pool(corruptions.ThreadPoolExecutor):
        def __init__(self, threads):
            asked.append(threads)
            super().__init__(threads)

    monkeypatch.setattr(corruptions, "ThreadPoolExecutor", Pool)
    if allowed is None:
        monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    else:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(allowed)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    corrupt(scenes(2, 32), "jpeg_compression", 3)
    assert asked == [expected]


def test_quantise_keeps_its_argument():
    x = torch.tensor([-3.0, 0.9999, 254.9999, 300.0])
    before = x.clone()
    assert quantise(x).tolist() == [0, 1, 255, 255] and torch.equal(x, before)
