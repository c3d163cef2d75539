"""Symmetric first, then RPC (App. E.6): does the switch make a network more robust?

    python -m referee.finetune                     # 1 CPU hour, after the start's networks
    python -m referee.finetune --rows referee/results/finetune/results.jsonl

Both arms go on from the same weights, symmetric networks of referee/robustness.py, for
three epochs on the same batches: RPC, and symmetric attention, the control that App. E.6 lacks.
Design and outcomes, fixed before the runs: referee/results/finetune/README.md.
"""

import common
from referee import arms
from referee.robustness import MEASURES

START = dict(init_from="out/robustness/symmetric_s{seed}", epochs=3, lr=2e-4, min_lr=1e-6,
             warmup_epochs=0.15)
ARMS = {"symmetric": dict(attn="symmetric", **START), "rpc4-l1": dict(attn="rpc", **START)}


def main(argv=None):
    args, rows = arms.run(__doc__, ARMS, argv, out_dir="out/finetune", seeds=(0, 1, 2),
                          measures=MEASURES, limit=500)
    print(arms.show(args, rows, ["symmetric"]))


if __name__ == "__main__":
    common.run(main)
