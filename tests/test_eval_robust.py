"""The evaluator on classifiers: rows equal attacking by hand; rows are kept, read again and told apart; tables."""

import argparse
import contextlib
import csv
import io
import json
import re
import sys

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
import torch
from PIL import Image
from timm.data import ImageNetInfo
from torchvision.io import write_png

import common
import segmenter
import eval_robust
from data.batches import Split
from data.imagenet import ImageTree
from data.shapes import SHAPES, load_shapes
from processes import Started, group
from robust import attacks, checks, classifiers, corruptions, measures, metrics, results, score, sources
from robust.results import pack, read_rows, unpack
from robust.tables import Results, tables
from runs import call, refused
from vit import SIZES, ViT, ViTConfig

# Table 4, SymViT: top-1 accuracy per corruption, mean over severities, in corruptions.NAMES' order
TABLE_4 = dict(zip(corruptions.NAMES, (40.97, 38.83, 38.56, 35.47, 27.79, 40.47, 30.69, 38.27, 44.55, 42.72, 63.21,
                                       50.25, 44.26, 39.36, 46.28)))


# --- metrics ---------------------------------------------------------------------------------------------------------

def test_mce_of_table_4_is_that_of_table_1_and_of_alexnet_100():
    errors = {name: 1 - top1 / 100 for name, top1 in TABLE_4.items()}
    assert metrics.mean_corruption_error(errors) == pytest.approx(74.75, abs=0.02)
    assert 100 * errors["fog"] / metrics.ALEXNET["fog"] == pytest.approx(69.91, abs=0.01)
    assert metrics.mean_corruption_error(metrics.ALEXNET) == pytest.approx(100, abs=1e-12)
    with pytest.raises(ValueError, match="missing: snow"):
        metrics.mean_corruption_error({k: v for k, v in metrics.ALEXNET.items() if k != "snow"})


def test_outlier_metrics_equal_scikit_learns():
    g = torch.Generator().manual_seed(0)
    for values in (9, 10 ** 6):                                          # with ties and without
        s, positive = torch.randint(0, values, (300,), generator=g), torch.rand(300, generator=g) < 0.3
        fpr, tpr, _ = sklearn.metrics.roc_curve(positive, s, drop_intermediate=False)
        assert metrics.auroc(s, positive) == pytest.approx(sklearn.metrics.roc_auc_score(positive, s), abs=1e-12)
        assert metrics.fpr95(s, positive) == pytest.approx(fpr[(tpr >= 0.95 - 1e-12).argmax()], abs=1e-12)
        assert metrics.average_precision(s, positive) == pytest.approx(
            sklearn.metrics.average_precision_score(positive, s), abs=1e-12)
    with pytest.raises(ValueError, match="at least one of each"):
        metrics.auroc(torch.zeros(12), torch.zeros(12) > 0)


@pytest.mark.parametrize("wins, n", [(0, 7), (7, 7), (3, 10), (427, 500), (1, 50000)])
def test_wilson_intervals_equal_scipy(wins, n):
    expected = scipy.stats.binomtest(wins, n).proportion_ci(0.95, "wilson")
    assert metrics.wilson(wins / n, n) == pytest.approx((expected.low, expected.high), abs=1e-7)


def test_outcomes_take_one_bit_an_image_and_imagenet_is_known_by_its_names():
    right = torch.rand(1001, generator=torch.Generator().manual_seed(0)) < 0.3
    assert torch.equal(unpack(pack(right), 1001), right) and len(pack(right)) == 4 * 42
    names = ImageNetInfo().label_names()
    assert metrics.is_imagenet(names)
    assert not any(map(metrics.is_imagenet, (names[:999], names[::-1], [f"n{i:08}" for i in range(1000)])))


# --- rows ------------------------------------------------------------------------------------------------------------

def make_checkpoint(path, classes=tuple(SHAPES), image_size=32, attn="rpc", seed=0, task="shapes", patch_size=8,
                    flags=None, step=0, **options):
    torch.manual_seed(seed)
    config = ViTConfig(**SIZES["nano"], image_size=image_size, patch_size=patch_size, num_classes=len(classes),
                       attn=attn, **options)
    model = ViT(config)
    images, labels = load_shapes("test", 80, image_size)[:2]            # a head fitted to those: some right, some wrong
    head, model.head = model.head, torch.nn.Identity()
    features, model.head = model(images.float() / 255).detach(), head
    target = torch.nn.functional.one_hot(labels % len(classes), len(classes)).float()
    model.head.weight.data = 5 * torch.linalg.lstsq(features, target).solution.T
    common.save(path, dict(task="classification", model=model.state_dict(), model_config=vars(config).copy(),
                           classes=list(classes), step=step,
                           args=dict(dict(data=task, num_images=400, seed=seed), **(flags or {}))))
    return model.eval()


def run(*flags):
    """What the script prints, in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        call(eval_robust.main, "--device cpu", flags)
    return out.getvalue()


def error(*flags):
    """The line in which it ends."""
    return refused(eval_robust, "--device cpu", flags)


def rows_of(folder, *flags):
    """The rows of a run that went well, in the order in which they were written."""
    run(*flags, "--out_dir", folder)
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def line_of(table, name):
    """The cells of the first line of a table with this name."""
    line = next(line for line in table.splitlines() if line.startswith(f"| {name} "))
    return [cell.strip() for cell in line.strip("|").split("|")][2:]


QUICK = ("--measures", "clean", "noise", "fgsm", "pgd", "autoattack eps=2/255 queries=20",
         "corruptions", "--limit", 11, "--eps", "0.4/255", "--severities", 2, 4)


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval")
    make_checkpoint(folder / "a.pt", flags=dict(num_images=1000))             # 200 images, fitted to 80
    make_checkpoint(folder / "b.pt", attn="softmax", seed=1, flags=dict(num_images=1000))
    return folder, run("--ckpt", folder / "a.pt", folder / "b.pt", *QUICK, "--out_dir", folder / "one",
                       "--save_images", 3)


def test_the_table_has_every_row_once_and_pictures_are_written(first_run):
    folder, printed = first_run
    table = (folder / "one" / "table.md").read_text()
    assert table.strip() in printed and "rpc 4iter/layer1, seed 0" in table and "softmax, seed 1" in table
    first = table.partition("Each severity")[0]
    assert all(first.count(f"| {name}, error ") == 1 for name in corruptions.NAMES) and "mean of the 15" in table
    assert len(read_rows(folder / "one")) == 2 * 20
    assert {"corruptions.png", "attacks_0.png", "attacks_1.png"} <= {p.name for p in (folder / "one").iterdir()}


def test_two_processes_count_every_image_once(first_run):
    folder, _ = first_run
    flags = ["corruptions type=fog,snow" if flag == "corruptions" else flag for flag in QUICK]
    flags = ["--ckpt", folder / "a.pt", folder / "b.pt", *flags, "--out_dir", folder / "two", "--save_images", 3]
    group(eval_robust.main, list(map(str, flags)))
    for name in ("corruptions.png", "attacks_0.png", "attacks_1.png"):
        one, two = (Image.open(folder / run / name) for run in ("one", "two"))
        assert one.size == two.size and one.tobytes() == two.tobytes()
    alone = {results.key(row): row for row in read_rows(folder / "one")}
    shared = read_rows(folder / "two")
    assert len(shared) == 2 * 7
    for two in shared:
        one = alone[results.key(two)]
        assert [one[k] for k in ("top1", "top5", "right")] == [two[k] for k in ("top1", "top5", "right")]
        if one["measure"] in ("clean", "noise", "fgsm", "pgd"):              # of 11 images the first process has 6
            assert two["forward_per_image"] == one["forward_per_image"]


def test_resume_keeps_finished_rows_and_adds_the_rest(first_run):
    folder, _ = first_run
    lines = (folder / "one" / "results.jsonl").read_text().splitlines(keepends=True)
    cut = folder / "cut"
    cut.mkdir()
    (cut / "results.jsonl").write_text("".join(lines[:33]) + lines[33][:40])                   # killed while writing
    flags = "--ckpt", folder / "a.pt", folder / "b.pt", *QUICK, "--out_dir", cut
    assert "add --resume" in error(*flags)
    run(*flags, "--resume")
    assert (cut / "results.jsonl").read_text().startswith("".join(lines[:33]))
    whole, resumed = (sorted(str((r["measure"], r["model"], r["top1"], r["top5"])) for r in read_rows(some))
                      for some in (folder / "one", cut))
    assert whole == resumed


def test_a_second_writer_is_refused_and_the_first_ones_rows_stay(first_run, tmp_path):
    folder, _ = first_run
    held = Results(tmp_path, "shapes", False, 0)
    held.add(read_rows(folder / "one")[0])
    process = Started(eval_robust.main, ["--ckpt", str(folder / "a.pt"), "--measures", "clean", "--limit", "4",
                                         "--out_dir", str(tmp_path), "--resume"])
    last = process.communicate()[1].splitlines()[-1]
    assert process.poll() == 1 and re.search(rf"{tmp_path}: process \d+ on .* evaluates there", last)
    assert len(read_rows(tmp_path)) == 1


def test_out_of_distribution_folders_use_their_own_classes(tmp_path):
    classes = [f"n{i}" for i in range(8)]
    images = load_shapes("test", 40).images
    for folder, kept in (("val", classes), ("a", classes[2:5]), ("o", classes[:2]), ("odd", ["n1", "n99"])):
        for c in kept:
            (tmp_path / folder / c).mkdir(parents=True)
            for i in range(2):
                number = int(c[1:]) % 8 * 2 + i + dict(val=0, o=20).get(folder, 16)
                write_png(images[number], str(tmp_path / folder / c / f"{i}.png"))
    (tmp_path / "a" / "README.txt").write_text("not a class")
    model = make_checkpoint(tmp_path / "m.pt", classes, task="imagenet")
    how = ("--ckpt", tmp_path / "m.pt", "--data_dir", tmp_path, "--num_workers", 0)
    a, o = rows_of(tmp_path / "r", *how, "--imagenet_a", tmp_path / "a", "--imagenet_o", tmp_path / "o",
                   "--measures", "imagenet_a", "imagenet_o")
    tree = ImageTree(tmp_path, "a", classes, 32, subset=True)
    logits = model(torch.stack([tree[i][0] for i in range(6)]).float() / 255)[:, 2:5]
    assert a["classes"] == 3 and a["images"] == 6
    assert a["top1"] == pytest.approx(100 * (logits.argmax(1) == tree.labels - 2).double().mean().item(), abs=1e-3)
    halved = score.kept_logits(loaded(model), tree, torch.arange(6), torch.arange(3), alone(amp=True))
    assert torch.equal(halved, halved.bfloat16().double()) and halved.shape == (6, 3)
    doubt = []
    for folder in ("o", "val"):
        tree = ImageTree(tmp_path, folder, classes, 32, subset=True)
        x = torch.stack([tree[i][0] for i in range(len(tree)) if tree.labels[i] < 2]).float() / 255
        doubt.append(-model(x)[:, :2].double().softmax(1).amax(1))
    outlier = torch.arange(8) < 4
    assert o["auroc"] == pytest.approx(100 * metrics.auroc(torch.cat(doubt), outlier), abs=1e-6) and o["auroc"] != 50
    expected = metrics.average_precision(torch.cat(doubt), outlier)
    assert o["aupr"] == pytest.approx(100 * expected, abs=1e-6) and o["chance"] == 50

    # what is wrong with a folder is said before anything is measured; a small one has fewer images
    for name, flag, word in (("odd", "imagenet_r", "n99"), ("none", "imagenet_a", "--imagenet_a")):
        wrong = error(*how, f"--{flag}", tmp_path / name, "--measures", "clean", flag, "--out_dir", tmp_path / "r2")
        assert word in wrong and not (tmp_path / "r2").exists()
    rows = rows_of(tmp_path / "r4", *how, "--imagenet_a", tmp_path / "a", "--limit", 8, "--amp",
                   "--measures", "clean", "imagenet_a")
    assert [row["images"] for row in rows] == [8, 6]


def alone(**flags):
    """What score and pictures ask of the flags, for four images at a time in this process."""
    usual = dict(device=torch.device("cpu"), rank=0, world=1, batch_size=4, seed=0, amp=False, limit=None,
                 frost_dir=None, corrupted_dir=None, num_workers=0, task="classification")
    return argparse.Namespace(**usual | flags)


def loaded(model, name="m", kind="softmax"):
    return sources.Loaded(model, "classification", dict(model=name, kind=kind), {}, [0, 0], "--ckpt m", 32)


def job(name, setting, source, index, **conditions):
    """What is measured, and on which images."""
    return measures.Job(measures.Measure(name, setting, measures.CONDITIONS | conditions), source, len(index), index)


def test_imagenet_o_is_told_from_so_many_images_of_its_classes_in_val(monkeypatch):
    asked = []
    monkeypatch.setattr(score, "kept_logits", lambda m, source, index, columns, args:
                        asked.append(index) or torch.rand(len(index), len(columns)))
    outliers, val = (argparse.Namespace(labels=torch.tensor(labels)) for labels in ([1, 3, 3], [0, 1, 2, 3] * 9))
    for limit, n in ((None, 18), (6, 6)):
        row = score.folder_row(loaded(None), job("imagenet_o", {}, outliers, torch.arange(3)), val, alone(limit=limit))
        assert (row["inside"], row["classes"], row["chance"]) == (n, 2, 100 * 3 / (3 + n))
        inside = asked.pop().tolist()
        assert set(val.labels[inside].tolist()) == {1, 3} and inside != sorted(inside)     # not the first ones


def test_models_that_share_weights_have_columns_of_their_own(tmp_path):
    """RPC and symmetric models have the same parameters; only model_config tells them apart."""
    options = [dict(pap=dict(n_iter=1)), dict(pap=dict(n_iter=4)), dict(pap=dict(n_iter=4, lambd=0.3)), dict(pap=dict(n_iter=4, form="paper")),
               dict(attn="symmetric"), dict(pap=dict(n_iter=4, lambd=0.3), eps=1e-5)]
    for i, option in enumerate(options):
        make_checkpoint(tmp_path / f"{i}.pt", **option)
        checkpoint = common.load(tmp_path / f"{i}.pt")
        common.save(tmp_path / f"{i}.pt", {**checkpoint, "model": common.load(tmp_path / "0.pt")["model"]})
    models = [tmp_path / f"{i}.pt" for i in range(len(options))]
    flags = "--measures", "clean", "--limit", 20
    rows_of(tmp_path / "r", "--ckpt", *models[:3], *flags)
    found = rows_of(tmp_path / "r", "--ckpt", *models, *flags, "--resume")
    assert len(found) == len(options) and len({row["weights"] for row in found}) == 1
    heading = (tmp_path / "r" / "table.md").read_text().splitlines()[0]
    names = [name.strip() for name in heading.strip("|").split("|")][2:]
    assert names[0] == "rpc 1iter/layer1, seed 0" and names[1] == "rpc 4iter/layer1, seed 0"
    assert "lambda 0.3" in names[2] and "form paper" in names[3] and names[4] == "symmetric, seed 0"
    assert names[5] == f"{names[2]}, eps 1e-05"


def test_a_group_is_everything_but_the_seed(tmp_path):
    """Another length of training, another flag, an earlier checkpoint: each is another model."""
    cases = (("a", 0, 9, {}), ("b", 1, 9, dict(out_dir="out/b")), ("early", 2, 4, {}), ("flag", 3, 9, dict(mixup=0.8)))
    groups = {}
    for name, seed, step, flags in cases:
        make_checkpoint(tmp_path / f"{name}.pt", seed=seed, step=step, flags=flags)
        groups[name] = results.group(sources.load_model(tmp_path / f"{name}.pt", "cpu").about)
    assert groups["a"] == groups["b"] and len(set(groups.values())) == 3


def test_rows_are_read_but_for_a_line_cut_short_and_of_twins_the_later_one(tmp_path):
    (row,), path = made_up("m", dict(fog=50)), tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in (row, dict(row, top1=[7]))) + '{"cut')
    assert read_rows(tmp_path) == read_rows(path) == [dict(row, top1=[7])]
    path.write_text(json.dumps(row) + '\n{"corruption": "fog"}\n')
    with pytest.raises(ValueError, match="results.jsonl: {'corruption': 'fog'} is no row of eval_robust.py: it has no"):
        read_rows(path)


def test_rows_that_differ_in_one_thing_are_two_rows():
    row, = made_up("m", dict(fog=50))
    others = dict(data="cifar10", data_dir="y", measure="clean", setting={}, conditions={}, images=60, weights="w",
                  model_config=dict(depth=3))
    assert results.key(row) not in [results.key(row | {field: other}) for field, other in others.items()]
    assert results.key(row) == results.key(row | dict(checkpoint="moved.pt", seconds=3))


@pytest.mark.parametrize("flag, measure", [
    ("--corrupted_dir", "corruptions"), ("--frost_dir", "corruptions"), ("--data_dir", "clean"),
    ("--imagenet_a", "imagenet_a"), ("--imagenet_r", "imagenet_r"), ("--imagenet_o", "imagenet_o")])
def test_rows_from_two_folders_are_two_rows(monkeypatch, flag, measure):
    def key_of(folder):
        monkeypatch.setattr(sys, "argv", ["eval_robust.py", "--ckpt", "m.pt", "--measures", measure, flag, folder])
        args = eval_robust.get_args()
        args.data, args.imagenet1k, args.task = "imagenet", False, "classification"
        about = dict.fromkeys(("model", "kind", "checkpoint", "weights", "model_config", "recipe"), "m")
        asked = measures.Job(eval_robust.todo_of(args)[0], None, 10, None)
        return results.key(eval_robust.about_row(loaded(None)._replace(about=about), asked, args))

    assert key_of("one") == key_of("one/") != key_of("two")


class NoFloat64(torch.overrides.TorchFunctionMode):
    """As if tensors were on mps, which has no float64, until .cpu() is called."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if func is torch.Tensor.cpu:
            out = args[0].clone()
            out.on_cpu = True
            return out
        out = func(*args, **kwargs)
        on_cpu = any(x.dtype == torch.float64 or hasattr(x, "on_cpu") for x in given)
        if getattr(out, "dtype", None) == torch.float64 and not on_cpu and (given or "device" in kwargs):
            raise TypeError(f"{func}: mps has no float64")
        return out


def test_scores_need_no_float64_on_the_device(tmp_path, monkeypatch):
    make_checkpoint(tmp_path / "m.pt")
    how = ("--ckpt", tmp_path / "m.pt", "--limit", 6, "--eps", "2/255", "--measures", "clean", "noise",
           "cw steps=2", "autoattack queries=5")
    one = rows_of(tmp_path / "cpu", *how)
    widest = [score.widest(torch.device(name)) for name in ("cpu", "cuda", "mps")]
    assert widest == [torch.float64, torch.float64, torch.float32]
    monkeypatch.setattr(score, "widest", lambda device: torch.float32)
    with NoFloat64():
        two = rows_of(tmp_path / "mps", *how)
        flags = torch.arange(3) > 0
        assert checks.percent(flags) == pytest.approx(200 / 3) and metrics.auroc(torch.arange(3.0), flags) == 1
        assert segmenter.scores(torch.eye(2, dtype=torch.int64))["mean_iou"] == 100
    for a, b in zip(one, two, strict=True):
        assert (a["top1"], a["top5"], a["right"]) == (b["top1"], b["top5"], b["right"])
        assert b.get("mean_l2", 0) == pytest.approx(a.get("mean_l2", 0), rel=1e-5)


def test_released_files_are_read_by_type_and_severity(tmp_path):
    """CIFAR-10-C has one array a type, 10,000 images a severity; ImageNet-C a folder each."""
    args = alone(corrupted_dir=str(tmp_path))
    source = Split(torch.empty(0), torch.empty(10000), list("abcdefg"))
    labels = np.arange(20000) % 7
    np.save(tmp_path / "labels.npy", labels)
    np.save(tmp_path / "fog.npy", np.repeat(labels, 12).reshape(20000, 2, 2, 3).astype(np.uint8))
    for severity in (1, 2):
        split = score.released(args, source, 2, "fog", severity)
        expected = torch.from_numpy(labels[10000 * (severity - 1):][:10000])
        assert split.images.shape == (10000, 3, 2, 2) and torch.equal(split.labels, expected)
        assert torch.equal(split.images[:, 1, 0, 1].long(), expected)
        folder = tmp_path / "snow" / str(severity) / "n0"
        folder.mkdir(parents=True)
        write_png(torch.full((3, 9, 9), severity, dtype=torch.uint8), str(folder / "0.png"))
        one = Split(torch.empty(0), torch.empty(1), ["n0"])
        assert score.released(args, one, 9, "snow", severity)[0][0].unique() == severity
    pixels = torch.arange(243, dtype=torch.uint8).view(3, 9, 9)
    write_png(pixels, str(folder / "0.png"))
    assert torch.equal(score.released(args, one, 9, "snow", 2)[0][0], pixels)     # not cropped
    with pytest.raises(ValueError, match="fog, severity 2 has 10000 images, the test split 80"):
        fog = job("corruptions", dict(type="fog", severities=[2]), load_shapes("test", 80), [])
        score.corruption_rows([loaded(None)._replace(size=2)], fog, args)


def test_generated_corruptions_start_from_imagenet_cs_bilinear_crop(tmp_path, monkeypatch):
    (tmp_path / "val" / "n0").mkdir(parents=True)
    pixels = torch.randint(0, 256, (3, 90, 130), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    write_png(pixels, str(tmp_path / "val" / "n0" / "0.png"))
    seen, tree = [], ImageTree(tmp_path, "val", size=56)
    monkeypatch.setattr(corruptions, "corrupt", lambda images, *_, **__: seen.append(images) or images)
    fog = job("corruptions", dict(type="fog", severities=[3], jpeg85=False), tree, torch.arange(1))
    score.corruption_rows([loaded(lambda x: torch.zeros(len(x), 1))], fog, alone())
    resized = Image.fromarray(pixels.permute(1, 2, 0).numpy()).resize((92, 64), Image.BILINEAR)
    expected = torch.tensor(np.array(resized.crop((18, 4, 74, 60)))).permute(2, 0, 1).int()
    assert (seen[0][0].int() - expected).abs().max() <= 2 < (tree[0][0].int() - expected).abs().max()


# --- attacks, as they are measured -----------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A network with 40 of 200 scenes, some right, some wrong: (Loaded, source, index)."""
    path = tmp_path_factory.mktemp("small") / "m.pt"
    make_checkpoint(path, flags=dict(num_images=1000))                    # 200 images, fitted to 80
    return sources.load_model(path, torch.device("cpu")), load_shapes("test", 200), score.pick(200, 40, 0)


def clean_right(m, source, index, args):
    loaded = score.batches(source, index, args)
    return score.find_right([m], loaded, [None], len(index), args)[0, 0, :, 0] > 0


def attack(small, name, setting, n=40, conditions={}, **flags):
    m, source, index = small
    return score.attack_row(m, job(name, setting, source, index[:n], **conditions), alone(**flags))


def test_autoattacks_stages_speak_of_the_true_labels(small):
    """labels=pred leads away from the prediction, right or wrong; accuracy stays accuracy."""
    clean = clean_right(*small[:2], small[2][:12], alone()).double().mean().item() * 100
    row = attack(small, "autoattack", dict(eps=1 / 255, queries=5), 12, dict(labels="pred"))
    assert 0 < clean < 100 and row["stages"]["clean"] == pytest.approx(clean, abs=1e-3)
    assert row["stages"]["square"] == row["top1"]


@pytest.mark.parametrize("text, inside", [("autoattack queries=3", True), ("square queries=3", True), ("apgd", False)])
def test_in_the_papers_conditions_autoattack_and_square_keep_normalised_images_in_0_to_1(small, text, inside):
    m, source, index = small[0], small[1], small[2][:12]
    x, labels = source.images[index].float() / 255, source.labels[index]
    measure, = measures.plan([f"{text} eps=4/255"], "classification", "paper")
    assert measure.conditions == dict(measures.PRESETS["paper"]["conditions"], clip=inside)
    adv = score.attack_images(m.model, measure, x, labels, index, alone())
    z = (adv - m.model.mean) / m.model.std
    assert bool((z >= -1e-5).all() and (z <= 1 + 1e-5).all()) == inside


def test_batches_are_as_large_as_asked_for_and_gathered_ones_no_larger_than_a_gpu_holds(small, monkeypatch):
    setting, sizes, joined = dict(eps=2 / 255, queries=5), [], score.joined
    hook = small[0].model.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    row = attack(small, "square", setting)
    attack(small, "pgd", dict(eps=1 / 255, steps=2), 13)
    hook.remove()
    assert max(sizes) == 4

    def few(loaded):
        for batch in joined(loaded, 16):
            sizes.append([len(part) for part in batch])
            yield batch

    sizes.clear()
    monkeypatch.setattr(score, "joined", few)
    assert row == attack(small, "square", setting) and sizes == [[16] * 4, [16] * 4, [8] * 4]


def test_fgsm_takes_two_forward_passes_and_one_backward(small):
    m, source, index = small
    clean = clean_right(m, source, index, alone())
    m.count[:] = 0, 0
    row = attack(small, "fgsm", dict(eps=1 / 255), batch_size=16)
    assert m.count == [80, 40]
    x, y = source.images[index].float() / 255, source.labels[index]
    attacked = clean & (m.model(attacks.fgsm(m.model, x, y, 1 / 255)).argmax(1) == y)
    assert 0 < clean.sum() < 40 and torch.equal(unpack(row["right"], 40), attacked)
    measure = measures.Measure("fgsm", dict(eps=1 / 255), measures.CONDITIONS)
    adv = score.attack_images(m.model, measure, x, y, index, alone())
    assert torch.equal(adv[~clean], x[~clean]) and not torch.equal(adv[clean], x[clean])


@pytest.mark.parametrize("name", ["autoattack", "square"])
def test_images_that_are_wrong_already_leave_no_gaps_in_batches(small, monkeypatch, name):
    given = []

    def stand_in(model, images, labels, *rest, index, **how):
        given.append((index, how.get("batch_size")))
        return images

    monkeypatch.setitem(measures.ATTACKS, name, stand_in)
    attack(small, name, dict(eps=1 / 255, queries=5))
    right = small[2][clean_right(*small, alone())]
    assert 8 < len(right) < 36 and torch.equal(torch.cat([numbers for numbers, _ in given]), right)
    assert [batch_size for _, batch_size in given] == [4]                 # asked once, for all


def test_the_largest_move_of_noise_is_that_of_all_draws(small):
    m, source, index = small[0], *small[1:]
    index, setting = index[:6], dict(scale=0.05, kind="gaussian", best_of=1, draws=3)
    source = source._replace(images=source.images // 4)                   # dark: noise leads below 0
    x, y = source.images[index].float() / 255, source.labels[index]
    moves = [attacks.noise(m.model, x, y, 0.05, kind="gaussian", draw=i, clip=False, index=index) - x
             for i in range(3)]
    row = score.attack_row(m, job("noise", setting, source, index, clip=False), alone())
    assert row["max_linf"] == pytest.approx(max(move.abs().max().item() for move in moves))
    farthest = torch.stack([move.flatten(1).norm(dim=1) for move in moves]).amax(0)       # (6,)
    assert row["mean_l2"] == pytest.approx(farthest.mean().item())
    assert row["max_l1"] == pytest.approx(max(move.abs().flatten(1).sum(1).max().item() for move in moves))
    assert row["outside"] == pytest.approx(max(-(x + move).min().item() for move in moves)) and row["outside"] > 0
    shares = [unpack(text, 6).double().mean().item() for text in row["right"]]
    assert len(shares) == 3 and row["top1"] == pytest.approx(100 * sum(shares) / 3, abs=1e-3)


def test_moves_are_those_of_the_images_that_were_moved():
    still = [0, 0, 0, 0]                                  # Linf, L2, L1, outside
    moved = torch.tensor([still, still, [0.1, 1, 5, 0], [0.3, 3, 4, 0.2]])
    assert score.sizes(moved) == pytest.approx(dict(
        max_linf=0.3, max_l2=3, max_l1=5, median_l2=1, mean_l2=2, outside=0.2))
    assert not any(score.sizes(moved[:2]).values())


def test_what_a_model_gets_wrong_is_attacked_by_noise_by_transfer_and_by_fgsm_itself():
    def zero(x):
        return torch.eye(2)[:1].expand(len(x), 2)         # its prediction

    x, labels = torch.zeros(2, 3, 4, 4), torch.tensor([0, 1])
    for name, both in dict(noise=True, transfer=True, fgsm=True, pgd=False, cw=False, square=False).items():
        target, attacked = score.aim(zero, name, x, labels, "true", 2)
        assert target.tolist() == [0, 1] and attacked.tolist() == [True, both]
        target, attacked = score.aim(zero, name, x, labels, "pred", 2)
        assert target.tolist() == [0, 0] and attacked.all()


def test_accuracy_within_a_radius_counts_l2(monkeypatch):
    """Of four images 16 values rise by 0.1, 0.2, 0.3, 0.45: in L2 by four times that."""
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 2))
    model[1].weight.data = torch.eye(48)[:1].T.mul(torch.tensor([[-1.0, 1.0]])).T
    model[1].bias.data = torch.tensor([0.99, -0.99])      # class 1: the first value is nearly 1
    images = torch.full((4, 3, 4, 4), 100, dtype=torch.uint8)
    images[:, 0] = torch.tensor([230, 204, 178, 140]).view(4, 1, 1).byte()
    monkeypatch.setitem(measures.ATTACKS, "cw", lambda model, x, labels, **_:
                        torch.cat([torch.ones_like(x[:, :1]), x[:, 1:]], 1))
    source = Split(images, torch.zeros(4, dtype=torch.int64), ["a", "b"])
    row = score.attack_row(loaded(model), job("cw", {}, source, torch.arange(4)), alone())
    assert row["top1"] == 0 and row["top1_at_l2"] == {0.25: 100, 0.5: 75, 1.0: 50, 2.0: 0}


def test_pictures_show_pgd_at_its_largest_budget_and_so_many_images(tmp_path, monkeypatch):
    attacked, shown = [], []
    monkeypatch.setattr(score, "attack_images", lambda model, measure, images, *_:
                        attacked.append((measure.name, measure.setting["eps"], len(images))) or images)
    monkeypatch.setattr(corruptions, "corrupt", lambda images, *_, **how: images)
    monkeypatch.setattr(classifiers, "save_grid", lambda path, images, **_: shown.append((path.name, len(images))))
    todo = [measures.Measure(name, dict(eps=eps), measures.CONDITIONS) for name, eps in
            (("pgd", 1 / 255), ("pgd", 4 / 255), ("pgd", 2 / 255), ("fgsm", 8 / 255))]
    model = loaded(None)
    classifiers.save_pictures([model], load_shapes("test", 8), todo, alone(save_images=3, out_dir=tmp_path))
    assert attacked == [("pgd", 4 / 255, 3)] and shown == [("corruptions.png", 75), ("attacks_0.png", 9)]


# --- tables ----------------------------------------------------------------------------------------------------------

def made_up(model, errors):
    """Rows of corruptions with these errors in percent."""
    fields = dict(model=model, kind=model, checkpoint=model, weights=model, model_config={}, recipe=model,
                  task="classification", data="imagenet", data_dir="x", imagenet1k=False, measure="corruptions",
                  images=50, conditions=dict(space="pixel", labels="true", clip=True, seed=0, amp=False))
    return [dict(fields, top1=[100 - error] * 5, setting=dict(type=name, severities=[1, 2, 3, 4, 5]))
            for name, error in errors.items()]


def attacked(model, name, eps, right, **more):
    """A row of an attack that left these images right."""
    row, = made_up(model, dict(fog=0))
    return row | dict(measure=name, setting=dict(eps=eps), images=len(right), right=pack(right), max_linf=eps,
                      outside=0.0, top1=100 * right.double().mean().item(), top5=100.0) | more


def test_mce_is_for_imagenets_classes_at_all_severities():
    alexnet = {name: 100 * error for name, error in metrics.ALEXNET.items()}
    both = made_up("first", alexnet) + made_up("second", {name: error / 2 for name, error in alexnet.items()})
    mean = sum(alexnet.values()) / 15
    cells = [cell.split()[0] for cell in line_of(tables(both), "mean of the 15, error")]
    assert cells == [f"{mean:.2f}", f"{mean / 2:.2f}"] and "mCE" not in tables(both)
    assert line_of(tables([dict(row, imagenet1k=True) for row in both]), "mCE") == ["100.00", "50.00"]
    three = [dict(row, imagenet1k=True, setting=dict(row["setting"], severities=[1, 3, 5])) for row in both]
    assert "mCE" not in tables(three)                     # AlexNet's errors are of all five
    assert "mean of the 15" not in tables(both[:14]).partition("In short")[0]


def test_every_severity_is_shown_from_mild_to_strong():
    rows = made_up("m", dict.fromkeys(corruptions.NAMES, 0))
    for row in rows:
        row["top1"] = [90, 80, 70, 60, 50]
    rows[0]["top1"] = [60, 80, 70, 60, 50]                # of gaussian_noise
    first, _, last = tables(rows).partition("Each severity, from mild to strong")
    assert line_of(last, "gaussian_noise, error") == ["40.0  20.0  30.0  40.0  50.0"]
    assert line_of(last, "mean of the 15, error") == ["12.0  20.0  30.0  40.0  50.0"]
    assert "Corruptions: mean of severities 1, 2, 3, 4, 5." in first
    for row in rows:
        row.update(top1=row["top1"][3:4], setting=dict(row["setting"], severities=[4]))
    assert "Corruptions: mean of severities 4." in tables(rows) and "Each severity" not in tables(rows)


def test_the_worst_case_over_attacks_is_taken_image_by_image():
    a, b, c = (torch.arange(12) % k > 0 for k in (2, 3, 5))
    rows = [attacked("m", "fgsm", 1 / 255, a), attacked("m", "pgd", 1 / 255, b[:6]), attacked("m", "fgsm", 2 / 255, c),
            attacked("n", "fgsm", 1 / 255, c), attacked("m", "sld", 1 / 255, ~a),
            attacked("m", "noise", 1 / 255, ~a, setting=dict(scale=0.1))]
    row, = results.worst_cases(rows)
    both = a[:6] & b[:6]                                  # fewer images are the first of more
    assert 0 < both.sum() < min(a[:6].sum(), b[:6].sum())
    assert row["measure"] == "worst of fgsm, pgd" and row["images"] == 6
    assert row["top1"] == pytest.approx(100 * both.double().mean().item())
    assert torch.equal(unpack(row["right"], 6), both)
    low, high = metrics.wilson(row["top1"] / 100, 6)
    text = f"{row['top1']:.2f} ({100 * low:.1f}-{100 * high:.1f})"
    assert line_of(tables(rows), "worst of fgsm, pgd 1/255, top-1") == [text, ""]


def test_the_table_ends_in_a_summary_that_says_what_one_seed_is_worth():
    clean, = made_up("m", dict(fog=0))
    clean = dict(clean, measure="clean", setting={}, top1=96.4, top5=100.0)
    right = torch.arange(50) % 4 > 0
    rows = [clean, *made_up("m", dict.fromkeys(corruptions.NAMES, 25)), attacked("m", "fgsm", 2 / 255, right),
            attacked("m", "pgd", 2 / 255, right & (torch.arange(50) % 3 > 0)), attacked("m", "pgd", 1 / 255, right)]
    last = tables(rows).partition("In short:")[2]
    assert last.splitlines()[-1].startswith("One network of a kind ranks nothing")
    assert [cell.strip() for cell in last.splitlines()[4].strip("|").split("|")] == [
        "m", "96.4", "75.0", "1/255 74.0, 2/255 50.0"]
    twin = [dict(row, weights="other", model="m again") for row in rows]
    assert "ranks nothing" not in tables(rows + twin) and "McNemar" not in tables(rows)


def test_the_table_says_how_sure_it_is_and_how_attacks_were_run(first_run):
    found = read_rows(first_run[0] / "one")
    fgsm = [row for row in found if row["measure"] == "fgsm"]
    low, high = metrics.wilson(fgsm[0]["top1"] / 100, 11)
    interval = f"{fgsm[0]['top1']:.2f} ({100 * low:.1f}-{100 * high:.1f})"
    assert line_of(tables(found), "fgsm 0.00157, top-1")[0] == interval
    far = 255 * max(row["max_linf"] for row in fgsm)
    fgsm[1]["max_linf"] = 0.1 / 255                       # of two models the one that moves more
    note = f"- fgsm: a pixel moved by at most {far:.2f} of 255 with 0.00157, and at most 0.00 out of range."
    pgd, = (line for line in tables(found).splitlines() if line.startswith("- pgd "))
    assert note in tables(found) and "steps=20 alpha=0.15 random_start=yes" in pgd and " eps=" not in pgd
    paper = dict(space="normalized", labels="pred", clip=False, seed=7, amp=False)
    other = dict(fgsm[0], setting=dict(eps=4 / 255), conditions=paper, max_linf=1 / 255, outside=3 / 255)
    table = tables([*found, other])
    assert note in table and ("- fgsm, normalized, pred, no clip: a pixel moved by at most 1.00 of 255 "
                              "with 4/255, and at most 3.00 out of range.") in table
    assert "a random choice, seed 0, 7, the same for all" in table


def test_the_table_says_what_top_5_and_which_frost(first_run):
    found = read_rows(first_run[0] / "one")
    top5, frost = "Top-5 under attack is not a worst case", "frost: procedural"
    for kept, notes in (("fgsm", (1, 0)), ("corruptions", (0, 1)), ("clean", (0, 0))):
        table = tables([row for row in found if row["measure"] == kept])
        assert (table.count(top5), table.count(frost)) == notes
    rows = [row for row in found if row["setting"].get("type") == "frost"]
    for setting in (dict(frost="textures"), dict(released="imagenet-c")):
        assert frost not in tables([{**r, "setting": {**r["setting"], **setting}} for r in rows])


def test_settings_that_differ_have_lines_of_their_own_and_a_table_is_of_one_data_set(tmp_path):
    right = torch.arange(8) % 2 > 0
    rows = [attacked("m", "pgd", 2 / 255, right, setting=dict(eps=2 / 255, steps=steps)) for steps in (1, 2)]
    assert line_of(tables(rows), "pgd 2/255, top-1, steps 1") and line_of(tables(rows), "pgd 2/255, top-1, steps 2")
    kept = Results(tmp_path, "imagenet", False, 0)
    kept.rows = dict(enumerate([*rows, dict(made_up("m", dict(snow=3))[0], data="cifar10")]))
    assert "pgd" in kept.write_table() and "snow" not in kept.write_table()


def test_a_finished_row_warns_where_square_took_more_than_two_tenths(tmp_path, capsys):
    kept = Results(tmp_path, "imagenet", False, 0)
    for last, warned in ((30.0, False), (29.9, False), (29.7, True)):
        stages = {"clean": 80.0, "apgd-ce": 31.0, "apgd-t": 30.4, "fab-t": 30.0, "square": last}
        kept.add(attacked("m", "autoattack", last / 2550, torch.ones(9) > 0, stages=stages, seconds=1.0))
        assert ("warning: Square took 0.30 points" in capsys.readouterr().out) == warned


def test_rows_of_several_runs_are_printed_and_written_as_csv(tmp_path, monkeypatch, capsys):
    right = torch.arange(8) % 2 > 0
    rows = [*made_up("m", dict(fog=50)), attacked("n", "pgd", 2 / 255, right)]
    for name, row in zip("ab", rows):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["results", "a", "b/results.jsonl", "--csv", "all.csv"])
    results.main()
    assert "classification, imagenet" in capsys.readouterr().out
    with open("all.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["name"], line["severity"], float(line["value"])) for line in lines] == [
        *(("fog, error", str(s), 50) for s in (1, 2, 3, 4, 5)), ("pgd 2/255, top-1", "", 50),
        ("pgd 2/255, top-5", "", 100)]
    assert lines[5]["model"] == "n" and float(lines[5]["eps"]) == 2 / 255 and lines[5]["seed"] == "0"
    monkeypatch.setattr(sys, "argv", ["results", "a", "nowhere"])
    with pytest.raises(ValueError, match="no rows in nowhere, expected what eval_robust.py wrote"):
        results.main()


# --- the command -----------------------------------------------------------------------------------------------------

def test_a_preset_has_a_folder_of_its_own_and_checks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_checkpoint(tmp_path / "m.pt")
    run("--ckpt", tmp_path / "m.pt", "--measures", "clean", "--limit", 8)
    assert len(read_rows(tmp_path / "out/m/robust")) == 1                               # a file of no run: under out/
    (tmp_path / "log.jsonl").write_text("")
    for preset in ("default", "paper"):
        run("--ckpt", tmp_path / "m.pt", "--preset", preset, "--measures", "clean", "--limit", 8)
    assert len(read_rows(tmp_path / "robust")) == len(read_rows(tmp_path / "robust_paper")) == 1
    before, asked = {p: p.read_bytes() for p in tmp_path.rglob("*.*")}, []
    monkeypatch.setattr(checks, "run", lambda model, x, y, name, twin, options: asked.append((len(x), options)))
    run("--ckpt", tmp_path / "m.pt", "--checks", "--limit", 10, "--measures", "pgd steps=7")
    run("--ckpt", tmp_path / "m.pt", "--checks", "--out_dir", tmp_path / "new")
    assert [n for n, _ in asked] == [10, 64] and [how["steps"] for _, how in asked] == [7, 20]
    assert {p: p.read_bytes() for p in tmp_path.rglob("*.*")} == before


def test_the_twin_of_the_checks_is_a_softmax_model_of_source_or_else_of_the_others(monkeypatch):
    twins = []
    monkeypatch.setattr(checks, "run", lambda *given: twins.append(given[4]))
    rpc, softmax, source = (loaded(name, name, kind) for name, kind in
                            (("a", "rpc 4iter/layer1"), ("b", "softmax"), ("c", "softmax")))
    for other, expected in ((None, ["b", None]), (source, ["c", "c"]), (rpc, [None, None])):
        twins.clear()
        eval_robust.run_checks([rpc, softmax], other, load_shapes("test", 4), [], alone())
        assert twins == [expected[0], expected[1]]


def test_several_processes_check_as_many_images_as_one(tmp_path, monkeypatch):
    make_checkpoint(tmp_path / "m.pt")
    monkeypatch.setattr(checks, "run", lambda model, x, *_: print("checked", len(x)))
    printed, silent = group(eval_robust.main, ["--ckpt", str(tmp_path / "m.pt"), "--checks", "--limit", "10"])
    assert "checked 10" in printed and "checked" not in silent


def test_a_source_that_was_trained_anew_is_measured_anew(tmp_path):
    make_checkpoint(tmp_path / "m.pt")
    for seed, n in ((1, 1), (1, 1), (2, 2)):
        make_checkpoint(tmp_path / "s.pt", seed=seed)
        rows = rows_of(tmp_path / "r", "--ckpt", tmp_path / "m.pt", "--source", tmp_path / "s.pt",
                       "--measures", "transfer eps=4/255 steps=1", "--limit", 8, "--resume")
        assert len(rows) == n


def test_only_transfer_is_made_on_the_source(monkeypatch):
    victims = {}
    monkeypatch.setattr(score, "attack_row", lambda m, job, args, victim: victims.update({job.measure.name: victim}))
    for name in ("pgd", "transfer"):
        classifiers.rows([loaded(None)], job(name, {}, None, [0]), None, None, loaded("the source"))
    assert victims == dict(pgd=None, transfer="the source")


def test_the_table_is_written_after_every_row(tmp_path, monkeypatch):
    def killed(*args, **how):
        raise OSError("killed")

    make_checkpoint(tmp_path / "m.pt")
    monkeypatch.setitem(measures.ATTACKS, "pgd", killed)
    assert "killed" in error("--ckpt", tmp_path / "m.pt", "--measures", "clean", "fgsm", "pgd", "--limit", 8,
                             "--eps", "2/255", "--out_dir", tmp_path / "r")
    table = (tmp_path / "r" / "table.md").read_text()
    assert "| clean, top-1" in table and "| fgsm 2/255, top-1" in table and "pgd" not in table


# --- bad input -------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """A folder with models that do not go together, and folders of images."""
    folder = tmp_path_factory.mktemp("odd")
    make_checkpoint(folder / "a.pt")
    make_checkpoint(folder / "large.pt", image_size=64)
    make_checkpoint(folder / "other.pt", [f"c{i}" for i in range(10)])
    make_checkpoint(folder / "two.pt", ["n0", "n1"], task="imagenet")
    common.save(folder / "chess.pt", dict(task="chess"))
    for i, c in enumerate(["n0", "n1"]):
        (folder / "photos" / "val" / c).mkdir(parents=True)
        write_png(load_shapes("test", 2).images[i], str(folder / "photos" / "val" / c / "0.png"))
    return folder


# flags after --ckpt a.pt: what the line must hold
BAD = {
    "--measures fgms": "known are clean",
    "--measures|": "known are clean",
    "--measures perplexity": "known are clean",
    "--measures|pgd step=3": "known are eps, steps, alpha",
    "--measures|clean eps=1/255": "eps is no setting of clean; there are none",
    "--measures|pgd eps=1/255 eps=2/255": "eps is given twice, expected eps=VALUE,VALUE",
    "--measures|autoattack clip=no": "autoattack keeps to [0, 1] in any case, expected clip=yes",
    "--measures|pgd restarts=2 random_start=no": "expected random_start=yes",
    "--measures|pgd steps=0": "steps=0, expected int from 1",
    "--measures|pgd alpha=0": "alpha=0, expected float from 1e-09",
    "--measures|noise kind=red": "kind=red, expected uniform or gaussian",
    "--measures|fgsm eps=2/255,8": "was 8/255 meant",
    "--measures|fgsm clip=maybe": "clip=maybe, expected yes or no",
    "--window 8": "--window is for segmentation and language modelling",
    "--data camvid": "expected one of shapes, cifar10, imagenet, folder",
    "--eps 8": "was 8/255 meant",
    "--eps=-1/255": "0 <= eps <= 1",
    "--eps 1/0": "division by zero",
    "--eps 8/x": "invalid budget value: '8/x'",
    "--severities 6": "from 1 to 5",
    "--limit 81": "there are only 80",
    "--measures transfer": "needs --source",
    "--data imagenet": "needs --data_dir",
    "--imagenet_o o": "--imagenet_o needs --data imagenet, not shapes",
    "--measures corruptions --frost_dir nowhere": "nowhere",
    "--ckpt nowhere.pt": "nowhere.pt",
    "--device tpu": "--device",
    "--source large.pt": "--source: the models have image_size [32, 64]",
    "--source two.pt": "--source: the models have num_classes [2, 10]",
    "--source other.pt": "--source other.pt was trained on 10 other classes",
    "--source chess.pt": "--source chess.pt: not a checkpoint of train_cls.py",
    "--data folder --data_dir photos": "--ckpt a.pt was trained on 10 other classes (",
    "--ckpt two.pt --data_dir photos --num_workers 0 --measures clean autoattack": "autoattack compares four logits",
}


@pytest.mark.parametrize("flags", BAD)
def test_bad_flags_are_one_clear_line(odd, monkeypatch, flags):
    monkeypatch.chdir(odd)
    parts = flags.split("|") if "|" in flags else flags.split()
    assert BAD[flags] in error("--ckpt", "a.pt", "--out_dir", "bad", *parts) and not (odd / "bad").exists()
