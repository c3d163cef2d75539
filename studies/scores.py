"""Score tokens: which tokens of an image or a text look corrupted?

`key_scores` reads the keys of one layer, `total_variation` reads pixels. A score is high where a
token looks corrupted. The scores are not trained.

    robust PCA          row sums of |S| after one or four steps; S is sparse entry by entry
    outlier pursuit     the same for a method whose S is sparse row by row, one row per token
    Mahalanobis         the distance of a key from the mean key, in units of the keys' covariance
    PAP                 row sums of |S| after the four steps of RPC-Attention as published
    length              the length of the key
    total variation     differences of neighbouring pixels in a patch; this score needs no network
"""

import math

import torch

from attention import SelfAttention, rpc_attention
# Both studies import these functions from here, so the module of patches is named in one place.
from studies.patches import (corrupt_patches, patches_to_pixels, random_block,  # noqa: F401
                             random_places)
from studies.rpca_layer import robust_pca, shrink_singular_values

ONE = "robust PCA, 1 step"
FOUR = "robust PCA, 4 steps"
PURSUIT = "outlier pursuit"
MAHALANOBIS = "Mahalanobis"
PAP = "PAP"
LENGTH = "length"
VARIATION = "total variation"
RIDGE = 0.01                            # of the mean variance, added to the covariance


# --- keys -----------------------------------------------------------------------------------------

def look(model, images):
    """Run a ViT; return its logits, and keys and values of layer 0, each (B, H, N, D).

    Gradients flow from the keys to the images.
    """
    layer = next(m for m in model.modules() if isinstance(m, SelfAttention))
    inputs = []

    def remember(_, args):
        inputs.append(args[0])

    hook = layer.register_forward_pre_hook(remember)
    try:
        logits = model(images)
    finally:
        hook.remove()
    _, k, v = layer.project(inputs[0])
    return logits, k, v


# --- scores of keys -------------------------------------------------------------------------------

def row_sums(S):
    """Return the sum of |S| of each token over heads and channels: (B, H, N, D) -> (B, N)."""
    return S.abs().sum((1, 3))


def robust_pca_scores(k):
    """Score tokens by S of robust PCA: (B, N) after one step, and (B, N) after four steps.

    k: (B, H, N, D).
    """
    steps = []
    robust_pca(k, 4, trace=steps)
    return row_sums(steps[0]["S"]), row_sums(steps[3]["S"])


def outlier_pursuit(k, lambd, tol=1e-4):
    """Run outlier pursuit per head: min ||L||_* + lambd sum_i |S_i|, L + S = K. Return S, L.

    S_i is the row of token i. k, S, L: (B, H, N, D). The mean key of the image is subtracted first,
    as in robust PCA. Source: Xu, Caramanis and Sanghavi 2010; solved here by ADMM.
    tol: the steps end when |K - L - S| and the change of S are at most tol |K| in every head.
    ValueError after 2,000 steps.
    """
    K = k - k.mean(-2, keepdim=True)
    size = torch.linalg.vector_norm(K, dim=(-2, -1))
    mu = 4 / torch.linalg.matrix_norm(K, 2)[..., None, None]
    S = Z = torch.zeros_like(K)                             # Z = Y / mu
    for _ in range(2000):
        last = S
        L = shrink_singular_values(K - S + Z, 1 / mu)
        X = K - L + Z
        length = torch.linalg.vector_norm(X, dim=-1, keepdim=True)
        S = X * (1 - lambd / mu / length).clamp_min(0)      # shrink each row
        Z = X - S
        error = torch.linalg.vector_norm(K - L - S, dim=(-2, -1))
        change = torch.linalg.vector_norm(S - last, dim=(-2, -1))
        if (torch.maximum(error, change) <= tol * size).all():
            return S, L
    raise ValueError("outlier pursuit still changes after 2,000 steps; expected keys "
                     "that are not all equal, and lambd > 0")


def pursuit_weight(outliers):
    """Return lambda of outlier pursuit for this number of outliers (Xu et al. 2010, Theorem 1)."""
    return 3 / (7 * math.sqrt(outliers))


def mahalanobis(k):
    """Score tokens by the squared Mahalanobis distance from the mean, summed over heads: (B, N)."""
    K = k - k.mean(-2, keepdim=True)
    covariance = K.mT @ K / K.shape[-2]                                     # (B, H, D, D)
    variance = covariance.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    ridged = covariance + RIDGE * variance * torch.eye(K.shape[-1]).to(K)
    return (torch.linalg.solve(ridged, K.mT).mT * K).sum((1, 3))


def pap_score(k, v):
    """Score tokens by S of PAP, the loop of RPC-Attention, with its published settings: (B, N)."""
    steps = []
    rpc_attention(k, v, trace=steps)
    return row_sums(steps[-1]["S"])


def length(k):
    """Score tokens by the length of their key over all heads: (B, N)."""
    return k.square().sum((1, 3)).sqrt()


# --- a score of pixels ----------------------------------------------------------------------------

def total_variation(images, patch):
    """Score patches by the mean difference of neighbouring pixels inside the patch.

    images: (B, 3, S, S). patch: its side in pixels. Returns (B, P).
    """
    tiles = images.unfold(2, patch, patch).unfold(3, patch, patch)          # (B, 3, h, w, p, p)
    down = tiles.diff(dim=-2).abs().mean((1, 4, 5))
    right = tiles.diff(dim=-1).abs().mean((1, 4, 5))
    return (down + right).flatten(1)
