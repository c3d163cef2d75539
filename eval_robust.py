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
If networks differ only in their seed, a second table has means over seeds, with intervals.
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
0.226/255. Only cw and the attacks in PAPER_CLIPS clip the normalised pixels to [0, 1]. The model's
own prediction takes the place of the true class, so misclassified images are attacked, too.
"""

import copy
import math
import os
import runpy
import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Callable, NamedTuple

import common  # before torch, because it sets GOMP_SPINCOUNT for torch's threads
import torch
import torch.distributed as dist

# A row's field `code` is a hash of all loaded modules. fan is always loaded, so a FAN in --ckpt
# does not change the hash.
import fan  # noqa: F401
from common import InputError, print0
from data.datasets import DATASETS, load_part, trained_crop
from data.images import ImageTree, Split, fingerprint, image_batches
from data.rng import epoch_order
from results import (PAPER_CLIPS, PROJECT, code_hash, kind_of, loaded_modules, network_key, pack,
                     read_rows, recipe, row_key, rows_table, seeds_table)
from robust import attack_right_images, metrics
from robust.adaptive import adaptive_apgd, adaptive_autoattack, adaptive_pgd, pap_steps
from robust.attacks import (check_adversarial, check_logits, check_repeats,
                            cross_entropy, cw, fgsm, input_gradient, noise, pgd,
                            restarted, sld, spsa)
from robust.autoattack import apgd, autoattack, square
from robust.corruptions import CORRUPTIONS, NAMES, corrupt
from robust.frost import frost_hash
from vit import ViTConfig, classifier_from_checkpoint, load_timm


class Attack(NamedTuple):
    """An attack of --measures."""
    run: Callable                       # run(net, images, labels, eps, *, seed, index, **settings)
    settings: dict = {}
    own_eps: float | None = None        # None: --eps gives the budgets. A number: the only budget.
                                        # inf: no budget


# To change a setting, edit its line; to add an attack, add a line.
ATTACKS = {
    "noise": Attack(noise, own_eps=0.068),                          # U(-eps, eps)
    "fgsm": Attack(fgsm),
    "pgd": Attack(pgd, dict(steps=20)),
    "pgd_restarts": Attack(restarted, dict(restarts=5, steps=20)),  # restarts pgd
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
# On a network without PAP, an adaptive attack does the same as the plain attack.
PLAIN = dict(adaptive_pgd="pgd", adaptive_apgd="apgd", adaptive_autoattack="autoattack")

# --preset paper: the attacks whose settings differ in the paper's code. rescale: sld scales to its
# L1 ball. legacy: spsa as in cleverhans 4.0.0.
PAPER_ATTACKS = ATTACKS | {
    "noise": Attack(noise, own_eps=0.3),
    "sld": Attack(sld, dict(steps=20, rescale=True), own_eps=10.0),
    "spsa": Attack(spsa, dict(steps=40, pairs=128, legacy=True), own_eps=0.1),
    "cw": Attack(cw, dict(steps=1000, search_steps=5, confidence=10.0), own_eps=math.inf),
}

# For each --preset: the attacks, and the default of --eps.
PRESETS = dict(default=ATTACKS, paper=PAPER_ATTACKS)
EPS = dict(default=[k / 255 for k in (1, 2, 4, 8)], paper=[k / 255 for k in range(1, 7)])

FOLDERS = ("imagenet_a", "imagenet_r", "imagenet_o")      # measures with their own folder and flag
# "corruptions": the 15 types of ImageNet-C. A name in CORRUPTIONS: this type only.
MEASURES = ["clean", "corruptions", *CORRUPTIONS, *ATTACKS, *FOLDERS]
DEFAULT_MEASURES = ["clean", "corruptions", "noise", "fgsm", "pgd", "adaptive_pgd", "apgd"]

# Images per measure without --limit; a measure that is not named uses all images. SCENE_LIMITS: on
# rendered scenes, so that a CPU needs only minutes. SLOW_LIMITS: on all other data. An adaptive
# attack has the limit of its plain attack, so that it can repeat the row of the plain attack.
SCENE_LIMITS = {name: 80 for name in ATTACKS}
SCENE_LIMITS |= dict(corruptions=320, noise=640, fgsm=640, pgd=160, adaptive_pgd=160, sld=160,
                     spsa=20, cw=40)
SLOW_LIMITS = dict(spsa=100, cw=100, square=1000, autoattack=1000, adaptive_autoattack=1000)


# --- flags ----------------------------------------------------------------------------------------

def get_args(words=None):
    """Parse the flags. words: a list instead of the command line."""
    p = common.new_parser(__doc__)
    flag = p.add_argument_group("what to evaluate").add_argument
    flag("--ckpt", nargs="+", default=[],
         help="checkpoints: files, or run folders (best.pt, else last.pt); files with "
         "timm's names (DeiT, the paper's code) work, too")
    flag("--model", nargs="+", default=[], metavar="FILE.py:BUILD",
         help="functions that return classifiers: modules that take pixels in [0, 1] and "
         "return logits")
    flag("--measures", nargs="+", choices=MEASURES, metavar="MEASURE",
         help=f"measure these: {', '.join(MEASURES)} (default: "
         f"{', '.join(DEFAULT_MEASURES)}, and the folders that are given)")
    flag("--eps", nargs="+", type=common.fraction,
         help="budgets of the attacks, for example 8/255 or 0.031 (default: 1/255 2/255 "
         "4/255 8/255; with --preset paper 1/255 to 6/255)")
    flag("--steps", type=common.positive_int,
         help="steps of the attacks (default: see ATTACKS)")
    flag("--limit", type=common.positive_int,
         help="images per measure, the same for every model (default: all; fewer on "
         "shapes and for slow attacks)")
    flag("--preset", choices=PRESETS, default="default",
         help="conditions of attacks; paper repeats the conditions and settings of the "
         "paper's code")
    flag("--seed", type=common.seed, default=0,
         help="seed of all random numbers, also of the choice of images (default: 0)")
    flag("--table", nargs="+", metavar="PATH",
         help="do not evaluate; print the tables of these results.jsonl files, or of the "
         "folders that contain them")

    flag = p.add_argument_group("data").add_argument
    flag("--data", choices=DATASETS, help="data set (default: as in training)")
    flag("--data_dir",
         help="folder of the data (default: as in training); for imagenet, the folder "
         "that contains val/ with all or some classes")
    flag("--image_size", type=common.positive_int,
         help="pixels per side for --model (default: as for --ckpt; without --ckpt 32 on "
         "shapes and cifar10, else 224)")
    flag("--corrupted_dir",
         help="read the corrupted images from this folder instead of making them; its "
         "files are <type>/<severity>/<class>/*.JPEG, as in ImageNet-C")
    for name in FOLDERS:
        flag(f"--{name}", metavar="DIR",
             help=f"folder of {name}; its files are <class>/*, for some of ImageNet's "
             "classes; if given, it is measured by default")
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
    flag("--batch_size", type=common.positive_int,
         help="images per batch, which bounds the memory (default: depends on the image "
         "size; on a GPU also on the networks and the free memory)")
    flag("--num_workers", type=common.nonnegative_int,
         help=f"processes that decode image files (default: {common.default_workers()})")
    flag("--device", help="cuda, mps or cpu (default: the best found)")
    args = p.parse_args(words)
    if not args.ckpt and not args.model and not args.table:
        p.error("the following arguments are required: --ckpt or --model")
    if not args.measures:
        folders = [name for name in FOLDERS if getattr(args, name)]
        args.measures = DEFAULT_MEASURES + folders
    reject_useless_flags(args, common.typed_flags(p, words))
    return args


def reject_useless_flags(args, typed):
    """Raise InputError for flags that would do nothing. typed: the flags on the command line."""
    if args.table:
        common.reject_flags(typed - {"table"}, "with --table, which prints stored rows")
    if not args.model:
        common.reject_flags(typed & {"image_size"}, "without --model")
    if args.corrupted_dir:
        common.reject_flags(typed & {"frost_dir"}, "with --corrupted_dir")
    # The flags of measures, and which of them the measures use.
    optional = {"preset", "eps", "steps", "severities", "corrupted_dir", "frost_dir", *FOLDERS}
    measures = set(args.measures)
    used = measures.intersection(FOLDERS)
    attacks = [PRESETS[args.preset][name] for name in measures.intersection(ATTACKS)]
    if attacks:
        used.add("preset")
    if any(attack.own_eps is None for attack in attacks):
        used.add("eps")
    if any("steps" in attack.settings for attack in attacks):
        used.add("steps")
    if measures.intersection(["corruptions", *CORRUPTIONS]):
        used |= {"severities", "corrupted_dir"}
    if measures.intersection(["corruptions", "frost"]):
        used.add("frost_dir")
    useless = optional - used
    common.reject_flags(typed & useless, f"with --measures {' '.join(args.measures)}")
    for name in measures.intersection(FOLDERS):
        if not getattr(args, name):
            raise InputError(f"--measures {name} needs --{name}, the folder of its images")


# --- models ---------------------------------------------------------------------------------------

class Model(NamedTuple):
    """A network to evaluate."""
    net: torch.nn.Module                 # from pixels in [0, 1] to logits; eval mode, frozen
    size: int                            # pixels per side of its images
    images: torch.Tensor                 # (2, 3, size, size): two images to try it on
    num_logits: int
    about: dict                          # fields of its rows: model (its name), checkpoint, ...
    classes: list = []                   # class names in the order of its logits; [] if unknown
    train_args: dict = {}                # the flags of its training; {} for other people's networks
    crop: float | None = None            # evaluation crop of its data set; None if unknown
    seen: list = []                      # hashes of the photos that its training used


def module_names(folder):
    """Return the names of the modules and packages in a folder."""
    modules = {path.stem for path in folder.glob("*.py")}
    packages = {path.parent.name for path in folder.glob("*/__init__.py")}
    return modules | packages


@contextmanager
def own_imports(folder):
    """Let a file import the modules of its folder, whatever modules are loaded already.

    Afterwards the modules of the folder and of the project are the same as before.
    """
    before = dict(sys.modules)
    # 1. Forget our modules whose names are also in the folder.
    if folder != PROJECT:
        names = module_names(folder)
        for name in loaded_modules(PROJECT):
            if name.partition(".")[0] in names:
                del sys.modules[name]
    # 2. Search the folder first.
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        # 3. Forget the new modules: another folder may have files of the same names.
        for name in loaded_modules(folder) | loaded_modules(PROJECT):
            del sys.modules[name]
        # 4. Bring our modules back.
        sys.modules.update(before)


@contextmanager
def no_imports(folder):
    """Let every import of a module of the folder fail with ModuleNotFoundError.

    The modules of the folder are hidden after own_imports. So an import while the network runs
    would fail, or find our module of the same name. Here it always fails. The modules of the
    project itself stay.
    """
    hidden = module_names(folder)
    before = dict(sys.modules)
    loaded = {name for name in before if name.partition(".")[0] in hidden}
    names = hidden | loaded
    if folder == PROJECT:
        names -= before.keys()                            # the project's own modules stay
    for name in names:
        sys.modules[name] = None                          # Python raises the error for None
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(before)


def load_model(path, device):
    """Return the Model of a checkpoint of train_cls.py, or of one with timm's names."""
    checkpoint = common.load(path)
    task = checkpoint.get("task")
    train_args = {}
    if task is None:
        net = load_timm(checkpoint)
        label = Path(path).stem
    elif task == "classification":
        net = classifier_from_checkpoint(checkpoint)
        train_args = checkpoint["args"]
        label = f"seed {train_args['seed']}"
    else:
        raise InputError(f"--ckpt {path} is for {task}; evaluate it by train_seg.py or "
                         f"train_lm.py --eval_only")
    net, images, logits = checked_network(net, net.config.image_size, device)
    # A row has only the settings that are not ViTConfig's defaults, so that a new setting does not
    # change the rows of older networks.
    default = ViTConfig()
    usual = vars(default) | default.pap
    settings = vars(net.config) | net.config.pap
    config = {name: value for name, value in settings.items()
              if name != "pap" and value != usual.get(name)}
    size = net.config.image_size
    about = dict(model=f"{kind_of(net.config)}, {label}", checkpoint=str(path),
                 model_config=config, recipe=recipe(train_args, checkpoint.get("fingerprint")),
                 weights=common.checksum(net), size=size, code=code_hash())
    classes = list(checkpoint.get("classes") or [])
    return Model(net, size, images, num_logits=logits.shape[1], about=about, classes=classes,
                 train_args=train_args, crop=trained_crop(train_args),
                 seen=checkpoint.get("seen", []))


def load_file(path, size, device):
    """Return the Model of FILE.py:BUILD, which has its own imports.

    size: the pixels per side of its images.
    """
    name, _, function = path.rpartition(":")
    file = Path(name).resolve()
    if not file.is_file():
        raise InputError(f"--model {path}: there is no file {file}")
    with own_imports(file.parent):
        names = runpy.run_path(str(file))
        if function not in names:
            raise InputError(f"--model {path}: {file.name} has no function {function}")
        torch.manual_seed(0)                              # the same weights on every process
        net = names[function]()
        imported = loaded_modules(file.parent) | loaded_modules(PROJECT)
    try:
        with no_imports(file.parent):
            net, images, logits = checked_network(net, size, device)
    except ModuleNotFoundError as error:
        missing, _, _ = (error.name or "").partition(".")
        if missing not in module_names(file.parent):
            raise
        raise InputError(f"--model {path}: the network imports {error.name} when it runs; expected "
                         f"this import at the top of {file.name} or inside {function}") from None
    # code_hash covers modules only. So the row also stores an answer of the network, which changes
    # with its other files. Different factors: swapped logits change the sum.
    factors = torch.arange(1, 1 + logits.shape[1])
    answer = (logits[0].cpu() * factors).sum().item()
    config = dict(build=path, answer=f"{answer:.4g}")
    # In `own_imports` our hidden modules are missing, so code_hash is called after it.
    about = dict(model=path, checkpoint=path, model_config=config, recipe="",
                 weights=common.checksum(net), size=size,
                 code=code_hash(file, *imported.values()))
    return Model(net, size, images, num_logits=logits.shape[1], about=about)


def checked_network(net, size, device):
    """Prepare a network on the device, in eval mode, frozen; try it on two images.

    Returns (net, images, logits). InputError unless the logits of an image depend on it alone.
    """
    net = net.to(device).eval().requires_grad_(False)
    ramp = torch.linspace(0, 1, 6 * size ** 2, device=device)
    images = ramp.view(2, 3, size, size)
    with torch.no_grad():
        logits = net(images).float()
    check_logits(logits)
    check_repeats(net, images, logits)
    return net, images, logits


# --- data -----------------------------------------------------------------------------------------

# Names of ImageNet's class folders; logit i of an ImageNet network belongs to IMAGENET[i].
CLASS_FILE = PROJECT / "robust" / "imagenet_classes.txt"
IMAGENET = CLASS_FILE.read_text("utf-8").split()


def only_value(models, values, name, advice):
    """Return the value of all models for which it is known, None if it is known for none.

    values: one per model, None if unknown. InputError with advice if two values differ, so the
    order of the models decides nothing.
    """
    known = {model.about["checkpoint"]: value for model, value in zip(models, values)
             if value is not None}
    if len(set(known.values())) > 1:
        listed = ", ".join(f"{path}: {value}" for path, value in known.items())
        raise InputError(f"the networks differ in {name} ({listed:.300}); {advice}")
    return next(iter(known.values()), None)


def check_different(models):
    """Raise InputError if two models are the same network: they would share a column."""
    path_of = {}                                          # {key of the network: its path}
    for model in models:
        path = model.about["checkpoint"]
        key = network_key(model.about)
        if key in path_of:
            raise InputError(f"{path_of[key]} and {path} are the same network; remove one of them")
        path_of[key] = path


def complete_flags(args, models):
    """Return a copy of the flags with the values in use of data and data_dir.

    InputError if the models differ in the size of their images, or leave a value open.
    """
    args = copy.copy(args)
    sizes = [model.size for model in models]
    only_value(models, sizes, "image_size", "evaluate them one by one")
    if not args.data:
        stored = [model.train_args.get("data") for model in models]
        args.data = only_value(models, stored, "data", "choose one with --data") or "imagenet"
    if args.data == "shapes" and args.data_dir:
        raise InputError(f"--data_dir {args.data_dir} would do nothing: the rendered scenes of "
                         f"--data shapes need no folder; for your own images add --data folder")
    if not args.data_dir and args.data != "shapes":
        same_data = [model for model in models if model.train_args.get("data") == args.data]
        stored = [model.train_args.get("data_dir") for model in same_data]
        args.data_dir = only_value(same_data, stored, "data_dir", "choose one with --data_dir")
    return args


def images_per_batch(models, device):
    """Return how many images a batch has without --batch_size. The data are loaded already.

    On CUDA, the memory for the gradient of two images is measured for every network. A batch may
    take a third of the free memory.
    """
    size = models[0].size
    if device.type != "cuda":                             # fast while a batch stays in the cache
        return max(1, min(256, 2 ** 18 // size ** 2))
    free, _ = torch.cuda.mem_get_info(device)
    labels = torch.zeros(2, dtype=torch.long, device=device)
    largest = 1                                           # bytes per image
    for model in models:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        input_gradient(cross_entropy, model.net, model.images, labels)
        used = torch.cuda.max_memory_allocated(device) - before
        largest = max(largest, used // 2)
    most = 512 * 224 ** 2 // size ** 2                    # 512 images at 224 px
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
    if has_1000 and args.data_dir:
        data = ImageTree(args.data_dir, "val", names or IMAGENET, size, subset=True)
    elif has_1000:                                        # an empty data set
        no_labels = torch.zeros(0, dtype=torch.long)
        data = Split(torch.zeros(0, 3, 1, 1), no_labels, IMAGENET)
    elif args.data == "imagenet":
        data = ImageTree(args.data_dir, "val", names, size)
    else:
        part = "all" if args.data == "folder" else "test"
        data = load_part(part, data_flags(args, models, names), args.device)
        if isinstance(data, Split) and data.images.shape[2] != size:
            found = data.images.shape[2]
            raise InputError(f"--data {args.data} has images of {found} px, but the networks take "
                             f"{size} px; choose networks for {found} px (--model: --image_size "
                             f"{found}), or write the images to files for --data folder, which "
                             f"resizes them")
    classes = list(data.classes)
    for model in models:
        path = model.about["checkpoint"]
        same_classes = not model.classes or model.classes == classes
        if model.num_logits != len(classes) or not same_classes:
            raise InputError(f"{path} has {model.num_logits} classes "
                             f"{model.classes[:3]}, --data {args.data} has "
                             f"{len(classes)} {classes[:3]}; expected the same")
        if not model.classes and not has_1000:
            order = ", ".join(f"{i} = {name}" for i, name in enumerate(classes))
            print0(f"{path} has no class names. Its logits are taken in this order: "
                   f"{order}")
    return data


def data_flags(args, models, classes):
    """Return the flags for load_part, {name: value}. The order of the models does not matter.

    Flags on which all trainings agree are passed on, because the loader of your own data set may
    read any flag. These always come from this evaluation: data, data_dir, image_size and classes.
    num_images is the largest of all trainings, crop is the crop of the trainings, and seen has the
    photos that a training used, which are left out.
    """
    trainings = [model.train_args for model in models if model.train_args]
    flags = {}
    for name in set().union(*trainings):
        values = [train_args.get(name) for train_args in trainings]
        if all(value == values[0] for value in values):
            flags[name] = values[0]
    counts = [train_args.get("num_images") or 0 for train_args in trainings]
    if any(counts):
        flags["num_images"] = max(counts)
    crops = [model.crop for model in models]
    crop = only_value(models, crops, "crop", "evaluate them one by one")
    if crop is None:
        crop = DATASETS[args.data].crop
    seen = set()
    for model in models:
        seen.update(model.seen)
    flags |= dict(data=args.data, data_dir=args.data_dir, image_size=models[0].size,
                  download=False)
    return flags | dict(classes=classes, seen=seen, crop=crop)


def open_folder(path, classes, size, crop=0.875):
    """Open a folder <class>/* for some of `classes`; a label is an index into the whole list."""
    root, folder = os.path.split(os.path.abspath(path))
    return ImageTree(root, folder, classes, size, subset=True, crop=crop)


def choose(n, name, args):
    """Choose the images of a measure: numbers from 0 to n - 1 in a random order, fixed by --seed.

    A smaller limit keeps the first images of a larger one.
    """
    limits = SCENE_LIMITS if args.data == "shapes" else SLOW_LIMITS
    limit = args.limit or limits.get(name, n)
    return epoch_order(n, epoch=0, seed=args.seed)[:limit]


def batches(data, index, args, title=""):
    """Load this process's share of the images in batches on the device.

    index: (n,) numbers of images in the data set. title: text of the progress bar.
    Yields x (b, 3, S, S) float in [0, 1], labels (b,), numbers = index[rows] (b,), and rows (b,):
    the rows of index, and of the results, that belong to the batch.
    """
    device = args.device
    own_rows = torch.arange(len(index))[args.rank::args.world]  # torchrun starts `world` processes
    batch_rows = [rows for rows in own_rows.split(args.batch_size) if len(rows)]
    batch_numbers = [index[rows] for rows in batch_rows]
    if isinstance(data, Split):
        on_device = (numbers.to(device) for numbers in batch_numbers)
        loaded = ((data.images[numbers], data.labels[numbers], numbers) for numbers in on_device)
    else:
        keys = zip(batch_numbers, batch_numbers)          # (numbers to return, images to load)
        loaded = image_batches(data, keys, args.num_workers, device)
    steps = zip(loaded, batch_rows)
    for batch, rows in common.bar(steps, title[:60], total=len(batch_rows), leave=False):
        pixels, labels, numbers = (t.to(device, non_blocking=True) for t in batch)
        yield pixels.float() / 255, labels, numbers, rows.to(device)


# --- scores of images -----------------------------------------------------------------------------

def scores(logits, labels):
    """Return (b, 3) float per image: top-1 (0 or 1), top-5 (0 or 1), cross-entropy in nats."""
    check_logits(logits)
    top1 = logits.argmax(1) == labels
    top5 = (logits.topk(min(5, logits.shape[1])).indices == labels[:, None]).any(1)
    top5 |= top1                                          # topk may leave out the argmax of a tie
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    return torch.stack([top1.float(), top5.float(), loss], 1)


def join_rows(t):
    """Join results, float64: each process has filled its own rows, and its other rows are 0."""
    t = t.cpu()
    if dist.is_initialized():
        dist.all_reduce(t)                                # adds
    return t.double()


def accuracy(results, num_classes):
    """Return a row's fields `top1`, `top5` (per cent) and `right`; results: (n, 3) of `scores`."""
    top1, top5 = (100 * results[:, :2].sum(0) / len(results)).tolist()
    row = dict(top1=round(top1, 4))
    if num_classes > 5:                                   # up to 5 classes, top5 is always 100 %
        row["top5"] = round(top5, 4)
    row["right"] = pack(results[:, 0] > 0)
    return row


# --- measures: each returns fields of a row -------------------------------------------------------

class Measure(NamedTuple):
    """A row to compute for each network.

    run: a function of (model, source, index, args) that returns the fields of a row. model: a
    Model. index: (n,) the numbers of the images in `source` to use. args: the flags.
    """
    name: str
    settings: dict                       # of the row
    source: Split | ImageTree            # the images
    fingerprint: str                     # of source
    run: Callable


@torch.no_grad()
def clean(model, source, index, args):
    """Measure accuracy and mean loss on the unchanged images."""
    results = torch.zeros(len(index), 3, device=args.device)
    title = f"clean, {model.about['model']}"
    for x, labels, _, rows in batches(source, index, args, title):
        results[rows] = scores(model.net(x).float(), labels)
    results = join_rows(results)
    loss = results[:, 2].mean().item()
    return dict(loss=loss) | accuracy(results, model.num_logits)


def check_copies(copies, data, folder):
    """Raise InputError unless the corrupted copies belong to the test images, in the same order.

    Labels must be equal and, if the test images are files, the file names without their endings.
    """
    same = torch.equal(copies.labels, data.labels.cpu())
    if same and isinstance(data, ImageTree):
        names = [os.path.splitext(name)[0] for name in data.names.tolist()]
        same = names == [os.path.splitext(name)[0] for name in copies.names.tolist()]
    if not same:
        raise InputError(f"--corrupted_dir: {folder} has other images than the test images; "
                         f"expected one copy of each, with its name, in the folder of its class")


@torch.no_grad()
def corrupted(model, source, index, args, *, kind):
    """Measure accuracy on corrupted images; each field is a list, one value per severity."""
    results = torch.zeros(len(args.severities), len(index), 3, device=args.device)
    title = f"{kind}, {model.about['model']}"
    if args.corrupted_dir:
        for i, severity in enumerate(args.severities):
            folder = Path(args.corrupted_dir, kind, str(severity))
            copies = open_folder(folder, source.classes, model.size, crop=1.0)  # already cropped
            check_copies(copies, source, folder)
            for x, labels, _, rows in batches(copies, index, args, title):
                results[i, rows] = scores(model.net(x).float(), labels)
    else:
        if isinstance(source, ImageTree):
            source = copy.copy(source)
            source.resample = "bilinear"                  # as in the making of ImageNet-C
        for x, labels, numbers, rows in batches(source, index, args, title):
            pixels = (255 * x).round().byte()
            for i, severity in enumerate(args.severities):
                changed = corrupt(pixels, kind, severity, seed=args.seed, index=numbers,
                                  frost_dir=args.frost_dir)
                logits = model.net(changed.float() / 255).float()
                results[i, rows] = scores(logits, labels)
    per_severity = [accuracy(result, model.num_logits) for result in join_rows(results)]
    fields = {}
    for field in per_severity[0]:
        fields[field] = [one[field] for one in per_severity]
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


def attack_as_paper(net, x, numbers, attack, clip):
    """Attack under the conditions of --preset paper; return the attacked pixels.

    The attack changes normalised images z, clipped to [0, 1] or, without clip, not at all. The
    label that it attacks is the network's prediction for z. net: a ViT or FAN, which has .mean and
    .std.
    """
    if not hasattr(net, "mean") or not hasattr(net, "std"):
        raise InputError("--preset paper attacks normalised images; expected a network with the "
                         "attributes mean and std, (3, 1, 1), as a ViT or FAN has")
    normalized = Normalized(net).eval()
    z = (x - net.mean) / net.std
    if clip:
        z = z.clamp(0, 1)
    with torch.no_grad():
        predicted = normalized(z).argmax(1)
    adv = attack(normalized, z, predicted, index=numbers, clip=clip)
    check_adversarial(normalized, z, adv, clip=clip)
    return adv * net.std + net.mean


def attacked(model, source, index, args, *, name, attack, has_own_eps):
    """Measure accuracy under an attack, and how far the attacked images are from the originals.

    attack: a function of (net, images, labels, *, index).
    has_own_eps: True if --eps has no effect on the attack. The row's field own_eps is this bool,
    not the number Attack.own_eps.
    """
    net = model.net
    results = torch.zeros(len(index), 3, device=args.device)
    # columns: Linf, L2, L1, how far a pixel is outside [0, 1]
    distances = torch.zeros(len(index), 4, dtype=torch.float64)
    title = f"{name}, {model.about['model']}"
    for x, labels, numbers, rows in batches(source, index, args, title):
        if args.preset == "paper":
            clip = name in PAPER_CLIPS
            adv = attack_as_paper(net, x, numbers, attack, clip)
        else:
            with torch.no_grad():
                right = net(x).argmax(1) == labels
            adv = attack_right_images(net, x, labels, right, attack, index=numbers)
        with torch.no_grad():
            results[rows] = scores(net(adv).float(), labels)
        move = (adv - x).flatten(1).cpu().double()        # mps has no float64
        outside = (adv - adv.clamp(0, 1)).flatten(1).cpu().double()
        norms = [move.norm(p, 1) for p in (math.inf, 2, 1)]
        norms.append(outside.norm(math.inf, 1))
        distances[rows.cpu()] = torch.stack(norms, 1)

    distances = join_rows(distances)
    changed = distances[distances[:, 0] > 0]              # maxima, median and mean over these
    if not len(changed):                                  # no image changed: all distances are 0
        changed = torch.zeros(1, 4)
    linf, l2, l1, _ = changed.unbind(1)
    return accuracy(join_rows(results), model.num_logits) | dict(
        max_linf=linf.max().item(), max_l2=l2.max().item(), max_l1=l1.max().item(),
        median_l2=l2.median().item(), mean_l2=l2.mean().item(),
        outside=distances[:, 3].max().item(), own_eps=has_own_eps)


@torch.no_grad()
def logits_of_classes(model, data, index, args, columns):
    """Return the logits for the classes `columns`, (n, len(columns)), in every process."""
    logits = torch.zeros(len(index), len(columns), device=args.device)
    for x, _, _, rows in batches(data, index, args, "logits"):
        logits[rows] = model.net(x).float()[:, columns]
    return join_rows(logits)


def folder_accuracy(model, source, index, args):
    """Measure ImageNet-A or -R over the 200 classes that the folder contains."""
    columns = source.labels.unique()                      # sorted indices into the 1,000 classes
    labels = torch.searchsorted(columns, source.labels[index])  # indices into columns
    results = scores(logits_of_classes(model, source, index, args, columns), labels)
    return accuracy(results, len(columns)) | dict(classes=len(columns))


def outliers(model, source, index, args, *, val):
    """Measure how well low confidence separates ImageNet-O from images of val/: the AUPR.

    The confidence is the largest probability among ImageNet-O's classes. Only the images of val/
    that belong to these classes count; the field `inside` is their number. The field `chance` is
    the AUPR of a random guess.
    """
    columns = source.labels.unique()
    val_index = torch.isin(val.labels, columns).nonzero()[:, 0]
    if not len(val_index):
        raise InputError(f"--data_dir {args.data_dir}: val/ has no image of the {len(columns)} "
                         f"classes of --imagenet_o; expected one or more")
    val_index = val_index[choose(len(val_index), "imagenet_o", args)]
    both = torch.cat([
        logits_of_classes(model, source, index, args, columns),
        logits_of_classes(model, val, val_index, args, columns)])
    doubt = -both.softmax(1).amax(1)                      # high where the confidence is low
    is_outlier = torch.arange(len(both)) < len(index)
    aupr = 100 * metrics.average_precision(doubt, is_outlier)
    chance = 100 * len(index) / len(both)
    return dict(aupr=aupr, chance=chance, inside=len(val_index), classes=len(columns))


# --- the command ----------------------------------------------------------------------------------

def plan(args, data, size):
    """Yield a Measure for each row of a model. data: the test images. size: pixels per side."""
    data_hash = fingerprint(data)
    for name in args.measures:
        if name == "clean":
            yield Measure(name, {}, data, data_hash, clean)
        elif name == "corruptions" or name in CORRUPTIONS:
            kinds = NAMES if name == "corruptions" else [name]      # NAMES: ImageNet-C's 15
            for kind in kinds:
                settings = corruption_settings(kind, args, data, size)
                run = partial(corrupted, kind=kind)
                yield Measure("corruptions", settings, data, data_hash, run)
        elif name in ATTACKS:
            attack = PRESETS[args.preset][name]
            keywords = dict(attack.settings)
            if args.steps is not None and "steps" in keywords:
                keywords["steps"] = args.steps
            has_own_eps = attack.own_eps is not None
            budgets = args.eps or EPS[args.preset]
            if has_own_eps:
                budgets = [attack.own_eps]
            for eps in budgets:
                settings = dict(keywords)
                if eps < math.inf:
                    settings["eps"] = eps
                if args.preset == "paper":
                    settings["conditions"] = "paper"
                call = partial(attack.run, eps=eps, seed=args.seed, **keywords)
                run = partial(attacked, name=name, attack=call, has_own_eps=has_own_eps)
                yield Measure(name, settings, data, data_hash, run)
        elif name in FOLDERS:
            tree = open_folder(getattr(args, name), data.classes, size)
            settings = {}
            run = folder_accuracy
            if name == "imagenet_o":
                # --limit also limits the images of val/, whose number is not in the row's key.
                settings = dict(val=data_hash, limit=args.limit or "none")
                run = partial(outliers, val=data)
            yield Measure(name, settings, tree, fingerprint(tree), run)


def corruption_settings(kind, args, data, size):
    """Return the settings of a corruption's row, with hashes of the files that it uses."""
    settings = dict(type=kind, severities=args.severities)
    if args.corrupted_dir:
        hashes = []
        for severity in args.severities:
            folder = Path(args.corrupted_dir, kind, str(severity))
            copies = open_folder(folder, data.classes, size)
            hashes.append(fingerprint(copies)[:8])
        settings["released"] = "".join(hashes)
    elif kind == "frost" and args.frost_dir:
        settings["frost"] = frost_hash(args.frost_dir)
    return settings


def results_file(args):
    """Return the path of results.jsonl."""
    if args.out_dir:
        folder = Path(args.out_dir)
    elif not args.ckpt:
        folder = Path("out/model/robust")
    elif Path(args.ckpt[0]).is_dir():
        folder = Path(args.ckpt[0], "robust")
    else:
        folder = Path("out", Path(args.ckpt[0]).stem, "robust")
    return folder / "results.jsonl"


def main():
    args = get_args()
    if args.table:
        rows = []
        for path in args.table:
            rows += read_rows(path)
        print(f"{rows_table(rows)}\n\n{seeds_table(rows)}".rstrip())
        return

    # From here on, args.device is a torch.device.
    args.rank, args.world, args.device = common.start_processes(args.device)
    torch.backends.cudnn.allow_tf32 = False     # the default rounds the inputs of convolutions
    models = [load_model(path, args.device) for path in args.ckpt]
    if args.image_size:
        size = args.image_size
    elif models:
        size = models[0].size
    else:
        size = 32 if args.data in ("shapes", "cifar10") else 224
    models += [load_file(path, size, args.device) for path in args.model]
    args = complete_flags(args, models)
    check_different(models)
    data = load_data(args, models)
    if args.batch_size is None:
        args.batch_size = images_per_batch(models, args.device)
    reads_files = not isinstance(data, Split) or args.corrupted_dir
    if args.num_workers is None:
        args.num_workers = common.default_workers()
    elif not reads_files and not set(FOLDERS).intersection(args.measures):
        common.reject_flags({"num_workers"}, f"with --data {args.data}, whose images are in memory")

    # All processes use the rows that rank 0 reads, so that they compute the same missing rows.
    path = results_file(args)
    path.parent.mkdir(parents=True, exist_ok=True)
    finished = {row_key(row): row for row in common.from_first(common.read_log(path))}
    origin = common.origin(args.device)
    print0(f"{len(models)} models | {args.data} | {args.world} x {origin['hardware']} "
           f"| {path}, {len(finished)} rows")
    shown = []
    for measure in plan(args, data, models[0].size):
        index = choose(len(measure.source.labels), measure.name, args)
        # No test image; or ImageNet-O without val/, with whose images it is compared.
        if not len(index) or (measure.name == "imagenet_o" and not len(data.labels)):
            raise InputError(f"--measures {measure.name} needs --data_dir, the folder "
                             "that contains val/")
        measured = dict(data=args.data, data_dir=args.data_dir, name=measure.name,
                        fingerprint=measure.fingerprint, settings=measure.settings,
                        images=len(index), classes=len(measure.source.classes),
                        seed=args.seed)
        model_of = {row_key(model.about | measured): model for model in models}
        common.same_everywhere(list(model_of),
                               f"networks, code, images or settings of {measure.name}")
        for key, model in model_of.items():
            if key not in finished:
                about = model.about | measured | origin
                # Without PAP, an adaptive attack repeats the plain attack, whose row may be
                # finished.
                plain = PLAIN.get(measure.name)           # None: the attack is not adaptive
                plain_row = None
                if plain:
                    plain_row = finished.get(row_key(about | dict(name=plain)))
                if plain_row and not pap_steps(model.net, model.images):
                    row = plain_row | dict(name=measure.name, same_as=plain)
                else:
                    began = time.perf_counter()
                    fields = measure.run(model, measure.source, index, args)
                    seconds = round(time.perf_counter() - began, 2)
                    row = about | fields | dict(seconds=seconds)
                common.append_row(path, row)                        # rank 0 writes
                finished[key] = row
            shown.append(finished[key])

    print0(f"\n{rows_table(shown)}\n")
    over_seeds = ""
    if len(models) > 1:
        over_seeds = seeds_table(shown)
    if over_seeds:
        print0(f"{over_seeds}\n")
    fewest = min(row["images"] for row in shown)
    print0(f"The rows are in {path}. Compare numbers within a line only. An accuracy of "
           f"50 % on {fewest} images has a 95 % interval of "
           f"±{1.96 * 50 / fewest ** 0.5:.0f} points.")
    if not over_seeds:
        print0("One network per variant is not enough to rank variants: train several "
               "seeds.")


if __name__ == "__main__":
    common.run(main)
