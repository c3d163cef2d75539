"""Test your own photos: which files are found, their parts, and what a training prints of them."""

import os
import re
import shutil
from argparse import Namespace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageOps

import common
import eval_robust
import train_cls
from data.datasets import load_part
from data.images import own_photos, part_of, read_image
from fixtures import ROOT
from runs import call, refused

CLASSES = ["cat", "dog", "owl"]
main = partial(call, train_cls.main, "--image_size 32 --device cpu")


@pytest.fixture(autouse=True)
def an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def make(root, count, side=40, classes=CLASSES):
    """Write `count` images per class, root/<class>/<i>.png, with `side` pixels or more."""
    rng = np.random.default_rng(len(str(root)))
    for name in classes:
        Path(root, name).mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(0, 256, (side + i % 3, side + 5, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(Path(root, name, f"{i}.png"))


def load(root, part, size=32, **args):
    args = Namespace(data="folder", data_dir=root, image_size=size, **args)
    return load_part(part, args, "cpu")


def parts_of(root):
    """Return {part: contents of its files}."""
    parts, _ = own_photos(root)
    return {part: {path.read_bytes() for path in paths} for part, paths in parts.items()}


def sizes(root):
    """Return the numbers of test, val and train photos."""
    return [len(paths) for paths in own_photos(root)[0].values()]


# --- parts ----------------------------------------------------------------------------------------

def test_the_bytes_decide_the_part():
    make("photos", 100)
    before = parts_of("photos")
    assert 15 < len(before["test"]) < 45 and 15 < len(before["val"]) < 45
    for path in sorted(Path("photos/cat").iterdir()):
        path.rename(path.with_stem(f"{path.stem}_v2"))
    assert parts_of("photos") == before
    shutil.rmtree("photos/owl")                             # other photos stay where they are
    Path("photos").rename("elsewhere")
    shutil.copytree("elsewhere/dog", "elsewhere/wolf")
    fewer = parts_of("elsewhere")
    assert all(fewer[part] < before[part] for part in before)
    assert sum(map(len, fewer.values())) == 200


def test_a_rating_does_not_change_the_part():
    """A photo manager writes into the head of a JPEG, and the pixels stay."""
    rng = np.random.default_rng(0)
    parts = set()
    for i in range(60):
        pixels = Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8))
        pixels.save("a.jpg", quality=90, progressive=i % 2)
        data = Path("a.jpg").read_bytes()
        rating = b"http://ns.adobe.com/xap/1.0/\0<xmp:Rating>5</xmp:Rating>" + bytes([i])
        rated = data[:2] + b"\xff\xe1" + (len(rating) + 2).to_bytes(2, "big") + rating + data[2:]
        Path("a.jpg").write_bytes(rated)
        assert part_of(rated) == part_of(data) and read_image("a.jpg").shape == (3, 16, 16)
        parts.add(part_of(data))
    assert len(parts) == 3


def test_folders_of_parts_are_taken_as_they_are():
    make("a/train", 30)
    test, val, train = sizes("a")                           # no other part: two tenths are held out
    assert test + val + train == 90 and test and val
    make("a/val", 3)
    assert sizes("a") == [9, 9, 90] and own_photos("a")[0]["test"] == own_photos("a")[0]["val"]
    make("a/test", 4)
    assert sizes("a") == [12, 9, 90]
    shutil.rmtree("a/val")
    assert sizes("a") == [12, val, 90 - val]
    make("b", 30)
    make("b/test", 2)                                       # classes beside test/
    assert sizes("b")[0] == 6 and sizes("b")[1] > 0 and sum(sizes("b")) == 96
    make("new/test", 2)                                     # photos to test only
    assert sizes("new") == [6, 0, 0]


def test_a_class_may_be_named_like_a_part():
    """A folder is a part if it has class folders."""
    make("split/train", 20, classes=["train", "bus"])
    make("whole", 20, classes=["test", "bus"])
    for folder in ("split", "whole"):
        parts, passed = own_photos(folder)
        assert sum(map(len, parts.values())) == 40 and not passed
        assert len({path.parent.name for path in parts["train"]}) == 2


def test_equal_photos_count_once(capsys):
    """Copies with another name, in another class, and of test photos in the training."""
    make("photos", 30)
    before = parts_of("photos")
    for path in sorted(Path("photos/cat").iterdir()):
        shutil.copy(path, path.with_stem(f"{path.stem} - Copy"))
    for path in sorted(Path("photos/cat").iterdir())[:5]:
        shutil.copy(path, Path("photos/owl", f"cat_{path.name}"))
    assert parts_of("photos") == before and sum(sizes("photos")) == 90
    load("photos", "train")
    assert "5 copies of photos of another class, the first: photos/owl/cat" in capsys.readouterr().out
    make("split/train", 30)
    shutil.copytree("split/train/cat", "split/test/cat")
    assert sizes("split")[0] == 30 and sizes("split")[1] + sizes("split")[2] == 60
    load("split", "train")
    assert "30 copies, the first: split/train/cat/0.png" in capsys.readouterr().out


def test_nothing_is_left_out_without_a_word(capsys):
    make("photos", 20)
    make("photos/cat", 2, classes=["indoor"])
    Path("photos/.ipynb_checkpoints").mkdir()
    for name in ("cat/a.heic", "cat/b.jfif", "notes.txt", "cat/._0.png"):
        Path("photos", name).write_bytes(b"x")
    load("photos", "train")
    out = capsys.readouterr().out
    for line in ("3 files that end in none of .jpeg .jpg .png .webp, the first: photos/cat/a.heic",
                 "2 photos in other folders, the first: photos/cat/indoor/0.png"):
        assert f"passed over: {line}\n" in out
    assert out.count("passed over") == 2                    # hidden files are not mentioned
    make("split/train", 20)
    make("split/Testing", 2)
    load("split", "train")
    assert "6 photos in other folders, the first: split/Testing/cat/0.png" in capsys.readouterr().out


@pytest.mark.parametrize("link", ["photos/yak", "photos/test", "photos/cat/9.png"])
def test_a_link_that_leads_nowhere_is_an_error(link):
    make("photos", 2)
    os.symlink(os.path.abspath("not_mounted"), link)
    assert f"error: {link} is a link that leads nowhere" in refused(train_cls, "--data_dir photos")
    Path("not_mounted").mkdir()
    own_photos("photos")


# --- files ----------------------------------------------------------------------------------------

def test_unreadable_files_are_counted_with_a_reason(capsys):
    make("photos", 20)
    for i in range(20):
        Image.fromarray(np.full((9, 9), 300 + i, np.uint16)).save(f"photos/owl/{i}.png")
    train = load("photos", "train")
    assert len(train.labels.unique()) == 2 and train.classes == CLASSES
    out = capsys.readouterr().out
    n, = re.findall(r"train: (\d+) files are passed over: cannot read photos/owl/\d+.png: more than "
                    "8 bits per channel", out)
    assert int(n) == sum(path.parent.name == "owl" for path in own_photos("photos")[0]["train"])
    assert "train: no photo of owl" in out
    shutil.rmtree("photos/cat"), shutil.rmtree("photos/dog")
    assert "has photos of the classes ['owl'], expected two or more" in refused(
        train_cls, "--data_dir photos")


@pytest.mark.parametrize("first", ["EXIF", "XMP", "XMP alone"])
def test_photos_are_as_upright_as_pillow_shows_them(first):
    """All orientations of a camera, also where other data come before them, as from a Pixel."""
    picture = np.zeros((24, 40, 3), np.uint8)
    picture[:8, :20] = 255
    for orientation in range(1, 9):
        exif = Image.Exif()
        if first != "XMP alone":
            exif[ExifTags.Base.Orientation] = orientation
        Image.fromarray(picture).save("a.jpg", exif=exif, quality=95)
        data = Path("a.jpg").read_bytes()
        if first != "EXIF":
            xmp = (b"http://ns.adobe.com/xap/1.0/\0<x:xmpmeta xmlns:x='adobe:ns:meta/'><r "
                   b"tiff:Orientation=\"%d\"/></x:xmpmeta>" % orientation)
            data = data[:2] + b"\xff\xe1" + (len(xmp) + 2).to_bytes(2, "big") + xmp + data[2:]
            Path("a.jpg").write_bytes(data)
        shown = np.array(ImageOps.exif_transpose(Image.open("a.jpg")))
        found = read_image("a.jpg")
        assert found.is_contiguous()
        assert torch.equal(found, torch.from_numpy(shown).permute(2, 0, 1)), orientation


def test_a_name_that_is_not_utf8_is_read(capsys):
    make("photos", 20)
    os.rename(b"photos/cat/0.png", b"photos/cat/caf\xe9.png")
    main("--data_dir photos --max_steps 1")
    assert "60 images are few" not in capsys.readouterr().out


# --- a training and an evaluation -----------------------------------------------------------------

def test_one_flag_trains_and_keeps_the_best(capsys):
    make("photos", 14)
    Path("photos/owl/9.png").write_bytes(b"nothing")
    main("--data_dir photos --epochs 1")
    out, run = capsys.readouterr().out, common.load("out/folder_symmetric/best.pt")
    assert "cannot read photos/owl/9.png" in out and "3 classes: cat, dog, owl" in out
    test, val, train = sizes("photos")
    assert f"photos: {test} test, {val} val, {train} train images" in out
    assert run["classes"] == CLASSES and "42 images are few" in out


def test_somebodys_photos_are_evaluated_under_all_corruptions(capsys):
    """The logits of a good network lie between 0 and 1 for a dense fog."""
    make("photos", 20)
    main("--data_dir photos --epochs 1")
    call(eval_robust.main, "--ckpt out/folder_symmetric --out_dir r --device cpu --measures clean "
         "corruptions --limit 3")
    rows = common.read_log("r/results.jsonl")
    assert len(rows) == 16 and all(row["images"] == 3 for row in rows)
    assert sum(len(row["right"]) for row in rows) == 76
    capsys.readouterr()
    make("new", 8)                                          # a folder that the network never saw
    call(eval_robust.main, "--ckpt out/folder_symmetric --data_dir new --measures clean --device cpu")
    test, *_ = sizes("new")
    assert f"{test} of 24 photos: the part test" in capsys.readouterr().out
    make("other", 8, classes=["cat", "yak"])
    assert "has photos of the classes ['cat', 'yak'], expected cat, dog, owl" in refused(
        eval_robust, "--ckpt out/folder_symmetric --data_dir other --device cpu")


def test_an_evaluation_of_photos_needs_their_folder():
    for data in ("folder", "imagenet", "cifar10"):
        line = refused(eval_robust, "--device cpu --measures clean --data", [data], "--ckpt",
                       [ROOT / "weights/shapes_rpc.pt"])
        assert line == f"error: --data {data} needs --data_dir, the folder of the images"
