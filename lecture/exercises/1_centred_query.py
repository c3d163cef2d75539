"""1. Project the centred query (homework, stop 1).

On paper first: prove that the coefficients of an axis sum to 0. Hint: apply 1^T to both sides of
G~ a = sigma a.

Then fill the hole. Textbook kernel PCA subtracts the mean of the keys' features from the query,
too. The values of Theorem 1 do not. Find values that do. Hint: each row of attention sums to 1.
"""

import torch


def centred_query(a, g, E):
    """Return values v (N, d) so that attention returns (phi(q) - mean_j phi(k_j)) . u_d.

    a: coefficients of the first d axes, (N, d). g: g(k_j), (N, 1). E: kernel values k(k_i, k_j) of
    all keys, (N, N); so attention from key i has the weights E / g.
    """
    v = a / g                               # Theorem 1: attention returns phi(q) . u_d
    v = ...
    return v
