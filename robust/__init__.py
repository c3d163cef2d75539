"""Attacks on image classifiers, corruptions of images, and `evaluate`, which runs attacks.

    from functools import partial
    from robust import evaluate
    from robust.attacks import pgd

    right = evaluate(model, images, labels, {"pgd": partial(pgd, eps=2 / 255)})
    right["worst"].float().mean()                # robust accuracy; right["pgd"] is (n,) bool

This folder is a library: from the project, it imports only common.py, attention.py and data/rng.py.
eval_robust.py evaluates whole data sets with it; see docs/robustness.md.
"""

import inspect

import torch


def check_mode(model):
    """Raise ValueError if a module is in train mode."""
    if isinstance(model, torch.nn.Module) and any(m.training for m in model.modules()):
        raise ValueError("the model is in train mode: call model.eval() before attacking it")


def forward(model, images, batch_size=None):
    """Return model(images) in float32 or wider, computed batch_size images at a time.

    Half-precision logits are widened, because losses and margins need more range and precision.
    """
    parts = images.split(batch_size) if batch_size and len(images) > batch_size else [images]
    logits = torch.cat([model(part) for part in parts]) if len(parts) > 1 else model(images)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))    # float64 stays float64


def check_labels(labels, n, classes=None):
    """Return labels as (n,) int64. Raise ValueError unless they are n class indices.

    Integers of any type and of shape (n, 1) are accepted. classes: the number of logits, if known.
    """
    labels = torch.as_tensor(labels)
    flat = labels.flatten() if labels.numel() == len(labels) else labels
    if flat.ndim != 1 or len(flat) != n or flat.is_floating_point() or flat.dtype == torch.bool:
        one_hot = "; for one-hot labels pass labels.argmax(1)" if labels.ndim == 2 else ""
        raise ValueError(f"labels are {labels.dtype} {tuple(labels.shape)}, expected {n} class "
                         f"indices of an integer type{one_hot}")
    if classes and n and not 0 <= flat.min() <= flat.max() < classes:
        shift = "; if they count from 1, pass labels - 1" if flat.max() == classes else ""
        raise ValueError(f"labels are {int(flat.min())} to {int(flat.max())}, expected 0 to "
                         f"{classes - 1}, because the model has {classes} logits{shift}")
    return flat.long()


def evaluate(model, images, labels, attacks, *, batch_size=256, seed=0, index=None, draws=1,
             attack_wrong=False, trace=None):
    """Return which images the model classifies correctly under each attack.

    model: an nn.Module in eval mode, or any function, from pixels (B, 3, H, W) in [0, 1] to logits.
    images: (n, 3, H, W). labels: (n,) class indices.
    attacks: {name: function of (model, images, labels)}. Example: partial(pgd, eps=2 / 255). An
        attack from another library: lambda model, x, y: torchattacks.PGD(model, 2 / 255)(x, y). An
        attack also gets seed, index, draw, batch_size and trace if its signature names them. A
        partial keeps the arguments that it has set.
    batch_size: images per call of an attack. An attack with the keyword batch_size gets all images
        and splits them itself, because its images finish at different times.
    index: (n,) the numbers of the images (default: 0, 1, ...); random numbers depend on (seed,
        number, draw) alone.
    draws: attacks per image, each with different random numbers.
    attack_wrong: True also attacks the images that are misclassified without an attack; by default
        these images stay unchanged.
    trace: a list that receives one dict per attack and draw: attack (its name), draw, adv (the
        adversarial images), logits (of adv), and stages (what the attack appended to the list
        that it received as its own argument trace).

    Returns:
        a dict of (n,) bool, True for a correct answer. "clean": without an attack. Each attack's
        name: in all draws of this attack. "worst": under every attack.
    ValueError: the model is in train mode, the labels do not fit the logits, or an attack is named
    "clean" or "worst".
    """
    check_mode(model)
    if {"clean", "worst"} & attacks.keys():
        raise ValueError('attacks: the names "clean" and "worst" are reserved; rename the attack')
    labels = check_labels(labels, len(images)).to(images.device)
    index = torch.arange(len(images)) if index is None else index
    index = index.to(images.device)
    with torch.no_grad():
        logits = forward(model, images, batch_size)
    check_labels(labels, len(images), logits.shape[1])
    clean = logits.argmax(1) == labels
    to_attack = torch.ones_like(clean) if attack_wrong else clean

    right = {"clean": clean.cpu()}
    for name, attack in attacks.items():
        # Find the arguments that the attack takes: after (model, images, labels), not set by a
        # partial.
        takes = set(list(inspect.signature(attack).parameters)[3:])
        takes -= getattr(attack, "keywords", {}).keys()
        size = len(images) if "batch_size" in takes else batch_size
        right[name] = torch.ones(len(images), dtype=torch.bool)
        for draw in range(draws):
            adv, stages = images.clone(), []
            for part in torch.arange(len(images), device=images.device).split(size):
                rows = part[to_attack[part]]
                if len(rows) == 0:
                    continue
                offered = dict(seed=seed, index=index[rows], draw=draw, batch_size=batch_size,
                               trace=stages)
                keywords = {k: v for k, v in offered.items() if k in takes}
                adv[rows] = attack(model, images[rows], labels[rows], **keywords).detach()
            with torch.no_grad():
                logits = forward(model, adv, batch_size)
            right[name] &= (logits.argmax(1) == labels).cpu()
            if trace is not None:
                trace.append(dict(attack=name, draw=draw, adv=adv, logits=logits, stages=stages))
    return right | {"worst": torch.stack(list(right.values())).all(0)}
