"""mCE for ImageNet-C (Hendrycks & Dietterich 2019), AUPR for ImageNet-O (Hendrycks et al. 2021)."""

import torch

# AlexNet's top-1 error on ImageNet-C, a mean over severities (`KPCA_code:Robust/utils_robust.py`).
ALEXNET = dict(
    gaussian_noise=0.886428, shot_noise=0.894468, impulse_noise=0.922640,
    defocus_blur=0.819880, glass_blur=0.826268,
    motion_blur=0.785948, zoom_blur=0.798360,
    snow=0.866816, frost=0.826572, fog=0.819324, brightness=0.564592,
    contrast=0.853204, elastic_transform=0.646056,
    pixelate=0.717840, jpeg_compression=0.606500)


def mean_corruption_error(errors):
    """Return mCE in per cent from errors {name: top-1 error in [0, 1], a mean over severities}."""
    relative = [errors[name] / alexnet for name, alexnet in ALEXNET.items()]
    return 100 * sum(relative) / len(ALEXNET)


def average_precision(score, positive):
    """Return AUPR in [0, 1]: the sum over thresholds of (R_n - R_{n-1}) P_n.

    R: recall, P: precision. score: (n,), larger for positive examples. positive: (n,) bool.
    """
    score, order = score.cpu().double().sort(descending=True)             # mps has no float64
    # Keep one threshold for all examples with equal scores: the position of the last one.
    last = torch.cat([score[1:] != score[:-1], score.new_ones(1, dtype=torch.bool)])
    positive = positive.cpu().double()[order]
    tp = positive.cumsum(0)[last]                                         # true positives
    recall = tp / tp[-1]
    precision = tp / (1 + last.nonzero()[:, 0])
    gain = torch.diff(recall, prepend=recall.new_zeros(1))
    return (gain * precision).sum().item()
