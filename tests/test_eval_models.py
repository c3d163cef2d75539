"""Evaluate other models: files of timm, DeiT and the released code, and user functions."""

import argparse

import pytest
import timm
import torch
from torch import nn
from torchvision.io import write_png
from torchvision.transforms.v2.functional import InterpolationMode, center_crop, resize

import attention
import common
import corrupt_folder
from data.shapes import load_shapes
from checkpoints import load_checkpoint
from eval_robust import IMAGENET
from results import read_rows
from runs import call
from test_eval_robust import error, make_checkpoint, rows_of, run

BUILDERS = '''
import timm, torch
from torch import nn
from torchvision.transforms.v2 import Normalize


def from_timm():
    net = timm.create_model("vit_tiny_patch16_224", img_size=48, num_classes=10, depth=1)
    return nn.Sequential(Normalize([0.5] * 3, [0.5] * 3), net)


def linear(classes=10):
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, classes))


def thousand():
    torch.manual_seed(0)
    net = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
    net.head.weight.data.normal_()
    return net


class Wrapped(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.net, self.change = linear(), change

    def forward(self, x):
        return self.change(self.net, x)


few = lambda: __import__("parts").few()                   # from a file in this folder
pairs = lambda: Wrapped(lambda net, x: dict(scores=net(x), boxes=None))
probabilities = lambda: linear().append(nn.Softmax(1))
blind = lambda: Wrapped(lambda net, x: net(x.detach()).detach())
needs = lambda num_classes: linear(num_classes)
instance = nn.Flatten()
broken = lambda: Wrapped(lambda net, x: net(nothing))
'''


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return (folder, network): files of a timm ViT in several layouts, and modules of builders."""
    folder = tmp_path_factory.mktemp("foreign")
    torch.manual_seed(0)
    net = timm.create_model("vit_tiny_patch16_224", img_size=48, depth=2, num_classes=10).eval()
    weights = net.state_dict()
    torch.save(weights, folder / "timm.pt")
    torch.save(dict(model=weights, args=argparse.Namespace(lr=1)), folder / "deit.pth")
    released = {name: w[192:] if ".qkv." in name else w for name, w in weights.items()}
    args = argparse.Namespace(robust=True, num_iter=2, lambd=3.0, layer=1)      # keys are queries
    torch.save(dict(model=released, args=args), folder / "released.pth")
    torch.save({k: w for k, w in weights.items() if "head" not in k}, folder / "headless.pt")
    (folder / "my.py").write_text(BUILDERS)
    (folder / "parts.py").write_text(BUILDERS + "few = lambda: linear(5)")
    return folder, net


@pytest.mark.parametrize("name", ["timm.pt", "deit.pth"])
@pytest.mark.parametrize("normalize, mean, std", [
    ("imagenet", (.485, .456, .406), (.229, .224, .225)), ("half", (.5,) * 3, (.5,) * 3)])
def test_timm_and_deit_files_give_timm_logits(files, name, normalize, mean, std):
    folder, net = files
    m = load_checkpoint(folder / name, "cpu", normalize=normalize)
    x = torch.rand(3, 3, 48, 48)
    z = (x - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(m.model(x), net(z).detach(), atol=1e-5, rtol=0)
    assert m.about["normalize"] == normalize and m.size == 48
    assert m.about["model"] == f"{name[:4]}, softmax"


@pytest.mark.parametrize("model", [
    "--ckpt timm.pt", "--ckpt released.pth", "--model my.py:from_timm --image_size 48"])
def test_foreign_models_are_measured(files, monkeypatch, tmp_path, model):
    monkeypatch.chdir(files[0])
    measures = "clean", "corruptions type=fog", "pgd steps=2", "adaptive_pgd steps=2"
    rows = rows_of(tmp_path, *model.split(), "--data", "shapes", "--measures", *measures,
                   "--eps", "1/255", "--limit", 4)
    names = [row["name"] for row in rows]
    assert names == ["clean", "corruptions", "pgd", "adaptive_pgd"]
    assert rows[0]["checkpoint"] == model.split()[1]
    assert rows[0].get("normalize") == ("imagenet" if "--ckpt" in model else None)
    assert rows[3].get("plain") == (None if "released" in model else True)     # no RPC-Attention


@pytest.mark.parametrize("flags, words", [
    ("--model my.py:needs", "needs needs the arguments num_classes, expected a function without"),
    ("--model my.py:instance", "instance is a Flatten, expected a function without arguments"),
    ("--model my.py:few", "few has 5 classes, but --data shapes has 10 (arrow, circle, "),
    ("--model my.py:blind", "--model my.py:blind: the model's logits have no gradient"),
    ("--ckpt headless.pt", "--ckpt headless.pt: the file has no head.weight"),
    ("--model my.py:probabilities", "--model my.py:probabilities: the model returns probabilities"),
    ("--model my.py:pairs", "--model my.py:pairs returns a dict with the keys scores, boxes"),
    ("--model my.py:from_timm", "set another --image_size"),
    ("--model my.py:linear --preset paper", "--preset paper attacks normalised images"),
    ("", "required: --ckpt or --model"),
])
def test_unusable_models_are_one_line(files, monkeypatch, tmp_path, flags, words):
    monkeypatch.chdir(files[0])
    how = "--data", "shapes", "--measures", "fgsm", "--limit", 80, "--out_dir", tmp_path / "bad"
    assert words in error(*flags.split(), *how)


def test_bug_in_model_is_a_traceback(files, monkeypatch, tmp_path):
    monkeypatch.chdir(files[0])
    with pytest.raises(NameError, match="nothing"):
        run("--model", "my.py:broken", "--data", "shapes", "--measures", "fgsm", "--limit", 4,
            "--out_dir", tmp_path / "bad")


USER_FILE = """
from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import nn

import sibling
from .sibling import CLASSES


@dataclass
class Config:
    classes: int = CLASSES


class Net(nn.Module):
    def __init__(self, change):
        super().__init__()
        torch.manual_seed(1)
        self.fc, self.change = nn.Linear(3072, Config().classes), change
        self.mean, self.std = torch.tensor(0.5), torch.tensor(0.25)

    def forward(self, x):
        return self.change(self.fc(sibling.flat((x - self.mean.to(x)) / self.std.to(x))))


plain = lambda: Net(lambda z: z)
as_dict = lambda: Net(lambda z: dict(loss=None, logits=z))
as_object = lambda: Net(lambda z: SimpleNamespace(logits=z))
as_tuple = lambda: Net(lambda z: (z, None))
half = lambda: Net(lambda z: z).bfloat16()
"""


def test_ordinary_user_files_are_evaluated(tmp_path, monkeypatch):
    """A file may have dataclasses, sibling imports, outputs as in transformers, and bfloat16."""
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "net.py").write_text(USER_FILE)
    (tmp_path / "my" / "sibling.py").write_text("CLASSES = 10\nflat = lambda x: x.flatten(1)\n")
    monkeypatch.chdir(tmp_path)
    names = ["plain", "as_dict", "as_object", "as_tuple", "half"]
    rows = rows_of(tmp_path / "r", "--model", *(f"my/net.py:{name}" for name in names), "--data",
                   "shapes", "--measures", "clean", "pgd steps=2", "cw steps=3 search_steps=1",
                   "autoattack steps=3 num_targets=2 queries=5", "--limit", 8, "--eps", "1/255")
    assert len(rows) == 20
    for i in range(0, 20, 5):
        assert len({row["right"] for row in rows[i:i + 4]}) == 1
    assert rows[4]["loss"] == pytest.approx(rows[0]["loss"], rel=0.05)
    paper, = rows_of(tmp_path / "paper", "--model", "my/net.py:half", "--data", "shapes",
                     "--preset", "paper", "--measures", "fgsm", "--limit", 4, "--eps", "1/255")
    assert paper["max_linf"] == pytest.approx(0.25 / 255, rel=0.05)


@pytest.fixture(scope="module")
def field(tmp_path_factory):
    """Return (folder, networks): a file with the weights of two networks, and 24 photos.

    The file stores the first network as `model` and the second one as `model_ema`, its average.
    """
    folder, nets = tmp_path_factory.mktemp("field"), []
    for seed in (0, 1):
        torch.manual_seed(seed)
        nets.append(timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=1,
                                      embed_dim=64, num_heads=2, num_classes=12).eval())
        nets[-1].head.weight.data.normal_()
    torch.save(dict(model=nets[0].state_dict(), model_ema=nets[1].state_dict()), folder / "net.pth")
    images = load_shapes("test", 24).images
    for i, image in enumerate(images):
        (folder / "photos" / str(i % 12)).mkdir(parents=True, exist_ok=True)
        write_png(image, str(folder / "photos" / str(i % 12) / f"{i}.png"))
    return folder, nets


def test_foreign_flags_change_the_model_and_row(field, tmp_path):
    folder, (_, average) = field
    how = ("--data", "folder", "--data_dir", folder / "photos", "--measures", "clean")
    assumed, = rows_of(tmp_path / "a", "--ckpt", folder / "net.pth", *how)
    row, = rows_of(tmp_path / "b", "--ckpt", folder / "net.pth", *how, "--weights", "ema",
                   "--num_heads", 2, "--norm_eps", "1e-5")
    assert any("num_heads 1 is assumed" in note for note in assumed["assumed"])
    assert not any("num_heads" in note for note in row["assumed"])
    assert (row["num_heads"], row["eps"]) == (2, 1e-5) != (assumed["num_heads"], assumed["eps"])
    # The 12 folders are sorted as text: 0, 1, 10, 11, 2, ...; a network may use the numbers.
    assert any("logit 2 = folder 10, logit 3 = folder 11, logit 4 = folder 2" in note
               for note in row["assumed"])
    m = load_checkpoint(folder / "net.pth", "cpu", weights="ema", num_heads=2)
    x = torch.rand(2, 3, 32, 32)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((.485, .456, .406), (.229, .224, .225)))
    torch.testing.assert_close(m.model(x), average((x - mean) / std).detach(), atol=1e-4, rtol=0)
    larger, = rows_of(tmp_path / "c", "--ckpt", folder / "net.pth", *how, "--image_size", 64)
    assert larger["model_config"]["image_size"] == 64


def test_edited_model_file_is_measured_again(tmp_path, monkeypatch):
    """The edit changes a factor but no weights, as a new normalisation would."""
    monkeypatch.chdir(tmp_path)
    for scale, rows in ((1, 1), (1, 1), (0, 2)):
        (tmp_path / "net.py").write_text(BUILDERS + f"""

def build():
    torch.manual_seed(1)
    return Wrapped(lambda net, x: net({scale} * x))
""")
        found = rows_of(tmp_path / "r", "--model", "net.py", "--data", "shapes", "--measures",
                        "clean", "--limit", 20)
        assert len(found) == rows
    assert found[0]["weights"] == found[1]["weights"] and found[0]["loss"] != found[1]["loss"]


# --- our checkpoints -----------------------------------------------------------------------------

def test_averaged_weights_are_evaluated(tmp_path):
    average = make_checkpoint(tmp_path / "m.pt", seed=1).state_dict()
    make_checkpoint(tmp_path / "m.pt", more=dict(ema=average))
    make_checkpoint(tmp_path / "other.pt", seed=1)
    how = "--measures", "clean", "--limit", 20
    rows_of(tmp_path / "r", "--ckpt", tmp_path / "m.pt", *how)
    first, second = rows_of(tmp_path / "r", "--ckpt", tmp_path / "m.pt", *how, "--weights", "ema")
    other, = rows_of(tmp_path / "r2", "--ckpt", tmp_path / "other.pt", *how)
    assert (second["weights"], second["loss"]) == (other["weights"], other["loss"])
    assert second["model"] == f"{first['model']}, ema" and first["weights"] != other["weights"]


def test_extra_head_and_field_are_named(tmp_path):
    make_checkpoint(tmp_path / "m.pt", flags=dict(num_images=1000))
    one = common.load(tmp_path / "m.pt")
    head = {"head2.weight": torch.zeros(4, 64)}
    common.save(tmp_path / "more.pt", one | dict(model=one["model"] | head,
                                                 model_config=one["model_config"] | dict(turns=4)))
    how = "--measures", "corruptions type=contrast", "--limit", 40, "--out_dir"
    printed = [run("--ckpt", tmp_path / f"{name}.pt", *how, tmp_path / name)
               for name in ("m", "more")]
    assert "head2.weight" in printed[1] and "turns" in printed[1] and "head2" not in printed[0]
    first, second = (list(read_rows(tmp_path / name).values())[0]
                     for name in ("m", "more"))
    assert first["right"] == second["right"]


class LearnedRPC(nn.Module):
    """A new attention that runs PAP, as in docs/change.md."""

    def __init__(self, layer):
        super().__init__()
        self.log_lambd = nn.Parameter(torch.tensor(0.0))

    def forward(self, q, k, v, layer):
        return attention.rpc_attention(k, v, **layer.pap | dict(lambd=self.log_lambd.exp()))


def test_own_pap_attention_is_attacked_adaptively(tmp_path, monkeypatch):
    monkeypatch.setitem(attention.ATTENTIONS, "learned", (False, LearnedRPC))
    make_checkpoint(tmp_path / "own.pt", attn="learned")
    make_checkpoint(tmp_path / "plain.pt", attn="symmetric")
    rows = rows_of(tmp_path / "r", "--ckpt", tmp_path / "own.pt", tmp_path / "plain.pt", "--limit",
                   30, "--measures", "pgd steps=5", "adaptive_pgd steps=5", "--eps", "0.5/255")
    pgd, symmetric_pgd, adaptive, symmetric = rows
    assert "plain" not in adaptive and symmetric["plain"]
    assert symmetric["right"] == symmetric_pgd["right"] and adaptive["top1"] <= pgd["top1"]
    assert adaptive["mean_l2"] != pgd["mean_l2"]          # other images may be left


# --- some of ImageNet's classes ------------------------------------------------------------------

def test_some_imagenet_folders_use_all_logits(files, tmp_path, monkeypatch):
    """A prediction is right if it is the index of the folder's name among the 1,000 classes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(files[0])
    import my
    net, images = my.thousand().eval(), load_shapes("test", 12, 40).images
    torch.save(net.state_dict(), "timm.pt")
    bicubic = dict(interpolation=InterpolationMode.BICUBIC, antialias=True)
    crops = [center_crop(resize(image, [36], **bicubic), [32]) for image in images]
    x = torch.stack(crops).float() / 255
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((.485, .456, .406), (.229, .224, .225)))
    own, normalised = net(x).argmax(1), net((x - mean) / std).argmax(1)
    labels = torch.where(torch.arange(12) % 3 == 0, own, torch.arange(12) * 80)  # some are right
    labels = torch.where(torch.arange(12) % 4 == 1, normalised, labels)
    for i, k in enumerate(labels.tolist()):
        (tmp_path / "val" / IMAGENET[k]).mkdir(parents=True, exist_ok=True)
        write_png(images[i], f"val/{IMAGENET[k]}/{i}.png")
    for model, predicted in ((f"--model {files[0]}/my.py:thousand --image_size 32", own),
                             ("--ckpt timm.pt", normalised)):
        row, = rows_of(tmp_path / model[2:5], *model.split(), "--data_dir", ".", "--measures",
                       "clean", "--num_workers", 0)
        right = (predicted == labels).double().mean().item()
        assert 0 < right < 1 and row["images"] == 12 and row["imagenet1k"]
        assert row["top1"] == pytest.approx(100 * right, abs=1e-3)


# --- corrupted folders ---------------------------------------------------------------------------

@pytest.mark.parametrize("task, side, crop_pct", [("imagenet", 64, .875), ("folder", 32, 1)])
def test_corrupted_folder_equals_corruption_on_the_fly(tmp_path, task, side, crop_pct):
    for i, image in enumerate(load_shapes("test", 20, side).images):
        (tmp_path / "val" / f"n{i % 10}").mkdir(parents=True, exist_ok=True)
        write_png(image, str(tmp_path / "val" / f"n{i % 10}" / f"{i}.png"))
    make_checkpoint(tmp_path / "m.pt", [f"n{i}" for i in range(10)], task=task)
    copy = [tmp_path / "val", tmp_path / "c", "--types", "fog", "gaussian_noise", "--severities", 5,
            2, "--size", 32, "--crop_pct", crop_pct, "--seed", 3]
    call(corrupt_folder.main, copy)
    with pytest.raises(common.InputError, match="c exists"):            # no file is overwritten
        call(corrupt_folder.main, copy)
    how = ("--ckpt", tmp_path / "m.pt", "--data_dir", tmp_path, "--num_workers", 0, "--seed", 3)
    made = rows_of(tmp_path / "made", *how, "--severities", 2, 5, "--measures",
                   "corruptions type=gaussian_noise,fog jpeg85=yes")
    # Only the types and severities in the folder are read.
    read = rows_of(tmp_path / "read", *how, "--measures", "corruptions", "--corrupted_dir",
                   tmp_path / "c")
    assert [row["settings"] for row in read] == [
        dict(type=name, jpeg85=False, severities=[2, 5], released=True)
        for name in ("gaussian_noise", "fog")]
    assert [row["right"] for row in made] == [row["right"] for row in read]
    assert len({str(row["right"]) for row in made}) == 2
