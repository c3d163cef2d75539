"""The evaluator's rows: written one by one, read again, printed as tables.

    python -m robust.results results/robustness              # the tables of its results.jsonl

A row is a dict of plain values: which model (model, kind, checkpoint, weights, model_config,
recipe), what was measured (task, data, data_dir, measure, setting, conditions, images), the numbers
in percent (top1, top5, mean_iou, ...), which images were right (`right`, see `unpack`), and how it
came about (seconds, torch, hardware, ...).
"""

import base64
import json
import sys
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

import common
from robust import corruptions, metrics
from robust.measures import CONDITIONS, in_words

# What every row has; the earliest ones lack those that have a value here.
FIELDS = ("model", "kind", "checkpoint", "weights", "data", "measure", "setting", "conditions",
          "images")
EARLIEST = dict(task="classification", data_dir=None, imagenet1k=False)


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
    """Tell models apart: by weights and model_config, since kinds of attention may share weights;
    the earliest rows by weights, kind and path."""
    config = row.get("model_config", (row["kind"], row["checkpoint"]))
    return row["weights"], frozen(config)


def group(row):
    """What the seeds of one model have in common."""
    return frozen(row.get("model_config", row["kind"])), row.get("recipe")


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

    A line that a kill cut short is left out. Raises ValueError naming a line that is no row.
    """
    path, rows = Path(path), {}
    path = path / "results.jsonl" if path.is_dir() else path
    for i, line in enumerate(path.read_bytes().splitlines() if path.exists() else (), 1):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        missing = [name for name in FIELDS if not isinstance(row, dict) or name not in row]
        if missing:
            raise ValueError(f"{path}, line {i} is no row of eval_robust.py: it has no "
                             f"{missing[0]}")
        row = EARLIEST | row
        rows[key(row)] = row
    return list(rows.values())


class Results:
    """The finished rows, and results.jsonl and table.md, which rank 0 writes row by row."""

    def __init__(self, folder, data, resume, rank):
        self.out, self.table = Path(folder, "results.jsonl"), Path(folder, "table.md")
        self.data, self.file = data, None
        self.rows = {key(row): row for row in read_rows(self.out)}
        if self.rows and not resume:
            raise ValueError(f"--out_dir {folder} holds results: add --resume to go on from them, "
                             "or choose another one")
        common.broadcast([None])                          # all have read before one writes
        if rank == 0:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(self.out, "ab")
            lock(self.file, folder)
            text = self.out.read_bytes()
            self.file.truncate(text.rfind(b"\n") + 1)     # a line that a kill cut short goes

    def lacks(self, row):
        """Is there no row of the same model, measure, setting, conditions and images?"""
        return key(row) not in self.rows

    def add(self, row):
        """Keep a finished row."""
        self.rows[key(row)] = row
        if not self.file:
            return
        try:
            self.file.write(json.dumps(row).encode() + b"\n")
            self.file.flush()
            self.write_table()
        except OSError as e:
            raise OSError(f"cannot write {self.out} ({e.strerror})") from None
        numbers = [f"{number.name} {number.value.mean():.2f}" for number in numbers_of(row)]
        tqdm.write("  ".join([f"{row['model']:28}", *numbers,
                              f"({row['images']} {unit(row)}, {row['seconds']:.1f} s)"]))
        if square_gain(row) > 0.2:
            tqdm.write(f"warning: Square took {square_gain(row):.2f} points after the attacks "
                       "with gradients, more than 0.2: they may be hidden; see --checks")

    def write_table(self):
        """Write the table of the rows of this data set; returns it."""
        text = tables([row for row in self.rows.values() if row["data"] == self.data])
        self.table.write_text(text + "\n")
        return text


def lock(file, folder):
    """Keep a second evaluation out of a folder, until the file is closed or the process ends."""
    try:
        import fcntl
    except ImportError:                                   # not on Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"--out_dir {folder}: another eval_robust.py is writing there; wait for "
                         "it, or choose another folder") from None


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


def square_gain(row):
    """Points of accuracy that AutoAttack's last stage, without gradients, took after the others."""
    stages = row.get("stages", {})
    return stages.get("fab-t", 0) - stages.get("square", 0)


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
        stride, share = row["setting"].get("stride", "not kept"), False
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


def tell_apart(names, details):
    """Names {key: text}; equal ones get those details {key: {field: value}} that differ."""
    names = dict(names)
    for field in dict.fromkeys(field for fields in details.values() for field in fields):
        for name in set(names.values()):
            twins = [k for k in names if names[k] == name]
            if len({str(details[k].get(field)) for k in twins}) > 1:
                names.update({k: f"{name}, {field} {details[k][field]}" for k in twins
                              if field in details[k]})
    return names


# --- tables --------------------------------------------------------------------------------------

class Line(NamedTuple):
    """What a line of a table is about."""
    name: str
    conditions: str                  # of an attack, in words, if they are not the default
    images: int
    rest: tuple                      # whatever else was set, frozen
    share: bool


def line_of(row, name, share):
    """The line of a table that a number of this row belongs to."""
    named = ("type", "split", "eps", "scale")             # by the line's name
    rest = {k: v for k, v in row["setting"].items() if k not in named}
    rest.update(seed=row["conditions"]["seed"], amp=row["conditions"]["amp"],
                data_dir=row["data_dir"])
    return Line(name, unusual(row), row["images"], frozen(rest), share)


def cells_of(rows):
    """Rows as {line: {model's identity: (1,) or a value a severity}}."""
    cells = {}
    for row in rows:
        for number in numbers_of(row):
            line = line_of(row, number.name, number.share)
            cells.setdefault(line, {})[identity(row)] = number.value
    return cells


def add_means(cells, models):
    """The cells with, after the last corruption, the mean of the 15 for models that have all of
    them, and on ImageNet, at all five severities, mCE, where AlexNet is 100 %."""
    out, blocks = {}, {}
    for line, values in cells.items():
        out[line] = values
        kind, _, what = line.name.partition(", ")
        if kind not in corruptions.NAMES:
            continue
        block = blocks.setdefault((what, *line[1:]), {})
        block[kind] = values
        if len(block) < len(corruptions.NAMES):
            continue
        where = line._replace(name=f"mean of the 15, {what}", share=False)
        found = {w: {name: block[name][w] for name in block} for w in models
                 if all(w in values for values in block.values())}
        out[where] = {w: sum(own.values()) / len(own) for w, own in found.items()}
        if what == "error" and dict(line.rest).get("severities") == (1, 2, 3, 4, 5):
            out[where._replace(name="mCE")] = {
                w: np.ravel(metrics.mean_corruption_error(
                    {name: error.mean() / 100 for name, error in own.items()}))
                for w, own in found.items() if models[w]["imagenet1k"]}
    return out


def worst_cases(rows):
    """Rows of the worst case over attacks: an image counts that is right under each of them.

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


def markdown(cells, names, text_of, counted="images"):
    """A table: a row for each line with a value, a column for each model of names."""
    blocks, shown = {}, {}
    for line in cells:
        blocks.setdefault((line.conditions, line.images), []).append(line)
    for lines in blocks.values():                         # equal names say what else was set
        shown |= tell_apart({line: line.name for line in lines},
                            {line: dict(line.rest) for line in lines})
    measure = "perplexity" if counted == "tokens" else "measure (% unless it says otherwise)"
    body = [[measure, "conditions", counted, *names.values()]]
    for line, values in cells.items():
        texts = [text_of(line, values[w]) if w in values else "" for w in names]
        if any(texts):
            body.append([shown[line], line.conditions, line.images, *texts])
    if not any(row[1] for row in body[1:]):
        body = [[row[0], *row[2:]] for row in body]
    return common.table(body[1:], body[0])


def with_interval(line, value):
    """A value and, if it is a share, its 95 % interval."""
    value = value.mean()
    if not line.share:
        return f"{value:.2f}"
    low, high = metrics.wilson(value / 100, line.images)
    return f"{value:.2f} ({100 * low:.1f}-{100 * high:.1f})"


def each(line, values):
    """A value a severity."""
    return "  ".join(f"{value:.1f}" for value in values)


def notes(rows):
    """List what a reader of these rows has to know besides."""
    out, moved, seeds = [], {}, sorted({row["conditions"]["seed"] for row in rows})
    for row in rows:
        setting = row["setting"]
        if row.get("word"):
            share = 100 * row["swapped"] / row["images"]
            out.append(f"Words swapped: {row['swapped']} of {row['images']} {setting['split']} "
                       f"tokens ({share:.2f} %) became `{row['word']}`.")
        if "severities" in setting:
            severities = ", ".join(map(str, setting["severities"]))
            out.append(f"Corruptions: mean of severities {severities}.")
        if "mean_iou" in row and "window" in setting:
            how = in_words({k: setting[k] for k in ("window", "stride", "scales", "flip")})
            classes = " or ".join(map(str, np.unique(row["classes"])))
            out.append(f"Means over {classes} classes; {how}.")
        if "max_linf" in row:
            rest = {k: v for k, v in setting.items()
                    if k not in ("eps", "scale", "source", "weights")}       # by a line's name
            words = f"{row['measure']} {in_words(rest)}".strip(), unusual(row)
            far = moved.setdefault(", ".join(filter(None, words)), {})
            sizes = 255 * row["max_linf"], 255 * row.get("outside", 0)
            far[show(setting)] = tuple(map(max, sizes, far.get(show(setting), sizes)))
    if unit(rows[0]) == "images":
        out.append(f"Where not all images count: a random choice, seed "
                   f"{', '.join(map(str, seeds))}, the same for all models.")
    for attack, far in moved.items():
        most = ", ".join(f"{linf:.2f}" for linf, _ in far.values())
        budgets = f" with {', '.join(far)}" if any(far) else ""
        out.append(f"{attack}: a pixel moved by at most {most} of 255{budgets}, and at most "
                   f"{max(outside for _, outside in far.values()) + 0:.2f} out of range.")
    if any("eps" in row["setting"] for row in rows):
        out.append("Top-5 under attack is not a worst case: the images were made for top-1.")
    if any(row["setting"].get("type") == "frost" and row["setting"].get("frost") == "procedural"
           and not row["setting"].get("released") for row in rows):
        out.append("frost: procedural, not ImageNet-C's photographs (--frost_dir).")
    return list(dict.fromkeys(out))


def summary(rows, cells, names):
    """The few numbers to remember of each classifier: clean, mean of the 15, the worst attacks."""
    body, seeds, worst = [], {}, {}
    for row in rows:
        seeds.setdefault(group(row), set()).add(identity(row))
        if "eps" in row["setting"] and row["measure"] != "sld":
            eps = row["setting"]["eps"], show(row["setting"]), unusual(row)
            found = worst.setdefault(identity(row), {})
            found[eps] = min(found.get(eps, 100), row["top1"])
    for w, name in names.items():
        clean, mean = ([f"{sign + value[w].mean():.1f}".lstrip("-") for line, value in cells.items()
                        if line.name == what and w in value] or [""]
                       for sign, what in ((0, "clean, top-1"), (-100, "mean of the 15, error")))
        texts = [" ".join(filter(None, (budget, how, f"{top1:.1f}")))
                 for (_, budget, how), top1 in sorted(worst.get(w, {}).items())]
        body.append([name, clean[-1], mean[-1], ", ".join(texts)])
    text = common.table(body, ["top-1 in %", "clean", "mean of the 15 corruptions",
                               "worst attack, by budget"])
    if min(map(len, seeds.values())) == 1:
        text += ("\n\nOne network of a kind ranks nothing: networks that differ in the seed alone "
                 "differ by points. Train several seeds, and compare them with studies.robustness.")
    return text


def tables(rows):
    """Markdown of rows: a column for each model; then the severities, and a summary."""
    models = {identity(row): row for row in rows}         # in order of appearance
    names = tell_apart({w: row["model"] for w, row in models.items()},
                       {w: row.get("model_config", {}) for w, row in models.items()})
    names = tell_apart(names, {w: {k: row.get(k) for k in ("recipe", "checkpoint")}
                               for w, row in models.items()})
    shown = rows + worst_cases(rows)
    cells = add_means(cells_of(shown), models)

    out = markdown(cells, names, with_interval, unit(rows[0]))
    if any(line.share for line in cells):
        out += "\n\n(low-high): Wilson's 95 % interval over images; severities, draws count once."
    out += "\n" + "".join(f"\n- {note}" for note in notes(rows))
    severities = {line: {w: value for w, value in values.items() if len(value) > 1}
                  for line, values in cells.items()}
    if any(severities.values()):
        out += "\n\nEach severity, from mild to strong:\n\n" + markdown(severities, names, each)
    if rows[0]["task"] == "classification":
        out += "\n\nIn short:\n\n" + summary(shown, cells, names)
    return out


def main():
    if len(sys.argv) != 2:
        raise ValueError("expected a folder or a file: python -m robust.results FOLDER")
    rows = read_rows(sys.argv[1])
    if not rows:
        raise ValueError(f"no rows in {sys.argv[1]}, expected what eval_robust.py wrote")
    print(tables(rows))


if __name__ == "__main__":
    common.run(main)
