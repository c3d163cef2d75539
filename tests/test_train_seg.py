"""Test train_seg.py alone; test_train.py tests the behaviour of all trainers."""

import re
from argparse import Namespace
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import common
import train_seg
from fixtures import ROOT
from data.masks import Scenes, SegTree
from data.rng import epoch_order
from runs import call, flags, log, make_pairs, refused
from segmenter import (SegmenterConfig, confusion, predict_classes, scores,
                       segmenter_from_checkpoint)
from vit import ViT, ViTConfig

pytestmark = pytest.mark.usefixtures("alone")
train, bad = partial(call, train_seg.main), partial(refused, train_seg)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("ade") / "pairs"
    make_pairs(root)
    return root


# --- a run and its files --------------------------------------------------------------------------

def test_the_checkpoint_alone_reproduces_the_mean_iou(capsys, monkeypatch):
    views, scales = train_seg.TrainingViews, []
    monkeypatch.setattr(train_seg, "TrainingViews",
                        lambda *how: scales.append(how[2]) or views(*how))
    train("--num_images 80 --max_steps 2")          # other flags: as in README's first command
    assert scales == [(1, 1)]               # scenes are neither resized nor (below) distorted
    said, folder = capsys.readouterr().out, Path("out/seg_shapes_rpc")
    checkpoint, evaluation = common.load(folder), log(folder, "eval")[2]
    assert abs(float(re.search(r"test mean IoU (\S+) %", said)[1]) - evaluation["mean_iou"]) < 0.006
    assert said.endswith(f"next: python train_seg.py --eval_only {folder}\n")
    model, scenes = segmenter_from_checkpoint(checkpoint), Scenes("test", 8, 32)
    matrix = sum(confusion(predict_classes(model, image, size=32, window=32, stride=32), label,
                           11) for image, label in (scenes[i] for i in range(8)))
    assert dict(scores(matrix), images=8) == evaluation == checkpoint["metrics"]
    assert checkpoint["classes"] == scenes.classes and checkpoint["step"] == 2
    assert (folder / "pictures.png").exists()


def test_scenes_start_from_the_shipped_classifier():
    def get(*given):
        return call(train_seg.get_args, *given)[0]
    for given, attn in (("", "rpc"), ("--attn symmetric", "symmetric")):
        args = get(given)
        assert Path(args.backbone).resolve() == ROOT / "weights" / f"shapes_{attn}.pt"
        assert (args.attn, args.n_iter) == (attn, None)
    for given in ("--model nano", "--attn rpc --n_iter 6", "--attn rpc_asym"):
        assert get(given).backbone is None
    assert get("--backbone a").backbone == "a"


def test_the_schedule_equals_the_reference(golden, monkeypatch):
    """The reference is rstrudel/segmenter. test_plain_loop.py tests Nesterov momentum."""
    g = golden("seg_schedule")
    total, args = int(g["iter_max"]), Namespace(lr=g["base_lr"].item())
    monkeypatch.setattr(common, "MIN_LR", g["min_lr"].item())
    ours = [train_seg.learning_rate(k, total, args) for k in range(total + 1)]
    np.testing.assert_allclose(ours, g["lr_after_k_updates"].numpy(), rtol=1e-9)


# --- batches --------------------------------------------------------------------------------------

def test_processes_share_batches_and_number_samples():
    args = Namespace(batch_size=4, seed=1, num_workers=0, data="shapes")
    whole = list(train_seg.batch_pairs(args, 10, 0, 6, 0, 1))
    assert [len(keys) for keys in whole] == [4, 4, 2] * 2
    assert [position for keys in whole for position, _ in keys] == list(range(20))
    first, second = ([i for keys in part for _, i in keys] for part in (whole[:3], whole[3:]))
    assert sorted(first) == sorted(second) == list(range(10)) and first != second
    ranks = [list(train_seg.batch_pairs(args, 10, 0, 6, rank, 4)) for rank in range(4)]
    for step, keys in enumerate(whole):
        dealt = [rank[step] for rank in ranks]
        assert sorted(key for part in dealt[:len(keys)] for key in part) == keys
        assert all(part == keys[:1] for part in dealt[len(keys):])      # idle: labels are ignored
    assert list(train_seg.batch_pairs(args, 10, 4, 6, 0, 1)) == whole[4:]


def test_a_batch_without_a_labelled_pixel_counts_nothing(root, monkeypatch):
    monkeypatch.setattr(common, "LOG_EVERY", 1)
    last = epoch_order(9, 0, seed=0)[8]                             # batches of 4, 4 and 1

    def image(tree, i):
        """Return an image; in the first two batches all labels are 255, which is ignored."""
        label = torch.full((40, 40), 255 if len(tree) == 9 and i != last else 0, dtype=torch.uint8)
        return label.expand(3, -1, -1), label
    monkeypatch.setattr(SegTree, "__getitem__", image)
    train("--data camvid --num_classes 4 --size 32 --patch_size 8 --batch_size 4 --epochs 2 "
          "--num_workers 0 --max_steps 3 --out_dir a --data_dir", [root])
    for what in ("loss", "grad_norm"):
        *zeros, third = log("a", what).values()
        assert zeros == [0, 0] and third > 0


# --- backbones ------------------------------------------------------------------------------------

ADE = "--data ade20k --num_classes 4 --num_workers 0 --max_steps 1 --data_dir"


def classifier(path, **config):
    """Write a checkpoint like train_cls.py; return its model."""
    model = ViT(ViTConfig(image_size=32, patch_size=8, num_classes=7, embed_dim=64, depth=2,
                          num_heads=1, **config))
    torch.save(dict(task="classification", model=model.state_dict(), step=3,
                    model_config=asdict(model.config)), path)
    return model


def test_a_backbone_keeps_its_own_attention(root, monkeypatch):
    monkeypatch.setattr(common, "MIN_LR", 0.0)
    backbone = classifier("rpc.pt", attn="rpc", rpc_layers=(1,), pap=dict(n_iter=2, lambd=3.0))
    run = flags(ADE, [root], "--size 48 --backbone rpc.pt")
    train(run, "--out_dir a --lr 1e-9")
    checkpoint = common.load("a")
    config, weights = SegmenterConfig(**checkpoint["model_config"]), checkpoint["model"]
    assert (config.attn, config.rpc_layers) == ("rpc", (1,))
    assert (config.pap["n_iter"], config.pap["lambd"]) == (2, 3.0)
    assert (config.embed_dim, config.depth, config.patch_size) == (64, 2, 8)
    torch.testing.assert_close(weights["encoder.blocks.1.attn.qkv.weight"],
                               backbone.blocks[1].attn.qkv.weight.data)
    Path("rpc.pt").rename("moved.pt")
    train("--resume a --max_steps 2")                               # no longer needs the backbone
    run[-1] = "moved.pt"
    for flag in ("--attn symmetric", "--patch_size 16"):
        assert flag.split()[0] in bad(run, flag)


def test_a_backbone_may_have_timms_names(root):
    model = classifier("soft.pt")
    torch.save({"model": model.state_dict()}, "deit.pt")            # like DeiT's files
    train(ADE, [root], "--size 32 --backbone deit.pt --out_dir a")
    assert common.load("a")["model_config"]["attn"] == "softmax"
