"""Evaluate classifiers: rows equal plain loops, are kept and pooled, and fill the table."""

import contextlib
import io
import json
import math
import os
import re
import shutil
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.io import write_png

import common
import eval_robust
import results
from data.shapes import SHAPES, load_shapes
from results import row_key, rows_table, unpack
from fixtures import ROOT
from golden_net import trained_network
from processes import group
from robust import attacks, corruptions, evaluate, metrics
from runs import call, flags, refused
from vit import ViT, ViTConfig

# Table 4, SymViT: top-1 accuracy per corruption, mean over severities, in ImageNet-C's order
TABLE_4 = dict(zip(corruptions.NAMES, (40.97, 38.83, 38.56, 35.47, 27.79, 40.47, 30.69, 38.27,
                                       44.55, 42.72, 63.21, 50.25, 44.26, 39.36, 46.28)))


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


@pytest.mark.parametrize("name", ["clean", "worst"])
def test_evaluate_keeps_the_names_of_its_results(name):
    model, images, labels = trained_network(2)
    with pytest.raises(ValueError, match=f"an attack has the name '{name}'"):
        evaluate(model, images, labels, {name: lambda model, x, y: x})


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


def test_evaluate_checks_what_an_attack_returns():
    model, images, labels = trained_network(8)

    def leave_train_mode(model, x, y):
        model.train()
        return x

    wrong = {"returns images": lambda model, x, y: x[:1],
             "not finite": lambda model, x, y: x * float("nan"),
             "expected 0 to 1": lambda model, x, y: 2 * x - 1,
             "train mode": leave_train_mode}
    for words, attack in wrong.items():
        with pytest.raises(ValueError, match=words):
            evaluate(model.eval(), images, labels, {"a": attack})
    close = evaluate(model.eval(), images, labels, {"a": lambda model, x, y: x + 5e-7})
    assert torch.equal(close["a"], close["clean"])                      # rounding is allowed


def test_evaluate_rejects_nan_on_attacked_images():
    """The arg max of nan is class 0, so a wrong answer would count as right."""
    images = torch.full((2, 3, 4, 4), 0.5)
    labels = torch.zeros(2, dtype=torch.int64)

    def model(x):
        logits = torch.tensor([2.0, -1.0]).expand(len(x), 2)
        return logits if x.min() > 0.4 else math.nan * logits

    with pytest.raises(common.InputError, match="not finite"):
        evaluate(model, images, labels, {"darken": lambda model, x, y: x / 2})


def test_evaluate_rejects_networks_that_do_not_repeat():
    _, images, labels = trained_network(4)
    weights = torch.randn(3 * 32 * 32, 10, generator=torch.Generator().manual_seed(0))

    def dropout(x):
        return torch.nn.functional.dropout(x.flatten(1), 0.5) @ weights

    with pytest.raises(common.InputError, match="dropout"):
        evaluate(dropout, images, labels, {})
    with pytest.raises(common.InputError, match="probabilities"):
        evaluate(lambda x: 100 * (x.flatten(1) @ weights).softmax(1), images, labels, {})


def test_evaluate_rejects_wrong_labels_and_train_mode():
    model, images, labels = trained_network(4)
    with pytest.raises(ValueError, match="images is empty, expected 1 image"):
        evaluate(model, images[:0], labels[:0], {})
    for wrong in (labels + 20, labels[:, None], torch.nn.functional.one_hot(labels, 10)):
        with pytest.raises(ValueError, match="labels are"):
            evaluate(model, images, wrong, {})
    with pytest.raises(ValueError, match="train mode"):
        evaluate(model.train(), images, labels, {})


@pytest.fixture(autouse=True)
def an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def make_checkpoint(path="m.pt", attn="rpc", **flags):
    """Save a shipped network as if it was trained on few scenes: then few scenes test it."""
    checkpoint = common.load(ROOT / f"weights/shapes_{attn}.pt")
    args = checkpoint["args"] | dict(num_images=400) | flags
    common.save(Path(path), checkpoint | dict(args=args))


def run(*parts):
    """Run the script in this process; return what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        call(eval_robust.main, "--device cpu", *parts)
    return out.getvalue()


def stored_table(*paths):
    """Return what --table prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        call(eval_robust.main, ["--table", *paths])
    return out.getvalue()


def read(folder="r"):
    """Return the rows of a folder, in the order of writing."""
    return [json.loads(line) for line in Path(folder, "results.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def no_stale_bytecode(monkeypatch):
    """Write no .pyc file: Python would use it if a test edits the module within one second."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


@pytest.fixture
def few_scenes(monkeypatch):
    """Render 80 test scenes instead of all for a model without a training."""
    monkeypatch.setattr(eval_robust, "load_part", lambda part, flags, device: load_shapes(
        "test", 80, flags["image_size"]))


QUICK = ("--measures clean noise pgd apgd corruptions --steps 5 --limit 7 --eps 2/255 --severities "
         "4 --out_dir")


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    """Return (folder, flags, output) of a run on two models, a.pt and b.pt, with rows in one/."""
    folder = tmp_path_factory.mktemp("eval")
    make_checkpoint(folder / "a.pt")
    make_checkpoint(folder / "b.pt", attn="softmax")
    models = ["--ckpt", folder / "a.pt", folder / "b.pt"]
    return folder, models, run(models, QUICK, [folder / "one"])


def test_table_has_every_row_once(first_run):
    folder, _, printed = first_run
    rows = read(folder / "one")
    assert len(rows) == 2 * 19 and all(row["commit"] and row["torch"] for row in rows)
    mean = np.mean([row["top1"] for row in rows[::2] if row["name"] == "corruptions"])
    assert re.search(rf"\| corruptions type=mean severities=4, top1 +\| 7 +\| {mean:.2f} ", printed)
    for name in ("clean", "noise eps=0.068", "pgd steps=5 eps=2/255",
                 "worst eps=2/255 of=apgd loss=ce steps=5,pgd steps=5"):
        assert len(re.findall(rf"^\| {name}, top1 +\|", printed, re.M)) == 1, name


def test_rows_equal_a_plain_loop(first_run):
    folder, *_ = first_run
    row = {row["name"]: row for row in read(folder / "one") if row["model"].startswith("rpc")}
    net = eval_robust.load_model(folder / "a.pt", torch.device("cpu")).net
    images, labels = load_shapes("test", 80, 32)[:2]
    index = eval_robust.epoch_order(80, epoch=0, seed=0)[:7]
    x, y = images[index].float() / 255, labels[index]
    with torch.no_grad():
        clean = net(x).argmax(1) == y
    adv = x.clone()
    adv[clean] = attacks.pgd(net, x[clean], y[clean], 2 / 255, steps=5, index=index[clean])
    assert torch.equal(unpack(row["clean"]["right"], 7), clean)
    assert torch.equal(unpack(row["pgd"]["right"], 7), net(adv).argmax(1) == y)
    assert row["pgd"]["max_linf"] == pytest.approx((adv - x).abs().max().item(), abs=1e-9)


def test_two_processes_count_every_image_once(first_run):
    folder, models, _ = first_run
    group(eval_robust.main, flags(models, "--device cpu",
                                  QUICK.replace("corruptions", "fog"), "two"))
    alone, shared = {row_key(row): row for row in read(folder / "one")}, read("two")
    assert len(shared) == 2 * 5
    assert all(alone[row_key(two)]["right"] == two["right"] for two in shared)


def test_second_run_adds_missing_rows(first_run):
    folder, models, _ = first_run
    text, cut = (folder / "one/results.jsonl").read_text(), Path("r/results.jsonl")
    cut.parent.mkdir()
    kept = "".join(text.splitlines(keepends=True)[:33])
    cut.write_text(kept)
    run(models, QUICK, "r")
    assert cut.read_text().startswith(kept)                             # not computed again
    found, expected = ([(row["name"], row["top1"], row["right"]) for row in read(name)]
                       for name in ("r", folder / "one"))
    assert found == expected


CLEAN = "--measures clean --limit 5 --out_dir r"


def test_other_test_images_are_another_row():
    for count in (400, 800):
        make_checkpoint(num_images=count)
        run("--ckpt m.pt", CLEAN)
    first, second = read()
    assert first["weights"] == second["weights"]


def test_rows_without_a_sparse_part_are_reused():
    """lambda = inf is no number in JSON, but its row is found again."""
    make_checkpoint()
    checkpoint = common.load("m.pt")
    checkpoint["model_config"]["pap"]["lambd"] = float("inf")
    common.save(Path("m.pt"), checkpoint)
    for _ in range(2):
        run("--ckpt m.pt", CLEAN)
    row, = read()
    assert row["model_config"]["lambd"] == "inf"


def test_an_edited_import_makes_another_row(few_scenes):
    Path("m.py").write_text(
        "import runpy\nfrom pathlib import Path\ndef build():\n    return "
        "runpy.run_path(Path(__file__).with_name('net.py'))['net']\n")
    for last in ("ELU", "Tanh"):                          # neither has weights
        Path("net.py").write_text(
            "import torch\ntorch.manual_seed(0)\nnet = torch.nn.Sequential(torch.nn.Flatten(), "
            f"torch.nn.Linear(3072, 10), torch.nn.{last}())\n")
        run("--model m.py:build --data shapes", CLEAN)
    assert len(read()) == 2


def test_other_size_or_frost_is_another_row(few_scenes):
    Path("m.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(4), "
        "torch.nn.Flatten(), torch.nn.Linear(48, 10))\n")
    for kind in ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg"):
        write_png(torch.full((3, 300, 300), 90, dtype=torch.uint8), kind)
    for how in ("16", "32", "32 --frost_dir ."):
        run("--model m.py:build --data shapes --severities 5", CLEAN, "--measures clean frost "
            "--image_size", how)
    assert [(row["name"], row["size"]) for row in read()] == [
        ("clean", 16), ("corruptions", 16), ("clean", 32), ("corruptions", 32), ("corruptions", 32)]


def write_network(path, answer, folder="."):
    """Write my.py whose network imports its answer, a class, from a neighbour."""
    Path(folder).mkdir(exist_ok=True)
    Path(folder, f"{path}.py").write_text(
        "import torch\nfrom attention import naive_attention\n"
        f"answer = {answer}\ndef logits(x):\n"
        "    return 5 * torch.eye(10)[[answer] * len(x)] - 1 + 0 * x.mean()\n"
        if path == "helper" else
        "import helper, torch\nclass Net(torch.nn.Module):\n    def forward(self, x):\n"
        "        return helper.logits(x)\ndef build():\n    return Net()\n")


def test_files_do_not_touch_each_other(few_scenes):
    """Each file has its own neighbours; the project keeps its attention.py."""
    for folder, answer in (("a", 1), ("b", 2), ("12:30", 3)):
        write_network("helper", answer, folder)
        write_network("my", answer, folder)
        Path(folder, "attention.py").write_text("naive_attention = None\n")
    before = sys.modules["attention"]
    run("--model a/my.py:build b/my.py:build 12:30/my.py:build --data shapes", CLEAN)
    labels = load_shapes("test", 80)[1][eval_robust.epoch_order(80, epoch=0, seed=0)[:5]]
    assert [row["top1"] for row in read()] == [
        pytest.approx(100 * (labels == k).float().mean().item(), abs=1e-3) for k in (1, 2, 3)]
    assert sys.modules["attention"] is before and "helper" not in sys.modules
    assert before.naive_attention and str(Path("a").resolve()) not in sys.path


def test_hidden_modules_are_part_of_code(few_scenes, monkeypatch):
    """The project's attention.py attacks a network that imports another attention.py."""
    visible = []

    def recorded(*files):
        visible.append(sys.modules.get("attention") is before and files)
        return "c"

    before = sys.modules["attention"]
    for name in ("helper", "my"):
        write_network(name, 1)
    Path("attention.py").write_text("naive_attention = None\n")
    monkeypatch.setattr(eval_robust, "code_hash", recorded)
    eval_robust.load_file("my.py:build", 32, torch.device("cpu"))
    assert {path.name for path in visible[-1]} >= {"my.py", "helper.py", "attention.py"}


@pytest.mark.parametrize("name", ["helper", "results"])
def test_imports_in_a_forward_are_errors(few_scenes, name):
    """Later they would fail, or find the project's module of this name."""
    before = dict(sys.modules)
    Path(f"{name}.py").write_text("def logits(x):\n    return x.flatten(1)[:, :10]\n")
    Path("my.py").write_text(
        f"import torch, {name}\nclass Net(torch.nn.Module):\n    def forward(self, x):\n"
        f"        from {name} import logits\n        return logits(x)\n"
        "def build():\n    return Net()\n")
    line = refused(eval_robust, "--device cpu --model my.py:build --data shapes", CLEAN)
    assert f"the network imports {name} when it runs; expected this import at the top" in line
    assert sys.modules.get(name) is before.get(name)


def test_an_edited_neighbour_makes_another_row(few_scenes):
    for answer in (1, 2, 2):
        write_network("helper", answer)
        write_network("my", answer)
        run("--model my.py:build --data shapes", CLEAN)
    assert len({row["code"] for row in read()}) == len(read()) == 2


def test_code_is_what_is_loaded_from_the_project():
    loaded = {path.name for path in eval_robust.loaded_modules(ROOT).values()}
    assert {"attention.py", "attacks.py", "datasets.py", "fan.py", "results.py"} <= loaded
    assert not any("site-packages" in str(path)
                   for path in eval_robust.loaded_modules(Path("/")).values())
    before = eval_robust.code_hash()
    Path("more.py").write_text("a = 1\n")
    assert before == eval_robust.code_hash() != eval_robust.code_hash(Path("more.py"))


def test_adaptive_rows_without_PAP_are_the_plain_ones(monkeypatch):
    make_checkpoint("rpc.pt")
    make_checkpoint("soft.pt", attn="softmax")
    calls = []

    def counted(model, images, labels, eps, **settings):
        calls.append(len(images))
        return attacks.pgd(model, images, labels, eps, **settings)

    monkeypatch.setitem(eval_robust.ATTACKS, "adaptive_pgd", eval_robust.Attack(
        counted, dict(steps=20)))
    run("--ckpt soft.pt rpc.pt --measures pgd adaptive_pgd --steps 2 --limit 5 --eps 4/255 "
        "--out_dir r")
    plain, _, copied, computed = read()
    assert len(calls) == 1 and "same_as" not in computed
    assert (copied["name"], copied["same_as"]) == ("adaptive_pgd", "pgd")
    assert copied["right"] == plain["right"] and copied["weights"] == plain["weights"]
    table = stored_table("r")
    assert "worst eps=4/255 of=adaptive_pgd steps=2,pgd steps=2" in table


def test_an_evaluation_downloads_nothing():
    make_checkpoint(data="cifar10", download=True)
    line = refused(eval_robust, "--device cpu --ckpt m.pt --data_dir missing")
    assert "no folder 'missing/val'" in line
    assert not Path("missing").exists()


def test_order_of_checkpoints_decides_nothing():
    make_checkpoint("few.pt", num_images=400)
    make_checkpoint("more.pt", attn="softmax", num_images=800)
    run("--ckpt few.pt more.pt", CLEAN)
    run("--ckpt more.pt few.pt", CLEAN)
    assert len(read()) == 2
    make_checkpoint("other.pt", data="cifar10")
    for names in ("few.pt other.pt", "other.pt few.pt"):
        line = refused(eval_robust, "--device cpu --ckpt", names)
        assert "differ in data" in line and "shapes" in line and "--data" in line


def test_equal_networks_are_an_error():
    make_checkpoint("a.pt")
    make_checkpoint("copy.pt")
    line = refused(eval_robust, "--device cpu --ckpt a.pt copy.pt", CLEAN)
    assert "a.pt and copy.pt are the same network" in line


@pytest.mark.parametrize("words, expected", [
    ("--measures clean --eps 2/255", "--eps: no effect with"),
    ("--measures cw --eps 2/255", "--eps: no effect with"),
    ("--measures clean fgsm --steps 3", "--steps: no effect with"),
    ("--measures clean --severities 3", "--severities: no effect with"),
    ("--measures fog --frost_dir x", "--frost_dir: no effect with"),
    ("--measures clean --preset paper", "--preset: no effect with"),
    ("--image_size 64", "--image_size: no effect without --model"),
    ("--measures frost --frost_dir x --corrupted_dir y", "--frost_dir: no effect with --corrupted"),
    ("--measures spsa --preset paper --eps 2/255", "--eps: no effect with"),
    ("--measures clean --imagenet_a x", "--imagenet_a: no effect with"),
    ("--measures clean imagenet_a", "imagenet_a needs --imagenet_a"),
    ("--data_dir photos", "--data_dir photos would do nothing"),
    ("--table r --out_dir o", "--out_dir: no effect with --table"),
    ("--limit 0", "expected 1 or more"), ("--limit -3", "expected 1 or more"),
    ("--steps 0", "expected 1 or more"), ("--batch_size 0", "expected 1 or more"),
    ("--num_workers -1", "expected 0 or more"), ("--eps 1/0", "from 0 to 1"),
    ("--num_workers 2", "--num_workers: no effect with --data shapes"),
    ("--seed -1", "from 0 to 2147483647"), ("--seed 2147483648", "from 0 to 2147483647"),
    ("--eps=-1/255", "from 0 to 1")])
def test_flags_without_effect_are_errors(words, expected):
    make_checkpoint()
    assert expected in refused(eval_robust, "--device cpu --ckpt m.pt", words)


def test_own_datasets_accept_num_workers(monkeypatch):
    class Own(torch.utils.data.Dataset):
        """Your own data set, whose images are not in memory."""
        labels = torch.zeros(4, dtype=torch.int64)
        classes = list(SHAPES)

        def __getitem__(self, key):
            position, index = key
            return torch.zeros(3, 32, 32, dtype=torch.uint8), 0, position

    monkeypatch.setattr(eval_robust, "load_part", lambda part, flags, device: Own())
    make_checkpoint()
    run("--ckpt m.pt --num_workers 0", CLEAN)
    assert read()[0]["images"] == 4


@pytest.mark.parametrize("data", ["shapes", "imagenet"])
def test_adaptive_attacks_get_the_plain_attacks_images(data):
    """A row of the plain attack on other images could not be copied."""
    args = Namespace(data=data, limit=None, seed=0)
    for adaptive, plain in eval_robust.PLAIN.items():
        assert torch.equal(eval_robust.choose(9999, adaptive, args),
                           eval_robust.choose(9999, plain, args))


def test_table_needs_rows_at_every_path():
    make_checkpoint()
    run("--ckpt m.pt", CLEAN)
    assert "| clean, top1" in stored_table("r")
    assert "nowhere: no rows" in refused(eval_robust, "--table r nowhere")


def test_seeds_get_a_second_table():
    checkpoint = common.load(ROOT / "weights/shapes_softmax.pt")
    for seed in (0, 1):
        weights = {name: w + 0.01 * seed for name, w in checkpoint["model"].items()}
        args = checkpoint["args"] | dict(num_images=400, seed=seed, out_dir=f"s{seed}")
        common.save(Path(f"s{seed}.pt"), checkpoint | dict(args=args, model=weights))
    table = run("--ckpt s0.pt s1.pt", CLEAN)
    assert "| mean over seeds" in table and ", n 2" in table and "train several" not in table
    assert "mean over seeds" in stored_table("r")


def test_batches_on_a_cpu_are_small():
    make_checkpoint()
    device = torch.device("cpu")
    model = eval_robust.load_model("m.pt", device)
    for size, images in ((16, 256), (32, 256), (224, 5), (1000, 1)):
        assert eval_robust.images_per_batch([model._replace(size=size)], device) == images


def test_the_memory_is_measured_after_loading(monkeypatch):
    """On a GPU, the images are in the memory that a batch can not use."""
    make_checkpoint()
    order = []
    for name in ("load_data", "images_per_batch"):
        def recorded(*args, function=getattr(eval_robust, name), name=name):
            order.append(name)
            return function(*args)

        monkeypatch.setattr(eval_robust, name, recorded)
    run("--ckpt m.pt", CLEAN)
    assert order == ["load_data", "images_per_batch"]


def test_images_of_another_size_are_an_error(monkeypatch):
    """CIFAR-10 is not resized."""
    make_checkpoint(data="cifar10")
    monkeypatch.setattr(eval_robust, "load_part",
                        lambda part, flags, device: load_shapes("test", 20, 48))
    line = refused(eval_robust, "--device cpu --ckpt m.pt", CLEAN)
    assert "cifar10 has images of 48 px, but the networks take 32 px; choose" in line


def test_a_data_set_is_hashed_once(monkeypatch):
    make_checkpoint()
    hashed = []

    def counted(data):
        hashed.append(data)
        return "f"

    monkeypatch.setattr(eval_robust, "fingerprint", counted)
    run("--ckpt m.pt --measures clean fgsm fog --eps 1/255 2/255 --limit 2 --out_dir r")
    assert len(hashed) == 1


def test_two_nodes_use_the_rows_of_the_first(tmp_path):
    """Rank 1 has another folder without rows."""
    make_checkpoint(tmp_path / "m.pt")
    words = ["--ckpt", str(tmp_path / "m.pt"), *CLEAN.split()]
    run(words[:2], CLEAN)
    text = Path("r/results.jsonl").read_text()
    changed = json.loads(text) | dict(top1=12.5)        # so that reading it is seen
    Path("r/results.jsonl").write_text(json.dumps(changed) + "\n")

    def main():
        if os.environ["RANK"] == "1":
            Path("node").mkdir()
            os.chdir("node")
        eval_robust.main()

    printed = group(main, [*words, "--measures", "clean", "noise", "--device", "cpu"])
    assert "12.50" in printed[0] and len(read()) == 2


def test_nodes_with_other_images_are_an_error(tmp_path):
    for rank in "01":
        make_checkpoint(tmp_path / f"{rank}.pt", num_images=400 + 400 * int(rank))

    def main():
        sys.argv[2] = str(tmp_path / f"{os.environ['RANK']}.pt")
        with pytest.raises(common.InputError, match="processes have different networks, code, im"):
            eval_robust.main()

    group(main, ["--ckpt", "?", *CLEAN.split(), "--device", "cpu"])


def test_paper_preset_attacks_normalised_images(monkeypatch):
    """A change of eps in normalised pixels is eps * std in pixels; only Square clips."""
    square = eval_robust.Attack(eval_robust.square, dict(queries=20))
    monkeypatch.setitem(eval_robust.PAPER_ATTACKS, "square", square)
    make_checkpoint()
    run("--ckpt m.pt --preset paper --measures fgsm pgd square --limit 4 --eps 6/255 --steps 2 "
        "--out_dir r")
    rows = {row["name"]: row for row in read()}
    for name in ("fgsm", "pgd"):
        assert rows[name]["settings"]["conditions"] == "paper"
        assert rows[name]["max_linf"] == pytest.approx(6 / 255 * 0.229, abs=1e-4)
    assert rows["square"]["max_linf"] > 0.1               # clipping to [0, 1] moves dark pixels


def test_paper_preset_stores_own_budgets(monkeypatch):
    """In the paper's code SPSA has one budget, so its row belongs to no worst case."""
    spsa = eval_robust.PAPER_ATTACKS["spsa"]
    few = spsa._replace(settings=spsa.settings | dict(pairs=1))
    monkeypatch.setitem(eval_robust.PAPER_ATTACKS, "spsa", few)
    make_checkpoint()
    run("--ckpt m.pt --preset paper --measures spsa --limit 1 --steps 1 --out_dir r")
    row, = read()
    assert row["own_eps"] and not results.has_shared_budget(row)
    assert row["settings"] == dict(steps=1, pairs=1, legacy=True, eps=0.1, conditions="paper")


def test_imagenet_folders_use_their_classes():
    """ImageNet-A counts the folder's classes only."""
    torch.manual_seed(0)
    net = ViT(ViTConfig(32, 16, 1000, 64, 1, 1, attn="softmax")).eval()
    torch.save(net.state_dict(), "net.pt")
    names = [eval_robust.IMAGENET[i] for i in (3, 7, 500)]
    g = torch.Generator().manual_seed(1)
    for folder, few in (("val", names), ("a", names[:2]), ("o", names[1:])):
        for name in few:
            Path(folder, name).mkdir(parents=True)
            for i in range(4):
                image = torch.randint(0, 256, (3, 40, 40), generator=g, dtype=torch.uint8)
                write_png(image, f"{folder}/{name}/{i}.png")
    run("--ckpt net.pt --data_dir . --imagenet_a a --imagenet_o o --measures clean imagenet_a "
        "imagenet_o --out_dir r --num_workers 0")
    clean, a, o = read()
    assert (clean["images"], a["images"], a["classes"], o["inside"]) == (12, 8, 2, 8)
    Path("o", names[1], "0.png").unlink()
    for limit in "78":                                    # both use 7 outliers; val/ has 8 images
        run("--ckpt net.pt --data_dir . --imagenet_o o --measures imagenet_o --out_dir limits "
            "--num_workers 0 --limit", limit)
    assert [row["inside"] for row in read("limits")] == [7, 8]
    Path("few/val").mkdir(parents=True)
    shutil.copytree(f"val/{names[0]}", f"few/val/{names[0]}")             # not in ImageNet-O
    line = refused(eval_robust, "--device cpu --ckpt net.pt --data_dir few --imagenet_o o "
                   "--measures imagenet_o --out_dir few")
    assert "few: val/ has no image of the 2 classes of --imagenet_o" in line
    tree = eval_robust.open_folder("a", eval_robust.IMAGENET, 32)
    logits = net(torch.stack([tree[i, i][0] for i in range(8)]).float() / 255)[:, [3, 7]]
    right = logits.argmax(1) == torch.tensor([0] * 4 + [1] * 4)
    assert a["top1"] == pytest.approx(100 * right.float().mean().item())


def test_released_corruptions_match_the_test_images():
    """--corrupted_dir reads <type>/<severity>/<class>/*; other images are an error."""
    make_checkpoint(data="folder")
    images, labels = load_shapes("test", 40)[:2]
    for root, change in (("photos", 0), ("c/fog/3", 100)):
        for i, (image, k) in enumerate(zip(images, labels)):
            folder = Path(root, sorted(SHAPES)[k])
            folder.mkdir(parents=True, exist_ok=True)
            write_png((image.int() + change).clamp(0, 255).byte(), str(folder / f"{i:03d}.png"))
    common.save(Path("m.pt"), common.load("m.pt") | dict(classes=sorted(SHAPES)))
    how = ("--ckpt m.pt --data_dir photos --measures fog --severities 3 --corrupted_dir c --out_dir"
           " r --device cpu --num_workers 0")              # the copies are files
    run(how)
    first, = read()
    assert first["images"] == 40 and len(first["top1"]) == 1
    next(Path("c/fog/3/star").iterdir()).unlink()
    assert "other images" in refused(eval_robust, how)


def test_released_corruptions_have_the_same_names():
    for root, names in (("a", "0.png 1.png"), ("b", "0.jpg 1.jpg"), ("c", "0.png 2.png")):
        for name in names.split():
            Path(root, "k").mkdir(parents=True, exist_ok=True)
            Path(root, "k", name).touch()
    images, endings, other = (eval_robust.open_folder(root, ["k"], 8) for root in "abc")
    eval_robust.check_copies(endings, images, "b")
    with pytest.raises(common.InputError, match="c has other images"):
        eval_robust.check_copies(other, images, "c")


def test_worst_case_is_taken_image_by_image():
    def row(name, right, images, eps=2 / 255):
        right = torch.tensor(right)
        return dict(weights="w", model_config={}, size=32, model="m", checkpoint="m.pt", data="d",
                    name=name, seed=0, images=images, settings=dict(eps=eps), max_linf=eps,
                    fingerprint="f", right=results.pack(right),
                    top1=100 * right.float().mean().item())
    rows = [row("pgd", [True, True, False, True], 4), row("fgsm", [True, False, True], 3)]
    worst, = results.worst_cases(rows)
    assert worst["top1"] == pytest.approx(100 / 3) and worst["images"] == 3
    assert "| worst eps=2/255 of=fgsm,pgd, top1 | 3      | 33.33 |" in rows_table(rows)
    assert not list(results.worst_cases([rows[0], row("fgsm", [True], 1, eps=4 / 255)]))
    other = rows[0] | dict(data="cifar10", top1=10.0)               # two data sets: two lines
    assert rows_table([rows[0], other]).count("pgd eps=2/255") == 2
    assert rows_table([rows[0], rows[0] | dict(fingerprint="g")]).count("pgd eps=2/255") == 2


def test_mean_of_corruptions_needs_all_types():
    """Released files have another fingerprint per type."""
    rows = [dict(weights="w", model_config={}, size=224, data="imagenet", name="corruptions",
                 model="m", checkpoint="m.pt", images=5, seed=0, top1=[top1] * 5, top5=[i] * 5,
                 classes=1000,
                 settings=dict(type=name, severities=[1, 2, 3, 4, 5], released=name))
            for i, (name, top1) in enumerate(TABLE_4.items())]
    mean, = results.mean_rows(rows)
    assert mean["mce"] == pytest.approx(74.75, abs=0.02) and mean["top5"] == 7
    assert mean["top1"] == pytest.approx(np.mean([*TABLE_4.values()]))
    assert not list(results.mean_rows(rows[1:]))
    assert "type=mean" in rows_table(rows + rows)                   # the same rows twice
    again = rows[0] | dict(settings=rows[0]["settings"] | dict(released="other copies"))
    assert not list(results.mean_rows([*rows, again]))


def test_class_order_is_printed_and_classes_must_agree(few_scenes):
    Path("m.py").write_text(
        "import torch\ndef build(n=10):\n    return torch.nn.Sequential(torch.nn.Flatten(), "
        "torch.nn.Linear(3072, n))\ndef seven():\n    return build(7)\ndef chances():\n    return "
        "torch.nn.Sequential(build(), torch.nn.Softmax(1))\n")
    model = f"--data shapes {CLEAN} --model m.py:"
    assert "taken in this order: 0 = " in run(model + "build")
    for name, words in (("seven", "has 7 classes"), ("chances", "probabilities"),
                        ("build --measures typo", "invalid choice: 'typo'")):
        assert words in refused(eval_robust, model + name)
