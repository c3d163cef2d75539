"""look.py prints what a network answers, draws what its layers do, and refuses what it cannot draw in one line."""

import sys

import pytest
import torch
from PIL import Image

import common
import look
from attention import PAP, SelfAttention
from data.shapes import SHAPES, load_shapes
from fan import FAN, FANConfig
from segmenter import Segmenter, SegmenterConfig
from vit import ViT, ViTConfig

SMALL = dict(embed_dim=16, depth=2, num_heads=2, image_size=32, patch_size=4, num_classes=10, attn="rpc")


def save(path, model, **more):
    checkpoint = dict(task="classification", classes=list(SHAPES), model=model.state_dict(),
                      model_config=vars(model.config)) | more
    common.save(path, checkpoint)
    return path


@pytest.fixture
def classifier(tmp_path):
    torch.manual_seed(0)
    model = ViT(ViTConfig(**SMALL, pap=dict(lambd=0.01))).eval()
    return model, save(tmp_path / "vit.pt", model)


@pytest.fixture
def run(monkeypatch, capsys):
    """Calls the script's main with these flags: what it prints, or the line with which it stops."""
    def call(*flags):
        monkeypatch.setattr(sys, "argv", ["look.py", *map(str, flags)])
        try:
            common.run(look.main)
        except SystemExit as stop:
            return f"{capsys.readouterr().err}{stop}"
        return capsys.readouterr().out
    return call


def test_the_five_likeliest_classes_are_those_of_the_logits(run, classifier, tmp_path):
    model, path = classifier
    result = run("--ckpt", path, "--scene", 3, "--out", tmp_path / "look.png")
    chances = model(load_shapes("test", 4).images[3:] / 255)[0].softmax(0)
    expected = [(f"{100 * c:.1f}", list(SHAPES)[k]) for c, k in zip(*(t.tolist() for t in chances.topk(5)))]
    lines = result.splitlines()
    assert [(line.split()[0], line.split()[2]) for line in lines[:5]] == expected
    assert "PAP steps 1 to 4" in lines[5]
    page = Image.open(tmp_path / "look.png")
    wide, high = look.SIDE + look.MARGIN, look.SIDE + look.LINE + look.MARGIN
    assert page.size == (4 * wide, 2 * high)                    # image and two layers; below, four steps of layer 1


def test_attention_is_what_the_layer_gives_the_class_token():
    """The drawn row times the values is the layer's output, of every kind that is drawn."""
    torch.manual_seed(0)
    x = torch.randn(1, 17, 16)
    for kind in ("softmax", "symmetric", "rpc", "rpc_asym"):
        attn = SelfAttention(16, 1, attn=kind, pap=dict(lambd=0.5))
        steps = attn.trace(x) if kind in PAP else []
        row = look.class_attention(attn, x, steps)
        v = attn.project(x)[2][0, 0]
        h = row @ v[1:] + (1 - row.sum()) * v[0]
        torch.testing.assert_close(attn.proj(h), attn(x)[0, 0], atol=1e-5, rtol=1e-5, msg=kind)


def test_a_map_is_black_at_zero_and_white_at_the_largest():
    drawn = look.grey_map(torch.tensor([0.0, 1.0, 2.0, 4.0]), 4.0)
    assert list(drawn.tobytes()) == [0, 63, 127, 255] and drawn.size == (2, 2)


def test_an_overlay_has_a_legend_of_the_classes_seen(run, tmp_path):
    torch.manual_seed(0)
    config = SegmenterConfig(embed_dim=16, depth=1, num_heads=1, num_classes=11, image_size=32, patch_size=4)
    path = save(tmp_path / "seg.pt", Segmenter(config), task="segmentation", classes=["background", *SHAPES])
    photo = tmp_path / "photo.png"
    Image.effect_noise((48, 40), 60).convert("RGB").save(photo)
    result = run("--ckpt", path, "--image", photo, "--out", tmp_path / "look.png")
    listed = [line for line in result.splitlines() if " %  " in line]
    assert listed and sum(float(line.split()[0]) for line in listed) == pytest.approx(100, abs=2)
    zoom = 384 // 48
    height = 40 * zoom + look.MARGIN + look.LINE * len(listed)
    assert Image.open(tmp_path / "look.png").size == (2 * 48 * zoom + look.MARGIN, height)


def test_bad_input_is_refused_in_one_line(run, classifier, tmp_path):
    _, path = classifier
    text = tmp_path / "text.jpg"
    text.write_text("no picture")
    fan = FAN(FANConfig(embed_dim=16, depth=1, num_heads=1, image_size=32, patch_size=4, num_classes=10))
    save(tmp_path / "fan.pt", fan)
    save(tmp_path / "words.pt", fan, task="language modelling", classes=None)
    for flags, word in ((("--image", text), "text.jpg"), (("--image", tmp_path), "is not a file"),
                        (("--ckpt", tmp_path / "none.pt"), "none.pt"), (("--ckpt", text), "text.jpg"),
                        (("--ckpt", tmp_path / "fan.pt"), "is a FAN"),
                        (("--ckpt", tmp_path / "words.pt"), "names no classes"),
                        (("--out", tmp_path / "no" / "look.png"), "look.png"), (("--scene", -1), "--scene")):
        result = run(*(("--ckpt", path) if "--ckpt" not in flags else ()), *flags)
        assert word in result and result.count("error: ") == 1, (flags, result)
