"""How robust is a model? One table: measures down, checkpoints across; every finished row on disk.

    python eval_robust.py --ckpt out/shapes_rpc                  # rendered scenes: minutes on a CPU
    python eval_robust.py --ckpt out/a out/b --out_dir out/ab     # the same images for all
    python eval_robust.py --ckpt out/a --measures clean "pgd eps=1/255,4/255 steps=40" cw
    python eval_robust.py --ckpt deit_tiny_patch16_224.pth --data_dir data/imagenet    # DeiT's file
    python eval_robust.py --model my.py:build --data cifar10 --data_dir data/cifar10    # any model
    torchrun --standalone --nproc_per_node=4 eval_robust.py --ckpt out/imagenet_rpc \\
        --data_dir data/imagenet --corrupted_dir data/imagenet-c --imagenet_a data/imagenet-a

A checkpoint says whether it is a classifier, a Segmenter or a language model, and of which data.
What is measured is a function that returns a row, `clean` or `attack` say: KINDS is the table of
them, `main` the loop. docs/robustness.md has more commands, and what the numbers mean.
Paper: Teo & Nguyen 2024, section 4, App. A.2 to A.4, E.3 to E.5; Tables 1 to 6, Fig. 3. Budgets are
in units of pixels in [0, 1], labels are the true ones, attacked pixels stay in [0, 1], in float32.
The paper's code (`rachtsy/KPCA_code:Attack`) attacks normalised tensors (eps 1/255 there is about
0.226/255), leads away from the model's own prediction and does not clip: so does --preset paper.
Images a model gets wrong already count as not robust. Top-5 is of the image made for top-1.
Random numbers depend on (seed, image) alone: batch size, processes and resuming change nothing.
"""

import argparse
import os
import sys
import time
from datetime import date
from functools import partial
from pathlib import Path
from typing import Callable, NamedTuple

import torch
import torch.distributed as dist
from tqdm import tqdm

import common
from common import InputError
from data.datasets import DATASETS, load_test
from robust import ATTACKS, find
from robust.measures import (CLS, CONDITIONS, FOLDERS, LM, PRESETS, SEG, USUAL, budget, build,
                             describe)
from robust.results import append, key, open_rows, pack, table
from robust.score import (all_sum, answers, batches, outcome, percent, row_of, split_images,
                          to_pixels, under_attack)
from robust.sources import NORMALIZE, classes_of, load_built, load_model


def get_args():
    """Read the flags."""
    asked = {"-h", "--help"} & set(sys.argv)              # what is measured imports every attack
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                epilog=describe(kinds_of(CLS) | KINDS[LM]) if asked else None,
                                usage="%(prog)s [--flag value ...]",
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    path, boolean = os.path.normpath, argparse.BooleanOptionalAction
    count, natural = common.COUNT, common.NATURAL

    flag = p.add_argument_group("what to evaluate").add_argument
    flag("--ckpt", nargs="+", default=[], help="of one task: files, or folders with best.pt or "
         "last.pt; ViTs of DeiT, timm and the released code, too, or their https address")
    flag("--model", nargs="+", default=[], metavar="FILE.py:BUILD", help="functions that return a "
         "classifier, from pixels in [0, 1] to logits")
    flag("--image_size", type=count, help="of --model, pixels (default: 224; of shapes, cifar10 "
         "32)")
    flag("--weights", choices=("model", "ema"), default="model", help="of our checkpoints: as they "
         "were trained, or their average")
    flag("--normalize", choices=NORMALIZE, default="imagenet", help="mean and std of a --ckpt that "
         "is not ours: ImageNet's, or 0.5 and 0.5")
    flag("--measures", nargs="+", metavar="NAME", help='names with settings, "pgd eps=1/255,2/255 '
         'steps=40", see below. Default: clean, corruptions, noise, fgsm, pgd, '
         "adaptive_pgd, apgd and what the folders give; clean, corruptions; perplexity")
    flag("--preset", choices=PRESETS, default="default", help="defaults of the settings")
    flag("--eps", nargs="+", type=budget, help="L-inf budgets of all attacks that name none: "
         "8/255 or 0.031")
    flag("--limit", type=count, help="images per measure, the same for every model, or tokens of a "
         "text (default: all; fewer on shapes and for slow attacks)")
    flag("--per_class", action=boolean, default=False, help="also the accuracy of each class, and "
         "which class is taken for which")
    flag("--checks", action=boolean, default=False, help="instead, can the robust accuracy of each "
         "classifier be believed?")
    flag("--source", help="checkpoint whose adversarial images transfer tries on the others")
    flag("--seed", type=common.number(int, 0, 2 ** 31 - 1), default=0, help="which images --limit "
         "takes, which words are swapped, and all random numbers")

    flag = p.add_argument_group("data").add_argument
    flag("--data", help="default: what the checkpoints were trained on")
    flag("--data_dir", type=path, help="default: as in training; of imagenet the folder with val/, "
         "of which some classes are enough")
    flag("--corrupted_dir", type=path, help="released files instead of generated ones: ImageNet-C "
         "(<type>/<severity>/<class>/*.JPEG) or CIFAR-10-C (<type>.npy, labels.npy)")
    for name in FOLDERS:
        flag(f"--{name}", metavar="DIR", type=path, help="<class>/*, some of the classes")
    flag("--frost_dir", type=path, help="folder with ImageNet-C's frost1.png to frost6.jpg "
         "(default: procedural frost)")
    flag("--severities", nargs="+", type=common.number(int, 1, 5), default=[1, 2, 3, 4, 5],
         help="of the corruptions")

    flag = p.add_argument_group("Segmenters and language models").add_argument
    flag("--window", type=count, help="pixels (default: the training crop) or tokens (the context)")
    flag("--stride", type=count, help="pixels between windows (default: --window), or targets that "
         "a window scores (default: a quarter of --window; the paper's 1 is the slowest)")
    flag("--scales", nargs="+", type=common.number(float, 0.01), default=[1.0], help="views of an "
         "image, as factors of its size in training; their probabilities are averaged")
    flag("--flip", action=boolean, default=False, help="each view mirrored, too")

    flag = p.add_argument_group("running").add_argument
    flag("--out_dir", help="for results.jsonl and table.md (default: robust/ in the folder of the "
         "first checkpoint's run)")
    flag("--resume", action=boolean, default=False, help="keep the rows of --out_dir, add more")
    flag("--batch_size", type=count, help="images or windows of text at a time (default: 512 of 32 "
         "px, by area, on a GPU by its memory; 64 windows)")
    flag("--tf32", action=boolean, default=False, help="on a GPU, faster products of 10 bits, in "
         "attacks, too")
    flag("--num_workers", type=natural, default=min(os.cpu_count() or 1, 10),
         help="decoding processes")
    flag("--device", type=common.device, help="cuda, mps or cpu (default: the best there is)")
    args = p.parse_args()
    args.severities = sorted(set(args.severities))
    if not args.ckpt and not args.model:
        p.error("the following arguments are required: --ckpt or --model")
    return args


# --- kinds of measure: functions of (model, measure, images, args) that return fields of a row ----

def clean(m, measure, images, args):
    """Images as they are. Their loss says how far training got."""
    hits, = answers(m, measure, images, args, to_pixels)
    return dict(loss=hits[:, 2].mean().item(), **outcome(hits, len(args.classes)))


def attack(m, measure, images, args, **how):
    """Images that an attack has moved, and how far. how: of `under_attack`."""
    hits, moved, _ = under_attack(m, measure, images, args, **how)
    return row_of(hits[0], moved, args)


def transfer(m, measure, images, args):
    """Images that were attacked as another model sees them."""
    return attack(m, measure, images, args, by=args.other, everyone=True)


def noise(m, measure, images, args):
    """Images with noise: the mean of several draws."""
    hits, moved, _ = under_attack(m, measure, images, args, draws=measure.setting["draws"],
                                  everyone=True)
    return row_of(hits.mean(0), moved, args) | dict(right=[pack(hit[:, 0] > 0) for hit in hits])


def cw(m, measure, images, args):
    """Images moved as far as it takes: accuracy also where no more than a radius is allowed."""
    hits, moved, _ = under_attack(m, measure, images, args)
    fooled, radii = hits[0, :, 0] == 0, (0.25, 0.5, 1.0, 2.0)
    within = torch.stack([(fooled & (moved[:, 1] <= r)).sum() for r in radii])
    left = [100 - share for share in percent(within, len(fooled))]
    return row_of(hits[0], moved, args) | dict(top1_at_l2=dict(zip(radii, left)))


STAGES = ("clean", "apgd-ce", "apgd-t", "fab-t", "square")                          # of autoattack
MANY = 4096         # images at a time where they leave one by one, so that batches stay full


def autoattack(m, measure, images, args):
    """Images that one attack after the other was tried on: also the accuracy after each."""
    hits, moved, traces = under_attack(m, measure, images, args, most=MANY)
    stages = torch.zeros(len(STAGES), len(images.index))
    for place, trace in traces:
        for i, stage in enumerate(trace):                 # changed since: is it right now?
            standing, right = stage["standing"].cpu(), stage["right"].cpu()
            stages[i, place.cpu()] = right.where(standing, hits[0, place.cpu(), 0] > 0).float()
    after = dict(zip(STAGES, percent(all_sum(stages).sum(1), len(images.index))))
    return row_of(hits[0], moved, args) | dict(stages=after)


def adaptive(m, measure, images, args, kind=attack):
    """An attack that also follows gradients which RPC-Attention hides; plain: none runs there."""
    from robust.adaptive import pap_steps
    grey = torch.full((1, 3, m.size, m.size), 0.5, device=args.device)
    row = kind(m, measure, images, args)
    return row if pap_steps(m.model, grey) else row | dict(plain=True)


def to_transfer(measure, source, args):
    """Transfer's images. Its words say which weights they were attacked on."""
    if not args.other:
        raise InputError("--measures transfer needs --source")
    measure.setting["source"] = args.other.about["weights"]
    return split_images(measure, source, args)


class Kind(NamedTuple):
    """A function, or where it is, "module:function", that makes the fields of a row; and one of
    (measure, source, args) that finds its `Images` and completes the measure's settings."""
    row: Callable | str
    images: Callable | str = split_images


KINDS = {
    CLS: {"clean": Kind(clean),
          "corruptions": Kind("robust.corruptions:measured", "robust.corruptions:images"),
          "per_class": Kind("robust.per_class:per_class"),
          "imagenet_a": Kind("robust.imagenet:accuracy", "robust.imagenet:images"),
          "imagenet_r": Kind("robust.imagenet:accuracy", "robust.imagenet:images"),
          "imagenet_o": Kind("robust.imagenet:outliers", "robust.imagenet:images_beside_val")},
    SEG: {"clean": Kind("robust.segmenters:measured", "robust.segmenters:images"),
          "corruptions": Kind("robust.segmenters:measured", "robust.segmenters:to_corrupt")},
    LM: {"perplexity": Kind("robust.words:perplexities", "robust.words:text")},
}
# Attacks that are more than one attack on each batch; all others are `attack`.
OWN_KINDS = {"noise": Kind(noise), "transfer": Kind(transfer, to_transfer), "cw": Kind(cw),
             "square": Kind(partial(attack, most=MANY)), "autoattack": Kind(autoattack),
             "adaptive_pgd": Kind(adaptive), "adaptive_apgd": Kind(adaptive),
             "adaptive_autoattack": Kind(partial(adaptive, kind=autoattack))}


def kinds_of(task):
    """{name: Kind} of what may be measured."""
    attacks = {name: OWN_KINDS.get(name, Kind(attack)) for name in ATTACKS}
    return KINDS[task] | (attacks if task == CLS else {})


# --- models, images, what is measured ------------------------------------------------------------

def load_models(args):
    """The models to evaluate, `Loaded`, all of one task and size. Sets what no flag has set, by
    the first of them and what it was trained on; other: that of --source, or None."""
    size = args.image_size or (32 if args.data in ("shapes", "cifar10") else 224)
    how = args.normalize, args.weights
    models = [*(load_model(path, args.device, "--ckpt", *how) for path in args.ckpt),
              *(load_built(text, args.device, size) for text in args.model)]
    args.other = load_model(args.source, args.device, "--source", *how) if args.source else None
    for name in ("task", "size", "classes"):
        values = [getattr(m, name) for m in (*models, args.other) if m and getattr(m, name)]
        if any(value != values[0] for value in values):
            raise InputError(f"{models[0].given}, ...: models of {name} "
                             f"{' and '.join(dict.fromkeys(str(v)[:60] for v in values))}, "
                             f"expected the same for all")

    first = models[0]
    args.task, args.size = first.task, first.size
    args.data = args.data or first.trained.get("data") or "imagenet"
    args.data_dir = args.data_dir or first.trained.get("data_dir")
    args.imagenet1k, args.classes = False, []
    if args.task == CLS and not args.batch_size:
        pixels = 2 ** 19
        if args.device.type == "cuda":                    # a ViT-B with a gradient takes 3 kB each
            pixels = min(torch.cuda.mem_get_info(args.device)[0] // 4096, 512 * 224 ** 2)
        args.batch_size = max(1, pixels // first.size ** 2)
    if args.task != CLS and (args.checks or args.per_class or args.corrupted_dir):
        raise InputError("--checks, --per_class and --corrupted_dir are for classifiers")
    return models


def classification(models, args):
    """The test split, a Split or ImageTree; None where only --imagenet_a or -r asks.

    Some of ImageNet's class folders are enough for a network of all 1,000.
    """
    first, classes, counts = models[0], models[0].classes, [classes_of(m, args) for m in models]
    if args.data != "imagenet":
        common.one_of("--data", args.data, DATASETS)
        source = load_test(args, first.trained, first.size, classes)
    else:
        from data.imagenet import ImageTree
        from robust.imagenet import CLASSES
        classes = classes or (CLASSES if counts[0] == len(CLASSES) else None)
        args.imagenet1k = classes == CLASSES
        if classes and not args.data_dir:
            args.classes = classes
            return None
        source = ImageTree(args.data_dir or "", "val", classes, first.size, subset=args.imagenet1k)
    args.classes = list(source.classes)
    for m, n in zip(models, counts):
        if n != len(args.classes) or m.classes and list(m.classes) != args.classes:
            names = f" ({', '.join(m.classes[:3])}, ...)" if m.classes else ""
            raise InputError(f"{m.given} has {n} classes{names}, --data {args.data} "
                             f"{len(args.classes)} ({', '.join(args.classes[:3])}, ...)")
    return source


SOURCES = {CLS: classification, SEG: "robust.segmenters:load", LM: "robust.words:load"}


def plan(models, args):
    """[(Measure, Images)]: what --measures and the other flags ask for."""
    kinds, folders = kinds_of(args.task), [name for name in FOLDERS if getattr(args, name)]
    texts = (args.measures or USUAL[args.task] + folders) + ["per_class"] * args.per_class
    measures = build(texts, kinds, args.preset, args.eps)
    source = find(SOURCES[args.task])([m for m in (*models, args.other) if m], args)
    todo = [(one, find(kinds[one.name].images)(one, source, args)) for one in measures]
    todo = [(measure, images) for measure, images in todo if images]
    if not todo:
        raise InputError(f"there is nothing to measure in --corrupted_dir {args.corrupted_dir}")
    return todo


# --- the command ---------------------------------------------------------------------------------

def start(args):
    """Join the other processes, if torchrun started this one; set device, rank and world."""
    best = "mps" if torch.backends.mps.is_available() else "cpu"
    best = "cuda" if torch.cuda.is_available() else best
    args.rank, args.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    args.device = torch.device(args.device or best)
    if "RANK" in os.environ and not args.checks:          # those are rank 0's alone
        gpu = args.device.type == "cuda"
        if gpu:
            args.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(args.device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = args.tf32


def run_checks(models, todo, args):
    """Judge each model, on the same images; nothing is written. PGD is that of todo."""
    from robust import checks
    if args.rank:
        return
    args.world = 1
    measure, images = next((one for one in todo if one[0].name == "pgd"), todo[0])
    options = {k: v for k, v in measure.setting.items()
               if measure.name == "pgd" and k not in ("eps", *CONDITIONS)}
    args.batch_size = args.limit = args.limit or 64
    few = next(batches(images._replace(index=images.index[:args.limit]), args))
    softmax = next((m for m in (args.other, *models) if m and m.about["kind"] == "softmax"), None)
    for m in models:
        twin = softmax.model if softmax and softmax is not m else None
        checks.run(m.model, to_pixels(few[0]), few[1], m.about["model"], twin, options)


def out_dir(args):
    """The folder for rows: --out_dir, else robust/ in the first checkpoint's run, else in out/."""
    path = Path((args.ckpt or ["out/model"])[0])
    run = path if path.is_dir() else path.parent
    if not path.is_dir() and not (run / "log.jsonl").exists():      # a shipped or a foreign file
        run = Path("out", path.stem)
    return Path(args.out_dir or run / "robust")


def main():
    args = get_args()
    start(args)
    models = load_models(args)
    todo = plan(models, args)
    if args.checks:
        return run_checks(models, todo, args)

    # For each measure, for each model: its row, if there is none yet.
    path, hardware = out_dir(args) / "results.jsonl", common.describe(args.device)
    rows = open_rows(path, args.resume, args.rank)
    common.print0(f"{len(models)} models | {args.task} | {args.data} | {args.world} x {hardware} | "
                  f"{path}")
    for measure, images in todo:
        kind = kinds_of(args.task)[measure.name]
        for m in models:
            row = dict(m.about, task=args.task, data=args.data, data_dir=images.data_dir,
                       imagenet1k=args.imagenet1k, measure=str(measure), images=len(images.index),
                       seed=args.seed, precision="tf32" if args.tf32 else "float32")
            if key(row) in rows:
                continue
            began = time.perf_counter()
            with common.error_prefix(m.given):
                row |= find(kind.row)(m, measure, images, args)
            row.update(seconds=round(time.perf_counter() - began, 2), date=str(date.today()),
                       torch=torch.__version__, hardware=hardware, processes=args.world)
            rows[key(row)] = row
            if args.rank == 0:
                append(path, row)

    if args.rank == 0:
        text = table([row for row in rows.values() if row["data"] == args.data])
        path.with_name("table.md").write_text(text + "\n")
        print(f"\n{text}")
        if args.per_class:
            from robust.per_class import tables
            print(tables(rows.values(), path.parent))
        print(f"\n{len(rows)} rows in {path}; this table in {path.with_name('table.md')}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    common.run(main)
