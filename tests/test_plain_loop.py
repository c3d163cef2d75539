"""Runs whose flags differ from every default equal plain loops of timm's and PyTorch's parts."""

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import common
import lm
import train_cls
import train_lm
import train_seg
from attention import key_statistics
from data import augment, rng
from data.masks import TrainingViews, ade20k, finish_views
from data.rng import epoch_order, uniform
from data.shapes import load_shapes
from data.text import load_corpus, random_windows
from lm import LM, LMConfig
from runs import call, make_pairs, make_text, rows
from segmenter import Segmenter, SegmenterConfig, evaluate, segmenter_from_checkpoint
from vit import ViT, ViTConfig

timm = pytest.importorskip("timm")
from timm.data.mixup import mixup_target                            # noqa: E402
from timm.loss import SoftTargetCrossEntropy                        # noqa: E402
from timm.optim import param_groups_weight_decay                    # noqa: E402
from timm.scheduler import CosineLRScheduler                        # noqa: E402
from timm.utils import accuracy                                     # noqa: E402


def order_of(f, n, step):
    """Return the image indices of a step, (batch_size,); copies of an image are moved apart."""
    epoch, i = divmod(step, n // f.batch_size)
    generator = torch.Generator().manual_seed(f.seed * 1_000_003 + epoch)
    order = torch.randperm(n, generator=generator).repeat_interleave(f.repeats)[:n]
    order = order[i * f.batch_size:(i + 1) * f.batch_size]
    return torch.cat([order[first::f.repeats] for first in range(f.repeats)])


def augmented(f, images, position):
    """Shift, flip, apply RandAugment and erase. Other tests check these operations."""
    def draw(n, purpose):
        return uniform(position, n, f.seed, purpose)
    images = augment.random_crop(images, draw(2, rng.SHIFT), f.pad)
    images = torch.where(draw(1, rng.FLIP).view(-1, 1, 1, 1) < 0.5, images.flip(3), images)
    images = augment.rand_augment(images, draw(4 * f.num_ops, rng.RAND_AUGMENT))
    u = draw(augment.ERASE_COLUMNS, rng.ERASE)
    return augment.random_erase(images / 255, u, position, f.seed, prob=f.erase)


def mixed(f, images, labels, num_classes, step):
    """Mix each image with its neighbour, which `order` puts in timm's mirror place of the batch."""
    rng = np.random.default_rng([f.seed, step])
    cut = rng.random() < 0.5
    lam = rng.beta(f.cutmix, f.cutmix) if cut else rng.beta(f.mixup, f.mixup)
    order = torch.cat([torch.arange(0, len(labels), 2), torch.arange(1, len(labels), 2).flip(0)])
    back = order.argsort()
    partner = images[order].flip(0)[back]
    if cut:
        box = torch.zeros(images.shape[2:], dtype=torch.bool)
        h, w = (int(side * math.sqrt(1 - lam)) for side in box.shape)
        y, x = (int(rng.integers(side)) for side in box.shape)
        box[max(y - h // 2, 0):y + (h + 1) // 2, max(x - w // 2, 0):x + (w + 1) // 2] = True
        images, lam = torch.where(box, partner, images), 1 - box.double().mean().item()
    else:
        images = lam * images + (1 - lam) * partner
    return images, mixup_target(labels[order], num_classes, lam, f.smoothing)[back]


@torch.no_grad()
def evaluated(model, images, labels):
    logits = model.eval()(images / 255)
    model.train()
    top1, top5 = accuracy(logits, labels, (1, 5))
    return dict(top1=top1.item(), top5=top5.item(), loss=F.cross_entropy(logits, labels).item(),
                images=len(labels))


def update(model, loss, optimizer, clip):
    """Take a step; return the norm of the gradient."""
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item()
    optimizer.step()
    optimizer.zero_grad()
    return norm


def plain_loop(f, all_images, all_labels, test, model):
    """Train by the recipe with flags f; return the rows of the log."""
    epoch_steps = len(all_labels) // f.batch_size
    groups = param_groups_weight_decay(model, f.weight_decay,
                                       no_weight_decay_list=("pos_embed", "cls_token"))
    optimizer = torch.optim.AdamW(groups, lr=f.lr, betas=(0.9, 0.999), eps=1e-8)
    schedule = CosineLRScheduler(optimizer, f.epochs * epoch_steps, common.MIN_LR,
                                 t_in_epochs=False,
                                 warmup_t=f.warmup_epochs * epoch_steps, warmup_lr_init=1e-6)
    rows, pending = [], []
    for step in range(f.max_steps):
        schedule.step_update(step)
        lr = optimizer.param_groups[0]["lr"]

        position = torch.arange(step * f.batch_size, (step + 1) * f.batch_size)
        index = order_of(f, len(all_labels), step)
        images = augmented(f, all_images[index], position)
        images, targets = mixed(f, images, all_labels[index], 10, step)
        torch.manual_seed(rng.seed_from(f.seed, rng.DROPOUT, step, 0))            # drop-path masks
        loss = SoftTargetCrossEntropy()(model(images), targets)
        norm = update(model, loss, optimizer, f.clip)

        step += 1
        pending.append((loss.item(), norm))
        epoch, end = step / epoch_steps, step % epoch_steps == 0 or step == f.max_steps
        if end or step % common.LOG_EVERY == 0:
            loss, norm = np.mean(pending, 0)
            rows.append(dict(step=step, epoch=epoch, loss=loss, grad_norm=norm, lr=lr))
            pending = []
        if step == f.max_steps or epoch % f.eval_every == 0:
            rows.append(dict(step=step, epoch=epoch, eval=evaluated(model, *test),
                             **key_statistics(model, images)))
    return rows


FLAGS = dict(data="shapes", num_images=62, holdout=28, model="micro", image_size=16, patch_size=8,
             attn="rpc_asym", rpc_layers="1,3", n_iter=3, lambd=0.3, form="paper", drop_path=0.3,
             init="trunc_normal", epochs=3, batch_size=8, lr=3e-3, warmup_epochs=0.5,
             weight_decay=0.4, clip=0.7, pad=3, num_ops=3, erase=0.6, mixup=0.3,
             cutmix=0.5, smoothing=0.2, repeats=2, seed=5, device="cpu", max_steps=10,
             eval_every=2, out_dir="a")
MICRO = dict(embed_dim=96, depth=6, num_heads=3, rpc_layers=(1, 3), drop_path=0.3,
             pap=dict(n_iter=3, lambd=0.3, form="paper"))


def assert_close(row, expected):
    """Compare a row of the log with the row of the loop, up to rounding."""
    assert set(row) == set(expected)
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_close(row[key], {str(k): v for k, v in value.items()})
        else:
            # Numbers in lists are rounded to 4 digits. In the lists of nonzero_S, rounding can also
            # move a few entries of S across tau on some processors.
            near = 1.1e-4 if key == "mean_abs_key" else 1e-3 if isinstance(value, list) else 1e-9
            assert row[key] == pytest.approx(value, rel=5e-5, abs=near), key


def assert_same(weights, expected):
    """Compare weights, except key biases of softmax attention, whose gradient is only rounding."""
    assert weights.keys() == expected.keys()
    for name, w in weights.items():
        w, e = w.clone(), expected[name].clone()
        if name in [f"blocks.{i}.attn.qkv.bias" for i in (0, 2, 4, 5)]:
            w[96:192] = e[96:192] = 0
        torch.testing.assert_close(w, e, rtol=0, atol=5e-6, msg=lambda m: f"{name}: {m}")


def test_a_run_equals_the_plain_loop(alone, monkeypatch):
    monkeypatch.setattr(common, "LOG_EVERY", 3)
    monkeypatch.setattr(common, "MIN_LR", 2e-3)
    call(train_cls.main, **FLAGS)
    f, checkpoint = SimpleNamespace(**FLAGS), common.load("a/last.pt")
    images, labels, *_ = load_shapes("train", 62, 16)
    order = torch.randperm(62, generator=torch.Generator().manual_seed(0))     # equal for all seeds
    held, kept = order[:28], order[28:]
    torch.manual_seed(f.seed)
    model = ViT(ViTConfig(16, 8, 10, attn="rpc_asym", init="trunc_normal", **MICRO))
    expected = plain_loop(f, images[kept], labels[kept], (images[held], labels[held]), model)
    assert {path.name for path in Path("a").glob("*.*")} == {"log.jsonl", "last.pt", "best.pt"}
    for row, what in zip(rows("a"), expected, strict=True):
        assert_close(row, what)
    assert_same(checkpoint["model"], model.state_dict())


def test_a_language_model_run_equals_the_plain_loop(alone, monkeypatch):
    """Compare only the first steps, because training amplifies rounding (1e-7 per step)."""
    monkeypatch.setattr(common, "LOG_EVERY", 1)
    make_text()
    f = dict(data="wikitext", data_dir="text", model="mini", context=12, attn="rpc",
             rpc_layers="0,2", n_iter=3, lambd=0.3, form="paper", mu_over="token", dropout=0.2,
             cutoffs="6,15", steps=20, batch_size=6, lr=5e-3, warmup=3, clip=0.3, words=0,
             max_steps=6, eval_every=6, seed=5, device="cpu", out_dir="a")
    call(train_lm.main, **f)
    f, corpus = SimpleNamespace(**f), load_corpus("text")
    torch.manual_seed(f.seed)
    model = LM(LMConfig(len(corpus.vocab), **{**lm.LM_SIZES["mini"], "context": 12}, attn="rpc",
                        rpc_layers=(0, 2), dropout=0.2, cutoffs=(6, 15),
                        pap=dict(n_iter=3, lambd=0.3, form="paper", mu_over="token")))
    optimizer = torch.optim.Adam(model.parameters())
    for step, row in enumerate(row for row in rows("a") if "loss" in row):
        lr = f.lr * (step + 1) / 4 if step < 3 else f.lr * (1 + math.cos(math.pi * step / 20)) / 2
        optimizer.param_groups[0]["lr"] = lr
        windows = random_windows(corpus.train, step, 6, 12, f.seed)
        torch.manual_seed(rng.seed_from(f.seed, rng.DROPOUT, step, 0))            # dropout masks
        log_probs = model.log_probs(model.hidden(windows[:, :-1]))
        loss = -log_probs.gather(2, windows[:, 1:, None]).mean()
        norm = update(model, loss, optimizer, f.clip)
        assert row["loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert row["grad_norm"] == pytest.approx(norm, rel=1e-3) and row["lr"] == pytest.approx(lr)
    assert step == 5 and [row["step"] for row in rows("a") if "eval" in row] == [6]
    ours, theirs = ([state["exp_avg"].norm().item() for state in states.values()] for states in
                    (common.load("a")["optimizer"]["state"], optimizer.state))
    np.testing.assert_allclose(ours, theirs, rtol=1e-2)     # Adam's updates hide the clipping


@pytest.mark.parametrize("data", ["camvid", "ade20k"])
def test_a_segmentation_run_equals_the_plain_loop(alone, data, monkeypatch):
    """Compare only the first steps. Other tests check views. ade20k uses SGD, camvid AdamW."""
    monkeypatch.setattr(common, "LOG_EVERY", 1)
    monkeypatch.setattr(common, "MIN_LR", 1e-3)
    make_pairs()
    f = dict(data=data, data_dir="pairs", num_classes=4, model="micro", patch_size=8,
             attn="sym_asym", decoder_attn="symmetric", rpc_layers="1,3", n_iter=3, lambd=0.3,
             form="paper", drop_path=0.3, dropout=0.3, size=24, epochs=4, batch_size=4, lr=3e-3,
             weight_decay=0.4, clip=0.5, window=16, stride=12, max_steps=6, eval_every=9,
             num_workers=0, seed=5, device="cpu", out_dir="a")
    call(train_seg.main, **f)
    f, tree = SimpleNamespace(**f), ade20k("pairs", "training", 4)
    torch.manual_seed(f.seed)
    model = Segmenter(SegmenterConfig(24, 8, 4, attn="sym_asym", decoder_attn="symmetric",
                                      decoder_dropout=0.3, **MICRO))
    groups = param_groups_weight_decay(model, 0.4, no_weight_decay_list=(
        "encoder.pos_embed", "encoder.cls_token", "decoder.cls_emb"))
    SGD = partial(torch.optim.SGD, momentum=0.9, nesterov=True)
    optimizer = (SGD if data == "ade20k" else torch.optim.AdamW)(groups, lr=1.0)
    views = TrainingViews(tree, 24, (0.5, 2.0), f.seed)
    for step, row in enumerate(row for row in rows("a") if "loss" in row):
        lr = (f.lr - common.MIN_LR) * (1 - step / 12) ** 0.9 + common.MIN_LR
        for group in optimizer.param_groups:
            group["lr"] = lr
        order, first = epoch_order(9, step // 3, f.seed), step % 3 * 4
        batch = [views[step // 3 * 9 + first + i, k]
                 for i, k in enumerate(order[first:first + 4].tolist())]
        images, labels = (torch.stack([sample[i] for sample in batch]) for i in (0, 1))
        place = [torch.tensor([sample[2][i] for sample in batch]) for i in (1, 2, 0)]
        images = finish_views(images, *place, f.seed, model.encoder.mean)
        torch.manual_seed(rng.seed_from(f.seed, rng.DROPOUT, step, 0))            # the masks
        loss = F.cross_entropy(model(images), labels.long(), ignore_index=255)
        norm = update(model, loss, optimizer, f.clip)
        assert row["loss"] == pytest.approx(loss.item(), rel=1e-3 if step else 1e-5)
        assert row["grad_norm"] == pytest.approx(norm, rel=1e-2 if step else 1e-4)
        assert row["lr"] == pytest.approx(lr)
    assert step == 5
    trained = segmenter_from_checkpoint(common.load("a"))
    found = evaluate(trained, ade20k("pairs", "validation", 4), size=24, window=16, stride=12)
    assert [row["eval"] for row in rows("a") if "eval" in row] == [found]
    weights = trained.state_dict()
    for name, p in model.named_parameters():
        if p.ndim > 1:                              # the loss hides weight decay
            assert weights[name].norm() == pytest.approx(p.norm().item(), rel=1e-3), name
