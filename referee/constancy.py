"""Do fixed random axes win because they are random, or because they are the same for every image?

    python -m referee.constancy --rows referee/results/decider/constancy.jsonl

Networks whose values are forced onto axes, and their held-out losses; of the arms

                          differ from image to image           the same for every image
    of kernel PCA         own                                  mean: of the mean Gram matrix
    random                hashed: drawn anew for each image    random

and of axes that differ from image to image without being this head's own: those of another image
(image), of another head (other), of the layer's input (x); own without any gradient (detached).
plain: learned values. What each outcome means was fixed before the runs: results/decider/plan.md;
the networks were trained by referee/studies/constancy.py of commit 23363db.
"""

import argparse
import math
from pathlib import Path

import numpy as np

import common
from referee.stats import holm, paired_t, show, show_p, spread

ROWS = Path(__file__).parent / "results/decider/constancy.jsonl"
NULLS, MARGIN = ("hashed", "image", "other", "x"), 0.03        # in nats
COLUMNS = {"hashed": "drawn anew", "image": "another image's", "x": "the input's",
           "other": "another head's", "own": "kernel PCA's\nown",
           "detached": "own, without\ngradient", "mean": "kernel PCA's\nmean", "random": "random,\nfixed"}


def families(path):
    """Sort rows into {"span": {"own": {seed: loss}, ...}, ...}; plain belongs to every family."""
    found = {}
    for row in common.read_log(path):
        found.setdefault(row["arm"], {})[row["seed"]] = row["loss"]
    sorted_, alone = {}, {arm: of for arm, of in found.items() if "-" not in arm}
    for arm in (arm for arm in found if arm not in alone):
        family, _, basis = arm.partition("-")
        sorted_.setdefault(family, dict(alone))[basis] = found[arm]
    return sorted_


def gaps(found, first, second):
    """Subtract the losses of an arm and another, a seed each, where both are in."""
    seeds = sorted(found.get(first, {}).keys() & found.get(second, {}).keys())
    return np.array([found[first][seed] - found[second][seed] for seed in seeds])


def constancy(found):
    """The main effect of constant axes, one number a seed: (mean - own + random - hashed) / 2."""
    seeds = set.intersection(*(set(found.get(a, ())) for a in ("own", "mean", "hashed", "random")))
    return np.array([(found["mean"][s] - found["own"][s] + found["random"][s]
                      - found["hashed"][s]) / 2 for s in sorted(seeds)])


def beyond(found):
    """Test whether own axes beat each null's by more than the margin: {null: p after Holm}."""
    own = {null: gaps(found, "own", null) for null in NULLS}
    return holm({null: paired_t(d + MARGIN).p for null, d in own.items() if len(d) > 1})


def report(found):
    """Print the arms, the differences and which outcome it is. found: {arm: {seed: loss}}."""
    table = [[arm, str(len(of)), spread(list(of.values()), ".3f")] for arm, of in found.items()]
    print(common.table(table, ["axes", "seeds", "held-out loss in nats"]) + "\n")

    own, p = {null: gaps(found, "own", null) for null in found if null != "own"}, beyond(found)
    table = [[f"own - {null}", str(len(d)), show(paired_t(d), 3), show_p(p.get(null, math.nan))]
             for null, d in own.items() if len(d)]
    print(common.table(table, ["difference", "seeds", "nats (95 % over seeds)",
                               f"differs from {-MARGIN}: p, Holm"]) + "\n")
    helps = len(p) == len(NULLS) and all(own[n].mean() < -MARGIN and p[n] < 0.05 for n in p)
    print("kernel PCA's axes help:", "yes" if helps else "not shown")
    both = constancy(found)
    if len(both) > 1:
        d = paired_t(both)
        print(f"constant minus varying: {show(d, 3)}, {d.n} seeds\nconstancy helps:",
              "yes" if d.high < 0 else "not shown")


def draw(path):
    """Draw a column a kind of axes, varying and constant apart; a line a seed."""
    from referee.plot import WIDTH, plt, save
    found = families(ROWS)["span"]
    figure, ax = plt.subplots(figsize=(WIDTH, 3.6))
    for seed in sorted(found["own"]):
        points = [(i, found[arm][seed]) for i, arm in enumerate(COLUMNS) if seed in found[arm]]
        ax.plot(*zip(*points), "o-", linewidth=0.7, markersize=4, label=f"seed {seed}")
    ax.axvline(5.5, color="0.6", linestyle=":")
    ax.set_xticks(range(len(COLUMNS)), COLUMNS.values(), fontsize=9.5)
    ax.set(ylabel="held-out loss in nats",
           xlabel="axes: left they differ from image to image, right they are the same for all")
    ax.legend(frameon=False)
    save(figure, path)


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rows", type=Path, default=ROWS, help="default: of constancy")
    args = p.parse_args(argv)
    if not args.rows.is_file():
        raise common.InputError(f"--rows {args.rows} is not a file")
    for family, of in families(args.rows).items():
        print(f"{family}\n")
        report(of)


if __name__ == "__main__":
    common.run(main)
