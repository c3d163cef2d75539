"""Ten sanity checks of the robustness evaluation itself, on a given model: `python eval_robust.py --ckpt ... --checks`.

An attack that fails proves nothing; these checks look for the usual ways in which a robustness number goes wrong. Each
prints PASS or FAIL and the numbers behind it. Most hold for any model; 2 and 4 are about the model as well: a FAIL
there says that its gradients mislead the attacks (Athalye et al. 2018; `fra31/auto-attack:autoattack/checks.py`).
"""

import math
import pydoc_data.topics
import time
from collections import Counter

import torch
from tqdm import tqdm

from robust import attacks
from robust import autoattack
from robust import corruptions
from robust import metrics
from robust.words import word_swap
from vit import ViT

GROWING = ("gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "motion_blur", "zoom_blur", "brightness",
           "contrast", "pixelate", "jpeg_compression")      # damage grows with severity; not so glass, elastic, frost


def accuracy(model, images, labels):
    """In percent."""
    return percent(right(model, images, labels))


def right(model, images, labels):
    """Whether each image is classified correctly, (B,) bool."""
    return model(images).argmax(1) == labels


def percent(flags):
    """The share of True."""
    return 100 * flags.double().mean().item()


def slack(labels):
    """What counts as noise, in points of accuracy: one image and one point."""
    return 100 / len(labels) + 1


class Constant(torch.nn.Module):
    """Says class 0, whatever it sees."""

    def __init__(self, classes):
        super().__init__()
        self.classes = classes

    def forward(self, x):
        logits = 5 * torch.eye(1, self.classes, device=x.device).expand(len(x), -1)
        return logits + 0 * x.flatten(1).sum(1, keepdim=True)                        # depends on x, but not really


class Leak(Constant):
    """Reads the label from the image's mean brightness in its upper left quarter, where `plant` wrote it."""

    def forward(self, x):
        level = x[:, :, :x.shape[2] // 2, :x.shape[3] // 2].mean((1, 2, 3))[:, None]
        return -(level - torch.linspace(0.2, 0.8, self.classes, device=x.device)).abs()

    def plant(self, images, labels):
        images = images.clone()
        value = torch.linspace(0.2, 0.8, self.classes, device=images.device)[labels]
        images[:, :, :images.shape[2] // 2, :images.shape[3] // 2] = value[:, None, None, None]
        return images


def budgets_and_order(model, x, y, say):
    """1, 2, 3: eps = 0, growing eps, huge eps; who beats whom; budgets, ranges and side effects."""
    clean = accuracy(model, x, y)
    before = x.clone(), [p.detach().clone() for p in model.parameters()]
    eps_list = [1 / 255, 2 / 255, 4 / 255, 8 / 255]
    small = {"fgsm": attacks.fgsm, "pgd": attacks.pgd, "adaptive_pgd": attacks.adaptive_pgd, "apgd": autoattack.apgd,
             "spsa": lambda *a: attacks.spsa(*a, steps=5, pairs=16),
             "square": lambda *a: autoattack.square(*a, queries=200)}
    curves, worst, outside, lawful = {}, 0.0, 0.0, True
    for name, attack in small.items():
        curve = [accuracy(model, attack(model, x, y, 0.0), y)]
        for eps in eps_list:
            adv = attack(model, x, y, eps)
            worst = max(worst, ((adv - x).abs().amax() - eps).item())
            outside = max(outside, -adv.amin().item(), adv.amax().item() - 1)
            lawful &= bool(adv.isfinite().all()) and adv.shape == x.shape and adv.dtype == x.dtype
            curve.append(accuracy(model, adv, y))
        curves[name] = curve
    everything = accuracy(model, attacks.pgd(model, x, y, 1.0, steps=40), y)
    point = slack(y)
    say(1, all(c[0] == clean for c in curves.values()) and everything <= point
        and all(b <= a + point for c in curves.values() for a, b in zip(c, c[1:])),
        f"eps = 0 gives the clean {clean:.2f} %, accuracy falls with eps, PGD with eps = 1 leaves {everything:.2f} %",
        "; ".join(f"{n} {' '.join(f'{a:.0f}' for a in c)}" for n, c in curves.items()) + " at eps 0 1 2 4 8 / 255")

    trace = []
    adv = autoattack.autoattack(model, x, y, 2 / 255, queries=300, trace=trace)
    worst = max(worst, ((adv - x).abs().amax() - 2 / 255).item())
    outside = max(outside, -adv.amin().item(), adv.amax().item() - 1)
    left = [t["robust"] for t in trace]
    final = accuracy(model, adv, y)
    chain = [clean, curves["fgsm"][2], curves["pgd"][2], curves["apgd"][2], final]
    falls = all(b <= a + point for a, b in zip(chain, chain[1:]))
    subsets = all(bool((~a | b).all()) for a, b in zip(left[1:], left))
    best = final == percent(left[-1]) and all(final <= c[2] + 1e-9 for c in curves.values())
    say(2, falls and subsets and best,
        "clean >= FGSM >= PGD >= APGD >= AutoAttack, which beats each attack alone; its stages only lose images",
        " >= ".join(f"{a:.2f}" for a in chain) + " at 2/255; stages " + ", ".join(
            f"{t['stage']} {percent(t['robust']):.2f}" for t in trace))

    s = attacks.sld(model, x, y, 10.0)
    l1 = (s - x).flatten(1).abs().sum(1).max().item()
    unchanged = torch.equal(before[0], x) and all(torch.equal(a, b) and b.grad is None
                                                  for a, b in zip(before[1], model.parameters()))
    say(3, lawful and worst <= 1e-6 and outside <= 0 and l1 <= 10 + 1e-5 and unchanged,
        "perturbations keep to their budget, pixels to [0, 1]; images, weights and gradients stay untouched",
        f"largest excess over eps {max(worst, 0):.1e}, outside [0, 1] {max(outside, 0):.1e}, largest L1 {l1:.4f} of 10")
    return curves, trace


def rivals(model, x, y, eps, twin=None):
    """Accuracy in percent that the standard attack leaves, APGD-CE and APGD-T together, and others.

    twin: a model for the transfer attack. Returns (standard, {name: percent}).
    """
    def left(attack, **options):
        return right(model, attack(model, x, y, eps, **options), y)

    targeted = left(autoattack.apgd_t)
    standard = targeted & left(autoattack.apgd)
    others = {"APGD-T": targeted, "PGD": left(attacks.pgd),
              "Square": left(autoattack.square, queries=1000),
              "SPSA": left(attacks.spsa, steps=20, pairs=64),
              "other gradients": left(autoattack.adaptive_apgd)}
    if twin is not None:
        others["transfer"] = right(model, autoattack.apgd(twin, x, y, eps), y)
    return percent(standard), {name: percent(flags) for name, flags in others.items()}


def masking(model, x, y, curves, say, twin=None, trace=()):
    """4: does the model only hide its gradients? Then something beats the attack along them.

    curves, trace: what `budgets_and_order` returns. twin: as for `rivals`.
    """
    a, b, eps = x[:32], y[:32], 4 / 255
    standard, others = rivals(model, a, b, eps, twin)
    noise = accuracy(model, attacks.noise(model, x, y, eps), y)
    _, _, grad = attacks.input_gradient(attacks.cross_entropy, model, x, y)
    along = [model(x + t / 255 * grad.sign()) for t in (0, 0.25, 0.5, 1)]
    steps = [attacks.cross_entropy(logits, y).mean().item() for logits in along]
    nearest = attacks.cw(model, a, b, steps=150, lr=0.01, search_steps=4, c0=1.0)
    cw, l2 = accuracy(model, nearest, b), (nearest - a).flatten(1).norm(dim=1).median().item()
    entries, blind = attacks.zero_gradient_share(model, x, y)
    straight = curves["pgd"][2] - curves["adaptive_pgd"][2]
    signs = autoattack.masking_signs(model, x, y, trace)

    parts = {"APGD-T <= Square": others["APGD-T"] <= others["Square"] + 1e-9,
             "PGD <= SPSA + 2": others["PGD"] <= others["SPSA"] + max(2, 100 / len(b)),
             "PGD <= FGSM": all(p <= f + slack(y) for p, f in zip(curves["pgd"], curves["fgsm"])),
             "CW 0": cw == 0, "FGSM <= noise": curves["fgsm"][3] <= noise + 1e-9,
             "loss rises": all(p < q for p, q in zip(steps, steps[1:])),
             "no gradient all 0": signs["zero_gradients"] == 0,
             "deterministic logits": not (signs["randomised"] or signs["probabilities"]),
             "PGD <= straight-through PGD": straight <= slack(y),
             "AutoAttack <= its Square": signs["square_gain"] <= slack(y)}
    for name in list(others)[1:]:                                # the first is part of the standard
        parts[f"APGD <= {name}"] = standard <= others[name] + slack(b)
    text = ""
    if twin is not None:
        transfer = accuracy(model, attacks.pgd(twin, x, y, eps), y)
        parts["direct <= transfer"] = curves["pgd"][3] <= transfer + 1e-9
        text = f", transfer from softmax {transfer:.1f}"
    warning = ""
    if signs["square_gain"]:
        warning = (f"; warning: Square takes {signs['square_gain']:.1f} points after the attacks "
                   "with gradients in AutoAttack, more than 0.2")
    wrong = [name for name, fine in parts.items() if not fine]
    say(4, not wrong, f"no sign of hidden gradients{'; but not ' + ', '.join(wrong) if wrong else ''}",
        f"at 4/255 on {len(b)} images APGD and APGD-T {standard:.1f}, to be beaten by {slack(b):.1f} "
        "at most: " + ", ".join(f"{name} {left:.1f}" for name, left in others.items()) + f"; on {len(y)} "
        f"FGSM {curves['fgsm'][3]:.1f}, noise {noise:.1f}{text}; CW leaves {cw:.0f} at median L2 {l2:.3f}; loss {' '.join(f'{t:.3f}' for t in steps)} at 0 0.25 0.5 1 / 255 along the gradient's sign; entries "
        f"exactly 0: {100 * entries:.3f} %, images all 0: {100 * blind:.1f} %; straight-through gradients take "
        f"{straight:.1f} points from PGD at 2/255{warning}")


def determinism(model, x, y, pixels, index, say):
    """5: the same numbers again, and whatever the batch."""
    runs = {"fgsm": lambda x, y, i: attacks.fgsm(model, x, y, 4 / 255),
            "sld": lambda x, y, i: attacks.sld(model, x, y, 10.0),
            "pgd": lambda x, y, i: attacks.pgd(model, x, y, 4 / 255, random_start=False),
            "random pgd": lambda x, y, i: attacks.pgd(model, x, y, 4 / 255, index=i),
            "square": lambda x, y, i: autoattack.square(model, x, y, 4 / 255, queries=60, index=i)}
    same, apart = True, {}
    i = torch.arange(min(24, len(x)), device=x.device)
    x, y, pixels, index = x[:24], y[:24], pixels[:24], index[:24]
    for name, run in runs.items():
        adv = run(x, y, i)
        same &= torch.equal(adv, run(x, y, i))
        parts = torch.cat([run(x[p], y[p], p) for p in i.split(7)])
        apart[name] = ((adv - parts).abs() > 1e-5).float().mean().item()                 # sign ties, by float noise
    equal = sum(torch.equal(
        corruptions.corrupt(pixels, name, 3, index=index),
        torch.cat([corruptions.corrupt(pixels[p], name, 3, index=index[p]) for p in i.split(7)]))
        for name in corruptions.NAMES)
    say(5, same and equal == 15 and max(apart.values()) < 0.01, "same seed, same numbers; batch size changes nothing",
        f"repeats bit for bit: {same}; corruptions bit for bit in batches of 7: {equal} of 15; pixels that differ: "
        + ", ".join(f"{n} {100 * a:.2f} %" for n, a in apart.items()))


def corruption_identity(pixels, index, say):
    """6: five severities, each a change, growing where they should."""
    changes, kept = {}, True
    for name in corruptions.NAMES:
        out = [corruptions.corrupt(pixels, name, s, index=index) for s in (1, 2, 3, 4, 5)]
        kept &= all(o.shape == pixels.shape and o.dtype == torch.uint8 for o in out)
        changes[name] = [(o.float() - pixels.float()).abs().mean().item() for o in out]
    grow = [n for n in GROWING if all(a < 1.05 * b for a, b in zip(changes[n], changes[n][1:]))]    # angles are random
    say(6, kept and len(grow) == len(GROWING) and all(min(c) > 0 for c in changes.values()),
        f"all 75 corruptions act and keep the image's form; damage grows in {len(grow)} of {len(GROWING)}",
        "mean change at severity 1 and 5 in grey levels: "
        + ", ".join(f"{n} {c[0]:.1f} {c[4]:.1f}" for n, c in changes.items()))


def known_models(x, y, pixels, index, classes, say):
    """7: models whose results are known beforehand."""
    constant, leak = Constant(classes).to(x.device).eval(), Leak(classes).to(x.device).eval()
    chance = 100 * (y == 0).double().mean().item()
    flat = {accuracy(constant, attacks.pgd(constant, x, y, 8 / 255), y), accuracy(constant, x, y), *(
        accuracy(constant, corruptions.corrupt(pixels, n, 5, index=index).float() / 255, y) for n in corruptions.NAMES)}
    planted = (leak.plant(x, y) * 255).round().to(torch.uint8)
    keep = {n: accuracy(leak, corruptions.corrupt(planted, n, 1, index=index).float() / 255, y)
            for n in ("gaussian_noise", "shot_noise", "pixelate", "jpeg_compression")}
    keep = keep if classes <= 20 else {}                                         # with more the levels lie too close
    mce = metrics.mean_corruption_error(metrics.ALEXNET)
    say(7, flat == {chance} and all(a == 100 for a in keep.values()) and abs(mce - 100) < 1e-9,
        "a constant model stays at chance, one that reads a planted label at 100 %, AlexNet's errors give mCE 100",
        f"constant {', '.join(f'{a:.2f}' for a in flat)} % (share of class 0: {chance:.2f} %); planted "
        + ", ".join(f"{n} {a:.0f}" for n, a in keep.items()) + f"; mCE {mce:.6f}")


def area(say):
    """8: the outlier metrics on cases done by hand."""
    positive = torch.tensor([1, 0, 0, 1, 0, 0], dtype=torch.bool)
    same = metrics.average_precision(torch.zeros(6), positive)
    perfect = metrics.average_precision(positive.float(), positive)
    ties = metrics.average_precision(torch.tensor([3.0, 2, 2, 2, 1, 0]), positive)       # 1/2 * 1 + 1/2 * 2/4
    say(8, abs(same - 1 / 3) < 1e-12 and perfect == 1 and abs(ties - 0.75) < 1e-12,
        "AUPR: equal scores give the share of positives, perfect ones 1, a tie counts as one step",
        f"{same:.6f} (1/3), {perfect:.6f} (1), {ties:.6f} (0.75)")


def spaces(model, x, y, say):
    """9: a budget of eps std in pixels is a budget of eps on normalised tensors."""
    x, y, inside = x[:32], y[:32], attacks.Normalized(model)
    z, apart = (x - model.mean) / model.std, {}
    for name, attack in (("fgsm", attacks.fgsm), ("pgd", lambda *a, **k: attacks.pgd(*a, random_start=False, **k))):
        pixel = attack(model, x, y, 4 / 255 * model.std, clip=False)
        normal = attack(inside, z, y, 4 / 255, clip=False) * model.std + model.mean
        apart[name] = ((pixel - normal).abs() > 1e-5).float().mean().item(), abs(
            accuracy(model, pixel, y) - accuracy(model, normal, y))
    say(9, all(share < 0.01 and points <= 100 / len(x) + 1e-9 for share, points in apart.values()),
        "attacks in pixels with eps std and on normalised tensors with eps agree to float noise",
        "; ".join(f"{name}: {100 * share:.3f} % of the pixels differ, accuracy by {points:.2f} points"
                  for name, (share, points) in apart.items()))


def words(say):
    """10: the word swap, with the perplexity of a model that knows word frequencies only."""
    topics = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    text = [line for line in topics.splitlines() if line.strip()][:3000]
    counts = Counter(" ".join(text).split())
    length = sum(counts.values())

    def perplexity(lines):
        tokens = " ".join(lines).split()
        return math.exp(-sum(math.log((counts[t] + 1) / (length + len(counts) + 1)) for t in tokens) / len(tokens))

    none, swapped_none = word_swap(text, 0.0)
    some, swapped = word_swap(text, 0.015)
    say(10, none == text and perplexity(none) == perplexity(text) and not any(swapped_none) and any(swapped)
        and len(" ".join(some).split()) == length and word_swap(text, 0.015)[0] == some,
        "word swap: rate 0 changes nothing, the number of tokens stays, same seed, same text",
        f"{sum(swapped)} of {length} tokens swapped ({100 * sum(swapped) / length:.2f} %: at least one a line); "
        f"perplexity of word frequencies {perplexity(text):.1f} -> {perplexity(some):.1f}")


def longest(model, x, y):
    """(passes, seconds): the most images the checks send through the model, and about how long that takes."""
    passes = 6000 * len(x) + 6000 * len(x[:32])                                      # if no attack ever succeeds
    attacks.input_gradient(attacks.cross_entropy, model, x, y)                       # the first call is slower
    start = time.perf_counter()
    attacks.input_gradient(attacks.cross_entropy, model, x, y)[2].sum().item()
    return passes, passes / len(x) * (time.perf_counter() - start)


@torch.no_grad()
def run(model, pixels, labels, index, name="", twin=None, write=tqdm.write):
    """All ten checks on one ViT. Returns [(number, passed, claim, evidence)].

    pixels: (B, 3, H, W) uint8 test images, 48 are enough; labels (B,); index (B,): their numbers.
    twin: a softmax-attention model, for the transfer attack of check 4.
    """
    if not isinstance(model, ViT):
        raise ValueError(f"the checks expect a ViT, got {type(model).__name__}")
    results, start = [], time.perf_counter()

    def say(number, passed, claim, evidence):
        results.append((number, bool(passed), claim, evidence))
        write(f"{'PASS' if passed else 'FAIL'} {number:2} {claim}  [{time.perf_counter() - start:.0f} s]\n"
              f"        {evidence}")

    x = pixels.float() / 255
    passes, seconds = longest(model, x, labels)
    write(f"checks on {name}, {len(labels)} images: at most about {max(1, math.ceil(seconds / 60))} min")
    with tqdm(total=passes, desc="passes, at most", unit="image", leave=False) as bar:
        def count(module, inputs):
            bar.update(len(inputs[0]))

        hook = model.register_forward_pre_hook(count)
        curves, trace = budgets_and_order(model, x, labels, say)
        masking(model, x, labels, curves, say, twin, trace)
        determinism(model, x, labels, pixels, index, say)
        corruption_identity(pixels, index, say)
        known_models(x, labels, pixels, index, model.config.num_classes, say)
        area(say)
        spaces(model, x, labels, say)
        words(say)
        hook.remove()
    return results
