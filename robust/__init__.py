"""Which images stay right under attack? The table of attacks, and `evaluate`.

    from functools import partial
    from robust import evaluate
    from robust.attacks import pgd

    right = evaluate(model, images, labels, {"pgd": partial(pgd, eps=2 / 255)})
    right["worst"].float().mean()                # robust accuracy; right["pgd"] is (n,) bool

eval_robust.py does the same for whole data sets and keeps what it finds; see docs/robustness.md.
"""

import importlib
import inspect

import torch

from robust.attacks import check_mode

# What `--measures NAME` runs: a function, or where it is, which is imported when it is used. Its
# keywords are its settings: `pgd eps=2/255 steps=40`. robust/attacks.py says what it takes.
ATTACKS = {
    "noise": "robust.attacks:noise",
    "fgsm": "robust.attacks:fgsm",
    "pgd": "robust.attacks:pgd",
    "adaptive_pgd": "robust.adaptive:adaptive_pgd",
    "transfer": "robust.attacks:pgd",                      # made on another model, --source
    "sld": "robust.more_attacks:sld",
    "spsa": "robust.more_attacks:spsa",
    "cw": "robust.more_attacks:cw",
    "apgd": "robust.autoattack:apgd",
    "adaptive_apgd": "robust.adaptive:adaptive_apgd",
    "square": "robust.autoattack:square",
    "autoattack": "robust.autoattack:autoattack",
    "adaptive_autoattack": "robust.adaptive:adaptive_autoattack",
}


def find(entry):
    """The function that an entry of a table is, or that it names as "module:function"."""
    if isinstance(entry, str):
        module, _, function = entry.partition(":")
        entry = getattr(importlib.import_module(module), function)
    return entry


def parameters(attack):
    """{name: inspect.Parameter} of what an attack takes besides model, images and labels."""
    return dict(list(inspect.signature(attack).parameters.items())[3:])


def run_attack(attack, model, images, labels, on, **offered):
    """Images (B, 3, H, W) with those attacked where on (B,) is True; the others stay as they are.

    offered: seed, index (B,), clip, ...; the attack gets what its signature names, and what a
    partial has set already it keeps.
    """
    takes = parameters(attack).keys() - getattr(attack, "keywords", {}).keys()
    how = {name: value for name, value in offered.items() if name in takes}
    rows, adv = on.nonzero()[:, 0], images.clone()
    if "index" in how:
        how["index"] = how["index"][rows]
    if len(rows):
        adv[rows] = attack(model, images[rows], labels[rows], **how).detach()
    return adv


def evaluate(model, images, labels, attacks, *, batch_size=256, seed=0):
    """Which images stay right: {"clean": (n,) bool, "worst": (n,) bool, and (n,) of each attack}.

    model: an nn.Module in eval mode, or any function, from pixels (B, 3, H, W) in [0, 1] to logits.
    attacks: {name: function of (model, images, labels)}: partial(pgd, eps=2 / 255), or another
    library's, lambda model, x, y: torchattacks.PGD(model, 2 / 255)(x, y). Images that are wrong
    without an attack are not attacked. worst: right under every attack. Random numbers depend on
    (seed, number of the image) alone. ValueError: the model is in train mode, or an attack has the
    name of what this returns.
    """
    check_mode(model)
    if {"clean", "worst"} & attacks.keys():
        raise ValueError('attacks: "clean" and "worst" are names of the result, expected others')

    @torch.no_grad()
    def is_right(x, y):
        return model(x).argmax(1) == y

    right = {name: torch.zeros(len(labels), dtype=torch.bool) for name in ("clean", *attacks)}
    for first in range(0, len(labels), batch_size):
        part = slice(first, first + batch_size)
        x, y = images[part], labels[part]
        clean, index = is_right(x, y), torch.arange(first, first + len(y), device=y.device)
        right["clean"][part] = clean.cpu()
        for name, attack in attacks.items():
            adv = run_attack(attack, model, x, y, clean, seed=seed, index=index)
            right[name][part] = is_right(adv, y).cpu()
    return right | {"worst": torch.stack(list(right.values())).all(0)}
