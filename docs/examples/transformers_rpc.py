"""Evaluate a Hugging Face ViT with RPC-Attention: python -m docs.examples.transformers_rpc"""

import sys

import torch
from torch import nn
from torchvision.transforms.v2 import Normalize
from transformers import (AttentionInterface, AttentionMaskInterface, ViTConfig,
                          ViTForImageClassification)
from transformers.masking_utils import sdpa_mask

import common
import eval_robust
from attention import rpc_attention


# Keywords that change nothing here: the scale is 1/sqrt(D), and the mask contains the window.
IGNORED = {"scaling", "sliding_window", "position_ids", "cache_position", "use_cache",
           "output_attentions", "output_hidden_states", "output_router_logits", "return_dict",
           "num_items_in_batch", "deterministic"}


def rpc(module, query, key, value, attention_mask, dropout=0.0, is_causal=None, q=None, **others):
    name = type(module).__name__
    causal = is_causal
    if causal is None:                      # a module without is_causal: as in sdpa
        causal = getattr(module, "is_causal", attention_mask is None)
    for keyword, setting in others.items():
        if setting is not None and keyword not in IGNORED:
            raise ValueError(f"{name} passes {keyword}, which RPC-Attention does not support")
    if key.shape != query.shape:
        raise ValueError(f"queries {tuple(query.shape)}, keys {tuple(key.shape)}: RPC-Attention "
                         "has no KV cache (use_cache=False) and no grouped queries")
    if (module.config.is_encoder_decoder or getattr(module, "is_cross_attention", False)
            or getattr(module, "is_decoder", False) and not causal      # as in Bart's decoder
            or hasattr(module.config, "cross_attention_frequency") or "Cross" in name):
        raise ValueError(f"{name}: RPC-Attention has no cross-attention")
    keep = None
    if attention_mask is not None:          # (B, 1, N, N): True where a token may attend
        allowed = attention_mask
        biased = attention_mask.new_zeros((), dtype=torch.bool)
        if attention_mask.dtype != torch.bool:                  # 0, or a large negative number
            allowed = attention_mask == 0
            biased = (~allowed & (attention_mask > -1e4)).any()
        keep = allowed[:, 0, -1]            # (B, N): False is padding
        seen = keep[:, None, None].expand(-1, -1, len(keep[0]), -1)         # what we compute
        if causal:
            seen = seen.tril()
        same = (allowed == seen).all() & ~biased
        problem = ("the mask is not a mask of padding, causal in a causal model: "
                   "RPC-Attention has no windows, packing, prefixes and other masks")
        if torch.compiler.is_compiling():
            torch._assert_async(same, problem)                              # checked at run time
        elif not same:
            raise ValueError(problem)
    h = rpc_attention(key, value, q=q, causal=causal, dropout_p=dropout, keep=keep,
                      **getattr(module, "pap", {}))
    return h.transpose(1, 2), None


AttentionInterface.register("rpc", rpc)
AttentionMaskInterface.register("rpc", sdpa_mask)


class Logits(nn.Module):
    """Return the logits of a Hugging Face classifier alone."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, pixels):
        return self.model(pixel_values=pixels).logits


def build():
    """Build the network, untrained: pixels in [0, 1] (B, 3, 32, 32) to logits (B, 10)."""
    config = ViTConfig(image_size=32, patch_size=4, hidden_size=64, num_hidden_layers=4,
                       num_attention_heads=2, intermediate_size=256, num_labels=10)
    vit = ViTForImageClassification._from_config(config, attn_implementation="rpc")
    for layer in vit.modules():
        if hasattr(layer, "is_causal"):         # adaptive attacks change the PAP of these layers
            layer.pap = {}
    # Or your own: ViTForImageClassification.from_pretrained(FOLDER, attn_implementation="rpc")
    return nn.Sequential(Normalize([0.5] * 3, [0.5] * 3), Logits(vit))


def main():
    eval_robust.evaluate_networks({"transformers": build()}, ["--data", "shapes", *sys.argv[1:]])


if __name__ == "__main__":
    common.run(main)
