"""What is evaluated: the model of a checkpoint of ours or of others, or of a function."""

import importlib.util
import json
import math
import sys
import zlib
from pathlib import Path
from typing import NamedTuple

import torch

import common
from attention import PAP_SETTINGS
from common import InputError
from robust.attacks import check_logits
from robust.measures import CLS, LM, SEG
from vit import ViT, ViTConfig, classifier_from_checkpoint

# What pixels in [0, 1] are normalised by: mean and std, of each channel.
NORMALIZE = dict(imagenet=dict(mean=ViTConfig.mean, std=ViTConfig.std),
                 half=dict(mean=(0.5,) * 3, std=(0.5,) * 3))


class Loaded(NamedTuple):
    """A model, and what its checkpoint says of it."""
    model: torch.nn.Module           # in eval mode, its parameters frozen
    task: str
    about: dict                      # what its rows say of it
    given: str                       # the flag and the path, for errors
    size: int | None                 # pixels a side of the images that it takes
    checkpoint: dict = {}            # of ours, without the weights
    trained: dict = {}               # the flags of its training
    classes: list | None = None      # their names


def checksum(data):
    """Give eight hexadecimal digits for bytes."""
    return f"{zlib.crc32(data):08x}"


def weights_of(model):
    """Give a checksum of a model's weights."""
    tensors = (t.cpu().contiguous().numpy().tobytes() for t in model.state_dict().values())
    return checksum(b"".join(tensors))


def kind_of(config):
    """A model in words: softmax, fan symmetric, rpc 4iter/layer1, rpc 2iter/all-layer, ..."""
    family = getattr(config, "family", "")
    if not config.rpc_layers:
        return family + config.attn
    layers = "layer" + ",".join(str(i + 1) for i in config.rpc_layers)
    if len(config.rpc_layers) == config.depth:
        layers = "all-layer"
    pap = config.pap
    name = f"{family}{config.attn} {pap['n_iter']}iter/{layers}"
    if pap["lambd"] != PAP_SETTINGS["lambd"]:
        name += f", lambda {pap['lambd']:g}"
    if pap["form"] != PAP_SETTINGS["form"]:
        name += f", form {pap['form']}"
    return name


def describe_model(model, defaults, path):
    """What rows say of their model, a dict. defaults: of its config.

    weights, model_config (what differs from the defaults, PAP's settings among the others): which
    model it is.
    """
    usual, config = ({**fields, **fields["pap"], "pap": None}
                     for fields in (vars(defaults), vars(model.config)))
    config = {k: v for k, v in config.items() if v != usual.get(k)}
    config = json.loads(json.dumps(config))               # as a row that is read back has it
    kind = kind_of(model.config)
    return dict(model=kind, kind=kind, checkpoint=str(path), weights=weights_of(model),
                model_config=config)


def load_model(path, device, flag="--ckpt", normalize="imagenet", weights="model"):
    """Rebuild the model of a checkpoint of ours, DeiT's, timm's or the released code's: a `Loaded`.

    path: a file, a folder or an https address. flag: the one that named it. normalize: of
    NORMALIZE, what a file that is not ours was trained with. weights: "model", or "ema", their
    average over the steps of the training.
    """
    checkpoint, given = common.load(path), f"{flag} {path}"
    with common.error_prefix(given):
        if "task" not in checkpoint:
            return load_foreign(checkpoint, path, device, given, normalize)
        if not checkpoint.get(weights):
            raise InputError(f"it has no {weights} weights, expected those of a training with "
                             "--ema")
        model, defaults = rebuild(checkpoint | dict(model=checkpoint[weights]))
    model = model.to(device).requires_grad_(False)
    about = describe_model(model, defaults, path)
    about["model"] += f", seed {checkpoint['args'].get('seed', '?')}" + ", ema" * (weights == "ema")
    held = {k: v for k, v in checkpoint.items() if k not in ("model", "ema", "optimizer")}
    return Loaded(model, checkpoint["task"], about, given,
                  getattr(model.config, "image_size", None), held, checkpoint["args"],
                  checkpoint.get("classes"))


def rebuild(checkpoint):
    """Rebuild the model of a checkpoint of ours; returns it and the defaults of its config."""
    task = checkpoint["task"]
    if task == SEG:
        from segmenter import SegmenterConfig, segmenter_from_checkpoint
        return segmenter_from_checkpoint(checkpoint), SegmenterConfig(2)
    if task == LM:
        from lm import LMConfig, lm_from_checkpoint
        return lm_from_checkpoint(checkpoint), LMConfig(1)
    return classifier_from_checkpoint(checkpoint), ViTConfig()


def load_foreign(checkpoint, path, device, given, normalize):
    """Rebuild a ViT of DeiT's, timm's or the released code's layout, whose file has no task."""
    from checkpoints import foreign_settings, load_weights                # other people's alone
    settings = foreign_settings(checkpoint)
    weights = checkpoint.get("model", checkpoint)
    if "head.weight" not in weights:
        raise InputError("it has no head.weight: a backbone alone classifies nothing")
    side = math.isqrt(weights["pos_embed"].shape[1] - 1)
    config = ViTConfig(**settings, **NORMALIZE[normalize], image_size=side * settings["patch_size"],
                       num_classes=len(weights["head.weight"]))
    model = ViT(config)
    load_weights(model, checkpoint)
    model = model.to(device).eval().requires_grad_(False)
    about = describe_model(model, ViTConfig(), path)
    about.update(model=f"{Path(str(path)).stem}, {about['kind']}", normalize=normalize)
    return Loaded(model, CLS, about, given, config.image_size)


def load_built(text, device, size):
    """Call the function that --model FILE.py:NAME names: a `Loaded`. size: pixels a side.

    It returns a module from pixels in [0, 1], (B, 3, size, size), to logits, (B, classes).
    """
    path, _, name = text.partition(":")
    given, name = f"--model {text}", name or "build"
    if not Path(path).is_file():
        raise InputError(f"{given}: there is no file {path}, expected FILE.py:FUNCTION")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(path).resolve().parent))              # for what it imports
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise InputError(f"{given}: {path} has no function {name}")
    torch.manual_seed(0)                                  # the same weights on every process
    model = getattr(module, name)().to(device).eval().requires_grad_(False)
    code = checksum(Path(path).read_bytes())              # an edited file is another model
    about = dict(model=text, kind=text, checkpoint=text, weights=weights_of(model),
                 model_config=dict(build=text, code=code))
    return Loaded(model, CLS, about, given, size)


@torch.no_grad()
def classes_of(m, args):
    """How many logits a classifier has, from one look at two grey images of its size."""
    logits = m.model(torch.full((2, 3, m.size, m.size), 0.5, device=args.device))
    check_logits(logits)
    return logits.shape[1]
