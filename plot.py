"""Draw your runs: training curves, and accuracy against the attack budget.

    python plot.py out/a out/b      # writes out/a/curves.png and, if evaluated, out/a/budgets.png

A folder contains a run of a trainer (log.jsonl), an evaluation of eval_robust.py (results.jsonl),
or a run and, in its subfolder robust/, the run's evaluation. plot.py needs matplotlib.
"""

from collections import Counter
from pathlib import Path

import common  # before torch, because it sets GOMP_SPINCOUNT for torch's threads
from matplotlib.figure import Figure

from results import (KEY_FIELDS, NETWORK_FIELDS, PAPER_CLIPS, has_shared_budget, measure_text,
                     row_key, unpack)


def training_curves(rows):
    """Convert the rows of log.jsonl to {(panel, curve): [(step, value)]}."""
    curves = {}
    for row in rows:
        values = {}                             # {(panel, curve): value}
        if "loss" in row:
            values["loss", "training"] = row["loss"]
        for name, value in row.get("eval", {}).items():
            if isinstance(value, float):
                values[name, "evaluation"] = value
        for layer, shares in row.get("nonzero_S", {}).items():
            for step, share in enumerate(shares, 1):
                values["share of nonzero S", f"layer {layer}, step {step}"] = share
        for curve, value in values.items():
            curves.setdefault(curve, []).append((row["step"], value))
    return curves


def clean_accuracy(row, clean):
    """Return the clean accuracy on the images of a row, None if it is not known.

    clean: the row of the clean images. It begins with the images of `row`, or has fewer images.
    """
    if clean["images"] == row["images"]:
        return clean["top1"]
    if clean["images"] < row["images"] or "right" not in clean:
        return None
    right = unpack(clean["right"], clean["images"])[:row["images"]]
    return 100 * right.double().mean().item()


def budget_unit(row):
    """Return the text of the x axis."""
    if row["settings"].get("conditions") == "paper":
        return "eps in 1/255 of the normalised pixels"
    return "eps in 1/255 of the pixel range"


def budget_curves(rows):
    """Convert the rows of results.jsonl to {panel: [(label, [(255 eps, top-1 in %)])]}.

    A panel is an attack with its settings, and the unit of its budgets. The rows of a curve differ
    only in eps. A curve begins with the clean accuracy on the same images, at eps = 0. With
    --preset paper, the curves of PAPER_CLIPS have no such point, because these attacks clip the
    normalised images first. Attacks with their own budget, such as noise, have no curve.
    """
    same_images = (*NETWORK_FIELDS, "code", "data", "fingerprint", "seed")
    same_curve = (*KEY_FIELDS, "checkpoint")
    rows = list({row_key(row, same_curve): row for row in rows}.values())
    clean = {}                                  # {key: the clean row with the most images}
    for row in rows:
        if row["name"] == "clean":
            key = row_key(row, same_images)
            if key not in clean or row["images"] > clean[key]["images"]:
                clean[key] = row
    groups = {}                                 # {(panel, key without eps): rows of a curve}
    for row in rows:
        if has_shared_budget(row):
            settings = dict(row["settings"])
            settings.pop("eps")
            panel = measure_text(row["name"], settings), budget_unit(row)
            key = row_key(row | dict(settings=settings), same_curve)
            groups.setdefault((panel, key), []).append(row)
    panels = {}                                 # {panel: [rows of a curve]}
    for (panel, _), group in groups.items():
        panels.setdefault(panel, []).append(group)
    curves = {}
    for panel, rows_of_curves in panels.items():
        labels = curve_labels([group[0] for group in rows_of_curves])
        curves[panel] = []
        for label, group in zip(labels, rows_of_curves):
            first = group[0]
            start = clean.get(row_key(first, same_images))
            is_paper = first["settings"].get("conditions") == "paper"
            if is_paper and first["name"] in PAPER_CLIPS:
                start = None
            curves[panel].append((label, curve_points(group, start)))
    return curves


def curve_points(rows, clean):
    """Return the points of a curve, [(255 eps, top-1 in %)].

    clean: the clean row, None if the curve does not begin with it.
    """
    points = [(255 * row["settings"]["eps"], row["top1"]) for row in rows]
    if clean is not None:
        accuracy = clean_accuracy(rows[0], clean)
        if accuracy is not None:
            points.append((0, accuracy))
    return sorted(points)


def curve_labels(rows):
    """Return one label per row. Equal labels also show the fields in which their rows differ."""
    labels = [f"{row['model']}, {row.get('checkpoint')}, {row['images']} images" for row in rows]
    counts = Counter(labels)
    named = []
    for row, label in zip(rows, labels):
        if counts[label] > 1:
            twins = [other for other, name in zip(rows, labels) if name == label]
            for field in KEY_FIELDS:
                values = {row_key(twin, [field]) for twin in twins}
                if len(values) > 1:
                    label += f", {field} {row.get(field)}"
        named.append(label)
    return named


def draw_panels(panels, path):
    """Draw {(title, text of the x axis): [(label, [(x, y)])]} and write the figure to path."""
    n = len(panels)
    most_curves = max(map(len, panels.values()))
    height = n * (3.9 + 0.25 * most_curves)             # the legend has a line of text per curve
    figure = Figure(figsize=(6, height), layout="constrained")
    axes = figure.subplots(n, squeeze=False).flat
    for ax, ((title, xlabel), curves) in zip(axes, panels.items()):
        for _, points in curves:
            x, y = zip(*points)
            ax.plot(x, y, ".-")
        ax.set(title=as_plain_text(title), xlabel=xlabel)
        labels = [as_plain_text(label) for label, _ in curves]
        # Explicit lines, because a legend leaves out the labels that begin with an underscore.
        ax.legend(ax.lines, labels, frameon=False, loc="upper center",
                  bbox_to_anchor=(0.5, -0.22))
    figure.savefig(path)
    print(path)


def as_plain_text(text):
    """Return text in which matplotlib draws dollar signs instead of formulas."""
    return text.replace("$", r"\$")


def main():
    p = common.new_parser(__doc__)
    p.usage = "%(prog)s folder ..."                                 # there are no flags
    p.add_argument("folders", nargs="+", type=Path, help="draw the curves of these folders")
    folders = list(dict.fromkeys(p.parse_args().folders))           # each folder once

    curves = {}
    rows = []
    for folder in folders:
        logged = training_curves(common.read_log(folder / "log.jsonl"))
        for (panel, name), points in logged.items():
            panel_curves = curves.setdefault((panel, "training step"), [])
            panel_curves.append((f"{folder}, {name}", points))
        stored = common.read_log(folder / "results.jsonl")
        stored += common.read_log(folder / "robust" / "results.jsonl")
        stored = [row for row in stored if "top1" in row]
        has_curve = any(has_shared_budget(row) for row in stored)
        if not logged and not has_curve:
            raise common.InputError(f"{folder}: no rows to draw in log.jsonl or results.jsonl; "
                                    "expected the folder of a run or of an evaluation with an "
                                    "attack of several budgets, such as pgd")
        rows += stored
    if curves:
        draw_panels(curves, folders[0] / "curves.png")
    budgets = budget_curves(rows)
    if budgets:
        draw_panels(budgets, folders[0] / "budgets.png")


if __name__ == "__main__":
    common.run(main)
