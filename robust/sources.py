"""What is evaluated, and on what: the model of a checkpoint; the images or texts of its task."""

import argparse
from pathlib import Path

import common
from data.text import text_folder
from data.segmentation import load_split
from data.images import load_test
from data.text import stored_vocabulary
from fan import classifier_from_checkpoint
from lm import lm_from_checkpoint
from robust import words
from robust.rows import describe_model
from segmenter import segmenter_from_checkpoint

CLS, SEG, LM = "classification", "segmentation", "language modelling"
REBUILD = {CLS: classifier_from_checkpoint, SEG: segmenter_from_checkpoint,
           LM: lm_from_checkpoint}


def load_model(path, device, flag="--ckpt"):
    """A checkpoint as dict(model, task, about, args, classes, vocab, count, given).

    about: what its rows say of it. count: [images forward, images backward] of a classifier, which
    grow as it is used. given: the flag and the path, for errors.
    """
    best = Path(path, "best.pt")
    checkpoint = common.load(best if best.exists() else path)
    task, seen, vocab = checkpoint.get("task"), [0, 0], None
    given = f"{flag} {path}"
    with common.naming(given):
        if task not in REBUILD:
            raise ValueError("not a checkpoint of train_cls.py, train_seg.py or train_lm.py")
        model = REBUILD[task](checkpoint).to(device).requires_grad_(False)
        if task == LM:
            common.check_run(checkpoint, path, "train_lm.py", "vocab")
            vocab = stored_vocabulary(checkpoint)

    def look(module, inputs):                  # a hook is shared by copies of the model: all count
        seen[0] += len(inputs[0])
        seen[1] += len(inputs[0]) * inputs[0].requires_grad

    if task == CLS:
        model.register_forward_pre_hook(look)
    return dict(model=model, task=task, about=describe_model(model, checkpoint, path), count=seen,
                args=checkpoint.get("args") or {}, classes=checkpoint.get("classes"), vocab=vocab,
                given=given)


def load_source(args, models):
    """What to evaluate on: data.Split or ImageTree; Scenes or SegTree; {split: words.Text}."""
    m = models[0]
    if args.task == LM:
        return load_texts(args, models)
    if args.task == SEG:
        flags = {**m["args"], "data": args.data, "data_dir": args.data_dir}
        source = load_split(argparse.Namespace(**flags), "validation")
    else:
        source = load_test(args, m["args"], m["model"].config.image_size, m["classes"])
    for m in models:
        classes = m["classes"] or source.classes
        if list(classes) != list(source.classes) or len(classes) != m["model"].config.num_classes:
            theirs, ours = (", ".join(names[:3]) for names in (classes, source.classes))
            raise ValueError(f"{m['given']} was trained on {len(classes)} other classes "
                             f"({theirs}, ...) than --data {args.data} has ({ours}, ...)")
    return source


def load_texts(args, models):
    """{split: words.Text} in the models' vocabulary, the first --limit tokens. Sets args.word, the
    one that is swapped in."""
    vocab = models[0]["vocab"]
    for m in models:
        if m["vocab"].words != vocab.words:
            raise ValueError(f"{m['given']} has another vocabulary than the "
                             f"first: perplexities would not compare")
    folder = text_folder(args.data, args.data_dir, args.rank)
    texts, args.word = words.load_texts(folder, vocab, args.window, args.seed)
    n, targets = args.limit, args.limit and args.limit - 1
    return {t.split: t._replace(clean=t.clean[:n], attacked=t.attacked[:n], kept=t.kept[:targets])
            for t in texts}
