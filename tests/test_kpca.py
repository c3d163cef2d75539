"""kpca.py against numbers made by two independent programs (golden), against its own theory, and as a command."""

import csv
import importlib
import math
import sys
from dataclasses import asdict

import numpy as np
import pytest
import torch
from torch import nn

import common
import data
import kpca
import train_cls
from attention import KINDS, SelfAttention, exact_scaling
from kpca import (a_hat, assignment, attend, basis, centred_projections, cka, eigenvalue_statistics,
                  explained_variance, gamma_statistics, kernel_cka, kernel_pca, kernel_projections, key_span, log_g,
                  log_gram, log_kernel, log_phi2, official_loss, pair_differences, principal_axes, projection_loss,
                  query_share, relative_pair_differences, restrict, row_similarities, standardise, theoretical_values,
                  token_overlap, value_axes)
from lm import LM, LMConfig
from vit import SIZES, ViT, ViTConfig


def cases(z):
    """{case: {quantity: tensor}} of a golden file whose arrays are named case__quantity."""
    out = {}
    for name, t in z.items():
        case, quantity = name.split("__")
        out.setdefault(case, {})[quantity] = t.double() if t.is_floating_point() else t
    return out


def assert_close(a, b, rtol=1e-6, atol=0.0):
    a, b = (torch.as_tensor(t, dtype=torch.float64) for t in (a, b))
    torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def draw(seed, N=24, D=8, M=None, size=1.0, batch=()):
    """Random q, k, v."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(*batch, n, D, generator=g, dtype=torch.float64) for n in (M or N, N, N))
    return size * q, size * k, v


SWEEP = [(seed, N, D, size) for seed, (N, D) in enumerate([(5, 2), (8, 3), (24, 8), (65, 32), (40, 64)])
         for size in (0.3, 1.0, 1.7)]
sweep = pytest.mark.parametrize("seed,N,D,size", SWEEP)


# --- golden numbers --------------------------------------------------------------------------------------------------

def test_worked_example_agrees_with_the_numbers_by_hand():
    for what, by_hand, computed in kpca.hand_example():
        assert (kpca.by_hand(by_hand) - computed).abs().max() < 1e-12, what


def test_worked_example_prints_each_number_beside_the_one_by_hand(capsys):
    kpca.hand()
    lines = capsys.readouterr().out.splitlines()
    for what, by_hand, _ in kpca.hand_example():
        shown = next(line for line in lines if what in line).split(what)[1].split()
        n = len(by_hand.split())
        assert shown[:n] == by_hand.split() and len(shown) == 2 * n, what
        assert_close([float(x) for x in shown[n:]], kpca.by_hand(by_hand), 1e-3, 1e-9)


@pytest.mark.parametrize("case", ["sym", "asym"])
def test_worked_example_agrees_with_golden(golden, case):
    z = cases(golden("kpca_hand"))[case]
    axes = kernel_pca(z["k"])
    assert_close(log_g(z["k"], z["k"]).exp(), z["g"], 1e-12)
    assert_close(((-axes.c).exp() * axes.mu)[:3], z["mu"], 1e-12)
    assert_close(log_phi2(z["q"], z["k"]).exp(), z["phi2"], 1e-12)
    h = attend(z["q"], z["k"], theoretical_values(axes, 3))
    assert_close(h.square().sum(-1), z["h2_kpca_3axes"], 1e-12, 1e-14)
    if case == "sym":
        assert_close(log_kernel(z["q"], z["k"]).softmax(-1), z["attn"], 1e-12)
        assert_close(h[:, :2].square().sum(-1), z["h2_kpca_2axes"], 1e-12, 1e-14)
        assert_close(projection_loss(log_phi2(z["q"], z["k"]), h)["J"], z["j_3axes"], 1e-12)
    else:
        assert_close(h.abs(), z["h"].abs(), 1e-12, 1e-14)
        assert_close(theoretical_values(axes, 3).abs(), z["vdot"].abs(), 1e-12, 1e-14)


def check_heads(z):
    """Every quantity of a case of kpca_small or kpca_vit."""
    q, k, v, d = z["q"], z["k"], z["v"], int(z["dv"])
    axes, lp, h = kernel_pca(k), log_phi2(q, k), attend(q, k, v)
    assert_close(axes.log_g, z["log_g"], 1e-10)
    assert_close(log_g(q, k), z["log_gq"], 1e-10)
    assert_close(axes.c[0], z["log_scale"], 1e-10)
    assert int(axes.rank) == int(z["rank"])
    mu = z["mu_scaled"]
    assert_close(axes.mu[:len(mu)], mu, 1e-6, 1e-9 * float(mu[0]))
    assert_close(lp, z["log_phi2"], 1e-10)
    assert_close(h.square().sum(-1), z["h2"], 1e-10)
    terms = projection_loss(lp, h)
    for ours, theirs in (("J", "jproj_signed"), ("phi2", "phi2_mean"), ("h2", "h2_mean"),
                         ("rel_phi", "rel_phi_of_means"), ("rel_h", "rel_h_of_means")):
        assert_close(terms[ours], z[theirs], 1e-10)
    assert_close((lp.exp() - h.square().sum(-1)).abs().mean(), z["jproj_abs"], 1e-10)
    V = theoretical_values(axes, d)
    assert_close(attend(q, k, V).square().sum(-1), z["h2_kpca"])
    assert_close(attend(q, k, V * (axes.mu[:d] / axes.c.exp()).sqrt()).square().sum(-1), z["h2_kpca_unit"])
    span = key_span(q, k)
    Q, u = basis(value_axes(span, v)), principal_axes(span)[:d].mT
    assert_close(query_share(span), z["frac_span"])
    assert_close(query_share(span, Q), z["frac_v"])
    assert_close(query_share(span, u), z["frac_kpca"])
    assert_close(explained_variance(span, Q), z["ev_v"])
    assert_close(explained_variance(span, u), z["ev_best"])
    assert_close(axes.mu[:d].sum() / axes.mu.sum(), z["ev_best"])
    g = gamma_statistics(axes, a_hat(v, axes.log_g))
    assert_close(g["eig_cos"], z["gamma_cos"])
    assert_close(g["rho"] / len(k), z["gamma_rayleigh_scaled"])
    assert_close(g["wstd"], z["gamma_wstd_scaled"])
    gv = a_hat(v, axes.log_g, None)
    assert_close(gv.sum(-2).abs() / gv.abs().sum(-2), z["solvability"])


@pytest.mark.parametrize("case", ["explicit0", "explicit1", "gauss0", "gauss1"])
def test_small_heads_agree_with_golden(golden, case):
    z = cases(golden("kpca_small"))[case]
    check_heads(z)
    axes, d = kernel_pca(z["k"]), int(z["dv"])
    if "h" in z:
        assert_close(attend(z["q"], z["k"], z["v"]), z["h"], 1e-10)
        assert_close((log_gram(z["k"]) + axes.c).exp(), z["gram_scaled"], 1e-10)
        assert_close(axes.K, z["gram_centred_scaled"], 1e-10, 1e-12)
        U, V = axes.U[:, :d], theoretical_values(axes, d)
        assert_close(U @ U.mT, z["projector_top"], 1e-6, 1e-9)
        assert_close(V @ V.mT, z["vdot_gram"], 1e-6, 1e-9)


@pytest.mark.parametrize("case", ["explicit0", "explicit1"])
def test_projections_and_residuals_agree_with_explicit_features(golden, case):
    z = cases(golden("kpca_small"))[case]
    q, k, d = z["q"], z["k"], int(z["dv"])
    axes = kernel_pca(k)
    h = kernel_projections(q, k, axes, d)
    assert_close(h.abs(), z["ex_h_abs"], 1e-6, 1e-9)
    assert_close(log_phi2(q, k).exp() - h.square().sum(-1), z["ex_resid"], 1e-6, 1e-9)  # (13)
    h_c, phi2_c = centred_projections(q, k, axes, d)
    assert_close((-axes.c).exp() * phi2_c, z["ex_phi2_centred"], 1e-6, 1e-9)
    assert_close((-axes.c).exp() * (phi2_c - h_c.square().sum(-1)), z["ex_resid_centred"], 1e-6, 1e-9)
    mu = (-axes.c).exp() * axes.mu
    assert_close(mu[d:].sum() / len(k), z["ex_key_residual"])
    j = projection_loss(log_phi2(q, k), attend(q, k, theoretical_values(axes, d)))["J"]
    assert_close(j, z["ex_j_kpca"])
    assert j > 3 * z["ex_j_query_optimal"]            # kernel PCA of the keys is not what minimises (13) over queries


def test_trained_heads_agree_with_golden(golden):
    for case, z in cases(golden("kpca_vit")).items():
        if case.startswith("vit_"):
            check_heads(z)


def test_released_loss_and_its_reproduction_agree_with_golden(golden):
    z = cases(golden("kpca_vit"))["jproj_variants"]
    q, k, v = (z[n][None] for n in "qkv")
    assert_close(official_loss(q, k, v), z["official"], 1e-10)
    assert_close(official_loss(q, k, v, with_h=False), z["official_without_h"], 1e-10)
    assert official_loss(q, k, v) == official_loss(q, k, 100 * v)                 # the curve knows nothing about v
    found = kpca.absolute_losses(q, k, v)
    for ours, theirs in (("J abs [R]", "error"), ("rel_h floor [R]", "rel_h"), ("rel_phi floor [R]", "rel_phi")):
        assert_close(found[ours].mean(), z[f"repro_{theirs}"], 1e-8)


def test_eigenvalue_statistics_agree_with_golden(golden):
    z = cases(golden("kpca_vit"))["eigstats"]
    for k, name in ((z["k"], "stats"), (standardise(z["k"]), "stats_standardised")):
        axes = kernel_pca(k)
        mu = ((-axes.c).exp() * axes.mu)[..., :32].mean((0, 1))
        assert_close(torch.stack(list(eigenvalue_statistics(mu).values())), z[name])
    assert_close((-log_g(z["k"], z["k"]).amin(-1)).exp().flatten(), z["bound"], 1e-10)


def test_loss_over_training_agrees_with_golden(golden):
    z = cases(golden("kpca_curve"))["curve"]
    lp, h = log_phi2(z["q"], z["k"]), attend(z["q"], z["k"], z["v"])
    terms = projection_loss(lp, h)
    assert_close(terms["phi2"].mean(-1), z["phi2"], 1e-10)
    assert_close(terms["h2"].mean(-1), z["h2"], 1e-10)
    assert_close(terms["J"].mean(-1), z["jproj_signed"], 1e-10)


def test_causal_attention_agrees_with_golden(golden):
    z = cases(golden("kpca_small"))["causal"]
    assert_close(log_phi2(z["q"], z["k"], causal=True), z["log_phi2"], 1e-10)
    assert_close(attend(z["q"], z["k"], z["v"], causal=True).square().sum(-1), z["h2"], 1e-10)


def test_gamma_agrees_with_golden(golden):
    z = cases(golden("kpca_small"))["gamma"]
    axes = kernel_pca(z["k"])
    a, scale = a_hat(z["v"], axes.log_g), (-axes.c).exp()
    assert_close(axes.log_g.amax().exp() * a, z["ahat_pinv"], 1e-10)
    g = gamma_statistics(axes, a)
    for ours, theirs, factor in (("gamma", "gamma", scale), ("pair_mean", "abs_mean", scale), ("eig_cos", "cos", 1),
                                 ("pair_std", "abs_std", scale), ("wstd", "wstd", scale),
                                 ("rho", "rayleigh", scale / 12)):
        assert_close(factor * g[ours], z[theirs])
    mean, std, _ = relative_pair_differences(scale * g["gamma"])
    assert_close(mean, z["rel_mean"])
    assert_close(std, z["rel_std"])
    assert_close((scale * axes.mu / 12)[:4], z["lam"])
    assert_close((-axes.log_g.amin()).exp(), z["bound"])


def test_scaling_and_truncation_agree_with_golden(golden):
    z = cases(golden("kpca_small"))
    s, t = z["scaled"], z["truncation"]
    assert_close(exact_scaling(s["k"][None, None], s["v"][None, None])[0, 0], s["S"] @ s["v"], 1e-10, 1e-12)
    assert_close(s["v"] - exact_scaling(s["k"][None, None], s["v"][None, None])[0, 0], s["IminusS_v"], 1e-10, 1e-12)
    q, k, v, d = t["q"], t["k"], t["v"], int(t["dv"])
    axes = kernel_pca(k)
    span = key_span(q, k)
    u = principal_axes(span)
    for r, name in ((d, "dv"), (len(k) - 1, "full")):
        assert_close(restrict(q, k, v, span, u[:r]), t[f"h_strict_{name}"], 1e-6, 1e-9)
        assert_close(restrict(q, k, v, span, u[:r], affine=True), t[f"h_affine_{name}"], 1e-6, 1e-9)
        offset = kernel_projections(k, k, axes, r).mean(-2)
        assert_close(offset.abs(), t[f"b_offset_abs_{name}"], 1e-6, 1e-9)


@pytest.mark.parametrize("case", ["large0", "large1"])
def test_long_keys_agree_with_golden(golden, case):
    z = cases(golden("kpca_large"))[case]
    q, k, v = z["q"], z["k"], z["v"]
    axes, lp = kernel_pca(k), log_phi2(q, k)
    for ours, theirs in ((axes.log_g, "log_g"), (log_g(q, k), "log_gq"), (axes.c[0], "log_scale"), (lp, "log_phi2")):
        assert_close(ours, z[theirs], 0, 1e-9)
    mu = z["mu_scaled"]
    assert (axes.mu[:len(mu)] - mu).abs().max() < 1e-10 * mu[0] and int(axes.rank) == int(z["rank"])
    terms = projection_loss(lp, attend(q, k, v))
    for ours, theirs in (("J", "jproj_signed"), ("h2", "h2_mean"), ("phi2", "phi2_mean"), ("rel_h", "rel_h_of_means")):
        assert_close(terms[ours], z[theirs], 1e-10)
    assert all(t.isfinite().all() for t in terms.values())


@pytest.mark.parametrize("case", ["random", "self", "flipped", "reversed", "rotated", "permuted", "mixed"])
def test_similarities_agree_with_golden(golden, case):
    z = cases(golden("kpca_sims"))
    w, given, z = z["inputs"]["vdot"], z["inputs"], z[case]
    v = {"random": given["v"], "self": w, "flipped": w * given["flips"], "reversed": w.flip(-1),
         "rotated": w @ given["rotation"], "permuted": w[given["perm"]], "mixed": given["mixed"]}[case]
    found = row_similarities(v, w)
    assert torch.equal(found.pop("assign"), z["assign"])
    for name, value in found.items():
        assert_close(value, z[name], 1e-6, 1e-9)
    assert_close(cka(v, w), z["linear_cka"])
    assert_close(cka(v, w, unbiased=True), z["linear_cka_unbiased"])
    assert_close(kernel_cka(v, w), z["kernel_cka"])
    assert_close(token_overlap(basis(v), basis(w)), z["overlap"])


# --- theory: true of any keys ----------------------------------------------------------------------------------------

@sweep
def test_theorem_1_is_exact(seed, N, D, size):
    q, k, _ = draw(seed, N, D, size=size)
    axes = kernel_pca(k)
    d = min(D, int(axes.rank))
    V = theoretical_values(axes, d)
    h = attend(q, k, V)
    assert_close(h, kernel_projections(q, k, axes, d), 1e-9, 1e-11 * float(h.abs().max()))  # (8) = (9)
    E = log_kernel(k, k).exp()
    assert_close(V.mT @ E @ V, torch.eye(d, dtype=torch.float64), 0, 1e-8)  # orthonormal u_d
    a = log_g(k, k).exp()[:, None] * V
    assert (a.sum(0).abs() <= 1e-9 * a.abs().sum(0)).all()  # sum_j g_j v_j = 0
    assert_close(V - exact_scaling(k[None, None], V[None, None])[0, 0], V, 1e-9,
                 1e-11 * float(V.abs().max()))                                                     # (I - S) V = V


@sweep
def test_eigenvalues_never_exceed_one_over_the_smallest_g(seed, N, D, size):
    _, k, _ = draw(seed, N, D, size=size)
    axes = kernel_pca(k)
    assert axes.mu[0].log() - axes.c[0] <= -axes.log_g.amin() + 1e-12 <= 1e-12
    assert int(axes.rank) <= N - 1


@sweep
def test_kernel_pca_has_no_negative_loss_and_the_most_variance(seed, N, D, size):
    q, k, v = draw(seed, N, D, size=size)
    axes = kernel_pca(k)
    d = min(D, int(axes.rank))
    V, lp = theoretical_values(axes, d), log_phi2(q, k)
    h = attend(q, k, V)
    assert projection_loss(lp, h)["J"] >= 0 and (h.square().sum(-1) <= lp.exp() * (1 + 1e-9)).all()  # Bessel
    span = key_span(q, k)
    best = axes.mu[:d].clamp(min=0).sum() / axes.mu.clamp(min=0).sum()
    assert_close(explained_variance(span, basis(value_axes(span, V))), best, 1e-6)  # EV(V) is the best
    assert explained_variance(span, basis(value_axes(span, v[:, :d]))) <= best * (1 + 1e-9)
    frac = query_share(span, basis(value_axes(span, V)))
    assert_close(frac, h.square().sum(-1) / lp.exp(), 1e-6, 1e-9)
    assert (query_share(span, basis(value_axes(span, v))) <= query_share(span) + 1e-9).all()
    assert (query_share(span) <= 1 + 1e-9).all()


@sweep
def test_gauge_free_measures_ignore_any_invertible_map_of_the_values(seed, N, D, size):
    q, k, v = draw(seed, N, D, size=size)
    v = v[:, :3]
    R = torch.randn(v.shape[1], v.shape[1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    span = key_span(q, k)
    a, b = (basis(value_axes(span, x)) for x in (v, v @ R))
    assert_close(explained_variance(span, a), explained_variance(span, b), 1e-8)
    assert_close(query_share(span, a), query_share(span, b), 1e-7, 1e-12)


@pytest.mark.parametrize("size", [0.5, 1.0, 2.0, 3.0])
def test_all_axes_and_the_constant_row_give_attention_back_also_where_axes_are_not_resolved(size):
    q, k, v = draw(3, 24, 8, size=size)
    axes = kernel_pca(k)
    span = key_span(q, k)
    h = attend(q, k, v)
    assert_close(restrict(q, k, v, span, principal_axes(span)[:-1], affine=True), h, 1e-6, 1e-6)
    strict = restrict(q, k, v, span, principal_axes(span)[:-1])
    assert (strict - h).abs().max() > 0.01                                        # without the row
    assert size < 3 or axes.rank < 23


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
def test_axes_are_orthonormal_for_any_weighting_of_the_keys(p):
    q, k, _ = draw(5)
    axes = kernel_pca(k, p)
    V = theoretical_values(axes, 8)
    assert_close(V.mT @ log_kernel(k, k).exp() @ V, torch.eye(8, dtype=torch.float64), 0, 1e-10)
    assert_close(attend(q, k, V), kernel_projections(q, k, axes, 8), 1e-9, 1e-12)
    span = key_span(q, k, p)
    assert_close(explained_variance(span, principal_axes(span)[:8].mT), axes.mu[:8].sum() / axes.mu.sum(), 1e-9)


@pytest.mark.parametrize("ratio", [50, 500, 5000])
def test_everything_stays_finite_for_very_long_keys(ratio):
    q, k, v = draw(7, 20, 8, batch=(2, 3))
    for t in (q, k):
        t *= (ratio * math.sqrt(8) / t.square().sum(-1).amax()).sqrt()
    heads = kpca.Heads(q, k, v, v, v.transpose(1, 2).flatten(2))
    layer = kpca.Layer(heads, "0")
    assert (layer.axes.rank < 19).all() == (ratio >= 500)                         # fewer axes than asked: it goes on
    for key, t in kpca.measure([layer], kpca.EXPERIMENTS).items():
        assert np.isfinite(t).all() or "by axis" in key[1], key
    for how in kpca.TRUNCATIONS:
        assert kpca.truncated(heads, how, 4).isfinite().all(), how


def test_eigenvectors_have_cosine_one_and_constant_gamma_and_noise_has_neither():
    _, k, v = draw(9, 65, 32)
    axes = kernel_pca(k)
    true, noise = gamma_statistics(axes, axes.U[:, :32]), gamma_statistics(axes, a_hat(v, axes.log_g))
    assert_close(true["eig_cos"], torch.ones(32), 1e-9)
    assert noise["eig_cos"].max() < 0.9 and (noise["pair_mean"] > 1e3 * true["pair_mean"]).all()


def test_numeric_inverse_of_the_centring_matrix_calls_noise_an_eigenvector():
    _, k, v = draw(9, 65, 32)
    axes = kernel_pca(k)
    with pytest.raises(RuntimeError, match="singular"):
        a_hat(v[:4], axes.log_g[:4], "numeric")
    literal = gamma_statistics(axes, a_hat(v, axes.log_g, "numeric"))
    assert (literal["pair_mean"] < 1e-9 * axes.mu[:32] / 65).all()


def test_values_made_by_theorem_1_give_their_eigenvectors_back():
    _, k, _ = draw(11)
    axes = kernel_pca(k)
    a = a_hat(theoretical_values(axes, 8), axes.log_g)
    assert_close(gamma_statistics(axes, a)["eig_cos"], torch.ones(8), 1e-9)
    assert_close((a / a.norm(dim=0)).abs(), axes.U[:, :8].abs(), 1e-6, 1e-9)


def test_pair_differences_equal_the_pairs():
    x = torch.randn(3, 17, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    i, j = torch.triu_indices(17, 17, 1)
    d = (x[:, i] - x[:, j]).abs()
    mean, std = pair_differences(x)
    assert_close(mean, d.mean(1), 1e-12)
    assert_close(std, d.std(1), 1e-12)


def test_assignment_is_the_best_of_all_permutations():
    from itertools import permutations
    rng = np.random.default_rng(0)
    for _ in range(20):
        cost = rng.normal(size=(6, 6))
        best = min(cost[range(6), p].sum() for p in permutations(range(6)))
        match = assignment(cost)
        assert sorted(match) == list(range(6)) and abs(cost[range(6), match].sum() - best) < 1e-12


def test_exact_kernel_pca_with_turned_axes_scores_like_noise_by_rows_and_perfectly_without_gauge():
    found = kpca.measure([kpca.Layer(kpca.random_heads())], ["values", "capture"], repro=True)
    at = {key[1:3]: t.mean() for key, t in found.items()}
    assert abs(at["optimal [R]", "KPCA"] - at["optimal [R]", "iid"]) < 0.05
    assert at["overlap", "KPCA"] > 1 - 1e-9 and at["EV", "KPCA"] > 0.9 * at["EV", "best"] > 5 * at["EV", "iid"]
    assert abs(at["overlap", "iid"] - 16 / 65) < 0.02 and abs(at["CKA unbiased", "iid"]) < 0.02


# --- capture ---------------------------------------------------------------------------------------------------------

class Wrapped(nn.Module):
    """Any module tree with attention in it will do."""

    def __init__(self, **kind):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.LayerNorm(24), SelfAttention(24, 3, **kind))

    def forward(self, x):
        return x + self.inner(x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True])
def test_captured_heads_reproduce_the_attention_of_every_kind(kind, causal):
    if kind == "scaled_s" and causal:
        return
    model = Wrapped(attn=kind, causal=causal, num_tokens=10).double()
    module = model.inner[1]
    if kind.startswith("scaled"):
        nn.init.normal_(module.s, std=0.3)
    x = torch.randn(2, 10, 24, dtype=torch.float64)
    heads, = kpca.capture(model, x)
    h = attend(heads.q, heads.k, heads.v, causal)
    with torch.no_grad():
        assert_close(module.proj(h.transpose(1, 2).flatten(2)), module(model.inner[0](x)), 1e-6, 1e-6)
        with kpca.attention_replaced(model, lambda heads: attend(heads.q, heads.k, heads.v, causal)):
            again = model(x)
        assert_close(again, model(x), 1e-6, 1e-6)
    assert torch.equal(heads.raw, heads.v) != kind.startswith("scaled")


def test_causal_layers_are_looked_at_on_prefixes():
    heads, = kpca.capture(Wrapped(causal=True), torch.randn(2, 12, 24))
    layer = kpca.Layer(heads, "0")
    assert [part.k.shape[-2] for part in layer.parts] == [3, 6, 12] and all(p.q.shape[-2] == 1 for p in layer.parts)
    part = layer.parts[1]
    assert_close(attend(part.q, part.k, part.v), attend(layer.q, layer.k, layer.v, True)[..., 5:6, :], 1e-10)
    found = kpca.measure([layer], kpca.EXPERIMENTS)
    assert all(t.shape[0] == 2 for t in found.values()) and ("jproj", "J", "learned", "0") in found


def test_null_values_have_the_size_of_the_learned_and_do_not_depend_on_the_batch():
    heads = kpca.random_heads(B=4)
    layer = kpca.Layer(heads, key=(2, 0))
    for name, v in layer.values.items():
        assert_close(v.norm(dim=(-2, -1)), layer.v.norm(dim=(-2, -1)).expand(v.shape[:3]), 1e-10)
    part = kpca.Layer(kpca.Heads(*(t[:2] for t in heads[:5])), key=(2, 0))
    assert_close(part.values["x W"], layer.values["x W"][:, :2], 1e-12)


# --- the command -----------------------------------------------------------------------------------------------------

def save_vit(path, attn="softmax", **change):
    torch.manual_seed(0)
    config = ViTConfig(image_size=16, patch_size=4, num_classes=10, embed_dim=24, depth=2, num_heads=3, attn=attn,
                       init="default")
    model = ViT(config)
    args = dict(data="shapes", data_dir=None, seed=0, init_from=None)
    torch.save({"task": "classification", "model": model.state_dict(), "model_config": asdict(config), "step": 7,
                "args": args, "classes": list(data.SHAPES), **change}, path)
    return str(path)


def run(monkeypatch, *argv):
    monkeypatch.setattr(sys, "argv", ["kpca.py", *map(str, argv)])
    kpca.main()


def read(path):
    with open(path, newline="") as f:
        return list(csv.DictReader(f))


def test_without_a_checkpoint_it_shows_the_theory(monkeypatch, capsys):
    run(monkeypatch)
    out = capsys.readouterr().out
    assert "J_proj   (13)" in out and "0.1291" in out and "|h - h'|" in out and "singular" in out
    run(monkeypatch, "--exp", "jproj,gamma,capture", "--standardise", "--p", 0)
    assert "EV" in capsys.readouterr().out


@pytest.mark.parametrize("attn", ["softmax", "rpc", "scaled_alpha"])
def test_command_writes_a_table_for_every_experiment_and_layer(monkeypatch, tmp_path, capsys, attn):
    ckpt = save_vit(tmp_path / "a.pt", attn)
    run(monkeypatch, "--ckpt", ckpt, "--images", 5, "--repro", "--out_dir", tmp_path, "--device", "cpu")
    out = capsys.readouterr().out
    for name in kpca.EXPERIMENTS:
        rows = read(tmp_path / f"{name}.csv")
        assert f"=== {name}" in out and {r["layer"] for r in rows} == {"0", "1", "all"}
        assert all(math.isfinite(float(r["mean"])) or r["measure"] == "eta" for r in rows), name
    rows = {(r["how"], r["r"]): float(r["accuracy"]) for r in read(tmp_path / "truncate.csv")}
    assert rows["affine", "16"] == rows["none", "0"] and len(rows) == 3 + 3 * len(kpca.TRUNCATIONS)
    sources = {r["source"] for r in read(tmp_path / "capture.csv") if r["measure"] == "EV"}
    assert sources == {"learned", "x W", "iid", "KPCA", "best"}


def test_keys_too_long_to_resolve_all_axes_are_announced(monkeypatch, tmp_path, capsys):
    model, _ = kpca.load_model(save_vit(tmp_path / "a.pt"))
    weights = model.state_dict()
    weights["blocks.1.attn.qkv.weight"][24:48] *= 12
    ckpt = save_vit(tmp_path / "long.pt", model=weights)
    run(monkeypatch, "--ckpt", ckpt, "--images", 3, "--exp", "capture", "--out_dir", tmp_path)
    out = capsys.readouterr().out
    assert "layer 1: keys so long that float64 resolves" in out and "layer 0: keys so long" not in out


def test_command_tracks_a_training_run_and_the_figures_follow(monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    import plot
    folder = tmp_path / "run"
    monkeypatch.setattr(sys, "argv", ["train_cls.py", "--num_images", "64", "--epochs", "2", "--keep_every", "1",
                                      "--image_size", "16", "--out_dir", str(folder), "--attn", "softmax", "--lr", "0",
                                      "--weight_decay", "0", "--min_lr", "0", "--batch_size", "32", "--device", "cpu"])
    train_cls.main()
    start, _ = kpca.untrained(common.read_checkpoint(folder), folder)
    end, _ = kpca.load_model(folder)
    for a, b in zip(start.parameters(), end.parameters()):                        # warm-up begins at 1e-6
        assert_close(a.detach(), b.detach(), 0, 1e-4)
    run(monkeypatch, "--ckpt", *sorted(folder.glob("*.pt")), "--untrained", "--images", 4, "--repro", "--ranks", "2,16",
        "--layers", "0,3", "--out_dir", tmp_path)
    assert "over training" in capsys.readouterr().out
    assert {r["step"] for r in read(tmp_path / "jproj.csv")} == {"0", "2", "4"}   # last.pt is epoch 2 and counts once
    monkeypatch.setattr(sys, "argv", ["plot.py", "kpca", str(tmp_path)])
    plot.main()
    assert {p.stem for p in tmp_path.glob("*.png")} == set(plot.KPCA_FIGURES)
    monkeypatch.setattr(sys, "argv", ["plot.py", "kpca", str(folder)])
    with pytest.raises(SystemExit, match="no CSV"):
        plot.main()


def test_one_checkpoint_gives_every_figure_and_a_word_on_what_it_lacks(monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    import plot
    run(monkeypatch, "--ckpt", save_vit(tmp_path / "a.pt"), "--images", 3, "--ranks", 4, "--out_dir", tmp_path)
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["plot.py", "kpca", str(tmp_path)])
    plot.main()
    assert {p.stem for p in tmp_path.glob("*.png")} == set(plot.KPCA_FIGURES)
    loss, gamma = capsys.readouterr().out.splitlines()[:2]
    assert "several checkpoints" in loss and "needs --repro" in loss and "needs --repro" in gamma
    figure, _ = plot.kpca_loss(tmp_path, "")
    assert [len(ax.patches) for ax in figure.axes] == [0, 2, 5, 4]                # bars: terms, frac, EV
    (tmp_path / "truncate.csv").unlink()
    plot.main()
    assert "truncation: skipped" in capsys.readouterr().out


def test_plot_without_matplotlib_says_so_in_one_line(monkeypatch):
    monkeypatch.delitem(sys.modules, "plot", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="^error: plot.py needs matplotlib"):
        importlib.import_module("plot")


def test_deit_weights_are_recognised_by_their_shapes(monkeypatch, tmp_path):
    torch.manual_seed(0)
    model = ViT(ViTConfig(**SIZES["nano"], image_size=16, patch_size=8, num_classes=10))
    torch.save({"model": model.state_dict()}, tmp_path / "deit.pth")
    run(monkeypatch, "--ckpt", tmp_path / "deit.pth", "--exp", "capture", "--images", 3, "--out_dir", tmp_path)
    assert read(tmp_path / "capture.csv")[0]["run"] == "deit"


def test_bad_input_is_one_clear_line(monkeypatch, tmp_path):
    good, other = save_vit(tmp_path / "good.pt"), str(tmp_path / "other.pt")
    torch.save({"weights": torch.zeros(3)}, other)
    lm = save_vit(tmp_path / "lm.pt", task="segmentation")
    model = ViT(ViTConfig(image_size=16, patch_size=4, num_classes=10, embed_dim=24, depth=2, num_heads=3))
    broken = {name: t * math.nan for name, t in model.state_dict().items()}
    nan = save_vit(tmp_path / "nan.pt", model=broken)
    (tmp_path / "cifar").mkdir()
    for argv, message in (
            (["--ckpt", other], "neither a checkpoint of train_cls.py or train_lm.py nor ViT weights"),
            (["--ckpt", lm], "not a checkpoint of train_cls.py"),
            (["--ckpt", tmp_path / "none.pt"], "no checkpoint at"),
            (["--ckpt", good, "--layers", "2"], "--layers 2: expected whole numbers from 0 to 1"),
            (["--ckpt", good, "--ranks", "17"], "--ranks 17: expected whole numbers from 0 to 16"),
            (["--ckpt", good, "--data", "cifar10"], "needs --data_dir"),
            (["--ckpt", good, "--data", "cifar10", "--data_dir", tmp_path / "cifar"], "no CIFAR-10 test images"),
            (["--ckpt", nan], "not finite"),
            (["--exp", "magic"], "--exp magic: expected some of theorem"),
            (["--exp", "truncate"], "need a model"),
            (["--ckpt", other, "--untrained"], "neither")):
        monkeypatch.setattr(sys, "argv", ["kpca.py", *map(str, argv)])
        with pytest.raises(SystemExit) as stop:
            common.run(kpca.main)
        assert str(stop.value.code).startswith("error: ") and message in stop.value.code, stop.value.code
        assert "\n" not in stop.value.code


def test_images_of_another_size_tokens_too_few_and_models_without_attention_are_refused(monkeypatch, tmp_path):
    model, _ = kpca.load_model(save_vit(tmp_path / "a.pt"))
    with pytest.raises(ValueError, match="expected float in"):
        kpca.capture(model, torch.rand(2, 3, 32, 32))
    with pytest.raises(ValueError, match="no attention.SelfAttention"):
        kpca.capture(nn.Linear(3, 3), torch.rand(2, 3))
    with pytest.raises(ValueError, match="at least two"):
        kpca.Layer(kpca.random_heads(N=1))


def test_help_lists_every_experiment(capsys):
    with pytest.raises(SystemExit, match="0"):
        kpca.get_args(["--help"])
    out = capsys.readouterr().out
    assert all(name in out for name in (*kpca.EXPERIMENTS, "truncate", "hand", "flaws"))


def test_a_language_model_is_measured_on_windows_of_its_test_text(tmp_path, monkeypatch, capsys):
    words = ["<eos>", *"abcdefgh"]
    torch.manual_seed(5)
    model = LM(LMConfig(len(words), context=12, embed_dim=16, depth=2, num_heads=2, mlp_dim=16, attn="rpc",
                        rpc_layers=(0,)))
    (tmp_path / "wiki.test.tokens").write_text("".join(" ".join("abcdefgh"[i % 5:][:4]) + "\n" for i in range(30)))
    common.save_checkpoint(tmp_path / "run" / "last.pt", dict(
        task="language modelling", model=model.state_dict(), model_config=asdict(model.config), step=3,
        vocab="\n".join(words), args=dict(seed=5, data_dir=str(tmp_path))))
    run(monkeypatch, "--ckpt", tmp_path / "run", "--images", 3, "--untrained", "--out_dir", tmp_path / "out")
    out = capsys.readouterr().out
    assert "3 windows of 12 tokens" in out and "truncate needs classes" in out
    start, _ = kpca.untrained(common.read_checkpoint(tmp_path / "run"), tmp_path)
    assert torch.equal(start.embed.weight, model.embed.weight)
