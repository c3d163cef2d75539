"""Robust attentions on one footing: which of them withstands corrupted and attacked images?

    python -m studies.robust_attentions train keys-rows --seed 0 --out_dir out/attn/keys-rows_s0
    python -m studies.robust_attentions train keys-rows lambd=0.5 --out_dir out/attn/half_s0
    python -m studies.robust_attentions train weights-all --out_dir out/attn/all_s0  # every layer
    python -m studies.robust_attentions evaluate --ckpt out/attn/*_s0 --out_dir out/attn/rows

Four groups have published attentions that are to withstand corrupted tokens, each with a harness of
its own. Here each is a function of at most 15 lines; networks, steps, images and attacks are those
of train_cls.py and eval_robust.py: `train` takes the flags of the one, `evaluate` of the other.
studies/robustness.py runs all of them over seeds, studies/outliers.py says who keeps the promise.

Every function takes q, k, v (B, H, N, D) and settings, and returns the output (B, H, N, D) and a
score (B, H, N), higher for tokens that it holds for outliers, or None. Queries are the keys (as in
the paper's baseline) but in elliptical. A(K) = softmax(K K^T / sqrt(D)). What an outcome means was
fixed before the runs: results/robust_attentions/README.md.
"""

import itertools
import math
import sys
from functools import partial
from unittest.mock import patch

if not __package__:
    sys.exit("error: start this in the repository's folder, as: "
             "python -m studies.robust_attentions")

import torch
import torch.nn.functional as F

import common
import eval_robust
from attention import SelfAttention, soft_threshold, softmax_attention, symmetric_attention
from fan import classifier_from_checkpoint
from flags import read_settings
from robust import sources
from studies import altered


def scores(q, k):
    """q k^T / sqrt(D), (B, H, N, N)."""
    return q @ k.mT / math.sqrt(k.shape[-1])


# --- weights of tokens: robust kernel density -----------------------------------------------------

def huber(d, a):
    """psi(d) / d: 1 up to a, then a / d."""
    return a / d.clamp_min(a)


def hampel(d, a):
    """psi(d) / d with corners a, 2a, 3a: 1, then a / d, falling to 0 at 3a."""
    return (a / d.clamp_min(a)).minimum((3 * a / d - 1).clamp_min(0))


def token_weights(x, psi, a, rounds, released=False):
    """Weights (B, H, N) of sum 1 of a robust kernel density of the points x (B, H, N, D).

    IRWLS: d_j^2 = 1 - 2 (kappa w)_j + w^T kappa w is a point's distance from the weighted mean in
    feature space, w_j ~ psi(d_j) / d_j. a: in medians of d (Kim & Scott 2012). released: + (kappa
    w)_j instead, as in the code.
    """
    x = F.normalize(x, dim=-1)
    kappa = ((x @ x.mT - 1) / math.sqrt(x.shape[-1])).exp()             # kappa(x, x) = 1
    w = torch.full_like(x[..., :1], 1 / x.shape[-2])
    middle = 1 if released else -2
    for _ in range(rounds):
        d2 = 1 + middle * kappa @ w + w.mT @ kappa @ w
        d = d2.clamp_min(1e-12).sqrt()
        w = psi(d, a * d.detach().median(-2, keepdim=True).values)
        w = w / w.sum(-2, keepdim=True)
    return w[..., 0]


def rkde(q, k, v, psi=huber, a=1.0, rounds=1, joint=True, released=False):
    """h_i = sum_j w_j kappa_ij v_j / sum_j w_j kappa_ij.

    Han et al. 2023 (NeurIPS), `aaronhan223/robust_transformer`. joint: the weights above the line
    are those of keys and values together.
    """
    below = token_weights(k, psi, a, rounds, released)
    above = token_weights(torch.cat([k, v], -1), psi, a, rounds, released) if joint else below
    s = scores(k, k)
    kappa = (s - s.amax(-1, keepdim=True)).exp()
    h = kappa @ (above[..., None] * v) / (kappa @ below[..., None]).clamp_min(1e-12)
    return h, -below


def mom(q, k, v, m=3, seed=None):
    """Median of means: of m blocks of keys, a query uses the one whose kernel sum is the median.

    Han et al. 2023. The split is random; with a seed, as in evaluations, always the same.
    """
    if m > k.shape[-2]:
        raise ValueError(f"mom m={m}: expected at most a block a token, {k.shape[-2]}")
    random = None if seed is None else torch.Generator().manual_seed(seed)
    block = (torch.randperm(k.shape[-2], generator=random) % m).to(k.device)
    member = F.one_hot(block, m).to(k.dtype)                            # (N, m)
    A = scores(k, k).softmax(-1)
    chosen = (A @ member).median(-1).indices                            # (B, H, N)
    A = A * member.T[chosen]                                            # (B, H, N, N)
    return A @ v / A.sum(-1, keepdim=True).clamp_min(1e-12), None


# --- other kernels --------------------------------------------------------------------------------

def elliptical(q, k, v, last=None):
    """Scores q^T M k / sqrt(D), M_d = mean_n |v_d - last_d| over its maximum, without gradient.

    Nielsen et al. 2024 (NeurIPS), `stefvk/Elliptical-Attention`. last: the last layer's values, or
    None in layer 0: softmax attention.
    """
    if last is not None:
        M = (v - last).detach().abs().mean(-2, keepdim=True)            # (B, H, 1, D)
        q = q * M / M.amax(-1, keepdim=True).clamp_min(1e-12)
    return softmax_attention(q, k, v), None


def sinkhorn(q, k, v, rounds=3):
    """Attention that is doubly stochastic: rows, columns, rows normalised. Sander et al. 2022."""
    s = scores(k, k)
    for i in range(rounds):
        s = s.log_softmax(-1 if i % 2 == 0 else -2)
    return s.exp() @ v, None


# --- PAP on the keys alone: K = L + S in one space ------------------------------------------------

def shrink_rows(x, tau):
    """A whole row at a time: r max(1 - tau / |r|, 0); the prox of tau sum_j |r_j|."""
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * (1 - tau / size.clamp_min(1e-12)).clamp_min(0)


def keys(q, k, v, lambd=1.0, n_iter=4, rows=False):
    """L = A(K - S) (K - S), S = shrink(K - L, lambda mean |K|); then h = A(K - S) V.

    Ours: Algorithm 1 does not print what A multiplies; if it is the keys, L and S share K's space.
    rows: S is sparse in tokens (outlier pursuit, Xu et al. 2010).
    """
    size = torch.linalg.vector_norm(k, dim=-1, keepdim=True) if rows else k.abs()
    tau = lambd * size.mean((-2, -1), keepdim=True)
    S = torch.zeros_like(k)
    for _ in range(n_iter):
        C = k - S
        L = symmetric_attention(C, C)
        S = shrink_rows(k - L, tau) if rows else soft_threshold(k - L, tau)
    return symmetric_attention(k - S, v), S.abs().sum(-1)


def weights(q, k, v, rounds=2):
    """Tokens that the others cannot predict count less: r_j = |k_j - sum_(i != j) A_ji k_i|.

    Ours: w = min(1, mean(r) / r), Huber's, and log w is added to the scores.
    """
    s, w = scores(k, k), torch.ones_like(k[..., 0])
    others = 1 - torch.eye(k.shape[-2], device=k.device, dtype=k.dtype)
    for _ in range(rounds):
        A = (s + w.log()[..., None, :]).softmax(-1) * others
        r = torch.linalg.vector_norm(k - A @ k, dim=-1).clamp_min(1e-12)            # (B, H, N)
        w = (r.mean(-1, keepdim=True) / r).clamp_max(1)
    return (s + w.log()[..., None, :]).softmax(-1) @ v, -w


def sharp(q, k, v, n_iter=4):
    """A((n - 2) K) V: what n steps of PAP come to while S is 0, without the sums of L.

    A control of ours, robust in nothing: logits are multiplied by (n - 2)^2.
    """
    return symmetric_attention((n_iter - 2) * k, v), None


DENSITY = dict(a=1.0, rounds=1, joint=1, released=0)
ATTENTIONS = {              # name: (function, its settings in the runs and where none are given)
    "rkde-huber": (partial(rkde, psi=huber), DENSITY),
    "rkde-hampel": (partial(rkde, psi=hampel), DENSITY | dict(a=0.5)),
    "mom": (mom, dict(m=3)), "elliptical": (elliptical, {}), "sinkhorn": (sinkhorn, dict(rounds=3)),
    "keys": (keys, dict(lambd=0.5, n_iter=4)), "weights": (weights, dict(rounds=2)),
    "keys-rows": (partial(keys, rows=True), dict(lambd=1.0, n_iter=4)),
    "sharp": (sharp, dict(n_iter=4))}
ALL = "-all"                # such a name: in all layers instead of layer 0 (elliptical always is)
NAMES = [*ATTENTIONS, *(name + ALL for name in ATTENTIONS if name != "elliptical")]
ONE = common.number(int, 0, 1)
RANGES = dict(a=common.number(float, 0.34), joint=ONE, released=ONE,     # 3a >= 1: a median counts
              lambd=common.REAL, m=common.COUNT, n_iter=common.COUNT, rounds=common.COUNT)


def settings_of(name, pairs=()):
    """The settings of an attention, with ["lambd=0.5", ...]; ValueError: unknown, out of range."""
    if name not in NAMES:
        raise ValueError(f"attention {name!r}: expected one of {', '.join(ATTENTIONS)}, or one but "
                         f"elliptical with {ALL} behind it")
    usual = ATTENTIONS[name.removesuffix(ALL)][1]
    return usual | read_settings(pairs, {key: (RANGES[key], "") for key in usual}, name)


# --- in a network ---------------------------------------------------------------------------------

class RobustAttention(SelfAttention):
    """A layer of vit.py that attends by one of ATTENTIONS; name: which. Its parameters stay."""

    def attend(self, q, k, v):
        (function, _), settings = ATTENTIONS[self.name], self.settings
        if self.name == "mom" and not self.training:
            settings = settings | dict(seed=0)
        if self.name == "elliptical":
            settings = dict(last=self.before[0].values if self.before else None)
        h, score = function(q, k, v, **settings)
        self.values, self.score = v.detach(), None if score is None else score.detach()
        return h


def with_attention(model, name, settings=None):
    """Let layer 0 of a ViT attend by `name`; elliptical and NAME-all: all its layers."""
    settings = settings_of(name) | (settings or {})
    everywhere = name == "elliptical" or name.endswith(ALL)
    attentions = [block.attn for block in model.blocks]
    if any(attention.causal for attention in attentions):
        raise ValueError(f"attention {name!r} lets a token see the later ones: expected a network "
                         "that is not causal, as vit.py's")
    for i in range(len(attentions) if everywhere else 1):
        attentions[i].__class__ = RobustAttention
        attentions[i].name, attentions[i].settings = name.removesuffix(ALL), settings
        attentions[i].before = attentions[:i][-1:]          # a list: no submodule
    return model


def train(name, words):
    """train_cls.py with the attention `name`; words: settings as lambd=0.5, then its flags.

    What rebuilds the network is in its checkpoints: args["attention"] and args["settings"].
    """
    pairs = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
    settings, flags = settings_of(name, pairs), words[len(pairs):]
    folder = [] if altered.resumed(flags) else ["--out_dir", f"out/{name}"]
    base = "softmax" if name == "elliptical" else "symmetric"
    altered.train([*folder, *flags, "--attn", base], lambda m: with_attention(m, name, settings),
                  study="studies.robust_attentions", attention=name, settings=settings)


def rebuild(checkpoint):
    """The classifier of a checkpoint, of this study or of train_cls.py."""
    name, settings = (checkpoint["args"].get(key) for key in ("attention", "settings"))
    if not name:
        return classifier_from_checkpoint(checkpoint)
    return with_attention(classifier_from_checkpoint(altered.plain(checkpoint)), name, settings)


def main():
    command, *words = sys.argv[1:] or ["--help"]
    if command == "train" and words:
        train(words[0], words[1:])
    elif command == "evaluate":
        sys.argv = ["eval_robust.py", *words]
        with patch.dict(sources.REBUILD, {sources.CLS: rebuild}):
            eval_robust.main()
    elif command in ("-h", "--help"):
        print(__doc__)
    else:
        raise ValueError(f"{' '.join([command, *words])}: expected train NAME or evaluate; --help "
                         "says more")


if __name__ == "__main__":
    common.run(main)
