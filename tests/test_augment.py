"""Compare batched augmentations with PIL and timm; test how random numbers determine them."""

import math
from argparse import Namespace

import numpy as np
import pytest
import torch

import train_cls
from data import augment as aug
from data.augment import (ERASE_COLUMNS, FILL, MEAN, OPS, STD, augment_uint8, mix, rand_augment,
                          random_crop, random_erase, random_hflip, to_float_and_erase)
from data.rng import RAND_AUGMENT, batch_pairs, uniform
from data.shapes import load_shapes

Image = pytest.importorskip("PIL.Image")


def augment(images, positions, seed, erase=0.25):
    """Run both parts of the recipe, uint8 and float, with the random shift of small images."""
    images = augment_uint8(images, positions, seed, pad=4, num_ops=2, flip=True)
    return to_float_and_erase(images, positions, seed, erase)


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


def ours(name, images, level, sign):
    """Apply operation `name` at this level to every image."""
    change, names = next((change, names) for change, names in (
        (aug.change_tone, aug.TONE), (aug.blend, aug.BLEND), (aug.warp, aug.GEOMETRIC))
        if name in names)
    x, sign = (torch.full((len(images),), value) for value in (level / 10, sign))
    return change(images, torch.full((len(images),), names.index(name)), x, sign)


@pytest.mark.parametrize("name", OPS)
def test_an_operation_equals_timms(name, monkeypatch):
    """Colours agree to one grey level. Geometry differs at edges."""
    timm = pytest.importorskip("timm.data.auto_augment")
    assert sorted(OPS) == sorted(timm._RAND_INCREASING_TRANSFORMS)
    images = make_images(8, 61, 96)
    how = dict(fillcolor=FILL, resample=Image.Resampling.BICUBIC) if name in aug.GEOMETRIC else {}
    for level in (0.0, 3.1, 9.0, 9.57):
        for sign in (1.0, -1.0):
            monkeypatch.setattr(timm.random, "random", lambda: 0.9 if sign < 0 else 0.1)
            to_argument = timm.LEVEL_TO_ARG[name]
            argument = to_argument(level, {}) if to_argument else ()
            theirs = on_pil(images, lambda image: timm.NAME_TO_OP[name](image, *argument, **how))
            error = (ours(name, images, level, sign).int() - theirs.int()).abs().float()
            if name in aug.GEOMETRIC:
                smooth = error[:-2]                         # the other two are noise and flat
                assert smooth.mean() < 1.5 and smooth.quantile(0.9) <= 3, (level, sign)
            else:
                assert error.max() <= 1, (level, sign)


def test_each_draw_has_own_operation_level_sign(monkeypatch):
    seen = []
    for change, names in (("change_tone", aug.TONE), ("warp", aug.GEOMETRIC)):
        def note(images, which, x, sign, names=names):
            seen.extend(zip([names[k] for k in which], (10 * x * sign).tolist()))
            return images
        monkeypatch.setattr(aug, change, note)
    rotate, invert = ((OPS.index(name) + 0.5) / 15 for name in ("Rotate", "Invert"))
    high = 0.5 + 0.5 * math.erf(1 / math.sqrt(2))  # one standard deviation above the mean
    u = torch.tensor([[rotate, 0.49, 0.5, 0.7, invert, 0.49, high, 0.3],
                      [rotate, 0.51, 0.5, 0.7, invert, 0.52, high, 0.3]])       # not applied
    rand_augment(make_images()[:2], u)
    assert [name for name, _ in seen] == ["Rotate", "Invert"]
    assert [level for _, level in seen] == pytest.approx([-9, 9.5], abs=1e-4)
    end = 1 - 2 ** -24
    rand_augment(make_images()[:1], torch.tensor([[0, 0, 0, 0.49, end, 0, end, 0.51]]))
    assert [name for name, _ in seen[2:]] == [OPS[0], OPS[-1]]
    assert seen[3][1] == -10                                    # levels are clipped to [0, 10]


def test_samples_do_not_depend_on_their_batch():
    images, positions = make_images(12, 40, 40), torch.arange(100, 112)
    before, whole = images.clone(), augment(images, positions, seed=3, erase=0.5)
    parts = [augment(images[i:j], positions[i:j], seed=3, erase=0.5)
             for i, j in ((0, 1), (1, 6), (6, 12))]
    assert torch.equal(whole, torch.cat(parts))
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    assert torch.equal(whole[order], augment(images[order], positions[order], seed=3, erase=0.5))
    assert not torch.equal(whole, augment(images, positions, seed=4, erase=0.5))
    assert torch.equal(images, before) and whole.dtype == torch.float32


def test_flip_and_shift_follow_their_numbers():
    images = make_images(5)[:4]  # without the flat image, the last
    flipped = random_hflip(images, torch.tensor([0.1, 0.5, 0.9, 0.4999]))
    assert torch.equal(flipped[[0, 3]], images[[0, 3]].flip(3))
    assert torch.equal(flipped[1:3], images[1:3])
    out = random_crop(images[:3], torch.tensor([[0.5, 0.5], [0.0, 0.0], [1 - 2 ** -24, 0.5]]), 4)
    assert torch.equal(out[0], images[0])
    assert torch.equal(out[1, :, 4:, 4:], images[1, :, :-4, :-4]) and not out[1, :, :4].any()
    assert torch.equal(out[2, :, :-4], images[2, :, 4:]) and not out[2, :, -4:].any()


def test_flip_is_a_choice():
    """Without it, the other random numbers stay."""
    images, positions = make_images(8), torch.arange(8)
    both = augment_uint8(images, positions, 0, pad=4, num_ops=2, flip=False)
    alone = augment_uint8(images, positions, 0, pad=4, flip=False)
    alone = rand_augment(alone, uniform(positions, 8, 0, RAND_AUGMENT))
    assert torch.equal(both, alone)


def erased_box(prob_u, top_u, left_u, area_u, ratio_u, misses=0):
    """Return the box (top, left, height, width) in 96 x 96 pixels, after `misses` failed tries."""
    tall = 0.5 - 0.5 * math.log(3) / math.log(0.3)  # three times as high as wide: 96 x 32
    u = torch.tensor([[prob_u, top_u, left_u, *[1 - 2 ** -24] * misses, *[area_u] * (10 - misses),
                       *[tall] * misses, *[ratio_u] * (10 - misses)]])
    out = random_erase(torch.full((1, 3, 96, 96), 2.0), u, torch.arange(1), 0, 0.25)
    changed = (out[0] != 2).any(0).nonzero()
    if len(changed) == 0:
        return None
    size = changed.amax(0) - changed.amin(0) + 1
    assert len(changed) == size.prod()                      # every pixel of the box is erased
    return (*changed.amin(0).tolist(), *size.tolist())


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
    positions, images = torch.arange(200), torch.full((200, 3, 32, 32), 2.0)    # 2: unlike noise
    out = random_erase(images, uniform(positions, ERASE_COLUMNS, 0, 1), positions, 0, 1.0)
    mask = (out != 2).any(1)
    for c in range(3):
        noise = (out[:, c][mask] - MEAN[c]) / STD[c]
        assert abs(noise.mean()) < 0.03 and abs(noise.std() - 1) < 0.03
        assert abs((noise.abs() < 1).float().mean() - 0.683) < 0.01
    a, b = out[:, 0][mask], out[:, 1][mask]
    for pair in ((a, b), (a[1:], a[:-1])):  # channels and neighbours are independent
        assert abs(torch.corrcoef(torch.stack(pair))[0, 1]) < 0.03


def test_an_image_is_mixed_with_its_predecessor():
    images, targets = torch.rand(6, 3, 16, 16), torch.eye(6)
    before, kinds = torch.get_rng_state(), set()
    for step in range(12):
        x, y = mix(images, targets, 3, step)
        assert torch.equal(x, mix(images, targets, 3, step)[0])
        share = y.diagonal()[0]                         # one share for the whole batch
        torch.testing.assert_close(y, share * targets + (1 - share) * targets.roll(1, 0))
        if cut := bool(((x == images) | (x == images.roll(1, 0))).all()):
            assert (x == images).float().mean() == pytest.approx(share)
        else:
            torch.testing.assert_close(x, share * images + (1 - share) * images.roll(1, 0))
        kinds.add(cut)
    assert kinds == {True, False} and torch.equal(before, torch.get_rng_state())
    assert not torch.equal(mix(images, targets, 3, 0)[1], mix(images, targets, 4, 0)[1])


def test_training_images_are_mirrored_by_flag():
    scenes = load_shapes("train", 64, 16)
    args = Namespace(batch_size=64, image_size=16, seed=0, repeats=1, pad=0, num_ops=0, erase=0,
                     mixup=0, cutmix=0, smoothing=0)
    (position, index), = batch_pairs(64, 64, 0, 1, 0)
    for args.flip in (True, False):
        device = torch.device("cpu")
        (images, _, _), = train_cls.train_batches(scenes, args, 0, 1, device, 0, 1)
        expected = augment_uint8(scenes.images[index], position, 0, flip=args.flip)
        assert torch.equal(images, expected / 255)
        assert torch.equal(expected, scenes.images[index]) != args.flip
