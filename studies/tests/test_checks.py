"""The checks pass for honest models and fail if robust accuracy is an illusion."""

from functools import partial

import pytest
import torch

import common
from fixtures import ROOT
from golden_net import trained_network
from studies import checks
from robust.attacks import pgd
from runs import call, refused
from vit import ViT, ViTConfig


class Linear(torch.nn.Module):
    """A linear model with five classes, for which every check passes."""

    def __init__(self):
        super().__init__()
        self.W = torch.randn(5, 3 * 8 * 8, generator=torch.Generator().manual_seed(0))

    def forward(self, x):
        return (x - 0.5).flatten(1) @ self.W.T


class Rounded(torch.nn.Module):
    """Round the input of a model: the gradient is zero, or wrong if `leak` is not 0."""

    def __init__(self, model, leak=0.0):
        super().__init__()
        self.model, self.leak = model, leak

    def forward(self, x):
        wrong = self.leak * (x - x.detach()).flip(3)
        return self.model(torch.round(x * 64) / 64 + wrong)


@pytest.fixture(scope="module")
def linear():
    model = Linear().eval()
    images = 0.3 + 0.4 * torch.rand(8, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return model, images, model(images).argmax(1)


@pytest.fixture(scope="module")
def net():
    """Return (model, images, labels): a trained network and 24 images, at least 18 correct."""
    return trained_network(24)


def wrong(found):
    """Return the failed checks from ({check: passed}, evidence)."""
    return {claim for claim, holds in found[0].items() if not holds}


def test_honest_model_passes_all_five(linear, capsys):
    found = checks.run_checks(*linear, "a line", linear[0])
    assert found == {i: True for i in (1, 2, 3, 4, 5)}
    assert "transfer from softmax" in capsys.readouterr().out


@pytest.mark.parametrize("leak", [0.0, 1e-3])
def test_hidden_gradient_fails(linear, leak):
    """A zero gradient is reported. Square and transfer attacks beat zero or wrong gradients."""
    inner, x, y = linear
    model, eps = Rounded(inner, leak).eval(), 16 / 255
    assert ("no gradient all 0" in wrong(checks.gradients(model, x, y))) == (leak == 0)
    assert "loss rises" in wrong(checks.gradients(model, x, y))
    blind = {"Square": partial(checks.square, queries=300)}
    other = {"transfer": lambda model, x, y, eps: pgd(inner, x, y, eps)}
    assert wrong(checks.rivals(model, x, y, eps, blind)) == {"gradients beat Square"}
    assert wrong(checks.rivals(model, x, y, eps, other)) == {"gradients beat transfer"}
    assert not wrong(checks.rivals(inner, x, y, eps, other))


def test_random_logits_fail(linear):
    model, x, y = linear
    found = checks.gradients(lambda x: model(x) + 0.01 * torch.rand(5), x, y)
    assert "the same logits again" in wrong(found)
    assert not wrong(checks.gradients(model, x, y))


def test_pgd_that_stops_early_fails(net):
    short = checks.steps_and_restarts(*net, 6 / 255, steps=2, alpha=0.9 / 255)
    assert "10 steps fool no more images than 2 steps" in wrong(short)
    assert not wrong(checks.steps_and_restarts(*net, 6 / 255, steps=40))
    # the random start decides
    starts = checks.steps_and_restarts(*net, 60 / 255, steps=1, alpha=0.6 / 255)
    assert "5 restarts fool no more images" in wrong(starts), starts


def test_accuracy_must_fall_to_zero(linear):
    _, x, y = linear

    def stubborn(x):                                      # predicts the labels for all inputs
        logits = 10 * torch.nn.functional.one_hot(y, 5).float()[:len(x)]
        return logits + 0 * x.flatten(1).sum(1, keepdim=True)

    def sweep(model):
        left = [checks.is_right(model, pgd(model, x, y, eps), y) for eps in checks.BUDGETS]
        return wrong(checks.sweep_to_zero(model, x, y, left))

    assert sweep(stubborn) == {"eps 1 leaves nothing", "CW fools all"}
    assert not sweep(linear[0])


def test_other_gradients_come_from_own_attention(monkeypatch):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vit = ViT(ViTConfig(32, 16, 10, 16, 1, 2, attn="rpc")).eval().requires_grad_(False)
    x, asked = torch.rand(4, 3, 32, 32), {}
    for check in ("gradients", "sweep_to_zero", "steps_and_restarts"):
        monkeypatch.setattr(checks, check, lambda *_: ({}, ""))
    monkeypatch.setattr(checks, "rivals", lambda model, x, y, eps, others:
                        asked.update(others) or ({}, ""))
    checks.run_checks(vit, x, vit(x).argmax(1))
    assert set(asked) == {"noise", "SPSA", "Square", "adaptive APGD"}


def test_the_command_computes_in_float32(monkeypatch):
    """Convolutions too; all images are one batch."""
    given = []
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    monkeypatch.setattr(checks, "run_checks", lambda *words: given.append(words))
    command = ["--limit", 5, "--ckpt", ROOT / "weights/shapes_softmax.pt"]
    call(checks.main, command)
    (net, images, labels, name, softmax), = given
    assert len(images) == len(labels) == 5 and softmax is net and name.endswith("shapes_softmax.pt")
    assert not torch.backends.cudnn.allow_tf32
    monkeypatch.setattr(common, "start_processes", lambda name: (0, 2, torch.device("cpu")))
    assert "expected one process" in refused(checks, command)
