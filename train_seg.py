"""Train Segmenter with robust attention, and evaluate it on clean and corrupted images.

    python train_seg.py                                                  # RPC on rendered scenes, minutes on a CPU
    python train_seg.py --attn symmetric                                 # its baseline
    python train_seg.py --data camvid --data_dir data/camvid             # a small real set, from scratch
    torchrun --standalone --nproc_per_node=4 train_seg.py --data ade20k --data_dir data/ADEChallengeData2016 \\
        --backbone out/imagenet_rpc                                    # the paper's run; train_cls.py made the backbone
    python train_seg.py --resume out/seg_shapes_rpc                      # go on exactly where it stopped
    python train_seg.py --eval_only out/seg_shapes_rpc --corruptions all # Table 6: mean accuracy, mean IoU, corrupted
    python train_seg.py --eval_only out/seg_ade20k_rpc --scales 0.5 0.75 1 1.25 1.5 1.75 --flip      # multi-scale

Paper: Teo & Nguyen 2024, section 4.1, App. A.3 and E.5 (Table 6); recipe `rstrudel/segmenter`, which the paper's fork
`rachtsy/segm` keeps: SGD with Nesterov momentum, polynomial schedule, 64 epochs of ADE20K. Where this differs: bf16 on
GPUs (--no-amp: float32), a loss that is not finite stops the run, the result is the last epoch.
Every random number depends on (seed, step or sample) alone, so stopping and resuming changes nothing, nor does the
number of processes but for float noise (except with --drop_path or --dropout, whose masks are drawn per process).
"""

import argparse
import json
import math
import os
import time
import zlib
from dataclasses import asdict
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from tqdm import tqdm

import common
from robust import corruptions
import data
from attention import FORMS
from data.segmentation import IGNORE, Scenes, SegTree, TrainingViews, finish_views, save_pictures
from segmenter import (Segmenter, SegmenterConfig, config_from_backbone, confusion, load_backbone, predict, scores,
                       segmenter_from_checkpoint)
from vit import RPC_KINDS, SIZES

# What --data selects; flags given on the command line win.
RECIPES = {
    "shapes": dict(model="nano", patch_size=4, size=32, num_classes=11, epochs=5, batch_size=32, optimizer="adamw",
                   lr=2e-3, min_lr=1e-5, weight_decay=0.05, clip=1.0, drop_path=0.0, dropout=0.0, min_scale=1.0,
                   max_scale=1.0, distort=False, eval_every=2, num_workers=0),
    "camvid": dict(model="nano", patch_size=16, size=160, num_classes=11, epochs=200, batch_size=8, optimizer="adamw",
                   lr=2e-3, min_lr=1e-5, weight_decay=0.05, clip=1.0, drop_path=0.0, dropout=0.1, min_scale=0.5,
                   max_scale=2.0, distort=True, eval_every=20, num_workers=min(os.cpu_count() or 1, 10)),
    "ade20k": dict(model="tiny", patch_size=16, size=512, num_classes=150, epochs=64, batch_size=8, optimizer="sgd",
                   lr=1e-3, min_lr=1e-5, weight_decay=0.0, clip=0.0, drop_path=0.1, dropout=0.1, min_scale=0.5,
                   max_scale=2.0, distort=True, eval_every=2, num_workers=min(os.cpu_count() or 1, 10)),
}
# The encoder: --backbone brings all of it. Without one, the recipe and these say what it is.
SCRATCH = dict(attn="rpc", rpc_layers="0", n_iter=4, lambd=4.0, form="released")
ENCODER = ("model", "patch_size", *SCRATCH)
# What --eval_only, and what --resume refuses to change: it would be another model, another run.
FIXED_MODEL = (*ENCODER, "backbone", "decoder", "size", "num_classes", "data")
FIXED = (*FIXED_MODEL, "num_images", "optimizer", "drop_path", "dropout", "min_scale", "max_scale", "distort",
         "batch_size", "seed")
# What a run does not hand on to the one that resumes it, nor, in addition, to an evaluation.
OWN = {"resume": ("resume", "out_dir", "max_steps", "device")}
OWN["eval_only"] = (*OWN["resume"], "amp", "num_workers", "window", "stride", "scales", "flip", "save_images")


def get_args():
    """The flags; for each, the command line wins over the run that is resumed, and that over the recipe."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                allow_abbrev=False, epilog="defaults that --data selects:\n" + "\n".join(
                                    f"  {name}: {' '.join(f'--{k} {v}' for k, v in recipe.items())}"
                                    for name, recipe in RECIPES.items()).replace("--distort True", "--distort")
                                .replace("--distort False", "--no-distort"))
    boolean = argparse.BooleanOptionalAction
    count, natural = common.number(int, 1), common.number(int, 0)
    real, share, positive = common.number(float, 0), common.number(float, 0, 0.999999), common.number(float, 0.01)

    flag = p.add_argument_group("data").add_argument
    flag("--data", choices=RECIPES, default="shapes", help="shapes: rendered scenes, nothing to download; the others "
         "are folders laid out like ADE20K, {images,annotations}/{training,validation}, and differ in the recipe")
    flag("--data_dir", help="camvid, ade20k: that folder")
    flag("--num_classes", type=count, help="K; annotations hold 0 (ignored) and 1 to K")
    flag("--num_images", type=count, default=16000, help="shapes: training images; a tenth more to evaluate on")
    flag("--num_workers", type=natural, help="decoding processes per GPU")

    flag = p.add_argument_group("model").add_argument
    flag("--backbone", help="checkpoint of train_cls.py, DeiT's file or https address: its encoder, attention "
         "included; without it, training starts from scratch")
    flag("--model", choices=SIZES, help="width, depth and heads")
    flag("--patch_size", type=count, help="pixels")
    flag("--attn", choices=["softmax", "symmetric", "scaled_alpha", *RPC_KINDS], help="of the encoder (default: rpc); "
         "the decoder is symmetric where the encoder is, and never RPC")
    flag("--rpc_layers", help="encoder layers with RPC-Attention, from 0: 0 (default, the paper's layer1), all, 0,1,2, "
         "0-3")
    flag("--n_iter", type=count, help="PAP steps (default: 4); the paper: 4, 5, 6 in layer 0, or 2 in all")
    flag("--lambd", type=common.number(float, 0, math.inf), help="PAP lambda (default: 4); the paper: 3 in all layers")
    flag("--form", choices=FORMS, help="which reading of Algorithm 1, see attention.py (default: released)")
    flag("--decoder", choices=["mask", "linear"], default="mask", help="mask transformer, or one linear layer")
    flag("--drop_path", type=share, help="stochastic depth rate of the encoder's last block")
    flag("--dropout", type=share, help="in the mask transformer")

    flag = p.add_argument_group("training").add_argument
    flag("--size", type=count, help="pixels: side of a crop, and the short side that images are resized to; a "
         "multiple of --patch_size")
    flag("--min_scale", type=positive, help="smallest random factor of that resizing")
    flag("--max_scale", type=positive, help="largest")
    flag("--distort", action=boolean, help="random brightness, contrast, saturation, hue")
    flag("--epochs", type=count, help="the budget: the schedule ends there")
    flag("--batch_size", type=count, help="global: over all processes")
    flag("--optimizer", choices=["sgd", "adamw"], help="sgd: Nesterov momentum 0.9; adamw: for training from scratch")
    flag("--lr", type=real, help="learning rate of the first step")
    flag("--min_lr", type=real, help="at the end: lr_k = (lr - min_lr) (1 - k / steps)^0.9 + min_lr")
    flag("--weight_decay", type=real, help="of matrices; 1-d tensors, positions, class tokens have none")
    flag("--clip", type=real, help="clip the gradient norm; 0: do not")

    flag = p.add_argument_group("evaluation").add_argument
    flag("--eval_only", metavar="CKPT", help="no training: evaluate this checkpoint, which knows its model and data")
    flag("--window", type=count, help="pixels: sliding window (default: --size); smaller images are enlarged")
    flag("--stride", type=count, help="pixels between windows (default: --window; upstream's scorer: window - 32)")
    flag("--scales", nargs="+", type=positive, default=[1.0], help="views of an image, as factors of --size; their "
         "probabilities are averaged")
    flag("--flip", action=boolean, default=False, help="each view mirrored, too")
    flag("--corruptions", nargs="+", choices=["all", *corruptions.NAMES], metavar="NAME", help="with --eval_only: all "
         "or some of " + ", ".join(corruptions.NAMES) + "; of images at their own size, before resizing")
    flag("--severity", nargs="+", type=common.number(int, 1, 5), default=[1, 2, 3, 4, 5], help="of the corruptions; "
         "the paper does not say which")
    flag("--frost_dir", help="folder with ImageNet-C's frost1.png to frost5.jpg (default: procedural frost)")
    flag("--limit", type=count, help="with --eval_only: so many random images, the same for every model (default: all)")
    flag("--save_images", type=natural, default=4, help="N: draw image, truth, prediction of up to N images")

    flag = p.add_argument_group("running").add_argument
    flag("--seed", type=common.number(int, 0, 2 ** 31 - 1), default=0)
    flag("--device", help="cuda, mps or cpu; picked automatically")
    flag("--amp", action=boolean, help="bf16 autocast; default: on GPUs; --no-amp is the paper's float32")
    flag("--compile", action=boolean, default=False, help="torch.compile the model")
    flag("--out_dir", help="checkpoints and log.jsonl; default out/seg_<data>_<attn>, numbered if it exists; with "
         "--eval_only results.jsonl, whose rows are not computed again, and table.md; default eval/ in CKPT's folder")
    flag("--resume", help="folder of a run to continue; its flags are remembered")
    flag("--max_steps", type=count, help="stop early (the schedule stays that of --epochs)")
    flag("--log_every", type=count, default=20, help="steps between lines of log.jsonl")
    flag("--eval_every", type=count, help="epochs between evaluations; the last epoch is always evaluated")
    flag("--save_every", type=natural, default=0, help="steps between checkpoints within an epoch, which ends in one")
    flag("--keep_every", type=natural, default=0, help="also keep epoch_<n>.pt every so many epochs")

    default = vars(p.parse_args([]))
    given = p.parse_args(namespace=argparse.Namespace(**dict.fromkeys(default)))
    given = {k: v for k, v in vars(given).items() if v is not None}
    stored = stored_args(given)
    recipe = {**SCRATCH, **RECIPES[given.get("data", stored.get("data", default["data"]))]}
    if "backbone" in given:
        recipe = {k: v for k, v in recipe.items() if k not in ENCODER}
    for name in ("corruptions", "limit"):
        if name in given and "eval_only" not in given:
            raise ValueError(f"--{name} goes with --eval_only: train first, then evaluate the checkpoint")
    args = argparse.Namespace(**{**default, **recipe, **stored, **given})
    if args.max_scale < args.min_scale:
        raise ValueError(f"--min_scale {args.min_scale} is more than --max_scale {args.max_scale}")
    if given.keys() & {"lr", "min_lr"} and args.min_lr > args.lr:
        raise ValueError(f"--min_lr {args.min_lr} is above --lr {args.lr}")
    if "data_dir" in given and args.data == "shapes":
        raise ValueError(f"--data_dir {args.data_dir} is not read: --data shapes renders its images; "
                         f"choose --data camvid or ade20k")
    args.window = args.window or args.size
    args.stride = args.stride or args.window
    return args


def stored_args(given):
    """The flags of the run that --resume or --eval_only names; refuses flags that would make it another one."""
    if "resume" in given and "eval_only" in given:
        raise ValueError("--resume continues a training, --eval_only evaluates its result: give one of them")
    mode = next((name for name in ("resume", "eval_only") if name in given), None)
    if mode is None:
        return {}
    checkpoint = common.read_checkpoint(given[mode])
    parts = ("args", "model", "classes", *(("optimizer", "step") if mode == "resume" else ()))
    common.check_run(checkpoint, given[mode], "train_seg.py", *parts)
    if mode == "resume" and "out_dir" in given:
        raise ValueError("--out_dir does not go with --resume, which continues in its own folder")
    stored = {k: v for k, v in checkpoint["args"].items() if k not in OWN[mode]}
    for k in FIXED if mode == "resume" else FIXED_MODEL:
        if k in given and given[k] != stored[k]:
            theirs = f"--backbone {stored['backbone']}" if k in ENCODER and stored["backbone"] else f"--{k} {stored[k]}"
            raise ValueError(f"--{k} {given[k]} does not fit --{mode} {given[mode]}, which was trained with {theirs}")
    return stored


# --- set-up ----------------------------------------------------------------------------------------------------------

def load_data(args, split):
    """The "training" or "validation" split: source[i] is an image (3, H, W) and its label (H, W), both uint8."""
    if args.data == "shapes":
        n, split = (args.num_images, "train") if split == "training" else (max(args.num_images // 10, 1), "test")
        return Scenes(split, n, args.size)
    if not args.data_dir:
        raise ValueError(f"--data {args.data} needs --data_dir")
    return SegTree(args.data_dir, split, args.num_classes)


def build_config(args, num_classes, backbone=None):
    """SegmenterConfig from the flags, or from the backbone's own config, which flags may not contradict."""
    head = dict(num_classes=num_classes, image_size=args.size, drop_path=args.drop_path, decoder=args.decoder,
                decoder_dropout=args.dropout)
    encoder = {k: getattr(args, k) for k in ENCODER if getattr(args, k) is not None}
    size = SIZES[encoder.pop("model")] if "model" in encoder else {}
    if backbone is None:
        layers = common.parse_layers(encoder.pop("rpc_layers"), size["depth"])
        return SegmenterConfig(**size, **encoder, rpc_layers=layers, **head)
    config = config_from_backbone(backbone, **head)
    if "rpc_layers" in encoder:
        encoder["rpc_layers"] = common.parse_layers(encoder["rpc_layers"], config.depth)
    for name, value in {**size, **encoder}.items():
        if getattr(config, name) != value:
            raise ValueError(f"it was trained with {name}={getattr(config, name)!r} and keeps its own encoder; the "
                             f"flags say {value!r}")
    return config


def build_model(args, classes):
    """The model, the checkpoint it goes on from (None at the beginning), notes for the reader."""
    if args.resume:
        checkpoint = common.read_checkpoint(args.resume)
        if checkpoint["classes"] != classes:
            theirs = f"{len(checkpoint['classes'])} classes, {', '.join(checkpoint['classes'][:3])}, ..."
            raise ValueError(f"--data_dir {args.data_dir} has {len(classes)} classes, not those of the run in "
                             f"{args.resume} ({theirs})")
        with common.naming(f"--resume {args.resume}"):
            model = segmenter_from_checkpoint(checkpoint).train()
        return model, checkpoint, [f"resumed at step {checkpoint['step']}"]
    torch.manual_seed(args.seed)
    backbone = common.read_checkpoint(args.backbone) if args.backbone else None
    try:
        model = Segmenter(build_config(args, len(classes), backbone))
        if backbone:
            load_backbone(model, backbone)
    except ValueError as e:
        raise (ValueError(f"--backbone {args.backbone}: {e}") if backbone else e) from None
    return model, None, [f"encoder from {args.backbone}"] if backbone else []


def build_optimizer(args, model, resumed=None):
    """SGD with Nesterov momentum, as timm's "sgd", or AdamW; with the state of a resumed run."""
    groups = common.param_groups(model, args.weight_decay, no_decay=("pos_embed", "cls_token", "cls_emb"))
    fused = next(model.parameters()).is_cuda
    if args.optimizer == "sgd":
        optimizer = torch.optim.SGD(groups, lr=args.lr, momentum=0.9, nesterov=True, fused=fused)
    else:
        optimizer = torch.optim.AdamW(groups, lr=args.lr, fused=fused)
    if resumed:
        optimizer.load_state_dict(resumed["optimizer"])
        optimizer.param_groups[0]["weight_decay"] = args.weight_decay           # the flag may be new
    return optimizer


def poly_lr(step, total, lr, min_lr, power=0.9):
    """lr_k = (lr - min_lr) (1 - k / total)^0.9 + min_lr for update k = 0, 1, ...: no warm-up."""
    return (lr - min_lr) * (1 - min(step / total, 1)) ** power + min_lr


# --- batches ---------------------------------------------------------------------------------------------------------

def batch_keys(args, n, start, stop, rank, world):
    """[(position, index), ...] of this process for each step from `start` to `stop`.

    position numbers the samples of the whole run. An epoch's last batch may be short; a process for which it holds no
    image gets its first one, and its loop ignores the labels.
    """
    steps_per_epoch, last = math.ceil(n / args.batch_size), None
    for step in range(start, stop):
        epoch, i = divmod(step, steps_per_epoch)
        if epoch != last:
            order, last = data.epoch_order(n, epoch, args.seed).tolist(), epoch
        first = i * args.batch_size
        keys = list(enumerate(order[first:first + args.batch_size], epoch * n + first))
        yield keys[rank::world] or keys[:1]


def load_batches(views, args, model, start, stop, rank, world):
    """Per step: images (b, 3, S, S) float in [0, 1] and labels (b, S, S) int64 on the model's device."""
    n, mean = len(views.source), model.encoder.mean
    keys = batch_keys(args, n, start, stop, rank, world)
    loader = data.imagenet_batches(views, keys, args.num_workers, mean.device)
    for step, (images, labels, (position, height, width)) in enumerate(loader, start):
        images, labels = (t.to(mean.device, non_blocking=True) for t in (images, labels))
        if rank >= n - step % math.ceil(n / args.batch_size) * args.batch_size:          # a short batch, not for us
            labels.fill_(IGNORE)
        yield finish_views(images, height, width, position, args.seed, mean, args.distort), labels.long()


# --- before the first step: what would go wrong after hours ------------------------------------

def check_flags(args, patch_size):
    """Raises ValueError if windows or photographs of frost do not fit."""
    if args.window % patch_size:
        raise ValueError(f"--window {args.window} is not a multiple of the patch size "
                         f"{patch_size}")
    if args.stride > args.window:
        raise ValueError(f"--stride {args.stride} is more than --window {args.window}")
    if args.frost_dir:
        corruptions.load_frost(args.frost_dir)


def check_images(train, val, args, device, rank, world):
    """Read every validation image, and training images until one has a label.

    Raises ValueError that names the file, or the split without a labelled pixel: it would train
    at a loss of 0.
    """
    def labelled(label):
        return bool((label != IGNORE).any())

    if not any(labelled(train[i][1]) for i in range(len(train))):
        raise ValueError(f"none of the {len(train)} training images has a labelled pixel")
    mine = range(rank, len(val), world)
    loader = DataLoader(val, sampler=mine, batch_size=None, num_workers=args.num_workers)
    bar = tqdm(loader, "reading validation images", len(mine), leave=False, disable=rank > 0)
    count = sum(labelled(label) for _, label in bar)
    if not common.all_sum(torch.tensor(count, device=device)):
        raise ValueError(f"none of the {len(val)} validation images has a labelled pixel")


# --- evaluation ------------------------------------------------------------------------------------------------------

def equal_sizes(source, index, num_workers, n):
    """The images `index` of a source in groups of up to n of one size: lists of (index, image, label)."""
    waiting = {}
    for i, (image, label) in zip(index, DataLoader(source, sampler=index, batch_size=None, num_workers=num_workers)):
        group = waiting.setdefault(image.shape, [])
        group.append((i, image, label))
        if len(group) == n or sum(map(len, waiting.values())) == 8 * n:                 # all sizes differ: do not hoard
            yield waiting.pop(image.shape)
    yield from waiting.values()


@torch.no_grad()
def predictions(model, source, index, args, device, corruption=None):
    """(image, label, prediction), all uint8 on the device, of the images `index`; their order is that of equal_sizes.

    corruption: (name, severity), applied to the image at its own size; depends on the image's index only.
    """
    for group in equal_sizes(source, index, args.num_workers, 16 if corruption else 1):
        i, images, labels = zip(*group)
        images = torch.stack(images).to(device)
        if corruption:
            images = corruptions.corrupt(images, *corruption, seed=0, index=i, frost_dir=args.frost_dir)
        for image, label in zip(images, labels):
            with common.autocast(device, args.amp):
                p = predict(model, image, size=args.size, window=args.window, stride=args.stride, scales=args.scales,
                            flip=args.flip)
            yield image, label.to(device), p.argmax(0).byte()


def evaluate(model, source, index, args, device, rank, world, corruption=None):
    """The metrics of segmenter.scores over the images `index`; each image counts once, however many processes.

    Raises ValueError if none of them has a labelled pixel.
    """
    model.eval()
    K = model.config.num_classes
    matrix = torch.zeros(K, K, dtype=torch.int64, device=device)
    mine = index[rank::world]
    for _, label, prediction in tqdm(predictions(model, source, mine, args, device, corruption), "images", len(mine),
                                     unit="image", leave=False, disable=rank > 0):
        matrix += confusion(prediction, label, K)
    model.train()
    if not common.all_sum(matrix).any():
        raise ValueError(f"none of the {len(index)} validation images has a labelled pixel")
    return dict(scores(matrix), images=len(index))


def draw(path, model, source, index, args, device, corruption=None):
    """Image, truth and prediction of up to --save_images of the images `index`, see segmentation.save_pictures."""
    model.eval()
    index = index[::-(-len(index) // args.save_images)]                # evenly spaced: neighbours may be alike
    triples = [[t.cpu() for t in triple] for triple in predictions(model, source, index, args, device, corruption)]
    save_pictures(path, *zip(*triples), source.classes)
    model.train()


def plain(metrics):
    """Metrics for a JSON file: rounded, None where a class has no value."""
    def number(x):
        return None if isinstance(x, float) and math.isnan(x) else round(x, 4)
    return {k: [number(x) for x in v] if isinstance(v, list) else number(v) for k, v in metrics.items()}


def sentence(metrics, num_classes):
    return (f"mean IoU {metrics['mean_iou']:.2f} % of {metrics['classes']} of {num_classes} classes  mean accuracy "
            f"{metrics['mean_accuracy']:.2f} %  pixel accuracy {metrics['pixel_accuracy']:.2f} %")


def table(rows, names, severities):
    """Markdown, `mean accuracy / mean IoU` in per cent: a line per corruption, a column per severity, means of both."""
    cells = {(row["corruption"], row["severity"]): (row["mean_accuracy"], row["mean_iou"]) for row in rows}

    def cell(values):
        values = torch.tensor(values)
        return " / ".join(f"{x:.2f}" for x in values.mean(0).tolist())
    body = [["mean accuracy / mean IoU, %", *(f"severity {s}" for s in severities), "mean"]]
    for title, kinds in [*((name, [name]) for name in names), *[("mean of types", names)] * (len(names) > 1)]:
        columns = [[cells[name, s] for name in kinds] for s in severities]
        body.append([title, *map(cell, columns), cell(sum(columns, []))])
    body.insert(1, ["clean", *[""] * len(severities), cell([cells[None, 0]])])
    widths = [max(map(len, column)) for column in zip(*body)]
    text = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths)) + " |" for row in body]
    return "\n".join([text[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *text[1:]])


def evaluate_only(args, device, rank, world):
    """--eval_only: a row of results.jsonl per corruption and severity, table.md and pictures; rows there are kept."""
    checkpoint = common.read_checkpoint(args.eval_only)
    with common.naming(f"--eval_only {args.eval_only}"):
        model = segmenter_from_checkpoint(checkpoint).to(device)
    source, K = load_data(args, "validation"), model.config.num_classes
    if source.classes != checkpoint["classes"]:
        raise ValueError(f"--data_dir {args.data_dir} has other classes ({', '.join(source.classes[:3])}, ...) than "
                         f"--eval_only {args.eval_only} ({', '.join(checkpoint['classes'][:3])}, ...)")
    check_flags(args, model.config.patch_size)
    if args.limit and args.limit > len(source):
        raise ValueError(f"--limit {args.limit}: there are only {len(source)} images")
    index = data.epoch_order(len(source), 0, seed=0).tolist()[:args.limit] if args.limit else list(range(len(source)))
    names = corruptions.NAMES if "all" in (args.corruptions or ()) else args.corruptions or ()
    todo = [(None, 0), *((name, s) for name in names for s in args.severity)]

    path, weights = Path(args.eval_only), 0
    for tensor in checkpoint["model"].values():
        weights = zlib.crc32(tensor.contiguous().numpy().tobytes(), weights)
    out_dir = Path(args.out_dir) if args.out_dir else (path if path.is_dir() else path.parent) / "eval"
    out = out_dir / "results.jsonl"
    if rank == 0:
        out_dir.mkdir(parents=True, exist_ok=True)
        common.cut_log(out, 0)                                                   # a line that a kill cut short goes
        print(f"{path} | {args.data}, {len(index)} validation images | {world} x {common.describe(device)} | {out}")
    setting = {k: getattr(args, k) for k in ("data", "data_dir", "num_images", "size", "window", "stride", "scales",
                                             "flip", "limit", "amp", "frost_dir")}
    about = dict(weights=f"{weights:08x}", setting=setting)
    stamp = dict(checkpoint=str(path), date=str(date.today()), torch=torch.__version__,
                 hardware=common.describe(device))
    rows = [json.loads(line) for line in out.read_text().splitlines()] if rank == 0 and out.exists() else []
    rows = {(row["corruption"], row["severity"]): row for row in rows if {k: row.get(k) for k in about} == about}
    rows, = common.broadcast([rows])

    for name, severity in tqdm(todo, "evaluating", unit="row", disable=rank > 0 or len(todo) == 1):
        corruption, start = (name, severity) if name else None, time.perf_counter()
        if (name, severity) not in rows:
            result = plain(evaluate(model, source, index, args, device, rank, world, corruption))
            row = dict(corruption=name, severity=severity, **about, **result, **stamp,
                       seconds=round(time.perf_counter() - start, 2))
            rows[name, severity] = row
            if rank == 0:
                common.write_log(out, row)
                if args.save_images:
                    draw(out_dir / (f"{name}_{severity}.png" if name else "clean.png"), model, source,
                         index, args, device, corruption)
        if rank == 0:
            tqdm.write(f"{f'{name} {severity}' if name else 'clean':20}  {sentence(rows[name, severity], K)}")
    if rank == 0:
        text = table([rows[key] for key in todo], names, args.severity if names else [])
        text = (f"{path}: {model.config.attn} Segmenter, {args.data}, {len(index)} images, {rows[None, 0]['classes']} "
                f"of {K} classes, short side {args.size}, window {args.window}, stride {args.stride}, scales "
                f"{' '.join(map(str, args.scales))}{', flipped too' * args.flip}\n\n{text}")
        (out_dir / "table.md").write_text(text + "\n")
        print(f"\n{text}\n\n{len(todo)} rows in {out}; this table in {out_dir / 'table.md'}")


# --- the run ---------------------------------------------------------------------------------------------------------

def start_log(log, step, args, model, device, world, images, notes):
    """Open the log of a run that starts at this step, and say what begins."""
    log.parent.mkdir(parents=True, exist_ok=True)
    common.cut_log(log, step)
    parameters, hardware = sum(p.numel() for p in model.parameters()), common.describe(device)
    common.write_log(log, dict(step=step, args=vars(args), torch=torch.__version__,
                               parameters=parameters, device=hardware, world=world))
    print(f"{args.data}: {images}, {model.config.num_classes} classes | {model.config.attn} "
          f"Segmenter, {parameters:,} parameters | {world} x {hardware} | {log.parent}",
          *notes, sep="\n", flush=True)


def log_evaluation(log, step, epoch, metrics, model, images):
    """Print the metrics; log them and, of some training images, key statistics, once per step."""
    tqdm.write(f"epoch {epoch:5.1f}  validation {sentence(metrics, model.config.num_classes)}")
    if any("eval" in row and row["step"] == step for row in common.read_log(log)):
        return
    keys = common.key_statistics(model.eval(), model.masks, images[:8])
    model.train()
    common.write_log(log, dict(step=step, epoch=epoch, eval=plain(metrics), **keys))


def main():
    args = get_args()
    device, rank, world = common.setup(args.device)
    args.amp = device.type == "cuda" if args.amp is None else args.amp
    if args.amp:
        torch.set_float32_matmul_precision("high")
    if args.eval_only:
        return evaluate_only(args, device, rank, world)
    out_dir = common.choose_out_dir(args, f"seg_{args.data}_{args.attn or 'backbone'}")

    train, val = load_data(args, "training"), load_data(args, "validation")
    classes, n, everything = list(train.classes), len(train), list(range(len(val)))
    if args.batch_size % world:
        raise ValueError(f"--batch_size {args.batch_size} is not divisible by {world} processes")
    model, resumed, notes = build_model(args, classes)
    check_flags(args, model.config.patch_size)
    check_images(train, val, args, device, rank, world)
    model.to(device)
    optimizer = build_optimizer(args, model, resumed)
    step, metrics = (resumed["step"], resumed.get("metrics", {})) if resumed else (0, {})
    net = torch.compile(model) if args.compile else model
    if world > 1:
        net = DDP(net, device_ids=[device.index] if device.type == "cuda" else None)

    steps_per_epoch = math.ceil(n / args.batch_size)
    total = args.epochs * steps_per_epoch
    stop = min(total, args.max_steps or total)
    master, log = rank == 0, out_dir / "log.jsonl"
    if master:
        images = f"{n} training, {len(val)} validation images"
        start_log(log, step, args, model, device, world, images, notes)

    def save(name):
        common.save_checkpoint(out_dir / name, dict(
            task="segmentation", model=model.state_dict(), model_config=asdict(model.config), classes=classes,
            optimizer=optimizer.state_dict(), args=vars(args), step=step, metrics=metrics))

    def due(step):
        return step >= stop or step % (args.eval_every * steps_per_epoch) == 0

    def validate(images):
        metrics = evaluate(model, val, everything, args, device, rank, world)
        if master:
            log_evaluation(log, step, step / steps_per_epoch, metrics, model, images)
        return metrics

    views = TrainingViews(train, args.size, (args.min_scale, args.max_scale), args.seed)
    started = time.time()
    if step and due(step):                       # resumed: was this evaluation cut off by a kill?
        images, _ = next(load_batches(views, args, model, step - 1, step, rank, world))
        metrics = validate(images)
        if master:
            save("last.pt")

    batches = load_batches(views, args, model, step, stop, rank, world)
    pending, saved = [], step             # pending: loss and gradient norm of steps not logged yet
    clock, images_seen = time.time(), 0
    with tqdm(total=stop, initial=step, desc="training", unit="step", disable=not master, dynamic_ncols=True) as bar:
        while step < stop:
            lr = poly_lr(step, total, args.lr, args.min_lr)
            for group in optimizer.param_groups:
                group["lr"] = lr
            images, labels = next(batches)
            torch.manual_seed(hash((args.seed, step, rank)) % 2 ** 63)                   # of drop path and dropout
            pixels = common.all_sum((labels != IGNORE).sum()).clamp(min=1)               # all ignored: the loss is 0
            with common.autocast(device, args.amp):
                logits = net(images)
            loss = F.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="sum") / pixels
            (loss * world).backward()                                                # DDP takes the mean over processes
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip or math.inf)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            pending.append(torch.stack([loss.detach(), norm / world]))
            images_seen += min(args.batch_size, n - step % steps_per_epoch * args.batch_size)
            step += 1
            bar.update()

            epoch, end_of_epoch = step / steps_per_epoch, step % steps_per_epoch == 0 or step == stop
            save_now = end_of_epoch or (args.save_every and step % args.save_every == 0)
            if save_now or step % args.log_every == 0:            # before a save, so that no broken state is kept
                kept = f"{out_dir} holds step {saved}" if saved else "Nothing was saved yet"
                loss, norm = common.collect(pending, step, kept)
                rate = images_seen / (time.time() - clock)
                pending, clock, images_seen = [], time.time(), 0
                bar.set_postfix_str(f"epoch {epoch:.1f} loss {loss:.3f} {rate:.0f} images/s")
                if master:
                    common.write_log(log, dict(step=step, epoch=epoch, loss=loss, grad_norm=norm, lr=lr,
                                               images_per_s=rate))
            if due(step):
                metrics = validate(images)
                clock = time.time()
            if save_now and master:       # last: after a kill before it the evaluation is repeated
                if args.keep_every and epoch % args.keep_every == 0:
                    save(f"epoch_{round(epoch)}.pt")
                save("last.pt")
            saved = step if save_now else saved
    if master:
        if args.save_images:
            draw(out_dir / "pictures.png", model, val, everything, args, device)
            print(f"image, truth, prediction: {out_dir / 'pictures.png'}")
        print(f"{args.data} {model.config.attn}: validation {sentence(metrics, len(classes)).replace('  ', ', ')} "
              f"({len(val)} images) after {step / steps_per_epoch:.1f} epochs, {(time.time() - started) / 60:.1f} "
              f"minutes; checkpoint {out_dir / 'last.pt'}")


if __name__ == "__main__":
    common.run(main)
