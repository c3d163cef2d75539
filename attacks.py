"""Adversarial attacks on image classifiers, whole batches at a time, and the word swap for text.

Every image attack is `attack(model, images, labels, eps, ...) -> adversarial images`:
  model     any function from pixels to logits, in eval mode: (B, 3, H, W) float32 in [0, 1] -> (B, classes)
  images    (B, 3, H, W) float32 in [0, 1], on the model's device; never changed
  labels    (B,) int64, what the attack leads away from: the true classes (or the model's own predictions)
  eps       budget in pixel units, 8/255 say: a number or a tensor that broadcasts to images
  clip      True: adversarial pixels stay in [0, 1]; False: they may leave it (the paper's harness)
  seed, index   random numbers depend on (seed, image number index[i]) alone, so results do not depend on the batch
Parameters and their .grad stay as they are; the result is detached. Parameters should be frozen (requires_grad False:
faster). Teo & Nguyen 2024, sections 4.1 and A.2; the source of each attack stands in its docstring.
"""

import math

import torch
import torch.nn.functional as F

from common import uniform

# --- what all attacks share ------------------------------------------------------------------------------------------


def margin(logits, labels):
    """z_y - max_{j != y} z_j, (B,): negative where the model is fooled."""
    others = logits.scatter(1, labels[:, None], -math.inf)
    return logits.gather(1, labels[:, None])[:, 0] - others.amax(1)


def cross_entropy(logits, labels):
    """Per image, (B,)."""
    return F.cross_entropy(logits, labels, reduction="none")


def input_gradient(loss, model, images, labels):
    """Gradient of sum_i loss_i in the images. Returns (logits (B, classes), loss (B,), gradient like images), detached.

    The sum, not the mean: results then do not depend on the batch size.
    """
    images = images.detach().requires_grad_()
    with torch.enable_grad():
        logits = model(images)
        losses = loss(logits, labels)
        grad, = torch.autograd.grad(losses.sum(), images)
    return logits.detach(), losses.detach(), grad


def project(adv, images, eps, clip=True):
    """Pi: into [images - eps, images + eps], then into [0, 1]."""
    adv = torch.minimum(torch.maximum(adv, images - eps), images + eps)
    return adv.clamp(0, 1) if clip else adv


def noise_like(images, index, *key):
    """Uniform numbers in [-1, 1), shape of images, from (key, image number) alone. index: (B,) int64 or None: 0, 1, ..."""
    index = torch.arange(len(images), device=images.device) if index is None else index.to(images.device)
    return (2 * uniform(index, images[0].numel(), *key) - 1).view_as(images)
