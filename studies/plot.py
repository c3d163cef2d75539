"""Figures from the numbers that the other scripts write. Needs matplotlib.

    python -m studies.plot log out/a out/b                 # curves of training runs, side by side
    python -m studies.plot kpca out/kpca                   # whatever its CSV files allow
    python -m studies.plot kpca out/kpca --run softmax     # mean of softmax_s0, softmax_s1
    python -m studies.plot robust out/shapes_rpc/robust    # accuracy against eps, errors by type
    python -m studies.plot robust out/rows --run symmetric rpc       # of some of its networks

One function draws one figure: it reads the numbers in a folder and returns a figure and what it
lacks, or None and the command that would bring the numbers.
"""

import argparse
import json
import sys
from pathlib import Path

if not __package__:
    sys.exit("error: start this in the repository's folder, as: python -m studies.plot")

import numpy as np

import common
from robust.corruptions import NAMES
from robust.results import group, identity, read_rows
from studies.probe import read_csv

try:
    import matplotlib.pyplot as plt
except ImportError:
    sys.exit("error: studies.plot needs matplotlib: pip install matplotlib")

plt.switch_backend("Agg")                                  # no screen
plt.rcParams.update({"figure.dpi": 100, "figure.constrained_layout.use": True, "font.size": 9,
                     "axes.titlesize": 9.5, "legend.fontsize": 8, "axes.spines.top": False,
                     "axes.spines.right": False})
WIDTH = 9                                                  # inches


def band(ax, xs, low, high, colour):
    ax.fill_between(xs, low, high, color=colour, alpha=0.2, linewidth=0)


def legend(figure, ax, where, **look):
    """The labels of ax, outside of all panels."""
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc=f"outside {where}", frameon=False, **look)


# --- log.jsonl of training runs -------------------------------------------------------------------

def log_curves(rows):
    """{panel: {line: [(step, value)]}} of a run's log: losses, evaluations, S, speed."""
    curves = {}

    def add(panel, name, step, value):
        curves.setdefault(panel, {}).setdefault(name, []).append((step, value))

    for row in rows:
        found, step = row.get("eval", {}), row.get("step")
        for name, value in row.items():
            if name in ("loss", "images_per_s", "tokens_per_s"):
                add("loss" if name == "loss" else name.replace("_per_s", " a second"), "training",
                    step, value)
        for name, value in found.items():
            if name == "loss" or isinstance(value, float) and name != "loss":
                add(name, "evaluation", step, value)
        for layer, shares in row.get("nonzero_S", {}).items():
            for i, share in enumerate(shares, 1):
                add("share of nonzero S", f"layer {layer}, PAP step {i}", step, share)
    return curves


def logs(folders):
    """Curves of runs over training steps: loss, evaluations, share of nonzero S, speed."""
    runs = {}
    names = [folder.name for folder in folders]
    for folder in folders:
        name = folder.name if names.count(folder.name) == 1 else str(folder)
        runs[name] = log_curves(common.read_log(folder / "log.jsonl"))
        if not runs[name]:
            raise ValueError(f"{folder} holds no log.jsonl of a training run")
    panels = list(dict.fromkeys(panel for curves in runs.values() for panel in curves))
    figure, axes = plt.subplots(-(-len(panels) // 2), 2, squeeze=False,
                                figsize=(WIDTH, 2.8 * -(-len(panels) // 2)))
    for ax, panel in zip(axes.flat, panels):
        for i, (run, curves) in enumerate(runs.items()):
            for j, (name, points) in enumerate(curves.get(panel, {}).items()):
                style = ":" if name == "training" and panel == "loss" else "-"
                ax.plot(*zip(*points), style, color=f"C{i}", alpha=1 / (1 + 0.2 * j),
                        label=f"{run}, {name}")
        ax.set(title=panel, xlabel="training step")
        ax.legend(frameon=False, fontsize=6)
    for ax in axes.flat[len(panels):]:
        ax.set_visible(False)
    return figure


# --- CSV files of kernel_pca and published_scores -------------------------------------------------

def line(colour, style, label, **which):
    """A line of a figure: how it looks, and which rows it shows."""
    return colour, style, label, which


SOURCES = [
    line("tab:blue", "-", "learned values", source="learned"),
    line("tab:orange", "--", "null: same input, random matrix", source="x W"),
    line("tab:gray", ":", "null: random numbers", source="iid"),
    line("tab:green", "-", "exact kernel PCA", source="KPCA"),
    line("black", "-.", "most that is possible", source="best"),
    line("black", "-.", "span of all keys", source="ceiling"),
]
RELEASED = [line("tab:blue", "-", "with |h|²", measure="J official"),
            line("black", "--", "with |h|² left out", measure="J official without h")]
TERMS = [line("tab:purple", "-", "|φ(q)|², what is projected", measure="phi2"),
         line("tab:blue", "-", "|h|², its 'projection'", measure="h2")]
GAMMA = [
    line("tab:blue", "-", "as printed, numeric inverse: learned", measure="numeric inverse",
         source="learned"),
    line("tab:gray", ":", "the same: random numbers", measure="numeric inverse", source="iid"),
    line("tab:red", "-", "pseudo-inverse: learned", measure="|dgamma|", source="learned"),
    line("tab:gray", "--", "the same: random numbers", measure="|dgamma|", source="iid"),
    line("black", "-", "eigenvalue λ for comparison", measure="lambda", source="KPCA"),
]


def curve(rows, x, **only):
    """(x, mean, se) of rows with the given values, sorted by x, averaged over other columns."""
    groups = {}
    for row in rows:
        if all(row[k] == v for k, v in only.items()):
            groups.setdefault(row[x], []).append((row["mean"], row["se"]))
    xs = sorted(groups)
    means = np.array([np.mean(groups[x], axis=0) for x in xs]).reshape(-1, 2)
    return np.array(xs), means[:, 0], means[:, 1]


def draw(ax, rows, x, lines, bands=True, marker="o", **only):
    """Lines with bands of one standard error; bars where there is one x only."""
    for colour, style, label, which in lines:
        xs, mean, se = curve(rows, x, **which, **only)
        if len(xs) == 1:
            ax.bar(len(ax.patches), mean, 0.8, yerr=se, color=colour, capsize=2, label=label)
            ax.set_xticks([])
        elif len(xs):
            ax.plot(xs, mean, style, color=colour, label=label, marker=marker, markersize=3)
        if len(xs) > 1 and bands:
            band(ax, xs, mean - se, mean + se, colour)


def kpca_loss(folder, run):
    """Fig. 1: the released projection loss over training, its terms, two that can show learning."""
    jproj, losses, capture = (read_csv(folder / f"{name}.csv", run, layer="all")
                              for name in ("jproj", "losses", "capture"))
    if not jproj:
        return None, "python -m studies.kernel_pca --exp jproj,capture"
    capture = [row for row in capture if row["source"] != "KPCA"]           # it reaches the most
    panels = [
        (losses, RELEASED, dict(bands=False, source="learned"),
         "Fig. 1 as released: log mean(φ² − |h|²), scale missing in φ²",
         dict(ylabel="log J (natural)")),
        (jproj, TERMS, dict(bands=False, source="learned"),
         "The two terms of Eqn 13: J = |φ(q)|² − |h|² < 0",
         dict(ylabel="mean over tokens", yscale="log")),
        (jproj, SOURCES, dict(measure="frac"),
         "Share of |φ(q)|² inside the span of the values (frac)", dict(ylim=(0, 1.05))),
        (capture, SOURCES, dict(measure="EV"), "Share of the keys' variance inside it (EV)",
         dict(ylim=(0, 1.05)))]
    steps, missing = sorted({row["step"] for row in jproj}), []
    label = "training step"
    if len(steps) == 1:
        label = f"one checkpoint, step {steps[0]:.0f}"
        missing.append("a curve needs several checkpoints of the run: here bars")
    if not losses:
        missing.append("the released loss needs studies.published_scores --exp losses")
    figure, axes = plt.subplots(2, 2, figsize=(WIDTH, 6.2))
    for ax, (rows, lines, which, title, look) in zip(axes.flat, panels):
        draw(ax, rows, "step", lines, **which)
        ax.set(**{"title": title, "xlabel": label, "ylabel": "share", **look})
        if ax.has_data():
            ax.legend(frameon=len(steps) == 1)
    return figure, "; ".join(missing)


def gamma_figure(folder, run, by_layer):
    """|gamma_i - gamma_j| (band: its std over pairs) above, eig_cos below; a column a layer."""
    cosines, gammas = (read_csv(folder / name, run, last=True)
                       for name in ("gamma_axes.csv", "gammas_axes.csv"))
    rows = [row for row in cosines if "by head" not in row["measure"]]
    if not rows:
        return None, "python -m studies.kernel_pca --exp gamma"
    rows += gammas
    layers = sorted({row["layer"] for row in rows} - {"all"}, key=int) if by_layer else ["all"]
    figure, axes = plt.subplots(2, len(layers), figsize=(max(WIDTH, 1.5 * len(layers)), 4.7),
                                sharex=True, sharey="row", squeeze=False)
    for layer, (top, bottom) in zip(layers, axes.T):
        draw(top, rows, "axis", GAMMA, bands=False, marker=None, layer=layer)
        for measure, colour in (("numeric inverse", "tab:blue"), ("|dgamma|", "tab:red")):
            xs, mean, _ = curve(rows, "axis", measure=measure, source="learned", layer=layer)
            std = curve(rows, "axis", measure=f"{measure} std", source="learned", layer=layer)[1]
            band(top, xs, mean, mean + std, colour)
        draw(bottom, rows, "axis", SOURCES, marker=None, measure="eig_cos", layer=layer)
        top.set(title=f"layer {layer}" if by_layer else "mean of all layers", yscale="log")
        bottom.set(xlabel="column d", ylim=(0, 1.05))
    axes[0, 0].set_ylabel("mean |γi − γj|, as defined")
    axes[1, 0].set_ylabel("cosine of a and K̃a")
    legend(figure, axes[0, 0], "lower left", title="upper row: near 0 for noise as well")
    legend(figure, axes[1, 0], "lower right", title="lower row: 1 for eigenvectors only")
    return figure, "" if gammas else "|γi − γj| needs studies.published_scores --exp gammas"


def kpca_gamma(folder, run):
    """Fig. 2: are values eigenvectors? |gamma_i - gamma_j| as printed, cosine of a and K~ a."""
    return gamma_figure(folder, run, by_layer=False)


def kpca_gamma_layers(folder, run):
    """Fig. 5: the same for every layer, the paper's definition above, the cosine below."""
    return gamma_figure(folder, run, by_layer=True)


# --- results.jsonl of eval_robust.py --------------------------------------------------------------

CONDITIONS = {                                            # what a budget means
    "eps in 1/255 of the pixel range": dict(space="pixel", labels="true", clip=True),
    "eps in 1/255 of normalised units, no clipping": dict(space="normalized", labels="pred",
                                                          clip=False)}


def read_results(folder, measure, run):
    """Rows of a measure, the last of each kind, of networks whose folder's name begins with run."""
    found = []
    for row in read_rows(folder / "results.jsonl"):
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


def by_kind(rows, x, y):
    """y(row) by x(row): [(kind of attention, xs, means over seeds, their deviations, seeds)]."""
    groups, kinds, found = {}, {}, []
    for row in rows:
        kinds[group(row)] = row["kind"]
        groups.setdefault(group(row), {}).setdefault(x(row), []).append(y(row))
    for name, values in groups.items():
        means = np.array([np.mean(t) for t in values.values()])
        stds = np.array([np.std(t, ddof=1) if len(t) > 1 else 0.0 for t in values.values()])
        found.append((kinds[name], list(values), means, stds, max(map(len, values.values()))))
    return found


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


# --- the command ----------------------------------------------------------------------------------

FIGURES = {"kpca": {"loss": kpca_loss, "gamma": kpca_gamma, "gamma_layers": kpca_gamma_layers},
           "robust": {"sweep": sweep, "corruptions_error": corruptions}}
FILES = {"kpca": ("*.csv", "holds no CSV file of studies.kernel_pca"),
         "robust": ("results.jsonl", "has no results.jsonl of eval_robust.py")}


def get_args():
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=["log", *FIGURES], help="log: of training runs; kpca: numbers "
                   "of kernel_pca and published_scores; robust: of eval_robust.py")
    p.add_argument("folder", nargs="+", type=Path, help="their --out_dir; the PNG files go there "
                   "(log: several runs; the file goes to the first)")
    p.add_argument("--run", nargs="+", default=[], metavar="NAME",
                   help="kpca, robust: only runs whose folder's name begins so")
    args = p.parse_args()
    if args.what != "log" and len(args.folder) > 1:
        p.error(f"{args.what} takes one folder")
    return args


def main():
    args = get_args()
    folder = args.folder[0]
    if args.what == "log":
        logs(args.folder).savefig(folder / "curves.png")
        return print(f"{folder / 'curves.png'}: {logs.__doc__}")
    pattern, lack = FILES[args.what]
    if not list(folder.glob(pattern)):
        raise ValueError(f"{folder} {lack}")
    for name, draw_it in FIGURES[args.what].items():
        figure, missing = draw_it(folder, tuple(args.run) or "")
        if figure is None:
            print(f"{name}: skipped, {folder} has no numbers for it: {missing}")
            continue
        path = folder / ("_".join([name, *args.run]) + ".png")
        figure.savefig(path)
        plt.close(figure)
        lacking = f" Missing: {missing}." if missing else ""
        print(f"{path}: {draw_it.__doc__}{lacking}")


if __name__ == "__main__":
    common.run(main)
