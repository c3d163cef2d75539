"""Evaluate image classifiers on clean, corrupted and attacked images; print one table.

    python eval_robust.py --ckpt out/shapes_rpc                  # rendered scenes: minutes on a CPU
    python eval_robust.py --ckpt out/a out/b --out_dir out/ab     # the same images for all models
    python eval_robust.py --ckpt out/a --measures clean pgd cw --eps 1/255 4/255 --steps 40
    python eval_robust.py --ckpt deit_tiny_patch16_224.pth --data_dir data/imagenet   # timm's keys
    python eval_robust.py --model my.py:build --data cifar10 --data_dir data/cifar10   # any model
    torchrun --standalone --nproc_per_node=4 eval_robust.py --ckpt out/imagenet_rpc \\
        --data_dir data/imagenet --corrupted_dir data/imagenet-c --imagenet_a data/imagenet-a

Each measure gives one row per model. A finished row is appended to results.jsonl, so a second run
computes only the missing rows. To change a setting of an attack, or to add an attack, edit ATTACKS.
Networks that differ in their seed only get a second table: means over seeds, with intervals.
docs/robustness.md has more commands and explains the numbers. Segmenters and language models are
evaluated by train_seg.py --eval_only and train_lm.py --eval_only.

Paper: Teo & Nguyen 2024, section 4, App. A.2 to A.4, E.3 to E.5; Tables 1 to 6, Fig. 3.

Attacks: pixel values stay in [0, 1]. The budget eps bounds the change of each pixel value; for sld,
sparse L1 descent, it bounds the sum of all changes; cw has no budget. An attack changes an image so
that the model no longer predicts the true class. The arithmetic is float32. An image that a model
classifies wrongly is not attacked and counts as not robust. Random numbers depend on (seed, image)
alone, so the batch size, the number of processes and a second run do not change them.

With --preset paper, attacks work as in the paper's code (`rachtsy/KPCA_code:Attack`): they change
normalised images, whose pixels are divided by about 0.226, so eps = 1/255 changes a pixel by about
0.226/255. Only the attacks of PAPER_CLIPS clip the normalised pixels to [0, 1]. The model's own
prediction takes the place of the true class, so misclassified images are attacked, too.
"""

import argparse
import copy
import hashlib
import math
import os
import runpy
import sys
import time
import zlib
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Callable, NamedTuple

import common  # before torch, because it sets GOMP_SPINCOUNT for torch's threads
import torch
import torch.distributed as dist

import fan  # noqa: F401: part of `code` in all rows, whether a network is a FAN or not
from common import InputError, print0
from data.datasets import DATASETS, load_part
from data.images import ImageTree, Split, fingerprint, image_batches
from data.rng import epoch_order
from results import kind_of, pack, read_rows, recipe, row_key, rows_table, seeds_table
from robust import metrics
from robust.adaptive import adaptive_apgd, adaptive_autoattack, adaptive_pgd, pap_steps
from robust.attacks import (check_adversarial, check_logits, check_repeats,
                            cross_entropy, cw, fgsm, input_gradient, noise, pgd,
                            restarted, sld, spsa)
from robust.autoattack import apgd, autoattack, square
from robust.corruptions import CORRUPTIONS, NAMES, corrupt
from robust.frost import load_frost
from vit import ViTConfig, classifier_from_checkpoint, load_timm


class Attack(NamedTuple):
    """An attack of --measures."""
    run: Callable                       # run(net, images, labels, eps, *, seed, index, **settings)
    settings: dict = {}
    own_eps: float | None = None        # None: runs for each budget of --eps; inf: no budget


# To change a setting, edit its line; to add an attack, add a line.
ATTACKS = {
    "noise": Attack(noise, own_eps=0.068),                          # U(-eps, eps)
    "fgsm": Attack(fgsm),
    "pgd": Attack(pgd, dict(steps=20)),
    "pgd_restarts": Attack(restarted, dict(restarts=5, steps=20)),  # of pgd
    "adaptive_pgd": Attack(adaptive_pgd, dict(steps=20)),
    "sld": Attack(sld, dict(steps=20), own_eps=10.0),               # eps: an L1 budget
    "spsa": Attack(spsa, dict(steps=40, pairs=128)),
    "cw": Attack(cw, dict(steps=1000, search_steps=5), own_eps=math.inf),   # minimises the L2 norm
    "apgd": Attack(apgd, dict(loss="ce", steps=100)),
    "adaptive_apgd": Attack(adaptive_apgd, dict(loss="ce", steps=100)),
    "square": Attack(square, dict(queries=5000)),
    "autoattack": Attack(autoattack, dict(steps=100, queries=5000)),
    "adaptive_autoattack": Attack(adaptive_autoattack, dict(steps=100, queries=5000)),
}
# For a network without PAP, an adaptive attack is its plain attack.
PLAIN = dict(adaptive_pgd="pgd", adaptive_apgd="apgd", adaptive_autoattack="autoattack")
EPS = tuple(k / 255 for k in (1, 2, 4, 8))                # the default of --eps
# --preset paper: the settings of the paper's code that differ from ATTACKS; eps: an own budget.
# rescale: sld scales to its L1 ball. legacy: spsa as in cleverhans 4.0.0.
PAPER = dict(noise=dict(eps=0.3), sld=dict(rescale=True), cw=dict(confidence=10.0),
             spsa=dict(eps=0.1, legacy=True))
PAPER_EPS = tuple(k / 255 for k in range(1, 7))
PAPER_CLIPS = ("square", "autoattack", "adaptive_autoattack")    # clip normalised images to [0, 1]
FOLDERS = ("imagenet_a", "imagenet_r", "imagenet_o")      # measures with their own folder and flag
DEFAULT_MEASURES = ("clean", "corruptions", "noise", "fgsm", "pgd", "adaptive_pgd",
                    "apgd")
# Images per measure without --limit. With --data shapes few, so that a CPU needs only minutes:
SCENE_LIMITS = dict.fromkeys(ATTACKS, 80)
SCENE_LIMITS |= dict(corruptions=320, noise=640, fgsm=640, pgd=160, sld=160)
SCENE_LIMITS |= dict(spsa=20, cw=40)
# With other data all images, except in slow attacks:
SLOW_LIMITS = dict(autoattack=1000, adaptive_autoattack=1000, square=1000)
SLOW_LIMITS |= dict(spsa=100, cw=100)


# --- flags ----------------------------------------------------------------------------------------

def positive(text):
    """Return a flag's whole number; an error below 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 or more")
    return value


def budget(text):
    """Return an attack budget, such as 8/255 or 0.031, as a float; an error below 0."""
    try:
        value = float(Fraction(text))
    except ZeroDivisionError:
        value = -1.0
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text}: expected a number from 0 to 1, such "
                                         "as 8/255")
    return value


def get_args(words=None):
    """Parse the flags. words: a list instead of the command line."""
    p = common.new_parser(__doc__)
    names = ["clean", "corruptions or single types of corruption", *ATTACKS]
    names += FOLDERS
    flag = p.add_argument_group("what to evaluate").add_argument
    flag("--ckpt", nargs="+", default=[],
         help="checkpoints: files, or run folders (best.pt, else last.pt); files with "
         "timm's names (DeiT, the paper's code) work, too")
    flag("--model", nargs="+", default=[], metavar="FILE.py:BUILD",
         help="functions that return classifiers: modules that take pixels in [0, 1] and "
         "return logits")
    flag("--measures", nargs="+",
         help=f"measure these: {', '.join(names)} (default: "
         f"{', '.join(DEFAULT_MEASURES)}, and the folders that are given)")
    flag("--eps", nargs="+", type=budget,
         help="budgets of the attacks, for example 8/255 or 0.031 (default: 1/255 2/255 "
         "4/255 8/255; with --preset paper 1/255 to 6/255)")
    flag("--steps", type=positive, help="steps of the attacks (default: see ATTACKS)")
    flag("--limit", type=positive,
         help="images per measure, the same for every model (default: all; fewer on "
         "shapes and for slow attacks)")
    flag("--preset", choices=("default", "paper"), default="default",
         help="conditions of attacks; paper repeats the conditions and settings of the "
         "paper's code")
    flag("--seed", type=int, default=0,
         help="seed of all random numbers, also of the choice of images (default: 0)")
    flag("--table", nargs="+", metavar="PATH",
         help="do not evaluate; print the tables of these results.jsonl files, or of the "
         "folders that contain them")

    flag = p.add_argument_group("data").add_argument
    flag("--data", choices=DATASETS, help="data set (default: as in training)")
    flag("--data_dir",
         help="folder of the data (default: as in training); for imagenet, the folder "
         "that contains val/ with all or some classes")
    flag("--image_size", type=positive,
         help="pixels per side for --model (default: as for --ckpt; without --ckpt 32 on "
         "shapes and cifar10, else 224)")
    flag("--corrupted_dir",
         help="read corrupted images from this folder, and make none: "
         "<type>/<severity>/<class>/*.JPEG, as ImageNet-C")
    for name in FOLDERS:
        flag(f"--{name}", metavar="DIR",
             help=f"folder of {name}, <class>/* for some of ImageNet's classes; a default "
             "measure if given")
    flag("--frost_dir",
         help="folder of ImageNet-C's photographs frost1.png to frost5.jpg (default: "
         "synthetic frost)")
    flag("--severities", nargs="+", type=int, choices=(1, 2, 3, 4, 5),
         default=[1, 2, 3, 4, 5],
         help="severities of the corruptions (default: 1 2 3 4 5)")

    flag = p.add_argument_group("running").add_argument
    flag("--out_dir",
         help="folder of results.jsonl (default: robust/ in the run folder of the first "
         "checkpoint; for a single file out/FILE/robust; for --model out/model/robust)")
    flag("--batch_size", type=positive,
         help="images per batch, which bounds the memory (default: depends on the image "
         "size; on a GPU also on the networks and the free memory)")
    flag("--num_workers", type=int, default=common.default_workers(),
         help="processes that decode images (default: %(default)s)")
    flag("--device", help="cuda, mps or cpu (default: the best found)")
    args = p.parse_args(words)
    if not args.ckpt and not args.model and not args.table:
        p.error("the following arguments are required: --ckpt or --model")
    if args.num_workers < 0:
        p.error(f"argument --num_workers: {args.num_workers}: expected 0 or more")
    if not args.measures:
        folders = [name for name in FOLDERS if getattr(args, name)]
        args.measures = list(DEFAULT_MEASURES) + folders
    check_flags(p, args)
    return args


def check_flags(parser, args):
    """Print an error for flags that would do nothing."""
    attacks = {name for name in args.measures if name in ATTACKS}
    corruptions = {name for name in args.measures if name in CORRUPTIONS}
    if "corruptions" in args.measures:
        corruptions |= set(NAMES)
    budgets = {name for name in attacks if ATTACKS[name].own_eps is None}
    if args.preset == "paper":
        budgets -= {name for name in PAPER if "eps" in PAPER[name]}
    used = dict(
        image_size=args.model,
        preset=attacks,
        eps=budgets,
        steps={name for name in attacks if "steps" in ATTACKS[name].settings},
        severities=corruptions,
        corrupted_dir=corruptions,
        frost_dir="frost" in corruptions and not args.corrupted_dir)
    for name in FOLDERS:
        used[name] = name in args.measures
    for name, value in vars(args).items():
        if name == "measures" or value == parser.get_default(name):
            continue
        if args.table and name != "table":
            parser.error(f"--{name} would do nothing: --table prints stored rows")
        if name in used and not used[name]:
            reason = "the images of a checkpoint have the size of its training"
            if name != "image_size":
                reason = f"no measure uses it; --measures are {' '.join(args.measures)}"
            parser.error(f"--{name} would do nothing: {reason}")


# --- models ---------------------------------------------------------------------------------------

PROJECT = Path(__file__).resolve().parent


class Model(NamedTuple):
    """A network to evaluate."""
    net: torch.nn.Module                 # from pixels in [0, 1] to logits; eval mode, frozen
    size: int                            # pixels per side of its images
    images: torch.Tensor                 # (2, 3, size, size): two images to try it on
    num_logits: int
    classes: list                        # class names in the order of its logits; [] if unknown
    about: dict                          # fields of its rows: model (its name), checkpoint, ...
    trained: dict                        # the flags of its training, and the crop of the images
                                         # that chose best.pt; {} for other people's networks
    seen: list                           # hashes of the photos that its training used


def loaded_files(folder):
    """Return {name: path} of the loaded modules whose files are below a folder.

    Libraries are left out if the folder contains Python's environment.
    """
    installed = Path(sys.prefix).resolve()
    files = {}
    for name, module in list(sys.modules.items()):
        place = getattr(module, "__file__", None)
        if place is None and hasattr(module, "__path__"):           # without __init__.py
            place = next(iter(module.__path__), None)
        if place is None:
            continue
        path = Path(place).resolve()
        library = "site-packages" in path.parts
        if installed.is_relative_to(folder):
            library = library or path.is_relative_to(installed)
        if path.is_relative_to(folder) and not library:
            files[name] = path
    return files


def code_hash(*files):
    """Hash the sources of all loaded modules of the project, and of more files.

    A row belongs to the code that computed it: after an edit, rows are computed again.
    """
    sources = set(loaded_files(PROJECT).values()) | set(files)
    texts = [(path.name, path.read_bytes()) for path in sources if path.is_file()]
    digest = hashlib.sha256()
    for name, text in sorted(texts):
        digest.update(f"{name} {len(text)} ".encode() + text)
    return digest.hexdigest()[:16]


@contextmanager
def own_imports(folder):
    """Let the files of a folder import their neighbours, whatever modules are loaded already.

    Inside, the folder comes first on the path. Modules of the project that have a neighbour's name
    are hidden; they come back at the end. Then the folder's modules are forgotten, so that files of
    the same name in another folder are loaded, too.
    """
    before = dict(sys.modules)
    neighbours = {path.stem for path in folder.glob("*.py")}
    neighbours |= {path.parent.name for path in folder.glob("*/__init__.py")}
    loaded = loaded_files(folder)
    for name in loaded_files(PROJECT):
        if name.partition(".")[0] in neighbours and name not in loaded:
            del sys.modules[name]
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in loaded_files(folder) | loaded_files(PROJECT):
            if name not in before:
                del sys.modules[name]
        sys.modules.update(before)


def load_model(path, size, device):
    """Return the Model of a checkpoint, ours or with timm's names, or of FILE.py:BUILD.

    size: the pixels per side of the images of FILE.py:BUILD.
    """
    if ".py:" in str(path):
        return load_file(path, size, device)
    checkpoint = common.load(path)
    if checkpoint.get("task", "classification") != "classification":
        raise InputError(f"--ckpt {path} is for {checkpoint['task']}; evaluate it by "
                         f"train_seg.py or train_lm.py --eval_only")
    if "task" in checkpoint:
        net = classifier_from_checkpoint(checkpoint)
        run = f"seed {checkpoint['args']['seed']}"
    else:
        net = load_timm(checkpoint)
        run = Path(path).stem
    # The settings that are not ViTConfig's defaults.
    usual = vars(ViTConfig()) | ViTConfig().pap
    settings = vars(net.config) | net.config.pap
    config = {name: value for name, value in settings.items()
              if name != "pap" and value != usual.get(name)}
    name = f"{kind_of(net.config)}, {run}"
    about = dict(checkpoint=str(path), model_config=config, model=name)
    return checked_model(net, net.config.image_size, device, about, checkpoint)


def load_file(path, size, device):
    """Return the Model of FILE.py:BUILD, which has its own imports."""
    file, _, function = str(path).rpartition(":")
    file = Path(file).resolve()
    if not file.is_file():
        raise InputError(f"--model {path}: there is no file {file}")
    with own_imports(file.parent):
        names = runpy.run_path(str(file))
        if function not in names:
            raise InputError(f"--model {path}: {file.name} has no function {function}")
        torch.manual_seed(0)                              # the same weights on every process
        net = names[function]()
        config = dict(build=str(path))
        about = dict(checkpoint=str(path), model_config=config, model=str(path))
        model = checked_model(net, size, device, about, {})
        # The logits of an image stand for what the hash misses: files that are no modules.
        with torch.no_grad():
            logits = model.net(model.images)[0].cpu().float()
        numbers = torch.arange(1, 1 + len(logits))
        config["answer"] = f"{(logits * numbers).sum().item():.4g}"
        model.about["code"] = code_hash(file, *loaded_files(file.parent).values())
    return model


def checked_model(net, size, device, about, checkpoint):
    """Return the Model of a network. InputError unless logits depend on one image alone.

    about: the fields model, checkpoint and model_config of its rows.
    """
    net = net.to(device).eval().requires_grad_(False)
    levels = torch.linspace(0, 1, 6 * size ** 2, device=device)
    images = levels.view(2, 3, size, size)                # a ramp of grey levels
    with torch.no_grad():
        logits = net(images).float()
    check_logits(logits)
    check_repeats(net, images, logits)
    trained = {}
    if "task" in checkpoint:
        trained = checkpoint["args"]
        if trained.get("data") in DATASETS:
            trained = trained | dict(crop=DATASETS[trained["data"]].crop)
    weights = common.checksum(net)
    about = about | dict(weights=weights, size=size, code=code_hash(),
                         recipe=recipe(trained))
    classes = list(checkpoint.get("classes") or [])
    seen = checkpoint.get("seen", [])
    return Model(net, size, images, logits.shape[1], classes, about, trained, seen)


# --- data -----------------------------------------------------------------------------------------

# Names of ImageNet's class folders; logit i of an ImageNet network belongs to IMAGENET[i].
CLASS_FILE = PROJECT / "robust" / "imagenet_classes.txt"
IMAGENET = CLASS_FILE.read_text("utf-8").split()


def stored_value(models, flag, advice):
    """Return the value of a flag that the trainings of all models stored, None if none stored it.

    InputError with advice if the models differ, so that their order decides nothing.
    """
    values = {}
    for model in models:
        if model.trained.get(flag) is not None:
            values[model.about["checkpoint"]] = model.trained[flag]
    if len(set(values.values())) > 1:
        listed = ", ".join(f"{path}: {value}" for path, value in values.items())
        raise InputError(f"the trainings of the networks differ in {flag} ({listed:.300}); "
                         f"{advice}")
    return next(iter(values.values()), None)


def complete_flags(args, models):
    """Return a copy of the flags with the values in use of data, data_dir and batch_size."""
    args = copy.copy(args)
    sizes = [model.size for model in models]
    if len(set(sizes)) > 1:
        listed = ", ".join(map(str, sizes))
        raise InputError(f"the models take images of {listed} pixels per side; expected the same "
                         f"size for all models")
    if not args.data:
        args.data = stored_value(models, "data", "choose one with --data") or "imagenet"
    if args.data == "shapes" and args.data_dir:
        raise InputError(f"--data_dir {args.data_dir} would do nothing: the rendered scenes of "
                         f"--data shapes need no folder; for your own images add --data folder")
    if not args.data_dir and args.data != "shapes":
        same_data = [model for model in models if model.trained.get("data") == args.data]
        args.data_dir = stored_value(same_data, "data_dir", "choose one with --data_dir")
    if args.batch_size is None and args.device.type == "cuda":
        args.batch_size = images_per_batch(models, args.device)
    elif args.batch_size is None:                         # fast while a batch stays in the cache
        args.batch_size = max(1, min(256, 2 ** 18 // sizes[0] ** 2))
    return args


def images_per_batch(models, device):
    """Return how many images a batch has on CUDA without --batch_size.

    The memory for the gradient of two images is measured for every network. A batch may take a
    third of the free memory.
    """
    free, _ = torch.cuda.mem_get_info(device)
    labels = torch.zeros(2, dtype=torch.long, device=device)
    largest = 1                                           # bytes per image
    for model in models:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        input_gradient(cross_entropy, model.net, model.images, labels)
        used = torch.cuda.max_memory_allocated(device) - before
        largest = max(largest, used // 2)
    most = 512 * 224 ** 2 // models[0].size ** 2
    return max(1, min(most, free // (3 * largest)))


def load_data(args, models):
    """Load the test images; their classes must be the classes of all models.

    args: `complete_flags`. Returns a data set with .labels and .classes: a Split in memory, or an
    ImageTree of files.
    """
    size = models[0].size
    names = next((model.classes for model in models if model.classes), None)
    # ImageNet's networks have all 1,000 classes; val/ may contain some of them, or may be missing
    # if only ImageNet-A and -R are measured.
    has_1000 = args.data == "imagenet" and models[0].num_logits == len(IMAGENET)
    if has_1000:
        names = names or IMAGENET
    if has_1000 and not args.data_dir:                    # an empty data set
        no_labels = torch.zeros(0, dtype=torch.long)
        data = Split(torch.zeros(0, 3, 1, 1), no_labels, IMAGENET)
    elif args.data == "imagenet":
        data = ImageTree(args.data_dir, "val", names, size, subset=has_1000)
    else:
        part = "all" if args.data == "folder" else "test"
        data = load_part(part, data_flags(args, models, names), args.device)
    classes = list(data.classes)
    for model in models:
        path = model.about["checkpoint"]
        if model.num_logits != len(classes) or model.classes not in ([], classes):
            raise InputError(f"{path} has {model.num_logits} classes "
                             f"{model.classes[:3]}, --data {args.data} has "
                             f"{len(data.classes)} {list(data.classes)[:3]}; expected "
                             "the same")
        if not model.classes and not has_1000:
            order = ", ".join(f"{i} = {name}" for i, name in enumerate(data.classes))
            print0(f"{path} has no class names. Its logits are taken in this order: "
                   f"{order}")
    return data


def data_flags(args, models, classes):
    """Return the flags for load_part; the order of the models does not matter.

    Flags on which all trainings agree stay. Scenes: as many as the training with the most scenes
    has. Photos: the crop of the training, and without the photos that a network has seen.
    """
    trainings = [model.trained for model in models if model.trained]
    flags = {}
    if trainings:
        flags = dict(trainings[0])
    for trained in trainings:
        flags = {name: value for name, value in flags.items()
                 if name in trained and trained[name] == value}
    scenes = [trained.get("num_images") or 0 for trained in trainings]
    if any(scenes):
        flags["num_images"] = max(scenes)

    crop = stored_value(models, "crop", "evaluate the networks one by one")
    if crop is None:
        crop = DATASETS[args.data].crop
    seen = set()                                          # your training photos are left out
    for model in models:
        seen |= set(model.seen)
    flags |= dict(data=args.data, data_dir=args.data_dir, image_size=models[0].size)
    return flags | dict(classes=classes, seen=seen, crop=crop)


def open_folder(path, classes, size, crop=0.875):
    """Open a folder <class>/* for some of `classes`; a label is an index into the whole list."""
    root, folder = os.path.split(os.path.abspath(path))
    return ImageTree(root, folder, classes, size, subset=True, crop=crop)


def choose(n, name, args):
    """Choose the images of a measure: numbers from 0 to n - 1 in a random order, fixed by --seed.

    --limit cuts the order, so a smaller limit gives a prefix of a larger one.
    """
    limit = args.limit
    if limit is None:
        limits = SCENE_LIMITS if args.data == "shapes" else SLOW_LIMITS
        limit = limits.get(name, n)
    return epoch_order(n, epoch=0, seed=args.seed)[:limit]


def batches(data, index, args, label=""):
    """Load this process's share of the images in batches on the device.

    index: (n,) numbers of images in the data set. label: text of the progress bar.
    Yields x (b, 3, S, S) float in [0, 1], labels (b,), numbers = index[place] (b,), and place (b,):
    the rows of index, and of the results, that belong to the batch.
    """
    device = args.device
    share = torch.arange(len(index))[args.rank::args.world]     # torchrun starts `world` processes
    places = [place for place in share.split(args.batch_size) if len(place)]
    parts = [index[place] for place in places]
    if isinstance(data, Split):
        parts = (part.to(device) for part in parts)
        loaded = ((data.images[part], data.labels[part], part) for part in parts)
    else:
        pairs = ((part, part) for part in parts)          # the first comes back as `numbers`
        loaded = image_batches(data, pairs, args.num_workers, device)
    pairs = zip(loaded, places)
    for batch, place in common.bar(pairs, label[:60], total=len(places), leave=False):
        pixels, labels, numbers = (t.to(device, non_blocking=True) for t in batch)
        yield pixels.float() / 255, labels, numbers, place.to(device)


# --- scores of images -----------------------------------------------------------------------------

def correct(logits, labels):
    """Return (b, 3) float per image: top-1 (0 or 1), top-5 (0 or 1), cross-entropy in nats."""
    check_logits(logits)
    top1 = logits.argmax(1) == labels
    top5 = (logits.topk(min(5, logits.shape[1])).indices == labels[:, None]).any(1)
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    return torch.stack([top1.float(), (top1 | top5).float(), loss], 1)


def all_sum(t):
    """Join results, float64: each process has filled its own rows, and the others are 0."""
    t = t.cpu()
    if dist.is_initialized():
        dist.all_reduce(t)
    return t.double()


def outcome(hits, num_classes):
    """Return a row's fields `top1`, `top5` (per cent) and `right`; hits: (n, 3) of `correct`."""
    top1, top5 = (100 * hits[:, :2].sum(0) / len(hits)).tolist()
    row = dict(top1=round(top1, 4))
    if num_classes > 5:                                   # up to 5 classes, top5 is always 100 %
        row["top5"] = round(top5, 4)
    row["right"] = pack(hits[:, 0] > 0)
    return row


# --- measures: each returns fields of a row -------------------------------------------------------

class Measure(NamedTuple):
    """A row to compute for each network."""
    name: str
    settings: dict                       # of the row
    source: Split | ImageTree            # the images
    fingerprint: str                     # of source
    run: Callable                        # run(model, measure, index, args) returns fields of a row
    val: ImageTree | None = None         # ImageNet's val/, for ImageNet-O


@torch.no_grad()
def clean(model, measure, index, args):
    """Measure accuracy and mean loss on the unchanged images."""
    hits = torch.zeros(len(index), 3, device=args.device)
    label = f"clean, {model.about['model']}"
    for x, labels, _, place in batches(measure.source, index, args, label):
        hits[place] = correct(model.net(x).float(), labels)
    hits = all_sum(hits)
    loss = hits[:, 2].mean().item()
    return dict(loss=loss) | outcome(hits, model.num_logits)


@torch.no_grad()
def corrupted(model, measure, index, args):
    """Measure accuracy on corrupted images; each field is a list, one value per severity."""
    kind = measure.settings["type"]
    severities = measure.settings["severities"]
    data = measure.source
    hits = torch.zeros(len(severities), len(index), 3, device=args.device)
    label = f"{kind}, {model.about['model']}"
    if args.corrupted_dir:                                # the copies are in the order of `data`
        for i, severity in enumerate(severities):
            folder = Path(args.corrupted_dir, kind, str(severity))
            copies = open_folder(folder, data.classes, model.size, crop=1.0)    # already cropped
            if not torch.equal(copies.labels, data.labels):
                raise InputError(f"--corrupted_dir {args.corrupted_dir}: {kind}, "
                                 f"severity {severity} has other images than the test "
                                 "images")
            for x, labels, _, place in batches(copies, index, args, label):
                hits[i, place] = correct(model.net(x).float(), labels)
    else:
        if isinstance(data, ImageTree):                   # ImageNet-C was resized bilinearly
            data = copy.copy(data)
            data.resample = "bilinear"
        for x, labels, numbers, place in batches(data, index, args, label):
            pixels = (255 * x).round().byte()
            for i, severity in enumerate(severities):
                changed = corrupt(pixels, kind, severity, seed=args.seed, index=numbers,
                                  frost_dir=args.frost_dir)
                logits = model.net(changed.float() / 255).float()
                hits[i, place] = correct(logits, labels)
    fields = {}
    for hit in all_sum(hits):
        for field, value in outcome(hit, model.num_logits).items():
            fields.setdefault(field, []).append(value)
    return fields


class Normalized(torch.nn.Module):
    """Let a network take normalised images z = (x - mean) / std, as in the paper's code."""

    def __init__(self, net):
        super().__init__()
        self.net = net
        self.mean = net.mean
        self.std = net.std

    def forward(self, z):
        return self.net(z * self.std + self.mean)


def attack_as_paper(net, x, numbers, attack, eps, settings):
    """Attack under the conditions of --preset paper; return the attacked pixels.

    The attack changes normalised images z, clipped to [0, 1] (settings["clip"]) or not at all. The
    label that it attacks is the network's prediction for z. net: a ViT or FAN, which has .mean and
    .std.
    """
    normalized = Normalized(net).eval()
    z = (x - net.mean) / net.std
    if settings["clip"]:
        z = z.clamp(0, 1)
    with torch.no_grad():
        predicted = normalized(z).argmax(1)
    adv = attack.run(normalized, z, predicted, eps, index=numbers, **settings)
    check_adversarial(normalized, z, adv, clip=settings["clip"])
    return adv * net.std + net.mean


def attacked(model, measure, index, args):
    """Measure accuracy under an attack, and how far the attacked images are from the originals."""
    net = model.net
    attack = ATTACKS[measure.name]
    settings = dict(measure.settings)
    eps = settings.pop("eps", math.inf)                   # inf: without a budget
    as_paper = settings.pop("conditions", "") == "paper"
    settings["seed"] = args.seed
    if as_paper:
        settings["clip"] = measure.name in PAPER_CLIPS
    hits = torch.zeros(len(index), 3, device=args.device)
    # columns: Linf, L2, L1, how far a pixel is outside [0, 1]
    distances = torch.zeros(len(index), 4, dtype=torch.float64)
    label = f"{measure.name}, {model.about['model']}"
    for x, labels, numbers, place in batches(measure.source, index, args, label):
        if as_paper:
            adv = attack_as_paper(net, x, numbers, attack, eps, settings)
        else:                                             # attack the images that are right
            adv = x.clone()
            with torch.no_grad():
                rows = (net(x).argmax(1) == labels).nonzero()[:, 0]
            if len(rows):
                moved = attack.run(net, x[rows], labels[rows], eps, index=numbers[rows],
                                   **settings)
                check_adversarial(net, x[rows], moved)
                adv[rows] = moved.detach()
        with torch.no_grad():
            hits[place] = correct(net(adv).float(), labels)
        move = (adv - x).flatten(1).cpu().double()        # mps has no float64
        outside = (adv - adv.clamp(0, 1)).flatten(1).cpu().double()
        norms = [move.norm(p, 1) for p in (math.inf, 2, 1)]
        norms.append(outside.norm(math.inf, 1))
        distances[place.cpu()] = torch.stack(norms, 1)

    distances = all_sum(distances)
    changed = distances[distances[:, 0] > 0]              # maxima, median and mean over these
    if not len(changed):
        changed = distances[:1]                           # zeros
    linf, l2, l1, _ = changed.unbind(1)
    return outcome(all_sum(hits), model.num_logits) | dict(
        max_linf=linf.max().item(), max_l2=l2.max().item(), max_l1=l1.max().item(),
        median_l2=l2.median().item(), mean_l2=l2.mean().item(),
        outside=distances[:, 3].max().item(), own_eps=attack.own_eps is not None)


@torch.no_grad()
def logits_of_classes(model, data, index, args, columns):
    """Return the logits for the classes `columns`, (n, len(columns)), in every process."""
    logits = torch.zeros(len(index), len(columns), device=args.device)
    for x, _, _, place in batches(data, index, args, "logits"):
        logits[place] = model.net(x).float()[:, columns]
    return all_sum(logits)


def folder_accuracy(model, measure, index, args):
    """Measure ImageNet-A or -R over the 200 classes that the folder contains."""
    tree = measure.source
    columns = tree.labels.unique()                        # sorted indices into the 1,000 classes
    labels = torch.searchsorted(columns, tree.labels[index])    # indices into columns
    hits = correct(logits_of_classes(model, tree, index, args, columns), labels)
    return outcome(hits, len(columns)) | dict(classes=len(columns))


def outliers(model, measure, index, args):
    """Measure the AUPR with which low confidence separates ImageNet-O from images of val/.

    The confidence is the largest probability among ImageNet-O's classes. Of val/, only
    images of these classes are used; inside: their number. chance: the AUPR of a random guess.
    """
    tree = measure.source
    val = measure.val
    columns = tree.labels.unique()
    inside = torch.isin(val.labels, columns).nonzero()[:, 0]
    inside = inside[epoch_order(len(inside), epoch=0, seed=args.seed)[:args.limit]]
    both = torch.cat([
        logits_of_classes(model, tree, index, args, columns),
        logits_of_classes(model, val, inside, args, columns)])
    doubt = -both.softmax(1).amax(1)                      # high where the confidence is low
    outlier = torch.arange(len(both)) < len(index)
    aupr = 100 * metrics.average_precision(doubt, outlier)
    chance = 100 * len(index) / len(both)
    return dict(aupr=aupr, chance=chance, inside=len(inside), classes=len(columns))


# --- the command ----------------------------------------------------------------------------------

def plan(args, data, size):
    """Yield a Measure for each row of a model. data: the test images. size: pixels per side."""
    data_print = fingerprint(data)
    for name in args.measures:
        if name == "clean":
            yield Measure(name, {}, data, data_print, clean)
        elif name == "corruptions" or name in CORRUPTIONS:
            for kind in NAMES if name == "corruptions" else [name]:     # NAMES: ImageNet-C's 15
                settings = corruption_settings(kind, args, data, size)
                yield Measure("corruptions", settings, data, data_print, corrupted)
        elif name in ATTACKS:
            for settings in attack_settings(name, args):
                yield Measure(name, settings, data, data_print, attacked)
        elif name in FOLDERS:
            tree = open_folder(getattr(args, name), data.classes, size)
            settings = {}
            run = folder_accuracy
            if name == "imagenet_o":
                settings = dict(val=data_print, limit=args.limit or "none")
                run = outliers
            yield Measure(name, settings, tree, fingerprint(tree), run, data)
        else:
            known = ["clean", "corruptions", *CORRUPTIONS]
            known += ATTACKS
            known += FOLDERS
            raise InputError(f"--measures {name}: expected {', '.join(known)}")


def corruption_settings(kind, args, data, size):
    """Return the settings of a corruption's row, with hashes of the files that it uses."""
    settings = dict(type=kind, severities=args.severities)
    if args.corrupted_dir:
        prints = []
        for severity in args.severities:
            folder = Path(args.corrupted_dir, kind, str(severity))
            prints.append(fingerprint(open_folder(folder, data.classes, size))[:8])
        settings["released"] = "".join(prints)
    elif kind == "frost" and args.frost_dir:
        pixels = b"".join(t.numpy().tobytes() for t in load_frost(args.frost_dir))
        settings["frost"] = f"{zlib.crc32(pixels):08x}"
    return settings


def attack_settings(name, args):
    """Yield the settings of an attack's rows: of ATTACKS, then PAPER, then --steps and --eps."""
    attack = ATTACKS[name]
    own_eps = attack.own_eps
    settings = dict(attack.settings)
    if args.preset == "paper":
        settings |= PAPER.get(name, {})
        own_eps = settings.pop("eps", own_eps)
    if args.steps is not None and "steps" in settings:
        settings["steps"] = args.steps
    budgets = args.eps or (PAPER_EPS if args.preset == "paper" else EPS)
    if own_eps is not None:
        budgets = [own_eps]
    for eps in budgets:
        row = dict(settings)
        if eps < math.inf:
            row["eps"] = eps
        if args.preset == "paper":
            row["conditions"] = "paper"
        yield row


def plain_row(row, model, rows):
    """Return an adaptive attack's row from its plain attack's, None if there is none.

    For a network without PAP, both attacks are the same.
    """
    plain = PLAIN[row["name"]]
    found = rows.get(row_key(row | dict(name=plain)))
    if found is None or pap_steps(model.net, model.images):
        return None
    return found | dict(name=row["name"], same_as=plain)


def main():
    args = get_args()
    if args.table:
        rows = []
        for path in args.table:
            rows += read_rows(path)
        print(f"{rows_table(rows)}\n\n{seeds_table(rows)}".rstrip())
        return

    args.rank, args.world, args.device = common.start_processes(args.device)
    torch.backends.cudnn.allow_tf32 = False               # PyTorch's default rounds convolutions
    models = [load_model(path, None, args.device) for path in args.ckpt]
    size = args.image_size
    if size is None:
        size = 32 if args.data in ("shapes", "cifar10") else 224
        if models:
            size = models[0].size
    models += [load_model(path, size, args.device) for path in args.model]
    args = complete_flags(args, models)
    data = load_data(args, models)

    # For each measure and each model, compute the row if results.jsonl does not have it yet. Rank 0
    # reads the rows, so that all processes compute the same ones.
    first = Path(args.ckpt[0] if args.ckpt else "out/model")
    folder = first if not args.ckpt or first.is_dir() else Path("out", first.stem)
    path = Path(args.out_dir or folder / "robust") / "results.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = {row_key(row): row for row in common.from_first(common.read_log(path))}
    origin = common.origin(args.device)
    print0(f"{len(models)} models | {args.data} | {args.world} x {origin['hardware']} "
           f"| {path}, {len(rows)} rows")
    wanted = []
    for measure in plan(args, data, models[0].size):
        index = choose(len(measure.source.labels), measure.name, args)
        if not len(index) or (measure.name == "imagenet_o" and not len(data.labels)):
            raise InputError(f"--measures {measure.name} needs --data_dir, the folder "
                             "that contains val/")
        about = dict(data=args.data, data_dir=args.data_dir, name=measure.name,
                     fingerprint=measure.fingerprint, settings=measure.settings,
                     images=len(index), classes=len(measure.source.classes),
                     seed=args.seed)
        if args.world > 1:
            keys = [row_key(model.about | about) for model in models]
            common.same_everywhere(keys, f"networks, code, images or settings of {measure.name}")
        for model in models:
            row = model.about | about
            key = row_key(row)
            if key not in rows:
                done = None
                if measure.name in PLAIN:
                    done = plain_row(row, model, rows)
                if done is None:
                    began = time.perf_counter()
                    done = row | measure.run(model, measure, index, args)
                    done["seconds"] = round(time.perf_counter() - began, 2)
                    done |= origin
                rows[key] = done
                common.append_row(path, done)             # rank 0 writes
            wanted.append(rows[key])

    print0(f"\n{rows_table(wanted)}\n")
    over_seeds = seeds_table(wanted) if len(models) > 1 else ""
    if over_seeds:
        print0(f"{over_seeds}\n")
    fewest = min(row["images"] for row in wanted)
    print0(f"The rows are in {path}. Compare numbers of one line only. An accuracy of "
           f"50 % on {fewest} images has a 95 % interval of "
           f"±{1.96 * 50 / fewest ** 0.5:.0f} points.")
    if not over_seeds:
        print0("One network per variant is not enough to rank variants: train several "
               "seeds.")


if __name__ == "__main__":
    common.run(main)
