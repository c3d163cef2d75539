r"""Was RPC given a fair chance? Its lambda, reading and number of steps chosen, then tested.

    python -m referee.studies.constants test        # two settings of a pilot against symmetric, new seeds
    python -m referee.studies.constants test --arms symmetric rpc4-l1 --seeds 10 11 12      # two arms alone
    python -m referee.studies.constants choose      # 28 to 34 short networks; scored on held-out images
    python -m referee.studies.constants test --chosen             # their winners instead, if they differ
    python -m referee.studies.constants choose --rows referee/results/constants/choose.jsonl        # its scores
    python -m referee.studies.constants table --rows referee/results/constants/s*.jsonl

The published lambda and n were chosen for ImageNet networks of width 192; these have 64. So both
are chosen here, on training images that were held out, and only then tested, once, on test images.
What is compared and what each outcome means was fixed before the runs: referee/results/constants/README.md.
A command trains and scores what --out_dir lacks; several may share it, with other --seeds each.
"""

import argparse
import json
import sys
from pathlib import Path

if not __package__:
    sys.exit("error: start this in the repository's folder, as: python -m referee.studies.constants")

import numpy as np
import torch

import common
from data.batches import hold_out
from data.shapes import load_shapes
from robust import corruptions
from robust.sources import load_model
from referee.studies.differences import outcomes, primary_of, report
from referee.studies.robustness import call, in_files, runs_of
from referee.studies.stats import spread

LAMBDAS = dict(released=(0.5, 1, 2, 4, 8, 16), paper=(0.05, 0.1, 0.25, 0.5, 1))
GRID = [(form, lambd, 4) for form, values in LAMBDAS.items() for lambd in values]
STEPS, CRITERIA = (2, 3, 6), ("clean", "corruptions")
SEEDS, FRESH = (0, 1), (5, 6, 7, 8, 9)                      # to choose with, to test with
HELD, CORRUPTED, SEVERITIES = 2000, 500, (1, 3, 5)          # images held out, of them corrupted
PILOT = [("released", 4, 2), ("paper", 0.1, 4)]            # its two best
# Two arms alone, on seeds of their own: the published constants, and the best that was chosen.
ALONE = {"rpc4-l1": range(5, 13), "paper-0.05-n4": range(15, 20)}
MEASURES = ["clean", "corruptions", "pgd eps=2/255 steps=20"]


def name_of(form, lambd, n_iter):
    """Name an arm and its folder: ("released", 0.5, 4) is "released-0.5-n4"."""
    return f"{form}-{lambd:g}-n{n_iter}"


def rpc_flags(form, lambd, n_iter):
    return ["--attn", "rpc", "--form", form, "--lambd", lambd, "--n_iter", n_iter]


PUBLISHED = {"symmetric": ["--attn", "symmetric"], "rpc4-l1": rpc_flags("released", 4, 4)}
ARMS = PUBLISHED | {name_of(*setting): rpc_flags(*setting) for setting in
                    ((form, lambd, n) for form, lambd, _ in GRID for n in (2, 3, 4, 6))}


def train(folder, *flags):
    """Train a run that is not there yet; one that was cut goes on."""
    log = common.read_log(folder / "log.jsonl")
    epochs = flags[flags.index("--epochs") + 1]
    if not any(row.get("epoch") == epochs for row in log):
        kept = (folder / "last.pt").exists()
        call("train_cls.py", *(["--resume", folder] if kept else [*flags, "--out_dir", folder]))


# --- to choose ------------------------------------------------------------------------------------

def held_out():
    """Make [(images (n, 3, 32, 32) uint8, labels)]: held-out images as they are, then corrupted."""
    split = hold_out(load_shapes("train", 16000, 32), HELD)[1]
    few, labels = split.images[:CORRUPTED], split.labels[:CORRUPTED]
    index = torch.arange(CORRUPTED)
    damaged = [(corruptions.corrupt(few, name, severity, seed=0, index=index), labels)
               for name in corruptions.NAMES for severity in SEVERITIES]
    return [(split.images, split.labels), *damaged]


@torch.no_grad()
def accuracy(model, images, labels):
    """Count how many are right, in per cent."""
    right = [(model(x.float() / 255).argmax(1) == y).float()
             for x, y in zip(images.split(256), labels.split(256))]
    return 100 * torch.cat(right).mean().item()


def choose(out_dir, settings, seeds, sets):
    """Train and score what has no score yet. sets: of `held_out`, filled when first needed."""
    for seed, setting in ((seed, setting) for seed in seeds for setting in settings):
        folder = out_dir / "choose" / f"{name_of(*setting)}_s{seed}"
        if not (folder / "score.json").exists():
            train(folder, *rpc_flags(*setting), "--epochs", 4, "--holdout", HELD, "--seed", seed)
            sets.extend([] if sets else held_out())
            model = load_model(folder, torch.device("cpu")).model.eval()
            clean, *damaged = (accuracy(model, *images) for images in sets)
            row = dict(zip(("form", "lambd", "n_iter"), setting), seed=seed, clean=clean,
                       corruptions=float(np.mean(damaged)), images=[HELD, CORRUPTED])
            (folder / "score.json").write_text(json.dumps(row) + "\n")
            print(row, flush=True)


def scores(out_dir, paths=None):
    """Read what has been scored, in out_dir or in these files: {(form, lambda, n): {seed: row}}."""
    found = {}
    for path in paths or sorted(out_dir.glob("choose/*/score.json")):
        for row in map(json.loads, path.read_text().splitlines()):
            found.setdefault((row["form"], row["lambd"], row["n_iter"]), {})[row["seed"]] = row
    return found


def best(rows, settings):
    """Find {criterion: the setting with the highest mean over SEEDS}; ValueError: a seed lacks."""
    for setting in settings:
        if set(rows.get(setting, ())) < set(SEEDS):
            raise ValueError(f"{name_of(*setting)} has no score of every seed {SEEDS} yet: choose")
    return {criterion: max(settings, key=lambda setting: np.mean(
        [rows[setting][seed][criterion] for seed in SEEDS])) for criterion in CRITERIA}


def tried(rows):
    """List the grid, and other numbers of steps at the best of it by each criterion."""
    winners = dict.fromkeys(best(rows, GRID).values())
    return [*GRID, *((form, lambd, n) for form, lambd, _ in winners for n in STEPS)]


def show_choice(rows):
    """Print the score of each setting, mean ± standard deviation over seeds, and the winners."""
    body = [[name_of(*setting), *(spread([row[criterion] for row in of.values()], ".1f")
             for criterion in CRITERIA), str(len(of))] for setting, of in rows.items()]
    print(common.table(body, ["setting", "clean", "15 corruptions", "seeds"]) + "\n")
    for criterion, setting in best(rows, tried(rows)).items():
        print(f"best by {criterion}: {name_of(*setting)}")


# --- to test --------------------------------------------------------------------------------------

def test(out_dir, seeds, arms):
    """Train the arms of each seed in turn and evaluate them on the same test images."""
    for seed in seeds:
        folders = [out_dir / f"{arm}_s{seed}" for arm in arms]
        for folder, arm in zip(folders, arms):
            train(folder, *ARMS[arm], "--epochs", 8, "--seed", seed)
        call("eval_robust.py", "--ckpt", *folders, "--out_dir", out_dir / f"eval_s{seed}",
             "--resume", "--seed", 1, "--limit", 1000, "--severities", *SEVERITIES,
             "--measures", *MEASURES)


def table(paths):
    """Compare settings, and each of ALONE, with symmetric; settings with rpc4-l1."""
    rows = in_files(paths)
    runs = runs_of(rows)
    found, primary = outcomes(rows, runs, 1000), primary_of(rows)
    pilot = [name_of(*setting) for setting in PILOT]
    known = (*PUBLISHED, *pilot)
    chosen = [arm for arm in dict.fromkeys(arm for arm, _ in runs) if arm not in known]
    tested = [settings for settings in (pilot, chosen) if settings]
    report(found, [["symmetric", *settings] for settings in tested], primary)
    for arm, seeds in ALONE.items():
        own = {name: {run: right for run, right in of.items() if run[1] in seeds}
               for name, of in found.items()}
        report(own, [["symmetric", arm]], primary)
    report(found, [["rpc4-l1", *settings] for settings in tested], ())


def main():
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("task", choices=["choose", "test", "table"])
    p.add_argument("--seeds", nargs="+", type=common.number(int, 0), help="default: all")
    p.add_argument("--out_dir", type=Path, default=Path("out/constants"))
    p.add_argument("--chosen", action="store_true", help="test what `choose` found")
    p.add_argument("--arms", nargs="+", choices=ARMS, metavar="ARM",
                   help="test these: symmetric, rpc4-l1, paper-0.05-n4 and others like it")
    p.add_argument("--rows", nargs="+", type=Path, help="files to show: of table the "
                   "evaluator's rows, of choose its scores (nothing is trained)")
    args = p.parse_args()
    if args.task == "table":
        return table(args.rows or sorted(args.out_dir.glob("eval_s*/results.jsonl")))
    if args.task == "test":
        settings = PILOT
        if args.chosen:
            rows = scores(args.out_dir)
            winners = dict.fromkeys(best(rows, tried(rows)).values())
            settings = [setting for setting in winners if setting not in PILOT]
        arms = args.arms or [*PUBLISHED, *(name_of(*setting) for setting in settings)]
        return test(args.out_dir, args.seeds or FRESH, arms)
    if not args.rows:
        seeds, sets = args.seeds or SEEDS, []
        choose(args.out_dir, GRID, seeds, sets)
        choose(args.out_dir, tried(scores(args.out_dir)), seeds, sets)
    show_choice(scores(args.out_dir, args.rows))


if __name__ == "__main__":
    common.run(main)
