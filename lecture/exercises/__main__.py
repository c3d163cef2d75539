"""Check an exercise. Fill the holes (...) of lecture/exercises/<number>_*.py, then run

    python -m lecture.exercises 5       # checks exercise 5; without a number: lists all exercises

It prints whether your lines are right, and then why this matters. If your lines are wrong, it
prints the first wrong entry, the expected value, the inputs at that place and, for a common
mistake, a hint.
"""

import argparse
import math
import runpy
import sys
import traceback
from numbers import Real
from pathlib import Path
from typing import Callable, NamedTuple

import torch
from tqdm import tqdm

import common
import kpca
from attention import (FORMS, layer_inputs, penalty, rpc_attention, soft_threshold,
                       softmax_attention)
from data.shapes import load_shapes
from models import load_classifier
from robust.attacks import pgd
from robust.patches import patches_to_pixels, random_places
from studies.kernel_pca import projection_loss
from studies.rpca_layer import robust_pca
from studies.where_is_s import auroc, first_layer, location

FOLDER = Path(__file__).parent
TRIES, CLOSE = 20, 1e-7


class Wrong(Exception):
    """The answer is wrong; the text is the message for the learner."""


# --- the checks -----------------------------------------------------------------------------------
# Each check yields, for one random input: the name of the result, the learner's result, the
# expected result, the inputs, and {hint: the result of a common mistake}.

def shrinkage(own, random):
    x, tau = random(4, 5), random(1).abs()
    yield "S", own(x, tau), soft_threshold(x, tau), dict(x=x, tau=tau), {
        "entries between -tau and tau must become 0": x.sign() * (x.abs() - tau),
        "this is the part that shrinkage removes": x.clamp(-tau, tau),
        "large entries must move towards 0, too": x * (x.abs() > tau),
        "the sign is lost": (x.abs() - tau).clamp(min=0)}


def pap(own, random):
    """Check four steps line by line, so that the first wrong line is named with its step."""
    k, v = random(2, 2, 3, 5, 4)
    tau, steps = penalty(k), []
    rpc_attention(k, v, n_iter=4, lambd=1.0, trace=steps)
    found = own(k, v, tau, 4)
    yield "the number of steps", torch.tensor(len(found)), torch.tensor(4), {}, {}
    L = Z = torch.zeros_like(k)
    for i, (mine, right) in enumerate(zip(found, steps), 1):
        S, K2 = right["S"], right["K2"]
        yield f"step {i}, S", mine["S"], S, dict(k=k, L=L, Z=Z, tau=tau), {
            "Z is added, not subtracted, in this line": soft_threshold(k - L - Z, tau),
            "L and Z are missing": soft_threshold(k, tau),
            "Z is missing": soft_threshold(k - L, tau)}
        yield f"step {i}, K2", mine["K2"], K2, dict(k=k, S=S, Z=Z), {
            "plus Z is the variant `admm`; `released` has minus": k - S + Z,
            "Z is missing": k - S, "S is missing": k - Z, "S is added": k + S - Z}
        L = right["L"]
        yield f"step {i}, L", mine["L"], L, {}, {
            "the queries must be K2, too": softmax_attention(k, K2, v),
            "this is attention with the keys k, without PAP": softmax_attention(k, k, v),
            "the values must be v": softmax_attention(K2, K2, k)}
        before, Z = Z, Z + k - S - L
        shared = {"Z += changes the tensor that all steps share: "
                  "Z = Z + ... makes a new one": mine["Z"]} if mine["Z"] is found[-1]["Z"] else {}
        yield f"step {i}, Z", mine["Z"], Z, dict(k=k, S=S, L=L, Z=before), shared | {
            "the previous Z is missing: Z is a sum over steps": k - S - L,
            "the sign is wrong: add the part of k that L + S misses": before - (k - S - L)}


def centred_query(own, random):
    k, d = random(6, 3), 2
    g, E = kpca.g(k, k), kpca.kernel(k, k)
    sigma, U = kpca.top_eigh(kpca.centre(E / (g * g.mT)), d)
    a = U / sigma.sqrt()
    shift = (E / g @ (a / g)).mean(0)
    yield "v", own(a, g, E), a / g - shift, dict(a=a, g=g), {
        "this is the query that is not centred": a / g,
        "the sign of the shift is wrong": a / g + shift,
        "the mean value is not the mean output: each key attends with its own weights":
        a / g - (a / g).mean(0)}


def negative_j(own, random):
    """Check J < 0 for short and long queries; there is no single right answer to compare with."""
    k, length = random(6, 4), 0
    for times in (1, 3, 6, "many"):
        q = random(5, 4)
        if times == "many":                 # so long that |phi(q)| exceeds every earlier value
            while kpca.log_phi2(q, k).max() <= 2 * math.log(length) + 1:
                q = 1.1 * q
        else:
            q = times * q
        v = as_tensor("v", own(q, k), k)
        if v.shape != k.shape:
            raise Wrong(f"v has shape {tuple(v.shape)}, expected {tuple(k.shape)}, as k")
        length = v.norm(dim=1).max().item()
        if not length < 1e100:
            raise Wrong("v has entries that are not finite or far too large: a network cannot "
                        "compute with them")
        J = projection_loss(kpca.log_phi2(q, k), kpca.attend(q, k, v))["J"]
        if not J < 0:
            hint = "only |h|^2 depends on v"
            if times != 1:
                hint = f"the queries are {times} times longer: |phi(q)|^2 grows, so v must grow"
            raise Wrong(f"J = {J:.6g}, expected a number below 0\n   {hint}")
    return
    yield


def whole_tokens(own, random):
    K, tau = random(2, 2, 5, 3), 1.5
    length = K.norm(dim=-1, keepdim=True)
    right = K * (1 - tau / length).clamp(min=0)
    yield "S", own(K, tau), right, dict(K=K, length=length), {
        "this shrinks single entries, not rows": soft_threshold(K, tau),
        "long rows must become shorter by tau": K * (length > tau),
        "rows shorter than tau must become 0; here they point backwards": K * (1 - tau / length),
        "this is the part that stays, K - S": K - right}


def paired_interval(own, random):
    n, t = 5, 2.776
    a, b = random(n), random(n)
    d = b - a
    mean, half = own(a, b, t)
    yield "mean", mean, d.mean(), {}, {"b - a, not a - b": -d.mean()}
    right = t * d.std() / math.sqrt(n)
    yield "half", half, right, {}, {
        "the half-width is t s / sqrt(n): the root of n is missing": right * math.sqrt(n),
        "the denominator of s is n - 1, not n": t * d.std(correction=0) / math.sqrt(n),
        "these runs are pairs: take the standard deviation of the differences":
        t * (a.var() + b.var()).sqrt() / math.sqrt(n),
        "1.96 is for many runs; five pairs need t": 1.96 * right / t}


# --- predict, then measure ------------------------------------------------------------------------

def shipped_network(attn="rpc"):
    """Load a network of weights/ in eval mode."""
    checkpoint = common.load(FOLDER.parents[1] / f"weights/shapes_{attn}.pt")
    return load_classifier(checkpoint).requires_grad_(False)


def keys_and_values(images, attn="rpc"):
    """Return keys and values of layer 0 for these images, both (B, H, N, D)."""
    layer, x = layer_inputs(shipped_network(attn), images)[0]
    _, k, v = layer.project(x)
    return k, v


def measure_doubled_keys(names):
    """Return the answers of exercise 3: {name in the file: number}."""
    found = {}
    k, v = keys_and_values(load_shapes("test", 64).images / 255)
    for form in ("released", "paper"):
        mu = [penalty(keys, mu_dim=FORMS[form]["mu_dim"]) for keys in (k, 2 * k)]
        ratio = (mu[1] / mu[0]).mean().item()
        found[f"tau_{form}"] = ratio if FORMS[form]["threshold"] == "times" else 1 / ratio
    for form in ("released", "paper"):
        steps = []
        rpc_attention(2 * k, v, lambd=4, **FORMS[form], trace=steps)
        found[f"share_{form}"] = 100 * (steps[-1]["S"] != 0).double().mean().item()
    return found


def with_patches(images, new, n):
    """Replace n random patches of each image by the patches of `new` at the same places.

    Returns the images and which patches were replaced, (B, 64) bool.
    """
    hit = random_places(torch.arange(len(images)), n, 64)
    return torch.where(patches_to_pixels(hit, 8, 4), new, images), hit


def auc_of(attn, images, hit):
    """Return the AUC of |S| for the patches `hit`: of RPC-Attention and of real robust PCA."""
    k, steps = first_layer(shipped_network(attn), images)
    scores = steps[-1]["S"], robust_pca(k, n_iter=1)
    return [auroc(location(S).flatten(), hit.flatten()) for S in scores]


def measure_auc(names):
    """Return the answers of exercise 4: {name in the file: AUC of |S| for corrupted patches}."""
    random = torch.Generator().manual_seed(0)
    images = load_shapes("test", 100).images / 255
    grey = torch.rand(len(images), 1, 32, 32, generator=random)
    found = {}
    for name, new in dict(grey_noise=grey, pasted=images.roll(-1, 0)).items():
        areas = auc_of("rpc", *with_patches(images, new, 6))
        found |= dict(zip((f"auc_of_{name}", f"auc_of_{name}_with_robust_pca"), areas))
    return found


def measure_repetition(names):
    """Return the answers of exercise 12: {name in the file: AUC of robust PCA's S}."""
    random = torch.Generator().manual_seed(0)
    images = load_shapes("test", 100).images / 255
    colours = torch.rand(len(images), 3, 8, 8, generator=random)
    own_colours = colours.repeat_interleave(4, 2).repeat_interleave(4, 3)           # one per patch
    one_colour = torch.rand(len(images), 3, 1, 1, generator=random)                 # one per image
    found = {}
    for name, new, n in (("one", own_colours, 1), ("six_different", own_colours, 6),
                         ("six_equal", one_colour, 6)):
        _, found[f"auc_of_{name}"] = auc_of("symmetric", *with_patches(images, new, n))
    return found


def measure_axes(names):
    """Return the answers of exercise 6: {name in the file: number of axes for 90 %}."""
    random = torch.Generator().manual_seed(0)
    black, noise = torch.zeros(1, 3, 32, 32), torch.rand(1, 3, 32, 32, generator=random)
    found = {}
    for name, image in dict(axes_of_black=black, axes_of_noise=noise).items():
        k, _ = keys_and_values(image, "symmetric")
        sigma = kpca.kernel_pca(k[0, 0].double()).sigma
        held = sigma.cumsum(0) / sigma.sum()
        found[name] = 1 + (held < 0.9).sum().item()
    return found


def measure_lambda(names):
    """Return the answers of exercise 8: {name in the file: share of S or entropy}."""
    k, v = keys_and_values(load_shapes("test", 64).images / 255)
    found = {}
    for lambd in (0, 1):
        steps = []
        rpc_attention(k, v, lambd=lambd, trace=steps)
        K2 = steps[-1]["K2"]
        A = kpca.log_kernel(K2, K2).softmax(-1)
        found[f"share_of_lambda_{lambd}"] = 100 * (steps[-1]["S"] != 0).double().mean().item()
        found[f"entropy_of_lambda_{lambd}"] = torch.special.entr(A).sum(-1).mean().item()
    return found


def measure_steps(names):
    """Return the answers of exercise 10: {name in the file: accuracy in %}, own attack included."""
    model, split, eps = shipped_network(), load_shapes("test", 32), 2 / 255
    x, y = split.images / 255, split.labels

    def accuracy(attacked):
        return 100 * (model(attacked).argmax(1) == y).double().mean().item()

    if names["publish"] not in (1, 5, 20, 100):
        raise Wrong(f"publish = {names['publish']!r}, expected 1, 5, 20 or 100")
    own = as_tensor("own_attack", names["own_attack"](model, x.clone(), y.clone(), eps), x)
    if own.shape != x.shape or not ((own - x).abs() <= eps + 1e-6).all():
        raise Wrong("own_attack leaves the budget: no pixel may move by more than eps = 2/255")
    if not ((own >= 0) & (own <= 1)).all():
        raise Wrong("own_attack returns pixels outside [0, 1]")
    found = {}
    for steps in tqdm((1, 5, 20, 100), "PGD"):
        attacked = pgd(model, x, y, eps, steps=steps, alpha=0.1 * eps)
        found[f"accuracy_after_{steps}"] = accuracy(attacked)
    lowest = min(found.values())
    if found[f"accuracy_after_{names['publish']}"] > lowest:
        raise Wrong(f"publish = {names['publish']}, but another number of steps leaves a lower "
                    f"accuracy, {lowest:.1f} %: every attack gives an upper bound of robustness")
    return found | {"own_attack": accuracy(own)}


# name up to "_": smallest and largest possible value, and the distance that is called close. It is
# never more than a third of the measured value: 1 axis is far from 3 axes.
RANGES = {"tau": (0, 100, 0.05), "share": (0, 100, 10), "auc": (0, 1, 0.1), "axes": (1, 64, 4),
          "entropy": (0, math.log(65), 0.3), "accuracy": (0, 100, 5)}


def predictions(measure, names):
    """Return the learner's predictions and the measured values, as text."""
    own = {name: value for name, value in names.items() if name.split("_")[0] in RANGES}
    holes = [name for name in own if own[name] is ...]
    if holes:
        raise Wrong(f"no prediction yet for {', '.join(holes)}: put a number in place of ...")
    for name, value in own.items():
        low, high, _ = RANGES[name.split("_")[0]]
        if isinstance(value, bool) or not isinstance(value, Real) or not low <= value <= high:
            raise Wrong(f"{name} = {value!r}, expected a number from {low} to {high:.4g}")
    lines = ["predicted and measured:"]
    for name, value in measure(names).items():
        if name not in own:
            lines.append(f"{name}: measured {value:.2f}")
            continue
        close = min(RANGES[name.split("_")[0]][2], value / 3)
        word = "close" if abs(own[name] - value) <= close else "far"
        lines.append(f"{name}: you predicted {own[name]}, measured {value:.2f}: {word}")
    return "\n   ".join(lines)


# --- the table ------------------------------------------------------------------------------------

class Exercise(NamedTuple):
    """An exercise checks a function of its file, or it measures what the file predicts."""

    file: str
    why: str                            # printed after a right answer: why this matters
    function: str = None                # the name of the learner's function
    check: Callable = None              # check(function, random), see above
    measure: Callable = None            # measure(names of the file) -> {name: measured value}


EXERCISES = {
    1: Exercise("1_centred_query.py", "So attention can be textbook kernel PCA exactly: the shift "
                "is one vector per head, and the next bias of the network can undo it.",
                "centred_query", centred_query),
    2: Exercise("2_negative_j.py", "So J < 0 for any network with large values: the paper's "
                "falling J may show only that outputs grow. In our trained network J is -5.1.",
                "values", negative_j),
    3: Exercise("3_doubled_keys.py", "lambda * mu has the wrong unit: the same picture with keys "
                "of another length gets another S.", measure=measure_doubled_keys),
    4: Exercise("4_predict.py", "Grey noise changes the size of a key little, so S of RPC-Attention "
                "tells little. Robust PCA finds it, because no few directions describe noise. It "
                "hardly finds pasted patches: they look like other patches.", measure=measure_auc),
    5: Exercise("5_whole_tokens.py", "Whole rows become 0, so S is sparse by tokens. But long keys "
                "enter S first, and noise makes keys short: this S would miss noise, too.",
                "whole_tokens", whole_tokens),
    6: Exercise("6_axes.py", "In a black image all patches are equal, and only positions tell the "
                "keys apart. Noise makes all keys different. Each image has its own axes, so one "
                "matrix W cannot return them for all images.", measure=measure_axes),
    7: Exercise("7_shrinkage.py", "This line alone makes S sparse. Applied to singular values, it "
                "makes L low-rank: this is the line that RPC-Attention replaces.",
                "shrink", shrinkage),
    8: Exercise("8_lambda.py", "lambda decides how soft attention is: with lambda = 0 the layer is "
                "the plain average of all values, whatever the image shows.",
                measure=measure_lambda),
    9: Exercise("9_pap.py", "You have written RPC-Attention. Robust PCA shrinks singular values "
                "in the line of L; its order, sign and threshold differ, too.", "pap", pap),
    10: Exercise("10_publish.py", "Every attack gives an upper bound of the robustness, so publish "
                 "the lowest, and name the attack. With one step this network looks 1.8 times as "
                 "robust as with 20 steps.", measure=measure_steps),
    11: Exercise("11_pairs.py", "RPC minus symmetric at 2/255: -3.8 points (-5.4 to -2.3): real. "
                 "Softmax minus symmetric at 4/255: +0.9 points (-10.6 to +12.5): not real, "
                 "although the first seed alone gives +9.3.", "paired_interval", paired_interval),
    12: Exercise("12_repetition.py", "Robust PCA finds a patch that few directions describe badly. "
                 "A colour has three numbers, so about three more directions describe all flat "
                 "patches, and one direction describes equal patches.",
                 measure=measure_repetition),
}


# --- the learner's file ---------------------------------------------------------------------------

def as_tensor(what, own, like):
    """Return the learner's result as a tensor with the type of `like`."""
    if own is ...:
        raise Wrong(f"{what} is still a hole: put a line in place of ...")
    if not torch.is_tensor(own) and not isinstance(own, Real):
        raise Wrong(f"{what} is {own!r}, expected a tensor")
    return torch.as_tensor(own).to(like)


def compare(what, own, expected, given, mistakes):
    """Raise Wrong unless the tensors `own` and `expected` agree up to rounding."""
    own = as_tensor(what, own, expected)
    if own.shape != expected.shape:
        raise Wrong(f"{what} has shape {tuple(own.shape)}, expected {tuple(expected.shape)}")
    wrong = ~((own - expected).abs() <= CLOSE)                          # nan is wrong, too
    if wrong.any():
        place = tuple(wrong.nonzero()[0].tolist())
        inputs = ", ".join(f"{name} = {x.expand(expected.shape)[place]:.6g}"
                           for name, x in given.items())
        hints = [hint for hint, x in mistakes.items() if torch.allclose(own, x, atol=CLOSE)]
        raise Wrong(f"{what}, entry {place}: {own[place]:.6g}, expected {expected[place]:.6g}"
                    + f"\n   inputs there: {inputs}" * bool(inputs)
                    + "".join(f"\n   {hint}" for hint in hints[:1]))


def with_copies(function):
    """Return the function, called with copies of its tensors: it may change its arguments."""
    def copied(*inputs):
        own = [x.clone() if torch.is_tensor(x) else x for x in inputs]
        result = function(*own)
        if result is None:
            raise Wrong(f"{function.__name__} returns None, expected a result: put a line in place "
                        "of ..., and keep the line with return")
        return result
    return copied


def judge(number, folder=FOLDER):
    """Return a message about an exercise, and whether the exercise is solved."""
    exercise = EXERCISES[number]
    generator = torch.Generator().manual_seed(number)

    def random(*shape):
        return torch.randn(shape, generator=generator).double()

    try:
        names = runpy.run_path(str(folder / exercise.file))
        if exercise.check is None:
            measured = predictions(exercise.measure, names)
            return f"{measured}\n   {exercise.why}", True
        own = with_copies(names[exercise.function])
        for _ in range(TRIES):
            for one in exercise.check(own, random):
                compare(*one)
    except Wrong as e:
        return f"not yet: {e}", False
    except Exception as e:                              # the learner's lines may raise anything
        return f"not yet: {e!r}\n{traceback.format_exc(limit=-1)}", False
    return f"right, on {TRIES} random inputs\n   {exercise.why}", True


def main():
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("number", type=int, nargs="?", choices=EXERCISES,
                   help="number of the exercise (default: list all)")
    number = p.parse_args().number
    if number:
        text, right = judge(number)
        print(f"{number}: {text}")
        sys.exit(not right)
    for number, exercise in EXERCISES.items():          # the list: one line per exercise
        if exercise.measure:                            # the list shows no measured value
            state = f"predict, then measure: python -m lecture.exercises {number}"
        else:
            text, right = judge(number)
            state = "done" if right else text.splitlines()[0]
        print(f"{number}: {exercise.file:<20} {state}", flush=True)


if __name__ == "__main__":
    common.run(main)
