"""Train and measure the networks of the line: groups 1 to 5, 7 and 8 of its plan are its arms.

    python -m referee.fresh --seeds 40                 # symmetric-e8 and uniform-l0, a seed
    python -m referee.fresh --arms symmetric-e4 symmetric-e16 --seeds 40 41
    python -m referee.fresh --arms elliptical keys mom rpc2-all --seeds 0 1 2
    python -m referee.fresh --arms symmetric-e12 rpc4-l1-e12 --seeds 40 --limit 2000 \
        --data cifar10 --data_dir data/cifar10 --model nano --out_dir out/line_cifar10
    python -m referee.line --rows out/line/eval/*       # yours beside the stored ones

Symmetric attention for several times, softmax, lambda from 0 to infinity, the attentions of others,
a learning rate that is never lowered, and 24 epochs, each with torch's initialisation. What is
compared and what an outcome means was fixed before the runs: referee/results/line/plan.md.
"""

import math

import common
from referee import arms
from referee.constants import HOW, setting
from referee.line import pair_table, paired
from referee.robust_attentions import USUAL as ROBUST

BASE, RPC = dict(attn="symmetric"), setting("released", 4, 4)
RPC_ALL = setting("released", 3, 2) | dict(rpc_layers="all")
LAMBDAS = dict(zip(("0.05", "0.25", "1", "4", "inf"), (0.05, 0.25, 1, 4, math.inf)))
AVERAGE = setting("paper", 0, 1)                                    # layer 0 gives its values' mean
FLAT = dict(epochs=8, min_lr=2e-3)
LONG = dict(epochs=24, lr=4e-3)                 # of symmetric, held out; RPC's is half of it
ARMS = {
    **{f"symmetric-e{n}": BASE | dict(epochs=n) for n in (4, 6, 8, 12, 16)},
    "softmax-e8": dict(attn="softmax", epochs=8),
    "uniform-l0": AVERAGE | dict(epochs=8),
    **{f"paper-{name}-n4": setting("paper", lambd, 4) | dict(epochs=8)
       for name, lambd in LAMBDAS.items()},
    **{name: dict(attn=kind, epochs=8) for name, kind in ROBUST.items()},
    "softmax-e12": dict(attn="softmax", epochs=12), "rpc4-l1-e12": RPC | dict(epochs=12),
    "uniform-l0-e12": AVERAGE | dict(epochs=12),                    # group 4, beside symmetric-e12
    "rpc4-l1": RPC | dict(epochs=8), "rpc2-all": RPC_ALL | dict(epochs=8),
    "flat-e8": BASE | FLAT, "flat-rpc4-l1": RPC | FLAT,
    "long-symmetric": BASE | LONG, "long-rpc4-l1": RPC | LONG | dict(lr=2e-3),
    "half-symmetric": BASE | LONG | dict(lr=2e-3),
    "long-softmax": dict(attn="softmax") | LONG, "long-uniform-l0": AVERAGE | LONG,
}
PGD = "pgd eps=1/255,2/255 steps=20"


def main(argv=None):
    args, rows = arms.run(__doc__, ARMS, argv, out_dir="out/line", seeds=(20,), limit=1000,
                          measures=["clean", "corruptions", PGD], how=HOW,
                          default=["symmetric-e8", "uniform-l0"])
    print(pair_table(*paired(rows, args.limit)))


if __name__ == "__main__":
    common.run(main)
