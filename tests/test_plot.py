"""Test plot.py: curves of logs and of evaluation results."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure  # noqa: E402

import common  # noqa: E402
import plot  # noqa: E402
import results  # noqa: E402

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
    assert {panel for panel, _ in curves} == {"loss", "top1", "share of nonzero S"}
    assert curves["loss", "training"] == [(2, 2.0), (4, 1.0)]
    assert curves["loss", "evaluation"] == [(2, 1.5), (4, 0.5)]
    assert curves["share of nonzero S", "layer 0, step 2"] == [(2, 0.25)]


def test_a_curve_has_one_network_and_steps():
    more = [row | dict(settings=row["settings"] | dict(steps=9)) for row in RESULTS[1:3]]
    curves = plot.budget_curves(RESULTS + more)
    curves = {title: panel for (title, unit), panel in curves.items() if "1/255 of the pixel" in unit}
    assert curves.keys() == {"pgd steps=2", "pgd steps=9"}
    first, second = (curve for _, curve in curves["pgd steps=2"])
    assert first == [(0, 90.0), (pytest.approx(2), 40.0), (pytest.approx(4), 20.0)]
    assert second[0] == (0, 80.0) and len(second) == 3 and len(curves["pgd steps=9"]) == 1


def test_equal_labels_show_what_differs():
    panel = plot.budget_curves(RESULTS)[("pgd steps=2", "eps in 1/255 of the pixel range")]
    assert [label for label, _ in panel] == [
        "a, seed 0, out/a, 40 images, weights 1f", "a, seed 0, out/a, 40 images, weights 2f"]


def test_a_curve_begins_with_its_own_images():
    """The clean row has more images: only the prefix counts."""
    right = torch.tensor([True, True, False, False, False, False, False, True])
    clean = RESULTS[0] | dict(images=8, right=results.pack(right), top1=37.5)
    pgd = RESULTS[1] | dict(images=4)
    for rows, start in (([clean, pgd], [(0, 50.0)]), ([clean | dict(images=3), pgd], []),
                        ([pgd], []), ([clean, pgd, pgd], [(0, 50.0)])):
        panel, = plot.budget_curves(rows).values()
        (_, points), = panel
        assert points == [*start, (pytest.approx(2), 40.0)]


@pytest.mark.parametrize("name, conditions, starts", [
    ("square", "paper", False), ("adaptive_autoattack", "paper", False),
    ("square", None, True), ("pgd", "paper", True)])
def test_clipped_normalised_images_have_no_clean_point(name, conditions, starts):
    settings = dict(queries=9, eps=2 / 255)
    if conditions:
        settings["conditions"] = conditions
    square = RESULTS[1] | dict(name=name, settings=settings)
    panel, = plot.budget_curves([RESULTS[0], square]).values()
    (_, points), = panel
    assert [eps for eps, _ in points] == [0] * starts + [pytest.approx(2)]


def test_panels_have_one_unit():
    """Budgets of normalised pixels have another panel; noise and sld have no curve."""
    paper = RESULTS[1] | dict(settings=dict(steps=2, eps=2 / 255, conditions="paper"))
    sld = RESULTS[1] | dict(name="sld", settings=dict(eps=10.0))
    noise = RESULTS[1] | dict(name="noise", settings=dict(eps=0.068))
    units = {unit: panel for (_, unit), panel in
             plot.budget_curves([RESULTS[1], paper, sld, noise]).items()}
    assert len(units) == 2 and sum(map(len, units.values())) == 2


def legends(monkeypatch, *words):
    """Run plot.py; return the texts of all legends."""
    texts = []
    savefig = Figure.savefig

    def spy(figure, path):
        for ax in figure.axes:
            texts.append([text.get_text() for text in ax.get_legend().get_texts()])
        savefig(figure, path)

    monkeypatch.setattr(Figure, "savefig", spy)
    monkeypatch.setattr("sys.argv", ["plot.py", *words])
    plot.main()
    return texts


def test_legends_name_every_curve(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("_old", "cost $1$"):
        write(Path(folder, "log.jsonl"), LOG[:1])
        write(Path(folder, "robust/results.jsonl"), [row | dict(checkpoint=folder)
                                                     for row in RESULTS[:4]])
    curves, budgets = legends(monkeypatch, "_old", "cost $1$", "_old")
    assert curves == ["_old, training", r"cost \$1\$, training"]
    assert [text.split(", ")[2] for text in budgets] == ["_old", r"cost \$1\$"]


def test_folders_without_rows_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(Path("good/log.jsonl"), LOG)
    write(Path("new/log.jsonl"), [dict(step=0, args={})])
    for folder in ("typo", "new"):
        with pytest.raises(common.InputError, match=f"{folder}: no rows to draw"):
            legends(monkeypatch, "good", folder)


def test_rows_of_eval_only_do_not_stop_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(Path("run/log.jsonl"), LOG)
    write(Path("run/results.jsonl"), [dict(model="rpc, seed 0", weights="w", name="clean",
                                           settings={}, images=8, mean_iou=50.0)])
    assert len(legends(monkeypatch, "run")) == 3 and not Path("run/budgets.png").exists()


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
