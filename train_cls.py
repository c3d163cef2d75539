"""Train an image classifier with robust attention: the DeiT recipe in one loop.

    python train_cls.py                                   # RPC-ViT on rendered scenes
    python train_cls.py --attn symmetric                  # its baseline
    python train_cls.py --data_dir photos                 # your own images, photos/<class>/*.jpg
    python train_cls.py --data cifar10 --data_dir data/cifar10      # add --download to get CIFAR-10
    torchrun --standalone --nproc_per_node=4 train_cls.py --data imagenet --data_dir data/imagenet
    python train_cls.py --resume out/shapes_rpc           # continue exactly where the run stopped
    python eval_robust.py --ckpt out/shapes_rpc           # test on corrupted and attacked images

SETTINGS below are the flags. A data set has only its own flags: `python train_cls.py --data
imagenet --help` lists the flags of ImageNet. Every --attn has the flags of PAP. To change a
recipe, edit RECIPES.

Paper: Teo & Nguyen 2024, section 4.1 and App. A. Recipe: `facebookresearch/deit`. Differences from
the released code (`rachtsy/KPCA_code:Robust/main_train.py`):
- The learning rate follows a schedule. In the released code, the schedule is commented out.
- Mixed precision uses bf16 instead of fp16.
- Mixup and CutMix mix neighbours of a batch. The released code mixes the batch with its reverse.

A resumed run is bit-identical on a CPU; docs/data.md describes GPUs and several processes.
"""

import copy
import math
import shlex
import time
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import common  # before torch, because it sets GOMP_SPINCOUNT for torch's threads
import torch
import torch.distributed as dist
import torch.nn.functional as F

from attention import (ATTENTIONS, LAYER_PATTERNS, attention_flags, default_settings,
                       eval_mode, key_statistics)
from common import ONE_OR_MORE, SHARE, InputError, bar, print0
from data.augment import augment_uint8, mix, soft_targets, to_float_and_erase
from data.datasets import data_crc, load_batches, load_part
from data.rng import ADVERSARIAL, DROPOUT, batch_pairs, seed_from
from models import MODELS, SIZES, load_classifier
from vit import fit_pos_embed

# name=(default, help) or (default, help, allowed values). Numbers are from 0 to inf by default.
SETTINGS = dict(
    # the model
    model=("nano", "size of a ViT, or of a FAN (fully attentional network)", tuple(SIZES)),
    image_size=(32, "side of an image in pixels", ONE_OR_MORE),
    patch_size=(4, "side of a patch in pixels", ONE_OR_MORE),
    attn=("rpc", "attention; rpc: RPC-Attention in --rpc_layers, symmetric elsewhere"),
    rpc_layers=("0", "layers with RPC-Attention, counted from 0: 0 or 0,1,2 or 0-3 or all"),
    drop_path=(0.0, "rate at which the last block's branches are skipped", (0, 0.99)),
    init=("", "initial weights of Linear layers, of PyTorch (default) or of DeiT "
          "(trunc_normal); without this flag default for a ViT, trunc_normal for a FAN",
          ("default", "trunc_normal")),
    init_from=("", "initialise from this checkpoint of the same --model and --patch_size; "
               "with another number of classes, the head is new"),
    # the training
    epochs=(8, "length of the training and of its schedule", ONE_OR_MORE),
    batch_size=(64, "images per step of all processes", ONE_OR_MORE),
    lr=(2e-3, "highest learning rate; DeiT: 5e-4 per 512 images"),
    warmup=(1 / 8, "share of the steps in which the rate rises", SHARE),
    weight_decay=(0.05, "AdamW's weight decay of matrices"),
    clip=(1.0, "scale larger gradients down to this norm; 0: never"),
    ema=(0.0, "decay of the moving average of the weights, such as 0.999, which is "
         "evaluated and saved; 0: no average", SHARE),
    adv_eps=(0.0, "train on images that PGD changes by up to this, such as 2/255", SHARE),
    adv_steps=(3, "PGD steps per adversarial image", ONE_OR_MORE),
    # augmentation
    pad=(0, "shift images by up to this many pixels"),
    flip=(False, "mirror half of the images; not for digits, letters or signs"),
    num_ops=(0, "apply this many RandAugment operations"),
    erase=(0.0, "erase a rectangle with this probability", SHARE),
    mixup=(0.0, "alpha of Mixup"),
    cutmix=(0.0, "alpha of CutMix"),
    smoothing=(0.1, "share of each label that is spread over all classes", SHARE),
    repeats=(1, "draw 1/REPEATS of the images per epoch, each REPEATS times", ONE_OR_MORE),
    # the run
    eval_every=(1, "epochs between evaluations", ONE_OR_MORE),
) | common.RUNNING

# Other defaults of a data set. A tuple is a whole entry: it adds a flag, or replaces one.
DATA_DIR = "folder of the images; docs/data.md shows all layouts"
BEST = "also save best.pt, the weights with the lowest validation loss"
RECIPES = dict(
    # accuracy after 3.2 minutes on 2 CPU cores: rpc 96.8 %, symmetric 96.8 %, softmax 96.1 %
    shapes=dict(
        num_images=(16000, "rendered training images", ONE_OR_MORE),
        best=(False, BEST),
        smoothing=0.0, flip=True),
    # accuracy after 25 minutes on 2 CPU cores: 70 %
    cifar10=dict(
        data_dir=("data/cifar10", DATA_DIR),
        download=(False, "download CIFAR-10 into --data_dir"),
        model="micro", lr=1e-3, pad=4, flip=True),
    # The paper's training, 300 epochs on 4 GPUs. We did not run it. Accuracy in the paper: rpc
    # 70.94 %, symmetric 70.44 %. lr = 5e-4 * batch_size / 512.
    imagenet=dict(
        data_dir=("data/imagenet", DATA_DIR),
        num_workers=(common.default_workers(), "processes per GPU that decode images"),
        model="tiny", image_size=224, patch_size=16, drop_path=0.1,
        epochs=300, batch_size=1024, lr=1e-3, warmup=5 / 300, clip=0.0,
        flip=True, num_ops=2, erase=0.25, mixup=0.8, cutmix=1.0, repeats=3,
        eval_every=5),
    # your own images; symmetric attention, because we found no gain of RPC
    folder=dict(
        data_dir=("photos", DATA_DIR),
        # longer trainings on few photos overfit
        epochs=(0, "length of the training; 0: 1.8 sqrt(images), from 8 to 100"),
        image_size=64, patch_size=8, batch_size=16, lr=1e-3, pad=8, flip=True,
        attn="symmetric", best=(True, BEST)),
)


def make_table(chosen):
    """Return the table of flags for chosen flags, {name: value}, among them data and attn.

    The settings of an attention are flags, so --attn also decides which flags exist.
    """
    table = common.with_recipe(SETTINGS, RECIPES[chosen["data"]])
    attn = chosen["attn"] or table["attn"][0]
    choices = sorted(ATTENTIONS | LAYER_PATTERNS)       # at this moment: a study can add its own
    table["attn"] = (attn, table["attn"][1], choices)
    first = dict(
        data=(chosen["data"], "data set; without this flag folder, your own images, if "
              "--data_dir is given, else shapes", sorted(RECIPES)),
        resume=("", "continue the run in this folder, which has fewer flags"))
    return first | table | attention_flags(attn)


def get_args():
    """Parse the flags. Returns them, and the checkpoint of --resume or {}."""
    chosen = common.first_flags(data=RECIPES, data_dir=None, resume=None,
                                attn=sorted(ATTENTIONS | LAYER_PATTERNS))
    if chosen.resume:
        return common.parse_resumed(chosen.resume, "classification", make_table, __doc__)
    chosen.data = chosen.data or ("folder" if chosen.data_dir else "shapes")
    args = common.parse(make_table(vars(chosen)), __doc__)
    args.out_dir = args.out_dir or f"out/{args.data}_{args.attn}"
    common.check_new_run(args.out_dir)
    return args, {}


# --- batches and evaluation -----------------------------------------------------------------------

# A GPU augments several batches in one call, which takes about as long as one batch.
CHUNK_BYTES = 2 ** 27


def train_batches(data, args, start, stop, device, rank, world):
    """Yield augmented images (b, 3, S, S), target distributions (b, K), and positions (b,).

    Random numbers depend on a sample's position alone, so chunks of batches change no number.
    """
    b = args.batch_size // world
    at_once = 1
    if device.type != "cpu":
        at_once = max(1, CHUNK_BYTES // (b * 3 * args.image_size ** 2))
        at_once = min(at_once, 64)
    pairs = batch_pairs(len(data.labels), args.batch_size, start, stop, args.seed,
                        rank=rank, world=world, repeats=args.repeats)
    loaded = load_batches(data, pairs, device)
    while chunk := list(islice(loaded, at_once)):
        images, labels, positions = [torch.cat(parts) for parts in zip(*chunk)]
        images = augment_uint8(images, positions, args.seed, pad=args.pad,
                               num_ops=args.num_ops, flip=args.flip)
        images = to_float_and_erase(images, positions, args.seed, erase=args.erase)
        targets = soft_targets(labels, len(data.classes), args.smoothing)
        batches = zip(images.split(b), targets.split(b), positions.split(b))
        for x, y, position in batches:
            if args.mixup or args.cutmix:
                # position = step * batch_size + place in the batch
                step = position[0].item() // args.batch_size
                x, y = mix(x, y, args.seed, step, mixup=args.mixup, cutmix=args.cutmix)
            yield x, y, position


@torch.no_grad()
def evaluate(model, data, device, rank, world):
    """Return dict(top1, top5, loss): accuracies in per cent, and the mean loss."""
    n = len(data.labels)
    mine = torch.arange(n)[rank::world]                 # may be empty
    # An empty tensor splits into one empty part, which is left out. Positions are not used here.
    pairs = [(index, index) for index in mine.split(256) if len(index)]
    batches = load_batches(data, pairs, device)
    total = torch.zeros(3, device=device)               # correct, correct in top 5, loss
    with eval_mode(model):
        for images, labels, _ in bar(batches, "evaluating", total=len(pairs), leave=False):
            logits = model(images.float() / 255).float()    # the model takes pixels in [0, 1]
            top = logits.topk(min(5, logits.shape[1])).indices      # (b, 5)
            correct = top == labels[:, None]            # at most one True per row
            loss = F.cross_entropy(logits, labels, reduction="sum")
            total += torch.stack([correct[:, 0].sum(), correct.sum(), loss])
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


def load_weights(model, path):
    """Start from the weights of a checkpoint of train_cls.py or with timm's names (DeiT).

    The head is new if the number of classes differs.
    """
    weights = load_classifier(common.load(path)).state_dict()
    weights = fit_pos_embed(weights, model.config, "bicubic")       # as in DeiT
    own = model.state_dict()
    classes = model.config.num_classes
    if len(weights.get("head.weight", ())) != classes:
        print0(f"{path}: the head for {classes} classes is new")
        weights["head.weight"] = own["head.weight"]
        weights["head.bias"] = own["head.bias"]
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        difference = common.first_difference(error)
        raise InputError(f"--init_from {path} does not fit: {difference}") from None


@torch.no_grad()
def update_average(average, model, decay, step):
    """Move the average of the weights towards the model's. Buffers, as of BatchNorm, are copied.

    Early steps have a smaller decay, so that the initial weights are forgotten soon.
    """
    decay = min(decay, (1 + step) / (10 + step))
    for mean, p in zip(average.parameters(), model.parameters()):
        mean.lerp_(p, 1 - decay)
    for mean, buffer in zip(average.buffers(), model.buffers()):
        mean.copy_(buffer)


def adversarial(model, compiled, autocast, images, targets, position, args):
    """Change images to raise the loss: PGD in training (Madry et al. 2018).

    compiled: the model, perhaps compiled, which is attacked. The attack does not use DDP's `net`,
    because after each forward pass DDP waits for gradients of the weights.
    autocast: the context of the forward pass; gradients are computed outside autocast, as in a
    training step.
    position: the numbers of the samples; with the seed, they determine the random numbers.

    The attack needs gradients of the images only. So the weights are frozen; otherwise the compiled
    backward pass would compute their gradients, too. The model is in eval mode, without drop path.
    The step size alpha is 2.5 eps / steps.
    """
    from robust.attacks import pgd                      # here, because few trainings use it

    # pgd receives a function, because it would check the train mode of a module. The module that
    # torch.compile returns is always in train mode.
    def compute_logits(x):
        with autocast:
            return compiled(x)

    parameters = [p for p in model.parameters() if p.requires_grad]
    for p in parameters:
        p.requires_grad_(False)
    images = images.clamp(0, 1)                         # erased pixels can lie outside
    with eval_mode(model):
        images = pgd(compute_logits, images, targets, args.adv_eps, steps=args.adv_steps,
                     alpha=2.5 * args.adv_eps / args.adv_steps, seed=args.seed,
                     index=position, purpose=ADVERSARIAL)
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

    # Data. On CIFAR-10 and ImageNet, the validation images are also the test images.
    train = load_part("train", args, device)
    val = load_part("val", args, device, train.classes)
    if not len(val.labels):
        print0("there is no validation image; evaluations use the training images")
        val = train
    elif data_crc(val) == data_crc(train):
        raise InputError(f"--data {args.data}: the parts train and val are equal; expected "
                         "different images; the function of the data set in "
                         "data/datasets.py must use its argument `part`")
    n = len(train.labels)
    if args.batch_size % world or args.batch_size > n:
        raise InputError(f"--batch_size {args.batch_size}: expected at most {n}, the "
                         f"training images, and a multiple of the {world} processes")
    epoch_steps = n // args.batch_size                              # only whole batches
    about_1_8_sqrt = min(max(8, round(1.8 * n ** 0.5)), 100)
    args.epochs = args.epochs or about_1_8_sqrt                     # 0: your own images
    total = args.epochs * epoch_steps
    warmup = args.warmup * total
    print0(f"{args.data}: {n} training images, {len(val.labels)} to evaluate on, "
           f"{len(train.classes)} classes: {', '.join(train.classes[:12])}")
    reference = common.largest_class(val.labels.tolist(), len(train.classes))

    # Model. A ViT begins with PyTorch's weights, as in the released code, which never calls DeiT's
    # initialisation; a FAN as in NVlabs/FAN.
    architecture, size = SIZES[args.model]
    Model, Config = MODELS[architecture]
    linear_init = "trunc_normal" if architecture == "fan" else "default"
    pap = {name: getattr(args, name) for name in default_settings(args.attn)}
    config = Config(
        **size, image_size=args.image_size, patch_size=args.patch_size,
        num_classes=len(train.classes), attn=args.attn, drop_path=args.drop_path,
        rpc_layers=common.parse_layers(args.rpc_layers, size["depth"]), pap=pap,
        init=args.init or linear_init)
    torch.manual_seed(args.seed)
    model = Model(config).to(device)
    if args.init_from and not checkpoint:
        load_weights(model, args.init_from)
    # To freeze parameters, add a line here: model.patch_embed.requires_grad_(False)

    # Optimiser.
    groups = common.weight_decay_groups(model, args.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=args.lr, fused=device.type == "cuda")

    # `evaluated` is evaluated and saved: the average of the weights, or the model itself.
    evaluated = copy.deepcopy(model) if args.ema else model

    # Resume. Random numbers have no state: they depend on seed, step and sample only.
    crc = [data_crc(train), data_crc(val)]
    first = 0
    best = math.inf                             # the lowest validation loss
    metrics = {}
    if checkpoint:
        if checkpoint["data_crc"] != crc:
            raise InputError("--resume: the training or validation images have changed")
        # With --ema, "model" has the averages, and "trained" has the weights themselves.
        model.load_state_dict(checkpoint.get("trained", checkpoint["model"]))
        evaluated.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        first = checkpoint["step"]
        if Path(args.out_dir, "best.pt").exists():      # a lost best.pt is written again
            best = checkpoint["best"]
    common.check_same_run(args, first, crc)

    # `net` is trained; `model` has the same weights.
    compiling = common.use_compile(args.compile, device)
    compiled, net = common.parallel(model, world, compiling)
    log = common.start_log(args, first, model, device)

    def save(name, step):
        """Write a checkpoint, with the present weights, into the folder of the run."""
        state = dict(task="classification", architecture=architecture, args=vars(args),
                     step=step, total=total, metrics=metrics, best=best,
                     model=evaluated.state_dict(), optimizer=optimizer.state_dict(),
                     model_config=asdict(config), classes=list(train.classes),
                     data_crc=crc)
        if args.ema:
            state["trained"] = model.state_dict()
        common.save(f"{args.out_dir}/{name}", state)

    if rank == 0 and not args.resume:           # so --resume works before the first evaluation
        save("last.pt", 0)

    # The loop. --max_steps stops it early, and does not change the schedule of --epochs.
    stop = min(total, args.max_steps or total)
    batches = train_batches(train, args, first, stop, device, rank, world)
    steps = bar(range(first, stop), "training", total=stop, initial=first, unit="step")
    since = time.perf_counter()
    pending = []                                # loss and norm of each step not yet logged
    for step in steps:
        lr = learning_rate(step, warmup, total, args)
        for group in optimizer.param_groups:
            group["lr"] = lr

        # A batch, of clean or of adversarial images.
        images, targets, position = next(batches)
        if args.adv_eps:
            images = adversarial(model, compiled, autocast, images, targets,
                                 position, args)

        # Forward and backward. The seed of a step and process determines the masks of drop path,
        # so a resumed run draws the same masks.
        torch.manual_seed(seed_from(args.seed, DROPOUT, step, rank))
        with autocast:
            loss = F.cross_entropy(net(images), targets)
        loss.backward()

        # Clip the gradient (a clip at infinity only measures its norm), and update the weights.
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip or math.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if args.ema:
            update_average(evaluated, model, args.ema, step)
        pending.append(torch.stack([loss.detach(), norm]))          # stays on the device

        # The step number decides when to evaluate, save and log, so all processes agree.
        done = step + 1
        epoch = done / epoch_steps
        scheduled = done == total or done % (args.eval_every * epoch_steps) == 0
        evaluating = scheduled or done == stop

        # Log the means over the steps since the last row.
        if evaluating or done % common.LOG_EVERY == 0:
            speed = args.batch_size * len(pending) / (time.perf_counter() - since)
            mean_loss, mean_norm = common.mean_over_processes(pending)
            if not math.isfinite(mean_loss + mean_norm):
                raise InputError(f"not finite at step {done}: loss {mean_loss:.4g}, norm "
                                 f"{mean_norm:.4g}; try a smaller --lr or --clip")
            row = dict(step=done, loss=mean_loss, grad_norm=mean_norm, epoch=epoch, lr=lr)
            common.append_row(log, row | dict(images_per_s=speed))
            print0(f"step {done:6d}  loss {mean_loss:.4f}  {speed:.0f} images/s")
            pending = []
            since = time.perf_counter()

        # Evaluate and save. A resumed run repeats what came after the last save. The evaluation
        # where --max_steps stops the run does not choose best.pt, so that a run which was stopped
        # and resumed has the same best.pt.
        if evaluating:
            common.share_buffers(evaluated)
            with autocast:
                metrics = evaluate(evaluated, val, device, rank, world)
            # Mean |k| and the share of nonzero entries of S in each layer, on a few images of this
            # batch, show whether RPC acts.
            keys = key_statistics(evaluated, images[:32])
            common.append_row(log, dict(step=done, eval=metrics, epoch=epoch, **keys))
            line = f"step {done:6d}  top1 {metrics['top1']:.2f}  loss {metrics['loss']:.3f}"
            print0(f"{line}  {reference}".rstrip())
            # A data set whose validation images are the test images has no flag --best.
            keeps_best = vars(args).get("best", False)
            better = keeps_best and scheduled and metrics["loss"] < best
            if better:
                best = metrics["loss"]
            # best.pt comes first: a run that is killed between the two repeats this evaluation.
            if rank == 0 and better:
                save("best.pt", done)
            if rank == 0:
                save("last.pt", done)
            since = time.perf_counter()                 # the speed excludes evaluation and saving

    print0(f"next: python eval_robust.py --ckpt {shlex.quote(args.out_dir)}")


if __name__ == "__main__":
    common.run(main)        # prints an InputError as one line
