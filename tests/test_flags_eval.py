"""Every flag of eval_robust.py does what it says. Rows made with most flags away from their default
equal a plain loop; and each flag alone changes what the table below says."""

import functools
import json
import shlex
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torchvision.io import write_jpeg, write_png

import common
import data.images
import eval_robust
from data.rng import epoch_order
from data.shapes import SHAPES, load_shapes
from lm import LMConfig
from robust import attacks, checks, corruptions, measures, score, segmenters, words
from robust.frost import FROST_FILES
from robust.results import unpack
from segmenter import SegmenterConfig
from test_eval_robust import loaded, made_up, make_checkpoint
from test_eval_tasks import save_language_model, save_segmenter
from vit import ViT, ViTConfig

# What a row says of itself, not of the model's answers.
ABOUT = {"model", "kind", "checkpoint", "weights", "model_config", "recipe", "data", "data_dir",
         "imagenet1k", "measure", "setting", "conditions", "images",
         "seconds", "date", "torch", "hardware", "processes"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with two models, trees of images and frost, which the flags below name."""
    folder = tmp_path_factory.mktemp("flags")
    images = load_shapes("test", 60, 40).images
    for i, name in enumerate(("a", "b")):
        make_checkpoint(folder / f"{name}.pt", attn=("rpc", "softmax")[i], seed=i, patch_size=16,
                        flags=dict(num_images=1000))                      # 200 images, fitted to 80
        for j, shape in enumerate(SHAPES):
            (folder / name / "val" / shape).mkdir(parents=True)
            write_png(images[20 * i + j], str(folder / name / "val" / shape / "0.png"))
        for tree in ("out", *(f"{corruption}/3" for corruption in corruptions.NAMES)):
            (folder / name / tree).parent.mkdir(exist_ok=True)
            (folder / name / tree).symlink_to(folder / name / "val")
        (folder / f"frost_{name}").mkdir()
        for j, file in enumerate(FROST_FILES):
            noise = torch.rand(3, 9, 9, generator=torch.Generator().manual_seed(9 * i + j))
            noise = F.interpolate(noise[None], (600, 900))[0].mul(255).byte()
            write = write_png if file.endswith("png") else write_jpeg
            write(noise, str(folder / f"frost_{name}" / file))
    save_segmenter(folder / "seg.pt")
    save_language_model(folder)
    (folder / "built.py").write_text("import torch\n\n\ndef first():\n    return torch.nn.Sequential("
                                     "torch.nn.Flatten(), torch.nn.Linear(3072, 10))\n")
    torch.save(common.load(folder / "b.pt")["model"], folder / "timm.pt")              # timm's layout: softmax
    return folder


cached_shapes = functools.cache(load_shapes)              # the same scenes for every run

# Of two flags argparse keeps the last: a line of the table may say --limit again.
DEFAULT = "--ckpt a.pt --limit 8 --severities 3"
HELD = dict(made_up("m", dict(fog=50))[0], data="shapes")


def evaluate(monkeypatch, place, flags):
    """Run main() with these flags. Returns what it did: its rows' numbers, files, batches, ..."""
    monkeypatch.chdir(place)
    before = set(place.rglob("*"))
    seen = dict(batch=0, amp=False, checks=0, error=None)
    hits, forward, setup, load = score.hits, attacks.forward, common.setup, score.image_batches

    def look(logits, labels):
        seen["batch"] = max(seen["batch"], len(logits))
        return hits(logits, labels)

    def look_at_precision(model, x, batch_size=None):
        seen["amp"] |= torch.is_autocast_enabled("cpu")
        return forward(model, x, batch_size)

    def look_at_device(device):
        seen["device"] = device
        return setup("cpu")

    def look_at_workers(source, keys, workers, device):
        seen["workers"] = workers
        return load(source, keys, 0, device)

    def look_at_checks(model, *_, **__):
        seen["checks"] += 1

    with monkeypatch.context() as patch:
        patch.setattr(score, "hits", look)
        patch.setattr(attacks, "forward", look_at_precision)
        patch.setattr(common, "setup", look_at_device)
        patch.setattr(score, "image_batches", look_at_workers)
        patch.setattr(checks, "run", look_at_checks)
        patch.setattr(data.images, "load_shapes", cached_shapes)
        argv = ["eval_robust.py", *shlex.split(flags)]
        patch.setattr(sys, "argv", argv)
        try:
            eval_robust.main()
        except (ValueError, OSError) as error:
            seen["error"] = str(error)
    files = sorted(set(place.rglob("*")) - before)
    rows = [json.loads(line) for path in files if path.suffix == ".jsonl"
            for line in path.read_text().splitlines()]
    seen["numbers"] = [{k: v for k, v in row.items() if k not in ABOUT} for row in rows]
    seen["measures"] = [row["measure"] for row in rows]
    seen["files"] = [str(path.relative_to(place)) for path in files if path.is_file()]
    seen["files"] += [path.stat().st_size for path in files if path.suffix == ".png"]
    for path in files:
        if path.is_file():
            path.unlink()
    return seen


TREE = "--data imagenet --data_dir a"
# flag: (what changes, both runs' flags, the first's own, the second's own)
TABLE = {
    "ckpt": ("numbers", "--measures fgsm --eps 2/255", "--ckpt a.pt", "--ckpt b.pt"),
    "model": ("numbers", "--data shapes --measures clean", "", "--model built.py:first"),
    "image_size": ("error", "--data shapes --measures clean --model built.py:first", "", "--image_size 48"),
    "normalize": ("numbers", "--ckpt timm.pt --data shapes --measures clean --limit 40", "", "--normalize half"),
    "measures": ("measures", "--eps 2/255", "--measures clean", "--measures fgsm"),
    "checks": ("checks", "--measures clean", "", "--checks"),
    "limit": ("numbers", "--measures clean", "--limit 8", "--limit 30"),
    "data": ("numbers", "--measures clean --data_dir a", "", "--data imagenet"),
    "data_dir": ("numbers", "--measures clean --data imagenet", "--data_dir a", "--data_dir b"),
    "corrupted_dir": ("numbers", f"--measures 'corruptions type=snow' {TREE}", "--corrupted_dir a",
                      "--corrupted_dir b"),
    "imagenet_a": ("numbers", f"--measures imagenet_a {TREE}", "--imagenet_a a/out",
                   "--imagenet_a b/out"),
    "imagenet_r": ("numbers", f"--measures imagenet_r {TREE}", "--imagenet_r a/out",
                   "--imagenet_r b/out"),
    "imagenet_o": ("numbers", f"--measures imagenet_o {TREE}", "--imagenet_o a/out",
                   "--imagenet_o b/out"),
    "frost_dir": ("numbers", "--measures 'corruptions type=frost'", "", "--frost_dir frost_a"),
    "severities": ("numbers", "--measures 'corruptions type=contrast'", "--severities 1",
                   "--severities 5"),
    "preset": ("numbers", "--measures 'pgd eps=4/255 steps=3 alpha=0.5'", "", "--preset paper"),
    "eps": ("numbers", "--measures pgd", "--eps 1/255", "--eps 4/255"),
    "source": ("numbers", "--measures transfer --eps 4/255", "--source a.pt", "--source b.pt"),
    "seed": ("numbers", "--measures fgsm --eps 1/255", "", "--seed 1"),
    "window": ("numbers", "--ckpt seg.pt --measures clean", "", "--window 16"),
    "stride": ("numbers", "--ckpt seg.pt --measures clean --window 16", "", "--stride 4"),
    "scales": ("numbers", "--ckpt seg.pt --measures clean", "", "--scales 1 1.5"),
    "flip": ("numbers", "--ckpt seg.pt --measures clean", "", "--flip"),
    "out_dir": ("files", "--measures clean", "", "--out_dir x"),
    "resume": ("error", "--measures clean --out_dir held", "", "--resume"),
    "save_images": ("files", "--measures clean", "--save_images 1", "--save_images 2"),
    "batch_size": ("batch", "--measures clean", "", "--batch_size 3"),
    "amp": ("amp", "--measures clean", "", "--amp"),
    "num_workers": ("workers", f"--measures clean {TREE}", "", "--num_workers 3"),
    "device": ("device", "--measures clean", "", "--device cpu"),
}
PGD = "pgd eps=4/255 steps=3"
# setting: (the measure as it is by default, with another value)
SETTINGS = {
    "eps": ("square queries=60", "square queries=60 eps=16/255"),
    "space": (f"{PGD} clip=no", f"{PGD} clip=no space=normalized"),
    "labels": (PGD, f"{PGD} labels=pred"),
    "clip": (PGD, f"{PGD} clip=no"),
    "scale": ("noise", "noise scale=0.1"),
    "kind": ("noise", "noise kind=gaussian"),
    "draws": ("noise", "noise draws=2"),
    "best_of": ("noise", "noise best_of=4"),
    "steps": ("pgd eps=4/255 steps=2", "pgd eps=4/255 steps=4"),
    "alpha": (PGD, f"{PGD} alpha=0.3"),
    "random_start": (PGD, f"{PGD} random_start=no"),
    "best": (PGD, f"{PGD} best=yes"),
    "restarts": ("pgd eps=2/255 steps=1 alpha=0.05", "pgd eps=2/255 steps=1 alpha=0.05 restarts=3"),
    "centre": ("spsa steps=1", "spsa steps=1 centre=legacy"),
    "rescale": ("sld", "sld rescale=yes"),
    "confidence": ("cw steps=30 lr=0.01", "cw steps=30 lr=0.01 confidence=2"),
    "lr": ("cw steps=5", "cw steps=5 lr=0.1"),
    "queries": ("square eps=16/255 queries=2", "square eps=16/255 queries=60"),
    "type": ("corruptions type=contrast", "corruptions type=fog"),
    "jpeg85": ("corruptions type=contrast", "corruptions type=contrast jpeg85=yes"),
    # the same names, of other attacks
    "sld eps": ("sld", "sld eps=3"),
    "spsa eps": ("spsa steps=1", "spsa steps=1 eps=2/255"),
    "spsa steps": ("spsa eps=1/255 steps=1", "spsa eps=1/255 steps=2"),
    "cw steps": ("cw steps=5 lr=0.01", "cw steps=30 lr=0.01"),
    "autoattack eps": ("autoattack queries=5", "autoattack queries=5 eps=4/255"),
    "split": ("perplexity split=valid", "perplexity split=test"),
}


def by_hand(place, eps, paper):
    """Who is right in the test below, (n, 2) bool for each measure, by loops over batches of 6.

    paper: attacks are on normalised tensors, lead away from predictions and do not clip.
    """
    checkpoint = common.load(place / "a.pt")
    model = ViT(ViTConfig(**checkpoint["model_config"])).eval()
    model.load_state_dict(checkpoint["model"])
    mean, std = (torch.tensor(getattr(model.config, n))[:, None, None] for n in ("mean", "std"))
    net, mean, std = (score.Normalized(model), mean, std) if paper else (model, 0, 1)
    source, right = load_shapes("test", 200), {}

    def count(name, pixels, labels):
        with torch.autocast("cpu", torch.bfloat16):
            top5 = model(pixels).float().topk(5).indices == labels[:, None]
        right.setdefault(name, []).append(torch.stack([top5[:, 0], top5.any(1)], 1))

    for index in epoch_order(200, 0, 3)[:20].split(6):
        images, labels = source.images[index], source.labels[index]
        x = images.float() / 255
        count("clean", x, labels)
        for severity in (2, 5):
            fog = corruptions.corrupt(images, "fog", severity, seed=3, index=index)
            count(f"fog {severity}", corruptions.jpeg_compression(fog, 85).float() / 255, labels)
        z = (x - mean) / std
        target = net(z).argmax(1) if paper else labels
        attacked = (net(z).argmax(1) == target)[:, None, None, None]
        for draw in (0, 1):
            noisy = attacks.noise(net, z, target, 0.4, kind="gaussian", draw=draw, best_of=2,
                                  clip=not paper, seed=3, index=index)
            count(f"noise {draw}", noisy * std + mean, labels)
        for name, steps, alpha in (("fgsm", 1, 1.0), ("pgd", 4, 0.4)):
            adv = z.clone()
            for _ in range(steps):
                adv.requires_grad_()
                loss = F.cross_entropy(net(adv), target, reduction="sum")
                grad, = torch.autograd.grad(loss, adv)
                adv = z + (adv.detach() + alpha * eps * grad.sign() - z).clamp(-eps, eps)
                adv = torch.where(attacked, adv if paper else adv.clamp(0, 1), z)
            count(name, adv * std + mean, labels)
    return {name: torch.cat(parts) for name, parts in right.items()}


@pytest.mark.parametrize("preset, k, largest", [("default", 0.4, 1), ("paper", 3, 0.229)])
def test_rows_equal_plain_loops_under_flags_that_are_not_the_default(place, tmp_path, monkeypatch, capsys, preset, k,
                                                                     largest):
    """Budget: k/255; largest: of the channels' stds, which are the pixels of a normalised unit."""
    flags = f"""--ckpt a.pt --preset {preset} --measures clean 'corruptions type=fog jpeg85=yes'
        'noise scale=0.4 kind=gaussian draws=2 best_of=2' fgsm 'pgd steps=4 alpha=0.4 random_start=no'
        --eps {k}/255 --limit 20 --seed 3 --amp --batch_size 6 --severities 2 5 --out_dir {tmp_path}"""
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["eval_robust.py", *shlex.split(flags)])
    eval_robust.main()
    assert ("eps 1/255 is 0.226/255 of the pixel range" in capsys.readouterr().out) == (preset == "paper")
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    rows = {row["measure"]: row for row in map(json.loads, lines)}
    hand = by_hand(place, k / 255, preset == "paper")
    assert 0 < hand["pgd"][:, 0].sum() < hand["clean"][:, 0].sum() < 20      # so that no count is right by chance
    names = dict(clean=["clean"], corruptions=["fog 2", "fog 5"], noise=["noise 0", "noise 1"],
                 fgsm=["fgsm"], pgd=["pgd"])
    assert list(rows) == list(names)
    for measure, row in rows.items():
        expected = [hand[name] for name in names[measure]]
        texts = row["right"] if isinstance(row["right"], list) else [row["right"]]
        bits = torch.stack([unpack(text, 20) for text in texts])
        assert torch.equal(bits, torch.stack(expected)[:, :, 0])
        percent = 100 * torch.stack(expected).double().mean(1)       # (severities or draws, 2)
        if measure == "corruptions":
            assert [row["top1"], row["top5"]] == percent.T.tolist()
        else:
            assert [row["top1"], row["top5"]] == pytest.approx(percent.mean(0).tolist(), abs=1e-3)
    for name in ("fgsm", "pgd"):
        assert rows[name]["max_linf"] == pytest.approx(k / 255 * largest, rel=1e-4)
    assert (rows["pgd"]["outside"] > 0) == (preset == "paper")
    assert rows["pgd"]["forward_per_image"] > rows["fgsm"]["forward_per_image"]
    assert (rows["pgd"]["backward_per_image"] == 4) == (preset == "paper") and rows["fgsm"]["backward_per_image"] == 1


def test_the_tables_have_every_flag_and_every_setting(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["eval_robust.py", "--ckpt", "x"])
    args = eval_robust.get_args()
    assert set(TABLE) == set(vars(args)) and args.severities == [1, 2, 3, 4, 5]
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--severities", "5", "1", "5"])
    assert eval_robust.get_args().severities == [1, 5]
    named = {name for values in measures.MEASURES.values() for name in values}
    assert set(measures.SETTINGS) == named | set(measures.CONDITIONS)
    assert set(measures.SETTINGS) <= set(SETTINGS)


@pytest.mark.parametrize("flag", TABLE)
def test_each_flag_changes_what_it_should(place, monkeypatch, flag):
    what, shared, *own = TABLE[flag]
    if flag == "resume":
        (place / "held").mkdir()
        (place / "held" / "results.jsonl").write_text(json.dumps(HELD) + "\n")
    one, two = (evaluate(monkeypatch, place, f"{DEFAULT} {shared} {flags}") for flags in own)
    assert one[what] != two[what]
    if what != "error":
        assert one["error"] is None and two["error"] is None
    if what in ("files", "batch", "workers", "device"):          # how it runs, not what comes out
        assert one["numbers"] == two["numbers"]


@pytest.mark.parametrize("setting", SETTINGS)
def test_each_setting_changes_the_numbers(place, monkeypatch, setting):
    model = "--ckpt lm.pt --limit 20 --seed 0" if setting == "split" else DEFAULT
    one, two = (evaluate(monkeypatch, place, f"{model} --measures '{text}'")
                for text in SETTINGS[setting])
    assert one["error"] is None and two["error"] is None
    assert one["numbers"] != two["numbers"]


def test_several_values_are_several_rows_and_a_name_alone_has_its_defaults():
    plan = measures.plan(["pgd eps=1/255,2/255 steps=3,4 clip=no", "fgsm"], "classification")
    pgd = [(s["eps"] * 255, s["steps"], s["alpha"], c["clip"]) for name, s, c in plan if name == "pgd"]
    assert "restarts" not in plan[0].setting              # as in rows from before there were any
    assert pgd == [(e, steps, 0.15, False) for e in (1, 2) for steps in (3, 4)]
    fgsm = [(name, s, c) for name, s, c in plan if name == "fgsm"]
    assert [s["eps"] * 255 for _, s, _ in fgsm] == [1, 2, 4, 8]
    assert all(c == dict(space="pixel", labels="true", clip=True) for *_, c in fgsm)


def unsaid(monkeypatch, task):
    """The flags when only a checkpoint is named."""
    monkeypatch.setattr(sys, "argv", ["eval_robust.py", "--ckpt", "x"])
    args = eval_robust.get_args()
    args.task, args.data = task, "shapes"
    return args


def test_usual_measures_are_those_of_the_readme(monkeypatch):
    usual = {"classification": "clean corruptions noise fgsm pgd adaptive_pgd apgd",
             "segmentation": "clean corruptions", "language modelling": "perplexity"}
    for task, names in usual.items():
        plan = eval_robust.todo_of(unsaid(monkeypatch, task))
        assert list(dict.fromkeys(name for name, *_ in plan)) == names.split()
    args = unsaid(monkeypatch, "classification")
    args.imagenet_r = "r"                                 # a folder that is given is measured, too
    assert [name for name, *_ in eval_robust.todo_of(args)][-1] == "imagenet_r"
    args.measures = ["all"]
    assert {name for name, *_ in eval_robust.todo_of(args)} == set(measures.MEASURES) - {
        "perplexity", "transfer", "imagenet_a", "imagenet_o"}


def test_slow_measures_are_on_fewer_images_unless_limit_says_otherwise(monkeypatch):
    args = unsaid(monkeypatch, "classification")

    def sizes(n):
        names = "clean", "corruptions", "noise", "pgd", "apgd", "autoattack", "square", "spsa", "cw"
        return [score.size_of(n, name, args) for name in names]
    assert sizes(3200) == [3200, 320, 640, 160, 80, 80, 80, 20, 40]
    assert sizes(50) == [50] * 7 + [20, 40]
    args.data = "imagenet"
    assert sizes(50000) == [50000] * 5 + [1000, 1000, 100, 100]
    args.limit = 70
    assert sizes(50000) == [70] * 9


def test_windows_are_the_models_and_those_of_a_text_overlap_by_three_quarters(monkeypatch):
    args = unsaid(monkeypatch, "language modelling")
    words.settle(args, loaded(SimpleNamespace(config=LMConfig(9, context=24))))
    assert (args.window, args.stride, args.batch_size) == (24, 6, 64)
    args = unsaid(monkeypatch, "segmentation")
    segmenters.settle(args, loaded(SimpleNamespace(config=SegmenterConfig(9, image_size=48))))
    assert (args.window, args.stride, args.scales) == (48, 48, [1.0])


def test_eps_is_the_budget_of_all_attacks_that_name_none():
    texts = ["fgsm", "spsa", "autoattack", "square eps=3/255", "sld"]
    plan = measures.plan(texts, "classification", eps=[5 / 255])
    assert [s["eps"] for _, s, _ in plan] == [5 / 255, 5 / 255, 5 / 255, 3 / 255, 10.0]
    plan = measures.plan(["spsa", "cw", "noise", "sld"], "classification", "paper")
    (_, spsa, how), (_, cw, _), (_, noise, _), (_, sld, _) = plan
    assert spsa == dict(eps=0.1, steps=40, centre="legacy") and cw["confidence"] == 10
    assert noise["scale"] == 0.3 and sld["rescale"] is True
    assert how == dict(space="normalized", labels="pred", clip=False)


def test_help_lists_measures_settings_and_defaults():
    text = measures.describe()
    assert all(f"  {name} " in text or f"  {name}\n" in text
               for name in (*measures.MEASURES, *measures.SETTINGS))
    assert "eps=1/255 queries=5000" in text and "best_of=1 " not in text
    assert "scale=0.068 kind=uniform draws=3" in text and "steps=1000 lr=0.005" in text
    assert "--eps up to 8/255" in text and "--eps up to 6/255" in text
    assert "spsa eps=0.1 centre=legacy" in text and "  sld                  eps=10.0 " in text
