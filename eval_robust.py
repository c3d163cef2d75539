"""How robust is a model? One table: measures down, checkpoints across; every finished row on disk.

    python eval_robust.py --ckpt out/shapes_rpc                  # rendered scenes: minutes on a CPU
    python eval_robust.py --ckpt out/a out/b --out_dir out/ab     # the same images for all
    python eval_robust.py --ckpt out/a --measures clean "pgd eps=1/255,4/255 steps=40" cw
    python eval_robust.py --ckpt out/a --measures autoattack --out_dir out/ab --resume    # more
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
robust/segmenters.py and words.py have what the last two need. The loop is in `classifier_row`.
Paper: Teo & Nguyen 2024, section 4, App. A.2 to A.4, E.3 to E.5; Tables 1 to 6, Fig. 3. Budgets are
in units of pixels in [0, 1], labels are the true ones, attacked pixels stay in [0, 1], in float32.
The paper's code (`rachtsy/KPCA_code:Attack`) attacks normalised tensors (eps 1/255 there is about
0.226/255), leads away from the model's own prediction and does not clip: so does --preset paper.
Images a model gets wrong already count as not robust. Top-5 is of the image made for top-1.
Random numbers depend on (seed, image) alone: batch size, processes and resuming change nothing.
"""

import argparse
import copy
import os
import time
from datetime import date
from pathlib import Path

import torch

import common
from common import InputError
from data.images import DATASETS, load_test
from robust import ATTACKS, find, parameters, score
from robust.attacks import check
from robust.measures import (CLS, FOLDERS, LM, PRESETS, SEG, SLOW, USUAL, budget, build_measures,
                             describe, known)
from robust.results import Results, key, show
from robust.sources import NORMALIZE, load_built, load_model


STAGES = ("clean", "apgd-ce", "apgd-t", "fab-t", "square")                          # of autoattack


class Help(argparse.RawDescriptionHelpFormatter):
    """Write what is measured only where --help asks: that imports every attack."""

    def add_text(self, text):
        super().add_text(describe() if text == "measures" else text)


def get_args():
    """Read the flags."""
    p = argparse.ArgumentParser(description=__doc__, epilog="measures", allow_abbrev=False,
                                usage="%(prog)s [--flag value ...]", formatter_class=Help)
    path, boolean = os.path.normpath, argparse.BooleanOptionalAction
    count, natural = common.number(int, 1), common.number(int, 0)

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
    flag("--preset", choices=PRESETS, default="default", help="defaults of the settings")
    flag("--eps", nargs="+", type=budget, help="L-inf budgets of all attacks that name none: "
         "8/255 or 0.031")
    flag("--limit", type=count, help="images per measure, the same for every model, or tokens of a "
         "text (default: all; fewer on shapes; "
         + ", ".join(f"{v} for {k}" for k, v in SLOW.items()) + ")")
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
    flag("--out_dir", help="for results.jsonl, table.md and images (default: robust/ in the folder "
         "of the first checkpoint's run, robust_paper/ with --preset paper)")
    flag("--resume", action=boolean, default=False, help="keep the rows of --out_dir, add more")
    flag("--save_images", type=natural, default=0, help="N: pictures of N images, clean, "
         "corrupted, attacked, for classifiers")
    flag("--batch_size", type=count, help="images or windows of text at a time (default: 512 of 32 "
         "px, by area, 8 times as many on a GPU; 64 windows)")
    flag("--amp", action=boolean, default=False, help="bf16 when counting; attacks are in float32")
    flag("--num_workers", type=natural, default=min(os.cpu_count() or 1, 10),
         help="decoding processes")
    flag("--device", help="cuda, mps or cpu (default: the best there is)")
    args = p.parse_args()
    args.severities = sorted(set(args.severities))
    if not args.ckpt and not args.model:
        p.error("the following arguments are required: --ckpt or --model")
    return args


# --- the loop ------------------------------------------------------------------------------------

def measure_models(todo, models, source_model, args, results):
    """For each measure, for each model: its row, if there is none yet."""
    row_of = classifier_row
    if args.task == SEG:
        from robust.segmenters import measure_segmenter as row_of
    elif args.task == LM:
        from robust.words import measure_words as row_of
    for measure, images, index in todo:
        for m in models:
            row = about_row(m, measure, len(index), args)
            if key(row) in results.rows:
                continue
            start = time.perf_counter()
            made_on = source_model if measure.name == "transfer" else m
            row.update(row_of(m, measure, images, index, args, made_on))
            row.update(seconds=round(time.perf_counter() - start, 2), date=str(date.today()),
                       torch=torch.__version__, hardware=common.describe(args.device),
                       processes=args.world)
            if "right" in row:
                row["right"] = row.pop("right")           # the longest field comes last
            results.add(row)


def classifier_row(m, measure, source, index, args, made_on):
    """What a measure finds on a classifier, fields of a row. made_on: whom attacks see."""
    name, n = measure.name, len(index)
    if name in FOLDERS:
        from robust.imagenet import folder_row
        return folder_row(m, measure, source, index, args)
    label = f"{name} {show(measure.setting)}, {m.about['model']}"
    right, stages = [], torch.zeros(len(STAGES), n, device=args.device)
    moved = torch.zeros(n, 4, dtype=score.widest(args.device), device=args.device)

    for images_of, levels in passes(measure, source, m.size, args):
        right.append(torch.zeros(len(levels), n, 3, device=args.device))     # top-1, top-5, loss
        loaded = score.batches(images_of, index, args, label)
        if name in ATTACKS and "batch_size" in parameters(find(name)):
            loaded = score.concat(loaded, 4096)           # so many at once: its batches stay full
        for images, labels, numbers, place in loaded:
            for j, level in enumerate(levels):
                trace = []                                                   # damage or attack
                x = change(made_on.model, measure, images, labels, numbers, args, level, trace)
                hit = score.is_correct(m.model, x, labels, args)             # ask
                right[-1][j, place] = hit                                    # count
                if name in ATTACKS:
                    far = score.distances(x, images.float() / 255)
                    moved[place] = torch.maximum(moved[place], far)
                for i, stage in enumerate(trace):         # changed: is it right now?
                    now = torch.where(stage["standing"], stage["right"], hit[:, 0] > 0)
                    stages[i, place] = now.float()

    right, moved, stages = (common.all_sum(t).cpu().double()
                            for t in (torch.cat(right), moved, stages))
    outcomes = [score.outcome(hit) for hit in right]      # of each severity or draw
    row = outcomes[0] if len(right) == 1 and name != "corruptions" else score.stack(outcomes)
    if name == "clean":                                   # how far did training get?
        row["loss"] = right[0, :, 2].mean().item()
    if name in ATTACKS:
        row["top1"], row["top5"] = score.percent(right.mean(0).sum(0)[:2], n)
        row.update(score.sizes(moved))
    if name.endswith("autoattack"):
        row["stages"] = dict(zip(STAGES, score.percent(stages.sum(1), n)))
    if name == "cw":
        fooled, radii = right[0, :, 0] == 0, (0.25, 0.5, 1.0, 2.0)
        within = torch.stack([(fooled & (moved[:, 1] <= r)).sum() for r in radii])
        row["top1_at_l2"] = {r: 100 - v for r, v in zip(radii, score.percent(within, n))}
    return row


def passes(measure, source, size, args):
    """[(where images are, what is done to them in turn: severities, or draws of noise)]."""
    setting = measure.setting
    if measure.name != "corruptions":
        return [(source, range(setting.get("draws", 1)))]
    if setting["released"]:
        from robust.imagenet import released
        return ((released(args.corrupted_dir, setting["type"], s, source, size, args.device), [0])
                for s in setting["severities"])
    if hasattr(source, "resample"):                       # an ImageTree: so ImageNet-C was made
        source = copy.copy(source)
        source.resample = "bilinear"
    return [(source, setting["severities"])]


def change(model, measure, images, labels, numbers, args, level, trace=None):
    """Images (b, 3, S, S) uint8 as pixels in [0, 1], damaged or attacked. level: of `passes`."""
    if measure.name == "corruptions" and level:
        images = score.damage(images, numbers, measure.setting, level, args)
    x = images.float() / 255
    if measure.name in ATTACKS:
        x = score.attack_images(model, measure, x, labels, numbers, args, level, trace)
    return x


def about_row(m, measure, n, args):
    """What a row is about: everything but its result."""
    in_memory = args.data in ("shapes", "cifar10")
    name, setting, conditions = measure
    return dict(m.about, task=args.task, data=args.data,
                data_dir=None if in_memory else args.data_dir, imagenet1k=args.imagenet1k,
                measure=name, setting=setting, conditions=conditions, images=n)


# --- what is measured, on which images -----------------------------------------------------------

def check_same_task(models):
    """Refuse models of several tasks or sizes."""
    for name in ("task", "size", "classes"):
        values = [getattr(m, name) for m in models if getattr(m, name)]
        if any(value != values[0] for value in values):
            raise InputError(f"{models[0].given}, ...: models of {name} "
                             f"{' and '.join(dict.fromkeys(str(v)[:60] for v in values))}, "
                             f"expected the same for all")


def resolve_args(args, first):
    """Set what no flag has set: by the first model, and what it was trained on."""
    args.task, config = first.task, getattr(first.model, "config", None)
    args.data = args.data or first.trained.get("data") or "imagenet"
    args.data_dir = args.data_dir or first.trained.get("data_dir")
    if args.task == CLS and not args.batch_size:          # by area
        pixels = 2 ** 19 if args.device.type == "cpu" else 2 ** 22
        args.batch_size = max(1, pixels // first.size ** 2)
    if args.task == SEG:
        args.window = args.window or config.image_size
        args.stride = args.stride or args.window
    if args.task == LM:
        args.window = args.window or config.context
        args.stride = args.stride or max(args.window // 4, 1)
        args.batch_size = args.batch_size or 64
        if args.window > config.context:
            raise InputError(f"--window {args.window} is more than the context of {config.context} "
                             "tokens that the model was trained with")
    if args.stride and args.stride > args.window:
        raise InputError(f"--stride {args.stride} is more than --window {args.window}")


def measures_of(args, source_model):
    """The `Measure`s that --measures and the other flags ask for."""
    folders = [name for name in FOLDERS if getattr(args, name)]
    without_val = folders and args.data == "imagenet" and not args.data_dir
    texts = args.measures or ([] if without_val else USUAL[args.task]) + folders
    if "all" in texts:
        texts = [name for name in known(args.task) if name not in FOLDERS or name in folders]
        texts = [name for name in texts if name != "transfer" or source_model]
    todo = []
    for measure in build_measures(texts, args.task, args.preset, args.eps, seed=args.seed,
                                  amp=args.amp):
        name, setting, _ = measure
        if name == "transfer":
            if not source_model:
                raise InputError("--measures transfer needs --source")
            setting.update(source=args.source, weights=source_model.about["weights"])
        if name in FOLDERS:
            if name not in folders:
                raise InputError(f"--measures {name} needs --{name}")
            setting.update(folder=getattr(args, name))
        if args.task in (SEG, LM):
            setting.update(window=args.window, stride=args.stride)
        if args.task == SEG:
            setting.update(scales=args.scales, flip=args.flip)
        if name == "corruptions":
            there = [s for s in args.severities if is_there(args.corrupted_dir, setting["type"], s)]
            if not there:
                common.print0(f"--corrupted_dir {args.corrupted_dir} has no {setting['type']}: it "
                              "is not measured")
                continue
            if setting["type"] == "frost" and args.frost_dir:
                from robust.frost import load_frost
                load_frost(args.frost_dir)                # said before anything is measured
            setting.update(severities=there, released=args.corrupted_dir or False,
                           frost=args.frost_dir or "procedural")
        todo.append(measure)
    if not todo:
        raise InputError(f"there is nothing to measure in --corrupted_dir {args.corrupted_dir}")
    return todo


def is_there(corrupted_dir, name, severity):
    """Are there files of this type and severity, or are they made?"""
    if not corrupted_dir:
        return True
    where = Path(corrupted_dir, name)
    return (where / str(severity)).is_dir() or where.with_suffix(".npy").exists()


def load_classification(args, models):
    """The test split, a Split or ImageTree; None where only --imagenet_a or -r asks.

    Some of ImageNet's class folders are enough for a network of all 1,000.
    """
    first, classes = models[0], models[0].classes
    x = torch.full((2, 3, first.size, first.size), 0.5, device=args.device)
    shapes = [check(m.model, x).shape[1] for m in models]           # classes of each
    if args.data != "imagenet":
        common.one_of("--data", args.data, DATASETS)
        source = load_test(args, first.trained, first.size, classes)
    else:
        from data.imagenet import ImageTree
        from robust.imagenet import CLASSES
        classes = classes or (CLASSES if shapes[0] == len(CLASSES) else None)
        args.imagenet1k = classes == CLASSES
        if classes and not args.data_dir:
            return None, classes
        source = ImageTree(args.data_dir or "", "val", classes, first.size, subset=args.imagenet1k)
    for m, n in zip(models, shapes):
        names = m.classes or source.classes
        if list(names) != list(source.classes) or n != len(names):
            raise InputError(f"{m.given} has {n} classes ({', '.join(names[:3])}, ...), "
                             f"--data {args.data} {len(source.classes)} "
                             f"({', '.join(source.classes[:3])}, ...)")
    return source, list(source.classes)


def with_images(todo, models, args):
    """[(measure, where its images are, the numbers of those that count)]."""
    if args.task == LM:
        from robust.words import load_source
        texts = load_source(args, models)
        return [(one, texts, range(len(texts[one.setting["split"]].clean))) for one in todo]
    if args.task == SEG:
        from robust.segmenters import load_source
        source = load_source(args, models[0])
        return [(one, source, score.pick(len(source), one.name, args)) for one in todo]

    source, classes = load_classification(args, models)
    out = []
    for one in todo:
        images = source
        if one.name in FOLDERS:
            from robust.imagenet import open_folder
            images = open_folder(one.name, getattr(args, one.name), classes, models[0].size)
            images.val = source                           # of -O: what its images are told from
        if source is None and one.name not in ("imagenet_a", "imagenet_r"):
            raise InputError(f"--measures {one.name} needs --data_dir, the folder with val/")
        out.append((one, images, score.pick(len(images.labels), one.name, args)))
    return out


# --- the command ---------------------------------------------------------------------------------

def run_checks(models, source_model, todo, args):
    """Judge each model, on the same images; nothing is written. PGD is that of todo."""
    from robust import checks
    measure, source, index = next((one for one in todo if one[0].name == "pgd"), todo[0])
    options = {k: v for k, v in measure.setting.items() if k != "eps" and measure.name == "pgd"}
    args.batch_size = args.limit = args.limit or 64
    few = next(score.batches(source, index[:args.limit], args))
    softmax = next((m for m in [source_model or models[0], *models]
                    if m.about["kind"] == "softmax"), None)
    for m in models:
        twin = softmax.model if softmax and softmax is not m else None
        checks.run(m.model, few[0].float() / 255, few[1], m.about["model"], twin, options)


def save_pictures(models, todo, args):
    """pictures_<i>.png of a classifier: for each measure, severity and draw a row of images."""
    from data.files import save_grid
    args.world, args.batch_size = 1, args.save_images     # nobody shares the pictures
    for i, m in enumerate(models):
        grid = []
        for measure, source, index in todo:
            if measure.name not in (*FOLDERS, "transfer"):
                for images_of, levels in passes(measure, source, m.size, args):
                    first = score.batches(images_of, index[:args.save_images], args)
                    images, labels, numbers, _ = next(first)
                    grid += [change(m.model, measure, images, labels, numbers, args,
                                    level).clamp(0, 1) for level in levels]
        if grid:
            save_grid(Path(args.out_dir, f"pictures_{i}.png"), torch.cat(grid),
                      columns=args.save_images, zoom=max(1, 96 // m.size))


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
    source_model = load_model(args.source, args.device, "--source") if args.source else None
    everyone = [*models, source_model] if source_model else models
    check_same_task(everyone)
    resolve_args(args, models[0])
    args.imagenet1k = False
    todo = with_images(measures_of(args, source_model), everyone, args)
    what = (f"{len(models)} models | {args.task} | {args.data} | {args.world} x "
            f"{common.describe(args.device)}")
    if args.checks:
        if args.rank == 0:
            print(what, flush=True)
            args.world = 1                                # nobody shares the images
            run_checks(models, source_model, todo, args)
        return

    results = open_results(args)
    common.print0(f"{what} | {results.out}")
    measure_models(todo, models, source_model, args, results)
    if args.rank == 0:
        print("\n" + results.write_table())
        if args.save_images and args.task == CLS:
            save_pictures(models, todo, args)
        print(f"\n{len(results.rows)} rows in {results.out}; this table in {results.table}")


if __name__ == "__main__":
    common.run(main)
