"""Test train_lm.py alone; test_train.py tests the behaviour of all trainers."""

import io
import os
import shutil
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import attention
import common
import train_lm
from common import InputError
from data import text as data_text
from data.rng import DROPOUT, seed_from
from lm import LM, LM_SIZES, LMConfig, lm_from_checkpoint
from processes import group
from runs import call, flags, log, make_text, refused, rows

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
    def forgets(q, k, v, layer):
        return attention.softmax_attention(q, k, v)
    monkeypatch.setitem(attention.ATTENTIONS, "forgets", attention.Attention(True, forgets))
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
    """Token files contain "@-@" and <unk> as words; a text file is cut at punctuation marks."""
    train(SMALL, "--out_dir a --steps 1")
    Path("new.txt").write_text("the cat of ann saw 1 @-@ year old <unk> , and it ran .\n" * 9)
    train("--eval_only a --data_dir new.txt")
    row, = common.read_log("a/results.jsonl")
    assert row["settings"]["split"] == "text"           # whether it is unseen is not known
    assert row["images"] == 9 * 16 and row["unknown"] == pytest.approx(100 / 16)    # with <eos>
    Path("own.txt").write_text("the cat's hat, it ran.\n\n" * 80)
    train(SMALL, "--data_dir own.txt --data wikitext --out_dir b --steps 1")
    Path("fresh.txt").write_text("the cat's hat, it sat.\n" * 9)
    train("--eval_only b --data_dir fresh.txt --out_dir c")
    row, = common.read_log("c/results.jsonl")
    assert row["settings"]["split"] == "unseen" and row["images"] == 9 * 8
    assert row["unknown"] == pytest.approx(100 / 8)     # "sat"
    capsys.readouterr()
    train("--sample b --words 0 --prompt", ["the cat's hat, it"])
    assert capsys.readouterr().out == "the cat's hat, it\n"
    checkpoint = common.load("b")
    old = {name: value for name, value in checkpoint.items() if name != "spaced"}
    assert train_lm.was_spaced(old) is train_lm.was_spaced(checkpoint) is True
    assert train_lm.was_spaced(common.load("a")) is False


def test_the_inserted_word_is_not_unk():
    """No word of the text is rare, so <unk> is the last word of the vocabulary."""
    Path("own.txt").write_text("the cat ran and sat .\n\n" * 80)
    train(SMALL, "--data_dir own.txt --data wikitext --out_dir a --steps 1")
    assert common.load("a")["vocab"].split("\n")[-1] == "<unk>"
    Path("new.txt").write_text("the cat sat and ran .\n" * 9)
    train("--eval_only a --data_dir new.txt")
    row, = common.read_log("a/results.jsonl")
    assert row["word"] == "."


def test_a_short_run_has_a_short_warmup():
    for steps, warmup in ((30, 15), (100, 50), (101, 100)):
        args, _ = call(train_lm.get_args, SMALL, f"--steps {steps}")
        assert args.warmup == warmup


def test_the_data_of_an_evaluation_act():
    train(SMALL, "--out_dir a --steps 1")
    assert "--data wikitext needs --data_dir" in bad("--eval_only a --data wikitext")
    shutil.copytree("text", "other")
    assert "--data_dir: no effect with --data pydoc" in bad("--eval_only a --data pydoc "
                                                            "--data_dir other")
    train("--eval_only a --data wikitext --data_dir other")
    assert {row["data_dir"] for row in common.read_log("a/results.jsonl")} == {"other"}


def test_an_evaluation_keeps_the_trainings_data_set():
    """But scenes and pydoc have no folder, so a folder contains your own data."""
    trained = dict(data="wikitext", data_dir="text")
    made = dict(data="pydoc", data_dir=None)
    for args, of, expected in (((None, None), trained, ("wikitext", "text")),
                               ((None, "new"), trained, ("wikitext", "new")),
                               (("wikitext103", None), trained, ("wikitext103", None)),
                               ((None, "new"), made, ("folder", "new")),
                               ((None, None), made, ("pydoc", None))):
        args = Namespace(data=args[0], data_dir=args[1])
        assert common.evaluation_data(args, of, built_in="pydoc") == expected


def test_flags_without_effect_are_errors():
    train(SMALL, "--out_dir a --steps 1")
    for given, flag in (("--eval_only a --context 8", "--context"), ("--limit 3", "--limit"),
                        ("--eval_only a --lambd 3", "--lambd"), ("--window 8", "--window"),
                        ("--eval_only a --n_iter 2", "--n_iter"),
                        ("--sample a --stride 3", "--stride"),
                        ("--resume a --out_dir b", "--out_dir"),
                        ("--sample a --eval_only a", "--eval_only"),
                        ("--data pydoc --data_dir text", "--data_dir"),
                        ("--attn softmax --n_iter 2", "--n_iter"),
                        ("--attn symmetric --rpc_layers all", "--rpc_layers"),
                        ("--attn symmetric --mu_over token", "--mu_over"),
                        ("--mu_over all --words 9", "--words")):
        assert f"{flag}: no effect" in bad(given), given


def test_likely_mistakes_are_one_line():
    for given, words in (("--steps -1", "--steps: -1: expected 1 or more"),
                         ("--max_steps 0", "--max_steps: 0: expected 1 or more"),
                         ("--eval_every 0", "--eval_every"), ("--n_iter 0", "--n_iter"),
                         ("--rpc_layers first", "--rpc_layers first: expected"),
                         ("--cutoffs 9,5", "--cutoffs 9,5: expected increasing ids"),
                         ("--cutoffs x", "--cutoffs x"),
                         ("--cutoffs 5,9999", "expected increasing"),
                         ("--context 1", "context=1, expected 2 tokens or more"),
                         ("--steps 5 --warmup 5", "--warmup 5: expected fewer than --steps 5")):
        assert words in bad(SMALL, given)
    train(SMALL, "--out_dir a --steps 1")
    assert "--window 17: expected at most 16" in bad("--eval_only a --window 17")


def test_a_sample_that_cannot_be_printed_is_escaped(monkeypatch):
    """The output has an encoding without Greek letters."""
    Path("greek.txt").write_text("\u03bb\u03cc\u03b3\u03bf\u03c2 \u03ba\u03b1\u03b9 .\n" * 200)
    out = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        call(lambda: common.run(train_lm.main), SMALL, "--data_dir greek.txt --out_dir a --steps 1")
    out.flush()
    assert common.load("a")["step"] == 1 and rb"\u03" in out.buffer.getvalue()


def test_an_evaluation_has_no_tf32(monkeypatch):
    train(SMALL, "--out_dir a --steps 1")
    wanted = []
    monkeypatch.setattr(common, "use_bf16", lambda amp, device: wanted.append(amp))
    train("--eval_only a")
    assert wanted == [False]


def main_on_own_data():
    """Run main() in the folder of this process, and print its error."""
    os.chdir(f"node{os.environ['RANK']}")
    try:
        train_lm.main()
    except InputError as error:
        print(error)


def test_processes_with_other_texts_stop():
    for node in (0, 1):
        Path(f"node{node}").mkdir()
        make_text(f"node{node}/text", seed=node)
    printed = group(main_on_own_data, [*SMALL, "--out_dir", "a"])
    assert all("the processes have different data" in text for text in printed)
    assert not list(Path().glob("node*/a/log.jsonl"))


def main_with_own_rate():
    """Run main() with another --lr in each process, and print its error."""
    sys.argv += ["--lr", f"1e-{os.environ['RANK']}"]
    try:
        train_lm.main()
    except InputError as error:
        print(error)


def test_processes_with_other_flags_stop():
    printed = group(main_with_own_rate, flags(SMALL, "--data_dir text --out_dir a --max_steps 1"))
    assert all("the processes have different flags: [{'lr': 1.0}" in text for text in printed)


def test_a_lost_best_is_replaced(capsys):
    train(SMALL, "--data_dir text --out_dir a --max_steps 1 --eval_every 1")
    Path("a/best.pt").unlink()
    train("--resume a --max_steps 2")
    assert "best.pt of step 1 is missing" in capsys.readouterr().out
    assert common.load("a/best.pt")["step"] == 2
