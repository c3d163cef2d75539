r"""Does RPC make a network more robust, and is it the robust part that does it?

    python -m referee.studies.robustness                            # scenes: 3 hours on 2 idle CPU cores
    python -m referee.studies.robustness --no-train                 # only what has finished so far
    python -m referee.studies.robustness --seeds 0 --epochs 3 --out_dir out/first_look
    python -m referee.studies.robustness --rows referee/results/robustness/results.jsonl    # tables of all that
                                                            # is in these rows, in seconds
    python -m referee.studies.robustness --data cifar10 --data_dir data/cifar10 --model nano --epochs 12 \
        --out_dir out/robustness_cifar10

The arms are one network but for its attention: same seeds, batches and steps. Some lack a part of
RPC-Attention: what is left of its effect says which part has it. What --out_dir lacks is trained by
train_cls.py and evaluated by eval_robust.py on the same images; accuracies are compared with those
of the symmetric arm, paired by seed. An arm may also be a name of referee/studies/robust_attentions.py.

Intervals, primary measures and what is bold: referee/studies/differences.py. Flags that are not listed go
to train_cls.py. Rows that eval_robust.py adds to --out_dir/eval join the tables.
"""

import argparse
import subprocess
import sys
from pathlib import Path

if not __package__:
    sys.exit("error: start this in the repository's folder, as: python -m referee.studies.robustness")

import numpy as np

import common
from robust.results import read_rows
from robust.sources import SEED_FLAGS
from referee.studies.differences import BASELINE, compare, current, draw, outcomes, primary_of, tables
from referee.studies.robust_attentions import USUAL as ROBUST

USUAL = {                                                  # flags of train_cls.py
    "softmax": dict(attn="softmax"),                                            # reference
    "symmetric": dict(attn="symmetric"),                                        # the baseline
    "rpc4-l1": dict(attn="rpc", n_iter=4),                                      # the paper's model
    "rpc2-all": dict(attn="rpc", rpc_layers="all", n_iter=2, lambd=3.0),        # its other model
    "no-shrink": dict(attn="rpc", n_iter=4, lambd=np.inf),                      # no sparse part
    "clamp": dict(attn="rpc", n_iter=1),                                        # no iteration
    "admm": dict(attn="rpc", n_iter=4, form="admm"),                            # right constants
}
ARMS = USUAL | {name: dict(attn=kind) for name, kind in ROBUST.items()}
ARMS |= {f"{name}-all": dict(attn=kind, rpc_layers="all") for name, kind in ROBUST.items()}
MEASURES = ["clean", "corruptions", "fgsm eps=1/255,2/255", "pgd eps=1/255,2/255 steps=20",
            "apgd eps=1/255,2/255", "adaptive_pgd eps=2/255"]


def get_args(argv=None):
    """The study's flags, and those for train_cls.py as a list."""
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out_dir", type=Path, default=Path("out/robustness"),
                   help="of the runs, <arm>_s<seed>, and the evaluator's rows, eval")
    p.add_argument("--arms", nargs="+", choices=ARMS, help="default: those of train_cls.py; with "
                   "--rows all that are there")
    p.add_argument("--baseline", choices=ARMS, default=BASELINE,
                   help="the arm with which the others are compared")
    p.add_argument("--references", nargs="+", choices=ARMS, default=[], help="arms that another "
                   "question judges: shown, but not in the family of Holm's correction")
    p.add_argument("--seeds", nargs="+", type=common.number(int, 0),
                   help="default: 0, 1 and 2; with --rows all that are there")
    p.add_argument("--clamp", type=common.number(float, 0), default=0.5, metavar="LAMBDA",
                   help="lambda of the arm clamp, chosen on held-out training images")
    p.add_argument("--limit", type=common.number(int, 1), default=500, help="images a measure")
    p.add_argument("--measures", nargs="+", default=MEASURES, help="as eval_robust.py takes them")
    p.add_argument("--rows", nargs="+", type=Path, default=[], metavar="FILE",
                   help="tables and figure of the rows in these files; nothing is trained")
    p.add_argument("--train", action=argparse.BooleanOptionalAction, default=True)
    args, rest = p.parse_known_args(argv)
    runs = [run for run in runs_of(in_files(args.rows)) if run[0] in ARMS]
    args.arms = args.arms or [arm for arm in ARMS if any(arm == a for a, _ in runs)] or list(USUAL)
    args.seeds = args.seeds or sorted({seed for _, seed in runs}) or [0, 1, 2]
    if args.baseline not in args.arms:
        raise ValueError(f"--arms {' '.join(args.arms)}: expected {args.baseline} among them, with "
                         f"which the others are compared")
    ARMS["clamp"]["lambd"] = args.clamp
    return args, rest


# --- training and evaluating what is missing ------------------------------------------------------

def finished(folder, arm, seed):
    """Has this run all its epochs? ValueError if the folder holds a run of another arm or seed."""
    if not (folder / "last.pt").exists():
        return False
    checkpoint = common.load(folder)
    common.check_run(checkpoint, folder, "train_cls.py", "args", "step")
    trained = checkpoint["args"]
    for name, value in (ARMS[arm] | dict(seed=seed)).items():
        if trained.get(name) != value:
            raise ValueError(f"{folder} was trained with {name} {trained.get(name)}, expected "
                             f"{value} of the arm {arm}")
    rows = common.read_log(folder / "log.jsonl")
    last = [row for row in rows if "eval" in row and row["step"] == checkpoint["step"]]
    return bool(last) and last[0]["epoch"] >= trained["epochs"]


def check_recipe(folders):
    """ValueError unless networks differ in nothing but their arm and seed. {(arm, seed): folder}"""
    arm_flags = {"n_iter", "lambd", "rpc_layers", "init"}.union(*ARMS.values())
    seen = {}
    for (arm, seed), folder in folders.items():
        trained = common.load(folder)["args"]
        trained["fine-tuned"] = bool(trained.get("init_from"))
        shared = dict.fromkeys(arm_flags, arm) | dict(init_from=seed)   # each seed has a start
        for name in trained.keys() - {*SEED_FLAGS}:
            of = name, shared.get(name)
            value, first = seen.setdefault(of, (trained[name], folder))
            if value != trained[name]:
                raise ValueError(f"{folder} was trained with {name} {trained[name]}, {first} with "
                                 f"{value}: choose another --out_dir for one of them")


def call(*command):
    """Run a script of ours; ValueError if it fails, after its own line that says why."""
    command = [str(part) for part in command]
    print("$ python", *command, flush=True)
    if subprocess.run([sys.executable, *command]).returncode:
        script = command[1] if command[0] == "-m" else command[0]
        raise ValueError(f"{script} failed; what has finished is kept, start again to go on")


def with_rpc(arm):
    """Has it RPC-Attention, whose gradients an adaptive attack replaces?"""
    return ARMS[arm].get("attn") == "rpc"


def train(folder, arm, seed, rest):
    """Train a run, or go on with one that was cut."""
    script, settings, name = ["train_cls.py"], dict(ARMS[arm]), arm.removesuffix("-all")
    if name in ROBUST:
        script, _ = ["-m", "referee.studies.robust_attentions", "train", name], settings.pop("attn")
    flags = [part for name, value in settings.items() for part in (f"--{name}", value)]
    new = [*rest, *flags, "--seed", seed, "--keep_every", 1, "--out_dir", folder]
    call(*script, *(["--resume", folder] if (folder / "last.pt").exists() else new))


def evaluate(folders, args):
    """Measure what no row has yet. folders: {(arm, seed): folder}."""
    how = ["--out_dir", args.out_dir / "eval", "--resume", "--limit", args.limit, "--measures"]
    adaptive = [text for text in args.measures if text.startswith("adaptive")]
    usual = [text for text in args.measures if text not in adaptive]
    robust = [folder for (arm, _), folder in folders.items() if with_rpc(arm)]
    for measures, models in ((usual, folders.values()), (adaptive, robust)):
        if measures and models:                            # without RPC an adaptive attack is PGD
            call("-m", "referee.studies.robust_attentions", "evaluate", "--ckpt", *models, *how, *measures)


def in_files(paths):
    """Read the evaluator's rows in these files; their checkpoint becomes the run's name alone.

    A file of rows of another kind adds none. ValueError: no file, or a row twice.
    """
    rows = []
    for path in paths:
        if not path.is_file():
            raise ValueError(f"--rows {path} is not a file")
        lines = sum("measure" in row for row in common.read_log(path))
        own = read_rows(path) if lines else []                  # none: rows of referee/studies/outliers.py
        if lines > len(own):
            raise ValueError(f"--rows {path} holds {lines - len(own)} rows twice: keep one of each")
        rows += [row | dict(checkpoint=Path(row["checkpoint"]).name) for row in own]
    return rows


def runs_of(rows):
    """Find the runs of rows whose checkpoints are <arm>_s<seed>: {(arm, seed): checkpoint}."""
    names = {row["checkpoint"]: row["checkpoint"].rpartition("_s") for row in rows}
    return {(arm, int(seed)): name for name, (arm, _, seed) in names.items() if seed.isdecimal()}


def stored(paths, folders):
    """The rows of files, and of those asked for {(arm, seed): the run's name, as rows have it}."""
    rows = in_files(paths)
    names = {row["checkpoint"] for row in rows}
    runs = {run: folder.name for run, folder in folders.items() if folder.name in names}
    if not runs:
        raise ValueError(f"--rows {' '.join(map(str, paths))}: no row of these arms and seeds")
    return rows, runs


def measured(folders, args, rest):
    """Train and evaluate what is missing; the rows of the networks and their folders."""
    for (arm, seed), folder in folders.items():
        if args.train and not finished(folder, arm, seed):
            train(folder, arm, seed, rest)
            check_recipe({run: path for run, path in folders.items() if finished(path, *run)})
    folders = {run: folder for run, folder in folders.items() if finished(folder, *run)}
    check_recipe(folders)
    if not folders:
        raise ValueError(f"--out_dir {args.out_dir} holds no finished run of these arms and seeds")
    evaluate(folders, args)
    return current(read_rows(args.out_dir / "eval/results.jsonl"), folders), folders


def main():
    args, rest = get_args()
    folders = {(a, seed): args.out_dir / f"{a}_s{seed}" for seed in args.seeds for a in args.arms}
    rows, folders = stored(args.rows, folders) if args.rows else measured(folders, args, rest)
    found = outcomes(rows, folders, args.limit, [arm for arm in ARMS if not with_rpc(arm)])
    compared, primary = compare(found, args.arms, args.baseline), primary_of(rows)
    args.out_dir.mkdir(parents=True, exist_ok=True)
    text = tables(found, compared, args.arms, args.baseline, primary, args.references)
    name = "differences" + (f"_to_{args.baseline}" if args.baseline != BASELINE else "")
    (args.out_dir / f"{name}.md").write_text(text + "\n")
    if compared:
        draw(compared, args.arms, args.out_dir / f"{name}.png", args.baseline, primary,
             args.references)
    print(f"\n{text}\n\n{args.out_dir}: {name}.md is this, {name}.png draws it")


if __name__ == "__main__":
    common.run(main)
