"""Segmenter: a ViT encoder with any attention of attention.py, and a decoder that labels pixels.

Paper: Teo & Nguyen 2024, section 4.1, App. A.3 and E.5 (Table 6). Model and parameter names:
Strudel et al. 2021, `rstrudel/segmenter`. Details that the paper does not mention follow
`rachtsy/segm`, the fork by the paper's authors.

    model = Segmenter(SegmenterConfig(num_classes=150, attn="rpc", pap=dict(n_iter=6)))
    logits = model(images)        # (B, 3, h, w) in [0, 1] of any size -> (B, 150, h, w)
    classes = predict_classes(model.eval(), image, size=512, window=512, stride=480)     # (h, w)

B batch, K classes, C width, P patch size, N tokens, class token included; h, w pixels.

    question               rstrudel/segmenter     rachtsy/segm         here
    decoder attention      softmax                RPC in block 0,      decoder_attn: as in the fork
                                                  symmetric later      if attn="rpc", otherwise as
                                                                       in the encoder
    eps of LayerNorm       1e-5                   1e-5                 1e-5 (in classifiers 1e-6)
    stride of evaluation   window; in miou.py     window               an argument
                           window - 32
"""

import math
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from attention import SelfAttention, check_choice, layer_attention
from common import InputError, bar, load, wide
from data.masks import IGNORE, resize, resized
from vit import (Block, Mlp, ViT, ViTConfig, classifier_from_checkpoint, load_timm,
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
    decoder_attn: str = ""            # "softmax"; "symmetric"; "rpc": RPC in block 0, symmetric
                                      # later; "": "rpc" if attn is "rpc", otherwise as in the
                                      # encoder's layers without RPC
    decoder_depth: int = 2
    decoder_heads: int = 0            # 0: C // 64, at least 1
    decoder_dropout: float = 0.1

    def __post_init__(self):
        super().__post_init__()
        plain = layer_attention(self.attn, 0, ())         # in layers without RPC-Attention
        own = self.attn if self.attn == "rpc" else plain
        known = ("softmax", "symmetric", "rpc")
        self.decoder_attn = self.decoder_attn or (own if own in known else "softmax")
        self.decoder_heads = self.decoder_heads or max(1, self.embed_dim // 64)
        check_choice("decoder_attn", self.decoder_attn, known)
        if not 2 <= self.num_classes <= IGNORE:
            raise InputError(f"num_classes={self.num_classes}, expected 2 to {IGNORE}")

    @property
    def encoder(self):                # the ViTConfig of the encoder, a ViT without a head
        own = {f.name: getattr(self, f.name) for f in fields(ViTConfig)}
        return ViTConfig(**own | dict(num_classes=0))


# --- the model -----------------------------------------------------------------------------------

class MaskDecoder(nn.Module):
    """Mask transformer: patch tokens (B, n, C) to one score per class, (B, n, K).

    One learned token per class joins the patch tokens in all decoder blocks. The score of a class
    at a patch is the cosine between the two tokens. A LayerNorm over the K classes follows.
    """

    def __init__(self, config):
        super().__init__()
        c, C, drop = config, config.embed_dim, config.decoder_dropout
        self.proj_dec = nn.Linear(C, C)
        cls_emb = nn.init.trunc_normal_(torch.empty(1, c.num_classes, C), std=0.02)
        self.cls_emb = nn.Parameter(cls_emb)
        later = "symmetric" if c.decoder_attn == "rpc" else c.decoder_attn    # in blocks 1, ...
        self.blocks = nn.ModuleList(
            Block(C, SelfAttention(C, c.decoder_heads, later if i else c.decoder_attn, pap=c.pap,
                                   attn_drop=drop, proj_drop=drop), Mlp(C, 4 * C, drop), eps=c.eps)
            for i in range(c.decoder_depth))
        self.decoder_norm = nn.LayerNorm(C, eps=c.eps)
        self.proj_patch = nn.Parameter(C ** -0.5 * torch.randn(C, C))
        self.proj_classes = nn.Parameter(C ** -0.5 * torch.randn(C, C))
        self.mask_norm = nn.LayerNorm(c.num_classes, eps=c.eps)

    def forward(self, x):
        B, n, _ = x.shape
        x = torch.cat([self.proj_dec(x), self.cls_emb[0].expand(B, -1, -1)], 1)    # (B, n + K, C)
        for block in self.blocks:
            x = block(x)
        x = self.decoder_norm(x)
        p, c = x[:, :n] @ self.proj_patch, x[:, n:] @ self.proj_classes
        p, c = p / p.norm(dim=-1, keepdim=True), c / c.norm(dim=-1, keepdim=True)
        return self.mask_norm(p @ c.transpose(1, 2))                            # over the K classes


class Segmenter(nn.Module):
    """Segmentation model: images (B, 3, h, w) in [0, 1], any h and w, to logits (B, K, h, w)."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.encoder = ViT(config.encoder)
        self.decoder = MaskDecoder(config)
        for m in self.decoder.modules():
            if isinstance(m, nn.Linear):
                nn.init.trunc_normal_(m.weight, std=0.02)
                nn.init.zeros_(m.bias)

    def masks(self, images):
        """Return one logit per class and patch, (B, K, ceil(h/P), ceil(w/P)), float32 or wider."""
        if not images.is_floating_point():
            raise ValueError(f"images are {images.dtype}, expected float in [0, 1]")
        P, encoder = self.config.patch_size, self.encoder
        x = (images - encoder.mean) / encoder.std
        x = F.pad(x, (0, -x.shape[3] % P, 0, -x.shape[2] % P))      # 0 is the mean colour
        grid, own = (x.shape[2] // P, x.shape[3] // P), self.config.image_size // P
        pos_embed = encoder.pos_embed
        if grid != (own, own):
            pos_embed = resize_pos_embed(pos_embed, grid, "bilinear")
        x = encoder.patch_embed(x)                                  # as in ViT.forward
        x = torch.cat([encoder.cls_token[0].expand(x.shape[0], -1, -1), x], 1) + pos_embed
        for block in encoder.blocks:
            x = block(x)
        x = encoder.norm(x)                                         # (B, N, C)
        x = self.decoder(x[:, 1:])                                  # (B, N - 1, K): no class token
        x = x.transpose(1, 2).contiguous().unflatten(2, grid)       # classes first: faster loss
        return wide(x)

    def forward(self, images):
        P, masks = self.config.patch_size, self.masks(images)
        logits = F.interpolate(masks, scale_factor=P, mode="bilinear", align_corners=False)
        return logits[..., :images.shape[2], :images.shape[3]]


# --- inference: sliding windows -------------------------------------------------------------------

def view(image, size, window):
    """Scale an image (3, h, w), uint8 or float in [0, 1], for evaluation; return float in [0, 1].

    The long side is at most 4 * size, the short side at most size, but at least as long as the
    window.
    """
    x = image / 255 if image.dtype == torch.uint8 else image
    x = resize(x, resized(*x.shape[1:], 4 * size, size))
    h, w = x.shape[1:]
    if min(h, w) >= window:
        return x
    return resize(x, (window, int(w / h * window)) if h < w else (int(h / w * window), window))


@torch.no_grad()
def predict_classes(model, image, *, size, window, stride, batch_size=8):
    """Return the most probable class (h, w) int64 of each pixel; model: in eval mode.

    image: (3, h, w), uint8 or float in [0, 1]. size: pixels of the short side. window, stride:
    pixels. The logits of a pixel are averaged over the windows that cover the pixel. The last
    windows end at the image's border.
    """
    if window % model.config.patch_size or not 1 <= stride <= window:
        raise InputError(f"window {window}, stride {stride}: expected a window that is a multiple "
                         f"of the patch size {model.config.patch_size}, and 1 <= stride <= window")
    x = view(image.to(next(model.parameters()).device), size, window)
    tops, lefts = ([*range(0, side - window, stride), side - window] for side in x.shape[1:])
    places = [(slice(top, top + window), slice(left, left + window))
              for top in tops for left in lefts]
    crops = torch.stack([x[:, rows, columns] for rows, columns in places])
    masks = torch.cat([model.masks(part) for part in crops.split(batch_size)])
    logits, count = masks.new_zeros(masks.shape[1], *x.shape[1:]), masks.new_zeros(x.shape[1:])
    for mask, (rows, columns) in zip(masks, places):
        logits[:, rows, columns] += resize(mask, (window, window))
        count[rows, columns] += 1
    return resize(logits / count, image.shape[1:]).argmax(0)


# --- scores on a data set: pixel accuracy, mean accuracy, mean IoU -------------------------------

def confusion(prediction, truth, num_classes):
    """Count pixels per true class (row) and predicted class (column), without 255: (K, K) int64."""
    keep = truth != IGNORE
    t, p = truth[keep].long(), prediction[keep].long()
    return torch.bincount(num_classes * t + p, minlength=num_classes ** 2).view(num_classes, -1)


def scores(confusion):
    """Compute the scores of a data set, in per cent, from its confusion matrix (K, K).

    Returns a dict for a JSON file, rounded to 4 decimals, with
        pixel_accuracy, mean_accuracy, mean_iou: one number each; the means leave absent classes out
        accuracy, iou: one number per class, None for an absent class
    """
    def plain(numbers):
        return [None if math.isnan(x) else round(x, 4) for x in numbers.tolist()]

    m = confusion.cpu().double()                          # mps has no float64
    right, truth, predicted = m.diagonal(), m.sum(1), m.sum(0)
    accuracy = 100 * right / truth                                              # 0 / 0 is NaN
    iou = 100 * right / (truth + predicted - right)
    means = plain(torch.stack([100 * right.sum() / m.sum(), accuracy.nanmean(), iou.nanmean()]))
    return dict(zip(("pixel_accuracy", "mean_accuracy", "mean_iou"), means),
                accuracy=plain(accuracy), iou=plain(iou))


@torch.no_grad()
def evaluate(model, source, *, index=None, change=None, amp=False, num_workers=0, rank=0, world=1,
             progress=None, **how):
    """Evaluate a Segmenter on a data set. Returns `scores`.

    source: source[i] returns an image (3, H, W) and a label (H, W), uint8; classes are counted from
    0, and 255 is ignored. index: numbers i of the images to use (default: all). change: a function
    that corrupts an image before it is resized: change(images, [i]) takes image i of source,
    (1, 3, H, W) uint8, and returns the same shape and type. amp: compute in bf16. num_workers:
    decoding processes. rank, world: each process evaluates its share of the images, and returns the
    scores on all images. progress: text of the progress bar. how: keywords of predict_classes.
    """
    index = list(range(len(source)) if index is None else index)
    mine, K, training = index[rank::world], model.config.num_classes, model.training
    device = next(model.parameters()).device
    matrix = torch.zeros(K, K, dtype=torch.int64, device=device)
    loader = DataLoader(source, sampler=mine, batch_size=None, num_workers=num_workers)
    model.eval()
    for i, (image, label) in zip(mine, bar(loader, progress, total=len(mine), leave=False)):
        image = image.to(device)
        if change:
            image = change(image[None], [i])[0]
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            classes = predict_classes(model, image, **how)
        matrix += confusion(classes, label.to(device), K)
    model.train(training)
    if dist.is_initialized():
        dist.all_reduce(matrix)
    if not matrix.any():
        raise InputError(f"none of the {len(index)} images has a labelled pixel")
    return scores(matrix)


# --- weights from files --------------------------------------------------------------------------

def segmenter_from_checkpoint(checkpoint):
    """Rebuild the Segmenter from a checkpoint of train_seg.py, in eval mode."""
    model = Segmenter(SegmenterConfig(**checkpoint["model_config"]))
    model.load_state_dict(checkpoint["model"])
    return model.eval()


def load_encoder(model, path):
    """Load the weights of a classifier, a ViT, except its head, into a Segmenter's encoder.

    path: a checkpoint of train_cls.py, or a file with timm's names. InputError if the attentions
    differ, because the weights would fit without an error.
    """
    checkpoint = load(path)
    vit = (classifier_from_checkpoint if "task" in checkpoint else load_timm)(checkpoint)
    own, there = ({name: getattr(c, name) for name in ("attn", "rpc_layers", "pap")}
                  for c in (model.config, vit.config))
    if own != there:
        raise InputError(f"the attention of {path} is {there}, and the flags select {own}; choose "
                         f"the same, or --backbone none for random weights")
    state, side = vit.state_dict(), model.config.image_size // model.config.patch_size
    state = {name: w for name, w in state.items() if not name.startswith("head.")}
    if state["pos_embed"].shape[1] != 1 + side * side:
        state["pos_embed"] = resize_pos_embed(state["pos_embed"], (side, side), "bilinear")
    model.encoder.load_state_dict(state)
