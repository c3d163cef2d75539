"""The networks in weights/ have the recipe and the accuracy that their README states."""

import platform
import re
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import common
import train_cls
from data.masks import Scenes
from data.shapes import SHAPES, load_shapes
from data.text import load_corpus, perplexity, pydoc_folder, sliding_nll
from lm import lm_from_checkpoint
from segmenter import evaluate, segmenter_from_checkpoint
from vit import classifier_from_checkpoint

ROOT = Path(__file__).parent.parent
WEIGHTS = ROOT / "weights"
STATED = dict(re.findall(r"^\| (\w+)\.pt \| .+? \| .*?([\d.]+)[^|]*\|$",
                         (WEIGHTS / "README.md").read_text(), re.M))
CLASSIFIERS = [f"shapes_{attn}" for attn in ("softmax", "symmetric", "rpc")]


REBUILD = {"classification": classifier_from_checkpoint, "segmentation": segmenter_from_checkpoint,
           "language modelling": lm_from_checkpoint}


@pytest.mark.parametrize("name", sorted(STATED))
def test_shipped_files_store_settings_and_no_paths(name):
    checkpoint = common.load(WEIGHTS / f"{name}.pt")
    assert checkpoint["args"]["seed"] == 0 and not checkpoint.get("optimizer")
    words = {k: v for k, v in checkpoint.items() if k not in ("model", "vocab")}
    assert not re.search(r"(?<!\w)/\w", repr(words))
    config = asdict(REBUILD[checkpoint["task"]](checkpoint).config)
    assert config | checkpoint["model_config"] == config


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifiers_have_the_stated_recipe_and_accuracy(name, monkeypatch, tmp_path):
    checkpoint = common.load(WEIGHTS / f"{name}.pt")
    monkeypatch.setattr(sys, "argv", ["train_cls.py", "--attn", name.partition("_")[2], "--out_dir",
                                      str(tmp_path / "run")])
    today = vars(train_cls.get_args()[0])
    known = today.keys() & checkpoint["args"].keys() - {"init", "out_dir"}
    assert len(known) > 25 and all(today[key] == checkpoint["args"][key] for key in known)
    assert checkpoint["classes"] == list(SHAPES)
    model, scenes = classifier_from_checkpoint(checkpoint), load_shapes("test", 3200)
    with torch.no_grad():
        hits = [model(images / 255).argmax(1) == labels for images, labels in
                zip(scenes.images.split(400), scenes.labels.split(400))]
    accuracy = 100 * torch.cat(hits).double().mean().item()
    assert accuracy == pytest.approx(float(STATED[name]), abs=0.1)


def test_the_segmenter_is_as_accurate_as_stated():
    model = segmenter_from_checkpoint(common.load(WEIGHTS / "seg_shapes_rpc.pt"))
    source = Scenes("test", 400, 32)                        # a quarter of the scenes, for speed
    found = evaluate(model, source, size=32, window=32, stride=32)["mean_iou"]
    assert found == pytest.approx(float(STATED["seg_shapes_rpc"]), abs=2)


def test_the_language_model_is_as_good_as_stated(tmp_path):
    """Skip on other versions of Python, because their documentation differs."""
    checkpoint = common.load(WEIGHTS / "pydoc_rpc.pt")
    model = lm_from_checkpoint(checkpoint)
    corpus = load_corpus(pydoc_folder(tmp_path))
    if "\n".join(corpus.vocab.words) != checkpoint["vocab"]:
        assert platform.python_version() != "3.11.7"
        pytest.skip("this Python's documentation has other words")
    nats = sliding_nll(model, corpus.valid, 64, 64)
    assert perplexity(nats) == pytest.approx(float(STATED["pydoc_rpc"]), rel=0.01)
