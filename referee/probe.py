"""What the studies of trained networks share: a checkpoint in, heads of attention and tables out.

`checkpoints` loads models and inputs one after another, `capture` returns what every attention
layer used, `summarise` makes rows of what was measured on images. No study itself.
"""

import argparse
import csv
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from tqdm import tqdm

import common
from attention import ATTENTIONS, SelfAttention, softmax_attention
from common import InputError
from data.imagenet import ImageTree
from data.images import load_test
from data.rng import epoch_order
from data.shapes import load_shapes
from kpca import exact_scaling, log_kernel
from referee.robust_attentions import standardise
from robust import sources


# --- what attention really used -------------------------------------------------------------------

class Heads(NamedTuple):
    """The heads of one layer, float64: it computes h = softmax(q k^T / sqrt(D)) v."""
    q: torch.Tensor                     # (B, H, N, D)
    k: torch.Tensor                     # (B, H, N, D)
    v: torch.Tensor                     # (B, H, N, D) what A multiplies: (I - S) V if scaled
    raw: torch.Tensor                   # (B, H, N, D) V itself
    x: torch.Tensor                     # (B, N, C) the layer's input
    S: torch.Tensor | None = None       # (B or 1, H, N, N) of Scaled Attention


@torch.no_grad()
def attention_inputs(module, x):
    """Heads of a SelfAttention of any kind at its input x (B, N, C). RPC: of its last step."""
    q, k, raw = module.project(x)
    S, steps = None, module.trace(x)
    if steps:
        q, k = steps[-1]["Q2"], steps[-1]["K2"]
    elif module.attn == "standardised":
        q, k = standardise(q), standardise(k)
    here = torch.device("cpu") if x.device.type == "mps" else x.device      # mps has no float64
    q, k, raw, x = (t.to(here).double() for t in (q, k, raw, x))

    # Scaled Attention: every S is a matrix here.
    if module.attn == "scaled_s":
        S = module.learned.s[None].to(k)
    elif module.attn == "scaled_alpha":
        S = module.learned.s.to(k) * log_kernel(k, k).softmax(-1)
    elif module.attn == "exact_s":
        S = exact_scaling(k, torch.eye(k.shape[-2]).to(k))
    return Heads(q, k, raw if S is None else raw - S @ raw, raw, x, S)


def attention_layers(model):
    return [m for m in model.modules() if isinstance(m, SelfAttention)]


@torch.no_grad()
def capture(model, inputs):
    """Run a model on images: the Heads of every layer in order."""
    seen, layers = {}, attention_layers(model)
    hooks = [m.register_forward_pre_hook(lambda m, args: seen.update({m: args[0]}))
             for m in layers]
    try:
        model.eval()(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return [attention_inputs(m, seen[m]) for m in layers]


# --- flags ----------------------------------------------------------------------------------------

def get_args(doc, experiments, argv=None, needs_ckpt=True):
    """The flags of a study; --exp becomes a list of names. experiments: {name: function}."""
    listed = "\n".join(f"  {name:12s} {experiment.__doc__.splitlines()[0]}"
                       for name, experiment in experiments.items())
    p = argparse.ArgumentParser(description=doc, epilog="experiments:\n" + listed,
                                formatter_class=argparse.RawDescriptionHelpFormatter,
                                allow_abbrev=False)
    flag, boolean, count = p.add_argument, argparse.BooleanOptionalAction, common.number(int, 1)
    flag("--ckpt", nargs="+", required=needs_ckpt, default=[], help="checkpoints of train_cls.py "
         "(a folder: its last.pt) or DeiT's; several of one run are tracked over training")
    flag("--exp", default=",".join(experiments), help="comma-separated; default: all that fit")
    flag("--images", type=count, default=32, help="test images; errors are over them")
    flag("--data", choices=["shapes", "cifar10", "folder", "imagenet"],
         help="default: the training's")
    flag("--data_dir", default=None, help="default: the folder it was trained from")
    flag("--untrained", action=boolean, default=False, help="also before the first step")
    flag("--out_dir", default="out/kpca", help="where CSV files go")
    flag("--device", choices=["cuda", "mps", "cpu"], help="default: cuda where there is one")
    args = p.parse_args(argv)
    args.exp = args.exp.split(",")
    for name in args.exp:
        if name not in experiments:
            raise InputError(f"--exp {name}: expected some of {','.join(experiments)}")
    return args


def device_of(name):
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


# --- models and inputs ----------------------------------------------------------------------------

def load_model(path):
    """(model in eval mode, checkpoint without weights), as the evaluator; of a folder: last.pt."""
    file = Path(path, "last.pt") if Path(path).is_dir() else path
    found = sources.load_model(file, torch.device("cpu"))
    if found.task != "classification":
        raise InputError(f"--ckpt {path} is no classifier")
    return found.model, found.checkpoint


def untrained(model, checkpoint, path):
    """The network as it was drawn before the first step of a run of ours, and its checkpoint."""
    args = checkpoint.get("args")
    if not args or args.get("init_from"):
        raise InputError(f"--untrained: {path} is not a run of ours that started from random "
                         f"weights")
    torch.manual_seed(args["seed"])
    return type(model)(model.config).eval(), {**checkpoint, "step": 0}


def load_images(checkpoint, config, n, data=None, data_dir=None):
    """n test images (n, 3, S, S) in [0, 1], their labels, and both in words."""
    trained = checkpoint.get("args") or {}
    name = data or trained.get("data", "shapes")
    where = argparse.Namespace(data=name, data_dir=data_dir or trained.get("data_dir"),
                               device="cpu")
    if name == "shapes":
        source = load_shapes("test", n, config.image_size)
    elif name == "imagenet" and where.data_dir:                             # some classes will do
        source = ImageTree(where.data_dir, "val", classes=checkpoint.get("classes"),
                           size=config.image_size, subset=True)
    else:
        source = load_test(where, trained, config.image_size, None)

    some = epoch_order(len(source.labels), 0, seed=0)[:n]              # mixed classes
    if name == "imagenet":
        files = tqdm(some.tolist(), "decoding", leave=False, disable=len(some) < 200)
        images = torch.stack([source[i][0] for i in files])
    else:
        images = source.images[some]
    what = f"{len(some)} images of {name}"
    return images.float() / 255, source.labels[some], what


class Point(NamedTuple):
    """A checkpoint of a run with the inputs on which it is looked at."""
    run: str
    step: int
    last: bool                          # the last of its run
    model: nn.Module
    inputs: torch.Tensor                # images (n, 3, S, S)
    where: str                          # all this in words, for titles


def checkpoints(args):
    """The Points of --ckpt, with --untrained also step 0 of each run, by run and step."""
    found, folders = {}, {}
    for path in args.ckpt:
        checkpoint, file = common.load(path), Path(path)
        folder = file if file.is_dir() else file.parent
        run = folder.name if file.is_dir() or checkpoint.get("task") else file.stem
        if args.untrained:
            found[run, 0] = path, True
        found.setdefault((run, checkpoint.get("step", 0)), (path, False))   # last.pt may be a copy
        if folders.setdefault(run, folder) != folder:
            raise InputError(f"--ckpt {folders[run]} {folder}: two runs named {run}, by which "
                             "their rows go; rename one")

    loaded = None
    for run, step in sorted(found):
        path, fresh = found[run, step]
        model, checkpoint = load_model(path)
        if fresh:
            model, checkpoint = untrained(model, checkpoint, path)
        if run != loaded:
            inputs, _, what = load_images(checkpoint, model.config, args.images, args.data,
                                          args.data_dir)
            loaded = run
        where = (f"{run}, step {step}, {model.config.attn}, {what}; "
                 f"mean ± standard error over images")
        last = step == max(s for r, s in found if r == run)
        yield Point(run, step, last, model, inputs, where)


def chunks(point, device, whole=False):
    """Inputs of a Point in pieces that keep a matrix of all heads at 2 MB on a CPU.

    whole: all in one piece, for measures that are no means over images.
    """
    c, n = point.model.config, len(point.inputs)
    size = 2 ** (18 if device.type == "cpu" else 24) // (c.num_heads * c.num_tokens ** 2)
    size = n if whole else max(1, size)
    for start in tqdm(range(0, n, size), point.run, leave=False):
        piece = slice(start, start + size)
        yield start, point.inputs[piece].to(device)


# --- tables ---------------------------------------------------------------------------------------

WORDS = ("run", "layer", "measure", "source")           # columns of CSV files that are no numbers


def summarise(results, point):
    """Make rows of means over images, as the CSV files have them, for one Point.

    results: {(measure, source, layer): (images,)}. se, the standard error over images, is nan of
    one image. layer "all": mean of layers; layers of their own only for the last checkpoint of a
    run.
    """
    table, rows = {}, []
    for (measure, source, layer), t in results.items():
        table.setdefault((measure, source), {})[layer] = t
    for (measure, source), layers in table.items():
        layers |= {"all": torch.stack(list(layers.values())).nanmean(0)}
        for layer, t in layers.items() if point.last else [("all", layers["all"])]:
            se = t.std().item() / math.sqrt(len(t)) if len(t) > 1 else math.nan
            rows.append(dict(run=point.run, step=point.step, layer=layer, measure=measure,
                             source=source, mean=t.mean().item(), se=se, images=len(t)))
    return rows


def print_table(title, text, rows):
    """Print rows of `summarise`: measures down, sources across."""
    sources = list(dict.fromkeys(row["source"] for row in rows))
    lines = {}
    for row in rows:
        error = f" ±{row['se']:.1g}" if row["se"] > 1e-9 * abs(row["mean"]) else ""
        cell = f"{row['mean']:.4g}{error}".replace("nan", "-")
        lines.setdefault((row["measure"], row["layer"]), {})[row["source"]] = cell
    body = [[*key, *(line.get(source, "") for source in sources)] for key, line in lines.items()]
    print(f"\n=== {title}\n\n{text}\n\n{common.table(body, ['measure', 'layer', *sources])}")


def write_csv(path, rows, mode="w"):
    """Write dicts with the same keys; nothing of none. mode "a": add them to the file."""
    if rows:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = mode == "w" or not path.exists()
        with open(path, mode, newline="") as f:
            writer = csv.DictWriter(f, rows[0])
            writer.writerows([dict(zip(rows[0], rows[0]))] * new)           # the header
            writer.writerows({k: f"{x:.6g}" if isinstance(x, float) else x for k, x in row.items()}
                             for row in rows)


def read_csv(path, **only):
    """Rows of a CSV file as dicts, with the given values in their columns; [] without the file."""
    if not path.exists():
        return []
    with open(path, newline="") as f:
        rows = [{k: t if k in WORDS else float(t) for k, t in row.items()}
                for row in csv.DictReader(f)]
    return [row for row in rows if all(row[k] == v for k, v in only.items())]
