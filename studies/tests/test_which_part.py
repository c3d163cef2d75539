"""Compare studies/which_part.py with plain loops, with PAP and with principal component pursuit."""

import math

import numpy as np
import pytest
import torch

from attention import rpc_attention
from kpca import pcp
from studies import which_part
from studies.which_part import LOOPS, PAP, ROBUST_PCA


def keys():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 3, 2, 10, 4, generator=generator, dtype=torch.float64)    # k and v


def plain_loop(loop, K, V, heads, n_iter):
    """Run a loop on one head, in numpy, as the plan describes it; return the last S."""
    if loop.keys == "centred":
        K = K - K.mean(0)
    mean_size = np.abs(K).mean()
    tau = (4 * heads / (4 * mean_size) if loop.threshold == "released" else
           4 * mean_size / math.sqrt(max(K.shape)))

    def new_L():
        x = K - S + loop.sign * Z
        if loop.line_4 == "spectrum":
            U, s, Vt = np.linalg.svd(x, full_matrices=False)
            return U @ np.diag(np.maximum(s - 4 * mean_size, 0)) @ Vt
        weights = np.exp(x @ x.T / math.sqrt(K.shape[1]))
        return weights / weights.sum(1, keepdims=True) @ (K if loop.line_4 == "keys" else V)

    S = L = Z = np.zeros_like(K)
    for _ in range(n_iter):
        if loop.order == "L first":
            L = new_L()
        y = K - L + Z
        S = np.sign(y) * np.maximum(np.abs(y) - tau, 0)
        if loop.order == "S first":
            L = new_L()
        Z = Z + K - L - S
    return S


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.name)
def test_every_loop_equals_a_plain_loop(loop):
    k, v = keys()
    S = which_part.pursuit(loop, 2 * k, v, 3)[0][-1]
    expected = plain_loop(loop, 2 * k[1, 0].numpy(), v[1, 0].numpy(), 2, 3)
    assert np.allclose(S[1, 0], expected, atol=1e-10)


def test_two_loops_are_pap_and_robust_pca():
    k, v = keys()
    steps = []
    rpc_attention(k, v, trace=steps)
    for ours, step in zip(zip(*which_part.pursuit(PAP, k, v)), steps, strict=True):
        assert torch.allclose(ours[0], step["S"]) and torch.allclose(ours[1], step["L"])
    S = which_part.pursuit(ROBUST_PCA, k, v, 3)[0][-1]
    head = k[0, 1]
    assert torch.allclose(S[0, 1], pcp(head - head.mean(0), max_iter=3)[1], atol=1e-10)


def test_auc_counts_pairs_and_halves_ties():
    score = torch.tensor([[3.0, 1, 2, 2], [0, 0, 0, 0]])
    hit = torch.tensor([[True, False, True, False], [True, False, False, False]])
    assert which_part.auc(score, hit) == pytest.approx((3.5 / 4 + 0.5) / 2)


def test_corruptions_are_distinct_colours_or_equal_noise():
    images = torch.rand(3, 3, 32, 32)
    places = which_part.corrupt(images, "noise", 4, None, None)[1]
    for kind in ("colours", "equal"):
        x, hit = which_part.corrupt(images, kind, 4, None, None)
        assert torch.equal(hit, places)
        tiles = torch.nn.functional.unfold(x, 4, stride=4).mT                   # (B, P, 48)
        assert torch.equal(tiles[~hit], torch.nn.functional.unfold(images, 4, stride=4).mT[~hit])
        first = tiles[0][hit[0]].view(6, 3, 16)
        if kind == "colours":
            assert (first == first[..., :1]).all() and len(first[..., 0].unique(dim=0)) == 6
        else:
            assert (first == first[:1]).all() and first.std() > 0.2


def test_resized_keys_have_the_wanted_size():
    k, _ = keys()
    hit = torch.zeros(3, 9, dtype=torch.bool)
    hit[:, :2] = True
    changed = which_part.resized(k, hit, 1.4)
    sizes = which_part.size(changed)
    assert torch.allclose(sizes[:, :2].mean(1), 1.4 * sizes[:, 2:].mean(1))
    assert torch.equal(changed[:, :, 0], k[:, :, 0]) and torch.equal(changed[:, :, 3:], k[:, :, 3:])
