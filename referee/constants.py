r"""Was RPC given a fair chance? Its lambda, reading and number of steps chosen, then tested.

    python -m referee.constants                 # two settings of a pilot against symmetric
    python -m referee.constants --arms symmetric paper-0.05-n4 --seeds 15 16 17 18 19
    python -m referee.constants --rows referee/results/constants/s*.jsonl         # tables
    python -m referee.constants choose          # short networks, scored on held-out images
    python -m referee.constants choose --rows referee/results/constants/choose.jsonl

The published lambda and n were chosen for ImageNet networks of width 192; these have 64. So both
are chosen here, on training images that were held out, and only then tested, once, on test images.
What is compared and what each outcome means was fixed before the runs:
referee/results/constants/README.md. An arm is the reading of Algorithm 1, lambda and
the number of steps: paper-0.05-n4.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch

import common
from common import InputError
from data.batches import hold_out
from data.shapes import load_shapes
from robust import corruptions
from robust.sources import load_model
from referee import arms
from referee.differences import outcomes, primary_of, report
from referee.stats import spread

LAMBDAS = dict(released=(0.5, 1, 2, 4, 8, 16), paper=(0.05, 0.1, 0.25, 0.5, 1))
STEPS, CRITERIA = (2, 3, 6), ("clean", "corruptions")
SEEDS = (0, 1)                                              # to choose with
HELD, CORRUPTED, SEVERITIES = 2000, 500, (1, 3, 5)          # images held out, of them corrupted
PILOT = ["released-4-n2", "paper-0.1-n4"]                   # its two best
# Two arms alone, on seeds of their own: the published constants, and the best that was chosen.
ALONE = {"rpc4-l1": range(5, 13), "paper-0.05-n4": range(15, 20)}
HOW = ["--seed", 1, "--severities", *SEVERITIES]            # to evaluate with


def name_of(form, lambd, n_iter):
    return f"{form}-{lambd:g}-n{n_iter}"


def setting(form, lambd, n_iter):
    return dict(attn="rpc", form=form, lambd=lambd, n_iter=n_iter)


PUBLISHED = {"symmetric": dict(attn="symmetric"), "rpc4-l1": setting("released", 4, 4)}
SETTINGS = {name_of(form, lambd, n): setting(form, lambd, n)
            for form, values in LAMBDAS.items() for lambd in values for n in (2, 3, 4, 6)}
GRID = [arm for arm in SETTINGS if arm.endswith("-n4")]
ARMS = PUBLISHED | SETTINGS


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


def choose(out_dir, settings, seeds):
    """Train and score what has no score yet."""
    sets = None
    for seed, arm in ((seed, arm) for seed in seeds for arm in settings):
        folder = out_dir / "choose" / f"{arm}_s{seed}"
        if not (folder / "score.json").exists():
            arms.train(folder, ARMS[arm] | dict(epochs=4, holdout=HELD, seed=seed))
            sets = sets or held_out()
            model = load_model(folder, torch.device("cpu")).model.eval()
            clean, *damaged = (accuracy(model, *images) for images in sets)
            row = {k: v for k, v in ARMS[arm].items() if k != "attn"} | dict(
                seed=seed, clean=clean, corruptions=float(np.mean(damaged)),
                images=[HELD, CORRUPTED])
            (folder / "score.json").write_text(json.dumps(row) + "\n")
            print(row, flush=True)


def scores(paths):
    """Read scores: {arm: {seed: row}}."""
    found = {}
    for path in paths:
        for row in map(json.loads, path.read_text().splitlines()):
            arm = name_of(row["form"], row["lambd"], row["n_iter"])
            found.setdefault(arm, {})[row["seed"]] = row
    return found


def best(rows, settings):
    """Find {criterion: the setting with the highest mean over SEEDS}; InputError: a seed lacks."""
    for arm in settings:
        if set(rows.get(arm, ())) < set(SEEDS):
            raise InputError(f"{arm} has no score of every seed {SEEDS} yet: choose")
    return {criterion: max(settings, key=lambda arm: np.mean(
        [rows[arm][seed][criterion] for seed in SEEDS])) for criterion in CRITERIA}


def tried(rows):
    """List the grid, and other numbers of steps at the best of it by each criterion."""
    winners = dict.fromkeys(best(rows, GRID).values())
    return [*GRID, *(f"{arm.removesuffix('-n4')}-n{n}" for arm in winners for n in STEPS)]


def show_choice(rows):
    """Print the score of each setting, mean ± standard deviation over seeds, and the winners."""
    body = [[arm, *(spread([row[criterion] for row in of.values()], ".1f")
             for criterion in CRITERIA), str(len(of))] for arm, of in rows.items()]
    print(common.table(body, ["setting", "clean", "15 corruptions", "seeds"]) + "\n")
    for criterion, arm in best(rows, tried(rows)).items():
        print(f"best by {criterion}: {arm}")


def main_choose(argv):
    p = argparse.ArgumentParser(prog="constants choose", allow_abbrev=False)
    p.add_argument("--seeds", nargs="+", type=common.number(int, 0), default=SEEDS)
    p.add_argument("--out_dir", type=Path, default=Path("out/constants"))
    p.add_argument("--rows", nargs="+", type=Path, help="scores to show; nothing is trained")
    args = p.parse_args(argv)
    made = "choose/*/score.json"
    if not args.rows:
        choose(args.out_dir, GRID, args.seeds)
        choose(args.out_dir, tried(scores(args.out_dir.glob(made))), args.seeds)
    show_choice(scores(args.rows or sorted(args.out_dir.glob(made))))


# --- to test --------------------------------------------------------------------------------------

def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["choose"]:
        return main_choose(argv[1:])
    args, rows = arms.run(__doc__, ARMS, argv, out_dir="out/constants", seeds=(5, 6, 7, 8, 9),
                          limit=1000, measures=["clean", "corruptions", "pgd eps=2/255 steps=20"],
                          how=HOW, default=[*PUBLISHED, *PILOT])
    found, primary = outcomes(rows, args.limit), primary_of(rows)
    chosen = [arm for arm in args.arms if arm not in (*PUBLISHED, *PILOT)]
    tested = [settings for settings in (PILOT, chosen) if settings]
    report(found, [["symmetric", *settings] for settings in tested], primary)
    for arm, seeds in ALONE.items():
        report(found, [["symmetric", arm]], primary, seeds)
    report(found, [["rpc4-l1", *settings] for settings in tested], ())


if __name__ == "__main__":
    common.run(main)
