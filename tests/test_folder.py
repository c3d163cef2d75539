"""Test your own photos and masks: which files are found, held out and evaluated."""

import os
import shutil
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
from data.datasets import find_photos, load_data, load_photos, load_test
from data.images import divide, fingerprint, list_images, name_hash
from data.masks import find_pairs, find_values, load_segmentation, own_folder
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
    return load_test(Namespace(data="folder", data_dir=root, device="cpu"), trained, 32, None, seen)


def parts_of(root):
    return {part: find_photos(root, part)[1] for part in ("train", "val", "test", "all")}


# --- held-out files -------------------------------------------------------------------------------

def test_one_tenth_validates_another_tenth_is_reported():
    for n, n_held in ((3, 1), (14, 1), (40, 4)):
        files = [f"a/{i}.jpg" for i in range(n)]
        parts = divide({"": {"a": files}}, str)
        order = sorted(files, key=name_hash)
        assert parts["test"] == order[:n_held] and parts["val"] == order[n - n_held:]
        assert parts["train"] == order[n_held:n - n_held]
    for n in (1, 2):
        with pytest.raises(InputError, match=f"a has {n} images, expected at least 3"):
            divide({"": {"a": files[:n]}}, str)


def test_names_hash_equally_on_every_system():
    assert name_hash("a/M\u00fcller.jpg") == name_hash("a/Mu\u0308ller.jpg")
    assert name_hash(os.path.join("a", "b")) == name_hash("a/b")


def test_held_out_photos_are_disjoint():
    for name, count in dict(zebra=3, cat=5, dog=15, owl=20).items():
        make("photos", count, classes=[name])
    files = parts_of("photos")
    labels = {part: [[label for _, label in found].count(k) for k in range(4)]
              for part, found in files.items()}
    assert find_photos("photos", "all")[0] == ["cat", "dog", "owl", "zebra"]
    assert labels == dict(train=[3, 11, 16, 1], val=[1, 2, 2, 1], test=[1, 2, 2, 1],
                          all=[5, 15, 20, 3])
    assert len({*files["train"], *files["val"], *files["test"]}) == 43 == len(files["all"])


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
    make("flat", 3, classes=["train", "test"])                  # images directly inside
    with pytest.raises(InputError, match="flat has 0 folders with images"):
        find_photos("flat", "train")


def test_training_images_are_never_held_out(capsys):
    """Renamed, moved, copied: the hashes of the files decide, not their names."""
    make("photos", 10)
    args = Namespace(data="folder", data_dir="photos", holdout=0, image_size=32)
    train, val = load_data(args, "cpu")
    seen = [*train.hashes, *val.hashes]
    held = evaluated("photos", seen, data="folder")
    assert len(seen) == 27 and torch.equal(held.images.sum((1, 2, 3)).sort()[0],
                                           load_photos("photos", "test", 32).images.sum(
                                               (1, 2, 3)).sort()[0])
    shutil.copytree("photos", "copy")
    for path in sorted(Path("copy").rglob("*.png")):
        path.rename(path.with_stem(f"{path.stem}_v2"))
    assert sorted(evaluated("copy", seen, data="folder").hashes) == sorted(held.hashes)
    assert "3 of 30 images are evaluated" in capsys.readouterr().out
    shutil.rmtree("copy")
    for path in find_photos("photos", "test")[1]:
        os.remove(path[0])
    with pytest.raises(InputError, match="trained on all"):
        evaluated("photos", seen, data="folder")
    assert fingerprint(load_photos("photos", "all", 32)) != fingerprint(held)


def test_another_folder_is_evaluated_whole():
    make("photos2", 4, classes=["bus", "car"])
    other = evaluated("photos2", data="folder")                 # the caller checks its classes
    assert len(other.labels) == 8 and other.classes == ["bus", "car"]
    make("photos3/val", 3)
    assert len(evaluated("photos3", data="folder").labels) == 9     # val/ alone is enough


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
    assert "skipping: cannot read photos/owl/9.png" in out and "3 classes: cat, dog, owl" in out
    assert run["classes"] == CLASSES
    test = evaluated("photos", run["seen"], **run["args"])
    assert not {*test.hashes} & {*run["seen"]} and len(test.hashes) + len(run["seen"]) == 29


def test_resumed_run_needs_the_same_images():
    make("photos", 6)
    main("--data_dir photos --max_steps 1 --image_size 32 --batch_size 8 --out_dir a")
    Path("photos/cat").rename("photos/x")
    Path("photos/dog").rename("photos/cat")
    Path("photos/x").rename("photos/dog")                   # swapped labels
    assert "data" in refused(train_cls, "--resume a --max_steps 2")


def test_folders_without_a_training_are_one_line():
    make("few", 2)
    for name in ("other/train", "val_only/val"):
        make(name, 4)
    make("other/val", 1, classes=["cat", "dog", "cow"])
    for folder, words in (("few", "cat has 2 images"), ("other", "cow"),
                          ("val_only", "no training images of cat, dog, owl")):
        assert words in refused(train_cls, "--data_dir", [folder]), folder
    assert not Path("out").exists()


def test_one_lister_finds_the_classes():
    make("photos", 3)
    make("photos/horse", 3, classes=["indoor"])             # one level deeper
    Path("photos/fish").mkdir()                             # empty
    make("photos/cat", 2, classes=["more", "album.jpg"])    # folders inside a class
    os.symlink("loop", "photos/loop")                       # a link that leads to itself
    make("photos", 1, classes=[".ipynb_checkpoints"])       # hidden
    Path("photos/cat/._0.png").write_bytes(b"")
    make("elsewhere", 2, classes=["yak"])
    os.symlink(os.path.abspath("elsewhere/yak"), "photos/yak")      # a linked class folder
    np.save("photos/cat/0.npy", np.zeros(3))
    found = list_images("photos")
    assert {name: len(paths) for name, paths in found.items()} == dict(cat=3, dog=3, owl=3, yak=2)
    make("photos", 1, classes=["M\u00fcller", "Mu\u0308ller"])
    with pytest.raises(InputError, match="two folders of the name"):
        list_images("photos")
    with pytest.raises(InputError, match="there is no folder"):
        list_images("")                                     # not the current folder


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
    tree = own_folder("mine", "all", [0, 255])
    for image, label in tree:
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
    files = find_pairs("mine")
    stems = {part: {Path(image).stem for image, _ in found} for part, found in files.items()}
    order = sorted((f"{i:02}" for i in range(40)), key=name_hash)
    assert (stems["test"], stems["val"], stems["train"]) == ({*order[:4]}, {*order[-4:]},
                                                             {*order[4:-4]})
    make_pairs("split")                                         # validation/ is reported
    given = find_pairs("split")
    assert [len(given[part]) for part in ("train", "val", "test", "all")] == [8, 1, 5, 5]
    assert all("validation" in image for image, _ in given["test"])


@pytest.mark.parametrize("values, classes, label_255", [
    ([0, 1], [0, 1], False), ([0, 255], [0, 255], False), ([3, 7], [3, 7], False),
    ([0, 1, 2, 5, 255], [0, 1, 2, 5], True)])
def test_the_values_of_masks_are_their_classes(values, classes, label_255):
    masks("mine", values)
    found = find_values("mine")
    assert found == classes
    _, label = own_folder("mine", "train", found)[0]
    assert sorted(label.unique().tolist()) == [*range(len(classes)), *[255] * label_255]


def test_classes_txt_names_every_value_once():
    masks("mine", [0, 1, 2])
    write = Path("mine/classes.txt").write_text
    write("Boden\r\nWu\u0308rfel\r\nKreis", "utf-8-sig")
    values = find_values("mine")
    assert own_folder("mine", "train", values).classes == ["Boden", "W\u00fcrfel", "Kreis"]
    for text, words in (("# classes\na\nb\nc", "4 names"), ("a\nb", "2 names"),
                        ("a\nb\na", "lists 'a' twice")):        # a header line shifts all names
        write(text)
        with pytest.raises(InputError, match=words):
            find_values("mine")


def test_masks_need_one_flag(capsys):
    masks("mine", [0, 255])
    call(train_seg.main,
         "--data_dir mine --max_steps 2 --num_workers 0 --out_dir a --size 32 --epochs 1")
    out, run = capsys.readouterr().out, common.load("a/best.pt")
    assert "2 classes" in out and run["classes"] == ["value 0", "value 255"]
    args = Namespace(**run["args"])
    test = load_segmentation(args, "test", run["seen"])
    assert len(test) == 2 and test.values == [0, 255] and run["metrics"]["classes"] == 2
    masks("other", [0, 255], n=5)
    args.data_dir = "other"
    assert len(load_segmentation(args, "test", [])) == 5        # all of another folder
    Image.new("L", (16, 40), 255).save("mine/annotations/00.png")
    assert "data" in refused(train_seg, "--resume a --max_steps 4")     # a changed mask


def test_every_listing_of_masks_follows_one_rule():
    masks("mine", [0, 1], n=6)
    for path in Path("mine/annotations").glob("*.png"):
        path.rename(path.with_suffix(".PNG"))               # as Windows writes them
    os.rename("mine/annotations/00.PNG", "linked.png")
    os.symlink(os.path.abspath("linked.png"), "mine/annotations/00.png")
    Path("mine/annotations/more").mkdir()                   # these files are ignored
    Image.new("L", (40, 16), 77).save("mine/annotations/more/00.png")
    for folder, form in (("images", "NFC"), ("annotations", "NFD")):
        old = next(Path("mine", folder).glob("05.*"))
        old.rename(old.with_stem(normalize(form, "M\u00fcller0")))
    assert find_values("mine") == [0, 1] and len(find_pairs("mine")["all"]) == 6
    Image.new("L", (40, 16), 78).save("mine/annotations/alone.png")
    with pytest.raises(InputError, match=r"1 files have no partner.*alone\.\*"):
        find_values("mine")
    Image.new("RGB", (40, 16)).save("mine/images/03.webp")
    with pytest.raises(InputError, match=r"2 files 03\.\*"):
        find_values("mine")


def test_palettes_must_agree_across_files():
    colours = [0, 0, 0, 220, 40, 40, 40, 60, 220]
    masks("mine", [0, 1, 2], n=6)

    def save(path, palette):
        image = Image.fromarray(np.array(Image.open(path))).convert("P")
        image.putpalette(palette)
        image.save(path)
    for path in sorted(Path("mine", "annotations").iterdir()):
        save(path, colours)
    assert find_values("mine") == [0, 1, 2]
    save("mine/annotations/04.png", [*colours[:3], *colours[6:], *colours[3:6]])
    with pytest.raises(InputError, match="s/00.png and .*s/04.png have different palettes"):
        find_values("mine")


def test_masks_without_a_training_are_one_line():
    masks("mine", [0, 1])
    Image.new("RGB", (40, 40)).save("mine/annotations/03.png")
    assert "03.png" in refused(train_seg, "--data_dir mine")
