"""Test studies/stats.py and plot.py: coverage of intervals, differences of rows, figures."""

import base64

import numpy as np
import pytest
from matplotlib.figure import Figure

from common import InputError
from robust import corruptions
from studies import arms, plot, stats


def row(name, right, measure="clean", **setting):
    """Return a row of the evaluator. right: (n,) bool, or one such list per severity."""
    lists = right if isinstance(right[0], (list, np.ndarray)) else [right]
    packed = [base64.b64encode(np.packbits(np.array(of, bool))).decode() for of in lists]
    return dict(checkpoint=f"out/{name}", name=measure, settings=setting, seed=1,
                precision="float32", images=len(lists[0]), data="shapes", model_config={},
                top1=[100 * np.mean(of) for of in lists], hardware="cpu, AMD EPYC, 1 threads",
                right=packed if len(lists) > 1 else packed[0])


def rows(*lines):
    return [stats.row_of(line) for line in lines]


@pytest.mark.parametrize("spreads", [(2, 0, 3), (1, 14, 19)])
def test_crossed_interval_covers_the_truth(spreads):
    rng, held = np.random.default_rng(0), 0
    for _ in range(1500):
        seed, image = rng.standard_normal((5, 1)), rng.standard_normal(200)
        rest = rng.standard_normal((5, 200))
        d = stats.crossed(spreads[0] * seed + spreads[1] * image + spreads[2] * rest)
        held += d.low <= 0 <= d.high
    assert 0.93 <= held / 1500 <= 0.97


def test_paired_t_equals_printed_tables():
    d = stats.paired_t([1, 2, 3, 4, 5])                     # mean 3, sd 1.5811, error .70711
    assert (d.n, d.mean, d.error, d.df) == (5, 3, pytest.approx(0.707107, abs=1e-6), 4)
    assert d.high - d.mean == pytest.approx(2.776445 * 0.707107, abs=1e-5)     # t(4) at 97.5 %
    assert d.p == pytest.approx(0.01324, abs=1e-5)                             # t = 4.2426
    half = 2.131847 * 0.707107                                                 # t(4) at 95 %
    assert stats.interval(d, 0.9) == pytest.approx((3 - half, 3 + half), abs=1e-5)
    assert stats.paired_t([2.0]).n == 1 and np.isnan(stats.paired_t([2.0]).low)
    same = stats.paired_t([2.0, 2.0, 2.0])
    assert (same.low, same.high, same.p) == (2, 2, 0) and stats.paired_t([0.0, 0.0]).p == 1


def test_holm_correction_equals_a_worked_example():
    found = stats.holm(dict(a=0.01, b=0.04, c=0.03, d=0.5, none=np.nan))
    assert found == pytest.approx(dict(a=0.04, c=0.09, b=0.09, d=0.5, none=np.nan), nan_ok=True)


@pytest.mark.parametrize("a, b, p, said", [
    (-3, 0.1, dict(x=0.01, y=0.9), "below"), (3, 0.1, dict(x=0.01, y=0.9), "above"),
    (-3, 3, dict(x=0.01, y=0.01), "open"), (-0.1, 0.1, dict(x=0.9, y=0.9), "equal"),
    (-1.9, 0.1, dict(x=0.3, y=0.9), "open")])
def test_pairs_are_judged_by_margins(a, b, p, said):
    gaps = {m: stats.student(5, mean, 0.25, 4) for m, mean in (("x", a), ("y", b))}
    assert stats.judged(gaps, p, dict(x=2, y=2), 0.9) == said
    two = {m: d._replace(n=2) for m, d in gaps.items()}
    assert stats.judged(two, p, dict(x=2, y=2)) == stats.judged({}, {}, dict(x=2)) == "open"


def test_corruption_families_are_means_over_types():
    lines = [row("admm_s0", [[j < i for j in range(15)], [True] * 15], "corruptions", type=name)
             for i, name in enumerate(corruptions.NAMES)]       # i of 15 are right, then all
    found = stats.outcomes(rows(*lines), 15)
    means = {name: 15 * of["admm", 0].mean() / 100 for name, of in found.items()}
    half = {"15 corruptions": 7, "noise": 1, "blur": 4.5, "weather": 8.5, "digital": 12.5}
    assert means == pytest.approx({name: (x + 15) / 2 for name, x in half.items()})
    assert "noise" not in stats.outcomes(rows(*lines[1:]), 15)                  # two types of three


def test_conflicting_rows_are_an_error():
    lines = [row("a_s0", [True, False], "pgd", eps=2 / 255, steps=20)]
    assert list(stats.outcomes(rows(*lines), 2)) == ["pgd 2/255"]
    assert list(stats.outcomes(rows(*lines), 3)) == ["pgd 2/255, 2 images"]
    longer = row("a_s1", [True, False], "pgd", eps=2 / 255, steps=100)
    for other, words in ((lines[0], "two rows of pgd 2/255"), (longer, "two settings.*100")):
        with pytest.raises(InputError, match=words):
            stats.outcomes(rows(*lines, other), 2)


def curve(accuracies, n=1000):
    """Return {eps: (n,) in percent}. A wrong image stays wrong at larger budgets."""
    return {eps: 100.0 * (np.arange(n) < round(n * a)) for eps, a in accuracies.items()}


def test_median_budget_is_where_half_are_right():
    of = curve({0: 0.98, 1: 0.9, 2: 0.7, 4: 0.45, 6: 0.1, 8: 0, 12: 0})
    assert stats.median_budget(of).mean() == pytest.approx(2 + (0.7 - 0.5) / (0.7 - 0.45) * 2)
    assert stats.median_budget(of)[0] > stats.median_budget(of)[-1]      # image 0 is right longest
    assert (stats.median_budget({0: of[0], 1: of[1]}) == 1).all()           # always above half
    assert (stats.median_budget({0: of[8], 1: of[8]}) == 0).all()           # always below half


def made_up(gaps):
    """Return {measure: {(arm, seed): (images,)}}. gaps: {arm: points above "base", per seed}."""
    images = 50 * (np.random.default_rng(0).random(50) < 0.5)
    found = {m: {("base", s): images for s in range(5)} for m in "abc"}
    for m, of in found.items():
        of |= {(arm, s): images + x for arm, xs in gaps.items() for s, x in enumerate(xs)}
    return found


def test_only_corrected_primary_differences_are_bold():
    found = made_up(dict(sure=(10, 11, 12, 11, 10), unsure=(2, 11, 9, 14, 5)))
    of = stats.compare(found, [("sure", "base"), ("unsure", "base")], ("a", "b"))
    assert of.tests == 4 and set(of.p) == {(m, arm, "base") for m in "ab"
                                           for arm in ("sure", "unsure")}
    key = "a", "unsure", "base"
    assert of.p[key] == pytest.approx(2 * of.gaps[key].p)                   # 0.023 uncorrected
    text = stats.primary_table(of)
    assert text.count("**+10.8") == 2 and text.count("**+8.2") == 2 and "| c " not in text
    assert "**" not in stats.full_table(of) and "| c " in stats.full_table(of)


def test_only_shared_seeds_are_paired():
    found = {"a": {("base", 0): np.zeros(4), ("base", 1): np.ones(4), ("arm", 1): np.ones(4),
                   ("arm", 2): np.ones(4)}}
    of = stats.compare(found, [("arm", "base")], ("a",))
    d = of.gaps["a", "arm", "base"]
    assert (d.n, d.mean) == (1, 0) and np.isnan(d.low) and not of.p
    assert "| +0.0 " in stats.primary_table(of)
    found["a"]["base", 2] = np.ones(3)
    with pytest.raises(InputError, match="measured on 3 and 4 images"):
        stats.compare(found, [("arm", "base")], ("a",))


# --- studies/plot.py ------------------------------------------------------------------------------



def test_budget_curves_are_means_over_seeds(monkeypatch):
    shown = []
    monkeypatch.setattr(plot, "save_figure", lambda figure, *more: shown.append(figure))
    lines = [row(f"{arm}_s{seed}", [True] * right + [False] * (10 - right),
                 "pgd" if eps else "clean", **(dict(eps=eps / 255) if eps else {}))
             for arm in ("symmetric", "rpc4-l1", "rpc4-l1-fast") for seed in (0, 1)
             for eps, right in ((0, 9 - seed), (1, 6 - 2 * seed), (2, 3 - seed))]
    plot.budget_figure({"x": [stats.row_of(line) for line in lines]}, "",
                       ("symmetric", "rpc4-l1"), "")
    curves = {line.get_label(): list(line.get_ydata()) for line in shown[0].axes[0].lines}
    assert curves["symmetric attention"] == curves["RPC, as published"] == [85, 50, 25]
    assert len(curves) == 3                                 # two arms and the line at one half


def test_every_stored_figure_is_drawn(tmp_path, monkeypatch):
    drawn = set()
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **how: drawn.add(path))
    plot.main([str(tmp_path)])
    shown = {path.relative_to(arms.RESULTS) for path in arms.RESULTS.glob("*/*.png")}
    assert {path.relative_to(tmp_path) for path in drawn if path.suffix == ".png"} == shown
