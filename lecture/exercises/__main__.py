"""Check an exercise: fill in the holes of lecture/exercises/<number>_*.py, then

    python -m lecture.exercises 3       # without a number: which there are, and which are done

says whether it is right, or where it first departs from this repository's own lines: both numbers,
what went in, and, of a usual mistake, which one it is.
"""

import argparse
import runpy
import sys
import traceback
from pathlib import Path

import torch

import common
import kpca
from attention import penalty, rpc_attention, soft_threshold, softmax_attention
from data.shapes import load_shapes
from studies.where_is_s import first_layer, location
from robust.attacks import project
from robust.metrics import auroc
from robust.patches import corrupt_patches
from vit import classifier_from_checkpoint

FOLDER = Path(__file__).parent
TRIES, CLOSE = 20, 1e-7


class Wrong(Exception):
    """What to tell the learner."""


# --- what is right --------------------------------------------------------------------------------
# Each check yields, for one random input: what it is, the learner's, what is expected, what went
# into it, and {hint: what a usual mistake gives}.

def shrinkage(own, random):
    x, tau = random(4, 5), random(1).abs()
    yield "S", own(x, tau), soft_threshold(x, tau), dict(x=x, tau=tau), {
        "nothing stops entries nearer to 0 than tau at 0": x.sign() * (x.abs() - tau),
        "this is what shrinkage takes away": x.clamp(-tau, tau),
        "large entries have to move towards 0, too": x * (x.abs() > tau),
        "the sign is lost": (x.abs() - tau).clamp(min=0)}


def mu_and_tau(own, random):
    k, lambd = random(2, 3, 5, 4), 1 + random(1).abs().item()
    m, H = k.abs().mean((2, 3), keepdim=True), k.shape[1]
    mu, tau = own(k, lambd)
    right = penalty(k)
    given = dict(m=m, H=torch.tensor(H), lambd=torch.tensor(lambd))
    yield "mu", mu, right, given, {
        "this has x = D, a head's width (reading `paper`), where C is asked for": right / H,
        "the 4 is missing": 4 * right, "m is in the numerator": H * m / 4,
        "m is a mean of |k|, not a sum": right / k[0, 0].numel()}
    yield "tau", tau, lambd * right, given | dict(mu=right), {
        "lambda / mu is the reading `paper`; `released` has lambda times mu": lambd / right,
        "mu / lambda: tau has to grow with lambda": right / lambd}


def pap(own, random):
    """Each of four steps, line by line, so that the first departure names its step."""
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
            "what the last step left over is missing": soft_threshold(k, tau),
            "Z is missing": soft_threshold(k - L, tau)}
        yield f"step {i}, K2", mine["K2"], K2, dict(k=k, S=S, Z=Z), {
            "plus Z is the reading `admm`; `released` has minus": k - S + Z,
            "Z is missing": k - S, "S is missing": k - Z, "S is added": k + S - Z}
        L = right["L"]
        yield f"step {i}, L", mine["L"], L, {}, {
            "the queries are K2, too": softmax_attention(k, K2, v),
            "these are the keys without PAP": softmax_attention(k, k, v),
            "the values are v": softmax_attention(K2, K2, k)}
        before, Z = Z, Z + k - S - L
        shared = {"Z += writes into one tensor, which all steps keep (and L is it, too, at first): "
                  "Z = Z + ... makes a new one": mine["Z"]} if mine["Z"] is found[-1]["Z"] else {}
        yield f"step {i}, Z", mine["Z"], Z, dict(k=k, S=S, L=L, Z=before), shared | {
            "the Z so far is missing: it adds up": k - S - L,
            "the sign: what is missing of k is added": before - (k - S - L)}


def pgd_step(own, random):
    clean, eps, alpha = (4 * random(2, 3, 4, 4)).sigmoid(), 0.1, 0.05
    x = project(clean + 0.2 * random(2, 3, 4, 4), clean, eps, True)
    grad = random(2, 3, 4, 4)
    step = alpha * grad.sign()
    wrong = {"minus the gradient lowers the loss": (-step, True),
             "the result leaves [0, 1]": (step, False),
             "only the sign of the gradient counts": (alpha * grad, True),
             "alpha is the step in pixel units: eps is no factor of it": (eps * step, True),
             "a step is alpha, not eps": (eps * grad.sign(), True)}
    wrong = {hint: project(x + move, clean, eps, clip) for hint, (move, clip) in wrong.items()}
    wrong["the result goes further than eps from `clean`"] = (x + step).clamp(0, 1)
    wrong["no projection: neither eps nor [0, 1] is kept"] = x + step
    yield ("x", own(x, clean, grad, eps, alpha), project(x + step, clean, eps, True),
           dict(x=x, clean=clean, grad=grad), wrong)


def centring(own, random):
    x = random(6, 3)
    G = x @ x.mT
    rows, columns, all_ = G.mean(0), G.mean(1, keepdim=True), G.mean()
    yield "G~", own(G), kpca.centre(G), dict(G=G), {
        "centred on one side only": G - rows, "centred on one side only, the other": G - columns,
        "the mean of all entries has to be added again": G - rows - columns,
        "this takes out one mean; rows and columns have theirs": G - all_}


def theorem_1(own, random):
    k, d = random(6, 3), 2
    g = kpca.g(k, k)
    G = kpca.centre(kpca.log_gram(k).exp())
    sigma, U = kpca.top_eigh(G, d)
    right = U / sigma.sqrt()
    a, v = own(G, g, d)
    yield "a", a, right, dict(U=U, sigma=sigma), {
        "|u_d|^2 = a_d.G a_d is sigma_d here: divide by its root": U,
        "divide by the root of sigma": U / sigma, "divide, do not multiply": U * sigma.sqrt()}
    values = (right - right.mean(0)) / g
    yield "v", v, values, dict(a=right, g=g), {             # a / g is right, too: a's mean is 0
        "divide by g": right * g, "g is missing": right,
        "the mean is of a, not of a / g": right / g - (right / g).mean(0)}


def undo(own, random):
    k, v = random(6, 3), random(6, 2)
    g, axes = kpca.g(k, k), kpca.kernel_pca(k)
    G = kpca.centre(kpca.log_gram(k).exp())
    right = g * v - (g * v).mean(0)
    a, cosine = own(v, g, G)
    yield "a", a, right, dict(v=v, g=g), {
        "the mean is missing: coefficients add up to 0": g * v,
        "the mean is of g v, not of v": g * (v - v.mean(0)),
        "Theorem 1 divides by g, so undoing it multiplies": v / g - (v / g).mean(0)}
    yield "cosine", cosine, kpca.eigen_cosine(axes, right)["eig_cos"], {}, {
        "this is the cosine of a and a": torch.ones(2).double(),
        "the Rayleigh quotient: divide by both lengths": (right * (G @ right)).sum(0)
        / right.square().sum(0)}


# number: (file, function in it, what checks it, what it is compared with)
EXERCISES = {1: ("1_theorem_1.py", "theorem_1", theorem_1, "kpca.theorem_1"),
             2: ("2_undo.py", "undo", undo, "kpca.a_hat and kpca.eigen_cosine"),
             3: ("3_pap.py", "pap", pap, "attention.rpc_attention"),
             4: ("4_predict.py", None, None, "what S measures"),
             5: ("5_pgd.py", "pgd_step", pgd_step, "robust.attacks.project"),
             6: ("6_centring.py", "centre", centring, "kpca.centre"),
             7: ("7_shrinkage.py", "shrink", shrinkage, "attention.soft_threshold"),
             8: ("8_mu_and_tau.py", "mu_and_tau", mu_and_tau, "attention.penalty")}


# --- predict, then run ----------------------------------------------------------------------------

PREDICTED = {"auc_of_pixels": "pixels", "auc_of_attacked": "adversarial"}


@torch.no_grad()
def measure(kind):
    """AUC of |S| for damaged patches, after the last step in layer 0 of the shipped network."""
    model = classifier_from_checkpoint(common.load(FOLDER.parents[1] / "weights/shapes_rpc.pt"))
    split = load_shapes("test", 100)
    spoilt, hit = corrupt_patches(split.images / 255, kind, patch=4, model=model,
                                  labels=split.labels)
    _, steps = first_layer(model, spoilt)
    return auroc(location(steps[-1]["S"]).flatten(), hit.flatten())


def predictions(names):
    """What was predicted beside what comes out; done once both are there."""
    holes = [name for name in PREDICTED if names[name] is ...]
    if holes:
        raise Wrong(f"no prediction yet for {', '.join(holes)}: put yours in place of ...")
    lines = [f"{name}: you said {names[name]}, it is {measure(kind):.2f}"
             for name, kind in PREDICTED.items()]
    other = "three other networks have 0.65 for attacked patches, 95 % interval 0.32 to 0.98"
    return "\n   ".join(["predicted, and measured:", *lines, other])


# --- the learner's file ---------------------------------------------------------------------------

def compare(what, own, expected, given, mistakes):
    """Raise Wrong unless the two tensors are the same up to rounding."""
    if own is ...:
        raise Wrong(f"{what} is still a hole: put a line in place of ...")
    own = torch.as_tensor(own).to(expected)
    if own.shape != expected.shape:
        raise Wrong(f"{what} has shape {tuple(own.shape)}, expected {tuple(expected.shape)}")
    wrong = ~((own - expected).abs() <= CLOSE)                          # nan is wrong, too
    if wrong.any():
        place = tuple(wrong.nonzero()[0].tolist())
        inputs = ", ".join(f"{name} = {x.expand(expected.shape)[place]:.6g}"
                           for name, x in given.items())
        hints = [hint for hint, x in mistakes.items() if torch.allclose(own, x, atol=CLOSE)]
        raise Wrong(f"{what}, entry {place}: {own[place]:.6g}, expected {expected[place]:.6g}"
                    + f"\n   there {inputs}" * bool(inputs)
                    + "".join(f"\n   {hint}" for hint in hints[:1]))


def judge(number, folder=FOLDER):
    """What to say about an exercise, and whether it is right."""
    file, name, check, other = EXERCISES[number]
    generator = torch.Generator().manual_seed(number)

    def random(*shape):
        return torch.randn(shape, generator=generator).double()

    try:
        names = runpy.run_path(str(folder / file))
        if check is None:
            return predictions(names), True
        for _ in range(TRIES):
            for one in check(names[name], random):
                compare(*one)
    except Wrong as e:
        return f"not yet: {e}", False
    except Exception as e:                              # whatever the learner's lines raise
        return f"not yet: {e!r}\n{traceback.format_exc(limit=-1)}", False
    return f"right: within {CLOSE:g} of {other} on {TRIES} random inputs", True


def main():
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("number", type=int, nargs="?", choices=EXERCISES, help="of the exercise")
    number = p.parse_args().number
    if number:
        text, right = judge(number)
        print(f"{number}: {text}")
        sys.exit(not right)
    for number, (file, *_) in EXERCISES.items():        # the list: a line each
        text, right = judge(number)
        print(f"{number}: {file:<18} {'done' if right else text.splitlines()[0]}", flush=True)


if __name__ == "__main__":
    common.run(main)
