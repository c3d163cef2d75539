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
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F

import common
from attention import ATTENTIONS, LAYER_PATTERNS, key_statistics
from common import COUNT, NATURAL, REAL, SHARE, InputError
from data.batches import image_batches
from data.rng import epoch_order
from data.segmentation import TrainingViews, finish_views, load_split, save_pictures
from robust.iou import evaluate, predictions
from segmenter import (IGNORE, Segmenter, SegmenterConfig, backbone_settings,
                       segmenter_from_checkpoint)
from vit import SIZES

# What --data selects; flags win.
RECIPES = {
    # around weights/shapes_rpc.pt, 5 minutes on 2 CPU cores: mean IoU 75.0 % ± 0.8 (three seeds)
    "shapes": dict(size=32, num_classes=11, epochs=5, batch_size=32, dropout=0.0, min_scale=1.0,
                   max_scale=1.0, distort=False, num_workers=0),
    # 250 images, 25 minutes on a CPU core: mean IoU 30.5 % (symmetric), 27.9 % (rpc, n_iter 6)
    "camvid": dict(size=160, num_classes=11, epochs=200, batch_size=8, eval_every=20),
    # the paper's run, not run here: mean IoU 34.69 % (rpc), 34.00 % (symmetric) there
    "ade20k": dict(size=512, num_classes=150, epochs=64, batch_size=8, optimizer="sgd", lr=1e-3,
                   weight_decay=0.0, clip=0.0, drop_path=0.1),
    # images of your own; what is None depends on how many there are and how large: folder_recipe
    "folder": dict(size=None, epochs=None, batch_size=None, eval_every=None),
}
# The encoder. --backbone brings all of it; without one, these say what it is. On the scenes a small
# network learns little from scratch in minutes, so there weights/ has the backbone, unless a flag
# of these asks for another encoder.
ENCODER = dict(model="nano", patch_size=16, attn="rpc", rpc_layers="0", n_iter=4, lambd=4.0,
               form="released")
ENCODERS = {"shapes": dict(patch_size=4), "ade20k": dict(model="tiny"),
            "folder": dict(patch_size=None)}
# What --resume refuses to change: it would be another run.
FIXED = (*ENCODER, "backbone", "decoder", "decoder_attn", "size", "num_classes", "data",
         "num_images", "optimizer", "drop_path", "dropout", "min_scale", "max_scale", "distort",
         "batch_size", "seed")


def get_args():
    """Read the flags; see common.parse."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=common.Help,
                                allow_abbrev=False)
    boolean = argparse.BooleanOptionalAction
    flag = p.add_argument_group("data").add_argument
    flag("--data", choices=RECIPES, help="the recipe; without it rendered scenes (shapes) or, with "
         "--data_dir, images of your own (folder)")
    flag("--data_dir", type=common.path, help="images/*.jpg, annotations/*.png (0: no class, "
         "ignored; 1 to K), or training/ and validation/ in each of the two, as in ADE20K")
    flag("--num_classes", type=COUNT, help="K; folder: found")
    flag("--num_images", type=COUNT, default=16000, help="shapes: to train on; a tenth to test")
    flag("--num_workers", type=NATURAL, default=min(os.cpu_count() or 1, 10),
         help="decoding processes per GPU")

    flag = p.add_argument_group("model").add_argument
    flag("--backbone", type=common.path, help="checkpoint of train_cls.py, DeiT's file or https "
         "address: its encoder, attention included; None: shapes: weights/shapes_<attn>.pt unless "
         "flags ask for another encoder; else from scratch, rpc in layer 0, 4 steps, lambda 4")
    flag("--model", choices=SIZES, help="width, depth and heads (nano; ade20k: tiny)")
    flag("--patch_size", type=COUNT, help="pixels (16; shapes: 4; folder: as fits)")
    kinds = dict.fromkeys([*ATTENTIONS, *LAYER_PATTERNS])
    common.add_attention(flag, [name for name in kinds if name != "scaled_s"])
    p.set_defaults(**dict.fromkeys(ENCODER))                        # they are the backbone's
    flag("--decoder", choices=["mask", "linear"], default="mask", help="mask transformer, "
         "or one linear layer")
    flag("--decoder_attn", choices=["softmax", "symmetric", "rpc"], help="of the mask transformer; "
         "rpc: in its block 0, as the paper's code; default: as the encoder, rpc too")
    flag("--drop_path", type=SHARE, default=0.0,
         help="stochastic depth: rate of the encoder's last block")
    flag("--dropout", type=SHARE, default=0.1, help="rate, in the mask transformer")

    flag = p.add_argument_group("training").add_argument
    flag("--epochs", type=COUNT, help="the schedule ends there")
    flag("--batch_size", type=COUNT, help="over all processes")
    flag("--optimizer", choices=["sgd", "adamw"], default="adamw",
         help="sgd: Nesterov momentum 0.9; adamw: from scratch")
    flag("--lr", type=REAL, default=2e-3, help="learning rate of the first step")
    flag("--min_lr", type=REAL, default=1e-5,
         help="at the end: lr_k = (lr - min_lr) (1 - k / steps)^0.9 + min_lr")
    flag("--weight_decay", type=REAL, default=0.05,
         help="of matrices; 1-d tensors, positions, class tokens have none")
    flag("--clip", type=REAL, default=1.0, help="largest gradient norm; 0: any")
    add_views(p)
    common.add_running(p, "seg_<data>_<attn>", "--epochs")

    args = common.parse(p, RECIPES, "train_seg.py", FIXED)
    if args.data == "shapes" and not args.backbone:
        args.attn, args.backbone = shipped(args)
    if not args.backbone:
        common.fill(args, {**ENCODER, **ENCODERS.get(args.data, {})})
    check_flags(args)
    return args


def shipped(args):
    """Find (attention, path) of the scenes' classifier in weights/; (as it was, None) if none fits.

    It fits if no flag but --attn says what the encoder is.
    """
    attn = args.attn or ENCODER["attn"]
    path = Path(__file__).with_name("weights") / f"shapes_{attn}.pt"
    said = [name for name in ENCODER if name != "attn" and getattr(args, name) is not None]
    return (args.attn, None) if said or not path.exists() else (attn, os.path.relpath(path))


def add_views(p):
    """Add how images are looked at: in training, in evaluations, at the end."""
    flag, scale = p.add_argument_group("views").add_argument, common.number(float, 0.01)
    flag("--size", type=COUNT, help="pixels: side of a crop, and the short side that images are "
         "resized to; a multiple of --patch_size")
    flag("--min_scale", type=scale, default=0.5,
         help="images are resized to a short side of --size times a factor from this")
    flag("--max_scale", type=scale, default=2.0, help="to this")
    flag("--distort", action=argparse.BooleanOptionalAction, default=True,
         help="random brightness, contrast, saturation, hue")
    flag("--window", type=COUNT, help="pixels: of an evaluation's sliding window; None: --size")
    flag("--stride", type=COUNT, help="pixels between windows; None: --window")
    flag("--eval_every", type=COUNT, default=2, help="epochs between evaluations")
    flag("--keep_every", type=NATURAL, default=0, help="epochs; also keep epoch_<n>.pt; 0: none")
    flag("--save_images", type=NATURAL, default=4,
         help="at the end, draw image, truth, prediction of up to so many images")


def check_flags(args):
    """Raise ValueError unless the flags make sense together."""
    if args.data == "shapes" and args.data_dir:
        raise InputError(f"--data_dir {args.data_dir} is not read: --data shapes renders its "
                         f"images; choose another --data")
    if args.max_scale < args.min_scale:
        raise InputError(f"--min_scale {args.min_scale} is more than --max_scale {args.max_scale}")
    if args.min_lr > args.lr:
        raise InputError(f"--min_lr {args.min_lr} is above --lr {args.lr}")


# --- data ----------------------------------------------------------------------------------------

def load_data(args):
    """Read (training set, validation set); says what was found, and chooses for a folder.

    Before common.start, which compares the flags with those of the run that torchrun restarts.
    """
    if args.data == "folder":
        from data.labelled import folder_recipe, load_folder
        train, val, found = load_folder(args.data_dir, args.num_classes)
        args.num_classes = len(train.classes)
        chosen = folder_recipe(len(train), sorted(train.sides)[len(train) // 2])
        if args.backbone:
            del chosen["patch_size"]                                # is the backbone's
        common.fill(args, chosen)
        words = " ".join(f"{name}={getattr(args, name)}" for name in chosen)
        found += f"\nchosen for them: {words}"
    else:
        train, val = load_split(args, "training"), load_split(args, "validation")
        found = f"{len(train)} training, {len(val)} validation images, {len(train.classes)} classes"
    common.fill(args, dict(window=args.size))
    common.fill(args, dict(stride=args.window))
    common.say(f"{args.data}: {found}")
    return train, val


def batch_keys(args, n, start, stop, rank, world):
    """Deal out [(position, index), ...] of this process for each step from `start` to `stop`.

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
        images = finish_views(images, height, width, position, args.seed, mean, args.distort)
        yield images, labels.long()


def check_setup(args, patch_size, train):
    """Raise ValueError for views that do not fit, or a loss that would be 0 in every step."""
    if args.window % patch_size:
        raise InputError(f"--window {args.window} is not a multiple of the patch size {patch_size}")
    if args.stride > args.window:
        raise InputError(f"--stride {args.stride} is more than --window {args.window}")
    if not any((train[i][1] != IGNORE).any() for i in range(len(train))):
        raise InputError(f"none of the {len(train)} training images has a labelled pixel")


# --- model and optimiser -------------------------------------------------------------------------

def build_config(args, num_classes, backbone=None):
    """Build SegmenterConfig of the flags, or of the backbone, which flags may not contradict."""
    head = dict(num_classes=num_classes, image_size=args.size, drop_path=args.drop_path,
                decoder=args.decoder, decoder_attn=args.decoder_attn or "",
                decoder_dropout=args.dropout)
    pap = common.pap_of(args)
    encoder = {k: getattr(args, k) for k in ENCODER
               if k not in pap and getattr(args, k) is not None}
    size = SIZES[encoder.pop("model")] if "model" in encoder else {}
    known = encoder if backbone is None else backbone_settings(backbone)
    if args.size % known["patch_size"]:
        raise InputError(f"--size {args.size} is not a multiple of the patch size "
                         f"{known['patch_size']}")
    if backbone is None:
        layers = common.parse_layers(encoder.pop("rpc_layers"), size["depth"])
        return SegmenterConfig(**size, **encoder, rpc_layers=layers, pap=pap, **head)
    config = SegmenterConfig(**known, **head)
    if "rpc_layers" in encoder:
        encoder["rpc_layers"] = common.parse_layers(encoder["rpc_layers"], config.depth)
    own = {**vars(config), **config.pap}
    for name, value in {**size, **encoder, **pap}.items():
        if own[name] != value:
            raise InputError(f"it was trained with {name}={own[name]!r} and keeps its own "
                             f"encoder; the flags say {value!r}")
    return config


def build_optimizer(args, model):
    """Build SGD with Nesterov momentum, as timm's "sgd", or AdamW."""
    kept = ("pos_embed", "cls_token", "cls_emb")
    groups = common.param_groups(model, args.weight_decay, no_decay=kept)
    fused = next(model.parameters()).is_cuda
    if args.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=args.lr, momentum=0.9, nesterov=True, fused=fused)
    return torch.optim.AdamW(groups, lr=args.lr, fused=fused)


def build(args, train, device):
    """Build model and optimiser: new, around --backbone, or those that --resume names.

    Also returns the step to start at and the metrics of an evaluation there, or {}.
    """
    torch.manual_seed(args.seed)
    step, metrics, classes = 0, {}, list(train.classes)
    if args.resume:
        checkpoint = common.load_run(args.resume, "train_seg.py", "model_config", "metrics",
                                     "classes", classes=classes, training_images=len(train))
        step, metrics = checkpoint["step"], checkpoint["metrics"]
        with common.naming(f"--resume {args.resume}"):
            model = segmenter_from_checkpoint(checkpoint).train()
    elif args.backbone:
        from weights import load_weights
        backbone = common.load(args.backbone)
        with common.naming(f"--backbone {args.backbone}"):
            model = Segmenter(build_config(args, len(classes), backbone))
            load_weights(model.encoder, backbone, mode="bilinear")
        common.say(f"encoder from {args.backbone}")
    else:
        model = Segmenter(build_config(args, len(classes)))

    optimizer = build_optimizer(args, model.to(device))
    if args.resume:
        with common.naming(f"--resume {args.resume}"):
            optimizer.load_state_dict(checkpoint["optimizer"])
        optimizer.param_groups[0]["weight_decay"] = args.weight_decay   # the setting may be new
    return model, optimizer, step, metrics


def poly_lr(step, total, lr, min_lr):
    """Schedule lr_k = (lr - min_lr) (1 - k / total)^0.9 + min_lr for update k = 0, 1, ..."""
    return (lr - min_lr) * (1 - min(step / total, 1)) ** 0.9 + min_lr


# --- evaluation ----------------------------------------------------------------------------------

def views_of(args):
    """Say how an evaluation looks at images: arguments of iou.evaluate."""
    return dict(size=args.size, window=args.window, stride=args.stride, amp=args.amp,
                num_workers=args.num_workers)


def draw_pictures(path, model, val, args):
    """Draw up to --save_images images, evenly spaced, beside the truth and the prediction."""
    index = range(0, len(val), math.ceil(len(val) / args.save_images))
    save_pictures(path, predictions(model.eval(), val, index, **views_of(args)), val.classes)
    common.say(f"image, truth, prediction: {path}")


# --- the run -------------------------------------------------------------------------------------

def state_of(model, optimizer, train, args, step, metrics):
    """Make the checkpoint after `step` steps. metrics: of an evaluation at this step, or {}."""
    return dict(task="segmentation", classes=list(train.classes), args=vars(args), step=step,
                training_images=len(train), model=model.state_dict(),
                model_config=asdict(model.config), optimizer=optimizer.state_dict(),
                metrics=metrics)


def main():
    # Flags, data, processes, then the model: a new one, or the one that --resume names.
    args = get_args()
    train, val = load_data(args)
    device, rank, world, out_dir = common.start(args, f"seg_{args.data}_{args.attn or 'backbone'}")
    model, optimizer, first, metrics = build(args, train, device)
    check_setup(args, model.config.patch_size, train)
    net = common.wrap(model, device, world, args.compile)
    log = common.begin(args, out_dir, first, model, device, rank, world,
                       training_images=len(train))

    # An epoch sees every image. --max_steps stops early, on the schedule of --epochs.
    epoch_steps = math.ceil(len(train) / args.batch_size)
    total = args.epochs * epoch_steps
    stop = max(first, min(total, args.max_steps or total))
    views = TrainingViews(train, args.size, (args.min_scale, args.max_scale), args.seed)
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

        # What is due? An evaluation every few epochs and at the end; a checkpoint after it, after
        # every epoch and every --save_every steps.
        done, epoch = step + 1, (step + 1) / epoch_steps
        epoch_ends = common.every(done, epoch_steps)
        evaluating = done == stop or common.every(done, args.eval_every * epoch_steps)
        saving = evaluating or epoch_ends or common.every(done, args.save_every)

        # Log the means since the last row. Reading them waits for the device.
        if saving or common.every(done, args.log_every):
            loss, norm = common.mean_of(pending, done)
            rate = len(pending) * args.batch_size / (time.time() - clock)
            log.append(dict(step=done, loss=loss, grad_norm=norm, images_per_s=rate, epoch=epoch,
                            lr=lr))
            bar.set_postfix_str(f"loss {loss:.3f} {rate:.0f} images/s")
            pending, clock = [], time.time()

        # Evaluate, and ask on this step's images whether the robust part acted.
        metrics = {}
        if evaluating:
            metrics, _ = evaluate(model, val, **views_of(args), rank=rank, world=world,
                                  progress="evaluating")
            keys = key_statistics(model, model.masks, images[:8])
            log.append(dict(step=done, eval=metrics, epoch=epoch, **keys))
            common.say(common.line(done, loss, metrics))
            clock = time.time()

        # Save. last.pt is written last, so a run killed earlier repeats the evaluation.
        if saving and rank == 0:
            checkpoint = state_of(model, optimizer, train, args, done, metrics)
            if epoch_ends and common.every(done // epoch_steps, args.keep_every):
                common.save(out_dir / f"epoch_{done // epoch_steps}.pt", checkpoint)
            common.save(out_dir / "last.pt", checkpoint)

    # Pictures, and the result, where the last step was evaluated.
    if rank == 0 and args.save_images:
        draw_pictures(out_dir / "pictures.png", model, val, args)
    if metrics:
        minutes = (time.time() - began) / 60
        common.say(f"{args.data} {model.config.attn}: validation mean IoU "
                   f"{metrics['mean_iou']:.2f} % of {metrics['classes']} classes, mean accuracy "
                   f"{metrics['mean_accuracy']:.2f} % ({metrics['images']} images) after "
                   f"{stop / epoch_steps:.1f} epochs, {minutes:.1f} minutes",
                   f"next: python eval_robust.py --ckpt {out_dir}")


if __name__ == "__main__":
    common.run(main)
