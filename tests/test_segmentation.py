"""Test images with a label for every pixel: transforms, random crops, and errors."""

from argparse import Namespace

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from data import masks
from common import InputError
from data.masks import (CAMVID_CLASSES, VIEW_COLUMNS, MaskRules, TrainingViews, ade20k,
                        finish_views, load_segmentation, own_folder, resize, scaled_size,
                        training_view)
from data.rng import VIEW, uniform
from data.shapes import render_scenes
from runs import make_pairs
from segmenter import SegmenterConfig


@pytest.fixture
def root(tmp_path):
    """Write training and validation images 0.png, 1.png, ... with blocks of 4 classes."""
    make_pairs(tmp_path / "pairs")
    return tmp_path / "pairs"


def test_labels_shift_and_unlabelled_pixels_are_ignored(root):
    shifted = ade20k(root, "training", 150).label_of[[0, 1, 2, 150, 255]]
    assert shifted.tolist() == [255, 0, 1, 149, 255]


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
    flags = Namespace(data="camvid", data_dir=root, num_classes=11)
    assert load_segmentation(flags, ["test"])[0].classes == CAMVID_CLASSES
    flags.data = "ade20k"                               # 11 other classes
    assert load_segmentation(flags, ["test"])[0].classes == [f"class {k}" for k in range(11)]
    (root / "classes.txt").write_bytes("a\r\nb\r\nc\r\nd\r\n".encode("utf-8-sig"))
    assert ade20k(root, "training").classes == ["a", "b", "c", "d"]
    with pytest.raises(InputError, match="--num_classes 5"):
        ade20k(root, "training", 5)


def test_wrong_annotations_are_named(root):
    path, label = root / "annotations" / "training" / "1.png", np.zeros((60, 40), np.uint8)
    for pixels, word in ((label[:50], "40 x 50"), (label.T, "60 x 40"), (label + 5, "the value 5"),
                         (np.dstack([label] * 3), "mode RGB"),
                         (label.astype(np.uint16), "mode I;16")):
        Image.fromarray(pixels).save(path)
        with pytest.raises(InputError, match=f"1.png.*{word}"):
            ade20k(root, "training", 4)[1]
    Image.fromarray(label).save(path, bits=4)               # Pillow multiplies values by 17
    with pytest.raises(InputError, match="mode L and 4 bits"):
        ade20k(root, "training", 4)[1]
    Image.fromarray(label + 255).save(path)  # 255 is ignored too
    assert (ade20k(root, "training", 4)[1][1] == 255).all()
    path.unlink()
    with pytest.raises(InputError, match="1.\\*"):
        ade20k(root, "training", 4)


# --- your own folder: an evaluation has the rules of the training ---------------------------------

RED_BLUE, BLUE_RED = ([0, 0, 0, 200, 40, 40, 40, 60, 210], [0, 0, 0, 40, 60, 210, 200, 40, 40])


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


def rules_of(root):
    return own_folder(root, ["train"])[0].rules


def test_an_evaluation_has_the_trainings_palette(tmp_path):
    rules = rules_of(make_masks(tmp_path / "train", [0, 1, 2], palette=RED_BLUE))
    classes = [f"value {k}" for k in range(3)]
    same = make_masks(tmp_path / "same", [0, 1, 2], palette=RED_BLUE)
    other = make_masks(tmp_path / "other", [0, 2, 1], palette=BLUE_RED)
    grey = make_masks(tmp_path / "grey", [0, 1, 2])
    assert len(own_folder(same, ["all"], classes, rules=rules)[0]) == 20
    for root in (other, grey):
        with pytest.raises(InputError, match="training masks and .*different palettes"):
            own_folder(root, ["all"], classes, rules=rules)
    assert rules_of(grey) == MaskRules("", None)


def test_an_evaluation_has_the_trainings_255(tmp_path):
    two = ["value 0", "value 1"]
    roots = {name: make_masks(tmp_path / name, values) for name, values in dict(
        plain=[0, 1], ignored=[0, 1, 255], binary=[0, 255], zero=[0]).items()}
    rules = {name: rules_of(roots[name]) for name in ("plain", "ignored", "binary")}
    assert [rules[name].label_of_255 for name in rules] == [None, 255, 1]

    def labels(root, rule):
        tree, = own_folder(roots[root], ["all"], two, rules=rules[rule])
        return tree[0][1].unique().tolist()
    assert labels("binary", "binary") == labels("plain", "binary") == [0, 1]
    assert labels("zero", "binary") == [0]
    assert labels("binary", "ignored") == [0, 255]      # not class 1, as the folder alone suggests
    assert labels("ignored", "plain") == [0, 1, 255]
    for root, rule, word in (("ignored", "binary", "in which 255 is class 1"),
                             ("binary", "plain", "without 255")):
        with pytest.raises(InputError, match=word):
            labels(root, rule)


def test_copies_of_training_images_are_not_held_out(tmp_path):
    """val/ and test/ contain copies of images in train/."""
    root = tmp_path / "mine"
    for part, images in dict(train=range(9), val=[1, 20, 2, 21], test=[3, 22]).items():
        make_masks(root, [0, 1], len(images), images=images, part=part)
    trees = own_folder(root, ["train", "val", "test"])
    pixels = [[int(image[0, 0, 0]) for image, _ in tree] for tree in trees]
    assert [sorted(part) for part in pixels] == [[*range(9)], [20, 21], [22]]
    assert len(own_folder(root, ["all"])[0]) == 2               # what training saw is not known
    copies = tmp_path / "copies"
    for part in ("train", "val", "test"):
        make_masks(copies, [0, 1], 5, part=part)
    with pytest.raises(InputError, match="'val' were used in training, or are copies"):
        own_folder(copies, ["train", "val"])


def test_data_sets_need_their_folder_and_classes(tmp_path):
    flags = Namespace(data="folder", data_dir=None, num_classes=None)
    for data in ("folder", "camvid", "ade20k"):
        flags.data = data
        with pytest.raises(InputError, match=f"--data {data} needs --data_dir"):
            load_segmentation(flags, ["test"])
    flags = Namespace(data="folder", data_dir=make_masks(tmp_path / "a", [0, 1]), num_classes=3)
    with pytest.raises(InputError, match="--num_classes 3: .* has 2 classes"):
        load_segmentation(flags, ["train"])
