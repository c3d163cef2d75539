"""Train Segmenter, a model that labels every pixel, with robust attention.

    python train_seg.py                                   # RPC on rendered scenes
    python train_seg.py --attn symmetric                  # its baseline
    python train_seg.py --model nano                      # from scratch, which takes far longer
    python train_seg.py --data_dir FOLDER                 # your own: images/, annotations/
    python train_seg.py --data camvid --data_dir data/camvid
    torchrun --standalone --nproc_per_node=4 train_seg.py --data ade20k \\
        --data_dir data/ADEChallengeData2016 --backbone out/imagenet_rpc      # the paper's run
    python train_seg.py --resume out/seg_shapes_rpc       # go on exactly where it stopped
    python eval_robust.py --ckpt out/seg_shapes_rpc       # clean, corrupted, multi-scale

Paper: Teo & Nguyen 2024, section 4.1, App. A.3 and E.5 (Table 6); recipe `rstrudel/segmenter`,
which the paper's fork `rachtsy/segm` keeps: SGD with Nesterov momentum, polynomial schedule, 64
epochs of ADE20K. Where this differs: bf16 on GPUs (--no-amp: float32), a loss that is not finite
stops the run, the result is the last epoch.
Stopping and resuming changes no number, nor do more processes but for float noise and the masks of
drop path and dropout, which are per process: random numbers depend on (seed, step or sample) alone.
"""

import argparse
import math
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import common
from attention import ATTENTIONS, FORMS, LAYER_PATTERNS, key_statistics
from common import COUNT, NATURAL, REAL, SHARE, InputError
from data.batches import image_batches
from data.rng import epoch_order
from data.segmentation import TrainingViews, choose, finish_views, load_split, save_pictures
from segmenter import (IGNORE, Segmenter, SegmenterConfig, backbone_settings, evaluate,
                       predictions)
from vit import SIZES

# What --data selects; flags win.
RECIPES = {
    # around weights/shapes_rpc.pt, 5 minutes on 2 CPU cores: mean IoU 75.0 % ± 0.8 (three seeds)
    "shapes": dict(size=32, num_classes=11, epochs=5, batch_size=32, dropout=0.0, num_workers=0),
    # 250 images, 25 minutes on a CPU core: mean IoU 30.5 % (symmetric), 27.9 % (rpc, n_iter 6)
    "camvid": dict(size=160, num_classes=11, epochs=200, batch_size=8, eval_every=20),
    # the paper's run, not run here: mean IoU 34.69 % (rpc), 34.00 % (symmetric) there
    "ade20k": dict(size=512, num_classes=150, epochs=64, batch_size=8, lr=1e-3, weight_decay=0.0,
                   clip=0.0, drop_path=0.1),
    # images of your own; what is None depends on how many there are and how large: folder_recipe
    "folder": dict(size=None, epochs=None, batch_size=None, eval_every=None),
}
# How training images are varied: resized by a factor from, to; colours distorted. Scenes are not.
VIEWS = {"shapes": ((1.0, 1.0), False)}
USUAL_VIEWS = ((0.5, 2.0), True)
# The encoder. --backbone brings all of it; without one, these say what it is. On the scenes a small
# network learns little from scratch in minutes, so there weights/ has the backbone, unless a flag
# of these asks for another encoder.
ENCODER = dict(model="nano", patch_size=16, attn="rpc", rpc_layers="0", n_iter=4, lambd=4.0,
               form="released")
ENCODERS = {"shapes": dict(patch_size=4), "ade20k": dict(model="tiny"),
            "folder": dict(patch_size=None)}


def get_args():
    """Read the flags; see common.parse."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=common.Help,
                                usage="%(prog)s [--flag value ...]", allow_abbrev=False)
    flag = p.add_argument_group("data").add_argument
    flag("--data", choices=RECIPES, help="the recipe; without it rendered scenes (shapes) or, with "
         "--data_dir, images of your own (folder)")
    flag("--data_dir", help="images/*.jpg, annotations/*.png of the same names, a pixel's value is "
         "its class; or training/ and validation/ in each of the two (camvid, ade20k: 0 is no "
         "class, 1 to K are)")
    flag("--ignore", type=common.number(int, 0, 255), nargs="*", help="folder: values of pixels "
         "that belong to no class; None: 255")
    flag("--num_classes", type=common.number(int, 2, 254), help="K; folder: found")
    flag("--num_images", type=COUNT, default=16000, help="shapes: to train on; a tenth to test")
    flag("--num_workers", type=NATURAL, default=min(os.cpu_count() or 1, 10),
         help="decoding processes per GPU")

    flag = p.add_argument_group("model").add_argument
    flag("--backbone", help="checkpoint of train_cls.py, DeiT's file or https address: its "
         "encoder, attention included; None: shapes: weights/shapes_<attn>.pt unless flags ask for "
         "another encoder; else from scratch, rpc in layer 0, 4 steps, lambda 4")
    flag("--model", choices=SIZES, help="width, depth and heads (nano; ade20k: tiny)")
    flag("--patch_size", type=COUNT, help="pixels (16; shapes: 4; folder: as fits)")
    kinds = dict.fromkeys([*ATTENTIONS, *LAYER_PATTERNS])
    common.add_attention(flag, [name for name in kinds if name != "scaled_s"], FORMS)
    p.set_defaults(**dict.fromkeys(ENCODER))                        # they are the backbone's
    flag("--decoder_attn", choices=["softmax", "symmetric", "rpc"], help="of the mask transformer; "
         "rpc: in its block 0, as the paper's code; default: as the encoder, rpc too")
    flag("--drop_path", type=SHARE, default=0.0,
         help="stochastic depth: rate of the encoder's last block")
    flag("--dropout", type=SHARE, default=0.1, help="rate, in the mask transformer")

    flag = p.add_argument_group("training").add_argument
    flag("--epochs", type=COUNT, help="the schedule ends there")
    flag("--batch_size", type=COUNT, help="over all processes")
    flag("--lr", type=REAL, default=2e-3, help="learning rate of the first step")
    flag("--min_lr", type=REAL, default=1e-5,
         help="at the end: lr_k = (lr - min_lr) (1 - k / steps)^0.9 + min_lr")
    flag("--weight_decay", type=REAL, default=0.05, help="of matrices alone")
    flag("--clip", type=REAL, default=1.0, help="largest gradient norm; 0: any")

    flag = p.add_argument_group("views").add_argument
    flag("--size", type=COUNT, help="pixels: side of a crop, and the short side that images are "
         "resized to; a multiple of --patch_size")
    flag("--window", type=COUNT, help="pixels: of an evaluation's sliding window; None: --size")
    flag("--stride", type=COUNT, help="pixels between windows; None: --window")
    flag("--eval_every", type=COUNT, default=2, help="epochs between evaluations")
    flag("--save_images", type=NATURAL, default=4,
         help="at the end, draw image, truth, prediction of up to so many images")
    common.add_running(p, "seg_<data>_<attn>", "--epochs")
    return complete(common.parse(p, RECIPES, "train_seg.py"))


def complete(args):
    """Choose what no flag says: the scenes' backbone, an own folder's recipe, the encoder."""
    if args.data == "shapes" and not args.backbone:
        attn = args.attn or ENCODER["attn"]
        path = Path(__file__).with_name("weights") / f"shapes_{attn}.pt"
        said = [name for name in ENCODER if name != "attn" and getattr(args, name) is not None]
        if path.exists() and not said:
            args.attn, args.backbone = attn, os.path.relpath(path)
    if not args.backbone:
        common.set_missing(args, {**ENCODER, **ENCODERS.get(args.data, {})})
    vars(args).update(choose(args))
    common.set_missing(args, dict(window=args.size))
    common.set_missing(args, dict(stride=args.window))
    if args.stride > args.window:
        raise InputError(f"--stride {args.stride} is more than --window {args.window}")
    return args


# --- data ----------------------------------------------------------------------------------------

def batch_keys(args, n, start, stop, rank, world):
    """Yield this rank's [(position, index), ...] for each step from `start` to `stop`.

    position numbers the samples of the whole run. An epoch's last batch may be short; a process for
    which it holds no image gets its first one, and its loop ignores the labels.
    """
    epoch_steps = math.ceil(n / args.batch_size)
    for step in range(start, stop):
        epoch, i = divmod(step, epoch_steps)
        if i == 0 or step == start:
            order = epoch_order(n, epoch, args.seed).tolist()
        first = i * args.batch_size
        keys = list(enumerate(order[first:first + args.batch_size], epoch * n + first))
        yield keys[rank::world] or keys[:1]


def load_batches(views, args, mean, start, stop, rank, world):
    """Load a step's images (b, 3, S, S) in [0, 1] and labels (b, S, S) int64, on mean's device."""
    n, device = len(views.source), mean.device
    keys = batch_keys(args, n, start, stop, rank, world)
    loader = image_batches(views, keys, args.num_workers, device)
    for images, labels, (position, height, width) in loader:
        images, labels = (t.to(device, non_blocking=True) for t in (images, labels))
        if position[0] % n % args.batch_size != rank:               # a short batch, not for us
            labels.fill_(IGNORE)
        images = finish_views(images, height, width, position, args.seed, mean,
                              VIEWS.get(args.data, USUAL_VIEWS)[1])
        yield images, labels.long()


# --- model and optimiser -------------------------------------------------------------------------

def build_config(args, num_classes, backbone=None):
    """Build SegmenterConfig of the flags, or of the backbone, which flags may not contradict."""
    encoder = {k: getattr(args, k) for k in ("patch_size", "attn") if getattr(args, k) is not None}
    encoder.update(SIZES.get(args.model, {}))
    with common.error_prefix(f"--backbone {args.backbone}"):
        own = backbone_settings(backbone) if backbone else {}
    asked = {**own, **encoder, "pap": {**own.get("pap", {}), **common.pap_of(args)}}
    if args.rpc_layers is not None:
        asked["rpc_layers"] = common.parse_layers(args.rpc_layers, asked["depth"])
    for name in ("size", "window"):
        if getattr(args, name) % asked["patch_size"]:
            raise InputError(f"--{name} {getattr(args, name)} is not a multiple of the patch size "
                             f"{asked['patch_size']}")
    head = dict(num_classes=num_classes, image_size=args.size, drop_path=args.drop_path,
                decoder_attn=args.decoder_attn or "", decoder_dropout=args.dropout)
    config = SegmenterConfig(**asked, **head)
    if backbone and config != (kept := SegmenterConfig(**own, **head)):
        differ = [k for k, v in vars(kept).items() if v != getattr(config, k)]
        raise InputError(f"--backbone {args.backbone} keeps its own encoder; the flags ask for "
                         f"another {', '.join(differ)}")
    return config


def build(args, train, device):
    """Build model and optimiser: new, around --backbone, or those that --resume names.

    Also returns the checkpoint of --resume, {} without one.
    """
    checkpoint = common.load_run(args, classes=list(train.classes),
                                 training_images=len(train))
    torch.manual_seed(args.seed)
    if checkpoint:
        model = Segmenter(common.stored_config(checkpoint, SegmenterConfig))
    elif args.backbone:
        from weights import load_weights
        backbone = common.load(args.backbone)
        model = Segmenter(build_config(args, len(train.classes), backbone))
        with common.error_prefix(f"--backbone {args.backbone}"):
            load_weights(model.encoder, backbone, mode="bilinear")
        common.print0(f"encoder from {args.backbone}")
    else:
        model = Segmenter(build_config(args, len(train.classes)))
    model.to(device)
    # To freeze a part, say so here, `model.encoder.requires_grad_(False)`: --resume passes by.

    groups = common.param_groups(model, args.weight_decay, also=("proj_patch", "proj_classes"))
    optimizer = torch.optim.AdamW(groups, lr=args.lr, fused=device.type == "cuda")
    if args.data == "ade20k":                                       # the paper's, timm's "sgd"
        optimizer = torch.optim.SGD(groups, lr=args.lr, momentum=0.9, nesterov=True,
                                    fused=device.type == "cuda")
    if checkpoint:
        common.restore(checkpoint, model, optimizer)
    return model, optimizer, checkpoint


def poly_lr(step, total, lr, min_lr):
    """Schedule lr_k = (lr - min_lr) (1 - k / total)^0.9 + min_lr for update k = 0, 1, ..."""
    return (lr - min_lr) * (1 - min(step / total, 1)) ** 0.9 + min_lr


# --- evaluation ----------------------------------------------------------------------------------

def views_of(args):
    """Say how an evaluation looks at images: arguments of segmenter.evaluate."""
    return dict(size=args.size, window=args.window, stride=args.stride, amp=args.amp,
                num_workers=args.num_workers)


def draw_pictures(path, model, val, args):
    """Draw up to --save_images images, evenly spaced, beside the truth and the prediction."""
    index = range(0, len(val), math.ceil(len(val) / args.save_images))
    save_pictures(path, predictions(model.eval(), val, index, **views_of(args)), val.classes)
    common.print0(f"image, truth, prediction: {path}")


# --- the run -------------------------------------------------------------------------------------

def main():
    # Flags, data, processes, then the model: a new one, or the one that --resume names.
    args = get_args()
    device, rank, world, out_dir = common.start(args, f"seg_{args.data}_{args.attn or 'backbone'}")
    train, val = load_split(args, "training"), load_split(args, "validation")
    common.print0(f"{args.data}: {len(train)} training, {len(val)} validation images, "
                  f"{len(train.classes)} classes")
    model, optimizer, checkpoint = build(args, train, device)
    net = common.wrap(model, device, world, args.compile)
    first, metrics = checkpoint.get("step", 0), checkpoint.get("metrics", {})
    log = common.begin(args, out_dir, first, model, device, rank, world,
                       training_images=len(train))

    # An epoch sees every image. --max_steps stops early, on the schedule of --epochs.
    epoch_steps = math.ceil(len(train) / args.batch_size)
    total = args.epochs * epoch_steps
    stop = max(first, min(total, args.max_steps or total))
    views = TrainingViews(train, args.size, VIEWS.get(args.data, USUAL_VIEWS)[0], args.seed)
    batches = load_batches(views, args, model.encoder.mean, first, stop, rank, world)
    bar = common.progress(first, stop, rank)
    began = clock = time.time()
    pending = []
    for step in bar:
        # The learning rate falls from the first step on.
        lr = poly_lr(step, total, args.lr, args.min_lr)
        for group in optimizer.param_groups:
            group["lr"] = lr

        # Forward. The loss is the mean over the labelled pixels of all processes. Dropout draws
        # from a seed of this step, so a resumed run draws the same.
        images, labels = next(batches)
        torch.manual_seed(common.seed_of(args.seed, step, rank))
        pixels = common.all_sum((labels != IGNORE).sum()).clamp(min=1)  # all ignored: the loss is 0
        with common.autocast(device, args.amp):
            logits = net(images)
        loss = F.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="sum")
        loss = loss / pixels

        # Backward, clip the gradient, take the step. Processes get the mean of their gradients.
        (loss * world).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip or math.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        pending.append(torch.stack([loss.detach(), norm / world]))  # stays on the device

        # What is due? By the step alone, so that all processes agree: an evaluation every few
        # epochs and at the end; a row of the log and a checkpoint then, after every epoch and every
        # --save_every steps; further rows every --log_every steps.
        done, epoch = step + 1, (step + 1) / epoch_steps
        evaluating = done == stop or common.every(done, args.eval_every * epoch_steps)
        saving = evaluating or common.every(done, epoch_steps, args.save_every)

        # Log the means since the last row. Reading them waits for the device.
        if saving or common.every(done, args.log_every):
            loss, norm = common.mean_of(pending, done)
            seconds = (time.time() - clock) / len(pending)
            rate = args.batch_size / seconds
            log.append(dict(step=done, loss=loss, grad_norm=norm, images_per_s=rate, epoch=epoch,
                            lr=lr))
            common.show_progress(bar, done, loss, rate, "images", seconds)
            pending, clock = [], time.time()

        # Evaluate, and ask on this step's images whether the robust part acted.
        metrics = {}
        if evaluating:
            metrics, _ = evaluate(model, val, **views_of(args), rank=rank, world=world,
                                  progress="evaluating")
            keys = key_statistics(model, model.masks, images[:8])
            log.append(dict(step=done, eval=metrics, epoch=epoch, **keys))
            common.print0(common.line(done, loss, metrics))
            clock = time.time()

        # Save; only rank 0 does, so here a clock may decide, too. This comes last, so a run killed
        # earlier repeats the evaluation.
        if saving and rank == 0:
            common.save(out_dir / "last.pt", common.state_of(
                "train_seg.py", model, optimizer, args, done, classes=list(train.classes),
                training_images=len(train), metrics=metrics))

    # Pictures, and the result, where the last step was evaluated.
    if rank == 0 and args.save_images:
        draw_pictures(out_dir / "pictures.png", model, val, args)
    if metrics:
        minutes = (time.time() - began) / 60
        common.print0(f"{args.data} {model.config.attn}: validation mean IoU "
                      f"{metrics['mean_iou']:.2f} % of {metrics['classes']} classes, mean accuracy "
                      f"{metrics['mean_accuracy']:.2f} % ({metrics['images']} images) after "
                      f"{stop / epoch_steps:.1f} epochs, {minutes:.1f} minutes",
                      f"next: python eval_robust.py --ckpt {out_dir}")


if __name__ == "__main__":
    common.run(main)
