"""2. Make J negative (homework, stop 2).

J is the mean over queries of |phi(q)|^2 - |h|^2. If attention were always a projection, J could not
be negative. Find values for which J is negative, for any queries and keys, long queries too. Then
explain in two sentences what a falling J shows.
"""

import torch

import kpca


def values(q, k):
    """Return values v (N, D) with J < 0 for the queries q (M, D) and the keys k (N, D).

    Hint: kpca.log_phi2(q, k) is the logarithm of |phi(q)|^2, one number per query (M,). If all
    values are equal, h is this value. kpca.projection_error(q, k, h) computes J.
    """
    v = ...
    return v
