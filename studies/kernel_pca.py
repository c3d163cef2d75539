"""Do trained networks perform kernel PCA? Every claim of the paper, measured beside its nulls.

    python -m studies.kernel_pca --ckpt out/cifar10_softmax --exp capture,gamma   # train_cls.py
    python -m studies.kernel_pca --ckpt out/cifar10_softmax/*.pt --exp jproj      # over training
    python -m studies.kernel_pca --ckpt out/pydoc_softmax                         # train_lm.py
    python -m studies.plot kpca out/kpca                                          # figures

Claims: Teo & Nguyen 2024, sections 2.2, App. C, E.2. Theory: kpca.py. Beside the learned values
stand three references: the same input through a random matrix (x W), random numbers (iid), and the
values of kernel PCA itself. The scores that were published: studies/published_scores.py.

Attention reads v through w_d = sum_j v_jd Phi(k_j), Phi(x).Phi(y) = k(x, y): h_id is Phi(q_i).w_d
over g(q_i) for any v. The output matrix undoes any v -> v R, so only span{w_d} matters. Kernel PCA
says that it is the top principal subspace of the keys: that is what EV, frac and overlap measure.

Shapes: q (..., M, D), k (..., N, D), v (..., N, Dv), float64; leading ones: draws of a null,
images, heads. Nothing overflows: Phi(x) = e^n(x) psi(x), |psi| = 1, and exponents are kept apart.
"""

import inspect
import math
import sys
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

if not __package__:
    sys.exit("error: start this in the repository's folder, as: python -m studies.kernel_pca")

import numpy as np
import torch
from tqdm import tqdm

import common
from kpca import (EPS, a_hat, attend, centre, coefficients, eigen_cosine, kernel_pca,
                  kernel_projections, key_scale, log_g, log_gram, log_kernel, log_phi2,
                  projection_loss, theoretical_values)
from studies.probe import (Heads, attention_replaced, capture, checkpoints, chunks, get_args,
                           numbers, print_table, standardise, summarise, write_csv, write_tables)


# --- which subspace of feature space do values span? ----------------------------------------------

class Span(NamedTuple):
    """Orthonormal coordinates in the span of the keys' features."""
    F: torch.Tensor                     # (..., N, R) psi(k_j); directions below 1e-12 are dropped
    Z: torch.Tensor                     # (..., M, R) psi(q_i), the part inside the span
    X: torch.Tensor                     # (..., N, R) centred Phi(k_j) / g_j, times e^(c/2)
    n: torch.Tensor                     # (..., N) |k_j|^2 / (2 sqrt(D))


def key_span(q, k):
    """Coordinates of q's and k's features in an orthonormal basis of the span of all Phi(k_j)."""
    s, t = log_kernel(k, k), log_kernel(q, k)
    n = s.diagonal(dim1=-2, dim2=-1) / 2
    n_q = q.square().sum(-1) / (2 * math.sqrt(q.shape[-1]))

    # psi(k_i).psi(k_j) = U diag(size) U^T, so the rows of U diag(size)^(1/2) are psi(k_j).
    gram = (s - n[..., :, None] - n[..., None, :]).clamp(max=0).exp()
    size, U = torch.linalg.eigh(gram)
    size = torch.where(size > 1e-12 * size[..., -1:], size, 0)[..., None, :]
    F = U * size.sqrt()
    inverse = U * torch.where(size > 0, size, torch.inf).rsqrt()            # F^+ transposed

    Z = (t - n_q[..., :, None] - n[..., None, :]).clamp(max=0).exp() @ inverse
    lg, c = key_scale(k)
    X = (n + (c / 2 - lg)).exp()[..., None] * F
    return Span(F, Z, X - X.mean(-2, keepdim=True), n)


def basis(W):
    """Orthonormal basis of the column space, W's shape; columns beyond the rank are zero."""
    Q, r = torch.linalg.qr(W / W.norm(dim=-2, keepdim=True).clamp(min=1e-300))
    U, size, _ = torch.linalg.svd(r, full_matrices=False)
    return Q @ (U * (size > 1e-12 * size[..., :1])[..., None, :])


def value_axes(span, v):
    """The w_d = sum_j v_jd Phi(k_j), common factor dropped, (..., R, Dv)."""
    return span.F.mT @ ((span.n - span.n.amax(-1, keepdim=True)).exp()[..., None] * v)


def principal_axes(span):
    """All axes u_1, u_2, ... in rows, (..., N, R). From features, not from the Gram matrix as in
    kernel_pca, so that axes far below its rounding error are still orthonormal."""
    return torch.linalg.svd(span.X, full_matrices=False)[2]


def explained_variance(span, Q):
    """EV = tr(P C) / tr C, (...): the share of the keys' variance that lies in the subspace."""
    return (span.X @ Q).square().sum((-2, -1)) / span.X.square().sum((-2, -1)).clamp(min=1e-300)


def query_share(span, Q=None):
    """Share of |phi(q_i)|^2 inside the subspace, (..., M) in [0, 1]; None: the span of all keys."""
    return (span.Z if Q is None else span.Z @ Q).square().sum(-1)


def token_overlap(A, B):
    """Sum of cos^2 of the principal angles of two bases, over the smaller rank; chance: Dv/N."""
    ranks = [Q.square().sum((-2, -1)) for Q in (A, B)]
    return (A.mT @ B).square().sum((-2, -1)) / torch.minimum(*ranks).clamp(min=1)


def restrict(q, k, v, span, u, affine=False):
    """Attention with only the part of v on the axes u (..., d, R): every w_d is projected on them.

    That is v -> V V^T E v, V the theoretical values, without its inverse. affine adds the constant
    row, the same for every query, that centring takes away; with all N - 1 axes attention is then
    what it was. Exact up to |k|^2 / sqrt(D) of about 60. Returns h (..., M, Dv).
    """
    longest, w = span.n.amax(-1, keepdim=True), value_axes(span, v)
    lost = w - u.mT @ (u @ w)

    def project(x, psi):                                                    # of h, x = q or k
        n = x.square().sum(-1) / (2 * math.sqrt(x.shape[-1]))
        return (n - log_g(x, k) + longest).clamp(max=300).exp()[..., None] * (psi @ lost)

    h = attend(q, k, v) - project(q, span.Z)
    return h + project(k, span.F).mean(-2, keepdim=True) if affine else h


# --- a layer and its nulls ------------------------------------------------------------------------

class Layer:
    """Heads prepared for the experiments: tensors (1, B, H, N, D) and what experiments share.

    values: {"learned": v, "x W": the input through 3 Gaussian matrices, "iid": Gaussian numbers},
    (draws, B, H, N, D), all of v's size. key: seeds of W, the same for all images, and of iid.
    """

    def __init__(self, heads, name="", key=(0, 0), standardised=False):
        q, k, v, raw, x, self.causal = heads
        if k.shape[-2] < 2:
            raise ValueError(f"layer {name}: {k.shape[-2]} token, but kernel PCA needs at least "
                             f"two")
        if not all(t.isfinite().all() for t in (q, k, v)):
            raise ValueError(f"layer {name}: queries, keys or values are not finite: "
                             f"the model is broken")
        if standardised:
            q, k = standardise(q), standardise(k)
        self.q, self.k, self.v, self.raw = q[None], k[None], v[None], raw[None]
        self.x = x[None, :, None]
        self.name, self.key, self.dv = name, key, v.shape[-1]

        seeds = [torch.Generator().manual_seed(1009 * n + i) for i, n in enumerate(key)]
        W = torch.randn(3, 1, q.shape[1], x.shape[-1], self.dv, generator=seeds[0], dtype=q.dtype)
        iid = torch.randn(v.shape, generator=seeds[1], dtype=q.dtype)
        values = {"learned": self.v, "x W": self.x @ W.to(q.device), "iid": iid[None].to(q.device)}
        size = self.v.norm(dim=(-2, -1), keepdim=True)
        self.values = {name: u / u.norm(dim=(-2, -1), keepdim=True) * size
                       for name, u in values.items()}

    @cached_property
    def parts(self):
        """Its data sets: all keys; if causal (query i has keys 1 ... i), those of three queries."""
        if not self.causal:
            return [self]
        ends = sorted({max(2, self.k.shape[-2] * n // 4) for n in (1, 2, 4)})
        q, tokens = self.q[0], (self.k[0], self.v[0], self.raw[0], self.x[0, :, 0])
        return [Layer(Heads(q[..., n - 1:n, :], *(t[..., :n, :] for t in tokens)), self.name,
                      self.key) for n in ends]

    @cached_property
    def axes(self):
        return kernel_pca(self.k)

    @cached_property
    def span(self):
        return key_span(self.q, self.k)

    @cached_property
    def bases(self):
        """{source: basis of span{w_d} in feature space}, with kernel PCA's own axes."""
        bases = {name: basis(value_axes(self.span, v)) for name, v in self.values.items()}
        return bases | {"KPCA": principal_axes(self.span)[..., :self.dv, :].mT}


# --- experiments ----------------------------------------------------------------------------------
# Each takes a Layer and returns {measure: {source: tensor}}, tensors (draws, B, H) or, for curves
# over axes, (draws, B, H, d). The docstring is printed above the table.

def exp_jproj(layer):
    """The projection error (Eq. 13), claim 2.2.1: J = mean(|phi(q)|^2 - |h|^2) falls in training.

    J: as printed; a true projection has J >= 0, so a negative one says that h is none. phi2, h2:
    its terms, means over tokens. above: share of tokens with |h| > |phi(q)|. rel_phi, rel_h:
    |phi2 - h2| over either. |h|^2 has no scale (v c and W_O / c are the same network), so only frac
    can show learning: the share of |phi(q)|^2 inside span{w_d}, in [0, 1]; 1 - frac is J with the
    scale fixed. ceiling: inside the span of all keys, for any v.
    """
    lp, values = log_phi2(layer.q, layer.k, layer.causal), dict(layer.values)
    if not layer.causal:
        values["KPCA"] = theoretical_values(layer.axes, layer.dv)
    terms = {source: projection_loss(lp, attend(layer.q, layer.k, v, layer.causal))
             for source, v in values.items()}
    out = {m: {source: t[m] for source, t in terms.items()} for m in terms["learned"]}
    out["phi2"] = {"learned": out["phi2"]["learned"]}                       # the same for all
    return out | over_parts(exp_frac, layer)


def exp_frac(layer):
    """Share of |phi(q)|^2 inside span{w_d}."""
    frac = {source: query_share(layer.span, Q).mean(-1) for source, Q in layer.bases.items()}
    return {"frac": frac | {"ceiling": query_share(layer.span).mean(-1)}}


def exp_gamma(layer):
    """Are the learned values eigenvectors (Eq. 11), claim 2.2.2: K~ a = N lambda a?

    a = H G^-1 v with the pseudo-inverse H of I - 1_N, which has no inverse. All: means over axes.
    eig_cos: cosine between a and K~ a, 1 for eigenvectors only; K~ near a multiple of H makes it
    near 1 for noise too. wstd/lambda: weighted standard deviation of K~ a / (N a) over its mean.
    unsolvable: |sum_j g_j v_j| / sum_j |g_j v_j|, 0 if an exact a exists. v = G a: scaled
    attention, V before I - S. lambda: the first Dv eigenvalues lambda_d = mu_d / N.
    """
    axes, d, N = layer.axes, min(layer.dv, layer.k.shape[-2]), layer.k.shape[-2]
    out = {"eig_cos": {}, "wstd/lambda": {}, "unsolvable": {}}
    for source, v in layer.values.items():
        found, a = eigen_cosine(axes, a_hat(v, axes.log_g)), a_hat(v, axes.log_g, scaled=True)
        out["eig_cos"][source] = found["eig_cos"]
        out["wstd/lambda"][source] = found["wstd/lambda"]
        out["unsolvable"][source] = a.sum(-2).abs() / a.abs().sum(-2)

    # Kernel PCA's own vectors, where they are resolved.
    U, unresolved = axes.U[..., :d], torch.arange(d, device=axes.mu.device) >= axes.rank[..., None]
    theory = eigen_cosine(axes, U)
    theory["unsolvable"] = U.sum(-2).abs() / U.abs().sum(-2)
    for m, sources in out.items():
        sources["KPCA"] = theory[m].masked_fill(unresolved, math.nan)
    lam = (-axes.c).exp() * axes.mu[..., :d] / N
    out["lambda"] = {"KPCA": lam.masked_fill(unresolved, math.nan)}

    if not torch.equal(layer.raw, layer.v):
        before = {**layer.values, "learned": layer.raw}
        out["eig_cos, v = G a"] = {
            source: eigen_cosine(axes, a_hat(v, axes.log_g, scaled=True))["eig_cos"]
            for source, v in before.items()}
    means = {m: {s: t.nanmean(-1) for s, t in sources.items()} for m, sources in out.items()}
    return means | {f"{m} by axis": out[m] for m in ("eig_cos", "lambda")}


def eigenvalue_statistics(mu):
    """Four numbers of descending eigenvalues (..., D): max, min, mean, lower median."""
    median = mu.median(-1).values
    return {"max": mu[..., 0], "min": mu[..., -1], "mean": mu.mean(-1), "median": median}


def exp_eigstats(layer):
    """The first D eigenvalues mu_d = N lambda_d of K~: the paper has 648.46, 4.65, 40.07, 17.73.

    None can exceed 1 / min_j g_j <= 1 (bound). Rows: max, min, mean and lower median, averaged over
    layers and heads. Right: keys standardised as in published code. axes: resolved ones.
    log g span: log of largest over smallest g_j. |k|^2/sqrt(D): the larger, the fewer axes.
    """
    out = {}
    for source, k in (("as they are", layer.k), ("standardised", standardise(layer.k))):
        N, D = k.shape[-2:]
        lg, c = key_scale(k)
        spectrum = torch.linalg.eigvalsh(centre((log_gram(k) + c[..., None]).exp())).flip(-1)
        mu = (-c).exp() * spectrum.clamp(min=0)
        rows = eigenvalue_statistics(mu[..., :D]) | {
            "bound": (-lg.amin(-1)).exp(),
            "axes": (spectrum > N * EPS * spectrum[..., :1]).double().sum(-1),
            "log g span": lg.amax(-1) - lg.amin(-1),
            "|k|^2/sqrt(D)": (k.square().sum(-1) / math.sqrt(D)).mean(-1),
            "mu by axis": mu[..., :-1]}
        for m, t in rows.items():
            out.setdefault(m, {})[source] = t
    return out


def turned(layer, vectors):
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
    chance Dv/N. output: share of |h|^2 that a linear map of the theoretical output A V explains,
    fitted on the same image.
    """
    theory = theory_by_token(layer)
    tokens = basis(theory)
    projected = basis(kernel_projections(layer.q, layer.k, layer.axes, theory.shape[-1]))
    out = {"overlap": {}, "output": {}}
    for source, v in {**layer.values, "KPCA": turned(layer, theory)}.items():
        h = attend(layer.q, layer.k, v)
        explained = (projected.mT @ h).square().sum((-2, -1))
        out["overlap"][source] = token_overlap(basis(v), tokens)
        out["output"][source] = explained / h.square().sum((-2, -1))
    return out


def exp_capture(layer):
    """How much of the keys' variance, and of the queries, do values catch? W_O cannot change this.

    EV: share of the keys' variance in feature space inside span{w_d}; best: only kernel PCA's first
    Dv axes reach it. eta: (EV - EV of x W) / (best - EV of x W) in percent; "flat": less than 0.02
    to win. Its error is over images, not over the 3 random W, which all images share. frac: share
    of |phi(q)|^2 inside; ceiling: in the span of all keys. error: |h - h_r| / |h|, h_r: v
    restricted to the first r = Dv axes and a constant row (truncate: affine).
    """
    span, mu, top = layer.span, layer.axes.mu.clamp(min=0), layer.bases["KPCA"].mT
    ev = {source: explained_variance(span, Q) for source, Q in layer.bases.items()}
    ev["best"] = mu[..., :layer.dv].sum(-1) / mu.sum(-1).clamp(min=1e-300)
    error = {}
    for source, v in layer.values.items():
        h = attend(layer.q, layer.k, v)
        rest = h - restrict(layer.q, layer.k, v, span, top, affine=True)
        error[source] = rest.norm(dim=(-2, -1)) / h.norm(dim=(-2, -1))
    return exp_frac(layer) | {"EV": ev, "error": error}


def over_parts(experiment, layer):
    """The experiment on each data set of a layer, averaged; one call, unless it is causal."""
    results, out = [experiment(part) for part in layer.parts], {}
    for m, sources in results[0].items():
        out[m] = {}
        for s in sources:
            shortest = min(r[m][s].shape[-1] for r in results)              # curves: common axes
            out[m][s] = torch.stack([r[m][s][..., :shortest] for r in results]).mean(0)
    return out


def measure(layers, experiments):
    """{(experiment, measure, source, layer): mean over draws and heads, (B,) or curves (B, d)}."""
    out = {}
    for layer in layers:
        for name, experiment in experiments.items():
            whole = name in ("jproj", "losses")                             # know causal themselves
            found = experiment(layer) if whole else over_parts(experiment, layer)
            for m, sources in found.items():
                for source, t in sources.items():
                    out[name, m, source, layer.name] = t.nanmean((0, 2)).cpu().numpy()
    return out


# --- truncation: what does the network lose if its values keep only some axes? --------------------

TRUNCATIONS = {
    "strict": "the first r principal axes, as kernel PCA has it",
    "affine": "the same and one constant row, what centring takes away",
    "affine random": "r random axes and the row",
    "affine bottom": "the last r axes and the row",
    "top r of x": "on the first r left singular vectors of the layer's input",
}


def truncated(heads, how, r):
    """Attention with truncated values, (B, H, N, D). how: of TRUNCATIONS, none, v = 0 or mean v."""
    q, k, v, N = heads.q, heads.k, heads.v, heads.k.shape[-2]
    mean = v.mean(-2, keepdim=True)
    whole = {"none": v, "v = 0": torch.zeros_like(v), "mean v": mean.expand_as(v)}
    if how in whole:
        return attend(q, k, whole[how])
    if how == "top r of x":
        Q = torch.linalg.svd(heads.x[:, None], full_matrices=False)[0][..., :r]
        return attend(q, k, Q @ (Q.mT @ v))

    span = key_span(q, k)
    u = principal_axes(span)[..., :N - 1, :]
    if how == "affine random":
        random = torch.Generator().manual_seed(r)
        order = torch.rand(u.shape[:-1], generator=random).argsort(-1).to(k.device)
        u = u.gather(-2, order[..., None].expand(u.shape))
    u = u[..., N - 1 - r:, :] if how == "affine bottom" else u[..., :r, :]
    return restrict(q, k, v, span, u, affine=how != "strict")


@torch.no_grad()
def truncate(point, ranks, device):
    """Accuracy with values cut down to r axes. Wants hundreds of --images.

    Returns rows (how, r, accuracy in percent, standard error), printed too; r = 0: no r.
    """
    model = point.model.to(device)
    cases = [(how, r) for r in ranks for how in TRUNCATIONS]
    right = {case: [] for case in [("none", 0), ("v = 0", 0), ("mean v", 0), *cases]}
    for _, images, labels in chunks(point, device):
        for (how, r), found in right.items():
            with attention_replaced(model, partial(truncated, how=how, r=r)):
                found.append((model(images).argmax(-1) == labels).cpu().numpy())
    rows = []
    for (how, r), t in right.items():
        t = 100.0 * np.concatenate(t)
        rows.append((how, r, t.mean(), t.std() / math.sqrt(len(t))))

    about = [f"{how}: {what}" for how, what in TRUNCATIONS.items()]
    text = ["Accuracy in percent with the values of all layers truncated to", *about]
    print_table(f"truncate: {point.where}", "\n".join(text), [
        ("accuracy", f"r = {r}" if r else "any r", how, mean, se) for how, r, mean, se in rows])
    return rows


# --- the command ----------------------------------------------------------------------------------

EXPERIMENTS = {"jproj": exp_jproj, "gamma": exp_gamma, "eigstats": exp_eigstats,
               "values": exp_values, "capture": exp_capture}


def examine(point, experiments, args, device):
    """Experiments on all layers of a Point: rows of `summarise`."""
    model, depth = point.model.to(device), point.model.config.depth
    keep = range(depth) if args.layers == "all" else numbers(args.layers, "--layers", depth - 1)
    results, short = {}, set()
    for start, inputs, _ in chunks(point, device):
        heads = capture(model, inputs)
        for i in keep:
            layer = Layer(heads[i], str(i), (i, start), args.standardise)
            for key, t in measure([layer], experiments).items():
                results.setdefault(key, []).append(t)
            rank = int(layer.axes.rank.min())
            if rank < min(layer.dv, layer.k.shape[-2] - 1) and i not in short:
                short.add(i)
                tqdm.write(f"layer {i}: keys so long that float64 resolves {rank} axes in some "
                           f"head, fewer than the {layer.dv} asked; the others count as zero")
    results = {key: np.concatenate(t) for key, t in results.items()}

    # eta: a ratio of means over images, so it can be had only here.
    for i in map(str, keep) if "capture" in experiments else ():
        ev, null, best = (results["capture", "EV", s, i] for s in ("learned", "x W", "best"))
        room = (best - null).mean()
        room = room if room >= 0.02 else math.nan
        results["capture", "eta", "learned", i] = 100 * (ev - null) / room
    return summarise(results)


def ranks_of(point, args):
    """The r of truncate, [] for a language model; a model that knows other classes is refused."""
    c = point.model.config
    if point.labels is None:
        if point.last:
            print(f"truncate needs classes and attention over all tokens: left out, {point.run} "
                  f"is a language model")
        return []
    if point.classes != c.num_classes:
        raise ValueError(f"truncate counts right answers, but the model knows {c.num_classes} "
                         f"classes, the data has {point.classes}")
    d, every = c.embed_dim // c.num_heads, c.num_tokens - 1
    usual = sorted({r for r in (d // 4, d, every) if 0 < r <= every})
    return numbers(args.ranks, "--ranks", every) if args.ranks else usual


def study(args, experiments):
    """Run experiments on every checkpoint, print their tables, write their CSV files."""
    device, _, _ = common.setup(args.device)
    experiments = {name: experiments[name] for name in args.exp if name != "truncate"}
    rows, cut = [], []
    for point in checkpoints(args):
        ranks = ranks_of(point, args) if "truncate" in args.exp else []
        found = examine(point, experiments, args, device) if experiments else []
        rows += [(point, row) for row in found]
        for name in experiments if point.last else ():
            print_table(f"{name}: {point.where}", inspect.cleandoc(experiments[name].__doc__),
                        [row[1:] for row in found if row[0] == name and row[4].ndim == 0])
        if ranks:
            accuracy = truncate(point, ranks, device)
            cut += [(point.run, point.step, *row, len(point.inputs)) for row in accuracy]

    # Files, and what happened over training.
    out = Path(args.out_dir)
    for name in experiments:
        mine = [(point, row) for point, row in rows if row[0] == name]
        write_tables(out, name, mine)
        tracked = [(m, s, f"{point.run} {point.step}", mean, se)
                   for point, (_, m, s, layer, mean, se) in mine
                   if point.tracked and layer == "all" and mean.ndim == 0]
        if tracked:
            print_table(f"{name} over training, mean of layers", "", tracked)
    if cut:
        write_csv(out / "truncate.csv", "run step how r accuracy se images".split(), cut)
    print(f"\nCSV files in {out}; figures (needs matplotlib): python -m studies.plot kpca {out}")


def main():
    args = get_args(__doc__, EXPERIMENTS | {"truncate": truncate})
    if not args.ckpt:
        raise ValueError("the experiments need a model: --ckpt FILE; without: python kpca.py")
    study(args, EXPERIMENTS)


if __name__ == "__main__":
    torch.set_num_threads(1)             # small matrices gain nothing from threads
    common.run(main)
