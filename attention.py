"""All attentions of the paper: softmax, symmetric, RPC (Robust Principal Components) and scaled.

Paper: Teo & Nguyen, "Unveiling the Hidden Structure of Self-Attention via Kernel Principal
Component Analysis", NeurIPS 2024. Released code: `rachtsy/KPCA_code`. This file imports PyTorch and
the standard library only, so you can copy it into another project.

B batch, H heads, N tokens (class token included), D head width, C = H * D model width.

    paper               name here        shape              meaning
    Q, K, V (Eq. 1)     q, k, v          (B, H, N, D)       queries, keys, values
    A       (Eq. 2)     A                (B, H, N, N)       softmax(q k^T / sqrt(D))
    h       (Eq. 3)     h                (B, H, N, D)       A v
    K, L, S (Eq. 14)    k, L, S          (B, H, N, D)       keys = low-rank part + sparse part
    Y       (Alg. 1)    Z = Y/mu         (B, H, N, D)       scaled dual variable, used instead of Y
    mu      (Def. 1)    mu               (B, H, 1 or N, 1)  penalty weight, see below
    lambda  (Alg. 1)    lambd            float              weight of the sparse part
    S_{.}   (Alg. 1)    soft_threshold                      sign(x) max(|x| - tau, 0)
    S       (Eq. 12)    s                (H, N, N)          the matrix in (I - S) v of scaled
                                                            attention, another S than in Eq. 14

The paper's text and its released code differ. Here you choose:

    question               paper's text            released code       here
    threshold of S         lambda / mu             lambda * mu         threshold="over" | "times"
    mu = N W / (4 sum|K|)  W = D, head width       W = C, model width  mu_dim="head" | "model"
    sign in Alg. 1 line 4  - Y/mu; ADMM needs +    - Y/mu              dual_sign=-1 | +1
    values in line 4       not stated              V                   v; pass k as v to use keys
    dropout                not mentioned           last step only      last step only
    queries                the keys (E.9: own q)   the keys            keys (q=None), or your own q
    causal mu              not mentioned           no causal code      mean|k| of tokens <= t

The defaults follow the released code. `FORMS` names three combinations of the choices in the first
three rows.
"""

import math
from contextlib import contextmanager
from typing import Callable, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

FORMS = {
    "released": dict(threshold="times", mu_dim="model", dual_sign=-1),  # the authors' code
    "paper": dict(threshold="over", mu_dim="head", dual_sign=-1),       # Algorithm 1 as printed
    "admm": dict(threshold="over", mu_dim="head", dual_sign=+1),        # with the sign of ADMM
}
# The settings of Principal Attention Pursuit (PAP), which are flags of the trainers: default, help,
# and the allowed values: (lowest, highest) of a number, or all texts.
PAP_FLAGS = dict(
    n_iter=(4, "steps of PAP, the algorithm in RPC-Attention; the paper: 4 to 6 with "
            "--rpc_layers 0, and 2 with all", (1, math.inf)),
    lambd=(4.0, "the larger lambda is, the fewer entries of PAP's S are not 0; the "
                "paper: 4 with --rpc_layers 0, and 3 with all; inf keeps S at 0"),
    form=("released", "PAP as in the released code, as printed in the paper, or as "
                      "printed with ADMM's sign", tuple(FORMS)))
PAP_SETTINGS = {name: entry[0] for name, entry in PAP_FLAGS.items()}


def check_choice(name, value, known):
    """Raise ValueError unless `value` is one of `known`."""
    if value not in known:
        choices = ", ".join(map(str, known))
        raise ValueError(f"{name}={value!r}, expected one of {choices}")


# --- softmax and symmetric attention: a token attends to tokens whose keys match its query --------

def naive_attention(q, k, v):
    """Compute softmax attention as the paper prints it, for reading only: it stores A."""
    A = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1)   # Eq. 2
    return torch.einsum("bhij,bhjd->bhid", A, v)               # Eq. 3: h_i = sum_j a_ij v_j


def softmax_attention(q, k, v, *, causal=False, dropout_p=0.0, keep=None):
    """Compute softmax attention by PyTorch's fused kernel, which does not store A.

    q, k, v, result: (B, H, N, D). causal: token t attends to tokens 0 to t only. dropout_p: dropout
    rate on A. keep: (B, N) bool, False for padding tokens, to which no token attends. q and k are
    cast to v's dtype, because PAP computes them in float32.
    """
    keys = k.to(v.dtype)
    q = keys if q is k else q.to(v.dtype)                      # cast a shared tensor once
    mask = None
    if keep is not None:
        B, _, N, _ = k.shape
        if keep.dtype != torch.bool or keep.shape != (B, N):
            raise ValueError(f"keep is {keep.dtype} {tuple(keep.shape)}, "
                             f"expected bool (B, N), False for padding tokens")
        mask = keep[:, None, None]                             # (B, 1, 1, N)
        if causal:                                 # PyTorch accepts a mask or is_causal, not both
            mask = mask.expand(-1, -1, q.shape[-2], -1).tril()     # (B, 1, N, N)
            causal = False
    return F.scaled_dot_product_attention(
        q, keys, v, attn_mask=mask, dropout_p=dropout_p, is_causal=causal)


def symmetric_attention(k, v, *, causal=False, dropout_p=0.0):
    """Compute softmax attention with the keys as queries, the paper's baseline: (B, H, N, D)."""
    return softmax_attention(k, k, v, causal=causal, dropout_p=dropout_p)


# --- RPC-Attention: Principal Attention Pursuit (PAP) splits the keys, K = L + S ------------------

def naive_rpc(k, v):
    """Compute Algorithm 1 as the released code does: (B, H, N, D).

    This function is for reading only. `rpc_attention` without options returns the same numbers.
    """
    B, H, N, D = k.shape
    C = H * D
    mu = N * C / (4 * k.abs().sum((-1, -2), keepdim=True))              # Def. 1, with W = C
    L = S = Y = torch.zeros_like(k)                                     # line 1
    for _ in range(4):                                                  # line 2
        x = k - L + Y / mu
        S = x.sign() * (x.abs() - 4 * mu).clamp(min=0)                  # line 3: S_tau, lambda = 4
        L = symmetric_attention(k - S - Y / mu, v)                      # line 4
        Y = Y + mu * (k - L - S)                                        # line 5
    return L                                                            # line 7


def soft_threshold(x, tau):
    """Move each entry of x towards 0 by tau >= 0; entries with |x| <= tau become 0."""
    # The gradient of sign is 0. Without detach, PyTorch would compute it, which takes a quarter of
    # the time of this line.
    return x.sign().detach() * F.relu(x.abs() - tau)           # S_tau = sign(x) max(|x| - tau, 0)


def check_steps(n_iter, lambd):
    """Raise ValueError unless n_iter >= 1 and lambd >= 0. A tensor lambd is not checked."""
    if n_iter < 1:
        raise ValueError(f"n_iter={n_iter}, expected at least 1")
    if not torch.is_tensor(lambd) and not lambd >= 0:                   # "not >=" rejects NaN, too
        raise ValueError(f"lambd={lambd}, expected at least 0")


def penalty(k, *, mu_dim="model", mu_over="all", keep=None):
    """Return mu = N W / (4 sum|K|) = W / (4 D mean|K|), (B, H, 1, 1) or per token (B, H, N, 1).

    mu_dim: "model" means W = C, "head" means W = D.
    mu_over: the tokens in mean|K|. "all": every token. "seen": tokens 0 to t for token t, so a
    causal layer does not read the future. "token": only token t for token t.
    keep: (B, N) bool, False for padding tokens, which the mean leaves out.
    """
    B, H, N, D = k.shape
    per_token = torch.linalg.vector_norm(k, 1, dim=-1, keepdim=True) / D    # (B, H, N, 1)
    # kept: 1 for every token, (B, 1, N, 1). It is ones_like, but ONNX would export ones_like as a
    # constant of one size. So a comparison that is always true computes it.
    kept = (per_token[:, :1].detach() >= 0).to(per_token)
    if keep is not None:
        kept = kept * keep[:, None, :, None]                            # 0 for padding tokens
        per_token = per_token * kept
    count = kept.cumsum(-2).clamp_min(1)                                # kept tokens in 0..t
    if mu_over == "all":
        mean = per_token.sum(-2, keepdim=True) / count[:, :, -1:]       # (B, H, 1, 1)
    elif mu_over == "seen":
        mean = per_token.cumsum(-2) / count
    elif mu_over == "token":
        mean = per_token
    else:
        raise ValueError(f"mu_over={mu_over!r}, expected all, seen or token")
    W_over_D = {"model": H, "head": 1}[mu_dim]                          # C / D = H, or D / D
    return W_over_D / (4 * mean.clamp_min(1e-12))                       # Def. 1; finite for k = 0


def rpc_attention(k, v, n_iter=4, lambd=4.0, *, q=None,
                  threshold="times", mu_dim="model", dual_sign=-1, mu_over=None,
                  causal=False, dropout_p=0.0, shrink=soft_threshold, trace=None, keep=None):
    """Run n_iter steps of Principal Attention Pursuit (PAP) on the keys; return the last L.

    k, v, result: (B, H, N, D). v must be as wide as k, because L, a weighted mean of values, is
    subtracted from k.
    n_iter: number of steps, at least 1. More steps are not more accurate: the mean of K - L - S
    over the steps tends to 0 for every bounded L, even for random L (docs/equations.md).
    lambd: lambda, at least 0, or a tensor (H, 1, 1), which can be learned. math.inf keeps S at 0.
    q: fixed queries (B, H, N, D) for asymmetric RPC. By default the keys are the queries.
    threshold, mu_dim, dual_sign: see the table at the top of this file.
    mu_over: see `penalty`. The default is "seen" if causal, else "all". A causal layer with "all"
    reads the future.
    causal: token t attends to tokens 0 to t only, in every step.
    dropout_p: dropout rate on A in the last step.
    shrink(x, tau): replaces `soft_threshold`, for example to give it another gradient.
    trace: a list that receives dict(S, K2, Q2, L) for each step. K2, Q2: the keys and queries of
    the attention in line 4 of Algorithm 1. dropout_p acts on the last L of the trace, too.
    keep: (B, N) bool, False for padding tokens. Padding tokens do not change other tokens.

    The steps run in float32, or in float64 if k is float64.
    """
    check_choice("threshold", threshold, ("times", "over"))
    check_choice("dual_sign", dual_sign, (-1, 1))
    check_choice("mu_dim", mu_dim, ("model", "head"))
    check_steps(n_iter, lambd)
    for name, x in (("v", v), ("q", q)):
        if x is not None and x.shape != k.shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, expected the shape "
                             f"of k, {tuple(k.shape)}: PAP subtracts attention outputs "
                             "from keys")

    # The threshold tau follows from the mean absolute value of the keys' entries.
    K = k if k.dtype == torch.float64 else k.float()
    if mu_over is None:
        mu_over = "seen" if causal else "all"
    mu = penalty(K, mu_dim=mu_dim, mu_over=mu_over, keep=keep)
    if not torch.is_tensor(lambd) and lambd == math.inf:
        mu = mu.detach()                        # its gradient would be inf * 0, which is NaN
    tau = lambd * mu if threshold == "times" else lambd / mu

    # Each step splits the keys. S takes the part of K - L + Z above tau, and L is the attention
    # output for the rest. Z sums the errors K - L - S and enters the next step.
    L = Z = 0.0                                 # Alg. 1, line 1: L = Y = 0
    for step in range(1, n_iter + 1):           # Alg. 1, line 2
        S = shrink(K - L + Z, tau)              # Alg. 1, line 3: S = S_tau(K - L + Y/mu)
        rest = K - S                            # Eq. 14: L + S = K, so L should become K - S
        K2 = rest + dual_sign * Z               # K - S - Y/mu (or +), the keys of line 4
        Q2 = K2 if q is None else q             # App. E.9: softmax(Q, K2)
        p = dropout_p if step == n_iter else 0.0
        L = softmax_attention(Q2, K2, v, causal=causal, dropout_p=p, keep=keep)  # Alg. 1, line 4
        L = L.to(K.dtype)
        Z = rest + Z - L                        # Alg. 1, line 5, divided by mu: Z + (K - S) - L
        if trace is not None:
            trace.append(dict(S=S, K2=K2, Q2=Q2, L=L))
    return L.to(v.dtype)                        # Alg. 1, line 7: output L


# --- Scaled Attention (Remark 3): attentions with parameters --------------------------------------

class ScaledAttention(nn.Module):
    """Scaled Attention, softmax(q k^T / sqrt(D)) (I - S) v. S: (H, N, N), learned, starts at 0.

    layer: the SelfAttention that calls this module; see ATTENTIONS.
    """

    def __init__(self, layer):
        super().__init__()
        if layer.causal:
            raise ValueError("attn='scaled_s' has no causal mask: S mixes all N values")
        self.s = nn.Parameter(torch.zeros(layer.num_heads, layer.num_tokens, layer.num_tokens))

    def forward(self, q, k, v, layer):
        u = v - torch.einsum("hnm,bhmd->bhnd", self.s, v)               # Eq. 12: (I - S) v
        return softmax_attention(q, k, u, **layer.attn_kwargs)


class ScaledAlphaAttention(nn.Module):
    """Scaled Attention with S = alpha softmax(k k^T / sqrt(D)). self.s: alpha, starts at 0."""

    def __init__(self, layer):
        super().__init__()
        self.s = nn.Parameter(torch.zeros(1))

    def forward(self, q, k, v, layer):
        u = v - self.s * symmetric_attention(k, v, causal=layer.causal)     # App. E.1
        return softmax_attention(q, k, u, **layer.attn_kwargs)


# --- the table: write a function or a module, enter it here, train it with --attn NAME ------------

class Attention(NamedTuple):
    """An entry of ATTENTIONS.

    own_queries: True if the layer projects queries, False if the keys are the queries (q is k).
    function: function(q, k, v, layer) returns h; q, k, v and h are (B, H, N, D). layer is the
        SelfAttention that calls the function; layer.attn_kwargs contains causal and dropout_p.
        For an attention with parameters, this field is an nn.Module class instead. Each layer
        builds Class(layer), and calls this module with the same arguments.
    settings: defaults of layer.pap. Each of them is a flag of the trainers, also your own:
        PAP_SETTINGS | dict(temperature=2.0) adds --temperature. rpc_attention does not know this
        name: pap = dict(layer.pap); t = pap.pop("temperature"); rpc_attention(k, v, **pap).
    """
    own_queries: bool
    function: Callable
    settings: dict = PAP_SETTINGS


def attend_softmax(q, k, v, layer):
    return softmax_attention(q, k, v, **layer.attn_kwargs)


def attend_rpc(q, k, v, layer):
    # Not "q is k": a layer that rotates its queries and keys makes two tensors of them.
    own_q = q if layer.num_proj == 3 else None
    settings = layer.pap | layer.attn_kwargs
    return rpc_attention(k, v, q=own_q, **settings)


ATTENTIONS = {
    "softmax": Attention(own_queries=True, function=attend_softmax),
    "symmetric": Attention(own_queries=False, function=attend_softmax),      # here q is k
    "rpc": Attention(own_queries=False, function=attend_rpc),
    "rpc_asym": Attention(own_queries=True, function=attend_rpc),
    "scaled_s": Attention(own_queries=True, function=ScaledAttention),
    "scaled_alpha": Attention(own_queries=True, function=ScaledAlphaAttention),
}
# Names that pap may contain besides the settings: more keywords of rpc_attention.
PAP_NAMES = ("threshold", "mu_dim", "dual_sign", "mu_over", "shrink")
# A value of --attn, and `attn` of a config, is a pattern in this table, (attention in rpc_layers,
# in all other layers), or a name in ATTENTIONS, which then holds for all layers. If both tables
# have it, it is a pattern. SelfAttention is one layer, so its `attn` is a name in ATTENTIONS.
LAYER_PATTERNS = {
    "rpc": ("rpc", "symmetric"),
    "rpc_asym": ("rpc_asym", "softmax"),
    "sym_asym": ("rpc", "softmax"),                         # symmetric RPC, asymmetric softmax
}


def layer_pattern(attn):
    """Return the attentions in rpc_layers and in all other layers, two names in ATTENTIONS.

    attn: a value of --attn.
    """
    return LAYER_PATTERNS.get(attn, (attn, attn))


def default_settings(attn):
    """Return the default settings of the robust layers, {name: value}. attn: a value of --attn.

    Every attention has the settings of PAP, so that one loop over --attn can set them for all.
    Attentions without PAP do not use them.
    """
    inside, _ = layer_pattern(attn)
    return PAP_SETTINGS | ATTENTIONS[inside].settings


def attention_flags(attn):
    """Return the settings of an attention as a table of flags, {name: (default, help, ...)}."""
    table = dict(PAP_FLAGS)
    for name, value in default_settings(attn).items():
        entry = table.get(name, (value, f"a setting of --attn {attn}"))
        table[name] = (value, *entry[1:])
    return table


def complete_attention(config):
    """Check attn, rpc_layers and pap of a ViTConfig or LMConfig, and complete them in the config.

    rpc_layers becomes a sorted tuple, which is empty if attn is no layer pattern. pap gets the
    missing default settings.
    """
    check_choice("attn", config.attn, ATTENTIONS | LAYER_PATTERNS)
    settings = default_settings(config.attn)
    known = sorted(settings.keys() | set(PAP_NAMES))
    for name in config.pap:
        check_choice("a name in pap", name, known)
    config.pap = settings | config.pap
    check_choice("form", config.pap["form"], FORMS)
    layers = ()
    if config.attn in LAYER_PATTERNS:
        layers = tuple(sorted(config.rpc_layers))
    if not set(layers) <= set(range(config.depth)):
        raise ValueError(f"rpc_layers={layers}, expected layers in "
                         f"0..{config.depth - 1}")
    config.rpc_layers = layers


# --- the module: project, attend, project back ----------------------------------------------------

class SelfAttention(nn.Module):
    """Multi-head self-attention, (B, N, C) in and out. Parameters are named as in timm.

    dim: C. num_heads: H, divides C. attn: a name in `ATTENTIONS`.
    pap: a dict of settings of `rpc_attention`. Its keys are n_iter, lambd, mu_over and form, a name
    in `FORMS`. The keys threshold, mu_dim and dual_sign replace single settings of the form.
    num_tokens: N, for attentions with parameters per token.
    causal: token t attends to tokens 0 to t only.
    attn_drop, proj_drop: dropout rates on A and on the output.

    qkv.weight: (3C, C), the rows of q, k and v; or (2C, C), the rows of k and v, if the keys are
    the queries.
    """

    def __init__(self, dim, num_heads, attn="softmax", *, pap=None, num_tokens=None,
                 causal=False, qkv_bias=True, proj_bias=True, attn_drop=0.0, proj_drop=0.0):
        super().__init__()
        self.dim, self.num_heads, self.num_tokens = dim, num_heads, num_tokens
        self.attn, self.causal, self.attn_drop = attn, causal, attn_drop

        entry = ATTENTIONS[attn]
        settings = PAP_SETTINGS | entry.settings | (pap or {})
        form = settings.pop("form")
        self.pap = FORMS[form] | settings                               # keywords of rpc_attention

        self.learned = None
        if isinstance(entry.function, type):        # a class, so an attention with parameters
            self.learned = entry.function(self)
        self.num_proj = 3 if entry.own_queries else 2                   # q, k, v or k, v
        self.make_projections(dim, qkv_bias)
        self.proj = nn.Linear(dim, dim, bias=proj_bias)
        self.proj_drop = nn.Dropout(proj_drop)

    def make_projections(self, dim, bias):
        """Make the layers that `project` uses. fan.py replaces this method and `project`."""
        self.qkv = nn.Linear(dim, self.num_proj * dim, bias=bias)

    @property
    def attn_kwargs(self):
        """Return dict(causal, dropout_p), the keywords of every attention function above."""
        dropout_p = self.attn_drop if self.training else 0.0
        return dict(causal=self.causal, dropout_p=dropout_p)

    def project(self, x):
        """Project x (B, N, C) to q, k, v, each (B, H, N, D). q is k if the keys are the queries."""
        qkv = self.qkv(x)                                               # Eq. 1
        qkv = qkv.unflatten(2, (self.num_proj, self.num_heads, -1))     # (B, N, 2 or 3, H, D)
        qkv = qkv.permute(2, 0, 3, 1, 4)                                # (2 or 3, B, H, N, D)
        k = qkv[-2]
        v = qkv[-1]
        q = qkv[0] if self.num_proj == 3 else k
        return q, k, v

    def forward(self, x):
        q, k, v = self.project(x)                                       # (B, H, N, D)
        attend = ATTENTIONS[self.attn].function if self.learned is None else self.learned
        h = attend(q, k, v, self)                                       # (B, H, N, D)
        if h.shape != v.shape:          # (B, H, 1, D) would broadcast silently where x is added
            raise ValueError(f"attn={self.attn!r} returned {tuple(h.shape)}, "
                             f"expected (B, H, N, D) = {tuple(v.shape)}")
        h = h.transpose(1, 2).flatten(2)                                # (B, N, C)
        return self.proj_drop(self.proj(h))

    def trace(self, x):
        """Return the PAP steps on x (B, N, C), a list of dict(S, K2, Q2, L); [] without PAP."""
        steps = []
        with every_pap(self, trace=steps):
            self.forward(x)     # self(x) would call the hooks of layer_inputs, too
        return steps


# --- tools: trace or change PAP inside a model ----------------------------------------------------

@contextmanager
def every_pap(model, **settings):
    """Change settings of PAP in every SelfAttention of a model inside the block.

        steps = []
        with every_pap(model, trace=steps):             # collects the steps of all layers, in order
            model(images)
        with every_pap(model, shrink=mine, n_iter=2):   # runs the same weights with another PAP
            logits = model(images)

    An attention of yours that uses PAP must call rpc_attention(k, v, **layer.pap). ValueError if
    no module has the attribute pap, because then nothing would change. It is no error if no layer
    reads the settings: attentions without PAP read none.
    """
    before = {layer: layer.pap for layer in model.modules() if hasattr(layer, "pap")}
    if not before:
        raise ValueError("no layer of the model has an attribute pap; expected a "
                         "SelfAttention, or a layer whose attribute pap is passed to "
                         "rpc_attention")
    for layer in before:
        layer.pap = layer.pap | settings
    try:
        yield
    finally:
        for layer, pap in before.items():
            layer.pap = pap


@contextmanager
def eval_mode(model):
    """Put a model into eval mode inside the block. Then each module has its own mode again."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@torch.no_grad()
def layer_inputs(model, inputs, forward=None):
    """Run model(inputs); return [(layer, x)] with the input x (B, N, C) of each SelfAttention.

    forward: a function to call instead of the model, for example LM.hidden.
    """
    inputs_of_layers = []

    def remember(layer, args):
        inputs_of_layers.append((layer, args[0]))

    layers = [module for module in model.modules() if isinstance(module, SelfAttention)]
    hooks = [layer.register_forward_pre_hook(remember) for layer in layers]
    call = forward or model
    try:
        call(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return inputs_of_layers


@torch.no_grad()
def key_statistics(model, inputs, forward=None):
    """Measure key sizes and how often S is not zero. Arguments: as in `layer_inputs`.

    Returns dict(mean_abs_key=[mean |k| per SelfAttention layer],
    nonzero_S={layer: [share of nonzero entries of S per PAP step]}). Layers are counted from 0.
    """
    sizes = []
    shares = {}
    with eval_mode(model):
        for i, (layer, x) in enumerate(layer_inputs(model, inputs, forward)):
            _, k, _ = layer.project(x)
            sizes.append(round(k.abs().mean().item(), 4))
            steps = layer.trace(x)
            if steps:
                nonzero = [(step["S"] != 0).float().mean().item() for step in steps]
                shares[i] = [round(share, 4) for share in nonzero]
    return dict(mean_abs_key=sizes, nonzero_S=shares)
