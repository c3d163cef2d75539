"""AutoAttack and its members, L-infinity: APGD, APGD-T, FAB-T, Square (Croce & Hein 2020a).

    adv = autoattack(model, images, labels, 8 / 255)

attacks.py describes the arguments. An attack that fails returns the clean image. Finished images
leave the batch at fixed steps, so an image's result does not depend on the rest of its batch.
Source: `fra31/auto-attack`.
"""

from functools import partial
from types import SimpleNamespace

import torch

from common import InputError, at_least_float32, print0
from data.rng import APGD, SQUARE, uniform
from robust.attacks import (bounds, clean_logits, column, cross_entropy, input_gradient,
                            margin, noise_like, note_zero_gradient, per_image,
                            select_rows)


# --- APGD: gradient steps with momentum and a step size that adapts (Croce & Hein 2020a) ---------

def check_classes(classes, compared, name):
    """Raise InputError if `name`, a loss or an attack, compares more logits than the model has."""
    if classes < compared:
        raise InputError(f"the model has {classes} classes, but {name} compares "
                         f"{compared} logits; measure apgd and square instead")


def dlr(logits, labels):
    """Difference of logits ratio, (B,): -margin / (z_(1) - z_(3)); z_(i) is the i-th largest."""
    check_classes(logits.shape[1], 3, "the DLR loss")
    z = logits.topk(3).values
    return -margin(logits, labels) / (z[:, 0] - z[:, 2] + 1e-12)


def targeted_dlr(logits, labels, targets):
    """Targeted DLR, (B,): -(z_y - z_t) / (z_(1) - (z_(3) + z_(4)) / 2), for 4 classes or more."""
    z = logits.topk(4).values
    spread = z[:, 0] - (z[:, 2] + z[:, 3]) / 2
    return target_margin(logits, labels, targets) / (spread + 1e-12)


def target_margin(logits, labels, targets):
    """Return z_t - z_y, (B,)."""
    z_t, z_y = logits.gather(1, torch.stack([targets, labels], 1)).unbind(1)
    return z_t - z_y


def likely_targets(logits, labels, num_targets):
    """Return the likeliest wrong classes, best first: (B, min(num_targets, classes - 1)) int64."""
    others = logits.scatter(1, labels[:, None], -torch.inf)
    return others.topk(min(num_targets, logits.shape[1] - 1)).indices


@torch.no_grad()
def apgd(model, images, labels, eps, *, loss="ce", targets=None, steps=100,
         surrogates=(), seed=0, draw=0, index=None):
    """Maximise the cross-entropy ("ce"), the DLR loss ("dlr") or, with targets, the targeted DLR.

    targets: (B,) int64. surrogates: more models; where the model's own gradient fails, the attack
    follows the gradient of each surrogate in turn. draw: the number of the random start.
    Source: `autopgd_base.py`. Here a misclassified image leaves the batch at the next multiple of
    ten steps. Like the source, this attack returns the last misclassified iterate.
    """
    robust = clean_logits(model, images, eps).argmax(1) == labels
    eps, index = per_image(images, eps, index)
    low, high = bounds(images, eps)
    noise = noise_like(images, index, seed, APGD, draw)
    start = images + eps * noise / noise.abs().amax((1, 2, 3), keepdim=True)
    if targets is None:
        objective = dict(ce=cross_entropy, dlr=dlr)[loss]
        targets = labels        # not used; but each part of the state has a row per image
    else:
        objective = targeted_dlr

    all_images = SimpleNamespace(labels=labels, targets=targets, low=low, high=high,
                                 x=start.clamp(low, high), step=2 * eps, adv=images)
    adv = images.clone()
    for guide in (model, *surrogates):
        rows = robust.nonzero()[:, 0]
        if not len(rows):
            break
        robust_images = select_rows(all_images, robust)
        found, fooled = climb(model, guide, objective, robust_images, steps)
        adv[rows] = found
        robust[rows] = ~fooled
    return adv


def climb(model, guide, objective, s, steps):
    """Raise the model's loss along the gradient of the model `guide`.

    s: the state of the images, selected in `apgd`; this function changes s. Its fields from apgd:
        labels, targets   (B,) int64
        x, low, high      the iterate and its bounds, shaped as images
        step              the step size, (B, 1, 1, 1)
        adv               the last misclassified iterate, or the clean image, shaped as images
    The fields of this function, for the images that are still in s:
        row               (B,) int64, the image's row in the results
        fooled_now, fooled        (B,) bool: x fools the model; an iterate has fooled it
        loss, grad        of x: (B,), and shaped as images
        x_old             the iterate before x
        best_x, best_grad, best_loss      of the iterate with the highest loss
        loss_at_checkpoint        (B,): best_loss at the last checkpoint
        rises             (B,) int64, steps since the last checkpoint that raised the loss
        halved            (B,) bool: the step was halved at the last checkpoint
    Returns the last misclassified iterates, (B, 3, H, W), or the clean images where there is none,
    and which images fool the model, (B,) bool.
    """
    adv = s.adv.clone()
    fooled = torch.zeros_like(s.labels, dtype=torch.bool)
    s.row = torch.arange(len(adv), device=adv.device)   # row i of s belongs to adv[s.row[i]]
    evaluate_point(s, model, guide, objective)
    note_zero_gradient(s.grad)
    s.fooled = s.fooled_now
    s.x_old = s.x
    s.adv = torch.where(column(s.fooled), s.x, s.adv)
    s.best_x = s.x
    s.best_grad = s.grad
    s.best_loss = s.loss
    s.loss_at_checkpoint = s.loss
    s.rises = torch.zeros_like(s.labels)
    s.halved = torch.ones_like(s.fooled)            # so no_gain cannot be True at first
    window = max(int(0.22 * steps), 1)              # steps up to the next checkpoint
    shrink = max(int(0.03 * steps), 1)              # each window is this much shorter
    least = max(int(0.06 * steps), 1)
    checkpoint = window

    for i in range(steps):
        # Take a gradient step, then add momentum, a part of the last move.
        a = 0.75 if i else 1.0
        stepped = (s.x + s.step * s.grad.sign()).clamp(s.low, s.high)
        x = s.x + a * (stepped - s.x) + (1 - a) * (s.x - s.x_old)
        s.x_old = s.x
        s.x = x.clamp(s.low, s.high)

        # Evaluate the new point and keep the best one.
        last_loss = s.loss
        evaluate_point(s, model, guide, objective)
        s.adv = torch.where(column(s.fooled_now), s.x, s.adv)
        s.fooled = s.fooled | s.fooled_now
        s.rises = s.rises + (s.loss > last_loss)
        better = column(s.loss > s.best_loss)
        s.best_x = torch.where(better, s.x, s.best_x)
        s.best_grad = torch.where(better, s.grad, s.best_grad)
        s.best_loss = torch.maximum(s.loss, s.best_loss)

        # Halve step sizes at checkpoints, which become more frequent.
        if i + 1 == checkpoint:
            halve_steps(s, window)
            window = max(window - shrink, least)
            checkpoint += window
        if i % 10 == 9 or i == steps - 1:               # remove the fooled images
            adv[s.row] = s.adv
            fooled[s.row] = s.fooled
            s = select_rows(s, ~s.fooled)
            if not len(s.row):
                break
    return adv, fooled


def evaluate_point(s, model, guide, objective):
    """Set s.fooled_now, s.loss (of the model) and s.grad (of guide) at the point s.x."""
    if objective is targeted_dlr:                   # the targets of the images still in s
        objective = partial(targeted_dlr, targets=s.targets)
    logits, s.loss, s.grad = input_gradient(objective, guide, s.x, s.labels)
    if guide is not model:
        logits = at_least_float32(model(s.x))
        s.loss = objective(logits, s.labels)
    s.fooled_now = logits.argmax(1) != s.labels


def halve_steps(s, window):
    """In s, halve the step of each image without progress, and restart it from its best point."""
    few_rises = s.rises <= 0.75 * window                        # of the last `window` steps
    no_gain = ~s.halved & (s.loss_at_checkpoint >= s.best_loss)
    s.halved = few_rises | no_gain
    s.step = torch.where(column(s.halved), s.step / 2, s.step)
    s.x = torch.where(column(s.halved), s.best_x, s.x)
    s.grad = torch.where(column(s.halved), s.best_grad, s.grad)
    s.loss_at_checkpoint = s.best_loss
    s.rises = torch.zeros_like(s.rises)


@torch.no_grad()
def apgd_t(model, images, labels, eps, *, num_targets=9, steps=100, surrogates=(),
           seed=0, index=None):
    """Run APGD on the targeted DLR loss for each of the num_targets likeliest wrong classes."""
    logits = clean_logits(model, images, eps)
    check_classes(logits.shape[1], 4, "the targeted DLR loss of APGD-T")
    targets = likely_targets(logits, labels, num_targets)
    robust = logits.argmax(1) == labels
    eps, index = per_image(images, eps, index)
    adv = images.clone()
    for k in range(targets.shape[1]):
        rows = robust.nonzero()[:, 0]
        if not len(rows):
            break
        adv[rows] = apgd(model, images[rows], labels[rows], eps[rows],
                         targets=targets[rows, k], steps=steps, surrogates=surrogates,
                         seed=seed, draw=k, index=index[rows])
        robust[rows] = model(adv[rows]).argmax(1) == labels[rows]
    return adv


# --- FAB: the nearest point across the decision boundary (Croce & Hein 2020b) --------------------

def box_projection(v, w, b):
    """Return d, (B, n), with the smallest max|d| such that <w, v + d> = b, 0 <= v + d <= 1.

    v, w: (B, n), b: (B,). If no such d exists, d moves every coordinate to its bound.

    <w, v> must fall by c = <w, v> - b. If c < 0, flip the sign of w and of c. room_j is the
    distance of v_j from the bound at which w_j v_j is smallest. Move every coordinate by lam, or to
    this bound if room_j < lam. The moves lower <w, v> by D(lam) = sum_j |w_j| min(lam, room_j). D
    is concave and piecewise linear, so Newton's method from below finds the lam with D(lam) = c
    exactly, in 3 to 6 rounds. `fab_projections.py` sorts and bisects; it finds the same d, but is
    slower.
    """
    c = (w * v).sum(1, keepdim=True) - b[:, None]                           # (B, 1)
    w = torch.where(c < 0, -w, w)
    c = c.abs()
    room = torch.where(w > 0, v, 1 - v)
    weight = w.abs()
    tiny = torch.finfo(w.dtype).tiny
    lam = c / weight.sum(1, keepdim=True).clamp_min(tiny)
    growing = True
    while growing:
        at_bound = (room <= lam).to(w.dtype)
        used = (weight * room * at_bound).sum(1, keepdim=True)
        slope = (weight * (1 - at_bound)).sum(1, keepdim=True)              # of D at lam
        new_lam = torch.maximum(lam, (c - used) / slope.clamp_min(tiny))
        growing = (new_lam > lam).any()
        lam = new_lam
    return -w.sign() * torch.minimum(lam, room)


@torch.no_grad()
def fab_t(model, images, labels, eps, *, steps=100, num_targets=9, seed=0, index=None):
    """Find near adversarial images with FAB-T, for each of the likeliest wrong classes in turn.

    The search ends when an image within eps is found. Source: `fab_base.py`, without restarts.
    """
    logits = clean_logits(model, images, eps)
    eps, index = per_image(images, eps, index)
    targets = likely_targets(logits, labels, num_targets)
    s = SimpleNamespace(row=torch.arange(len(images), device=images.device),
                        x0=images, x=images, labels=labels, targets=targets, eps=eps,
                        adv=images, distance=torch.full_like(logits[:, 0], torch.inf))
    adv = images.clone()
    s = select_rows(s, logits.argmax(1) == labels)
    for k in range(s.targets.shape[1]):
        s.x = s.x0
        for i in range(steps):
            if not len(s.row):
                return adv
            fab_step(s, model, s.targets[:, k])
            if i % 10 == 9 or i == steps - 1:
                near = ((s.adv - s.x0).abs() <= s.eps).flatten(1).all(1)
                found = near & s.distance.isfinite()        # inf: s.adv is still the clean image
                adv[s.row[found]] = s.adv[found]
                s = select_rows(s, ~found)
    return adv


OVERSHOOT = 1.05            # a step is this much longer than the way to the boundary
MAX_WEIGHT = 0.1            # the largest weight of the point near the clean image


def fab_step(s, model, targets):
    """Step across the boundary to the target class (linearised at s.x), and stay near s.x0.

    Changes s.x, and s.adv and s.distance where the new point fools the model and is nearer.
    """
    loss = partial(target_margin, targets=targets)
    _, height, grad = input_gradient(loss, model, s.x, s.labels)
    x = s.x.flatten(1)
    w = grad.flatten(1)
    x0 = s.x0.flatten(1)
    b = (w * x).sum(1) - height                                 # the boundary: <w, x'> = b

    # Project x and the clean x0 onto the boundary. Take a point between the two projections.
    moves = box_projection(torch.cat([x, x0]), w.repeat(2, 1), b.repeat(2))
    lengths = moves.abs().amax(1).clamp_min(1e-8)
    move, move0 = moves.view(2, *x.shape)
    length, length0 = lengths.view(2, -1, 1)                    # (B, 1) each
    weight0 = (length / (length + length0)).clamp_max(MAX_WEIGHT)
    x = (1 - weight0) * (x + OVERSHOOT * move) + weight0 * (x0 + OVERSHOOT * move0)
    x = x.clamp(0, 1).view_as(s.x)

    # Keep the nearest point that fools the model. If the new point fools the model, go a tenth
    # of the way back to x0 and continue there; otherwise continue from the new point.
    fooled = model(x).argmax(1) != s.labels
    away = (x - s.x0).abs().amax((1, 2, 3))
    nearer = fooled & (away < s.distance)
    s.adv = torch.where(column(nearer), x, s.adv)
    s.distance = torch.where(nearer, away, s.distance)
    s.x = torch.where(column(fooled), s.x0 + 0.9 * (x - s.x0), x)


# --- Square: random search without gradients (Andriushchenko et al. 2020) ------------------------

BLOCK = 50      # queries: their random numbers are drawn in one call; then fooled images leave


@torch.no_grad()
def square(model, images, labels, eps, *, queries=5000, seed=0, index=None):
    """Set random squares to +-eps, a random sign per channel; keep squares that lower the margin.

    Source: `square.py`, where all images of a batch share the place and the signs of a square.
    """
    logits = clean_logits(model, images, eps)
    eps, index = per_image(images, eps, index)
    adv = images.clone()
    low, high = bounds(images, eps)
    _, C, H, W = images.shape
    stripes = uniform(index, C * W, seed, SQUARE, 0).view(-1, C, 1, W) < 0.5
    s = SimpleNamespace(row=torch.arange(len(images), device=images.device),
                        labels=labels, index=index, eps=eps, low=low, high=high,
                        best=torch.where(stripes, low, high))
    s = select_rows(s, logits.argmax(1) == labels)
    if not len(s.row):
        return adv
    s.margin = margin(at_least_float32(model(s.best)), s.labels)
    for first in range(0, queries, BLOCK):
        fooled = s.margin < 0
        adv[s.row[fooled]] = s.best[fooled]
        s = select_rows(s, ~fooled)                             # leave the finished images out
        if not len(s.row):
            return adv
        draws = uniform(s.index, BLOCK * (2 + C), seed, SQUARE, 1 + first // BLOCK)
        draws = draws.view(-1, BLOCK, 2 + C)                    # 2 for the place, C for the signs
        last = min(first + BLOCK, queries)
        for query, draw in zip(range(first, last), draws.unbind(1)):
            inside = random_square(draw[:, :2], query, H, W)
            # 2 eps is the distance from low to high, so the push reaches a bound from every value.
            push = torch.where(draw[:, 2:, None, None] < 0.5, -2, 2) * s.eps    # (B, C, 1, 1)
            candidate = torch.where(inside, s.best + push, s.best).clamp(s.low, s.high)
            new_margin = margin(at_least_float32(model(candidate)), s.labels)
            better = column(new_margin < s.margin)
            s.best = torch.where(better, candidate, s.best)
            s.margin = torch.minimum(new_margin, s.margin)
    fooled = s.margin < 0
    adv[s.row[fooled]] = s.best[fooled]
    return adv


HALVE_AFTER = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)      # queries


def random_square(place, query, H, W):
    """Return the mask of a square, (B, 1, H, W) bool, which shrinks as the queries grow.

    place: (B, 2) in [0, 1), the corner. The last row and column stay free, as in the source.
    """
    halvings = sum(query > limit for limit in HALVE_AFTER)
    share = 0.8 / 2 ** halvings                                             # of the area
    side = min(max(round((share * H * W) ** 0.5), 1), H, W)
    top = (place[:, 0] * (H - side)).long()
    left = (place[:, 1] * (W - side)).long()
    y = torch.arange(H, device=place.device) - top[:, None]                 # (B, H)
    x = torch.arange(W, device=place.device) - left[:, None]                # (B, W)
    rows = (y >= 0) & (y < side)
    columns = (x >= 0) & (x < side)
    return (rows[:, :, None] & columns[:, None, :])[:, None]


# --- the cascade ---------------------------------------------------------------------------------

@torch.no_grad()
def autoattack(model, images, labels, eps, *, steps=100, queries=5000, num_targets=9,
               surrogates=(), seed=0, index=None):
    """Run APGD-CE, APGD-T, FAB-T and Square, each on the images that are still robust.

    surrogates: for APGD-CE and APGD-T; none in the standard version. The model needs 4 classes or
    more. Prints how many images are still robust after each stage.
    """
    stages = {"APGD-CE": partial(apgd, steps=steps, surrogates=surrogates),
              "APGD-T": partial(apgd_t, steps=steps, surrogates=surrogates,
                                num_targets=num_targets),
              "FAB-T": partial(fab_t, steps=steps, num_targets=num_targets),
              "Square": partial(square, queries=queries)}
    logits = clean_logits(model, images, eps)
    check_classes(logits.shape[1], 4, "AutoAttack")     # now, not after the minutes of APGD-CE
    robust = logits.argmax(1) == labels
    eps, index = per_image(images, eps, index)
    adv = images.clone()
    counts = []
    for stage, attack in stages.items():
        rows = robust.nonzero()[:, 0]
        if len(rows):
            adv[rows] = attack(model, images[rows], labels[rows], eps[rows],
                               index=index[rows], seed=seed)
            robust[rows] = model(adv[rows]).argmax(1) == labels[rows]
        counts.append(f"{stage} {int(robust.sum())}")
    print0(f"AutoAttack, still robust of {len(images)}: {', '.join(counts)}")
    return adv
