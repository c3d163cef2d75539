"""Is it robustness, or how far training got? Accuracy under attack against clean loss.

    python -m studies.line                      # the stored networks: tables, 20 seconds
    python -m studies.line --rows out/eval      # yours beside them: how far off the line

A network that was trained further is more robust, defended or not. So accuracy under PGD and under
corruptions is drawn against the logarithm of the clean test loss, a point a network; the line is
fitted through networks of the baseline that were trained for different times, where there are some,
else through all undefended ones but those in question. A network's distance from it is what its
attention adds to that, or another recipe: at a learning rate that is never lowered the baseline
itself is far above it. So the line can show a cost; what a defence is it cannot decide. Plan and
outcomes: studies/results/line/plan.md.

--rows: results.jsonl of eval_robust.py, or its folder, with --measures clean "pgd eps=2/255
steps=20" corruptions.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np

import common
from studies.arms import CIFAR10, SHAPES, files
from studies.robust_attentions import USUAL as ROBUST
from studies.stats import (FAMILIES, Difference, detectable, holm, read, satterthwaite, show,
                           show_p, student)

# name: what the images are, files of rows, evaluations of training, the two primaries
PICTURES = {
    "fresh": ("rendered scenes, 1,000 images", ("line/s*.jsonl", "line/long.jsonl",
                                                "line/robust.jsonl", "control/*_s?.jsonl"),
              ("line/training.jsonl", "control/training.jsonl"), SHAPES[::-1]),
    "scenes": ("rendered scenes, 500 images", ("robustness/results.jsonl",
                                               "robust_attentions/results.jsonl"),
               ("robustness/training.jsonl", "robust_attentions/training.jsonl"), SHAPES[::-1]),
    "cifar10": ("CIFAR-10, 2,000 images", ("line/cifar10.jsonl",), ("line/cifar10_training.jsonl",),
                CIFAR10[::-1]),
}
OTHER_RECIPES = ("line/flat.jsonl", "line/timm_vit.jsonl")         # beside the line, not of it
TRACED = "symmetric-e"                           # arms of the baseline trained for several times
# Groups that are tested together, before their arms. Of RPC: those whose layer 0 attends; the
# constants that make it average (uniform-l0, paper-0.05-n4) are not among them.
GROUPS = {"fresh": {"RPC that attends": ("rpc4-l1", "rpc2-all", "paper-0.25-n4", "paper-1-n4",
                                         "paper-4-n4", "paper-inf-n4"),
                    "attentions of others": tuple(name for name in ROBUST if name != "sharp")},
          "scenes": {"RPC that attends": ("rpc4-l1", "rpc2-all", "no-shrink", "admm")},
          "cifar10": {}}
KIN = ("clamp", "sharp")                         # of RPC, in no line that its group is judged by


class Network(NamedTuple):
    """A trained network: its arm and seed, its clean test loss in nats, accuracies in per cent."""
    arm: str
    seed: int
    loss: float
    accuracy: dict


# --- networks -------------------------------------------------------------------------------------

def networks_of(rows, training=()):
    """Make networks of Rows: those with a clean loss, their own or that of a file of training."""
    losses = {row["run"]: row["loss"] for path in training for row in common.read_log(path)}
    losses |= {row.name: row.loss for row in rows if row.loss is not None}
    found, networks = {}, []
    for row in rows:
        if row.name in losses and row.kind != "autoattack":
            found.setdefault(row.name, {})[row.measure] = row
    for name, of in found.items():
        accuracy = {m: row.top1 for m, row in of.items()}
        types = FAMILIES["15 corruptions"]
        if set(types) <= set(accuracy):
            accuracy["15 corruptions"] = np.mean([accuracy[kind] for kind in types])
        row = next(iter(of.values()))
        arm = (row.arm or name) + ", DeiT's init" * row.deit
        networks.append(Network(arm, row.seed or 0, losses[name], accuracy))
    return networks


def stored(name):
    """Read the committed networks of a picture."""
    _, rows, training, _ = PICTURES[name]
    return networks_of(read(files(rows)), files(training))


def other_recipes():
    return networks_of(read(files(OTHER_RECIPES)), files(("line/training.jsonl",)))


def reference(networks, *arms):
    """Choose the networks that the line goes through, for arms or (none) as it is drawn."""
    traced = [n for n in networks if n.arm.startswith(TRACED)]
    return traced or [n for n in networks if n.arm not in arms and not n.arm.endswith("-adv")]


def those(networks, *arms):
    """Choose the networks of some arms."""
    return [n for n in networks if n.arm in arms]


def clean_loss(networks):
    """The geometric mean of their clean losses."""
    return np.exp(np.mean([np.log(n.loss) for n in networks]))


# --- the line -------------------------------------------------------------------------------------

def points(networks, measure):
    """Give log clean loss and accuracy of those that have the measure: (n,), (n,)."""
    own = [(np.log(n.loss), n.accuracy[measure]) for n in networks if measure in n.accuracy]
    return np.array(own, float).reshape(-1, 2).T


def correlation(networks, measure):
    """Correlate log loss and accuracy: r, its 95 % interval (Fisher), and p of a bend."""
    x, y = points(networks, measure)
    r = np.corrcoef(x, y)[0, 1]
    low, high = np.tanh(np.arctanh(r) + np.array([-1.96, 1.96]) / np.sqrt(len(x) - 3))
    beta, covariance, _, df = least_squares(np.vander(x - x.mean(), 3), y)
    return r, low, high, student(len(x), beta[0], covariance[0, 0], df).p


def least_squares(design, y):
    """Fit y by the columns of design: coefficients, their covariance, residual variance and df."""
    beta, *_ = np.linalg.lstsq(design, y, rcond=None)
    df = len(y) - design.shape[1]
    spread = ((y - design @ beta) ** 2).sum() / df
    return beta, spread * np.linalg.inv(design.T @ design), spread, df


def ends(line, measure):
    """Give the log losses between which a line is known: its networks', and a twentieth more."""
    x = points(line, measure)[0]
    return np.array([x.min(), x.max()]) + np.array([-0.05, 0.05]) * np.ptp(x)


def distance(own, line, measure):
    """Measure how far networks lie from the line, all of them as one: the mean residual.

    Its variance is that of the mean of the own residuals plus the line's own at that place
    (Welch's; df: Satterthwaite's). The own part is the largest of three: the networks', the seeds'
    (networks of one seed share initialisation and batches), and what the scatter of the line's
    networks implies, as few seeds can agree by luck; of fewer than three networks the last alone.
    Beyond the line's ends there is no interval and no p: what a line does there is not known.
    """
    own = [network for network in own if measure in network.accuracy]
    (x, y), (at, of) = points(line, measure), points(own, measure)
    fit, covariance, spread, df = least_squares(np.vander(x, 2), y)
    residual, n = of - np.polyval(fit, at), len(own)
    first, last = ends(line, measure)
    if not first <= at.mean() <= last:
        return Difference(n, residual.mean(), *[np.nan] * 5)
    place = np.array([at.mean(), 1])
    of_line, floor, parts = place @ covariance @ place, spread / n, [(0.0, 1)]
    seeds = {network.seed for network in own}
    k, sums = len(seeds), [sum(r - residual.mean() for r, network in zip(residual, own)
                               if network.seed == seed) for seed in seeds]
    if n > 2:
        parts.append((residual.var(ddof=1) / n, n - 1))
    if k > 2:
        parts.append((np.square(sums).sum() / n ** 2 * k / (k - 1), k - 1))
    parts = [max(parts), (of_line, df)] if max(parts)[0] > floor else [(floor + of_line, df)]
    variance = sum(part for part, _ in parts)
    df = satterthwaite(variance, parts)
    return student(max(n, 2), residual.mean(), variance, df)._replace(n=n)


def apart(first, second, measure):
    """Compare networks of other seeds, the images as they are: the difference of their means
    (Welch's t)."""
    x, y = (points(of, measure)[1] for of in (first, second))
    parts = [(of.var(ddof=1) / len(of), len(of) - 1) for of in (x, y)]
    variance = sum(v for v, _ in parts)
    return student(len(x), x.mean() - y.mean(), variance, satterthwaite(variance, parts))


# --- the hierarchy: groups first, then their arms -------------------------------------------------

def grouped(name, networks):
    """Test each group as one, both primaries, Holm over all of these: {(group, measure):
    Difference}, {the same: p}."""
    found = {(group, measure): distance(those(networks, *arms), reference(networks, *arms, *KIN),
                                        measure)
             for group, arms in GROUPS[name].items() for measure in PICTURES[name][3]}
    return found, holm({key: d.p for key, d in found.items()})


def distances(name, networks, others=()):
    """Measure every arm that is not the line: {(arm, measure): Difference}, {the same: p}.

    Arms of a group are tested where the group was found off the line, Holm over that group; a
    single arm that is in no group is not tested.
    """
    found, p, every = {}, {}, [*networks, *others]
    for arm in dict.fromkeys(n.arm for n in every if not n.arm.startswith(TRACED)):
        own = those(every, arm)
        found |= {(arm, measure): distance(own, reference(networks, arm), measure)
                  for measure in PICTURES[name][3] if any(measure in n.accuracy for n in own)}
    for (group, measure), value in grouped(name, networks)[1].items():
        if value < 0.05:
            p |= holm({(arm, measure): found[arm, measure].p for arm in GROUPS[name][group]})
    return found, p


# --- at one clean loss, after 24 epochs -----------------------------------------------------------

ASSUMED = {"own line": "the recipe's curve is straight over its last three lengths (12, 16 and 24 "
           "epochs), at one rate, and RPC would follow it",
           "one slope": "within the 24-epoch networks accuracy falls with log loss by one slope, "
           "for both attentions and both rates"}


def adjusted(networks, how, measure):
    """Compare RPC after 24 epochs with its baseline at one clean loss, in one of two ways.

    own line: its distance from the recipe's own line, extended with the baseline at RPC's rate.
    one slope: the difference in a fit of accuracy by log loss and attention. ASSUMED by each.
    """
    rpc = those(networks, "long-rpc4-l1")
    if how == "own line":
        curve = those(networks, "symmetric-e12", "symmetric-e16", "half-symmetric")
        return distance(rpc, curve, measure)
    base = those(networks, "long-symmetric", "half-symmetric")
    (x, y), (at, of) = points(base, measure), points(rpc, measure)
    design = np.stack([np.ones(len(x) + len(at)), np.r_[x, at], np.r_[0 * x, 0 * at + 1]], 1)
    beta, covariance, _, df = least_squares(design, np.r_[y, of])
    return student(len(rpc), beta[2], covariance[2, 2], df)


# --- shown ----------------------------------------------------------------------------------------

def power(d, tests):
    """Write the distance that 80 of 100 such studies would have found at Holm's first step."""
    return f"{detectable(d.error, d.df, tests):.1f}" if d.low == d.low else ""


def cells(d, p, tests):
    """The cells of a distance in a table."""
    return [show(d, bold=p < 0.05) if d.low == d.low else "beyond its end", show_p(p),
            power(d, tests)]


def tables(name, networks, others=()):
    """Write Markdown: r and the bend of each measure; groups, then arms, and their distances."""
    primary, line = PICTURES[name][3], reference(networks)
    head = []
    for measure in primary:
        x, y = points(line, measure)
        r, low, high, bend = correlation(line, measure)
        head.append([measure, str(len(x)), f"{r:+.2f} ({low:+.2f} to {high:+.2f})",
                     f"{100 * r * r:.0f} %", f"{-np.polyfit(x, y, 1)[0] * np.log(2):+.1f}",
                     show_p(bend)])
    body, (found, p) = [], grouped(name, networks)
    for group, arms in GROUPS[name].items():
        body.append([f"**{group}**, as one", str(len(those(networks, *arms))), ""])
        for m in primary:
            body[-1] += ["", *cells(found[group, m], p[group, m], len(p))]
    found, p = distances(name, networks, others)
    for arm in dict.fromkeys(arm for arm, _ in found):
        own = those([*networks, *others], arm)
        tests = next((len(arms) for arms in GROUPS[name].values() if arm in arms), 1)
        row = [arm, str(len(own)), f"{clean_loss(own):.3f}"]
        for m in primary:
            there = (arm, m) in found
            row += [f"{points(own, m)[1].mean():.1f}",
                    *cells(found[arm, m], p.get((arm, m), np.nan), tests)] if there else [""] * 4
        body.append(row)
    columns = [head for m in primary for head in (
        m, "off the line (95 % CI)", "p, Holm", "found with 80 % power")]
    first, last = np.exp(ends(line, primary[0]))
    text = [f"The line goes through {len(line)} networks of "
            f"{'the baseline' if line[0].arm.startswith(TRACED) else 'all arms'} and is known from "
            f"{first:.3f} to {last:.3f} nats of clean loss:",
            common.table(head, ["measure", "networks", "r (95 % CI)", "variance explained",
                                "points when loss halves", "bend, p"]),
            "Accuracy, per cent, and the distance from the line, points. Groups are tested first, "
            "then the arms of a group that is off the line:",
            common.table(body, ["arm", "networks", "clean loss", *columns])]
    if those(networks, "long-rpc4-l1"):
        text += ["RPC minus its baseline at one clean loss, after 24 epochs:", common.table(
            [[how, *(cell for m in primary for d in [adjusted(networks, how, m)]
                     for cell in (show(d), power(d, 1))), ASSUMED[how]] for how in ASSUMED],
            ["adjusted by", *(head for m in primary for head in (m, "found with 80 % power")),
             "what it assumes"])]
    return "\n\n".join(text)


def page(name, others=()):
    """Write Markdown: all that is known of a picture's networks, and of others beside them."""
    networks = stored(name)
    ours = {n.arm for n in networks}
    yours = [n._replace(arm=f"your {n.arm}") if n.arm in ours else n for n in others]
    return f"## {PICTURES[name][0]}\n\n{tables(name, networks, yours)}"


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rows", nargs="+", type=Path, default=[], metavar="FILE", help="yours")
    args = p.parse_args(argv)
    others = networks_of(read(args.rows))
    if args.rows and not others:
        raise common.InputError("--rows: no network of these has a clean loss: --measures clean "
                                "gives it")
    for name in ["fresh"] if args.rows else PICTURES:
        print(page(name, others) + "\n")


if __name__ == "__main__":
    common.run(main)
