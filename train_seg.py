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
stops the run, the result is the last epoch (with --keep_best also the best one).
Stopping and resuming changes no number: what is random depends on (seed, step or sample) alone. Nor
do more processes, but for float noise and the masks of drop path and dropout, which depend on the
process, too. To the last bit that holds on a CPU; on a GPU the backward of fused attention adds in
no fixed order.
"""

import argparse
import math
import os
import time
from dataclasses import asdict
from pathlib import Path

import common  # before torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from tqdm import tqdm

from attention import ATTENTIONS, FORMS, LAYER_PATTERNS, key_statistics
from common import COUNT, NATURAL, REAL, SHARE, InputError
from data.batches import image_batches
from data.rng import epoch_order
from data.views import TrainingViews, choose, finish_views, load_split, save_pictures
from segmenter import (IGNORE, Segmenter, SegmenterConfig, backbone_settings, evaluate,
                       predictions)
from vit import SIZES

# What --data selects; flags win.
RECIPES = {
    # around weights/shapes_rpc.pt, 5 minutes on 2 CPU cores: mean IoU 75.0 % ± 0.8 (three seeds)
    "shapes": dict(size=32, num_classes=11, epochs=5, batch_size=32, dropout=0.0, num_workers=0,
                   patch_size=4),
    # 250 images, 25 minutes on a CPU core: mean IoU 30.5 % (symmetric), 27.9 % (rpc, n_iter 6)
    "camvid": dict(size=160, num_classes=11, epochs=200, batch_size=8, eval_every=20),
    # the paper's run, not run here: mean IoU 34.69 % (rpc), 34.00 % (symmetric) there
    "ade20k": dict(size=512, num_classes=150, epochs=64, batch_size=8, lr=1e-3, weight_decay=0.0,
                   clip=0.0, drop_path=0.1, model="tiny"),
    # images of your own; what is None depends on how many there are and how large: data/masks.py
    "folder": dict(size=None, epochs=None, batch_size=None, eval_every=None, patch_size=None,
                   keep_best=True),
}
# An encoder without --backbone, where flags and recipes do not say otherwise.
ENCODER = dict(model="nano", patch_size=16, attn="rpc", rpc_layers="0", n_iter=4, lambd=4.0,
               form="released")


def get_args():
    """Read the flags: a recipe's are the defaults, then those of a run to resume. Flags win.

    Returns them and the checkpoint of --resume, {} without one.
    """
    p = argparse.ArgumentParser(description=__doc__, formatter_class=common.Help, add_help=False,
                                usage="%(prog)s [--flag value ...]", allow_abbrev=False)
    boolean = argparse.BooleanOptionalAction
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
         "encoder, attention included, in the place of the next seven; None: shapes: "
         "weights/shapes_<attn>.pt, unless those ask for another; else from scratch")
    flag("--model", choices=SIZES, help="width, depth and heads (nano; ade20k: tiny)")
    flag("--patch_size", type=COUNT, help="pixels (16; shapes: 4; folder: as fits)")
    kinds = dict.fromkeys([*ATTENTIONS, *LAYER_PATTERNS])
    flag("--attn", choices=[name for name in kinds if name != "scaled_s"],
         help="rpc: symmetric, with RPC-Attention in --rpc_layers")
    flag("--rpc_layers", help="from 0: 0 (the paper's layer1), all, 0,1,2 or 0-3")
    flag("--n_iter", type=COUNT, help="PAP steps; the paper: 4-6 in layer 0, 2 in all")
    flag("--lambd", type=common.number(float, 0, math.inf),
         help="PAP lambda; the paper: 4 in layer 0, 3 in all; inf: never shrink")
    flag("--form", choices=FORMS, help="reading of Algorithm 1: attention.py")
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

    flag = p.add_argument_group("running").add_argument
    flag("--seed", type=common.number(int, 0, 2 ** 31 - 1), default=0, help="of weights, order "
         "and noise")
    flag("--device", type=common.device, help="cuda, mps or cpu; None: the best there is")
    flag("--amp", action=boolean, help="bf16 autocast; None: on GPUs that have it")
    flag("--compile", action=boolean, default=False, help="torch.compile the model, to train")
    flag("--log_every", type=COUNT, default=20, help="steps between rows of log.jsonl")
    flag("--eval_every", type=COUNT, default=2, help="epochs between evaluations")
    flag("--keep_best", action=boolean, default=False, help="also keep best.pt, of the evaluation "
         "with the highest mean IoU: for images that are held out to choose by (folder: on)")
    flag("--max_steps", type=COUNT, help="stop early; the schedule stays that of --epochs")
    flag("--out_dir", help="None: out/seg_<data>_<attn>; with --backbone out/seg_<data>_backbone")
    flag("--resume", help="folder of a run to continue; its flags are the defaults")

    # A setting is the command line's, else that of the run to resume, of the recipe, or the flag's
    # default.
    asked, checkpoint, stored = p.parse_known_args()[0], {}, {}
    if asked.resume:
        checkpoint = common.load(Path(asked.resume, "last.pt"))
        if checkpoint.get("task") != "segmentation":
            raise InputError(f"--resume {asked.resume}: its task is {checkpoint.get('task')}, not "
                             f"segmentation")
        # What is of one command or machine is not remembered.
        stored = {name: value for name, value in checkpoint["args"].items()
                  if name not in ("device", "max_steps", "out_dir", "resume")}
    data = asked.data or stored.get("data") or ("folder" if asked.data_dir else "shapes")
    # A backbone is a whole encoder. Scenes have one in weights/, unless flags ask for another: from
    # scratch a small network learns little of them in minutes.
    recipe = {**ENCODER, **RECIPES[data]}
    said = [name for name in ENCODER if getattr(asked, name) is not None]
    path = Path(__file__).with_name("weights") / f"shapes_{asked.attn or 'rpc'}.pt"
    if asked.backbone:
        recipe.update(dict.fromkeys(ENCODER))
    elif data == "shapes" and said in ([], ["attn"]) and path.exists():
        recipe.update(dict.fromkeys(ENCODER), backbone=os.path.relpath(path), attn="rpc")
    p.set_defaults(**{"data": data, **recipe, **stored})
    p.add_argument("-h", "--help", action="help", help="print this, with the recipe's defaults")
    args = p.parse_args()
    changed = {name: getattr(args, name) for name in stored if getattr(args, name) != stored[name]}
    if changed.keys() & {*ENCODER, "backbone", "decoder_attn", "drop_path", "dropout"}:
        raise InputError(f"--resume cannot change the model: {changed}")
    if asked.backbone and said:
        raise InputError(f"--backbone has its own encoder: leave out --{', --'.join(said)}")
    if changed:
        common.print0(f"other flags: {changed}")

    if data == "shapes" and args.data_dir:
        raise InputError(f"--data_dir {args.data_dir}: --data shapes renders its own images")
    if data == "folder" and not args.data_dir:
        raise InputError("--data folder needs --data_dir")
    if args.out_dir and args.resume:
        raise InputError("--out_dir does not go with --resume, which continues in its own folder")
    args.out_dir = args.resume or args.out_dir or f"out/seg_{data}_{args.attn or 'backbone'}"
    if Path(args.out_dir, "last.pt").exists() and not args.resume:
        raise InputError(f"{args.out_dir} holds a run: go on with it by --resume {args.out_dir}, "
                         f"or choose another --out_dir")
    return args, checkpoint


# --- batches --------------------------------------------------------------------------------------

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


def train_batches(views, args, start, stop, mean, rank, world):
    """Yield images (b, 3, S, S) in [0, 1] and labels (b, S, S) int64, on the device of mean.

    mean: (3, 1, 1), the model's, which pads views that are smaller than S.
    """
    n, device = len(views.source), mean.device
    keys = batch_keys(args, n, start, stop, rank, world)
    batches = image_batches(views, keys, args.num_workers, device)
    for images, labels, (position, height, width) in batches:
        images, labels = (t.to(device, non_blocking=True) for t in (images, labels))
        if position[0] % n % args.batch_size != rank:               # a short batch, not for us
            labels.fill_(IGNORE)
        images = finish_views(images, height, width, position, args.seed, mean,
                              distorted=args.data != "shapes")
        yield images, labels.long()


# --- the run --------------------------------------------------------------------------------------

def learning_rate(step, total, args):
    """lr_k = (lr - min_lr) (1 - k / total)^0.9 + min_lr for update k = 0, 1, ..."""
    return (args.lr - args.min_lr) * (1 - step / total) ** 0.9 + args.min_lr


def main():
    args, checkpoint = get_args()

    # Processes. torchrun starts one a GPU (or some on a CPU) and says so in the environment; each
    # takes its share of every batch. Rank 0 alone prints and writes.
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else
                                          "mps" if torch.backends.mps.is_available() else "cpu"))
    if "RANK" in os.environ:
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    amp = has_bf16 if args.amp is None else args.amp
    torch.set_float32_matmul_precision("high" if amp else "highest")
    torch.backends.cudnn.allow_tf32 = amp                           # convolutions likewise
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=amp)

    # Data. Where it is a folder of one's own, flags that are still None are chosen to fit it.
    vars(args).update(choose(args))
    args.window = args.window or args.size
    args.stride = args.stride or args.window
    if args.stride > args.window:
        raise InputError(f"--stride {args.stride} is more than --window {args.window}")
    how = dict(size=args.size, window=args.window, stride=args.stride, amp=amp,
               num_workers=args.num_workers)                        # to evaluate
    train, val = load_split(args, "training"), load_split(args, "validation")
    common.print0(f"{args.data}: {len(train)} training, {len(val)} validation images, "
                  f"{len(train.classes)} classes")
    scales = (1.0, 1.0) if args.data == "shapes" else (0.5, 2.0)    # scenes stay as they are
    views = TrainingViews(train, args.size, scales, args.seed)
    if args.batch_size % world:
        raise InputError(f"--batch_size {args.batch_size}: expected a multiple of {world}, the "
                         f"number of processes")
    epoch_steps = math.ceil(len(train) / args.batch_size)           # the last batch may be short
    total = args.epochs * epoch_steps

    # Model. The checkpoint describes it, or the flags; those of the encoder may be a backbone's.
    backbone = common.load(args.backbone) if args.backbone and not args.resume else None
    if checkpoint:
        config = SegmenterConfig(**checkpoint["model_config"])
    else:
        if backbone:
            with common.error_prefix(f"--backbone {args.backbone}"):
                encoder = backbone_settings(backbone)
        else:
            size = SIZES[args.model]
            encoder = dict(**size, patch_size=args.patch_size, attn=args.attn,
                           rpc_layers=common.parse_layers(args.rpc_layers, size["depth"]),
                           pap=dict(n_iter=args.n_iter, lambd=args.lambd, form=args.form))
        for name, side in (("size", args.size), ("window", args.window)):
            if side % encoder["patch_size"]:
                raise InputError(f"--{name} {side} is not a multiple of the patch size "
                                 f"{encoder['patch_size']}")
        config = SegmenterConfig(**encoder, num_classes=len(train.classes), image_size=args.size,
                                 drop_path=args.drop_path, decoder_attn=args.decoder_attn or "",
                                 decoder_dropout=args.dropout)
    torch.manual_seed(args.seed)
    model = Segmenter(config).to(device)
    if backbone:
        from checkpoints import load_weights
        with common.error_prefix(f"--backbone {args.backbone}"):
            load_weights(model.encoder, backbone, mode="bilinear")
        common.print0(f"encoder from {args.backbone}")
    # To freeze a part, say so here, `model.encoder.requires_grad_(False)`: --resume passes by.

    # Optimiser: matrices decay, those of the decoder, too.
    matrices = ("weight", "proj_patch", "proj_classes")
    decay, rest = [], []
    for name, p in model.named_parameters():
        if p.requires_grad:
            (decay if p.ndim > 1 and name.endswith(matrices) else rest).append(p)
    groups = [dict(params=decay, weight_decay=args.weight_decay), dict(params=rest, weight_decay=0)]
    if args.data == "ade20k":                                       # the paper's, timm's "sgd"
        optimizer = torch.optim.SGD(groups, lr=args.lr, momentum=0.9, nesterov=True,
                                    fused=device.type == "cuda")
    else:
        optimizer = torch.optim.AdamW(groups, lr=args.lr, fused=device.type == "cuda")

    # Resume: weights and optimiser; random numbers need no state. Data have to be the run's.
    about = dict(classes=list(train.classes), training_images=len(train))
    if checkpoint:
        for name, now in about.items():
            if checkpoint.get(name) != now:
                raise InputError(f"--resume cannot change {name}: it was "
                                 f"{checkpoint.get(name)!r:.60} and is {now!r:.60}")
        model.load_state_dict(checkpoint["model"])
        common.load_optimizer(optimizer, checkpoint["optimizer"])
    first = checkpoint.get("step", 0)
    metrics, best = checkpoint.get("metrics", {}), checkpoint.get("best", {})

    # Compile; share gradients over processes. net is for training; model, of the same weights, is
    # evaluated and saved.
    compiled = torch.compile(model) if args.compile else model
    net = compiled if world == 1 else DDP(compiled, broadcast_buffers=False,    # the same on all
                                          gradient_as_bucket_view=True)

    # The log, a JSON object a line; its first row says what was trained, by what, on what.
    out_dir = Path(args.out_dir)
    if rank == 0:
        log = common.Log(out_dir, first)
        parameters = sum(p.numel() for p in model.parameters())
        log.append(dict(step=first, args=vars(args), **common.code_version(), world=world,
                        device=common.describe(device), parameters=parameters,
                        training_images=len(train)))
        common.print0(f"{parameters:,} parameters | {world} x {common.describe(device)} | {out_dir}"
                      + f" | resumed at step {first}" * bool(first))

    # The loop. --max_steps stops early, on the schedule of --epochs.
    stop = max(first, min(total, args.max_steps or total))
    batches = train_batches(views, args, first, stop, model.encoder.mean, rank, world)
    bar = tqdm(range(first, stop), "training", stop, initial=first, unit="step",
               disable=rank > 0 or None, dynamic_ncols=True)        # None: if not in a terminal
    began = clock = time.time()
    pending = []
    for step in bar:
        lr = learning_rate(step, total, args)
        for group in optimizer.param_groups:
            group["lr"] = lr

        # A batch.
        images, labels = next(batches)

        # Forward and backward. The loss is the mean over the labelled pixels of all processes,
        # which get the mean of their gradients. Dropout draws from a seed of this step and process,
        # so a resumed run draws the same. (hash of numbers is the same in every Python.)
        torch.manual_seed(hash((args.seed, step, rank)) % 2 ** 63)
        pixels = (labels != IGNORE).sum()
        if world > 1:
            dist.all_reduce(pixels)
        with autocast:
            logits = net(images)
        loss = F.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="sum")
        loss = world * loss / pixels.clamp(min=1)                   # all ignored: the loss is 0
        loss.backward()

        # Clip the gradient and take the step.
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()
                                              if p.grad is not None])
        if args.clip:
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), args.clip, norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        pending.append(torch.stack([loss.detach(), norm]))          # stays on the device

        # What is due? By the step alone, so that all processes agree: an evaluation every few
        # epochs and at the end; a checkpoint then and after every epoch; a row of the log then and
        # every --log_every steps.
        done, epoch = step + 1, (step + 1) / epoch_steps
        evaluating = done == stop or done % (args.eval_every * epoch_steps) == 0
        saving = evaluating or done % epoch_steps == 0
        logging = saving or done % args.log_every == 0

        # Log the means, over processes and steps since the last row; what is not finite ends the
        # run here. Reading them waits for the device.
        if logging:
            recent = torch.stack(pending) / world                   # (steps, 2)
            if world > 1:
                dist.all_reduce(recent)
            loss, norm = common.finite_means(recent.cpu(), done)
            rate = args.batch_size * len(pending) / (time.time() - clock)
            if rank == 0:
                log.append(dict(step=done, loss=loss, grad_norm=norm, images_per_s=rate,
                                epoch=epoch, lr=lr))
            bar.set_postfix_str(f"loss {loss:.3f} {rate:.0f} images/s")
            if bar.disable:
                common.print0(f"step {done:6d}  loss {loss:.4f}  {rate:.0f} images/s")

        # Evaluate. Did the robust part act?
        metrics = {}
        if evaluating:
            metrics, _ = evaluate(model, val, **how, rank=rank, world=world, progress="evaluating")
            if rank == 0:
                log.append(dict(step=done, eval=metrics, epoch=epoch,
                                **key_statistics(model, model.masks, images[:8])))
            numbers = "  ".join(f"{name} {value:.2f}" for name, value in metrics.items()
                                if isinstance(value, float))
            common.print0(f"step {done:6d}  training loss {loss:.4f}   {numbers}")

        # Save, each file whole or not at all. A run killed before that repeats the evaluation.
        if saving and rank == 0:
            better = args.keep_best and metrics and metrics["mean_iou"] > best.get("mean_iou", -1)
            if better:
                best = dict(step=done, **metrics)
            state = dict(task="segmentation", args=vars(args), step=done, metrics=metrics,
                         best=best, model=model.state_dict(), optimizer=optimizer.state_dict(),
                         model_config=asdict(config), **about)
            if better:
                common.save(out_dir / "best.pt", state)
            common.save(out_dir / "last.pt", state)
        if logging:
            clock, pending = time.time(), []    # speed leaves out what evaluating and saving took

    # Pictures, and the result, where the last step was evaluated.
    if rank == 0:
        index = range(0, len(val), math.ceil(len(val) / 4))         # up to four images
        save_pictures(out_dir / "pictures.png", predictions(model.eval(), val, index, **how),
                      val.classes)
        common.print0(f"image, truth, prediction: {out_dir / 'pictures.png'}")
    if metrics:
        common.print0(f"{args.data} {config.attn}: validation mean IoU {metrics['mean_iou']:.2f} % "
                      f"of {metrics['classes']} classes, mean accuracy "
                      f"{metrics['mean_accuracy']:.2f} % ({metrics['images']} images) after "
                      f"{stop / epoch_steps:.1f} epochs, {(time.time() - began) / 60:.1f} minutes")
        if best:
            common.print0(f"best.pt: the highest mean IoU, {best['mean_iou']:.2f} %, was after "
                          f"{best['step'] / epoch_steps:.1f} epochs")
        common.print0(f"next: python eval_robust.py --ckpt {out_dir}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    common.run(main)
