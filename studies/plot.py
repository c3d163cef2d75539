"""Figures from the numbers that the other scripts write. Needs matplotlib; imports nothing of ours.

    python -m studies.plot kpca out/kpca                   # whatever its CSV files allow
    python -m studies.plot kpca out/kpca --run softmax     # mean of softmax_s0, softmax_s1
    python -m studies.plot robust out/shapes_rpc/robust    # accuracy against eps, errors by type

One function draws one figure: it reads the numbers in a folder and returns a figure and what it
lacks, or None and the command that would bring the numbers.
"""

import argparse
import csv
import json
import math
import sys
from pathlib import Path

if not __package__:
    sys.exit("error: start this in the repository's folder, as: python -m studies.plot")
try:
    import matplotlib
except ImportError:
    sys.exit("error: studies.plot needs matplotlib: pip install matplotlib")
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

plt.rcParams.update({"figure.dpi": 100, "figure.constrained_layout.use": True, "font.size": 9,
                     "axes.titlesize": 9.5, "legend.fontsize": 8, "axes.spines.top": False,
                     "axes.spines.right": False})
WIDTH = 9                                                  # inches; 900 px, what a README shows


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
WORDS = ("run", "layer", "measure", "source", "how")       # columns that are no numbers


def read_csv(path, run="", **only):
    """Rows of a CSV file as dicts; [] without the file.

    Only those of runs whose name begins with `run`, with the given values in the other columns.
    """
    if not path.exists():
        return []
    with open(path, newline="") as f:
        rows = [{k: t if k in WORDS else float(t) for k, t in row.items()}
                for row in csv.DictReader(f)]
    return [row for row in rows if row["run"].startswith(run)
            and all(row[k] == v for k, v in only.items())]


def curve(rows, x, **only):
    """(x, mean, se) of rows with the given values, sorted by x, averaged over other columns."""
    groups = {}
    for row in rows:
        if all(row[k] == v for k, v in only.items()):
            groups.setdefault(row[x], []).append((row["mean"], row["se"]))
    xs = sorted(groups)
    means = np.array([np.mean(groups[x], axis=0) for x in xs]).reshape(-1, 2)
    return np.array(xs), means[:, 0], means[:, 1]


def band(ax, xs, low, high, colour):
    ax.fill_between(xs, low, high, color=colour, alpha=0.2, linewidth=0)


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


def legend(figure, ax, where, **look):
    """The labels of ax, outside of all panels."""
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc=f"outside {where}", frameon=False, **look)


def last_step(rows):
    """The rows of the last checkpoint of each run."""
    last = {}
    for row in rows:
        last[row["run"]] = max(last.get(row["run"], -math.inf), row["step"])
    return [row for row in rows if row["step"] == last[row["run"]]]


def layers_of(rows):
    return sorted({row["layer"] for row in rows} - {"all"}, key=int)


# --- kpca -----------------------------------------------------------------------------------------

RELEASED = [line("tab:blue", "-", "with |h|²", measure="J official"),
            line("black", "--", "with |h|² left out", measure="J official without h")]
TERMS = [line("tab:purple", "-", "|φ(q)|², what is projected", measure="phi2"),
         line("tab:blue", "-", "|h|², its 'projection'", measure="h2")]


def kpca_loss(folder, run):
    """Fig. 1: the released projection loss over training, its terms, two that can show learning."""
    rows = read_csv(folder / "jproj.csv", run, layer="all")
    published = read_csv(folder / "losses.csv", run, layer="all")
    capture = read_csv(folder / "capture.csv", run, layer="all")
    if not rows:
        return None, "python -m studies.kernel_pca --exp jproj,capture"
    steps = sorted({row["step"] for row in rows})
    missing = ["a curve needs several checkpoints of the run: here bars"] if len(steps) == 1 else []
    figure, ((released, terms), (frac, ev)) = plt.subplots(2, 2, figsize=(WIDTH, 6.2))

    # Above: what was published, and its two terms.
    draw(released, published, "step", RELEASED, bands=False, source="learned")
    if not released.has_data():
        missing.append("the released loss needs studies.published_scores --exp losses")
        released.text(0.5, 0.5, "studies.published_scores --exp losses", ha="center",
                      transform=released.transAxes)
    released.set(title="Fig. 1 as released: log mean(φ² − |h|²), scale missing in φ²",
                 ylabel="log J (natural)")
    draw(terms, rows, "step", TERMS, bands=False, source="learned")
    terms.set(title="The two terms of Eqn 13: J = |φ(q)|² − |h|² < 0", ylabel="mean over tokens",
              yscale="log")

    # Below: what no v -> v R changes.
    draw(frac, rows, "step", SOURCES, measure="frac")
    frac.set(title="Share of |φ(q)|² inside the span of the values (frac)", ylabel="share",
             ylim=(0, 1.05))
    others = [row for row in capture if row["source"] != "KPCA"]            # it reaches the most
    draw(ev, others, "step", SOURCES, measure="EV")
    ev.set(title="Share of the keys' variance inside it (EV)", ylabel="share", ylim=(0, 1.05))
    label = "training step" if len(steps) > 1 else f"one checkpoint, step {steps[0]:.0f}"
    for ax in (released, terms, frac, ev):
        ax.set_xlabel(label)
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


def draw_gamma(ax, rows, **only):
    """Mean of |gamma_i - gamma_j| per axis; band: its standard deviation over pairs, upwards."""
    draw(ax, rows, "axis", GAMMA, bands=False, marker=None, **only)
    for measure, colour in (("numeric inverse", "tab:blue"), ("|dgamma|", "tab:red")):
        xs, mean, _ = curve(rows, "axis", measure=measure, source="learned", **only)
        std = curve(rows, "axis", measure=f"{measure} std", source="learned", **only)[1]
        band(ax, xs, mean, mean + std, colour)
    ax.set_yscale("log")


def draw_cosine(ax, rows, **only):
    draw(ax, rows, "axis", SOURCES, marker=None, measure="eig_cos", **only)
    ax.set_ylim(0, 1.05)


def gamma_rows(folder, run, **only):
    """Curves over axes at the last step, of kernel_pca and of published_scores."""
    files = [folder / name for name in ("gamma_axes.csv", "gammas_axes.csv")]
    rows = [last_step(read_csv(path, run, **only)) for path in files]
    missing = "" if rows[1] else "|γi − γj| needs studies.published_scores --exp gammas"
    return rows[0] and rows[0] + rows[1], missing


def kpca_gamma(folder, run):
    """Fig. 2: are values eigenvectors? |gamma_i - gamma_j| as printed, cosine of a and K~ a."""
    rows, missing = gamma_rows(folder, run, layer="all")
    if not rows:
        return None, "python -m studies.kernel_pca --exp gamma"
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 3.6))
    draw_gamma(left, rows)
    left.set(title="Fig. 2 as defined: near 0 (band: + std), but for noise as well",
             ylabel="mean |γi − γj|")
    draw_cosine(right, rows)
    right.set(title="As it should be: 1 for eigenvectors only", ylabel="cosine of a and K̃a")
    for ax, side in ((left, "left"), (right, "right")):
        ax.set_xlabel("column d of the values")
        legend(figure, ax, f"lower {side}")
    return figure, missing


def kpca_gamma_layers(folder, run):
    """Fig. 5: the same for every layer, the paper's definition above, the cosine below."""
    rows, missing = gamma_rows(folder, run)
    layers = layers_of(rows)
    if not layers:
        return None, "python -m studies.kernel_pca --exp gamma"
    columns = min(6, len(layers))
    bands = math.ceil(len(layers) / columns)
    figure, axes = plt.subplots(2 * bands, columns, figsize=(WIDTH, 3.6 * bands + 1.1),
                                sharex=True, sharey="row", squeeze=False)
    for i in range(bands * columns):
        top, bottom = axes[2 * (i // columns):, i % columns][:2]
        if i >= len(layers):
            top.set_visible(False)
            bottom.set_visible(False)
            continue
        draw_gamma(top, rows, layer=layers[i])
        draw_cosine(bottom, rows, layer=layers[i])
        top.set_title(f"layer {layers[i]}")
        bottom.set_xlabel("column d")
        bottom.tick_params(labelbottom=True)
    for top, bottom in axes[:, 0].reshape(bands, 2):
        top.set_ylabel("|γi − γj|  (Fig. 5)")
        bottom.set_ylabel("cosine of a and K̃a")
    legend(figure, axes[0][0], "lower left", title="upper row")
    legend(figure, axes[1][0], "lower right", title="lower row")
    return figure, missing


def kpca_spectrum(folder, run):
    """Eigenvalues of the centred Gram matrix by rank, with their bound and the paper's numbers."""
    rows = last_step(read_csv(folder / "eigstats_axes.csv", run))
    bounds = last_step(read_csv(folder / "eigstats.csv", run, measure="bound", layer="all"))
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


def kpca_truncation(folder, run):
    """Accuracy when the values of all layers keep r directions only."""
    rows = last_step(read_csv(folder / "truncate.csv", run))
    if not rows:
        return None, "python -m studies.kernel_pca --exp truncate (of an image classifier)"
    rows = [{**row, "mean": row["accuracy"]} for row in rows]
    figure, ax = plt.subplots(figsize=(WIDTH, 4.2))
    for colour, style, label, which in TRUNCATIONS:
        xs, mean, se = curve(rows, "r", **which)
        ax.errorbar(xs, mean, se, color=colour, linestyle=style, marker="o", markersize=3,
                    capsize=2, label=label)
    floors = {"none": "unchanged", "mean v": "every value = their mean", "v = 0": "values 0"}
    for how, label in floors.items():
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


# --- robustness (eval_robust.py) ------------------------------------------------------------------

def read_results(folder, **only):
    """Rows of results.jsonl in pixel units with true labels and clipping, the last of each kind."""
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    return [row for row in rows if row["conditions"]["space"] == "pixel"
            and row["conditions"]["labels"] == "true" and row["conditions"]["clip"]
            and all(row[k] == v for k, v in only.items())]


def robust_sweep(folder, _):
    """Fig. 3 (left): accuracy against the budget, FGSM and PGD; mean over seeds, band: one std."""
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 3.4), sharey=True)
    clean = read_results(folder, measure="clean")
    for ax, measure in zip(axes, ("fgsm", "pgd")):
        rows = read_results(folder, measure=measure)
        for i, kind in enumerate(dict.fromkeys(row["kind"] for row in rows)):
            groups = {0.0: [row["top1"] for row in clean if row["kind"] == kind]}
            for row in rows:
                if row["kind"] == kind:
                    groups.setdefault(255 * row["setting"]["eps"], []).append(row["top1"])
            xs = np.array(sorted(x for x in groups if groups[x]))
            mean, std = (np.array([f(groups[x]) for x in xs]) for f in (np.mean, np.std))
            ax.plot(xs, mean, f"C{i}", marker="o", markersize=3,
                    label=f"{kind} (n = {len(groups[xs[-1]])})")
            ax.fill_between(xs, mean - std, mean + std, color=f"C{i}", alpha=0.2, linewidth=0)
        n = f", {rows[0]['images']} images" if rows else ""
        ax.set(title=f"{measure.upper()}{n}", xlabel="eps in 1/255 of the pixel range",
               ylim=(0, None))
    axes[0].set_ylabel("top-1 accuracy in %")
    axes[0].legend(frameon=False)
    return figure, ""


def robust_corruptions(folder, _):
    """Top-1 error of every corruption type, mean of severities and seeds, with one std."""
    rows = read_results(folder, measure="corruptions")
    most = max((row["images"] for row in rows), default=0)                  # of several runs
    rows = [row for row in rows if row["images"] == most]
    types = list(dict.fromkeys(row["setting"]["type"] for row in rows))
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    if not types:
        return None, "the corruptions of eval_robust.py"
    figure, ax = plt.subplots(figsize=(WIDTH, 3.8))
    for i, kind in enumerate(kinds):
        errors = {t: [] for t in types}
        for row in rows:
            if row["kind"] == kind:
                errors[row["setting"]["type"]].append(100 - np.mean(row["top1"]))
        x = np.arange(len(types)) + (i - (len(kinds) - 1) / 2) * 0.8 / len(kinds)
        mean, std = ([f(e) for e in errors.values()] for f in (np.mean, np.std))
        ax.bar(x, mean, 0.8 / len(kinds), yerr=std, capsize=1.5, error_kw={"linewidth": 0.8},
               label=f"{kind} (n = {max(map(len, errors.values()))})")
    names = [t.replace("_", " ") for t in types]
    ax.set_xticks(range(len(types)), names, rotation=40, ha="right")
    ax.set_ylabel(f"top-1 error in %, {most} images")
    ax.legend(frameon=False, ncols=2)
    return figure, ""


# --- the command ----------------------------------------------------------------------------------

FIGURES = {"kpca": {"loss": kpca_loss, "gamma": kpca_gamma, "gamma_layers": kpca_gamma_layers,
                    "spectrum": kpca_spectrum, "truncation": kpca_truncation},
           "robust": {"sweep": robust_sweep, "corruptions_error": robust_corruptions}}
FILES = {"kpca": ("*.csv", "holds no CSV file of studies.kernel_pca"),
         "robust": ("results.jsonl", "has no results.jsonl of eval_robust.py")}


def get_args(argv=None):
    figures = [f"  {name:18s} {draw.__doc__}" for draws in FIGURES.values()
               for name, draw in draws.items()]
    p = argparse.ArgumentParser(description=__doc__, epilog="\n".join(["figures:", *figures]),
                                formatter_class=argparse.RawDescriptionHelpFormatter,
                                allow_abbrev=False)
    p.add_argument("what", choices=list(FIGURES), help="whose numbers: studies.kernel_pca's and "
                   "published_scores', or eval_robust.py's")
    p.add_argument("folder", help="their --out_dir; the PNG files go there too")
    p.add_argument("--run", default="", help="kpca: mean of runs whose name begins so; default: of "
                   "all")
    return p.parse_args(argv)


def main():
    args = get_args()
    folder, (pattern, lack) = Path(args.folder), FILES[args.what]
    if not list(folder.glob(pattern)):
        sys.exit(f"error: {folder} {lack}")
    for name, draw in FIGURES[args.what].items():
        figure, missing = draw(folder, args.run)
        if figure is None:
            print(f"{name}: skipped, {folder} has no numbers for it: {missing}")
            continue
        path = folder / f"{name}{args.run and '_' + args.run}.png"
        figure.savefig(path)
        plt.close(figure)
        lacking = f" Missing: {missing}." if missing else ""
        print(f"{path}: {draw.__doc__}{lacking}")


if __name__ == "__main__":
    main()
