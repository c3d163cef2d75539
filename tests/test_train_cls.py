"""Claims about train_cls.py: runs start, stop, go on and spread over processes without changing a number; bad input
ends in one line and loses nothing. The real script, small settings; its flags: test_flags_cls.py."""

import argparse
import contextlib
import errno
import json
import os
import random
import re
import resource
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
from PIL import Image

import common
import train_cls
from data.images import ImageTree
from data.shapes import load_shapes
from data.splits import load_data
from processes import Started, group
from runs import assert_same_run, call, flags, log, refused, rows, wait_for
from vit import ViT, ViTConfig, vit_from_checkpoint

pytestmark = pytest.mark.usefixtures("alone")
SCRIPT = Path(train_cls.__file__).resolve()
SMALL = "--model nano --num_images 160 --image_size 16 --patch_size 4 --batch_size 16 --log_every 1".split()
IMAGENET = ("--data imagenet --model nano --image_size 64 --batch_size 8 --epochs 2 --warmup_epochs 1 --num_workers 0 "
            "--log_every 1").split()
RECIPE = ("--num_ops 2 --erase 0.5 --mixup 0.8 --cutmix 1 --smoothing 0.1 --pad 2 --repeats 3 --ema 0.9 "
          "--drop_path 0.1").split()
train, bad = partial(call, train_cls.main), partial(refused, train_cls)


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory):
    root, rng = tmp_path_factory.mktemp("imagenet"), np.random.default_rng(0)
    for split, count in (("train", 6), ("val", 3)):
        for name in ("n01", "n02", "n03"):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (*rng.integers(40, 120, 2), 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{i}.JPEG")
    return root


def start_script(*parts, launcher=()):
    """The script itself in a process, or with torchrun's flags as launcher in several."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC")} | {"OMP_NUM_THREADS": "1"}
    launcher = ("-m", "torch.distributed.run", *launcher) if launcher else ()
    return subprocess.Popen([sys.executable, *launcher, str(SCRIPT), *flags(*parts)], env=env, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def headers(folder):
    found = [json.loads(line) for line in Path(folder, "log.jsonl").read_text().splitlines()]
    return [row for row in found if "args" in row]


# --- a run and what it leaves ----------------------------------------------------------------------------------------

def test_the_default_run_ends_in_its_accuracy_and_its_checkpoint_alone_reproduces_it(capsys):
    train("--max_steps 2 --num_images 500")                                 # all else as in the README's first command
    *_, said, following = capsys.readouterr().out.strip().splitlines()
    folder = Path("out/shapes_rpc")
    evaluation, checkpoint, test = log(folder, "eval")[2], common.load(folder), load_shapes("test", 100)
    assert f"test accuracy {evaluation['top1']:.2f} %" in said
    assert following == f"next: python eval_robust.py --ckpt {folder}"
    with torch.no_grad():
        right = vit_from_checkpoint(checkpoint)(test.images.float() / 255).argmax(1) == test.labels
    assert evaluation["images"] == 100 and evaluation["top1"] == pytest.approx(right.sum().item(), abs=1e-6)
    assert checkpoint["classes"] == test.classes and checkpoint["step"] == 2 and checkpoint["task"] == "classification"
    train(SMALL, "--max_steps 1")                                                  # gets a folder of its own
    assert sorted(d.name for d in Path("out").iterdir()) == ["shapes_rpc", "shapes_rpc_2"]


def test_every_attention_trains_two_steps():
    for attn in "softmax symmetric scaled_s scaled_alpha rpc rpc_asym sym_asym".split():
        train(SMALL, "--max_steps 2 --out_dir", [attn, "--attn", attn])
        assert list(log(attn)) == [1, 2] and log(attn)[1] != log(attn)[2]
        assert vit_from_checkpoint(common.load(attn)).config.attn == attn


def test_training_learns():
    train(SMALL, "--max_steps 60 --epochs 6 --warmup_epochs 0.5 --out_dir a --eval_every 10")
    losses = list(log("a").values())
    assert len(losses) == 60 and np.mean(losses[-10:]) < np.mean(losses[:5]) - 0.1


def test_the_rate_of_a_row_is_in_images_and_leaves_out_evaluations(monkeypatch):
    now, real, forward = [0.0], train_cls.evaluate, ViT.forward

    def evaluate(*args, **how):
        now[0] += 100
        return real(*args, **how)

    def slow(model, images):
        now[0] += 0.5 * model.training
        return forward(model, images)
    monkeypatch.setattr(time, "time", lambda: now[0])
    monkeypatch.setattr(train_cls, "evaluate", evaluate)
    monkeypatch.setattr(ViT, "forward", slow)
    train(SMALL, "--num_images 32 --epochs 2 --out_dir a --log_every 2")
    rates = [json.loads(line).get("images_per_s") for line in Path("a/log.jsonl").read_text().splitlines()]
    assert [rate for rate in rates if rate] == [32, 32]


def test_holdout_evaluates_on_training_images_that_are_not_trained_on():
    args = argparse.Namespace(data="shapes", data_dir=None, num_images=100, image_size=16, holdout=30)
    train_set, held = load_data(args, torch.device("cpu"))
    everything = load_shapes("train", 100, 16).images
    assert len(train_set.images) == 70 and len(held.images) == len(held.labels) == 30
    both = torch.cat([train_set.images, held.images]).flatten(1)
    assert sorted(map(bytes, both.numpy())) == sorted(map(bytes, everything.flatten(1).numpy()))


# --- stopping and going on -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("layout", ["shapes", "imagenet"])
def test_three_steps_and_three_resumed_equal_six_bit_for_bit_with_everything_on(imagenet, layout):
    run = flags(SMALL, "--num_images 64") if layout == "shapes" else flags(IMAGENET, "--epochs 3 --data_dir", [imagenet])
    run += flags(RECIPE, "--accum 2 --save_every 3 --eval_every 9")                               # 4 or 2 steps per epoch
    train(run, "--max_steps 6 --out_dir whole")
    train(run, "--max_steps 3 --out_dir parts")
    assert log("parts", "eval").keys() == {3}                                             # the other has none there
    Path("parts/log.jsonl").write_text("".join(
        line for line in Path("parts/log.jsonl").read_text().splitlines(True) if '"eval":' not in line))
    train("--resume parts --max_steps 6")                                                          # remembers its flags
    assert_same_run("whole", "parts")
    assert common.load("parts")["ema"]


def test_a_run_killed_at_any_moment_resumes_to_the_same_losses_and_weights():
    run = flags(SMALL, "--save_every 1 --eval_every 100 --epochs 3")                                          # 30 steps
    train(run, "--out_dir whole")
    process = Started(train_cls.main, [*run, "--out_dir", "killed"])
    wait_for("killed/last.pt", process)
    time.sleep(random.uniform(0, 0.3))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert 1 <= common.load("killed")["step"] <= 30                                         # whole, whatever happened
    train("--resume killed")
    assert_same_run("whole", "killed")
    assert len(log("whole")) == 30


class Killed(BaseException):
    pass


def test_a_kill_before_any_write_loses_no_evaluation(monkeypatch):
    run = flags(SMALL, "--num_images 16 --epochs 2")                                # two epochs of one step, 9 writes
    train(run, "--out_dir whole")

    def killed_before(function, write, calls):
        def wrapped(*args, **how):
            calls.append(function)
            if len(calls) >= write:                                                 # nothing is written after a kill
                raise Killed
            return function(*args, **how)
        return wrapped

    for write in range(2, 10):
        folder, calls = f"killed_{write}", []
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            for module, name in ((train_cls, "evaluate"), (common.Log, "append"), (common, "save")):
                patch.setattr(module, name, killed_before(getattr(module, name), write, calls))
            train(run, "--out_dir", folder)
        train("--resume" if Path(folder, "last.pt").exists() else flags(run, "--out_dir"), folder)
        assert_same_run("whole", folder)
    assert len(calls) == 9


def test_a_finished_run_resumed_says_so_and_changes_nothing():
    train(SMALL, "--max_steps 2 --out_dir a")
    before = Path("a/last.pt").read_bytes()
    with contextlib.suppress(ValueError):                                                  # fine too
        train("--resume a --max_steps 2")
    assert Path("a/last.pt").read_bytes() == before and list(log("a")) == [1, 2]


def test_flags_of_a_resumed_run_hold_or_are_refused():
    train(SMALL, "--max_steps 1 --epochs 2 --warmup_epochs 2 --out_dir a")
    before = Path("a/last.pt").read_bytes()
    for flag, word in (("--attn symmetric", "--attn"), ("--lambd 3", "--lambd"), ("--rpc_layers all", "--rpc_layers"),
                       ("--seed 1", "--seed"), ("--batch_size 32", "--batch_size"), ("--ema 0.9", "ema"),
                       ("--out_dir b", "--out_dir"), ("--init_from a", "--init_from"), ("--init default", "")):
        if word:
            assert word in bad("--resume a", flag)
    assert "--warmup_epochs 2.0" in bad("--resume a --epochs 1")
    assert Path("a/last.pt").read_bytes() == before and list(log("a")) == [1]
    train("--resume a --max_steps 2 --weight_decay 0.5 --lr 1e-2 --init default")         # what it used: no other init
    checkpoint = common.load("a")
    assert checkpoint["optimizer"]["param_groups"][0]["weight_decay"] == checkpoint["args"]["weight_decay"] == 0.5
    assert checkpoint["args"]["lr"] == 1e-2
    checkpoint["args"]["device"] = "cuda:99"                                                   # of another machine
    common.save("a/last.pt", checkpoint)
    train("--resume a --max_steps 3")
    assert list(log("a")) == [1, 2, 3]


# --- processes -------------------------------------------------------------------------------------------------------

def train_and_print_seed():
    train_cls.main()
    print(torch.initial_seed())                                                          # of the last step's masks


def test_two_processes_equal_one_with_accumulation_and_everything_on():
    run = flags(SMALL, RECIPE, "--drop_path 0 --max_steps 12 --eval_every 100 --num_images 165")     # 33 test images: odd
    printed = group(train_and_print_seed, [*run, "--accum", "2", "--out_dir", "two"], LOCAL_RANK="0")        # two nodes
    train(run, "--accum 2 --out_dir accumulated")
    train(run, "--out_dir one")
    two, accumulated, one = (np.array(list(log(d).values())) for d in ("two", "accumulated", "one"))
    assert len(one) == 12
    np.testing.assert_allclose(two, one, rtol=0, atol=1e-5)
    np.testing.assert_allclose(accumulated, one, rtol=0, atol=1e-5)
    np.testing.assert_allclose(*[list(log(d, "grad_norm").values()) for d in ("two", "one")], rtol=1e-3)
    assert [text.split()[-1] for text in printed] == [str(common.seed_of(0, 11, rank)) for rank in (0, 1)]
    assert "test accuracy" in printed[0] and len(printed[1].split()) == 1 and headers("two")[0]["world"] == 2
    a, b = log("two", "eval")[12], log("one", "eval")[12]
    assert a["images"] == b["images"] == 33 and abs(a["top1"] - b["top1"]) < 4 and abs(a["loss"] - b["loss"]) < 1e-3


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the worker in /proc")
def test_a_killed_worker_restarts_and_the_run_finishes():
    run = flags(SMALL, "--epochs 12 --save_every 5 --eval_every 100 --lr 1e-4")                              # 120 steps
    process = start_script(run, "--out_dir a", launcher=("--standalone", "--nproc_per_node=2", "--max_restarts=3"))
    wait_for("a/last.pt", process)
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(next(p for p in workers if "train_cls.py" in Path(f"/proc/{p}/cmdline").read_text())), signal.SIGKILL)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0 and "test accuracy" in out, err[-3000:]
    assert list(log("a")) == list(range(1, 121)) and common.load("a")["step"] == 120
    assert len(headers("a")) == 2 and headers("a")[1]["step"] > 0                                # it went on, not again


def test_a_restart_goes_on_with_its_own_run_alone(monkeypatch):
    """torchrun restarts a worker that failed on its input: what was refused then must not be overwritten now."""
    train(SMALL, "--max_steps 2")                                                                     # out/shapes_rpc
    train(SMALL, "--max_steps 2 --lr 0.1")                                                            # out/shapes_rpc_2
    folder = Path("out/shapes_rpc")
    before = (folder / "last.pt").read_bytes(), (folder / "log.jsonl").read_text()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")

    def chosen(name="shapes_rpc", **other):
        args = argparse.Namespace(**common.load(f"out/{name}")["args"] | dict(resume=None) | other)
        return str(common.choose_out_dir(args, "shapes_rpc")), args.resume
    assert chosen() == ("out/shapes_rpc",) * 2 and chosen("shapes_rpc_2") == ("out/shapes_rpc_2",) * 2
    assert chosen(lr=0.2) == ("out/shapes_rpc_3", None)
    assert "already holds a run" in bad(SMALL, "--max_steps 3 --lr 0.3", ["--out_dir", folder])
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    train(SMALL, "--max_steps 2")                                                                    # out/shapes_rpc_3
    Path("out/shapes_rpc_3/last.pt").unlink()                               # it died before: not the older same one
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert chosen() == ("out/shapes_rpc_4", None)
    assert ((folder / "last.pt").read_bytes(), (folder / "log.jsonl").read_text()) == before


def test_two_runs_never_share_a_folder(monkeypatch):
    choose = common.choose_out_dir

    def late(args, name):
        """Where another run has its folder by the time this one makes its own."""
        out_dir = choose(args, name)
        out_dir.mkdir(parents=True)
        (out_dir / "log.jsonl").write_text("theirs\n")
        return out_dir
    with monkeypatch.context() as patch:
        patch.setattr(common, "choose_out_dir", late)
        assert "another run has just begun there; start again" in bad(SMALL, "--max_steps 1")
    assert [path.read_text() for path in Path("out").rglob("*.*")] == ["theirs\n"]

    process = Started(train_cls.main, flags(SMALL, "--epochs 300 --save_every 1 --out_dir a"))
    wait_for("a/last.pt", process)
    for other in ("--resume a", flags(SMALL, "--out_dir a")):
        assert re.search(f"process {process.process.pid} on .* trains there|already holds a run", bad(other))
    process.send_signal(signal.SIGKILL)                                                  # who is dead holds no lock
    process.communicate()
    train("--resume a --max_steps", [common.load("a")["step"] + 1])
    assert list(log("a")) == list(range(1, common.load("a")["step"] + 1))


def test_a_folder_whose_run_died_before_its_first_checkpoint_takes_other_data():
    train(SMALL, "--max_steps 1 --out_dir a")
    Path("a/last.pt").unlink()
    train(SMALL, "--max_steps 1 --num_images 640 --out_dir a")
    assert common.load("a")["training_images"] == 640 and len(headers("a")) == 1


def test_a_process_without_images_evaluates_nothing(imagenet):
    tree = ImageTree(str(imagenet), "val", size=16)
    args = argparse.Namespace(data="imagenet", num_workers=0, amp=False, batch_size=4)
    with pytest.raises(ValueError, match="none of the 9 images can be read"):                    # alone it has none
        train_cls.evaluate(ViT(TINY), tree, args, torch.device("cpu"), 9, 10)


# --- ImageNet's layout -----------------------------------------------------------------------------------------------

def test_imagenets_layout_trains_with_the_papers_recipe_and_workers_change_nothing(imagenet):
    train(IMAGENET, "--num_workers 2 --out_dir a --data_dir", [imagenet])
    train(IMAGENET, "--out_dir b --data_dir", [imagenet])
    assert_same_run("a", "b")
    checkpoint = common.load("a")
    assert checkpoint["classes"] == ["n01", "n02", "n03"] and checkpoint["ema"] and len(log("a")) == 4
    assert log("a", "eval")[4]["images"] == 9


def broken_copy(imagenet, *names):
    shutil.copytree(imagenet, "broken")
    for name in names:
        path = Path("broken", name)
        path.write_bytes(path.read_bytes()[:200])


def test_broken_images_are_named_or_skipped_and_counted_on_request(imagenet, capfd):
    broken_copy(imagenet, "val/n02/1.JPEG")
    run = flags(IMAGENET, "--data_dir broken")
    assert "n02/1.JPEG" in bad(run, "--save_every 1 --out_dir a") and common.load("a")["step"] >= 1
    for name in ("train/n02/3.JPEG", "train/n01/3.JPEG", "train/n03/3.JPEG"):
        Path("broken", name).write_bytes(b"no picture")
    for num_workers in (0, 2):
        line = bad(run, "--num_workers", [num_workers], "--out_dir", [f"w{num_workers}"])
        assert "3.JPEG" in line and "--skip_bad_images" in line
    capfd.readouterr()
    train(run, "--out_dir c --skip_bad_images")
    out, found = capfd.readouterr().out, log("c", "eval")[4]
    assert found["images"] == 8 and len(log("c")) == 4 and found["skipped"] > 0
    assert "val/n02/1.JPEG" in out and ", 8 images) after" in out
    for path in Path("broken/val").glob("*/*"):
        path.write_bytes(b"no picture")
    line = bad(run, "--out_dir d --skip_bad_images")
    assert "broken/val" in line and "none of the 9" in line


def test_data_that_do_not_match_are_named(imagenet):
    shutil.copytree(imagenet, "own")
    train(IMAGENET, "--max_steps 1 --out_dir a --data_dir own")
    shutil.copytree(imagenet, "other")
    for split in ("train", "val"):
        os.rename(f"other/{split}/n02", f"other/{split}/n04")
    assert "classes" in bad("--resume a --data_dir other")
    shutil.copy("own/train/n02/1.JPEG", "own/train/n02/new.JPEG")
    assert "the data have changed, training_images was" in bad("--resume a")
    os.rename("other/val/n04", "other/val/n09")
    assert "n09" in bad(IMAGENET, "--data_dir other")
    shutil.rmtree("other/val/n09")
    assert "n04" in bad(IMAGENET, "--data_dir other")
    shutil.rmtree("other/val")
    assert "other/val" in bad(IMAGENET, "--data_dir other")


# --- parts -----------------------------------------------------------------------------------------------------------

TINY = ViTConfig(image_size=16, patch_size=8, num_classes=10, embed_dim=48, depth=3, num_heads=3)


def micro(world, accum, n=50, batch_size=16, repeats=1, steps=6, first=0):
    """{step: (indices, positions)} of the global batch, put together from the slices of all processes."""
    args = argparse.Namespace(batch_size=batch_size, accum=accum, seed=1, repeats=repeats)
    streams = [list(train_cls.micro_batches(args, n, first, steps, rank, world)) for rank in range(world)]
    assert all(len(stream) == (steps - first) * accum for stream in streams)
    assert all(len(index) == len(position) == batch_size // (world * accum) for s in streams for index, position in s)
    return [tuple(torch.cat([s[step * accum + a][j] for s in streams for a in range(accum)]) for j in (0, 1))
            for step in range(steps - first)]


@pytest.mark.parametrize("repeats", [1, 3])
def test_any_split_over_processes_and_accumulation_is_the_same_batch_in_the_same_pairs(repeats):
    whole = micro(1, 1, repeats=repeats)
    for world, accum in ((2, 1), (1, 2), (4, 1), (2, 2), (2, 4), (8, 1)):
        for first in (0, 4):                                                              # starting late goes on with it
            for got, expected in zip(micro(world, accum, repeats=repeats, first=first), whole[first:], strict=True):
                assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    positions = torch.cat([position for _, position in whole])
    assert torch.equal(positions, torch.arange(6 * 16))                            # each sample has a number of its own


def test_an_epoch_sees_every_image_once_or_a_third_of_them_three_times_never_mixed_with_each_other():
    first, second = (torch.cat([index for index, _ in micro(2, 1, n=48, steps=6)[i:i + 3]]) for i in (0, 3))
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(48)) and not torch.equal(first, second)
    counts = torch.cat([index for index, _ in micro(2, 1, n=48, steps=3, repeats=3)]).bincount()
    assert sorted(counts[counts > 0].tolist()) == [3] * 16
    for batch_size, repeats in ((8, 2), (8, 3), (16, 3), (64, 3), (256, 3), (1024, 3), (12, 4)):
        for index, _ in micro(1, 1, n=3000, batch_size=batch_size, repeats=repeats):
            assert (index[0::2] != index[1::2]).all()


def test_weights_of_a_symmetric_run_start_an_rpc_run_but_not_a_softmax_one(imagenet, capsys):
    train(SMALL, "--attn symmetric --max_steps 2 --out_dir sym")
    train(SMALL, "--attn rpc --max_steps 1 --warmup_epochs 1 --init_from sym --out_dir rpc")           # at lr 1e-6
    first, after = (common.load(name)["model"] for name in ("sym", "rpc"))
    assert all((first[k] - after[k]).abs().max() < 1e-5 for k in after)
    assert "new head" not in capsys.readouterr().out
    train(SMALL, "--attn softmax --max_steps 1 --out_dir soft")
    for source, attn in (("soft", "symmetric"), ("soft", "rpc"), ("sym", "softmax")):
        line = bad(SMALL, "--attn", attn, "--init_from", source)
        assert line.startswith("error: --init_from") and "--attn" in line
    train(IMAGENET, "--image_size 16 --patch_size 4 --max_steps 1 --init_from sym --out_dir fine --data_dir", [imagenet])
    fine = common.load("fine")["model"]
    assert "new head for 3 classes" in capsys.readouterr().out and fine["head.weight"].shape[0] == 3
    assert (fine["patch_embed.proj.weight"] - first["patch_embed.proj.weight"]).abs().max() < 1e-5


def test_key_statistics_are_of_the_whole_network_and_without_shrinkage_s_is_zero():
    torch.manual_seed(0)
    images, size = torch.rand(4, 3, 16, 16), dict(vars(TINY), attn="rpc", n_iter=3, init="default")
    model = ViT(ViTConfig(**{**size, "rpc_layers": (0, 1), "lambd": float("inf")}))
    assert common.key_statistics(model, model, images)["nonzero_S"] == {0: [0.0] * 3, 1: [0.0] * 3}
    model = ViT(ViTConfig(**{**size, "rpc_layers": (1,), "lambd": 0.0}))
    stats = common.key_statistics(model, model, images)
    assert list(stats["nonzero_S"]) == [1] and stats["nonzero_S"][1][0] == 1.0 and len(stats["mean_abs_key"]) == 3
    assert not any(block.attn._forward_pre_hooks for block in model.blocks)
    k = model.eval().blocks[0].attn.project(model.blocks[0].norm1(model.embed(images)))[1]
    assert stats["mean_abs_key"][0] == round(k.abs().mean().item(), 4)


# --- bad input -------------------------------------------------------------------------------------------------------

BAD = [("--data cifar10", "--data_dir"), ("--data imagenet", "--data_dir"), ("--data cifar10 --data_dir nowhere", "nowhere"),
       ("--data imagenet --data_dir nowhere", "nowhere"), ("--data_dir nowhere", "--data_dir nowhere"),
       ("--data shapes --data_dir nowhere", "--data_dir nowhere .*shapes"), ("--data cifar", "cifar"),
       ("--image_size 18", "image_size"), ("--image_size 0", "image_size"), ("--image_size -16", "image_size"),
       ("--patch_size 0", "patch_size"), ("--patch_size -4", "patch_size"), ("--num_images 0", "images"),
       ("--num_images -5", "num_images"), ("--num_images 10", "batch_size"), ("--batch_size 0", "batch_size"),
       ("--batch_size -16", "batch_size"), ("--batch_size 161", "batch_size"), ("--batch 16", "--batch"),
       ("--accum 0", "accum"), ("--accum -1", "accum"), ("--accum 3", "accum"), ("--mixup 0.8 --accum 16", "mixup"),
       ("--cutmix 1 --batch_size 15", "cutmix"), ("--epochs 0", "epochs"), ("--epochs -1", "epochs"),
       ("--epochs ten", "ten"), ("--max_steps 0", "max_steps"), ("--max_steps -1", "max_steps"),
       ("--log_every 0", "log_every"), ("--log_every -1", "log_every"), ("--eval_every 0 --epochs 2", "eval_every"),
       ("--save_every -1", "save_every"), ("--keep_every -1", "keep_every"), ("--lr nan", "lr"), ("--lr inf", "lr"),
       ("--lr -1", "lr"), ("--lr 1e300", "lr"), ("--n_iter 0", "n_iter"), ("--n_iter -2", "n_iter"),
       ("--lambd -1", "lambd"), ("--lambd nan", "lambd"), ("--rpc_layers foo", "rpc_layers"),
       ("--rpc_layers 9", "rpc_layers"), ("--rpc_layers 2-0", "rpc_layers"), ("--rpc_layers -1", "rpc_layers"),
       ("--attn linear", "linear"), ("--model huge", "huge"), ("--form printed", "printed"), ("--init zeros", "zeros"),
       ("--holdout 160", "holdout"), ("--holdout -1", "holdout"), ("--holdout 150", "batch_size|holdout"),
       ("--drop_path 1", "drop_path"), ("--drop_path nan", "drop_path"), ("--ema 1.5", "ema"), ("--mixup -1", "mixup"),
       ("--cutmix nan", "cutmix"), ("--smoothing 2", "smoothing"), ("--erase -0.1", "erase"), ("--num_ops -1", "num_ops"),
       ("--pad -1", "pad"), ("--pad 1000", "pad"), ("--repeats 0", "repeats"), ("--seed -1", "seed"),
       ("--weight_decay nan", "weight_decay"), ("--clip nan", "clip"), ("--warmup_epochs nan", "warmup"),
       ("--min_lr nan", "min_lr"), ("--warmup_epochs 3 --epochs 2", "--warmup_epochs 3.0 .*--epochs 2"),
       ("--min_lr 0.5 --lr 0.1", "--min_lr 0.5 .*--lr 0.1"), ("--device cdua", "device"), ("--device mps", "device mps"),
       ("--device cpu:x", "device cpu:x"), ("--init_from nowhere.pt", "nowhere"), ("--init_from notes.txt", "notes.txt"),
       ("--resume nowhere", "nowhere"), ("--resume .", "last.pt"), ("--resume notes.txt", "notes.txt"),
       ("--out_dir notes.txt", "notes.txt"), (["--out_dir", ""], "--out_dir"), (["--init_from", ""], "--init_from"),
       (["--resume", ""], "--resume"), ("stray", "stray"), ("--num_workers -1 --data imagenet", "num_workers")]


@pytest.mark.parametrize("flag, word", BAD, ids=[str(flag) for flag, _ in BAD])
def test_bad_flags_end_in_one_line_that_names_them(flag, word, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    Path("notes.txt").write_text("root:x:0:0:not a checkpoint\n")
    assert re.search(word, bad(SMALL, "--max_steps 2", flag))
    assert not list(Path(".").rglob("*.pt")) and Path("notes.txt").exists()


def test_the_script_itself_ends_in_one_error_line():
    process = start_script(SMALL, "--rpc_layers 7")
    _, err = process.communicate(timeout=240)
    assert process.returncode == 1 and err.startswith("error: ") and len(err.splitlines()) == 1 and "rpc_layers" in err


def test_a_world_that_does_not_divide_the_batch_is_refused(monkeypatch):
    monkeypatch.setattr(common, "setup", lambda device: (torch.device("cpu"), 0, 3))
    assert re.search("--batch_size 16.*3 processes", bad(SMALL))


def test_a_run_is_kept_whatever_it_is_asked_to_go_on_with(monkeypatch):
    train(SMALL, "--max_steps 2 --out_dir a")
    whole, text = Path("a/last.pt").read_bytes(), Path("a/log.jsonl").read_bytes()

    def kept():
        return (Path("a/last.pt").read_bytes(), Path("a/log.jsonl").read_bytes()) == (whole, text)
    line = bad(SMALL, "--max_steps 3 --out_dir a")
    assert line.startswith("error: --out_dir a already holds a run") and "--resume a" in line and kept()

    with monkeypatch.context() as patch:                                                               # a full disk
        patch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        line = bad("--resume a --max_steps 4")
    assert "last.pt" in line and "No space left" in line and Path("a/last.pt").read_bytes() == whole
    Path("a/log.jsonl").write_bytes(text)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))                              # less than the log has already
    try:
        assert "log.jsonl" in bad("--resume a --max_steps 4")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert kept() and not list(Path("a").glob("*.tmp"))

    for content in ({"model": {"w": torch.zeros(2)}}, {"task": "segmentation"}, torch.zeros(3), [1, 2]):
        torch.save(content, "a/last.pt")
        assert "a" in bad("--resume a")
    assert Path("a/log.jsonl").read_bytes() == text


@pytest.mark.parametrize("when, words, kept", [("training", "not finite at step 5", 3), ("first", "not finite at step 1", 0),
                                               ("evaluation", "not finite at step 2", 0)])
def test_what_is_not_finite_stops_the_run_and_keeps_the_last_good_state(monkeypatch, when, words, kept):
    real, calls = train_cls.F.cross_entropy, []

    def diverging(*args, **how):
        evaluation = "reduction" in how
        calls.extend([1] * (not evaluation))
        broken = evaluation if when == "evaluation" else len(calls) == dict(training=5, first=1)[when]
        return real(*args, **how) * (float("nan") if broken else 1)
    monkeypatch.setattr(train_cls.F, "cross_entropy", diverging)
    steps = "--max_steps 2" if when == "evaluation" else "--max_steps 9 --save_every 3 --log_every 2"
    line = bad(SMALL, steps, "--out_dir a")
    assert words in line and ("holds step 3" in line) == bool(kept) and ("nothing is saved" in line.lower()) != bool(kept)
    if kept:
        checkpoint = common.load("a")
        assert checkpoint["step"] == kept and all(w.isfinite().all() for w in checkpoint["model"].values())


def test_ctrl_c_ends_in_the_line_that_resumes():
    process = Started(train_cls.main, flags(SMALL, "--epochs 300 --save_every 1 --out_dir a"))
    wait_for("a/last.pt", process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    step = common.load("a")["step"]
    assert process.poll() != 0 and "Traceback" not in err
    assert f"a holds step {step}" in err.splitlines()[-1] and "--resume a" in err.splitlines()[-1]
    train("--resume a --max_steps", [step + 2])
    assert list(log("a")) == list(range(1, step + 3))
