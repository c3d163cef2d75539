"""Is it robustness, or how far training got? Accuracy under attack against clean loss.

    python -m referee.line                      # the committed networks: tables, figures
    python -m referee.line --rows out/eval      # yours beside them: how far off the line?
    python -m referee.line --format pdf --out_dir out/line

A network that was trained further is more robust, defended or not. So accuracy under PGD and under
corruptions is drawn against the logarithm of the clean test loss, a point a network; the line is
fitted through networks of the baseline that were trained for different times, where there are some,
else through all undefended ones but those in question. A network's distance from it is what its
attention or its defence adds to that, or another recipe: at a learning rate that is never lowered
the baseline itself is far above it. Plan and outcomes: referee/results/line/plan.md.

--rows: results.jsonl of eval_robust.py, or its folder, with --measures clean "pgd eps=2/255
steps=20" corruptions; their clean loss is that of the row (`loss`), or of --training.
"""

import argparse
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

import common
from referee.arms import read
from referee.differences import family, outcomes, primary_of, shared
from referee.robust_attentions import USUAL as ROBUST
from referee.stats import Difference, holm, interval, show, show_p, student
from robust import corruptions
from robust.results import title

RESULTS = Path(__file__).parent / "results"
# name: what the images are, folders or files of rows, evaluations of training, the two primaries
PICTURES = {
    "fresh": ("rendered scenes, 1,000 images", ["line/s*.jsonl", "line/long.jsonl",
                                                "line/robust.jsonl", "control/*_s?.jsonl"],
              ["line/training.jsonl", "control/training.jsonl"], ("pgd 2/255", "15 corruptions")),
    "scenes": ("rendered scenes, 500 images", ["robustness/results.jsonl",
                                               "robust_attentions/results.jsonl"],
               ["robustness/training.jsonl", "robust_attentions/training.jsonl"],
               ("pgd 2/255", "15 corruptions")),
    "cifar10": ("CIFAR-10, 2,000 images", ["line/cifar10.jsonl"], ["line/cifar10_training.jsonl"],
                ("pgd 1/255", "15 corruptions")),
}
OTHER_RECIPES = ["line/flat.jsonl", "line/timm_vit.jsonl"]         # beside the line, not of it
MEASURES = ("pgd 1/255", "pgd 2/255", "15 corruptions")
TRACED = "symmetric-e"                           # arms of the baseline trained for several times


class Network(NamedTuple):
    """A trained network: its arm and seed, its clean test loss in nats, accuracies in per cent."""
    arm: str
    seed: int
    loss: float
    accuracy: dict


# --- networks -------------------------------------------------------------------------------------

def name_of(row):
    """The name of a network: of its folder, or file."""
    return Path(row["checkpoint"]).name


def networks_of(rows, training):
    """Read networks from the evaluator's rows: those whose checkpoint has a clean loss."""
    losses = {row["run"]: row["loss"] for row in training}            # a later row counts
    losses |= {name_of(row): row["loss"] for row in rows if "loss" in row}
    found, deit = {}, set()
    for row in rows:
        ours = "embed_dim" in row["model_config"]
        if ours and row["model_config"].get("init") != "default":
            deit.add(name_of(row))
        of = found.setdefault(name_of(row), {})
        if row["measure"] == "corruptions":
            of.setdefault("types", {})[title(row)] = np.mean(row["top1"])
        elif row["measure"] != "autoattack":
            of[title(row)] = row["top1"]
    networks = []
    for name, of in found.items():
        types = of.pop("types", {})
        if set(corruptions.NAMES) <= set(types):
            of["15 corruptions"] = np.mean([types[kind] for kind in corruptions.NAMES])
        arm, _, seed = name.rpartition("_s")
        if name in losses:
            arm, seed = (arm, int(seed)) if arm and seed.isdecimal() else (name, 0)
            label = f"{arm}, DeiT's init" if name in deit else arm
            networks.append(Network(label, seed, losses[name], of))
    return networks


def files(patterns):
    return sorted(path for pattern in patterns for path in RESULTS.glob(pattern))


def logged(paths):
    return [row for path in paths for row in common.read_log(path)]


def stored(name):
    """Read the committed networks of a picture."""
    _, rows, training, _ = PICTURES[name]
    return networks_of(read(files(rows)), logged(files(training)))


def defended(arm):
    return arm.endswith("-adv")


def reference(networks, arm=None):
    """Choose the networks that the line goes through, for an arm or (None) as it is drawn."""
    traced = [n for n in networks if n.arm.startswith(TRACED)]
    return traced or [n for n in networks if n.arm != arm and not defended(n.arm)]


# --- the line -------------------------------------------------------------------------------------

def points(networks, measure):
    """Give log clean loss and accuracy of those that have the measure: (n,), (n,)."""
    own = [(np.log(n.loss), n.accuracy[measure]) for n in networks if measure in n.accuracy]
    return np.array(own, float).reshape(-1, 2).T


def correlation(networks, measure):
    """Correlate log loss and accuracy: r, its 95 % interval (Fisher), and p of a bend."""
    x, y = points(networks, measure)
    r = np.corrcoef(x, y)[0, 1]
    low, high = np.tanh(np.arctanh(r) + np.array([-1.96, 1.96]) / np.sqrt(max(len(x) - 3, 0.1)))
    if len(x) < 5:
        return r, low, high, np.nan
    design = np.stack([np.ones_like(x), x - x.mean(), (x - x.mean()) ** 2], 1)
    beta, *_ = np.linalg.lstsq(design, y, rcond=None)
    left = ((y - design @ beta) ** 2).sum() / (len(x) - 3)
    error = left * np.linalg.inv(design.T @ design)[2, 2]
    return r, low, high, student(len(x), beta[2], error, len(x) - 3).p


def ends(line, measure):
    """Give the log losses between which a line is known: its networks', and a twentieth more."""
    x = points(line, measure)[0]
    return np.array([x.min(), x.max()]) + np.array([-0.05, 0.05]) * np.ptp(x)


def off_line(own, line, measure, degree=1):
    """Give the mean residual of networks to the least-squares line (2: parabola) through others."""
    x, y = points(own, measure)
    return float(np.mean(y - np.polyval(np.polyfit(*points(line, measure), degree), x)))


def distance(own, line, measure, degree=1):
    """Measure how far an arm lies from the line: its interval leaves out a seed at a time.

    Few seeds can agree by luck. So it is no narrower than the scatter of the line's own networks
    makes it: so far off could as many of theirs lie. With fewer than three seeds it is that alone.
    An arm beyond the line's ends has no interval and no p: what a line does there is not known.
    degree: 2 for a parabola, where lines bend.
    """
    own, line = ([n for n in of if measure in n.accuracy] for of in (own, line))
    first, last = ends(line, measure)
    if not first <= points(own, measure)[0].mean() <= last:
        return Difference(len(own), off_line(own, line, measure, degree), *[np.nan] * 5)
    mine = {n.seed for n in own}
    floor = scattered(own, line, measure, degree)
    if len(mine) < 3:
        return floor
    parts = []                          # (variance, df): of its seeds, of the line's
    for seeds in (mine, {n.seed for n in line} - mine):
        left = [off_line(*([n for n in of if n.seed != seed] for of in (own, line)), measure,
                         degree) for seed in seeds]
        if len(left) > 1:
            parts.append(((len(left) - 1) * np.var(left), len(left) - 1))
    variance = sum(part for part, _ in parts)
    df = variance ** 2 / sum(part ** 2 / n for part, n in parts)                 # Satterthwaite's
    found = student(len(own), floor.mean, variance, df)
    return max(found, floor, key=lambda d: d.high - d.low)              # it only widens


def scattered(own, line, measure, degree=1):
    """Measure how far off the mean of networks is, with the prediction interval of such a mean."""
    x, y = points(line, measure)
    off, df = off_line(own, line, measure, degree), len(x) - degree - 1
    if df < 1:
        return Difference(len(own), off, *[np.nan] * 5)
    spread = ((y - np.polyval(np.polyfit(x, y, degree), x)) ** 2).sum() / df
    design = np.vander(x, degree + 1)
    at = np.vander(points(own, measure)[0], degree + 1).mean(0)
    variance = spread * (1 / len(own) + at @ np.linalg.inv(design.T @ design) @ at)
    return student(max(len(own), 2), off, variance, df)._replace(n=len(own))


def distances(networks, primary, others=()):
    """Measure every arm that is not the line: {(arm, measure): Difference}, {the same: p, Holm}."""
    arms = dict.fromkeys(n.arm for n in (*networks, *others) if not n.arm.startswith(TRACED))
    found = {}
    for arm in arms:
        own = [n for n in (*networks, *others) if n.arm == arm]
        for measure in MEASURES:
            if any(measure in n.accuracy for n in own):
                found[arm, measure] = distance(own, reference(networks, arm), measure)
    return found, holm({key: d.p for key, d in found.items() if key[1] in primary})


# --- shown ----------------------------------------------------------------------------------------

def tables(networks, primary, others=()):
    """Write Markdown: r and the bend of each measure; each arm's distance from the line."""
    line = reference(networks)
    traced = line[0].arm.startswith(TRACED)
    found, p = distances(networks, primary, others)
    head = []
    for measure in MEASURES:
        x, y = points(line, measure)
        if len(x) > 2:
            r, low, high, bend = correlation(line, measure)
            slope = np.polyfit(x, y, 1)[0]
            head.append([measure, str(len(x)),
                         f"{r:+.2f} ({low:+.2f} to {high:+.2f})", f"{100 * r * r:.0f} %",
                         f"{-slope * np.log(2):+.1f}", show_p(bend)])
    bent = [m for m in primary if traced and correlation(line, m)[3] < 0.05]
    body = []
    for arm in dict.fromkeys(arm for arm, _ in found):
        own = [n for n in (*networks, *others) if n.arm == arm]
        row = [arm, str(len(own)), f"{np.exp(np.mean([np.log(n.loss) for n in own])):.3f}"]
        for measure in primary:
            d = found.get((arm, measure))
            row += [f"{points(own, measure)[1].mean():.1f}",
                    show(d, bold=p[arm, measure] < 0.05) if d.low == d.low else "beyond its end",
                    show_p(p[arm, measure])] if d else [""] * 3
        known = {m for m in bent if (arm, m) in found and found[arm, m].low == found[arm, m].low}
        row += [show(distance(own, line, m, 2)) if m in known else "" for m in bent]
        body.append(row)
    columns = [head for m in primary for head in (m, "off the line (95 % CI)", "p, Holm")]
    columns += [f"off the parabola, {m}" for m in bent]
    first, last = np.exp(ends(line, primary[0]))
    return "\n\n".join([
        f"The line goes through {len(line)} networks of "
        f"{'the baseline' if traced else 'all arms'} and is known from {first:.3f} to {last:.3f} "
        "nats of clean loss:",
        common.table(head, ["measure", "networks", "r (95 % CI)", "variance explained",
                            "points when loss halves", "bend, p"]),
        "Accuracy, per cent, and the distance from the line, points (bold: significant):",
        common.table(body, ["arm", "networks", "clean loss", *columns])])


MARKS = "o^D<>phX*P"
TRAINED_OUT = {"long": "v", "half": "d"}                # 24 epochs; at half the learning rate


def called(arm):
    """What a legend calls an arm: long-rpc4-l1 is rpc4-l1, 24 epochs."""
    first, _, own = arm.partition("-")
    names = {"long": f"{own}, 24 epochs", "half": f"{own}, half the rate",
             "flat": f"{own.replace('e8', 'symmetric')}, flat rate"}
    own = re.sub(r"-e\d+$", "", arm.replace(".py:build_", ", ").removesuffix(".py:build"))
    return names.get(first, own)


def reading_order(arm):
    """The key that sorts arms: the traced baseline, 8 epochs, 24 epochs, adversarially trained."""
    first = arm.partition("-")[0]
    return (not arm.startswith(TRACED), defended(arm), first in TRAINED_OUT, first == "half")


def draw(networks, primary, path, what, others=()):
    """Draw a panel a primary measure: clean loss against accuracy, a point a network."""
    from referee.plot import WIDTH, colour_of, legend, plt, save
    figure, axes = plt.subplots(1, len(primary), figsize=(WIDTH, 5), sharex=True)
    if any(n.arm.startswith(TRACED) for n in networks):             # one look for all of them
        networks = [n._replace(arm="other attentions") if n.arm in ROBUST else n for n in networks]
    arms = sorted(dict.fromkeys(n.arm for n in networks), key=reading_order)
    traced = {arm: arm.removeprefix(TRACED) for arm in arms if arm.startswith(TRACED)}
    traced = dict(sorted(traced.items(), key=lambda item: int(item[1])))         # arm: its epochs
    looks = {}                                                  # arm: mark, fill, colour, label
    for arm in arms:
        same = [mark for mark, _, colour, _ in looks.values() if colour == colour_of(arm)]
        mark = TRAINED_OUT.get(arm.partition("-")[0])
        mark = mark if mark and mark not in same else MARKS[len(same) % len(MARKS)]
        mark = "s" if defended(arm) else mark
        looks[arm] = mark, "none" if defended(arm) else "full", colour_of(arm), called(arm)
    for arm in traced:
        label = f"symmetric, {' '.join(traced.values())} epochs"
        looks[arm] = "o", "full", colour_of(arm), label
    looks |= {arm: (mark, "none", "black", called(arm))
              for arm, mark in zip(dict.fromkeys(n.arm for n in others), "PX*HD" * len(others))}
    for ax, measure in zip(axes, primary):
        of = {arm: points([n for n in (*networks, *others) if n.arm == arm], measure)
              for arm in looks}
        for arm, (mark, fill, colour, label) in looks.items():
            ax.plot(np.exp(of[arm][0]), of[arm][1], mark, fillstyle=fill, color=colour, alpha=0.75,
                    label=label, markersize=6, markeredgewidth=1.2)
        means = {arm: (np.exp(of[arm][0].mean()), of[arm][1].mean()) for arm in traced}
        ax.plot(*zip(*means.values()) if means else ([], []), color=colour_of("symmetric"))
        for i, (arm, at) in enumerate(means.items()):
            ax.annotate(traced[arm] + ("" if i else " epochs"), at, (9, -13), fontsize=9,
                        color=colour_of("symmetric"), textcoords="offset points")
        line = reference(networks)
        x = ends(line, measure)
        ax.plot(np.exp(x), np.polyval(np.polyfit(*points(line, measure), 1), x), "--",
                color="black", linewidth=1, label="the line", zorder=0)
        x = points([*networks, *others], measure)[0]
        ax.set(xscale="log", xlabel="clean test loss in nats (log scale)", ylabel="accuracy in %",
               title=measure.replace("pgd", "PGD-20 at"))
        ticks = sorted({float(f"{x:.2g}") for x in np.exp(np.linspace(x.min(), x.max(), 5))})
        ax.set_xticks(ticks, [f"{x:g}" for x in ticks])
        ax.set_xticks([], minor=True)
        ax.margins(y=0.1)
    axes[0].invert_xaxis()                                          # both: they share x
    figure.suptitle(f"{what}: a point a network; trained further is to the right", fontsize=9.5)
    legend(figure, axes[0], "lower center", ncols=5, fontsize=8, columnspacing=0.8,
           handletextpad=0.2)
    save(figure, path)


# --- groups 1, 2, 3, 4, 7 and 8 of the plan: pairs of one seed ------------------------------------

PAIRS = {1: [("softmax-e8", "symmetric-e8")],
         2: [("paper-0.05-n4", "uniform-l0"), ("paper-0.05-n4", "symmetric-e8"),
             ("uniform-l0", "symmetric-e8")],
         3: [(f"long-{arm}", "long-symmetric") for arm in ("rpc4-l1", "softmax", "uniform-l0")],
         4: [("rpc4-l1-e12", "symmetric-e12")],
         "4, later": [(f"{arm}-e12", "symmetric-e12") for arm in ("softmax", "uniform-l0")],
         7: [("flat-rpc4-l1", "flat-e8")],
         8: [("long-rpc4-l1", "half-symmetric")], "rate": [("long-symmetric", "half-symmetric")]}
# picture: rows of its pairs, images a measure
PAIRED = {"fresh": (["line/s*.jsonl", "line/long.jsonl", "line/flat.jsonl"], 1000),
          "cifar10": (["line/cifar10.jsonl"], 2000)}
MARGIN, LONG_MARGIN = 3, 4                      # points: what counts as equal, fixed beforehand


def processors(rows):
    """Sort seeds by the processor of their rows: {name: [seeds]}. A seed's must be one."""
    of = {}
    for row in rows:
        seed = int(name_of(row).rpartition("_s")[2])
        name = row["hardware"].removeprefix("cpu, ").rpartition(", ")[0] or row["hardware"]
        if of.setdefault(seed, name) != name:
            raise common.InputError(f"seed {seed} has rows of {of[seed]} and {name}: no pairs")
    return {name: sorted(s for s in of if of[s] == name) for name in dict.fromkeys(of.values())}


def paired(rows, limit=1000):
    """Compare the arms of each group, by seed: {(arm, baseline, measure): Difference}, p of each
    after Holm over its group, pairs that are not in counted, and the seeds of each processor."""
    where, gaps, p = processors(rows), {}, {}
    found, primary = outcomes(rows, limit), primary_of(rows)
    for pairs in PAIRS.values():
        own = {}
        for arm, base in pairs:
            both, seeds = shared(found, [arm, base])
            of = family(both, [arm], base).gaps if seeds else {}
            own |= {(arm, base, m): of[m, arm] for m in primary if (m, arm) in of}
        gaps |= own
        absent = {(*pair, m): 1.0 for pair in pairs for m in primary}
        p |= holm(absent | {key: d.p for key, d in own.items()})
    return gaps, {key: p[key] for key in gaps}, where


def at_equal_loss(networks, arm, base, measure):
    """Compare two arms at one clean loss: the intercept of the differences in accuracy of pairs of
    one seed on their differences in log loss. Its interval is over seeds, the images as they are.
    """
    of = {(n.arm, n.seed): n for n in networks}
    pairs = [(of[arm, s], of[base, s]) for a, s in of if a == arm and (base, s) in of]
    x = np.array([np.log(mine.loss / other.loss) for mine, other in pairs])
    y = np.array([mine.accuracy[measure] - other.accuracy[measure] for mine, other in pairs])
    design, df = np.vander(x, 2), len(pairs) - 2
    beta, *_ = np.linalg.lstsq(design, y, rcond=None)
    error = ((y - design @ beta) ** 2).sum() / df * np.linalg.inv(design.T @ design)[1, 1]
    return student(len(pairs), beta[1], error, df)


def verdict(gaps, p):
    """Does lambda .05 equal lambda 0, by two one-sided tests on both primaries? equal, differ or
    open, as the plan has it."""
    of = {key: d for key, d in gaps.items() if key[:2] == PAIRS[2][0]}
    ends = [abs(end) for d in of.values() for end in interval(d, 0.9)]
    if len(of) == 2 and min(d.n for d in of.values()) > 2 and max(ends) < MARGIN:
        return "equal"
    return "differ" if any(p[key] < 0.05 for key in of) else "open"


def long_verdict(gaps, p):
    """Does RPC cost robustness when both are trained out? As the plan has it: below on a primary,
    significantly; no more than the margin off on both; or open."""
    of = {key: d for key, d in gaps.items() if key[:2] == PAIRS[3][0]}
    if any(d.mean < 0 and p[key] < 0.05 for key, d in of.items()):
        return "RPC costs robustness here, also when trained out"
    if len(of) == 2 and all(-LONG_MARGIN < d.low and d.high < LONG_MARGIN for d in of.values()):
        return "what it cost was training time"
    return "open"


def second_verdict(gaps, p):
    """Does RPC cost robustness on CIFAR-10? As the plan has it."""
    of = {key: d for key, d in gaps.items() if key[:2] == PAIRS[4][0]}
    below, above = (any(sign * d.mean > 0 and p[key] < 0.05 for key, d in of.items())
                    for sign in (-1, 1))
    if below != above:
        return "RPC costs robustness on CIFAR-10, too" if below else "RPC gains on CIFAR-10"
    if len(of) == 2 and all(-MARGIN < d.low and d.high < MARGIN for d in of.values()):
        return "no difference that matters"
    return "open"


def pair_table(gaps, p, where):
    """Write Markdown: a pair and a measure a row, what it means, which processor had which seeds.
    """
    body = []
    for (arm, base, measure), d in gaps.items():                    # two seeds have no interval
        cells = [show(d, bold=p[arm, base, measure] < 0.05), show_p(p[arm, base, measure]),
                 "{:+.1f} to {:+.1f}".format(*interval(d, 0.9))]
        body.append([f"{arm} minus {base}", str(d.n), measure,
                     *(cells if d.n > 2 else [f"{d.mean:+.1f}", "", ""])])
    head = ["difference", "seeds", "measure", "points (95 % CI)", "p, Holm", "90 % interval"]
    seeds = "; ".join(f"{name} seeds {', '.join(map(str, of))}" for name, of in where.items())
    arm, base = PAIRS[2][0]
    said = f"{arm} and {base}, margin {MARGIN} points: **{verdict(gaps, p)}**."
    return "\n\n".join([
        common.table(body, head) if gaps else "No pairs yet.",
        *[said] * any(key[:2] == (arm, base) for key in gaps),
        f"Pairs are of one seed, so of one processor: {seeds}."])


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rows", nargs="+", type=Path, default=[], metavar="FILE", help="yours")
    p.add_argument("--training", nargs="+", type=Path, default=[], metavar="FILE",
                   help='clean losses of theirs, {"run": name of the folder, "loss": nats} a line')
    p.add_argument("--picture", choices=PICTURES, nargs="+", help="default: all; fresh with --rows")
    p.add_argument("--out_dir", type=Path, default=Path("out/line"))
    p.add_argument("--format", choices=["png", "pdf", "svg"], default="png")
    args = p.parse_args(argv)
    args.out_dir.mkdir(parents=True, exist_ok=True)
    own = [path / "results.jsonl" if path.is_dir() else path for path in args.rows]
    others = networks_of(read(own), logged(args.training))
    if args.rows and not others:
        raise common.InputError("--rows: no network of these has a clean loss: --measures clean "
                                "gives it, or --training")
    ours = {n.arm for name in PICTURES for n in stored(name)} if others else ()
    others = [n._replace(arm=f"your {n.arm}") if n.arm in ours else n for n in others]
    for name in args.picture or (["fresh"] if args.rows else PICTURES):
        what, *_, primary = PICTURES[name]
        networks = stored(name)
        print(f"{what}\n\n{tables(networks, primary, others)}\n")
        path = args.out_dir / f"{name}.{args.format}"
        draw(networks, primary, path, what, others)
        print(f"{path} draws it\n")
    if not args.rows and not args.picture:
        for patterns, limit in PAIRED.values():
            print(f"{pair_table(*paired(read(files(patterns)), limit))}\n")


if __name__ == "__main__":
    common.run(main)
