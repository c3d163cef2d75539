"""Write the numbers of the pages from the stored rows: in sentences, tables and figures.

    python -m referee.pages                  # every page; says which changed
    python -m referee.pages --figures        # the forest plot, the line and lambda's curve, too

A page marks what is written: <!--=d; scenes; rpc4-l1; pgd-->-11.0 (-16.4 to -5.6)<!--/-->. Between
the marks is what the function of that name in `WRITERS` gives for the arguments after it. To add a
number, write the marks with nothing between them and run this. `row` looks up any number of any
file of rows: <!--=row; line/lambda.jsonl; network=shapes_rpc; form=paper; lambd=4; share; .2f-->.
"""

import argparse
import csv
import json
import re
import statistics
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import numpy as np

import common
from referee import constancy, lambda_curve, line, where_is_s
from referee.arms import read
from referee.differences import NONE, family, outcomes, primary_of, primary_table, shared
from referee.stats import detectable, interval, paired_t, show, show_p, spread
from robust.patches import KINDS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "referee/results"
MARKED = re.compile(r"<!--=(.*?)-->(.*?)<!--/-->", re.S)

# --- comparisons: one family of tests each --------------------------------------------------------

ROBUSTNESS, ATTENTIONS = "robustness/results.jsonl", "robust_attentions/results.jsonl"
CIFAR10 = ["robustness/cifar10.jsonl", "robust_attentions/cifar10.jsonl"]
CONSTANTS, CONTROL = ["constants/s*.jsonl"], ["control/*_s?.jsonl"]
TEN = ("rpc4-l1", "rpc2-all", "rkde-huber", "rkde-hampel", "mom", "elliptical", "sinkhorn", "keys",
       "keys-rows", "weights")
# name: title, rows, baseline, arms, seeds, images, arms that another question judges
COMPARISONS = {
    "scenes": ("scenes, five seeds", [ROBUSTNESS], "symmetric", (
        "softmax", "rpc4-l1", "rpc2-all", "no-shrink", "clamp", "admm", "sharp"), range(5), 500,
        ()),
    "confirmation": ("scenes, eight fresh seeds", CONSTANTS, "symmetric", ("rpc4-l1",),
                     range(5, 13), 1000, ()),
    "pilot": ("constants of a pilot", CONSTANTS, "symmetric", ("released-4-n2", "paper-0.1-n4"),
              range(5, 10), 1000, ()),
    "chosen": ("constants chosen", CONSTANTS, "symmetric", ("paper-0.05-n3", "paper-0.05-n4"),
               range(10, 15), 1000, ()),
    "second": ("the best of them, again", CONSTANTS, "symmetric", ("paper-0.05-n4",),
               range(15, 20), 1000, ()),
    "ten": ("attentions of others", [ROBUSTNESS, ATTENTIONS], "symmetric", TEN, range(5), 500,
            ("rpc4-l1", "rpc2-all")),
    "control": ("adversarial training", CONTROL, "symmetric", ("symmetric-adv",), (5, 6, 7), 1000,
                ()),
    "added": ("RPC added to it", CONTROL, "symmetric-adv", ("rpc4-l1-adv",), (5, 6, 7), 1000, ()),
    "finetune": ("three epochs of RPC at the end", ["finetune/results.jsonl"], "symmetric",
                 ("rpc4-l1",), (0, 1, 2), 500, ()),
    "cifar10": ("CIFAR-10, three seeds", CIFAR10[:1], "symmetric", ("rpc4-l1", "no-shrink"),
                (0, 1, 2), 500, ()),
    "ten-cifar10": ("CIFAR-10, attentions of others", CIFAR10, "symmetric",
                    ("rpc4-l1", "keys-rows", "weights", "rkde-huber"), (0, 1, 2), 500,
                    ("rpc4-l1",)),
}


@cache
def compared(name):
    """The Family of a comparison, over the seeds that all its arms have."""
    _, patterns, baseline, arms, seeds, limit, references = COMPARISONS[name]
    rows = read(line.files(patterns))
    found, _ = shared(outcomes(rows, limit), (baseline, *arms), seeds)
    return family(found, (baseline, *arms), baseline, primary_of(rows), references)


def d(name, arm, measure, what="difference"):
    """A difference with its interval: -11.0 (-16.4 to -5.6); or its mean, its p after Holm, the
    difference found with 80 % power at Holm's first step, an arm's accuracy."""
    of = compared(name)
    measure = dict(zip(("corruptions", "pgd"), of.primary)).get(measure, measure)
    if what == "accuracy":
        right = [x.mean() for (a, _), x in of.found[measure].items() if a == arm]
        return f"{100 * np.mean(right):.1f}"
    gap = of.gaps[measure, arm]
    if what == "power":
        return f"{detectable(gap.error, gap.df, len(of.p)):.1f}"
    return {"difference": show(gap), "mean": f"{gap.mean:+.1f}",
            "holm": show_p(of.p.get((measure, arm), np.nan))}[what]


def table(name):
    """The primary measures of a comparison, an arm a row."""
    return f"\n\n{primary_table(compared(name))}\n\n"


def summary(*names):
    """The primary differences of several comparisons, an arm a row."""
    body = []
    for name in names:
        title, _, _, arms, *_, references = COMPARISONS[name]
        primary = compared(name).primary
        body += [[title, arm, *(d(name, arm, m, what) for m in primary
                                for what in ("difference", "holm"))]
                 for arm in arms if arm not in references]
    head = [head for m in primary for head in (m, "p, Holm")]
    return f"\n\n{common.table(body, ['networks', 'arm', *head])}\n\n"


# --- the line -------------------------------------------------------------------------------------

@cache
def picture(name):
    """Networks, primary measures, distances and p of a picture of the line."""
    networks, primary = line.stored(name), line.PICTURES[name][3]
    return networks, primary, *line.distances(networks, primary)


def full(name, measure):
    return dict(zip(("pgd", "corruptions"), picture(name)[1])).get(measure, measure)


def off(name, arm, measure, what="distance"):
    """An arm's distance from the line, with its interval; from the parabola; its p after Holm;
    its accuracy; its clean loss, the geometric mean."""
    networks, _, distances, p = picture(name)
    measure, own = full(name, measure), [n for n in networks if n.arm == arm]
    if what == "accuracy":
        return f"{np.mean([n.accuracy[measure] for n in own]):.1f}"
    if what == "loss":
        return f"{np.exp(np.mean([np.log(n.loss) for n in own])):.3f}"
    if what == "parabola":
        return show(line.distance(own, line.reference(networks, arm), measure, 2))
    return show_p(p[arm, measure]) if what == "holm" else show(distances[arm, measure])


def furthest(name, measure, *arms):
    """Of these arms the one whose distance has the smallest p: its name and distance."""
    measure, distances = full(name, measure), picture(name)[2]
    arm = min((a for a in arms if (a, measure) in distances), key=lambda a: distances[a, measure].p)
    return f"{arm} {show(distances[arm, measure])}"


def off_table(name, *arms):
    """Distances from the line and their p, an arm a row."""
    primary = picture(name)[1]
    body = [[arm, *(off(name, arm, m, what) for m in primary for what in ("distance", "holm"))]
            for arm in arms]
    head = [head for measure in primary for head in (measure, "p, Holm")]
    return f"\n\n{common.table(body, ['arm', *head])}\n\n"


def fit(name, measure, what):
    """What is known of the line: r with its interval, p of a bend, per cent of variance explained,
    the number of its networks."""
    of = line.reference(picture(name)[0])
    r, low, high, bend = line.correlation(of, full(name, measure))
    return {"r": f"{r:+.2f} ({low:+.2f} to {high:+.2f})", "bend": show_p(bend),
            "explained": f"{100 * r * r:.0f}", "networks": str(len(of))}[what]


def line_table(name):
    return f"\n\n{line.tables(*picture(name)[:2])}\n\n"


@cache
def paired(name="fresh"):
    patterns, limit = line.PAIRED[name]
    return line.paired(read(line.files(patterns)), limit)


def pair(arm, base, measure, what="difference"):
    """A difference of two arms of one seed, with its interval; its 90 % interval; its p, Holm; the
    number of seeds; the difference found with 80 % power at Holm's first step; that where both
    have one clean loss."""
    name = next(n for n in line.PAIRED if (arm, base, full(n, measure)) in paired(n)[0])
    gaps, p, _ = paired(name)
    key = arm, base, full(name, measure)
    if what == "seeds":
        return str(gaps[key].n)
    if what == "power":
        asked = next(pairs for pairs in line.PAIRS.values() if (arm, base) in pairs)
        return f"{detectable(gaps[key].error, gaps[key].df, 2 * len(asked)):.1f}"
    if what == "equal loss":
        return show(line.at_equal_loss(picture(name)[0], *key))
    if what == "90":
        return "{:+.1f} to {:+.1f}".format(*interval(gaps[key], 0.9))
    return show_p(p[key]) if what == "holm" else show(gaps[key])


def pair_table(name):
    return f"\n\n{line.pair_table(*paired(name))}\n\n"


@cache
def others():
    """Read the networks of other recipes."""
    return line.networks_of(read(line.files(line.OTHER_RECIPES)),
                            line.logged([RESULTS / "line/training.jsonl"]))


def other(arm, measure, what="distance"):
    """How far such networks lie from the line of the fresh ones; their mean loss, accuracy."""
    own, measure = [n for n in others() if n.arm == arm], full("fresh", measure)
    if what == "loss":
        return f"{np.exp(np.mean([np.log(n.loss) for n in own])):.3f}"
    if what == "accuracy":
        return f"{np.mean([n.accuracy[measure] for n in own]):.1f}"
    return show(line.distance(own, line.reference(picture("fresh")[0]), measure))


def pair_verdict():
    return line.verdict(*paired()[:2])


def long_verdict():
    return line.long_verdict(*paired()[:2])


def second_verdict():
    return line.second_verdict(*paired("cifar10")[:2])


def lambda_table():
    return f"\n\n{lambda_curve.table(lambda_curve.trained())}\n\n"


# --- other rows -----------------------------------------------------------------------------------

@cache
def rows_of(file):
    """The rows of a file under results/: CSV, one JSON object a line, or a JSON object."""
    path = RESULTS / file
    if path.suffix == ".csv":
        with open(path, newline="") as f:
            return list(csv.DictReader(f))
    if path.suffix == ".jsonl":
        return common.read_log(path)
    found = json.loads(path.read_text())
    return found.get("rows", [found])


def plain(x):
    """A number as a condition has it: 0.0 is 0."""
    return f"{x:g}" if isinstance(x, float) else str(x)


def numbers(file, *given):
    """The numbers of a column, of all rows that meet the conditions (column=pattern); of rows at
    several training steps the last. A file with * stands for several."""
    *conditions, column = given
    wanted = dict(condition.split("=", 1) for condition in conditions)
    found = []
    for path in [file] if file.startswith("..") else sorted(RESULTS.glob(file)):
        rows = [row for row in rows_of(path) if all(
            fnmatchcase(plain(row[name]), pattern.replace("[", "[[]"))
            for name, pattern in wanted.items())]
        end = max((float(row.get("step", 0)) for row in rows), default=0)
        for row in (row for row in rows if float(row.get("step", 0)) == end):
            for part in column.split("."):
                row = row[part]
            found.append(float(row))
    return found


def row(file, *given):
    """A number of a file of rows, written in the last argument's form; the mean of several; with ±
    before the form their standard deviation, too, with ci their t-interval."""
    *given, form = given
    return number(numbers(file, *given), form)


def number(found, form):
    """The mean of numbers in a form: .2f, ±.2f, ci2 or, the interval without signs, in2."""
    if form.startswith("±"):
        return spread(found, form[1:])
    if form.startswith("ci"):
        return show(paired_t(found), int(form[2:]))
    if form.startswith("in"):
        return show(paired_t(found), int(form[2:])).replace("+", "")
    return format(statistics.mean(found), form).replace("%", " %")


def kpca(table, run, measure, source, form, *more):
    """A number of results/kpca, the mean over layers, heads and images."""
    return row(f"kpca/{table}.csv", "layer=all", f"run={run}", f"measure={measure}",
               f"source={source}", *more, "mean", form)


def eig_table(*networks):
    """The eigen-cosines of networks, a row each."""
    columns = [("eig_cos", "learned", "±.4f"), ("eig_cos: learned -", "x W", "ci4"),
               ("eig_cos: learned -", "other", "ci4")]
    body = [[network, *(kpca("gamma", f"{network}_s?", *column) for column in columns)]
            for network in networks]
    head = ["network (n = 3)", "eigen-cosine, trained", "- random matrix", "- other head"]
    return f"\n\n{common.table(body, head)}\n\n"


def nats(contrast, family="span", rows="constancy"):
    """A difference of held-out losses of forced values: own - hashed, or an effect's name."""
    of = constancy.families(RESULTS / f"decider/{rows}.jsonl")[family]
    first, _, second = contrast.partition(" - ")
    found = constancy.gaps(of, first, second) if second else constancy.effects(of)[contrast]
    return show(paired_t(found), 3)


def beyond(null):
    """The p after Holm's correction of: own axes are better than this null's by the margin."""
    return show_p(constancy.beyond(constancy.families(RESULTS / "decider/constancy.jsonl")["span"])[
        null])


# --- where is S? ----------------------------------------------------------------------------------

@cache
def trained_last():
    """The values of each network at its last step: {network: {measure: [of each seed]}}."""
    groups = where_is_s.over_seeds(rows_of("where_is_s/rows.jsonl"))
    return {network: groups[network, step] for network, step in sorted(groups)}


def where(network, measure, form):
    """A value of where_is_s after training, in a form of `row`."""
    return number(trained_last()[network][measure], form)


def where_table():
    """AUC of S for corrupted patches, beside scores that need no S; a kind of damage a column."""
    rpc, clamp = "rpc 4iter/layer1", "rpc 1iter/layer1, lambda 0.5"
    scores = [("rpc4-l1: S, PAP step 4", rpc, "S, step 4"), ("null: size of the key", rpc, "|k|"),
              ("null: distance from the mean key", rpc, "distance"),
              ("clamp: S", clamp, "S, step 1"), ("clamp's null: distance", clamp, "distance")]
    body = [[title, *(where(network, f"{kind}: AUC of {score}", "±.2f") for kind in KINDS)]
            for title, network, score in scores]
    return f"\n\n{common.table(body, ['score of a token', *KINDS])}\n\n"


WRITERS = {f.__name__.replace("_", "-"): f for f in (
    d, table, summary, off, furthest, off_table, fit, line_table, pair, pair_table, row, kpca,
    eig_table, nats, beyond, where, where_table, lambda_table,
    pair_verdict, long_verdict, second_verdict, other)}


# --- pages ----------------------------------------------------------------------------------------

def fill(text):
    """Write what stands between marks anew."""
    def write(match):
        name, *given = [part.strip() for part in match[1].split(";")]
        return f"<!--={match[1]}-->{WRITERS[name](*given)}<!--/-->"
    return MARKED.sub(write, text)


def pages():
    return [ROOT / "README.md", ROOT / "docs/dispute.md", ROOT / "referee/README.md",
            *sorted(RESULTS.glob("*/*.md"))]


def differences():
    """Every primary difference of every study, as `plot.forest` wants it; pairs of one seed have no
    interval to draw."""
    groups = []
    for name, (title, _, _, arms, _, _, references) in COMPARISONS.items():
        of = compared(name)
        deit = ("softmax", "elliptical") if name in ("scenes", "ten") else ()
        groups.append((title, [
            (arm + ", DeiT's init" * (arm in deit), [of.gaps.get((m, arm), NONE) for m in
             of.primary], [of.p.get((m, arm), 1) for m in of.primary])
            for arm in arms if arm not in references]))
    for name, title in (("fresh", "one initialisation, fresh seeds"),
                        ("cifar10", "CIFAR-10, fresh seeds")):
        gaps, p, _ = paired(name)
        primary = line.PICTURES[name][3][::-1]
        groups.append((title, [
            (f"{arm} - {base}", [gaps.get((arm, base, m), NONE) for m in primary],
             [p.get((arm, base, m), 1) for m in primary])
            for arm, base in dict.fromkeys(key[:2] for key in gaps if gaps[key].n > 1)]))
    return [(title, rows) for title, rows in groups if rows]


def figures(form="png"):
    """Draw the forest plot of every primary difference, and the figures of the line."""
    from referee.plot import forest
    forest(differences(), ("15 corruptions", "PGD-20, 2/255 (CIFAR-10: 1/255)"),
           RESULTS / f"line/forest.{form}", "accuracy minus baseline's in points")
    for name, (what, *_, primary) in line.PICTURES.items():
        line.draw(picture(name)[0], primary, RESULTS / f"line/{name}.{form}", what,
                  others() if name == "fresh" else ())
    lambda_curve.draw(rows_of("line/lambda.jsonl"), RESULTS / f"line/lambda.{form}",
                      lambda_curve.trained())


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--figures", action="store_true", help="draw them, too")
    p.add_argument("--format", choices=["png", "pdf", "svg"], default="png", help="of the figures")
    args = p.parse_args(argv)
    for path in pages():
        old = path.read_text()
        new = fill(old)
        if new != old:
            path.write_text(new)
            print(f"{path.relative_to(ROOT)} changed")
    if args.figures:
        figures(args.format)


if __name__ == "__main__":
    common.run(main)
