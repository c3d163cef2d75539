"""Check numerically the corrections in docs/differences.md and in the lecture."""

import torch

import kpca
from attention import penalty, softmax_attention
from studies.kernel_pca import ritz

N, D = 40, 8


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_coefficients_of_an_axis_sum_to_0():
    axes = kpca.kernel_pca(draw(N, D))
    a = kpca.coefficients(axes, N - 1)
    assert (a.mean(0).abs() < 1e-9 * a.abs().mean(0)).all()
    v = (axes.c / 2 - axes.log_g).exp()[:, None] * a            # a / g, without the mean
    assert torch.allclose(v, kpca.theoretical_values(axes, N - 1), atol=1e-9 * v.abs().max())


def test_the_inverse_in_section_222_does_not_exist():
    centring = torch.eye(N, dtype=torch.float64) - 1 / N
    assert torch.linalg.svdvals(centring)[-1] < 1e-14           # singular up to rounding
    G = kpca.kernel_pca(draw(N, D)).G                           # G~ does not depend on the mean
    assert G.sum(1).abs().max() < 1e-12 * G.abs().max()


def test_centring_the_query_shifts_outputs_by_one_vector():
    q, k = draw(2, N, D)
    axes = kpca.kernel_pca(k)
    h = kpca.kernel_projections(q, k, axes, 3)
    dots = kpca.kernel(q, k) / (kpca.g(q, k) * kpca.g(k, k).mT)         # phi(q_i).phi(k_j)
    G = kpca.log_gram(k).exp()
    centred = dots - dots.mean(1, keepdim=True) - G.mean(0) + G.mean()  # phi~(q_i).phi~(k_j)
    moved = h - centred @ kpca.coefficients(axes, 3) * (axes.c / 2).exp()
    assert (moved - moved[0]).abs().max() < 1e-9 and moved[0].abs().max() > 1e-3


def test_one_changed_key_changes_all_features():
    q, k = draw(2, N, D)
    other = torch.cat([k[:-1], 2 * k[-1:]])

    def dot(keys):
        return kpca.kernel(q[:1], keys[:1]) / (kpca.g(q[:1], keys) * kpca.g(keys[:1], keys))

    assert not torch.allclose(dot(k), dot(other), rtol=1e-3)


def test_invertible_maps_of_values_change_no_measure():
    q, k, v = draw(3, N, D)
    R, W = draw(2, D, D, seed=1)                                # R is not a rotation
    h, turned = softmax_attention(q, k, v), softmax_attention(q, k, v @ R)
    assert torch.allclose(h @ W, turned @ (torch.linalg.inv(R) @ W), atol=1e-9)
    axes = kpca.kernel_pca(k)
    cosines = [kpca.eigen_cosine(axes, ritz(axes, kpca.a_hat(x, axes.log_g)))
               for x in (v, v @ R)]
    assert torch.allclose(*cosines, atol=1e-6)


def test_thresholds_scale_with_keys_as_stated():
    k = draw(1, 2, N, D)
    mean = k.abs().mean((2, 3), keepdim=True)
    assert torch.allclose(4 * penalty(k), 2 / mean)                         # lambda 4, two heads
    assert torch.allclose(4 * penalty(2 * k), penalty(k) * 4 / 2)
    assert torch.allclose(4 / penalty(k, mu_dim="head"), 16 * mean)


def test_algorithm_2_as_printed_misses_L():
    low = draw(60, 2) @ draw(2, 40, seed=1)
    M = low + torch.where(draw(60, 40, seed=2) > 1.645, 8.0, 0.0)
    lambd, mu = 60 ** -0.5, M.numel() / (4 * M.abs().sum())

    def run(threshold, sign, S_first):
        L = S = Y = torch.zeros_like(M)
        for _ in range(100):
            if S_first:
                S = kpca.soft_threshold(M - L + Y / mu, lambd / mu)
            U, sigma, Vt = torch.linalg.svd(M - S + sign * Y / mu, full_matrices=False)
            L = (U * kpca.soft_threshold(sigma, threshold)) @ Vt
            if not S_first:
                S = kpca.soft_threshold(M - L + Y / mu, lambd / mu)
            Y = Y + mu * (M - L - S)
        return (M - L - S).norm() / M.norm(), (L - low).norm() / low.norm()

    for S_first in (True, False):
        left, wrong = run(1 / mu, +1, S_first)                  # ADMM's rule, in either order
        assert left < 1e-7 and wrong < 1e-6
        assert run(mu, +1, S_first)[1] > 0.1                    # a wrong threshold: another L
    assert not run(mu, -1, True)[0] < 1e8                       # as printed
    assert run(mu, -1, False)[1] > 0.1


def test_projection_errors_are_positive_but_J_varies():
    q, k, v = draw(3, N, D)
    theory = kpca.theoretical_values(kpca.kernel_pca(k), N - 1)
    assert kpca.projection_error(q, k, kpca.attend(q, k, theory)) >= 0
    losses = [kpca.projection_error(q, k, kpca.attend(q, k, size * v)) for size in (1, 10, 100)]
    assert losses[0] > losses[1] > losses[2] and losses[2] < 0
