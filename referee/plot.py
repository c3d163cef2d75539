"""Figures from the numbers that the other scripts write. Needs matplotlib.

    python -m referee.plot log out/a out/b  # curves of training runs, side by side
    python -m referee.plot kpca out/kpca                   # whatever its CSV files allow
    python -m referee.plot kpca out/kpca --run softmax     # mean of softmax_s0, softmax_s1
    python -m referee.plot robust out/shapes_rpc/robust    # accuracy against eps
    python -m referee.plot robust out/rows --run symmetric rpc  # of some of its networks

One function draws one figure: it reads the numbers in a folder and returns a figure and what it
lacks, or None and the command that would bring the numbers.
"""

import argparse
import json
import re
import sys
from pathlib import Path

import numpy as np

import common
from robust.metrics import wilson
from robust.results import group, identity, read_rows
from referee.probe import read_csv

try:
    import matplotlib.pyplot as plt
except ImportError:
    sys.exit("error: referee.plot needs matplotlib: pip install matplotlib")

plt.switch_backend("Agg")                                  # no screen
plt.rcParams.update({"figure.dpi": 100, "figure.constrained_layout.use": True, "font.size": 11.5,
                     "axes.titlesize": 11.5, "legend.fontsize": 10, "axes.spines.top": False,
                     "axes.spines.right": False})
WIDTH = 9                                                  # inches
COLOURS = dict(softmax="dimgray", symmetric="tab:blue", rpc="tab:red")     # fixed in all figures
RPC = ("rpc", "no-shrink", "clamp", "admm", "paper", "released", "uniform")


# --- what all figures share -----------------------------------------------------------------------

def colour_of(arm):
    """The fixed colour of an arm's family: softmax grey, symmetric blue, RPC red, others olive."""
    first = re.split(", | - ", arm.removesuffix("-adv"))[0]         # of "arm - baseline"
    name = re.sub("^(long|half|flat)-", "", first)
    return COLOURS.get("rpc" if name.startswith(RPC) else name.split("-e")[0], "tab:olive")


def band(ax, xs, low, high, colour):
    ax.fill_between(xs, low, high, color=colour, alpha=0.2, linewidth=0)


def legend(figure, ax, where, **look):
    """The labels of ax, outside of all panels."""
    named = {label: handle for handle, label in zip(*ax.get_legend_handles_labels())}
    figure.legend(named.values(), named.keys(), loc=f"outside {where}", frameon=False, **look)


def save(figure, path):
    figure.savefig(path)
    plt.close(figure)


def forest(groups, names, path, what):
    """Draw differences with their intervals on one axis, arms in rows, a panel a measure.

    groups: (title, [(arm, [Difference of each measure], [p after Holm of each])]). Filled:
    significant. Dashed: adversarially trained. Intervals of two seeds are too wide to draw.
    """
    lines, across = sum(len(rows) + bool(title) for title, rows in groups), min(4, len(names))
    down = -(-len(names) // across)
    figure, axes = plt.subplots(down, across, sharex=True, sharey=True, squeeze=False,
                                figsize=(WIDTH, 0.9 + down * (0.4 + 0.21 * lines)))
    ticks, titles = [], []
    for title, rows in groups:
        titles += [title] if title else []
        ticks += [title] if title else []
        for arm, gaps, p in rows:
            for ax, d, own in zip(axes.flat, gaps, p):
                look = dict(color=colour_of(arm))
                if d.n > 2:
                    ax.plot([d.low, d.high], [len(ticks)] * 2, linewidth=1.5,
                            linestyle="--" if arm.endswith("-adv") else "-", **look)
                ax.plot(d.mean, len(ticks), "o", markersize=5, **look,
                        markerfacecolor=look["color"] if own < 0.05 else "white")
            ticks.append(arm)
    for ax, name in zip(axes.flat, names):
        ax.axvline(0, color="black", linewidth=0.8)
        ax.set(title=name, ylim=(len(ticks) - 0.5, -0.5), yticks=range(len(ticks)),
               yticklabels=ticks)
        for label in ax.get_yticklabels():
            label.set_fontweight("bold" if label.get_text() in titles else "normal")
    for ax in axes.flat[len(names):]:
        ax.set_visible(False)
    figure.supxlabel(f"{what}, 95 % over seeds and images (negative: worse); filled: primary and "
                     "significant after Holm", fontsize=8.5)
    save(figure, path)


# --- log.jsonl of training runs -------------------------------------------------------------------

def log_curves(rows):
    """{panel: {line: [(step, value)]}} of a run's log: losses, evaluations, S, speed."""
    curves = {}

    def add(panel, name, value):
        curves.setdefault(panel, {}).setdefault(name, []).append((row["step"], value))

    for row in rows:
        for name in ("loss", "images_per_s", "tokens_per_s"):
            if name in row:
                add(name.replace("_per_s", " a second"), "training", row[name])
        for name, value in row.get("eval", {}).items():
            if isinstance(value, float):
                add(name, "evaluation", value)
        for layer, shares in row.get("nonzero_S", {}).items():
            for i, share in enumerate(shares, 1):
                add("share of nonzero S", f"layer {layer}, PAP step {i}", share)
    return curves


def logs(folders):
    """Curves of runs over training steps: loss, evaluations, share of nonzero S, speed."""
    runs = {}
    names = [folder.name for folder in folders]
    for folder in folders:
        name = folder.name if names.count(folder.name) == 1 else str(folder)
        runs[name] = log_curves(common.read_log(folder / "log.jsonl"))
        if not runs[name]:
            raise common.InputError(f"{folder} holds no log.jsonl of a training run")
    panels = list(dict.fromkeys(panel for curves in runs.values() for panel in curves))
    figure, axes = plt.subplots(-(-len(panels) // 2), 2, squeeze=False,
                                figsize=(WIDTH, 4.2 * -(-len(panels) // 2)))
    for ax, panel in zip(axes.flat, panels):
        for i, (run, curves) in enumerate(runs.items()):
            for j, (name, points) in enumerate(curves.get(panel, {}).items()):
                style = ":" if name == "training" and panel == "loss" else "-"
                ax.plot(*zip(*points), style, color=f"C{i}", alpha=1 / (1 + 0.2 * j),
                        label=f"{run}, {name}")
        ax.set(title=panel, xlabel="training step")
        ax.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.22))
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
        return None, "python -m referee.kernel_pca --exp jproj,capture"
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
        missing.append("the released loss needs referee.published_scores --exp losses")
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
        return None, "python -m referee.kernel_pca --exp gamma"
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
    return figure, "" if gammas else "|γi − γj| needs published_scores --exp gammas"


def kpca_gamma(folder, run):
    """Fig. 2: are values eigenvectors? |gamma_i - gamma_j| as printed, cosine of a and K~ a."""
    return gamma_figure(folder, run, by_layer=False)


def kpca_gamma_layers(folder, run):
    """Fig. 5: the same for every layer, the paper's definition above, the cosine below."""
    return gamma_figure(folder, run, by_layer=True)


# --- results.jsonl of eval_robust.py --------------------------------------------------------------

def budget(row):
    """Read an attack's eps in 1/255; of clean images: 0."""
    return 255 * row["setting"].get("eps", 0)


def by_budget(rows, name_of):
    """Sort top-1 accuracies of all seeds: {network: {budget: [per cent]}}. name_of: of a row."""
    found = {}
    for row in rows:
        found.setdefault(name_of(row), {}).setdefault(budget(row), []).append(row["top1"])
    return found


def curves(ax, networks, look=None, images=None):
    """Draw accuracy against the budget: means over seeds, bands from lowest to highest.

    networks: pairs of a name and {budget: [per cent]}. look: gives colour and line style of a name.
    images: of so many; a single seed gets its 95 % intervals over them.
    """
    for i, (name, of) in enumerate(networks):
        xs, n = sorted(of), max(map(len, of.values()))
        colour, style = look(name) if look else (f"C{i}", "-")
        ax.plot(xs, [np.mean(of[x]) for x in xs], style, color=colour, marker="o", markersize=3,
                label=f"{name} (n = {n})")
        if n == 1 and images:
            ends = [[100 * end for end in wilson(of[x][0] / 100, images)] for x in xs]
            ax.vlines([x + 0.02 * i for x in xs], *zip(*ends), color=colour)
        band(ax, xs, [min(of[x]) for x in xs], [max(of[x]) for x in xs], colour)
    ax.set_ylim(0)
    ax.legend(frameon=False)


def attacks(rows):
    """Sort rows of FGSM and PGD: {(name, all but the budget): rows}, of two budgets and more."""
    groups = {}
    for row in rows:
        if row["measure"] in ("fgsm", "pgd"):
            how = {k: v for k, v in row["setting"].items() if k != "eps"}
            how = json.dumps([how, row["conditions"], row["images"]], sort_keys=True)
            groups.setdefault((row["measure"], how), []).append(row)
    return {how: own for how, own in groups.items() if len({budget(row) for row in own}) > 1}


def sweep(folder, run):
    """Fig. 3 (left): accuracy against the budget, a panel each way to attack; over seeds."""
    rows = [row for row in read_rows(folder / "results.jsonl") if folder_of(row).startswith(run)]
    panels = attacks(rows)
    if not panels:
        return None, "FGSM or PGD at two budgets and more by eval_robust.py"
    clean = sorted((row for row in rows if row["measure"] == "clean"), key=lambda r: r["images"])
    clean = {identity(row): row for row in clean}                         # the most images of each
    figure, axes = plt.subplots(-(-len(panels) // 2), 2, sharey=True, squeeze=False,
                                figsize=(WIDTH, 3.4 * -(-len(panels) // 2)))
    for ax, ((name, _), own) in zip(axes.flat, panels.items()):
        kinds = {group(row): row["kind"] for row in own}
        start = [row for row in clean.values() if identity(row) in map(identity, own)]
        found = by_budget(start + own, group)
        ax.set(title=f"{name.upper()}, {own[0]['images']:,} images", ylabel="top-1 accuracy in %",
               xlabel=f"eps in 1/255, {own[0]['conditions']['space']} units, clean at 0")
        curves(ax, [(kinds[of], values) for of, values in found.items()],
               lambda kind: (colour_of(kind), "-"), own[0]["images"])
    for ax in axes.flat[len(panels):]:
        ax.set_visible(False)
    return figure, ""


def folder_of(row):
    """Name the run of a row's network by its folder."""
    path = Path(row["checkpoint"])
    return path.parent.name if path.suffix == ".pt" else path.name


# --- the command ----------------------------------------------------------------------------------

FIGURES = {"kpca": {"loss": kpca_loss, "gamma": kpca_gamma, "gamma_layers": kpca_gamma_layers},
           "robust": {"sweep": sweep}}
FILES = {"kpca": ("*.csv", "holds no CSV file of referee.kernel_pca"),
         "robust": ("results.jsonl", "has no results.jsonl of eval_robust.py")}


def get_args(argv):
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=["log", *FIGURES], help="log: of training runs; kpca: numbers "
                   "of kernel_pca and published_scores; robust: of eval_robust.py")
    p.add_argument("folder", nargs="+", type=Path, help="their --out_dir; the PNG files go there "
                   "(log: several runs; the file goes to the first)")
    p.add_argument("--run", nargs="+", default=[], metavar="NAME",
                   help="kpca, robust: only runs whose folder's name begins so")
    args = p.parse_args(argv)
    if args.what != "log" and len(args.folder) > 1:
        p.error(f"{args.what} takes one folder")
    return args


def main(argv=None):
    args = get_args(argv)
    folder = args.folder[0]
    if args.what == "log":
        save(logs(args.folder), folder / "curves.png")
        return print(f"{folder / 'curves.png'}: {logs.__doc__}")
    pattern, lack = FILES[args.what]
    if not list(folder.glob(pattern)):
        raise common.InputError(f"{folder} {lack}")
    for name, draw_it in FIGURES[args.what].items():
        figure, missing = draw_it(folder, tuple(args.run) or "")
        if figure is None:
            print(f"{name}: skipped, {folder} has no numbers for it: {missing}")
            continue
        path = folder / ("_".join([name, *args.run]) + ".png")
        save(figure, path)
        lacking = f" Missing: {missing}." if missing else ""
        print(f"{path}: {draw_it.__doc__}{lacking}")


if __name__ == "__main__":
    common.run(main)
