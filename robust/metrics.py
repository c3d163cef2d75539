"""Numbers of the robustness tables: mCE, how well outliers are told apart (ImageNet-O), and the
confidence interval of an accuracy.

Hendrycks & Dietterich 2019 (ImageNet-C), Hendrycks et al. 2021 (ImageNet-O). Plain functions on
tensors.
"""

import math
import zlib

import torch

from robust.corruptions import NAMES

# AlexNet's top-1 error on ImageNet-C, mean of 5 severities, in the order of NAMES
# (`rachtsy/KPCA_code:Robust/utils_robust.py`)
ALEXNET = dict(zip(NAMES, (
    0.886428, 0.894468, 0.922640, 0.819880, 0.826268, 0.785948, 0.798360, 0.866816, 0.826572,
    0.819324, 0.564592, 0.853204, 0.646056, 0.717840, 0.606500)))


def is_imagenet(classes):
    """Whether these are the names of ImageNet's 1000 class folders, n01440764 first, in order."""
    return zlib.crc32("\n".join(classes).encode()) == 0x0642A78E


def mean_corruption_error(errors):
    """mCE in percent: the mean over the 15 corruptions of error_c / AlexNet's error_c on ImageNet.

    errors: {name: top-1 error in [0, 1], mean over the severities}. Raises ValueError naming what
    is missing.
    """
    missing = [name for name in NAMES if name not in errors]
    if missing:
        raise ValueError(f"mCE needs all 15 corruptions; missing: {', '.join(missing)}")
    return 100 * sum(errors[name] / ALEXNET[name] for name in NAMES) / len(NAMES)


def _counts(score, positive):
    """Sum true and false positives down to each distinct threshold, highest first; float64."""
    score, order = score.cpu().double().sort(descending=True)             # mps has no float64
    positive = positive.cpu().double()[order]
    # ties fall in one step
    last = torch.cat([score[1:] != score[:-1], score.new_ones(1, dtype=torch.bool)])
    tp, fp = positive.cumsum(0)[last], (1 - positive).cumsum(0)[last]
    if not tp[-1] or not fp[-1]:
        raise ValueError(f"{int(tp[-1])} positive and {int(fp[-1])} negative examples, expected at "
                         f"least one of each")
    return tp, fp


def average_precision(score, positive):
    """AUPR: sum over thresholds of (R_n - R_{n-1}) P_n, in [0, 1].

    score: (n,), higher = more positive; positive: (n,) bool.
    """
    tp, fp = _counts(score, positive)
    recall = tp / tp[-1]
    return (torch.diff(recall, prepend=recall.new_zeros(1)) * tp / (tp + fp)).sum().item()


def auroc(score, positive):
    """Area under the ROC curve in [0, 1], a tie counts half. Arguments: see average_precision."""
    tp, fp = _counts(score, positive)
    zero = tp.new_zeros(1)
    return torch.trapezoid(torch.cat([zero, tp / tp[-1]]), torch.cat([zero, fp / fp[-1]])).item()


def fpr95(score, positive):
    """Share of negatives above the highest threshold that keeps 95 % of the positives."""
    tp, fp = _counts(score, positive)
    first = int((tp / tp[-1] < 0.95 - 1e-12).sum())
    return (fp[first] / fp[-1]).item()


def wilson(share, n):
    """Wilson's 95 % interval of a share in [0, 1] that was seen on n images: (low, high)."""
    z = 1.959964                                          # 97.5 % of a normal lie below
    centre = share + z ** 2 / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2)
    scale = 1 + z ** 2 / n
    return max((centre - half) / scale, 0.0), min((centre + half) / scale, 1.0)
