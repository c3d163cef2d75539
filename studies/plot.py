"""Figures from the numbers that the other scripts write. Needs matplotlib; imports nothing of ours.

    python -m studies.plot kpca out/kpca                   # whatever its CSV files allow
    python -m studies.plot kpca out/kpca --figures loss,spectrum --run softmax    # softmax_s0, _s1
    python -m studies.plot robust out/shapes_rpc/robust    # accuracy against eps, errors by type

One function draws one figure: it reads the numbers in a folder and returns a figure and what it
lacks, or None and what would bring the numbers.
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

# The columns of kernel_pca's tables: (colour, line style, what the legend says)
SOURCES = {
    "learned": ("tab:blue", "-", "learned values"),
    "x W": ("tab:orange", "--", "null: same input, random matrix"),
    "iid": ("tab:gray", ":", "null: random numbers"),
    "KPCA": ("tab:green", "-", "exact kernel PCA"),
    "best": ("black", "-.", "most that is possible"),
    "ceiling": ("black", "-.", "span of all keys"),
}


def read_csv(path, run="", **only):
    """Rows of a CSV file as dicts, numbers as float; [] without the file.

    Only those of runs whose name begins with `run`, with the given values in the other columns.
    """
    if not path.exists():
        return []

    def value(text):
        try:
            return float(text)
        except ValueError:
            return text

    with open(path, newline="") as f:
        rows = [{k: t if k in ("run", "layer") else value(t) for k, t in row.items()}
                for row in csv.DictReader(f)]
    return [row for row in rows if row.get("run", "").startswith(run)
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


def draw_sources(ax, rows, x, sources, marker=None, **only):
    """One line per source, with a band of one standard error; a bar where there is one x only."""
    for i, source in enumerate(sources):
        xs, mean, se = curve(rows, x, source=source, **only)
        colour, style, label = SOURCES[source]
        if len(xs) == 1:
            draw_bar(ax, i, mean, se, colour, label)
        elif len(xs):
            ax.plot(xs, mean, style, color=colour, label=label, marker=marker, markersize=3)
            ax.fill_between(xs, mean - se, mean + se, color=colour, alpha=0.2, linewidth=0)


def draw_bar(ax, i, mean, se, colour, label):
    """The i-th bar of an axis on which a curve would have one point."""
    ax.bar(i, mean, 0.8, yerr=se, color=colour, capsize=2, label=label)
    ax.set_xticks([])


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

def draw_measures(ax, rows, measures):
    """One line over training, or bar, per (measure, colour, style, label) of learned values."""
    for i, (measure, colour, style, label) in enumerate(measures):
        xs, mean, se = curve(rows, "step", measure=measure, source="learned")
        if len(xs) == 1:
            draw_bar(ax, i, mean, se, colour, label)
        elif len(xs):
            ax.plot(xs, mean, style, color=colour, marker="o", markersize=3, label=label)


RELEASED = [("J official", "tab:blue", "-", "with |h|²"),
            ("J official without h", "black", "--", "with |h|² left out")]
TERMS = [("phi2", "tab:purple", "-", "|φ(q)|², what is projected"),
         ("h2", "tab:blue", "-", "|h|², its 'projection'")]


def kpca_loss(folder, run):
    """Fig. 1: the released projection loss over training, its terms, two that can show learning."""
    rows = read_csv(folder / "jproj.csv", run, layer="all")
    published = read_csv(folder / "losses.csv", run, layer="all")
    capture = read_csv(folder / "capture.csv", run, layer="all")
    if not rows:
        return None, "studies.kernel_pca --exp jproj,capture"
    steps = sorted({row["step"] for row in rows})
    missing = ["a curve needs several checkpoints of the run: here bars"] if len(steps) == 1 else []
    figure, ((released, terms), (frac, ev)) = plt.subplots(2, 2, figsize=(WIDTH, 6.2))

    # Above: what was published, and its two terms.
    draw_measures(released, published, RELEASED)
    if not released.has_data():
        missing.append("the released loss needs studies.published_scores --exp losses")
        released.text(0.5, 0.5, "studies.published_scores --exp losses", ha="center",
                      transform=released.transAxes)
    released.set(title="Fig. 1 as released: log mean(φ² − |h|²), scale missing in φ²",
                 ylabel="log J (natural)")
    draw_measures(terms, rows, TERMS)
    terms.set(title="The two terms of Eqn 13: J = |φ(q)|² − |h|² < 0", ylabel="mean over tokens",
              yscale="log")

    # Below: what no v -> v R changes.
    sources = ["learned", "x W", "iid", "KPCA", "ceiling"]
    draw_sources(frac, rows, "step", sources, "o", measure="frac")
    frac.set(title="Share of |φ(q)|² inside the span of the values (frac)", ylabel="share")
    draw_sources(ev, capture, "step", ["learned", "x W", "iid", "best"], "o", measure="EV")
    ev.set(title="Share of the keys' variance inside it (EV)", ylabel="share")
    for ax in (frac, ev):
        ax.set_ylim(0, 1.05)
    label = "training step" if len(steps) > 1 else f"one checkpoint, step {steps[0]:.0f}"
    for ax in (released, terms, frac, ev):
        ax.set_xlabel(label)
        if ax.has_data():
            ax.legend(frameon=len(steps) == 1)
    return figure, "; ".join(missing)


GAMMA = [                                             # (measure, source, colour, style, label)
    ("numeric inverse", "learned", "tab:blue", "-", "as printed, numeric inverse: learned"),
    ("numeric inverse", "iid", "tab:gray", ":", "the same: random numbers"),
    ("|dgamma|", "learned", "tab:red", "-", "pseudo-inverse: learned"),
    ("|dgamma|", "iid", "tab:gray", "--", "the same: random numbers"),
    ("lambda", "KPCA", "black", "-", "eigenvalue λ for comparison"),
]


def draw_gamma(ax, rows, **only):
    """Mean of |gamma_i - gamma_j| per axis; band: its standard deviation over pairs, upwards."""
    for measure, source, colour, style, label in GAMMA:
        xs, mean, _ = curve(rows, "axis", measure=measure, source=source, **only)
        if len(xs):
            ax.plot(xs, mean, style, color=colour, label=label)
            if source == "learned":
                std = curve(rows, "axis", measure=f"{measure} std", source=source, **only)[1]
                ax.fill_between(xs, mean, mean + std, color=colour, alpha=0.2, linewidth=0)
    ax.set_yscale("log")


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
        return None, "studies.kernel_pca --exp gamma"
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 3.6))
    draw_gamma(left, rows)
    left.set(title="Fig. 2 as defined: near 0 (band: + std), but for noise as well",
             ylabel="mean |γi − γj|")
    draw_sources(right, rows, "axis", ["learned", "x W", "iid", "KPCA"], measure="eig_cos")
    right.set(title="As it should be: 1 for eigenvectors only", ylabel="cosine of a and K̃a",
              ylim=(0, 1.05))
    for ax, side in ((left, "left"), (right, "right")):
        ax.set_xlabel("column d of the values")
        legend(figure, ax, f"lower {side}")
    return figure, missing


def kpca_gamma_layers(folder, run):
    """Fig. 5: the same for every layer, the paper's definition above, the cosine below."""
    rows, missing = gamma_rows(folder, run)
    layers = layers_of(rows)
    if not layers:
        return None, "studies.kernel_pca --exp gamma"
    columns = min(6, len(layers))
    bands = math.ceil(len(layers) / columns)
    figure, axes = plt.subplots(2 * bands, columns, figsize=(WIDTH, 3.6 * bands + 1.1),
                                sharex=True, sharey="row", squeeze=False)
    for ax in axes.flat:
        ax.set_visible(False)
    for i, layer in enumerate(layers):
        band, column = divmod(i, columns)
        top, bottom = axes[2 * band][column], axes[2 * band + 1][column]
        for ax in (top, bottom):
            ax.set_visible(True)
        draw_gamma(top, rows, layer=layer)
        draw_sources(bottom, rows, "axis", ["learned", "x W", "iid", "KPCA"], measure="eig_cos",
                     layer=layer)
        top.set_title(f"layer {layer}")
        bottom.set(ylim=(0, 1.05), xlabel="column d")
        bottom.tick_params(labelbottom=True)
        if column == 0:
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
        return None, "studies.kernel_pca --exp eigstats"
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


TRUNCATIONS = [("strict", "tab:green", "-", "top r principal axes (kernel PCA as derived)"),
               ("affine", "tab:blue", "-", "top r axes + constant row"),
               ("affine random", "tab:blue", "--", "null: r random axes + row"),
               ("affine bottom", "tab:blue", ":", "null: bottom r axes + row"),
               ("top r of x", "tab:orange", "-", "null: on the top r directions of the input")]


def kpca_truncation(folder, run):
    """Accuracy when the values of all layers keep r directions only."""
    rows = last_step(read_csv(folder / "truncate.csv", run))
    if not rows:
        return None, "studies.kernel_pca --exp truncate (of an image classifier)"
    rows = [{**row, "mean": row["accuracy"]} for row in rows]
    figure, ax = plt.subplots(figsize=(WIDTH, 4.2))
    for how, colour, style, label in TRUNCATIONS:
        xs, mean, se = curve(rows, "r", how=how)
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


KPCA_FIGURES = {"loss": kpca_loss, "gamma": kpca_gamma, "gamma_layers": kpca_gamma_layers,
                "spectrum": kpca_spectrum, "truncation": kpca_truncation}


def kpca(args):
    """The paper's Fig. 1, 2 and 5 (studies.kernel_pca), and what should stand there."""
    folder = Path(args.folder)
    names = args.figures.split(",") if args.figures else list(KPCA_FIGURES)
    if not set(names) <= set(KPCA_FIGURES):
        raise ValueError(f"--figures {args.figures}: expected some of {','.join(KPCA_FIGURES)}")
    if not list(folder.glob("*.csv")):
        raise FileNotFoundError(f"{folder} holds no CSV file of studies.kernel_pca")
    for name in names:
        figure, missing = KPCA_FIGURES[name](folder, args.run)
        if figure is None:
            print(f"{name}: skipped, {folder} has no numbers for it: python -m {missing}")
            continue
        path = folder / f"{name}{args.run and '_' + args.run}.png"
        figure.savefig(path)
        plt.close(figure)
        lacking = f" Missing: {missing}." if missing else ""
        print(f"{path}: {KPCA_FIGURES[name].__doc__}{lacking}")


# --- robustness (eval_robust.py) ------------------------------------------------------------------

def read_results(folder, **only):
    """Rows of results.jsonl in pixel units with true labels and clipping, the last of each kind."""
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    return [row for row in rows if row["conditions"]["space"] == "pixel"
            and row["conditions"]["labels"] == "true" and row["conditions"]["clip"]
            and all(row[k] == v for k, v in only.items())]


def robust_sweep(folder):
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
    return figure


def robust_corruptions(folder):
    """Top-1 error of every corruption type, mean of severities and seeds, with one std."""
    rows = read_results(folder, measure="corruptions")
    most = max((row["images"] for row in rows), default=0)                  # of several runs
    rows = [row for row in rows if row["images"] == most]
    types = list(dict.fromkeys(row["setting"]["type"] for row in rows))
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    if not types:
        return None
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
    return figure


def robust(args):
    """The robustness table (eval_robust.py): accuracy against eps, error of every corruption."""
    folder = Path(args.folder)
    if not (folder / "results.jsonl").exists():
        raise FileNotFoundError(f"{folder} has no results.jsonl of eval_robust.py")
    for name, draw in (("sweep", robust_sweep), ("corruptions_error", robust_corruptions)):
        figure = draw(folder)
        if figure is not None:
            figure.savefig(folder / f"{name}.png")
            plt.close(figure)
            print(f"{folder / name}.png: {draw.__doc__}")


# --- the command ----------------------------------------------------------------------------------

def get_args(argv=None):
    """Command, folder and what is to be drawn."""
    raw = dict(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    p = argparse.ArgumentParser(description=__doc__, **raw)
    commands = p.add_subparsers(required=True, metavar="COMMAND")
    figures = [f"  {name:13s} {draw.__doc__}" for name, draw in KPCA_FIGURES.items()]
    c = commands.add_parser("kpca", help=kpca.__doc__, description=kpca.__doc__,
                            epilog="\n".join(["figures:", *figures]), **raw)
    c.set_defaults(draw=kpca)
    c.add_argument("folder", help="--out_dir of studies.kernel_pca; the PNG files go there too")
    c.add_argument("--figures", default=None, help="comma-separated; default: all")
    c.add_argument("--run", default="", help="mean of runs whose name begins so; default: of all")
    c = commands.add_parser("robust", help=robust.__doc__, description=robust.__doc__, **raw)
    c.set_defaults(draw=robust)
    c.add_argument("folder", help="--out_dir of eval_robust.py; the PNG files go there too")
    return p.parse_args(argv)


def main():
    args = get_args()
    try:
        args.draw(args)
    except (ValueError, OSError) as e:
        sys.exit(f"error: {e}")


if __name__ == "__main__":
    main()
