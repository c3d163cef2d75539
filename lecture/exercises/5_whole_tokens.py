"""5. Design an S that removes whole tokens (homework, stops 4 and 5).

The sum of absolute entries puts a price on each entry of S separately, so S is not sparse by rows.
Put a price on rows instead: S minimises |K - S|^2 / 2 + tau sum_j |S_j|, where |S_j| is the length
of row j.

Derive S on paper: each row can be solved separately, and S_j points in the direction of K_j. Would
this S find noisy patches? Remember that at stop 4, S followed the size of the key.
"""

import torch


def whole_tokens(K, tau):
    """Return S, shaped as K (B, H, N, D): row j is 0 if |K_j| <= tau, else K_j shortened by tau.

    tau: a number above 0, in the unit of K. Hint: K.norm(dim=-1, keepdim=True) is |K_j|.
    """
    S = ...
    return S
