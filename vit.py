"""Vision transformers with any attention of attention.py: DeiT's sizes, and two for small images.

Paper: section 4 and App. A of Teo & Nguyen 2024; architecture of DeiT (Touvron et al. 2021). Names
are those of timm's `vision_transformer.py`, so DeiT and timm weights load into the softmax kind.

    model = ViT(ViTConfig(**SIZES["tiny"], attn="rpc", rpc_layers=(0,), n_iter=4, lambd=4.0))
    logits = model(images)                      # images (B, 3, 224, 224) in [0, 1] -> (B, 1000)
"""

import math
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import nn

from attention import KINDS, SelfAttention

SIZES = {                                                  # softmax parameters at 224 px
    "nano": dict(embed_dim=64, depth=4, num_heads=2),      # 32 px, patch_size=4: scenes, on a CPU
    "micro": dict(embed_dim=96, depth=6, num_heads=3),     # 32 px, patch_size=4: CIFAR-10, on a CPU
    "tiny": dict(embed_dim=192, depth=12, num_heads=3),    # 5,717,416
    "small": dict(embed_dim=384, depth=12, num_heads=6),   # 22,050,664
    "base": dict(embed_dim=768, depth=12, num_heads=12),   # 86,567,656
}
# attn of the model: attention in rpc_layers, in the other layers; any other kind is in all layers
RPC_KINDS = {"rpc": ("rpc", "symmetric"), "rpc_asym": ("rpc_asym", "softmax"),
             "sym_asym": ("rpc", "softmax")}


@dataclass
class ViTConfig:
    """Everything that rebuilds the model: RPC and symmetric weights look alike, this does not."""
    image_size: int = 224             # pixels, square
    patch_size: int = 16              # divides image_size
    num_classes: int = 1000           # 0: no head (segmenter.py)
    embed_dim: int = 192              # C
    depth: int = 12
    num_heads: int = 3                # H
    mlp_ratio: float = 4.0
    attn: str = "softmax"             # softmax, symmetric, scaled_s, scaled_alpha or RPC_KINDS
    rpc_layers: tuple = (0,)          # with RPC-Attention, from 0; the paper's "layer1" is (0,)
    n_iter: int = 4                   # PAP steps
    lambd: float = 4.0                # PAP lambda
    form: str = "released"            # attention.FORMS: released, paper, admm
    drop_path: float = 0.0            # stochastic depth: rate of the last block, linear from 0
    eps: float = 1e-6                 # of every LayerNorm
    init: str = "trunc_normal"        # DeiT's; default: torch's Linear layers, as the released code
    mean: tuple = (0.485, 0.456, 0.406)
    std: tuple = (0.229, 0.224, 0.225)

    def __post_init__(self):
        self.rpc_layers = tuple(sorted(self.rpc_layers)) if self.attn in RPC_KINDS else ()
        self.mean, self.std = tuple(self.mean), tuple(self.std)
        kinds = {*KINDS, *RPC_KINDS}
        if self.image_size % self.patch_size:
            raise ValueError(f"image_size={self.image_size} is not divisible by "
                             f"patch_size={self.patch_size}")
        if self.attn not in kinds:
            raise ValueError(f"attn={self.attn!r}, expected one of {sorted(kinds)}")
        last = self.depth - 1
        if last < 0 or not set(self.rpc_layers) <= set(range(self.depth)):
            raise ValueError(f"rpc_layers={self.rpc_layers}, expected layers in 0..{last}")
        if self.init not in ("trunc_normal", "default"):
            raise ValueError(f"init={self.init!r}, expected trunc_normal or default")

    @property
    def num_tokens(self):             # N, class token included
        return (self.image_size // self.patch_size) ** 2 + 1

    def layer_attn(self, i):
        """The kind of attention (attention.KINDS) in layer i."""
        robust, plain = RPC_KINDS.get(self.attn, (None, self.attn))
        return robust if i in self.rpc_layers else plain


# --- modules --------------------------------------------------------------------------------------

def drop_path(x, p):
    """Stochastic depth: a share p of the samples becomes 0, the others x / (1 - p). x: (B, N, C)"""
    return x * (torch.rand(len(x), 1, 1, device=x.device) >= p) / (1 - p)


class Mlp(nn.Module):
    """fc1, exact GELU, fc2; dropout at rate `drop` after GELU and after fc2."""

    def __init__(self, dim, hidden_dim, drop=0.0):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        return self.drop(self.fc2(self.drop(F.gelu(self.fc1(x)))))


class Block(nn.Module):
    """Pre-norm transformer block. eps: of the norms. drop: of the Mlp. **attn: of SelfAttention."""

    def __init__(self, dim, num_heads, mlp_ratio=4.0, drop_path=0.0, eps=1e-6, drop=0.0, **attn):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=eps)
        self.attn = SelfAttention(dim, num_heads, **attn)
        self.norm2 = nn.LayerNorm(dim, eps=eps)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), drop)
        self.drop_path = drop_path

    def residual(self, x):
        return drop_path(x, self.drop_path) if self.training and self.drop_path else x

    def forward(self, x):
        x = x + self.residual(self.attn(self.norm1(x)))
        return x + self.residual(self.mlp(self.norm2(x)))


class PatchEmbed(nn.Module):
    """(B, 3, H, W) -> (B, N - 1, C), patches row by row."""

    def __init__(self, patch_size, dim):
        super().__init__()
        self.proj = nn.Conv2d(3, dim, patch_size, stride=patch_size)

    def forward(self, images):
        return self.proj(images).flatten(2).mT


class ViT(nn.Module):
    """Image classifier: pixels in [0, 1] in, logits out. Parameter names as in timm."""

    def __init__(self, config):
        super().__init__()
        c = self.config = config
        self.patch_embed = PatchEmbed(c.patch_size, c.embed_dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, c.embed_dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, c.num_tokens, c.embed_dim))
        self.blocks = nn.ModuleList(
            Block(c.embed_dim, c.num_heads, c.mlp_ratio, c.drop_path * i / max(c.depth - 1, 1),
                  c.eps, attn=c.layer_attn(i), n_iter=c.n_iter, lambd=c.lambd, form=c.form,
                  num_tokens=c.num_tokens)
            for i in range(c.depth))
        self.norm = nn.LayerNorm(c.embed_dim, eps=c.eps)
        self.head = nn.Linear(c.embed_dim, c.num_classes) if c.num_classes else nn.Identity()
        self.register_buffer("mean", torch.tensor(c.mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(c.std).view(3, 1, 1), persistent=False)
        self.init_weights()

    def init_weights(self):
        """Tokens truncated normal, std 0.02; so are Linear layers, unless init is "default"."""
        for token in (self.pos_embed, self.cls_token):
            nn.init.trunc_normal_(token, std=0.02)
        for m in self.modules():
            if isinstance(m, nn.Linear) and self.config.init == "trunc_normal":
                nn.init.trunc_normal_(m.weight, std=0.02)
                if m.bias is not None:
                    nn.init.zeros_(m.bias)

    def tokens(self, x, pos_embed):
        """Normalised images (B, 3, h, w) -> (B, N, C): class token and patches plus pos_embed."""
        x = self.patch_embed(x)
        return torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1) + pos_embed

    def embed(self, images):
        """Images (B, 3, S, S) in [0, 1] of the model's own size -> tokens (B, N, C)."""
        size = self.config.image_size
        if images.shape[1:] != (3, size, size) or not images.is_floating_point():
            raise ValueError(f"images are {images.dtype} {tuple(images.shape)}, expected float in "
                             f"[0, 1] of shape (B, 3, {size}, {size})")
        return self.tokens((images - self.mean) / self.std, self.pos_embed)

    def encode(self, x):
        """Tokens (B, N, C) -> (B, N, C): all blocks and the final norm."""
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, images):
        return self.head(self.encode(self.embed(images))[:, 0])

    def features(self, images):
        """By name: "embed", "blocks.0", ..., "norm": (B, N, C) each, and "head": logits."""
        x = self.embed(images)
        out = {"embed": x}
        for i, block in enumerate(self.blocks):
            x = out[f"blocks.{i}"] = block(x)
        out["norm"] = self.norm(x)
        out["head"] = self.head(out["norm"][:, 0])
        return out


# --- weights from files ---------------------------------------------------------------------------

def load_weights(model, checkpoint, new_head=False):
    """Load a checkpoint's weights strictly or raise ValueError. Returns what was adapted, in words.

    checkpoint: dict as read by `common.read_checkpoint`: ours or DeiT's {"model": state dict, ...},
    a raw state dict, or a file of `rachtsy/KPCA_code`. Positions of another image size are
    interpolated. new_head: keep the model's own head when the classes differ (fine-tuning).
    """
    c, own, notes = model.config, model.state_dict(), []
    weights = dict(checkpoint.get("model", checkpoint) or {})
    if "dist_token" in weights:
        raise ValueError("distilled DeiT weights (dist_token, head_dist) hold a second token, "
                         "which this ViT has not; use the files without 'distilled' in their name")
    if not {"cls_token", "pos_embed", "blocks.0.attn.qkv.weight"} <= set(weights):
        raise ValueError("not ViT weights: expected timm's names (cls_token, pos_embed, "
                         "blocks.0.attn.qkv.weight, ...), got "
                         f"{', '.join(list(weights)[:4]) or 'nothing'}, ...")
    theirs = released_settings(checkpoint.get("args"), c.depth)
    ours = {name: getattr(c, name) for name in theirs}
    if ours != theirs:
        raise ValueError(f"the file was trained with {theirs}, the model has {ours}")
    check_attention(c, weights, own)

    # What another image size and other classes change.
    if weights["pos_embed"].shape != own["pos_embed"].shape:
        tokens = weights["pos_embed"].shape[1]
        notes.append(f"positions interpolated from {tokens} to {c.num_tokens} tokens")
        weights["pos_embed"] = resize_pos_embed(weights["pos_embed"], c.num_tokens)
    if "head.weight" in weights and weights["head.weight"].shape != own["head.weight"].shape:
        classes = len(weights["head.weight"])
        if not new_head:
            raise ValueError(f"weights are for {classes} classes, the model for {c.num_classes}")
        notes.append(f"new head for {c.num_classes} classes (the file has {classes})")
        weights["head.weight"], weights["head.bias"] = own["head.weight"], own["head.bias"]
    load_strictly(model, weights)
    return notes


def check_attention(config, weights, own):
    """ValueError unless width, projections and learned S are those of the model, `own`."""
    C = weights["cls_token"].shape[-1]
    if C != config.embed_dim:
        typo = " (348 is the released code's typo for DeiT-small's 384; train at 384 instead)"
        raise ValueError(f"weights have width {C}, the model has embed_dim={config.embed_dim}"
                         f"{typo if C == 348 else ''}")
    for i in range(config.depth):
        name, scale = f"blocks.{i}.attn.qkv.weight", f"blocks.{i}.attn.s"
        needed = own[name].shape[0] // C
        rows = weights.get(name, own[name]).shape[0] // C
        if rows and rows != needed:
            held = "q, k, v" if rows == 3 else "k, v"
            raise ValueError(f"{name} holds {rows}C rows ({held}), but attn={config.attn!r} needs "
                             f"{needed}C in layer {i}: softmax and symmetric weights do not fit "
                             "each other")
        if scale in weights and scale in own and weights[scale].shape != own[scale].shape:
            raise ValueError(f"{scale} has shape {tuple(weights[scale].shape)}, the model needs "
                             f"{tuple(own[scale].shape)}: a learned S belongs to one attention "
                             "kind and one number of tokens")


def resize_pos_embed(pos_embed, num_tokens):
    """(1, N, C) -> (1, num_tokens, C): patches to another square grid, bicubic; class part kept."""
    old, new = math.isqrt(pos_embed.shape[1] - 1), math.isqrt(num_tokens - 1)
    grid = pos_embed[:, 1:].mT.unflatten(2, (old, old))
    grid = F.interpolate(grid, size=(new, new), mode="bicubic", align_corners=False)
    return torch.cat([pos_embed[:, :1], grid.flatten(2).mT], 1)


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


def stored_config(checkpoint, config):
    """A checkpoint's model_config as the dataclass `config`; ValueError if its fields differ."""
    for name in ("model", "model_config"):
        if not isinstance(checkpoint.get(name), dict):
            raise ValueError(f"the checkpoint has no {name}")
    stored = checkpoint["model_config"]
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


def released_settings(args, depth):
    """The attention in the args of a file of `rachtsy/KPCA_code`, as in ViTConfig; else {}."""
    if not hasattr(args, "num_iter") or not hasattr(args, "lambd"):
        return {}
    if not getattr(args, "robust", False):
        return dict(attn="symmetric")
    layer = getattr(args, "layer", 0)
    layers = tuple(range(depth)) if layer == -1 else (layer,)
    return dict(attn="rpc", rpc_layers=layers, n_iter=args.num_iter, lambd=args.lambd,
                form="released")


def vit_from_checkpoint(checkpoint):
    """The model of a checkpoint of train_cls.py, in eval mode."""
    if checkpoint.get("task") != "classification" or "model_config" not in checkpoint:
        raise ValueError("not a checkpoint of train_cls.py: it has no classification model_config")
    model = ViT(stored_config(checkpoint, ViTConfig))
    load_weights(model, checkpoint)
    return model.eval()
