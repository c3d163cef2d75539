"""Compare AutoAttack and its members with pyautoattack and with known results."""

import math
import re
from functools import partial

import pytest
import torch

from common import InputError
from robust.attacks import fgsm
from robust.autoattack import (apgd, apgd_t, dlr, fab_t, likely_targets, random_square, square,
                               targeted_dlr)
from golden_net import trained_network
from test_attacks import CASCADE as QUICK, EPS, linear_case, right as robust

MEMBERS = {"apgd-ce": apgd, "apgd-dlr": partial(apgd, loss="dlr"), "apgd-t": apgd_t, "fab-t": fab_t,
           "square": square}


@pytest.fixture(scope="module")
def own():
    """Return (model, images, labels): a small network trained on scenes, and 60 test images."""
    return trained_network(60)


FEWER = {"apgd-ce": dict(steps=20), "apgd-dlr": dict(steps=20),
         "apgd-t": dict(steps=20, num_targets=2),
         "fab-t": dict(steps=10, num_targets=2), "square": dict(queries=200)}


def pyautoattacks(name, model):
    """Return pyautoattack's member `name` with the settings of FEWER."""
    pgd, fab, sq = (pytest.importorskip(f"pyautoattack.{module}")
                    for module in ("autopgd_base", "fab_pt", "square"))
    common = dict(norm="Linf", eps=EPS * (1 + (name == "square")), device="cpu", seed=0)
    return {"apgd-ce": lambda: pgd.APGDAttack(model, n_iter=20, loss="ce", **common),
            "apgd-dlr": lambda: pgd.APGDAttack(model, n_iter=20, loss="dlr", **common),
            "apgd-t": lambda: pgd.APGDAttack_targeted(model, n_iter=20, n_target_classes=2,
                                                      **common),
            "fab-t": lambda: fab.FABAttack_PT(model, n_iter=10, n_target_classes=2, targeted=True,
                                              **common),
            "square": lambda: sq.SquareAttack(model, p_init=0.8, n_queries=200,
                                              resc_schedule=False, **common)}[name]()


@pytest.mark.parametrize("name", MEMBERS)
def test_members_are_as_strong_as_pyautoattack(own, name):
    model, images, labels = own
    reference = robust(model, pyautoattacks(name, model).perturb(images, labels), labels)
    adv = MEMBERS[name](model, images, labels, EPS * (1 + (name == "square")), **FEWER[name])
    ours, clean = robust(model, adv, labels), robust(model, images, labels)
    assert reference.sum() < clean.sum() - 9              # pyautoattack fools more than 9
    assert abs(int(ours.sum() - reference.sum())) <= (3 if name == "square" else 1)


def watched(model, seen):
    """Return the model as a function that appends its inputs to `seen`."""
    def call(x):
        seen.append(x.detach().clone())
        return model(x)
    return call


@pytest.mark.parametrize("loss", ["ce", "dlr"])
def test_apgd_follows_the_path_of_pyautoattack(own, monkeypatch, loss):
    """No step fools these images, so all stay in the batch. The paths agree up to rounding."""
    module = pytest.importorskip("pyautoattack.autopgd_base")
    model, images, labels = own
    hard = robust(model, fgsm(model, images, labels, 2 * EPS), labels)
    x, y, ours, theirs = images[hard][:12], labels[hard][:12], [], []
    t = 2 * torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) - 1
    monkeypatch.setattr("robust.autoattack.noise_like", lambda *_: t)
    apgd(watched(model, ours), x, y, EPS / 4, steps=60, loss=loss)
    reference = module.APGDAttack(watched(model, theirs), n_iter=60, loss=loss, eps=EPS / 4,
                                  device="cpu")
    reference.init_hyperparam(x)
    monkeypatch.setattr(torch, "rand", lambda _: (t + 1) / 2)
    reference.attack_single_run(x, y)
    ours = torch.stack(ours[1:])                          # the first call evaluates x
    far = (ours - torch.stack(theirs)).abs().amax((0, 2, 3, 4))
    assert len(theirs) == 61 and (far < 1e-5).sum() >= 10


def test_squares_shrink_as_in_pyautoattack():
    module = pytest.importorskip("pyautoattack.square")
    reference = module.SquareAttack(None, p_init=0.8, eps=EPS, resc_schedule=False, device="cpu")
    for limit in (0, 10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000):
        for query in (limit, limit + 1):
            side = max(round(math.sqrt(reference.p_selection(query) * 64 * 64)), 1)
            assert random_square(torch.zeros(1, 2), query, 64, 64).sum() == side ** 2


def test_each_stage_leaves_fewer_robust_images(own, capsys):
    model, images, labels = own[0], own[1][:30], own[2][:30]
    adv = QUICK["aa"](model, images, labels, EPS)
    found = [int(n) for n in re.findall(r"(?:CE|-T|Square) (\d+)", capsys.readouterr().out)]
    left = robust(model, adv, labels)
    assert found == sorted(found, reverse=True) and len(found) == 4 and found[-1] == left.sum()
    kept = left | ~robust(model, images, labels)
    assert torch.equal(adv[kept], images[kept])           # no success or no need: the clean image
    for name in ("apgd-ce", "apgd-t", "fab-t", "square"):
        assert left.sum() <= robust(model, QUICK[name](model, images, labels, EPS), labels).sum()


def test_dlr_has_its_closed_form():
    logits = torch.tensor([[4.0, 1.0, 3.0, 0.0], [1.0, 2.0, 5.0, 3.0]])
    labels, targets = torch.tensor([0, 1]), torch.tensor([2, 3])
    expected = torch.tensor([-(4 - 3) / (4 - 1.0), -(2 - 5) / (5 - 2.0)])
    torch.testing.assert_close(dlr(logits, labels), expected)
    expected = torch.tensor([-(4 - 3) / (4 - (1 + 0) / 2), -(2 - 3) / (5 - (2 + 1) / 2)])
    torch.testing.assert_close(targeted_dlr(logits, labels, targets), expected)
    torch.testing.assert_close(dlr(7 * logits + 3, labels), dlr(logits, labels))
    assert likely_targets(logits, labels, 9).tolist() == [[2, 1, 3], [2, 3, 0]]


@pytest.mark.parametrize("classes", [2, 3])
def test_too_few_classes_are_an_error(classes, capsys):
    model, images, labels, _ = linear_case(4, classes)
    for attack in (QUICK["aa"], apgd_t):
        with pytest.raises(InputError, match=f"{classes} classes.*compares 4"):
            attack(model, images, labels, EPS)
    for attack in (apgd, QUICK["fab-t"]):
        assert robust(model, attack(model, images, labels, 0.5), labels).sum() == 0
    if classes == 2:
        with pytest.raises(InputError, match="the DLR loss compares 3"):
            apgd(model, images, labels, EPS, loss="dlr")
