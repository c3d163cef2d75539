"""Check an exercise. Fill the holes (...) of lecture/exercises/<number>_*.py, then run

    python -m lecture.exercises 5       # checks exercise 5; without a number: lists all exercises

It prints whether your lines are right. If not, it prints the first wrong entry, the expected value,
the inputs at that place and, for a common mistake, a hint.
"""

import argparse
import runpy
import sys
import traceback
from pathlib import Path

import torch

import common
import kpca
from attention import (FORMS, layer_inputs, penalty, rpc_attention, soft_threshold,
                       softmax_attention)
from data.shapes import load_shapes
from robust.patches import corrupt_patches
from studies.where_is_s import auroc, first_layer, location
from vit import classifier_from_checkpoint

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


def mu_and_tau(own, random):
    k, lambd = random(2, 3, 5, 4), 1 + random(1).abs().item()
    m, H = k.abs().mean((2, 3), keepdim=True), k.shape[1]
    mu, tau = own(k, lambd)
    right = penalty(k)
    given = dict(m=m, H=torch.tensor(H), lambd=torch.tensor(lambd))
    yield "mu", mu, right, given, {
        "this is mu with the width D of a head (variant `paper`); `released` has C": right / H,
        "the 4 is missing": 4 * right, "m is in the numerator": H * m / 4,
        "m is a mean of |k|, not a sum": right / k[0, 0].numel()}
    yield "tau", tau, lambd * right, given | dict(mu=right), {
        "lambda / mu is the variant `paper`; `released` has lambda times mu": lambd / right,
        "mu / lambda is wrong: tau must grow with lambda": right / lambd}


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


def centring(own, random):
    x = random(6, 3)
    G = x @ x.mT
    rows, columns, all_ = G.mean(0), G.mean(1, keepdim=True), G.mean()
    yield "G~", own(G), kpca.centre(G), dict(G=G), {
        "only columns are centred": G - rows, "only rows are centred": G - columns,
        "the mean of all entries must be added back": G - rows - columns,
        "this subtracts one mean; each row and each column has its own mean": G - all_}


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
    q, k = random(5, 4), random(6, 4)
    v = own(q, k)
    if v is ...:
        raise Wrong("v is still a hole: put a line in place of ...")
    J = kpca.projection_error(q, k, kpca.attend(q, k, torch.as_tensor(v).to(k)))
    if not J < 0:
        raise Wrong(f"J = {J:.6g}, expected a number below 0\n   only |h|^2 depends on v")
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


# number: (file, function in it, its check)
EXERCISES = {1: ("1_centred_query.py", "centred_query", centred_query),
             2: ("2_negative_j.py", "values", negative_j),
             3: ("3_doubled_keys.py", None, None),
             4: ("4_predict.py", None, None),
             5: ("5_whole_tokens.py", "whole_tokens", whole_tokens),
             6: ("6_centring.py", "centre", centring),
             7: ("7_shrinkage.py", "shrink", shrinkage),
             8: ("8_mu_and_tau.py", "mu_and_tau", mu_and_tau),
             9: ("9_pap.py", "pap", pap)}


# --- predict, then measure ------------------------------------------------------------------------

def shipped_network():
    """Load weights/shapes_rpc.pt in eval mode."""
    checkpoint = common.load(FOLDER.parents[1] / "weights/shapes_rpc.pt")
    return classifier_from_checkpoint(checkpoint).requires_grad_(False)


def measure_doubled_keys():
    """Return the answers of exercise 3: {name in the file: number}."""
    found = {}
    attn, x = layer_inputs(shipped_network(), load_shapes("test", 64).images / 255)[0]
    _, k, v = attn.project(x)
    for form in ("released", "paper"):
        mu = [penalty(keys, mu_dim=FORMS[form]["mu_dim"]) for keys in (k, 2 * k)]
        ratio = (mu[1] / mu[0]).mean().item()
        found[f"tau_{form}"] = ratio if FORMS[form]["threshold"] == "times" else 1 / ratio
    for form in ("released", "paper"):
        steps = []
        rpc_attention(2 * k, v, lambd=4, **FORMS[form], trace=steps)
        found[f"share_{form}"] = 100 * (steps[-1]["S"] != 0).double().mean().item()
    return found


def measure_auc():
    """Return the answers of exercise 4: {name in the file: AUC of |S| for corrupted patches}."""
    model, split, found = shipped_network(), load_shapes("test", 100), {}
    for name, kind in {"auc_of_pixels": "pixels", "auc_of_attacked": "adversarial"}.items():
        corrupted, hit = corrupt_patches(split.images / 255, kind, patch=4, model=model,
                                         labels=split.labels)
        _, steps = first_layer(model, corrupted)
        found[name] = auroc(location(steps[-1]["S"]).flatten(), hit.flatten())
    return found


MEASURED = {3: (measure_doubled_keys, ""),
            4: (measure_auc, "three other networks have 0.72, 0.73 and 0.50 for attacked patches")}


def predictions(number, names):
    """Return the learner's predictions and the measured values, as text."""
    measure, note = MEASURED[number]
    holes = [name for name, value in names.items() if value is ... and not name.startswith("_")]
    if holes:
        raise Wrong(f"no prediction yet for {', '.join(holes)}: put a number in place of ...")
    lines = [f"{name}: you predicted {names[name]}, measured {value:.2f}"
             for name, value in measure().items()]
    return "\n   ".join(["predicted and measured:", *lines, *[note] * bool(note)])


# --- the learner's file ---------------------------------------------------------------------------

def compare(what, own, expected, given, mistakes):
    """Raise Wrong unless the tensors `own` and `expected` agree up to rounding."""
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
                    + f"\n   inputs there: {inputs}" * bool(inputs)
                    + "".join(f"\n   {hint}" for hint in hints[:1]))


def judge(number, folder=FOLDER):
    """Return a message about an exercise, and whether the exercise is solved."""
    file, name, check = EXERCISES[number]
    generator = torch.Generator().manual_seed(number)

    def random(*shape):
        return torch.randn(shape, generator=generator).double()

    try:
        names = runpy.run_path(str(folder / file))
        if check is None:
            return predictions(number, names), True
        for _ in range(TRIES):
            for one in check(names[name], random):
                compare(*one)
    except Wrong as e:
        return f"not yet: {e}", False
    except Exception as e:                              # the learner's lines may raise anything
        return f"not yet: {e!r}\n{traceback.format_exc(limit=-1)}", False
    return f"right, on {TRIES} random inputs", True


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
    for number, (file, *_) in EXERCISES.items():        # the list: one line per exercise
        if number in MEASURED:                          # the list shows no measured value
            state = f"predict, then measure: python -m lecture.exercises {number}"
        else:
            text, right = judge(number)
            state = "done" if right else text.splitlines()[0]
        print(f"{number}: {file:<20} {state}", flush=True)


if __name__ == "__main__":
    common.run(main)
