"""2. Undo Theorem 1: are these values eigenvectors of the Gram matrix? (stop 2)."""

import torch


def undo(v, g, G):
    """Return coefficients a (N, d) and, of each column, the cosine between a and G a, (d,).

    v: values (N, d). g: g(k_j), (N, 1). G: centred Gram matrix of the keys' features, (N, N).
    Theorem 1 divides coefficients by g, and they add up to 0. Hint: a pseudo-inverse of I - 1_N is
    I - 1_N, which takes the mean away. torch.cosine_similarity(x, y, dim=0) is of columns.
    """
    a = ...
    cosine = ...
    return a, cosine
