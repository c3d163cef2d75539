"""Every flag of eval_robust.py does what it says. Rows made with most flags away from their default
equal a plain loop; and each flag alone changes what the table below says."""

import json
import sys

import pytest
import torch
import torch.nn.functional as F
from torchvision.io import write_jpeg, write_png

from robust import attacks
from robust import checks
import common
from robust import corruptions
import data
import eval_robust
from robust import metrics
from test_eval_robust import make_checkpoint
from vit import ViT, ViTConfig

# What a row says of itself, not of the model's answers.
ABOUT = {"model", "kind", "checkpoint", "weights", "model_config", "recipe", "data", "data_dir",
         "imagenet1k", "measure", "setting", "conditions", "images",
         "seconds", "date", "torch", "hardware", "processes"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with two models, trees of images and frost, which the flags below name."""
    folder = tmp_path_factory.mktemp("flags")
    images = data.load_shapes("test", 60, 40).images
    for i, name in enumerate(("a", "b")):
        make_checkpoint(folder / f"{name}.pt", attn=("rpc", "softmax")[i], seed=i, patch_size=16,
                        flags=dict(num_images=1000))                      # 200 images, fitted to 80
        for j, shape in enumerate(data.SHAPES):
            (folder / name / "val" / shape).mkdir(parents=True)
            write_png(images[20 * i + j], str(folder / name / "val" / shape / "0.png"))
        for tree in ("out", *(f"{corruption}/3" for corruption in corruptions.NAMES)):
            (folder / name / tree).parent.mkdir(exist_ok=True)
            (folder / name / tree).symlink_to(folder / name / "val")
        (folder / f"frost_{name}").mkdir()
        for j, file in enumerate(corruptions.FROST_FILES):
            noise = torch.rand(3, 9, 9, generator=torch.Generator().manual_seed(9 * i + j))
            noise = F.interpolate(noise[None], (600, 900))[0].mul(255).byte()
            write = write_png if file.endswith("png") else write_jpeg
            write(noise, str(folder / f"frost_{name}" / file))
    return folder


# Of two flags argparse keeps the last: a line of the table may say --limit again.
DEFAULT = "--ckpt a.pt --limit 8 --severities 3"
HELD = dict(weights="w", model="m", kind="m", checkpoint="m.pt", data="shapes", measure="clean",
            setting={}, conditions=dict(space="pixel", labels="true", clip=True, seed=9, amp=False),
            images=1, top1=0.0, top5=0.0)


def evaluate(monkeypatch, place, flags):
    """Run main() with these flags. Returns what it did: its rows' numbers, files, batches, ..."""
    monkeypatch.chdir(place)
    before = set(place.rglob("*"))
    seen = dict(batch=0, amp=False, checks=0, error=None)
    hits, setup, load = eval_robust.hits, common.setup, data.imagenet_batches

    def look(logits, labels):
        seen["batch"] = max(seen["batch"], len(logits))
        seen["amp"] |= torch.is_autocast_enabled("cpu")
        return hits(logits, labels)

    def look_at_device(device):
        seen["device"] = device
        return setup("cpu")

    def look_at_workers(source, keys, workers, device):
        seen["workers"] = workers
        return load(source, keys, 0, device)

    def look_at_checks(model, *_, **__):
        seen["checks"] += 1

    with monkeypatch.context() as patch:
        patch.setattr(eval_robust, "hits", look)
        patch.setattr(common, "setup", look_at_device)
        patch.setattr(data, "imagenet_batches", look_at_workers)
        patch.setattr(checks, "run", look_at_checks)
        argv = ["eval_robust.py", *flags.split()]
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


PGD = "--measures pgd --eps 4/255 --pgd_steps 3"
TREE = "--data imagenet --data_dir a"
# flag: (what changes, both runs' flags, the first's own, the second's own)
TABLE = {
    "ckpt": ("numbers", "--measures fgsm --eps 2/255", "--ckpt a.pt", "--ckpt b.pt"),
    "measures": ("measures", "--eps 2/255", "--measures clean", "--measures fgsm"),
    "checks": ("checks", "--measures clean", "", "--checks"),
    "limit": ("numbers", "--measures clean", "--limit 8", "--limit 30"),
    "data": ("numbers", "--measures clean --data_dir a", "", "--data imagenet"),
    "data_dir": ("numbers", "--measures clean --data imagenet", "--data_dir a", "--data_dir b"),
    "corrupted_dir": ("numbers", f"--measures corruptions {TREE}", "--corrupted_dir a",
                      "--corrupted_dir b"),
    "imagenet_a": ("numbers", f"--measures imagenet_a {TREE}", "--imagenet_a a/out",
                   "--imagenet_a b/out"),
    "imagenet_r": ("numbers", f"--measures imagenet_r {TREE}", "--imagenet_r a/out",
                   "--imagenet_r b/out"),
    "imagenet_o": ("numbers", f"--measures imagenet_o {TREE}", "--imagenet_o a/out",
                   "--imagenet_o b/out"),
    "frost_dir": ("numbers", "--measures corruptions", "", "--frost_dir frost_a"),
    "severities": ("numbers", "--measures corruptions", "--severities 1", "--severities 5"),
    "jpeg85": ("numbers", "--measures corruptions", "", "--jpeg85"),
    "preset": ("numbers", f"{PGD} --pgd_alpha 0.5", "", "--preset paper"),
    "space": ("numbers", f"{PGD} --no-clip", "", "--space normalized"),
    "labels": ("numbers", PGD, "", "--labels pred"),
    "clip": ("numbers", PGD, "", "--no-clip"),
    "eps": ("numbers", PGD, "--eps 1/255", "--eps 4/255"),
    "auto_eps": ("numbers", "--measures square --queries 60", "", "--auto_eps 16/255"),
    "spsa_eps": ("numbers", "--measures spsa --spsa_steps 1", "", "--spsa_eps 2/255"),
    "sld_eps": ("numbers", "--measures sld", "", "--sld_eps 3"),
    "noise_scale": ("numbers", "--measures noise", "", "--noise_scale 0.1"),
    "noise_kind": ("numbers", "--measures noise", "", "--noise_kind gaussian"),
    "noise_draws": ("numbers", "--measures noise", "", "--noise_draws 2"),
    "noise_best": ("numbers", "--measures noise", "", "--noise_best 4"),
    "pgd_steps": ("numbers", "--measures pgd --eps 4/255", "--pgd_steps 2", "--pgd_steps 4"),
    "pgd_alpha": ("numbers", PGD, "", "--pgd_alpha 0.3"),
    "random_start": ("numbers", PGD, "", "--no-random_start"),
    "pgd_best": ("numbers", PGD, "", "--pgd_best"),
    "spsa_steps": ("numbers", "--measures spsa --spsa_eps 1/255", "--spsa_steps 1",
                   "--spsa_steps 2"),
    "spsa_centre": ("numbers", "--measures spsa --spsa_steps 1", "", "--spsa_centre legacy"),
    "sld_rescale": ("numbers", "--measures sld", "", "--sld_rescale"),
    "cw_steps": ("numbers", "--measures cw --cw_lr 0.01", "--cw_steps 5", "--cw_steps 30"),
    "cw_lr": ("numbers", "--measures cw --cw_steps 5", "", "--cw_lr 0.1"),
    "cw_confidence": ("numbers", "--measures cw --cw_steps 30 --cw_lr 0.01", "",
                      "--cw_confidence 2"),
    "queries": ("numbers", "--measures square --auto_eps 16/255", "--queries 2", "--queries 60"),
    "source": ("numbers", "--measures transfer --eps 4/255", "--source a.pt", "--source b.pt"),
    "seed": ("numbers", PGD, "", "--seed 1"),
    "out_dir": ("files", "--measures clean", "", "--out_dir x"),
    "resume": ("error", "--measures clean --out_dir held", "", "--resume"),
    "save_images": ("files", PGD, "--save_images 1", "--save_images 2"),
    "batch_size": ("batch", PGD, "", "--batch_size 3"),
    "amp": ("amp", PGD, "", "--amp"),
    "num_workers": ("workers", f"--measures clean {TREE}", "", "--num_workers 3"),
    "device": ("device", "--measures clean", "", "--device cpu"),
}


def by_hand(place, eps):
    """Who is right in the test below, (n, 2) bool for each measure, by loops over batches of 6."""
    checkpoint = common.read_checkpoint(place / "a.pt")
    model = ViT(ViTConfig(**checkpoint["model_config"])).eval()
    model.load_state_dict(checkpoint["model"])
    mean, std = (torch.tensor(getattr(model.config, n))[:, None, None] for n in ("mean", "std"))
    source, right = data.load_shapes("test", 200), {}

    def count(name, pixels, labels):
        with torch.autocast("cpu", torch.bfloat16):
            top5 = model(pixels).float().topk(5).indices == labels[:, None]
        right.setdefault(name, []).append(torch.stack([top5[:, 0], top5.any(1)], 1))

    for index in data.epoch_order(200, 0, 3)[:20].split(6):
        images, labels = source.images[index], source.labels[index]
        x = images.float() / 255
        count("clean", x, labels)
        for severity in (2, 5):
            fog = corruptions.corrupt(images, "fog", severity, seed=3, index=index)
            count(f"fog {severity}", corruptions.jpeg85(fog).float() / 255, labels)
        z = (x - mean) / std
        predicted = model(x).argmax(1)
        for draw in (0, 1):
            noisy = attacks.noise(attacks.Normalized(model), z, predicted, 0.4, kind="gaussian",
                                  draw=draw, best_of=2, clip=False, seed=3, index=index)
            count(f"noise {draw}", noisy * std + mean, labels)
        for name, steps, alpha in (("fgsm", 1, 1.0), ("pgd", 4, 0.4)):
            adv = z.clone()
            for _ in range(steps):
                adv.requires_grad_()
                loss = F.cross_entropy(model(adv * std + mean), predicted, reduction="sum")
                grad, = torch.autograd.grad(loss, adv)
                adv = z + (adv.detach() + alpha * eps * grad.sign() - z).clamp(-eps, eps)
            count(name, adv * std + mean, labels)
    return {name: torch.cat(parts) for name, parts in right.items()}


def test_rows_equal_plain_loops_under_flags_that_are_not_the_default(place, tmp_path, monkeypatch):
    flags = """--ckpt a.pt --measures clean corruptions noise fgsm pgd --limit 20 --seed 3
        --space normalized --labels pred --no-clip --eps 3/255 --pgd_steps 4 --pgd_alpha 0.4
        --no-random_start --amp --batch_size 6 --noise_kind gaussian --noise_scale 0.4
        --noise_draws 2 --noise_best 2 --severities 2 5 --jpeg85"""
    monkeypatch.chdir(place)
    monkeypatch.setattr(corruptions, "NAMES", ("fog",))
    monkeypatch.setattr(sys, "argv", ["eval_robust.py", *flags.split(), "--out_dir", str(tmp_path)])
    eval_robust.main()
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    rows = {row["measure"]: row for row in map(json.loads, lines)}
    hand = by_hand(place, 3 / 255)
    names = dict(clean=["clean"], corruptions=["fog 2", "fog 5"], noise=["noise 0", "noise 1"],
                 fgsm=["fgsm"], pgd=["pgd"])
    assert list(rows) == list(names)
    for measure, row in rows.items():
        expected = [hand[name] for name in names[measure]]
        texts = row["right"] if isinstance(row["right"], list) else [row["right"]]
        bits = torch.stack([metrics.unpack(text, 20) for text in texts])
        assert torch.equal(bits, torch.stack(expected)[:, :, 0])
        percent = 100 * torch.stack(expected).double().mean(1)       # (severities or draws, 2)
        if measure == "corruptions":
            assert [row["top1"], row["top5"]] == percent.T.tolist()
        else:
            assert [row["top1"], row["top5"]] == pytest.approx(percent.mean(0).tolist(), abs=1e-3)
    largest = 3 / 255 * 0.229                                                   # eps std, in pixels
    assert rows["fgsm"]["max_linf"] == pytest.approx(largest, rel=1e-4)
    assert rows["pgd"]["forward_per_image"] > rows["fgsm"]["forward_per_image"]
    assert rows["pgd"]["backward_per_image"] == 4 and rows["fgsm"]["backward_per_image"] == 1


def test_the_table_has_every_flag(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["eval_robust.py", "--ckpt", "x"])
    assert set(TABLE) == set(vars(eval_robust.get_args()))


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
