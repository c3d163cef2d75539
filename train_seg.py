"""Train Segmenter, a model that labels every pixel, with robust attention.

    python train_seg.py                                   # RPC on rendered scenes
    python train_seg.py --attn symmetric                  # its baseline
    python train_seg.py --backbone none                   # from random weights: takes far longer
    python train_seg.py --data_dir masks                  # your own masks/images, masks/annotations
    python train_seg.py --data camvid --data_dir data/camvid
    torchrun --standalone --nproc_per_node=4 train_seg.py --data ade20k \\
        --data_dir data/ADEChallengeData2016 --backbone out/imagenet_rpc      # the paper's run
    python train_seg.py --resume out/seg_shapes_rpc       # continue exactly where the run stopped
    python train_seg.py --eval_only out/seg_shapes_rpc    # test on clean and corrupted images

SETTINGS below are the flags. A data set has only the flags that act on it: `python train_seg.py
--data camvid --help` lists the flags of CamVid. The encoder has the size and the attention of its
--backbone; only --backbone none has flags for them.

Paper: Teo & Nguyen 2024, section 4.1, App. A.3 and E.5 (Table 6). Recipe: `rstrudel/segmenter`,
which the paper's fork `rachtsy/segm` keeps: SGD with Nesterov momentum, a polynomial schedule, 64
epochs of ADE20K. Differences from that code:
- GPUs use bf16 (float32 with --no-amp).
- torchvision distorts the colours. It multiplies the brightness by a factor from 0.87 to 1.13;
  mmsegmentation adds a number from -32 to 32.
- A loss that is not finite stops the run.
- The result is the network after the last epoch. For your own images, a tenth of the images
  chooses the best network, best.pt.

A resumed run is bit-identical on a CPU; docs/data.md describes GPUs and several processes.
"""

import argparse
import math
import shlex
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import common  # before torch, because it sets GOMP_SPINCOUNT for torch's threads
import torch
import torch.distributed as dist
import torch.nn.functional as F

from attention import (ATTENTIONS, LAYER_PATTERNS, attention_flags, default_settings,
                       key_statistics)
from common import ONE_OR_MORE, SHARE, InputError, bar, print0, send
from data.images import image_batches
from data.masks import (IGNORE, TrainingViews, add_values, finish_views,
                        load_segmentation)
from data.rng import DROPOUT, batch_pairs, epoch_order, seed_from
from models import SIZES, load_classifier
from segmenter import (ENCODERS, SCORES, Segmenter, SegmenterConfig, backbone_settings,
                       check_windows, evaluate, load_encoder, segmenter_from_checkpoint)

# name=(default, help) or (default, help, allowed values). Numbers are from 0 to inf by default.
SETTINGS = dict(
    # the model
    backbone=("", "start from this classifier, a run or file; none: random weights"),
    drop_path=(0.0, "rate at which the last block's branches are skipped; in a FAN all "
               "blocks'", (0, 0.99)),
    dropout=(0.1, "dropout rate of the decoder", SHARE),
    # the training
    epochs=(64, "length of the training and of its schedule", ONE_OR_MORE),
    batch_size=(8, "images per step of all processes", ONE_OR_MORE),
    optimizer=("adamw", "adamw, or sgd with Nesterov momentum", ("adamw", "sgd")),
    lr=(2e-3, "first learning rate"),
    weight_decay=(0.05, "weight decay of matrices"),
    clip=(1.0, "scale larger gradients down to this norm; 0: never"),
    # views
    size=(64, "short side of the images in pixels, and side of the training crops, a "
          "multiple of the patch size", ONE_OR_MORE),
    window=(0, "side of the windows in an evaluation, in pixels; 0: --size"),
    stride=(0, "pixels between windows; 0: --window"),
    # the run
    eval_every=(2, "epochs between evaluations", ONE_OR_MORE),
) | common.RUNNING | dict(
    out_dir=("", "folder of the run; without this flag out/seg_<data>_<attn>"))
# The flags of an encoder that starts from random weights; PAP's flags are added below.
ENCODER_SIZES = [name for name, (architecture, _) in SIZES.items() if architecture in ENCODERS]
ENCODER = dict(
    model=("nano", "size of the encoder, a ViT or a FAN", ENCODER_SIZES),
    patch_size=(16, "side of a patch in pixels", ONE_OR_MORE),
    attn=("rpc", "attention; rpc: RPC-Attention in --rpc_layers and in the decoder's "
          "first block, symmetric elsewhere"),
    rpc_layers=("0", "layers with RPC-Attention, from 0: 0 or 0,1,2 or 0-3 or all"),
)
SCENES = dict(
    num_images=(16000, "rendered training images", ONE_OR_MORE),
)
FILES = dict(
    data_dir=("masks", "folder with images/*.jpg and annotations/*.png, whose values "
              "are classes; docs/data.md shows all layouts"),
    num_classes=(0, "number of classes if some do not occur and --data_dir contains no "
                 "classes.txt; 0: the masks have all classes"),
    num_workers=(common.default_workers(), "processes per GPU that decode images"),
)

# Other defaults of a data set.
RECIPES = dict(
    # starts from weights/shapes_rpc.pt; 5 minutes on 2 CPU cores: mean IoU 75 % (3 seeds)
    shapes=dict(size=32, epochs=5, batch_size=32, dropout=0.0, patch_size=4),
    # 250 images; 25 minutes on a CPU core: mean IoU 30.5 % (symmetric), 27.9 % (rpc, n_iter 6).
    # These runs changed the brightness as mmsegmentation does.
    camvid=dict(data_dir="data/camvid", size=160, num_classes=11, epochs=200,
                eval_every=20),
    # the paper's run, which we did not repeat; the paper reports mean IoU 34.69 % (rpc) and 34.00 %
    # (symmetric)
    ade20k=dict(data_dir="data/ADEChallengeData2016", size=512, num_classes=150,
                optimizer="sgd", lr=1e-3, weight_decay=0.0, clip=0.0, drop_path=0.1,
                model="tiny"),
    # your own images
    folder=dict(epochs=(0, "length of the training; 0: 3,000 steps, 8 to 400 epochs"),
                patch_size=8, eval_every=10, attn="symmetric"),
)

# The flags of --eval_only. evaluation_table adds the flags that name the data.
EVALUATION = dict(
    window=(0, "side of the windows, in pixels; 0: --size of the training"),
    stride=(0, "pixels between windows; 0: --window"),
    severities=([1, 2, 3, 4, 5], "severities of the corruptions; without a number "
                "clean images only", (1, 5)),
    limit=(0, "number of test images; 0: all, but only 320 corrupted scenes"),
    frost_dir=("", "folder of ImageNet-C's photographs of frost; without this flag "
               "synthetic frost"),
    seed=common.RUNNING["seed"],
    out_dir=("", "folder of the new results.jsonl; without this flag out/eval_<time>"),
    device=common.RUNNING["device"],
)


def make_table(chosen):
    """Return the table of flags of a training for chosen flags, {name: value}.

    With --backbone none, the flags of ENCODER and of PAP describe the encoder. A classifier as
    --backbone replaces these flags.
    """
    data = chosen["data"]
    images = SCENES if data == "shapes" else FILES
    table = common.with_recipe(SETTINGS | ENCODER | images, RECIPES[data])
    attn = chosen.get("attn") or table["attn"][0]       # a run with a --backbone stores no attn
    attentions = sorted(ATTENTIONS | LAYER_PATTERNS)    # at this moment: a study can add its own
    table["attn"] = (attn, table["attn"][1], attentions)
    table |= attention_flags(attn)

    default = "none"
    if data == "shapes":        # a small network learns little from random weights in minutes
        default = str(Path(__file__).with_name("weights") / f"shapes_{attn}.pt")
    backbone = chosen["backbone"] or default
    table["backbone"] = (backbone, table["backbone"][1])
    replaced = set()
    if backbone != "none":
        replaced = ENCODER.keys() | attention_flags(attn).keys()
    if not chosen["backbone"]:
        replaced = replaced - {"attn"}                  # --attn chooses the default
    first = dict(
        data=(data, "data set; without this flag folder, your own images, if "
              "--data_dir is given, else shapes", tuple(RECIPES)),
        resume=("", "continue the run in this folder; with --help: the flags for it"),
        eval_only=([], "evaluate these runs or files instead of training; with --help: "
                   "the flags for it"))
    return first | {name: entry for name, entry in table.items() if name not in replaced}


def evaluation_table(chosen):
    """Return the table of flags of --eval_only. chosen: a namespace of chosen flags."""
    checkpoint = common.load(chosen.eval_only)          # the first network decides the defaults
    common.check_task(checkpoint, "segmentation")
    trained = checkpoint["args"]
    data = chosen.data or trained["data"]
    table = dict(
        eval_only=([], "evaluate these runs or files on the same images"),
        data=(data, "data set; without this flag as in the training", tuple(RECIPES)))
    if data != "shapes":
        data_dir = trained.get("data_dir", "masks")     # scenes have no folder
        table["data_dir"] = (data_dir, "folder of the test images")
        table["num_workers"] = FILES["num_workers"]
    return table | EVALUATION


def get_args():
    """Parse the flags. Returns them, and the checkpoint of --resume or {}."""
    attentions = sorted(ATTENTIONS | LAYER_PATTERNS)
    chosen = common.first_flags(data=RECIPES, data_dir=None, backbone=None,
                                attn=attentions, resume=None, eval_only=None)
    if chosen.resume:
        return common.parse_resumed(chosen.resume, "segmentation", make_table, __doc__)
    if chosen.eval_only:
        return common.parse(evaluation_table(chosen), __doc__), {}
    chosen.data = chosen.data or ("folder" if chosen.data_dir else "shapes")
    return common.parse(make_table(vars(chosen)), __doc__), {}


# --- batches --------------------------------------------------------------------------------------

def train_batches(views, args, start, stop, mean, device, rank, world):
    """Yield images (b, 3, S, S) in [0, 1] and labels (b, S, S) int64, on the device.

    views: a TrainingViews, which crops the images. mean: the model's mean colour, (3, 1, 1) on the
    device, which fills the border of crops that are smaller than S.
    """
    pairs = batch_pairs(len(views.source), args.batch_size, start, stop, args.seed,
                        rank, world)
    keys = (list(zip(position.tolist(), index.tolist())) for position, index in pairs)
    batches = image_batches(views, keys, views.source.num_workers, device)
    for images, labels, sizes in batches:                       # on the CPU; pinned for a GPU
        images = send(images, device)
        labels = send(labels, device)
        height, width = sizes                                   # of each crop without its border
        yield finish_views(images, height, width, mean), labels.long()


# --- evaluation of checkpoints --------------------------------------------------------------------

def load_test_images(args, checkpoint):
    """Load the test images of --eval_only. checkpoint: of the first network."""
    # 16,000: 1,600 test scenes, whatever the training had.
    flags = checkpoint["args"] | vars(args) | dict(num_images=16000)
    flags["size"] = checkpoint["model_config"]["image_size"]
    classes = list(checkpoint["classes"])
    return load_segmentation(["test"], argparse.Namespace(**flags), classes)[0]


def check_classes_and_palette(path, checkpoint, test):
    """Raise InputError unless a network has the classes of the test images, and their palette."""
    if list(checkpoint["classes"]) != test.classes:
        raise InputError(f"{path} has the classes {checkpoint['classes'][:9]}, but the "
                         f"images have {test.classes[:9]}; expected the same")
    source = f"the training masks of {path}"
    trained = {}
    for value, colour in checkpoint["palette"].items():
        trained[value] = (colour, source)
    add_values(trained, test.values)            # an error if a value has two colours


def evaluate_only(args, rank, world, device):
    """Evaluate checkpoints on clean and corrupted images; write results.jsonl, and print tables."""
    # Here, because a training needs none of these files.
    from results import print_tables
    from robust.corruptions import NAMES, corrupt

    checkpoints = {path: common.load(path) for path in args.eval_only}
    test = load_test_images(args, checkpoints[args.eval_only[0]])
    common.check_same_run(args, 0, test.crc)
    networks = {}                       # {path: (model, dict(size, window, stride))}
    for path, checkpoint in checkpoints.items():
        common.note_step(path, checkpoint)
        model = segmenter_from_checkpoint(checkpoint).to(device)
        check_classes_and_palette(path, checkpoint, test)
        size = model.config.image_size
        window = args.window or size
        stride = args.stride or window
        check_windows(window, stride, model.config.patch_size)
        networks[path] = (model, dict(size=size, window=window, stride=stride))
    common.check_equal_weights(model for model, _ in networks.values())
    if args.frost_dir:
        common.check_folder(args.frost_dir, "frost_dir")

    order = epoch_order(len(test), epoch=0, seed=args.seed).tolist()
    clean = order[:args.limit or None]
    few = order[:320] if args.data == "shapes" and not args.limit else clean
    measures = [("clean", "clean", clean, [None])]      # name, text, images, changes
    kinds = NAMES if args.severities else []
    for kind in kinds:
        severities = ",".join(map(str, args.severities))
        text = f"corruptions type={kind} severities={severities}"
        change = partial(corrupt, name=kind, seed=args.seed,
                         frost_dir=args.frost_dir or None)
        changes = [partial(change, severity=severity) for severity in args.severities]
        measures.append((kind, text, few, changes))

    file = common.new_results(args.out_dir)
    print0(f"{len(networks)} networks | {args.data}, {len(test)} test images | {file}")
    rows = []
    for name, text, index, changes in measures:
        for path, (model, windows) in networks.items():
            results = [evaluate(model, test, **windows, index=index, change=change,
                                num_workers=test.num_workers, rank=rank, world=world,
                                progress=text)
                       for change in changes]
            row = dict(network=path, data=args.data, seed=args.seed, **windows, name=name,
                       measure=text, eps="", images=len(index), severities=len(changes),
                       results=results)
            for score in SCORES:                # the mean over severities
                row[score] = sum(result[score] for result in results) / len(results)
            rows.append(row)
            common.append_row(file, row | common.origin(device))
    if rank == 0:
        print_tables(rows)


# --- the run --------------------------------------------------------------------------------------

def learning_rate(step, total, args):
    """Return the learning rate of a step: polynomial, down to MIN_LR, or to a smaller --lr."""
    lowest = min(common.MIN_LR, args.lr)
    return (args.lr - lowest) * (1 - step / total) ** 0.9 + lowest


def load_backbone(args):
    """Return the settings of the encoder, and the classifier of --backbone or None."""
    if args.backbone != "none":
        if not Path(args.backbone).exists():
            raise InputError(f"there is no classifier {args.backbone}; choose another "
                             "--backbone, or --backbone none")
        classifier = load_classifier(common.load(args.backbone))
        return backbone_settings(classifier.config), classifier
    architecture, size = SIZES[args.model]
    layers = common.parse_layers(args.rpc_layers, size["depth"])
    pap = {name: getattr(args, name) for name in default_settings(args.attn)}
    encoder = dict(architecture=architecture, patch_size=args.patch_size, attn=args.attn,
                   rpc_layers=layers, pap=pap)
    return encoder | size, None


def main():
    args, checkpoint = get_args()

    # torchrun starts `world` processes, one per GPU. Each trains on its part of every batch; only
    # rank 0 prints and writes. Without torchrun, rank is 0 and world is 1.
    rank, world, device = common.start_processes(args.device)
    if args.eval_only:                                  # in float32
        return evaluate_only(args, rank, world, device)
    amp = common.use_bf16(args.amp, device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=amp)

    # The encoder. A backbone gives it settings and weights.
    backbone = None
    if checkpoint:
        encoder = checkpoint["model_config"]
    else:
        encoder, backbone = load_backbone(args)
        args.out_dir = args.out_dir or f"out/seg_{args.data}_{encoder['attn']}"
        common.check_new_run(args.out_dir)
    args.window = args.window or args.size
    args.stride = args.stride or args.window
    patch_size = encoder["patch_size"]
    if args.size % patch_size:
        raise InputError(f"--size {args.size}: expected a multiple of the patch size "
                         f"{patch_size}")
    check_windows(args.window, args.stride, patch_size)

    # Data. For your own images, the part val chooses best.pt. Otherwise it chooses nothing.
    train, val = load_segmentation(["train", "val"], args)
    if not len(val):
        print0("there is no validation image; evaluations use the training images")
        val = train
    elif train.crc == val.crc:
        raise InputError(f"{args.data_dir}: the training and the validation images are equal")
    n = len(train)
    if args.batch_size % world or args.batch_size > n:
        raise InputError(f"--batch_size {args.batch_size}: expected at most {n}, the "
                         f"training images, and a multiple of the {world} processes")
    epoch_steps = n // args.batch_size                              # only whole batches
    about_3000_steps = min(max(3000 * args.batch_size // n, 8), 400)
    args.epochs = args.epochs or about_3000_steps                   # 0: your own images
    total = args.epochs * epoch_steps
    print0(f"{args.data}: {n} training images, {len(val)} to evaluate on, "
           f"{len(train.classes)} classes: {', '.join(train.classes[:12])}")
    photos = args.data != "shapes"                      # scenes keep their size and colours
    scales = (0.5, 2.0) if photos else (1.0, 1.0)
    views = TrainingViews(train, args.size, scales, args.seed, distorted=photos)

    # Model.
    settings = dict(image_size=args.size, num_classes=len(train.classes),
                    drop_path=args.drop_path, decoder_dropout=args.dropout)
    config = SegmenterConfig(**(encoder | settings))
    torch.manual_seed(args.seed)
    model = Segmenter(config).to(device)
    if backbone:
        load_encoder(model, backbone)
        print0(f"encoder from {args.backbone}")
    # To freeze parameters, add a line here: model.encoder.requires_grad_(False)

    # Optimiser.
    groups = common.weight_decay_groups(model, args.weight_decay)
    fused = device.type == "cuda"
    if args.optimizer == "sgd":
        optimizer = torch.optim.SGD(groups, lr=args.lr, momentum=0.9, nesterov=True,
                                    fused=fused)
    else:
        optimizer = torch.optim.AdamW(groups, lr=args.lr, fused=fused)

    # Resume. Random numbers have no state: they depend on seed, step and sample only.
    crc = [train.crc, val.crc]
    first = 0
    best = -1.0                                 # the highest validation mean IoU
    metrics = {}
    if checkpoint:
        if checkpoint["data_crc"] != crc:
            raise InputError("--resume: the images or masks have changed")
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        first = checkpoint["step"]
        if Path(args.out_dir, "best.pt").exists():      # a lost best.pt is written again
            best = checkpoint["best"]
    common.check_same_run(args, first, crc)

    # `net` is trained; `model`, which has the same weights, is evaluated and saved.
    compiling = common.use_compile(args.compile, device)
    _, net = common.parallel(model, world, compiling)
    log = common.start_log(args, first, model, device)

    def save(name, step):
        """Write a checkpoint, with the present weights, into the folder of the run."""
        palette = {value: colour for value, (colour, _) in train.values.items()}
        common.save(f"{args.out_dir}/{name}", dict(
            task="segmentation", args=vars(args), step=step, total=total,
            metrics=metrics, best=best,
            model=model.state_dict(), optimizer=optimizer.state_dict(),
            model_config=asdict(config), classes=list(train.classes), palette=palette,
            data_crc=crc))

    if rank == 0 and not args.resume:           # so --resume works before the first evaluation
        save("last.pt", 0)

    # The loop. --max_steps stops it early, and does not change the schedule of --epochs.
    stop = min(total, args.max_steps or total)
    batches = train_batches(views, args, first, stop, model.encoder.mean, device, rank,
                            world)
    steps = bar(range(first, stop), "training", total=stop, initial=first, unit="step")
    since = time.perf_counter()
    pending = []                                # loss and norm of each step not yet logged
    for step in steps:
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
            row = dict(step=done, loss=mean_loss, grad_norm=mean_norm, epoch=epoch)
            common.append_row(log, row | dict(lr=lr, images_per_s=speed))
            print0(f"step {done:6d}  loss {mean_loss:.4f}  {speed:.0f} images/s")
            pending = []
            since = time.perf_counter()

        # Evaluate and save. A resumed run repeats what came after the last save. The evaluation
        # where --max_steps stops the run does not choose best.pt, so that a run which was stopped
        # and resumed has the same best.pt.
        if evaluating:
            common.share_buffers(model)
            metrics = evaluate(model, val, size=args.size, window=args.window,
                               stride=args.stride, amp=amp, rank=rank, world=world,
                               num_workers=val.num_workers, progress="evaluating")
            # Mean |k| and the share of nonzero entries of S in each layer, on a few images of this
            # batch, show whether RPC acts.
            keys = key_statistics(model, images[:8])
            common.append_row(log, dict(step=done, eval=metrics, epoch=epoch, **keys))
            print0(f"step {done:6d}  mean IoU {metrics['mean_iou']:.2f}")
            better = args.data == "folder" and scheduled and metrics["mean_iou"] > best
            if better:
                best = metrics["mean_iou"]
            # best.pt comes first: a run that is killed between the two repeats this evaluation.
            if rank == 0 and better:
                save("best.pt", done)
            if rank == 0:
                save("last.pt", done)
            since = time.perf_counter()                 # the speed excludes evaluation and saving

    folder = shlex.quote(args.out_dir)
    print0(f"next: python train_seg.py --eval_only {folder}",
           f"or: python look.py --ckpt {folder}")


if __name__ == "__main__":
    common.run(main)        # prints an InputError as one line
