"""Read and write the rows of eval_robust.py (results.jsonl); write tables in Markdown and CSV.

    rows = read_rows("out/first/robust")                    # {key: row}
    print(rows_table(list(rows.values())))

A row is a dict of plain values:
    model     model (its name), kind (of attention), checkpoint (file), weights (their checksum),
              model_config
    measure   name, settings ({setting: value})
    data      task, data, data_dir, images (how many; for a text, tokens), seed
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

# Fields that identify a model (the same weights can have another attention), and a row.
MODEL = ("weights", "model_config")
KEY = (*MODEL, "data", "name", "settings", "data_dir", "seed", "precision", "images", "crop_pct")


def key(row, fields=KEY):
    """Return the values of the fields as text: KEY identifies a row, MODEL its model."""
    return json.dumps([row.get(name) for name in fields], sort_keys=True)


def pack(right):
    """Return outcomes (n,) bool as text, one bit per image: np.packbits in base64."""
    return base64.b64encode(np.packbits(right.cpu().numpy())).decode()


def unpack(text, n):
    """Return the outcomes (n,) bool of n images from the text of `pack`."""
    packed = np.frombuffer(base64.b64decode(text), np.uint8)
    return torch.from_numpy(np.unpackbits(packed, count=n)).bool()


def read_rows(path):
    """Return {key: row} from a results.jsonl or its folder; ignore an incomplete last line."""
    path = Path(path, "results.jsonl") if Path(path).is_dir() else Path(path)
    rows = common.read_log(path)
    for row in rows:
        if not isinstance(row, dict) or not row.keys() >= {*KEY} - {"crop_pct"}:
            raise InputError(f"{path}: {str(row)[:60]} is not a row of this eval_robust.py; "
                             f"choose another file or folder")
    return {key(row): row for row in rows}


def open_rows(path, rank):
    """Create the folder of a results.jsonl and return the file's rows, {key: row}."""
    rows = read_rows(path)
    if dist.is_initialized():
        dist.barrier()                                    # rank 0 writes after all have read
    if rank == 0:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise InputError(f"--out_dir {path.parent}: {e.strerror}") from None
        with common.replacing(path) as tmp:               # without an incomplete last line
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
    plain = f"{value:g}" if float(f"{value:g}") == value else str(value)
    share = f"{255 * value:g}/255"
    return share if read_number(share) == value and len(share) < len(plain) else plain


def measure_text(name, settings):
    """Return a measure as the user types it: pgd eps=2/255 steps=20."""
    return " ".join([name, *(f"{key}={in_words(value)}" for key, value in settings.items())])


# --- tables ---------------------------------------------------------------------------------------

# Fields of a row that are lines of the table, in this order. A list with one value per severity
# becomes its mean. SUMMARY: the fields on the screen.
NUMBERS = ("top1", "top5", "segment", "sliding", "attacked", "attacked_unswapped",
           "clean_unswapped", "unknown", "pixel_accuracy", "mean_accuracy", "mean_iou", "aupr",
           "auroc", "fpr95", "lowest", "mce")
SUMMARY = ("top1", "sliding", "attacked", "unknown", "mean_iou", "aupr", "lowest", "mce")
CLEAN_ONLY = ("top5", "pixel_accuracy")         # no mean over severities
# Settings that a line always shows; others stand below the table if all rows share them.
TOLD = ("eps", "scale", "l1", "type", "split", "of", "conditions")


def numbers_of(row):
    """Return {name: number} of a row.

    AutoAttack also has one number per stage. CW also has one number per L2 radius, and median_l2.
    """
    found = {name: float(np.mean(row[name])) for name in NUMBERS
             if name in row and not (name in CLEAN_ONLY and isinstance(row[name], list))}
    found |= {f"top1 after {stage}": share for stage, share in row.get("stages", {}).items()}
    found |= {f"top1 within L2 {r}": share for r, share in row.get("top1_at_l2", {}).items()}
    return found | ({"median_l2": row["median_l2"]} if "top1_at_l2" in row else {})


def mean_rows(rows, partial_means=False):
    """Yield one row per model: the mean over ImageNet-C's 15 types of corruption.

    A model without all 15 types has no mean; with partial_means it has the mean over its types. On
    ImageNet at all five severities the row also has mce, the mean error relative to AlexNet's
    (AlexNet has 100 %).
    """
    groups = {}
    for row in rows:
        if row["name"] == "corruptions" and (partial_means or row["settings"]["type"] in NAMES):
            group = row | dict(settings=row["settings"] | dict(type="mean"))
            groups.setdefault(key(group), {})[row["settings"]["type"]] = row
    for own in groups.values():
        complete = own.keys() >= {*NAMES}
        own = {name: own[name] for name in NAMES} if complete else own
        if complete or partial_means:
            row = next(iter(own.values()))
            kind = "mean" if complete else f"mean of {', '.join(own)}"
            mean = {field: np.mean([one[field] for one in own.values()], 0).tolist()
                    for field in NUMBERS if field in row}
            if complete and row["imagenet1k"] and row["settings"]["severities"] == [1, 2, 3, 4, 5]:
                mean["mce"] = metrics.mean_corruption_error(
                    {name: 1 - np.mean(one["top1"]) / 100 for name, one in own.items()})
            yield row | mean | dict(settings=row["settings"] | dict(type=kind))


def worst_cases(rows):
    """Yield rows with the worst case over attacks: an image counts if it is right under all.

    One row per model and L-infinity budget with at least two attacks. All attacks use the same
    order of images, so the images that all attacks were tried on are the first n.
    """
    groups = {}
    for row in rows:
        if "max_linf" in row and "eps" in row["settings"] and isinstance(row["right"], str):
            shared = {k: v for k, v in row["settings"].items() if k in ("eps", "conditions")}
            worst = row | dict(name="worst", settings=shared, images=None)
            groups.setdefault(key(worst), []).append((row, worst))
    for own in groups.values():
        tried, (worst, *_) = zip(*own)
        if len(tried) > 1:
            n = min(row["images"] for row in tried)
            right = torch.stack([unpack(row["right"], row["images"])[:n] for row in tried]).all(0)
            names = ",".join(dict.fromkeys(row["name"] for row in tried))
            yield {name: worst.get(name) for name in (*KEY, "model", "checkpoint")} | dict(
                settings=worst["settings"] | dict(of=names), images=n,
                top1=100 * right.double().mean().item())


def settings_as_words(rows):
    """Return the settings of each row, a list of "key=value", and {measure: shared settings}."""
    words, shared = [], {}
    for row in rows:
        own = {k: in_words(v) for k, v in row["settings"].items()}
        own |= {k: str(row[k]) for k in ("data_dir", "seed", "precision", "crop_pct")
                if row.get(k) is not None}
        words.append([f"{k}={v}" for k, v in own.items()])
        shared[row["name"]] = [w for w in shared.get(row["name"], words[-1]) if w in words[-1]]
    return words, shared


def rows_table(rows, summary=()):
    """Return rows as a Markdown table: one line per number, one column per model.

    The settings that all rows of a measure share are listed below the table.
    summary: names of numbers, for a short table with only these numbers. It has one line for all
    corruptions (their mean), no intervals, and nothing below the table.
    """
    columns = {key(row, MODEL): row for row in rows}
    names = [row["model"] for row in columns.values()]
    header = [row["model"] + f", {row['checkpoint']}" * (names.count(row["model"]) > 1)
              for row in columns.values()]
    if summary:                                           # one line for all corruptions
        first = [row for row in rows if row["name"] == "clean"]
        others = [row for row in rows if row["name"] not in ("clean", "corruptions")]
        rows = [*first, *mean_rows(rows, True), *others, *worst_cases(rows)]
    else:
        rows = [*rows, *mean_rows(rows), *worst_cases(rows)]

    lines, (words, shared) = {}, settings_as_words(rows)
    for row, own in zip(rows, words):
        told = [w for w in own
                if w not in shared[row["name"]] or w.partition("=")[0] in TOLD]
        for number_name, value in numbers_of(row).items():
            if summary and number_name not in summary:
                continue
            cell = f"{value:.2f}"
            if number_name.startswith("top") and not summary \
                    and row["settings"].get("type") != "mean":    # a share of images
                low, high = metrics.wilson(value / 100, row["images"])
                cell += f" ({100 * low:.1f}-{100 * high:.1f})"
            line = " ".join([row["name"], *told]) + f", {number_name}", row["images"]
            lines.setdefault(line, {})[key(row, MODEL)] = cell
    body = [[*line, *(cells.get(model, "") for model in columns)] for line, cells in lines.items()]
    counted = "tokens" if "sliding" in rows[0] else "images"
    text = common.table(body, ["measure", counted, *header])
    if summary:
        return text
    below = [f"- {name}: {' '.join(words)}" for name, words in shared.items() if words]
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

    Only rows of the measure per_class count. The confusion of more than 20 classes is only in the
    CSV file.
    """
    found, accuracies, confusions = [], [], []
    for row in (row for row in rows if "confusion" in row):
        names, cells = row["class_names"], {(i, j): n for i, j, n in row["confusion"]}
        totals = [sum(cells.get((i, j), 0) for j in range(len(names))) for i in range(len(names))]
        own = [[row["model"], name, n, f"{100 * cells.get((i, i), 0) / n:.2f}" if n else ""]
               for i, (name, n) in enumerate(zip(names, totals))]
        accuracies += own
        confusions += [[row["model"], names[i], names[j], n] for (i, j), n in cells.items()]
        found.append(f"{row['model']}, {row['images']} images\n\n" + common.table(
            [line[1:] for line in own], ["class", "images", "accuracy in %"]))
        if len(names) <= 20:
            body = [[name, *(cells.get((i, j), "") for j in range(len(names)))]
                    for i, name in enumerate(names)]
            found.append(common.table(body, ["class, predicted as", *names]))
    head = ["model", "class"]
    for file, lines, more in (("per_class.csv", accuracies, ["images", "accuracy"]),
                              ("confusion.csv", confusions, ["predicted", "images"])):
        with open(Path(folder, file), "w", newline="", encoding="utf-8",
                  errors="backslashreplace") as f:
            csv.writer(f).writerows([head + more, *lines])
    return "\n\n".join(found)


def print_tables(paths):
    """Print the tables of several results.jsonl files, one per task and data set."""
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
