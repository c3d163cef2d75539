"""Read other people's weights: DeiT's and timm's ViTs, `NVlabs/FAN`, `rachtsy/KPCA_code`.

A file's attention has to be the model's: RPC and symmetric weights look alike, so what the file
says of its own is compared, and where it says nothing the shapes are. Positions of another image
size are interpolated.

    notes = load_weights(model, common.load("deit_tiny_patch16_224.pth"), new_head=True)
    config = ViTConfig(**foreign_settings(common.load("deit_tiny_patch16_224.pth")))
"""

import math

import torch
import torch.nn.functional as F

from common import InputError, load, load_strictly

VIT_NAMES = ("pos_embed", "patch_embed.proj.weight", "blocks.0.mlp.fc1.weight",
             "blocks.0.attn.qkv.weight")                            # timm's, as DeiT's


def load_weights(model, checkpoint, new_head=False, mode="bicubic"):
    """Load weights into a classifier strictly or raise InputError. Returns what was adapted.

    checkpoint: of `common.load`: {"model" or "state_dict": weights, ...} or weights alone, with
    timm's names, into a FAN those of `NVlabs/FAN`. A ViT's positions of another image size are
    interpolated (mode: bicubic as DeiT, bilinear as Segmenter). new_head: keep the model's own head
    when the classes differ (fine-tuning).
    """
    c, own, notes = model.config, model.state_dict(), []
    held = "model" if "model" in checkpoint else "state_dict"
    weights = dict(checkpoint.get(held, checkpoint) or {})
    drop_unused_queries(c, weights)
    if "pos_embed" in own:
        check_vit(c, own, weights, checkpoint.get("args"))
    else:
        check_fan(c, own, weights)

    # What another image size and other classes change.
    if "pos_embed" in own and weights["pos_embed"].shape != own["pos_embed"].shape:
        tokens, side = weights["pos_embed"].shape[1], c.image_size // c.patch_size
        notes.append(f"positions interpolated from {tokens} to {c.num_tokens} tokens")
        weights["pos_embed"] = resize_pos_embed(weights["pos_embed"], (side, side), mode)
    head = weights.get("head.weight")
    if not c.num_classes:
        weights = {name: w for name, w in weights.items() if not name.startswith("head.")}
    elif head is not None and head.shape != own["head.weight"].shape:
        if not new_head:
            raise InputError(f"weights are for {len(head)} classes, the model for {c.num_classes}")
        notes.append(f"new head for {c.num_classes} classes (the file has {len(head)})")
        weights["head.weight"], weights["head.bias"] = own["head.weight"], own["head.bias"]
    load_strictly(model, weights)
    return notes


def drop_unused_queries(config, weights):
    """Leave out what `rachtsy/KPCA-S` projects in layer 0 of Sym/Asym (App. E.9) and never uses."""
    for i in config.rpc_layers if config.attn == "sym_asym" else ():
        for name in (f"blocks.{i}.attn.qkv.{end}" for end in ("weight", "bias")):
            if name in weights and len(weights[name]) == 3 * config.embed_dim:
                weights[name] = weights[name][config.embed_dim:]            # rows q, k, v -> k, v


TYPO = " (348 is the released code's typo for DeiT-small's 384; train at 384 instead)"


def check_vit(config, own, weights, args):
    """Refuse weights of another width, other projections, learned S or settings than the model's.

    own: the model's state dict. args: those of a file of `rachtsy/KPCA_code`, or anything.
    """
    if "dist_token" in weights:
        raise InputError("distilled DeiT weights (dist_token, head_dist) hold a second token, "
                         "which this ViT has not; use the files without 'distilled' in their name")
    check_names(weights, "ViT", *VIT_NAMES)
    theirs = released_attention(args, config.depth)
    ours = {name: getattr(config, name) for name in theirs}
    if ours != theirs:
        raise InputError(f"the file was trained with {theirs}, the model has {ours}")
    C = weights["cls_token"].shape[-1]
    if C != config.embed_dim:
        raise InputError(f"weights have width {C}, the model has embed_dim={config.embed_dim}"
                         f"{TYPO if C == 348 else ''}")
    for name in (name for name in own if name in weights):
        held, needed = weights[name].shape, own[name].shape
        if name.endswith("qkv.weight") and held != needed:
            raise InputError(f"{name} holds {held[0] // C}C rows (q, k, v or k, v), but "
                             f"attn={config.attn!r} needs {needed[0] // C}C there: softmax and "
                             f"symmetric weights do not fit each other")
        if name.endswith("attn.s") and held != needed:
            raise InputError(f"{name} has shape {tuple(held)}, the model needs {tuple(needed)}: "
                             f"a learned S belongs to one attention kind and one number of tokens")


def check_fan(config, own, weights):
    """Refuse weights but a FAN's with queries where the model, `own`, has them."""
    check_names(weights, "FAN", "pos_embed.token_projection.weight", "blocks.0.attn.kv.weight")
    for name in (f"blocks.{i}.attn.q.weight" for i in range(config.depth)):
        if (name in weights) != (name in own):
            theirs = "a" if name in weights else "no"
            raise InputError(f"the file has {theirs} {name}, unlike attn={config.attn!r}: softmax "
                             f"and symmetric weights do not fit each other")


def check_names(weights, family, *names):
    """Refuse weights without this family's names, such as these."""
    if not {"cls_token", *names} <= set(weights):
        found = ", ".join(list(weights)[:4]) or "nothing"
        raise InputError(f"not {family} weights: expected cls_token, {', '.join(names)}, ..., got "
                         f"{found}, ...")


def resize_pos_embed(pos_embed, grid, mode):
    """Interpolate positions (1, 1 + side * side, C) for a grid (h, w), but the class token's.

    mode: of F.interpolate. Raises InputError if they are of no square.
    """
    side = math.isqrt(pos_embed.shape[1] - 1)
    if side * side != pos_embed.shape[1] - 1:
        raise InputError(f"pos_embed has {pos_embed.shape[1]} positions, expected 1 + {side} x "
                         f"{side}")
    patches = pos_embed[:, 1:].mT.unflatten(2, (side, side))
    patches = F.interpolate(patches, size=tuple(grid), mode=mode, align_corners=False)
    return torch.cat([pos_embed[:, :1], patches.flatten(2).mT], 1)


def start_from(model, path, sizes):
    """Load the weights that --init_from names. Returns what was adapted, as `load_weights`.

    Raises InputError that says which flags they need. sizes: as in `flags_for`.
    """
    checkpoint = load(path)
    try:
        return load_weights(model, checkpoint, new_head=True)
    except InputError as e:
        needed = " ".join(f"--{k} {v}" for k, v in flags_for(checkpoint, sizes).items())
        needed = needed and f"; this file's weights need {needed}"
        raise InputError(f"--init_from {path}: {e}{needed}") from None


def flags_for(checkpoint, sizes):
    """Read off a ViT's weights the flags of train_cls.py that they need; {} of other files.

    sizes: {name of --model: settings}, as vit.SIZES. Returns patch_size, attn in words and, if it
    is one of ours, model.
    """
    weights = checkpoint.get("model", checkpoint)
    if not set(VIT_NAMES) <= set(weights):
        return {}
    patch, qkv = weights["patch_embed.proj.weight"], weights["blocks.0.attn.qkv.weight"]
    depth = len({name.split(".")[1] for name in weights if name.startswith("blocks.")})
    models = [name for name, size in sizes.items()
              if (size["embed_dim"], size["depth"]) == (len(patch), depth)]
    attn = "softmax" if len(qkv) == 3 * len(patch) else "symmetric (or rpc)"
    return {**{"model": name for name in models}, "patch_size": patch.shape[-1], "attn": attn}


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
    timm have softmax attention (3C rows in qkv), heads of width 64. Raises InputError if that is
    too little.
    """
    weights = checkpoint.get("model", checkpoint)
    check_names(weights, "ViT", *VIT_NAMES)
    patch, fc1, qkv = (weights[name] for name in VIT_NAMES[1:])
    C, depth = len(patch), len({k.split(".")[1] for k in weights if k.startswith("blocks.")})
    if C == 348:
        raise InputError(f"weights have width {C}{TYPO}")
    attention = released_attention(checkpoint.get("args"), depth) or dict(attn="softmax")
    if attention["attn"] == "softmax" and len(qkv) != 3 * C:
        raise InputError("a backbone with 2C rows in qkv is symmetric or RPC; this file does not "
                         "say which, nor n and lambda, and the weights do not tell them apart")
    return dict(embed_dim=C, depth=depth, num_heads=max(1, C // 64), patch_size=patch.shape[-1],
                mlp_ratio=len(fc1) / C, **attention)
