"""Load the weights of lmtool's reference files into our language model, to compare the two."""

import torch

from lm import LM, LMConfig

LMTOOL = [f"lm_{output}{kind}" for output in ("full_softmax", "adaptive")
          for kind in ("", "_symmetric")]


def lmtool_model(arrays, name):
    """Return our model with the weights of the reference file `name`.

    In lmtool's weights, kv_net has the rows of the keys first, then the rows of the values, and the
    symmetric model has no q_net. Two entries are skipped: crit.out_layers.0.weight repeats the
    embedding, and inv_freq is not a weight.
    """
    model = LM(LMConfig(53, 12, embed_dim=16, depth=2, num_heads=2, mlp_dim=40,
                        attn="symmetric" if "symmetric" in name else "softmax",
                        cutoffs=(8, 16, 32) if "adaptive" in name else ()))
    whole = {"word_emb.emb_layers.0.weight": "embed.weight", "crit.out_layers.0.bias": "bias",
             "crit.cluster_weight": "adaptive.cluster_weight",
             "crit.cluster_bias": "adaptive.cluster_bias"}
    part = {"dec_attn.layer_norm": "norm1", "dec_attn.kv_net": "attn.qkv",
            "dec_attn.o_net": "attn.proj", "pos_ff.layer_norm": "norm2",
            "pos_ff.CoreNet.0": "mlp.fc1", "pos_ff.CoreNet.3": "mlp.fc2"}
    state, ours = {k[3:]: v for k, v in arrays.items() if k.startswith("sd/")}, {}
    for name, value in state.items():
        if "q_net" in name or name in ("crit.out_layers.0.weight", "pos_emb.inv_freq"):
            continue
        if "kv_net" in name and name.replace("kv_net", "q_net") in state:
            value = torch.cat([state[name.replace("kv_net", "q_net")], value])
        if name.startswith("layers."):
            _, i, *middle, end = name.split(".")
            name = f"blocks.{i}.{part.get('.'.join(middle), '.'.join(middle))}.{end}"
        ours[whole.get(name, name)] = value
    model.load_state_dict(ours)
    return model
