r"""Does RPC make a network more robust, and is it the robust part that does it?

    python -m referee.robustness                    # scenes: 3 hours on 2 idle CPU cores
    python -m referee.robustness --no-train         # only what has finished so far
    python -m referee.robustness --seeds 0 --epochs 3 --out_dir out/first_look
    python -m referee.robustness --rows referee/results/robustness/results.jsonl   # seconds
    python -m referee.robustness --data cifar10 --data_dir data/cifar10 --model nano \
        --epochs 12 --out_dir out/robustness_cifar10

The arms are one network but for its attention. Some lack a part of RPC-Attention: what is left of
its effect says which part has it. Those of referee/robust_attentions.py are arms, too; with
-all they attend in every layer. How a study runs: referee/arms.py.
"""

import math

import common
from referee import arms
from referee.robust_attentions import USUAL as ROBUST

USUAL = {                                                           # flags of train_cls.py
    "softmax": dict(attn="softmax", init="trunc_normal"),               # reference
    "symmetric": dict(attn="symmetric"),                                # the baseline
    "rpc4-l1": dict(attn="rpc", n_iter=4),                              # the paper's model
    "rpc2-all": dict(attn="rpc", rpc_layers="all", n_iter=2, lambd=3),  # its other model
    "no-shrink": dict(attn="rpc", n_iter=4, lambd=math.inf),            # no sparse part
    "clamp": dict(attn="rpc", n_iter=1, lambd=0.5),   # no iteration; lambda by held-out images
    "admm": dict(attn="rpc", n_iter=4, form="admm"),                    # right constants
}
OTHERS = {name: dict(attn=kind, init="trunc_normal" if name == "elliptical" else "default")
          for name, kind in ROBUST.items()}
ARMS = USUAL | OTHERS | {f"{name}-all": flags | dict(rpc_layers="all")
                         for name, flags in OTHERS.items() if name != "elliptical"}
MEASURES = ["clean", "corruptions", "fgsm eps=1/255,2/255", "pgd eps=1/255,2/255 steps=20",
            "apgd eps=1/255,2/255", "adaptive_pgd eps=2/255"]


def main(argv=None):
    args, rows = arms.run(__doc__, ARMS, argv, out_dir="out/robustness", seeds=(0, 1, 2),
                          measures=MEASURES, limit=500, default=list(USUAL))
    print(arms.show(args, rows, [arm for arm in ARMS if ARMS[arm]["attn"] != "rpc"]))


if __name__ == "__main__":
    common.run(main)
