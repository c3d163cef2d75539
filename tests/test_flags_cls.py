"""Every flag of train_cls.py does what it says. A run with every flag away from its default equals, in log and
weights, a plain loop of timm's and torch's own parts; and each flag alone changes what the table says, no more."""

import math
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

import common
import train_cls
from data import augment
from data import images as data_images
from data.rng import uniform
from data.shapes import load_shapes
from runs import COUNT, LATER, RUN, assert_close, call, changed, observe, rows
from vit import ViT, ViTConfig

timm = pytest.importorskip("timm")
from timm.data.mixup import mixup_target                                                          # noqa: E402
from timm.loss import SoftTargetCrossEntropy                                                      # noqa: E402
from timm.optim import param_groups_weight_decay                                                  # noqa: E402
from timm.scheduler import CosineLRScheduler                                                      # noqa: E402
from timm.utils import ModelEmaV3, accuracy                                                       # noqa: E402

pytestmark = pytest.mark.usefixtures("alone")


# --- the recipe as a plain loop ------------------------------------------------------------------------------------

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
    images = augment.random_crop(images, draw(2, augment.CROP), f.pad)
    images = torch.where(draw(1, augment.FLIP).view(-1, 1, 1, 1) < 0.5, images.flip(3), images)
    images = augment.rand_augment(images, draw(4 * f.num_ops, augment.RAND_AUGMENT), num_ops=f.num_ops)
    return augment.random_erase(images / 255, draw(augment.ERASE_COLUMNS, augment.ERASE), position, f.seed, prob=f.erase)


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
        images, lam = torch.where(box, partner, images), 1 - box.double().mean().item()
    else:
        images = lam * images + (1 - lam) * partner
    return images, mixup_target(labels[order], num_classes, lam, f.smoothing)[back]


@torch.no_grad()
def evaluated(model, images, labels):
    images, labels = images[labels >= 0], labels[labels >= 0]
    logits = model.eval()(images / 255)
    model.train()
    top1, top5 = accuracy(logits, labels, (1, 5))
    return dict(top1=top1.item(), top5=top5.item(), loss=F.cross_entropy(logits, labels).item(), images=len(labels))


def plain_loop(f, load, n, num_classes, test, model):
    """The recipe, with flags f. load(index, position): images, labels. Returns log, average."""
    epoch_steps = n // f.batch_size
    groups = param_groups_weight_decay(model, f.weight_decay, no_weight_decay_list=("pos_embed", "cls_token"))
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
        images, targets = mixed(f, augmented(f, images, position), labels, num_classes, step)
        torch.manual_seed(hash((f.seed, step, 0)) % 2 ** 63)                                       # drop-path masks
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
            scores = dict(evaluated(model, *test), ema_top1=evaluated(average.module, *test)["top1"])
            about = common.key_statistics(model, model, test[0][:32] / 255)
            rows.append(dict(step=step, epoch=epoch, eval=scores, **about))
    return rows, average.module


# Every flag is away from its default and from its recipe; for LEFT_OUT see the table and test_train_cls.py.
FLAGS = dict(model="micro", image_size=16, patch_size=8, attn="rpc_asym", rpc_layers="1,3", n_iter=3, lambd=0.3,
             form="paper", drop_path=0.3, init="default", epochs=3, batch_size=8, accum=2, lr=3e-3, min_lr=2e-3,
             warmup_epochs=0.5, weight_decay=0.4, clip=0.7, ema=0.6, pad=3, num_ops=3, erase=0.6, mixup=0.3,
             cutmix=0.5, smoothing=0.2, repeats=2, seed=5, device="cpu", max_steps=10, log_every=3, eval_every=2,
             save_every=5, keep_every=2, out_dir="a")
SHAPES = dict(FLAGS, data="shapes", num_images=60, holdout=28)
IMAGENET = dict(FLAGS, data="imagenet", data_dir="tree", num_workers=2, skip_bad_images=True, init_from="start.pt")
LEFT_OUT = {"amp", "compile", "download", "resume"}


def the_model(num_classes):
    return ViT(ViTConfig(image_size=16, patch_size=8, num_classes=num_classes, embed_dim=96, depth=6, num_heads=3,
                         attn="rpc_asym", rpc_layers=(1, 3), n_iter=3, lambd=0.3, form="paper", drop_path=0.3,
                         init="default"))


BROKEN = {Path("tree/train/n1/4.png"), Path("tree/val/n3/0.png")}                              # after n1/4 comes n2


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


def tree_files(split):
    """[(path, label)] in order."""
    return [(path, int(path.parent.name[1:])) for path in sorted(Path("tree", split).glob("*/*.png"))]


def training_crops(index, position, skipped):
    """Random resized crops; for a file that cannot be read the next one, with its own label."""
    files, images, labels = tree_files("train"), [], []
    draws = uniform(position, 22, FLAGS["seed"], data_images.CROP).tolist()
    for i, draw in zip(index.tolist(), draws):
        if files[i][0] in BROKEN:
            skipped.append(i)
            i += 1
        image = TF.pil_to_tensor(Image.open(files[i][0]))
        left, top, width, height = data_images.random_crop_box(image.shape[2], image.shape[1], draw)
        images.append(TF.resized_crop(image, top, left, height, width, [16, 16], TF.InterpolationMode.BICUBIC,
                                      antialias=True))
        labels.append(files[i][1])
    return torch.stack(images), torch.tensor(labels)


def central_crops():
    """The evaluation images; in place of a file that cannot be read black, of class -1."""
    images, labels = [], []
    for path, label in tree_files("val"):
        broken = path in BROKEN
        image = torch.zeros(3, 20, 20, dtype=torch.uint8) if broken else TF.pil_to_tensor(Image.open(path))
        image = TF.resize(image, [int(16 / 0.875)], TF.InterpolationMode.BICUBIC, antialias=True)
        images.append(TF.center_crop(image, [16, 16]))
        labels.append(-1 if broken else label)
    return torch.stack(images), torch.tensor(labels)


def assert_same(weights, expected):
    """But for the keys' bias in softmax attention: it has no effect, its gradient is rounding."""
    assert weights.keys() == expected.keys()
    for name, w in weights.items():
        w, e = w.clone(), expected[name].clone()
        if name in [f"blocks.{i}.attn.qkv.bias" for i in (0, 2, 4, 5)]:
            w[96:192] = e[96:192] = 0
        torch.testing.assert_close(w, e, rtol=0, atol=5e-6, msg=lambda m: f"{name}: {m}")


def defaults(**flags):
    return vars(call(train_cls.get_args, **flags))


def test_every_flag_is_away_from_its_default_in_one_of_the_runs():
    for flags in (SHAPES, IMAGENET):
        usual = defaults(data=flags["data"], attn="rpc_asym") | {"attn": defaults()["attn"]}       # init follows attn
        assert not [name for name in FLAGS if str(usual[name]) == str(flags[name])]
    assert set(defaults()) == {*SHAPES, *IMAGENET, *LEFT_OUT} == {*TABLE, *IMAGENET, "download", "resume"}


def test_a_run_on_shapes_equals_the_plain_loop():
    call(train_cls.main, **SHAPES)
    f, checkpoint = SimpleNamespace(**SHAPES), common.load("a")
    everything = load_shapes("train", 60, 16)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))                       # for every seed
    held, kept = order[:28], order[28:]

    def load(index, position):
        return everything.images[kept][index], everything.labels[kept][index]
    torch.manual_seed(f.seed)
    model = the_model(10)
    test = everything.images[held], everything.labels[held]
    expected, average = plain_loop(f, load, 32, 10, test, model)
    assert {path.name for path in Path("a").glob("*.*")} == {"log.jsonl", "last.pt", "epoch_2.pt"}
    for row, what in zip(rows("a"), expected, strict=True):
        assert_close(row, what)
    assert_same(checkpoint["model"], model.state_dict())
    assert_same(checkpoint["ema"], average.state_dict())


def test_a_run_on_imagenets_layout_equals_the_plain_loop(monkeypatch):
    make_tree()
    torch.manual_seed(1)
    given = the_model(10)                                                               # the tree has 7 classes
    torch.save({"model": given.state_dict()}, "start.pt")
    workers = []

    def loader(*args, **how):
        workers.append(how["num_workers"])
        return DataLoader(*args, **how)
    monkeypatch.setattr(data_images, "DataLoader", loader)
    call(train_cls.main, **IMAGENET)
    assert set(workers) == {2}
    f, checkpoint, found = SimpleNamespace(**IMAGENET), common.load("a"), rows("a")
    torch.manual_seed(f.seed)
    model = the_model(7)
    head = {k: v for k, v in model.state_dict().items() if k.startswith("head")}
    model.load_state_dict({**given.state_dict(), **head})

    bad = []
    expected, average = plain_loop(f, partial(training_crops, skipped=bad), 35, 7, central_crops(), model)
    skipped = [row["eval"].pop("skipped") for row in found if "eval" in row]
    assert skipped[-1] == len(bad) > 0
    for row, what in zip(found, expected, strict=True):
        assert_close(row, what)
    assert_same(checkpoint["model"], model.state_dict())
    assert_same(checkpoint["ema"], average.state_dict())


def test_an_evaluation_keeps_no_gradients_and_leaves_the_model_in_training_mode_on_every_process():
    split, model, enabled = load_shapes("test", 4, 16), the_model(10).train(), []
    model.register_forward_pre_hook(lambda *_: enabled.append(torch.is_grad_enabled()))
    args = SimpleNamespace(amp=False, image_size=16)
    train_cls.evaluate(model, split, args, torch.device("cpu"), 1, 2)
    assert enabled == [False] and all(module.training for module in model.modules())


# --- a flag changes what it says and nothing else --------------------------------------------------------------------

BASE = dict(model="nano", num_images=32, image_size=16, patch_size=8, attn="rpc", batch_size=16, epochs=2, lr=1e-3,
            min_lr=1e-5, warmup_epochs=0, clip=0.5, ema=0.5, log_every=1, out_dir="a")
RUN, LATER = RUN | {"average"}, LATER | {"average"}
CONFIG = RUN | {"config"}
TABLE = {
    "num_images": (64, RUN | COUNT | {"lr"}), "holdout": (16, RUN | COUNT | {"lr"}), "model": ("micro", CONFIG),
    "image_size": (24, CONFIG | {"batches"}), "patch_size": (4, CONFIG), "attn": ("symmetric", CONFIG),
    "rpc_layers": ("1", CONFIG), "n_iter": (5, CONFIG), "lambd": (0.1, CONFIG), "form": ("paper", CONFIG),
    "drop_path": (0.5, CONFIG), "init": ("trunc_normal", CONFIG), "init_from": ("start.pt", RUN),
    "epochs": (3, LATER | COUNT | {"lr"}), "batch_size": (8, RUN | COUNT | {"lr"}), "accum": (2, {"batches"}),
    "lr": (2e-3, LATER | {"lr"}), "min_lr": (5e-4, LATER | {"lr"}), "warmup_epochs": (1, LATER | {"lr"}),
    "weight_decay": (0.9, LATER), "clip": (0.1, LATER), "ema": (0.9, {"average"}), "pad": (2, RUN),
    "num_ops": (2, RUN), "erase": (0.9, RUN), "mixup": (0.8, RUN), "cutmix": (1.0, RUN), "smoothing": (0.3, RUN),
    "repeats": (2, RUN), "seed": (1, RUN), "device": ("cpu", {"asked for"}), "amp": (True, RUN),
    "compile": (True, {"compiled"}), "out_dir": ("b", {"folder"}), "max_steps": (3, LATER | COUNT),
    "log_every": (2, {"logged", "loss", "norm"}), "eval_every": (2, {"evaluated"}), "save_every": (1, {"saved"}),
    "keep_every": (1, {"saved", "files"}),
}
look = partial(observe, train_cls, ViT, ("head.weight", "blocks.1.attn.qkv.weight"), lambda row: row["eval"]["loss"])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("base"))
        return look(**BASE)


@pytest.mark.parametrize("flag", TABLE)
def test_a_flag_changes_what_the_table_says(base, flag):
    if flag == "init_from":
        torch.manual_seed(1)
        torch.save({"model": ViT(ViTConfig(**base["config"])).state_dict()}, "start.pt")
    value, expected = TABLE[flag]
    seen = look(**{**BASE, flag: value})
    assert changed(base, seen) == expected
    if flag == "lr":                                                                 # cosine of half the way, to 1e-5
        assert seen["lr"][0] - 1e-5 == pytest.approx((base["lr"][0] - 1e-5) * (2e-3 - 1e-5) / (1e-3 - 1e-5))


def test_download_reaches_torchvision_and_nothing_is_fetched_without_it(monkeypatch):
    asked = []

    class CIFAR10:
        data, targets = np.zeros((20, 32, 32, 3), np.uint8), [0, 1] * 10
        classes = list("abcdefghij")

        def __init__(self, folder, train, download):
            asked.append((folder, train, download))
    monkeypatch.setattr("torchvision.datasets.CIFAR10", CIFAR10)
    Path("files/cifar-10-batches-py").mkdir(parents=True)
    for download in (False, True):
        asked.clear()
        call(train_cls.main, data="cifar10", data_dir="files", model="nano", patch_size=16, batch_size=10,
             max_steps=1, device="cpu", download=download, out_dir=f"{download}")
        assert {question[:2] for question in asked} == {("files", True), ("files", False)}
        assert (("files", True, True) in asked) == download


# --- recipes ---------------------------------------------------------------------------------------------------------

OURS = dict(attn="rpc", rpc_layers="0", n_iter=4, lambd=4.0, form="released", min_lr=1e-5, weight_decay=0.05, seed=0)
PAPER = dict(OURS, model="tiny", image_size=224, patch_size=16, drop_path=0.1, epochs=300, batch_size=1024,
             lr=5e-4 * 1024 / 512, warmup_epochs=5, clip=0, ema=0.99996, pad=0, num_ops=2, erase=0.25, mixup=0.8,
             cutmix=1.0, smoothing=0.1, repeats=3)
SMALL = dict(OURS, image_size=32, patch_size=4, epochs=8, batch_size=64, warmup_epochs=1, clip=1, repeats=1,
             num_images=16000, holdout=0, ema=0, drop_path=0, num_ops=0, erase=0, mixup=0, cutmix=0)


@pytest.mark.parametrize("flags, recipe", [
    (dict(data="imagenet"), PAPER), (dict(data="imagenet", model="base"), dict(PAPER, model="base", clip=1)),
    (dict(data="shapes"), dict(SMALL, model="nano", lr=2e-3, pad=0, smoothing=0)),
    (dict(data="cifar10"), dict(SMALL, model="micro", lr=1e-3, pad=4, smoothing=0.1))])
def test_recipes_are_the_papers_and_those_of_the_results(flags, recipe):
    assert {k: v for k, v in defaults(**flags).items() if k in recipe} == recipe


def test_a_resumed_run_keeps_what_makes_its_model_and_its_batches():
    model = {flag for flag, (_, expected) in TABLE.items() if "config" in expected}
    assert set(train_cls.FIXED) == model | {"data", "num_images", "holdout", "batch_size", "repeats", "seed", "init_from"}
