r"""Every comparison of networks here is a table of arms: what they are, with what, on which seeds.

    python -m referee.arms control                          # tables of the stored rows: seconds
    python -m referee.arms control --rows out/eval/mine_s5  # yours beside them
    python -m referee.arms control --seeds 40               # trains and measures all arms of a seed
    python -m referee.arms criterion --seeds 40 --arms symmetric symmetric-adv
    python -m referee.arms line-cifar10 --seeds 40 --data_dir data/cifar10

An arm is its flags of train_cls.py; "{seed}" in one stands for the seed. --seeds trains what lacks
in --out_dir/<arm>_s<seed>, measures it into --out_dir/eval/<arm>_s<seed>/results.jsonl, and ends in
the tables; a run that was cut goes on. Flags that are not of this command go to train_cls.py.
Networks of a study differ in their seed and their arm's flags alone: others are refused. Pairs are
of one seed, so of one processor. What each comparison asks and what an outcome means was fixed
before its runs: the plan.md of its page.
"""

import argparse
import math
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple


import common
from common import InputError
from referee.robust_attentions import USUAL as ROBUST
from referee.stats import (accuracy, compare, crossed, digits_of, everything, holm, judged,
                           outcomes, paired, paired_t, primary_table, read, shared, show)

RESULTS = Path(__file__).parent / "results"
SHAPES, CIFAR10 = ("15 corruptions", "pgd 2/255"), ("15 corruptions", "pgd 1/255")


# --- arms -----------------------------------------------------------------------------------------

def rpc(form, lambd, n_iter):
    return dict(attn="rpc", form=form, lambd=lambd, n_iter=n_iter)


SYMMETRIC, RPC = dict(attn="symmetric"), rpc("released", 4, 4)      # the baseline; as published
RPC_ALL = rpc("released", 3, 2) | dict(rpc_layers="all")            # its other model
AVERAGE = rpc("paper", 0, 1)                                # layer 0 gives the mean of its values
ADV = dict(adv_eps=2 / 255, adv_steps=3)
FLAT = dict(epochs=8, min_lr=2e-3)                          # the learning rate is never lowered
OUT, FAST, SLOW = dict(epochs=24), dict(lr=4e-3), dict(lr=2e-3)
LAMBDAS = dict(zip(("0.05", "0.25", "1", "4", "inf"), (0.05, 0.25, 1, 4, math.inf)))

ARMS = {                                                    # of robustness: what each part does
    "symmetric": SYMMETRIC, "softmax": dict(attn="softmax", init="trunc_normal"),
    "rpc4-l1": RPC, "rpc2-all": RPC_ALL,
    "no-shrink": RPC | dict(lambd=math.inf),                # no sparse part
    "clamp": dict(attn="rpc", n_iter=1, lambd=0.5),         # no iteration; held-out images' lambda
    "admm": RPC | dict(form="admm"),                        # the right constants
    **{name: dict(attn=kind, init="trunc_normal" if name == "elliptical" else "default")
       for name, kind in ROBUST.items()},
    "weights-all": dict(attn=ROBUST["weights"], rpc_layers="all"),
}
CHOSEN = {f"{form}-{lambd:g}-n{n}": rpc(form, lambd, n) for form, values in (
    ("released", (0.5, 1, 2, 4, 8, 16)), ("paper", (0.05, 0.1, 0.25, 0.5, 1)))
    for lambd in values for n in (2, 3, 4, 6)}
PUBLISHED = {"symmetric": SYMMETRIC, "rpc4-l1": RPC}
START = dict(init_from="out/robustness/symmetric_s{seed}", epochs=3, lr=2e-4, min_lr=1e-6,
             warmup_epochs=0.15)
LINE = {
    **{f"symmetric-e{n}": SYMMETRIC | dict(epochs=n) for n in (4, 6, 8, 12, 16)},
    "softmax-e8": dict(attn="softmax", epochs=8), "uniform-l0": AVERAGE | dict(epochs=8),
    **{f"paper-{name}-n4": rpc("paper", x, 4) | dict(epochs=8) for name, x in LAMBDAS.items()},
    **{name: dict(attn=kind, epochs=8) for name, kind in ROBUST.items()},
    "rpc4-l1": RPC | dict(epochs=8), "rpc2-all": RPC_ALL | dict(epochs=8),
    "flat-e8": SYMMETRIC | FLAT, "flat-rpc4-l1": RPC | FLAT,
    "long-symmetric": SYMMETRIC | OUT | FAST, "long-rpc4-l1": RPC | OUT | SLOW,
    "half-symmetric": SYMMETRIC | OUT | SLOW, "long-softmax": dict(attn="softmax") | OUT | FAST,
    "long-uniform-l0": AVERAGE | OUT | FAST,
}
LINE_CIFAR10 = {f"{name}-e{n}": flags | dict(epochs=n) for name, flags, lengths in (
    ("symmetric", SYMMETRIC, (12, 8, 6, 4)), ("rpc4-l1", RPC, (12,)),
    ("softmax", dict(attn="softmax"), (12,)), ("uniform-l0", AVERAGE, (12,))) for n in lengths}
CRITERION = {                               # arm: its flags; what it costs in passes: COST
    "symmetric": SYMMETRIC | OUT | FAST,
    "rpc4-l1": dict(attn="rpc") | OUT | SLOW,
    "symmetric-adv": SYMMETRIC | dict(epochs=6) | SLOW | ADV,
    "rpc4-l1-fast": dict(attn="rpc") | OUT | FAST,
    "uniform-l0": AVERAGE | OUT | FAST,
    "softmax": dict(attn="softmax") | OUT | FAST,
    "rpc4-l1-adv": dict(attn="rpc", epochs=6) | SLOW | ADV,
    "symmetric-96": SYMMETRIC | dict(epochs=96) | FAST,
    "symmetric-adv-96": SYMMETRIC | OUT | SLOW | ADV,
}


def cost(flags):
    """Passes over the training images, forward and backward: each PGD step is one more."""
    return flags["epochs"] * (1 + flags.get("adv_steps", 0))


# --- comparisons ----------------------------------------------------------------------------------

class Comparison(NamedTuple):
    """A family of tests: pairs (arm, baseline) over some seeds, None: all that both have."""
    pairs: list
    seeds: range | None = None
    untested: tuple = ()                    # arms that another comparison judges
    margins: tuple = ()                     # of the primary measures: within them nothing matters
    level: float = 0.95                     # of the interval that has to lie within them


def against(base, *arms):
    return [(arm, base) for arm in arms]


TEN = ("rpc4-l1", "rpc2-all", "rkde-huber", "rkde-hampel", "mom", "elliptical", "sinkhorn", "keys",
       "keys-rows", "weights")
PGD = "pgd eps={} steps=20"


class Study(NamedTuple):
    """Arms, what is measured of them, and what is compared."""
    arms: dict
    comparisons: dict
    rows: tuple                             # stored rows, patterns under results/
    measures: tuple
    primary: tuple = SHAPES
    limit: int = 1000                       # images a measure
    how: tuple = ("--seed", 1, "--severities", 1, 3, 5)
    training: tuple = ()                    # flags of train_cls.py for all arms
    also: tuple = ()                        # (measure, images, seeds), into a folder of its own
    alias: dict = {}                        # other names of arms in its rows


STUDIES = {
    "robustness": Study(ARMS, {
        "scenes": Comparison(against("symmetric", "softmax", "rpc4-l1", "rpc2-all", "no-shrink",
                                     "clamp", "admm", "sharp"), range(5)),
        "ten": Comparison(against("symmetric", *TEN), range(5), ("rpc4-l1", "rpc2-all"))},
        ("robustness/results.jsonl", "robust_attentions/results.jsonl",
         "robust_attentions/patches.jsonl"),
        ("clean", "corruptions", "fgsm eps=1/255,2/255", PGD.format("1/255,2/255"),
         "apgd eps=1/255,2/255", "adaptive_pgd eps=2/255"), limit=500, how=()),
    "cifar10": Study(ARMS, {
        "cifar10": Comparison(against("symmetric", "rpc4-l1", "no-shrink"), range(3)),
        "ten-cifar10": Comparison(against("symmetric", "rpc4-l1", "keys-rows", "weights",
                                          "rkde-huber"), range(3), ("rpc4-l1",))},
        ("robustness/cifar10.jsonl", "robust_attentions/cifar10.jsonl"),
        ("clean", "corruptions", "fgsm eps=1/255,2/255", PGD.format("1/255,2/255"),
         "adaptive_pgd eps=2/255"), CIFAR10, 500, (),
        ("--data", "cifar10", "--model", "nano", "--epochs", 12)),
    "constants": Study(PUBLISHED | CHOSEN, {
        "confirmation": Comparison(against("symmetric", "rpc4-l1"), range(5, 13)),
        "pilot": Comparison(against("symmetric", "released-4-n2", "paper-0.1-n4"), range(5, 10)),
        "chosen": Comparison(against("symmetric", "paper-0.05-n3", "paper-0.05-n4"),
                             range(10, 15)),
        "second": Comparison(against("symmetric", "paper-0.05-n4"), range(15, 20))},
        ("constants/s*.jsonl",), ("clean", "corruptions", PGD.format("2/255"))),
    "control": Study(PUBLISHED | {f"{arm}-adv": flags | ADV for arm, flags in PUBLISHED.items()}, {
        "control": Comparison([("symmetric-adv", "symmetric")]),
        "added": Comparison([("rpc4-l1-adv", "symmetric-adv")]),
        "undefended": Comparison([("rpc4-l1", "symmetric")])},
        ("control/*_s?.jsonl",), ("clean", "corruptions", PGD.format(
            ",".join(f"{eps}/255" for eps in (0.5, 1, 2, 3, 4, 6, 8, 12, 16))))),
    "finetune": Study({"symmetric": SYMMETRIC | START, "rpc4-l1": dict(attn="rpc") | START}, {
        "finetune": Comparison([("rpc4-l1", "symmetric")])},
        ("finetune/results.jsonl",), ("clean", "corruptions", PGD.format("1/255,2/255")),
        limit=500, how=()),
    "line": Study(LINE, {
        "softmax": Comparison([("softmax-e8", "symmetric-e8")]),
        "lambda-0": Comparison([("paper-0.05-n4", "uniform-l0"), ("paper-0.05-n4", "symmetric-e8"),
                                ("uniform-l0", "symmetric-e8")], margins=(3, 3), level=0.9),
        "24-epochs": Comparison(against("long-symmetric", "long-rpc4-l1", "long-softmax",
                                        "long-uniform-l0"), margins=(4, 4)),
        "flat": Comparison([("flat-rpc4-l1", "flat-e8")]),
        "one-rate": Comparison([("long-rpc4-l1", "half-symmetric")]),
        "rate": Comparison([("long-symmetric", "half-symmetric")])},
        ("line/s*.jsonl", "line/long.jsonl", "line/flat.jsonl"),
        ("clean", "corruptions", PGD.format("1/255,2/255"))),
    "eighteen": Study(PUBLISHED | CHOSEN, {         # every seed of the chosen constants, as one
        "eighteen": Comparison([("paper-0.05-n4", "symmetric")], range(10, 28))},
        ("constants/s*.jsonl", "line/s*.jsonl"), ("clean", "corruptions", PGD.format("2/255")),
        alias={"symmetric-e8": "symmetric"}),
    "line-cifar10": Study(LINE_CIFAR10, {
        "cifar10-12": Comparison([("rpc4-l1-e12", "symmetric-e12")], margins=(3, 3)),
        "cifar10-others": Comparison(against("symmetric-e12", "softmax-e12", "uniform-l0-e12"))},
        ("line/cifar10.jsonl",), ("clean", "corruptions", PGD.format("1/255")), CIFAR10, 2000,
        training=("--data", "cifar10", "--model", "nano")),
    "criterion": Study(CRITERION, {
        "cost-24": Comparison([*against("symmetric", "symmetric-adv", "rpc4-l1", "rpc4-l1-fast",
                                        "uniform-l0", "softmax"), ("rpc4-l1-adv", "symmetric-adv")],
                              margins=(0.25, 1.5), level=0.9),
        "cost-96": Comparison([("symmetric-adv-96", "symmetric-96")], margins=(0.25, 1.5),
                              level=0.9)},
        ("criterion/*.jsonl",), ("clean", "corruptions", PGD.format(
            "1/255,2/255,4/255,6/255,8/255,12/255")), ("median budget", "15 corruptions"),
        also=("autoattack eps=4/255", 500, (40, 41))),
}


# --- to train and measure what lacks --------------------------------------------------------------

def call(*command):
    """Run a script of ours; InputError if it fails, after its own words on why."""
    command = [str(part) for part in command]
    print("$ python", *command, flush=True)
    if subprocess.run([sys.executable, *command]).returncode:
        raise InputError(f"{command[0]} failed; what has finished is kept, start again to go on")


def script(name, attn):
    """A script's name; where it meets one of the robust attentions, behind theirs."""
    return ["-m", "referee.robust_attentions"] * (attn in ROBUST.values()) + [name]


def flags_of(arms, arm, seed):
    """The flags of train_cls.py of a network."""
    filled = {name: value.format(seed=seed) if isinstance(value, str) else value
              for name, value in arms[arm].items()}
    return filled | dict(seed=seed)


def finished(folder, flags):
    """Has the run in this folder all its steps? InputError if it has other flags than these."""
    if not (folder / "last.pt").exists():
        return False
    checkpoint = common.load(folder / "last.pt")
    trained = checkpoint["args"]
    for name, value in flags.items():
        if trained.get(name) != value:
            raise InputError(f"{folder} was trained with {name} {trained.get(name)}, expected "
                             f"{value}")
    steps = checkpoint["training_images"] // trained["batch_size"]
    return checkpoint["step"] >= trained["epochs"] * steps


def train(folder, flags, more=()):
    """Train a network unless it is there; one that was cut goes on."""
    if not finished(folder, flags):
        new = [*more, *(part for name, value in flags.items() for part in (f"--{name}", value)),
               "--out_dir", folder]
        again = (folder / "last.pt").exists()
        call(*script("train_cls.py", flags["attn"]), *(["--resume", folder] if again else new))


def evaluate(folder, measures, limit, how=(), suffix=""):
    """Measure what the network's rows lack. An adaptive attack is PGD on what is not RPC."""
    attn = common.load(folder / "last.pt")["args"]["attn"]
    measures = [text for text in measures if attn == "rpc" or not text.startswith("adaptive")]
    call(*script("eval_robust.py", attn), "--ckpt", folder, "--out_dir",
         folder.parent / "eval" / (folder.name + suffix), "--resume", "--limit", limit, *how,
         "--measures", *measures)


OWN = ("seed", "data_dir", "num_workers", "device", "amp", "compile", "log_every", "save_every",
       "eval_every", "download", "max_steps", "out_dir", "resume")     # may differ between networks


def check_recipe(arms, folders):
    """InputError unless networks differ in nothing but arm and seed. {(arm, seed): folder}"""
    seen = {}
    for (arm, _), folder in folders.items():
        trained = common.load(folder / "last.pt")["args"]
        for name in trained.keys() - {*OWN, *arms[arm]}:
            value, first = seen.setdefault(name, (trained[name], folder))
            if value != trained[name]:
                raise InputError(f"{folder} was trained with {name} {trained[name]}, {first} with "
                                 f"{value}: choose another --out_dir for one of them")


def run(study, args, rest):
    """Train and measure the networks of --arms and --seeds that lack: the files of their rows."""
    networks = {(arm, seed): args.out_dir / f"{arm}_s{seed}"
                for seed in args.seeds for arm in args.arms or study.arms}
    for (arm, seed), folder in networks.items():
        train(folder, flags_of(study.arms, arm, seed), [*study.training, *rest])
        check_recipe(study.arms, {key: path for key, path in networks.items()
                                  if (path / "last.pt").exists()})
        evaluate(folder, args.measures or study.measures, args.limit, study.how)
        if study.also and seed in study.also[2] and not args.measures:
            evaluate(folder, study.also[:1], study.also[1], study.how[:2], "_aa")
    return sorted(args.out_dir.glob("eval/*/results.jsonl"))


# --- what the rows say ----------------------------------------------------------------------------

def files(patterns):
    return sorted(path for pattern in patterns for path in RESULTS.glob(pattern))


def stored(study):
    """Read the committed Rows of a study."""
    return [row._replace(arm=study.alias.get(row.arm, row.arm)) for row in read(files(study.rows))]


def processors(rows):
    """Sort seeds by the processor of their Rows: {name: [seeds]}. A seed's must be one, where the
    row names it."""
    of = {}
    for row in rows:
        name = row.hardware.removeprefix("cpu, ").rpartition(", ")[0]
        if row.seed is not None and name and of.setdefault(row.seed, name) != name:
            raise InputError(f"seed {row.seed} has rows of {of[row.seed]} and {name}: no pairs")
    return {name: sorted(s for s in of if of[s] == name) for name in dict.fromkeys(of.values())}


def compared(study, name, rows, limit=None, ours=True):
    """The `stats.Compared` of a comparison, of stored rows over the seeds that it names."""
    of = study.comparisons[name]
    return compare(outcomes(rows, limit or study.limit), of.pairs, study.primary,
                   of.seeds if ours else None, of.untested)


def outcome(study, name, of, pair):
    """What a pair of a comparison came to: below, above, equal (within the margins) or open."""
    keys = {m: (m, *pair) for m in study.primary}
    gaps = {m: of.gaps[key] for m, key in keys.items() if key in of.gaps}
    margins = study.comparisons[name].margins or (0, 0)
    return judged(gaps, {m: of.p.get(key, 1.0) for m, key in keys.items()},
                  dict(zip(study.primary, margins)), study.comparisons[name].level)


def meet_the_rule(of):
    """The attentions that meet the rule fixed for those of others, referee/results/
    robust_attentions/plan.md: above symmetric on the corruptions and on noisy patches (paired t
    over seeds, Holm over the attentions), not below it clean and under AutoAttack."""
    arms = {arm for _, arm, _ in of.gaps}

    def tested(measure):
        gaps = {arm: paired_t(paired(of.found, measure, arm, "symmetric").mean(1))
                for arm in arms if len(shared(of.found, measure, arm, "symmetric")) > 1}
        p = holm({arm: d.p for arm, d in gaps.items()})
        return {arm for arm, d in gaps.items() if d.mean > 0 and p[arm] < 0.05}

    below = {arm for (m, arm, _), d in of.gaps.items() if d.high < 0
             and m.startswith(("clean", "autoattack 1/255"))}
    return sorted(tested("15 corruptions") & tested("6 patches noise") - below)


def tables(study, rows, limit=None, ours=True):
    """Write Markdown: each comparison's primary measures, its outcomes, every measure.

    ours: the stored rows, over the seeds that a comparison names.
    """
    where, text = processors(rows), []
    for name, comparison in study.comparisons.items():
        of = compared(study, name, rows, limit, ours)
        seeds = comparison.seeds if ours else None
        if of.gaps:
            text += [f"## {name}", primary_table(of, seeds)]
            said = [f"{arm} minus {base}: **{outcome(study, name, of, (arm, base))}**"
                    for arm, base in comparison.pairs if any(key[1:] == (arm, base)
                                                             for key in of.gaps)]
            text += ["; ".join(said) + "."] if comparison.margins else []
            text.append(everything(of, seeds))
    for processor, seeds in where.items():
        text.append(f"Seeds on {processor}: {', '.join(map(str, seeds))}.")
    return "\n\n".join(text) or "No pairs yet."


def beside(study, theirs, yours, limit=None):
    """Write Markdown: your arms, and their difference to the study's baseline of the same seeds.

    An arm of yours that has a stored one's name is called yours.
    """
    base = next(iter(study.comparisons.values())).pairs[0][1]
    known = {row.arm for row in theirs}
    yours = [row._replace(arm=f"your {row.arm}" if row.arm in known else row.arm) for row in yours]
    found, body = outcomes([*theirs, *yours], limit or study.limit), []
    mine = f"your {base}" if any(row.arm == f"your {base}" for row in yours) else base
    for arm in dict.fromkeys(row.arm for row in yours if row.arm and row.arm != mine):
        for measure in (m for m in found if any(a == arm for a, _ in found[m])):
            gap = paired(found, measure, arm, mine)
            body.append([arm, measure, accuracy(found, measure, arm),
                         accuracy(found, measure, mine),
                         show(crossed(gap), digits_of(measure)) if len(gap) else ""])
    return common.table(body, ["arm", "measure", "accuracy", mine, "difference, shared seeds"])


# --- the table of the criterion -------------------------------------------------------------------

def by_cost(rows, study=STUDIES["criterion"]):
    """Write Markdown: an arm a row: seeds, passes, clean, corruptions, PGD at each budget,
    AutoAttack, the median budget with its interval over seeds and images."""
    found, body = outcomes(rows, study.limit), []
    budgets = [m for m in found if m.startswith("pgd") and "images" not in m]
    attacked = [m for m in found if m.startswith("autoattack")]
    columns = ["clean", "15 corruptions", *budgets, *attacked]
    for arm, flags in study.arms.items():
        seeds = sorted(s for a, s in found.get("clean", {}) if a == arm)
        if seeds:
            median = [x for (a, _), x in found.get("median budget", {}).items() if a == arm]
            body.append([arm, str(len(seeds)), str(cost(flags)),
                         *(accuracy(found, m, arm) for m in columns),
                         show(crossed(median), 2).replace("+", "") if median else ""])
    return common.table(body, ["arm", "seeds", "cost", *columns, "median budget, 1/255"])


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("study", choices=STUDIES)
    p.add_argument("--seeds", nargs="+", type=common.NATURAL, help="train and measure these")
    p.add_argument("--arms", nargs="+", metavar="ARM", help="with --seeds; default: all")
    p.add_argument("--rows", nargs="+", type=Path, metavar="FILE",
                   help="rows of eval_robust.py, or its folders, beside the stored ones")
    p.add_argument("--measures", nargs="+", help="as eval_robust.py takes them")
    p.add_argument("--limit", type=common.COUNT, help="images a measure")
    p.add_argument("--out_dir", type=Path, help="default: out/STUDY")
    args, rest = p.parse_known_args(argv)
    if rest and not args.seeds:
        p.error(f"unrecognized arguments: {' '.join(rest)}")
    study, args.out_dir = STUDIES[args.study], args.out_dir or Path("out", args.study)
    args.limit = args.limit or study.limit
    for arm in args.arms or ():
        if arm not in study.arms:
            raise InputError(f"--arms {arm}: expected some of {', '.join(study.arms)}")
    if args.seeds:
        rows = read(run(study, args, rest))
        print(tables(study, rows, args.limit, ours=False))
    else:
        rows = stored(study)
        print(tables(study, rows, args.limit))
        if args.rows:
            print("\n## yours\n\n" + beside(study, rows, read(args.rows), args.limit))
    if args.study == "criterion" and rows:
        print("\n## by cost\n\n" + by_cost(rows))


if __name__ == "__main__":
    common.run(main)
