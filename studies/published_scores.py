"""Apply the scores of two published studies to noise and to exact kernel PCA.

    python -m studies.published_scores --ckpt out/cifar10_softmax
    python -m studies.published_scores --ckpt out/cifar10_softmax/*.pt --exp losses

[P] is Teo & Nguyen 2024, code `rachtsy/KPCA_code:Reconstruction`. [R] is Saritas & Yildiz 2025
(arXiv 2505.07908), code `KarahanS/Reproduction-Study-KPCA:scripts`. Both used their scores to say
that attention is, or is not, kernel PCA. Each score is printed with the controls of
studies/kernel_pca.py and with exact kernel PCA. kernel_pca.py has measures that replace the scores:

    question             [P] and its code              [R]                           kernel_pca.py
    length of a_d        |u_d| = 1 assumed             |a_d| = 1, so |u_d|^2 = mu_d  |u_d| = 1
    (I - 1_N)^-1         numeric inverse, singular     -                             pseudo-inverse
    K~ a = N gamma a     |gamma_i - gamma_j| small     the same, of eigenvectors     eig_cos
    J                    log of mean, scale missing    mean |error| per token        signed, frac
    is V kernel PCA?     -                             cosines of rows, CKA          EV, overlap
    q, k                 standardised in the model     sometimes                     as they are
"""

import math

import numpy as np
import torch

import common
from kpca import a_hat, attend, centre, log_g
from studies.kernel_pca import run_experiments, standardise, turned
from studies.probe import parse_flags
from studies.stats import scipy_stats


# --- the projection error -------------------------------------------------------------------------

def official_loss(q, k, v, with_h=True):
    """Compute J as the released code logs it: log mean(phi^2 - h^2).

    q, k, v: (B, H, N, D); q and k are standardised here. The released code computes g from the
    first column of the attention matrix (App. C), but it leaves out 1/sqrt(D) in |q|^2 and q.k_1.
    So "phi^2" is about e^40. Subtracting h^2 (about 5) changes no digit, so the result does not
    depend on v. with_h: False leaves out h^2.
    """
    q, k = standardise(q), standardise(k)
    first = (q * k[..., :1, :]).sum(-1)                         # q_i.k_1 without 1/sqrt(D)
    log_A = first / math.sqrt(q.shape[-1]) - log_g(q, k)
    log_g2 = 2 * first - 2 * log_A
    log_phi2 = (q.square().sum(-1) - log_g2).flatten(-3)
    log_mean = log_phi2.logsumexp(-1) - math.log(log_phi2.shape[-1])
    if not with_h:
        return log_mean
    h2 = attend(q, k, v).square().sum(-1).flatten(-3).mean(-1)
    return log_mean + torch.log1p(-h2 * (-log_mean).exp())


def exp_losses(layer):
    """The projection error as released by [P], with standardised q and k.

    "J official": the log of the released code's J. "without h": |h|^2 is left out. The score
    depends on the choice of the first key. It is the log of a mean over all images together.
    """
    return {m: {source: official_loss(layer.q, layer.k, v, with_h)[:, None, None].expand(
        -1, *layer.q.shape[1:3]) for source, v in layer.values.items()}     # (draws, B, H)
        for m, with_h in (("J official", True), ("J official without h", False))}


# --- are the values eigenvectors? -----------------------------------------------------------------

def gamma(axes, a):
    """Return e^c K~ a / (N a), (..., N, Dv). Eigenvectors give constant columns; 0/0 is 0."""
    return torch.where(a == 0, 0, axes.G @ a / (a.shape[-2] * a))


def numeric_a_hat(v, log_g):
    """Return (I - 1_N)^-1 G^-1 v as printed in [P].

    The matrix is singular, so the result is a RuntimeError or noise of size 1e14.
    """
    N = v.shape[-2]
    return torch.linalg.inv(torch.eye(N, dtype=v.dtype) - 1 / N) @ a_hat(v, log_g, scaled=True)


def pair_differences(x):
    """Return the mean of |x_i - x_j| over pairs i < j of the second last dimension."""
    i, j = torch.triu_indices(x.shape[-2], x.shape[-2], 1)
    return (x[..., i, :] - x[..., j, :]).abs().mean(-2)


def exp_gammas(layer):
    """The test of Eq. 11 in [P]: gamma = K~ a / (N a) is constant if mean |gamma_i - gamma_j| is 0.

    Eigenvalues of K~ never exceed 1 / min g, so every difference is near 0. "numeric inverse": uses
    (I - 1_N)^-1, which does not exist; the score is near 0 for noise, too. "|dgamma|/lambda": uses
    the pseudo-inverse, and divides by the mean of the first Dv eigenvalues lambda_d = mu_d / N.
    """
    axes, d, N = layer.axes, min(layer.dv, layer.k.shape[-2]), layer.k.shape[-2]
    lam = axes.sigma[..., :d].mean(-1, keepdim=True) / N
    lam = lam.where((axes.rank > 0)[..., None], math.nan)       # all keys are equal: no eigenvalue

    def numeric_or_nan(v):
        try:
            return numeric_a_hat(v, axes.log_g)
        except RuntimeError:                                                # N = 2, 4, 5: singular
            return v * math.nan

    pseudo, numeric = ({source: pair_differences(gamma(axes, a(v)))
                        for source, v in layer.values.items()}
                       for a in (lambda v: a_hat(v, axes.log_g), numeric_or_nan))
    # Leave out axes that float64 does not resolve.
    unresolved = torch.arange(d) >= axes.rank[..., None]
    own = pair_differences(gamma(axes, axes.U[..., :d])).masked_fill(unresolved, math.nan)
    return {"|dgamma|/lambda": {source: (pairs / lam).nanmean(-1)
                                for source, pairs in (pseudo | {"KPCA": own}).items()},
            "numeric inverse": {source: (pairs * (-axes.c).exp()).nanmean(-1)
                                for source, pairs in numeric.items()}}


# --- similarity of learned and theoretical values -------------------------------------------------

def matrix_cosine(K, L):
    """Return the cosine of two matrices (..., N, N), taken as vectors."""
    return (K * L).sum((-2, -1)) / (K.norm(dim=(-2, -1)) * L.norm(dim=(-2, -1)))


def cka(X, Y):
    """Return the linear CKA of X (..., N, a) and Y (..., N, b). Row i of both is token i."""
    X, Y = (M - M.mean(-2, keepdim=True) for M in (X, Y))
    X, Y = (M / M.norm(dim=(-2, -1), keepdim=True) for M in (X, Y))
    return matrix_cosine(X @ X.mT, Y @ Y.mT)


def kernel_cka(X, Y):
    """Return the CKA with Gaussian kernels; their width is the median nonzero squared distance."""
    def gram(X):
        d2 = torch.cdist(X, X, compute_mode="donot_use_mm_for_euclid_dist").square()
        d2 = d2 / d2.amax((-2, -1), keepdim=True)
        order = torch.where(d2 > 0, d2, torch.inf).flatten(-2).sort(-1).values
        middle = (d2 > 0).sum((-2, -1)).sub(1).clamp(min=0) // 2
        median = order.gather(-1, middle[..., None])
        return centre((-d2 / (2 * median[..., None])).exp())

    return matrix_cosine(gram(X), gram(Y))


def matching(C):
    """Match rows to columns of C (..., N, N) with the largest sum: each row's column, (..., N).

    nan, the cosine of a zero row, counts as 0.
    """
    scipy_stats()                                               # InputError if scipy is missing
    from scipy.optimize import linear_sum_assignment
    pieces = C.reshape(-1, *C.shape[-2:]).numpy()
    match = np.stack([linear_sum_assignment(np.nan_to_num(c), maximize=True)[1] for c in pieces])
    return torch.as_tensor(match).view(C.shape[:-1])


def optimal_cosine(V, W):
    """The mean cosine of the rows of V and W (..., N, D), matched one to one, as in [R].

    Returns: the mean cosine (...), which changes if the columns of V are rotated, and the partner
    of every row (..., N).
    """
    V, W = torch.broadcast_tensors(V, W)
    C = (V / V.norm(dim=-1, keepdim=True)) @ (W / W.norm(dim=-1, keepdim=True)).mT   # (..., N, N)
    match = matching(C)
    return C.gather(-1, match[..., None])[..., 0].mean(-1), match


def exp_similarities(layer):
    """The scores of [R]: learned against theoretical values, |a_d| = 1. KPCA: theoretical, rotated.

    optimal: the mean cosine of rows (tokens), matched one to one. It falls if axes are rotated,
    although W_O can undo a rotation, and chance is not 0. CKA linear, CKA kernel: see `cka` and
    `kernel_cka`.
    """
    axes, rows = layer.axes, layer.axes.U[..., :layer.dv]
    if rows.shape[-1] < layer.dv:
        return {}
    weights = (axes.log_g.amin(-1, keepdim=True) - axes.log_g).exp()[..., None]     # 1/g_j
    values = {source: v[:1] for source, v in layer.values.items()}          # one draw is enough
    values["KPCA"] = weights * turned(rows)
    by_row = values | {"KPCA": turned(rows)}                # weights > 0 do not change cosines
    scores = {"optimal [R]": {of: optimal_cosine(v, rows)[0] for of, v in by_row.items()},
              "CKA linear [R]": {of: cka(v, weights * rows) for of, v in values.items()},
              "CKA kernel [R]": {of: kernel_cka(v, weights * rows) for of, v in values.items()}}
    for sources in scores.values():                         # all keys are equal: no axis
        for of, score in sources.items():
            sources[of] = score.where(axes.rank > 0, math.nan)
    return scores


# --- the command ----------------------------------------------------------------------------------

EXPERIMENTS = {"losses": exp_losses, "gammas": exp_gammas, "similarities": exp_similarities}


def main(argv=None):
    run_experiments(parse_flags(__doc__, EXPERIMENTS, argv), EXPERIMENTS)


if __name__ == "__main__":
    torch.set_num_threads(1)
    common.run(main)
