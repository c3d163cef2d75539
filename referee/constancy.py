r"""Do fixed random axes win because they are random, or because they are the same for every image?

    python -m referee.constancy --data_dir data/cifar10  # seeds 0, 1, ..., all arms of each
    python -m referee.constancy --rows referee/results/decider/constancy.jsonl

No trained values can decide whether attention "does kernel PCA": a network may do something else.
So values are forced to be those of Theorem 1 and, to compare, of its geometry on other axes.

E_ij = k(k_i, k_j), G = diag(1/g), K = centred Gram matrix, v the learned values. Values v describe
w_d = sum_j v_jd phi(k_j). For any N x r basis B orthogonal to 1, V0 = G B L^-T with L L^T = B^T K B
describes an orthonormal basis of span{G B}: V0^T E V0 = I.

    span     V0 M, M = V0^T E v: the projection of every w_d on span{G B}, r = 2
    plain    learned values, not forced

span depends on B only through its span: the signs and rotations of eigenvectors, which differ per
image and which no output matrix can undo, never enter. Its arms are bases:

                          differ from image to image           the same for every image
    of kernel PCA         own                                  mean: of the mean Gram matrix
    random                hashed: drawn anew for each image    random

and axes that differ from image to image without being this head's own: those of another image
(image), of another head (other), of the layer's input (x); and own without any gradient (detached),
as mean has none. In the others eigenvectors carry no gradient; one power step, B <- K B /
eigenvalue, does, and divides by no eigengap. hashed depends on the image's number, so an image
always comes with the same axes. mean follows the keys during training (a running mean over batches)
and stays as it is then. What each outcome means was fixed before the runs:
referee/results/decider/plan.md
"""

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

import common
from attention import symmetric_attention
from common import InputError
from data.augment import augment_uint8, soft_targets
from data.images import load_data
from data.rng import epoch_order, normal, uniform
from kpca import centre, kernel, top_eigh
from referee.stats import holm, paired_t, show, show_p, spread
from vit import ViT, ViTConfig

ARMS = ("hashed", "mean", "image", "own", "random", "other", "x", "detached")
NULLS = ("hashed", "image", "other", "x")
COLUMNS = ("hashed", "image", "x", "other", "own", "detached", "mean", "random")    # of the figure
RANK = 2                                                    # r; a head has 8 channels
MARGIN, DECAY = 0.03, 0.99                                  # in nats; of mean's running mean
HELD_OUT = 10 ** 6                    # first number of a held-out image: other axes than trained
TINY, CPU = 1e-14, torch.device("cpu")                      # of a trace: what float64 resolves


# --- values ---------------------------------------------------------------------------------------

def centred(X):
    return X - X.mean(-2, keepdim=True)


def resolved(K):
    """Least eigenvalue of K (..., N, N) that float64 resolves, (..., 1, 1)."""
    return TINY * K.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]


def top_axes(K, r):
    """Top r eigenvectors of the centred K, those not resolved zero; eigenvalues (..., 1, r)."""
    size, B = top_eigh(centre(K.detach()), r)
    size, least = size[..., None, :], resolved(K.detach())
    return centred(B * (size > least)), size.maximum(least)


def random_axes(heads, N, r, seed):
    """(H, N, r) float64, orthonormal and orthogonal to 1."""
    B = torch.randn(heads, N, r, generator=torch.Generator().manual_seed(seed))
    return torch.linalg.qr(centred(B.double())).Q


def key_axes(E, g, r, power=True):
    """B, top r eigenvectors of the centred Gram matrix, then K B / eigenvalue: the same numbers."""
    B, size = top_axes(E / g / g.mT, r)
    B = B * B.gather(-2, B.abs().argmax(-2, keepdim=True)).sign()           # largest entry positive
    return centred(E @ (B / g) / g) / size if power else B


def input_axes(x, r):
    """The same of the layer's input (B, N, C), with its linear kernel: B (B, 1, N, r)."""
    x = x[:, None]
    B, size = top_axes(x @ x.mT, r)
    return centred(x @ (x.mT @ B)) / size


def orthonormal_values(E, g, B, v):
    """V0 (..., N, r) on the axes B, and V0^T E v. B^T K B needs no centring: B^T 1 = 0."""
    U = B / g                                                               # G B
    EU = E @ U
    ridge = resolved(E / g / g.mT) * torch.eye(B.shape[-1], dtype=B.dtype)
    L = torch.linalg.cholesky(U.mT @ EU + ridge)
    rows = torch.linalg.solve_triangular(L, torch.cat([U.mT, EU.mT @ v], -1), upper=False)
    return rows[..., :B.shape[-2]].mT, rows[..., B.shape[-2]:]


class ForcedAttention(nn.Module):
    """Symmetric attention with the values of an arm; (B, N, C) in and out. attn: SelfAttention.

    numbers: of the images that are coming, (B,) int64, which choose the axes of hashed.
    """

    def __init__(self, attn, arm, num_tokens, seed):
        super().__init__()
        H, N = attn.num_heads, num_tokens
        self.attn, self.seed, self.numbers = attn, seed, None
        self.basis, self.r = arm.removeprefix("span-"), RANK
        if self.basis == "random":
            self.register_buffer("B", random_axes(H, N, self.r, seed), persistent=False)
        if self.basis == "mean":
            self.register_buffer("gram", torch.zeros(H, N, N, dtype=torch.float64))

    def axes(self, x, E, g):
        """The basis B, (B, H or 1, N, r) or (H, N, r), float64."""
        H, N = E.shape[1:3]
        if self.basis == "random":
            return self.B
        if self.basis == "hashed":                              # drawn anew for each image
            draws = normal(uniform(self.numbers, H * N * self.r, 77, self.seed))
            return torch.linalg.qr(centred(draws.double().view(-1, H, N, self.r))).Q
        if self.basis == "mean":                                # of a running mean over batches
            if self.training:
                batch = centre((E / g / g.mT).detach()).mean(0)
                self.gram.lerp_(batch, 1 - DECAY if self.gram.any() else 1)
            return top_axes(self.gram, self.r)[0]
        if self.basis == "x":
            return input_axes(x.double(), self.r)
        B = key_axes(E, g, self.r, power=self.basis != "detached")
        turn = dict(other=1, image=0).get(self.basis)           # the head, the image before
        return B if turn is None else B.roll(1, turn)

    def attend(self, x, k, v):
        """Attention to the values of this arm (B, H, N, D), from the layer's input and k, v."""
        if self.basis == "plain":
            return symmetric_attention(k, v)

        # In float64 to the end: theoretical values are large and cancel when they are averaged.
        E = kernel(k.double(), k.double())
        g = E.sum(-1, keepdim=True)
        V0, M = orthonormal_values(E, g, self.axes(x, E, g), v.double())
        return E @ (V0 @ M) / g

    def forward(self, x):
        _, k, v = self.attn.project(x)
        h = self.attend(x, k, v).to(x.dtype)
        return self.attn.proj(h.transpose(1, 2).flatten(2))


def build(arm, seed, classes):
    """The network of an arm; its weights are the same in all arms of a seed."""
    torch.manual_seed(seed)
    model = ViT(ViTConfig(image_size=32, patch_size=8, num_classes=classes, embed_dim=64,
                          depth=4, num_heads=8, attn="symmetric", init="default"))
    for i, block in enumerate(model.blocks):
        block.attn = ForcedAttention(block.attn, arm, model.config.num_tokens, 100 * seed + i)
    return model


def run(model, images, numbers):
    """Compute logits of images (b, 3, S, S); numbers (b,) int64 choose the axes of hashed."""
    for block in model.blocks:
        block.attn.numbers = numbers
    return model(images)


# --- training -------------------------------------------------------------------------------------

# Of train_cls.py's recipes, written out: a recipe that changes there makes no other study here.
RECIPES = {"cifar10": dict(lr=1e-3, pad=4, smoothing=0.1),
           "shapes": dict(lr=2e-3, pad=0, smoothing=0.0)}
BATCH, MIN_LR, DECAYED = 64, 1e-5, (nn.Linear, nn.Conv2d)


def load(args):
    """The Splits to train on and to measure on: 3,000 training images are held out."""
    return load_data(argparse.Namespace(data=args.data, data_dir=args.data_dir, image_size=32,
                                        num_images=16000, holdout=3000, download=False, seed=0),
                     CPU)


def batches(split, recipe, seed, steps):
    """Yield images (b, 3, S, S), targets (b, K) and the images' numbers (b,), shifted, flipped."""
    n = len(split.labels)
    for step in range(steps):
        epoch, i = divmod(step, n // BATCH)
        numbers = epoch_order(n, epoch, seed)[i * BATCH:(i + 1) * BATCH]
        positions = step * BATCH + torch.arange(BATCH)
        images = augment_uint8(split.images[numbers], positions, seed, recipe["pad"])
        yield images / 255, soft_targets(split.labels[numbers], len(split.classes),
                                         recipe["smoothing"]), numbers


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
    """Train a network: its accuracy in per cent and loss on the held-out images, their number."""
    model, recipe, warmup = build(arm, seed, len(train_set.classes)), RECIPES[args.data], \
        args.steps // 8
    matrices = [m.weight for m in model.modules() if isinstance(m, DECAYED)]
    others = [p for p in model.parameters() if all(p is not w for w in matrices)]
    optimizer = torch.optim.AdamW([dict(params=matrices, weight_decay=0.05),
                                   dict(params=others, weight_decay=0.0)], recipe["lr"])
    bar = tqdm(batches(train_set, recipe, seed, args.steps), f"seed {seed}", args.steps,
               leave=False)
    for step, (images, targets, numbers) in enumerate(bar):
        rise = 1e-6 + (recipe["lr"] - 1e-6) * step / max(warmup, 1)
        fall = MIN_LR + (recipe["lr"] - MIN_LR) * (1 + math.cos(math.pi * step / args.steps)) / 2
        for group in optimizer.param_groups:
            group["lr"] = rise if step < warmup else fall
        loss = F.cross_entropy(run(model, images, numbers), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return held_out(model, test_set)


def train_missing(args):
    """Add the rows that --out lacks, all arms of a seed before the next."""
    rows, wanted = common.read_log(args.out), dict(data=args.data, step=args.steps)
    if any(not wanted.items() <= row.items() for row in rows):
        raise InputError(f"--out {args.out} holds other rows than those of {args.steps} steps of "
                         f"{args.data}: choose another")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))   # no line cut by a kill
    done = {(row["arm"], row["seed"]) for row in rows}
    missing = [(a, seed) for seed in args.seeds for a in args.arms if (a, seed) not in done]
    splits = load(args) if missing else ()
    for arm, seed in missing:
        started = time.process_time()
        scores = train(arm, seed, args, *splits)
        row = wanted | dict(arm=arm, seed=seed, **scores, torch=torch.__version__,
                            cpu_seconds=round(time.process_time() - started, 1))
        with open(args.out, "a") as file:
            file.write(json.dumps(row) + "\n")
        tqdm.write(f"seed {seed} {arm}: {scores['top1']:.1f} %, {scores['loss']:.3f} nats")


# --- what the rows say ----------------------------------------------------------------------------

def families(path):
    """Sort rows into {"span": {"own": {seed: loss}, ...}, ...}; plain belongs to every family."""
    found = {}
    for row in common.read_log(path):
        losses = found.setdefault(row["arm"], {})
        if row["seed"] in losses:
            raise InputError(f"{path}: {row['arm']}, seed {row['seed']} has two rows: keep one")
        losses[row["seed"]] = row["loss"]
    sorted_, alone = {}, {arm: of for arm, of in found.items() if "-" not in arm}
    for arm in (arm for arm in found if arm not in alone):
        family, _, basis = arm.partition("-")
        sorted_.setdefault(family, dict(alone))[basis] = found[arm]
    return sorted_


def gaps(found, first, second):
    """Subtract the losses of an arm and another, a seed each, where both are in."""
    seeds = sorted(found.get(first, {}).keys() & found.get(second, {}).keys())
    return np.array([found[first][seed] - found[second][seed] for seed in seeds])


def effects(found):
    """The two main effects and the interaction of the four bases, one number a seed that all have;
    {} below two seeds."""
    seeds = set.intersection(*(set(found.get(a, ())) for a in ("own", "mean", "hashed", "random")))
    if len(seeds) < 2:
        return {}
    own, mean, hashed, random = (np.array([found[a][s] for s in sorted(seeds)])
                                 for a in ("own", "mean", "hashed", "random"))
    return {"constant minus varying": (mean - own + random - hashed) / 2,
            "kernel PCA minus random": (own - hashed + mean - random) / 2,
            "interaction": own - mean - (hashed - random)}


def beyond(found):
    """Test whether own axes beat each null's by more than the margin: {null: p after Holm}."""
    own = {null: gaps(found, "own", null) for null in NULLS}
    return holm({null: paired_t(d + MARGIN).p for null, d in own.items() if len(d) > 1})


def report(found):
    """Print the arms, the differences and which outcome it is. found: {arm: {seed: loss}}."""
    table = [[arm, str(len(of)), spread(list(of.values()), ".3f")] for arm, of in found.items()]
    print(common.table(table, ["axes", "seeds", "held-out loss in nats"]) + "\n")

    own = {null: gaps(found, "own", null) for null in {**dict.fromkeys(ARMS), **found}
           if null in found and null != "own"}
    p = beyond(found)
    table = [[f"own - {null}", str(len(d)), show(paired_t(d), 3), show_p(p.get(null, math.nan))]
             for null, d in own.items() if len(d)]
    print(common.table(table, ["difference", "seeds", "nats (95 % over seeds)",
                               f"differs from {-MARGIN}: p, Holm"]) + "\n")
    helps = len(p) == len(NULLS) and all(own[n].mean() < -MARGIN and p[n] < 0.05 for n in p)
    print("kernel PCA's axes help:", "yes" if helps else "not shown")

    both = effects(found)
    for what, d in both.items():
        print(f"{what}: {show(paired_t(d), 3)}, {len(d)} seeds")
    if both:
        constancy = paired_t(both["constant minus varying"])
        print("constancy helps:", "yes" if constancy.high < 0 else "not shown")


def draw(found, path):
    """Draw a panel a family, arms as columns, varying and constant apart; a line a seed."""
    from referee.plot import WIDTH, plt, save
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
    save(figure, path)


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--data", choices=RECIPES, default="cifar10")
    p.add_argument("--data_dir", help="folder that holds CIFAR-10; see train_cls.py")
    p.add_argument("--arms", nargs="+", choices=[*ARMS, "plain"], default=ARMS)
    p.add_argument("--seeds", nargs="+", type=common.number(int, 0), default=[0, 1, 2, 3, 4])
    p.add_argument("--steps", type=common.number(int, 8), default=800)
    p.add_argument("--out", type=Path, default=Path("out/decider/constancy.jsonl"))
    p.add_argument("--rows", type=Path, help="only say what the rows in this file say")
    p.add_argument("--figure", type=Path, help="where to draw it")
    args = p.parse_args(argv)
    args.arms = [arm if arm == "plain" else f"span-{arm}" for arm in args.arms]
    if not args.rows:
        train_missing(args)
    found = families(args.rows or args.out)
    for family, of in found.items():
        print(f"{family}\n")
        report(of)
    if args.figure:
        draw(found, args.figure)


if __name__ == "__main__":
    common.run(main)
