"""Test studies/plot.py: the figures show the numbers of the rows."""

import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure  # noqa: E402

from studies import arms, line, plot, stats  # noqa: E402
from test_stats import row  # noqa: E402


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
