"""Adversarial training (Madry et al. 2018): each batch is trained on as PGD changes it."""

import torch

from data.rng import ADVERSARIAL
from robust.attacks import pgd


def adversarial(model, images, targets, first, args):
    """Return the images after --adv_steps steps of PGD within --adv_eps, to train on.

    model: the network, compiled or under autocast as the caller trains it, but not in DDP, whose
    forward pass expects a backward pass. The model is in eval mode during the attack. images: (b,
    3, S, S); pixels outside [0, 1], which random erasing makes, are clamped first. targets: (b, K)
    probabilities, the training targets. first: the number of the first sample in the
    whole run; the random start depends on (seed, sample number) alone.
    """
    index = torch.arange(first, first + len(images), device=images.device)
    model.eval()
    adv = pgd(model, images.clamp(0, 1), targets, args.adv_eps, steps=args.adv_steps,
              alpha=2.5 * args.adv_eps / args.adv_steps, seed=args.seed, index=index,
              purpose=ADVERSARIAL)
    model.train()
    return adv
