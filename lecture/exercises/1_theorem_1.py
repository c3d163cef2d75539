"""1. Theorem 1: the values with which attention is kernel PCA (lecture/WALKTHROUGH.md, stop 1)."""

import torch


def theorem_1(G, g, d):
    """Return coefficients a and values v, both (N, d), of the first d principal axes.

    G: centred Gram matrix of the keys' features, (N, N). g: g(k_j), (N, 1). Axis d of the feature
    space is sum_j a_jd phi~(k_j), of length 1; its squared length is a_d.G a_d.
    """
    sigma, U = torch.linalg.eigh(G)         # ascending; U: orthonormal eigenvectors, in columns
    sigma, U = sigma.flip(0)[:d], U.flip(1)[:, :d]
    a = ...                                 # eigenvectors, scaled so that axes have length 1
    v = ...                                 # one value a key: Theorem 1
    return a, v
