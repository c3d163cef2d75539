"""Test studies/plot.py: the figures show the numbers of the rows."""

import numpy as np
import pytest

pytest.importorskip("matplotlib")

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


def test_networks_trained_with_lambda_keep_their_entropy(monkeypatch):
    networks = [line.Network(arm, 21, 0.5, {"clean": top1}) for arm, top1 in (
        ("uniform-l0", 90.0), ("rpc4-l1", 80.0), ("paper-inf-n4", 82.0), ("symmetric-e8", 95.0))]
    monkeypatch.setattr(line, "stored", lambda name: networks)
    training = [dict(run="rpc4-l1_s21", entropy=2.5), dict(run="uniform-l0_s21", loss=0.5)]
    monkeypatch.setattr(plot.common, "read_log", lambda path: training)
    found = list(plot.trained_with_lambda())
    assert [(row["form"], row["lambd"], row["top1"]) for row in found] == [
        ("paper", 0, 90), ("released", 4, 80), ("paper", float("inf"), 82)]
    assert [row["entropy"] for row in found] == pytest.approx([np.nan, 2.5, np.nan], nan_ok=True)


def test_every_stored_figure_is_drawn(tmp_path):
    plot.main([str(tmp_path)])
    drawn = {str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*.png")}
    shown = {str(path.relative_to(arms.RESULTS)) for path in arms.RESULTS.glob("*/*.png")}
    assert drawn == shown
