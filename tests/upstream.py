"""Upstream's weights into our models, for the tests that compare the two."""

import torch

from common import load_strictly


def load_lmtool(model, state):
    """Load a state dict of lmtool's MemTransformerLM, or of its symmetric copy, which has no q_net.

    Theirs: kv_net rows are keys, then values; crit.out_layers.0.weight repeats the embedding;
    inv_freq is no weight.
    """
    whole = {"word_emb.emb_layers.0.weight": "embed.weight", "crit.out_layers.0.bias": "bias",
             "crit.cluster_weight": "adaptive.cluster_weight", "crit.cluster_bias": "adaptive.cluster_bias"}
    part = {"dec_attn.layer_norm": "norm1", "dec_attn.kv_net": "attn.qkv",
            "dec_attn.o_net": "attn.proj", "pos_ff.layer_norm": "norm2",
            "pos_ff.CoreNet.0": "mlp.fc1", "pos_ff.CoreNet.3": "mlp.fc2"}
    ours = {}
    for name, value in state.items():
        if "q_net" in name or name in ("crit.out_layers.0.weight", "pos_emb.inv_freq"):
            continue
        if "kv_net" in name and name.replace("kv_net", "q_net") in state:
            value = torch.cat([state[name.replace("kv_net", "q_net")], value])
        if name.startswith("layers."):
            _, i, *middle, end = name.split(".")
            name = f"blocks.{i}.{part.get('.'.join(middle), '.'.join(middle))}.{end}"
        ours[whole.get(name, name)] = value
    load_strictly(model, ours)


def load_segmenter(model, state):
    """Load a state dict of `rstrudel/segmenter`; its encoder has a classifier head that is unused."""
    load_strictly(model, {k: v for k, v in state.items() if not k.startswith("encoder.head.")})
