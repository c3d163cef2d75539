"""The evaluator's rows: what they hold, how they are kept and read, the table of many of them.

    python -m robust.results referee/results/robustness      # the table of its results.jsonl
    python -m robust.results out/a/robust out/b/robust       # of several runs

A row is a dict of plain values: which model (model, kind, checkpoint, weights, model_config,
recipe), what was measured (task, data, data_dir, measure, setting, conditions, images), the numbers
in percent (top1, top5, mean_iou, ...), which images were right (`right`, see `unpack`), and how it
came about (seconds, torch, hardware, ...). pandas.read_json("results.jsonl", lines=True) reads all.
"""

import argparse
import base64
import zlib
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import common
from common import InputError
from robust.measures import CONDITIONS, in_words
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


class Results:
    """The finished rows, and results.jsonl and table.md, which rank 0 writes row by row."""

    def __init__(self, folder, data, resume, rank):
        self.out, self.table = Path(folder, "results.jsonl"), Path(folder, "table.md")
        self.data, self.log = data, None
        self.rows = {key(row): row for row in read_rows(self.out)}
        if self.rows and not resume:
            raise InputError(f"--out_dir {folder} holds results: add --resume to go on from them, "
                             "or choose another one")
        common.broadcast([None])                          # all have read before one writes
        if rank == 0:
            try:
                self.out.parent.mkdir(parents=True, exist_ok=True)
            except OSError as e:
                raise InputError(f"--out_dir {self.out.parent} cannot be made "
                                 f"({e.strerror})") from None
            self.log = common.Log(self.out)
            self.log.cut(0)                               # a line that a kill cut short goes

    def add(self, row):
        """Keep a finished row: in memory, on disk, on the screen."""
        self.rows[key(row)] = row
        if self.log:
            self.log.append(row)
            self.write_table()
            numbers = [f"{name} {value:.2f}" for name, value, _ in numbers_of(row)]
            moved = f", moved {255 * row['max_linf']:.2f}/255" if "max_linf" in row else ""
            tqdm.write("  ".join([f"{row['model']:28}", *numbers,
                                  f"({row['images']} images, {row['seconds']:.1f} s{moved})"]))

    def write_table(self):
        """Write the table of the rows of this data set; returns it."""
        text = table([row for row in self.rows.values() if row["data"] == self.data])
        self.table.write_text(text + "\n")
        return text


# --- what a row says -----------------------------------------------------------------------------

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


def numbers_of(row):
    """What a row says: [(name, mean over its severities, is it a share of the images?)]."""
    measure, share = row["measure"], False
    if "means" in row:
        found = row["means"]
    elif measure == "perplexity":
        found = {"segment-wise": row["segment"],
                 f"sliding, stride {row['setting']['stride']}": row["sliding"],
                 "attacked": row["attacked"],
                 "attacked, words not swapped": row["attacked_unswapped"],
                 "clean, the same words": row["clean_unswapped"]}
    elif "mean_iou" in row:
        found = {"pixel accuracy": row["pixel_accuracy"]} if measure == "clean" else {}
        found |= {"mean accuracy": row["mean_accuracy"], "mean IoU": row["mean_iou"]}
    elif measure == "imagenet_o":
        found = {name: row[name.lower()] for name in ("AUPR", "AUROC", "FPR95")}
    else:
        found, share = {f"after {stage}": v for stage, v in row.get("stages", {}).items()}, True
        found.pop("after clean", None)
        found["top-1"] = row["top1"]
        if "top5" in row and measure not in ("corruptions", "cw"):
            found["top-5"] = row["top5"]
        found |= {f"top-1 within L2 {r}": v for r, v in row.get("top1_at_l2", {}).items()}
    numbers = [(name, np.mean(value), share) for name, value in found.items()]
    if measure == "cw":
        numbers.append(("median L2 (pixel units)", np.mean(row["median_l2"]), False))
    return [(f"{title(row)}, {name}", value, share) for name, value, share in numbers]


# --- rows made of rows ---------------------------------------------------------------------------

MEAN = {"top-1": "top1", "mean accuracy": "mean_accuracy", "mean IoU": "mean_iou"}


def means(rows):
    """Rows of the mean over ImageNet-C's 15 types, for models that have all; on ImageNet, at all
    five severities, with mCE, where AlexNet is 100 %."""
    groups, out = {}, []
    for row in rows:
        if row["measure"] == "corruptions" and row["setting"]["type"] in ALEXNET:
            setting = dict(row["setting"], type="of the 15")
            groups.setdefault(key(dict(row, setting=setting)), (setting, []))[1].append(row)
    for setting, own in groups.values():
        if len(own) == len(ALEXNET):
            new = dict(own[0], measure="mean", setting=setting, means={
                name: np.mean([row[field] for row in own]) for name, field in MEAN.items()
                if field in own[0]})
            if own[0].get("imagenet1k") and setting["severities"] == [1, 2, 3, 4, 5]:
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


# --- the table -----------------------------------------------------------------------------------

IN_TITLE = ("eps", "scale", "l1", "type", "split", "weights")


def column_names(rows):
    """{identity: name} of the models; of equal names the checkpoint is told, too."""
    models = {identity(row): row for row in rows}
    names = [row["model"] for row in models.values()]
    return {w: row["model"] if names.count(row["model"]) == 1 else
            f"{row['model']}, {row['checkpoint']}" for w, row in models.items()}


def told_apart(rows):
    """For each row the settings and conditions in words that differ between rows of its measure,
    and the conditions of an attack that are not the usual ones."""
    def of(row):
        return {**row["setting"], **row["conditions"]}

    seen = {}
    for row in rows:
        for name, value in of(row).items():
            seen.setdefault((row["measure"], name), set()).add(frozen(value))
    for row in rows:
        own = {k: v for k, v in of(row).items() if k not in (*IN_TITLE, *CONDITIONS)
               and len(seen[row["measure"], k]) > 1}
        odd = {k: row["conditions"][k] for k in CONDITIONS}
        odd = odd if "max_linf" in row and odd != CONDITIONS else {}
        yield in_words(own | odd)


def table(rows):
    """Rows as Markdown: a line a number, a column a model; below it what a reader has to know."""
    names, lines, shown = column_names(rows), {}, rows + means(rows) + worst_cases(rows)
    for row, how in zip(shown, told_apart(shown)):
        for name, value, share in numbers_of(row):
            cell = f"{value:.2f}"
            if share:
                low, high = wilson(value / 100, row["images"])
                cell += f" ({100 * low:.1f}-{100 * high:.1f})"
            text = ", ".join(filter(None, (name, how)))
            lines.setdefault((text, row["images"]), {})[identity(row)] = cell
    body = [[*line, *(cells.get(w, "") for w in names)] for line, cells in lines.items()]
    header = ["perplexity", "tokens"] if rows[0]["measure"] == "perplexity" else [
        "measure, per cent", "images"]
    out = common.table(body, [*header, *names.values()])
    return out + "\n\n" + "\n".join(f"- {note}" for note in dict.fromkeys(notes(rows)))


def notes(rows):
    """List what a reader of these rows has to know besides."""
    for row in rows:
        setting = row["setting"]
        if "word" in row:
            yield (f"Words swapped: {row['swapped']} of {row['images']} {setting['split']} tokens "
                   f"({100 * row['swapped'] / row['images']:.2f} %) became `{row['word']}`.")
        if "mean_iou" in row:
            how = in_words({k: setting[k] for k in ("window", "stride", "scales", "flip")})
            yield f"Means over {' or '.join(map(str, np.unique(row['classes'])))} classes; {how}."
        if "severities" in setting:
            severities = ", ".join(map(str, setting["severities"]))
            yield f"Corruptions: mean of severities {severities}."
        if setting.get("type") == "frost" and setting.get("frost") == "procedural" \
                and not setting.get("released"):
            yield "frost: procedural, not ImageNet-C's photographs (--frost_dir)."
    if rows[0]["task"] == "classification":
        yield ("(low-high): Wilson's 95 % interval over images. Images: a random choice, seed "
               f"{rows[0]['conditions']['seed']}, the same for all models.")
        if len({group(row) for row in rows}) == len({identity(row) for row in rows}):
            yield ("One network of a kind ranks nothing: networks that differ in the seed alone "
                   "differ by points. Train several, and compare them with "
                   "referee.arms.")


def main():
    p = argparse.ArgumentParser(description="Print the tables of results.jsonl files.",
                                allow_abbrev=False)
    p.add_argument("paths", nargs="+", metavar="PATH", help="files, or folders with one")
    args, kinds = p.parse_args(), {}
    for row in {key(row): row for path in args.paths for row in read_rows(path)}.values():
        kinds.setdefault((row["task"], row["data"]), []).append(row)
    if not kinds:
        raise InputError(f"no rows in {', '.join(args.paths)}")
    for (task, data), own in kinds.items():
        print(f"\n{task}, {data}\n\n{table(own)}")


if __name__ == "__main__":
    common.run(main)
