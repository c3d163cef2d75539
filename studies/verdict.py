"""What the networks of studies/decider.py say: differences, intervals, a verdict fixed beforehand.

    python -m studies.verdict out/decider/cifar10.jsonl       # tables, verdict, a figure beside it

The statistic is the held-out loss of an arm minus that of another, paired by seed: its mean and 95
% t-interval over seeds. The rule, in results/decider/README.md since before the first run, is
`outcomes`. For each outcome that it is not, the conditions are printed that would have to change.
"""

import argparse
import math
import sys
from pathlib import Path

if not __package__:
    sys.exit("error: start this in the repository's folder, as: python -m studies.verdict")

import numpy as np

import common
from studies.tables import half_width, spread

MARGIN = 0.03                                                               # nats
FAMILIES, NULLS = ("polar", "span"), ("other", "x", "random")


def interval(losses, a, b):
    """Loss of arm a minus arm b, paired by seed: n, mean and both ends of the 95 % t-interval.

    The ends of fewer than two seeds are nan, which lies between no bounds.
    """
    seeds = losses.get(a, {}).keys() & losses.get(b, {}).keys()
    d = np.array([losses[a][seed] - losses[b][seed] for seed in sorted(seeds)])
    mean, half = d.sum() / max(len(d), 1), half_width(d)
    return len(d), mean, mean - half, mean + half


def outcomes():
    """(verdict, conditions, how many of them it needs); the first that holds is the verdict.

    Condition (a, b, low, high): the interval of loss a - b lies between low and high.
    """
    pairs = [(f"{f}-own", f"{f}-{null}") for f in FAMILIES for null in NULLS]
    beaten = [(*pair, -math.inf, -MARGIN) for pair in pairs]
    beaten += [(f"{f}-own", "rms1", -math.inf, 0) for f in FAMILIES]
    alike = [(*pair, -MARGIN, MARGIN) for pair in pairs]
    won = [(*pair, 0, math.inf) for pair in pairs]
    low_rank = [condition for condition in alike if not condition[1].endswith("random")]
    low_rank += [(f"{f}-{basis}", f"{f}-random", -math.inf, 0) for f in FAMILIES
                 for basis in ("own", "other", "x")]
    yield "attention does kernel PCA", beaten, len(beaten)
    yield "attention does not do kernel PCA: every null does as well", alike, len(alike)
    yield "attention does not do kernel PCA: a null does better", won, 1
    yield "low rank is what helps", low_rank, len(low_rank)


def judge(losses):
    """The verdict; and as lines, for each outcome before it, the conditions that fail."""
    lines = []
    for words, conditions, needed in outcomes():
        failed = []
        for a, b, low, high in conditions:
            n, mean, *ends = interval(losses, a, b)
            if not low < ends[0] <= ends[1] < high:
                failed.append(f"  {a} - {b} {bounds(low, high)}; it is {show(n, mean, *ends)}")
        if len(conditions) - len(failed) >= needed:
            return words, lines
        lines += [f"It would be '{words}' if {needed} of {len(conditions)} held. Missing:"]
        lines += failed
    return "undecided: more seeds", lines


def bounds(low, high):
    """A condition in words."""
    if low == -math.inf:
        return f"below {high:g}"
    return f"above {low:g}" if high == math.inf else f"within {low:g} to {high:g}"


def show(n, mean, low, high):
    """A difference in words."""
    if n < 2:
        return f"{mean:+.3f} (one seed)" if n else "not run"
    return f"{mean:+.3f} ({low:+.3f} to {high:+.3f}, {n} seeds)"


def report(path):
    """Print the arms, own minus the others and the verdict; draw the differences."""
    rows, losses, cells = common.read_log(path), {}, []
    expected = {"arm", "seed", "loss", "top1", "cpu_seconds"}
    if not rows or not all(expected <= row.keys() for row in rows):
        raise ValueError(f"{path}: expected rows of studies.decider")
    for row in rows:
        losses.setdefault(row["arm"], {})[row["seed"]] = row["loss"]
    for arm, mine in losses.items():
        top1, loss, seconds = ([row[name] for row in rows if row["arm"] == arm]
                               for name in ("top1", "loss", "cpu_seconds"))
        cells.append([arm, len(mine), spread(top1, ".1f"), spread(loss, ".3f"),
                      f"{np.median(seconds):.0f}"])
    print(f"{rows[0]['data']}, {rows[0]['step']} steps, {rows[0]['images']} held-out images\n")
    print(common.table(cells, ["arm", "seeds", "accuracy in %", "loss in nats",
                               "CPU seconds, median"]) + "\n")

    pairs = [(f"{family}-own", arm) for family in FAMILIES for arm in losses
             if arm.startswith(family) or "-" not in arm]
    differences = [(f"{a} - {b}", *interval(losses, a, b)) for a, b in pairs if a != b]
    differences = [row for row in differences if row[1]]
    cells = [[label, show(*row)] for label, *row in differences]
    print(common.table(cells, ["difference of losses", "mean (95 % t-interval)"]) + "\n")
    verdict, lines = judge(losses)
    print(f"Verdict: {verdict}", *lines, sep="\n")
    draw(differences, Path(path).with_suffix(".png"))


def draw(differences, path):
    """The differences as points with their intervals, the margin as a band."""
    from studies.look import WIDTH, plt
    figure, ax = plt.subplots(figsize=(WIDTH, 0.3 * len(differences) + 1))
    ax.axvspan(-MARGIN, MARGIN, color="0.9")
    ax.axvline(0, color="black", linewidth=0.7)
    for y, (_, n, mean, low, high) in enumerate(differences):
        ax.plot(mean, y, "o", color="tab:blue")
        if n > 1:
            ax.plot([low, high], [y, y], color="tab:blue")
    ax.set_yticks(range(len(differences)), [f"{row[0]}, n = {row[1]}" for row in differences])
    ax.invert_yaxis()
    ax.set_xlabel("difference of held-out loss in nats, 95 % t-interval; grey: the margin")
    figure.savefig(path)


def main():
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("rows", help="file that studies.decider writes")
    report(p.parse_args().rows)


if __name__ == "__main__":
    common.run(main)
