"""Numbers of the robustness tables: corruption error, mCE, and how well outliers are told apart (ImageNet-O).

Hendrycks & Dietterich 2019 (ImageNet-C), Hendrycks et al. 2021 (ImageNet-O). Plain functions on tensors.
"""

import torch

from corruptions import NAMES

# AlexNet's top-1 error on ImageNet-C, mean of 5 severities, as NAMES (`rachtsy/KPCA_code:Robust/utils_robust.py`)
ALEXNET = dict(zip(NAMES, (0.886428, 0.894468, 0.922640, 0.819880, 0.826268, 0.785948, 0.798360, 0.866816, 0.826572,
                           0.819324, 0.564592, 0.853204, 0.646056, 0.717840, 0.606500)))


def mean_corruption_error(errors):
    """mCE in percent: the mean over the 15 corruptions of error_c / AlexNet's error_c.

    errors: {name: top-1 error in [0, 1], mean over the severities}. Raises ValueError naming what is missing.
    """
    missing = [name for name in NAMES if name not in errors]
    if missing:
        raise ValueError(f"mCE needs all 15 corruptions; missing: {', '.join(missing)}")
    return 100 * sum(errors[name] / ALEXNET[name] for name in NAMES) / len(NAMES)


def _counts(score, positive):
    """Cumulated true and false positives at every distinct threshold, from the highest score down; float64."""
    score, order = score.double().sort(descending=True)
    positive = positive.double()[order]
    last = torch.cat([score[1:] != score[:-1], score.new_ones(1, dtype=torch.bool)])       # ties fall in one step
    tp, fp = positive.cumsum(0)[last], (1 - positive).cumsum(0)[last]
    if not tp[-1] or not fp[-1]:
        raise ValueError(f"{int(tp[-1])} positive and {int(fp[-1])} negative examples, expected at least one of each")
    return tp, fp


def average_precision(score, positive):
    """AUPR: sum over thresholds of (R_n - R_{n-1}) P_n, in [0, 1].

    score: (n,), higher = more positive; positive: (n,) bool.
    """
    tp, fp = _counts(score, positive)
    recall = tp / tp[-1]
    return (torch.diff(recall, prepend=recall.new_zeros(1)) * tp / (tp + fp)).sum().item()


def auroc(score, positive):
    """Area under the ROC curve (a tie counts half), in [0, 1]. Arguments as in average_precision."""
    tp, fp = _counts(score, positive)
    zero = tp.new_zeros(1)
    return torch.trapezoid(torch.cat([zero, tp / tp[-1]]), torch.cat([zero, fp / fp[-1]])).item()


def fpr_at_recall(score, positive, recall=0.95):
    """Share of negatives above the highest threshold that keeps `recall` of the positives."""
    tp, fp = _counts(score, positive)
    first = int((tp / tp[-1] < recall - 1e-12).sum())
    return (fp[first] / fp[-1]).item()
