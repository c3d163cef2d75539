"""What one measure finds: functions of classifiers and images that return a result's fields.

    hit = find_right(models, batches(source, index, args), [None], n, args)

args: seed, device, rank, world, batch_size, num_workers, amp and the folders of eval_robust.py.
Processes share the images; each returns the whole result.
"""

import copy
import math
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import common
from data.batches import Split, image_batches
from data.imagenet import ImageTree
from data.rng import epoch_order
from robust import attacks, corruptions, metrics
from robust.measures import ATTACKS, FOLDERS, GATHERING, SCENES, SLOW
from robust.results import pack, show

STAGES = "clean", "apgd-ce", "apgd-t", "fab-t", "square"                           # of autoattack

# --- images --------------------------------------------------------------------------------------

def size_of(n, name, args):
    """Choose on how many of n images a measure is."""
    if name in FOLDERS:                                   # of different sizes: --limit at most
        return min(args.limit or n, n)
    few = SCENES if args.data == "shapes" else SLOW
    return args.limit or min(few.get(name, n), n)


def pick(n, limit, seed):
    """Number a random subset of n images, part of that of any larger limit: (limit,) int64."""
    if limit and limit > n:
        raise ValueError(f"--limit {limit}: there are only {n} images")
    return epoch_order(n, 0, seed)[:limit or n]


def batches(source, index, args, label=""):
    """Load this process's share of the images numbered index, in batches on the device.

    Yields ((b, 3, S, S) uint8, labels (b,), numbers (b,), their places in index (b,)).
    """
    share = torch.arange(len(index))[args.rank::args.world]
    places = [p for p in share.split(args.batch_size) if len(p)]
    parts = [index[p] for p in places]
    if isinstance(source, Split):
        parts = (part.to(args.device) for part in parts)
        loaded = ((source.images[part], source.labels[part], part) for part in parts)
    else:
        keys = [[(i, i) for i in part.tolist()] for part in parts]
        loaded = image_batches(source, keys, args.num_workers, args.device)
    bar = tqdm(total=len(share), desc=label, unit="image", leave=False, disable=args.rank > 0)
    with bar:
        for (images, labels, numbers), place in zip(loaded, places):
            batch = images, labels, numbers, place
            yield tuple(t.to(args.device, non_blocking=True) for t in batch)
            bar.update(len(place))


def joined(loaded, most=4096):
    """Join batches until they hold so many images: full where an attack gathers the survivors, and
    no more than a GPU holds."""
    parts, n = [], 0
    for batch in loaded:
        parts.append(batch)
        n += len(batch[1])
        if n >= most:
            yield tuple(torch.cat(part) for part in zip(*parts))
            parts, n = [], 0
    if parts:
        yield tuple(torch.cat(part) for part in zip(*parts))


def whole(loaded):
    """Join all batches."""
    return next(joined(loaded, math.inf))


# --- who is right --------------------------------------------------------------------------------

def hits(logits, labels):
    """Compare with the labels: right in the first, right among the first five, (B, 2) float."""
    if not logits.isfinite().all():
        raise ValueError("the model returns logits that are not finite")
    right = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
    return torch.stack([right[:, 0], right.any(1)], 1).float()


def ask(m, x, labels, args):
    """Ask a model about pixels x, in batches: its `hits`."""
    with common.autocast(args.device, args.amp):
        logits = attacks.forward(m.model, x, args.batch_size)
    return hits(logits.float(), labels)


@torch.no_grad()
def find_right(models, loaded, changes, n, args):
    """Find which of n images are right, and right among five, after each change: (models, changes,
    n, 2) float64 on the CPU of every process.

    loaded: of `batches`; changes: functions of images (b, 3, S, S) uint8 and their numbers to
    images, or None: as they are. A batch is changed once, for all models.
    """
    found = torch.zeros(len(models), len(changes), n, 2, device=args.device)             # 0 or 1
    for images, labels, numbers, place in loaded:
        for j, change in enumerate(changes):
            x = (change(images, numbers) if change else images).float() / 255
            for i, m in enumerate(models):
                found[i, j, place] = ask(m, x, labels, args)
    return common.all_sum(found).cpu().double()


def percent(total, n):
    return [round(100 * x / n, 4) for x in total.tolist()]


def outcome(hit):
    """Sum up hits (n, 2): top-1 and top-5 in percent, and which images were right, a bit each."""
    top1, top5 = percent(hit.sum(0), len(hit))
    return dict(top1=top1, top5=top5, right=pack(hit[:, 0] > 0))


def together(outcomes):
    """Join outcomes of several severities or draws: a list for each field."""
    return {field: [one[field] for one in outcomes] for field in outcomes[0]}


# --- rows: clean, corrupted, other folders -------------------------------------------------------

def clean_row(m, job, args):
    """Measure top-1 and top-5."""
    loaded = batches(job.images, job.index, args, "clean")
    found = find_right([m], loaded, [None], job.n, args)
    return outcome(found[0, 0])


def damaged(images, numbers, setting, severity, args):
    """Corrupt the images with these numbers, (b, 3, H, W) uint8."""
    images = corruptions.corrupt(images, setting["type"], severity, seed=args.seed, index=numbers,
                                 frost_dir=args.frost_dir)
    # as which ImageNet-C's files are saved after their corruption
    return corruptions.jpeg_compression(images, 85) if setting["jpeg85"] else images


def corrupted(setting, args):
    """List {severity: what a corruption does to images and their numbers}."""
    return {severity: partial(damaged, setting=setting, severity=severity, args=args)
            for severity in setting["severities"]}


def released(args, source, size, name, severity):
    """Open ImageNet-C's files (224 px, only cropped) or CIFAR-10-C's as a source, numbered as
    `source`, the test split."""
    array = Path(args.corrupted_dir, f"{name}.npy")
    if array.exists():
        part = slice((severity - 1) * 10000, severity * 10000)
        images, labels = (torch.from_numpy(np.load(file, mmap_mode="r")[part].copy())
                          for file in (array, array.with_name("labels.npy")))
        images = images.permute(0, 3, 1, 2).to(args.device)
        found = Split(images, labels.long().to(args.device), source.classes)
    else:
        folder = Path(args.corrupted_dir, name)
        found = ImageTree(folder, str(severity), source.classes, size, crop_pct=1.0)
    if len(found.labels) != len(source.labels):
        raise ValueError(f"--corrupted_dir {args.corrupted_dir}: {name}, severity {severity} has "
                         f"{len(found.labels)} images, the test split {len(source.labels)}")
    return found


def corruption_rows(models, job, args):
    """Measure one corruption, made or read once for all models: top-1 and top-5 per severity.

    Images from files are resized bilinear, not bicubic, before they are corrupted: so ImageNet-C
    was made.
    """
    source, setting = job.images, job.measure.setting
    name = setting["type"]
    if args.corrupted_dir:
        size = models[0].size
        parts = ((released(args, source, size, name, s), [None]) for s in setting["severities"])
    else:
        if isinstance(source, ImageTree):
            source = copy.copy(source)
            source.resample = "bilinear"
        parts = [(source, corrupted(setting, args).values())]
    found = [find_right(models, batches(images, job.index, args, name), changes, job.n, args)
             for images, changes in parts]
    return [together([outcome(hit) for hit in own]) for own in torch.cat(found, 1)]


@torch.no_grad()
def kept_logits(m, source, index, columns, args):
    """Compute the logits of the kept classes for all images index, on every process: (n,
    len(columns)) float64 on the CPU."""
    out = torch.zeros(len(index), len(columns), device=args.device)
    for images, _, _, place in batches(source, index, args, Path(source.folder).name):
        with common.autocast(args.device, args.amp):
            logits = m.model(images.float() / 255)
        out[place] = logits[:, columns].float()
    return common.all_sum(out).cpu().double()


def folder_row(m, job, source, args):
    """Measure accuracy over their 200 classes on ImageNet-A, -R; on ImageNet-O how well confidence
    tells its images from val's.

    job.images: the folder, with the labels of all classes; the kept classes are those that have a
    folder. source: val.
    """
    tree, index = job.images, job.index
    columns = tree.labels.unique()                        # sorted, as the folders' names are
    logits = kept_logits(m, tree, index, columns, args)
    if job.measure.name != "imagenet_o":
        labels = torch.searchsorted(columns, tree.labels[index])
        return dict(outcome(hits(logits, labels)), classes=len(columns))
    inside = torch.isin(source.labels, columns).nonzero()[:, 0]
    inside = inside[pick(len(inside), None, args.seed)[:args.limit]]
    both = torch.cat([logits, kept_logits(m, source, inside, columns, args)])
    doubt = -both.softmax(1).amax(1)                      # little confidence: an outlier
    outlier = torch.arange(len(both)) < len(index)
    return dict(aupr=100 * metrics.average_precision(doubt, outlier),
                auroc=100 * metrics.auroc(doubt, outlier),
                fpr95=100 * metrics.fpr95(doubt, outlier),
                chance=100 * len(index) / len(both), inside=len(inside), classes=len(columns))


# --- rows: attacks -------------------------------------------------------------------------------

class Normalized(torch.nn.Module):
    """A ViT on normalised tensors, z = (x - mean) / std: the space the paper's code attacks in."""

    def __init__(self, model):
        super().__init__()
        self.model, self.mean, self.std = model, model.mean, model.std
        self.training = model.training

    def forward(self, z):
        return self.model(z * self.std + self.mean)


def attack_images(model, measure, images, labels, index, args, *, draw=0, trace=None):
    """Attack images (b, 3, S, S) in [0, 1]. measure: name, setting and conditions of the attack.

    Returns pixels, in [0, 1] only where clipped. Images are attacked args.batch_size at a time,
    those that are wrong already left out before. draw: of noise. trace: a list that receives
    autoattack's stages, with standing (b,): not changed so far, and right (b,): standing, and of
    the true class.
    """
    name, setting, conditions = measure
    normalized, x = conditions["space"] == "normalized", images
    if normalized:
        model = Normalized(model)
        x = (x - model.mean) / model.std
        x = x.clamp(0, 1) if name in GATHERING else x     # the first thing they do, in any space
    target, todo = aim(model, name, x, labels, conditions["labels"], args.batch_size)

    how = {k: v for k, v in setting.items() if k not in ("draws", "source", "weights")}
    how["clip"] = conditions["clip"]
    rows = todo.nonzero()[:, 0]
    parts = rows.split(args.batch_size)
    if name in GATHERING:
        parts, how["batch_size"] = [rows], args.batch_size
    if name == "fgsm":
        how["keep_wrong"] = True
    if name == "noise":
        how["draw"] = draw
    if trace is not None:
        how.update(trace=trace, progress=args.rank == 0)
    x = x.clone()
    for on in parts if len(rows) else ():
        if name not in ("fgsm", "sld", "cw"):
            how.update(seed=args.seed, index=index[on])
        x[on] = ATTACKS[name](model, x[on], target[on], **how)

    for stage in trace or ():
        stage["standing"] = torch.zeros_like(todo).masked_scatter(todo, stage["robust"])
        stage["right"] = stage["standing"] & (target == labels)       # they stand: of class target
    return x * model.std + model.mean if normalized else x


def aim(model, name, x, labels, lead, batch_size):
    """Choose what an attack leads away from, (b,), and which images are attacked, (b,) bool."""
    every = name in ("noise", "transfer", "fgsm")         # fgsm itself keeps what is wrong already
    target, todo = labels, torch.ones_like(labels, dtype=torch.bool)
    if lead == "pred" or not every:
        predicted = attacks.forward(model, x, batch_size).argmax(1)
        target = labels if lead == "true" else predicted
        todo = (target == predicted) | every              # wrong already: nothing to attack
    return target, todo


def widest(device):
    """Choose float64, but on mps, which has none."""
    return torch.float32 if device.type == "mps" else torch.float64


def moves(adv, x):
    """Measure how far images moved: Linf, L2, L1, and how far outside [0, 1] they are, (b, 4)."""
    move = (adv - x).flatten(1).to(widest(x.device))
    outside = torch.maximum(-adv.flatten(1).amin(1), adv.flatten(1).amax(1) - 1).clamp(min=0)
    return torch.stack([move.norm(math.inf, 1), move.norm(2, 1), move.norm(1, 1), outside], 1)


@torch.no_grad()
def attack_row(m, job, args, victim=None):
    """Measure one attack on one model. victim: the model it is made on, if another.

    Returns accuracy in percent, the largest and the median perturbation in pixel units over the
    images attacked, the pixel range, and for some attacks more: autoattack's accuracy after each
    stage, cw's at fixed L2 radii. Of several draws the largest move counts.
    """
    (name, setting, _), n, device = job.measure, job.n, args.device
    draws, cascade = setting.get("draws", 1), name.endswith("autoattack")
    hit = torch.zeros(draws, n, 2, device=device)                                # 0 or 1
    moved = torch.zeros(n, 4, dtype=widest(device), device=device)
    stages = torch.zeros(len(STAGES), n, 2, device=device)        # standing, right: 0 or 1
    label = f"{name} {show(setting)}, {m.about['model']}"
    loaded = batches(job.images, job.index, args, label)
    for images, labels, numbers, place in joined(loaded) if name in GATHERING else loaded:
        x, trace = images.float() / 255, [] if cascade else None
        for draw in range(draws):
            adv = attack_images(victim or m.model, job.measure, x, labels, numbers, args,
                                draw=draw, trace=trace)
            hit[draw, place] = ask(m, adv, labels, args)
            moved[place] = torch.maximum(moved[place], moves(adv, x))
        for i, stage in enumerate(trace or ()):
            stages[i, place] = torch.stack([stage["standing"], stage["right"]], 1).float()
    hit, moved, stages = (common.all_sum(t).cpu().double() for t in (hit, moved, stages))

    row = together([outcome(h) for h in hit]) if len(hit) > 1 else outcome(hit[0])
    row["top1"], row["top5"] = percent(hit.mean(0).sum(0), n)
    row.update(sizes(moved))
    if cascade:
        standing, right = stages.unbind(2)
        lucky = (1 - standing) * hit[0, :, 0]             # changed, and now right
        row["stages"] = dict(zip(STAGES, percent((right + lucky).sum(1), n)))
    if name == "cw":
        fooled, radii = hit[0, :, 0] == 0, (0.25, 0.5, 1.0, 2.0)
        within = torch.stack([(fooled & (moved[:, 1] <= r)).sum() for r in radii])
        row["top1_at_l2"] = {r: 100 - v for r, v in zip(radii, percent(within, n))}
    return row


def sizes(moved):
    """Sum up norms (n, 4), Linf, L2, L1, how far outside [0, 1]: extremes over moved images."""
    touched = moved[moved[:, 0] > 0]
    linf, l2, l1 = (touched[:, :3] if len(touched) else moved[:1, :3]).unbind(1)
    return dict(max_linf=linf.max().item(), max_l2=l2.max().item(), max_l1=l1.max().item(),
                median_l2=l2.median().item(), mean_l2=l2.mean().item(),
                outside=moved[:, 3].max().item())
