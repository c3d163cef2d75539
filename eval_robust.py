"""Evaluate models on clean, corrupted and attacked data; print one table for all models.

    python eval_robust.py --ckpt out/shapes_rpc                  # rendered scenes: minutes on a CPU
    python eval_robust.py --ckpt out/a out/b --out_dir out/ab     # the same images for all models
    python eval_robust.py --ckpt out/a --measures clean "pgd eps=1/255,4/255 steps=40" cw
    python eval_robust.py --ckpt deit_tiny_patch16_224.pth --data_dir data/imagenet    # DeiT's file
    python eval_robust.py --model my.py:build --data cifar10 --data_dir data/cifar10    # any model
    torchrun --standalone --nproc_per_node=4 eval_robust.py --ckpt out/imagenet_rpc \\
        --data_dir data/imagenet --corrupted_dir data/imagenet-c --imagenet_a data/imagenet-a

A checkpoint stores its task (classifier, Segmenter or language model) and its data set. Each
measure gives one row per model. A measure is a function that returns the fields of this row;
MEASURES lists the functions, and `main` calls them. Each finished row is written to results.jsonl,
so a second run only adds the missing rows. docs/robustness.md has more commands and explains the
numbers.

Paper: Teo & Nguyen 2024, section 4, App. A.2 to A.4, E.3 to E.5; Tables 1 to 6, Fig. 3.

Attacks: pixel values stay in [0, 1]. The budget eps is the largest change of a pixel value. An
attack changes an image so that the model no longer predicts the true class. The arithmetic is
float32. An image that a model classifies wrongly is not attacked and counts as not robust; only
noise and transfer change all images. Top-1 and top-5 are measured on the same attacked image.
Random numbers depend on (seed, image) alone, so the batch size, the number of processes and a
second run do not change them.

--preset paper attacks as the paper's code does (`rachtsy/KPCA_code:Attack`): it attacks normalised
images and does not clip them (PAPER_CLIPS lists exceptions). The model's own prediction takes the
place of the true class, so misclassified images are attacked, too. Normalised pixels are divided by
their standard deviation, about 0.226, so eps = 1/255 changes a pixel by about 0.226/255.
"""

import argparse
import copy
import inspect
import itertools
import json
import math
import os
import time
from datetime import date
from functools import partial, wraps
from pathlib import Path
from typing import NamedTuple, get_args as words_of_literal

import common
import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

import robust
from checkpoints import CLS, LM, NORMALIZE, SEG, load_built, load_checkpoint
from common import InputError, print0
from data.batches import Split, image_batches
from data.datasets import DATASETS, load_test
from data.imagenet import ImageTree
from data.rng import epoch_order
from robust import adaptive, attacks, autoattack, metrics
from robust.corruptions import CORRUPTIONS, NAMES, corrupt, jpeg_compression
from robust.frost import load_frost
from robust.words import WORD, word_swap
from results import (SUMMARY, UNITS, UNITS_LM, class_tables, measure_text, open_rows, pack,
                     print_tables, read_number, row_key, rows_table)

# To add an attack, write a function of (model, images, labels, ...) and add an entry here.
# --measures NAME runs the attack. The keywords of the function are its settings, for example
# "pgd eps=2/255 steps=40". The docstring of robust/attacks.py explains the arguments.
ATTACKS = {
    "noise": attacks.noise,
    "fgsm": attacks.fgsm,
    "pgd": attacks.pgd,
    "adaptive_pgd": adaptive.adaptive_pgd,
    "transfer": attacks.pgd,                              # PGD on another model, --source
    "sld": attacks.sld,
    "spsa": attacks.spsa,
    "cw": attacks.cw,
    "apgd": autoattack.apgd,
    "adaptive_apgd": adaptive.adaptive_apgd,
    "square": autoattack.square,
    "autoattack": autoattack.autoattack,
    "adaptive_autoattack": adaptive.adaptive_autoattack,
}
# Measures that read their own folder of images, given by the flag of the same name.
FOLDERS = ("imagenet_a", "imagenet_r", "imagenet_o")
# Settings that are not keywords of an attack, and their defaults. A tuple gives one row per value.
SETTINGS = {"corruptions": dict(type=NAMES,               # ImageNet-C's 15 types of corruption
                                jpeg85=False),            # True: then compress as ImageNet-C does
            "perplexity": dict(split=("valid", "test")),
            "noise": dict(draws=3)}                       # the accuracy is the mean over the draws
# Keywords of attacks that are not settings: robust.evaluate, `attack_of` or another attack sets
# them.
NOT_SETTINGS = ("clip", "seed", "index", "draw", "batch_size", "trace", "progress", "purpose",
                "targets", "surrogates")
DEFAULT_EPS = tuple(k / 255 for k in (1, 2, 4, 8))
# --preset paper: budgets and settings of the paper's code, `rachtsy/KPCA_code:Attack`.
PAPER_EPS = tuple(k / 255 for k in range(1, 7))
PAPER = dict(noise=dict(scale=0.3),
             sld=dict(rescale=True),                      # scale into the L1 ball, do not project
             cw=dict(confidence=10.0),
             spsa=dict(eps=0.1, centre="legacy"))         # gradient at 2 * image: cleverhans 4.0.0
# With --preset paper, these attacks clip normalised images to [0, 1]. The others do not clip.
PAPER_CLIPS = ("square", "autoattack", "adaptive_autoattack")
DEFAULT_CROP_PCT = 0.875
# The default of --measures per task: classification, segmentation and language modelling. A
# classifier is also measured on the folders of --imagenet_a, _r and _o.
DEFAULT_MEASURES = {
    CLS: ["clean", "corruptions", "noise", "fgsm", "pgd", "adaptive_pgd", "apgd"],
    SEG: ["clean", "corruptions"],
    LM: ["perplexity"]}
# The default of --limit, the number of images per measure. A measure without an entry uses all
# images. On rendered scenes, these limits keep an evaluation in minutes:
SCENE_LIMITS = dict(dict.fromkeys(ATTACKS, 80), corruptions=320, noise=640, fgsm=640, pgd=160,
                    transfer=160, sld=160, spsa=20, cw=40)
# On all other data, only the slowest attacks have a limit:
SLOW_LIMITS = dict(autoattack=1000, adaptive_autoattack=1000, square=1000, spsa=100, cw=100)
# Flags that apply only to these tasks (TASK_FLAGS) or to models of these origins (ORIGIN_FLAGS).
TASK_FLAGS = dict(window=(SEG, LM), stride=(SEG, LM), scales=(SEG,), flip=(SEG,), eps=(CLS,),
                  checks=(CLS,), per_class=(CLS,), corrupted_dir=(CLS,), source=(CLS,),
                  crop_pct=(CLS,), preset=(CLS,), frost_dir=(CLS, SEG), severities=(CLS, SEG),
                  **dict.fromkeys(FOLDERS, (CLS,)))
ORIGINS = dict(ours="our checkpoints", foreign="checkpoints of other projects",
               function="models of --model")
ORIGIN_FLAGS = dict(weights=("ours", "foreign"), image_size=("foreign", "function"),
                    num_heads=("foreign",), norm_eps=("foreign",), normalize=("foreign",))


def get_args():
    """Parse the flags."""
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, epilog=describe_measures(),
                                usage="%(prog)s [--flag value ...]",
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    boolean, count = argparse.BooleanOptionalAction, common.COUNT

    flag = p.add_argument_group("what to evaluate").add_argument
    flag("--ckpt", nargs="+", default=[], help="evaluate these checkpoints, all of one task: "
         "files, https addresses, or run folders (best.pt, else last.pt); ViT files of DeiT, timm "
         "and the paper's code work, too")
    flag("--model", nargs="+", default=[], metavar="FILE.py:BUILD", help="evaluate the classifiers "
         "that these functions return; a classifier is a module that takes pixels in [0, 1] and "
         "returns logits")
    flag("--measures", nargs="+", metavar="NAME", help='run these measures of the list below, with '
         'settings, for example "pgd eps=1/255,2/255 steps=40" (default for classifiers: clean, '
         "corruptions, noise, fgsm, pgd, adaptive_pgd, apgd, and imagenet_a, _r and _o if their "
         "folder is given; for Segmenters: clean, corruptions; for language models: perplexity)")
    flag("--preset", choices=("default", "paper"), default="default", help="choose the conditions "
         "of attacks; paper repeats the conditions and settings of the paper's code")
    flag("--eps", nargs="+", type=budget, help="attack with these L-infinity budgets, for "
         "example 8/255 or 0.031, unless the measure sets its own eps (default: the measure's; for "
         "most attacks 1/255 2/255 4/255 8/255)")
    flag("--limit", type=count, help="use this many images per measure, the same images for every "
         "model, or this many tokens of a text (default: all; fewer on shapes and for slow "
         "attacks)")
    flag("--per_class", action=boolean, default=False, help="also print the accuracy of each class "
         "and the confusion matrix, and write both as CSV files")
    flag("--checks", action=boolean, default=False, help="do not write rows; check whether the "
         "robust accuracy of each classifier is reliable")
    flag("--source", help="let the measure transfer attack this checkpoint by PGD, and test the "
         "models of --ckpt and --model on the attacked images")
    flag("--seed", type=common.SEED, default=0, help="use this seed for all random numbers, also "
         "for the choice of images for --limit and of swapped words (default: 0)")
    flag("--table", nargs="+", metavar="PATH", help="do not evaluate; print the table of "
         "these results.jsonl files, or of the folders that contain them")

    flag = p.add_argument_group("how to load a model").add_argument
    flag("--weights", choices=("model", "ema"), help="load the trained weights (model) or their "
         "average over the training steps (ema) (default: model)")
    flag("--image_size", type=count, help="set the pixels per side, for --model and "
         "checkpoints of other projects (default: the trained size; for --model 224, or 32 on "
         "shapes and cifar10)")
    flag("--num_heads", type=count, help="set the number of attention heads of another project's "
         "checkpoint (default: width / 64)")
    flag("--norm_eps", type=common.REAL, help="set the epsilon of every LayerNorm of another "
         "project's checkpoint (default: 1e-6)")
    flag("--normalize", choices=NORMALIZE, help="normalise pixels for another project's "
         "checkpoint by ImageNet's mean and std, or by 0.5 and 0.5 (half) (default: imagenet)")

    flag = p.add_argument_group("data").add_argument
    flag("--data", help="evaluate on this data set (default: the data set of the training)")
    flag("--data_dir", help="read the data from this folder or text file (default: as in "
         "training); for imagenet, the folder that contains val/ with all or some classes")
    flag("--crop_pct", type=common.number(float, 0.01, 1), help="keep this share of an image's "
         "short side in the central crop, for imagenet (default: 0.875)")
    flag("--corrupted_dir", help="read corrupted images instead of making them: ImageNet-C "
         "(<type>/<severity>/<class>/*.JPEG) or CIFAR-10-C (<type>.npy)")
    for name in FOLDERS:
        flag(f"--{name}", metavar="DIR", help=f"also measure {name}, on the images in this folder; "
             "it contains <class>/* for some of ImageNet's classes")
    flag("--frost_dir", help="make frost from the photographs frost1.png to frost5.jpg of "
         "ImageNet-C in this folder (default: from synthetic frost)")
    flag("--severities", nargs="+", type=common.number(int, 1, 5), help="corrupt images "
         "at these severities (default: 1 2 3 4 5)")

    flag = p.add_argument_group("Segmenters and language models").add_argument
    flag("--window", type=count, help="cut images into windows of this many pixels per side "
         "(default: the training crop), or texts into windows of this many tokens (default: the "
         "context)")
    flag("--stride", type=count, help="move the window by this many pixels (default: --window) "
         "or tokens (default: a quarter of --window; the paper uses 1, which takes longest)")
    flag("--scales", nargs="+", type=common.number(float, 0.01), help="resize images by these "
         "factors and average the probabilities over all sizes (default: 1)")
    flag("--flip", action=boolean, default=False, help="also average the probabilities "
         "over mirrored images")

    flag = p.add_argument_group("running").add_argument
    flag("--out_dir", help="write results.jsonl and table.md to this folder; rows that it "
         "already contains are not computed again (default: robust/ in the first checkpoint's run "
         "folder; for a checkpoint FILE outside a run folder, out/FILE/robust; for --model alone, "
         "out/model/robust)")
    flag("--batch_size", type=count, help="use this many images or windows of text per batch "
         "(default: depends on the image size and the memory; 64 windows of text)")
    flag("--tf32", action=boolean, default=False, help="use TF32 on a GPU, also in attacks: matrix "
         "products are faster, but their factors are rounded to 10 bits")
    flag("--num_workers", type=common.NATURAL, default=min(os.cpu_count() or 1, 10),
         help="decode images in this many processes (default: %(default)s)")
    flag("--device", type=common.device, help="compute on cuda, mps or cpu (default: the best "
         "available)")
    args = p.parse_args()
    common.check_no_empty_value(args)                     # for example --data_dir ""
    if not args.ckpt and not args.model and not args.table:
        p.error("the following arguments are required: --ckpt or --model")
    return args


class Run(NamedTuple):
    """Values that all measures of one command share. `args` are the flags; they never change.

    test_set is a Split (tensors .images and .labels in memory), an ImageTree (files with .labels,
    which workers load), a data set of images and masks for Segmenters, or {split: Text}.
    """
    args: argparse.Namespace
    device: torch.device
    rank: int                            # this process's number, 0 to world - 1
    world: int                           # the number of processes
    task: str = CLS                      # CLS, SEG or LM
    data: str = ""                       # the name of the data set
    data_dir: str | None = None
    size: int | None = None              # pixels per side of a classifier's images
    batch_size: int = 64
    test_set: object = None              # see above; None: --data_dir is missing for ImageNet
    classes: list = []                   # names; labels are indices into this list
    imagenet1k: bool = False             # True: `classes` are ImageNet's 1,000 classes
    source_model: object = None          # the Loaded of --source, for the measure transfer
    window: int = 0                      # --window and --stride: pixels for Segmenters,
    stride: int = 0                      # tokens for language models
    word: str = ""                       # the word that the word swap inserts


# --- measures in words: "pgd eps=1/255,2/255 steps=40" --------------------------------------------

def budget(text):
    """Read an L-infinity budget, "8/255" or "0.031", as a number from 0 to 1."""
    value = read_number(text)
    if not 0 <= value <= 1:
        hint = f"; did you mean {text}/255?" if value > 1 else ""
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 1, the range of pixels{hint}")
    return value


def settings_of(name):
    """Return {setting: default} of a measure; a keyword without a default has the default None.

    The settings of an attack are its keywords after (model, images, labels), without NOT_SETTINGS.
    An attack with a random start also has restarts, the number of runs from different starts.
    """
    own = {}
    if name in ATTACKS:
        keywords = list(inspect.signature(ATTACKS[name]).parameters.values())[3:]
        own = {p.name: None if p.default is p.empty else p.default
               for p in keywords if p.name not in NOT_SETTINGS}
    return own | SETTINGS.get(name, {}) | (dict(restarts=1) if "random_start" in own else {})


def read_setting(name, setting, text, default):
    """Read one value of a setting of the measure `name` from text.

    The default has the type of the value: a number, True or False (yes or no), or a text. An attack
    can limit a text to certain words: loss: Literal["ce", "dlr"] = "ce".
    """
    words = {}                                            # {allowed word: value}; empty: any text
    if isinstance(default, bool):
        words = dict(yes=True, no=False)
    elif name in ATTACKS:
        keyword = inspect.signature(ATTACKS[name]).parameters.get(setting)
        if keyword:
            words = {word: word for word in words_of_literal(keyword.annotation)}
    whole = type(default) is int                          # a count, such as steps
    parse = budget if setting == "eps" else common.COUNT if whole else read_number
    try:
        if words:
            return words[text]
        if isinstance(default, (str, tuple)):             # a tuple contains names, as in split
            return text
        value = parse(text)
        if not math.isfinite(value):
            raise ValueError
        return value
    except argparse.ArgumentTypeError as error:
        raise InputError(f"--measures {name}: {setting}={text}: {error}") from None
    except (KeyError, ValueError, ZeroDivisionError):
        kind = "a whole number" if whole else "a number, such as 0.1 or 2/255"
        expected = " or ".join(words) or kind
        raise InputError(f"--measures {name}: {setting}={text}: expected {expected}") from None


def parse_measure(text, known, preset="default", eps=None):
    """Read one measure of the command line, for example "pgd eps=1/255,2/255".

    known: the names of measures that are allowed. preset: --preset. eps: the budgets of --eps, used
    if the text does not set eps.
    Returns a list of (name, settings), one entry per combination of the values.
    """
    name, *pairs = text.split() or [""]
    if name not in known:
        raise InputError(f"--measures {text!r}: expected one of {', '.join(known)}")
    defaults, paper = settings_of(name), preset == "paper"
    values = defaults | (PAPER.get(name, {}) if paper else {})
    if "eps" in values and (eps or values["eps"] is None):
        values["eps"] = tuple(eps or (PAPER_EPS if paper else DEFAULT_EPS))
    seen = {}                                             # {setting: its text}
    for setting, _, given in (pair.partition("=") for pair in pairs):
        if setting in seen:
            raise InputError(f"--measures {text!r}: {setting} occurs twice; separate several "
                             f"values by commas: {setting}={seen[setting]},{given}")
        seen[setting] = given
        if setting not in values:
            raise InputError(f"--measures {text!r}: {name} has no setting {setting}; expected one "
                             f"of {', '.join(values) or 'none'}")
        values[setting] = tuple(read_setting(name, setting, one, defaults[setting])
                                for one in given.split(","))
    tuples = [v if isinstance(v, tuple) else (v,) for v in values.values()]
    all_settings = [dict(zip(values, combination)) for combination in itertools.product(*tuples)]
    for settings in all_settings:
        if settings.get("restarts", 1) > 1 and not settings["random_start"]:
            raise InputError(f"--measures {text!r}: without random_start all restarts are equal: "
                             f"leave restarts out, or set random_start=yes")
        if paper and name in ATTACKS:
            settings["conditions"] = "paper"
    return [(name, {k: v for k, v in settings.items() if v is not None})
            for settings in all_settings]


def describe_measures():
    """List the measures, their settings and defaults, for --help."""
    lines = ["measures and the defaults of their settings:"]
    for name in {**MEASURES[CLS], **MEASURES[LM]}:
        shown = {setting: "all" if setting == "type" else "..." if default is None else default
                 for setting, default in settings_of(name).items()}
        lines.append(f"  {measure_text(f'{name:20}', shown)}".rstrip())
    lines.append("eps=1/255,2/255 measures both budgets. Without eps=..., --eps sets the budgets. "
                 "Without\nalpha=..., alpha is rel_step * eps. jpeg85 compresses corrupted images "
                 "as ImageNet-C does.\nrobust/attacks.py explains the settings of attacks.")
    return "\n".join(lines)


# --- models ---------------------------------------------------------------------------------------

@torch.no_grad()
def count_classes(m, device):
    """Run a classifier on two grey images of its size; return the number of its logits."""
    grey = torch.full((2, 3, m.size, m.size), 0.5, device=device)
    try:
        logits = robust.forward(m.model, grey)            # m.model(grey), as float32
    except (RuntimeError, AssertionError, IndexError) as error:
        if m.origin != "function":                        # not from --model, so it is our bug
            raise
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{m.given} does not accept images of {m.size} x {m.size} pixels ({why}); "
                         "set another --image_size") from error
    with common.error_prefix(m.given):
        attacks.check_logits(logits)                      # an error for inf, nan or probabilities
    return logits.shape[1]


def load_models(run):
    """Load the models of the flags; return (models, the model of --source or None).

    Each model is a `Loaded` of checkpoints.py, a NamedTuple. In this file it is called m:
        m.model       the network, in eval mode, with frozen parameters
        m.task        CLS, SEG or LM
        m.about       the model's fields of a row: model (its name), kind, weights (checksum), ...
        m.given       flag and path, for messages: "--ckpt out/first"
        m.size        pixels per side of its images; None for a language model
        m.origin      "ours", "foreign" (another project's file) or "function" (--model)
        m.trained     {flag: value} of its training; {} unless m.origin is "ours"
        m.classes     class names, or None
        m.checkpoint  the other contents of our checkpoint, such as a vocabulary
    """
    args = run.args
    built_size = args.image_size or (32 if args.data in ("shapes", "cifar10") else 224)
    options = dict(weights=args.weights or "model", num_heads=args.num_heads, eps=args.norm_eps,
                   normalize=args.normalize or "imagenet", image_size=args.image_size)
    models = [load_checkpoint(path, run.device, **options) for path in args.ckpt]
    models += [load_built(text, run.device, size=built_size) for text in args.model]
    source_model = None
    if args.source:
        source_model = load_checkpoint(args.source, run.device, flag="--source", **options)
    return models, source_model


def check_models_fit(args, models):
    """Raise InputError unless the models can be compared and every given flag applies to them."""
    first = models[0]
    for name in ("task", "size", "classes"):
        values = [getattr(m, name) for m in models if getattr(m, name)]
        if any(value != values[0] for value in values):
            raise InputError(f"{first.given}, ...: the models differ in {name}: "
                             f"{' and '.join(dict.fromkeys(str(v)[:60] for v in values))}; "
                             f"expected the same {name} for all models")
    for flag, origins in ORIGIN_FLAGS.items():
        if getattr(args, flag) and not any(m.origin in origins for m in models):
            raise InputError(f"--{flag} applies to {' and '.join(ORIGINS[o] for o in origins)}; "
                             f"no model of this command is of this kind: leave --{flag} out")
    for flag, tasks in TASK_FLAGS.items():                # None, False, "default": not given
        if getattr(args, flag) not in (None, False, "default") and first.task not in tasks:
            raise InputError(f"--{flag} applies to {' and '.join(tasks)}, but {first.given} is a "
                             f"model for {first.task}: leave --{flag} out")
    for m in models:
        normalises = hasattr(m.model, "mean") and hasattr(m.model, "std")
        if args.preset == "paper" and not normalises:
            raise InputError(f"--preset paper attacks normalised images and needs a model with "
                             f"tensors .mean and .std, which {m.given} does not have")


def choose_data(run, first):
    """Return `run` with task, size, data and data_dir.

    Priority for data and data_dir: the flags, then the training of `first`, the first model.
    """
    args, data = run.args, run.args.data or first.trained.get("data") or "imagenet"
    if first.task == LM and args.data_dir and not args.data:
        data = "folder"                                   # --data_dir alone is your own text
    if data == "shapes" and args.data_dir:
        raise InputError(f"--data_dir {args.data_dir}: --data shapes renders its own images; leave "
                         f"--data_dir out, or choose another --data")
    return run._replace(task=first.task, size=first.size, data=data,
                        data_dir=args.data_dir or first.trained.get("data_dir"))


# --- data -----------------------------------------------------------------------------------------

# Names of ImageNet's class folders; logit i of an ImageNet network belongs to IMAGENET[i].
IMAGENET = Path(robust.__file__).with_name("imagenet_classes.txt").read_text().split()


def load_images(models, run):
    """Load the test set of classifiers; return `run` with test_set, classes and batch_size.

    test_set is None if --data_dir is not given for ImageNet; then only the folders of --imagenet_a
    and --imagenet_r can be measured.
    """
    args, first = run.args, models[0]
    counts = [count_classes(m, run.device) for m in models]
    classes, batch_size, imagenet1k = first.classes, args.batch_size, False
    if not batch_size:
        pixels = 2 ** 19                                  # per batch
        if run.device.type == "cuda":                     # a ViT-B's attack needs 3 kB per pixel
            free_bytes, _ = torch.cuda.mem_get_info(run.device)
            pixels = min(free_bytes // 4096, 512 * 224 ** 2)
        batch_size = max(1, pixels // run.size ** 2)
    if run.data != "imagenet":
        common.one_of("--data", run.data, DATASETS)       # InputError for an unknown name
        if args.crop_pct:
            raise InputError(f"--crop_pct applies to --data imagenet, not to {run.data}")
        flags = argparse.Namespace(data=run.data, data_dir=run.data_dir, device=run.device)
        # If run.data_dir is not the folder of the training, load_test uses val/, or all images if
        # there is no val/.
        test_set = load_test(flags, trained=first.trained, size=run.size, classes=classes)
    else:
        # A network without class names that has 1,000 logits is taken for an ImageNet network.
        classes = classes or (IMAGENET if counts[0] == len(IMAGENET) else None)
        imagenet1k, test_set = classes == IMAGENET, None
        if run.data_dir or not classes:
            # With subset=True, val/ may contain only some of the class folders.
            test_set = ImageTree(run.data_dir or "", "val", classes, run.size, subset=imagenet1k,
                                 crop_pct=args.crop_pct or DEFAULT_CROP_PCT)
            for m in models:
                if m.origin != "ours" and not args.crop_pct:
                    assume(m, f"crop_pct = {DEFAULT_CROP_PCT} is assumed: the short side is "
                              f"resized to {run.size} / {DEFAULT_CROP_PCT} pixels, then the "
                              f"centre is cropped.")
    names = classes if test_set is None else list(test_set.classes)
    for m, n in zip(models, counts):
        if n != len(names) or m.classes and list(m.classes) != names:
            own = f" ({', '.join(m.classes[:3])}, ...)" if m.classes else ""
            raise InputError(f"{m.given} has {n} classes{own}, but --data {run.data} has "
                             f"{len(names)} ({', '.join(names[:3])}, ...); expected the same "
                             f"classes")
        if not m.classes and not imagenet1k:
            note_class_order(m, names)
    return run._replace(test_set=test_set, classes=names, imagenet1k=imagenet1k,
                        batch_size=batch_size)


def assume(m, note):
    """Print an assumption about another project's model, and store it in the model's rows."""
    print0(f"{m.given}: {note}")
    m.about.setdefault("assumed", []).append(note)


def note_class_order(m, names):
    """Print which logit belongs to which class folder if the folders' names are numbers.

    The folders are sorted as text, "10" before "2". If this is also the order of the numbers, print
    nothing.
    """
    if all(name.isdecimal() for name in names) and names != sorted(names, key=int):
        order = ", ".join(f"logit {i} = folder {name}" for i, name in enumerate(names))
        digits = len(str(len(names)))
        assume(m, f"class folders are sorted as text: {order}. If the network was trained with the "
                  f"order of the numbers, rename the folders to {names[0]:0>{digits}}, "
                  f"{names[1]:0>{digits}}, ...")


def load_masks(models, run):
    """Load the test images and masks of Segmenters; compare their classes with the checkpoint's.

    Returns `run` with test_set, classes, window and stride.
    """
    from data.views import load_segmentation
    first = models[0]
    # A checkpoint without the flag keep_best counts as trained without it. If data_dir is not the
    # folder of the training, load_segmentation uses all images of data_dir.
    flags = {"keep_best": False, **first.trained, "data": run.data, "data_dir": run.data_dir}
    test_set = load_segmentation(argparse.Namespace(**flags), "test", trained=first.trained)
    trained, names = list(first.classes or test_set.classes), list(test_set.classes)
    if trained != names:
        # A folder without classes.txt names its classes "value 0", ... or "class 0", ...
        unnamed = all(name.split()[0] in ("value", "class") for name in names)
        if len(trained) != len(names) or not unnamed:
            i = next((i for i, pair in enumerate(zip(trained, names)) if pair[0] != pair[1]), 0)
            raise InputError(f"{first.given} has {len(trained)} classes, --data_dir {run.data_dir} "
                             f"{len(names)}; class {i} is {trained[i]} in training and {names[i]} "
                             f"here. Expected the same classes in the same order; name them "
                             f"in classes.txt")
        print0(f"--data_dir {run.data_dir} does not name its classes: {names[0]} is taken for "
               f"{trained[0]}, {names[1]} for {trained[1]}, and so on")
    window, stride = window_and_stride(run.args, first.model.config.image_size, strides=1)
    return run._replace(test_set=test_set, classes=trained, window=window, stride=stride)


class Text(NamedTuple):
    """One split of a text, as tokens."""
    split: str
    clean: np.ndarray                    # (n,) uint32
    attacked: np.ndarray                 # (n,) uint32, after the word swap
    kept: torch.Tensor                   # (n - 1,) bool, True for a token that is not swapped
    unknown: float                       # per cent of the words that are not in the vocabulary


def load_texts(models, run):
    """Load the texts for language models as test_set, {split: Text}.

    Returns `run` with test_set, word, window, stride and batch_size. The words of every text are
    looked up in the checkpoint's vocabulary. A single file has one split, "whole"; a folder and the
    training text have the splits valid and test.
    """
    from data.text import UNK, lines_to_score, stored_vocabulary
    args, first = run.args, models[0]
    window, stride = window_and_stride(args, first.model.config.context, strides=4)
    if window > first.model.config.context:
        raise InputError(f"--window {window} is more than the context of "
                         f"{first.model.config.context} tokens that the model was trained with")
    vocabulary = stored_vocabulary(first.checkpoint)
    for m in models:
        if stored_vocabulary(m.checkpoint).words != vocabulary.words:
            raise InputError(f"{m.given} has another vocabulary than {first.given}, so their "
                             "perplexities cannot be compared: evaluate them in two commands")

    # Insert the paper's word. If the vocabulary does not have this word, insert the rarest word,
    # because <unk> would be too easy to predict.
    word = WORD if WORD in vocabulary else vocabulary.words[-1]
    texts = {}
    for split, lines in lines_to_score(run.data, run.data_dir, first.trained).items():
        swapped_lines, swapped = word_swap(lines, seed=args.seed, word=word)    # one bool per token
        clean_tokens = vocabulary.encode_lines(lines)[:args.limit]
        if len(clean_tokens) <= window:
            raise InputError(f"--data_dir {run.data_dir}: {split} has {len(clean_tokens)} tokens, "
                             f"expected more than --window {window}")
        unknown = (clean_tokens == vocabulary.get(UNK, -1)).mean()
        texts[split] = Text(split, clean=clean_tokens,
                            attacked=vocabulary.encode_lines(swapped_lines)[:args.limit],
                            kept=~torch.tensor(swapped[1:len(clean_tokens)]),
                            unknown=round(100 * float(unknown), 4))
    return run._replace(test_set=texts, word=word, window=window, stride=stride,
                        batch_size=args.batch_size or 64)


def window_and_stride(args, default_window, strides):
    """Return --window (default: default_window) and --stride (default: window / strides)."""
    window = args.window or default_window
    stride = args.stride or max(window // strides, 1)
    if stride > window:
        raise InputError(f"--stride {stride} is more than --window {window}")
    return window, stride


LOAD = {CLS: load_images, SEG: load_masks, LM: load_texts}


# --- images of a measure --------------------------------------------------------------------------

class Images(NamedTuple):
    """The images of a data set that a measure uses; for a language model, the tokens of a text."""
    dataset: object                      # a Split, an ImageTree, a Text, ...: see Run.test_set
    index: torch.Tensor                  # (n,) int64: the numbers of the images in the data set
    data_dir: str | None = None          # absolute path of the folder, or None


def pick(n, name, args, data):
    """Choose the images of a measure: return some of the numbers 0..n-1, in a random order.

    --seed fixes the order. --limit cuts it, so a smaller limit gives a prefix of a larger one.
    """
    default_limit = (SCENE_LIMITS if data == "shapes" else SLOW_LIMITS).get(name, n)
    return epoch_order(n, epoch=0, seed=args.seed)[:args.limit or default_limit]


def open_folder(flag, path, classes, size, crop_pct):
    """Open the folder of a flag, <class>/* for some of `classes`, as an ImageTree.

    A label is an index into the whole list `classes`. Error messages name the flag.
    """
    root, folder = os.path.split(os.path.abspath(path))
    try:
        return ImageTree(root, folder, classes, size, subset=True, crop_pct=crop_pct)
    except InputError as error:
        raise InputError(str(error).replace("--data_dir", f"--{flag}")) from None


def images_of(run, name, settings):
    """Return the `Images` of a measure, or None if there are none.

    Changes `settings`: adds the settings that flags set, so that the row contains them.
    """
    args = run.args
    if run.task == LM:
        settings.update(window=run.window, stride=run.stride)
        text = run.test_set.get(settings["split"])
        if text is None:
            return None
        return Images(text, range(len(text.clean)), absolute_path(run.data_dir))
    if name in FOLDERS and not getattr(args, name):
        raise InputError(f"--measures {name} needs --{name}, the folder with its images")
    if run.test_set is None and name not in ("imagenet_a", "imagenet_r"):
        raise InputError(f"--measures {name} needs --data_dir, the folder that contains val/")
    if name in FOLDERS:
        tree = open_folder(name, getattr(args, name), run.classes, run.size,
                           crop_pct=args.crop_pct or DEFAULT_CROP_PCT)
        data_dir = absolute_path(getattr(args, name))
        if name == "imagenet_o":                          # is compared with images of val/
            data_dir += f" and {absolute_path(run.data_dir)}"
        return Images(tree, pick(len(tree), name, args, run.data), data_dir)
    if name == "transfer":
        if not run.source_model:
            raise InputError("--measures transfer needs --source, the checkpoint on which the "
                             "attack is computed")
        settings["source"] = run.source_model.about["weights"]    # their checksum

    # All other measures use the test set. len() of a Split, a tuple, is not the number of images.
    n = len(run.test_set.labels) if isinstance(run.test_set, Split) else len(run.test_set)
    images = Images(run.test_set, pick(n, name, args, run.data),
                    None if run.data in ("shapes", "cifar10") else absolute_path(run.data_dir))
    if name == "corruptions":
        images = images_to_corrupt(run, settings, images)
    if run.task == SEG:
        settings.update(window=run.window, stride=run.stride, scales=args.scales or [1.0],
                        flip=args.flip)
    return images


def absolute_path(path):
    """Return the absolute path, so that "photos" and "./photos" give the same row."""
    return str(Path(path).resolve()) if path else None


def images_to_corrupt(run, settings, images):
    """Return the `Images` of a corruption, or None if --corrupted_dir does not contain it.

    Changes `settings`: adds the severities, and where the corrupted or frost images come from.
    """
    args, kind = run.args, settings["type"]
    severities = sorted({*(args.severities or (1, 2, 3, 4, 5))})
    common.one_of("--measures corruptions: type", kind, CORRUPTIONS)
    if args.corrupted_dir:
        if not Path(args.corrupted_dir).is_dir():
            raise InputError(f"--corrupted_dir {args.corrupted_dir} is not a folder")
        where = Path(args.corrupted_dir, kind)
        severities = [s for s in severities
                      if (where / str(s)).is_dir() or where.with_suffix(".npy").exists()]
        if not severities:
            print0(f"--corrupted_dir {args.corrupted_dir} has no {kind}: it is not measured")
            return None
        settings.update(severities=severities, released=True)
        return images._replace(data_dir=absolute_path(args.corrupted_dir))
    if run.size and run.size < 16:
        raise InputError(f"--measures corruptions: images of {run.size} pixels per side, expected "
                         f"16 or more; leave corruptions out")
    if kind == "frost":
        try:
            load_frost(args.frost_dir)                    # report missing files early
        except ValueError as error:
            raise InputError(str(error)) from None
    settings.update(severities=severities,
                    frost="photographs" if args.frost_dir else "procedural")
    if isinstance(images.dataset, ImageTree):             # ImageNet-C was resized bilinearly
        tree = copy.copy(images.dataset)
        tree.resample = "bilinear"
        images = images._replace(dataset=tree)
    return images


def released(run, name, severity, test_set):
    """Open one severity of a corruption in --corrupted_dir: ImageNet-C's files or CIFAR-10-C's.

    ImageNet-C's files have 224 pixels and are only cropped. Image i of the returned data set is the
    corrupted copy of image i of test_set. InputError if the labels differ.
    """
    folder = run.args.corrupted_dir
    if Path(folder, f"{name}.npy").exists():
        corrupted_set = cifar10_c(folder, name, severity, test_set, run.device)
    else:
        corrupted_set = open_folder("corrupted_dir", Path(folder, name, str(severity)),
                                    test_set.classes, run.size, crop_pct=1.0)
    if not torch.equal(corrupted_set.labels.cpu(), test_set.labels.cpu()):
        raise InputError(f"--corrupted_dir {folder}: {name}, severity {severity} has other images "
                         f"than the test split ({len(corrupted_set.labels)}, expected "
                         f"{len(test_set.labels)})")
    return corrupted_set


def cifar10_c(folder, name, severity, test_set, device):
    """Read one severity of CIFAR-10-C's arrays <type>.npy and labels.npy as a `Split`."""
    size = test_set.images.shape[2:]
    try:
        images, labels = (np.load(Path(folder, file), mmap_mode="r")
                          for file in (f"{name}.npy", "labels.npy"))
        fits = images.dtype == np.uint8 and images.shape[1:] == (*size, 3) and \
            labels.dtype.kind in "iu" and labels.shape == images.shape[:1]
        problem = f"are {images.dtype} {images.shape} and {labels.dtype} {labels.shape}"
    except (OSError, ValueError, EOFError) as error:
        fits, problem = False, f"cannot be read ({error})"
    if not fits:
        raise InputError(f"--corrupted_dir {folder}: {name}.npy and labels.npy {problem}, expected "
                         f"uint8 (N, {size[0]}, {size[1]}, 3) and whole numbers (N,): unpack "
                         f"CIFAR-10-C.tar there again")
    part = slice((severity - 1) * 10000, severity * 10000)    # each array contains all severities
    images, labels = (torch.from_numpy(a[part].copy()).to(device) for a in (images, labels))
    return Split(images.permute(0, 3, 1, 2), labels.long(), test_set.classes)


def batches(run, images, label="", at_least=0):
    """Load this process's share of `Images` in batches on the device.

    label: text of the progress bar. at_least: batches are joined until they contain at least this
    number of images.
    Yields (pixels (b, 3, S, S) uint8, labels (b,), numbers (b,), place (b,)). numbers: the numbers
    of the images in the data set. place: the positions of these numbers in images.index. Results
    (n, ...) have their rows in the order of images.index, so `place` also selects rows of results.
    """
    dataset, index = images.dataset, images.index
    share = torch.arange(len(index))[run.rank::run.world]
    places = [place for place in share.split(run.batch_size) if len(place)]
    parts = [index[place] for place in places]
    if isinstance(dataset, Split):
        parts = (part.to(run.device) for part in parts)
        loaded = ((dataset.images[part], dataset.labels[part], part) for part in parts)
    else:
        # A key is (position, number). The position chooses a random crop, and image_batches returns
        # it. There are no random crops here, so pass the number as position.
        keys = [[(i, i) for i in part.tolist()] for part in parts]
        loaded = image_batches(dataset, keys, run.args.num_workers, run.device)
    bar = tqdm(total=len(share), desc=label[:60], unit="image", leave=False,
               disable=run.rank > 0 or None)              # None: no bar if output is redirected
    waiting = []                                          # batches that are not yet joined
    with bar:
        for i, (batch, place) in enumerate(zip(loaded, places), 1):
            waiting.append(tuple(t.to(run.device, non_blocking=True) for t in (*batch, place)))
            if i == len(places) or sum(len(part[-1]) for part in waiting) >= at_least:
                yield tuple(map(torch.cat, zip(*waiting)))
                waiting = []
            bar.update(len(place))


def all_sum(t):
    """Sum a tensor over the processes; return the sum on the CPU, in every process."""
    t = t.cpu()
    if dist.is_initialized():
        dist.all_reduce(t)
    return t


# --- scores of images -----------------------------------------------------------------------------

def pixels_of(images):
    """Return images (b, 3, S, S) uint8 as float32 in [0, 1]."""
    return images.float() / 255


@torch.no_grad()
def logits_of(run, m, x):
    """Return the logits (b, classes), float32, of images x in [0, 1], run.batch_size at a time."""
    return robust.forward(m.model, x, run.batch_size).float()


def correct(logits, labels):
    """Return (b, 3) float per image: top-1 (0 or 1), top-5 (0 or 1), cross-entropy in nats."""
    if not logits.isfinite().all():
        raise InputError("the model returns logits that are not finite; expected finite numbers")
    right = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    return torch.stack([right[:, 0].float(), right.any(1).float(), loss], 1)


def percent(total, n):
    """Return each sum over n images as a percentage of n."""
    return [round(100 * x / n, 4) for x in total.tolist()]


def outcome(hits, classes):
    """Return the fields top1, top5 and right of a row; right is text, one bit per image.

    hits: (n, 3) from `correct`. classes: the number of classes.
    """
    top1, top5 = percent(hits[:, :2].sum(0), len(hits))
    top5 = dict(top5=top5) if classes > 5 else {}         # up to 5 classes it is always 100 %
    return dict(top1=top1, **top5, right=pack(hits[:, 0] > 0))


def join_severities(outcomes):
    """Turn a list of dicts, one per severity, into one dict of lists, one value per severity."""
    return {field: [one[field] for one in outcomes] for field in outcomes[0]}


def widest(device):
    """Return the widest float type of a device: float64, or float32 on mps."""
    return torch.float32 if device.type == "mps" else torch.float64


def distances(adv, x):
    """Return (b, 4): Linf, L2 and L1 of each image's change, and how far it leaves [0, 1]."""
    move = (adv - x).flatten(1).to(widest(x.device))
    outside = torch.maximum(-adv.flatten(1).amin(1), adv.flatten(1).amax(1) - 1).clamp(min=0)
    return torch.stack([move.norm(math.inf, 1), move.norm(2, 1), move.norm(1, 1), outside], 1)


# --- measures: functions of (run, m, images, name, settings) that return the fields of a row ------

# m is a Loaded: `load_models` lists its fields. images is an `Images`. With several processes, each
# process fills its share of a tensor of zeros, and all_sum adds the shares.

def clean(run, m, images, name, settings):
    """Measure accuracy and mean loss on the unchanged images."""
    hits = torch.zeros(len(images.index), 3, device=run.device)
    for pixels, labels, _, place in batches(run, images, f"{name}, {m.about['model']}"):
        hits[place] = correct(logits_of(run, m, pixels_of(pixels)), labels)
    hits = all_sum(hits).double()
    return dict(loss=hits[:, 2].mean().item(), **outcome(hits, len(run.classes)))


def corrupted(run, m, images, name, settings):
    """Measure accuracy on corrupted images; each field is a list, one value per severity."""
    severities = settings["severities"]
    label = f"{measure_text(name, settings)}, {m.about['model']}"
    hits = torch.zeros(len(severities), len(images.index), 3, device=run.device)
    if "released" in settings:
        for i, severity in enumerate(severities):
            dataset = released(run, settings["type"], severity, images.dataset)
            for pixels, labels, _, place in batches(run, images._replace(dataset=dataset), label):
                hits[i, place] = correct(logits_of(run, m, pixels_of(pixels)), labels)
    else:
        for pixels, labels, numbers, place in batches(run, images, label):
            for i, severity in enumerate(severities):
                changed = corrupt_as(run, settings, severity, pixels, numbers)
                hits[i, place] = correct(logits_of(run, m, pixels_of(changed)), labels)
    return join_severities([outcome(hit, len(run.classes)) for hit in all_sum(hits).double()])


def corrupt_as(run, settings, severity, images, numbers):
    """Corrupt images (b, 3, H, W) uint8 with the settings of a measure.

    numbers: (b,), the image numbers, on which the random numbers depend.
    """
    images = corrupt(images, settings["type"], severity, seed=run.args.seed, index=numbers,
                     frost_dir=run.args.frost_dir)
    if settings["jpeg85"]:                                # ImageNet-C's files have this quality
        images = jpeg_compression(images, 85)
    return images


class Normalized(torch.nn.Module):
    """A model of normalised images z = (x - mean) / std; the paper's code attacks such models.

    model: takes pixels x. like: the model that has the tensors .mean and .std.
    """

    def __init__(self, model, like):
        super().__init__()
        self.model, self.mean, self.std = model, like.mean, like.std
        self.training = model.training                    # attacks reject a module in train mode

    def forward(self, z):
        return self.model(z * self.std + self.mean)


def as_in_paper(run, model, like, x, name):
    """Return (model, inputs, labels) of an attack under the conditions of --preset paper.

    The model takes normalised images z = (x - mean) / std, the inputs are z, and the labels are the
    predictions of `like`, the network whose mean, std and predictions count.
    """
    z = (x - like.mean) / like.std
    z = z.clamp(0, 1) if name in PAPER_CLIPS else z
    with torch.no_grad():
        predicted = robust.forward(Normalized(like, like), z, run.batch_size).argmax(1)
    return Normalized(model, like), z, predicted


def attack_of(run, name, settings):
    """Return an attack with its settings, as a function of (model, images, labels).

    The function still has the attack's signature: robust.evaluate reads from the signature whether
    the attack also takes seed, index, draw, batch_size or trace.
    """
    attack, paper = ATTACKS[name], "conditions" in settings    # parse_measure sets conditions
    parameters = inspect.signature(attack).parameters
    keywords = {k: v for k, v in settings.items() if k in parameters}
    if "clip" in parameters:
        keywords["clip"] = not paper or name in PAPER_CLIPS
    if "progress" in parameters:
        keywords["progress"] = run.rank == 0
    if settings.get("restarts", 1) > 1:
        # If an image does not fool the model, attack it again from another random start.
        attack = attacks.restarted(attack, settings["restarts"])
    attack = partial(attack, **keywords)
    if name != "transfer":
        return attack
    source = run.source_model.model
    source = Normalized(source, source) if paper else source

    @wraps(attack)                                        # keeps the signature
    def attack_source(model, *rest, **more):              # attacks `source` in place of the model
        return attack(source, *rest, **more)
    return attack_source


# An attack with the keyword batch_size gets at least this number of images at once. The attack
# divides the images that do not fool the model yet into batches, so the batches stay full.
MANY_IMAGES = 4096
STAGES = ("clean", "apgd-ce", "apgd-t", "fab-t", "square")    # AutoAttack's order


def attack_images(run, m, images, name, settings):
    """Attack all images of a measure; return tensors on the CPU.

    Returns:
        hits (draws, n, 3): the result of `correct` for the attacked images.
        moved (n, 4): `distances` between attacked and original image, the largest of all draws.
        stages (5, n): 1 if the image is right after this stage of AutoAttack, else 0.
    """
    attack, n, paper = attack_of(run, name, settings), len(images.index), "conditions" in settings
    own_batches = "batch_size" in inspect.signature(attack).parameters
    label = f"{measure_text(name, settings)}, {m.about['model']}"
    hits = torch.zeros(settings.get("draws", 1), n, 3, device=run.device)
    moved = torch.zeros(n, 4, dtype=widest(run.device), device=run.device)
    stages = torch.zeros(len(STAGES), n)
    for pixels, labels, numbers, place in batches(run, images, label,
                                                  at_least=MANY_IMAGES if own_batches else 0):
        # The model to attack, its inputs, and the labels that the attack tries to change.
        x = pixels_of(pixels)
        model, inputs, labels_to_leave = m.model, x, labels
        if paper:
            like = (run.source_model if name == "transfer" else m).model    # has .mean and .std
            model, inputs, labels_to_leave = as_in_paper(run, m.model, like, x, name)

        # robust.evaluate attacks the images that the model classifies as labels_to_leave, or all
        # images with attack_wrong=True. It appends one dict per draw to trace, with the attacked
        # images adv, their logits, and AutoAttack's stages.
        trace = []
        right = robust.evaluate(model, inputs, labels_to_leave, {name: attack},
                                batch_size=run.batch_size, seed=run.args.seed, index=numbers,
                                draws=len(hits), attack_wrong=name in ("noise", "transfer"),
                                trace=trace)
        for result in trace:
            adv = result["adv"] * like.std + like.mean if paper else result["adv"]
            hits[result["draw"], place] = correct(result["logits"].float(), labels)
            moved[place] = torch.maximum(moved[place], distances(adv, x))

        # Only AutoAttack has stages. stage["robust"] has one value per attacked image: True until
        # a stage fools the model. Until then the model predicts labels_to_leave, so the image is
        # right if this is the true label. For all other images, the final result counts.
        was_attacked = right["clean"]                     # (b,) bool
        right_unfooled = (labels_to_leave == labels).cpu()
        right_finally = hits[0, place, 0].cpu() > 0
        for i, stage in enumerate(trace[0]["stages"]):
            unfooled = torch.zeros_like(was_attacked)
            unfooled[was_attacked] = stage["robust"].cpu()
            stages[i, place.cpu()] = torch.where(unfooled, right_unfooled, right_finally).float()
    return all_sum(hits).double(), all_sum(moved).double(), all_sum(stages)


def attacked(run, m, images, name, settings):
    """Measure accuracy under an attack, and how far the attacked images are from the originals.

    The attack noise has several draws: top1 is their mean, and right is a list of one text per
    draw. top1_at_l2, for CW: the accuracy if an image may move by at most this L2 distance.
    """
    hits, moved, stages = attack_images(run, m, images, name, settings)
    row = outcome(hits.mean(0), len(run.classes)) | summary_of_distances(moved)
    if name == "noise":
        row["right"] = [pack(hit[:, 0] > 0) for hit in hits]
    if name == "cw":
        fooled, radii = hits[0, :, 0] == 0, (0.25, 0.5, 1.0, 2.0)
        within = torch.stack([(fooled & (moved[:, 1] <= r)).sum() for r in radii])
        row["top1_at_l2"] = dict(zip(radii, [100 - share for share in percent(within, len(moved))]))
    if name.endswith("autoattack"):
        row["stages"] = dict(zip(STAGES, percent(stages.sum(1), len(moved))))
    if name.startswith("adaptive_"):
        grey = torch.full((1, 3, m.size, m.size), 0.5, device=run.device)
        if adaptive.pap_steps(m.model, grey) == 0:        # the model has no RPC-Attention
            row["plain"] = True                           # so the attack was not adaptive
    return row


def summary_of_distances(moved):
    """Return fields of a row: maxima, median and mean of `moved` (n, 4), from `distances`.

    Only images that the attack changed count; for `outside`, the largest distance from [0, 1], all
    images count.
    """
    changed = moved[moved[:, 0] > 0]
    changed = changed if len(changed) else moved[:1]      # no image changed: all distances are 0
    linf, l2, l1 = changed[:, :3].unbind(1)
    return dict(max_linf=linf.max().item(), max_l2=l2.max().item(), max_l1=l1.max().item(),
                median_l2=l2.median().item(), mean_l2=l2.mean().item(),
                outside=moved[:, 3].max().item())


def per_class(run, m, images, name, settings):
    """Measure the confusion matrix and the lowest accuracy of a class.

    confusion: [[true class, predicted class, number of images], ...] without zeros.
    """
    K = len(run.classes)
    matrix = torch.zeros(K, K, dtype=torch.int64)
    for pixels, labels, *_ in batches(run, images, f"{name}, {m.about['model']}"):
        predicted = logits_of(run, m, pixels_of(pixels)).argmax(1)
        cell = labels * K + predicted                     # index into the flattened matrix
        matrix += cell.bincount(minlength=K * K).cpu().view(K, K)
    matrix = all_sum(matrix)
    there = matrix.sum(1) > 0                             # classes with images
    accuracy = 100 * matrix.diag()[there] / matrix.sum(1)[there]
    i, j = matrix.nonzero().T
    return dict(lowest=accuracy.min().item(), class_names=run.classes,
                confusion=torch.stack([i, j, matrix[i, j]], 1).tolist())


def logits_of_classes(run, m, images, columns):
    """Return the logits of all `images` for some classes, (n, len(columns)) float64 on the CPU.

    columns: the indices of the classes. Every process returns the logits of all images.
    """
    logits = torch.zeros(len(images.index), len(columns), device=run.device)
    for pixels, _, _, place in batches(run, images, Path(images.dataset.folder).name):
        logits[place] = logits_of(run, m, pixels_of(pixels))[:, columns]
    return all_sum(logits).double()


def folder_accuracy(run, m, images, name, settings):
    """Measure ImageNet-A or -R over the 200 classes that the folder contains."""
    tree = images.dataset
    columns = tree.labels.unique()                        # sorted indices into the 1,000 classes
    labels = torch.searchsorted(columns, tree.labels[images.index])    # indices into columns
    hits = correct(logits_of_classes(run, m, images, columns), labels)
    return dict(outcome(hits, len(columns)), classes=len(columns))


def outliers(run, m, images, name, settings):
    """Measure how well low confidence separates the outliers of ImageNet-O from images of val/.

    The confidence is the largest probability among ImageNet-O's classes. The images of val/ belong
    to these classes; `inside` is their number. chance: the AUPR of a random guess.
    """
    val, columns = run.test_set, images.dataset.labels.unique()
    inside = torch.isin(val.labels, columns).nonzero()[:, 0]
    inside = inside[epoch_order(len(inside), epoch=0, seed=run.args.seed)[:run.args.limit]]
    both = torch.cat([logits_of_classes(run, m, images, columns),
                      logits_of_classes(run, m, Images(val, inside), columns)])
    doubt = -both.softmax(1).amax(1)                      # high where the confidence is low
    outlier = torch.arange(len(both)) < len(images.index)
    return dict(aupr=100 * metrics.average_precision(doubt, outlier),
                auroc=100 * metrics.auroc(doubt, outlier),
                fpr95=100 * metrics.fpr95(doubt, outlier),
                chance=100 * len(images.index) / len(both), inside=len(inside),
                classes=len(columns))


def segmented(run, m, images, name, settings):
    """Measure pixel accuracy, mean accuracy, mean IoU and the IoU per class, clean or corrupted."""
    import segmenter
    views = {setting: settings[setting] for setting in ("window", "stride", "scales", "flip")}
    results = []
    for severity in settings.get("severities", [None]):   # None: clean images
        change = partial(corrupt_as, run, settings, severity) if severity else None
        result, _ = segmenter.evaluate(                   # _: the confusion matrix
            m.model, images.dataset, size=m.size, index=images.index.tolist(), change=change,
            num_workers=run.args.num_workers, rank=run.rank, world=run.world,
            progress=measure_text(name, settings)[:60], **views)
        result.pop("images")                              # the row already has their number
        results.append(result)
    return join_severities(results) if "severities" in settings else results[0]


def perplexities(run, m, images, name, settings):
    """Measure perplexity: segment-wise, sliding, and sliding after the word swap.

    segment: in windows that do not overlap. sliding: in overlapping windows.
    attacked: sliding, after the word swap; the inserted words count, but no model can predict them.
    attacked_unswapped: as attacked, but the inserted words do not count.
    clean_unswapped: the same words in the clean text. The difference between attacked_unswapped and
        clean_unswapped is the effect of the attack on the words that it did not replace.
    unknown: per cent of the words that are not in the vocabulary.
    swapped: the number of replaced words. word: the word that replaces them.
    """
    from data.text import perplexity, sliding_nll
    text = images.dataset

    def nats(tokens, stride, title):                      # the loss of each token but the first
        return sliding_nll(m.model, tokens, run.window, stride, batch_size=run.batch_size,
                           rank=run.rank, world=run.world, progress=f"{text.split} {title}")

    sliding = nats(text.clean, run.stride, "sliding")
    attacked = nats(text.attacked, run.stride, "attacked")
    segments = sliding if run.stride == run.window else nats(text.clean, run.window, "segment-wise")
    return dict(swapped=int((~text.kept).sum()), segment=perplexity(segments),
                sliding=perplexity(sliding), attacked=perplexity(attacked),
                attacked_unswapped=perplexity(attacked, text.kept),
                clean_unswapped=perplexity(sliding, text.kept), unknown=text.unknown,
                word=run.word)


MEASURES = {
    CLS: {"clean": clean, "corruptions": corrupted, "per_class": per_class,
          "imagenet_a": folder_accuracy, "imagenet_r": folder_accuracy, "imagenet_o": outliers,
          **dict.fromkeys(ATTACKS, attacked)},
    SEG: {"clean": segmented, "corruptions": segmented},
    LM: {"perplexity": perplexities},
}


# --- the command ----------------------------------------------------------------------------------

def start(args):
    """Join the process group if torchrun started this process; return a `Run`."""
    rank, world, device = common.start_processes(args.device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = args.tf32
    if args.checks:                                       # rank 0 runs the checks on all images
        world = 1
    return Run(args, device, rank, world)


def plan(run):
    """Return a list of (name, settings, images); each entry gives one row per model."""
    args = run.args
    folders = [name for name in FOLDERS if getattr(args, name)]
    texts = args.measures or DEFAULT_MEASURES[run.task] + folders
    if args.per_class:
        texts = [*texts, "per_class"]
    if run.task == LM and "whole" in run.test_set:        # a text without splits
        texts = [f"{text} split=whole" if "split=" not in text else text for text in texts]
    todo = []
    for text in texts:
        for name, settings in parse_measure(text, MEASURES[run.task], args.preset, args.eps):
            images = images_of(run, name, settings)
            if images is not None:
                todo.append((name, settings, images))
    if not todo:
        raise InputError(f"there is nothing to measure: the data do not contain "
                         f"{', '.join(texts)}; choose other --measures")
    return todo


def check_models(run, models, todo):
    """Run the five checks of robust/checks.py on each model, on the same images; write no row.

    The checks run PGD, with the settings of the measure pgd if it is in `todo`. One check attacks a
    softmax network and tries these images on the model. Only rank 0 runs the checks.
    """
    from robust.checks import run_checks
    if run.rank:
        return
    name, settings, images = next((entry for entry in todo if entry[0] == "pgd"), todo[0])
    options = {}
    if name == "pgd":
        options = {k: v for k, v in settings.items() if k not in ("eps", "restarts")}
    limit = run.args.limit or 64
    few = images._replace(index=images.index[:limit])
    pixels, labels, *_ = next(batches(run._replace(batch_size=limit), few))
    softmax = next((m for m in (run.source_model, *models) if m and m.about["kind"] == "softmax"),
                   None)
    for m in models:
        twin = softmax.model if softmax and softmax is not m else None
        with common.error_prefix(m.given):
            run_checks(m.model, pixels_of(pixels), labels, m.about["model"], twin=twin,
                       options=options)


def out_dir(args):
    """Return the folder of the results: --out_dir, robust/ in a run folder, or out/FILE/robust."""
    path = Path(args.ckpt[0] if args.ckpt else "out/model")
    folder = path if path.is_dir() else path.parent
    if not path.is_dir() and not (folder / "log.jsonl").exists():   # a file outside a run folder
        folder = Path("out", path.stem)                   # for --model: out/model
    return Path(args.out_dir or folder / "robust")


def main():
    args = get_args()
    if args.table:
        return print_tables(args.table)
    run = start(args)
    models, source_model = load_models(run)
    all_models = [*models, source_model] if source_model else models
    check_models_fit(args, all_models)
    run = choose_data(run, models[0])._replace(source_model=source_model)
    run = LOAD[run.task](all_models, run)                 # adds the test set and its classes
    todo = plan(run)                                      # [(name, settings, images)]
    if args.checks:
        return check_models(run, models, todo)

    # For each measure and each model, compute the row if results.jsonl does not have it yet.
    path, hardware = out_dir(args) / "results.jsonl", common.describe(run.device)
    rows = open_rows(path, run.rank)                      # {row_key(row): row}
    old = f" | {len(rows)} rows already stored" if rows else ""
    print0(f"{len(models)} models | {run.task} | {run.data} | {run.world} x {hardware} | {path}"
           f"{old}")
    for name, settings, images in todo:
        for m in models:
            row = dict(m.about, task=run.task, data=run.data, data_dir=images.data_dir,
                       imagenet1k=run.imagenet1k, name=name, settings=settings,
                       images=len(images.index), seed=args.seed,
                       precision="tf32" if args.tf32 else "float32")
            if run.task == CLS and run.data == "imagenet":
                row["crop_pct"] = args.crop_pct or DEFAULT_CROP_PCT
                if "released" in settings:                # ImageNet-C's files are already cropped
                    row["crop_pct"] = 1.0
            if row_key(row) in rows:                      # same weights, data, settings, ...
                continue
            began = time.perf_counter()
            measure = MEASURES[run.task][name]            # for "pgd": attacked
            with common.error_prefix(m.given):            # errors name the model
                row |= measure(run, m, images, name, settings)
            row.update(seconds=round(time.perf_counter() - began, 2), date=str(date.today()),
                       **common.code_version(), hardware=hardware, processes=run.world)
            rows[row_key(row)] = row
            if run.rank == 0:
                with open(path, "a") as f:
                    f.write(json.dumps(row) + "\n")

    if run.rank == 0:
        print_summary(run, rows, path.with_name("table.md"))
    if dist.is_initialized():
        dist.destroy_process_group()


def print_summary(run, rows, path):
    """Write the whole table to `path`, and print the summary and the tables of --per_class."""
    own = [row for row in rows.values() if row["data"] == run.data]    # not of other data sets
    path.write_text(rows_table(own) + "\n", "utf-8", "backslashreplace")
    numbers = SUMMARY
    if run.task == CLS and len(run.classes) >= 100:
        numbers += ("top5",)
    print(f"\n{rows_table(own, summary=numbers)}")
    print(SUMMARY_NOTE.format(UNITS_LM if run.task == LM else UNITS, path))
    if run.args.per_class:
        print("\n" + class_tables(rows.values(), path.parent))


SUMMARY_NOTE = """\
{}
All models were measured on the same data. {} has every row with its settings.
One network per variant is not enough to rank variants: train several seeds."""


if __name__ == "__main__":
    common.run(main)
