"""FAN-ViT with any attention of attention.py: App. E.7 of Teo & Nguyen 2024, Tables 9 and 10.

Architecture and parameter names: Zhou et al. 2022 (`NVlabs/FAN:models/fan.py`), so the released
checkpoints load into a FAN with softmax attention. The paper's baseline has symmetric attention
everywhere, also for the class token, as in `rachtsy/FAN:models/fan_sym.py`.

    model = FAN(FANConfig(**FAN_SIZES["fan_tiny"], attn="rpc", rpc_layers=(0,)))
    logits = model(images)                      # images (B, 3, 224, 224) in [0, 1] -> (B, 1000)

A FAN differs from a ViT in four parts. A stack of convolutions, the stem, embeds the patches.
Positions are sines and cosines. The MLP of each block is a `ChannelGate`. The class token joins
after the blocks, so the blocks have N patch tokens.
"""

import math
from collections import OrderedDict

import torch
from torch import nn

from attention import SelfAttention, layer_pattern, softmax_attention
from common import InputError
from vit import Block, Mlp, PatchEmbed, ViT, ViTConfig

FAN_SIZES = {                                                  # parameters at 224 px
    "fan_tiny": dict(embed_dim=192, depth=12, num_heads=4),    # 7,319,920; symmetric 6,801,136
    "fan_small": dict(embed_dim=384, depth=12, num_heads=8),   # 28,345,336; symmetric 26,275,576
}


class FANConfig(ViTConfig):           # no @dataclass: it has the fields of ViTConfig, and no others
    """Settings of a FAN. patch_size: 2, 4, 8 or 16.

    drop_path: the rate in all blocks of patch tokens. The two class blocks drop nothing.
    """
    family = "fan "                   # begins the name in tables, "fan symmetric"

    def __post_init__(self):
        super().__post_init__()
        if self.patch_size not in (2, 4, 8, 16):
            raise InputError(f"patch_size={self.patch_size}: a FAN has 2, 4, 8 or 16, because each "
                             f"convolution of its stem halves the sides of the image")

    @property
    def num_tokens(self):             # N in the blocks: one token per patch
        return (self.image_size // self.patch_size) ** 2


def stem(patch_size, dim):
    """Return the stem, (B, 3, S, S) -> (B, C, S/P, S/P): convolutions that halve each side.

    For patches of 4 pixels, the numbers of channels are 3-96-192 if C = 192. This is our choice:
    the last two layers of the stem for patches of 16. NVlabs/FAN has 3-48-192.
    """
    steps = int(math.log2(patch_size))
    layers = []
    inputs = 3
    for i in reversed(range(steps)):
        outputs = dim // 2 ** i
        conv = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        layers += [nn.Sequential(conv, nn.BatchNorm2d(outputs)), nn.GELU()]
        inputs = outputs
    return nn.Sequential(*layers[:-1])                      # without a GELU at the end


POSITION_SIZE = 32                                          # sines and cosines per row or column


def position_code(side):
    """Return sines and cosines of each patch's row and column, (1, 2 * 32, side * side, 1)."""
    i = torch.arange(POSITION_SIZE)
    place = torch.arange(1, side + 1) / (side + 1e-6) * 2 * math.pi
    angle = place[:, None] / 10000 ** (2 * (i // 2) / POSITION_SIZE)        # (side, 32)
    code = torch.where(i % 2 == 0, angle.sin(), angle.cos()).T              # (32, side)
    code = torch.cat([code.repeat_interleave(side, 1), code.repeat(1, side)])       # (2 * 32, N)
    return code[None, :, :, None]


class Positions(nn.Module):
    """Position embeddings (1, N, C): a projection of `position_code`."""

    def __init__(self, side, dim):
        super().__init__()
        self.side = side
        self.register_buffer("code", position_code(side), persistent=False)
        self.token_projection = nn.Conv2d(2 * POSITION_SIZE, dim, 1)

    def forward(self, side=None):
        """Embed a grid with `side` patches per side (default: as in __init__)."""
        code = self.code
        if side not in (None, self.side):
            code = position_code(side).to(self.code)
        return self.token_projection(code).flatten(2).transpose(1, 2)


def split(x, num_heads):
    """Split channels into heads: (B, N, C) -> (B, H, N, D)."""
    return x.unflatten(2, (num_heads, -1)).transpose(1, 2)


class TokenAttention(SelfAttention):
    """SelfAttention with layers `q` and `kv` instead of `qkv`. If keys are queries, `q` is None."""

    def make_projections(self, dim, bias):
        self.q = None
        if self.num_proj == 3:
            self.q = nn.Linear(dim, dim, bias)
        self.kv = nn.Linear(dim, 2 * dim, bias)

    def project(self, x):
        k, v = (split(y, self.num_heads) for y in self.kv(x).chunk(2, 2))
        q = k
        if self.q is not None:
            q = split(self.q(x), self.num_heads)
        return q, k, v


class ConvMlp(Mlp):
    """MLP with 3 x 3 depthwise convolutions over the grid of patches, (B, N, C) in and out."""

    def __init__(self, dim, hidden_dim):
        super().__init__(dim, hidden_dim)
        self.gamma = nn.Parameter(torch.ones(hidden_dim))

        def depthwise():
            return nn.Conv2d(hidden_dim, hidden_dim, 3, padding=1, groups=hidden_dim)

        conv1 = depthwise()
        conv2 = depthwise()
        for conv in (conv1, conv2):
            nn.init.normal_(conv.weight, std=math.sqrt(2 / 9))
            nn.init.zeros_(conv.bias)
        norm = nn.BatchNorm2d(hidden_dim)
        layers = OrderedDict(conv1=conv1, gelu=nn.GELU(), bn=norm, conv2=conv2)
        self.dwconv = nn.Sequential(layers)

    def forward(self, z):
        u = self.fc1(z)
        side = math.isqrt(z.shape[1])
        grid = u.transpose(1, 2).unflatten(2, (side, side))                 # (B, C', side, side)
        convolved = self.dwconv(grid).flatten(2).transpose(1, 2)            # (B, N, C')
        return self.fc2(u + self.gamma * convolved)


class ChannelGate(nn.Module):
    """FAN's channel attention, instead of an MLP: norm_v(mlp_v(z)) times a gate per channel."""

    def __init__(self, dim, num_heads, hidden_dim):
        super().__init__()
        self.num_heads = num_heads
        self.temperature = nn.Parameter(torch.ones(num_heads, 1, 1))
        self.q = nn.Linear(dim, dim)
        self.mlp_v = ConvMlp(dim, hidden_dim)
        self.norm_v = nn.LayerNorm(dim)                         # eps 1e-5, not the config's

    def forward(self, z):
        q = split(self.q(z), self.num_heads).softmax(2)                     # over tokens
        k = split(z, self.num_heads).softmax(2).mean(3, keepdim=True)       # (B, H, N, 1)
        gate = (q.transpose(2, 3) @ k).sigmoid() * self.temperature         # (B, H, D, 1)
        return self.norm_v(self.mlp_v(z)) * gate.flatten(1)[:, None]


class ClassAttention(nn.Module):
    """Attention of the class token, token 0, to all tokens: (B, N + 1, C) -> (B, 1, C)."""

    def __init__(self, dim, num_heads, symmetric):
        super().__init__()
        self.num_heads = num_heads
        self.q = None                                           # its query is its key
        if not symmetric:
            self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, z):
        k = self.k(z)
        v = self.v(z)
        q = k[:, :1]
        if self.q is not None:
            q = self.q(z[:, :1])
        q, k, v = (split(y, self.num_heads) for y in (q, k, v))
        h = softmax_attention(q, k, v)
        return self.proj(h.transpose(1, 2).flatten(2))


class FANBlock(Block):
    """Pre-norm block that scales the outputs of attention and MLP per channel (gamma)."""

    def __init__(self, dim, attn, mlp, drop_path=0.0, eps=1e-6):
        super().__init__(dim, attn, mlp, drop_path, eps)
        self.gamma1 = nn.Parameter(torch.ones(dim))
        self.gamma2 = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        x = x + self.drop_samples(self.gamma1 * self.attn(self.norm1(x)))
        return x + self.drop_samples(self.gamma2 * self.mlp(self.norm2(x)))


class ClassBlock(FANBlock):
    """Block whose attention and MLP change the class token, (B, N + 1, C) in and out.

    As in NVlabs/FAN, the patch tokens change, too: the norms change them, norm1(x) is added to
    them, and the last line doubles them. There is no drop path.
    """

    def forward(self, x):
        z = self.norm1(x)
        change = torch.cat([self.attn(z), z[:, 1:]], 1)         # of the class token, of the patches
        x = self.norm2(x + self.gamma1 * change)
        change = torch.cat([self.gamma2 * self.mlp(x[:, :1]), x[:, 1:]], 1)
        return x + change


class FAN(ViT):
    """Image classifier: pixels (B, 3, S, S) in [0, 1] to logits (B, K). Names as in NVlabs/FAN."""

    def build(self, c):
        """Make patch_embed, pos_embed, blocks and cls_attn_blocks by a config c."""
        C = c.embed_dim
        H = c.num_heads
        hidden = int(C * c.mlp_ratio)
        self.patch_embed = PatchEmbed(c.patch_size, C)
        self.patch_embed.proj = stem(c.patch_size, C)
        # A module, whose output is added; in a ViT pos_embed is a parameter.
        self.pos_embed = Positions(c.image_size // c.patch_size, C)
        inside, outside = layer_pattern(c.attn)
        self.blocks = nn.ModuleList()
        for i in range(c.depth):
            name = inside if i in c.rpc_layers else outside
            attn = TokenAttention(C, H, name, pap=c.pap, num_tokens=c.num_tokens)
            mlp = ChannelGate(C, H, hidden)
            self.blocks.append(FANBlock(C, attn, mlp, c.drop_path, c.eps))
        # The class token has the attention of the layers without RPC-Attention.
        symmetric = outside == "symmetric"
        self.cls_attn_blocks = nn.ModuleList()
        for _ in range(2):
            attn = ClassAttention(C, H, symmetric)
            mlp = Mlp(C, hidden)
            self.cls_attn_blocks.append(ClassBlock(C, attn, mlp, eps=c.eps))

    def embed(self, x, pos_embed):
        """Compute the patch tokens before the first block: normalised (B, 3, h, h) -> (B, N, C)."""
        return self.patch_embed(x) + pos_embed

    def forward(self, images):
        x = self.embed(self.normalise(images), self.pos_embed())            # (B, N, C)
        for block in self.blocks:
            x = block(x)
        cls = self.cls_token[0].expand(x.shape[0], -1, -1)      # [0] as in ViT.embed
        x = torch.cat([cls, x], 1)
        for block in self.cls_attn_blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])                    # the head reads the class token
