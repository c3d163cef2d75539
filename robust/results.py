"""The evaluator's rows: what they hold, how they are kept and read, the table of many of them.

    python -m robust.results referee/results/robustness      # the table of its results.jsonl
    python -m robust.results out/a/robust out/b/robust       # of several runs

A row is a dict of plain values: which model (model, kind, checkpoint, weights, model_config), what
was measured, in words (measure: "pgd eps=2/255 steps=20 ..."), on what (task, data, data_dir,
images, seed) and how exactly (precision), the numbers in percent (top1, top5, mean_iou, ...), which
images were right (`right`, see `unpack`), and how it came about (seconds, torch, hardware, ...).
pandas.read_json("results.jsonl", lines=True) reads all. A table has the measures down and the
models across; what all rows of a measure share is left out of its words there.
"""

import argparse
import base64
import json
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

import common
from common import InputError
from robust.measures import CONDITIONS, in_words, number, parts
from robust.metrics import ALEXNET, mean_corruption_error, wilson

WHAT = ("measure", "data_dir", "seed", "precision", "images")       # tells rows of a model apart
KEY = ("weights", "model_config", "data", *WHAT)


# --- which model, which row ----------------------------------------------------------------------

def checksum(data):
    """Give eight hexadecimal digits for bytes."""
    return f"{zlib.crc32(data):08x}"


def weights_of(state_dict):
    """Give a checksum of a model's weights."""
    tensors = (t.cpu().contiguous().numpy().tobytes() for t in state_dict.values())
    return checksum(b"".join(tensors))


def key(row, fields=KEY):
    """What differs between rows."""
    return json.dumps([row[name] for name in fields], sort_keys=True)


def identity(row):
    """What differs between models: kinds of attention may share their weights."""
    return key(row, ("weights", "model_config"))


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
        if not row.keys() >= {*KEY}:
            raise InputError(f"{path}: {str(row)[:60]} is no row of eval_robust.py")
        rows[key(row)] = row
    return list(rows.values())


class Results:
    """The finished rows, and results.jsonl and table.md, which rank 0 writes row by row."""

    def __init__(self, folder, data, resume, rank):
        self.folder, self.data, self.writes = Path(folder), data, rank == 0
        self.out, self.table = self.folder / "results.jsonl", self.folder / "table.md"
        self.rows = {key(row): row for row in read_rows(self.out)}
        if self.rows and not resume:
            raise InputError(f"--out_dir {folder} holds results: add --resume to go on from them, "
                             "or choose another one")
        if dist.is_initialized():
            dist.barrier()                                # all have read before one writes
        if self.writes:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as e:
                raise InputError(f"--out_dir {folder}: {e.strerror}") from None
            with common.replacing(self.out) as tmp:       # a line that a kill cut short goes
                tmp.write_text("".join(json.dumps(row) + "\n" for row in self.rows.values()))

    def add(self, row):
        """Keep a finished row: in memory, on disk, on the screen."""
        self.rows[key(row)] = row
        if self.writes:
            with open(self.out, "a") as f:
                f.write(json.dumps(row) + "\n")
            self.write_table()
            numbers = [f"{title(row)}, {what} {value:.2f}" for what, value, _ in numbers_of(row)]
            moved = f", moved {255 * row['max_linf']:.2f}/255" if "max_linf" in row else ""
            tqdm.write("  ".join([f"{row['model']:28}", *numbers,
                                  f"({row['images']} images, {row['seconds']:.1f} s{moved})"]))

    def write_table(self):
        """Write the table of the rows of this data set; returns it."""
        text = table([row for row in self.rows.values() if row["data"] == self.data])
        self.table.write_text(text + "\n")
        return text


# --- what a row says -----------------------------------------------------------------------------

IN_TITLE = ("eps", "scale", "l1", "type", "split")


def title(row):
    """Say what was measured: clean, fog, pgd 8/255."""
    name, setting = parts(row["measure"])
    shown = [setting[k] for k in IN_TITLE if k in setting]
    return row.get("title") or " ".join(shown if name == "corruptions" else [name, *shown])


# Fields that are numbers of the table, and their names there; SHARE: of the images, in per cent.
SHARE = {"top1": "top-1", "top5": "top-5"}
NUMBERS = SHARE | {
    "segment": "segment-wise", "sliding": "sliding", "attacked": "attacked",
    "attacked_unswapped": "attacked, words not swapped", "clean_unswapped": "clean, the same words",
    "pixel_accuracy": "pixel accuracy", "mean_accuracy": "mean accuracy", "mean_iou": "mean IoU",
    "aupr": "AUPR", "auroc": "AUROC", "fpr95": "FPR95", "lowest": "lowest of a class", "mce": "mCE"}
ONCE = ("top5", "pixel_accuracy")                         # not shown where there are severities


def numbers_of(row):
    """What a row says: [(name, mean over its severities, is it a share of the images?)]."""
    found = [(f"after {stage}", value, True) for stage, value in row.get("stages", {}).items()
             if stage != "clean"]
    radii = row.get("top1_at_l2", {})                     # of an attack that has no budget
    for field, name in NUMBERS.items():
        value = row.get(field)
        if value is not None and not (field in ONCE and (radii or isinstance(value, list))):
            found.append((name, np.mean(value), field in SHARE and "types" not in row))
    found += [(f"top-1 within L2 {r}", value, True) for r, value in radii.items()]
    if radii:
        found.append(("median L2 (pixel units)", row["median_l2"], False))
    return found


# --- the table -----------------------------------------------------------------------------------

def words_of(row):
    """["steps=20", ..., "seed=0"]: what the title does not say."""
    _, setting = parts(row["measure"])
    setting |= {name: row[name] for name in WHAT[1:-1]}
    return [f"{k}={v}" for k, v in setting.items() if k not in IN_TITLE]


def means(rows):
    """Rows of means over ImageNet-C's 15 types, for models that have all; on ImageNet, at all five
    severities, with mCE, where AlexNet is 100 %."""
    groups, out = {}, []
    for row in rows:
        name, setting = parts(row["measure"])
        if name == "corruptions" and setting["type"] in ALEXNET:
            of = groups.setdefault((identity(row), *words_of(row), row["images"]), {})
            of[setting["type"]] = row
    for own in groups.values():
        row, *_ = own.values()
        if len(own) == len(ALEXNET):
            mean = {field: np.mean([one[field] for one in own.values()])
                    for field in NUMBERS if field in row and field not in ONCE}
            if row.get("imagenet1k") and "severities=1,2,3,4,5" in words_of(row):
                mean["mce"] = mean_corruption_error(
                    {type_: 1 - np.mean(one["top1"]) / 100 for type_, one in own.items()})
            out.append({name: row[name] for name in KEY}
                       | dict(mean, title="mean of the 15", types=list(own)))
    return out


def worst_cases(rows):
    """Rows of the worst case over attacks: an image counts that is right under each.

    One for each model and L-infinity budget at which two attacks or more were tried. Attacks on
    fewer images than others were on the first of theirs, so these are the images that count.
    """
    groups, found = {}, []
    for row in rows:
        name, setting = parts(row["measure"])
        if "max_linf" in row and "eps" in setting and isinstance(row.get("right"), str):
            how = [w for w in words_of(row) if w.split("=")[0] in (*CONDITIONS, *WHAT)]
            of = groups.setdefault((identity(row), number(setting["eps"]), *how), {})
            of.setdefault(name, []).append(row)
    for own in groups.values():
        tried = sum(own.values(), [])
        if len(tried) > 1:
            n = min(row["images"] for row in tried)
            right = torch.stack([unpack(row["right"], row["images"])[:n] for row in tried]).all(0)
            _, setting = parts(tried[0]["measure"])
            unusual = {k: v for k, v in setting.items() if k in CONDITIONS}
            found.append({name: tried[0][name] for name in KEY} | dict(
                measure=f"worst {in_words(unusual)}", images=n, top1=100 * int(right.sum()) / n,
                title=f"worst of {', '.join(own)} {setting['eps']}"))
    return found


def column_names(rows):
    """{identity: name} of the models; of equal names the checkpoint is told, too."""
    models = {identity(row): row for row in rows}
    names = [row["model"] for row in models.values()]
    return {w: row["model"] if names.count(row["model"]) == 1 else
            f"{row['model']}, {row['checkpoint']}" for w, row in models.items()}


def table(rows):
    """Rows as Markdown: a line a number, a column a model; below it what a reader has to know.

    Settings that all rows of one name share stand there, too, but for unusual conditions.
    """
    shown, lines, shared = rows + means(rows) + worst_cases(rows), {}, {}
    columns = column_names(rows)
    for row in shown:
        words = words_of(row)
        of = shared.setdefault(parts(row["measure"])[0], [
            w for w in words if w.split("=")[0] not in CONDITIONS])
        of[:] = [w for w in of if w in words]
    for row in shown:
        told = [w for w in words_of(row) if w not in shared[parts(row["measure"])[0]]]
        for what, value, share in numbers_of(row):
            cell = f"{value:.2f}"
            if share:
                low, high = wilson(value / 100, row["images"])
                cell += f" ({100 * low:.1f}-{100 * high:.1f})"
            line = ", ".join(filter(None, (title(row), what, " ".join(told)))), row["images"]
            lines.setdefault(line, {})[identity(row)] = cell
    body = [[*line, *(cells.get(w, "") for w in columns)] for line, cells in lines.items()]
    header = ["perplexity", "tokens"] if "sliding" in rows[0] else ["measure, per cent", "images"]
    settings = {name: " ".join(w for w in of if w.split("=")[0] not in WHAT)
                for name, of in shared.items()}
    below = [*(f"{name}: {of}." for name, of in settings.items() if of), *notes(rows)]
    return "\n".join([common.table(body, [*header, *columns.values()]), "",
                      *(f"- {note}" for note in dict.fromkeys(below))])


def notes(rows):
    """List what a reader of these rows has to know besides."""
    for row in rows:
        name, setting = parts(row["measure"])
        if "word" in row:
            yield (f"Words swapped: {row['swapped']} of {row['images']} {setting['split']} tokens "
                   f"({100 * row['swapped'] / row['images']:.2f} %) became `{row['word']}`.")
        if "mean_iou" in row:
            yield f"Means over {' or '.join(map(str, np.unique(row['classes'])))} classes."
        if "severities" in setting:
            yield "Corruptions: means of the severities."
        if setting.get("type") == "frost" and setting.get("frost") == "procedural":
            yield "frost: procedural, not ImageNet-C's photographs (--frost_dir)."
        if row.get("plain"):
            yield f"{name} of {row['model']} is plain: no RPC-Attention runs there."
    if rows[0]["task"] == "classification":
        yield (f"(low-high): Wilson's 95 % interval over images. Images: a random choice, seed "
               f"{rows[0]['seed']}, the same for all models.")
        yield ("One network of a kind ranks nothing: networks that differ in the seed alone differ "
               "by points. Train several, and compare them with referee.arms.")


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
