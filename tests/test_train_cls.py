"""Test train_cls.py alone; test_train.py tests the behaviour of all trainers."""

import copy
import os
from argparse import Namespace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from timm.data.mixup import mixup_target
from timm.loss import SoftTargetCrossEntropy
from timm.optim import param_groups_weight_decay
from timm.scheduler import CosineLRScheduler

import common
import robust.attacks
import train_cls
from data import datasets
from data.augment import augment_uint8, mix, to_float_and_erase
from data.images import Split
from data.rng import DROPOUT, seed_from
from data.shapes import load_shapes
from models import load_classifier
from processes import group
from runs import call, log, refused, rows
from vit import SIZES, ViT, ViTConfig

pytestmark = pytest.mark.usefixtures("alone", "two_layers")
SMALL = ("--model nano --num_images 64 --image_size 16 --patch_size 4 "
         "--batch_size 16").split()
train, bad = partial(call, train_cls.main), partial(refused, train_cls)


def test_the_checkpoint_alone_reproduces_the_accuracy(capsys):
    train("--max_steps 2 --num_images 500")         # other flags: as in README's first command
    *_, following = capsys.readouterr().out.strip().splitlines()
    folder, val = Path("out/shapes_rpc"), load_shapes("val", 100)
    evaluation, checkpoint = log(folder, "eval")[2], common.load(folder)
    assert following == f"next: python eval_robust.py --ckpt {folder}"
    with torch.no_grad():
        logits = load_classifier(checkpoint)(val.images.float() / 255)
    right = logits.topk(5).indices == val.labels[:, None]
    assert evaluation == pytest.approx(dict(
        top1=right[:, 0].sum().item(), top5=right.sum().item(),
        loss=F.cross_entropy(logits, val.labels).item()), rel=1e-5)
    assert checkpoint["classes"] == val.classes and checkpoint["step"] == 2
    assert "out/shapes_rpc contains a run" in bad("--max_steps 1")


def test_a_run_resumed_within_a_chunk_is_equal(monkeypatch):
    """A GPU augments a chunk of batches at once; here three batches, and the "GPU" is the CPU."""
    monkeypatch.setattr(train_cls, "CHUNK_BYTES", 12 * 3 * 16 ** 2)
    monkeypatch.setattr(datasets, "send", lambda x, device: x)
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


def test_the_average_of_the_weights_is_evaluated(monkeypatch):
    """The buffers of a FAN, means over batches, are copied. The trained weights are saved, too."""
    monkeypatch.setitem(train_cls.SIZES, "fan_tiny", ("fan", dict(embed_dim=16, depth=1, num_heads=2)))
    models, averages = [], []

    def recorded(average, model, decay, step):
        real(average, model, decay, step)
        models.append(copy.deepcopy(model.state_dict()))
        averages.append(copy.deepcopy(average.state_dict()))
    real = train_cls.update_average
    monkeypatch.setattr(train_cls, "update_average", recorded)
    train(SMALL, "--model fan_tiny --patch_size 8 --ema 0.15 --max_steps 3 --out_dir a --lr 0.1")
    checkpoint = common.load("a")
    for name, last in models[-1].items():
        assert torch.equal(checkpoint["trained"][name], last)
        assert torch.equal(checkpoint["model"][name], averages[-1][name])
        if "running" in name:
            assert torch.equal(averages[-1][name], last)
        elif last.is_floating_point():                              # 2 / 11 is above 0.15
            expected = 0.15 * averages[-2][name] + 0.85 * last
            torch.testing.assert_close(averages[-1][name], expected)
    val = load_shapes("val", 12, 16)
    logits = load_classifier(checkpoint)(val.images / 255)
    assert log("a", "eval")[3]["loss"] == pytest.approx(F.cross_entropy(logits, val.labels).item())


def test_a_lost_best_is_written_again():
    train(SMALL, "--best --epochs 2 --max_steps 4 --out_dir a")
    os.remove("a/best.pt")
    train("--resume a")
    assert common.load("a/best.pt")["step"] == 8


def test_a_loader_of_your_own_is_checked(monkeypatch, capsys):
    """If it forgets its part, noise with random labels has a validation accuracy of 100 %."""
    images, labels = torch.randint(0, 256, (80, 3, 16, 16)).byte(), (torch.arange(40) < 4).long()
    parts = dict(train=Split(images[:40], labels, ["a", "b"]),
                 val=Split(images[40:], labels, ["a", "b"]))
    monkeypatch.setitem(train_cls.RECIPES, "mine", dict(batch_size=16, image_size=16))
    monkeypatch.setitem(datasets.DATASETS, "mine", lambda part, *args: parts["val"])
    assert "the parts train and val are equal" in bad("--data mine --max_steps 1")
    monkeypatch.setitem(datasets.DATASETS, "mine", lambda part, *args: parts[part])
    train("--data mine --max_steps 1")
    assert "largest class 90.00" in capsys.readouterr().out


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
    f = dict(num_images=34, model="micro", image_size=16, patch_size=8, attn="rpc_asym",
             rpc_layers="1,3", n_iter=3, lambd=0.3, form="paper", drop_path=0.3,
             init="trunc_normal", epochs=3, batch_size=8, lr=3e-3, warmup=1 / 6,
             weight_decay=0.4, clip=0.7, pad=3, num_ops=3, erase=0.6, mixup=0.3, cutmix=0.5,
             smoothing=0.2, repeats=2, seed=5, device="cpu", out_dir="a", max_steps=10)
    train(**f)
    f, (images, labels, *_) = SimpleNamespace(**f), load_shapes("train", 34, 16)
    torch.manual_seed(f.seed)
    model = ViT(ViTConfig(16, 8, 10, 96, 6, 3, attn="rpc_asym", rpc_layers=(1, 3), drop_path=0.3,
                          pap=dict(n_iter=3, lambd=0.3, form="paper"), init="trunc_normal"))
    optimizer = torch.optim.AdamW(param_groups_weight_decay(
        model, f.weight_decay, no_weight_decay_list=("pos_embed", "cls_token")), lr=f.lr)
    schedule = CosineLRScheduler(optimizer, 3 * 4, common.MIN_LR, t_in_epochs=False, warmup_t=2,
                                 warmup_lr_init=1e-6)
    for step, row in enumerate(row for row in rows("a") if "loss" in row):
        schedule.step_update(step)
        position, index = 8 * step + torch.arange(8), order_of(f, 34, step)
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


def test_a_process_without_images_evaluates_nothing(monkeypatch):
    """Two images, and the fourth of four processes."""
    monkeypatch.setattr(train_cls.dist, "all_reduce", lambda total: None)
    model = ViT(ViTConfig(16, 8, 10, 32, 1, 1))
    images = load_shapes("test", 2, 16)
    numbers = train_cls.evaluate(model, images, torch.device("cpu"), rank=3, world=4)
    assert numbers == dict(top1=0, top5=0, loss=0)


def test_the_attack_computes_gradients_outside_of_autocast(monkeypatch):
    inside, logits = [], []

    def attack(model, images, labels, eps, **settings):
        inside.append(torch.is_autocast_enabled("cpu"))
        logits.append(model(images))
        return images
    monkeypatch.setattr(robust.attacks, "pgd", attack)
    train(SMALL, "--max_steps 1 --adv_eps 2/255 --amp --out_dir a")
    assert inside == [False] and logits[0].dtype == torch.bfloat16


def test_no_learning_rate_exceeds_the_flag():
    for lr in (1e-3, 1e-5, 2e-6, 1e-7, 0.0):
        args = Namespace(lr=lr)
        rates = [train_cls.learning_rate(step, 5, 20, args) for step in range(20)]
        assert max(rates) <= lr and min(rates) >= 0
    assert rates == [0.0] * 20


# --- several processes, and torch.compile ---------------------------------------------------------

def compiled_main():
    """Run main(); torch.compile traces the model, but generates no code. Print the graphs' number."""
    graphs, compiling = [], torch.compile
    backend = torch._dynamo.lookup_backend("aot_eager")

    def count(graph, inputs):
        graphs.append(graph)
        return backend(graph, inputs)
    torch.compile = lambda model, mode: compiling(model, backend=count)
    train_cls.main()
    print("graphs:", len(graphs))


def test_two_compiled_processes_equal_one(monkeypatch):
    """Two graphs, to attack and to train, and the losses of one process without compiling."""
    monkeypatch.setitem(SIZES["nano"], "depth", 1)      # for speed
    monkeypatch.setattr(common, "LOG_EVERY", 1)
    run = [*SMALL, *"--max_steps 3 --adv_eps 2/255 --adv_steps 2 --n_iter 1".split()]
    for printed in group(compiled_main, [*run, "--compile", "--out_dir", "two"]):
        assert printed.endswith("graphs: 2\n")
    train(run, "--no-compile --out_dir one")
    assert [*log("two").values()] == pytest.approx([*log("one").values()], abs=3e-5)
