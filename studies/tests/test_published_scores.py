"""Compare studies/published_scores.py with the published code; test the scores of noise."""

import csv
import math
from dataclasses import asdict
from itertools import permutations

import numpy as np
import pytest
import torch

from data.shapes import SHAPES
from kpca import a_hat, eigen_cosine, kernel_pca, theoretical_values
from studies import published_scores
from studies.kernel_pca import exp_gamma, measure
from studies.published_scores import (cka, gamma, kernel_cka, matching,
                                      official_loss, optimal_cosine, pair_differences)
from studies.span import Layer, basis, token_overlap
from test_kernel_pca import random_heads
from test_kpca import assert_close, cases
from vit import ViT, ViTConfig


@pytest.mark.parametrize("case", ["random", "self", "flipped", "reversed", "rotated", "permuted",
                                  "mixed"])
def test_similarities_agree_with_golden(golden, case):
    z = cases(golden("kpca_sims"))
    w, given, z = z["inputs"]["vdot"], z["inputs"], z[case]
    v = {"random": given["v"], "self": w, "flipped": w * given["flips"], "reversed": w.flip(-1),
         "rotated": w @ given["rotation"], "permuted": w[given["perm"]],
         "mixed": given["mixed"]}[case]
    cosine, match = optimal_cosine(v, w)
    assert torch.equal(match, z["assign"])
    assert_close(cosine, z["optimal"], 1e-6, 1e-9)
    assert_close(cka(v, w), z["linear_cka"])
    assert_close(kernel_cka(v, w), z["kernel_cka"])
    assert_close(token_overlap(basis(v), basis(w)), z["overlap"])


def test_released_loss_ignores_the_values():
    """The released code standardises q and k, and it does not scale |q|^2 and q.k_1."""
    given = torch.randn(3, 1, 3, 65, 64, generator=torch.Generator().manual_seed(0)).double()
    q, k = ((x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True) for x in given[:2])
    qk = q @ k.mT
    A = (qk / 8).softmax(-1)
    phi2 = q.square().sum(-1).exp() / (2 * qk[..., 0] - A[..., 0].square().log()).exp()
    q, k, v = given
    expected = (phi2 - (A @ v).square().sum(-1)).mean().log()
    assert_close(official_loss(q, k, v), expected, 1e-10)
    assert_close(official_loss(q, k, v, with_h=False), phi2.mean().log(), 1e-10)
    assert official_loss(q, k, v) == official_loss(q, k, 100 * v)


def test_gamma_agrees_with_golden(golden):
    z = cases(golden("kpca_small"))["gamma"]
    axes = kernel_pca(z["k"])
    a, scale = a_hat(z["v"], axes.log_g), (-axes.c).exp()
    assert_close(axes.log_g.amax().exp() * a, z["ahat_pinv"], 1e-10)
    g = {"gamma": gamma(axes, a), "pair_mean": pair_differences(gamma(axes, a)),
         "eig_cos": eigen_cosine(axes, a)}
    for ours, theirs, factor in (("gamma", "gamma", scale), ("pair_mean", "abs_mean", scale),
                                 ("eig_cos", "cos", 1)):
        assert_close(factor * g[ours], z[theirs])
    i, j = torch.triu_indices(12, 12, 1)
    gammas = scale * g["gamma"]
    larger = torch.maximum(gammas[i].abs(), gammas[j].abs())
    relative = (gammas[i] - gammas[j]).abs() / (larger + 1e-10)
    assert_close(relative.mean(0), z["rel_mean"])
    assert_close(relative.std(0), z["rel_std"])
    assert_close((scale * axes.sigma / 12)[:4], z["lam"])
    assert_close((-axes.log_g.amin()).exp(), z["bound"])


def test_exact_kernel_pca_has_eigen_cosine_one():
    heads, turn = random_heads(), torch.Generator().manual_seed(4)
    R = torch.randn(16, 16, generator=turn, dtype=torch.float64)
    V = theoretical_values(kernel_pca(heads.k[None]), 16)[0]
    found = [measure([Layer(heads._replace(v=v, raw=v))], {"gamma": exp_gamma})
             for v in (V, V @ R, heads.v, heads.v @ R)]
    exact, turned, noise, noise_turned = (of["gamma", "eig_cos", "learned", ""] for of in found)
    for cosine in (exact, turned, found[0]["gamma", "eig_cos", "KPCA", ""]):
        assert_close(cosine, torch.ones(4), 1e-9)
    assert_close(noise_turned, noise, 1e-6)         # cond(R) and near ties: 4e-10 to 2e-9 off
    assert noise.max() < 0.9


def test_assignment_is_optimal():
    rng = np.random.default_rng(0)
    for _ in range(20):
        cost = rng.normal(size=(6, 6))
        best = min(cost[range(6), p].sum() for p in permutations(range(6)))
        match = matching(torch.from_numpy(-cost)).numpy()
        assert sorted(match) == list(range(6)) and abs(cost[range(6), match].sum() - best) < 1e-12
    # a row of NaN, as from values of zero
    C = torch.tensor([[0.1, 0.9, 0.2], [math.nan] * 3, [0.3, 0.8, 0.7]], dtype=torch.float64)
    assert sorted(matching(C).tolist()) == [0, 1, 2] and matching(C)[0] == 1


def test_command_writes_every_table(tmp_path, capsys):
    torch.manual_seed(0)
    config = ViTConfig(image_size=16, patch_size=4, num_classes=10, embed_dim=24, depth=2,
                       num_heads=3, attn="rpc", init="default")
    args = dict(data="shapes", data_dir=None, seed=0, init_from=None)
    torch.save(dict(task="classification", model=ViT(config).state_dict(), step=7, args=args,
                    model_config=asdict(config), classes=list(SHAPES)), tmp_path / "a.pt")
    published_scores.main(["--ckpt", str(tmp_path / "a.pt"), "--images", "5", "--out_dir",
                           str(tmp_path)])
    out = capsys.readouterr().out
    for name in published_scores.EXPERIMENTS:
        with open(tmp_path / f"{name}.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert f"=== {name}" in out and {r["layer"] for r in rows} == {"0", "1", "all"}
        assert all(math.isfinite(float(r["mean"])) for r in rows), name
