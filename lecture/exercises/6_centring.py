"""6. Centring a Gram matrix (appendix A)."""

import torch


def centre(G):
    """Return the Gram matrix of the centred features, (N, N), from that of the features.

    It is G - 1_N G - G 1_N + 1_N G 1_N. Hint: 1_N G is a matrix whose rows are all the mean row.
    """
    return ...
