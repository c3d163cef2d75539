"""Train Segmenter, a model that labels every pixel, with robust attention.

    python train_seg.py                                   # RPC on rendered scenes
    python train_seg.py --attn symmetric                  # its baseline
    python train_seg.py --backbone none                   # from scratch, which takes far longer
    python train_seg.py --data_dir masks                  # your own masks/images, masks/annotations
    python train_seg.py --data camvid --data_dir data/camvid
    torchrun --standalone --nproc_per_node=4 train_seg.py --data ade20k \\
        --data_dir data/ADEChallengeData2016 --backbone out/imagenet_rpc      # the paper's run
    python train_seg.py --resume out/seg_shapes_rpc       # continue exactly where the run stopped
    python train_seg.py --eval_only out/seg_shapes_rpc    # test on clean and corrupted images

Paper: Teo & Nguyen 2024, section 4.1, App. A.3 and E.5 (Table 6). Recipe: `rstrudel/segmenter`,
which the paper's fork `rachtsy/segm` keeps: SGD with Nesterov momentum, a polynomial schedule, 64
epochs of ADE20K. Differences from that code:
- GPUs use bf16 (float32 with --no-amp).
- torchvision distorts the colours. It multiplies the brightness by a factor from 0.87 to 1.13;
  mmsegmentation adds a number from -32 to 32.
- A loss that is not finite stops the run.
- The result is the network after the last epoch. For your own images, a tenth of the images
  chooses the best network, best.pt.

The three trainers share about 100 similar lines on purpose: each script is self-contained.

A resumed run is bit-identical on a CPU; docs/data.md describes GPUs and several processes.
"""

import math
import os
import time
from argparse import Namespace
from dataclasses import asdict
from functools import partial
from pathlib import Path

import common  # before torch, because it sets GOMP_SPINCOUNT for torch's threads
import torch
import torch.distributed as dist
import torch.nn.functional as F

from attention import (ATTENTIONS, FORMS, LAYER_PATTERNS, default_settings,
                       key_statistics)
from common import (InputError, bar, below_one, nonnegative_float, nonnegative_int,
                    positive_int, zero_to_one)
from data.images import fingerprint, image_batches, send
from data.masks import (IGNORE, MaskRules, TrainingViews, finish_views,
                        load_segmentation)
from data.rng import DROPOUT, batch_pairs, epoch_order, seed_from
from fan import FAN_SIZES
from results import add_result
from robust.corruptions import NAMES, corrupt
from robust.frost import frost_hash
from segmenter import (ENCODER_SIZES, SCORES, Segmenter, SegmenterConfig, encoder_size,
                       evaluate, load_encoder, segmenter_from_checkpoint)
from vit import load_classifier

# The recipe that --data selects; flags on the command line override it. The optimizer is no flag:
# the recipe alone selects it.
RECIPES = {
    # starts from weights/shapes_rpc.pt; 5 minutes on 2 CPU cores: mean IoU 75 % (3 seeds)
    "shapes": dict(size=32, num_classes=11, epochs=5, batch_size=32, optimizer="adamw",
                   dropout=0.0, num_workers=0, patch_size=4),
    # 250 images; 25 minutes on a CPU core: mean IoU 30.5 % (symmetric), 27.9 % (rpc, n_iter 6).
    # These runs changed the brightness as mmsegmentation does.
    "camvid": dict(size=160, num_classes=11, epochs=200, batch_size=8,
                   optimizer="adamw", eval_every=20),
    # the paper's run, which we did not repeat; the paper reports mean IoU 34.69 % (rpc) and 34.00 %
    # (symmetric)
    "ade20k": dict(size=512, num_classes=150, epochs=64, batch_size=8, optimizer="sgd",
                   lr=1e-3, weight_decay=0.0, clip=0.0, drop_path=0.1, model="tiny"),
    # your own images; `main` chooses the number of epochs
    "folder": dict(size=64, patch_size=8, batch_size=8, optimizer="adamw",
                   eval_every=10, attn="symmetric"),
}
# Flags that act only in an evaluation, and all flags that act in it.
ONLY_IN_EVALUATION = {"severities", "limit", "frost_dir"}
IN_EVALUATION = ONLY_IN_EVALUATION | {
    "eval_only", "data", "data_dir", "num_workers", "window", "stride", "seed",
    "device", "out_dir"}


def get_args():
    """Parse the flags. Returns them, and the checkpoint of --resume or {}."""
    p = common.new_parser(__doc__)
    # flag(...) adds a flag to a group of --help.
    flag = p.add_argument_group("data").add_argument
    flag("--data", choices=RECIPES, help="data set; its recipe sets defaults of other "
         "flags (default: folder, your own images, if --data_dir is given, else "
         "shapes; with --eval_only the data set of the training)")
    flag("--data_dir", help="folder with images/*.jpg and, with the same names, "
         "annotations/*.png, whose pixel values are classes; docs/data.md shows all "
         "layouts")
    flag("--num_classes", type=positive_int, help="expected number of classes")
    flag("--num_images", type=positive_int, default=16000,
         help="rendered training images (default: 16000)")
    flag("--num_workers", type=nonnegative_int, default=common.default_workers(),
         help="processes per GPU that decode images (default: %(default)s)")

    flag = p.add_argument_group("model").add_argument
    flag("--backbone", help="start from the weights of this classifier, a ViT or a "
         "FAN, which has the same patches and attention; the word none: start from "
         "random weights (default: none; for --data shapes weights/shapes_<attn>.pt)")
    flag("--model", choices=ENCODER_SIZES, help="size of the encoder, a ViT or a FAN "
         "(default: size of the --backbone, else nano)")
    flag("--patch_size", type=positive_int, default=16, help="side of a patch in pixels")
    # Some values are layer patterns: one attention in --rpc_layers, another one elsewhere.
    # scaled_s is left out, because it needs a fixed number of tokens.
    attentions = ATTENTIONS.keys() | LAYER_PATTERNS.keys()
    common.attention_flags(flag, attentions - {"scaled_s"}, FORMS)
    flag("--decoder_attn", choices=["softmax", "symmetric", "rpc"], help="attention of "
         "the decoder; rpc is RPC-Attention in its first block (default: as in the "
         "encoder)")
    flag("--drop_path", type=below_one, default=0.0, help="rate at which residual "
         "branches are skipped in the encoder's last block; smaller in earlier blocks; in "
         "a FAN equal in all (default: 0)")
    flag("--dropout", type=zero_to_one, default=0.1,
         help="dropout rate of the decoder (default: 0.1)")

    flag = p.add_argument_group("training").add_argument
    flag("--epochs", type=positive_int, help="length of the training and of its "
         "schedule (default for your own images: about 3,000 steps, 8 to 400 epochs)")
    flag("--batch_size", type=positive_int, help="images per step of all processes")
    flag("--lr", type=nonnegative_float, default=2e-3,
         help="first learning rate (default: 2e-3)")
    flag("--weight_decay", type=nonnegative_float, default=0.05,
         help="weight decay of matrices (default: 0.05)")
    flag("--clip", type=nonnegative_float, default=1.0,
         help="scale larger gradients down to this norm; 0: never (default: 1)")

    flag = p.add_argument_group("views").add_argument
    flag("--size", type=positive_int, help="resize the short side of images to this many "
         "pixels, and train on square crops with this side, a multiple of --patch_size")
    flag("--window", type=positive_int,
         help="side of the windows in an evaluation (default: --size)")
    flag("--stride", type=positive_int, help="pixels between windows (default: --window)")

    flag = p.add_argument_group("evaluation").add_argument
    flag("--eval_only", metavar="CKPT", help="evaluate this checkpoint, a file or the "
         "folder of a run, instead of training: on clean and on corrupted images")
    flag("--severities", type=int, nargs="*", default=[1, 2, 3, 4, 5],
         choices=range(1, 6), help="severities of the corruptions; without a number "
         "only clean images (default: 1 2 3 4 5)")
    flag("--limit", type=positive_int, help="number of test images (default: all, but "
         "only 320 corrupted scenes)")
    flag("--frost_dir",
         help="folder with ImageNet-C's photographs of frost (default: synthetic)")

    flag = p.add_argument_group("running").add_argument
    flag("--seed", type=common.seed, default=0,
         help="seed of weights, order and augmentation (default: 0)")
    flag("--eval_every", type=positive_int, default=2, help="epochs between evaluations "
         "(default: 2)")
    flag("--out_dir", help="folder of the run (default: out/seg_<data>_<attn>)")
    common.running_flags(flag)

    args, checkpoint = common.parse_flags(p, RECIPES, default="shapes", task="segmentation")
    typed = common.typed_flags(p)

    if args.eval_only:
        common.reject_flags(typed - IN_EVALUATION, "with --eval_only")
        if not args.severities:                 # only clean images
            common.reject_flags(typed & {"frost_dir"}, "with --severities without a number")
        if "data" not in typed:
            args.data = None                    # evaluation_data takes the training's data
        if "num_workers" not in typed:
            args.num_workers = None             # the recipe of the data chooses it
        return args, checkpoint

    # A training, new or resumed.
    reject_useless_flags(args, typed)
    common.set_missing(args, default_settings(args.attn))           # n_iter, lambd and form
    if checkpoint:
        args.out_dir = args.resume
        return args, checkpoint

    # A new training. Scenes start from a classifier, because a small network learns little from
    # scratch in minutes. args.backbone is None without the flag; the word none asks for random
    # weights, also for scenes.
    if args.data == "shapes" and args.backbone is None:
        shipped = Path(__file__).with_name("weights") / f"shapes_{args.attn}.pt"
        if not shipped.exists():
            raise InputError(f"--attn {args.attn}: there is no classifier {shipped.name} in "
                             f"weights/ to start from; use --backbone RUN, a run of train_cls.py, "
                             f"or --backbone none for random weights")
        args.backbone = os.path.relpath(shipped)
    if "model" not in typed and args.backbone not in (None, "none"):
        args.model = None                       # the size of the backbone, not of the recipe
    args.out_dir = args.out_dir or f"out/seg_{args.data}_{args.attn}"
    common.check_new_run(args.out_dir)
    return args, checkpoint


def reject_useless_flags(args, typed):
    """Raise InputError for flags on the command line that would do nothing in a training.

    typed: the names of the flags on the command line.
    """
    common.reject_flags(typed & ONLY_IN_EVALUATION, "without --eval_only")
    if args.resume:
        common.reject_flags(typed & {"out_dir", "backbone"}, "with --resume")
    without_data = {"num_images"}
    if args.data == "shapes":
        without_data = {"data_dir", "num_classes"}
    common.reject_flags(typed & without_data, f"with --data {args.data}")
    without_pap = common.useless_attention_flags(args.attn, LAYER_PATTERNS)
    if args.decoder_attn == "rpc":
        without_pap -= {"n_iter", "lambd", "form"}      # the decoder reads them
    common.reject_flags(typed & without_pap, f"with --attn {args.attn}")


# --- batches --------------------------------------------------------------------------------------

def train_batches(views, args, start, stop, mean, rank, world):
    """Yield images (b, 3, S, S) in [0, 1] and labels (b, S, S) int64, on the device of `mean`.

    views: a TrainingViews, which crops the images. mean: the model's mean colour, (3, 1, 1), which
    fills the border of crops that are smaller than S.
    """
    device = mean.device
    pairs = batch_pairs(len(views.source), args.batch_size, start, stop, args.seed,
                        rank, world)
    batches = image_batches(views, pairs, args.num_workers, device)
    for images, labels, sizes in batches:                       # on the CPU; pinned for a GPU
        images = send(images, device)
        labels = send(labels, device)
        height, width = sizes                                   # of each crop without its border
        yield finish_views(images, height, width, mean), labels.long()


# --- evaluation of a checkpoint -------------------------------------------------------------------

def load_test_images(args, checkpoint, data, data_dir):
    """Load the test images of --eval_only by the rules of the training.

    data, data_dir: the data set and its folder, from common.evaluation_data.
    """
    flags = checkpoint["args"] | dict(data=data, data_dir=data_dir)
    part = "all" if data == "folder" else "test"
    classes = list(checkpoint["classes"])
    rules = checkpoint.get("mask_rules")
    if rules:
        rules = MaskRules(**rules)
    test, = load_segmentation(Namespace(**flags), [part], classes, checkpoint["seen"], rules)
    if test.classes != classes:
        raise InputError(f"{data_dir or data} has the classes {test.classes[:9]}, but "
                         f"{args.eval_only} has {classes[:9]}; name the same classes in "
                         f"the same order in classes.txt")
    return test


def evaluate_only(args, rank, world, device):
    """Print the scores of a checkpoint, and append them to results.jsonl as rows.

    The first row has the scores on clean images. Then each of the 15 corruptions has a row, in
    which a score is a list with one number per severity.
    """
    checkpoint = common.load(args.eval_only)
    model = segmenter_from_checkpoint(checkpoint).to(device)
    data, data_dir = common.evaluation_data(args, checkpoint["args"], built_in="shapes")
    test = load_test_images(args, checkpoint, data, data_dir)
    test_hash = fingerprint(test)
    num_workers = args.num_workers
    if num_workers is None:
        num_workers = RECIPES[data].get("num_workers", common.default_workers())
    window = args.window or model.config.image_size
    stride = args.stride or window
    order = epoch_order(len(test), epoch=0, seed=args.seed).tolist()
    num_corrupted = args.limit
    if not args.limit:
        num_corrupted = 320 if data == "shapes" else len(test)
    options = dict(size=model.config.image_size, window=window, stride=stride,
                   num_workers=num_workers, rank=rank, world=world)

    def add_row(name, index, began, numbers, settings):
        settings = dict(settings, window=window, stride=stride)
        add_result(args, model, checkpoint, began, fingerprint=test_hash, data=data,
                   data_dir=data_dir, name=name, images=len(index), **numbers, settings=settings)

    began = time.perf_counter()
    index = order[:args.limit]                          # the numbers of the images
    clean = evaluate(model, test, index=index, progress="clean", **options)
    add_row("clean", index, began, clean, {})
    table = [table_row("clean", index, [clean])]

    index = order[:num_corrupted]
    kinds = NAMES if args.severities else ()
    for kind in kinds:
        began = time.perf_counter()
        results = []
        for severity in args.severities:
            change = partial(corrupt, name=kind, severity=severity, seed=args.seed,
                             frost_dir=args.frost_dir)
            result = evaluate(model, test, index=index, progress=kind, change=change, **options)
            results.append(result)
        numbers = {}
        for field in clean:
            numbers[field] = [result[field] for result in results]
        settings = dict(type=kind, severities=args.severities)
        if kind == "frost" and args.frost_dir:
            settings["frost"] = frost_hash(args.frost_dir)
        add_row("corruptions", index, began, numbers, settings)
        table.append(table_row(kind, index, results))
    common.print0(common.table(table, ["measure", "images", *SCORES]))


def table_row(name, index, results):
    """Return a row of the printed table: the means of the scores over the results.

    results: the dicts of `evaluate`, one per severity.
    """
    row = [name, len(index)]
    for field in SCORES:
        mean = sum(result[field] for result in results) / len(results)
        row.append(f"{mean:.2f}")
    return row


# --- the run --------------------------------------------------------------------------------------

def learning_rate(step, total, args):
    """Return the learning rate of a step: polynomial, down to MIN_LR, or to a smaller --lr."""
    lowest = min(common.MIN_LR, args.lr)
    return (args.lr - lowest) * (1 - step / total) ** 0.9 + lowest


def main():
    args, checkpoint = get_args()

    # torchrun starts `world` processes, one per GPU. Each trains on its part of every batch; only
    # rank 0 prints and writes. Without torchrun, rank is 0 and world is 1.
    rank, world, device = common.start_processes(args.device)
    if args.eval_only:
        common.use_bf16(False, device)                  # sets plain float32, without TF32
        return evaluate_only(args, rank, world, device)
    amp = common.use_bf16(args.amp, device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=amp)

    # The classifier that the encoder starts from. inherited: hashes of your own images that chose
    # its weights.
    backbone = None
    inherited = checkpoint.get("inherited", [])
    if not checkpoint and args.backbone not in (None, "none"):
        backbone_checkpoint = common.load(args.backbone)
        backbone = load_classifier(backbone_checkpoint)
        inherited = backbone_checkpoint.get("seen", [])

    # Data. For your own images, a tenth of the images is held out and chooses best.pt, without
    # images of the backbone and copies of training images. Otherwise `val` contains the test
    # images, which choose nothing.
    keep_best = args.data == "folder"
    args.window = args.window or args.size
    args.stride = args.stride or args.window
    part = "val" if keep_best else "test"
    kind = "validation" if keep_best else "test"        # the word for messages
    train, val = load_segmentation(args, ["train", part], seen=inherited)
    common.print0(f"{args.data}: {len(train)} training, {len(val)} {kind} images, "
                  f"{len(train.classes)} classes")
    photos = args.data != "shapes"                      # scenes keep their size and colours
    scales = (1.0, 1.0)
    if photos:
        scales = (0.5, 2.0)
    views = TrainingViews(train, args.size, scales, args.seed, distorted=photos)
    common.check_batch_size(args.batch_size, world, len(train))
    epoch_steps = len(train) // args.batch_size                     # only whole batches
    if args.epochs is None:                             # your own images
        about_3000_steps = 3000 * args.batch_size // len(train)
        args.epochs = min(max(about_3000_steps, 8), 400)
    total = args.epochs * epoch_steps

    # Images that chose weights, of the backbone or of this network, are never test images. The
    # checkpoint stores their hashes.
    earlier = checkpoint.get("seen", inherited)
    seen = sorted({*earlier, *train.hashes, *val.hashes})

    # Model. The flags describe the model, also with --resume and with --backbone.
    if args.model is None:
        args.model = encoder_size(backbone.config) if backbone else "nano"
    size = ENCODER_SIZES[args.model]
    architecture = "fan" if args.model in FAN_SIZES else "vit"
    config = SegmenterConfig(
        **size, architecture=architecture, image_size=args.size,
        patch_size=args.patch_size, num_classes=len(train.classes), attn=args.attn,
        rpc_layers=common.parse_layers(args.rpc_layers, size["depth"]),
        pap=dict(n_iter=args.n_iter, lambd=args.lambd, form=args.form),
        drop_path=args.drop_path, decoder_attn=args.decoder_attn or "",
        decoder_dropout=args.dropout)
    torch.manual_seed(args.seed)
    model = Segmenter(config).to(device)
    if backbone:
        load_encoder(model, backbone, args.backbone)
        common.print0(f"encoder from {args.backbone}")
    # To freeze parameters, add a line here: model.encoder.requires_grad_(False)

    # Optimiser. The recipe of --data selects it.
    groups = common.weight_decay_groups(model, args.weight_decay)
    if args.optimizer == "sgd":
        optimizer = torch.optim.SGD(groups, lr=args.lr, momentum=0.9, nesterov=True,
                                    fused=device.type == "cuda")
    else:
        optimizer = torch.optim.AdamW(groups, lr=args.lr, fused=device.type == "cuda")

    # Resume. The data, the model and the batch size must be the same as before; other flags may
    # change. Random numbers have no state: they depend on seed, step and sample only.
    fingerprints = [fingerprint(train), fingerprint(val)]
    data_identity = dict(classes=list(train.classes), fingerprint=fingerprints)
    mask_rules = train.rules._asdict() if train.rules else None
    if checkpoint:
        # Checkpoints of an earlier version have no architecture, because all were ViTs.
        checkpoint["model_config"].setdefault("architecture", "vit")
        fixed = data_identity | asdict(config) | dict(batch_size=args.batch_size)
        common.resume(checkpoint, fixed, model, optimizer)
    first = checkpoint.get("step", 0)
    metrics = checkpoint.get("metrics", {})     # printed at the end if the run is finished
    best = common.best_evaluation(checkpoint, args.out_dir)
    common.same_run(args, data_identity, first)

    # Compile the model, and average gradients over processes. `net` is trained; `model`, which has
    # the same weights, is evaluated and saved.
    compiling = common.use_compile(args.compile, device)
    # rpca computes eigenvalues, for which the CPU waits. A CUDA graph cannot wait.
    mode = "default" if args.attn == "rpca" else "reduce-overhead"
    _, net = common.parallel(model, world, compiling, mode)

    log = common.start_log(args, first, model, device, training_images=len(train))

    # The loop. --max_steps stops it early, and does not change the schedule of --epochs.
    # stop equals first if the run is finished.
    stop = max(first, min(total, args.max_steps or total))
    batches = train_batches(views, args, first, stop, model.encoder.mean, rank, world)
    progress = bar(range(first, stop), "training", total=stop, initial=first,
                   unit="step")
    began = last_log = time.perf_counter()
    pending = []                                # loss and norm of each step not yet logged
    for step in progress:
        lr = learning_rate(step, total, args)
        for group in optimizer.param_groups:
            group["lr"] = lr

        images, labels = next(batches)

        # Forward and backward. The loss is the mean over the labelled pixels of all processes. The
        # factor `world` is needed, because DDP averages gradients over processes. The seed of a
        # step and process determines dropout and drop path, so a resumed run draws the same masks.
        torch.manual_seed(seed_from(args.seed, DROPOUT, step, rank))
        pixels = (labels != IGNORE).sum()
        if world > 1:
            dist.all_reduce(pixels)
        with autocast:
            logits = net(images)
        loss = F.cross_entropy(logits.float(), labels, ignore_index=IGNORE,
                               reduction="sum")
        loss = world * loss / pixels.clamp(min=1)                   # loss 0 without labelled pixels
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
            metrics = evaluate(model, val, size=args.size, window=args.window,
                               stride=args.stride, amp=amp, rank=rank, world=world,
                               num_workers=args.num_workers, progress="evaluating")
            # Mean |k| and the share of nonzero entries of S in each layer, on a few images of this
            # batch, show whether RPC acts.
            keys = key_statistics(model, images[:8])
            common.append_row(log, dict(step=done, eval=metrics, epoch=epoch, **keys))
            common.print0(f"step {done:6d}  mean IoU {metrics['mean_iou']:.2f}")

        # Save. A resumed run repeats what came after the last save.
        if saving and rank == 0:
            better = False
            if keep_best and scheduled:
                better = metrics["mean_iou"] > best.get("mean_iou", -1)
            if better:
                best = dict(step=done, **metrics)
            state = dict(task="segmentation", args=vars(args), step=done,
                         model=model.state_dict(), optimizer=optimizer.state_dict(),
                         model_config=asdict(config), metrics=metrics, best=best,
                         **data_identity, seen=seen, inherited=inherited,
                         mask_rules=mask_rules)
            if better:
                common.save(f"{args.out_dir}/best.pt", state)
            common.save(f"{args.out_dir}/last.pt", state)
        if logging:                             # the speed excludes evaluation and saving
            last_log = time.perf_counter()
            pending = []

    if metrics:                                 # of the last step, or of a finished run
        minutes = (time.perf_counter() - began) / 60
        common.print0(f"{args.data} {config.attn}: {kind} mean IoU "
                      f"{metrics['mean_iou']:.2f} % ({len(val)} images), {minutes:.1f} "
                      f"minutes")
    if best:
        common.print0(f"best.pt: step {best['step']}, highest mean IoU "
                      f"{best['mean_iou']:.2f} %")
    common.print0(f"next: python train_seg.py --eval_only {args.out_dir}",
                  f"or: python look.py --ckpt {args.out_dir}")


if __name__ == "__main__":
    common.run(main)        # prints an InputError as one line
