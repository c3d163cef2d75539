"""Claims about train_lm.py alone and about robust/words.py: what is scored is what a plain loop over the files gives.
What holds for every trainer is in test_train.py, the flags in test_flags.py."""

import random
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
from lm import lm_from_checkpoint
from robust.words import load_texts, score
from runs import call, log, refused

SMALL = ("--data_dir text --context 16 --batch_size 8 --steps 30 --words 5 --warmup 5 --log_every 1 "
         "--eval_every 100").split()
train, bad = partial(call, train_lm.main), partial(refused, train_lm)


def sentences(count, seed):
    """Lines of a tiny grammar in which much can be predicted, laid out like WikiText."""
    rng, lines = random.Random(seed), []
    for i in range(count):
        if i % 10 == 0:
            lines += ["", f"= {rng.choice('Winter Summer Autumn Spring'.split())} =", ""]
        who, what = rng.choice("cat dog bird fish horse".split()), rng.choice("red green blue small large".split())
        old = rng.randint(2, 9)
        lines.append(f"the {what} {who} saw {old} @-@ year old {who} s , and AAA <unk> the {what} {who} .")
    return "".join(f" {line} \n" if line else " \n" for line in lines)


def write_text(folder, seed=0, **texts):
    Path(folder).mkdir(exist_ok=True)
    for i, (split, count) in enumerate(dict(train=100, valid=8, test=6).items()):
        Path(folder, f"wiki.{split}.tokens").write_text(texts.get(split, sentences(count, 10 * seed + i)))


@pytest.fixture(autouse=True)
def a_small_text(alone):
    write_text("text")


def scored(folder, data_dir="text", window=16, stride=16, seed=0, name="best.pt", **how):
    """The rows of `score` for a run's weights, and the word that was swapped in."""
    checkpoint = common.load(Path(folder, name))
    vocab = data_text.stored_vocabulary(checkpoint)
    texts, word = load_texts(data_dir, vocab, window, seed)
    model = lm_from_checkpoint(checkpoint)
    return [dict(split=text.split, tokens=len(text.clean), **score(model, text, window, stride, **how))
            for text in texts], word


# --- a run and what it leaves ----------------------------------------------------------------------------------------

def test_the_default_run_ends_in_its_result_and_needs_no_flag(monkeypatch, capsys):
    """Without flags but --max_steps; pydoc's documents are made fewer for the time it takes."""
    text = "The function returns a list of words.\n\nIt takes  one argument, n.\n" * 9
    topics = {f"topic {i}": [(f"name{i}", text)] for i in range(60)}
    monkeypatch.setattr(data_text, "pydoc_documents", lambda: topics)
    train("--max_steps 2")
    out, folder = capsys.readouterr().out, Path("out/pydoc_rpc")
    (valid, test), word = scored(folder, data_text.text_folder("pydoc", None), 64)
    assert f"valid perplexity {valid['segment']:.2f} " in out and out.strip().endswith(f"--ckpt {folder}")
    assert (valid["split"], test["split"], word) == ("valid", "test", "<unk>")
    sample, checkpoint = log(folder, "sample")[2], common.load(folder)
    assert sample and sample[:20] in out and checkpoint["step"] == 2 and checkpoint["args"]["data"] == "pydoc"
    train(SMALL, "--max_steps 1")                                   # a text of one's own
    assert {d.name for d in Path("out").iterdir()} == {"cache", "pydoc_rpc", "text_rpc"}


def test_a_model_that_reads_the_future_trains_and_is_not_sampled():
    train(SMALL, "--mu_over all --max_steps 2 --out_dir a")
    assert lm_from_checkpoint(common.load("a")).config.pap["mu_over"] == "all" and log("a", "sample")[2] == ""
    assert "--sample a: mu_over='all'" in bad("--sample a")


def test_an_attention_that_forgets_its_mask_is_refused_before_training(monkeypatch):
    def forgets(q, k, v, causal=False):
        return attention.softmax_attention(q, k, v)
    monkeypatch.setitem(attention.ATTENTIONS, "forgets", forgets)
    line = bad(SMALL, "--attn forgets --out_dir a")
    assert "--attn forgets" in line and "later words" in line and not Path("a").exists()


def test_training_learns_and_best_is_the_evaluation_with_the_lowest_valid_perplexity():
    shuffled = sentences(20, 1).split()
    random.Random(0).shuffle(shuffled)                                              # learning the order makes it worse
    write_text("text", valid=" " + " ".join(shuffled) + " \n")
    train(SMALL, "--out_dir a --steps 60 --lr 5e-3 --eval_every 5")
    losses, evals = list(log("a").values()), {step: row["perplexity"] for step, row in log("a", "eval").items()}
    assert len(losses) == 60 and np.mean(losses[-10:]) < np.mean(losses[:5]) - 1
    step, (best, last) = min(evals, key=evals.get), (common.load(f"a/{name}.pt") for name in ("best", "last"))
    assert list(evals) == list(range(5, 61, 5)) and best["step"] == step < 60 == last["step"]
    assert best["best"] == last["best"] == dict(step=step, perplexity=evals[step])
    # of all tokens, not the mean of the batches' means: the last of many pieces is short
    assert scored("a")[0][0]["segment"] == pytest.approx(evals[step], rel=1e-5)


def test_the_learning_rate_is_lmtools_but_for_the_first_updates(golden):
    a = golden("lm_schedule")
    lr, warmup, total = (a[k].item() for k in ("base_lr", "warmup", "max_step"))
    args = Namespace(lr=lr, warmup=warmup, steps=total)
    ours = np.array([train_lm.learning_rate(k, args) for k in range(total)])
    theirs = a["lr_used_at_update"].numpy()
    np.testing.assert_allclose(ours[warmup:], theirs[warmup:], rtol=1e-9)
    assert np.abs(ours - theirs)[1:warmup].max() < lr / warmup and theirs[0] == lr  # lr k / w there, (k+1) / (w+1) here


# --- a checkpoint is scored and sampled ------------------------------------------------------------------------------

def test_a_score_takes_the_words_of_the_run_and_needs_no_training_file():
    train(SMALL, "--out_dir a --steps 6")
    write_text("other", seed=1, valid=sentences(8, 1) + " a zebra unheard of \n")
    Path("other/wiki.train.tokens").unlink()
    vocab, model = data_text.stored_vocabulary(common.load("a")), lm_from_checkpoint(common.load("a/best.pt"))
    found, word = scored("a", "other", stride=1)
    text = (sentences(8, 1) + "a zebra unheard of \n").replace("\n", " <eos> ")
    assert found[0]["tokens"] == len(text.split()) and "zebra" not in vocab and word == "AAA"
    nats = data_text.sliding_nll(model, vocab.encode_lines(data_text.read_lines("other/wiki.test.tokens")), 16, 1)
    assert found[1]["sliding"] == pytest.approx(data_text.perplexity(nats), rel=1e-5)


def test_what_cannot_be_scored_is_refused():
    train(SMALL, "--out_dir a --max_steps 1")
    for split in ("valid", "test"):
        write_text("short", **{split: " the cat \n" * 6})                                                # 18 tokens
        scored("a", "short")
        write_text("short", **{split: " the cat \n" * 5 + "\n"})
        with pytest.raises(ValueError, match=rf"--window 16 .*wiki.{split}.tokens in short has only 16"):
            scored("a", "short")


def test_a_sample_goes_on_the_same_way_each_time_and_needs_nothing_but_its_checkpoint(capsys, monkeypatch):
    line = bad(SMALL, "--prompt", ["the purple cat"], "--out_dir b")                            # before any training
    assert "purple" in line and not Path("b").exists()
    train(SMALL, "--out_dir a --steps 40 --lr 1e-2")
    own, files = log("a", "sample")[40], sorted(Path("a").iterdir())
    shutil.rmtree("text")
    monkeypatch.setattr(train_lm, "sliding_nll", None)                                               # scores nothing

    def said(*parts):
        capsys.readouterr()
        train(*parts)
        return capsys.readouterr().out.strip()
    assert said("--sample a --words 5") == own                                  # that run's own sample, nothing else
    prompt = ["--prompt", "the red cat"]
    texts = [said("--sample a --words 12", prompt, extra) for extra in ("", "", "--seed 1")]
    assert all(text.startswith("the red cat") for text in texts) and texts[0] == texts[1] != texts[2]
    assert not any(text.count(" ,") + text.count(" .") for text in texts)
    assert said("--sample a/best.pt --words 12 --seed 1", prompt) == texts[2]
    assert "meows" in bad("--sample a --prompt", ["the purple cat meows"]) and "nowhere" in bad("--sample nowhere")
    assert sorted(Path("a").iterdir()) == files


def test_when_the_attacks_word_is_unknown_the_rarest_known_word_stands_for_it():
    write_text("text", train=sentences(100, 0).replace("AAA", "and") + " rare \n")
    train(SMALL, "--max_steps 1 --out_dir a")
    assert scored("a")[1] == "rare"
    vocab = data_text.stored_vocabulary(common.load("a"))
    for text in load_texts("text", vocab, 16)[0]:
        swapped = text.attacked[1:][~text.kept.numpy()]
        assert len(swapped) and (swapped == vocab["rare"]).all()


# --- going on, and what it refuses -----------------------------------------------------------------------------------

def test_a_resumed_run_holds_its_text():
    train(SMALL, "--max_steps 1 --out_dir a")
    before, path = Path("a/last.pt").read_bytes(), Path("text/wiki.train.tokens")
    text = path.read_text()
    for changed, what in ((text * 2, "train_tokens"), (text + " new words \n", "vocab")):
        path.write_text(changed)
        assert what in bad("--resume a --max_steps 2")
    assert Path("a/last.pt").read_bytes() == before and list(log("a")) == [1]

# --- bad input -------------------------------------------------------------------------------------------------------

def test_a_text_that_is_too_short_or_missing_is_named_before_training():
    for split in ("train", "valid", "test"):
        write_text("text", **{split: " the cat AAA <unk> \n"})
        assert f"--context 16: the {split} text in text has only 5 tokens" in bad(SMALL, "--out_dir a")
    Path("text/wiki.train.tokens").write_text(" \n\n  \n")
    assert "wiki.train.tokens" in bad(SMALL, "--out_dir a")
    assert not Path("a").exists()


def test_other_scripts_checkpoints_are_refused():
    Path("other").mkdir()
    torch.save({"task": "classification", "args": {}}, "other/last.pt")
    for flag in ("--resume", "--sample"):
        line = bad(flag, "other")
        assert "other" in line and "language modelling" in line
