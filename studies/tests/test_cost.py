"""Test studies/cost.py: it prints Table 11, writes rows and counts multiply-adds."""

import json

import pytest
import torch

from attention import layer_pattern
from studies import cost
from vit import SIZES, ViT, ViTConfig

VITS = [name for name in cost.MODELS if not name.startswith("fan")]


def formula(config):
    """Return the multiply-adds of a ViT for one image, by a formula."""
    c, N, C, layers = config, config.num_tokens, config.embed_dim, 0
    inside, outside = layer_pattern(c.attn)
    for i in range(c.depth):
        attn = inside if i in c.rpc_layers else outside
        projections = 2 if attn in ("symmetric", "rpc") else 3             # k, v; or q, k, v
        steps = c.pap["n_iter"] if attn.startswith("rpc") else 1           # K K^T and A V each
        layers += N * C ** 2 * (projections + 1 + 2 * c.mlp_ratio) + 2 * N ** 2 * C * steps
    patches, norms = (N - 1) * 3 * c.patch_size ** 2 * C, 5 * N * C * (2 * c.depth + 1)
    return patches + layers + C * c.num_classes + norms


def test_every_model_has_a_row(monkeypatch, tmp_path, capsys):
    out, some = tmp_path / "rows.jsonl", ("symmetric", "rpc 4iter/layer1")
    monkeypatch.setattr(cost, "MODELS", {name: cost.MODELS[name] for name in some})
    cost.main("--batch_size 1 --rounds 1 --threads 1 --clock cpu --device cpu --out".split()
              + [str(out)])
    symmetric, rpc = [json.loads(line) for line in out.read_text().splitlines()]
    for what in ("train", "test"):
        for column in ("ms", "images/s", "batch ratio"):
            assert symmetric[f"{what} {column}"] > 0 < rpc[f"{what} {column}"]
        assert rpc[f"{what} ratio"] == pytest.approx(rpc[f"{what} ms"] / symmetric[f"{what} ms"])
    assert rpc["train ms"] > rpc["test ms"] and rpc["kept MB more"] > 0
    assert "rpc 4iter/layer1" in capsys.readouterr().out


@pytest.mark.parametrize("name", VITS)
def test_multiply_adds_equal_the_formula(name):
    model = cost.build_model(name, "nano")
    assert cost.multiply_adds(model) == formula(model.config)


def test_table_11_counts_giga_multiply_adds():
    theirs = {name: found for name in cost.MODELS if (found := cost.paper_columns(name))}
    assert len(theirs) == 5 and theirs.keys() == {name for name in VITS if name != "softmax"}
    for name, found in theirs.items():
        model = cost.build_model(name, "tiny")
        assert f"{formula(model.config) / 1e9:.2f}M" == found["paper: flop/sample"]
        millions = sum(p.numel() for p in model.parameters()) / 1e6
        assert abs(millions - float(found["paper: parameters"][:-1])) < 0.1  # 5.27, printed 5.2
    found = theirs["rpc 2iter/all-layer"]
    assert [found[f"paper: test {what}"] for what in ("ms", "ratio", "MB", "MB more")] == [
        17, pytest.approx(1.7), 1181, 0]
    assert [found[f"paper: train {what}"] for what in ("ms", "MB", "MB more")] == [92, 1461, 26]


def test_pap_step_keeps_no_matrix():
    models = [ViT(ViTConfig(image_size=224, attn="rpc", **SIZES["nano"] | dict(patch_size=14),
                            pap=dict(n_iter=n)))
              for n in (2, 3)]
    few, more = (cost.kept(model, torch.rand(1, 3, 224, 224)) for model in models)
    assert 3 < (more - few) / (4 * 257 * 64) < 6    # (B, H, N, D) tensors; a matrix would add 16
