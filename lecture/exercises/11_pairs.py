"""11. Five pairs of runs: is the difference real? (homework, stop 5)

Each pair has one seed: the same images in the same order, but another attention. The numbers below
are accuracies in %, 24 epochs on scenes, seeds 40 to 44. Compute the 95 % interval of the
difference, and put lines in place of "...". A difference is called real here if the interval does
not contain 0.

Then do an experiment of your own: which verdict would you give with the first seed alone? With how
many seeds does the interval of the second question exclude 0?
"""

import torch

# PGD at 2/255: RPC and its baseline
symmetric_2 = [92.9, 94.9, 94.4, 94.4, 91.6]
rpc_2 = [87.4, 92.2, 91.3, 89.6, 88.5]

# PGD at 4/255: softmax and symmetric attention
symmetric_4 = [62.1, 67.4, 63.2, 69.3, 57.0]
softmax_4 = [71.4, 59.5, 62.4, 61.5, 68.8]


def paired_interval(a, b, t):
    """Return the mean of b - a and the half-width of its 95 % interval.

    a, b: tensors (n,) of n pairs. t: the factor of Student's t distribution, 2.776 for five pairs.
    The half-width of the interval is t s / sqrt(n); s is the standard deviation of the n
    differences, with n - 1 in its denominator.
    """
    mean = ...
    half = ...
    return mean, half
