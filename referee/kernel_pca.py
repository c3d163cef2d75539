"""Do trained networks perform kernel PCA? Every claim of the paper, measured beside its nulls.

    python -m referee.kernel_pca --ckpt out/softmax --exp capture,gamma   # train_cls.py's networks
    python -m referee.kernel_pca --ckpt out/a/step_*.pt --exp jproj       # over training
    python -m referee.kernel_pca trained --networks softmax --seeds 50    # trains and measures one
    python -m referee.kernel_pca --rows referee/results/kpca              # tables of stored rows

Claims: Teo & Nguyen 2024, sections 2.2, App. C, E. Theory: kpca.py. Beside the learned values stand
the values of the next head (other), the same input through random matrices (x W), random numbers
(iid), the values of kernel PCA itself and, in `trained`, those of the best map of the input that
was found: v = x W + b, the same for all images as the trained one is, fitted on training images to
what is measured. Without it "as a random matrix" says little: no map might score more. What is
found is a lower bound of what can be had. Published scores: published_scores.py.

EV, frac and overlap ask which subspace of feature space values span (span.py), eig_cos
whether they hold eigenvectors. None changes with v -> v R, which the output matrix undoes.

Shapes: q (..., M, D), k (..., N, D), v (..., N, Dv), float64; leading ones: draws of a null,
images, heads.
"""

import argparse
import inspect
import math
import re
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
from referee.arms import call
from referee.probe import (Point, capture, checkpoints, chunks, device_of, get_args,
                           load_images, load_model, print_table, read_csv, summarise, write_csv)
from referee.robust_attentions import standardise
from referee.span import (NULLS, Layer, explained_variance, query_share, token_overlap, value_axes)
from referee.stats import paired_t, show, spread

COMPARED = ("EV", "frac", "eig_cos", "eig_cos, v = G a", "overlap")


# --- experiments ----------------------------------------------------------------------------------
# Each takes a Layer and returns {measure: {source: (draws, B, H)}}. The docstring is printed above
# the table.

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
        return eigen_cosine(axes, ritz(axes, a))["eig_cos"].nanmean(-1)

    out = {"eig_cos": {source: cosine(a_hat(v, axes.log_g)) for source, v in layer.values.items()}}
    if layer.scaled:
        out["eig_cos, v = G a"] = {source: cosine(a_hat(v, axes.log_g, scaled=True))
                                   for source, v in layer.raw.items()}

    # Kernel PCA's own vectors and eigenvalues, where they are resolved.
    resolved = torch.arange(d, device=axes.sigma.device) < axes.rank[..., None]
    out["eig_cos"]["KPCA"] = cosine(turned(axes.U[..., :d] * resolved[..., None, :]))
    lam = (-axes.c).exp() * axes.sigma[..., :d] / N
    out["lambda"] = {"KPCA": lam.where(resolved, math.nan).nanmean(-1)}
    return out


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
    Dv axes reach it. frac: share of |phi(q)|^2 inside; ceiling: in the span of all keys.
    """
    mu = layer.axes.sigma.clamp(min=0)
    ev = {source: explained_variance(layer.span, Q) for source, Q in layer.bases.items()}
    ev["best"] = mu[..., :layer.dv].sum(-1) / mu.sum(-1).clamp(min=1e-300)
    return exp_frac(layer) | {"EV": ev}


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
            out |= {(name, m, source, layer.name): t.nanmean(1).cpu()
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

def examine(point, experiments, device, maps=None, draws=3):
    """Run experiments on all layers of a Point: {name: rows of `summarise`}.

    maps: of `fitted_maps`, whose values are sources, too. draws: of the random matrix.
    """
    model = point.model.to(device)
    pieces, short = {}, set()
    for start, inputs in chunks(point, device, whole="losses" in experiments):
        for i, heads in enumerate(capture(model, inputs)):
            layer = Layer(heads, str(i), (i, start), draws)
            layer.values |= {f"fitted to {name}": mapped(layer, W)[None]
                             for name, W in (maps[i] if maps else {}).items()}
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
    return {name: summarise(found, point) for name, found in results.items()}


def study(args, experiments):
    """Run experiments on every checkpoint, print their tables, write their CSV files."""
    device = device_of(args.device)
    experiments = {name: experiments[name] for name in args.exp}
    rows, out = {name: [] for name in experiments}, Path(args.out_dir)
    for point in checkpoints(args):
        for name, own in examine(point, experiments, device).items():
            rows[name] += own
            if point.last:
                print_table(f"{name}: {point.where}", inspect.cleandoc(experiments[name].__doc__),
                            own)
    for name, own in rows.items():
        write_csv(out / f"{name}.csv", own)
    print(f"\nCSV files in {out}")


# --- networks that are trained for this question: referee/results/criterion/plan.md ---------------

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
        new = ["--attn", attn, "--epochs", 8, "--seed", seed, "--out_dir", folder]
        going = (folder / "last.pt").exists()
        call("train_cls.py", *(["--resume", folder] if going else new), "--max_steps",
             step or STAGES[1])
        shutil.copy(folder / "last.pt", at)
    model, checkpoint = load_model(at)
    if checkpoint["step"] != (step or STAGES[1]):
        raise common.InputError(f"{at} is of step {checkpoint['step']}: remove {folder}")
    if step == 0:
        torch.manual_seed(seed)
        model = type(model)(model.config).eval()
    return model, checkpoint


def measured(model, checkpoint, run, step, last=True, num_images=64, draws=20):
    """Rows of one network at one step: each measure beside its nulls and what a map attains."""
    images, labels, what = load_images(checkpoint, model.config, num_images)
    many, of_many, _ = load_images(checkpoint, model.config, 1000)
    point = Point(run, step, last, model, images, what)
    maps = fitted_maps(model, OUTCOMES if last else OUTCOMES[:1])
    experiments = {name: EXPERIMENTS[name] for name in ("gamma", "values", "capture")}
    rows = sum(examine(point, experiments, torch.device("cpu"), maps, draws).values(), [])
    with torch.no_grad():
        top1 = 100 * (model(many).argmax(1) == of_many).double().mean().item()
    return rows + [dict(run=run, step=step, layer="all", measure="top1", source="learned",
                        mean=top1, se=math.nan, images=len(many))]


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
            if not read_csv(path, run=folder.name, step=step):
                model, checkpoint = stage(folder, attn, seed, step)
                rows = measured(model, checkpoint, folder.name, step, step == STAGES[-1])
                write_csv(path, rows, "a")
    print(said(args.out_dir))
    draw(rows_of(path), args.out_dir / "trained.png")


# --- what the rows say ----------------------------------------------------------------------------

NULL_NAMES = ("random matrix", "other head", "noise")                       # of NULLS, in words


def rows_of(path):
    """Rows of a CSV file of a study, with "network", the run without its seed; [] without it."""
    return [{**row, "network": re.sub(r"_s\d+$", "", row["run"])} for row in read_csv(path)]


def over_seeds(rows, network, measure, source, step=None):
    """The means of every seed over all layers, by run, (n, 2) with their errors over images: of
    the last step, or of one."""
    mine = [r for r in rows if (r["network"], r["measure"], r["source"], r["layer"])
            == (network, measure, source, "all")]
    ends = {r["run"]: max(q["step"] for q in mine if q["run"] == r["run"]) for r in mine}
    return np.array([(r["mean"], r["se"]) for r in sorted(mine, key=lambda r: r["run"])
                     if r["step"] == (ends[r["run"]] if step is None else step)]).reshape(-1, 2)


def interval(x):
    """Mean and 95 % t-interval over seeds, as text; of a single seed 1.96 errors over images."""
    if not len(x):
        return ""
    d = paired_t(x[:, 0])
    if len(x) > 1:
        return show(d, 4)
    half = 1.96 * x[0, 1]
    return f"{d.mean:+.4f} ({d.mean - half:+.4f} to {d.mean + half:+.4f} images)"


def closed(rows, network, measure, step=None):
    """Per cent of the way from the random matrix to the fitted map that learned values went, of
    each seed: (n,)."""
    null, own, best = (over_seeds(rows, network, measure, source, step)[:, 0]
                       for source in ("x W", "learned", f"fitted to {measure}"))
    return 100 * (own - null) / (best - null) if len(best) == len(own) else np.array([])


def table(rows, measure, step=None):
    """Write Markdown: a network a row, a measure beside its nulls, differences over seeds."""
    body = []
    for network in dict.fromkeys(r["network"] for r in rows if r["measure"] == measure):
        sources = ("learned", *NULLS, f"fitted to {measure}")
        columns = [over_seeds(rows, network, measure, source, step)[:, 0] for source in sources]
        start = over_seeds(rows, network, measure, "learned", 0)[:, 0]
        share = closed(rows, network, measure, step)
        body.append([
            network, str(len(columns[0])), *(spread(x, ".4f") for x in (start, *columns)),
            *(interval(over_seeds(rows, network, f"{measure}: learned -", null, step))
              for null in NULLS[:2]), show(paired_t(share)) if len(share) > 1 else ""])
    return common.table(body, ["network", "n", "before training", "trained", *NULL_NAMES,
                               "best linear map", "trained - random matrix",
                               "trained - other head", "% of the way to that map"])


def verdict(rows, network):
    """What the eigen-cosine says of a network, in the words of the plan."""
    gap = over_seeds(rows, network, "eig_cos: learned -", "x W")[:, 0]
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
    for name, measures in (("trained", (*OUTCOMES, COMPARED[3])), ("taken", OUTCOMES),
                           ("gamma", COMPARED[2:4]), ("capture", ("EV",)),
                           ("attainable", ("eig_cos", "EV"))):
        rows = rows_of(folder / f"{name}.csv")
        text += [f"{measure} ({name}.csv)\n\n{table(rows, measure)}" for measure in measures
                 if any(r["measure"] == measure for r in rows)]
        if name == "trained" and rows:
            text += [f"{network}: **{verdict(rows, network)}**."
                     for network in dict.fromkeys(r["network"] for r in rows)]
    if not text:
        raise common.InputError(f"--rows {folder} holds no CSV file of this study")
    return "\n\n".join(text)


def draw(rows, path):
    """Draw the eigen-cosine over training, a panel a network: learned values beside the nulls."""
    from referee.plot import WIDTH, legend, plt, save
    looks = {"KPCA": ("black", "-", "", "kernel PCA"), "learned": ("tab:blue", "-", "o", "learned"),
             "fitted to eig_cos": ("tab:green", "-", "^", "best linear map found"),
             "x W": ("tab:orange", "--", "s", "random matrix"),
             "other": ("tab:purple", "-.", "D", "another head's values"),
             "iid": ("dimgray", ":", "x", "noise")}
    shown = list(dict.fromkeys(r["network"] for r in rows))[:2]
    figure, axes = plt.subplots(1, len(shown), figsize=(WIDTH, 4.2), sharey=True, squeeze=False)
    for ax, network in zip(axes[0], shown):
        for source, (colour, line, mark, label) in looks.items():
            points = [over_seeds(rows, network, "eig_cos", source, step)[:, 0] for step in STAGES]
            there = [(i, x.mean(), x.min(), x.max()) for i, x in enumerate(points) if len(x)]
            xs, mean, low, high = zip(*there) if there else [()] * 4
            ax.plot(xs, mean, line, marker=mark, color=colour, label=label)
            ax.fill_between(xs, low, high, color=colour, alpha=0.15, linewidth=0)
        ax.set(title=f"{network} attention", xlabel="epochs of training", ylim=(0, 1.05),
               xticks=range(len(STAGES)), xticklabels=[step // STAGES[1] for step in STAGES])
    axes[0][0].set_ylabel("eigen-cosine")
    legend(figure, axes[0][0], "lower center", ncols=3)
    save(figure, path)


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
