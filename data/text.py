"""Texts for the language model: words, ids, training windows, sliding evaluation.

A text has three parts: train, valid and test. A path names one of these layouts:

    folder with wiki.train.tokens, wiki.valid.tokens, wiki.test.tokens: words as in the files
    folder with train.txt, valid.txt, test.txt: prose
    one file of prose: the words of a paragraph decide in which part it is

An <eos> follows every line, also a blank line (`IDSIA/lmtool-fwp:src/utils/vocabulary.py`). A
paragraph of prose becomes one line.

    corpus = load_corpus("data/wikitext-103")
    x = random_windows(corpus.train, step=0, batch_size=96, context=256, seed=0)
    nats = sliding_nll(model, corpus.valid, window=256, stride=1)
"""

import ast
import os
import platform
import re
import zlib
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import NamedTuple
from unicodedata import category, normalize

import numpy as np
import torch
import torch.distributed as dist

from attention import eval_mode
from common import InputError, bar, print0, replacing
from data.rng import TEXT_WINDOW, uniform

SPLITS = ("train", "valid", "test")
EOS = "<eos>"
UNK = "<unk>"
MIN_COUNT = 3                                   # rarer words of prose become <unk>
# Signs inside words that \w does not match: combining marks, such as the vowel signs of Hindi, and
# two signs that separate or join letters. With the marks above 0x10000, re takes ten times as long.
MARKS = "\u200c\u200d" + "".join(
    letter for letter in map(chr, range(0x300, 0x10000)) if category(letter)[0] == "M")
# <unk>; a word, which may contain apostrophes; or a punctuation mark.
TOKEN = re.compile(rf"{UNK}|[\w{MARKS}]+(?:'[\w{MARKS}]+)*|[^\w\s][{MARKS}]*")
# Two more signs for the apostrophe; and signs without width: a soft hyphen, a byte order mark.
PLAIN = {0x2019: "'", 0x2bc: "'", 0xad: None, 0xfeff: None}
EXPECTED = ("expected a file with more paragraphs; or a folder with train.txt, valid.txt "
            "and test.txt, or with wiki.train.tokens, wiki.valid.tokens and "
            "wiki.test.tokens")
# folders of Python's library whose docstrings are not part of the text "pydoc"
NOT_PYDOC = {"test", "idlelib", "lib2to3", "turtledemo", "site-packages",
             "dist-packages"}


# --- words to ids ---------------------------------------------------------------------------------

class Vocabulary(dict):
    """Map a word to its id, the index in `words`. Every vocabulary has <unk>, for unknown words."""

    def __init__(self, words):
        self.words = list(words)
        if UNK not in self.words:
            self.words.append(UNK)
        super().__init__({word: i for i, word in enumerate(self.words)})

    def __missing__(self, word):
        return self[UNK]

    def encode_lines(self, lines):
        """Return the ids of the words in the lines, (n,) uint32, with <eos> after each line."""
        words = chain.from_iterable([*line.split(), EOS] for line in lines)
        return np.fromiter((self[word] for word in words), "<u4")


class Corpus(NamedTuple):
    train: np.ndarray                               # ids, (n,) uint32
    valid: np.ndarray
    test: np.ndarray
    vocab: Vocabulary


def count_words(lines):
    """Count how often each word occurs in the lines, a Counter."""
    counts = Counter()
    for line in lines:
        counts.update(line.split())
    return counts


def load_corpus(path):
    """Load a text to train on. Ids: <eos>, then the words of the training by falling count."""
    tokens = read_tokens(path)                  # {}: the text is prose
    texts = tokens or read_prose(path)
    for split in ("train", "valid"):
        if split not in texts:
            raise InputError(f"{path} has no {split} text; {EXPECTED}")
    if not tokens:
        texts = mark_rare_words(texts)
    counts = count_words(texts["train"])
    counts.pop(EOS, None)                       # <eos> comes first, whatever its count
    # Words with equal counts keep the order of the text.
    words = sorted(counts, key=counts.get, reverse=True)
    vocab = Vocabulary([EOS, *words])
    ids = [vocab.encode_lines(texts.get(split, [])) for split in SPLITS]
    return Corpus(*ids, vocab)


# --- files: tokens, and prose ---------------------------------------------------------------------

def token_file(folder, split):
    return Path(folder, f"wiki.{split}.tokens")


def read_lines(path):
    """Read the lines of a UTF-8 file in Unicode's composed form, a list; only "\\n" ends a line.

    Some programs write <eos> at the end of each line. This <eos> is removed, because encode_lines
    adds it.
    """
    with open(path, encoding="utf-8-sig", newline="\n") as f:       # -sig drops a byte order mark
        try:
            lines = [normalize("NFC", line) for line in f]
        except UnicodeDecodeError as error:                         # does not name the file
            raise InputError(f"{path} is not UTF-8 text: {error.reason}") from None
    return [line.rstrip().removesuffix(EOS).rstrip() for line in lines]


def read_tokens(folder, splits=SPLITS):
    """Read wiki.*.tokens, {split: lines}. Parts without a word, or without a file, are left out."""
    texts = {}
    for split in splits:
        file = token_file(folder, split)
        lines = read_lines(file) if file.exists() else []
        if any(lines):
            texts[split] = lines
    return texts


def read_paragraphs(path):
    """Read the paragraphs of prose, a list of texts without line breaks.

    Blank lines separate paragraphs. In a file without blank lines, each line is a paragraph.
    """
    text = plain("\n".join(read_lines(path))).strip()
    paragraphs = re.split(r"\n\s*\n", text)
    if len(paragraphs) == 1:
        paragraphs = text.split("\n")
    paragraphs = [" ".join(paragraph.split()) for paragraph in paragraphs]
    return [paragraph for paragraph in paragraphs if paragraph]


def read_prose(path, splits=SPLITS, known=()):
    """Read a file of prose, or a folder with train.txt, valid.txt and test.txt, {split: lines}.

    A line is a paragraph, with spaces between words. Parts without a paragraph are left out. known:
    the vocabulary of a trained network, see `separate_words`.
    """
    if not Path(path).exists():
        raise InputError(f"--data_dir {path} does not exist")
    parts = {split: [] for split in SPLITS}             # {split: paragraphs}
    if Path(path).is_file():
        for paragraph in read_paragraphs(path):
            remainder = zlib.crc32(paragraph.encode()) % 20
            split = {0: "test", 1: "valid"}.get(remainder, "train")
            parts[split].append(paragraph)
        counts = [f"{len(parts[split])} {split}" for split in SPLITS]
        print0(f"{path}: {', '.join(counts)} paragraphs")
    else:
        names = [f"{split}.txt" for split in SPLITS]
        others = sorted({file.name for file in Path(path).glob("*.txt")}.difference(names))
        if others:
            print0(f"{path}: passed over: {', '.join(others[:5])}")
        for split in splits:
            file = Path(path, f"{split}.txt")
            if file.exists():
                parts[split] = read_paragraphs(file)
    texts = {}
    for split in splits:
        if parts[split]:
            texts[split] = [separate_words(text, known) for text in parts[split]]
    return texts


def plain(text):
    """Give apostrophes one sign, and remove signs without width."""
    return text.translate(PLAIN)


def separate_words(text, known=()):
    """Put one space between the words and punctuation marks of prose.

    Words in `known` stay whole. So a network that was trained on WikiText reads "U.S." and "@-@".
    """
    words = []
    for piece in normalize("NFC", text).split():
        if piece in known:
            words.append(piece)
        else:
            words += TOKEN.findall(piece)
    return " ".join(words)


def mark_rare_words(texts):
    """Replace the words that are rare in the training text by <unk>, in all parts of a text."""
    counts = count_words(texts["train"])
    marked = {split: [] for split in texts}
    for split, lines in texts.items():
        for line in lines:
            words = line.split()
            words = [word if counts[word] >= MIN_COUNT else UNK for word in words]
            marked[split].append(" ".join(words))
    return marked


# --- the text "pydoc": Python's own documentation -------------------------------------------------

def library_docstrings():
    """Return {module: [(name, docstring), ...]} of the modules of Python's standard library."""
    documents = {}
    library = Path(os.__file__).parent
    for path in chain(library.glob("*.py"), library.glob("*/*.py")):
        if path.parent.name in NOT_PYDOC:
            continue
        module = ".".join(path.relative_to(library).with_suffix("").parts)
        documents[module] = []
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                docstring = ast.get_docstring(node)
                if docstring:
                    title = getattr(node, "name", module)
                    documents[module].append((title, docstring))
    return documents


def pydoc_folder(parent="out/cache"):
    """Write pydoc's topics and the standard library's docstrings as wiki.*.tokens, once.

    A hash of a document's name chooses its split: a sixteenth of the documents goes to valid, and
    a sixteenth to test. A paragraph becomes a line.
    """
    folder = Path(parent, f"pydoc_{platform.python_version()}")
    if all(token_file(folder, split).exists() for split in SPLITS):
        return folder
    from pydoc_data.topics import topics
    documents = {f"topic {name}": [(name, text)] for name, text in topics.items()}
    documents |= library_docstrings()
    texts = {split: [] for split in SPLITS}
    for name, entries in sorted(documents.items()):
        remainder = zlib.crc32(name.encode()) % 16
        split = {1: "valid", 15: "test"}.get(remainder, "train")
        signs = "="     # as in WikiText: = title of a document =, = = title of its next entry = =
        for title, text in entries:
            texts[split] += ["", f"{signs} {separate_words(title)} {signs}", ""]
            paragraphs = re.split(r"\n\s*\n", text)
            texts[split] += [separate_words(paragraph) for paragraph in paragraphs]
            signs = "= ="
    folder.mkdir(parents=True, exist_ok=True)
    for split, lines in mark_rare_words(texts).items():
        with replacing(token_file(folder, split)) as tmp:
            tmp.write_bytes("".join(f" {line} \n" for line in lines).encode())
    return folder


# --- windows --------------------------------------------------------------------------------------

def random_windows(tokens, step, batch_size, context, seed, part=slice(None)):
    """Draw windows of context + 1 tokens anywhere in the text; the last token is only a target.

    tokens: (n,) uint32. Returns (b, context + 1) int64: the slice `part` of this step's batch_size
    windows, which depend on (seed, step, place in the batch) alone.
    """
    places = torch.arange(batch_size)[part]
    u = uniform(places, 2, seed, TEXT_WINDOW, step).double()        # (b, 2), 24 bits
    share = u[:, 0] + u[:, 1] * 2 ** -24                # 48 bits, because WikiText-103 needs 27
    starts = (share * (len(tokens) - context)).long()
    at = starts[:, None].numpy() + np.arange(context + 1)
    return torch.from_numpy(tokens[at].astype(np.int64))


@torch.no_grad()
def sliding_nll(model, tokens, window, stride, batch_size=64, rank=0, world=1,
                progress=None):
    """Return the loss of each of tokens[1:] in a sliding evaluation: (M,) float64, in nats.

    The first window scores all its targets. Each later window begins `stride` tokens after the
    previous one and scores its last targets, so every target is scored once. The last window ends
    with the text; if stride equals window, it is shorter instead. A text that is shorter than the
    window is one window.
    tokens: (M + 1,) ids. model: a module with the methods hidden(x (b, T)) -> (b, T, C) and
    nll(h (b, s, C), targets (b, s)) -> (b, s). batch_size: windows per forward pass. rank, world:
    each process computes its share of the windows, and returns all losses, on the CPU.
    Source: Teo & Nguyen 2024, App. A.4; `IDSIA/lmtool-fwp:src/eval_sliding_window.py` (stride 1).
    """
    M = len(tokens) - 1                                                         # targets
    if M < 1:
        raise InputError(f"a text to score has {len(tokens)} tokens, expected 2 or more: "
                         "the first token is not predicted")
    window = min(window, M)
    stride = min(stride, window)
    later_starts = stride * torch.arange(1, (M - window) // stride + 1)
    targets_left = M - window - stride * len(later_starts)      # for the last window
    last_length = window if stride < window else targets_left
    # Example: M = 11, window 4, stride 3. The windows begin at 0; 3, 6; 7, and score 4; 3, 3; 1
    # targets.
    windows = [(torch.tensor([0]), window, window),     # starts, length, number of scored targets
               (later_starts, window, stride),
               (torch.tensor([M - last_length]), last_length, targets_left)]
    batches = []
    for starts, length, scored in windows:
        if len(starts) and scored:                      # no later windows, or no targets left
            batches += [(part, length, scored) for part in starts.split(batch_size)]

    device = next(model.parameters()).device
    tokens = torch.as_tensor(tokens).long().to(device)
    nll = torch.zeros(M, device=device)
    with eval_mode(model):
        for starts, length, scored in bar(batches[rank::world], progress, leave=False):
            at = starts.to(device)[:, None] + torch.arange(length, device=device)  # (b, length)
            hidden = model.hidden(tokens[at])[:, -scored:]                         # (b, scored, C)
            at = at[:, -scored:]
            nll[at] = model.nll(hidden, tokens[at + 1]).float()
    if dist.is_initialized():
        dist.all_reduce(nll)
    return nll.cpu().double()


def perplexity(nll, scored=None):
    """Return exp(mean of nll), nll in nats. scored: a bool mask of the tokens that count."""
    if scored is not None:
        nll = nll[scored]
    return nll.mean().exp().item()
