"""Segmenter: a ViT encoder with any attention of attention.py, and a decoder that labels pixels.

Paper: Teo & Nguyen 2024, section 4.1, App. A.3 and E.5 (Table 6). Model and parameter names:
Strudel et al. 2021, `rstrudel/segmenter`. Details that the paper does not mention follow
`rachtsy/segm`, the fork by the paper's authors.

    model = Segmenter(SegmenterConfig(num_classes=150, attn="rpc", pap=dict(n_iter=6)))
    logits = model(images)        # (B, 3, h, w) in [0, 1] of any size -> (B, 150, h, w)
    classes = predict_classes(model.eval(), image, size=512, window=512, stride=480)     # (h, w)

B batch, K classes, C width, P patch size, N patch tokens; h, w pixels.

    question               rstrudel/segmenter     rachtsy/segm         here
    decoder attention      softmax                RPC in block 0,      block 0: as in the encoder's
                                                  symmetric later      rpc_layers; later blocks: as
                                                                       in its other layers
    eps of LayerNorm       1e-5                   1e-5                 1e-5 (in classifiers 1e-6)
    stride of evaluation   window; in miou.py     window               an argument
                           window - 32
"""

import math
from dataclasses import dataclass, replace
from itertools import product

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from attention import SelfAttention, eval_mode, layer_pattern
from common import InputError, at_least_float32, bar, check_task
from data.images import image_batches
from data.masks import IGNORE, resize, scaled_size
from fan import FAN, FANConfig
from vit import (Block, Mlp, ViT, ViTConfig, fit_pos_embed, init_linear_layers,
                 resize_pos_embed)


@dataclass
class SegmenterConfig(ViTConfig):
    """Settings of a Segmenter: ViTConfig with other defaults, and the decoder."""
    image_size: int = 512             # pixels per side of the training crop
    num_classes: int = 150            # K
    drop_path: float = 0.1
    eps: float = 1e-5
    mean: tuple = (123.68 / 255, 116.28 / 255, 103.53 / 255)    # of ImageNet, as in mmsegmentation
    std: tuple = (58.4 / 255, 57.12 / 255, 57.38 / 255)
    decoder_depth: int = 2
    decoder_heads: int = 0            # 0: C // 64, at least 1
    decoder_dropout: float = 0.1
    architecture: str = "vit"         # of the encoder: "vit" or "fan"

    def __post_init__(self):
        super().__post_init__()
        self.decoder_heads = self.decoder_heads or max(1, self.embed_dim // 64)
        if "scaled_s" in layer_pattern(self.attn):
            raise InputError("attn='scaled_s' needs a fixed number of tokens, and a Segmenter "
                             "reads windows of any size; expected another attention")


# --- encoders: classifiers that return their patch tokens -----------------------------------------

class ViTEncoder(ViT):
    """A ViT that returns its patch tokens."""

    def tokens(self, x):
        """Compute the patch tokens: normalised (B, 3, h, w) -> (B, h/P * w/P, C)."""
        P = self.config.patch_size
        grid = (x.shape[2] // P, x.shape[3] // P)
        side = self.config.image_size // P
        pos_embed = self.pos_embed
        if grid != (side, side):
            pos_embed = resize_pos_embed(pos_embed, grid, "bilinear")
        x = self.embed(x, pos_embed)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)[:, 1:]                                  # without the class token


class FANEncoder(FAN):
    """A FAN without its class token, which would join the patch tokens after the blocks."""

    def __init__(self, config):
        super().__init__(config)
        del self.cls_token
        del self.cls_attn_blocks

    def tokens(self, x):
        """Compute the patch tokens: normalised (B, 3, h, h) -> (B, h/P * h/P, C)."""
        x = self.embed(x, self.pos_embed(x.shape[2] // self.config.patch_size))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


ENCODERS = dict(vit=ViTEncoder, fan=FANEncoder)         # {architecture: class}


# --- the model ------------------------------------------------------------------------------------

class MaskDecoder(nn.Module):
    """Mask transformer: patch tokens (B, n, C) to one score per class, (B, n, K).

    One learned token per class joins the patch tokens in all decoder blocks. The score of a class
    at a patch is the cosine between the two tokens. A LayerNorm over the K classes follows.
    """

    def __init__(self, config):
        super().__init__()
        C = config.embed_dim
        drop = config.decoder_dropout
        self.proj_dec = nn.Linear(C, C)
        cls_emb = nn.init.trunc_normal_(torch.empty(1, config.num_classes, C), std=0.02)
        self.cls_emb = nn.Parameter(cls_emb)
        first, later = layer_pattern(config.attn)
        self.blocks = nn.ModuleList()
        for i in range(config.decoder_depth):
            attn = first if i == 0 else later
            attention = SelfAttention(C, config.decoder_heads, attn, pap=config.pap,
                                      attn_drop=drop, proj_drop=drop)
            mlp = Mlp(C, 4 * C, drop)
            self.blocks.append(Block(C, attention, mlp, eps=config.eps))
        self.decoder_norm = nn.LayerNorm(C, eps=config.eps)
        self.proj_patch = nn.Parameter(C ** -0.5 * torch.randn(C, C))
        self.proj_classes = nn.Parameter(C ** -0.5 * torch.randn(C, C))
        self.mask_norm = nn.LayerNorm(config.num_classes, eps=config.eps)

    def forward(self, x):
        B, n, _ = x.shape
        classes = self.cls_emb[0].expand(B, -1, -1)                 # [0] as in ViT.embed
        x = torch.cat([self.proj_dec(x), classes], 1)               # (B, n + K, C)
        for block in self.blocks:
            x = block(x)
        x = self.decoder_norm(x)
        patches = x[:, :n] @ self.proj_patch
        classes = x[:, n:] @ self.proj_classes
        patches = patches / patches.norm(dim=-1, keepdim=True)
        classes = classes / classes.norm(dim=-1, keepdim=True)
        return self.mask_norm(patches @ classes.transpose(1, 2))    # over the K classes


class Segmenter(nn.Module):
    """Segmentation model: images (B, 3, h, w) in [0, 1] to logits (B, K, h, w).

    h and w: any with a ViT; equal with a FAN.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        Encoder = ENCODERS[config.architecture]
        # num_classes=0: without a head. This config's num_tokens counts a class token, and the
        # blocks of a FAN have no class token. Only scaled_s uses num_tokens, and a Segmenter
        # cannot have scaled_s.
        self.encoder = Encoder(replace(config, num_classes=0))
        self.decoder = MaskDecoder(config)
        init_linear_layers(self.decoder)

    def patch_logits(self, images):
        """Return one logit per class and patch, (B, K, ceil(h/P), ceil(w/P)), float32 or wider."""
        if not images.is_floating_point():
            raise ValueError(f"images are {images.dtype}, expected float in [0, 1]")
        P = self.config.patch_size
        encoder = self.encoder
        x = (images - encoder.mean) / encoder.std
        x = F.pad(x, (0, -x.shape[3] % P, 0, -x.shape[2] % P))      # 0 is the mean colour
        grid = (x.shape[2] // P, x.shape[3] // P)
        x = self.decoder(encoder.tokens(x))                         # (B, N, K)
        x = x.transpose(1, 2).contiguous().unflatten(2, grid)       # classes first: faster loss
        return at_least_float32(x)

    def forward(self, images):
        h, w = images.shape[2:]
        logits = F.interpolate(self.patch_logits(images), mode="bilinear",
                               scale_factor=self.config.patch_size, align_corners=False)
        return logits[..., :h, :w]


# --- inference: sliding windows -------------------------------------------------------------------

def evaluation_view(image, size, window):
    """Scale an image (3, h, w), uint8 or float in [0, 1], for evaluation; return float in [0, 1].

    First, the image becomes the largest one with a long side of at most 4 * size and a short side
    of at most size, as in mmsegmentation. If the short side is then shorter than the window, it
    becomes as long as the window, as in rstrudel/segmenter.
    """
    x = image / 255 if image.dtype == torch.uint8 else image
    h, w = x.shape[1:]
    x = resize(x, scaled_size(h, w, long=4 * size, short=size))
    h, w = x.shape[1:]
    if min(h, w) >= window:
        return x
    if h < w:
        return resize(x, (window, int(w / h * window)))
    return resize(x, (int(h / w * window), window))


def window_starts(length, window, stride):
    """Return the first pixels of the windows along a side; the last window ends at the border."""
    return [*range(0, length - window, stride), length - window]


def check_windows(window, stride, patch_size):
    """Raise InputError unless windows fit the patches and cover all pixels."""
    if window % patch_size or not 1 <= stride <= window:
        raise InputError(f"window {window}, stride {stride}: expected a window that is a "
                         f"multiple of the patch size {patch_size}, and 1 <= stride <= window")


@torch.no_grad()
def predict_classes(model, image, *, size, window, stride, batch_size=8):
    """Return the most probable class (h, w) int64 of each pixel; model: in eval mode.

    image: (3, h, w), uint8 or float in [0, 1]. size: pixels of the short side. window, stride:
    pixels. The logits of a pixel are averaged over the windows that cover the pixel. The last
    windows end at the image's border.
    """
    check_windows(window, stride, model.config.patch_size)
    low, high = image.aminmax()
    if image.is_floating_point() and not (-1e-6 <= low and high <= 1 + 1e-6):       # NaN, too
        raise InputError(f"the image has values from {low:g} to {high:g}; expected uint8, or "
                         "float in [0, 1]")
    device = next(model.parameters()).device
    x = evaluation_view(image.to(device), size, window)
    h, w = x.shape[1:]
    corners = product(window_starts(h, window, stride), window_starts(w, window, stride))
    places = [(slice(top, top + window), slice(left, left + window))
              for top, left in corners]
    crops = torch.stack([x[:, rows, columns] for rows, columns in places])
    crop_logits = [model.patch_logits(part) for part in crops.split(batch_size)]
    crop_logits = torch.cat(crop_logits)                        # (windows, K, window/P, window/P)
    total = crop_logits.new_zeros(crop_logits.shape[1], h, w)
    count = crop_logits.new_zeros(h, w)
    for logits, (rows, columns) in zip(crop_logits, places):
        total[:, rows, columns] += resize(logits, (window, window))
        count[rows, columns] += 1
    return resize(total / count, image.shape[1:]).argmax(0)


# --- scores on a data set -------------------------------------------------------------------------

SCORES = ("pixel_accuracy", "mean_accuracy", "mean_iou")


def confusion(prediction, truth, num_classes):
    """Count pixels per true class (row) and predicted class (column): (K, K) int64.

    Pixels whose true class is 255 do not count.
    """
    labelled = truth != IGNORE
    t = truth[labelled].long()
    p = prediction[labelled].long()
    pairs = torch.bincount(num_classes * t + p, minlength=num_classes ** 2)
    return pairs.view(num_classes, -1)


def scores(matrix):
    """Compute the scores of a data set, in per cent, from its confusion matrix (K, K).

    Returns a dict of numbers, rounded to 4 decimals:
        pixel_accuracy, mean_accuracy, mean_iou: means over the pixels, or over the classes that
            occur
        accuracy, iou: a list with one number per class, None for an absent class
    """
    def plain(numbers):
        return [None if math.isnan(x) else round(x, 4) for x in numbers.tolist()]

    m = matrix.cpu().double()                             # mps has no float64
    right = m.diagonal()
    truth = m.sum(1)
    predicted = m.sum(0)
    accuracy = 100 * right / truth                                              # 0 / 0 is NaN
    iou = 100 * right / (truth + predicted - right)
    pixel_accuracy = 100 * right.sum() / m.sum()
    means = torch.stack([pixel_accuracy, accuracy.nanmean(), iou.nanmean()])
    total = dict(zip(SCORES, plain(means)))
    return total | dict(accuracy=plain(accuracy), iou=plain(iou))


@torch.no_grad()
def evaluate(model, source, *, size, window, stride, index=None, change=None, amp=False,
             num_workers=0, rank=0, world=1, progress=None):
    """Evaluate a Segmenter on a data set. Returns `scores`.

    source: source[i] returns an image (3, H, W) and a label (H, W), uint8; classes are counted from
    0, and 255 is ignored. size, window, stride: see predict_classes. index: numbers i of the images
    to use (default: all). change: a function that corrupts an image before it is resized:
    change(images, index=[i]) takes image i of source, (1, 3, H, W) uint8, and returns the same
    shape and type. amp: compute in bf16. num_workers: decoding processes. rank, world: each process
    evaluates its share of the images, and returns the scores on all images. progress: text of the
    progress bar.
    """
    if index is None:
        index = range(len(source))
    mine = list(index)[rank::world]
    K = model.config.num_classes
    device = next(model.parameters()).device
    matrix = torch.zeros(K, K, dtype=torch.int64, device=device)
    batches = image_batches(source, [[i] for i in mine], num_workers, device)
    batches = bar(batches, progress, total=len(mine), leave=False)
    with eval_mode(model):
        for i, (images, labels) in zip(mine, batches):              # batches of image i alone
            images = images.to(device)                              # (1, 3, H, W)
            if change:
                images = change(images, index=[i])
            with torch.autocast(device.type, torch.bfloat16, enabled=amp):
                classes = predict_classes(model, images[0], size=size, window=window,
                                          stride=stride)
            matrix += confusion(classes, labels[0].to(device), K)
    if dist.is_initialized():
        dist.all_reduce(matrix)
    if not matrix.any():
        raise InputError(f"none of the {len(index)} images has a labelled pixel")
    return scores(matrix)


# --- weights from files ---------------------------------------------------------------------------

def segmenter_from_checkpoint(checkpoint):
    """Rebuild the Segmenter from a checkpoint of train_seg.py, in eval mode."""
    check_task(checkpoint, "segmentation")
    model = Segmenter(SegmenterConfig(**checkpoint["model_config"]))
    model.load_state_dict(checkpoint["model"])
    return model.eval()


# {class of a classifier's settings: the architecture of an encoder with its weights}
ARCHITECTURES = {ViTConfig: "vit", FANConfig: "fan"}


def backbone_settings(config):
    """Return the settings that an encoder takes from the config of a classifier."""
    if type(config) not in ARCHITECTURES:
        raise InputError(f"the classifier has a {type(config).__name__}, but the encoder of "
                         "a Segmenter is a ViT or a FAN; choose another --backbone")
    return dict(
        architecture=ARCHITECTURES[type(config)], embed_dim=config.embed_dim,
        depth=config.depth, num_heads=config.num_heads, mlp_ratio=config.mlp_ratio,
        patch_size=config.patch_size, attn=config.attn, rpc_layers=config.rpc_layers,
        pap=config.pap)


def load_encoder(model, classifier):
    """Copy the weights of a classifier into a Segmenter's encoder.

    The head, and the class token and class blocks of a FAN, are left out. The Segmenter must have
    the settings of `backbone_settings(classifier.config)`: with other settings, it computes
    something else from the same weights.
    """
    own = model.encoder.state_dict()
    weights = {name: weight for name, weight in classifier.state_dict().items() if name in own}
    weights = fit_pos_embed(weights, model.config, "bilinear")      # as in rstrudel/segmenter
    model.encoder.load_state_dict(weights)
