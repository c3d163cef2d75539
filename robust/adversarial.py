"""Adversarial training (Madry et al. 2018): each batch is trained on as PGD changes it."""

import torch
import torch.nn.functional as F

from data.rng import ADVERSARIAL
from robust.attacks import noise_like


def adversarial(model, images, targets, first, args):
    """Move images uphill on their loss by --adv_steps steps of PGD, up to --adv_eps.

    model: the network as it is trained, compiled and under the caller's autocast if that is so, but
    not in DDP, whose forward pass expects a backward one; it is in eval mode meanwhile. images (b,
    3, S, S) in [0, 1], targets (b, K) as they are trained on. first: the number of the first sample
    in the whole run; the random start depends on (seed, number) alone.
    """
    numbers, eps = torch.arange(first, first + len(images), device=images.device), args.adv_eps
    moved = images + eps * noise_like(images, numbers, args.seed, ADVERSARIAL)
    model.eval()
    for _ in range(args.adv_steps):
        moved = moved.clamp(0, 1).requires_grad_()
        grad, = torch.autograd.grad(F.cross_entropy(model(moved), targets), moved)
        moved = moved.detach() + 2.5 * eps / args.adv_steps * grad.sign()
        moved = moved.clamp(images - eps, images + eps)
    model.train()
    return moved.clamp(0, 1)
