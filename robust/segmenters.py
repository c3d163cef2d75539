"""What the evaluator does with Segmenters."""

import argparse
from functools import partial

from data.segmentation import load_split
from robust.results import show
from robust.score import damage, stack
from segmenter import evaluate


def load_source(args, first):
    """Load what to evaluate on, Scenes or a SegTree."""
    flags = {**first.trained, "data": args.data, "data_dir": args.data_dir}
    return load_split(argparse.Namespace(**flags), "validation", first.trained)


def measure_segmenter(m, measure, source, index, args, made_on=None):
    """Pixel accuracy, mean accuracy, mean IoU in percent, also per class; lists over severities."""
    setting, found = measure.setting, []
    views = {name: setting[name] for name in ("window", "stride", "scales", "flip")}
    for severity in setting.get("severities", [None]):
        change = severity and partial(damage, setting=setting, severity=severity, args=args)
        result, _ = evaluate(m.model, source, size=m.size, index=index.tolist(), change=change,
                             amp=args.amp, num_workers=args.num_workers, rank=args.rank,
                             world=args.world, progress=show(setting) or measure.name, **views)
        found.append({k: v for k, v in result.items() if k != "images"})
    return found[0] if measure.name == "clean" else stack(found)
