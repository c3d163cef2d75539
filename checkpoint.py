"""Checkpoints and logs on disk: written whole or not at all, read without running code in them.

Then weights: into a model that they fit, ours and foreign ones (DeiT, timm, `rachtsy/KPCA_code`).
"""

import argparse
import json
import math
import os
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from urllib.error import URLError

import torch
import torch.nn.functional as F

TASKS = {"train_cls.py": "classification", "train_seg.py": "segmentation",
         "train_lm.py": "language modelling"}
VIT_NAMES = ("pos_embed", "patch_embed.proj.weight", "blocks.0.mlp.fc1.weight",
             "blocks.0.attn.qkv.weight")                            # timm's, as DeiT's


# --- files ----------------------------------------------------------------------------------------

def save_checkpoint(path, checkpoint):
    """Write a dict of plain types and tensors; at every moment path is the old file or the new one.

    Raises OSError naming the file if it cannot be written (a full disk); the old one is untouched.
    """
    path = Path(path)
    tmp = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(tmp, "wb") as f:
            torch.save(checkpoint, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
    except (OSError, RuntimeError) as e:
        tmp.unlink(missing_ok=True)
        kept = "the previous one is untouched" if path.exists() else "there is none yet"
        hidden = getattr(e.__context__, "strerror", None)               # torch.save hides it
        why = hidden or getattr(e, "strerror", None) or e
        raise OSError(f"cannot write checkpoint {path} ({why}); {kept}") from None


def read_checkpoint(path):
    """The dict in a checkpoint of ours, DeiT's or the released code's; tensors on the CPU.

    Runs nothing that it holds. path: a file, a folder with last.pt in it, or an https address.
    """
    load = torch.load
    if str(path).startswith("https://"):
        load, path = torch.hub.load_state_dict_from_url, str(path)
    else:
        path = Path(path) / "last.pt" if Path(path).is_dir() else Path(path)
        if not path.exists():
            raise FileNotFoundError(f"no checkpoint at {path}")
        open(path, "rb").close()                       # a file that may not be read says so itself
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):     # the released code's args
            checkpoint = load(path, map_location="cpu", weights_only=True)
    except Exception as e:                             # what odd bytes raise depends on the bytes
        why = "truncated, or no file of torch.save"
        if isinstance(e, URLError):
            why = str(e.reason)
        elif "GLOBAL" in str(e):
            why = f"it holds {str(e).split('GLOBAL')[1].split()[0]}, which is no plain data"
        raise ValueError(f"{path} is not a readable checkpoint ({why})") from None
    if not isinstance(checkpoint, dict):
        raise ValueError(f"{path} holds a {type(checkpoint).__name__}, expected a dict of weights")
    return checkpoint


def check_run(checkpoint, path, script, *parts):
    """ValueError naming the file unless its checkpoint is of this script and holds these parts."""
    kinds = dict(args=dict, model=dict, model_config=dict, optimizer=dict, ema=dict, best=dict,
                 step=int, classes=list, vocab=str)
    if checkpoint.get("task") != TASKS[script]:
        raise ValueError(f"{path} is not a checkpoint of {script}")
    for name in parts:
        value = checkpoint.get(name)
        if not isinstance(value, kinds[name]) or value == {}:
            raise ValueError(f"{path} is an incomplete checkpoint of {script}: it has no {name}")


def read_run(args, script, *parts, classes=None):
    """The checkpoint that --resume names, with these parts; of a run on the same classes."""
    checkpoint = read_checkpoint(args.resume)
    if not checkpoint.get("optimizer"):
        raise ValueError(f"{args.resume} holds no optimiser state; continue from last.pt")
    check_run(checkpoint, args.resume, script, "model", "step", *parts)
    if classes and checkpoint["classes"] != classes:
        names = checkpoint["classes"]
        raise ValueError(f"--data_dir {args.data_dir} has {len(classes)} classes, not those of the "
                         f"run in {args.resume} ({len(names)}, {', '.join(names[:3])}, ...)")
    return checkpoint


@contextmanager
def naming(what):
    """Input errors within begin with `what`, the flag and the file they are about."""
    try:
        yield
    except ValueError as e:
        raise ValueError(f"{what}: {e}") from None


# --- logs -----------------------------------------------------------------------------------------

def write_log(path, row):
    """Append one JSON line."""
    try:
        with open(path, "a") as f:
            f.write(json.dumps(row) + "\n")
    except OSError as e:
        raise OSError(f"cannot write {path} ({e.strerror})") from None


def read_log(path):
    """The rows of a log, without one cut short by a kill; ValueError names what is no log."""
    rows = []
    try:
        lines = Path(path).read_text("utf-8").splitlines() if Path(path).exists() else []
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a log of ours: not all of it is UTF-8") from None
    for i, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if not isinstance(row, dict) or not isinstance(row.get("step", 0), int):
            raise ValueError(f"{path}, line {i}: {line[:60]}, expected an object whose step is a "
                             f"whole number")
        rows.append(row)
    return rows


def cut_log(path, step):
    """Drop what was logged after `step`: a resumed log has no step twice. Returns the rest."""
    rows = [row for row in read_log(path) if row.get("step", 0) <= step]
    tmp = Path(f"{path}.tmp")
    try:
        tmp.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.replace(tmp, path)
    except OSError as e:
        tmp.unlink(missing_ok=True)
        raise OSError(f"cannot write {path} ({e.strerror}); it is untouched") from None
    return rows


# --- weights and what they belong to --------------------------------------------------------------

def stored_config(checkpoint, config):
    """A checkpoint's model_config as the dataclass `config`; ValueError if its fields differ."""
    for name in ("model", "model_config"):
        if not isinstance(checkpoint.get(name), dict):
            raise ValueError(f"the checkpoint has no {name}")
    stored = getattr(config, "from_older", dict)(checkpoint["model_config"])
    kinds = {f.name: f.type for f in fields(config)}
    accepted = {float: (float, int), tuple: (tuple, list)}
    wrong = [f"{name} is unknown" for name in stored if name not in kinds]
    for name, kind in kinds.items():
        if name not in stored:
            wrong.append(f"{name} is missing")
        elif not isinstance(stored[name], accepted.get(kind, kind)):
            wrong.append(f"{name} is {stored[name]!r} instead of {kind.__name__}")
    if wrong:
        raise ValueError(f"its model_config is not a {config.__name__}: {'; '.join(wrong[:3])}")
    return config(**stored)


def rebuild(checkpoint, script, model, config):
    """The model of a checkpoint of `script`, in eval mode. model, config: its two classes."""
    if checkpoint.get("task") != TASKS[script]:
        raise ValueError(f"not a checkpoint of {script}")
    study = (checkpoint.get("args") or {}).get("study")
    if study:
        raise ValueError(f"its attention is that of {study}, which alone can rebuild it")
    model = model(stored_config(checkpoint, config))
    load_strictly(model, checkpoint["model"])
    return model.eval()


def load_strictly(model, weights):
    """model.load_state_dict; ValueError naming the first tensors that do not fit."""
    own = model.state_dict()
    wrong = [f"{name} is missing" for name in own if name not in weights]
    wrong += [f"{name} is unknown" for name in weights if name not in own]
    wrong += [f"{name} is {tuple(weights[name].shape)} instead of {tuple(own[name].shape)}"
              for name in own if name in weights and weights[name].shape != own[name].shape]
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(f"weights do not fit the model: {'; '.join(wrong[:3])}{more}")
    model.load_state_dict(weights)


def load_weights(model, checkpoint, new_head=False, mode="bicubic"):
    """Load weights into a classifier strictly or raise ValueError. Returns what was adapted.

    checkpoint: of `read_checkpoint`: {"model" or "state_dict": weights, ...} or weights alone, with
    timm's names, into a FAN those of `NVlabs/FAN`. A ViT's positions of another image size are
    interpolated (mode: bicubic as DeiT, bilinear as Segmenter). new_head: keep the model's own head
    when the classes differ (fine-tuning).
    """
    c, own, notes = model.config, model.state_dict(), []
    held = "model" if "model" in checkpoint else "state_dict"
    weights = dict(checkpoint.get(held, checkpoint) or {})
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
            raise ValueError(f"weights are for {len(head)} classes, the model for {c.num_classes}")
        notes.append(f"new head for {c.num_classes} classes (the file has {len(head)})")
        weights["head.weight"], weights["head.bias"] = own["head.weight"], own["head.bias"]
    load_strictly(model, weights)
    return notes


TYPO = " (348 is the released code's typo for DeiT-small's 384; train at 384 instead)"


def check_vit(config, own, weights, args):
    """ValueError unless weights have the width, projections, learned S and settings of the model.

    own: the model's state dict. args: those of a file of `rachtsy/KPCA_code`, or anything.
    """
    if "dist_token" in weights:
        raise ValueError("distilled DeiT weights (dist_token, head_dist) hold a second token, "
                         "which this ViT has not; use the files without 'distilled' in their name")
    check_names(weights, "ViT", *VIT_NAMES)
    theirs = released_attention(args, config.depth)
    ours = {name: getattr(config, name) for name in theirs}
    if ours != theirs:
        raise ValueError(f"the file was trained with {theirs}, the model has {ours}")
    C = weights["cls_token"].shape[-1]
    if C != config.embed_dim:
        raise ValueError(f"weights have width {C}, the model has embed_dim={config.embed_dim}"
                         f"{TYPO if C == 348 else ''}")
    for name in (name for name in own if name in weights):
        held, needed = weights[name].shape, own[name].shape
        if name.endswith("qkv.weight") and held != needed:
            raise ValueError(f"{name} holds {held[0] // C}C rows (q, k, v or k, v), but "
                             f"attn={config.attn!r} needs {needed[0] // C}C there: softmax and "
                             f"symmetric weights do not fit each other")
        if name.endswith("attn.s") and held != needed:
            raise ValueError(f"{name} has shape {tuple(held)}, the model needs {tuple(needed)}: "
                             f"a learned S belongs to one attention kind and one number of tokens")


def check_fan(config, own, weights):
    """ValueError unless weights are a FAN's, with queries where the model, `own`, has them."""
    check_names(weights, "FAN", "pos_embed.token_projection.weight", "blocks.0.attn.kv.weight")
    for name in (f"blocks.{i}.attn.q.weight" for i in range(config.depth)):
        if (name in weights) != (name in own):
            theirs = "a" if name in weights else "no"
            raise ValueError(f"the file has {theirs} {name}, unlike attn={config.attn!r}: softmax "
                             f"and symmetric weights do not fit each other")


def check_names(weights, family, *names):
    """ValueError unless a state dict of this family's names, such as these, is given."""
    if not {"cls_token", *names} <= set(weights):
        found = ", ".join(list(weights)[:4]) or "nothing"
        raise ValueError(f"not {family} weights: expected cls_token, {', '.join(names)}, ..., got "
                         f"{found}, ...")


def resize_pos_embed(pos_embed, grid, mode, old=None):
    """Positions (1, 1 + old h * old w, C) for a grid (h, w); that of the class token is kept.

    mode: of F.interpolate. old: (h, w), square if not given. ValueError if that does not fit.
    """
    h, w = old or [math.isqrt(pos_embed.shape[1] - 1)] * 2
    if h * w != pos_embed.shape[1] - 1:
        raise ValueError(f"pos_embed has {pos_embed.shape[1]} positions, expected 1 + {h} x {w}")
    patches = pos_embed[:, 1:].mT.unflatten(2, (h, w))
    patches = F.interpolate(patches, size=tuple(grid), mode=mode, align_corners=False)
    return torch.cat([pos_embed[:, :1], patches.flatten(2).mT], 1)


def released_attention(args, depth):
    """The attention in the args of a file of `rachtsy/KPCA_code`, as in ViTConfig; else {}."""
    if not hasattr(args, "num_iter") or not hasattr(args, "lambd"):
        return {}
    if not getattr(args, "robust", False):
        return dict(attn="symmetric")
    layer = getattr(args, "layer", 0)
    layers = tuple(range(depth)) if layer == -1 else (layer,)
    return dict(attn="rpc", rpc_layers=layers, n_iter=args.num_iter, lambd=args.lambd,
                form="released")


def foreign_settings(checkpoint):
    """What a foreign file says of its ViT, as a dict of ViTConfig's names; ValueError: too little.

    Files of `rachtsy/KPCA_code` name their attention; the rest is read off the shapes: DeiT and
    timm have softmax attention (3C rows in qkv), heads of width 64.
    """
    weights = checkpoint.get("model", checkpoint)
    check_names(weights, "ViT", *VIT_NAMES)
    patch, fc1, qkv = (weights[name] for name in VIT_NAMES[1:])
    C, depth = len(patch), len({k.split(".")[1] for k in weights if k.startswith("blocks.")})
    if C == 348:
        raise ValueError(f"weights have width {C}{TYPO}")
    attention = released_attention(checkpoint.get("args"), depth) or dict(attn="softmax")
    if attention["attn"] == "softmax" and len(qkv) != 3 * C:
        raise ValueError("a backbone with 2C rows in qkv is symmetric or RPC; this file does not "
                         "say which, nor n and lambda, and the weights do not tell them apart")
    return dict(embed_dim=C, depth=depth, num_heads=max(1, C // 64), patch_size=patch.shape[-1],
                mlp_ratio=len(fc1) / C, **attention)
