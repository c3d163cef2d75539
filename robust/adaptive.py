"""Adaptive attacks: they also follow gradients that RPC-Attention hides.

    adv = adaptive_pgd(model, images, labels, 8 / 255)

The soft threshold of PAP has slope 0 where it returns 0. There an attack along the model's own
gradient can fail although the model is not robust (Athalye et al. 2018). An adaptive attack also
follows gradients of the same weights with a changed PAP that does not hide them. The change reaches
your own attention if it passes `**layer.pap` to `rpc_attention`. For a model without PAP, adaptive
attacks are the plain attacks.
"""

import math

import torch
import torch.nn.functional as F

from attention import every_pap, soft_threshold
from common import wide
from robust.attacks import margin, per_image, pgd
from robust.autoattack import apgd, autoattack


def pap_steps(model, images):
    """Return the number of PAP steps per layer, or 0 if the model runs no PAP."""
    # A run with n_iter=1 counts the layers. The run without it counts the steps of all layers.
    steps, once = [], []
    with torch.no_grad():
        for found, settings in ((steps, {}), (once, dict(n_iter=1))):
            with every_pap(model, trace=found, **settings):
                model(images[:1])
    return len(steps) // max(len(once), 1)


def with_pap(model, **settings):
    """Return a function of images: the model with the same weights and other settings of PAP."""
    def changed(images):
        with every_pap(model, **settings):
            return model(images)
    return changed


def straight_through(model, slope):
    """Return the model with the same outputs, whose soft threshold has gradient `slope` everywhere.

    The true slope is 1 where S is not 0, else 0. With slope=0, S counts as a constant, so K - S
    passes the full gradient to K.
    """
    def shrink(x, tau):
        return soft_threshold(x, tau).detach() + slope * (x - x.detach())
    return with_pap(model, shrink=shrink)


def smooth_shrink(x, tau):
    """Compute soft_threshold with the gradient of a softplus, which is never exactly 0."""
    width = (tau / 4).clamp(1e-12, 1e12)
    smooth = width * (F.softplus((x - tau) / width) - F.softplus((-x - tau) / width))
    return soft_threshold(x, tau).detach() + (smooth - smooth.detach())


def gradient_models(model, images):
    """Return models of the same weights for `surrogates` of `apgd`; [] for a model without PAP."""
    steps = pap_steps(model, images)
    if not steps:
        return []
    return [straight_through(model, 1.0),
            straight_through(model, 0.0),
            with_pap(model, shrink=smooth_shrink),
            with_pap(model, lambd=math.inf),                        # S stays 0
            with_pap(model, n_iter=max(steps // 2, 1))]


@torch.no_grad()
def adaptive_pgd(model, images, labels, eps, *, index=None, **settings):
    """Run `pgd` along the true gradient; where it fails, follow both straight-through gradients.

    Returns the first result that fools the model, else the result with the smallest margin.
    """
    adv = pgd(model, images, labels, eps, index=index, **settings)
    if not pap_steps(model, images):
        return adv
    eps, index = per_image(images, eps, index)
    left = margin(wide(model(adv)), labels)
    for slope in (1.0, 0.0):
        rows = (left >= 0).nonzero()[:, 0]
        if not len(rows):
            break
        tried = pgd(straight_through(model, slope), images[rows], labels[rows], eps[rows],
                    index=index[rows], **settings)
        m = margin(wide(model(tried)), labels[rows])
        nearer = m < left[rows]
        adv[rows[nearer]] = tried[nearer]
        left[rows[nearer]] = m[nearer]
    return adv


def adaptive_apgd(model, images, labels, eps, **settings):
    """Run `apgd` with the model's own gradient; where it fails, follow `gradient_models`."""
    return apgd(model, images, labels, eps, surrogates=gradient_models(model, images), **settings)


def adaptive_autoattack(model, images, labels, eps, **settings):
    """Run `autoattack`; its APGD-CE and APGD-T also follow `gradient_models`."""
    return autoattack(model, images, labels, eps, surrogates=gradient_models(model, images),
                      **settings)
