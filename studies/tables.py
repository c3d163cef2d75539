"""Tables of what a study found: rows on screen and as JSON, means over layers as CSV."""

import csv
import datetime
import math
import os
import sys

import numpy as np
import torch

import common


# --- rows of one kind -----------------------------------------------------------------------------

def hardware(device):
    """The machine in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpu = device.type
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as f:
            names = [line.split(": ")[1].strip() for line in f if line.startswith("model name")]
        cpu = ", ".join([cpu, *names[:1]])
    return f"{cpu}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def plain(x):
    """A cell: numbers below 10 with three digits after the point."""
    if isinstance(x, float):
        return f"{x:,.3f}" if x < 10 else f"{x:,.1f}"
    return f"{x:,}" if isinstance(x, int) else str(x)


def report(title, device, rows, tables, out=None):
    """Print tables, {title: columns}, of rows (dicts); append the rows to the file `out`."""
    print(f"{title}\n{hardware(device)}; torch {torch.__version__}")
    for what, columns in tables.items():
        cells = [[plain(row.get(column, "-")) for column in columns] for row in rows]
        print(f"\n{what}\n\n{common.table(cells, columns)}")
    study = os.path.basename(sys.argv[0]).removesuffix(".py")
    about = dict(command=" ".join([f"python -m studies.{study}", *sys.argv[1:]]),
                 hardware=hardware(device), torch=torch.__version__,
                 date=f"{datetime.date.today()}")
    for row in rows if out else ():
        common.Log(out).append(about | row)


def spread(values, form):
    """Mean ± standard deviation of numbers, as text; "" of none. form: of the mean, +.2f."""
    if not len(values):
        return ""
    deviation = f" ± {np.std(values, ddof=1):{form.lstrip('+')}}" if len(values) > 1 else ""
    return f"{np.mean(values):{form}}{deviation}"


def half_width(values):
    """Half of the 95 % t-interval of a mean over values (n,), such as seeds; nan for n < 2."""
    if len(values) < 2:
        return math.nan
    from scipy import stats
    return stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)


# --- means over layers ----------------------------------------------------------------------------

WORDS = ("run", "layer", "measure", "source", "how")   # columns of CSV files that are no numbers
PER_LAYER = ("EV", "eta", "frac", "eig_cos")           # what CSV files have layer by layer


def summarise(results):
    """{(experiment, measure, source, layer): (images, ...)} to rows of means over images.

    Rows: (experiment, measure, source, layer, mean, standard error); layer "all": mean of layers.
    The standard error of one image is nan.
    """
    table = {}
    for (*key, layer), t in results.items():
        table.setdefault(tuple(key), {})[layer] = t
    rows = []
    for key, layers in table.items():
        stack = torch.from_numpy(np.stack(list(layers.values())))           # (layers, images, ...)
        for layer, t in [*layers.items(), ("all", stack.nanmean(0).numpy())]:
            mean, n = t.mean(0), len(t)
            se = t.std(0, ddof=1) / math.sqrt(n) if n > 1 else mean * math.nan
            rows.append((*key, layer, mean, se))
    return rows


def cell(measure, mean, se):
    """A number of a table as text."""
    if math.isnan(mean):
        return "flat" if measure == "eta" else "-"
    return f"{mean:.4g}" + (f" ±{se:.1g}" if se > 1e-9 * abs(mean) else "")


def print_table(title, text, rows):
    """rows: (measure, source, row name, mean, se). A block a measure; those of one source share."""
    print(f"\n=== {title}\n")
    print("\n".join(f"  {line}".rstrip() for line in text.splitlines()))
    sources = {}
    for m, s, *_ in rows:
        sources.setdefault(m, {})[s] = True
    alone = [(m, *sources[m]) for m in sources if len(sources[m]) == 1]
    blocks = [(m, [(m, s) for s in sources[m]]) for m in sources if len(sources[m]) > 1]
    blocks += [("", alone[i:i + 5]) for i in range(0, len(alone), 5)]
    cells = {(m, s, name): cell(m, mean, se) for m, s, name, mean, se in rows}
    for name, columns in blocks:
        heads = [s if name else m for m, s in columns]
        print(f"\n  {name:22s}" + "".join(f"{head:<21s}" for head in heads))
        for row in dict.fromkeys(row[2] for row in rows if row[:2] in columns):
            line = [cells.get((m, s, row), "") for m, s in columns]
            print(f"    {row:20s}" + "".join(f"{c:<21s}" for c in line))


def write_csv(path, header, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as f:
        writer = csv.writer(f)
        writer.writerow(header)
        writer.writerows([f"{x:.6g}" if isinstance(x, float) else x for x in row] for row in rows)


def write_tables(out, experiment, rows):
    """<experiment>.csv and, for curves over axes, <experiment>_axes.csv. rows: (Point, row)."""
    scalars, curves = [], []
    for point, (_, m, source, layer, mean, se) in rows:
        start = (point.run, point.step, layer, m.removesuffix(" by axis"), source)
        if mean.ndim and point.last:
            curves += [(*start, d + 1, float(mean[d]), float(se[d])) for d in range(len(mean))]
        elif not mean.ndim and (layer == "all" or point.last and m in PER_LAYER):
            scalars.append((*start, float(mean), float(se), len(point.inputs)))
    header = ["run", "step", "layer", "measure", "source"]
    write_csv(out / f"{experiment}.csv", [*header, "mean", "se", "images"], scalars)
    if curves:
        write_csv(out / f"{experiment}_axes.csv", [*header, "axis", "mean", "se"], curves)


def read_csv(path, run="", last=False, **only):
    """Rows of a CSV file as dicts; [] without the file.

    Only those of runs whose name begins with `run` (a str, or one of a tuple) and, if `last`, of
    each run's last checkpoint, with the given values in the other columns.
    """
    if not path.exists():
        return []
    with open(path, newline="") as f:
        rows = [{k: t if k in WORDS else float(t) for k, t in row.items()}
                for row in csv.DictReader(f)]
    rows = [row for row in rows if row["run"].startswith(run)
            and all(row[k] == v for k, v in only.items())]
    end = {row["run"]: row["step"] for row in sorted(rows, key=lambda row: row["step"])}
    return [row for row in rows if not last or row["step"] == end[row["run"]]]
