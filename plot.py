"""Draw your runs: training curves, and accuracy against the attack budget.

    python plot.py out/a out/b      # writes out/a/curves.png and, if evaluated, out/a/budgets.png

A folder contains a run of train_cls.py, train_seg.py or train_lm.py (log.jsonl), an evaluation of
eval_robust.py (results.jsonl), or a run and, in its subfolder robust/, the run's evaluation.
plot.py needs matplotlib.
"""

import argparse
from pathlib import Path

import matplotlib
matplotlib.use("Agg")                                           # no screen is needed
import matplotlib.pyplot as plt

import common
from eval_robust import MODEL, measure_text, row_key


def training_curves(rows):
    """Convert the rows of log.jsonl to {panel: {curve: [(step, value)]}}."""
    curves = {}
    for row in rows:
        found = {(name.replace("_per_s", " per second"), "training"): row[name]
                 for name in ("loss", "images_per_s", "tokens_per_s") if name in row}
        found |= {(name, "evaluation"): value for name, value in row.get("eval", {}).items()
                  if isinstance(value, float)}
        found |= {("share of nonzero S", f"layer {layer}, PAP step {i}"): share
                  for layer, shares in row.get("nonzero_S", {}).items()
                  for i, share in enumerate(shares, 1)}
        for (panel, name), value in found.items():
            curves.setdefault(panel, {}).setdefault(name, []).append((row["step"], value))
    return curves


def budget_curves(rows):
    """Convert the rows of results.jsonl to {attack: {key: (label, [(eps in 1/255, top-1 in %)])}}.

    The rows of a curve differ in eps only: `key` contains everything else. A curve begins with the
    clean accuracy, at eps = 0, if the rows contain it. Measures without eps have no curve.
    """
    same = (*MODEL, "data", "fingerprint", "seed")
    clean = {row_key(row, same): row.get("top1") for row in rows if row["name"] == "clean"}
    curves = {}
    for row in rows:
        settings = dict(row["settings"])
        eps, start = settings.pop("eps", None), clean.get(row_key(row, same))
        if eps is None or "top1" not in row:
            continue
        label = f"{row['model']}, {row['checkpoint']}, {row['images']} images"
        panel = curves.setdefault(measure_text(row["name"], settings), {})
        key = row_key(row | dict(settings=settings))
        _, curve = panel.setdefault(key, (label, [] if start is None else [(0, start)]))
        curve.append((255 * eps, row["top1"]))
        curve.sort()
    return curves


def draw_panels(panels, path, xlabel):
    """Draw {panel title: [(label, colour, style, [(x, y)])]} and write the figure to path."""
    rows = -(-len(panels) // 2)
    figure, axes = plt.subplots(rows, 2, squeeze=False, figsize=(9, 4.2 * rows),    # inches
                                layout="constrained")
    for ax, (title, lines) in zip(axes.flat, panels.items()):
        for label, colour, style, points in lines:
            ax.plot(*zip(*points), style, color=colour, label=label, markersize=4)
        ax.set(title=title, xlabel=xlabel)
        ax.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.22))
    for ax in axes.flat[len(panels):]:
        ax.set_visible(False)
    figure.savefig(path)
    plt.close(figure)
    print(path)


def main():
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("folders", nargs="+", type=Path, help="draw the curves of these folders")
    folders = p.parse_args().folders

    curves, results = {}, {}
    for i, folder in enumerate(folders):
        log, evaluations = folder / "log.jsonl", [folder / "results.jsonl",
                                                  folder / "robust/results.jsonl"]
        for panel, lines in training_curves(common.read_log(log) if log.exists() else []).items():
            for name, points in lines.items():
                style = ":" if name == "training" and panel == "loss" else "-"
                curves.setdefault(panel, []).append((f"{folder}, {name}", f"C{i % 10}", style,
                                                     points))
        rows = [row for path in evaluations if path.exists() for row in common.read_log(path)]
        for attack, models in budget_curves(rows).items():
            results.setdefault(attack, []).extend((label, None, "o-", points)
                                                  for label, points in models.values())
    if not curves and not results:
        raise common.InputError(f"{folders[0]}: no rows to draw in log.jsonl or results.jsonl")
    if curves:
        draw_panels(curves, folders[0] / "curves.png", "training step")
    if results:
        draw_panels(results, folders[0] / "budgets.png", "eps in 1/255 of the pixel range")


if __name__ == "__main__":
    common.run(main)
