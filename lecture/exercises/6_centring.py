"""6. Centre a Gram matrix (appendix A)."""

import torch


def centre(G):
    """Return the Gram matrix (N, N) of the centred features, from the Gram matrix G (N, N).

    The result is G - 1_N G - G 1_N + 1_N G 1_N, where all entries of the N x N matrix 1_N are 1/N.
    Hint: every row of 1_N G is the mean row of G.
    """
    return ...
