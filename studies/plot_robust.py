"""Figures of results.jsonl, which eval_robust.py writes; the command is that of plot.py."""

import json
from pathlib import Path

import numpy as np

from robust.corruptions import NAMES
from robust.rows import group, identity, read_rows
from studies.look import WIDTH, band, plt

CONDITIONS = {                                            # what a budget means
    "eps in 1/255 of the pixel range": dict(space="pixel", labels="true", clip=True),
    "eps in 1/255 of normalised units, no clipping": dict(space="normalized", labels="pred",
                                                          clip=False)}


def read_results(folder, measure, run):
    """Rows of a measure, the last of each kind, of networks whose folder's name begins with run."""
    found = []
    for row in read_rows(folder / "results.jsonl").values():
        path = Path(row["checkpoint"])
        name = path.parent.name if path.suffix == ".pt" else path.name
        if row["measure"] == measure and name.startswith(run):
            found.append(row)
    return found


def under(rows, conditions):
    return [row for row in rows if conditions.items() <= row["conditions"].items()]


def of_one_setting(rows):
    """The largest group of rows that differ in nothing but model, budget and type."""
    groups = {}
    for row in rows:
        setting = {k: v for k, v in row["setting"].items() if k not in ("eps", "type")}
        how = json.dumps([setting, row["images"], row["conditions"]], sort_keys=True)
        groups.setdefault(how, []).append(row)
    return max(groups.values(), key=len, default=[])


def deviation(t):
    return np.std(t, ddof=1) if len(t) > 1 else 0.0


def by_kind(rows, x, y):
    """y(row) by x(row): [(kind of attention, xs, means over seeds, their deviations, seeds)]."""
    groups, kinds = {}, {}
    for row in rows:
        kinds[group(row)] = row["kind"]
        groups.setdefault(group(row), {}).setdefault(x(row), []).append(y(row))
    return [(kinds[name], list(values), *(np.array([f(t) for t in values.values()])
                                          for f in (np.mean, deviation)),
             max(map(len, values.values()))) for name, values in groups.items()]


def budget(row):
    return 255 * row["setting"].get("eps", 0)


def sweep_panel(ax, name, rows, clean):
    """One attack: a line a kind of attention, from its clean accuracy on."""
    attacked = {group(row) for row in rows}
    start = [row for row in clean if group(row) in attacked]
    found = by_kind(sorted(start + rows, key=budget), budget, lambda row: row["top1"])
    for i, (kind, xs, mean, std, n) in enumerate(found):
        ax.plot(xs, mean, f"C{i}", marker="o", markersize=3, label=f"{kind} (n = {n})")
        band(ax, xs, mean - std, mean + std, f"C{i}")
    images = f", {rows[0]['images']:,} images" if rows else ""
    clean = f"; clean: {start[0]['images']:,}" if start else ""
    ax.set(title=f"{name.upper()}{images}{clean}", ylim=(0, None))


def sweep(folder, run):
    """Fig. 3 (left): accuracy against the budget, FGSM and PGD; mean over seeds, band: one std."""
    attacks = {name: read_results(folder, name, run) for name in ("fgsm", "pgd")}
    clean = sorted(read_results(folder, "clean", run), key=lambda row: row["images"])
    clean = list({identity(row): row for row in clean}.values())          # the most images of each
    shown = {}
    for unit, conditions in CONDITIONS.items():
        fgsm, pgd = parts = [of_one_setting(under(rows, conditions)) for rows in attacks.values()]
        if len({budget(row) for row in fgsm + pgd}) > 1:
            shown[unit] = parts
    if not shown:
        return None, "FGSM or PGD at two budgets and more by eval_robust.py"
    figure, axes = plt.subplots(len(shown), 2, figsize=(WIDTH, 3.4 * len(shown)), sharey=True,
                                squeeze=False)
    for row, (unit, parts) in zip(axes, shown.items()):
        for ax, name, rows in zip(row, attacks, parts):
            sweep_panel(ax, name, rows, clean)
            ax.set_xlabel(unit)
            if rows:
                ax.legend(frameon=False)
        row[0].set_ylabel("top-1 accuracy in %")
    return figure, ""


def corruptions(folder, run):
    """Top-1 error of every corruption type, mean of severities and seeds, with one std."""
    rows = under(read_results(folder, "corruptions", run), next(iter(CONDITIONS.values())))
    if not rows:
        return None, "the corruptions of eval_robust.py"
    most = max(row["images"] for row in rows)                               # of several runs
    rows = sorted(of_one_setting(row for row in rows if row["images"] == most),
                  key=lambda row: NAMES.index(row["setting"]["type"]))
    found = by_kind(rows, lambda row: row["setting"]["type"],
                    lambda row: 100 - np.mean(row["top1"]))
    figure, ax = plt.subplots(figsize=(WIDTH, 3.8))
    for i, (kind, types, mean, std, n) in enumerate(found):
        x = np.arange(len(types)) + (i - (len(found) - 1) / 2) * 0.8 / len(found)
        ax.bar(x, mean, 0.8 / len(found), yerr=std, capsize=1.5, error_kw={"linewidth": 0.8},
               label=f"{kind} (n = {n})")
    names = [t.replace("_", " ") for t in types]
    ax.set_xticks(range(len(types)), names, rotation=40, ha="right")
    ax.set_ylabel(f"top-1 error in %, {most} images")
    ax.legend(frameon=False, ncols=2)
    return figure, ""


FIGURES = {"sweep": sweep, "corruptions_error": corruptions}
