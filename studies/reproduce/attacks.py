"""Evaluate classifiers under the attacks of the paper's code: eval_robust.py in its conditions.

    python -m studies.reproduce.attacks --ckpt out/a out/b --measures clean pgd --eps 6/255
    python -m studies.reproduce.attacks --ckpt weights/shapes_rpc.pt --limit 100    # all measures

The flags are the flags of eval_robust.py. The conditions of the paper's code (`rachtsy/KPCA_code`):
- An attack changes normalised images z = (x - mean) / std. std is about 0.226, so a budget of 1/255
  changes a pixel by about 0.226/255.
- z has no bounds, except in cw, square and AutoAttack, which clip z to [0, 1] first.
- The network's own prediction for z takes the place of the true class, so images that the network
  classifies wrongly are attacked, too.
- noise, sld, spsa and cw have their own budgets and settings: see PAPER_ATTACKS.

Our attacks keep images in [0, 1]. So an attack without bounds gets z as an image in [0, 1]: WIDTH
times as dark, around grey, and with a budget that is WIDTH times as small.
"""

from functools import partial
from types import SimpleNamespace

import torch

import common
import eval_robust
from common import InputError, at_least_float32
from data.rng import NOISE, SIGNS, START
from robust.adaptive import adaptive_apgd, adaptive_autoattack, adaptive_pgd
from robust.attacks import (adam, cw, fgsm, margin, noise_like, pgd, restarted, select_rows, sld,
                            spsa_gradient)
from robust.autoattack import apgd, autoattack, square

WIDTH = 8                       # z and z + eps are inside (-4, 4); a power of two rounds least


# --- attacks on normalised images z: functions of (model, z, eps, *, seed, index, ...) ------------

def without_bounds(attack):
    """Turn an attack of robust/ into one on z that may have any value."""
    def on_any_z(model, z, eps, **settings):
        def of_image(u):
            return model(WIDTH * (u - 0.5))

        labels = model(z).argmax(1)
        adv = attack(of_image, z / WIDTH + 0.5, labels, eps / WIDTH, **settings)
        return WIDTH * (adv - 0.5)
    return on_any_z


def clipped(attack):
    """Turn an attack of robust/ into one that clips z to [0, 1] first."""
    def on_clipped_z(model, z, eps, **settings):
        z = z.clamp(0, 1)
        return attack(model, z, model(z).argmax(1), eps, **settings)
    return on_clipped_z


def cw_on_clipped(model, z, eps, **settings):
    """Run cw on the clipped z; the attacked class is the prediction for z itself."""
    return cw(model, z.clamp(0, 1), model(z).argmax(1), **settings)


def plain_noise(model, z, eps, *, seed, index):
    """Add uniform noise: z + U(-eps, eps)."""
    return z + eps * noise_like(z, index, seed, NOISE, 0)


def scale_l1(x, radius):
    """Scale x (B, n) down until ||x||_1 <= radius, as cleverhans does."""
    length = x.abs().sum(1, keepdim=True)
    return x * (radius / length.clamp(min=1e-12)).clamp(max=1)


def spsa_at_2x(model, z, eps, *, steps, pairs, seed, index):
    """Run SPSA as cleverhans 4.0.0 does: it estimates each gradient at 2x, x: the clean image."""
    labels = model(z).argmax(1)
    x = z + eps * noise_like(z, index, seed, START)
    s = SimpleNamespace(row=torch.arange(len(z), device=z.device), clean=z, labels=labels,
                        index=index, x=x, first=torch.zeros_like(z), second=torch.zeros_like(z))
    adv = z.clone()
    fooled = torch.zeros_like(labels, dtype=torch.bool)
    for t in range(1, steps + 1):
        s = select_rows(s, ~fooled)
        if not len(s.row):
            break
        grad = spsa_gradient(model, 2 * s.clean, s.labels, s.index, pairs, seed, SIGNS, t)
        change, s.first, s.second = adam(grad, s.first, s.second, t, 0.01)
        s.x = (s.x - change).clamp(s.clean - eps, s.clean + eps)
        adv[s.row] = s.x
        fooled = margin(at_least_float32(model(s.x)), s.labels) < 0
    return adv


# The attacks and their settings, as ATTACKS of eval_robust.py.
PAPER_ATTACKS = {
    "noise": (plain_noise, dict(eps=0.3)),
    "fgsm": (without_bounds(fgsm), {}),
    "pgd": (without_bounds(pgd), dict(steps=20)),
    "pgd_restarts": (without_bounds(restarted), dict(restarts=5, steps=20)),
    "adaptive_pgd": (without_bounds(adaptive_pgd), dict(steps=20)),
    "sld": (without_bounds(partial(sld, project=scale_l1)), dict(steps=20, eps=10.0)),
    "spsa": (spsa_at_2x, dict(steps=40, pairs=128, eps=0.1)),
    "cw": (cw_on_clipped, dict(steps=1000, search_steps=5, confidence=10.0, eps=None)),
    "apgd": (without_bounds(apgd), dict(loss="ce", steps=100)),
    "adaptive_apgd": (without_bounds(adaptive_apgd), dict(loss="ce", steps=100)),
    "square": (clipped(square), dict(queries=5000)),
    "autoattack": (clipped(autoattack), dict(steps=100, queries=5000)),
    "adaptive_autoattack": (clipped(adaptive_autoattack), dict(steps=100, queries=5000)),
}


class Normalised(torch.nn.Module):
    """Let a network take normalised images z."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, z):
        return self.net(z * self.net.std + self.net.mean)


def attack(run, settings, seed):
    """Return a function that attacks images in the paper's conditions, for eval_robust.py."""
    settings = {name: value for name, value in settings.items() if name != "conditions"}

    def change(net, images, labels, numbers):
        if not hasattr(net, "std"):
            raise InputError("the paper's code attacks normalised images; expected a network with "
                             "the attributes mean and std, (3, 1, 1), as a ViT or FAN has")
        model = Normalised(net).eval()
        z = (images - net.mean) / net.std
        adv = run(model, z, seed=seed, index=numbers, **settings)
        return adv * net.std + net.mean
    return change


def main():
    for name, (run, settings) in PAPER_ATTACKS.items():
        eval_robust.ATTACKS[name] = run, settings | dict(conditions="paper")
    eval_robust.attack = attack
    _, text = eval_robust.FLAGS["eps"]
    eval_robust.FLAGS["eps"] = [f"{k}/255" for k in range(1, 7)], text
    eval_robust.main()


if __name__ == "__main__":
    common.run(main)
