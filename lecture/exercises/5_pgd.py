"""5. One step of projected gradient descent (stop 5)."""

import torch


def pgd_step(x, clean, grad, eps, alpha):
    """Move the images x (B, 3, H, W) by alpha along the sign of the gradient grad of the loss.

    The loss is to rise. The result stays within eps of the images `clean`, pixel by pixel, and in
    [0, 1].
    """
    x = ...
    x = ...
    return x
