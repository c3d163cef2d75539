"""AutoAttack and its members: APGD, FAB, Square. The contract of every attack stands at the top of attacks.py.

AutoAttack (Croce & Hein 2020a, `fra31/auto-attack`), L-infinity, standard version, is APGD-CE, APGD-T, FAB-T and
Square, in this order, each on the images the ones before it left standing. Images the model misclassifies are not
attacked, and where one of these attacks fails it returns the clean image. Images that are done leave the batch at
fixed steps, so a result depends neither on the batch nor on what else is in it.
"""

from functools import partial
from types import SimpleNamespace

import torch
from tqdm import tqdm

from data.rng import uniform
from robust.attacks import (check, check_inputs, column, cross_entropy, forward, gradient_models,
                            input_gradient, margin, noise_like, positive, project)

APGD, SQUARE, FAB = 43, 44, 45          # what a random number is for: in its key

# --- rows that leave the batch ---------------------------------------------------------------------------------------

def per_image(images, eps, index):
    """eps and index with one row per image, so that rows can be taken: (B or more, ...) like images, (B,) int64."""
    eps = torch.as_tensor(eps, dtype=images.dtype, device=images.device)
    index = torch.arange(len(images)) if index is None else index
    return eps.expand(torch.broadcast_shapes(eps.shape, (len(images), 1, 1, 1))), index.to(images.device)


def take(state, on):
    """A namespace of tensors, cut to the rows where on (B,) is True."""
    rows = on.nonzero()[:, 0]
    return SimpleNamespace(**{name: t[rows] for name, t in vars(state).items()})


def largest(t):
    """max|t| per image, (B,)."""
    return t.abs().flatten(1).amax(1)


# --- APGD: projected gradient steps with momentum and a step size that adapts (Croce & Hein 2020a, Algorithm 1) ------

def dlr(logits, labels):
    """Difference of logits ratio, (B,): -(z_y - max_{j != y} z_j) / (z_(1) - z_(3)), z_(i) the i-th largest logit.

    Neither a shift nor a positive factor on the logits changes it. Raises ValueError for fewer than 3 classes.
    """
    if logits.shape[1] < 3:
        raise ValueError(f"{logits.shape[1]} classes, but the DLR loss compares three logits: expected 3 or more")
    z = logits.topk(3).values
    return -margin(logits, labels) / (z[:, 0] - z[:, 2] + 1e-12)


def targeted_dlr(logits, labels, targets):
    """-(z_y - z_t) / (z_(1) - (z_(3) + z_(4)) / 2), (B,). Raises ValueError for fewer than 4 classes."""
    if logits.shape[1] < 4:
        raise ValueError(f"{logits.shape[1]} classes, but the targeted DLR loss (APGD-T, AutoAttack) compares four "
                         "logits: expected 4 or more")
    z = logits.topk(4).values
    return lead(logits, labels, targets) / (z[:, 0] - (z[:, 2] + z[:, 3]) / 2 + 1e-12)


def lead(logits, labels, targets):
    """z_t - z_y, (B,)."""
    z_t, z_y = logits.gather(1, torch.stack([targets, labels], 1)).unbind(1)
    return z_t - z_y


def likely_targets(logits, labels, num_targets):
    """The most likely classes but the label, best first: (B, min(num_targets, classes - 1)) int64."""
    others = logits.scatter(1, labels[:, None], -torch.inf)
    return others.topk(min(num_targets, logits.shape[1] - 1)).indices


@torch.no_grad()
def apgd(model, images, labels, eps, *, loss="ce", targets=None, steps=100, surrogates=(), clip=True, seed=0,
         restart=0, index=None):
    """Maximise the cross-entropy ("ce") or the DLR loss ("dlr"), or with targets (B,) int64 the targeted DLR loss.

    surrogates: models whose gradients are followed where the model's own has failed, one after the other.
    restart: number of the random start. Source: `fra31/auto-attack:autoattack/autopgd_base.py`. There an image is
    climbed to the end and its last misclassified iterate returned; here it leaves at the next multiple of ten steps.
    """
    losses = {"ce": cross_entropy, "dlr": dlr}
    if loss not in losses:
        raise ValueError(f'loss="{loss}", expected "ce" or "dlr"')
    positive(steps=steps)
    robust = check(model, images, labels, eps, clip).argmax(1) == labels
    (eps, index), adv = per_image(images, eps, index), images.clone()
    low, high = (project(images + side * eps, images, eps, clip) for side in (-1, 1))
    t = noise_like(images, index, seed, APGD, restart)
    x = (images + eps * t / column(largest(t))).clamp(low, high)
    start = SimpleNamespace(row=torch.arange(len(images), device=images.device), labels=labels, low=low, high=high,
                            x=x, step=2 * eps, targets=labels if targets is None else targets, adv=images)
    objective = losses[loss] if targets is None else targeted_dlr
    for source in (model, *surrogates):
        if robust.any():
            climb(model, source, objective, take(start, robust), steps, adv, robust)
    return adv


def climb(model, source, objective, s, steps, adv, robust):
    """Climb the model's loss along the gradient of `source`, from the rows s of `apgd`'s start.

    Writes what fools the model to adv, (B, 3, H, W), and False to robust, (B,), there.
    """
    def look(x):
        """The model's logits and losses at x, the gradient of source."""
        how = partial(objective, targets=s.targets) if objective is targeted_dlr else objective
        logits, loss, grad = input_gradient(how, source, x, s.labels)
        if source is not model:
            logits = model(x)
            loss = how(logits, s.labels)
        return logits, loss, grad

    logits, s.loss, s.grad = look(s.x)
    s.fooled, s.x_old = logits.argmax(1) != s.labels, s.x
    s.rises, s.halved = torch.zeros_like(s.labels), torch.ones_like(s.fooled)
    s.adv = torch.where(column(s.fooled), s.x, s.adv)
    s.best_x, s.best_grad, s.best_loss, s.checked_loss = s.x, s.grad, s.loss, s.loss
    window, shrink, least = (max(int(share * steps), 1) for share in (0.22, 0.03, 0.06))
    checkpoint = window

    for i in range(steps):
        a = 0.75 if i else 1.0
        u = (s.x + s.step * s.grad.sign()).clamp(s.low, s.high)                          # gradient step
        x = (s.x + a * (u - s.x) + (1 - a) * (s.x - s.x_old)).clamp(s.low, s.high)       # with momentum
        s.x_old, s.x, last_loss = s.x, x, s.loss
        logits, s.loss, s.grad = look(s.x)
        fooled, better = logits.argmax(1) != s.labels, s.loss > s.best_loss
        s.adv, s.fooled = torch.where(column(fooled), s.x, s.adv), s.fooled | fooled
        s.best_x = torch.where(column(better), s.x, s.best_x)
        s.best_grad = torch.where(column(better), s.grad, s.best_grad)
        s.best_loss = torch.maximum(s.loss, s.best_loss)
        s.rises = s.rises + (s.loss > last_loss)
        if i + 1 == checkpoint:                                  # stagnation: half the step, from the best point
            s.halved = (s.rises <= 0.75 * window) | (~s.halved & (s.checked_loss >= s.best_loss))
            s.step = torch.where(column(s.halved), s.step / 2, s.step)
            s.x = torch.where(column(s.halved), s.best_x, s.x)
            s.grad = torch.where(column(s.halved), s.best_grad, s.grad)
            s.checked_loss, s.rises = s.best_loss, torch.zeros_like(s.rises)
            window = max(window - shrink, least)
            checkpoint += window
        if i % 10 == 9 or i == steps - 1:
            adv[s.row], robust[s.row] = s.adv, ~s.fooled
            s = take(s, ~s.fooled)
            if not len(s.row):
                break


def adaptive_apgd(model, images, labels, eps, **options):
    """`apgd` along the model's own gradient and, where that fails, along those of `gradient_models`."""
    return apgd(model, images, labels, eps, surrogates=gradient_models(model), **options)


@torch.no_grad()
def apgd_t(model, images, labels, eps, *, num_targets=9, steps=100, surrogates=(), clip=True, seed=0, index=None):
    """APGD on the targeted DLR loss, one run for each of the num_targets most likely wrong classes, best first.

    surrogates: as for `apgd`, within each run.
    """
    positive(num_targets=num_targets)
    logits = check(model, images, labels, eps, clip)
    targets, robust = likely_targets(logits, labels, num_targets), logits.argmax(1) == labels
    (eps, index), adv = per_image(images, eps, index), images.clone()
    for k in range(targets.shape[1]):
        on = robust.nonzero()[:, 0]
        if not len(on):
            break
        adv[on] = apgd(model, images[on], labels[on], eps[on], targets=targets[on, k], steps=steps,
                       surrogates=surrogates, clip=clip, seed=seed, restart=k, index=index[on])
        robust[on] = model(adv[on]).argmax(1) == labels[on]
    return adv


# --- FAB: the nearest point across the decision boundary (Croce & Hein 2020b) ----------------------------------------

def box_projection(v, w, b, low=0.0, high=1.0):
    """The move d, (B, n), of smallest max|d| with <w, v + d> = b and low <= v + d <= high; v, w: (B, n), b: (B,).

    Where no such d exists, all the room there is. Moving every coordinate by lam or to its bound lowers <w, v> by
    D(lam) = sum_j |w_j| min(lam, room_j), concave and piecewise linear: Newton's method from below reaches D(lam) = c
    exactly, in 3 to 6 rounds. (`fra31/auto-attack:autoattack/fab_projections.py` sorts and bisects: same d, slower.)
    """
    c = (w * v).sum(1, keepdim=True) - b[:, None]                                        # (B, 1)
    w, c = w * (1 - 2 * (c < 0).to(w.dtype)), c.abs()
    room = torch.where(w > 0, v - low, high - v)
    slopes, tiny = w.abs(), torch.finfo(w.dtype).tiny
    ends, mask = slopes * room, torch.empty_like(w)
    lam = c / slopes.sum(1, keepdim=True).clamp_min(tiny)
    while True:                                  # which coordinates reach their bound decides lam, and they only grow
        used = (ends * torch.le(room, lam, out=mask)).sum(1, keepdim=True)
        slope = (slopes * torch.gt(room, lam, out=mask)).sum(1, keepdim=True)
        larger = torch.maximum(lam, (c - used) / slope.clamp_min(tiny))
        if not (larger > lam).any():
            return -w.sign() * torch.minimum(lam, room)
        lam = larger


def within(adv, images, eps):
    """Whether every pixel moved by at most eps, (B,) bool."""
    return ((adv - images).abs() <= eps).flatten(1).all(1)


@torch.no_grad()
def fab_distance(model, images, labels, *, enough=0.0, steps=100, num_targets=9, restarts=1, clip=True, seed=0,
                 index=None):
    """The nearest adversarial images FAB-T finds. Returns (adv like images, L-infinity distance (B,)).

    The distance is inf where none was found or the model was wrong before; adv is the clean image there.
    enough: leave an image alone once all its pixels moved by at most this; a number or a tensor like eps. restarts > 1
    begin at random points nearby. Source: `fra31/auto-attack:autoattack/fab_base.py`.
    """
    positive(steps=steps, num_targets=num_targets, restarts=restarts)
    logits = check(model, images, labels, enough, clip)
    enough, index = per_image(images, enough, index)
    low, high = (0.0, 1.0) if clip else (-1e3, 1e3)                                      # far away: as good as no box
    s = SimpleNamespace(row=torch.arange(len(images), device=images.device), x0=images, labels=labels, index=index,
                        targets=likely_targets(logits, labels, num_targets), enough=enough, adv=images,
                        distance=torch.full_like(logits[:, 0], torch.inf))
    adv, distance = images.clone(), s.distance.clone()
    s = take(s, logits.argmax(1) == labels)
    for run in range(s.targets.shape[1] * restarts):
        if not len(s.row):
            break
        k, restart = divmod(run, restarts)
        s.x = s.x0
        if restart:
            t = noise_like(s.x0, s.index, seed, FAB, run)
            reach = torch.minimum(column(s.distance), torch.where(s.enough > 0, s.enough, 1))
            s.x = (s.x0 + 0.5 * reach * t / column(largest(t))).clamp(low, high)
        for i in range(steps):
            if not len(s.row):
                return adv, distance
            _, h, w = input_gradient(partial(lead, targets=s.targets[:, k]), model, s.x, s.labels)
            x, w, x0 = s.x.flatten(1), w.flatten(1), s.x0.flatten(1)
            b = (w * x).sum(1) - h                                                       # where h is 0, linearised
            d = box_projection(torch.cat([x, x0]), w.repeat(2, 1), b.repeat(2), low, high)
            a, a0 = largest(d).clamp_min(1e-8).view(2, -1, 1)                            # from x and from the clean x0
            (d, d0), alpha = d.view(2, *x.shape), (a / (a + a0)).clamp_max(0.1)
            x = ((1 - alpha) * (x + 1.05 * d) + alpha * (x0 + 1.05 * d0)).clamp(low, high).view_as(s.x)
            fooled, away = model(x).argmax(1) != s.labels, largest(x - s.x0)
            nearer = fooled & (away < s.distance)
            s.adv, s.distance = torch.where(column(nearer), x, s.adv), torch.where(nearer, away, s.distance)
            s.x = torch.where(column(fooled), s.x0 + 0.9 * (x - s.x0), x)                # back towards the clean image
            if i % 10 == 9 or i == steps - 1:
                adv[s.row], distance[s.row] = s.adv, s.distance
                s = take(s, ~within(s.adv, s.x0, s.enough) | s.distance.isinf())
    return adv, distance


@torch.no_grad()
def fab_t(model, images, labels, eps, *, steps=100, num_targets=9, restarts=1, clip=True, seed=0, index=None):
    """FAB-T: the nearest adversarial images found by `fab_distance`, where they lie within eps."""
    adv, _ = fab_distance(model, images, labels, enough=eps, steps=steps, num_targets=num_targets, restarts=restarts,
                          clip=clip, seed=seed, index=index)
    return torch.where(column(within(adv, images, eps)), adv, images)


# --- Square: random search without gradients (Andriushchenko et al. 2020) --------------------------------------------

@torch.no_grad()
def square(model, images, labels, eps, *, queries=5000, batch_size=None, clip=True, seed=0, index=None):
    """Set random squares to +-eps, a random sign per channel, and keep what lowers the margin. Forward passes only.

    Source: `fra31/auto-attack:autoattack/square.py`, where all images of a batch share place and signs; here each image
    has its own. A square covers a share p of the image that falls with the number of queries; it never touches the last
    row and column, as there. Images leave the batch at multiples of fifty queries. batch_size: images per forward
    pass (default: all): with the whole set as `images`, passes stay full as images leave.
    """
    positive(queries=queries, batch_size=batch_size or 1)
    logits = check(model, images, labels, eps, clip, batch_size=batch_size)
    (eps, index), adv = per_image(images, eps, index), images.clone()
    (_, C, H, W), every = images.shape, 50
    low, high = (project(images + side * eps, images, eps, clip) for side in (-1, 1))
    stripes = uniform(index, C * W, seed, SQUARE, 0).view(-1, C, 1, W) < 0.5
    s = SimpleNamespace(row=torch.arange(len(images), device=images.device), labels=labels, index=index, eps=eps,
                        low=low, high=high, best=torch.where(stripes, low, high))
    s = take(s, logits.argmax(1) == labels)
    if not len(s.row):
        return adv
    s.margin = margin(forward(model, s.best, batch_size), s.labels)
    y, x = torch.arange(H, device=images.device), torch.arange(W, device=images.device)
    for query in range(queries):
        if query % every == 0:
            s = leave(s, adv)
            if not len(s.row):
                return adv
            draws = uniform(s.index, every * (2 + C), seed, SQUARE, 1 + query // every).view(-1, every, 2 + C)
        p = 0.8 / 2 ** sum(query > q for q in (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000))
        side = min(max(round((p * H * W) ** 0.5), 1), H, W)
        draw = draws[:, query % every]
        dy, dx = y - (draw[:, :1] * (H - side)).long(), x - (draw[:, 1:2] * (W - side)).long()         # (B, H), (B, W)
        inside = ((dy >= 0) & (dy < side))[:, None, :, None] & ((dx >= 0) & (dx < side))[:, None, None]
        push = torch.where(draw[:, 2:, None, None] < 0.5, -2, 2) * s.eps                                # (B, C, 1, 1)
        candidate = torch.addcmul(s.best, push, inside.to(push.dtype)).clamp(s.low, s.high)
        m = margin(forward(model, candidate, batch_size), s.labels)
        s.best = torch.lerp(s.best, candidate, column(m < s.margin).to(push.dtype))      # exact at weights 0 and 1
        s.margin = torch.minimum(m, s.margin)
    leave(s, adv)
    return adv


def leave(s, adv):
    """Write the images square has fooled to adv and return the rest."""
    fooled = s.margin < 0
    adv[s.row[fooled]] = s.best[fooled]
    return take(s, ~fooled)


# --- the cascade -----------------------------------------------------------------------------------------------------

@torch.no_grad()
def autoattack(model, images, labels, eps, *, steps=100, queries=5000, num_targets=9, surrogates=(), batch_size=500,
               clip=True, seed=0, index=None, trace=None, progress=False):
    """AutoAttack, standard version: APGD-CE, APGD-T, FAB-T, Square, each on the images that are still robust.

    images: the whole set, so that each stage fills its batches of batch_size. An attack has succeeded where a separate
    forward pass misclassifies its result. trace: a list that receives dict(stage, robust (B,) bool) for "clean" and
    after every stage. progress: show a bar per stage. surrogates: for APGD-CE and APGD-T, as for `apgd`; the standard
    version has none. Raises ValueError for fewer than 4 classes.
    """
    positive(batch_size=batch_size)
    shared = dict(clip=clip, seed=seed)
    stages = {"apgd-ce": partial(apgd, steps=steps, surrogates=surrogates, **shared),
              "apgd-t": partial(apgd_t, steps=steps, surrogates=surrogates, num_targets=num_targets, **shared),
              "fab-t": partial(fab_t, steps=steps, num_targets=num_targets, **shared),
              "square": partial(square, queries=queries, **shared)}
    logits = check(model, images, labels, eps, clip, batch_size=batch_size)
    (budget, index), adv, trace = per_image(images, eps, index), images.clone(), [] if trace is None else trace
    targeted_dlr(logits[:1], labels[:1], labels[:1])                                     # raises if it cannot be used
    robust = logits.argmax(1) == labels
    trace.append(dict(stage="clean", robust=robust.clone()))
    for stage, attack in stages.items():
        rows = robust.nonzero()[:, 0]
        with tqdm(total=len(rows), desc=stage, unit="image", disable=not progress) as bar:
            for on in rows.split(batch_size) if len(rows) else ():
                found = attack(model, images[on], labels[on], budget[on], index=index[on])
                robust[on] = model(found).argmax(1) == labels[on]
                adv[on] = torch.where(column(robust[on]), images[on], found)
                bar.update(len(on))
        trace.append(dict(stage=stage, robust=robust.clone()))
    return adv


def adaptive_autoattack(model, images, labels, eps, **options):
    """The worst case over all attacks known here: `autoattack` whose APGD also follows `gradient_models`."""
    return autoattack(model, images, labels, eps, surrogates=gradient_models(model), **options)


@torch.no_grad()
def masking_signs(model, images, labels, trace=()):
    """Signs that gradients are hidden rather than absent, so that robust accuracy says little. A dict; falsy is good.

      randomised        the outputs of five calls differ by more than 1e-4
      probabilities     the outputs look like probabilities; attacks expect logits
      few_classes       fewer than 4: AutoAttack cannot run
      zero_gradients    number of images at which the gradient of the cross-entropy is exactly zero
      square_gain       points of accuracy Square took after the attacks with gradients, if more than 0.2 (from `trace`)
    After `fra31/auto-attack:autoattack/checks.py`.
    """
    check_inputs(model, images, labels)
    calls = torch.stack([model(images) for _ in range(5)])
    grad = input_gradient(cross_entropy, model, images, labels)[2]
    left = {entry["stage"]: 100 * entry["robust"].float().mean().item() for entry in trace}
    gain = left.get("fab-t", 0) - left.get("square", 0) if "square" in left else 0
    return dict(randomised=bool((calls - calls[0]).abs().max() > 1e-4),
                probabilities=bool((calls >= 0).all() and ((calls.sum(2) - 1).abs() < 1e-5).all()),
                few_classes=calls.shape[2] < 4, zero_gradients=int((largest(grad) == 0).sum()),
                square_gain=round(gain, 2) if gain > 0.2 else 0)
