"""Reference arrays that hold photographs are not part of a clone; there the packages of requirements-dev.txt make them
anew, of drawn scenes of the same sizes and under the same names."""

import inspect
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType

import numpy as np
import pytest
import torch

from corruptions import CONSTANTS
from data import render_scenes

DETERMINISTIC = ("defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression")


def scenes(n=4, height=64, width=None, first=0):
    images = render_scenes(torch.arange(first, first + n), max(height, width or height))[0]
    return images[:, :, :height, :width or height].contiguous()


def picture(height, width=None):
    """The first scene as others want it: (height, width, 3), numpy."""
    return scenes(1, height, width)[0].permute(1, 2, 0).contiguous().numpy()


def frost_dir(beside):
    """ImageNet-C's photographs of frost: the folder beside the clone or, without it, the one imagecorruptions ships."""
    package = find_spec("imagecorruptions")
    return beside if beside.exists() else Path(package.submodule_search_locations[0], "frost")


@contextmanager
def imagecorruptions():
    """The module imagecorruptions.corruptions, made to run with today's numpy and scikit-image."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "float_", np.float64, raising=False)
        module = pytest.importorskip("imagecorruptions.corruptions", exc_type=ImportError)
        gaussian = module.gaussian
        if "multichannel" not in inspect.signature(gaussian).parameters:
            patch.setattr(module, "gaussian", lambda *args, multichannel=False, **kwargs: gaussian(
                *args, **kwargs, **({"channel_axis": -1} if multichannel else {})))
        yield module


def with_table(function, table):
    """A function of imagecorruptions whose constants are those of another of ImageNet-C's scripts."""
    old, new = (CONSTANTS[function.__name__][t] for t in (224, table))
    swap = {old: new}
    if function.__name__ == "zoom_blur":                                # its numbers stand there one by one
        swap = {a: b for pair in zip(old, new) for a, b in zip(*pair)}
    code = function.__code__
    consts = tuple(swap.get(c, c) if isinstance(c, (float, tuple)) else c for c in code.co_consts)
    assert consts != code.co_consts
    return FunctionType(code.replace(co_consts=consts), function.__globals__, None, function.__defaults__)


def elastic(image, c, jitter, field):
    """ImageNet-C's elastic transform, which imagecorruptions has not: an affine map by OpenCV, shifts by SciPy."""
    import cv2
    from scipy.ndimage import gaussian_filter, map_coordinates
    (H, W), (alpha, sigma, _) = image.shape[:2], c
    centre, s = np.float32((H // 2, W // 2)), min(H, W) // 3
    corners = centre + np.float32([[s, s], [s, -s], [-s, -s]])
    matrix = cv2.getAffineTransform(corners, corners + np.float32(jitter))
    image = cv2.warpAffine(np.float32(image) / 255, matrix, (W, H), borderMode=cv2.BORDER_REFLECT_101)
    across, down = (alpha * gaussian_filter(np.float64(f), sigma, mode="reflect", truncate=3) for f in field)
    y, x = np.mgrid[:H, :W]
    planes = [map_coordinates(image[..., k], (y + down, x + across), order=1, mode="reflect") for k in range(3)]
    return 255 * np.clip(np.stack(planes, 2), 0, 1)


def injected(module, z, patch):
    """Random corruptions with numbers of our own in place of those drawn."""
    rng, x = np.random.default_rng(1), picture(224)
    for severity in (1, 3, 5):
        for angle in (-37.5, 20.0):
            blurred = module._motion_blur(x, *CONSTANTS["motion_blur"][224][severity - 1], angle)
            z[f"motion/s{severity}/a{angle}"] = np.clip(blurred, 0, 255)
    for severity in (2, 5):
        _, d, iterations = CONSTANTS["glass_blur"][224][severity - 1]
        shift = rng.integers(-d, d, (iterations, 224 - 2 * d, 224 - 2 * d, 2))
        numbers = iter(shift.reshape(-1, 2))
        patch.setattr(np.random, "randint", lambda *_, **__: next(numbers))
        z[f"glass/s{severity}/disp"] = np.int8(shift)
        z[f"glass/s{severity}/out"] = module.glass_blur(x, severity)

        c = CONSTANTS["elastic_transform"][224][severity - 1]
        jitter, field = rng.uniform(-c[2], c[2], (3, 2)), np.float16(rng.uniform(-1, 1, (2, 224, 224)))
        z.update({f"elastic/s{severity}/{k}": v for k, v in zip(("jitter", "ux", "uy"), (np.float32(jitter), *field))})
        z[f"elastic/s{severity}/out"] = elastic(x, c, jitter, field)
    smear = module._motion_blur                                         # ImageNet-C truncates flakes before and after
    patch.setattr(module, "_motion_blur", lambda x, **how: np.floor(smear(np.floor(255 * x[:224, :224]), **how)) / 255)
    for severity, angle in ((1, -62.0), (4, -100.0)):
        field = np.float16(rng.normal(size=(224, 224)))
        patch.setattr(np.random, "normal", lambda size, loc, scale: loc + scale * np.float64(field))
        patch.setattr(np.random, "uniform", lambda *_: angle)
        z[f"snow/s{severity}/z"], z[f"snow/s{severity}/angle"] = field, np.float64(angle)
        z[f"snow/s{severity}/out"] = module.snow(x, severity)
    plasma = np.float16(rng.uniform(size=(224, 224)))
    patch.setattr(module, "plasma_fractal", lambda **_: np.float64(plasma))
    z["fog/s3/plasma"], z["fog/s3/out"] = plasma, module.fog(x, 3)


def robustness_corruptions_a():
    from PIL import Image
    z = dict(clean224=picture(224), clean32=picture(32), clean_any=picture(150, 232))
    with imagecorruptions() as module, pytest.MonkeyPatch.context() as patch:
        for name in (*DETERMINISTIC, "saturate"):
            function = getattr(module, name)
            small = with_table(function, 32)
            for kind, f, clean, severities in (("det", function, "clean224", (1, 3, 5)),
                                               ("det_any", function, "clean_any", (4,)),
                                               ("det32", small, "clean32", (1, 2, 3, 4, 5))):
                for s in severities:
                    z[f"{kind}/{name}/s{s}"] = np.asarray(f(Image.fromarray(z[clean]), s))
        injected(module, z, patch)
    outputs = {k: np.uint8(v) for k, v in z.items() if v.ndim == 3 and v.shape[2] == 3}
    return {k: torch.from_numpy(np.array(v)) for k, v in {**z, **outputs}.items()}


def seg_transforms():
    """What OpenCV makes of a scene, step by step as mmsegmentation calls it."""
    import cv2
    rgb = picture(360, 480)
    raw = np.uint8(render_scenes(torch.arange(1), 480)[2][0, :360, :480])
    raw[:, ::50] = 0
    muted = np.uint8(rgb[90:218, 150:278] // 4 + 90)                    # as photographs: a step of the hue is one level
    z = dict(rgb=rgb, label_raw=raw, label_reduced=raw - np.uint8(1), crop_rgb=muted)
    z["resized_rgb"] = cv2.resize(rgb, (272, 204), interpolation=cv2.INTER_LINEAR)
    z["resized_label"] = cv2.resize(z["label_reduced"], (272, 204), interpolation=cv2.INTER_NEAREST)
    z["size_rule"] = np.array([size_rule(h, w, ratio) for h, w in ((360, 480), (480, 360), (300, 1200), (333, 517))
                               for ratio in (0.5, 0.75, 1.0, 1.3, 2.0)])

    crop = np.float32(z["crop_rgb"])
    z["bright_beta"], z["contrast_alpha"] = np.array([-32.0, -7.5, 31.0]), np.array([0.5, 1.2, 1.5])
    z["sat_alpha"], z["hue_delta"] = np.array([0.5, 1.3, 1.5]), np.array([-18, 5, 17])
    z["bright_rgb"] = np.stack([np.uint8(np.clip(crop + np.float32(b), 0, 255)) for b in z["bright_beta"]])
    z["contrast_rgb"] = np.stack([np.uint8(np.clip(crop * np.float32(a), 0, 255)) for a in z["contrast_alpha"]])
    hue, saturation, value = cv2.split(cv2.cvtColor(z["crop_rgb"], cv2.COLOR_RGB2HSV))
    stronger = [np.uint8(np.clip(saturation * a, 0, 255)) for a in z["sat_alpha"]]
    turned = [np.uint8((hue.astype(int) + d) % 180) for d in z["hue_delta"]]
    for name, channels in (("sat_rgb", [(hue, s, value) for s in stronger]),
                           ("hue_rgb", [(h, saturation, value) for h in turned])):
        z[name] = np.stack([cv2.cvtColor(cv2.merge(hsv), cv2.COLOR_HSV2RGB) for hsv in channels])
    z["norm_mean"], z["norm_std"] = np.array([123.68, 116.28, 103.53]), np.array([58.4, 57.12, 57.38])
    z["normalised"] = np.float32(cv2.divide(cv2.subtract(crop, z["norm_mean"]), z["norm_std"]))
    return {k: torch.from_numpy(v) for k, v in z.items()}


def size_rule(h, w, ratio, size=256):
    """A row of the reference's table: an image of h x w, fitted into a box whose sides are 4 `size` and `size` times
    ratio."""
    box = int(4 * size * ratio), int(size * ratio)
    scale = min(max(box) / max(h, w), min(box) / min(h, w))
    return h, w, ratio, *box, int(h * scale + 0.5), int(w * scale + 0.5)


MAKE = dict(seg_transforms=seg_transforms, robustness_corruptions_a=robustness_corruptions_a)
