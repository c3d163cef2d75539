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

The defaults are the released ones, the only rule known to have run; `FORMS` names the readings.
lambda * mu and lambda / mu are not one family: doubling the keys halves one and doubles the other.
"""

import inspect
import math

import torch
import torch.nn.functional as F
from torch import nn

FORMS = {
    "released": dict(threshold="times", mu_dim="model", dual_sign=-1),  # the authors' code
    "paper": dict(threshold="over", mu_dim="head", dual_sign=-1),       # Algorithm 1 as printed
    "admm": dict(threshold="over", mu_dim="head", dual_sign=+1),        # what ADMM prescribes
}


# --- softmax and symmetric attention: a token looks at tokens whose keys fit its query ------------

def naive_attention(q, k, v):
    """Write softmax attention out as printed, for reading: it keeps A. All (B, H, N, D)."""
    A = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1)   # Eq. 2
    return torch.einsum("bhij,bhjd->bhid", A, v)               # Eq. 3: h_i = sum_j a_ij v_j


def softmax_attention(q, k, v, *, causal=False, dropout_p=0.0):
    """Do the same fused: A is not kept. q and k are cast to v's dtype (PAP's are float32)."""
    return F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=causal,
                                          dropout_p=dropout_p)


def symmetric_attention(k, v, *, causal=False, dropout_p=0.0):
    """Let the keys be the queries too: the paper's baseline. k, v, result: (B, H, N, D)."""
    return softmax_attention(k, k, v, causal=causal, dropout_p=dropout_p)


# --- RPC-Attention: Principal Attention Pursuit takes from the keys what sticks out ---------------

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


def penalty(k, *, mu_dim="model", mu_over="all"):
    """Compute mu = N x / (4 sum|K|) = x / (4 D mean|K|): (B, H, 1, 1), or a token's (B, H, N, 1).

    k: (B, H, N, D). mu_dim: x = C ("model") or D ("head"). mu_over: the mean runs over "all"
    tokens, over those "seen", tokens <= t (safe in causal attention), or over "token" t alone.
    """
    B, H, N, D = k.shape
    mean = torch.linalg.vector_norm(k, 1, dim=-1, keepdim=True) / D     # of a token: (B, H, N, 1)
    if mu_over == "all":
        mean = mean.mean(-2, keepdim=True)                              # (B, H, 1, 1)
    elif mu_over == "seen":
        seen = torch.arange(1, N + 1, device=k.device, dtype=mean.dtype)
        mean = mean.cumsum(-2) / seen[:, None]
    heads = H if mu_dim == "model" else 1                               # x / D
    return heads / (4 * mean.clamp_min(1e-12))                          # Def. 1; zero keys: finite


def rpc_attention(k, v, n_iter=4, lambd=4.0, *, q=None, threshold="times", mu_dim="model",
                  dual_sign=-1, mu_over=None, causal=False, dropout_p=0.0, shrink=soft_threshold,
                  trace=None):
    """Take n_iter steps of Principal Attention Pursuit on the keys; returns the last L.

    k, v, result: (B, H, N, D); v as wide as k, for L, made of values, is subtracted from keys.
    n_iter >= 1, lambd >= 0 (math.inf: never shrink). q: (B, H, N, D), fixed queries (asymmetric
    RPC). threshold, mu_dim, dual_sign: the table above. mu_over: as in `penalty`; None is "seen" if
    causal, else "all" (with which a causal layer would read the future). dropout_p: of the last
    step. shrink(x, tau): may have another gradient (robust/adaptive.py). trace: a list that
    receives dict(S, K2, L) of every step.

    n_iter = 1 is symmetric attention with every key entry clamped to [-tau, tau]. While no entry
    exceeds tau, S = 0, Z piles up, and step i >= 3 attends with keys of about -(i - 2) K: a sharper
    symmetric attention. It does not converge; n_iter is a setting, not a budget. State is float32
    at least (in bf16 the error grows from 3e-3 to 9e-3). ValueError: an unknown option or shape.
    """
    mu_over = mu_over or ("seen" if causal else "all")
    refuse_bad(k, v, q, n_iter, lambd, threshold=threshold, mu_dim=mu_dim, dual_sign=dual_sign,
               mu_over=mu_over)

    # How large is a usual entry of a key? mu, and so the threshold tau, follow from that alone.
    K = k if k.dtype == torch.float64 else k.float()
    mu = penalty(K, mu_dim=mu_dim, mu_over=mu_over)
    if lambd == math.inf:
        mu = mu.detach()                        # inf * 0 would make mu's gradient NaN
    tau = lambd * mu if threshold == "times" else lambd / mu

    # Each step splits the keys: S takes what sticks out, and L is what attention makes of the rest.
    # Z adds up by how much L + S still misses K, so that the next step is pushed there.
    L = Z = 0.0                                 # Alg. 1, line 1: S = Y = 0, and L = 0
    for i in range(n_iter):                     # Alg. 1, line 2: Def. 1 says n steps
        S = shrink(K - L + Z, tau)              # Alg. 1, line 3: S = S_tau(K - L + Y/mu)
        rest = K - S                            # Eq. 14: L + S = K, so L has to become this
        K2 = rest + dual_sign * Z               # K - S - Y/mu, the keys of line 4
        Q2 = K2 if q is None else q             # App. E.9: softmax(Q, K2)
        p = dropout_p if i == n_iter - 1 else 0.0
        L = softmax_attention(Q2, K2, v, causal=causal, dropout_p=p).to(K.dtype)  # Alg. 1, line 4
        Z = rest + Z - L                        # Alg. 1, line 5: Y = Y + mu (K - L - S)
        if trace is not None:
            trace.append(dict(S=S, K2=K2, L=L))
    return L.to(v.dtype)                        # Alg. 1, line 7: output L


def refuse_bad(k, v, q, n_iter, lambd, **options):
    """Raise a ValueError unless `rpc_attention` can do this."""
    for name, x in dict(k=k, v=v, q=k if q is None else q).items():
        if x.ndim != 4 or x.shape != k.shape:
            raise ValueError(f"rpc_attention: {name} has shape {tuple(x.shape)}, expected "
                             "(B, H, N, D), the same for k, v and q")
    for name, words in dict(threshold=("times", "over"), mu_dim=("model", "head"),
                            dual_sign=(-1, 1), mu_over=("all", "seen", "token")).items():
        one_of(name, options[name], words)
    if n_iter < 1 or not lambd >= 0:
        raise ValueError(f"n_iter={n_iter}, lambd={lambd}, expected n_iter >= 1 and lambd >= 0")


def one_of(name, value, known):
    """Raise a ValueError unless the setting `name` has one of the known values."""
    if value not in known:
        own = ("; any other has to be entered in attention.ATTENTIONS first, by you or by the "
               "module of a study, as referee.studies.robust_attentions") if name == "attn" else ""
        raise ValueError(f"{name}={value!r}, expected one of {tuple(known)}{own}")


# --- Scaled Attention (Remark 3) ------------------------------------------------------------------

def scaled_attention(q, k, v, S, *, causal=False, dropout_p=0.0):
    """Compute softmax(q k^T / sqrt(D)) (I - S) v. S: learned, (H, N, N)."""
    u = v - torch.einsum("hnm,bhmd->bhnd", S, v)                   # Eq. 12: (I - S) v
    return softmax_attention(q, k, u, causal=causal, dropout_p=dropout_p)


def scaled_alpha_attention(q, k, v, alpha, *, causal=False, dropout_p=0.0):
    """Do the same with S = alpha softmax(k k^T / sqrt(D)); alpha: one number for all heads."""
    u = v - alpha * symmetric_attention(k, v, causal=causal)       # App. E.1
    return softmax_attention(q, k, u, causal=causal, dropout_p=dropout_p)


# --- the table: write a function, enter it here, train it by --attn NAME --------------------------

# A function of (q, k, v), or of (k, v) if the keys are to be the queries too, returns h; all are
# (B, H, N, D). One that also takes `layer` gets the SelfAttention around it, with its settings.
ATTENTIONS = {
    "softmax": lambda q, k, v, layer: softmax_attention(q, k, v, **layer.how),
    "symmetric": lambda k, v, layer: symmetric_attention(k, v, **layer.how),
    "rpc": lambda k, v, layer: rpc_attention(k, v, **layer.rpc, **layer.how),
    "rpc_asym": lambda q, k, v, layer: rpc_attention(k, v, q=q, **layer.rpc, **layer.how),
    "scaled_s": lambda q, k, v, layer: scaled_attention(q, k, v, layer.s, **layer.how),
    "scaled_alpha": lambda q, k, v, layer: scaled_alpha_attention(q, k, v, layer.s, **layer.how),
}
PAP = ("rpc", "rpc_asym")               # those that run Principal Attention Pursuit


# --- the module: project, attend, project back ----------------------------------------------------

class SelfAttention(nn.Module):
    """Multi-head self-attention of one kind; (B, N, C) in and out; parameter names as in timm.

    dim: C. num_heads: H, divides C. attn: a name in `ATTENTIONS`. qkv has rows q, k, v (3C, C), or
    k, v (2C, C) where keys are queries. s, zero at start: what scaled_s learns, (H, N, N), with N =
    num_tokens, and scaled_alpha, (1,). n_iter, lambd, form (of `FORMS`), mu_over: of PAP. causal:
    token t sees tokens <= t. attn_drop, proj_drop: dropout on the attention matrix and at the end.
    """

    def __init__(self, dim, num_heads, attn="softmax", *, n_iter=4, lambd=4.0, form="released",
                 mu_over=None, num_tokens=None, causal=False, qkv_bias=True, proj_bias=True,
                 attn_drop=0.0, proj_drop=0.0):
        super().__init__()
        one_of("attn", attn, ATTENTIONS)
        one_of("form", form, FORMS)
        if dim % num_heads:
            raise ValueError(f"dim={dim} is not divisible by num_heads={num_heads}")
        if attn == "scaled_s" and (num_tokens is None or causal):
            raise ValueError("attn='scaled_s' learns one N x N matrix per head: it needs "
                             "num_tokens and is not causal")
        self.num_heads, self.attn, self.causal, self.attn_drop = num_heads, attn, causal, attn_drop
        self.rpc = dict(n_iter=n_iter, lambd=lambd, mu_over=mu_over, **FORMS[form])

        # The arguments of this kind's function say what it needs: no q, no projection for it.
        parameters = inspect.signature(ATTENTIONS[attn]).parameters.values()
        self.takes = [p.name for p in parameters if p.default is p.empty]
        needed = {"k", "v", "layer"} if causal or attn_drop else {"k", "v"}
        if not needed <= set(self.takes) <= {"q", "k", "v", "layer"}:
            raise ValueError(f"attn={attn!r} is a function of {', '.join(self.takes)}; expected q, "
                             "k, v or k, v, and layer (whose layer.how says causal and dropout_p)")
        self.num_proj = 3 if "q" in self.takes else 2                   # q, k, v or k, v
        self.qkv = nn.Linear(dim, self.num_proj * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim, bias=proj_bias)
        self.proj_drop = nn.Dropout(proj_drop)
        if attn == "scaled_s":
            self.s = nn.Parameter(torch.zeros(num_heads, num_tokens, num_tokens))
        elif attn == "scaled_alpha":
            self.s = nn.Parameter(torch.zeros(1))

    @property
    def how(self):
        """What every kind has to heed: dict(causal, dropout_p)."""
        return dict(causal=self.causal, dropout_p=self.attn_drop if self.training else 0.0)

    def project(self, x):
        """(B, N, C) -> q, k, v, each (B, H, N, D); q is k where the keys are the queries."""
        qkv = self.qkv(x)                                               # Eq. 1
        qkv = qkv.unflatten(2, (self.num_proj, self.num_heads, -1))     # (B, N, 2 or 3, H, D)
        qkv = qkv.permute(2, 0, 3, 1, 4)                                # (2 or 3, B, H, N, D)
        return qkv[0], qkv[-2], qkv[-1]

    def attend(self, q, k, v):
        """Call the function of this kind; q, k, v, h: (B, H, N, D). ValueError: h is no such."""
        given = dict(q=q, k=k, v=v, layer=self)
        h = ATTENTIONS[self.attn](**{name: given[name] for name in self.takes})
        found = tuple(getattr(h, "shape", [type(h).__name__]))
        if found != tuple(v.shape):
            raise ValueError(f"attn={self.attn!r} returned {found}, expected h {tuple(v.shape)}")
        return h

    def trace(self, x):
        """List PAP's steps, dicts of S, K2, L; of a kind without PAP those that it would take."""
        (q, k, v), steps = self.project(x), []
        q = q if self.attn == "rpc_asym" else None
        rpc_attention(k, v, q=q, causal=self.causal, **self.rpc, trace=steps)
        return steps

    def forward(self, x):
        h = self.attend(*self.project(x))                               # (B, H, N, D)
        return self.proj_drop(self.proj(h.transpose(1, 2).flatten(2)))  # (B, N, C)


@torch.no_grad()
def key_statistics(model, forward, inputs):
    """Did the robust part act? mean_abs_key: per layer; nonzero_S: {RPC layer: share, each step}.

    forward(inputs) runs `model`; its SelfAttention modules count as layers 0, 1, ...
    """
    stats = dict(mean_abs_key=[], nonzero_S={})

    def look(m, inputs):
        """Add the row of m, a SelfAttention, before its forward."""
        if m.attn in PAP:
            shares = [(step["S"] != 0).float().mean().item() for step in m.trace(inputs[0])]
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
