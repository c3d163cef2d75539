"""studies/cost.py: models, language model, memory: it prints tables, writes rows, and counts rightly."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from conftest import ROOT
from studies import cost
from vit import SIZES, ViT, ViTConfig

VITS = [name for name in cost.MODELS if not name.startswith("fan")]
SPEC = ROOT.parent / "shared" / "spec" / "classification.md"


def in_this_process(function, cases):
    """In the place of cost.fresh; without the collections of garbage, 0.2 s each among tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost.gc, "collect", lambda: None)
        return [function(*case) for case in cases]


def run(monkeypatch, tmp_path, *argv):
    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(cost, "fresh", in_this_process)
    monkeypatch.setattr(sys, "argv", ["cost.py", *argv, "--device", "cpu", "--out", str(out)])
    cost.main()
    return [json.loads(line) for line in out.read_text().splitlines()]


def formula(config):
    """Multiply-adds of one image of a ViT, by hand."""
    c, N, C, layers = config, config.num_tokens, config.embed_dim, 0
    for i in range(c.depth):
        projections = 2 if c.layer_attn(i) in ("symmetric", "rpc") else 3           # k, v; else q too
        steps = c.n_iter if c.layer_attn(i).startswith("rpc") else 1                # K K^T and A V each
        layers += N * C ** 2 * (projections + 1 + 2 * c.mlp_ratio) + 2 * N ** 2 * C * steps
    patches, norms = (N - 1) * 3 * c.patch_size ** 2 * C, 5 * N * C * (2 * c.depth + 1)
    return patches + layers + C * c.num_classes + norms


def test_every_model_of_table_11_has_a_row_of_its_own(monkeypatch, tmp_path, capsys):
    rows = run(monkeypatch, tmp_path, "--model", "nano", "--batch_size", "1", "--rounds", "1", "--threads", "1")
    names = {row["model"] for row in rows}
    assert {"softmax", "symmetric", "rpc 4iter/layer1", "rpc 2iter/all-layer"} <= names and cost.PAPER.keys() <= names
    for column in ("ms", "ratio", "images/s", "batch ratio"):
        assert all(row[f"{what} {column}"] > 0 for row in rows for what in ("train", "test"))
    assert all(row["hardware"] and row["torch"] and row["date"] for row in rows)
    assert rows[0]["command"].startswith("python -m studies.cost --model nano")
    assert "rpc 6iter/layer1" in capsys.readouterr().out


def test_memory_below_its_noise_is_not_printed():
    peaks = {"symmetric": [50.0, 50.4, 50.1], "rpc 4iter/layer1": [52.0, 52.1, 52.3], "softmax": [50.5, 50.6, 50.4],
             "fan symmetric": [0.5, 0.6, 0.5]}
    found = cost.memory_columns(peaks, "train")                             # noise 0.4
    assert found["symmetric"] == {"train MB": 50.1}
    assert found["rpc 4iter/layer1"] == {"train MB": 52.1, "train MB more": pytest.approx(2.0)}
    assert found["softmax"] == {"train MB": 50.5} and found["fan symmetric"] == {}


@pytest.mark.parametrize("name", VITS)
def test_counted_multiply_adds_equal_the_formula(name):
    model = cost.build(name, "nano")
    assert cost.multiply_adds(model) == formula(model.config)


def test_timms_softmax_counts_as_ours():
    pytest.importorskip("timm")
    ours, theirs = (cost.multiply_adds(cost.build(name, "nano")) for name in ("softmax", "timm softmax"))
    assert ours == theirs


@pytest.mark.parametrize("attn", ["rpc_asym", "sym_asym", "scaled_s"])
def test_the_formula_counts_three_projections_where_queries_are_not_keys(attn):
    model = ViT(ViTConfig(**SIZES["nano"], attn=attn))
    N, C = model.config.num_tokens, 64
    scaling = 4 * N ** 2 * C if attn == "scaled_s" else 0                   # S v in 4 layers
    assert cost.multiply_adds(model) == formula(model.config) + scaling


def test_the_papers_mega_is_giga_in_every_row_of_table_11():
    for name, (parameters, flop, *_) in cost.PAPER.items():
        model = cost.build(name, "tiny")
        assert f"{formula(model.config) / 1e9:.2f}M" == flop
        millions = sum(p.numel() for p in model.parameters()) / 1e6
        assert abs(millions - float(parameters[:-1])) < 0.1                 # 5.27, printed 5.2


def test_a_fan_counts_as_published_and_its_kinds_differ_by_what_attention_adds():
    counts = {}
    for kind in ("softmax", "symmetric", "rpc 4iter/layer1"):
        model = cost.build(f"fan {kind}", "tiny")
        counts[kind] = cost.multiply_adds(model)
    N, C, depth = 196, 192, 12                                              # no class token yet
    assert f"{counts['softmax'] / 1e9:.2f}" == "1.49"
    assert counts["softmax"] - counts["symmetric"] == depth * N * C ** 2 + 2 * C ** 2    # class attention: one query
    assert counts["rpc 4iter/layer1"] - counts["symmetric"] == 3 * 2 * N ** 2 * C


def test_the_papers_column_is_the_specifications():
    if not SPEC.exists():
        pytest.skip("the specification is not here")
    table = SPEC.read_text().partition("Table 11, cost:")[2].partition("Table 12")[0]
    cells = [re.split(r" *\| *", line)[1:-1] for line in table.splitlines() if line.startswith("|")]
    found = {}
    for name, flop, train, test, train_mb, test_mb, parameters in cells[2:]:
        name = "symmetric" if name == "SymViT" else f"rpc {name}"
        megabytes = [int(mb.removesuffix(" MB")) for mb in (train_mb, test_mb)]
        found[name] = (parameters, flop, float(train), float(test), *megabytes)
    assert found == cost.PAPER


def test_memory_keeps_no_matrix_unless_attention_is_written_out(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cost, "SHAPE", (1, 1, 64))
    rows = run(monkeypatch, tmp_path, "memory", "--tokens", "1025", "--n_iter", "1", "2")
    kept = {row["attention"]: row["kept / NxN"] for row in rows}
    assert kept["rpc n = 2"] - kept["rpc n = 1"] < 0.3 and kept["rpc n = 2, matrices"] > 2
    more = {row["attention"]: row["kept / BHND"] for row in rows}
    assert 3 < more["rpc n = 2"] - more["rpc n = 1"] < 3.05                 # S, K2, L, row sums
    assert "symmetric, matrices" in capsys.readouterr().out


def allocated(size):
    """The peak of a step that fills as many bytes, above what was there."""
    torch.ones(10)                                                          # libraries load
    return cost.peak_growth(lambda: torch.ones(size, dtype=torch.uint8), torch.device("cpu"))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux counts it")
def test_the_peak_of_memory_is_measured_in_a_fresh_process():
    large, small = cost.fresh(allocated, [(2 ** 27,), (2 ** 22,)])
    assert abs(large / 2 ** 27 - 1) < 0.1 and small < 2 ** 24


def test_language(monkeypatch, tmp_path):
    rows = run(monkeypatch, tmp_path, "language", "--batch_size", "2", "--rounds", "1", "--threads", "1")
    assert [row["model"] for row in rows] == ["plain", "softmax", "symmetric", "rpc 4iter/layer1"]
    assert all(row["step ms"] > 0 and row["to plain"] > 0 for row in rows)
