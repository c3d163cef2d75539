"""What holds for all three trainers: runs stop, go on and spread over processes without changing a number; bad input
ends in one line and loses nothing. The real scripts, small settings."""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import common
import train_cls
import train_lm
import train_seg
from lm import LM
from processes import Started, group
from runs import assert_same_run, call, flags, log, make_pairs, make_text, make_tree, refused, wait_for
from segmenter import Segmenter
from vit import ViT

SCRIPTS = dict(cls=train_cls, lm=train_lm, seg=train_seg)
SMALL = dict(
    cls="--model nano --num_images 160 --image_size 16 --patch_size 4 --batch_size 16 --log_every 1 --eval_every 100",
    lm="--data_dir text --context 8 --batch_size 4 --steps 30 --words 5 --warmup 5 --log_every 1 --eval_every 100",
    seg="--data camvid --data_dir pairs --num_classes 4 --size 32 --patch_size 8 --batch_size 4 --epochs 8 "
        "--log_every 1 --save_images 0 --num_workers 0 --eval_every 100 --dropout 0.1 --drop_path 0.1")
# what makes a step random or remembers one, on; an epoch of cls has 2 steps
RANDOM = dict(
    cls="--data imagenet --data_dir tree --image_size 16 --patch_size 4 --batch_size 16 --epochs 3 --warmup_epochs 1 "
        "--num_workers 0 --num_ops 2 --erase 0.5 --mixup 0.8 --cutmix 1 --smoothing 0.1 --pad 2 --repeats 3 --ema 0.9 "
        "--drop_path 0.1 --accum 2 --adv_eps 2/255 --adv_steps 2", lm="--accum 2 --attn softmax --cutoffs 5,10", seg="")
each = pytest.mark.parametrize("name", SCRIPTS)


@pytest.fixture(autouse=True)
def data_of_all_three(alone):
    make_text()
    make_pairs()


def train(name, *parts):
    call(SCRIPTS[name].main, SMALL[name], *parts)


def resume(name, *parts):
    call(SCRIPTS[name].main, "--resume", *parts)


def bad(name, *parts):
    return refused(SCRIPTS[name], SMALL[name], *parts)


def headers(folder):
    found = [json.loads(line) for line in Path(folder, "log.jsonl").read_text().splitlines()]
    return [row for row in found if "args" in row]


# --- stopping and going on -------------------------------------------------------------------------------------------

@each
def test_three_steps_and_three_resumed_equal_six_bit_for_bit(name):
    make_tree(classes=3, train=12)
    run = flags(RANDOM[name], "--save_every 3 --clip 0.1", "--eval_every 3" if name == "lm" else "")
    train(name, run, "--max_steps 6 --out_dir whole")
    train(name, run, "--max_steps 3 --out_dir parts")
    if name != "lm":                                             # the run of three had to evaluate, the other had not
        lines = Path("parts/log.jsonl").read_text().splitlines(True)
        Path("parts/log.jsonl").write_text("".join(line for line in lines if '"eval":' not in line))
    # a run with a flag that is no more, on a machine with a GPU
    checkpoint = common.load("parts")
    own = dict(cache_dir="text/cache", device="cuda:99", amp=True)
    common.save("parts/last.pt", {**checkpoint, "args": {**checkpoint["args"], **own}})
    resume(name, "parts --max_steps 6")                                                            # remembers its flags
    assert_same_run("whole", "parts")
    if name == "lm":
        assert_same_run("whole", "parts", "best.pt")
    assert "cache_dir" not in common.load("parts")["args"] and (name != "cls" or common.load("parts")["ema"])


@each
def test_a_kill_before_any_write_loses_nothing(name, monkeypatch):
    """Two steps, each evaluated: from what the folder holds before each row, evaluation or checkpoint it goes on."""
    run = dict(cls="--num_images 16 --epochs 2 --eval_every 1 --keep_every 1", lm="--max_steps 2 --eval_every 1",
               seg="--epochs 2 --batch_size 9 --eval_every 1")[name]
    killed = []

    def copied_before(function):
        def wrapped(*args, **how):
            killed.append(f"killed_{len(killed)}")
            shutil.copytree("whole", killed[-1])
            return function(*args, **how)
        return wrapped
    with monkeypatch.context() as patch:
        for owner, function in ((SCRIPTS[name], "evaluate"), (common.Log, "append"), (common, "save")):
            patch.setattr(owner, function, copied_before(getattr(owner, function)))
        train(name, run, "--out_dir whole")
    killed = [folder for folder in killed if Path(folder, "last.pt").exists()]
    assert len(killed) >= 4 and len(log("whole", "eval")) == 2
    for folder in killed:
        resume(name, folder, "--max_steps 2" if name == "lm" else "")
        for file in (path.name for path in Path("whole").glob("*.pt")):
            assert_same_run("whole", folder, file)
    before = Path("whole/last.pt").read_bytes()
    resume(name, "whole --max_steps 2")                                             # nothing is left: nothing changes
    assert Path("whole/last.pt").read_bytes() == before and len(log("whole")) == len(log("whole", "eval")) == 2


@each
def test_ctrl_c_ends_in_the_line_that_resumes_and_a_folder_is_not_taken_twice(name):
    forever = "--steps 1000000" if name == "lm" else "--epochs 100000"
    process = Started(SCRIPTS[name].main, flags(SMALL[name], forever, "--save_every 1 --out_dir a"))
    wait_for("a/last.pt", process)
    assert "--out_dir a exists" in bad(name, "--out_dir a")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    step, last = common.load("a")["step"], err.splitlines()[-1]
    assert process.poll() != 0 and "Traceback" not in err
    assert last.startswith("stopped by Ctrl-C") and last.endswith("--resume a")
    resume(name, "a --max_steps", [step + 2])
    assert list(log("a")) == list(range(1, step + 3)) and not list(Path("a").glob("*.tmp"))




def test_a_redirected_run_prints_a_line_with_loss_and_speed_at_every_row(capsys):
    train("cls", "--max_steps 4 --log_every 2 --out_dir a")
    lines = re.findall(r"^step +(\d+)  loss [\d.]+  \d+ images/s  [\d.]+ ms a step$", capsys.readouterr().out, re.M)
    assert lines == ["2", "4"]


@each
def test_what_is_not_finite_stops_the_run_and_keeps_the_last_good_state(name, monkeypatch):
    """A step's loss is that of the weights before it: the weights are looked at, too."""
    owner, function = (LM, "forward") if name == "lm" else (SCRIPTS[name].F, "cross_entropy")
    real, step = getattr(owner, function), torch.optim.Adam.step if name == "lm" else torch.optim.AdamW.step
    calls = []

    def diverging(*args, **how):
        training = "reduction" not in how or name == "seg"
        calls.extend([1] * training)
        return real(*args, **how) * (float("nan") if training and len(calls) == 5 else 1)

    def breaking(optimizer, *args, **how):
        calls.append(step(optimizer, *args, **how))
        if len(calls) == 4:
            with torch.no_grad():
                optimizer.param_groups[0]["params"][-1].view(-1)[0] = float("inf")
    with monkeypatch.context() as patch:
        patch.setattr(owner, function, diverging)
        line = bad(name, "--max_steps 9 --save_every 3 --log_every 2 --out_dir a")
    assert line.startswith("error: not finite at step 5: loss nan") and line.endswith("--resume a")
    calls.clear()
    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.Adam if name == "lm" else torch.optim.AdamW, "step", breaking)
        line = bad(name, "--max_steps 4 --save_every 3 --log_every 3 --out_dir b")
    assert "not finite at step 4" in line
    for folder in "ab":
        checkpoint = common.load(folder)
        assert checkpoint["step"] == 3 and all(w.isfinite().all() for w in checkpoint["model"].values())


@each
def test_the_rate_of_a_row_is_per_second_and_leaves_out_evaluations(name, monkeypatch):
    """A forward pass takes half a second, an evaluation a hundred."""
    Model, batch = dict(cls=(ViT, 16), lm=(LM, 4 * 8), seg=(Segmenter, 4))[name]                # images, tokens, images
    now, real, forward = [0.0], SCRIPTS[name].evaluate, Model.forward

    def evaluate(*args, **how):
        now[0] += 100
        return real(*args, **how)

    def slow(model, *inputs):
        now[0] += 0.5 * model.training
        return forward(model, *inputs)
    monkeypatch.setattr(time, "time", lambda: now[0])
    monkeypatch.setattr(SCRIPTS[name], "evaluate", evaluate)
    monkeypatch.setattr(Model, "forward", slow)
    often = dict(cls="--num_images 32 --epochs 2 --eval_every 1", lm="--eval_every 2", seg="--eval_every 1")[name]
    train(name, often, "--max_steps 4 --log_every 2 --out_dir a")
    rates = [value for line in Path("a/log.jsonl").read_text().splitlines()
             for key, value in json.loads(line).items() if key.endswith("_per_s")]
    assert len(rates) >= 2 and set(rates) == {2 * batch}


# --- folders of runs -------------------------------------------------------------------------------------------------

def test_a_restart_by_torchrun_goes_on_with_its_own_run_alone(monkeypatch):
    """It restarts a worker that failed on its input: what was refused then must not be overwritten now."""
    train("lm", "--max_steps 2")
    train("lm", "--max_steps 2 --lr 0.1")
    own, folder = "text_rpc", Path("out/text_rpc")
    before = (folder / "last.pt").read_bytes(), (folder / "log.jsonl").read_text()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")

    def chosen(which=own, **other):
        args = argparse.Namespace(**common.load(f"out/{which}")["args"] | dict(resume=None) | other)
        return str(common.start(args, own)[3]), args.resume
    assert chosen() == (f"out/{own}",) * 2 and chosen(f"{own}_2") == (f"out/{own}_2",) * 2
    assert chosen(lr=0.2) == (f"out/{own}_3", None)
    assert f"--out_dir {folder} exists" in bad("lm", "--max_steps 3 --lr 0.3", ["--out_dir", folder])
    train("lm", "--max_steps 2 --lr 0.1")                                                     # goes on: nothing is left
    assert len(log(f"out/{own}_2", "eval")) == 1 and not Path(f"out/{own}_3").exists()
    Path(f"out/{own}_2/last.pt").unlink()                                  # it died before its first save: from the start
    assert chosen(lr=0.1) == (f"out/{own}_2", None) and not Path(f"out/{own}_2").exists()
    assert ((folder / "last.pt").read_bytes(), (folder / "log.jsonl").read_text()) == before


@each
def test_a_run_is_kept_whatever_it_is_asked_to_go_on_with(name):
    train(name, "--max_steps 2 --out_dir a")
    whole, text = Path("a/last.pt").read_bytes(), Path("a/log.jsonl").read_bytes()

    def kept():
        return (Path("a/last.pt").read_bytes(), Path("a/log.jsonl").read_bytes()) == (whole, text)
    assert bad(name, "--max_steps 3 --out_dir a").startswith("error: --out_dir a exists")
    for flag in ("--attn symmetric", "--out_dir b", "--ema 0.9" if name == "cls" else "--seed 1"):
        assert flag.split()[0].strip("-") in refused(SCRIPTS[name], "--resume a", flag)
    torch.save({**common.load("a"), "optimizer": None}, "a/last.pt")
    assert "optimizer" in refused(SCRIPTS[name], "--resume a")
    Path("a/last.pt").write_bytes(whole)

    if name != "lm":
        for part, value in (("training_images", 7), ("classes", list("wxyz"))):                       # the data changed
            torch.save({**common.load("a"), part: value}, "a/last.pt")
            line = refused(SCRIPTS[name], "--resume a --max_steps 3")
            assert "--resume a" in line and part in line
            Path("a/last.pt").write_bytes(whole)
    assert kept()
    resume(name, "a --max_steps 3")
    assert list(log("a")) == [1, 2, 3]


@pytest.mark.parametrize("name", ["cls", "seg"])
def test_a_resumed_run_takes_new_rates_clip_and_decay(name):
    warmup = "--epochs 4 --warmup_epochs" if name == "cls" else "--epochs 4 --log_every"
    train(name, warmup, "1 --max_steps 2 --clip 0 --lr 1e-3 --out_dir a")
    if name == "cls":
        line = refused(train_cls, "--resume a --epochs 1 --warmup_epochs 2")
        assert re.search("--warmup_epochs 2.0 .*--epochs 1", line)
    late = "--warmup_epochs 0" if name == "cls" else ""
    resume(name, "a --max_steps 3 --weight_decay 0.5 --lr 1e-2 --clip 1e-9", late)
    checkpoint, steps = common.load("a"), dict(cls=40, seg=12)[name]
    rate = common.lr_at(2, steps, 0, 1e-2, 1e-5) if name == "cls" else train_seg.poly_lr(2, steps, 1e-2, 1e-5)
    assert [group["weight_decay"] for group in checkpoint["optimizer"]["param_groups"]] == [0.5, 0]
    assert checkpoint["args"]["clip"] == 1e-9 and log("a", "lr")[3] == pytest.approx(rate)


def test_a_resumed_run_has_its_recipe_where_an_older_file_lacks_a_flag_and_a_stored_none_gives_way():
    recipes = {"a": dict(lr=1.0, model="s"), ("a", "m"): dict(lr=2.0)}
    p = argparse.ArgumentParser()
    p.add_argument("--data")
    p.add_argument("--data_dir")
    p.add_argument("--lr", type=float)
    p.add_argument("--num_workers", type=int)
    p.add_argument("--model")
    common.add_running(p, "x", "--epochs")
    own = dict(data="a", model="m", num_workers=None)
    torch.save(dict(task="classification", args=own), "run.pt")
    args = call(partial(common.parse, p, recipes, "train_cls.py"), "--resume run.pt --num_workers 3")
    assert (args.lr, args.num_workers, args.model) == (2.0, 3, "m")
    torch.save(dict(task="classification", args=dict(own, lr=7.0)), "run.pt")
    assert call(partial(common.parse, p, recipes, "train_cls.py"), "--resume run.pt").lr == 7.0


# --- processes -------------------------------------------------------------------------------------------------------

def main_and_seed(name):
    """main(), then the seed of the last step's masks."""
    SCRIPTS[name].main()
    print(torch.initial_seed())


@each
def test_two_processes_equal_one_and_accumulation_too(name):
    """Without dropout, whose masks are a process's own. seg: ignored pixels are unequal, the last batch is short."""
    extra = dict(cls="--num_images 165 --num_ops 2 --erase 0.5 --mixup 0.8 --cutmix 1 --pad 2 --repeats 3 --ema 0.9 "
                     "--adv_eps 2/255 --adv_steps 1 --max_steps 12",
                 lm="--max_steps 10 --dropout 0 --eval_every 5", seg="--dropout 0 --drop_path 0 --epochs 4")
    accum = "" if name == "seg" else "--accum 2"
    run, steps = flags(SMALL[name], extra[name]), dict(cls=12, lm=10, seg=12)[name]
    # as the first processes of two nodes
    printed = group(partial(main_and_seed, name), [*run, *accum.split(), "--out_dir", "two"], LOCAL_RANK="0")
    train(name, extra[name], "--out_dir one")
    train(name, extra[name], accum, "--out_dir accumulated")
    one = list(log("one").values())
    assert len(one) == steps and headers("two")[0]["world"] == 2
    for other in ("two", "accumulated"):
        np.testing.assert_allclose(list(log(other).values()), one, rtol=0, atol=3e-5)
        norms = [list(log(folder, "grad_norm").values()) for folder in (other, "one")]
        np.testing.assert_allclose(*norms, rtol=1e-3)
    seeds = [hash((0, steps - 1, rank)) % 2 ** 63 for rank in (0, 1)]
    assert [int(text.split()[-1]) for text in printed] == seeds and len(printed[1].split()) == 1   # rank 0 alone speaks
    a, b = log("two", "eval")[steps], log("one", "eval")[steps]
    assert a.get("images") == b.get("images") == dict(cls=33, lm=None, seg=5)[name]                     # odd numbers
    what = dict(cls="loss", lm="perplexity", seg="pixel_accuracy")[name]
    assert a[what] == pytest.approx(b[what], rel=1e-3 if name != "seg" else 0.02)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the worker in /proc")
def test_a_killed_worker_of_torchrun_restarts_and_the_run_finishes():
    env = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC")} | {"OMP_NUM_THREADS": "1"}
    command = flags("-m torch.distributed.run --standalone --nproc_per_node=2 --max_restarts=3", [train_cls.__file__],
                    SMALL["cls"], "--epochs 8 --save_every 5 --lr 1e-4 --out_dir a")                          # 80 steps
    process = subprocess.Popen([sys.executable, *command], env=env, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    wait_for("a/last.pt", process)
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(next(p for p in workers if "train_cls.py" in Path(f"/proc/{p}/cmdline").read_text())), signal.SIGKILL)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0 and "test accuracy" in out, err[-3000:]
    assert list(log("a")) == list(range(1, 81)) and common.load("a")["step"] == 80
    assert len(headers("a")) == 2 and headers("a")[1]["step"] > 0                                # it went on, not again


# --- bad input -------------------------------------------------------------------------------------------------------

# The line that is expected names the flag, or what is said after "->".
OF_ALL = """
--batch_size 0; --batch 16; --attn linear; --max_steps 0; --save_every -1; --lr nan; --lr -1; --lr 1e300; --lambd -1
--rpc_layers foo; --rpc_layers 9; --rpc_layers 2-0; --seed -1; --device cdua; --device cuda:99; stray
--resume nowhere -> nowhere; --resume notes.txt -> notes.txt; --out_dir notes.txt -> notes.txt
"""
BAD = dict(cls="""
--data cifar10 -> --data_dir; --data imagenet --data_dir nowhere -> nowhere; --data_dir nowhere -> nowhere
--data shapes --data_dir nowhere -> --data_dir nowhere; --image_size 18; --num_images 10 -> batch_size; --accum 3
--mixup 0.8 --accum 16 -> batch_size; --holdout 160; --adv_eps 2; --warmup_epochs 3 --epochs 2 -> warmup_epochs
--init_from nowhere.pt -> nowhere
""", lm="""
--data wikitext --data_dir nowhere -> nowhere; --context 100000; --batch_size 9 --accum 2 -> --accum 2
--cutoffs 5,x; --cutoffs 10,5; --sample nowhere -> nowhere; --prompt=purple -> purple
""", seg="""
--data ade20k --data_dir nowhere -> nowhere; --size 18; --backbone nowhere -> nowhere; --data shapes --data_dir a -> data_dir
--window 20; --stride 40; --num_classes 3 -> value 4; --num_classes 300
""")
ROWS = [(name, *(row.split(" -> ") if " -> " in row else (row, row.split()[0].strip("-="))))
        for name in SCRIPTS for row in re.split("; |\n", (OF_ALL + BAD[name]).strip()) if row]


@each
def test_bad_flags_end_in_one_line_that_names_them(name):
    Path("notes.txt").write_text("root:x:0:0:not a checkpoint\n")
    for script, flag, word in ROWS:
        if script == name:
            assert word in bad(name, "--max_steps 2", flag), flag
    assert not list(Path(".").rglob("*.pt")) and Path("notes.txt").read_text().startswith("root")
