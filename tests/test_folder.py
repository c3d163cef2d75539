"""Test your own masks: which files are found, held out and evaluated."""

import shutil
import zlib
from argparse import Namespace
from pathlib import Path
from unicodedata import normalize

import numpy as np
import pytest
from PIL import Image

import common
import train_seg
from common import InputError
from data.masks import load_segmentation, own_folder
from runs import call, make_pairs, refused


@pytest.fixture(autouse=True)
def an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


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
