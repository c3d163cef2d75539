"""Compare robustness at equal clean loss: how far does a network lie from the baseline's line?

    python -m studies.line                      # tables of the stored networks: 20 seconds
    python -m studies.line --rows out/eval      # the distance of your own networks, too

Longer training makes a network more robust, even without a defence. Therefore accuracy under PGD
and under corruptions is compared with the logarithm of the clean test loss. A line is fitted
through networks of the baseline that were trained for different numbers of epochs. If a data set
has no such networks, the line goes through all undefended networks except the ones under test. The
distance of a network from the line is the effect of its attention or of its training recipe: with a
constant learning rate, even the baseline lies far above the line. So the line can show a loss, but
it cannot prove that something is a defence. Plan and outcomes: studies/results/line/plan.md.

--rows takes results.jsonl of eval_robust.py, or its folder. Run eval_robust.py with --measures
clean pgd corruptions --eps 2/255.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np

import common
from studies.arms import CIFAR10_PRIMARY, SCENES_PRIMARY, files, stored_rows
from studies.robust_attentions import USUAL as ROBUST
from studies.stats import (CORRUPTION_FAMILIES, Difference, detectable, holm, read, satterthwaite,
                           show, show_p, student)

# {name: (images, files of rows, training evaluations, the two primary measures)}
PICTURES = {
    "fresh": ("rendered scenes, 1,000 images", ("line/s*.jsonl", "line/long.jsonl",
                                                "line/robust.jsonl", "control/*_s?.jsonl"),
              ("line/training.jsonl", "control/training.jsonl"), SCENES_PRIMARY[::-1]),
    "scenes": ("rendered scenes, 500 images", ("robustness/results.jsonl",
                                               "robust_attentions/results.jsonl"),
               ("robustness/training.jsonl", "robust_attentions/training.jsonl"),
               SCENES_PRIMARY[::-1]),
    "cifar10": ("CIFAR-10, 2,000 images", ("line/cifar10.jsonl",), ("line/cifar10_training.jsonl",),
                CIFAR10_PRIMARY[::-1]),
}
OTHER_RECIPES = ("line/flat.jsonl", "line/timm_vit.jsonl")         # not used to fit the line
TRACED = "symmetric-e"                           # baseline arms, trained for several lengths
# Groups are tested first, then the arms of a group. "RPC that attends" leaves out the settings that
# make layer 0 average its tokens (uniform-l0, paper-0.05-n4).
GROUPS = {"fresh": {"RPC that attends": ("rpc4-l1", "rpc2-all", "paper-0.25-n4", "paper-1-n4",
                                         "paper-4-n4", "paper-inf-n4"),
                    "attentions of others": tuple(name for name in ROBUST if name != "sharp")},
          "scenes": {"RPC that attends": ("rpc4-l1", "rpc2-all", "no-shrink", "admm")},
          "cifar10": {}}
KIN = ("clamp", "sharp")                         # variants of RPC; no line is fitted through them


class Network(NamedTuple):
    """A trained network: arm, seed, clean test loss in nats, {measure: accuracy in per cent}."""
    arm: str
    seed: int
    loss: float
    accuracy: dict


# --- networks -------------------------------------------------------------------------------------

def networks_of(rows, training=()):
    """Turn Rows into Networks.

    A network's clean loss comes from its Rows or from a file in `training`. Networks without a
    clean loss are left out.
    """
    losses = {row["run"]: row["loss"] for path in training for row in common.read_log(path)}
    losses |= {row.name: row.loss for row in rows if row.loss is not None}
    found, networks = {}, []
    for row in rows:
        if row.name in losses and row.kind != "autoattack":
            found.setdefault(row.name, {})[row.measure] = row
    for name, of in found.items():
        accuracy = {m: row.top1 for m, row in of.items()}
        types = CORRUPTION_FAMILIES["15 corruptions"]
        if set(types) <= set(accuracy):
            accuracy["15 corruptions"] = np.mean([accuracy[kind] for kind in types])
        row = next(iter(of.values()))
        arm = (row.arm or name) + ", DeiT's init" * row.deit
        networks.append(Network(arm, row.seed or 0, losses[name], accuracy))
    return networks


def stored(name):
    """Read the stored networks of a picture (a key of PICTURES)."""
    _, rows, training, _ = PICTURES[name]
    return networks_of(stored_rows(rows), files(training))


def other_recipes():
    """Read the stored networks that were trained by other recipes."""
    return networks_of(stored_rows(OTHER_RECIPES), files(("line/training.jsonl",)))


def reference(networks, *arms):
    """Select the networks through which the line is fitted. arms: the arms under test, if any."""
    traced = [n for n in networks if n.arm.startswith(TRACED)]
    return traced or [n for n in networks if n.arm not in arms and not n.arm.endswith("-adv")]


def of_arms(networks, *arms):
    """Select the networks of some arms."""
    return [n for n in networks if n.arm in arms]


def clean_loss(networks):
    """Return the geometric mean of the networks' clean losses, in nats."""
    return np.exp(np.mean([np.log(n.loss) for n in networks]))


# --- the line -------------------------------------------------------------------------------------

def points(networks, measure):
    """Return log clean loss (n,) and accuracy (n,) of the networks that have the measure."""
    own = [(np.log(n.loss), n.accuracy[measure]) for n in networks if measure in n.accuracy]
    return np.array(own, float).reshape(-1, 2).T


def correlation(networks, measure):
    """Correlate log loss and accuracy.

    Returns: r, the ends of its 95 % interval (Fisher), and the p of a quadratic term (a bend).
    """
    x, y = points(networks, measure)
    r = np.corrcoef(x, y)[0, 1]
    low, high = np.tanh(np.arctanh(r) + np.array([-1.96, 1.96]) / np.sqrt(len(x) - 3))
    beta, covariance, _, df = least_squares(np.vander(x - x.mean(), 3), y)
    return r, low, high, student(len(x), beta[0], covariance[0, 0], df).p


def least_squares(design, y):
    """Fit y by the columns of design.

    Returns: coefficients, their covariance, the residual variance and its degrees of freedom.
    """
    beta, *_ = np.linalg.lstsq(design, y, rcond=None)
    df = len(y) - design.shape[1]
    spread = ((y - design @ beta) ** 2).sum() / df
    return beta, spread * np.linalg.inv(design.T @ design), spread, df


def ends(line, measure):
    """Return the lowest and highest log loss for which the line is used.

    These are the ends of the range of the line's networks, extended by a twentieth of the range.
    """
    x = points(line, measure)[0]
    return np.array([x.min(), x.max()]) + np.array([-0.05, 0.05]) * np.ptp(x)


def distance(own, line, measure, degree=1):
    """Measure the mean distance of networks from the line, in points, as a Difference.

    degree: 1 fits a straight line, 2 a parabola.

    The variance of the distance is the variance of the mean residual plus the variance of the line
    at this clean loss (Welch; degrees of freedom: Satterthwaite). The first part is the largest of
    three estimates. The first estimate is over networks. The second is over seeds, because networks
    of one seed share initialisation and batches. The third is the scatter of the line's networks,
    because a few seeds can agree by chance; with fewer than three networks only this estimate
    exists. Outside the ends of the line, the Difference has no interval and no p.
    """
    own = [network for network in own if measure in network.accuracy]
    (x, y), (at, of) = points(line, measure), points(own, measure)
    fit, covariance, spread, df = least_squares(np.vander(x, degree + 1), y)
    residual, n = of - np.polyval(fit, at), len(own)
    first, last = ends(line, measure)
    if not first <= at.mean() <= last:
        return Difference(n, residual.mean(), *[np.nan] * 5)
    place = np.vander(at, degree + 1).mean(0)
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
    """Compare two arms with different seeds: the difference of means, by Welch's t test."""
    x, y = (points(of, measure)[1] for of in (first, second))
    parts = [(of.var(ddof=1) / len(of), len(of) - 1) for of in (x, y)]
    variance = sum(v for v, _ in parts)
    return student(len(x), x.mean() - y.mean(), variance, satterthwaite(variance, parts))


# --- tests: groups first, then their arms ---------------------------------------------------------

def grouped(name, networks):
    """Test each group as a whole, in both primary measures, with Holm's correction over all.

    Returns: {(group, measure): Difference} and {(group, measure): p}.
    """
    found = {(group, measure): distance(of_arms(networks, *arms), reference(networks, *arms, *KIN),
                                        measure)
             for group, arms in GROUPS[name].items() for measure in PICTURES[name][3]}
    return found, holm({key: d.p for key, d in found.items()})


def arm_distances(name, networks, others=()):
    """Measure the distance of every arm that does not define the line.

    Arms are tested if their group is significantly off the line, with Holm's correction over the
    group. Arms without a group are not tested. Returns: {(arm, measure): Difference} and {(arm,
    measure): p}.
    """
    found, p, every = {}, {}, [*networks, *others]
    for arm in dict.fromkeys(n.arm for n in every if not n.arm.startswith(TRACED)):
        own = of_arms(every, arm)
        found |= {(arm, measure): distance(own, reference(networks, arm), measure)
                  for measure in PICTURES[name][3] if any(measure in n.accuracy for n in own)}
    for (group, measure), value in grouped(name, networks)[1].items():
        if value < 0.05:
            p |= holm({(arm, measure): found[arm, measure].p for arm in GROUPS[name][group]})
    return found, p


# --- at one clean loss, after 24 epochs -----------------------------------------------------------

ASSUMED = {"own line": "the baseline's curve is straight from 12 to 24 epochs at one learning "
           "rate, and RPC would follow it",
           "one slope": "among the 24-epoch networks, accuracy falls with log loss by one slope "
           "for both attentions and both learning rates"}


def adjusted(networks, how, measure):
    """Compare RPC after 24 epochs with its baseline at equal clean loss: a Difference.

    how: "own line" measures the distance from the baseline's line through 12, 16 and 24 epochs, at
    RPC's learning rate. "one slope" fits accuracy by log loss and attention; the result is the
    coefficient of attention. ASSUMED states the assumption of each method.
    """
    rpc = of_arms(networks, "long-rpc4-l1")
    if how == "own line":
        curve = of_arms(networks, "symmetric-e12", "symmetric-e16", "half-symmetric")
        return distance(rpc, curve, measure)
    base = of_arms(networks, "long-symmetric", "half-symmetric")
    (x, y), (at, of) = points(base, measure), points(rpc, measure)
    design = np.stack([np.ones(len(x) + len(at)), np.r_[x, at], np.r_[0 * x, 0 * at + 1]], 1)
    beta, covariance, _, df = least_squares(design, np.r_[y, of])
    return student(len(rpc), beta[2], covariance[2, 2], df)


# --- tables ---------------------------------------------------------------------------------------

def power(d, tests):
    """Format the distance that is detectable with 80 % power at the first step of Holm's test."""
    return f"{detectable(d.error, d.df, tests):.1f}" if d.low == d.low else ""


def distance_cells(d, p, tests):
    """Format three table cells for a distance: the Difference, its p, its power."""
    return [show(d, bold=p < 0.05) if d.low == d.low else "beyond the line", show_p(p),
            power(d, tests)]


def line_tables(name, networks, others=()):
    """Format as Markdown: the line, the distances of groups and arms, RPC at equal clean loss."""
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
        body.append([f"**{group}**, together", str(len(of_arms(networks, *arms))), ""])
        for m in primary:
            body[-1] += ["", *distance_cells(found[group, m], p[group, m], len(p))]
    found, p = arm_distances(name, networks, others)
    for arm in dict.fromkeys(arm for arm, _ in found):
        own = of_arms([*networks, *others], arm)
        tests = next((len(arms) for arms in GROUPS[name].values() if arm in arms), 1)
        row = [arm, str(len(own)), f"{clean_loss(own):.3f}"]
        for m in primary:
            row += [f"{points(own, m)[1].mean():.1f}", *distance_cells(
                found[arm, m], p.get((arm, m), np.nan), tests)] if (arm, m) in found else [""] * 4
        body.append(row)
    columns = [head for m in primary for head in (
        m, "distance (95 % CI)", "p, Holm", "detectable with 80 % power")]
    first, last = np.exp(ends(line, primary[0]))
    text = [f"The line is fitted through {len(line)} networks of "
            f"{'the baseline' if line[0].arm.startswith(TRACED) else 'all arms'}. It is known from "
            f"{first:.3f} to {last:.3f} nats of clean loss:",
            common.table(head, ["measure", "networks", "r (95 % CI)", "variance explained",
                                "points if loss halves", "p of a bend"]),
            "Accuracy in per cent, and the distance from the line in points. Groups are tested "
            "first, then the arms of each group that is significantly off the line:",
            common.table(body, ["arm", "networks", "clean loss", *columns])]
    if of_arms(networks, "long-rpc4-l1"):
        text += ["RPC minus its baseline at equal clean loss, after 24 epochs:", common.table(
            [[how, *(cell for m in primary for d in [adjusted(networks, how, m)]
                     for cell in (show(d), power(d, 1))), ASSUMED[how]] for how in ASSUMED],
            ["adjusted by", *(head for m in primary for head in (m, "detectable with 80 % power")),
             "assumption"])]
    return "\n\n".join(text)


def page(name, others=()):
    """Format all tables of a picture as Markdown, with other networks next to the stored ones."""
    networks = stored(name)
    ours = {n.arm for n in networks}
    yours = [n._replace(arm=f"your {n.arm}") if n.arm in ours else n for n in others]
    return f"## {PICTURES[name][0]}\n\n{line_tables(name, networks, yours)}"


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rows", nargs="+", type=Path, default=[], metavar="FILE",
                   help="also measure the networks in these results.jsonl files or folders")
    args = p.parse_args(argv)
    others = networks_of(read(args.rows))
    if args.rows and not others:
        raise common.InputError("--rows: no network has a clean loss; evaluate with --measures "
                                "clean, too")
    for name in ["fresh"] if args.rows else PICTURES:
        print(page(name, others) + "\n")


if __name__ == "__main__":
    common.run(main)
