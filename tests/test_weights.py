"""The networks in weights/ have the recipe and the accuracy that their README states."""

import re
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import common
import train_cls
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
def test_shipped_files_store_settings_and_stated_results(name):
    checkpoint = common.load(WEIGHTS / f"{name}.pt")
    assert checkpoint["args"]["seed"] == 0 and not checkpoint.get("optimizer")
    words = {k: v for k, v in checkpoint.items() if k not in ("model", "vocab")}
    assert not re.search(r"(?<!\w)/\w", repr(words))
    config = asdict(REBUILD[checkpoint["task"]](checkpoint).config)
    assert config | checkpoint["model_config"] == config
    metrics = checkpoint["metrics"]                     # of the training, at its end
    of_task = {"classification": "top1", "segmentation": "mean_iou"}
    assert f"{metrics[of_task.get(checkpoint['task'], 'perplexity')]:.2f}" == STATED[name]


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
