"""The attacks of studies/reproduce have the numbers of recorded runs of the paper's code."""

from functools import partial

import pytest
import torch

import eval_robust
from golden_net import trained_network
from robust.attacks import fgsm, pgd
from runs import call
from studies.reproduce import attacks
from studies.reproduce.attacks import PAPER_ATTACKS


@pytest.fixture(scope="module")
def net():
    return trained_network()


def right(model, adv, labels):
    """Return which images the model classifies correctly, (B,) bool."""
    with torch.no_grad():
        return model(adv).argmax(1) == labels


def attacked(name, model, z, eps, **settings):
    run, usual = PAPER_ATTACKS[name]
    how = usual | dict(eps=eps, seed=0, index=torch.arange(len(z))) | settings
    return run(model, z, **how)


def test_accuracies_equal_recorded_runs(golden, net):
    """The released code used cleverhans on normalised images. SPSA was recorded on pixels."""
    g, (net, images, labels) = golden("robustness_attacks_a"), net
    model, z = net.normalized, (images - net.mean) / net.std
    attack = partial(attacked, model=model, z=z)
    for i, eps in enumerate(g["eps"].tolist()):
        adv = attack("fgsm", eps=eps)
        assert (right(model, adv, labels) == g[f"official_fgsm/{i}/robust"]).sum() >= 199
    accuracy = right(model, attack("pgd", eps=eps), labels).float().mean()      # the largest eps
    assert abs(accuracy - g[f"official_pgd/{i}/acc"].mean()) <= 0.015
    adv = attack("sld", eps=10.0)
    assert (right(model, adv, labels) == g["official_sld/robust"]).sum() >= 196
    draws = torch.cat([attack("noise", eps=0.3, seed=seed) for seed in range(5)])
    accuracy = right(model, draws, labels.repeat(5)).float().mean()
    assert abs(accuracy - g["official_noise/acc"].mean()) <= 0.015
    adv = attacked("cw", model, z[:10], None, confidence=0.03, steps=100, search_steps=3)
    assert (right(model, adv, labels[:10]) == g["official_cw/robust"][:10]).sum() >= 9
    adv = attacked("spsa", net, images[:4], eps, pairs=32)
    assert abs(right(net, adv, labels[:4]).sum() - g["spsa_cleverhans/2/robust"][:4].sum()) <= 1


@pytest.mark.parametrize("name, plain", [("fgsm", fgsm), ("pgd", partial(pgd, steps=5))])
def test_attacks_without_bounds_leave_the_range(net, name, plain):
    """Inside the range they equal the attacks of robust/, up to rounding."""
    model, images, labels = net
    settings = dict(steps=5) if name == "pgd" else {}
    inside = 0.25 + images[:20] / 2
    adv = attacked(name, model, inside, 0.02, **settings)
    expected = plain(model, inside, model(inside).argmax(1), 0.02)
    near = ((adv - expected).abs() < 1e-5).float().mean()
    assert near > 0.99                              # a sign of a gradient near 0 may differ
    adv = attacked(name, model, images[:20], 0.1, **settings)
    assert adv.min() < -0.05 or adv.max() > 1.05


def test_the_evaluator_attacks_normalised_images(tmp_path, monkeypatch, capsys):
    """A budget of 6/255 changes a pixel by 6/255 times std, about 0.226."""
    for name in ("ATTACKS", "FLAGS"):
        monkeypatch.setattr(eval_robust, name, dict(getattr(eval_robust, name)))
    monkeypatch.setattr(eval_robust, "attack", eval_robust.attack)
    moved = []
    scores = eval_robust.run_measure

    def run_measure(measure, network, index, args):
        (data, (change,)), = measure.sources
        images = data.images[index] / 255
        found = change(network.net, images, data.labels[index], index)
        moved.append((found - images).abs().amax().item())
        return scores(measure, network, index, args)

    monkeypatch.setattr(eval_robust, "run_measure", run_measure)
    call(attacks.main, "--ckpt weights/shapes_rpc.pt --measures fgsm --limit 2 --device cpu "
         "--eps 6/255 --out_dir", [tmp_path / "new"])
    assert moved == pytest.approx([6 / 255 * 0.229], abs=1e-4)
    assert "fgsm conditions=paper eps=6/255" in capsys.readouterr().out
