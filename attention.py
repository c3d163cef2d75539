"""Every attention of the paper: softmax, symmetric, RPC (robust PCA inside the layer), scaled.

Paper: Teo & Nguyen, "Unveiling the Hidden Structure of Self-Attention via Kernel Principal
Component Analysis", NeurIPS 2024. Released code: `rachtsy/KPCA_code`. First functions, then the
table of their names, `ATTENTIONS`, then the module around them.

B batch, H heads, N tokens (class token included), D head width, C = H * D model width.

    paper               name here        shape              what it is
    Q, K, V (Eq. 1)     q, k, v          (B, H, N, D)       queries, keys, values
    A       (Eq. 2)     A                (B, H, N, N)       softmax(q k^T / sqrt(D))
    h       (Eq. 3)     h                (B, H, N, D)       A v
    K, L, S (Eq. 14)    k, L, S          (B, H, N, D)       keys = low-rank part + sparse part
    Y       (Alg. 1)    Z = Y/mu         (B, H, N, D)       scaled dual; Y itself is never needed
    mu      (Def. 1)    mu               (B, H, 1 or N, 1)  penalty weight, ~ 1 / mean|k|
    lambda  (Alg. 1)    lambd            float              weight of the sparse part
    S_{.}   (Alg. 1)    soft_threshold                      sign(x) max(|x| - tau, 0)
    S       (Eq. 12)    S, alpha         (H, N, N), (1,)    scaling, v - S v; not the S above

The paper's text and the code its authors released compute different things; each is an argument:

    question               paper's text            released code       here
    threshold of S         lambda / mu             lambda * mu         threshold="over" | "times"
    mu = N x / (4 sum|K|)  x = D, head width       x = C, model width  mu_dim="head" | "model"
    sign of Y/mu, line 4   - (ADMM needs +)        -                   dual_sign=-1 | +1
    value operand          not printed             V, fixed            V, or k: rpc_attention(k, k)
    when to stop           n steps (Def. 1)        n steps             n_iter; no convergence
    dropout                not mentioned           last step only      last step only
    queries                none (App. E.9: asym.)  none                q=None; given: asymmetric
    causal mu              not mentioned           no causal code      mean|k| of tokens <= t

The defaults are those of the authors' published code; `FORMS` names the readings.
lambda * mu and lambda / mu are not one family: doubling the keys halves one and doubles the other.
"""

import inspect
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


# --- softmax and symmetric attention: a token looks at tokens whose keys fit its query ------------

def naive_attention(q, k, v):
    """Softmax attention as printed, for reading: it stores A. All (B, H, N, D)."""
    A = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1)   # Eq. 2
    return torch.einsum("bhij,bhjd->bhid", A, v)               # Eq. 3: h_i = sum_j a_ij v_j


def softmax_attention(q, k, v, *, causal=False, dropout_p=0.0, keep=None):
    """The same through PyTorch's fused kernel, which does not store A.

    q and k, float32 in PAP, are cast to v's dtype, where they are one tensor once. causal: token t
    attends to tokens <= t, the others are masked. keep: (B, N) bool; False marks padding, to which
    no token attends.
    """
    keys = k.to(v.dtype)
    q = keys if q is k else q.to(v.dtype)
    mask = None
    if keep is not None:
        mask = keep[:, None, None]                                      # (B, 1, 1, N)
        mask = mask & mask.new_ones(q.shape[-2], k.shape[-2]).tril() if causal else mask
    return F.scaled_dot_product_attention(q, keys, v, attn_mask=mask, dropout_p=dropout_p,
                                          is_causal=causal and mask is None)


def symmetric_attention(k, v, *, causal=False, dropout_p=0.0):
    """Softmax attention whose queries are the keys: the paper's baseline. All (B, H, N, D)."""
    return softmax_attention(k, k, v, causal=causal, dropout_p=dropout_p)


# --- PAP, below, seen or changed from outside -----------------------------------------------------

changes = {}                            # arguments of rpc_attention that every_pap has set


@contextmanager
def every_pap(**settings):
    """Within it every call of rpc_attention has these arguments: to look at PAP, or to change it.

        steps = []
        with every_pap(trace=steps):                # dicts of S, K2, Q2, L: call after call
            model(images)                           # steps stays []: this model runs no PAP
        with every_pap(shrink=mine, n_iter=2):      # the same weights, another PAP
            logits = model(images)

    It finds PAP wherever a model runs it, also in an attention of one's own. What runs outside has
    its own arguments: the backward of a checkpointed block, too, unless it runs within.
    """
    before = dict(changes)
    changes.update(settings)
    try:
        yield
    finally:
        changes.clear()
        changes.update(before)


def changed_by_every_pap(function):
    """Let every_pap set arguments of a function."""
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args, **given):
        if changes:
            args, given = (), {**signature.bind(*args, **given).arguments, **changes}
        return function(*args, **given)
    return call


# --- RPC-Attention: Principal Attention Pursuit (PAP) splits the keys, K = L + S ------------------

def soft_threshold(x, tau):
    """Shrink towards zero: sign(x) max(|x| - tau, 0), elementwise; the prox of tau ||.||_1.

    x: any shape. tau: number or tensor >= 0, broadcastable to x, in the unit of x.
    """
    return SoftThreshold.apply(x, torch.as_tensor(tau, dtype=x.dtype, device=x.device))


class SoftThreshold(torch.autograd.Function):
    """x - clamp(x, -tau, tau); autograd's own backward of this clamp takes four times as long."""
    generate_vmap_rule = True

    @staticmethod
    def forward(x, tau):
        return x - x.clamp(-tau, tau)

    @staticmethod
    def setup_context(ctx, inputs, S):
        ctx.save_for_backward(S)
        ctx.tau_shape = inputs[1].shape

    @staticmethod
    def backward(ctx, grad):
        sign = ctx.saved_tensors[0].sign()      # where S is not 0: dS/dx = 1, dS/dtau = -sign(x)
        shrunk = grad * sign
        return shrunk * sign, -shrunk.sum_to_size(ctx.tau_shape)


def penalty(k, *, mu_dim="model", mu_over="all", keep=None):
    """Return mu = N x / (4 sum|K|) = x / (4 D mean|K|): (B, H, 1, 1), or a token's (B, H, N, 1).

    k: (B, H, N, D). mu_dim: x = C ("model") or D ("head"). mu_over: the mean runs over "all"
    tokens, over those "seen", tokens <= t (safe in causal attention), or over "token" t alone.
    keep: (B, N) bool; False marks padding, which the mean leaves out.
    """
    B, H, N, D = k.shape
    mean = torch.linalg.vector_norm(k, 1, dim=-1, keepdim=True) / D     # of a token: (B, H, N, 1)
    seen = torch.arange(1, N + 1, device=k.device, dtype=mean.dtype)[:, None]
    if keep is not None:
        mean = mean * keep[:, None, :, None]
        seen = keep.cumsum(1).clamp_min(1)[:, None, :, None]            # (B, 1, N, 1)
    if mu_over == "all":
        mean = mean.mean(-2, keepdim=True) * (N / seen[..., -1:, :])    # (B, H, 1, 1)
    elif mu_over == "seen":
        mean = mean.cumsum(-2) / seen
    heads = H if mu_dim == "model" else 1                               # x / D
    return heads / (4 * mean.clamp_min(1e-12))                          # Def. 1; zero keys: finite


@changed_by_every_pap
def rpc_attention(k, v, n_iter=4, lambd=4.0, *, q=None, threshold="times", mu_dim="model",
                  dual_sign=-1, mu_over=None, causal=False, dropout_p=0.0, shrink=soft_threshold,
                  trace=None, keep=None):
    """RPC-Attention: n_iter steps of Principal Attention Pursuit on the keys; returns the last L.

    k, v, result: (B, H, N, D); v as wide as k, for L, made of values, is subtracted from keys.
    n_iter >= 1; lambd >= 0 (math.inf: never shrink), or a tensor (H, 1, 1) that may be learned. q:
    (B, H, N, D), fixed queries (asymmetric RPC). threshold, mu_dim, dual_sign: the table above.
    mu_over: as in `penalty`; None is "seen" if causal, else "all" (with which a causal layer would
    read the future). dropout_p: of the last step. shrink(x, tau): may have another gradient
    (robust/adaptive.py). trace: a list that receives dict(S, K2, Q2, L) of every step. keep: (B, N)
    bool; False marks padding, which changes no other token.

    n_iter = 1 is symmetric attention with every key entry clamped to [-tau, tau]. While no entry
    exceeds tau, S = 0 and, with dual_sign = -1, the keys of step i are (L_1 + ... + L_{i-1}) -
    (i - 2) K. What the L's of all tokens have in common matters, too: keys are queries here, so a
    vector c added to every key adds c.k_j to the score of token j. Entropy of the attention in
    steps 3 and 4 of weights/shapes_rpc.pt with lambd=inf, on 64 scenes: 2.46 and 0.83 nats; with
    -(i - 2) K alone 2.94 and 1.20. It does not converge: more steps are not more accurate. The
    state is float32 at least: of bf16 keys and values there, four steps err by 0.4 % (relative to
    float32), by 1.1 % with a state in bf16.
    """
    mu_over = mu_over or ("seen" if causal else "all")
    assert threshold in ("times", "over") and mu_dim in ("model", "head") and dual_sign in (-1, 1)
    assert mu_over in ("all", "seen", "token") and n_iter >= 1 and k.shape == v.shape

    # How large is a usual entry of a key? mu, and so the threshold tau, follow from that alone.
    K = k if k.dtype == torch.float64 else k.float()
    mu = penalty(K, mu_dim=mu_dim, mu_over=mu_over, keep=keep)
    if not torch.is_tensor(lambd) and lambd == math.inf:
        mu = mu.detach()                        # inf * 0 would make mu's gradient NaN
    tau = lambd * mu if threshold == "times" else lambd / mu

    # Each step splits the keys: S takes what sticks out, and L is what attention makes of the rest.
    # Z adds up by how much L + S still misses K, so that the next step is pushed there. (The last
    # Z pushes nothing; it takes no time that can be measured, and the lines stay as printed.)
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
    if dropout_p:                               # in the last step alone, once more
        L = softmax_attention(Q2, K2, v, causal=causal, dropout_p=dropout_p, keep=keep)
    return L.to(v.dtype)                        # Alg. 1, line 7: output L


# --- Scaled Attention (Remark 3): attentions with parameters --------------------------------------

class ScaledAttention(nn.Module):
    """softmax(q k^T / sqrt(D)) (I - S) v. S: learned, (H, N, N), zero at the start."""

    def __init__(self, num_heads, num_tokens):
        super().__init__()
        self.s = nn.Parameter(torch.zeros(num_heads, num_tokens, num_tokens))

    def forward(self, q, k, v, dropout_p=0.0):
        u = v - torch.einsum("hnm,bhmd->bhnd", self.s, v)               # Eq. 12: (I - S) v
        return softmax_attention(q, k, u, dropout_p=dropout_p)


class ScaledAlphaAttention(nn.Module):
    """The same with S = alpha softmax(k k^T / sqrt(D)); alpha: one learned number, 0 at first."""

    def __init__(self):
        super().__init__()
        self.s = nn.Parameter(torch.zeros(1))

    def forward(self, q, k, v, causal=False, dropout_p=0.0):
        u = v - self.s * symmetric_attention(k, v, causal=causal)       # App. E.1
        return softmax_attention(q, k, u, causal=causal, dropout_p=dropout_p)


# --- the table: write a function or a module, enter it here, train it by --attn NAME --------------

# A function of (q, k, v), or of (k, v) if the keys are to be the queries too, returns h; all are
# (B, H, N, D). It also gets causal (language models need it), dropout_p (the decoder of Segmenter
# does) and layer, the SelfAttention around it, where it has arguments of these names. One with
# parameters is an nn.Module class: built with those of dim, num_heads and num_tokens that its
# __init__ has, and called like a function.
ATTENTIONS = {
    "softmax": softmax_attention,
    "symmetric": symmetric_attention,
    "rpc": lambda k, v, layer: rpc_attention(k, v, **layer.pap, **layer.attn_kwargs),
    "rpc_asym": lambda q, k, v, layer: rpc_attention(k, v, q=q, **layer.pap, **layer.attn_kwargs),
    "scaled_s": ScaledAttention,
    "scaled_alpha": ScaledAlphaAttention,
}
# What --attn may name besides: (attention in rpc_layers, attention in the other layers).
LAYER_PATTERNS = {"rpc": ("rpc", "symmetric"), "rpc_asym": ("rpc_asym", "softmax"),
                  "sym_asym": ("rpc", "softmax")}
OFFERED = ("causal", "dropout_p", "layer")              # besides q, k, v


def arg_names(function, known):
    """List which of the `known` names a function's signature has; not q where it is optional."""
    return [name for name in known if name in inspect.signature(function).parameters
            and (name != "q" or name in required(function))]


def required(function):
    """List the arguments that a call of a function has to give."""
    return [p.name for p in inspect.signature(function).parameters.values()
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


# --- the module: project, attend, project back ----------------------------------------------------

class SelfAttention(nn.Module):
    """Multi-head self-attention of one kind; (B, N, C) in and out; parameter names as in timm.

    dim: C. num_heads: H, divides C. attn: a name in `ATTENTIONS`. qkv has rows q, k, v (3C, C), or
    k, v (2C, C) where keys are queries. pap: n_iter, lambd, form (of `FORMS`) and any other keyword
    of `rpc_attention`. num_tokens: N, for a kind with parameters per token. causal: token t sees
    tokens <= t. attn_drop, proj_drop: dropout on the attention matrix and at the end.
    """

    def __init__(self, dim, num_heads, attn="softmax", *, pap=None, num_tokens=None, causal=False,
                 qkv_bias=True, proj_bias=True, attn_drop=0.0, proj_drop=0.0):
        super().__init__()
        self.num_heads, self.attn, self.causal, self.attn_drop = num_heads, attn, causal, attn_drop
        settings = {**PAP_SETTINGS, **(pap or {})}
        self.pap = {**FORMS[settings.pop("form")], **settings}          # of rpc_attention

        # Its arguments say what this kind needs: without q in them there is no projection for it.
        kind, sizes = ATTENTIONS[attn], dict(dim=dim, num_heads=num_heads, num_tokens=num_tokens)
        module = isinstance(kind, type)
        self.learned = kind(**{x: sizes[x] for x in arg_names(kind, sizes)}) if module else None
        function, known = self.learned.forward if module else kind, ("q", "k", "v", *OFFERED)
        self.arg_names = arg_names(function, known)
        if {"k", "v", *required(function)} - set(self.arg_names):
            raise ValueError(f"attn={attn!r} has the arguments {', '.join(required(function))}; "
                             f"expected q, k, v or k, v, and of {', '.join(OFFERED)} what it uses")
        for name, wanted in (("causal", causal), ("dropout_p", attn_drop)):
            if wanted and not {name, "layer"} & set(self.arg_names):
                raise ValueError(f"attn={attn!r} has no argument {name}, expected one: this model "
                                 f"has {name}={wanted}")
        self.num_proj = 3 if "q" in self.arg_names else 2               # q, k, v or k, v
        self.make_projections(dim, qkv_bias)
        self.proj = nn.Linear(dim, dim, bias=proj_bias)
        self.proj_drop = nn.Dropout(proj_drop)

    def make_projections(self, dim, bias):
        """Make what `project` uses. FAN overrides both."""
        self.qkv = nn.Linear(dim, self.num_proj * dim, bias=bias)

    @property
    def attn_kwargs(self):
        """The keywords of every kind: dict(causal, dropout_p)."""
        return dict(causal=self.causal, dropout_p=self.attn_drop if self.training else 0.0)

    def project(self, x):
        """(B, N, C) -> q, k, v, each (B, H, N, D); q is k where the keys are the queries."""
        qkv = self.qkv(x)                                               # Eq. 1
        qkv = qkv.unflatten(2, (self.num_proj, self.num_heads, -1))     # (B, N, 2 or 3, H, D)
        qkv = qkv.permute(2, 0, 3, 1, 4)                                # (2 or 3, B, H, N, D)
        return qkv[0], qkv[-2], qkv[-1]

    def attend(self, q, k, v):
        """Call the function or module of this kind; q, k, v, result: (B, H, N, D)."""
        given = dict(q=q, k=k, v=v, layer=self, **self.attn_kwargs)
        function = ATTENTIONS[self.attn] if self.learned is None else self.learned
        return function(**{name: given[name] for name in self.arg_names})

    def trace(self, x):
        """List the steps that PAP takes on x, dicts of S, K2, Q2, L; [] if this kind has no PAP."""
        steps = []
        with every_pap(trace=steps):
            self.attend(*self.project(x))
        return steps

    def forward(self, x):
        q, k, v = self.project(x)
        h = self.attend(q, k, v)                                        # (B, H, N, D)
        if h.shape != v.shape:                                  # (B, H, 1, D), say, would broadcast
            raise ValueError(f"attn={self.attn!r} returned {tuple(h.shape)}, expected "
                             f"{tuple(v.shape)}: (B, H, N, D)")
        return self.proj_drop(self.proj(h.transpose(1, 2).flatten(2)))  # (B, N, C)


@torch.no_grad()
def key_statistics(model, forward, inputs):
    """Did the robust part act? mean_abs_key: per layer; nonzero_S: {RPC layer: share, each step}.

    forward(inputs) runs `model`; its SelfAttention modules count as layers 0, 1, ...
    """
    stats = dict(mean_abs_key=[], nonzero_S={})

    def look(m, inputs):
        """Add the row of m, a SelfAttention, before its forward."""
        shares = [(step["S"] != 0).float().mean().item() for step in m.trace(inputs[0])]
        if shares:
            stats["nonzero_S"][len(stats["mean_abs_key"])] = [round(share, 4) for share in shares]
        _, k, _ = m.project(inputs[0])
        stats["mean_abs_key"].append(round(k.abs().mean().item(), 4))

    layers = [m for m in model.modules() if isinstance(m, SelfAttention)]
    hooks = [m.register_forward_pre_hook(look) for m in layers]
    training = model.training
    model.eval()
    forward(inputs)
    model.train(training)
    for hook in hooks:
        hook.remove()
    return stats
