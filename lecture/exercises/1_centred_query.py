"""1. Project the centred query (homework, stop 1).

On paper first: prove that the coefficients of an axis sum to 0. Hint: multiply both
sides of G~ a = sigma a by a row of ones.

Textbook kernel PCA also subtracts the mean of the keys' features from the query. Attention with the
values of Theorem 1 does not subtract this mean. Find values with which attention subtracts it, and
put a line in place of "...". Hint: each row of attention sums to 1.
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
