"""Test train_cls.py alone; test_train.py tests the behaviour of all trainers."""

import os
import shutil
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data.mixup import mixup_target
from timm.loss import SoftTargetCrossEntropy
from timm.optim import param_groups_weight_decay
from timm.scheduler import CosineLRScheduler

import common
import train_cls
from data.augment import augment_uint8, mix, to_float_and_erase
from data.datasets import DATASETS, DataSource
from data.images import hash_pixels, read_image
from data.rng import DROPOUT, seed_from
from data.shapes import load_shapes
from processes import group, group_results
from runs import call, log, refused, rows
from vit import SIZES, ViT, ViTConfig, classifier_from_checkpoint

pytestmark = pytest.mark.usefixtures("alone", "two_layers")
SMALL = ("--model nano --num_images 64 --image_size 16 --patch_size 4 "
         "--batch_size 16").split()
train, bad = partial(call, train_cls.main), partial(refused, train_cls)


def test_the_checkpoint_alone_reproduces_the_accuracy(capsys):
    train("--max_steps 2 --num_images 500")         # other flags: as in README's first command
    *_, said, following = capsys.readouterr().out.strip().splitlines()
    folder, test = Path("out/shapes_rpc"), load_shapes("test", 100)
    evaluation, checkpoint = log(folder, "eval")[2], common.load(folder)
    assert said.startswith(f"shapes rpc: test accuracy {evaluation['top1']:.2f} %")
    assert following == f"next: python eval_robust.py --ckpt {folder}"
    with torch.no_grad():
        logits = classifier_from_checkpoint(checkpoint)(test.images.float() / 255)
    right = logits.topk(5).indices == test.labels[:, None]
    assert evaluation == pytest.approx(dict(
        top1=right[:, 0].sum().item(), top5=right.sum().item(),
        loss=F.cross_entropy(logits, test.labels).item()), rel=1e-5)
    assert checkpoint["classes"] == test.classes and checkpoint["step"] == 2
    assert "out/shapes_rpc contains a run" in bad("--max_steps 1")


def test_a_run_resumed_within_a_chunk_is_equal(monkeypatch):
    """A GPU augments a chunk of batches at once; here three batches, and the "GPU" is the CPU."""
    monkeypatch.setattr(train_cls, "CHUNK_IMAGES", 12)
    monkeypatch.setattr(train_cls, "send", lambda x, device: x)
    args = Namespace(batch_size=4, image_size=16, seed=0, repeats=2, pad=2, flip=True,
                     num_ops=2, erase=0.5, mixup=0.8, cutmix=1.0, smoothing=0.1)
    source = load_shapes("train", 20, 16)                           # an epoch has five batches

    def batches(first, device):
        return list(train_cls.train_batches(source, args, first, 9, device, rank=0, world=1))
    whole = batches(0, Namespace(type="GPU"))
    for later in (batches(4, Namespace(type="GPU")), batches(4, torch.device("cpu"))):
        for parts in zip(whole[4:], later, strict=True):
            assert all(map(torch.equal, *parts))


def test_init_from_takes_weights_of_a_run(capsys):
    train(SMALL, "--attn symmetric --max_steps 2 --out_dir sym")
    train(SMALL, "--max_steps 1 --init_from sym --out_dir rpc")     # the first step's lr is 1e-6
    first, after = (common.load(name)["model"] for name in ("sym", "rpc"))
    assert all((first[k] - after[k]).abs().max() < 1e-5 for k in after)
    assert "is new" not in capsys.readouterr().out


def test_matrices_decay_also_in_scaled_attention():
    train(SMALL, "--attn scaled_s --max_steps 1 --out_dir a")
    checkpoint = common.load("a")
    names = [name for name, w in checkpoint["model"].items()
             if w.ndim > 1 and name not in ("pos_embed", "cls_token")]
    decay, _ = checkpoint["optimizer"]["param_groups"]
    assert "blocks.0.attn.learned.s" in names and len(decay["params"]) == len(names)


def test_adversarial_training_raises_the_first_loss():
    for eps in ("0", "4/255"):
        train(SMALL, "--max_steps 1 --drop_path 0.5 --erase 1 --mixup 1 --adv_eps", [eps],
              "--out_dir", [eps[0]])
    assert log("4")[1] > log("0")[1] + 0.01


def test_an_image_is_never_mixed_with_its_copy():
    for flags in ("--batch_size 1 --cutmix 1", "--batch_size 3 --mixup 1 --repeats 3"):
        assert "with itself or with a copy" in bad(SMALL, flags)


def order_of(f, n, step):
    """Return the image indices of a step, (batch_size,); copies of an image are moved apart."""
    epoch, i = divmod(step, n // f.batch_size)
    generator = torch.Generator().manual_seed(f.seed * 1_000_003 + epoch)
    order = torch.randperm(n, generator=generator).repeat_interleave(f.repeats)[:n]
    order = order[i * f.batch_size:(i + 1) * f.batch_size]
    return torch.cat([order[first::f.repeats] for first in range(f.repeats)])


def test_a_run_equals_a_plain_loop(monkeypatch):
    """Its flags differ from every default, and the loop uses timm's parts."""
    monkeypatch.setattr(common, "LOG_EVERY", 1)
    monkeypatch.setattr(common, "MIN_LR", 2e-3)
    f = dict(num_images=62, holdout=28, model="micro", image_size=16, patch_size=8, attn="rpc_asym",
             rpc_layers="1,3", n_iter=3, lambd=0.3, form="paper", drop_path=0.3,
             init="trunc_normal", epochs=3, batch_size=8, lr=3e-3, warmup_epochs=0.5,
             weight_decay=0.4, clip=0.7, pad=3, num_ops=3, erase=0.6, mixup=0.3, cutmix=0.5,
             smoothing=0.2, repeats=2, seed=5, device="cpu", out_dir="a", max_steps=10)
    train(**f)
    f, (images, labels, *_) = SimpleNamespace(**f), load_shapes("train", 62, 16)
    kept = torch.randperm(62, generator=torch.Generator().manual_seed(0))[28:]  # 28 are held out
    torch.manual_seed(f.seed)
    model = ViT(ViTConfig(16, 8, 10, 96, 6, 3, attn="rpc_asym", rpc_layers=(1, 3), drop_path=0.3,
                          pap=dict(n_iter=3, lambd=0.3, form="paper"), init="trunc_normal"))
    optimizer = torch.optim.AdamW(param_groups_weight_decay(
        model, f.weight_decay, no_weight_decay_list=("pos_embed", "cls_token")), lr=f.lr)
    schedule = CosineLRScheduler(optimizer, 3 * 4, common.MIN_LR, t_in_epochs=False, warmup_t=2,
                                 warmup_lr_init=1e-6)
    for step, row in enumerate(row for row in rows("a") if "loss" in row):
        schedule.step_update(step)
        position, index = 8 * step + torch.arange(8), kept[order_of(f, 34, step)]
        x = augment_uint8(images[index], position, f.seed, f.pad, f.num_ops, flip=True)
        x = to_float_and_erase(x, position, f.seed, f.erase)
        targets = mixup_target(labels[index], 10, smoothing=f.smoothing)        # not mixed yet
        x, targets = mix(x, targets, f.seed, step, f.mixup, f.cutmix)
        torch.manual_seed(seed_from(f.seed, DROPOUT, step, 0))                  # drop-path masks
        loss = SoftTargetCrossEntropy()(model(x), targets)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), f.clip)
        optimizer.step()
        optimizer.zero_grad()
        expected = loss.item(), norm.item(), optimizer.param_groups[0]["lr"]
        assert (row["loss"], row["grad_norm"], row["lr"]) == pytest.approx(expected, rel=5e-5)
    assert step == 9
    weights = common.load("a/last.pt")["model"]
    for name, p in model.named_parameters():
        if p.ndim > 1:                                          # the loss hides weight decay
            assert weights[name].norm() == pytest.approx(p.norm().item(), rel=1e-5), name


# --- several processes, and torch.compile ---------------------------------------------------------

def write_photos(root, count=12, size=16):
    """Write photos of two classes, root/<class>/<i>.png."""
    for k, name in enumerate(("ant", "bee")):
        Path(root, name).mkdir(parents=True)
        for i in range(count):
            pixels = np.random.default_rng(i + 99 * k).integers(0, 256, (size, size, 3))
            Image.fromarray(pixels.astype(np.uint8)).save(Path(root, name, f"{i}.png"))


PHOTOS = "--image_size 16 --patch_size 8 --batch_size 4 --epochs 1"


def loss_on(folder, hashes):
    """Return the loss of a run's last network on the photos in split/val with these hashes."""
    model = classifier_from_checkpoint(common.load(f"{folder}/last.pt"))
    photos = [read_image(path) for path in Path("split/val").glob("*/*")]
    labels = [path.parent.name == "bee" for path in Path("split/val").glob("*/*")]
    kept = [i for i, photo in enumerate(photos) if hash_pixels(photo) in hashes]
    with torch.no_grad():
        logits = model(torch.stack([photos[i] for i in kept]) / 255)
    return F.cross_entropy(logits, torch.tensor([int(labels[i]) for i in kept])).item()


def test_initial_weights_pass_on_what_they_saw():
    write_photos("photos")
    train(PHOTOS, "--data_dir photos --out_dir a")
    a = common.load("a/last.pt")
    assert {*a["trained"]} < {*a["seen"]} and a["inherited"] == []
    # The photos get another split. The new val/ has two trained photos of each class.
    old = {*a["trained"]}
    for name in ("ant", "bee"):
        photos = sorted(Path("photos", name).iterdir(),
                        key=lambda path: hash_pixels(read_image(path)) in old)
        for part, paths in (("val", photos[:4]), ("test", photos[4:5]), ("train", photos[5:])):
            Path("split", part, name).mkdir(parents=True)
            for path in paths:
                shutil.copy(path, Path("split", part, name))
    held = {hash_pixels(read_image(path)) for path in Path("split/val").glob("*/*")}
    assert len(held & old) == len(held - old) == 4
    train(PHOTOS, "--data_dir split --init_from a --out_dir b --max_steps 1")
    b = common.load("b/last.pt")
    assert {*a["seen"]} <= {*b["seen"]} and b["inherited"] == a["trained"]
    assert old <= {*b["trained"]} and not {*b["trained"]} & (held - old)
    assert log("b", "eval")[1]["loss"] == pytest.approx(loss_on("b", held - old), rel=1e-5)
    train("--resume b")                                             # without the file of "a"
    again = common.load("b/last.pt")
    assert all(again[name] == b[name] for name in ("seen", "trained", "inherited", "fingerprint"))


def test_held_out_images_were_not_trained_on():
    train(SMALL, "--holdout 16 --max_steps 1 --out_dir a")
    for flags in ("--holdout 32", "--holdout 16 --num_images 80"):
        assert "choose the same value" in bad(SMALL, flags, "--init_from a --max_steps 1")
    train(SMALL, "--holdout 16 --init_from a --max_steps 1 --out_dir b")


def test_held_out_images_were_in_no_earlier_training(monkeypatch):
    """Train on all scenes, then on another data set, then hold out some of the scenes."""
    monkeypatch.setitem(DATASETS, "other", DATASETS["shapes"])
    train(SMALL, "--max_steps 1 --out_dir a")
    train(SMALL, "--data other --init_from a --max_steps 1 --out_dir b")
    train("--resume b --max_steps 2")
    b = common.load("b/last.pt")
    assert b["history"] == [dict(data="shapes", holdout=0, num_images=64),
                            dict(data="other", holdout=0, num_images=64)]
    assert "trained on shapes with --holdout 0" in bad(
        SMALL, "--holdout 16 --init_from b --max_steps 1")
    del b["history"]                                                # as in an earlier version
    torch.save(b, "old.pt")
    train(SMALL, "--holdout 16 --init_from old.pt --max_steps 1 --out_dir c")


def test_a_process_without_images_evaluates_nothing(monkeypatch):
    """Two images, and the fourth of four processes."""
    monkeypatch.setattr(train_cls.dist, "all_reduce", lambda total: None)
    model = ViT(ViTConfig(16, 8, 10, 32, 1, 1))
    images = load_shapes("test", 2, 16)
    numbers = train_cls.evaluate(model, images, Namespace(), torch.device("cpu"), rank=3, world=4)
    assert numbers == dict(top1=0, top5=0, loss=0)


def test_the_attack_computes_gradients_outside_of_autocast(monkeypatch):
    inside, logits = [], []

    def attack(model, images, labels, eps, **settings):
        inside.append(torch.is_autocast_enabled("cpu"))
        logits.append(model(images))
        return images
    monkeypatch.setattr(train_cls, "pgd", attack)
    train(SMALL, "--max_steps 1 --adv_eps 2/255 --amp --out_dir a")
    assert inside == [False] and logits[0].dtype == torch.bfloat16


def test_every_run_reaches_its_learning_rate():
    """A recipe's warm-up shrinks; a warm-up on the command line is an error."""
    for epochs, warmup in ((1, 0.5), (2, 1)):
        args, _ = call(train_cls.get_args, SMALL, f"--epochs {epochs}")
        assert args.warmup_epochs == warmup
    args, _ = call(train_cls.get_args, "--data imagenet --data_dir x --epochs 4")
    assert args.warmup_epochs == 2
    for warmup in ("2", "3"):
        assert f"--warmup_epochs {warmup}: expected fewer than --epochs 2" in bad(
            SMALL, "--epochs 2 --warmup_epochs", [warmup])


def test_no_learning_rate_exceeds_the_flag():
    for lr in (1e-3, 1e-5, 2e-6, 1e-7, 0.0):
        args = Namespace(lr=lr)
        rates = [train_cls.learning_rate(step, 5, 20, args) for step in range(20)]
        assert max(rates) <= lr and min(rates) >= 0
    assert rates == [0.0] * 20


@pytest.mark.parametrize("flags, names", [
    ("--data shapes --data_dir photos", "data_dir"), ("--data_dir p --num_images 9", "num_images"),
    ("--data_dir p --holdout 3", "holdout"), ("--data imagenet --data_dir p --holdout 3", "holdout"),
    ("--download", "download"), ("--data cifar10 --num_images 9", "num_images"),
    ("--adv_steps 4", "adv_steps"), ("--num_workers 2", "num_workers"),
    ("--data cifar10 --data_dir p --num_workers 2", "num_workers"),
    ("--data_dir p --num_workers 2", "num_workers"),
    ("--attn scaled_s --rpc_layers all", "rpc_layers"), ("--attn softmax --form admm", "form"),
    ("--attn symmetric --n_iter 6 --lambd 3", "lambd, --n_iter")])
def test_a_flag_without_effect_is_an_error(flags, names):
    assert f"--{names}: no effect with" in bad(flags) and not Path("out").exists()


def test_init_needs_a_new_head():
    train(SMALL, "--max_steps 1 --out_dir a")
    assert "--init: no effect with --init_from a, whose head fits" in bad(
        SMALL, "--init default --init_from a --max_steps 1 --out_dir b")


def test_resume_takes_no_other_folder_or_weights():
    train(SMALL, "--max_steps 1 --out_dir a")
    for flag in ("--out_dir b", "--init_from b"):
        assert f"{flag[:-2]}: no effect with --resume" in bad("--resume a", flag)


def test_wrong_flags_are_one_line():
    for flag in ("eval_every 0", "n_iter 0", "epochs -1", "smoothing 2", "drop_path 1", "lr nan",
                 "erase -1", "repeats 0", "adv_eps 1/0", "adv_eps 3", "seed -1", "batch_size 0",
                 "max_steps 0"):
        name, value = flag.split()
        assert f"argument --{name}: {value}: expected" in bad(f"--{flag}")
    assert "--download needs --data_dir" in bad("--data cifar10 --download")


def test_images_in_memory_have_the_flags_size(monkeypatch):
    source = DataSource(lambda part, args: load_shapes(part, 20, 32), DATASETS["shapes"].recipe)
    monkeypatch.setitem(DATASETS, "of 32 px", source)
    line = bad(["--data", "of 32 px"], "--image_size 16 --max_steps 1 --out_dir a")
    assert "--image_size 16: the images of --data of 32 px have 32 x 32 pixels" in line


def test_only_one_process_downloads(monkeypatch):
    monkeypatch.setattr(common, "start_processes", lambda name: (0, 2, torch.device("cpu")))
    line = bad("--data cifar10 --data_dir x --download")
    assert "--download: expected one process" in line and not Path("x").exists()


def of_its_node():
    """Run main() as in the folder of this process's node."""
    os.chdir(f"node{os.environ['RANK']}")
    train_cls.main()


@pytest.mark.parametrize("what", ["data", "flags"])
def test_processes_with_other_data_or_flags_stop(what):
    for rank in (0, 1):
        write_photos(f"node{rank}/photos")
    words = [*PHOTOS.split(), "--data_dir", "photos", "--epochs", "1"]
    if what == "data":
        Path("node1/photos/ant/3.png").unlink()
        results = group_results(of_its_node, words)
    else:
        results = group_results(with_own_rate, words)
    for code, _, err in results:
        assert code == 1 and f"error: the processes have different {what}" in err
    assert what == "data" or "'lr'" in err and "clip" not in err    # names what differs


def with_own_rate():
    """Run main() with another --lr per process."""
    sys.argv += ["--lr", f"1e-{3 + int(os.environ['RANK'])}"]
    of_its_node()


real_compile = torch.compile


def compile_eagerly(model, mode):
    """Stand in for torch.compile: trace the model and its backward pass, but generate no code."""
    return real_compile(model, backend="aot_eager")


def test_two_compiled_processes_equal_one(monkeypatch):
    monkeypatch.setitem(SIZES["nano"], "depth", 1)      # for speed
    monkeypatch.setattr(torch, "compile", compile_eagerly)
    monkeypatch.setattr(common, "LOG_EVERY", 1)
    run = [*SMALL, *"--max_steps 3 --adv_eps 2/255 --adv_steps 1 --n_iter 1".split()]
    group(train_cls.main, [*run, "--compile", "--out_dir", "two"])
    train(run, "--no-compile --out_dir one")
    assert [*log("two").values()] == pytest.approx([*log("one").values()], abs=3e-5)


def test_the_compiled_model_is_attacked(monkeypatch):
    """Two graphs, to attack and to train, and the losses of the uncompiled model."""
    monkeypatch.setitem(SIZES["nano"], "depth", 1)      # for speed
    graphs, backend = [], torch._dynamo.lookup_backend("aot_eager")

    def count(graph, inputs):
        graphs.append(graph)
        return backend(graph, inputs)
    compiling = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, mode: compiling(model, backend=count))
    monkeypatch.setattr(common, "LOG_EVERY", 1)
    for how in ("--compile", "--no-compile"):
        train(SMALL, "--max_steps 3 --adv_eps 2/255 --adv_steps 2 --n_iter 1 --out_dir",
              [f"a{how}"], how)
    assert [*log("a--compile").values()] == pytest.approx([*log("a--no-compile").values()], abs=1e-5)
    assert len(graphs) == 2


def test_rpca_trains_with_its_own_settings():
    train(*SMALL, "--attn rpca --max_steps 2 --out_dir run")
    config = common.load(Path("run"))["model_config"]
    assert config["attn"] == "rpca"
    assert config["pap"]["lambd"] == 1 and config["pap"]["n_iter"] == 4
    assert len(log("run", "nonzero_S")[2]["0"]) == 4
    assert "--form" in bad(*SMALL, "--attn rpca --form paper --out_dir other")
