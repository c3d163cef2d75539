"""Scores of a Segmenter over a data set: pixel accuracy, mean accuracy, mean IoU.

    metrics, _ = evaluate(model, tree, size=512, window=512, stride=512)
    metrics["mean_iou"]                                      # in per cent
"""

import math

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from tqdm import tqdm

from segmenter import IGNORE, predict


# --- of counts -----------------------------------------------------------------------------------

def confusion(prediction, truth, num_classes):
    """Counts (K, K) int64, rows truth, columns prediction, of pixels whose truth is not 255.

    prediction, truth: class indices of one shape, any integer type. Sum the counts over images.
    Raises ValueError for classes outside 0..K-1.
    """
    if prediction.shape != truth.shape:
        raise ValueError(f"the prediction is {tuple(prediction.shape)}, expected "
                         f"{tuple(truth.shape)} as the truth")
    keep = truth != IGNORE
    t, p = truth[keep].long(), prediction[keep].long()
    for name, x, more in (("truth", t, f", or {IGNORE} for ignored pixels"), ("prediction", p, "")):
        if x.numel() and not 0 <= x.min() <= x.max() < num_classes:
            raise ValueError(f"the {name} holds classes {x.min()} to {x.max()}, expected 0 to "
                             f"{num_classes - 1}{more}")
    return torch.bincount(num_classes * t + p, minlength=num_classes ** 2).view(num_classes, -1)


def scores(confusion):
    """Pixel accuracy, mean class accuracy, mean IoU, in per cent, of a whole data set's confusion.

    A class absent from the truth has no accuracy; one absent from truth and predictions no IoU:
    NaN, left out of the means. Returns a dict; `accuracy` and `iou` are lists per class, `classes`
    and `classes_in_truth` how many entered mean_iou and mean_accuracy.
    """
    m = confusion.cpu().double()                          # mps has no float64
    right, truth, predicted = m.diagonal(), m.sum(1), m.sum(0)
    accuracy = 100 * right / truth                                              # 0 / 0 is NaN
    iou = 100 * right / (truth + predicted - right)
    return dict(pixel_accuracy=(100 * right.sum() / m.sum()).item(),
                mean_accuracy=accuracy.nanmean().item(), mean_iou=iou.nanmean().item(),
                accuracy=accuracy.tolist(), iou=iou.tolist(),
                classes=int((~iou.isnan()).sum()), classes_in_truth=int((truth > 0).sum()))


# --- evaluation over a data set ------------------------------------------------------------------

@torch.no_grad()
def predictions(model, source, index, *, change=None, amp=False, num_workers=0, **how):
    """Yields (image, label, prediction), uint8 on the model's device, of source[i] for i of index.

    The image (3, H, W) as it was changed, label and prediction (H, W). how: arguments of predict;
    the rest: see evaluate.
    """
    device = next(model.parameters()).device
    loader = DataLoader(source, sampler=index, batch_size=None, num_workers=num_workers)
    for i, (image, label) in zip(index, loader):
        image = image.to(device)
        if change:
            image = change(image[None], [i])[0]
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            p = predict(model, image, **how)
        yield image, label.to(device), p.argmax(0).byte()


def evaluate(model, source, *, size, window, stride, scales=(1.0,), flip=False, change=None,
             index=None, amp=False, num_workers=0, rank=0, world=1, progress=None):
    """Scores of a Segmenter over a data set: (dict for a JSON file, confusion (K, K) int64).

    source: source[i] -> image (3, H, W), label (H, W), uint8, classes from 0, 255 ignored.
    size: pixels of the short side at scale 1; window, stride: pixels; scales, flip: see predict.
    change(images (1, 3, H, W) uint8 on the model's device, [i]) -> the same shape and type, applied
    before resizing; i: the image's number in the source. index: list of those to use; None: all.
    amp: bf16. num_workers: decoding processes. rank, world: processes share the images, each
    returns the scores of all of them. progress: text for a progress bar; None: no bar.
    The dict: `scores`, rounded to 4 decimals, None where a class has no value, and `images`. The
    model ends in the mode it came in. Raises ValueError if there is no labelled pixel.
    """
    index = list(range(len(source))) if index is None else list(index)
    K, training = model.config.num_classes, model.training
    matrix = torch.zeros(K, K, dtype=torch.int64, device=next(model.parameters()).device)
    mine = index[rank::world]
    triples = predictions(model.eval(), source, mine, size=size, window=window, stride=stride,
                          scales=scales, flip=flip, change=change, amp=amp, num_workers=num_workers)
    quiet = rank > 0 or progress is None
    for _, label, prediction in tqdm(triples, progress, len(mine), leave=False, disable=quiet):
        matrix += confusion(prediction, label, K)
    model.train(training)
    if world > 1:
        dist.all_reduce(matrix)
    if not matrix.any():
        raise ValueError(f"none of the {len(index)} images has a labelled pixel")
    return dict(plain(scores(matrix)), images=len(index)), matrix


def plain(metrics):
    """Metrics for a JSON file: rounded, None where a class has no value."""
    def number(x):
        return None if math.isnan(x) else round(x, 4)
    return {name: [number(x) for x in value] if isinstance(value, list) else number(value)
            for name, value in metrics.items()}
