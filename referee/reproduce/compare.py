"""One table of the paper: its number, ours, and what each says of RPC.

    python -m referee.reproduce.compare table1 --rows out/reproduce/small --scale small

Reads paper.csv and every results.jsonl, log.jsonl and eigstats.csv under --rows. A run
is known by its folder's name, <arm>_s<seed>. Numbers of two scales cannot be compared, differences
between rows of one scale can: so both differences to the first row stand beside the numbers. What
was not run is printed as "not run".
"""

import argparse
import csv
import math
from collections import defaultdict
from pathlib import Path
from statistics import mean

import common
from referee.stats import spread
from robust.corruptions import NAMES
from robust.metrics import ALEXNET, mean_corruption_error

FOLDER = Path(__file__).parent
# table: {the paper's row: the folder of ours, before _s<seed>}
VITS = {"SymViT": "symmetric", "RPC 4iter/layer1": "rpc4", "RPC 5iter/layer1": "rpc5",
        "RPC 6iter/layer1": "rpc6", "RPC 2iter/all-layer": "rpc2all"}
SMALL = {"SymViT-small": "small_symmetric", "RPC 4iter/layer1": "small_rpc4",
         "symmetric, as many more epochs": "small_control"}     # not in the paper
FAN = {"FAN-tiny": "fan_symmetric", "RPC-FAN-tiny 4iter/layer1": "fan_rpc4"}
ARMS = {"table1": VITS, "table2": VITS, "table4": VITS,
        "table5": {"SymViT": "symmetric", "RPC 6iter/layer1": "rpc6"},
        "table3": {"Symlm": "lm_symmetric", "RPC-Symlm (4iter/layer1-4)": "lm_rpc4"},
        "table6": {row: f"seg_{arm}" for row, arm in VITS.items()},
        "table7": SMALL, "table8": SMALL, "table9": FAN, "table10": FAN,
        "table12": {"ViT": "softmax", "RPC-AsymViT 4iter/layer1": "asym4",
                    "RPC-AsymViT Sym/Asym": "symasym"},
        "fig2": {"ViT-tiny": "softmax"},
        "appE1": {"softmax": "softmax", "scaled_alpha": "scaled_alpha",
                  "scaled_s": "scaled_s"}}                      # the last not in the paper
PRINTED = {"fig2": "Fig. 2", "appE1": "E.1"}                   # a table's name in paper.csv
# the paper's column: our measure and number
PLAIN = {"top-1": ("clean", "top1"), "top-5": ("clean", "top5"), "IN-R": ("imagenet_r", "top1"),
         "IN-A": ("imagenet_a", "top1"), "IN-O AUPR": ("imagenet_o", "aupr"),
         "mean accuracy": ("clean", "mean_accuracy"), "mean IoU": ("clean", "mean_iou"),
         "corrupted mean accuracy": ("corruptions", "mean_accuracy"),
         "corrupted mean IoU": ("corruptions", "mean_iou")}


# --- what was run ---------------------------------------------------------------------------------

def read(folder):
    """{(arm, seed): [row]} of everything under a folder; a line cut short by a kill is left out."""
    rows = defaultdict(list)
    for path in sorted(Path(folder).rglob("*.jsonl")):
        for row in common.read_log(path):
            name = Path(row.get("checkpoint") or path.parent).name
            arm, _, seed = name.rpartition("_s")
            rows[arm, seed].append(row)

    # referee.kernel_pca's statistics of eigenvalues, of the last step
    for path in sorted(Path(folder).rglob("eigstats.csv")):
        with open(path, newline="") as file:
            cells = [row for row in csv.DictReader(file)
                     if (row["layer"], row["source"]) == ("all", "as they are")]
        for row in sorted(cells, key=lambda row: float(row["step"])):
            arm, _, seed = row["run"].rpartition("_s")
            number = {f"|eigenvalue| {row['measure']}": float(row["mean"])}
            rows[arm, seed].insert(0, number)                       # found before earlier steps
    return rows


def average(value):
    """A number, or the mean of a list over severities."""
    return mean(value) if isinstance(value, list) else value


def ours(rows, table, column):
    """The number of one run for a column of the paper's table, or None."""
    def of(measure):
        return [r for r in rows if r.get("measure") == measure]

    if table == "appE1":
        last = [r["eval"] for r in rows if "eval" in r][-1:]
        return last[0][{"top-1": "top1", "loss": "loss"}[column]] if last else None
    if table == "fig2":
        return next((r[column] for r in rows if column in r), None)
    if table == "table3":
        kind, split = ["sliding", *column.split()][-2:]
        return next((r[kind] for r in of("perplexity") if r["setting"]["split"] == split), None)

    corrupted = {r["setting"]["type"]: r for r in of("corruptions")}
    measure, field = PLAIN.get(column, ("", ""))
    if measure == "corruptions" or column in ("IN-C", "mCE"):
        return of_all_corruptions(corrupted, column, field or "top1")
    if measure:
        return next((r[field] for r in of(measure)), None)

    # "Fog top-1", "Fog CE", "PGD top-5": of an attack, the largest budget
    name, _, field = column.rpartition(" ")
    kind = name.lower().replace(" ", "_")
    kind = {"elastic": "elastic_transform", "jpeg": "jpeg_compression"}.get(kind, kind)
    if kind in corrupted:
        top1 = average(corrupted[kind]["top1"])
        if field == "top-1":
            return top1
        return (100 - top1) / ALEXNET[kind] if as_alexnet(corrupted[kind]) else None
    attacked = sorted(of(kind), key=lambda r: r["setting"].get("eps", 0))
    return attacked[-1][field.replace("-", "")] if attacked else None


def as_alexnet(row):
    """Is it of what AlexNet's errors are of: ImageNet, all five severities?"""
    return row["imagenet1k"] and row["setting"]["severities"] == [1, 2, 3, 4, 5]


def of_all_corruptions(corrupted, column, field):
    """The mean of the 15 types, or mCE beside AlexNet; None until all are there."""
    corrupted = {name: corrupted[name] for name in NAMES if name in corrupted}
    if len(corrupted) < len(NAMES):
        return None
    if column != "mCE":
        return mean(average(r[field]) for r in corrupted.values())
    errors = {name: 1 - average(r["top1"]) / 100 for name, r in corrupted.items()}
    return mean_corruption_error(errors) if all(map(as_alexnet, corrupted.values())) else None


# --- the table ------------------------------------------------------------------------------------

def lines(table, rows):
    """The table's cells, a dict each: row, column, paper, ours {seed: number}, note."""
    with open(FOLDER / "paper.csv", newline="") as file:
        name = PRINTED.get(table, table.removeprefix("table"))
        cells = [r for r in csv.DictReader(file) if r["table"] == name]
    columns = dict.fromkeys(cell["column"] for cell in cells)
    extra = [row for row in ARMS[table] if row not in {cell["row"] for cell in cells}]
    cells += [dict(row=row, column=column, value="nan", note="not in the paper")
              for row in extra for column in columns]
    for cell in cells:
        found = {seed: ours(rows[arm, seed], table, cell["column"])
                 for arm, seed in sorted(rows) if arm == ARMS[table][cell["row"]]}
        cell.update(paper=float(cell["value"]),
                    ours={seed: x for seed, x in found.items() if x is not None})
    return cells


def markdown(cells, scale):
    """Paper and ours, and the difference of each to the first row's."""
    base = {c["column"]: c for c in reversed(cells)}           # the first row of every column
    head = ["row", "column", "paper", f"ours, {scale}", "n", "paper - first row",
            "ours - first row", "note"]
    body = []
    for c in cells:
        first = base[c["column"]]
        texts = ["", ""]
        if c is not first:
            texts[0] = number(c["paper"] - first["paper"], "+.2f")
            pairs = c["ours"].keys() & first["ours"].keys()
            gains = [c["ours"][s] - first["ours"][s] for s in pairs]
            texts[1] = spread(gains, "+.2f") or "not run"
        tiny = any(0 < abs(x) < 0.01 for x in c["ours"].values())              # eigenvalues
        form = ".1e" if tiny else ".2f"
        own = spread([*c["ours"].values()], form) or "not run"
        numbers = [number(c["paper"], "g"), own, str(len(c["ours"]))]
        body.append([c["row"], c["column"], *numbers, *texts, c["note"]])
    return common.table(body, head)


def number(value, form):
    """Of the paper; nothing where it has none."""
    return "" if math.isnan(value) else format(value, form)


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("table", choices=list(ARMS))
    p.add_argument("--rows", required=True, help="folder of the runs and their evaluations")
    p.add_argument("--scale", required=True, help="tiny, small or paper: what the runs were")
    p.add_argument("--out", help="write the table to this file, too")
    args = p.parse_args(argv)

    cells = lines(args.table, read(args.rows))
    missing = sum(not cell["ours"] for cell in cells)
    if missing == len(cells):
        first = next(iter(ARMS[args.table].values()))
        raise common.InputError(f"--rows {args.rows} holds no run of {args.table}, expected "
                                f"folders such as {first}_s0 and their evaluations")
    title = f"# {args.table}, paper and ours at scale {args.scale}"
    text = [title, "", markdown(cells, args.scale), "",
            f"{len(cells) - missing} of {len(cells)} cells were run."]
    if args.scale != "paper":
        text += ["Ours is another data set and a smaller network: no number of it reproduces the "
                 "paper's; what can be compared is the sign of a difference."]
    print("\n".join(text))
    if args.out:
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        Path(args.out).write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    common.run(main)
