"""studies/plot.py: what the figures show of rows, logs and networks."""

import json

import numpy as np
import pytest

pytest.importorskip("matplotlib")

import common  # noqa: E402
from studies import arms, line, plot, stats  # noqa: E402
from test_stats import row  # noqa: E402


def test_a_curve_is_the_mean_of_all_seeds_of_an_arm_from_its_clean_accuracy(monkeypatch):
    shown = []
    monkeypatch.setattr(plot, "save", lambda figure, path: shown.append(figure))
    lines = [row(f"{arm}_s{seed}", [True] * right + [False] * (10 - right),
                 "pgd" if eps else "clean", **(dict(eps=eps / 255) if eps else {}))
             for arm in ("symmetric", "rpc4-l1", "rpc4-l1-fast") for seed in (0, 1)
             for eps, right in ((0, 9 - seed), (1, 6 - 2 * seed), (2, 3 - seed))]
    plot.budgets({"x": [stats.row_of(line) for line in lines]}, "", ("symmetric", "rpc4-l1"))
    curves = {line.get_label(): list(line.get_ydata()) for line in shown[0].axes[0].lines}
    assert curves["symmetric attention"] == curves["RPC, as published"] == [85, 50, 25]
    assert len(curves) == 3                                 # and the line at one half


def test_a_log_is_drawn_as_loss_evaluations_nonzero_s_and_speed(tmp_path):
    rows = [dict(step=2, loss=2.0, grad_norm=1.0, images_per_s=100.0, epoch=1.0, lr=0.1),
            dict(step=2, eval=dict(top1=30.0, loss=1.5, images=50), nonzero_S={"0": [0.5, 0.25]}),
            dict(step=4, loss=1.0, images_per_s=200.0, lr=0.1),
            dict(step=4, eval=dict(top1=60.0, loss=0.5, images=50))]
    for name, some in (("a", rows), ("b", rows[:2]), ("c", [])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in some))
    curves = plot.log_curves(rows)
    assert curves.keys() == {"loss", "top1", "images a second", "share of nonzero S"}
    assert curves["loss"] == {"training": [(2, 2.0), (4, 1.0)], "evaluation": [(2, 1.5), (4, 0.5)]}
    assert curves["share of nonzero S"]["layer 0, PAP step 2"] == [(2, 0.25)]
    plot.main(["log", str(tmp_path / "a"), str(tmp_path / "b")])
    assert (tmp_path / "a" / "curves.png").stat().st_size > 5000
    with pytest.raises(common.InputError, match="c holds no log.jsonl"):
        plot.main(["log", str(tmp_path / "c")])


def test_a_figure_has_at_most_six_series_and_the_averaging_layer_is_never_red():
    networks = [*line.stored("fresh"), *line.other_recipes()]
    assert {plot.series(n.arm) for n in networks} == set(plot.SERIES) and len(plot.SERIES) <= 6
    red = plot.FAMILIES["rpc"]
    assert {plot.family(arm) for arm in ("uniform-l0", "long-uniform-l0", "uniform-l0-e12")} == {
        "average"} and plot.FAMILIES["average"] != red
    assert plot.family("long-rpc4-l1") == plot.family("paper-inf-n4") == "rpc"
    marks = [mark for _, mark in plot.FAMILIES.values()]
    assert len(set(marks)) == len(marks)


def test_a_network_that_was_trained_with_a_lambda_stands_there_with_its_entropy(monkeypatch):
    networks = [line.Network(arm, 21, 0.5, {"clean": top1}) for arm, top1 in (
        ("uniform-l0", 90.0), ("rpc4-l1", 80.0), ("paper-inf-n4", 82.0), ("symmetric-e8", 95.0))]
    monkeypatch.setattr(line, "stored", lambda name: networks)
    training = [dict(run="rpc4-l1_s21", entropy=2.5), dict(run="uniform-l0_s21", loss=0.5)]
    monkeypatch.setattr(plot.common, "read_log", lambda path: training)
    found = list(plot.with_lambda())
    assert [(row["form"], row["lambd"], row["top1"]) for row in found] == [
        ("paper", 0, 90), ("released", 4, 80), ("paper", float("inf"), 82)]
    assert [row["entropy"] for row in found] == pytest.approx([np.nan, 2.5, np.nan], nan_ok=True)


def test_every_figure_of_the_stored_rows_is_drawn(tmp_path):
    plot.main(["stored", str(tmp_path)])
    drawn = {str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*.png")}
    shown = {str(path.relative_to(arms.RESULTS)) for path in arms.RESULTS.glob("*/*.png")}
    assert drawn == shown
