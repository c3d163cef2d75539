r"""Which attention finds corrupted patches, survives them, and keeps the promise of robustness?

    python -m referee.studies.robustness --arms symmetric softmax rpc4-l1 keys keys-rows weights mom \
        rkde-huber rkde-hampel elliptical sinkhorn              # trains and evaluates: hours
    python -m referee.studies.outliers --arms symmetric rpc4-l1 keys keys-rows --seeds 0 1 2    # minutes
    python -m referee.studies.outliers --rows referee/results/robustness/results.jsonl \
        referee/results/robust_attentions/{results,patches}.jsonl       # tables of stored rows: a minute

Reads the networks and rows of referee/studies/robustness.py. Some patches of each test image become noise
or white: how often is the network right, and does its layer 0 score the corrupted tokens highest
(AUC)? Nulls stand beside it: |k|, the distance from the mean key, and the same score computed with
the weights that training began with, or with those of the symmetric network.

An attention keeps the promise if it is above symmetric on the mean of the corruptions and on noisy
patches (p below 0.05 after Holm's correction over the attentions) and not below it on clean images
and under AutoAttack. p: paired t-test over seeds. Writes --out_dir/outliers.md,
outliers.png (the differences) and patches.jsonl.
"""

import argparse
import sys
from pathlib import Path

if not __package__:
    sys.exit("error: start this in the repository's folder, as: python -m referee.studies.outliers")

import numpy as np
import torch
from tqdm import tqdm

import common
from fan import classifier_from_checkpoint
from robust.patches import corrupt_patches
from robust.results import pack, read_rows, unpack, weights_of
from referee.studies import cost, differences, probe, robustness, stats
from referee.studies.differences import BASELINE, NONE
from referee.studies.robust_attentions import SCORED, USUAL
from referee.studies.robustness import ARMS
from referee.studies.where_is_s import auc, first_layer, location, null_scores

SCORES = "own", "own, untrained", "own, symmetric's weights", "|k|", "distance"
PATCHES = [(kind, n) for kind in ("noise", "white") for n in (6, 16)]
REFERENCES = ("rpc4-l1", "rpc2-all")      # judged by their own question, referee/studies/robustness.py
ABOVE, NOT_BELOW = ("15 corruptions", "6 patches noise"), ("clean", "autoattack 1/255")


def get_args():
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out_dir", type=Path, default=Path("out/robustness"),
                   help="of referee/studies/robustness.py")
    p.add_argument("--arms", nargs="+", choices=ARMS, default=[BASELINE, "rpc4-l1", *USUAL])
    p.add_argument("--seeds", nargs="+", type=common.number(int, 0), default=[0, 1, 2])
    p.add_argument("--limit", type=common.number(int, 1), default=500, help="images a measure")
    p.add_argument("--rows", nargs="+", type=Path, default=[], metavar="FILE",
                   help="tables of the rows in these files, of both kinds; no network is read")
    p.add_argument("--rounds", type=common.number(int, 0), default=16, help="training steps to "
                   "time for each attention; 0: none")
    return p.parse_args()


# --- corrupted patches ----------------------------------------------------------------------------

@torch.no_grad()
def token_scores(model, images):
    """{name: score of each patch token (B, P)}: what layer 0 holds for an outlier; the nulls."""
    k, steps = first_layer(model, images)
    scores, attention = null_scores(k), model.blocks[0].attn
    if attention.attn in SCORED:
        _, k, v = attention.project(model.blocks[0].norm1(model.embed(images)))
        _, score = SCORED[attention.attn](k, v)
        scores |= {} if score is None else {"own": score.sum(1)[:, 1:]}
    elif attention.attn == "rpc":
        scores["own"] = location(steps[-1]["S"])
    return scores


def null_networks(model, checkpoint, folder, baseline):
    """{score: network}: this attention with weights that never learned to live with it.

    baseline: the checkpoint of the symmetric run of this seed, or None.
    """
    nulls = {"own, untrained": probe.untrained(model, checkpoint, folder)[0]}
    if baseline:
        weights = checkpoint | dict(model=baseline["model"])
        nulls["own, symmetric's weights"] = classifier_from_checkpoint(weights)
    return nulls


@torch.no_grad()
def look(model, images, labels, nulls):
    """{measure: which images are right, packed}, {corruption: {score: mean AUC}}, the share of
    tokens of clean images that have a score.

    nulls: {score: network} whose own score is taken, too.
    """
    right, areas = {}, {}
    own = token_scores(model, images).get("own", torch.zeros(1))
    for kind, n in PATCHES:
        x, hit = corrupt_patches(images, kind, model.config.patch_size, n=n)
        name = f"{n} patches {kind}"
        right[name] = pack(model(x).argmax(1) == labels)
        scores = token_scores(model, x)
        for null, network in nulls.items():
            scores[null] = token_scores(network, x)["own"]
        areas[name] = {score: round(auc(values, hit).mean().item(), 4)
                       for score, values in scores.items()}
    return right, areas, round((own != 0).double().mean().item(), 4)


def stored(paths, folders):
    """As `measured`, from rows in files; those of patches are the ones with areas."""
    evaluated, runs = robustness.stored(paths, folders)
    patches = {Path(row["checkpoint"]).name: row for path in paths
               for row in common.read_log(path) if "auc" in row}
    rows = {run: patches[path.name] for run, path in folders.items() if path.name in patches}
    return evaluated, runs, rows, {}


def measured(folders, args):
    """The evaluator's rows, {run: folder}, {run: row of the patches}, {arm: cost of a step}."""
    folders = {run: folder for run, folder in folders.items()
               if robustness.finished(folder, *run)}
    robustness.check_recipe(folders)
    if not any(arm == BASELINE for arm, _ in folders):
        raise ValueError(f"--out_dir {args.out_dir}: expected a finished run of {BASELINE}; "
                         "referee.studies.robustness trains it")
    rows = patch_rows(folders, args)
    evaluated = read_rows(args.out_dir / "eval/results.jsonl")
    costs = step_costs(folders, args) if args.rounds else {}
    return differences.current(evaluated, folders), folders, rows, costs


def patch_rows(folders, args):
    """A row a network, those of --out_dir/patches.jsonl kept: {(arm, seed): row}."""
    path, rows, images = args.out_dir / "patches.jsonl", {}, None
    stored = {(row["checkpoint"], row["images"], row.get("weights")): row
              for row in common.read_log(path)}
    for run, folder in tqdm(folders.items(), "corrupted patches", unit="network"):
        checkpoint = common.load(folder)
        model = classifier_from_checkpoint(checkpoint)
        if images is None:
            images, labels, *_ = probe.load_images(checkpoint, model.config, args.limit)
        nulls, symmetric = {}, folders.get((BASELINE, run[1]))
        if "own" in token_scores(model, images[:1]):
            baseline = symmetric and common.load(symmetric)
            nulls = null_networks(model, checkpoint, folder, baseline)
        about = dict(checkpoint=str(folder), images=len(images),
                     weights=weights_of(checkpoint["model"]))
        row = stored.get(tuple(about.values()))
        if row is None or not nulls.keys() <= row["auc"]["6 patches noise"].keys():
            right, areas, share = look(model, images, labels, nulls)
            row = about | dict(auc=areas, right=right, scored=share)
            common.Log(path).append(row)
        rows[run] = row
    return rows


# --- the verdict ----------------------------------------------------------------------------------

def p_values(runs, arms):
    """{arm: p of the paired t-test against symmetric}, corrected; arms of fewer than 2 pairs lack.

    runs: {(arm, seed): (n,)}, how often each image was right.
    """
    found = {}
    for arm in arms:
        gaps = [right.mean() - runs[BASELINE, seed].mean() for (a, seed), right in runs.items()
                if a == arm and (BASELINE, seed) in runs]
        if arm != BASELINE and len(gaps) > 1:
            found[arm] = stats.paired_t(gaps).p
    return stats.holm(found)


def promise(arm, compared, corrected):
    """Does an attention keep the promise? "yes", "no" and why, or what is missing."""
    clean, attacked = NOT_BELOW
    measured = (name for name, a in compared if a == arm and name.startswith(attacked))
    not_below = clean, next(measured, attacked)                  # AutoAttack: on fewer images, too
    missing = [name for name in ABOVE if arm not in corrected.get(name, {})]
    missing += [name for name in not_below if compared.get((name, arm), NONE).n < 2]
    failed = [f"not above on {name}" for name in ABOVE if name not in missing
              and not (compared[name, arm].mean > 0 and corrected[name][arm] < 0.05)]
    failed += [f"below on {name}" for name in not_below if name not in missing
               and compared[name, arm].high < 0]
    if failed:
        return "no: " + ", ".join(failed)
    return f"undecided: two seeds or more of {', '.join(missing)}" if missing else "yes"


def step_costs(folders, args):
    """{arm: CPU time of a training step of 64 scenes, as a ratio to symmetric's}."""
    args.clock, steps = "cpu", {}
    images = torch.rand(64, 3, 32, 32)
    for arm, folder in {arm: folder for (arm, _), folder in folders.items()}.items():
        model = classifier_from_checkpoint(common.load(folder))
        steps[arm] = lambda model=model: cost.training_step(model, images)
    times = cost.alternate(args, torch.device("cpu"), steps)
    return {arm: np.median(np.divide(times[arm], times[BASELINE])) for arm in steps}


def report(found, compared, rows, costs, args, primary=()):
    """Markdown: accuracies and differences; AUC; p-values, costs and the verdict."""
    corrected = {name: p_values(found[name], args.arms) for name in found}
    body = []
    for arm in args.arms:
        p = [f"{corrected.get(name, {}).get(arm, np.nan):.3f}".replace("nan", "") for name in ABOVE]
        ratio = f"{costs[arm]:.2f}" if arm in costs else ""
        verdict = "" if arm == BASELINE else promise(arm, compared, corrected)
        body.append([arm, *p, ratio, verdict])
    head = ["attention", *(f"p, {name}" for name in ABOVE), "training step", "keeps the promise"]

    def over_seeds(arm, value):
        values = [value(row) for (a, _), row in rows.items() if a == arm]
        values = [x for x in values if x is not None]
        return f"{np.mean(values):.2f} ({len(values)})" if values else ""

    areas = [[name, score, *(over_seeds(arm, lambda row: row["auc"][name].get(score))
                             for arm in args.arms)]
             for name in (f"{n} patches {kind}" for kind, n in PATCHES) for score in SCORES]
    areas.append(["clean", "tokens with a score",
                  *(over_seeds(arm, lambda row: row.get("scored")) for arm in args.arms)])
    return "\n\n".join([
        differences.tables(found, compared, args.arms, BASELINE, primary, REFERENCES),
        "AUC of a token's score against the corrupted patches, mean over seeds (seeds):",
        common.table(areas, ["corruption", "score", *args.arms]),
        "p after Holm's correction; a step's CPU time as a ratio to symmetric; verdict:",
        common.table(body, head)])


def main():
    args = get_args()
    folders = {(arm, seed): args.out_dir / f"{arm}_s{seed}" for seed in args.seeds
               for arm in args.arms}
    evaluated, folders, rows, costs = (stored(args.rows, folders) if args.rows
                                       else measured(folders, args))
    found = differences.outcomes(evaluated, folders, args.limit)
    for run, row in rows.items():
        for name, text in row["right"].items():
            right = unpack(text, row["images"]).double().numpy()
            found.setdefault(name, {})[run] = right
    compared = differences.compare(found, args.arms)
    primary = differences.primary_of(evaluated)
    text = report(found, compared, rows, costs, args, primary)
    args.out_dir.mkdir(parents=True, exist_ok=True)
    (args.out_dir / "outliers.md").write_text(text + "\n")
    if compared:
        differences.draw(compared, args.arms, args.out_dir / "outliers.png", BASELINE, primary,
                         REFERENCES)
    print(f"\n{text}\n\n{args.out_dir}: outliers.md is this, outliers.png draws its differences")


if __name__ == "__main__":
    common.run(main)
