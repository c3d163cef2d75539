"""Test studies/language.py: attention variants, steps at equal cost, runs, differences."""

import math
from types import SimpleNamespace

import pytest
import torch

from attention import ATTENTIONS, naive_attention
from common import InputError
from studies import language, leak


@pytest.mark.parametrize("factor", [2, 4])
def test_scaled_scores_equal_scaled_queries(factor):
    k, v = torch.randn(2, 1, 2, 5, 4, dtype=torch.float64)
    attend = ATTENTIONS[f"symmetric x{factor}"].function
    found = attend(k, k, v, SimpleNamespace(causal=False))
    assert torch.allclose(found, naive_attention(factor * k, k, v), atol=1e-12)


def test_equal_cost_steps_follow_measured_ratios():
    costs = [dict(text="pydoc", ratio={"symmetric": 1.0, "softmax": 0.8, "rpc n4": 1.6})]
    found = [language.steps_of(name, "pydoc", costs)
             for name in ("rpc n4", "symmetric, equal cost", "softmax, equal cost")]
    assert list(map(str, found)) == ["1000", "1600", "2000"]        # for --steps
    with pytest.raises(InputError, match="--cost"):
        language.steps_of("softmax, equal cost", "wikitext", costs)


def test_training_exploits_mu_over_all_tokens():
    assert leak.train("all", steps=80)[-1] < 0.1
    assert abs(leak.train("seen", steps=80)[-1] - math.log(2)) < 2e-3


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Prepare a study of one variant, two steps and a short text; return its flags."""
    text = tmp_path / "wikitext"
    text.mkdir()
    for split, lines in (("train", 10), ("valid", 9), ("test", 8)):
        (text / f"wiki.{split}.tokens").write_text(" a b c d e f g AAA <unk> \n" * lines)
    monkeypatch.setattr(language, "RESULTS", tmp_path)
    monkeypatch.setattr(language, "STEPS", 2)
    monkeypatch.setattr(language, "TEXTS", dict(wikitext="4"))
    monkeypatch.setattr(language, "VARIANTS", {
        "symmetric x4": language.VARIANTS["symmetric x4"]})
    return ["--run", "--seeds", "0", "--wikitext", str(text), "--out_dir", str(tmp_path / "out")]


def test_run_appends_missing_rows_only(tiny, tmp_path):
    language.main(tiny)
    rows = language.read_rows("rows.jsonl")
    assert [row["variant"] for row in rows] == ["symmetric x4"]
    assert rows[0]["test"]["sliding"] > 1 and rows[0]["steps"] == 2
    language.main(tiny)
    assert language.read_rows("rows.jsonl") == rows


def test_stored_tables_match_the_rows():
    text = language.report(language.read_rows("rows.jsonl"), language.read_rows("cost.jsonl"))
    assert text in (language.RESULTS / "details.md").read_text()
