"""Attacks that know RPC-Attention and look for the gradients it hides.

The soft threshold has slope 0 where it returns 0, so attacks along the model's own gradient may be
blind there without the model being robust (Athalye et al. 2018). An adaptive attack also follows
the gradients of the same model with another PAP that does not hide them. It finds PAP wherever the
model runs `rpc_attention`, in an attention of one's own, too.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F

from attention import every_pap, soft_threshold
from robust.attacks import check_mode, margin, numbers, per_image, pgd
from robust.autoattack import apgd, autoattack

# --- models to take gradients from ---------------------------------------------------------------

def pap_steps(model, images):
    """How many steps PAP takes where the model runs it; 0: it runs none. images: (B, 3, H, W)."""
    check_mode(model)
    steps, once = [], []
    with torch.no_grad():
        for found, settings in ((steps, {}), (once, dict(n_iter=1))):
            with every_pap(trace=found, **settings):
                model(images[:1])
    return len(steps) // max(len(once), 1)


def with_pap(model, **settings):
    """The model as a function, on the same weights, whose PAP has other settings."""
    def changed(images):
        with every_pap(**settings):
            return model(images)
    return changed


def straight_through(model, slope=1.0):
    """The model with the same values but gradient `slope` through the soft threshold.

    The true slope is 1 where S is not 0, else 0. slope=1: the identity everywhere; slope=0: S is a
    constant, so K - S passes on all of K's gradient, also where it is clamped.
    """
    def shrink(x, tau):
        return soft_threshold(x, tau).detach() + slope * (x - x.detach())

    return with_pap(model, shrink=shrink)


def smooth_shrink(x, tau):
    """soft_threshold with the gradient of a softplus, which is nowhere exactly 0."""
    width = (tau / 4).clamp(1e-12, 1e12)
    smooth = width * (F.softplus((x - tau) / width) - F.softplus((-x - tau) / width))
    return soft_threshold(x, tau).detach() + (smooth - smooth.detach())


def gradient_models(model, images):
    """Models whose gradients may lead where the model hides its own: `surrogates` for `apgd`.

    On the model's weights: two straight-through ones, one whose threshold is smooth, one that
    never shrinks, one that stops after half the steps. None for a model without RPC-Attention.
    images: one or more that it takes.
    """
    steps = pap_steps(model, images)
    if not steps:
        return []
    return [straight_through(model, 1.0),
            straight_through(model, 0.0),
            with_pap(model, shrink=smooth_shrink),
            with_pap(model, lambd=math.inf),
            with_pap(model, n_iter=max(steps // 2, 1))]


# --- attacks -------------------------------------------------------------------------------------

@torch.no_grad()
def adaptive_pgd(model, images, labels, eps, *, steps: int = 20, alpha: float = None,
                 rel_step=0.15, random_start=True, restarts: int = 1, clip=True, seed=0,
                 index=None):
    """PGD along the true gradient, then, where that fails, along both straight-through ones.

    Returns per image what fools the model or, where nothing does, leaves the smallest margin.
    A model without RPC-Attention gets plain PGD. Settings: of `pgd`.
    """
    how = dict(steps=steps, alpha=alpha, rel_step=rel_step, random_start=random_start,
               restarts=restarts, clip=clip, seed=seed)
    adv = pgd(model, images, labels, eps, index=index, **how)
    if not pap_steps(model, images):
        return adv
    eps, index = per_image(images, eps), numbers(images, index)
    left = margin(model(adv), labels)
    for slope in (1.0, 0.0):
        rows = (left >= 0).nonzero()[:, 0]
        if not len(rows):
            break
        tried = pgd(straight_through(model, slope), images[rows], labels[rows], eps[rows],
                    index=index[rows], **how)
        m = margin(model(tried), labels[rows])
        nearer = m < left[rows]
        adv[rows[nearer]] = tried[nearer]
        left[rows[nearer]] = m[nearer]
    return adv


def adaptive_apgd(model, images, labels, eps, *, loss: Literal["ce", "dlr"] = "ce",
                  steps: int = 100, clip=True, seed=0, index=None):
    """`apgd` along the model's own gradient and, where that fails, along `gradient_models`'."""
    return apgd(model, images, labels, eps, loss=loss, steps=steps, clip=clip, seed=seed,
                index=index, surrogates=gradient_models(model, images))


def adaptive_autoattack(model, images, labels, eps=1 / 255, *, steps: int = 100,
                        queries: int = 5000, num_targets: int = 9, batch_size=500, clip=True,
                        seed=0, index=None, trace=None, progress=False):
    """The worst case over all attacks known here: `autoattack` whose APGD is adaptive."""
    return autoattack(model, images, labels, eps, steps=steps, queries=queries,
                      num_targets=num_targets, surrogates=gradient_models(model, images),
                      batch_size=batch_size, clip=clip, seed=seed, index=index, trace=trace,
                      progress=progress)
