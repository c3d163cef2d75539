"""The evaluator's rows: written, read, told apart, their numbers; tables and CSV of several runs.

    python -m robust.results referee/results/robustness      # the table of its results.jsonl
    python -m robust.results out/a/robust out/b/robust --csv all.csv      # of several, for others

A row is a dict of plain values: which model (model, kind, checkpoint, weights, model_config,
recipe), what was measured (task, data, data_dir, measure, setting, conditions, images), the numbers
in percent (top1, top5, mean_iou, ...), which images were right (`right`, see `unpack`), and how it
came about (seconds, torch, hardware, ...).
"""

import argparse
import base64
import csv
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import common
from common import InputError
from robust.measures import CONDITIONS
from robust.metrics import ALEXNET, mean_corruption_error, wilson

# What identifies a row, its model first.
FIELDS = ("weights", "model_config", "data", "data_dir", "measure", "setting", "conditions",
          "images")


# --- which model, which row ----------------------------------------------------------------------

def checksum(data):
    """Give eight hexadecimal digits for bytes."""
    return f"{zlib.crc32(data):08x}"


def weights_of(state_dict):
    """Give a checksum of a model's weights."""
    tensors = (t.cpu().contiguous().numpy().tobytes() for t in state_dict.values())
    return checksum(b"".join(tensors))


def frozen(value):
    """The same dict or list as tuples, which can be a key."""
    if isinstance(value, dict):
        return tuple(sorted((k, frozen(v)) for k, v in value.items()))
    return tuple(map(frozen, value)) if isinstance(value, (list, tuple)) else value


def identity(row):
    """What differs between models: weights and model_config (kinds of attention share weights)."""
    return row["weights"], frozen(row["model_config"])


def group(row):
    """What the seeds of one model have in common."""
    return frozen(row["model_config"]), row["recipe"]


def key(row):
    """What differs between rows."""
    return tuple(frozen(row[field]) for field in FIELDS)


# --- on disk -------------------------------------------------------------------------------------

def pack(right):
    """Write outcomes (n,) bool as text, one bit an image: np.packbits in base64."""
    return base64.b64encode(np.packbits(right.cpu().numpy())).decode()


def unpack(text, n):
    """Read the outcomes of n images that `pack` wrote: (n,) bool."""
    packed = np.frombuffer(base64.b64decode(text), np.uint8)
    return torch.from_numpy(np.unpackbits(packed, count=n)).bool()


def read_rows(path):
    """Read the rows of a results.jsonl, or of the one in a folder: a list; of twins the later one.

    A line that a kill cut short is left out.
    """
    path, rows = Path(path), {}
    path = path / "results.jsonl" if path.is_dir() else path
    for row in common.read_log(path):
        missing = [name for name in FIELDS if name not in row]
        if missing:
            raise InputError(f"{path}: {str(row)[:60]} is no row of eval_robust.py: it has no "
                             f"{missing[0]}")
        rows[key(row)] = row
    return list(rows.values())


# --- what a row says -----------------------------------------------------------------------------

class Number(NamedTuple):
    """One number of a row, or one a severity."""
    name: str                        # clean, top-1
    value: np.ndarray                # (1,) or (severities,), in percent or what the name says
    share: bool                      # is it a share of the images? Then an interval goes with it

    def interval(self, images, value=None):
        """Wilson's 95 % interval over so many images, in percent, of the mean or of a value."""
        value = self.value.mean() if value is None else value
        return [100 * end for end in wilson(value / 100, images)] if self.share else None


def show(setting):
    """Write 8/255 for an eps, else what identifies the setting."""
    value = setting.get("eps", setting.get("scale", setting.get("l1")))
    if value is None:
        return setting.get("type", setting.get("split", ""))
    k = 255 * value
    whole = "eps" in setting and abs(k - round(k)) < 1e-6
    return f"{k:.3g}/255" if whole else f"{value:.3g}"


def title(row):
    """Say what was measured: clean, fog, pgd 8/255."""
    if row["measure"] == "corruptions":
        return row["setting"]["type"]
    return f"{row['measure']} {show(row['setting'])}".strip()


def unusual(row):
    """The conditions of an attack in words, if not the default: pixels, true, clip."""
    own = {k: row["conditions"][k] for k in CONDITIONS}
    if "max_linf" not in row or own == CONDITIONS:
        return ""
    return f"{own['space']}, {own['labels']}, {'clip' if own['clip'] else 'no clip'}"


def numbers_of(row):
    """List what a row says, as `Number`s."""
    name, share = title(row), True
    if "means" in row:
        found, share = row["means"], False
    elif row["measure"] == "perplexity":
        stride, share = row["setting"]["stride"], False
        found = {"segment-wise": row["segment"], f"sliding, stride {stride}": row["sliding"],
                 "attacked": row["attacked"],
                 "attacked, words not swapped": row["attacked_unswapped"],
                 "clean, the same words": row["clean_unswapped"]}
    elif "mean_iou" in row:
        share = False
        found = {"mean accuracy": row["mean_accuracy"], "mean IoU": row["mean_iou"]}
        if row["measure"] == "clean":
            found = {"pixel accuracy": row["pixel_accuracy"], **found}
    elif row["measure"] == "imagenet_o":
        found, share = {text: row[text.lower()] for text in ("AUPR", "AUROC", "FPR95")}, False
    else:
        found = {f"after {stage}": v for stage, v in row.get("stages", {}).items()
                 if stage != "clean"}
        found["top-1"] = row["top1"]
        if "top5" in row and row["measure"] not in ("corruptions", "cw"):
            found["top-5"] = row["top5"]
        found |= {f"top-1 within L2 {r}": v for r, v in row.get("top1_at_l2", {}).items()}
    numbers = [Number(f"{name}, {text}", np.ravel(v), share) for text, v in found.items()]
    if row["measure"] == "cw":
        median = np.ravel(row["median_l2"])
        numbers.append(Number(f"{name}, median L2 (pixel units)", median, False))
    return numbers


# --- rows made of rows ---------------------------------------------------------------------------

MEAN = {"top-1": "top1", "mean accuracy": "mean_accuracy", "mean IoU": "mean_iou"}


def means(rows):
    """Rows of the mean over ImageNet-C's 15 types, for models that have all; on ImageNet, at all
    five severities, with mCE, where AlexNet is 100 %."""
    groups = {}
    for row in rows:
        if row["measure"] == "corruptions":
            rest = {k: v for k, v in row["setting"].items() if k != "type"}
            where = key(dict(row, setting=rest))
            groups.setdefault(where, {})[row["setting"]["type"]] = row
    out = []
    for found in groups.values():
        own = [found[name] for name in ALEXNET if name in found]
        if len(own) < len(ALEXNET):
            continue
        rest = {k: v for k, v in own[0]["setting"].items() if k != "type"}
        new = dict(own[0], measure="mean", setting=dict(type="of the 15", **rest), means={
            text: np.mean([row[field] for row in own], 0) for text, field in MEAN.items()
            if field in own[0]})
        if own[0].get("imagenet1k") and rest["severities"] == [1, 2, 3, 4, 5]:
            new["means"]["mCE"] = mean_corruption_error(
                {row["setting"]["type"]: 1 - np.mean(row["top1"]) / 100 for row in own})
        out.append(new)
    return out


def worst_cases(rows):
    """Rows of the worst case over attacks: an image counts that is right under each.

    One for each model and L-infinity budget at which two attacks or more were tried. Attacks on
    fewer images than others were on the first of theirs, so these are the images that count.
    """
    groups, out = {}, []
    for row in rows:
        if "max_linf" in row and "eps" in row["setting"] and isinstance(row.get("right"), str):
            where = dict(row, measure="", setting=row["setting"]["eps"], images=0)
            groups.setdefault(key(where), []).append(row)
    for own in groups.values():
        n, names = min(row["images"] for row in own), dict.fromkeys(row["measure"] for row in own)
        right = torch.stack([unpack(row["right"], row["images"])[:n] for row in own]).all(0)
        new = dict(own[0], measure=f"worst of {', '.join(names)}", images=n, right=pack(right),
                   setting=dict(eps=own[0]["setting"]["eps"]), top1=100 * int(right.sum()) / n)
        new = {k: v for k, v in new.items() if k not in ("top5", "stages")}
        out += [new] if len(own) > 1 else []
    return out


# --- the command -------------------------------------------------------------------------------

def write_csv(path, rows):
    """Write a line a number (and severity): what it is, its value and interval, and all that a row
    says."""
    lines = []
    for row in rows:
        plain = {k: v for k, v in row.items() if isinstance(v, (str, int, float)) and k != "right"}
        severities = row["setting"].get("severities", [""])
        setting = {k: v for k, v in row["setting"].items() if k != "severities"}
        for number in numbers_of(row):
            for severity, value in zip(severities, number.value):
                low, high = number.interval(row["images"], value) or ("", "")
                lines.append(dict(name=number.name, severity=severity, value=value, low=low,
                                  high=high, **plain) | setting | row["conditions"])
    fields = dict.fromkeys(field for line in lines for field in line)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, fields, restval="")
        writer.writeheader()
        writer.writerows(lines)


def main():
    from robust.tables import table                       # which is made of what stands here
    p = argparse.ArgumentParser(description="Print the tables of results.jsonl files.",
                                allow_abbrev=False)
    p.add_argument("paths", nargs="+", metavar="PATH", help="files, or folders with one")
    p.add_argument("--csv", metavar="FILE", help="write a line a number there, for other programs")
    args = p.parse_args()
    rows = {key(row): row for path in args.paths for row in read_rows(path)}
    if not rows:
        raise InputError(f"no rows in {', '.join(args.paths)}")
    kinds = {}
    for row in rows.values():
        kinds.setdefault((row["task"], row["data"]), []).append(row)
    for (task, data), own in kinds.items():
        print(f"\n{task}, {data}\n\n{table(own)}")
    if args.csv:
        write_csv(args.csv, rows.values())
        print(f"\n{len(rows)} rows in {args.csv}")


if __name__ == "__main__":
    common.run(main)
