"""Test scenes, CIFAR-10, ImageNet's layout and broken files; compare crops with PIL."""

import os
import sys
from argparse import Namespace

import numpy as np
import pytest
import torch
from PIL import Image

import common
from common import InputError
from data import images as data
from data.datasets import DATASETS, DataSource, load_data, load_part
from data.images import (ImageTree, Split, central_square, fingerprint, image_batches,
                         read_image)
from data.rng import RANDOM_CROP, uniform
from data.shapes import load_shapes, render_scenes


def photo(width, height, seed=0, mode="RGB"):
    """Make a smooth random PIL image with some edges."""
    rng = np.random.default_rng(seed)
    image = Image.fromarray(rng.integers(0, 256, (6, 7, 3), dtype=np.uint8))
    image = image.resize((width, height), Image.BICUBIC)
    image.paste((250, 10, 30), (width // 3, height // 3, width // 2, height // 2))
    return image.convert(mode)


def tensor(image):
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


@pytest.fixture
def tree_dir(tmp_path):
    for split, n in (("train", 4), ("val", 2)):
        for c, name in enumerate(["n01", "n02", "n03"]):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for i in range(n):
                image = photo(90 + 17 * i, 70 + 9 * c, seed=10 * c + i)
                image.save(folder / f"{name}_{i}.JPEG", quality=95)
            (folder / "readme.txt").write_text("not an image")
    return tmp_path


def test_scenes_do_not_depend_on_their_batch():
    index = torch.arange(40)
    images, labels, masks = render_scenes(index, 32, seed=3)
    order = torch.randperm(40)
    for part in (order[:1], order[1:8], order[8:]):
        for whole, piece in zip((images, labels, masks), render_scenes(index[part], 32, seed=3)):
            assert torch.equal(whole[part], piece)
    assert not torch.equal(images, render_scenes(index, 32, seed=4)[0])


def test_splits_of_scenes_are_disjoint():
    parts = [load_shapes(split, 200) for split in ("train", "test")]
    assert len({image.numpy().tobytes() for part in parts for image in part.images}) == 400
    assert torch.equal(parts[0].images, render_scenes(torch.arange(200))[0])


def test_scenes_do_not_change_between_versions():
    """Numbers are pinned up to rounding, because trained networks and results depend on them."""
    images, labels, masks = render_scenes(torch.arange(40))
    assert labels[:12].tolist() == [4, 0, 7, 6, 7, 8, 0, 0, 4, 8, 7, 5]
    mean, spread = images.double().mean((2, 3)), images.double().std((2, 3)).mean(0)
    expected = torch.tensor([[77.907, 97.807, 99.404], [48.092, 73.360, 69.253],
                             [59.156, 77.601, 64.182]])
    torch.testing.assert_close(mean[:3], expected.double(), rtol=0, atol=0.05)
    torch.testing.assert_close(spread, torch.tensor([55.737, 58.797, 47.214]).double(), rtol=0,
                               atol=0.05)
    # number of pixels of the background and of each class
    pixels = [31102, 941, 1446, 428, 914, 1136, 1010, 545, 1671, 1025, 742]
    assert (masks.flatten().bincount() - torch.tensor(pixels)).abs().max() < 10


def test_holdout_holds_scenes_out():
    args = Namespace(data="shapes", data_dir=None, num_images=40, image_size=16)
    for args.holdout, counts in ((0, [40, 8]), (39, [1, 39]), (5, [35, 5])):
        assert [len(split.labels) for split in load_data(args, "cpu")] == counts


def test_holdout_has_no_copies_of_training_images(monkeypatch):
    """Twenty different images, each four times, with 0 to 255 in memory."""
    different = load_shapes("train", 20, 16)

    def copies(part, args):
        index = torch.arange(80) % 20
        return Split(different.images[index], different.labels[index], different.classes)

    monkeypatch.setitem(DATASETS, "copies", DataSource(copies, {}))
    args = Namespace(data="copies", data_dir=None, holdout=60)
    train, val = load_data(args, "cpu")
    hashes = [{image.numpy().tobytes() for image in part.images} for part in (train, val)]
    assert len(train.labels) == 20 and 0 < len(val.labels) < 60
    assert not hashes[0] & hashes[1]
    args.holdout = 1
    with pytest.raises(InputError, match="--holdout 1: all held-out images are copies"):
        load_data(args, "cpu")


def test_own_data_sets_are_uint8(monkeypatch):
    """Floats in [0, 1] would be divided by 255."""
    class Floats(torch.utils.data.Dataset):
        labels, classes, hashes, files = torch.arange(2), ["a", "b"], [], []

        def __getitem__(self, key):
            return torch.rand(3, 8, 8), 0, key[0]

    def split(part, args):
        return Split(torch.rand(2, 3, 8, 8), torch.arange(2), ["a", "b"])

    def dataset(part, args):
        return Floats()

    for load in (split, dataset):
        monkeypatch.setitem(DATASETS, "floats", DataSource(load, {}))
        with pytest.raises(InputError, match="--data floats loads images of torch.float32; expec"):
            load_part("train", dict(data="floats"), "cpu")


def test_a_tree_stores_class_and_name_apart(tree_dir):
    """An array of whole paths would need many times as much memory."""
    deep = tree_dir / ("folder" * 20)
    deep.mkdir()
    (tree_dir / "val").rename(deep / "val")
    tree = ImageTree(deep, "val", size=24)
    assert tree.names.nbytes <= len("n01_0.JPEG") * len(tree)
    assert tree.files == sorted(map(str, (deep / "val").rglob("*.JPEG")))
    assert tree.path(3) == tree.files[3]
    assert tree.sizes.tolist() == [os.path.getsize(path) for path in tree.files]


def test_a_fingerprint_uses_the_sizes_of_the_listing(tree_dir, monkeypatch):
    tree = ImageTree(tree_dir, "train")
    before = fingerprint(tree)
    monkeypatch.delattr(os.path, "getsize")
    assert fingerprint(tree) == before
    tree.sizes[3] += 1
    assert fingerprint(tree) != before


def test_workers_are_forked_on_linux(tree_dir, monkeypatch):
    tree = ImageTree(tree_dir, "val")
    monkeypatch.setattr(sys, "platform", "linux")
    assert image_batches(tree, [], 2).multiprocessing_context.get_start_method() == "fork"
    assert image_batches(tree, [], 0).multiprocessing_context is None
    monkeypatch.setattr(sys, "platform", "darwin")
    assert image_batches(tree, [], 2).multiprocessing_context is None


def test_copies_to_a_gpu_use_pinned_memory(monkeypatch):
    """From other memory the CPU waits for copies above 64 kB. Tensors on the GPU are not pinned."""
    calls = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: calls.append("pinned") or x)
    monkeypatch.setattr(torch.Tensor, "to", lambda x, *device, **how: calls.append(device) or x)
    assert data.send([1, 2], "cpu").tolist() == [1, 2] and calls == [("cpu",)]
    calls.clear()
    assert data.send(torch.tensor([1, 2]), "cuda").tolist() == [1, 2]
    assert calls == ["pinned", ("cuda",)]
    calls.clear()
    data.send(torch.empty(2, device="meta"), "cuda")
    assert calls == [("cuda",)]


def test_workers_are_the_allowed_cores(monkeypatch):
    """Containers and SLURM allow fewer cores than the machine has."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 5, 7}, raising=False)
    assert common.default_workers() == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    assert common.default_workers() == 10
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert common.default_workers() == 6


def test_fingerprints_follow_pixels_labels_and_classes(tree_dir):
    scenes = load_shapes("test", 8)
    swapped = scenes._replace(labels=scenes.labels.flip(0))
    named = scenes._replace(classes=scenes.classes[::-1])
    other = load_shapes("test", 9)
    found = [fingerprint(x) for x in (scenes, load_shapes("test", 8), swapped, named, other)]
    assert found[0] == found[1] and len({*found}) == 4
    before = fingerprint(ImageTree(tree_dir, "val"))
    assert before == fingerprint(ImageTree(tree_dir, "val"))
    path = tree_dir / "val" / "n01" / "n01_0.JPEG"
    data = path.read_bytes()
    path.write_bytes(data[::-1])                                    # as many bytes
    assert fingerprint(ImageTree(tree_dir, "val")) != before
    path.write_bytes(data)
    assert fingerprint(ImageTree(tree_dir, "val")) == before
    path.rename(tree_dir / "val" / "n02" / "n01_0.JPEG")            # another label
    assert fingerprint(ImageTree(tree_dir, "val")) != before


def test_cifar_folders_are_loaded(tmp_path):
    flags, pictures = dict(data="cifar10", data_dir=tmp_path, image_size=32), {}
    for i, path in enumerate(("train/cat", "train/dog", "val/cat", "val/dog")):
        (tmp_path / path).mkdir(parents=True)
        pictures[path] = photo(32, 32, seed=i)
        pictures[path].save(tmp_path / path / "0.png")
    for split, part in (("train", "train"), ("test", "val")):
        loaded = load_part(split, flags, "cpu")
        expected = torch.stack([tensor(pictures[f"{part}/{name}"]) for name in ("cat", "dog")])
        assert torch.equal(loaded.images, expected) and loaded.labels.tolist() == [0, 1]


def test_cifar_needs_a_folder():
    with pytest.raises(InputError, match="--data cifar10 needs --data_dir"):
        load_part("train", dict(data="cifar10", data_dir=None, image_size=32), "cpu")


def pil_eval_crop(image, size):
    """Resize the short side and crop the centre with PIL."""
    short = int(size / 0.875)
    width, height = image.size
    wide = max(short, int(short * width / height))
    high = max(short, int(short * height / width))
    image = image.resize((wide, high), Image.BICUBIC)
    left, top = round((wide - size) / 2), round((high - size) / 2)
    return tensor(image.crop((left, top, left + size, top + size)))


def test_evaluation_crop_equals_pils(tree_dir):
    for size in (32, 96):
        tree = data.ImageTree(tree_dir, "val", size=size)
        for i in range(6):
            image, label, position = tree[i, i]
            assert image.dtype == torch.uint8 and image.shape == (3, size, size)
            assert (position, label) == (i, i // 2)
            reference = pil_eval_crop(Image.open(tree.files[i]).convert("RGB"), tree.size)
            assert (image.int() - reference.int()).abs().max() <= 2


def test_training_crop_equals_pils(tree_dir):
    tree = data.ImageTree(tree_dir, "train", size=40, train=True, seed=5)
    for position in range(12):
        image, label, same = tree[position, position % len(tree)]
        source = Image.open(tree.files[position % len(tree)]).convert("RGB")
        draw = uniform(torch.tensor([position]), 22, 5, RANDOM_CROP)[0].tolist()
        left, top, width, height = data.random_crop_box(*source.size, draw)
        reference = source.crop((left, top, left + width, top + height))
        reference = reference.resize((40, 40), Image.BICUBIC)
        difference = (image.int() - tensor(reference).int()).abs()
        assert same == position and difference.float().mean() < 0.3 and difference.max() <= 8


def test_random_crop_follows_its_numbers():
    draw = [0.0] * 22
    draw[0], draw[10] = (0.25 - 0.08) / 0.92, 0.5                # a quarter of the image, square
    end = 1 - 2 ** -24
    for u, v, left, top in ((0, 0, 0, 0), (end, 0, 50, 0), (0.5, end, 25, 50)):
        draw[20:] = u, v
        assert data.random_crop_box(100, 100, draw) == (left, top, 50, 50)
    quarter = draw[0]
    for share, ratio, box in ((quarter, 1.0, (58, 43)), (quarter, 0.0, (43, 58)),
                              (0, 0.5, (28, 28)), (1, 0.5, (100, 100))):
        draw[0], draw[10] = share, ratio  # 4 : 3 and 3 : 4, log-uniform; areas of 8 to 100 %
        assert data.random_crop_box(100, 100, draw)[2:] == box
    draw[:2], draw[10:12] = (1.0, 0.0), (1.0, 0.5)  # the first does not fit, the second does
    assert data.random_crop_box(100, 100, draw)[2:] == (28, 28)
    # no box fits: a central crop of ratio 4/3
    assert data.random_crop_box(1000, 20, draw) == (486, 0, 27, 20)


def test_long_strip_needs_little_memory():
    """A resized image of 30000 x 1 pixels would need gigabytes."""
    strip = torch.arange(30000).remainder(256).byte().expand(3, 1, -1)
    for image in (strip, strip.mT):
        assert torch.equal(central_square(image, 32).unique(), central_square(strip, 32).unique())
        assert central_square(image, 224, 0.875).shape == (3, 224, 224)


def test_crops_depend_on_the_position_only(tree_dir):
    tree = data.ImageTree(tree_dir, "train", size=24, train=True, seed=1)
    keys = [(100 + i, i % len(tree)) for i in range(24)]
    one = [tree[key] for key in keys]
    whole = torch.stack([image for image, _, _ in one])
    for size, workers in ((4, 0), (6, 2)):
        lists = [part.unbind(1) for part in torch.tensor(keys).split(size)]
        loader = image_batches(tree, lists, workers)
        images, labels, positions = (torch.cat(t) for t in zip(*loader))
        assert torch.equal(images, whole)
        assert labels.tolist() == [label for _, label, _ in one]
        assert positions.tolist() == [p for p, _ in keys]
    assert not torch.equal(tree[100, 0][0], tree[101, 0][0])
    other = data.ImageTree(tree_dir, "train", size=24, train=True, seed=2)
    assert not torch.equal(tree[100, 0][0], other[100, 0][0])


def test_labels_follow_the_training_classes(tree_dir):
    def val(split="val", **how):
        return data.ImageTree(tree_dir, split, **how)
    classes = val("train").classes
    assert classes == ["n01", "n02", "n03"] and val(classes=["n03", "n02", "n01"])[0, 0][1] == 0
    assert val(classes=["n00"] + classes, subset=True).labels.tolist() == [1, 1, 2, 2, 3, 3]
    with pytest.raises(InputError, match="there is no --data_dir; expected .* contains val/"):
        data.ImageTree(None, "val")
    for how, words in ((dict(classes=["n01", "n02"]), "n03"),
                       (dict(classes=classes + ["n04"]), "n04"),
                       (dict(split="test"), f"{tree_dir}/test")):
        with pytest.raises(InputError, match=words):
            val(**how)
    (tree_dir / "val" / "n03").rename(tree_dir / "val" / "n04")
    flags = Namespace(data="imagenet", data_dir=tree_dir, image_size=24, seed=0, holdout=0)
    with pytest.raises(InputError, match="differ.*n03.*n04"):
        load_data(flags, "cpu")


def test_every_colour_mode_becomes_rgb(tmp_path):
    for mode, kind in (("L", "JPEG"), ("CMYK", "JPEG"), ("LA", "PNG"), ("P", "PNG"),
                       ("RGBA", "PNG"), ("1", "PNG")):
        photo(50, 40, mode=mode).save(tmp_path / "x", kind)
        image, reference = read_image(tmp_path / "x"), tensor(Image.open(tmp_path / "x"))
        assert image.dtype == torch.uint8
        assert (image.int() - reference.int()).abs().max() <= 1, (mode, kind)
    Image.fromarray(np.full((4, 4), 300, np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(InputError, match="deep.png: more than 8 bits"):     # Pillow: white
        read_image(tmp_path / "deep.png")


@pytest.mark.parametrize("kept", [0, 400])
def test_bad_files_are_named(tree_dir, kept):
    path = tree_dir / "train" / "n02" / "n02_1.JPEG"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(InputError, match=str(path)):
        data.ImageTree(tree_dir, "train", size=24, train=True)[0, 5]


def test_error_without_a_message_is_named(tmp_path, monkeypatch):
    def fail(path):
        raise EOFError

    (tmp_path / "a.png").write_bytes(b"png")
    monkeypatch.setattr(data.Image, "open", fail)
    with pytest.raises(InputError, match="a.png: EOFError$"):
        read_image(tmp_path / "a.png")
