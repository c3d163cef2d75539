"""Train an image classifier with robust attention: the DeiT recipe in one loop.

    python train_cls.py                                   # RPC-ViT on rendered scenes
    python train_cls.py --attn symmetric                  # its baseline
    python train_cls.py --data_dir photos                 # images of your own, photos/<class>/*.jpg
    python train_cls.py --data cifar10 --data_dir data/cifar10               # --download fetches it
    torchrun --standalone --nproc_per_node=4 train_cls.py --data imagenet --data_dir data/imagenet
    python train_cls.py --resume out/shapes_rpc           # go on exactly where it stopped
    python eval_robust.py --ckpt out/shapes_rpc           # corrupted and attacked

Paper: Teo & Nguyen 2024, section 4.1 and App. A; recipe `facebookresearch/deit`. Where this differs
from the released code (`rachtsy/KPCA_code:Robust/main_train.py`): the learning rate is scheduled
(there the line is commented out), bf16 instead of fp16, images are mixed with their neighbour
instead of the reversed batch, one lambda per step.
Stopping and resuming changes no number, nor do more processes but for float noise and the masks of
drop path, which are per process: random numbers depend on (seed, step or sample) alone.
"""

import argparse
import math
import os
import time
from functools import partial

import torch
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tqdm import tqdm

import common
from attention import ATTENTIONS, FORMS, LAYER_PATTERNS, key_statistics
from common import COUNT, NATURAL, REAL, SHARE, InputError
from data.augment import augment_uint8, soft_targets, to_float
from data.batches import Split, image_batches, send
from data.images import DATASETS, choose, largest_share, load_data, split_name
from data.rng import epoch_order
from vit import SIZES, ViT, ViTConfig

# Each data set has its recipe, in data/images.py; these models have one of their own. Flags win.
RECIPES = {name: recipe for name, (_, recipe) in DATASETS.items()} | {
    ("imagenet", "base"): dict(clip=1.0),
    # the paper's authors' (rachtsy/FAN:scripts/fan_vit/fan_net_tiny.sh), not run here
    ("imagenet", "fan_tiny"): dict(batch_size=512, lr=2e-3, min_lr=1e-6, drop_path=0.0, repeats=1,
                                   ema=0.99992),
    # FAN's authors' (NVlabs/FAN), not run here
    ("imagenet", "fan_small"): dict(lr=2e-3, min_lr=1e-6, drop_path=0.2, repeats=1, ema=0.99992),
}


def get_args():
    """Read the flags; see common.parse."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=common.Help,
                                usage="%(prog)s [--flag value ...]", allow_abbrev=False)
    boolean = argparse.BooleanOptionalAction
    flag = p.add_argument_group("data").add_argument
    flag("--data", choices=DATASETS, help="the recipe; without it rendered scenes (shapes) or, "
         "with --data_dir, images of your own (folder)")
    flag("--data_dir", help="folder: <class>/*.jpg, or train/ and val/ of those; "
         "imagenet: the latter; cifar10: torchvision's files, class folders or a tar of them")
    flag("--download", action=boolean, default=False, help="cifar10: fetch it into --data_dir")
    flag("--num_images", type=COUNT, default=16000, help="shapes: training images to render")
    flag("--holdout", type=NATURAL, default=0, help="train without HOLDOUT of the training images "
         "and evaluate on those: to choose settings there, not on the test split")
    flag("--num_workers", type=NATURAL, default=min(os.cpu_count() or 1, 10),
         help="imagenet: decoding processes per GPU")

    flag = p.add_argument_group("model").add_argument
    flag("--model", choices=[*SIZES, "fan_tiny", "fan_small"], help="nano to base: ViT")
    flag("--image_size", type=COUNT, help="pixels, a multiple of --patch_size")
    flag("--patch_size", type=COUNT, help="pixels")
    common.add_attention(flag, list(dict.fromkeys([*ATTENTIONS, *LAYER_PATTERNS])), FORMS)
    flag("--drop_path", type=SHARE, default=0.0, help="rate of the last block (FAN: of each)")
    flag("--init", choices=["trunc_normal", "default"], help="Linear layers as DeiT's, or torch's "
         "as the released RPC code; None: default, but for a FAN and, on imagenet, for attention "
         "other than symmetric or rpc")
    flag("--init_from", help="start from these weights (file or https address; App. E.6)")

    flag = p.add_argument_group("training").add_argument
    flag("--epochs", type=COUNT, help="the learning rate falls until then")
    flag("--batch_size", type=COUNT, help="over all processes and micro-batches")
    flag("--accum", type=COUNT, default=1, help="micro-batches per step and process")
    flag("--lr", type=REAL, help="peak learning rate (AdamW); DeiT's rule: 5e-4 * batch_size / 512")
    flag("--min_lr", type=REAL, default=1e-5, help="at the end of the cosine")
    flag("--warmup_epochs", type=REAL, default=1, help="linear warm-up from 1e-6")
    flag("--weight_decay", type=REAL, default=0.05, help="of the matrices of Linear and Conv alone")
    flag("--clip", type=REAL, default=1.0, help="largest gradient norm; 0: any")
    flag("--ema", type=SHARE, default=0.0, help="decay of the weight average; 0: none")
    flag("--eval_every", type=COUNT, default=1, help="epochs between evaluations")
    flag("--keep_every", type=NATURAL, default=0, help="epochs; also keep epoch_<n>.pt; 0: none")
    flag("--keep_best", action=boolean, default=False, help="also keep best.pt, of the evaluation "
         "with the lowest loss: for images that are held out to choose by (folder: on)")
    flag("--adv_eps", type=common.number(pixels, 0, 1), default=0.0,
         help="adversarial training: pixels move by up to this, as 2/255; 0: none")
    flag("--adv_steps", type=COUNT, default=3, help="PGD steps that find where they move")

    flag = p.add_argument_group("augmentation").add_argument
    flag("--pad", type=NATURAL, default=0, help="random shift by up to PAD pixels (small images)")
    flag("--num_ops", type=NATURAL, default=0, help="RandAugment operations per image; DeiT: 2")
    flag("--erase", type=SHARE, default=0.0, help="probability of random erasing")
    flag("--mixup", type=REAL, default=0.0, help="alpha; 0: none")
    flag("--cutmix", type=REAL, default=0.0, help="alpha; 0: none")
    flag("--smoothing", type=SHARE, default=0.1, help="label smoothing")
    flag("--repeats", type=COUNT, default=1, help="crops of an image in an epoch that draws it")

    common.add_running(p, "<data>_<attn>", "--epochs")
    args = common.parse(p, RECIPES, "train_cls.py")
    if args.init_from and not args.resume:
        args = follow_file(p, args)
    vars(args).update(choose(args))
    deit = args.data == "imagenet" and args.attn not in ("symmetric", "rpc")    # theirs: torch's
    args.init = args.init or ("trunc_normal" if deit or args.model not in SIZES else "default")
    if args.warmup_epochs > args.epochs:
        raise InputError(f"--warmup_epochs {args.warmup_epochs} is longer than the run, --epochs "
                         f"{args.epochs}")
    return args


def pixels(text):
    """Read 2/255 or 0.01."""
    over, _, under = text.partition("/")
    return float(over) / (float(under or 1) or math.nan)            # n/0: not in any range


def follow_file(p, args):
    """Parse again: where no flag says model, patch or own photos' size, --init_from does."""
    from weights import flags_for
    found = flags_for(common.load(args.init_from), SIZES)
    if args.data != "folder":                                       # the recipe says which
        found.pop("image_size", None)
    p.set_defaults(**found, **RECIPES.get((args.data, found.get("model")), {}))
    again = p.parse_args()
    if vars(again) != vars(args):
        chosen = " ".join(f"--{name} {getattr(again, name)}" for name in found)
        common.print0(f"as in {args.init_from}: {chosen}")
    return again


# --- data -----------------------------------------------------------------------------------------

def micro_batches(args, n, start, total, rank, world):
    """Yield this rank's (index, position), (b,) int64 each, per micro-batch.

    start, total: steps. position numbers the samples of the whole run. A process takes a contiguous
    slice of the global batch, so neighbours, which are mixed with each other, stay together; copies
    of an image (repeats) are spread before.
    """
    b, epoch_steps = args.batch_size // (world * args.accum), n // args.batch_size
    for step in range(start, total):
        epoch, i = divmod(step, epoch_steps)
        if i == 0 or step == start:
            order = epoch_order(n, epoch, args.seed, args.repeats)
        batch = order[i * args.batch_size:(i + 1) * args.batch_size]
        batch = torch.cat([batch[r::args.repeats] for r in range(args.repeats)])
        for micro in range(rank * args.accum, (rank + 1) * args.accum):
            part = slice(micro * b, (micro + 1) * b)
            yield batch[part], step * args.batch_size + torch.arange(args.batch_size)[part]


def load_batches(source, keys, args, device, transform=None):
    """Load images (b, 3, S, S) uint8 and labels (b,), on the device, of (index, position) keys.

    transform(images, positions): on the device or, where that is the CPU, in the worker processes.
    """
    if isinstance(source, Split):
        for index, position in keys:
            index = send(index, device)
            images, labels = source.images[index], source.labels[index]
            yield (transform(images, position) if transform else images), labels, position
        return
    in_worker, on_device = (transform, None) if device.type == "cpu" else (None, transform)
    keys = (list(zip(position.tolist(), index.tolist())) for index, position in keys)
    batches = image_batches(source, keys, args.num_workers, device, transform=in_worker)
    for images, labels, position in batches:
        images, labels = (x.to(device, non_blocking=True) for x in (images, labels))
        yield (on_device(images, position) if on_device else images), labels, position


def train_batches(source, args, start, total, device, rank, world):
    """Augment images: (b, 3, S, S) float, and targets (b, K), a distribution each."""
    transform = partial(augment_uint8, seed=args.seed, pad=args.pad, num_ops=args.num_ops)
    keys = micro_batches(args, len(source.labels), start, total, rank, world)
    for images, labels, position in load_batches(source, keys, args, device, transform):
        images = to_float(images, position, args.seed, args.erase)
        targets = soft_targets(labels, len(source.classes), args.smoothing)
        if args.mixup or args.cutmix:
            from data.randaugment import mix
            key = (args.seed, position[0].item() // args.batch_size)    # one lambda for a step
            images, targets = mix(images, targets, key, args.mixup, args.cutmix)
        yield images, targets


# --- evaluation -----------------------------------------------------------------------------------

@torch.no_grad()
def evaluate(model, source, args, device, rank, world):
    """Measure top-1, top-5 accuracy in per cent and loss; every image counts once."""
    model.eval()
    share = torch.arange(rank, len(source.labels), world)
    parts = [part for part in share.split(256) if len(part)]        # more processes than images
    total = torch.zeros(3, device=device)                   # right, right in top 5, loss
    batches = load_batches(source, [(part, part) for part in parts], args, device)
    quiet = rank > 0 or None                            # None: where output is redirected
    for images, labels, _ in tqdm(batches, "evaluating", len(parts), disable=quiet, leave=False):
        with common.autocast(device, args.amp):
            logits = model(images.float() / 255).float()
        right = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
        loss = F.cross_entropy(logits, labels, reduction="sum")
        total += torch.stack([right[:, 0].sum(), right.sum(), loss])
    model.train()
    images = len(source.labels)
    top1, top5, loss = common.all_sum(total).tolist()
    found = dict(top1=100 * top1 / images, top5=100 * top5 / images, loss=loss / images,
                 images=images)
    if len(source.classes) < 6:
        del found["top5"]
    return found


def evaluate_run(model, ema, test, args, device, rank, world):
    """Evaluate a model, and its average where there is one; the paper reports the raw model.

    Returns the metrics and, on rank 0, whether the robust part acted: key_statistics.
    """
    metrics = evaluate(model, test, args, device, rank, world)
    if ema:
        metrics["ema_top1"] = evaluate(ema.module, test, args, device, rank, world)["top1"]
    if rank:
        return metrics, {}
    few = torch.arange(min(len(test.labels), 32))
    images, _, _ = next(load_batches(test, [(few, few)], args, device))
    return metrics, key_statistics(model, model, images.float() / 255)


# --- the run --------------------------------------------------------------------------------------

def build(args, train, device):
    """Build model, optimiser and weight average or None; load what --resume or --init_from names.

    Also returns the checkpoint of --resume, {} without one.
    """
    checkpoint = common.load_run(args, classes=list(train.classes),
                                 training_images=len(train.labels))
    Model, Config, size = ViT, ViTConfig, SIZES.get(args.model)
    if args.model not in SIZES:
        from fan import FAN as Model, SIZES as fans, FANConfig as Config
        size = fans[args.model]
    layers = common.parse_layers(args.rpc_layers, size["depth"])
    config = Config(**size, image_size=args.image_size, patch_size=args.patch_size,
                    num_classes=len(train.classes), attn=args.attn, rpc_layers=layers,
                    pap=common.pap_of(args), drop_path=args.drop_path, init=args.init)
    torch.manual_seed(args.seed)
    model = Model(config).to(device)
    if args.init_from and not args.resume:
        from weights import load_weights
        with common.error_prefix(f"--init_from {args.init_from}"):
            notes = load_weights(model, common.load(args.init_from), new_head=True)
        common.print0(f"weights from {args.init_from}", *notes)
    # To freeze a part, say so here, `model.patch_embed.requires_grad_(False)`: --resume passes by.

    also = "mlp.temperature", "learned.s"               # FAN's, Scaled Attention's: as theirs
    groups = common.param_groups(model, args.weight_decay, also)
    optimizer = torch.optim.AdamW(groups, lr=args.lr, fused=device.type == "cuda")
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(args.ema)) if args.ema else None
    if checkpoint:
        common.restore(checkpoint, model, optimizer)
        if ema:
            ema.module.load_state_dict(checkpoint["ema"])
            ema.n_averaged.fill_(checkpoint["step"])
    return model, optimizer, ema, checkpoint


def check_batch(args, world, n):
    """Raise InputError unless the images fill a batch and pairs that are mixed stay together."""
    b = args.batch_size // (world * args.accum)
    if b % 2 and (args.mixup or args.cutmix):
        raise InputError(f"--batch_size {args.batch_size} gives {b} images per process and "
                         f"micro-batch; mixup and cutmix mix pairs, so that number has to be even")
    if args.batch_size > n:
        raise InputError(f"--batch_size {args.batch_size} is more than the {n} training images")


def main():
    # Flags, processes, data, then the model: a new one, or the one that --resume names.
    args = get_args()
    device, rank, world, out_dir = common.start(args, f"{args.data}_{args.attn}")
    train, test = load_data(args, device)
    check_batch(args, world, len(train.labels))
    model, optimizer, ema, checkpoint = build(args, train, device)
    net = common.wrap(model, device, world, args.compile)
    first, metrics = checkpoint.get("step", 0), checkpoint.get("metrics", {})
    best = checkpoint.get("best") or dict(step=0, loss=math.inf)
    log = common.begin(args, out_dir, first, model, device, rank, world,
                       training_images=len(train.labels))

    # An epoch has whole batches only. --max_steps stops early, on the schedule of --epochs.
    epoch_steps = len(train.labels) // args.batch_size
    total, warmup = args.epochs * epoch_steps, args.warmup_epochs * epoch_steps
    stop = max(first, min(total, args.max_steps or total))
    batches = train_batches(train, args, first, stop, device, rank, world)
    bar = common.progress(first, stop, rank)
    largest = largest_share(test)
    began, clock, pending = time.time(), time.time(), []
    if args.adv_eps:
        from robust.adversarial import adversarial
    for step in bar:
        # The learning rate rises during the warm-up, then falls along half a cosine.
        lr = common.lr_at(step, total, warmup, args.lr, args.min_lr)
        for group in optimizer.param_groups:
            group["lr"] = lr

        # Forward and backward. The gradients of micro-batches add up; processes share theirs in
        # the last one. Drop path draws from a seed of this step, so a resumed run draws the same.
        loss = 0.0
        for micro in range(args.accum):
            images, targets = next(batches)
            if args.adv_eps:                # adversarial training: on images made for this step
                number = step * args.batch_size + (rank * args.accum + micro) * len(images)
                images = adversarial(model, images, targets, number, args)
            if micro == 0:                                          # after the loader has started
                torch.manual_seed(common.seed_of(args.seed, step, rank))
            net.require_backward_grad_sync = micro == args.accum - 1
            with common.autocast(device, args.amp):
                part = F.cross_entropy(net(images), targets) / args.accum
            part.backward()
            loss += part.detach()

        # Clip the gradient and take the step; the average of the weights follows.
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip or math.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if ema:
            ema.update_parameters(model)
        pending.append(torch.stack([loss, norm]) / world)           # stays on the device

        # What is due? By the step alone, so that all processes agree: an evaluation every few
        # epochs and at the end; a row of the log and a checkpoint then, after every epoch and every
        # --save_every steps; further rows every --log_every steps.
        done, epoch = step + 1, (step + 1) / epoch_steps
        epoch_ends = common.every(done, epoch_steps)
        evaluating = done == stop or common.every(done, args.eval_every * epoch_steps)
        saving = evaluating or epoch_ends or common.every(done, args.save_every)

        # Log the means since the last row. Reading them waits for the device.
        if saving or common.every(done, args.log_every):
            loss, norm = common.mean_of(pending, done)
            seconds = (time.time() - clock) / len(pending)
            rate = args.batch_size / seconds
            log.append(dict(step=done, loss=loss, grad_norm=norm, images_per_s=rate, epoch=epoch,
                            lr=lr))
            common.show_progress(bar, done, loss, rate, "images", seconds)
            pending, clock = [], time.time()

        # Evaluate; the speed of the next row leaves this time out.
        metrics = {}
        if evaluating:
            metrics, keys = evaluate_run(model, ema, test, args, device, rank, world)
            log.append(dict(step=done, eval=metrics, epoch=epoch, **keys))
            common.print0(common.line(done, loss, metrics) + f"  largest class {largest:.2f}")
            clock = time.time()

        # Save; only rank 0 does, so here a clock may decide, too. last.pt is written last, so a run
        # killed earlier repeats the evaluation.
        if saving and rank == 0:
            better = args.keep_best and metrics and metrics["loss"] < best["loss"]
            if better:
                best = dict(step=done, **metrics)
            checkpoint = common.state_of(
                "train_cls.py", model, optimizer, args, done, classes=list(train.classes),
                training_images=len(train.labels), metrics=metrics, best=best,
                ema=ema and ema.module.state_dict())
            if epoch_ends and common.every(done // epoch_steps, args.keep_every):
                common.save(out_dir / f"epoch_{done // epoch_steps}.pt", checkpoint)
            if better:
                common.save(out_dir / "best.pt", checkpoint)
            common.save(out_dir / "last.pt", checkpoint)

    # The result, where the last step was evaluated.
    if metrics:
        top5 = f"top-5 {metrics['top5']:.2f} %, " if "top5" in metrics else ""
        common.print0(f"{args.data} {model.config.attn}: {split_name(args)} accuracy "
                      f"{metrics['top1']:.2f} % ({top5}{metrics['images']} images, "
                      f"{largest:.1f} % of them of the largest class) after "
                      f"{stop / epoch_steps:.1f} epochs, {(time.time() - began) / 60:.1f} minutes")
        if best["step"]:
            common.print0(f"best.pt: the lowest loss, {best['loss']:.3f}, was after "
                          f"{best['step'] / epoch_steps:.1f} epochs, accuracy {best['top1']:.2f} %")
        common.print0(f"next: python eval_robust.py --ckpt {out_dir}")


if __name__ == "__main__":
    common.run(main)
