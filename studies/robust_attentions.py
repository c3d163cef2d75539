"""Compare published robust attentions on corrupted and attacked images, in one framework.

    python -m studies.robust_attentions train_cls.py --attn keys-rows --out_dir out/rows_s0
    python -m studies.robust_attentions train_cls.py --attn "keys lambd=0.25" --seed 1
    python -m studies.robust_attentions eval_robust.py --ckpt out/rows_s0
    python -m studies.robust_attentions "keys lambd=0.25" eval_robust.py --ckpt FOLDER

Four groups have published attentions that should be robust to corrupted tokens, each with different
code and experiments. Here each attention is a function of at most 15 lines. `register` adds it to
ATTENTIONS of attention.py under its name and settings ("keys lambd=0.5 n_iter=4"), and this command
runs our scripts with these attentions. A robust attention runs in --rpc_layers (layer 0 by
default); all other layers have symmetric attention. Elliptical attention runs in all layers,
because it compares each layer with the layer before. `python -m studies.arms robustness` compares
all of them with symmetric attention over several seeds.

Every function takes k, v (B, H, N, D) and settings, and returns the output (B, H, N, D). The keys
are also the queries, as in the paper's baseline; only elliptical and pro have separate queries.
A(K) = softmax(K K^T / sqrt(D)). The rule for each outcome was fixed before the runs:
studies/results/robust_attentions/README.md. "pro" replaces softmax attention in trained networks,
so it runs in all layers and has a separate study, studies/pro_attention.py.
"""

import math
import runpy
import sys
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import common
from attention import (ATTENTIONS, LAYER_PATTERNS, Attention, soft_threshold,
                       softmax_attention, symmetric_attention)
from common import InputError


def scores(q, k):
    """Return q k^T / sqrt(D), (B, H, N, N)."""
    return q @ k.mT / math.sqrt(k.shape[-1])


# --- weights of tokens: robust kernel density -----------------------------------------------------

def huber(d, a):
    """Return Huber's weight psi(d) / d of a distance d: 1 up to a, then a / d."""
    return a / d.clamp_min(a)


def hampel(d, a):
    """Return Hampel's weight psi(d) / d: 1 up to a, a / d up to 2a, then falling to 0 at 3a."""
    return (a / d.clamp_min(a)).minimum((3 * a / d - 1).clamp_min(0))


def token_weights(x, psi, a, rounds, released=False):
    """Return the weights of a robust kernel density of the points x (B, H, N, D): (B, H, N), sum 1.

    Iteratively reweighted least squares: d_j^2 = 1 - 2 (kappa w)_j + w^T kappa w is the squared
    distance of point j from the weighted mean in feature space. Then w_j is proportional to
    psi(d_j) / d_j. psi: `huber` or `hampel`. a: in units of the median of d (Kim & Scott 2012).
    released: True has + (kappa w)_j instead of - 2 (kappa w)_j, as in the released code.
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


def rkde(k, v, psi=huber, a=1.0, rounds=1, joint=True, released=False):
    """Robust kernel density attention: h_i = sum_j w_j kappa_ij v_j / sum_j w_j kappa_ij.

    Han et al. 2023 (NeurIPS), `aaronhan223/robust_transformer`. joint: True computes the weights in
    the numerator from keys and values together, so rows of attention need not sum to 1.

    Differences from the released code: in the released code, d_j^2 = 1 + ... is at least 1, but
    Hampel's last corner is 3a = 0.6. So Hampel's weights are uniform there, and Huber's are nearly
    uniform. Here d is a distance and a is in medians of d. The kernel of the weights has half the
    exponent, and scores come from raw keys. Hampel's weight can be 0; in the released code, it is
    at least 0.01.
    """
    below = token_weights(k, psi, a, rounds, released)
    above = token_weights(torch.cat([k, v], -1), psi, a, rounds, released) if joint else below
    s = scores(k, k)
    kappa = (s - s.amax(-1, keepdim=True)).exp()
    return kappa @ (above[..., None] * v) / (kappa @ below[..., None]).clamp_min(1e-12)


def mom(k, v, m=3, layer=None):
    """Median of means: keys form m blocks, and a query uses the block with the median kernel sum.

    Han et al. 2023. The blocks are random; in eval mode they are always the same, so that results
    are repeatable. Here the blocks do not overlap, and each query has its own median. The released
    code draws overlapping subsets of nearly all keys and takes one median for the whole batch.
    """
    random = torch.Generator().manual_seed(0) if layer and not layer.training else None
    block = (torch.randperm(k.shape[-2], generator=random) % m).to(k.device)
    member = F.one_hot(block, m).to(k.dtype)                            # (N, m)
    A = scores(k, k).softmax(-1)
    chosen = (A @ member).median(-1).indices                            # (B, H, N)
    A = A * member.T[chosen]                                            # (B, H, N, N)
    return A @ v / A.sum(-1, keepdim=True).clamp_min(1e-12)


# --- ProAttention: weights of tokens for each query ----------------------------------------------

def pro_attention(q, k, v, penalty="huber", steps=3, gamma=4.0, delta=4.0, step=1.0, eps=0.01,
                  hide_gradient=False):
    """Compute a robust weighted mean of the values for each query, by reweighted least squares.

    Hou et al. 2024 (NeurIPS), `chris-hzc/ProTransformer`. Softmax attention gives the first mean
    M. Each of `steps` Newton steps lowers the weight of values that are far from M. The method
    needs no training, so it can replace softmax attention in a trained network.

    q, k, v, result: (B, H, N, D). penalty: "l1", "mcp" (with gamma) or "huber" (with delta). step:
    the step size, from 0 (keep the old mean) to 1 (take the new mean). hide_gradient: True stops
    the gradient at the distances, as in the released code, so an attack along the gradient ignores
    how the weights change.
    """
    A = scores(q, k).softmax(-1)
    M = A @ v                                                           # (B, H, N, D)
    for _ in range(steps):
        ends = (M.detach(), v.detach()) if hide_gradient else (M, v)
        d = torch.cdist(*ends, compute_mode="donot_use_mm_for_euclid_dist")     # |M_i - v_j|
        w = PENALTIES[penalty](d + eps, gamma, delta, eps) * A          # (B, H, N, N)
        M = (1 - step) * M + step * (w / w.sum(-1, keepdim=True)) @ v
    return M


PENALTIES = {                                           # weights w(d), where d is at least eps
    "l1": lambda d, gamma, delta, eps: 1 / d,
    "mcp": lambda d, gamma, delta, eps: (1 / d - 1 / gamma).clamp_min(eps),
    "huber": lambda d, gamma, delta, eps: (delta / d).clamp_max(1)}


# --- other kernels --------------------------------------------------------------------------------

def elliptical(q, k, v, last=None):
    """Attend with scores q^T M k / sqrt(D), where M is diagonal.

    M_d = mean_n |v_d - last_d|, divided by its maximum; no gradient flows through M. last: the
    values of the layer before; None in layer 0 gives softmax attention. Nielsen et al. 2024
    (NeurIPS), `stefvk/Elliptical-Attention`.
    """
    if last is not None:
        M = (v - last).detach().abs().mean(-2, keepdim=True)            # (B, H, 1, D)
        q = q * M / M.amax(-1, keepdim=True).clamp_min(1e-12)
    return softmax_attention(q, k, v)


class Elliptical(nn.Module):
    """Elliptical attention of a layer; it keeps its values for the next layer.

    Layers are built in order, so each layer can store a reference to the layer before.
    """
    latest = None                                           # the layer that was built last

    def __init__(self, layer):
        super().__init__()
        self.before = (Elliptical.latest,)                  # a tuple: not a submodule
        self.values, Elliptical.latest = None, self

    def forward(self, q, k, v, layer):
        before, = self.before
        self.values = v.detach()
        return elliptical(q, k, v, before and before.values)


class EllipticalFirst(Elliptical):
    """Elliptical attention of layer 0, which is softmax attention."""

    def __init__(self, layer):
        super().__init__(layer)
        self.before = (None,)


def sinkhorn(k, v, rounds=3):
    """Attend with doubly stochastic weights: normalise rows, columns, then rows again.

    Sander et al. 2022. The output in their paper is N times this output. They did not publish it
    as a robust attention.
    """
    s = scores(k, k)
    for i in range(rounds):
        s = s.log_softmax(-1 if i % 2 == 0 else -2)
    return s.exp() @ v


# --- PAP on the keys alone: K = L + S in one space ------------------------------------------------

def shrink_rows(x, tau):
    """Shrink each row r to r max(1 - tau / |r|, 0), the proximal operator of tau sum_j |r_j|."""
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * (1 - tau / size.clamp_min(1e-12)).clamp_min(0)


def keys(k, v, lambd=1.0, n_iter=4, rows=False):
    """Proximal steps on keys: L = A(K - S) (K - S), S = shrink(K - L, lambda mean |K|).

    The output is A(K - S) V. This attention is ours. The paper's Algorithm 1 does not print the
    operand that A multiplies; if A multiplies the keys, L and S are in the same space as K. The
    steps alternate without a dual variable, so this is not ADMM, and L + S does not become K: the
    largest |K - L - S| is the threshold. rows: True makes whole tokens of S zero or nonzero
    (outlier pursuit, Xu et al. 2010). Often all rows of S are zero; then this is symmetric
    attention.
    """
    size = torch.linalg.vector_norm(k, dim=-1, keepdim=True) if rows else k.abs()
    tau = lambd * size.mean((-2, -1), keepdim=True)
    S = torch.zeros_like(k)
    for _ in range(n_iter):
        C = k - S
        L = symmetric_attention(C, C)
        S = shrink_rows(k - L, tau) if rows else soft_threshold(k - L, tau)
    return symmetric_attention(k - S, v)


def weights(k, v, rounds=2):
    """Lower the weight of tokens that other tokens predict badly: r_j = |k_j - sum_i A_ji k_i|.

    The sum leaves out i = j. This attention is ours. The weight is Huber's, w = min(1, mean(r) /
    r), and log w is added to the scores.
    """
    s, w = scores(k, k), torch.ones_like(k[..., 0])
    others = 1 - torch.eye(k.shape[-2], device=k.device, dtype=k.dtype)
    for _ in range(rounds):
        A = (s + w.log()[..., None, :]).softmax(-1) * others
        r = torch.linalg.vector_norm(k - A @ k, dim=-1).clamp_min(1e-12)            # (B, H, N)
        w = (r.mean(-1, keepdim=True) / r).clamp_max(1)
    return (s + w.log()[..., None, :]).softmax(-1) @ v


def sharp(k, v, n_iter=4):
    """Compute A((n - 2) K) V, a control that is sharper than symmetric attention but not robust.

    While S is 0, the keys of PAP's step n are (2 - n) K plus the sum of earlier L's. This control
    keeps the first part only, so logits are multiplied by (n - 2)^2. Because the L's are left out,
    a fifth of the attention weight differs from PAP (64 scenes, weights/shapes_rpc.pt).
    """
    return symmetric_attention((n_iter - 2) * k, v)


DENSITY = dict(a=1.0, rounds=1, joint=1, released=0)
ROBUST = {              # name: (function, its default settings, which the runs have)
    "rkde-huber": (partial(rkde, psi=huber), DENSITY),
    "rkde-hampel": (partial(rkde, psi=hampel), DENSITY | dict(a=0.5)),
    "mom": (mom, dict(m=3)), "sinkhorn": (sinkhorn, dict(rounds=3)),
    "keys": (keys, dict(lambd=0.5, n_iter=4)), "weights": (weights, dict(rounds=2)),
    "keys-rows": (partial(keys, rows=True), dict(lambd=1.0, n_iter=4)),
    "sharp": (sharp, dict(n_iter=4))}
PRO = dict(penalty="huber", steps=3, gamma=4.0, delta=4.0, hide_gradient=0)
NAMES = [*ROBUST, "elliptical", "pro"]


# --- registration in attention.py -----------------------------------------------------------------

def register(name, *pairs):
    """Add an attention to ATTENTIONS and return its name there.

    name, pairs: for example "keys", "lambd=0.5".
    """
    settings = dict(PRO if name == "pro" else ROBUST[name][1] if name in ROBUST else {})
    for key, _, text in (pair.partition("=") for pair in pairs):
        if key not in settings:
            raise InputError(f"{name} {key}: expected a setting of {', '.join(settings) or 'none'}")
        settings[key] = type(settings[key])(text)
    texts = {key: value if key == "penalty" else f"{value:g}" for key, value in settings.items()}
    kind = " ".join([name, *(f"{key}={text}" for key, text in texts.items())])
    if name == "elliptical":
        ATTENTIONS["elliptical first"] = Attention(True, EllipticalFirst)
        ATTENTIONS["elliptical"] = Attention(True, Elliptical)
        LAYER_PATTERNS[kind] = "elliptical first", "elliptical"
        return kind
    if name == "pro":                                   # runs in all layers: no LAYER_PATTERNS
        if settings["penalty"] not in PENALTIES:
            raise InputError(f"pro penalty={settings['penalty']}: expected one of "
                             f"{', '.join(PENALTIES)}")

        def attend_pro(q, k, v, layer):
            if layer.causal:
                raise ValueError(f"{kind} has no causal mask")
            return pro_attention(q, k, v, **settings)
        ATTENTIONS[kind] = Attention(True, attend_pro)
        return kind
    function = partial(ROBUST[name][0], **settings)

    def attend(q, k, v, layer):
        if layer.causal:
            raise ValueError(f"{kind} has no causal mask")
        return function(k, v, **dict(layer=layer) if name == "mom" else {})
    ATTENTIONS[kind] = Attention(False, attend)
    LAYER_PATTERNS[kind] = kind, "symmetric"
    return kind


# {name: its name in ATTENTIONS with default settings}, without "pro", which is never trained.
USUAL = {name: register(name) for name in NAMES if name != "pro"}


def main(argv=None):
    """Run a script of this repository; words that name an attention are registered first."""
    argv = sys.argv[1:] if argv is None else argv
    argv = [register(*word.split()) if word.split(" ")[0] in NAMES else word for word in argv]
    script = next((i for i, word in enumerate(argv) if word.endswith(".py")), None)
    if script is None:
        return print(__doc__)
    sys.argv = argv[script:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    common.run(main)
