"""The paper's language model for WikiText-103, with any causal attention of attention.py.

Paper: section 4.2, Table 3 and App. A.4 of Teo & Nguyen 2024. Architecture and output layer follow
`IDSIA/lmtool-fwp` (src/mem_transformer.py, src/utils/proj_adaptive_softmax.py), the code base that
the paper names. Symmetric attention follows `rachtsy/KPCA-S:lm/src_attack/mem_transformer.py`. The
authors did not release an RPC language model. Ours is the symmetric model with RPC-Attention in
`rpc_layers`. Every step of PAP (Principal Attention Pursuit) has a causal mask.

    model = LM(LMConfig(267735, **LM_SIZES["paper"], attn="rpc", cutoffs=(20000, 40000, 200000)))
    nats = model(tokens, targets)        # two (B, T) int64 -> (B, T); perplexity: nats.mean().exp()

B batch, T tokens in the window, C model width, H heads, V vocabulary size. With `cutoffs`, token
ids must be sorted by falling frequency in the training text.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from attention import SelfAttention, complete_attention, eval_mode, layer_pattern
from common import InputError, at_least_float32, check_task

LM_SIZES = {
    # trains in minutes on a CPU
    "mini": dict(context=64, embed_dim=64, depth=4, num_heads=8, mlp_dim=256),
    # 44,018,394 parameters
    "paper": dict(context=256, embed_dim=128, depth=16, num_heads=8, mlp_dim=2048),
}
# Constants of the output layer.
MAX_LOGITS = 2 ** 28                      # of a full softmax in one piece: 1 GiB in float32
CHUNK = dict(cpu=2 ** 20, cuda=2 ** 25)   # logits per chunk: fit a CPU's cache; 128 MiB on a GPU
MIN_ROWS = 64                             # at least this many rows per chunk: each chunk computes a
                                          # gradient of all of W


@dataclass
class LMConfig:
    """Settings that rebuild an LM. An RPC LM and a symmetric LM have the same parameters."""
    vocab_size: int                   # V
    context: int = 256                # T, tokens; the longest window
    embed_dim: int = 128              # C
    depth: int = 16
    num_heads: int = 8                # H
    mlp_dim: int = 2048
    attn: str = "softmax"             # a name in attention.ATTENTIONS or LAYER_PATTERNS
    rpc_layers: tuple = (0, 1, 2, 3)  # layers with RPC-Attention, counted from 0
    pap: dict = field(default_factory=dict)     # n_iter, lambd, form, mu_over: see SelfAttention;
                                      # with mu_over="all" the model reads the future
    dropout: float = 0.1              # rate after the embedding, after attention, twice in the MLP,
                                      # and on the last hidden state
    cutoffs: tuple = ()               # first id of each cluster of rare words, in the paper
                                      # (20000, 40000, 200000); (): softmax over all words

    def __post_init__(self):
        complete_attention(self)
        self.cutoffs = tuple(self.cutoffs)              # equal configs, also if made from lists
        for low, high in pairwise((0, *self.cutoffs, self.vocab_size)):
            if low >= high:
                raise InputError(f"cutoffs {self.cutoffs}: expected increasing ids "
                                 f"from 1 to {self.vocab_size - 1}")


# --- modules --------------------------------------------------------------------------------------

def sinusoids(context, dim):
    """Return position codes [sin(p f), cos(p f)], (T, C), with f_i = 10000^(-2i/C).

    The position p counts from the end of the window: 0 for its last token.
    """
    p = torch.arange(context - 1, -1, -1.0)[:, None]
    f = 10000 ** (-torch.arange(0, dim, 2) / dim)
    return torch.cat([(p * f).sin(), (p * f).cos()], 1)


class Block(nn.Module):
    """Post-norm transformer block, (B, T, C) in and out, as in the paper: LN(x + f(x)).

    settings: other keywords of attention.SelfAttention.
    """

    def __init__(self, dim, num_heads, mlp_dim, dropout, **settings):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = SelfAttention(dim, num_heads, proj_drop=dropout, **settings)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(OrderedDict(
            fc1=nn.Linear(dim, mlp_dim), act=nn.ReLU(), drop1=nn.Dropout(dropout),
            fc2=nn.Linear(mlp_dim, dim), drop2=nn.Dropout(dropout)))

    def forward(self, x):
        x = self.norm1(x + self.attn(x))
        return self.norm2(x + self.mlp(x))


class LM(nn.Module):
    """Word-level language model; the input embedding is also the weight of the output layer."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        c = config
        self.adaptive = AdaptiveSoftmax(c.cutoffs, c.embed_dim) if c.cutoffs else None
        self.embed = nn.Embedding(c.vocab_size, c.embed_dim)
        positions = sinusoids(c.context, c.embed_dim)
        self.register_buffer("positions", positions, persistent=False)
        self.drop = nn.Dropout(c.dropout)

        inside, outside = layer_pattern(c.attn)
        self.blocks = nn.ModuleList()
        for i in range(c.depth):
            name = inside if i in c.rpc_layers else outside
            block = Block(c.embed_dim, c.num_heads, c.mlp_dim, c.dropout, attn=name, pap=c.pap,
                          causal=True, num_tokens=c.context, qkv_bias=False, proj_bias=False)
            self.blocks.append(block)
        self.bias = nn.Parameter(torch.zeros(c.vocab_size))
        # Draw weights with std 0.02 around 0, and around 1 in norms. Biases are 0. Parameters that
        # an attention defines itself, such as S of Scaled Attention, stay unchanged.
        for m in self.modules():
            if isinstance(m, AdaptiveSoftmax):
                nn.init.normal_(m.cluster_weight, 0.0, 0.02)
            if isinstance(m, (nn.Linear, nn.Embedding)):
                nn.init.normal_(m.weight, 0.0, 0.02)
            if isinstance(m, nn.LayerNorm):
                nn.init.normal_(m.weight, 1.0, 0.02)
            if isinstance(m, nn.Linear) and m.bias is not None:
                nn.init.zeros_(m.bias)

    def hidden(self, tokens):
        """Return the last hidden states: (B, T) int64, T from 1 to `context` -> (B, T, C)."""
        T = tokens.shape[-1]
        x = self.embed(tokens) * math.sqrt(self.config.embed_dim) + self.positions[-T:]
        x = self.drop(x)                                                # (B, T, C)
        for block in self.blocks:
            x = block(x)
        return self.drop(x)

    def forward(self, tokens, targets):
        """Compute -log p(targets[t] | tokens[0..t]): (B, T), (B, T) int64 -> (B, T) nats."""
        return self.nll(self.hidden(tokens), targets)

    def nll(self, hidden, targets):
        """Compute the cross-entropy: (..., C), (...) int64 -> (...) nats, float32 or better."""
        weight, bias = self.embed.weight, self.bias
        if self.adaptive:
            return self.adaptive.nll(hidden, targets, weight, bias)
        num_logits = targets.numel() * len(weight)              # one per target and word
        if num_logits <= MAX_LOGITS:
            return linear_nll(hidden, weight, bias, targets)
        nats = chunked_nll(hidden.flatten(0, -2), weight, bias, targets.flatten())
        return nats.view(targets.shape)

    def log_probs(self, hidden):
        """Compute log p of every word: (..., C) -> (..., V), in float32 or better."""
        if self.adaptive:
            return self.adaptive.log_probs(hidden, self.embed.weight, self.bias)
        return at_least_float32(F.linear(hidden, self.embed.weight, self.bias)).log_softmax(-1)

    @torch.no_grad()
    def generate(self, tokens, num_tokens, temperature=1.0, generator=None):
        """Sample num_tokens more words: (B, T) int64 -> (B, T + num_tokens); call in eval mode.

        temperature: above 0; divides the log-probabilities. generator: a torch.Generator on the
        device of tokens. Earlier results cannot be reused, because positions count from the end.
        """
        for _ in range(num_tokens):
            hidden = self.hidden(tokens[:, -self.config.context:])[:, -1]
            scores = self.log_probs(hidden) / temperature                # (B, V)
            word = torch.multinomial(scores.softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, word], 1)
        return tokens


def lm_from_checkpoint(checkpoint):
    """Rebuild the LM from a checkpoint of train_lm.py, in eval mode."""
    check_task(checkpoint, "language modelling")
    model = LM(LMConfig(**checkpoint["model_config"]))
    model.load_state_dict(checkpoint["model"])
    return model.eval()


@torch.no_grad()
def depends_on_later_words(model):
    """Return whether the hidden state of a word depends on later words, by running the model.

    The model reads two texts that agree in the first half and differ in every later word. The
    hidden states of the first half must agree, up to rounding. PAP with mu_over="all" is found only
    if S is not zero, which can need some training.
    """
    c = model.config
    if c.context < 2:
        raise InputError(f"context={c.context}, expected 2 tokens or more: with 1 token "
                         "there is no earlier word to attend to")
    half = c.context // 2
    generator = torch.Generator().manual_seed(0)        # leaves PyTorch's own generator alone
    text = torch.randint(c.vocab_size, (2, c.context), generator=generator)
    other = text.clone()
    other[:, half:] = (text[:, half:] + c.vocab_size // 2) % c.vocab_size
    device = model.embed.weight.device
    with eval_mode(model):
        hidden = model.hidden(text.to(device))[:, :half]
        other_hidden = model.hidden(other.to(device))[:, :half]
    difference = (hidden - other_hidden).abs().amax()
    return bool(difference > 1e-5 * hidden.abs().amax())


# --- adaptive softmax: a large vocabulary in little time and memory -------------------------------

class AdaptiveSoftmax(nn.Module):
    """Output layer with clusters of rare words (Grave et al. 2017). Every cluster has width C.

    The head has one logit per word below the first cutoff and one logit per cluster: cluster i
    (from 1) has the i-th logit from the end, as in lmtool. The log p of a rare word is the log p of
    its cluster plus the log p of the word within the cluster. So most tokens cost a softmax over
    20,000 words instead of 267,735. weight (V, C): the embedding. bias: (V,).
    """

    def __init__(self, cutoffs, dim):
        super().__init__()
        self.cutoffs = cutoffs
        self.cluster_weight = nn.Parameter(torch.zeros(len(cutoffs), dim))
        self.cluster_bias = nn.Parameter(torch.zeros(len(cutoffs)))

    def layers(self, weight, bias):
        """Return [(weight, bias), ...] of the head and of each cluster."""
        sizes = [high - low for low, high in pairwise((0, *self.cutoffs, len(weight)))]
        W, *weights = weight.split(sizes)
        b, *biases = bias.split(sizes)
        W = torch.cat([W, self.cluster_weight])
        b = torch.cat([b, self.cluster_bias])
        return [(W, b), *zip(weights, biases)]

    def nll(self, hidden, targets, weight, bias):
        """Compute -log p(target): (..., C), (...) int64 -> (...) nats in float32 or better.

        Do not use torch.compile on this function, because shapes inside depend on the targets.
        """
        h = hidden.reshape(-1, hidden.shape[-1])
        t = targets.flatten()
        cluster = sum((t >= c).long() for c in self.cutoffs)            # (N,), 0: in the head
        (W, b), *tails = self.layers(weight, bias)
        nll = chunked_nll(h, W, b, torch.where(cluster > 0, len(W) - cluster, t))
        # split needs the sizes on the CPU, so tolist waits for the GPU.
        sizes = [(cluster == i).sum() for i in range(1 + len(tails))]
        sizes = torch.stack(sizes).tolist()
        _, *rows = cluster.argsort(stable=True).split(sizes)
        for low, (tail_W, tail_b), r in zip(self.cutoffs, tails, rows):
            tail = chunked_nll(h.index_select(0, r), tail_W, tail_b, t[r] - low)
            nll = nll.index_add(0, r, tail)
        return nll.view(targets.shape)

    def log_probs(self, hidden, weight, bias):
        """Compute log p of every word: (..., C) -> (..., V), in float32 or better."""
        head, *tails = (at_least_float32(F.linear(hidden, W, b)).log_softmax(-1)
                        for W, b in self.layers(weight, bias))
        tails = [head[..., -i, None] + tail for i, tail in enumerate(tails, 1)]
        return torch.cat([head[..., :head.shape[-1] - len(tails)], *tails], -1)


def linear_nll(h, W, b, t):
    """Compute the cross-entropy of the logits h W^T + b and targets t.

    h (..., C), W (V, C), b (V,), t (...) -> (...), in float32 or better.
    A target that is no word is an error.
    """
    logits = at_least_float32(F.linear(h, W, b)).flatten(0, -2)                  # (N, V)
    no_target = 2 ** 31     # so nothing is ignored; by default, a target of -100 has the loss 0
    nats = F.cross_entropy(logits, t.flatten(), reduction="none", ignore_index=no_target)
    return nats.view(t.shape)


def chunked_nll(h, W, b, t):
    """Compute linear_nll of h (N, C) and t (N,) without storing all (N, V) logits.

    The logits of one batch of the paper take 26 GB. This function computes them in chunks of rows,
    and again in the backward pass. N may be 0.
    """
    # In autocast, each call of nll casts W to bf16, and casts the gradient of W back to float32. So
    # the gradients of the chunks are added in float32.
    def nll(h, t):
        return linear_nll(h, W, b, t)

    size = max(CHUNK.get(h.device.type, CHUNK["cuda"]) // len(W), MIN_ROWS)
    chunks = zip(h.split(size), t.split(size))
    nats = [checkpoint(nll, rows, targets, use_reentrant=False, preserve_rng_state=False)
            for rows, targets in chunks]
    return torch.cat(nats)
