"""Rows under flags that are not the default equal plain loops; each flag does what it says."""

import functools
import json
import shlex
import sys

import pytest
import torch
import torch.nn.functional as F
from torchvision.io import write_jpeg, write_png

import common
import data.images
import eval_robust
from data.rng import epoch_order
from data.shapes import SHAPES, load_shapes
from robust import attacks, checks, corruptions, score
from robust.frost import FROST_FILES
from robust.results import unpack
from test_eval_robust import made_up, make_checkpoint
from test_eval_tasks import save_segmenter
from vit import ViT, ViTConfig


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with two models, trees of images and frost, which the flags below name."""
    folder = tmp_path_factory.mktemp("flags")
    images = load_shapes("test", 60, 40).images
    for i, name in enumerate(("a", "b")):
        model = make_checkpoint(folder / f"{name}.pt", attn=("rpc", "softmax")[i], seed=i,
                                patch_size=16, flags=dict(num_images=1000))    # 200, fitted to 80
        ema = {key: 0.9 * tensor for key, tensor in model.state_dict().items()}
        common.save(folder / f"{name}.pt", common.load(folder / f"{name}.pt") | dict(ema=ema))
        for j, shape in enumerate(SHAPES):
            (folder / name / "val" / shape).mkdir(parents=True)
            write_png(images[20 * i + j], str(folder / name / "val" / shape / "0.png"))
        for tree in ("out", "snow/3"):
            (folder / name / tree).parent.mkdir(exist_ok=True)
            (folder / name / tree).symlink_to(folder / name / "val")
    (folder / "frost").mkdir()
    for j, file in enumerate(FROST_FILES):
        noise = torch.rand(3, 9, 9, generator=torch.Generator().manual_seed(j))
        noise = F.interpolate(noise[None], (600, 900))[0].mul(255).byte()
        (write_png if file.endswith("png") else write_jpeg)(noise, str(folder / "frost" / file))
    save_segmenter(folder / "seg.pt")
    (folder / "built.py").write_text("""import torch


def first():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 10))
""")
    torch.save(common.load(folder / "b.pt")["model"], folder / "timm.pt")   # as timm's: softmax
    return folder


# --- plain loops ----------------------------------------------------------------------------------

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
        top5 = model(pixels).topk(5).indices == labels[:, None]
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
def test_rows_equal_plain_loops_under_flags_that_are_not_the_default(
        place, tmp_path, monkeypatch, preset, k, largest):
    """Budget: k/255; largest: of the channels' stds, which are the pixels of a normalised unit.

    An image on the boundary may fall on either side: the loops' rounding is that of other batches.
    """
    flags = f"""--ckpt a.pt --preset {preset} --measures clean 'corruptions type=fog jpeg85=yes'
        'noise scale=0.4 kind=gaussian draws=2 best_of=2' fgsm
        'pgd steps=4 rel_step=0.4 random_start=no'
        --eps {k}/255 --limit 20 --seed 3 --batch_size 6 --severities 2 5 --out_dir {tmp_path}"""
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["eval_robust.py", *shlex.split(flags)])
    eval_robust.main()
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    rows = {row["measure"].split()[0]: row for row in map(json.loads, lines)}
    hand = by_hand(place, k / 255, preset == "paper")
    assert 0 < hand["pgd"][:, 0].sum() < hand["clean"][:, 0].sum() < 20      # not by chance
    names = dict(clean=["clean"], corruptions=["fog 2", "fog 5"], noise=["noise 0", "noise 1"],
                 fgsm=["fgsm"], pgd=["pgd"])
    assert list(rows) == list(names)
    for name, row in rows.items():
        expected = torch.stack([hand[key] for key in names[name]])
        texts = row["right"] if isinstance(row["right"], list) else [row["right"]]
        bits = torch.stack([unpack(text, 20) for text in texts])
        assert (bits != expected[:, :, 0]).sum() <= (name not in ("clean", "corruptions"))
        top5 = 100 * expected[:, :, 1].double().mean(1)
        found = torch.tensor(row["top5"]).mean().item()
        slack = 5.01 * (name in ("fgsm", "pgd")) + 1e-3
        assert found == pytest.approx(top5.mean().item(), abs=slack)
    for name in ("fgsm", "pgd"):
        assert rows[name]["max_linf"] == pytest.approx(k / 255 * largest, rel=1e-4)
    assert (rows["pgd"]["outside"] > 0) == (preset == "paper")


# --- flags ----------------------------------------------------------------------------------------

# Of two flags argparse keeps the last: a line of the table may say --limit again.
DEFAULT = "--ckpt a.pt --limit 8 --severities 3"
HELD = dict(made_up("m", dict(fog=50))[0], data="shapes")
NUMBERS = ("top1", "top5", "right", "auroc", "mean_iou", "max_linf")
cached_shapes = functools.cache(load_shapes)              # the same scenes for every run


def evaluate(monkeypatch, place, flags):
    """Run main() with these flags. Returns what it did: its rows' numbers, files, batches, ..."""
    monkeypatch.chdir(place)
    before, seen = set(place.rglob("*")), dict(batch=0, amp=False, checks=0, error=None)
    correct, forward, load = score.correct, score.forward, score.image_batches
    start = eval_robust.start

    def look(logits, labels):
        seen["batch"] = max(seen["batch"], len(logits))
        return correct(logits, labels)

    def look_at_precision(model, x, batch_size=None):
        seen["amp"] |= torch.is_autocast_enabled("cpu")
        return forward(model, x, batch_size)

    def start_on_the_cpu(args):
        seen["device"], args.device = args.device, "cpu"
        start(args)
        seen["tf32"] = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32

    with monkeypatch.context() as patch:
        patch.setattr(score, "correct", look)
        patch.setattr(score, "forward", look_at_precision)
        patch.setattr(eval_robust, "start", start_on_the_cpu)
        patch.setattr(score, "image_batches", lambda source, keys, workers, device:
                      seen.update(workers=workers) or load(source, keys, 0, device))
        patch.setattr(checks, "run", lambda *_: seen.update(checks=1))
        patch.setattr(data.images, "load_shapes", cached_shapes)
        patch.setattr(sys, "argv", ["eval_robust.py", *shlex.split(flags)])
        try:
            eval_robust.main()
        except common.InputError as error:
            seen["error"] = str(error)
    files = sorted(set(place.rglob("*")) - before)
    rows = [json.loads(line) for path in files if path.suffix == ".jsonl"
            for line in path.read_text().splitlines()]
    seen["numbers"] = [{k: row.get(k) for k in NUMBERS} for row in rows]
    seen["measures"] = [row["measure"] for row in rows]
    seen["files"] = [str(path.relative_to(place)) for path in files if path.is_file()]
    for path in files:
        if path.is_file():
            path.unlink()
    return seen


TREE = "--data imagenet --data_dir a"
# flag: (what changes, both runs' flags, the first's own, the second's own)
TABLE = {
    "ckpt": ("numbers", "--measures fgsm --eps 2/255", "--ckpt a.pt", "--ckpt b.pt"),
    "model": ("numbers", "--data shapes --measures clean", "", "--model built.py:first"),
    "weights": ("numbers", "--measures 'corruptions type=contrast' --limit 60", "",
                "--weights ema"),
    "normalize": ("numbers", "--ckpt timm.pt --data shapes --measures clean --limit 40", "",
                  "--normalize half"),
    "measures": ("measures", "--eps 2/255", "--measures clean", "--measures fgsm"),
    "checks": ("checks", "--measures clean", "", "--checks"),
    "per_class": ("measures", "--measures clean", "", "--per_class"),
    "limit": ("numbers", "--measures clean", "--limit 8", "--limit 30"),
    "data": ("numbers", "--measures clean --data_dir a", "", "--data imagenet"),
    "data_dir": ("numbers", "--measures clean --data imagenet", "--data_dir a", "--data_dir b"),
    "corrupted_dir": ("numbers", f"--measures corruptions {TREE}", "--corrupted_dir a",
                      "--corrupted_dir b"),
    **{f"imagenet_{x}": ("numbers", f"--measures imagenet_{x} {TREE}", f"--imagenet_{x} a/out",
                         f"--imagenet_{x} b/out") for x in "aro"},
    "frost_dir": ("numbers", "--measures 'corruptions type=frost'", "", "--frost_dir frost"),
    "severities": ("numbers", "--measures 'corruptions type=contrast'", "--severities 1",
                   "--severities 5"),
    "preset": ("numbers", "--measures 'pgd eps=4/255 steps=3 rel_step=0.5'", "", "--preset paper"),
    "eps": ("numbers", "--measures fgsm", "--eps 1/255", "--eps 4/255"),
    "source": ("numbers", "--measures transfer --eps 4/255", "--source a.pt", "--source b.pt"),
    "seed": ("numbers", "--measures fgsm --eps 1/255", "", "--seed 1"),
    "window": ("numbers", "--ckpt seg.pt --measures clean", "", "--window 16"),
    "stride": ("numbers", "--ckpt seg.pt --measures clean --window 16", "", "--stride 4"),
    "scales": ("numbers", "--ckpt seg.pt --measures clean", "", "--scales 1 1.5"),
    "flip": ("numbers", "--ckpt seg.pt --measures clean", "", "--flip"),
    "out_dir": ("files", "--measures clean", "", "--out_dir x"),
    "resume": ("error", "--measures clean --out_dir held", "", "--resume"),
    "batch_size": ("batch", "--measures clean", "", "--batch_size 3"),
    "amp": ("amp", "--measures clean", "", "--amp"),
    "tf32": ("tf32", "--measures clean", "", "--tf32"),
    "num_workers": ("workers", f"--measures clean {TREE}", "", "--num_workers 3"),
    "device": ("device", "--measures clean", "", "--device cpu"),
}


def test_the_table_has_every_flag(monkeypatch):
    flags = "--ckpt x --severities 5 1 5".split()
    monkeypatch.setattr(sys, "argv", ["eval_robust.py", *flags])
    args = eval_robust.get_args()
    assert set(TABLE) | {"image_size"} == set(vars(args)) and args.severities == [1, 5]


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
    if what in ("files", "batch", "workers", "device", "tf32"):  # how it runs, not what comes out
        assert one["numbers"] == two["numbers"]
