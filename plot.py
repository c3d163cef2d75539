"""Draw your runs: training curves, and accuracy against the attack budget.

    python plot.py out/a out/b      # writes out/a/curves.png and, if evaluated, out/a/budgets.png

A folder contains a run of a trainer (log.jsonl), an evaluation of eval_robust.py (results.jsonl),
or a run and, in its subfolder robust/, the run's evaluation. plot.py needs matplotlib.
"""

from pathlib import Path

import common  # before torch, because it sets GOMP_SPINCOUNT for torch's threads
from eval_robust import MODEL, measure_text, row_key
from matplotlib.figure import Figure


def training_curves(rows):
    """Convert the rows of log.jsonl to {panel: {curve: [(step, value)]}}."""
    curves = {}
    for row in rows:
        found = [("loss", "training", row["loss"])] if "loss" in row else []
        found += [(name, "evaluation", value) for name, value in row.get("eval", {}).items()
                  if isinstance(value, float)]
        found += [("share of nonzero S", f"layer {layer}, PAP step {i}", share)
                  for layer, shares in row.get("nonzero_S", {}).items()
                  for i, share in enumerate(shares, 1)]
        for panel, name, value in found:
            curves.setdefault(panel, {}).setdefault(name, []).append((row["step"], value))
    return curves


def budget_curves(rows):
    """Convert the rows of results.jsonl to {attack: {key: (label, [(eps in 1/255, top-1 in %)])}}.

    The rows of a curve differ in eps only. A curve begins with the clean accuracy, at eps = 0.
    """
    same = (*MODEL, "data", "fingerprint", "seed")
    clean = {row_key(row, same): [(0, row["top1"])] for row in rows if row["name"] == "clean"}
    curves = {}
    for row in rows:
        settings = dict(row["settings"])
        eps = settings.pop("eps", None)
        if eps is not None:                                     # an attack with a budget
            label = f"{row['model']}, {row['checkpoint']}, {row['images']} images"
            panel = curves.setdefault(measure_text(row["name"], settings), {})
            _, curve = panel.setdefault(row_key(row | dict(settings=settings)),
                                        (label, clean.get(row_key(row, same), [])[:]))
            curve.append((255 * eps, row["top1"]))
            curve.sort()
    return curves


def draw_panels(panels, path, xlabel):
    """Draw {panel title: [(label, [(x, y)])]} and write the figure to path."""
    n = len(panels)
    figure = Figure(figsize=(6, 4.2 * n), layout="constrained")
    for ax, (title, lines) in zip(figure.subplots(n, squeeze=False).flat, panels.items()):
        for label, points in lines:
            ax.plot(*zip(*points), ".-", label=label)
        ax.set(title=title, xlabel=xlabel)
        ax.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.22))
    figure.savefig(path)
    print(path)


def main():
    p = common.new_parser(__doc__)
    p.usage = "%(prog)s folder ..."
    p.add_argument("folders", nargs="+", type=Path, help="draw the curves of these folders")
    folders = p.parse_args().folders

    curves, rows = {}, []
    for folder in folders:
        for panel, lines in training_curves(common.read_log(folder / "log.jsonl")).items():
            curves.setdefault(panel, []).extend((f"{folder}, {name}", points)
                                                for name, points in lines.items())
        for name in ("results.jsonl", "robust/results.jsonl"):
            rows += common.read_log(folder / name)
    budgets = {attack: list(lines.values()) for attack, lines in budget_curves(rows).items()}
    if not curves and not budgets:
        raise common.InputError(f"{folders[0]}: no rows to draw in log.jsonl or results.jsonl")
    if curves:
        draw_panels(curves, folders[0] / "curves.png", "training step")
    if budgets:
        draw_panels(budgets, folders[0] / "budgets.png", "eps in 1/255 of the pixel range")


if __name__ == "__main__":
    common.run(main)
