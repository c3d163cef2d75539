"""A study is a table of arms: this trains and evaluates what is missing and reads the rows.

    ARMS = {"symmetric": dict(attn="symmetric"), "clamp": dict(attn="rpc", n_iter=1, lambd=0.5)}

    def main(argv=None):
        args, rows = arms.run(__doc__, ARMS, argv, out_dir="out/mine", seeds=(0, 1, 2), limit=1000,
                              measures=["clean", "pgd eps=2/255"], how=["--seed", 1])
        print(arms.show(args, rows))

An arm's entry is its flags of train_cls.py; "{seed}" in one stands for the seed. A network is the
folder --out_dir/<arm>_s<seed>, its rows are --out_dir/eval/<arm>_s<seed>/results.jsonl, and so are
those that eval_robust.py is told to add there. Networks of a study differ in their seed and their
arm's flags alone: `run` refuses others. Intervals and tables: referee/differences.py.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import common
from common import InputError
from robust.results import read_rows
from robust.sources import SEED_FLAGS
from referee.differences import BASELINE, draw, family, outcomes, primary_of, run_of, tables
from referee.robust_attentions import USUAL as ROBUST


def get_args(doc, arms, argv, out_dir, seeds, limit, measures, default):
    """The flags of a study; `rest` of them, which it does not know, go to train_cls.py."""
    p = argparse.ArgumentParser(description=doc, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--arms", nargs="+", choices=arms, metavar="ARM",
                   help=f"of {', '.join(arms)}; default: {', '.join(default)}; with --rows all")
    p.add_argument("--baseline", choices=arms, default=BASELINE,
                   help="the arm that the others are compared with")
    p.add_argument("--seeds", nargs="+", type=common.number(int, 0),
                   help=f"default: {' '.join(map(str, seeds))}; with --rows all")
    p.add_argument("--limit", type=common.number(int, 1), default=limit, help="images a measure")
    p.add_argument("--measures", nargs="+", default=measures, help="as eval_robust.py takes them")
    p.add_argument("--out_dir", type=Path, default=Path(out_dir))
    p.add_argument("--rows", nargs="+", type=Path, metavar="FILE",
                   help="tables of the rows in these files; nothing is trained")
    p.add_argument("--train", action=argparse.BooleanOptionalAction, default=True,
                   help="--no-train: evaluate what is trained")
    args, args.rest = p.parse_known_args(argv)
    if args.rows and args.rest:
        p.error(f"unrecognized arguments: {' '.join(args.rest)}")
    return args


def flags_of(arms, arm, seed):
    """The flags of train_cls.py of a network."""
    filled = {name: value.format(seed=seed) if isinstance(value, str) else value
              for name, value in arms[arm].items()}
    return filled | dict(seed=seed)


def call(*command):
    """Run a script of ours; InputError if it fails, after its own words on why."""
    command = [str(part) for part in command]
    print("$ python", *command, flush=True)
    if subprocess.run([sys.executable, *command]).returncode:
        raise InputError(f"{command[0]} failed; what has finished is kept, start again to go on")


def finished(folder, flags):
    """Has the run in this folder all its epochs? InputError if it has other flags than these."""
    if not (folder / "last.pt").exists():
        return False
    trained = common.load(folder)["args"]
    for name, value in flags.items():
        if trained.get(name) != value:
            raise InputError(f"{folder} was trained with {name} {trained.get(name)}, expected "
                             f"{value}")
    epochs = [row["epoch"] for row in common.read_log(folder / "log.jsonl") if "eval" in row]
    return bool(epochs) and epochs[-1] >= trained["epochs"]


def train(folder, flags, rest=()):
    """Train a network unless it is there; one that was cut goes on."""
    if finished(folder, flags):
        return
    new = [*rest, *(part for name, value in flags.items() for part in (f"--{name}", value)),
           "--keep_every", 1, "--out_dir", folder]
    again = (folder / "last.pt").exists()
    call(*script("train_cls.py", flags["attn"]), *(["--resume", folder] if again else new))


def script(name, attn):
    """A script's name; where it meets one of the robust attentions, behind theirs."""
    return ["-m", "referee.robust_attentions"] * (attn in ROBUST.values()) + [name]


def evaluate(folder, measures, *how):
    """Measure what the network's rows lack. An adaptive attack is PGD on what is not RPC."""
    attn = common.load(folder)["args"]["attn"]
    measures = [text for text in measures if attn == "rpc" or not text.startswith("adaptive")]
    call(*script("eval_robust.py", attn), "--ckpt", folder,
         "--out_dir", folder.parent / "eval" / folder.name, "--resume", *how,
         "--measures", *measures)


def check_recipe(arms, folders):
    """InputError unless networks differ in nothing but arm and seed. {(arm, seed): folder}"""
    seen = {}
    for (arm, _), folder in folders.items():
        trained = common.load(folder)["args"]
        for name in trained.keys() - {*SEED_FLAGS, *arms[arm]}:
            value, first = seen.setdefault(name, (trained[name], folder))
            if value != trained[name]:
                raise InputError(f"{folder} was trained with {name} {trained[name]}, {first} with "
                                 f"{value}: choose another --out_dir for one of them")


def read(paths):
    """The evaluator's rows in these files; rows of other kinds are left out."""
    rows = []
    for path in paths:
        if not path.is_file():
            raise InputError(f"--rows {path} is not a file")
        if any("measure" in row for row in common.read_log(path)):
            rows += read_rows(path)
    return rows


def run(doc, arms, argv=None, *, out_dir, seeds, measures, limit, how=(), default=None):
    """Train and evaluate what a study lacks, or read --rows: its args, its rows.

    how: more flags of eval_robust.py. default: the arms without --arms, if not all.
    """
    args = get_args(doc, arms, argv, out_dir, seeds, limit, measures, default or list(arms))
    if not args.rows:
        args.arms, args.seeds = args.arms or default or list(arms), args.seeds or list(seeds)
        networks = {(arm, seed): args.out_dir / f"{arm}_s{seed}"
                    for seed in args.seeds for arm in args.arms}
        for (arm, seed), folder in networks.items():
            flags = flags_of(arms, arm, seed)
            if args.train:
                train(folder, flags, args.rest)
            if finished(folder, flags):
                check_recipe(arms, {run: path for run, path in networks.items()
                                    if (path / "last.pt").exists()})
                evaluate(folder, args.measures, "--limit", args.limit, *how)
    rows = read(args.rows or sorted(args.out_dir.glob("eval*/**/results.jsonl")))
    there = [run_of(row) for row in rows]
    args.arms = args.arms or [arm for arm in arms if any(arm == a for a, _ in there)]
    args.seeds = args.seeds or sorted({seed for arm, seed in there if arm in args.arms})
    rows = [row for row, (a, seed) in zip(rows, there) if a in args.arms and seed in args.seeds]
    if not rows:
        raise InputError("no rows of these arms and seeds")
    return args, rows


def show(args, rows, same=()):
    """The tables as Markdown, written to --out_dir/differences.md beside their forest plot.

    same: arms on which an adaptive attack is PGD.
    """
    compared = family(outcomes(rows, args.limit, same), args.arms, args.baseline,
                      primary_of(rows))
    text = tables(compared)
    name = "differences" + (f"_to_{args.baseline}" if args.baseline != BASELINE else "")
    args.out_dir.mkdir(parents=True, exist_ok=True)
    (args.out_dir / f"{name}.md").write_text(text + "\n")
    if compared.gaps:
        draw(compared, args.out_dir / f"{name}.png")
    return f"{text}\n\n{args.out_dir}: {name}.md is this, {name}.png draws it"
