"""ImageNet's 1,000 classes, and the folders that test a network of it: -C's files, -A, -R, -O.

Hendrycks & Dietterich 2019; Hendrycks et al. 2021a, 2021b.
"""

import os
from pathlib import Path

import numpy as np
import torch

import common
from common import InputError
from data.batches import Split
from data.imagenet import ImageTree
from data.rng import epoch_order
from robust import metrics
from robust.score import batches, correct, outcome

# The names of the class folders, n01440764 first: logit i of a network of ImageNet is CLASSES[i].
CLASSES = Path(__file__).with_name("imagenet_classes.txt").read_text().split()


def open_folder(flag, path, classes, size, **how):
    """Open <class>/* of a folder that a flag names, some of these classes, labelled as they are."""
    root, folder = os.path.split(os.path.abspath(path))
    try:
        return ImageTree(root, folder, classes, size, subset=True, **how)
    except InputError as error:
        raise InputError(str(error).replace("--data_dir", f"--{flag}")) from None


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


@torch.no_grad()
def kept_logits(m, source, index, columns, args):
    """The logits of some classes for all images index, on every process: (n, len(columns)) float64
    on the CPU."""
    out = torch.zeros(len(index), len(columns), device=args.device)
    for images, _, _, place in batches(source, index, args, Path(source.folder).name):
        with common.autocast(args.device, args.amp):
            logits = m.model(images.float() / 255)
        out[place] = logits[:, columns].float()
    return common.all_sum(out).cpu().double()


def folder_row(m, measure, tree, index, args):
    """Accuracy over their 200 classes on ImageNet-A, -R; on ImageNet-O how well confidence tells
    its images from val's.

    tree: the folder; the classes that count are those that it has. tree.val: the test split.
    """
    columns = tree.labels.unique()                        # sorted, as the folders' names are
    logits = kept_logits(m, tree, index, columns, args)
    if measure.name != "imagenet_o":
        labels = torch.searchsorted(columns, tree.labels[index])
        return dict(outcome(correct(logits, labels)), classes=len(columns))
    inside = torch.isin(tree.val.labels, columns).nonzero()[:, 0]
    inside = inside[epoch_order(len(inside), 0, args.seed)[:args.limit]]
    both = torch.cat([logits, kept_logits(m, tree.val, inside, columns, args)])
    doubt = -both.softmax(1).amax(1)                      # little confidence: an outlier
    outlier = torch.arange(len(both)) < len(index)
    return dict(aupr=100 * metrics.average_precision(doubt, outlier),
                auroc=100 * metrics.auroc(doubt, outlier),
                fpr95=100 * metrics.fpr95(doubt, outlier), chance=100 * len(index) / len(both),
                inside=len(inside), classes=len(columns))
