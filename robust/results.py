"""The evaluator's rows: read, told apart, put into words; printed as tables, written as CSV.

    python -m robust.results referee/results/robustness              # the tables of its results.jsonl
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
from robust.measures import CONDITIONS

# What every row has.
FIELDS = ("model", "kind", "checkpoint", "weights", "model_config", "recipe", "task", "data",
          "data_dir", "imagenet1k", "measure", "setting", "conditions", "images")


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
    """Tell models apart, by weights and model_config: kinds of attention may share weights."""
    return row["weights"], frozen(row["model_config"])


def group(row):
    """What the seeds of one model have in common."""
    return frozen(row["model_config"]), row["recipe"]


def key(row):
    """Tell rows apart."""
    asked = (row[k] for k in ("data", "measure", "setting", "conditions", "images"))
    return identity(row), row["data_dir"], *map(frozen, asked)


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

    A line that a kill cut short is left out. Raises ValueError naming what is no row.
    """
    path, rows = Path(path), {}
    path = path / "results.jsonl" if path.is_dir() else path
    for row in common.read_log(path):
        missing = [name for name in FIELDS if name not in row]
        if missing:
            raise ValueError(f"{path}: {str(row)[:60]} is no row of eval_robust.py: it has no "
                             f"{missing[0]}")
        rows[key(row)] = row
    return list(rows.values())


# --- a row in words ------------------------------------------------------------------------------

class Number(NamedTuple):
    """One number of a row, or one a severity."""
    name: str                        # clean, top-1
    value: np.ndarray                # (1,) or (severities,), in percent or what the name says
    share: bool                      # is it a share of the images? Then an interval goes with it


def show(setting):
    """Write 8/255 for an eps, else what identifies the setting."""
    if "eps" in setting:
        k = 255 * setting["eps"]
        whole = setting["eps"] <= 1 and abs(k - round(k)) < 1e-6
        return f"{k:.3g}/255" if whole else f"{setting['eps']:.3g}"
    if "scale" in setting:
        return f"{setting['scale']:.3g}"
    return setting.get("type", setting.get("split", ""))


def title(row):
    """Say what was measured: clean, fog, pgd 8/255."""
    if row["measure"] == "corruptions":
        return row["setting"]["type"]
    return f"{row['measure']} {show(row['setting'])}".strip()


def unit(row):
    """What row["images"] counts."""
    return "tokens" if row["measure"] == "perplexity" else "images"


def unusual(row):
    """The conditions of an attack or noise in words, if not the default: pixels, true, clip."""
    own = {k: row["conditions"][k] for k in CONDITIONS}
    attacked = "eps" in row["setting"] or row["measure"] in ("noise", "cw")
    if not attacked or own == CONDITIONS:
        return ""
    return f"{own['space']}, {own['labels']}, {'clip' if own['clip'] else 'no clip'}"


def numbers_of(row):
    """List what a row says, as `Number`s."""
    name, share = title(row), True
    if row["measure"] == "perplexity":
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
    elif row["measure"] == "corruptions":
        found = {"error": 100 - np.array(row["top1"])}
    elif row["measure"] == "imagenet_o":
        found, share = {text: row[text.lower()] for text in ("AUPR", "AUROC", "FPR95")}, False
    else:
        found = {f"after {stage}": v for stage, v in row.get("stages", {}).items()
                 if stage != "clean"}
        found |= {"top-1": row["top1"]} | ({"top-5": row["top5"]} if "top5" in row else {})
        if row["measure"] == "cw":
            found = {"top-1": row["top1"], "median L2 (pixel units)": row["median_l2"]}
            found |= {f"top-1 within L2 {r}": v for r, v in row["top1_at_l2"].items()}
    return [Number(f"{name}, {text}", np.ravel(value), share and "L2 (" not in text)
            for text, value in found.items()]


def worst_cases(rows):
    """Make rows of the worst case over attacks: an image counts that is right under each.

    One for each model and L-infinity budget at which two attacks or more were tried. Attacks on
    fewer images than others were on the first of theirs, so these are the images that count.
    """
    groups, out = {}, []
    for row in rows:
        bounded = "max_linf" in row and "eps" in row["setting"] and row["measure"] != "sld"
        if bounded and isinstance(row.get("right"), str):
            where = (identity(row), row["data"], row["data_dir"], row["setting"]["eps"],
                     frozen(row["conditions"]))
            groups.setdefault(where, []).append(row)
    for own in groups.values():
        n, names = min(row["images"] for row in own), dict.fromkeys(row["measure"] for row in own)
        right = torch.stack([unpack(row["right"], row["images"])[:n] for row in own]).all(0)
        new = dict(measure=f"worst of {', '.join(names)}", images=n, right=pack(right),
                   setting=dict(eps=own[0]["setting"]["eps"]),
                   top1=100 * int(right.sum()) / n)
        kept = {k: v for k, v in own[0].items() if k not in ("top5", "stages", "max_linf")}
        out += [kept | new] if len(own) > 1 else []
    return out


# --- the command -------------------------------------------------------------------------------

def write_csv(path, rows):
    """Write a line a number (and severity): what it is, its value, and all that a row says."""
    lines = []
    for row in rows:
        plain = {k: v for k, v in row.items() if isinstance(v, (str, int, float, bool))}
        severities = row["setting"].get("severities", [""])
        for number in numbers_of(row):
            for severity, value in zip(severities, number.value):
                lines.append(dict(name=number.name, severity=severity, value=value) | plain
                             | row["setting"] | row["conditions"])
    for line in lines:
        line.pop("right", None)
        line.pop("severities", None)
    fields = dict.fromkeys(field for line in lines for field in line)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, fields, restval="")
        writer.writeheader()
        writer.writerows(lines)


def main():
    from robust.tables import tables                      # which is made of what stands here
    p = argparse.ArgumentParser(description="Print the tables of results.jsonl files.",
                                allow_abbrev=False)
    p.add_argument("paths", nargs="+", metavar="PATH", help="files, or folders with one")
    p.add_argument("--csv", metavar="FILE", help="write a line a number there, for other programs")
    args = p.parse_args()
    rows = {}
    for path in args.paths:
        found = read_rows(path)
        if not found:
            raise ValueError(f"no rows in {path}, expected what eval_robust.py wrote")
        rows.update({key(row): row for row in found})
    kinds = {}
    for row in rows.values():
        kinds.setdefault((row["task"], row["data"]), []).append(row)
    for (task, data), own in kinds.items():
        print(f"\n{task}, {data}\n\n{tables(own)}")
    if args.csv:
        write_csv(args.csv, rows.values())
        print(f"\n{len(rows)} rows in {args.csv}")


if __name__ == "__main__":
    common.run(main)
