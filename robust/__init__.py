"""Attacks on image classifiers, corruptions of images, and `evaluate`, which runs attacks.

    right = evaluate(model, images, labels, {"pgd": partial(robust.attacks.pgd, eps=2 / 255)})
    right["worst"].float().mean()                # robust accuracy; right["pgd"] is (n,) bool

eval_robust.py evaluates whole data sets with this folder; see docs/robustness.md. From the project,
it imports only common.py, attention.py and data/rng.py.
"""

import torch

from robust.attacks import check_inputs


def attack_batch(model, images, labels, attack, **index):
    """Attack the images of one batch that the model classifies correctly; return all images."""
    adv = images.clone()
    with torch.no_grad():
        rows = (model(images).argmax(1) == labels).nonzero()[:, 0]
    if len(rows):
        index = {name: numbers[rows] for name, numbers in index.items()}    # empty, or index=(n,)
        adv[rows] = attack(model, images[rows], labels[rows], **index).detach()
    return adv


def evaluate(model, images, labels, attacks, *, batch_size=256, index=None):
    """Return which images the model classifies correctly under each attack.

    model: an nn.Module in eval mode, or any function, from pixels (B, 3, H, W) in [0, 1] to logits.
    images: (n, 3, H, W). labels: (n,) int64, on the same device.
    attacks: {name: function of (model, images, labels)}. An attack from another library:
        lambda model, x, y: torchattacks.PGD(model, 2 / 255)(x, y).
    batch_size: images per batch. It bounds the memory.
    index: (n,) the numbers of the images. If you set it, every attack also gets the keyword index.
        Otherwise our attacks count the images of a batch from 0.
    Returns a dict of (n,) bool, True for a correct answer: "clean", the name of each attack, and
    "worst", under every attack.
    """
    check_inputs(model, images)
    right = {name: [] for name in ("clean", *attacks)}
    for part in torch.arange(len(images)).split(batch_size):
        x, y = images[part], labels[part]
        numbers = {} if index is None else dict(index=index[part])
        with torch.no_grad():
            logits = model(x)
        if labels.shape != images.shape[:1] or not 0 <= y.min() <= y.max() < logits.shape[1]:
            raise ValueError(f"labels are {tuple(labels.shape)} from {y.min()} to {y.max()}, "
                             f"expected ({len(images)},) from 0 to {logits.shape[1] - 1}")
        right["clean"].append(logits.argmax(1) == y)
        for name, attack in attacks.items():
            adv = attack_batch(model, x, y, attack, **numbers)
            with torch.no_grad():
                right[name].append(model(adv).argmax(1) == y)
    right = {name: torch.cat(parts).cpu() for name, parts in right.items()}
    return right | {"worst": torch.stack(list(right.values())).all(0)}
