"""Is Scaled Attention kernel PCA? The networks on which the authors say that the test can be made.

    python -m referee.scaled --train exact_s --epochs 3   # and other flags of train_cls.py
    python -m referee.kernel_pca --ckpt out/*_s0/*.pt --untrained --exp gamma,capture,jproj
    python -m referee.scaled --ckpt out/*_s0/*.pt --untrained --out_dir out/kpca
    python -m referee.scaled --verdict out/kpca           # tables over seeds; the verdict

Argument: v = G (I - 1_N) a cannot be solved for a, so the authors propose networks whose values are
v = G a and whose layer centres them: A (I - S) v (Eq. 12). S is learned, as a matrix or as alpha
times attention; --train uses the S of App. E.1 itself, g_j' / (N g_j), gradients through v and k.
If they are right a = G^-1 v holds eigenvectors (eig_cos, v = G a) where nulls do not. A run has the
name of its folder; runs that differ in _s<seed> are one network. The rule:
referee/results/kpca/README.md.
"""

import math
import re
import sys
from pathlib import Path

import numpy as np
import torch

import common
import train_cls
from kpca import attend, exact_scaling, log_g, log_phi2, projection_loss
from referee.kernel_pca import exp_capture, exp_gamma, exp_jproj, study
from referee.probe import RULES, capture, checkpoints, get_args, read_csv
from referee.span import NULLS, Layer
from referee.stats import paired_t, show, spread


# --- training -------------------------------------------------------------------------------------

def train(rule, flags):
    """Call train_cls.py with one of RULES in every layer; flags are its own."""
    if rule not in RULES:
        raise common.InputError(f"--train {rule}: expected one of {', '.join(RULES)}")
    sys.argv = ["train_cls.py", "--attn", rule, *flags]
    train_cls.main()


# --- experiments: as in kernel_pca.py -----------------------------------------------------

def exact_matrix(k):
    """The S of App. E.1, (..., N, N)."""
    return exact_scaling(k, torch.eye(k.shape[-2]).to(k))


def printed_error(k, v):
    """Relative error, (...), of (I - S) v with S = A / (N A^T) as printed, in v's dtype.

    inf or nan where A^T underflows.
    """
    A = (k @ k.mT / math.sqrt(k.shape[-1])).softmax(-1)
    printed = (v - A / A.mT @ v / k.shape[-2]).double()
    exact = v.double() - exact_scaling(k, v)
    return (printed - exact).norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1))


def exp_scaling(layer):
    """Is the learned S the S of App. E.1? And can that one be computed as it is printed?

    distance: |S - S_exact| / |S_exact|; permuted: the learned S with its tokens permuted; zero: 1.
    cosine: of S and S_exact as vectors. broken: share of heads where A / (N A^T) is not finite in
    float32 or float64; error: of (I - S) v with it. log g span: of largest over smallest g_j.
    """
    exact, lg = exact_matrix(layer.k), log_g(layer.k, layer.k)
    out = {"log g span": {"keys": lg.amax(-1) - lg.amin(-1)}, "broken": {}, "error": {}}
    for source, t in (("float32", torch.float32), ("float64", torch.float64)):
        error = printed_error(layer.k.to(t), layer.raw["learned"].to(t))
        out["broken"][source] = 1 - error.isfinite().double()
        out["error"][source] = error.where(error.isfinite(), math.nan)
    if not layer.scaled:
        return out

    S = layer.heads.S[None].expand_as(exact)
    order = torch.randperm(S.shape[-1], generator=torch.Generator().manual_seed(0)).to(S.device)
    out |= {"distance": {"zero": torch.ones_like(lg[..., 0])}, "cosine": {}}
    for source, T in (("learned", S), ("permuted", S[..., order, :][..., order])):
        out["distance"][source] = (T - exact).norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1))
        size = T.norm(dim=(-2, -1)) * exact.norm(dim=(-2, -1))
        out["cosine"][source] = (T * exact).sum((-2, -1)) / size.clamp(min=1e-300)
    return out


def exp_centred(layer):
    """The other half of the answer: values (I - S) V with the exact S, where training had none.

    S = I - G H G^-1, so they are G H a: eig_cos of a = H G^-1 (I - S) V is that of V to the digit,
    and EV is of centred w_d. J: as printed.
    """
    heads, S = layer.heads, exact_matrix(layer.heads.k)
    raw = layer.heads.raw
    centred = Layer(heads._replace(v=raw - S @ raw, S=S), layer.name, layer.key)
    gamma, ev = exp_gamma(centred), exp_capture(centred)["EV"]
    J = exp_jproj(centred)["J"]
    return {m: gamma[m] for m in ("eig_cos", "eig_cos, v = G a")} | {"EV": ev, "J": J}


NULL_NAMES = ("random matrix", "other head", "noise")                       # of NULLS, in words
CLAIM = "eig_cos, v = G a"
EXPERIMENTS = {"scaling": exp_scaling, "centred": exp_centred}


def fresh(args):
    """J of Eq. 13 at every checkpoint: on one fixed batch of images and on a fresh one each time.

    Returns rows (run, step, J fixed, J fresh), means over images, heads and layers; printed too.
    """
    n, points, rows = args.images, len(args.ckpt) + len(args.ckpt) * args.untrained, []
    args.images = n * (points + 1)
    for i, point in enumerate(checkpoints(args)):
        J = []
        for images in (point.inputs[:n], point.inputs[n * (i + 1):n * (i + 2)]):
            layers = [projection_loss(log_phi2(h.q, h.k), attend(h.q, h.k, h.v))["J"].mean()
                      for h in capture(point.model, images)]
            J.append(torch.stack(layers).mean().item())
        rows.append((point.run, point.step, *J))
    args.images = n
    cells = [[run, step, f"{a:.4g}", f"{b:.4g}"] for run, step, a, b in rows]
    print("\n" + common.table(cells, ["run", "step", "J, fixed batch", "J, fresh batches"]))
    return rows


# --- tables over seeds ----------------------------------------------------------------------------

def read(path):
    """Rows of a CSV file of a study, with "network", the run without its seed."""
    rows = read_csv(path)
    if not rows:
        raise common.InputError(f"{path}: no such file, or empty; this study's commands write it")
    return [{**row, "network": re.sub(r"_s\d+$", "", row["run"])} for row in rows]


def values(rows, network, measure, source, last=True):
    """(mean, standard error over images) of every seed, all layers: of the last step or step 0."""
    mine = [r for r in rows if (r["network"], r["measure"], r["source"], r["layer"])
            == (network, measure, source, "all")]
    ends = {r["run"]: max(q["step"] for q in mine if q["run"] == r["run"]) for r in mine}
    return np.array([(r["mean"], r["se"]) for r in mine
                     if r["step"] == (ends[r["run"]] if last else 0)]).reshape(-1, 2)


def interval(x):
    """Mean and 95 % t-interval over seeds, as text; of a single seed 1.96 errors over images."""
    if not len(x):
        return "-"
    difference = paired_t(x[:, 0])
    if len(x) > 1:
        return show(difference, 4)
    mean, half = difference.mean, 1.96 * x[0, 1]
    return f"{mean:+.4f} ({mean - half:+.4f} to {mean + half:+.4f} images)"


def heads_above(folder, network, measure, margin=0.1):
    """Share of heads in which the learned values beat every null by the margin, last step."""
    heads = {}
    for r in read(folder / "gamma_axes.csv"):
        if r["network"] == network and r["measure"] == f"{measure} by head" and r["layer"] != "all":
            heads.setdefault((r["run"], r["layer"], r["axis"]), {})[r["source"]] = r["mean"]
    return np.mean([h["learned"] >= max(h[null] for null in NULLS if null in h) + margin
                    for h in heads.values()])


def tables(folder, experiment, measure):
    """Networks in rows, twice: the measure and its nulls; learned minus null with intervals."""
    rows, cells, differences = read(folder / f"{experiment}.csv"), [], []
    for network in dict.fromkeys(r["network"] for r in rows if r["measure"] == measure):
        ends = values(rows, network, measure, "learned")
        start = values(rows, network, measure, "learned", last=False)
        columns = [start, ends, *(values(rows, network, measure, null) for null in NULLS)]
        cells.append([network, len(ends), *(spread(x[:, 0], ".4f") or "-" for x in columns)])
        line = [network, *(interval(values(rows, network, f"{measure}: learned -", null))
                           for null in NULLS)]
        if measure.startswith("eig_cos"):
            line.append(f"{100 * heads_above(folder, network, measure):.0f} %")
        differences.append(line)
    header = ["network", "n", "before training", "trained", *NULL_NAMES]
    print(f"\n{measure}\n\n" + common.table(cells, header))
    header = ["trained", *(f"- {name}" for name in NULL_NAMES), "heads .1 above all"]
    print("\n" + common.table(differences, header[:len(differences[0])]))


def verdict(folder):
    """Print tables and, by the rule of results/kpca/README.md, what they say of the claim."""
    for experiment, measure in (("gamma", CLAIM), ("gamma", "eig_cos"), ("capture", "EV")):
        tables(folder, experiment, measure)

    # The claim is about networks with Scaled Attention, which alone have this measure.
    rows, holds, fails = read(folder / "gamma.csv"), [], []
    for network in dict.fromkeys(r["network"] for r in rows if r["measure"] == CLAIM):
        start, end = (values(rows, network, CLAIM, "learned", last)[:, 0]
                      for last in (False, True))
        if not len(start):
            raise common.InputError(f"{folder}/gamma.csv: no step 0 of {network}, so whether it "
                             "rises cannot be said: --untrained writes it")
        start, end = start.mean(), end.mean()
        above = {null: values(rows, network, f"{CLAIM}: learned -", null)[:, 0].mean()
                 for null in NULLS}
        holds.append(heads_above(folder, network, CLAIM) >= 0.5 and end > start)
        fails.append(max(above.values()) <= 0.02)
        print(f"\n{network}: {'rises' if end > start else 'falls'} in training; beaten by more "
              f"than .02: {', '.join(n for n in NULLS if above[n] > 0.02) or 'no null'}")
    words = {(True, False): "the claim holds", (False, True): "the claim does not hold"}
    print("\nVerdict:", words.get((all(holds), all(fails)), "in between, see the tables"))


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--train"]:
        return train(argv[1], argv[2:])
    if argv[:1] == ["--verdict"]:
        return verdict(Path(argv[1]))
    args = get_args(__doc__, EXPERIMENTS | {"fresh": fresh}, argv)
    if "fresh" in args.exp:
        fresh(args)
    args.exp = [name for name in args.exp if name != "fresh"]
    if args.exp:
        study(args, EXPERIMENTS)


if __name__ == "__main__":
    torch.set_num_threads(1)
    common.run(main)
