"""The networks in weights/ have the recipe and the accuracy that their README states."""

import os
import platform
import re
import zlib
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import common
import train_cls
from data import text
from data.masks import Scenes
from data.shapes import SHAPES, load_shapes
from lm import lm_from_checkpoint
from models import load_classifier
from runs import call
from segmenter import evaluate, segmenter_from_checkpoint

ROOT = Path(__file__).parent.parent
WEIGHTS = ROOT / "weights"
STATED = dict(re.findall(r"^\| (\w+)\.pt \| .+? \| .*?([\d.]+)[^|]*\|$",
                         (WEIGHTS / "README.md").read_text(), re.M))
REBUILD = {"classification": load_classifier, "segmentation": segmenter_from_checkpoint,
           "language modelling": lm_from_checkpoint}


@pytest.mark.parametrize("name", sorted(STATED))
def test_shipped_files_store_settings_and_no_paths(name):
    checkpoint = common.load(WEIGHTS / f"{name}.pt")
    assert checkpoint["args"]["seed"] == 0 and not checkpoint.get("optimizer")
    words = {k: v for k, v in checkpoint.items() if k not in ("model", "vocab")}
    assert not re.search(r"(?<!\w)/\w", repr(words))
    config = asdict(REBUILD[checkpoint["task"]](checkpoint).config)
    assert config | checkpoint["model_config"] == config


@pytest.mark.parametrize("attn", ["softmax", "symmetric", "rpc"])
@pytest.mark.parametrize("name, words", [
    ("shapes", ""), ("cifar10", "--data cifar10 --data_dir x --model nano --epochs 20")])
def test_classifiers_have_the_recipe_of_today(name, words, attn, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = common.load(WEIGHTS / f"{name}_{attn}.pt")["args"]
    today = vars(call(train_cls.get_args, words, "--attn", [attn])[0])
    unknown = {"data_dir", "eval_every", "init", "init_from", "out_dir"}
    known = today.keys() & flags.keys() - unknown
    assert len(known) > 25 and all(today[key] == flags[key] for key in known)


@pytest.fixture(scope="module")
def scenes():
    """Return a quarter of the test scenes, for speed."""
    return load_shapes("test", 800)


@pytest.mark.parametrize("attn", ["softmax", "symmetric", "rpc"])
def test_classifiers_have_the_stated_accuracy(attn, scenes):
    """CIFAR-10 is not in the repository, so the stored result of the training is compared."""
    stored = common.load(WEIGHTS / f"cifar10_{attn}.pt")["metrics"]
    assert (f"{stored['top1']:.2f}", stored["images"]) == (STATED[f"cifar10_{attn}"], 10000)
    checkpoint = common.load(WEIGHTS / f"shapes_{attn}.pt")
    assert checkpoint["classes"] == list(SHAPES)
    model = load_classifier(checkpoint)
    with torch.no_grad():
        logits = torch.cat([model(images / 255) for images in scenes.images.split(100)])
    right = (logits.argmax(1) == scenes.labels).double().mean().item()
    assert 100 * right == pytest.approx(float(STATED[f"shapes_{attn}"]), abs=2)


def test_the_segmenter_is_as_accurate_as_stated():
    model = segmenter_from_checkpoint(common.load(WEIGHTS / "seg_shapes_rpc.pt"))
    found = evaluate(model, Scenes("test", 150, 32), size=32, window=32, stride=32)["mean_iou"]
    assert found == pytest.approx(float(STATED["seg_shapes_rpc"]), abs=2)


@pytest.mark.skipif(platform.python_version() != "3.11.7", reason="has other documentation")
def test_the_language_model_is_as_good_as_stated(tmp_path, monkeypatch):
    """Read the modules of the validation part alone, because the whole library takes seconds."""
    library, parts = Path(os.__file__).parent, {}
    for path in [*library.glob("*.py"), *library.glob("*/*.py")]:
        name = path.relative_to(library)
        if zlib.crc32(".".join(name.with_suffix("").parts).encode()) % 16 == 1:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).symlink_to(path)
    monkeypatch.setattr(os, "__file__", str(tmp_path / "os.py"))
    monkeypatch.setattr(text, "mark_rare_words", lambda found: parts.update(found) or {})
    text.pydoc_folder(tmp_path)
    checkpoint = common.load(WEIGHTS / "pydoc_rpc.pt")
    tokens = text.Vocabulary(checkpoint["vocab"].split("\n")).encode_lines(parts["valid"])
    nats = text.sliding_nll(lm_from_checkpoint(checkpoint), tokens, 64, 64)
    assert text.perplexity(nats) == pytest.approx(float(STATED["pydoc_rpc"]), rel=0.01)
