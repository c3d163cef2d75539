"""Read other people's weights: DeiT's and timm's ViTs, `NVlabs/FAN`, `rachtsy/KPCA_code`.

    notes = load_weights(model, common.load("deit_tiny_patch16_224.pth"), new_head=True)
    config = ViTConfig(**foreign_settings(common.load("deit_tiny_patch16_224.pth")))

RPC and symmetric attention share a state dict, so what a file says of its attention is compared
with the model's; where it says nothing, the shapes of the weights decide.
"""

import math
import re

from common import InputError, load_known
from vit import resize_pos_embed


def load_weights(model, checkpoint, new_head=False, mode="bicubic"):
    """Load weights into a classifier. Returns what was adapted, in words.

    checkpoint: of `common.load`: {"model" or "state_dict": weights, ...} or weights alone, with
    timm's names, into a FAN those of `NVlabs/FAN`; S of Scaled Attention is `attn.s`, as released.
    What a file holds besides is named and left out: `common.load_known`. A ViT's positions of
    another image size are interpolated (mode: bicubic as DeiT, bilinear as Segmenter). new_head:
    keep the model's own head when the classes differ (fine-tuning). Raises InputError if they do
    not fit.
    """
    c, own, notes = model.config, model.state_dict(), []
    weights = weights_in(checkpoint)
    theirs = released_attention(checkpoint.get("args"), c.depth)
    ours = {name: getattr(c, name) for name in theirs}
    if ours != theirs:                                  # its weights would load all the same
        raise InputError(f"the file was trained with {theirs}, the model has {ours}")
    drop_unused_queries(c, weights)

    # What another image size and other classes change.
    positions, head = weights.get("pos_embed"), weights.get("head.weight")
    if positions is not None and "pos_embed" in own and positions.shape[1] != c.num_tokens:
        side, was = c.image_size // c.patch_size, math.isqrt(positions.shape[1] - 1) * c.patch_size
        notes.append(f"positions interpolated from {positions.shape[1]} to {c.num_tokens} tokens; "
                     f"--image_size {was} is what they were trained for")
        weights["pos_embed"] = resize_pos_embed(positions, (side, side), mode)
    if not c.num_classes:
        weights = {name: w for name, w in weights.items() if not name.startswith("head.")}
    elif head is not None and head.shape != own["head.weight"].shape and new_head:
        notes.append(f"new head for {c.num_classes} classes (the file has {len(head)})")
        weights["head.weight"], weights["head.bias"] = own["head.weight"], own["head.bias"]
    load_known(model, weights)
    return notes


def weights_in(checkpoint):
    """Return the weights in a checkpoint, as a new dict, by the names that they have here."""
    held = "model" if "model" in checkpoint else "state_dict"
    weights = checkpoint.get(held, checkpoint)
    return {re.sub(r"\.attn\.s$", ".attn.learned.s", name): w for name, w in weights.items()}


def drop_unused_queries(config, weights):
    """Leave out what `rachtsy/KPCA-S` projects in layer 0 of Sym/Asym (App. E.9) and never uses."""
    for i in config.rpc_layers if config.attn == "sym_asym" else ():
        for name in (f"blocks.{i}.attn.qkv.{end}" for end in ("weight", "bias")):
            if name in weights and len(weights[name]) == 3 * config.embed_dim:
                weights[name] = weights[name][config.embed_dim:]            # rows q, k, v -> k, v


def flags_for(checkpoint, sizes):
    """Return the flags of train_cls.py that a ViT's weights need: model, patch_size, image_size.

    sizes: {name of --model: settings}, as vit.SIZES; model is left out if it is none of those. {}
    for a FAN, a language model and foreign files without a ViT.
    """
    config = checkpoint.get("model_config")
    if config is None:
        try:
            config = foreign_settings(checkpoint)
        except InputError:
            return {}
        side = math.isqrt(weights_in(checkpoint)["pos_embed"].shape[1] - 1)
        config["image_size"] = side * config["patch_size"]
    if "cls_depth" in config or "patch_size" not in config:             # a FAN, no classifier
        return {}
    models = [name for name, size in sizes.items()
              if all(size[key] == config[key] for key in ("embed_dim", "depth"))]
    return dict({"model": name for name in models}, patch_size=config["patch_size"],
                image_size=config["image_size"])


def released_attention(args, depth):
    """Read the attention in the args of a file of `rachtsy/KPCA_code`: as in ViTConfig, or {}."""
    if not hasattr(args, "num_iter") or not hasattr(args, "lambd"):
        return {}
    if not getattr(args, "robust", False):
        return dict(attn="symmetric")
    layer = getattr(args, "layer", 0)
    layers = tuple(range(depth)) if layer == -1 else (layer,)
    pap = dict(n_iter=args.num_iter, lambd=args.lambd, form="released")
    return dict(attn="rpc", rpc_layers=layers, pap=pap)


def foreign_settings(checkpoint):
    """Read what a foreign file says of its ViT, as a dict of ViTConfig's names.

    Files of `rachtsy/KPCA_code` name their attention; the rest is read off the shapes: DeiT and
    timm have softmax attention (3C rows in qkv; with S: Scaled Attention), heads of width 64.
    InputError where it is neither.
    """
    weights = weights_in(checkpoint)
    names = ("pos_embed", "patch_embed.proj.weight", "blocks.0.mlp.fc1.weight",
             "blocks.0.attn.qkv.weight")                            # timm's, as DeiT's
    if not set(names) <= set(weights):
        raise InputError(f"not ViT weights: expected {', '.join(names)}, ..., got "
                         f"{', '.join(list(weights)[:4]) or 'nothing'}, ...")
    patch, fc1, qkv = (weights[name] for name in names[1:])
    C, depth = len(patch), len({k.split(".")[1] for k in weights if k.startswith("blocks.")})
    attention = released_attention(checkpoint.get("args"), depth)
    if not attention and len(qkv) == 3 * C:
        S = weights.get("blocks.0.attn.learned.s")
        kind = "softmax" if S is None else "scaled_s" if S.ndim == 3 else "scaled_alpha"
        attention = dict(attn=kind)
    if not attention:
        raise InputError("a backbone with 2C rows in qkv is symmetric or RPC; this file does not "
                         "say which, nor n and lambda, and the weights do not tell them apart")
    return dict(embed_dim=C, depth=depth, num_heads=max(1, C // 64), patch_size=patch.shape[-1],
                mlp_ratio=len(fc1) / C, **attention)
