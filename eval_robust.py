"""How robust is a model? One table: measures down, checkpoints across; every finished row on disk.

    python eval_robust.py --ckpt out/shapes_rpc                  # rendered scenes: minutes on a CPU
    python eval_robust.py --ckpt out/a out/b --out_dir referee/results/ab          # the same images for all
    python eval_robust.py --ckpt out/a --measures clean "pgd eps=1/255,4/255 steps=40" cw
    python eval_robust.py --ckpt out/a --measures autoattack --out_dir referee/results/ab --resume    # more
    python eval_robust.py --ckpt out/a --preset paper            # the paper's own conditions
    python eval_robust.py --ckpt out/a --checks                  # can the numbers be believed?
    python eval_robust.py --ckpt deit_tiny_patch16_224.pth --data_dir data/imagenet    # DeiT's file
    python eval_robust.py --model my.py:build --data cifar10 --data_dir data/cifar10    # any model
    python eval_robust.py --ckpt out/seg_camvid_rpc --scales 0.75 1 1.25 --flip    # a Segmenter
    python eval_robust.py --ckpt out/pydoc_rpc --stride 1        # a language model, words swapped
    torchrun --standalone --nproc_per_node=4 eval_robust.py --ckpt out/imagenet_rpc \\
        --data_dir data/imagenet --corrupted_dir data/imagenet-c --imagenet_a data/imagenet-a \\
        --imagenet_r data/imagenet-r --imagenet_o data/imagenet-o

A checkpoint says whether it is a classifier, a Segmenter or a language model, and of which data;
what differs between them stands in robust/classifiers.py, segmenters.py and words.py.
Paper: Teo & Nguyen 2024, section 4, App. A.2 to A.4, E.3 to E.5; Tables 1 to 6, Fig. 3. Budgets are
in units of pixels in [0, 1], labels are the true ones, attacked pixels stay in [0, 1], in float32.
The paper's code (`rachtsy/KPCA_code:Attack`) attacks normalised tensors (eps 1/255 there is about
0.226/255), leads away from the model's own prediction and does not clip: so does --preset paper.
Images a model gets wrong already count as not robust. Top-5 is of the image made for top-1.
Random numbers depend on (seed, image) alone: batch size, processes and resuming change nothing.
"""

import argparse
import os
import time
from datetime import date
from pathlib import Path

import torch

import common
from robust import checks, frost, measures, metrics, score
from robust.measures import FOLDERS
from robust.sources import CLS, LM, NORMALIZE, SEG, load_built, load_model, module_of
from robust.tables import Results

DATA = {CLS: ("shapes", "cifar10", "imagenet", "folder"),
        SEG: ("shapes", "camvid", "ade20k", "folder"),
        LM: ("pydoc", "wikitext", "wikitext103", "folder")}
# What is measured by default; classifiers: on the folders that are given, too.
USUAL = {CLS: ["clean", "corruptions", "noise", "fgsm", "pgd", "adaptive_pgd", "apgd"],
         SEG: ["clean", "corruptions"], LM: ["perplexity"]}
# Flags that not every task has.
ONLY = dict(checks=(CLS,), source=(CLS,), corrupted_dir=(CLS,), imagenet_a=(CLS,),
            imagenet_r=(CLS,), imagenet_o=(CLS,), eps=(CLS,), frost_dir=(CLS, SEG),
            save_images=(CLS, SEG), batch_size=(CLS, LM), window=(SEG, LM), stride=(SEG, LM),
            scales=(SEG,), flip=(SEG,))


def get_args():
    """Read the flags; the settings of measures are in robust/measures.py."""
    p = argparse.ArgumentParser(description=__doc__, epilog=measures.describe(), allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    path, count = os.path.normpath, common.number(int, 1)

    flag = p.add_argument_group("what to evaluate").add_argument
    flag("--ckpt", nargs="+", default=[], help="of one task: files, or folders with best.pt or "
         "last.pt; ViTs of DeiT, timm and the released code, too, or their https address")
    flag("--model", nargs="+", default=[], metavar="FILE.py:BUILD", help="functions that return a "
         "classifier, from pixels in [0, 1] to logits")
    flag("--image_size", type=count, help="of --model, pixels (default: 224; of shapes, cifar10 "
         "32)")
    flag("--normalize", choices=NORMALIZE, default="imagenet", help="mean and std of a --ckpt that "
         "is not ours: ImageNet's, or 0.5 and 0.5")
    flag("--measures", nargs="+", metavar="NAME", help='names with settings, "pgd eps=1/255,2/255 '
         'steps=40", see below; or all. Default: clean, corruptions, noise, fgsm, pgd, '
         "adaptive_pgd, apgd and what the folders give; clean, corruptions; perplexity")
    flag("--preset", choices=measures.PRESETS, default="default", help="defaults of the settings")
    flag("--eps", nargs="+", type=measures.budget, help="L-inf budgets of all attacks that "
         "name none: 8/255 or 0.031")
    flag("--limit", type=count, help="images per measure, the same for every model, or tokens of a "
         "text (default: all; fewer on shapes; "
         + ", ".join(f"{v} for {k}" for k, v in measures.SLOW.items()) + ")")
    flag("--checks", action=argparse.BooleanOptionalAction, default=False, help="instead, can the "
         "robust accuracy of each classifier be believed?")
    flag("--source", help="checkpoint whose adversarial images transfer tries on the others")
    flag("--seed", type=common.number(int, 0, 2 ** 31 - 1), default=0, help="which images --limit "
         "takes, which words are swapped, and all random numbers")

    flag = p.add_argument_group("data").add_argument
    flag("--data", help="default: what the checkpoints were trained on")
    flag("--data_dir", type=path, help="default: as in training; imagenet needs val/ only")
    flag("--corrupted_dir", type=path, help="released files instead of generated ones: ImageNet-C "
         "(<type>/<severity>/<class>/*.JPEG) or CIFAR-10-C (<type>.npy, labels.npy)")
    for name in FOLDERS:
        flag(f"--{name}", metavar="DIR", type=path, help="<class>/*, some of the classes")
    flag("--frost_dir", type=path, help="folder with ImageNet-C's frost1.png to frost6.jpg "
         "(default: procedural frost)")
    flag("--severities", nargs="+", type=common.number(int, 1, 5), default=[1, 2, 3, 4, 5],
         help="of the corruptions")

    add_running(p)
    args = p.parse_args()
    args.severities = sorted(set(args.severities))
    if not args.ckpt and not args.model:
        p.error("the following arguments are required: --ckpt or --model")
    return args


def add_running(p):
    """Add flags of how it runs, and of how Segmenters and language models see."""
    boolean = argparse.BooleanOptionalAction
    count, natural = common.number(int, 1), common.number(int, 0)

    flag = p.add_argument_group("Segmenters and language models").add_argument
    flag("--window", type=count, help="pixels (default: the training crop) or tokens (the context)")
    flag("--stride", type=count, help="pixels between windows (default: --window), or targets that "
         "a window scores (default: a quarter of --window; the paper's 1 is the slowest)")
    flag("--scales", nargs="+", type=common.number(float, 0.01), help="views of an image, as "
         "factors of its size in training (default: 1); their probabilities are averaged")
    flag("--flip", action=boolean, default=False, help="each view mirrored, too")

    flag = p.add_argument_group("running").add_argument
    flag("--out_dir", help="for results.jsonl, table.md and images (default: robust/ in the folder "
         "of the first checkpoint's run, robust_paper/ with --preset paper)")
    flag("--resume", action=boolean, default=False, help="keep the rows of --out_dir, add more")
    flag("--save_images", type=natural, default=0, help="N: pictures of N images, clean, "
         "corrupted, attacked; of a Segmenter with truth and prediction")
    flag("--batch_size", type=count, help="images or windows of text at a time (default: 512 of 32 "
         "px, by area, 8 times as many on a GPU; 64 windows)")
    flag("--amp", action=boolean, default=False, help="bf16 when counting; attacks are in float32")
    flag("--num_workers", type=natural, default=min(os.cpu_count() or 1, 10),
         help="decoding processes")
    flag("--device", help="cuda, mps or cpu (default: the best there is)")


# --- what the checkpoints settle ------------------------------------------------------------------

def agree(flags, models):
    """Refuse models of several tasks or sizes."""
    tasks = list(dict.fromkeys(m.task for m in models))
    if len(tasks) > 1:
        raise ValueError(f"{flags}: {' and '.join(tasks)}, expected models of one task")
    for name in ("image_size", "num_classes", "context"):
        configs = [getattr(m.model, "config", None) for m in models]
        values = {getattr(config, name, None) for config in configs if config}
        values |= {m.size for m in models} if name == "image_size" else set()
        if len(values) > 1:
            raise ValueError(f"{flags}: the models have {name} {sorted(values)}, expected the same "
                             "for all")


def settle(args, models, other=None):
    """Put what the checkpoints say into args; refuse what does not fit them, or each other.

    other: the model of --source.
    """
    first = models[0]
    args.task, trained = first.task, first.trained
    agree("--ckpt", models)
    if other:
        agree("--ckpt and --source", [first, other])
    for name, tasks in ONLY.items():
        if getattr(args, name) and args.task not in tasks:
            raise ValueError(f"--{name} is for {' and '.join(tasks)}, not for {args.task}")
    args.data = args.data or trained.get("data") or "imagenet"
    if args.data not in DATA[args.task]:
        raise ValueError(f"--data {args.data}: expected one of {', '.join(DATA[args.task])}")
    args.data_dir = args.data_dir or trained.get("data_dir")
    module_of(args.task).settle(args, first)
    if args.stride and args.stride > args.window:
        raise ValueError(f"--stride {args.stride} is more than --window {args.window}")
    if args.frost_dir:
        frost.load_frost(args.frost_dir)


# --- the run -------------------------------------------------------------------------------------

def todo_of(args, other=None):
    """List what --measures and the flags ask for, `Measure`s. other: the model of --source."""
    needed = dict(transfer="source", **{name: name for name in FOLDERS})
    absent = [name for name, flag in needed.items() if not getattr(args, flag)]
    texts = args.measures or [*USUAL[args.task], *(f for f in FOLDERS if f not in absent)]
    if "all" in texts:
        texts = [name for name in measures.KNOWN[args.task] if name not in absent]
    todo = measures.plan(texts, args.task, args.preset, args.eps)

    # what flags say
    more = dict(corruptions=dict(severities=args.severities, released=args.corrupted_dir or False,
                                 frost=args.frost_dir or "procedural"),
                transfer=dict(source=args.source, weights=other and other.about["weights"]),
                **{name: dict(folder=getattr(args, name)) for name in FOLDERS})
    for name, setting, conditions in todo:
        if name in absent:
            raise ValueError(f"--measures {name} needs --{needed[name]}")
        if name == "imagenet_o" and args.data != "imagenet":
            raise ValueError(f"--imagenet_o needs --data imagenet, not {args.data}: its images are "
                             "to be told from those of val")
        setting.update(more.get(name, {}))
        for flag in ("window", "stride", "scales", "flip"):
            if args.task in ONLY[flag]:
                setting[flag] = getattr(args, flag)
        conditions.update(seed=args.seed, amp=args.amp)
    return todo


def about_row(m, job, args):
    """Say what a row is about: everything but its result."""
    in_memory = args.data in ("shapes", "cifar10")
    name, setting, conditions = job.measure
    return dict(m.about, task=args.task, data=args.data,
                data_dir=None if in_memory else args.data_dir, imagenet1k=args.imagenet1k,
                measure=name, setting=setting, conditions=conditions, images=job.n)


def measure_all(models, other, source, jobs, results, args):
    """Do each job for the models that lack its row. other: the model of --source."""
    for job in jobs:
        groups = [[m] for m in models if results.lacks(about_row(m, job, args))]
        if args.task == CLS and job.measure.name == "corruptions" and groups:
            groups = [sum(groups, [])]                    # making the images is shared out
        for group in groups:
            start, before = time.perf_counter(), [list(m.count) for m in group]
            found = module_of(args.task).rows(group, job, source, args, other)
            seconds = (time.perf_counter() - start) / len(group)
            for m, calls, result in zip(group, before, found):
                right = result.pop("right", None)
                row = about_row(m, job, args) | result | stamp(m, calls, job.n, seconds, args)
                if right:
                    row["right"] = right                  # the longest field comes last
                results.add(row)


def stamp(m, before, n, seconds, args):
    """Say how a row came about; before: the model's calls when it began."""
    calls = {}
    if args.task == CLS:
        calls = torch.tensor([m.count, before], device=args.device)
        calls = common.all_sum(calls[0] - calls[1]).tolist()            # of all processes
        calls = dict(forward_per_image=round(calls[0] / n, 1),
                     backward_per_image=round(calls[1] / n, 1))
    return dict(seconds=round(seconds, 2), **calls, date=str(date.today()), torch=torch.__version__,
                hardware=common.describe(args.device), processes=args.world)


# --- the command ---------------------------------------------------------------------------------

def run_checks(models, other, source, todo, args):
    """Judge each model, on the same images; nothing is written. PGD is that of todo."""
    options = next((one.setting for one in todo if one.name == "pgd"), {})
    options = {k: v for k, v in options.items() if k != "eps"}
    softmax = next((m.model for m in ([other] if other else models)
                    if m.about["kind"] == "softmax"), None)
    index = score.pick(len(source.labels), args.limit or min(64, len(source.labels)), args.seed)
    images, labels, index, _ = score.whole(score.batches(source, index, args))
    for m in models:
        twin = softmax if softmax is not m.model else None
        checks.run(m.model, images.float() / 255, labels, m.about["model"], twin,
                   options)


def open_results(args):
    """Open the rows of --out_dir: by default in the first checkpoint's run, else in out/."""
    path = Path((args.ckpt or ["out/model"])[0])
    folder = "robust" if args.preset == "default" else f"robust_{args.preset}"
    run = path if path.is_dir() else path.parent
    if not path.is_dir() and not (run / "log.jsonl").exists():      # a shipped or a foreign file
        run = Path("out", path.stem)
    args.out_dir = args.out_dir or str(run / folder)
    return Results(args.out_dir, args.data, args.resume, args.rank)


def main():
    args = get_args()
    args.device, args.rank, args.world = common.setup(args.device)
    size = args.image_size or (32 if args.data in ("shapes", "cifar10") else 224)
    models = [*(load_model(path, args.device, "--ckpt", args.normalize) for path in args.ckpt),
              *(load_built(text, args.device, size) for text in args.model)]
    other = load_model(args.source, args.device, "--source") if args.source else None
    everyone = [*models, other] if other else models
    settle(args, models, other)
    todo = todo_of(args, other)
    task = module_of(args.task)
    source = task.load_source(args, everyone)
    args.imagenet1k = args.task == CLS and metrics.is_imagenet(source.classes)

    what = f"{len(models)} models | {args.task} | {args.data}"
    how = f"{args.world} x {common.describe(args.device)}"
    if args.checks:
        if args.rank == 0:
            print(f"{what} | {how}", flush=True)
            args.world = 1                                # nobody shares the images
            run_checks(models, other, source, todo, args)
        return
    normalized = args.task == CLS and any(one.conditions["space"] == "normalized" for one in todo)
    for m in everyone if normalized else ():
        if not hasattr(m.model, "mean") or not hasattr(m.model, "std"):
            raise ValueError(f"{m.given}: space=normalized needs a model with .mean and .std")
    jobs = [task.job(measure, models, source, args) for measure in todo]
    results = open_results(args)
    if args.rank == 0:
        print(f"{what} | {how} | {results.out}", flush=True)
        if normalized:
            std = models[0].model.std.mean().item()
            print(f"budgets are in normalised units: eps 1/255 is {std:.3f}/255 of the pixel "
                  "range, channels averaged")

    measure_all(models, other, source, jobs, results, args)
    if args.rank == 0:
        print("\n" + results.write_table())
        args.world = 1                                    # nobody shares the pictures
        if args.save_images:
            task.save_pictures(models, source, todo, args)
        print(f"\n{len(results.rows)} rows in {results.out}; this table in {results.table}")


if __name__ == "__main__":
    common.run(main)
