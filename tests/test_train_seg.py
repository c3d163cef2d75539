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
from data.masks import Scenes, SegTree, TrainingViews, finish_views, list_pairs
from data.rng import DROPOUT, epoch_order, seed_from
from fan import FAN, FAN_SIZES, FANConfig
from robust.corruptions import corrupt
from runs import call, flags, log, make_pairs, refused, rows
from segmenter import (Segmenter, SegmenterConfig, confusion, evaluate,
                       predict_classes, scores, segmenter_from_checkpoint)
from test_segmentation import BLUE_RED, RED_BLUE, make_masks
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
                        lambda *how, **rest: scales.append(how[2]) or views(*how, **rest))
    train("--num_images 80 --max_steps 2")          # other flags: as in README's first command
    assert scales == [(1, 1)]               # scenes are neither resized nor (below) distorted
    said, folder = capsys.readouterr().out, Path("out/seg_shapes_rpc")
    checkpoint, evaluation = common.load(folder), log(folder, "eval")[2]
    said_iou = float(re.search(r"step +2  mean IoU (\S+)", said)[1])
    assert abs(said_iou - evaluation["mean_iou"]) < 0.006
    assert f"next: python train_seg.py --eval_only {folder}\n" in said
    model, scenes = segmenter_from_checkpoint(checkpoint), Scenes("val", 8, 32)
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
    assert get("--backbone a").backbone == "a" and get("--data_dir a").backbone == "none"


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
          "--rpc_layers 1,3 --n_iter 3 --lambd 0.3 --form paper "
          "--drop_path 0.3 --dropout 0.3 --size 24 --epochs 4 --batch_size 4 --lr 3e-3 --clip 0.5 "
          "--weight_decay 0.4 --max_steps 6 --eval_every 9 --num_workers 0 --seed 5 --out_dir a "
          "--data_dir", [root])
    torch.manual_seed(5)
    model = Segmenter(SegmenterConfig(
        24, 8, 4, embed_dim=96, depth=6, num_heads=3, attn="sym_asym",
        rpc_layers=(1, 3), pap=dict(n_iter=3, lambd=0.3, form="paper"),
        drop_path=0.3, decoder_dropout=0.3))
    optimizer = torch.optim.SGD(param_groups_weight_decay(model, 0.4, no_weight_decay_list=(
        "encoder.pos_embed", "encoder.cls_token", "decoder.cls_emb")), momentum=0.9, nesterov=True)
    tree = SegTree(list_pairs(root, "training"), first=1)
    views = TrainingViews(tree, 24, (0.5, 2.0), 5)
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


DATA = "--data ade20k --num_classes 4 --num_workers 0 --max_steps 1 --data_dir"
ADE = f"--model nano --patch_size 8 {DATA}"


def classifier(path, **config):
    """Write a checkpoint like train_cls.py; return its model."""
    model = ViT(ViTConfig(**SIZES["nano"], image_size=32, patch_size=8, num_classes=7, **config))
    torch.save(dict(task="classification", model=model.state_dict(), step=3,
                    model_config=asdict(model.config)), path)
    return model


def test_a_backbone_gives_the_encoder_its_settings(root, monkeypatch):
    monkeypatch.setattr(common, "MIN_LR", 0.0)
    backbone = classifier("rpc.pt", attn="rpc", rpc_layers=(1,), pap=dict(n_iter=2, lambd=3.0))
    run = flags(DATA, [root], "--size 48 --lr 1e-9 --backbone rpc.pt")
    for flag in ("--rpc_layers 1", "--model micro", "--patch_size 4", "--n_iter 2", "--attn rpc"):
        assert f"unrecognized arguments: {flag}" in bad(run, flag)
    train(run, "--out_dir a")
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
    train(DATA, [root], "--size 32 --backbone deit.pt --out_dir a")
    assert common.load("a")["model_config"]["attn"] == "softmax"


def fan_classifier(path):
    """Write a FAN's checkpoint like train_cls.py."""
    config = FANConfig(**FAN_SIZES["fan_tiny"], image_size=32, patch_size=8, num_classes=7)
    model = FAN(config)
    torch.save(dict(task="classification", architecture="fan", model=model.state_dict(),
                    step=3, model_config=asdict(config)), path)
    return model


def test_a_fan_is_a_backbone(root, capsys, monkeypatch):
    """The run resumes, and its checkpoint alone is evaluated."""
    monkeypatch.setitem(FAN_SIZES["fan_tiny"], "depth", 2)
    backbone = fan_classifier("fan.pt")
    train(DATA, [root], "--size 32 --batch_size 3 --backbone fan.pt --lr 0 --out_dir a")
    weights = common.load("a")["model"]
    name = "blocks.1.attn.kv.weight"
    assert torch.equal(weights[f"encoder.{name}"], backbone.state_dict()[name])
    train("--resume a --max_steps 2")
    assert common.load("a")["step"] == 2
    train("--eval_only a --severities --num_workers 0 --window 24")         # 3 x 3 patches
    assert "| clean, mean IoU " in capsys.readouterr().out


def test_a_frozen_fan_keeps_its_batchnorm(root, monkeypatch):
    """The means of a frozen BatchNorm would otherwise follow the training images."""
    monkeypatch.setitem(FAN_SIZES["fan_tiny"], "depth", 1)
    backbone = fan_classifier("fan.pt")
    load_encoder = train_seg.load_encoder

    def load_and_freeze(model, classifier):
        load_encoder(model, classifier)
        model.encoder.requires_grad_(False)
    monkeypatch.setattr(train_seg, "load_encoder", load_and_freeze)
    train(DATA, [root], "--size 32 --batch_size 3 --backbone fan.pt --out_dir a --max_steps 4 "
          "--eval_every 1")
    found, before = common.load("a")["model"], backbone.state_dict()
    names = [name for name in before if f"encoder.{name}" in found]
    assert any("running_mean" in name for name in names)
    assert all(torch.equal(found[f"encoder.{name}"], before[name]) for name in names)


def results(folder):
    return common.read_log(Path(folder, "results.jsonl"))


def test_networks_are_evaluated_on_the_same_images(capsys):
    """The rows equal a loop, and the table over seeds has the mean over the types."""
    for seed in (0, 1):
        train(f"--num_images 40 --max_steps 1 --seed {seed} --out_dir a_s{seed}")
    capsys.readouterr()
    train("--eval_only a_s0 a_s1 --severities 2 5 --limit 3 --seed 4 --window 16 --stride 12 "
          "--out_dir e")
    rows, said = results("e"), capsys.readouterr().out
    assert len(rows) == 2 * 16 and {row["images"] for row in rows} == {3}
    row = next(row for row in rows if row["name"] == "fog" and row["network"] == "a_s1")
    model = segmenter_from_checkpoint(common.load("a_s1"))
    index = epoch_order(1600, 0, seed=4)[:3].tolist()
    change = partial(corrupt, name="fog", severity=5, seed=4)
    expected = evaluate(model, Scenes("test", 1600, 32), size=32, window=16, stride=12,
                        index=index, change=change)
    assert row["results"][1] == expected
    assert row["mean_iou"] == pytest.approx((row["results"][0]["mean_iou"] + expected["mean_iou"]) / 2)
    types = [row for row in rows if row["network"] == "a_s1" and row["name"] != "clean"]
    mean = sum(row["mean_iou"] for row in types) / 15
    line = next(line for line in said.splitlines() if "type=mean severities=2,5, mean IoU" in line)
    assert f" {mean:.2f} " in line and "| a_s* " in said
    assert "expected" not in bad("--eval_only a_s0 --severities --out_dir e")


def test_an_evaluation_has_the_trainings_palette(root):
    make_masks(Path("one"), [0, 1, 2], n=40, palette=RED_BLUE)
    make_masks(Path("other"), [0, 2, 1], palette=BLUE_RED, part="test")
    make_masks(Path("new"), [0, 1, 2], n=3, palette=RED_BLUE, part="test")
    make_masks(Path("grey"), [0, 1, 2], n=3, part="test")
    train("--data_dir one --max_steps 1 --size 24 --num_workers 0 --out_dir a")
    run = "--eval_only a --severities --num_workers 0"
    train(run, "--data_dir new --out_dir e")
    assert [row["images"] for row in results("e")] == [3]
    for folder in ("other", "grey"):
        line = bad(run, "--out_dir f --data_dir", [folder])
        assert "training masks of a and " in line and "different palettes: the value" in line
    assert not Path("f").exists()


def test_evaluated_networks_have_the_classes_of_the_images(root):
    train(ADE, [root], "--size 32 --attn symmetric --out_dir a")
    train("--num_images 40 --max_steps 1 --out_dir b")
    run = "--severities --num_workers 0 --out_dir e"
    train("--eval_only a", run, "--data_dir", [root])               # in ADE20K's layout
    assert results("e")[0]["data"] == "ade20k"
    assert "b has the classes ['background'" in bad("--eval_only a b", run)
    make_masks(Path("mine"), [0, 1], n=3, part="test")
    Path("mine/classes.txt").write_text("x\ny")
    assert "but the images have ['x', 'y']" in bad("--eval_only b --data folder --data_dir mine", run)
    assert "is for classification" in bad("--eval_only", [ROOT / "weights/shapes_rpc.pt"])


def test_a_data_set_has_only_its_flags():
    train("--num_images 40 --max_steps 1 --out_dir b")
    for given in ("--data shapes --data_dir a", "--data_dir a --num_images 9", "--num_classes 5",
                  "--limit 3", "--model tiny", "--n_iter 2", "--eval_only b --size 48",
                  "--eval_only b --data shapes --data_dir x", "--resume b --data_dir x"):
        *_, flag, _ = given.split()
        assert f"unrecognized arguments: {flag}" in bad(given), given


def test_likely_mistakes_are_one_line():
    for given, words in (("--epochs 0", "--epochs: '0': expected a whole number of 1 or more"),
                         ("--batch_size 0", "--batch_size"), ("--dropout 2", "from 0 to 1"),
                         ("--drop_path 1", "--drop_path: '1': expected a number from 0 to 0.99"),
                         ("--backbone nowhere", "there is no classifier nowhere"),
                         ("--attn rpc_asym", "shapes_rpc_asym.pt; choose another --backbone"),
                         ("--backbone none --attn scaled_s", "needs a fixed number of tokens"),
                         (f"--eval_only {ROOT}/weights/seg_shapes_rpc.pt --data camvid",
                          "there is no folder masks/images/validation; --data_dir selects it"),
                         ("--data_dir nowhere", "there is no folder nowhere/images"),
                         ("--data_dir nowhere --stride 24 --size 16", "stride 24: expected"),
                         ("--data_dir nowhere --size 20", "expected a multiple of the patch size")):
        assert words in bad(given)


def test_the_learning_rate_never_exceeds_lr():
    for lr in (1e-3, 1e-6, 0.0):
        rates = [train_seg.learning_rate(k, 9, Namespace(lr=lr)) for k in range(10)]
        assert rates[0] == max(rates) == lr and rates[-1] == min(lr, common.MIN_LR)
