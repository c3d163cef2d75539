"""Figures from the numbers that the other scripts write. Needs matplotlib.

    python -m studies.plot kpca out/kpca                   # whatever its CSV files allow
    python -m studies.plot kpca out/kpca --run softmax     # mean of softmax_s0, softmax_s1
    python -m studies.plot robust out/shapes_rpc/robust    # accuracy against eps, errors by type
    python -m studies.plot robust out/rows --run symmetric rpc       # of some of its networks

One function draws one figure: it reads the numbers in a folder and returns a figure and what it
lacks, or None and the command that would bring the numbers.
"""

import argparse
import sys
from pathlib import Path

if not __package__:
    sys.exit("error: start this in the repository's folder, as: python -m studies.plot")

import numpy as np

from studies import plot_robust
from studies.look import WIDTH, band, legend, plt
from studies.tables import read_csv


def line(colour, style, label, **which):
    """A line of a figure: how it looks, and which rows it shows."""
    return colour, style, label, which


# The columns of kernel_pca's tables.
SOURCES = [
    line("tab:blue", "-", "learned values", source="learned"),
    line("tab:orange", "--", "null: same input, random matrix", source="x W"),
    line("tab:gray", ":", "null: random numbers", source="iid"),
    line("tab:green", "-", "exact kernel PCA", source="KPCA"),
    line("black", "-.", "most that is possible", source="best"),
    line("black", "-.", "span of all keys", source="ceiling"),
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
            place = len(ax.patches)
            ax.bar(place, mean, 0.8, yerr=se, color=colour, capsize=2, label=label)
            ax.set_xticks([])
        elif len(xs):
            ax.plot(xs, mean, style, color=colour, label=label, marker=marker, markersize=3)
        if len(xs) > 1 and bands:
            band(ax, xs, mean - se, mean + se, colour)


def layers_of(rows):
    return sorted({row["layer"] for row in rows} - {"all"}, key=int)


# --- the figures ----------------------------------------------------------------------------------

RELEASED = [line("tab:blue", "-", "with |h|²", measure="J official"),
            line("black", "--", "with |h|² left out", measure="J official without h")]
TERMS = [line("tab:purple", "-", "|φ(q)|², what is projected", measure="phi2"),
         line("tab:blue", "-", "|h|², its 'projection'", measure="h2")]


def kpca_loss(folder, run):
    """Fig. 1: the released projection loss over training, its terms, two that can show learning."""
    jproj, losses, capture = (read_csv(folder / f"{name}.csv", run, layer="all")
                              for name in ("jproj", "losses", "capture"))
    if not jproj:
        return None, "python -m studies.kernel_pca --exp jproj,capture"
    learned = dict(bands=False, source="learned")
    panels = [
        (losses, RELEASED, learned,
         "Fig. 1 as released: log mean(φ² − |h|²), scale missing in φ²",
         dict(ylabel="log J (natural)")),
        (jproj, TERMS, learned, "The two terms of Eqn 13: J = |φ(q)|² − |h|² < 0",
         dict(ylabel="mean over tokens", yscale="log")),
        (jproj, SOURCES, dict(measure="frac"),
         "Share of |φ(q)|² inside the span of the values (frac)", dict(ylim=(0, 1.05))),
        ([row for row in capture if row["source"] != "KPCA"],               # it reaches the most
         SOURCES, dict(measure="EV"), "Share of the keys' variance inside it (EV)",
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


GAMMA = [
    line("tab:blue", "-", "as printed, numeric inverse: learned", measure="numeric inverse",
         source="learned"),
    line("tab:gray", ":", "the same: random numbers", measure="numeric inverse", source="iid"),
    line("tab:red", "-", "pseudo-inverse: learned", measure="|dgamma|", source="learned"),
    line("tab:gray", "--", "the same: random numbers", measure="|dgamma|", source="iid"),
    line("black", "-", "eigenvalue λ for comparison", measure="lambda", source="KPCA"),
]


def gamma_panels(top, bottom, rows, **only):
    """Mean of |gamma_i - gamma_j| per axis (band: its standard deviation over pairs); eig_cos."""
    draw(top, rows, "axis", GAMMA, bands=False, marker=None, **only)
    for measure, colour in (("numeric inverse", "tab:blue"), ("|dgamma|", "tab:red")):
        xs, mean, _ = curve(rows, "axis", measure=measure, source="learned", **only)
        std = curve(rows, "axis", measure=f"{measure} std", source="learned", **only)[1]
        band(top, xs, mean, mean + std, colour)
    top.set_yscale("log")
    draw(bottom, rows, "axis", SOURCES, marker=None, measure="eig_cos", **only)
    bottom.set_ylim(0, 1.05)


def gamma_rows(folder, run):
    """Curves over axes at the last step, of kernel_pca and of published_scores; what is missing."""
    cosines, gammas = (read_csv(folder / name, run, last=True)
                       for name in ("gamma_axes.csv", "gammas_axes.csv"))
    cosines = [row for row in cosines if "by head" not in row["measure"]]
    missing = "" if gammas else "|γi − γj| needs studies.published_scores --exp gammas"
    return (cosines + gammas, missing) if cosines else ([], "")


def kpca_gamma(folder, run):
    """Fig. 2: are values eigenvectors? |gamma_i - gamma_j| as printed, cosine of a and K~ a."""
    rows, missing = gamma_rows(folder, run)
    if not rows:
        return None, "python -m studies.kernel_pca --exp gamma"
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 3.6))
    gamma_panels(left, right, rows, layer="all")
    left.set(title="Fig. 2 as defined: near 0 (band: + std), but for noise as well",
             ylabel="mean |γi − γj|", xlabel="column d of the values")
    right.set(title="As it should be: 1 for eigenvectors only", ylabel="cosine of a and K̃a",
              xlabel="column d of the values")
    legend(figure, left, "lower left")
    legend(figure, right, "lower right")
    return figure, missing


def kpca_gamma_layers(folder, run):
    """Fig. 5: the same for every layer, the paper's definition above, the cosine below."""
    rows, missing = gamma_rows(folder, run)
    layers = layers_of(rows)
    if not layers:
        return None, "python -m studies.kernel_pca --exp gamma"
    figure, axes = plt.subplots(2, len(layers), figsize=(max(WIDTH, 1.5 * len(layers)), 4.7),
                                sharex=True, sharey="row", squeeze=False)
    for layer, (top, bottom) in zip(layers, axes.T):
        gamma_panels(top, bottom, rows, layer=layer)
        top.set_title(f"layer {layer}")
        bottom.set_xlabel("column d")
    axes[0, 0].set_ylabel("|γi − γj|  (Fig. 5)")
    axes[1, 0].set_ylabel("cosine of a and K̃a")
    legend(figure, axes[0, 0], "lower left", title="upper row")
    legend(figure, axes[1, 0], "lower right", title="lower row")
    return figure, missing


def kpca_spectrum(folder, run):
    """Eigenvalues of the centred Gram matrix by rank, with their bound and the paper's numbers."""
    rows = read_csv(folder / "eigstats_axes.csv", run, last=True)
    bounds = read_csv(folder / "eigstats.csv", run, last=True, measure="bound", layer="all")
    layers = layers_of(rows)
    if not layers:
        return None, "python -m studies.kernel_pca --exp eigstats"
    figure, panels = plt.subplots(1, 2, figsize=(WIDTH, 3.8), sharey=True)
    for ax, source in zip(panels, ("as they are", "standardised")):
        for i, layer in enumerate(layers):
            xs, mean, _ = curve(rows, "axis", source=source, layer=layer)
            ends = i in (0, len(layers) - 1)
            ax.plot(xs, mean, color=plt.cm.viridis(0.9 * i / max(1, len(layers) - 1)),
                    label=f"layer {layer}" if ends else None)
        bound = np.mean([b["mean"] for b in bounds if b["source"] == source])
        ax.axhline(bound, color="tab:red", linestyle="--", label="bound 1 / min g, mean over heads")
        ax.axhline(1, color="tab:red", label="bound for any keys: 1")
        ax.plot([1, 64], [648.46, 4.65], "k*",
                label="the paper: largest and smallest of 64, ViT-tiny")
        ax.set(title=f"keys {source}", xlabel="rank d", yscale="log")
    panels[0].set_ylabel("eigenvalue μ = N λ of K̃")
    legend(figure, panels[0], "lower center", ncols=3)
    return figure, ""


TRUNCATIONS = [
    line("tab:green", "-", "top r principal axes (kernel PCA as derived)", how="strict"),
    line("tab:blue", "-", "top r axes + constant row", how="affine"),
    line("tab:blue", "--", "null: r random axes + row", how="affine random"),
    line("tab:blue", ":", "null: bottom r axes + row", how="affine bottom"),
    line("tab:orange", "-", "null: on the top r directions of the input", how="top r of x"),
]
FLOORS = {"none": "unchanged", "mean v": "every value = their mean", "v = 0": "values 0"}


def kpca_truncation(folder, run):
    """Accuracy when the values of all layers keep r directions only."""
    rows = read_csv(folder / "truncate.csv", run, last=True)
    if not rows:
        return None, "python -m studies.kernel_pca --exp truncate (of an image classifier)"
    rows = [{**row, "mean": row["accuracy"]} for row in rows]
    figure, ax = plt.subplots(figsize=(WIDTH, 4.2))
    for colour, style, label, which in TRUNCATIONS:
        xs, mean, se = curve(rows, "r", **which)
        ax.errorbar(xs, mean, se, color=colour, linestyle=style, marker="o", markersize=3,
                    capsize=2, label=label)
    for how, label in FLOORS.items():
        y = curve(rows, "r", how=how)[1][0]
        ax.axhline(y, color="black", linewidth=0.7)
        ax.annotate(label, (0.01, y), xycoords=("axes fraction", "data"), va="bottom", fontsize=8)
    ticks = sorted({int(row["r"]) for row in rows} - {0})
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, ticks)
    ax.minorticks_off()
    n = int(rows[0]["images"])
    ax.set(xlabel="r, directions kept of the values in every layer", ylim=(0, None),
           ylabel=f"accuracy in %, ± standard error, {n} images")
    figure.legend(loc="outside right upper", frameon=False)
    return figure, ""


# --- the command ----------------------------------------------------------------------------------

FIGURES = {"kpca": {"loss": kpca_loss, "gamma": kpca_gamma, "gamma_layers": kpca_gamma_layers,
                    "spectrum": kpca_spectrum, "truncation": kpca_truncation},
           "robust": plot_robust.FIGURES}
FILES = {"kpca": ("*.csv", "holds no CSV file of studies.kernel_pca"),
         "robust": ("results.jsonl", "has no results.jsonl of eval_robust.py")}


def get_args():
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("what", choices=FIGURES, help="numbers of studies.kernel_pca and "
                   "published_scores,\nor of eval_robust.py")
    p.add_argument("folder", help="their --out_dir; the PNG files go there too")
    p.add_argument("--run", nargs="+", default=[], metavar="NAME",
                   help="only runs whose folder's name begins so")
    return p.parse_args()


def main():
    args = get_args()
    folder, (pattern, lack) = Path(args.folder), FILES[args.what]
    if not list(folder.glob(pattern)):
        sys.exit(f"error: {folder} {lack}")
    for name, draw in FIGURES[args.what].items():
        figure, missing = draw(folder, tuple(args.run) or "")
        if figure is None:
            print(f"{name}: skipped, {folder} has no numbers for it: {missing}")
            continue
        path = folder / ("_".join([name, *args.run]) + ".png")
        figure.savefig(path)
        plt.close(figure)
        lacking = f" Missing: {missing}." if missing else ""
        print(f"{path}: {draw.__doc__}{lacking}")


if __name__ == "__main__":
    main()
