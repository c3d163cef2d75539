"""Compute the reference arrays of tests with other libraries or with independent code.

The recorded reference arrays contain photographs, so a clone of the repository does not have them.
`make(name)` then computes arrays with the same names from rendered scenes. It uses the packages of
tests/requirements.txt (imagecorruptions, OpenCV, timm), or formulas written out here a second time
(kernel PCA, FAN, Segmenter). A test compares our code with these arrays.
"""

import inspect
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from attention import SelfAttention
from data.shapes import render_scenes
from fan import FAN, FANConfig
from robust.corruptions import CONSTANTS

DETERMINISTIC = ("defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate",
                 "jpeg_compression")


def scenes(n=4, height=64, width=None, first=0):
    """Render scenes number first, first + 1, ...: (n, 3, height, width) uint8."""
    images = render_scenes(torch.arange(first, first + n), max(height, width or height))[0]
    return images[:, :, :height, :width or height].contiguous()


def picture(height, width=None):
    """Return the first scene as other libraries expect it: (height, width, 3) uint8, numpy."""
    return scenes(1, height, width)[0].permute(1, 2, 0).contiguous().numpy()


def frost_dir(beside):
    """Return the folder with ImageNet-C's photographs of frost.

    This is `beside` if the folder exists, else a folder of the package imagecorruptions.
    """
    package = find_spec("imagecorruptions")
    return beside if beside.exists() else Path(package.submodule_search_locations[0], "frost")


@contextmanager
def imagecorruptions():
    """Yield the module imagecorruptions.corruptions, patched for current numpy and scikit-image."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "float_", np.float64, raising=False)
        module = pytest.importorskip("imagecorruptions.corruptions", exc_type=ImportError)
        gaussian = module.gaussian
        if "multichannel" not in inspect.signature(gaussian).parameters:
            patch.setattr(module, "gaussian", lambda *args, multichannel=False, **kwargs: gaussian(
                *args, **kwargs, **({"channel_axis": -1} if multichannel else {})))
        yield module


def elastic(image, c, jitter, field):
    """Apply ImageNet-C's elastic transform with OpenCV and SciPy; imagecorruptions has another.

    image: (H, W, 3) uint8. c: alpha, sigma and the largest jitter. jitter: (3, 2), moves three
    corners. field: (2, H, W), random numbers in [-1, 1].
    """
    import cv2
    from scipy.ndimage import gaussian_filter, map_coordinates
    (H, W), (alpha, sigma, _) = image.shape[:2], c
    centre, s = np.float32((H // 2, W // 2)), min(H, W) // 3
    corners = centre + np.float32([[s, s], [s, -s], [-s, -s]])
    matrix = cv2.getAffineTransform(corners, corners + np.float32(jitter))
    image = cv2.warpAffine(np.float32(image) / 255, matrix, (W, H),
                           borderMode=cv2.BORDER_REFLECT_101)
    across, down = (alpha * gaussian_filter(np.float64(f), sigma, mode="reflect", truncate=3)
                    for f in field)
    y, x = np.mgrid[:H, :W]
    at = y + down, x + across
    planes = [map_coordinates(image[..., k], at, order=1, mode="reflect") for k in range(3)]
    return 255 * np.clip(np.stack(planes, 2), 0, 1)


def injected(module, z, patch):
    """Add random corruptions to z, with fixed numbers in place of the package's random numbers."""
    rng, x = np.random.default_rng(1), picture(224)
    for severity in (1, 3, 5):
        for angle in (-37.5, 20.0):
            blurred = module._motion_blur(x, *CONSTANTS["motion_blur"][224][severity - 1], angle)
            z[f"motion/s{severity}/a{angle}"] = np.clip(blurred, 0, 255)
    for severity in (2, 5):
        _, d, iterations = CONSTANTS["glass_blur"][224][severity - 1]
        shift = rng.integers(-d, d, (iterations, 224 - 2 * d, 224 - 2 * d, 2))
        numbers = iter(shift.reshape(-1, 2))
        patch.setattr(np.random, "randint", lambda *_, **__: next(numbers))
        z[f"glass/s{severity}/disp"] = np.int8(shift)
        z[f"glass/s{severity}/out"] = module.glass_blur(x, severity)

        c = CONSTANTS["elastic_transform"][224][severity - 1]
        jitter = rng.uniform(-c[2], c[2], (3, 2))
        field = np.float16(rng.uniform(-1, 1, (2, 224, 224)))
        drawn = zip(("jitter", "ux", "uy"), (np.float32(jitter), *field))
        z.update({f"elastic/s{severity}/{k}": v for k, v in drawn})
        z[f"elastic/s{severity}/out"] = elastic(x, c, jitter, field)
    smear = module._motion_blur                 # ImageNet-C rounds down before and after
    patch.setattr(module, "_motion_blur", lambda x, **how: np.floor(
        smear(np.floor(255 * x[:224, :224]), **how)) / 255)
    for severity, angle in ((1, -62.0), (4, -100.0)):
        field = np.float16(rng.normal(size=(224, 224)))
        patch.setattr(np.random, "normal", lambda size, loc, scale: loc + scale * np.float64(field))
        patch.setattr(np.random, "uniform", lambda *_: angle)
        z[f"snow/s{severity}/z"], z[f"snow/s{severity}/angle"] = field, np.float64(angle)
        z[f"snow/s{severity}/out"] = module.snow(x, severity)
    plasma = np.float16(rng.uniform(size=(224, 224)))
    patch.setattr(module, "plasma_fractal", lambda **_: np.float64(plasma))
    z["fog/s3/plasma"], z["fog/s3/out"] = plasma, module.fog(x, 3)


def robustness_corruptions_a():
    """Return outputs of imagecorruptions, deterministic or with fixed random numbers."""
    from PIL import Image
    z = dict(clean224=picture(224), clean32=picture(32), clean_any=picture(150, 232))
    with imagecorruptions() as module, pytest.MonkeyPatch.context() as patch:
        for name in DETERMINISTIC:
            for kind, clean, severities in ("det", "clean224", (1, 3, 5)), ("det_any", "clean_any",
                                                                            (4,)):
                for s in severities:
                    z[f"{kind}/{name}/s{s}"] = np.asarray(
                        getattr(module, name)(Image.fromarray(z[clean]), s))
        injected(module, z, patch)
    outputs = {k: np.uint8(v) for k, v in z.items() if v.ndim == 3 and v.shape[2] == 3}
    return {k: torch.from_numpy(np.array(v)) for k, v in {**z, **outputs}.items()}


def seg_transforms():
    """Return a scene after each augmentation step of mmsegmentation, computed with OpenCV."""
    import cv2
    rgb = picture(360, 480)
    raw = np.uint8(render_scenes(torch.arange(1), 480)[2][0, :360, :480])
    raw[:, ::50] = 0
    muted = np.uint8(rgb[90:218, 150:278] // 4 + 90)        # muted colours, as in photographs
    z = dict(rgb=rgb, label_raw=raw, label_reduced=raw - np.uint8(1), crop_rgb=muted)
    z["resized_rgb"] = cv2.resize(rgb, (272, 204), interpolation=cv2.INTER_LINEAR)
    z["resized_label"] = cv2.resize(z["label_reduced"], (272, 204), interpolation=cv2.INTER_NEAREST)
    shapes = (360, 480), (480, 360), (300, 1200), (333, 517)
    z["size_rule"] = np.array([size_rule(h, w, ratio) for h, w in shapes
                               for ratio in (0.5, 0.75, 1.0, 1.3, 2.0)])

    crop = np.float32(z["crop_rgb"])
    z["bright_beta"], z["contrast_alpha"] = np.array([-32.0, -7.5, 31.0]), np.array([0.5, 1.2, 1.5])
    z["sat_alpha"], z["hue_delta"] = np.array([0.5, 1.3, 1.5]), np.array([-18, 5, 17])
    z["bright_rgb"] = np.stack([np.uint8(np.clip(crop + np.float32(b), 0, 255))
                                for b in z["bright_beta"]])
    z["contrast_rgb"] = np.stack([np.uint8(np.clip(crop * np.float32(a), 0, 255))
                                  for a in z["contrast_alpha"]])
    hue, saturation, value = cv2.split(cv2.cvtColor(z["crop_rgb"], cv2.COLOR_RGB2HSV))
    stronger = [np.uint8(np.clip(saturation * a, 0, 255)) for a in z["sat_alpha"]]
    turned = [np.uint8((hue.astype(int) + d) % 180) for d in z["hue_delta"]]
    for name, channels in (("sat_rgb", [(hue, s, value) for s in stronger]),
                           ("hue_rgb", [(h, saturation, value) for h in turned])):
        z[name] = np.stack([cv2.cvtColor(cv2.merge(hsv), cv2.COLOR_HSV2RGB) for hsv in channels])
    z["norm_mean"], z["norm_std"] = np.array([[123.68, 116.28, 103.53], [58.4, 57.12, 57.38]])
    z["normalised"] = np.float32(cv2.divide(cv2.subtract(crop, z["norm_mean"]), z["norm_std"]))
    return {k: torch.from_numpy(v) for k, v in z.items()}


def size_rule(h, w, ratio, size=256):
    """Return one row: h, w, ratio, the box, and the size of the image fitted into the box.

    The sides of the box are 4 * size * ratio and size * ratio; the aspect ratio stays the same.
    """
    box = int(4 * size * ratio), int(size * ratio)
    scale = min(max(box) / max(h, w), min(box) / min(h, w))
    return h, w, ratio, *box, int(h * scale + 0.5), int(w * scale + 0.5)


# --- kernel PCA: the same definitions with plain exponentials, in float64 -------------------------

def standardised(x):
    return (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)


def eigenvalues(k):
    """Return statistics of the first D eigenvalues of the centred Gram matrix, and 1 / min g.

    The statistics are maximum, minimum, mean and lower median, averaged over images and heads. Each
    head has one value of 1 / min g.
    """
    D = k.shape[-1]
    K = (k @ k.mT / D ** 0.5).exp()
    g = K.sum(-1, keepdim=True)
    K = K / g / g.mT
    K = K - K.mean(-1, keepdim=True)
    K = K - K.mean(-2, keepdim=True)
    mu = torch.linalg.svdvals(K)[..., :D].mean((0, 1))
    return torch.stack([mu[0], mu[-1], mu.mean(), mu.median()]), (1 / g.amin((-2, -1))).flatten()


def kpca_vit():
    """Return random q, k, v with the loss J that the released code logs, and keys with eigenvalues.

    The released code standardises q and k, and it does not scale |q|^2 and q.k_1.
    """
    z = {f"jproj_variants__{n}": torch.randn(3, 65, 64, dtype=torch.float64) for n in "qkv"}
    q, k, v = z.values()
    q, k = standardised(q), standardised(k)
    qk = q @ k.mT
    A = (qk / 8).softmax(-1)
    phi2 = q.square().sum(-1).exp() / (2 * qk[..., 0] - A[..., 0].square().log()).exp()
    z["jproj_variants__official"] = (phi2 - (A @ v).square().sum(-1)).mean().log()
    z["jproj_variants__official_without_h"] = phi2.mean().log()
    keys = z["eigstats__k"] = torch.randn(3, 3, 65, 32, dtype=torch.float64)
    z["eigstats__stats"], z["eigstats__bound"] = eigenvalues(keys)
    z["eigstats__stats_standardised"] = eigenvalues(standardised(keys))[0]
    return z


# --- timm's models with the attentions of the paper -----------------------------------------------

class Attention(SelfAttention):
    """Our attention layer, which test_attention.py compares with the released code, for timm."""

    def forward(self, x, **_):
        return super().forward(x)


def attention(pap=None, dim=48, heads=3):
    """Return RPC-Attention with the settings `pap`, or symmetric attention."""
    return Attention(dim, heads, "rpc" if pap else "symmetric", pap=pap)


def vision_transformer(layer=None, heads=3, eps=1e-6, **sizes):
    """Return timm's ViT with the module layer(i) as attention of block i (default: timm's)."""
    timm = pytest.importorskip("timm")
    norm = partial(torch.nn.LayerNorm, eps=eps)
    model = timm.models.VisionTransformer(embed_dim=48, depth=2, num_heads=heads, norm_layer=norm,
                                          **sizes).eval()
    for i, block in enumerate(model.blocks):
        block.attn = layer(i) if layer else block.attn
    return model


def randomise(model):
    """Randomise all weights in place; return a copy of the state dict, names with prefix "sd/"."""
    for p in model.parameters():
        p.data = 0.8 * p + 0.2 * torch.randn(p.shape) / max(1, p.shape[-1] / 12) ** 0.5
    for name, p in model.named_parameters():
        if name.endswith("qkv.weight"):
            p.data[:-48] *= 4               # long keys, so that S of Algorithm 1 is not 0
    return {f"sd/{k}": v.clone() for k, v in model.state_dict().items()}


def vit_arrays(variants, gradients=()):
    """Return inputs, weights and outputs of a model whose variants share their weights.

    variants: {prefix of the names: layer}. Per variant: logits in float32 and float64, the
    loss, the output of each block, and the gradients of the parameters that `gradients` names.
    """
    target = torch.tensor([1, 8])
    out = dict(x=torch.randn(2, 3, 32, 32), target=target)
    weights = None
    for prefix, layer in variants.items():
        model = vision_transformer(layer, img_size=32, patch_size=8, num_classes=10)
        weights = weights or randomise(model)
        model.load_state_dict({k[3:]: v for k, v in weights.items()})
        out[f"{prefix}logits32"] = model(out["x"]).detach()
        blocks = []
        for block in model.double().blocks:
            block.register_forward_hook(lambda _, inputs, output: blocks.append(output.detach()))
        logits = model(out["x"].double())
        loss = F.cross_entropy(logits, target)
        loss.backward()
        out.update({f"{prefix}logits64": logits.detach(), f"{prefix}loss64": loss.detach()})
        out.update({f"{prefix}block{i}": b for i, b in enumerate(blocks)})
        out.update({f"{prefix}grad/{name}": model.get_parameter(name).grad for name in gradients})
    return out | weights


def model_symvit():
    layers = {"sym": {}, "rpc_l0_n4_lam4": {0: (4, 4.0)}, "rpc_l0_n6_lam4": {0: (6, 4.0)},
              "rpc_all_n2_lam3": {0: (2, 3.0), 1: (2, 3.0)}, "rpc_l1_n2_lam0.5": {1: (2, 0.5)}}
    variants = {f"{name}/": lambda i, rpc=rpc: attention(
        dict(zip(("n_iter", "lambd"), rpc.get(i, ())))) for name, rpc in layers.items()}
    return vit_arrays(variants, ("blocks.0.attn.qkv.weight", "cls_token", "patch_embed.proj.bias"))


class Upstream(torch.nn.Module):
    """Segmenter of the original code: timm's encoder, and a mask decoder with timm's blocks."""

    def __init__(self, layer=None):
        super().__init__()
        eps = 1e-5
        options = dict(heads=2, eps=eps, img_size=64, patch_size=16, num_classes=1000)
        self.encoder = vision_transformer(layer, **options)
        d = self.decoder = torch.nn.Module()
        d.proj_dec, d.decoder_norm = torch.nn.Linear(48, 48), torch.nn.LayerNorm(48, eps)
        d.mask_norm = torch.nn.LayerNorm(5, eps)
        d.cls_emb = torch.nn.Parameter(torch.randn(1, 5, 48))
        d.proj_patch, d.proj_classes = (torch.nn.Parameter(torch.randn(48, 48)) for _ in range(2))
        d.blocks = vision_transformer(layer and (lambda i: attention(heads=2)), **options).blocks

    def tokens(self, x):
        e = self.encoder
        grid = x.shape[2] // 16, x.shape[3] // 16
        pos = e.pos_embed[:, 1:].mT.unflatten(2, (4, 4))
        pos = F.interpolate(pos, grid, mode="bilinear").flatten(2).mT
        x = e.patch_embed.proj(x).flatten(2).mT + pos
        x = torch.cat([(e.cls_token + e.pos_embed[:, :1]).expand(len(x), -1, -1), x], 1)
        for block in e.blocks:
            x = block(x)
        return e.norm(x)

    def masks(self, x):
        d, rows = self.decoder, x.shape[2] // 16
        x = self.tokens(x)[:, 1:]
        x = torch.cat([d.proj_dec(x), d.cls_emb.expand(len(x), -1, -1)], 1)
        for block in d.blocks:
            x = block(x)
        x = d.decoder_norm(x)
        patches = F.normalize(x[:, :-5] @ d.proj_patch, dim=2)
        classes = F.normalize(x[:, -5:] @ d.proj_classes, dim=2)
        return d.mask_norm(patches @ classes.mT).mT.unflatten(2, (rows, -1))

    def forward(self, x):
        H, W = x.shape[2:]
        x = F.pad(x, (0, -W % 16, 0, -H % 16))
        return F.interpolate(self.masks(x), x.shape[2:], mode="bilinear")[:, :, :H, :W]


def seg_arrays(**kind):
    """Return inputs, outputs, loss and gradients of an `Upstream` with random weights."""
    model = Upstream(**kind).eval()
    out = randomise(model)
    x, odd = torch.randn(2, 3, 64, 64), torch.randn(1, 3, 50, 70)
    label = torch.randint(0, 5, (2, 64, 64))
    label[torch.rand(2, 64, 64) < 0.2] = 255
    out.update(input=x, odd_input=odd, label=label.byte(), encoder_tokens=model.tokens(x),
               decoder_masks=model.masks(x))
    out.update(logits=model(x), odd_logits=model(odd),
               loss=F.cross_entropy(model(x), label, ignore_index=255))
    out["loss"].backward()
    for name in ("encoder.patch_embed.proj.weight", "encoder.pos_embed",
                 "encoder.blocks.0.attn.qkv.weight",
                 "encoder.blocks.0.mlp.fc2.bias", "decoder.proj_patch"):
        out[f"grad/{name}"] = model.get_parameter(name).grad
    return {k: v.detach() for k, v in out.items()}


def seg_sliding(window=64, stride=48, shape=(100, 140)):
    """Return the class probabilities of three views, with the model of seg_mask in windows.

    Two views have one size, and the second one is mirrored. The third view has half this size.
    """
    model = Upstream().eval()
    model.load_state_dict({k[3:]: v for k, v in make("seg_mask").items() if k.startswith("sd/")})
    out = {name: torch.tensor(value) for name, value in (
        ("window", window), ("stride", stride), ("ori_shape", shape))}
    for i, (h, w, flip) in enumerate(((90, 130, False), (90, 130, True), (45, 65, False))):
        image = out[f"im_{i}"] = torch.randn(1, 3, h, w)
        if h < window:
            h, w = window, int(w / h * window)
            image = F.interpolate(image, (h, w), mode="bilinear")
        corners = [(min(y, h - window), min(x, w - window))
                   for y in range(0, h - window + stride, stride)
                   for x in range(0, w - window + stride, stride)]
        total, count = torch.zeros(1, 5, h, w), torch.zeros(h, w)
        for y, x in corners:
            part = (..., slice(y, y + window), slice(x, x + window))
            total[part] += model(image[part]).detach()
            count[part] += 1
        logits = F.interpolate(total / count, shape, mode="bilinear")[0]
        out[f"prob_{i}"] = (logits.flip(2) if flip else logits).softmax(0)
        out.update({f"flip_{i}": torch.tensor(flip), f"anchors_{i}": torch.tensor(corners),
                    f"resized_shape_{i}": torch.tensor((h, w))})
    out["prob_mean"] = sum(out[f"prob_{i}"] for i in range(3)) / 3
    return out | dict(argmax=out["prob_mean"].argmax(0))


# --- FAN as one function of the state dict w of the original code ---------------------------------

def linear(w, name, x):
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def layer_norm(w, name, x, eps=1e-6):
    z = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + eps).sqrt()
    return z * w[f"{name}.weight"] + w[f"{name}.bias"]


def batch_norm(w, name, x):
    mean, var, scale, shift = (w[f"{name}.{part}"][:, None, None]
                               for part in ("running_mean", "running_var", "weight", "bias"))
    return (x - mean) / (var + 1e-5).sqrt() * scale + shift


def apart(x, heads):                                # (B, N, C) -> (B, H, N, D)
    return x.reshape(len(x), -1, heads, x.shape[-1] // heads).transpose(1, 2)


def attend(q, k, v, heads):
    q, k, v = (apart(x, heads) for x in (q, k, v))
    A = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    return (A @ v).transpose(1, 2).reshape(len(v), -1, heads * v.shape[-1])


def token_attention(w, name, z, heads, how):
    """Compute FAN's attention over tokens. how: settings of RPC, or None."""
    C = z.shape[-1]
    if f"{name}.q.weight" not in w:                                     # symmetric or RPC attention
        parts = {f"{ours}.{end}": w[f"{name}.{theirs}.{end}"]
                 for ours, theirs in (("qkv", "kv"), ("proj", "proj"))
                 for end in ("weight", "bias")}
        return torch.func.functional_call(attention(how, C, heads), parts, z)
    kv = linear(w, f"{name}.kv", z)
    out = attend(linear(w, f"{name}.q", z), kv[..., :C], kv[..., C:], heads)
    return linear(w, f"{name}.proj", out)


def channel_attention(w, name, z, heads):
    B, N, C = z.shape
    gates = []
    for h, part in enumerate(z.split(C // heads, 2)):                   # head by head
        q = linear(w, f"{name}.q", z).split(C // heads, 2)[h].softmax(1)
        gate = torch.sigmoid((q * part.softmax(1).mean(2, keepdim=True)).sum(1))
        gates.append(gate * w[f"{name}.temperature"][h, 0])
    u = linear(w, f"{name}.mlp_v.fc1", z)
    grid, dw = u.mT.reshape(B, -1, round(N ** 0.5), round(N ** 0.5)), f"{name}.mlp_v.dwconv"
    for conv in ("conv1", "conv2"):
        grid = F.conv2d(grid, w[f"{dw}.{conv}.weight"], w[f"{dw}.{conv}.bias"], padding=1,
                        groups=u.shape[-1])
        grid = batch_norm(w, f"{dw}.bn", F.gelu(grid)) if conv == "conv1" else grid
    u = u + w[f"{name}.mlp_v.gamma"] * grid.reshape(B, -1, N).mT
    u = layer_norm(w, f"{name}.norm_v", linear(w, f"{name}.mlp_v.fc2", u), 1e-5)
    return u * torch.cat(gates, 1)[:, None]


def class_block(w, b, x, heads):
    """Compute a class-attention block. Only the class token attends; patch tokens are doubled."""
    z = layer_norm(w, f"{b}.norm1", x)
    query = "q" if f"{b}.attn.q.weight" in w else "k"       # symmetric: the class token's key
    parts = ((query, z[:, :1]), ("k", z), ("v", z))
    looked = attend(*(linear(w, f"{b}.attn.{name}", part) for name, part in parts), heads)
    x = x + w[f"{b}.gamma1"] * torch.cat([linear(w, f"{b}.attn.proj", looked), z[:, 1:]], 1)
    x = layer_norm(w, f"{b}.norm2", x)
    token = linear(w, f"{b}.mlp.fc2", F.gelu(linear(w, f"{b}.mlp.fc1", x[:, :1])))
    return torch.cat([x[:, :1] + w[f"{b}.gamma2"] * token, 2 * x[:, 1:]], 1)


def fan(w, x, pos, heads=4, rpc=None):
    """Return the logits of normalised images x, and the tokens after each block.

    w: state dict. pos: (patches, 64), the position code. rpc: {layer: settings}, the layers with
    RPC-Attention. Layers without attn.q in w are symmetric. The model is in eval mode.
    """
    for i in range(0, 8, 2):
        x, name = F.gelu(x) if i else x, f"patch_embed.proj.{i}"
        x = batch_norm(w, f"{name}.1", F.conv2d(x, w[f"{name}.0.weight"], stride=2, padding=1))
    C, token = x.shape[1], "pos_embed.token_projection"
    x = x.flatten(2).mT + pos @ w[f"{token}.weight"].reshape(C, -1).T + w[f"{token}.bias"]

    stages, depth = [], len({k.split(".")[1] for k in w if k.startswith("blocks.")})
    for i in range(depth):
        b, how = f"blocks.{i}", (rpc or {}).get(i)
        z = layer_norm(w, f"{b}.norm1", x)
        x = x + w[f"{b}.gamma1"] * token_attention(w, f"{b}.attn", z, heads, how)
        z = layer_norm(w, f"{b}.norm2", x)
        x = x + w[f"{b}.gamma2"] * channel_attention(w, f"{b}.mlp", z, heads)
        stages.append(x)
    x = torch.cat([w["cls_token"].expand(len(x), -1, -1), x], 1)
    for i in range(2):
        x = class_block(w, f"cls_attn_blocks.{i}", x, heads)
        stages.append(x)
    return linear(w, "head", layer_norm(w, "norm", x)[:, 0]), stages


def model_fan():
    """Return random weights, and the logits and tokens that `fan` computes with them."""
    model = FAN(FANConfig(image_size=64, embed_dim=32, depth=2, num_heads=4, num_classes=10))
    w = {}
    for k, v in model.state_dict().items():
        w[k] = v + 0.2 * torch.randn(v.shape)           # norms and factors stay near 1
        if v.ndim > 1:
            w[k] = torch.randn(v.shape) / v[0].numel() ** 0.5
    x, pos = torch.randn(2, 3, 64, 64), torch.zeros(16, 64)
    for token, place in enumerate((r, c) for r in range(4) for c in range(4)):
        for i in range(64):
            scale = 2 * np.pi / (4 + 1e-6)
            angle = (place[i // 32] + 1) * scale / 10000 ** (2 * (i % 32 // 2) / 32)
            pos[token, i] = np.cos(angle) if i % 2 else np.sin(angle)
    double = {k: v.double() for k, v in w.items()}
    logits, stages = fan(w, x, pos)
    exact = fan(double, x.double(), pos.double())[0]
    out = dict(x=x, pos_features=pos, logits32=logits, logits64=exact)
    stages = {f"stage{i}": s for i, s in enumerate(stages)}
    return out | stages | {f"sd/{k}": v for k, v in w.items()}


MAKE = dict(
    seg_transforms=seg_transforms, robustness_corruptions_a=robustness_corruptions_a,
    kpca_vit=kpca_vit, model_symvit=model_symvit, model_vit_asym=lambda: vit_arrays({"": None}),
    model_scaled_S=lambda: vit_arrays(
        {"": lambda i: Attention(48, 3, "scaled_s", num_tokens=17)}),
    model_scaled_alpha=lambda: vit_arrays({"": lambda i: Attention(48, 3, "scaled_alpha")}),
    model_fan=model_fan, seg_mask=seg_arrays, seg_sliding=seg_sliding,
    seg_mask_symmetric=lambda: seg_arrays(layer=lambda i: attention(heads=2)),
    seg_mask_rpc=lambda: seg_arrays(
        layer=lambda i: attention(dict(n_iter=6, lambd=2.0) if i == 0 else None, heads=2)))


def make(name):
    """Compute the reference arrays `name`, a key of MAKE, with fixed random numbers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MAKE[name]()
