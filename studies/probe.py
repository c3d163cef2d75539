"""Tools for studies of trained networks: load checkpoints, capture attention heads, write tables.

`points` loads models and images one after another. `capture` returns the queries, keys and values
of every attention layer. `summarise` turns measurements on images into rows.
"""

import argparse
import csv
import math
import re
from pathlib import Path
from typing import NamedTuple

import torch

import common
from attention import layer_inputs
from common import InputError
from data.datasets import load_part
from data.rng import epoch_order
from data.shapes import load_shapes
from kpca import log_kernel
from models import load_classifier


# --- attention heads ------------------------------------------------------------------------------

class Heads(NamedTuple):
    """The heads of one layer, float64: it computes h = softmax(q k^T / sqrt(D)) v."""
    q: torch.Tensor                     # (B, H, N, D)
    k: torch.Tensor                     # (B, H, N, D)
    v: torch.Tensor                     # (B, H, N, D) A multiplies it: (I - S) V if scaled, else V
    raw: torch.Tensor                   # (B, H, N, D) V
    x: torch.Tensor                     # (B, N, C) the layer's input
    S: torch.Tensor | None = None       # (B or 1, H, N, N) of Scaled Attention


@torch.no_grad()
def attention_inputs(module, x):
    """Return the Heads of a SelfAttention for its input x (B, N, C).

    For RPC, q and k come from the last PAP step.
    """
    q, k, raw = module.project(x)
    S, steps = None, module.trace(x)
    if steps:
        q, k = steps[-1]["Q2"], steps[-1]["K2"]
    q, k, raw, x = (t.double() for t in (q, k, raw, x))
    if module.attn == "scaled_s":
        S = module.learned.s[None].double()
    elif module.attn == "scaled_alpha":
        S = module.learned.s.double() * log_kernel(k, k).softmax(-1)
    return Heads(q, k, raw if S is None else raw - S @ raw, raw, x, S)


@torch.no_grad()
def capture(model, inputs):
    """Run a model on images (CPU) and return the Heads of every attention layer, in order."""
    return [attention_inputs(m, x) for m, x in layer_inputs(model.eval(), inputs)]


# --- flags ----------------------------------------------------------------------------------------

def parse_flags(doc, experiments, argv=None):
    """Parse the flags of a study. experiments: {name: function}; --exp becomes a list of names."""
    listed = "\n".join(f"  {name:12s} {experiment.__doc__.splitlines()[0]}"
                       for name, experiment in experiments.items())
    p = argparse.ArgumentParser(description=doc, epilog="experiments:\n" + listed,
                                formatter_class=argparse.RawDescriptionHelpFormatter,
                                allow_abbrev=False)
    flag = p.add_argument
    flag("--ckpt", nargs="+", required=True,
         help="checkpoints of train_cls.py, or run folders (their last.pt)")
    flag("--exp", default=",".join(experiments),
         help="experiments to run, separated by commas (default: all)")
    flag("--images", type=int, default=32, help="number of test images (default: 32)")
    flag("--untrained", action="store_true", help="also measure each run before its first step")
    flag("--out_dir", type=Path, default=Path("out/kpca"),
         help="folder for the CSV files (default: out/kpca)")
    args = p.parse_args(argv)
    args.exp = args.exp.split(",")
    for name in args.exp:
        if name not in experiments:
            raise InputError(f"--exp {name}: expected some of {','.join(experiments)}")
    return args


# --- models and inputs ----------------------------------------------------------------------------

def load_model(path):
    """Load (frozen model in eval mode, checkpoint) from a file or the last.pt of a run."""
    checkpoint = common.load(Path(path, "last.pt") if Path(path).is_dir() else path)
    return load_classifier(checkpoint).requires_grad_(False), checkpoint


def untrained(model, checkpoint):
    """Rebuild the network of a train_cls.py run before its first step: (network, checkpoint)."""
    args = checkpoint.get("args")
    if not args or args.get("init_from"):
        raise InputError("--untrained: expected runs of train_cls.py that started from random "
                         "weights")
    torch.manual_seed(args["seed"])
    return type(model)(model.config).eval(), {**checkpoint, "step": 0}


def load_test_images(checkpoint, config, n):
    """Load n test images (n, 3, S, S) in [0, 1] and labels (n,) from a checkpoint's data set."""
    trained = checkpoint.get("args") or {}
    name, size = trained.get("data", "shapes"), config.image_size
    if name == "shapes":
        source = load_shapes("test", n, size)
    else:
        flags = trained | dict(image_size=size, classes=checkpoint.get("classes"))
        source = load_part("all" if name == "folder" else "test", flags, "cpu")
    some = epoch_order(len(source.labels), 0, seed=0)[:n]              # shuffle the classes
    images = (torch.stack([source[i, i][0] for i in some.tolist()]) if name == "imagenet"
              else source.images[some])
    return images.float() / 255, source.labels[some]


def points(args):
    """Yield (run, step, model, images) for each --ckpt; --untrained also yields step 0 of a run."""
    started = set()
    for path in map(Path, args.ckpt):
        model, checkpoint = load_model(path)
        images, _ = load_test_images(checkpoint, model.config, args.images)
        folder = path if path.is_dir() else path.parent
        run = folder.name if (folder / "log.jsonl").exists() else path.stem
        if args.untrained and run not in started:
            started.add(run)
            yield run, 0, untrained(model, checkpoint)[0], images
        yield run, checkpoint.get("step", 0), model, images


# --- tables ---------------------------------------------------------------------------------------

TEXT_COLUMNS = ("run", "layer", "measure", "source")        # all other CSV columns hold numbers


def summarise(results, run, step):
    """Average the results of one network over images, and return the rows of its CSV file.

    results: {(measure, source, layer): (images,)}. se is the standard error over images, nan for
    one image. Rows of layer "all" have the mean over layers.
    """
    table, rows = {}, []
    for (measure, source, layer), t in results.items():
        table.setdefault((measure, source), {})[layer] = t
    for (measure, source), layers in table.items():
        layers |= {"all": torch.stack(list(layers.values())).nanmean(0)}
        for layer, t in layers.items():
            se = t.std().item() / math.sqrt(len(t)) if len(t) > 1 else math.nan
            rows.append(dict(run=run, step=step, layer=layer, measure=measure,
                             source=source, mean=t.mean().item(), se=se, images=len(t)))
    return rows


def print_table(title, text, rows):
    """Print rows of `summarise` as a table: one line per measure, one column per source."""
    sources = list(dict.fromkeys(row["source"] for row in rows))
    lines = {}
    for row in rows:
        error = f" ±{row['se']:.1g}" if row["se"] > 1e-9 * abs(row["mean"]) else ""
        cell = f"{row['mean']:.4g}{error}".replace("nan", "-")
        lines.setdefault((row["measure"], row["layer"]), {})[row["source"]] = cell
    body = [[*key, *(line.get(source, "") for source in sources)] for key, line in lines.items()]
    print(f"\n=== {title}\n\n{text}\n\n{common.table(body, ['measure', 'layer', *sources])}")


def check_new(path, run, step):
    """Raise InputError if a CSV file has rows of this run and step."""
    for row in read_csv(path):
        if (row["run"], row["step"]) == (run, step):
            raise InputError(f"{path} already has rows of run {run}, step {step}; move the file, "
                             "or give another --out_dir")


def write_csv(path, rows):
    """Append dicts with equal keys to a CSV file; a new file gets a header."""
    if not rows:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = list(rows[0])
    new = not path.exists()
    if not new:
        with open(path, newline="") as f:
            found = next(csv.reader(f), [])
        if found != columns:
            raise InputError(f"{path} has the columns {', '.join(found)}, expected "
                             f"{', '.join(columns)}; move the file, or give another --out_dir")
    with open(path, "a", newline="") as f:
        writer = csv.DictWriter(f, columns)
        if new:
            writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{x:.6g}" if isinstance(x, float) else x for k, x in row.items()})


def read_csv(path):
    """Read the rows of a CSV file; [] if there is no file. "network": the run without its seed."""
    if not path.exists():
        return []
    with open(path, newline="") as f:
        return [{k: t if k in TEXT_COLUMNS else float(t) for k, t in row.items()}
                | {"network": re.sub(r"_s\d+$", "", row["run"])} for row in csv.DictReader(f)]
