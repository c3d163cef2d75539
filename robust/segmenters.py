"""What the evaluator does with Segmenters."""

import argparse
from functools import partial

from common import InputError
from data.views import load_segmentation
from robust import corruptions
from robust.score import split_images, stack
from segmenter import evaluate


def load(models, args):
    """Load what to evaluate on, Scenes or a SegTree; set --window and --stride."""
    first = models[0]
    args.window = args.window or first.model.config.image_size
    args.stride = args.stride or args.window
    if args.stride > args.window:
        raise InputError(f"--stride {args.stride} is more than --window {args.window}")
    flags = {**first.trained, "data": args.data, "data_dir": args.data_dir}
    return load_segmentation(argparse.Namespace(**flags), "test", first.trained)


def images(measure, source, args, find=split_images):
    """The images of a measure, which are seen through windows."""
    found = find(measure, source, args)
    measure.setting.update(window=args.window, stride=args.stride, scales=args.scales,
                           flip=args.flip)
    return found


to_corrupt = partial(images, find=corruptions.images)


def measured(m, measure, images, args):
    """Pixel accuracy, mean accuracy, mean IoU in percent, also per class; lists over severities."""
    setting, found = measure.setting, []
    views = {name: setting[name] for name in ("window", "stride", "scales", "flip")}
    for severity in setting.get("severities", [None]):
        change = severity and partial(corruptions.damage, setting=setting, severity=severity,
                                      args=args)
        result, _ = evaluate(m.model, images.source, size=m.size, index=images.index.tolist(),
                             change=change, num_workers=args.num_workers, rank=args.rank,
                             world=args.world, progress=str(measure)[:60], **views)
        found.append({k: v for k, v in result.items() if k != "images"})
    return stack(found) if "severities" in setting else found[0]
