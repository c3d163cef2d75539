"""Which subspace of feature space do values span? A layer, its nulls, and coordinates for both.

Attention reads v through w_d = sum_j v_jd Phi(k_j), Phi(x).Phi(y) = k(x, y): h_id is Phi(q_i).w_d
over g(q_i) for any v. The output matrix undoes any v -> v R, so only span{w_d} matters. Kernel PCA
says that it is the top principal subspace of the keys: that is what EV and overlap measure.

Shapes: k (..., N, D), v (..., N, Dv), float64. Nothing overflows: Phi(x) = e^n(x)
psi(x), |psi| = 1, and exponents are kept apart. No study itself.
"""

from functools import cached_property
from typing import NamedTuple

import torch

import common
from kpca import basis, kernel_pca, key_scale, log_kernel


# --- coordinates ----------------------------------------------------------------------------------

class Span(NamedTuple):
    """Orthonormal coordinates in the span of the keys' features."""
    F: torch.Tensor                     # (..., N, R) psi(k_j); directions below 1e-12 are dropped
    X: torch.Tensor                     # (..., N, R) centred Phi(k_j) / g_j, times e^(c/2)
    n: torch.Tensor                     # (..., N) |k_j|^2 / (2 sqrt(D))


def key_span(k):
    """Coordinates of k's features in an orthonormal basis of their span."""
    s = log_kernel(k, k)
    n = s.diagonal(dim1=-2, dim2=-1) / 2
    # psi(k_i).psi(k_j) = U diag(size) U^T, so the rows of U diag(size)^(1/2) are psi(k_j).
    size, U = torch.linalg.eigh((s - n[..., :, None] - n[..., None, :]).clamp(max=0).exp())
    size = torch.where(size > 1e-12 * size[..., -1:], size, 0)[..., None, :]
    F = U * size.sqrt()
    lg, c = key_scale(k)
    X = (n + (c / 2 - lg)).exp()[..., None] * F
    return Span(F, X - X.mean(-2, keepdim=True), n)


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


def token_overlap(A, B):
    """Sum of cos^2 of the principal angles of two bases, over the smaller rank; chance: Dv/N."""
    ranks = [Q.square().sum((-2, -1)) for Q in (A, B)]
    return (A.mT @ B).square().sum((-2, -1)) / torch.minimum(*ranks).clamp(min=1)


# --- a layer and its nulls ------------------------------------------------------------------------

class Layer:
    """`probe.Heads` prepared for experiments: tensors (1, B, H, N, D), and what they share.

    values: {"learned": v, "other": those of another head, "x W": the input through as many
    Gaussian matrices as draws, "iid": Gaussian numbers}, (draws, B, H, N, D), all of v's size and
    all scaled by the layer's I - S if it has one; raw: before that. key: the layer's number and
    that of the first image, from which W and iid are drawn: W is the same for all images, in
    whatever pieces they come.
    """

    def __init__(self, heads, name="", key=(0, 0), draws=3):
        q, k, v, raw, x, S = heads
        B, H, N, _ = k.shape
        if not all(t.isfinite().all() for t in (q, k, v)):
            raise common.InputError(f"layer {name}: queries, keys or values are not finite: the "
                                    "model is broken")
        self.heads, self.name, self.key, self.dv = heads, name, key, v.shape[-1]
        self.q, self.k, self.v, self.scaled = q[None], k[None], v[None], S is not None

        W = self.normal(-1, draws, 1, H, x.shape[-1], self.dv)
        iid = torch.stack([self.normal(key[1] + i, H, N, self.dv) for i in range(B)])
        self.raw = {"learned": raw[None], "other": raw.roll(1, 1)[None],
                    "x W": x[None, :, None] @ W, "iid": iid[None]}
        if H == 1:
            del self.raw["other"]                                           # there is no other head
        size = self.v.norm(dim=(-2, -1), keepdim=True)
        scaled = {name: u - S @ u if self.scaled else u for name, u in self.raw.items()}
        self.values = {name: u / u.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-300) * size
                       for name, u in scaled.items()}

    def normal(self, image, *shape):
        """Gaussian numbers of this layer for one image (-1: for all)."""
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
        """{source: basis of span{w_d} in feature space}, with kernel PCA's own axes."""
        bases = {name: basis(value_axes(self.span, v)) for name, v in self.values.items()}
        return bases | {"KPCA": principal_axes(self.span)[..., :self.dv, :].mT}


NULLS = ("x W", "other", "iid")
