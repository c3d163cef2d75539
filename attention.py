"""Every attention of the paper: softmax, symmetric, RPC (robust PCA inside the layer), scaled.

Paper: Teo & Nguyen, "Unveiling the Hidden Structure of Self-Attention via Kernel Principal
Component Analysis", NeurIPS 2024. Released code: `rachtsy/KPCA_code`. This file imports PyTorch and
the standard library only, so you can copy it into another project.

Read it from top to bottom: functions of q, k and v; the table `ATTENTIONS` with their names; the
module `SelfAttention`; tools that trace or change RPC-Attention inside a model.

B batch, H heads, N tokens (class token included), D head width, C = H * D model width.

    paper               name here        shape              meaning
    Q, K, V (Eq. 1)     q, k, v          (B, H, N, D)       queries, keys, values
    A       (Eq. 2)     A                (B, H, N, N)       softmax(q k^T / sqrt(D))
    h       (Eq. 3)     h                (B, H, N, D)       A v
    K, L, S (Eq. 14)    k, L, S          (B, H, N, D)       keys = low-rank part + sparse part
    Y       (Alg. 1)    Z = Y/mu         (B, H, N, D)       scaled dual; Y itself is never needed
    mu      (Def. 1)    mu               (B, H, 1 or N, 1)  penalty weight, ~ 1 / mean|k|
    lambda  (Alg. 1)    lambd            float              weight of the sparse part
    S_{.}   (Alg. 1)    soft_threshold                      sign(x) max(|x| - tau, 0)
    S       (Eq. 12)    s                (H, N, N) or (1,)  scaling, v - S v; not the S above

The paper's text and its released code compute different things. Each choice is an argument here:

    question               paper's text            released code       here
    threshold of S         lambda / mu             lambda * mu         threshold="over" | "times"
    mu = N x / (4 sum|K|)  x = D, head width       x = C, model width  mu_dim="head" | "model"
    sign of Y/mu, line 4   - (ADMM needs +)        -                   dual_sign=-1 | +1
    value operand          not printed             V, fixed            V, or k: rpc_attention(k, k)
    when to stop           n steps (Def. 1)        n steps             n_iter; no convergence
    dropout                not mentioned           last step only      last step only
    queries                none (App. E.9: asym.)  none                q=None; given: asymmetric
    causal mu              not mentioned           no causal code      mean|k| of tokens <= t

The defaults follow the released code. `FORMS` names the three variants of the first three rows.
No lambda makes lambda * mu and lambda / mu the same rule: doubling all keys halves lambda * mu, but
doubles lambda / mu.
"""

import math
from contextlib import contextmanager
from functools import wraps

import torch
import torch.nn.functional as F
from torch import nn

FORMS = {
    "released": dict(threshold="times", mu_dim="model", dual_sign=-1),  # the authors' code
    "paper": dict(threshold="over", mu_dim="head", dual_sign=-1),       # Algorithm 1 as printed
    "admm": dict(threshold="over", mu_dim="head", dual_sign=+1),        # what ADMM prescribes
}
PAP_SETTINGS = dict(n_iter=4, lambd=4.0, form="released")   # defaults of `pap` in every config


def check_choice(name, value, known):
    """Raise ValueError unless `value` is one of `known`."""
    if value not in known:
        raise ValueError(f"{name}={value!r}, expected one of {', '.join(map(str, known))}")


# --- softmax and symmetric attention: a token attends to tokens whose keys match its query --------

def naive_attention(q, k, v):
    """Softmax attention as printed. For reading only: it stores A. All shapes (B, H, N, D)."""
    A = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1)   # Eq. 2
    return torch.einsum("bhij,bhjd->bhid", A, v)               # Eq. 3: h_i = sum_j a_ij v_j


def softmax_attention(q, k, v, *, causal=False, dropout_p=0.0, keep=None):
    """Softmax attention by PyTorch's fused kernel, which does not store A. All (B, H, N, D).

    causal: token t attends to tokens 0 to t only. dropout_p: dropout rate on A. keep: (B, N) bool,
    False for padding tokens, to which no token attends. q and k, which are float32 in PAP, are cast
    to v's dtype.
    """
    keys = k.to(v.dtype)
    q = keys if q is k else q.to(v.dtype)                      # cast a shared tensor once
    mask = None if keep is None else keep[:, None, None]       # (B, 1, 1, N)
    if causal and keep is not None:
        mask = mask.expand(-1, -1, q.shape[-2], -1).tril()     # (B, 1, N, N)
    return F.scaled_dot_product_attention(q, keys, v, attn_mask=mask, dropout_p=dropout_p,
                                          is_causal=causal and keep is None)


def symmetric_attention(k, v, *, causal=False, dropout_p=0.0):
    """Softmax attention with the keys as queries: the paper's baseline. All (B, H, N, D)."""
    return softmax_attention(k, k, v, causal=causal, dropout_p=dropout_p)


# --- RPC-Attention: Principal Attention Pursuit (PAP) splits the keys, K = L + S ------------------

def soft_threshold(x, tau):
    """Move each entry of x towards 0 by tau; entries with |x| <= tau become 0.

    x: any shape. tau >= 0: a number, or a tensor that broadcasts to x.
    """
    return x.sign() * F.relu(x.abs() - tau)                    # sign(x) max(|x| - tau, 0)


def penalty(k, *, mu_dim="model", mu_over="all", keep=None):
    """Return mu = N x / (4 sum|K|) = x / (4 D mean|K|), (B, H, 1, 1) or per token (B, H, N, 1).

    k: (B, H, N, D). mu_dim: x = C ("model") or x = D ("head"). mu_over: the tokens in the mean:
    "all"; for token t the "seen" tokens 0 to t, which is safe in causal attention; or "token", t
    alone. keep: (B, N) bool, False for padding tokens, which the mean leaves out.
    """
    check_choice("mu_dim", mu_dim, ("model", "head"))
    check_choice("mu_over", mu_over, ("all", "seen", "token"))
    B, H, N, D = k.shape
    mean = torch.linalg.vector_norm(k, 1, dim=-1, keepdim=True) / D     # per token: (B, H, N, 1)
    real = torch.ones_like(k[:, :1, :, :1])                             # (B, 1, N, 1)
    if keep is not None:
        real = real * keep[:, None, :, None]
        mean = mean * real
    seen = real.cumsum(-2).clamp_min(1)                                 # real tokens up to each one
    if mu_over == "all":
        mean = mean.sum(-2, keepdim=True) / seen[:, :, -1:]             # (B, H, 1, 1)
    elif mu_over == "seen":
        mean = mean.cumsum(-2) / seen
    heads = H if mu_dim == "model" else 1                               # x / D
    return heads / (4 * mean.clamp_min(1e-12))                          # Def. 1; finite for k = 0


def rpc_attention(k, v, n_iter=4, lambd=4.0, *, q=None, threshold="times", mu_dim="model",
                  dual_sign=-1, mu_over=None, causal=False, dropout_p=0.0, shrink=soft_threshold,
                  trace=None, keep=None):
    """Run n_iter steps of Principal Attention Pursuit (PAP) on the keys; return the last L.

    k, v, result: (B, H, N, D). v has k's width, because L, a mix of values, is subtracted from k.
    n_iter: steps, at least 1. More steps are not more accurate: PAP does not converge.
    lambd: at least 0, or a tensor (H, 1, 1), which may be learned. With math.inf, S stays 0.
    q: fixed queries (B, H, N, D) for asymmetric RPC. By default the keys are the queries.
    threshold, mu_dim, dual_sign: the table at the top of this file. mu_over: see `penalty`; the
    default is "seen" if causal, else "all". A causal layer with "all" reads the future.
    dropout_p: dropout rate on A in the last step.
    shrink(x, tau): replaces `soft_threshold`, for example to give it another gradient.
    trace: a list that receives dict(S, K2, Q2, L) for each step.
    keep: (B, N) bool, False for padding tokens, which change no other token.
    ValueError for an argument outside these ranges.

    n_iter = 1 is symmetric attention with each key entry clamped to [-tau, tau]. While S = 0 and
    dual_sign = -1, the keys of step i are (L_1 + ... + L_{i-1}) - (i - 2) K. The sum of the L's
    matters, too: a vector c that is added to every key adds c.k_j to the score of token j. The
    state is float32 or float64, because four steps on bf16 inputs err by 0.4 % with a float32 state
    and by 1.1 % with a bf16 state.
    """
    check_choice("threshold", threshold, ("times", "over"))
    check_choice("dual_sign", dual_sign, (-1, 1))
    mu_over = mu_over or ("seen" if causal else "all")
    if n_iter < 1:
        raise ValueError(f"n_iter={n_iter}, expected at least 1 step")
    if not torch.is_tensor(lambd) and not lambd >= 0:
        raise ValueError(f"lambd={lambd}, expected a number of at least 0")
    for name, x in (("v", v), ("q", k if q is None else q)):
        if x.shape != k.shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, expected the shape of k, "
                             f"{tuple(k.shape)}: PAP subtracts attention outputs from keys")

    # The threshold tau follows from the mean size of a key entry.
    K = k if k.dtype == torch.float64 else k.float()
    mu = penalty(K, mu_dim=mu_dim, mu_over=mu_over, keep=keep)
    if not torch.is_tensor(lambd) and lambd == math.inf:
        mu = mu.detach()                        # inf * 0 would make mu's gradient NaN
    tau = lambd * mu if threshold == "times" else lambd / mu

    # Each step splits the keys. S takes the part of each entry above tau, and L is the attention
    # output for the rest. Z sums the errors K - L - S and enters the next step. The last Z is
    # unused; computing it costs no measurable time and keeps the lines as printed.
    L = Z = 0.0                                 # Alg. 1, line 1: S = Y = 0, and L = 0
    for _ in range(n_iter):                     # Alg. 1, line 2: Def. 1 says n steps
        S = shrink(K - L + Z, tau)              # Alg. 1, line 3: S = S_tau(K - L + Y/mu)
        rest = K - S                            # Eq. 14: L + S = K, so L has to become this
        K2 = rest + dual_sign * Z               # K - S - Y/mu, the keys of line 4
        Q2 = K2 if q is None else q             # App. E.9: softmax(Q, K2)
        L = softmax_attention(Q2, K2, v, causal=causal, keep=keep).to(K.dtype)  # Alg. 1, line 4
        Z = rest + Z - L                        # Alg. 1, line 5: Y = Y + mu (K - L - S)
        if trace is not None:
            trace.append(dict(S=S, K2=K2, Q2=Q2, L=L))
    if dropout_p:                               # repeat the last step with dropout
        L = softmax_attention(Q2, K2, v, causal=causal, dropout_p=dropout_p, keep=keep)
    return L.to(v.dtype)                        # Alg. 1, line 7: output L


# --- Scaled Attention (Remark 3): attentions with parameters --------------------------------------

class ScaledAttention(nn.Module):
    """softmax(q k^T / sqrt(D)) (I - S) v with a learned S, (H, N, N), which starts at zero."""

    def __init__(self, layer):
        super().__init__()
        if layer.num_tokens is None or layer.causal:
            raise ValueError("scaled_s learns one matrix over all tokens: expected num_tokens=N "
                             "and causal=False")
        self.s = nn.Parameter(torch.zeros(layer.num_heads, layer.num_tokens, layer.num_tokens))

    def forward(self, q, k, v, layer):
        u = v - torch.einsum("hnm,bhmd->bhnd", self.s, v)               # Eq. 12: (I - S) v
        return softmax_attention(q, k, u, **layer.attn_kwargs)


class ScaledAlphaAttention(nn.Module):
    """Scaled Attention with S = alpha softmax(k k^T / sqrt(D)). alpha: learned, starts at 0."""

    def __init__(self, layer):
        super().__init__()
        self.s = nn.Parameter(torch.zeros(1))

    def forward(self, q, k, v, layer):
        u = v - self.s * symmetric_attention(k, v, causal=layer.causal)     # App. E.1
        return softmax_attention(q, k, u, **layer.attn_kwargs)


# --- the table: write a function or a module, enter it here, train it with --attn NAME ------------

# name: (own_queries, function). function(q, k, v, layer) returns h; q, k, v and h are (B, H, N, D).
# own_queries: True if the layer projects queries, False if the keys are the queries (then q is k).
# layer is the SelfAttention around the function. layer.attn_kwargs holds causal and dropout_p; an
# attention that ignores them ignores the causal mask and attn_drop. An attention with parameters is
# an nn.Module class: it is built as Class(layer), and its forward takes (q, k, v, layer).
ATTENTIONS = {
    "softmax": (True, lambda q, k, v, layer: softmax_attention(q, k, v, **layer.attn_kwargs)),
    "symmetric": (False, lambda q, k, v, layer: symmetric_attention(k, v, **layer.attn_kwargs)),
    "rpc": (False, lambda q, k, v, layer: rpc_attention(k, v, **layer.pap, **layer.attn_kwargs)),
    "rpc_asym": (True, lambda q, k, v, layer: rpc_attention(k, v, q=q, **layer.pap,
                                                            **layer.attn_kwargs)),
    "scaled_s": (True, ScaledAttention),
    "scaled_alpha": (True, ScaledAlphaAttention),
}
# More values of --attn: (attention in rpc_layers, attention in all other layers).
LAYER_PATTERNS = {"rpc": ("rpc", "symmetric"), "rpc_asym": ("rpc_asym", "softmax"),
                  "sym_asym": ("rpc", "softmax")}


# --- the module: project, attend, project back ----------------------------------------------------

class SelfAttention(nn.Module):
    """Multi-head self-attention, (B, N, C) in and out. Parameters are named as in timm.

    dim: C. num_heads: H, divides C. attn: a name in `ATTENTIONS`. pap: settings of `rpc_attention`:
    n_iter, lambd, form (a name in `FORMS`) or single choices of a form, mu_over. num_tokens: N, for
    attentions with parameters per token. causal: token t attends to tokens 0 to t only. attn_drop,
    proj_drop: dropout rates on A and on the output. qkv has the rows q, k, v (3C, C), or k, v
    (2C, C) if the keys are the queries. ValueError for unknown names and sizes that do not fit.
    """

    def __init__(self, dim, num_heads, attn="softmax", *, pap=None, num_tokens=None, causal=False,
                 qkv_bias=True, proj_bias=True, attn_drop=0.0, proj_drop=0.0):
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"dim={dim}, expected a multiple of num_heads={num_heads}")
        check_choice("attn", attn, ATTENTIONS)
        self.dim, self.num_heads, self.num_tokens = dim, num_heads, num_tokens
        self.attn, self.causal, self.attn_drop = attn, causal, attn_drop

        settings = {**PAP_SETTINGS, **(pap or {})}
        for name in settings:
            check_choice("setting in pap", name, (*PAP_SETTINGS, *FORMS["released"], "mu_over"))
        check_choice("form", settings["form"], FORMS)
        self.pap = {**FORMS[settings.pop("form")], **settings}          # keywords of rpc_attention

        if not isinstance(ATTENTIONS[attn], tuple):
            raise ValueError(f"ATTENTIONS[{attn!r}] is {ATTENTIONS[attn]}, expected a pair "
                             f"(own_queries, function)")
        own_queries, function = ATTENTIONS[attn]
        self.learned = function(self) if isinstance(function, type) else None
        self.num_proj = 3 if own_queries else 2                         # q, k, v or k, v
        self.make_projections(dim, qkv_bias)
        self.proj = nn.Linear(dim, dim, bias=proj_bias)
        self.proj_drop = nn.Dropout(proj_drop)

    def make_projections(self, dim, bias):
        """Make the layers that `project` uses. FAN overrides both."""
        self.qkv = nn.Linear(dim, self.num_proj * dim, bias=bias)

    @property
    def attn_kwargs(self):
        """Return dict(causal, dropout_p), the keywords of every attention function above."""
        return dict(causal=self.causal, dropout_p=self.attn_drop if self.training else 0.0)

    def project(self, x):
        """Return q, k, v, each (B, H, N, D), of x (B, N, C). q is k if the keys are the queries."""
        qkv = self.qkv(x)                                               # Eq. 1
        qkv = qkv.unflatten(2, (self.num_proj, self.num_heads, -1))     # (B, N, 2 or 3, H, D)
        qkv = qkv.permute(2, 0, 3, 1, 4)                                # (2 or 3, B, H, N, D)
        return qkv[0], qkv[-2], qkv[-1]

    def attend(self, q, k, v):
        """Call this layer's attention: q, k, v and the result are (B, H, N, D)."""
        function = ATTENTIONS[self.attn][1] if self.learned is None else self.learned
        return function(q, k, v, self)

    def forward(self, x):
        q, k, v = self.project(x)
        h = self.attend(q, k, v)
        if h.shape != v.shape:                  # a shape like (B, H, 1, D) would broadcast silently
            raise ValueError(f"attn={self.attn!r} returned {tuple(h.shape)}, expected (B, H, N, D) "
                             f"= {tuple(v.shape)}")
        return self.proj_drop(self.proj(h.transpose(1, 2).flatten(2)))  # (B, N, C)

    def trace(self, x):
        """Return the PAP steps of this layer on x (B, N, C): a list of dict(S, K2, Q2, L).

        Returns [] if the attention runs no PAP.
        """
        steps = []
        with every_pap(trace=steps):
            self.attend(*self.project(x))
        return steps


# --- tools: trace or change PAP inside a model ----------------------------------------------------

overrides = {}                          # arguments of rpc_attention that every_pap has set


@contextmanager
def every_pap(**settings):
    """Override arguments of every rpc_attention call inside the block, to trace or to change PAP.

        steps = []
        with every_pap(trace=steps):                # collects the steps of all layers, in order
            model(images)
        with every_pap(shrink=mine, n_iter=2):      # runs the same weights with another PAP
            logits = model(images)

    This also reaches rpc_attention calls inside your own attention. The backward pass of a
    checkpointed layer calls rpc_attention again, so run it inside the block, too.
    """
    before = dict(overrides)
    overrides.update(settings)
    try:
        yield
    finally:
        overrides.clear()
        overrides.update(before)


def overridable(function):
    """Let every_pap override the arguments of a function whose first ones are rpc_attention's."""
    @wraps(function)
    def call(*args, **settings):
        if overrides:
            settings.update(zip(("k", "v", "n_iter", "lambd"), args))
            args = ()
        return function(*args, **{**settings, **overrides})
    return call


rpc_attention = overridable(rpc_attention)


@torch.no_grad()
def key_statistics(model, forward, inputs):
    """Measure key sizes and how often S is not zero, while forward(inputs) runs the model.

    Returns dict(mean_abs_key=[mean |k| per SelfAttention layer],
    nonzero_S={layer: [share of nonzero entries of S per PAP step]}). Layers are counted from 0.
    """
    stats = dict(mean_abs_key=[], nonzero_S={})

    def measure(layer, inputs):
        """Add the numbers of one SelfAttention, before its forward runs."""
        shares = [(step["S"] != 0).float().mean().item() for step in layer.trace(inputs[0])]
        if shares:
            stats["nonzero_S"][len(stats["mean_abs_key"])] = [round(share, 4) for share in shares]
        _, k, _ = layer.project(inputs[0])
        stats["mean_abs_key"].append(round(k.abs().mean().item(), 4))

    layers = [m for m in model.modules() if isinstance(m, SelfAttention)]
    hooks = [m.register_forward_pre_hook(measure) for m in layers]
    training = model.training
    model.eval()
    forward(inputs)
    model.train(training)
    for hook in hooks:
        hook.remove()
    return stats
