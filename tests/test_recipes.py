"""Recipes that --data selects, and commands in docs/data.md, have the papers' settings."""

import re
import shlex

import pytest

import train_cls
import train_lm
import train_seg
from data.datasets import DATASETS, DataSource
from fixtures import ROOT
from runs import call

pytestmark = pytest.mark.usefixtures("alone")
SCRIPTS = {"train_cls.py": train_cls, "train_lm.py": train_lm, "train_seg.py": train_seg}
OURS = dict(attn="rpc", rpc_layers="0", n_iter=4, lambd=4.0, form="released", seed=0)
DEIT = dict(OURS, model="tiny", image_size=224, patch_size=16, drop_path=0.1, epochs=300,
            batch_size=1024, lr=5e-4 * 1024 / 512, warmup_epochs=5, weight_decay=0.05,
            clip=0, pad=0, num_ops=2, erase=0.25, mixup=0.8, cutmix=1.0,
            smoothing=0.1, repeats=3, flip=True, eval_every=5)
FAN = dict(DEIT, lr=2e-3, repeats=1)
RECIPES = {
    "train_cls.py --data imagenet": DEIT,
    "train_cls.py --data imagenet --model base": dict(DEIT, model="base", clip=1),
    "train_cls.py --data imagenet --model fan_tiny":
        dict(FAN, model="fan_tiny", batch_size=512, drop_path=0),
    "train_cls.py --data imagenet --model fan_small": dict(FAN, model="fan_small", drop_path=0.2),
    "train_lm.py --data wikitext103":
        dict(OURS, mu_over="seen", dropout=0.1, clip=0.25, model="paper", context=256,
             rpc_layers="0-3", steps=500_000, batch_size=96, cutoffs="20000,40000,200000",
             lr=2.5e-4, warmup=2000, eval_every=4000),
    "train_seg.py --data ade20k":
        dict(OURS, dropout=0.1, patch_size=16, model="tiny", lr=1e-3, weight_decay=0,
             optimizer="sgd", clip=0, drop_path=0.1, size=512, num_classes=150, epochs=64,
             batch_size=8),
}


def commands():
    """Return the commands of docs/data.md for the paper's runs, as words after torchrun's flags."""
    text = (ROOT / "docs/data.md").read_text().replace("\\\n", " ")
    found = re.findall(r"^torchrun .*?(train_\w+\.py .*)$", text, re.M)
    return [shlex.split(line, comments=True) for line in found if not line.endswith("...")]


def flags_of(script, words):
    return vars(call(SCRIPTS[script].get_args, words)[0])


@pytest.mark.parametrize("command", RECIPES)
def test_recipes_are_the_papers(command):
    """A FAN needs more flags than --data and --model; docs/data.md has its command."""
    script, *words = command.split()
    if words[-1].startswith("fan"):
        words = next(line[1:] for line in commands() if words[-1] in line)
    elif words[-1] == "base":
        words += ["--clip", "1"]
    found = flags_of(script, [*words, "--data_dir", "x"])
    wrong = {k: (found[k], v) for k, v in RECIPES[command].items() if found[k] != v}
    assert not wrong.keys() - {"attn"}, wrong


def test_only_recipes_that_say_so_mirror_images(monkeypatch):
    """The four data sets are mirrored. Another one is not: digits and signs would change."""
    for name in ("shapes", "cifar10", "imagenet", "folder"):
        assert flags_of("train_cls.py", ["--data", name])["flip"]
        assert not flags_of("train_cls.py", ["--data", name, "--no-flip"])["flip"]
    monkeypatch.setitem(DATASETS, "digits", DataSource(None, dict(model="nano")))
    assert not flags_of("train_cls.py", ["--data", "digits"])["flip"]
    assert flags_of("train_cls.py", ["--data", "digits", "--flip"])["flip"]


def test_commands_of_the_papers_runs_parse():
    assert len(commands()) >= 10
    for script, *words in commands():
        if "--init_from" not in words:                              # needs the file of a run
            assert flags_of(script, words)["data"] in ("imagenet", "wikitext103", "ade20k")
