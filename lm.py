"""Language model with any causal attention of attention.py: the paper's, for WikiText-103.

Paper: section 4.2, Table 3 and App. A.4 of Teo & Nguyen 2024. Architecture and output layer of
`IDSIA/lmtool-fwp` (src/mem_transformer.py, src/utils/proj_adaptive_softmax.py), the code base the
paper names; symmetric attention as in `rachtsy/KPCA-S:lm/src_attack/mem_transformer.py`. Its RPC
language model is not released: here it is that model with RPC-Attention in `rpc_layers`, masked in
every step.

    model = LM(LMConfig(267735, **SIZES["paper"], attn="rpc", cutoffs=(20000, 40000, 200000)))
    nats = model(tokens, targets)        # two (B, T) int64 -> (B, T); perplexity: nats.mean().exp()

B batch, T tokens in the window, C model width, H heads, V vocabulary size. Ids must be sorted by
falling frequency in the training text if `cutoffs` are used.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from attention import ATTENTIONS, PAP_SETTINGS, SelfAttention
from common import InputError, one_of, rebuild

SIZES = {
    # minutes on a CPU
    "mini": dict(context=64, embed_dim=64, depth=4, num_heads=8, mlp_dim=256),
    # 44,018,394 parameters
    "paper": dict(context=256, embed_dim=128, depth=16, num_heads=8, mlp_dim=2048),
}


@dataclass
class LMConfig:
    """Everything that rebuilds the model; weights do not tell RPC from symmetric attention."""
    vocab_size: int                   # V
    context: int = 256                # T, tokens; the longest window
    embed_dim: int = 128              # C
    depth: int = 16
    num_heads: int = 8                # H
    mlp_dim: int = 2048
    attn: str = "softmax"             # of attention.ATTENTIONS, one that can be causal
    rpc_layers: tuple = (0, 1, 2, 3)  # attn="rpc": these have RPC-Attention, others are symmetric
    pap: dict = field(default_factory=dict)     # attention.PAP_SETTINGS, and mu_over: mean|k| of
                                      # tokens "seen" (<= t), of "token" t alone; "all": it leaks
    norm: str = "post"                # the paper's x = LN(x + f(x)); pre: x + f(LN(x)), a final LN
    dropout: float = 0.1              # embedding, attention output, MLP (twice), final hidden state
    cutoffs: tuple = ()               # (): full softmax; the paper: (20000, 40000, 200000)

    def __post_init__(self):
        self.rpc_layers = tuple(sorted(self.rpc_layers)) if self.attn == "rpc" else ()
        self.cutoffs = tuple(self.cutoffs)
        self.pap = {**PAP_SETTINGS, "mu_over": "seen", **self.pap}
        one_of("attn", self.attn, ATTENTIONS.keys() - {"rpc_asym", "scaled_s"})
        one_of("norm", self.norm, ("post", "pre"))
        if not set(self.rpc_layers) <= set(range(self.depth)):
            raise InputError(f"rpc_layers={self.rpc_layers}, expected layers in "
                             f"0..{self.depth - 1}")
        if self.num_heads < 1 or self.embed_dim % 2 or self.embed_dim % self.num_heads:
            raise InputError(f"embed_dim={self.embed_dim}, expected an even multiple of "
                             f"num_heads={self.num_heads}")
        if not all(low < high for low, high in pairwise((0, *self.cutoffs, self.vocab_size))):
            raise InputError(f"cutoffs={self.cutoffs}, expected increasing ids from 1 to "
                             f"{self.vocab_size - 1}")

    @property
    def reads_the_future(self):       # a mu over all tokens
        return self.pap["mu_over"] == "all" and bool(self.rpc_layers)

    @property
    def num_tokens(self):             # as in ViTConfig
        return self.context


# --- modules --------------------------------------------------------------------------------------

def sinusoids(context, dim):
    """Number positions: [sin(p f), cos(p f)], (T, C); f_i = 10000^(-2i/C), p: T-1 down to 0."""
    p = torch.arange(context - 1, -1, -1.0)[:, None]
    f = 10000 ** (-torch.arange(0, dim, 2) / dim)
    return torch.cat([(p * f).sin(), (p * f).cos()], 1)


class Block(nn.Module):
    """Transformer block, post-norm or pre-norm; keywords go to `attention.SelfAttention`."""

    def __init__(self, dim, num_heads, mlp_dim, dropout, pre_norm, **attn):
        super().__init__()
        self.pre_norm = pre_norm
        self.norm1 = nn.LayerNorm(dim)
        self.attn = SelfAttention(dim, num_heads, proj_drop=dropout, **attn)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(OrderedDict(
            fc1=nn.Linear(dim, mlp_dim), act=nn.ReLU(), drop1=nn.Dropout(dropout),
            fc2=nn.Linear(mlp_dim, dim), drop2=nn.Dropout(dropout)))

    def forward(self, x):
        if self.pre_norm:
            x = x + self.attn(self.norm1(x))
            return x + self.mlp(self.norm2(x))
        x = self.norm1(x + self.attn(x))
        return self.norm2(x + self.mlp(x))


class LM(nn.Module):
    """Word-level language model; the input embedding is also the weight of the output layer."""

    def __init__(self, config):
        super().__init__()
        c = self.config = config
        self.embed = nn.Embedding(c.vocab_size, c.embed_dim)
        self.register_buffer("positions", sinusoids(c.context, c.embed_dim), persistent=False)
        self.drop = nn.Dropout(c.dropout)
        blocks = []                             # an RPC model is symmetric outside rpc_layers
        for i in range(c.depth):
            attn = "symmetric" if c.attn == "rpc" and i not in c.rpc_layers else c.attn
            blocks.append(Block(
                c.embed_dim, c.num_heads, c.mlp_dim, c.dropout, c.norm == "pre", attn=attn,
                pap=c.pap, causal=True, qkv_bias=False, proj_bias=False))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(c.embed_dim) if c.norm == "pre" else nn.Identity()
        self.bias = nn.Parameter(torch.zeros(c.vocab_size))
        self.cluster_weight, self.cluster_bias = None, None
        if c.cutoffs:
            self.cluster_weight = nn.Parameter(torch.zeros(len(c.cutoffs), c.embed_dim))
            self.cluster_bias = nn.Parameter(torch.zeros(len(c.cutoffs)))
        for name, p in self.named_parameters():
            if "bias" in name:
                nn.init.zeros_(p)
            else:
                nn.init.normal_(p, 1.0 if "norm" in name else 0.0, 0.02)

    def hidden(self, tokens):
        """Run all blocks: (B, T) int64, T from 1 to `context` -> (B, T, C), before the output."""
        T, c = tokens.shape[-1], self.config
        if not 1 <= T <= c.context:
            raise ValueError(f"{T} tokens in a row, expected 1 to context={c.context}")
        x = self.drop(self.embed(tokens) * math.sqrt(c.embed_dim) + self.positions[-T:])
        for block in self.blocks:
            x = block(x)
        return self.drop(self.norm(x))

    def output_layers(self):
        """List (weight, bias): the head (adaptive: one more row a cluster), then each cluster."""
        ends = pairwise((0, *self.config.cutoffs, self.config.vocab_size))
        sizes = [high - low for low, high in ends]
        weights, biases = list(self.embed.weight.split(sizes)), list(self.bias.split(sizes))
        if self.config.cutoffs:
            weights[0] = torch.cat([weights[0], self.cluster_weight])
            biases[0] = torch.cat([biases[0], self.cluster_bias])
        return list(zip(weights, biases))

    @torch._disable_dynamo              # numbers of rows depend on data; imports no compiler yet
    def nll(self, hidden, targets):
        """Compute -log p(target): (..., C), (...) int64 -> (...) nats in float32 or better.

        Adaptive softmax (Grave et al. 2017, all of one width): log p of a word in cluster i = log p
        of the cluster in the head + log p of the word in the cluster. Cluster i has the i-th logit
        from the end, as in lmtool. `LinearNLL` below keeps the memory small.
        """
        h, t = hidden.reshape(-1, hidden.shape[-1]), targets.flatten()
        cluster = torch.zeros_like(t)                                    # (N,), 0: in the head
        for c in self.config.cutoffs:
            cluster += t >= c
        (W, b), *tails = self.output_layers()
        nll = linear_nll(h, W, b, torch.where(cluster > 0, len(W) - cluster, t))
        for i, (low, (W, b)) in enumerate(zip(self.config.cutoffs, tails), 1):
            rows = (cluster == i).nonzero().squeeze(1)                   # waits for the GPU
            tail = linear_nll(h.index_select(0, rows), W, b, t[rows] - low)
            nll = nll.index_add(0, rows, tail)
        return nll.view(targets.shape)

    def forward(self, tokens, targets):
        """Compute -log p(target | tokens up to there): (B, T), (B, T) int64 -> (B, T) nats."""
        return self.nll(self.hidden(tokens), targets)

    def log_probs(self, hidden):
        """Compute log p of every word: (..., C) -> (..., V), in float32 or better."""
        parts = []
        for W, b in self.output_layers():
            logits = F.linear(hidden, W, b)
            dtype = torch.promote_types(logits.dtype, torch.float32)
            parts.append(logits.log_softmax(-1, dtype=dtype))
        head, *tails = parts
        tails = [head[..., -i, None] + tail for i, tail in enumerate(tails, 1)]
        return torch.cat([head[..., :head.shape[-1] - len(tails)], *tails], -1)

    @torch.no_grad()
    def generate(self, tokens, num_tokens, temperature=1.0, generator=None):
        """Sample num_tokens more: (B, T) int64 -> (B, T + num_tokens); call it in eval mode.

        temperature > 0 divides the log-probabilities. generator: on tokens' device. The model sees
        the last `context` tokens, computed anew for each word: positions count from the end.
        """
        c = self.config
        if c.reads_the_future:
            raise InputError("mu_over='all': each new token would change all states before it; "
                             "expected a model with mu_over='seen' or 'token'")
        for _ in range(num_tokens):
            hidden = self.hidden(tokens[:, -c.context:])[:, -1]
            scores = self.log_probs(hidden) / temperature                # (B, V)
            word = torch.multinomial(scores.softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, word], 1)
        return tokens


def lm_from_checkpoint(checkpoint):
    """Rebuild the model of a checkpoint of train_lm.py, in eval mode."""
    return rebuild(checkpoint, "train_lm.py", LM, LMConfig)


# --- the output layer in little memory ------------------------------------------------------------

CHUNK = dict(cpu=2 ** 20, cuda=2 ** 25)   # logits at a time: a CPU's cache; 128 MiB on a GPU
MIN_ROWS = 64                             # at least: each chunk adds to all of W's gradient


class LinearNLL(torch.autograd.Function):
    """nll_i = -log softmax(W h_i + b)[t_i], in chunks of rows; backwards computes logits again.

    h: (N, C), W: (V, C), b: (V,), t: (N,) int64 in [0, V); N may be 0. Returns (N,) in float32 or
    better. Of size N x V there is never anything: 26 GB for one batch of the paper. Under autocast
    the products run in its dtype.
    """

    @staticmethod
    def forward(ctx, h, W, b, t, dtype):
        ctx.dtype, wide = dtype, torch.promote_types(dtype, torch.float32)
        lse, picked = h.new_empty(2, len(h), dtype=wide)
        weight, bias = W.to(dtype), b.to(dtype)
        for i in chunks(h, len(W)):
            logits = F.linear(h[i].to(dtype), weight, bias).to(wide)
            picked[i] = logits.gather(1, t[i, None]).squeeze(1)
            lse[i] = logits.logsumexp(1)
        ctx.save_for_backward(h, W, b, t, lse)
        return lse - picked

    @staticmethod
    def backward(ctx, grad):
        """Gradients of h, W and b, in their shapes, from that of nll, (N,)."""
        h, W, b, t, lse = ctx.saved_tensors
        gh, gW, gb = torch.empty_like(h), torch.zeros_like(W), torch.zeros_like(b)
        weight, bias = W.to(ctx.dtype), b.to(ctx.dtype)
        for i in chunks(h, len(W)):
            # d nll / d logits = softmax - one-hot
            p = F.linear(h[i].to(ctx.dtype), weight, bias).to(lse.dtype)
            p = p.sub_(lse[i, None]).exp_()
            p.scatter_add_(1, t[i, None], torch.full_like(p[:, :1], -1))
            gb += grad[i] @ p
            p = p.to(ctx.dtype)
            gh[i] = grad[i, None] * (p @ weight)
            gW += p.mT @ (grad[i, None] * h[i]).to(ctx.dtype)
        return gh, gW, gb, None, None


def chunks(h, width):
    """Cut the rows of h into slices of about CHUNK numbers each, when a row holds `width`."""
    size = max(CHUNK.get(h.device.type, CHUNK["cuda"]) // width, MIN_ROWS)
    return [slice(i, i + size) for i in range(0, len(h), size)]


def linear_nll(h, W, b, t):
    """Apply `LinearNLL` in the dtype that autocast asks for, or else in h's own."""
    device = h.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else h.dtype
    return LinearNLL.apply(h, W, b, t, dtype)
