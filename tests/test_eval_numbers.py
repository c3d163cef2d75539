"""Evaluations compared with plain loops: seeds, severities, processes and the order of labels."""

from pathlib import Path

import pytest
import torch
from torchvision.io import write_png

import eval_robust
from data.shapes import load_shapes
from processes import group
from results import unpack
from robust import attacks, corruptions, metrics
from runs import flags
from test_eval_robust import an_empty_folder, make_checkpoint, read, run  # noqa: F401
from vit import ViT, ViTConfig

HOW = ("--ckpt m.pt --measures noise fog --severities 2 4 --limit 30 --seed 3 --device cpu "
       "--out_dir").split()


def test_a_seed_and_severities_arrive():
    make_checkpoint()
    run(HOW, "r")
    noise, fog = read()
    net = eval_robust.load_model("m.pt", torch.device("cpu")).net
    images, labels = load_shapes("test", 80)[:2]
    index = eval_robust.epoch_order(80, epoch=0, seed=3)[:30]
    x, y = images[index], labels[index]
    for severity, bits in zip((2, 4), fog["right"], strict=True):
        foggy = corruptions.corrupt(x, "fog", severity, seed=3, index=index) / 255
        assert torch.equal(unpack(bits, 30), net(foggy).argmax(1) == y)
    right = net(x / 255).argmax(1) == y
    adv = attacks.noise(net, x[right] / 255, y[right], 0.068, seed=3, index=index[right])
    far = (adv - x[right] / 255).double().flatten(1).norm(dim=1)
    assert noise["mean_l2"] == pytest.approx(far.mean().item(), rel=1e-6)


def test_two_processes_have_the_numbers_of_one():
    make_checkpoint()
    run(HOW, "one")
    group(eval_robust.main, flags(HOW, "two"))
    for one, two in zip(read("one"), read("two"), strict=True):
        for name in ("top1", "right", "mean_l2", "max_linf"):
            assert one.get(name) == pytest.approx(two.get(name)), name


def test_imagenet_a_and_o_are_scored_image_by_image():
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
    run("--ckpt net.pt --data_dir . --imagenet_a a --imagenet_o o --measures imagenet_a imagenet_o "
        "--out_dir r --num_workers 0")
    a, o = read()

    def logits(folder, columns):
        tree = eval_robust.open_folder(folder, eval_robust.IMAGENET, 32)
        kept = [i for i, label in enumerate(tree.labels) if label in columns]
        pixels = torch.stack([tree[i, i][0] for i in kept]) / 255
        return net(pixels)[:, columns], tree.labels[kept]
    z, labels = logits("a", [3, 7])
    right = z.argmax(1) == (labels == 7).long()
    order = eval_robust.epoch_order(12, epoch=0, seed=0)
    assert 0 < right.sum() < 12 and torch.equal(unpack(a["right"], 12), right[order])
    doubt = [-logits(folder, [7, 500])[0].softmax(1).amax(1) for folder in ("o", "val")]
    expected = metrics.average_precision(torch.cat(doubt), torch.arange(24) < 12)
    assert o["aupr"] == pytest.approx(100 * expected, rel=0.02) and abs(o["aupr"] - o["chance"]) > 5
