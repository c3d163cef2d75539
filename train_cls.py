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
Stopping and resuming changes no number: what is random depends on (seed, step or sample) alone. Nor
do more processes, but for float noise and the masks of drop path, which depend on the process, too.
To the last bit that holds on a CPU; on a GPU the backward of fused attention adds in no fixed
order.
"""

import argparse
import copy
import math
import os
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from tqdm import tqdm

import common
from attention import ATTENTIONS, FORMS, LAYER_PATTERNS, key_statistics
from common import COUNT, NATURAL, REAL, SHARE, InputError
from data.augment import augment_uint8, soft_targets, to_float
from data.batches import Split, image_batches, send
from data.datasets import DATASETS, choose, largest_share, load_data, split_name
from data.rng import epoch_order
from vit import SIZES, ViT, ViTConfig


def get_args():
    """Read the flags: a recipe's are the defaults, then those of a run to resume. Flags win.

    Returns them and the checkpoint of --resume, {} without one.
    """
    p = argparse.ArgumentParser(description=__doc__, formatter_class=common.Help, add_help=False,
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
    flag("--attn", choices=dict.fromkeys([*ATTENTIONS, *LAYER_PATTERNS]), default="rpc",
         help="rpc: symmetric, with RPC-Attention in --rpc_layers")
    flag("--rpc_layers", default="0", help="from 0: 0 (the paper's layer1), all, 0,1,2 or 0-3")
    flag("--n_iter", type=COUNT, default=4, help="PAP steps; the paper: 4-6 in layer 0, 2 in all")
    flag("--lambd", type=common.number(float, 0, math.inf), default=4.0,
         help="PAP lambda; the paper: 4 in layer 0, 3 in all; inf: never shrink")
    flag("--form", choices=FORMS, default="released", help="reading of Algorithm 1: attention.py")
    flag("--drop_path", type=SHARE, default=0.0, help="rate of the last block (FAN: of each)")
    flag("--init", choices=["trunc_normal", "default"], help="Linear layers as DeiT's, or torch's "
         "as the released RPC code; None: default, but for a FAN and, on imagenet, for attention "
         "other than symmetric or rpc")
    flag("--init_from", help="start from these weights (file or https address; App. E.6); model "
         "and patch size are theirs where no flag says otherwise")

    flag = p.add_argument_group("training").add_argument
    flag("--epochs", type=COUNT, help="the learning rate falls until then")
    flag("--batch_size", type=COUNT, help="over all processes")
    flag("--lr", type=REAL, help="peak learning rate (AdamW); DeiT's rule: 5e-4 * batch_size / 512")
    flag("--min_lr", type=REAL, default=1e-5, help="at the end of the cosine")
    flag("--warmup_epochs", type=REAL, default=1, help="linear warm-up from 1e-6")
    flag("--weight_decay", type=REAL, default=0.05, help="of matrices alone")
    flag("--clip", type=REAL, default=1.0, help="largest gradient norm; 0: any")
    flag("--ema", type=SHARE, default=0.0, help="decay of the weight average; 0: none")
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

    flag = p.add_argument_group("running").add_argument
    flag("--seed", type=common.number(int, 0, 2 ** 31 - 1), default=0, help="of weights, order and "
         "noise")
    flag("--device", type=common.device, help="cuda, mps or cpu; None: the best there is")
    flag("--amp", action=boolean, help="bf16 autocast; None: on GPUs that have it")
    flag("--compile", action=boolean, default=False, help="torch.compile the model, to train")
    flag("--log_every", type=COUNT, default=20, help="steps between rows of log.jsonl")
    flag("--eval_every", type=COUNT, default=1, help="epochs between evaluations")
    flag("--keep_best", action=boolean, default=False, help="also keep best.pt, of the evaluation "
         "with the lowest loss: for images that are held out to choose by (folder: on)")
    flag("--max_steps", type=COUNT, help="stop early; the schedule stays that of --epochs")
    flag("--out_dir", help="None: out/<data>_<attn>")
    flag("--resume", help="folder of a run to continue; its flags are the defaults")

    # A setting is the command line's, else that of the run to resume, of weights to start from, of
    # the recipe, or the flag's default.
    asked, checkpoint, stored, theirs = p.parse_known_args()[0], {}, {}, {}
    if asked.resume:
        checkpoint = common.load(Path(asked.resume, "last.pt"))
        if checkpoint.get("task") != "classification":
            raise InputError(f"--resume {asked.resume}: its task is {checkpoint.get('task')}, not "
                             f"classification")
        # What is of one command or machine is not remembered.
        stored = {name: value for name, value in checkpoint["args"].items()
                  if name not in ("device", "download", "max_steps", "out_dir", "resume")}
    data = asked.data or stored.get("data") or ("folder" if asked.data_dir else "shapes")
    if asked.init_from and not asked.resume:
        from checkpoints import flags_for
        theirs = flags_for(common.load(asked.init_from), SIZES)     # model, patch_size, image_size
        if data != "folder":
            theirs.pop("image_size", None)                          # a data set has its own
    p.set_defaults(**{"data": data, **DATASETS[data][1], **theirs, **stored})
    p.add_argument("-h", "--help", action="help", help="print this, with the recipe's defaults")
    args = p.parse_args()
    changed = {name: getattr(args, name) for name in stored if getattr(args, name) != stored[name]}
    if theirs:
        common.print0(f"as in {args.init_from}: {theirs}")
    if changed:
        common.print0(f"other flags: {changed}")

    if data == "shapes" and args.data_dir:
        raise InputError(f"--data_dir {args.data_dir}: --data shapes renders its own images")
    if data == "folder" and not args.data_dir:
        raise InputError("--data folder needs --data_dir")
    if args.out_dir and args.resume:
        raise InputError("--out_dir does not go with --resume, which continues in its own folder")
    args.out_dir = args.resume or args.out_dir or f"out/{data}_{args.attn}"
    if Path(args.out_dir, "last.pt").exists() and not args.resume:
        raise InputError(f"{args.out_dir} holds a run: go on with it by --resume {args.out_dir}, "
                         f"or choose another --out_dir")
    return args, checkpoint


def pixels(text):
    """Read 2/255 or 0.01, a type for argparse."""
    over, _, under = text.partition("/")
    return float(over) / (float(under or 1) or math.nan)            # 2/0: in no range


# --- batches --------------------------------------------------------------------------------------

def batch_keys(args, n, start, stop, rank, world):
    """Yield this rank's (position, index), (b,) int64 each, for each step from `start` to `stop`.

    index: which image. position: the number of the sample in the whole run; what is random about a
    sample depends on it. A process takes a contiguous slice of the batch, so that neighbours, which
    are mixed with each other, stay together; copies of an image (repeats) are spread before.
    """
    b, epoch_steps = args.batch_size // world, n // args.batch_size
    for step in range(start, stop):
        epoch, i = divmod(step, epoch_steps)
        if i == 0 or step == start:
            order = epoch_order(n, epoch, args.seed, args.repeats)
        batch = order[i * args.batch_size:(i + 1) * args.batch_size]
        batch = torch.cat([batch[r::args.repeats] for r in range(args.repeats)])
        part = slice(rank * b, (rank + 1) * b)
        yield step * args.batch_size + torch.arange(args.batch_size)[part], batch[part]


def load_batches(source, keys, args, device, transform=None):
    """Yield images (b, 3, S, S) uint8, labels (b,), on the device, and positions of each of keys.

    source: a Split, in memory on the device, or a Dataset of files, which workers decode.
    transform(images, positions): on the device or, where that is the CPU, in the workers.
    """
    if isinstance(source, Split):
        for position, index in keys:
            index = send(index, device)
            images, labels = source.images[index], source.labels[index]
            yield (transform(images, position) if transform else images), labels, position
        return
    in_worker, on_device = (transform, None) if device.type == "cpu" else (None, transform)
    keys = (list(zip(position.tolist(), index.tolist())) for position, index in keys)
    batches = image_batches(source, keys, args.num_workers, device, transform=in_worker)
    for images, labels, position in batches:
        images, labels = (x.to(device, non_blocking=True) for x in (images, labels))
        yield (on_device(images, position) if on_device else images), labels, position


def train_batches(source, args, start, stop, device, rank, world):
    """Yield augmented images (b, 3, S, S), targets (b, K), a distribution each, and positions."""
    transform = partial(augment_uint8, seed=args.seed, pad=args.pad, num_ops=args.num_ops)
    keys = batch_keys(args, len(source.labels), start, stop, rank, world)
    for images, labels, position in load_batches(source, keys, args, device, transform):
        images = to_float(images, position, args.seed, args.erase)
        targets = soft_targets(labels, len(source.classes), args.smoothing)
        if args.mixup or args.cutmix:
            from data.randaugment import mix
            key = args.seed, position[0].item() // args.batch_size      # one lambda for a step
            images, targets = mix(images, targets, key, args.mixup, args.cutmix)
        yield images, targets, position


# --- evaluation -----------------------------------------------------------------------------------

@torch.no_grad()
def evaluate(model, source, args, device, rank, world):
    """Measure top-1, top-5 accuracy in per cent and loss; every image counts once."""
    model.eval()
    mine = torch.arange(rank, len(source.labels), world)
    keys = [(part, part) for part in mine.split(256) if len(part)]
    total = torch.zeros(3, device=device)                   # right, right in top 5, loss
    quiet = rank > 0 or None                                # None: if not in a terminal
    for images, labels, _ in tqdm(load_batches(source, keys, args, device), "evaluating", len(keys),
                                  disable=quiet, leave=False):
        logits = model(images.float() / 255).float()
        right = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
        loss = F.cross_entropy(logits, labels, reduction="sum")
        total += torch.stack([right[:, 0].sum(), right.sum(), loss])
    model.train()
    if world > 1:
        dist.all_reduce(total)
    (top1, top5, loss), n = total.tolist(), len(source.labels)
    found = dict(top1=100 * top1 / n, top5=100 * top5 / n, loss=loss / n, images=n)
    if len(source.classes) < 6:
        del found["top5"]
    return found


# --- the run --------------------------------------------------------------------------------------

def learning_rate(step, warmup, total, args):
    """Rise linearly from 1e-6, then fall along half a cosine, whose phase counts from step 0."""
    if step < warmup:
        return 1e-6 + (args.lr - 1e-6) * step / warmup
    return args.min_lr + (args.lr - args.min_lr) * (1 + math.cos(math.pi * (step / total))) / 2


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
    if args.download and world > 1:
        raise InputError("--download is for one process: fetch the data first, without torchrun")
    vars(args).update(choose(args))
    train, test = load_data(args, device)
    if args.batch_size % world:
        raise InputError(f"--batch_size {args.batch_size}: expected a multiple of {world}, the "
                         f"number of processes")
    if args.batch_size > len(train.labels):
        raise InputError(f"--batch_size {args.batch_size}: there are only {len(train.labels)} "
                         f"training images")
    if args.batch_size // world % 2 and (args.mixup or args.cutmix):
        raise InputError(f"--batch_size {args.batch_size} gives {args.batch_size // world} images "
                         f"a process; mixup and cutmix mix pairs, so that number has to be even")
    epoch_steps = len(train.labels) // args.batch_size              # whole batches only
    total, warmup = args.epochs * epoch_steps, args.warmup_epochs * epoch_steps

    # Model. The flags describe it; a checkpoint's has to be the same. The released RPC code starts
    # from torch's Linear layers, FAN and all that is compared with DeiT on ImageNet from DeiT's.
    if args.model in SIZES:
        Model, Config, size = ViT, ViTConfig, SIZES[args.model]
    else:
        from fan import FAN as Model, SIZES as FAN_SIZES, FANConfig as Config
        size = FAN_SIZES[args.model]
    released = Model is ViT and (args.data != "imagenet" or args.attn in ("symmetric", "rpc"))
    config = Config(**size, image_size=args.image_size, patch_size=args.patch_size,
                    num_classes=len(train.classes), attn=args.attn, drop_path=args.drop_path,
                    rpc_layers=common.parse_layers(args.rpc_layers, size["depth"]),
                    pap=dict(n_iter=args.n_iter, lambd=args.lambd, form=args.form),
                    init=args.init or ("default" if released else "trunc_normal"))
    torch.manual_seed(args.seed)
    model = Model(config).to(device)
    if world > 1 and device.type == "cuda":                         # a FAN's norms, over processes
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if args.init_from and not args.resume:
        from checkpoints import load_weights
        with common.error_prefix(f"--init_from {args.init_from}"):
            notes = load_weights(model, common.load(args.init_from), new_head=True)
        common.print0(f"weights from {args.init_from}", *notes)
    # To freeze a part, say so here, `model.patch_embed.requires_grad_(False)`: --resume passes by.

    # Optimiser: matrices decay, those of FAN's MLP and of Scaled Attention, too; the average.
    matrices = ("weight", "mlp.temperature", "learned.s")
    decay, rest = [], []
    for name, p in model.named_parameters():
        if p.requires_grad:
            (decay if p.ndim > 1 and name.endswith(matrices) else rest).append(p)
    groups = [dict(params=decay, weight_decay=args.weight_decay), dict(params=rest, weight_decay=0)]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, fused=device.type == "cuda")
    ema = copy.deepcopy(model) if args.ema else None

    # Resume: weights, optimiser and average; random numbers need no state. Data and model have to
    # be the run's.
    about = dict(classes=list(train.classes), training_images=len(train.labels))
    if checkpoint:
        was = {**checkpoint, **checkpoint["model_config"]}
        for name, now in {**about, **asdict(config)}.items():
            if was.get(name) != now:
                raise InputError(f"--resume cannot change {name}: it was {was.get(name)!r:.60} and "
                                 f"is {now!r:.60}")
        model.load_state_dict(checkpoint["model"])
        common.load_optimizer(optimizer, checkpoint["optimizer"])
        if ema:
            ema.load_state_dict(checkpoint["ema"] or checkpoint["model"])
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
        log.append(dict(step=first, args=vars(args), torch=torch.__version__, world=world,
                        device=common.describe(device), parameters=parameters,
                        training_images=len(train.labels)))
        common.print0(f"{parameters:,} parameters | {world} x {common.describe(device)} | {out_dir}"
                      + f" | resumed at step {first}" * bool(first))

    # The loop. --max_steps stops early, on the schedule of --epochs.
    stop = max(first, min(total, args.max_steps or total))
    batches = train_batches(train, args, first, stop, device, rank, world)
    if args.adv_eps:
        from robust.adversarial import adversarial
    bar = tqdm(range(first, stop), "training", stop, initial=first, unit="step",
               disable=rank > 0 or None, dynamic_ncols=True)        # None: if not in a terminal
    began = clock = time.time()
    pending = []
    for step in bar:
        lr = learning_rate(step, warmup, total, args)
        for group in optimizer.param_groups:
            group["lr"] = lr

        # A batch; in adversarial training moved to where the network, as it is now, is worse.
        images, targets, position = next(batches)
        if args.adv_eps:
            with autocast:
                images = adversarial(compiled, images, targets, position[0].item(), args)

        # Forward and backward. Drop path draws from a seed of this step and process, so a resumed
        # run draws the same. (hash of numbers is the same in every Python.)
        torch.manual_seed(hash((args.seed, step, rank)) % 2 ** 63)
        with autocast:
            loss = F.cross_entropy(net(images), targets)
        loss.backward()

        # Clip the gradient and take the step; the average of the weights follows.
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()
                                              if p.grad is not None])
        if args.clip:
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), args.clip, norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if ema:                                                     # a copy, after the first step
            with torch.no_grad():
                torch._foreach_lerp_([*ema.parameters()], [*model.parameters()],
                                     1 - args.ema if step else 1.0)
                torch._foreach_copy_([*ema.buffers()], [*model.buffers()])
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

        # Evaluate; the paper reports the raw model, not its average. Did the robust part act?
        metrics = {}
        if evaluating:
            with autocast:
                metrics = evaluate(model, test, args, device, rank, world)
                if ema:
                    metrics["ema_top1"] = evaluate(ema, test, args, device, rank, world)["top1"]
            if rank == 0:
                log.append(dict(step=done, eval=metrics, epoch=epoch,
                                **key_statistics(model, model.forward, images[:32])))
            numbers = "  ".join(f"{name} {value:.2f}" for name, value in metrics.items()
                                if isinstance(value, float))
            common.print0(f"step {done:6d}  training loss {loss:.4f}   {numbers}  largest class "
                          f"{largest_share(test):.2f}")

        # Save, each file whole or not at all. A run killed before that repeats the evaluation.
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
            clock, pending = time.time(), []    # speed leaves out what evaluating and saving took

    # The result, where the last step was evaluated.
    if metrics:
        top5 = f"top-5 {metrics['top5']:.2f} %, " if "top5" in metrics else ""
        common.print0(f"{args.data} {args.attn}: {split_name(args)} accuracy "
                      f"{metrics['top1']:.2f} % ({top5}{metrics['images']} images, "
                      f"{largest_share(test):.1f} % of them of the largest class) after "
                      f"{stop / epoch_steps:.1f} epochs, {(time.time() - began) / 60:.1f} minutes")
        if best:
            common.print0(f"best.pt: the lowest loss, {best['loss']:.3f}, was after "
                          f"{best['step'] / epoch_steps:.1f} epochs, accuracy {best['top1']:.2f} %")
        common.print0(f"next: python eval_robust.py --ckpt {out_dir}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    common.run(main)
