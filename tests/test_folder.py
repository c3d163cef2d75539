"""Test your own photos and masks: which files are found, held out and evaluated."""

import os
import re
import shutil
import zlib
from argparse import Namespace
from functools import partial
from pathlib import Path
from unicodedata import normalize

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

import common
import train_cls
import train_seg
from common import InputError
from data.datasets import DATASETS, find_photos, load_data, load_part, photo_groups
from data.images import (File, choose_part, composed_name, fingerprint, image_hashes,
                         read_image, walk_images)
from data.masks import load_segmentation, own_folder
from runs import call, make_pairs, refused

CLASSES = ["cat", "dog", "owl"]
main = partial(call, train_cls.main)


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


def evaluated(root, seen=(), **trained):
    """Load the images for an evaluation on this folder."""
    crop = DATASETS[trained["data"]].crop
    flags = trained | dict(data="folder", data_dir=root, image_size=32, seen=seen, crop=crop)
    return load_part("all", flags, "cpu")


def stored(root, part):
    return load_part(part, dict(data="folder", data_dir=root, image_size=32), "cpu")


def parts_of(root):
    return {part: find_photos(root, part)[1] for part in ("train", "val", "test", "all")}


# --- held-out files -------------------------------------------------------------------------------

def test_one_tenth_validates_another_tenth_is_reported():
    for n, n_held in ((3, 1), (14, 1), (40, 4)):
        names = [f"a/{i}.jpg" for i in range(n)]
        files = [File(name, name, "a") for name in names]
        train, val, test = ([file.path for file in choose_part({"": files}, part)]
                            for part in ("train", "val", "test"))
        order = sorted(names, key=lambda name: zlib.crc32(name.encode()))
        assert test == order[:n_held] and val == order[n - n_held:]
        assert train == order[n_held:n - n_held]
    for n in (1, 2):
        with pytest.raises(InputError, match=f"a has {n} images, expected at least 3"):
            choose_part({"": files[:n]}, "train")
    assert composed_name("a/M\u00fcller.jpg") == composed_name("a/Mu\u0308ller.jpg")
    assert composed_name(os.path.join("a", "b")) == "a/b"


def test_folders_train_val_test_are_parts():
    for part, count in (("train", 12), ("val", 3)):
        make(f"split/{part}", count)
    files = parts_of("split")                                   # val/ is reported
    assert [len(files[part]) for part in ("train", "val", "test", "all")] == [33, 3, 9, 9]
    assert all("split/train" in path for path, _ in files["train"] + files["val"])
    assert all("split/val" in path for path, _ in files["test"])
    make("split/Test", 2)                                       # now val/ chooses best.pt
    files = parts_of("split")
    assert [len(files[part]) for part in ("train", "val", "test", "all")] == [36, 9, 6, 6]
    make("split/validation", 1)                                 # beside val/
    with pytest.raises(InputError, match="two folders for one part"):
        parts_of("split")
    make("flat", 3, classes=["train", "test"])                  # images directly inside
    with pytest.raises(InputError, match="flat has 0 folders with images"):
        find_photos("flat", "train")


def test_a_class_with_a_reserved_name_is_explained():
    make("photos", 3, classes=["cat", "train"])
    with pytest.raises(InputError, match="has 0 folders .* no class .photos/train.; .* rename it"):
        find_photos("photos", "train")
    make("one", 3, classes=["cat"])
    with pytest.raises(InputError, match=r"one/train/<class>/\*.jpg$"):
        find_photos("one", "train")


def test_training_images_are_never_held_out(capsys):
    """Renamed and copied: the pixels decide. Edited or saved again: the path decides."""
    make("photos", 10)
    args = Namespace(data="folder", data_dir="photos", holdout=0, image_size=32)
    train, val = load_data(args, "cpu")
    seen = [*train.hashes, *val.hashes]
    held = evaluated("photos", seen, data="folder")
    assert len(seen) == 54 and torch.equal(held.images.sum((1, 2, 3)).sort()[0],
                                           stored("photos", "test").images.sum(
                                               (1, 2, 3)).sort()[0])
    shutil.copytree("photos", "copy")
    for path in sorted(Path("copy").rglob("*.png")):
        path.rename(path.with_stem(f"{path.stem}_v2"))
    assert torch.equal(evaluated("copy", seen, data="folder").images.sum((1, 2, 3)).sort()[0],
                       held.images.sum((1, 2, 3)).sort()[0])
    assert "3 of 30 images are evaluated" in capsys.readouterr().out
    shutil.rmtree("copy")
    shutil.copytree("photos", "before")
    for path in Path("photos").rglob("*.png"):
        Image.open(path).rotate(180).save(path)
    assert len(evaluated("photos", seen, data="folder").labels) == 3
    shutil.rmtree("photos")
    Path("before").rename("photos")
    for path in find_photos("photos", "test")[1]:
        os.remove(path[0])
    with pytest.raises(InputError, match="trained on all"):
        evaluated("photos", seen, data="folder")
    assert fingerprint(stored("photos", "all")) != fingerprint(held)


def pixels(root, part):
    return [read_image(path).numpy().tobytes() for path, _ in find_photos(root, part)[1]]


def copy_photo(old, new, **options):
    """Save an image again: other bytes, equal pixels."""
    Image.open(old).save(new, **options)


def test_equal_pixels_are_in_one_part():
    """Copies with another name, another compression or another class."""
    make("photos", 30)
    before = parts_of("photos")
    for path in sorted(Path("photos/cat").iterdir()):
        shutil.copy(path, path.with_stem(f"{path.stem} - Copy"))
    for path in sorted(Path("photos/dog").iterdir()):
        copy_photo(path, path.with_stem(f"again_{path.stem}"), compress_level=0)
    for path in sorted(Path("photos/owl").iterdir())[:20]:
        shutil.copy(path, Path("photos/cat", f"owl_{path.name}"))
    found = {part: pixels("photos", part) for part in ("train", "val", "test")}
    assert sum(map(len, found.values())) == 30 * 5 + 20
    for a, b in (("train", "val"), ("train", "test"), ("val", "test")):
        assert not {*found[a]} & {*found[b]}
    assert len({*found["val"]}) >= 3 and len({*found["test"]}) >= 3     # still a tenth each
    for path in [*Path("photos").rglob("*Copy*"), *Path("photos").rglob("*again*"),
                 *Path("photos").rglob("owl_*")]:
        path.unlink()
    assert parts_of("photos") == before                 # without copies: names decide


def test_seen_photos_do_not_validate():
    """Copies of training photos in val/, and photos that the initial weights have seen."""
    for part, count in (("train", 8), ("val", 6), ("test", 2)):
        make(f"photos/{part}", count)
    args = Namespace(data="folder", data_dir="photos", holdout=0, image_size=32)
    assert len(load_data(args, "cpu")[1].labels) == 18
    for name in CLASSES:
        copy_photo(f"photos/train/{name}/0.png", f"photos/val/{name}/0.png")
    train, val = load_data(args, "cpu")
    assert len(train.labels) == 24 and len(val.labels) == 15
    assert not {*train.hashes} & {*val.hashes}
    earlier = [mark for path, label in find_photos("photos", "val")[1] if label == 2
               for mark in image_hashes(path, read_image(path))]
    val = load_data(args, "cpu", seen=earlier)[1]
    assert val.labels.bincount().tolist() == [5, 5]
    for name in CLASSES:
        shutil.rmtree(f"photos/val/{name}")
        shutil.copytree(f"photos/train/{name}", f"photos/val/{name}")
    with pytest.raises(InputError, match="no image is left for 'val'; the network was trained"):
        load_data(args, "cpu")


def test_unseen_is_printed_where_it_is_known(capsys):
    make("photos", 3)
    evaluated("photos", data="folder")
    assert "which images the training used is not known" in capsys.readouterr().out
    evaluated("photos", seen=["0" * 16], data="folder")
    assert "9 of 9 images are evaluated, without images of the t" in capsys.readouterr().out


def peak_memory(function):
    """Return the bytes by which a call raises the peak of this process's memory."""
    def field(name):
        line = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
        return 1024 * int(line[1])

    Path("/proc/self/clear_refs").write_text("5")       # the peak becomes the present value
    before = field("VmRSS")
    kept = function()                                   # alive until the peak is read
    return field("VmHWM") - before, kept


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_photos_are_in_memory_once():
    """A list of images that is stacked would need the memory twice, a copy to hash it, too."""
    make("photos", 30, side=8)
    flags = dict(data="folder", data_dir="photos", image_size=600)
    load_part("val", flags, "cpu")                      # imports and buffers
    used, train = peak_memory(lambda: load_part("train", flags, "cpu"))
    once = train.images.numel()
    assert once > 70e6 and used < 1.4 * once
    used, _ = peak_memory(lambda: fingerprint(train))
    assert used < 0.4 * once


def test_crop_belongs_to_the_network():
    """A network that was trained on ImageNet's crops gets them in its evaluation, too."""
    make("photos", 3, side=64)
    inner = evaluated("photos", data="imagenet").images
    assert not torch.equal(inner, evaluated("photos", data="folder").images)
    assert torch.equal(inner, evaluated("photos", data="imagenet", image_size=99).images)


# --- photos ---------------------------------------------------------------------------------------

def test_one_flag_trains_and_keeps_the_best(capsys):
    make("photos", 10)
    Path("photos/owl/9.png").write_bytes(b"nothing")
    main("--data_dir photos --max_steps 3 --image_size 32 --batch_size 8 --epochs 1")
    out, run = capsys.readouterr().out, common.load("out/folder_symmetric/best.pt")
    assert out.count("cannot read") == 1 and "3 classes: cat, dog, owl" in out
    assert "1 of 30 files are left out; the first: cannot read photos/owl/9.png" in out
    assert run["classes"] == CLASSES and "eval_robust.py uses: a tenth of each class" in out
    test = evaluated("photos", run["seen"], **run["args"])
    assert not {*test.hashes} & {*run["seen"]} and len(test.hashes) + len(run["seen"]) == 58


def test_resumed_run_needs_the_same_images():
    make("photos", 6)
    main("--data_dir photos --max_steps 1 --image_size 32 --batch_size 8 --out_dir a")
    Path("photos/cat").rename("photos/x")
    Path("photos/dog").rename("photos/cat")
    Path("photos/x").rename("photos/dog")                   # swapped labels
    assert "data" in refused(train_cls, "--resume a --max_steps 2")


def test_one_lister_finds_the_classes():
    make("photos", 3)
    make("photos", 1, classes=[".ipynb_checkpoints"])       # hidden
    Path("photos/cat/._0.png").write_bytes(b"")
    make("elsewhere", 2, classes=["yak"])
    os.symlink(os.path.abspath("elsewhere/yak"), "photos/yak")      # a linked class folder
    os.symlink(os.path.abspath("photos"), "photos/cat/loop")
    assert len(walk_images("photos")) == 11
    found = [file.class_name for file in photo_groups("photos")[""]]
    assert found == ["cat"] * 3 + ["dog"] * 3 + ["owl"] * 3 + ["yak"] * 2
    with pytest.raises(InputError, match="there is no folder"):
        photo_groups("")                                    # not the current folder


def test_a_walk_visits_each_real_folder_once():
    """Two links to one folder, links to each other's folders, and a link to a folder above."""
    make("photos", 2)
    os.symlink(os.path.abspath("photos/cat"), "photos/again")
    os.symlink(os.path.abspath("photos/dog"), "photos/cat/dog")
    os.symlink(os.path.abspath("photos/cat"), "photos/dog/cat")
    os.symlink(os.path.abspath("."), "photos/owl/up")
    walked = [os.path.realpath(path) for path in walk_images("photos")]
    assert len(walked) == len({*walked}) == 6


def test_classes_do_not_vanish():
    """A folder whose images cannot be read, or that contains none, is named in an error."""
    def empty(path):
        path.mkdir()

    def tif(path):
        path.mkdir()
        Image.new("RGB", (9, 9)).save(path / "0.tif")

    def nested(path):
        make(path, 3, classes=["indoor"])

    def broken_links(path):
        path.mkdir()
        for i in range(4):
            os.symlink("nowhere", path / f"{i}.png")

    def empty_files(path):
        path.mkdir()
        for i in range(4):
            Path(path, f"{i}.jpg").touch()

    for i, fill in enumerate((empty, tif, nested, broken_links, empty_files)):
        for root in (f"flat{i}", f"parts{i}/train", f"parts{i}/val"):
            make(root, 4)
        fill(Path(f"flat{i}", "fish"))
        fill(Path(f"parts{i}", "val", "cat2"))
        for part in ("train", "all"):
            with pytest.raises(InputError, match=f"flat{i}/fish"):
                stored(f"flat{i}", part)
            with pytest.raises(InputError, match="val/cat2|no training images of cat2"):
                stored(f"parts{i}", part)


def test_a_class_keeps_a_training_image():
    """The test and the validation photo of a class are readable, its training photos are not."""
    make("photos", 6)
    paths = [Path(path) for path, label in find_photos("photos", "train")[1] if label == 1]
    for path in paths:
        path.write_bytes(b"nothing")
    with pytest.raises(InputError, match="no training image of dog can be read"):
        stored("photos", "train")


def test_unreadable_files_are_counted_once(capsys):
    make("photos", 10)
    for name in ("cat", "owl"):
        for i in range(10, 25):
            os.symlink("nowhere", f"photos/{name}/{i}.png")
    args = Namespace(data="folder", data_dir="photos", holdout=0, image_size=32)
    load_data(args, "cpu")
    out = capsys.readouterr().out
    assert out.count("cannot read") == 1
    assert "30 of 60 files are left out; the first: cannot read photos/cat/10.png" in out
    stored("photos", "all")
    assert "30 of 60 files are left out" in capsys.readouterr().out


def test_a_folder_without_classes_is_no_part(capsys):
    """Test images without labels, directly in test/, are not the test part."""
    make("photos/train", 10)
    Path("photos/test").mkdir()
    Image.new("RGB", (40, 40)).save("photos/test/0.png")
    args = Namespace(data="folder", data_dir="photos", holdout=0, image_size=32)
    train, val = load_data(args, "cpu")
    assert (len(train.labels), len(val.labels)) == (24, 3)
    assert "eval_robust.py uses: a tenth of each class" in capsys.readouterr().out


def test_phone_photos_and_their_masks_are_upright():
    for part in ("images", "annotations"):
        Path("mine", part).mkdir(parents=True)
    upright = np.zeros((48, 32, 3), np.uint8)
    upright[:20, :16] = 255
    for orientation, turn in ((3, Image.ROTATE_180), (6, Image.ROTATE_90), (8, Image.ROTATE_270)):
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        lying = Image.fromarray(upright).transpose(turn)
        lying.save(f"mine/images/{orientation}.jpg", exif=exif, quality=95)
        mask = Image.fromarray(upright[..., 0])
        mask.save(f"mine/annotations/{orientation}.png")
    lying.convert("L").save(f"mine/annotations/{orientation}.png", exif=exif)   # like its photo
    for image, label in own_folder("mine", ["all"])[0]:
        assert image.shape[1:] == label.shape == (48, 32)
        assert (image[0].int() - 255 * label.int()).abs().max() < 30
        assert torch.equal(label.bool(), torch.from_numpy(upright[..., 0]).bool())


# --- masks ----------------------------------------------------------------------------------------

def masks(root, values, n=20):
    """Write n pairs whose annotations contain these values, in blocks."""
    for part in ("images", "annotations"):
        Path(root, part).mkdir(parents=True)
    for i in range(n):
        label = np.array(values, np.uint8).repeat(8)[None].repeat(40, 0)
        path = Path(root, "annotations", f"{i:02}.png")
        Image.fromarray(np.roll(label, i, 1)).save(path)
        Image.fromarray(np.dstack([np.roll(label, i, 1) // 2 + 60 + i] * 3)).save(
            Path(root, "images", f"{i:02}.jpg"))


def test_held_out_masks_are_disjoint():
    masks("mine", [0, 1], n=40)
    parts = ["train", "val", "test", "all"]
    train, val, test, _ = ({Path(image).stem for image, _ in tree.files}
                           for tree in own_folder("mine", parts))
    order = sorted((f"{i:02}" for i in range(40)), key=lambda name: zlib.crc32(name.encode()))
    assert (test, val, train) == ({*order[:4]}, {*order[-4:]}, {*order[4:-4]})
    make_pairs("split")                                         # validation/ is reported
    given = own_folder("split", parts)
    assert [len(tree) for tree in given] == [8, 1, 5, 5]
    assert all("validation" in image for image, _ in given[2].files)


def test_equal_photos_with_masks_are_in_one_part():
    masks("mine", [0, 1], n=20)
    for i in range(20):
        shutil.copy(f"mine/annotations/{i:02}.png", f"mine/annotations/{i:02} - Copy.png")
        image = Image.open(f"mine/images/{i:02}.jpg")
        image.save(f"mine/images/{i:02} - Copy.png")            # other bytes, equal pixels
    trees = own_folder("mine", ["train", "val", "test"])
    stems = [{Path(image).stem.removesuffix(" - Copy") for image, _ in tree.files}
             for tree in trees]
    assert [len(tree) for tree in trees] == [32, 4, 4]
    assert [len(found) for found in stems] == [16, 2, 2]


def test_photos_of_the_backbone_do_not_validate():
    masks("mine", [0, 1], n=40)
    train, val = own_folder("mine", ["train", "val"])
    seen = train.hashes[:4] + val.hashes[:4]                    # two images each
    again = own_folder("mine", ["train", "val"], seen=seen)
    assert [len(tree) for tree in again] == [len(train), len(val) - 2] == [32, 2]
    assert not {*again[1].hashes} & {*seen}
    with pytest.raises(InputError, match="all images of the part 'val' were used in training"):
        own_folder("mine", ["train", "val"], seen=val.hashes)


@pytest.mark.parametrize("values, labels, classes", [
    ([0, 1], [0, 1], 2), ([0, 255], [0, 1], 2), ([0, 3, 255], [0, 3, 255], 4)])
def test_the_value_k_is_class_k(values, labels, classes):
    masks("mine", values)
    train, = own_folder("mine", ["train"])
    assert len(train.classes) == classes and train[0][1].unique().tolist() == labels


def test_classes_txt_names_every_value_once():
    masks("mine", [0, 1, 2])
    write = Path("mine/classes.txt").write_text
    write("Boden\r\nWu\u0308rfel\r\nKreis", "utf-8-sig")
    assert own_folder("mine", ["train"])[0].classes == ["Boden", "W\u00fcrfel", "Kreis"]
    for text, words in (("# classes\na\nb\nc", "expected 4 classes"), ("a\nb", "expected 2"),
                        ("a\nb\na", "lists a name twice")):        # a header line shifts all names
        write(text)
        with pytest.raises(InputError, match=words):
            own_folder("mine", ["train"])


def test_masks_need_one_flag(capsys):
    masks("mine", [0, 255])
    call(train_seg.main,
         "--data_dir mine --max_steps 2 --num_workers 0 --out_dir a --size 32 --epochs 1")
    out, run = capsys.readouterr().out, common.load("a/best.pt")
    assert "2 classes" in out and run["classes"] == ["value 0", "value 1"]
    args = Namespace(**run["args"])
    test, = load_segmentation(args, ["all"], run["classes"], run["seen"])
    assert len(test) == 2
    masks("other", [0, 255], n=5)
    args.data_dir = "other"
    assert len(load_segmentation(args, ["all"], run["classes"])[0]) == 5    # of another folder
    Image.new("L", (16, 40), 255).save("mine/annotations/00.png")
    assert "data" in refused(train_seg, "--resume a --max_steps 4")     # a changed mask


def test_an_evaluated_folder_has_the_networks_classes():
    masks("mine", [0, 1])
    five = [f"value {k}" for k in range(5)]
    tree, = own_folder("mine", ["all"], five)           # some classes may be missing
    assert tree.classes == five and tree[0][1].unique().tolist() == [0, 1]
    with pytest.raises(InputError, match="expected 1 classes"):
        own_folder("mine", ["all"], five[:1])
    masks("binary", [0, 255])
    with pytest.raises(InputError, match="expected 5 classes"):         # 255 is class 1 or ignored
        own_folder("binary", ["all"], five)


def test_masks_find_their_photos():
    masks("mine", [0, 1], n=6)
    for path in Path("mine/annotations").glob("*.png"):
        path.rename(path.with_suffix(".PNG"))               # as Windows writes them
    for folder, form in (("images", "NFC"), ("annotations", "NFD")):
        old = next(Path("mine", folder).glob("05.*"))
        old.rename(old.with_stem(normalize(form, "M\u00fcller0")))
    assert len(own_folder("mine", ["all"])[0]) == 6
    Image.new("L", (40, 16), 78).save("mine/annotations/alone.png")
    with pytest.raises(InputError, match=r"1 files have no partner.*alone\.\*"):
        own_folder("mine", ["all"])


def test_palettes_must_agree_across_files():
    colours = [0, 0, 0, 220, 40, 40, 40, 60, 220]
    masks("mine", [0, 1, 2], n=6)

    def save(path, palette):
        image = Image.fromarray(np.array(Image.open(path))).convert("P")
        image.putpalette(palette)
        image.save(path)
    for path in sorted(Path("mine", "annotations").iterdir()):
        save(path, colours)
    assert len(own_folder("mine", ["all"])[0].classes) == 3
    save("mine/annotations/04.png", [*colours[:3], *colours[6:], *colours[3:6]])
    with pytest.raises(InputError, match="s/00.png and .*s/04.png have different palettes"):
        own_folder("mine", ["all"])
