"""What the evaluator does with Segmenters."""

import argparse
from functools import partial
from pathlib import Path

from data.segmentation import load_split, save_pictures as save_picture
from robust.results import show
from robust.score import damage, stack
from segmenter import evaluate, predictions


def load_source(args, first):
    """Load what to evaluate on, Scenes or a SegTree."""
    flags = {**first.trained, "data": args.data, "data_dir": args.data_dir}
    return load_split(argparse.Namespace(**flags), "validation", first.trained)


def changes(measure, args):
    """{severity: what is done to images, uint8, and their numbers}; clean: {None: nothing}."""
    if measure.name == "clean":
        return {None: None}
    return {severity: partial(damage, setting=measure.setting, severity=severity, args=args)
            for severity in measure.setting["severities"]}


def views(m, setting, args):
    """How a Segmenter sees images: what evaluate and predictions take."""
    return dict(size=m.model.config.image_size, amp=args.amp, num_workers=args.num_workers,
                **{name: setting[name] for name in ("window", "stride", "scales", "flip")})


def measure_segmenter(m, measure, source, index, args, made_on=None):
    """Pixel accuracy, mean accuracy, mean IoU in percent, also per class; lists over severities."""
    found = []
    for change in changes(measure, args).values():
        result, _ = evaluate(m.model, source, index=index.tolist(), change=change,
                             rank=args.rank, world=args.world,
                             progress=show(measure.setting) or measure.name,
                             **views(m, measure.setting, args))
        found.append({k: v for k, v in result.items() if k != "images"})
    return found[0] if measure.name == "clean" else stack(found)


def save_pictures(m, measure, source, index, args, folder):
    """Write clean.png or <type>_<severity>.png: image, truth, prediction."""
    for severity, change in changes(measure, args).items():
        name = f"{measure.setting['type']}_{severity}" if severity else "clean"
        found = predictions(m.model, source, index.tolist(), change=change,
                            **views(m, measure.setting, args))
        save_picture(Path(folder, f"{name}.png"), found, source.classes)
