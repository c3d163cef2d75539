"""Run training scripts in this process and read their log, checkpoint or error line."""

import contextlib
import io
import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import common


def flags(*parts, **named):
    """Return a command line as a list of words.

    Strings are split at spaces, lists are kept. x=True becomes --x, and x=False becomes --no-x.
    """
    line = [str(word) for part in parts
            for word in (part.split() if isinstance(part, str) else part)]
    for name, value in named.items():
        no = "no-" * (value is False)
        line += [f"--{no}{name}", *([] if isinstance(value, bool) else [str(value)])]
    return line


def call(function, *parts, **named):
    """Call function() with these flags as the command line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", *flags(*parts, **named)])
        return function()


def refused(script, *parts, **named):
    """Return the line "error: ..." of the script, or of argparse, with these flags."""
    err = io.StringIO()
    with pytest.raises(SystemExit) as e, contextlib.redirect_stderr(err):
        call(lambda: common.run(script.main), *parts, **named)
    line = err.getvalue().strip().splitlines()[-1] if e.value.code == 2 else str(e.value.code)
    line = line[max(line.find("error: "), 0):]
    assert line.startswith("error: ") and "\n" not in line and len(line) < 500, line
    return line


def rows(folder):
    """Return the rows of a run's log.jsonl without the first row and without speeds."""
    lines = [json.loads(line) for line in Path(folder, "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.endswith("_per_s")}
            for row in lines if "args" not in row]


def log(folder, what="loss"):
    """Return {step: value} of the rows that contain `what`; a step may occur only once."""
    found = [(row["step"], row[what]) for row in rows(folder) if what in row]
    assert len(dict(found)) == len(found), "a step is logged twice"
    return dict(found)


def assert_same_run(a, b, name="last.pt"):
    """Compare logs, weights and optimisers of two folders bit for bit."""
    assert rows(a) == rows(b)
    x, y = (common.load(Path(folder, name)) for folder in (a, b))
    assert repr([x["metrics"], x["best"]]) == repr([y["metrics"], y["best"]])   # NaN != NaN
    for weights in {"model", "trained"} & x.keys():             # "trained": with --ema
        assert x[weights].keys() == y[weights].keys()
        assert all(torch.equal(x[weights][k], y[weights][k]) for k in x[weights])
    for p, state in x["optimizer"]["state"].items():
        for k, value in state.items():
            other = y["optimizer"]["state"][p][k]
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other))


# --- data to train on -----------------------------------------------------------------------------

def make_tree():
    """Write noise images in ImageNet's layout."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 3)):
        for k in range(3):
            Path("tree", split, f"n{k}").mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (*rng.integers(20, 40, 2), 3), dtype=np.uint8)
                Image.fromarray(pixels).save(Path("tree", split, f"n{k}", f"{i}.png"))


def make_pairs(root="pairs"):
    """Write ADE20K's layout: 9 training, 5 validation images of 4 classes, with ignored pixels."""
    sizes = [(40, 60), (60, 40), (33, 70), (48, 48), (90, 30), (24, 41), (50, 61), (30, 30),
             (44, 52)]
    rng = np.random.default_rng(0)
    for split, count in (("training", 9), ("validation", 5)):
        for part in ("images", "annotations"):
            Path(root, part, split).mkdir(parents=True)
        for i, (H, W) in enumerate(sizes[:count]):
            label = rng.integers(0, 5, (4, 4), dtype=np.uint8)
            label = np.kron(label, np.ones((-(-H // 4), -(-W // 4)), np.uint8))[:H, :W]
            image = label[..., None] * [50, 20, 0] + rng.integers(0, 50, (H, W, 3))
            Image.fromarray(image.astype(np.uint8)).save(Path(root, "images", split, f"{i}.png"))
            Image.fromarray(label).save(Path(root, "annotations", split, f"{i}.png"))


def make_text(folder="text", seed=0):
    """Write WikiText's layout; the seed changes the order of the lines, not the words."""
    Path(folder).mkdir()
    for split, count in (("train", 40), ("valid", 5), ("test", 6)):
        rng = random.Random(count)
        lines = [f" the {rng.choice('cat dog cow hen'.split())} of "
                 f"{rng.choice('ann bob'.split())} saw {rng.randint(1, 9)} @-@ year old <unk> , "
                 f"and it ran . \n \n" for _ in range(count)]
        random.Random(seed).shuffle(lines)
        text = "".join(lines).split(" ")
        if split == "valid":
            rng.shuffle(text)                           # learning the order increases this loss
        Path(folder, f"wiki.{split}.tokens").write_text(" ".join(text) + " \n")
