"""Compare accuracies of networks with a baseline's, paired: intervals, tables, a figure.

Runs are (arm, seed); arms are compared on the same images, paired by seed. Intervals are those of
stats.py in which seeds and images both vary. Two measures of a data set are primary: a
difference in them is significant, and bold, if it survives Holm's correction over arms x 2. All
other numbers are exploratory and never bold. No study itself.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

import common
from common import InputError
from robust import corruptions
from robust.results import title, unpack
from referee.stats import Difference, crossed, detectable, holm, missing, pairs
from referee.stats import show, show_p, spread

BASELINE = "symmetric"
FAMILIES = dict(noise=corruptions.NAMES[:3], blur=corruptions.NAMES[3:7],
                weather=corruptions.NAMES[7:11], digital=corruptions.NAMES[11:])
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


# --- a family of tests ----------------------------------------------------------------------------

class Family(NamedTuple):
    """Arms compared with a baseline, and the tests of that question, corrected together."""
    arms: list                  # the baseline's name stands among them
    baseline: str
    primary: tuple              # the measures that are tested
    found: dict                 # {measure: {(arm, seed): (n,)}}, see outcomes
    gaps: dict                  # {(measure, arm): Difference in points}, arm minus baseline
    p: dict                     # {(measure, arm): p after Holm's correction}, of what is tested


def family(found, arms, baseline=BASELINE, primary=(), references=()):
    """Pair arms with the baseline, seed by seed, and correct over arms x primary measures.

    references: arms whose own question another page asks: compared, but not tested.
    """
    gaps = {}
    for name, runs in found.items():
        of = {arm: {seed: 100 * right for (a, seed), right in runs.items() if a == arm}
              for arm in (baseline, *arms)}
        for arm in arms:
            if arm != baseline and of[baseline].keys() & of[arm].keys():
                gaps[name, arm] = crossed(pairs(of[arm], of[baseline],
                                                f"{arm} and {baseline}, {name}"))
    p = holm({(name, arm): d.p for (name, arm), d in gaps.items()
              if name in primary and arm not in references})
    return Family(list(arms), baseline, tuple(primary), found, gaps, p)


def shared(found, arms, seeds=None):
    """Keep the runs of arms over the seeds (of these) that all of them have: outcomes, seeds."""
    common_ = set.intersection(*({seed for of in found.values() for a, seed in of if a == arm}
                                 for arm in arms))
    kept = common_ if seeds is None else common_ & set(seeds)
    found = {name: {(arm, seed): right for (arm, seed), right in of.items()
                    if arm in arms and seed in kept} for name, of in found.items()}
    return {name: of for name, of in found.items() if of}, sorted(kept)


# --- tables ---------------------------------------------------------------------------------------

NONE = Difference(0, *[np.nan] * 6)                         # a difference that is not there


def accuracy(runs, arm):
    """Write mean ± standard deviation over the seeds of an arm, per cent, and their number."""
    values = [100 * right.mean() for (a, _), right in runs.items() if a == arm]
    return f"{spread(values)} ({len(values)})" if values else ""


def difference(of, name, arm):
    """Write a Family's difference with its interval, bold if it is significant; "" if none."""
    d = of.gaps.get((name, arm), NONE)
    return show(d, bold=of.p.get((name, arm), 1) < 0.05) if d.n else ""


def primary_table(of):
    """Write an arm a row: the primary measures, what is significant and what was detectable."""
    body, names = [], [name for name in of.primary if name in of.found]
    for arm in of.arms:
        line = [arm]
        for name in names:
            d = of.gaps.get((name, arm), NONE)
            power = detectable(d.error, d.df, len(of.p))
            line += [accuracy(of.found[name], arm), difference(of, name, arm), show_p(d.p),
                     show_p(of.p.get((name, arm), np.nan)), f"{power:.1f}".replace("nan", "")]
        body.append(line)
    columns = ("difference (95 % CI)", "p", "p, Holm", "80 % power")
    return common.table(body, ["arm", *(head for name in names for head in (name, *columns))])


def tables(of):
    """Write Markdown: the primary measures, if any; accuracies; differences to the baseline."""
    others, parts = [arm for arm in of.arms if arm != of.baseline], []
    if set(of.primary) & of.found.keys():
        parts += ["The primary measures: accuracy in per cent, mean ± standard deviation (seeds); "
                  f"difference to {of.baseline} in points, paired by seed, 95 % CI over seeds and "
                  "images; p, and after Holm's correction over arms x measures (bold: below .05); "
                  "the smallest difference found with 80 % power at the first step of Holm's:",
                  primary_table(of)]
        if any(d.n == 3 for (name, _), d in of.gaps.items() if name in of.primary):
            parts.append("Of three seeds intervals and p are rough.")
    parts += ["Accuracy in per cent, mean ± standard deviation (seeds):",
              common.table([[name, *(accuracy(runs, arm) for arm in of.arms)]
                            for name, runs in of.found.items()], ["measure", *of.arms])]
    if of.gaps:
        parts += [f"Difference to {of.baseline} in points (95 % CI over seeds and images); what is "
                  "not primary is exploratory:",
                  common.table([[name, *(difference(of, name, arm) for arm in others)]
                                for name in of.found], ["measure", *others])]
    lacking = missing(run for runs in of.found.values() for run in runs)
    if lacking:
        parts.append("Not there: " + ", ".join(f"{arm} seed {seed}" for arm, seed in lacking) + ".")
    return "\n\n".join(parts)


def report(found, groups, primary, seeds=None):
    """Print the tables of each group of arms, compared with its first, over the seeds of all."""
    for arms in groups:
        own, there = shared(found, arms, seeds)
        if not there:
            absent = [arm for arm in arms if not shared(found, [arm], seeds)[1]]
            lacks = " and ".join(absent or ["a seed that all have"])
            print(f"{' and '.join(arms)}: no rows of {lacks} yet.\n")
            continue
        print(f"{', '.join(arms)}, seeds {', '.join(map(str, there))}.\n")
        print(tables(family(own, arms, arms[0], primary)) + "\n")


# --- figure ---------------------------------------------------------------------------------------

def draw(of, path):
    """Draw a Family's differences, arms in rows, a panel a measure.

    A measure that only few arms have is left to the tables.
    """
    from referee.plot import forest
    arms = [arm for arm in of.arms if any(a == arm for _, a in of.gaps)]
    names = list(dict.fromkeys(name for name, _ in of.gaps))
    names = [name for name in names if 2 * sum((name, a) in of.gaps for a in arms) > len(arms)]
    names.sort(key=lambda name: name not in of.primary)
    rows = [(arm, [of.gaps.get((name, arm), NONE) for name in names],
             [of.p.get((name, arm), 1) for name in names]) for arm in arms]
    forest([("", rows)], [f"{name} (primary)" if name in of.primary else name for name in names],
           path, f"accuracy minus {of.baseline}'s in points")
