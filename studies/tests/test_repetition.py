"""Test the scores of tokens, the corruptions, and the tests of studies.repetition."""

import numpy as np
import pytest
import torch

from kpca import pcp
from studies import repetition, scores
from studies.scores import FOUR, MAHALANOBIS, ONE, PAP


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


def test_outlier_pursuit_finds_planted_outliers():
    K = low_rank(65)
    K[..., [3, 20, 41], :] = 5 * torch.randn(3, 32).double()
    S, _ = scores.outlier_pursuit(K, scores.pursuit_weight(3), tol=1e-7)
    found = scores.row_sums(S)[0].topk(3).indices
    assert sorted(found.tolist()) == [3, 20, 41]


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


def test_same_places_in_every_kind():
    images = torch.rand(3, 3, 32, 32)
    places = [repetition.corrupt(images, kind, 6, 4)[1] for kind in repetition.KINDS]
    assert all(torch.equal(hit, places[0]) for hit in places)
    assert places[0].sum(1).tolist() == [6, 6, 6]


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


def test_quick_scores_have_one_number_per_token(keys):
    found = repetition.quick_scores(keys, keys)
    assert {ONE, FOUR, MAHALANOBIS, PAP} < found.keys()
    assert all(score.shape == (2, 65) for score in found.values())
