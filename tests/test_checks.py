"""The evaluator's checks: silent for honest models, loud for one that hides its gradient."""

import functools
import re

import pytest
import torch

from robust import checks
from robust import masking
from robust import tables
from robust.attacks import fgsm, pgd
from robust.autoattack import autoattack
from data.shapes import load_shapes
from golden_net import trained_network
from vit import ViT, ViTConfig

FLAT = dict.fromkeys(("fgsm", "pgd", "adaptive_pgd"), [100.0] * 5)


def collect(function, *args, **options):
    """What a check says: [(number, passed, claim, evidence)]."""
    said = []
    function(*args, lambda *line: said.append(line), **options)
    return said


class Linear(torch.nn.Module):
    """Five classes, logits = W x: nothing more honest."""

    def __init__(self):
        super().__init__()
        self.W = torch.randn(5, 3 * 8 * 8, generator=torch.Generator().manual_seed(0))

    def forward(self, x):
        return (x - 0.5).flatten(1) @ self.W.T


class Rounded(torch.nn.Module):
    """A model behind rounding: it has no gradient, or, where `leak` is not 0, a wrong one."""

    def __init__(self, model, leak=0.0):
        super().__init__()
        self.model, self.leak = model, leak

    def forward(self, x):
        wrong = self.leak * (x - x.detach()).flip(3)
        return self.model(torch.round(x * 64) / 64 + wrong)


@pytest.fixture(scope="module")
def net():
    """(model, images, labels): a trained network and 12 images, 8 or more of them right."""
    return trained_network(12)


@pytest.fixture(scope="module")
def linear():
    model = Linear().eval()
    images = 0.3 + 0.4 * torch.rand(16, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return model, images, model(images).argmax(1)


@pytest.fixture(scope="module", autouse=True)
def rivals_once():
    """What a model's rivals leave of it is computed once for all tests, with one target of nine."""
    found, rivals = {}, masking.rivals

    def once(model, x, y, eps, twin=None):
        if (model, twin) not in found:
            found[model, twin] = rivals(model, x, y, eps, twin)
        return found[model, twin]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masking, "apgd_t", functools.partial(masking.apgd_t, num_targets=1))
        patch.setattr(masking, "rivals", once)
        yield


@functools.cache
def attacked(model, x, y):
    """What check 1 and 2 hand to check 4, from fewer attacks: (curves, trace)."""
    budgets = [0.0, 1 / 255, 2 / 255, 4 / 255, 8 / 255]
    curves = {name: [checks.accuracy(model, attack(model, x, y, eps), y) for eps in budgets]
              for name, attack in (("fgsm", fgsm), ("pgd", pgd))}
    trace = []
    autoattack(model, x, y, 2 / 255, steps=20, num_targets=2, queries=50, trace=trace)
    return dict(curves, adaptive_pgd=curves["pgd"]), trace


def test_the_masking_check_is_silent_for_honest_models(net, linear):
    for model, x, y in (net, linear):
        curves, trace = attacked(model, x, y)
        (_, passed, claim, evidence), = collect(checks.masking, model, x, y, curves, trace=trace)
        assert passed and claim == "no sign of hidden gradients", claim
        assert "warning" not in evidence and "Square" in evidence and "other gradients" in evidence


@pytest.mark.parametrize("leak", [0.0, 1e-3])
def test_the_masking_check_rings_for_a_model_that_hides_its_gradient(net, leak):
    """Without a gradient its images say so; with a wrong one attacks that need none beat APGD."""
    inner, x, y = net
    model = Rounded(inner, leak).eval()
    (_, passed, claim, evidence), = collect(checks.masking, model, x, y, FLAT, twin=inner)
    assert not passed
    assert "APGD <= Square" in claim and "APGD <= SPSA" in claim and "APGD <= transfer" in claim
    assert ("no gradient all 0" in claim) == (leak == 0)
    if leak == 0:
        assert "loss rises" in claim and "images all 0: 100.0 %" in evidence


def test_straight_through_gradients_that_beat_pgd_ring(linear):
    model, x, y = linear
    curves, trace = attacked(model, x, y)
    fewer = dict(curves, adaptive_pgd=[max(a - 50, 0) for a in curves["pgd"]])
    (_, passed, claim, _), = collect(checks.masking, model, x, y, fewer, trace=trace)
    assert not passed and claim.endswith("but not PGD <= straight-through PGD")


def test_square_after_the_gradients_is_a_warning_and_more_than_noise_rings(linear):
    model, x, y = linear
    curves, _ = attacked(model, x, y)
    for lost, alarm in ((0, False), (1, False), (4, True)):
        before, after = torch.ones(16, dtype=torch.bool), torch.arange(16) >= lost
        trace = [dict(stage="fab-t", robust=before), dict(stage="square", robust=after)]
        (_, passed, claim, evidence), = collect(checks.masking, model, x, y, curves, trace=trace)
        assert ("Square takes" in evidence) == (lost > 0)
        assert passed != alarm and ("AutoAttack <= its Square" in claim) == alarm


@pytest.fixture(scope="module")
def vit():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ViT(ViTConfig(32, 16, 10, 16, 1, 2, attn="rpc")).eval().requires_grad_(False)


def test_ten_images_are_enough(vit):
    pixels, labels = load_shapes("test", 10)[:2]
    x, index = pixels.float() / 255, torch.arange(10)
    (_, same, *_), = collect(checks.determinism, vit, x, labels, pixels, index)
    (_, agree, *_), = collect(checks.spaces, vit, x, labels)
    assert same and agree


def test_the_run_says_how_long_it_takes_and_counts_its_passes(vit, monkeypatch, capsys):
    """With the long checks cut short."""
    def short(*args):
        return None

    for name in ("growing_budgets", "stronger_attacks", "lawful", "masking", "determinism",
                 "corruption_identity"):
        monkeypatch.setattr(checks, name, short)
    pixels, labels = load_shapes("test", 8)[:2]
    results = checks.run(vit, pixels, labels, torch.arange(8), "a ViT")
    out, err = capsys.readouterr()
    assert [number for number, *_ in results] == [7, 8, 9, 10]
    assert all(passed for _, passed, *_ in results)
    lines = [line for line in out.splitlines() if line]
    assert re.fullmatch(r"checks on a ViT, 8 images: at most about \d+ min", lines[0])
    assert lines[1].startswith("PASS  7 ") and lines[1].endswith(" s]")
    assert "passes, at most" in err and "/96000" in err and not vit._forward_pre_hooks


def test_a_finished_row_warns_where_square_took_more_than_two_tenths(tmp_path, capsys):
    about = dict(model="a model", kind="softmax", checkpoint="m.pt", weights="0", model_config={},
                 recipe="", data="shapes", measure="autoattack", images=1000, seconds=1.0,
                 conditions=dict(space="pixel", labels="true", clip=True, seed=0, amp=False))
    results = tables.Results(tmp_path, "shapes", [about], False, 0)
    for last, warned in ((30.0, False), (29.9, False), (29.7, True)):
        stages = {"clean": 80.0, "apgd-ce": 31.0, "apgd-t": 30.4, "fab-t": 30.0, "square": last}
        row = dict(about, top1=last, top5=90.0, stages=stages)
        results.add(dict(row, setting=dict(eps=last / 2550, queries=5)))
        assert ("warning: Square took 0.30 points" in capsys.readouterr().out) == warned
