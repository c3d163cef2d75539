"""Metrics in the robustness tables: mCE, detection of outliers, and the interval of an accuracy.

Hendrycks & Dietterich 2019 (ImageNet-C), Hendrycks et al. 2021 (ImageNet-O). Plain functions on
tensors.
"""

import math

import torch

# AlexNet's top-1 error on ImageNet-C, the mean over 5 severities. Source:
# `rachtsy/KPCA_code:Robust/utils_robust.py`.
ALEXNET = dict(
    gaussian_noise=0.886428, shot_noise=0.894468, impulse_noise=0.922640, defocus_blur=0.819880,
    glass_blur=0.826268, motion_blur=0.785948, zoom_blur=0.798360, snow=0.866816, frost=0.826572,
    fog=0.819324, brightness=0.564592, contrast=0.853204, elastic_transform=0.646056,
    pixelate=0.717840, jpeg_compression=0.606500)


def mean_corruption_error(errors):
    """Return mCE in per cent: the mean over 15 corruptions of error_c / AlexNet's error_c.

    errors: {name: top-1 error in [0, 1], mean over the severities}.
    """
    return 100 * sum(errors[name] / alexnet for name, alexnet in ALEXNET.items()) / len(ALEXNET)


def _counts(score, positive):
    """Count true and false positives at or above each distinct score, highest first; float64."""
    score, order = score.cpu().double().sort(descending=True)             # mps has no float64
    positive = positive.cpu().double()[order]
    # Keep one threshold for all examples with equal scores: the position of the last one.
    last = torch.cat([score[1:] != score[:-1], score.new_ones(1, dtype=torch.bool)])
    tp, fp = positive.cumsum(0)[last], (1 - positive).cumsum(0)[last]
    if not tp[-1] or not fp[-1]:
        raise ValueError(f"{int(tp[-1])} positive and {int(fp[-1])} negative examples, expected at "
                         f"least one of each")
    return tp, fp


def average_precision(score, positive):
    """Return AUPR in [0, 1]: the sum over thresholds of (R_n - R_{n-1}) P_n.

    R: recall, P: precision. score: (n,), larger for positive examples. positive: (n,) bool.
    """
    tp, fp = _counts(score, positive)
    recall = tp / tp[-1]
    return (torch.diff(recall, prepend=recall.new_zeros(1)) * tp / (tp + fp)).sum().item()


def auroc(score, positive):
    """Return the area under the ROC curve in [0, 1]; a tie counts half.

    score, positive: as in average_precision.
    """
    tp, fp = _counts(score, positive)
    zero = tp.new_zeros(1)
    return torch.trapezoid(torch.cat([zero, tp / tp[-1]]), torch.cat([zero, fp / fp[-1]])).item()


def fpr95(score, positive):
    """Return the false-positive rate at the highest threshold that detects 95 % of the positives.

    score, positive: as in average_precision.
    """
    tp, fp = _counts(score, positive)
    first = int((tp / tp[-1] < 0.95 - 1e-12).sum())
    return (fp[first] / fp[-1]).item()


def wilson(share, n):
    """Return Wilson's 95 % interval (low, high) of a share in [0, 1] of n images."""
    z = 1.959964                                          # 97.5 % of a normal distribution
    centre = share + z ** 2 / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2)
    scale = 1 + z ** 2 / n
    return max((centre - half) / scale, 0.0), min((centre + half) / scale, 1.0)
