"""Compute the subspace of feature space that values span, for learned values and for controls.

Attention uses v only through w_d = sum_j v_jd Phi(k_j), where Phi(x).Phi(y) = k(x, y): for any v,
h_id = Phi(q_i).w_d / g(q_i). The output matrix can undo any v -> v R, so only span{w_d} matters. In
kernel PCA, span{w_d} is the top principal subspace of the keys. `explained_variance` measures how
much of the keys' variance a subspace contains. `token_overlap` measures how similar two column
spaces are.

Shapes: k (..., N, D), v (..., N, Dv), float64. Phi(x) = e^n(x) psi(x) with |psi| = 1. The exponents
n are stored separately, so nothing overflows.
"""

from functools import cached_property
from typing import NamedTuple

import torch

import common
from kpca import ROUNDING, kernel_pca, key_scale, log_kernel


# --- coordinates ----------------------------------------------------------------------------------

class Span(NamedTuple):
    """Orthonormal coordinates in the span of the keys' features."""
    F: torch.Tensor                     # (..., N, R) psi(k_j); directions below 1e-12 are dropped
    X: torch.Tensor                     # (..., N, R) centred Phi(k_j) / g_j, times e^(c/2)
    n: torch.Tensor                     # (..., N) |k_j|^2 / (2 sqrt(D))
    variance: torch.Tensor              # (...) sum of squares of X; NaN if it is a rounding error


def key_span(k):
    """Compute the coordinates of k's features in an orthonormal basis of their span."""
    s = log_kernel(k, k)
    n = s.diagonal(dim1=-2, dim2=-1) / 2
    # psi(k_i).psi(k_j) = U diag(size) U^T, so row j of U diag(size)^(1/2) is psi(k_j).
    size, U = torch.linalg.eigh((s - n[..., :, None] - n[..., None, :]).clamp(max=0).exp())
    size = torch.where(size > 1e-12 * size[..., -1:], size, 0)[..., None, :]
    F = U * size.sqrt()
    lg, c = key_scale(k)
    X = (n + (c / 2 - lg)).exp()[..., None] * F
    centred = X - X.mean(-2, keepdim=True)
    variance = resolved(centred.square().sum((-2, -1)), X.square().sum((-2, -1)), k.shape[-2])
    return Span(F, centred, n, variance)


def resolved(variance, uncentred, N):
    """Return the variance of N keys' features, and NaN where it is only a rounding error.

    If all keys are equal, centring leaves rounding errors, and every share of them is meaningless.
    uncentred: the sum of squares before centring.
    """
    return variance.where(variance > N * ROUNDING * uncentred, torch.nan)


def basis(W):
    """Return an orthonormal basis of the columns of W, in W's shape; 0 beyond the rank."""
    Q, r = torch.linalg.qr(W / W.norm(dim=-2, keepdim=True).clamp(min=1e-300))
    U, size, _ = torch.linalg.svd(r, full_matrices=False)
    in_span = size > 1e-12 * size[..., :1]                      # up to the rank of W
    return Q @ (U * in_span[..., None, :])


def value_axes(span, v):
    """Return w_d = sum_j v_jd Phi(k_j) up to a common factor, (..., R, Dv)."""
    return span.F.mT @ ((span.n - span.n.amax(-1, keepdim=True)).exp()[..., None] * v)


def query_coordinates(span, q, k):
    """Return the coordinates of psi(q_i) in the span of the keys' features, (..., M, R).

    |psi(q_i)| = 1, so the squared length of the coordinates on some axes is the share of |phi(q)|^2
    that lies on these axes.
    """
    n = q.square().sum(-1) / (2 * q.shape[-1] ** 0.5)
    dots = (log_kernel(q, k) - n[..., :, None] - span.n[..., None, :]).clamp(max=0).exp()
    size = span.F.square().sum(-2, keepdim=True)
    return dots @ span.F / torch.where(size > 0, size, torch.inf)           # F's pseudo-inverse


def principal_axes(span):
    """Return the axes u_1, u_2, ... in rows, (..., N, R).

    The axes are computed from the features X. `kernel_pca` computes them from the Gram matrix,
    where rounding errors spoil the axes with small variance. Here these axes are still orthonormal.
    """
    return torch.linalg.svd(span.X, full_matrices=False)[2]


def explained_variance(span, Q):
    """Return EV = tr(P C) / tr C, (...): the share of the keys' variance in the subspace of Q.

    EV is NaN if the keys have no variance.
    """
    return (span.X @ Q).square().sum((-2, -1)) / span.variance


def token_overlap(A, B):
    """Return the sum of cos^2 of the principal angles of two bases, divided by the smaller rank.

    Chance is Dv/N. The overlap is NaN if a basis is empty.
    """
    ranks = [Q.square().sum((-2, -1)) for Q in (A, B)]
    smaller = torch.minimum(*ranks)                             # 0, or at least 1 up to rounding
    total = (A.mT @ B).square().sum((-2, -1))
    return total / smaller.clamp(min=1).where(smaller > 0.5, torch.nan)


# --- a layer and its controls ---------------------------------------------------------------------

class Layer:
    """`probe.Heads` prepared for experiments: tensors (1, B, H, N, D), and the controls.

    values: {source: (draws, B, H, N, D)}; the sources are "learned", "other" (another head), "x W"
    (the input times random matrices) and "iid" (random numbers). All have the norm of v. Scaled
    Attention multiplies all of them by I - S; `raw` has the values before this product. key:
    (number of the layer, number of the first image), the seed of the random numbers. W depends on
    the layer only, so W is the same for all pieces of images.
    """

    def __init__(self, heads, name="", key=(0, 0), draws=3):
        q, k, v, raw, x, S = heads
        B, H, N, _ = k.shape
        if not all(t.isfinite().all() for t in (q, k, v)):
            raise common.InputError(f"layer {name}: queries, keys or values are not finite; the "
                                    "checkpoint is unusable")
        self.heads, self.name, self.key, self.dv = heads, name, key, v.shape[-1]
        self.q, self.k, self.v, self.scaled = q[None], k[None], v[None], S is not None

        W = self.normal(-1, draws, 1, H, x.shape[-1], self.dv)
        iid = torch.stack([self.normal(key[1] + i, H, N, self.dv) for i in range(B)])
        self.raw = {"learned": raw[None], "other": raw.roll(1, 1)[None],
                    "x W": x[None, :, None] @ W, "iid": iid[None]}
        if H == 1:
            del self.raw["other"]                               # a single head has no other head
        size = self.v.norm(dim=(-2, -1), keepdim=True)
        scaled = {name: u - S @ u if self.scaled else u for name, u in self.raw.items()}
        self.values = {name: u / u.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-300) * size
                       for name, u in scaled.items()}

    def normal(self, image, *shape):
        """Draw Gaussian numbers for one image of this layer (image -1: for all images)."""
        seed = torch.Generator().manual_seed(hash((self.key[0], image + 1, 0)) % 2 ** 63)
        return torch.randn(shape, generator=seed, dtype=torch.float64)

    @cached_property
    def axes(self):
        return kernel_pca(self.k)

    @cached_property
    def span(self):
        return key_span(self.k)

    @cached_property
    def bases(self):
        """{source: basis of span{w_d} in feature space}; "KPCA" has the axes of kernel PCA."""
        bases = {name: basis(value_axes(self.span, v)) for name, v in self.values.items()}
        return bases | {"KPCA": principal_axes(self.span)[..., :self.dv, :].mT}


CONTROLS = ("x W", "other", "iid")
