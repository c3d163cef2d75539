"""Other rules for a layer with the parameters of softmax attention: what the publications speak of.

`probe.with_rule` puts one into every layer of a network; studies/scaled.py trains such networks.
"""

import math

import torch

from attention import SelfAttention, softmax_attention
from kpca import exact_scaling


def standardise(x):
    """Mean 0 and variance 1 (unbiased) of every token's D numbers, as published code has q, k.

    A token whose numbers are all the same becomes zero.
    """
    x = x - x.mean(-1, keepdim=True)
    size = x.norm(dim=-1, keepdim=True) / math.sqrt(max(x.shape[-1] - 1, 1))
    return x / size.clamp(min=torch.finfo(x.dtype).tiny)


class ExactScaling(SelfAttention):
    """Scaled Attention with App. E.1's own S, a function of the keys; computed in float64."""

    def attend(self, q, k, v):
        return softmax_attention(q, k, (v - exact_scaling(k, v)).to(v.dtype))


class PrintedScaling(ExactScaling):
    """The same as App. E.1 prints it, A / (N A^T), in the dtype of training."""

    def attend(self, q, k, v):
        A = (k @ k.mT / math.sqrt(k.shape[-1])).softmax(-1)
        return softmax_attention(q, k, v - A / A.mT @ v / k.shape[-2])


class Standardised(SelfAttention):
    """Softmax attention with standardised queries and keys, as in the released code."""

    def project(self, x):
        q, k, v = super().project(x)
        return standardise(q), standardise(k), v


# Rules with the parameters of softmax attention; a checkpoint's args["rule"] names its own.
RULES = {"exact_s": ExactScaling, "printed_s": PrintedScaling, "standardised": Standardised}
