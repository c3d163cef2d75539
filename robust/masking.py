"""Does a model only hide its gradients? Then attacks along them fail, and the model is not robust.

Check 4 of checks.py, with the signs it goes by (Athalye et al. 2018).
"""

import torch

from robust.adaptive import adaptive_apgd
from robust.attacks import check_inputs, cross_entropy, cw, input_gradient, noise, pgd, spsa
from robust.autoattack import apgd, apgd_t, square


def right(model, images, labels):
    """Whether each image is classified correctly, (B,) bool."""
    return model(images).argmax(1) == labels


def percent(flags):
    """The share of True."""
    return 100 * flags.cpu().double().mean().item()       # mps has no float64


def accuracy(model, images, labels):
    """In percent."""
    return percent(right(model, images, labels))


def slack(labels):
    """What counts as noise, in points of accuracy: one image and one point."""
    return 100 / len(labels) + 1


def listed(values, digits, between=" "):
    """Numbers in a line."""
    return between.join(f"{value:.{digits}f}" for value in values)


def named(values, digits):
    """{name: number} in a line."""
    return ", ".join(f"{name} {value:.{digits}f}" for name, value in values.items())


# --- signs ---------------------------------------------------------------------------------------

@torch.no_grad()
def zero_gradient_share(model, images, labels):
    """Share of the entries of grad CE that are exactly 0, and of the images where all are.

    Two floats in [0, 1]. Where they are large, attacks along the gradient are blind, and the
    robustness they report is not real.
    """
    check_inputs(model, images, labels)
    _, _, grad = input_gradient(cross_entropy, model, images, labels)
    zero = (grad == 0).flatten(1).float()
    return zero.mean().item(), zero.amin(1).mean().item()


@torch.no_grad()
def masking_signs(model, images, labels, trace=()):
    """Signs that a robust accuracy says little. Returns a dict; what is falsy is good.

      randomised        the outputs of five calls differ by more than 1e-4
      probabilities     the outputs look like probabilities; attacks expect logits
      few_classes       fewer than 4: AutoAttack cannot run
      zero_gradients    number of images at which the gradient of the cross-entropy is exactly zero
      square_gain       points of accuracy Square took in `trace`, from `autoattack`, after the
                        attacks with gradients, if more than 0.2
    After `fra31/auto-attack:autoattack/checks.py`.
    """
    _, blind = zero_gradient_share(model, images, labels)
    calls = torch.stack([model(images) for _ in range(5)])
    left = {entry["stage"]: 100 * entry["robust"].float().mean().item() for entry in trace}
    gain = left["fab-t"] - left["square"] if left else 0
    sums = calls.sum(2)
    return dict(randomised=bool((calls - calls[0]).abs().max() > 1e-4),
                probabilities=bool((calls >= 0).all() and ((sums - 1).abs() < 1e-5).all()),
                few_classes=calls.shape[2] < 4,
                zero_gradients=round(blind * len(images)),
                square_gain=round(gain, 2) if gain > 0.2 else 0)


# --- check 4 -------------------------------------------------------------------------------------

def rivals(model, x, y, eps, twin=None):
    """Accuracy in percent that the standard attack leaves, APGD-CE and APGD-T together, and others.

    twin: a model for the transfer attack. Returns (standard, {name: percent}).
    """
    def left(attack, **options):
        return right(model, attack(model, x, y, eps, **options), y)

    targeted = left(apgd_t)
    standard = targeted & left(apgd)
    others = {"APGD-T": targeted, "PGD": left(pgd),
              "Square": left(square, queries=1000),
              "SPSA": left(spsa, steps=20, pairs=64),
              "other gradients": left(adaptive_apgd)}
    if twin is not None:
        others["transfer"] = right(model, apgd(twin, x, y, eps), y)
    return percent(standard), {name: percent(flags) for name, flags in others.items()}


def loss_along_gradient(model, x, y):
    """The mean cross-entropy after steps of 0, 0.25, 0.5, 1 / 255 along the gradient's sign."""
    _, _, grad = input_gradient(cross_entropy, model, x, y)
    along = [model(x + t / 255 * grad.sign()) for t in (0, 0.25, 0.5, 1)]
    return [cross_entropy(logits, y).mean().item() for logits in along]


def masking(model, x, y, curves, say, twin=None, trace=()):
    """4: does the model only hide its gradients? Then something beats the attack along them.

    curves, trace: of checks 1 and 2. twin: as for `rivals`.
    """
    a, b, eps = x[:32], y[:32], 4 / 255
    standard, others = rivals(model, a, b, eps, twin)
    fgsm, noisy = curves["fgsm"][3], accuracy(model, noise(model, x, y, eps), y)
    loss = loss_along_gradient(model, x, y)
    nearest = cw(model, a, b, steps=150, lr=0.01, search_steps=4, c0=1.0)
    spared, l2 = accuracy(model, nearest, b), (nearest - a).flatten(1).norm(dim=1).median().item()
    entries, blind = zero_gradient_share(model, x, y)
    straight = curves["pgd"][2] - curves["adaptive_pgd"][2]
    signs = masking_signs(model, x, y, trace)
    gain = signs["square_gain"]

    # what has to hold of an attack that works
    parts = {"APGD-T <= Square": others["APGD-T"] <= others["Square"] + 1e-9,
             "PGD <= SPSA + 2": others["PGD"] <= others["SPSA"] + max(2, 100 / len(b)),
             "PGD <= FGSM": all(p <= f + slack(y) for p, f in zip(curves["pgd"], curves["fgsm"])),
             "CW 0": spared == 0, "FGSM <= noise": fgsm <= noisy + 1e-9,
             "loss rises": all(p < q for p, q in zip(loss, loss[1:])),
             "no gradient all 0": signs["zero_gradients"] == 0,
             "deterministic logits": not (signs["randomised"] or signs["probabilities"]),
             "PGD <= straight-through PGD": straight <= slack(y),
             "AutoAttack <= its Square": gain <= slack(y)}
    for name in list(others)[1:]:                                # the first is part of the standard
        parts[f"APGD <= {name}"] = standard <= others[name] + slack(b)
    transfer, warning = "", ""
    if twin is not None:
        left = accuracy(model, pgd(twin, x, y, eps), y)
        parts["direct <= transfer"] = curves["pgd"][3] <= left + 1e-9
        transfer = f", transfer from softmax {left:.1f}"
    if gain:
        warning = (f"; warning: Square takes {gain:.1f} points after the attacks with gradients "
                   "in AutoAttack, more than 0.2")
    wrong = [name for name, fine in parts.items() if not fine]
    but = f"; but not {', '.join(wrong)}" if wrong else ""
    say(4, not wrong, f"no sign of hidden gradients{but}",
        f"at 4/255 on {len(b)} images APGD and APGD-T {standard:.1f}, to be beaten by "
        f"{slack(b):.1f} at most: {named(others, 1)}; on {len(y)} FGSM {fgsm:.1f}, noise "
        f"{noisy:.1f}{transfer}; CW leaves {spared:.0f} at median L2 {l2:.3f}; "
        f"loss {listed(loss, 3)} at 0 0.25 0.5 1 / 255 along the gradient's sign; "
        f"entries exactly 0: {100 * entries:.3f} %, images all 0: {100 * blind:.1f} %; "
        f"straight-through gradients take {straight:.1f} points from PGD at 2/255{warning}")
