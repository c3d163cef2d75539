"""Images of one's own, whole or with masks: what is found, held out and evaluated."""

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
from data import views
from data.decode import decode, name_hash, read_bytes
from data.datasets import choose, largest_share, load_test
from data.masks import find_values, folder_recipe, own_folder
from data.photos import fifth, find_photos, load_photos, median_side, recipe, square
from runs import call, make_pairs, refused

CLASSES = ["cat", "dog", "owl"]
main = partial(call, train_cls.main)


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


def evaluated(root, **trained):
    """What an evaluation on this folder looks at."""
    return load_test(Namespace(data="folder", data_dir=root, device="cpu"), trained, 32, None)


# --- photos ---------------------------------------------------------------------------------------

def test_one_flag_trains_on_a_folder_and_keeps_the_weights_with_the_lowest_loss(capsys):
    make("photos", 10)
    Path("photos/owl/9.png").write_bytes(b"nothing")
    Path("photos/owl/notes.heic").write_text("no image")
    main("--data_dir photos --max_steps 18 --epochs 3 --lr 0.05")
    out = capsys.readouterr().out
    for words in ("30 images", "holdout=6", "image_size=32", "batch_size=4", "photos/owl/9.png",
                  "cat 8 + 2, dog 8 + 2, owl 7 + 2", "best.pt"):
        assert words in out, words
    assert out.count("1 file\n") == 1                       # notes.heic, said once

    # the checkpoint says which images were held out: an evaluation sees the same ones
    run, best = common.load("out/folder_symmetric"), common.load("out/folder_symmetric/best.pt")
    args = run["args"]
    assert [args[name] for name in ("data", "data_dir", "holdout")] == ["folder", "photos", 6]
    held = load_photos("photos", "test", 32, 6)
    assert run["classes"] == held.classes == CLASSES and "top5" not in run["metrics"]
    for root in ("photos", "./photos", os.path.abspath("photos")):
        assert torch.equal(evaluated(root, **run["args"]).images, held.images)
    losses = {row["step"]: row["eval"]["loss"]
              for row in common.read_log("out/folder_symmetric/log.jsonl") if "eval" in row}
    assert best["step"] == min(losses, key=losses.get)
    assert best["metrics"]["loss"] == min(losses.values())
    assert run["best"]["step"] == best["step"]


def test_a_stopped_run_on_a_folder_goes_on_with_what_was_chosen():
    make("photos", 10)
    main("--data_dir photos --max_steps 1 --out_dir a")
    first = common.load("a")["args"]
    main("--resume a --max_steps 2")
    again = common.load("a")
    assert again["step"] == 2
    assert {**again["args"], "resume": None, "max_steps": 1, "out_dir": "a"} == first


def test_a_folder_that_cannot_be_trained_on_is_named_in_one_line():
    make("one", 2, classes=["cat"])
    for name in ("broken", "other/train", "val_only/val"):
        make(name, 4)
    make("other/val", 1, classes=["cat", "dog", "cow"])
    for split in ("train", "val"):
        make(f"broken_val/{split}", 4)
    for path in (*Path("broken/dog").iterdir(), *Path("broken_val/val").rglob("*.png")):
        path.write_bytes(b"nothing")
    for folder, words in (("one", "one has 1"), ("broken", "dog"), ("other", "cow"),
                          ("broken_val", "can be read in broken_val/val to test on"),
                          ("val_only", "of cat can be read in val_only/train")):
        assert words in refused(train_cls, "--data_dir", [folder])
    assert not Path("out").exists()


def test_hidden_folders_and_files_do_not_count_and_a_name_that_is_no_utf_8_does(capfd):
    make("photos", 3)
    make("photos", 1, classes=[".ipynb_checkpoints", ".git"])
    Path("photos/cat/._0.png").write_bytes(b"")
    odd = os.fsdecode(b"photos/cat/\xe9.png")
    Path(odd).write_bytes(b"nothing")
    classes, files = find_photos("photos")
    assert classes == CLASSES and len(files["train"]) == 10 and not files["val"]
    assert len(load_photos("photos", "train", 32).labels) == 9
    assert "cannot decode photos/cat/\\xe9.png" in "".join(capfd.readouterr())


def test_another_folder_is_evaluated_whole_or_its_val_folder(capsys):
    make("photos", 10)
    make("photos2", 4, classes=["bus", "car"])
    trained = dict(data="folder", data_dir="photos", holdout=6)
    assert len(evaluated("photos", **trained).labels) == 6 and not capsys.readouterr().out
    other = evaluated("photos2", **trained)  # its classes are for the caller to judge
    assert len(other.labels) == 8 and other.classes == ["bus", "car"]
    assert "photos2" in capsys.readouterr().out
    assert len(evaluated("photos", **{**trained, "data": "cifar10"}).labels) == 30
    make("photos3/val", 3)
    assert len(evaluated("photos3", **trained).labels) == 9     # val/ alone is a folder


def test_a_file_that_comes_or_goes_moves_no_other_out_of_training():
    make("photos", 12)
    for level, (path, _) in enumerate(find_photos("photos")[1]["train"]):
        Image.new("RGB", (32, 32), (level,) * 3).save(path)

    def held_out():
        train, held = ({*load_photos("photos", split, 32, 6).images[:, 0, 0, 0].tolist()}
                       for split in ("train", "test"))
        assert not train & held and len(held) == 6
        return held
    before, (_, files) = held_out(), find_photos("photos")
    hashes = [name_hash(os.path.relpath(path, "photos")) for path, _ in files["train"]]
    assert before == {level for level, found in enumerate(hashes)           # two of each class
                      if found <= sorted(hashes[level // 12 * 12:][:12])[1]}
    os.remove(next(path for level, (path, _) in enumerate(find_photos("photos")[1]["train"])
                   if level not in before))
    assert held_out() == before
    Image.new("RGB", (32, 32), (99,) * 3).save("photos/cat/new.png")
    assert held_out() - before <= {99}                          # the new one, if any


def test_a_fifth_of_each_class_is_held_out_at_least_one_and_never_all():
    counts = dict(zebra=1, cat=2, dog=10, owl=40)
    for name, count in counts.items():
        make("photos", count, classes=[name])
    files = find_photos("photos")[1]["train"]
    assert fifth(files) == 0 + 1 + 2 + 8
    held = load_photos("photos", "test", 32, 11)
    assert held.labels.bincount(minlength=4).tolist() == [1, 2, 8, 0]       # cat, dog, owl, zebra
    assert largest_share(held) == 100 * 8 / 11
    assert len(load_photos("photos", "train", 32, 11).labels) == 53 - 11
    few = load_photos("photos", "test", 32, 3).labels               # one of each comes first
    assert few.bincount(minlength=4).tolist() == [1, 1, 1, 0]


def test_what_is_chosen_is_what_no_flag_says():
    make("photos", 10)
    open_, given = dict.fromkeys(("model", "image_size", "epochs", "pad")), dict(batch_size=7)
    args = Namespace(data="folder", data_dir="photos", patch_size=2, holdout=3, **open_, **given)
    chosen = choose(args)
    assert chosen == dict(model="nano", image_size=32, epochs=9, pad=4)      # of 27 images
    args.image_size = 48
    assert choose(args)["pad"] == 6 and choose(Namespace(data="shapes")) == {}
    vars(args).update(choose(args))
    assert choose(args) == {}
    make("split/train", 6, side=70)
    make("split/val", 2)
    args = Namespace(**{**dict.fromkeys(vars(args)), "data": "folder", "data_dir": "split"})
    chosen = choose(args)
    assert (chosen["image_size"], chosen["patch_size"], chosen["holdout"]) == (64, 8, 0)


@pytest.mark.parametrize("kind", ["jpg", "png", "webp"])
def test_a_phones_photo_is_upright_and_goes_with_its_upright_mask(kind):
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
    lying.convert("L").save(f"mine/annotations/{orientation}.png", exif=exif)   # as its photo
    tree = own_folder("mine", "all", [0, 255], [])
    for image, label in tree:
        assert image.shape[1:] == label.shape == (48, 32)
        assert (image[0].int() - 255 * label.int()).abs().max() < 30
        assert torch.equal(label.bool(), torch.from_numpy(upright[..., 0]).bool())


def test_the_recipe_follows_the_number_and_size_of_the_images():
    assert [recipe(40, side)["image_size"] for side in (0, 30, 64, 500)] == [32, 32, 64, 96]
    # 1.8 sqrt n; 3,000 steps; 8
    assert [recipe(n, 32)["epochs"] for n in (40, 200, 1000, 30000)] == [11, 25, 57, 8]
    assert [recipe(n, 32)["batch_size"] for n in (9, 39, 40, 320)] == [2, 4, 8, 64]
    assert folder_recipe(40, 64) == dict(size=64, patch_size=8, batch_size=8, epochs=400,
                                         eval_every=40)
    assert [folder_recipe(n, 300)["epochs"] for n in (500, 9000)] == [48, 8]
    make("photos", 3, side=50)
    assert median_side(find_photos("photos")[1]["train"]) == 51


def test_of_a_photo_that_is_no_square_the_middle_is_taken():
    image = torch.randint(0, 256, (3, 32, 64), dtype=torch.uint8)
    assert torch.equal(square(image, 32), image[:, :, 16:48])


def test_an_image_that_went_during_a_training_is_named():
    masks("mine", [0, 1], n=2)
    labelled = own_folder("mine", "all", [0, 1], [])
    for i, path in enumerate(("images/00.jpg", "annotations/01.png")):
        os.remove(f"mine/{path}")
        with pytest.raises(InputError, match=path):
            labelled[i]


def test_an_animated_gif_by_another_name_is_its_first_frame():
    frames = [Image.new("RGB", (40, 30), colour) for colour in ("red", "blue", "green")]
    frames[0].save("a.gif", save_all=True, append_images=frames[1:])
    image = decode(read_bytes("a.gif"), "a.jpg")
    assert image.shape == (3, 30, 40) and image[:, 0, 0].tolist() == [255, 0, 0]


# --- masks ----------------------------------------------------------------------------------------

def masks(root, values, n=20, mode="L"):
    """n pairs whose annotations hold these values, in blocks."""
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
    _, label = own_folder("mine", "training", found, ignored)[0]
    assert sorted(label.unique().tolist()) == [*range(len(classes)), *[255] * label_255]


def test_values_of_hardly_any_pixels_are_named_with_the_remedy(capsys):
    masks("soft", [0, 200])
    for i in range(20):
        label = np.array(Image.open(f"soft/annotations/{i:02}.png"))
        label[0, 0] = 50 + 5 * i                            # one pixel of 640 in each mask
        Image.fromarray(label).save(f"soft/annotations/{i:02}.png")
    assert len(find_values("soft")[0]) == 22
    line = capsys.readouterr().out.splitlines()[-1]
    assert "20 of these values" in line and "50, 55" in line and "--ignore 255 50 55" in line


def test_masks_of_one_bit_and_names_in_classes_txt():
    masks("bits", [0, 255], mode="1")
    assert len(find_values("bits")[0]) == 2
    masks("mine", [0, 1, 2])
    Path("mine/classes.txt").write_text("floor\nwall\nlamp\nnever seen\n")
    values, ignore = find_values("mine")
    assert values == [0, 1, 2, 3] and own_folder("mine", "all", values, ignore).classes[2] == "lamp"
    Path("mine/classes.txt").write_text("wall\nlamp\n")
    assert find_values("mine", [0]) == ([1, 2], [0])
    masks("one", [4])
    for root in ("mine", "one"):  # a value without a name; one class
        with pytest.raises(InputError, match=f"--data_dir {root}.*--ignore"):
            find_values(root)


def test_a_folder_of_masks_needs_one_flag_and_its_checkpoint_says_which_images(capsys):
    masks("mine", [0, 255])
    call(train_seg.main,
         "--data_dir mine --max_steps 2 --num_workers 0 --out_dir a")
    out, run = capsys.readouterr().out, common.load("a")
    assert "2 classes" in out and "chosen for them: size=32" in out
    assert run["classes"] == ["value 0", "value 255"]
    val = views.load_split(Namespace(**run["args"]), "validation", run["args"])
    assert len(val) == 4 and val.values == [0, 255] and run["metrics"]["classes"] == 2
    call(train_seg.main, "--resume a --max_steps 3")
    elsewhere = views.load_split(Namespace(**run["args"]), "validation",
                                        {**run["args"], "data_dir": "other"})
    assert len(elsewhere) == 20  # nothing of another folder was held out
    open_ = dict.fromkeys(("ignore", "size", "patch_size", "batch_size", "epochs", "eval_every"))
    flags = Namespace(data="folder", data_dir="mine", backbone="vit.pt", **open_)
    assert "patch_size" not in views.choose(flags)       # it is the backbone's


def test_the_held_out_part_of_a_labelled_folder_stays_when_a_file_comes():
    masks("mine", [0, 1], n=40)

    def stems(split):
        return [Path(image).stem for image, _ in own_folder("mine", split, [0, 1], []).files]
    before = stems("validation")
    assert before == sorted(sorted((f"{i:02}" for i in range(40)), key=name_hash)[:8])
    for part, ending in (("images", "jpg"), ("annotations", "png")):
        Image.new("L", (32, 32), 1).save(Path("mine", part, f"000.{ending}"))
    assert len(set(stems("validation")) - {*before, "000"}) == 0
    assert not set(stems("training")) & set(stems("validation")) and len(stems("all")) == 41
    masks("two", [0, 1], n=2)
    assert len(own_folder("two", "validation", [0, 1], []).files) == 1
    make_pairs("split")                                                     # by its folders
    assert [len(own_folder("split", part, range(5), []).files)
            for part in ("training", "validation", "all")] == [9, 5, 5]


def test_a_folder_of_masks_that_cannot_be_trained_on_gets_one_line():
    masks("mine", [0, 1])
    assert "--data_dir" in refused(train_seg, "--data folder")
    Image.new("RGB", (40, 40)).save("mine/annotations/03.png")
    assert "03.png" in refused(train_seg, "--data_dir mine")
    for path in Path("mine/images").iterdir():
        path.rename(path.with_stem(f"other_{path.stem}"))
    assert "mine/annotations" in refused(train_seg, "--data_dir mine")
