"""Test train_lm.py alone; test_train.py tests the behaviour of all trainers."""

import os
import shutil
from argparse import Namespace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import attention
import common
import train_lm
from data import text as data_text
from data.rng import DROPOUT, seed_from
from data.words import word_swap
from fixtures import ROOT
from lm import LM, LM_SIZES, LMConfig, lm_from_checkpoint
from runs import call, log, make_text, refused, rows


def write_prose(folder, text):
    """Write the text as train.txt, twice, as valid.txt and as test.txt."""
    Path(folder).mkdir()
    for split in data_text.SPLITS:
        Path(folder, f"{split}.txt").write_text(text * (1 + (split == "train")), encoding="utf-8")


SMALL = ("--data_dir text --attn rpc --context 16 --batch_size 8 --steps 30 --words 5 "
         "--eval_every 100").split()
train, bad = partial(call, train_lm.main), partial(refused, train_lm)


@pytest.fixture(autouse=True)
def a_small_text(alone):
    make_text()


def test_the_checkpoint_alone_reproduces_the_perplexity(monkeypatch, capsys):
    """All flags except --max_steps have their defaults. Fewer pydoc documents save time."""
    text = "The function returns a list of words.\n\nIt takes  one argument, n.\n" * 9
    monkeypatch.setattr("pydoc_data.topics.topics", {f"name{i}": text for i in range(60)})
    monkeypatch.setattr(os, "__file__", os.path.abspath("os.py"))
    train("--max_steps 2")
    out, folder = capsys.readouterr().out, Path("out/pydoc_rpc")
    checkpoint, sample = common.load(folder), log(folder, "sample")[2]
    vocab = data_text.Vocabulary(checkpoint["vocab"].split("\n"))
    model = lm_from_checkpoint(checkpoint)
    lines = data_text.read_lines(Path("out/cache").glob("pydoc_*/wiki.valid.tokens").__next__())
    nats = data_text.sliding_nll(model, vocab.encode_lines(lines), 64, 64)      # one per token
    perplexity = data_text.perplexity(nats)
    assert f"valid perplexity {perplexity:.2f} " in out
    assert checkpoint["metrics"]["perplexity"] == pytest.approx(perplexity, rel=1e-5)
    assert sample and sample[:20] in out and out.strip().endswith(f"--eval_only {folder}")


def test_an_attention_without_causal_mask_is_rejected(monkeypatch):
    monkeypatch.setitem(attention.ATTENTIONS, "forgets", attention.Attention(
        True, lambda q, k, v, layer: attention.softmax_attention(q, k, v)))
    line = bad(SMALL, "--attn forgets --out_dir a")
    assert "--attn forgets" in line and "later words" in line and not Path("a").exists()


def test_the_learning_rate_is_lmtools_after_warmup(golden):
    """Compare the schedules. In the warm-up, lmtool has lr k / w, our code lr (k + 1) / (w + 1)."""
    a = golden("lm_schedule")
    lr, warmup, total = (a[k].item() for k in ("base_lr", "warmup", "max_step"))
    args = Namespace(lr=lr, warmup=warmup, steps=total)
    ours = np.array([train_lm.learning_rate(k, args) for k in range(total)])
    theirs = a["lr_used_at_update"].numpy()
    np.testing.assert_allclose(ours[warmup:], theirs[warmup:], rtol=1e-9)
    assert np.abs(ours - theirs)[1:warmup].max() < lr / warmup and theirs[0] == lr


def test_a_run_equals_a_plain_loop(monkeypatch):
    """Compare only the first steps, because training amplifies rounding (1e-7 per step)."""
    monkeypatch.setattr(common, "LOG_EVERY", 1)
    train("--data wikitext --data_dir text --model mini --context 12 --attn rpc --rpc_layers 0,2 "
          "--n_iter 3 --lambd 0.3 --form paper --mu_over token --dropout 0.2 --cutoffs 6,15 --words"
          " 0 --steps 20 --batch_size 6 --lr 5e-3 --clip 0.3 --seed 5 --max_steps 6 --out_dir a")
    corpus = data_text.load_corpus("text")
    torch.manual_seed(5)
    model = LM(LMConfig(len(corpus.vocab), **{**LM_SIZES["mini"], "context": 12}, attn="rpc",
                        rpc_layers=(0, 2), dropout=0.2, cutoffs=(6, 15),
                        pap=dict(n_iter=3, lambd=0.3, form="paper", mu_over="token")))
    optimizer = torch.optim.Adam(model.parameters())
    for step, row in enumerate(row for row in rows("a") if "loss" in row):
        optimizer.param_groups[0]["lr"] = row["lr"]
        windows = data_text.random_windows(corpus.train, step, 6, 12, 5)
        torch.manual_seed(seed_from(5, DROPOUT, step, 0))                       # dropout masks
        log_probs = model.log_probs(model.hidden(windows[:, :-1]))
        loss = -log_probs.gather(2, windows[:, 1:, None]).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3).item()
        optimizer.step()
        optimizer.zero_grad()
        assert (row["loss"], row["grad_norm"]) == pytest.approx((loss.item(), norm), rel=1e-3)
    assert step == 5
    ours, theirs = ([state["exp_avg"].norm().item() for state in states.values()] for states in
                    (common.load("a")["optimizer"]["state"], optimizer.state))
    assert ours == pytest.approx(theirs, rel=1e-2)              # Adam's updates hide the clipping


def test_a_sample_needs_its_checkpoint_alone(capsys, monkeypatch):
    train(SMALL, "--out_dir a --steps 20 --lr 1e-2")
    own, files = log("a", "sample")[20], sorted(Path("a").iterdir())
    shutil.rmtree("text")
    monkeypatch.setattr(train_lm, "sliding_nll", None)                # sampling scores nothing

    def said(*parts):
        capsys.readouterr()
        train(*parts)
        return capsys.readouterr().out.strip()
    assert said("--sample a --words 5") == own              # only the sample of that run
    prompt = ["--prompt", "the cat of"]
    texts = [said("--sample a/best.pt --words 12", prompt, extra) for extra in ("", "", "--seed 1")]
    assert all(text.startswith("the cat of") for text in texts)
    assert texts[0] == texts[1] != texts[2]
    assert sorted(Path("a").iterdir()) == files


def test_an_evaluation_has_the_trainings_tokens(capsys):
    """Token files contain "@-@" and <unk> as words; the same words of prose stay whole."""
    train(SMALL, "--out_dir a --steps 1")
    Path("new").mkdir()
    Path("new/test.txt").write_text("the cat of ann saw 1 @-@ year old <unk> , and it ran .\n" * 9)
    train("--eval_only a --data_dir new --out_dir b")
    row, = common.read_log("b/results.jsonl")
    assert row["measure"] == "test"
    assert row["tokens"] == 9 * 16 and row["unknown"] == pytest.approx(100 / 16)    # with <eos>
    assert not {"seen", "spaced"} & common.load("a").keys()
    assert "b/results.jsonl exists" in bad("--eval_only a --out_dir b")
    write_prose("own", "the cat's hat, it ran.\n\n" * 80)
    train(SMALL, "--data_dir own --out_dir c --steps 1")
    Path("new/test.txt").write_text("the cat\u2019s hat, it sat.\n" * 9)
    train("--eval_only c --data_dir new --out_dir d")
    row, = common.read_log("d/results.jsonl")
    assert row["tokens"] == 9 * 8 and row["unknown"] == pytest.approx(100 / 8)      # "sat"
    capsys.readouterr()
    train("--sample c --words 0 --prompt", ["the cat\u2019s hat, it"])
    assert capsys.readouterr().out == "the cat's hat, it\n"


def test_an_evaluation_swaps_words_and_scores_the_others():
    """No word is rare, so <unk> is the vocabulary's last word, and "." the rarest one."""
    write_prose("own", "the cat ran and sat .\n\n" * 80)
    train(SMALL, "--data_dir own --out_dir a --steps 1")
    assert common.load("a")["vocab"].split("\n")[-1] == "<unk>"
    Path("new").mkdir()
    Path("new/test.txt").write_text("the cat sat and ran fast .\n" * 9)
    train("--eval_only a --data_dir new --window 8 --stride 2 --seed 4 --out_dir b")
    row, = common.read_log("b/results.jsonl")
    assert (row["word"], row["tokens"], row["unknown"]) == (".", 72, 12.5)
    checkpoint = common.load("a")
    vocab = data_text.Vocabulary(checkpoint["vocab"].split("\n"))
    lines = ["the cat sat and ran fast ."] * 9
    swapped_lines, swapped = word_swap(lines, seed=4, word=".")
    kept = ~torch.tensor(swapped[1:])
    model = lm_from_checkpoint(checkpoint)
    plain, attacked, segments = (
        data_text.sliding_nll(model, vocab.encode_lines(x), 8, stride)
        for x, stride in ((lines, 2), (swapped_lines, 2), (lines, 8)))
    for name, nats in dict(segment=segments, sliding=plain, clean_unswapped=plain[kept],
                           attacked=attacked, attacked_unswapped=attacked[kept]).items():
        assert row[name] == pytest.approx(data_text.perplexity(nats), rel=1e-4), name


def test_networks_are_compared_on_the_same_text(capsys):
    for name, seed in (("rpc_s0", 0), ("rpc_s1", 1), ("symmetric_s0", 0), ("symmetric_s1", 1)):
        attn = name.split("_")[0]
        train(SMALL, f"--attn {attn} --seed {seed} --out_dir {name} --steps 1")
    capsys.readouterr()
    train("--eval_only rpc_s0 rpc_s1 symmetric_s0 symmetric_s1 --out_dir a")
    out, rows = capsys.readouterr().out, common.read_log("a/results.jsonl")
    assert len(rows) == 4 * 2
    train("--eval_only symmetric_s1 --out_dir b")
    numbers = ("segment", "attacked_unswapped", "swapped", "tokens")
    alone, = (row for row in common.read_log("b/results.jsonl") if row["measure"] == "test")
    together, = (row for row in rows if (row["measure"], row["network"]) == (
        "test", "symmetric_s1"))
    assert [alone[name] for name in numbers] == [together[name] for name in numbers]
    assert f"| test, segment             | {alone['tokens']}" in out
    assert "| rpc_s* " in out and "| symmetric_s* minus rpc_s* |" in out and ", n 2" in out
    make_text("other", seed=3)
    Path("other/wiki.train.tokens").write_text("a b <unk> \n" * 40)
    train(SMALL, "--data_dir other --out_dir c --steps 1")
    assert "different vocabularies" in bad("--eval_only rpc_s0 c")


def test_a_short_run_has_a_short_warmup():
    for steps, warmup in ((30, 15), (100, 50), (101, 100)):
        args = Namespace(lr=1.0, warmup=100, steps=steps)
        rates = [train_lm.learning_rate(step, args) for step in range(steps)]
        assert rates == sorted(rates[:warmup]) + sorted(rates[warmup:], reverse=True)
        assert rates[warmup] < 1.0


def test_an_evaluation_has_the_text_of_the_training():
    """The first of several networks decides."""
    shutil.copytree("text", "other")
    for name, folder in (("a", "text"), ("b", "other")):
        train(SMALL, f"--data_dir {folder} --out_dir {name} --steps 1")
    for given, path in (("a b", "text"), ("b a", "other"), ("a --data_dir other", "other")):
        train("--eval_only", given, "--out_dir", path + given[0])
        rows_found = common.read_log(f"{path}{given[0]}/results.jsonl")
        assert {row["data"] for row in rows_found} == {path}


def test_an_attention_has_flags_for_its_settings(monkeypatch):
    def mine(q, k, v, layer):
        return attention.symmetric_attention(k * layer.pap["gain"], v, causal=layer.causal)
    entry = attention.Attention(False, mine, settings=dict(gain=1.0))
    monkeypatch.setitem(attention.ATTENTIONS, "mine", entry)
    train(SMALL, "--attn mine --gain 1/2 --out_dir a --steps 1")
    assert common.load("a")["model_config"]["pap"]["gain"] == 0.5


@pytest.mark.parametrize("given, words", [
    ("--steps 0", "--steps: '0': expected a whole number of 1 or more"),
    ("--eval_every 0", "--eval_every"), ("--dropout 2", "--dropout: '2': expected a number from 0"),
    ("--model tiny", "--model: invalid choice"),
    ("--rpc_layers 4", "--rpc_layers 4: expected layers from 0 to 3"),
    ("--cutoffs 5,9999", "expected increasing ids"), ("--limit 3", "unrecognized arguments"),
    ("--window 8", "unrecognized arguments"),
    ("--attn symmetric --mu_over all", "--mu_over: invalid choice: 'all'"),
    ("--context 9999", "has only 681 tokens"),
    ("--context 1", "context=1, expected 2 tokens or more"),
    ("--data_dir nowhere", "--data_dir nowhere does not exist")])
def test_likely_mistakes_are_one_line(given, words):
    assert words in bad(SMALL, given)
    assert not Path("out").exists()                     # the line comes before the run


def test_mistakes_of_an_evaluation_are_one_line():
    train(SMALL, "--out_dir a --steps 1")
    for given in ("--window 17", "--stride 17"):
        assert "expected stride <= window <= 16" in bad("--eval_only a", given)
    for given in ("--eval_only a --lambd 3", "--sample a --stride 3", "--eval_only a --sample a"):
        assert "unrecognized arguments" in bad(given), given
    assert "expected 2 or more" in bad("--eval_only a --limit 1 --out_dir b")
    assert "a has no valid or test text" in bad("--eval_only a --data_dir a")
    assert "is for classification" in bad("--eval_only", [ROOT / "weights/shapes_rpc.pt"])
    assert "a contains a run" in bad(SMALL, "--out_dir a")
    shutil.copy("text/wiki.train.tokens", "text/wiki.valid.tokens")
    assert "the texts train and valid are equal" in bad(SMALL, "--out_dir b")
    assert not Path("out").exists()


def test_an_evaluation_computes_in_float32(monkeypatch):
    """The training computed in bf16."""
    train(SMALL, "--out_dir a --steps 1 --amp")
    found, real = [], train_lm.sliding_nll
    monkeypatch.setattr(train_lm, "sliding_nll", lambda *args, **how: found.append(
        torch.is_autocast_enabled("cpu")) or real(*args, **how))
    train("--eval_only a")
    assert set(found) == {False}
