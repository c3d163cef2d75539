"""Test images with a label for every pixel: transforms, crops, parts of your own masks, errors."""

import shutil
from argparse import Namespace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import ExifTags, Image

from data import masks
from common import InputError
from data.images import part_of
from data.masks import (CAMVID_CLASSES, VIEW_COLUMNS, TrainingViews, finish_views,
                        load_segmentation, own_masks, resize, scaled_size, training_view)
from data.rng import VIEW, uniform
from data.shapes import render_scenes
from runs import make_pairs
from segmenter import SegmenterConfig


def load(root, part="train", classes=None, data="folder", num_classes=0):
    args = Namespace(data=data, data_dir=str(root), num_classes=num_classes, num_workers=0)
    return load_segmentation([part], args, classes)[0]


@pytest.fixture
def root(tmp_path):
    """Write training and validation images 0.png, 1.png, ... with blocks of 4 classes."""
    make_pairs(tmp_path / "pairs")
    return tmp_path / "pairs"


def test_labels_shift_and_unlabelled_pixels_are_ignored(root):
    values = np.zeros((60, 40), np.uint8)
    values[0, :5] = [0, 1, 2, 150, 255]
    Image.fromarray(values).save(root / "annotations" / "training" / "1.png")
    label = load(root, data="ade20k", num_classes=150)[1][1]
    assert label[0, :5].tolist() == [255, 0, 1, 149, 255]


def test_sizes_follow_mmcvs_rule(monkeypatch):
    """The image is the largest one that fits into the box, with the same aspect ratio."""
    asked = []
    monkeypatch.setattr(masks, "resize", lambda image, size: asked.append(size) or
                        image.new_zeros(3, *size))
    for h, w in (360, 480), (480, 360), (300, 1200), (333, 517):
        for ratio in (0.5, 0.75, 1.0, 1.3, 2.0):
            long, short = int(4 * 256 * ratio), int(256 * ratio)
            scale = min(long / max(h, w), short / min(h, w))
            new = int(h * scale + 0.5), int(w * scale + 0.5)
            assert scaled_size(h, w, long, short) == new
            image, draw = torch.zeros(3, h, w).byte(), [ratio / 4] + [0.0] * (VIEW_COLUMNS - 1)
            training_view(image, image[0], draw, 256, (0.0, 4.0))
            assert asked.pop() == new


def test_resizing_agrees_with_opencv():
    images, _, labels = render_scenes(torch.arange(1), 480)
    image, label = images[0, :, :360], labels[0, :360].byte()
    theirs = cv2.resize(image.permute(1, 2, 0).numpy(), (272, 204))
    small = resize(image, (204, 272))
    assert (small.int() - torch.from_numpy(theirs).permute(2, 0, 1).int()).abs().max() <= 1
    draw = [204.5 / 204 - 1] + [0.0] * (VIEW_COLUMNS - 2) + [0.9]  # r: the box (819, 204); no flip
    view, found, h, w = training_view(image, label, draw, 204, scales=(1.0, 2.0))
    theirs = cv2.resize(label.numpy(), (272, 204), interpolation=cv2.INTER_NEAREST)
    assert (h, w) == (204, 204) and torch.equal(found, torch.from_numpy(theirs[:, :204]))
    assert torch.equal(view, small[:, :, :204])


def test_normalised_padding_is_exactly_zero():
    config = SegmenterConfig(num_classes=4)
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (config.mean, config.std))
    images = torch.full((1, 3, 40, 40), 120).byte()
    out = (finish_views(images, torch.tensor([30]), torch.tensor([20]), mean) - mean) / std
    torch.testing.assert_close(out[0, :, :30, :20], ((120 / 255 - mean) / std).expand(3, 30, 20))
    assert (out[0, :, 30:] == 0).all() and (out[0, :, :, 20:] == 0).all()


def test_dull_crops_are_drawn_again():
    label = torch.zeros(40, 160, dtype=torch.uint8)
    label[:20, 80:] = 1  # left of column 80: one class
    image = label.expand(3, -1, -1)
    dull, good = [0.0, 0.0], [0.0, 0.9]
    for redraw in (0, 1, 5, 10):
        draw = [0.0, *dull * redraw, *good * (11 - redraw), 0.9]
        assert len(training_view(image, label, draw, 40, (1, 1))[1].unique()) == 2
    late = [0.0, *dull * 10, *[0.0, 0.1], 0.9]  # the last one is not checked
    assert training_view(image, label, late, 40, (1, 1))[1].unique().tolist() == [0]


def test_a_view_follows_its_random_numbers():
    label = torch.arange(600).view(20, 30).remainder(7).to(torch.uint8)
    image = torch.stack([label * 30, label, label * 7])
    end = 1 - 2 ** -24
    # the last row and column too
    for top, left, y, x in ((0, 0, 0, 0), (end, end, 10, 20), (0.5, 0.25, 5, 5)):
        for coin in (0.49, 0.51):
            draw = [0.5, top, left, *[0.0] * 20, coin]
            out, crop, h, w = training_view(image, label, draw, 10, (1, 3))  # r = 2: not resized
            expected = label[y:y + 10, x:x + 10]
            assert (h, w) == (10, 10)
            assert torch.equal(crop, expected.flip(1) if coin < 0.5 else expected)
            assert torch.equal(out[1], crop)
    out, crop, h, w = training_view(image, label, [0.0] * 23 + [0.9], 40, (0.5, 1))    # not resized
    assert (h, w) == (20, 30) and torch.equal(out, F.pad(image, (0, 10, 0, 20)))
    assert torch.equal(crop, F.pad(label, (0, 10, 0, 20), value=255))
    views = TrainingViews([(image, label)] * 3, 16, (1.2, 1.3), seed=4, distorted=False)
    draw = uniform(torch.tensor([9]), VIEW_COLUMNS, 4, VIEW)[0].tolist()    # of sample 9
    *view, h, w = training_view(image, label, draw, 16, (1.2, 1.3))
    *found, place = views[9, 2]
    assert all(map(torch.equal, found, view)) and place == (h, w)


def test_distortion_follows_the_position_and_leaves_padding_alone():
    image, label = torch.full((3, 20, 30), 120).byte(), torch.zeros(20, 30).byte()
    image[0] = 200
    views, before = TrainingViews([(image, label)], 40, (0.5, 0.5)), torch.get_rng_state()
    plain, _, h, w = training_view(image, label, [0.0] * VIEW_COLUMNS, 40, (0.5, 0.5))
    found = torch.stack([views[position, 0][0] for position in range(64)])
    assert torch.equal(found[5], views[5, 0][0]) and torch.equal(before, torch.get_rng_state())
    assert not found[:, :, h:].any() and not found[:, :, :, w:].any()       # black until the end
    same = (found == plain).flatten(1).all(1).float().mean()
    assert 0 < same < 0.25 and len(found.unique(dim=0)) > 40        # all four are off in 1 of 16
    assert (found[..., 0, 0].float().mean(0) - plain[:, 0, 0]).abs().max() < 25


def test_class_names_come_from_the_folder(root):
    assert load(root, "test", data="camvid", num_classes=11).classes == CAMVID_CLASSES
    numbers = [f"class {k}" for k in range(11)]             # 11 other classes
    assert load(root, "test", data="ade20k", num_classes=11).classes == numbers
    (root / "classes.txt").write_bytes("a\r\nb\r\nc\r\nd\r\n".encode("utf-8-sig"))
    assert load(root, data="ade20k", num_classes=150).classes == ["a", "b", "c", "d"]


def test_wrong_masks_are_named_before_training(root):
    path = root / "annotations" / "training" / "1.png"
    label = np.zeros((60, 40), np.uint8)
    for pixels, word in ((label[:50], "40 x 50"), (label.T, "60 x 40"), (label + 5, "the value 5"),
                         (np.dstack([label] * 3), "mode RGB"),
                         (label.astype(np.uint16), "mode I;16")):
        Image.fromarray(pixels).save(path)
        with pytest.raises(InputError, match=f"1.png.*{word}"):
            load(root, data="ade20k", num_classes=4)
    Image.fromarray(label).save(path, bits=4)               # Pillow multiplies values by 17
    with pytest.raises(InputError, match="mode L and 4 bits"):
        load(root, data="ade20k", num_classes=4)
    Image.fromarray(label + 255).save(path)                 # 255 is ignored, too
    assert (load(root, data="ade20k", num_classes=4)[1][1] == 255).all()
    path.unlink()
    with pytest.raises(InputError, match="1.\\*; expected an image in images/training"):
        load(root, data="ade20k", num_classes=4)


# --- your own masks -------------------------------------------------------------------------------

RED_BLUE = [0, 0, 0, 200, 40, 40, 40, 60, 210]
BLUE_RED = [0, 0, 0, 40, 60, 210, 200, 40, 40]


def make_masks(root, values, n=20, palette=None, images=range(1000), part=""):
    """Write n pairs whose masks have these values; image i has the brightness images[i]."""
    for kind in ("images", "annotations"):
        (root / kind / part).mkdir(parents=True)
    for i in range(n):
        label = np.array(values, np.uint8).repeat(8)[None].repeat(16, 0)
        mask = Image.fromarray(label)
        if palette:
            mask = mask.convert("P")
            mask.putdata(label.flatten().tolist())
            mask.putpalette(palette)
        mask.save(root / "annotations" / part / f"{i:02}.png")
        pixels = np.full((*label.shape, 3), images[i], np.uint8)
        Image.fromarray(pixels).save(root / "images" / part / f"{i:02}.png")
    return root


def test_bytes_of_an_image_decide_its_part(tmp_path):
    """Masks and photos are divided by the same function; test_photos.py tests more of it."""
    parts = own_masks(make_masks(tmp_path / "a", [0, 1], n=60))
    assert sum(map(len, parts.values())) == 60
    for part, pairs in parts.items():
        assert pairs and {part_of(Path(image).read_bytes()) for image, _ in pairs} == {part}
        assert all(Path(image).stem == Path(mask).stem for image, mask in pairs)


def test_folders_are_parts_and_copies_count_once(tmp_path, capsys):
    """The numbers are the brightness of each image. Two test images are also in Training/."""
    root = tmp_path / "a"
    for part, images in dict(Training=range(9), validation=[1, 40, 41], test=[3, 50]).items():
        make_masks(root, [0, 1], len(images), images=images, part=part)
    assert {part: len(pairs) for part, pairs in own_masks(root).items()} == dict(test=2, val=3, train=7)
    said = capsys.readouterr().out
    assert f"passed over: 2 copies, the first: {root}/images/Training/01.png\n" in said


def test_masks_find_their_photos(tmp_path, capsys):
    root = make_masks(tmp_path / "a", [0, 1], n=6)
    for path in (root / "annotations").glob("*.png"):
        path.rename(path.with_suffix(".PNG"))               # as Windows writes them
    (root / "images" / "Extra").mkdir()
    for name in ("images/Extra/1.png", "annotations/00.tif", "images/.hidden"):
        (root / name).write_bytes(b"")
    assert sum(map(len, own_masks(root).values())) == 6
    said = capsys.readouterr().out
    assert f"passed over: 2 other files, the first: {root}/images/Extra/1.png\n" in said
    Image.new("L", (16, 16), 78).save(root / "annotations" / "alone.png")
    with pytest.raises(InputError, match=r"1 files have no partner.*alone\.\*"):
        own_masks(root)


@pytest.mark.parametrize("values, labels, classes", [
    ([0, 1], [0, 1], 2), ([0, 1, 255], [0, 1, 255], 2), ([0, 1, 2], [0, 1, 2], 3)])
def test_the_value_k_is_class_k(tmp_path, values, labels, classes):
    train = load(make_masks(tmp_path / "a", values))
    assert len(train.classes) == classes and train[0][1].unique().tolist() == labels


def test_values_that_are_no_classes_are_errors(tmp_path):
    for values, words in (([0, 255], r"the masks have the values \[0, 255\]"),
                          ([0, 0], r"the masks have the values \[0\]"),
                          ([0, 1, 3], "no mask has the value 2, but .*png has 3"),
                          ([0, 1, 2, 254], "no mask has the value 3, but .*png has 254")):
        root = make_masks(tmp_path / str(values), values)
        with pytest.raises(InputError, match=words):
            load(root)
    assert len(load(tmp_path / "[0, 1, 3]", num_classes=4).classes) == 4


def test_classes_txt_names_every_class(tmp_path, capsys):
    root = make_masks(tmp_path / "a", [0, 1, 2])
    write = (root / "classes.txt").write_text
    write("Boden\r\nW\u00fcrfel\r\nKreis", "utf-8-sig")
    assert load(root).classes == ["Boden", "W\u00fcrfel", "Kreis"]
    write("a\nb\nc\nd")
    assert load(root).classes == ["a", "b", "c", "d"]
    assert "no train image contains 1 of 4 classes: d" in capsys.readouterr().out
    write("a\nb")
    with pytest.raises(InputError, match="png has the value 2; expected the classes 0 to 1"):
        load(root)


def test_a_part_may_lack_classes_of_the_network(tmp_path):
    five = [f"class {k}" for k in range(5)]
    root = make_masks(tmp_path / "a", [0, 1], part="test")
    assert load(root, "test", five).classes == five
    with pytest.raises(InputError, match="the value 1; expected the classes 0 to 0"):
        load(root, "test", five[:1])


def test_palettes_must_agree_across_files(tmp_path):
    root = make_masks(tmp_path / "a", [0, 1, 2], palette=RED_BLUE)
    train = load(root)
    assert [colour for colour, _ in train.values.values()] == ["#000000", "#c82828", "#283cd2"]
    other = root / "annotations" / "04.png"
    for palette in (BLUE_RED, None):
        shutil.rmtree(tmp_path / "b", ignore_errors=True)
        make_masks(tmp_path / "b", [0, 1, 2], n=1, palette=palette)
        shutil.copy(tmp_path / "b" / "annotations" / "00.png", other)
        with pytest.raises(InputError, match="png have different palettes: the value [01] is #"):
            load(root)
    shutil.rmtree(tmp_path / "b")
    make_masks(tmp_path / "b", [0, 0, 0], n=1, palette=RED_BLUE[:3])    # colours that do not occur
    shutil.copy(tmp_path / "b" / "annotations" / "00.png", other)
    assert load(root).values == train.values


def test_masks_of_ade20ks_layout_have_one_palette(tmp_path, capsys):
    make_masks(tmp_path, [1, 2], palette=RED_BLUE, part="training")
    make_masks(tmp_path, [1, 2], palette=BLUE_RED, part="validation")
    (tmp_path / "images/training/00.jpg").write_bytes(b"a second image of one name")
    args = Namespace(data="ade20k", data_dir=str(tmp_path), num_classes=2, num_workers=0)
    assert load_segmentation(["train"], args)[0].classes == ["class 0", "class 1"]
    assert "passed over: 1 other files of training, the first: " in capsys.readouterr().out
    with pytest.raises(InputError, match="different palettes: the value 1"):
        load_segmentation(["train", "val"], args)
    for kind in ("images", "annotations"):
        shutil.rmtree(tmp_path / kind / "validation")
    make_masks(tmp_path, [0, 255], part="validation")               # every pixel is ignored
    with pytest.raises(InputError, match="no val image has a labelled pixel"):
        load_segmentation(["train", "val"], args)


def test_phone_photos_and_their_masks_are_upright(tmp_path):
    for kind in ("images", "annotations"):
        (tmp_path / kind / "train").mkdir(parents=True)
    upright = np.zeros((48, 32, 3), np.uint8)
    upright[:20, :16] = 255
    for orientation, turn in ((3, Image.ROTATE_180), (6, Image.ROTATE_90), (8, Image.ROTATE_270)):
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        lying = Image.fromarray(upright).transpose(turn)
        lying.save(tmp_path / f"images/train/{orientation}.jpg", exif=exif, quality=95)
        mask = Image.fromarray(upright[..., 0] // 255)
        mask.save(tmp_path / f"annotations/train/{orientation}.png")
    mask = lying.convert("L").point(lambda value: value // 255)         # like its photo
    mask.save(tmp_path / f"annotations/train/{orientation}.png", exif=exif)
    tree = load(tmp_path)
    assert len(tree) > 0
    for image, label in tree:
        assert image.shape[1:] == label.shape == (48, 32)
        assert (image[0].int() - 255 * label.int()).abs().max() < 30
        assert torch.equal(label.bool(), torch.from_numpy(upright[..., 0]).bool())
