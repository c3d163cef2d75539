"""Checkpoints and logs on disk: written whole or not at all, read without running code in them."""

import argparse
import json
import os
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError

import torch


def save_checkpoint(path, checkpoint):
    """Write a dict of plain types and tensors; at every moment path is the old file or the new one.

    Raises OSError naming the file if it cannot be written (a full disk); the old one is untouched.
    """
    path = Path(path)
    tmp = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(tmp, "wb") as f:
            torch.save(checkpoint, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
    except (OSError, RuntimeError) as e:
        tmp.unlink(missing_ok=True)
        kept = "the previous one is untouched" if path.exists() else "there is none yet"
        hidden = getattr(e.__context__, "strerror", None)               # torch.save hides it
        why = hidden or getattr(e, "strerror", None) or e
        raise OSError(f"cannot write checkpoint {path} ({why}); {kept}") from None


def read_checkpoint(path):
    """The dict in a checkpoint of ours, DeiT's or the released code's; tensors on the CPU.

    Runs nothing that it holds. path: a file, a folder with last.pt in it, or an https address.
    """
    load = torch.load
    if str(path).startswith("https://"):
        load, path = torch.hub.load_state_dict_from_url, str(path)
    else:
        path = Path(path) / "last.pt" if Path(path).is_dir() else Path(path)
        if not path.exists():
            raise FileNotFoundError(f"no checkpoint at {path}")
        open(path, "rb").close()                       # a file that may not be read says so itself
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):     # the released code's args
            checkpoint = load(path, map_location="cpu", weights_only=True)
    except Exception as e:                             # what odd bytes raise depends on the bytes
        why = "truncated, or no file of torch.save"
        if isinstance(e, URLError):
            why = str(e.reason)
        elif "GLOBAL" in str(e):
            why = f"it holds {str(e).split('GLOBAL')[1].split()[0]}, which is no plain data"
        raise ValueError(f"{path} is not a readable checkpoint ({why})") from None
    if not isinstance(checkpoint, dict):
        raise ValueError(f"{path} holds a {type(checkpoint).__name__}, expected a dict of weights")
    return checkpoint


def check_run(checkpoint, path, script, *parts):
    """ValueError naming the file unless its checkpoint is of this script and holds these parts."""
    tasks = {"train_cls.py": "classification", "train_seg.py": "segmentation",
             "train_lm.py": "language modelling"}
    kinds = dict(args=dict, model=dict, model_config=dict, optimizer=dict, ema=dict, best=dict,
                 step=int, classes=list, vocab=str)
    if checkpoint.get("task") != tasks[script]:
        raise ValueError(f"{path} is not a checkpoint of {script}")
    for name in parts:
        value = checkpoint.get(name)
        if not isinstance(value, kinds[name]) or value == {}:
            raise ValueError(f"{path} is an incomplete checkpoint of {script}: it has no {name}")


@contextmanager
def naming(what):
    """Input errors within begin with `what`, the flag and the file they are about."""
    try:
        yield
    except ValueError as e:
        raise ValueError(f"{what}: {e}") from None


def write_log(path, row):
    """Append one JSON line."""
    try:
        with open(path, "a") as f:
            f.write(json.dumps(row) + "\n")
    except OSError as e:
        raise OSError(f"cannot write {path} ({e.strerror})") from None


def read_log(path):
    """The rows of a log, without one cut short by a kill; ValueError names what is no log."""
    rows = []
    try:
        lines = Path(path).read_text("utf-8").splitlines() if Path(path).exists() else []
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a log of ours: not all of it is UTF-8") from None
    for i, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if not isinstance(row, dict) or not isinstance(row.get("step", 0), int):
            raise ValueError(f"{path}, line {i}: {line[:60]}, expected an object whose step is a "
                             f"whole number")
        rows.append(row)
    return rows


def cut_log(path, step):
    """Drop what was logged after `step`: a resumed log has no step twice. Returns the rest."""
    rows = [row for row in read_log(path) if row.get("step", 0) <= step]
    tmp = Path(f"{path}.tmp")
    try:
        tmp.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.replace(tmp, path)
    except OSError as e:
        tmp.unlink(missing_ok=True)
        raise OSError(f"cannot write {path} ({e.strerror}); it is untouched") from None
    return rows
