"""The evaluator's table, from rows: on the screen, and on disk after every row."""

from pathlib import Path

import numpy as np
from tqdm import tqdm

import common
from common import InputError
from robust.measures import in_words
from robust.results import (frozen, group, identity, key, means, numbers_of, read_rows, unusual,
                            worst_cases)

IN_TITLE = ("eps", "scale", "l1", "type", "split", "weights")


def column_names(rows):
    """{identity: name} of the models; equal names also say which file it was, and its weights."""
    models = {identity(row): row for row in rows}
    names = {w: row["model"] for w, row in models.items()}
    for field in ("checkpoint", "weights", "model_config"):
        twins = {w for w in names if list(names.values()).count(names[w]) > 1}
        names.update({w: f"{names[w]}, {models[w][field]}" for w in twins})
    return names


def settings_that_vary(rows):
    """{measure: names of settings and conditions of which these rows have several values}."""
    seen = {}
    for row in rows:
        for name, value in {**row["setting"], **row["conditions"]}.items():
            seen.setdefault((row["measure"], name), set()).add(frozen(value))
    return {where for where, values in seen.items() if len(values) > 1}


def table(rows):
    """Rows as Markdown: a line a number, a column a model; below it what a reader has to know."""
    names, lines, shown = column_names(rows), {}, rows + means(rows) + worst_cases(rows)
    vary = settings_that_vary(shown)
    for row in shown:
        own = {k: v for k, v in {**row["setting"], **row["conditions"]}.items()
               if (row["measure"], k) in vary and k not in (*IN_TITLE, "space", "labels", "clip")}
        for number in numbers_of(row):
            text = ", ".join(filter(None, (number.name, in_words(own), unusual(row))))
            cell = f"{number.value.mean():.2f}"
            if number.share:
                cell += " ({:.1f}-{:.1f})".format(*number.interval(row["images"]))
            lines.setdefault((text, row["images"]), {})[identity(row)] = cell
    counted = "tokens" if rows[0]["measure"] == "perplexity" else "images"
    what = "perplexity" if counted == "tokens" else "measure, per cent"
    body = [[*line, *(cells.get(w, "") for w in names)] for line, cells in lines.items()]
    out = common.table(body, [what, counted, *names.values()])
    return out + "\n\n" + "\n".join(f"- {note}" for note in notes(rows))


def notes(rows):
    """List what a reader of these rows has to know besides."""
    out, groups = [], {}
    for row in rows:
        setting = row["setting"]
        groups.setdefault(group(row), set()).add(identity(row))
        if "word" in row:
            share = 100 * row["swapped"] / row["images"]
            out.append(f"Words swapped: {row['swapped']} of {row['images']} {setting['split']} "
                       f"tokens ({share:.2f} %) became `{row['word']}`.")
        if "mean_iou" in row:
            how = in_words({k: setting[k] for k in ("window", "stride", "scales", "flip")})
            out.append(f"Means over {' or '.join(map(str, np.unique(row['classes'])))} classes; "
                       f"{how}.")
        if "severities" in setting:
            out.append(f"Corruptions: mean of severities {in_words(setting)}.".replace(
                in_words(setting), ", ".join(map(str, setting["severities"]))))
        if setting.get("frost") == "procedural" and setting["type"] == "frost" \
                and not setting.get("released"):
            out.append("frost: procedural, not ImageNet-C's photographs (--frost_dir).")
        if "top5" in row and "max_linf" in row:
            out.append("Top-5 under attack is no worst case: the images were made for top-1.")
    if rows[0]["task"] == "classification":
        out.append("(low-high): Wilson's 95 % interval over images. Images: a random choice, seed "
                   f"{rows[0]['conditions']['seed']}, the same for all models.")
        if max(map(len, groups.values())) == 1:
            out.append("One network of a kind ranks nothing: networks that differ in the seed "
                       "alone differ by points. Train several, and compare them with "
                       "referee.studies.robustness.")
    return list(dict.fromkeys(out))


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

    def has(self, row):
        """Is there a row of the same model, measure, setting, conditions and images?"""
        return key(row) in self.rows

    def add(self, row):
        """Keep a finished row: in memory, on disk, on the screen."""
        self.rows[key(row)] = row
        if not self.log:
            return
        self.log.append(row)
        self.write_table()
        numbers = [f"{number.name} {number.value.mean():.2f}" for number in numbers_of(row)]
        moved = f", moved {255 * row['max_linf']:.2f}/255" if "max_linf" in row else ""
        tqdm.write("  ".join([f"{row['model']:28}", *numbers,
                              f"({row['images']} images, {row['seconds']:.1f} s{moved})"]))
        stages = row.get("stages", {})
        gain = stages.get("fab-t", 0) - stages.get("square", 0)
        if gain > 0.2:
            tqdm.write(f"warning: Square took {gain:.2f} points after the attacks with gradients, "
                       "more than 0.2: they may be hidden; see --checks")

    def write_table(self):
        """Write the table of the rows of this data set; returns it."""
        text = table([row for row in self.rows.values() if row["data"] == self.data])
        self.table.write_text(text + "\n")
        return text
