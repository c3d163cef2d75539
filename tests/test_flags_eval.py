"""Rows of runs whose flags are not the defaults equal plain loops."""

import pytest
import torch
import torch.nn.functional as F

import common
from data.rng import epoch_order
from data.shapes import load_shapes
from eval_robust import Normalized
from results import unpack
from robust import attacks, corruptions
from test_eval_robust import make_checkpoint, rows_of
from vit import ViT, ViTConfig


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder with the model a.pt, which the flags below name."""
    folder = tmp_path_factory.mktemp("flags")
    make_checkpoint(folder / "a.pt", patch_size=16, flags=dict(num_images=1000))
    return folder


def by_hand(place, eps, paper):
    """Return {measure: (n, 2) bool}: top-1 and top-5 correct, by loops over batches of 6.

    paper: attacks use normalised tensors, move away from the predictions and do not clip.
    """
    checkpoint = common.load(place / "a.pt")
    model = ViT(ViTConfig(**checkpoint["model_config"])).eval()
    model.load_state_dict(checkpoint["model"])
    mean, std = (torch.tensor(getattr(model.config, n))[:, None, None] for n in ("mean", "std"))
    net, mean, std = (Normalized(model, model), mean, std) if paper else (model, 0, 1)
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
def test_rows_equal_plain_loops_under_other_flags(place, tmp_path, preset, k, largest):
    """Compare the rows at --eps k/255 with by_hand().

    largest: the largest change of a pixel for eps 1; with the paper preset, the largest std of a
    channel. One image near the decision boundary may differ, because the loops form other batches
    and round differently.
    """
    found = rows_of(
        tmp_path, "--ckpt", place / "a.pt", "--preset", preset, "--eps", f"{k}/255", "--limit", 20,
        "--seed", 3, "--batch_size", 6, "--severities", 2, 5, "--measures", "clean",
        "corruptions type=fog jpeg85=yes", "noise scale=0.4 kind=gaussian draws=2 best_of=2",
        "fgsm", "pgd steps=4 rel_step=0.4 random_start=no")
    rows = {row["name"]: row for row in found}
    hand = by_hand(place, k / 255, preset == "paper")
    assert 0 < hand["pgd"][:, 0].sum() < hand["clean"][:, 0].sum() < 20      # the attack acts
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


