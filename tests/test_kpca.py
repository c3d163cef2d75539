"""Compare kpca.py with numbers by hand, with two independent programs (golden), and with theory."""

from fractions import Fraction

import pytest
import torch

import kpca
from kpca import (attend, kernel_pca, kernel_projections, log_g, log_kernel, log_phi2, pcp,
                  projection_error, theoretical_values)


def cases(z):
    """Return {case: {quantity: tensor}} of a golden file with arrays named case__quantity."""
    out = {}
    for name, t in z.items():
        case, quantity = name.split("__")
        out.setdefault(case, {})[quantity] = t.double() if t.is_floating_point() else t
    return out


def assert_close(a, b, rtol=1e-6, atol=0.0):
    a, b = (torch.as_tensor(t, dtype=torch.float64) for t in (a, b))
    torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def draw(seed, N=24, D=8, M=None, size=1.0):
    """Draw random q, k, v."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, D, generator=g, dtype=torch.float64) for n in (M or N, N, N))
    return size * q, size * k, v


def test_worked_example_agrees_with_the_numbers_by_hand():
    for what, by_hand, computed in kpca.hand_example():
        numbers = [float(Fraction(number)) for number in by_hand.split()]
        numbers = torch.tensor(numbers, dtype=torch.float64)
        assert (numbers - computed).abs().max() < 1e-12, what


@pytest.mark.parametrize("case", ["explicit0", "explicit1"])
def test_projections_and_residuals_agree_with_explicit_features(golden, case):
    z = cases(golden("kpca_small"))[case]
    q, k, d = z["q"], z["k"], int(z["dv"])
    axes = kernel_pca(k)
    h = kernel_projections(q, k, axes, d)
    assert_close(h.abs(), z["ex_h_abs"], 1e-6, 1e-9)
    assert_close(log_phi2(q, k).exp() - h.square().sum(-1), z["ex_resid"], 1e-6, 1e-9)  # (13)
    mu = (-axes.c).exp() * axes.sigma
    assert_close(mu[d:].sum() / len(k), z["ex_key_residual"])
    j = projection_error(q, k, attend(q, k, theoretical_values(axes, d)))
    assert_close(j, z["ex_j_kpca"])
    # kernel PCA of the keys does not minimise (13) over queries
    assert j > 3 * z["ex_j_query_optimal"]


def test_exact_scaling_agrees_with_golden(golden):
    z = golden("derived_options")
    k, v = z["exactS/k"][0, 0].double(), z["v"][0, 0].double()
    assert_close(kpca.attend_scaled(k, k, v), attend(k, k, v - z["exactS/S"][0, 0] @ v), 0, 1e-10)


@pytest.mark.parametrize("how, end", [(dict(tol=1e-12), ""), (dict(max_iter=5), "_after5")])
def test_pcp_agrees_with_golden(golden, how, end):
    z = golden("derived_options")
    for part, name in zip(pcp(z["pcp/M"], **how), "LS"):
        assert_close(part, z[f"pcp/{name}{end}"], 0, 1e-10)


@pytest.mark.parametrize("spike", [-100.0, -9999.0, -99999.0])
def test_pcp_stops_when_its_parts_stop(spike):
    left, right, _ = draw(0, N=60, D=3, M=80)
    true = left @ right.mT
    M = true.clone()
    M[5, 7] = spike                                     # a sensor's fill value
    L, S = pcp(M)
    assert (L - true).norm() < 1e-3 * true.norm()
    assert S[5, 7] == pytest.approx(spike - true[5, 7].item(), abs=0.1)


def test_pcp_that_does_not_stop_is_an_error():
    M = draw(0)[1]
    with pytest.raises(ValueError, match="still change after 10,000 steps"):
        pcp(M, tol=0)
    pcp(M, tol=0, max_iter=3)                           # three steps are what the caller wants


def test_float32_vectors_give_float64_results():
    single = [x.float() for x in draw(2, size=3.0)]
    exact = [x.double() for x in single]
    results = []
    for q, k, v in (single, exact):
        axes = kernel_pca(k)
        results.append([*axes, attend(q, k, v), kernel_projections(q, k, axes, 3), log_phi2(q, k)])
    for ours, expected in zip(*results):
        assert torch.equal(ours, expected) and ours.dtype != torch.float32


@pytest.mark.parametrize("case", ["large0", "large1"])
def test_long_keys_agree_with_golden(golden, case):
    z = cases(golden("kpca_large"))[case]
    q, k = z["q"], z["k"]
    axes, lp = kernel_pca(k), log_phi2(q, k)
    for ours, theirs in ((axes.log_g, "log_g"), (log_g(q, k), "log_gq"), (axes.c[0], "log_scale"),
                         (lp, "log_phi2")):
        assert_close(ours, z[theirs], 0, 1e-9)
    mu = z["mu_scaled"]
    assert (axes.sigma[:len(mu)] - mu).abs().max() < 1e-10 * mu[0]
    assert int(axes.rank) == int(z["rank"])


def test_printed_formulas_equal_the_logarithms():
    q, k, v = draw(1, N=8, D=3, M=10)
    axes = kernel_pca(k)
    expanded, h = kpca.theorem_1(q, k, 3)
    assert_close(expanded.abs(), kernel_projections(q, k, axes, 3).abs(), 1e-7, 1e-9)
    assert_close(h.abs(), attend(q, k, theoretical_values(axes, 3)).abs(), 1e-7, 1e-9)
    assert_close(h, expanded, 1e-9, 1e-12)
    assert_close(kpca.project_features(q, k, 3).abs(), h.abs(), 1e-6, 1e-8)
    phi2 = log_phi2(q, k).exp()
    assert_close(projection_error(q, k, h), (phi2 - h.square().sum(-1)).mean(), 1e-9)


@pytest.mark.parametrize("N, D, size", [(5, 2, 0.3), (24, 8, 1.7), (65, 32, 1.0), (40, 64, 1.7)])
def test_theorem_1_is_exact(N, D, size):
    q, k, _ = draw(N, N, D, size=size)
    axes = kernel_pca(k)
    d = min(D, int(axes.rank))
    V = theoretical_values(axes, d)
    h = attend(q, k, V)
    # (8) = (9)
    assert_close(h, kernel_projections(q, k, axes, d), 1e-9, 1e-11 * float(h.abs().max()))
    E = log_kernel(k, k).exp()
    assert_close(V.mT @ E @ V, torch.eye(d, dtype=torch.float64), 0, 1e-8)  # orthonormal u_d
    assert_close(kpca.attend_scaled(q, k, V), h, 1e-9, 1e-9 * float(h.abs().max()))  # (I - S) V = V
    assert axes.sigma[0].log() - axes.c[0] <= -axes.log_g.amin() + 1e-12 <= 1e-12   # 1 / min g
    assert int(axes.rank) <= N - 1
    assert (kpca.coefficients(axes, N)[:, int(axes.rank):] == 0).all()      # no 1 / sqrt(rounding)


def test_axes_are_fewer_than_keys_with_fixed_sign():
    assert kernel_pca(draw(5, N=12)[1].repeat(2, 1)).rank == 11
    assert all(kernel_pca(draw(seed, N=2, D=1, size=0.1)[1]).rank <= 1 for seed in range(20))
    U = kernel_pca(draw(5)[1]).U
    assert (U.gather(0, U.abs().argmax(0, keepdim=True)) > 0).all()
