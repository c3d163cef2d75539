"""Does attention perform kernel PCA? The paper's derivation, its evidence, the objections to it: each an experiment.

    python kpca.py                                                   # the theory on small numbers, no data, seconds
    python kpca.py --ckpt out/cifar10_softmax --exp capture,gamma    # measured on a checkpoint of train_cls.py
    python kpca.py --ckpt out/cifar10_softmax/*.pt --exp jproj       # over training (train_cls.py --keep_every 1)
    python kpca.py --ckpt out/pydoc_softmax --exp jproj,capture      # a language model
    python plot.py kpca out/kpca                                     # figures from the CSV files

[P] Teo & Nguyen 2024 (NeurIPS), sections 2.1, 2.2, App. B, C, E.1, E.2; code `rachtsy/KPCA_code:Reconstruction`.
[R] Saritas & Yildiz 2025 (arXiv 2505.07908), `KarahanS/Reproduction-Study-KPCA:scripts`.

Kernel PCA of the keys of one head: k(x, y) = exp(x.y / sqrt(D)) = phi(x).phi(y), g(x) = sum_j k(x, k_j), features
phi(k_j) / g(k_j), centred. Theorem 1: if the values are made from the eigenvectors of the centred Gram matrix, then
softmax attention returns the projections of phi(q) / g(q) on the principal axes u_d. That is exact (`python kpca.py`).
Whether *learned* values do this is what the experiments measure, each beside three references: the same input
through a random matrix (x W), random numbers (iid), and the values of kernel PCA itself.

    equation                                          function
    (4)  centred features; Remark 1, App. B           log_gram, centre
    (5)  (6)  covariance C u = lambda u               principal_axes, from features; kernel_pca, from K~: N C has its mu
    (7)  u_d = sum_j a_dj phi~(k_j)                   coefficients: scaled such that |u_d| = 1; centred_projections
    (8)  h_i(d) = phi(q_i).u_d by kernels             kernel_projections
    (9)  (10)  attention with values v                log_g, attend
    (11) K~ a_d = lambda_d N a_d                      kernel_pca; is a learned v such an a?  a_hat, gamma_statistics
    Theorem 1  v_dj = a_dj/g_j - mean_j' a_dj'/g_j    theoretical_values
    Remark 2   number of axes                         kernel_pca (rank: at most N - 1, fewer with long keys)
    (12) (I - S) v, App. E.1                          attention.exact_scaling
    (13) J_proj, App. C                               log_phi2, projection_loss; official_loss (the released code)

    question             [P] and its code              [R]                           here (--repro adds theirs)
    length of a_d        |u_d| = 1 assumed             |a_d| = 1, so |u_d|^2 = mu_d  |a_d|^2 = 1/mu_d, so |u_d| = 1
    (I - 1_N)^-1         numeric inverse, singular     -                             pseudo-inverse, H
    K~ a = N gamma a     |gamma_i - gamma_j| small     the same, relative            eig_cos, beside nulls
    J_proj               log of mean, scale missing    mean |error| per token        signed mean, both terms, frac
    is V kernel PCA?     -                             cosines of rows, CKA          EV, frac, overlap: gauge-free
    q, k                 standardised in the model     at times                      as the model has them
    precision            float32                       float32                       float64

Shapes: q (..., M, D), k (..., N, D), v (..., N, Dv), float64; leading dimensions are draws of a null, images, heads.
Nothing overflows however long the keys are: g and the Gram matrix exist as logarithms, or times a common e^c.
"""

import argparse
import csv
import inspect
import math
import re
from contextlib import contextmanager
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

import common
import data
import data_lm
from attention import SelfAttention, rpc_attention, symmetric_attention
from lm import LM, LMConfig, lm_from_checkpoint
from vit import SIZES, ViT, ViTConfig, load_weights, stored_config, vit_from_checkpoint

EPS = torch.finfo(torch.float64).eps


# --- kernel PCA of the keys (sections 2 and 2.1) ---------------------------------------------------------------------

def log_kernel(x, y):
    """log k(x_i, y_j), (..., M, N)."""
    return x @ y.mT / math.sqrt(x.shape[-1])                                    # k(x, y) = exp(x.y / sqrt(D))


def mask_future(t, causal):
    return t.masked_fill(torch.ones_like(t, dtype=torch.bool).triu(1), -math.inf) if causal else t


def log_g(x, k, causal=False):
    """log g(x_i), (..., M). causal: x_i sees k_1 ... k_i only."""
    return mask_future(log_kernel(x, k), causal).logsumexp(-1)                  # g(x) = sum_j k(x, k_j)          (9)


def attend(q, k, v, causal=False):
    """Attention, h (..., M, Dv)."""
    return mask_future(log_kernel(q, k), causal).softmax(-1) @ v                # h_i = sum_j k(q_i, k_j)/g(q_i) v_j (9)


def log_gram(k, p=1.0):
    """log of the Gram matrix of phi(k_j) / g(k_j)^p, (..., N, N). p = 1: the paper's; 0: the plain kernel."""
    s = log_kernel(k, k)
    w = p * s.logsumexp(-1)
    return s - w[..., :, None] - w[..., None, :]                                # k(k_i, k_j)/(g_i g_j)       (Remark 1)


def centre(K):
    """K~ = H K H with H = I - 1_N: the Gram matrix of the centred features (4)."""
    K = K - K.mean(-1, keepdim=True) - K.mean(-2, keepdim=True) + K.mean((-2, -1), keepdim=True)           # (App. B)
    return (K + K.mT) / 2


class Axes(NamedTuple):
    """Kernel PCA of the keys of every head. e^c makes the largest diagonal entry of K one."""
    K: torch.Tensor                          # (..., N, N) e^c K~
    mu: torch.Tensor                         # (..., N) eigenvalues of e^c K~, descending; lambda_d = e^-c mu_d / N
    U: torch.Tensor                          # (..., N, N) their orthonormal eigenvectors, in columns
    rank: torch.Tensor                       # (...) eigenvalues above rounding error: the axes that exist in float64
    c: torch.Tensor                          # (..., 1)
    log_g: torch.Tensor                      # (..., N) log g(k_j)
    log_w: torch.Tensor                      # (..., N) c/2 - p log g(k_j), never above -|k_j|^2 / (2 sqrt(D))


def key_weights(k, p=1.0):
    """log g(k_j) (..., N), c (..., 1) and log_w (..., N) as in Axes."""
    s = log_kernel(k, k)
    lg = s.logsumexp(-1)
    c = (2 * p * lg - s.diagonal(dim1=-2, dim2=-1)).amin(-1, keepdim=True)
    return lg, c, c / 2 - p * lg


def kernel_pca(k, p=1.0):
    """Solve (11) for every head."""
    lg, c, log_w = key_weights(k, p)
    K = centre((log_gram(k, p) + c[..., None]).exp())
    mu, U = torch.linalg.eigh(K)                                                # K~ a_d = lambda_d N a_d        (11)
    mu, U = mu.flip(-1), U.flip(-1)
    U = U * U.gather(-2, U.abs().argmax(-2, keepdim=True)).sign()               # its largest entry positive
    N, top = k.shape[-2], mu[..., :1]
    rank = ((mu > N * EPS * top) & (top > N * EPS)).sum(-1).clamp(max=N - 1)    # centring costs one       (Remark 2)
    return Axes(K, mu, U, rank, c, lg, log_w)


def coefficients(axes, d):
    """a_d e^(-c/2) of the first d axes, (..., N, d); zero where no axis is resolved."""
    mu = axes.mu[..., :d]
    keep = torch.arange(mu.shape[-1], device=mu.device) < axes.rank[..., None]
    length = torch.where(keep, mu, torch.inf).rsqrt()[..., None, :]
    return axes.U[..., :d] * length                                             # a_d = U_d/sqrt(mu_d): |u_d| = 1 (7)


def theoretical_values(axes, d):
    """The values for which attention is kernel PCA, (..., N, d). The mean is zero: it is there because (8) has it."""
    a = coefficients(axes, d)
    return axes.log_w.exp()[..., None] * (a - a.mean(-2, keepdim=True))         # a_dj/g_j - mean_j' a_dj'/g_j   (Th. 1)


def kernel_projections(q, k, axes, d):
    """phi(q_i)/g(q_i) . u_d by expanding u_d in the keys, without any softmax or value, (..., M, d)."""
    t = log_kernel(q, k)
    kappa = (t - t.logsumexp(-1, keepdim=True) + axes.log_w[..., None, :]).exp()          # phi(q_i).phi(k_j)
    return (kappa - kappa.mean(-1, keepdim=True)) @ coefficients(axes, d)       # sum_j a_dj phi(q_i).phi~(k_j)  (8)


def centred_projections(q, k, axes, d):
    """The same for centred queries, as kernel PCA has it: e^(c/2) h (..., M, d) and e^c |phi~(q_i)|^2 (..., M)."""
    h = kernel_projections(q, k, axes, d) - kernel_projections(k, k, axes, d).mean(-2, keepdim=True)
    t = log_kernel(q, k)
    to_mean = (t - t.logsumexp(-1, keepdim=True) + axes.log_w[..., None, :]).exp().mean(-1)    # phi(q_i).m, m the mean
    mean2 = (log_kernel(k, k) + axes.log_w[..., None] + axes.log_w[..., None, :]).exp().mean((-2, -1))   # |m|^2
    scale = (axes.c / 2).clamp(max=700).exp()
    return scale[..., None] * h, (log_phi2(q, k) + axes.c).clamp(max=700).exp() - 2 * scale * to_mean + mean2[..., None]


# --- the projection error (section 2.2.1, App. C) --------------------------------------------------------------------

def log_phi2(q, k, causal=False):
    """log |phi(q_i) / g(q_i)|^2, (..., M)."""
    return q.square().sum(-1) / math.sqrt(q.shape[-1]) - 2 * log_g(q, k, causal)          # (13), second display


def projection_loss(log_phi2, h):
    """J_proj and its terms, each a mean over tokens, (...). Capped at e^700 so that they stay finite."""
    phi2, h2 = log_phi2.clamp(max=700).exp(), h.square().sum(-1)                # (..., M)
    m_phi, m_h = phi2.mean(-1), h2.mean(-1)
    ratio = (m_h.log() - log_mean_exp(log_phi2)).clamp(-700, 700).exp()
    return {"J": m_phi - m_h,                                                   # mean(|phi|^2 - |h|^2)         (13)
            "phi2": m_phi, "h2": m_h, "phi2 median": phi2.median(-1).values, "h2 median": h2.median(-1).values,
            "above": (h2 > phi2).double().mean(-1), "rel_phi": (1 - ratio).abs(), "rel_h": (1 - 1 / ratio).abs()}


def log_mean_exp(t):
    return t.logsumexp(-1) - math.log(t.shape[-1])


def standardise(x):
    """Mean 0 and variance 1 (unbiased) of every token's D numbers, as both publications' code does with q and k."""
    return (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)


def official_loss(q, k, v, with_h=True):
    """What the released code logs as J_proj: log mean(phi^2 - h^2) over a batch of tensors (B, H, N, D), q and k raw.

    It gets g from the first column of the attention matrix (App. C) but leaves out 1/sqrt(D) in |q|^2 and q.k_1, so
    "phi^2" is e^40 or so and subtracting h^2 (about 5) changes no digit: the curve knows nothing about v.
    """
    q, k = standardise(q), standardise(k)
    first = (q * k[..., :1, :]).sum(-1)                                         # q_i.k_1, without scale
    log_g2 = 2 * first - 2 * (first / math.sqrt(q.shape[-1]) - log_g(q, k))     # 2 q_i.k_1 - log A_i1^2 (App. C)
    log_mean = log_mean_exp((q.square().sum(-1) - log_g2).flatten(-3))          # |q_i|^2 - log g_i^2, scale missing
    h2 = attend(q, k, v).square().sum(-1).flatten(-3).mean(-1)
    return log_mean + torch.log1p(-h2 * (-log_mean).exp()) if with_h else log_mean


def absolute_losses(q, k, v):
    """[R]'s J: mean |phi^2 - h^2| per token, and its two relative versions with a floor of 1e-8; q, k raw. (...)"""
    q, k = standardise(q), standardise(k)
    phi2, h2 = log_phi2(q, k).exp(), attend(q, k, v).square().sum(-1)
    error = (phi2 - h2).abs()
    return {"J abs [R]": error.mean(-1), "rel_h floor [R]": (error / (h2 + 1e-8)).mean(-1),
            "rel_phi floor [R]": (error / (phi2 + 1e-8)).mean(-1)}


# --- are values eigenvectors? (section 2.2.2, Eqn 11) ----------------------------------------------------------------

def a_hat(v, log_g, inverse="pseudo"):
    """The a with v = G (I - 1_N) a, up to a factor, (..., N, Dv). None exists unless sum g_j v_j = 0.

    inverse: "pseudo" takes the pseudo-inverse, which is I - 1_N itself; "numeric" inverts the singular matrix in
    floating point as [P] writes (an error, or noise of size 1e14); None returns G^-1 v, for scaled attention, v = G a.
    """
    a = (log_g - log_g.amax(-1, keepdim=True)).exp()[..., None] * v             # G^-1 v
    if inverse == "numeric":
        N = v.shape[-2]
        return torch.linalg.inv(torch.eye(N, dtype=v.dtype, device=v.device) - 1 / N) @ a     # (I - 1_N)^-1 G^-1 v
    return a if inverse is None else a - a.mean(-2, keepdim=True)               # H G^-1 v


def gamma_statistics(axes, a):
    """Is K~ a = N gamma a? Per column of a, (..., Dv); gamma (..., N, Dv). All times e^c but eig_cos and wstd/lambda.

    rho: Rayleigh quotient. eig_cos: cosine between a and K~ a, 1 for eigenvectors only. wstd: a^2-weighted standard
    deviation of gamma, which unlike pair_mean and pair_std (of |gamma_i - gamma_j|) does not divide by a.
    """
    N, Ka, length = a.shape[-2], axes.K @ a, a.norm(dim=-2)
    rho = (a * Ka).sum(-2) / length.square()
    wstd = (Ka - rho[..., None, :] * a).norm(dim=-2) / (N * length)
    gamma = torch.where(a == 0, 0, Ka / (N * a))                                # K~ a / (N a); 0/0 counts as 0  (11)
    mean, std = pair_differences(gamma)
    return {"gamma": gamma, "rho": rho, "eig_cos": rho * length / Ka.norm(dim=-2), "wstd": wstd,
            "wstd/lambda": wstd / (rho / N), "pair_mean": mean, "pair_std": std}


def pair_differences(x):
    """Mean and standard deviation of |x_i - x_j| over the pairs i < j of the second last dimension, in N log N."""
    N, x = x.shape[-2], (x - x.mean(-2, keepdim=True)).sort(-2).values
    pairs, order = N * (N - 1) / 2, torch.arange(1 - N, N, 2, dtype=x.dtype, device=x.device)[:, None]
    mean = (order * x).sum(-2) / pairs                                          # sum_(i<j) |x_i - x_j|, sorted x
    square = N * x.square().sum(-2)                                             # sum_(i<j) (x_i - x_j)^2, centred x
    return mean, ((square - pairs * mean.square()).clamp(min=0) / max(pairs - 1, 1)).sqrt()


def relative_pair_differences(x, floor=1e-10):
    """[R]'s |x_i - x_j| / (max(|x_i|, |x_j|) + floor): mean, standard deviation and median over the pairs."""
    i, j = torch.triu_indices(x.shape[-2], x.shape[-2], 1, device=x.device)
    stats = []
    for y in x.unbind(-1):                                                      # one column at a time: memory
        r = (y[..., i] - y[..., j]).abs() / (torch.maximum(y[..., i].abs(), y[..., j].abs()) + floor)
        stats.append(torch.stack([r.mean(-1), r.std(-1), r.median(-1).values]))
    return torch.stack(stats, -1)                                               # (3, ..., Dv)


def eigenvalue_statistics(mu):
    """[R]'s four numbers of descending eigenvalues (..., D): max, min, mean, lower median."""
    return {"max": mu[..., 0], "min": mu[..., -1], "mean": mu.mean(-1), "median": mu.median(-1).values}


# --- gauge-free: which subspace of feature space do values span? -----------------------------------------------------
# Attention reads v through w_d = sum_j v_jd phi(k_j): h_id = phi(q_i).w_d / g(q_i) for any v. The output matrix undoes
# any v -> v R, so only span{w_d} matters. Kernel PCA says: it is the top principal subspace of the keys.

class Span(NamedTuple):
    """Orthonormal coordinates in the span of the keys' features, with phi(x) = e^n(x) psi(x), |psi| = 1."""
    F: torch.Tensor                          # (..., N, R) psi(k_j); directions below 1e-12 are dropped
    Z: torch.Tensor                          # (..., M, R) psi(q_i), the part inside the span
    X: torch.Tensor                          # (..., N, R) centred phi(k_j) / g_j^p, times e^(c/2)
    n: torch.Tensor                          # (..., N) |k_j|^2 / (2 sqrt(D))


def key_span(q, k, p=1.0):
    """Coordinates of phi(q), phi(k) in an orthonormal basis of the span of all phi(k_j). q, k: (..., N, D)."""
    s, t = log_kernel(k, k), log_kernel(q, k)
    n, n_q = s.diagonal(dim1=-2, dim2=-1) / 2, q.square().sum(-1) / (2 * math.sqrt(q.shape[-1]))
    size, U = torch.linalg.eigh((s - n[..., :, None] - n[..., None, :]).clamp(max=0).exp())    # psi(k_i).psi(k_j)
    size = torch.where(size > 1e-12 * size[..., -1:], size, 0)[..., None, :]
    F = U * size.sqrt()
    inverse = U * torch.where(size > 0, size, torch.inf).rsqrt()                # F^+ transposed
    Z = (t - n_q[..., :, None] - n[..., None, :]).clamp(max=0).exp() @ inverse
    X = (n + key_weights(k, p)[2]).exp()[..., None] * F
    return Span(F, Z, X - X.mean(-2, keepdim=True), n)


def basis(W):
    """Orthonormal basis of the column space, W's shape at most; columns are zero beyond the rank."""
    Q, r = torch.linalg.qr(W / W.norm(dim=-2, keepdim=True).clamp(min=1e-300))
    U, size, _ = torch.linalg.svd(r, full_matrices=False)
    return Q @ (U * (size > 1e-12 * size[..., :1])[..., None, :])


def value_axes(span, v):
    """The w_d, common factor dropped, (..., R, Dv)."""
    return span.F.mT @ ((span.n - span.n.amax(-1, keepdim=True)).exp()[..., None] * v)     # w_d = sum_j v_jd phi(k_j)


def principal_axes(span):
    """All axes u_1, u_2, ... in rows, (..., N, R). From features, not their products as in kernel_pca, so that axes far
    below the rounding error of the Gram matrix are still orthonormal."""
    return torch.linalg.svd(span.X, full_matrices=False)[2]                     # C u_d = lambda_d u_d, C = X^T X/N (5)


def explained_variance(span, Q):
    """EV = tr(P C) / tr C, (...): the share of the keys' variance in feature space that lies in the subspace."""
    return (span.X @ Q).square().sum((-2, -1)) / span.X.square().sum((-2, -1)).clamp(min=1e-300)


def query_share(span, Q=None):
    """Share of |phi(q_i)|^2 inside the subspace, (..., M) in [0, 1]; Q = None: inside the span of all keys."""
    return (span.Z if Q is None else span.Z @ Q).square().sum(-1)


def token_overlap(A, B):
    """Sum of cos^2 of the principal angles of two column spaces, given by bases, over the smaller rank; chance Dv/N."""
    ranks = [Q.square().sum((-2, -1)) for Q in (A, B)]
    return (A.mT @ B).square().sum((-2, -1)) / torch.minimum(*ranks).clamp(min=1)


def restrict(q, k, v, span, u, affine=False):
    """Attention with only the part of v on the axes u (..., d, R), h (..., M, Dv): every w_d is projected on them.

    That is v -> V V^T E v, V the theoretical values, without its inverse. affine adds the constant row, the same for
    every query, that centring takes away; with all N - 1 axes (p = 1) attention is then what it was. Exact up to
    |k|^2 / sqrt(D) of about 60.
    """
    longest, w = span.n.amax(-1, keepdim=True), value_axes(span, v)
    lost = w - u.mT @ (u @ w)

    def project(x, inside):                                                     # phi(x_i).w_d / g(x_i), x = q or k
        n = x.square().sum(-1) / (2 * math.sqrt(x.shape[-1]))
        return (n - log_g(x, k) + longest).clamp(max=300).exp()[..., None] * (inside @ lost)

    h = attend(q, k, v) - project(q, span.Z)
    return h + project(k, span.F).mean(-2, keepdim=True) if affine else h


# --- similarities of two value matrices; all but the unbiased CKA and the overlap above are [R]'s --------------------

def hsic(K, L):
    """Unbiased HSIC of two Gram matrices (Song et al. 2012): no diagonal, chance 0. (...)"""
    N = K.shape[-1]
    K, L = (M - torch.diag_embed(M.diagonal(dim1=-2, dim2=-1)) for M in (K, L))
    total = (K * L).sum((-2, -1)) + K.sum((-2, -1)) * L.sum((-2, -1)) / ((N - 1) * (N - 2))
    return (total - 2 / (N - 2) * (K.sum(-1) * L.sum(-1)).sum(-1)) / (N * (N - 3))


def cka(X, Y, unbiased=False):
    """Linear CKA of rows X (..., N, a) and Y (..., N, b); nan for fewer than four rows if unbiased. No epsilon."""
    X, Y = (M - M.mean(-2, keepdim=True) for M in (X, Y))
    K, L = (M @ M.mT for M in (X / X.norm(dim=(-2, -1), keepdim=True), Y / Y.norm(dim=(-2, -1), keepdim=True)))
    if not unbiased:
        return (K * L).sum((-2, -1)) / (K.norm(dim=(-2, -1)) * L.norm(dim=(-2, -1)))
    if K.shape[-1] < 4:
        return torch.full(torch.broadcast_shapes(K.shape[:-2], L.shape[:-2]), math.nan, dtype=K.dtype, device=K.device)
    size = hsic(K, K).clamp(min=1e-15) * hsic(L, L).clamp(min=1e-15)            # 0 if one row is all there is
    return hsic(K, L) / size.sqrt()


def kernel_cka(X, Y):
    """CKA with Gaussian kernels whose width is the median squared distance that is not zero."""
    def gram(X):
        d2 = torch.cdist(X, X, compute_mode="donot_use_mm_for_euclid_dist").square()
        d2 = d2 / d2.amax((-2, -1), keepdim=True)
        order = torch.where(d2 > 0, d2, torch.inf).flatten(-2).sort(-1).values
        median = order.gather(-1, (d2 > 0).sum((-2, -1))[..., None].sub(1) // 2)
        return centre((-d2 / (2 * median[..., None])).exp())
    K, L = gram(X), gram(Y)
    return (K * L).sum((-2, -1)) / (K.norm(dim=(-2, -1)) * L.norm(dim=(-2, -1)))


def assignment(cost):
    """The one-to-one matching of least total cost: column of every row, (N,) int. cost: (N, N) numpy.

    Shortest augmenting paths with potentials (Jonker & Volgenant 1987), O(N^3).
    """
    n = len(cost)
    u, v, row_of, column_of = np.zeros(n), np.zeros(n), np.full(n, -1), np.full(n, -1)
    for start in range(n):
        dist, before, done = np.full(n, np.inf), np.full(n, start), np.zeros(n, bool)
        row, reach = start, 0.0
        while row >= 0:                                                         # Dijkstra until a free column
            step = reach + cost[row] - u[row] - v
            closer = ~done & (step < dist)
            dist[closer], before[closer] = step[closer], row
            column = np.where(done, np.inf, dist).argmin()
            done[column], reach, row = True, dist[column], row_of[column]
        seen = done & (row_of >= 0)
        u[row_of[seen]] += reach - dist[seen]
        u[start] += reach
        v[done] -= reach - dist[done]
        while column >= 0:                                                      # shift the matches along the path
            row = before[column]
            row_of[column], column_of[row], column = row, column, column_of[row]
            if row == start:
                break
    return column_of


def row_similarities(V, W):
    """[R]'s similarities of two value matrices, row by row, (...). Not gauge-free: turning W's columns changes them."""
    V, W = torch.broadcast_tensors(V, W)
    C = (V / V.norm(dim=-1, keepdim=True)) @ (W / W.norm(dim=-1, keepdim=True)).mT                # (..., N, N) cosines
    direct = C.diagonal(dim1=-2, dim2=-1)
    match = np.stack([assignment(-c) for c in C.view(-1, *C.shape[-2:]).cpu().numpy()])
    match = torch.as_tensor(match, device=C.device).view(direct.shape)
    best = C.gather(-1, match[..., None])[..., 0]
    centred = [M - M.mean(-1, keepdim=True) for M in (V, W)]
    pearson = torch.cosine_similarity(*centred, dim=-1, eps=0)
    return {"direct": direct.mean(-1), "direct_min": direct.amin(-1), "direct_max": direct.amax(-1),
            "neg_pct": 100 * (direct < 0).double().mean(-1), "optimal": best.mean(-1), "optimal_min": best.amin(-1),
            "optimal_max": best.amax(-1), "max_any": C.amax(-1).mean(-1), "assign": match, "pearson": pearson.mean(-1),
            "rel_frob": (V - W).norm(dim=(-2, -1)) / V.norm(dim=(-2, -1)),
            "euclid": (V - W).norm(dim=-1).mean(-1), "l1": (V - W).abs().sum(-1).mean(-1)}


# --- what attention really used --------------------------------------------------------------------------------------

class Heads(NamedTuple):
    """The heads of one layer on some images, float64: the layer computes h = softmax(q k^T / sqrt(D)) v."""
    q: torch.Tensor                          # (B, H, N, D)
    k: torch.Tensor                          # (B, H, N, D)
    v: torch.Tensor                          # (B, H, N, D) what A multiplies: (I - S) V in scaled attention
    raw: torch.Tensor                        # (B, H, N, D) V itself
    x: torch.Tensor                          # (B, N, C) the layer's input
    causal: bool = False


@torch.no_grad()
def attention_inputs(module, x):
    """Heads of a SelfAttention of any kind at its input x (B, N, C). RPC: q and k of its last step."""
    q, k, raw = module.project(x)
    v = raw
    if module.attn.startswith("rpc"):
        steps = []
        q = q if module.attn == "rpc_asym" else None
        rpc_attention(k, raw, q=q, causal=module.causal, **module.rpc, trace=steps)
        k = steps[-1]["K2"]
        q = k if q is None else q
    elif module.attn == "scaled_s":
        v = raw - module.s @ raw                                                # (I - S) V                      (12)
    elif module.attn == "scaled_alpha":
        v = raw - module.s * symmetric_attention(k, raw, causal=module.causal)
    here = torch.device("cpu") if x.device.type == "mps" else x.device          # mps has no float64
    return Heads(*(t.to(here).double() for t in (q, k, v, raw, x)), module.causal)


def attention_layers(model):
    layers = [m for m in model.modules() if isinstance(m, SelfAttention)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no attention.SelfAttention to look at")
    return layers


@torch.no_grad()
def capture(model, inputs):
    """Run a model on images, or a language model on tokens; the Heads of all its SelfAttention, first layer first."""
    seen, layers = {}, attention_layers(model)
    hooks = [m.register_forward_pre_hook(lambda m, args: seen.__setitem__(m, args[0])) for m in layers]
    try:
        (model.hidden if isinstance(model.eval(), LM) else model)(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return [attention_inputs(m, seen[m]) for m in layers]


@contextmanager
def attention_replaced(model, rule):
    """Within, every SelfAttention outputs proj(h), h = rule(Heads) of shape (B, H, N, D)."""
    hooks = [m.register_forward_hook(lambda m, args, _: m.proj(
        rule(attention_inputs(m, args[0])).to(args[0]).transpose(1, 2).flatten(2))) for m in attention_layers(model)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class Layer:
    """Heads prepared for the experiments: tensors (1, B, H, N, D), null values (draws, B, H, N, D), what they share.

    values: {"learned": v, "x W": the input through 3 Gaussian matrices, "iid": Gaussian numbers}, all of v's size.
    """

    def __init__(self, heads, name="", p=1.0, key=(0, 0), standardised=False):
        q, k, v, raw, x, self.causal = heads
        if k.shape[-2] < 2:
            raise ValueError(f"layer {name}: {k.shape[-2]} token, but kernel PCA needs at least two")
        if not all(t.isfinite().all() for t in (q, k, v)):
            raise ValueError(f"layer {name}: queries, keys or values are not finite: the model is broken")
        q, k = (standardise(q), standardise(k)) if standardised else (q, k)
        self.q, self.k, self.v, self.raw, self.x = q[None], k[None], v[None], raw[None], x[None, :, None]
        self.name, self.p, self.key = name, p, key
        self.dv = v.shape[-1]
        noise = [torch.Generator().manual_seed(1009 * n + i) for i, n in enumerate(key)]   # W: the same for all images
        W = torch.randn(3, 1, q.shape[1], x.shape[-1], self.dv, generator=noise[0], dtype=q.dtype).to(q.device)
        iid = torch.randn(v.shape, generator=noise[1], dtype=q.dtype).to(q.device)[None]
        self.values = {"learned": self.v, "x W": self.x @ W, "iid": iid}
        size = self.v.norm(dim=(-2, -1), keepdim=True)
        self.values = {name: u / u.norm(dim=(-2, -1), keepdim=True) * size for name, u in self.values.items()}

    @cached_property
    def parts(self):
        """Its data sets: all keys; in causal attention, where query i has keys 1 ... i, those of three queries."""
        if not self.causal:
            return [self]
        ends = sorted({max(2, self.k.shape[-2] * n // 4) for n in (1, 2, 4)})
        k, v, raw, x = self.k[0], self.v[0], self.raw[0], self.x[0, :, 0]
        return [Layer(Heads(self.q[0, ..., n - 1:n, :], *(t[..., :n, :] for t in (k, v, raw, x))), self.name, self.p,
                      self.key) for n in ends]

    @cached_property
    def axes(self):
        return kernel_pca(self.k, self.p)

    @cached_property
    def span(self):
        return key_span(self.q, self.k, self.p)

    @cached_property
    def bases(self):
        """{source: basis of span{w_d} in feature space}, with kernel PCA's own axes."""
        return {**{name: basis(value_axes(self.span, v)) for name, v in self.values.items()},
                "KPCA": principal_axes(self.span)[..., :self.dv, :].mT}


# --- experiments -----------------------------------------------------------------------------------------------------
# Each takes a Layer and returns {measure: {source: tensor}}, tensors (draws, B, H) or, for curves over axes,
# (draws, B, H, d). The docstring is printed above the table.

def exp_theorem(layer, repro=False):
    """Theorem 1 in floating point: attention with the theoretical values against projections by kernel expansion (8).

    |h - h'|: largest difference, relative to the largest |h|. The next three say what these values are: their axes u_d
    are orthonormal, V^T E V = I; sum_j g_j v_j = 0, so that scaling (12) leaves v alone; G^-1 v are eigenvectors of K~.
    axes: resolved in float64, of at most N - 1. log mu_1: natural logarithm of the largest eigenvalue of K~.
    share: of |phi(q)|^2 on the first Dv axes; "centred": of centred queries, which is what kernel PCA speaks of.
    |u|, unit a: length of the axes if |a_d| = 1, as in [P]'s and [R]'s code; then (13) does not hold.
    """
    q, k, axes, d = layer.q, layer.k, layer.axes, layer.dv
    v, a = theoretical_values(axes, d), coefficients(axes, d)
    h, expanded = attend(q, k, v), kernel_projections(q, k, axes, d)
    E = (log_kernel(k, k) + axes.log_w[..., None] + axes.log_w[..., None, :]).exp()     # G E G e^c
    unit = a.square().sum(-2) > 0                                                           # resolved axes
    h_c, phi2_c = centred_projections(q, k, axes, d)

    def worst(x):
        return x.abs().amax((-2, -1))

    out = {"|h - h'|": worst(h - expanded) / worst(h).clamp(min=1e-300),
           "|V'EV - I|": worst(a.mT @ E @ a - torch.diag_embed(unit.double())),
           "|sum g v|": (a.sum(-2).abs() / a.abs().sum(-2).clamp(min=1e-300)).amax(-1),
           "|K a - mu a|": worst(axes.K @ a - a * axes.mu[..., None, :d]) / (axes.mu[..., 0] * worst(a) + 1e-300)}
    out |= {"axes": axes.rank.double(), "log mu_1": axes.mu[..., 0].log() - axes.c[..., 0],
            "share": (h.square().sum(-1).log() - log_phi2(q, k)).exp().mean(-1),
            "share, centred": (h_c.square().sum(-1) / phi2_c).mean(-1)}
    if repro:
        out["|u|, unit a"] = ((axes.mu[..., :d].clamp(min=0).log() - axes.c) / 2).exp().mean(-1)
    return {name: {"KPCA": t} for name, t in out.items()}


def exp_jproj(layer, repro=False):
    """The projection error (13), claim 2.2.1: J_proj = mean(|phi(q)|^2 - |h|^2) falls, so attention minimises it.

    J: as printed; a true projection has J >= 0, so a negative one says that h is none. phi2, h2: its two terms, means
    and medians over tokens. above: share of tokens with |h| > |phi(q)|. rel_phi, rel_h: |phi2 - h2| over either [R].
    |h|^2 has no scale (v c and W_O / c are the same network), so only frac can show learning: the share of |phi(q)|^2
    inside span{w_d}, in [0, 1]; 1 - frac is J with the scale fixed. ceiling: inside the span of all keys, for any v.
    "J official": the log of the released code's J; "without h": the same with |h|^2 left out.
    """
    q, k = layer.q, layer.k
    lp = log_phi2(q, k, layer.causal)
    terms = {name: projection_loss(lp, attend(q, k, v, layer.causal)) for name, v in layer.values.items()}
    if not layer.causal:
        terms["KPCA"] = projection_loss(lp, attend(q, k, theoretical_values(layer.axes, layer.dv)))
    out = {m: {s: t[m] for s, t in terms.items()} for m in terms["learned"]}
    out["phi2"], out["phi2 median"] = ({"learned": out[m]["learned"]} for m in ("phi2", "phi2 median"))
    out |= over_parts(exp_capture, layer, only_frac=True)
    if repro and not layer.causal:
        for source, v in layer.values.items():
            for m, t in absolute_losses(q, k, v).items():
                out.setdefault(m, {})[source] = t
            for m, with_h in (("J official", True), ("J official without h", False)):
                out.setdefault(m, {})[source] = official_loss(q, k, v, with_h)[:, None, None].expand(-1, q.shape[1], 1)
    return out


def exp_gamma(layer, repro=False):
    """Are the learned values eigenvectors (11), claim 2.2.2: K~ a = N gamma a with all gamma_i equal?

    [P] takes a = (I - 1_N)^-1 G^-1 v and finds |gamma_i - gamma_j| near 0. But I - 1_N has no inverse, and eigenvalues
    of K~ never exceed 1 / min g: everything is near 0. Here a = H G^-1 v, the pseudo-inverse. All are means over axes.
    eig_cos: cosine between a and K~ a, 1 for eigenvectors only; K~ near a multiple of H makes it near 1 for noise too.
    wstd/lambda: weighted standard deviation of gamma over its mean. |dgamma|: mean |gamma_i - gamma_j|;
    |dgamma|/lambda: over the mean of the first Dv eigenvalues lambda_d = mu_d / N.
    unsolvable: |sum_j g_j v_j| / sum_j |g_j v_j|, 0 if an exact a exists. v = G a: scaled attention, V before I - S.
    numeric inverse: |dgamma| as [P] prints it, 0 for noise too. relative: |dgamma| over the larger of the two [R].
    """
    axes, d, N = layer.axes, min(layer.dv, layer.k.shape[-2]), layer.k.shape[-2]
    scale, lam = (-axes.c).exp(), axes.mu[..., :d] / N                          # e^c is undone here; lambda_d  (11)
    unresolved = torch.arange(d, device=lam.device) >= axes.rank[..., None]
    out = {}

    def put(measure, source, t):
        out.setdefault(measure, {})[source] = t.masked_fill(unresolved, math.nan) if source == "KPCA" else t

    sources = {**{s: a_hat(v, axes.log_g) for s, v in layer.values.items()}, "KPCA": axes.U[..., :d]}
    for source, a in sources.items():
        g = gamma_statistics(axes, a)
        put("eig_cos", source, g["eig_cos"])
        put("wstd/lambda", source, g["wstd/lambda"])
        put("|dgamma|", source, g["pair_mean"] * scale)
        put("|dgamma| std", source, g["pair_std"] * scale)
        put("|dgamma|/lambda", source, g["pair_mean"] / lam.mean(-1, keepdim=True))
        gv = a if source == "KPCA" else a_hat(layer.values[source], axes.log_g, None)
        put("unsolvable", source, gv.sum(-2).abs() / gv.abs().sum(-2))
        if repro and source != "KPCA":
            put("relative", source, relative_pair_differences(g["gamma"] * scale[..., None])[0])
            numeric = gamma_statistics(axes, a_hat(layer.values[source], axes.log_g, "numeric"))
            put("numeric inverse", source, numeric["pair_mean"] * scale)
            put("numeric inverse std", source, numeric["pair_std"] * scale)
    if not torch.equal(layer.raw, layer.v):                                     # scaled attention: V before I - S  (12)
        for source, v in {**layer.values, "learned": layer.raw}.items():
            put("eig_cos, v = G a", source, gamma_statistics(axes, a_hat(v, axes.log_g, None))["eig_cos"])
    put("lambda", "KPCA", lam * scale)
    curves = {f"{m} by axis": t for m, t in out.items() if m != "unsolvable"}
    means = {m: {s: x.nanmean(-1) for s, x in t.items()} for m, t in out.items() if not m.endswith(" std")}
    return means | curves


def exp_eigstats(layer, repro=False):
    """The first D eigenvalues mu_d = N lambda_d of K~: [P] reports max 648.46, min 4.65, mean 40.07, median 17.73.

    None can exceed 1 / min_j g_j <= 1 ("bound"). [R]'s statistic is the last row: each rank averaged over layers and
    heads, then max, min, mean and lower median. Right: keys standardised as in both publications' code.
    axes: resolved ones. log g span: log of largest over smallest g_j. |k|^2/sqrt(D): the larger, the fewer axes.
    E/N: of the centred kernel matrix without g, over N. With standardised keys its size is the one [P] reports.
    """
    out = {}
    for source, k in (("as they are", layer.k), ("standardised", standardise(layer.k))):
        lg, c, _ = key_weights(k, layer.p)
        spectrum = torch.linalg.eigvalsh(centre((log_gram(k, layer.p) + c[..., None]).exp())).flip(-1)
        mu = (-c).exp() * spectrum.clamp(min=0)
        rows = eigenvalue_statistics(mu[..., :k.shape[-1]])
        rows |= {"bound": (-lg.amin(-1)).exp(),
                 "axes": (spectrum > k.shape[-2] * EPS * spectrum[..., :1]).double().sum(-1),
                 "log g span": lg.amax(-1) - lg.amin(-1),
                 "|k|^2/sqrt(D)": (k.square().sum(-1) / math.sqrt(k.shape[-1])).mean(-1), "mu by axis": mu[..., :-1]}
        if repro:
            s = log_kernel(k, k).clamp(max=700)
            E = eigenvalue_statistics(torch.linalg.eigvalsh(centre(s.exp()) / k.shape[-2]).flip(-1)[..., :k.shape[-1]])
            rows |= {f"E/N {m}": t for m, t in E.items()}
        for m, t in rows.items():
            out.setdefault(m, {})[source] = t
    return out


def exp_values(layer, repro=False):
    """Do learned values look like the theoretical ones? Column KPCA: a network that is exactly that, its axes turned.

    overlap: sum of cos^2 of the principal angles of the two column spaces in token space, over Dv; chance Dv/N.
    output: share of |h|^2 that a linear map of the theoretical output A V explains, fitted on the same image.
    CKA unbiased: linear, chance 0.
    [R]'s scores are against values with |a_d| = 1. They punish turned axes, which W_O undoes, and chance is not 0:
    direct and optimal (tokens matched one to one) mean cosine of rows, pearson, neg_pct (of direct cosines), CKAs.
    """
    axes, d = layer.axes, min(layer.dv, layer.k.shape[-2])
    turn = torch.linalg.qr(torch.randn(d, d, generator=torch.Generator().manual_seed(1), dtype=torch.float64))[0]
    scaled = (axes.log_g.amin(-1, keepdim=True) - axes.log_g).exp()[..., None]              # 1/g_j, largest 1
    theory, rows = scaled * coefficients(axes, d), axes.U[..., :d]
    sources = {**layer.values, "KPCA": theory @ turn.to(theory)}
    out, tokens, projected = {}, basis(theory), basis(kernel_projections(layer.q, layer.k, axes, d))
    for source, v in sources.items():
        h = attend(layer.q, layer.k, v)
        found = {"overlap": token_overlap(basis(v), tokens), "CKA unbiased": cka(v, theory, unbiased=True),
                 "output": (projected.mT @ h).square().sum((-2, -1)) / h.square().sum((-2, -1))}
        if repro and d == layer.dv:
            v = rows @ turn.to(rows) if source == "KPCA" else v[:1]             # one draw of x W will do
            r = row_similarities(v, rows)                                       # 1/g_j > 0 changes no row's direction
            w = scaled * v if source == "KPCA" else v
            found |= {f"{m} [R]": r[m] for m in ("direct", "optimal", "optimal_max", "pearson", "neg_pct")}
            found |= {"CKA linear [R]": cka(w, scaled * rows), "CKA kernel [R]": kernel_cka(w, scaled * rows)}
        for m, t in found.items():
            out.setdefault(m, {})[source] = t
    return out


def exp_capture(layer, repro=False, only_frac=False):
    """How much of the keys' variance, and of the queries, do values catch? No v -> v R changes this, nor can W_O.

    EV: share of the keys' variance in feature space inside span{w_d}; best: only kernel PCA's first Dv axes reach it.
    eta: (EV - EV of x W) / (best - EV of x W) in percent; "flat": less than 0.02 to win. Its error is over images, not
    over the 3 random W, which all images share. frac: share of |phi(q)|^2 inside; ceiling: in the span of all keys.
    error: |h - h_r| / |h|, h_r: v restricted to the first r = Dv axes and a constant row (truncate: affine).
    """
    span, axes, d = layer.span, layer.axes, layer.dv
    out = {"frac": {s: query_share(span, Q).mean(-1) for s, Q in layer.bases.items()}}
    out["frac"]["ceiling"] = query_share(span).mean(-1)
    if only_frac:
        return out
    mu = axes.mu.clamp(min=0)
    out["EV"] = {s: explained_variance(span, Q) for s, Q in layer.bases.items()}
    out["EV"]["best"] = mu[..., :d].sum(-1) / mu.sum(-1).clamp(min=1e-300)
    out["error"], top = {}, layer.bases["KPCA"].mT
    for s, v in layer.values.items():
        h = attend(layer.q, layer.k, v)
        rest = h - restrict(layer.q, layer.k, v, span, top, affine=True)
        out["error"][s] = rest.norm(dim=(-2, -1)) / h.norm(dim=(-2, -1))
    return out


def over_parts(experiment, layer, **options):
    """The experiment on each data set of a layer, averaged; one call, unless attention is causal."""
    results = [experiment(part, **options) for part in layer.parts]

    def mean(tensors):
        return torch.stack([t[..., :min(t.shape[-1] for t in tensors)] for t in tensors]).mean(0)

    return {m: {s: mean([r[m][s] for r in results]) for s in sources} for m, sources in results[0].items()}


EXPERIMENTS = {"theorem": exp_theorem, "jproj": exp_jproj, "gamma": exp_gamma, "eigstats": exp_eigstats,
               "values": exp_values, "capture": exp_capture}


def measure(layers, names, repro=False):
    """Run experiments: {(experiment, measure, source, layer): mean over draws, heads; numpy (B,) or curves (B, d)}."""
    out = {}
    for layer in layers:
        for name in names:
            experiment = EXPERIMENTS[name]
            found = experiment(layer, repro) if name == "jproj" else over_parts(experiment, layer, repro=repro)
            for m, sources in found.items():
                for source, t in sources.items():
                    out[name, m, source, layer.name] = t.nanmean((0, 2)).cpu().numpy()
    return out


# --- truncation: what does the network lose if its values keep only some axes? ---------------------------------------

TRUNCATIONS = {
    "strict": "the first r principal axes, as kernel PCA has it",
    "affine": "the same and one constant row, what centring takes away",
    "affine random": "r random axes and the row", "affine bottom": "the last r axes and the row",
    "col(V)": "v projected, in token space, on the first r theoretical values",
    "random r-space": "on r random directions",
    "top r of x": "on the first r left singular vectors of the layer's input",
}


def truncated(heads, how, r, p=1.0):
    """Attention with truncated values, h (B, H, N, D). how: a key of TRUNCATIONS, or "none", "v = 0", "mean v"."""
    q, k, v, N = heads.q, heads.k, heads.v, heads.k.shape[-2]
    if heads.causal:
        raise ValueError("truncate needs attention over all tokens; in causal attention each query has its own keys")
    noise = torch.Generator().manual_seed(r)
    if how == "v = 0":
        return torch.zeros_like(v)
    if how in ("none", "mean v"):
        return attend(q, k, v if how == "none" else v.mean(-2, keepdim=True).expand_as(v))
    if how == "top r of x":
        Q = torch.linalg.svd(heads.x[:, None], full_matrices=False)[0][..., :r]
    elif how == "random r-space":
        Q = torch.linalg.qr(torch.randn(*v.shape[:-1], r, generator=noise, dtype=v.dtype).to(v))[0]
    elif how == "col(V)":
        Q = basis(theoretical_values(kernel_pca(k, p), r))
    else:
        span = key_span(q, k, p)
        u = principal_axes(span)[..., :N - 1, :]
        if how == "affine random":
            order = torch.rand(u.shape[:-1], generator=noise).argsort(-1).to(k.device)
            u = u.gather(-2, order[..., None].expand(u.shape))
        u = u[..., N - 1 - r:, :] if how == "affine bottom" else u[..., :r, :]
        return restrict(q, k, v, span, u, affine=how != "strict")
    return attend(q, k, Q @ (Q.mT @ v))                                         # in token space: v -> Q Q^T v


@torch.no_grad()
def truncation_accuracy(model, images, labels, ranks, p=1.0):
    """{(how, r): correct (B,) bool numpy} with the values of all layers truncated at once; r = 0 for what has no r."""
    cases = [("none", 0), ("v = 0", 0), ("mean v", 0), *((how, r) for r in ranks for how in TRUNCATIONS)]
    out = {}
    for how, r in cases:
        if how in ("affine random", "affine bottom") and r == model.config.num_tokens - 1:
            out[how, r] = out["affine", r]                                      # all axes, whatever their order
            continue
        with attention_replaced(model, lambda heads: truncated(heads, how, r, p)):
            out[how, r] = (model.eval()(images).argmax(-1) == labels).cpu().numpy()
    return out


# --- what runs without a checkpoint ----------------------------------------------------------------------------------

def by_hand(text):
    """The numbers in a text such as "2/27 0.5", as a float64 tensor."""
    return torch.tensor([float(Fraction(number)) for number in text.split()], dtype=torch.float64)


def hand_example():
    """Four keys in the plane, everything by hand: yields (what, the numbers by hand, computed).

    Keys a(1,0), a(0,1), a(-1,0), a(0,-1) with a^2 = sqrt(2) ln 2, so that every kernel value is a power of 2.
    """
    a = math.sqrt(math.sqrt(2) * math.log(2))
    k = a * torch.tensor([[1, 0], [0, 1], [-1, 0], [0, -1]], dtype=torch.float64)
    q = a * torch.tensor([[2, 0], [1, 1], [0, 0]], dtype=torch.float64)
    axes = kernel_pca(k)
    V, mu, G = theoretical_values(axes, 3), (-axes.c).exp() * axes.mu, centre(log_gram(k).exp())
    yield "kernel values of k_1, first row of E", "2 1 1/2 1", log_kernel(k, k).exp()[0]
    yield "g(k_j) = sum_j' k(k_j, k_j')   (9)", "9/2 9/2 9/2 9/2", log_g(k, k).exp()
    yield "Gram matrix, first row = E / 4.5^2", "8/81 4/81 2/81 4/81", log_gram(k).exp()[0]
    yield "centred, first row   (App. B)", "7/162 -1/162 -5/162 -1/162", G[0]
    yield "eigenvalues mu_d = N lambda_d   (11)", "2/27 2/27 2/81 0", mu
    yield "  none exceeds 1 / min g", "2/9", (-axes.log_g.amin()).exp()
    a_d = (axes.c / 2).exp() * coefficients(axes, 3)
    yield "|a_d|^2 = 1 / mu_d, so that |u_d| = 1   (7)", "27/2 27/2 81/2", a_d.square().sum(0)
    yield "V V^T first row: turned axes give the same", "5/6 -1/2 1/6 -1/2", (V @ V.mT)[0]
    yield "V^T E V = I: the u_d are orthonormal", "1 0 0", (V.mT @ log_kernel(k, k).exp() @ V)[0]
    yield "attention of the query (2a, 0)", "0.64 0.16 0.04 0.16", log_kernel(q, k).softmax(-1)[0]
    yield "|phi(q)|^2 of three queries", "0.4096 0.16 0.0625", log_phi2(q, k).exp()
    h = attend(q, k, V)
    yield "|h|^2 of attention with values V   (9)", "0.1848 0.06 0", h.square().sum(-1)
    yield "  by kernel expansion instead   (8)", "0.1848 0.06 0", kernel_projections(q, k, axes, 3).square().sum(-1)
    yield "J_proj   (13)", "0.1291", projection_loss(log_phi2(q, k), h)["J"]
    unit = attend(q, k, V * ((axes.mu[:3] / axes.c.exp()).sqrt()))
    yield "  with |a_d| = 1 instead: |h|^2 of the first", "59/5625", unit[0].square().sum()
    one = torch.tensor([[1], [0], [0], [0]], dtype=torch.float64)
    at = a_hat(one, axes.log_g)
    g = gamma_statistics(axes, at)
    yield "a for v = (1,0,0,0), times 4.5", "27/8 -9/8 -9/8 -9/8", 4.5 * at[:, 0]
    yield "  K~ a: no multiple of a", "7/36 -1/36 -5/36 -1/36", 4.5 * (G @ at)[:, 0]
    yield "  gamma = K~ a / (N a)", "7/486 1/162 5/162 1/162", (-axes.c).exp() * g["gamma"][:, 0]
    yield "  mean |gamma_i - gamma_j|: 'almost 0'", "10/729", (-axes.c).exp() * g["pair_mean"][0]
    yield "  but lambda_1 itself is", "1/54", mu[0] / 4
    yield "  eig_cos^2: 1 would be an eigenvector", "49/57", g["eig_cos"][0].square()
    span = key_span(q, k)
    yield "EV of v; one axis could reach 3/7", "19/112", explained_variance(span, basis(value_axes(span, one)))


def random_heads(B=4, H=2, N=65, D=16):
    """Heads of a layer with random weights on random tokens."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(B, N, H * D, generator=g, dtype=torch.float64)
    W = 1.5 / math.sqrt(H * D) * torch.randn(3, 1, H, H * D, D, generator=g, dtype=torch.float64)
    q, k, v = x[:, None] @ W
    return Heads(q, k, v, v, x)


def hand():
    """Print the worked example: each number beside the one worked out by hand."""
    print("Worked example: four keys on the axes of a plane, every number also by hand (test: equal to 1e-12)\n")
    print(f"  {'':48s}{'by hand':30s}computed")
    for what, text, computed in hand_example():
        assert (by_hand(text) - computed).abs().max() < 1e-12, (what, text, computed)
        shown = " ".join(f"{x:.4g}" for x in (computed + 0.0).reshape(-1).tolist())
        print(f"  {what:48s}{text:30s}{shown}")
    print("  gamma for the first theoretical value (1,0,-1,0)/sqrt(3): 2/108, 0/0, 2/108, 0/0\n")


def flaws():
    """Published measures on random values, which nobody trained: what each would call evidence."""
    heads = random_heads()
    N, D = heads.k.shape[-2:]
    found = measure([Layer(heads)], EXPERIMENTS, repro=True)

    def at(measure, source="learned", form=".2f"):
        return format(next(t.mean() for (_, m, s, _), t in found.items() if (m, s) == (measure, source)), form)

    def invert(N):
        try:
            return f"entries up to {torch.linalg.inv(torch.eye(N, dtype=torch.float64) - 1 / N).abs().max():.0e}"
        except RuntimeError:
            return "torch finds it singular"

    kpca, raw = "KPCA", "as they are"
    print("\nPublished measures on random values, which nobody trained\n")
    for claim, *lines in (
        ("[P] |gamma_i - gamma_j| is near 0, so v holds eigenvectors (11).",
         f"(I - 1_N)^-1 does not exist. N = 4: {invert(4)}; N = {N}, where rounding hides that: {invert(N)},",
         f"and mean |gamma_i - gamma_j| is {at('numeric inverse', form='.0e')}; for other random values "
         f"{at('numeric inverse', 'iid', '.0e')}. With the pseudo-inverse it is",
         f"{at('|dgamma|', form='.1e')} and {at('|dgamma|', 'iid', '.1e')}: near 0, but so is lambda, "
         f"{at('lambda', kpca, '.1e')}.",
         f"Cosine of a and K~ a: {at('eig_cos')} and {at('eig_cos', 'iid')}; of eigenvectors {at('eig_cos', kpca)}."),
        ("[P] The eigenvalues are 648.46 to 4.65.",
         f"Here {at('max', raw, '.4f')} to {at('min', raw, '.4f')}; the bound 1 / min g is {at('bound', raw, '.4f')}."),
        ("[P] J_proj falls in training.",
         f"The log of the released code's J: {at('J official', form='.6f')}; with |h|^2 left out: "
         f"{at('J official without h', form='.6f')}.",
         f"By (13) itself J is {at('J')} for random values, below 0, and {at('J', kpca)} for kernel PCA."),
        ("[R] The rows of v are not similar to theory.",
         f"Optimal cosine {at('optimal [R]')}; of other random values {at('optimal [R]', 'iid')}; of exact kernel PCA "
         f"with turned axes {at('optimal [R]', kpca)}.",
         f"Linear CKA of random values {at('CKA linear [R]', 'iid')}; unbiased {at('CKA unbiased', 'iid')}."),
        ("[R] Theoretical values have |a_d| = 1.",
         f"Then the axes have length {at('|u|, unit a', kpca, '.3f')}, not 1, and (13) does not hold."),
        ("Sound: what share of the keys' variance in feature space does v catch?",
         f"x W {at('EV', 'x W')}, iid {at('EV', 'iid')}, kernel PCA {at('EV', kpca)}, at most {at('EV', 'best')}.",
         f"Overlap with the theoretical values: iid {at('overlap', 'iid')} (chance {D / N:.2f}), kernel PCA "
         f"{at('overlap', kpca)}."),
    ):
        print(f"  {claim}", *(f"      {line}" for line in lines), sep="\n")


# --- checkpoints, images, tables -------------------------------------------------------------------------------------

def load_model(path):
    """(model in eval mode, checkpoint dict) of a file of train_cls.py, train_lm.py, DeiT, or the released code."""
    checkpoint = common.read_checkpoint(path)
    try:
        if checkpoint.get("task") == "language modelling":
            common.check_run(checkpoint, "it", "train_lm.py", "args", "vocab", "step")
            return lm_from_checkpoint(checkpoint), checkpoint
        if checkpoint.keys() & {"task", "model_config"}:
            return vit_from_checkpoint(checkpoint), checkpoint
        sd = checkpoint.get("model", checkpoint)
        if "pos_embed" not in sd or "blocks.0.attn.qkv.weight" not in sd or "head.weight" not in sd:
            raise ValueError("neither a checkpoint of train_cls.py or train_lm.py nor ViT weights with timm's names")
        C, patch = sd["pos_embed"].shape[-1], sd["patch_embed.proj.weight"].shape[-1]          # sizes from the shapes
        size = next((s for s in SIZES.values() if s["embed_dim"] == C), None)
        if size is None:
            known = ", ".join(str(s["embed_dim"]) for s in SIZES.values())
            raise ValueError(f"weights have width {C}, expected one of {known}")
        attn = "softmax" if len(sd["blocks.0.attn.qkv.weight"]) == 3 * C else "symmetric"
        model = ViT(ViTConfig(**size, image_size=math.isqrt(sd["pos_embed"].shape[1] - 1) * patch, patch_size=patch,
                              num_classes=len(sd["head.weight"]), attn=attn))
        load_weights(model, checkpoint)
        return model.eval(), checkpoint
    except ValueError as e:
        raise ValueError(f"--ckpt {path}: {e}") from None


def untrained(checkpoint, path):
    """The network as train_cls.py or train_lm.py drew it before its first step, as a checkpoint."""
    args = checkpoint.get("args")
    if "model_config" not in checkpoint or not args or args.get("init_from"):
        raise ValueError(f"--untrained: {path} is not a run of ours that started from random weights")
    torch.manual_seed(args["seed"])
    kind, config = (LM, LMConfig) if checkpoint["task"] == "language modelling" else (ViT, ViTConfig)
    model = kind(stored_config(checkpoint, config))
    return model.eval(), {**checkpoint, "step": 0}


def load_images(args, checkpoint, config):
    """Test images (n, 3, S, S) in [0, 1], labels (n,), name, number of classes: of --data or the training's."""
    trained = checkpoint.get("args")
    trained = trained if isinstance(trained, dict) else {}
    name = args.data or trained.get("data", "shapes")
    data_dir = args.data_dir or trained.get("data_dir")
    if name == "shapes":
        source = data.load_shapes("test", args.images, config.image_size)
    elif not data_dir:
        raise ValueError(f"--data {name} needs --data_dir")
    elif name == "cifar10":
        source = data.load_cifar10(data_dir, "test")
    else:
        source = data.ImageTree(data_dir, "val", classes=checkpoint.get("classes"), size=config.image_size, subset=True)
    some = data.epoch_order(len(source.labels), 0, seed=0)[:args.images]        # files may be sorted by class
    if name == "imagenet":
        files = tqdm(some.tolist(), "decoding", leave=False, disable=len(some) < 200)
        images = torch.stack([source[i][0] for i in files])
    else:
        images = source.images[some]
    return images.float() / 255, source.labels[some], f"{len(some)} images of {name}", len(source.classes)


def load_windows(args, checkpoint, config):
    """Windows of the test text (n, T) int64, spread evenly, no labels, what they are, no classes."""
    data_dir = args.data_dir or checkpoint["args"]["data_dir"] or data_lm.pydoc_folder("out/cache")
    vocab = data_lm.Vocabulary(checkpoint["vocab"].split("\n"))
    tokens = vocab.encode_lines(data_lm.read_lines(data_lm.token_file(data_dir, "test"))).astype(np.int64)
    if len(tokens) < config.context:
        raise ValueError(f"--data_dir {data_dir}: the test text has {len(tokens)} tokens, a window {config.context}")
    starts = np.linspace(0, len(tokens) - config.context, args.images).astype(int)
    windows = torch.from_numpy(np.stack([tokens[i:i + config.context] for i in starts]))
    return windows, None, f"{len(windows)} windows of {config.context} tokens", None


def summarise(results):
    """[(experiment, measure, source, layer, mean, standard error)] over images, by layer and for "all" of them."""
    table = {}
    for (experiment, m, source, layer), t in results.items():
        table.setdefault((experiment, m, source), {})[layer] = t
    win = {}
    for layer, ev in table.get(("capture", "EV", "learned"), {}).items():        # eta: a ratio of means over images
        null, best = (table["capture", "EV", s][layer] for s in ("x W", "best"))
        win[layer] = 100 * (ev - null) / ((best - null).mean() if (best - null).mean() >= 0.02 else math.nan)
    if win:
        table["capture", "eta", "learned"] = win
    rows = []
    for key, layers in table.items():
        stack = np.stack(list(layers.values()))                                 # (layers, images, possibly d)
        for layer, t in [*layers.items(), ("all", torch.from_numpy(stack).nanmean(0).numpy())]:
            n = t.shape[0]
            rows.append((*key, layer, t.mean(0), t.std(0, ddof=1) / math.sqrt(n) if n > 1 else t.mean(0) * math.nan))
    return rows


def print_table(title, text, rows):
    """rows: (measure, source, row name, mean, standard error). A block per measure, or five with one source."""
    print(f"\n=== {title}\n")
    print("\n".join(f"  {line}".rstrip() for line in text.splitlines()))
    sources = {}
    for m, s, *_ in rows:
        sources.setdefault(m, {})[s] = True
    single = [m for m in sources if len(sources[m]) == 1]
    blocks = [[(m, s) for s in sources[m]] for m in sources if m not in single]
    blocks += [[(m, *sources[m]) for m in single[i:i + 5]] for i in range(0, len(single), 5)]
    cells = {(m, s, name): ("flat" if m == "eta" else "-") if math.isnan(mean) else f"{mean:.4g}" + (
        f" ±{se:.1g}" if se > 1e-9 * abs(mean) else "") for m, s, name, mean, se in rows}
    for block in blocks:
        alone = block[0][0] in single
        print(f"\n  {'' if alone else block[0][0]:22s}" + "".join(f"{m if alone else s:<21s}" for m, s in block))
        for name in dict.fromkeys(row[2] for row in rows if row[:2] in block):
            print(f"    {name:20s}" + "".join(f"{cells.get((m, s, name), ''):<21s}" for m, s in block))


def write_csv(path, header, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as f:
        writer = csv.writer(f)
        writer.writerow(header)
        writer.writerows([f"{x:.6g}" if isinstance(x, float) else x for x in row] for row in rows)


# --- the command -----------------------------------------------------------------------------------------------------

def get_args(argv=None):
    """The flags; --exp becomes a list of known names, all that fit by default."""
    names = [*EXPERIMENTS, "truncate", "hand", "flaws"]
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                allow_abbrev=False, epilog="experiments:\n" + "\n".join(
                                    f"  {n:9s} {EXPERIMENTS[n].__doc__.splitlines()[0]}" for n in EXPERIMENTS) + """
  truncate  Accuracy with the values of all layers cut down to r axes. Wants some hundreds of --images.
  hand      A worked example with four keys, every number by hand. Needs no checkpoint.
  flaws     The published measures on random values. Needs no checkpoint.""")
    flag, boolean, count = p.add_argument, argparse.BooleanOptionalAction, common.number(int, 1)
    flag("--ckpt", nargs="+", default=[], help="checkpoints of train_cls.py, train_lm.py (a folder: its last.pt) or "
         "DeiT's; several of one run are tracked over training. Without: random values")
    flag("--exp", default=None, help=f"comma-separated, of {', '.join(names)}; default: all that fit")
    flag("--layers", default="all", help="all, or comma-separated from 0")
    flag("--images", type=count, default=32, help="test images, or windows of text; errors are over them")
    flag("--data", choices=["shapes", "cifar10", "imagenet"], help="default: what the model was trained on")
    flag("--data_dir", default=None, help="default: the folder it was trained from")
    flag("--untrained", action=boolean, default=False, help="also the network before its first step")
    flag("--repro", action=boolean, default=False, help="also the publications' own definitions; slower")
    flag("--standardise", action=boolean, default=False, help="standardise q and k, as the publications' code does "
         "(not in truncate)")
    flag("--p", type=common.number(float, 0, 1), default=1.0, help="keys enter as phi/g^p: 1 the paper's, 0 plain")
    flag("--ranks", default=None, help="truncate: comma-separated r; default Dv/4, Dv, N - 1")
    flag("--out_dir", default="out/kpca", help="CSV files")
    flag("--device", default=None, help="cuda, mps or cpu; picked automatically")
    args = p.parse_args(argv)
    default = [*EXPERIMENTS, "truncate"] if args.ckpt else ["hand", "theorem", "flaws"]
    args.exp = args.exp.split(",") if args.exp else default
    for name in args.exp:
        if name not in names:
            raise ValueError(f"--exp {name}: expected some of {','.join(names)}")
    if not args.ckpt and ("truncate" in args.exp or args.untrained):
        raise ValueError("truncate and --untrained need a model: --ckpt FILE")
    return args


def numbers(text, flag, high):
    """"1,2,3" -> [1, 2, 3], each from 0 to high."""
    if not re.fullmatch(r"\d+(,\d+)*", text) or not all(int(n) <= high for n in text.split(",")):
        raise ValueError(f"{flag} {text}: expected whole numbers from 0 to {high}, separated by commas")
    return [int(n) for n in text.split(",")]


def examine(model, images, labels, args, device):
    """All experiments of args on one model. Returns rows of `summarise` and {(how, r): correct (n,)}."""
    model, c = model.to(device), model.config
    keep = range(c.depth) if args.layers == "all" else numbers(args.layers, "--layers", c.depth - 1)
    d = c.embed_dim // c.num_heads
    ranks = numbers(args.ranks, "--ranks", c.num_tokens - 1) if args.ranks else sorted(
        {r for r in (d // 4, d, c.num_tokens - 1) if 0 < r < c.num_tokens})
    names = [n for n in args.exp if n in EXPERIMENTS]
    size = max(1, 2 ** (18 if device.type == "cpu" else 24) // (c.num_heads * c.num_tokens ** 2))      # 2 MB a matrix
    results, correct, short = {}, {}, set()
    chunks = range(0, len(images), size)
    steps = len(chunks) * (len(keep) * bool(names) + ("truncate" in args.exp))
    with tqdm(total=steps, leave=False, unit="step") as bar:
        for start in chunks:
            batch = images[start:start + size].to(device)
            for i, heads in enumerate(capture(model, batch) if names else []):
                if i in keep:
                    bar.set_description(f"layer {i}")
                    layer = Layer(heads, str(i), args.p, (i, start), args.standardise)
                    for key, t in measure([layer], names, args.repro).items():
                        results.setdefault(key, []).append(t)
                    rank = int(layer.axes.rank.min())
                    if rank < min(d, c.num_tokens - 1) and i not in short:
                        short.add(i)
                        bar.write(f"layer {i}: keys so long that float64 resolves {rank} axes in some head, fewer than "
                                  f"the {d} asked; the others count as zero")
                    bar.update()
            if "truncate" in args.exp:
                bar.set_description("truncate")
                there = labels[start:start + size].to(device)
                for key, t in truncation_accuracy(model, batch, there, ranks, args.p).items():
                    correct.setdefault(key, []).append(t)
                bar.update()
    results, correct = ({key: np.concatenate(t) for key, t in d.items()} for d in (results, correct))
    return summarise(results), correct


def main():
    args = get_args()
    device, _, _ = common.setup(args.device)
    if "hand" in args.exp:
        hand()
    names = [n for n in args.exp if n in EXPERIMENTS]
    if not args.ckpt:
        layer = Layer(random_heads(), "0", args.p, standardised=args.standardise)
        rows = summarise(measure([layer], names, args.repro))
        for name in names:
            print_table(f"{name}: random keys, queries and values", inspect.cleandoc(EXPERIMENTS[name].__doc__),
                        [r[1:] for r in rows if r[0] == name and r[4].ndim == 0 and r[3] != "all"])
    if "flaws" in args.exp:
        flaws()
    if not args.ckpt:
        return

    models = []                                                                 # (run, step, path, untrained)
    for path in args.ckpt:
        model, checkpoint = load_model(path)
        path = Path(path)
        run = path.name if path.is_dir() else path.parent.name if checkpoint.get("task") else path.stem
        models += [(run, 0, path, True)] * args.untrained + [(run, checkpoint.get("step", 0), path, False)]
    models = sorted({m[:2]: m for m in models}.values(), key=lambda m: m[:2])   # last.pt may equal an epoch_<n>.pt
    table, curves, cut, loaded = [], [], [], None
    for run, step, path, fresh in models:
        model, checkpoint = load_model(path)
        model, checkpoint = untrained(checkpoint, path) if fresh else (model, checkpoint)
        if run != loaded:
            load = load_windows if isinstance(model, LM) else load_images
            loaded, (images, labels, what, classes) = run, load(args, checkpoint, model.config)
        if "truncate" in args.exp and isinstance(model, LM):
            print(f"truncate needs classes and attention over all tokens: left out, {path} is a language model")
            args.exp.remove("truncate")
        if "truncate" in args.exp and classes != model.config.num_classes:
            raise ValueError(f"truncate counts right answers, but the model knows {model.config.num_classes} classes, "
                             f"the data has {classes}")
        rows, correct = examine(model, images, labels, args, device)
        where = f"{run}, step {step}, {model.config.attn}, {what}; mean ± standard error over images"
        last = (run, step) == max(m[:2] for m in models if m[0] == run)
        for name in names:
            if last:
                print_table(f"{name}: {where}", inspect.cleandoc(EXPERIMENTS[name].__doc__),
                            [r[1:] for r in rows if r[0] == name and r[4].ndim == 0])
        for experiment, m, source, layer, mean, se in rows:
            if mean.ndim and last:                                              # per axis: long, so the last step only
                curves += [(run, step, experiment, m.removesuffix(" by axis"), source, layer, d + 1, float(x), float(s))
                           for d, (x, s) in enumerate(zip(mean, se))]
            elif not mean.ndim:
                table.append((run, step, experiment, m, source, layer, float(mean), float(se), len(images)))
        if correct:
            new = [(how, r, 100 * t.mean(), 100 * t.std() / math.sqrt(len(t))) for (how, r), t in correct.items()]
            cut += [(run, step, *row, len(images)) for row in new]
            text = "Accuracy in percent with the values of all layers truncated to\n" + "\n".join(
                f"{how}: {about}" for how, about in TRUNCATIONS.items())
            print_table(f"truncate: {where}", text, [
                ("accuracy", f"r = {r}" if r else "any r", how, mean, se) for how, r, mean, se in new])
    tracked = [row for row in table if row[5] == "all" and sum(m[0] == row[0] for m in models) > 1]
    for name in dict.fromkeys(row[2] for row in tracked):
        print_table(f"{name} over training, mean of layers", "", [
            (m, s, f"{run} {step}", mean, se) for run, step, e, m, s, _, mean, se, _ in tracked if e == name])
    out = Path(args.out_dir)
    for name in names:
        write_csv(out / f"{name}.csv", ["run", "step", "layer", "measure", "source", "mean", "se", "images"],
                  [(run, step, layer, m, s, *rest) for run, step, e, m, s, layer, *rest in table if e == name])
        mine = [(run, step, layer, m, s, *rest) for run, step, e, m, s, layer, *rest in curves if e == name]
        if mine:
            header = ["run", "step", "layer", "measure", "source", "axis", "mean", "se"]
            write_csv(out / f"{name}_axes.csv", header, mine)
    if cut:
        write_csv(out / "truncate.csv", ["run", "step", "how", "r", "accuracy", "se", "images"], cut)
    print(f"\nCSV files in {out}; figures (needs matplotlib): python plot.py kpca {out}")


if __name__ == "__main__":
    torch.set_num_threads(1)                     # small matrices gain nothing from threads, and lose on a busy machine
    common.run(main)
