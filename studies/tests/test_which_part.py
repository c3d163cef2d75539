"""Test studies/which_part.py (PAP, robust PCA and loops between), left_out.py, repetition.py."""

import math

import numpy as np
import pytest
import torch

from attention import rpc_attention
from kpca import pcp
from studies import left_out, probe, repetition, scores, which_part
from studies.scores import ONE, VARIATION
from studies.which_part import LOOPS, ROBUST_PCA


def keys_and_values():
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
    k, v = keys_and_values()
    S = which_part.pursuit(loop, 2 * k, v, 3)[0][-1]
    expected = plain_loop(loop, 2 * k[1, 0].numpy(), v[1, 0].numpy(), 2, 3)
    assert np.allclose(S[1, 0], expected, atol=1e-10)


def test_two_loops_are_pap_and_robust_pca():
    k, v = keys_and_values()
    steps = []
    rpc_attention(k, v, trace=steps)
    for ours, step in zip(zip(*which_part.pursuit(which_part.PAP, k, v)), steps, strict=True):
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
    k, _ = keys_and_values()
    hit = torch.zeros(3, 9, dtype=torch.bool)
    hit[:, :2] = True
    changed = which_part.resized(k, hit, 1.4)
    sizes = which_part.size(changed)
    assert torch.allclose(sizes[:, :2].mean(1), 1.4 * sizes[:, 2:].mean(1))
    assert torch.equal(changed[:, :, 0], k[:, :, 0]) and torch.equal(changed[:, :, 3:], k[:, :, 3:])


# --- studies/left_out.py --------------------------------------------------------------------------

@pytest.fixture(scope="module")
def model():
    return probe.load_model("weights/shapes_symmetric.pt")[0]


@pytest.fixture(scope="module")
def scenes():
    checkpoint = dict(args=dict(data="shapes"))
    return left_out.load_images(checkpoint, "test", 6, None)


def logits_without(model, images, out):
    with torch.no_grad(), left_out.conditioned(model, left_out.LEFT_OUT, out, out):
        return model(images)


def test_leaving_out_nothing_changes_nothing(model, scenes):
    images, _ = scenes
    nothing = torch.zeros(len(images), 64, dtype=torch.bool)
    torch.testing.assert_close(logits_without(model, images, nothing), model(images),
                               rtol=1e-4, atol=1e-4)


def test_left_out_patches_do_not_matter(model, scenes):
    images, labels = scenes
    noisy, hit = left_out.corrupted(model, images, labels, "noise")
    torch.testing.assert_close(logits_without(model, noisy, hit),
                               logits_without(model, images, hit), rtol=1e-4, atol=1e-4)
    assert (model(noisy) - model(images)).abs().max() > 0.01


def test_paste_changes_only_its_patches(scenes):
    images, _ = scenes
    x, hit = left_out.paste(images, 4)
    where = left_out.patches_to_pixels(hit, 8, 4).expand_as(x)
    assert torch.equal(x[~where], images[~where])
    assert set(hit.sum(1).tolist()) <= {4, 6, 7, 8}             # two blocks, which may overlap
    other = images.roll(len(images) // 2, 0)
    share = (x - images).abs().sum() / (other - images).abs()[where].sum()
    assert 0.3 < share < 0.95                                    # edges are mixtures


def test_windows_agree_with_a_loop():
    score = torch.rand(1, 16)
    grid = score.view(4, 4)
    expected = torch.zeros(4, 4)
    for i in range(3):
        for j in range(3):
            mean = grid[i:i + 2, j:j + 2].mean()
            expected[i:i + 2, j:j + 2] = expected[i:i + 2, j:j + 2].maximum(mean)
    torch.testing.assert_close(left_out.over_windows(score), expected.view(1, 16))


def test_thresholds_mark_the_stated_shares():
    torch.manual_seed(0)
    score = torch.rand(500, 64)
    limits = left_out.thresholds({ONE: score})
    first, second = (limits[ONE, rule, False] for rule in left_out.RULES)
    assert (score > first).double().mean() == pytest.approx(0.01, abs=1e-3)
    assert (score.amax(1) > second).double().mean() == pytest.approx(0.2, abs=0.01)


def test_gradient_reaches_pixels_through_robust_pca(model, scenes):
    images, labels = scenes
    model = model.double()
    try:
        x = images[:1].double().requires_grad_()
        hit = torch.ones(1, 64, dtype=torch.bool)
        at = model, ONE, 0.5

        def value(x):
            return left_out.objective(*at, x, labels[:1], hit, weight=1.0).sum()

        gradient, = torch.autograd.grad(value(x), x)
        torch.manual_seed(0)
        direction = torch.randn_like(x)
        with torch.no_grad():
            h = 1e-6
            slope = (value(x + h * direction) - value(x - h * direction)) / (2 * h)
        torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-3, atol=1e-4)
    finally:
        model.float()


def test_attack_step_stays_in_the_block():
    x = torch.full((1, 3, 8, 8), 0.5, requires_grad=True)
    where = torch.zeros(1, 1, 8, 8, dtype=torch.bool)
    where[..., :4, :4] = True
    moved = left_out.attack_step(-x.sum(), x, where, 0.2)
    assert torch.equal(moved[..., :4, :4], torch.full((1, 3, 4, 4), 0.3))
    assert (moved == 0.5).sum() == 3 * (64 - 16)


def test_survivors_only_become_fewer(model, scenes):
    images, labels = scenes
    found = left_out.survivors(model, VARIATION, 0.3, images, labels, steps=20, weights=(1, 3))
    first, second = found.values()
    assert not (second & ~first).any()
    assert first.sum() < len(images)


# --- studies/repetition.py and scores.py ----------------------------------------------------------

@pytest.fixture
def keys():
    torch.manual_seed(0)
    return torch.randn(2, 2, 65, 32, dtype=torch.float64)


def low_rank(rows, rank=2, channels=32):
    """Return (1, 1, rows, channels) of this rank."""
    torch.manual_seed(1)
    parts = torch.randn(rows, rank).double(), torch.randn(rank, channels).double()
    return (parts[0] @ parts[1])[None, None]


def test_outlier_pursuit_meets_its_optimality_conditions(keys):
    lambd = 0.5
    S, L = scores.outlier_pursuit(keys, lambd, tol=1e-9)
    torch.testing.assert_close(L + S, keys - keys.mean(-2, keepdim=True))
    size = S.norm(dim=-1, keepdim=True)
    assert (size > 1e-3).all()                  # so the subgradient of the second norm is unique
    Y = lambd * S / size
    nuclear = torch.linalg.svdvals(L).sum(-1)
    assert (nuclear > 1).all()
    # Y is a subgradient of the nuclear norm at L, too: |Y|_2 <= 1 and <Y, L> = |L|_*
    assert (torch.linalg.matrix_norm(Y, 2) <= 1 + 1e-6).all()
    torch.testing.assert_close((Y * L).sum((-1, -2)), nuclear, rtol=1e-6, atol=0)


def test_pursuit_weight_is_the_published_one():
    assert scores.pursuit_weight(1) == pytest.approx(3 / 7)
    assert scores.pursuit_weight(9) == pytest.approx(1 / 7)


def test_equal_rows_belong_to_the_low_rank_part():
    equal, different = low_rank(65), low_rank(65)
    torch.manual_seed(2)
    equal[..., :12, :] = torch.randn(32).double()
    different[..., :12, :] = torch.randn(12, 32).double()
    for S in (lambda K: pcp(K[0, 0] - K[0, 0].mean(0))[1], lambda K: scores.robust_pca(K, 4)[0, 0]):
        assert S(equal)[:12].norm() < 0.15 * S(different)[:12].norm()


def test_mahalanobis_agrees_with_numpy(keys):
    expected = np.zeros((2, 65))
    for b in range(2):
        for h in range(2):
            K = keys[b, h].numpy()
            covariance = np.cov(K.T, bias=True)
            covariance += 0.01 * np.trace(covariance) / 32 * np.eye(32)
            from_mean = K - K.mean(0)
            expected[b] += (from_mean @ np.linalg.inv(covariance) * from_mean).sum(1)
    np.testing.assert_allclose(scores.mahalanobis(keys), expected)


def test_total_variation_agrees_with_a_loop():
    images = torch.rand(2, 3, 8, 8)
    found = scores.total_variation(images, 4)
    for p in range(4):
        tile = images[1, :, 4 * (p // 2):4 * (p // 2) + 4, 4 * (p % 2):4 * (p % 2) + 4]
        down = (tile[:, 1:] - tile[:, :-1]).abs().mean()
        right = (tile[:, :, 1:] - tile[:, :, :-1]).abs().mean()
        torch.testing.assert_close(found[1, p], down + right)


@pytest.mark.parametrize("kind, rank", [("fresh noise", 6), ("same noise", 1), ("own colour", 3),
                                        ("one colour", 1), ("mixed noise", 3), ("white", 1)])
def test_corrupted_patches_have_the_stated_rank(kind, rank):
    x, hit = repetition.corrupt(torch.rand(1, 3, 32, 32), kind, 6, 4)
    tiles = x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(64, 48)
    rows = tiles[hit[0]].double()
    assert torch.linalg.matrix_rank(rows, rtol=1e-5) == rank
    flat = rows.view(6, 3, 16)
    assert ((flat - flat[..., :1]).abs().max() < 1e-6) == (kind in ("own colour", "one colour",
                                                                   "white"))


def test_texts_have_n_corrupted_words():
    ids = torch.arange(4 * 64).view(4, 64)
    words = torch.arange(1000, 1100)
    for kind in repetition.TEXT_KINDS:
        new, hit = repetition.corrupt_texts(ids, kind, 6, words, 5000)
        assert hit.sum(1).tolist() == [6] * 4
        assert not hit[:, [0, -1]].any()
        assert torch.equal(new != ids, hit)
        distinct = [len(set(row[h].tolist())) for row, h in zip(new, hit)]
        assert (max(distinct) == 1) == (kind in ("one word", "AAA"))
