"""Do trained networks perform kernel PCA? Every claim of the paper, measured beside its nulls.

    python -m studies.kernel_pca --ckpt out/softmax --exp capture,gamma   # train_cls.py's networks
    python -m studies.kernel_pca --ckpt out/a/step_*.pt --exp jproj       # over training
    python -m studies.kernel_pca trained --networks softmax --seeds 50    # trains and measures one
    python -m studies.kernel_pca --rows studies/results/kpca              # tables of stored rows

Claims: Teo & Nguyen 2024, sections 2.2, App. C, E. Theory: kpca.py. Beside the learned values stand
the values of the next head (other), the same input through random matrices (x W), random numbers
(iid), the values of kernel PCA itself and, in `trained`, those of the best map of the input that
was found: v = x W + b, the same for all images as the trained one is, fitted on training images to
what is measured. Without it "as a random matrix" says little: no map might score more. What is
found is a lower bound of what can be had. Published scores: published_scores.py.

EV and overlap ask which subspace of feature space values span (span.py), eig_cos whether they
hold eigenvectors. None changes with v -> v R, which the output matrix undoes.

Shapes: q (..., M, D), k (..., N, D), v (..., N, Dv), float64; leading ones: draws of a null,
images, heads.
"""

import argparse
import inspect
import math
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

import common
from data.shapes import load_shapes
from kpca import (a_hat, attend, basis, centre, coefficients, eigen_cosine, key_scale, log_gram,
                  log_phi2, projection_loss, ritz, theoretical_values)
from studies.arms import call, into
from studies.probe import (capture, get_args, load_images, load_model, points, print_table,
                           read_csv, summarise, untrained, write_csv)
from studies.span import NULLS, Layer, explained_variance, token_overlap, value_axes
from studies.stats import paired_t, show, spread

COMPARED = ("EV", "eig_cos", "eig_cos, v = G a", "overlap")


# --- experiments ----------------------------------------------------------------------------------
# Each takes a Layer and returns {measure: {source: (draws, B, H)}}. The docstring is printed above
# the table.

def exp_jproj(layer):
    """The projection error (Eq. 13), claim 2.2.1: J = mean(|phi(q)|^2 - |h|^2) falls in training.

    J: as printed; a true projection has J >= 0, so a negative one says that h is none. phi2, h2:
    its terms, means over tokens. above: share of tokens with |h| > |phi(q)|. rel_phi, rel_h:
    |phi2 - h2| over either. |h|^2 has no scale: v c and W_O / c are the same network.
    """
    lp = log_phi2(layer.q, layer.k)
    values = layer.values | {"KPCA": theoretical_values(layer.axes, layer.dv)}
    terms = {source: projection_loss(lp, attend(layer.q, layer.k, v))
             for source, v in values.items()}
    out = {m: {source: t[m] for source, t in terms.items()} for m in terms["learned"]}
    out["phi2"] = {"learned": out["phi2"]["learned"]}                       # the same for all
    return out


def exp_gamma(layer):
    """Are the learned values eigenvectors (Eq. 11), claim 2.2.2: K~ a = N lambda a?

    a = H G^-1 v with the pseudo-inverse H of I - 1_N, which has no inverse. eig_cos: cosine between
    a and K~ a, 1 for eigenvectors only, mean over axes after a was turned so that a^T K~ a is
    diagonal: exact kernel PCA has 1 in any gauge. K~ near a multiple of H makes it near 1 for noise
    too. v = G a: scaled attention, V before I - S. lambda: the first Dv eigenvalues mu_d / N.
    """
    axes, d, N = layer.axes, min(layer.dv, layer.k.shape[-2]), layer.k.shape[-2]

    def cosine(a):
        return eigen_cosine(axes, ritz(axes, a))["eig_cos"].nanmean(-1)

    out = {"eig_cos": {source: cosine(a_hat(v, axes.log_g)) for source, v in layer.values.items()}}
    if layer.scaled:
        out["eig_cos, v = G a"] = {source: cosine(a_hat(v, axes.log_g, scaled=True))
                                   for source, v in layer.raw.items()}

    # Kernel PCA's own vectors and eigenvalues, where they are resolved.
    resolved = torch.arange(d) < axes.rank[..., None]
    out["eig_cos"]["KPCA"] = cosine(turned(axes.U[..., :d] * resolved[..., None, :]))
    lam = (-axes.c).exp() * axes.sigma[..., :d] / N
    out["lambda"] = {"KPCA": lam.where(resolved, math.nan).nanmean(-1)}
    return out


def standardise(x):
    """Mean 0 and variance 1 (unbiased) of every token's D numbers, as published code has q, k.

    A token whose numbers are all the same becomes zero.
    """
    x = x - x.mean(-1, keepdim=True)
    size = x.norm(dim=-1, keepdim=True) / math.sqrt(max(x.shape[-1] - 1, 1))
    return x / size.clamp(min=torch.finfo(x.dtype).tiny)


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
    """How much of the keys' variance do values catch? The output matrix cannot change this.

    EV: share of the keys' variance in feature space inside span{w_d}; best: only kernel PCA's first
    Dv axes reach it.
    """
    mu = layer.axes.sigma.clamp(min=0)
    ev = {source: explained_variance(layer.span, Q) for source, Q in layer.bases.items()}
    ev["best"] = mu[..., :layer.dv].sum(-1) / mu.sum(-1).clamp(min=1e-300)
    return {"EV": ev}


EXPERIMENTS = {"jproj": exp_jproj, "gamma": exp_gamma, "eigstats": exp_eigstats,
               "values": exp_values, "capture": exp_capture}


def measure(layers, experiments):
    """{(experiment, measure, source, layer): mean over draws and heads, (B,)}.

    What is COMPARED stands there also as "learned - source".
    """
    out = {}
    for layer in layers:
        for name, experiment in experiments.items():
            found = {m: {source: t.nanmean(0) for source, t in sources.items()}
                     for m, sources in experiment(layer).items()}
            for m in [m for m in COMPARED if m in found]:
                found[f"{m}: learned -"] = {null: found[m]["learned"] - found[m][null]
                                            for null in NULLS if null in found[m]}
            out |= {(name, m, source, layer.name): t.nanmean(1)
                    for m, sources in found.items() for source, t in sources.items()}
    return out


# --- the best map of the input that can be found --------------------------------------------------

FIT_IMAGES, PIECE, ROUNDS = 1000, 50, 5             # to fit on; in a step; rounds over all of them


def frame(A):
    """An orthonormal basis of A's columns, which autograd can follow. A: (..., N, d), full rank."""
    return torch.linalg.qr(A / A.norm(dim=-2, keepdim=True))[0]


def eigenvectors(layer, v):
    """Overlap of span{a} and span{K~ a}, (..., B, H): 1 if a's columns span eigenvectors."""
    Q = frame(a_hat(v, layer.axes.log_g))
    return token_overlap(Q, frame(layer.axes.G @ Q))


def variance(layer, v):
    """EV of span{w_d}, (..., B, H)."""
    return explained_variance(layer.span, frame(value_axes(layer.span, v)))


def overlap(layer, v):
    """Overlap of v's columns with those of the theoretical values, (..., B, H)."""
    return token_overlap(frame(v), basis(theory_by_token(layer)))


FITTED = {"eig_cos": eigenvectors, "EV": variance, "overlap": overlap}      # what is fitted to what


def mapped(layer, W):
    """v = x W + b of every head, (B, H, N, Dv), times I - S if scaled. W: (H, C + 1, Dv)."""
    v = F.pad(layer.heads.x, (0, 1), value=1.0)[:, None] @ W
    return v - layer.heads.S @ v if layer.scaled else v


def fit(score, pieces):
    """Find the W whose v = x W + b have the largest mean score on these Layers, by Adam."""
    dv, (_, heads, _, _), width = pieces[0].dv, pieces[0].heads.k.shape, pieces[0].heads.x.shape[-1]
    random = torch.Generator().manual_seed(1)
    W = torch.randn(heads, width + 1, dv, generator=random, dtype=torch.float64) / width ** 0.5
    W.requires_grad_()
    optimizer = torch.optim.Adam([W], lr=0.03)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, ROUNDS * len(pieces))
    for layer in pieces * ROUNDS:
        optimizer.zero_grad()
        (-score(layer, mapped(layer, W)[None]).mean()).backward()
        optimizer.step()
        schedule.step()
    return W.detach()


def fitted_maps(model, names):
    """For each layer {what it is fitted to: W}, on training images."""
    images = load_shapes("train", FIT_IMAGES, model.config.image_size).images
    captured = [capture(model, piece.float() / 255) for piece in images.split(PIECE)]
    maps = []
    for i in range(model.config.depth):
        pieces = [Layer(heads[i], str(i), (i, n * PIECE)) for n, heads in enumerate(captured)]
        maps.append({name: fit(FITTED[name], pieces) for name in names})
    return maps


# --- networks, checkpoint by checkpoint -----------------------------------------------------------

def examine(model, images, experiments, maps=None, draws=3):
    """Run experiments on all layers of a model: {what `measure` has as keys: (images,)}.

    maps: of `fitted_maps`, whose values are sources, too. draws: of the random matrix. Images come
    in pieces that keep a matrix of all heads at 2 MB, but for what is no mean over images.
    """
    c, n, pieces = model.config, len(images), {}
    size = max(1, 2 ** 18 // (c.num_heads * c.num_tokens ** 2))
    size = n if "losses" in experiments else size
    for start in tqdm(range(0, n, size), leave=False):
        for i, heads in enumerate(capture(model, images[start:start + size])):
            layer = Layer(heads, str(i), (i, start), draws)
            layer.values |= {f"fitted to {name}": mapped(layer, W)[None]
                             for name, W in (maps[i] if maps else {}).items()}
            for key, t in measure([layer], experiments).items():
                pieces.setdefault(key, []).append(t)
    return {key: torch.cat(t) for key, t in pieces.items()}


def study(args, experiments):
    """Run experiments on every checkpoint, print their tables, write their CSV files."""
    experiments = {name: experiments[name] for name in args.exp}
    rows = {name: [] for name in experiments}
    for run, step, model, images in points(args):
        found = examine(model, images, experiments)
        for name, experiment in experiments.items():
            own = summarise({key[1:]: t for key, t in found.items() if key[0] == name}, run, step)
            print_table(f"{name}: {run}, step {step}, {model.config.attn}, {len(images)} images; "
                        "mean ± standard error over them", inspect.cleandoc(experiment.__doc__),
                        own)
            rows[name] += own
    for name, own in rows.items():
        write_csv(args.out_dir / f"{name}.csv", own)
    print(f"\nCSV files in {args.out_dir}")


# --- networks that are trained for this question: studies/results/criterion/plan.md ---------------

NETWORKS = {"softmax": range(50, 55), "symmetric": range(50, 55), "scaled_s": range(50, 53),
            "scaled_alpha": range(50, 53)}
STAGES = (0, 250, 750, 2000)                        # steps: before training, 1, 3 and 8 epochs
OUTCOMES = ("eig_cos", "EV", "overlap")


def stage(folder, attn, seed, step):
    """Train one schedule of 8 epochs as far as this step, and give the model there.

    Each stage is kept, as step_<n>.pt: last.pt goes on. Step 0 is the network that the seed draws.
    """
    at = folder / f"step_{step or STAGES[1]}.pt"
    if not at.exists():
        call("train_cls.py", "--attn", attn, "--epochs", 8, "--seed", seed, "--max_steps",
             step or STAGES[1], *into(folder))
        shutil.copy(folder / "last.pt", at)
    model, checkpoint = load_model(at)
    if checkpoint["step"] != (step or STAGES[1]):
        raise common.InputError(f"{at} is of step {checkpoint['step']}: remove {folder}")
    return untrained(model, checkpoint) if step == 0 else (model, checkpoint)


def measured(model, checkpoint, run, step, last=True, num_images=64, draws=20):
    """Rows of one network at one step: each measure beside its nulls and what a map attains."""
    images, _ = load_images(checkpoint, model.config, num_images)
    many, labels = load_images(checkpoint, model.config, 1000)
    maps = fitted_maps(model, OUTCOMES if last else OUTCOMES[:1])
    experiments = {name: EXPERIMENTS[name] for name in ("gamma", "values", "capture")}
    found = examine(model, images, experiments, maps, draws)
    with torch.no_grad():
        top1 = 100 * (model(many).argmax(1) == labels).double().mean().item()
    return summarise({key[1:]: t for key, t in found.items()}, run, step) + [
        dict(run=run, step=step, layer="all", measure="top1", source="learned", mean=top1,
             se=math.nan, images=len(many))]


def trained(argv):
    """Train the networks that lack, measure them at every stage, and say what the rows say."""
    p = argparse.ArgumentParser(prog="kernel_pca trained", description=trained.__doc__,
                                allow_abbrev=False)
    p.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    p.add_argument("--seeds", nargs="+", type=common.NATURAL, help="default: 50 to 54; scaled: 52")
    p.add_argument("--ckpt", nargs="+", type=Path, default=[], help="measure these instead, into "
                   "taken.csv")
    p.add_argument("--out_dir", type=Path, default=Path("out/kpca"))
    args = p.parse_args(argv)
    for ckpt in args.ckpt:
        model, checkpoint = load_model(ckpt)
        write_csv(args.out_dir / "taken.csv",
                  measured(model, checkpoint, ckpt.stem, checkpoint["step"]), "a")
    if args.ckpt:
        return print(said(args.out_dir))
    path = args.out_dir / "trained.csv"
    wanted = [(seed, attn) for attn in args.networks for seed in args.seeds or NETWORKS[attn]]
    for seed, attn in sorted(wanted, key=lambda of: of[0]):         # a seed of all, then the next
        folder = args.out_dir / f"{attn}_s{seed}"
        for step in STAGES:
            if (folder.name, step) not in {(row["run"], row["step"]) for row in read_csv(path)}:
                model, checkpoint = stage(folder, attn, seed, step)
                rows = measured(model, checkpoint, folder.name, step, step == STAGES[-1])
                write_csv(path, rows, "a")
    print(said(args.out_dir))


# --- what the rows say ----------------------------------------------------------------------------

NULL_NAMES = ("random matrix", "other head", "noise")                       # of NULLS, in words


def seed_means(rows, network, measure, source, step=None):
    """The means over all layers of every seed, by run, (n,): of the last step, or of one."""
    mine = sorted((r for r in rows if (r["network"], r["measure"], r["source"], r["layer"])
                   == (network, measure, source, "all")), key=lambda r: (r["run"], r["step"]))
    last = {r["run"]: r for r in mine if step is None or r["step"] == step}
    return np.array([r["mean"] for r in last.values()])


def closed(rows, network, measure):
    """Per cent of the way from the random matrix to the fitted map that learned values went, of
    each seed: (n,)."""
    null, own, best = (seed_means(rows, network, measure, source)
                       for source in ("x W", "learned", f"fitted to {measure}"))
    return 100 * (own - null) / (best - null) if len(best) == len(own) else np.array([])


def table(rows, measure):
    """Write Markdown: a network a row, a measure beside its nulls, differences over seeds."""
    body = []
    for network in dict.fromkeys(r["network"] for r in rows if r["measure"] == measure):
        sources = ("learned", *NULLS, f"fitted to {measure}")
        columns = [seed_means(rows, network, measure, source) for source in sources]
        start = seed_means(rows, network, measure, "learned", 0)
        share = closed(rows, network, measure)
        gaps = [seed_means(rows, network, f"{measure}: learned -", null) for null in NULLS[:2]]
        body.append([network, str(len(columns[0])), *(spread(x, ".4f") for x in (start, *columns)),
                     *(show(paired_t(x), 4) if len(x) else "" for x in gaps),
                     show(paired_t(share)) if len(share) > 1 else ""])
    return common.table(body, ["network", "n", "before training", "trained", *NULL_NAMES,
                               "best linear map", "trained - random matrix",
                               "trained - other head", "% of the way to that map"])


def verdict(rows, network):
    """What the eigen-cosine says of a network, in the words of the plan."""
    gap = seed_means(rows, network, "eig_cos: learned -", "x W")
    share = closed(rows, network, "eig_cos")
    if len(gap) < 3 or not len(share):
        return "too few seeds"
    d, way = paired_t(gap), share.mean()
    if d.low <= 0 <= d.high:
        return "no better than a random matrix"
    if d.low > 0 and way < 10:
        return "a trace, at most a few per cent of the way"
    return "largely" if way > 50 else f"{way:.0f} per cent of the way"


def said(folder):
    """Write Markdown: every table that the CSV files of a folder give; the verdicts."""
    text = []
    for name, measures in (("trained", (*OUTCOMES, COMPARED[2])), ("taken", OUTCOMES),
                           ("gamma", COMPARED[1:3]), ("capture", ("EV",)),
                           ("attainable", ("eig_cos", "EV"))):
        rows = read_csv(folder / f"{name}.csv")
        text += [f"{measure} ({name}.csv)\n\n{table(rows, measure)}" for measure in measures
                 if any(r["measure"] == measure for r in rows)]
        if name == "trained" and rows:
            text += [f"{network}: **{verdict(rows, network)}**."
                     for network in dict.fromkeys(r["network"] for r in rows)]
    if not text:
        raise common.InputError(f"--rows {folder} holds no CSV file of this study")
    return "\n\n".join(text)


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["trained"]:
        return trained(argv[1:])
    if argv[:1] == ["--rows"] and len(argv) == 2:
        return print(said(Path(argv[1])))
    study(get_args(__doc__, EXPERIMENTS, argv), EXPERIMENTS)


if __name__ == "__main__":
    torch.set_num_threads(1)             # small matrices gain nothing from threads
    common.run(main)
