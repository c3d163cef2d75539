"""Claims about train_lm.py alone, and about robust/words.py: what is scored is what the run knows.

What holds for every trainer is in test_train.py.
"""

import shutil
from argparse import Namespace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import attention
import common
import train_lm
from data import text as data_text
from lm import lm_from_checkpoint
from robust.words import load_texts, score
from runs import call, log, make_text, refused

SMALL = ("--data_dir text --context 16 --batch_size 8 --steps 30 --words 5 --warmup 5 "
         "--log_every 1 --eval_every 100").split()
train, bad = partial(call, train_lm.main), partial(refused, train_lm)


@pytest.fixture(autouse=True)
def a_small_text(alone):
    make_text()


# --- a run and what it leaves ---------------------------------------------------------------------

def test_the_default_run_ends_in_its_result_and_needs_no_flag(monkeypatch, capsys):
    """Without flags but --max_steps; pydoc's documents are made fewer for the time it takes."""
    text = "The function returns a list of words.\n\nIt takes  one argument, n.\n" * 9
    topics = {f"topic {i}": [(f"name{i}", text)] for i in range(60)}
    monkeypatch.setattr(data_text, "pydoc_documents", lambda: topics)
    train("--max_steps 2")
    out, folder = capsys.readouterr().out, Path("out/pydoc_rpc")
    checkpoint, sample = common.load(folder), log(folder, "sample")[2]
    vocab, model = data_text.stored_vocabulary(checkpoint), lm_from_checkpoint(checkpoint)
    (valid, _), _ = load_texts(data_text.text_folder("pydoc", None), vocab, 64)
    perplexity = score(model, valid, 64, 64)["segment"]         # of all tokens of the text
    assert f"valid perplexity {perplexity:.2f} " in out
    assert checkpoint["metrics"]["perplexity"] == pytest.approx(perplexity, rel=1e-5)
    assert sample and sample[:20] in out and out.strip().endswith(f"--ckpt {folder}")
    train("--words 3 --sample", [folder])                       # not refused: it writes nothing
    train(SMALL, "--max_steps 1")                               # a text of one's own
    assert {d.name for d in Path("out").iterdir()} == {"cache", "pydoc_rpc", "text_rpc"}


def test_a_model_that_reads_the_future_trains_and_is_not_sampled():
    train(SMALL, "--mu_over all --max_steps 2 --no-keep_best --out_dir a")
    config = lm_from_checkpoint(common.load("a")).config
    assert (config.context, config.pap["mu_over"]) == (16, "all") and log("a", "sample")[2] == ""
    assert not Path("a/best.pt").exists()
    assert "--sample a: mu_over='all'" in bad("--sample a")


def test_an_attention_that_forgets_its_mask_is_refused_before_training(monkeypatch):
    def forgets(q, k, v, layer):
        return attention.softmax_attention(q, k, v)
    monkeypatch.setitem(attention.ATTENTIONS, "forgets", (True, forgets))
    line = bad(SMALL, "--attn forgets --out_dir a")
    assert "--attn forgets" in line and "later words" in line and not Path("a").exists()


def test_the_learning_rate_is_lmtools_but_for_the_first_updates(golden):
    """In the warm-up lr k / w there, (k + 1) / (w + 1) here."""
    a = golden("lm_schedule")
    lr, warmup, total = (a[k].item() for k in ("base_lr", "warmup", "max_step"))
    args = Namespace(lr=lr, warmup=warmup, steps=total)
    ours = np.array([train_lm.learning_rate(k, args) for k in range(total)])
    theirs = a["lr_used_at_update"].numpy()
    np.testing.assert_allclose(ours[warmup:], theirs[warmup:], rtol=1e-9)
    assert np.abs(ours - theirs)[1:warmup].max() < lr / warmup and theirs[0] == lr


def test_a_text_that_is_too_short_is_named_before_training():
    for split in ("train", "valid", "test"):
        Path(f"text/wiki.{split}.tokens").write_text(" the cat of <unk> \n")
        line = bad(SMALL, "--out_dir a")
        assert f"--context 16: the {split} text in text has only 5 tokens" in line
        shutil.rmtree("text")
        make_text()
    assert not Path("a").exists()


# --- a checkpoint is sampled and scored -----------------------------------------------------------

def test_a_sample_goes_on_the_same_way_each_time_and_needs_nothing_but_its_checkpoint(
        capsys, monkeypatch):
    line = bad(SMALL, "--prompt", ["the purple cat"], "--out_dir b")        # before any training
    assert "purple" in line and not Path("b").exists()
    train(SMALL, "--out_dir a --steps 40 --lr 1e-2")
    own, files = log("a", "sample")[40], sorted(Path("a").iterdir())
    shutil.rmtree("text")
    monkeypatch.setattr(train_lm, "sliding_nll", None)                      # scores nothing

    def said(*parts):
        capsys.readouterr()
        train(*parts)
        return capsys.readouterr().out.strip()
    assert said("--sample a --words 5") == own              # that run's own sample, nothing else
    prompt = ["--prompt", "the cat of"]
    texts = [said("--sample a --words 12", prompt, extra) for extra in ("", "", "--seed 1")]
    assert all(text.startswith("the cat of") for text in texts)
    assert texts[0] == texts[1] != texts[2]
    assert not any(mark in text for text in texts for mark in (" ,", " .", "@-@"))
    assert said("--sample a/best.pt --words 12 --seed 1", prompt) == texts[2]
    assert "meows" in bad("--sample a --prompt", ["the cat meows"])
    assert sorted(Path("a").iterdir()) == files


def test_a_text_is_scored_in_the_words_of_the_run_and_has_to_be_longer_than_a_window():
    """The word of the attack is the paper's or, where the run does not know that, its rarest."""
    vocab = data_text.count_words(Path("text/wiki.train.tokens"))
    Path("text/wiki.train.tokens").unlink()                     # is not needed any more
    Path("text/wiki.valid.tokens").write_text(" the zebra of ann saw bob . \n" * 3)
    for known, word in (([], vocab.words[-1]), (["AAA"], "AAA")):
        (valid, test), swapped = load_texts("text",
                                            data_text.Vocabulary([*vocab.words, *known]), 16)
        assert swapped == word and (valid.split, test.split) == ("valid", "test")
        assert len(valid.clean) == 24 and valid.clean[1] == vocab["<unk>"]
        new = test.attacked[1:][~test.kept.numpy()]
        assert len(new) and (new == (len(vocab) if known else len(vocab) - 1)).all()
    for split in ("valid", "test"):
        Path(f"text/wiki.{split}.tokens").write_text(" the cat of \n" * 4)
        with pytest.raises(common.InputError,
                           match=rf"--window 16 .*wiki.{split}.tokens in text has only 16"):
            load_texts("text", vocab, 16)
        Path(f"text/wiki.{split}.tokens").write_text(" the cat of \n" * 5)
