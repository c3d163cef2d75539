"""Test the answers that look.py prints, the maps that it draws, and its errors."""

import re

import pytest
import torch
from PIL import Image
from scipy.stats import mannwhitneyu

import common
import look
from attention import ATTENTIONS, Attention, SelfAttention, layer_inputs, softmax_attention
from data.shapes import SHAPES, load_shapes
from fixtures import ROOT
from robust.patches import noisy_patches
from runs import call, refused
from vit import ViT, ViTConfig

SMALL = dict(embed_dim=16, depth=2, num_heads=2, image_size=32, patch_size=4, num_classes=10,
             attn="rpc")


@pytest.fixture
def run(capsys):
    """Call main with these flags; return what it prints."""
    return lambda *words: call(look.main, words) or capsys.readouterr().out


def save(path, model):
    common.save(path, dict(task="classification", classes=list(SHAPES), args=dict(data="shapes"),
                           model=model.state_dict(), model_config=vars(model.config)))
    return path


@pytest.fixture
def classifier(tmp_path):
    torch.manual_seed(0)
    model = ViT(ViTConfig(**SMALL, pap=dict(lambd=0.01))).eval()
    return model, save(tmp_path / "vit.pt", model)


def test_printed_classes_and_S_equal_the_model(run, classifier, tmp_path):
    model, path = classifier
    result = run("--ckpt", path, "--scene", 3, "--out", tmp_path / "look.png")
    scene = load_shapes("test", 4)
    clean = scene.images[3:] / 255
    noisy, hit = noisy_patches(clean, 4)
    assert hit.sum() == 6 and list(SHAPES)[scene.labels[3]] in result.splitlines()[0]
    for words, images, n in (("without noise", clean, 1), ("answer   ", noisy, 3)):
        top = model(images)[0].softmax(0).topk(n)
        expected = ", ".join(f"{list(SHAPES)[k]} {100 * p:.1f} %"
                             for p, k in zip(*(t.tolist() for t in top)))
        assert any(line.startswith("answer") and words in line and line.endswith(expected)
                   for line in result.splitlines()), result
    attn, inputs = layer_inputs(model, noisy)[0]
    steps = attn.trace(inputs)
    rows = [line.split("|")[1:-1] for line in result.splitlines() if line.startswith("| 0")]
    assert len(rows) == 4
    for n, (row, step) in enumerate(zip(rows, steps), 1):
        S = step["S"].detach().abs().sum((1, 3))[0, 1:]
        S = S / S.mean()
        assert [cell.strip() for cell in row] == [
            "0", str(n), f"{100 * (step['S'] != 0).double().mean():.0f} %",
            f"{mannwhitneyu(S[hit[0]], S[~hit[0]]).statistic / (6 * 58):.2f}"]
    assert "0.5 is chance" in result


def test_your_own_image_gets_no_noise_unless_asked(run, classifier, tmp_path):
    flags = ("--ckpt", classifier[1], "--out", tmp_path / "look.png", "--image",
             ROOT / "lecture/pictures/scene.png")
    assert "noise" not in run(*flags) and "3 of 64 patches are noise" in run(*flags, "--noise", 3)


def test_an_empty_map_is_black():
    assert look.draw_map(torch.zeros(4), torch.tensor(0.0)).getextrema() == ((0, 0), (0, 0), (4, 4))


def test_drawn_attention_equals_the_layer():
    torch.manual_seed(0)
    x = torch.randn(1, 17, 16)
    for kind in ("softmax", "symmetric", "rpc", "rpc_asym"):
        attn = SelfAttention(16, 2, attn=kind, pap=dict(lambd=0.5))
        steps = attn.trace(x)
        q, k, _ = attn.project(x)
        one_hot = torch.eye(17)[None, None].expand(1, 2, -1, -1)  # values that show the weights
        keys = steps[-1]["K2"] if steps else k
        A = softmax_attention(q if kind in ("softmax", "rpc_asym") else keys, keys, one_hot)
        torch.testing.assert_close(look.patch_attention(attn, x, steps, True),
                                   A[0, :, 0, 1:].mean(0), msg=kind)
        in_a_fan = look.patch_attention(attn, x, steps, False)      # without a class token
        torch.testing.assert_close(in_a_fan, A[0].mean((0, 1)), msg=kind)
        v = attn.project(x)[2]
        torch.testing.assert_close(attn.proj((A @ v).transpose(1, 2).flatten(2)), attn(x),
                                   atol=1e-5, rtol=1e-5, msg=kind)


def pixels(picture):
    return torch.tensor(list(picture.tobytes()), dtype=torch.float)


def test_each_tile_shows_its_own_layer_and_step(run, classifier, tmp_path):
    model, path = classifier
    run("--ckpt", path, "--scene", 3, "--noise", 0, "--out", tmp_path / "look.png")
    layers = layer_inputs(model, load_shapes("test", 4).images[3:] / 255)
    page = Image.open(tmp_path / "look.png")
    wide, high = look.SIDE + look.MARGIN, look.SIDE + look.LINE + look.MARGIN

    def tile(row, column):
        x, y = column * wide, row * high + look.LINE
        drawn = page.crop((x, y, x + look.SIDE, y + look.SIDE))
        return pixels(drawn.resize((8, 8), Image.Resampling.NEAREST))

    for i, (attn, x) in enumerate(layers):
        steps = attn.trace(x)
        expected = look.patch_attention(attn, x, steps, True)
        expected = pixels(look.draw_map(expected, expected.max()))
        assert (tile(0, 1 + i) - expected).abs().max() <= 2
        for n, step in enumerate(steps):
            S = step["S"].abs().sum((1, 3))[0, 1:]
            assert (tile(1, n) - pixels(look.draw_map(S, 2 * S.mean()))).abs().max() <= 2
            assert S.max() > 0


def test_a_segmenter_calls_a_scene_what_it_shows(run, tmp_path):
    result = run("--ckpt", "weights/seg_shapes_rpc.pt", "--scene", 35, "--out",
                 tmp_path / "look.png")
    shares = [line.split() for line in result.splitlines() if " %  " in line]
    assert [name for *_, name in shares[:2]] == ["background", "star"]
    assert sum(float(share) for share, *_ in shares) == pytest.approx(100, abs=2)


def test_classes_have_colours_that_differ():
    colours = look.class_colours(150).float()
    distances = torch.cdist(colours, colours) + 1e3 * torch.eye(150)
    assert colours.shape == (150, 3) and distances.min() >= 5


def test_maps_of_an_own_attention_have_a_note(run, tmp_path, monkeypatch):
    """They show a softmax, which the attention may not compute."""
    def mean(q, k, v, layer):
        return v.mean(2, keepdim=True).expand_as(v)

    monkeypatch.setitem(ATTENTIONS, "mean", Attention(True, mean))
    for attn in ("mean", "symmetric", "scaled_s", "scaled_alpha"):
        common.print_once.cache_clear()
        path = save(tmp_path / "net.pt", ViT(ViTConfig(**SMALL | dict(attn=attn))))
        out = run("--ckpt", path, "--out", tmp_path / "look.png")
        assert ("the maps of --attn mean show the softmax" in out) == (attn == "mean")


@pytest.mark.parametrize("words, expected", [
    ("--image lecture", "cannot read lecture: .*Is a directory"), ("--image x.png", "x.png"),
    ("--ckpt weights/pydoc_rpc.pt", "is for language modelling; expected one for classification"),
    ("--noise 64", "--noise 64: the image has 64 patches; expected fewer"),
    ("--out picture", "--out picture: unknown file extension"),
    ("--ckpt weights/seg_shapes_rpc.pt --noise 3", "--noise 3: .* is a Segmenter; expected"),
    ("--scene -1", "expected a whole number from 0 to")])
def test_wrong_flags_are_one_line(words, expected, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert re.search(expected, refused(look, words))
