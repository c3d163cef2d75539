"""Do networks whose values are kernel-PCA values differ from networks whose values are not?

    python -m referee.studies.decider --data_dir data/cifar10         # 13 arms, seed 0, then 1, ...
    python -m referee.studies.decider --rows referee/results/decider/cifar10.jsonl     # what these rows say

No trained values can decide whether attention "does kernel PCA": a network may do something else.
So values are forced to be those of Theorem 1 and, to compare, of its geometry on other axes.

E_ij = k(k_i, k_j), G = diag(1/g), K = centred Gram matrix, A = softmax(k k^T / sqrt(D)) = G E, v
the learned values. Values v describe w_d = sum_j v_jd phi(k_j). For any N x r basis B orthogonal to
1, V0 = G B L^-T with L L^T = B^T K B describes an orthonormal basis of span{G B}: V0^T E V0 = I.

    span     V0 M, M = V0^T E v: the projection of every w_d on span{G B}
    polar    V0 polar(M) times a learned gain: Theorem 1 up to a rotation, which v chooses
    sign     V0 itself times a gain: each eigenvector turned so that its largest entry is positive

The first two depend on B only through its span: the signs and rotations of eigenvectors, which
differ per image and which no output matrix can undo, never enter. B = the top r eigenvectors of K
is kernel PCA (own). The nulls change B only: axes of another head's keys (other), those of the
layer's input (x), a fixed random basis (random). Eigenvectors carry no gradient; one power step,
B <- K B / eigenvalue, does, and divides by no eigengap (polar-detached: without that step). Three
bases more are referee/studies/constancy.py's: image, hashed, mean.

The network is vit.py's: patches of 8 pixels, C = 64, 4 layers, 8 heads, D = 8. The rest is the
recipe of train_cls.py. The statistic is the held-out loss of an arm minus that of another, paired
by seed: its mean and 95 % t-interval over seeds. The rule that was fixed before the runs gave a
verdict that did not follow: referee/results/decider/README.md, referee/studies/constancy.py. Writes rows to --out
and a figure to out/decider.
"""

import argparse
import math
import sys
import time
from pathlib import Path

if not __package__:
    sys.exit("error: start this in the repository's folder, as: python -m referee.studies.decider")

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

import common
import train_cls
from attention import symmetric_attention
from data.images import load_data
from data.rng import normal, uniform
from kpca import centre, kernel, largest
from referee.studies.stats import paired_t, show, spread
from vit import ViT, ViTConfig

HEAD, RANK, HOLDOUT = 8, 2, 3000                            # D and r of polar, r of span, images
FOLDER = Path("out/decider")
TINY, CPU = 1e-14, torch.device("cpu")                      # of a trace: what float64 resolves
ARMS = ("plain", "rms1", "uniform", "sign", "polar-own", "polar-other", "polar-x", "polar-random",
        "polar-detached", "span-own", "span-other", "span-x", "span-random")
MARGIN, DECAY = 0.03, 0.99                                      # in nats; of mean's running mean


# --- values ---------------------------------------------------------------------------------------

def centred(X):
    return X - X.mean(-2, keepdim=True)


def resolved(K):
    """Least eigenvalue of K (..., N, N) that float64 resolves, (..., 1, 1)."""
    return TINY * K.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]


def top_axes(K, r):
    """Top r eigenvectors of the centred K, those not resolved zero; eigenvalues (..., 1, r)."""
    size, B = largest(centre(K.detach()), r)
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


class Polar(torch.autograd.Function):
    """Orthogonal factor Q of square M = Q (M^T M)^1/2. Its gradient divides by sums, no gaps."""

    @staticmethod
    def forward(ctx, M):
        size, Y = torch.linalg.eigh(M.mT @ M)
        s = size.maximum(TINY * size[..., -1:]).clamp_min(1e-300).sqrt()[..., None, :]
        Q = M @ (Y / s) @ Y.mT
        ctx.save_for_backward(Q, Y, s)
        return Q

    @staticmethod
    def backward(ctx, grad):
        Q, Y, s = ctx.saved_tensors
        W = Y.mT @ Q.mT @ grad @ Y
        return Q @ Y @ ((W - W.mT) / (s + s.mT)) @ Y.mT


class ForcedAttention(nn.Module):
    """Symmetric attention with the values of an arm; (B, N, C) in and out. attn: SelfAttention.

    numbers: of the images that are coming, (B,) int64, which choose the axes of hashed.
    """

    def __init__(self, attn, arm, num_tokens, seed):
        super().__init__()
        H, N = attn.num_heads, num_tokens
        self.attn, self.seed, self.numbers = attn, seed, None
        self.family, _, self.basis = arm.partition("-")
        self.r = RANK if self.family == "span" else HEAD
        if self.family in ("sign", "polar"):
            self.gain = nn.Parameter(torch.full((H,), math.sqrt(N)))
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
        if self.family in ("rms1", "uniform"):
            v = v / v.square().mean((-2, -1), keepdim=True).sqrt()
        if self.family == "uniform":
            return v.mean(-2, keepdim=True).expand_as(v)
        if self.family in ("plain", "rms1"):
            return symmetric_attention(k, v)

        # In float64 to the end: theoretical values are large and cancel when they are averaged.
        E = kernel(k.double(), k.double())
        g = E.sum(-1, keepdim=True)
        V0, M = orthonormal_values(E, g, self.axes(x, E, g), v.double())
        if self.family == "span":
            return E @ (V0 @ M) / g
        v = V0 if self.family == "sign" else V0 @ Polar.apply(M)
        return self.gain[:, None, None] * (E @ v / g)

    def forward(self, x):
        _, k, v = self.attn.project(x)
        h = self.attend(x, k, v).to(x.dtype)
        return self.attn.proj(h.transpose(1, 2).flatten(2))


def build(arm, seed, classes):
    """The network of an arm; its weights are the same in all arms of a seed, gains aside."""
    torch.manual_seed(seed)
    model = ViT(ViTConfig(image_size=32, patch_size=8, num_classes=classes, embed_dim=8 * HEAD,
                          depth=4, num_heads=8, attn="symmetric", init="default"))
    for i, block in enumerate(model.blocks):
        block.attn = ForcedAttention(block.attn, arm, model.config.num_tokens, 100 * seed + i)
    return model


# --- training -------------------------------------------------------------------------------------

# Of train_cls.py's recipes, written out: a recipe that changes there makes no other study here.
RECIPES = {"cifar10": dict(lr=1e-3, pad=4, smoothing=0.1),
           "shapes": dict(lr=2e-3, pad=0, smoothing=0.0)}


def settings_of(args, seed):
    """What the functions of train_cls.py need, with the recipe for --data."""
    return argparse.Namespace(**RECIPES[args.data], data=args.data, data_dir=args.data_dir,
                              image_size=32, num_images=16000, holdout=HOLDOUT, download=False,
                              batch_size=64, accum=1, repeats=1, num_ops=0, erase=0.0, mixup=0.0,
                              cutmix=0.0, min_lr=1e-5, weight_decay=0.05, clip=1.0, amp=False,
                              seed=seed)


def optimise(model, seed, args, train_set, forward):
    """Train a network; forward: its logits of images (b, 3, S, S) with these numbers (b,)."""
    settings = settings_of(args, seed)
    optimizer = torch.optim.AdamW(common.param_groups(model, settings.weight_decay), settings.lr)
    batches = train_cls.train_batches(train_set, settings, 0, args.steps, CPU, 0, 1)
    keys = train_cls.micro_batches(settings, len(train_set.labels), 0, args.steps, 0, 1)
    bar = tqdm(zip(batches, keys), f"seed {seed}", args.steps, leave=False)
    for step, ((images, targets), (numbers, _)) in enumerate(bar):
        lr = common.lr_at(step, args.steps, args.steps // 8, settings.lr, settings.min_lr)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = F.cross_entropy(forward(images, numbers), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad()


def train(arm, seed, args, train_set, test_set):
    """Train a network: its accuracy in per cent and loss on the held-out images, their number."""
    model = build(arm, seed, len(train_set.classes))
    optimise(model, seed, args, train_set, lambda images, numbers: model(images))
    return train_cls.evaluate(model, test_set, settings_of(args, seed), CPU, 0, 1)


def train_missing(args, path, seeds, train):
    """Add the rows that the file lacks, all arms of a seed before the next. train: as above."""
    rows, wanted = common.read_log(path), dict(data=args.data, step=args.steps)
    kept = path.exists() and path.stat().st_size
    if kept and not (rows and all(wanted.items() <= row.items() for row in rows)):
        raise ValueError(f"--out {path} holds other rows than those of {args.steps} steps of "
                         f"{args.data}: choose another")
    path.parent.mkdir(parents=True, exist_ok=True)
    if kept:
        common.Log(path).cut(math.inf)                          # without a line cut by a kill
    done = {(row["arm"], row["seed"]) for row in rows}
    missing = [(a, seed) for seed in seeds for a in args.arms if (a, seed) not in done]
    splits = load_data(settings_of(args, 0), CPU) if missing else ()
    for arm, seed in missing:
        started = time.process_time()
        try:
            scores = train(arm, seed, args, *splits)
            common.Log(path).append(wanted | dict(
                arm=arm, seed=seed, top1=scores["top1"], loss=scores["loss"],
                images=scores["images"], torch=torch.__version__,
                cpu_seconds=round(time.process_time() - started, 1)))
        except (ValueError, torch.linalg.LinAlgError) as error:     # not finite, or no eigenvectors
            tqdm.write(f"seed {seed} {arm} gets no row: {error}")
            continue
        tqdm.write(f"seed {seed} {arm}: {scores['top1']:.1f} %, {scores['loss']:.3f} nats")


# --- what the rows say ----------------------------------------------------------------------------

def read_losses(path):
    """Read rows, and {arm: {seed: loss}} of them; ValueError: a run twice, or other images."""
    rows, found, fields = common.read_log(path), {}, {"arm", "seed", "loss", "top1", "cpu_seconds"}
    if not rows or not all(fields <= row.keys() for row in rows):
        raise ValueError(f"{path}: expected rows of referee.studies.decider or referee.studies.constancy")
    for row in rows:
        if row["seed"] in found.setdefault(row["arm"], {}):
            raise ValueError(f"{row['arm']}, seed {row['seed']} has two rows: keep one")
        found[row["arm"]][row["seed"]] = row["loss"]
    if len({(row["data"], row["step"], row["images"]) for row in rows}) > 1:
        raise ValueError("rows of several data sets, steps or numbers of images: keep one kind")
    return rows, found


def gaps(found, first, second):
    """Subtract the losses of an arm and another, a seed each, where both are in."""
    seeds = sorted(found.get(first, {}).keys() & found.get(second, {}).keys())
    return np.array([found[first][seed] - found[second][seed] for seed in seeds])


def report(path):
    """Print the arms and own minus the others; draw the differences in out/decider."""
    (rows, found), cells = read_losses(path), []
    for arm, losses in found.items():
        top1, seconds = ([row[name] for row in rows if row["arm"] == arm]
                         for name in ("top1", "cpu_seconds"))
        cells.append([arm, len(losses), spread(top1, ".1f"), spread(list(losses.values()), ".3f"),
                      f"{np.median(seconds):.0f}"])
    print(f"{rows[0]['data']}, {rows[0]['step']} steps, {rows[0]['images']} held-out images\n")
    print(common.table(cells, ["arm", "seeds", "accuracy in %", "loss in nats",
                               "CPU seconds, median"]) + "\n")

    pairs = [(f"{family}-own", arm) for family in ("polar", "span") for arm in found
             if arm.startswith(family) or "-" not in arm]
    differences = {f"{a} - {b}": paired_t(gaps(found, a, b)) for a, b in pairs
                   if a != b and len(gaps(found, a, b))}
    cells = [[label, show(d, 3), d.n] for label, d in differences.items()]
    print(common.table(cells, ["difference of losses", "mean (95 % t-interval)", "seeds"]))
    figure = FOLDER / f"{Path(path).stem}.png"
    figure.parent.mkdir(parents=True, exist_ok=True)
    draw(differences, figure)
    print(f"\n{figure} draws the differences")


def draw(differences, path):
    """The differences as points with their intervals, the margin as a band."""
    from referee.studies.plot import WIDTH, plt
    figure, ax = plt.subplots(figsize=(WIDTH, 0.3 * len(differences) + 1))
    ax.axvspan(-MARGIN, MARGIN, color="0.9")
    ax.axvline(0, color="black", linewidth=0.7)
    for y, d in enumerate(differences.values()):
        ax.plot(d.mean, y, "o", color="tab:blue")
        ax.plot([d.low, d.high], [y, y], color="tab:blue")
    ax.set_yticks(range(len(differences)), [f"{label}, n = {d.n}"
                                            for label, d in differences.items()])
    ax.invert_yaxis()
    ax.set_xlabel("difference of held-out loss in nats, 95 % t-interval; grey: the margin")
    figure.savefig(path)


def main():
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--data", choices=["cifar10", "shapes"], default="cifar10")
    p.add_argument("--data_dir", help="folder that holds CIFAR-10; see train_cls.py")
    p.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    p.add_argument("--seeds", type=common.number(int, 1), default=8, help="seeds 0, 1, ...")
    p.add_argument("--steps", type=common.number(int, 8), default=800)
    p.add_argument("--out", help="rows of finished networks; default out/decider/<data>.jsonl")
    p.add_argument("--rows", metavar="FILE", help="only print what the rows in this file say")
    args = p.parse_args()
    path = Path(args.rows or args.out or FOLDER / f"{args.data}.jsonl")
    if not args.rows:
        train_missing(args, path, range(args.seeds), train)
    report(path)


if __name__ == "__main__":
    common.run(main)
