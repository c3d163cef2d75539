"""What the evaluator does with Segmenters: the functions of classifiers.py for this task."""

import argparse
from pathlib import Path

from data.segmentation import load_split, save_pictures as save_picture
from robust.classifiers import check_classes
from robust.measures import Job
from robust.results import show
from robust.score import corrupted, pick, size_of, together
from segmenter import SegmenterConfig, evaluate, predictions, segmenter_from_checkpoint

DEFAULTS = vars(SegmenterConfig(2))
rebuild = segmenter_from_checkpoint


def settle(args, first):
    """Choose --window, --stride and --scales where they were not given."""
    config = first.model.config
    args.window = args.window or config.image_size
    args.stride, args.scales = args.stride or args.window, args.scales or [1.0]
    if args.window % config.patch_size:
        raise ValueError(f"--window {args.window} is not a multiple of the patch size "
                         f"{config.patch_size}")


def load_source(args, models):
    """Load what to evaluate on, Scenes or a SegTree."""
    trained = models[0].trained
    flags = {**trained, "data": args.data, "data_dir": args.data_dir}
    source = load_split(argparse.Namespace(**flags), "validation", trained)
    check_classes(models, source, args.data)
    return source


def job(measure, models, source, args):
    """Choose the images that a measure is on: a `Job`."""
    n = size_of(len(source), measure.name, args)
    return Job(measure, source, n, pick(len(source), n, args.seed))


def views(m, setting, args):
    """Say how a Segmenter looks at images: what evaluate and predictions take."""
    return dict(size=m.model.config.image_size, window=setting["window"],
                stride=setting["stride"], scales=setting["scales"], flip=setting["flip"],
                amp=args.amp, num_workers=args.num_workers)


def changes(measure, args):
    """List {severity: what is done to images, uint8}; clean: {None: nothing}."""
    return {None: None} if measure.name == "clean" else corrupted(measure.setting, args)


def rows(models, job, source, args, other=None):
    """Measure pixel accuracy, mean accuracy, mean IoU of one model in percent, also per class;
    lists over severities."""
    (m,), measure, results = models, job.measure, []
    for change in changes(measure, args).values():
        result, _ = evaluate(m.model, source, index=job.index.tolist(), change=change,
                                 rank=args.rank, world=args.world,
                                 progress=show(measure.setting) or measure.name,
                                 **views(m, measure.setting, args))
        results.append({k: v for k, v in result.items() if k != "images"})
    return [results[0] if measure.name == "clean" else together(results)]


def save_pictures(models, source, todo, args):
    """Write clean.png, <type>_<severity>.png: image, truth, prediction; of models in 0/, 1/."""
    for i, m in enumerate(models):
        folder = Path(args.out_dir, str(i)) if len(models) > 1 else Path(args.out_dir)
        folder.mkdir(exist_ok=True)
        for measure in todo:
            index = job(measure, models, source, args).index[:args.save_images].tolist()
            for severity, change in changes(measure, args).items():
                name = f"{measure.setting['type']}_{severity}" if severity else "clean"
                found = predictions(m.model, source, index, change=change,
                                        **views(m, measure.setting, args))
                save_picture(folder / f"{name}.png", found, source.classes)
