"""Which subspace of feature space do values span? Coordinates in which that can be computed.

Attention reads v through w_d = sum_j v_jd Phi(k_j), Phi(x).Phi(y) = k(x, y): h_id is Phi(q_i).w_d
over g(q_i) for any v. The output matrix undoes any v -> v R, so only span{w_d} matters. Kernel PCA
says that it is the top principal subspace of the keys: that is what EV, frac and overlap measure.

Shapes: q (..., M, D), k (..., N, D), v (..., N, Dv), float64. Nothing overflows: Phi(x) = e^n(x)
psi(x), |psi| = 1, and exponents are kept apart. No study itself.
"""

import math
from typing import NamedTuple

import torch

from kpca import attend, key_scale, log_kernel


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
    """Attention with only the part of v on the principal axes u (..., d, R), h (..., M, Dv).

    Every w_d is projected on them: v -> V V^T E v, V the theoretical values of these axes (of those
    with more than 1e-10 of the variance). affine adds the constant row, the same for every query,
    that centring takes away; with all N - 1 axes attention is then what it was.
    """
    (lg, c), everywhere = key_scale(k), attend(k, k, v)                     # G E v
    if u.shape[-2] < k.shape[-2] - 1:
        along = span.X @ u.mT                                               # (..., N, d)
        mu = along.square().sum(-2, keepdim=True)
        resolved = mu > 1e-10 * span.X.square().sum((-2, -1), keepdim=True)
        a = along / torch.where(resolved, mu, torch.inf)                    # e^(-c/2) a_d
        kept = (c - lg).exp()[..., None] * (a @ (a.mT @ everywhere))
    else:
        # All axes take one row from v, so that sum_j g_j v_j is zero.
        kept = v - lg.softmax(-1)[..., None, :] @ v
    h = attend(q, k, kept)
    return h + (everywhere - attend(k, k, kept)).mean(-2, keepdim=True) if affine else h
