"""8. mu and tau: how large an entry of the keys has to be for S (appendix B, "released")."""

import torch


def mu_and_tau(k, lambd):
    """Return mu and tau, both (B, H, 1, 1), of keys k (B, H, N, D).

    mu is C / (4 D m): m is the mean of |k| over the tokens and channels of a head, D the width of a
    head, C that of the model, all heads together. tau is lambda times mu.
    """
    B, H, N, D = k.shape
    mu = ...
    tau = ...
    return mu, tau
