"""Images of one's own: `train_cls.py --data_dir photos` finds, chooses, trains and says so."""

import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import common
from data import images as data
import eval_robust
import train_cls
from data.images import name_hash
from data.segmentation import OwnFolder, read_pair
from test_data import within_10_seconds
from vit import vit_from_checkpoint

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


def main(*words):
    before = sys.argv
    sys.argv = ["train_cls.py", *words]
    try:
        train_cls.main()
    finally:
        sys.argv = before


def refused(*words):
    """The one line in which the run ends."""
    with pytest.raises((ValueError, OSError)) as error:
        main(*words)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_one_flag_trains_on_a_folder_and_says_first_what_it_found(capsys):
    make("photos", 10)
    Path("photos/owl/9.png").write_bytes(b"nothing")
    Path("photos/owl/notes.txt").write_text("no image")
    main("--data_dir", "photos", "--max_steps", "2")
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("photos: 30 images in 3 classes; chosen for them: ")
    for choice in ("holdout=6", "model=nano", "image_size=32", "patch_size=4", "batch_size=4"):
        assert choice in lines[0].split()
    found = "folder: 23 training, 6 held-out images, 3 classes, 1 unreadable files"
    assert found in lines and lines.index(found) < 4
    assert "photos/owl/9.png" in out + err
    assert "held-out accuracy" in lines[-1] and lines[-1].endswith("out/folder_rpc/last.pt")

    # the checkpoint alone says which images those were, and rebuilds the model
    checkpoint = common.read_checkpoint("out/folder_rpc")
    args = checkpoint["args"]
    assert (args["data"], args["data_dir"], args["holdout"]) == ("folder", "photos", 6)
    photos = data.find_photos(args["data_dir"])
    _, held, bad = data.load_photos(photos, args["image_size"], args["holdout"])
    assert bad == 1 and held.classes == checkpoint["classes"] == CLASSES
    with torch.no_grad():
        logits = vit_from_checkpoint(checkpoint)(held.images.float() / 255)
    right = (logits.argmax(1) == held.labels).float().mean().item()
    assert checkpoint["metrics"]["top1"] == pytest.approx(100 * right)


def test_a_stopped_run_on_a_folder_goes_on_to_the_same_weights():
    make("photos", 10)
    run = ["--data_dir", "photos", "--set", "log_every=1"]
    main(*run, "--max_steps", "4", "--out_dir", "whole")
    main(*run, "--max_steps", "2", "--out_dir", "parts")
    main("--resume", "parts", "--max_steps", "4")
    whole, parts = (common.read_checkpoint(folder) for folder in ("whole", "parts"))
    assert whole["metrics"] == parts["metrics"]
    assert all(torch.equal(whole["model"][name], w) for name, w in parts["model"].items())
    same = ("model", "image_size", "patch_size", "batch_size", "epochs", "pad", "holdout")
    assert all(whole["args"][name] == parts["args"][name] for name in same)


def test_a_run_that_torchrun_starts_again_goes_on(monkeypatch):
    make("photos", 10)
    main("--data_dir", "photos", "--max_steps", "2", "--out_dir", "a")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    main("--data_dir", "photos", "--max_steps", "2", "--out_dir", "a")
    assert common.read_checkpoint("a")["step"] == 2
    assert Path("a/log.jsonl").read_text().count('"eval"') == 1


def test_a_val_folder_is_evaluated_on_and_flags_win_over_what_is_chosen(capsys):
    make("photos/train", 6, side=70)
    make("photos/val", 2)
    main("--data_dir", "photos", "--max_steps", "1", "--image_size", "48", "--set", "pad=1")
    out = capsys.readouterr().out
    assert "18 training, 6 val images, 3 classes, 0 unreadable files" in out
    args = common.read_checkpoint("out/folder_rpc")["args"]
    chosen = [args[name] for name in ("image_size", "patch_size", "pad", "holdout")]
    assert chosen == [48, 8, 1, 0]                              # images of 70 pixels: 64 in 8 x 8


@pytest.mark.parametrize("count, side, size, batch, epochs, model", [
    (4, 30, 32, 2, 200, "nano"), (40, 64, 64, 8, 200, "nano"), (200, 95, 64, 32, 200, "nano"),
    (400, 375, 96, 64, 200, "nano"), (3000, 500, 96, 64, 64, "nano"),
    (30000, 32, 32, 64, 8, "micro")])
def test_the_recipe_follows_the_number_and_size_of_the_images(monkeypatch, count, side, size, batch,
                                                              epochs, model):
    files = [("a.png", 0)] * count
    photos = data.images.Photos(["a", "b"], files, files, "photos")
    monkeypatch.setattr(data.images.Photos, "median_side", lambda self: side)
    monkeypatch.setattr(data, "find_photos", lambda root: photos)
    monkeypatch.setattr(sys, "argv", ["train_cls.py", "--data_dir", "photos"])
    args = train_cls.get_args()
    got = args.image_size, args.batch_size, args.epochs, args.model
    assert got == (size, batch, epochs, model)
    assert args.image_size == 8 * args.patch_size == 8 * args.pad and args.data == "folder"


def test_the_median_side_is_of_files_whose_header_can_be_read():
    make("photos", 3, side=50)
    Path("photos/cat/0.png").write_bytes(b"nothing")
    assert data.find_photos("photos").median_side() == 51
    for path in Path("photos").glob("*/*"):
        path.write_bytes(b"nothing")
    assert data.find_photos("photos").median_side() == 0


def test_a_folder_that_cannot_be_trained_on_is_named_in_one_line():
    assert "--data folder needs --data_dir" in refused("--data", "folder")
    assert "--data_dir nowhere is not a folder" in refused("--data_dir", "nowhere")
    Path("empty").mkdir()
    assert "--data_dir empty has 0 class folders" in refused("--data_dir", "empty")
    make("one", 2, classes=["cat"])
    assert "--data_dir one has 1 class folders" in refused("--data_dir", "one")
    make("photos", 4)
    shutil.copytree("photos", "hole")
    shutil.rmtree("hole/dog")
    Path("hole/dog").mkdir()
    assert "--data_dir hole: no image in the class folder dog" in refused("--data_dir", "hole")
    for path in Path("photos/dog").iterdir():
        path.write_bytes(b"nothing")
    line = refused("--data_dir", "photos")
    assert "--data_dir photos: no image of the class dog can be read" in line
    make("split/train", 4)
    make("split/val", 1, classes=["cat", "dog", "cow"])
    line = refused("--data_dir", "split")
    assert "train has the classes cat, dog, owl, val cat, cow, dog" in line
    shutil.rmtree("split/val")
    make("split/val", 1)
    for path in Path("split/val").glob("*/*"):
        path.write_bytes(b"nothing")
    assert "no readable image to evaluate on; --holdout N takes" in refused("--data_dir", "split")
    assert not Path("out").exists()


def test_a_class_that_is_held_out_whole_is_named(capsys):
    make("photos", 8)
    order = sorted(data.find_photos("photos").train,
                   key=lambda file: name_hash(os.path.relpath(file[0], "photos")))
    for path, label in data.find_photos("photos").train:
        if label == order[0][1] and path != order[0][0]:
            os.remove(path)                                 # the first to be held out is its last
    warning = f"warning: no image of the class {CLASSES[order[0][1]]} is left to train on"
    main("--data_dir", "photos", "--max_steps", "1", "--holdout", "2")
    assert capsys.readouterr().out.count(warning) == 1
    make("more", 8)
    main("--data_dir", "more", "--max_steps", "1", "--holdout", "2")
    assert "warning" not in capsys.readouterr().out


def test_an_animated_gif_by_another_name_is_its_first_frame():
    frames = [Image.new("RGB", (40, 30), colour) for colour in ("red", "blue", "green")]
    frames[0].save("a.gif", save_all=True, append_images=frames[1:])
    os.rename("a.gif", "a.jpg")
    image = data.decode(data.images.read_bytes("a.jpg"), "a.jpg")
    assert image.shape == (3, 30, 40) and image[:, 0, 0].tolist() == [255, 0, 0]


def test_a_file_that_pil_calls_a_bomb_does_not_stop_the_run(monkeypatch):
    make("photos", 3, side=50)
    open_image = Image.open

    def bomb(file):
        image = open_image(file)
        if image.size[1] == 52:
            raise (Image.DecompressionBombError if image.size[0] == 55 else ValueError)("too large")
        return image
    monkeypatch.setattr(Image, "open", bomb)
    assert data.find_photos("photos").median_side() == 50.5           # of 50 and 51 pixels


def test_another_folder_of_too_few_images_is_refused_by_its_name():
    make("photos", 10)
    make("few", 2)
    main("--data_dir", "photos", "--max_steps", "1", "--holdout", "6", "--out_dir", "a")
    with pytest.raises(ValueError, match="--data_dir few has 6 images, but 6 are to be those that"):
        eval_robust_main("--ckpt", "a", "--data_dir", "few", "--measures", "clean")


def eval_robust_main(*words):
    before = sys.argv
    sys.argv = ["eval_robust.py", "--device", "cpu", *words]
    try:
        eval_robust.main()
    finally:
        sys.argv = before


def held_out(root, n):
    """The grey levels of the held-out images of a folder whose images are of one level each."""
    train, held, _ = data.load_photos(data.find_photos(root), 32, n)
    levels = [split.images[:, 0, 0, 0].tolist() for split in (train, held)]
    assert not set(levels[0]) & set(levels[1]) and len(levels[1]) == n
    return set(levels[1])


def test_a_file_that_comes_or_goes_moves_no_other_out_of_training():
    files = [Path("photos", name, f"{i}.png") for name in CLASSES for i in range(12)]
    for level, path in enumerate(files):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (level,) * 3).save(path)
    before = held_out("photos", 6)
    trained = next(path for level, path in enumerate(files) if level not in before)
    for change in (trained.unlink, lambda: Image.new("RGB", (32, 32)).save("photos/cat/new.png")):
        change()
        assert len(held_out("photos", 6) - before) <= 1              # the new one, if any


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


def test_a_pipe_in_a_folder_of_ones_own_is_not_waited_for():
    make("photos", 3, side=50)
    Path("photos/cat/0.png").unlink()
    os.mkfifo("photos/cat/0.png")
    assert within_10_seconds(data.find_photos("photos").median_side) == 51
    for pair in (("photos/cat/1.png", "photos/cat/0.png"), ("photos/cat/0.png", "photos/cat/1.png")):
        with pytest.raises(FileNotFoundError, match="photos/cat/0.png is not a file"):
            within_10_seconds(read_pair, *pair)


def test_a_class_with_a_single_image_may_be_held_out():
    make("photos", 1, classes=[f"n{i}" for i in range(10)])
    main("--data_dir", "photos", "--max_steps", "1")
    assert common.read_checkpoint("out/folder_rpc")["metrics"]["images"] == 2
