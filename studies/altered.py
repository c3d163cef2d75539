"""Networks of train_cls.py whose attention is not of attention.py: trained, resumed, recognised.

A checkpoint's args["study"] names the module that can rebuild it; everything else refuses it. No
study itself.
"""

import sys
from unittest.mock import patch

import common
import train_cls


def train(flags, change, **marks):
    """train_cls.py; change(model) gives it another attention before its first step.

    marks: what its checkpoints remember of that in their args. ValueError: --resume names a run
    with other marks.
    """
    get_args, build = train_cls.get_args, train_cls.build

    def marked():
        args = get_args()
        theirs = common.load(args.resume)["args"] if args.resume else marks
        for name, value in marks.items():
            if theirs.get(name) != value:
                raise ValueError(f"--resume {args.resume}: trained with {name} {theirs.get(name)}, "
                                 f"not {value}")
        vars(args).update(marks)
        return args

    def changed(*about):
        model, *rest = build(*about)
        return change(model), *rest

    sys.argv = ["train_cls.py", *flags]
    with patch.multiple(train_cls, get_args=marked, build=changed):
        train_cls.main()


def resumed(flags):
    """Do these flags continue a run, which has its folder?"""
    return any(flag.split("=")[0] == "--resume" for flag in flags)


def plain(checkpoint):
    """The checkpoint as one of train_cls.py: who takes it puts the attention in again."""
    return checkpoint | dict(args=checkpoint["args"] | dict(study=None))
