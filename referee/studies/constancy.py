r"""Do fixed random axes win because they are random, or because they are the same for every image?

    python -m referee.studies.constancy --data_dir data/cifar10         # seeds 0, 1, ..., all arms of each
    python -m referee.studies.constancy --data_dir data/cifar10 --family polar
    python -m referee.studies.constancy --rows referee/results/decider/constancy.jsonl      # tables and verdict

referee/studies/decider.py forces values onto r axes a head. Its kernel-PCA axes differ from image to image,
its random axes do not: two things at once. Here they are taken apart, in its families span (r = 2)
and polar (r = 8, as many as a head has channels):

                          differ from image to image           the same for every image
    of kernel PCA         own                                  mean: of the mean Gram matrix
    random                hashed: drawn anew for each image    random

and beside them axes that differ from image to image without being this head's own: those of another
image (image), of another head (other), of the layer's input (x); and own without any gradient
(detached), as mean has none. hashed depends on the image's number, so an image always comes with
the same axes. mean follows the keys during training (a running mean over batches) and stays as it
is then. What each outcome means was fixed before the runs: referee/results/decider/constancy.md
"""

import argparse
import math
import sys
from functools import partial
from pathlib import Path

if not __package__:
    sys.exit("error: start this in the repository's folder, as: python -m referee.studies.constancy")

import numpy as np
import torch
import torch.nn.functional as F

import common
from referee.studies.decider import MARGIN, build, gaps, optimise, read_losses, train_missing
from referee.studies.stats import holm, paired_t, show, show_p, spread

ARMS = ("hashed", "mean", "image", "own", "random", "other", "x", "detached")
NULLS = ("hashed", "image", "other", "x")
COLUMNS = ("hashed", "image", "x", "other", "own", "detached", "mean", "random")    # of the figure
HELD_OUT = 10 ** 6                    # first number of a held-out image: other axes than trained


def run(model, images, numbers):
    """Compute logits of images (b, 3, S, S); numbers (b,) int64 choose the axes of hashed."""
    for block in model.blocks:
        block.attn.numbers = numbers
    return model(images)


@torch.no_grad()
def held_out(model, split):
    """Measure accuracy in per cent and loss on the held-out images."""
    model.eval()
    numbers = HELD_OUT + torch.arange(len(split.labels))
    parts = zip(split.images.split(256), numbers.split(256))
    logits = torch.cat([run(model, images.float() / 255, part) for images, part in parts])
    right = (logits.argmax(1) == split.labels).float()
    return dict(top1=100 * right.mean().item(), images=len(split.labels),
                loss=F.cross_entropy(logits, split.labels).item())


def train(arm, seed, args, train_set, test_set):
    """Train a network and measure it on the held-out images at the end."""
    model = build(arm, seed, len(train_set.classes))
    optimise(model, seed, args, train_set, partial(run, model))
    return held_out(model, test_set)


# --- what the rows say ----------------------------------------------------------------------------

def families(found):
    """Sort {"span-own": {seed: loss}, ...} into {"span": {"own": {seed: loss}, ...}, ...}."""
    sorted_ = {}
    for name, of in found.items():
        family, _, arm = name.partition("-")
        sorted_.setdefault(family, {})[arm] = of
    return sorted_


def report(found):
    """Print the arms, the differences and which outcome it is. found: {arm: {seed: loss}}."""
    table = [[arm, str(len(of)), spread(list(of.values()), ".3f")] for arm, of in found.items()]
    print(common.table(table, ["axes", "seeds", "held-out loss in nats"]) + "\n")

    own = {null: gaps(found, "own", null) for null in ARMS if null != "own"}
    beyond = {null: paired_t(own[null] + MARGIN).p for null in NULLS if len(own[null]) > 1}
    p = holm(beyond)
    table = [[f"own - {null}", str(len(d)), show(paired_t(d), 3), show_p(p.get(null, math.nan))]
             for null, d in own.items() if len(d)]
    print(common.table(table, ["difference", "seeds", "nats (95 % over seeds)",
                               f"differs from {-MARGIN}: p, Holm"]) + "\n")
    helps = len(p) == len(NULLS) and all(own[n].mean() < -MARGIN and p[n] < 0.05 for n in p)
    print("kernel PCA's axes help:", "yes" if helps else "not shown")

    seeds = set.intersection(*(set(found.get(a, ())) for a in ("own", "mean", "hashed", "random")))
    if len(seeds) > 1:
        four = {a: np.array([found[a][s] for s in sorted(seeds)]) for a in found if
                seeds <= found[a].keys()}
        constancy = (four["mean"] - four["own"] + four["random"] - four["hashed"]) / 2
        kind = (four["own"] - four["hashed"] + four["mean"] - four["random"]) / 2
        both = four["own"] - four["mean"] - (four["hashed"] - four["random"])
        for what, d in (("constant minus varying", constancy), ("kernel PCA minus random", kind),
                        ("interaction", both)):
            print(f"{what}: {show(paired_t(d), 3)}, {len(d)} seeds")
        print("constancy helps:", "yes" if paired_t(constancy).high < 0 else "not shown")


def draw(found, path):
    """Draw a panel a family, arms as columns, varying and constant apart; a line a seed."""
    from referee.studies.plot import WIDTH, plt
    figure, panels = plt.subplots(1, len(found), figsize=(WIDTH, 3), squeeze=False)
    for ax, (family, of) in zip(panels[0], found.items()):
        arms = [arm for arm in COLUMNS if arm in of]
        for seed in sorted({seed for losses in of.values() for seed in losses}):
            points = [(i, of[arm][seed]) for i, arm in enumerate(arms) if seed in of[arm]]
            ax.plot(*zip(*points), "o-", linewidth=0.7, markersize=4, label=f"seed {seed}")
        ax.axvline(sum(arm not in ("mean", "random") for arm in arms) - 0.5, color="0.6",
                   linestyle=":")
        ax.set_xticks(range(len(arms)), arms, rotation=45)
        ax.set(title=family, ylabel="held-out loss in nats")
        ax.legend(fontsize=6)
    figure.supxlabel("left: axes differ from image to image; right: the same for every image")
    figure.savefig(path)
    plt.close(figure)


def main():
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--data", choices=["cifar10"], default="cifar10")
    p.add_argument("--data_dir", help="folder that holds CIFAR-10; see train_cls.py")
    p.add_argument("--family", choices=["span", "polar"], default="span")
    p.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    p.add_argument("--seeds", nargs="+", type=common.number(int, 0), default=[0, 1, 2, 3, 4])
    p.add_argument("--steps", type=common.number(int, 8), default=800)
    p.add_argument("--out", type=Path, default=Path("out/decider/constancy.jsonl"))
    p.add_argument("--rows", type=Path, help="only say what the rows in this file say")
    p.add_argument("--figure", type=Path, help="where to draw it")
    args = p.parse_args()
    args.arms = [f"{args.family}-{arm}" for arm in args.arms]
    if not args.rows:
        train_missing(args, args.out, args.seeds, train)
    found = families(read_losses(args.rows or args.out)[1])
    for family, of in found.items():
        print(f"{family}\n")
        report(of)
    if args.figure:
        draw(found, args.figure)


if __name__ == "__main__":
    common.run(main)
