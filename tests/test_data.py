"""Test random numbers, scenes, CIFAR-10, ImageNet's layout, and crops, which PIL repeats."""

import math
import pickle
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from common import InputError
from data import datasets, rng
from data.datasets import DATASETS, ImageFiles, data_crc, load_batches, load_part
from data.images import Split, read_image
from data.rng import DROPOUT, RANDOM_CROP, batch_pairs, seed_from, uniform
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


def test_parts_of_scenes_are_disjoint():
    """Their numbers are so far apart that no part reaches another one."""
    parts = [load_shapes(part, 200) for part in ("train", "val", "test")]
    assert len({image.numpy().tobytes() for part in parts for image in part.images}) == 600
    assert torch.equal(parts[0].images, render_scenes(torch.arange(200))[0])
    args = Namespace(data="shapes", num_images=40, image_size=16)
    sizes = [len(load_part(part, args, "cpu").labels) for part in ("train", "val", "test")]
    assert sizes == [40, 8, 8]


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


def test_own_data_sets_are_uint8(monkeypatch):
    """Floats in [0, 1] would be divided by 255."""
    class Floats(torch.utils.data.Dataset):
        def __getitem__(self, key):
            return torch.rand(3, 8, 8), 0, key[0]

    for found in (Split(torch.rand(2, 3, 8, 8), torch.arange(2), ["a", "b"]), Floats()):
        monkeypatch.setitem(DATASETS, "floats", lambda *args: found)
        with pytest.raises(InputError, match="--data floats loads images of torch.float32; expec"):
            load_part("train", Namespace(data="floats"), "cpu")


def test_the_checksum_follows_pixels_labels_and_names(tree_dir):
    scenes = load_shapes("test", 8)
    other = scenes.images.clone()
    other[7, 2, 31, 31] += 1
    trees = [tree(tree_dir, part) for part in ("train", "val", "val")]
    (tree_dir / "val/n01/n01_0.JPEG").rename(tree_dir / "val/n02/n01_0.JPEG")       # another label
    found = [scenes, scenes._replace(labels=scenes.labels.flip(0)), scenes._replace(images=other),
             *trees, tree(tree_dir, "val")]
    crcs = [data_crc(data) for data in found]
    assert crcs[4] == crcs[5] and len(set(crcs)) == 6
    tree_dir.rename(tree_dir.with_name("moved"))                    # as on another node
    moved = tree(tree_dir.with_name("moved"), "train")
    assert data_crc(moved) == crcs[3]
    Path(moved.samples[0][0]).rename(f"{tree_dir.with_name('moved')}/train/n01/caf\udce9.JPEG")
    assert data_crc(tree(tree_dir.with_name("moved"), "train")) != crcs[3]      # no UTF-8


def test_cifar_is_loaded_as_published(tmp_path):
    """All training images are trained on; the test images choose nothing, and are reported."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    rng, expected = np.random.default_rng(0), {}
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        pixels = rng.integers(0, 256, (4, 3072), dtype=np.uint8)
        expected.setdefault(name[:4], []).append(pixels)
        (folder / name).write_bytes(pickle.dumps(dict(data=pixels, labels=[0, 9, 1, 2])))
    (folder / "batches.meta").write_bytes(pickle.dumps(dict(label_names=list("abcdefghij"))))
    args = Namespace(data="cifar10", data_dir=tmp_path, download=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.CIFAR10, "_check_integrity", lambda self: True)
        patch.setattr("torchvision.datasets.cifar.check_integrity", lambda *words: True)
        train, val, test = (load_part(part, args, "cpu") for part in ("train", "val", "test"))
    images = np.concatenate(expected["data"]).reshape(-1, 3, 32, 32)
    assert torch.equal(train.images, torch.from_numpy(images)) and len(train.labels) == 20
    assert torch.equal(val.images, test.images) and len(test.labels) == 4
    assert train.labels[:4].tolist() == [0, 9, 1, 2] and train.classes == list("abcdefghij")


# --- ImageNet's layout ----------------------------------------------------------------------------

def tree(folder, part, size=24, **how):
    return ImageFiles(f"{folder}/{part}", Namespace(image_size=size, num_workers=0), **how)


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
        val = tree(tree_dir, "val", size)
        for i in range(6):
            image, label, position = val[i, i]
            assert image.dtype == torch.uint8 and image.shape == (3, size, size)
            assert (position, label) == (i, i // 2)
            reference = pil_eval_crop(Image.open(val.samples[i][0]).convert("RGB"), size)
            assert (image.int() - reference.int()).abs().max() <= 2


def test_training_crop_equals_torchvisions(tree_dir):
    """DeiT's random crop of the PIL image. A tensor is resized within a few grey levels of it."""
    train = tree(tree_dir, "train", 40, seed=5)
    for position in range(12):
        image, label, same = train[position, position]
        source = Image.open(train.samples[position][0]).convert("RGB")
        torch.manual_seed(seed_from(5, RANDOM_CROP, position))
        crop = v2.RandomResizedCrop(40, interpolation=v2.InterpolationMode.BICUBIC)
        difference = (image.int() - tensor(crop(source)).int()).abs()
        assert (same, label) == (position, position // 4)
        assert difference.float().mean() < 0.3 and difference.max() <= 8


def test_crops_depend_on_the_position_only(tree_dir):
    train = tree(tree_dir, "train", seed=1)
    keys = torch.tensor([(100 + i, i % len(train)) for i in range(24)])
    whole = torch.stack([train[key.tolist()][0] for key in keys])
    for size, train.num_workers in ((4, 0), (6, 2)):
        pairs = [part.unbind(1) for part in keys.split(size)]
        images, labels, positions = (torch.cat(t) for t in zip(*load_batches(train, pairs, "cpu")))
        assert torch.equal(images, whole) and torch.equal(positions, keys[:, 0])
        assert torch.equal(labels, train.labels[keys[:, 1]])
    assert not torch.equal(train[100, 0][0], train[101, 0][0])
    assert not torch.equal(train[100, 0][0], tree(tree_dir, "train", seed=2)[100, 0][0])


def test_labels_follow_the_training_classes(tree_dir):
    classes = tree(tree_dir, "train").classes
    assert classes == ["n01", "n02", "n03"]
    assert tree(tree_dir, "val", classes=classes[::-1])[0, 0][1] == 2
    some = tree(tree_dir, "val", classes=["n00", *classes])         # val/ may lack classes
    assert some.labels.tolist() == [1, 1, 2, 2, 3, 3]
    (tree_dir / "val" / "n03").rename(tree_dir / "val" / "images")  # as in TinyImageNet
    with pytest.raises(InputError, match=r"val has the folders \['images'\], which are not class names"):
        tree(tree_dir, "val", classes=classes)
    with pytest.raises(InputError, match="there is no folder .*/test; --corrupted_dir selects it"):
        tree(tree_dir, "test", flag="corrupted_dir")


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
        tree(tree_dir, "train", seed=0)[0, 5]


# --- random numbers -------------------------------------------------------------------------------

def test_numbers_are_uniform_and_independent():
    """Every bound is five standard deviations."""
    index = torch.arange(20_000)
    u = uniform(index, 12, 3, 1)
    assert u.dtype == torch.float32 and u.shape == (20_000, 12) and u.min() >= 0 and u.max() < 1
    assert torch.equal(u * 2 ** 24, (u * 2 ** 24).round())
    n = u.numel()
    assert abs(u.double().mean() - 1 / 2) < 5 / math.sqrt(12 * n)
    counts = (u.flatten() * 256).long().bincount(minlength=256)
    # chi-squared test
    assert abs(((counts - n / 256) ** 2 / (n / 256)).sum().item() - 255) < 5 * math.sqrt(2 * 255)

    # swapping seed and purpose gives other numbers
    keys = [uniform(index, 3, seed, purpose) for seed in (0, 1, 2) for purpose in (0, 1, 2, 20)]
    ends = torch.cat([torch.arange(2000), torch.arange(2 ** 31 - 2000, 2 ** 31),
                      torch.arange(2 ** 30, 2 ** 30 + 2000)])
    ends = uniform(ends, 4, 2 ** 31 - 1, 2 ** 31 - 1)
    assert ends.min() >= 0 and ends.max() < 1 and len(ends[:, 0].unique()) > 0.999 * len(ends)
    for columns in (u, torch.cat([u[:-1], u[1:]], 1), torch.cat(keys, 1), ends):
        correlations = torch.corrcoef(columns.double().T).fill_diagonal_(0)
        assert correlations.abs().max() < 5 / math.sqrt(len(columns))


def test_numbers_do_not_change_between_versions():
    """A stopped run can only resume with newer code if these numbers do not change."""
    got = (uniform(torch.tensor([0, 1, 2 ** 31 - 1]), 2, 0, 10) * 2 ** 24).long().tolist()
    assert got == [[7081562, 14558248], [100576, 14437633], [1565904, 1843712]]


def test_the_last_32_bits_of_a_seed_count():
    index = torch.arange(20)
    seeds = (0, 1, 2 ** 31 - 1, 2 ** 31, 2 ** 32 - 1)
    numbers = [uniform(index, 1, seed, 10) for seed in seeds]
    assert len(torch.cat(numbers).unique()) == 20 * len(seeds)
    assert all(torch.equal(uniform(index, 1, seed + 2 ** 32, 10), u)
               for seed, u in zip(seeds, numbers))


def test_purposes_are_pinned_and_distinct():
    """PATCH_PLACES and TEXT_WINDOW share a number, because no sample uses both."""
    purposes = {name: value for name, value in vars(rng).items()
                if name.isupper() and not name.startswith("HASH_")}
    assert purposes == dict(
        SCENE=10, SCENE_NOISE=11, RANDOM_CROP=12, SHIFT=20, FLIP=21, RAND_AUGMENT=22, ERASE=23,
        ERASE_NOISE=24, MIX=25, VIEW=30, DISTORT=31, START=40, SIGNS=41, NOISE=42, APGD=43,
        SQUARE=44, FROST_NOISE=50, CORRUPTION=51, TEXT_WINDOW=70, PATCH_PLACES=70, PATCH_VALUES=71, DROPOUT=80,
        ADVERSARIAL=90)
    every = [*purposes.values(), *(rng.CORRUPTION + i for i in range(1, 15))]
    assert len({*every}) == len(every) - 1


def test_seeds_of_steps_are_pinned_and_distinct():
    """A resumed run needs the same seeds in every version of Python."""
    assert seed_from(0, DROPOUT, 1, 2) == 44090609972116
    assert seed_from(0, DROPOUT, np.int64(1), torch.tensor(2)) == 44090609972116
    seeds = {seed_from(seed, DROPOUT, step, rank) for seed in (0, 1, 2 ** 31 - 1)
             for step in range(25) for rank in range(4)}
    assert len(seeds) == 300 and 0 <= min(seeds) and max(seeds) < 2 ** 48


def test_processes_share_whole_batches():
    """11 images make two batches of 4 per epoch. A resumed run continues in an epoch."""
    whole = [torch.stack(pair, 1) for pair in batch_pairs(11, 4, 0, 6, seed=1)]
    assert torch.cat(whole)[:, 0].tolist() == list(range(24))                   # positions
    first, second = (torch.cat(whole[i:i + 2])[:, 1] for i in (0, 2))
    assert len(first.unique()) == len(second.unique()) == 8 and not torch.equal(first, second)
    parts = [[torch.stack(pair, 1) for pair in batch_pairs(11, 4, 3, 6, 1, rank, 2)]
             for rank in (0, 1)]
    assert all(torch.equal(torch.cat(both), batch) for *both, batch in zip(*parts, whole[3:]))
    (_, index), = batch_pairs(20, 6, 0, 1, 1, repeats=3)
    assert len(index.unique()) == 2 and torch.equal(index[:2], index[2:4])      # ABABAB
