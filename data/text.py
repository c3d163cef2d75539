"""Text in, tokens out: WikiText folders, their ids, windows for training and sliding evaluation.

A folder holds wiki.{train,valid,test}.tokens: UTF-8, already tokenised, words between spaces; every
line, a blank one too, ends with <eos> (`IDSIA/lmtool-fwp:src/utils/vocabulary.py`). A text of
one's own and this Python's documentation are written in this form, into out/cache. The ids are made
anew in every run, in memory: WikiText-103 takes a minute.

    corpus = load_corpus("data/wikitext-103")
    x = random_windows(corpus.train, step=0, batch_size=96, context=256, seed=0)
    nats = sliding_nll(model, corpus.valid, window=256, stride=1)
"""

import ast
import os
import platform
import re
import unicodedata
import zlib
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from common import InputError, replacing
from data.decode import same_folder
from data.rng import TEXT_WINDOW, uniform

SPLITS = ("train", "valid", "test")
EOS, UNK = "<eos>", "<unk>"
MIN_COUNT = 3                                   # rarer words are <unk>
# folders of the library whose documentation is no part of pydoc's text
NOT_PYDOC = {"test", "idlelib", "lib2to3", "turtledemo", "site-packages", "dist-packages"}


class Vocabulary(dict):
    """Map word -> id, its place in `words`; an unknown word gets the id of <unk>."""

    def __init__(self, words):
        self.words = list(words)
        super().__init__(zip(self.words, range(len(self.words))))

    def __missing__(self, word):
        if UNK not in self:
            raise InputError(f"the word {word!r} is not in the vocabulary, which has no {UNK} to "
                             f"stand for it")
        return self[UNK]

    def encode_lines(self, lines):
        """Encode the lines of a token file, <eos> at the end of each: (n,) uint32."""
        words = (word for line in lines for word in (*line.split(), EOS))
        return np.fromiter(map(self.__getitem__, words), "<u4")


def stored_vocabulary(checkpoint):
    """Read a checkpoint's Vocabulary."""
    return Vocabulary(checkpoint["vocab"].split("\n"))


# --- files to words -------------------------------------------------------------------------------

def token_file(folder, split):
    """Find wiki.<split>.tokens; InputError unless it is there and holds something."""
    path = Path(folder, f"wiki.{split}.tokens")
    if not path.is_file() or not path.stat().st_size:
        raise InputError(f"--data_dir {folder}: {path.name} is missing or empty; expected "
                         f"wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens")
    return path


def each_line(path, what="reading"):
    """Read a file line by line, without newlines; only "\\n" ends a line. what: for a long bar.

    A byte order mark, as Windows writes it, is no part of the text.
    """
    few = path.stat().st_size < 2 ** 24 or os.environ.get("RANK", "0") != "0"
    with open(path, encoding="utf-8-sig", newline="\n") as f:
        try:
            for line in tqdm(f, f"{what} {path.name}", unit=" lines", leave=False, disable=few):
                yield line.removesuffix("\n")
        except UnicodeDecodeError as e:
            raise InputError(f"{path} is not UTF-8 text ({e.reason})") from None


def read_lines(path):
    """Read all lines of a file."""
    return list(each_line(Path(path)))


# --- words to ids ---------------------------------------------------------------------------------

class Corpus(NamedTuple):
    """Hold a folder of token files as ids, each (n,) uint32."""
    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray
    vocab: Vocabulary


def load_corpus(folder):
    """Load a folder's texts as ids, in the vocabulary of the training text."""
    paths = [token_file(folder, split) for split in SPLITS]
    vocab = count_words(paths[0])
    return Corpus(*(vocab.encode_lines(each_line(path, "encoding")) for path in paths), vocab)


def describe(corpus):
    """Say what was found: sizes and the share of unknown words."""
    unknown = corpus.vocab.get(UNK, -1)
    shares = [100 * (text == unknown).mean() for text in (corpus.train, corpus.valid)]
    return (f"{len(corpus.train):,} training, {len(corpus.valid):,} valid, {len(corpus.test):,} "
            f"test tokens, {len(corpus.vocab):,} words; unknown: {shares[0]:.1f} % of training, "
            f"{shares[1]:.1f} % of valid")


def count_words(path):
    """Make a text's Vocabulary: <eos>, words by falling count, ties in order of appearance."""
    counts = Counter()
    for line in each_line(path, "counting words of"):
        counts.update(line.split())
    counts.pop(EOS, None)                       # it comes first, however often it is written out
    if not counts:
        raise InputError(f"{path} holds no word, only blank lines: expected tokenised text")
    return Vocabulary([EOS, *sorted(counts, key=counts.get, reverse=True)])


# --- other texts, written as token files ----------------------------------------------------------

def text_folder(data, data_dir):
    """Find the folder of token files that the flags mean, or write it; processes may do so at once.

    data_dir: a folder of wiki.*.tokens, a file of text, or None for pydoc's text.
    """
    if not data_dir and data != "pydoc":
        raise InputError(f"--data {data} needs --data_dir: a file of text, or a folder with "
                         f"wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens")
    if not data_dir:
        return pydoc_folder("out/cache")
    return Path(data_dir) if Path(data_dir).is_dir() else txt_folder(Path(data_dir))


# Chinese, Japanese: written without spaces, so each character is a word
IDEOGRAPHS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"


@cache
def word_patterns():
    """Compile what finds an ideograph, and what finds a word or punctuation mark."""
    common = map(chr, range(0x10000))                   # marks combine with a letter, as in Hindi
    marks = "".join(c for c in common if unicodedata.category(c)[0] == "M") + "\u200c\u200d"
    letter = rf"[\w{marks}]+"
    return (re.compile(rf"[{IDEOGRAPHS}][{marks}]*"),
            re.compile(rf"{letter}(?:'{letter})*|[^\w\s]"))


def words_of(text):
    """Split a text into words and punctuation marks; a letter keeps the marks that combine with it.

    A Chinese or Japanese character is a word, as no spaces part those.
    """
    ideograph, word = word_patterns()
    return word.findall(ideograph.sub(r" \g<0> ", text))


def write_tokens(folder, lines):
    """Write {split: lists of words} as wiki.*.tokens; words rare in the training text are <unk>."""
    folder.mkdir(parents=True, exist_ok=True)
    counts = Counter(word for line in lines["train"] for word in line)
    if min(counts.values()) >= MIN_COUNT:
        lines["train"] = [*lines["train"], [UNK]]                   # the others may need it
    for split in SPLITS:
        kept = [[w if counts[w] >= MIN_COUNT else UNK for w in line] for line in lines[split]]
        text = "".join(" ".join(["", *line, "\n"]) for line in kept)
        with replacing(folder / f"wiki.{split}.tokens") as tmp:
            tmp.write_bytes(text.encode())


def txt_folder(path):
    """Make a folder of a text file: 90 % of its paragraphs to train, 5 % to valid, 5 % to test.

    Blank lines part paragraphs; where that gives fewer than 20, every line is one. The folder is
    out/cache/<name>_<hash of the whole path>, written anew each time: the file may have changed.
    """
    whole = path.resolve()
    if not whole.is_file():
        raise InputError(f"--data_dir {path}: there is no such file or folder")
    folder = Path("out", "cache", f"{whole.stem}_{zlib.crc32(str(whole).encode()):08x}")
    lines = paragraphs(path)
    if len(lines) < 20:
        raise InputError(f"{path} has {len(lines)} lines with words, expected 20 or more")
    a, b = len(lines) * 90 // 100, len(lines) * 95 // 100
    write_tokens(folder, dict(train=lines[:a], valid=lines[a:b], test=lines[b:]))
    return folder


def lines_to_score(data, data_dir, trained):
    """Return the lines of the texts to evaluate a language model on: {split: lines of tokens}.

    data, data_dir: of the evaluation. trained: the flags of the model's training, a dict. The run's
    own text and folders of token files have the splits valid and test. Another text file is one
    split, "whole", with every word as it is: the model's vocabulary decides which words it knows.
    """
    own = same_folder(trained.get("data_dir"), data_dir) if data_dir else \
        not trained.get("data_dir")
    if not own and data_dir and Path(data_dir).is_file():
        return {"whole": [" ".join(words) for words in paragraphs(Path(data_dir))]}
    folder = text_folder(data, data_dir)
    return {split: read_lines(token_file(folder, split)) for split in ("valid", "test")}


def paragraphs(path):
    """Split a text file into lists of words: its paragraphs or, if there are fewer than 20, lines.

    Blank lines part paragraphs.
    """
    text = "\n".join(each_line(path))
    for mark in (r"\n\s*\n", "\n"):
        lines = [words for words in map(words_of, re.split(mark, text)) if words]
        if len(lines) >= 20:
            break
    return lines


def pydoc_documents():
    """Collect {name: [(title, text)]}: pydoc's topics, docstrings of the standard library."""
    from pydoc_data.topics import topics
    documents = {f"topic {name}": [(name, text)] for name, text in topics.items()}
    library = Path(os.__file__).parent
    for path in sorted([*library.glob("*.py"), *library.glob("*/*.py")]):
        if path.parent.name in NOT_PYDOC:
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):                           # not meant for this Python
            continue
        name = ".".join(path.relative_to(library).with_suffix("").parts)
        nodes = [node for node in ast.walk(tree)
                 if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))]
        texts = [(getattr(node, "name", name), ast.get_docstring(node)) for node in nodes]
        documents[name] = [(title, text) for title, text in texts if text]
    return {name: texts for name, texts in sorted(documents.items()) if texts}


def pydoc_folder(parent):
    """Make a folder of wiki.*.tokens of `pydoc_documents`, if it is missing.

    The same text for the same Python. A document belongs to one split by a hash of its name, a
    sixteenth to valid and to test each; a paragraph is a line.
    """
    folder = Path(parent, f"pydoc_{platform.python_version()}")
    if all(Path(folder, f"wiki.{split}.tokens").exists() for split in SPLITS):
        return folder
    lines = {split: [] for split in SPLITS}                         # lists of words
    for name, texts in pydoc_documents().items():
        split = {1: "valid", 15: "test"}.get(zlib.crc32(name.encode()) % 16, "train")
        for i, (title, text) in enumerate(texts):
            sign = ["="] * (2 if i else 1)
            paragraphs = map(words_of, re.split(r"\n\s*\n", text))
            lines[split] += [], [*sign, *words_of(title), *sign], [], *paragraphs
    write_tokens(folder, lines)
    return folder


# --- windows --------------------------------------------------------------------------------------

def random_windows(tokens, step, batch_size, context, seed, part=slice(None)):
    """Draw windows of context + 1 tokens from anywhere in the text, the last only a target.

    tokens: (n,) uint32, n > context. Returns (b, context + 1) int64: the slice `part` of the
    batch_size windows of this step, each drawn by (seed, step, its place) alone.
    """
    places = torch.arange(batch_size)[part]
    u = uniform(places, 2, seed, TEXT_WINDOW, step).double()        # (b, 2), 24 bits
    share = u[:, 0] + u[:, 1] * 2 ** -24                            # WikiText-103 needs 27 bits
    starts = (share * (len(tokens) - context)).long()
    at = starts[:, None].numpy() + np.arange(context + 1)
    return torch.from_numpy(tokens[at].astype(np.int64))


def sliding_windows(num_targets, window, stride):
    """Plan which windows score which targets: [(starts (n,) int64, length, scored)].

    The last `scored` of `length` targets count. The first window scores all its targets, each later
    one, `stride` further on, its last `stride`. The last window is moved back to end with the text
    and scores what is left. With stride = window, segment-wise evaluation, no token is read twice,
    so there it is shorter instead.
    """
    if not 1 <= stride <= window <= num_targets:
        raise InputError(f"window {window}, stride {stride}: expected 1 <= stride <= window <= "
                         f"{num_targets}, the number of targets in the text")
    later = stride * torch.arange(1, (num_targets - window) // stride + 1)
    rest = num_targets - window - stride * len(later)
    length = window if stride < window else rest
    parts = [(torch.tensor([0]), window, window), (later, window, stride),
             (torch.tensor([num_targets - length]), length, rest)]
    return [part for part in parts if len(part[0]) and part[2]]


@torch.no_grad()
def sliding_nll(model, tokens, window, stride, batch_size=64, rank=0, world=1, progress=None):
    """Compute the nats of each of tokens[1:] in a sliding evaluation.

    Teo & Nguyen 2024, App. A.4; `IDSIA/lmtool-fwp:src/eval_sliding_window.py`, there stride 1, one
    window at a time. model: has hidden(x (b, T)) -> (b, T, C) and nll(h (b, s, C), targets (b, s))
    -> (b, s). tokens: (M,) ids, array or tensor. The output layer sees only what is scored;
    processes share the windows. progress: text for the bar. Returns (M - 1,) float64 on the CPU of
    every process.
    """
    device, training = next(model.parameters()).device, model.training
    if not torch.is_tensor(tokens):
        tokens = np.asarray(tokens, np.int64)
    tokens = torch.as_tensor(tokens, device=device)
    nll = torch.zeros(len(tokens) - 1, device=device)
    batches = [(part, length, scored)
               for starts, length, scored in sliding_windows(len(nll), window, stride)
               for part in starts.split(batch_size)][rank::world]
    model.eval()
    for starts, length, scored in tqdm(batches, progress, leave=False,
                                       disable=rank > 0 or not progress or None):
        at = starts.to(device)[:, None] + torch.arange(length, device=device)      # (b, length)
        hidden = model.hidden(tokens[at])[:, -scored:]                             # (b, scored, C)
        at = at[:, -scored:]
        nll[at] = model.nll(hidden, tokens[at + 1]).float()
    model.train(training)
    if dist.is_initialized():
        dist.all_reduce(nll)
    return nll.cpu().double()


def perplexity(nll, scored=None):
    """Compute exp(mean over tokens) of nats, float64; scored: a bool for each, which to count."""
    return (nll if scored is None else nll[scored]).mean().exp().item()
