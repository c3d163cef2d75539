"""What is evaluated, and on what: the model of a checkpoint; the images or texts of its task."""

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import torch

import common
from data.images import load_test
from data.segmentation import load_split
from data.text import stored_vocabulary, text_folder
from fan import classifier_from_checkpoint
from lm import LMConfig, lm_from_checkpoint
from robust import words
from robust.results import checksum, weights_of
from segmenter import SegmenterConfig, segmenter_from_checkpoint
from vit import ViTConfig

CLS, SEG, LM = "classification", "segmentation", "language modelling"
REBUILD = {CLS: classifier_from_checkpoint, SEG: segmenter_from_checkpoint,
           LM: lm_from_checkpoint}
# What model_config's fields are where a row does not say.
DEFAULTS = {CLS: vars(ViTConfig()), SEG: vars(SegmenterConfig(2)), LM: vars(LMConfig(1))}
# Training flags that may differ between the seeds of one model; any other makes it another model.
SEED_FLAGS = ("seed", "data_dir", "download", "skip_bad_images", "num_workers", "device", "compile",
              "out_dir", "resume", "max_steps", "log_every", "eval_every", "save_every",
              "keep_every", "save_images", "sample", "words", "prompt", "temperature")


class Loaded(NamedTuple):
    """A model, and what its checkpoint says of it."""
    model: torch.nn.Module           # in eval mode, its parameters frozen
    task: str
    about: dict                      # what its rows say of it
    args: dict                       # the flags that it was trained with
    classes: list | None
    vocab: object                    # of a language model
    count: list                      # [images forward, images backward], which grow with use
    given: str                       # the flag and the path, for errors


# --- models --------------------------------------------------------------------------------------

def kind_of(config):
    """A model in words: softmax, fan symmetric, rpc 4iter/layer1, rpc 2iter/all-layer, ..."""
    family = getattr(config, "family", "")
    if not config.rpc_layers:
        return family + config.attn
    layers = "layer" + ",".join(str(i + 1) for i in config.rpc_layers)
    if len(config.rpc_layers) == config.depth:
        layers = "all-layer"
    name = f"{family}{config.attn} {config.n_iter}iter/{layers}"
    if config.lambd != ViTConfig.lambd:
        name += f", lambda {config.lambd:g}"
    if config.form != ViTConfig.form:
        name += f", form {config.form}"
    return name


def describe_model(model, checkpoint, path):
    """Say what rows say of their model, a dict.

    weights, model_config (what differs from the defaults): which model it is; recipe: a checksum of
    how it was trained, but for the seed.
    """
    defaults, trained = DEFAULTS[checkpoint["task"]], checkpoint.get("args") or {}
    config = {k: v for k, v in vars(model.config).items() if v != defaults.get(k)}
    config = json.loads(json.dumps(config))               # as a row that is read back has it
    recipe = {k: v for k, v in trained.items() if k not in SEED_FLAGS}
    recipe["step"] = checkpoint.get("step")               # epoch 3 and epoch 8 are not two seeds
    if checkpoint["task"] == "language modelling":
        recipe["step"] = recipe.get("steps")              # best.pt is of another step in each seed
    kind = trained.get("attention") or kind_of(model.config)    # of studies/robust_attentions.py
    return dict(model=f"{kind}, seed {trained.get('seed', '?')}", kind=kind, checkpoint=str(path),
                weights=weights_of(model.state_dict()), model_config=config,
                recipe=checksum(json.dumps(recipe, sort_keys=True).encode()))


def load_model(path, device, flag="--ckpt"):
    """Rebuild the model of a checkpoint: a `Loaded`. flag: the one that named the path."""
    best = Path(path, "best.pt")
    checkpoint = common.load(best if best.exists() else path)
    task, count, vocab = checkpoint.get("task"), [0, 0], None
    given = f"{flag} {path}"
    with common.naming(given):
        if task not in REBUILD:
            raise ValueError("not a checkpoint of train_cls.py, train_seg.py or train_lm.py")
        model = REBUILD[task](checkpoint).to(device).requires_grad_(False)
        if task == LM:
            common.check_run(checkpoint, path, "train_lm.py", "vocab")
            vocab = stored_vocabulary(checkpoint)

    def see(module, inputs):                   # a hook is shared by copies of the model: all count
        count[0] += len(inputs[0])
        count[1] += len(inputs[0]) * inputs[0].requires_grad

    if task == CLS:
        model.register_forward_pre_hook(see)
    return Loaded(model, task, describe_model(model, checkpoint, path),
                  checkpoint.get("args") or {}, checkpoint.get("classes"), vocab, count, given)


# --- images and texts ----------------------------------------------------------------------------

def load_source(args, models):
    """What to evaluate on: data.Split or ImageTree; Scenes or SegTree; {split: words.Text}."""
    m = models[0]
    if args.task == LM:
        return load_texts(args, models)
    if args.task == SEG:
        flags = {**m.args, "data": args.data, "data_dir": args.data_dir}
        source = load_split(argparse.Namespace(**flags), "validation", m.args)
    else:
        source = load_test(args, m.args, m.model.config.image_size, m.classes)
    for m in models:
        classes = m.classes or source.classes
        if list(classes) != list(source.classes) or len(classes) != m.model.config.num_classes:
            theirs, ours = (", ".join(names[:3]) for names in (classes, source.classes))
            raise ValueError(f"{m.given} was trained on {len(classes)} other classes "
                             f"({theirs}, ...) than --data {args.data} has ({ours}, ...)")
    return source


def load_texts(args, models):
    """{split: words.Text} in the models' vocabulary, the first --limit tokens. Sets args.word, the
    one that is swapped in."""
    vocab = models[0].vocab
    for m in models:
        if m.vocab.words != vocab.words:
            raise ValueError(f"{m.given} has another vocabulary than the "
                             f"first: perplexities would not compare")
    folder = text_folder(args.data, args.data_dir, args.rank)
    texts, args.word = words.load_texts(folder, vocab, args.window, args.seed)
    n, targets = args.limit, args.limit and args.limit - 1
    return {t.split: t._replace(clean=t.clean[:n], attacked=t.attacked[:n], kept=t.kept[:targets])
            for t in texts}
