"""Draw your runs: training curves, and accuracy against the attack budget.

    python plot.py out/a out/b      # writes out/a/curves.png and, if evaluated, out/a/budgets.png

A folder contains a run of train_cls.py, train_seg.py or train_lm.py (log.jsonl), an evaluation of
eval_robust.py (results.jsonl), or a run and, in its subfolder robust/, the run's evaluation.
plot.py needs matplotlib.
"""

import argparse
import sys
from pathlib import Path

import common
from common import InputError
from eval_robust import MODEL, measure_text, row_key

try:
    import matplotlib.pyplot as plt
except ModuleNotFoundError:
    sys.exit("error: plot.py needs matplotlib; install it with: pip install matplotlib")


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
        eps = settings.pop("eps", None)
        if eps is not None and "top1" in row:
            key, start = row_key(row | dict(settings=settings)), clean.get(row_key(row, same))
            label = f"{row['model']}, {row['checkpoint']}, {row['images']} images"
            _, curve = curves.setdefault(measure_text(row["name"], settings), {}).setdefault(
                key, (label, [] if start is None else [(0, start)]))
            curve.append((255 * eps, row["top1"]))
    return {attack: {key: (label, sorted(curve)) for key, (label, curve) in models.items()}
            for attack, models in curves.items()}


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


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("folders", nargs="+", type=Path, help="draw the curves of these folders")
    folders = p.parse_args(argv).folders
    plt.switch_backend("Agg")                                   # no screen is needed

    curves, results = {}, {}
    for i, folder in enumerate(folders):
        log, evaluations = folder / "log.jsonl", [folder / "results.jsonl",
                                                  folder / "robust/results.jsonl"]
        found = [path for path in evaluations if path.exists()]
        if not log.exists() and not found:
            raise InputError(f"{folder} contains no log.jsonl and no results.jsonl; expected the "
                             "folder of a training or of an evaluation")
        for panel, lines in training_curves(common.read_log(log) if log.exists() else []).items():
            for name, points in lines.items():
                style = ":" if name == "training" and panel == "loss" else "-"
                curves.setdefault(panel, []).append((f"{folder}, {name}", f"C{i % 10}", style,
                                                     points))
        for attack, models in budget_curves([row for path in found
                                             for row in common.read_log(path)]).items():
            results.setdefault(attack, []).extend((label, None, "o-", points)
                                                  for label, points in models.values())

    if not curves and not results:
        raise InputError(f"{folders[0]}: its log.jsonl or results.jsonl has no rows to draw yet; "
                         "train for longer, or evaluate more")
    if curves:
        draw_panels(curves, folders[0] / "curves.png", "training step")
    if results:
        draw_panels(results, folders[0] / "budgets.png", "eps in 1/255 of the pixel range")


if __name__ == "__main__":
    common.run(main)
