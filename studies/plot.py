"""Draw every figure on the pages of studies/ from the stored rows. Needs matplotlib.

    python -m studies.plot                # writes each figure next to its rows
    python -m studies.plot FOLDER         # writes the figures below another folder

Each figure is written as PNG and SVG. Colours and marks come from studies/colours.py.
"""

import argparse
import re
import sys
from pathlib import Path

import numpy as np

import common
from studies import arms, kernel_pca, line, perfect_s, probe, where_is_s
from studies.arms import RESULTS, STUDIES, WORDS, files, without_recipe
from studies.colours import FAMILIES, look
from studies.stats import INSTALL, NONE

try:
    import matplotlib.pyplot as plt
    from matplotlib.patheffects import withStroke
except ModuleNotFoundError:
    sys.exit(f"error: studies.plot needs matplotlib; {INSTALL}")

plt.switch_backend("Agg")                                  # no screen is needed
plt.rcParams.update({"figure.dpi": 100, "figure.constrained_layout.use": True, "font.size": 11.5,
                     "axes.titlesize": 11.5, "legend.fontsize": 10.5, "axes.spines.top": False,
                     "axes.spines.right": False, "svg.hashsalt": "studies"})
FIGURE_WIDTH = 9                               # inches; a slide shows figures 1.5 times as large


# --- shared by all figures ------------------------------------------------------------------------

def family(arm):
    """Return the family of an arm, a key of FAMILIES in studies/colours.py."""
    name = without_recipe(arm).removesuffix("-adv")
    if name in ("uniform-l0", "paper-0.05-n4"):
        return "average"
    if re.match("rpc|no-shrink|clamp|admm|paper|released", name):
        return "rpc"
    known = {"symmetric": "symmetric", "flat": "symmetric", "softmax": "softmax"}
    return known.get(name.split(",")[0], "others")


def look_of(arm):
    """Return colour, mark and line style of an arm; adversarially trained arms have open marks."""
    if without_recipe(arm) == "symmetric-adv":
        return look("adversarial")
    return look(family(arm)) | (dict(linestyle="--", fillstyle="none") if "-adv" in arm else {})


def legend(figure, ax, where, **more):
    """Draw the labels of ax outside of all panels."""
    named = {label: handle for handle, label in zip(*ax.get_legend_handles_labels())}
    figure.legend(named.values(), named.keys(), loc=f"outside {where}", frameon=False, **more)


def band(ax, curve, **style):
    """Draw {x: values}: a curve through the means, and a band from lowest to highest value."""
    x = sorted(curve)
    ax.plot(x, [np.mean(curve[at]) for at in x], markersize=5, **style)
    ax.fill_between(x, [min(curve[at]) for at in x], [max(curve[at]) for at in x], alpha=0.15,
                    color=style["color"], linewidth=0)


def save_figure(figure, path, finding):
    """Write a figure as PNG and as SVG. finding: the title, one sentence with the result."""
    figure.suptitle(finding, fontsize=12.5, fontweight="bold")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    figure.savefig(path.with_suffix(".svg"), metadata=dict(Date=None))
    plt.close(figure)


# --- accuracy against clean loss ------------------------------------------------------------------

TICKS = (1.2, 1, 0.9, 0.4, 0.1, 0.03, 0.01)
SERIES = {"symmetric": "symmetric attention, by epochs", "rpc": "RPC",
          "average": "layer 0 only averages", "others": "other attentions",
          "adversarial": "adversarially trained", "recipe": "other recipes"}


def series(arm):
    """Return the series of the figure to which an arm belongs, a key of SERIES."""
    if arm.endswith("-adv"):
        return "adversarial"
    if arm.startswith(("flat", "your ", "timm")):
        return "recipe"
    return {"softmax": "others"}.get(family(arm), family(arm))


def line_figure(name, networks, path, finding, others=()):
    """Draw accuracy against clean loss: one panel per primary measure, one point per network."""
    primary, reference = line.PICTURES[name][3], line.reference(networks)
    figure, axes = plt.subplots(1, len(primary), figsize=(FIGURE_WIDTH, 4.9), sharex=True)
    for ax, measure in zip(axes, primary):
        for group, label in SERIES.items():
            x, y = line.points([n for n in (*networks, *others) if series(n.arm) == group], measure)
            colour, mark = FAMILIES[group]
            if len(x):
                ax.plot(np.exp(x), y, mark, color=colour, markersize=6, alpha=0.75, label=label,
                        fillstyle="none" if group == "adversarial" else "full")

        # Join the means of the baseline, and write its epochs next to them.
        curve = {}
        for n in networks:
            epochs = re.search(r"^symmetric-e(\d+)$", n.arm)
            if epochs or n.arm == "half-symmetric":
                curve.setdefault(int(epochs[1]) if epochs else 24, []).append(n)
        at = [(epochs, *line.points(curve[epochs], measure).mean(1)) for epochs in sorted(curve)]
        colour = FAMILIES["symmetric"][0]
        ax.plot([np.exp(x) for _, x, _ in at], [y for *_, y in at], color=colour, linewidth=1)
        for epochs, x, y in at:
            ax.annotate(epochs, (np.exp(x), y), (14, -14), textcoords="offset points",
                        color=colour, zorder=5,
                        path_effects=[withStroke(linewidth=3, foreground="white")])

        ends = line.ends(reference, measure)
        ax.plot(np.exp(ends), np.polyval(np.polyfit(*line.points(reference, measure), 1), ends),
                "--", color="black", linewidth=1, label="the line", zorder=0)
        x = np.exp(line.points([*networks, *others], measure)[0])
        ax.set(xscale="log", xlabel="clean test loss in nats (more training: to the right)",
               ylabel="accuracy in %", title=measure.replace("pgd", "PGD-20 at"))
        ticks = [t for t in TICKS if 0.97 * x.min() <= t <= 1.03 * x.max()]
        ax.set_xticks(ticks, [f"{t:g}" for t in ticks])
        ax.set_xticks([], minor=True)
        ax.margins(y=0.08)
    axes[0].invert_xaxis()                                  # both panels share this axis
    legend(figure, axes[0], "lower center", ncols=4, columnspacing=1, handletextpad=0.3)
    save_figure(figure, path, finding)


# --- differences of pairs -------------------------------------------------------------------------

# {figure: {title of rows: [(comparison, arm, baseline, label)]}}
FOREST = {"rpc": {
    "scenes, 8 epochs, minus symmetric attention": [
        ("scenes", "rpc4-l1", "symmetric", "RPC, as published"),
        ("confirmation", "rpc4-l1", "symmetric", "the same, fresh seeds"),
        ("scenes", "rpc2-all", "symmetric", "in all layers, 2 steps"),
        ("scenes", "no-shrink", "symmetric", "without its sparse part"),
        ("scenes", "admm", "symmetric", "with the settings of ADMM"),
        ("thirteen", "paper-0.05-n4", "symmetric", "chosen settings, unplanned")],
    "minus a layer that averages": [
        ("lambda-0", "paper-0.05-n4", "uniform-l0", "chosen settings")],
    "other training": [
        ("24-epochs", "long-rpc4-l1", "long-symmetric", "24 epochs"),
        ("one-rate", "long-rpc4-l1", "half-symmetric", "24 epochs, one learning rate"),
        ("finetune", "rpc4-l1", "symmetric", "RPC for the last three epochs"),
        ("added", "rpc4-l1-adv", "symmetric-adv", "both adversarially trained")],
    "CIFAR-10, 12 epochs, PGD-20 at 1/255": [
        ("cifar10-12", "rpc4-l1-e12", "symmetric-e12", "RPC, as published")]},
 "others": {
    "scenes, 8 epochs, minus symmetric attention": [
        *(("ten", arm, "symmetric", WORDS[arm]) for arm in (
            "keys-rows", "keys", "weights", "rkde-huber", "rkde-hampel", "sinkhorn", "mom")),
        ("softmax", "softmax-e8", "symmetric-e8", "softmax attention"),
        ("lambda-0", "uniform-l0", "symmetric-e8", "layer 0 averages"),
        ("control", "symmetric-adv", "symmetric", "adversarial training")],
    "24 epochs": [
        ("24-epochs", "long-softmax", "long-symmetric", "softmax attention"),
        ("24-epochs", "long-uniform-l0", "long-symmetric", "layer 0 averages")]}}


def forest(groups, path, finding):
    """Draw differences with their 95 % intervals, one row per pair.

    A filled mark is significant after Holm's correction within its comparison.
    """
    rows = sum(len(pairs) + 1 for pairs in groups.values())
    figure, axes = plt.subplots(1, 2, sharey=True, figsize=(FIGURE_WIDTH, 1.4 + 0.3 * rows))
    ticks, bold = [], []
    for title, pairs in groups.items():
        bold.append(len(ticks))
        ticks.append(title)
        for comparison, arm, base, label in pairs:
            study, found = arms.comparison(comparison)
            for ax, measure in zip(axes, sorted(study.primary)):
                key = measure, arm, base
                d, p = found.gaps.get(key, NONE), found.p.get(key, 1)
                colour, mark = look_of(arm)["color"], look_of(arm)["marker"]
                ax.plot([d.low, d.high], [len(ticks)] * 2, color=colour, linewidth=1.5)
                ax.plot(d.mean, len(ticks), mark, color=colour, markersize=6,
                        markerfacecolor=None if p < 0.05 else "white")
            ticks.append(f"{label} ({d.n})")
    for ax, title in zip(axes, ("15 corruptions", "PGD-20 at 2/255")):
        ax.axvline(0, color="black", linewidth=0.8)
        ax.set(title=title, xlabel="points of accuracy", ylim=(len(ticks) - 0.5, -0.5),
               yticks=range(len(ticks)), yticklabels=ticks)
        ax.xaxis.set_major_locator(plt.MaxNLocator(5, integer=True))
        for i, label in enumerate(ax.get_yticklabels()):
            label.set(fontweight="bold" if i in bold else "normal", fontsize=10)
    save_figure(figure, path, finding)


# --- accuracy against the attack budget -----------------------------------------------------------

DEFENDED = "symmetric", "rpc4-l1", "symmetric-adv", "rpc4-l1-adv"


def budget_figure(panels, path, shown, finding):
    """Draw accuracy against the budget of PGD, one panel per entry of {title: Rows}.

    A curve is the mean over the seeds of an arm in `shown`; its band goes from lowest to highest.
    """
    figure, axes = plt.subplots(1, len(panels), sharey=True, squeeze=False,
                                figsize=(FIGURE_WIDTH, 4.7))
    for ax, (title, rows) in zip(axes[0], panels.items()):
        curves = {arm: {} for arm in shown}
        for row in rows:
            if row.kind in ("pgd", "clean") and without_recipe(row.arm) in curves:
                curves[without_recipe(row.arm)].setdefault(row.eps, []).append(row.top1)
        for arm, curve in curves.items():
            band(ax, curve, label=WORDS[arm], **look_of(arm))
        ax.axhline(50, color="black", linewidth=0.8, linestyle=":")
        ax.set(title=title, xlabel="eps in 1/255 of the pixel range (0: clean)", ylim=(0, 102))
    axes[0][0].set_ylabel("accuracy in %")
    legend(figure, axes[0][0], "lower center", ncols=2)
    save_figure(figure, path, finding)


# --- lambda ---------------------------------------------------------------------------------------

def trained_with_lambda():
    """Yield a dict per network that was trained with some lambda: form, lambd, top1, entropy.

    entropy: of layer 0, nan if it was not measured.
    """
    entropy = {row["run"]: row.get("entropy", np.nan) for path in files(line.PICTURES["fresh"][2])
               for row in common.read_log(path)}
    for n in line.stored("fresh"):
        arm = {"uniform-l0": "paper-0-n4", "rpc4-l1": "released-4-n4"}.get(n.arm, n.arm)
        if found := re.fullmatch(r"(paper|released)-(.+)-n4", arm):
            yield dict(form=found[1], lambd=float(found[2]), top1=n.accuracy["clean"],
                       entropy=entropy.get(f"{n.arm}_s{n.seed}", np.nan))


def lambda_figure(path, finding):
    """Draw clean accuracy and entropy of layer 0 against lambda, one column per variant of PAP.

    Curves: two shipped networks; lambda is changed in layer 0 without training. Plus signs:
    networks that were trained with this lambda.
    """
    rows, trained = common.read_log(RESULTS / "line/lambda.jsonl"), list(trained_with_lambda())
    lambdas = sorted({row["lambd"] for row in rows})
    shown = dict(top1="clean accuracy in %", entropy="entropy of layer 0\nin nats")
    figure, axes = plt.subplots(2, 2, figsize=(FIGURE_WIDTH, 5.5), sharex=True, sharey="row")
    for column, form in zip(axes.T, ("paper", "released")):
        for ax, name in zip(column, shown):
            for network, arm, label in (("shapes_rpc", "rpc4-l1", "trained with RPC"),
                                        ("shapes_symmetric", "symmetric", "trained without")):
                own = [r for r in rows if (r["network"], r["form"]) == (network, form)]
                ax.plot([lambdas.index(r["lambd"]) for r in own], [r[name] for r in own],
                        markersize=4, **look_of(arm), label=f"{label}; then this lambda")
            own = [r for r in trained if r["form"] == form and r[name] == r[name]]
            ax.plot([lambdas.index(r["lambd"]) for r in own], [r[name] for r in own], "P",
                    markersize=7, fillstyle="none", color="black", label="trained with this lambda")
            ax.set_ylabel(shown[name] if form == "paper" else None)
        column[1].axhline(rows[0]["uniform"], color="black", linewidth=0.8, linestyle=":")
        column[0].set_title(f"variant “{form}”, 4 steps")
        column[1].set(xlabel="lambda", xticks=range(len(lambdas)))
        column[1].set_xticklabels([f"{x:g}".replace("inf", "∞") for x in lambdas], rotation=60)
    legend(figure, axes[0, 0], "lower center", ncols=3, columnspacing=1)
    save_figure(figure, path, finding)


# --- forced values --------------------------------------------------------------------------------

AXES = {"hashed": "drawn for\neach image", "image": "another\nimage's", "x": "the\ninput's",
        "other": "another\nhead's", "own": "kernel\nPCA's own", "detached": "own, no\ngradient",
        "mean": "kernel PCA's\nmean", "random": "random,\nfixed"}
VARYING = 6                                     # the first 6 kinds differ from image to image


def axes_figure(path, finding):
    """Draw held-out losses by kind of axes: one point per network, one line per seed.

    Bars show the means over seeds.
    """
    rows = [row for row in common.read_log(RESULTS / "decider/constancy.jsonl")
            if row["arm"].startswith("span-")]
    losses = {(row["seed"], row["arm"].removeprefix("span-")): row["loss"] for row in rows}
    figure, ax = plt.subplots(figsize=(FIGURE_WIDTH, 4.1))
    for seed in sorted({seed for seed, _ in losses}):
        ax.plot([losses[seed, axes] for axes in AXES], "o-", color="0.6", linewidth=0.8,
                markersize=4)
    for i, axes in enumerate(AXES):
        mean = np.mean([loss for (_, name), loss in losses.items() if name == axes])
        ax.plot([i - 0.2, i + 0.2], [mean, mean], linewidth=3,
                color="#d55e00" if axes in ("own", "detached", "mean") else "black")
    ax.axvline(VARYING - 0.5, color="black", linewidth=0.8, linestyle=":")
    ax.set_xticks(range(len(AXES)), AXES.values())
    ax.text(VARYING - 0.6, 1.79, "axes differ from image to image", ha="right")
    ax.text(VARYING - 0.4, 1.79, "the same for all")
    ax.set(ylabel="held-out loss in nats", ylim=(1.56, 1.82), yticks=[1.6, 1.7, 1.8])
    save_figure(figure, path, finding)


# --- kernel PCA -----------------------------------------------------------------------------------

def training_figure(path, finding):
    """Draw the eigen-cosine over training: next to its controls, and minus a random matrix."""
    rows = probe.read_csv(RESULTS / "kpca/trained.csv")
    epochs = [step / 250 for step in kernel_pca.TRAINING_STAGES]

    def over(network, measure, source):
        return np.array([kernel_pca.seed_means(rows, network, measure, source, step)
                         for step in kernel_pca.TRAINING_STAGES])        # (stages, seeds)

    figure, (left, right) = plt.subplots(1, 2, figsize=(FIGURE_WIDTH, 4.2))
    for source, style, label in (
            ("learned", "o-", "learned values"), ("x W", "s--", "random matrix"),
            ("other", "D:", "another head's"), ("iid", "v-.", "noise")):
        left.plot(epochs, over("softmax", "eig_cos", source).mean(1), style, markersize=5,
                  label=label, color="black" if source == "learned" else None)
    best = kernel_pca.seed_means(rows, "softmax", "eig_cos", "fitted to eig_cos")
    left.plot(epochs[-1:], [best.mean()], "*", markersize=12, color="black", label="best linear")
    left.set(title="eigen-cosine, softmax networks", ylim=(0, 1))
    for network in ("softmax", "symmetric"):
        gap = over(network, "eig_cos: learned -", "x W")
        right.plot(epochs, gap, linewidth=0.7, alpha=0.6, color=look_of(network)["color"])
        right.plot(epochs, gap.mean(1), linewidth=2, **look_of(network), label=WORDS[network])
    right.axhline(0, color="black", linewidth=0.8, linestyle=":")
    right.set(title="learned values minus random matrix", ylim=(-0.001, 0.0045))
    for ax in (left, right):
        ax.set(xlabel="epochs of training", xticks=epochs)
        ax.legend(frameon=False, loc="upper right")
    save_figure(figure, path, finding)


# --- where is S? ----------------------------------------------------------------------------------

def where_figure(path, finding):
    """Draw RPC as published over training: the mean of its seeds, with a band for their range.

    The first panel has the residual of K = L + S and the size of S. The other panels have the AUC
    of three scores, each panel for one kind of corruption.
    """
    by_step = {step: values for (network, step), values in where_is_s.over_seeds(
        common.read_log(where_is_s.ROWS)).items() if network == "rpc 4iter/layer0"}
    scores = {"S, step 4": ("S", "^", "-", "#d55e00"),
              "|k|": ("length of the key", "o", "-.", "black"),
              "distance": ("distance from the mean key", "x", "--", "#0072b2")}
    lengths = {"residual, step 4": ("|K - S - L| / |K|", "s", "-", "black"),
               "|S| / |K|, step 4": ("|S| / |K|", "^", "-", "#d55e00")}
    figure, axes = plt.subplots(1, 4, figsize=(FIGURE_WIDTH, 3.9), sharex=True)
    for ax, corruption in zip(axes, ("clean", "noise", "black", "white")):
        clean = corruption == "clean"
        for name, (label, mark, style, colour) in (lengths if clean else scores).items():
            name = f"clean: {name}" if clean else f"{corruption}: AUC of {name}"
            band(ax, {step: values[name] for step, values in by_step.items()}, marker=mark,
                 linestyle=style, color=colour, fillstyle="none", label=label)
        ax.set(title="lengths" if clean else f"AUC, {corruption}", xlabel="training step",
               ylim=(0, 1.25 if clean else 1), xticks=[0, 1000, 2000])
        if not clean:
            ax.axhline(0.5, color="black", linewidth=0.8, linestyle=":", label="chance")
            ax.set_yticks([0, 0.5, 1], [0, 0.5, 1] if corruption == "noise" else [])
    legend(figure, axes[0], "lower left", ncols=1)
    legend(figure, axes[1], "lower right", ncols=2, columnspacing=1)
    save_figure(figure, path, finding)


# --- perfect S ------------------------------------------------------------------------------------

def perfect_figure(path, finding):
    """Draw accuracy under each condition of perfect_s.py: one mark per network, bars for means."""
    found = perfect_s.read_rows()
    shown = {"as trained": "as trained", "S empty": "S empty", perfect_s.PERFECT: "perfect S",
             "left out in layer 0": "left out, layer 0", perfect_s.LEFT_OUT: "left out, all layers",
             "control: intact patches left out": "control: intact\nones left out"}
    styles = {"symmetric": look("symmetric", label="symmetric attention"),
              "rpc4-l1": look("rpc", label="RPC, as published"),
              "rpc2-all": look("others", label="RPC in all layers")}
    figure, axes = plt.subplots(1, 4, figsize=(FIGURE_WIDTH, 4.2), sharey=True)
    for ax, kind in zip(axes, perfect_s.KINDS):
        for i, (arm, style) in enumerate(styles.items()):
            for y, condition in enumerate(shown):
                x = [right.mean() for right in found.get((arm, kind, condition), {}).values()]
                at, y = np.full(len(x), y + 0.22 * (i - 1)), y + 0.22 * (i - 1)
                ax.plot(x, at, linestyle="none", markersize=4, alpha=0.6, **style)
                ax.plot([np.mean(x)] * 2 if x else [], [y - 0.1, y + 0.1] if x else [], linewidth=2,
                        color=style["color"])
        ax.set(title=kind, xlabel="accuracy in %", xlim=(-4, 104), xticks=[0, 50, 100],
               ylim=(len(shown) - 0.5, -0.5))
        ax.set_yticks(range(len(shown)), shown.values())
    legend(figure, axes[0], "lower center", ncols=3)
    save_figure(figure, path, finding)


# --- the command ----------------------------------------------------------------------------------

def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("folder", nargs="?", type=Path, default=RESULTS,
                   help="write the figures below this folder (default: next to their rows)")
    folder = p.parse_args(argv).folder

    line_figure("fresh", line.stored("fresh"), folder / "line/fresh.png",
                "Scenes: robustness follows clean loss; RPC lies below under PGD",
                line.other_recipes())
    line_figure("cifar10", line.stored("cifar10"), folder / "line/cifar10.png",
                "CIFAR-10: RPC equals its baseline within 3 points")
    forest(FOREST["rpc"], folder / "line/forest_rpc.png",
           "With published settings, RPC is never significantly above its baseline")
    forest(FOREST["others"], folder / "line/forest_others.png",
           "Only adversarial training gains under corruptions and under PGD")
    lambda_figure(folder / "line/lambda.png",
                  "A small lambda turns layer 0 into an average (dotted: uniform weights)")
    axes_figure(folder / "decider/constancy.png",
                "Using the same axes for every image lowers the loss")
    training_figure(folder / "kpca/trained.png",
                    "Trained values stay close to a random matrix")
    where_figure(folder / "where_is_s/where_is_s.png",
                 "S follows the length of the key")
    perfect_figure(folder / "perfect_s/perfect_s.png",
                   "S empty and perfect S differ at corrupted patches only; "
                   "leaving these out helps more")
    budget_figure({"PGD-20, 8 epochs": arms.stored(STUDIES["control"])},
                  folder / "control/budgets.png", DEFENDED,
                  "At equal epochs, adversarial training helps at every budget")
    rows = [row for row in arms.stored(STUDIES["criterion"]) if row.seed < 45]
    budget_figure({f"PGD-20, cost of {epochs} epochs": [
        row for row in rows if row.arm.endswith("-96") == (epochs == 96)] for epochs in (24, 96)},
        folder / "criterion/budgets.png", (*DEFENDED, "uniform-l0", "softmax"),
        "At equal cost, adversarial training helps above 4/255")


if __name__ == "__main__":
    common.run(main)
