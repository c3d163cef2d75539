"""Every flag of the three trainers does what it says: each alone changes what a table says, and nothing else. Runs with
every flag away from its default are in test_plain_loop.py."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import common
import lm
import train_cls
import train_lm
import train_seg
from lm import LM
import segmenter
from runs import call, make_text, observe, same
from segmenter import Segmenter
from vit import ViT, ViTConfig

pytestmark = pytest.mark.usefixtures("alone")
SCRIPTS = dict(cls=train_cls, lm=train_lm, seg=train_seg)


@pytest.fixture(autouse=True)
def a_small_paper(monkeypatch):
    monkeypatch.setitem(lm.SIZES, "paper", dict(context=24, embed_dim=16, depth=3, num_heads=2, mlp_dim=40))


def defaults(script, **flags):
    return vars(call(SCRIPTS[script].get_args, **flags))


# --- a flag changes what it says and nothing else --------------------------------------------------------------------

# What is seen of a run: all of it from the first step on, all after it, another number of steps. See runs.observe.
RUN, LATER = {"loss", "norm", "weights", "score"}, {"weights", "score"}
COUNT, CONFIG = {"logged", "evaluated", "saved", "batches"}, RUN | {"config"}
ATTENTION = {"attn": ("symmetric", CONFIG), "rpc_layers": ("1", CONFIG), "n_iter": (5, CONFIG),
             "lambd": (0.1, CONFIG), "form": ("paper", CONFIG)}
RUNNING = {"seed": (1, RUN), "device": ("cpu", {"asked for"}), "amp": (True, RUN), "compile": (True, {"compiled"}),
           "out_dir": ("b", {"folder"}), "max_steps": (3, LATER | COUNT), "log_every": (2, {"logged", "loss", "norm"}),
           "save_every": (1, {"saved"})}
BASE = dict(
    cls=dict(model="nano", num_images=32, image_size=16, patch_size=8, batch_size=16, epochs=2, lr=1e-3,
             warmup_epochs=0, clip=0.5, ema=0.5, log_every=1, out_dir="a"),
    lm=dict(data="wikitext", data_dir="text", model="mini", context=8, lambd=0.3, batch_size=4, steps=4, lr=1e-3,
            words=6, warmup=0, clip=0, dropout=0, log_every=1, eval_every=2, out_dir="a"),
    seg=dict(num_images=10, size=16, patch_size=8, window=8, batch_size=5, epochs=2, lr=2e-3, lambd=0.3, save_images=0,
             log_every=1, out_dir="a"))
TABLES = dict(
    cls=ATTENTION | RUNNING | {
        "num_images": (64, RUN | COUNT | {"lr"}), "holdout": (16, RUN | COUNT | {"lr"}), "model": ("micro", CONFIG),
        "image_size": (24, CONFIG | {"batches"}), "patch_size": (4, CONFIG), "drop_path": (0.5, CONFIG),
        "init": ("trunc_normal", CONFIG), "init_from": ("start.pt", RUN), "epochs": (3, LATER | COUNT | {"lr"}),
        "batch_size": (8, RUN | COUNT | {"lr"}), "accum": (2, {"batches"}), "lr": (2e-3, LATER | {"lr"}),
        "min_lr": (5e-4, LATER | {"lr"}), "warmup_epochs": (1, LATER | {"lr"}), "weight_decay": (0.9, LATER),
        "clip": (0.1, LATER), "ema": (0.9, {"average"}), "pad": (2, RUN), "num_ops": (2, RUN), "erase": (0.9, RUN),
        "adv_eps": ("4/255", RUN), "adv_steps": (2, RUN), "mixup": (0.8, RUN), "cutmix": (1.0, RUN),
        "smoothing": (0.3, RUN), "repeats": (2, RUN),
        "eval_every": (2, {"evaluated"}), "keep_every": (1, {"saved", "files"})},
    lm=ATTENTION | RUNNING | {
        "data": ("folder", {"recipe"}), "data_dir": ("other", RUN), "model": ("paper", CONFIG),
        "context": (12, CONFIG | {"batches"}), "mu_over": ("token", CONFIG),
        "dropout": (0.5, CONFIG), "cutoffs": ("6,15", CONFIG), "steps": (5, LATER | COUNT | {"lr"}),
        "batch_size": (8, RUN | {"batches"}), "accum": (2, {"batches"}), "lr": (2e-3, LATER | {"lr"}),
        "warmup": (2, LATER | {"lr"}), "clip": (0.1, LATER), "words": (20, {"sample"}),
        "prompt": ("bob saw", {"sample"}), "eval_every": (1, {"evaluated", "saved"})},
    seg=ATTENTION | RUNNING | {
        "num_images": (9, RUN | {"batches"}), "model": ("micro", CONFIG), "patch_size": (4, CONFIG),
        "decoder_attn": ("symmetric", CONFIG),
        "drop_path": (0.5, CONFIG), "dropout": (0.5, CONFIG), "size": (24, CONFIG | {"batches"}),
        "epochs": (3, LATER | COUNT | {"lr"}), "batch_size": (4, RUN | COUNT | {"lr"}),
        "lr": (1e-3, LATER | {"lr"}), "min_lr": (1e-3, LATER | {"lr"}),
        "weight_decay": (0.5, LATER), "clip": (0.01, LATER), "window": (16, {"score"}), "stride": (4, {"score"}),
        "save_images": (1, {"files"}), "eval_every": (1, {"evaluated"})})
ELSEWHERE = dict(cls={"data", "data_dir", "num_workers", "download", "resume", "keep_best"},   # test_train_*.py
                 lm={"resume", "sample"}, seg={"data", "data_dir", "num_workers", "num_classes", "backbone", "resume", "ignore"})
NOISE = dict(cls=2e-5, lm=1e-4, seg=1e-6)                                                     # of weights in two runs


def look(script, **flags):
    """What such a run did."""
    with pytest.MonkeyPatch.context() as patch:
        if script == "cls":
            names, score = ("head.weight", "blocks.1.attn.qkv.weight"), lambda row: row["eval"]["loss"]
        elif script == "lm":
            names, score = ("embed.weight", "blocks.1.attn.qkv.weight"), lambda row: row["eval"]["perplexity"]
            normal = torch.nn.init.normal_                # the first weights are large: keys reach the threshold
            patch.setattr(torch.nn.init, "normal_", lambda weight, mean=0.0, std=1.0: normal(weight, mean, 10 * std))
        else:                                             # probabilities: scores of few pixels may not change
            names, seen, real = ("encoder.patch_embed.proj.weight", "encoder.blocks.1.attn.qkv.weight"), [], segmenter.predict
            score = lambda row: [seen[-1]]                                                              # noqa: E731
            patch.setattr(segmenter, "predict", lambda *args, **how: seen.append(real(*args, **how)) or seen[-1])
        model = dict(cls=ViT, lm=LM, seg=Segmenter)[script]
        return observe(SCRIPTS[script], model, names, score, **flags)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """What the run without a flag more did, by script."""
    cache = {}

    def of(script):
        if script not in cache:
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(tmp_path_factory.mktemp("base"))
                make_text("text", 0)
                cache[script] = look(script, **BASE[script])
        return cache[script]
    return of


@pytest.mark.parametrize("script, flag", [(script, flag) for script, table in TABLES.items() for flag in table])
def test_a_flag_changes_what_the_table_says(base, script, flag):
    first = base(script)
    make_text("text", 0)
    make_text("other", 1)
    if flag == "init_from":
        torch.manual_seed(1)
        torch.save({"model": ViT(ViTConfig(**first["config"])).state_dict()}, "start.pt")
    value, expected = TABLES[script][flag]
    flags = BASE[script]
    if flag == "adv_steps":                                                                         # it needs the other
        flags = {**flags, "adv_eps": "4/255"}
        first = look(script, **{**flags, "out_dir": "first"}) | {"folder": "a"}
    seen = look(script, **{**flags, flag: value})
    found = {name for name in first if not same(first[name], seen[name], NOISE[script])}
    if "weights" in found:
        found -= {"sample", "average"}                          # a sample may change, it need not; an average does, too
    assert found == expected
    if flag == "lr":                                                           # the schedule between its ends is scaled
        least = 0 if script == "lm" else 1e-5
        ratio = (value - least) / (BASE[script]["lr"] - least)
        assert seen["lr"][0] - least == pytest.approx(ratio * (first["lr"][0] - least), rel=1e-6)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_table_has_every_flag_and_a_resumed_run_may_not_change_what_makes_its_model(script):
    table = TABLES[script]
    assert set(defaults(script)) == {*table, *ELSEWHERE[script]} and not ELSEWHERE[script] & table.keys()
    fixed = {flag for flag, (_, expected) in table.items() if "config" in expected} | {"data", "batch_size", "seed"}
    assert not fixed & set(common.MAY_CHANGE)


# --- recipes ---------------------------------------------------------------------------------------------------------

OURS = dict(attn="rpc", rpc_layers="0", n_iter=4, lambd=4.0, form="released", seed=0)
DEIT = dict(OURS, model="tiny", image_size=224, patch_size=16, drop_path=0.1, epochs=300, batch_size=1024, min_lr=1e-5,
            lr=5e-4 * 1024 / 512, warmup_epochs=5, weight_decay=0.05, clip=0, ema=0.99996, pad=0, num_ops=2, erase=0.25,
            mixup=0.8, cutmix=1.0, smoothing=0.1, repeats=3)
RECIPES = [
    ("cls", dict(data="imagenet"), DEIT),
    ("cls", dict(data="imagenet", model="base"), dict(DEIT, model="base", clip=1)),
    ("cls", dict(data="imagenet", model="fan_tiny"),
     dict(DEIT, model="fan_tiny", batch_size=512, lr=2e-3, min_lr=1e-6, drop_path=0, repeats=1, ema=0.99992)),
    ("cls", dict(data="imagenet", model="fan_small"),
     dict(DEIT, model="fan_small", lr=2e-3, min_lr=1e-6, drop_path=0.2, repeats=1, ema=0.99992)),
    ("cls", dict(data="imagenet", model="fan_tiny", lr=1e-4), dict(lr=1e-4, min_lr=1e-6)),
    ("lm", dict(data="wikitext103"), dict(OURS, mu_over="seen", dropout=0.1, clip=0.25, model="paper", context=24,
                                          rpc_layers="0-3", steps=500_000, batch_size=96, cutoffs="20000,40000,200000",
                                          lr=2.5e-4, warmup=2000, eval_every=4000)),
    ("seg", dict(data="ade20k"), dict(OURS, min_lr=1e-5, dropout=0.1, patch_size=16, model="tiny", lr=1e-3, weight_decay=0,
                                      clip=0, drop_path=0.1, size=512, num_classes=150, epochs=64, batch_size=8))]


@pytest.mark.parametrize("script, flags, recipe", RECIPES)
def test_recipes_are_the_papers(script, flags, recipe):
    """Those of the shipped networks are in test_weights.py. lm's size "paper" is a small one in this file."""
    assert {k: v for k, v in defaults(script, **flags).items() if k in recipe} == recipe


def test_download_reaches_torchvision_and_nothing_is_fetched_without_it(monkeypatch):
    asked = []

    class CIFAR10:
        data, targets = np.zeros((20, 32, 32, 3), np.uint8), [0, 1] * 10
        classes = list("abcdefghij")

        def __init__(self, folder, train, download):
            asked.append((folder, train, download))
    monkeypatch.setattr("torchvision.datasets.CIFAR10", CIFAR10)
    Path("files/cifar-10-batches-py").mkdir(parents=True)
    run = partial(call, train_cls.main, data="cifar10", data_dir="files", model="nano", patch_size=16, batch_size=10,
                  max_steps=1, device="cpu")
    for download in (False, True):
        asked.clear()
        run(download=download, out_dir=f"{download}")
        assert asked == [("files", True, download), ("files", False, download)]
