"""Adaptive attacks: they also follow gradients that RPC-Attention hides.

    adv = adaptive_pgd(model, images, labels, 8 / 255)

The soft threshold of PAP has slope 0 where it returns 0. There an attack along the model's own
gradient can fail although the model is not robust (Athalye et al. 2018). So an adaptive attack also
follows the gradients of surrogates. A surrogate is the same network with a changed PAP that does
not hide gradients. The change reaches your own attention if it passes `**layer.pap` to
`rpc_attention`. An attention that hides gradients in another way has an entry in SURROGATES. For a
model without PAP, adaptive attacks are the plain attacks.
"""

import math
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.modules.module import register_module_forward_pre_hook

from attention import every_pap, soft_threshold
from common import at_least_float32
from robust.attacks import margin, per_image, pgd
from robust.autoattack import apgd, autoattack

# --- where the model runs PAP --------------------------------------------------------------------

@torch.no_grad()
def layers_with_pap(model, images):
    """Return the layers with an attribute pap that model(images) can run, as a ModuleList.

    The model may be a plain function, or hold modules in a list. So this function looks at the
    calls of modules, not at the model's attributes. The children of a called module are included,
    because a module may call the method `forward` of a child, which no hook notices.
    """
    layers = torch.nn.ModuleList()

    def before_call(module, inputs):
        for layer in module.modules():
            if hasattr(layer, "pap") and layer not in layers:
                layers.append(layer)

    # PyTorch calls this function before each call of any module.
    with register_module_forward_pre_hook(before_call):
        model(images[:1])
    return layers


@torch.no_grad()
def count_steps(model, images, layers):
    """Return the number of PAP steps that each of `layers`, a ModuleList, runs; 0 without PAP."""
    if not len(layers):
        return 0
    # The first run counts the steps of all layers. The second run, with n_iter=1, counts the
    # layers. The quotient is the number of steps per layer.
    steps = []
    once = []
    with every_pap(layers, trace=steps):
        model(images[:1])
    with every_pap(layers, trace=once, n_iter=1):
        model(images[:1])
    return len(steps) // max(len(once), 1)                      # 0 // 1 if no layer runs PAP


def pap_steps(model, images):
    """Return the number of PAP steps per layer, or 0 if the model runs no PAP."""
    return count_steps(model, images, layers_with_pap(model, images))


def with_pap(model, layers, **settings):
    """Return a function of images: the model with the same weights and other settings of PAP.

    layers: a ModuleList of the model's layers whose settings change.
    """
    def changed(images):
        with every_pap(layers, **settings):
            return model(images)
    return changed


# --- surrogates: models of the same weights that provide other gradients -------------------------

def straight_through(x, tau, slope):
    """Compute soft_threshold with the gradient `slope` everywhere.

    The true slope is 1 where S is not 0, else 0.
    """
    return soft_threshold(x, tau).detach() + slope * (x - x.detach())


identity_slope = partial(straight_through, slope=1.0)       # the gradient of the identity
zero_slope = partial(straight_through, slope=0.0)           # K receives the whole gradient of K - S


def smooth_shrink(x, tau):
    """Compute soft_threshold with the gradient of a softplus, which is never exactly 0."""
    width = (tau / 4).clamp(1e-12, 1e12)
    smooth = width * (F.softplus((x - tau) / width) - F.softplus((-x - tau) / width))
    return soft_threshold(x, tau).detach() + (smooth - smooth.detach())


class SurrogateSettings(NamedTuple):
    """Two lists of settings of PAP; each dict makes a surrogate."""
    same_outputs: list                  # surrogates with the model's outputs, but other gradients
    only_apgd: list                     # more surrogates, for APGD; they may have other outputs


def pap_surrogates(steps):
    """Return the SurrogateSettings for layers that run `steps` steps of `rpc_attention`."""
    same_outputs = [dict(shrink=identity_slope), dict(shrink=zero_slope)]
    only_apgd = [dict(shrink=smooth_shrink),
                 dict(lambd=math.inf),                          # S stays 0
                 dict(n_iter=max(steps // 2, 1))]
    return SurrogateSettings(same_outputs, only_apgd)


def rpca_surrogates(steps):
    """Return the SurrogateSettings for layers that run `steps` steps of `rpca_attention`."""
    same_outputs = [dict(constant_s=True)]
    only_apgd = [dict(constant_s=True, lambd=math.inf),         # S stays 0
                 dict(n_iter=max(steps // 2, 1))]
    return SurrogateSettings(same_outputs, only_apgd)


# Surrogates by the layer's attribute attn. All other layers with PAP use `pap_surrogates`. Enter
# your own attention here if it hides gradients in another way.
SURROGATES = {"rpca": rpca_surrogates}


def all_surrogates(model, images):
    """Return two lists of models: the surrogates for all kinds of layers in the model.

    The lists are the lists of SurrogateSettings: same_outputs and only_apgd.
    """
    kinds = {}                                                  # {function: its layers}
    for layer in layers_with_pap(model, images):
        function = SURROGATES.get(getattr(layer, "attn", None), pap_surrogates)
        kinds.setdefault(function, torch.nn.ModuleList()).append(layer)
    same_outputs = []
    only_apgd = []
    for function, layers in kinds.items():
        steps = count_steps(model, images, layers)
        if steps:                                               # softmax layers run no PAP
            found = function(steps)
            same_outputs += [with_pap(model, layers, **settings) for settings in found.same_outputs]
            only_apgd += [with_pap(model, layers, **settings) for settings in found.only_apgd]
    return same_outputs, only_apgd


def gradient_models(model, images):
    """Return all surrogates as a list, the argument `surrogates` of `apgd`; [] without PAP."""
    same_outputs, only_apgd = all_surrogates(model, images)
    return same_outputs + only_apgd


# --- the attacks ---------------------------------------------------------------------------------

@torch.no_grad()
def adaptive_pgd(model, images, labels, eps, *, index=None, **settings):
    """Run `pgd` along the true gradient; where it fails, follow the gradient of each surrogate.

    The surrogates have the model's outputs. Returns the first result that fools the model, else the
    result with the smallest margin.
    """
    # This call gets eps as it is, so that the result equals the result of `pgd` bit for bit.
    adv = pgd(model, images, labels, eps, index=index, **settings)
    eps, index = per_image(images, eps, index)
    surrogates, _ = all_surrogates(model, images)               # with the model's outputs
    if not surrogates:
        return adv
    margins = margin(at_least_float32(model(adv)), labels)
    for surrogate in surrogates:
        rows = (margins >= 0).nonzero()[:, 0]                   # not fooled yet
        if not len(rows):
            break
        tried = pgd(surrogate, images[rows], labels[rows], eps[rows], index=index[rows],
                    **settings)
        new_margins = margin(at_least_float32(model(tried)), labels[rows])
        lower = new_margins < margins[rows]
        adv[rows[lower]] = tried[lower]
        margins[rows[lower]] = new_margins[lower]
    return adv


def adaptive_apgd(model, images, labels, eps, **settings):
    """Run `apgd` with the model's own gradient; where it fails, follow `gradient_models`."""
    surrogates = gradient_models(model, images)
    return apgd(model, images, labels, eps, surrogates=surrogates, **settings)


def adaptive_autoattack(model, images, labels, eps, **settings):
    """Run `autoattack`; its APGD-CE and APGD-T also follow `gradient_models`."""
    surrogates = gradient_models(model, images)
    return autoattack(model, images, labels, eps, surrogates=surrogates, **settings)
