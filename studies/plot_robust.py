"""Figures of results.jsonl, which eval_robust.py writes; the command is that of plot.py."""

import numpy as np

from robust.corruptions import NAMES
from robust.rows import read_rows
from studies.look import WIDTH, band, plt


def read_results(folder, measure):
    """Rows of results.jsonl in pixel units with true labels and clipping, the last of each kind."""
    usual = dict(space="pixel", labels="true", clip=True)
    return [row for row in read_rows(folder / "results.jsonl").values()
            if row["measure"] == measure and usual.items() <= row["conditions"].items()]


def deviation(t):
    return np.std(t, ddof=1) if len(t) > 1 else 0.0


def by_kind(rows, x, y):
    """y(row) by x(row), {kind of attention: (xs, means over seeds, their deviations, seeds)}."""
    groups = {}
    for row in rows:
        groups.setdefault(row["kind"], {}).setdefault(x(row), []).append(y(row))
    return {kind: (list(values), *(np.array([f(t) for t in values.values()])
                                   for f in (np.mean, deviation)), max(map(len, values.values())))
            for kind, values in groups.items()}


def sweep(folder, _):
    """Fig. 3 (left): accuracy against the budget, FGSM and PGD; mean over seeds, band: one std."""
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 3.4), sharey=True)
    for ax, measure in zip(axes, ("fgsm", "pgd")):
        rows = read_results(folder, measure)
        kinds = {row["kind"] for row in rows}
        clean = [row for row in read_results(folder, "clean") if row["kind"] in kinds]

        def eps(row):
            return 255 * row["setting"].get("eps", 0)

        found = by_kind(sorted(clean + rows, key=eps), eps, lambda row: row["top1"])
        for i, (kind, (xs, mean, std, n)) in enumerate(found.items()):
            ax.plot(xs, mean, f"C{i}", marker="o", markersize=3, label=f"{kind} (n = {n})")
            band(ax, xs, mean - std, mean + std, f"C{i}")
        n = f", {rows[0]['images']} images" if rows else ""
        ax.set(title=f"{measure.upper()}{n}", xlabel="eps in 1/255 of the pixel range",
               ylim=(0, None))
    axes[0].set_ylabel("top-1 accuracy in %")
    axes[0].legend(frameon=False)
    return figure, ""


def corruptions(folder, _):
    """Top-1 error of every corruption type, mean of severities and seeds, with one std."""
    rows = read_results(folder, "corruptions")
    if not rows:
        return None, "the corruptions of eval_robust.py"
    most = max(row["images"] for row in rows)                               # of several runs
    rows = sorted((row for row in rows if row["images"] == most),
                  key=lambda row: NAMES.index(row["setting"]["type"]))
    found = by_kind(rows, lambda row: row["setting"]["type"],
                    lambda row: 100 - np.mean(row["top1"]))
    figure, ax = plt.subplots(figsize=(WIDTH, 3.8))
    for i, (kind, (types, mean, std, n)) in enumerate(found.items()):
        x = np.arange(len(types)) + (i - (len(found) - 1) / 2) * 0.8 / len(found)
        ax.bar(x, mean, 0.8 / len(found), yerr=std, capsize=1.5, error_kw={"linewidth": 0.8},
               label=f"{kind} (n = {n})")
    names = [t.replace("_", " ") for t in types]
    ax.set_xticks(range(len(types)), names, rotation=40, ha="right")
    ax.set_ylabel(f"top-1 error in %, {most} images")
    ax.legend(frameon=False, ncols=2)
    return figure, ""


FIGURES = {"sweep": sweep, "corruptions_error": corruptions}
