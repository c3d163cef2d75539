"""Vision transformers with any attention of attention.py, in DeiT's sizes and two smaller ones.

Paper: section 4 and App. A of Teo & Nguyen 2024; architecture of DeiT (Touvron et al. 2021).
Parameters are named as in timm's `vision_transformer.py`, so DeiT and timm weights load into a ViT
with softmax attention.

    model = ViT(ViTConfig(**SIZES["tiny"], attn="rpc", rpc_layers=(0,), pap=dict(n_iter=6)))
    logits = model(images)                      # images (B, 3, 224, 224) in [0, 1] -> (B, 1000)
"""

import math
import re
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from attention import (ATTENTIONS, LAYER_PATTERNS, SelfAttention, check_choice,
                       default_settings, layer_pattern)
from common import InputError, check_task, first_difference, print0

SIZES = {
    # for images of 32 px and patch_size=4, on a CPU: our scenes, CIFAR-10
    "nano": dict(embed_dim=64, depth=4, num_heads=2),
    "micro": dict(embed_dim=96, depth=6, num_heads=3),
    # DeiT's sizes; number of parameters with softmax attention at 224 px
    "tiny": dict(embed_dim=192, depth=12, num_heads=3),    # 5,717,416
    "small": dict(embed_dim=384, depth=12, num_heads=6),   # 22,050,664
    "base": dict(embed_dim=768, depth=12, num_heads=12),   # 86,567,656
}


@dataclass
class ViTConfig:
    """Settings that rebuild a ViT. An RPC ViT and a symmetric ViT have the same parameters."""
    image_size: int = 224             # pixels per side
    patch_size: int = 16              # divides image_size
    num_classes: int = 1000           # 0: no head, as in the encoder of a Segmenter
    embed_dim: int = 192              # C
    depth: int = 12
    num_heads: int = 3                # H
    mlp_ratio: float = 4.0
    attn: str = "softmax"             # a name in attention.ATTENTIONS or LAYER_PATTERNS
    rpc_layers: tuple = (0,)          # layers with RPC-Attention; the paper's "layer1" is (0,)
    pap: dict = field(default_factory=dict)     # n_iter, lambd, form, ...: see SelfAttention
    drop_path: float = 0.0            # rate of stochastic depth: 0 in the first block, this value
                                      # in the last block, linear between them
    eps: float = 1e-6                 # epsilon of every LayerNorm
    init: str = "trunc_normal"        # Linear layers begin as in DeiT; "default": as in PyTorch
    mean: tuple = (0.485, 0.456, 0.406)         # mean and std normalise pixels in [0, 1]
    std: tuple = (0.229, 0.224, 0.225)

    def __post_init__(self):
        complete_attention(self)
        check_choice("init", self.init, ("trunc_normal", "default"))
        if self.image_size % self.patch_size:
            raise InputError(f"image_size={self.image_size} is not divisible by "
                             f"patch_size={self.patch_size}")
        self.mean = tuple(self.mean)                    # equal configs, also if made from lists
        self.std = tuple(self.std)

    @property
    def num_tokens(self):             # N: one token per patch, and the class token
        return (self.image_size // self.patch_size) ** 2 + 1


# The names in pap: keywords of rpc_attention and rpca_attention, and form.
PAP_NAMES = ("n_iter", "lambd", "form", "threshold", "mu_dim", "dual_sign", "mu_over", "shrink",
             "constant_s")


def complete_attention(config):
    """Check attn, rpc_layers and pap of a ViTConfig or LMConfig, and complete them in the config.

    rpc_layers becomes a sorted tuple, which is empty if attn is no layer pattern. pap gets the
    default settings that it lacks. An attention of yours can have settings with other names, whose
    defaults are in its entry in ATTENTIONS.
    """
    check_choice("attn", config.attn, ATTENTIONS | LAYER_PATTERNS)
    settings = default_settings(config.attn)
    known = sorted({*PAP_NAMES, *settings})
    for name in config.pap:
        check_choice("a name in pap", name, known)
    config.pap = settings | config.pap
    layers = ()
    if config.attn in LAYER_PATTERNS:
        layers = tuple(sorted(config.rpc_layers))
    if not set(layers) <= set(range(config.depth)):
        raise InputError(f"rpc_layers={layers}, expected layers in 0..{config.depth - 1}")
    config.rpc_layers = layers


# --- modules --------------------------------------------------------------------------------------

class Mlp(nn.Module):
    """Linear layer, exact GELU, linear layer; dropout with rate `drop` after both."""

    def __init__(self, dim, hidden_dim, drop=0.0):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        hidden = self.drop(F.gelu(self.fc1(x)))
        return self.drop(self.fc2(hidden))


class Block(nn.Module):
    """Pre-norm transformer block, (B, N, C) in and out: x + f(norm(x)) for attention and MLP.

    attn, mlp: modules. drop_path: the probability that an output is dropped, per sample.
    """

    def __init__(self, dim, attn, mlp, drop_path=0.0, eps=1e-6):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=eps)
        self.attn = attn
        self.norm2 = nn.LayerNorm(dim, eps=eps)
        self.mlp = mlp
        self.drop_path = drop_path

    def drop_samples(self, x):
        """In training, set each sample to 0 with probability p; divide the others by 1 - p."""
        p = self.drop_path
        if not self.training or not p:
            return x
        kept = torch.rand(len(x), 1, 1, device=x.device) >= p
        return x * kept / (1 - p)

    def forward(self, x):
        x = x + self.drop_samples(self.attn(self.norm1(x)))
        return x + self.drop_samples(self.mlp(self.norm2(x)))


class PatchEmbed(nn.Module):
    """Turn images into patch tokens, row by row: (B, 3, h, w) -> (B, h/P * w/P, C).

    A convolution with stride P maps the 3 P P numbers of each patch to C. Any module with output
    (B, C, h/P, w/P) can replace `proj`, for example a stack of convolutions.
    """

    def __init__(self, patch_size, dim):
        super().__init__()
        self.proj = nn.Conv2d(3, dim, patch_size, stride=patch_size)

    def forward(self, images):
        return self.proj(images).flatten(2).transpose(1, 2)     # ONNX cannot export .mT


def init_linear_layers(model):
    """Draw the weights of all Linear layers as in DeiT, in place; biases become 0."""
    for m in model.modules():
        if isinstance(m, nn.Linear):
            nn.init.trunc_normal_(m.weight, std=0.02)
            if m.bias is not None:
                nn.init.zeros_(m.bias)


class ViT(nn.Module):
    """Image classifier: pixels (B, 3, S, S) in [0, 1] to logits (B, K). Names as in timm."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        C = config.embed_dim
        self.cls_token = nn.Parameter(torch.zeros(1, 1, C))
        self.build(config)
        self.norm = nn.LayerNorm(C, eps=config.eps)
        self.head = nn.Identity()
        if config.num_classes:
            self.head = nn.Linear(C, config.num_classes)
        mean = torch.tensor(config.mean).view(3, 1, 1)
        std = torch.tensor(config.std).view(3, 1, 1)
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("std", std, persistent=False)
        if isinstance(self.pos_embed, nn.Parameter):    # in a FAN a module, which keeps its weights
            nn.init.trunc_normal_(self.pos_embed, std=0.02)
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        if config.init == "trunc_normal":               # "default": PyTorch's weights stay
            init_linear_layers(self)

    def build(self, c):
        """Make patch_embed, pos_embed and blocks by a config c. FAN overrides this method."""
        C = c.embed_dim
        self.patch_embed = PatchEmbed(c.patch_size, C)
        self.pos_embed = nn.Parameter(torch.zeros(1, c.num_tokens, C))
        inside, outside = layer_pattern(c.attn)
        self.blocks = nn.ModuleList()
        for i in range(c.depth):
            name = inside if i in c.rpc_layers else outside
            attn = SelfAttention(C, c.num_heads, name, pap=c.pap, num_tokens=c.num_tokens)
            mlp = Mlp(C, int(C * c.mlp_ratio))
            drop_path = c.drop_path * i / max(c.depth - 1, 1)
            self.blocks.append(Block(C, attn, mlp, drop_path, c.eps))

    def normalise(self, images):
        """Check images (B, 3, S, S), float in [0, 1], and normalise their pixels."""
        size = self.config.image_size
        if images.shape[1:] != (3, size, size) or not images.is_floating_point():
            raise ValueError(f"images are {images.dtype} {tuple(images.shape)}, expected "
                             f"float in [0, 1] of shape (B, 3, {size}, {size})")
        return (images - self.mean) / self.std

    def embed(self, x, pos_embed):
        """Compute the tokens before the first block: normalised (B, 3, h, w) -> (B, N, C).

        Token 0 is the class token, which belongs to no patch.
        pos_embed: (1, N, C).
        """
        x = self.patch_embed(x)                                 # (B, N - 1, C)
        # [0]: expanding the shape (1, 1, C) gives strides for which DDP prints a warning if B is 1.
        cls = self.cls_token[0].expand(x.shape[0], -1, -1)
        return torch.cat([cls, x], 1) + pos_embed

    def forward(self, images):
        x = self.embed(self.normalise(images), self.pos_embed)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])                    # the head reads the class token


def resize_pos_embed(pos_embed, grid, mode):
    """Interpolate position embeddings (1, 1 + side * side, C) to a grid (h, w) of patches.

    The first embedding belongs to the class token and stays unchanged. mode: see F.interpolate.
    Returns (1, 1 + h * w, C).
    """
    side = math.isqrt(pos_embed.shape[1] - 1)
    patches = pos_embed[:, 1:].mT.unflatten(2, (side, side))
    patches = F.interpolate(patches, size=tuple(grid), mode=mode, align_corners=False)
    return torch.cat([pos_embed[:, :1], patches.flatten(2).mT], 1)


def fit_pos_embed(weights, config, mode):
    """Return weights whose position embeddings fit the image size of a config.

    weights: {name: tensor}. Weights of a FAN stay as they are, because positions are computed.
    mode: see F.interpolate.
    """
    side = config.image_size // config.patch_size
    pos_embed = weights.get("pos_embed")
    if pos_embed is None or pos_embed.shape[1] == 1 + side * side:
        return weights
    return weights | dict(pos_embed=resize_pos_embed(pos_embed, (side, side), mode))


# --- weights from files ---------------------------------------------------------------------------

def model_classes(architecture):
    """Return the model class and the config class of an architecture, "vit" or "fan"."""
    if architecture == "fan":
        from fan import FAN, FANConfig                  # here, because fan.py imports this file
        return FAN, FANConfig
    return ViT, ViTConfig


def classifier_from_checkpoint(checkpoint):
    """Rebuild the network of train_cls.py, a ViT or a FAN, in eval mode."""
    check_task(checkpoint, "classification", "train_cls.py")
    Model, Config = model_classes(checkpoint.get("architecture", "vit"))
    model = Model(Config(**checkpoint["model_config"]))
    model.load_state_dict(checkpoint["model"])
    return model.eval()


def load_classifier(checkpoint):
    """Rebuild the network of train_cls.py, or a ViT from weights with timm's names."""
    if "task" in checkpoint:
        return classifier_from_checkpoint(checkpoint)
    return load_timm(checkpoint)


def load_timm(checkpoint):
    """Rebuild a ViT from weights with timm's names (DeiT, timm, rachtsy/KPCA_code), in eval mode.

    checkpoint: a dict {name: tensor}, or a dict that contains one as "model" or "state_dict". The
    released code also stores its flags as "args". No file stores three settings. So we assume that
    heads are 64 wide, eps is 1e-6, and pixels are normalised as in ViTConfig.
    """
    weights = checkpoint.get("model", checkpoint.get("state_dict", checkpoint))
    state = {}
    for name, weight in weights.items():
        name = re.sub(r"^(module\.)?(_orig_mod\.)?", "", name)
        # The released code stores S of Scaled Attention as attn.s.
        name = re.sub(r"\.attn\.s$", ".attn.learned.s", name)
        state[name] = weight
    for name in ("cls_token", "pos_embed", "patch_embed.proj.weight",
                 "blocks.0.attn.qkv.weight", "blocks.0.mlp.fc1.weight"):
        if name not in state:
            raise InputError(f"the file has no weight {name}; expected a checkpoint of "
                             f"train_cls.py, or a ViT with timm's names")
    patch_size = state["patch_embed.proj.weight"].shape[-1]
    C = state["cls_token"].shape[-1]
    depth = len({name.split(".")[1] for name in state if name.startswith("blocks.")})
    side = math.isqrt(state["pos_embed"].shape[1] - 1)
    num_classes = 0
    if "head.weight" in state:
        num_classes = len(state["head.weight"])

    attention = timm_attention(state, checkpoint.get("args"), depth)
    config = ViTConfig(
        image_size=side * patch_size, patch_size=patch_size, num_classes=num_classes,
        embed_dim=C, depth=depth, num_heads=max(1, C // 64),
        mlp_ratio=len(state["blocks.0.mlp.fc1.weight"]) / C, **attention)
    model = ViT(config)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:                       # such as the second token of some DeiTs
        difference = first_difference(error)
        raise InputError(f"the file is no ViT that vit.py can rebuild: {difference}; expected "
                         f"the weights of a ViT with timm's names") from None
    print0(f"{config.attn} attention with {config.num_heads} heads; assumed: heads are 64 "
           f"wide, eps is 1e-6, pixels are normalised by ImageNet's mean and std")
    return model.eval()


def timm_attention(state, args, depth):
    """Return the attention of weights with timm's names: dict(attn) or dict(attn, rpc_layers, pap).

    state: {name: tensor}. args: the flags of the released code, or None. depth: number of layers.
    """
    S = state.get("blocks.0.attn.learned.s")
    if S is not None:
        if S.ndim == 3:
            return dict(attn="scaled_s")
        return dict(attn="scaled_alpha")
    C = state["cls_token"].shape[-1]
    if len(state["blocks.0.attn.qkv.weight"]) == 3 * C:
        return dict(attn="softmax")
    if not hasattr(args, "num_iter"):
        raise InputError("qkv has 2C rows, so the attention is symmetric or RPC; the file does "
                         "not store which: expected args with num_iter, lambd, robust and layer")
    if not args.robust:
        return dict(attn="symmetric")
    layer = getattr(args, "layer", 0)
    layers = (layer,)
    if layer == -1:                                     # in the released code: all layers
        layers = tuple(range(depth))
    pap = dict(n_iter=args.num_iter, lambd=args.lambd, form="released")
    return dict(attn="rpc", rpc_layers=layers, pap=pap)
