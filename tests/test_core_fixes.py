"""Claims about the trainers' folders, locks, endings and flags; each failed before it was mended."""

import json
import math
import os
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
import train_cls
from common import Log, load, save
from data.text import perplexity
from vit import ViT, ViTConfig

ROOT = Path(__file__).parent.parent
TINY = "--num_images 40 --batch_size 8 --epochs 2 --warmup_epochs 0".split()


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def train(monkeypatch, *flags, script=train_cls):
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *flags])
    script.main()


def command(*flags, script="train_cls.py", **how):
    return subprocess.Popen([sys.executable, str(ROOT / script), *flags], stderr=subprocess.PIPE, stdout=subprocess.PIPE,
                            text=True, env=dict(os.environ, OMP_NUM_THREADS="1"), **how)


def photos(root, counts):
    for name, count in counts.items():
        Path(root, name).mkdir(parents=True)
        for i in range(count):
            pixels = np.random.default_rng(i).integers(0, 256, (40, 40, 3), np.uint8)
            Image.fromarray(pixels).save(Path(root, name, f"{i}.png"))


# --- two writers ----------------------------------------------------------------------------------

def test_a_folder_in_which_a_process_trains_is_refused_to_another_and_free_when_that_one_is_killed(tmp_path, monkeypatch):
    Path("a").mkdir()
    holds = subprocess.Popen([sys.executable, "-c", "import time; from common import Log; log = Log('a/log.jsonl'); "
                              "log.lock(); print(1, flush=True); time.sleep(99)"], cwd=tmp_path, stdout=subprocess.PIPE,
                             env=dict(os.environ, PYTHONPATH=str(ROOT)))
    holds.stdout.readline()
    with pytest.raises(ValueError, match=f"a: process {holds.pid} on .* trains there"):
        train(monkeypatch, *TINY, "--max_steps", "1", "--out_dir", "a")
    holds.kill()
    holds.wait()
    train(monkeypatch, *TINY, "--max_steps", "1", "--out_dir", "a")             # a lock left behind is no lock
    assert load("a")["step"] == 1


def test_resuming_a_run_that_still_trains_is_refused_and_changes_nothing(monkeypatch, tmp_path):
    train(monkeypatch, *TINY, "--max_steps", "2", "--out_dir", "a")
    kept = Path("a/log.jsonl").read_bytes()
    holds = subprocess.Popen([sys.executable, "-c", "import time; from common import Log; log = Log('a/log.jsonl'); "
                              "log.lock(); print(1, flush=True); time.sleep(99)"], cwd=tmp_path, stdout=subprocess.PIPE,
                             env=dict(os.environ, PYTHONPATH=str(ROOT)))
    holds.stdout.readline()
    with pytest.raises(ValueError, match="trains there"):
        train(monkeypatch, "--resume", "a")
    holds.kill()
    holds.wait()
    assert Path("a/log.jsonl").read_bytes() == kept


def test_two_processes_that_write_one_file_never_share_a_temporary_name(monkeypatch):
    names = set()
    real = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (names.add(str(a)), real(a, b)))
    for pid in (1, 2):
        monkeypatch.setattr(os, "getpid", lambda: pid)
        save("last.pt", dict(step=pid))
        Log("log.jsonl").cut(0)
    assert len(names) == 4 and sorted(os.listdir()) == ["last.pt", "log.jsonl"]


# --- endings --------------------------------------------------------------------------------------

def test_ctrl_c_says_what_is_saved_and_the_command_that_goes_on():
    run = command(*TINY, "--epochs", "500", "--save_every", "1", "--out_dir", "a")
    while not Path("a/last.pt").exists() and run.poll() is None:
        time.sleep(0.1)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate()
    last = err.strip().splitlines()[-1]
    assert run.returncode == 130 and f"a holds step {load('a')['step']}" in last and last.endswith("train_cls.py --resume a")


def test_the_last_line_names_the_folder_that_was_trained_and_the_attention(monkeypatch, capsys):
    train(monkeypatch, *TINY, "--max_steps", "1", "--attn", "sym_asym")
    train(monkeypatch, *TINY, "--max_steps", "1", "--attn", "sym_asym")
    *_, result, after = capsys.readouterr().out.strip().splitlines()
    assert result.startswith("shapes sym_asym: test accuracy")
    assert after == "next: python eval_robust.py --ckpt out/shapes_sym_asym_2"


def test_a_loss_that_is_not_finite_stops_at_its_step_and_keeps_the_last_good_file(monkeypatch):
    train(monkeypatch, *TINY, "--max_steps", "2", "--out_dir", "a")
    real = train_cls.F.cross_entropy
    calls = []

    def broken(*args, **how):
        calls.append(1)
        return real(*args, **how) * (math.nan if len(calls) == 3 else 1)
    monkeypatch.setattr(train_cls.F, "cross_entropy", broken)
    with pytest.raises(ValueError, match="not finite at step 5: loss nan"):
        train(monkeypatch, "--resume", "a", "--save_every", "1")
    assert load("a")["step"] == 4
    assert [row["step"] for row in Log("a/log.jsonl").rows() if "loss" in row][-1] == 4


# --- flags ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("flags, word", [
    (["--resume", ""], "--resume is empty"),
    (["--pad", "1000"], "--pad 1000 shifts all of an image of 32 pixels"),
    (["--warmup_epochs", "9"], "--warmup_epochs 9.0 is longer than the run, --epochs 8"),
    (["--min_lr", "1"], "--min_lr 1.0 is above --lr 0.002"),
])
def test_flags_that_make_no_sense_are_named(flags, word, monkeypatch):
    with pytest.raises(ValueError, match=word):
        train(monkeypatch, *flags)


def test_a_flag_that_repeats_what_a_resumed_run_chose_itself_is_accepted_and_another_refused(monkeypatch):
    train(monkeypatch, *TINY, "--max_steps", "1", "--out_dir", "a")
    train(monkeypatch, "--resume", "a", "--init", "default", "--max_steps", "2")
    assert load("a")["step"] == 2
    with pytest.raises(ValueError, match="--init trunc_normal does not fit --resume a, .* --init default"):
        train(monkeypatch, "--resume", "a", "--init", "trunc_normal")


def test_the_command_line_wins_over_the_resumed_run_and_that_over_the_recipe(monkeypatch):
    train(monkeypatch, *TINY, "--max_steps", "1", "--out_dir", "a", "--clip", "0.5", "--lr", "1e-3")
    train(monkeypatch, "--resume", "a", "--lr", "1e-4", "--max_steps", "2")
    args = load("a")["args"]
    assert (args["clip"], args["lr"], args["batch_size"], args["model"]) == (0.5, 1e-4, 8, "nano")


def test_weights_of_another_shape_are_refused_with_the_flags_that_they_need(monkeypatch):
    config = ViTConfig(image_size=32, patch_size=16, embed_dim=96, depth=6, num_heads=3)
    save("deit.pt", dict(model=ViT(config).state_dict()))
    with pytest.raises(ValueError, match="--init_from deit.pt: .*needs? --model micro --patch_size 16 --attn softmax") as e:
        train(monkeypatch, *TINY, "--init_from", "deit.pt")
    assert "\n" not in str(e.value)
    train(monkeypatch, *TINY, "--init_from", "deit.pt", *"--model micro --patch_size 16 --attn softmax --max_steps 1".split())


def test_one_image_a_class_is_warned_of_and_five_are_not(monkeypatch, capsys):
    photos("one", dict(a=5, b=1, c=5))
    photos("five", dict(a=5, b=5))
    for folder in ("one", "five"):
        monkeypatch.setattr(sys, "argv", ["train_cls.py", "--data_dir", folder])
        train_cls.get_args()
        assert ("warning: the class b has 1 images" in capsys.readouterr().out) == (folder == "one")


# --- numbers --------------------------------------------------------------------------------------

def test_perplexity_weighs_every_token_alike_however_they_are_split():
    nats = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)                       # windows of 2 and 1 tokens
    assert perplexity(nats) == pytest.approx(math.exp(3), rel=1e-12)                # not exp of the mean of 1.5 and 6


def test_a_log_refuses_what_is_not_finite_and_a_checkpoint_does_too():
    log = Log("log.jsonl")
    log.append(dict(step=1, loss=2.0))
    for row in (dict(step=2, loss=math.nan), dict(step=2, eval=dict(top1=math.inf))):
        with pytest.raises(ValueError, match="not finite at step 2"):
            log.append(row)
    assert [json.loads(line)["step"] for line in Path("log.jsonl").read_text().splitlines()] == [1]
    save("a.pt", dict(step=1, model=dict(w=torch.ones(2))))
    with pytest.raises(ValueError, match="not finite at step 2: the weight w"):
        save("a.pt", dict(step=2, model=dict(w=torch.tensor([1.0, math.nan]))))
    assert load("a.pt")["step"] == 1


def test_importing_a_trainer_loads_neither_torchvision_nor_the_compiler():
    code = "import train_cls, sys; print([m for m in sys.modules if m in ('torchvision', 'torch._dynamo')])"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout
    assert out.strip() == "[]"


# --- adversarial training -------------------------------------------------------------------------

ADVERSARIAL = [*TINY, *"--adv_eps 2/255 --adv_steps 2 --mixup 0.8 --log_every 1 --max_steps 6".split()]


def losses(folder):
    return [row["loss"] for row in Log(Path(folder, "log.jsonl")).rows() if "loss" in row]


def test_adversarial_training_resumes_bit_for_bit_and_two_processes_equal_one(monkeypatch):
    train(monkeypatch, *ADVERSARIAL, "--out_dir", "whole")
    train(monkeypatch, *ADVERSARIAL, "--max_steps", "3", "--out_dir", "parts")
    train(monkeypatch, "--resume", "parts", "--max_steps", "6")
    whole, parts = load("whole"), load("parts")
    assert losses("whole") == losses("parts")
    assert all(torch.equal(whole["model"][name], parts["model"][name]) for name in whole["model"])
    two = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
                          str(ROOT / "train_cls.py"), *ADVERSARIAL, "--out_dir", "two"], capture_output=True, text=True,
                         env=dict(os.environ, OMP_NUM_THREADS="1"))
    assert two.returncode == 0, two.stderr[-2000:]
    assert losses("two") == pytest.approx(losses("whole"), rel=1e-3)


def test_adversarial_images_stay_within_eps_raise_the_loss_and_leave_the_model_alone():
    torch.manual_seed(0)
    model = ViT(ViTConfig(image_size=32, patch_size=8, num_classes=3, embed_dim=32, depth=2, num_heads=2, attn="rpc")).train()
    images, targets = torch.rand(8, 3, 32, 32), torch.eye(3)[torch.arange(8) % 3]
    args = train_cls.argparse.Namespace(adv_eps=4 / 255, adv_steps=3, seed=0)
    moved = train_cls.adversarial(model, images, targets, 0, args)
    again = torch.cat([train_cls.adversarial(model, images[i:i + 4], targets[i:i + 4], i, args) for i in (0, 4)])
    assert model.training and all(p.grad is None for p in model.parameters())
    assert (moved - images).abs().max() <= 4 / 255 + 1e-6 and 0 <= moved.min() and moved.max() <= 1 and not moved.requires_grad
    assert (moved - again).abs().max() < 1e-6                                   # a sample's start is its own
    loss = torch.nn.functional.cross_entropy
    assert loss(model(moved), targets) > loss(model(images), targets)
