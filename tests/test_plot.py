"""Test plot.py: curves of logs and of evaluation results."""

import json
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

import plot  # noqa: E402

LOG = [dict(step=2, loss=2.0, grad_norm=1.0, images_per_s=100.0, epoch=1.0, lr=0.1),
       dict(step=2, eval=dict(top1=30.0, loss=1.5, images=50), nonzero_S={"0": [0.5, 0.25]}),
       dict(step=4, loss=1.0, images_per_s=200.0, lr=0.1),
       dict(step=4, eval=dict(top1=60.0, loss=0.5, images=50))]
# Two networks with the same printed name and path, for example a run that was trained again.
RESULTS = [dict(model="a, seed 0", checkpoint="out/a", weights=weights, images=40, name=name,
                settings=settings, top1=top1)
           for weights, top1s in (("1f", (90.0, 40.0, 20.0, 80.0)),
                                  ("2f", (80.0, 50.0, 30.0, 70.0)))
           for (name, settings), top1 in zip((("clean", {}), ("pgd", dict(steps=2, eps=2 / 255)),
                                              ("pgd", dict(steps=2, eps=4 / 255)),
                                              ("corruptions", dict(type="fog"))), top1s)]


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_curves_have_the_numbers_of_the_rows():
    curves = plot.training_curves(LOG)
    assert curves.keys() == {"loss", "top1", "share of nonzero S"}
    assert curves["loss"] == {"training": [(2, 2.0), (4, 1.0)], "evaluation": [(2, 1.5), (4, 0.5)]}
    assert curves["share of nonzero S"]["layer 0, PAP step 2"] == [(2, 0.25)]


def test_a_curve_has_one_network_and_steps():
    more = [row | dict(settings=row["settings"] | dict(steps=9)) for row in RESULTS[1:3]]
    curves = plot.budget_curves(RESULTS + more)
    assert curves.keys() == {"pgd steps=2", "pgd steps=9"}
    first, second = (curve for _, curve in curves["pgd steps=2"].values())
    assert first == [(0, 90.0), (pytest.approx(2), 40.0), (pytest.approx(4), 20.0)]
    assert second[0] == (0, 80.0) and len(second) == 3 and len(curves["pgd steps=9"]) == 1


def test_both_figures_are_drawn(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)                     # short names in the legends
    monkeypatch.setattr("sys.argv", ["plot.py", "a", "b"])
    write(Path("a/log.jsonl"), LOG)
    write(Path("a/robust/results.jsonl"), RESULTS)
    write(Path("b/log.jsonl"), LOG[:2])
    plot.main()
    for name in ("curves.png", "budgets.png"):
        assert Path("a", name).stat().st_size > 5000
    assert "budgets.png" in capsys.readouterr().out
