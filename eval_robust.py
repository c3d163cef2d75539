"""How robust is a classifier? One table: measures down, checkpoints across, and every finished row on disk at once.

    python eval_robust.py --ckpt out/shapes_rpc                              # embedded test scenes, minutes on a CPU
    python eval_robust.py --ckpt out/a out/b out/c --out_dir results/abc     # side by side, on the same images
    python eval_robust.py --ckpt out/a --measures autoattack --limit 1000 --out_dir results/abc --resume   # more rows
    python eval_robust.py --ckpt out/a --preset paper                        # the paper's own conditions
    python eval_robust.py --ckpt out/a --checks                              # is the evaluator to be trusted here?
    torchrun --standalone --nproc_per_node=4 eval_robust.py --ckpt out/imagenet_rpc --data_dir data/imagenet \\
        --corrupted_dir data/imagenet-c --imagenet_a data/imagenet-a --imagenet_r data/imagenet-r \\
        --imagenet_o data/imagenet-o

Paper: Teo & Nguyen 2024, section 4.1, App. A.2, E.3, E.4; Tables 1, 2, 4, 5 and Fig. 3. Budgets are in units of pixels
in [0, 1], labels are the true ones, attacked pixels stay in [0, 1], all in float32. The paper's code
(`rachtsy/KPCA_code:Attack`) attacks normalised tensors (eps 1/255 there is about 0.226/255), leads away from the
model's own prediction and does not clip: --preset paper does that, and each part is a flag (--space normalized,
--labels pred, --no-clip).
Images a model gets wrong already count as not robust. Top-5 is taken on the image that was made for top-1.
Random numbers depend on (seed, image) alone: batch size, processes and resuming change nothing.
"""

import argparse
import copy
import json
import math
import os
import time
import zlib
from datetime import date
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from robust import adaptive
from robust import attacks
from robust import autoattack
from robust import checks
import common
from robust import corruptions
import data
from robust import metrics
from vit import ViTConfig, vit_from_checkpoint

# Fig. 3 sweeps eps over FGSM and PGD; Table 2 has the others at one budget each. Flags given on the command line win.
PRESETS = {
    "default": dict(space="pixel", labels="true", clip=True, eps=[k / 255 for k in (1, 2, 4, 8)], auto_eps=[1 / 255],
                    spsa_eps=[6 / 255], spsa_centre="iterate", sld_eps=[10.0], sld_rescale=False, cw_confidence=0.0,
                    noise_scale=[0.068]),
    "paper": dict(space="normalized", labels="pred", clip=False, eps=[k / 255 for k in range(1, 7)], auto_eps=[1 / 255],
                  spsa_eps=[0.1], spsa_centre="legacy", sld_eps=[10.0], sld_rescale=True, cw_confidence=10.0,
                  noise_scale=[0.3]),
}
FOLDERS = ("imagenet_a", "imagenet_r", "imagenet_o")
ATTACKS = dict(noise=attacks.noise, fgsm=attacks.fgsm, pgd=attacks.pgd, adaptive_pgd=adaptive.adaptive_pgd,
               transfer=attacks.pgd, sld=attacks.sld, spsa=attacks.spsa, cw=attacks.cw, apgd=autoattack.apgd,
               adaptive_apgd=adaptive.adaptive_apgd, square=autoattack.square, autoattack=autoattack.autoattack,
               adaptive_autoattack=adaptive.adaptive_autoattack)
MEASURES = ("clean", "corruptions", *FOLDERS, *ATTACKS)
# Images per measure without --limit: minutes on the embedded scenes; elsewhere all, but for attacks that take hours.
LIMITS = {"shapes": dict(corruptions=320, noise=640, fgsm=640, pgd=160, adaptive_pgd=80, transfer=160, sld=160, spsa=20,
                         cw=40, apgd=80, adaptive_apgd=80, square=80, autoattack=80, adaptive_autoattack=80)}
SLOW = dict(autoattack=1000, adaptive_autoattack=1000, square=1000, spsa=100, cw=100)
# Training flags that may differ between the seeds of one model; any other makes it another model.
SEED_FLAGS = ("seed", "data_dir", "download", "skip_bad_images", "num_workers", "device", "compile",
              "out_dir", "resume", "max_steps", "log_every", "eval_every", "save_every",
              "keep_every")


def budget(text):
    """8/255 or 0.0314 -> float; eps is in pixel units."""
    top, _, bottom = text.partition("/")
    if bottom and not float(bottom):
        raise argparse.ArgumentTypeError(f"{text}: division by zero, expected 8/255 or 0.0314, say")
    value = float(top) / float(bottom or 1)
    if not 0 <= value <= 1:
        hint = f"; was {text}/255 meant?" if value > 1 and not bottom else ""
        raise argparse.ArgumentTypeError(f"{text}: pixels are in [0, 1], so 0 <= eps <= 1{hint}")
    return value


def get_args():
    """The flags; what is not given on the command line comes from --preset."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                allow_abbrev=False)
    boolean = argparse.BooleanOptionalAction
    count, real = common.number(int, 1), common.number(float, 0)

    flag = p.add_argument_group("what to evaluate").add_argument
    flag("--ckpt", nargs="+", required=True, help="checkpoints of train_cls.py: files, or folders with last.pt")
    flag("--measures", nargs="+", metavar="NAME", help=f"of {', '.join(MEASURES)}, or all; default: clean, "
         "corruptions, noise, fgsm, pgd, adaptive_pgd, apgd and what the folders below give")
    flag("--checks", action=boolean, default=False, help="only run the evaluator's ten sanity checks on each model")
    flag("--limit", type=count, help="images per measure, the same for every model (default: all; "
         + ", ".join(f"{v} for {k}" for k, v in SLOW.items()) + "; fewer on shapes)")
    flag("--data", choices=["shapes", "cifar10", "imagenet"], help="default: what the checkpoints were trained on")
    flag("--data_dir", type=os.path.normpath,
         help="as for train_cls.py; imagenet needs val/ only; default: as in training")
    flag("--corrupted_dir", type=os.path.normpath,
         help="released files instead of generated ones: ImageNet-C "
         "(<type>/<severity>/<class>/*.JPEG) or CIFAR-10-C (<type>.npy, labels.npy)")
    for name in FOLDERS:
        flag(f"--{name}", metavar="DIR", type=os.path.normpath,
             help=f"{name.replace('_', '-')}: <class>/*; folders' names are its classes")
    flag("--frost_dir", type=os.path.normpath,
         help="folder with ImageNet-C's frost1.png to frost6.jpg (default: procedural frost)")
    flag("--severities", nargs="+", type=common.number(int, 1, 5), default=[1, 2, 3, 4, 5], help="of the corruptions")
    flag("--jpeg85", action=boolean, default=False,
         help="corrupted images once through JPEG at quality 85, as ImageNet-C's files")

    flag = p.add_argument_group("attacks (the preset's values unless given)").add_argument
    flag("--preset", choices=PRESETS, default="default", help="paper: normalised space, predicted labels, no clipping")
    flag("--space", choices=["pixel", "normalized"], help="unit of the budgets: pixels in [0, 1] or normalised tensors")
    flag("--labels", choices=["true", "pred"], help="what an attack leads away from")
    flag("--clip", action=boolean, help="attacked pixels stay in [0, 1]")
    flag("--eps", nargs="+", type=budget,
         help="L-inf budgets of fgsm, pgd, adaptive_pgd, transfer, apgd, adaptive_apgd: 8/255 or 0.031")
    flag("--auto_eps", nargs="+", type=budget, help="of autoattack, adaptive_autoattack and square")
    flag("--spsa_eps", nargs="+", type=budget, help="of spsa")
    flag("--sld_eps", nargs="+", type=real, help="L1 budgets of sld")
    flag("--noise_scale", nargs="+", type=real, help="half width (uniform) or standard deviation (gaussian)")
    flag("--noise_kind", choices=["uniform", "gaussian"], default="uniform")
    flag("--noise_draws", type=count, default=3, help="noise: accuracy is the mean over so many draws")
    flag("--noise_best", type=count, default=1, help="noise: each image's worst of so many")
    flag("--pgd_steps", type=count, default=20)
    flag("--pgd_alpha", type=real, default=0.15, help="step as a share of eps")
    flag("--random_start", action=boolean, default=True, help="pgd")
    flag("--pgd_best", action=boolean, default=False, help="pgd returns any misclassified iterate, not the last one")
    flag("--spsa_steps", type=count, default=40)
    flag("--spsa_centre", choices=["iterate", "legacy"], help="legacy: probe around 2x, as cleverhans 4.0.0 does")
    flag("--sld_rescale", action=boolean, help="scale down to the L1 ball as cleverhans does, instead of projecting")
    flag("--cw_steps", type=count, default=1000, help="Adam steps in each of the 5 rounds of the search for c")
    flag("--cw_lr", type=real, default=5e-3)
    flag("--cw_confidence", type=real, help="kappa")
    flag("--queries", type=count, default=5000, help="of square, alone and in autoattack")
    flag("--source", help="checkpoint whose adversarial images the measure transfer tries on the others")
    flag("--seed", type=common.number(int, 0, 2 ** 31 - 1), default=0,
         help="which images --limit takes, and all random numbers")

    flag = p.add_argument_group("running").add_argument
    flag("--out_dir", help="for results.jsonl, table.md and images "
         "(default: robust/ in the first checkpoint's folder, robust_paper/ with --preset paper)")
    flag("--resume", action=boolean, default=False, help="keep the rows --out_dir has and add what is missing")
    flag("--save_images", type=common.number(int, 0), default=0,
         help="N: pictures of the first N images, clean, corrupted, attacked")
    flag("--batch_size", type=count, help="images at a time (default: 512 at 32 px, by area; 8 times as many on a GPU)")
    flag("--amp", action=boolean, default=False, help="bf16 when counting, as the paper's fp16; attacks are in float32")
    flag("--num_workers", type=common.number(int, 0), default=min(os.cpu_count() or 1, 10),
         help="imagenet: decoding processes")
    flag("--device", help="cuda, mps or cpu (default: the best there is)")

    args = p.parse_args()
    for name, value in PRESETS[args.preset].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    unknown = [m for m in args.measures or () if m not in (*MEASURES, "all")]
    if unknown:
        p.error(f"--measures {' '.join(unknown)}: unknown; known are {', '.join(MEASURES)}, all")
    return args


# --- models and images -----------------------------------------------------------------------------------------------

def kind_of(config):
    """A model in words: softmax, symmetric, rpc 4iter/layer1, rpc 2iter/all-layer, lambda 3, ..."""
    if not config.rpc_layers:
        return config.attn
    everywhere = len(config.rpc_layers) == config.depth
    layers = "all-layer" if everywhere else "layer" + ",".join(str(i + 1) for i in config.rpc_layers)
    name = f"{config.attn} {config.n_iter}iter/{layers}"
    if config.lambd != ViTConfig.lambd:
        name += f", lambda {config.lambd:g}"
    if config.form != ViTConfig.form:
        name += f", form {config.form}"
    return name


def checksum(*parts):
    """Eight hexadecimal digits for a sequence of bytes."""
    value = 0
    for part in parts:
        value = zlib.crc32(part, value)
    return f"{value:08x}"


def load_model(path, device):
    """A checkpoint as dict(model, name, kind, path, classes, args, ...).

    weights, model_config (what differs from ViTConfig's defaults): which model it is; recipe: a
    checksum of how it was trained, but for the seed; count: [images forward, images backward],
    which grows as the model is used.
    """
    checkpoint = common.read_checkpoint(path)
    with common.naming(f"--ckpt {path}"):
        model = vit_from_checkpoint(checkpoint).to(device).requires_grad_(False)
    tensors = (t.cpu().contiguous().numpy().tobytes() for t in model.state_dict().values())
    defaults = vars(ViTConfig())
    config = {k: v for k, v in vars(model.config).items() if v != defaults[k]}
    config = json.loads(json.dumps(config))               # as a row that is read back has it
    trained = checkpoint.get("args") or {}
    recipe = {k: v for k, v in trained.items() if k not in SEED_FLAGS}
    recipe["step"] = checkpoint.get("step")               # epoch 3 and epoch 8 are not two seeds
    seen = [0, 0]

    def look(module, inputs):                                    # a hook is shared by copies of the model: all count
        seen[0] += len(inputs[0])
        seen[1] += len(inputs[0]) * inputs[0].requires_grad

    model.register_forward_pre_hook(look)
    kind = kind_of(model.config)
    name = f"{kind}, seed {trained.get('seed', '?')}"
    return dict(model=model, name=name, kind=kind, path=str(path), weights=checksum(*tensors),
                model_config=config,
                recipe=checksum(json.dumps(recipe, sort_keys=True).encode()),
                classes=checkpoint.get("classes"), args=trained, count=seen)


def load_source(args, models, device):
    """The test split: a data.Split or a data.ImageTree. Everything but --data_dir is known from the checkpoints."""
    trained, size = models[0]["args"], models[0]["model"].config.image_size
    for name in ("image_size", "num_classes"):
        values = {getattr(m["model"].config, name) for m in models}
        if len(values) > 1:
            raise ValueError(f"--ckpt: the models have {name} {sorted(values)}, expected the same for all")
    args.data = args.data or trained.get("data") or "imagenet"
    args.data_dir = args.data_dir or trained.get("data_dir")
    if args.data == "shapes":
        source = data.load_shapes("test", max(trained.get("num_images", 16000) // 5, 1), size, device=device)
    elif not args.data_dir:
        raise ValueError(f"--data {args.data} needs --data_dir")
    elif args.data == "cifar10":
        source = data.load_cifar10(args.data_dir, "test")
        source = data.Split(source.images.to(device), source.labels.to(device), source.classes)
    else:
        source = data.ImageTree(args.data_dir, "val", classes=models[0]["classes"], size=size)
    for m in models:
        classes = m["classes"] or source.classes
        if list(classes) != list(source.classes) or len(classes) != m["model"].config.num_classes:
            raise ValueError(f"--ckpt {m['path']} was trained on {len(classes)} other classes "
                             f"({', '.join(classes[:3])}, ...) than --data {args.data} has "
                             f"({', '.join(source.classes[:3])}, ...)")
    args.imagenet1k = metrics.is_imagenet(source.classes)
    return source


def pick(n, limit, seed):
    """Numbers of the images a measure uses: a random subset, contained in that of every larger limit. (limit,) int64"""
    if limit and limit > n:
        raise ValueError(f"--limit {limit}: there are only {n} images")
    return data.epoch_order(n, 0, seed)[:limit or n]


def batches(source, index, args, label="", rank=0, world=1):
    """This process's share of the images numbered index, in batches on the device.

    Yields ((b, 3, S, S) uint8, labels (b,), numbers (b,), their places in index (b,)).
    """
    share = torch.arange(len(index))[rank::world]
    places = [p for p in share.split(args.batch_size) if len(p)]
    parts = [index[p] for p in places]
    if isinstance(source, data.Split):
        parts = (part.to(args.device) for part in parts)
        loaded = ((source.images[part], source.labels[part], part) for part in parts)
    else:
        keys = [[(i, i) for i in part.tolist()] for part in parts]
        loaded = data.imagenet_batches(source, keys, args.num_workers, args.device)
    with tqdm(total=len(share), desc=label, unit="image", leave=False, disable=rank > 0) as bar:
        for (images, labels, numbers), place in zip(loaded, places):
            batch = images, labels, numbers, place
            yield tuple(t.to(args.device, non_blocking=True) for t in batch)
            bar.update(len(place))


def hits(logits, labels):
    """Right in the first, right among the first five: (B, 2) float."""
    if not logits.isfinite().all():
        raise ValueError("the model returns logits that are not finite")
    right = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
    return torch.stack([right[:, 0], right.any(1)], 1).double()


def percent(total, n):
    return [round(100 * x / n, 4) for x in total.tolist()]


def outcome(hit):
    """Of hits (n, 2): top-1 and top-5 in percent, and which images were right, one bit each."""
    top1, top5 = percent(hit.sum(0), len(hit))
    return dict(top1=top1, top5=top5, right=metrics.pack(hit[:, 0] > 0))


def together(outcomes):
    """Outcomes of several severities or draws as one: a list for each field."""
    return {field: [one[field] for one in outcomes] for field in outcomes[0]}


# --- rows ------------------------------------------------------------------------------------------------------------
# Each function evaluates on this process's share of the images and returns the whole result.

@torch.no_grad()
def clean_row(m, source, index, args, rank, world):
    """Top-1, top-5 in percent."""
    hit = torch.zeros(len(index), 2, dtype=torch.float64, device=args.device)
    label = f"clean, {m['name']}"
    for images, labels, _, place in batches(source, index, args, label, rank, world):
        with common.autocast(args.device, args.amp):
            hit[place] = hits(m["model"](images.float() / 255).float(), labels)
    return outcome(common.all_sum(hit))


@torch.no_grad()
def corruption_rows(models, source, index, setting, args, rank, world):
    """One corruption, made once for all models: per model top-1, top-5 per severity in percent.

    Images from files are resized bilinear, not bicubic, before they are corrupted: so ImageNet-C was made.
    """
    if isinstance(source, data.ImageTree):
        source = copy.copy(source)
        source.resample = "bilinear"
    shape = len(models), len(setting["severities"]), len(index), 2
    hit = torch.zeros(shape, dtype=torch.float64, device=args.device)
    loaded = batches(source, index, args, setting["type"], rank, world)
    for images, labels, numbers, place in loaded:
        for j, severity in enumerate(setting["severities"]):
            corrupted = corruptions.corrupt(images, setting["type"], severity, seed=args.seed,
                                            index=numbers, frost_dir=args.frost_dir)
            if setting["jpeg85"]:
                corrupted = corruptions.jpeg85(corrupted)
            for i, m in enumerate(models):
                with common.autocast(args.device, args.amp):
                    hit[i, j, place] = hits(m["model"](corrupted.float() / 255).float(), labels)
    return [together([outcome(h) for h in severities]) for severities in common.all_sum(hit)]


def released(args, classes, size, name, severity):
    """Released corrupted files as a source: ImageNet-C's (224 px, only cropped) or CIFAR-10-C's."""
    array = Path(args.corrupted_dir, f"{name}.npy")
    if not array.exists():
        return data.ImageTree(Path(args.corrupted_dir, name), str(severity), classes, size, crop_pct=1.0)
    part = slice((severity - 1) * 10000, severity * 10000)
    images, labels = (torch.from_numpy(np.load(Path(args.corrupted_dir, f), mmap_mode="r")[part].copy())
                      for f in (array.name, "labels.npy"))
    return data.Split(images.permute(0, 3, 1, 2).to(args.device), labels.long().to(args.device), classes)


def released_rows(models, source, index, setting, args, rank, world):
    """As corruption_rows, from released files, whose images are numbered as the test split's."""
    rows = [[] for _ in models]
    for severity in setting["severities"]:
        corrupted = released(args, source.classes, models[0]["model"].config.image_size, setting["type"], severity)
        if len(corrupted.labels) != len(source.labels):
            raise ValueError(f"--corrupted_dir {args.corrupted_dir}: {setting['type']}, severity {severity} has "
                             f"{len(corrupted.labels)} images, the test split {len(source.labels)}")
        for row, m in zip(rows, models):
            row.append(clean_row(m, corrupted, index, args, rank, world))
    return [together(row) for row in rows]


@torch.no_grad()
def kept_logits(m, source, index, columns, args, rank, world):
    """Logits of the kept classes for all images index, on every process: (n, len(columns))."""
    out = torch.zeros(len(index), len(columns), dtype=torch.float64, device=args.device)
    label = f"{Path(source.folder).name}, {m['name']}"
    for images, _, _, place in batches(source, index, args, label, rank, world):
        out[place] = m["model"](images.float() / 255)[:, columns].double()
    return common.all_sum(out)


def folder_row(m, name, tree, index, source, args, rank, world):
    """ImageNet-A, -R: accuracy over their 200 classes. ImageNet-O: how well confidence tells its images from val's.

    tree: the folder, with the labels of all classes; the kept classes are those that have a folder.
    """
    columns = tree.labels.unique()                                                   # sorted, as the folders' names are
    logits = kept_logits(m, tree, index, columns, args, rank, world)
    if name != "imagenet_o":
        labels = torch.searchsorted(columns, tree.labels[index]).to(args.device)
        return dict(outcome(hits(logits, labels)), classes=len(columns))
    inside = torch.isin(source.labels, columns).nonzero()[:, 0]
    inside = inside[pick(len(inside), min(args.limit or len(inside), len(inside)), args.seed)]
    both = torch.cat([logits, kept_logits(m, source, inside, columns, args, rank, world)])
    score = -both.softmax(1).amax(1)                                                 # little confidence: an outlier
    outlier = torch.arange(len(both), device=score.device) < len(index)
    return dict(aupr=100 * metrics.average_precision(score, outlier), auroc=100 * metrics.auroc(score, outlier),
                fpr95=100 * metrics.fpr_at_recall(score, outlier), chance=100 * len(index) / len(both),
                inside=len(inside), classes=len(columns))


def attack_images(model, name, setting, images, labels, index, args, trace=None):
    """Attack images (b, 3, S, S) in [0, 1] in the space, against the labels and with the clipping asked for.

    Returns pixels, in [0, 1] only where clipped. Images are attacked args.batch_size at a time,
    those that are wrong already left out before. trace: a list that receives autoattack's stages,
    with standing (b,): not changed so far, and right (b,): standing, and of the true class.
    """
    own_clip = name.endswith("autoattack")              # in the released harness it stays in [0, 1] in either space
    x = images
    if args.space == "normalized":
        model = attacks.Normalized(model)
        x = (x - model.mean) / model.std
        x = x.clamp(0, 1) if own_clip else x                            # the first thing it does to a normalised image
    target, todo = labels, torch.ones_like(labels, dtype=torch.bool)
    every = name in ("noise", "transfer", "fgsm")         # fgsm itself keeps what is wrong already
    if args.labels == "pred" or not every:
        predicted = attacks.forward(model, x, args.batch_size).argmax(1)
        target = labels if args.labels == "true" else predicted
    if not every:
        todo = target == predicted                        # wrong already: nothing to attack
    how = {k: v for k, v in setting.items() if k != "source"}
    how["clip"] = args.clip or own_clip
    if name == "fgsm":
        how["keep_wrong"] = True
    if name not in ("fgsm", "sld", "cw"):
        how["seed"] = args.seed
    rows = todo.nonzero()[:, 0]
    parts = rows.split(args.batch_size)
    if name.endswith(("autoattack", "square")):
        parts = [rows]                                    # they gather the survivors themselves
        how["batch_size"] = args.batch_size
    if trace is not None:
        how["trace"] = trace
    x = x.clone()
    for on in parts if len(rows) else ():
        if name not in ("fgsm", "sld", "cw"):
            how["index"] = index[on]
        x[on] = ATTACKS[name](model, x[on], target[on], **how)
    for stage in trace or ():
        stage["standing"] = torch.zeros_like(todo)
        stage["standing"][rows] = stage["robust"]
        stage["right"] = stage["standing"] & (predicted == labels)
    return x * model.std + model.mean if args.space == "normalized" else x


def whole(loaded):
    """All batches as one."""
    parts = list(loaded)
    return [tuple(torch.cat(part) for part in zip(*parts))] if parts else []


@torch.no_grad()
def attack_row(m, name, setting, source, index, args, rank, world, attacked=None):
    """One attack on one model; attacked: the model it is made on, if another.

    Returns accuracy in percent, the largest and the median perturbation in pixel units over the images attacked, the
    pixel range, and for some attacks more: autoattack's accuracy after each stage, cw's at fixed L2 radii.
    """
    model, n = m["model"], len(index)
    draws, setting = setting.get("draws", 1), {k: v for k, v in setting.items() if k != "draws"}
    hit = torch.zeros(draws, n, 2, dtype=torch.float64, device=args.device)
    moved = torch.zeros(n, 4, dtype=torch.float64, device=args.device)    # Linf, L2, L1, outside
    stages = {}                        # on every process the same ones, or the sums below would wait for each other
    cascade = name.endswith("autoattack")
    if cascade:
        names = "clean", "apgd-ce", "apgd-t", "fab-t", "square"
        stages = {stage: moved.new_zeros(()) for stage in names}
    loaded = batches(source, index, args, f"{name} {show(setting)}, {m['name']}", rank, world)
    if cascade or name == "square":
        loaded = whole(loaded)                            # batches stay full as images leave
    for images, labels, numbers, place in loaded:
        x = images.float() / 255
        for draw in range(draws):
            how = dict(setting, draw=draw) if name == "noise" else dict(setting)
            if cascade:
                how["progress"] = rank == 0
            trace = [] if cascade else None
            adv = attack_images(attacked or model, name, how, x, labels, numbers, args, trace)
            with common.autocast(args.device, args.amp):
                right = hits(attacks.forward(model, adv, args.batch_size).float(), labels)
            hit[draw, place] = right
            move = (adv - x).flatten(1).double()
            outside = torch.maximum(-adv.flatten(1).amin(1), adv.flatten(1).amax(1) - 1).clamp(min=0)
            norms = (move.norm(math.inf, 1), move.norm(2, 1), move.norm(1, 1), outside)
            moved[place] = torch.maximum(moved[place], torch.stack(norms, 1))
            for stage in trace or ():
                lucky = ~stage["standing"] & (right[:, 0] > 0)            # changed, and now right
                stages[stage["stage"]] += (stage["right"] | lucky).sum()
    hit, moved = common.all_sum(hit), common.all_sum(moved)
    row = together([outcome(h) for h in hit]) if draws > 1 else outcome(hit[0])
    row["top1"], row["top5"] = percent(hit.mean(0).sum(0), n)
    touched = moved[moved[:, 0] > 0]
    linf, l2, l1 = (touched[:, :3] if len(touched) else moved[:1, :3]).unbind(1)
    row.update(max_linf=linf.max().item(), max_l2=l2.max().item(), max_l1=l1.max().item(),
               median_l2=l2.median().item(), mean_l2=l2.mean().item(),
               outside=moved[:, 3].max().item())
    if stages:
        row["stages"] = {k: percent(common.all_sum(v)[None], n)[0] for k, v in stages.items()}
    if name == "cw":
        fooled, radii = hit[0, :, 0] == 0, (0.25, 0.5, 1.0, 2.0)
        within = torch.stack([(fooled & (moved[:, 1] <= r)).sum() for r in radii])
        row["top1_at_l2"] = {r: 100 - v for r, v in zip(radii, percent(within, n))}
    return row


# --- what to run, and what it is called ------------------------------------------------------------------------------

def plan(args):
    """[(measure, setting)]: settings are the attacks' own keyword arguments."""
    given = [name for name in FOLDERS if getattr(args, name)]
    chosen = args.measures or ["clean", "corruptions", *given, "noise", "fgsm", "pgd", "adaptive_pgd", "apgd"]
    pgd = dict(steps=args.pgd_steps, alpha=args.pgd_alpha, random_start=args.random_start)
    settings = dict(
        clean=[{}],
        corruptions=[dict(type=name, severities=args.severities, jpeg85=args.jpeg85,
                          released=args.corrupted_dir or False,
                          frost=args.frost_dir or "procedural")
                     for name in corruptions.NAMES],
        noise=[dict(scale=s, kind=args.noise_kind, draws=args.noise_draws, best_of=args.noise_best)
               for s in args.noise_scale],
        fgsm=[dict(eps=e) for e in args.eps],
        pgd=[dict(eps=e, best=args.pgd_best, **pgd) for e in args.eps],
        adaptive_pgd=[dict(eps=e, **pgd) for e in args.eps],
        transfer=[dict(eps=e, source=args.source, **pgd) for e in args.eps],
        sld=[dict(eps=e, rescale=args.sld_rescale) for e in args.sld_eps],
        spsa=[dict(eps=e, steps=args.spsa_steps, centre=args.spsa_centre) for e in args.spsa_eps],
        cw=[dict(confidence=args.cw_confidence, steps=args.cw_steps, lr=args.cw_lr)],
        apgd=[dict(eps=e) for e in args.eps],
        adaptive_apgd=[dict(eps=e) for e in args.eps],
        square=[dict(eps=e, queries=args.queries) for e in args.auto_eps],
        autoattack=[dict(eps=e, queries=args.queries) for e in args.auto_eps],
        adaptive_autoattack=[dict(eps=e, queries=args.queries) for e in args.auto_eps],
        **{name: [dict(folder=getattr(args, name))] for name in FOLDERS})
    if "all" in chosen:
        absent = {name for name in FOLDERS if name not in given} | ({"transfer"} if not args.source else set())
        chosen = [name for name in MEASURES if name not in absent]
    for name in chosen:
        needed = dict(transfer="source", **{n: n for n in FOLDERS}).get(name)
        if needed and not getattr(args, needed):
            raise ValueError(f"--measures {name} needs --{needed}")
    return [(name, setting) for name in MEASURES if name in chosen for setting in settings[name]]


def describe_row(m, measure, setting, n, args):
    """What a row is about: everything but its result."""
    given = ("space", "labels", "clip", "seed", "amp")
    conditions = {name: getattr(args, name) for name in given}
    return dict(model=m["name"], kind=m["kind"], checkpoint=m["path"], weights=m["weights"],
                model_config=m["model_config"], recipe=m["recipe"], data=args.data,
                data_dir=args.data_dir if args.data == "imagenet" else None,
                imagenet1k=args.imagenet1k,
                measure=measure, setting=setting, conditions=conditions, images=n)


def identity(row):
    """What tells models apart: weights and model_config; in older rows weights, kind and path."""
    config = row.get("model_config") or [row["kind"], row["checkpoint"]]
    return json.dumps([row["weights"], config], sort_keys=True)


def group(row):
    """What the seeds of one model have in common."""
    if "model_config" not in row:
        return row["kind"]
    return json.dumps([row["model_config"], row["recipe"]], sort_keys=True)


def key(row):
    """What tells rows apart."""
    parts = [row[k] for k in ("data", "measure", "setting", "conditions", "images")]
    return json.dumps([identity(row), row.get("data_dir"), *parts], sort_keys=True)


def read_rows(path, models=()):
    """The finished rows of an earlier run; a line cut short by a kill is dropped.

    A row from before model_config was kept gets that of the model with its weights and path.
    """
    known = {(m["weights"], m["path"]): m for m in models}
    rows = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
            m = known.get((row["weights"], row["checkpoint"]))
            if m and "model_config" not in row:
                row.update(model_config=m["model_config"], recipe=m["recipe"])
            rows[key(row)] = row
        except (json.JSONDecodeError, KeyError, TypeError):
            continue
    return rows


class Results:
    """The finished rows, and results.jsonl and table.md, which rank 0 writes row by row."""

    def __init__(self, folder, args, models, rank, world):
        self.out, self.table = folder / "results.jsonl", folder / "table.md"
        self.args, self.rank, self.world = args, rank, world
        self.rows = read_rows(self.out, models)
        if self.rows and not args.resume:
            raise ValueError(f"--out_dir {folder} holds results: add --resume to go on from them, "
                             "or choose another one")
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            common.cut_log(self.out, 0)                   # a line that a kill cut short goes

    def lacks(self, m, name, setting, n):
        return key(describe_row(m, name, setting, n, self.args)) not in self.rows

    def add(self, m, name, setting, n, result, seconds, before):
        """Keep a finished row; before: the model's calls when it began."""
        row = describe_row(m, name, setting, n, self.args)
        forward, backward = (torch.tensor(m["count"]) - torch.tensor(before)).tolist()
        right = result.pop("right", None)
        row.update(result, seconds=round(seconds, 2),
                   forward_per_image=round(forward * self.world / n, 1),
                   backward_per_image=round(backward * self.world / n, 1), date=str(date.today()),
                   torch=torch.__version__, hardware=common.describe(self.args.device),
                   processes=self.world)
        if right:
            row["right"] = right                          # the longest field comes last
        self.rows[key(row)] = row
        if self.rank == 0:
            common.write_log(self.out, row)
            self.write_table()
            numbers = [f"{line} {value:.2f}" for line, value, _ in lines(row)]
            tqdm.write("  ".join([f"{m['name']:28}", *numbers, f"({n} images, {seconds:.1f} s)"]))
            if square_gain(row) > 0.2:
                tqdm.write(f"warning: Square took {square_gain(row):.2f} points after the attacks with "
                           "gradients, more than 0.2: they may be hidden; see --checks")

    def write_table(self):
        text = tables([row for row in self.rows.values() if row["data"] == self.args.data])
        self.table.write_text(text + "\n")
        return text


# --- the table -------------------------------------------------------------------------------------------------------

def show(setting):
    """8/255 for an eps, else what identifies the setting."""
    if "eps" in setting:
        k = 255 * setting["eps"]
        return f"{k:.3g}/255" if setting["eps"] <= 1 and abs(k - round(k)) < 1e-6 else f"{setting['eps']:.3g}"
    return f"{setting['scale']:.3g}" if "scale" in setting else setting.get("type", "")


def title(row):
    """What was measured: clean, fog, pgd 8/255."""
    if row["measure"] == "corruptions":
        return row["setting"]["type"]
    return f"{row['measure']} {show(row['setting'])}".strip()


def square_gain(row):
    """Points of accuracy that AutoAttack's last stage, without gradients, took from what they left."""
    stages = row.get("stages", {})
    return stages.get("fab-t", 0) - stages.get("square", 0)


def lines(row):
    """A row's lines in the table: [(name, value in percent or the unit named, a share?)]."""
    name = title(row)
    if row["measure"] == "corruptions":
        return [(f"{name}, error", 100 - sum(row["top1"]) / len(row["top1"]), True)]
    if row["measure"] == "imagenet_o":
        numbers = "AUPR", "AUROC", "FPR95"
        return [(f"imagenet_o, {number}", row[number.lower()], False) for number in numbers]
    if row["measure"] == "cw":
        return [("cw, top-1", row["top1"], True),
                ("cw, median L2 (pixel units)", row["median_l2"], False),
                *((f"cw, top-1 within L2 {r}", v, True) for r, v in row["top1_at_l2"].items())]
    stages = {stage: v for stage, v in row.get("stages", {}).items() if stage != "clean"}
    stages = [(f"{name}, after {stage}", v, True) for stage, v in stages.items()]
    return [*stages, (f"{name}, top-1", row["top1"], True), (f"{name}, top-5", row["top5"], True)]


def tell_apart(names, details):
    """Names {key: text}; equal ones get those details {key: {field: value}} that differ."""
    names = dict(names)
    for field in dict.fromkeys(field for fields in details.values() for field in fields):
        for name in set(names.values()):
            twins = [k for k in names if names[k] == name]
            values = {k: str(details[k].get(field)) for k in twins}
            if len(set(values.values())) > 1:
                names.update({k: f"{name}, {field} {values[k]}" for k in twins})
    return names


def fill(rows):
    """Rows as cells {(line, model): value}, times each image was right {(line, model): (n,)}, lines
    in order, and which of them are shares of the images.

    A line is (name, conditions in words, images, whatever else was set, as JSON), a model its
    identity. The name of a line of times right is the row's title alone.
    """
    cells, rights, order, shares = {}, {}, {}, set()
    for row in rows:
        space, labels, clip = (row["conditions"][k] for k in ("space", "labels", "clip"))
        usual = (space, labels, clip) == ("pixel", "true", True)
        unattacked = row["measure"] in ("clean", "corruptions", *FOLDERS)
        tag = "" if usual or unattacked else f"{space}, {labels}, {'clip' if clip else 'no clip'}"
        rest = {k: v for k, v in row["setting"].items() if k not in ("type", "eps", "scale")}
        rest.update(seed=row["conditions"]["seed"], amp=row["conditions"]["amp"])
        rest["data_dir"] = row.get("data_dir")
        where, w = (tag, row["images"], json.dumps(rest, sort_keys=True)), identity(row)
        for name, value, share in lines(row):
            line = (name, *where)
            order[line] = None                            # a dict keeps the order
            cells[line, w] = value
            if share:
                shares.add(line)
        if "right" in row:
            texts = row["right"] if isinstance(row["right"], list) else [row["right"]]
            each = [metrics.unpack(text, row["images"]).int() for text in texts]
            rights[(title(row), *where), w] = sum(each)
    return cells, rights, list(order), shares


def add_means(cells, order, models, names):
    """Add to cells and order, after the last corruption, the mean of the 15 errors and how it
    relates to a reference: mCE to AlexNet, on ImageNet; elsewhere to the first model with all 15.
    """
    for rest in dict.fromkeys(line[1:] for line in order if line[0].endswith(", error")):
        types = {name: (f"{name}, error", *rest) for name in corruptions.NAMES}
        errors = {}
        for w in models:
            own = {name: cells[line, w] for name, line in types.items() if (line, w) in cells}
            if len(own) == len(types):
                errors[w] = own
        if not errors:
            continue
        first = next(iter(errors))
        mean, mce = ("mean of the 15, error", *rest), ("mCE", *rest)
        relative = (f"corruption error relative to {names[first]}", *rest)
        for w, own in errors.items():
            cells[mean, w] = sum(own.values()) / len(own)
            if models[w].get("imagenet1k"):
                shares = {name: error / 100 for name, error in own.items()}
                cells[mce, w] = metrics.mean_corruption_error(shares)
            elif len(errors) > 1 and min(errors[first].values()) > 0:
                cells[relative, w] = metrics.mean_corruption_error(own, errors[first])
        at = 1 + max(order.index(line) for line in types.values() if line in order)
        new = mean, mce, relative
        order[at:at] = [line for line in new if any((line, w) in cells for w in models)]


def line_names(order):
    """{line: name}: lines that would look the same say what else was set."""
    blocks, names = {}, {}
    for line in order:
        blocks.setdefault(line[1:3], []).append(line)
    for block in blocks.values():
        settings = {line: json.loads(line[3]) for line in block}
        names.update(tell_apart({line: line[0] for line in block}, settings))
    return names


def markdown(order, columns, cell):
    """A table of the lines with a text; columns: {heading: models}, cell(line, models): a text."""
    names = line_names(order)
    body = [["measure (% unless it says otherwise)", "conditions", "images", *columns]]
    for line in order:
        texts = [cell(line, models) for models in columns.values()]
        if any(texts):
            body.append([names[line], line[1], str(line[2]), *texts])
    if not any(row[1] for row in body[1:]):
        body = [[row[0], *row[2:]] for row in body]
    widths = [max(map(len, column)) for column in zip(*body)]
    text = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths)) + " |" for row in body]
    return "\n".join([text[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *text[1:]])


def cell_texts(cells, rights, shares):
    """What a table says of a line: functions of (line, models) for one model, a group, a pair."""
    def one(line, models):
        value = cells.get((line, models[0]))
        if value is None:
            return ""
        if line not in shares:
            return f"{value:.2f}"
        low, high = metrics.wilson(value / 100, line[2])
        return f"{value:.2f} ({100 * low:.1f}-{100 * high:.1f})"

    def mean(line, models):
        values = [cells[line, w] for w in models if (line, w) in cells]
        std = f" ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
        return f"{np.mean(values):.2f}{std}" if values else ""

    def pair(line, models):
        first, second = (rights.get((line, w)) for w in models)
        if first is None or second is None:
            return ""
        a, b = int((first > second).sum()), int((second > first).sum())
        return f"{a} : {b}, p {metrics.mcnemar(a, b):.2g}"

    return one, mean, pair


def tables(rows):
    """Markdown: one column per checkpoint; where seeds differ only, one per model with mean ± std
    over seeds; where outcomes were kept, every further model beside the first, image by image.
    """
    models = {identity(row): row for row in rows}         # in order of appearance
    groups, details = {}, {}
    for w, row in models.items():
        groups.setdefault(group(row), []).append(w)
        details[w] = {**vars(ViTConfig()), **row.get("model_config", {})}
        details[w].update({k: row.get(k) for k in ("recipe", "checkpoint", "weights")})
    names = tell_apart({w: row["model"] for w, row in models.items()}, details)
    kinds = tell_apart({g: models[w[0]]["kind"] for g, w in groups.items()},
                       {g: details[w[0]] for g, w in groups.items()})
    cells, rights, order, shares = fill(rows)
    add_means(cells, order, models, names)
    one, mean, pair = cell_texts(cells, rights, shares)

    out = markdown(order, {names[w]: [w] for w in models}, one)
    out += "\n\n(low-high): Wilson's 95 % interval over images; severities and draws count once."
    if len(groups) < len(models):
        out += "\n\nMean ± standard deviation over seeds:\n\n"
        out += markdown(order, {f"{kinds[g]} (n = {len(w)})": w for g, w in groups.items()}, mean)
    first, *others = models
    kept = list(dict.fromkeys(line for line, _ in rights))
    if any((line, first) in rights and (line, w) in rights for line in kept for w in others):
        out += f"\n\nImages that only {names[first]} gets right : that only the other does,"
        out += "\nand p of McNemar's exact test (severities, draws: right in more of them):\n\n"
        out += markdown(kept, {names[w]: [first, w] for w in others}, pair)
    return out


def save_pictures(models, source, args, out_dir):
    """PNGs: corruptions.png, 15 types x 5 severities of the first image; attacks_<i>.png per model: clean, attacked by
    PGD at the largest eps, the difference amplified to full contrast."""
    index = pick(len(source.labels), None, args.seed)[:args.save_images]
    zoom = max(1, 96 // models[0]["model"].config.image_size)
    (images, labels, index, _), = whole(batches(source, index, args))
    grid = [corruptions.corrupt(images[:1], name, severity, seed=args.seed, index=index[:1], frost_dir=args.frost_dir)
            for name in corruptions.NAMES for severity in (1, 2, 3, 4, 5)]
    data.save_grid(out_dir / "corruptions.png", torch.cat(grid), columns=5, zoom=zoom)
    for i, m in enumerate(models):
        x, eps = images.float() / 255, max(args.eps)
        setting = dict(eps=eps, steps=args.pgd_steps, alpha=args.pgd_alpha, random_start=args.random_start)
        adv = attack_images(m["model"], "pgd", setting, x, labels, index, args)
        bound = (adv - x).abs().amax().clamp(min=1e-6)
        data.save_grid(out_dir / f"attacks_{i}.png", torch.cat([x, adv.clamp(0, 1), 0.5 + (adv - x) / (2 * bound)]),
                       columns=len(x), zoom=zoom)


# --- the run ---------------------------------------------------------------------------------------------------------

def evaluate(models, other, source, todo, results, args, rank, world):
    """Every (measure, setting) of todo on the models that lack it; other: transfer's source."""
    for name, setting in todo:
        tree = source
        if name in FOLDERS:
            root, folder = os.path.split(os.path.abspath(getattr(args, name)))
            size = models[0]["model"].config.image_size
            tree = data.ImageTree(root, folder, source.classes, size, subset=True)
        n = args.limit or min(LIMITS.get(args.data, SLOW).get(name, len(tree.labels)), len(tree.labels))
        index = pick(len(tree.labels), n, args.seed)
        missing = [m for m in models if results.lacks(m, name, setting, n)]
        start, before = time.perf_counter(), [list(m["count"]) for m in missing]
        if name == "corruptions" and missing:
            make = released_rows if args.corrupted_dir else corruption_rows
            made = make(missing, source, index, setting, args, rank, world)
            seconds = (time.perf_counter() - start) / len(missing)                   # making the images is shared out
            for m, b, result in zip(missing, before, made):
                results.add(m, name, setting, n, result, seconds, b)
            continue
        for m, b in zip(missing, before):
            start = time.perf_counter()
            if name in FOLDERS:
                result = folder_row(m, name, tree, index, source, args, rank, world)
            elif name == "clean":
                result = clean_row(m, source, index, args, rank, world)
            else:
                victim = other["model"] if name == "transfer" else None
                result = attack_row(m, name, setting, source, index, args, rank, world, victim)
            results.add(m, name, setting, n, result, time.perf_counter() - start, b)


def run_checks(models, other, source, args):
    """The evaluator's checks on each model, on the same images; nothing is written."""
    sources = [other] if other else models
    softmax = next((m["model"] for m in sources if m["kind"] == "softmax"), None)
    index = pick(len(source.labels), args.limit or min(64, len(source.labels)), args.seed)
    (pixels, labels, index, _), = whole(batches(source, index, args))
    for m in models:
        twin = softmax if softmax is not m["model"] else None
        checks.run(m["model"], pixels, labels, index, m["name"], twin)


def main():
    args = get_args()
    device, rank, world = common.setup(args.device)
    args.device = device
    todo = plan(args)
    models = [load_model(path, device) for path in args.ckpt]
    size = models[0]["model"].config.image_size
    pixels = 2 ** 19 if device.type == "cpu" else 2 ** 22
    args.batch_size = args.batch_size or max(1, pixels // size ** 2)
    source = load_source(args, models, device)
    other = load_model(args.source, device) if args.source else None
    first = torch.arange(min(8, len(source.labels)))
    for images, labels, *_ in batches(source, first, args):
        for m in [*models, other] if other else models:
            attacks.check(m["model"], images.float() / 255, labels, 0.0)       # logits? enough?

    what = f"{len(models)} checkpoints | {args.data}, {len(source.labels)} test images"
    how = f"{world} x {common.describe(device)}"
    if args.checks:
        if rank == 0:
            print(f"{what} | {how}", flush=True)
            run_checks(models, other, source, args)
        return

    path = Path(args.ckpt[0])
    folder = "robust" if args.preset == "default" else f"robust_{args.preset}"
    beside = path if path.is_dir() else path.parent
    out_dir = Path(args.out_dir) if args.out_dir else beside / folder
    results = Results(out_dir, args, models, rank, world)
    if rank == 0:
        print(f"{what} | {how} | {results.out}", flush=True)
        if args.space == "normalized":
            std = models[0]["model"].std.mean().item()
            print(f"budgets are in normalised units: eps 1/255 is {std:.3f}/255 of the pixel "
                  "range, channels averaged")
    evaluate(models, other, source, todo, results, args, rank, world)
    if rank == 0:
        print("\n" + results.write_table())
        if args.save_images:
            save_pictures(models, source, args, out_dir)
        print(f"\n{len(results.rows)} rows in {results.out}; this table in {results.table}")


if __name__ == "__main__":
    common.run(main)
