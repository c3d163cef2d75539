"""2. Make J negative (homework, stop 2).

J is the mean over queries of |phi(q)|^2 - |h|^2. If attention were always a projection, J could not
be negative. Find values for which J is negative, for any queries and keys. Then explain in two
sentences what a falling J shows.
"""

import torch


def values(q, k):
    """Return values v (N, D) with J < 0 for the queries q (M, D) and the keys k (N, D).

    Hint: |phi(q)|^2 does not depend on v. kpca.projection_error(q, k, h) computes J.
    """
    v = ...
    return v
