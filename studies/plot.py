"""Figures from the numbers that the other scripts write. Needs matplotlib.

    python -m studies.plot log out/a out/b                      # curves of training runs, together
    python -m studies.plot stored                               # every figure of the stored rows

Colours and marks are one family's in all figures; marks differ in shape as well as colour.
"""

import argparse
import re
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patheffects import withStroke

import common
from studies import arms, kernel_pca, line, probe, where_is_s
from studies.arms import RESULTS, STUDIES, WORDS, files, plain
from studies.stats import NONE

plt.switch_backend("Agg")                                  # no screen
plt.rcParams.update({"figure.dpi": 100, "figure.constrained_layout.use": True, "font.size": 11.5,
                     "axes.titlesize": 11.5, "legend.fontsize": 10.5, "axes.spines.top": False,
                     "axes.spines.right": False, "svg.hashsalt": "studies"})
WIDTH = 9                                      # inches; a slide shows them 1.5 times as large
# A family: colour (told apart by colour-blind readers), mark. The averaging layer is a null.
FAMILIES = {"symmetric": ("#0072b2", "o"), "rpc": ("#d55e00", "^"), "average": ("#666666", "s"),
            "softmax": ("black", "v"), "others": ("#cc79a7", "D"), "recipe": ("black", "x")}


# --- what all figures share -----------------------------------------------------------------------

def family(arm):
    """The family of an arm, which has its colour and mark."""
    name = plain(arm).removesuffix("-adv")
    if name in ("uniform-l0", "paper-0.05-n4"):
        return "average"
    if re.match("rpc|no-shrink|clamp|admm|paper|released", name):
        return "rpc"
    return {"symmetric": "symmetric", "flat": "symmetric", "softmax": "softmax"}.get(
        name.split(",")[0], "others")


def look(arm):
    colour, mark = FAMILIES[family(arm)]
    return dict(color=colour, marker=mark) | (
        dict(linestyle="--", fillstyle="none") if "-adv" in arm else {})


def legend(figure, ax, where, **more):
    """The labels of ax, outside of all panels."""
    named = {label: handle for handle, label in zip(*ax.get_legend_handles_labels())}
    figure.legend(named.values(), named.keys(), loc=f"outside {where}", frameon=False, **more)


def band(ax, curve, **style):
    """Draw {x: values} as their means, shaded from the lowest to the highest."""
    x = sorted(curve)
    ax.plot(x, [np.mean(curve[at]) for at in x], markersize=5, **style)
    ax.fill_between(x, [min(curve[at]) for at in x], [max(curve[at]) for at in x], alpha=0.15,
                    color=style["color"], linewidth=0)


def save(figure, path):
    """Write a figure as path, a PNG, and as SVG beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    figure.savefig(path.with_suffix(".svg"), metadata=dict(Date=None))
    plt.close(figure)


# --- the line -------------------------------------------------------------------------------------

TICKS = (1.2, 1, 0.9, 0.4, 0.1, 0.03, 0.01)
SERIES = {"symmetric": "symmetric attention, by epochs", "rpc": "RPC",
          "average": "layer 0 only averages", "others": "other attentions",
          "adv": "adversarially trained", "recipe": "other recipes"}


def series(arm):
    """The series of the line's figure that an arm belongs to."""
    if arm.endswith("-adv"):
        return "adv"
    if arm.startswith(("flat", "your ", "timm")):
        return "recipe"
    return {"softmax": "others"}.get(family(arm), family(arm))


def line_figure(name, networks, path, others=()):
    """Draw a panel a primary measure: clean loss against accuracy, a point a network."""
    primary, reference = line.PICTURES[name][3], line.reference(networks)
    figure, axes = plt.subplots(1, len(primary), figsize=(WIDTH, 4.6), sharex=True)
    for ax, measure in zip(axes, primary):
        for of, label in SERIES.items():
            own = [n for n in (*networks, *others) if series(n.arm) == of]
            x, y = line.points(own, measure)
            if not len(x):
                continue
            colour, mark = FAMILIES.get(of, ("#0072b2", "s"))
            ax.plot(np.exp(x), y, mark, color=colour, markersize=6, alpha=0.75, label=label,
                    fillstyle="none" if of == "adv" else "full", markeredgewidth=1.2)
        curve = {}                                              # the baseline's own training
        for n in networks:
            epochs = re.search(r"^symmetric-e(\d+)$", n.arm)
            if epochs or n.arm == "half-symmetric":
                curve.setdefault(int(epochs[1]) if epochs else 24, []).append(n)
        at = [(epochs, *line.points(curve[epochs], measure).mean(1)) for epochs in sorted(curve)]
        ax.plot([np.exp(x) for _, x, _ in at], [y for *_, y in at], color="#0072b2", linewidth=1)
        for epochs, x, y in at:
            ax.annotate(epochs, (np.exp(x), y), (14, -14), textcoords="offset points",
                        color="#0072b2", zorder=5,
                        path_effects=[withStroke(linewidth=3, foreground="white")])
        ends = line.ends(reference, measure)
        ax.plot(np.exp(ends), np.polyval(np.polyfit(*line.points(reference, measure), 1), ends),
                "--", color="black", linewidth=1, label="the line", zorder=0)
        x = np.exp(line.points([*networks, *others], measure)[0])
        ax.set(xscale="log", xlabel="clean test loss, nats (trained further: to the right)",
               ylabel="accuracy in %", title=measure.replace("pgd", "PGD-20 at"))
        ticks = [t for t in TICKS if 0.97 * x.min() <= t <= 1.03 * x.max()]
        ax.set_xticks(ticks, [f"{t:g}" for t in ticks])
        ax.set_xticks([], minor=True)
        ax.margins(y=0.08)
    axes[0].invert_xaxis()                                          # both: they share x
    legend(figure, axes[0], "lower center", ncols=4, columnspacing=1, handletextpad=0.3)
    save(figure, path)


# --- differences of pairs -------------------------------------------------------------------------

# figure: {title of rows: [(comparison, arm, baseline, words)]}
FOREST = {"rpc": {
    "scenes, 8 epochs, minus symmetric attention": [
        ("scenes", "rpc4-l1", "symmetric", "RPC, as published"),
        ("confirmation", "rpc4-l1", "symmetric", "the same, fresh seeds"),
        ("scenes", "rpc2-all", "symmetric", "in all layers, 2 steps"),
        ("scenes", "no-shrink", "symmetric", "without its sparse part"),
        ("scenes", "admm", "symmetric", "with ADMM's constants"),
        ("eighteen", "paper-0.05-n4", "symmetric", "with chosen constants")],
    "the same minus a layer that averages": [
        ("lambda-0", "paper-0.05-n4", "uniform-l0", "chosen constants")],
    "trained otherwise": [
        ("24-epochs", "long-rpc4-l1", "long-symmetric", "24 epochs"),
        ("one-rate", "long-rpc4-l1", "half-symmetric", "24 epochs, one rate"),
        ("finetune", "rpc4-l1", "symmetric", "RPC for three last epochs"),
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


def forest(groups, path):
    """Draw differences with 95 % intervals over seeds and images, a row a pair; filled:
    significant after Holm within its comparison. Of three seeds intervals are rough."""
    names = ("15 corruptions", "PGD-20 at 2/255")
    rows = sum(len(of) + 1 for of in groups.values())
    figure, axes = plt.subplots(1, 2, sharey=True, figsize=(WIDTH, 1.1 + 0.3 * rows))
    ticks, bold = [], []
    for title, of in groups.items():
        bold.append(len(ticks))
        ticks.append(title)
        for comparison, arm, base, words in of:
            study, found = arms.comparison(comparison)
            for ax, measure in zip(axes, sorted(study.primary)):
                key = measure, arm, base
                d, p = found.gaps.get(key, NONE), found.p.get(key, 1)
                ax.plot([d.low, d.high], [len(ticks)] * 2, color=look(arm)["color"], linewidth=1.5)
                ax.plot(d.mean, len(ticks), look(arm)["marker"], color=look(arm)["color"],
                        markersize=6, markerfacecolor=None if p < 0.05 else "white")
            ticks.append(f"{words} ({d.n})")
    for ax, name in zip(axes, names):
        ax.axvline(0, color="black", linewidth=0.8)
        ax.set(title=name, xlabel="points of accuracy", ylim=(len(ticks) - 0.5, -0.5),
               yticks=range(len(ticks)), yticklabels=ticks)
        ax.xaxis.set_major_locator(plt.MaxNLocator(5, integer=True))
        for i, label in enumerate(ax.get_yticklabels()):
            label.set(fontweight="bold" if i in bold else "normal", fontsize=10)
    save(figure, path)


# --- accuracy against the budget of an attack -----------------------------------------------------

DEFENDED = "symmetric", "rpc4-l1", "symmetric-adv", "rpc4-l1-adv"


def budgets(panels, path, shown):
    """Draw accuracy against PGD's budget, a panel {its title: Rows}: a curve an arm of these, mean
    over seeds, band from lowest to highest."""
    figure, axes = plt.subplots(1, len(panels), sharey=True, squeeze=False, figsize=(WIDTH, 4.4))
    for ax, (title, rows) in zip(axes[0], panels.items()):
        curves = {arm: {} for arm in shown}
        for row in rows:
            if row.kind in ("pgd", "clean") and plain(row.arm) in curves:
                curves[plain(row.arm)].setdefault(row.eps, []).append(row.top1)
        for arm, curve in curves.items():
            band(ax, curve, label=WORDS[arm], **look(arm))
        ax.axhline(50, color="black", linewidth=0.8, linestyle=":")
        ax.set(title=title, xlabel="budget in 1/255 of the pixel range, clean at 0", ylim=(0, 102))
    axes[0][0].set_ylabel("accuracy in %")
    legend(figure, axes[0][0], "lower center", ncols=2)
    save(figure, path)


# --- lambda ---------------------------------------------------------------------------------------

def with_lambda():
    """The networks of the line that were trained with a lambda: dicts of form, lambd, top1 and
    entropy of layer 0, nan where it was not measured."""
    entropy = {row["run"]: row.get("entropy", np.nan) for path in files(line.PICTURES["fresh"][2])
               for row in common.read_log(path)}
    for n in line.stored("fresh"):
        arm = {"uniform-l0": "paper-0-n4", "rpc4-l1": "released-4-n4"}.get(n.arm, n.arm)
        if found := re.fullmatch(r"(paper|released)-(.+)-n4", arm):
            yield dict(form=found[1], lambd=float(found[2]), top1=n.accuracy["clean"],
                       entropy=entropy.get(f"{n.arm}_s{n.seed}", np.nan))


def lambda_figure(path):
    """Draw accuracy and entropy of layer 0 against lambda, a column a reading: two networks whose
    layer 0 is replaced (rows of an earlier script), and those that were trained with a lambda."""
    rows, trained = common.read_log(RESULTS / "line/lambda.jsonl"), list(with_lambda())
    lambdas = sorted({row["lambd"] for row in rows})
    shown = dict(top1="clean accuracy in %", entropy="entropy of layer 0\nin nats")
    figure, axes = plt.subplots(2, 2, figsize=(WIDTH, 5.2), sharex=True, sharey="row")
    for column, form in zip(axes.T, ("paper", "released")):
        for ax, name in zip(column, shown):
            for network, arm, words in (("shapes_rpc", "rpc4-l1", "trained with RPC"),
                                        ("shapes_symmetric", "symmetric", "trained without")):
                own = [r for r in rows if (r["network"], r["form"]) == (network, form)]
                ax.plot([lambdas.index(r["lambd"]) for r in own], [r[name] for r in own],
                        markersize=4, **look(arm), label=f"{words}; then this lambda")
            own = [r for r in trained if r["form"] == form and r[name] == r[name]]
            ax.plot([lambdas.index(r["lambd"]) for r in own], [r[name] for r in own], "P",
                    markersize=7, fillstyle="none", color="black", label="trained with this lambda")
            ax.set_ylabel(shown[name] if form == "paper" else None)
        column[1].axhline(rows[0]["uniform"], color="black", linewidth=0.8, linestyle=":")
        column[0].set_title(f"reading “{form}”, 4 steps")
        column[1].set(xlabel="lambda", xticks=range(len(lambdas)))
        column[1].set_xticklabels([f"{x:g}".replace("inf", "∞") for x in lambdas], rotation=60)
    legend(figure, axes[0, 0], "lower center", ncols=3, columnspacing=1)
    save(figure, path)


# --- forced values --------------------------------------------------------------------------------

AXES = {"hashed": "drawn\nanew", "image": "another\nimage's", "x": "the\ninput's",
        "other": "another\nhead's", "own": "kernel\nPCA's own", "detached": "own, no\ngradient",
        "mean": "kernel PCA's\nmean", "random": "random,\nfixed"}
VARYING = 6                                     # of them differ from image to image


def axes_figure(path):
    """Draw held-out losses by kind of axes, varying and constant apart: a point a network, a line a
    seed, a bar the mean."""
    rows = [row for row in common.read_log(RESULTS / "decider/constancy.jsonl")
            if row["arm"].startswith("span-")]
    losses = {(row["seed"], row["arm"].removeprefix("span-")): row["loss"] for row in rows}
    figure, ax = plt.subplots(figsize=(WIDTH, 3.8))
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
    ax.set(ylabel="held-out loss, nats", ylim=(1.56, 1.82), yticks=[1.6, 1.7, 1.8])
    save(figure, path)


# --- kernel PCA -----------------------------------------------------------------------------------

def training_figure(path):
    """Draw the eigen-cosine over training: beside its nulls, and above a random matrix."""
    rows = probe.read_csv(RESULTS / "kpca/trained.csv")
    epochs = [step / 250 for step in kernel_pca.STAGES]

    def over(network, measure, source):
        return np.array([kernel_pca.over_seeds(rows, network, measure, source, step)
                         for step in kernel_pca.STAGES])        # (stages, seeds)

    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 3.9))
    for source, style, words in (
            ("learned", "o-", "learned values"), ("x W", "s--", "random matrix"),
            ("other", "D:", "another head's"), ("iid", "v-.", "noise")):
        left.plot(epochs, over("softmax", "eig_cos", source).mean(1), style, markersize=5,
                  label=words, color="black" if source == "learned" else None)
    best = kernel_pca.over_seeds(rows, "softmax", "eig_cos", "fitted to eig_cos")
    left.plot(epochs[-1:], [best.mean()], "*", markersize=12, color="black", label="best map found")
    left.set(title="eigen-cosine, softmax networks", ylim=(0, 1))
    for network in ("softmax", "symmetric"):
        gap = over(network, "eig_cos: learned -", "x W")
        right.plot(epochs, gap, linewidth=0.7, alpha=0.6, color=look(network)["color"])
        right.plot(epochs, gap.mean(1), linewidth=2, **look(network), label=WORDS[network])
    right.axhline(0, color="black", linewidth=0.8, linestyle=":")
    right.set(title="learned values minus random matrix", ylim=(-0.001, 0.0045))
    for ax in (left, right):
        ax.set(xlabel="epochs of training", xticks=epochs)
        ax.legend(frameon=False, loc="upper right")
    save(figure, path)


# --- where is S? ----------------------------------------------------------------------------------

def where_figure(path):
    """Draw RPC as published over training, mean and range of its seeds: what is left of K = L + S,
    how large S is, and the AUC of three scores for three kinds of damage."""
    of = {step: values for (network, step), values in where_is_s.over_seeds(
        common.read_log(where_is_s.ROWS)).items() if network == "rpc 4iter/layer1"}
    looks = {"S, step 4": ("S", "^", "-", "#d55e00"),
             "|k|": ("size of the key", "o", "-.", "black"),
             "distance": ("distance from the mean key", "x", "--", "#0072b2")}
    lengths = {"residual, step 4": ("|K - S - L|, of |K|", "s", "-", "black"),
               "|S| / |K|, step 4": ("|S|, of |K|", "^", "-", "#d55e00")}
    figure, axes = plt.subplots(1, 4, figsize=(WIDTH, 3.6), sharex=True)
    for ax, kind in zip(axes, ("clean", "noise", "black", "white")):
        clean = kind == "clean"
        for name, (words, mark, line_style, colour) in (lengths if clean else looks).items():
            name = f"clean: {name}" if clean else f"{kind}: AUC of {name}"
            band(ax, {step: values[name] for step, values in of.items()}, marker=mark,
                 linestyle=line_style, color=colour, fillstyle="none", label=words)
        ax.set(title="lengths" if clean else f"AUC, {kind}", xlabel="training step",
               ylim=(0, 1.25 if clean else 1), xticks=[0, 1000, 2000])
        if not clean:
            ax.axhline(0.5, color="black", linewidth=0.8, linestyle=":", label="chance")
            ax.set_yticks([0, 0.5, 1], [0, 0.5, 1] if kind == "noise" else [])
    legend(figure, axes[0], "lower left", ncols=1)
    legend(figure, axes[1], "lower right", ncols=2, columnspacing=1)
    save(figure, path)


# --- log.jsonl of training runs -------------------------------------------------------------------

def log_curves(rows):
    """{panel: {line: [(step, value)]}} of a run's log: losses, evaluations, S, speed."""
    curves = {}
    for row in rows:
        found = {(name.replace("_per_s", " a second"), "training"): row[name]
                 for name in ("loss", "images_per_s", "tokens_per_s") if name in row}
        found |= {(name, "evaluation"): value for name, value in row.get("eval", {}).items()
                  if isinstance(value, float)}
        found |= {("share of nonzero S", f"layer {layer}, PAP step {i}"): share
                  for layer, shares in row.get("nonzero_S", {}).items()
                  for i, share in enumerate(shares, 1)}
        for (panel, name), value in found.items():
            curves.setdefault(panel, {}).setdefault(name, []).append((row["step"], value))
    return curves


def logs(folders, path):
    """Draw runs over training steps: loss, evaluations, share of nonzero S, speed."""
    runs, names = {}, [folder.name for folder in folders]
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
    save(figure, path)


# --- the command ----------------------------------------------------------------------------------

def stored(folder):
    """Draw every figure of the stored rows, where its page shows it."""
    line_figure("fresh", line.stored("fresh"), folder / "line/fresh.png", line.other_recipes())
    line_figure("cifar10", line.stored("cifar10"), folder / "line/cifar10.png")
    for name, groups in FOREST.items():
        forest(groups, folder / f"line/forest_{name}.png")
    lambda_figure(folder / "line/lambda.png")
    axes_figure(folder / "decider/constancy.png")
    training_figure(folder / "kpca/trained.png")
    where_figure(folder / "where_is_s/where_is_s.png")
    budgets({"PGD-20, 8 epochs": arms.stored(STUDIES["control"])}, folder / "control/budgets.png",
            DEFENDED)
    rows = [row for row in arms.stored(STUDIES["criterion"]) if row.seed < 45]
    budgets({f"PGD-20, cost: {passes} passes over the images": [
        row for row in rows if row.arm.endswith("-96") == (passes == 96)] for passes in (24, 96)},
        folder / "criterion/budgets.png", (*DEFENDED, "uniform-l0", "softmax"))


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=["log", "stored"])
    p.add_argument("folder", nargs="*", type=Path, help="log: of runs; the figure goes to the "
                   "first. stored: where, default: beside the rows")
    args = p.parse_args(argv)
    if args.what == "stored":
        return stored(args.folder[0] if args.folder else RESULTS)
    if not args.folder:
        p.error("log: of which folder?")
    path = args.folder[0] / "curves.png"
    logs(args.folder, path)
    print(path)


if __name__ == "__main__":
    common.run(main)
