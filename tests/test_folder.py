"""Images of one's own: what counts as one, what is held out, what is evaluated, and what is said of it."""

import os
import shutil
from argparse import Namespace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import common
import train_cls
from data.files import decode, name_hash, read_bytes
from data.imagenet import ImageTree
from data.images import load_data, load_test
from data.labelled import OwnFolder, folder_recipe, load_folder
from data.photos import Photos, find_photos, load_photos
from data.segmentation import load_split
from runs import call

CLASSES = ["cat", "dog", "owl"]


@pytest.fixture(autouse=True)
def an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def make(root, count, side=40, classes=CLASSES):
    """count images of each class, root/<class>/<i>.png, of `side` pixels and more."""
    rng = np.random.default_rng(0)
    for name in classes:
        Path(root, name).mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(0, 256, (side + i % 3, side + 5, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(Path(root, name, f"{i}.png"))


main = partial(call, train_cls.main)


def spoil(root):
    """Make every file under root unreadable as an image."""
    for path in filter(Path.is_file, Path(root).rglob("*")):
        path.write_bytes(b"nothing")


def data_of(root, holdout=0):
    args = Namespace(data="folder", data_dir=root, holdout=holdout, image_size=32)
    return load_data(args, torch.device("cpu"))


def evaluated(root, **trained):
    """What an evaluation on this folder looks at."""
    return load_test(Namespace(data="folder", data_dir=root, device="cpu"), trained, 32, None)


# --- the script -----------------------------------------------------------------------------------

def test_one_flag_trains_on_a_folder_and_says_first_what_it_found(capsys):
    make("photos", 10)
    Path("photos/owl/9.png").write_bytes(b"nothing")
    Path("photos/owl/notes.txt").write_text("no image")
    main("--data_dir photos --max_steps 2")
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("photos: 30 images in 3 classes; chosen for them: ")
    for choice in ("holdout=6", "model=nano", "image_size=32", "patch_size=4", "batch_size=4"):
        assert choice in lines[0].split()
    found = [line for line in lines[:4] if line.startswith("folder: 23 training, 6 held-out images, 3 classes, 1 ")]
    assert len(found) == 1 and "unreadable files, 1 other files left out (.txt)" in found[0]
    assert "photos/owl/9.png" in out + err

    # the checkpoint says which images were held out: an evaluation sees the same ones
    run = common.load("out/folder_rpc")
    assert [run["args"][name] for name in ("data", "data_dir", "holdout")] == ["folder", "photos", 6]
    held = load_photos(find_photos("photos"), 32, 6)[1]
    assert run["classes"] == held.classes == CLASSES and run["metrics"]["images"] == 6
    for root in ("photos", "./photos", os.path.abspath("photos")):
        assert torch.equal(evaluated(root, **run["args"]).images, held.images)


def test_a_stopped_run_on_a_folder_goes_on_to_the_same_weights(monkeypatch):
    make("photos", 10)
    main("--data_dir photos --max_steps 4 --out_dir whole")
    main("--data_dir photos --max_steps 2 --out_dir parts")
    main("--resume parts --max_steps 4")
    whole, parts = common.load("whole"), common.load("parts")
    assert whole["metrics"] == parts["metrics"]
    assert all(torch.equal(whole["model"][name], w) for name, w in parts["model"].items())
    same = ("model", "image_size", "patch_size", "batch_size", "epochs", "pad", "holdout")
    assert all(whole["args"][name] == parts["args"][name] for name in same)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")                   # started again by torchrun
    main("--data_dir photos --max_steps 4 --out_dir whole")
    assert common.load("whole")["step"] == 4 and Path("whole/log.jsonl").read_text().count('"eval"') == 1


def test_a_val_folder_is_evaluated_on_and_flags_win_over_what_is_chosen(capsys):
    make("photos/train", 6, side=70)
    make("photos/val", 2)
    main("--data_dir photos --max_steps 1 --image_size 48")
    assert "18 training, 6 val images, 3 classes, 0 unreadable files" in capsys.readouterr().out
    args = common.load("out/folder_rpc")["args"]
    chosen = [args[name] for name in ("image_size", "patch_size", "pad", "holdout")]
    assert chosen == [48, 8, 8, 0]                              # images of 70 pixels: 64 in 8 x 8


def test_a_folder_that_cannot_be_trained_on_is_named_in_one_line():
    Path("empty").mkdir()
    make("one", 2, classes=["cat"])
    make("hole", 4)
    shutil.rmtree("hole/dog")
    Path("hole/dog").mkdir()
    for name in ("broken", "other/train", "dark/train", "val_only/val"):
        make(name, 4)
    make("other/val", 1, classes=["cat", "dog", "cow"])
    make("dark/val", 1)
    spoil("broken/dog")
    spoil("dark/val")
    for folder, message in ((None, "--data folder needs --data_dir"), ("nowhere", "--data_dir nowhere is not a folder"),
                            ("empty", "--data_dir empty has 0 class folders"), ("one", "one has 1 class folders"),
                            ("hole", "--data_dir hole: no image in the class folder dog"),
                            ("broken", "--data_dir broken: no image of the class dog can be read"),
                            ("other", "train has the classes cat, dog, owl, val cat, cow, dog"),
                            ("dark", "no readable image to evaluate on; --holdout N takes"),
                            ("val_only", "--data_dir val_only has no folder train: nothing to train on")):
        with pytest.raises((ValueError, OSError)) as error:
            main(["--data_dir", folder] if folder else "--data folder")
        assert message in str(error.value) and "\n" not in str(error.value)
    assert not Path("out").exists()


# --- which folders are classes --------------------------------------------------------------------

def test_test_is_taken_for_val_where_there_is_no_val_and_it_is_said(capsys):
    make("photos/train", 3)
    make("photos/test", 2)
    train, val = data_of("photos")
    assert len(train.labels) == 9 and len(val.labels) == 6 and train.classes == val.classes == CLASSES
    assert "9 training, 6 val images, 3 classes, 0 unreadable files, test/ taken for val/" in capsys.readouterr().out
    make("photos/val", 1)
    assert len(data_of("photos")[1].labels) == 3 and "taken" not in capsys.readouterr().out


def test_a_class_may_be_called_train_or_test():
    make("photos", 2, classes=["train", "test", "bus"])
    photos = find_photos("photos")
    assert photos.classes == ["bus", "test", "train"] and len(photos.train) == 6 and not photos.val
    make("photos/val", 2)
    with pytest.raises(ValueError, match="photos has images in bus, test, train beside class folders in photos/val"):
        find_photos("photos")


def test_hidden_folders_and_files_do_not_count_and_other_files_are_counted(capsys):
    make("photos", 3)
    make("photos", 1, classes=[".ipynb_checkpoints", ".git"])
    shutil.copy("photos/cat/0.png", "photos/cat/._0.png")
    for name in ("a.heic", "b.HEIC", "c.tif", "README"):
        Path("photos/dog", name).write_bytes(b"")
    assert find_photos("photos").classes == CLASSES and len(find_photos("photos").train) == 9
    data_of("photos", holdout=2)
    assert "0 unreadable files, 4 other files left out (.HEIC, .heic, .tif, without ending)" in capsys.readouterr().out
    make("net/val", 1, classes=["n01", ".git"])
    assert ImageTree("net", "val").classes == ["n01"]


def test_names_that_are_not_utf_8(capfd):
    make("photos", 3)
    for name in (b"photos/cat/\xe9.png", b"photos/dog/\xe9.png"):
        shutil.copy("photos/cat/0.png", os.fsdecode(name))
    Path(os.fsdecode(b"photos/cat/\xe9.png")).write_bytes(b"nothing")
    train, _ = data_of("photos", holdout=2)                     # of a file: it is read, or named as far as that goes
    assert len(train.labels) == 8 and "cannot decode photos/cat/\\udce9.png" in "".join(capfd.readouterr())
    os.rename("photos/owl", os.fsdecode(b"photos/hibou\xe9"))
    with pytest.raises(ValueError, match=r"the name of the class folder hibou\\udce9 is not UTF-8") as error:
        find_photos("photos")
    str(error.value).encode()                                   # of a class: refused, in a line that can be printed


# --- what is evaluated ----------------------------------------------------------------------------

def test_another_folder_is_evaluated_whole_or_its_val_folder(capsys):
    make("photos", 10)
    make("photos2", 4, classes=["bus", "car"])
    trained = dict(data="folder", data_dir="photos", holdout=6)
    assert len(evaluated("photos", **trained).labels) == 6 and not capsys.readouterr().out
    other = evaluated("photos2", **trained)                     # its classes are for the caller to judge
    assert len(other.labels) == 8 and other.classes == ["bus", "car"]
    said = capsys.readouterr().out
    assert said == "photos2: not the folder of training (photos): all of its 8 images are evaluated\n"
    assert len(evaluated("photos", **{**trained, "data": "cifar10"}).labels) == 30
    make("photos3/val", 3)
    assert len(evaluated("photos3", **trained).labels) == 9     # val/ alone is a folder
    make("photos3/train", 1)
    assert len(evaluated("photos3", **trained).labels) == 9
    assert len(evaluated("photos3").labels) == 9                # a network that tells nothing of its training
    spoil("photos2")
    with pytest.raises(ValueError, match="--data_dir photos2: no image can be read"):
        evaluated("photos2", **trained)
    with pytest.raises(ValueError, match="--data_dir photos has 30 images, but training held 30 of them out"):
        evaluated("photos", data="folder", data_dir="photos", holdout=30)


# --- what is held out -----------------------------------------------------------------------------

def test_classes_with_few_training_images_are_named(capsys):
    make("photos", 8)
    order = sorted(find_photos("photos").train, key=lambda file: name_hash(os.path.relpath(file[0], "photos")))
    for path, label in find_photos("photos").train:
        if label == order[0][1] and path != order[0][0]:
            os.remove(path)                                 # the first to be held out is its last
    data_of("photos", holdout=2)
    said = f"warning: training images of 1 of 3 classes are few ({CLASSES[order[0][1]]} 0): from fewer than 5"
    assert said in capsys.readouterr().out
    for count, warned in ((5, False), (4, True)):
        make(f"{count}/train", count)
        make(f"{count}/val", 1)
        data_of(str(count))
        assert ("are few" in capsys.readouterr().out) == warned


def held_out(root, n):
    """The grey levels of the held-out images of a folder whose images are of one level each."""
    train, held = ({*split.images[:, 0, 0, 0].tolist()} for split in load_photos(find_photos(root), 32, n)[:2])
    assert not train & held and len(held) == n
    return held


def test_a_file_that_comes_or_goes_moves_no_other_out_of_training():
    make("photos", 12)
    files = [path for path, _ in find_photos("photos").train]
    for level, path in enumerate(files):
        Image.new("RGB", (32, 32), (level,) * 3).save(path)
    before = held_out("photos", 6)
    os.remove(next(path for level, path in enumerate(files) if level not in before))
    assert len(held_out("photos", 6) - before) == 0
    Image.new("RGB", (32, 32), (99,) * 3).save("photos/cat/new.png")
    assert held_out("photos", 6) - before <= {99}                    # the new one, if any


def test_the_held_out_part_of_a_labelled_folder_stays_when_a_file_comes():
    names = [f"{i:02}" for i in range(40)]
    for part in ("images", "annotations"):
        Path("mine", part).mkdir(parents=True)
        for name in names:
            Image.new("L", (48, 32), 1).save(Path("mine", part, f"{name}.png"))
    assert OwnFolder("mine", "training").sides == [32] * 32                # the short ones
    before = OwnFolder("mine", "validation").names
    assert len(before) == 8 and before == sorted(sorted(names, key=name_hash)[:8])
    for part in ("images", "annotations"):
        Image.new("L", (32, 32), 1).save(Path("mine", part, "000.png"))
    assert len(set(OwnFolder("mine", "validation").names) - {*before, "000"}) == 0
    assert not set(OwnFolder("mine", "training").names) & set(OwnFolder("mine", "validation").names)
    flags = Namespace(data="folder", data_dir="mine", num_classes=2)
    for trained, n in ((None, 8), (dict(data_dir="./mine"), 8), (dict(data_dir="other"), 41), ({}, 41)):
        assert len(load_split(flags, "validation", trained)) == n          # nothing of another folder was held out
    for part in ("images", "annotations"):
        os.rename(Path("mine", part), "part")
        Path("mine", part).mkdir()
        os.rename("part", Path("mine", part, "validation"))                # validation/ alone is a folder
    assert len(load_split(flags, "validation", {})) == len(load_split(flags, "validation")) == 41
    with pytest.raises(ValueError, match="has no folder mine/images/training"):
        load_split(flags, "training")


def test_what_a_labelled_folder_holds_is_found_and_said():
    for part in ("images", "annotations"):
        Path("mine", part).mkdir(parents=True)
    label = np.array([[0, 1, 2, 5], [255, 1, 2, 5]], np.uint8).repeat(10, 0).repeat(10, 1)
    for i in range(10):
        Image.fromarray(label).save(f"mine/annotations/{i}.png")
        Image.new("RGB", (40, 20)).save(f"mine/images/{i}.jpg")
    train, val, words = load_folder("mine")
    assert words == ("8 training, 2 held-out images, 5 classes, 25.0 % of the pixels ignored, 0 unreadable, "
                     "0 unmatched files")
    assert train.classes == val.classes == [f"class {k}" for k in range(5)] and train[0][1].unique().numel() == 4
    Path("mine/images/0.jpg").write_bytes(b"")
    Path("mine/images/1.jpg").unlink()
    assert load_folder("mine")[2].endswith("1 unreadable, 1 unmatched files")
    Path("mine/classes.txt").write_text("\n".join("abcdef"))
    assert load_folder("mine")[0].classes == list("abcdef")
    assert folder_recipe(100, 200) == dict(size=160, patch_size=16, batch_size=8, epochs=240, eval_every=24)
    small = [folder_recipe(n, side) for n, side in ((1, 20), (9, 64), (9, 159))]
    assert [(recipe["size"], recipe["patch_size"]) for recipe in small] == [(32, 4), (64, 8), (96, 8)]
    assert [folder_recipe(n, 32)["epochs"] for n in (1, 9000)] == [400, 8]


# --- single files ---------------------------------------------------------------------------------

@pytest.mark.parametrize("n, side, size, batch, epochs, model", [
    (4, 30, 32, 2, 200, "nano"), (40, 64, 64, 8, 200, "nano"), (200, 95, 64, 32, 200, "nano"),
    (3000, 500, 96, 64, 64, "nano"), (30000, 32, 32, 64, 8, "micro")])
def test_the_recipe_follows_the_number_and_size_of_the_images(monkeypatch, n, side, size, batch, epochs, model):
    monkeypatch.setattr(Photos, "median_side", lambda self: side)
    recipe = Photos(["a", "b"], [("a.png", 0)], [], "photos").recipe(n)
    assert recipe == dict(model=model, image_size=size, patch_size=size // 8, epochs=epochs, batch_size=batch,
                          pad=size // 8)


def test_the_median_side_is_of_files_whose_header_can_be_read(monkeypatch):
    make("photos", 3, side=50)
    open_image = Image.open

    def bomb(file):
        image = open_image(file)
        if image.size[1] == 52:
            raise Image.DecompressionBombError("too large")
        return image
    with monkeypatch.context() as patch:
        patch.setattr(Image, "open", bomb)
        assert find_photos("photos").median_side() == 50.5       # of 50 and 51 pixels
    spoil("photos")
    assert find_photos("photos").median_side() == 0


def test_an_animated_gif_by_another_name_is_its_first_frame():
    frames = [Image.new("RGB", (40, 30), colour) for colour in ("red", "blue", "green")]
    frames[0].save("a.gif", save_all=True, append_images=frames[1:])
    image = decode(read_bytes("a.gif"), "a.jpg")
    assert image.shape == (3, 30, 40) and image[:, 0, 0].tolist() == [255, 0, 0]
