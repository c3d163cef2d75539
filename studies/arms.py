r"""Compare networks over seeds: print the tables of a study, and train its networks again.

    python -m studies.arms control                          # tables of the stored rows: seconds
    python -m studies.arms control --rows out/eval/mine_s5  # your networks next to the stored ones
    python -m studies.arms control --seeds 40               # trains and measures all arms of a seed
    python -m studies.arms criterion --seeds 40 --arms symmetric symmetric-adv
    python -m studies.arms line-cifar10 --seeds 40 --data_dir data/cifar10

A study compares arms. An arm is a set of networks that differ only in their seed; it is defined by
its flags of train_cls.py, in which "{seed}" stands for the seed. --seeds trains the missing
networks in --out_dir/<arm>_s<seed>, measures them, one folder per measure in
--out_dir/eval/<arm>_s<seed>, and prints the tables. To continue an interrupted run, start the same
command again. Flags that this command does not know are passed to train_cls.py.

A pair is an arm and its baseline. The two networks of a pair have the same seed and ran on the same
processor model. The plan.md of each study states the question and the meaning of each outcome. It
was written before the runs.
"""

import argparse
import math
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import common
from common import InputError
from studies.robust_attentions import USUAL as ROBUST
from studies.stats import (compare, full_table, holm, judged, outcomes, paired, paired_t,
                           primary_table, read, scipy_stats, shared)

RESULTS = Path(__file__).parent / "results"
SCENES_PRIMARY, CIFAR10_PRIMARY = ("15 corruptions", "pgd 2/255"), ("15 corruptions", "pgd 1/255")


# --- arms -----------------------------------------------------------------------------------------

def rpc(form, lambd, n_iter):
    """Return the flags of an RPC arm. form: a key of attention.FORMS."""
    return dict(attn="rpc", form=form, lambd=lambd, n_iter=n_iter)


SYMMETRIC, RPC = dict(attn="symmetric"), rpc("released", 4, 4)      # the baseline; as published
RPC_ALL = rpc("released", 3, 2) | dict(rpc_layers="all")            # the paper's other RPC model
AVERAGE = rpc("paper", 0, 1)                                # layer 0 returns the mean of its values
ADV = dict(adv_eps=2 / 255, adv_steps=3)
FLAT = dict(epochs=8, min_lr=2e-3)                          # the learning rate is never lowered
OUT, FAST_RATE, SLOW_RATE = dict(epochs=24), dict(lr=4e-3), dict(lr=2e-3)
LAMBDAS = dict(zip(("0.05", "0.25", "1", "4", "inf"), (0.05, 0.25, 1, 4, math.inf)))

ARMS = {                                                    # arms of the study "robustness"
    "symmetric": SYMMETRIC, "softmax": dict(attn="softmax", init="trunc_normal"),
    "rpc4-l1": RPC, "rpc2-all": RPC_ALL,
    "no-shrink": RPC | dict(lambd=math.inf),                # no sparse part
    "clamp": dict(attn="rpc", n_iter=1, lambd=0.5),     # one step; lambda chosen on held-out images
    "admm": RPC | dict(form="admm"),                        # the published constants of ADMM
    **{name: dict(attn=kind, init="trunc_normal" if name == "elliptical" else "default")
       for name, kind in ROBUST.items()},
    "weights-all": dict(attn=ROBUST["weights"], rpc_layers="all"),
}
CHOSEN = {f"{form}-{lambd:g}-n{n}": rpc(form, lambd, n) for form, values in (
    ("released", (0.5, 1, 2, 4, 8, 16)), ("paper", (0.05, 0.1, 0.25, 0.5, 1)))
    for lambd in values for n in (2, 3, 4, 6)}
PUBLISHED = {"symmetric": SYMMETRIC, "rpc4-l1": RPC}
FINETUNE = dict(init_from="out/robustness/symmetric_s{seed}", epochs=3, lr=2e-4, min_lr=1e-6)
LINE_ARMS = {
    **{f"symmetric-e{n}": SYMMETRIC | dict(epochs=n) for n in (4, 6, 8, 12, 16)},
    "softmax-e8": dict(attn="softmax", epochs=8), "uniform-l0": AVERAGE | dict(epochs=8),
    **{f"paper-{name}-n4": rpc("paper", x, 4) | dict(epochs=8) for name, x in LAMBDAS.items()},
    **{name: dict(attn=kind, epochs=8) for name, kind in ROBUST.items()},
    "rpc4-l1": RPC | dict(epochs=8), "rpc2-all": RPC_ALL | dict(epochs=8),
    "flat-e8": SYMMETRIC | FLAT, "flat-rpc4-l1": RPC | FLAT,
    "long-symmetric": SYMMETRIC | OUT | FAST_RATE, "long-rpc4-l1": RPC | OUT | SLOW_RATE,
    "half-symmetric": SYMMETRIC | OUT | SLOW_RATE,
    "long-softmax": dict(attn="softmax") | OUT | FAST_RATE,
    "long-uniform-l0": AVERAGE | OUT | FAST_RATE,
}
LINE_CIFAR10 = {f"{name}-e{n}": flags | dict(epochs=n) for name, flags, lengths in (
    ("symmetric", SYMMETRIC, (12, 8, 6, 4)), ("rpc4-l1", RPC, (12,)),
    ("softmax", dict(attn="softmax"), (12,)), ("uniform-l0", AVERAGE, (12,))) for n in lengths}
CRITERION = {                                               # cost: 24 epochs; the last two: 96
    "symmetric": SYMMETRIC | OUT | FAST_RATE,
    "rpc4-l1": dict(attn="rpc") | OUT | SLOW_RATE,
    "symmetric-adv": SYMMETRIC | dict(epochs=6) | SLOW_RATE | ADV,
    "rpc4-l1-fast": dict(attn="rpc") | OUT | FAST_RATE,
    "uniform-l0": AVERAGE | OUT | FAST_RATE,
    "softmax": dict(attn="softmax") | OUT | FAST_RATE,
    "rpc4-l1-adv": dict(attn="rpc", epochs=6) | SLOW_RATE | ADV,
    "symmetric-96": SYMMETRIC | dict(epochs=96) | FAST_RATE,
    "symmetric-adv-96": SYMMETRIC | OUT | SLOW_RATE | ADV,
}

# The names of arms in tables and figures.
WORDS = {"symmetric": "symmetric attention", "rpc4-l1": "RPC, as published",
         "rpc2-all": "RPC in all layers", "no-shrink": "RPC without its sparse part",
         "clamp": "keys clamped, no iteration", "admm": "RPC with the settings of ADMM",
         "sharp": "sharper attention", "softmax": "softmax attention",
         "uniform-l0": "layer 0 averages", "keys": "proximal steps on keys",
         "keys-rows": "proximal steps, whole keys", "weights": "weights of tokens",
         "rkde-huber": "kernel density, Huber", "rkde-hampel": "kernel density, Hampel",
         "mom": "median of means", "sinkhorn": "doubly stochastic", "elliptical": "elliptical",
         "paper-0.05-n4": "RPC, chosen settings", "paper-0.05-n3": "RPC, lambda 0.05, 3 steps",
         "paper-0.1-n4": "RPC, lambda 0.1", "released-4-n2": "RPC, 2 steps",
         "rpc4-l1-adv": "RPC, adversarially trained",
         "rpc4-l1-fast": "RPC at the baseline's learning rate",
         "symmetric-adv": "symmetric, adversarially trained"}


def without_recipe(arm):
    """Remove the training recipe from a name: long-rpc4-l1 and rpc4-l1-e12 become rpc4-l1."""
    return re.sub(r"^(long|half|flat)-|-e\d+$|-96$", "", arm)


# --- comparisons ----------------------------------------------------------------------------------

class Comparison(NamedTuple):
    """A family of tests, which share one Holm correction."""
    pairs: list                             # (arm, baseline)
    seeds: range | None = None              # None: every seed that arm and baseline both have
    untested: tuple = ()                    # arms that another comparison tests
    margins: tuple = ()                     # one per primary measure; ± margin counts as equal
    level: float = 0.95                     # the interval of this level must lie within ± margin


def against(base, *arms):
    """Pair every arm with one baseline."""
    return [(arm, base) for arm in arms]


TEN = ("rpc4-l1", "rpc2-all", "rkde-huber", "rkde-hampel", "mom", "elliptical", "sinkhorn", "keys",
       "keys-rows", "weights")
MEASURES = "clean", "corruptions", "pgd"
SEVERE = "--seed", 1, "--severities", 1, 3, 5


def eps(*budgets):
    """Return the flag of eval_robust.py that sets the attack budgets; budgets: in 1/255."""
    return "--eps", *(f"{round(2 * x)}/510" for x in budgets)


class Study(NamedTuple):
    """The arms of a study, their measures and their comparisons."""
    arms: dict
    comparisons: dict
    rows: tuple                             # patterns of the files with stored rows, in results/
    how: tuple                              # flags of eval_robust.py
    measures: tuple = MEASURES              # for --measures of eval_robust.py
    primary: tuple = SCENES_PRIMARY
    limit: int = 1000                       # images per measure
    training: tuple = ()                    # flags of train_cls.py for all arms
    epochs: int = 8                         # of arms without an entry
    alias: dict = {}                        # {name of an arm in the rows: its name here}


STUDIES = {
    "robustness": Study(ARMS, {
        "scenes": Comparison(against("symmetric", "softmax", "rpc4-l1", "rpc2-all", "no-shrink",
                                     "clamp", "admm", "sharp"), range(5)),
        "ten": Comparison(against("symmetric", *TEN), range(5), ("rpc4-l1", "rpc2-all"))},
        ("robustness/results.jsonl", "robust_attentions/results.jsonl",
         "robust_attentions/patches.jsonl"),
        eps(1, 2), (*MEASURES, "fgsm", "apgd", "adaptive_pgd"), limit=500),
    "cifar10": Study(ARMS, {
        "cifar10": Comparison(against("symmetric", "rpc4-l1", "no-shrink"), range(3)),
        "ten-cifar10": Comparison(against("symmetric", "rpc4-l1", "keys-rows", "weights",
                                          "rkde-huber"), range(3), ("rpc4-l1",))},
        ("robustness/cifar10.jsonl", "robust_attentions/cifar10.jsonl"),
        eps(1, 2), (*MEASURES, "fgsm", "adaptive_pgd"), CIFAR10_PRIMARY, 500,
        ("--data", "cifar10", "--model", "nano", "--epochs", 12), epochs=12),
    "constants": Study(PUBLISHED | CHOSEN, {
        "confirmation": Comparison(against("symmetric", "rpc4-l1"), range(5, 13)),
        "pilot": Comparison(against("symmetric", "released-4-n2", "paper-0.1-n4"), range(5, 10)),
        "chosen": Comparison(against("symmetric", "paper-0.05-n3", "paper-0.05-n4"),
                             range(10, 15)),
        "second": Comparison(against("symmetric", "paper-0.05-n4"), range(15, 20))},
        ("constants/s*.jsonl",), (*SEVERE, *eps(2))),
    "control": Study(PUBLISHED | {f"{arm}-adv": flags | ADV for arm, flags in PUBLISHED.items()}, {
        "control": Comparison([("symmetric-adv", "symmetric")]),
        "added": Comparison([("rpc4-l1-adv", "symmetric-adv")]),
        "undefended": Comparison([("rpc4-l1", "symmetric")])},
        ("control/*_s?.jsonl",), (*SEVERE, *eps(0.5, 1, 2, 3, 4, 6, 8, 12, 16))),
    "finetune": Study({"symmetric": SYMMETRIC | FINETUNE, "rpc4-l1": dict(attn="rpc") | FINETUNE}, {
        "finetune": Comparison([("rpc4-l1", "symmetric")])},
        ("finetune/results.jsonl",), eps(1, 2), limit=500),
    "line": Study(LINE_ARMS, {
        "softmax": Comparison([("softmax-e8", "symmetric-e8")]),
        "lambda-0": Comparison([("paper-0.05-n4", "uniform-l0"), ("paper-0.05-n4", "symmetric-e8"),
                                ("uniform-l0", "symmetric-e8")], margins=(3, 3), level=0.9),
        "24-epochs": Comparison(against("long-symmetric", "long-rpc4-l1", "long-softmax",
                                        "long-uniform-l0"), margins=(4, 4)),
        "flat": Comparison([("flat-rpc4-l1", "flat-e8")]),
        "one-rate": Comparison([("long-rpc4-l1", "half-symmetric")]),
        "rate": Comparison([("long-symmetric", "half-symmetric")])},
        ("line/s*.jsonl", "line/long.jsonl", "line/flat.jsonl"), (*SEVERE, *eps(1, 2))),
    "eighteen": Study(PUBLISHED | CHOSEN, {         # every seed of the chosen settings together
        "eighteen": Comparison([("paper-0.05-n4", "symmetric")], range(10, 28)),
        # Without seeds 10 to 14, which the plan of constants does not pool with later seeds.
        "thirteen": Comparison([("paper-0.05-n4", "symmetric")], range(15, 28))},
        ("constants/s*.jsonl", "line/s*.jsonl"), (*SEVERE, *eps(2)),
        alias={"symmetric-e8": "symmetric"}),
    "line-cifar10": Study(LINE_CIFAR10, {
        "cifar10-12": Comparison([("rpc4-l1-e12", "symmetric-e12")], margins=(3, 3)),
        "cifar10-others": Comparison(against("symmetric-e12", "softmax-e12", "uniform-l0-e12"))},
        ("line/cifar10.jsonl",), (*SEVERE, *eps(1)), MEASURES, CIFAR10_PRIMARY, 2000,
        training=("--data", "cifar10", "--model", "nano")),
    "criterion": Study(CRITERION, {
        "cost-24": Comparison([*against("symmetric", "symmetric-adv", "rpc4-l1", "rpc4-l1-fast",
                                        "uniform-l0", "softmax"), ("rpc4-l1-adv", "symmetric-adv")],
                              range(40, 45), margins=(0.25, 1.5), level=0.9),
        "cost-96": Comparison([("symmetric-adv-96", "symmetric-96")], margins=(0.25, 1.5),
                              level=0.9),
        "gate": Comparison([("symmetric-adv", "symmetric")], range(45, 50)),
        # The plan allows no conclusion from it, see studies/results/criterion/plan.md.
        "behind the gate": Comparison([("rpc4-l1", "symmetric")], range(45, 50))},
        ("criterion/*.jsonl",), (*SEVERE, *eps(1, 2, 4, 6, 8, 12)),
        primary=("median budget", "15 corruptions")),
}


# --- train and measure missing networks -----------------------------------------------------------

def call(*command):
    """Run a script of this repository; InputError if it fails, after the script's own message."""
    command = [str(part) for part in command]
    print("$ python", *map(shlex.quote, command), flush=True)
    if subprocess.run([sys.executable, *command]).returncode:
        raise InputError(f"{command[0]} failed; run the same command again to continue")


def into(folder, *flags):
    """Return a trainer's flags: start a run with `flags` in this folder, or continue its run."""
    if (folder / "last.pt").exists():
        return ["--resume", folder]
    return [*flags, "--out_dir", folder]


def evaluate_once(done, *command):
    """Run an evaluation into the folder `done`, unless it exists. A killed one begins again."""
    if not done.exists():
        unfinished = done.with_name("unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        call(*command, "--out_dir", unfinished)
        unfinished.rename(done)


def script(name, attn):
    """Return the start of a command. Robust attentions run through studies.robust_attentions."""
    return ["-m", "studies.robust_attentions"] * (attn in ROBUST.values()) + [name]


def flags_of(study, arm, seed):
    """Return the flags of train_cls.py for an arm and a seed: {name: value}.

    The learning rate rises during the first epoch, as in the stored networks.
    """
    filled = {name: value.format(seed=seed) if isinstance(value, str) else value
              for name, value in study.arms[arm].items()}
    epochs = filled.get("epochs") or study.epochs
    return filled | dict(seed=seed, warmup=1 / epochs)


def train_arm(folder, flags, more=()):
    """Train the network in a folder to its end.

    InputError if the folder contains a network of another arm or seed, or if the arm has another
    last learning rate than MIN_LR of common.py.
    """
    if "min_lr" in flags:
        raise InputError(f"{folder}: train_cls.py has no flag for the last learning rate, "
                         f"{flags['min_lr']}; train this network with version 7fca25a")
    if (folder / "last.pt").exists():
        trained = common.load(folder / "last.pt")["args"]
        for name, value in flags.items():
            if trained.get(name) != value:
                raise InputError(f"{folder} was trained with {name} {trained.get(name)}, expected "
                                 f"{value}; choose another --out_dir")
    words = [part for name, value in flags.items() for part in (f"--{name}", value)]
    call(*script("train_cls.py", flags["attn"]), *into(folder, *more, *words))


def train_and_measure(study, args, rest):
    """Train and measure the missing networks of --arms and --seeds.

    Returns the paths of all results.jsonl files in --out_dir.
    """
    for seed in args.seeds:
        for arm in args.arms or study.arms:
            folder, flags = args.out_dir / f"{arm}_s{seed}", flags_of(study, arm, seed)
            train_arm(folder, flags, [*study.training, *rest])
            # Without RPC, an adaptive attack is the same as PGD.
            for name in args.measures or study.measures:
                if flags["attn"] == "rpc" or not name.startswith("adaptive"):
                    evaluate_once(args.out_dir / "eval" / folder.name / f"{name}_{study.limit}",
                                  *script("eval_robust.py", flags["attn"]), "--ckpt", folder,
                                  "--limit", study.limit, *study.how, "--measures", name)
    return sorted(args.out_dir.glob("eval/*/*/results.jsonl"))


# --- tables of the rows ---------------------------------------------------------------------------

def files(patterns):
    """List the stored files in studies/results that match the patterns."""
    return sorted(path for pattern in patterns for path in RESULTS.glob(pattern))


@cache
def stored_file(path):
    """Read the Rows of a stored file, once per process."""
    return read([path])


def stored_rows(patterns):
    """Read the Rows of all stored files that match the patterns."""
    return [row for path in files(patterns) for row in stored_file(path)]


def stored(study):
    """Read the stored Rows of a study."""
    return [row._replace(arm=study.alias.get(row.arm, row.arm)) for row in stored_rows(study.rows)]


def processors(rows):
    """Sort the seeds by processor: {processor: [seeds]}, from the Rows of clean images.

    InputError if rows of one measure and seed come from two processors, because such networks
    cannot be paired.
    """
    of = {}
    for row in rows:
        name, key = re.sub(r"^cpu, |(, )?\d+ threads$", "", row.hardware), (row.measure, row.seed)
        if row.seed is not None and name and of.setdefault(key, name) != name:
            raise InputError(f"seed {row.seed} has rows from two processors, {of[key]} and {name}; "
                             "keep the rows of one processor")
    of = {seed: name for (measure, seed), name in of.items() if measure == "clean"}
    return {name: sorted(s for s in of if of[s] == name) for name in dict.fromkeys(of.values())}


def compared(study, name, rows):
    """Compare Rows by the comparison `name` of a study; returns a `stats.Compared`."""
    of = study.comparisons[name]
    return compare(outcomes(rows, study.limit), of.pairs, study.primary, of.seeds, of.untested)


@cache
def comparison(name):
    """Compare the stored rows by the comparison `name`; returns (study, `stats.Compared`)."""
    study = next(study for study in STUDIES.values() if name in study.comparisons)
    return study, compared(study, name, stored(study))


def pair_outcome(study, name, of, pair):
    """Return the outcome of a pair: "below", "above", "equal" (within the margins) or "open"."""
    keys = {m: (m, *pair) for m in study.primary}
    gaps = {m: of.gaps[key] for m, key in keys.items() if key in of.gaps}
    margins = study.comparisons[name].margins or (0, 0)
    return judged(gaps, {m: of.p.get(key, 1.0) for m, key in keys.items()},
                  dict(zip(study.primary, margins)), study.comparisons[name].level)


def meet_the_rule(of):
    """List the attentions that meet the rule of studies/results/robust_attentions/plan.md.

    The rule: significantly above symmetric attention under corruptions and on noisy patches (paired
    t over seeds, Holm over the attentions), and not below it on clean images or under AutoAttack.
    """
    arms = {arm for _, arm, _ in of.gaps}

    def tested(measure):
        gaps = {arm: paired_t(paired(of.found, measure, arm, "symmetric").mean(1))
                for arm in arms if len(shared(of.found, measure, arm, "symmetric")) > 1}
        p = holm({arm: d.p for arm, d in gaps.items()})
        return {arm for arm, d in gaps.items() if d.mean > 0 and p[arm] < 0.05}

    below = {arm for (m, arm, _), d in of.gaps.items() if d.high < 0
             and m.startswith(("clean", "autoattack 1/255"))}
    return sorted(tested("15 corruptions") & tested("6 patches noise") - below)


def study_tables(study, rows):
    """Format a study as Markdown: the primary measures, outcomes and all measures."""
    text = []
    for name, comparison in study.comparisons.items():
        of = compared(study, name, rows)
        if of.gaps:
            text += [f"## {name}", primary_table(of, comparison.seeds)]
            pairs = [pair for pair in comparison.pairs if any(key[1:] == pair for key in of.gaps)]
            if comparison.margins:
                outcomes = [f"{arm} minus {base}: **{pair_outcome(study, name, of, (arm, base))}**"
                            for arm, base in pairs]
                text.append("; ".join(outcomes) + ".")
            seen = dict.fromkeys(arm for pair in pairs for arm in pair
                                 if without_recipe(arm) in WORDS)
            text += [full_table(of, comparison.seeds),
                     "; ".join(f"{arm}: {WORDS[without_recipe(arm)]}" for arm in seen) + "."]
    for processor, seeds in processors(rows).items():
        text.append(f"Seeds that ran on {processor}: {', '.join(map(str, seeds))}.")
    return "\n\n".join(text) or "No pairs yet."


def beside(study, theirs, yours):
    """Format your arms as Markdown: their differences from the study's baseline, seed by seed.

    theirs: the stored Rows. yours: your Rows. If your arm has the name of a stored arm, the table
    calls your arm "your <name>".
    """
    base, known = next(iter(study.comparisons.values())).pairs[0][1], {row.arm for row in theirs}
    yours = [row._replace(arm=f"your {row.arm}" if row.arm in known else row.arm) for row in yours]
    arms = dict.fromkeys(row.arm for row in yours if row.arm)
    base = f"your {base}" if f"your {base}" in arms else base
    of = compare(outcomes([*theirs, *yours], study.limit),
                 [(arm, base) for arm in arms if arm != base], study.primary)
    if not of.gaps:
        raise InputError(f"--rows: expected networks named <arm>_s<seed> with the seeds of {base}")
    return full_table(of)


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("study", choices=STUDIES)
    p.add_argument("--seeds", nargs="+", type=int,
                   help="train and measure networks with these seeds")
    p.add_argument("--arms", nargs="+", metavar="ARM",
                   help="train only these arms (default: all arms of the study)")
    p.add_argument("--rows", nargs="+", type=Path, metavar="FILE",
                   help="also compare your networks: a results.jsonl file or its folder")
    p.add_argument("--measures", nargs="+",
                   help="measures for eval_robust.py (default: the study's)")
    p.add_argument("--limit", type=int, help="images per measure (default: the study's)")
    p.add_argument("--out_dir", type=Path, help="folder for new networks (default: out/STUDY)")
    args, rest = p.parse_known_args(argv)
    if rest and not args.seeds:
        p.error(f"unrecognized arguments: {' '.join(rest)}")
    study, args.out_dir = STUDIES[args.study], args.out_dir or Path("out", args.study)
    study = study._replace(limit=args.limit or study.limit)
    for arm in args.arms or ():
        if arm not in study.arms:
            raise InputError(f"--arms {arm}: expected some of {', '.join(study.arms)}")
    if args.seeds:
        scipy_stats()                               # the tables need scipy: check before training
        rows = read(train_and_measure(study, args, rest))
        study = study._replace(comparisons={name: of._replace(seeds=None)
                                            for name, of in study.comparisons.items()})
    else:
        rows = stored(study)
    print(study_tables(study, rows))
    if args.rows:
        print("\n## your networks\n\n" + beside(study, rows, read(args.rows)))


if __name__ == "__main__":
    common.run(main)
