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
- Mixup and CutMix mix neighbours of a batch. The released code mixes the batch with its reverse.

A resumed run is bit-identical on a CPU; docs/data.md describes GPUs and several processes.
"""

import math
import time
from argparse import BooleanOptionalAction
from dataclasses import asdict
from itertools import islice

import common  # before torch, because it sets GOMP_SPINCOUNT for torch's threads
import torch
import torch.distributed as dist
import torch.nn.functional as F

from attention import (ATTENTIONS, FORMS, LAYER_PATTERNS, default_settings,
                       key_statistics)
from common import (InputError, bar, below_one, fraction, nonnegative_float,
                    nonnegative_int, positive_int, zero_to_one)
from data.augment import augment_uint8, mix, soft_targets, to_float_and_erase
from data.datasets import DATASETS, load_data
from data.images import Split, fingerprint, image_batches, send
from data.rng import ADVERSARIAL, DROPOUT, batch_pairs, seed_from
from fan import FAN_SIZES
from robust.attacks import pgd
from vit import SIZES, fit_pos_embed, load_classifier, model_classes

# Flags that would do nothing, for each data set. A data set that you add to DATASETS may use all
# flags.
WITHOUT_EFFECT = {
    "shapes": {"data_dir", "download", "num_workers"},
    "cifar10": {"num_images", "num_workers"},
    "imagenet": {"num_images", "download", "holdout"},
    "folder": {"num_images", "download", "holdout", "num_workers"},
}


def get_args():
    """Parse the flags. Returns them, and the checkpoint of --resume or {}."""
    p = common.new_parser(__doc__)
    boolean = BooleanOptionalAction                                 # --name and --no-name
    # The defaults in the help texts hold unless a recipe in data/datasets.py sets others. flag(...)
    # adds a flag to a group of --help.
    flag = p.add_argument_group("data").add_argument
    flag("--data", choices=DATASETS, help="data set; its recipe sets defaults of other "
         "flags (default: folder, your own images, if --data_dir is given, else "
         "shapes)")
    flag("--data_dir", help="folder with <class>/*.jpg, or train/<class>/*.jpg and "
         "val/<class>/*.jpg; docs/data.md shows all layouts")
    flag("--download", action=boolean, default=False,
         help="download CIFAR-10 into --data_dir")
    flag("--num_images", type=positive_int, default=16000,
         help="rendered training images (default: 16000)")
    flag("--holdout", type=nonnegative_int, default=0, help="hold out this many training "
         "images, and evaluate on them instead of the test images; of your own images, "
         "a tenth is always held out")
    flag("--num_workers", type=nonnegative_int, default=common.default_workers(),
         help="processes per GPU that decode ImageNet (default: %(default)s)")

    flag = p.add_argument_group("model").add_argument
    flag("--model", choices=SIZES | FAN_SIZES, help="size of a ViT, or of a FAN (fully "
         "attentional network)")
    flag("--image_size", type=positive_int, help="side of an image in pixels")
    flag("--patch_size", type=positive_int, help="side of a patch in pixels")
    # Some values are layer patterns: one attention in --rpc_layers, another one elsewhere.
    common.attention_flags(flag, ATTENTIONS | LAYER_PATTERNS, FORMS)
    flag("--drop_path", type=below_one, default=0.0, help="rate at which residual "
         "branches are skipped in the last block; smaller in earlier blocks; in a FAN "
         "equal in all (default: 0)")
    flag("--init", choices=["default", "trunc_normal"], help="initial weights of "
         "Linear layers; default: as in PyTorch; trunc_normal: as in DeiT; without this "
         "flag default for a ViT, trunc_normal for a FAN; with --init_from only for a "
         "new head")
    flag("--init_from", help="initialise from this checkpoint, which has the same "
         "--model and --patch_size; with another number of classes, the head is new")

    flag = p.add_argument_group("training").add_argument
    flag("--epochs", type=positive_int, help="length of the training and of its schedule "
         "(default for your own images: 1.8 sqrt(images), at least 8)")
    flag("--batch_size", type=positive_int, help="images per step of all processes")
    flag("--lr", type=nonnegative_float,
         help="highest learning rate; DeiT: 5e-4 per 512 images")
    flag("--warmup_epochs", type=nonnegative_float, default=1,
         help="epochs of warm-up, fewer than --epochs (default: 1; half of --epochs if "
         "--epochs is not larger)")
    flag("--weight_decay", type=nonnegative_float, default=0.05,
         help="AdamW's weight decay of matrices (default: 0.05)")
    flag("--clip", type=nonnegative_float, default=1.0,
         help="scale larger gradients down to this norm; 0: never (default: 1)")
    flag("--adv_eps", type=fraction, default=0.0, help="train on adversarial images, "
         "whose pixels change by up to this, for example 2/255")
    flag("--adv_steps", type=positive_int, default=3,
         help="PGD steps per adversarial image (default: 3)")

    flag = p.add_argument_group("augmentation").add_argument
    flag("--pad", type=nonnegative_int, default=0,
         help="shift images by up to this many pixels")
    flag("--flip", action=boolean, default=False,
         help="mirror half of the images left to right; not for digits, letters or signs")
    flag("--num_ops", type=nonnegative_int, default=0,
         help="apply this many RandAugment operations")
    flag("--erase", type=zero_to_one, default=0.0,
         help="erase a rectangle with this probability")
    flag("--mixup", type=nonnegative_float, default=0.0, help="alpha of Mixup")
    flag("--cutmix", type=nonnegative_float, default=0.0, help="alpha of CutMix")
    flag("--smoothing", type=zero_to_one, default=0.1,
         help="share of each label that is spread over all classes (default: 0.1)")
    flag("--repeats", type=positive_int, default=1, help="draw 1/REPEATS of the images per "
         "epoch, and use each drawn image REPEATS times; the number of steps stays the "
         "same")

    flag = p.add_argument_group("running").add_argument
    flag("--seed", type=common.seed, default=0,
         help="seed of weights, order and augmentation (default: 0)")
    flag("--eval_every", type=positive_int, default=1,
         help="epochs between evaluations (default: 1)")
    flag("--out_dir", help="folder of the run (default: out/<data>_<attn>)")
    common.running_flags(flag)

    recipes = {name: data.recipe for name, data in DATASETS.items()}
    args, checkpoint = common.parse_flags(p, recipes, default="shapes", task="classification")
    typed = common.typed_flags(p)
    reject_useless_flags(args, typed)
    if args.download and not args.data_dir:
        raise InputError("--download needs --data_dir, the folder for CIFAR-10")
    common.set_missing(args, default_settings(args.attn))           # n_iter, lambd and form
    # A recipe's warm-up can be too long for your --epochs. (main chooses --epochs if it is None.)
    if args.epochs and args.warmup_epochs >= args.epochs and "warmup_epochs" not in typed:
        args.warmup_epochs = args.epochs / 2
    if args.resume:
        args.out_dir = args.resume
    else:
        args.out_dir = args.out_dir or f"out/{args.data}_{args.attn}"
        common.check_new_run(args.out_dir)
    return args, checkpoint


def reject_useless_flags(args, typed):
    """Raise InputError for flags on the command line that would do nothing.

    typed: the names of the flags on the command line.
    """
    if args.resume:
        common.reject_flags(typed & {"out_dir", "init_from"}, "with --resume")
    without_data = WITHOUT_EFFECT.get(args.data, set())
    common.reject_flags(typed & without_data, f"with --data {args.data}")
    if not args.adv_eps:
        common.reject_flags(typed & {"adv_steps"}, "without --adv_eps")
    without_pap = common.useless_attention_flags(args.attn, LAYER_PATTERNS)
    common.reject_flags(typed & without_pap, f"with --attn {args.attn}")


# --- batches --------------------------------------------------------------------------------------

def load_batches(source, pairs, args, device):
    """Yield images (b, 3, S, S) uint8 and labels (b,) on the device, and positions (b,) on the CPU.

    source: a Split, which holds all images on the device, or a Dataset, whose files are decoded by
    worker processes. pairs: (position in the whole run, index of the image).
    """
    if isinstance(source, Split):
        for position, index in pairs:
            index = send(index, device)
            yield source.images[index], source.labels[index], position
    else:
        batches = image_batches(source, pairs, args.num_workers, device)
        for images, labels, position in batches:                    # on the CPU
            yield send(images, device), send(labels, device), position


# Augment at most this many images and bytes in one call.
CHUNK_IMAGES = 2 ** 14
CHUNK_BYTES = 2 ** 29


def train_batches(source, args, start, stop, device, rank, world):
    """Yield augmented images (b, 3, S, S), target distributions (b, K), and positions (b,).

    A GPU augments a chunk of several batches in one call, which takes about as long as one batch.
    Random numbers depend on a sample's position alone, so chunks change no number. On a CPU a chunk
    is one batch.
    """
    b = args.batch_size // world
    batches_at_once = 1
    if device.type != "cpu":
        images_at_once = min(CHUNK_IMAGES, CHUNK_BYTES // (3 * args.image_size ** 2))
        batches_at_once = max(1, images_at_once // b)

    # Shift, flip and RandAugment change uint8 images. Then images become floats in [0, 1], and
    # random erasing follows. Then the chunk is split into its batches, which are mixed.
    pairs = batch_pairs(len(source.labels), args.batch_size, start, stop, args.seed,
                        rank=rank, world=world, repeats=args.repeats)
    loaded = load_batches(source, pairs, args, device)
    while chunk := list(islice(loaded, batches_at_once)):
        images, labels, positions = [torch.cat(parts) for parts in zip(*chunk)]
        images = augment_uint8(images, positions, args.seed, pad=args.pad,
                               num_ops=args.num_ops, flip=args.flip)
        images = to_float_and_erase(images, positions, args.seed, erase=args.erase)
        targets = soft_targets(labels, len(source.classes), args.smoothing)
        batches = zip(images.split(b), targets.split(b), positions.split(b))
        for x, y, position in batches:
            if args.mixup or args.cutmix:
                # The seed and the step determine how `mix` weights the images of a batch.
                step = position[0].item() // args.batch_size
                x, y = mix(x, y, args.seed, step, mixup=args.mixup, cutmix=args.cutmix)
            yield x, y, position


def check_mixing(n, args, rank, world):
    """Raise InputError if a batch of n training images would mix an image with itself.

    An image is mixed with its neighbour, which must not be one of its --repeats copies. A batch
    begins with copy number (step * batch_size) mod repeats of an image. So the pattern of copies
    repeats after `repeats` batches, and it is enough to check these.
    """
    pairs = batch_pairs(n, args.batch_size, 0, args.repeats, args.seed,
                        rank=rank, world=world, repeats=args.repeats)
    for _, index in pairs:
        if (index == index.roll(1)).any():
            raise InputError(f"--batch_size {args.batch_size}: an image would be mixed "
                             f"with itself or with a copy; choose a larger batch")


# --- evaluation -----------------------------------------------------------------------------------

@torch.no_grad()
def evaluate(model, source, args, device, rank, world):
    """Return dict(top1, top5, loss): accuracies in per cent, and the mean loss."""
    model.eval()
    n = len(source.labels)
    # The images of this process, which are none if there are more processes than images.
    mine = torch.arange(n)[rank::world]
    # Pairs (position, index of the image). The position is unused here, so the index stands for it.
    pairs = [(index, index) for index in mine.split(256) if len(index)]
    batches = load_batches(source, pairs, args, device)
    total = torch.zeros(3, device=device)               # correct, correct in top 5, loss
    for images, labels, _ in bar(batches, "evaluating", total=len(pairs), leave=False):
        logits = model(images.float() / 255).float()    # the model takes pixels in [0, 1]
        top = logits.topk(min(5, logits.shape[1])).indices          # (b, 5)
        correct = top == labels[:, None]                # at most one True per row
        loss = F.cross_entropy(logits, labels, reduction="sum")
        total += torch.stack([correct[:, 0].sum(), correct.sum(), loss])
    model.train()
    if world > 1:
        dist.all_reduce(total)
    top1, top5, loss = total.tolist()
    return dict(top1=100 * top1 / n, top5=100 * top5 / n, loss=loss / n)


# --- the run --------------------------------------------------------------------------------------

def learning_rate(step, warmup, total, args):
    """Return the rate: linear warm-up from 1e-6, which replaces the first part of a cosine.

    The cosine ends at MIN_LR. No rate is above --lr.
    """
    if step < warmup:
        first = min(1e-6, args.lr)
        return first + (args.lr - first) * step / warmup
    last = min(common.MIN_LR, args.lr)
    return last + (args.lr - last) * (1 + math.cos(math.pi * (step / total))) / 2


def load_weights(model, checkpoint, path, init=None):
    """Load the weights of a classifier into the model, to train them further.

    checkpoint: of train_cls.py, or with timm's names (DeiT, timm, the released code). path: its
    file, for the message. init: the value of --init, which only a new head uses.
    """
    weights = load_classifier(checkpoint).state_dict()
    weights = fit_pos_embed(weights, model.config, "bicubic")       # as in DeiT
    classes = model.config.num_classes
    if "head.weight" not in weights or len(weights["head.weight"]) != classes:
        common.print0(f"{path}: the head for {classes} classes is new")
        own = model.state_dict()
        for name in ("head.weight", "head.bias"):
            weights[name] = own[name]
    elif init:
        common.reject_flags({"init"}, f"with --init_from {path}, whose head fits")
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        difference = common.first_difference(error)
        raise InputError(f"--init_from {path} does not fit this network: {difference}; use "
                         f"its --model, --patch_size and --attn") from None


# The flags that choose the training images of a data set.
CHOOSE_IMAGES = ("data", "holdout", "num_images")


def training_history(checkpoint):
    """Return the trainings of a checkpoint's weights, oldest first: a list of {flag: value}.

    checkpoint: {} for new weights. The list is empty for weights of others, too: DeiT, timm and the
    released code.
    """
    if "task" not in checkpoint:
        return []
    if "history" in checkpoint:
        return checkpoint["history"]
    # Checkpoints of an earlier version store their last training only.
    flags = checkpoint["args"]
    return [{name: flags.get(name) for name in CHOOSE_IMAGES}]


def check_holdout(history, args):
    """Raise InputError if --init_from may have been trained on images that --holdout holds out.

    history: the trainings of the weights of --init_from.
    """
    if not args.holdout:
        return
    for flags in history:
        if flags["data"] != args.data:
            continue
        for name in ("holdout", "num_images"):
            wanted = getattr(args, name)
            if flags[name] != wanted:
                raise InputError(f"--{name} {wanted}: the weights of --init_from {args.init_from} "
                                 f"were trained on {args.data} with --{name} {flags[name]}, so "
                                 f"they may know held-out images; choose the same value")


def check_image_size(train, args):
    """Raise InputError if the images in memory have another size than --image_size."""
    if isinstance(train, Split):
        height, width = train.images.shape[2:]
        if (height, width) != (args.image_size, args.image_size):
            raise InputError(f"--image_size {args.image_size}: the images of --data "
                             f"{args.data} have {height} x {width} pixels; choose this size")


def adversarial(model, compiled, autocast, images, targets, position, args):
    """Change images to raise the loss: PGD in training (Madry et al. 2018).

    compiled: the model, perhaps compiled, which is attacked. The attack does not use DDP's `net`,
    because after each forward pass DDP waits for gradients of the weights.
    autocast: the context of the forward pass. As in a training step, gradients are computed outside
    of it.
    position: the numbers of the samples; with the seed, they determine the random numbers.

    The attack needs gradients of the images only. So the weights are frozen; otherwise the compiled
    backward pass would compute their gradients, too. The model is in eval mode, without drop path.
    The step size is pgd's default, but without its lower bound of 0.15 eps.
    """
    # pgd receives a function, because it would check the train mode of a module. The module that
    # torch.compile returns is always in train mode.
    def compute_logits(x):
        with autocast:
            return compiled(x)

    parameters = [p for p in model.parameters() if p.requires_grad]
    for p in parameters:
        p.requires_grad_(False)
    model.eval()
    images = images.clamp(0, 1)                         # erased pixels can lie outside
    images = pgd(compute_logits, images, targets, args.adv_eps, steps=args.adv_steps,
                 alpha=2.5 * args.adv_eps / args.adv_steps, seed=args.seed,
                 index=position, purpose=ADVERSARIAL)
    model.train()
    for p in parameters:
        p.requires_grad_(True)
    return images


def main():
    args, checkpoint = get_args()

    # torchrun starts `world` processes, one per GPU. Each trains on its part of every batch; only
    # rank 0 prints and writes. Without torchrun, rank is 0 and world is 1.
    rank, world, device = common.start_processes(args.device)
    amp = common.use_bf16(args.amp, device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=amp)

    # Data. `val` contains held-out images for your own images and with --holdout, else the test
    # images. Only held-out images choose best.pt.
    # inherited: hashes of your own images on which the weights of --init_from were trained. These
    # images are left out of `val`.
    init_checkpoint = {}
    inherited = checkpoint.get("inherited", [])
    if args.init_from and not args.resume:
        init_checkpoint = common.load(args.init_from)
        check_holdout(training_history(init_checkpoint), args)
        # Checkpoints of an earlier version have "seen" only.
        inherited = init_checkpoint.get("trained", init_checkpoint.get("seen", []))
    if args.download and world > 1:
        raise InputError("--download: expected one process; download the data without torchrun "
                         "first, for example with --max_steps 1")
    train, val = load_data(args, device, seen=inherited)
    check_image_size(train, args)
    keep_best = args.data == "folder" or args.holdout > 0
    n = len(train.labels)
    common.check_batch_size(args.batch_size, world, n)
    if args.mixup or args.cutmix:
        check_mixing(n, args, rank, world)
    epoch_steps = n // args.batch_size                              # only whole batches
    if args.epochs is None:                             # your own images: longer runs overfit
        args.epochs = max(8, round(1.8 * n ** 0.5))
    if args.warmup_epochs >= args.epochs:
        raise InputError(f"--warmup_epochs {args.warmup_epochs:g}: expected fewer than "
                         f"--epochs {args.epochs}; otherwise the whole run is warm-up")
    total = args.epochs * epoch_steps
    warmup = args.warmup_epochs * epoch_steps

    # Model. The flags describe the model, also with --resume.
    architecture = "fan" if args.model in FAN_SIZES else "vit"
    Model, Config = model_classes(architecture)
    size = (SIZES | FAN_SIZES)[args.model]
    # A FAN begins as in NVlabs/FAN. A ViT begins with PyTorch's weights, as in the released code,
    # which never calls DeiT's initialisation. ViTConfig's default is DeiT's.
    linear_init = "trunc_normal" if architecture == "fan" else "default"
    config = Config(
        **size, image_size=args.image_size, patch_size=args.patch_size,
        num_classes=len(train.classes), attn=args.attn, drop_path=args.drop_path,
        rpc_layers=common.parse_layers(args.rpc_layers, size["depth"]),
        pap=dict(n_iter=args.n_iter, lambd=args.lambd, form=args.form),
        init=args.init or linear_init)
    torch.manual_seed(args.seed)
    model = Model(config).to(device)
    if init_checkpoint:
        load_weights(model, init_checkpoint, args.init_from, args.init)
    # To freeze parameters, add a line here: model.patch_embed.requires_grad_(False)

    # Optimiser.
    groups = common.weight_decay_groups(model, args.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=args.lr, fused=device.type == "cuda")

    # Resume. The data, the model and the batch size must be the same as before; other flags may
    # change. Random numbers have no state: they depend on seed, step and sample only.
    fingerprints = [fingerprint(train), fingerprint(val)]
    data_identity = dict(classes=list(train.classes), fingerprint=fingerprints)
    if checkpoint:
        fixed = data_identity | asdict(config) | dict(batch_size=args.batch_size)
        common.resume(checkpoint, fixed, model, optimizer)
    first = checkpoint.get("step", 0)
    metrics = checkpoint.get("metrics", {})     # printed at the end if the run is finished
    best = common.best_evaluation(checkpoint, args.out_dir)
    # Each process draws its part of a batch from its own list of images, and decides itself when to
    # evaluate. So data, flags and the first step must be equal.
    common.same_run(args, data_identity, first)

    # Hashes of your own images for the checkpoint. trained: images of the training, here and in
    # --init_from. seen: these and all images that chose a best.pt; an evaluation leaves them out.
    trained = sorted({*train.hashes, *inherited})
    earlier = checkpoint or init_checkpoint
    seen = sorted({*val.hashes, *trained, *earlier.get("seen", [])})
    # All trainings of the weights, here and in --init_from, for `check_holdout`.
    history = training_history(earlier)
    if not checkpoint:
        flags = {name: getattr(args, name) for name in CHOOSE_IMAGES}
        history = [*history, flags]

    # Compile the model, and average gradients over processes. `net` is trained; `model`, which has
    # the same weights, is evaluated and saved.
    compiling = common.use_compile(args.compile, device)
    # rpca computes eigenvalues, for which the CPU waits. A CUDA graph cannot wait.
    mode = "default" if args.attn == "rpca" else "reduce-overhead"
    compiled, net = common.parallel(model, world, compiling, mode)

    log = common.start_log(args, first, model, device, training_images=n)

    # The loop. --max_steps stops it early, and does not change the schedule of --epochs.
    # stop equals first if the run is finished.
    stop = max(first, min(total, args.max_steps or total))
    batches = train_batches(train, args, first, stop, device, rank, world)
    progress = bar(range(first, stop), "training", total=stop, initial=first,
                   unit="step")
    began = last_log = time.perf_counter()
    pending = []                                # loss and norm of each step not yet logged
    for step in progress:
        lr = learning_rate(step, warmup, total, args)
        for group in optimizer.param_groups:
            group["lr"] = lr

        # A batch, of clean or of adversarial images.
        images, targets, position = next(batches)
        if args.adv_eps:
            images = adversarial(model, compiled, autocast, images, targets, position, args)

        # Forward and backward. The seed of a step and process determines the masks of drop path,
        # so a resumed run draws the same masks.
        torch.manual_seed(seed_from(args.seed, DROPOUT, step, rank))
        with autocast:
            loss = F.cross_entropy(net(images), targets)
        loss.backward()

        # Clip the gradient, and update the weights.
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip or math.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        pending.append(dict(loss=loss.detach(), grad_norm=norm))    # stays on the device

        # The step number decides when to evaluate, save and log, so all processes agree. Scheduled
        # evaluations choose best.pt; the evaluation where --max_steps stops the run does not.
        # Otherwise a run that was stopped and resumed could have another best.pt.
        done = step + 1
        epoch = done / epoch_steps
        scheduled = done == total or done % (args.eval_every * epoch_steps) == 0
        evaluating = scheduled or done == stop
        saving = evaluating or done % epoch_steps == 0
        logging = saving or done % common.LOG_EVERY == 0

        # Log the means over the steps since the last row. This ends the run if a loss or gradient
        # norm is not finite.
        if logging:
            common.log_steps(log, done, pending, since=last_log, per_step=args.batch_size,
                             unit="images", epoch=epoch, lr=lr)

        # Evaluate.
        metrics = {}                            # stays empty unless this step is evaluated
        if saving:
            common.share_buffers(model)
        if evaluating:
            with autocast:
                metrics = evaluate(model, val, args, device, rank, world)
            # Mean |k| and the share of nonzero entries of S in each layer, on a few images of this
            # batch, show whether RPC acts.
            keys = key_statistics(model, images[:32])
            common.append_row(log, dict(step=done, eval=metrics, epoch=epoch, **keys))
            common.print0(f"step {done:6d}  top1 {metrics['top1']:.2f}  "
                          f"loss {metrics['loss']:.3f}")

        # Save. A resumed run repeats what came after the last save.
        if saving and rank == 0:
            better = False
            if keep_best and scheduled:
                better = metrics["loss"] < best.get("loss", math.inf)
            if better:
                best = dict(step=done, **metrics)
            state = dict(task="classification", architecture=architecture,
                         args=vars(args), step=done, metrics=metrics, best=best,
                         model=model.state_dict(), optimizer=optimizer.state_dict(),
                         model_config=asdict(config), **data_identity, seen=seen,
                         trained=trained, inherited=inherited, history=history)
            if better:
                common.save(f"{args.out_dir}/best.pt", state)
            common.save(f"{args.out_dir}/last.pt", state)
        if logging:                             # the speed excludes evaluation and saving
            last_log = time.perf_counter()
            pending = []

    if metrics:                                 # of the last step, or of a finished run
        minutes = (time.perf_counter() - began) / 60
        kind = "validation" if keep_best else "test"
        common.print0(f"{args.data} {args.attn}: {kind} accuracy "
                      f"{metrics['top1']:.2f} % ({len(val.labels)} images), "
                      f"{minutes:.1f} minutes")
    if best:
        common.print0(f"best.pt: step {best['step']}, lowest validation loss "
                      f"{best['loss']:.3f}")
    common.print0(f"next: python eval_robust.py --ckpt {args.out_dir}")


if __name__ == "__main__":
    common.run(main)        # prints an InputError as one line
