"""Texts for the language model: WikiText folders, ids, training windows, sliding evaluation.

A folder contains wiki.{train,valid,test}.tokens: words, separated by spaces. An <eos> follows every
line, also a blank line (`IDSIA/lmtool-fwp:src/utils/vocabulary.py`). Your own text and Python's
documentation become such files in out/cache.

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
from pathlib import Path
from typing import NamedTuple
from unicodedata import normalize

import numpy as np
import torch
import torch.distributed as dist

from common import InputError, bar, replacing
from data.rng import TEXT_WINDOW, uniform

SPLITS = ("train", "valid", "test")
EOS, UNK = "<eos>", "<unk>"
MIN_COUNT = 3                                   # rarer words of the training text become <unk>
# folders of Python's library whose docstrings are not part of the text "pydoc"
NOT_PYDOC = {"test", "idlelib", "lib2to3", "turtledemo", "site-packages", "dist-packages"}


# --- words to ids ---------------------------------------------------------------------------------

class Vocabulary(dict):
    """Map a word to its id, the index in `words`. Unknown words get the id of <unk>."""

    def __init__(self, words):
        self.words = list(words)
        super().__init__(zip(self.words, range(len(self.words))))

    def __missing__(self, word):
        if UNK not in self:
            raise InputError(f"the word {word!r} is not in the vocabulary; use its words, or train "
                             f"on a text that contains {UNK}")
        return self[UNK]

    def encode_lines(self, lines):
        """Return the ids of the words in the lines, (n,) uint32, with <eos> after each line."""
        words = (word for line in lines for word in (*line.split(), EOS))
        return np.fromiter(map(self.__getitem__, words), "<u4")


class Corpus(NamedTuple):
    train: np.ndarray                               # ids, (n,) uint32
    valid: np.ndarray
    test: np.ndarray
    vocab: Vocabulary


def token_file(folder, split):
    return Path(folder, f"wiki.{split}.tokens")


def read_lines(path):
    """Read the lines of a UTF-8 file in Unicode's composed form, a list; only "\\n" ends a line."""
    with open(path, encoding="utf-8-sig", newline="\n") as f:       # -sig drops a byte order mark
        try:
            return [normalize("NFC", line.removesuffix("\n")) for line in f]
        except UnicodeDecodeError as error:                         # does not name the file
            raise InputError(f"{path} is not UTF-8 text: {error.reason}") from None


def load_corpus(folder):
    """Load the texts of a folder. Ids: <eos>, then the words of the training by falling count."""
    texts = [read_lines(token_file(folder, split)) for split in SPLITS]
    counts = Counter(word for line in texts[0] for word in line.split())
    counts.pop(EOS, None)                       # <eos> comes first, whatever its count
    vocab = Vocabulary([EOS, *sorted(counts, key=counts.get, reverse=True)])    # a stable order
    return Corpus(*map(vocab.encode_lines, texts), vocab)


# --- other texts, written as token files ----------------------------------------------------------

def text_folder(data, data_dir):
    """Return the folder of token files for --data and --data_dir; the latter may be a text file."""
    if data_dir and Path(data_dir).is_dir():
        return Path(data_dir)
    if data_dir:                                # convert it each time: it may have changed
        parts, whole = split_text(data_dir), Path(data_dir).resolve()
        folder = Path("out", "cache", f"{whole.stem}_{zlib.crc32(os.fsencode(whole)):08x}")
        write_tokens(folder, {split: list(map(spaced, part)) for split, part in parts.items()})
        return folder
    if data == "pydoc":
        return pydoc_folder("out/cache")
    raise InputError(f"--data {data} needs --data_dir")


def spaced(text):
    """Put one space between the words and punctuation marks of a text."""
    return " ".join(re.findall(r"\w+(?:'\w+)*|[^\w\s]", normalize("NFC", text)))


def write_tokens(folder, parts):
    """Write {split: lines} as wiki.*.tokens. Words that are rare in the training become <unk>."""
    folder.mkdir(parents=True, exist_ok=True)
    counts = Counter(word for line in parts["train"] for word in line.split())
    if min(counts.values()) >= MIN_COUNT:
        parts["train"] = [*parts["train"], UNK]                     # valid or test may need <unk>
    for split in SPLITS:
        kept = [[w if counts[w] >= MIN_COUNT else UNK for w in line.split()]
                for line in parts[split]]
        text = "".join(" ".join(["", *line, "\n"]) for line in kept)
        with replacing(token_file(folder, split)) as tmp:
            tmp.write_bytes(text.encode())


def split_text(path):
    """Split the paragraphs of a text file: 90 % train, the next 5 % valid, the last 5 % test.

    Blank lines separate paragraphs. If there are fewer than 20, every line is a paragraph.
    """
    text = "\n".join(read_lines(path))
    for mark in (r"\n\s*\n", "\n"):
        found = [part for part in re.split(mark, text) if spaced(part)]
        if len(found) >= 20:
            break
    a, b = len(found) * 90 // 100, len(found) * 95 // 100
    return dict(train=found[:a], valid=found[a:b], test=found[b:])


def hashes(paragraph):
    """Hash a paragraph and each of its lines, so that it is recognised in another layout."""
    pieces = map(spaced, [paragraph, *paragraph.split("\n")])
    return {zlib.crc32(piece.encode()) for piece in pieces if piece}


def seen_lines(data_dir):
    """Return the `hashes` of the paragraphs of a text file that its training uses."""
    if not data_dir or Path(data_dir).is_dir():
        return []
    parts = split_text(data_dir)
    return sorted(set().union(*map(hashes, parts["train"] + parts["valid"])))


def lines_to_score(data, data_dir, seen):
    """Return the texts to evaluate a language model on: {"valid" and "test": lines of tokens}.

    A text file is one text, "unseen": the paragraphs without a hash in `seen`, the training's.
    """
    if not data_dir or Path(data_dir).is_dir():
        folder = text_folder(data, data_dir)
        return {split: read_lines(token_file(folder, split)) for split in ("valid", "test")}
    seen = {*seen}
    unseen = [spaced(paragraph) for part in split_text(data_dir).values() for paragraph in part
              if not hashes(paragraph) & seen]
    if not unseen:
        raise InputError(f"--data_dir {data_dir}: the model was trained on all paragraphs")
    return {"unseen": unseen}


def pydoc_folder(parent):
    """Write pydoc's topics and the standard library's docstrings as wiki.*.tokens, once.

    A hash of a document's name chooses its split: a sixteenth of the documents goes to valid, and
    a sixteenth to test. A paragraph becomes a line.
    """
    folder = Path(parent, f"pydoc_{platform.python_version()}")
    if all(token_file(folder, split).exists() for split in SPLITS):
        return folder
    from pydoc_data.topics import topics
    documents = {f"topic {name}": [(name, text)] for name, text in topics.items()}
    library = Path(os.__file__).parent
    for path in [*library.glob("*.py"), *library.glob("*/*.py")]:
        if path.parent.name not in NOT_PYDOC:
            name = ".".join(path.relative_to(library).with_suffix("").parts)
            nodes = [node for node in ast.walk(ast.parse(path.read_bytes()))
                     if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))]
            texts = [(getattr(node, "name", name), ast.get_docstring(node)) for node in nodes]
            documents[name] = [(title, text) for title, text in texts if text]
    parts = {split: [] for split in SPLITS}
    for name, texts in sorted(documents.items()):
        split = {1: "valid", 15: "test"}.get(zlib.crc32(name.encode()) % 16, "train")
        for i, (title, text) in enumerate(texts):
            sign = "= =" if i else "="
            paragraphs = map(spaced, re.split(r"\n\s*\n", text))
            parts[split] += "", f"{sign} {spaced(title)} {sign}", "", *paragraphs
    write_tokens(folder, parts)
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
def sliding_nll(model, tokens, window, stride, batch_size=64, rank=0, world=1, progress=None):
    """Return the loss of each of tokens[1:] in a sliding evaluation: (M,) float64, in nats.

    The first window scores all its targets. Each later window begins `stride` tokens after the
    previous one and scores its last targets, so every target is scored once. The last window ends
    with the text; if stride equals window, it is shorter instead.
    tokens: (M + 1,) ids. model: a module with the methods hidden(x (b, T)) -> (b, T, C) and
    nll(h (b, s, C), targets (b, s)) -> (b, s). rank, world: each process computes its share of the
    windows, and returns all losses, on the CPU.
    Source: Teo & Nguyen 2024, App. A.4; `IDSIA/lmtool-fwp:src/eval_sliding_window.py` (stride 1).
    """
    M = len(tokens) - 1                                                         # targets
    if not 1 <= stride <= window <= M:
        raise InputError(f"window {window}, stride {stride}: expected 1 <= stride <= window <= "
                         f"{M}, the number of targets in the text")
    later = stride * torch.arange(1, (M - window) // stride + 1)
    rest = M - window - stride * len(later)
    last = window if stride < window else rest                                  # its length
    windows = [(torch.tensor([0]), window, window), (later, window, stride),    # starts, length,
               (torch.tensor([M - last]), last, rest)]                          # scored targets
    batches = [(part, length, scored) for starts, length, scored in windows if scored
               for part in starts.split(batch_size) if len(part)][rank::world]

    device, training = next(model.parameters()).device, model.training
    tokens = torch.as_tensor(tokens).long().to(device)
    nll = torch.zeros(M, device=device)
    model.eval()
    for starts, length, scored in bar(batches, progress, leave=False):
        at = starts.to(device)[:, None] + torch.arange(length, device=device)      # (b, length)
        hidden = model.hidden(tokens[at])[:, -scored:]                             # (b, scored, C)
        at = at[:, -scored:]
        nll[at] = model.nll(hidden, tokens[at + 1]).float()
    model.train(training)
    if dist.is_initialized():
        dist.all_reduce(nll)
    return nll.cpu().double()


def perplexity(nll, scored=None):
    """Return exp(mean of nll), nll in nats. scored: a bool mask of the tokens that count."""
    return (nll if scored is None else nll[scored]).mean().exp().item()
