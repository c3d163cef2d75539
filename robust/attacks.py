"""Adversarial attacks on image classifiers, whole batches at a time.

An attack is a function attack(model, images, labels, eps, ...) that returns adversarial images:
  model     any function from pixels to logits, (B, 3, H, W) float32 in [0, 1] -> (B, classes).
            A module in train mode is refused, not switched: call model.eval() first
  images    (B, 3, H, W) float32 in [0, 1], on the model's device; never changed
  labels    (B,) int64, what the attack leads away from: true classes or the model's predictions
  eps       budget in pixel units, 8/255 say: a number or a tensor that broadcasts to images
  clip      True: adversarial pixels stay in [0, 1]; False: they may leave it (the paper's harness)
  seed, index   random numbers depend on (seed, image number index[i]) alone, not on the batch
Parameters and their .grad stay as they are (frozen ones are faster); the result is detached.
Teo & Nguyen 2024, sections 4.1, A.2; sources are in the docstrings.

    adv = pgd(model, images, labels, 8 / 255)
    robust = model(adv).argmax(1) == labels       # what the model got wrong anyway is not robust

A new attack is such a function and an entry in ATTACKS (robust/__init__.py). It gets those of eps,
seed, index and clip that its signature names; its other keywords are settings of the evaluator.
"""

import math
from types import SimpleNamespace
from typing import Literal

import torch
import torch.nn.functional as F

from common import InputError
from data.rng import NOISE, START, normal, uniform

# --- what all attacks share ----------------------------------------------------------------------

def margin(logits, labels):
    """z_y - max_{j != y} z_j, (B,): negative where the model is fooled."""
    others = logits.scatter(1, labels[:, None], -math.inf)
    return logits.gather(1, labels[:, None])[:, 0] - others.amax(1)


def cross_entropy(logits, labels):
    """Per image, (B,)."""
    return F.cross_entropy(logits, labels, reduction="none")


def input_gradient(loss, model, images, labels):
    """(logits (B, classes), loss (B,), gradient of sum_i loss_i like images), detached.

    The sum, not the mean: results then do not depend on the batch size.
    """
    images = images.detach().requires_grad_()
    with torch.enable_grad():
        logits = model(images)
        losses = loss(logits, labels)
        if not losses.requires_grad:
            raise InputError("the model's logits have no gradient, which this attack follows; "
                             "noise, square and spsa need none")
        grad, = torch.autograd.grad(losses.sum(), images)
    return logits.detach(), losses.detach(), grad


def project(adv, images, eps, clip=True):
    """Pi: into [images - eps, images + eps], then into [0, 1]."""
    adv = torch.minimum(torch.maximum(adv, images - eps), images + eps)
    return adv.clamp(0, 1) if clip else adv


def bounds(images, eps, clip=True):
    """The lowest and the highest pixels within the budget, both like images."""
    return project(images - eps, images, eps, clip), project(images + eps, images, eps, clip)


def column(t):
    """(B,) -> (B, 1, 1, 1)."""
    return t[:, None, None, None]


def numbers(images, index):
    """index, the images' numbers (B,) int64, where it is not given: 0, 1, ..."""
    if index is None:
        index = torch.arange(len(images))
    return index.to(images.device)


def per_image(images, eps):
    """eps with a row for each image: (B or more, ...) that broadcasts to images."""
    eps = torch.as_tensor(eps, dtype=images.dtype, device=images.device)
    return eps.expand(torch.broadcast_shapes(eps.shape, (len(images), 1, 1, 1)))


def select_rows(state, on):
    """A namespace of tensors, cut to the rows where on (B,) is True: images leave when done."""
    rows = on.nonzero()[:, 0]
    return SimpleNamespace(**{name: t[rows] for name, t in vars(state).items()})


def noise_like(images, index, *key):
    """Uniform numbers in [-1, 1), as images, from (key, image number index[i]) alone."""
    index = numbers(images, index)
    return (2 * uniform(index, images[0].numel(), *key) - 1).view_as(images)


def forward(model, images, batch_size=None):
    """model(images), at most batch_size images at a time."""
    if batch_size is None or len(images) <= batch_size:
        return model(images)
    return torch.cat([model(part) for part in images.split(batch_size)])


# --- what would be silently wrong -----------------------------------------------------------------

def positive(**options):
    """ValueError unless every option is > 0: 0 steps are no attack, and look like robustness."""
    for name, value in options.items():
        if not value > 0:
            raise ValueError(f"{name}={value}, expected more than 0")


def check_mode(model):
    """ValueError for a module in train mode."""
    if isinstance(model, torch.nn.Module) and any(m.training for m in model.modules()):
        raise ValueError("the model is in train mode: call model.eval() before attacking it")


def check_inputs(model, images, eps=0.0, clip=True):
    """ValueError for a module in train mode, and for pixels or budgets of another scale.

    clip=False allows images outside [0, 1], as normalised ones are, and any eps.
    """
    check_mode(model)
    low, high = images.detach().aminmax()
    if clip and not (0 <= low and high <= 1):             # a comparison with nan is False
        raise ValueError(f"images have values from {low:g} to {high:g}, expected 0 to 1")
    most = torch.as_tensor(eps).max()
    if clip and not 0 <= most <= 1:
        raise ValueError(f"eps is in pixel units, 8/255 say; got {most:g}: "
                         f"was it meant as {most:g}/255?")


def check_logits(logits):
    """ValueError for what gradients of the cross-entropy are useless on."""
    if not logits.isfinite().all():
        raise ValueError("the model returns logits that are not finite")
    if (logits >= 0).all() and ((logits.sum(1) - 1).abs() < 1e-4).all():
        raise ValueError("the model returns probabilities (rows sum to 1), "
                         "expected logits, from before the softmax")


@torch.no_grad()
def check(model, images, eps=0.0, clip=True, batch_size=None):
    """Both checks; returns the clean logits, (B, classes), from one forward pass."""
    check_inputs(model, images, eps, clip)
    logits = forward(model, images, batch_size)
    check_logits(logits)
    return logits


# --- L-infinity, with gradients ------------------------------------------------------------------

@torch.no_grad()
def fgsm(model, images, labels, eps, *, clip=True):
    """Fast gradient sign method: x + eps sign(grad CE), one step. sign(0) = 0.

    Goodfellow et al. 2015;
    `cleverhans-lab/cleverhans:cleverhans/torch/attacks/fast_gradient_method.py`.
    """
    check_inputs(model, images, eps, clip)
    logits, _, grad = input_gradient(cross_entropy, model, images, labels)
    check_logits(logits)
    return project(images + eps * grad.sign(), images, eps, clip)


@torch.no_grad()
def pgd(model, images, labels, eps, *, steps: int = 20, alpha: float = None, rel_step=0.15,
        random_start=True, restarts: int = 1, best=False, clip=True, seed=0, index=None):
    """Projected gradient descent: x <- Pi(x + alpha sign(grad CE)), `steps` times.

    alpha: the step in pixel units, 2/255 say, as in torchattacks; None: rel_step * eps.
    random_start: from x + U(-eps, eps); restarts: so often, each time from another point where the
    model is not fooled yet. Returns the last iterate; best: the first misclassified one, if there
    is one. Madry et al. 2018;
    `cleverhans-lab/cleverhans:cleverhans/torch/attacks/projected_gradient_descent.py`.
    """
    positive(steps=steps, rel_step=rel_step, alpha=1 if alpha is None else alpha)
    if restarts > 1 and not random_start:
        raise ValueError(f"restarts={restarts} without a random start are all the same, expected 1")
    check(model, images, eps, clip)
    index, eps = numbers(images, index), per_image(images, eps) if torch.is_tensor(eps) else eps

    def climb(on, key):
        x, y, budget = images[on], labels[on], eps[on] if torch.is_tensor(eps) else eps
        step = rel_step * budget if alpha is None else alpha
        adv = x
        if random_start:
            adv = project(x + budget * noise_like(x, index[on], *key), x, budget, clip)
        for _ in range(steps):
            logits, _, grad = input_gradient(cross_entropy, model, adv, y)
            moved = project(adv + step * grad.sign(), x, budget, clip)
            done = column(margin(logits, y) < 0) & best
            adv = torch.where(done, adv, moved)
        return adv

    adv = climb(slice(None), (seed, START))
    for restart in range(1, restarts):
        on = (model(adv).argmax(1) == labels).nonzero()[:, 0]
        if not len(on):
            return adv
        found = climb(on, (seed, START, restart))
        fooled = column(model(found).argmax(1) != labels[on])
        adv[on] = torch.where(fooled, found, adv[on])
    return adv


# --- without gradients ---------------------------------------------------------------------------

@torch.no_grad()
def noise(model, images, labels, scale=0.068, *, kind: Literal["uniform", "gaussian"] = "uniform",
          best_of: int = 1, draw=0, clip=True, seed=0, index=None):
    """x + U(-scale, scale) or, kind "gaussian", x + N(0, scale^2).

    scale: half width or standard deviation. best_of: per image the worst of so many draws. draw:
    another number, other noise.
    """
    if kind not in ("uniform", "gaussian"):
        raise ValueError(f"kind={kind!r}, expected 'uniform' or 'gaussian'")
    positive(best_of=best_of)
    check(model, images, scale, clip)
    worst, lowest = images, torch.full_like(images[:, 0, 0, 0], math.inf)
    for i in range(best_of):
        z = noise_like(images, index, seed, NOISE, draw * best_of + i)
        if kind == "gaussian":
            z = normal((z + 1) / 2)
        adv = images + scale * z
        adv = adv.clamp(0, 1) if clip else adv
        m = margin(model(adv), labels)
        worst = torch.where(column(m < lowest), adv, worst)
        lowest = torch.minimum(m, lowest)
    return worst
