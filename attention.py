"""Every attention of the paper in one file: softmax, symmetric, RPC (robust PCA inside the layer) and Scaled Attention.

Paper: Teo & Nguyen, "Unveiling the Hidden Structure of Self-Attention via Kernel Principal Component Analysis",
NeurIPS 2024. Released code: `rachtsy/KPCA_code`. First pure functions on (B, H, N, D) tensors, then one module,
`SelfAttention`, that projects, calls one of them and projects back.

B batch, H heads, N tokens (class token included), D head width, C = H*D model width.

    paper                   name here   shape                  what it is
    Q, K, V   (eq. 1, 2)    q, k, v     (B, H, N, D)           queries, keys, values
    A, h      (eq. 3)       -           (B,H,N,N) (B,H,N,D)    softmax(q k^T / sqrt(D)), A v; A is never kept
    K, L, S   (eq. 14)      k, L, S     (B, H, N, D)           keys = low-rank part + sparse part
    Y         (Alg. 1)      Z = Y/mu    (B, H, N, D)           scaled dual variable; Y itself is never needed
    mu        (Alg. 1)      mu          (B, H, 1 or N, 1)      penalty weight, proportional to 1 / mean|k|
    lambda    (Alg. 1)      lambd       float                  weight of the sparse part
    S_{.}     (Alg. 1)      soft_threshold                     sign(x) max(|x| - tau, 0); tau (B, H, 1 or N, 1)
    D_{.}     (Alg. 2)      kpca.pcp    (N, D)                 singular value threshold; PAP puts an attention here
    S         (Remark 3)    S, s        (H, N, N)              scaling of the values, v - S v; a matrix, not the S above

The paper's text and the code its authors released compute different things. Each choice is an argument:

    question                paper's text              released code             here
    threshold of S          lambda / mu               lambda * mu               threshold="over" | "times" (default)
    mu = N x / (4 sum|K|)   x = D, head width         x = C, model width        mu_dim="head" | "model" (default)
    sign of Y/mu in L step  - (ADMM needs +)          -                         dual_sign=-1 (default) | +1
    value operand           not printed               V, fixed in the loop      V (to try K: rpc_attention(k, k))
    when to stop            "until converged"         exactly n steps           n_iter; it does not converge
    dropout                 not mentioned             last step only            last step only
    robust layers           n1-n2                     one index or all          any set (vit.py, lm.py)
    queries                 none (App. E.9: asym.)    none                      q=None; given: asymmetric RPC
    causal mu               not mentioned             no causal code            mean|k| of tokens <= t ("running")

The defaults are the released ones: the only rule known to have run. `FORMS` names the three readings. lambda*mu and
lambda/mu are not one family renamed: mu is data, so doubling the keys halves the one and doubles the other.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

FORMS = {
    "released": dict(threshold="times", mu_dim="model", dual_sign=-1),   # the authors' code
    "paper": dict(threshold="over", mu_dim="head", dual_sign=-1),        # Algorithm 1 as printed
    "admm": dict(threshold="over", mu_dim="head", dual_sign=+1),         # what ADMM prescribes
}
KINDS = ("softmax", "symmetric", "rpc", "rpc_asym", "scaled_s", "scaled_alpha")


# --- softmax and symmetric attention ---------------------------------------------------------------------------------

def softmax_attention(q, k, v, *, causal=False, dropout_p=0.0):
    """h = softmax(q k^T / sqrt(D)) v (eq. 1-3). q, k, v: (B, H, N, D); returns (B, H, N, D)."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, dropout_p=dropout_p)


def symmetric_attention(k, v, *, causal=False, dropout_p=0.0):
    """h = softmax(k k^T / sqrt(D)) v: the keys are the queries too; the paper's baseline. All (B, H, N, D)."""
    return softmax_attention(k, k, v, causal=causal, dropout_p=dropout_p)


# --- RPC-Attention: Principal Attention Pursuit (Definition 1, Algorithm 1) ------------------------------------------

def soft_threshold(x, tau):
    """Shrink towards zero: sign(x) * max(|x| - tau, 0), elementwise; the prox of tau * ||.||_1.

    x: any shape. tau: number or tensor >= 0, broadcastable to x, in the unit of x. Returns x's shape and dtype.
    Computed as x - clamp(x, -tau, tau), which is the same.
    """
    return SoftThreshold.apply(x, torch.as_tensor(tau, dtype=x.dtype, device=x.device))


def penalty(k, *, mu_dim="model", mu="global"):
    """mu = N x / (4 sum|K|), per sample and head, x = C ("model") or D ("head"); that is x / (4 D mean|K|).

    k: (B, H, N, D). The mean runs over all tokens ("global"), over tokens <= t ("running", safe in causal attention)
    or over token t alone ("token"). Returns (B, H, 1, 1) for "global", else (B, H, N, 1).
    """
    B, H, N, D = k.shape
    m = torch.linalg.vector_norm(k, 1, dim=-1, keepdim=True) / D                              # mean|k|, (B, H, N, 1)
    if mu == "global":
        m = m.mean(-2, keepdim=True)                                                          # (B, H, 1, 1)
    elif mu == "running":
        m = m.cumsum(-2) / torch.arange(1, N + 1, device=k.device, dtype=m.dtype)[:, None]    # (B, H, N, 1)
    return (H if mu_dim == "model" else 1) / (4 * m.clamp_min(1e-12))                         # all-zero head: finite


def rpc_attention(k, v, n_iter=4, lambd=4.0, *, q=None, threshold="times", mu_dim="model", dual_sign=-1, mu=None,
                  causal=False, dropout_p=0.0, shrink=soft_threshold, trace=None):
    """RPC-Attention: n_iter steps of Principal Attention Pursuit on the keys. Returns the last L, (B, H, N, D).

    k, v: (B, H, N, D). n_iter >= 1, lambd >= 0 (math.inf: never shrink). q: fixed queries (asymmetric RPC, App. E.9).
    threshold, mu_dim, dual_sign: see the table above and `FORMS`. mu: "global", "running" or "token" (`penalty`);
    None is "running" if causal, else "global" ("global" in causal attention lets the future leak into the past).
    dropout_p acts in the last step. shrink(x, tau): soft_threshold, or one with another gradient (attacks.py). trace: a
    list that receives dict(S, K2, L) of every step, for analysis.

    Z = Y/mu is kept instead of Y, so mu is needed inside tau only. What the loop does: n = 1 is symmetric attention
    with every key entry clamped to [-tau, tau]. While nothing exceeds tau, S = 0, Z piles up, and step i >= 3 attends
    with keys of about -(i-2) K: a sharper symmetric attention. It does not converge; n is a setting, not a budget.

    State is float32 at least (in bf16 the error grows from 3e-3 to 9e-3); only K2 is cast, to v's dtype, for
    `F.scaled_dot_product_attention`, so no N x N matrix is kept. Raises ValueError for an unknown option.
    """
    for name, value in (("k", k), ("v", v), ("q", k if q is None else q)):
        if value.ndim != 4 or value.shape != k.shape:
            raise ValueError(f"rpc_attention: {name} has shape {tuple(value.shape)}, expected (B, H, N, D), "
                             "the same for k, v and q")
    mu = mu or ("running" if causal else "global")
    for name, value, known in (("threshold", threshold, ("times", "over")), ("mu_dim", mu_dim, ("model", "head")),
                               ("dual_sign", dual_sign, (-1, 1)), ("mu", mu, ("global", "running", "token"))):
        if value not in known:
            raise ValueError(f"rpc_attention: {name}={value!r}, expected one of {known}")
    if n_iter < 1 or not lambd >= 0:
        raise ValueError(f"rpc_attention: n_iter={n_iter}, lambd={lambd}, expected n_iter >= 1 and lambd >= 0")

    K = k if k.dtype == torch.float64 else k.float()
    mu = penalty(K, mu_dim=mu_dim, mu=mu)
    if lambd == math.inf:
        mu = mu.detach()                                     # inf * 0 would make mu's gradient NaN
    tau = lambd * mu if threshold == "times" else lambd / mu
    L = Z = 0.0                                              # Alg. 1, line 1: S = Y = 0, and L = 0
    for i in range(n_iter):                                  # Alg. 1, line 2: "while not converged"
        last = i == n_iter - 1
        S = shrink(K - L + Z, tau)                           # Alg. 1, line 3: S = S_tau(K - L + Y/mu)
        R = K - S                                            # the keys without their sparse part
        K2 = R + dual_sign * Z                               #                 K - S - Y/mu
        Q2 = K2 if q is None else q
        L = softmax_attention(Q2.to(v.dtype), K2.to(v.dtype), v, causal=causal,  # Alg. 1, line 4
                              dropout_p=dropout_p if last else 0.0).to(K.dtype)  # L = softmax(K2, K2) V
        Z = R + Z - L                                        # Alg. 1, line 5: Y = Y + mu (K - L - S)
        if trace is not None:
            trace.append(dict(S=S, K2=K2, L=L))
    return L.to(v.dtype)                                     # Alg. 1, line 7: output L


class SoftThreshold(torch.autograd.Function):
    """S = x - clamp(x, -tau, tau). Autograd's own backward of a clamp with tensor bounds takes four times as long."""
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
        sign = ctx.saved_tensors[0].sign()                   # dS/dx = 1, dS/dtau = -sign(x) where S is not 0
        shrunk = grad * sign
        return shrunk * sign, -shrunk.sum_to_size(ctx.tau_shape)


# --- Scaled Attention (Remark 3, section 4.3, App. E.1) --------------------------------------------------------------

def scaled_attention(q, k, v, S, *, causal=False, dropout_p=0.0):
    """h = softmax(q k^T / sqrt(D)) (I - S) v. S: (H, N, N), learned, or (B, H, N, N). q, k, v: (B, H, N, D)."""
    return softmax_attention(q, k, v - torch.einsum("...nm,...md->...nd", S, v), causal=causal, dropout_p=dropout_p)


def scaled_alpha_attention(q, k, v, alpha, *, causal=False, dropout_p=0.0):
    """Scaled Attention with S = alpha * softmax(k k^T / sqrt(D)); alpha: one number, shared by the heads (App. E.1)."""
    u = v - alpha * symmetric_attention(k, v, causal=causal)
    return softmax_attention(q, k, u, causal=causal, dropout_p=dropout_p)


# --- the module ------------------------------------------------------------------------------------------------------

class SelfAttention(nn.Module):
    """Multi-head self-attention of one kind; (B, N, C) in and out; parameter names as in timm.

    dim: C. num_heads: H, divides C. attn: one of `KINDS`:
      softmax       eq. 1-3; qkv (3C, C), rows q, k, v
      symmetric     queries are keys; qkv (2C, C), rows k, v
      rpc           RPC-Attention; the parameters of symmetric
      rpc_asym      RPC-Attention with fixed queries (App. E.9); the parameters of softmax
      scaled_s      Scaled Attention, learned `s` (H, N, N), zero at start; needs num_tokens = N
      scaled_alpha  Scaled Attention, learned `s` (1,) = alpha, zero at start
    n_iter, lambd, form (a key of `FORMS`), mu: for the rpc kinds. causal: token t sees tokens <= t.
    attn_drop, proj_drop: dropout rates on the attention matrix and after the output projection.
    """

    def __init__(self, dim, num_heads, attn="softmax", *, n_iter=4, lambd=4.0, form="released", mu=None,
                 num_tokens=None, causal=False, qkv_bias=True, proj_bias=True, attn_drop=0.0, proj_drop=0.0):
        super().__init__()
        if attn not in KINDS:
            raise ValueError(f"attn={attn!r}, expected one of {KINDS}")
        if form not in FORMS:
            raise ValueError(f"form={form!r}, expected one of {tuple(FORMS)}")
        if dim % num_heads:
            raise ValueError(f"dim={dim} is not divisible by num_heads={num_heads}")
        if attn == "scaled_s" and (num_tokens is None or causal):
            raise ValueError("attn='scaled_s' learns one N x N matrix per head: it needs num_tokens and is not causal")
        self.num_heads, self.attn, self.causal, self.attn_drop = num_heads, attn, causal, attn_drop
        self.rpc = dict(n_iter=n_iter, lambd=lambd, mu=mu, **FORMS[form])
        self.num_proj = 2 if attn in ("symmetric", "rpc") else 3                              # k, v or q, k, v
        self.qkv = nn.Linear(dim, self.num_proj * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim, bias=proj_bias)
        self.proj_drop = nn.Dropout(proj_drop)
        if attn == "scaled_s":
            self.s = nn.Parameter(torch.zeros(num_heads, num_tokens, num_tokens))
        elif attn == "scaled_alpha":
            self.s = nn.Parameter(torch.zeros(1))

    def project(self, x):
        """(B, N, C) -> q, k, v, each (B, H, N, D), as the attention uses them; q is k where keys are queries."""
        B, N, C = x.shape
        qkv = self.qkv(x).view(B, N, self.num_proj, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        return (qkv[-2], qkv[-2], qkv[-1]) if self.num_proj == 2 else (qkv[0], qkv[1], qkv[2])

    def attend(self, q, k, v):
        """The attention of this kind; all (B, H, N, D)."""
        how = dict(causal=self.causal, dropout_p=self.attn_drop if self.training else 0.0)
        if self.attn == "softmax":
            return softmax_attention(q, k, v, **how)
        if self.attn == "symmetric":
            return symmetric_attention(k, v, **how)
        if self.attn == "rpc":
            return rpc_attention(k, v, **self.rpc, **how)
        if self.attn == "rpc_asym":
            return rpc_attention(k, v, q=q, **self.rpc, **how)
        if self.attn == "scaled_s":
            return scaled_attention(q, k, v, self.s, **how)
        return scaled_alpha_attention(q, k, v, self.s, **how)

    def forward(self, x):
        h = self.attend(*self.project(x))                                                     # (B, H, N, D)
        return self.proj_drop(self.proj(h.transpose(1, 2).flatten(2)))                        # (B, N, C)


# --- for logs --------------------------------------------------------------------------------------------------------

@torch.no_grad()
def key_statistics(model, forward, inputs):
    """Did the robust part act? mean_abs_key: per layer; nonzero_S: {RPC layer: share of nonzero S in each step}.

    forward(inputs) runs `model`, which is in eval mode; its SelfAttention modules count as layers 0, 1, ...
    """
    seen, layers = {}, [m for m in model.modules() if isinstance(m, SelfAttention)]
    hooks = [m.register_forward_pre_hook(lambda m, x: seen.__setitem__(m, x[0])) for m in layers]
    forward(inputs)
    for hook in hooks:
        hook.remove()
    stats = dict(mean_abs_key=[], nonzero_S={})
    for i, m in enumerate(layers):
        q, k, v = m.project(seen[m])
        stats["mean_abs_key"].append(round(k.abs().mean().item(), 4))
        if m.attn.startswith("rpc"):
            rpc_attention(k, v, q=q if m.attn == "rpc_asym" else None, **m.rpc, causal=m.causal, trace=(trace := []))
            stats["nonzero_S"][i] = [round((step["S"] != 0).float().mean().item(), 4) for step in trace]
    return stats
