"""8. mu and tau: how large must an entry of the keys be to enter S? (appendix C, `released`)"""

import torch


def mu_and_tau(k, lambd):
    """Return mu and tau, both (B, H, 1, 1), for keys k (B, H, N, D).

    mu is C / (4 D m): m is the mean of |k| over the tokens and channels of a head, D is the width
    of a head and C = H D the width of the model. tau is lambda times mu.
    """
    B, H, N, D = k.shape
    mu = ...
    tau = ...
    return mu, tau
