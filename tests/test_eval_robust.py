"""Evaluate classifiers: rows equal plain loops, are kept and pooled, and fill the table."""

import argparse
import contextlib
import io
import itertools
import json
import re
from functools import partial

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
import torch
from PIL import Image
from timm.data import ImageNetInfo
from torchvision.io import write_png

import common
import checkpoints
import eval_robust
import results
import robust
from data.batches import Split
from data.imagenet import ImageTree
from data.shapes import SHAPES, load_shapes
from golden_net import trained_network
from processes import group
from checkpoints import Loaded, load_checkpoint
from eval_robust import Images, Run, parse_measure
from results import pack, read_rows, rows_table as table, unpack
from robust import attacks, checks, corruptions, metrics
from runs import call, refused
from vit import SIZES, ViT, ViTConfig

# Table 4, SymViT: top-1 accuracy per corruption, mean over severities, in ImageNet-C's order
TABLE_4 = dict(zip(corruptions.NAMES, (40.97, 38.83, 38.56, 35.47, 27.79, 40.47, 30.69, 38.27,
                                       44.55, 42.72, 63.21, 50.25, 44.26, 39.36, 46.28)))


# --- metrics -------------------------------------------------------------------------------------

def test_mce_of_table_4_and_of_alexnet():
    errors = {name: 1 - top1 / 100 for name, top1 in TABLE_4.items()}
    assert metrics.mean_corruption_error(errors) == pytest.approx(74.75, abs=0.02)
    assert 100 * errors["fog"] / metrics.ALEXNET["fog"] == pytest.approx(69.91, abs=0.01)
    assert metrics.mean_corruption_error(metrics.ALEXNET) == pytest.approx(100, abs=1e-12)
    assert tuple(metrics.ALEXNET) == corruptions.NAMES


def test_outlier_metrics_equal_scikit_learn():
    g = torch.Generator().manual_seed(0)
    for values in (9, 10 ** 6):                                          # with ties and without
        s = torch.randint(0, values, (300,), generator=g)
        positive = torch.rand(300, generator=g) < 0.3
        fpr, tpr, _ = sklearn.metrics.roc_curve(positive, s, drop_intermediate=False)
        area = sklearn.metrics.roc_auc_score(positive, s)
        assert metrics.auroc(s, positive) == pytest.approx(area, abs=1e-12)
        first = (tpr >= 0.95 - 1e-12).argmax()
        assert metrics.fpr95(s, positive) == pytest.approx(fpr[first], abs=1e-12)
        precision = sklearn.metrics.average_precision_score(positive, s)
        assert metrics.average_precision(s, positive) == pytest.approx(precision, abs=1e-12)
    with pytest.raises(ValueError, match="at least one of each"):
        metrics.auroc(torch.zeros(12), torch.zeros(12) > 0)


def test_wilson_intervals_equal_scipy():
    for wins, n in (0, 7), (7, 7), (3, 10), (427, 500), (1, 50000):
        expected = scipy.stats.binomtest(wins, n).proportion_ci(0.95, "wilson")
        found = metrics.wilson(wins / n, n)
        assert found == pytest.approx((expected.low, expected.high), abs=1e-7)


def test_outcomes_pack_and_classes_equal_timm():
    right = torch.rand(1001, generator=torch.Generator().manual_seed(0)) < 0.3
    assert torch.equal(unpack(pack(right), 1001), right) and len(pack(right)) == 4 * 42
    assert eval_robust.IMAGENET == ImageNetInfo().label_names()


# --- robust.evaluate -------------------------------------------------------------

def test_evaluate_agrees_with_torchattacks():
    torchattacks = pytest.importorskip("torchattacks")
    model, images, labels = trained_network(60)
    theirs = torchattacks.PGD(model, 4 / 255, 1 / 255, 10, random_start=False)
    ours = partial(attacks.pgd, eps=4 / 255, alpha=1 / 255, steps=10, random_start=False)
    found = robust.evaluate(model, images, labels, {
        "pgd": ours, "torchattacks": lambda model, x, y: theirs(x, y), "noise": attacks.noise},
        batch_size=17)
    clean = model(images).argmax(1) == labels
    alone = clean & (model(theirs(images, labels)).argmax(1) == labels)
    assert torch.equal(found["clean"], clean) and 10 < found["pgd"].sum() < clean.sum() - 10
    assert (found["pgd"] != found["torchattacks"]).sum() <= 1
    assert (found["torchattacks"] != alone).sum() <= 1
    worst = found["pgd"] & found["torchattacks"] & found["noise"]
    assert torch.equal(found["worst"], worst)


def test_evaluate_passes_named_arguments_and_right_images():
    seen = []

    def mine(model, images, labels, seed, index):
        seen.append((seed, index.tolist()))
        return images

    def is_odd(x):
        return torch.nn.functional.one_hot((x[:, 0, 0, 0] * 255).round().long() % 2, 2).float()

    images = (torch.arange(6.0) / 255).view(6, 1, 1, 1).expand(6, 3, 2, 2)
    how = dict(mine=partial(mine, seed=7))
    found = robust.evaluate(is_odd, images, torch.ones(6).long(), how, batch_size=4)
    assert seen == [(7, [1, 3]), (7, [5])] and found["mine"].tolist() == [False, True] * 3


def test_evaluate_rejects_train_mode_and_reserved_names():
    model, images, labels = trained_network(4)
    for name, training, words in (("other", True, "train mode"), ("clean", False, "reserved")):
        with pytest.raises(ValueError, match=words):
            robust.evaluate(model.train(training), images, labels, {name: lambda model, x, y: x})


@pytest.mark.parametrize("change, words", [
    (torch.Tensor.int, None), (lambda y: y[:, None], None), (torch.Tensor.tolist, None),
    (lambda y: torch.nn.functional.one_hot(y, 10), "labels.argmax"),
    (lambda y: y + 1, "labels - 1"), (lambda y: y - 20, "0 to 9"),
    (lambda y: y[:-1], "expected 8"), (torch.Tensor.float, "integer type")])
def test_evaluate_needs_integer_class_labels(change, words):
    model, images, labels = trained_network(8)
    labels[0] = 9
    if words:
        with pytest.raises(ValueError, match=words):
            robust.evaluate(model, images, change(labels), {})
    else:
        found = robust.evaluate(model, images, change(labels), {})
        assert torch.equal(found["clean"], model(images).argmax(1) == labels)


# --- rows ----------------------------------------------------------------------------------------

def make_checkpoint(path, classes=tuple(SHAPES), image_size=32, attn="rpc", seed=0, task="shapes",
                    patch_size=8, flags=None, step=0, more=(), **options):
    """Save and return an untrained ViT.

    Its head is fitted to 80 scenes, so that some predictions are right and some are wrong.
    """
    torch.manual_seed(seed)
    config = ViTConfig(**SIZES["nano"], image_size=image_size, patch_size=patch_size,
                       num_classes=len(classes), attn=attn, **options)
    model = ViT(config)
    images, labels = load_shapes("test", 80, image_size)[:2]
    head, model.head = model.head, torch.nn.Identity()
    features, model.head = model(images.float() / 255).detach(), head
    target = torch.nn.functional.one_hot(labels % len(classes), len(classes)).float()
    model.head.weight.data = 5 * torch.linalg.lstsq(features, target).solution.T
    args = dict(dict(data=task, num_images=400, seed=seed), **(flags or {}))
    common.save(path, dict(task="classification", model=model.state_dict(), step=step, args=args,
                           model_config=vars(config).copy(), classes=list(classes), **dict(more)))
    return model.eval()


def run(*flags):
    """Run the script in this process; return what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        call(eval_robust.main, "--device cpu", flags)
    return out.getvalue()


def error(*flags):
    """Return the error line of the script with these flags."""
    return refused(eval_robust, "--device cpu", flags)


def rows_of(folder, *flags):
    """Return the rows of a run without errors, in the order of writing."""
    run(*flags, "--out_dir", folder)
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def line_of(table, name):
    """Return the cells after the first two, from the first line of the table named `name`."""
    line = next(line for line in table.splitlines() if line.startswith(f"| {name} "))
    return [cell.strip() for cell in line.strip("|").split("|")][2:]


QUICK = ("--measures", "clean", "noise", "pgd steps=5", "corruptions",
         "autoattack eps=2/255 steps=5 num_targets=1 queries=20", "--limit", 7, "--eps", "0.4/255",
         "--severities", 4)


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    """Return (folder, flags, output) of a run on two models, a.pt and b.pt, with rows in one/."""
    folder, of = tmp_path_factory.mktemp("eval"), dict(num_images=1000)   # 200 images for testing
    make_checkpoint(folder / "a.pt", flags=of)
    make_checkpoint(folder / "b.pt", attn="softmax", seed=1, flags=of)
    models = "--ckpt", folder / "a.pt", folder / "b.pt"
    return folder, models, run(*models, *QUICK, "--out_dir", folder / "one")


def test_table_has_every_row_once(first_run):
    folder, _, printed = first_run
    found = (folder / "one" / "table.md").read_text()
    rows = list(read_rows(folder / "one").values())
    assert len(rows) == 2 * 19 and all(row["commit"] and row["torch"] for row in rows)
    mean = np.mean([row["top1"] for row in rows[::2] if row["name"] == "corruptions"])
    assert line_of(printed, "corruptions type=mean, top1")[0] == f"{mean:.2f}"
    assert "top5" not in printed
    for name in (*(f"corruptions type={name}" for name in (*corruptions.NAMES, "mean")),
                 "pgd eps=0.4/255", "autoattack eps=2/255", "noise scale=0.068"):
        assert len(re.findall(rf"^\| {name}, top1 +\|", found, re.M)) == 1, name


def test_two_processes_count_every_image_once(first_run):
    folder, models, _ = first_run
    flags = ["corruptions type=fog" if flag == "corruptions" else flag for flag in QUICK]
    group(eval_robust.main, list(map(str, (*models, *flags, "--out_dir", folder / "two"))))
    alone, shared = read_rows(folder / "one"), read_rows(folder / "two")
    assert len(shared) == 2 * 5
    for key, two in shared.items():
        assert all(alone[key].get(k) == two.get(k) for k in ("top1", "top5", "right", "stages"))


def test_second_run_adds_missing_rows(first_run):
    folder, models, _ = first_run
    lines = (folder / "one" / "results.jsonl").read_text().splitlines(keepends=True)
    cut = folder / "cut"
    cut.mkdir()
    (cut / "results.jsonl").write_text("".join(lines[:33]) + lines[33][:40])  # killed inside a line
    run(*models, *QUICK, "--out_dir", cut)
    assert (cut / "results.jsonl").read_text().startswith("".join(lines[:33]))   # kept
    whole, added = ({key: (row["top1"], row["right"]) for key, row in read_rows(some).items()}
                    for some in (folder / "one", cut))
    assert whole == added


def test_own_attack_and_corruption_are_one_entry(tmp_path, monkeypatch):
    """Settings are arguments of the attack's signature: words, yes or no, or numbers."""
    def push(model, images, labels, eps, *, up=True, times=2.0, by="eps"):
        return images + (1 if up else -1) * times * (eps if by == "eps" else 0.25)

    def tint(images, c, noise):
        return (images * (1 - c) + 255 * c * noise).byte()

    monkeypatch.setitem(eval_robust.ATTACKS, "push", push)
    monkeypatch.setitem(eval_robust.MEASURES["classification"], "push", eval_robust.attacked)
    monkeypatch.setitem(corruptions.CORRUPTIONS, "tint", corruptions.Corruption(
        tint, (0.0, 0.1, 0.2, 0.3, 0.4), corruptions.draw_values))
    make_checkpoint(tmp_path / "m.pt", flags=dict(num_images=1000))
    rows = rows_of(tmp_path / "r", "--ckpt", tmp_path / "m.pt", "--limit", 12, "--severities", 1, 2,
                   "--measures", "clean", "push eps=4/255 up=no times=1,0.5",
                   "push eps=4/255 by=step", "corruptions type=tint")
    assert [row["settings"] for row in rows] == [
        {}, dict(eps=4 / 255, up=False, times=1, by="eps"),
        dict(eps=4 / 255, up=False, times=0.5, by="eps"),
        dict(eps=4 / 255, up=True, times=2, by="step"),
        dict(type="tint", jpeg85=False, severities=[1, 2], frost="procedural")]
    moved = [row["max_linf"] for row in rows[1:4]]
    assert moved == pytest.approx([4 / 255, 2 / 255, 0.5])
    assert rows[-1]["top1"][0] == rows[0]["top1"] != rows[-1]["top1"][1]
    assert "up=yes times=2 by=eps" in eval_robust.describe_measures()


def plan(*texts, **how):
    known = eval_robust.MEASURES["classification"]
    return [one for text in texts for one in parse_measure(text, known, **how)]


def test_settings_come_from_signature_and_preset():
    pgd = plan("pgd eps=1/255,2/255 steps=3,4 alpha=0.5/255 random_start=no")
    values = "eps", "steps", "alpha", "rel_step", "random_start"
    assert [tuple(settings[k] for k in values) for _, settings in pgd] == [
        (e / 255, steps, 0.5 / 255, 0.15, False) for e in (1, 2) for steps in (3, 4)]
    assert [settings["eps"] for _, settings in plan("fgsm")] == [k / 255 for k in (1, 2, 4, 8)]
    others = plan("fgsm", "spsa", "square eps=3/255", "sld", eps=[5 / 255])
    assert others == [
        ("fgsm", dict(eps=5 / 255)), ("spsa", dict(eps=5 / 255, steps=40, pairs=128,
                                                   centre="iterate")),
        ("square", dict(eps=3 / 255, queries=5000)), ("sld", dict(l1=10, steps=20, rescale=False))]
    paper = dict(conditions="paper")
    assert plan("spsa", "cw", "noise", "clean", preset="paper") == [
        ("spsa", dict(eps=0.1, steps=40, pairs=128, centre="legacy", **paper)),
        ("cw", dict(confidence=10, steps=1000, lr=0.005, search_steps=5, c0=0.01, **paper)),
        ("noise", dict(scale=0.3, kind="uniform", best_of=1, draws=3, **paper)), ("clean", {})]
    for name in eval_robust.ATTACKS:            # arguments of the evaluator are no settings
        assert not {"targets", "surrogates", "seed", "clip"} & eval_robust.settings_of(name).keys()


def test_measure_text_reads_back_equal():
    """Numbers are equal bit for bit, even if they have no short decimal form."""
    texts = ["pgd eps=0.4/255 alpha=0.123456789 steps=7", "cw lr=0.3 confidence=-1",
             "noise scale=0.07 kind=gaussian", "fgsm eps=1/3,0.031,1,0",
             "apgd loss=dlr", "corruptions type=fog jpeg85=yes"]
    for one in plan(*texts, *eval_robust.ATTACKS):
        assert plan(results.measure_text(*one)) == [one]
    assert [results.in_words(x) for x in (8 / 255, 0.5 / 255, 0.1, 1.0, 1 / 3, 4, True)] == [
        "8/255", "0.5/255", "0.1", "1", "85/255", "4", "yes"]


def test_limit_takes_prefix_of_random_order():
    def pick(name="clean", data="shapes", **flags):
        return eval_robust.pick(500, name, alone(**flags).args, data)

    few, all_ = pick(limit=9), pick()
    assert torch.equal(few, all_[:9]) and all_.unique().numel() == 500
    assert not torch.equal(all_, pick(seed=1))
    own = [len(pick("cw", data)) for data in ("shapes", "imagenet")]
    assert own[0] < own[1] < 500 == len(pick("cw", limit=500))


# --- folders of ImageNet's layout ----------------------------------------------------------------

@pytest.fixture(scope="module")
def trees(tmp_path_factory):
    """Return (folder, model, class names).

    val/ has all 8 classes; a/, o/ and odd/ have 3, 2 and 2 classes. In odd/, n99 is unknown.
    """
    folder, classes = tmp_path_factory.mktemp("trees"), [f"n{i}" for i in range(8)]
    images = load_shapes("test", 40).images
    kept_in = dict(val=classes, a=classes[2:5], o=classes[:2], odd=["n1", "n99"])
    for name, kept in kept_in.items():
        for c in kept:
            (folder / name / c).mkdir(parents=True)
            for i in range(2):
                number = int(c[1:]) % 8 * 2 + i + dict(val=0, o=20).get(name, 16)
                write_png(images[number], str(folder / name / c / f"{i}.png"))
    (folder / "a" / "README.txt").write_text("not a class")
    return folder, make_checkpoint(folder / "m.pt", classes, task="imagenet"), classes


def test_imagenet_a_and_o_use_their_classes(trees, tmp_path):
    folder, model, classes = trees
    how = ("--ckpt", folder / "m.pt", "--num_workers", 0)
    for crop_pct in (0.875, 0.5):
        a, = rows_of(tmp_path / str(crop_pct), *how, "--imagenet_a", folder / "a", "--measures",
                     "imagenet_a", "--crop_pct", crop_pct)                  # no val/ is needed
        tree = ImageTree(folder, "a", classes, 32, subset=True, crop_pct=crop_pct)
        logits = model(torch.stack([tree[i][0] for i in range(6)]).float() / 255)[:, 2:5]
        right = logits.argmax(1) == tree.labels - 2
        order = eval_robust.pick(6, "imagenet_a", alone().args, "imagenet")
        assert torch.equal(unpack(a["right"], 6), right[order]) and 0 < right.sum() < 6
        assert a["classes"] == 3 and "top5" not in a and a["data_dir"] == str(folder / "a")
        assert a["crop_pct"] == crop_pct

    beside = "--imagenet_o", folder / "o", "--data_dir", folder, "--measures", "imagenet_o"
    o, = rows_of(tmp_path / "o", *how, *beside)
    doubt = []
    for name in ("o", "val"):
        tree = ImageTree(folder, name, classes, 32, subset=True)
        kept = [tree[i][0] for i in range(len(tree)) if tree.labels[i] < 2]
        x = torch.stack(kept).float() / 255
        doubt.append(-model(x)[:, :2].double().softmax(1).amax(1))
    doubt, outlier = torch.cat(doubt), torch.arange(8) < 4
    assert o["auroc"] == pytest.approx(100 * metrics.auroc(doubt, outlier), abs=1e-6) != 50
    expected = 100 * metrics.average_precision(doubt, outlier)
    assert o["aupr"] == pytest.approx(expected, abs=1e-6) and o["chance"] == 50

    few, = rows_of(tmp_path / "few", *how, *beside, "--limit", 3)
    assert (few["images"], few["inside"], few["chance"]) == (3, 3, 50)
    assert "n99" in error(*how, "--imagenet_r", folder / "odd", "--measures", "imagenet_r")


def test_released_arrays_match_the_test_split(tmp_path):
    """Test CIFAR-10-C's layout; test_eval_models.py tests ImageNet-C's."""
    labels = np.arange(10000) % 7
    images = torch.empty(10000, 3, 2, 2, dtype=torch.uint8)
    source = Split(images, torch.from_numpy(labels), ["a"] * 7)
    np.save(tmp_path / "labels.npy", np.tile(labels, 2))
    pixels = np.repeat(np.concatenate([labels, 100 + labels]), 12).reshape(20000, 2, 2, 3)
    np.save(tmp_path / "fog.npy", pixels.astype(np.uint8))
    run = alone(size=2, corrupted_dir=tmp_path)
    for severity in (1, 2):
        split = eval_robust.released(run, "fog", severity, source)
        assert split.images.shape == (10000, 3, 2, 2) and torch.equal(split.labels, source.labels)
        expected = source.labels + 100 * (severity - 1)
        assert torch.equal(split.images[:, 1, 0, 1].long(), expected)
    with pytest.raises(common.InputError, match="fog, severity 2 has other images than the test"):
        eval_robust.released(run, "fog", 2, source._replace(labels=source.labels[:80]))
    good = pixels.astype(np.uint8)
    for wrong in (good / 255, good.transpose(0, 3, 1, 2), good.astype(str), good[:-1]):
        np.save(tmp_path / "fog.npy", wrong)
        with pytest.raises(common.InputError, match=r"fog.npy .* expected uint8 \(N, 2, 2, 3\)"):
            eval_robust.released(run, "fog", 1, source)
    (tmp_path / "labels.npy").unlink()
    with pytest.raises(common.InputError, match="labels.npy.*cannot be read"):
        eval_robust.released(run, "fog", 1, source)


def test_corruptions_start_from_bilinear_crop(tmp_path, monkeypatch):
    (tmp_path / "val" / "n0").mkdir(parents=True)
    g = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (3, 90, 130), generator=g, dtype=torch.uint8)
    write_png(pixels, str(tmp_path / "val" / "n0" / "0.png"))
    seen, how, tree = [], [], ImageTree(tmp_path, "val", size=56)
    monkeypatch.setattr(eval_robust, "corrupt", lambda x, *given, index, **more:
                        how.append((*given, index.tolist(), more)) or seen.append(x) or x)
    run = alone(severities=[3], seed=7, frost_dir="ice", test_set=tree)
    fog = dict(type="fog", jpeg85=False)
    images = eval_robust.images_of(run, "corruptions", fog)
    eval_robust.corrupted(run, loaded(lambda x: torch.zeros(len(x), 1)), images, "corruptions", fog)
    resized = Image.fromarray(pixels.permute(1, 2, 0).numpy()).resize((92, 64), Image.BILINEAR)
    crop = torch.tensor(np.array(resized.crop((18, 4, 74, 60)))).permute(2, 0, 1).int()
    assert (seen[0][0].int() - crop).abs().max() <= 2 < (tree[0][0].int() - crop).abs().max()
    assert how == [("fog", 3, [0], dict(seed=7, frost_dir="ice"))]


# --- the identity of a row -----------------------------------------------------------------------

def test_models_with_shared_weights_have_own_columns(tmp_path):
    """RPC and symmetric models have the same parameters; only model_config differs."""
    options = [dict(pap=dict(n_iter=1)), dict(pap=dict(n_iter=4, lambd=0.3)),
               dict(attn="symmetric"), dict(pap=dict(lambd=0.3), eps=1e-5)]
    models = [tmp_path / f"{i}.pt" for i in range(len(options))]
    for path, option in zip(models, options):
        make_checkpoint(path, **option)
        common.save(path, {**common.load(path), "model": common.load(models[0])["model"]})
    flags = "--measures", "clean", "--limit", 20
    rows_of(tmp_path / "r", "--ckpt", *models[:2], *flags)
    found = rows_of(tmp_path / "r", "--ckpt", *models, *flags)
    assert len(found) == len(options) and len({row["weights"] for row in found}) == 1
    twins = [f"rpc 4iter/layer0, lambda 0.3, seed 0, {models[i]}" for i in (1, 3)]
    assert line_of((tmp_path / "r" / "table.md").read_text(), "measure") == [
        "rpc 1iter/layer0, seed 0", twins[0], "symmetric, seed 0", twins[1]]


def test_row_files_give_one_table_per_dataset(tmp_path, capsys):
    for i, data in enumerate(("shapes", "cifar10", "shapes")):
        row = attacked(f"m{i}", "pgd", 1 / 255, torch.arange(8) % 3 > 0, data=data)
        (tmp_path / f"{i}.jsonl").write_text(json.dumps(row) + '\n{"cut')
    files = sorted(tmp_path.glob("*.jsonl"))
    call(eval_robust.main, "--table", files)
    shapes, cifar10 = capsys.readouterr().out.split("classification, cifar10")
    assert len(line_of(shapes, "pgd eps=1/255, top1")) == 2
    assert len(line_of(cifar10, "pgd eps=1/255, top1")) == 1
    (tmp_path / "0.jsonl").write_text('{"corruption": "fog"}\n')
    assert "is not a row of this eval_robust.py" in refused(eval_robust, "--table", files)


def test_key_has_every_identifying_field():
    row, = made_up("m", dict(fog=50))
    others = dict(data="cifar10", data_dir="y", name="clean", settings={}, seed=1,
                  precision="bf16", images=60, weights="w", model_config=dict(depth=3), crop_pct=1)
    keys = [results.row_key(row | {field: other}) for field, other in others.items()]
    assert len({results.row_key(row), *keys}) == len(others) + 1
    moved = row | dict(checkpoint="moved.pt", seconds=3, commit="other", torch="0")
    assert results.row_key(row) == results.row_key(moved)


# --- how attacks are measured --------------------------------------------------------------------

def alone(**given):
    """Return a Run in this process, with batches of four images. given: fields of Run, or flags."""
    fields = {name: given.pop(name) for name in Run._fields if name in given}
    flags = dict(seed=0, limit=None, data_dir=None, frost_dir=None, corrupted_dir=None,
                 severities=None, num_workers=0) | given
    usual = dict(args=argparse.Namespace(**flags), device=torch.device("cpu"), rank=0, world=1,
                 data="shapes", batch_size=4, classes=list(SHAPES))
    return Run(**usual | fields)


def loaded(model):
    return Loaded(model, "classification", dict(model="m"), "--ckpt m", 32)


def row_of(model, name, settings, source, index, **given):
    m = model if isinstance(model, Loaded) else loaded(model)
    run = alone(**dict(classes=list(source.classes), test_set=source, **given))
    function = eval_robust.MEASURES["classification"][name]
    return function(run, m, Images(source, index), name, settings)


class NoFloat64(torch.overrides.TorchFunctionMode):
    """Treat tensors as if they were on mps, without float64, until .cpu() is called."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        given = [x for x in leaves if isinstance(x, torch.Tensor)]
        if func is torch.Tensor.cpu:
            out = args[0].clone()
            out.on_cpu = True
            return out
        out = func(*args, **kwargs)
        on_cpu = any(x.dtype == torch.float64 or hasattr(x, "on_cpu") for x in given)
        if getattr(out, "dtype", None) == torch.float64 and not on_cpu and (
                given or "device" in kwargs):
            raise TypeError(f"{func}: mps has no float64")
        return out


def test_scores_need_no_float64_on_the_device(tmp_path, monkeypatch):
    make_checkpoint(tmp_path / "m.pt")
    how = ("--ckpt", tmp_path / "m.pt", "--limit", 4, "--eps", "2/255", "--measures", "clean",
           "noise", "cw steps=2", "autoattack steps=3 num_targets=1 queries=5")
    one = rows_of(tmp_path / "cpu", *how)
    monkeypatch.setattr(eval_robust, "widest", lambda device: torch.float32)
    with NoFloat64():
        two = rows_of(tmp_path / "mps", *how)
        flags = torch.arange(3) > 0
        assert checks.share_of(flags) == pytest.approx(200 / 3)
        assert metrics.auroc(torch.arange(3.0), flags) == 1
    for a, b in zip(one, two, strict=True):
        assert (a["top1"], a["top5"], a["right"]) == (b["top1"], b["top5"], b["right"])
        assert b.get("mean_l2", 0) == pytest.approx(a.get("mean_l2", 0), rel=1e-5)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Return (Loaded, source, index): a network and 40 of 200 scenes, some right, some wrong."""
    path = tmp_path_factory.mktemp("small") / "m.pt"
    make_checkpoint(path, flags=dict(num_images=1000))                  # 200 images, fitted to 80
    index = eval_robust.pick(200, "clean", alone(limit=40).args, "shapes")
    return load_checkpoint(path, torch.device("cpu")), load_shapes("test", 200), index


def test_stage_counts_image_led_to_its_label(monkeypatch):
    """The model predicts 1 for an image of class 0. The attack moves away from 1, towards 0."""
    def lucky(model, images, labels, *, trace):
        trace += [dict(stage="clean", robust=torch.tensor([True, True])),
                  dict(stage="apgd-ce", robust=torch.tensor([False, True]))]
        return torch.cat([0 * images[:1], images[1:]])

    class Model(torch.nn.Module):
        mean, std = torch.zeros(()), torch.ones(())

        def forward(self, x):
            return torch.nn.functional.one_hot((x[:, 0, 0, 0] > 0.5).long(), 2).float()

    monkeypatch.setitem(eval_robust.ATTACKS, "autoattack", lucky)
    source = Split(torch.full((2, 3, 4, 4), 200).byte(), torch.tensor([0, 1]), ["a", "b"])
    row = row_of(Model().eval(), "autoattack", dict(conditions="paper"), source, torch.arange(2))
    assert (row["stages"]["clean"], row["stages"]["apgd-ce"], row["top1"]) == (50, 100, 100)


@pytest.mark.parametrize("text, inside", [("square queries=3", True), ("apgd", False)])
def test_paper_preset_clips_square_alone(small, monkeypatch, text, inside):
    m, source, index = small[0], small[1], small[2][:12]
    one, = plan(f"{text} eps=4/255", preset="paper")
    seen, distances = [], eval_robust.distances
    monkeypatch.setattr(eval_robust, "distances",
                        lambda adv, x: seen.append(adv) or distances(adv, x))
    row_of(m, *one, source, index)
    z = (torch.cat(seen) - m.model.mean) / m.model.std
    assert bool((z >= -1e-5).all() and (z <= 1 + 1e-5).all()) == inside


def test_noise_reports_largest_move_of_draws(small, monkeypatch):
    m, source, index = small[0], small[1], small[2][:6]
    draws = torch.randn(3, 6, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    monkeypatch.setitem(eval_robust.ATTACKS, "noise", lambda model, images, labels, *, draw, index:
                        images + draws[draw, :len(images)])
    x = source.images[index].float() / 255
    row = row_of(m, "noise", dict(draws=3), source, index, batch_size=6)
    assert row["max_linf"] == pytest.approx(draws.abs().max().item(), rel=1e-5)
    assert row["mean_l2"] == pytest.approx(draws.flatten(2).norm(dim=2).amax(0).mean().item())
    assert row["max_l1"] == pytest.approx(draws.flatten(2).abs().sum(2).max().item())
    assert row["outside"] == pytest.approx(max((x + draws).max() - 1, -(x + draws).min()).item())
    shares = [unpack(text, 6).double().mean().item() for text in row["right"]]
    assert len(shares) == 3 and row["top1"] == pytest.approx(100 * sum(shares) / 3, abs=1e-3)


def test_only_noise_and_transfer_change_wrong_images(monkeypatch):
    class Zero(torch.nn.Module):
        mean, std = torch.zeros(()), torch.ones(())

        def forward(self, x):
            return torch.eye(2)[:1].expand(len(x), 2)     # predicts class 0

    source = Split(torch.zeros(2, 3, 4, 4).byte(), torch.tensor([0, 1]), ["a", "b"])
    for name in ("noise", "transfer", "fgsm", "pgd", "cw", "square"):
        monkeypatch.setitem(eval_robust.ATTACKS, name, lambda model, images, labels: images + 1)
        for conditions in ({}, dict(conditions="paper")):
            seen = []
            monkeypatch.setattr(eval_robust, "distances", lambda adv, x: seen.append(
                adv[:, 0, 0, 0].tolist()) or torch.zeros(2, 4))
            row_of(Zero().eval(), name, dict(draws=1, **conditions), source, torch.arange(2),
                   source_model=loaded(Zero().eval()))
            both = name in ("noise", "transfer") or conditions
            assert seen == [[1, bool(both)]], (name, conditions)


def test_cw_radius_counts_moved_images(monkeypatch):
    """The attack raises 16 values of an image, by 0.1, 0.2, 0.3 or 0.45 in the first four images.

    So the L2 distances are four times as large. The fifth image is wrong without an attack.
    """
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 2)).eval()
    model[1].weight.data = torch.eye(48)[:1].T.mul(torch.tensor([[-1.0, 1.0]])).T
    model[1].bias.data = torch.tensor([0.99, -0.99])      # class 1 if the first value is nearly 1
    images = torch.full((5, 3, 4, 4), 100, dtype=torch.uint8)
    images[:, 0] = torch.tensor([230, 204, 178, 140, 0]).view(5, 1, 1).byte()
    monkeypatch.setitem(eval_robust.ATTACKS, "cw", lambda model, x, labels:
                        torch.cat([torch.ones_like(x[:, :1]), x[:, 1:]], 1))
    source = Split(images, torch.tensor([0, 0, 0, 0, 1]), ["a", "b"])
    row = row_of(model, "cw", {}, source, torch.arange(5))
    assert row["top1"] == 0 and row["top1_at_l2"] == {0.25: 80, 0.5: 60, 1.0: 40, 2.0: 0}
    assert row["mean_l2"] == pytest.approx((25 + 51 + 77 + 115) / 255)


def test_per_class_equals_hand_count(small, tmp_path):
    m, source, index = small
    row = row_of(m, "per_class", {}, source, index)
    predicted = m.model(source.images[index].float() / 255).argmax(1)
    by_hand = torch.zeros(10, 10)
    for label, guess in zip(source.labels[index], predicted):
        by_hand[label, guess] += 1
    found = torch.zeros(10, 10)
    for i, j, n in row["confusion"]:
        found[i, j] = n
    assert torch.equal(found, by_hand) and 0 < by_hand.trace() < 40
    shares = by_hand.diag() / by_hand.sum(1)
    assert row["lowest"] == pytest.approx(100 * shares[by_hand.sum(1) > 0].min().item())

    printed = results.class_tables([row | dict(model="m", images=40)], tmp_path)
    for i, name in enumerate(SHAPES):
        cells = [f"{n:g}" if n else "" for n in by_hand[i].tolist()]
        assert line_of(printed.partition("class, predicted as")[2], name) == cells[1:]
        assert line_of(printed.partition("| class ")[2], name) == [f"{100 * shares[i]:.2f}"]
    lines = (tmp_path / "confusion.csv").read_text().splitlines()
    assert len(lines) == 1 + int((by_hand > 0).sum())


# --- tables --------------------------------------------------------------------------------------

def made_up(model, errors):
    """Return rows of corruptions with these errors in percent."""
    fields = dict(model=model, kind=model, checkpoint=model, weights=model, model_config={},
                  task="classification", data="imagenet", data_dir="x", imagenet1k=False, images=50,
                  seed=0, precision="float32")
    return [dict(fields, top1=[100 - error] * 5, name="corruptions",
                 settings=dict(type=name, severities=[1, 2, 3, 4, 5]))
            for name, error in errors.items()]


def attacked(model, name, eps, right, settings=(), **more):
    """Return the row of an attack after which these images are still right."""
    row, = made_up(model, dict(fog=0))
    settings = dict(eps=eps, **dict(settings))
    return row | dict(name=name, settings=settings, images=len(right), right=pack(right),
                      max_linf=eps, outside=0.0, top1=100 * right.double().mean().item(),
                      top5=100.0) | more


def test_mce_needs_imagenet_and_all_severities():
    alexnet = {name: 100 * error for name, error in metrics.ALEXNET.items()}
    half = {name: error / 2 for name, error in alexnet.items()}
    both = made_up("first", alexnet) + made_up("second", half)
    mean = sum(alexnet.values()) / 15
    expected = [f"{100 - mean:.2f}", f"{100 - mean / 2:.2f}"]
    assert line_of(table(both), "corruptions type=mean, top1") == expected
    assert "mce" not in table(both)
    known = [dict(row, imagenet1k=True) for row in both]
    assert line_of(table(known), "corruptions type=mean, mce") == ["100.00", "50.00"]
    three = [dict(row, settings=row["settings"] | dict(severities=[1, 3, 5])) for row in known]
    assert "mce" not in table(three)                      # AlexNet's errors average all five
    assert "type=mean" not in table(both[:14])


def test_worst_case_is_taken_image_by_image():
    a, b, c = (torch.arange(12) % 5 % 2 > 0, torch.arange(12) % 3 > 0, torch.arange(12) % 5 > 0)
    of = partial(attacked, "m")
    rows = [of("fgsm", 1 / 255, a, mine=[1, 2]), of("pgd", 1 / 255, b[:6]), of("fgsm", 2 / 255, c),
            attacked("n", "fgsm", 1 / 255, c), of("pgd", 1 / 255, ~a, dict(conditions="paper")),
            of("sld", 1 / 255, ~a) | dict(settings=dict(l1=1)),
            of("noise", 1, ~a) | dict(settings=dict(scale=1))]
    worst, = results.worst_cases(rows)
    assert (worst["settings"], worst["images"]) == (dict(eps=1 / 255, of="fgsm,pgd"), 6)
    both = a[:6] & b[:6]                                  # the 6 images are the first of the 12
    assert 0 < both.sum() < min(a[:6].sum(), b[:6].sum())
    assert not torch.equal(both, a[-6:] & b[:6])
    top1 = 100 * both.double().mean().item()
    assert results.numbers_of(worst) == {"top1": pytest.approx(top1)}
    low, high = metrics.wilson(top1 / 100, 6)
    text = f"{top1:.2f} ({100 * low:.1f}-{100 * high:.1f})"
    assert line_of(table(rows), "worst eps=1/255 of=fgsm,pgd, top1") == [text, ""]


def test_rows_with_different_keys_have_own_lines():
    """This also holds if only one of two rows has a setting."""
    def lines(rows):
        cells = [re.match(r"\| (.*), top1 +\|", line) for line in table(rows).splitlines()]
        return [cell[1] for cell in cells if cell and not cell[1].startswith("worst")]

    right, steps = torch.arange(8) % 3 > 0, dict(eps=2 / 255, steps=2)
    row = attacked("m", "pgd", 2 / 255, right, dict(steps=2))
    assert lines([row]) == ["pgd eps=2/255"] and "- pgd: eps=2/255 steps=2 " in table([row])
    alpha, paper = steps | dict(alpha=2 / 255), steps | dict(conditions="paper")
    assert lines([row, row | dict(settings=alpha)]) == [
        "pgd eps=2/255", "pgd eps=2/255 alpha=2/255"]
    assert lines([row | dict(settings=paper)]) == ["pgd eps=2/255 conditions=paper"]
    # rows with different keys have different lines
    fields = dict(settings=[steps, alpha, paper, steps | dict(steps=4)], seed=[0, 1],
                  data_dir=["x", None], precision=["float32", "tf32"])
    rows = [row | dict(zip(fields, values)) for values in itertools.product(*fields.values())]
    assert len(set(lines(rows))) == len(rows)


# --- the command ---------------------------------------------------------------------------------

def test_rows_go_to_run_folder_checks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_checkpoint(tmp_path / "m.pt")
    run("--ckpt", "m.pt", "--measures", "clean", "--limit", 8)        # no log.jsonl: rows in out/
    (tmp_path / "log.jsonl").write_text("")
    run("--ckpt", tmp_path / "m.pt", "--measures", "clean", "--limit", 8)
    assert [len(read_rows(tmp_path / f)) for f in ("out/m/robust", "robust")] == [1, 1]
    before, asked = {p: p.read_bytes() for p in tmp_path.rglob("*.*")}, []
    monkeypatch.setattr(checks, "run_checks", lambda model, x, y, name, twin, options:
                        asked.append((len(x), options["steps"])))
    run("--ckpt", "m.pt", "--checks", "--limit", 10, "--measures", "pgd steps=7")
    assert asked == [(10, 7)]
    assert {p: p.read_bytes() for p in tmp_path.rglob("*.*")} == before


def test_retrained_source_is_measured_again(tmp_path):
    make_checkpoint(tmp_path / "m.pt")
    how = ("--ckpt", tmp_path / "m.pt", "--source", tmp_path / "s.pt", "--eps", "4/255",
           "--measures", "pgd steps=1", "transfer steps=1", "--limit", 8)
    for seed, n in ((0, 2), (0, 2), (2, 3)):              # seed 0: the source is the model itself
        source = make_checkpoint(tmp_path / "s.pt", seed=seed)
        rows = rows_of(tmp_path / "r", *how)
        assert len(rows) == n
        assert rows[-1]["settings"]["source"] == checkpoints.weights_checksum(source)
    pgd, same, other = rows
    assert pgd["right"] == same["right"] and pgd["top1"] < other["top1"]


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """Return a folder with two models of different image sizes, and a folder of photos."""
    folder = tmp_path_factory.mktemp("odd")
    make_checkpoint(folder / "a.pt")
    make_checkpoint(folder / "large.pt", image_size=64)
    for i, c in enumerate(["n0", "n1"]):
        (folder / "photos" / "val" / c).mkdir(parents=True)
        write_png(load_shapes("test", 2).images[i], str(folder / "photos" / "val" / c / "0.png"))
    return folder


def test_data_dir_is_one_row_however_typed(odd, tmp_path, monkeypatch):
    monkeypatch.chdir(odd)
    (odd / "two.py").write_text("import torch\nbuild = lambda: torch.nn.Sequential("
                                "torch.nn.Flatten(), torch.nn.Linear(3072, 2))\n")
    for path in ("photos", odd / "photos/val/.."):
        found = rows_of(tmp_path, "--model", "two.py", "--image_size", 32, "--data", "imagenet",
                        "--data_dir", path, "--measures", "clean")
        assert [row["data_dir"] for row in found] == [str(odd / "photos")]


# {flags after --ckpt a.pt: words that the error message must contain}
BAD = {
    "--measures fgms": "expected one of clean",
    "--measures|pgd step=3": "expected one of eps, steps, alpha",
    "--measures|pgd steps=0": "steps=0",
    "--measures|noise scale=nan": "scale=nan: expected a number",
    "--measures|pgd eps=1/255 eps=2/255": "eps occurs twice; separate several values by commas",
    "--data_dir photos": "--data_dir photos: --data shapes renders its own images",
    "--measures|pgd random_start=no restarts=3": "restarts are equal",
    "--measures|noise kind=pink": "uniform or gaussian",
    "--measures|corruptions type=fogg": "--measures corruptions: type='fogg', expected one of",
    "--measures|fgsm eps=2/255,8": "did you mean 8/255",
    "--measures transfer": "needs --source",
    "--data imagenet": "needs --data_dir",
    "--measures|corruptions type=frost|--frost_dir|nowhere": "nowhere",
    "--corrupted_dir nowhere --measures corruptions": "nowhere",
    "--source large.pt": "size: 32 and 64",
    "--data folder --data_dir photos": "--ckpt a.pt has 10 classes (",
    "--weights ema": "--ckpt a.pt: the checkpoint has no ema weights",
    "--normalize half": "--normalize applies to checkpoints of other projects",
    "--data_dir|": "--data_dir has an empty value",
    "--crop_pct 1": "--crop_pct applies to --data imagenet",
}


@pytest.mark.parametrize("flags", BAD)
def test_bad_flags_are_one_clear_line(odd, monkeypatch, flags):
    monkeypatch.chdir(odd)
    parts = flags.split("|") if "|" in flags else flags.split()
    wrong = error("--ckpt", "a.pt", "--out_dir", "bad", *parts)
    assert BAD[flags] in wrong and not (odd / "bad").exists()
