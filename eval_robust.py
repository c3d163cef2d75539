"""Evaluate image classifiers on clean, corrupted and attacked images; print one table.

    python eval_robust.py --ckpt out/shapes_rpc                  # rendered scenes: minutes on a CPU
    python eval_robust.py --ckpt out/a out/b --out_dir out/ab     # the same images for all models
    python eval_robust.py --ckpt out/a --measures clean pgd cw --eps 1/255 4/255 --steps 40
    python eval_robust.py --ckpt deit_tiny_patch16_224.pth --data_dir data/imagenet   # timm's keys
    python eval_robust.py --model my.py:build --data cifar10 --data_dir data/cifar10   # any model
    torchrun --standalone --nproc_per_node=4 eval_robust.py --ckpt out/imagenet_rpc \\
        --data_dir data/imagenet --corrupted_dir data/imagenet-c --imagenet_a data/imagenet-a

Each measure gives one row per model. A finished row is appended to results.jsonl, so a second run
computes only the missing rows. To change a setting of an attack, or to add an attack, edit ATTACKS.
docs/robustness.md has more commands and explains the numbers. Segmenters and language models are
evaluated by train_seg.py --eval_only and train_lm.py --eval_only.

Paper: Teo & Nguyen 2024, section 4, App. A.2 to A.4, E.3 to E.5; Tables 1 to 6, Fig. 3.

Attacks: pixel values stay in [0, 1]. The budget eps bounds the change of each pixel value; for sld,
sparse L1 descent, it bounds the sum of all changes; cw has no budget. An attack changes an image so
that the model no longer predicts the true class. The arithmetic is float32. An image that a model
classifies wrongly is not attacked and counts as not robust. Random numbers depend on (seed, image)
alone, so the batch size, the number of processes and a second run do not change them.

With --preset paper, attacks work as in the paper's code (`rachtsy/KPCA_code:Attack`): they change
normalised images, whose pixels are divided by about 0.226, so eps = 1/255 changes a pixel by about
0.226/255. Only the attacks of PAPER_CLIPS clip the normalised pixels to [0, 1]. The model's own
prediction takes the place of the true class, so misclassified images are attacked, too.
"""

import base64
import copy
import json
import math
import os
import runpy
import sys
import time
import zlib
from collections import Counter
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import NamedTuple

import common  # before torch, because it sets GOMP_SPINCOUNT for torch's threads
import numpy as np
import torch
import torch.distributed as dist

import robust
from attention import PAP_SETTINGS
from common import InputError, print0
from data.datasets import DATASETS, load_part
from data.images import ImageTree, Split, fingerprint, image_batches
from data.rng import epoch_order
from robust import metrics
from robust.adaptive import adaptive_apgd, adaptive_autoattack, adaptive_pgd
from robust.attacks import check_logits, cw, fgsm, noise, pgd, restarted, sld, spsa
from robust.autoattack import apgd, autoattack, square
from robust.corruptions import CORRUPTIONS, NAMES, corrupt
from robust.frost import load_frost
from vit import ViTConfig, classifier_from_checkpoint, load_timm

# The attacks and their settings. To change a setting, edit its line; to add an attack, add a line.
# An attack with eps in its settings (None: no budget) runs once and ignores --eps; every other
# attack runs for each budget of --eps. All are partials, because `plan` reads their keywords.
ATTACKS = {
    "noise": partial(noise, eps=0.068),                   # U(-eps, eps)
    "fgsm": partial(fgsm),
    "pgd": partial(pgd, steps=20),
    "pgd_restarts": partial(restarted, attack=pgd, restarts=5, steps=20),
    "adaptive_pgd": partial(adaptive_pgd, steps=20),
    "sld": partial(sld, eps=10.0, steps=20),              # eps: an L1 budget
    "spsa": partial(spsa, steps=40, pairs=128),
    "cw": partial(cw, eps=None, steps=1000, search_steps=5),    # no budget: minimises the L2 norm
    "apgd": partial(apgd, loss="ce", steps=100),
    "adaptive_apgd": partial(adaptive_apgd, loss="ce", steps=100),
    "square": partial(square, queries=5000),
    "autoattack": partial(autoattack, steps=100, queries=5000),
    "adaptive_autoattack": partial(adaptive_autoattack, steps=100, queries=5000),
}
EPS = tuple(k / 255 for k in (1, 2, 4, 8))                # the default of --eps
# --preset paper: the settings of the paper's code that differ from ATTACKS. rescale: sld scales to
# its L1 ball. legacy: spsa as in cleverhans 4.0.0.
PAPER = dict(noise=dict(eps=0.3), sld=dict(rescale=True), cw=dict(confidence=10.0),
             spsa=dict(eps=0.1, legacy=True))
PAPER_EPS = tuple(k / 255 for k in range(1, 7))
PAPER_CLIPS = ("square", "autoattack", "adaptive_autoattack")    # clip normalised images to [0, 1]
FOLDERS = ("imagenet_a", "imagenet_r", "imagenet_o")      # measures with their own folder and flag
# Images per measure without --limit. With --data shapes few, so that a CPU needs only minutes:
SCENE_LIMITS = dict(dict.fromkeys(ATTACKS, 80), corruptions=320, noise=640, fgsm=640, pgd=160,
                    sld=160, spsa=20, cw=40)
# With other data all images, except in slow attacks:
SLOW_LIMITS = dict(autoattack=1000, adaptive_autoattack=1000, square=1000, spsa=100, cw=100)


def get_args(words=None):
    """Parse the flags. words: a list instead of the command line."""
    p = common.new_parser(__doc__)
    flag = p.add_argument_group("what to evaluate").add_argument
    flag("--ckpt", nargs="+", default=[], help="checkpoints: files, or run folders (best.pt, else "
         "last.pt); files with timm's names (DeiT, the paper's code) work, too")
    flag("--model", nargs="+", default=[], metavar="FILE.py:BUILD", help="functions that return "
         "classifiers: modules that take pixels in [0, 1] and return logits")
    flag("--measures", nargs="+", help=f"measure these: clean, corruptions or single types of "
         f"corruption, {', '.join(ATTACKS)}, {', '.join(FOLDERS)} (default: clean, corruptions, "
         f"noise, fgsm, pgd, adaptive_pgd, apgd, and the folders that are given)")
    flag("--eps", nargs="+", type=Fraction, help="budgets of the attacks, for example 8/255 or "
         "0.031 (default: 1/255 2/255 4/255 8/255; with --preset paper 1/255 to 6/255)")
    flag("--steps", type=int, help="steps of the attacks (default: see ATTACKS)")
    flag("--limit", type=int, help="images per measure, the same for every model (default: all; "
         "fewer on shapes and for slow attacks)")
    flag("--preset", choices=("default", "paper"), default="default", help="conditions of attacks; "
         "paper repeats the conditions and settings of the paper's code")
    flag("--seed", type=int, default=0, help="seed of all random numbers, also of the choice of "
         "images (default: 0)")
    flag("--table", nargs="+", metavar="PATH", help="do not evaluate; print the table of these "
         "results.jsonl files")

    flag = p.add_argument_group("data").add_argument
    flag("--data", choices=DATASETS, help="data set (default: as in training)")
    flag("--data_dir", help="folder of the data (default: as in training); for imagenet, the "
         "folder that contains val/ with all or some classes")
    flag("--image_size", type=int, help="pixels per side for --model (default: 32 on shapes and "
         "cifar10, else 224)")
    flag("--corrupted_dir", help="read corrupted images from this folder, and make none: "
         "<type>/<severity>/<class>/*.JPEG, as ImageNet-C")
    for name in FOLDERS:
        flag(f"--{name}", metavar="DIR", help=f"folder of {name}, <class>/* for some of ImageNet's "
             "classes; a default measure if given")
    flag("--frost_dir", help="folder of ImageNet-C's photographs frost1.png to frost5.jpg "
         "(default: synthetic frost)")
    flag("--severities", nargs="+", type=int, choices=(1, 2, 3, 4, 5), default=[1, 2, 3, 4, 5],
         help="severities of the corruptions (default: 1 2 3 4 5)")

    flag = p.add_argument_group("running").add_argument
    flag("--out_dir", help="folder of results.jsonl (default: robust/ in the run folder of the "
         "first checkpoint; for a single file out/FILE/robust; for --model out/model/robust)")
    flag("--batch_size", type=int, help="images per batch, which bounds the memory (default: "
         "depends on the image size and the memory of the GPU)")
    flag("--num_workers", type=int, default=common.default_workers(), help="processes that "
         "decode images (default: %(default)s)")
    flag("--device", help="cuda, mps or cpu (default: the best found)")
    args = p.parse_args(words)
    if not args.ckpt and not args.model and not args.table:
        p.error("the following arguments are required: --ckpt or --model")
    return args


# --- models ---------------------------------------------------------------------------------------

def kind_of(config):
    """Describe an attention: softmax, fan symmetric, rpc 4iter/layer0, rpc 2iter/all-layer."""
    kind = getattr(config, "family", "") + config.attn    # the family of a FAN is "fan "
    if not config.rpc_layers:
        return kind
    everywhere = len(config.rpc_layers) == config.depth
    layers = "all-layer" if everywhere else "layer" + ",".join(map(str, config.rpc_layers))
    changed = [f", {name} {config.pap[name]}" for name in ("lambd", "form")
               if config.pap[name] != PAP_SETTINGS[name]]
    return "".join([f"{kind} {config.pap['n_iter']}iter/{layers}", *changed])


class Model(NamedTuple):
    """A network to evaluate."""
    net: torch.nn.Module                 # from pixels in [0, 1] to logits; eval mode, frozen
    size: int                            # pixels per side of its images
    classes: list                        # class names in the order of its logits; [] if unknown
    about: dict                          # fields of its rows: model (its name), checkpoint, ...
    trained: dict                        # the flags of its training; {} for other people's networks
    seen: list                           # hashes of the photos that its training used


def load_model(path, size, device):
    """Return the Model of a checkpoint, ours or with timm's names, or of FILE.py:BUILD.

    size: the pixels per side of the images of FILE.py:BUILD.
    """
    checkpoint, trained = {}, {}
    if ".py:" in str(path):
        file, _, function = path.partition(":")
        sys.path.insert(0, str(Path(file).resolve().parent))    # so `import sibling` works in it
        build = runpy.run_path(file)[function]
        torch.manual_seed(0)                              # the same weights on every process
        net, name, code = build(), path, zlib.crc32(Path(file).read_bytes())
        config = dict(build=path, code=f"{code:08x}")     # an edited file is another model
    else:
        checkpoint = common.load(path)
        if checkpoint.get("task", "classification") != "classification":
            raise InputError(f"--ckpt {path} is for {checkpoint['task']}; evaluate it by "
                             f"train_seg.py or train_lm.py --eval_only")
        trained = checkpoint["args"] if "task" in checkpoint else {}
        net = classifier_from_checkpoint(checkpoint) if trained else load_timm(checkpoint)
        run = f"seed {trained['seed']}" if trained else Path(path).stem
        name = f"{kind_of(net.config)}, {run}"
        # The settings that are not ViTConfig's defaults.
        usual = vars(ViTConfig()) | ViTConfig().pap
        config = {k: v for k, v in (vars(net.config) | net.config.pap).items()
                  if k != "pap" and v != usual.get(k)}
        size = net.config.image_size
    about = dict(checkpoint=str(path), model_config=config, model=name,
                 weights=common.checksum(net), size=size)
    return Model(net.to(device).eval().requires_grad_(False), size,
                 list(checkpoint.get("classes") or []), about, trained, checkpoint.get("seen", []))


# --- data -----------------------------------------------------------------------------------------

# Names of ImageNet's class folders; logit i of an ImageNet network belongs to IMAGENET[i].
IMAGENET = Path(robust.__file__).with_name("imagenet_classes.txt").read_text().split()


def load_data(args, models):
    """Load the test images; their classes must be the classes of all models.

    Changes args.data, args.data_dir and args.batch_size to the values in use. Returns a data set
    with .labels and .classes: a Split in memory, or an ImageTree of files.
    """
    first = models[0]
    args.data = args.data or first.trained.get("data") or "imagenet"
    args.data_dir = args.data_dir or first.trained.get("data_dir")
    if any(m.size != first.size for m in models):
        raise InputError(f"the models take images of {', '.join(str(m.size) for m in models)} "
                         f"pixels per side; expected the same size for all models")
    if not args.batch_size:
        pixels = 2 ** 19                                  # per batch
        if args.device.type == "cuda":                    # a ViT-B needs 3 kB per pixel; 4 is safe
            pixels = min(torch.cuda.mem_get_info(args.device)[0] // 4096, 512 * 224 ** 2)
        args.batch_size = max(1, pixels // first.size ** 2)

    counts, ramp = [], torch.linspace(0, 1, 6 * first.size ** 2, device=args.device)  # two images
    for m in models:
        with torch.no_grad():
            logits = m.net(ramp.view(2, 3, first.size, first.size)).float().cpu()
        check_logits(logits)                              # InputError for probabilities
        counts.append(logits.shape[1])
        if "build" in m.about["model_config"]:            # `code` does not cover imported files
            answer = (logits[0] * torch.arange(1, 1 + counts[-1])).sum()
            m.about["model_config"]["answer"] = f"{answer.item():.4g}"

    # ImageNet's networks have all 1,000 classes; val/ may contain some of them, or may be missing
    # if only ImageNet-A and -R are measured.
    has_1000 = args.data == "imagenet" and counts[0] == len(IMAGENET)
    names = first.classes or (IMAGENET if has_1000 else None)
    if has_1000 and not args.data_dir:                    # an empty data set
        data = Split(torch.zeros(0, 3, 1, 1), torch.zeros(0, dtype=torch.long), IMAGENET)
    elif args.data == "imagenet":
        data = ImageTree(args.data_dir, "val", names, first.size, subset=has_1000)
    else:
        seen = {mark for m in models for mark in m.seen}  # your training photos are left out
        crop = DATASETS[first.trained.get("data", args.data)].crop      # as in the training
        flags = first.trained | dict(data=args.data, data_dir=args.data_dir, image_size=first.size,
                                     classes=names, seen=seen, crop=crop)
        data = load_part("all" if args.data == "folder" else "test", flags, args.device)
    for m, count in zip(models, counts):
        path = m.about["checkpoint"]
        if count != len(data.classes) or m.classes not in ([], list(data.classes)):
            raise InputError(f"{path} has {count} classes {m.classes[:3]}, --data {args.data} "
                             f"has {len(data.classes)} {list(data.classes)[:3]}; expected the same")
        if not m.classes and not has_1000:
            order = ", ".join(f"{i} = {name}" for i, name in enumerate(data.classes))
            print0(f"{path} has no class names. Its logits are taken in this order: {order}")
    return data


def open_folder(path, classes, size, crop=0.875):
    """Open a folder <class>/* for some of `classes`; a label is an index into the whole list."""
    root, folder = os.path.split(os.path.abspath(path))
    return ImageTree(root, folder, classes, size, subset=True, crop=crop)


def choose(n, name, args):
    """Choose the images of a measure: numbers from 0 to n - 1 in a random order, fixed by --seed.

    --limit cuts the order, so a smaller limit gives a prefix of a larger one.
    """
    limits = SCENE_LIMITS if args.data == "shapes" else SLOW_LIMITS
    return epoch_order(n, epoch=0, seed=args.seed)[:args.limit or limits.get(name, n)]


def batches(data, index, args, label=""):
    """Load this process's share of the images in batches on the device.

    index: (n,) numbers of images in the data set. label: text of the progress bar.
    Yields x (b, 3, S, S) float in [0, 1], labels (b,), numbers = index[place] (b,), and place (b,):
    the rows of index, and of the results, that belong to the batch.
    """
    device = args.device
    share = torch.arange(len(index))[args.rank::args.world]     # torchrun starts `world` processes
    places = [place for place in share.split(args.batch_size) if len(place)]
    parts = [index[place] for place in places]
    if isinstance(data, Split):
        parts = (part.to(device) for part in parts)
        loaded = ((data.images[part], data.labels[part], part) for part in parts)
    else:
        pairs = ((part, part) for part in parts)          # the first comes back as `numbers`
        loaded = image_batches(data, pairs, args.num_workers, device)
    for batch, place in common.bar(zip(loaded, places), label[:60], total=len(places), leave=False):
        pixels, labels, numbers = (t.to(device, non_blocking=True) for t in batch)
        yield pixels.float() / 255, labels, numbers, place.to(device)


# --- scores of images -----------------------------------------------------------------------------

def correct(logits, labels):
    """Return (b, 3) float per image: top-1 (0 or 1), top-5 (0 or 1), cross-entropy in nats."""
    check_logits(logits)
    right = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    return torch.stack([right[:, 0].float(), right.any(1).float(), loss], 1)


def all_sum(t):
    """Join results, float64: each process has filled its own rows, and the others are 0."""
    t = t.cpu()
    if dist.is_initialized():
        dist.all_reduce(t)
    return t.double()


def pack(right):
    """Return (n,) bool, True for a correct answer, as text: one bit per image, in base64."""
    return base64.b64encode(np.packbits(right.cpu().numpy())).decode()


def unpack(text, n):
    """Return (n,) bool from the text that `pack` returned for n images."""
    packed = np.frombuffer(base64.b64decode(text), np.uint8)
    return torch.from_numpy(np.unpackbits(packed, count=n)).bool()


def outcome(hits, num_classes):
    """Return a row's fields `top1`, `top5` (per cent) and `right`; hits: (n, 3) of `correct`."""
    top1, top5 = (round(x, 4) for x in (100 * hits[:, :2].sum(0) / len(hits)).tolist())
    top5 = dict(top5=top5) if num_classes > 5 else {}     # up to 5 classes it is always 100 %
    return dict(top1=top1, **top5, right=pack(hits[:, 0] > 0))


# --- measures: each returns fields of a row -------------------------------------------------------

@torch.no_grad()
def clean(m, data, index, args):
    """Measure accuracy and mean loss on the unchanged images."""
    hits = torch.zeros(len(index), 3, device=args.device)
    for x, labels, _, place in batches(data, index, args, f"clean, {m.about['model']}"):
        hits[place] = correct(m.net(x).float(), labels)
    hits = all_sum(hits)
    return dict(loss=hits[:, 2].mean().item(), **outcome(hits, len(data.classes)))


@torch.no_grad()
def corrupted(m, data, index, args, settings):
    """Measure accuracy on corrupted images; each field is a list, one value per severity."""
    kind, severities = settings["type"], settings["severities"]
    hits = torch.zeros(len(severities), len(index), 3, device=args.device)
    label = f"{kind}, {m.about['model']}"
    if args.corrupted_dir:                                # the copies are in the order of `data`
        for i, severity in enumerate(severities):
            folder = Path(args.corrupted_dir, kind, str(severity))
            copies = open_folder(folder, data.classes, m.size, crop=1.0)    # are already cropped
            if not torch.equal(copies.labels, data.labels):
                raise InputError(f"--corrupted_dir {args.corrupted_dir}: {kind}, severity "
                                 f"{severity} has other images than the test images")
            for x, labels, _, place in batches(copies, index, args, label):
                hits[i, place] = correct(m.net(x).float(), labels)
    else:
        if isinstance(data, ImageTree):                   # ImageNet-C was resized bilinearly
            data = copy.copy(data)
            data.resample = "bilinear"
        for x, labels, numbers, place in batches(data, index, args, label):
            for i, severity in enumerate(severities):
                pixels = corrupt((255 * x).round().byte(), kind, severity, seed=args.seed,
                                 index=numbers, frost_dir=args.frost_dir)
                hits[i, place] = correct(m.net(pixels.float() / 255).float(), labels)
    outcomes = [outcome(hit, len(data.classes)) for hit in all_sum(hits)]
    return {field: [one[field] for one in outcomes] for field in outcomes[0]}


class Normalized(torch.nn.Module):
    """Let a network take normalised images z = (x - mean) / std, as in the paper's code."""

    def __init__(self, net):
        super().__init__()
        self.net, self.mean, self.std = net, net.mean, net.std

    def forward(self, z):
        return self.net(z * self.std + self.mean)


def attack_as_paper(net, x, attack, clip, index):
    """Attack under the conditions of --preset paper; return the attacked pixels.

    The attack changes normalised images z, clipped to [0, 1] or not at all. The label that it
    attacks is the network's prediction for z. net: a ViT or FAN, which has .mean and .std.
    """
    normalized, z = Normalized(net).eval(), (x - net.mean) / net.std
    z = z.clamp(0, 1) if clip else z
    with torch.no_grad():
        predicted = normalized(z).argmax(1)
    adv = attack(normalized, z, predicted, index=index, clip=clip)
    return adv * net.std + net.mean


def attacked(m, data, index, args, name, attack):
    """Measure accuracy under an attack, and how far the attacked images are from the originals."""
    hits = torch.zeros(len(index), 3, device=args.device)
    # columns: Linf, L2, L1, how far a pixel is outside [0, 1]
    moved = torch.zeros(len(index), 4, dtype=torch.float64, device=args.device)
    attack = partial(attack, seed=args.seed)
    for x, labels, numbers, place in batches(data, index, args, f"{name}, {m.about['model']}"):
        if args.preset == "paper":
            adv = attack_as_paper(m.net, x, attack, name in PAPER_CLIPS, numbers)
        else:
            adv = robust.attack_batch(m.net, x, labels, attack, index=numbers)
        with torch.no_grad():
            hits[place] = correct(m.net(adv).float(), labels)
        move = (adv - x).flatten(1).double()
        moved[place, 0] = move.norm(math.inf, 1)
        moved[place, 1] = move.norm(2, 1)
        moved[place, 2] = move.norm(1, 1)
        moved[place, 3] = (adv - adv.clamp(0, 1)).abs().flatten(1).amax(1).double()

    moved = all_sum(moved)
    changed = moved[moved[:, 0] > 0]                      # maxima, median and mean over these
    linf, l2, l1, _ = (changed if len(changed) else moved[:1]).unbind(1)    # none: zeros
    return outcome(all_sum(hits), len(data.classes)) | dict(
        max_linf=linf.max().item(), max_l2=l2.max().item(), max_l1=l1.max().item(),
        median_l2=l2.median().item(), mean_l2=l2.mean().item(),
        outside=moved[:, 3].max().item())


@torch.no_grad()
def logits_of_classes(m, data, index, args, columns):
    """Return the logits for the classes `columns`, (n, len(columns)), in every process."""
    logits = torch.zeros(len(index), len(columns), device=args.device)
    for x, _, _, place in batches(data, index, args, "logits"):
        logits[place] = m.net(x).float()[:, columns]
    return all_sum(logits)


def folder_accuracy(m, tree, index, args):
    """Measure ImageNet-A or -R over the 200 classes that the folder contains."""
    columns = tree.labels.unique()                        # sorted indices into the 1,000 classes
    labels = torch.searchsorted(columns, tree.labels[index])    # indices into columns
    hits = correct(logits_of_classes(m, tree, index, args, columns), labels)
    return dict(outcome(hits, len(columns)), classes=len(columns))


def outliers(m, tree, index, args, val):
    """Measure the AUPR with which low confidence separates ImageNet-O from images of val/.

    The confidence is the largest probability among ImageNet-O's classes. Of val/, only
    images of these classes are used; inside: their number. chance: the AUPR of a random guess.
    """
    columns = tree.labels.unique()
    inside = torch.isin(val.labels, columns).nonzero()[:, 0]
    inside = inside[epoch_order(len(inside), epoch=0, seed=args.seed)[:args.limit]]
    both = torch.cat([logits_of_classes(m, tree, index, args, columns),
                      logits_of_classes(m, val, inside, args, columns)])
    doubt = -both.softmax(1).amax(1)                      # high where the confidence is low
    outlier = torch.arange(len(both)) < len(index)
    return dict(aupr=100 * metrics.average_precision(doubt, outlier),
                chance=100 * len(index) / len(both), inside=len(inside), classes=len(columns))


# --- rows and their table -------------------------------------------------------------------------

# A stored row is used again only if all fields of KEY are equal. `settings` contains the settings
# of the measure; `fingerprint` is a hash of the files or pixels, and of their labels.
MODEL = ("weights", "model_config", "size")
KEY = (*MODEL, "data", "fingerprint", "name", "settings", "seed", "images")


def row_key(row, fields=KEY):
    """Return the key of a row, or of its model with fields=MODEL: the fields' values as text."""
    text = json.dumps([row.get(name) for name in fields], sort_keys=True)
    return text.replace("Infinity", '"inf"')              # as in results.jsonl


def measure_text(name, settings):
    """Return a measure in words: pgd steps=20 eps=2/255."""
    def word(value):
        """Return a setting as text; a multiple of 1/255 as a fraction."""
        if isinstance(value, list):
            return ",".join(map(word, value))
        if not isinstance(value, float):
            return str(value)
        levels = 255 * value
        if 0 < levels < 255 and abs(levels - round(levels)) < 1e-9:
            return f"{round(levels)}/255"
        return f"{value:g}"
    return " ".join([name, *(f"{setting}={word(value)}" for setting, value in settings.items())])


def mean_rows(rows):
    """Yield one row per model with all 15 types of ImageNet-C: the mean over these types.

    On ImageNet at all five severities, the row also has mce, the mean error relative to AlexNet,
    which has 100 %. There is no mean if a type has several rows, as from two --corrupted_dir.
    """
    groups = {}                                           # {key without the type: {type: rows}}
    for row in rows:
        if row["name"] == "corruptions" and row["settings"]["type"] in NAMES:
            shared = row["settings"] | dict(type="mean")
            shared.pop("frost", None)
            if "released" in shared:                      # a fingerprint, which differs per type
                shared["released"] = True
            mean_row = row | dict(settings=shared)
            types = groups.setdefault(row_key(mean_row), {})
            types.setdefault(row["settings"]["type"], []).append(mean_row)
    for types in groups.values():
        if len(types) == len(NAMES) and all(len(found) == 1 for found in types.values()):
            types = {name: found[0] for name, found in types.items()}
            row = types["fog"]                            # any type: its numbers are replaced below
            mean = {field: float(np.mean([np.mean(types[name][field]) for name in NAMES]))
                    for field in ("top1", "top5") if field in row}
            if row["data"] == "imagenet" and row["settings"]["severities"] == [1, 2, 3, 4, 5]:
                mean["mce"] = metrics.mean_corruption_error(
                    {name: 1 - np.mean(types[name]["top1"]) / 100 for name in NAMES})
            yield row | mean


def worst_cases(rows):
    """Yield rows with the worst case over attacks: an image must be right under every attack.

    There is one row per model and budget with at least two attacks. Attacks can have different
    numbers of images in the same order, so the row uses the images that all attacks have.
    """
    groups = {}                                           # {key without the attack: rows}
    for row in rows:
        attack = ATTACKS.get(row["name"])
        if attack and "eps" not in attack.keywords:       # noise, sld and cw have their own budget
            shared = {k: row["settings"][k] for k in ("eps", "conditions") if k in row["settings"]}
            worst = row | dict(name="worst", settings=shared, images=None)    # any number of images
            groups.setdefault(row_key(worst), []).append(row)
    for group in groups.values():
        if len(group) > 1:
            n = min(row["images"] for row in group)
            right = torch.stack([unpack(row["right"], row["images"])[:n] for row in group]).all(0)
            shared = {k: v for k, v in group[0]["settings"].items() if k in ("eps", "conditions")}
            names = ",".join(dict.fromkeys(row["name"] for row in group))
            yield {k: group[0].get(k) for k in (*KEY, "model", "checkpoint")} | dict(
                name="worst", settings=shared | dict(of=names), images=n,
                top1=100 * right.double().mean().item())


def rows_table(rows):
    """Return rows as a Markdown table: one line per measure, one column per model.

    A number for several severities is their mean.
    """
    rows = [*{row_key(row): row for row in rows}.values()]
    rows += [*mean_rows(rows), *worst_cases(rows)]
    columns = {row_key(row, MODEL): row for row in rows}
    names = [row["model"] for row in columns.values()]
    header = [f"{row['model']}, {row['checkpoint']}" if names.count(row["model"]) > 1
              else row["model"] for row in columns.values()]
    several = len({(row["data"], row["seed"]) for row in rows}) > 1     # then lines name both
    lines = {}                              # {(measure, images, fingerprint): {model: cell}}
    for row in rows:
        shown = ("top1", "top5", "aupr", "mce") if row["data"] == "imagenet" else ("top1",)
        for field in (name for name in shown if name in row):
            text = measure_text(row["name"], row["settings"])
            text = f"{row['data']}, seed {row['seed']}: {text}" if several else text
            key = f"{text}, {field}", row["images"], row.get("fingerprint")
            line = lines.setdefault(key, {})
            line[row_key(row, MODEL)] = f"{np.mean(row[field]):.2f}"
    alike = Counter(key[:2] for key in lines)             # above 1: name the fingerprint
    body = [[f"{text}, data {fingerprint}" if alike[text, images] > 1 else text, images,
             *(cells.get(model, "") for model in columns)]
            for (text, images, fingerprint), cells in lines.items()]
    return common.table(body, ["measure, in per cent", "images", *header])


# --- the command ----------------------------------------------------------------------------------

def plan(args, data, size):
    """Yield (name, settings, source, measure) for each row of a model.

    source: the data set of the measure. measure(m, source, index, args) returns fields of a row.
    """
    default = ["clean", "corruptions", "noise", "fgsm", "pgd", "adaptive_pgd", "apgd"]
    for name in args.measures or default + [name for name in FOLDERS if getattr(args, name)]:
        if name == "clean":
            yield name, {}, data, clean
        elif name == "corruptions" or name in CORRUPTIONS:
            for kind in NAMES if name == "corruptions" else [name]:     # NAMES: ImageNet-C's 15
                settings = dict(type=kind, severities=args.severities)
                if args.corrupted_dir:                    # row_key must see the files
                    folders = [open_folder(Path(args.corrupted_dir, kind, str(severity)),
                                           data.classes, size) for severity in args.severities]
                    settings["released"] = "".join(fingerprint(folder)[:8] for folder in folders)
                elif kind == "frost" and args.frost_dir:  # or the photographs
                    pixels = b"".join(t.numpy().tobytes() for t in load_frost(args.frost_dir))
                    settings["frost"] = f"{zlib.crc32(pixels):08x}"
                yield "corruptions", settings, data, partial(corrupted, settings=settings)
        elif name in ATTACKS:
            changed = dict(PAPER.get(name, {})) if args.preset == "paper" else {}
            if args.steps and "steps" in ATTACKS[name].keywords:
                changed["steps"] = args.steps
            attack = partial(ATTACKS[name], **changed)
            budgets = map(float, args.eps or (PAPER_EPS if args.preset == "paper" else EPS))
            if "eps" in attack.keywords:
                budgets = [attack.keywords["eps"]]
            for eps in budgets:
                run = partial(attack, eps=eps)
                settings = {k: getattr(v, "__name__", v) for k, v in run.keywords.items()}
                if args.preset == "paper":
                    settings["conditions"] = "paper"
                yield name, settings, data, partial(attacked, name=name, attack=run)
        elif name in ("imagenet_a", "imagenet_r"):
            yield name, {}, open_folder(getattr(args, name), data.classes, size), folder_accuracy
        elif name == "imagenet_o":
            tree = open_folder(args.imagenet_o, data.classes, size)
            settings = dict(val=fingerprint(data), limit=args.limit or "none")
            yield name, settings, tree, partial(outliers, val=data)
        else:
            raise InputError(f"--measures {name}: expected clean, corruptions, "
                             f"{', '.join([*CORRUPTIONS, *ATTACKS, *FOLDERS])}")


def main():
    args = get_args()
    if args.table:
        files = (Path(path, "results.jsonl") if Path(path).is_dir() else path
                 for path in args.table)
        print(rows_table([row for file in files for row in common.read_log(file)]))
        return
    args.rank, args.world, args.device = common.start_processes(args.device)
    torch.backends.cudnn.allow_tf32 = False               # PyTorch's default rounds convolutions
    size = args.image_size or (32 if args.data in ("shapes", "cifar10") else 224)
    models = [load_model(path, size, args.device) for path in (*args.ckpt, *args.model)]
    data = load_data(args, models)

    # For each measure and each model, compute the row if results.jsonl does not have it yet.
    first = Path(args.ckpt[0] if args.ckpt else "out/model")
    folder = first if not args.ckpt or first.is_dir() else Path("out", first.stem)
    path = Path(args.out_dir or folder / "robust") / "results.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = {row_key(row): row for row in common.read_log(path)}
    here, wanted = common.origin(args.device), []
    print0(f"{len(models)} models | {args.data} | {args.world} x {here['hardware']} | {path}, "
           f"{len(rows)} rows")
    for name, settings, source, measure in plan(args, data, models[0].size):
        index = choose(len(source.labels), name, args)
        if not len(index) or (name == "imagenet_o" and not len(data.labels)):
            raise InputError(f"--measures {name} needs --data_dir, the folder that contains val/")
        measured = dict(data=args.data, data_dir=args.data_dir, fingerprint=fingerprint(source),
                        name=name, settings=settings, images=len(index), seed=args.seed)
        for m in models:
            row = m.about | measured
            key = row_key(row)
            if key not in rows:
                began = time.perf_counter()
                row |= measure(m, source, index, args)
                row.update(seconds=round(time.perf_counter() - began, 2), **here)
                rows[key] = row
                common.append_row(path, row)              # rank 0 writes
            wanted.append(rows[key])
    fewest = min(row["images"] for row in wanted)
    print0(f"\n{rows_table(wanted)}\n\n"
           f"The rows are in {path}. Compare numbers of one line only. An accuracy of 50 % on "
           f"{fewest} images has a 95 % interval of ±{1.96 * 50 / fewest ** 0.5:.0f} points. "
           f"One network per variant is not enough to rank variants: train several seeds.")


if __name__ == "__main__":
    common.run(main)
