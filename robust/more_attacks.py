"""Attacks besides FGSM, PGD and noise: SPSA, sparse L1 descent, Carlini and Wagner's L2 attack.

What every attack takes and returns stands at the top of attacks.py.
"""

import math
from types import SimpleNamespace
from typing import Literal

import torch

from attention import soft_threshold
from data.rng import SIGNS, uniform
from robust.attacks import (START, bounds, check, check_inputs, column, cross_entropy,
                            input_gradient, margin, noise_like, numbers, positive, select_rows)



def adam(grad, m, v, t, lr):
    """Step t = 1, 2, ... of Adam (Kingma & Ba 2015, its defaults), to be subtracted.

    m, v: the moments, updated in place.
    """
    m.lerp_(grad, 0.1)                                          # m = 0.9 m + 0.1 g
    v.mul_(0.999).addcmul_(grad, grad, value=0.001)             # v = 0.999 v + 0.001 g^2
    return lr / (1 - 0.9 ** t) * m / (v / (1 - 0.999 ** t)).sqrt_().add_(1e-8)


# --- SPSA: L-infinity, without gradients ---------------------------------------------------------

def spsa_gradient(model, centre, labels, index, pairs, *key):
    """Estimated gradient of the margin m at centre c, like centre.

    mean_r (m(c + delta v_r) - m(c - delta v_r)) / (2 delta) v_r, with v_r, r = 1 ... pairs, random
    signs, one per entry; 16 of them are the bits of one random number. delta is 0.01.
    """
    delta = 0.01
    grad = torch.zeros_like(centre).flatten(1)                              # (b, D)
    for word in range(math.ceil(pairs / 16)):
        r = min(16, pairs - 16 * word)
        shifts = torch.arange(r, device=centre.device, dtype=torch.int32)[:, None]
        bits = (uniform(index, grad.shape[1], *key, word) * 2 ** 24).int()
        bits = (bits[:, None] >> shifts) & 1                                # (b, r, D)
        v = 2 * bits.to(centre.dtype) - 1
        step = delta * v.unflatten(2, centre.shape[1:])                     # (b, r, 3, H, W)
        probes = torch.stack([centre[:, None] + step, centre[:, None] - step], 1)
        m = margin(model(probes.flatten(0, 2)), labels.repeat_interleave(2 * r)).view(-1, 2, r)
        grad += (((m[:, :1] - m[:, 1:]) / (2 * delta)) @ v)[:, 0]           # (b, 1, r) @ (b, r, D)
    return grad.view_as(centre) / pairs


@torch.no_grad()
def spsa(model, images, labels, eps=6 / 255, *, steps: int = 40, pairs: int = 128,
         centre: Literal["iterate", "legacy"] = "iterate", clip=True, seed=0, index=None):
    """Gradient-free: Adam, lr 0.01, on the margin, whose gradient is estimated from points nearby.

    From x + U(-eps, eps). centre "legacy": probes around 2x in every step, as cleverhans 4.0.0.
    Up to 2 pairs steps = 10,240 forward passes per image, so an image leaves as soon as its
    iterate is misclassified, and that one is returned; wrong ones are not attacked.
    Uesato et al. 2018; `cleverhans-lab/cleverhans:cleverhans/torch/attacks/spsa.py`.
    """
    if centre not in ("iterate", "legacy"):
        raise ValueError(f"centre={centre!r}, expected 'iterate' or 'legacy'")
    positive(steps=steps, pairs=pairs)
    fooled = margin(check(model, images, eps, clip), labels) < 0
    index = numbers(images, index)
    low, high = bounds(images, eps, clip)
    x = (images + eps * noise_like(images, index, seed, START)).clamp(low, high)
    s = SimpleNamespace(row=torch.arange(len(x), device=x.device), labels=labels, index=index,
                        x=x, low=low, high=high, m=torch.zeros_like(x), v=torch.zeros_like(x))

    # so many images at a time that their probes, 32 each, fit the cache (the GPU's memory)
    values = 3 * 2 ** 17 if x.device.type == "cpu" else 2 ** 26
    size = max(1, values // x[0].numel() // 32)
    adv = images.clone()
    for t in range(1, steps + 1):
        s = select_rows(s, ~fooled)
        if not len(s.row):
            break
        around = s.x if centre == "iterate" else 2 * images[s.row]
        parts = zip(around.split(size), s.labels.split(size), s.index.split(size))
        grad = torch.cat([spsa_gradient(model, *p, pairs, seed, SIGNS, t) for p in parts])
        s.x = (s.x - adam(grad, s.m, s.v, t, 0.01)).clamp(s.low, s.high)
        adv[s.row] = s.x
        fooled = margin(model(s.x), s.labels) < 0
    return adv


# --- L1 and L2 -----------------------------------------------------------------------------------

def project_l1(v, radius):
    """Nearest point with ||v||_1 <= radius, row by row (Duchi et al. 2008).

    v: (B, ...); radius: a number or (B,).
    """
    radius = torch.as_tensor(radius, dtype=v.dtype, device=v.device).view(-1, 1)
    u = v.flatten(1).abs().sort(1, descending=True).values
    excess = u.cumsum(1) - radius                                           # of the j largest
    j = torch.arange(1, u.shape[1] + 1, device=v.device)
    rho = (j * u > excess).sum(1, keepdim=True).clamp(min=1)           # last u_j > excess_j / j
    theta = (excess.gather(1, rho - 1) / rho).clamp(min=0)                  # 0: inside already
    return soft_threshold(v, theta.view(-1, *[1] * (v.ndim - 1)))


@torch.no_grad()
def sld(model, images, labels, l1=10.0, *, steps: int = 20, rescale=False, clip=True):
    """Sparse L1 descent: a step spends l1 / 10 equally on the largest 1 % of grad CE's entries.

    l1: bound of ||x_adv - x||_1, summed over all pixels and channels; at 224 px, 10 is 1/15000
    per entry: try 10, 50, 100. rescale: shrink to the L1 ball as cleverhans does instead of
    projecting.
    Tramer & Boneh 2019;
    `cleverhans-lab/cleverhans:cleverhans/torch/attacks/sparse_l1_descent.py`.
    """
    positive(steps=steps)
    check(model, images, clip=clip)
    k = max(int(0.99 * images[0].numel()), 1)
    l1 = torch.as_tensor(l1, dtype=images.dtype, device=images.device).view(-1, 1)
    adv = images
    for _ in range(steps):
        _, _, grad = input_gradient(cross_entropy, model, adv, labels)
        grad = grad.flatten(1)
        mask = grad.abs() >= grad.abs().kthvalue(k, keepdim=True).values
        v = (adv - images).flatten(1) + l1 / 10 * grad.sign() * mask / mask.sum(1, keepdim=True)
        if rescale:
            v = v * (l1 / v.abs().sum(1, keepdim=True).clamp(min=1e-12)).clamp(max=1)
        else:
            v = project_l1(v, l1)
        adv = images + v.view_as(images)
        adv = adv.clamp(0, 1) if clip else adv
    return images + soft_threshold(adv - images, 2.0 ** -22)   # rounding: not over the budget


def cw_round(model, images, labels, c, confidence, steps, lr):
    """Adam on ||x' - x||^2 + c max(margin + confidence, 0), x' = (tanh(w) + 1) / 2. c: (B,).

    Starts at x' = x. Returns the nearest successful iterates and their squared distances (B,), inf
    where there is none. An image leaves when its loss fell by less than 2 % within a tenth of the
    steps (the authors: the whole batch at 0.01 %): distances grow by 1 %, time is a third.
    """
    far = torch.full_like(c, math.inf)
    found, distance = images.clone(), far.clone()
    w = torch.atanh(0.999999 * (2 * images - 1))
    s = SimpleNamespace(row=torch.arange(len(w), device=w.device), x=images, labels=labels, c=c,
                        w=w, m=torch.zeros_like(w), v=torch.zeros_like(w),
                        near=images, distance=far, last_loss=far)

    def weighted_hinge(logits, labels):
        return s.c * (margin(logits, labels) + confidence).clamp(min=0)

    for t in range(1, steps + 1):
        adv = (s.w.tanh() + 1) / 2
        logits, hinge, grad = input_gradient(weighted_hinge, model, adv, s.labels)
        l2 = (adv - s.x).square().flatten(1).sum(1)
        better = (margin(logits, s.labels) + confidence < 0) & (l2 < s.distance)
        s.near = torch.where(column(better), adv, s.near)
        s.distance = torch.where(better, l2, s.distance)
        grad = (grad + 2 * (adv - s.x)) * 2 * adv * (1 - adv)               # dx'/dw = 2 x' (1 - x')
        s.w = s.w - adam(grad, s.m, s.v, t, lr)
        if t % max(steps // 10, 1) == 0 or t == steps:
            found[s.row], distance[s.row] = s.near, s.distance
            falling = hinge + l2 <= 0.98 * s.last_loss
            s.last_loss = hinge + l2
            s = select_rows(s, falling)
            if not len(s.row):
                break
    return found, distance


@torch.no_grad()
def cw(model, images, labels, *, confidence=0.0, steps: int = 1000, lr=5e-3,
       search_steps: int = 5, c0=1e-2, clip=True):
    """Carlini & Wagner's L2 attack: the nearest images with a margin below -confidence.

    No budget: report distances. c, the weight of fooling the model, is searched per image from c0:
    ten times larger until a round succeeds, then halving the interval. Every round starts afresh.
    The result is in [0, 1] always; clip=False only accepts images that are not and clamps them
    first, as cleverhans does to normalised ones. Images never fooled stay as they are.
    Carlini & Wagner 2017, `carlini/nn_robust_attacks:l2_attack.py`.
    """
    positive(steps=steps, lr=lr, search_steps=search_steps, c0=c0)
    check_inputs(model, images, clip=clip)
    adv = images.clone() if clip else images.clamp(0, 1)
    left = margin(check(model, adv), labels) + confidence
    rows = (left >= 0).nonzero()[:, 0]                             # the others are there already
    if not len(rows):
        return adv

    images, labels, left = adv[rows], labels[rows], left[rows]
    distance = torch.full_like(left, math.inf)
    lower, upper = torch.zeros_like(left), torch.full_like(left, 1e10)
    c = torch.full_like(left, c0)
    for _ in range(search_steps):
        found, d = cw_round(model, images, labels, c, confidence, steps, lr)
        nearer, success = d < distance, d < math.inf
        adv[rows[nearer]] = found[nearer]
        distance = torch.minimum(d, distance)
        upper = torch.where(success, c, upper)
        lower = torch.where(success, lower, c)
        c = torch.where(upper < 1e9, (lower + upper) / 2, 10 * c)
    return adv
