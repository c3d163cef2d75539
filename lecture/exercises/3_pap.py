"""3. Principal Attention Pursuit: four lines that are Algorithm 1 (stop 3; "released")."""

import torch

from attention import softmax_attention


def pap(k, v, tau, n_iter):
    """Return what each of n_iter steps makes: a list of dicts of S, K2, L, Z, each (B, H, N, D).

    k, v: keys and values (B, H, N, D). tau: the threshold. softmax_attention(q, k, v) does what its
    name says. Z is Y / mu.
    """
    def shrink(x):
        return x.sign() * (x.abs() - tau).clamp(min=0)

    L = Z = torch.zeros_like(k)
    steps = []
    for _ in range(n_iter):
        S = ...                             # what sticks out of k - L + Z
        K2 = ...                            # k without S, minus Z
        L = ...                             # attention with K2, which are the queries, too
        Z = ...                             # Z plus how far L + S still is from k
        steps.append(dict(S=S, K2=K2, L=L, Z=Z))
    return steps
