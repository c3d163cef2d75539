"""Measure whether trained networks perform kernel PCA: every claim of the paper, with controls.

    python -m studies.kernel_pca --ckpt out/softmax --exp capture,gamma   # a run of train_cls.py
    python -m studies.kernel_pca --ckpt out/a/step_*.pt --exp jproj       # over training
    python -m studies.kernel_pca trained --networks softmax --seeds 50    # trains and measures one
    python -m studies.kernel_pca --rows studies/results/kpca              # tables of stored rows

The claims are in Teo & Nguyen 2024, section 2.2, App. C and E; the theory is in kpca.py. Learned
values are compared with five other sources of values:

    other    the values of another head
    x W      the layer's input times a random matrix
    iid      random numbers
    KPCA     the values of kernel PCA itself
    fitted   v = x W + b, with the best W that we could fit (`trained` only)

The fitted W is the same for all images, like the learned value matrix. It is fitted on training
images to the measure itself. The fit shows whether any W can score higher than a random matrix; it
gives a lower bound of the best possible score. published_scores.py computes the scores that other
papers used.

EV and overlap measure which subspace of feature space the values span (span.py). eig_cos measures
whether the values contain eigenvectors. None of these measures changes if the values are rotated (v
-> v R), because the output matrix can undo R.

Shapes: q (..., M, D), k (..., N, D), v (..., N, Dv), float64. Leading dimensions: draws, images,
heads.
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
from kpca import (ROUNDING, a_hat, attend, centre, coefficients, eigen_cosine, key_scale, log_gram,
                  log_phi2, theoretical_values, top_eigh)
from studies.arms import call, into
from studies.probe import (capture, check_new, load_model, load_test_images, parse_flags, points,
                           print_table, read_csv, summarise, untrained, write_csv)
from studies.span import (CONTROLS, Layer, basis, explained_variance, token_overlap,
                          value_axes)
from studies.stats import paired_t, scipy_stats, show, spread

COMPARED = ("EV", "eig_cos", "eig_cos, v = G a", "overlap")


# --- theory that only this study needs ------------------------------------------------------------

def projection_loss(log_norm, h):
    """Return J and its terms, means over tokens, (...) each, capped at e^700.

    log_norm: (..., M), from `log_phi2`. h: (..., M, Dv). Returns a dict: phi2, h2 and J, the means
    of |phi(q)|^2 and |h|^2 and their difference; above, the share of tokens with |h|^2 >
    |phi(q)|^2; rel_phi and rel_h, |J| / phi2 and |J| / h2.
    """
    phi2 = log_norm.clamp(max=700).exp()                                    # (..., M)
    h2 = h.square().sum(-1)                                                 # (..., M)
    mean_phi2 = phi2.mean(-1)
    mean_h2 = h2.mean(-1)
    log_mean = log_norm.logsumexp(-1) - math.log(log_norm.shape[-1])
    ratio = (mean_h2.log() - log_mean).clamp(-700, 700).exp()
    return {
        "J": mean_phi2 - mean_h2,
        "phi2": mean_phi2,
        "h2": mean_h2,
        "above": (h2 > phi2).double().mean(-1),
        "rel_phi": (1 - ratio).abs(),
        "rel_h": (1 - 1 / ratio).abs(),
    }


def ritz(axes, a):
    """Return the basis of a's column space in which G~ is diagonal, (..., N, Dv), largest first.

    If eigenvectors of G~ span this space, the result is these eigenvectors, also after values v are
    replaced by v R, with an invertible matrix R. Columns that float64 cannot resolve are 0.
    """
    Q = basis(a)
    rho, turn = top_eigh(Q.mT @ axes.G @ Q, Q.shape[-1])
    resolved = rho > a.shape[-2] * ROUNDING * axes.sigma[..., :1]
    resolved = resolved & (axes.rank > 0)[..., None]            # rank 0: G~ is a rounding error
    return Q @ turn * resolved[..., None, :]


# --- experiments ----------------------------------------------------------------------------------
# An experiment takes a Layer and returns {measure: {source: (draws, B, H)}}. Its docstring is
# printed above its table.

def exp_jproj(layer):
    """The projection error (Eq. 13). Claim 2.2.1: J = mean(|phi(q)|^2 - |h|^2) falls in training.

    J: as printed. A projection has J >= 0, so a negative J shows that h is no projection. phi2, h2:
    the two terms, means over tokens. above: share of tokens with |h| > |phi(q)|. rel_phi, rel_h:
    |phi2 - h2| divided by phi2 or h2. |h|^2 has no fixed scale: a network with values v c and
    output matrix W_O / c is the same network.
    """
    lp = log_phi2(layer.q, layer.k)
    values = layer.values | {"KPCA": theoretical_values(layer.axes, layer.dv)}
    terms = {source: projection_loss(lp, attend(layer.q, layer.k, v))
             for source, v in values.items()}
    out = {m: {source: t[m] for source, t in terms.items()} for m in terms["learned"]}
    out["phi2"] = {"learned": out["phi2"]["learned"]}           # the same for every source
    return out


def exp_gamma(layer):
    """Claim 2.2.2 (Eq. 11): learned values give eigenvectors, K~ a = N lambda a.

    a = H G^-1 v, where H is the pseudo-inverse of I - 1_N (I - 1_N has no inverse). eig_cos: the
    cosine between a and K~ a, mean over axes; it is 1 only for eigenvectors. Before the cosine is
    computed, a is rotated such that a^T K~ a is diagonal, so exact kernel PCA has 1 in any
    rotation. If K~ is nearly a multiple of H, even noise is near 1. v = G a: for Scaled Attention,
    with V before the factor I - S. lambda: mean of the first Dv eigenvalues mu_d / N.
    """
    axes, d, N = layer.axes, min(layer.dv, layer.k.shape[-2]), layer.k.shape[-2]

    def cosine(a):
        return eigen_cosine(axes, ritz(axes, a)).nanmean(-1)

    out = {"eig_cos": {source: cosine(a_hat(v, axes.log_g)) for source, v in layer.values.items()}}
    if layer.scaled:
        out["eig_cos, v = G a"] = {source: cosine(a_hat(v, axes.log_g, scaled=True))
                                   for source, v in layer.raw.items()}

    # The vectors and eigenvalues of kernel PCA itself, as far as float64 resolves them.
    resolved = torch.arange(d) < axes.rank[..., None]
    out["eig_cos"]["KPCA"] = cosine(turned(axes.U[..., :d] * resolved[..., None, :]))
    lam = (-axes.c).exp() * axes.sigma[..., :d] / N
    out["lambda"] = {"KPCA": lam.where(resolved, math.nan).nanmean(-1)}
    return out


def standardise(x):
    """Give the D numbers of every token mean 0 and variance 1 (unbiased), as in the published code.

    A token with D equal numbers becomes zero.
    """
    x = x - x.mean(-1, keepdim=True)
    size = x.norm(dim=-1, keepdim=True) / math.sqrt(max(x.shape[-1] - 1, 1))
    return x / size.clamp(min=torch.finfo(x.dtype).tiny)


def eigenvalue_statistics(mu):
    """Summarise descending eigenvalues (..., D) as max, min, mean and lower median."""
    median = mu.median(-1).values
    return {"max": mu[..., 0], "min": mu[..., -1], "mean": mu.mean(-1), "median": median}


def exp_eigstats(layer):
    """The first D eigenvalues mu_d = N lambda_d of K~. The paper: 648.46, 4.65, 40.07, 17.73.

    No eigenvalue can exceed 1 / min_j g_j <= 1 (row "bound"). The other rows are max, min, mean and
    lower median, averaged over layers and heads. In the right column, keys are standardised as in
    the published code.
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
    """Rotate vectors (..., N, d) by one random rotation; kernel PCA leaves the rotation open."""
    d, random = vectors.shape[-1], torch.Generator().manual_seed(1)
    turn = torch.linalg.qr(torch.randn(d, d, generator=random, dtype=torch.float64))[0]
    return vectors @ turn.to(vectors)


def theory_by_token(layer):
    """The theoretical values (..., N, d), scaled so that the largest 1/g_j is 1."""
    scale = (layer.axes.log_g.amin(-1, keepdim=True) - layer.axes.log_g).exp()
    return scale[..., None] * coefficients(layer.axes, min(layer.dv, layer.k.shape[-2]))


def exp_values(layer):
    """Whether learned values span the space of the theoretical values. KPCA: theoretical, rotated.

    overlap: sum of cos^2 of the principal angles of the two column spaces in token space, divided
    by Dv; chance is Dv/N.
    """
    theory = theory_by_token(layer)
    values, tokens = {**layer.values, "KPCA": turned(theory)}, basis(theory)
    return {"overlap": {source: token_overlap(basis(v), tokens) for source, v in values.items()}}


def exp_capture(layer):
    """The share of the keys' variance that the values explain; the output matrix cannot change it.

    EV: share of the keys' variance in feature space that lies in span{w_d}. best: the maximum of
    EV; only the first Dv axes of kernel PCA reach this maximum.
    """
    mu = layer.axes.sigma.clamp(min=0)
    ev = {source: explained_variance(layer.span, Q) for source, Q in layer.bases.items()}
    best = mu[..., :layer.dv].sum(-1) / mu.sum(-1).clamp(min=1e-300)
    ev["best"] = best.where(layer.span.variance.isfinite(), math.nan)
    return {"EV": ev}


EXPERIMENTS = {"jproj": exp_jproj, "gamma": exp_gamma, "eigstats": exp_eigstats,
               "values": exp_values, "capture": exp_capture}


def measure(layers, experiments):
    """Run experiments: {(experiment, measure, source, layer): mean over draws and heads, (B,)}.

    Measures in COMPARED also get the difference between learned values and each control.
    """
    out = {}
    for layer in layers:
        for name, experiment in experiments.items():
            found = {m: {source: t.nanmean(0) for source, t in sources.items()}
                     for m, sources in experiment(layer).items()}
            for m in [m for m in COMPARED if m in found]:
                found[f"{m}: learned -"] = {control: found[m]["learned"] - found[m][control]
                                            for control in CONTROLS if control in found[m]}
            out |= {(name, m, source, layer.name): t.nanmean(1)
                    for m, sources in found.items() for source, t in sources.items()}
    return out


# --- the best linear value matrix -----------------------------------------------------------------

FIT_IMAGES, PIECE, ROUNDS = 1000, 50, 5             # images to fit on; images per step; epochs


def frame(A):
    """Return a differentiable orthonormal basis of A's columns. A: (..., N, d), of full rank."""
    return torch.linalg.qr(A / A.norm(dim=-2, keepdim=True))[0]


def eigenvectors(layer, v):
    """Return the overlap of span{a} and span{K~ a}, (..., B, H): 1 if a spans eigenvectors."""
    Q = frame(a_hat(v, layer.axes.log_g))
    return token_overlap(Q, frame(layer.axes.G @ Q))


def variance(layer, v):
    """Return EV of span{w_d}, (..., B, H)."""
    return explained_variance(layer.span, frame(value_axes(layer.span, v)))


def overlap(layer, v):
    """Return the overlap of the columns of v and of the theoretical values, (..., B, H)."""
    return token_overlap(frame(v), basis(theory_by_token(layer)))


FITTED = {"eig_cos": eigenvectors, "EV": variance, "overlap": overlap}  # {measure: score to fit}


def mapped(layer, W):
    """Return v = x W + b for every head, (B, H, N, Dv); Scaled Attention multiplies by I - S.

    W: (H, C + 1, Dv); its last row is b.
    """
    v = F.pad(layer.heads.x, (0, 1), value=1.0)[:, None] @ W
    return v - layer.heads.S @ v if layer.scaled else v


def fit_values(score, pieces, rounds=None, skipped=None):
    """Fit W by Adam such that v = x W + b has the largest mean score on these Layers.

    rounds: epochs over the Layers (default: ROUNDS). skipped: a list that receives (step, head) of
    gradients that are not finite; this head's gradient is 0 in this step.
    """
    dv, (_, heads, _, _), width = pieces[0].dv, pieces[0].heads.k.shape, pieces[0].heads.x.shape[-1]
    random = torch.Generator().manual_seed(1)
    W = torch.randn(heads, width + 1, dv, generator=random, dtype=torch.float64) / width ** 0.5
    W.requires_grad_()
    optimizer = torch.optim.Adam([W], lr=0.03)
    rounds = rounds or ROUNDS
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, rounds * len(pieces))
    for step, layer in enumerate(pieces * rounds):
        optimizer.zero_grad()
        (-score(layer, mapped(layer, W)[None]).mean()).backward()
        bad = ~W.grad.isfinite().all(-1).all(-1)                # of long keys, QR's gradient
        W.grad[bad] = 0
        if skipped is not None:
            skipped += [(step, head) for head in bad.nonzero()[:, 0].tolist()]
        optimizer.step()
        schedule.step()
    return W.detach()


def fitted_maps(model, names):
    """Fit matrices on training images: a list with {name of the score: W} for each layer."""
    images = load_shapes("train", FIT_IMAGES, model.config.image_size).images
    captured = [capture(model, piece.float() / 255) for piece in images.split(PIECE)]
    maps = []
    for i in range(model.config.depth):
        pieces = [Layer(heads[i], str(i), (i, n * PIECE)) for n, heads in enumerate(captured)]
        maps.append({name: fit_values(FITTED[name], pieces) for name in names})
    return maps


# --- checkpoints ----------------------------------------------------------------------------------

def examine_model(model, images, experiments, maps=None, draws=3):
    """Run experiments on all layers of a model: {a key of `measure`: (images,)}.

    maps: from `fitted_maps`; their values become additional sources. draws: number of random
    matrices. Images are processed in pieces, such that the (N, N) matrices of all heads take about
    2 MB. The experiment "losses" is not a mean over images, so it needs all images at once.
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


def run_experiments(args, experiments):
    """Run experiments on every checkpoint, print their tables, append the rows to CSV files.

    The rows of a checkpoint are written when they exist, so a stop loses no checkpoint. A CSV file
    that has rows of this run and step already is an InputError.
    """
    paths = {name: args.out_dir / f"{name}.csv" for name in args.exp}
    experiments = {name: experiments[name] for name in args.exp}
    for run, step, model, images in points(args):
        for path in paths.values():
            check_new(path, run, step)
        found = examine_model(model, images, experiments)
        for name, experiment in experiments.items():
            own = summarise({key[1:]: t for key, t in found.items() if key[0] == name}, run, step)
            print_table(f"{name}: {run}, step {step}, {model.config.attn}, {len(images)} images; "
                        "mean ± standard error over them", inspect.cleandoc(experiment.__doc__),
                        own)
            write_csv(paths[name], own)
    print(f"\nCSV files in {args.out_dir}")


# --- networks trained for this study: studies/results/criterion/plan.md ---------------------------

NETWORKS = {"softmax": range(50, 55), "symmetric": range(50, 55), "scaled_s": range(50, 53),
            "scaled_alpha": range(50, 53)}
TRAINING_STAGES = (0, 250, 750, 2000)       # in steps: before training, after 1, 3 and 8 epochs
OUTCOMES = ("eig_cos", "EV", "overlap")


def stage(folder, attn, seed, step):
    """Train up to `step` of a schedule of 8 epochs. Returns (model, checkpoint) of this step.

    Each stage is stored as step_<n>.pt. Step 0 is the network before training.
    """
    at = folder / f"step_{step or TRAINING_STAGES[1]}.pt"
    if not at.exists():
        flags = into(folder, "--attn", attn, "--epochs", 8, "--seed", seed)
        call("train_cls.py", "--max_steps", step or TRAINING_STAGES[1], *flags)
        shutil.copy(folder / "last.pt", at)
    model, checkpoint = load_model(at)
    if checkpoint["step"] != (step or TRAINING_STAGES[1]):
        raise common.InputError(f"{at} holds step {checkpoint['step']}; remove {folder} and start "
                                "again")
    return untrained(model, checkpoint) if step == 0 else (model, checkpoint)


def stage_rows(model, checkpoint, run, step, last=True, num_images=64, draws=20):
    """Return the rows of one network at one step: each measure with controls and fitted values.

    last: True also fits W to EV and overlap; False fits W to eig_cos only. The study fits W to EV
    and overlap only at the last step.
    """
    images, _ = load_test_images(checkpoint, model.config, num_images)
    many, labels = load_test_images(checkpoint, model.config, 1000)
    maps = fitted_maps(model, OUTCOMES if last else OUTCOMES[:1])
    experiments = {name: EXPERIMENTS[name] for name in ("gamma", "values", "capture")}
    found = examine_model(model, images, experiments, maps, draws)
    with torch.no_grad():
        top1 = 100 * (model(many).argmax(1) == labels).double().mean().item()
    return summarise({key[1:]: t for key, t in found.items()}, run, step) + [
        dict(run=run, step=step, layer="all", measure="top1", source="learned", mean=top1,
             se=math.nan, images=len(many))]


def trained(argv):
    """Train the missing networks, measure them at every stage, and print the tables."""
    p = argparse.ArgumentParser(prog="kernel_pca trained", description=trained.__doc__,
                                allow_abbrev=False)
    p.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS),
                   help="attentions to train (default: all)")
    p.add_argument("--seeds", nargs="+", type=int,
                   help="seeds to train (default: 50 to 54; Scaled Attention: 50 to 52)")
    p.add_argument("--ckpt", nargs="+", type=Path, default=[],
                   help="do not train; measure these checkpoints and add their rows to taken.csv")
    p.add_argument("--out_dir", type=Path, default=Path("out/kpca"),
                   help="folder for networks and rows (default: out/kpca)")
    args = p.parse_args(argv)
    scipy_stats()                                   # the tables need scipy: check before training
    for ckpt in args.ckpt:
        model, checkpoint = load_model(ckpt)
        path = args.out_dir / "taken.csv"
        check_new(path, ckpt.stem, checkpoint["step"])
        write_csv(path, stage_rows(model, checkpoint, ckpt.stem, checkpoint["step"]))
    if args.ckpt:
        return print(kpca_tables(args.out_dir))
    path = args.out_dir / "trained.csv"
    wanted = [(seed, attn) for attn in args.networks for seed in args.seeds or NETWORKS[attn]]
    for seed, attn in sorted(wanted, key=lambda pair: pair[0]):     # seed by seed
        folder = args.out_dir / f"{attn}_s{seed}"
        for step in TRAINING_STAGES:
            if (folder.name, step) not in {(row["run"], row["step"]) for row in read_csv(path)}:
                model, checkpoint = stage(folder, attn, seed, step)
                rows = stage_rows(model, checkpoint, folder.name, step, step == TRAINING_STAGES[-1])
                write_csv(path, rows)
    print(kpca_tables(args.out_dir))


# --- tables of the rows ---------------------------------------------------------------------------

CONTROL_NAMES = ("random matrix", "other head", "noise")        # column titles for CONTROLS


def seed_means(rows, network, measure, source, step=None):
    """Select the means over all layers, one per seed, (n,). step: a step; None: the last step."""
    mine = sorted((r for r in rows if (r["network"], r["measure"], r["source"], r["layer"])
                   == (network, measure, source, "all")), key=lambda r: (r["run"], r["step"]))
    last = {r["run"]: r for r in mine if step is None or r["step"] == step}
    return np.array([r["mean"] for r in last.values()])


def closed(rows, network, measure):
    """Return the position of learned values between the random (0) and the fitted matrix (100).

    The result has one number per seed, (n,).
    """
    random, own, best = (seed_means(rows, network, measure, source)
                         for source in ("x W", "learned", f"fitted to {measure}"))
    return 100 * (own - random) / (best - random) if len(best) == len(own) else np.array([])


def control_table(rows, measure):
    """Format a measure as Markdown: one row per network, with controls and differences."""
    body = []
    for network in dict.fromkeys(r["network"] for r in rows if r["measure"] == measure):
        sources = ("learned", *CONTROLS, f"fitted to {measure}")
        columns = [seed_means(rows, network, measure, source) for source in sources]
        start = seed_means(rows, network, measure, "learned", 0)
        share = closed(rows, network, measure)
        gaps = [seed_means(rows, network, f"{measure}: learned -", control)
                for control in CONTROLS[:2]]
        body.append([network, str(len(columns[0])), *(spread(x, ".4f") for x in (start, *columns)),
                     *(show(paired_t(x), 4) if len(x) else "" for x in gaps),
                     show(paired_t(share)) if len(share) > 1 else ""])
    return common.table(body, ["network", "n", "before training", "trained", *CONTROL_NAMES,
                               "best linear matrix", "trained - random matrix",
                               "trained - other head", "% of the way to the best"])


def verdict(rows, network):
    """Return the outcome of the eigen-cosine for a network, in the words of the plan."""
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


def kpca_tables(folder):
    """Format all CSV files of a folder as Markdown, with an outcome per trained network."""
    text = []
    for name, measures in (("trained", (*OUTCOMES, COMPARED[2])), ("taken", OUTCOMES),
                           ("gamma", COMPARED[1:3]), ("capture", ("EV",)),
                           ("attainable", ("eig_cos", "EV"))):
        rows = read_csv(folder / f"{name}.csv")
        text += [f"{measure} ({name}.csv)\n\n{control_table(rows, measure)}" for measure in measures
                 if any(r["measure"] == measure for r in rows)]
        if name == "trained" and rows:
            text += [f"{network}: **{verdict(rows, network)}**."
                     for network in dict.fromkeys(r["network"] for r in rows)]
    if not text:
        raise common.InputError(f"--rows {folder} contains no CSV file of this study; expected "
                                "trained.csv, gamma.csv or others of studies/results/kpca")
    return "\n\n".join(text)


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["trained"]:
        return trained(argv[1:])
    if argv[:1] == ["--rows"] and len(argv) == 2:
        return print(kpca_tables(Path(argv[1])))
    run_experiments(parse_flags(__doc__, EXPERIMENTS, argv), EXPERIMENTS)


if __name__ == "__main__":
    torch.set_num_threads(1)             # small matrices gain nothing from threads
    common.run(main)
