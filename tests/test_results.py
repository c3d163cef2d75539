"""Tables of an evaluation (lines are measures, columns networks), and the curves of plot.py."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from scipy import stats

import common
import plot
import results
from robust.metrics import ALEXNET
from runs import call

# Table 4, SymViT: top-1 accuracy per corruption, mean over severities, in ImageNet-C's order
TABLE_4 = dict(zip(ALEXNET, (40.97, 38.83, 38.56, 35.47, 27.79, 40.47, 30.69, 38.27, 44.55,
                             42.72, 63.21, 50.25, 44.26, 39.36, 46.28)))
RPC = {0: 70.0, 1: 74.5, 2: 72.0}
SOFTMAX = {0: 69.0, 1: 75.5, 2: 68.25}


def row(network="rpc", name="clean", measure="", top1=50.0, images=4, **fields):
    return dict(network=network, name=name, measure=measure or name, top1=top1, top5=90.0,
                images=images, data="shapes", eps="", median_l2=0.5) | fields


def attack(right, measure="pgd steps=20", eps="2/255", **fields):
    return row(measure=f"{measure} eps={eps}", name=measure.split()[0], eps=eps, right=[right],
               images=len(right), top1=100 * right.count("1") / len(right), **fields)


def cells(table, line):
    """Return the cells of a line of a table."""
    found, = (text for text in table.splitlines() if text.startswith(f"| {line} "))
    return [cell.strip() for cell in found.split("|")[2:-1]]


# --- summaries ------------------------------------------------------------------------------------

def test_worst_case_is_taken_image_by_image():
    rows = [attack("1101"), attack("101", "apgd loss=ce")]
    worst, = results.worst_rows(rows)
    assert worst["top1"] == pytest.approx(100 / 3) and worst["images"] == 3
    for order in (rows, rows[::-1]):
        assert cells(results.rows_table(order),
                     "worst eps=2/255 of=apgd loss=ce,pgd steps=20, top1") == ["3", "33.33"]
    other = attack("1", "apgd loss=ce", eps="4/255"), row(right=["1101"]), attack("1", network="b")
    assert not list(results.worst_rows([rows[0], *other]))          # no two attacks of one budget


def test_mean_of_corruptions_needs_all_types():
    rows = [row(name=name, measure=f"corruptions type={name} severities=1,2,3,4,5", top1=top1,
                top5=i, data="imagenet", size=224, severities=5, classes=1000)
            for i, (name, top1) in enumerate(TABLE_4.items())]
    mean, = results.mean_rows(rows)
    assert mean["mce"] == pytest.approx(74.75, abs=0.02) and mean["top5"] == 7
    assert mean["top1"] == pytest.approx(np.mean([*TABLE_4.values()]))
    line = "corruptions type=mean severities=1,2,3,4,5"
    assert cells(results.rows_table(rows), f"{line}, mce") == ["4", f"{mean['mce']:.2f}"]
    assert not list(results.mean_rows(rows[1:]))
    for change in (dict(classes=100), dict(size=32), dict(data="cifar10"), dict(severities=4)):
        mean, = results.mean_rows([one | change for one in rows])
        assert "mce" not in mean


# --- tables ---------------------------------------------------------------------------------------

def test_a_table_is_a_matrix(tmp_path, capsys):
    rows = [row("a"), row("b|c", top1=60.0), row("a", "cw", "cw steps=9", median_l2=0.12345),
            row("a", data="imagenet")]
    table = results.rows_table(rows)
    assert table.splitlines()[0].endswith(r"| images | a      | b\|c  |")
    assert cells(table, "cw steps=9, median L2 distance in pixel values") == ["4", "0.1235", "nan"]
    assert "clean, top5" in table and table.count("top5") == 1          # ImageNet's
    for one in rows:
        common.append_row(tmp_path / "results.jsonl", one)
    with open(tmp_path / "results.jsonl", "a") as file:
        file.write('{"network": "a", "na')                              # killed while writing
    call(lambda: runpy.run_module("results", run_name="__main__"), [tmp_path / "results.jsonl"])
    printed = capsys.readouterr().out
    assert table in printed and "±49 points" in printed


def networks(kind, accuracies, **fields):
    return [row(f"{kind}_s{seed}", top1=top1, **fields) for seed, top1 in accuracies.items()]


def half_width(values):
    low, high = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))
    return (high - low) / 2


def test_means_and_paired_differences_equal_scipy():
    a, b = np.array(list(RPC.values())), np.array(list(SOFTMAX.values()))
    table = results.seeds_table(networks("rpc", RPC) + networks("softmax", dict(
        reversed(SOFTMAX.items()))))
    paired = stats.ttest_rel(b, a).confidence_interval()
    assert cells(table, "clean, top1") == [
        "4", f"{a.mean():.2f} ± {half_width(a):.2f}, n 3", f"{b.mean():.2f} ± "
        f"{half_width(b):.2f}, n 3", f"{(b - a).mean():+.2f} ± "
        f"{(paired.high - paired.low) / 2:.2f}, n 3"]
    assert "| rpc_s* " in table and "| softmax_s* minus rpc_s* " in table


def test_t_values_equal_scipys():
    for n in range(1, 31):
        assert results.T95[n - 1] == pytest.approx(stats.t.ppf(0.975, n), abs=6e-4)
    values = list(np.random.default_rng(0).normal(50, 3, 40))
    half = 1.96 * np.std(values, ddof=1) / 40 ** 0.5
    assert results.mean_text(values, 2) == f"{np.mean(values):.2f} ± {half:.2f}, n 40"


def test_two_seeds_have_no_interval():
    rows = networks("rpc", RPC)[:2] + networks("softmax", {0: 60.0}) + networks("other", {7: 1.0})
    _, two, one, _, difference, nothing = cells(results.seeds_table(rows), "clean, top1")
    assert (two, one, difference, nothing) == ("72.25, n 2", "60.00, n 1", "-10.00, n 1", "n 0")


@pytest.mark.parametrize("paths, kinds", [
    (["out/a_s0", "out/a_s1"], 1), (["a_s0/best.pt", "a_seed1/best.pt"], 1),
    (["a_s0_long", "a_s1_long"], 1), (["a_s0", "b_s1"], 2), (["a", "b"], 2),
    (["adam_s0", "sgd_s1"], 2), (["a-s0", "a-s1"], 2), (["a_small", "a_s0mall"], 2)])
def test_kinds_are_paths_without_the_seed(paths, kinds):
    """The user names what belongs together."""
    rows = [row(path) for path in paths]
    assert len(results.kinds_of_network(rows)) == kinds
    assert bool(results.seeds_table(rows)) == (kinds == 1)


# --- plot.py --------------------------------------------------------------------------------------

LOG = [dict(step=2, loss=2.0, grad_norm=1.0, images_per_s=100.0, epoch=1.0, lr=0.1),
       dict(step=2, eval=dict(top1=30.0, loss=1.5, images=50), nonzero_S={"0": [0.5, 0.25]}),
       dict(step=4, loss=1.0, images_per_s=200.0, lr=0.1),
       dict(step=4, eval=dict(top1=60.0, loss=0.5, images=50))]


def pgd_row(network, eps, top1, measure="pgd steps=2"):
    return dict(network=network, name="pgd", measure=f"{measure} eps={eps}", eps=eps, images=4,
                top1=top1)


CLEAN = dict(name="clean", measure="clean", eps="", images=8, top1=37.5, right=["11000001"])
RESULTS = [CLEAN | dict(network="a"), pgd_row("a", "2/255", 40.0), pgd_row("b", "2/255", 50.0),
           pgd_row("a", "4/255", 20.0), pgd_row("a", "0.1", 9.0, "pgd steps=9"),
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
