"""The evaluator's tables, from rows: on the screen, and on disk after every row."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

import common
from robust import corruptions, metrics
from robust.measures import in_words
from robust.results import (frozen, group, identity, key, numbers_of, read_rows, show, unit,
                            unusual, worst_cases)


# --- lines and cells -----------------------------------------------------------------------------

class Line(NamedTuple):
    """What a line of a table is about."""
    name: str
    conditions: str                  # of an attack, in words, if they are not the default
    images: int
    rest: tuple                      # whatever else was set, frozen
    share: bool


def cells_of(rows):
    """Arrange rows as {line: {model's identity: (1,) or a value a severity}}."""
    cells = {}
    for row in rows:
        rest = {k: v for k, v in row["setting"].items()
                if k not in ("type", "split", "eps", "scale")}              # by a line's name
        rest.update(seed=row["conditions"]["seed"], amp=row["conditions"]["amp"],
                    data_dir=row["data_dir"])
        for number in numbers_of(row):
            line = Line(number.name, unusual(row), row["images"], frozen(rest), number.share)
            cells.setdefault(line, {})[identity(row)] = number.value
    return cells


def add_means(cells, models):
    """Add, after the last corruption, the mean of the 15 for models that have all of them, and on
    ImageNet, at all five severities, mCE, where AlexNet is 100 %."""
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


# --- tables --------------------------------------------------------------------------------------

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


def markdown(cells, names, text_of, counted="images"):
    """Write a table: a row for each line with a value, a column for each model of names."""
    shown = {}
    for where in {(line.conditions, line.images) for line in cells}:
        lines = [line for line in cells if (line.conditions, line.images) == where]
        shown |= tell_apart({line: line.name for line in lines},        # equal names say more
                            {line: dict(line.rest) for line in lines})
    body = [[shown[line], line.conditions, line.images,
             *(text_of(line, values[w]) if w in values else "" for w in names)]
            for line, values in cells.items() if any(w in values for w in names)]
    measure = "perplexity" if counted == "tokens" else "measure (% unless it says otherwise)"
    header = [measure, "conditions", counted, *names.values()]
    if not any(row[1] for row in body):
        header, *body = ([row[0], *row[2:]] for row in (header, *body))
    return common.table(body, header)


def with_interval(line, value):
    """Write a value and, if it is a share, its 95 % interval."""
    value = value.mean()
    if not line.share:
        return f"{value:.2f}"
    low, high = metrics.wilson(value / 100, line.images)
    return f"{value:.2f} ({100 * low:.1f}-{100 * high:.1f})"


def each(line, values):
    """Write a value a severity."""
    return "  ".join(f"{value:.1f}" for value in values)


def notes(rows):
    """List what a reader of these rows has to know besides."""
    out, seeds = [], sorted({row["conditions"]["seed"] for row in rows})
    for row in rows:
        setting = row["setting"]
        if "word" in row:
            share = 100 * row["swapped"] / row["images"]
            out.append(f"Words swapped: {row['swapped']} of {row['images']} {setting['split']} "
                       f"tokens ({share:.2f} %) became `{row['word']}`.")
        if "severities" in setting:
            severities = ", ".join(map(str, setting["severities"]))
            out.append(f"Corruptions: mean of severities {severities}.")
        if "mean_iou" in row:
            how = in_words({k: setting[k] for k in ("window", "stride", "scales", "flip")})
            classes = " or ".join(map(str, np.unique(row["classes"])))
            out.append(f"Means over {classes} classes; {how}.")
    if unit(rows[0]) == "images":
        out.append(f"Where not all images count: a random choice, seed "
                   f"{', '.join(map(str, seeds))}, the same for all models.")
    out += how_far(rows)
    if any("eps" in row["setting"] for row in rows):
        out.append("Top-5 under attack is not a worst case: the images were made for top-1.")
    if any(row["setting"].get("type") == "frost" and row["setting"].get("frost") == "procedural"
           and not row["setting"].get("released") for row in rows):
        out.append("frost: procedural, not ImageNet-C's photographs (--frost_dir).")
    return list(dict.fromkeys(out))


def how_far(rows):
    """Say of each attack how far it moved pixels at most, at each of its budgets."""
    attacks = {}
    for row in rows:
        if "max_linf" in row:
            rest = {k: v for k, v in row["setting"].items()
                    if k not in ("eps", "scale", "source", "weights")}       # by a line's name
            words = f"{row['measure']} {in_words(rest)}".strip(), unusual(row)
            moves = attacks.setdefault(", ".join(filter(None, words)), {})
            size, budget = (255 * row["max_linf"], 255 * row["outside"]), show(row["setting"])
            moves[budget] = tuple(map(max, size, moves.get(budget, size)))
    for attack, moves in attacks.items():
        most = ", ".join(f"{linf:.2f}" for linf, _ in moves.values())
        budgets = f" with {', '.join(moves)}" if any(moves) else ""
        yield (f"{attack}: a pixel moved by at most {most} of 255{budgets}, and at most "
               f"{max(outside for _, outside in moves.values()) + 0:.2f} out of range.")


def summary(rows, cells, names):
    """Sum up each classifier: clean, mean of the 15, the worst attack at each budget."""
    body, seeds, worst = [], {}, {}
    for row in rows:
        seeds.setdefault(group(row), set()).add(identity(row))
        if "eps" in row["setting"] and row["measure"] != "sld":
            eps = row["setting"]["eps"], show(row["setting"]), unusual(row)
            found = worst.setdefault(identity(row), {})
            found[eps] = min(found.get(eps, 100), row["top1"])

    def last(name, w):
        found = [values[w] for line, values in cells.items() if line.name == name and w in values]
        return found[-1].mean() if found else None

    for w, name in names.items():
        clean, error = last("clean, top-1", w), last("mean of the 15, error", w)
        texts = [" ".join(filter(None, (budget, how, f"{top1:.1f}")))
                 for (_, budget, how), top1 in sorted(worst.get(w, {}).items())]
        body.append([name, "" if clean is None else f"{clean:.1f}",
                     "" if error is None else f"{100 - error:.1f}", ", ".join(texts)])
    text = common.table(body, ["top-1 in %", "clean", "mean of the 15 corruptions",
                               "worst attack, by budget"])
    if min(map(len, seeds.values())) == 1:
        text += ("\n\nOne network of a kind ranks nothing: networks that differ in the seed alone "
                 "differ by points. Train several seeds, and compare them with referee.studies.robustness.")
    return text


def tables(rows):
    """Write rows as Markdown: a column for each model; then the severities, and a summary."""
    models = {identity(row): row for row in rows}         # in order of appearance
    names = tell_apart({w: row["model"] for w, row in models.items()},
                       {w: row["model_config"] for w, row in models.items()})
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


# --- on disk -------------------------------------------------------------------------------------

class Results:
    """The finished rows, and results.jsonl and table.md, which rank 0 writes row by row."""

    def __init__(self, folder, data, resume, rank):
        self.out, self.table = Path(folder, "results.jsonl"), Path(folder, "table.md")
        self.data, self.log = data, None
        self.rows = {key(row): row for row in read_rows(self.out)}
        if self.rows and not resume:
            raise ValueError(f"--out_dir {folder} holds results: add --resume to go on from them, "
                             "or choose another one")
        common.broadcast([None])                          # all have read before one writes
        if rank == 0:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self.log = common.Log(self.out)
            self.log.cut(0)                               # a line that a kill cut short goes

    def lacks(self, row):
        """Is there no row of the same model, measure, setting, conditions and images?"""
        return key(row) not in self.rows

    def add(self, row):
        """Keep a finished row."""
        self.rows[key(row)] = row
        if not self.log:
            return
        self.log.append(row)
        self.write_table()
        numbers = [f"{number.name} {number.value.mean():.2f}" for number in numbers_of(row)]
        tqdm.write("  ".join([f"{row['model']:28}", *numbers,
                              f"({row['images']} {unit(row)}, {row['seconds']:.1f} s)"]))
        stages = row.get("stages", {})
        gain = stages.get("fab-t", 0) - stages.get("square", 0)
        if gain > 0.2:
            tqdm.write(f"warning: Square took {gain:.2f} points after the attacks with gradients, "
                       "more than 0.2: they may be hidden; see --checks")

    def write_table(self):
        """Write the table of the rows of this data set; returns it."""
        text = tables([row for row in self.rows.values() if row["data"] == self.data])
        self.table.write_text(text + "\n")
        return text
