"""Rebuild models from files: our checkpoints, other projects' ViTs, and a user's own function.

    m = load_checkpoint("out/first", "cpu")                         # ours, or another project's
    m = load_built("my.py:build", "cpu", size=224)                  # any classifier
    notes = load_weights(model, file, new_head=True)                # to fine-tune DeiT, timm, FAN

Other projects: DeiT and timm ViTs, `NVlabs/FAN`, `rachtsy/KPCA_code`. Their files do not store all
settings: the number of heads, the epsilon of the norms and the normalisation of the pixels are
missing. `foreign_vit` assumes the usual values and returns one sentence per assumption. Its
arguments replace the assumed values.
"""

import importlib.util
import inspect
import json
import math
import re
import sys
import types
import zlib
from pathlib import Path
from typing import NamedTuple

import common
import torch

from attention import PAP_SETTINGS
from common import InputError, load_known, one_of, print0
from vit import ViT, ViTConfig, classifier_from_checkpoint, resize_pos_embed

CLS, SEG, LM = "classification", "segmentation", "language modelling"
# Mean and standard deviation per channel that normalise pixels in [0, 1].
NORMALIZE = dict(imagenet=dict(mean=ViTConfig.mean, std=ViTConfig.std),
                 half=dict(mean=(0.5,) * 3, std=(0.5,) * 3))
# Names under which training programs store the weights of a model.
WEIGHTS = ("model", "state_dict", "model_state_dict", "module", "net")
# Parts that some timm ViTs have outside their blocks. vit.py does not have these parts, so it would
# compute another output.
UNKNOWN_PARTS = ("patch_embed.", "norm_pre.", "fc_norm.", "pre_logits.", "dist_token", "reg_token",
                 "attn_pool.")


def foreign_vit(checkpoint, weights="model", num_heads=None, eps=None, normalize="imagenet",
                image_size=None):
    """Rebuild the ViT in a checkpoint of another project, to evaluate it.

    checkpoint: a dict from `common.load`. weights: "model", or "ema" for the average of the weights
    over the training steps. num_heads, eps (of every LayerNorm), normalize (a key of `NORMALIZE`):
    values that the file does not store. image_size: pixels per side (default: the trained size);
    the position embeddings are interpolated to this size.

    Returns:
        the ViT in eval mode; it takes pixels in [0, 1]
        dict(weights, num_heads, eps, normalize): the settings for a result row
        a list of sentences, one per assumption
    InputError if the file does not contain weights of a ViT.
    """
    one_of("normalize", normalize, NORMALIZE)
    state, settings = find_weights(checkpoint, weights), foreign_settings(checkpoint, weights)
    if "head.weight" not in state:
        raise InputError("the file has no head.weight: a backbone without a head cannot classify")
    notes = []
    if num_heads is None:
        notes.append(f"--num_heads {settings['num_heads']} is assumed, because the tokens are "
                     f"{settings['embed_dim']} wide and heads of most ViTs are 64 wide")
    if eps is None:
        notes.append(f"--norm_eps {ViTConfig.eps:g} is assumed, as in DeiT and timm")
    if normalize == "imagenet":
        notes.append("--normalize imagenet is assumed, as in DeiT")
    settings.update(num_heads=settings["num_heads"] if num_heads is None else num_heads,
                    eps=ViTConfig.eps if eps is None else eps,
                    image_size=image_size or trained_size(state))
    config = ViTConfig(**settings, **NORMALIZE[normalize], num_classes=len(state["head.weight"]))
    model = ViT(config)
    notes += load_weights(model, checkpoint, weights=weights)
    row = dict(weights=weights, num_heads=config.num_heads, eps=config.eps, normalize=normalize)
    return model.eval(), row, notes


def load_weights(model, checkpoint, new_head=False, mode="bicubic", weights="model"):
    """Load the weights of a checkpoint into a classifier; return one sentence per adaptation.

    checkpoint: a dict from `common.load`. Its weights have timm's names, or, for a FAN, the names
    of `NVlabs/FAN`. new_head: keep the model's own head if the number of classes differs, to
    fine-tune. mode: how position embeddings are interpolated to another image size (bicubic in
    DeiT, bilinear in Segmenter). weights: "model" or "ema". InputError if the weights do not fit
    the model.
    """
    c, own, notes = model.config, model.state_dict(), []
    if checkpoint.get("task", CLS) != CLS:
        raise InputError(f"the file's task is {checkpoint['task']}, expected {CLS}: only a "
                         f"classifier's checkpoint has the weights of this network")
    state = find_weights(checkpoint, weights)

    # RPC and symmetric attention have weights of equal shapes: compare the stored attention, too.
    stored = released_attention(checkpoint.get("args"), c.depth)
    ours = {name: getattr(c, name) for name in stored}
    if ours != stored:
        raise InputError(f"the file was trained with {stored}, but the model has {ours}")
    drop_unused_queries(c, state)
    unknown = [name for name in state if name not in own and name.startswith(UNKNOWN_PARTS)]
    if unknown:
        raise InputError(f"the file has {', '.join(unknown[:4])}, which this model does not "
                         f"compute; expected a plain ViT with one class token")

    # Adapt the position embeddings to another image size, and the head to other classes.
    positions, head = state.get("pos_embed"), state.get("head.weight")
    if positions is not None and "pos_embed" in own and positions.shape[1] != c.num_tokens:
        side = c.image_size // c.patch_size
        trained = math.isqrt(positions.shape[1] - 1) * c.patch_size
        notes.append(f"The positions are interpolated from {positions.shape[1]} to {c.num_tokens} "
                     f"tokens; the file was trained with --image_size {trained}.")
        state["pos_embed"] = resize_pos_embed(positions, (side, side), mode)
    if not c.num_classes:
        state = {name: w for name, w in state.items() if not name.startswith("head.")}
    elif head is not None and head.shape != own["head.weight"].shape and new_head:
        notes.append(f"The head for {c.num_classes} classes is new; the file has {len(head)}.")
        state["head.weight"], state["head.bias"] = own["head.weight"], own["head.bias"]
    load_known(model, state)
    return notes


# --- find the weights in a file -------------------------------------------------------------------

def find_weights(checkpoint, weights="model"):
    """Return the weights in a checkpoint as a new dict with the names that vit.py and fan.py use.

    weights: "model", stored under one of the names in `WEIGHTS`, or directly as the checkpoint; or
    "ema", the average over the training steps, stored as "model_ema", "state_dict_ema" or "ema". A
    prefix that a wrapper puts before each name ("module.", "_orig_mod.") is removed. InputError if
    the file does not contain these weights.
    """
    def holds_weights(x):
        return isinstance(x, dict) and any(torch.is_tensor(w) for w in x.values())

    one_of("weights", weights, ("model", "ema"))
    names = WEIGHTS if weights == "model" else ("model_ema", "state_dict_ema", "ema")
    alone = {"model": checkpoint} if holds_weights(checkpoint) else {}
    state = next((x for x in map({**checkpoint, **alone}.get, names) if holds_weights(x)), None)
    if state is None:
        held = "weights alone" if alone else ", ".join(checkpoint) or "nothing"
        raise InputError(f"the file has no weights named {' or '.join(names)}; it holds "
                         f"{held:.200}. Expected a dict of tensors under such a name, or alone, as "
                         f"torch.save(model.state_dict(), FILE) writes it")
    prefixes = [name.removesuffix("cls_token") for name in state if name.endswith("cls_token")]
    if len(prefixes) > 1:
        raise InputError(f"the file holds several networks, {', '.join(prefixes)}; expected one")
    state = {name.removeprefix("".join(prefixes)): w for name, w in state.items()}

    # The released code stores S of Scaled Attention as attn.s, ours as attn.learned.s.
    return {re.sub(r"\.attn\.s$", ".attn.learned.s", name): w for name, w in state.items()}


def drop_unused_queries(config, state):
    """Remove weights that `rachtsy/KPCA-S` stores but never uses, from `state` in place.

    The weights project queries in the RPC layers of Sym/Asym (App. E.9), where the keys are the
    queries.
    """
    for i in config.rpc_layers if config.attn == "sym_asym" else ():
        for name in (f"blocks.{i}.attn.qkv.{end}" for end in ("weight", "bias")):
            if name in state and len(state[name]) == 3 * config.embed_dim:
                state[name] = state[name][config.embed_dim:]            # rows q, k, v -> k, v


# --- read the settings of a file ------------------------------------------------------------------

def foreign_settings(checkpoint, weights="model"):
    """Read the settings of the ViT in a foreign checkpoint: a dict of fields of ViTConfig.

    Files of `rachtsy/KPCA_code` store their attention. For other files the shapes decide: if qkv
    has 3C rows, as in DeiT and timm, the attention is softmax, or Scaled Attention if there is a
    weight S. The heads are assumed to be 64 wide. InputError if the file contains no ViT, or if the
    attention remains unknown.
    """
    state = find_weights(checkpoint, weights)
    names = ("pos_embed", "patch_embed.proj.weight", "blocks.0.mlp.fc1.weight",
             "blocks.0.attn.qkv.weight")
    if not set(names) <= set(state):
        raise InputError(f"not ViT weights: expected {', '.join(names)}, ..., got "
                         f"{', '.join(list(state)[:4])}, ...")
    patch, fc1, qkv = (state[name] for name in names[1:])
    C, depth = len(patch), len({k.split(".")[1] for k in state if k.startswith("blocks.")})
    attention = released_attention(checkpoint.get("args"), depth)
    if not attention and len(qkv) == 3 * C:
        S = state.get("blocks.0.attn.learned.s")
        kind = "softmax" if S is None else "scaled_s" if S.ndim == 3 else "scaled_alpha"
        attention = dict(attn=kind)
    if not attention:
        raise InputError("qkv has 2C rows, so the attention is symmetric or RPC; the file does not "
                         "store which, and the weights do not show it: expected `args` with "
                         "num_iter and lambd, as in files of rachtsy/KPCA_code")
    return dict(embed_dim=C, depth=depth, num_heads=max(1, C // 64), patch_size=patch.shape[-1],
                mlp_ratio=len(fc1) / C, **attention)


def trained_size(state):
    """Return the image size in pixels that a ViT's positions and patches were trained for."""
    return math.isqrt(state["pos_embed"].shape[1] - 1) * state["patch_embed.proj.weight"].shape[-1]


def released_attention(args, depth):
    """Return the attention of a file of `rachtsy/KPCA_code` as fields of ViTConfig.

    args: the flags stored in the file. Returns {} if the flags do not describe an attention.
    """
    if not hasattr(args, "num_iter") or not hasattr(args, "lambd"):
        return {}
    if not getattr(args, "robust", False):
        return dict(attn="symmetric")
    layer = getattr(args, "layer", 0)
    layers = tuple(range(depth)) if layer == -1 else (layer,)
    pap = dict(n_iter=args.num_iter, lambd=args.lambd, form="released")
    return dict(attn="rpc", rpc_layers=layers, pap=pap)


def flags_for(checkpoint, sizes):
    """Return flags of train_cls.py that fit a ViT's weights: model, patch_size, image_size.

    sizes: {name of --model: settings}, such as vit.SIZES. `model` is left out if no size matches.
    Returns {} if the checkpoint contains no ViT.
    """
    if "task" in checkpoint:                                            # written by our trainers
        config = checkpoint["model_config"]
        if checkpoint["task"] != CLS or checkpoint.get("architecture") == "fan":
            return {}
    else:
        try:
            config = foreign_settings(checkpoint)
        except InputError:                          # load_weights raises the same error later
            return {}
        config["image_size"] = trained_size(find_weights(checkpoint))
    models = {"model": name for name, size in sizes.items()
              if all(size[key] == config[key] for key in ("embed_dim", "depth"))}
    return dict(models, patch_size=config["patch_size"], image_size=config["image_size"])


# --- models to evaluate ---------------------------------------------------------------------------

class Loaded(NamedTuple):
    """A model and what its checkpoint stores."""
    model: torch.nn.Module               # in eval mode, its parameters frozen
    task: str
    about: dict                          # the model's fields of each row
    given: str                           # the flag and the path, for errors
    size: int | None                     # pixels per side of its images
    origin: str = "ours"                 # or "foreign" (another project) or "function" (--model)
    checkpoint: dict = {}                # our checkpoint without its weights
    trained: dict = {}                   # the flags of its training
    classes: list | None = None          # class names


def checksum(data):
    """Return eight hexadecimal digits for bytes."""
    return f"{zlib.crc32(data):08x}"


def weights_checksum(model):
    """Return a checksum of a model's weights."""
    tensors = (t.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
               for t in model.state_dict().values())
    return checksum(b"".join(tensors))


def kind_of(config):
    """Describe a model's attention: softmax, fan symmetric, rpc 4iter/layer0, rpc 2iter/all-layer.

    Layers are counted from 0.
    """
    family = getattr(config, "family", "")
    if not config.rpc_layers:
        return family + config.attn
    layers = "layer" + ",".join(map(str, config.rpc_layers))
    if len(config.rpc_layers) == config.depth:
        layers = "all-layer"
    name = f"{family}{config.attn} {config.pap['n_iter']}iter/{layers}"
    if config.pap["lambd"] != PAP_SETTINGS["lambd"]:
        name += f", lambda {config.pap['lambd']:g}"
    if config.pap["form"] != PAP_SETTINGS["form"]:
        name += f", form {config.pap['form']}"
    return name


def describe_model(model, defaults, path):
    """Return the model's fields of a row. defaults: a config; only differences from it are kept."""
    usual, config = ({**fields, **fields["pap"], "pap": None}
                     for fields in (vars(defaults), vars(model.config)))
    config = {k: v for k, v in config.items() if v != usual.get(k)}
    config = json.loads(json.dumps(config))               # tuples become lists, as in a stored row
    kind = kind_of(model.config)
    return dict(model=kind, kind=kind, checkpoint=str(path), weights=weights_checksum(model),
                model_config=config)


def load_checkpoint(path, device, flag="--ckpt", weights="model", **foreign):
    """Rebuild the model of a checkpoint: a `Loaded`.

    path: a file, a folder or an https address. weights: "model", or "ema" for their average over
    the training steps. foreign: arguments of `foreign_vit`, for checkpoints of other projects.
    """
    checkpoint, given = common.load(path), f"{flag} {path}"
    with common.error_prefix(given):
        if "task" not in checkpoint:
            return load_foreign(checkpoint, path, device, given, weights, foreign)
        if not checkpoint.get(weights):
            raise InputError(f"the checkpoint has no {weights} weights; train with --ema to store "
                             f"them")
        model, defaults = rebuild_ours(checkpoint | dict(model=checkpoint[weights]))
    model = model.to(device).requires_grad_(False)
    about = describe_model(model, defaults, path)
    about["model"] += f", seed {checkpoint['args'].get('seed', '?')}" + ", ema" * (weights == "ema")
    stored = {k: v for k, v in checkpoint.items() if k not in ("model", "ema", "optimizer")}
    return Loaded(model, checkpoint["task"], about, given,
                  getattr(model.config, "image_size", None), "ours", stored, checkpoint["args"],
                  checkpoint.get("classes"))


def rebuild_ours(checkpoint):
    """Rebuild the model of our checkpoint; return it and a config with the defaults."""
    if checkpoint["task"] == SEG:
        from segmenter import SegmenterConfig, segmenter_from_checkpoint
        return segmenter_from_checkpoint(checkpoint), SegmenterConfig(2)
    if checkpoint["task"] == LM:
        from lm import LMConfig, lm_from_checkpoint
        return lm_from_checkpoint(checkpoint), LMConfig(1)
    if checkpoint.get("architecture") == "fan":
        from fan import fan_from_checkpoint
        return fan_from_checkpoint(checkpoint), ViTConfig()
    return classifier_from_checkpoint(checkpoint), ViTConfig()


def load_foreign(checkpoint, path, device, given, weights, foreign):
    """Rebuild a ViT of DeiT, timm or the released code; print what is assumed about it."""
    model, settings, notes = foreign_vit(checkpoint, weights, **foreign)
    for note in notes:
        print0(f"{given}: {note}")
    model = model.to(device).requires_grad_(False)
    about = settings | describe_model(model, ViTConfig(), path) | dict(assumed=notes)
    average = ", ema" * (settings["weights"] == "ema")
    about["model"] = f"{Path(str(path)).stem}, {about['kind']}{average}"
    return Loaded(model, CLS, about, given, model.config.image_size, "foreign")


class Built(torch.nn.Module):
    """A user's classifier `net`, from float32 pixels to logits in float32 or wider.

    net may compute in another dtype, and may return its logits in a tuple, a dict or an object.
    """

    def __init__(self, net, given):
        super().__init__()
        self.net, self.given = net, given
        self.dtype = next((p.dtype for p in net.parameters() if p.is_floating_point()),
                          torch.float32)
        for name in ("mean", "std"):                      # for --preset paper
            value = getattr(net, name, None)
            if torch.is_tensor(value):
                self.register_buffer(name, value.detach(), persistent=False)

    def forward(self, x):
        logits = self.net(x.to(self.dtype))
        if isinstance(logits, dict):
            logits = logits.get("logits", logits)
        logits = getattr(logits, "logits", logits)
        if isinstance(logits, (tuple, list)):
            logits = logits[0]
        if not torch.is_tensor(logits) or logits.ndim != 2 or len(logits) != len(x):
            found = (f"a dict with the keys {', '.join(map(str, logits))}"
                     if isinstance(logits, dict) else f"a tensor {tuple(logits.shape)}"
                     if torch.is_tensor(logits) else f"a {type(logits).__name__}")
            raise InputError(f"{self.given} returns {found}, expected logits (B, classes): a "
                             "tensor, the first entry of a tuple, or an entry named logits")
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


def import_file(path):
    """Import a user's Python file, a Path; return the module.

    The file's folder becomes a package, so that relative imports work, and joins sys.path, so that
    `import sibling` works. The module joins sys.modules, where its dataclasses look for it.
    """
    folder = str(path.resolve().parent)
    package = types.ModuleType(f"user_model_{checksum(folder.encode())}")
    package.__path__ = [folder]
    sys.modules[package.__name__] = package
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(f"{package.__name__}.{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def load_built(text, device, size):
    """Call the function that --model FILE.py:NAME names: a `Loaded`. size: pixels per side."""
    path, _, name = text.partition(":")
    given, name, path = f"--model {text}", name or "build", Path(path)
    if not path.is_file():
        raise InputError(f"{given}: {path} is not a file, expected FILE.py:FUNCTION")
    code, module = checksum(path.read_bytes()), import_file(path)
    if not hasattr(module, name):
        raise InputError(f"{given}: {path} has no function {name}")
    build = getattr(module, name)
    if isinstance(build, torch.nn.Module) or not callable(build):
        raise InputError(f"{given}: {name} is a {type(build).__name__}, expected a function "
                         f"without arguments that returns an nn.Module")
    needed = [p.name for p in inspect.signature(build).parameters.values()
              if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if needed:
        raise InputError(f"{given}: {name} needs the arguments {', '.join(needed)}, expected a "
                         f"function without arguments; give each argument a default, or add such "
                         f"a function")

    torch.manual_seed(0)                                  # the same weights on every process
    net = build()
    if not isinstance(net, torch.nn.Module):
        raise InputError(f"{given}: {name} returns a {type(net).__name__}, expected an nn.Module")
    model = Built(net, given).to(device).eval().requires_grad_(False)
    about = dict(model=text, kind=text, checkpoint=text, weights=weights_checksum(net),
                 model_config=dict(build=text, code=code))    # an edited file is another model
    return Loaded(model, CLS, about, given, size, "function")
