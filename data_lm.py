"""Text in, tokens out: WikiText folders or this Python's own documentation, a token cache, windows, sliding evaluation.

A folder holds wiki.{train,valid,test}.tokens: UTF-8, already tokenised, words between spaces; every line, a blank one
too, ends with <eos> (`IDSIA/lmtool-fwp:src/utils/vocabulary.py`). The first run turns it into a cache of flat
little-endian uint32 ids, which later ones map into memory:

    corpus = load_corpus("data/wikitext-103")                    # reads or builds data/wikitext-103/cache
    x = random_windows(corpus.train, step=0, batch_size=96, context=256, seed=0)               # (96, 257) int64
    nats = sliding_nll(model, corpus.valid, window=256, stride=1)                              # (217645,) float64

What window a position of a batch gets depends on (seed, step, position) alone, see common.uniform.
"""

import ast
import json
import os
import platform
import re
import zlib
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from common import all_sum, uniform

SPLITS = ("train", "valid", "test")
EOS, UNK = "<eos>", "<unk>"
WINDOW = 70                                     # what a random number is for: part of its key
MIN_COUNT = 3                                   # pydoc: rarer words are <unk>
# folders of the library whose documentation is no part of pydoc's text
NOT_PYDOC = {"test", "idlelib", "lib2to3", "turtledemo", "site-packages", "dist-packages"}


class Vocabulary(dict):
    """word -> id, the ids being places in `words`; a word that is not there gets the id of <unk>."""

    def __init__(self, words):
        self.words = list(words)
        super().__init__(zip(self.words, range(len(self.words))))
        if len(self) != len(self.words) or EOS not in self:
            raise ValueError(f"{len(self.words)} words, {len(self)} of them distinct, {EOS} "
                             f"{'among' if EOS in self else 'not among'} them: not a vocabulary")

    def __missing__(self, word):
        if UNK not in self:
            raise ValueError(f"the word {word!r} is not in the vocabulary, which has no {UNK} to stand for it")
        return self[UNK]

    def encode(self, words):
        """List of words -> (n,) uint32."""
        return np.fromiter(map(self.__getitem__, words), "<u4", len(words))

    def encode_lines(self, lines):
        """Lines of a token file -> (n,) uint32, <eos> after each."""
        return self.encode(split_words("\n".join([*lines, ""])))


class Corpus(NamedTuple):
    """A folder of token files as ids."""
    train: np.ndarray                           # (n,) uint32, mapped from disk; so are valid and test
    valid: np.ndarray
    test: np.ndarray
    vocab: Vocabulary
    cache_dir: Path
    note: str                                   # what was done to get here


# --- files to words --------------------------------------------------------------------------------------------------

def token_file(data_dir, split):
    """Path of wiki.<split>.tokens; raises unless it is there and holds something."""
    path = Path(data_dir, f"wiki.{split}.tokens")
    if not path.is_file():
        raise FileNotFoundError(f"--data_dir {data_dir}: there is no {path.name}; expected wiki.train.tokens, "
                                f"wiki.valid.tokens and wiki.test.tokens")
    if not path.stat().st_size:
        raise ValueError(f"{path} is empty, expected tokenised text")
    return path


def split_words(text):
    """Words between any white space, <eos> for every newline."""
    return text.replace("\n", f" {EOS} ").split()


def read_text(path, what):
    """The text of a file in pieces of whole lines, about 64 kB each; a last line without newline gets one."""
    size = path.stat().st_size
    with open(path, "rb") as f, tqdm(total=size, desc=f"{what} {path.name}", unit="B", unit_scale=True, leave=False,
                                     disable=size < 2 ** 24, dynamic_ncols=True) as bar:
        for lines in iter(lambda: f.readlines(2 ** 16), []):                            # lines end at b"\n" only
            piece = b"".join(lines)
            try:
                text = piece.decode()
            except UnicodeDecodeError as e:
                place = f.tell() - len(piece) + e.start
                raise ValueError(f"{path} is not UTF-8 text ({e.reason} at byte {place})") from None
            yield text if text.endswith("\n") else text + "\n"
            bar.update(len(piece))


def read_lines(path):
    """All lines of a file, without their newlines; str.splitlines would split at other characters too."""
    return "".join(read_text(Path(path), "reading")).split("\n")[:-1]


# --- words to ids ----------------------------------------------------------------------------------------------------

def count_words(path):
    """Vocabulary of a text: <eos>, then words by falling count, ties in order of appearance (`LMConfig.cutoffs`)."""
    counts = Counter()
    for text in read_text(path, "counting words of"):
        counts.update(split_words(text))
    del counts[EOS]
    if not counts:
        raise ValueError(f"{path} holds no word, only blank lines: expected tokenised text")
    return Vocabulary([EOS, *sorted(counts, key=counts.get, reverse=True)])


def sources(data_dir):
    """What the cache of a folder is made of: {split: [name, bytes, time of last change]}.

    The time tells an edit of equal length, which would give wrong numbers; a new time alone costs one rebuild. A hash
    would mean reading 540 MB at every start.
    """
    files = {split: token_file(data_dir, split) for split in SPLITS}
    return {split: [path.name, path.stat().st_size, path.stat().st_mtime_ns] for split, path in files.items()}


def read_meta(cache_dir):
    """meta.json of a complete cache; None if there is none, or a file of it is missing."""
    try:
        meta = json.loads(Path(cache_dir, "meta.json").read_text())
        complete = all(Path(cache_dir, name).exists() for name in ("vocab.txt", *(f"{split}.bin" for split in SPLITS)))
        return meta if complete and isinstance(meta, dict) and meta else None
    except (OSError, ValueError):
        return None


def write_whole(path, write):
    """Let write(f) fill a file which gets its name when it is whole, in a folder that is made if need be."""
    tmp = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(tmp, "wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
    except OSError as e:
        raise OSError(f"cannot write {path} ({e.strerror or e}); --cache_dir takes another place") from None
    finally:
        if tmp.parent.is_dir():
            tmp.unlink(missing_ok=True)


def build_cache(data_dir, cache_dir):
    """Write train.bin, valid.bin, test.bin, vocab.txt and, last, meta.json, in two passes over the training text.

    Each file gets its name when it is whole, so that a cache with a meta.json is a complete one; another process may
    build the same cache at the same time.
    """
    cache_dir, meta = Path(cache_dir), dict(sources=sources(data_dir), tokens={})
    vocab = count_words(token_file(data_dir, "train"))
    meta["vocab_size"] = len(vocab)
    write_whole(cache_dir / "meta.json", lambda f: f.write(b"{}"))                # from here on the old cache is none
    for split in SPLITS:
        def write(f):
            for text in read_text(token_file(data_dir, split), "encoding"):
                f.write(vocab.encode(split_words(text)))
            meta["tokens"][split] = f.tell() // 4
        write_whole(cache_dir / f"{split}.bin", write)
    write_whole(cache_dir / "vocab.txt", lambda f: f.write("".join(f"{word}\n" for word in vocab.words).encode()))
    write_whole(cache_dir / "meta.json", lambda f: f.write(json.dumps(meta, indent=1).encode()))


def open_cache(cache_dir):
    """The ids of a cache, mapped from disk, and its vocabulary: (train, valid, test, vocab). Checks sizes and range."""
    cache_dir, meta = Path(cache_dir), read_meta(cache_dir)
    if meta is None:
        raise FileNotFoundError(f"no complete token cache in {cache_dir}; several nodes need a disk that they share")
    vocab, arrays = Vocabulary((cache_dir / "vocab.txt").read_bytes().decode().split("\n")[:-1]), []
    again = "delete it to build the cache again"
    if len(vocab) != meta["vocab_size"]:
        raise ValueError(f"{cache_dir / 'vocab.txt'} has {len(vocab)} words, expected {meta['vocab_size']}; {again}")
    for split in SPLITS:
        path, count = cache_dir / f"{split}.bin", meta["tokens"][split]
        if path.stat().st_size != 4 * count:
            raise ValueError(f"{path} has {path.stat().st_size} bytes, expected 4 x {count} tokens; {again}")
        arrays.append(np.memmap(path, "<u4", "r"))
        if arrays[-1].max() >= len(vocab):
            raise ValueError(f"{path} holds id {arrays[-1].max()}, expected ids below {len(vocab)}; {again}")
    return *arrays, vocab


def choose_cache_dir(data_dir):
    """<data_dir>/cache, or out/cache/<name>_<hash of the path> where data_dir must not be written to."""
    here = Path(data_dir, "cache")
    folder = here if here.exists() else Path(data_dir)
    writable = os.access(folder, os.W_OK) and folder.stat().st_mode & 0o222         # root has access to read-only ones
    if writable or read_meta(here):
        return here
    path = str(Path(data_dir).resolve())
    return Path("out", "cache", f"{Path(path).name}_{zlib.crc32(path.encode()):08x}")


def load_corpus(data_dir, cache_dir=None, build=True):
    """The ids of a folder of token files; builds its cache if that is missing or the files have changed. A Corpus.

    build=False, for all processes but one: the cache has just been built. Raises FileNotFoundError or ValueError, one
    line that names the file, if one is missing, empty, not UTF-8, cut short or out of range.
    """
    made_of, note = sources(data_dir), ""
    cache_dir = Path(cache_dir or choose_cache_dir(data_dir))
    if build:
        meta = read_meta(cache_dir)
        if meta is None or meta.get("sources") != made_of:
            note = f"token cache {cache_dir} built{' again: the files it was made of changed' if meta else ''}"
            build_cache(data_dir, cache_dir)
    return Corpus(*open_cache(cache_dir), cache_dir, note)


# --- pydoc: text that every Python has -------------------------------------------------------------------------------

def pydoc_documents():
    """{name: [(title, text), ...]}: pydoc's help topics and the docstrings of the standard library, which is parsed."""
    from pydoc_data.topics import topics
    documents = {f"topic {name}": [(name, text)] for name, text in topics.items()}
    library = Path(os.__file__).parent
    for path in sorted([*library.glob("*.py"), *library.glob("*/*.py")]):
        if path.parent.name in NOT_PYDOC:
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):                                               # not meant for this Python
            continue
        name = ".".join(path.relative_to(library).with_suffix("").parts)
        nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))]
        texts = [(getattr(node, "name", name), ast.get_docstring(node)) for node in nodes]
        documents[name] = [(title, text) for title, text in texts if text]
    return {name: texts for name, texts in sorted(documents.items()) if texts}


def pydoc_folder(parent, build=True):
    """Folder of wiki.{train,valid,test}.tokens made of `pydoc_documents`, laid out like WikiText; written if missing.

    The same text for the same Python. A document belongs to one split by a hash of its name, a sixteenth to valid and
    to test each; a paragraph is a line; words seen fewer than MIN_COUNT times in the training text are <unk>.
    """
    folder = Path(parent, f"pydoc_{platform.python_version()}")
    paths = {split: folder / f"wiki.{split}.tokens" for split in SPLITS}
    if not build or all(path.exists() for path in paths.values()):
        return folder

    def words(text):
        return re.findall(r"\w+(?:'\w+)*|[^\w\s]", text)

    lines = {split: [] for split in SPLITS}                                             # lists of words
    for name, texts in pydoc_documents().items():
        split = {1: "valid", 15: "test"}.get(zlib.crc32(name.encode()) % 16, "train")
        for i, (title, text) in enumerate(texts):
            sign = ["="] * (2 if i else 1)
            lines[split] += [], [*sign, *words(title), *sign], [], *map(words, re.split(r"\n\s*\n", text))
    counts = Counter(word for line in lines["train"] for word in line)
    for split in SPLITS:
        kept = [[word if counts[word] >= MIN_COUNT else UNK for word in line] for line in lines[split]]
        write_whole(paths[split], lambda f: f.write("".join(" ".join(["", *line, "\n"]) for line in kept).encode()))
    return folder


# --- windows ---------------------------------------------------------------------------------------------------------

def random_windows(tokens, step, batch_size, context, seed, part=slice(None)):
    """Windows of context + 1 tokens from anywhere in the text, the last token only a target. (b, context + 1) int64.

    step: of the training run; part: which of the batch_size windows of that step, a slice. Two numbers a window, since
    one has 24 bits and WikiText-103 needs 27.
    """
    if len(tokens) <= context:
        raise ValueError(f"--context {context}: the training text has only {len(tokens)} tokens")
    u = uniform(torch.arange(batch_size)[part], 2, seed, WINDOW, step).double()                         # (b, 2)
    starts = ((u[:, 0] + u[:, 1] * 2 ** -24) * (len(tokens) - context)).long()
    return torch.from_numpy(tokens[starts[:, None].numpy() + np.arange(context + 1)].astype(np.int64))


def sliding_windows(num_targets, window, stride):
    """Which windows score which targets: [(starts (n,) int64, length, scored)]; the last `scored` of `length` count.

    The first window scores all its targets, each later one, `stride` further on, its last `stride`. The last window is
    moved back to end with the text and scores what is left. With stride = window, segment-wise evaluation, no token is
    read twice, so there it is shorter instead.
    """
    if not 1 <= stride <= window <= num_targets:
        raise ValueError(f"window {window}, stride {stride}: expected 1 <= stride <= window <= {num_targets}, the "
                         f"number of targets in the text")
    later = stride * torch.arange(1, (num_targets - window) // stride + 1)
    rest = num_targets - window - stride * len(later)
    length = window if stride < window else rest
    return [(torch.zeros(1, dtype=torch.int64), window, window), (later, window, stride),
            (torch.tensor([num_targets - length] * (rest > 0), dtype=torch.int64), length, rest)]


@torch.no_grad()
def sliding_nll(model, tokens, window, stride, batch_size=64, rank=0, world=1, progress=None):
    """Nats of each of tokens[1:] in a sliding evaluation. Returns (M - 1,) float64 on the CPU, on every process.

    Teo & Nguyen 2024, App. A.4; `IDSIA/lmtool-fwp:src/eval_sliding_window.py`, there stride 1, one window at a time.
    model: has hidden(x (b, T)) -> (b, T, C) and nll(h (b, s, C), targets (b, s)) -> (b, s). tokens: (M,) ids, array or
    tensor. Windows are independent: batch_size of them are run at a time, the output layer only for what is scored, and
    processes share them. progress: text for the progress bar.
    """
    device, training = next(model.parameters()).device, model.training
    tokens = torch.as_tensor(tokens if torch.is_tensor(tokens) else np.asarray(tokens, np.int64), device=device)
    nll = torch.zeros(len(tokens) - 1, device=device)
    batches = [(part, length, scored) for starts, length, scored in sliding_windows(len(nll), window, stride)
               for part in starts.split(batch_size) if len(part)][rank::world]
    model.eval()
    for starts, length, scored in tqdm(batches, progress, leave=False, disable=rank > 0 or not progress):
        at = starts.to(device)[:, None] + torch.arange(length, device=device)           # (b, length) places in the text
        hidden = model.hidden(tokens[at])[:, -scored:]                                  # (b, scored, C)
        at = at[:, -scored:]
        nll[at] = model.nll(hidden, tokens[at + 1]).float()
    model.train(training)
    return all_sum(nll).cpu().double()


def perplexity(nll, scored=None):
    """exp(mean) of nats, float64; scored: a bool for each, which to count."""
    return (nll if scored is None else nll[scored]).mean().exp().item()
