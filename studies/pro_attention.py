"""ProAttention in trained networks: is it more robust, or is its gradient only hidden?

    python -m studies.pro_attention                         # tables of the stored rows
    python -m studies.pro_attention --run --seeds 60 61     # train softmax networks, then evaluate
    python -m studies.pro_attention --ckpt weights/shapes_softmax.pt --limit 64     # one network

Hou et al. (NeurIPS 2024) replace softmax attention in a trained network by a robust weighted mean,
`pro_attention` in studies/robust_attentions.py, without further training. The weights depend on
distances, and the released code detaches these distances. So the gradient does not contain the
effect of a pixel on the weights, and an attack along the gradient cannot use it. Here each softmax
network is evaluated as trained and with ProAttention in all layers. PGD follows the released
gradient in one measure and the true gradient in another.

To continue a killed run, start the same command again. Each finished evaluation appends one row to
studies/results/pro_attention/rows.jsonl. The plan, studies/results/pro_attention/plan.md, was fixed
before the runs and gives each outcome its meaning.
"""

import argparse
import base64
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch

import common
from common import InputError
from data.shapes import load_shapes
from models import load_classifier
from robust import evaluate
from robust.attacks import pgd
from robust.autoattack import apgd
from robust.corruptions import NAMES, corrupt
from studies.patches import corrupt_patches
from studies.robust_attentions import register
from studies.stats import crossed, holm, show, show_p, unpack_bits

RESULTS = Path(__file__).parent / "results/pro_attention"
EPS, SEVERITY, LIMIT = 2 / 255, 3, 150
VARIANTS = {                            # settings of pro_attention, chosen in the pilot
    "softmax": None,
    "huber 4": ("penalty=huber", "delta=4"),
    "huber 1": ("penalty=huber", "delta=1"),
    "l1": ("penalty=l1",),
    "mcp 4": ("penalty=mcp", "gamma=4"),
}
PRIMARY = ("15 corruptions", "apgd")
HIDDEN, TRUE = "pgd, released gradient", "pgd, true gradient"


# --- one network ----------------------------------------------------------------------------------

def with_pro_attention(checkpoint, variant, hide_gradient=False):
    """Rebuild a softmax network: the same weights, but a variant's attention in all layers."""
    if VARIANTS[variant] is None:
        return load_classifier(checkpoint)
    kind = register("pro", *VARIANTS[variant], f"hide_gradient={int(hide_gradient)}")
    config = {**checkpoint["model_config"], "attn": kind}
    return load_classifier({**checkpoint, "model_config": config})


@torch.no_grad()
def is_right(model, images, labels):
    """Return which images are classified correctly, (n,) bool."""
    return torch.cat([model(x).argmax(1) == y for x, y in zip(images.split(50), labels.split(50))])


def measure(checkpoint, variant, images, labels):
    """Evaluate one network: {measure: which images are classified correctly, (n,) bool}.

    images: (n, 3, S, S) uint8. "pgd, released gradient" takes its gradient from a network whose
    distances are detached. In every measure, the network with the true gradient classifies the
    images; both networks have the same outputs.
    """
    model, released = (with_pro_attention(checkpoint, variant, hide) for hide in (False, True))
    for network in (model, released):
        network.requires_grad_(False)

    def along_released(_, images, labels, index):
        return pgd(released, images, labels, EPS, index=index)

    pixels = images / 255
    right = evaluate(model, pixels, labels, {
        HIDDEN: along_released, TRUE: partial(pgd, eps=EPS),
        "apgd": partial(apgd, eps=EPS, steps=40)}, batch_size=50, index=torch.arange(len(images)))
    right["6 noisy patches"] = is_right(model, corrupt_patches(
        pixels, "noise", checkpoint["model_config"]["patch_size"])[0], labels)
    for name in NAMES:
        right[name] = is_right(model, corrupt(images, name, SEVERITY, seed=1) / 255, labels)
    return right


# --- all networks ---------------------------------------------------------------------------------

def read_rows():
    """Read the stored rows; [] if there is no file."""
    path = RESULTS / "rows.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def train(folder, seed):
    """Train the softmax network of a seed, or continue its training."""
    if (folder / "last.pt").exists():
        command = ["--resume", folder]
    else:
        command = ["--attn", "softmax", "--seed", seed, "--device", "cpu", "--out_dir", folder]
    if subprocess.run([sys.executable, "train_cls.py", *map(str, command)]).returncode:
        raise InputError(f"training {folder} failed; finished rows are kept: run again to continue")


def run(args):
    """Train and evaluate the seeds and variants without a row; append one row for each."""
    test = load_shapes("test", args.limit)
    for seed in args.seeds:
        stored = [row for row in read_rows() if row["seed"] == seed]
        missing = [name for name in VARIANTS if name not in {row["variant"] for row in stored}]
        here = common.origin(torch.device("cpu"))["hardware"]
        if missing and any(row["device"] != here for row in stored):
            raise InputError(f"seed {seed} has rows of {stored[0]['device']}, and this is {here}: "
                             f"pairs need one processor; choose another seed")
        folder = args.out_dir / f"softmax_s{seed}"
        if missing:
            train(folder, seed)
        for variant in missing:
            right = measure(common.load(folder / "last.pt"), variant, test.images, test.labels)
            bits = {name: base64.b64encode(np.packbits(x.numpy())).decode()
                    for name, x in right.items() if name != "worst"}
            row = dict(seed=seed, variant=variant, images=args.limit, right=bits, device=here,
                       torch=torch.__version__, commit=commit())
            with open(RESULTS / "rows.jsonl", "a") as f:
                f.write(json.dumps(row) + "\n")


def commit():
    """Return the commit of this code, or "no git"."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], text=True, capture_output=True,
                          cwd=Path(__file__).parent)
    return done.stdout.strip() or "no git"


# --- tables ---------------------------------------------------------------------------------------

def outcomes(rows):
    """Unpack rows into {measure: {(variant, seed): (n,) of 0 and 100}}.

    "15 corruptions" has the mean over the corruptions for each image.
    """
    found = {}
    for row in rows:
        hits = {name: 100 * unpack_bits(text, row["images"]) for name, text in row["right"].items()}
        hits["15 corruptions"] = np.mean([hits.pop(name) for name in NAMES], 0)
        for name, x in hits.items():
            found.setdefault(name, {})[row["variant"], row["seed"]] = x
    return found


def gap(one, other):
    """Test one minus other, two dicts {seed: (n,)}, over the seeds that both have."""
    return crossed([one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())])


def of_variant(found, measure, variant):
    return {seed: x for (name, seed), x in found[measure].items() if name == variant}


def report(rows):
    """Write Markdown: accuracies, differences to softmax, and the effect of the hidden gradient."""
    if not rows:
        return "No rows yet."
    found = outcomes(rows)
    variants = [name for name in VARIANTS if of_variant(found, "clean", name)]
    order = ["clean", "15 corruptions", "6 noisy patches", HIDDEN, TRUE, "apgd"]
    accuracies = [[name, len(of_variant(found, "clean", name)), *(
        f"{np.mean([*of_variant(found, m, name).values()]):.1f}" for m in order)]
        for name in variants]
    others = [name for name in variants if name != "softmax"]
    gaps = {(name, m): gap(of_variant(found, m, name), of_variant(found, m, "softmax"))
            for name in others for m in order}
    p = holm({key: d.p for key, d in gaps.items() if key[1] in PRIMARY})
    differences = [[name, *(show(gaps[name, m], 1, p.get((name, m), 1) < 0.05) for m in order)]
                   for name in others]
    tests = [[name, *(show_p(p[name, m]) for m in PRIMARY)] for name in others]
    hidden = [[name, show(gap(of_variant(found, HIDDEN, name), of_variant(found, TRUE, name)))]
              for name in others]
    return "\n\n".join([
        common.table(accuracies, ["attention", "networks", *order]),
        common.table(differences, ["minus softmax", *order]),
        common.table(tests, ["p, Holm", *PRIMARY]),
        common.table(hidden, ["attention", "released minus true gradient, PGD"]),
        "Processors: " + "; ".join(sorted({row["device"] for row in rows})) + "."])


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--run", action="store_true", help="train and evaluate networks without a row")
    p.add_argument("--seeds", nargs="+", type=int, default=[60],
                   help="seeds to train with --run (default: 60)")
    p.add_argument("--ckpt", type=Path, help="evaluate this softmax checkpoint; nothing is stored")
    p.add_argument("--limit", type=int, default=LIMIT,
                   help=f"number of test images (default: {LIMIT})")
    p.add_argument("--out_dir", type=Path, default=Path("out/pro_attention"),
                   help="folder for networks (default: out/pro_attention)")
    args = p.parse_args(argv)
    if args.ckpt:
        test, checkpoint = load_shapes("test", args.limit), common.load(args.ckpt)
        for variant in VARIANTS:
            right = measure(checkpoint, variant, test.images, test.labels)
            shares = {name: 100 * x.float().mean().item() for name, x in right.items()}
            print(f"{variant:8}", *(f"{name} {shares[name]:.1f}" for name in (
                "clean", "6 noisy patches", HIDDEN, TRUE, "apgd")), sep="  ", flush=True)
        return
    if args.run:
        run(args)
    print(report(read_rows()))


if __name__ == "__main__":
    common.run(main)
