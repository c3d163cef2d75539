"""Claims about train_cls.py: runs start, stop, go on and spread over processes without changing a number; bad input ends
in one line and loses nothing. The real script, small settings."""

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
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import common
from data import images as data
import train_cls
from processes import Started, group
from vit import ViT, ViTConfig, vit_from_checkpoint

SCRIPT = Path(train_cls.__file__).resolve()
SMALL = "--model nano --num_images 160 --image_size 16 --patch_size 4 --batch_size 16 --set log_every=1".split()
IMAGENET = ("--data imagenet --model nano --image_size 64 --batch_size 8 --epochs 2 --set warmup_epochs=1 "
            "--num_workers 0 --set log_every=1").split()
RECIPE = "--set num_ops=2 --set erase=0.5 --set mixup=0.8 --set cutmix=1 --set smoothing=0.1 --set pad=2 --set repeats=3 --set ema=0.9".split()
ATTENTIONS = ["softmax", "symmetric", "scaled_s", "scaled_alpha", "rpc", "rpc_asym", "sym_asym"]
TINY = dict(image_size=16, patch_size=8, num_classes=10, embed_dim=48, depth=2, num_heads=3)


@pytest.fixture(autouse=True)
def one_thread_and_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)                                 # as the other processes, so that results agree bit for bit
    yield
    torch.set_num_threads(threads)


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


def flags(*parts):
    return [flag for part in parts for flag in (part.split() if isinstance(part, str) else part)]


def train(*parts):
    """Run main() in this process."""
    argv, sys.argv = sys.argv, ["train_cls.py", *flags(*parts)]
    try:
        train_cls.main()
    finally:
        sys.argv = argv


def start(*parts):
    return Started(train_cls.main, flags(*parts))


def start_script(*parts, launcher=()):
    """The script itself in a process, or with torchrun's flags as launcher in several."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC")} | {"OMP_NUM_THREADS": "1"}
    launcher = ("-m", "torch.distributed.run", *launcher) if launcher else ()
    return subprocess.Popen([sys.executable, *launcher, str(SCRIPT), *flags(*parts)], env=env, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def refused(*parts):
    """Run main() as the script does; returns the one line it must end in (without the progress before it)."""
    with pytest.raises(SystemExit) as e:
        argv, sys.argv = sys.argv, ["train_cls.py", *flags(*parts)]
        try:
            common.run(train_cls.main)
        finally:
            sys.argv = argv
    return e.value.code


def log(folder, what="loss"):
    """{step: value} of the training rows; no step may be there twice."""
    rows = [json.loads(line) for line in Path(folder, "log.jsonl").read_text().splitlines()]
    rows = [(row["step"], row[what]) for row in rows if what in row]
    assert len(dict(rows)) == len(rows), "a step is logged twice"
    return dict(rows)


def weights(folder):
    return common.read_checkpoint(folder)["model"]


def assert_same_weights(a, b):
    a, b = weights(a), weights(b)
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def wait_for(path, process, seconds=240):
    end = time.time() + seconds
    while not Path(path).exists():
        assert process.poll() is None, process.communicate()[1][-2000:]
        assert time.time() < end
        time.sleep(0.02)


# --- a run and what it leaves ---------------------------------------------------------------------------------------------

def test_the_default_run_ends_in_its_accuracy_and_its_checkpoint_alone_reproduces_it(tmp_path, capsys):
    train("--max_steps 2 --num_images 500")                                    # all else as in the README's first command
    last = capsys.readouterr().out.strip().splitlines()[-1]
    folder = tmp_path / "out" / "shapes_rpc"
    evaluation = log(folder, "eval")[2]
    assert f"test accuracy {evaluation['top1']:.2f} %" in last and last.endswith(os.path.join("out", "shapes_rpc", "last.pt"))
    checkpoint = common.read_checkpoint(folder)
    test = data.load_shapes("test", 100)
    with torch.no_grad():
        right = vit_from_checkpoint(checkpoint)(test.images.float() / 255).argmax(1) == test.labels
    assert evaluation["images"] == 100 and evaluation["top1"] == pytest.approx(right.sum().item(), abs=1e-6)
    assert checkpoint["classes"] == test.classes and checkpoint["step"] == 2 and checkpoint["task"] == "classification"


def test_every_attention_trains_two_steps(tmp_path):
    for attn in ATTENTIONS:
        train(SMALL, "--max_steps 2 --attn", attn)
        folder = tmp_path / "out" / f"shapes_{attn}"
        assert list(log(folder)) == [1, 2] and log(folder)[1] != log(folder)[2]
        assert vit_from_checkpoint(common.read_checkpoint(folder)).config.attn == attn


def test_a_second_run_gets_a_folder_of_its_own(tmp_path):
    for _ in range(2):
        train(SMALL, "--max_steps 1")
    assert sorted(d.name for d in (tmp_path / "out").iterdir()) == ["shapes_rpc", "shapes_rpc_2"]


def test_training_learns(tmp_path):
    train(SMALL, "--max_steps 60 --epochs 6 --set warmup_epochs=0.5 --out_dir a --set eval_every=10")
    losses = list(log("a").values())
    assert len(losses) == 60 and np.mean(losses[-10:]) < np.mean(losses[:5]) - 0.1


def test_holdout_evaluates_on_training_images_that_are_not_trained_on():
    args = argparse.Namespace(data="shapes", data_dir=None, num_images=100, image_size=16, holdout=30)
    train_set, held = train_cls.load_data(args, torch.device("cpu"))
    everything = data.load_shapes("train", 100, 16).images
    assert len(train_set.images) == 70 and len(held.images) == len(held.labels) == 30
    both = torch.cat([train_set.images, held.images]).flatten(1)
    assert sorted(map(bytes, both.numpy())) == sorted(map(bytes, everything.flatten(1).numpy()))


def test_the_average_of_the_weights_is_what_ema_says(tmp_path):
    train(SMALL, "--max_steps 3 --set ema=0.5 --set save_every=1 --set keep_every=1 --out_dir a --num_images 16 --set warmup_epochs=0")
    raw = [common.read_checkpoint(f"a/epoch_{i}.pt")["model"]["head.weight"] for i in (1, 2, 3)]
    average = common.read_checkpoint("a")["ema"]["head.weight"]
    torch.testing.assert_close(average, 0.25 * raw[0] + 0.25 * raw[1] + 0.5 * raw[2])


# --- stopping and going on ------------------------------------------------------------------------------------------------

EVERYTHING = flags(RECIPE, "--set drop_path=0.1 --accum 2")


@pytest.mark.parametrize("layout,extra", [("shapes", []), ("shapes", EVERYTHING), ("imagenet", EVERYTHING)],
                         ids=["plain", "everything on", "everything on, imagenet"])
def test_three_steps_and_three_resumed_equal_six_bit_for_bit(imagenet, layout, extra):
    run = flags(SMALL if layout == "shapes" else IMAGENET, extra)
    if layout == "imagenet":
        run += ["--epochs", "3", "--data_dir", str(imagenet)]                                         # 2 steps per epoch
    train(run, "--max_steps 6 --set save_every=3 --out_dir whole")
    train(run, "--max_steps 3 --set save_every=3 --out_dir parts")
    train("--resume parts --max_steps 6")                                                       # remembers its flags
    assert log("whole") == log("parts") and log("whole", "grad_norm") == log("parts", "grad_norm")
    assert_same_weights("whole", "parts")
    a, b = (common.read_checkpoint(d) for d in ("whole", "parts"))
    assert a["ema"] is None and b["ema"] is None or all(torch.equal(a["ema"][k], b["ema"][k]) for k in a["ema"])
    for p, state in a["optimizer"]["state"].items():
        assert all(torch.equal(state[k], b["optimizer"]["state"][p][k]) for k in state)


def test_a_run_killed_at_any_moment_resumes_to_the_same_losses_and_weights(tmp_path):
    run = flags(SMALL, "--set save_every=1 --set eval_every=100 --epochs 3")                                      # 30 steps
    train(run, "--out_dir whole")
    process = start(run, "--out_dir killed")
    wait_for("killed/last.pt", process)
    time.sleep(random.uniform(0, 0.3))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert 1 <= common.read_checkpoint("killed")["step"] <= 30                                # whole, whatever happened
    train("--resume killed")
    assert log("killed") == log("whole") and len(log("whole")) == 30
    assert_same_weights("killed", "whole")


class Killed(BaseException):
    pass


def test_a_kill_before_any_write_loses_no_evaluation(monkeypatch):
    run = flags(SMALL, "--num_images 16 --epochs 2")                                # two epochs of one step, 9 writes
    train(run, "--out_dir whole")

    def killed_before(function, write, calls):
        def call(*args, **how):
            calls.append(function)
            if len(calls) >= write:                                            # nothing is written after a kill
                raise Killed
            return function(*args, **how)
        return call

    for write in range(2, 10):
        folder, calls = f"killed_{write}", []
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            for module, name in ((train_cls, "evaluate"), (common, "write_log"), (common, "save_checkpoint")):
                patch.setattr(module, name, killed_before(getattr(module, name), write, calls))
            train(run, "--out_dir", folder)
        begun = Path(folder, "last.pt").exists()
        train("--resume" if begun else flags(run, "--out_dir"), folder)
        assert log(folder) == log("whole") and log(folder, "eval") == log("whole", "eval"), calls[-2:]
        assert common.read_checkpoint(folder)["metrics"] == log("whole", "eval")[2], calls[-2:]
        assert_same_weights(folder, "whole")


def test_a_finished_run_without_its_evaluation_gets_it_once():
    train(SMALL, "--max_steps 2 --out_dir a")
    evaluation = log("a", "eval")
    common.save_checkpoint("a/last.pt", {**common.read_checkpoint("a"), "metrics": {}})
    rows = Path("a/log.jsonl").read_text().splitlines(True)
    Path("a/log.jsonl").write_text("".join(row for row in rows if '"eval":' not in row))
    for _ in range(2):
        train("--resume a --max_steps 2")
        assert log("a", "eval") == evaluation and common.read_checkpoint("a")["metrics"] == evaluation[2]


def test_a_finished_run_resumed_says_so_and_changes_nothing():
    train(SMALL, "--max_steps 2 --out_dir a")
    before = Path("a/last.pt").read_bytes()
    try:
        train("--resume a --max_steps 2")
    except ValueError as e:                                           # fine too, if it says what to do
        assert "\n" not in str(e) and "step" in str(e)
    assert Path("a/last.pt").read_bytes() == before and list(log("a")) == [1, 2]


def test_flags_of_a_resumed_run_hold_or_are_refused(monkeypatch):
    train(SMALL, "--max_steps 1 --out_dir a")
    before = Path("a/last.pt").read_bytes()
    for bad, word in (("--attn symmetric", "--attn"), ("--lambd 3", "--lambd"), ("--rpc_layers all", "--rpc_layers"),
                      ("--seed 1", "--seed"), ("--batch_size 32", "--batch_size"), ("--set ema=0.9", "ema"),
                      ("--out_dir b", "--out_dir"), ("--init_from a", "--init_from")):
        line = refused("--resume a", bad)
        assert line.startswith("error: ") and word in line and "\n" not in line
    assert Path("a/last.pt").read_bytes() == before and list(log("a")) == [1]
    train("--resume a --max_steps 2 --set weight_decay=0.5 --lr 1e-2")
    checkpoint = common.read_checkpoint("a")
    assert checkpoint["optimizer"]["param_groups"][0]["weight_decay"] == checkpoint["args"]["weight_decay"] == 0.5
    assert checkpoint["args"]["lr"] == 1e-2


def test_a_run_of_a_machine_with_a_gpu_goes_on_where_there_is_none():
    train(SMALL, "--max_steps 1 --out_dir a")
    checkpoint = common.read_checkpoint("a")
    checkpoint["args"]["device"] = "cuda:99"
    common.save_checkpoint("a/last.pt", checkpoint)
    train("--resume a --max_steps 2")
    assert list(log("a")) == [1, 2]


# --- processes ------------------------------------------------------------------------------------------------------------

def train_and_print_seed():
    train_cls.main()
    print(torch.initial_seed())                              # of the last step's masks


def test_two_processes_equal_one_with_accumulation_and_everything_on():
    run = flags(SMALL, RECIPE, "--max_steps 12 --set eval_every=100 --num_images 165")          # 33 test images: an odd number
    printed = group(train_and_print_seed, [*run, "--accum", "2", "--out_dir", "two"])
    train(run, "--accum 2 --out_dir accumulated")
    train(run, "--out_dir one")
    two, accumulated, one = (np.array(list(log(d).values())) for d in ("two", "accumulated", "one"))
    assert len(one) == 12
    np.testing.assert_allclose(two, one, rtol=0, atol=1e-5)
    np.testing.assert_allclose(accumulated, one, rtol=0, atol=1e-5)
    norms = [list(log(d, "grad_norm").values()) for d in ("two", "one")]
    np.testing.assert_allclose(*norms, rtol=1e-3)
    assert [text.split()[-1] for text in printed] == [str(common.seed_of(0, 11, rank)) for rank in (0, 1)]
    a, b = log("two", "eval")[12], log("one", "eval")[12]
    assert a["images"] == b["images"] == 33 and abs(a["top1"] - b["top1"]) < 4 and abs(a["loss"] - b["loss"]) < 1e-3


def test_two_nodes_equal_one_process():
    run = flags(SMALL, "--max_steps 10")
    out = group(train_cls.main, [*run, "--out_dir", "nodes"], LOCAL_RANK="0")              # each the first on its node
    assert "test accuracy" in out[0] and not out[1].strip()
    train(run, "--out_dir one")
    np.testing.assert_allclose(list(log("nodes").values()), list(log("one").values()), rtol=0, atol=1e-5)
    assert log("nodes", "eval")[10]["images"] == log("one", "eval")[10]["images"] == 32


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the worker in /proc")
def test_a_killed_worker_restarts_and_the_run_finishes():
    run = flags(SMALL, "--epochs 12 --set save_every=5 --set eval_every=100 --lr 1e-4")                              # 120 steps
    process = start_script(run, "--out_dir a", launcher=("--standalone", "--nproc_per_node=2", "--max_restarts=3"))
    wait_for("a/last.pt", process)
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(next(p for p in workers if "train_cls.py" in Path(f"/proc/{p}/cmdline").read_text())), signal.SIGKILL)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0 and "test accuracy" in out, err[-3000:]
    assert list(log("a")) == list(range(1, 121)) and common.read_checkpoint("a")["step"] == 120
    headers = [json.loads(line) for line in Path("a/log.jsonl").read_text().splitlines() if "world" in line]
    assert len(headers) == 2 and headers[1]["step"] > 0                                           # it went on, not again


def test_a_restart_never_touches_another_run(monkeypatch):
    """torchrun restarts a worker that failed on its input: what was refused then must not be overwritten now."""
    train(SMALL, "--max_steps 2")                                                                # out/shapes_rpc
    folder = Path("out/shapes_rpc")
    before = (folder / "last.pt").read_bytes(), (folder / "log.jsonl").read_text()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    for where in ([], ["--out_dir", str(folder)]):                   # the first try ended before it made its own folder
        try:
            train(SMALL, "--max_steps 3 --lr 0.1", where)                                      # goes elsewhere, or refuses
        except ValueError as e:
            assert "already holds a run" in str(e)
        assert ((folder / "last.pt").read_bytes(), (folder / "log.jsonl").read_text()) == before


def test_a_restarted_run_finds_its_folder_behind_a_later_one_of_the_same_name(monkeypatch):
    train(SMALL, "--max_steps 2")                                                                # out/shapes_rpc
    train(SMALL, "--max_steps 2 --lr 0.1")                                                       # out/shapes_rpc_2
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    for flag, name in (("", "shapes_rpc"), ("--lr 0.1", "shapes_rpc_2")):
        args = common.read_checkpoint(f"out/{name}")["args"]
        assert str(common.choose_out_dir(argparse.Namespace(**args | dict(resume=None)), "shapes_rpc")) == f"out/{name}"
    args["lr"] = 0.2
    assert str(common.choose_out_dir(argparse.Namespace(**args | dict(resume=None)), "shapes_rpc")) == "out/shapes_rpc_3"


def test_a_restart_never_goes_on_with_an_older_run_of_the_same_command(monkeypatch):
    train(SMALL, "--max_steps 2")                                                                # out/shapes_rpc
    train(SMALL, "--max_steps 2")                                                                # out/shapes_rpc_2
    Path("out/shapes_rpc_2/last.pt").unlink()                                                    # it died before
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    args = argparse.Namespace(**common.read_checkpoint("out/shapes_rpc")["args"] | dict(resume=None))
    assert str(common.choose_out_dir(args, "shapes_rpc")) == "out/shapes_rpc_3" and args.resume is None


def test_a_file_for_a_folder_is_called_that():
    Path("a").write_text("no folder")
    with pytest.raises(OSError, match="exists: 'a'|Not a directory"):
        train(SMALL, "--max_steps 1 --out_dir a")


def test_two_runs_that_begin_together_do_not_share_a_folder(monkeypatch):
    choose, first = common.choose_out_dir, []

    def late(args, name):
        """Where another run has its folder by the time this one makes its own."""
        out_dir = choose(args, name)
        out_dir.mkdir(parents=True)
        (out_dir / "log.jsonl").write_text("theirs\n")
        first.append(out_dir)
        return out_dir

    monkeypatch.setattr(common, "choose_out_dir", late)
    with pytest.raises(ValueError, match="another run has just begun there; start again"):
        train(SMALL, "--max_steps 1")
    assert [path.read_text() for path in Path("out").rglob("*.*")] == ["theirs\n"] and len(first) == 1


def test_a_folder_whose_run_died_before_its_first_checkpoint_takes_other_data():
    train(SMALL, "--max_steps 1 --out_dir a")
    Path("a/last.pt").unlink()
    train(SMALL, "--max_steps 1 --num_images 640 --out_dir a")
    headers = [json.loads(line) for line in Path("a/log.jsonl").read_text().splitlines() if "world" in line]
    assert [row["training_images"] for row in headers] == [640]


def test_a_process_without_images_evaluates_nothing(imagenet):
    tree = data.ImageTree(str(imagenet), "val", size=16)
    args = argparse.Namespace(data="imagenet", num_workers=0, amp=False, batch_size=4)
    with pytest.raises(ValueError, match="none of the 9 images can be read"):                    # alone it has none
        train_cls.evaluate(ViT(ViTConfig(**TINY)), tree, args, torch.device("cpu"), 9, 10)


# --- ImageNet's layout ------------------------------------------------------------------------------------------------------

def test_imagenets_layout_trains_with_the_papers_recipe(imagenet):
    train(IMAGENET, "--num_workers 2 --out_dir a --data_dir", str(imagenet))
    checkpoint = common.read_checkpoint("a")
    assert checkpoint["classes"] == ["n01", "n02", "n03"] and len(log("a")) == 4
    recipe = dict(mixup=0.8, cutmix=1.0, num_ops=2, erase=0.25, smoothing=0.1, repeats=3, drop_path=0.1, ema=0.99996)
    assert {k: checkpoint["args"][k] for k in recipe} == recipe and checkpoint["ema"]
    assert log("a", "eval")[4]["images"] == 9
    train(IMAGENET, "--out_dir b --data_dir", str(imagenet))                                # workers change nothing
    assert log("a") == log("b")
    assert_same_weights("a", "b")


def broken_copy(imagenet, *names):
    shutil.copytree(imagenet, "broken")
    for name in names:
        path = Path("broken", name)
        path.write_bytes(path.read_bytes()[:200])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_broken_training_image_is_named(imagenet, num_workers):
    broken_copy(imagenet, "train/n02/3.JPEG", "train/n01/3.JPEG", "train/n03/3.JPEG")
    line = refused(IMAGENET, "--data_dir broken --out_dir a --num_workers", str(num_workers))
    assert line.startswith("error: ") and "3.JPEG" in line and "--skip_bad_images" in line and "\n" not in line


def test_a_broken_evaluation_image_does_not_cost_the_epoch_before_it(imagenet):
    broken_copy(imagenet, "val/n02/1.JPEG")
    line = refused(IMAGENET, "--data_dir broken --out_dir a")
    assert "n02/1.JPEG" in line
    assert common.read_checkpoint("a")["step"] == 2                                                # the epoch's weights


def test_broken_images_are_skipped_and_counted_on_request(imagenet, capfd):
    broken_copy(imagenet, "train/n02/3.JPEG", "val/n02/1.JPEG")
    train(IMAGENET, "--data_dir broken --out_dir a --skip_bad_images")
    assert log("a", "eval")[4]["images"] == 8 and len(log("a")) == 4
    out = capfd.readouterr().out
    times = log("a", "eval")[4]["skipped"]
    assert "val/n02/1.JPEG" in out and ", 8 images) after" in out and times > 0
    assert f"training drew an unreadable image {times} times" in out


def test_an_evaluation_without_one_readable_image_is_an_error_and_keeps_the_epoch(imagenet):
    broken_copy(imagenet, *(f"val/n0{c}/{i}.JPEG" for c in (1, 2, 3) for i in (0, 1, 2)))
    line = refused(IMAGENET, "--data_dir broken --out_dir a --skip_bad_images")
    assert line.startswith("error: ") and "broken/val" in line and "none of the 9" in line
    assert common.read_checkpoint("a")["step"] == 2


def test_a_resumed_run_is_held_to_its_schedule_only_where_a_flag_changes_it():
    train(SMALL, "--max_steps 1 --epochs 2 --set warmup_epochs=2 --out_dir a")
    assert "--set warmup_epochs=2.0" in refused("--resume a --epochs 1")
    checkpoint = common.read_checkpoint("a")
    checkpoint["args"]["warmup_epochs"] = 5.0                              # as runs before this was refused
    common.save_checkpoint("a/last.pt", checkpoint)
    train("--resume a --max_steps 2")
    assert list(log("a")) == [1, 2]


def test_a_resumed_run_refuses_other_classes(imagenet):
    train(IMAGENET, "--max_steps 1 --out_dir a --data_dir", str(imagenet))
    shutil.copytree(imagenet, "other")
    for split in ("train", "val"):
        os.rename(f"other/{split}/n02", f"other/{split}/n04")
    line = refused("--resume a --data_dir other")
    assert "classes" in line and "other" in line


def test_a_resumed_run_refuses_another_number_of_training_images(imagenet):
    shutil.copytree(imagenet, "own")
    train(IMAGENET, "--max_steps 1 --out_dir a --data_dir own")
    shutil.copy("own/train/n02/1.JPEG", "own/train/n02/new.JPEG")
    assert "the data have changed, training_images was" in refused("--resume a")


def test_folders_that_do_not_match_are_named(imagenet):
    shutil.copytree(imagenet, "other")
    os.rename("other/val/n02", "other/val/n09")
    assert "n09" in refused(IMAGENET, "--data_dir other")
    shutil.rmtree("other/val/n09")
    assert "n02" in refused(IMAGENET, "--data_dir other")
    shutil.rmtree("other/val")
    assert "other/val" in refused(IMAGENET, "--data_dir other")
    assert "nowhere" in refused(IMAGENET, "--data_dir nowhere")


# --- parts --------------------------------------------------------------------------------------------------------------------

def decayed(**config):
    model = ViT(ViTConfig(**TINY, **config))
    names = {id(p): name for name, p in model.named_parameters()}
    groups = common.param_groups(model, 0.05)
    assert [g["weight_decay"] for g in groups] == [0.05, 0.0]
    decay, keep = ({names[id(p)] for p in g["params"]} for g in groups)
    assert decay | keep == set(names.values()) and not decay & keep
    return decay


def test_matrices_decay_and_biases_norms_tokens_and_alpha_do_not():
    matrices = {"patch_embed.proj.weight", "head.weight", *(f"blocks.{i}.{n}.weight" for i in range(2) for n in (
        "attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"))}
    for attn in ("softmax", "symmetric", "rpc", "scaled_alpha"):
        assert decayed(attn=attn) == matrices
    assert decayed(attn="scaled_s") == matrices | {"blocks.0.attn.s", "blocks.1.attn.s"}           # learned S is a matrix


def micro(world, accum, n=50, batch_size=16, repeats=1, steps=6):
    """{step: (indices, positions)} of the global batch, put together from the slices of all processes."""
    args = argparse.Namespace(batch_size=batch_size, accum=accum, seed=1, repeats=repeats)
    streams = [list(train_cls.micro_batches(args, n, 0, steps, rank, world)) for rank in range(world)]
    assert all(len(stream) == steps * accum for stream in streams)
    assert all(len(index) == len(position) == batch_size // (world * accum) for s in streams for index, position in s)
    return [tuple(torch.cat([s[step * accum + a][j] for s in streams for a in range(accum)]) for j in (0, 1))
            for step in range(steps)]


@pytest.mark.parametrize("repeats", [1, 3])
def test_any_split_over_processes_and_accumulation_is_the_same_batch_in_the_same_pairs(repeats):
    whole = micro(1, 1, repeats=repeats)
    for world, accum in ((2, 1), (1, 2), (4, 1), (2, 2), (2, 4), (8, 1)):
        for (index, position), (same_index, same_position) in zip(micro(world, accum, repeats=repeats), whole):
            assert torch.equal(index, same_index) and torch.equal(position, same_position)
    positions = torch.cat([position for _, position in whole])
    assert torch.equal(positions, torch.arange(6 * 16))                            # each sample has a number of its own


def test_an_epoch_sees_every_image_once_or_a_third_of_them_three_times():
    once = torch.cat([index for index, _ in micro(2, 1, n=48, steps=3)])
    assert sorted(once.tolist()) == list(range(48))
    first, second = (torch.cat([index for index, _ in micro(1, 1, n=48, steps=6)[i:i + 3]]) for i in (0, 3))
    assert not torch.equal(first, second)
    counts = torch.cat([index for index, _ in micro(2, 1, n=48, steps=3, repeats=3)]).bincount()
    assert sorted(counts[counts > 0].tolist()) == [3] * 16


def test_starting_late_continues_the_stream():
    args = argparse.Namespace(batch_size=16, accum=1, seed=1, repeats=3)
    whole = list(train_cls.micro_batches(args, 50, 0, 7, 1, 2))
    for a, b in zip(whole[4:], train_cls.micro_batches(args, 50, 4, 7, 1, 2), strict=True):
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


@pytest.mark.parametrize("batch_size,repeats", [(8, 2), (8, 3), (16, 3), (64, 3), (256, 3), (1024, 3), (12, 4)])
def test_copies_of_an_image_are_never_mixed_with_each_other(batch_size, repeats):
    for index, _ in micro(1, 1, n=3000, batch_size=batch_size, repeats=repeats):
        assert (index[0::2] != index[1::2]).all()


def test_weights_of_a_symmetric_run_start_an_rpc_run_but_not_a_softmax_one(imagenet, capsys):
    train(SMALL, "--attn symmetric --max_steps 2 --out_dir sym")
    train(SMALL, "--attn rpc --max_steps 1 --set warmup_epochs=1 --init_from sym --out_dir rpc")       # one step at lr 1e-6
    start_weights, after = weights("sym"), weights("rpc")
    assert all((start_weights[k] - after[k]).abs().max() < 1e-5 for k in after)
    assert "new head" not in capsys.readouterr().out
    train(SMALL, "--attn softmax --max_steps 1 --out_dir soft")
    for source, attn in (("soft", "symmetric"), ("soft", "rpc"), ("sym", "softmax")):
        line = refused(SMALL, "--attn", attn, "--init_from", source)
        assert line.startswith("error: --init_from") and "3C" in line and "2C" in line
    train("--data imagenet --model nano --image_size 16 --patch_size 4 --batch_size 8 --epochs 1 --num_workers 0 --max_steps 1",
          "--set warmup_epochs=1 --init_from sym --out_dir fine --data_dir", str(imagenet))
    assert "new head for 3 classes" in capsys.readouterr().out and weights("fine")["head.weight"].shape[0] == 3
    assert (weights("fine")["patch_embed.proj.weight"] - start_weights["patch_embed.proj.weight"]).abs().max() < 1e-5


def test_key_statistics_are_of_the_whole_network_and_without_shrinkage_s_is_zero():
    torch.manual_seed(0)
    images = torch.rand(4, 3, 16, 16)
    model = ViT(ViTConfig(**TINY, attn="rpc", rpc_layers=(0, 1), n_iter=3, lambd=float("inf"), init="default"))
    assert common.key_statistics(model, model, images)["nonzero_S"] == {0: [0.0] * 3, 1: [0.0] * 3}
    model = ViT(ViTConfig(**{**TINY, "depth": 3}, attn="rpc", rpc_layers=(1,), n_iter=3, lambd=0.0, init="default"))
    stats = common.key_statistics(model, model, images)
    assert list(stats["nonzero_S"]) == [1] and stats["nonzero_S"][1][0] == 1.0 and len(stats["mean_abs_key"]) == 3
    assert not any(block.attn._forward_pre_hooks for block in model.blocks)
    k = model.eval().blocks[0].attn.project(model.blocks[0].norm1(model.embed(images)))[1]
    assert stats["mean_abs_key"][0] == round(k.abs().mean().item(), 4)


@pytest.mark.parametrize("text,layers", [("0", (0,)), ("all", (0, 1, 2, 3)), ("0,2", (0, 2)), ("1-3", (1, 2, 3)),
                                         ("0,2-3", (0, 2, 3))])
def test_rpc_layers_are_read(text, layers):
    assert common.parse_layers(text, 4) == layers


# --- bad input ------------------------------------------------------------------------------------------------------------------

BAD = [("--data cifar10", "--data_dir"), ("--data imagenet", "--data_dir"), ("--data cifar10 --data_dir nowhere", "nowhere"),
       ("--image_size 18", "image_size"), ("--image_size 0", "image_size"), ("--image_size -16", "image_size"),
       ("--patch_size 0", "patch_size"), ("--patch_size -4", "patch_size"), ("--num_images 0", "images"),
       ("--num_images -5", "num_images"), ("--num_images 10", "batch_size"), ("--batch_size 0", "batch_size"),
       ("--batch_size -16", "batch_size"), ("--batch_size 161", "batch_size"), ("--accum 0", "accum"),
       ("--accum -1", "accum"), ("--accum 3", "accum"), ("--set mixup=0.8 --accum 16", "mixup"),
       ("--set cutmix=1 --batch_size 15", "cutmix"), ("--epochs 0", "epochs"), ("--epochs -1", "epochs"),
       ("--max_steps 0", "max_steps"), ("--max_steps -1", "max_steps"), ("--set log_every=0", "log_every"),
       ("--set log_every=-1", "log_every"), ("--set eval_every=0 --epochs 2", "eval_every"), ("--lr nan", "lr|learning rate"),
       ("--lr inf", "lr|learning rate"), ("--lr -1", "lr|learning rate"), ("--n_iter 0", "n_iter"), ("--n_iter -2", "n_iter"),
       ("--lambd -1", "lambd"), ("--lambd nan", "lambd"), ("--rpc_layers foo", "rpc_layers"), ("--rpc_layers 9", "rpc_layers"),
       ("--rpc_layers 2-0", "rpc_layers"), ("--rpc_layers -1", "rpc_layers"), ("--holdout 160", "holdout"),
       ("--holdout -1", "holdout"), ("--holdout 150", "batch_size|holdout"), ("--set drop_path=1", "drop_path"),
       ("--set drop_path=nan", "drop_path"), ("--set ema=1.5", "ema|decay"), ("--set mixup=-1", "mixup"), ("--set cutmix=nan", "cutmix"),
       ("--set smoothing=2", "smoothing"), ("--set erase=-0.1", "erase"), ("--set num_ops=-1", "num_ops"), ("--set pad=-1", "pad"),
       ("--set repeats=0", "repeats"), ("--seed -1", "seed"), ("--device cdua", "device"), ("--init_from nowhere.pt", "nowhere"),
       ("--init_from notes.txt", "notes.txt"), ("--resume nowhere", "nowhere"), ("--resume .", "last.pt"),
       ("--resume notes.txt", "notes.txt"), ("--out_dir notes.txt", "notes.txt"), ("--set weight_decay=nan", "weight_decay|decay"),
       ("--set clip=nan", "clip"), ("--set warmup_epochs=nan", "warmup"), ("--set min_lr=nan", "min_lr"),
       ("--lr 1e300", "lr"), ("--device mps", "device mps"), ("--device cpu:x", "device cpu:x"),
       ("--set warmup_epochs=3 --epochs 2", "--set warmup_epochs=3.0 .*--epochs 2"),
       ("--set min_lr=0.5 --lr 0.1", "--set min_lr=0.5 .*--lr 0.1"), ("--data_dir nowhere", "--data_dir nowhere"), ("--data shapes --data_dir nowhere", "--data_dir nowhere .*shapes.*: cifar10, imagenet, folder$"),
       (["--out_dir", ""], "--out_dir"), (["--init_from", ""], "--init_from")]


@pytest.mark.parametrize("bad,word", BAD, ids=[str(bad) for bad, _ in BAD])
def test_bad_flags_end_in_one_line_that_names_them(bad, word, capsys, monkeypatch):
    if "mps" in bad:
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    Path("notes.txt").write_text("root:x:0:0:not a checkpoint\n")
    code = refused(SMALL, "--max_steps 2", bad)
    line = code if isinstance(code, str) else capsys.readouterr().err.strip().splitlines()[-1]         # argparse's own
    assert "error: " in line and "\n" not in line and len(line) < 400, line
    assert re.search(word, line.lower()), line
    assert not list(Path(".").rglob("*.pt")) and Path("notes.txt").exists()


@pytest.mark.parametrize("bad", ["--data cifar", "--attn linear", "--model huge", "--batch 16", "--epochs ten", "stray"])
def test_unknown_names_and_flags_are_refused_by_argparse(bad, capsys):
    assert refused(bad, SMALL) == 2
    assert bad.split()[-1] in capsys.readouterr().err.splitlines()[-1]


def test_the_script_itself_ends_in_one_error_line():
    process = start_script(SMALL, "--rpc_layers 7")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 1 and err.startswith("error: ") and len(err.splitlines()) == 1 and "rpc_layers" in err


def test_a_world_that_does_not_divide_the_batch_is_refused(monkeypatch):
    monkeypatch.setattr(common, "setup", lambda device: (torch.device("cpu"), 0, 3))
    line = refused(SMALL)
    assert "--batch_size 16" in line and "3 processes" in line


def test_a_folder_that_holds_a_run_is_refused_and_kept():
    train(SMALL, "--max_steps 1 --out_dir a")
    before = Path("a/last.pt").read_bytes(), Path("a/log.jsonl").read_bytes()
    line = refused(SMALL, "--max_steps 2 --out_dir a")
    assert line.startswith("error: --out_dir a already holds a run") and "--resume a" in line
    assert (Path("a/last.pt").read_bytes(), Path("a/log.jsonl").read_bytes()) == before


def test_broken_and_foreign_checkpoints_are_not_resumed():
    train(SMALL, "--max_steps 1 --out_dir a")
    whole = Path("a/last.pt").read_bytes()
    for length in (0, 1, 50, 1000, len(whole) // 2, len(whole) - 1):
        Path("a/last.pt").write_bytes(whole[:length])
        line = refused("--resume a")
        assert line.startswith("error: ") and "last.pt" in line and "\n" not in line
    for content in ({"model": {"w": torch.zeros(2)}}, {"task": "segmentation"}, torch.zeros(3), [1, 2]):
        torch.save(content, "a/last.pt")
        line = refused("--resume a")
        assert line.startswith("error: ") and "a" in line
    assert list(log("a")) == [1]


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_state(monkeypatch):
    real = train_cls.F.cross_entropy
    calls = []

    def diverging(*args, **how):
        if "reduction" not in how:                                                          # a training step's
            calls.append(1)
        return real(*args, **how) * (float("nan") if len(calls) == 5 else 1)
    monkeypatch.setattr(train_cls.F, "cross_entropy", diverging)
    line = refused(SMALL, "--max_steps 9 --set save_every=3 --out_dir a --set log_every=2")
    assert line.startswith("error: ") and "not finite at step 5" in line and "step 3" in line
    checkpoint = common.read_checkpoint("a")
    assert checkpoint["step"] == 3 and all(w.isfinite().all() for w in checkpoint["model"].values())


def test_a_run_that_diverges_before_its_first_checkpoint_promises_none(monkeypatch):
    monkeypatch.setattr(train_cls.F, "cross_entropy", lambda logits, *a, **k: logits.sum() * float("nan"))
    line = refused(SMALL, "--max_steps 4 --out_dir a")
    assert "step 1" in line and "is kept" not in line


def test_an_evaluation_that_is_not_finite_is_an_error_and_no_result(monkeypatch):
    real = train_cls.F.cross_entropy                              # the last step can break the weights: its loss was fine
    monkeypatch.setattr(train_cls.F, "cross_entropy",
                        lambda *a, **how: real(*a, **how) * (float("nan") if "reduction" in how else 1))
    line = refused(SMALL, "--max_steps 2 --out_dir a")
    assert line.startswith("error: ") and "finite" in line and "step 2" in line


def test_a_full_disk_ends_in_one_line_and_keeps_the_old_checkpoint(monkeypatch):
    train(SMALL, "--max_steps 2 --out_dir a")
    before = Path("a/last.pt").read_bytes()

    def full(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "fsync", full)
    line = refused("--resume a --max_steps 4")
    assert line.startswith("error: ") and "last.pt" in line and "No space left" in line and "\n" not in line
    assert Path("a/last.pt").read_bytes() == before and sorted(os.listdir("a")) == ["last.pt", "log.jsonl"]


def test_a_full_disk_at_the_log_loses_no_line_of_it():
    train(SMALL, "--max_steps 2 --out_dir a")
    before = Path("a/last.pt").read_bytes(), log("a"), log("a", "eval")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))                               # less than the log has already
    try:
        line = refused("--resume a --max_steps 4")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert line.startswith("error: ") and "log.jsonl" in line
    assert (Path("a/last.pt").read_bytes(), log("a"), log("a", "eval")) == before


def test_ctrl_c_ends_in_one_line_and_a_run_that_resumes():
    process = start(SMALL, "--epochs 300 --set save_every=1 --out_dir a")
    wait_for("a/last.pt", process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.poll() != 0 and "Traceback" not in err
    step = common.read_checkpoint("a")["step"]
    train("--resume a --max_steps", str(step + 2))
    assert list(log("a")) == list(range(1, step + 3))
