"""Train an image classifier with robust attention: the DeiT recipe in one loop.

    python train_cls.py                                                  # RPC-ViT on rendered scenes, minutes on a CPU
    python train_cls.py --attn symmetric                                 # its baseline
    python train_cls.py --data cifar10 --data_dir data/cifar10           # --download fetches it
    torchrun --standalone --nproc_per_node=4 train_cls.py --data imagenet --data_dir data/imagenet     # the paper's run
    python train_cls.py --resume out/shapes_rpc                          # go on exactly where it stopped

Paper: Teo & Nguyen 2024, section 4.1 and App. A; recipe `facebookresearch/deit`. Where this differs from the released
code (`rachtsy/KPCA_code:Robust/main_train.py`): the learning rate is scheduled (there the line is commented out), bf16
instead of fp16, images are mixed with their neighbour instead of the reversed batch, one lambda per step.
Every random number depends on (seed, step or sample) alone, so stopping and resuming changes nothing, nor does the
number of processes but for float noise (except with --drop_path, whose masks are drawn per process).
"""

import argparse
import math
import os
import time
from dataclasses import asdict
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tqdm import tqdm

import common
import data
from attention import FORMS, key_statistics
from augment import augment_uint8, mixup_cutmix, to_float
from vit import RPC_KINDS, SIZES, ViT, ViTConfig, load_strictly, load_weights

# What --data selects; flags given on the command line win.
RECIPES = {
    "shapes": dict(model="nano", image_size=32, patch_size=4, epochs=8, batch_size=64, lr=2e-3, min_lr=1e-5,
                   warmup_epochs=1, clip=1.0, drop_path=0.0, pad=0, num_ops=0, erase=0.0, mixup=0.0, cutmix=0.0,
                   smoothing=0.0, repeats=1, ema=0.0),
    "cifar10": dict(model="micro", image_size=32, patch_size=4, epochs=8, batch_size=64, lr=1e-3, min_lr=1e-5,
                    warmup_epochs=1, clip=1.0, drop_path=0.0, pad=4, num_ops=0, erase=0.0, mixup=0.0, cutmix=0.0,
                    smoothing=0.1, repeats=1, ema=0.0),
    "imagenet": dict(model="tiny", image_size=224, patch_size=16, epochs=300, batch_size=1024, lr=1e-3, min_lr=1e-5,
                     warmup_epochs=5, clip=0.0, drop_path=0.1, pad=0, num_ops=2, erase=0.25, mixup=0.8, cutmix=1.0,
                     smoothing=0.1, repeats=3, ema=0.99996),       # lr = 5e-4 * batch_size / 512; ViT-base: clip 1
}
# What --resume refuses to change: it would be another run.
FIXED = ("data", "model", "image_size", "patch_size", "attn", "rpc_layers", "n_iter", "lambd", "form", "drop_path", "init",
         "num_images", "holdout", "batch_size", "repeats", "seed")


def get_args():
    """The flags; for each, the command line wins over the run that is resumed, and that over the recipe."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                allow_abbrev=False, epilog="defaults that --data selects:\n" + "\n".join(
                                    f"  {name}: {' '.join(f'--{k} {v}' for k, v in recipe.items())}"
                                    for name, recipe in RECIPES.items()))
    flag, boolean = p.add_argument, argparse.BooleanOptionalAction
    count, natural = common.number(int, 1), common.number(int, 0)
    real, share = common.number(float, 0), common.number(float, 0, 0.999999)
    flag("--data", choices=RECIPES, default="shapes", help="shapes: scenes rendered on the fly, nothing to download")
    flag("--data_dir", default=None, help="cifar10: torchvision's files, class folders or a tar of them; "
         "imagenet: train/<class>/*.JPEG and val/<class>/*.JPEG")
    flag("--download", action=boolean, default=False, help="cifar10: let torchvision fetch it into --data_dir")
    flag("--num_images", type=count, default=16000, help="shapes: training images to render")
    flag("--holdout", type=natural, default=0, help="shapes, cifar10: train without HOLDOUT of the training images and "
         "evaluate on those: to choose settings there, not on the test split")
    flag("--skip_bad_images", action=boolean, default=False, help="imagenet: count unreadable files and go on")
    flag("--num_workers", type=natural, default=min(os.cpu_count() or 1, 10),
         help="imagenet: decoding processes per GPU")

    flag("--model", choices=SIZES, help="width, depth and heads")
    flag("--image_size", type=count, help="pixels, a multiple of --patch_size")
    flag("--patch_size", type=count, help="pixels")
    flag("--attn", default="rpc", choices=["softmax", "symmetric", "scaled_s", "scaled_alpha", *RPC_KINDS],
         help="rpc: symmetric attention with RPC-Attention in --rpc_layers; rpc_asym, sym_asym: App. E.9")
    flag("--rpc_layers", type=str, default="0", help="layers with RPC-Attention, from 0: 0 (the paper's layer1), all, "
         "0,1,2 or 0-3")
    flag("--n_iter", type=count, default=4, help="PAP steps; the paper: 4, 5, 6 in layer 0, or 2 in all")
    flag("--lambd", type=common.number(float, 0, math.inf), default=4.0, help="PAP lambda; the paper: 4 in layer 0, 3 in "
         "all; inf: never shrink")
    flag("--form", choices=FORMS, default="released", help="which reading of Algorithm 1, see attention.py")
    flag("--drop_path", type=share, help="stochastic depth rate of the last block")
    flag("--init", choices=["trunc_normal", "default"], default=None, help="Linear layers: trunc_normal as DeiT, default "
         "= torch's, as the released RPC code (chosen for symmetric and rpc)")
    flag("--init_from", default=None, help="start from these weights (file or https address; App. E.6)")

    flag("--epochs", type=count)
    flag("--batch_size", type=count, help="global: over all processes and accumulation steps")
    flag("--accum", type=count, default=1, help="gradient accumulation: micro-batches per step and process")
    flag("--lr", type=real, help="peak learning rate (AdamW); DeiT's rule: 5e-4 * batch_size / 512")
    flag("--min_lr", type=real, help="at the end of the cosine")
    flag("--warmup_epochs", type=real, help="linear warm-up from 1e-6")
    flag("--weight_decay", type=real, default=0.05, help="of matrices; 1-d tensors, positions, class token have none")
    flag("--clip", type=real, help="clip the gradient norm; 0: do not (the paper: 1 for ViT-base)")
    flag("--ema", type=share, help="decay of the weight average; 0: none")

    flag("--pad", type=natural, help="random shift by up to PAD pixels (small images)")
    flag("--num_ops", type=natural, help="RandAugment operations per image (rand-m9-mstd0.5-inc1: 2); 0: none")
    flag("--erase", type=share, help="probability of random erasing")
    flag("--mixup", type=real, help="alpha; 0: none")
    flag("--cutmix", type=real, help="alpha; 0: none")
    flag("--smoothing", type=share, help="label smoothing")
    flag("--repeats", type=count, help="repeated augmentation: crops of an image per epoch in which it is drawn")

    flag("--seed", type=common.number(int, 0, 2 ** 31 - 1), default=0)
    flag("--device", default=None, help="cuda, mps or cpu; picked automatically")
    flag("--amp", action=boolean, default=None, help="bf16 autocast; default: on GPUs")
    flag("--compile", action=boolean, default=False, help="torch.compile the model")
    flag("--out_dir", default=None, help="checkpoints and log.jsonl; default out/<data>_<attn>, numbered if it exists")
    flag("--resume", default=None, help="folder of a run to continue; its flags are remembered")
    flag("--max_steps", type=count, default=None, help="stop early (the schedule stays that of --epochs)")
    flag("--log_every", type=count, default=20, help="steps between lines of log.jsonl")
    flag("--eval_every", type=count, default=1, help="epochs between evaluations")
    flag("--save_every", type=natural, default=0, help="steps between checkpoints within an epoch; each epoch ends in one")
    flag("--keep_every", type=natural, default=0, help="also keep epoch_<n>.pt every so many epochs")

    default = vars(p.parse_args([]))
    given = p.parse_args(namespace=argparse.Namespace(**dict.fromkeys(default)))
    given = {k: v for k, v in vars(given).items() if v is not None}
    stored = stored_args(given) if "resume" in given else {}
    recipe = RECIPES[given.get("data", stored.get("data", default["data"]))]
    args = argparse.Namespace(**{**default, **recipe, **stored, **given})
    if not stored or given.keys() & {"epochs", "warmup_epochs", "lr", "min_lr"}:
        check_schedule(args)
    return args


def check_schedule(args):
    """ValueError unless the learning rate rises to --lr and falls to --min_lr within the run."""
    if args.warmup_epochs > args.epochs:
        raise ValueError(f"--warmup_epochs {args.warmup_epochs} is longer than the run, "
                         f"--epochs {args.epochs}")
    if args.min_lr > args.lr:
        raise ValueError(f"--min_lr {args.min_lr} is above --lr {args.lr}")


def stored_args(given):
    """The flags of the run that --resume continues; refuses flags that would make it another run."""
    checkpoint = common.read_checkpoint(given["resume"])
    parts = ("args", "model", "optimizer", "step", "classes")
    common.check_run(checkpoint, given["resume"], "train_cls.py", *parts)
    for k in ("out_dir", "init_from"):
        if k in given:
            raise ValueError(f"--{k} does not go with --resume, which continues in its own folder")
    stored = {k: v for k, v in checkpoint["args"].items() if k not in ("resume", "out_dir", "max_steps", "device")}
    for k in FIXED:
        if k in given and given[k] != stored[k]:
            raise ValueError(f"--{k} {given[k]} does not fit --resume {given['resume']}, which was trained with "
                             f"--{k} {stored[k]}; to start a new run from its weights use --init_from")
    if bool(given.get("ema", stored["ema"])) != bool(stored["ema"]):
        raise ValueError(f"--ema {given['ema']}: the run in {given['resume']} has --ema {stored['ema']}")
    if stored["ema"]:
        common.check_run(checkpoint, given["resume"], "train_cls.py", "ema")
    return stored


# --- set-up ----------------------------------------------------------------------------------------------------------

def build_config(args, num_classes):
    """ViTConfig from the flags."""
    size = SIZES[args.model]
    init = args.init or ("default" if args.attn in ("symmetric", "rpc") else "trunc_normal")
    return ViTConfig(**size, image_size=args.image_size, patch_size=args.patch_size, num_classes=num_classes,
                     attn=args.attn, rpc_layers=common.parse_layers(args.rpc_layers, size["depth"]), n_iter=args.n_iter,
                     lambd=args.lambd, form=args.form, drop_path=args.drop_path, init=init)


def load_data(args, device, rank=0):
    """Returns (training set, evaluation set): two `data.Split` on the device, or two `data.ImageTree`."""
    if args.data != "shapes" and not args.data_dir:
        raise ValueError(f"--data {args.data} needs --data_dir")
    if args.data == "shapes" and args.data_dir:
        raise ValueError(f"--data_dir {args.data_dir} is not read: --data shapes renders its images; "
                         f"choose --data cifar10 or imagenet")
    if args.data == "imagenet":
        if args.holdout:
            raise ValueError("--holdout goes with --data shapes and cifar10; for imagenet make a folder of your own")
        common_args = dict(size=args.image_size, seed=args.seed, skip_bad_images=args.skip_bad_images)
        train = data.ImageTree(args.data_dir, "train", train=True, **common_args)
        return train, data.ImageTree(args.data_dir, "val", classes=train.classes, **common_args)
    if args.data == "shapes":
        train = data.load_shapes("train", args.num_images, args.image_size, device=device)
        test = data.load_shapes("test", max(args.num_images // 5, 1), args.image_size, device=device)
    else:
        if args.download and rank == 0:
            data.load_cifar10(args.data_dir, "train", download=True)
        common.broadcast([None])                                               # the others wait for it
        train = data.load_cifar10(args.data_dir, "train")
        test = data.load_cifar10(args.data_dir, "test")
        if args.image_size != 32:
            raise ValueError(f"--image_size {args.image_size}: CIFAR-10 images have 32 pixels")
    if args.holdout:
        if not 0 < args.holdout < len(train.images):
            raise ValueError(f"--holdout {args.holdout}: there are {len(train.images)} training images")
        order = data.epoch_order(len(train.images), 0, seed=0)                 # the same images for every --seed
        train, test = ([t[part] if torch.is_tensor(t) else t for t in train]
                       for part in (order[args.holdout:], order[:args.holdout]))
        train, test = data.Split(*train), data.Split(*test)
    return (data.Split(s.images.to(device), s.labels.to(device), s.classes) for s in (train, test))


# --- batches ---------------------------------------------------------------------------------------------------------

def micro_batches(args, n, start, total, rank, world):
    """(index, position) of every micro-batch of this process, from step `start` to step `total`; (b,) int64 each.

    position numbers the samples of the whole run. A process takes a contiguous slice of the global batch, so
    neighbours, which are mixed with each other, stay together; copies of an image (--repeats) are spread before.
    """
    b, steps_per_epoch, last = args.batch_size // (world * args.accum), n // args.batch_size, None
    for step in range(start, total):
        epoch, i = divmod(step, steps_per_epoch)
        if epoch != last:
            order, last = data.epoch_order(n, epoch, args.seed, args.repeats), epoch
        batch = order[i * args.batch_size:(i + 1) * args.batch_size]
        batch = torch.cat([batch[r::args.repeats] for r in range(args.repeats)])
        for micro in range(rank * args.accum, (rank + 1) * args.accum):
            part = slice(micro * b, (micro + 1) * b)
            yield batch[part], step * args.batch_size + torch.arange(args.batch_size)[part]


def load_batches(source, keys, args, device, train):
    """For (index, position) keys: images (b, 3, S, S) uint8 and labels (b,) on the device, positions (b,) on the CPU.

    train: cropped, flipped and RandAugmented, on the device or, where the CPU is the device, in the worker processes.
    """
    transform = partial(augment_uint8, seed=args.seed, pad=args.pad, num_ops=args.num_ops) if train else None
    if isinstance(source, data.Split):
        for index, position in keys:
            index = index.to(device)
            images, labels = source.images[index], source.labels[index]
            yield transform(images, position) if train else images, labels, position
    else:
        in_worker, on_device = (transform, None) if device.type == "cpu" else (None, transform)
        lists = (list(zip(position.tolist(), index.tolist())) for index, position in keys)
        for images, labels, position in data.imagenet_batches(source, lists, args.num_workers, device, transform=in_worker):
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            yield on_device(images, position) if on_device else images, labels, position


# --- evaluation ------------------------------------------------------------------------------------------------------

@torch.no_grad()
def evaluate(model, source, args, device, rank, world):
    """Top-1, top-5 accuracy in percent and loss on a whole split; every image counts once, however many processes."""
    model.eval()
    n = len(source.labels)
    mine = torch.arange(rank, n, world)
    total = torch.zeros(4, device=device)                                # right, right in top 5, loss, images
    batches = load_batches(source, [(part, part) for part in mine.split(256)], args, device, train=False)
    for images, labels, _ in tqdm(batches, "evaluating", len(mine.split(256)), leave=False,
                                  disable=rank > 0 or n * args.image_size ** 2 < 2 ** 25):
        with common.autocast(device, args.amp):
            logits = model(images.float() / 255).float()
        good = labels >= 0                                                             # -1: an unreadable file
        right = (logits.topk(min(5, logits.shape[1])).indices == labels[:, None]) & good[:, None]
        loss = F.cross_entropy(logits, labels, ignore_index=-1, reduction="sum")
        total += torch.stack([right[:, 0].sum(), right.sum(), loss, good.sum()])
    model.train()
    top1, top5, loss, readable = common.all_sum(total).tolist()
    if not readable:
        raise ValueError(f"--data_dir {source.folder}: none of the {n} images can be read")
    return dict(top1=100 * top1 / readable, top5=100 * top5 / readable, loss=loss / readable,
                images=int(readable))


def score(model, ema, train, test, args, device, rank, world):
    """What is kept of an evaluation; the paper reports the raw model, not its average."""
    metrics = evaluate(model, test, args, device, rank, world)
    if ema:
        metrics["ema_top1"] = evaluate(ema.module, test, args, device, rank, world)["top1"]
    if args.skip_bad_images and args.data == "imagenet":
        metrics["skipped"] = int(common.all_sum(train.skipped.to(device, copy=True)))
    return metrics


def first_images(source, device, n=32):
    """The first images of a split, (n, 3, S, S) float in [0, 1] on the device."""
    images = source.images[:n] if isinstance(source, data.Split) else torch.stack(
        [source[i][0] for i in range(min(n, len(source)))])
    return images.to(device).float() / 255


# --- the run ---------------------------------------------------------------------------------------------------------

def check_batch(args, world, n):
    """ValueError unless the global batch can be dealt out and its pairs stay together."""
    b, rest = divmod(args.batch_size, world * args.accum)
    if rest:
        raise ValueError(f"--batch_size {args.batch_size} is not divisible by {world} processes x --accum {args.accum}")
    if b % 2 and (args.mixup or args.cutmix):
        raise ValueError(f"--batch_size {args.batch_size} gives {b} images per process and micro-batch; --mixup and "
                         f"--cutmix mix pairs, so that number has to be even")
    if args.batch_size > n:
        raise ValueError(f"--batch_size {args.batch_size} is more than the {n} training images")


def start(args, model, optimizer, ema, classes):
    """Load what --resume or --init_from names. Returns the step to go on from and notes for the reader."""
    if args.resume:
        checkpoint = common.read_checkpoint(args.resume)
        if checkpoint["classes"] != classes:
            theirs = f"{len(checkpoint['classes'])} classes, {', '.join(checkpoint['classes'][:3])}, ..."
            raise ValueError(f"--data_dir {args.data_dir} has {len(classes)} classes, not those of the run in "
                             f"{args.resume} ({theirs})")
        with common.naming(f"--resume {args.resume}"):
            load_weights(model, checkpoint)
            optimizer.load_state_dict(checkpoint["optimizer"])
            if ema:
                load_strictly(ema.module, checkpoint["ema"])
        optimizer.param_groups[0]["weight_decay"] = args.weight_decay           # the flag may be new
        if ema:
            ema.n_averaged.fill_(checkpoint["step"])
        return checkpoint["step"], [f"resumed at step {checkpoint['step']}"]
    if args.init_from:
        checkpoint = common.read_checkpoint(args.init_from)
        with common.naming(f"--init_from {args.init_from}"):
            notes = load_weights(model, checkpoint, new_head=True)
        return 0, [f"weights from {args.init_from}", *notes]
    return 0, []


def main():
    args = get_args()
    device, rank, world = common.setup(args.device)
    args.amp = device.type == "cuda" if args.amp is None else args.amp
    if args.amp:
        torch.set_float32_matmul_precision("high")
    out_dir = common.choose_out_dir(args, f"{args.data}_{args.attn}")

    train, test = load_data(args, device, rank)
    classes, n = list(train.classes), len(train.labels)
    check_batch(args, world, n)
    torch.manual_seed(args.seed)
    model = ViT(build_config(args, len(classes))).to(device)
    groups = common.param_groups(model, args.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=args.lr, fused=device.type == "cuda")
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(args.ema)) if args.ema else None
    step, notes = start(args, model, optimizer, ema, classes)
    net = torch.compile(model) if args.compile else model
    if world > 1:
        net = DDP(net, device_ids=[device.index] if device.type == "cuda" else None)

    steps_per_epoch = n // args.batch_size
    total = args.epochs * steps_per_epoch
    stop = min(total, args.max_steps or total)
    split = "held-out" if args.holdout else "val" if args.data == "imagenet" else "test"
    master, log = rank == 0, out_dir / "log.jsonl"
    evaluations = {}                              # {step: metrics}, those that the log has
    if master:
        out_dir.mkdir(parents=True, exist_ok=True)
        rows = common.cut_log(log, step)
        evaluations = {row["step"]: row["eval"] for row in rows if "eval" in row}
        loss = next((row["loss"] for row in reversed(rows) if "loss" in row), math.nan)
        about = dict(parameters=sum(p.numel() for p in model.parameters()), device=common.describe(device), world=world)
        common.write_log(log, dict(step=step, args=vars(args), torch=torch.__version__, **about))
        print(f"{args.data}: {n} training, {len(test.labels)} {split} images, {len(classes)} classes | {args.attn} "
              f"ViT-{args.model}, {about['parameters']:,} parameters | {world} x {about['device']} | {out_dir}",
              *notes, sep="\n", flush=True)
    evaluations = common.broadcast([evaluations])[0]

    def save(name):
        if master:
            common.save_checkpoint(out_dir / name, dict(
                task="classification", model=model.state_dict(), model_config=asdict(model.config), classes=classes,
                optimizer=optimizer.state_dict(), ema=ema.module.state_dict() if ema else None, args=vars(args),
                step=step, metrics=evaluations.get(step, {})))

    def evaluation_due():
        if step in evaluations or step == 0:
            return False
        return step >= stop or step % (args.eval_every * steps_per_epoch) == 0

    def validate():
        """Evaluate and log; saving comes after, so that a kill in between repeats the evaluation."""
        try:
            metrics = score(model, ema, train, test, args, device, rank, world)
        except BaseException:     # an unreadable image, Ctrl-C: the epoch is kept
            save("last.pt")
            raise
        if not math.isfinite(metrics["loss"]):
            raise ValueError(f"the {split} loss is not finite at step {step}: try a smaller --lr, "
                             f"or --clip 1")
        evaluations[step], epoch = metrics, step / steps_per_epoch
        if master:
            keys = key_statistics(model.eval(), model, first_images(test, device))
            model.train()
            common.write_log(log, dict(step=step, epoch=epoch, eval=metrics, **keys))
            tqdm.write(f"epoch {epoch:5.1f}  training loss {loss:.4f}  "
                       f"{split} loss {metrics['loss']:.4f}  top-1 {metrics['top1']:.2f} %  "
                       f"top-5 {metrics['top5']:.2f} %")

    batches = load_batches(train, micro_batches(args, n, step, stop, rank, world), args, device, train=True)
    pending, saved = [], step       # pending: loss and gradient norm of steps not logged yet
    started = clock = time.time()
    if evaluation_due():                                 # a kill came before it
        validate()
        save("last.pt")
    with tqdm(total=stop, initial=step, desc="training", unit="step", disable=not master, dynamic_ncols=True) as bar:
        while step < stop:
            lr = common.lr_at(step, total, args.warmup_epochs * steps_per_epoch, args.lr, args.min_lr)
            for group in optimizer.param_groups:
                group["lr"] = lr
            losses = []
            for micro in range(args.accum):
                images, labels, position = next(batches)
                if micro == 0:     # after next: the first starts the loader, which draws a number
                    torch.manual_seed(hash((args.seed, step, rank)) % 2 ** 63)    # drop-path masks
                images = to_float(images, position, args.seed, args.erase)
                images, targets = mixup_cutmix(images, labels, len(classes), np.random.default_rng([args.seed, step]),
                                               args.mixup, args.cutmix, smoothing=args.smoothing)
                if world > 1:
                    net.require_backward_grad_sync = micro == args.accum - 1
                with common.autocast(device, args.amp):
                    loss = F.cross_entropy(net(images), targets) / args.accum
                loss.backward()
                losses.append(loss.detach())
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip or math.inf)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if ema:
                ema.update_parameters(model)
            step += 1
            bar.update()
            pending.append(torch.stack([sum(losses), norm]) / world)

            epoch, end_of_epoch = step / steps_per_epoch, step % steps_per_epoch == 0 or step == stop
            save_now = end_of_epoch or (args.save_every and step % args.save_every == 0)
            if save_now or step % args.log_every == 0:            # before a save, so that no broken state is kept
                kept = f"{out_dir} holds step {saved}" if saved else "Nothing was saved yet"
                loss, norm = common.collect(pending, step, kept)
                rate = len(pending) * args.batch_size / (time.time() - clock)
                pending, clock = [], time.time()
                bar.set_postfix_str(f"epoch {epoch:.1f} loss {loss:.3f} {rate:.0f} images/s")
                if master:
                    common.write_log(log, dict(step=step, epoch=epoch, loss=loss, grad_norm=norm, lr=lr, images_per_s=rate))
            if evaluation_due():
                validate()
                clock = time.time()
            if end_of_epoch and args.keep_every and epoch % args.keep_every == 0:
                save(f"epoch_{round(epoch)}.pt")
            if save_now:
                save("last.pt")                              # last of all: what a kill cuts off is done again
                saved = step
    if master:
        metrics = evaluations[step]
        skipped = f", {metrics['skipped']} unreadable training images skipped" if "skipped" in metrics else ""
        print(f"{args.data} {args.attn}: {split} accuracy {metrics['top1']:.2f} % (top-5 {metrics['top5']:.2f} %, "
              f"{metrics['images']} images{skipped}) after {step / steps_per_epoch:.1f} epochs, "
              f"{(time.time() - started) / 60:.1f} minutes; checkpoint {out_dir / 'last.pt'}")


if __name__ == "__main__":
    common.run(main)
