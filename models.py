"""The classifiers by name, and their weights from files.

    model = load_classifier(common.load("out/shapes_rpc"))

To add a model of your own, write a class and its config, as ViT and ViTConfig are, and enter them
in MODELS and their sizes in SIZES.
"""

import math
import re

import fan
import vit
from common import InputError, check_task, first_difference, print0

# {architecture: (class of the network, class of its settings)}. A checkpoint stores the first word.
MODELS = dict(vit=(vit.ViT, vit.ViTConfig), fan=(fan.FAN, fan.FANConfig))
# {value of --model: (architecture, settings)}
SIZES = {name: ("vit", size) for name, size in vit.SIZES.items()}
SIZES |= {name: ("fan", size) for name, size in fan.FAN_SIZES.items()}


def load_classifier(checkpoint):
    """Rebuild a network of train_cls.py, or a ViT from weights with timm's names, in eval mode."""
    if "task" not in checkpoint:
        return load_timm(checkpoint)
    check_task(checkpoint, "classification")
    Model, Config = MODELS[checkpoint.get("architecture", "vit")]
    model = Model(Config(**checkpoint["model_config"]))
    model.load_state_dict(checkpoint["model"])
    return model.eval()


# The names of weights in a file, the preferred ones first: DeiT evaluates "model", and timm
# evaluates "state_dict_ema", the moving average.
WEIGHTS = ("model", "model_ema", "state_dict_ema", "state_dict")


def load_timm(checkpoint):
    """Rebuild a ViT from weights with timm's names (DeiT, timm, rachtsy/KPCA_code), in eval mode.

    checkpoint: a dict {name: tensor}, or a dict that contains one under a name in WEIGHTS. The
    released code also stores its flags as "args". Three settings are in no file. So we assume that
    heads are 64 wide, eps is 1e-6, and pixels are normalised as in ViTConfig.
    """
    sets = [name for name in WEIGHTS if isinstance(checkpoint.get(name), dict)]
    weights = checkpoint[sets[0]] if sets else checkpoint
    if len(sets) > 1:
        print0(f"the file has several sets of weights, {', '.join(sets)}; {sets[0]} is taken")
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
    config = vit.ViTConfig(
        image_size=side * patch_size, patch_size=patch_size, num_classes=num_classes,
        embed_dim=C, depth=depth, num_heads=max(1, C // 64),
        mlp_ratio=len(state["blocks.0.mlp.fc1.weight"]) / C, **attention)
    model = vit.ViT(config)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:                       # such as the second token of some DeiTs
        difference = first_difference(error)
        raise InputError(f"the file is no ViT that vit.py can rebuild: {difference}; "
                         "expected the weights of a ViT with timm's names") from None
    print0(f"{config.attn} attention with {config.num_heads} heads; assumed: heads are "
           "64 wide, eps is 1e-6, pixels are normalised by ImageNet's mean and std")
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
        raise InputError("qkv has 2C rows, so the attention is symmetric or RPC; the "
                         "file does not store which: expected args with num_iter, "
                         "lambd, robust and layer")
    if not args.robust:
        return dict(attn="symmetric")
    layer = getattr(args, "layer", 0)
    layers = (layer,)
    if layer == -1:                                     # in the released code: all layers
        layers = tuple(range(depth))
    pap = dict(n_iter=args.num_iter, lambd=args.lambd, form="released")
    return dict(attn="rpc", rpc_layers=layers, pap=pap)
