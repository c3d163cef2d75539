"""ImageNet's 1,000 classes, and the folders that test a network of it: -C's files, -A, -R, -O.

Hendrycks & Dietterich 2019; Hendrycks et al. 2021a, 2021b.
"""

import os
from pathlib import Path

import numpy as np
import torch

from common import InputError, print0
from data.batches import Split
from data.imagenet import ImageTree
from data.rng import epoch_order
from robust import metrics
from robust.score import (Images, all_sum, answers, batches, correct, logits_of, outcome, pick,
                          split_images, to_pixels)

# The names of the class folders, n01440764 first: logit i of a network of ImageNet is CLASSES[i].
CLASSES = Path(__file__).with_name("imagenet_classes.txt").read_text().split()


def open_folder(flag, path, classes, size, **how):
    """Open <class>/* of a folder that a flag names, some of these classes, labelled as they are."""
    root, folder = os.path.split(os.path.abspath(path))
    try:
        return ImageTree(root, folder, classes, size, subset=True, **how)
    except InputError as error:
        raise InputError(str(error).replace("--data_dir", f"--{flag}")) from None


def released_images(measure, source, args):
    """The images of a corruption, at the severities that --corrupted_dir has; None: it has none."""
    folder, name = args.corrupted_dir, measure.setting["type"]
    where = Path(folder, name)
    there = [s for s in args.severities
             if (where / str(s)).is_dir() or where.with_suffix(".npy").exists()]
    if not there:
        print0(f"--corrupted_dir {folder} has no {name}: it is not measured")
        return None
    measure.setting.update(severities=there, released=True)
    return split_images(measure, source, args)._replace(data_dir=folder)


def released_answers(m, measure, images, args):
    """What a model says of them: (severities, n, 3), see `answers`."""
    setting, source = measure.setting, images.source
    splits = (released(args.corrupted_dir, setting["type"], severity, source, m.size, args.device)
              for severity in setting["severities"])
    return torch.cat([answers(m, measure, images._replace(source=split), args, to_pixels)
                      for split in splits])


def released(corrupted_dir, name, severity, source, size, device):
    """One severity of ImageNet-C's files (224 px, only cropped) or CIFAR-10-C's arrays.

    Numbered as `source`, the test split.
    """
    array = Path(corrupted_dir, f"{name}.npy")
    if array.exists():
        part = slice((severity - 1) * 10000, severity * 10000)
        images, labels = (torch.from_numpy(np.load(file, mmap_mode="r")[part].copy())
                          for file in (array, array.with_name("labels.npy")))
        images = images.permute(0, 3, 1, 2).to(device)
        found = Split(images, labels.long().to(device), source.classes)
    else:
        folder = Path(corrupted_dir, name, str(severity))
        found = open_folder("corrupted_dir", folder, source.classes, size, crop_pct=1.0)
    if not torch.equal(found.labels.cpu(), source.labels.cpu()):
        raise InputError(f"--corrupted_dir {corrupted_dir}: {name}, severity {severity} has other "
                         f"images than the test split ({len(found.labels)}, expected "
                         f"{len(source.labels)})")
    return found


def images(measure, source, args):
    """The images of the folder that a flag of the measure's name names. source: the test split."""
    path = getattr(args, measure.name)
    if not path:
        raise InputError(f"--measures {measure.name} needs --{measure.name}")
    tree = open_folder(measure.name, path, args.classes, args.size)
    return Images(tree, pick(len(tree), measure.name, args), path)


def images_beside_val(measure, source, args):
    """The same, and val/, from which its images are to be told."""
    if source is None:
        raise InputError(f"--measures {measure.name} needs --data_dir, the folder with val/")
    found = images(measure, source, args)
    found.source.val = source
    return found._replace(data_dir=f"{found.data_dir} and {args.data_dir}")


def kept_logits(m, images, columns, args):
    """The logits of some classes for `Images`, on every process: (n, len(columns)) float64."""
    out = torch.zeros(len(images.index), len(columns), device=args.device)
    for x, _, _, place in batches(images, args, Path(images.source.folder).name):
        out[place] = logits_of(m, to_pixels(x), args)[:, columns]
    return all_sum(out).double()


def accuracy(m, measure, images, args):
    """Accuracy over their 200 classes on ImageNet-A, -R: those classes count that a folder has."""
    tree, columns = images.source, images.source.labels.unique()    # sorted, as the folders' names
    labels = torch.searchsorted(columns, tree.labels[images.index])
    hits = correct(kept_logits(m, images, columns, args), labels)
    return dict(outcome(hits, len(columns)), classes=len(columns))


def outliers(m, measure, images, args):
    """How well confidence tells ImageNet-O's images from val's of its 200 classes."""
    tree, index, columns = *images[:2], images.source.labels.unique()
    inside = torch.isin(tree.val.labels, columns).nonzero()[:, 0]
    inside = inside[epoch_order(len(inside), 0, args.seed)[:args.limit]]
    both = torch.cat([kept_logits(m, images, columns, args),
                      kept_logits(m, Images(tree.val, inside), columns, args)])
    doubt = -both.softmax(1).amax(1)                      # little confidence: an outlier
    outlier = torch.arange(len(both)) < len(index)
    return dict(aupr=100 * metrics.average_precision(doubt, outlier),
                auroc=100 * metrics.auroc(doubt, outlier),
                fpr95=100 * metrics.fpr95(doubt, outlier), chance=100 * len(index) / len(both),
                inside=len(inside), classes=len(columns))
