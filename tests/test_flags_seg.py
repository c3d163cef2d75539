"""Every flag of train_seg.py does what it says: a plain loop of torch's own parts and a run with every flag away
from its default give the same log and weights; and each flag alone changes what the table says, no more."""

import math
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import common
import train_seg
from data import segmentation, views
from data.rng import uniform
from data.shapes import load_shapes
from robust import corruptions, iou
from runs import COUNT, LATER, RUN, call, changed, observe, rows
from segmenter import Segmenter, SegmenterConfig, predict, segmenter_from_checkpoint

pytestmark = pytest.mark.usefixtures("alone")
SIZES = [(40, 60), (60, 40), (33, 70), (48, 48), (90, 30), (24, 41), (50, 61), (30, 30), (44, 52)]


def make_tree():
    """Nine training and five validation images of 4 classes, with ignored pixels."""
    rng = np.random.default_rng(0)
    for split, count in (("training", 9), ("validation", 5)):
        for part in ("images", "annotations"):
            Path("tree", part, split).mkdir(parents=True)
        for i, (H, W) in enumerate(SIZES[:count]):
            label = rng.integers(0, 5, (4, 4), dtype=np.uint8)
            label = np.kron(label, np.ones((-(-H // 4), -(-W // 4)), np.uint8))[:H, :W]
            image = (label[..., None] * [50, 20, 0] + rng.integers(0, 50, (H, W, 3))).astype(np.uint8)
            Image.fromarray(image).save(f"tree/images/{split}/{i}.png")
            Image.fromarray(label).save(f"tree/annotations/{split}/{i}.png")


def read_tree(split):
    """[(image, label)] with classes from 0 and 255 for what is ignored."""
    pairs = []
    for path in sorted(Path("tree/images", split).glob("*.png")):
        image = torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1)
        label = np.array(Image.open(str(path).replace("images", "annotations"))).astype(int)
        pairs.append((image, torch.from_numpy(np.where(label == 0, 255, label - 1)).byte()))
    return pairs


def shapes(split, n, size):
    split = load_shapes(split, n, size)
    return list(zip(split.images, split.masks))


# --- the recipe as a plain loop ------------------------------------------------------------------------------------

def plain_view(image, label, u, f):
    """Resize to fit in 4 size r by size r, crop (drawn again while it is dull), flip."""
    r = f.min_scale + (f.max_scale - f.min_scale) * u[0]
    factor = min(int(4 * f.size * r) / max(label.shape), int(f.size * r) / min(label.shape))
    (H, W), (h, w) = label.shape, (int(side * factor + 0.5) for side in label.shape)
    image = views.resize(image, h, w)
    label = label[torch.arange(h) * H // h][:, torch.arange(w) * W // w]                                  # nearest

    for down, across in zip(u[1:23:2], u[2:23:2]):
        top, left = int(down * (max(h - f.size, 0) + 1)), int(across * (max(w - f.size, 0) + 1))
        at = slice(top, top + f.size), slice(left, left + f.size)
        counts = label[at][label[at] != 255].unique(return_counts=True)[1].tolist()
        if len(counts) > 1 and max(counts) / sum(counts) < 0.75 or h <= f.size and w <= f.size:
            break
    image, label = image[:, *at], label[at]
    return (image.flip(2), label.flip(1)) if u[23] < 0.5 else (image, label)


def test_a_view_is_the_plain_one_and_padding_has_no_class():
    make_tree()
    f, pairs = SimpleNamespace(size=24, min_scale=0.6, max_scale=1.6), read_tree("training")
    for i, u in enumerate(uniform(torch.arange(400), 24, 1, 30).tolist()):
        image, label = plain_view(*pairs[i % 9], u, f)
        h, w = label.shape
        got, classes, *shape = views.training_view(*pairs[i % 9], u, 24, (0.6, 1.6))
        assert shape == [h, w] and torch.equal(got[:, :h, :w], image)
        assert torch.equal(classes, F.pad(label, (0, 24 - w, 0, 24 - h), value=255))


def plain_batch(f, source, step, mean):
    """Images, the mean colour where they are padded, and labels, 255 there."""
    n = len(source)
    epoch, i = divmod(step, math.ceil(n / f.batch_size))
    order = torch.randperm(n, generator=torch.Generator().manual_seed(f.seed * 1_000_003 + epoch)).tolist()
    first, images, labels = i * f.batch_size, [], []
    for j, index in enumerate(order[first:first + f.batch_size]):
        position = torch.tensor([epoch * n + first + j])
        image, label = plain_view(*source[index], uniform(position, 24, f.seed, 30)[0].tolist(), f)
        if f.distort:
            image = views.distort(image[None], uniform(position, 9, f.seed, 31))[0]
        h, w = label.shape
        images.append(mean.repeat(1, f.size, f.size))
        images[-1][:, :h, :w] = image / 255
        labels.append(F.pad(label.long(), (0, f.size - w, 0, f.size - h), value=255))
    return torch.stack(images), torch.stack(labels)


def plain_scores(pairs, K):
    """Metrics of [(label, prediction)], class by class."""
    truth, guess = (torch.cat([t.flatten().long() for t in part]) for part in zip(*pairs))
    guess, truth = guess[truth != 255], truth[truth != 255]
    of = [(truth == k, guess == k) for k in range(K)]
    accuracy = [(100 * (t & g).sum() / t.sum()).item() for t, g in of]
    iou = [(100 * (t & g).sum() / (t | g).sum()).item() for t, g in of]
    return dict(pixel_accuracy=100 * (truth == guess).float().mean().item(), mean_accuracy=np.nanmean(accuracy),
                mean_iou=np.nanmean(iou), accuracy=accuracy, iou=iou, images=len(pairs),
                classes=int(np.isfinite(iou).sum()), classes_in_truth=int(np.isfinite(accuracy).sum()))


def plain_predictions(f, model, images, seen):
    """Classes per pixel, one image at a time; the probabilities are appended to seen."""
    more = {name: getattr(f, name) for name in ("scales", "flip") if hasattr(f, name)}
    for image in images:
        with torch.autocast("cpu", torch.bfloat16, enabled=f.amp):
            p = predict(model.eval(), image, size=f.size, window=f.window, stride=f.stride, **more)
        seen.append(p)
        yield p.argmax(0)


def spy(monkeypatch):
    """The list to which an evaluation's predictions are appended from now on."""
    seen, real = [], iou.predict
    monkeypatch.setattr(iou, "predict", lambda *args, **how: seen.append(real(*args, **how)) or seen[-1])
    return seen


def plain_loop(f, source, val, model, K, seen):
    """The recipe, f its flags. Returns the rows of the log; the model is trained in place."""
    val_images, val_labels = zip(*val)
    epoch_steps = math.ceil(len(source) / f.batch_size)
    groups = dict(params=[], weight_decay=f.weight_decay), dict(params=[], weight_decay=0)
    for name, p in model.named_parameters():
        groups[p.ndim == 1 or name.endswith(("pos_embed", "cls_token", "cls_emb"))]["params"].append(p)
    optimizer = (torch.optim.SGD(groups, f.lr, momentum=0.9, nesterov=True) if f.optimizer == "sgd"
                 else torch.optim.AdamW(groups, f.lr))
    rows, pending, total = [], [], f.epochs * epoch_steps
    for step in range(f.max_steps):
        lr = (f.lr - f.min_lr) * (1 - step / total) ** 0.9 + f.min_lr
        for group in optimizer.param_groups:
            group["lr"] = lr
        images, labels = plain_batch(f, source, step, model.encoder.mean)
        torch.manual_seed(hash((f.seed, step, 0)) % 2 ** 63)                                   # dropout, drop path
        with torch.autocast("cpu", torch.bfloat16, enabled=f.amp):
            logits = model.train()(images)
        loss = F.cross_entropy(logits.float(), labels, ignore_index=255)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), f.clip)
        optimizer.step()

        step, pending = step + 1, [*pending, (loss.item(), norm.item())]
        at = dict(step=step, epoch=step / epoch_steps)
        if step % f.log_every == 0 or step % f.save_every == 0 or step % epoch_steps == 0 or step == f.max_steps:
            loss, norm = np.mean(pending, 0)
            rows.append(dict(at, loss=loss, grad_norm=norm, lr=lr))
            pending = []
        if step == f.max_steps or step % (f.eval_every * epoch_steps) == 0:
            about = common.key_statistics(model, model.masks, images[:8])
            pairs = list(zip(val_labels, plain_predictions(f, model, val_images, seen)))
            rows.append(dict(at, eval=plain_scores(pairs, K), **about))
    return rows


# Every flag is away from its default and from its recipe in one of these; LEFT_OUT: below, or test_train_seg.py.
FLAGS = dict(model="micro", patch_size=8, n_iter=3, lambd=0.3, form="paper", rpc_layers="1,3", drop_path=0.3,
             dropout=0.3, size=24, min_scale=0.6, max_scale=1.6, epochs=4, batch_size=4, lr=3e-3, min_lr=1e-3,
             weight_decay=0.4, clip=0.5, window=16, stride=12, save_images=2, seed=5, device="cpu", out_dir="a",
             max_steps=10, log_every=2, eval_every=2, save_every=4, keep_every=2)
RUNS = {
    "shapes": dict(FLAGS, attn="rpc_asym", num_images=11, decoder="linear", optimizer="sgd", distort=True, amp=True, lr=0.1),
    "camvid": dict(FLAGS, attn="sym_asym", data="camvid", data_dir="tree", num_classes=4, optimizer="sgd", distort=False,
                   num_workers=3),
    "ade20k": dict(FLAGS, attn="rpc", data="ade20k", data_dir="tree", num_classes=4, eval_every=1, optimizer="adamw",
                   distort=False, num_workers=0, lr=1e-2)}
LEFT_OUT = {"compile", "resume", "backbone", "data", "data_dir"}


def the_model(flags, K):
    torch.manual_seed(5)
    return Segmenter(SegmenterConfig(
        num_classes=K, image_size=24, patch_size=8, embed_dim=96, depth=6, num_heads=3, mlp_ratio=4.0,
        attn=flags["attn"], rpc_layers=(1, 3), n_iter=3, lambd=0.3, form="paper", drop_path=0.3, eps=1e-5,
        decoder=flags.get("decoder", "mask"), decoder_depth=2, decoder_heads=1,
        decoder_attn="symmetric" if flags["attn"] == "rpc" else "softmax", decoder_dropout=0.3))


def assert_rows(got, expected):
    """Metrics of a log are rounded, and None where undefined."""
    assert [(row["step"], sorted(row)) for row in got] == [(row["step"], sorted(row)) for row in expected]
    for ours, theirs in zip(got, expected):
        for name, value in theirs.items():
            if name == "eval":
                compare(ours[name], value)
            elif name == "nonzero_S":
                assert ours[name] == {str(layer): pytest.approx(share, abs=1e-3) for layer, share in value.items()}
            else:
                assert ours[name] == pytest.approx(value, rel=1e-4), (ours["step"], name)


def compare(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        mine = [math.nan if x is None else x for x in ours[name]] if isinstance(value, list) else ours[name]
        assert mine == pytest.approx(value, abs=1e-3, nan_ok=True), name


def assert_same_predictions(seen, expected):
    for p, q in zip(seen, expected, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_with_every_flag_away_from_its_default_is_the_plain_loop(name, monkeypatch):
    flags, drawn, loaders, seen, expected = RUNS[name], [], [], spy(monkeypatch), []
    f = SimpleNamespace(**{"amp": False, **flags})
    if name == "shapes":
        source, val, K = shapes("train", 11, 24), shapes("test", 1, 24), 11
    else:
        make_tree()
        source, val, K = read_tree("training"), read_tree("validation"), 4
    monkeypatch.setattr(train_seg, "save_pictures", lambda path, triples, classes: drawn.extend(zip(*triples)))
    real, evaluate = torch.utils.data.DataLoader.__init__, train_seg.evaluate

    def recorded(self, *args, num_workers=0, persistent_workers=None, prefetch_factor=None, **how):
        loaders.append(num_workers)
        real(self, *args, **how)                                                                # without processes
    monkeypatch.setattr(torch.utils.data.DataLoader, "__init__", recorded)

    def evaluated(model, *args, **how):
        metrics = evaluate(model, *args, **how)
        assert model.training                                                                    # goes on as it was
        return metrics
    monkeypatch.setattr(train_seg, "evaluate", evaluated)
    call(train_seg.main, **flags)
    assert set(loaders) == {flags.get("num_workers", 0)}                                               # all of them

    model, checkpoint = the_model(flags, K), common.load("a")
    assert checkpoint["model_config"] == asdict(model.config)
    assert_rows(rows("a"), plain_loop(f, source, val, model, K, expected))
    weights = model.state_dict()
    assert weights.keys() == checkpoint["model"].keys()
    for key, value in checkpoint["model"].items():
        torch.testing.assert_close(value, weights[key], rtol=1e-4, atol=1e-5, msg=key)
    assert {path.name for path in Path("a").glob("*.*")} == {"log.jsonl", "last.pt", "epoch_2.pt"}

    images, labels = zip(*val[::3])                                                          # of 5: first, fourth
    pictures = images, labels, list(plain_predictions(f, model, images, expected))
    for got, picture in zip(drawn, pictures, strict=True):
        assert all(torch.equal(a.long(), b.long()) for a, b in zip(got, picture, strict=True))
    assert_same_predictions(seen, expected)


def test_every_flag_is_in_a_run_and_in_the_table():
    away = set(LEFT_OUT)
    for name, run in RUNS.items():
        default = vars(call(train_seg.get_args, data=name))
        away |= {flag for flag, value in run.items() if default[flag] != value}
    assert set(default) == away == {*TABLE, "num_classes", "num_workers", "out_dir", *LEFT_OUT}


# --- a flag changes what it says and nothing else --------------------------------------------------------------------

BASE = dict(data="shapes", num_images=10, size=16, patch_size=8, window=8, batch_size=5, epochs=2, lr=2e-3, lambd=0.3,
            min_lr=1e-5, save_images=0, log_every=1)                                 # 4 steps, one validation image
CONFIG = RUN | {"config"}
TABLE = {
    "num_images": (9, RUN | {"batches"}), "model": ("micro", CONFIG), "patch_size": (4, CONFIG),
    "attn": ("symmetric", CONFIG), "rpc_layers": ("1", CONFIG), "n_iter": (2, CONFIG), "lambd": (0.1, CONFIG),
    "form": ("paper", CONFIG), "decoder": ("linear", CONFIG), "drop_path": (0.5, CONFIG), "dropout": (0.5, CONFIG),
    "size": (24, CONFIG | {"batches"}), "min_scale": (0.5, RUN), "max_scale": (2, RUN), "distort": (True, RUN),
    "epochs": (3, LATER | COUNT | {"lr"}), "batch_size": (4, RUN | COUNT | {"lr"}), "optimizer": ("sgd", LATER),
    "lr": (1e-3, LATER | {"lr"}), "min_lr": (1e-3, LATER | {"lr"}), "weight_decay": (0.5, LATER),
    "clip": (0.01, LATER), "window": (16, {"score"}), "stride": (4, {"score"}), "save_images": (1, {"files"}),
    "seed": (1, RUN), "device": ("cpu", {"asked for"}), "amp": (True, RUN), "compile": (True, {"compiled"}),
    "max_steps": (3, LATER | COUNT), "log_every": (2, {"logged", "loss", "norm"}), "eval_every": (1, {"evaluated"}),
    "save_every": (1, {"saved"}), "keep_every": (1, {"saved", "files"}),
}


def look(**flags):
    with pytest.MonkeyPatch.context() as patch:
        seen, names = spy(patch), ("encoder.patch_embed.proj.weight", "encoder.blocks.1.attn.qkv.weight")
        return observe(train_seg, Segmenter, names, lambda row: [seen[-1]], **flags)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("base"))
        return look(**BASE, out_dir="a")


@pytest.mark.parametrize("flag", TABLE)
def test_a_flag_changes_what_the_table_says(base, flag):
    value, expected = TABLE[flag]
    assert changed(base, look(**{**BASE, flag: value}, out_dir="a"), noise=1e-6) == expected


def test_a_resumed_run_keeps_what_makes_its_model_and_its_batches():
    model = {flag for flag, (_, expected) in TABLE.items() if "config" in expected}
    assert set(train_seg.FIXED) == model | {"backbone", "num_classes", "data", "num_images", "optimizer", "min_scale",
                                            "max_scale", "distort", "batch_size", "seed"}


# --- recipes, going on, and evaluating a checkpoint ------------------------------------------------------------------

OURS = dict(attn="rpc", rpc_layers="0", n_iter=4, lambd=4, decoder="mask", min_lr=1e-5, model="nano",
            optimizer="adamw", lr=2e-3, weight_decay=0.05, clip=1, drop_path=0)
VARIED = dict(OURS, dropout=0.1, min_scale=0.5, max_scale=2, distort=True, patch_size=16)
RECIPES = {
    "shapes": dict(OURS, size=32, patch_size=4, num_classes=11, epochs=5, batch_size=32, dropout=0, min_scale=1,
                   max_scale=1, distort=False, eval_every=2),
    "camvid": dict(VARIED, size=160, num_classes=11, epochs=200, batch_size=8, eval_every=20),
    "ade20k": dict(VARIED, model="tiny", optimizer="sgd", lr=1e-3, weight_decay=0, clip=0, drop_path=0.1, size=512,
                   num_classes=150, epochs=64, batch_size=8)}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_the_papers_and_those_of_the_results(name):
    got = vars(call(train_seg.get_args, data=name))
    assert {k: v for k, v in got.items() if k in RECIPES[name]} == RECIPES[name]


def test_a_resumed_run_takes_the_new_lr_weight_decay_and_clip():
    call(train_seg.main, **BASE, out_dir="a", max_steps=2)
    call(train_seg.main, resume="a", lr=0.5, min_lr=0.1, weight_decay=0.3, clip=1e-9)
    groups = common.load("a")["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.3, 0]
    lrs = {row["step"]: row["lr"] for row in rows("a") if "lr" in row}
    assert lrs[3] == pytest.approx(0.4 * 0.5 ** 0.9 + 0.1) and lrs[2] < 2e-3


def test_an_evaluation_with_every_argument_away_from_its_default_is_plain(monkeypatch, tmp_path):
    make_tree()
    call(train_seg.main, data="camvid", data_dir="tree", num_classes=4, size=24, patch_size=8, batch_size=4,
         num_workers=0, max_steps=2, dropout=0.5, save_images=0, out_dir="a")
    photographs = tmp_path / "frost"                                      # a path of its own: they are cached by it
    photographs.mkdir()
    for i, name in enumerate(corruptions.FROST_FILES):
        pixels = np.random.default_rng(i).integers(0, 256, (100 + i, 120, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(photographs / name)
    how = dict(size=24, window=16, stride=12, scales=(0.5, 1), flip=True, amp=True)
    model = segmenter_from_checkpoint(common.load("a"))
    index = torch.randperm(5, generator=torch.Generator().manual_seed(0)).tolist()[:3]
    pairs = read_tree("validation")
    images, labels = zip(*[pairs[i] for i in index])
    tree = segmentation.SegTree("tree", "validation", 4)
    seen, expected = spy(monkeypatch), []
    for severity in (0, 2, 4):
        change = partial(corruptions.corrupt, name="frost", severity=severity, seed=0, frost_dir=photographs)
        metrics = iou.evaluate(model, tree, change=severity and (lambda x, i: change(x, index=i)) or None,
                               index=index, num_workers=1, **how)[0]
        shown = [change(image[None], index=[i])[0] for i, image in zip(index, images)] if severity else images
        guesses = list(plain_predictions(SimpleNamespace(**how), model, shown, expected))
        compare(metrics, plain_scores(list(zip(labels, guesses)), 4))
    assert_same_predictions(seen, expected)
