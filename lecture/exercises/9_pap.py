"""9. Principal Attention Pursuit: the four lines of Algorithm 1 (appendix C, `released`).

Write the four lines without looking at stop 3.
"""

import torch

from attention import softmax_attention


def pap(k, v, tau, n_iter):
    """Return the results of n_iter steps: a list of dicts of S, K2, L, Z, each (B, H, N, D).

    k, v: keys and values (B, H, N, D). tau: the threshold. Z is Y / mu. softmax_attention(q, k, v)
    returns the attention output.
    """
    def shrink(x):
        return x.sign() * (x.abs() - tau).clamp(min=0)

    L = Z = torch.zeros_like(k)
    steps = []
    for _ in range(n_iter):
        S = ...                             # the part of k - L + Z above tau
        K2 = ...                            # k without S, minus Z
        L = ...                             # attention with K2 as keys and as queries
        Z = ...                             # Z plus the part of k that L + S misses
        steps.append(dict(S=S, K2=K2, L=L, Z=Z))
    return steps
