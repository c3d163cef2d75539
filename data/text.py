"""Text in, tokens out: WikiText folders, their ids, windows for training and sliding evaluation.

A folder holds wiki.{train,valid,test}.tokens: UTF-8, already tokenised, words between spaces; every
line, a blank one too, ends with <eos> (`IDSIA/lmtool-fwp:src/utils/vocabulary.py`). A .txt
of one's own and this Python's documentation are written in this form. The training text becomes
train.bin, flat little-endian uint32 ids, and vocab.txt, a word a line, which later runs map into
memory:

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

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from data.rng import uniform

SPLITS = ("train", "valid", "test")
EOS, UNK = "<eos>", "<unk>"
MIN_COUNT = 3                                   # rarer words are <unk>
# folders of the library whose documentation is no part of pydoc's text
NOT_PYDOC = {"test", "idlelib", "lib2to3", "turtledemo", "site-packages", "dist-packages"}
WINDOW = 70                                     # what a random number is for: part of its key


class Vocabulary(dict):
    """Map word -> id, its place in `words`; an unknown word gets the id of <unk>."""

    def __init__(self, words):
        self.words = list(words)
        super().__init__(zip(self.words, range(len(self.words))))
        if len(self) != len(self.words) or EOS not in self:
            raise ValueError(f"{len(self.words)} words, {len(self)} of them distinct, "
                             f"{self.words.count(EOS)} x {EOS}: not a vocabulary")

    def __missing__(self, word):
        if UNK not in self:
            raise ValueError(f"the word {word!r} is not in the vocabulary, which has no {UNK} to "
                             f"stand for it")
        return self[UNK]

    def encode(self, text):
        """Encode a text, <eos> for every newline: (n,) uint32."""
        words = split_words(text)
        return np.fromiter(map(self.__getitem__, words), "<u4", len(words))

    def encode_lines(self, lines):
        """Encode the lines of a token file: (n,) uint32."""
        return self.encode("\n".join([*lines, ""]))


def stored_vocabulary(checkpoint):
    """Read a checkpoint's Vocabulary; raise ValueError if it does not fit its model."""
    vocab = Vocabulary(checkpoint["vocab"].split("\n"))
    size = checkpoint["model_config"].get("vocab_size")
    if len(vocab) != size:
        raise ValueError(f"its vocabulary has {len(vocab)} words, its model {size}")
    return vocab


def from_rank_0(value):
    """Give rank 0's plain object to every process."""
    objects = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(objects)
    return objects[0]


# --- files to words -------------------------------------------------------------------------------

def token_file(folder, split):
    """Find wiki.<split>.tokens; raises unless it is there and holds something."""
    path = Path(folder, f"wiki.{split}.tokens")
    if not path.is_file():
        raise FileNotFoundError(f"--data_dir {folder}: there is no {path.name}; expected "
                                f"wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens")
    if not path.stat().st_size:
        raise ValueError(f"{path} is empty, expected tokenised text")
    return path


def split_words(text):
    """Split at any white space, <eos> for every newline."""
    return text.replace("\n", f" {EOS} ").split()


def read_text(path, what):
    """Read a file in pieces of whole lines, about 64 kB; the last line gets a newline."""
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
    """Read all lines, without newlines; str.splitlines would split at other characters too."""
    return "".join(read_text(Path(path), "reading")).split("\n")[:-1]


# --- words to ids ---------------------------------------------------------------------------------

class Corpus(NamedTuple):
    """Hold a folder of token files as ids."""
    train: np.ndarray                           # (n,) uint32, mapped from disk
    valid: np.ndarray                           # (n,) uint32
    test: np.ndarray
    vocab: Vocabulary
    cache_dir: Path
    built: bool                                 # was the cache written now?


def load_corpus(folder, rank=0):
    """Load a folder's texts as ids. Rank 0 writes train.bin and vocab.txt while the others wait.

    Raises FileNotFoundError or ValueError, one line that names the file or the cache, if one is
    missing, empty, not UTF-8, cut short or damaged.
    """
    cache_dir = choose_cache_dir(folder)
    built = from_rank_0(rank == 0 and prepare(folder, cache_dir))
    try:
        vocab = Vocabulary((cache_dir / "vocab.txt").read_bytes().decode().split("\n")[:-1])
        train = np.memmap(cache_dir / "train.bin", "<u4", "r")
        if train.max() + 1 != len(vocab) or train[-1] != vocab[EOS]:
            raise ValueError(f"ids up to {train.max()}, the last {train[-1]}; expected "
                             f"{len(vocab) - 1}, as every word occurs, and 0 for {EOS}")
    except ValueError as error:
        raise ValueError(f"{cache_dir} is damaged, delete it: {error}") from None
    valid, test = (vocab.encode("".join(read_text(token_file(folder, split), "reading")))
                   for split in SPLITS[1:])
    return Corpus(train, valid, test, vocab, cache_dir, built)


def describe(corpus):
    """Say what was found: sizes, the share of unknown words, and whether the cache is new."""
    ends = corpus.train == corpus.vocab[EOS]
    paragraphs = ends.sum() - ends[0] - (ends[1:] & ends[:-1]).sum()
    unknown = corpus.vocab.get(UNK, -1)
    shares = [100 * (text == unknown).mean() for text in (corpus.train, corpus.valid)]
    new = f"; ids written to {corpus.cache_dir}" if corpus.built else ""
    return (f"{paragraphs:,} paragraphs, {len(corpus.train):,} training, {len(corpus.valid):,} "
            f"valid, {len(corpus.test):,} test tokens, {len(corpus.vocab):,} words; unknown: "
            f"{shares[0]:.1f} % of training, {shares[1]:.1f} % of valid{new}")


def count_words(path):
    """Make a text's Vocabulary: <eos>, words by falling count, ties in order of appearance."""
    counts = Counter()
    for text in read_text(path, "counting words of"):
        counts.update(text.split())
    counts.pop(EOS, None)                       # it comes first, however often it is written out
    if not counts:
        raise ValueError(f"{path} holds no word, only blank lines: expected tokenised text")
    return Vocabulary([EOS, *sorted(counts, key=counts.get, reverse=True)])


def prepare(folder, cache_dir):
    """Write vocab.txt and train.bin, unless they are those of the training text as it is. Did it?

    Both carry the text's time of last change, so a build that was cut off is none.
    """
    path = token_file(folder, "train")
    words, binary = cache_dir / "vocab.txt", cache_dir / "train.bin"
    changed = path.stat().st_mtime_ns
    if are_of(changed, words, binary):
        return False
    vocab = count_words(path)
    ids = (vocab.encode(text).tobytes() for text in read_text(path, "encoding"))
    write_whole(words, (f"{word}\n".encode() for word in vocab.words), changed)
    write_whole(binary, ids, changed)
    return True


def are_of(changed, *paths):
    """Tell whether these files are there, made of a text that was last changed then."""
    return all(path.exists() and path.stat().st_mtime_ns == changed for path in paths)


def write_whole(path, pieces, made_of=None):
    """Write bytes into a file that gets its name when it is whole, and the time of what made it."""
    tmp = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(tmp, "wb") as f:
            f.writelines(pieces)
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


def choose_cache_dir(folder):
    """Choose <folder>/cache, or `cache_name` where the folder must not be written to."""
    here = Path(folder, "cache")
    place = here if here.exists() else Path(folder)
    if os.access(place, os.W_OK) and place.stat().st_mode & 0o222:  # root may write anywhere
        return here
    return cache_name(folder)


def cache_name(path):
    """Name out/cache/<name>_<hash of the whole path>."""
    path = Path(path).resolve()
    return Path("out", "cache", f"{path.stem}_{zlib.crc32(str(path).encode()):08x}")


# --- other texts, written as token files ----------------------------------------------------------

def text_folder(data, data_dir, rank=0):
    """Find the folder of token files that the flags mean; rank 0 writes what is new.

    data_dir: a folder of wiki.*.tokens, a .txt, a folder with one .txt, or None for pydoc's text.
    Raises FileNotFoundError or ValueError, one line, if that is not there.
    """
    return from_rank_0(find_folder(data, data_dir) if rank == 0 else None)


def find_folder(data, data_dir):
    """Do `text_folder`'s work in one process."""
    if not data_dir and data != "pydoc":
        raise ValueError(f"--data {data} needs --data_dir")
    if not data_dir:
        return pydoc_folder("out/cache")
    path = Path(data_dir)
    if any(path.glob("wiki.*.tokens")):
        return path
    texts = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    if len(texts) > 1:
        raise ValueError(f"--data_dir {path} holds {len(texts)} .txt, {texts[0].name} and "
                         f"{texts[1].name} among them: give one by its name")
    if not texts or texts[0].suffix != ".txt" or not texts[0].is_file():
        raise FileNotFoundError(f"--data_dir {path}: expected a .txt, or a folder with one or with "
                                f"wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens")
    return txt_folder(texts[0])


def words_of(text):
    """Split a text into words and punctuation marks."""
    return re.findall(r"\w+(?:'\w+)*|[^\w\s]", text)


def write_tokens(folder, lines, made_of=None):
    """Write {split: lists of words} as wiki.*.tokens; words rare in the training text are <unk>."""
    counts = Counter(word for line in lines["train"] for word in line)
    if min(counts.values()) >= MIN_COUNT:
        lines["train"] = [*lines["train"], [UNK]]                   # the others may need it
    for split in SPLITS:
        kept = [[w if counts[w] >= MIN_COUNT else UNK for w in line] for line in lines[split]]
        text = "".join(" ".join(["", *line, "\n"]) for line in kept)
        write_whole(folder / f"wiki.{split}.tokens", [text.encode()], made_of)


def txt_folder(path):
    """Make a folder of a .txt: 90 % of its paragraphs to train, 5 % to valid, 5 % to test.

    Blank lines part paragraphs; where that gives fewer than 20, every line is one.
    """
    folder, changed = cache_name(path), path.stat().st_mtime_ns
    if are_of(changed, *(folder / f"wiki.{split}.tokens" for split in SPLITS)):
        return folder
    text = "".join(read_text(path, "reading"))
    for mark in (r"\n\s*\n", "\n"):
        lines = [words for words in map(words_of, re.split(mark, text)) if words]
        if len(lines) >= 20:
            a, b = len(lines) * 90 // 100, len(lines) * 95 // 100
            write_tokens(folder, dict(train=lines[:a], valid=lines[a:b], test=lines[b:]), changed)
            return folder
    raise ValueError(f"{path} has {len(lines)} lines with words, expected 20 or more")


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

    tokens: (n,) uint32. Returns (b, context + 1) int64: the slice `part` of the batch_size windows
    of this step, each drawn by (seed, step, its place) alone.
    """
    if len(tokens) <= context:
        raise ValueError(f"--context {context}: the training text has only {len(tokens)} tokens")
    u = uniform(torch.arange(batch_size)[part], 2, seed, WINDOW, step).double()    # (b, 2), 24 bits
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
        raise ValueError(f"window {window}, stride {stride}: expected 1 <= stride <= window <= "
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
                                       disable=rank > 0 or not progress):
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
