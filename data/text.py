"""Text in, tokens out: WikiText folders, a text of one's own, this Python's documentation; windows.

A folder holds wiki.{train,valid,test}.tokens: UTF-8, already tokenised, words between spaces; every
line, a blank one too, ends with <eos> (`IDSIA/lmtool-fwp:src/utils/vocabulary.py`). Other texts are
first written in this form. The training text becomes train.bin, flat little-endian uint32 ids, and
vocab.txt, a word a line, which later runs map into memory:

    corpus = load_corpus("data/wikitext-103")                    # or a .txt, or None: pydoc
    x = random_windows(corpus.train, step=0, batch_size=96, context=256, seed=0)   # (96, 257) int64
    nats = sliding_nll(model, corpus.valid, window=256, stride=1)                  # (217645,) float64

Which window a position of a batch gets depends on (seed, step, position) alone, see `uniform`.
"""

import ast
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

from common import all_sum, broadcast
from data.rng import uniform

SPLITS = ("train", "valid", "test")
EOS, UNK = "<eos>", "<unk>"
WINDOW = 70                                     # what a random number is for: part of its key
MIN_COUNT = 3                                   # pydoc, .txt: rarer words are <unk>
# folders of the library whose documentation is no part of pydoc's text
NOT_PYDOC = {"test", "idlelib", "lib2to3", "turtledemo", "site-packages", "dist-packages"}


class Vocabulary(dict):
    """word -> id, the ids being places in `words`; an unknown word gets the id of <unk>."""

    def __init__(self, words):
        self.words = list(words)
        super().__init__(zip(self.words, range(len(self.words))))
        if len(self) != len(self.words) or EOS not in self:
            among = "among" if EOS in self else "not among"
            raise ValueError(f"{len(self.words)} words, {len(self)} of them distinct, {EOS} {among} "
                             f"them: not a vocabulary")

    def __missing__(self, word):
        if UNK not in self:
            raise ValueError(f"the word {word!r} is not in the vocabulary, which has no {UNK} to "
                             f"stand for it")
        return self[UNK]

    def encode(self, words):
        """List of words -> (n,) uint32."""
        return np.fromiter(map(self.__getitem__, words), "<u4", len(words))

    def encode_lines(self, lines):
        """Lines of a token file -> (n,) uint32, <eos> after each."""
        return self.encode(split_words("\n".join([*lines, ""])))


class Corpus(NamedTuple):
    """A folder of token files as ids."""
    train: np.ndarray                           # (n,) uint32, mapped from disk
    valid: np.ndarray                           # (n,) uint32
    test: np.ndarray
    vocab: Vocabulary
    folder: Path
    note: str                                   # what was found, and whether it was prepared now


# --- files to words --------------------------------------------------------------------------------

def token_file(folder, split):
    """Path of wiki.<split>.tokens; raises unless it is there and holds something."""
    path = Path(folder, f"wiki.{split}.tokens")
    if not path.is_file():
        raise FileNotFoundError(f"--data_dir {folder}: there is no {path.name}; expected "
                                f"wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens, or one .txt")
    if not path.stat().st_size:
        raise ValueError(f"{path} is empty, expected tokenised text")
    return path


def split_words(text):
    """Words between any white space, <eos> for every newline."""
    return text.replace("\n", f" {EOS} ").split()


def read_text(path, what):
    """The text of a file in pieces of whole lines, about 64 kB each; the last line gets a newline."""
    size = path.stat().st_size
    bar = tqdm(total=size, desc=f"{what} {path.name}", unit="B", unit_scale=True, leave=False,
               disable=size < 2 ** 24, dynamic_ncols=True)
    with open(path, "rb") as f, bar:
        for lines in iter(lambda: f.readlines(2 ** 16), []):         # lines end at b"\n" only
            piece = b"".join(lines)
            try:
                text = piece.decode()
            except UnicodeDecodeError as e:
                place = f.tell() - len(piece) + e.start
                raise ValueError(f"{path} is not UTF-8 text ({e.reason} at byte {place})") from None
            yield text if text.endswith("\n") else text + "\n"
            bar.update(len(piece))


def read_lines(path):
    """All lines of a file, without newlines; str.splitlines would split at other characters too."""
    return "".join(read_text(Path(path), "reading")).split("\n")[:-1]


# --- words to ids ----------------------------------------------------------------------------------

def count_words(path):
    """Vocabulary of a text: <eos>, then words by falling count, ties in order of appearance."""
    counts = Counter()
    for text in read_text(path, "counting words of"):
        counts.update(split_words(text))
    del counts[EOS]
    if not counts:
        raise ValueError(f"{path} holds no word, only blank lines: expected tokenised text")
    return Vocabulary([EOS, *sorted(counts, key=counts.get, reverse=True)])


def write_whole(path, pieces, made_of=None):
    """Write bytes into a file that gets its name when it is whole, and the time of what made it."""
    tmp = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(tmp, "wb") as f:
            for piece in pieces:
                f.write(piece)
            f.flush()
            os.fsync(f.fileno())
        if made_of:
            os.utime(tmp, ns=(made_of, made_of))
        os.replace(tmp, path)
    except OSError as e:
        raise OSError(f"cannot write {path} ({e.strerror or e})") from None
    finally:
        if tmp.parent.is_dir():
            tmp.unlink(missing_ok=True)


def prepare(folder, cache_dir):
    """vocab.txt and train.bin, if they are not those of the training text as it is now. Did it?

    Both carry the text's time of last change, train.bin last: a build that was cut off is none.
    """
    path, binary, words = token_file(folder, "train"), cache_dir / "train.bin", cache_dir / "vocab.txt"
    changed = path.stat().st_mtime_ns
    if binary.exists() and words.exists() and binary.stat().st_mtime_ns == changed:
        return False
    vocab = count_words(path)
    ids = (vocab.encode(split_words(text)).tobytes() for text in read_text(path, "encoding"))
    write_whole(words, [f"{word}\n".encode() for word in vocab.words])
    write_whole(binary, ids, made_of=changed)
    return True


def choose_cache_dir(folder):
    """<folder>/cache, or out/cache/<name>_<hash of the path> where folder must not be written to."""
    here = Path(folder, "cache")
    place = here if here.exists() else Path(folder)
    if os.access(place, os.W_OK) and place.stat().st_mode & 0o222:  # root may write anywhere
        return here
    return cache_name(folder)


def cache_name(path):
    """out/cache/<name>_<hash of the whole path>."""
    path = Path(path).resolve()
    return Path("out", "cache", f"{path.stem}_{zlib.crc32(str(path).encode()):08x}")


def load_corpus(data_dir=None, rank=0):
    """The ids of a text, prepared by rank 0 while the other processes wait. Returns a Corpus.

    data_dir: a folder of wiki.*.tokens, a .txt, a folder with one .txt, or None for pydoc's text.
    Raises FileNotFoundError or ValueError, one line that names the file, if one is missing, empty,
    not UTF-8, cut short or out of range.
    """
    folder = text_folder(data_dir, build=rank == 0)
    cache_dir = choose_cache_dir(folder)
    new = rank == 0 and prepare(folder, cache_dir)
    broadcast([None])

    words, binary = cache_dir / "vocab.txt", cache_dir / "train.bin"
    vocab = Vocabulary(words.read_bytes().decode().split("\n")[:-1])
    if binary.stat().st_size % 4:
        raise ValueError(f"{binary} has {binary.stat().st_size} bytes, expected 4 a token; delete it")
    train = np.memmap(binary, "<u4", "r")
    if train.max() >= len(vocab):
        raise ValueError(f"{binary} holds id {train.max()}, expected ids below {len(vocab)}, the words "
                         f"of {words}; delete it")
    valid, test = (vocab.encode_lines(read_lines(token_file(folder, s))) for s in SPLITS[1:])
    note = (f"{len(train):,} training, {len(valid):,} valid, {len(test):,} test tokens, "
            f"{len(vocab):,} words" + f", written to {cache_dir}" * new)
    return Corpus(train, valid, test, vocab, folder, note)


# --- other texts, written as WikiText --------------------------------------------------------------

def text_folder(data_dir, build=True):
    """The folder of token files that --data_dir means; a .txt and pydoc's text are written if new."""
    if data_dir is None:
        return pydoc_folder("out/cache", build)
    path = Path(data_dir)
    texts = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    if Path(path, "wiki.train.tokens").exists() or path.is_dir() and not texts:
        return path
    if len(texts) > 1 or texts[0].suffix != ".txt" or not texts[0].is_file():
        raise FileNotFoundError(f"--data_dir {data_dir}: expected a folder with wiki.train.tokens, "
                                f"wiki.valid.tokens and wiki.test.tokens, or with one .txt, or a .txt")
    return txt_folder(texts[0], build)


def words_of(text):
    """Words and punctuation marks of a text."""
    return re.findall(r"\w+(?:'\w+)*|[^\w\s]", text)


def write_tokens(folder, lines):
    """Write {split: lists of words} as wiki.*.tokens; words rare in the training text are <unk>."""
    counts = Counter(word for line in lines["train"] for word in line)
    for split in SPLITS:
        kept = [[w if counts[w] >= MIN_COUNT else UNK for w in line] for line in lines[split]]
        text = "".join(" ".join(["", *line, "\n"]) for line in kept)
        write_whole(folder / f"wiki.{split}.tokens", [text.encode()])


def txt_folder(path, build=True):
    """Folder of token files made of a .txt: 90 % of its paragraphs to train, 5 % to valid and test each."""
    folder = cache_name(path)
    made = folder / "wiki.test.tokens"
    fresh = made.exists() and made.stat().st_mtime_ns > path.stat().st_mtime_ns
    if not build or fresh:
        return folder
    text = "".join(read_text(path, "reading"))
    paragraphs = [words for words in map(words_of, re.split(r"\n\s*\n", text)) if words]
    if len(paragraphs) < 20:
        paragraphs = [words for words in map(words_of, text.split("\n")) if words]
    if len(paragraphs) < 20:
        raise ValueError(f"{path} has {len(paragraphs)} lines with words, expected 20 or more")
    a, b = len(paragraphs) * 90 // 100, len(paragraphs) * 95 // 100
    write_tokens(folder, dict(train=paragraphs[:a], valid=paragraphs[a:b], test=paragraphs[b:]))
    return folder


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
    """Folder of wiki.{train,valid,test}.tokens made of `pydoc_documents`; written if missing.

    The same text for the same Python. A document belongs to one split by a hash of its name, a
    sixteenth to valid and to test each; a paragraph is a line.
    """
    folder = Path(parent, f"pydoc_{platform.python_version()}")
    if not build or all(Path(folder, f"wiki.{split}.tokens").exists() for split in SPLITS):
        return folder
    lines = {split: [] for split in SPLITS}                                  # lists of words
    for name, texts in pydoc_documents().items():
        split = {1: "valid", 15: "test"}.get(zlib.crc32(name.encode()) % 16, "train")
        for i, (title, text) in enumerate(texts):
            sign = ["="] * (2 if i else 1)
            paragraphs = map(words_of, re.split(r"\n\s*\n", text))
            lines[split] += [], [*sign, *words_of(title), *sign], [], *paragraphs
    write_tokens(folder, lines)
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
