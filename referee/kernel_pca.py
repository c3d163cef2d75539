"""Do trained networks perform kernel PCA? Every claim of the paper, measured beside its nulls.

    python -m referee.kernel_pca --ckpt out/softmax --exp capture,gamma     # train_cls.py
    python -m referee.kernel_pca --ckpt out/softmax/*.pt --exp jproj        # over training
    python -m referee.plot kpca out/kpca                                          # figures

Claims: Teo & Nguyen 2024, sections 2.2, App. C, E.2. Theory: kpca.py. Beside the learned values
stand the values of the next head (other), the same input through a random matrix (x W), random
numbers (iid), and the values of kernel PCA itself. Published scores: published_scores.py.

EV, frac and overlap ask which subspace of feature space values span (span.py), eig_cos
whether they hold eigenvectors. None changes with v -> v R, which the output matrix undoes.

Shapes: q (..., M, D), k (..., N, D), v (..., N, Dv), float64; leading ones: draws of a null,
images, heads.
"""

import inspect
import math
from pathlib import Path

import torch
from tqdm import tqdm

import common
from kpca import (a_hat, attend, basis, centre, coefficients, eigen_cosine, key_scale, log_gram,
                  log_phi2, projection_loss, ritz, theoretical_values)
from referee.probe import (capture, checkpoints, chunks, get_args, print_table, standardise,
                                   summarise, write_tables)
from referee.span import (NULLS, Layer, explained_variance, query_share, token_overlap)

BY_HEAD = ("eig_cos", "eig_cos, v = G a")
COMPARED = ("EV", "frac", *BY_HEAD, "overlap")


# --- experiments ----------------------------------------------------------------------------------
# Each takes a Layer and returns {measure: {source: tensor}}, tensors (draws, B, H) or, for curves
# over axes, (draws, B, H, d). The docstring is printed above the table.

def exp_jproj(layer):
    """The projection error (Eq. 13), claim 2.2.1: J = mean(|phi(q)|^2 - |h|^2) falls in training.

    J: as printed; a true projection has J >= 0, so a negative one says that h is none. phi2, h2:
    its terms, means over tokens. above: share of tokens with |h| > |phi(q)|. rel_phi, rel_h:
    |phi2 - h2| over either. |h|^2 has no scale (v c and W_O / c are the same network); frac has
    one: the share of |phi(q)|^2 inside span{w_d}, in [0, 1]; 1 - frac is J with the scale fixed.
    It cannot test kernel PCA, whose own frac may lie below that of noise: its axes are centred.
    ceiling: inside the span of all keys, for any v.
    """
    lp = log_phi2(layer.q, layer.k)
    values = layer.values | {"KPCA": theoretical_values(layer.axes, layer.dv)}
    terms = {source: projection_loss(lp, attend(layer.q, layer.k, v))
             for source, v in values.items()}
    out = {m: {source: t[m] for source, t in terms.items()} for m in terms["learned"]}
    out["phi2"] = {"learned": out["phi2"]["learned"]}                       # the same for all
    return out | exp_frac(layer)


def exp_frac(layer):
    """Share of |phi(q)|^2 inside span{w_d}."""
    frac = {source: query_share(layer.span, Q).mean(-1) for source, Q in layer.bases.items()}
    return {"frac": frac | {"ceiling": query_share(layer.span).mean(-1)}}


def exp_gamma(layer):
    """Are the learned values eigenvectors (Eq. 11), claim 2.2.2: K~ a = N lambda a?

    a = H G^-1 v with the pseudo-inverse H of I - 1_N, which has no inverse. eig_cos: cosine between
    a and K~ a, 1 for eigenvectors only, mean over axes after a was turned so that a^T K~ a is
    diagonal: exact kernel PCA has 1 in any gauge. K~ near a multiple of H makes it near 1 for noise
    too. v = G a: scaled attention, V before I - S. lambda: the first Dv eigenvalues mu_d / N.
    """
    axes, d, N = layer.axes, min(layer.dv, layer.k.shape[-2]), layer.k.shape[-2]

    def cosine(a):
        return eigen_cosine(axes, ritz(axes, a))["eig_cos"]

    out = {"eig_cos": {source: cosine(a_hat(v, axes.log_g)) for source, v in layer.values.items()}}
    if layer.scaled:
        out["eig_cos, v = G a"] = {source: cosine(a_hat(v, axes.log_g, scaled=True))
                                   for source, v in layer.raw.items()}

    # Kernel PCA's own vectors and eigenvalues, where they are resolved.
    resolved = torch.arange(d, device=axes.sigma.device) < axes.rank[..., None]
    out["eig_cos"]["KPCA"] = cosine(turned(axes.U[..., :d] * resolved[..., None, :]))
    lam = (-axes.c).exp() * axes.sigma[..., :d] / N
    out["lambda"] = {"KPCA": lam.where(resolved, math.nan)}
    means = {m: {s: t.nanmean(-1) for s, t in sources.items()} for m, sources in out.items()}
    return means | {f"{m} by axis": out[m] for m in ("eig_cos", "lambda")}


def eigenvalue_statistics(mu):
    """Four numbers of descending eigenvalues (..., D): max, min, mean, lower median."""
    median = mu.median(-1).values
    return {"max": mu[..., 0], "min": mu[..., -1], "mean": mu.mean(-1), "median": median}


def exp_eigstats(layer):
    """The first D eigenvalues mu_d = N lambda_d of K~: the paper has 648.46, 4.65, 40.07, 17.73.

    None can exceed 1 / min_j g_j <= 1 (bound). Rows: max, min, mean and lower median, averaged over
    layers and heads. Right: keys standardised as in published code.
    """
    out = {}
    for source, k in (("as they are", layer.k), ("standardised", standardise(layer.k))):
        lg, c = key_scale(k)
        spectrum = torch.linalg.eigvalsh(centre((log_gram(k) + c[..., None]).exp())).flip(-1)
        mu = (-c).exp() * spectrum.clamp(min=0)
        rows = eigenvalue_statistics(mu[..., :k.shape[-1]]) | {"bound": (-lg.amin(-1)).exp()}
        for m, t in rows.items():
            out.setdefault(m, {})[source] = t
    return out


def turned(vectors):
    """vectors (..., N, d) times a random rotation: exact kernel PCA may as well have these."""
    d, random = vectors.shape[-1], torch.Generator().manual_seed(1)
    turn = torch.linalg.qr(torch.randn(d, d, generator=random, dtype=torch.float64))[0]
    return vectors @ turn.to(vectors)


def theory_by_token(layer):
    """The theoretical values (..., N, d), scaled so that the largest 1/g_j is 1."""
    scale = (layer.axes.log_g.amin(-1, keepdim=True) - layer.axes.log_g).exp()
    return scale[..., None] * coefficients(layer.axes, min(layer.dv, layer.k.shape[-2]))


def exp_values(layer):
    """Do learned values span what the theoretical ones span? KPCA: exactly those, axes turned.

    overlap: sum of cos^2 of the principal angles of the two column spaces in token space, over Dv;
    chance Dv/N.
    """
    theory = theory_by_token(layer)
    values, tokens = {**layer.values, "KPCA": turned(theory)}, basis(theory)
    return {"overlap": {source: token_overlap(basis(v), tokens) for source, v in values.items()}}


def exp_capture(layer):
    """How much of the keys' variance, and of the queries, do values catch? W_O cannot change this.

    EV: share of the keys' variance in feature space inside span{w_d}; best: only kernel PCA's first
    Dv axes reach it. eta: (EV - EV of x W) / (best - EV of x W) in percent; "flat": less than 0.02
    to win. Its error is over images, not over the 3 random W, which all images share. frac: share
    of |phi(q)|^2 inside; ceiling: in the span of all keys.
    """
    mu = layer.axes.sigma.clamp(min=0)
    ev = {source: explained_variance(layer.span, Q) for source, Q in layer.bases.items()}
    ev["best"] = mu[..., :layer.dv].sum(-1) / mu.sum(-1).clamp(min=1e-300)
    return exp_frac(layer) | {"EV": ev}


def measure(layers, experiments):
    """{(experiment, measure, source, layer): mean over draws and heads, (B,) or curves (B, d)}.

    What is COMPARED stands there also as "learned - source", eig_cos also as a curve over heads.
    """
    out = {}
    for layer in layers:
        for name, experiment in experiments.items():
            found = {m: {source: t.nanmean(0) for source, t in sources.items()}
                     for m, sources in experiment(layer).items()}
            for m in [m for m in COMPARED if m in found]:
                found[f"{m}: learned -"] = {null: found[m]["learned"] - found[m][null]
                                            for null in NULLS if null in found[m]}
            for m, sources in found.items():
                for source, t in sources.items():                           # (B, H) or (B, H, d)
                    out[name, m, source, layer.name] = t.nanmean(1).cpu()
                    if m in BY_HEAD:
                        out[name, f"{m} by head", source, layer.name] = t.cpu()
    return out


# --- the command ----------------------------------------------------------------------------------

EXPERIMENTS = {"jproj": exp_jproj, "gamma": exp_gamma, "eigstats": exp_eigstats,
               "values": exp_values, "capture": exp_capture}


def examine(point, experiments, args, device):
    """Run experiments on all layers of a Point: {name: rows of `summarise`}."""
    model, depth = point.model.to(device), point.model.config.depth
    pieces, short = {}, set()
    for start, inputs in chunks(point, device, whole="losses" in experiments):
        for i, heads in enumerate(capture(model, inputs)):
            layer = Layer(heads, str(i), (i, start))
            for key, t in measure([layer], experiments).items():
                pieces.setdefault(key, []).append(t)
            rank = int(layer.axes.rank.min())
            if rank < min(layer.dv, layer.k.shape[-2] - 1) and i not in short:
                short.add(i)
                tqdm.write(f"layer {i}: keys so long that float64 resolves {rank} axes in some "
                           f"head, fewer than the {layer.dv} asked; the others count as zero")
    results = {name: {} for name in experiments}
    for (name, *key), t in pieces.items():
        results[name][tuple(key)] = torch.cat(t)

    # eta: a ratio of means over images, so it can be had only here.
    for i in map(str, range(depth)) if "capture" in experiments else ():
        capture_of = results["capture"]
        ev, null, best = (capture_of["EV", s, i] for s in ("learned", "x W", "best"))
        room = (best - null).mean()
        capture_of["eta", "learned", i] = 100 * (ev - null) / (room if room >= 0.02 else math.nan)
    return {name: summarise(found, point) for name, found in results.items()}


def study(args, experiments):
    """Run experiments on every checkpoint, print their tables, write their CSV files."""
    device, _, _ = common.setup(args.device)
    experiments = {name: experiments[name] for name in args.exp}
    rows, out = {name: [] for name in experiments}, Path(args.out_dir)
    for point in checkpoints(args):
        for name, own in examine(point, experiments, args, device).items():
            rows[name] += own
            if point.last:
                print_table(f"{name}: {point.where}", inspect.cleandoc(experiments[name].__doc__),
                            own)
    for name, own in rows.items():
        write_tables(out / name, own)
    print(f"\nCSV files in {out}; figures: python -m referee.plot kpca {out}")


def main(argv=None):
    study(get_args(__doc__, EXPERIMENTS, argv), EXPERIMENTS)


if __name__ == "__main__":
    torch.set_num_threads(1)             # small matrices gain nothing from threads
    common.run(main)
