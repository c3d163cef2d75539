"""Test kernel_pca.py, probe.py and published_scores.py: reference numbers, theory, controls."""

import csv
import math
from dataclasses import asdict
from itertools import permutations

import numpy as np
import pytest
import torch
from torch import nn

from attention import SelfAttention
from data.shapes import SHAPES
from fixtures import ROOT
from kpca import (a_hat, attend, eigen_cosine, kernel_pca, log_g, log_gram, log_phi2,
                  projection_error, theoretical_values)
from studies import kernel_pca as study, probe, published_scores
from studies.kernel_pca import (EXPERIMENTS, eigenvalue_statistics, exp_gamma, measure,
                                projection_loss, ritz, standardise)
from studies.probe import capture, Heads
from studies.published_scores import (cka, gamma, kernel_cka, matching, official_loss,
                                      optimal_cosine, pair_differences)
from studies.span import (basis, explained_variance, key_span, Layer, principal_axes,
                          token_overlap, value_axes)
from test_kpca import assert_close, cases, draw
from vit import ViT, ViTConfig


def check_heads(z):
    """Check every quantity of a case of kpca_small or kpca_vit."""
    q, k, v, d = z["q"], z["k"], z["v"], int(z["dv"])
    axes, lp, h = kernel_pca(k), log_phi2(q, k), attend(q, k, v)
    assert_close(axes.log_g, z["log_g"], 1e-10)
    assert_close(log_g(q, k), z["log_gq"], 1e-10)
    assert_close(axes.c[0], z["log_scale"], 1e-10)
    assert int(axes.rank) == int(z["rank"])
    mu = z["mu_scaled"]
    assert_close(axes.sigma[:len(mu)], mu, 1e-6, 1e-9 * float(mu[0]))
    assert_close(lp, z["log_phi2"], 1e-10)
    assert_close(h.square().sum(-1), z["h2"], 1e-10)
    terms = projection_loss(lp, h)
    for ours, theirs in (("J", "jproj_signed"), ("phi2", "phi2_mean"), ("h2", "h2_mean"),
                         ("rel_phi", "rel_phi_of_means"), ("rel_h", "rel_h_of_means")):
        assert_close(terms[ours], z[theirs], 1e-10)
    assert_close((lp.exp() - h.square().sum(-1)).abs().mean(), z["jproj_abs"], 1e-10)
    V = theoretical_values(axes, d)
    assert_close(attend(q, k, V).square().sum(-1), z["h2_kpca"])
    assert_close(attend(q, k, V * (axes.sigma[:d] / axes.c.exp()).sqrt()).square().sum(-1),
                 z["h2_kpca_unit"])
    span = key_span(k)
    Q, u = basis(value_axes(span, v)), principal_axes(span)[:d].mT
    assert_close(explained_variance(span, Q), z["ev_v"])
    assert_close(explained_variance(span, u), z["ev_best"])
    assert_close(axes.sigma[:d].sum() / axes.sigma.sum(), z["ev_best"])
    assert_close(eigen_cosine(axes, a_hat(v, axes.log_g)), z["gamma_cos"])
    gv = a_hat(v, axes.log_g, scaled=True)
    assert_close(gv.sum(-2).abs() / gv.abs().sum(-2), z["solvability"])


@pytest.mark.parametrize("case", ["large0", "large1"])
def test_terms_of_long_keys_agree_with_golden(golden, case):
    z = cases(golden("kpca_large"))[case]
    q, k, v = z["q"], z["k"], z["v"]
    terms = projection_loss(log_phi2(q, k), attend(q, k, v))
    for ours, theirs in (("J", "jproj_signed"), ("h2", "h2_mean"), ("phi2", "phi2_mean"),
                         ("rel_h", "rel_h_of_means")):
        assert_close(terms[ours], z[theirs], 1e-10)
    assert all(t.isfinite().all() for t in terms.values())


def test_projection_loss_equals_the_printed_formula():
    q, k, v = draw(1, N=8, D=3, M=10)
    h = attend(q, k, v)
    assert_close(projection_loss(log_phi2(q, k), h)["J"], projection_error(q, k, h), 1e-9)
    h = torch.tensor([[0.5], [2.0], [-1.5], [1.0]], dtype=torch.float64)
    assert projection_loss(torch.zeros(4).double(), h)["above"] == 0.5             # |phi|^2 = 1


def test_ritz_recovers_eigenvectors_from_any_basis():
    axes = kernel_pca(draw(11)[1])
    a = axes.U[:, :4] @ draw(1, N=4, D=4)[2]
    found = ritz(axes, torch.cat([a, a[:, :1]], 1))
    assert_close(found[:, :4].abs(), axes.U[:, :4].abs(), 1e-6, 1e-9)
    assert_close(found[:, 4], torch.zeros(24))


@pytest.mark.parametrize("case", ["explicit0", "explicit1", "gauss0", "gauss1"])
def test_small_heads_agree_with_golden(golden, case):
    z = cases(golden("kpca_small"))[case]
    check_heads(z)
    axes, d = kernel_pca(z["k"]), int(z["dv"])
    if "h" in z:
        assert_close(attend(z["q"], z["k"], z["v"]), z["h"], 1e-10)
        assert_close((log_gram(z["k"]) + axes.c).exp(), z["gram_scaled"], 1e-10)
        assert_close(axes.G, z["gram_centred_scaled"], 1e-10, 1e-12)
        U, V = axes.U[:, :d], theoretical_values(axes, d)
        assert_close(U @ U.mT, z["projector_top"], 1e-6, 1e-9)
        assert_close(V @ V.mT, z["vdot_gram"], 1e-6, 1e-9)


def test_trained_heads_agree_with_golden(golden):
    heads = [z for case, z in cases(golden("kpca_vit")).items() if case.startswith("vit_")]
    assert heads
    for z in heads:
        check_heads(z)


def test_eigenvalue_statistics_follow_their_definition():
    """Plain exponentials; one value of 1 / min g per head."""
    keys = torch.randn(3, 3, 65, 32, generator=torch.Generator().manual_seed(0)).double()
    for k in (keys, standardise(keys)):
        K = (k @ k.mT / 32 ** 0.5).exp()
        g = K.sum(-1, keepdim=True)
        K = K / g / g.mT
        K = K - K.mean(-1, keepdim=True)
        expected = torch.linalg.svdvals(K - K.mean(-2, keepdim=True))[..., :32].mean((0, 1))
        axes = kernel_pca(k)
        mu = ((-axes.c).exp() * axes.sigma)[..., :32].mean((0, 1))
        assert_close(torch.stack(list(eigenvalue_statistics(mu).values())),
                     torch.stack(list(eigenvalue_statistics(expected).values())))
        assert_close(mu, expected)
        assert_close((-log_g(k, k).amin(-1)).exp(), 1 / g.amin((-2, -1)), 1e-10)


def test_long_keys_stay_finite():
    heads = tiny_heads(2, 3, 20, 8)
    for t in (heads.q, heads.k):
        t *= (5000 * math.sqrt(8) / t.square().sum(-1).amax()).sqrt()
    layer = Layer(heads, "0")
    assert (layer.axes.rank < 19).all()                     # fewer axes than D are no error
    for key, t in measure([layer], EXPERIMENTS).items():
        assert t.isfinite().all(), key


def random_heads(B=4, H=2, N=65, D=16):
    """Return the heads of a layer with random weights on random tokens."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(B, N, H * D, generator=g, dtype=torch.float64)
    W = torch.randn(3, 1, H, H * D, D, generator=g, dtype=torch.float64)
    q, k, v = x[:, None] @ (1.5 / math.sqrt(H * D) * W)
    return Heads(q, k, v, v, x)


def tiny_heads(B=2, H=2, N=6, D=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, B, H, N, D, generator=g, dtype=torch.float64)
    return Heads(q, k, v, v, torch.randn(B, N, H * D, generator=g, dtype=torch.float64))


def test_control_values_have_the_learned_size():
    heads = tiny_heads(B=4)
    layer = Layer(heads, key=(0, 0))
    for v in layer.values.values():
        assert_close(v.norm(dim=(-2, -1)), layer.v.norm(dim=(-2, -1)).expand(v.shape[:3]), 1e-10)
    iid = layer.values["iid"]
    assert abs(torch.corrcoef(iid[0].flatten(1))[0, 1]) < 0.5       # each head has other values
    later = Layer(Heads(*(t[3:] for t in heads[:5])), key=(0, 3)).values
    for name in ("iid", "x W"):
        assert_close(later[name], layer.values[name][:, 3:], 1e-12)


def test_controls_are_scaled_like_the_layer():
    heads = tiny_heads()
    S = 0.3 * torch.randn(1, 2, 6, 6, generator=torch.Generator().manual_seed(1),
                          dtype=torch.float64)
    layer = Layer(heads._replace(v=heads.raw - S @ heads.raw, S=S))
    other, size = (torch.eye(6) - S) @ heads.raw.roll(1, 1), dict(dim=(-2, -1), keepdim=True)
    other = other / other.norm(**size) * layer.v[0].norm(**size)
    assert_close(layer.values["other"][0], other, 1e-9)
    axes = layer.axes
    a = axes.log_g.exp()[..., None] * layer.raw["learned"]                  # v = G a
    cosine = eigen_cosine(axes, ritz(axes, a)).nanmean(-1)
    assert_close(EXPERIMENTS["gamma"](layer)["eig_cos, v = G a"]["learned"], cosine, 1e-9)
    assert "eig_cos, v = G a" not in EXPERIMENTS["gamma"](Layer(heads))


def test_equal_keys_give_nan_not_a_ratio():
    heads = tiny_heads(N=12)
    k = heads.k.clone()
    k[0, 0] = k[0, 0, :1]                               # all keys of one head are equal
    layer = Layer(heads._replace(k=k))
    scores = {"EV": EXPERIMENTS["capture"], "overlap": EXPERIMENTS["values"],
              "eig_cos": EXPERIMENTS["gamma"], "|dgamma|/lambda": published_scores.exp_gammas,
              "optimal [R]": published_scores.exp_similarities}
    for measure, experiment in scores.items():
        for source, x in experiment(layer)[measure].items():
            bad = x.isnan()
            assert bad[:, 0, 0].all() and bad.sum() == len(x), (measure, source)


def test_second_network_joins_the_first_in_its_csv(tmp_path, capsys):
    def measure_network(name):
        study.main(["--ckpt", str(ROOT / f"weights/shapes_{name}.pt"), "--exp", "eigstats",
                    "--images", "2", "--out_dir", str(tmp_path)])

    measure_network("softmax")
    measure_network("symmetric")
    runs = {row["run"] for row in probe.read_csv(tmp_path / "eigstats.csv")}
    assert runs == {"shapes_softmax", "shapes_symmetric"}


@pytest.mark.parametrize("kind", ["softmax", "rpc", "scaled_s"])
def test_captured_heads_reproduce_the_attention(kind):
    torch.manual_seed(0)
    norm, module = nn.LayerNorm(24).double(), SelfAttention(24, 3, kind, num_tokens=10).double()
    if kind.startswith("scaled"):
        nn.init.normal_(module.learned.s, std=0.3)
    x = torch.randn(2, 10, 24, dtype=torch.float64)
    heads, = capture(nn.Sequential(norm, nn.Sequential(module)), x)
    h = attend(heads.q, heads.k, heads.v)
    with torch.no_grad():
        assert_close(module.proj(h.transpose(1, 2).flatten(2)), module(norm(x)), 1e-6, 1e-6)
    assert torch.equal(heads.raw, heads.v) != kind.startswith("scaled")


def test_fitted_map_beats_a_random_one(monkeypatch):
    heads = random_heads(B=4, N=24, D=8)
    pieces = [Layer(Heads(*(t[i:i + 2] for t in heads[:5]))) for i in (0, 2)]
    own = torch.linalg.lstsq(heads.x.flatten(0, 1)[None],
                             heads.v.transpose(0, 1).flatten(1, 2)).solution
    W = torch.cat([own, torch.zeros(2, 1, 8)], 1)                                  # bias 0
    assert_close(study.mapped(pieces[1], W), heads.v[2:], 1e-9, 1e-9)
    S = torch.rand(2, 2, 24, 24, dtype=torch.float64)
    scaled = Layer(Heads(*(t[2:] for t in heads[:5]), S=S))  # v is (I - S) x W
    assert_close(study.mapped(scaled, W), heads.v[2:] - S @ heads.v[2:], 1e-9, 1e-9)
    monkeypatch.setattr(study, "ROUNDS", 20)
    for name, score in study.FITTED.items():
        found = study.fit_values(score, pieces)
        fitted, random = (torch.cat([score(p, v) for p, v in values], 1).mean() for values in (
            [(p, study.mapped(p, found)[None]) for p in pieces], [(p, p.values["x W"])
                                                                  for p in pieces]))
        assert fitted > random + 0.01, name


# --- studies/published_scores.py ------------------------------------------------------------------

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
