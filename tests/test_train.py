"""Interrupted, resumed and multi-process runs of all three trainers give the same numbers."""

import json
import os
import shutil
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import common
import eval_robust
import train_cls
import train_lm
import train_seg
from data.rng import DROPOUT, seed_from
from processes import group, group_results
from runs import assert_same_run, call, flags, log, make_pairs, make_text, make_tree, refused

SCRIPTS = dict(cls=train_cls, lm=train_lm, seg=train_seg)
# an epoch of cls and of seg has three steps
SMALL = dict(
    cls="--model nano --num_images 48 --image_size 16 --patch_size 4 --batch_size 16 "
        "--epochs 8 --eval_every 100",
    lm="--data_dir text --attn rpc --context 8 --batch_size 4 --steps 30 --words 5 --warmup 5 "
       "--eval_every 3",
    seg="--data camvid --data_dir pairs --num_classes 4 --size 32 --patch_size 8 --batch_size 3 "
        "--epochs 8 --num_workers 0 --eval_every 100 --dropout 0.1 "
        "--drop_path 0.1")
# every flag that adds random numbers or state
RANDOM = dict(
    cls="--data imagenet --data_dir tree --batch_size 12 --epochs 3 --warmup 1/3 --ema 0.9 "
        "--num_workers 0 --num_ops 2 --erase 0.5 --mixup 0.8 --cutmix 1 --smoothing 0.1 --pad 2 "
        "--repeats 3 --drop_path 0.1 --adv_eps 2/255 --adv_steps 2",
    lm="--attn softmax --cutoffs 5,10 --eval_every 2", seg="")
each = pytest.mark.parametrize("name", SCRIPTS)


@pytest.fixture(autouse=True)
def data_of_all_three(alone, two_layers, monkeypatch):
    monkeypatch.setattr(common, "LOG_EVERY", 1)
    make_text()
    make_pairs()


def train(name, *parts):
    words = flags(SMALL[name], *parts)
    if "imagenet" in words:                             # images from files, so none are rendered
        i = words.index("--num_images")
        del words[i:i + 2]
    call(SCRIPTS[name].main, words)


def resume(name, *parts):
    call(SCRIPTS[name].main, "--resume", *parts)


@each
def test_resumed_run_is_bit_identical(name):
    make_tree()
    run = flags(RANDOM[name], "--clip 0.1")
    train(name, run, "--max_steps 4 --out_dir whole")
    train(name, run, "--max_steps 2 --out_dir parts")
    if name != "lm":                        # only "parts" evaluated at step 2
        lines = Path("parts/log.jsonl").read_text().splitlines(True)
        Path("parts/log.jsonl").write_text("".join(row for row in lines if '"eval":' not in row))
    resume(name, "parts --max_steps 4")                                     # remembers its flags
    assert_same_run("whole", "parts")
    if name == "lm":
        assert_same_run("whole", "parts", "best.pt")


@each
def test_a_kill_before_any_write_loses_nothing(name, monkeypatch):
    """Copy the folder before each row, evaluation and checkpoint; every copy can resume."""
    run = dict(cls="--num_images 16 --best --epochs 2 --eval_every 1",
               lm="--max_steps 2 --eval_every 1",
               seg="--epochs 2 --batch_size 9 --eval_every 1")[name]
    killed = []

    def copied_before(function):
        def wrapped(*args, **how):
            killed.append(f"killed_{len(killed)}")
            shutil.copytree("whole", killed[-1])
            return function(*args, **how)
        return wrapped
    with monkeypatch.context() as patch:
        places = (SCRIPTS[name], "evaluate"), (common, "append_row"), (os, "replace")
        for owner, function in places:
            patch.setattr(owner, function, copied_before(getattr(owner, function)))
        train(name, run, "--out_dir whole")
    killed = [folder for folder in killed if Path(folder, "last.pt").exists()]
    assert len(killed) >= 6 and len(log("whole", "eval")) == 2
    assert common.load(f"{killed[0]}/last.pt")["step"] == 0         # before the first evaluation
    for folder in killed:
        resume(name, folder, "--max_steps 2" if name == "lm" else "")
        for file in (path.name for path in Path("whole").glob("*.pt")):
            assert_same_run("whole", folder, file)
    before = Path("whole/last.pt").read_bytes()
    resume(name, "whole --max_steps 1")                 # no step is left: prints the result
    assert Path("whole/last.pt").read_bytes() == before and len(log("whole")) == 2


def train_with_best(name, monkeypatch, qualities, *parts):
    """Train into folder a. The evaluations have these qualities; the highest one is the best."""
    what, sign = dict(cls=("loss", -1), lm=("perplexity", -1), seg=("mean_iou", 1))[name]
    found, qualities = dict(top1=0.0, mean_accuracy=0.0, classes=4, images=1), iter(qualities)

    def evaluate(*args, **how):
        return {**found, what: 10.0 + sign * next(qualities)}
    monkeypatch.setattr(SCRIPTS[name], "evaluate", evaluate)
    # an epoch has three steps
    epoch = dict(cls="--best --eval_every 1", lm="--eval_every 3",
                 seg="--data folder --data_dir pairs --num_classes 5 --eval_every 1")[name]
    train(name, "--out_dir a", epoch, *parts)


@pytest.mark.parametrize("qualities, stop, end, best", [
    ((1, 3, 2), 6, 9, 6),       # the second of three evaluations; the third follows a resume
    ((9, 1), 2, 3, 3)])         # a stop between evaluations chooses nothing: step 3 is the first
@each
def test_best_is_the_best_evaluation_across_resumes(name, qualities, stop, end, best, monkeypatch):
    train_with_best(name, monkeypatch, qualities, f"--max_steps {stop}")
    assert Path("a/best.pt").exists() == (stop == 6)
    resume(name, f"a --max_steps {end}")
    assert common.load("a/best.pt")["step"] == best
    assert common.load("a/best.pt")["best"] == common.load("a/last.pt")["best"]




@each
def test_a_loss_not_finite_keeps_the_last_state(name, monkeypatch):
    real, norms = torch.nn.utils.clip_grad_norm_, []

    def clip(*args):
        norms.append(real(*args))
        return norms[-1] * (float("nan") if len(norms) == 5 else 1)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
    monkeypatch.setattr(common, "LOG_EVERY", 9)
    line = refused(SCRIPTS[name], SMALL[name], "--max_steps 9 --out_dir a")
    assert "not finite " in line and "--lr or --clip" in line
    assert common.load("a/last.pt")["step"] == (3 if name == "lm" else 0)


@each
def test_resume_rejects_other_data_and_takes_few_flags(name):
    train(name, "--max_steps 2 --clip 0 --lr 1e-3 --out_dir a", "--amp" * (name == "lm"))
    whole, text = Path("a/last.pt").read_bytes(), Path("a/log.jsonl").read_bytes()
    checkpoint = torch.load("a/last.pt", weights_only=True)
    torch.save(checkpoint | dict(data_crc=7), "a/last.pt")
    assert "changed" in refused(SCRIPTS[name], "--resume a --max_steps 3")
    Path("a/last.pt").write_bytes(whole)
    for flag in ("--attn symmetric", "--n_iter 5", "--batch_size 2", "--seed 1", "--out_dir b"):
        assert "unrecognized arguments" in refused(SCRIPTS[name], "--resume a", flag)
    assert (Path("a/last.pt").read_bytes(), Path("a/log.jsonl").read_bytes()) == (whole, text)
    resume(name, "a --max_steps 3 --lr 1e-2 --clip 1e-9")
    if name == "seg":                                   # another machine has other folders
        args, _ = call(train_seg.get_args, "--resume a --num_workers 3 --data_dir b")
        assert (args.data_dir, args.num_workers) == ("b", 3)
    args = Namespace(**common.load("a/last.pt")["args"])
    rate = dict(cls=lambda: train_cls.learning_rate(2, 3, 24, args),
                seg=lambda: train_seg.learning_rate(2, 24, args),
                lm=lambda: train_lm.learning_rate(2, args))[name]()
    assert args.lr == 0.01 and log("a", "lr")[3] == pytest.approx(rate)
    assert args.amp is (True if name == "lm" else None)             # as in the run


@each
def test_a_moved_run_resumes_in_its_new_place(name):
    train(name, "--max_steps 1 --out_dir a")
    shutil.move("a", "b")
    resume(name, "b --max_steps 2")
    assert common.load("b/last.pt")["step"] == 2 and not Path("a").exists()


@each
def test_a_run_of_another_task_is_refused(name):
    other = dict(cls="seg", lm="cls", seg="lm")[name]
    train(other, "--max_steps 1 --out_dir a")
    line = refused(SCRIPTS[name], "--resume a")
    assert "the checkpoint is for " in line and "expected one for " in line


@each
def test_amp_is_bf16_in_training(name):
    losses = []
    for amp in ("--amp", "--no-amp"):
        train(name, "--max_steps 1", amp, "--out_dir", [f"a{amp}"])
        losses += log(f"a{amp}").values()
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=0.02)


DATA = dict(cls="--data imagenet --data_dir tree --num_workers 0 --batch_size 12", lm="",
            seg="--batch_size 2")


def main_of_node(name, what=""):
    """Run main() in the folder of this process."""
    os.chdir(f"node{os.environ['RANK']}")
    if what == "flags":
        sys.argv += ["--lr", f"1e-{3 + int(os.environ['RANK'])}"]
    SCRIPTS[name].main()


def errors_of(main, run):
    """Return what two processes say that must fail. One may lose its connection to the other."""
    codes, _, errors = zip(*group_results(main, run))
    assert codes == (1, 1)
    return "".join(errors)


@pytest.mark.parametrize("name, what", [*((name, "data") for name in SCRIPTS), ("cls", "flags"),
                                        ("cls", "validation")])
def test_processes_with_other_data_or_flags_stop(name, what):
    """Nodes have their own disks."""
    make_tree()
    for node in ("node0", "node1"):
        for data in ("tree", "pairs", "text"):
            shutil.copytree(data, f"{node}/{data}")
    if what == "validation":
        Path("node1/tree/val/n0/0.png").unlink()
    if what == "data":
        for pattern in ("tree/train/n0/0.png", "pairs/*/training/8.png"):
            for path in Path("node1").glob(pattern):
                path.unlink()
        with open("node1/text/wiki.train.tokens", "a") as f:
            f.write("one more line\n")

    words = SMALL[name].replace("--num_images 48 ", "")
    run = flags(words, DATA[name], "--out_dir a")
    said = errors_of(partial(main_of_node, name, what), run)
    assert f"the processes have different {'flags' if what == 'flags' else 'data'}" in said, said
    assert not list(Path().glob("node*/a/log.jsonl"))


@each
def test_evaluating_processes_with_other_data_stop(name, monkeypatch):
    make_tree()
    train(name, DATA[name], "--max_steps 1 --out_dir node0/a")
    shutil.move("tree", "node0/tree")
    shutil.copytree("node0", "node1")
    for node in (0, 1):
        make_text(f"node{node}/text", seed=node)
        make_pairs(f"node{node}/pairs")
    for pattern in ("pairs/*/validation/4.png", "tree/val/n0/0.png"):
        for path in Path("node1").glob(pattern):
            path.unlink()
    monkeypatch.setitem(SCRIPTS, "cls", eval_robust)
    run = "--ckpt a --measures clean" if name == "cls" else "--eval_only a"
    said = errors_of(partial(main_of_node, name), flags(run, "--out_dir b"))
    assert "the processes have different" in said, said
    assert not list(Path().glob("node*/b"))


@each
def test_evaluations_name_a_run_stopped_early(name, capsys):
    train(name, "--max_steps 1 --out_dir a")
    capsys.readouterr()
    if name == "cls":
        eval_robust.load_network("a", "cpu")
    else:
        call(SCRIPTS[name].main, "--eval_only a --limit 20")
    total = dict(cls=24, lm=30, seg=24)[name]           # steps of the whole training
    assert f"note: a is the network of step 1 of {total}\n" in capsys.readouterr().out


def main_and_seed(name):
    """Run main() and print the seed of the last step's masks. Only rank 0 may write."""
    if os.environ["RANK"] != "0":
        common.replacing = common.save = train_lm.sample = None
    SCRIPTS[name].main()
    print(torch.initial_seed())


@each
def test_two_processes_equal_one(name):
    """Without dropout, mixup and cutmix, which differ per process."""
    extra = dict(cls="--num_images 85 --num_ops 2 --erase 0.5 --mixup 0 --cutmix 0 --pad 2 "
                     "--repeats 3 --adv_eps 2/255 --adv_steps 1 --max_steps 6",
                 lm="--max_steps 10 --dropout 0 --eval_every 5",
                 seg="--dropout 0 --drop_path 0 --epochs 2 --batch_size 2")
    run, steps = flags(SMALL[name], extra[name]), dict(cls=6, lm=10, seg=8)[name]
    # LOCAL_RANK 0: each process is the first one of its node
    printed = group(partial(main_and_seed, name), [*run, "--out_dir", "two"], LOCAL_RANK="0")
    train(name, extra[name], "--out_dir one")
    assert json.loads(Path("two/log.jsonl").read_text().splitlines()[0])["processes"] == 2
    losses, norms = ([list(log(folder, what).values()) for folder in ("two", "one")]
                     for what in ("loss", "grad_norm"))
    assert len(losses[1]) == steps
    np.testing.assert_allclose(*losses, rtol=0, atol=3e-5)
    np.testing.assert_allclose(*norms, rtol=1e-3)
    seeds = [seed_from(0, DROPOUT, steps - 1, rank) for rank in (0, 1)]
    assert [int(text.split()[-1]) for text in printed] == seeds
    assert len(printed[1].split()) == 1                             # only rank 0 prints
    a, b = log("two", "eval")[steps], log("one", "eval")[steps]
    what = dict(cls="loss", lm="perplexity", seg="pixel_accuracy")[name]
    assert a[what] == pytest.approx(b[what], rel=1e-3 if name != "seg" else 0.02)
