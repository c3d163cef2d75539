"""Show that mu as printed lets a language model see future tokens, on a toy task.

    python -m studies.leak  # prints nats per seed for each kind of mu; under a minute on a CPU

The data are two sequences: eight times the word 0, followed by eight times the word 1 or eight
times the word 2. In the first half, the model has to predict the word of the second half. The first
halves are equal, so no causal model gets below ln 2 = 0.6931 nats. But mu = N x / (4 sum|K|) in
Definition 1 sums over all tokens, and mu sets the threshold of every token. So the threshold of a
token depends on future tokens. If no key reaches the threshold, S = 0 and mu has no effect.
Therefore keys start GAIN times as large as in lm.py, and every run finds this leak. With GAIN = 1,
8 of 10 runs find it.
"""

import argparse
import math

import torch

import common
from lm import LM, LMConfig

T, GAIN = 16, 4.0
MU_OVER = {"seen": "mean over tokens <= t", "token": "token t alone",
           "all": "all tokens, as printed"}


def train(mu_over, seed=0, steps=400):
    """Train one layer (C = 32, H = 2, n = 4, lambda = 4) with Adam. Returns the nats of each step.

    Tokens 1 to 7 are scored. Token 0 attends to itself alone, so the threshold cannot change its
    output.
    """
    torch.manual_seed(seed)
    model = LM(LMConfig(3, T, embed_dim=32, depth=1, num_heads=2, mlp_dim=64, dropout=0,
                        attn="rpc", rpc_layers=(0,), pap=dict(mu_over=mu_over)))
    model.blocks[0].attn.qkv.weight.data *= GAIN
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    word = torch.tensor([[1], [2]])
    first_half = torch.zeros(2, T // 2, dtype=torch.long)
    tokens = torch.cat([first_half, word.expand(2, T // 2)], 1)
    losses = []
    for _ in range(steps):
        nats = model(tokens, word.expand(2, T))[:, 1:T // 2].mean()
        optimizer.zero_grad()
        nats.backward()
        optimizer.step()
        losses.append(nats.item())
    return losses


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seeds", type=int, default=3, help="runs per kind of mu (default: 3)")
    args = p.parse_args(argv)
    chance = f"{args.seeds} seeds (chance: {math.log(2):.4f})"
    print(f"{'mu over':<32}nats of a word that only the future contains, {chance}")
    for mu_over, meaning in MU_OVER.items():
        nats = (train(mu_over, seed)[-1] for seed in range(args.seeds))
        print(f"{mu_over + ': ' + meaning:<32}{'  '.join(f'{x:.4f}' for x in nats)}", flush=True)


if __name__ == "__main__":
    common.run(main)
