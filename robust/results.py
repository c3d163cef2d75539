"""The evaluator's rows: what they hold, how they are kept and read, the table of many of them.

    python -m robust.results studies/results/robustness      # the table of its results.jsonl
    python -m robust.results out/a/robust out/b/robust       # of several runs

A row is a dict of plain values: which model (model, kind, checkpoint, weights, model_config), what
was measured, in words (measure: "pgd eps=2/255 steps=20 ..."), on what (task, data, data_dir,
images, seed) and how exactly (precision), the numbers in percent (top1, top5, mean_iou, ...), which
images were right (`right`, see `unpack`), and how it came about (seconds, torch, hardware, ...).
pandas.read_json("results.jsonl", lines=True) reads all. A table has the measures down and the
models across; what all rows of a measure share is left out of its line and stands below.
"""

import argparse
import base64
import json
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

import common
from common import InputError
from robust.measures import CONDITIONS, parts
from robust.metrics import ALEXNET, mean_corruption_error, wilson

MODEL = ("weights", "model_config")             # kinds of attention may share their weights
KEY = (*MODEL, "data", "measure", "data_dir", "seed", "precision", "images")


def key(row, fields=KEY):
    """What tells rows apart; of MODEL's fields, models."""
    return json.dumps([row[name] for name in fields], sort_keys=True)


# --- on disk -------------------------------------------------------------------------------------

def pack(right):
    """Write outcomes (n,) bool as text, one bit an image: np.packbits in base64."""
    return base64.b64encode(np.packbits(right.cpu().numpy())).decode()


def unpack(text, n):
    """Read the outcomes of n images that `pack` wrote: (n,) bool."""
    packed = np.frombuffer(base64.b64decode(text), np.uint8)
    return torch.from_numpy(np.unpackbits(packed, count=n)).bool()


def read_rows(path):
    """Read the rows of a results.jsonl, or of the one in a folder: {key: row}.

    A line that a kill cut short is left out.
    """
    path = Path(path, "results.jsonl") if Path(path).is_dir() else path
    rows = common.read_log(path)
    for row in rows:
        if not row.keys() >= {*KEY}:
            raise InputError(f"{path}: {str(row)[:60]} is no row of eval_robust.py")
    return {key(row): row for row in rows}


def open_rows(path, resume, rank):
    """The rows that are in a results.jsonl, {key: row}, for more of them: its folder is made.

    InputError where there are some, unless they are to be kept: resume.
    """
    rows = read_rows(path)
    if rows and not resume:
        raise InputError(f"--out_dir {path.parent} holds results: add --resume to go on from them, "
                         "or choose another one")
    if dist.is_initialized():
        dist.barrier()                                    # all have read before one writes
    if rank == 0:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise InputError(f"--out_dir {path.parent}: {e.strerror}") from None
        with common.replacing(path) as tmp:               # a line that a kill cut short goes
            tmp.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
    return rows


def append(path, row):
    """Write a finished row to a results.jsonl, and what it says to the screen."""
    with open(path, "a") as f:
        f.write(json.dumps(row) + "\n")
    numbers = ", ".join(f"{name} {value:.2f}" for name, value in numbers_of(row).items())
    tqdm.write(f"{row['model']:28}  {row['measure']}: {numbers} ({row['seconds']:.1f} s)")


# --- the table -----------------------------------------------------------------------------------

# Fields of a row that are numbers of the table; of a list, one a severity, the mean.
NUMBERS = ("top1", "top5", "segment", "sliding", "attacked", "attacked_unswapped",
           "clean_unswapped", "pixel_accuracy", "mean_accuracy", "mean_iou", "aupr", "auroc",
           "fpr95", "lowest", "mce")
ONCE = ("top5", "pixel_accuracy")               # not where there are severities
# What a line always says of its measure, shared or not.
TOLD = ("eps", "scale", "l1", "type", "split", "of", *CONDITIONS)


def numbers_of(row):
    """{name: number} of a row; of AutoAttack also after each attack, of CW within each radius."""
    found = {name: float(np.mean(row[name])) for name in NUMBERS
             if name in row and not (name in ONCE and isinstance(row[name], list))}
    found |= {f"top1 after {stage}": share for stage, share in row.get("stages", {}).items()}
    found |= {f"top1 within L2 {r}": share for r, share in row.get("top1_at_l2", {}).items()}
    return found | ({"median_l2": row["median_l2"]} if "top1_at_l2" in row else {})


def means(rows):
    """Rows of means over ImageNet-C's 15 types, for models that have all; on ImageNet, at all five
    severities, with mCE, where AlexNet is 100 %."""
    groups = {}
    for row in rows:
        name, setting = parts(row["measure"])
        if name == "corruptions" and setting["type"] in ALEXNET:
            of_all = row["measure"].replace(f"type={setting['type']}", "type=mean")
            of = groups.setdefault(key(row | dict(measure=of_all)), {})
            of[setting["type"]] = row | dict(measure=of_all)
    for own in groups.values():
        if len(own) == len(ALEXNET):
            row = own["fog"]
            mean = {field: np.mean([one[field] for one in own.values()], 0).tolist()
                    for field in NUMBERS if field in row}
            if row["imagenet1k"] and "severities=1,2,3,4,5" in row["measure"]:
                mean["mce"] = mean_corruption_error(
                    {type_: 1 - np.mean(one["top1"]) / 100 for type_, one in own.items()})
            yield row | mean


def worst_cases(rows):
    """Rows of the worst case over attacks: an image counts that is right under each.

    One for each model and L-infinity budget at which two attacks or more were tried. Attacks on
    fewer images than others were on the first of theirs, so these are the images that count.
    """
    groups = {}
    for row in rows:
        name, setting = parts(row["measure"])
        if "max_linf" in row and "eps" in setting and isinstance(row.get("right"), str):
            how = [f"{k}={v}" for k, v in setting.items() if k in ("eps", *CONDITIONS)]
            worst = row | dict(measure=" ".join(how), images=None)
            groups.setdefault(key(worst), []).append((name, row, worst))
    for own in groups.values():
        names, tried, (worst, *_) = zip(*own)
        if len(tried) > 1:
            n = min(row["images"] for row in tried)
            right = torch.stack([unpack(row["right"], row["images"])[:n] for row in tried]).all(0)
            yield {name: worst[name] for name in (*KEY, "model", "checkpoint")} | dict(
                measure=f"worst {worst['measure']} of={','.join(dict.fromkeys(names))}",
                images=n, top1=100 * right.double().mean().item())


def table(rows):
    """Rows as Markdown: a line a number, a column a model; below it what the lines leave out."""
    columns = {key(row, MODEL): row for row in rows}
    names = [row["model"] for row in columns.values()]
    header = [row["model"] + f", {row['checkpoint']}" * (names.count(row["model"]) > 1)
              for row in columns.values()]
    rows = [*rows, *means(rows), *worst_cases(rows)]

    said, shared, lines = [], {}, {}            # a row's words; of all rows of a measure: the same
    for row in rows:
        name, *words = row["measure"].split()
        words += [f"{k}={row[k]}" for k in ("data_dir", "seed", "precision") if row[k] is not None]
        said.append((name, words))
        shared[name] = [w for w in shared.get(name, words) if w in words]
    for row, (name, words) in zip(rows, said):
        told = [w for w in words if w not in shared[name] or w.partition("=")[0] in TOLD]
        for number, value in numbers_of(row).items():
            cell = f"{value:.2f}"
            if number.startswith("top") and "type=mean" not in words:     # a share of the images
                low, high = wilson(value / 100, row["images"])
                cell += f" ({100 * low:.1f}-{100 * high:.1f})"
            line = " ".join([name, *told]) + f", {number}", row["images"]
            lines.setdefault(line, {})[key(row, MODEL)] = cell
    body = [[*line, *(cells.get(model, "") for model in columns)] for line, cells in lines.items()]
    below = [f"- {name}: {' '.join(words)}" for name, words in shared.items()]
    counted = "tokens" if "sliding" in rows[0] else "images"
    return "\n".join([common.table(body, ["measure", counted, *header]), "", *below, NOTE])


NOTE = """\
- Accuracies in per cent, of several severities the mean; (low-high): Wilson's 95 % interval over
  images, which are a random choice, the same for all models.
- One network of a kind ranks nothing: networks that differ in the seed alone differ by points.
  Train several, and compare them with studies.arms."""


def main():
    p = argparse.ArgumentParser(description="Print the tables of results.jsonl files.",
                                allow_abbrev=False)
    p.add_argument("paths", nargs="+", metavar="PATH", help="files, or folders with one")
    args, rows, tables = p.parse_args(), {}, {}
    for path in args.paths:
        rows |= read_rows(path)
    if not rows:
        raise InputError(f"no rows in {', '.join(args.paths)}")
    for row in rows.values():
        tables.setdefault((row["task"], row["data"]), []).append(row)
    for (task, data), own in tables.items():
        print(f"\n{task}, {data}\n\n{table(own)}")


if __name__ == "__main__":
    common.run(main)
