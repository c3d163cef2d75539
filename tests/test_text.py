"""Test data/text.py: tokens, your own text, training windows and sliding evaluation."""

import math
import os
import random
import shutil
import zlib
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
import torch

from data import text as data_text
from common import InputError
from data.text import (load_corpus, perplexity, pydoc_folder, random_windows, read_lines, read_prose,
                       separate_words, sliding_nll)
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


def test_every_vocabulary_has_unk(folder):
    write(folder, TRAIN.replace("<unk>", ""))
    corpus = load_corpus(folder)
    assert corpus.vocab.words[-1] == "<unk>"
    assert corpus.valid[3] == len(corpus.vocab) - 1     # "unseen"


def test_each_line_has_one_eos(folder):
    """Some programs write <eos> into the files."""
    plain = load_corpus(folder)
    for split in data_text.SPLITS:
        file = folder / f"wiki.{split}.tokens"
        file.write_text(file.read_text().replace("\n", "<eos>\n"))
        (folder / f"{split}.txt").write_text("one word <eos>\ntwo words <eos>\n")
    marked = load_corpus(folder)
    assert marked.vocab == plain.vocab and np.array_equal(marked.train, plain.train)
    for file in folder.glob("*.tokens"):
        file.unlink()
    assert read_prose(folder)["valid"] == ["one word", "two words"]


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
        found = {name for name in topics if f" = {name} =" in lines_of(folder, split)}
        assert found and {zlib.crc32(f"topic {name}".encode()) % 16 for name in found} <= sixteenths


BOOK = "".join(f"The cat's {'old ' * (i % 3)}hat, number {i % 7},\n"
               f"was on   the mat\u2014{'x' * (i % 5 + 1)}.\n\n \n" for i in range(40))


def lines_of(folder, split):
    return read_lines(Path(folder) / f"wiki.{split}.tokens")


def stanzas(n, seed=1):
    rng = random.Random(seed)
    words = "sun moon river stone hill bird tree road".split()
    return ["\n".join(" ".join(rng.choices(words, k=5)) for _ in range(4)) for _ in range(n)]


def held_out(parts):
    return parts.get("valid", []) + parts.get("test", [])


def test_the_bytes_of_a_paragraph_decide_its_part(folder):
    """Renamed, extended, divided, wrapped and copied files never score a training paragraph."""
    poems = stanzas(200)
    Path("poems.txt").write_text("\n\n".join(poems) + "\n")
    parts = read_prose("poems.txt")
    assert 165 < len(parts["train"]) < 195 and len(parts) == 3
    other = dict(
        extended="\n\n".join(stanzas(100, seed=2) + poems[::-1]),
        divided="\n\n".join(poems[:12]),
        wrapped="\n\n".join(poem.replace("\n", " ").replace(" sun", "\nsun") for poem in poems),
        windows="\r\n\r\n".join(poem.replace("\n", "\r\n") for poem in poems))
    for name, text in other.items():
        Path(name).write_bytes(text.encode())
        found = read_prose(name)
        assert not set(held_out(found)) & set(parts["train"]), name
    for name in ("wrapped", "windows"):
        assert read_prose(name) == parts


def test_without_blank_lines_each_line_is_a_paragraph(folder):
    lines = [f"page {i} of the book" for i in range(100)]
    Path("lines.txt").write_text("\n" + "\n".join(lines) + "\n\n")
    parts = read_prose("lines.txt")
    assert sorted(sum(parts.values(), [])) == sorted(lines) and len(parts) == 3


def test_prose_has_words_and_marks(folder):
    Path("prose").mkdir()
    for split in data_text.SPLITS:                      # -sig: a byte order mark is no word
        Path(f"prose/{split}.txt").write_text(BOOK, encoding="utf-8-sig")
    signs = "I don\u2019t know.\n\n\ufeffI don't know.\n\nI don\u02bct kn\u00adow.\n"
    Path("curly.txt").write_text(signs, encoding="utf-8")
    found, = read_prose("curly.txt").values()           # equal paragraphs are in one part
    assert found == ["I don't know ."] * 3
    fifth = "The cat's old hat , number 4 , was on the mat \u2014 xxxxx ."
    assert read_prose("prose")["valid"][4] == fifth
    corpus = load_corpus("prose")
    assert corpus.vocab.words[-1] == "<unk>"            # no word is rare
    Path("prose/train.txt").write_text(BOOK.replace("number 3", "number three", 2))
    corpus = load_corpus("prose")
    assert "three" not in corpus.vocab and "old" in corpus.vocab
    assert (corpus.train == corpus.vocab["<unk>"]).sum() == 2


PROSE = "don't  stop @-@ <unk>, now."


@pytest.mark.parametrize("text, known, expected", [
    *((text, (), text) for text in (            # marks and apostrophes belong to words
        "\u0939\u093f\u0928\u094d\u0926\u0940 \u092d\u093e\u0937\u093e",
        "\u05e9\u05b8\u05c1\u05dc\u05d5\u05b9\u05dd", "don't l'\u00e9t\u00e9")),
    ("l'e\u0301te\u0301, nai\u0308ve", (), "l'\u00e9t\u00e9 , na\u00efve"),
    (PROSE, (), "don't stop @ - @ <unk> , now ."),
    (PROSE, {"@-@", "now."}, "don't stop @-@ <unk> , now.")])
def test_prose_is_cut_into_words(text, known, expected):
    """Words of the network's vocabulary stay whole."""
    assert separate_words(text, known) == expected


def test_words_do_not_depend_on_their_unicode_form(folder):
    """A text in decomposed letters has the tokens of the composed one."""
    write(folder, "the M\u00fcller <unk>\n", "M\u00fcller\n", "the\n")
    composed = load_corpus(folder)
    write(folder, "the Mu\u0308ller <unk>\n", "Mu\u0308ller\n", "the\n")
    decomposed = load_corpus(folder)
    assert composed.vocab == decomposed.vocab
    assert np.array_equal(composed.valid, decomposed.valid) and composed.valid[0] != 0


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
        model.train().drop.eval()
        nats = sliding_nll(model, a["seq"], int(a["window"]), 1, batch_size)
        assert model.training and not model.drop.training     # as before, but dropout was off
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


def test_a_short_text_is_one_window():
    model = Reads()
    context = sliding_nll(model, torch.arange(5), 8, 2)
    assert context.tolist() == [1, 2, 3, 4]
    with pytest.raises(InputError, match="has 1 tokens, expected 2 or more"):
        sliding_nll(model, torch.arange(1), 8, 2)


def test_a_wrong_path_is_one_line(folder):
    Path("texts").mkdir()
    Path("texts/book.txt").write_text(BOOK)
    with pytest.raises(InputError, match="missing.txt does not exist"):
        load_corpus("missing.txt")
    with pytest.raises(InputError, match="texts has no train text; .* a folder"):
        load_corpus("texts")
    for text in (" \n\n", "one line", "the same line\n" * 200, "a line\r" * 500):
        Path("short.txt").write_bytes(text.encode())
        with pytest.raises(InputError, match="short.txt has no (train|valid) text"):
            load_corpus("short.txt")
    Path("new").mkdir()
    Path("new/test.txt").write_text("one line")                     # enough for an evaluation
    assert read_prose("new", splits=("valid", "test")) == {"test": ["one line"]}
