"""A Hugging Face ViT with RPC-Attention, for eval_robust.py --model THIS_FILE:build."""

from torch import nn
from torchvision.transforms.v2 import Normalize
from transformers import (AttentionInterface, AttentionMaskInterface, ViTConfig,
                          ViTForImageClassification)
from transformers.masking_utils import sdpa_mask

from attention import rpc_attention


def rpc(module, query, key, value, mask, dropout=0.0, is_causal=None, q=None, **others):
    keep = None if mask is None else mask[:, 0, -1]                 # (B, N): False is padding
    if key.shape != query.shape or mask is not None and not mask[:, 0].any(1).equal(keep):
        raise ValueError(f"queries {tuple(query.shape)}, keys {tuple(key.shape)}: RPC-Attention "
                         "has no KV cache (use_cache=False), grouped queries, windows, packing")
    if others.get("position_bias") is not None or module.config.is_encoder_decoder:
        raise ValueError("RPC-Attention has no position bias and no cross-attention")
    causal = module.is_causal if is_causal is None else is_causal
    h = rpc_attention(key, value, q=q, causal=causal, dropout_p=dropout, keep=keep)
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
    # Or your own: ViTForImageClassification.from_pretrained(FOLDER, attn_implementation="rpc")
    return nn.Sequential(Normalize([0.5] * 3, [0.5] * 3), Logits(vit))
