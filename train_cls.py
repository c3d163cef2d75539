"""Train an image classifier with robust attention: the DeiT recipe in one loop.

    python train_cls.py                                   # RPC-ViT on rendered scenes
    python train_cls.py --attn symmetric                  # its baseline
    python train_cls.py --data_dir photos                 # your own images, photos/<class>/*.jpg
    python train_cls.py --data cifar10 --data_dir data/cifar10      # add --download to get CIFAR-10
    torchrun --standalone --nproc_per_node=4 train_cls.py --data imagenet --data_dir data/imagenet
    python train_cls.py --resume out/shapes_rpc           # continue exactly where the run stopped
    python eval_robust.py --ckpt out/shapes_rpc           # test on corrupted and attacked images

Paper: Teo & Nguyen 2024, section 4.1 and App. A. Recipe: `facebookresearch/deit`. Differences from
the released code (`rachtsy/KPCA_code:Robust/main_train.py`):
- The learning rate follows a schedule. In the released code, the schedule is commented out.
- Mixed precision uses bf16 instead of fp16.
- Mixup and CutMix mix images 2i and 2i + 1 of a batch, and all processes use the same lambda. The
  released code mixes the batch with the reversed batch.

Resumed runs are bit-identical on a CPU, because every random number is a function of (seed, step or
sample). docs/data.md describes GPUs and several processes.
"""

import argparse
import copy
import math
import os
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import common  # before torch, because it sets GOMP_SPINCOUNT for torch's threads
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from tqdm import tqdm

from attention import ATTENTIONS, FORMS, LAYER_PATTERNS, key_statistics
from common import COUNT, NATURAL, REAL, SEED, SHARE, InputError
from data.augment import augment_uint8, mix, soft_targets, to_float
from data.batches import Split, image_batches, send
from data.datasets import DATASETS, largest_share, load_data, split_name
from data.photos import photo_flags
from data.rng import DROPOUT, epoch_order, seed_from
from vit import SIZES, ViT, ViTConfig


def get_args():
    """Parse the flags. Priority: command line, then the resumed run, then the recipe.

    Returns (args, checkpoint): the flags, and the checkpoint of --resume or {}.
    """
    # common.Help adds the defaults to the help texts. `common.parse_flags` adds --help.
    p = argparse.ArgumentParser(description=__doc__, formatter_class=common.Help, add_help=False,
                                usage="%(prog)s [--flag value ...]", allow_abbrev=False)
    # Types: COUNT is an int >= 1, NATURAL and SEED are ints >= 0, REAL is a float >= 0, SHARE is a
    # float in [0, 1). common.number(type, low, high) includes both ends.
    boolean = argparse.BooleanOptionalAction                        # --name and --no-name
    flag = p.add_argument_group("data").add_argument
    flag("--data", choices=DATASETS, help="choose the data set, whose recipe sets the defaults of "
         "other flags (default: folder, your own images, if --data_dir is given, else shapes)")
    flag("--data_dir", help="read images from this folder, which contains <class>/*.jpg, or "
         "train/<class>/*.jpg and val/<class>/*.jpg; docs/data.md shows all layouts")
    flag("--download", action=boolean, default=False, help="download CIFAR-10 into --data_dir")
    flag("--num_images", type=COUNT, default=16000, help="render this many training images")
    flag("--holdout", type=NATURAL, default=0, help="hold out this many training images and "
         "evaluate on them instead of the test images, for example to choose settings")
    flag("--num_workers", type=NATURAL, default=min(os.cpu_count() or 1, 10),
         help="decode ImageNet with this many processes per GPU")

    flag = p.add_argument_group("model").add_argument
    flag("--model", choices=[*SIZES, "fan_tiny", "fan_small"], help="choose the size of a ViT, "
         "or of a FAN (fully attentional network)")
    flag("--image_size", type=COUNT, help="use images with this side, in pixels")
    flag("--patch_size", type=COUNT, help="cut images into patches with this side, in pixels")
    # A layer pattern has one attention in --rpc_layers and another one in all other layers.
    flag("--attn", choices=ATTENTIONS | LAYER_PATTERNS, default="rpc", help="choose an attention; "
         "rpc is RPC-Attention in --rpc_layers and symmetric attention elsewhere")
    flag("--rpc_layers", default="0", help="use RPC-Attention in these layers, for example 0 or "
         "0,1,2 or 0-3 or all; layer 0 is the first, which the paper calls layer1")
    flag("--n_iter", type=COUNT, default=4, help="run this many steps of PAP, the algorithm in "
         "RPC-Attention; the paper uses 4 to 6 for layer 0, and 2 for all layers")
    flag("--lambd", type=common.number(float, 0, math.inf), default=4.0, help="set PAP's lambda; "
         "the paper uses 4 for layer 0, and 3 for all layers; with inf the sparse part S stays 0")
    flag("--form", choices=FORMS, default="released", help="run PAP like the released code "
         "(released), like the printed paper (paper), or like the paper with ADMM's sign (admm)")
    flag("--drop_path", type=SHARE, default=0.0, help="skip residual branches at this rate in the "
         "last block, and at smaller rates in earlier blocks (FAN: at this rate in all blocks)")
    flag("--init", choices=["default", "trunc_normal"], help="initialise Linear layers like "
         "PyTorch and the released RPC code (default), or like DeiT (trunc_normal); without this "
         "flag, a ViT uses default and a FAN trunc_normal")
    flag("--init_from", help="initialise from this checkpoint (a file or https address), whose "
         "model and patch size become the defaults of --model and --patch_size")

    flag = p.add_argument_group("training").add_argument
    flag("--epochs", type=COUNT, help="train for this many epochs, the length of the schedule")
    flag("--batch_size", type=COUNT, help="use this many images per step, over all processes")
    flag("--lr", type=REAL, help="set the highest learning rate; DeiT's is batch_size * 5e-4 / 512")
    flag("--min_lr", type=REAL, default=1e-5, help="end with this learning rate")
    flag("--warmup_epochs", type=REAL, default=1, help="warm up for this many epochs")
    flag("--weight_decay", type=REAL, default=0.05, help="set the weight decay of matrices")
    flag("--clip", type=REAL, default=1.0, help="clip the gradient to this norm (0: no clipping)")
    flag("--ema", type=SHARE, default=0.0, help="also keep a moving average of the weights with "
         "this decay; 0 turns it off")
    flag("--adv_eps", type=common.number(pixels, 0, 1), default=0.0, help="train on adversarial "
         "images, whose pixels change by up to this, for example 2/255; 0 trains on clean images")
    flag("--adv_steps", type=COUNT, default=3, help="run this many PGD steps per adversarial image")

    flag = p.add_argument_group("augmentation").add_argument
    flag("--pad", type=NATURAL, default=0, help="shift images by up to this many pixels")
    flag("--num_ops", type=NATURAL, default=0, help="apply this many RandAugment operations")
    flag("--erase", type=SHARE, default=0.0, help="erase a rectangle with this probability")
    flag("--mixup", type=REAL, default=0.0, help="turn on Mixup with this alpha")
    flag("--cutmix", type=REAL, default=0.0, help="turn on CutMix with this alpha")
    flag("--smoothing", type=SHARE, default=0.1, help="spread this share of each "
         "label over all classes (label smoothing)")
    flag("--repeats", type=COUNT, default=1, help="draw 1/REPEATS of the images per epoch, and "
         "use each drawn image REPEATS times; the number of steps stays the same")

    flag = p.add_argument_group("running").add_argument
    flag("--seed", type=SEED, default=0, help="draw weights, order and augmentation from this seed")
    flag("--device", type=common.device, help="run on cuda, mps or cpu (default: the best found)")
    flag("--amp", action=boolean, help="use bf16 autocast (default: on GPUs that support it)")
    flag("--compile", action=boolean, default=False, help="train a compiled model (torch.compile)")
    flag("--log_every", type=COUNT, default=20, help="log every LOG_EVERY steps")
    flag("--eval_every", type=COUNT, default=1, help="evaluate every EVAL_EVERY epochs")
    flag("--keep_best", action=boolean, default=False, help="hold out training images "
         "(--holdout, or a tenth if --holdout is 0), and keep the checkpoint with the lowest loss "
         "on them as best.pt (default: on for folder, else off)")
    flag("--max_steps", type=COUNT, help="stop after this many steps; the schedule stays the same")
    flag("--out_dir", help="write into this folder (default: out/<data>_<attn>)")
    flag("--resume", help="continue the run in this folder, with its flags")

    # Priority: command line, resumed run, file of --init_from, recipe, default of the flag. `given`
    # has the flags on the command line, and `stored` the flags of the resumed run.
    given, checkpoint, stored = common.resumed_run(p, "classification")
    data = given.data or stored.get("data") or ("folder" if given.data_dir else "shapes")
    from_file = {}
    if given.init_from and not given.resume:
        from checkpoints import flags_for               # flags: model, patch_size, image_size
        from_file = flags_for(common.load(given.init_from), sizes=SIZES)
        if data != "folder":
            from_file.pop("image_size", None)           # the recipe of the data set sets it
    recipe = {"data": data, **DATASETS[data].recipe, **from_file}
    args = common.parse_flags(p, recipe, stored)
    used = {name: value for name, value in from_file.items() if getattr(args, name) == value}
    if used:
        common.print0(f"flags from {args.init_from}: {used}")
    args.out_dir = common.run_folder(args, default=f"out/{data}_{args.attn}")
    return args, checkpoint


def pixels(text):
    """Read "2/255" or "0.01" as a float; a type for argparse."""
    numerator, _, denominator = text.partition("/")
    return float(numerator) / (float(denominator or 1) or math.nan)     # 2/0 becomes nan, an error


# --- batches --------------------------------------------------------------------------------------

def batch_keys(args, n, start, stop, rank, world):
    """Yield (position, index) for each step from `start` to `stop` - 1, int64 of shape (b,) each.

    position: a sample's number in the whole run, which determines its random numbers. index: the
    number of its image, 0 to n - 1. Process `rank` gets a contiguous part of the batch, b =
    batch_size / world samples, because mixing needs neighbours. Copies of an image (--repeats) are
    moved apart first, so that no image is mixed with its copy.
    """
    b, epoch_steps = args.batch_size // world, n // args.batch_size
    for step in range(start, stop):
        epoch, i = divmod(step, epoch_steps)
        if i == 0 or step == start:
            order = epoch_order(n, epoch, args.seed, args.repeats)      # (n,), shuffled images
        batch = order[i * args.batch_size:(i + 1) * args.batch_size]    # copies are neighbours
        batch = torch.cat([batch[r::args.repeats] for r in range(args.repeats)])    # copies apart
        part = slice(rank * b, (rank + 1) * b)
        yield step * args.batch_size + torch.arange(args.batch_size)[part], batch[part]


def load_batches(source, keys, args, device, transform=None):
    """Yield images (b, 3, S, S) uint8, labels (b,) and positions (b,) for each pair in `keys`.

    keys: pairs (position, index) as in `batch_keys`. Images and labels are on the device. source: a
    Split, which holds all images on the device, or a Dataset, whose files are decoded by worker
    processes. transform(images, positions) runs on the device; if the device is the CPU, the
    workers of a Dataset run it.
    """
    if isinstance(source, Split):
        for position, index in keys:
            index = send(index, device)                             # .to(device), non_blocking
            images, labels = source.images[index], source.labels[index]
            yield (transform(images, position) if transform else images), labels, position
        return
    in_worker, on_device = (transform, None) if device.type == "cpu" else (None, transform)
    keys = (list(zip(position.tolist(), index.tolist())) for position, index in keys)
    batches = image_batches(source, keys, args.num_workers, device, transform=in_worker)
    for images, labels, position in batches:                    # on the CPU; pinned for a GPU
        images, labels = (x.to(device, non_blocking=True) for x in (images, labels))
        yield (on_device(images, position) if on_device else images), labels, position


def train_batches(source, args, start, stop, device, rank, world):
    """Yield augmented images (b, 3, S, S), target distributions (b, K), and positions (b,)."""
    # Shift, flip and RandAugment change uint8 images. Then images become floats in [0, 1], and
    # random erasing and mixing follow.
    transform = partial(augment_uint8, seed=args.seed, pad=args.pad, num_ops=args.num_ops)
    keys = batch_keys(args, len(source.labels), start, stop, rank, world)
    for images, labels, position in load_batches(source, keys, args, device, transform):
        images = to_float(images, position, args.seed, erase=args.erase)
        targets = soft_targets(labels, len(source.classes), args.smoothing)
        if args.mixup or args.cutmix:                   # (seed, step) determines lambda
            step = position[0].item() // args.batch_size
            images, targets = mix(images, targets, (args.seed, step), args.mixup, args.cutmix)
        yield images, targets, position


# --- evaluation -----------------------------------------------------------------------------------

@torch.no_grad()
def evaluate(model, source, args, device, rank, world):
    """Return dict(top1, top5, loss, images): accuracies in per cent, mean loss, number of images.

    The processes share the images, and every image counts once. Top-5 accuracy is left out for
    fewer than 6 classes.
    """
    model.eval()
    mine = torch.arange(rank, len(source.labels), world)    # the images of this process
    keys = [(part, part) for part in mine.split(256) if len(part)]      # positions are not used
    batches = load_batches(source, keys, args, device)
    bar = tqdm(batches, desc="evaluating", total=len(keys), leave=False,
               disable=rank > 0 or None)                    # None: show it in a terminal only
    total = torch.zeros(3, device=device)                   # correct, correct in top 5, loss
    for images, labels, _ in bar:
        logits = model(images.float() / 255).float()        # the model takes pixels in [0, 1]
        correct = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]       # (b, 5)
        loss = F.cross_entropy(logits, labels, reduction="sum")
        total += torch.stack([correct[:, 0].sum(), correct.sum(), loss])
    model.train()
    if world > 1:
        dist.all_reduce(total)
    (top1, top5, loss), n = total.tolist(), len(source.labels)
    metrics = dict(top1=100 * top1 / n, top5=100 * top5 / n, loss=loss / n, images=n)
    if len(source.classes) < 6:
        del metrics["top5"]
    return metrics


# --- the run --------------------------------------------------------------------------------------

def learning_rate(step, warmup, total, args):
    """Return the learning rate of a step: linear warm-up from 1e-6, then a cosine to min_lr.

    The cosine begins at step 0, so the warm-up replaces its first part.
    """
    if step < warmup:
        return 1e-6 + (args.lr - 1e-6) * step / warmup
    return args.min_lr + (args.lr - args.min_lr) * (1 + math.cos(math.pi * (step / total))) / 2


def main():
    args, checkpoint = get_args()

    # Processes. torchrun starts `world` processes, one per GPU. Each process trains on its part of
    # every batch, and only rank 0 prints and writes. Without torchrun, rank is 0 and world is 1.
    rank, world, device = common.start_processes(args.device)
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    amp = has_bf16 if args.amp is None else args.amp
    torch.set_float32_matmul_precision("high" if amp else "highest")
    torch.backends.cudnn.allow_tf32 = amp                           # the same for convolutions
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=amp)

    # Data. For your own images, `photo_flags` looks at the images and chooses the flags that the
    # recipe leaves open (None), such as --image_size and --epochs. `val` contains the images to
    # evaluate on: held-out images with --holdout or --keep_best, else the test images.
    if args.download and world > 1:
        raise InputError("--download is for one process; download the data first, without torchrun")
    if args.data == "folder":
        vars(args).update(photo_flags(args))
    train, val = load_data(args, device)
    common.check_batch_size(args.batch_size, world)                 # a multiple of world
    if args.batch_size > len(train.labels):
        raise InputError(f"--batch_size {args.batch_size}: there are only {len(train.labels)} "
                         f"training images; choose a smaller batch")
    if args.batch_size // world % 2 and (args.mixup or args.cutmix):
        raise InputError(f"--batch_size {args.batch_size} gives {args.batch_size // world} images "
                         f"per process, expected an even number, because --mixup and --cutmix mix "
                         f"pairs")
    epoch_steps = len(train.labels) // args.batch_size              # only whole batches
    total, warmup = args.epochs * epoch_steps, args.warmup_epochs * epoch_steps

    # Model. The flags describe the model, also with --resume. --init_from loads the weights of the
    # head only if the number of classes agrees.
    if args.model in SIZES:
        Model, Config, size = ViT, ViTConfig, SIZES[args.model]
    else:
        from fan import FAN as Model, FAN_SIZES, FANConfig as Config
        size = FAN_SIZES[args.model]
    init = args.init or ("default" if Model is ViT else "trunc_normal")     # as in NVlabs/FAN
    config = Config(**size, image_size=args.image_size, patch_size=args.patch_size,
                    num_classes=len(train.classes), attn=args.attn, drop_path=args.drop_path,
                    rpc_layers=common.parse_layers(args.rpc_layers, size["depth"]),
                    pap=dict(n_iter=args.n_iter, lambd=args.lambd, form=args.form), init=init)
    torch.manual_seed(args.seed)
    model = Model(config).to(device)
    if world > 1 and device.type == "cuda":                         # for BatchNorm, which a FAN has
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if args.init_from and not args.resume:
        from checkpoints import load_weights
        with common.error_prefix(f"--init_from {args.init_from}"):
            notes = load_weights(model, common.load(args.init_from), new_head=True)
        common.print0(f"weights from {args.init_from}", *notes)
    # Freeze parameters here: model.patch_embed.requires_grad_(False). --resume runs this line, too.

    # Optimiser. Weight decay applies to matrices: to weights of layers, to mlp.temperature of a FAN
    # and to learned.s of Scaled Attention. `ema` is the moving average of the weights.
    matrices = ("weight", "mlp.temperature", "learned.s")
    decay, rest = [], []
    for name, p in model.named_parameters():
        if p.requires_grad:
            (decay if p.ndim > 1 and name.endswith(matrices) else rest).append(p)
    groups = [dict(params=decay, weight_decay=args.weight_decay), dict(params=rest, weight_decay=0)]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, fused=device.type == "cuda")
    ema = copy.deepcopy(model) if args.ema else None

    # Resume. The model and the data, which `about` describes, must be the same as before. The
    # checkpoint contains the weights, their average and the optimiser's state. `load_optimizer`
    # keeps the settings of this command, such as --weight_decay, which optimizer.load_state_dict
    # would replace. Random numbers have no state: they depend on seed, step and sample only.
    about = dict(classes=list(train.classes), training_images=len(train.labels))
    if checkpoint:
        common.check_unchanged(checkpoint, {**about, **asdict(config)})
        model.load_state_dict(checkpoint["model"])
        common.load_optimizer(optimizer, checkpoint["optimizer"])
        if ema:
            ema.load_state_dict(checkpoint["ema"] or checkpoint["model"])   # None: --ema is new
    first = checkpoint.get("step", 0)
    metrics, best = checkpoint.get("metrics", {}), checkpoint.get("best", {})

    # Compile the model, and average gradients over processes. `net` is trained. `model`, which has
    # the same weights, is evaluated and saved.
    compiled = torch.compile(model) if args.compile else model
    net = compiled if world == 1 else DDP(compiled, gradient_as_bucket_view=True)

    # The log has one JSON object per line. A resumed run keeps the rows up to step `first`. The
    # next row contains flags, commit, hardware and data.
    out_dir = Path(args.out_dir)
    if rank == 0:
        log = common.Log(out_dir, first)
        parameters = sum(p.numel() for p in model.parameters())
        log.append(dict(step=first, args=vars(args), **common.code_version(), world=world,
                        device=common.describe(device), parameters=parameters,
                        training_images=len(train.labels)))
        common.print0(f"{parameters:,} parameters | {world} x {common.describe(device)} | {out_dir}"
                      + (f" | resumed at step {first}" if first else ""))

    # The loop. --max_steps stops it early, and does not change the schedule of --epochs.
    stop = max(first, min(total, args.max_steps or total))
    batches = train_batches(train, args, first, stop, device, rank, world)
    if args.adv_eps:
        from robust.adversarial import adversarial
    bar = tqdm(range(first, stop), desc="training", total=stop, initial=first, unit="step",
               disable=rank > 0 or None, dynamic_ncols=True)    # None: show it in a terminal only
    began = clock = time.time()
    pending = []                            # loss and gradient norm of the steps not yet logged
    for step in bar:
        lr = learning_rate(step, warmup, total, args)
        for group in optimizer.param_groups:
            group["lr"] = lr

        # A batch. Adversarial training changes its pixels so that the network's loss rises. The
        # attack uses `compiled`, because DDP (`net`) needs a backward pass after each forward pass.
        images, targets, position = next(batches)
        if args.adv_eps:
            with autocast:
                images = adversarial(compiled, images, targets, first=position[0].item(),
                                     eps=args.adv_eps, steps=args.adv_steps, seed=args.seed)

        # Forward and backward. Each step and process has its own seed for drop path, so a resumed
        # run draws the same masks.
        torch.manual_seed(seed_from(args.seed, DROPOUT, step, rank))    # a hash; DROPOUT is fixed
        with autocast:
            loss = F.cross_entropy(net(images), targets)
        loss.backward()

        # Clip the gradient, update the weights, and update their average.
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip or math.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if ema:                                         # at step 0, the average copies the weights
            with torch.no_grad():
                torch._foreach_lerp_([*ema.parameters()], [*model.parameters()],
                                     1 - args.ema if step else 1.0)
                torch._foreach_copy_([*ema.buffers()], [*model.buffers()])
        pending.append(torch.stack([loss.detach(), norm]))          # stays on the device

        # The step number decides when to evaluate, save and log, so all processes agree. Evaluate
        # every --eval_every epochs and at the end. Save after every evaluation and every epoch. Log
        # after every --log_every steps, and whenever the run is saved.
        done, epoch = step + 1, (step + 1) / epoch_steps
        evaluating = done == stop or done % (args.eval_every * epoch_steps) == 0
        saving = evaluating or done % epoch_steps == 0
        logging = saving or done % args.log_every == 0

        # Log the means over all processes and all steps since the last row. `finite_means` ends the
        # run, and names the step, if a loss or gradient is not finite. The CPU waits for the device
        # here, and not at every step.
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

        # Evaluate. The paper reports the weights themselves, not their average. On a few images,
        # also measure mean |k| and the share of nonzero entries of S in each layer. These numbers
        # show whether RPC acts.
        metrics = {}
        if evaluating:
            with autocast:
                metrics = evaluate(model, val, args, device, rank, world)
                if ema:
                    metrics["ema_top1"] = evaluate(ema, val, args, device, rank, world)["top1"]
            if rank == 0:
                log.append(dict(step=done, eval=metrics, epoch=epoch,
                                **key_statistics(model, forward=model.forward, inputs=images[:32])))
            numbers = "  ".join(f"{name} {value:.2f}" for name, value in metrics.items()
                                if isinstance(value, float))
            common.print0(f"step {done:6d}  training loss {loss:.4f}   {numbers}  largest class "
                          f"{largest_share(val):.2f}")

        # Save. A file is replaced completely or not at all. A run that is killed before this line
        # repeats the evaluation when it is resumed.
        if saving and rank == 0:
            better = args.keep_best and metrics and metrics["loss"] < best.get("loss", math.inf)
            if better:
                best = dict(step=done, **metrics)
            state = dict(task="classification", architecture="vit" if Model is ViT else "fan",
                         args=vars(args), step=done, metrics=metrics, best=best,
                         model=model.state_dict(), optimizer=optimizer.state_dict(),
                         ema=ema and ema.state_dict(), model_config=asdict(config), **about)
            if better:
                common.save(out_dir / "best.pt", state)
            common.save(out_dir / "last.pt", state)
        if logging:
            clock, pending = time.time(), []    # the speed excludes evaluation and saving

    # Print the result, if the last step was evaluated.
    if metrics:
        top5 = f"top-5 {metrics['top5']:.2f} %, " if "top5" in metrics else ""
        common.print0(f"{args.data} {args.attn}: {split_name(args)} accuracy "
                      f"{metrics['top1']:.2f} % ({top5}{metrics['images']} images, "
                      f"{largest_share(val):.1f} % of them in the largest class) after "
                      f"{stop / epoch_steps:.1f} epochs, {(time.time() - began) / 60:.1f} minutes")
        if best:
            common.print0(f"best.pt: the lowest validation loss, {best['loss']:.3f}, was after "
                          f"{best['step'] / epoch_steps:.1f} epochs (accuracy {best['top1']:.2f} "
                          f"%); the next command evaluates best.pt on the test images")
        common.print0(f"next: {common.command('eval_robust.py', '--ckpt', out_dir)}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    common.run(main)        # prints an InputError as one line
