"""Read and write the rows of eval_robust.py (results.jsonl); write tables in Markdown and CSV.

    rows = read_rows("out/first/robust")                    # {key: row}
    print(rows_table(list(rows.values())))

A row is a dict of plain values:
    model     model (its name), kind (of attention), checkpoint (file), weights (their checksum),
              model_config
    measure   name, settings ({setting: value}), seed, precision
    data      task, data, data_dir, crop_pct, images (the number of images, or tokens of a text)
    numbers   top1, mean_iou, ... in per cent; sliding, ... (perplexities); right, one bit per image
    run       seconds, date, commit, hardware, processes, ...

pandas.read_json("results.jsonl", lines=True) reads all rows.
"""

import base64
import csv
import json
from pathlib import Path

import common
import numpy as np
import torch
import torch.distributed as dist

from common import InputError
from robust import metrics
from robust.corruptions import NAMES

# Fields that identify a model: its weights, and its configuration, because two models with equal
# weights can differ in the attention.
MODEL = ("weights", "model_config")
# Fields that identify a row.
KEY = (*MODEL, "data", "name", "settings", "data_dir", "seed", "precision", "images", "crop_pct")


def row_key(row, fields=KEY):
    """Return the key of a row, or of its model with fields=MODEL: the fields' values as text."""
    return json.dumps([row.get(name) for name in fields], sort_keys=True)


def pack(right):
    """Return (n,) bool, True for a correct answer, as text: one bit per image, in base64."""
    return base64.b64encode(np.packbits(right.cpu().numpy())).decode()


def unpack(text, n):
    """Return (n,) bool from the text that `pack` returned for n images."""
    packed = np.frombuffer(base64.b64decode(text), np.uint8)
    return torch.from_numpy(np.unpackbits(packed, count=n)).bool()


def read_rows(path):
    """Return {row_key(row): row} of a results.jsonl or its folder, without an incomplete line."""
    path = Path(path, "results.jsonl") if Path(path).is_dir() else Path(path)
    rows = common.read_log(path)
    for row in rows:
        if not isinstance(row, dict) or not row.keys() >= {*KEY} - {"crop_pct"}:
            raise InputError(f"{path}: {str(row)[:60]} is not a row of this eval_robust.py; "
                             f"choose another file or folder")
    return {row_key(row): row for row in rows}


def open_rows(path, rank):
    """Read the rows of a results.jsonl, {row_key(row): row}, {} for a new file; make its folder.

    rank: this process's number. Only rank 0 writes.
    """
    rows = read_rows(path)
    if dist.is_initialized():
        dist.barrier()                                    # rank 0 waits for all readers
    if rank == 0:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise InputError(f"--out_dir {path.parent}: {e.strerror}") from None
        with common.replacing(path) as tmp:               # removes an incomplete last line
            tmp.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
    return rows


# --- settings in words: "pgd eps=2/255 steps=20" --------------------------------------------------

def read_number(text):
    """Return the number in a text: "8/255" and "0.0314" as float, "8" as int."""
    top, _, bottom = text.partition("/")
    whole = text.removeprefix("-").isdecimal()
    return int(text) if whole else float(top) / float(bottom or 1)


def in_words(value):
    """Return the value of a setting as the user types it: 2/255, 0.15, yes, 1,2,3."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(in_words, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float):
        return str(value)
    # Choose the shortest text that `read_number` reads as exactly this value.
    plain = f"{value:g}" if float(f"{value:g}") == value else str(value)
    fraction = f"{255 * value:g}/255"
    return fraction if read_number(fraction) == value and len(fraction) < len(plain) else plain


def measure_text(name, settings):
    """Return a measure as the user types it: pgd eps=2/255 steps=20."""
    return " ".join([name, *(f"{setting}={in_words(value)}"
                             for setting, value in settings.items())])


# --- tables ---------------------------------------------------------------------------------------

# Fields of a row that become lines of the table, in this order. A list, with one value per
# severity, becomes the mean of its values.
NUMBERS = ("top1", "top5", "segment", "sliding", "attacked", "attacked_unswapped",
           "clean_unswapped", "unknown", "pixel_accuracy", "mean_accuracy", "mean_iou", "aupr",
           "auroc", "fpr95", "lowest", "mce")
# The fields in the summary on the screen.
SUMMARY = ("top1", "sliding", "attacked", "unknown", "mean_iou", "aupr", "lowest", "mce")
CLEAN_ONLY = ("top5", "pixel_accuracy")         # have no line for corrupted images
# Settings that every line shows. Other settings are listed below the table if all rows of the
# measure share them.
ALWAYS_SHOWN = ("eps", "scale", "l1", "type", "split", "of", "conditions")


def numbers_of(row):
    """Return {name: number}, the numbers of a row that become lines of the table.

    AutoAttack also has one number per stage. CW also has one number per L2 radius, and median_l2.
    """
    numbers = {name: float(np.mean(row[name])) for name in NUMBERS
               if name in row and not (name in CLEAN_ONLY and isinstance(row[name], list))}
    numbers |= {f"top1 after {stage}": top1 for stage, top1 in row.get("stages", {}).items()}
    if "top1_at_l2" in row:
        numbers |= {f"top1 within L2 {r}": top1 for r, top1 in row["top1_at_l2"].items()}
        numbers["median_l2"] = row["median_l2"]
    return numbers


def mean_rows(rows, partial_means=False):
    """Yield one row per model: the mean over ImageNet-C's 15 types of corruption.

    A model without all 15 types has no mean. With partial_means=True, it has the mean over the
    types that were measured. On ImageNet at all five severities, the row also has mce, the mean
    error relative to AlexNet, which has 100 %.
    """
    groups = {}                                           # {key without the type: {type: row}}
    for row in rows:
        if row["name"] == "corruptions" and (partial_means or row["settings"]["type"] in NAMES):
            group = row | dict(settings=row["settings"] | dict(type="mean"))
            groups.setdefault(row_key(group), {})[row["settings"]["type"]] = row
    for by_type in groups.values():
        complete = by_type.keys() >= {*NAMES}
        if complete:                                      # leave your own corruptions out
            by_type = {name: by_type[name] for name in NAMES}
        if complete or partial_means:
            row = next(iter(by_type.values()))
            label = "mean" if complete else f"mean of {', '.join(by_type)}"
            mean = {field: np.mean([one[field] for one in by_type.values()], 0).tolist()
                    for field in NUMBERS if field in row}
            if complete and row["imagenet1k"] and row["settings"]["severities"] == [1, 2, 3, 4, 5]:
                mean["mce"] = metrics.mean_corruption_error(
                    {name: 1 - np.mean(one["top1"]) / 100 for name, one in by_type.items()})
            yield row | mean | dict(settings=row["settings"] | dict(type=label))


def worst_cases(rows):
    """Yield rows with the worst case over attacks: an image must be right under every attack.

    There is one row per model and L-infinity budget with at least two attacks. Attacks can have
    different numbers of images in the same order, so the row uses the images that all attacks have.
    """
    groups = {}                                           # {key without the attack: its rows}
    for row in rows:
        if "max_linf" in row and "eps" in row["settings"] and isinstance(row["right"], str):
            shared = {k: v for k, v in row["settings"].items() if k in ("eps", "conditions")}
            worst = row | dict(name="worst", settings=shared, images=None)
            groups.setdefault(row_key(worst), []).append((row, worst))
    for pairs in groups.values():
        attacked_rows, (worst, *_) = zip(*pairs)
        if len(attacked_rows) > 1:
            n = min(row["images"] for row in attacked_rows)
            right = torch.stack([unpack(row["right"], row["images"])[:n]
                                 for row in attacked_rows]).all(0)
            names = ",".join(dict.fromkeys(row["name"] for row in attacked_rows))
            yield {field: worst.get(field) for field in (*KEY, "model", "checkpoint")} | dict(
                settings=worst["settings"] | dict(of=names), images=n,
                top1=100 * right.double().mean().item())


def settings_as_words(rows):
    """Return (words, shared).

    words: for each row, the list of its settings, each as "setting=value". shared: {measure: the
    words that all rows of the measure have}.
    """
    words, shared = [], {}
    for row in rows:
        values = {k: in_words(v) for k, v in row["settings"].items()}
        values |= {k: str(row[k]) for k in ("data_dir", "seed", "precision", "crop_pct")
                   if row.get(k) is not None}
        own = [f"{k}={v}" for k, v in values.items()]
        words.append(own)
        shared[row["name"]] = [word for word in shared.get(row["name"], own) if word in own]
    return words, shared


def rows_table(rows, summary=()):
    """Return rows as a Markdown table: one line per number, one column per model.

    The settings that all rows of a measure share are listed below the table.
    summary: names of numbers, for a short table with only these numbers. The short table has one
    line for all corruptions (their mean), no intervals, and nothing below it.
    """
    columns = {row_key(row, MODEL): row for row in rows}
    names = [row["model"] for row in columns.values()]
    header = [f"{row['model']}, {row['checkpoint']}" if names.count(row["model"]) > 1
              else row["model"] for row in columns.values()]
    if summary:                                           # one line for all corruptions
        first = [row for row in rows if row["name"] == "clean"]
        others = [row for row in rows if row["name"] not in ("clean", "corruptions")]
        rows = [*first, *mean_rows(rows, partial_means=True), *others, *worst_cases(rows)]
    else:
        rows = [*rows, *mean_rows(rows), *worst_cases(rows)]

    lines = {}                                            # {(measure, images): {model: cell}}
    words, shared = settings_as_words(rows)
    for row, own in zip(rows, words):
        shown = [word for word in own
                 if word not in shared[row["name"]] or word.partition("=")[0] in ALWAYS_SHOWN]
        for number_name, value in numbers_of(row).items():
            if summary and number_name not in summary:
                continue
            cell = f"{value:.2f}"
            if number_name.startswith("top") and not summary \
                    and row["settings"].get("type") != "mean":
                # The number is a share of images, so it has an interval.
                low, high = metrics.wilson(value / 100, row["images"])
                cell += f" ({100 * low:.1f}-{100 * high:.1f})"
            line = " ".join([row["name"], *shown]) + f", {number_name}", row["images"]
            lines.setdefault(line, {})[row_key(row, MODEL)] = cell
    body = [[*line, *(cells.get(model, "") for model in columns)] for line, cells in lines.items()]
    counted = "tokens" if "sliding" in rows[0] else "images"
    text = common.table(body, ["measure", counted, *header])
    if summary:
        return text
    below = [f"- {name}: {' '.join(own)}" for name, own in shared.items() if own]
    notes = [f"- {UNITS_LM}"] if counted == "tokens" else [f"- {UNITS}", IMAGE_NOTE]
    return "\n".join([text, "", *below, *notes, SEEDS_NOTE])


UNITS = "Accuracies and other rates are in per cent."
UNITS_LM = ("Perplexities: lower is better. unknown is the share of words, in per cent, that the "
            "vocabulary does not contain.")
IMAGE_NOTE = """\
- A number for several severities is their mean. median_l2 is in pixel units. (low-high) is
  Wilson's 95 % interval over images. All models have the same randomly chosen images."""
SEEDS_NOTE = """\
- One network per variant is not enough to rank variants: networks that differ only in their seed
  differ by points. Train several seeds; studies/arms.py compares them."""


def class_tables(rows, folder):
    """Write per_class.csv and confusion.csv to the folder; return both tables as Markdown.

    Only rows of the measure per_class are used. With more than 20 classes, the confusion is only in
    the CSV file.
    """
    tables, accuracies, confusions = [], [], []
    for row in rows:
        if "confusion" not in row:
            continue
        names, cells = row["class_names"], {(i, j): n for i, j, n in row["confusion"]}
        totals = [sum(cells.get((i, j), 0) for j in range(len(names))) for i in range(len(names))]
        own = [[row["model"], name, n, f"{100 * cells.get((i, i), 0) / n:.2f}" if n else ""]
               for i, (name, n) in enumerate(zip(names, totals))]
        accuracies += own
        confusions += [[row["model"], names[i], names[j], n] for (i, j), n in cells.items()]
        tables.append(f"{row['model']}, {row['images']} images\n\n" + common.table(
            [line[1:] for line in own], ["class", "images", "accuracy in %"]))
        if len(names) <= 20:
            body = [[name, *(cells.get((i, j), "") for j in range(len(names)))]
                    for i, name in enumerate(names)]
            tables.append(common.table(body, ["class, predicted as", *names]))
    head = ["model", "class"]
    for file, lines, more in (("per_class.csv", accuracies, ["images", "accuracy"]),
                              ("confusion.csv", confusions, ["predicted", "images"])):
        with open(Path(folder, file), "w", newline="", encoding="utf-8",
                  errors="backslashreplace") as f:
            csv.writer(f).writerows([head + more, *lines])
    return "\n\n".join(tables)


def print_tables(paths):
    """Print one table per task and data set, with the rows of several results.jsonl files."""
    rows, tables = {}, {}
    for path in paths:
        rows |= read_rows(path)
    if not rows:
        raise InputError(f"--table: no rows in {', '.join(paths)}; expected results.jsonl files "
                         "or folders that contain them")
    for row in rows.values():
        tables.setdefault((row["task"], row["data"]), []).append(row)
    for (task, data), own in tables.items():
        print(f"\n{task}, {data}\n\n{rows_table(own)}")
