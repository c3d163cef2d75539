"""referee/stats.py: intervals hold the truth as often as they say; Holm, t and power by hand."""

import numpy as np
import pytest

from referee import stats


@pytest.mark.parametrize("spreads", [(2, 0, 5), (2, 20, 30), (1, 22, 30), (0.4, 30, 30)])
def test_the_interval_over_seeds_and_images_holds_the_truth_in_95_of_100_studies(spreads):
    rng, held = np.random.default_rng(0), 0
    for _ in range(1500):
        seed, image = rng.standard_normal((5, 1)), rng.standard_normal(500)
        rest = rng.standard_normal((5, 500))
        d = stats.crossed(spreads[0] * seed + spreads[1] * image + spreads[2] * rest)
        held += d.low <= 0 <= d.high
    assert 0.93 <= held / 1500 <= 0.97


def test_with_three_seeds_a_small_variance_of_theirs_is_not_taken_for_certainty():
    held, missed, many = stats.simulate(3, (2, 20, 30), floor=False, trials=600)
    assert missed > 0.12 and many > 0.1
    held, missed, many = stats.simulate(3, (2, 20, 30), trials=600)
    assert 0.92 <= held <= 0.97 and many < 0.02
    two = stats.crossed(np.random.default_rng(0).standard_normal((2, 50)))
    assert np.isnan(two.p) and two.low < two.mean < two.high


def test_without_images_that_differ_the_interval_is_that_of_the_paired_t_test():
    seeds = np.array([1.0, 2.0, 4.0])
    d = stats.crossed(np.repeat(seeds[:, None], 50, 1))
    assert d[:7] == pytest.approx(stats.paired_t(seeds)[:7])


def test_the_paired_t_test_is_that_of_the_tables():
    d = stats.paired_t([1, 2, 3, 4, 5])                     # mean 3, sd 1.5811, error .70711
    assert (d.n, d.mean, d.error, d.df) == (5, 3, pytest.approx(0.707107, abs=1e-6), 4)
    assert d.high - d.mean == pytest.approx(2.776445 * 0.707107, abs=1e-5)     # t of 4 at 97.5 %
    assert d.p == pytest.approx(0.01324, abs=1e-5)                             # t = 4.2426
    half = 2.131847 * 0.707107                                                 # t of 4 at 95 %
    assert stats.interval(d, 0.9) == pytest.approx((3 - half, 3 + half), abs=1e-5)
    assert stats.paired_t([2.0]).n == 1 and np.isnan(stats.paired_t([2.0]).low)
    same = stats.paired_t([2.0, 2.0, 2.0])
    assert (same.low, same.high, same.p) == (2, 2, 0) and stats.paired_t([0.0, 0.0]).p == 1


def test_holm_multiplies_the_smallest_p_by_all_the_next_by_one_less_and_never_falls():
    found = stats.holm(dict(a=0.01, b=0.04, c=0.03, d=0.5, none=np.nan))
    assert found == pytest.approx(dict(a=0.04, c=0.09, b=0.09, d=0.5, none=np.nan), nan_ok=True)


@pytest.mark.parametrize("n, sds", [(5, 1.68), (3, 3.26)])
def test_a_difference_of_this_many_standard_deviations_is_found_with_80_per_cent(n, sds):
    assert stats.detectable(1 / np.sqrt(n), n - 1) == pytest.approx(sds, abs=0.01)


def test_power_is_that_of_the_first_step_of_holms_correction():
    assert stats.detectable(1, 10, tests=4) > stats.detectable(1, 10)


def test_arms_are_paired_by_seed_and_refused_on_other_images():
    first, second = {0: np.ones(4), 1: np.ones(4)}, {1: np.zeros(4), 2: np.zeros(4)}
    assert stats.pairs(first, second).shape == (1, 4)
    with pytest.raises(ValueError, match="a and b: measured on 3 and 4 images"):
        stats.pairs(first, {1: np.zeros(3)}, "a and b")
    with pytest.raises(ValueError, match="no seed in common"):
        stats.pairs(first, {7: np.zeros(4)})
    assert stats.missing([("a", 0), ("a", 1), ("b", 1)]) == [("b", 0)]


def test_differences_in_words():
    assert stats.show(stats.paired_t([1.0, 2.0, 3.0]), bold=True) == "**+2.0 (-0.5 to +4.5)**"
    assert stats.show(stats.paired_t([0.0123]), 3) == "+0.012"
    assert [stats.show_p(p) for p in (0.0004, 0.0312, np.nan, 1)] == ["< .001", ".031", "", "1.000"]
    assert stats.spread([1, 2, 3]) == "2.0 ± 1.0" and stats.spread([]) == ""
