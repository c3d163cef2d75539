"""Train Segmenter, a model that labels every pixel, with robust attention.

    python train_seg.py                                   # RPC on rendered scenes
    python train_seg.py --attn symmetric                  # its baseline
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

import math
import os
import time
from dataclasses import asdict

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from tqdm import tqdm

import common
from data.files import image_batches
from data.rng import epoch_order
from common import COUNT, NATURAL, REAL, SHARE
from data.segmentation import folder_recipe, load_folder, load_split, save_pictures
from data.segmentation import TrainingViews, finish_views
from robust.iou import evaluate, predictions
from segmenter import (IGNORE, Segmenter, SegmenterConfig, backbone_settings, config_from_backbone,
                       load_backbone, segmenter_from_checkpoint)
from vit import RPC_KINDS, SIZES

# What --data selects; flags and --set win.
RECIPES = {
    "any": dict(optimizer="adamw", lr=2e-3, min_lr=1e-5, weight_decay=0.05, clip=1.0, drop_path=0.0,
                dropout=0.1, min_scale=0.5, max_scale=2.0, distort=1, eval_every=2, log_every=20,
                save_every=0, keep_every=0, save_images=4,
                num_workers=min(os.cpu_count() or 1, 10)),
    # 4 minutes on 2 CPU cores: mean IoU 34 to 58 % (rpc; by number of threads)
    "shapes": dict(size=32, num_classes=11, epochs=5, batch_size=32, dropout=0.0, min_scale=1.0,
                   max_scale=1.0, distort=0, num_workers=0),
    # 250 images, 25 minutes on a CPU core: mean IoU 30.5 % (symmetric), 27.9 % (rpc, n_iter 6)
    "camvid": dict(size=160, num_classes=11, epochs=200, batch_size=8, eval_every=20),
    # the paper's run, not run here: mean IoU 34.69 % (rpc), 34.00 % (symmetric) there
    "ade20k": dict(size=512, num_classes=150, epochs=64, batch_size=8, optimizer="sgd", lr=1e-3,
                   weight_decay=0.0, clip=0.0, drop_path=0.1),
    # images of your own; what is None depends on how many there are and how large: folder_recipe
    "folder": dict(size=None, epochs=None, batch_size=None, eval_every=None),
}
# The encoder. --backbone brings all of it; without one, these say what it is.
ENCODERS = {
    "any": dict(model="nano", patch_size=16, attn="rpc", rpc_layers="0", n_iter=4, lambd=4.0,
                form="released"),
    "shapes": dict(patch_size=4), "camvid": {}, "ade20k": dict(model="tiny"),
    "folder": dict(patch_size=None),
}
ENCODER = tuple(ENCODERS["any"])
# Numbers of a recipe that have no flag of their own.
SCALE = common.number(float, 0.01)
SETTINGS = dict(
    optimizer=(common.choice("sgd", "adamw"), "sgd: Nesterov momentum 0.9; adamw: from scratch"),
    min_lr=(REAL, "at the end: lr_k = (lr - min_lr) (1 - k / steps)^0.9 + min_lr"),
    weight_decay=(REAL, "of matrices; 1-d tensors, positions, class tokens have none"),
    drop_path=(SHARE, "stochastic depth rate of the encoder's last block"),
    dropout=(SHARE, "rate, in the mask transformer"),
    min_scale=(SCALE, "images are resized to a short side of --size times a factor from this"),
    max_scale=(SCALE, "to this"),
    distort=(common.number(int, 0, 1), "1: random brightness, contrast, saturation, hue"),
    save_images=(NATURAL, "at the end, draw image, truth, prediction of up to so many images"),
    eval_every=(COUNT, "epochs between evaluations"),
    keep_every=(NATURAL, "epochs; also keep epoch_<n>.pt"),
    **common.SETTINGS)
# What --resume refuses to change: it would be another run.
FIXED = (*ENCODER, "backbone", "decoder", "size", "num_classes", "data", "num_images", "optimizer",
         "drop_path", "dropout", "min_scale", "max_scale", "distort", "batch_size", "seed")


def get_args():
    """The flags; see common.parse."""
    p = common.parser(__doc__, RECIPES, SETTINGS)

    flag = p.add_argument_group("data").add_argument
    flag("--data", choices=list(RECIPES)[1:], help="the recipe; default: shapes, rendered scenes, "
         "or, with --data_dir, folder: images of your own")
    flag("--data_dir", help="images/*.jpg, annotations/*.png (0: no class, ignored; 1 to K), or "
         "training/ and validation/ in each of the two, as in ADE20K")
    flag("--num_classes", type=COUNT, help="K; folder: found")
    flag("--num_images", type=COUNT, default=16000, help="shapes: to train on; a tenth to test")
    flag("--num_workers", type=NATURAL, help="decoding processes per GPU")

    flag = p.add_argument_group("model").add_argument
    flag("--backbone", help="checkpoint of train_cls.py, DeiT's file or https address: its "
         "encoder, attention included; without it: from scratch, rpc in layer 0, 4 steps, lambda 4")
    flag("--model", choices=SIZES, help="width, depth and heads (nano; ade20k: tiny)")
    flag("--patch_size", type=COUNT, help="pixels (16; shapes: 4; folder: as fits)")
    common.add_attention(flag, ["softmax", "symmetric", "scaled_alpha", *RPC_KINDS])
    flag("--decoder", choices=["mask", "linear"], default="mask", help="mask transformer, "
         "symmetric where the encoder is, never RPC; or one linear layer")

    flag = p.add_argument_group("training").add_argument
    flag("--size", type=COUNT, help="pixels: side of a crop, and the short side that images are "
         "resized to; a multiple of --patch_size")
    flag("--epochs", type=COUNT, help="the schedule ends there")
    flag("--batch_size", type=COUNT, help="over all processes")
    flag("--lr", type=REAL, help="learning rate of the first step")
    flag("--window", type=COUNT, help="pixels: of an evaluation's sliding window; default: --size")
    flag("--stride", type=COUNT, help="pixels between windows; default: --window")
    common.add_running(p, "seg_<data>_<attn>", "--epochs")
    args = common.parse(p, RECIPES, SETTINGS, "train_seg.py", FIXED)
    if not args.backbone:
        common.fill(args, {**ENCODERS["any"], **ENCODERS[args.data]})
    if args.max_scale < args.min_scale:
        raise ValueError(f"--set min_scale={args.min_scale} is more than "
                         f"max_scale={args.max_scale}")
    if args.min_lr > args.lr:
        raise ValueError(f"--set min_lr={args.min_lr} is above --lr {args.lr}")
    return args


# --- data ----------------------------------------------------------------------------------------

def load_data(args, rank):
    """(training set, validation set); says what was found, and chooses for a folder.

    Before common.start, which compares the flags with those of the run that torchrun restarts.
    """
    if args.data == "folder":
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
    if rank == 0:
        print(f"{args.data}: {found}", flush=True)
    return train, val


def batch_keys(args, n, start, stop, rank, world):
    """[(position, index), ...] of this process for each step from `start` to `stop`.

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
    """Per step: images (b, 3, S, S) float in [0, 1] and labels (b, S, S) int64 on mean's device."""
    n, device = len(views.source), mean.device
    keys = batch_keys(args, n, start, stop, rank, world)
    loader = image_batches(views, keys, args.num_workers, device)
    for images, labels, (position, height, width) in loader:
        images, labels = (t.to(device, non_blocking=True) for t in (images, labels))
        if position[0] % n % args.batch_size != rank:               # a short batch, not for us
            labels.fill_(IGNORE)
        images = finish_views(images, height, width, position, args.seed, mean, args.distort)
        yield images, labels.long()


# --- before the first step: what would go wrong after hours --------------------------------------

def check(args, patch_size, train, val, device, rank, world):
    """Reads every validation image, and training images until one has a label.

    Raises ValueError for what does not fit, or that names the file, or the split without a labelled
    pixel: it would train at a loss of 0.
    """
    if args.batch_size % world:
        raise ValueError(f"--batch_size {args.batch_size} is not divisible by {world} processes")
    if args.window % patch_size:
        raise ValueError(f"--window {args.window} is not a multiple of the patch size {patch_size}")
    if args.stride > args.window:
        raise ValueError(f"--stride {args.stride} is more than --window {args.window}")

    if not any((train[i][1] != IGNORE).any() for i in range(len(train))):
        raise ValueError(f"none of the {len(train)} training images has a labelled pixel")
    mine = range(rank, len(val), world)
    loader = DataLoader(val, sampler=mine, batch_size=None, num_workers=args.num_workers)
    bar = tqdm(loader, "reading validation images", len(mine), leave=False, disable=rank > 0)
    count = sum(bool((label != IGNORE).any()) for _, label in bar)
    if not common.all_sum(torch.tensor(count, device=device)):
        raise ValueError(f"none of the {len(val)} validation images has a labelled pixel")


# --- model and optimiser -------------------------------------------------------------------------

def build_config(args, num_classes, backbone=None):
    """SegmenterConfig of the flags, or of the backbone, which flags may not contradict."""
    head = dict(num_classes=num_classes, image_size=args.size, drop_path=args.drop_path,
                decoder=args.decoder, decoder_dropout=args.dropout)
    encoder = {k: getattr(args, k) for k in ENCODER if getattr(args, k) is not None}
    size = SIZES[encoder.pop("model")] if "model" in encoder else {}
    patch = (encoder if backbone is None else backbone_settings(backbone))["patch_size"]
    if args.size % patch:
        raise ValueError(f"--size {args.size} is not a multiple of the patch size {patch}")
    if backbone is None:
        layers = common.parse_layers(encoder.pop("rpc_layers"), size["depth"])
        return SegmenterConfig(**size, **encoder, rpc_layers=layers, **head)
    config = config_from_backbone(backbone, **head)
    if "rpc_layers" in encoder:
        encoder["rpc_layers"] = common.parse_layers(encoder["rpc_layers"], config.depth)
    for name, value in {**size, **encoder}.items():
        if getattr(config, name) != value:
            raise ValueError(f"it was trained with {name}={getattr(config, name)!r} and keeps its "
                             f"own encoder; the flags say {value!r}")
    return config


def build_optimizer(args, model):
    """SGD with Nesterov momentum, as timm's "sgd", or AdamW."""
    kept = ("pos_embed", "cls_token", "cls_emb")
    groups = common.param_groups(model, args.weight_decay, no_decay=kept)
    fused = next(model.parameters()).is_cuda
    if args.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=args.lr, momentum=0.9, nesterov=True, fused=fused)
    return torch.optim.AdamW(groups, lr=args.lr, fused=fused)


def build(args, classes, device):
    """Model, optimiser, the step to start at, notes for the reader."""
    torch.manual_seed(args.seed)
    step, notes = 0, []
    if args.resume:
        checkpoint = common.read_run(args, "train_seg.py", "classes", "model_config",
                                     classes=classes)
        with common.naming(f"--resume {args.resume}"):
            model, step = segmenter_from_checkpoint(checkpoint).train(), checkpoint["step"]
    elif args.backbone:
        backbone, notes = common.load(args.backbone), [f"encoder from {args.backbone}"]
        with common.naming(f"--backbone {args.backbone}"):
            model = Segmenter(build_config(args, len(classes), backbone))
            load_backbone(model, backbone)
    else:
        model = Segmenter(build_config(args, len(classes)))

    optimizer = build_optimizer(args, model.to(device))
    if args.resume:
        with common.naming(f"--resume {args.resume}"):
            optimizer.load_state_dict(checkpoint["optimizer"])
        optimizer.param_groups[0]["weight_decay"] = args.weight_decay   # the setting may be new
    return model, optimizer, step, notes


def poly_lr(step, total, lr, min_lr, power=0.9):
    """lr_k = (lr - min_lr) (1 - k / total)^0.9 + min_lr for update k = 0, 1, ...: no warm-up."""
    return (lr - min_lr) * (1 - min(step / total, 1)) ** power + min_lr


# --- evaluation ----------------------------------------------------------------------------------

def views_of(args):
    """How images are looked at in an evaluation: arguments of iou.evaluate."""
    return dict(size=args.size, window=args.window, stride=args.stride, amp=args.amp,
                num_workers=args.num_workers)


def score(model, val, views, args, step, rank, world):
    """An evaluation, and what else its row holds: did the robust part act on the last batch?"""
    how = views_of(args)
    metrics, _ = evaluate(model, val, **how, rank=rank, world=world, progress="evaluating")
    images, _ = next(load_batches(views, args, model.encoder.mean, step - 1, step, rank, world))
    keys = common.key_statistics(model, model.masks, images[:8])
    return metrics, dict(epoch=step / math.ceil(len(views.source) / args.batch_size), **keys)


# --- the run -------------------------------------------------------------------------------------

def finish(run, model, val, args, step, epoch_steps):
    """Pictures of up to args.save_images images, evenly spaced, and what came out of the run."""
    path = run.out_dir / "pictures.png"
    if run.master and args.save_images:
        index = range(0, len(val), math.ceil(len(val) / args.save_images))
        triples = predictions(model.eval(), val, index, **views_of(args))
        save_pictures(path, triples, val.classes)
        run.print(f"image, truth, prediction: {path}")
    result, minutes = run.evaluations[step], (time.time() - run.started) / 60
    run.print(f"{args.data} {model.config.attn}: validation mean IoU {result['mean_iou']:.2f} % of "
              f"{result['classes']} classes, mean accuracy {result['mean_accuracy']:.2f} % "
              f"({result['images']} images) after {step / epoch_steps:.1f} epochs, {minutes:.1f} "
              f"minutes; checkpoint {run.out_dir / 'last.pt'}")


def main():
    args = get_args()
    train, val = load_data(args, int(os.environ.get("RANK", 0)))
    device, rank, world, out_dir = common.start(args, f"seg_{args.data}_{args.attn or 'backbone'}")
    model, optimizer, first, notes = build(args, list(train.classes), device)
    check(args, model.config.patch_size, train, val, device, rank, world)
    net = common.wrap(model, device, world, args.compile)

    epoch_steps = math.ceil(len(train) / args.batch_size)
    total = args.epochs * epoch_steps
    stop = max(first, min(total, args.max_steps or total))
    run = common.Run(args, out_dir, first, stop, device, rank, world, model,
                     training_images=len(train))
    run.print(*notes)
    views = TrainingViews(train, args.size, (args.min_scale, args.max_scale), args.seed)
    batches = load_batches(views, args, model.encoder.mean, first, stop, rank, world)

    def measure(step):
        return score(model, val, views, args, step, rank, world)

    def state(step):
        return dict(task="segmentation", classes=list(train.classes), args=vars(args), step=step,
                    model=model.state_dict(), model_config=asdict(model.config),
                    optimizer=optimizer.state_dict(), metrics=run.evaluations.get(step, {}))

    for step in run.steps(measure, state, "images", args.batch_size, epoch_steps):
        lr = poly_lr(step, total, args.lr, args.min_lr)
        for group in optimizer.param_groups:
            group["lr"] = lr
        images, labels = next(batches)
        torch.manual_seed(common.seed_of(args.seed, step, rank))        # drop-path, dropout masks

        # forward, backward: the mean over the labelled pixels of all processes
        pixels = common.all_sum((labels != IGNORE).sum()).clamp(min=1)  # all ignored: the loss is 0
        with common.autocast(device, args.amp):
            logits = net(images)
        loss = F.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="sum")
        loss = loss / pixels
        (loss * world).backward()                                       # DDP takes the mean
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip or math.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        # log (waits for the device, stops at a loss that is not finite), evaluate, save
        run.end(step + 1, loss.detach(), norm / world, lr)

    finish(run, model, val, args, stop, epoch_steps)


if __name__ == "__main__":
    common.run(main)
