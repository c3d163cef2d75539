"""Test train_cls.py alone; test_train.py tests the behaviour of all trainers."""

from argparse import Namespace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from timm.data.mixup import mixup_target
from timm.loss import SoftTargetCrossEntropy
from timm.optim import param_groups_weight_decay
from timm.scheduler import CosineLRScheduler

import common
import train_cls
from data.augment import augment_uint8, mix, to_float
from data.rng import DROPOUT, seed_from
from data.shapes import load_shapes
from runs import call, log, refused, rows
from vit import ViT, ViTConfig, classifier_from_checkpoint

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
    right = logits.topk(5).indices == test.labels[:, None]
    assert evaluation == pytest.approx(dict(
        top1=right[:, 0].sum().item(), top5=right.sum().item(),
        loss=F.cross_entropy(logits, test.labels).item()), rel=1e-5)
    assert checkpoint["classes"] == test.classes and checkpoint["step"] == 2
    assert "out/shapes_rpc holds a run" in bad("--max_steps 1")


def test_a_run_resumed_within_a_chunk_is_equal(monkeypatch):
    """A GPU augments a chunk of batches at once; here three batches, and the "GPU" is the CPU."""
    monkeypatch.setattr(train_cls, "CHUNK_IMAGES", 12)
    monkeypatch.setattr(train_cls, "send", lambda x, device: x)
    args = Namespace(batch_size=4, image_size=16, seed=0, repeats=2, pad=2, flip=True,
                     num_ops=2, erase=0.5, mixup=0.8, cutmix=1.0, smoothing=0.1)
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
    names = [name for name, w in checkpoint["model"].items()
             if w.ndim > 1 and name not in ("pos_embed", "cls_token")]
    decay, _ = checkpoint["optimizer"]["param_groups"]
    assert "blocks.0.attn.learned.s" in names and len(decay["params"]) == len(names)


def test_adversarial_training_raises_the_first_loss():
    for eps in ("0", "4/255"):
        train(SMALL, "--max_steps 1 --drop_path 0.5 --erase 1 --mixup 1 --adv_eps", [eps],
              "--out_dir", [eps[0]])
    assert log("4")[1] > log("0")[1] + 0.01


def test_an_image_is_never_mixed_with_its_copy():
    for flags in ("--batch_size 1 --cutmix 1", "--batch_size 3 --mixup 1 --repeats 3"):
        assert "with itself or with a copy" in bad(SMALL, flags)


def order_of(f, n, step):
    """Return the image indices of a step, (batch_size,); copies of an image are moved apart."""
    epoch, i = divmod(step, n // f.batch_size)
    generator = torch.Generator().manual_seed(f.seed * 1_000_003 + epoch)
    order = torch.randperm(n, generator=generator).repeat_interleave(f.repeats)[:n]
    order = order[i * f.batch_size:(i + 1) * f.batch_size]
    return torch.cat([order[first::f.repeats] for first in range(f.repeats)])


def test_a_run_equals_a_plain_loop(monkeypatch):
    """Its flags differ from every default, and the loop uses timm's parts."""
    monkeypatch.setattr(common, "LOG_EVERY", 1)
    monkeypatch.setattr(common, "MIN_LR", 2e-3)
    f = dict(num_images=62, holdout=28, model="micro", image_size=16, patch_size=8, attn="rpc_asym",
             rpc_layers="1,3", n_iter=3, lambd=0.3, form="paper", drop_path=0.3,
             init="trunc_normal", epochs=3, batch_size=8, lr=3e-3, warmup_epochs=0.5,
             weight_decay=0.4, clip=0.7, pad=3, num_ops=3, erase=0.6, mixup=0.3, cutmix=0.5,
             smoothing=0.2, repeats=2, seed=5, device="cpu", out_dir="a", max_steps=10)
    train(**f)
    f, (images, labels, *_) = SimpleNamespace(**f), load_shapes("train", 62, 16)
    kept = torch.randperm(62, generator=torch.Generator().manual_seed(0))[28:]  # 28 are held out
    torch.manual_seed(f.seed)
    model = ViT(ViTConfig(16, 8, 10, 96, 6, 3, attn="rpc_asym", rpc_layers=(1, 3), drop_path=0.3,
                          pap=dict(n_iter=3, lambd=0.3, form="paper"), init="trunc_normal"))
    optimizer = torch.optim.AdamW(param_groups_weight_decay(
        model, f.weight_decay, no_weight_decay_list=("pos_embed", "cls_token")), lr=f.lr)
    schedule = CosineLRScheduler(optimizer, 3 * 4, common.MIN_LR, t_in_epochs=False, warmup_t=2,
                                 warmup_lr_init=1e-6)
    for step, row in enumerate(row for row in rows("a") if "loss" in row):
        schedule.step_update(step)
        position, index = 8 * step + torch.arange(8), kept[order_of(f, 34, step)]
        x = augment_uint8(images[index], position, f.seed, f.pad, f.num_ops, flip=True)
        x = to_float(x, position, f.seed, f.erase)
        targets = mixup_target(labels[index], 10, smoothing=f.smoothing)        # not mixed yet
        x, targets = mix(x, targets, f.seed, step, f.mixup, f.cutmix)
        torch.manual_seed(seed_from(f.seed, DROPOUT, step, 0))                  # drop-path masks
        loss = SoftTargetCrossEntropy()(model(x), targets)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), f.clip)
        optimizer.step()
        optimizer.zero_grad()
        expected = loss.item(), norm.item(), optimizer.param_groups[0]["lr"]
        assert (row["loss"], row["grad_norm"], row["lr"]) == pytest.approx(expected, rel=5e-5)
    assert step == 9
    weights = common.load("a/last.pt")["model"]
    for name, p in model.named_parameters():
        if p.ndim > 1:                                          # the loss hides weight decay
            assert weights[name].norm() == pytest.approx(p.norm().item(), rel=1e-5), name
