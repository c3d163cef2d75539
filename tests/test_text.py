"""Test data/text.py: tokens, your own text, training windows and sliding evaluation."""

import math
import os
import shutil
import zlib
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
import torch

from data import text as data_text
from common import InputError
from data.text import (lines_to_score, load_corpus, perplexity, prepare_text, pydoc_folder,
                       random_windows, read_lines, seen_hashes, sliding_nll)
from lm import LM, LMConfig
from test_lm import lmtool_model

TRAIN = " = A title = \n \n the cat sat on the mat \n the dog sat , too <unk> \n"
VALID = " the cat , unseen \n \n"
TEST = " a mat on the mat \n"


def write(folder, train=TRAIN, valid=VALID, test=TEST):
    folder.mkdir(exist_ok=True)
    for split, text in (("train", train), ("valid", valid), ("test", test)):
        (folder / f"wiki.{split}.tokens").write_text(text)
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write(tmp_path / "text")


def test_words_are_sorted_by_count_then_appearance(folder):
    corpus = load_corpus(folder)
    # "the" occurs 3 times; "=" and "sat" occur twice, in this order
    assert corpus.vocab.words[:4] == ["<eos>", "the", "=", "sat"]
    assert corpus.vocab.words[4:] == ["A", "title", "cat", "on", "mat", "dog", ",", "too", "<unk>"]
    text = " ".join(corpus.vocab.words[i] for i in corpus.valid)
    assert text == "the cat , <unk> <eos> <eos>"  # unseen word; a blank line is <eos>
    assert len(corpus.train) == len(TRAIN.split()) + 4 and corpus.train.dtype == np.dtype("<u4")


def test_a_vocabulary_without_unk_rejects_new_words(folder):
    write(folder, TRAIN.replace("<unk>", ""))
    with pytest.raises(InputError, match="'unseen'"):
        load_corpus(folder)


def test_pydocs_documents_are_each_in_one_split(tmp_path, monkeypatch):
    """Use a part of the library, because parsing the whole library takes seconds."""
    library = Path(os.__file__).parent
    (tmp_path / "lib").mkdir()
    for name in ("argparse.py", "textwrap.py"):
        shutil.copy(library / name, tmp_path / "lib" / name)
    monkeypatch.setattr(os, "__file__", str(tmp_path / "lib" / "os.py"))
    folder = pydoc_folder(tmp_path)
    corpus = load_corpus(folder)
    counts = np.bincount(corpus.train, minlength=len(corpus.vocab))
    # counts never increase, as cutoffs require
    assert (np.diff(counts[1:]) <= 0).all() and counts[1:].min() >= data_text.MIN_COUNT
    for split, sixteenths in (("valid", {1}), ("test", {15}), ("train", {0, *range(2, 15)})):
        found = {name for name in topics if f" = {name} = " in lines_of(folder, split)}
        assert found and {zlib.crc32(f"topic {name}".encode()) % 16 for name in found} <= sixteenths


BOOK = "".join(f"The cat's {'old ' * (i % 3)}hat, number {i % 7},\n"
               f"was on   the mat\u2014{'x' * (i % 5 + 1)}.\n\n \n" for i in range(40))


def lines_of(folder, split):
    return read_lines(Path(folder) / f"wiki.{split}.tokens")


def test_a_text_file_is_split_by_paragraphs(folder):
    Path("book.txt").write_bytes(b"\xef\xbb\xbf" + BOOK.encode())     # a byte order mark is no word
    made = prepare_text("folder", "book.txt")
    assert made.parts[:2] == ("out", "cache") and made.name.startswith("book_")
    Path(made, "wiki.valid.tokens").write_text(" of another text \n")
    assert prepare_text("folder", "book.txt") == made  # written again
    assert [len(lines_of(made, split)) for split in data_text.SPLITS] == [37, 2, 2]
    fifth, first = lines_of(made, "train")[4].split(), lines_of(made, "valid")[0].split()
    assert fifth == "The cat's old hat , number 4 , was on the mat \u2014 xxxxx .".split()
    assert first == "The cat's hat , number 1 , was on the mat \u2014 xx .".split()
    assert lines_of(made, "train")[-1].split() == ["<unk>"]  # added, because no word is rare
    Path("rare.txt").write_text(BOOK.replace("number 3", "number three", 2))
    corpus = load_corpus(prepare_text("folder", "rare.txt"))
    assert "three" not in corpus.vocab and "old" in corpus.vocab
    assert (corpus.train == corpus.vocab["<unk>"]).sum() == 2


def test_words_do_not_depend_on_their_unicode_form(folder):
    """A text in decomposed letters has the tokens of the composed one."""
    words = data_text.separate_words("l'e\u0301te\u0301, nai\u0308ve").split()
    assert words == ["l'\u00e9t\u00e9", ",", "na\u00efve"]
    write(folder, "the M\u00fcller <unk>\n", "M\u00fcller\n", "the\n")
    composed = load_corpus(folder)
    write(folder, "the Mu\u0308ller <unk>\n", "Mu\u0308ller\n", "the\n")
    decomposed = load_corpus(folder)
    assert composed.vocab == decomposed.vocab
    assert np.array_equal(composed.valid, decomposed.valid) and composed.valid[0] != 0


def test_paragraphs_of_the_training_are_never_scored(folder):
    """The file may be renamed, copied or extended; the hashes of its paragraphs decide."""
    lines = [f"Page {i} of the book.\n\n" for i in range(40)]
    Path("book.txt").write_text("".join(lines))
    seen = seen_hashes("book.txt")
    assert len(seen) == 38 and seen_hashes(folder) == seen_hashes(None) == []
    Path("copy.txt").write_text("A new page.\n\n" + "".join(lines))
    unseen = lines_to_score("folder", "copy.txt", seen)["unseen"]
    assert unseen == ["A new page .", "Page 38 of the book .", "Page 39 of the book ."]
    Path("copy.txt").write_text("".join(lines[:30]))
    with pytest.raises(InputError, match="trained on all"):
        lines_to_score("folder", "copy.txt", seen)
    Path("short.txt").write_text("Page 7 of the book.\nA new page.\n\nPage\n38 of the book.\n")
    unseen = lines_to_score("folder", "short.txt", seen)["unseen"]     # other lines and paragraphs
    assert unseen == ["A new page .", "Page", "38 of the book ."]


TEXT = np.arange(10_000, dtype="<u4")


def test_windows_depend_on_seed_step_and_place_alone():
    whole = random_windows(TEXT, 5, 16, 8, 1)
    assert whole.shape == (16, 9) and whole.dtype == torch.int64 and (whole.diff() == 1).all()
    for b in (8, 4, 1):
        pieces = [random_windows(TEXT, 5, 16, 8, 1, slice(i, i + b)) for i in range(0, 16, b)]
        assert torch.equal(torch.cat(pieces), whole)
    others = [random_windows(TEXT, 6, 16, 8, 1), random_windows(TEXT, 5, 16, 8, 2)]
    assert not any(torch.equal(other, whole) for other in others)
    assert len(set(whole[:, 0].tolist())) == 16


def test_windows_reach_every_place_of_a_large_text():
    class Places:  # as long as WikiText-103, without data
        def __len__(self):
            return 103_227_021

        def __getitem__(self, at):
            return at
    starts = torch.cat([random_windows(Places(), step, 4096, 1, 0)[:, 0] for step in range(25)])
    assert 0 <= starts.min() < 20_000 and 103_200_000 < starts.max() < 103_227_020
    assert len(starts.unique()) > 102_300                           # 102,400 minus repeats


class Reads(torch.nn.Module):
    """A model that records its inputs. Its nats are the number of context tokens."""

    def __init__(self):
        super().__init__()
        self.weight, self.rows, self.scored = torch.nn.Parameter(torch.zeros(1)), [], 0

    def hidden(self, x):
        self.rows += x.tolist()
        return torch.stack([x.float(), torch.arange(1.0, x.shape[1] + 1).expand(x.shape)], -1)

    def nll(self, hidden, targets):
        assert torch.equal(hidden[..., 0].long() + 1, targets)  # predicts the next token
        self.scored += targets.numel()
        return hidden[..., 1]


@pytest.mark.parametrize("M, stride", [(9, 3), (17, 1), (30, 3), (30, 7), (30, 8)])
def test_every_token_is_scored_once_with_its_context(M, stride):
    model = Reads()
    # the length of each target's context, in tokens
    context = sliding_nll(model, torch.arange(M), 8, stride, batch_size=3)
    assert model.scored == M - 1  # no token is scored twice
    assert len(context) == M - 1 and context[:8].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    if stride < 8:
        assert (context[8:] > 8 - stride).all() and (context[8:] <= 8).all()
        assert {len(row) for row in model.rows} == {8}
        assert len(model.rows) == 1 + math.ceil((M - 9) / stride)
    else:
        # segments, the last one shorter
        assert context.tolist() == [i % 8 + 1 for i in range(M - 1)]


@pytest.mark.parametrize("name", ["lm_full_softmax", "lm_adaptive"])
def test_totals_equal_lmtools_whatever_the_batch(golden, name):
    a = golden(name)
    model = lmtool_model(a, name)
    for batch_size in (7, 64):
        nats = sliding_nll(model.train(), a["seq"], int(a["window"]), 1, batch_size)
        assert model.training  # as it was before, but dropout was off
        np.testing.assert_allclose(nats.numpy(), a["sliding_nll_b1"][:, 0].numpy(), atol=1e-5)
        assert perplexity(nats) == pytest.approx(a["sliding_total_b1"][2].item(), rel=1e-5)
        streams = [sliding_nll(model, stream, 12, 12, batch_size)
                   for stream in a["seq"].view(3, 20)]              # separate segments
        assert len(streams[0]) == a["ordered_total"][1]
        found = perplexity(torch.cat(streams))
        assert found == pytest.approx(a["ordered_total"][2].item(), rel=1e-5)


def test_processes_share_the_windows():
    torch.manual_seed(0)
    model, text = LM(LMConfig(60, 16, embed_dim=32, depth=2, num_heads=4,
                              mlp_dim=64)).eval(), torch.randint(60, (150,))
    parts = [sliding_nll(model, text, 16, 3, 8, rank, 3) for rank in range(3)]
    assert torch.equal(sum(parts), sliding_nll(model, text, 16, 3, 8))
    assert all((part == 0).any() for part in parts)


def test_short_lines_may_be_equal_by_chance(folder):
    """A line of fewer than eight words does not make a new paragraph a seen one."""
    short, long = "He said no to her again .", "He said no to her again and again ."
    page = "\n".join([short, long, "Page {} of the book ."]) + "\n\n"
    Path("book.txt").write_text("".join(page.format(i) for i in range(40)))
    seen = seen_hashes("book.txt")
    fresh = [f"A new page, {short}", f"{short}\nIt ends here .", f"{long}\nIt ends here ."]
    Path("fresh.txt").write_text("\n\n".join(fresh * 7))
    unseen = lines_to_score("folder", "fresh.txt", seen)["unseen"]
    assert unseen == ["A new page , " + short, short + " It ends here ."] * 7


def test_a_text_is_unseen_only_if_known(folder):
    Path("book.txt").write_text(BOOK)
    texts = lines_to_score("folder", "book.txt", [])    # trained on token files, or on pydoc
    assert list(texts) == ["text"] and len(texts["text"]) == 40


def test_a_text_has_the_trainings_tokens(folder):
    """Token files are not spaced, so a network that was trained on them gets words as they are."""
    Path("new.txt").write_text("don't  stop @-@ <unk>,\nnow.\n")
    assert data_text.is_spaced("new.txt") and data_text.is_spaced(None)
    assert not data_text.is_spaced(folder)
    for as_spaced, line in ((True, "don't stop @ - @ < unk > ,"), (False, "don't stop @-@ <unk>,")):
        assert lines_to_score("folder", "new.txt", [], as_spaced) == {"text": [line] + ["now."] * (
            not as_spaced) + ["now ."] * as_spaced}


def test_texts_without_enough_lines_are_errors(folder):
    for text, count in (("", 0), ("word " * 500, 1), ("a line\r" * 500, 1), ("a line\n" * 10, 10)):
        Path("short.txt").write_bytes(text.encode())
        with pytest.raises(InputError, match=f"short.txt has {count} lines .* at least 20"):
            prepare_text("folder", "short.txt")
    Path("short.txt").write_text("a line\n" * 20)
    prepare_text("folder", "short.txt")
    Path("short.txt").write_text("one line")                    # enough for an evaluation
    assert lines_to_score("folder", "short.txt", [1]) == {"unseen": ["one line"]}
    Path("short.txt").write_text(" \n")
    with pytest.raises(InputError, match="short.txt contains no words"):
        lines_to_score("folder", "short.txt", [1])
