"""How alike are two matrices of values (N tokens, D columns)? CKA, and cosines of rows.

What Saritas & Yildiz 2025 compare (`KarahanS/Reproduction-Study-KPCA:scripts`), and an unbiased
CKA, whose chance level is 0. studies/published_scores.py shows what they say of noise.
"""

import math

import numpy as np
import torch

from kpca import centre


def hsic(K, L):
    """Unbiased HSIC of two Gram matrices (Song et al. 2012): no diagonal, chance 0. (...)"""
    N = K.shape[-1]
    K, L = (M - torch.diag_embed(M.diagonal(dim1=-2, dim2=-1)) for M in (K, L))
    total = (K * L).sum((-2, -1))
    total = total + K.sum((-2, -1)) * L.sum((-2, -1)) / ((N - 1) * (N - 2))
    return (total - 2 / (N - 2) * (K.sum(-1) * L.sum(-1)).sum(-1)) / (N * (N - 3))


def matrix_cosine(K, L):
    return (K * L).sum((-2, -1)) / (K.norm(dim=(-2, -1)) * L.norm(dim=(-2, -1)))


def cka(X, Y, unbiased=False):
    """Linear CKA of rows X (..., N, a), Y (..., N, b); unbiased: nan for fewer than four rows."""
    X, Y = (M - M.mean(-2, keepdim=True) for M in (X, Y))
    X, Y = (M / M.norm(dim=(-2, -1), keepdim=True) for M in (X, Y))
    K, L = X @ X.mT, Y @ Y.mT
    if not unbiased:
        return matrix_cosine(K, L)
    if K.shape[-1] < 4:
        return matrix_cosine(K, L) * math.nan
    size = hsic(K, K).clamp(min=1e-15) * hsic(L, L).clamp(min=1e-15)        # 0 if all rows agree
    return hsic(K, L) / size.sqrt()


def kernel_cka(X, Y):
    """CKA with Gaussian kernels whose width is the median squared distance that is not zero."""
    def gram(X):
        d2 = torch.cdist(X, X, compute_mode="donot_use_mm_for_euclid_dist").square()
        d2 = d2 / d2.amax((-2, -1), keepdim=True)
        order = torch.where(d2 > 0, d2, torch.inf).flatten(-2).sort(-1).values
        middle = (d2 > 0).sum((-2, -1)).sub(1).clamp(min=0) // 2
        median = order.gather(-1, middle[..., None])
        return centre((-d2 / (2 * median[..., None])).exp())

    return matrix_cosine(gram(X), gram(Y))


def matching(C):
    """The one-to-one matching of rows to columns of greatest sum, (..., N): column of every row.

    nan, the cosine of a zero row, counts as 0.
    """
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError:
        raise ValueError("the optimal cosine needs scipy: pip install scipy") from None
    pieces = C.reshape(-1, *C.shape[-2:]).cpu().numpy()
    match = np.stack([linear_sum_assignment(np.nan_to_num(c), maximize=True)[1] for c in pieces])
    return torch.as_tensor(match, device=C.device).view(C.shape[:-1])


def row_similarities(V, W):
    """[R]'s cosines of the rows of two value matrices (..., N, D): not free of turned columns.

    direct: mean over rows of equal index, (...). optimal: of rows matched one to one, by assign.
    """
    V, W = torch.broadcast_tensors(V, W)
    C = (V / V.norm(dim=-1, keepdim=True)) @ (W / W.norm(dim=-1, keepdim=True)).mT   # (..., N, N)
    match = matching(C)
    matched = C.gather(-1, match[..., None])[..., 0]
    return {"direct": C.diagonal(dim1=-2, dim2=-1).mean(-1), "optimal": matched.mean(-1),
            "assign": match}
