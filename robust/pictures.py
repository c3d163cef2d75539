"""What the evaluator saw: images clean, corrupted, attacked; a Segmenter's predictions of them."""

from pathlib import Path

import torch

from data.files import save_grid
from data.segmentation import save_pictures
from robust import corruptions, iou, measures, score


def save(models, source, todo, args):
    """Write --save_images pictures into --out_dir."""
    write = save_classified if args.task == "classification" else save_segmented
    write(models, source, todo, args)


def save_classified(models, source, todo, args):
    """Write corruptions.png: 15 types x 5 severities of an image. attacks_<i>.png per model: clean,
    attacked by PGD at the largest eps, the difference amplified to full contrast."""
    index = score.pick(len(source.labels), None, args.seed)[:args.save_images]
    zoom = max(1, 96 // models[0].size)
    images, labels, index, _ = score.whole(score.batches(source, index, args))
    grid = [corruptions.corrupt(images[:1], name, severity, seed=args.seed, index=index[:1],
                                frost_dir=args.frost_dir)
            for name in corruptions.NAMES for severity in (1, 2, 3, 4, 5)]
    save_grid(Path(args.out_dir, "corruptions.png"), torch.cat(grid), columns=5, zoom=zoom)

    x = images.float() / 255
    asked = [one for one in todo if one.name == "pgd"]
    asked = asked or measures.plan(["pgd"], args.task, args.preset, args.eps)
    name, setting, conditions = max(asked, key=lambda one: one.setting["eps"])
    for i, m in enumerate(models):
        adv = score.attack_images(m.model, name, setting, x, labels, index, conditions,
                                  seed=args.seed, batch_size=args.batch_size)
        bound = (adv - x).abs().amax().clamp(min=1e-6)
        rows = torch.cat([x, adv.clamp(0, 1), 0.5 + (adv - x) / (2 * bound)])
        save_grid(Path(args.out_dir, f"attacks_{i}.png"), rows, columns=len(x), zoom=zoom)


def save_segmented(models, source, todo, args):
    """Write clean.png, <type>_<severity>.png: image, truth, prediction; of models in 0/, 1/."""
    for i, m in enumerate(models):
        folder = Path(args.out_dir, str(i)) if len(models) > 1 else Path(args.out_dir)
        folder.mkdir(exist_ok=True)
        for name, setting, _ in todo:
            n = score.size_of(source, name, setting, args)
            index = score.pick(len(source), n, args.seed)[:args.save_images].tolist()
            for severity, change in score.changes(name, setting, args).items():
                title = f"{setting['type']}_{severity}.png" if severity else "clean.png"
                found = iou.predictions(m.model, source, index, change=change,
                                        **score.views(m, setting, args))
                save_pictures(folder / title, found, source.classes)
