"""Test train_seg.py alone; test_train.py tests the behaviour of all trainers."""

import re
from argparse import Namespace
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from timm.optim import param_groups_weight_decay

import common
import train_seg
from fixtures import ROOT
from data.masks import Scenes, SegTree, TrainingViews, ade20k, finish_views
from data.rng import DROPOUT, epoch_order, seed_from
from runs import call, flags, log, make_pairs, refused, rows
from segmenter import (Segmenter, SegmenterConfig, confusion, predict_classes, scores,
                       segmenter_from_checkpoint)
from vit import SIZES, ViT, ViTConfig

pytestmark = pytest.mark.usefixtures("alone")
train, bad = partial(call, train_seg.main), partial(refused, train_seg)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("ade") / "pairs"
    make_pairs(root)
    return root


def test_the_checkpoint_alone_reproduces_the_mean_iou(capsys, monkeypatch):
    views, scales = train_seg.TrainingViews, []
    monkeypatch.setattr(train_seg, "TrainingViews",
                        lambda *how: scales.append(how[2]) or views(*how))
    train("--num_images 80 --max_steps 2")          # other flags: as in README's first command
    assert scales == [(1, 1)]               # scenes are neither resized nor (below) distorted
    said, folder = capsys.readouterr().out, Path("out/seg_shapes_rpc")
    checkpoint, evaluation = common.load(folder), log(folder, "eval")[2]
    assert abs(float(re.search(r"test mean IoU (\S+) %", said)[1]) - evaluation["mean_iou"]) < 0.006
    assert f"next: python train_seg.py --eval_only {folder}\n" in said
    model, scenes = segmenter_from_checkpoint(checkpoint), Scenes("test", 8, 32)
    matrix = sum(confusion(predict_classes(model, image, size=32, window=32, stride=32), label,
                           11) for image, label in (scenes[i] for i in range(8)))
    assert scores(matrix) == evaluation == checkpoint["metrics"]
    assert checkpoint["classes"] == scenes.classes and checkpoint["step"] == 2


def test_scenes_start_from_the_shipped_classifier():
    def get(*given):
        return call(train_seg.get_args, *given)[0]
    for given, attn in (("", "rpc"), ("--attn symmetric", "symmetric")):
        args = get(given)
        assert Path(args.backbone).resolve() == ROOT / "weights" / f"shapes_{attn}.pt"
    assert get("--backbone a").backbone == "a" and get("--data_dir a").backbone is None


def test_the_schedule_equals_the_reference(golden, monkeypatch):
    """The reference is rstrudel/segmenter."""
    g = golden("seg_schedule")
    total, args = int(g["iter_max"]), Namespace(lr=g["base_lr"].item())
    monkeypatch.setattr(common, "MIN_LR", g["min_lr"].item())
    ours = [train_seg.learning_rate(k, total, args) for k in range(total + 1)]
    np.testing.assert_allclose(ours, g["lr_after_k_updates"].numpy(), rtol=1e-9)


def test_a_run_equals_a_plain_loop(root, monkeypatch):
    """Compare only the first steps. Other tests check the views and the schedule."""
    monkeypatch.setattr(common, "LOG_EVERY", 1)
    train("--data ade20k --num_classes 4 --model micro --patch_size 8 --attn sym_asym "
          "--decoder_attn symmetric --rpc_layers 1,3 --n_iter 3 --lambd 0.3 --form paper "
          "--drop_path 0.3 --dropout 0.3 --size 24 --epochs 4 --batch_size 4 --lr 3e-3 --clip 0.5 "
          "--weight_decay 0.4 --max_steps 6 --eval_every 9 --num_workers 0 --seed 5 --out_dir a "
          "--data_dir", [root])
    torch.manual_seed(5)
    model = Segmenter(SegmenterConfig(
        24, 8, 4, embed_dim=96, depth=6, num_heads=3, attn="sym_asym",
        decoder_attn="symmetric", rpc_layers=(1, 3), pap=dict(n_iter=3, lambd=0.3, form="paper"),
        drop_path=0.3, decoder_dropout=0.3))
    optimizer = torch.optim.SGD(param_groups_weight_decay(model, 0.4, no_weight_decay_list=(
        "encoder.pos_embed", "encoder.cls_token", "decoder.cls_emb")), momentum=0.9, nesterov=True)
    views = TrainingViews(ade20k(root, "training", 4), 24, (0.5, 2.0), 5)
    for step, row in enumerate(row for row in rows("a") if "loss" in row):
        for group in optimizer.param_groups:
            group["lr"] = row["lr"]
        epoch, i = divmod(step, 2)                                  # 9 images: 2 batches of 4
        batch = [views[4 * step + j, k]
                 for j, k in enumerate(epoch_order(9, epoch, 5)[4 * i:4 * i + 4].tolist())]
        images, labels = (torch.stack([sample[i] for sample in batch]) for i in (0, 1))
        place = [torch.tensor([sample[2][i] for sample in batch]) for i in (0, 1)]
        images = finish_views(images, *place, model.encoder.mean)
        torch.manual_seed(seed_from(5, DROPOUT, step, 0))                       # the masks
        loss = F.cross_entropy(model(images), labels.long(), ignore_index=255)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
        optimizer.step()
        optimizer.zero_grad()
        assert (row["loss"], row["grad_norm"]) == pytest.approx((loss.item(), norm), rel=1e-2)
    assert step == 5
    weights = common.load("a")["model"]
    for name, p in model.named_parameters():
        if p.ndim > 1:                                              # the loss hides weight decay
            assert weights[name].norm() == pytest.approx(p.norm().item(), rel=1e-3), name


def test_a_batch_without_a_labelled_pixel_counts_nothing(root, monkeypatch):
    monkeypatch.setattr(common, "LOG_EVERY", 1)
    last = epoch_order(9, 0, seed=0)[4:8]                           # 2 batches of 4

    def image(tree, i):
        """Return an image; in the first batch all labels are 255, which is ignored."""
        ignored = len(tree) == 9 and i not in last
        label = torch.full((40, 40), 255 if ignored else 0, dtype=torch.uint8)
        return label.expand(3, -1, -1), label
    monkeypatch.setattr(SegTree, "__getitem__", image)
    train("--data camvid --num_classes 4 --size 32 --patch_size 8 --batch_size 4 --epochs 2 "
          "--num_workers 0 --max_steps 2 --out_dir a --data_dir", [root])
    for what in ("loss", "grad_norm"):
        zero, second = log("a", what).values()
        assert zero == 0 and second > 0


ADE = ("--data ade20k --num_classes 4 --model nano --patch_size 8 --num_workers 0 --max_steps 1 "
       "--data_dir")


def classifier(path, **config):
    """Write a checkpoint like train_cls.py; return its model."""
    model = ViT(ViTConfig(**SIZES["nano"], image_size=32, patch_size=8, num_classes=7, **config))
    torch.save(dict(task="classification", model=model.state_dict(), step=3,
                    model_config=asdict(model.config)), path)
    return model


def test_a_backbone_has_the_attention_of_the_flags(root, monkeypatch):
    monkeypatch.setattr(common, "MIN_LR", 0.0)
    backbone = classifier("rpc.pt", attn="rpc", rpc_layers=(1,), pap=dict(n_iter=2, lambd=3.0))
    run = flags(ADE, [root], "--size 48 --lr 1e-9 --backbone rpc.pt")
    own = flags("--rpc_layers 1 --n_iter 2 --lambd 3")
    line = bad(run, "--rpc_layers 1 --n_iter 3 --lambd 3")
    assert "pap is {'n_iter': 2" in line and "rpc.pt, but {'n_iter': 3" in line
    for flag, wrong in (("--model micro", "embed_dim is 64"), ("--rpc_layers 0", "rpc_layers"),
                        ("--patch_size 4", "patch_size is 8"), ("--model fan_tiny", "FAN")):
        assert wrong in bad(run, own, flag)
    train(run, own, "--out_dir a")
    checkpoint = common.load("a")
    config, weights = SegmenterConfig(**checkpoint["model_config"]), checkpoint["model"]
    assert (config.attn, config.rpc_layers) == ("rpc", (1,))
    assert (config.pap["n_iter"], config.pap["lambd"]) == (2, 3.0)
    torch.testing.assert_close(weights["encoder.blocks.1.attn.qkv.weight"],
                               backbone.blocks[1].attn.qkv.weight.data)
    Path("rpc.pt").rename("moved.pt")
    train("--resume a --max_steps 2")                               # no longer needs the backbone


def test_a_backbone_may_have_timms_names(root):
    model = classifier("soft.pt")
    torch.save({"model": model.state_dict()}, "deit.pt")            # like DeiT's files
    train(ADE, [root], "--size 32 --attn softmax --backbone deit.pt --out_dir a")
    assert common.load("a")["model_config"]["attn"] == "softmax"
