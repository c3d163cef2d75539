"""Check an exercise: fill in the holes of lecture/exercises/<number>_*.py, then

    python -m lecture.exercises 3

says whether it is right, or where it first departs from this repository's own lines, with both
numbers. Five exercises: shrinkage, mu and tau, the PAP loop, a PGD step, centring a Gram matrix.
"""

import argparse
import os
import sys
import threading
import traceback
from pathlib import Path

import torch

import common
import kpca
from attention import penalty, rpc_attention, soft_threshold
from robust.attacks import project

FOLDER = Path(__file__).parent
SECONDS, TRIES, CLOSE = 10, 20, 1e-7


# --- what is right: (what it is, yours, expected) for one random input ----------------------------

def shrinkage(own, random):
    x, tau = random(4, 5), random(1).abs()
    yield "S", own(x, tau), soft_threshold(x, tau)


def mu_and_tau(own, random):
    k, lambd = random(2, 3, 5, 4), 1 + random(1).abs().item()
    mu, tau = own(k, lambd)
    yield "mu", mu, penalty(k)
    yield "tau", tau, lambd * penalty(k)


def pap(own, random):
    """Yield S, K2 and L of each of four steps, so that the first departure names its step."""
    k, v, steps = random(2, 3, 5, 4), random(2, 3, 5, 4), []
    rpc_attention(k, v, n_iter=4, lambd=1.0, trace=steps)
    found = own(k, v, penalty(k), 4)
    for i, (mine, right) in enumerate(zip(found, steps), 1):
        for name in ("S", "K2", "L"):
            yield f"step {i}, {name}", mine[name], right[name]
    yield "the number of steps", torch.tensor(len(found)), torch.tensor(4)


def pgd_step(own, random):
    clean, eps = random(2, 3, 4, 4).sigmoid(), 0.1
    x = project(clean + 0.2 * random(2, 3, 4, 4), clean, eps, True)
    grad = random(2, 3, 4, 4)
    yield "x", own(x, clean, grad, eps, 0.5), project(x + 0.5 * eps * grad.sign(), clean, eps, True)


def centring(own, random):
    x = random(6, 3)
    yield "K~", own(x @ x.mT), kpca.centre(x @ x.mT)


# number: (file, function in it, what checks it, what it is compared with)
EXERCISES = {1: ("1_shrinkage.py", "shrink", shrinkage, "attention.soft_threshold"),
             2: ("2_mu_and_tau.py", "mu_and_tau", mu_and_tau, "attention.penalty"),
             3: ("3_pap.py", "pap", pap, "attention.rpc_attention"),
             4: ("4_pgd.py", "pgd_step", pgd_step, "robust.attacks.project"),
             5: ("5_centring.py", "centre", centring, "kpca.centre")}


# --- the learner's file ---------------------------------------------------------------------------

def read_function(path, name):
    """Run the learner's file; return its function. ValueError, one line: what is wrong with it."""
    try:
        code = compile(path.read_text(), str(path), "exec")
    except SyntaxError as e:
        raise ValueError(f"{path.name}, line {e.lineno}: {e.msg}") from None
    names = {}
    exec(code, names)
    if not callable(names.get(name)):
        raise ValueError(f"{path.name} has no function {name}")
    return names[name]


def compare(what, own, expected):
    """ValueError, one line, unless the two tensors are the same up to rounding."""
    if own is ...:
        raise ValueError(f"{what} is still a hole: put a line in place of ...")
    if not isinstance(own, torch.Tensor):
        raise ValueError(f"{what} is a {type(own).__name__}, expected a tensor")
    if own.shape != expected.shape:
        raise ValueError(f"{what} has shape {tuple(own.shape)}, expected {tuple(expected.shape)}")
    wrong = ~((own - expected).abs() <= CLOSE)                          # nan is wrong, too
    if wrong.any():
        place = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(f"{what}, entry {place}: {own[place]:.6g}, expected "
                         f"{expected[place]:.6g}")


def judge(number, folder):
    """One line about an exercise, and whether it is right."""
    file, name, check, other = EXERCISES[number]
    path = folder / file
    generator = torch.Generator().manual_seed(number)
    try:
        own = read_function(path, name)
        for _ in range(TRIES):
            for one in check(own, lambda *shape: torch.randn(shape, generator=generator).double()):
                compare(*one)
    except ValueError as e:
        if path.name in str(e) or e.__traceback__.tb_next is None or not lines_of(e, path):
            return f"{number}: not yet: {e}", False
        return f"{number}: {path.name}, line {lines_of(e, path)[-1]}: {e}", False
    except Exception as e:                              # whatever the learner's lines raise
        place = f", line {lines_of(e, path)[-1]}" if lines_of(e, path) else ""
        reason = str(e).splitlines()[0] if str(e) else ""
        return f"{number}: {path.name}{place}: {type(e).__name__}: {reason}", False
    return f"{number}: right: within {CLOSE:g} of {other} on {TRIES} random inputs", True


def lines_of(error, path):
    """The lines of this file that an error passed through."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame.lineno for frame in frames if frame.filename == str(path)]


def main():
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("number", type=int, choices=EXERCISES, help="of the exercise")
    p.add_argument("--folder", type=Path, default=FOLDER, help="where the files are")
    args = p.parse_args()
    if not (args.folder / EXERCISES[args.number][0]).is_file():
        raise FileNotFoundError(f"no {EXERCISES[args.number][0]} in {args.folder}")

    # A file may never return: it is run beside, and left behind after a while.
    answer = []
    beside = threading.Thread(target=lambda: answer.append(judge(args.number, args.folder)),
                              daemon=True)
    beside.start()
    beside.join(SECONDS)
    text, right = answer[0] if answer else (
        f"{args.number}: no answer after {SECONDS} seconds: does a loop never end?", False)
    print(text, flush=True)
    if not right:
        os._exit(1) if not answer else sys.exit(1)


if __name__ == "__main__":
    common.run(main)
