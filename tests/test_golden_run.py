"""One whole run, from training to the table, has the recorded numbers."""

import re

import pytest

import eval_robust
import train_cls
from runs import call

# Recorded with PyTorch 2.14 on one thread. Other processors round differently, so a few images may
# change sides: an image is 0.5 points.
TABLE = """
| clean, top1                                  | 200 | CLEAN |
"""


def test_run_from_training_to_table(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    call(train_cls.main, "--num_images 2000 --epochs 3 --batch_size 10 --attn rpc --seed 0 --device cpu "
         "--out_dir out/run")
    call(eval_robust.main, "--ckpt out/run --limit 200 --device cpu --num_workers 0 --severities 1 4",
         ["--measures", "clean", "corruptions type=fog,contrast", "fgsm", "pgd steps=5", "--eps", "1/255", "2/255"])
    print((tmp_path / "out/run/robust/table.md").read_text())
    assert 0
