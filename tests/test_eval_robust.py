"""Evaluate classifiers: rows equal plain loops, networks come from paths or from a program."""

import contextlib
import io
import math
import re
from argparse import Namespace
from functools import partial
from pathlib import Path

import pytest
import torch
from torchvision.io import write_png

import common
import eval_robust
from data import datasets
from data.shapes import SHAPES, load_shapes
from eval_robust import ImageFiles, epoch_order
from fixtures import ROOT
from golden_net import trained_network
from models import load_classifier
from processes import group
from robust import attacks, corruptions, evaluate, metrics
from runs import call, flags, refused
from vit import ViT, ViTConfig


def test_outlier_metrics_follow_their_definition():
    g = torch.Generator().manual_seed(0)
    for values in (9, 10 ** 6):                                          # with ties and without
        s = torch.randint(0, values, (300,), generator=g)
        positive = torch.rand(300, generator=g) < 0.3
        area, recall = 0.0, 0.0
        for t in s.double().unique().flip(0):
            true = (positive & (s >= t)).double().sum()
            area += (true / positive.sum() - recall) * true / (s >= t).sum()
            recall = true / positive.sum()
        assert metrics.average_precision(s, positive) == pytest.approx(area.item(), abs=1e-12)


# --- robust.evaluate ------------------------------------------------------------------------------

def test_evaluate_attacks_right_images_by_number():
    model, images, labels = trained_network(20)
    labels = labels.clone()
    labels[::3] = (model(images).argmax(1)[::3] + 1) % 10                # these count as wrong
    seen = []

    def invert(model, x, y, index):
        seen.extend(index.tolist())
        return 1 - x

    pgd = partial(attacks.pgd, eps=4 / 255, steps=5)
    right = evaluate(model, images, labels, {"pgd": pgd, "invert": invert}, batch_size=6,
                     index=torch.arange(100, 120))
    assert torch.equal(right["clean"], model(images).argmax(1) == labels)
    assert seen == (100 + right["clean"].nonzero()[:, 0]).tolist()
    assert 0 < right["pgd"].sum() < right["clean"].sum()
    assert torch.equal(right["worst"], right["clean"] & right["pgd"] & right["invert"])


def test_evaluate_moves_the_index_to_the_images():
    """No GPU is needed: the index says to which device it was moved."""
    model, images, labels = trained_network(4)
    moved = []

    class Index(torch.Tensor):
        def to(self, device):
            moved.append(device)
            return super().to(device)

    index = torch.arange(4).as_subclass(Index)
    evaluate(model, images, labels, {"same": lambda model, x, y, index: x}, index=index)
    assert moved == [images.device]


def leave_train_mode(model, x, y):
    model.train()
    return x


@pytest.mark.parametrize("words, attack", [
    ("returns images", lambda model, x, y: x[:1]), ("not finite", lambda model, x, y: x * math.nan),
    ("expected 0 to 1", lambda model, x, y: 2 * x - 1), ("train mode", leave_train_mode)])
def test_evaluate_checks_what_an_attack_returns(words, attack):
    model, images, labels = trained_network(4)
    with pytest.raises(ValueError, match=words):
        evaluate(model, images, labels, {"a": attack})
    close = evaluate(model.eval(), images, labels, {"a": lambda model, x, y: x + 5e-7})
    assert torch.equal(close["a"], close["clean"])                      # rounding is allowed


def test_evaluate_rejects_wrong_calls():
    """The arg max of nan is class 0, so a wrong answer would count as right."""
    model, x, y = trained_network(4)

    def nan_where_dark(x):
        return model(x) * (1 if x.amax() > 0.5 else math.nan)

    dark = {"a": lambda model, x, y: x / 4}
    for net, labels, attack, words in (
            (model, y + 20, {}, "labels are"), (model, y[:, None], {}, "labels are"),
            (model, y, dict(worst=dark["a"]), "an attack has the name clean or worst"),
            (nan_where_dark, y, dark, "not finite"),
            (trained_network(4)[0].train(), y, {}, "train mode")):
        with pytest.raises(ValueError, match=words):
            evaluate(net, x, labels, attack)


# --- the script -----------------------------------------------------------------------------------

@pytest.fixture(autouse=True)
def an_empty_folder(tmp_path, monkeypatch):
    """Work in an empty folder; there are 80 test scenes, for speed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(datasets.DATASETS, "shapes", few_scenes)


def few_scenes(part, args, device, classes=None):
    return load_shapes(part, 80, args.image_size)


def make_checkpoint(path="m.pt", attn="rpc", changed={}, **flags):
    """Save a shipped network with other flags."""
    checkpoint = common.load(ROOT / f"weights/shapes_{attn}.pt")
    common.save(Path(path), checkpoint | dict(args=checkpoint["args"] | flags) | changed)


def run(*parts):
    """Run the script in this process; return what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        call(eval_robust.main, "--device cpu", *parts)
    return out.getvalue()


def read(folder="r"):
    """Return the rows of a folder, in the order of writing."""
    return common.read_log(Path(folder, "results.jsonl"))


def bits(row, severity=0):
    """Return which images of a row are right, (n,) bool."""
    return torch.tensor([digit == "1" for digit in row["right"][severity]])


QUICK = ("--measures clean noise pgd apgd corruptions --steps 5 --limit 7 --eps 2/255 --severities "
         "4 --out_dir")
SEED = ("--ckpt m.pt --measures noise fog --severities 2 4 --limit 30 --seed 3 --device cpu "
        "--out_dir").split()
CLEAN = "--measures clean --limit 5 --out_dir r"


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    """Return (folder, output) of a run on two models, a.pt and b.pt, with rows in one/."""
    folder = tmp_path_factory.mktemp("eval")
    make_checkpoint(folder / "a.pt")
    make_checkpoint(folder / "b.pt", attn="softmax")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(datasets.DATASETS, "shapes", few_scenes)
        return folder, run("--ckpt", [folder / "a.pt", folder / "b.pt"], QUICK, [folder / "one"])


def test_a_table_has_every_row_once(first_run):
    folder, printed = first_run
    rows = read(folder / "one")
    assert len(rows) == 2 * 19 and all(row["commit"] and row["torch"] for row in rows)
    mean = sum(row["top1"] for row in rows[::2] if row["name"] in corruptions.NAMES) / 15
    assert re.search(rf"\| corruptions type=mean severities=4, top1 +\| 7 +\| {mean:.2f} ", printed)
    for name in ("clean", "noise eps=0.068", "pgd steps=5 eps=2/255",
                 "worst eps=2/255 of=apgd loss=ce steps=5,pgd steps=5"):
        assert len(re.findall(rf"^\| {name}, top1 +\|", printed, re.M)) == 1, name
    assert re.search(rf"\| images \| {folder}/a.pt +\| {folder}/b.pt +\|", printed)


def test_rows_equal_a_plain_loop(first_run):
    folder, _ = first_run
    row = {row["name"]: row for row in read(folder / "one") if row["network"].endswith("a.pt")}
    net = load_classifier(common.load(folder / "a.pt"))
    images, labels = load_shapes("test", 80)[:2]
    index = epoch_order(80, epoch=0, seed=0)[:7]
    x, y = images[index].float() / 255, labels[index]
    with torch.no_grad():
        clean = net(x).argmax(1) == y
    adv = x.clone()
    adv[clean] = attacks.pgd(net, x[clean], y[clean], 2 / 255, steps=5, index=index[clean])
    assert torch.equal(bits(row["clean"]), clean)
    assert torch.equal(bits(row["pgd"]), net(adv).argmax(1) == y)
    assert row["clean"]["labels"] == y.tolist() and row["clean"]["classes"] == 10
    assert row["clean"]["per_class"] == {list(SHAPES)[k]: pytest.approx(
        100 * clean[y == k].float().mean().item()) for k in y.unique().tolist()}
    for name, numbers in row.items():
        assert numbers["top1"] == pytest.approx(100 * bits(numbers).float().mean().item()), name


def test_a_seed_and_severities_arrive():
    make_checkpoint()
    run(SEED, "r")
    noise, fog = read()
    net = load_classifier(common.load("m.pt"))
    images, labels = load_shapes("test", 80)[:2]
    index = epoch_order(80, epoch=0, seed=3)[:30]
    x, y = images[index], labels[index]
    for i, severity in enumerate((2, 4)):
        foggy = corruptions.corrupt(x, "fog", severity, seed=3, index=index) / 255
        assert torch.equal(bits(fog, i), net(foggy).argmax(1) == y)
    right = net(x / 255).argmax(1) == y
    adv = attacks.noise(net, x[right] / 255, y[right], 0.068, seed=3, index=index[right])
    far = (adv - x[right] / 255).double().flatten(1).norm(dim=1)
    assert noise["median_l2"] == pytest.approx(far.median().item(), rel=1e-6)


def test_two_processes_have_the_numbers_of_one():
    make_checkpoint()
    run(SEED, "one")
    group(eval_robust.main, flags(SEED, "two"))
    for one, two in zip(read("one"), read("two"), strict=True):
        for name in ("top1", "top5", "loss", "right", "median_l2", "per_class", "images"):
            assert one[name] == pytest.approx(two[name]), name
        assert (one["processes"], two["processes"]) == (1, 2)


def test_an_evaluation_writes_a_new_file():
    make_checkpoint()
    assert "| mean over seeds" not in run("--ckpt m.pt", CLEAN)
    before = Path("r/results.jsonl").read_bytes()
    line = refused(eval_robust, "--device cpu --ckpt m.pt", CLEAN)
    assert "r/results.jsonl exists" in line and "--out_dir" in line
    assert Path("r/results.jsonl").read_bytes() == before
    run("--ckpt m.pt --measures clean --limit 5")
    assert len(list(Path("out").glob("eval_*/results.jsonl"))) == 1


def test_adaptive_rows_without_PAP_are_the_plain_ones(monkeypatch):
    """The adaptive attack changes nothing here, so its own row is the clean one."""
    make_checkpoint("soft.pt", attn="softmax")
    make_checkpoint("rpc.pt")
    entry = (lambda model, images, labels, eps, **settings: images), dict(steps=20)
    monkeypatch.setitem(eval_robust.ATTACKS, "adaptive_pgd", entry)
    run("--ckpt soft.pt rpc.pt --measures clean pgd adaptive_pgd --steps 2 --limit 5 --eps 8/255 "
        "--out_dir r")
    _, clean, plain, attacked, copied, computed = (row["right"] for row in read())
    assert copied == plain and computed == clean != attacked
    for data in ("shapes", "imagenet"):                     # on the same images
        args = Namespace(data=data, limit=0, seed=0)
        for name in ("pgd", "apgd", "autoattack"):
            assert torch.equal(eval_robust.choose(9999, f"adaptive_{name}", args),
                               eval_robust.choose(9999, name, args))


# --- networks -------------------------------------------------------------------------------------

def linear(k=10, seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(),
                               torch.nn.Linear(48, k))


class Wrapped(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.net = linear()
        self.function = function

    def forward(self, x):
        return self.function(self.net, x)


def evaluate_networks(nets, words="--measures clean fog pgd --steps 2 --severities 1 --limit 8"):
    """Return the rows and what was printed."""
    flags = f"--data shapes --device cpu --eps 2/255 {words}"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        rows = eval_robust.evaluate_networks(nets, flags.split())
    common.print_once.cache_clear()
    return rows, out.getvalue()


def test_networks_of_a_program_are_evaluated():
    first, second = linear(), linear(seed=1)
    rows, printed = evaluate_networks({"mine": first, "other": second}, "--measures clean --limit 0")
    x, y = load_shapes("test", 80)[:2]
    for row, net in zip(rows, (first, second), strict=True):
        right = net(x / 255).argmax(1) == y
        assert row["top1"] == pytest.approx(100 * right.float().mean().item())
    assert re.search(r"images \| mine +\| other ", printed)
    assert first.training and all(p.requires_grad for p in first.parameters())      # as before
    assert "mine has no class names; its logits are taken in this order: 0 = arrow" in printed
    rows, _ = evaluate_networks({"large": linear()}, "--measures clean --limit 4 --image_size 48")
    assert rows[0]["size"] == 48
    with pytest.raises(common.InputError, match="seven has 7 classes"):
        evaluate_networks({"seven": linear(7)})


@pytest.mark.parametrize("function, note", [
    (lambda net, x: net(x + 0.1 * torch.randn_like(x)), "draws random numbers"),
    (lambda net, x: net(x).softmax(1), "numbers from 0 to 1"),
    (lambda net, x: torch.cosine_similarity(net(x)[:, None], torch.eye(10), dim=-1), ""),
    (lambda net, x: net((255 * x).round() / 255), "the gradient is exactly 0")])
def test_guesses_are_lines_and_no_errors(function, note):
    """A randomised network, probabilities, cosine logits, a network that rounds."""
    rows, printed = evaluate_networks({"mine": Wrapped(function)})
    assert [row["images"] for row in rows] == [8, 8, 8] and note in printed
    assert bool(note) == ("note: " in printed)


def test_a_network_without_a_gradient_is_evaluated():
    """Attacks along the gradient print a line."""
    net = Wrapped(torch.no_grad()(lambda net, x: net(x)))
    rows, printed = evaluate_networks({"mine": net}, "--measures clean fog square pgd --limit 4")
    assert [row["name"] for row in rows] == ["clean", "fog", "square", "pgd"]
    assert "or has no gradient" in printed


@pytest.mark.parametrize("function, words", [
    (lambda net, x: net(x) + net(x).mean(0), "change with the other images of the batch"),
    (lambda net, x: net(x.sub_(0.1)), "changes its input images in place"),
    (lambda net, x: net(x) * math.nan, "not finite")])
def test_networks_that_cannot_be_measured_are_errors(function, words):
    with pytest.raises(common.InputError, match=words):
        evaluate_networks({"mine": Wrapped(function)})


def test_networks_of_other_data_are_errors():
    make_checkpoint()
    make_checkpoint("other.pt", data="cifar10")
    for names in ("m.pt other.pt", "other.pt m.pt"):
        line = refused(eval_robust, "--device cpu --ckpt", names)
        assert "differ in data: ['cifar10', 'shapes']" in line and "--data" in line
    make_checkpoint("reversed.pt", changed=dict(classes=list(SHAPES)[::-1]))
    line = refused(eval_robust, "--device cpu --ckpt m.pt reversed.pt", CLEAN)
    assert "reversed.pt has 10 classes ['triangle'" in line
    make_checkpoint("cifar.pt", data="cifar10", data_dir="missing", download=True)
    line = refused(eval_robust, "--device cpu --ckpt cifar.pt")
    assert "missing contains no folder cifar-10" in line and not Path("missing").exists()


# --- folders of images ----------------------------------------------------------------------------

def test_imagenet_a_and_o_are_scored_by_image():
    """A network whose answers depend on the image, so that no order of labels is right by chance."""
    torch.manual_seed(0)
    net = ViT(ViTConfig(32, 16, 1000, 64, 1, 1, attn="softmax")).eval()
    for p in net.parameters():
        p.data.mul_(4)
    torch.save(net.state_dict(), "net.pt")
    names = [eval_robust.IMAGENET[i] for i in (3, 7, 500)]
    for folder, few in (("val", names), ("a", names[:2]), ("o", names[1:])):
        for k, name in enumerate(few):
            Path(folder, name).mkdir(parents=True)
            for i in range(6):
                image = torch.rand(3, 40, 40) ** (1 + i + k)
                write_png((255 * image).byte(), f"{folder}/{name}/{i}.png")
    how = ("--ckpt net.pt --data imagenet --data_dir . --imagenet_a a --imagenet_o o --num_workers 0 "
           "--measures imagenet_a imagenet_o --out_dir")
    run(how, "r")
    a, o = read()
    for flag in ("--imagenet_a", "--imagenet_o"):
        line = refused(eval_robust, how.replace(f"{flag} {flag[-1]}", f"{flag} x"), flag[2:])
        assert f"there is no folder x; {flag} selects it" in line

    def logits(folder, columns):
        tree = ImageFiles(folder, Namespace(image_size=32, num_workers=0), eval_robust.IMAGENET)
        kept = [i for i, label in enumerate(tree.labels) if label in columns]
        pixels = torch.stack([tree[i, i][0] for i in kept]) / 255
        return net(pixels)[:, columns], tree.labels[kept]
    z, labels = logits("a", [3, 7])
    right = z.argmax(1) == (labels == 7).long()
    order = epoch_order(12, epoch=0, seed=0)
    assert 0 < right.sum() < 12 and torch.equal(bits(a), right[order])
    assert [*a["per_class"]] == names[:2] and set(a["labels"]) == {3, 7}
    doubt = [-logits(folder, [7, 500])[0].softmax(1).amax(1) for folder in ("o", "val")]
    expected = metrics.average_precision(torch.cat(doubt), torch.arange(24) < 12)
    assert o["aupr"] == pytest.approx(100 * expected, rel=0.02) and o["chance"] == 50
    assert abs(o["aupr"] - o["chance"]) > 5


def test_released_corruptions_match_the_test_images():
    """--corrupted_dir reads <type>/<severity>/<class>/*; other images are an error."""
    classes = sorted(SHAPES)
    make_checkpoint(changed=dict(classes=classes), data="folder")
    images, labels = load_shapes("test", 40)[:2]
    for root, change in (("photos/test", 0), ("c/fog/3", 100)):
        for i, (image, k) in enumerate(zip(images, labels)):
            folder = Path(root, list(SHAPES)[k])
            folder.mkdir(parents=True, exist_ok=True)
            write_png((image.int() + change).clamp(0, 255).byte(), str(folder / f"{i:03d}.png"))
    how = ("--ckpt m.pt --data_dir photos --measures fog --severities 3 --corrupted_dir c --device "
           "cpu --num_workers 0 --out_dir")
    run(how, "r")
    row, = read()
    net = load_classifier(common.load("m.pt"))
    pale = (images.int() + 100).clamp(0, 255) / 255
    expected = net(pale).argmax(1) == torch.tensor([classes.index(list(SHAPES)[k]) for k in labels])
    assert row["images"] == 40 and row["top1"] == pytest.approx(100 * expected.double().mean().item())
    next(Path("c/fog/3/star").iterdir()).unlink()
    assert "c/fog/3 has other images than the test images" in refused(eval_robust, how, "s")
    line = refused(eval_robust, how.replace("--corrupted_dir c", "--corrupted_dir d"), "t")
    assert "there is no folder d/fog/3; --corrupted_dir selects it" in line


def test_photographs_of_frost_arrive():
    for kind in ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg"):
        write_png(torch.full((3, 300, 300), 90, dtype=torch.uint8), kind)
    make_checkpoint()
    for folder, flag in (("a", ""), ("b", "--frost_dir .")):
        run("--ckpt m.pt --measures frost --severities 5 --limit 30", flag, "--out_dir", folder)
    assert read("a")[0]["loss"] != read("b")[0]["loss"]
