"""Compare accuracies of networks with a baseline's, paired: intervals, tables, a figure.

Runs are (arm, seed); arms are compared on the same images, paired by seed. Intervals are those of
stats.py in which seeds and images both vary. Two measures of a data set are primary: a
difference in them is significant, and bold, if it survives Holm's correction over arms x 2. All
other numbers are exploratory and never bold. No study itself.
"""

from pathlib import Path

import numpy as np

import common
from common import InputError
from robust import corruptions
from robust.results import title, unpack
from referee.studies.stats import Difference, crossed, detectable, holm, missing, pairs
from referee.studies.stats import show, show_p, spread

BASELINE = "symmetric"
FAMILIES = dict(noise=corruptions.NAMES[:3], blur=corruptions.NAMES[3:7],
                weather=corruptions.NAMES[7:11], digital=corruptions.NAMES[11:])
COLOURS = dict(softmax="dimgray", symmetric="tab:blue", rpc="tab:red")     # fixed in all figures
RPC = ("rpc", "no-shrink", "clamp", "admm", "paper", "released", "uniform")
# The budget is the one at which symmetric keeps half to two thirds of its clean accuracy.
PRIMARY = dict(shapes=("15 corruptions", "pgd 2/255"), cifar10=("15 corruptions", "pgd 1/255"))


def run_of(row):
    """The (arm, seed) of a row whose checkpoint is <arm>_s<seed>, or (None, None)."""
    arm, _, seed = Path(row["checkpoint"]).name.rpartition("_s")
    return (arm, int(seed)) if seed.isdecimal() else (None, None)


def primary_of(rows):
    """Name the two primary measures of these rows' data set; () for another one."""
    data = {row.get("data") for row in rows}
    if len(data) > 1:
        raise InputError(f"rows of {' and '.join(sorted(map(str, data)))}: expected one data set")
    return PRIMARY.get(*data, ()) if data else ()


def outcomes(rows, limit, same=()):
    """Sort rows into {measure: {(arm, seed): how often each image was right (n,), in [0, 1]}}.

    rows: of eval_robust.py, whose checkpoints are <arm>_s<seed>. same: arms that hide no gradient,
    for which the adaptive attack is PGD. InputError: two rows of one run and measure, or a
    measure taken in two ways. Rows of another number of images than limit are a measure apart.
    """
    found = {name: {} for name in ("clean", "15 corruptions", *FAMILIES)}
    types, hows = {}, {}
    rows = [row for row in rows if run_of(row) != (None, None)]
    for row in rows:
        run, name = run_of(row), title(row)
        packed = row["right"] if isinstance(row["right"], list) else [row["right"]]
        right = np.mean([unpack(text, row["images"]).numpy() for text in packed], 0)
        if row["images"] != limit:
            name += f", {row['images']} images"
        how = row["setting"], row.get("conditions")
        if hows.setdefault(name, how) != how:
            raise InputError(f"{name} was measured in two ways, {hows[name]} and {how}: keep the "
                             "rows of one")
        of = types.setdefault(run, {}) if row["measure"] == "corruptions" else \
            found.setdefault(name, {})
        key = name if row["measure"] == "corruptions" else run
        if key in of:
            raise InputError(f"{run[0]}, seed {run[1]} has two rows of {name}: keep one")
        of[key] = right

    # means over the corruptions of a family
    for run, of in types.items():
        for family, names in {"15 corruptions": corruptions.NAMES, **FAMILIES}.items():
            if set(names) <= set(of):
                found[family][run] = np.mean([of[name] for name in names], 0)

    # the adaptive attack on what hides no gradient is PGD
    for name in [name for name in found if name.startswith("adaptive_pgd")]:
        plain = found.get(name.removeprefix("adaptive_"), {})
        found[name] |= {run: right for run, right in plain.items() if run[0] in same}
    return {name: runs for name, runs in found.items() if runs}


def compare(found, arms, baseline=BASELINE):
    """Pair arms with the baseline, seed by seed: {(measure, arm): Difference in points}."""
    result = {}
    for name, runs in found.items():
        base = {seed: 100 * right for (arm, seed), right in runs.items() if arm == baseline}
        for arm in arms:
            mine = {seed: 100 * right for (a, seed), right in runs.items() if a == arm}
            if arm != baseline and base.keys() & mine.keys():
                result[name, arm] = crossed(pairs(mine, base, f"{arm} and {baseline}, {name}"))
    return result


def corrected(compared, primary, references=()):
    """Correct p over the arms and the primary measures, as Holm does: {(measure, arm): p}.

    One family of tests a question: references are arms whose own question another page asks.
    """
    return holm({(name, arm): d.p for (name, arm), d in compared.items()
                 if name in primary and arm not in references})


# --- tables and figure ----------------------------------------------------------------------------

NONE = Difference(0, *[np.nan] * 6)                         # a difference that is not there


def points(x):
    """Write a number of points, "" if there is none."""
    return "" if np.isnan(x) else f"{x:.1f}"


def accuracy(runs, arm):
    """Write mean ± standard deviation over the seeds of an arm, per cent, and their number."""
    values = [100 * right.mean() for (a, _), right in runs.items() if a == arm]
    return f"{spread(values)} ({len(values)})" if values else ""


def primary_table(found, compared, arms, baseline, primary, references=()):
    """Write an arm a row: the primary measures, what is significant and what was detectable."""
    p, body = corrected(compared, primary, references), []
    names = [name for name in primary if name in found]
    for arm in arms:
        line = [arm]
        for name in names:
            d = compared.get((name, arm), NONE)
            own = p.get((name, arm), np.nan)
            line += [accuracy(found[name], arm), show(d, bold=own < 0.05) if d.n else "",
                     show_p(d.p), show_p(own), points(detectable(d.error, d.df, len(p)))]
        body.append(line)
    columns = ("difference (95 % CI)", "p", "p, Holm", "80 % power")
    return common.table(body, ["arm", *(head for name in names for head in (name, *columns))])


def tables(found, compared, arms, baseline=BASELINE, primary=(), references=()):
    """Write Markdown: the primary measures, if any; accuracies; differences to the baseline."""
    p = corrected(compared, primary, references)
    others = [arm for arm in arms if arm != baseline]

    def difference(name, arm):
        d = compared.get((name, arm), NONE)
        return show(d, bold=p.get((name, arm), 1) < 0.05) if d.n else ""

    parts = []
    if set(primary) & found.keys():
        parts += ["The primary measures: accuracy in per cent, mean ± standard deviation (seeds); "
                  f"difference to {baseline} in points, paired by seed, 95 % CI over seeds and "
                  "images; p, and after Holm's correction over arms x measures (bold: below .05); "
                  "the smallest difference found with 80 % power at the first step of Holm's:",
                  primary_table(found, compared, arms, baseline, primary, references)]
        if any(d.n == 3 for (name, _), d in compared.items() if name in primary):
            parts.append("Of three seeds intervals and p are rough.")
    parts += ["Accuracy in per cent, mean ± standard deviation (seeds):",
              common.table([[name, *(accuracy(runs, arm) for arm in arms)]
                            for name, runs in found.items()], ["measure", *arms])]
    if compared:
        parts += [f"Difference to {baseline} in points (95 % CI over seeds and images); what is "
                  "not primary is exploratory:",
                  common.table([[name, *(difference(name, arm) for arm in others)]
                                for name in found], ["measure", *others])]
    lacking = missing(run for runs in found.values() for run in runs)
    if lacking:
        parts.append("Not there: " + ", ".join(f"{arm} seed {seed}" for arm, seed in lacking) + ".")
    return "\n\n".join(parts)


def report(found, groups, primary):
    """Print the tables of each group of arms, compared with the first, over the seeds of all."""
    for arms in groups:
        seeds = [{seed for of in found.values() for name, seed in of if name == arm}
                 for arm in arms]
        shared = set.intersection(*seeds)
        if not shared:
            absent = [arm for arm, of in zip(arms, seeds) if not of] or ["a seed that all have"]
            print(f"{' and '.join(arms)}: no rows of {' and '.join(absent)} yet.\n")
            continue
        own = {name: {(arm, seed): right for (arm, seed), right in of.items()
                      if arm in arms and seed in shared} for name, of in found.items()}
        own = {name: of for name, of in own.items() if of}
        print(f"{', '.join(arms)}, seeds {', '.join(map(str, sorted(shared)))}.\n")
        print(tables(own, compare(own, arms, arms[0]), arms, arms[0], primary) + "\n")


def draw(compared, arms, path, baseline=BASELINE, primary=(), references=()):
    """Draw differences as points with their intervals, arms in rows, measures in columns.

    Filled: primary and significant. A measure that only few arms have is left to the tables.
    """
    from referee.studies.plot import WIDTH, plt
    p = corrected(compared, primary, references)
    arms = [arm for arm in arms if any(a == arm for _, a in compared)]
    names = list(dict.fromkeys(name for name, _ in compared))
    names = [name for name in names if 2 * sum((name, a) in compared for a in arms) > len(arms)]
    names.sort(key=lambda name: name not in primary)
    across = min(4, len(names))
    figure, axes = plt.subplots(-(-len(names) // across), across, sharey=True, sharex=True,
                                squeeze=False, figsize=(WIDTH, 0.9 + -(-len(names) // across) *
                                                        (0.4 + 0.21 * len(arms))))
    for ax, name in zip(axes.flat, names):
        for y, arm in enumerate(arms):
            d, colour = compared.get((name, arm), NONE), colour_of(arm)
            if d.n > 2:                                     # of two seeds: too wide
                ax.plot([d.low, d.high], [y, y], color=colour, linewidth=1.5)
            ax.plot(d.mean, y, "o", color=colour, markersize=5,
                    markerfacecolor=colour if p.get((name, arm), 1) < 0.05 else "white")
        ax.axvline(0, color="black", linewidth=0.8)
        ax.set(title=f"{name} (primary)" if name in primary else name,
               ylim=(len(arms) - 0.5, -0.5), yticks=range(len(arms)), yticklabels=arms)
    for ax in axes.flat[len(names):]:
        ax.set_visible(False)
    figure.supxlabel(f"accuracy minus {baseline}'s in points, 95 % over seeds and images; filled: "
                     "primary and significant after Holm", fontsize=9)
    figure.savefig(path)
    plt.close(figure)


def colour_of(arm):
    """The fixed colour of an arm's family: softmax grey, symmetric blue, RPC red, others olive."""
    name = arm.removesuffix("-adv").split(",")[0]
    family = "rpc" if name.startswith(RPC) else name.split("-e")[0]
    return COLOURS.get(family, "tab:olive")


def forest(groups, path):
    """Draw every primary difference of every study on one axis: a panel a kind of measure.

    groups: (title, [(arm, (under corruptions, under PGD), (p after Holm of the two))]). Filled:
    significant. Dashed: adversarially trained.
    """
    from referee.studies.plot import WIDTH, plt
    lines = sum(len(rows) + 1 for _, rows in groups)
    figure, axes = plt.subplots(1, 2, sharex=True, sharey=True, figsize=(WIDTH, 1 + 0.2 * lines))
    ticks, y = {}, 0
    for title, rows in groups:
        ticks[y] = title
        for arm, gaps, p in rows:
            y += 1
            ticks[y] = arm
            for ax, d, own in zip(axes, gaps, p):
                if d is not None:
                    colour = colour_of(arm)
                    ax.plot([d.low, d.high], [y, y], "--" if arm.endswith("-adv") else "-",
                            color=colour, linewidth=1.5)
                    ax.plot(d.mean, y, "o", color=colour, markersize=5,
                            markerfacecolor=colour if own < 0.05 else "white")
        y += 1
    for ax, measure in zip(axes, ("15 corruptions", "PGD-20, 2/255 (CIFAR-10: 1/255)")):
        ax.axvline(0, color="black", linewidth=0.8)
        ax.set(title=measure, ylim=(y - 0.5, -0.8), xlim=(-41, 31))
        ax.set_yticks(list(ticks), ticks.values())
        for label in ax.get_yticklabels():
            label.set_fontweight("bold" if label.get_text() in dict(groups) else "normal")
        ax.tick_params(axis="y", length=0)
    figure.supxlabel("accuracy minus baseline's in points, 95 % (negative: worse); filled: "
                     "significant after Holm; dashed: adversarially trained", fontsize=8.5)
    figure.savefig(path)
    plt.close(figure)
