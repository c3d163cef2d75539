"""Is Scaled Attention kernel PCA? The networks on which the authors say that the test can be made.

    python -m studies.scaled --train exact_s --epochs 3   # and other flags of train_cls.py
    python -m studies.scaled --ckpt out/scaled_s_s0/*.pt                  # S against the exact S

Argument: v = G (I - 1_N) a cannot be solved for a, so the authors propose networks whose values are
v = G a and whose layer centres them: A (I - S) v (Eq. 12). S is learned, as a matrix or as alpha
times attention; --train uses the S of App. E.1 itself, g_j' / (N g_j), gradients through v and k.
"""

import sys

if not __package__:
    sys.exit("error: start this in the repository's folder, as: python -m studies.scaled")

import torch

import common
import train_cls
from studies.probe import RULES, with_rule


def train(rule, flags):
    """train_cls.py with one of RULES in every layer; its checkpoints say which (args["rule"])."""
    if rule not in RULES:
        raise ValueError(f"--train {rule}: expected one of {', '.join(RULES)}")
    sys.argv = ["train_cls.py", "--out_dir", f"out/{rule}", *flags, "--attn", "softmax"]
    get_args, build = train_cls.get_args, train_cls.build

    def marked():
        args = get_args()
        if args.resume:
            raise ValueError("--resume: a run with another rule cannot be continued")
        args.rule = rule
        return args

    def built(*about):
        model, *rest = build(*about)
        return with_rule(model, rule), *rest

    train_cls.get_args, train_cls.build = marked, built
    train_cls.main()


def main():
    if sys.argv[1:2] == ["--train"]:
        return train("".join(sys.argv[2:3]), sys.argv[3:])


if __name__ == "__main__":
    torch.set_num_threads(1)
    common.run(main)
