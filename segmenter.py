"""Segmenter: a ViT encoder with any attention of attention.py, and a decoder that labels every pixel.

Paper: Teo & Nguyen 2024, section 4.1, App. A.3 and E.5 (Table 6). Model: Strudel et al. 2021, `rstrudel/segmenter`,
whose parameter names are kept; its fork `rachtsy/segm` by the paper's authors settles what the text leaves open.

    model = Segmenter(SegmenterConfig(num_classes=150, attn="rpc", n_iter=4))      # the paper's, symmetric decoder too
    logits = model(images)                # images (B, 3, h, w) in [0, 1] of any size -> (B, 150, h, w)
    p = predict(model.eval(), image, size=512, window=512, stride=480)              # any image (3, h, w) -> (150, h, w)

B batch, K classes, C width, P patch size, N tokens, class token included; h, w pixels.

    question                  rstrudel/segmenter      rachtsy/segm            here
    decoder attention         softmax                 symmetric, no RPC       as the encoder's, no RPC (decoder_attn)
    eps of LayerNorm          1e-5                    1e-5                    1e-5 (the classifiers': 1e-6)
    classifier head           kept, unused            kept, unused            left out
    stride of evaluation      window; alone: - 32     window                  an argument
    windows of one image      batched view by view    the same                batched over all views
    upsample, merge, resize   in pixels, per window   the same                one matrix per axis (stitch); same numbers
"""

import math
from dataclasses import dataclass, fields
from functools import lru_cache

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from vit import (RPC_KINDS, Block, ViT, ViTConfig, load_strictly, load_weights, released_settings,
                 stored_config)

IGNORE = 255                          # label of pixels that do not count


@dataclass(frozen=True)
class SegmenterConfig:
    """Everything that rebuilds the model; the names of ViTConfig mean the same here."""
    num_classes: int                  # K
    image_size: int = 512             # side of the training crop; the grid that has the position embeddings
    patch_size: int = 16
    embed_dim: int = 192
    depth: int = 12
    num_heads: int = 3
    mlp_ratio: float = 4.0
    attn: str = "softmax"
    rpc_layers: tuple = (0,)          # of the encoder
    n_iter: int = 4
    lambd: float = 4.0
    form: str = "released"
    drop_path: float = 0.1            # of the encoder's last block, linear from 0
    eps: float = 1e-5                 # of every LayerNorm
    decoder: str = "mask"             # mask (transformer), linear
    decoder_attn: str = ""            # softmax, symmetric; "": symmetric if the encoder's plain layers are
    decoder_depth: int = 2
    decoder_heads: int = 0            # 0: C // 64, at least 1
    decoder_dropout: float = 0.1
    mean: tuple = (123.68 / 255, 116.28 / 255, 103.53 / 255)          # mmsegmentation's rounding of ImageNet's
    std: tuple = (58.4 / 255, 57.12 / 255, 57.38 / 255)

    def __post_init__(self):
        encoder = self.encoder                                                  # refuses what ViTConfig refuses
        plain = RPC_KINDS.get(self.attn, (None, self.attn))[1]
        for name, value in (("rpc_layers", encoder.rpc_layers), ("mean", encoder.mean), ("std", encoder.std),
                            ("decoder_attn", self.decoder_attn or ("symmetric" if plain == "symmetric" else "softmax")),
                            ("decoder_heads", self.decoder_heads or max(1, self.embed_dim // 64))):
            object.__setattr__(self, name, value)
        for name, known in (("decoder", ("mask", "linear")), ("decoder_attn", ("softmax", "symmetric"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}, expected one of {known}")
        if not 2 <= self.num_classes <= IGNORE:
            raise ValueError(f"num_classes={self.num_classes}, expected 2 to {IGNORE}; label {IGNORE} is ignored")

    @property
    def encoder(self):                # the ViT without its head
        own = {f.name: getattr(self, f.name) for f in fields(ViTConfig) if hasattr(self, f.name)}
        return ViTConfig(**{**own, "num_classes": 0})


# --- the model -------------------------------------------------------------------------------------------------------

def resize_pos_embed(pos_embed, grid, old_grid=None):
    """Position embeddings (1, 1 + old h * old w, C) for another grid (h, w); the class position is kept.

    Bilinear without antialiasing, as Segmenter does; `vit.resize_pos_embed` is DeiT's fine-tuning: bicubic, square.
    old_grid: square if not given. Raises ValueError if it does not fit.
    """
    h, w = old_grid or [math.isqrt(pos_embed.shape[1] - 1)] * 2
    if h * w != pos_embed.shape[1] - 1:
        raise ValueError(f"pos_embed has {pos_embed.shape[1]} positions, expected 1 + {h} x {w}")
    patches = pos_embed[:, 1:].mT.unflatten(2, (h, w))
    patches = F.interpolate(patches, size=tuple(grid), mode="bilinear", align_corners=False)
    return torch.cat([pos_embed[:, :1], patches.flatten(2).mT], 1)


class LinearDecoder(nn.Module):
    """One linear layer on every patch token: (B, n, C) -> (B, n, K)."""

    def __init__(self, config):
        super().__init__()
        self.head = nn.Linear(config.embed_dim, config.num_classes)

    def forward(self, x):
        return self.head(x)


class MaskDecoder(nn.Module):
    """Mask transformer: patches and classes attend to each other; masks are cosines. (B, n, C) -> (B, n, K)"""

    def __init__(self, config):
        super().__init__()
        c, C, drop = config, config.embed_dim, config.decoder_dropout
        self.proj_dec = nn.Linear(C, C)
        self.cls_emb = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, c.num_classes, C), std=0.02))
        self.blocks = nn.ModuleList(
            Block(C, c.decoder_heads, eps=c.eps, drop=drop, attn=c.decoder_attn, attn_drop=drop, proj_drop=drop)
            for _ in range(c.decoder_depth))
        self.decoder_norm = nn.LayerNorm(C, eps=c.eps)
        self.proj_patch = nn.Parameter(C ** -0.5 * torch.randn(C, C))
        self.proj_classes = nn.Parameter(C ** -0.5 * torch.randn(C, C))
        self.mask_norm = nn.LayerNorm(c.num_classes, eps=c.eps)

    def forward(self, x):
        n = x.shape[1]
        x = torch.cat([self.proj_dec(x), self.cls_emb.expand(len(x), -1, -1)], 1)             # (B, n + K, C)
        for block in self.blocks:
            x = block(x)
        x = self.decoder_norm(x)
        p, c = x[:, :n] @ self.proj_patch, x[:, n:] @ self.proj_classes
        p, c = p / p.norm(dim=-1, keepdim=True), c / c.norm(dim=-1, keepdim=True)
        return self.mask_norm(p @ c.mT)                                                       # over the K classes


class Segmenter(nn.Module):
    """Images (B, 3, h, w) in [0, 1], any h and w, to logits (B, K, h, w). The encoder is `vit.ViT` without its head."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.encoder = ViT(config.encoder)
        self.decoder = (MaskDecoder if config.decoder == "mask" else LinearDecoder)(config)
        for m in self.decoder.modules():
            if isinstance(m, nn.Linear):
                nn.init.trunc_normal_(m.weight, std=0.02)
                nn.init.zeros_(m.bias)

    def masks(self, images):
        """Logits per patch: images (B, 3, h, w) float in [0, 1] -> (B, K, ceil(h/P), ceil(w/P)), float32 at least."""
        if images.ndim != 4 or images.shape[1] != 3 or not images.is_floating_point():
            raise ValueError(f"images are {images.dtype} {tuple(images.shape)}, expected float in [0, 1] of shape "
                             f"(B, 3, h, w)")
        P, encoder = self.config.patch_size, self.encoder
        x = (images - encoder.mean) / encoder.std
        x = F.pad(x, (0, -x.shape[3] % P, 0, -x.shape[2] % P))           # zeros right and below: the mean colour
        grid, own = (x.shape[2] // P, x.shape[3] // P), self.config.image_size // P
        pos_embed = encoder.pos_embed
        if grid != (own, own):
            if self.config.attn == "scaled_s":
                raise ValueError(f"attn='scaled_s' learned its S for {own} x {own} patches; the image has {grid[0]} x "
                                 f"{grid[1]}, but S cannot be resized")
            pos_embed = resize_pos_embed(pos_embed, grid, (own, own))
        x = encoder.encode(encoder.tokens(x, pos_embed))                 # (B, N, C)
        x = self.decoder(x[:, 1:])                                       # (B, N - 1, K), without the class token
        x = x.mT.contiguous().unflatten(2, grid)                         # classes first: the loss is a third cheaper
        return x.to(torch.promote_types(x.dtype, torch.float32))

    def forward(self, images):
        masks = self.masks(images)
        logits = F.interpolate(masks, scale_factor=self.config.patch_size, mode="bilinear", align_corners=False)
        return logits[..., :images.shape[2], :images.shape[3]]


# --- inference: views, sliding windows -------------------------------------------------------------------------------

def resized(height, width, long, short):
    """Size (h, w) of an image scaled to fit the box: long side <= long, short side <= short, aspect kept."""
    f = min(long / max(height, width), short / min(height, width))
    return max(int(height * f + 0.5), 1), max(int(width * f + 0.5), 1)


def view(image, size, scale, window):
    """An image (3, h, w), uint8 or float in [0, 1], at one scale, as float in [0, 1]; no side is below the window.

    First into the box (4 size, size) * scale; if the short side is then below the window, enlarged until it is.
    """
    def resize(x, hw):
        return x if x.shape[1:] == hw else F.interpolate(x[None], size=hw, mode="bilinear", align_corners=False)[0]
    if image.ndim != 3 or len(image) != 3 or not (image.dtype == torch.uint8 or image.is_floating_point()):
        raise ValueError(f"the image is {image.dtype} {tuple(image.shape)}, expected uint8 or float in [0, 1] of shape "
                         f"(3, h, w)")
    x = image / 255 if image.dtype == torch.uint8 else image
    x = resize(x, resized(*x.shape[1:], int(4 * size * scale), int(size * scale)))
    h, w = x.shape[1:]
    if min(h, w) < window:
        x = resize(x, (window, int(w / h * window)) if h < w else (int(h / w * window), window))
    return x


def starts(side, window, stride):
    """Where windows begin along one side: 0, stride, 2 stride, ... while below side - window, and side - window."""
    if not 1 <= stride <= window <= side:
        raise ValueError(f"stride {stride}, window {window}, side {side}: expected 1 <= stride <= window <= side")
    return [*range(0, side - window, stride), side - window]


def sliding_windows(height, width, window, stride):
    """(top, left) of every window, row by row."""
    return [(top, left) for top in starts(height, window, stride) for left in starts(width, window, stride)]


@lru_cache(maxsize=64)
def stitch(side, window, stride, grid, out):
    """The matrix (m * grid, out) that takes the masks of m windows along one axis to the original image's pixels.

    Upsampling, cropping, the mean where windows overlap and resizing are linear and act on each axis by itself, so
    their product is one small matrix per axis. side: of the view, in pixels; grid: patches along a window.
    """
    def resize(x, size):
        return F.interpolate(x[None], size=size, mode="linear", align_corners=False)[0]
    canvas = torch.zeros(len(starts(side, window, stride)), grid, side)
    for i, start in enumerate(starts(side, window, stride)):
        canvas[i, :, start:start + window] = resize(torch.eye(grid), window)
    canvas = canvas.flatten(0, 1)
    return resize(canvas / canvas.sum(0), out)                           # the sum counts the windows over each pixel


@torch.no_grad()
def predict_views(model, views, shape, *, window, stride, batch_size=8):
    """Class probabilities (K, *shape): the softmax of each view's stitched logits, averaged over views.

    views: list of (image (3, h, w) float in [0, 1], flipped: bool), on the model's device. model: in eval mode. The
    windows of all views run together, batch_size at a time, each once. On one CPU core, where a large model's window
    keeps the core busy by itself, that gains 1.0 (tiny, 11 classes) to 3.5 times (a 64 px toy) over one by one.
    """
    grid, rest = divmod(window, model.config.patch_size)
    if rest:
        raise ValueError(f"window {window} is not a multiple of the patch size {model.config.patch_size}")
    corners = [sliding_windows(*x.shape[1:], window, stride) for x, _ in views]
    crops = [x[:, top:top + window, left:left + window] for (x, _), at in zip(views, corners) for top, left in at]
    masks = torch.cat([model.masks(torch.stack(crops[i:i + batch_size])) for i in range(0, len(crops), batch_size)])
    total = 0
    with torch.autocast(masks.device.type, enabled=False):
        for (x, flipped), m in zip(views, masks.split([len(at) for at in corners])):
            R, C = (stitch(side, window, stride, grid, out).to(m) for side, out in zip(x.shape[1:], shape))
            m = m.unflatten(0, (len(R) // grid, -1)).permute(2, 0, 3, 1, 4)                    # K, then y, then x
            m = m.reshape(-1, len(R), len(C))                                                  # all patches of the view
            total = total + (R.mT @ m @ (C.flip(1) if flipped else C)).softmax(0)              # (K, *shape)
    return total / len(views)


def predict(model, image, *, size, window, stride, scales=(1.0,), flip=False, batch_size=8):
    """Class probabilities (K, h, w) of one image (3, h, w), uint8 or float in [0, 1], at its own size.

    size: of the short side at scale 1. scales, flip: the views, each scale also mirrored if flip; in upstream's
    multi-scale evaluation 0.5, 0.75, 1, 1.25, 1.5, 1.75 and True. The rest: see predict_views.
    """
    image = image.to(next(model.parameters()).device)
    views = [(view(image, size, scale, window), False) for scale in scales]
    views += [(x.flip(2), True) for x, _ in views] if flip else []
    return predict_views(model, views, image.shape[1:], window=window, stride=stride, batch_size=batch_size)


# --- metrics ---------------------------------------------------------------------------------------------------------

def confusion(prediction, truth, num_classes):
    """Counts (K, K) int64, rows truth, columns prediction, of the pixels whose truth is not 255. Sum them over images.

    prediction, truth: class indices of one shape, any integer type. Raises ValueError for classes outside 0..K-1.
    """
    if prediction.shape != truth.shape:
        raise ValueError(f"the prediction is {tuple(prediction.shape)}, expected {tuple(truth.shape)} as the truth")
    keep = truth != IGNORE
    t, p = truth[keep].long(), prediction[keep].long()
    for name, x in (("truth", t), ("prediction", p)):
        if len(x) and not 0 <= x.min() <= x.max() < num_classes:
            raise ValueError(f"the {name} holds classes {x.min()} to {x.max()}, expected 0 to {num_classes - 1}"
                             + (f", or {IGNORE} for ignored pixels" if name == "truth" else ""))
    return torch.bincount(num_classes * t + p, minlength=num_classes ** 2).view(num_classes, num_classes)


def scores(confusion):
    """Pixel accuracy, mean class accuracy, mean IoU, in per cent, from the confusion matrix of a whole data set.

    A class absent from the truth has no accuracy; one absent from truth and predictions no IoU: NaN, left out of the
    means. Returns a dict; `accuracy` and `iou` are lists per class, `classes` and `classes_in_truth` how many entered
    mean_iou and mean_accuracy.
    """
    m = confusion.double()
    right, truth, predicted = m.diagonal(), m.sum(1), m.sum(0)
    accuracy, iou = 100 * right / truth, 100 * right / (truth + predicted - right)             # 0 / 0 is NaN
    return dict(pixel_accuracy=(100 * right.sum() / m.sum()).item(), mean_accuracy=accuracy.nanmean().item(),
                mean_iou=iou.nanmean().item(), accuracy=accuracy.tolist(), iou=iou.tolist(),
                classes=int((~iou.isnan()).sum()), classes_in_truth=int((truth > 0).sum()))


# --- evaluation over a data set --------------------------------------------------------------------

@torch.no_grad()
def predictions(model, source, index, *, size, window, stride, scales=(1.0,), flip=False,
                change=None, amp=False, num_workers=0):
    """Yields (image, label, prediction), uint8 on the model's device, of source[i] for i of index.

    The image (3, H, W) as it was changed, label and prediction (H, W). See evaluate.
    """
    device = next(model.parameters()).device
    loader = DataLoader(source, sampler=index, batch_size=None, num_workers=num_workers)
    for i, (image, label) in zip(index, loader):
        image = image.to(device)
        if change:
            image = change(image[None], [i])[0]
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            p = predict(model, image, size=size, window=window, stride=stride, scales=scales, flip=flip)
        yield image, label.to(device), p.argmax(0).byte()


def evaluate(model, source, *, size, window, stride, scales=(1.0,), flip=False, change=None,
             index=None, amp=False, num_workers=0, rank=0, world=1, progress=None):
    """Scores of a Segmenter over a data set. Returns (dict for a JSON file, confusion (K, K) int64).

    source: source[i] -> image (3, H, W), label (H, W), uint8, classes from 0, 255 ignored. size:
    pixels of the short side at scale 1; window, stride: pixels; scales, flip: the views, see predict.
    change(images (1, 3, H, W) uint8 on the model's device, [i]) -> the same shape and type, applied
    before resizing; i: the image's number in the source. index: list of those to use; None: all.
    amp: bf16. num_workers: decoding processes. rank, world: processes share the images; each returns
    the scores of all of them. progress: text for a progress bar; None: no bar.
    The dict: that of `scores`, rounded to 4 decimals, None where a class has no value, and `images`.
    The model ends in the mode it came in. Raises ValueError if there is no labelled pixel.
    """
    index = list(range(len(source))) if index is None else list(index)
    K, training = model.config.num_classes, model.training
    matrix = torch.zeros(K, K, dtype=torch.int64, device=next(model.parameters()).device)
    mine = index[rank::world]
    triples = predictions(model.eval(), source, mine, size=size, window=window, stride=stride,
                          scales=scales, flip=flip, change=change, amp=amp, num_workers=num_workers)
    quiet = rank > 0 or progress is None
    for _, label, prediction in tqdm(triples, progress, len(mine), leave=False, disable=quiet):
        matrix += confusion(prediction, label, K)
    model.train(training)
    if world > 1:
        dist.all_reduce(matrix)
    if not matrix.any():
        raise ValueError(f"none of the {len(index)} images has a labelled pixel")
    return dict(plain(scores(matrix)), images=len(index)), matrix


def plain(metrics):
    """Metrics for a JSON file: rounded, None where a class has no value."""
    def number(x):
        return None if math.isnan(x) else round(x, 4)
    return {name: [number(x) for x in value] if isinstance(value, list) else number(value)
            for name, value in metrics.items()}


# --- weights from files ----------------------------------------------------------------------------------------------

def segmenter_from_checkpoint(checkpoint):
    """The model of one of our checkpoints (train_seg.py), in eval mode; nothing else has to be said about it."""
    if checkpoint.get("task") != "segmentation" or "model_config" not in checkpoint:
        raise ValueError("not a checkpoint of train_seg.py: it has no segmentation model_config")
    model = Segmenter(stored_config(checkpoint, SegmenterConfig))
    load_strictly(model, checkpoint["model"])
    return model.eval()


def load_reference(model, state):
    """Load upstream's state dict (encoder.*, decoder.*), strictly but for its encoder's unused classifier head."""
    load_strictly(model, {k: v for k, v in state.items() if not k.startswith("encoder.head.")})


def backbone_settings(checkpoint):
    """What a classification checkpoint says of its encoder, as a dict of ViTConfig's names.

    Ours (train_cls.py) say all of it, files of `rachtsy/KPCA_code` their attention; the rest is read off the shapes:
    DeiT and timm have softmax attention (3C rows in qkv) and heads of width 64. Raises ValueError if attention stays
    unknown.
    """
    if checkpoint.get("task", "classification") != "classification":
        raise ValueError(f"a backbone is a checkpoint of classification, this one is of {checkpoint['task']}")
    if "model_config" in checkpoint:
        config = stored_config(checkpoint, ViTConfig)
        names = ("embed_dim", "depth", "num_heads", "patch_size", "mlp_ratio", "attn",
                 *(("rpc_layers", "n_iter", "lambd", "form") if config.attn in RPC_KINDS else ()))
        return {name: getattr(config, name) for name in names}
    sd = checkpoint.get("model", checkpoint)
    names = ("patch_embed.proj.weight", "blocks.0.mlp.fc1.weight", "blocks.0.attn.qkv.weight")
    if not set(names) <= set(sd):
        raise ValueError(f"not ViT weights: expected timm's names ({', '.join(names)}, ...)")
    patch, fc1, qkv = (sd[name] for name in names)
    C, depth = len(patch), len({k.split(".")[1] for k in sd if k.startswith("blocks.")})
    attention = released_settings(checkpoint.get("args"), depth) or dict(attn="softmax")
    if attention["attn"] == "softmax" and len(qkv) != 3 * C:
        raise ValueError("a backbone with 2C rows in qkv is symmetric or RPC; this file does not say which, nor n "
                         "and lambda, and the weights do not tell them apart")
    return dict(embed_dim=C, depth=depth, num_heads=max(1, C // 64), patch_size=patch.shape[-1],
                mlp_ratio=len(fc1) / C, **attention)


def config_from_backbone(checkpoint, num_classes, image_size=512, **settings):
    """SegmenterConfig with the encoder of a classification checkpoint; settings: further fields, which win."""
    settings = {**backbone_settings(checkpoint), **settings}
    return SegmenterConfig(num_classes=num_classes, image_size=image_size, **settings)


def load_backbone(model, checkpoint):
    """Load a classification checkpoint into model.encoder, strictly but for the head; positions are resized.

    checkpoint: as for `vit.load_weights`. Raises ValueError naming what does not agree: an encoder keeps the attention
    it was trained with.
    """
    ours, sd = model.config, dict(checkpoint.get("model", checkpoint))
    if "model_config" in checkpoint:
        for name, value in backbone_settings(checkpoint).items():
            if getattr(ours, name) != value:
                raise ValueError(f"the backbone was trained with {name}={value!r}, the model has "
                                 f"{name}={getattr(ours, name)!r}")
    if "pos_embed" in sd and "dist_token" not in sd:
        sd["pos_embed"] = resize_pos_embed(sd["pos_embed"], [ours.image_size // ours.patch_size] * 2)
    sd = {k: v for k, v in sd.items() if not k.startswith("head.")}
    load_weights(model.encoder, {"model": sd, "args": checkpoint.get("args")})
