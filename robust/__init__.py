"""Attacks on image classifiers, corruptions of images, and `evaluate`, which runs attacks.

    right = evaluate(model, images, labels, {"pgd": partial(robust.attacks.pgd, eps=2 / 255)})
    right["worst"].float().mean()                # robust accuracy; right["pgd"] is (n,) bool

eval_robust.py evaluates whole data sets with this folder; see docs/robustness.md. From the project,
the files of this folder import only common.py, attention.py and data/rng.py; only the command
`python -m robust.checks` also imports eval_robust.py.
"""

import torch

from common import at_least_float32
from robust.attacks import check_adversarial, check_inputs, check_logits, check_repeats


def attack_right_images(model, images, labels, right, attack, index=None):
    """Attack the images of one batch that are `right`, (B,) bool; return all images, checked.

    index: (B,) the numbers of the images for the attack's keyword index. None: the attack gets no
    such keyword.
    """
    adv = images.clone()
    rows = right.nonzero()[:, 0]
    if len(rows):
        keywords = {}
        if index is not None:
            keywords["index"] = index.to(images.device)[rows]
        found = attack(model, images[rows], labels[rows], **keywords)
        check_adversarial(model, images[rows], found)
        adv[rows] = found.detach()
    return adv


def evaluate(model, images, labels, attacks, *, batch_size=256, index=None):
    """Return which images the model classifies correctly under each attack.

    model: an nn.Module in eval mode, or any function, from pixels (B, 3, H, W) in [0, 1] to logits.
    images: (n, 3, H, W). labels: (n,) int64, on the same device.
    attacks: {name: function of (model, images, labels)}, with names other than "clean" and "worst".
        An attack from another library:
        lambda model, x, y: torchattacks.PGD(model, 2 / 255)(x, y).
    batch_size: images per batch. It bounds the memory.
    index: (n,) the numbers of the images, on any device. If you set it, every attack also gets the
        keyword index. Otherwise our attacks count the images of a batch from 0.
    Returns a dict of (n,) bool, True for a correct answer: "clean", the name of each attack, and
    "worst", under every attack.
    """
    if not len(images):
        raise ValueError("images is empty, expected 1 image or more")
    check_inputs(model, images)
    if labels.shape != images.shape[:1]:
        raise ValueError(f"labels are {tuple(labels.shape)}, expected ({len(images)},)")
    for name in ("clean", "worst"):
        if name in attacks:
            raise ValueError(f"an attack has the name {name!r}, which is a key of the result; "
                             f"rename the attack")
    right = {name: [] for name in ("clean", *attacks)}
    for part in torch.arange(len(images)).split(batch_size):
        x = images[part]
        y = labels[part]
        numbers = None if index is None else index[part]
        with torch.no_grad():
            logits = at_least_float32(model(x))
        check_logits(logits)
        if part[0] == 0:
            check_repeats(model, x[:2], logits[:2])
        if y.min() < 0 or y.max() >= logits.shape[1]:
            raise ValueError(f"labels are from {y.min()} to {y.max()}, expected 0 to "
                             f"{logits.shape[1] - 1}")
        clean = logits.argmax(1) == y
        right["clean"].append(clean)
        for name, attack in attacks.items():
            adv = attack_right_images(model, x, y, clean, attack, numbers)
            with torch.no_grad():
                logits = model(adv)
            check_logits(logits)                        # the arg max of nan could be the label
            right[name].append(logits.argmax(1) == y)
    right = {name: torch.cat(parts).cpu() for name, parts in right.items()}
    right["worst"] = torch.stack(list(right.values())).all(0)
    return right
