"""What does RPC-Attention cost a language model? A training step beside a plain block's.

    python -m studies.language_cost                         # a minute on a CPU
    python -m studies.language_cost --clock cpu --threads 1

"plain" is the same network with causal self-attention as nanoGPT writes it, the yardstick for what
attention.py's module costs by itself. One more step in one of 4 layers weighs more than in a ViT of
12: the model is small, its windows short. Four iterations in layer 0; LM-mini with 17,510 words.
"""

import argparse
import sys
from functools import partial
from statistics import median

if not __package__:
    sys.exit("error: start this in the repository's folder, as: python -m studies.language_cost")

import torch
import torch.nn.functional as F
from torch import nn

import common
from lm import LM, SIZES, LMConfig
from studies.cost import about, alternate, ratio, start, timing_flags
from studies.tables import report

WORDS, CUTOFFS = 17510, (2000, 10000)                                   # a small WikiText
KINDS = {"plain": "softmax", "softmax": "softmax", "symmetric": "symmetric",
         "rpc 4iter/layer1": "rpc"}


class PlainAttention(nn.Module):
    """Causal self-attention as nanoGPT writes it, without biases and dropout: the yardstick."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        B, T, C = x.shape
        heads = (B, T, self.num_heads, C // self.num_heads)
        q, k, v = (t.view(heads).transpose(1, 2) for t in self.qkv(x).split(C, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


def build(name):
    """LM-mini with the attention of this name."""
    size = SIZES["mini"]
    model = LM(LMConfig(WORDS, **size, attn=KINDS[name], rpc_layers=(0,), n_iter=4,
                        cutoffs=CUTOFFS, dropout=0))
    for block in model.blocks if name == "plain" else ():
        block.attn = PlainAttention(size["embed_dim"], size["num_heads"])
    return model


def training_step(model, text):
    """Forward and backward pass. text: (B, T + 1) int64."""
    model.zero_grad(set_to_none=True)
    with common.autocast(text.device, text.is_cuda):
        loss = model(text[:, :-1], text[:, 1:]).mean()
    loss.backward()


def main():
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--batch_size", type=common.number(int, 1), default=16, help="windows a step")
    args = timing_flags(p).parse_args()
    device, context = start(args), SIZES["mini"]["context"]
    text = torch.randint(WORDS, (args.batch_size, context + 1), device=device)
    steps = {name: partial(training_step, build(name).to(device), text) for name in KINDS}
    times = alternate(args, device, steps)

    rows = []
    for name, t in times.items():
        rows.append({"model": name, "step ms": 1e3 * median(t),
                     "tokens/s": args.batch_size * context / median(t),
                     "to plain": ratio(times, name, "plain"),
                     "to symmetric": ratio(times, name, "symmetric")})
    title = f"LM-mini, batches of {args.batch_size} windows of {context} tokens"
    tables = {"A training step, forward and backward": list(rows[0])}
    report(f"{title}, {about(args)}", device, rows, tables, args.out)


if __name__ == "__main__":
    common.run(main)
