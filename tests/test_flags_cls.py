"""Every flag of train_cls.py does what it says. A run with every flag away from its default equals,
in log and weights, a plain loop of timm's and torch's own parts; and each flag alone changes what
the table says, and nothing else."""

import json
import math
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.transforms.v2 import functional as TF

from data import augment
import common
from data import images as data
from data import images as data_images
from data.rng import uniform
import train_cls
from vit import ViT, ViTConfig

timm = pytest.importorskip("timm")
from timm.data.mixup import mixup_target                                               # noqa: E402
from timm.loss import SoftTargetCrossEntropy                                           # noqa: E402
from timm.optim import param_groups_weight_decay                                       # noqa: E402
from timm.scheduler import CosineLRScheduler                                           # noqa: E402
from timm.utils import ModelEmaV3, accuracy                                            # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def words(flags):
    """{flag: value} as on the command line; True and False are --flag and --no-flag."""
    for name, value in flags.items():
        if name in train_cls.SETTINGS:
            yield from ("--set", f"{name}={value}")
        elif value is True or value is False:
            yield f"--{name}" if value else f"--no-{name}"
        else:
            yield from (f"--{name}", str(value))


def train(**flags):
    """Run main() with these flags. Returns the rows of its log and its checkpoint."""
    before = sys.argv
    sys.argv = ["train_cls.py", *words(flags)]
    try:
        train_cls.main()
    finally:
        sys.argv = before
    with open(Path(flags["out_dir"], "log.jsonl")) as log:
        return [json.loads(line) for line in log], common.read_checkpoint(flags["out_dir"])


def defaults(**flags):
    """What the flags are when only these are given."""
    before = sys.argv
    sys.argv = ["train_cls.py", *words(flags)]
    try:
        return vars(train_cls.get_args())
    finally:
        sys.argv = before


# --- the recipe as a plain loop -------------------------------------------------------------------

def order_of(f, n, step):
    """The images of a step, (batch_size,): copies of one are neighbours, then they are spread."""
    epoch, i = divmod(step, n // f.batch_size)
    generator = torch.Generator().manual_seed(f.seed * 1_000_003 + epoch)
    order = torch.randperm(n, generator=generator).repeat_interleave(f.repeats)[:n]
    order = order[i * f.batch_size:(i + 1) * f.batch_size]
    return torch.cat([order[first::f.repeats] for first in range(f.repeats)])


def augmented(f, images, position):
    """Shift, flip, RandAugment, erase: the operations have tests of their own."""
    def draw(n, purpose):
        return uniform(position, n, f.seed, purpose)
    if f.pad:
        images = augment.random_crop(images, draw(2, augment.CROP), f.pad)
    flipped = draw(1, augment.FLIP).view(-1, 1, 1, 1) < 0.5
    images = torch.where(flipped, images.flip(3), images)
    u = draw(4 * f.num_ops, augment.RAND_AUGMENT)
    images = augment.rand_augment(images, u, num_ops=f.num_ops)
    u = draw(augment.ERASE_COLUMNS, augment.ERASE)
    return augment.random_erase(images / 255, u, position, f.seed, prob=f.erase)


def mixed(f, images, labels, num_classes, step):
    """Neighbours are partners; in the order below so is timm's partner, the reversed batch."""
    rng = np.random.default_rng([f.seed, step])
    cut = rng.random() < 0.5
    lam = rng.beta(f.cutmix, f.cutmix) if cut else rng.beta(f.mixup, f.mixup)
    order = torch.cat([torch.arange(0, len(labels), 2), torch.arange(1, len(labels), 2).flip(0)])
    back = order.argsort()
    partner = images[order].flip(0)[back]
    if cut:
        box = torch.zeros(images.shape[2:], dtype=torch.bool)
        h, w = (int(side * math.sqrt(1 - lam)) for side in box.shape)
        y, x = (int(rng.integers(side)) for side in box.shape)
        box[max(y - h // 2, 0):y + (h + 1) // 2, max(x - w // 2, 0):x + (w + 1) // 2] = True
        images = torch.where(box, partner, images)
        lam = 1 - box.double().mean().item()
    else:
        images = lam * images + (1 - lam) * partner
    return images, mixup_target(labels[order], num_classes, lam, f.smoothing)[back]


@torch.no_grad()
def evaluated(model, images, labels):
    images, labels = images[labels >= 0], labels[labels >= 0]
    logits = model.eval()(images / 255)
    model.train()
    top1, top5 = accuracy(logits, labels, (1, 5))
    loss = F.cross_entropy(logits, labels)
    return dict(top1=top1.item(), top5=top5.item(), loss=loss.item(), images=len(labels))


def plain_loop(f, load, n, num_classes, test, model):
    """The recipe, with flags f. load(index, position): images, labels. Returns log, average."""
    epoch_steps = n // f.batch_size
    groups = param_groups_weight_decay(model, f.weight_decay,
                                       no_weight_decay_list=("pos_embed", "cls_token"))
    optimizer = torch.optim.AdamW(groups, lr=f.lr, betas=(0.9, 0.999), eps=1e-8)
    schedule = CosineLRScheduler(optimizer, f.epochs * epoch_steps, f.min_lr, t_in_epochs=False,
                                 warmup_t=f.warmup_epochs * epoch_steps, warmup_lr_init=1e-6)
    average = ModelEmaV3(model, f.ema)
    rows, pending = [], []
    for step in range(f.max_steps):
        schedule.step_update(step)
        lr = optimizer.param_groups[0]["lr"]

        position = torch.arange(step * f.batch_size, (step + 1) * f.batch_size)
        images, labels = load(order_of(f, n, step), position)
        images = augmented(f, images, position)
        images, targets = mixed(f, images, labels, num_classes, step)
        torch.manual_seed(hash((f.seed, step, 0)) % 2 ** 63)                      # drop-path masks
        loss = 0.0
        for x, y in zip(images.chunk(f.accum), targets.chunk(f.accum)):
            part = SoftTargetCrossEntropy()(model(x), y) / f.accum
            part.backward()
            loss += part.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), f.clip).item()
        optimizer.step()
        optimizer.zero_grad()
        average.update(model, step + 1)

        step += 1
        pending.append((loss, norm))
        epoch, end = step / epoch_steps, step % epoch_steps == 0 or step == f.max_steps
        if end or step % f.log_every == 0 or step % f.save_every == 0:
            loss, norm = np.mean(pending, 0)
            rows.append(dict(step=step, epoch=epoch, loss=loss, grad_norm=norm, lr=lr))
            pending = []
        if step == f.max_steps or epoch % f.eval_every == 0:
            scores = evaluated(model, *test)
            scores["ema_top1"] = evaluated(average.module, *test)["top1"]
            about = common.key_statistics(model, model, test[0][:32] / 255)
            rows.append(dict(step=step, epoch=epoch, eval=scores, **about))
    return rows, average.module


# Every flag is away from its default and from its recipe; for LEFT_OUT see the end of the file.
FLAGS = dict(model="micro", image_size=16, patch_size=8, attn="rpc_asym", rpc_layers="1,3",
             n_iter=3, lambd=0.3, form="paper", drop_path=0.3, init="default", epochs=3,
             batch_size=8, accum=2, lr=3e-3, min_lr=2e-3, warmup_epochs=0.5, weight_decay=0.4,
             clip=0.7, ema=0.6, pad=3, num_ops=3, erase=0.6, mixup=0.3, cutmix=0.5, smoothing=0.2,
             repeats=2, seed=5, device="cpu", max_steps=10, log_every=3, eval_every=2,
             save_every=5, keep_every=2, out_dir="a")
SHAPES = dict(FLAGS, data="shapes", num_images=60, holdout=28)
IMAGENET = dict(FLAGS, data="imagenet", data_dir="tree", num_workers=2, skip_bad_images=True,
                init_from="start.pt")
LEFT_OUT = {"amp", "compile", "download", "resume"}                  # in the tables below


def the_model(num_classes):
    return ViT(ViTConfig(image_size=16, patch_size=8, num_classes=num_classes,
                         embed_dim=96, depth=6, num_heads=3,
                         attn="rpc_asym", rpc_layers=(1, 3), n_iter=3, lambd=0.3, form="paper",
                         drop_path=0.3, init="default"))


def make_tree(classes=7, train=5, val=3):
    """ImageNet's layout; one file of each split, BROKEN, cannot be read."""
    rng = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for k in range(classes):
            Path("tree", split, f"n{k}").mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (*rng.integers(20, 40, 2), 3), dtype=np.uint8)
                Image.fromarray(pixels).save(f"tree/{split}/n{k}/{i}.png")
    for path in BROKEN:
        path.write_bytes(b"nothing")


BROKEN = {Path("tree/train/n1/4.png"), Path("tree/val/n3/0.png")}    # after n1/4 comes n2


def tree_files(split):
    """[(path, label)] in order."""
    paths = sorted(Path("tree", split).glob("*/*.png"))
    return [(path, int(path.parent.name[1:])) for path in paths]


def pixels_of(path):
    return TF.pil_to_tensor(Image.open(path))


def training_crops(index, position, skipped):
    """Random resized crops; for a file that cannot be read the next one, with its own label."""
    files, images, labels = tree_files("train"), [], []
    draws = uniform(position, 22, FLAGS["seed"], data_images.CROP).tolist()
    for i, draw in zip(index.tolist(), draws):
        if files[i][0] in BROKEN:
            skipped.append(i)
            i += 1
        path, label = files[i]
        image = pixels_of(path)
        left, top, width, height = data.random_crop_box(image.shape[2], image.shape[1], draw)
        images.append(TF.resized_crop(image, top, left, height, width, [16, 16],
                                      TF.InterpolationMode.BICUBIC, antialias=True))
        labels.append(label)
    return torch.stack(images), torch.tensor(labels)


def central_crops():
    """The evaluation images; in place of a file that cannot be read black, of class -1."""
    images, labels = [], []
    for path, label in tree_files("val"):
        broken = path in BROKEN
        image = torch.zeros(3, 20, 20, dtype=torch.uint8) if broken else pixels_of(path)
        side = [int(16 / 0.875)]
        image = TF.resize(image, side, TF.InterpolationMode.BICUBIC, antialias=True)
        images.append(TF.center_crop(image, [16, 16]))
        labels.append(-1 if broken else label)
    return torch.stack(images), torch.tensor(labels)


def assert_close(row, expected):
    """A row of the log beside the loop's, numbers within float noise."""
    assert {k for k in row if k != "images_per_s"} == set(expected)
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_close(row[key], {str(k): v for k, v in value.items()})
        else:
            noise = 1.1e-4 if isinstance(value, list) else 1e-9                  # lists are rounded
            assert row[key] == pytest.approx(value, rel=5e-5, abs=noise), key


def assert_same(weights, expected):
    """But for the keys' bias in softmax attention: it has no effect, its gradient is rounding."""
    assert weights.keys() == expected.keys()
    for name, w in weights.items():
        w, e = w.clone(), expected[name].clone()
        if name in [f"blocks.{i}.attn.qkv.bias" for i in (0, 2, 4, 5)]:
            w[96:192] = e[96:192] = 0
        torch.testing.assert_close(w, e, rtol=0, atol=5e-6, msg=lambda m: f"{name}: {m}")


def test_every_flag_is_away_from_its_default_in_one_of_the_runs(tmp_path):
    torch.save({}, "start.pt")
    for flags in (SHAPES, IMAGENET):
        usual = defaults(data=flags["data"])
        for name in FLAGS:
            assert str(usual[name]) != str(flags[name]), name
    assert set(defaults()) == {*SHAPES, *IMAGENET, *LEFT_OUT}


def test_a_run_on_shapes_equals_the_plain_loop():
    rows, checkpoint = train(**SHAPES)
    f = SimpleNamespace(**SHAPES)
    everything = data.load_shapes("train", 60, 16)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))       # for every seed
    held, kept = order[:28], order[28:]

    def load(index, position):
        return everything.images[kept][index], everything.labels[kept][index]
    test = everything.images[held], everything.labels[held]
    torch.manual_seed(f.seed)
    model = the_model(10)
    expected, average = plain_loop(f, load, 32, 10, test, model)
    assert {path.name for path in Path("a").iterdir()} == {"log.jsonl", "last.pt", "epoch_2.pt"}
    for row, what in zip(rows[1:], expected, strict=True):
        assert_close(row, what)
    assert_same(checkpoint["model"], model.state_dict())
    assert_same(checkpoint["ema"], average.state_dict())


def test_a_run_on_imagenets_layout_equals_the_plain_loop(monkeypatch):
    make_tree()
    torch.manual_seed(1)
    given = the_model(10)                                               # the tree has 7 classes
    torch.save({"model": given.state_dict()}, "start.pt")
    workers = []

    def loader(*args, **how):
        workers.append(how["num_workers"])
        return DataLoader(*args, **how)
    monkeypatch.setattr("data.files.DataLoader", loader)
    rows, checkpoint = train(**IMAGENET)
    assert set(workers) == {2}
    f = SimpleNamespace(**IMAGENET)
    torch.manual_seed(f.seed)
    model = the_model(7)
    head = {k: v for k, v in model.state_dict().items() if k.startswith("head")}
    model.load_state_dict({**given.state_dict(), **head})

    bad = []
    load = partial(training_crops, skipped=bad)
    expected, average = plain_loop(f, load, 35, 7, central_crops(), model)
    skipped = [row["eval"].pop("skipped") for row in rows if "eval" in row]
    assert skipped[-1] == len(bad) > 0
    for row, what in zip(rows[1:], expected, strict=True):
        assert_close(row, what)
    assert_same(checkpoint["model"], model.state_dict())
    assert_same(checkpoint["ema"], average.state_dict())


def test_training_goes_on_in_training_mode_after_an_evaluation():
    """Seen in the weights by a process that is not the first only."""
    split = data.load_shapes("test", 4, 16)
    model = the_model(10).train()
    args = SimpleNamespace(amp=False, image_size=16)
    train_cls.evaluate(model, split, args, torch.device("cpu"), rank=1, world=2)
    assert all(module.training for module in model.modules())


# --- a flag changes what it says and nothing else -------------------------------------------------

BASE = dict(model="nano", num_images=32, image_size=16, patch_size=8, attn="rpc", batch_size=16,
            epochs=2, lr=1e-3, min_lr=1e-5, warmup_epochs=0, clip=0.5, ema=0.5, log_every=1,
            out_dir="a")
RUN = {"loss", "norm", "weights", "average", "score"}                # from the first step on
LATER = {"weights", "average", "score"}                              # after the first step
COUNT = {"logged", "evaluated", "saved", "batches"}                  # another number of steps
TABLE = {
    "num_images": (64, RUN | COUNT | {"lr"}),
    "holdout": (16, RUN | COUNT | {"lr"}),
    "model": ("micro", RUN | {"config"}),
    "image_size": (24, RUN | {"config"}),
    "patch_size": (4, RUN | {"config"}),
    "attn": ("symmetric", RUN | {"config"}),
    "rpc_layers": ("1", RUN | {"config"}),
    "n_iter": (5, RUN | {"config"}),
    "lambd": (0.1, RUN | {"config"}),
    "form": ("paper", RUN | {"config"}),
    "drop_path": (0.5, RUN | {"config"}),
    "init": ("trunc_normal", RUN | {"config"}),
    "init_from": ("start.pt", RUN),
    "epochs": (3, LATER | COUNT | {"lr"}),
    "batch_size": (8, RUN | COUNT | {"lr"}),
    "accum": (2, {"batches"}),
    "lr": (2e-3, LATER | {"lr"}),
    "min_lr": (5e-4, LATER | {"lr"}),
    "warmup_epochs": (1, LATER | {"lr"}),
    "weight_decay": (0.9, LATER),
    "clip": (0.1, LATER),
    "ema": (0.9, {"average"}),
    "pad": (2, RUN),
    "num_ops": (2, RUN),
    "erase": (0.9, RUN),
    "mixup": (0.8, RUN),
    "cutmix": (1.0, RUN),
    "smoothing": (0.3, RUN),
    "repeats": (2, RUN),
    "seed": (1, RUN),
    "device": ("cpu", {"asked for"}),
    "amp": (True, RUN),
    "compile": (True, {"compiled"}),
    "out_dir": ("b", {"folder"}),
    "max_steps": (3, LATER | COUNT),
    "log_every": (2, {"logged", "loss", "norm"}),
    "eval_every": (2, {"evaluated"}),
    "save_every": (1, {"saved"}),
    "keep_every": (1, {"saved"}),
}


def observe(**flags):
    """Run main(); what can be seen of it, by name."""
    seen = dict(saved=set(), batches=[], compiled=0)
    with pytest.MonkeyPatch.context() as patch:
        real = dict(setup=common.setup, save=common.save_checkpoint, forward=ViT.forward)

        def setup(device):
            seen["asked for"] = device
            return real["setup"]("cpu")

        def save(path, checkpoint):
            seen["saved"].add((Path(path).name, checkpoint["step"]))
            seen["folder"] = str(Path(path).parent)
            real["save"](path, checkpoint)

        def forward(model, images):
            seen["batches"] += [len(images)] * model.training
            return real["forward"](model, images)

        def compiled(model):
            def call(images):
                seen["compiled"] += 1
                return model(images)
            return call
        patch.setattr(common, "setup", setup)
        patch.setattr(common, "save_checkpoint", save)
        patch.setattr(ViT, "forward", forward)
        patch.setattr(torch, "compile", compiled)
        rows, checkpoint = train(**flags)

    steps = [row for row in rows if "loss" in row]
    last = [row for row in rows if "eval" in row][-1]
    names = "head.weight", "blocks.1.attn.qkv.weight"
    return dict(seen, config=checkpoint["model_config"], loss=steps[0]["loss"],
                norm=steps[0]["grad_norm"], lr=[row["lr"] for row in steps if row["step"] == 2],
                weights=[checkpoint["model"][name] for name in names],
                average=[checkpoint["ema"][name] for name in names],
                score=last["eval"]["loss"], logged=[row["step"] for row in steps],
                evaluated=[row["step"] for row in rows if "eval" in row])


def same(a, b):
    """Equal but for float noise."""
    if isinstance(a, float):
        return a == pytest.approx(b, rel=1e-5)
    if isinstance(a, list) and torch.is_tensor(a[0]):
        return all(x.shape == y.shape and (x - y).abs().max() < 2e-5 for x, y in zip(a, b))
    return a == b


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return observe(**BASE)


@pytest.mark.parametrize("flag", TABLE)
def test_a_flag_changes_what_the_table_says(base, flag):
    if flag == "init_from":
        torch.manual_seed(1)
        torch.save({"model": ViT(ViTConfig(**base["config"])).state_dict()}, "start.pt")
    value, changes = TABLE[flag]
    seen = observe(**{**BASE, flag: value})
    assert {name for name in base if not same(base[name], seen[name])} == changes


def test_an_evaluation_keeps_no_gradients():
    split, model, enabled = data.load_shapes("test", 4, 16), the_model(10), []
    model.register_forward_pre_hook(lambda *_: enabled.append(torch.is_grad_enabled()))
    train_cls.evaluate(model, split, SimpleNamespace(amp=False), torch.device("cpu"), 0, 1)
    assert enabled == [False]


def test_download_reaches_torchvision_and_nothing_is_fetched_without_it(monkeypatch):
    asked = []

    class CIFAR10:
        data, targets = np.zeros((20, 32, 32, 3), np.uint8), [0, 1] * 10
        classes = list("abcdefghij")

        def __init__(self, folder, train, download):
            asked.append((folder, train, download))
    monkeypatch.setattr("torchvision.datasets.CIFAR10", CIFAR10)
    Path("files/cifar-10-batches-py").mkdir(parents=True)
    flags = dict(data="cifar10", data_dir="files", model="nano", patch_size=16, batch_size=10,
                 max_steps=1, device="cpu")
    for download in (False, True):
        asked.clear()
        train(**flags, download=download, out_dir=f"{download}")
        assert {question[:2] for question in asked} == {("files", True), ("files", False)}
        assert (("files", True, True) in asked) == download


def test_the_default_is_the_papers_recipe():
    """spec: DeiT's recipe, tiny, on ImageNet; the paper's first model."""
    recipe = dict(model="tiny", image_size=224, patch_size=16, attn="rpc", rpc_layers="0", n_iter=4,
                  lambd=4.0, form="released", drop_path=0.1, epochs=300, batch_size=1024,
                  lr=5e-4 * 1024 / 512, min_lr=1e-5, warmup_epochs=5, weight_decay=0.05, clip=0,
                  ema=0.99996, pad=0, num_ops=2, erase=0.25, mixup=0.8, cutmix=1.0, smoothing=0.1,
                  repeats=3, seed=0)
    assert {k: v for k, v in defaults(data="imagenet").items() if k in recipe} == recipe
    assert defaults(data="imagenet", model="base")["clip"] == 1           # Robust/run.sh


@pytest.mark.parametrize("name, own", [
    ("shapes", dict(model="nano", lr=2e-3, pad=0, smoothing=0)),
    ("cifar10", dict(model="micro", lr=1e-3, pad=4, smoothing=0.1))])
def test_the_recipes_of_small_images_are_those_of_the_results(name, own):
    recipe = dict(image_size=32, patch_size=4, attn="rpc", rpc_layers="0", n_iter=4, lambd=4.0,
                  form="released", epochs=8, batch_size=64, min_lr=1e-5, warmup_epochs=1,
                  weight_decay=0.05, clip=1, repeats=1, num_images=16000, holdout=0, seed=0)
    recipe |= own | dict.fromkeys(("ema", "drop_path", "num_ops", "erase", "mixup", "cutmix"), 0)
    assert {k: v for k, v in defaults(data=name).items() if k in recipe} == recipe


def test_a_resumed_run_keeps_what_makes_its_model_and_its_batches():
    model = {flag for flag, (_, changes) in TABLE.items() if "config" in changes}
    batches = {"data", "num_images", "holdout", "batch_size", "repeats", "seed"}
    assert set(train_cls.FIXED) == model | batches


def test_the_tables_name_every_flag():
    assert {*TABLE, *IMAGENET, "download", "resume"} == set(defaults())
