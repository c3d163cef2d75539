"""Test plot.py: curves of logs and of evaluation results."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure  # noqa: E402

import plot  # noqa: E402
from fixtures import ROOT  # noqa: E402
from runs import call  # noqa: E402

LOG = [dict(step=2, loss=2.0, grad_norm=1.0, images_per_s=100.0, epoch=1.0, lr=0.1),
       dict(step=2, eval=dict(top1=30.0, loss=1.5, images=50), nonzero_S={"0": [0.5, 0.25]}),
       dict(step=4, loss=1.0, images_per_s=200.0, lr=0.1),
       dict(step=4, eval=dict(top1=60.0, loss=0.5, images=50))]


def attack(network, eps, top1, measure="pgd steps=2"):
    return dict(network=network, name="pgd", measure=f"{measure} eps={eps}", eps=eps, images=4,
                top1=top1)


CLEAN = dict(name="clean", measure="clean", eps="", images=8, top1=37.5, right=["11000001"])
RESULTS = [CLEAN | dict(network="a"), attack("a", "2/255", 40.0), attack("b", "2/255", 50.0),
           attack("a", "4/255", 20.0), attack("a", "0.1", 9.0, "pgd steps=9"),
           dict(network="a", name="fog", measure="corruptions type=fog", eps="", top1=80.0),
           dict(network="s", name="clean", measure="clean", images=8, mean_iou=50.0),
           dict(network="a", name="noise", measure="noise eps=0.068", top1=70.0)]


def write(path, rows):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 5, "lo')   # killed


def test_curves_have_the_numbers_of_the_rows():
    curves = plot.training_curves(LOG)
    assert {panel for panel, _ in curves} == {"loss", "top1", "share of nonzero S"}
    assert curves["loss", "training"] == [(2, 2.0), (4, 1.0)]
    assert curves["loss", "evaluation"] == [(2, 1.5), (4, 0.5)]
    assert curves["share of nonzero S", "layer 0, step 2"] == [(2, 0.25)]


def test_budget_curves_begin_with_their_own_images():
    """The clean row has more images: only the first ones count. Network b has no clean row."""
    panels = plot.budget_curves(RESULTS)
    assert panels.keys() == {"pgd steps=2", "pgd steps=9"}
    assert panels["pgd steps=2"] == {
        "a": [(0, 50.0), (pytest.approx(2), 40.0), (pytest.approx(4), 20.0)],
        "b": [(pytest.approx(2), 50.0)]}
    assert panels["pgd steps=9"] == {"a": [(0, 50.0), (pytest.approx(25.5), 9.0)]}


def legends(monkeypatch, *words):
    """Run plot.py; return the texts of all legends."""
    texts, savefig = [], Figure.savefig

    def spy(figure, path):
        savefig(figure, path)
        texts.extend([text.get_text() for text in ax.get_legend().get_texts()]
                     for ax in figure.axes)

    monkeypatch.setattr(Figure, "savefig", spy)
    call(plot.main, words)
    return texts


def test_legends_name_every_curve(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folders = ["_old", "cost $1$"]
    for folder in folders:
        write(Path(folder, "log.jsonl"), LOG[:1])
        write(Path(folder, "results.jsonl"), [row | dict(network=folder) for row in RESULTS[:2]])
    assert legends(monkeypatch, *folders, "_old") == [
        ["_old, training", r"cost \$1\$, training"], ["_old", r"cost \$1\$"]]
    assert capsys.readouterr().out == "_old/curves.png\n_old/budgets.png\n"
    for name in ("curves.png", "budgets.png"):
        assert Path("_old", name).stat().st_size > 5000


def test_folders_without_rows_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("good/log.jsonl", LOG)
    write("new/log.jsonl", [dict(step=0, args={})])
    for folder in ("typo", "new"):
        with pytest.raises(SystemExit, match=f"error: {folder}: no rows to draw"):
            legends(monkeypatch, "good", folder)


def test_plotting_imports_no_torch():
    code = "import sys, plot; print('torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert printed.stdout == "False\n"
