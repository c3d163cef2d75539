"""Test train_cls.py alone; test_train.py tests the behaviour of all trainers."""

from argparse import Namespace
from functools import partial
from pathlib import Path

import pytest
import torch

import common
import train_cls
from data.shapes import load_shapes
from runs import call, log, refused
from vit import classifier_from_checkpoint

pytestmark = pytest.mark.usefixtures("alone")
SMALL = ("--model nano --num_images 64 --image_size 16 --patch_size 4 "
         "--batch_size 16").split()
train, bad = partial(call, train_cls.main), partial(refused, train_cls)


def test_the_checkpoint_alone_reproduces_the_accuracy(capsys):
    train("--max_steps 2 --num_images 500")         # other flags: as in README's first command
    *_, said, following = capsys.readouterr().out.strip().splitlines()
    folder, test = Path("out/shapes_rpc"), load_shapes("test", 100)
    evaluation, checkpoint = log(folder, "eval")[2], common.load(folder)
    assert said.startswith(f"shapes rpc: test accuracy {evaluation['top1']:.2f} %")
    assert following == f"next: python eval_robust.py --ckpt {folder}"
    with torch.no_grad():
        logits = classifier_from_checkpoint(checkpoint)(test.images.float() / 255)
    right = (logits.argmax(1) == test.labels).sum().item()
    assert evaluation["images"] == 100 and evaluation["top1"] == pytest.approx(right, abs=1e-6)
    assert checkpoint["classes"] == test.classes and checkpoint["step"] == 2
    assert "out/shapes_rpc holds a run" in bad("--max_steps 1")


def test_a_run_resumed_within_a_chunk_is_equal(monkeypatch):
    """A GPU augments a chunk of batches at once; here three batches, and the "GPU" is the CPU.

    The resumed run begins with the second batch of a chunk, so its chunks are others.
    """
    monkeypatch.setattr(train_cls, "CHUNK_IMAGES", 12)
    monkeypatch.setattr(train_cls, "send", lambda x, device: x)
    args = Namespace(batch_size=4, image_size=16, seed=0, repeats=2, pad=2, num_ops=2, erase=0.5,
                     mixup=0.8, cutmix=1.0, smoothing=0.1)
    source = load_shapes("train", 20, 16)                           # an epoch has five batches

    def batches(first, device):
        return list(train_cls.train_batches(source, args, first, 9, device, rank=0, world=1))
    whole = batches(0, Namespace(type="GPU"))
    for later in (batches(4, Namespace(type="GPU")), batches(4, torch.device("cpu"))):
        for parts in zip(whole[4:], later, strict=True):
            assert all(map(torch.equal, *parts))


def test_init_from_takes_weights_of_a_run(capsys):
    train(SMALL, "--attn symmetric --max_steps 2 --out_dir sym")
    train(SMALL, "--max_steps 1 --init_from sym --out_dir rpc")     # the first step's lr is 1e-6
    first, after = (common.load(name)["model"] for name in ("sym", "rpc"))
    assert all((first[k] - after[k]).abs().max() < 1e-5 for k in after)
    assert "is new" not in capsys.readouterr().out


def test_matrices_decay_also_in_scaled_attention():
    train(SMALL, "--attn scaled_s --max_steps 1 --out_dir a")
    checkpoint = common.load("a")
    decay, rest = (len(group["params"]) for group in checkpoint["optimizer"]["param_groups"])
    names = [name for name, w in checkpoint["model"].items()
             if w.ndim > 1 and name not in ("pos_embed", "cls_token")]
    assert "blocks.0.attn.learned.s" in names and decay == len(names)
    assert decay + rest == len(checkpoint["model"])


def test_adversarial_training_raises_the_first_loss():
    for eps in ("0", "4/255"):
        train(SMALL, "--max_steps 1 --drop_path 0.5 --erase 1 --mixup 1 --adv_eps", [eps],
              "--out_dir", [eps[0]])
    assert log("4")[1] > log("0")[1] + 0.01
