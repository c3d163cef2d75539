"""The evaluator's rows as Markdown tables, on the screen and on disk.

    python -m robust.tables results/cifar10_robustness       # the tables of a results.jsonl
"""

import json
import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

import common
from robust import corruptions, metrics
from robust.measures import in_words
from robust.rows import DEFAULTS, group, identity, key, read_rows

# --- a row in words ------------------------------------------------------------------------------

def show(setting):
    """8/255 for an eps, else what identifies the setting."""
    if "eps" in setting:
        k = 255 * setting["eps"]
        whole = setting["eps"] <= 1 and abs(k - round(k)) < 1e-6
        return f"{k:.3g}/255" if whole else f"{setting['eps']:.3g}"
    if "scale" in setting:
        return f"{setting['scale']:.3g}"
    return setting.get("type", setting.get("split", ""))


def title(row):
    """What was measured: clean, fog, pgd 8/255."""
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
    """The conditions of an attack or noise, if not the default: pixels, true labels, clip."""
    space, labels, clip = (row["conditions"][k] for k in ("space", "labels", "clip"))
    attacked = "eps" in row["setting"] or row["measure"] in ("noise", "cw")
    if not attacked or (space, labels, clip) == ("pixel", "true", True):
        return ""
    return f"{space}, {labels}, {'clip' if clip else 'no clip'}"


def lines(row):
    """A row's lines in the table: [(name, value in percent or the unit named, a share?)]."""
    name = title(row)
    if row["measure"] == "perplexity":
        stride = row["setting"].get("stride", "not kept")
        numbers = dict(segment="segment-wise", sliding=f"sliding, stride {stride}",
                       attacked="attacked",
                       attacked_unswapped="attacked, words not swapped",
                       clean_unswapped="clean, the same words")
        return [(f"{name}, {text}", row[field], False) for field, text in numbers.items()]
    if "mean_iou" in row:
        numbers = [("mean accuracy", row["mean_accuracy"]), ("mean IoU", row["mean_iou"])]
        if row["measure"] == "clean":
            numbers.insert(0, ("pixel accuracy", row["pixel_accuracy"]))
        return [(f"{name}, {text}", float(np.mean(value)), False) for text, value in numbers]
    if row["measure"] == "corruptions":
        return [(f"{name}, error", 100 - sum(row["top1"]) / len(row["top1"]), True)]
    if row["measure"] == "imagenet_o":
        numbers = "AUPR", "AUROC", "FPR95"
        return [(f"imagenet_o, {number}", row[number.lower()], False) for number in numbers]
    if row["measure"] == "cw":
        return [("cw, top-1", row["top1"], True),
                ("cw, median L2 (pixel units)", row["median_l2"], False),
                *((f"cw, top-1 within L2 {r}", v, True) for r, v in row["top1_at_l2"].items())]
    stages = {stage: v for stage, v in row.get("stages", {}).items() if stage != "clean"}
    stages = [(f"{name}, after {stage}", v, True) for stage, v in stages.items()]
    return [*stages, (f"{name}, top-1", row["top1"], True), (f"{name}, top-5", row["top5"], True)]


def tell_apart(names, details):
    """Names {key: text}; equal ones get those details {key: {field: value}} that differ."""
    names = dict(names)
    for field in dict.fromkeys(field for fields in details.values() for field in fields):
        for name in set(names.values()):
            twins = [k for k in names if names[k] == name]
            values = {k: str(details[k].get(field)) for k in twins}
            if len(set(values.values())) > 1:
                names.update({k: f"{name}, {field} {values[k]}" for k in twins})
    return names


# --- tables --------------------------------------------------------------------------------------

def fill(rows):
    """Rows as {line: {model: value}}, and times each image was right as {line: {model: (n,)}}.

    A line is (name, conditions in words, images, whatever else was set, as JSON, a share of the
    images?), a model its identity. A line of times right has the row's title alone for a name.
    """
    cells, rights = {}, {}
    for row in rows:
        conditions, tag = row["conditions"], unusual(row)
        named = ("type", "split", "eps", "scale")         # by the line's name
        rest = {k: v for k, v in row["setting"].items() if k not in named}
        rest.update(seed=conditions["seed"], amp=conditions["amp"], data_dir=row.get("data_dir"))
        where, w = (tag, row["images"], json.dumps(rest, sort_keys=True)), identity(row)
        for name, value, share in lines(row):
            cells.setdefault((name, *where, share), {})[w] = value
        if "right" in row:
            texts = np.ravel(row["right"])                # one, or one a severity or draw
            right = sum(metrics.unpack(text, row["images"]).int() for text in texts)
            rights.setdefault((title(row), *where, False), {})[w] = right
    return cells, rights


def add_means(cells, models, names):
    """The cells with, after the last corruption, the mean of the 15 and, of errors, how it relates
    to a reference: mCE to AlexNet, on ImageNet at all five severities; elsewhere to the first
    model with all 15.
    """
    out, blocks = {}, {}
    for line, values in cells.items():
        out[line] = values
        kind, _, what = line[0].partition(", ")
        block = blocks.setdefault((what, *line[1:]), {})
        if kind in corruptions.NAMES:
            block[kind] = values
        if kind not in corruptions.NAMES or len(block) < len(corruptions.NAMES):
            continue

        # the last of the 15: the models that have all of them
        found = {w: {name: block[name].get(w) for name in corruptions.NAMES} for w in models}
        found = {w: own for w, own in found.items() if None not in own.values()}
        where = (*line[1:4], False)
        out[f"mean of the 15, {what}", *where] = {w: sum(own.values()) / len(own)
                                                  for w, own in found.items()}
        if what != "error" or not found:
            continue
        first = next(iter(found))
        as_alexnet = json.loads(line[3]).get("severities") == [1, 2, 3, 4, 5]
        mce, relative = {}, {}
        for w, own in found.items():
            if as_alexnet and models[w].get("imagenet1k"):
                shares = {name: error / 100 for name, error in own.items()}
                mce[w] = metrics.mean_corruption_error(shares)
            elif len(found) > 1 and min(found[first].values()) > 0:
                relative[w] = metrics.mean_corruption_error(own, found[first])
        out["mCE", *where] = mce
        out[f"corruption error relative to {names[first]}", *where] = relative
    return out


def by_severity(rows, models, names):
    """Lines of the corruptions and of their mean: {line: {model: [a value a severity]}}."""
    rows = [{k: v for k, v in row.items() if k != "right"} for row in rows
            if row["measure"] == "corruptions"]
    most = max((len(row["setting"].get("severities", ())) for row in rows), default=0)
    found = {}
    for i in range(most if most > 1 else 0):
        part = [row | {k: [row[k][i]] for k in ("top1", "mean_accuracy", "mean_iou") if k in row}
                for row in rows if i < len(row["setting"].get("severities", ()))]
        for line, values in add_means(fill(part)[0], models, names).items():
            kind, _, what = line[0].partition(", ")
            if kind in ("mean of the 15", *corruptions.NAMES):
                own = found.setdefault((f"{kind} by severity, {what}", *line[1:]), {})
                for w, value in values.items():
                    own.setdefault(w, []).append(value)
    return found


def line_names(cells):
    """{line: name}: lines that would look the same say what else was set."""
    blocks, names = {}, {}
    for line in cells:
        blocks.setdefault(line[1:3], []).append(line)
    for block in blocks.values():
        settings = {line: json.loads(line[3]) for line in block}
        names.update(tell_apart({line: line[0] for line in block}, settings))
    return names


def markdown(cells, columns, cell, counted="images"):
    """A table of the lines with a text; columns: {heading: models}, cell: one, mean or pair."""
    names = line_names(cells)
    measure = "perplexity" if counted == "tokens" else "measure (% unless it says otherwise)"
    body = [[measure, "conditions", counted, *columns]]
    for line, values in cells.items():
        texts = [cell(line, values, models) for models in columns.values()]
        if any(texts):
            body.append([names[line], *line[1:3], *texts])
    if not any(row[1] for row in body[1:]):
        body = [[row[0], *row[2:]] for row in body]
    return common.table(body[1:], body[0])


def one(line, values, models):
    """What a table says of one model: its value, and how sure it is if that is a share."""
    if models[0] not in values:
        return ""
    value = values[models[0]]
    if not line[4]:
        return f"{value:.2f}"
    low, high = metrics.wilson(value / 100, line[2])
    return f"{value:.2f} ({100 * low:.1f}-{100 * high:.1f})"


def mean(line, values, models):
    """Of several models: mean ± standard deviation."""
    found = [values[w] for w in models if w in values]
    std = f" ± {np.std(found, ddof=1):.2f}" if len(found) > 1 else ""
    return f"{np.mean(found):.2f}{std}" if found else ""


def pair(line, values, models):
    """Of two models: how many images are right more often in the first, in the second, and p."""
    if not set(models) <= set(values):
        return ""
    first, second = (values[w] for w in models)
    a, b = int((first > second).sum()), int((second > first).sum())
    return f"{a} : {b}, p {metrics.mcnemar(a, b):.2g}"


def each(line, values, models):
    """Of one model or the mean of several: a value a severity."""
    found = [values[w] for w in models if w in values]
    return "  ".join(f"{value:.1f}" for value in np.mean(found, 0)) if found else ""


def attack_notes(rows):
    """Settings of each attack, and how far it moved images."""
    attacks = {}
    for row in rows:
        if "max_linf" in row:
            named = ("eps", "scale", "source", "weights")           # by a line's name
            rest = {k: v for k, v in row["setting"].items() if k not in named}
            words = f"{row['measure']} {in_words(rest)}".strip(), unusual(row)
            attacks.setdefault(", ".join(filter(None, words)), []).append(row)
    out = []
    for attack, own in attacks.items():
        moved, outside = {}, 255 * max(row.get("outside", 0) for row in own)
        for row in sorted(own, key=lambda row: row["setting"].get("eps", 0)):
            moved.setdefault(show(row["setting"]), []).append(255 * row["max_linf"])
        budgets = f" with {', '.join(moved)}" if any(moved) else ""
        most = ", ".join(f"{max(far):.2f}" for far in moved.values())
        out.append(f"{attack}: a pixel moved by at most {most} of 255{budgets}, and at most "
                   f"{outside:.2f} out of range.")
    return out


def image_notes(row):
    """What a row says of how its images were looked at."""
    setting, out = row["setting"], []
    if "severities" in setting:
        out.append(f"Corruptions: mean of severities {', '.join(map(str, setting['severities']))}.")
    if "mean_iou" in row and "window" in setting:
        looked = in_words({k: setting[k] for k in ("window", "stride", "scales", "flip")})
        classes = np.unique(row["classes"])
        out.append(f"Means over {' or '.join(map(str, classes))} classes; {looked}.")
    return out


def notes(rows):
    """What a reader of these rows has to know besides, a line each."""
    out = [f"Words swapped: {row['swapped']} of {row['images']} {row['setting']['split']} tokens "
           f"({100 * row['swapped'] / row['images']:.2f} %) became `{row['word']}`."
           for row in rows if row.get("word")]
    out += [note for row in rows for note in image_notes(row)]
    if unit(rows[0]) == "images":
        seeds = ", ".join(str(s) for s in sorted({row["conditions"]["seed"] for row in rows}))
        out.append(f"Where not all images count: a random choice, seed {seeds}, the same for all"
                   f"{' of a seed' if ',' in seeds else ''}.")
    out += attack_notes(rows)
    if any("eps" in row["setting"] for row in rows):
        out.append("Top-5 under attack is not a worst case: the images were made for top-1.")
    settings = [row["setting"] for row in rows if row["setting"].get("type") == "frost"]
    if any(s.get("frost") == "procedural" and not s.get("released") for s in settings):
        out.append("frost: procedural, not ImageNet-C's photographs (--frost_dir).")
    return list(dict.fromkeys(out))


def tables(rows):
    """Markdown: one column per checkpoint; where seeds differ only, one per model with mean ± std
    over seeds; where outcomes were kept, every further model beside the first, image by image.
    """
    models = {identity(row): row for row in rows}         # in order of appearance
    groups, details = {}, {}
    for w, row in models.items():
        groups.setdefault(group(row), []).append(w)
        details[w] = {**DEFAULTS[row.get("task", "classification")], **row.get("model_config", {})}
        details[w].update({k: row.get(k) for k in ("recipe", "checkpoint", "weights")})
    names = tell_apart({w: row["model"] for w, row in models.items()}, details)
    kinds = tell_apart({g: models[w[0]]["kind"] for g, w in groups.items()},
                       {g: details[w[0]] for g, w in groups.items()})
    cells, rights = fill(rows)
    cells = add_means(cells, models, names)
    counted = unit(rows[0])

    out = markdown(cells, {names[w]: [w] for w in models}, one, counted)
    if any(line[4] for line in cells):
        out += "\n\n(low-high): Wilson's 95 % interval over images; severities, draws count once."
    out += "\n" + "".join(f"\n- {note}" for note in notes(rows))
    columns = {f"{kinds[g]} (n = {len(w)})": w for g, w in groups.items()}
    if len(groups) < len(models):
        out += "\n\nMean ± standard deviation over seeds:\n\n"
        out += markdown(cells, columns, mean, counted)
    severities = by_severity(rows, models, names)
    if severities:
        out += "\n\nEach severity, from mild to strong; means over n seeds:\n\n"
        out += markdown(severities, columns, each)
    first, *others = models
    if any(first in values and len(values) > 1 for values in rights.values()):
        out += f"\n\nImages that only {names[first]} gets right : that only the other does,"
        out += "\nand p of McNemar's exact test (severities, draws: right in more of them):\n\n"
        out += markdown(rights, {names[w]: [first, w] for w in others}, pair)
    return out


# --- on disk -------------------------------------------------------------------------------------

class Results:
    """The finished rows, and results.jsonl and table.md, which rank 0 writes row by row."""

    def __init__(self, folder, data, models, resume, rank):
        self.out, self.table = Path(folder, "results.jsonl"), Path(folder, "table.md")
        self.data, self.rank = data, rank
        self.rows = read_rows(self.out, models)
        if self.rows and not resume:
            raise ValueError(f"--out_dir {folder} holds results: add --resume to go on from them, "
                             "or choose another one")
        common.broadcast([None])                          # all have read before one writes
        if rank == 0:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            common.Log(self.out).cut(0)                   # a line that a kill cut short goes

    def lacks(self, row):
        """Is there no row of the same model, measure, setting, conditions and images?"""
        return key(row) not in self.rows

    def add(self, row):
        """Keep a finished row."""
        self.rows[key(row)] = row
        if self.rank == 0:
            common.Log(self.out).append(row)
            self.write_table()
            numbers = [f"{line} {value:.2f}" for line, value, _ in lines(row)]
            tqdm.write("  ".join([f"{row['model']:28}", *numbers,
                                  f"({row['images']} {unit(row)}, {row['seconds']:.1f} s)"]))
            if square_gain(row) > 0.2:
                tqdm.write(f"warning: Square took {square_gain(row):.2f} points after the attacks "
                           "with gradients, more than 0.2: they may be hidden; see --checks")

    def write_table(self):
        text = tables([row for row in self.rows.values() if row["data"] == self.data])
        self.table.write_text(text + "\n")
        return text


def main():
    if len(sys.argv) != 2:
        raise ValueError("expected a folder: python -m robust.tables FOLDER")
    path = Path(sys.argv[1], "results.jsonl")
    rows = read_rows(path)
    if not rows:
        raise ValueError(f"no rows in {path}, expected a file that eval_robust.py wrote")
    print(tables(list(rows.values())))


if __name__ == "__main__":
    common.run(main)
