"""Adversarial training (Madry et al. 2018): PGD changes each batch before the training step."""

import torch

from data.rng import ADVERSARIAL
from robust.attacks import pgd


def adversarial(model, images, targets, first, eps, steps, seed):
    """Return adversarial images to train on: `steps` steps of PGD within eps.

    model: the network, compiled or under autocast as in training. Pass the network itself, without
        its DDP wrapper, because DDP expects a backward pass after each forward pass. The model is
        in eval mode during the attack and in train mode afterwards.
    images: (b, 3, S, S). Random erasing makes pixels outside [0, 1]; they are clamped first.
    targets: (b, K) probabilities, the training targets.
    first: the number of the batch's first sample, counted from the start of the run. The random
        start of PGD depends on (seed, sample number) alone.
    """
    index = torch.arange(first, first + len(images), device=images.device)
    model.eval()
    adv = pgd(model, images.clamp(0, 1), targets, eps, steps=steps, alpha=2.5 * eps / steps,
              seed=seed, index=index, purpose=ADVERSARIAL)
    model.train()
    return adv
