"""Evaluate Segmenters, language models and your own photos; rows equal plain loops."""

import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
from torchvision.io import write_png

import common
import eval_robust
from results import read_rows
from data.photos import decode_all, find_photos
from data.rng import epoch_order
from data.views import Scenes
from data.shapes import load_shapes
from data.text import count_words, read_lines
from lm import LM, LMConfig
from processes import group
from robust import corruptions
from robust.words import word_swap
from segmenter import Segmenter, SegmenterConfig, predict
from test_eval_robust import error, line_of, make_checkpoint, rows_of
from vit import SIZES


def save_segmenter(path, attn="rpc", seed=0, classes=None, flags=None):
    """Save and return an untrained Segmenter. classes: default, the classes of the scenes."""
    classes = classes or list(Scenes("test", 1, 32).classes)
    torch.manual_seed(seed)
    size = {**SIZES["nano"], "depth": 1}
    config = SegmenterConfig(len(classes), **size, image_size=32, patch_size=8, attn=attn)
    model = Segmenter(config)
    flags = dict(data="shapes", data_dir=None, num_classes=len(classes), num_images=100, size=32,
                 seed=seed) | (flags or {})
    common.save(path, dict(
        task="segmentation", model=model.state_dict(), model_config=asdict(config), step=1,
        classes=classes, args=flags))
    return model.eval()


def save_language_model(folder, name="lm.pt", attn="rpc", seed=0):
    """Write a small text to folder/text; save and return an untrained language model of it."""
    (folder / "text").mkdir(exist_ok=True)
    for i, split in enumerate(("train", "valid", "test")):
        words = [["the cat sat", "dogs run <unk>", "AAA bears eat fish"][(j * (i + 1) + j // 3) % 3]
                 for j in range(40)]
        (folder / "text" / f"wiki.{split}.tokens").write_text("\n".join(words) + "\n")
    vocab = count_words(folder / "text" / "wiki.train.tokens")
    torch.manual_seed(seed)
    config = LMConfig(len(vocab), context=8, embed_dim=16, depth=1, num_heads=2, mlp_dim=32,
                      attn=attn, rpc_layers=(0,))
    model = LM(config)
    flags = dict(data="folder", data_dir=str(folder / "text"), steps=9, seed=seed)
    common.save(folder / name, dict(
        task="language modelling", model=model.state_dict(), model_config=asdict(config), step=seed,
        vocab="\n".join(vocab.words), args=flags))
    return model.eval()


# --- Segmenters ----------------------------------------------------------------------------------

def iou_by_hand(model, index, change=lambda image, i: image, **how):
    """Return [pixel accuracy, mean accuracy, mean IoU] in percent over scenes, by loops."""
    source, right, truth, said = Scenes("test", 10, 32), *torch.zeros(3, 11, dtype=torch.float64)
    for i in index.tolist():
        image, label = source[i]
        guess = predict(model, change(image, i), size=32, **how).argmax(0)
        for k in range(11):
            right[k] += ((guess == k) & (label == k)).sum()
            truth[k] += (label == k).sum()
            said[k] += ((guess == k) & (label != 255)).sum()
    union = truth + said - right
    each = right.sum() / truth.sum(), (right / truth).nanmean(), (right / union).nanmean()
    return [100 * value.item() for value in each]


@pytest.fixture(scope="module")
def segmented(tmp_path_factory):
    """Return (folder, models, rows): Segmenters a.pt and b.pt, and the rows of a run on both."""
    folder = tmp_path_factory.mktemp("seg")
    models = [save_segmenter(folder / f"{name}.pt", seed=i) for i, name in enumerate("ab")]
    rows = rows_of(folder / "r", "--ckpt", folder / "a.pt", folder / "b.pt", "--limit", 3,
                     "--measures", "clean", "corruptions type=fog,contrast", "--severities", 2, 5,
                     "--window", 16, "--stride", 8, "--scales", 1, 1.5, "--flip",
                     "--num_workers", 0, "--seed", 4)
    return folder, models, rows


def test_segmenter_rows_equal_plain_loop(segmented):
    folder, models, rows = segmented
    index = epoch_order(10, 0, 4)[:3]
    how = dict(window=16, stride=8, scales=[1, 1.5], flip=True)
    assert [(row["name"], row["settings"]) for row in rows[::2]] == [("clean", how), *(
        ("corruptions", dict(type=name, jpeg85=False, severities=[2, 5], frost="procedural", **how))
        for name in ("fog", "contrast"))]
    for row, model in zip(rows, [*models] * 3):
        def change(image, i, severity):
            kind = row["settings"]["type"]
            return corruptions.corrupt(image[None], kind, severity, seed=4, index=[i])[0]

        numbers = [row[name] for name in ("pixel_accuracy", "mean_accuracy", "mean_iou")]
        if row["name"] == "clean":
            assert numbers == pytest.approx(iou_by_hand(model, index, **how), abs=1e-3)
            continue
        for severity, *found in zip((2, 5), *numbers):
            hand = iou_by_hand(model, index, lambda x, i: change(x, i, severity), **how)
            assert found == pytest.approx(hand, abs=1e-3)
    assert len({row["mean_iou"] for row in rows[:2]}) == 2
    assert len(rows[0]["iou"]) == 11 and [len(iou) for iou in rows[2]["iou"]] == [11, 11]
    means = [f"{np.mean(row['mean_iou']):.2f}" for row in rows[2:4]]
    table = (folder / "r" / "table.md").read_text()
    assert line_of(table, "corruptions type=fog, mean_iou") == means


def test_two_processes_segment_every_image_once(segmented):
    folder, _, _ = segmented
    flags = ("--ckpt", folder / "a.pt", "--limit", 3, "--measures", "clean", "--num_workers", 0)
    one, = rows_of(folder / "one", *flags)
    group(eval_robust.main, list(map(str, (*flags, "--out_dir", folder / "shared"))))
    two, = read_rows(folder / "shared").values()
    assert one["iou"] == two["iou"] and one["images"] == two["images"] == 3


@pytest.mark.parametrize("names, works", [
    (["square", "circle"], True), (["circle", "square"], False), (None, True)])
def test_class_names_of_masks_are_compared(tmp_path, names, works):
    """Masks come with the class names of the training, with swapped names, or without names."""
    for part in ("images", "annotations"):
        (tmp_path / "masks" / part).mkdir(parents=True)
    for i, image in enumerate(load_shapes("test", 4, 32).images):
        write_png(image, str(tmp_path / "masks" / "images" / f"{i}.png"))
        write_png((image[:1] > 99).byte(), str(tmp_path / "masks" / "annotations" / f"{i}.png"))
    if names:
        (tmp_path / "masks" / "classes.txt").write_text("\n".join(names))
    save_segmenter(tmp_path / "seg.pt", classes=["square", "circle"],
                   flags=dict(data="folder", data_dir="elsewhere", values=[0, 1], ignore=[255]))
    flags = ("--ckpt", tmp_path / "seg.pt", "--data_dir", tmp_path / "masks", "--measures", "clean",
             "--num_workers", 0)
    if works:
        assert len(rows_of(tmp_path / "r", *flags)) == 1
    else:
        wrong = error(*flags, "--out_dir", tmp_path / "r")
        assert "class 0 is square in training and circle here" in wrong


# --- language models -----------------------------------------------------------------------------

@torch.no_grad()
def nats_by_hand(model, tokens, window, stride):
    """Return the nats of tokens[1:]. Each token depends on the earlier tokens of its window."""
    nats, end = [], window
    while len(nats) < len(tokens) - 1:
        end = min(end, len(tokens) - 1)
        start = max(end - window, 0) if stride < window else len(nats)
        logits = model(tokens[None, start:end], tokens[None, start + 1:end + 1])[0]
        nats += logits[len(nats) - end:].tolist()
        end += stride
    return torch.tensor(nats, dtype=torch.float64)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Return (folder, models, rows): lm.pt and other.pt, and the rows of a run on both."""
    folder = tmp_path_factory.mktemp("lm")
    models = [save_language_model(folder, "lm.pt"), save_language_model(folder, "other.pt", seed=1)]
    rows = rows_of(folder / "r", "--ckpt", folder / "lm.pt", folder / "other.pt", "--stride", 3,
                     "--window", 6, "--seed", 5, "--limit", 100)
    return folder, models, rows


def test_perplexities_equal_plain_loop(texts):
    folder, models, rows = texts
    vocab = count_words(folder / "text" / "wiki.train.tokens")
    pairs = [(split, model) for split in ("valid", "test") for model in models]
    assert [row["settings"] for row in rows] == [
        dict(split=split, window=6, stride=3) for split, _ in pairs]
    for row, (split, model) in zip(rows, pairs):
        lines = read_lines(folder / "text" / f"wiki.{split}.tokens")
        swapped_lines, swapped = word_swap(lines, seed=5)
        clean, attacked = (torch.from_numpy(vocab.encode_lines(some).astype("int64"))[:100]
                           for some in (lines, swapped_lines))
        kept = ~torch.tensor(swapped[1:100])
        nats = [nats_by_hand(model, *how) for how in
                ((clean, 6, 6), (clean, 6, 3), (attacked, 6, 3))]
        expected = dict(segment=nats[0], sliding=nats[1], attacked=nats[2],
                        attacked_unswapped=nats[2][kept], clean_unswapped=nats[1][kept])
        for name, values in expected.items():
            assert row[name] == pytest.approx(values.mean().exp().item(), rel=1e-5), name
        assert row["images"] == 100 and row["swapped"] == int((~kept).sum()) > 0
        assert f"| {row['attacked_unswapped']:.2f} " in (folder / "r" / "table.md").read_text()
        assert all(math.isfinite(row[name]) for name in expected)


def test_other_text_keeps_its_rare_words(texts, tmp_path):
    """Words are looked up in the checkpoint's vocabulary; the whole text is scored."""
    folder, (model, _), _ = texts
    lines = ["the cat sat", "bears eat fish quickly", "dogs run", "the unheard-of cat"] * 6
    (tmp_path / "notes.txt").write_text("\n\n".join(lines) + "\n")
    row, = rows_of(tmp_path / "r", "--ckpt", folder / "lm.pt", "--data_dir",
                   tmp_path / "notes.txt", "--stride", 3, "--window", 6)
    vocab = count_words(folder / "text" / "wiki.train.tokens")
    words = [word for line in lines for word in (*line.replace("-", " - ").split(), "<eos>")]
    unknown = sum(word not in vocab for word in words)
    tokens = torch.tensor([vocab[word] for word in words])
    assert row["settings"]["split"] == "whole" and row["images"] == len(tokens)
    assert row["unknown"] == pytest.approx(100 * unknown / len(words), abs=1e-3) != 0
    expected = nats_by_hand(model, tokens, 6, 3).mean().exp().item()
    assert row["sliding"] == pytest.approx(expected, rel=1e-5)
    table = (tmp_path / "r" / "table.md").read_text()
    assert line_of(table, "perplexity split=whole, unknown") == [f"{row['unknown']:.2f}"]


@pytest.mark.parametrize("ckpt, flags, words", [
    ("lm.pt", ["--window", "9"], "more than the context of 8 tokens"),
    ("lm.pt", ["--window", "4", "--stride", "5"], "--stride 5 is more than --window 4"),
    ("seg.pt", ["--per_class"], "--per_class applies to classification"),
    ("lm.pt", ["--preset", "paper"], "--preset applies to classification"),
    ("seg.pt", ["--data", "camvid"], "needs --data_dir"),
    ("seg.pt lm.pt", [], "differ in task: segmentation and language modelling"),
    ("lm.pt words.pt", [], "perplexities cannot be compared"),
])
def test_flags_of_other_tasks_are_one_line(texts, monkeypatch, ckpt, flags, words):
    folder, _, _ = texts
    monkeypatch.chdir(folder)
    save_segmenter(folder / "seg.pt")
    language = common.load("lm.pt")
    renamed = {**language, "vocab": language["vocab"].replace("cat", "dog")}
    common.save(folder / "words.pt", renamed)
    assert words in error("--ckpt", *ckpt.split(), *flags, "--out_dir", "bad")


# --- your own photos ---------------------------------------------------------------------

def test_own_photos_use_held_out_images(tmp_path):
    for i, image in enumerate(load_shapes("test", 40).images):
        for folder in ("photos", "photos2"):
            (tmp_path / folder / f"c{i % 4}").mkdir(parents=True, exist_ok=True)
            write_png(image, str(tmp_path / folder / f"c{i % 4}" / f"{i}.png"))
    classes = [f"c{i}" for i in range(4)]
    model = make_checkpoint(tmp_path / "m.pt", classes, task="folder",
                            flags=dict(data_dir=str(tmp_path / "photos")))
    how = "--ckpt", tmp_path / "m.pt", "--measures", "clean"
    row, = rows_of(tmp_path / "r", *how)
    assert row["images"] == 4 and row["data_dir"] == str(tmp_path / "photos")
    assert "top5" not in row                              # only four classes
    _, row = rows_of(tmp_path / "r", *how, "--data_dir", tmp_path / "photos2")
    _, photos = find_photos(tmp_path / "photos2")
    all_of_it = decode_all(photos["all"], classes, 32)
    right = (model(all_of_it.images.float() / 255).argmax(1) == all_of_it.labels).double()
    assert row["images"] == 40 and row["top1"] == pytest.approx(100 * right.mean().item(), abs=1e-3)
