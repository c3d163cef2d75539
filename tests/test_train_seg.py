"""Test train_seg.py alone; test_train.py tests the behaviour of all trainers."""

import json
import os
import re
import shutil
import sys
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
from common import InputError
from fixtures import ROOT
from data.masks import (Scenes, SegTree, TrainingViews, ade20k, finish_views,
                        load_segmentation, own_folder)
from data.rng import DROPOUT, epoch_order, seed_from
from fan import FAN, FAN_SIZES, FANConfig
from processes import group
from runs import call, flags, log, make_pairs, refused, rows
from segmenter import (SCORES, Segmenter, SegmenterConfig, confusion, predict_classes, scores,
                       segmenter_from_checkpoint)
from test_segmentation import make_masks
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
                        ("--patch_size 4", "patch_size is 8"),
                        ("--model fan_tiny", "architecture is vit")):
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


def fan_classifier(path):
    """Write a FAN's checkpoint like train_cls.py."""
    config = FANConfig(**FAN_SIZES["fan_tiny"], image_size=32, patch_size=8, num_classes=7)
    model = FAN(config)
    torch.save(dict(task="classification", architecture="fan", model=model.state_dict(),
                    step=3, model_config=asdict(config)), path)
    return model


def test_a_fan_is_a_backbone(root, capsys, monkeypatch):
    """Its size needs no flag; the run resumes, and its checkpoint alone is evaluated."""
    monkeypatch.setitem(FAN_SIZES["fan_tiny"], "depth", 2)
    backbone = fan_classifier("fan.pt")
    run = flags(ADE.replace("--model nano", ""), [root], "--size 32 --attn softmax --batch_size 3")
    assert "architecture is fan" in bad(run, "--backbone fan.pt --model tiny")
    train(run, "--backbone fan.pt --lr 0 --out_dir a")
    checkpoint = common.load("a")
    assert checkpoint["args"]["model"] == "fan_tiny"
    weights = checkpoint["model"]
    name = "blocks.1.attn.kv.weight"
    assert torch.equal(weights[f"encoder.{name}"], backbone.state_dict()[name])
    train("--resume a --max_steps 2")
    assert common.load("a")["step"] == 2
    train("--eval_only a --severities --num_workers 0 --window 24")         # 3 x 3 patches
    assert "| clean " in capsys.readouterr().out


def test_images_of_the_backbone_are_never_tested(root):
    """They are stored in the run's checkpoint, also after a resume."""
    model = classifier("a.pt", attn="symmetric")
    checkpoint = torch.load("a.pt")
    mine = Path("mine")
    for part in ("images", "annotations"):
        shutil.copytree(root / part / "validation", mine / part)
    tree, = own_folder("mine", ["all"])
    torch.save(checkpoint | dict(seen=tree.hashes[:4]), "a.pt")             # two images
    train(ADE, [root], "--size 32 --attn symmetric --backbone a.pt --out_dir b --max_steps 1")
    train("--resume b --max_steps 2")
    run = common.load("b")
    assert {*tree.hashes[:4]} == {*run["seen"]}
    Path("mine/classes.txt").write_text("\n".join(map(str, range(5))))
    args = Namespace(data="folder", data_dir="mine", num_classes=None)
    test, = load_segmentation(args, ["all"], list("01234"), run["seen"])
    assert len(tree) == 5 and len(test) == 3
    assert model.config.attn == run["args"]["attn"]


def test_images_of_the_backbone_do_not_validate(capsys):
    """Also after a resume, without the backbone's file."""
    make_masks(Path("mine"), [0, 1, 2])
    val, = own_folder("mine", ["val"])
    classifier("a.pt", attn="symmetric")
    torch.save(torch.load("a.pt") | dict(seen=val.hashes[:2]), "a.pt")          # one image
    run = "--data_dir mine --size 24 --num_workers 0 --max_steps 1"
    train(run, "--backbone a.pt --out_dir a")
    assert f", {len(val) - 1} validation images" in capsys.readouterr().out
    assert {*val.hashes} < {*common.load("a/last.pt")["seen"]}
    Path("a.pt").unlink()
    train("--resume a --max_steps 2")
    assert common.load("a/last.pt")["inherited"] == val.hashes[:2]


def test_an_evaluation_has_workers_for_its_data(root, monkeypatch):
    """Only rendered scenes, which are in memory, need none."""
    monkeypatch.setattr(common, "default_workers", lambda: 7)
    train(ADE, [root], "--size 32 --attn symmetric --backbone none --out_dir a")
    train("--num_images 40 --max_steps 1 --out_dir b")
    numbers = dict.fromkeys(SCORES, 1.0)
    workers = []
    monkeypatch.setattr(train_seg, "evaluate",
                        lambda *args, **how: workers.append(how["num_workers"]) or numbers)
    for given in ("--eval_only a", "--eval_only a --num_workers 2", "--eval_only b"):
        train(given, "--severities")
    assert workers == [7, 2, 0]


def test_flags_replace_the_restored_ones(root):
    """Another machine has other folders and another number of cores."""
    train(ADE, [root], "--size 32 --attn symmetric --backbone none --out_dir a")
    args, _ = call(train_seg.get_args, "--resume a")
    assert (args.data_dir, args.num_workers) == (str(root), 0)
    args, _ = call(train_seg.get_args, "--resume a --num_workers 3 --data_dir b")
    assert (args.data_dir, args.num_workers) == ("b", 3)


def test_an_evaluation_has_the_rules_of_the_training(root, capsys):
    colours = [0, 0, 0, 200, 40, 40, 40, 60, 210]
    make_masks(Path("one"), [0, 1, 2], palette=colours)
    make_masks(Path("other"), [0, 2, 1], palette=colours[:3] + colours[6:] + colours[3:6])
    make_masks(Path("new"), [0, 1, 2], n=3, palette=colours, images=range(50, 60))
    train("--data_dir one --max_steps 1 --size 24 --num_workers 0 --out_dir a")
    seen = len(common.load("a")["seen"])
    run = "--eval_only a --severities --num_workers 0"
    train(run)
    train(run, "--data_dir new")
    assert "other" in bad(run, "--data_dir other") and "palettes" in bad(run, "--data_dir other")
    found = [json.loads(line) for line in Path("a/results.jsonl").read_text().splitlines()]
    assert seen == 36 and [row["images"] for row in found] == [2, 3]        # of 20 images
    train(ADE, [root], "--size 32 --attn symmetric --backbone none --out_dir b")
    train("--eval_only b --severities --num_workers 0 --data_dir", [root])  # in ADE20K's layout
    assert json.loads(Path("b/results.jsonl").read_text())["data"] == "ade20k"


def test_the_data_of_an_evaluation_act(root):
    train("--num_images 40 --max_steps 1 --out_dir a")
    for given, words in (("--data camvid", "--data camvid needs --data_dir"),
                         ("--data folder", "--data folder needs --data_dir"),
                         ("--data shapes --data_dir x", "--data_dir: no effect")):
        assert words in bad("--eval_only a --severities", given)
    assert "no folder" in bad("--eval_only a --severities --data_dir x")


def test_flags_without_effect_are_errors(root):
    for given, flag in (("--eval_only a --size 48", "--size"),
                        ("--eval_only a --lambd 3", "--lambd"),
                        ("--eval_only a --amp", "--amp"), ("--eval_only a --resume b", "--resume"),
                        ("--eval_only a --severities --frost_dir b", "--frost_dir"),
                        ("--limit 3", "--limit"), ("--severities", "--severities"),
                        ("--data_dir a --data shapes", "--data_dir"),
                        ("--data_dir a --num_images 9", "--num_images"),
                        ("--num_classes 5", "--num_classes"),
                        ("--attn softmax --n_iter 2", "--n_iter"),
                        ("--attn symmetric --rpc_layers all", "--rpc_layers"),
                        ("--attn symmetric --decoder_attn rpc --rpc_layers all", "--rpc_layers"),
                        ("--attn rpca --form paper", "--form")):
        if "--resume" in given:
            train("--num_images 40 --max_steps 1 --out_dir b")
        assert f"{flag}: no effect" in bad(given), given
    for given in ("--out_dir c", "--backbone none"):
        assert f"{given.split()[0]}: no effect with --resume" in bad("--resume b", given)
    args, _ = call(train_seg.get_args, "--attn softmax --decoder_attn rpc --n_iter 2")
    assert args.n_iter == 2                                         # the decoder reads it


@pytest.mark.parametrize("attn", ["rpca", "rpc_asym"])
def test_an_attention_without_classifier_names_the_remedy(attn):
    line = bad("--num_images 40 --attn", [attn])
    assert f"shapes_{attn}.pt in weights/" in line and "--backbone RUN" in line
    train("--num_images 40 --max_steps 1 --backbone none --attn", [attn])


def test_likely_mistakes_are_one_line():
    for given, words in (("--epochs -1", "--epochs: -1: expected 1 or more"),
                         ("--eval_every 0", "--eval_every"), ("--n_iter 0", "--n_iter"),
                         ("--rpc_layers first", "--rpc_layers first: expected"),
                         ("--batch_size 0", "--batch_size"), ("--dropout 2", "from 0 to 1"),
                         ("--lr nan", "--lr"), ("--severities 6", "--severities"),
                         ("--drop_path 1", "--drop_path: 1: expected a number below 1"),
                         ("--max_steps 0", "--max_steps: 0: expected 1 or more")):
        assert words in bad("--num_images 40", given)


def test_the_learning_rate_never_exceeds_lr():
    for lr in (1e-3, 1e-6, 0.0):
        rates = [train_seg.learning_rate(k, 9, Namespace(lr=lr)) for k in range(10)]
        assert rates[0] == max(rates) == lr and rates[-1] == min(lr, common.MIN_LR)


def test_an_evaluation_has_no_tf32(monkeypatch):
    train("--num_images 40 --max_steps 1 --out_dir a")
    wanted = []
    monkeypatch.setattr(common, "use_bf16", lambda amp, device: wanted.append(amp))
    train("--eval_only a --severities")
    assert wanted == [False]


def main_on_own_data():
    """Run main() in the folder of this process, and print its error."""
    os.chdir(f"node{os.environ['RANK']}")
    try:
        train_seg.main()
    except InputError as error:
        print(error)


def test_processes_with_other_masks_stop():
    for node, values in enumerate(([0, 1, 2], [0, 2, 1])):
        make_masks(Path(f"node{node}/mine"), values)
    run = "--data_dir mine --size 24 --max_steps 2 --num_workers 0 --out_dir a"
    printed = group(main_on_own_data, flags(run))
    assert all("the processes have different data" in text for text in printed)
    assert not list(Path().glob("node*/a/log.jsonl"))


def main_with_own_rate():
    """Run main() with another --lr in each process, and print its error."""
    sys.argv += ["--lr", f"1e-{os.environ['RANK']}"]
    try:
        train_seg.main()
    except InputError as error:
        print(error)


def test_processes_with_other_flags_stop():
    make_masks(Path("mine"), [0, 1, 2])
    run = "--data_dir mine --size 24 --num_workers 0 --out_dir a --max_steps 1"
    printed = group(main_with_own_rate, flags(run))
    assert all("the processes have different flags: [{'lr': 1.0}" in text for text in printed)


def test_a_lost_best_is_replaced(capsys):
    make_masks(Path("mine"), [0, 1, 2])
    train("--data_dir mine --size 24 --num_workers 0 --batch_size 16 --eval_every 1 --out_dir a "
          "--max_steps 1")
    Path("a/best.pt").unlink()
    train("--resume a --max_steps 2")
    assert "best.pt of step 1 is missing" in capsys.readouterr().out
    assert common.load("a/best.pt")["step"] == 2
