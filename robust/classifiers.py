"""What the evaluator does with classifiers: rebuild, settle flags, load images, measure, draw.

segmenters.py and words.py have the same functions for Segmenters and language models; which of the
three is asked goes by the checkpoint's task, see `sources.module_of`.
"""

import os
from pathlib import Path

import torch

import common
from data.files import save_grid
from data.imagenet import ImageTree
from data.images import load_test
from robust import attacks, corruptions, measures, score
from robust.measures import FOLDERS, Job
from vit import ViTConfig
from vit import classifier_from_checkpoint as rebuild                  # noqa: F401, sources.load_model's

DEFAULTS = vars(ViTConfig())                 # what model_config's fields are where a row is silent


def settle(args, first):
    """Choose --batch_size where it was not given: by area, for models as large as the first."""
    if not args.batch_size:
        pixels = 2 ** 19 if args.device.type == "cpu" else 2 ** 22
        args.batch_size = max(1, pixels // first.size ** 2)


# --- images --------------------------------------------------------------------------------------

def load_source(args, models):
    """Load what to evaluate on, a data.batches.Split or an ImageTree.

    Refuses models that return no logits, or those of other classes, on the first images.
    """
    first = models[0]
    source = load_test(args, first.trained, first.size, first.classes)
    check_classes(models, source, args.data)
    few = torch.arange(min(8, len(source.labels)))
    for images, labels, *_ in score.batches(source, few, args):
        for m in models:
            with common.error_prefix(m.given):
                logits = attacks.check(m.model, images.float() / 255, labels * 0)
                if logits.shape[1] != len(source.classes):
                    raise ValueError(f"it gives {logits.shape[1]} logits, --data {args.data} has "
                                     f"{len(source.classes)} classes")
    return source


def check_classes(models, source, data):
    """Refuse models that were trained on other classes than those of --data."""
    for m in models:
        classes = m.classes or source.classes
        if list(classes) != list(source.classes):
            theirs, ours = (", ".join(names[:3]) for names in (classes, source.classes))
            raise ValueError(f"{m.given} was trained on {len(classes)} other classes "
                             f"({theirs}, ...) than --data {data} has ({ours}, ...)")


def open_folder(name, source, size, args):
    """Open the images of --imagenet_a, -r or -o, labelled as the classes of source."""
    root, folder = os.path.split(os.path.abspath(getattr(args, name)))
    try:
        return ImageTree(root, folder, source.classes, size, subset=True)
    except (ValueError, OSError) as e:
        raise ValueError(str(e).replace("--data_dir", f"--{name}")) from None


# --- measures ------------------------------------------------------------------------------------

def job(measure, models, source, args):
    """Choose the images that a measure is on: a `Job`. Refuses what cannot be measured on them."""
    name, images = measure.name, source
    if name.endswith("autoattack") and len(source.classes) < 4:
        raise ValueError(f"--measures {name} compares four logits: {len(source.classes)} "
                         "classes, expected 4 or more")
    if name in FOLDERS:
        images = open_folder(name, source, models[0].size, args)
    total = len(images.labels)
    n = score.size_of(total, name, args)
    return Job(measure, images, n, score.pick(total, n, args.seed))


def rows(models, job, source, args, other=None):
    """Measure models: a result each, a dict. source: the test split; other: the model of --source.

    Corruptions are made once for several models; any other measure is of one.
    """
    name, m = job.measure.name, models[0]
    if name == "clean":
        return [score.clean_row(m, job, args)]
    if name == "corruptions":
        return score.corruption_rows(models, job, args)
    if name in FOLDERS:
        return [score.folder_row(m, job, source, args)]
    return [score.attack_row(m, job, args, other.model if name == "transfer" else None)]


# --- pictures ------------------------------------------------------------------------------------

def save_pictures(models, source, todo, args):
    """Write corruptions.png: 15 types x 5 severities of an image. attacks_<i>.png per model: clean,
    attacked by PGD at the largest eps, the difference amplified to full contrast."""
    index = score.pick(len(source.labels), None, args.seed)[:args.save_images]
    zoom = max(1, 96 // models[0].size)
    images, labels, index, _ = score.whole(score.batches(source, index, args))
    grid = [corruptions.corrupt(images[:1], name, severity, seed=args.seed, index=index[:1],
                                frost_dir=args.frost_dir)
            for name in corruptions.NAMES for severity in (1, 2, 3, 4, 5)]
    save_grid(Path(args.out_dir, "corruptions.png"), torch.cat(grid), columns=5, zoom=zoom)

    x = images.float() / 255
    asked = [one for one in todo if one.name == "pgd"]
    asked = asked or measures.plan(["pgd"], args.task, args.preset, args.eps)
    measure = max(asked, key=lambda one: one.setting["eps"])
    for i, m in enumerate(models):
        adv = score.attack_images(m.model, measure, x, labels, index, args)
        bound = (adv - x).abs().amax().clamp(min=1e-6)
        shown = torch.cat([x, adv.clamp(0, 1), 0.5 + (adv - x) / (2 * bound)])
        save_grid(Path(args.out_dir, f"attacks_{i}.png"), shown, columns=len(x), zoom=zoom)
