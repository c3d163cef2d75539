"""Write the numbers of the pages from the stored rows: in sentences, tables and figures.

    python -m referee.pages                  # every page; says which changed
    python -m referee.pages --figures        # the forest plot, the line and lambda's curve, too

A page marks what is written: <!--=d; scenes; rpc4-l1; pgd-->-11.0 (-16.4 to -5.6)<!--/-->. Between
the marks is what the function of that name in `WRITERS` gives for the arguments after it. To add a
number, write the marks with nothing between them and run this. tests/test_pages.py asks that
running it changes nothing.
"""

import argparse
import csv
import json
import re
import statistics
from functools import cache
from pathlib import Path

import numpy as np

import common
from referee.studies import constancy, line
from referee.studies.arms import read
from referee.studies.differences import (compare, corrected, forest, outcomes, primary_of,
                                         primary_table, run_of)
from referee.studies.stats import detectable, paired_t, show, show_p, spread

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "referee/results"
MARKED = re.compile(r"<!--=(.*?)-->(.*?)<!--/-->", re.S)

# --- comparisons: one family of tests each --------------------------------------------------------

ROBUSTNESS, ATTENTIONS = "robustness/results.jsonl", "robust_attentions/results.jsonl"
TEN = ("rpc4-l1", "rpc2-all", "rkde-huber", "rkde-hampel", "mom", "elliptical", "sinkhorn", "keys",
       "keys-rows", "weights")
# name: title, rows, baseline, arms, seeds, images, arms that another question judges
COMPARISONS = {
    "scenes": ("scenes, five seeds", [ROBUSTNESS], "symmetric", (
        "softmax", "rpc4-l1", "rpc2-all", "no-shrink", "clamp", "admm", "sharp"), range(5), 500,
        ()),
    "confirmation": ("scenes, eight fresh seeds", ["constants/s*.jsonl"], "symmetric",
                     ("rpc4-l1",), range(5, 13), 1000, ()),
    "pilot": ("constants of a pilot", ["constants/s*.jsonl"], "symmetric",
              ("released-4-n2", "paper-0.1-n4"), range(5, 10), 1000, ()),
    "chosen": ("constants chosen", ["constants/s*.jsonl"], "symmetric",
               ("paper-0.05-n3", "paper-0.05-n4"), range(10, 15), 1000, ()),
    "second": ("the best of them, again", ["constants/s*.jsonl"], "symmetric",
               ("paper-0.05-n4",), range(15, 20), 1000, ()),
    "ten": ("attentions of others", [ROBUSTNESS, ATTENTIONS], "symmetric", TEN, range(5), 500,
            ("rpc4-l1", "rpc2-all")),
    "control": ("adversarial training", ["control/*_s?.jsonl"], "symmetric", ("symmetric-adv",),
                (5, 6, 7), 1000, ()),
    "added": ("RPC added to it", ["control/*_s?.jsonl"], "symmetric-adv", ("rpc4-l1-adv",),
              (5, 6, 7), 1000, ()),
    "finetune": ("three epochs of RPC at the end", ["finetune/results.jsonl"], "symmetric",
                 ("rpc4-l1",), (0, 1, 2), 500, ()),
    "init": ("one initialisation for all", ["line/s*.jsonl"], "symmetric-e8", ("softmax",),
             range(20, 24), 1000, ()),
    "cifar10": ("CIFAR-10, three seeds", ["robustness/cifar10.jsonl"], "symmetric",
                ("rpc4-l1", "no-shrink"), (0, 1, 2), 500, ()),
    "ten-cifar10": ("CIFAR-10, attentions of others",
                    ["robustness/cifar10.jsonl", "robust_attentions/cifar10.jsonl"], "symmetric",
                    ("rpc4-l1", "keys-rows", "weights", "rkde-huber"), (0, 1, 2), 500,
                    ("rpc4-l1",)),
}


@cache
def compared(name):
    """Compare the arms of a comparison: (found, {(measure, arm): Difference}, {the same: p after
    Holm}, primary measures). Empty where rows are not in yet."""
    _, patterns, baseline, arms, seeds, limit, references = COMPARISONS[name]
    rows = read([path for pattern in patterns for path in sorted(RESULTS.glob(pattern))])
    there = {run_of(row) for row in rows}
    both = [s for s in seeds if all((a, s) in there for a in (baseline, *arms))]
    rows = [row for row in rows if run_of(row)[0] in (baseline, *arms) and run_of(row)[1] in both]
    if not rows:
        return {}, {}, {}, ()
    found, primary = outcomes(rows, limit), primary_of(rows)
    gaps = compare(found, arms, baseline)
    return found, gaps, corrected(gaps, primary, references), primary


def pick(name, measure):
    """Find a measure's full name by its first word: pgd is the primary budget."""
    found, *_, primary = compared(name)
    given = {"pgd": primary[1], "corruptions": primary[0]}
    return given.get(measure, measure)


def difference(name, arm, measure):
    return compared(name)[1][pick(name, measure), arm]


# --- what can stand between marks -----------------------------------------------------------------

def d(name, arm, measure):
    """A difference with its interval: -11.0 (-16.4 to -5.6)."""
    return show(difference(name, arm, measure))


def mean(name, arm, measure):
    return f"{difference(name, arm, measure).mean:+.1f}"


def holm(name, arm, measure):
    return show_p(compared(name)[2][pick(name, measure), arm])


def power(name, arm, measure):
    """The difference found with 80 % power at the first step of Holm's correction."""
    gap = difference(name, arm, measure)
    return f"{detectable(gap.error, gap.df, len(compared(name)[2])):.1f}"


def accuracy(name, arm, measure):
    runs = compared(name)[0][pick(name, measure)]
    return f"{100 * np.mean([right.mean() for (a, _), right in runs.items() if a == arm]):.1f}"


def seeds(name):
    found = compared(name)[0]
    return str(len({seed for _, seed in found["clean"]})) if found else "0"


def table(name):
    """The primary measures of a comparison, an arm a row."""
    _, _, baseline, arms, _, _, references = COMPARISONS[name]
    found, gaps, _, primary = compared(name)
    text = primary_table(found, gaps, (baseline, *arms), baseline, primary, references)
    return f"\n\n{text}\n\n"


@cache
def picture(name):
    return line.stored(name), line.PICTURES[name][3]


@cache
def off_line(name):
    networks, primary = picture(name)
    return line.distances(networks, primary)


def full(name, measure):
    return dict(zip(("pgd", "corruptions"), picture(name)[1])).get(measure, measure)


def off(name, arm, measure):
    """An arm's distance from the line, with its interval."""
    return show(off_line(name)[0][arm, full(name, measure)])


def off_holm(name, arm, measure):
    return show_p(off_line(name)[1][arm, full(name, measure)])


def fitted(name):
    networks, _ = picture(name)
    traced = [n for n in networks if n.arm.startswith(line.TRACED)]
    return traced or [n for n in networks if not line.defended(n.arm)]


def r(name, measure):
    r, low, high, _ = line.correlation(fitted(name), full(name, measure))
    return f"{r:+.2f} ({low:+.2f} to {high:+.2f})"


def bend(name, measure):
    return show_p(line.correlation(fitted(name), full(name, measure))[3])


def explained(name, measure):
    return f"{100 * line.correlation(fitted(name), full(name, measure))[0] ** 2:.0f}"


def networks(name, arm=""):
    return str(len([n for n in (picture(name)[0] if arm else fitted(name))
                    if n.arm.startswith(arm)]))


def at(name, arm, measure):
    """Mean accuracy of an arm's networks in a picture of the line."""
    own = [n.accuracy[full(name, measure)] for n in picture(name)[0] if n.arm == arm]
    return f"{np.mean(own):.1f}"


def loss(name, arm):
    own = [np.log(n.loss) for n in picture(name)[0] if n.arm == arm]
    return f"{np.exp(np.mean(own)):.3f}"


def line_table(name):
    return "\n\n" + line.tables(*picture(name)) + "\n\n"


def hours():
    """Core-hours of training of the networks of line/."""
    rows = common.read_log(RESULTS / "line/training.jsonl")
    return f"{sum(row['seconds'] for row in rows) / 3600:.1f}"


def swept(network, form, lambd, what, digits):
    """What `line --sweep` found of a network with this lambda: top1, entropy, share."""
    for row in common.read_log(RESULTS / "line/lambda.jsonl"):
        if (row["network"], row["form"], row["lambd"]) == (network, form, float(lambd)):
            return f"{row[what]:.{digits}f}"
    raise KeyError(lambd)


def over_layers(table, run, measure, source, step=max):
    """What results/kpca/<table>.csv has of a run, all layers."""
    with open(RESULTS / f"kpca/{table}.csv") as f:
        found = {int(row["step"]): float(row["mean"]) for row in csv.DictReader(f)
                 if (row["run"], row["layer"]) == (run, "all")
                 and (row["measure"], row["source"]) == (measure, source)}
    return found[step(found)]


def kpca(table, run, measure, source, digits, step="last"):
    """A number of results/kpca, of the last or first step; with ? the mean over seeds 0 to 2."""
    names = [run.replace("?", str(s)) for s in range(3)] if "?" in run else [run]
    which = max if step == "last" else min
    number = statistics.mean(over_layers(table, name, measure, source, which) for name in names)
    return f"{number:{',.0f' if digits == '0' else '.' + digits}}"


def eig(network, null=""):
    """The eigen-cosine of trained values of a kind of network, or minus a null's, three seeds."""
    values = [[over_layers("gamma", f"{network}_s{s}", "eig_cos", source) for s in range(3)]
              for source in ("learned", null or "learned")]
    return show(paired_t(np.subtract(*values)), 4) if null else spread(values[0], ".4f")


@cache
def losses(family):
    return constancy.families(RESULTS / "decider/constancy.jsonl")[family]


def nats(family, first, second):
    """The difference of held-out losses of two kinds of axes."""
    return show(paired_t(constancy.gaps(losses(family), first, second)), 3)


def effect(kind, family="span"):
    """What it does that axes are the same for every image: the main effect, or the interaction."""
    of = [constancy.gaps(losses(family), *pair) for pair in (("random", "hashed"), ("mean", "own"))]
    return show(paired_t(np.add(*of) / 2 if kind == "main" else np.subtract(*of)), 3)


def share(*args):
    return f"{100 * float(kpca(*args)):.0f} %"


def shown(name, value, form):
    """A number of the lecture's pictures."""
    return f"{json.loads((ROOT / 'lecture/pictures/numbers.json').read_text())[name][value]:{form}}"


def auc(score):
    """AUC of a token's score against noisy patches, RPC networks after training, three seeds."""
    of = [row for row in common.read_log(RESULTS / "where_is_s/rows.jsonl")
          if "/rpc4-l1_s" in row["run"]]
    last = max(row["step"] for row in of)
    found = [row["values"][f"noise: AUC of {score}"] for row in of
             if row["step"] == last and "noise" in row["kinds"]]
    return f"{statistics.mean(found):.2f}"


def perplexity(attn):
    files = [RESULTS / f"wikitext_small/{attn}_s{seed}.json" for seed in range(3)]
    values = [row["sliding"] for path in files for row in json.loads(path.read_text())["rows"]
              if row["split"] == "test"]
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


WRITERS = {f.__name__.replace("_", "-"): f for f in (
    d, mean, holm, power, accuracy, seeds, table, off, off_holm, r, bend, explained, networks, at,
    loss, line_table, hours, swept, kpca, eig, nats, effect, share, shown, auc, perplexity)}


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


def figures(form="png"):
    """Draw the forest plot of every primary difference, and the figures of the line."""
    groups = []
    for name, (title, _, _, arms, _, _, references) in COMPARISONS.items():
        _, gaps, p, primary = compared(name)
        deit = ("softmax", "elliptical") if name in ("scenes", "ten") else ()
        rows = [(arm + ", DeiT's init" * (arm in deit), [gaps.get((m, arm)) for m in primary],
                 [p.get((m, arm), 1) for m in primary]) for arm in arms if arm not in references]
        if primary:
            groups.append((title, rows))
    forest(groups, RESULTS / f"line/forest.{form}")
    for name, (what, *_, primary) in line.PICTURES.items():
        line.draw(picture(name)[0], primary, RESULTS / f"line/{name}.{form}", what)
    line.draw_lambda(common.read_log(RESULTS / "line/lambda.jsonl"),
                     RESULTS / f"line/lambda.{form}")


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
