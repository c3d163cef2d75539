"""Evaluate a timm ViT with RPC-Attention: python -m docs.examples.timm_rpc --measures clean pgd"""

import sys

import timm
from torch import nn
from torchvision.transforms.v2 import Normalize

import common
import eval_robust
from attention import rpc_attention


class RPC(timm.layers.Attention):
    pap = {}                            # arguments of rpc_attention, for example dict(n_iter=2)

    def forward(self, x, attn_mask=None, is_causal=False):
        if attn_mask is not None or getattr(self, "gate", None) is not None:
            raise ValueError("RPC-Attention supports no attn_mask and no gate")
        _, k, v = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        drop = self.attn_drop.p if self.training else 0.0
        h = rpc_attention(self.k_norm(k), v, causal=is_causal, dropout_p=drop, **self.pap)
        return self.proj_drop(self.proj(self.norm(h.transpose(1, 2).flatten(2))))


def build():
    """Build the network, untrained: pixels in [0, 1] (B, 3, 32, 32) to logits (B, 10)."""
    vit = timm.create_model("vit_tiny_patch16_224", attn_layer=RPC, img_size=32, patch_size=4,
                            num_classes=10)
    # Load your weights here: vit.load_state_dict(torch.load("my_vit.pt"))
    return nn.Sequential(Normalize([0.5] * 3, [0.5] * 3), vit)


def main():
    eval_robust.evaluate_networks({"timm": build()}, ["--data", "shapes", *sys.argv[1:]])


if __name__ == "__main__":
    common.run(main)
