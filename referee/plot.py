"""Figures from the numbers that the other scripts write. Needs matplotlib.

    python -m referee.plot log out/a out/b                      # curves of training runs, together
    python -m referee.plot robust out/shapes_rpc/robust         # accuracy against eps
    python -m referee.plot robust out/eval/* --run symmetric rpc    # of some of its networks
    python -m referee.plot stored                               # every figure of the stored rows

Colours and marks are one family's in all figures; marks differ in shape as well as colour.
"""

import argparse
import re
import sys
from pathlib import Path

import numpy as np

import common
from referee import arms, line
from referee.arms import RESULTS, STUDIES, compared, files
from referee.stats import NONE, read

try:
    import matplotlib.pyplot as plt
except ImportError:
    sys.exit("error: referee.plot needs matplotlib: pip install matplotlib")

plt.switch_backend("Agg")                                  # no screen
plt.rcParams.update({"figure.dpi": 100, "figure.constrained_layout.use": True, "font.size": 11.5,
                     "axes.titlesize": 11.5, "legend.fontsize": 10.5, "axes.spines.top": False,
                     "axes.spines.right": False, "svg.hashsalt": "rpc"})
WIDTH = 9                                      # inches; a slide shows them 1.5 times as large
# A family: colour (told apart by colour-blind readers), mark. The averaging layer is a null.
FAMILIES = {"symmetric": ("#0072b2", "o"), "rpc": ("#d55e00", "^"), "average": ("#666666", "s"),
            "softmax": ("black", "v"), "others": ("#999900", "D"), "recipe": ("black", "x")}
WORDS = {"symmetric": "symmetric attention", "rpc4-l1": "RPC, as published",
         "rpc2-all": "RPC in all layers", "no-shrink": "RPC without its sparse part",
         "clamp": "keys clamped, no iteration", "admm": "RPC with ADMM's constants",
         "sharp": "sharper attention", "softmax": "softmax attention",
         "uniform-l0": "layer 0 averages", "keys": "proximal steps on keys",
         "keys-rows": "proximal steps, whole keys", "weights": "weights of tokens",
         "rkde-huber": "kernel density, Huber", "rkde-hampel": "kernel density, Hampel",
         "mom": "median of means", "sinkhorn": "doubly stochastic", "elliptical": "elliptical",
         "paper-0.05-n4": "RPC, chosen constants", "rpc4-l1-adv": "RPC, adversarially trained",
         "symmetric-adv": "symmetric, adversarially trained"}


# --- what all figures share -----------------------------------------------------------------------

def plain(arm):
    """An arm's name without how it was trained: long-rpc4-l1 and rpc4-l1-e12 are rpc4-l1."""
    return re.sub(r"^(long|half|flat)-|-e\d+$|-96$|-fast$", "", arm)


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
    return dict(color=colour, marker=mark)


def legend(figure, ax, where, **more):
    """The labels of ax, outside of all panels."""
    named = {label: handle for handle, label in zip(*ax.get_legend_handles_labels())}
    figure.legend(named.values(), named.keys(), loc=f"outside {where}", frameon=False, **more)


def save(figure, path):
    figure.savefig(path, metadata={"Date": None} if str(path).endswith("svg") else None)
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
            ax.annotate(epochs, (np.exp(x), y), (9, -16), textcoords="offset points", fontsize=10,
                        color="#0072b2", zorder=5, bbox=dict(facecolor="white", alpha=0.8,
                                                             edgecolor="none", pad=0.6))
        ends = line.ends(reference, measure)
        ax.plot(np.exp(ends), np.polyval(np.polyfit(*line.points(reference, measure), 1), ends),
                "--", color="black", linewidth=1, label="the line", zorder=0)
        x = np.exp(line.points([*networks, *others], measure)[0])
        ax.set(xscale="log", xlabel="clean test loss, nats (trained further: to the right)",
               ylabel="accuracy in %", title=measure.replace("pgd", "PGD-20 at"))
        ticks = [t for t in TICKS if 0.97 * x.min() <= t <= 1.03 * x.max()]
        ax.set_xticks(ticks, [f"{t:g}" for t in ticks])
        ax.set_xticks([], minor=True)
    axes[0].invert_xaxis()                                          # both: they share x
    legend(figure, axes[0], "lower center", ncols=4, columnspacing=1, handletextpad=0.3)
    save(figure, path)


# --- differences of pairs -------------------------------------------------------------------------

# figure: (title of rows, [(study, comparison, arm, baseline, words)])
FOREST = {"rpc": [
    ("scenes, 8 epochs, minus symmetric attention", [
        ("robustness", "scenes", "rpc4-l1", "symmetric", "RPC, as published"),
        ("constants", "confirmation", "rpc4-l1", "symmetric", "the same, fresh seeds"),
        ("robustness", "scenes", "rpc2-all", "symmetric", "in all layers, 2 steps"),
        ("robustness", "scenes", "no-shrink", "symmetric", "without its sparse part"),
        ("robustness", "scenes", "admm", "symmetric", "with ADMM's constants"),
        ("eighteen", "eighteen", "paper-0.05-n4", "symmetric", "with chosen constants")]),
    ("the same minus a layer that averages", [
        ("line", "lambda-0", "paper-0.05-n4", "uniform-l0", "chosen constants")]),
    ("trained otherwise", [
        ("line", "24-epochs", "long-rpc4-l1", "long-symmetric", "24 epochs"),
        ("line", "one-rate", "long-rpc4-l1", "half-symmetric", "24 epochs, one rate"),
        ("finetune", "finetune", "rpc4-l1", "symmetric", "RPC for three last epochs"),
        ("control", "added", "rpc4-l1-adv", "symmetric-adv", "both adversarially trained")]),
    ("CIFAR-10, 12 epochs", [
        ("line-cifar10", "cifar10-12", "rpc4-l1-e12", "symmetric-e12", "RPC, as published")])],
 "others": [
    ("scenes, 8 epochs, minus symmetric attention", [
        *(("robustness", "ten", arm, "symmetric", WORDS[arm]) for arm in (
            "keys-rows", "keys", "weights", "rkde-huber", "rkde-hampel", "sinkhorn", "mom")),
        ("line", "softmax", "softmax-e8", "symmetric-e8", "softmax attention"),
        ("line", "lambda-0", "uniform-l0", "symmetric-e8", "layer 0 averages"),
        ("control", "control", "symmetric-adv", "symmetric", "adversarial training")]),
    ("24 epochs", [
        ("line", "24-epochs", "long-softmax", "long-symmetric", "softmax attention"),
        ("line", "24-epochs", "long-uniform-l0", "long-symmetric", "layer 0 averages")])]}


def forest(groups, path):
    """Draw differences with 95 % intervals over seeds and images, a row a pair; filled:
    significant after Holm within its comparison. Of three seeds intervals are rough."""
    names = ("15 corruptions", "PGD-20, 2/255 (CIFAR-10: 1/255)")
    rows = sum(len(of) + 1 for _, of in groups)
    figure, axes = plt.subplots(1, 2, sharey=True, figsize=(WIDTH, 1.1 + 0.3 * rows))
    ticks, bold = [], []
    for title, of in groups:
        bold.append(len(ticks))
        ticks.append(title)
        for study, comparison, arm, base, words in of:
            study = STUDIES[study]
            found = compared(study, comparison, arms.stored(study))
            n = found.gaps[study.primary[0], arm, base].n
            for ax, measure in zip(axes, sorted(study.primary)):
                d, p = (x.get((measure, arm, base), y) for x, y in (
                    (found.gaps, NONE), (found.p, 1)))
                ax.plot([d.low, d.high], [len(ticks)] * 2, color=look(arm)["color"], linewidth=1.5)
                ax.plot(d.mean, len(ticks), markersize=6, **look(arm),
                        markerfacecolor=look(arm)["color"] if p < 0.05 else "white")
            ticks.append(f"{words} ({n})")
    for ax, name in zip(axes, names):
        ax.axvline(0, color="black", linewidth=0.8)
        ax.set(title=name, xlabel="points of accuracy", ylim=(len(ticks) - 0.5, -0.5),
               yticks=range(len(ticks)), yticklabels=ticks)
        for i, label in enumerate(ax.get_yticklabels()):
            label.set_fontweight("bold" if i in bold else "normal")
            label.set_fontsize(10)
    save(figure, path)


# --- accuracy against the budget of an attack -----------------------------------------------------

def by_budget(rows, name_of=lambda row: row.arm or row.name):
    """Sort top-1 of clean images and of one attack: {network: {eps in 1/255: [per cent]}}."""
    found = {}
    for row in rows:
        found.setdefault(name_of(row), {}).setdefault(row.eps, []).append(row.top1)
    return {name: of for name, of in found.items() if len(of) > 1}


def budget_curves(ax, networks, looks=None):
    """Draw means over seeds, bands from lowest to highest. looks: {name: (label, how to draw)}."""
    for name, of in networks.items():
        if looks and name not in looks:
            continue
        label, how = looks[name] if looks else (f"{name} (n = {max(map(len, of.values()))})",
                                                dict(marker="o"))
        xs = sorted(of)
        drawn, = ax.plot(xs, [np.mean(of[x]) for x in xs], markersize=5, label=label, **how)
        ax.fill_between(xs, [min(of[x]) for x in xs], [max(of[x]) for x in xs], alpha=0.15,
                        color=drawn.get_color(), linewidth=0)
    ax.set(ylim=(0, 102))


DEFENDED = dict(linestyle="--", fillstyle="none")
CONTROL = {"symmetric": (WORDS["symmetric"], look("symmetric")),
           "rpc4-l1": ("RPC", look("rpc4-l1")),
           "symmetric-adv": (WORDS["symmetric-adv"], look("symmetric") | DEFENDED),
           "rpc4-l1-adv": (WORDS["rpc4-l1-adv"], look("rpc4-l1") | DEFENDED)}
CRITERION = [{**CONTROL, "uniform-l0": (WORDS["uniform-l0"], look("uniform-l0")),
              "softmax": (WORDS["softmax"], look("softmax"))},
             {"symmetric-96": CONTROL["symmetric"], "symmetric-adv-96": CONTROL["symmetric-adv"]}]


def control_figure(path):
    """Draw accuracy against PGD's budget, with and without adversarial training."""
    rows = [row for row in read(files(STUDIES["control"].rows)) if row.kind in ("clean", "pgd")]
    figure, ax = plt.subplots(figsize=(WIDTH, 4))
    budget_curves(ax, by_budget(rows), CONTROL)
    ax.set_xscale("symlog", base=2, linthresh=0.5)
    ticks = [0, 0.5, 1, 2, 4, 8, 16]
    ax.set_xticks(ticks, [f"{x:g}" for x in ticks])
    ax.set(xlabel="PGD-20, budget in 1/255 of the pixel range", ylabel="accuracy in %",
           xlim=(-0.1, 18))
    ax.legend(frameon=False)
    save(figure, path)


def criterion_figure(rows, path):
    """Draw accuracy against PGD's budget, a panel a cost of training; the line: half are right."""
    shown = by_budget([row for row in rows if row.arm and row.images == 1000
                       and row.kind in ("clean", "pgd")])
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 4.4), sharey=True)
    for ax, looks, passes in zip(axes, CRITERION, (24, 96)):
        budget_curves(ax, shown, looks)
        ax.axhline(50, color="black", linewidth=0.8, linestyle=":")
        ax.set(title=f"cost: {passes} passes over the images", xticks=[0, 1, 2, 4, 6, 8, 12],
               xlabel="PGD-20, budget in 1/255")
    axes[0].set_ylabel("accuracy in %")
    legend(figure, axes[0], "lower center", ncols=2)
    save(figure, path)


def sweep(rows, path):
    """Draw accuracy against the budget of FGSM and PGD, a panel an attack, a curve an arm."""
    panels = {kind: by_budget([row for row in rows if row.kind in (kind, "clean")])
              for kind in ("fgsm", "pgd")}
    panels = {kind: of for kind, of in panels.items() if of}
    if not panels:
        raise common.InputError("no FGSM or PGD at a budget: eval_robust.py --measures clean "
                                '"pgd eps=1/255,2/255,4/255"')
    figure, axes = plt.subplots(1, len(panels), sharey=True, squeeze=False,
                                figsize=(WIDTH, 4))
    for ax, (kind, of) in zip(axes[0], panels.items()):
        budget_curves(ax, of)
        ax.set(title=kind.upper(), xlabel="eps in 1/255, clean at 0", ylabel="top-1 in %")
        ax.legend(frameon=False)
    save(figure, path)


# --- lambda ---------------------------------------------------------------------------------------

def lambda_figure(path):
    """Draw accuracy and entropy of layer 0 against lambda, a column a reading: two networks whose
    layer 0 is replaced (rows of an earlier script), and those that were trained with a lambda."""
    rows = common.read_log(RESULTS / "line/lambda.jsonl")
    trained = line.with_lambda(line.stored("fresh"), line.logged(files(line.PICTURES["fresh"][2])))
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
            key = "clean" if name == "top1" else name
            own = [r for r in trained if r["form"] == form and key in r]
            ax.plot([lambdas.index(r["lambd"]) for r in own], [r[key] for r in own], "P",
                    markersize=7, fillstyle="none", color="black", label="trained with this lambda")
            ax.set_ylabel(shown[name] if form == "paper" else None)
        column[1].axhline(rows[0]["uniform"], color="black", linewidth=0.8, linestyle=":")
        column[0].set_title(f"reading “{form}”, 4 steps")
        column[1].set(xlabel="lambda", xticks=range(len(lambdas)))
        column[1].set_xticklabels([f"{x:g}".replace("inf", "∞") for x in lambdas], rotation=60)
    legend(figure, axes[0, 0], "lower center", ncols=3, columnspacing=1)
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

def stored(folder, form):
    """Draw every figure of the stored rows, where its page shows it."""
    for name in ("fresh", "cifar10"):
        others = line.other_recipes() if name == "fresh" else ()
        line_figure(name, line.stored(name), folder / f"line/{name}.{form}", others)
    for name, groups in FOREST.items():
        forest(groups, folder / f"line/forest_{name}.{form}")
    lambda_figure(folder / f"line/lambda.{form}")
    control_figure(folder / f"control/budgets.{form}")
    rows = arms.stored(STUDIES["criterion"])
    if rows:
        criterion_figure(rows, folder / f"criterion/budgets.{form}")


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=["log", "robust", "stored"])
    p.add_argument("folder", nargs="*", type=Path, help="log: of runs; robust: of evaluations. The "
                   "figure goes to the first; stored: where, default: beside the rows")
    p.add_argument("--run", nargs="+", default=[""], metavar="NAME",
                   help="robust: only networks whose folder's name begins so")
    p.add_argument("--format", choices=["png", "pdf", "svg"], default="png")
    args = p.parse_args(argv)
    if args.what == "stored":
        return stored(args.folder[0] if args.folder else RESULTS, args.format)
    if not args.folder:
        p.error(f"{args.what}: of which folder?")
    path = args.folder[0] / f"{dict(log='curves', robust='sweep')[args.what]}.{args.format}"
    if args.what == "log":
        logs(args.folder, path)
    else:
        sweep([row for row in read(args.folder) if row.name.startswith(tuple(args.run))], path)
    print(path)


if __name__ == "__main__":
    common.run(main)
