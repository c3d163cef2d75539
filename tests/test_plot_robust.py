"""studies/plot_robust.py: what the figures of the evaluator's rows show."""

import json
import sys

import pytest

pytest.importorskip("matplotlib")

from studies import plot, plot_robust  # noqa: E402

PIXEL = dict(space="pixel", labels="true", clip=True)
PAPER = dict(space="normalized", labels="pred", clip=False)


def row(arm, seed, measure, top1, conditions=PIXEL, images=50, size="nano", **setting):
    return dict(model=f"{arm}, seed {seed}", kind=arm, checkpoint=f"out/{size}_{arm}_s{seed}",
                weights=f"{size}{arm}{seed}", model_config=dict(attn=arm), recipe=size, data="shapes",
                measure=measure, setting=setting, conditions=conditions, images=images, top1=top1)


def write(folder, rows):
    (folder / "results.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def points(ax):
    return {line.get_label(): [tuple(round(float(v), 6) for v in point) for point in line.get_xydata()]
            for line in ax.lines}


def sweep_rows(conditions, **more):
    """Two seeds: 90 and 80 clean, 60 and 40 at 1/255, 30 and 20 at 2/255."""
    found = []
    for seed, clean, near, far in ((0, 90, 60, 30), (1, 80, 40, 20)):
        found += [row("rpc", seed, "clean", clean, images=100, **more),
                  row("rpc", seed, "pgd", near, conditions, eps=1 / 255, **more),
                  row("rpc", seed, "pgd", far, conditions, eps=2 / 255, **more)]
    return found


CURVE = {"rpc (n = 2)": [(0, 85), (1, 50), (2, 25)]}


def test_the_curve_is_the_mean_over_seeds_from_the_clean_accuracy_on(tmp_path):
    write(tmp_path, sweep_rows(PIXEL) + [row("rpc", 0, "clean", 10, images=7),       # of fewer images
                                         row("softmax", 0, "clean", 99)])            # not attacked
    figure, _ = plot_robust.sweep(tmp_path, "")
    fgsm, pgd = figure.axes
    assert points(pgd) == CURVE and points(fgsm) == {}
    assert (fgsm.get_title(), pgd.get_title()) == ("FGSM", "PGD, 50 images; clean: 100")
    write(tmp_path, [row("rpc", 0, "pgd", 9 - k, eps=k / 255) for k in (1, 2)])
    assert plot_robust.sweep(tmp_path, "")[0].axes[1].get_title() == "PGD, 50 images"


def test_budgets_in_pixels_and_in_the_papers_units_are_two_panels(tmp_path):
    write(tmp_path, sweep_rows(PAPER))
    figure, _ = plot_robust.sweep(tmp_path, "")
    assert points(figure.axes[1]) == CURVE
    assert "normalised" in figure.axes[1].get_xlabel()
    write(tmp_path, sweep_rows(PAPER) + [row("rpc", 0, "pgd", 5, eps=s / 255) for s in (1, 2)])
    figure, _ = plot_robust.sweep(tmp_path, "")
    assert points(figure.axes[1]) == {"rpc (n = 2)": [(0, 85), (1, 5), (2, 5)]}
    assert points(figure.axes[3]) == CURVE


def test_an_attack_with_other_settings_is_no_further_seed(tmp_path):
    longer = [row("rpc", 0, "pgd", 0, eps=1 / 255, steps=100), row("rpc", 0, "pgd", 0, eps=1 / 255, images=9)]
    write(tmp_path, sweep_rows(PIXEL) + longer)
    assert points(plot_robust.sweep(tmp_path, "")[0].axes[1]) == CURVE
    errors = [row("rpc", seed, "corruptions", [50], type="fog", severities=[3]) for seed in (0, 1)]
    write(tmp_path, [*errors, row("rpc", 0, "corruptions", [0], type="fog", severities=[5])])
    bar, = plot_robust.corruptions(tmp_path, "")[0].axes[0].patches
    assert bar.get_height() == 50


def test_one_budget_is_no_curve(tmp_path):
    write(tmp_path, [row("rpc", 0, "clean", 9), row("rpc", 0, "pgd", 5, eps=1 / 255)])
    assert plot_robust.sweep(tmp_path, "")[0] is None


def test_networks_of_two_sizes_are_two_lines_and_run_takes_one(tmp_path, monkeypatch):
    write(tmp_path, sweep_rows(PIXEL) + sweep_rows(PIXEL, size="micro"))
    figure, _ = plot_robust.sweep(tmp_path, "")
    assert len(figure.axes[1].lines) == 2
    files = [r | dict(checkpoint=f"{r['checkpoint']}/last.pt") for r in sweep_rows(PIXEL)]
    (tmp_path / "files").mkdir()
    write(tmp_path / "files", files)
    assert len(plot_robust.read_results(tmp_path / "files", "pgd", "nano_rpc_s0")) == 2
    monkeypatch.setattr(sys, "argv", ["plot", "robust", str(tmp_path), "--run", "micro", "other"])
    plot.main()
    assert [path.name for path in tmp_path.glob("*.png")] == ["sweep_micro_other.png"]
    figure, _ = plot_robust.sweep(tmp_path, ("micro", "other"))
    assert points(figure.axes[1]) == CURVE


def test_bars_are_errors_averaged_over_severities_and_seeds(tmp_path):
    write(tmp_path, [row("rpc", 0, "corruptions", [80, 60], type="snow"),
                     row("rpc", 1, "corruptions", [50, 50], type="snow"),
                     row("rpc", 0, "corruptions", [90, 90], type="fog"),
                     row("rpc", 1, "corruptions", [90, 70], type="fog"),
                     row("rpc", 0, "corruptions", [0, 0], images=3, type="fog"),     # another run
                     row("rpc", 0, "corruptions", [0, 0], PAPER, type="snow")])
    figure, _ = plot_robust.corruptions(tmp_path, "")
    ax, = figure.axes
    assert [label.get_text() for label in ax.get_xticklabels()] == ["snow", "fog"]
    assert [bar.get_height() for bar in ax.patches] == pytest.approx([40, 15])
    assert ax.get_ylabel() == "top-1 error in %, 50 images"
