"""Ten checks of the robustness evaluation itself: `python eval_robust.py --ckpt ... --checks`.

An attack that fails proves nothing; these checks look for the usual ways in which a robustness
number goes wrong, on a given model. Each prints PASS or FAIL and the numbers behind it. Most hold
for any model; 2 and 4 are about the model as well: a FAIL there says that its gradients mislead
the attacks (Athalye et al. 2018; `fra31/auto-attack:autoattack/checks.py`).
"""

import math
import pydoc_data.topics
import time
from collections import Counter
from functools import partial

import torch
from tqdm import tqdm

from robust import adaptive, attacks, autoattack, corruptions, metrics
from robust.masking import accuracy, listed, masking, named, percent, slack
from robust.words import word_swap
from vit import ViT

# damage grows with severity (but for 5 %: angles are random); not so in glass, elastic, frost
GROWING = ("gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "motion_blur",
           "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression")


class Seen:
    """The worst of what attacks did, and copies of what they may not change."""

    def __init__(self, model, images):
        self.images = images.clone()
        self.weights = [p.detach().clone() for p in model.parameters()]
        self.excess, self.outside, self.whole = 0.0, 0.0, True

    def add(self, adv, images, eps):
        self.excess = max(self.excess, ((adv - images).abs().amax() - eps).item())
        self.outside = max(self.outside, -adv.amin().item(), adv.amax().item() - 1)
        same_form = adv.shape == images.shape and adv.dtype == images.dtype
        self.whole &= same_form and bool(adv.isfinite().all())


def growing_budgets(model, x, y, seen, say):
    """1: eps = 0, growing eps, huge eps. Returns {attack: percent at eps 0, 1, 2, 4, 8 / 255}."""
    few = {"fgsm": attacks.fgsm, "pgd": attacks.pgd, "adaptive_pgd": adaptive.adaptive_pgd,
           "apgd": autoattack.apgd, "spsa": partial(attacks.spsa, steps=5, pairs=16),
           "square": partial(autoattack.square, queries=200)}
    curves = {}
    for name, attack in few.items():
        curves[name] = []
        for eps in (0.0, 1 / 255, 2 / 255, 4 / 255, 8 / 255):
            adv = attack(model, x, y, eps)
            seen.add(adv, x, eps)
            curves[name].append(accuracy(model, adv, y))
    everything = accuracy(model, attacks.pgd(model, x, y, 1.0, steps=40), y)

    clean = accuracy(model, x, y)
    point = slack(y)
    at_zero = all(c[0] == clean for c in curves.values())
    falls = all(b <= a + point for c in curves.values() for a, b in zip(c, c[1:]))
    say(1, at_zero and falls and everything <= point,
        f"eps = 0 gives the clean {clean:.2f} %, accuracy falls with eps, PGD with eps = 1 leaves "
        f"{everything:.2f} %",
        "; ".join(f"{name} {listed(c, 0)}" for name, c in curves.items())
        + " at eps 0 1 2 4 8 / 255")
    return curves


def stronger_attacks(model, x, y, curves, seen, say):
    """2: who beats whom. Returns autoattack's trace at 2/255."""
    trace = []
    adv = autoattack.autoattack(model, x, y, 2 / 255, queries=300, trace=trace)
    seen.add(adv, x, 2 / 255)
    final = accuracy(model, adv, y)
    chain = [curves["fgsm"][0], curves["fgsm"][2], curves["pgd"][2], curves["apgd"][2], final]
    falls = all(b <= a + slack(y) for a, b in zip(chain, chain[1:]))
    stages = {entry["stage"]: entry["robust"] for entry in trace}
    left = list(stages.values())
    subsets = all(bool((before | ~after).all()) for before, after in zip(left, left[1:]))
    best = final == percent(left[-1]) and all(final <= c[2] + 1e-9 for c in curves.values())
    say(2, falls and subsets and best,
        "clean >= FGSM >= PGD >= APGD >= AutoAttack, which beats each attack alone; its stages "
        "only lose images",
        listed(chain, 2, " >= ") + " at 2/255; stages "
        + named({stage: percent(flags) for stage, flags in stages.items()}, 2))
    return trace


def lawful(model, x, y, seen, say):
    """3: budgets, ranges and side effects of all that was attacked so far."""
    adv = attacks.sld(model, x, y, 10.0)
    l1 = (adv - x).flatten(1).abs().sum(1).max().item()
    unchanged = torch.equal(seen.images, x) and all(
        torch.equal(before, p) and p.grad is None
        for before, p in zip(seen.weights, model.parameters()))
    kept = seen.excess <= 1e-6 and seen.outside <= 0 and l1 <= 10 + 1e-5
    say(3, seen.whole and kept and unchanged,
        "perturbations keep to their budget, pixels to [0, 1]; images, weights and gradients stay "
        "untouched",
        f"largest excess over eps {seen.excess:.1e}, outside [0, 1] {seen.outside:.1e}, "
        f"largest L1 {l1:.4f} of 10")


def determinism(model, x, y, pixels, index, say):
    """5: the same numbers again, and whatever the batch."""
    runs = {"fgsm": lambda x, y, i: attacks.fgsm(model, x, y, 4 / 255),
            "sld": lambda x, y, i: attacks.sld(model, x, y, 10.0),
            "pgd": lambda x, y, i: attacks.pgd(model, x, y, 4 / 255, random_start=False),
            "random pgd": lambda x, y, i: attacks.pgd(model, x, y, 4 / 255, index=i),
            "square": lambda x, y, i: autoattack.square(model, x, y, 4 / 255, queries=60, index=i)}
    x, y, pixels, index = x[:24], y[:24], pixels[:24], index[:24]
    i = torch.arange(len(x), device=x.device)
    same, apart = True, {}
    for name, attack in runs.items():
        adv = attack(x, y, i)
        same &= torch.equal(adv, attack(x, y, i))
        parts = torch.cat([attack(x[p], y[p], p) for p in i.split(7)])
        differ = (adv - parts).abs() > 1e-5                      # float noise turns signs near 0
        apart[name] = differ.float().mean().item()
    equal = 0
    for name in corruptions.NAMES:
        parts = [corruptions.corrupt(pixels[p], name, 3, index=index[p]) for p in i.split(7)]
        equal += torch.equal(corruptions.corrupt(pixels, name, 3, index=index), torch.cat(parts))
    say(5, same and equal == 15 and max(apart.values()) < 0.01,
        "same seed, same numbers; batch size changes nothing",
        f"repeats bit for bit: {same}; corruptions bit for bit in batches of 7: {equal} of 15; "
        "pixels that differ: " + ", ".join(f"{n} {100 * a:.2f} %" for n, a in apart.items()))


def corruption_identity(pixels, index, say):
    """6: five severities, each a change, growing where they should."""
    changes, kept, grow = {}, True, 0
    for name in corruptions.NAMES:
        out = [corruptions.corrupt(pixels, name, s, index=index) for s in (1, 2, 3, 4, 5)]
        kept &= all(o.shape == pixels.shape and o.dtype == torch.uint8 for o in out)
        changes[name] = [(o.float() - pixels.float()).abs().mean().item() for o in out]
        larger = all(a < 1.05 * b for a, b in zip(changes[name], changes[name][1:]))
        grow += name in GROWING and larger
    say(6, kept and grow == len(GROWING) and all(min(c) > 0 for c in changes.values()),
        f"all 75 corruptions act and keep the image's form; damage grows in {grow} of "
        f"{len(GROWING)}",
        "mean change at severity 1 and 5 in grey levels: "
        + ", ".join(f"{name} {c[0]:.1f} {c[4]:.1f}" for name, c in changes.items()))


class Constant(torch.nn.Module):
    """Says class 0, whatever it sees."""

    def __init__(self, classes):
        super().__init__()
        self.classes = classes

    def forward(self, x):
        logits = 5 * torch.eye(1, self.classes, device=x.device).expand(len(x), -1)
        return logits + 0 * x.flatten(1).sum(1, keepdim=True)    # depends on x, but not really


class Leak(Constant):
    """Reads the label from the brightness of the upper left quarter, where `plant` wrote it."""

    def forward(self, x):
        level = x[:, :, :x.shape[2] // 2, :x.shape[3] // 2].mean((1, 2, 3))[:, None]
        return -(level - torch.linspace(0.2, 0.8, self.classes, device=x.device)).abs()

    def plant(self, images, labels):
        images = images.clone()
        value = torch.linspace(0.2, 0.8, self.classes, device=images.device)[labels]
        images[:, :, :images.shape[2] // 2, :images.shape[3] // 2] = value[:, None, None, None]
        return images


def known_models(x, y, pixels, index, classes, say):
    """7: models whose results are known beforehand."""
    def corrupted(model, pixels, name, severity):
        images = corruptions.corrupt(pixels, name, severity, index=index).float() / 255
        return accuracy(model, images, y)

    constant, leak = Constant(classes).to(x.device).eval(), Leak(classes).to(x.device).eval()
    chance = percent(y == 0)
    flat = {accuracy(constant, attacks.pgd(constant, x, y, 8 / 255), y), accuracy(constant, x, y)}
    flat |= {corrupted(constant, pixels, name, 5) for name in corruptions.NAMES}
    planted = (leak.plant(x, y) * 255).round().to(torch.uint8)
    keep = {}
    if classes <= 20:                                            # more: levels lie too close
        for name in ("gaussian_noise", "shot_noise", "pixelate", "jpeg_compression"):
            keep[name] = corrupted(leak, planted, name, 1)
    mce = metrics.mean_corruption_error(metrics.ALEXNET)
    say(7, flat == {chance} and all(a == 100 for a in keep.values()) and abs(mce - 100) < 1e-9,
        "a constant model stays at chance, one that reads a planted label at 100 %, AlexNet's "
        "errors give mCE 100",
        f"constant {listed(flat, 2, ', ')} % (share of class 0: {chance:.2f} %); planted "
        f"{named(keep, 0)}; mCE {mce:.6f}")


def area(say):
    """8: the outlier metrics on cases done by hand."""
    positive = torch.tensor([1, 0, 0, 1, 0, 0], dtype=torch.bool)
    same = metrics.average_precision(torch.zeros(6), positive)
    perfect = metrics.average_precision(positive.float(), positive)
    ties = metrics.average_precision(torch.tensor([3.0, 2, 2, 2, 1, 0]), positive)  # 1/2 + 1/4
    say(8, abs(same - 1 / 3) < 1e-12 and perfect == 1 and abs(ties - 0.75) < 1e-12,
        "AUPR: equal scores give the share of positives, perfect ones 1, a tie counts as one step",
        f"{same:.6f} (1/3), {perfect:.6f} (1), {ties:.6f} (0.75)")


def spaces(model, x, y, say):
    """9: a budget of eps std in pixels is a budget of eps on normalised tensors."""
    x, y, inside = x[:32], y[:32], attacks.Normalized(model)
    z = (x - model.mean) / model.std
    fine, text = True, []
    for name, attack in (("fgsm", attacks.fgsm), ("pgd", partial(attacks.pgd, random_start=False))):
        pixel = attack(model, x, y, 4 / 255 * model.std, clip=False)
        other = attack(inside, z, y, 4 / 255, clip=False) * model.std + model.mean
        share = ((pixel - other).abs() > 1e-5).float().mean().item()
        points = abs(accuracy(model, pixel, y) - accuracy(model, other, y))
        fine &= share < 0.01 and points <= 100 / len(x) + 1e-9
        apart = f"{100 * share:.3f} % of the pixels differ, accuracy by {points:.2f} points"
        text.append(f"{name}: {apart}")
    say(9, fine,
        "attacks in pixels with eps std and on normalised tensors with eps agree to float noise",
        "; ".join(text))


def words(say):
    """10: the word swap, with the perplexity of a model that knows word frequencies only."""
    topics = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    text = [line for line in topics.splitlines() if line.strip()][:3000]
    counts = Counter(" ".join(text).split())
    length = sum(counts.values())

    def perplexity(lines):
        tokens = " ".join(lines).split()
        nll = -sum(math.log((counts[t] + 1) / (length + len(counts) + 1)) for t in tokens)
        return math.exp(nll / len(tokens))

    none, swapped_none = word_swap(text, 0.0)
    some, swapped = word_swap(text, 0.015)
    nothing = none == text and perplexity(none) == perplexity(text) and not any(swapped_none)
    again = word_swap(text, 0.015)[0] == some
    say(10, nothing and any(swapped) and len(" ".join(some).split()) == length and again,
        "word swap: rate 0 changes nothing, the number of tokens stays, same seed, same text",
        f"{sum(swapped)} of {length} tokens swapped ({100 * sum(swapped) / length:.2f} %: at least "
        f"one a line); perplexity of word frequencies {perplexity(text):.1f} -> "
        f"{perplexity(some):.1f}")


def longest(model, x, y):
    """(passes, seconds): the most images the checks send through the model, and its time."""
    passes = 6000 * len(x) + 6000 * len(x[:32])                  # if no attack ever succeeds
    attacks.input_gradient(attacks.cross_entropy, model, x, y)   # the first is slower
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
        seconds = time.perf_counter() - start
        write(f"{'PASS' if passed else 'FAIL'} {number:2} {claim}  [{seconds:.0f} s]\n"
              f"        {evidence}")

    x = pixels.float() / 255
    passes, seconds = longest(model, x, labels)
    write(f"checks on {name}, {len(labels)} images: at most about "
          f"{max(1, math.ceil(seconds / 60))} min")
    bar = tqdm(total=passes, desc="passes, at most", unit="image", leave=False)

    def count(module, inputs):
        bar.update(len(inputs[0]))

    hook = model.register_forward_pre_hook(count)
    with bar:
        seen = Seen(model, x)
        curves = growing_budgets(model, x, labels, seen, say)
        trace = stronger_attacks(model, x, labels, curves, seen, say)
        lawful(model, x, labels, seen, say)
        masking(model, x, labels, curves, say, twin, trace)
        determinism(model, x, labels, pixels, index, say)
        corruption_identity(pixels, index, say)
        known_models(x, labels, pixels, index, model.config.num_classes, say)
        area(say)
        spaces(model, x, labels, say)
        words(say)
    hook.remove()
    return results
