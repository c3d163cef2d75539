"""5. Centring a Gram matrix (section 2)."""

import torch


def centre(K):
    """Return the Gram matrix of the centred features, (N, N), from that of the features.

    It is K - 1_N K - K 1_N + 1_N K 1_N. Hint: 1_N K is a matrix whose rows are all the mean row.
    """
    return ...
