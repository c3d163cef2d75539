"""Test your own photos and masks: which files are found, held out and evaluated."""

import os
from argparse import Namespace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

import common
import train_cls
import train_seg
from common import InputError
from data.datasets import largest_share, load_data, load_test
from data.decode import decode, read_bytes
from data.folders import hold_out_by_name, median_side, name_hash, print_once
from data.masks import find_pairs, find_values, mask_flags, mask_recipe, own_folder
from data.photos import find_photos, load_photos, middle_square, photo_flags, photo_recipe
from data.views import load_segmentation
from processes import Started, finish
from runs import call, make_pairs, refused

CLASSES = ["cat", "dog", "owl"]
main = partial(call, train_cls.main)


@pytest.fixture(autouse=True)
def an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    print_once.cache_clear()


def make(root, count, side=40, classes=CLASSES):
    """Write `count` images per class, root/<class>/<i>.png, with `side` pixels or more."""
    rng = np.random.default_rng(0)
    for name in classes:
        Path(root, name).mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(0, 256, (side + i % 3, side + 5, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(Path(root, name, f"{i}.png"))


def evaluated(root, **trained):
    """Load the images for an evaluation on this folder."""
    return load_test(Namespace(data="folder", data_dir=root, device="cpu"), trained, 32, None)


# --- held-out files -------------------------------------------------------------------------------

def test_one_tenth_validates_another_tenth_is_reported():
    for n, n_val, n_test in ((0, 0, 0), (1, 0, 0), (2, 0, 1), (3, 1, 1), (14, 1, 1), (40, 4, 4)):
        paths = [f"root/a/{i}.jpg" for i in range(n)]
        val, test = hold_out_by_name(paths, "root")
        assert (len(val), len(test)) == (n_val, n_test) and not val & test
        order = sorted(paths, key=lambda path: name_hash(path[5:]))
        assert test == {*order[:n_test]} and val == {*order[n - n_val:]}
    assert hold_out_by_name(paths, "root", test=False)[1] == set()
    assert hold_out_by_name(["a", "b"], "", test=False)[0]                  # val/ is reported


def test_new_files_move_at_most_one_other():
    for n in (3, 12, 40):
        paths = [f"a/{i}" for i in range(n)]
        before = hold_out_by_name(paths)
        for i in range(50):
            new = f"a/new{i}"
            for old, now in zip(before, hold_out_by_name([*paths, new])):
                assert len((old ^ now) - {new}) <= 1


def test_held_out_photos_are_disjoint():
    counts = dict(zebra=3, cat=5, dog=15, owl=20)
    for name, count in counts.items():
        make("photos", count, classes=[name])
    classes, files = find_photos("photos", keep_best=True)
    labels = {part: [[label for _, label in found].count(k) for k in range(4)]
              for part, found in files.items()}
    assert classes == ["cat", "dog", "owl", "zebra"]
    assert labels == dict(train=[3, 11, 16, 1], val=[1, 2, 2, 1], test=[1, 2, 2, 1],
                          all=[5, 15, 20, 3])
    assert len({*files["train"], *files["val"], *files["test"]}) == 43 == len(files["all"])
    assert find_photos("photos")[1]["test"] == files["test"]    # keep_best does not move it
    assert largest_share(load_photos("photos", "test", 32)) == pytest.approx(100 / 3)
    make("split/train", 12)
    make("split/val", 3)                                        # val/ is reported
    _, files = find_photos("split", keep_best=True)
    assert [len(files[part]) for part in ("train", "val", "test", "all")] == [33, 3, 9, 9]
    assert all("split/train" in path for path, _ in files["train"] + files["val"])
    assert all("split/val" in path for path, _ in files["test"])


def test_held_out_masks_are_disjoint():
    masks("mine", [0, 1], n=40)
    files = find_pairs("mine", keep_best=True)
    stems = {part: {Path(image).stem for image, _ in found} for part, found in files.items()}
    order = sorted((f"{i:02}" for i in range(40)), key=name_hash)
    assert (stems["test"], stems["val"], stems["train"]) == ({*order[:4]}, {*order[-4:]},
                                                             {*order[4:-4]})
    make_pairs("split")                                         # validation/ is reported
    given = find_pairs("split", keep_best=True)
    assert [len(given[part]) for part in ("train", "val", "test", "all")] == [8, 1, 5, 5]
    assert all("validation" in image for image, _ in given["test"])
    args = Namespace(data="ade20k", data_dir="split", num_classes=4, keep_best=True)
    parts = {part: {image for image, _ in load_segmentation(args, part).files}
             for part in ("train", "val", "test")}
    assert [len(found) for found in parts.values()] == [8, 1, 5]
    args.keep_best = False
    assert {image for image, _ in load_segmentation(args, "train").files} == (parts["train"]
                                                                            | parts["val"])


# --- photos ---------------------------------------------------------------------------------------

def test_one_flag_trains_and_keeps_the_best(capsys):
    make("photos", 10)
    Path("photos/owl/9.png").write_bytes(b"nothing")
    Path("photos/owl/notes.heic").write_text("no image")
    main("--data_dir photos --max_steps 18 --epochs 3 --lr 0.05")
    out = capsys.readouterr().out
    for words in ("24 to train on, 3 to choose best.pt (validation), 3 to report", "image_size=32",
                  "batch_size=4", "keep_best=True",
                  "skipping: cannot decode photos/owl/9.png", "validation accuracy", "best.pt"):
        assert words in out, words
    assert out.count("owl/notes.heic") == 1                 # named once

    # an evaluation loads images that were used neither to train nor to choose best.pt
    run, best = common.load("out/folder_symmetric"), common.load("out/folder_symmetric/best.pt")
    args = run["args"]
    assert [args[name] for name in ("data", "data_dir", "keep_best")] == ["folder", "photos", True]
    assert run["classes"] == CLASSES and "top5" not in run["metrics"]
    held = load_photos("photos", "test", 32)
    for root in ("photos", "./photos", os.path.abspath("photos")):
        assert torch.equal(evaluated(root, **args).images, held.images)
    train, val = load_data(Namespace(**args), "cpu")
    seen = {image.numpy().tobytes() for part in (train, val) for image in part.images}
    assert not seen & {image.numpy().tobytes() for image in held.images} and len(seen) == 26
    losses = {row["step"]: row["eval"]["loss"]
              for row in common.read_log("out/folder_symmetric/log.jsonl") if "eval" in row}
    assert best["step"] == min(losses, key=losses.get)
    assert best["metrics"]["loss"] == min(losses.values())
    assert run["best"]["step"] == best["step"]


def test_small_class_ends_selection_with_a_line(capsys):
    make("photos", 10, classes=["cat", "dog"])
    make("photos", 2, classes=["owl"])
    main("--data_dir photos --max_steps 1 --out_dir a")
    out = capsys.readouterr().out
    assert "class owl has too few images" in out and "last.pt is reported" in out
    assert "keep_best=False" in out and "test accuracy" in out and not Path("a/best.pt").exists()
    assert "cat 9 + 1, dog 9 + 1, owl 1 + 1" in out
    first = common.load("a")["args"]
    main("--resume a --max_steps 2")                        # keeps the chosen flags
    again = common.load("a")
    assert again["step"] == 2
    assert {**again["args"], "resume": None, "max_steps": 1, "out_dir": "a"} == first


def test_folders_without_a_training_are_one_line():
    make("one", 2, classes=["cat"])
    make("single", 1)
    for name in ("broken", "other/train", "val_only/val", "no_val/train"):
        make(name, 4)
    Path("no_val/val").mkdir()
    make("other/val", 1, classes=["cat", "dog", "cow"])
    for split in ("train", "val"):
        make(f"broken_val/{split}", 4)
    for path in (*Path("broken/dog").iterdir(), *Path("broken_val/val").rglob("*.png")):
        path.write_bytes(b"nothing")
    for folder, words in (("one", "one has 1"), ("broken", "dog"), ("other", "cow"),
                          ("single", "to evaluate on"), ("no_val", "no_val/val"),
                          ("val_only", "class cat in val_only/train")):
        assert words in refused(train_cls, "--data_dir", [folder])
    assert "in broken_val/val that can be read" in refused(train_cls, "--data_dir broken_val",
                                                           "--no-keep_best")
    assert "--holdout" in refused(train_cls, "--data_dir broken_val --holdout 3")
    assert not Path("out").exists()


def test_no_class_is_left_out_silently(capsys):
    make("photos", 3)
    make("photos/horse", 3, classes=["indoor"])             # one level deeper
    make("photos", 2, classes=["bird"])
    for path in Path("photos/bird").iterdir():              # another format
        path.rename(path.with_suffix(".heic"))
    Path("photos/fish").mkdir()                             # empty
    make("photos/cat", 2, classes=["more", "album.jpg"])    # folders inside a class
    os.symlink("loop", "photos/loop")                       # a link that leads to itself
    make("photos", 1, classes=[".ipynb_checkpoints"])       # hidden
    Path("photos/cat/._0.png").write_bytes(b"")
    classes, files = find_photos("photos")
    assert classes == CLASSES and len(files["all"]) == 9
    out = capsys.readouterr().out
    for words in ("horse (it contains indoor)", "bird (it contains 0.heic", "fish (it contains no",
                  "cat/album.jpg, cat/more (2 in all)"):
        assert words in out, words
    assert "._0" not in out and "ipynb" not in out
    make("deep/all", 3)
    line = refused(train_cls, "--data_dir deep")
    assert "deep has 0 folders" in line and "all (it contains cat" in capsys.readouterr().out


def test_names_outside_utf_8_are_printed():
    """Run the script in a process, because pytest accepts text that a terminal rejects."""
    make("photos", 4)
    os.rename("photos/owl", os.fsdecode(b"photos/\xfchu"))
    Path(os.fsdecode(b"photos/cat/\xe9.png")).write_bytes(b"nothing")
    Path(os.fsdecode(b"photos/cat/\xe9.heic")).write_bytes(b"nothing")
    os.rename("photos", os.fsdecode(b"ph\xf6tos"))
    out = finish(Started(train_cls.main, [
        "--data_dir", os.fsdecode(b"ph\xf6tos"), "--max_steps", "1", "--out_dir",
        os.fsdecode(b"\xe4"), "--no-keep_best", "--device", "cpu"]))
    for words in ("cannot decode ph\\xf6tos/cat/\\xe9.png", "cat/\\xe9.heic", "\\xfchu"):
        assert words in out, words
    assert common.load(os.fsdecode(b"\xe4"))["classes"] == ["\\xfchu", "cat", "dog"]


def test_another_folder_is_evaluated_whole(capsys):
    make("photos", 10)
    make("photos2", 4, classes=["bus", "car"])
    trained = dict(data="folder", data_dir="photos", keep_best=True)
    assert len(evaluated("photos", **trained).labels) == 3 and not capsys.readouterr().out
    other = evaluated("photos2", **trained)  # the caller checks its classes
    assert len(other.labels) == 8 and other.classes == ["bus", "car"]
    assert "photos2" in capsys.readouterr().out
    assert len(evaluated("photos", **{**trained, "data": "cifar10"}).labels) == 30
    make("photos3/val", 3)
    assert len(evaluated("photos3", **trained).labels) == 9     # val/ alone is enough


def test_only_missing_flags_are_chosen():
    make("photos", 10)
    names = ("model", "image_size", "epochs", "pad", "keep_best")
    args = Namespace(data="folder", data_dir="photos", patch_size=2, batch_size=7,
                     **dict.fromkeys(names))
    assert photo_flags(args) == dict(model="nano", image_size=32, epochs=9, pad=4,
                                     keep_best=True)                        # for 24 images
    args.image_size = 48
    assert photo_flags(args)["pad"] == 6
    vars(args).update(photo_flags(args))
    assert photo_flags(args) == {}
    make("split/train", 6, side=70)
    make("split/val", 2)
    args = Namespace(**{**dict.fromkeys(vars(args)), "data": "folder", "data_dir": "split"})
    chosen = photo_flags(args)
    assert (chosen["image_size"], chosen["patch_size"], chosen["keep_best"]) == (64, 8, True)


@pytest.mark.parametrize("kind", ["jpg", "png", "webp"])
def test_phone_photos_and_their_masks_are_upright(kind):
    for part in ("images", "annotations"):
        Path("mine", part).mkdir(parents=True)
    upright = np.zeros((48, 32, 3), np.uint8)
    upright[:20, :16] = 255
    for orientation, turn in ((3, Image.ROTATE_180), (6, Image.ROTATE_90), (8, Image.ROTATE_270)):
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        lying = Image.fromarray(upright).transpose(turn)
        lying.save(f"mine/images/{orientation}.{kind}", exif=exif, quality=95)
        mask = Image.fromarray(upright[..., 0])
        mask.save(f"mine/annotations/{orientation}.png")
    lying.convert("L").save(f"mine/annotations/{orientation}.png", exif=exif)   # like its photo
    tree = own_folder("mine", "all", [0, 255], [])
    for image, label in tree:
        assert image.shape[1:] == label.shape == (48, 32)
        assert (image[0].int() - 255 * label.int()).abs().max() < 30
        assert torch.equal(label.bool(), torch.from_numpy(upright[..., 0]).bool())


def test_recipes_follow_number_and_size():
    assert [photo_recipe(40, side)["image_size"] for side in (0, 30, 64, 500)] == [32, 32, 64, 96]
    # epochs: 1.8 sqrt(n), but at most 3,000 steps, and at least 8 epochs
    assert [photo_recipe(n, 32)["epochs"] for n in (40, 200, 1000, 30000)] == [11, 25, 57, 8]
    assert [photo_recipe(n, 32)["batch_size"] for n in (9, 39, 40, 320)] == [2, 4, 8, 64]
    assert mask_recipe(40, 64) == dict(size=64, patch_size=8, batch_size=8, epochs=400,
                                         eval_every=40)
    assert [mask_recipe(n, 300)["epochs"] for n in (500, 9000)] == [48, 8]
    make("photos", 3, side=50)
    paths = [path for path, _ in find_photos("photos")[1]["all"]]
    assert median_side(paths) == 51
    for path in paths:
        Path(path).write_bytes(b"nothing")
    assert median_side(paths) == 0
    image = torch.randint(0, 256, (3, 32, 64), dtype=torch.uint8)
    assert torch.equal(middle_square(image, 32), image[:, :, 16:48])


def test_vanished_images_are_named():
    masks("mine", [0, 1], n=2)
    labelled = own_folder("mine", "all", [0, 1], [])
    for i, path in enumerate(("images/00.jpg", "annotations/01.png")):
        os.remove(f"mine/{path}")
        with pytest.raises(InputError, match=path):
            labelled[i]


def test_animated_gif_becomes_its_first_frame():
    frames = [Image.new("RGB", (40, 30), colour) for colour in ("red", "blue", "green")]
    frames[0].save("a.gif", save_all=True, append_images=frames[1:])
    image = decode(read_bytes("a.gif"), "a.jpg")
    assert image.shape == (3, 30, 40) and image[:, 0, 0].tolist() == [255, 0, 0]


# --- masks ----------------------------------------------------------------------------------------

def masks(root, values, n=20, mode="L"):
    """Write n pairs whose annotations contain these values, in blocks."""
    for part in ("images", "annotations"):
        Path(root, part).mkdir(parents=True)
    for i in range(n):
        label = np.array(values, np.uint8).repeat(8)[None].repeat(40, 0)
        path = Path(root, "annotations", f"{i:02}.png")
        Image.fromarray(np.roll(label, i, 1)).convert(mode).save(path)
        Image.fromarray(np.dstack([label // 2 + 60] * 3)).save(Path(root, "images", f"{i:02}.jpg"))


@pytest.mark.parametrize("values, ignore, classes, label_255", [
    ([0, 1], None, [0, 1], False), ([0, 255], None, [0, 255], False),
    ([0, 1, 2, 5, 255], None, [0, 1, 2, 5], True),
    ([0, 1, 2, 255], [0, 255], [1, 2], True), ([3, 7], [], [3, 7], False)])
def test_the_values_of_masks_are_their_classes(values, ignore, classes, label_255):
    masks("mine", values)
    found, ignored = find_values("mine", ignore)
    assert found == classes
    _, label = own_folder("mine", "train", found, ignored)[0]
    assert sorted(label.unique().tolist()) == [*range(len(classes)), *[255] * label_255]


def test_rare_values_are_named_with_the_remedy(capsys):
    masks("soft", [0, 200])
    for i in range(20):
        label = np.array(Image.open(f"soft/annotations/{i:02}.png"))
        label[0, 0] = 50 + 5 * i                            # one pixel of 640 in each mask
        Image.fromarray(label).save(f"soft/annotations/{i:02}.png")
    assert len(find_values("soft")[0]) == 22
    line = capsys.readouterr().out.splitlines()[-1]
    assert "20 of these values" in line and "50, 55" in line and "--ignore 255 50 55" in line


def test_one_bit_masks_and_classes_txt():
    masks("bits", [0, 255], mode="1")
    assert len(find_values("bits")[0]) == 2
    masks("mine", [0, 1, 2])
    Path("mine/classes.txt").write_text("floor\nwall\nlamp\nnever seen\n")
    values, ignore = find_values("mine")
    assert values == [0, 1, 2, 3]
    assert own_folder("mine", "train", values, ignore).classes[2] == "lamp"
    Path("mine/classes.txt").write_text("wall\nlamp\n")
    assert find_values("mine", [0]) == ([1, 2], [0])
    masks("one", [4])
    for root in ("mine", "one"):  # a value without a name; one class
        with pytest.raises(InputError, match=f"--data_dir {root}.*--ignore"):
            find_values(root)


def test_masks_need_one_flag(capsys):
    masks("mine", [0, 255])
    call(train_seg.main,
         "--data_dir mine --max_steps 2 --num_workers 0 --out_dir a")
    out, run = capsys.readouterr().out, common.load("a")
    for words in ("2 classes", "chosen flags: size=32", "validation mean IoU",
                  "16 to train on, 2 to choose best.pt (validation), 2 to report"):
        assert words in out, words
    assert run["classes"] == ["value 0", "value 255"] and Path("a/best.pt").exists()
    args = Namespace(**run["args"])
    test = load_segmentation(args, "test", run["args"])
    assert len(test) == 2 and test.values == [0, 255] and run["metrics"]["classes"] == 2
    others = [pair for part in ("train", "val") for pair in load_segmentation(args, part).files]
    assert len(others) == 18 and not {*others} & {*test.files}
    call(train_seg.main, "--resume a --max_steps 3")
    elsewhere = load_segmentation(args, "test", {**run["args"], "data_dir": "other"})
    assert len(elsewhere) == 20                     # all of another folder
    names = ("ignore", "size", "patch_size", "batch_size", "epochs", "eval_every", "keep_best")
    flags = Namespace(data="folder", data_dir="mine", backbone="vit.pt", **dict.fromkeys(names))
    assert "patch_size" not in mask_flags(flags)    # the backbone sets it


def test_two_pairs_train_without_selection(capsys):
    masks("two", [0, 1], n=2)
    call(train_seg.main, "--data_dir two --max_steps 1 --num_workers 0 --out_dir a")
    out = capsys.readouterr().out
    assert "last.pt is reported" in out and "test mean IoU" in out
    masks("one", [0, 1], n=1)
    assert "one has 1 pair" in refused(train_seg, "--data_dir one")


def test_every_listing_of_masks_follows_one_rule(capsys):
    masks("mine", [0, 1], n=6)
    for path in Path("mine/annotations").glob("*.png"):
        path.rename(path.with_suffix(".PNG"))               # as Windows writes them
    os.rename("mine/annotations/00.PNG", "linked.png")
    os.symlink(os.path.abspath("linked.png"), "mine/annotations/00.png")
    Path("mine/annotations/more").mkdir()                   # these files are ignored
    Image.new("L", (40, 16), 77).save("mine/annotations/more/00.png")
    Image.new("L", (40, 16), 78).save("mine/annotations/alone.png")
    Path("mine/annotations/03.bmp").write_bytes(b"")
    assert find_values("mine") == ([0, 1], [255]) and len(find_pairs("mine", False)["all"]) == 6
    out = capsys.readouterr().out
    assert "03.bmp, more" in out and "alone" in out and "6 annotations" in out
    Image.new("RGB", (40, 16)).save("mine/images/03.webp")
    with pytest.raises(InputError, match="03.jpg and 03.webp have the same name"):
        find_values("mine")


def palette_png(path, values, palette):
    image = Image.fromarray(values).convert("P")
    image.putpalette(palette)
    image.save(path)


def test_palettes_must_agree_across_files():
    colours = [0, 0, 0, 220, 40, 40, 40, 60, 220]
    for root in ("agree", "differ"):
        masks(root, [0, 1, 2], n=6)
        for path in sorted(Path(root, "annotations").iterdir()):
            palette_png(path, np.array(Image.open(path)), colours)
    assert find_values("agree") == ([0, 1, 2], [255])
    path, values = "differ/annotations/04.png", np.array(Image.open("differ/annotations/04.png"))
    palette_png(path, values.clip(max=1), [*colours[:6], 9, 9, 9])  # unused colours may differ
    assert find_values("differ")[0] == [0, 1, 2]
    palette_png(path, values, [*colours[:3], *colours[6:], *colours[3:6]])
    for find in (find_values, lambda root: [*own_folder(root, "train", [0, 1, 2], [255])],
                 lambda root: own_folder(root, "all", [0, 1, 2], [255])):
        with pytest.raises(InputError, match=r"value 1 .*s/\d\d.png.*s/\d\d.png"):
            find("differ")


def test_mixed_meanings_of_255_need_a_flag():
    """Half of the masks contain 0 and 1, the other half 0 and 255."""
    masks("mixed", [0, 1], n=6)
    for i in range(3):
        path = f"mixed/annotations/0{i}.png"
        Image.fromarray(255 * np.array(Image.open(path))).save(path)
    for find in (find_values, lambda root: own_folder(root, "all", [0, 1], [255])):
        with pytest.raises(InputError, match="annotations/0[0-2].png.*annotations/0[3-5].png"):
            find("mixed")
    assert find_values("mixed", [255]) == ([0, 1], [255])
    masks("white", [0, 255], n=6)                       # the network expects 0 and 1
    with pytest.raises(InputError, match="white.*values \\[0, 255\\]"):
        own_folder("white", "all", [0, 1], [255])


def test_classes_txt_needs_utf_8():
    masks("mine", [0, 1, 2])
    for encoding in ("latin-1", "utf-16"):
        Path("mine/classes.txt").write_bytes("Boden\nWürfel\nKreis\n".encode(encoding))
        assert "classes.txt is not UTF-8" in refused(train_seg, "--data_dir mine")
    for encoding in ("utf-8", "utf-8-sig"):
        Path("mine/classes.txt").write_bytes("Boden\r\nWürfel\r\nKreis".encode(encoding))
        assert own_folder("mine", "all", [0, 1, 2], [255]).classes == ["Boden", "Würfel", "Kreis"]
    with pytest.raises(InputError, match="classes.txt lists 3 classes, expected 2"):
        own_folder("mine", "all", [0, 1], [255])


def test_masks_without_a_training_are_one_line():
    masks("mine", [0, 1])
    assert "--data_dir" in refused(train_seg, "--data folder")
    Image.new("RGB", (40, 40)).save("mine/annotations/03.png")
    assert "03.png" in refused(train_seg, "--data_dir mine")
    for path in Path("mine/images").iterdir():
        path.rename(path.with_stem(f"other_{path.stem}"))
    assert "mine/annotations" in refused(train_seg, "--data_dir mine")
    masks("split/training", [0, 1])
    for part in ("images", "annotations"):                  # no validation/
        Path("split2", part).mkdir(parents=True)
        Path("split/training", part).rename(Path("split2", part, "training"))
    assert "split2/images/validation" in refused(train_seg, "--data_dir split2")
