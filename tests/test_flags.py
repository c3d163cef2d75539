"""Every flag of the three trainers does what it says: each alone changes what a table says, and nothing else; and runs
with every flag away from its default give the log that they gave when it was compared with plain loops of torch's and
timm's own parts (golden/runs.json; for train_cls.py such a loop is in test_plain_loop.py)."""

import json
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
from robust import iou
from runs import call, make_pairs, make_text, make_tree, observe, rows, same
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
        "context": (12, CONFIG | {"batches"}), "mu_over": ("token", CONFIG), "norm": ("pre", CONFIG),
        "dropout": (0.5, CONFIG), "cutoffs": ("6,15", CONFIG), "steps": (5, LATER | COUNT | {"lr"}),
        "batch_size": (8, RUN | {"batches"}), "accum": (2, {"batches"}), "lr": (2e-3, LATER | {"lr"}),
        "warmup": (2, LATER | {"lr"}), "clip": (0.1, LATER), "words": (20, {"sample"}),
        "prompt": ("bob saw", {"sample"}), "temperature": (0.1, {"sample"}), "eval_every": (1, {"evaluated", "saved"})},
    seg=ATTENTION | RUNNING | {
        "num_images": (9, RUN | {"batches"}), "model": ("micro", CONFIG), "patch_size": (4, CONFIG),
        "decoder": ("linear", CONFIG), "decoder_attn": ("symmetric", CONFIG),
        "drop_path": (0.5, CONFIG), "dropout": (0.5, CONFIG), "size": (24, CONFIG | {"batches"}),
        "min_scale": (0.5, RUN), "max_scale": (2, RUN),
        "distort": (True, RUN), "epochs": (3, LATER | COUNT | {"lr"}), "batch_size": (4, RUN | COUNT | {"lr"}),
        "optimizer": ("sgd", LATER), "lr": (1e-3, LATER | {"lr"}), "min_lr": (1e-3, LATER | {"lr"}),
        "weight_decay": (0.5, LATER), "clip": (0.01, LATER), "window": (16, {"score"}), "stride": (4, {"score"}),
        "save_images": (1, {"files"}), "eval_every": (1, {"evaluated"}), "keep_every": (1, {"saved", "files"})})
ELSEWHERE = dict(cls={"data", "data_dir", "num_workers", "skip_bad_images", "download", "resume"},   # test_train_*.py
                 lm={"resume", "sample"}, seg={"data", "data_dir", "num_workers", "num_classes", "backbone", "resume"})
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
            names, seen, real = ("encoder.patch_embed.proj.weight", "encoder.blocks.1.attn.qkv.weight"), [], iou.predict
            score = lambda row: [seen[-1]]                                                              # noqa: E731
            patch.setattr(iou, "predict", lambda *args, **how: seen.append(real(*args, **how)) or seen[-1])
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
def test_the_table_has_every_flag_and_a_resumed_run_keeps_what_makes_its_model_and_its_batches(script):
    table = TABLES[script]
    assert set(defaults(script)) == {*table, *ELSEWHERE[script]} and not ELSEWHERE[script] & table.keys()
    fixed = {flag for flag, (_, expected) in table.items() if "config" in expected} | {"data", "batch_size", "seed"}
    fixed |= dict(cls={"num_images", "holdout", "repeats", "init_from", "adv_eps", "adv_steps"}, lm={"steps"},
                  seg={"backbone", "num_classes", "num_images", "optimizer", "min_scale", "max_scale",
                       "distort"})[script]
    assert set(SCRIPTS[script].FIXED) == fixed


# --- runs with every flag away from its default ----------------------------------------------------------------------

COMMON = dict(n_iter=3, lambd=0.3, form="paper", rpc_layers="1,3", seed=5, device="cpu", out_dir="a")
SEG = dict(COMMON, model="micro", patch_size=8, drop_path=0.3, dropout=0.3, size=24, min_scale=0.6, max_scale=1.6,
           epochs=4, batch_size=4, lr=3e-3, min_lr=1e-3, weight_decay=0.4, clip=0.5, window=16, stride=12,
           save_images=2, max_steps=10, log_every=2, eval_every=2, save_every=4, keep_every=2)
PAIRS = dict(data_dir="pairs", num_classes=4, distort=False)
RUNS = {
    "cls imagenet": dict(
        COMMON, data="imagenet", data_dir="tree", model="micro", image_size=16, patch_size=8, attn="rpc_asym",
        drop_path=0.3, init="default", epochs=3, batch_size=8, accum=2, lr=3e-3, min_lr=2e-3, warmup_epochs=0.5,
        weight_decay=0.4, clip=0.7, ema=0.6, pad=3, num_ops=3, erase=0.6, mixup=0.3, cutmix=0.5, smoothing=0.2,
        repeats=2, max_steps=10, log_every=3, eval_every=2, save_every=5, keep_every=2, num_workers=2,
        skip_bad_images=True, init_from="start.pt"),
    "lm": dict(
        COMMON, data="wikitext", data_dir="text", model="paper", context=12, rpc_layers="0,2", mu_over="token",
        norm="pre", dropout=0.2, cutoffs="6,15", steps=20, batch_size=6, accum=2, lr=0.05, warmup=3, clip=0.3, words=7,
        prompt="the cat", temperature=0.8, max_steps=11, log_every=3, eval_every=4, save_every=5),
    "seg shapes": dict(SEG, attn="rpc_asym", num_images=11, decoder="linear",
                       optimizer="sgd", distort=True, lr=0.1),
    "seg camvid": dict(SEG, **PAIRS, attn="sym_asym", data="camvid", optimizer="sgd", num_workers=3),
    "seg ade20k": dict(SEG, **PAIRS, attn="rpc", decoder_attn="symmetric", data="ade20k", optimizer="adamw", lr=1e-2,
                       eval_every=1, num_workers=0)}
RECORDED = json.loads(Path(__file__).with_name("golden").joinpath("runs.json").read_text())


def assert_close(row, expected):
    """A row of the log beside a recorded one, numbers within float noise; lists and scores are rounded."""
    assert set(row) == set(expected)
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_close(row[key], value)
        elif isinstance(value, list):
            assert_close(dict(enumerate(row[key])), dict(enumerate(value)))
        else:
            about = value if value is None or isinstance(value, str) else pytest.approx(value, rel=1e-4, abs=1.1e-4)
            assert row[key] == about, key


@pytest.mark.parametrize("name", RUNS)
def test_a_run_with_every_flag_away_from_its_default_is_what_it_was(name):
    make_tree()
    make_pairs()
    make_text()
    for path in ("tree/train/n1/4.png", "tree/val/n3/0.png"):
        Path(path).write_bytes(b"nothing")
    torch.manual_seed(1)                                                                 # of 10 classes; the tree has 7
    torch.save({"model": ViT(ViTConfig(
        image_size=16, patch_size=8, num_classes=10, embed_dim=96, depth=6, num_heads=3, attn="rpc_asym",
        rpc_layers=(1, 3), pap=dict(n_iter=3, lambd=0.3, form="paper"), drop_path=0.3, init="default")).state_dict()}, "start.pt")
    script, flags = name.split()[0], RUNS[name]
    usual = defaults(script, data=flags.get("data", "shapes"))
    call(SCRIPTS[script].main, **flags)
    *recorded, last = RECORDED[name]
    for row, expected in zip(rows("a"), recorded, strict=True):
        assert_close(row, expected)
    norms = [w.double().norm().item() for w in common.load("a")["model"].values() if w.is_floating_point()]
    assert norms == pytest.approx(last["weights"], rel=1e-4, abs=1e-4)
    away = {flag for flag, value in flags.items() if flag not in usual or usual[flag] != value}
    unchanged = {"attn", "data", "out_dir", "distort", "optimizer", "init", "num_workers", "eval_every"}
    assert flags.keys() - away <= unchanged
    if script != "lm":
        assert {path.name for path in Path("a").glob("epoch*")} == {"epoch_2.pt"}


# --- recipes ---------------------------------------------------------------------------------------------------------

OURS = dict(attn="rpc", rpc_layers="0", n_iter=4, lambd=4.0, form="released", seed=0)
CLS = dict(OURS, min_lr=1e-5, weight_decay=0.05)
DEIT = dict(CLS, model="tiny", image_size=224, patch_size=16, drop_path=0.1, epochs=300, batch_size=1024,
            lr=5e-4 * 1024 / 512, warmup_epochs=5, clip=0, ema=0.99996, pad=0, num_ops=2, erase=0.25, mixup=0.8,
            cutmix=1.0, smoothing=0.1, repeats=3)
SMALL = dict(CLS, image_size=32, patch_size=4, epochs=8, batch_size=64, warmup_epochs=1, clip=1, repeats=1,
             num_images=16000, holdout=0, ema=0, drop_path=0, num_ops=0, erase=0, mixup=0, cutmix=0)
TEXT = dict(OURS, mu_over="seen", norm="post", dropout=0.1, clip=0.25)
MINI = dict(TEXT, model="mini", context=64, cutoffs="none", batch_size=16, lr=2e-3, warmup=100)
PIXELS = dict(OURS, decoder="mask", min_lr=1e-5, model="nano", optimizer="adamw", lr=2e-3, weight_decay=0.05, clip=1,
              drop_path=0)
VARIED = dict(PIXELS, dropout=0.1, min_scale=0.5, max_scale=2, distort=True, patch_size=16)
RECIPES = [
    ("cls", dict(data="imagenet"), DEIT),
    ("cls", dict(data="imagenet", model="base"), dict(DEIT, model="base", clip=1)),
    ("cls", dict(data="imagenet", model="fan_tiny"),
     dict(DEIT, model="fan_tiny", batch_size=512, lr=2e-3, min_lr=1e-6, drop_path=0, repeats=1, ema=0.99992)),
    ("cls", dict(data="imagenet", model="fan_small"),
     dict(DEIT, model="fan_small", lr=2e-3, min_lr=1e-6, drop_path=0.2, repeats=1, ema=0.99992)),
    ("cls", dict(data="imagenet", model="fan_tiny", lr=1e-4), dict(lr=1e-4, min_lr=1e-6)),
    ("cls", dict(data="shapes"), dict(SMALL, model="nano", lr=2e-3, pad=0, smoothing=0)),
    ("cls", dict(data="cifar10"), dict(SMALL, model="micro", lr=1e-3, pad=4, smoothing=0.1)),
    ("lm", dict(data="pydoc"), dict(MINI, steps=1000, eval_every=200)),
    ("lm", dict(data="wikitext"), dict(MINI, steps=2000, eval_every=250)),
    ("lm", dict(data_dir="text"), dict(MINI, data="folder", steps=2000, eval_every=250)),
    ("lm", dict(data="wikitext103"), dict(TEXT, model="paper", context=24, rpc_layers="0-3", steps=500_000,
                                          batch_size=96, cutoffs="20000,40000,200000", lr=2.5e-4, warmup=2000,
                                          eval_every=4000)),
    ("seg", dict(model="nano"), dict(PIXELS, size=32, patch_size=4, num_classes=11, epochs=5, batch_size=32, dropout=0,
                                      min_scale=1, max_scale=1, distort=False, eval_every=2)),
    ("seg", dict(data="camvid"), dict(VARIED, size=160, num_classes=11, epochs=200, batch_size=8, eval_every=20)),
    ("seg", dict(data="ade20k"), dict(VARIED, model="tiny", optimizer="sgd", lr=1e-3, weight_decay=0, clip=0,
                                      drop_path=0.1, size=512, num_classes=150, epochs=64, batch_size=8))]


@pytest.mark.parametrize("script, flags, recipe", RECIPES)
def test_recipes_are_the_papers_and_those_of_the_results(script, flags, recipe):
    """imagenet, wikitext103 and ade20k: the paper's. lm's size "paper" is a small one in this file."""
    assert {k: v for k, v in defaults(script, **flags).items() if k in recipe} == recipe
    assert lm.SIZES["mini"] == dict(context=64, embed_dim=64, depth=4, num_heads=8, mlp_dim=256)


def test_download_reaches_torchvision_once_and_nothing_is_fetched_without_it(monkeypatch):
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
        once = [("files", True, True)] if download else []
        assert asked == [*once, ("files", True, False), ("files", False, False)]
