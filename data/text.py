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
from itertools import chain
from pathlib import Path
from typing import NamedTuple
from unicodedata import normalize

import numpy as np
import torch
import torch.distributed as dist

from common import InputError, bar, replacing
from data.rng import TEXT_WINDOW, uniform

SPLITS = ("train", "valid", "test")
EOS = "<eos>"
UNK = "<unk>"
MIN_COUNT = 3                                   # rarer words of the training text become <unk>
LINE_WORDS = 8                                  # shorter lines may be equal by chance
# folders of Python's library whose docstrings are not part of the text "pydoc"
NOT_PYDOC = {"test", "idlelib", "lib2to3", "turtledemo", "site-packages",
             "dist-packages"}


# --- words to ids ---------------------------------------------------------------------------------

class Vocabulary(dict):
    """Map a word to its id, the index in `words`. Unknown words get the id of <unk>."""

    def __init__(self, words):
        self.words = list(words)
        super().__init__({word: i for i, word in enumerate(self.words)})

    def __missing__(self, word):
        if UNK not in self:
            raise InputError(f"the word {word!r} is not in the vocabulary; use its words, or "
                             f"train on a text that contains {UNK}")
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


def token_file(folder, split):
    return Path(folder, f"wiki.{split}.tokens")


def read_lines(path):
    """Read the lines of a UTF-8 file in Unicode's composed form, a list; only "\\n" ends a line."""
    with open(path, encoding="utf-8-sig", newline="\n") as f:       # -sig drops a byte order mark
        try:
            return [normalize("NFC", line.removesuffix("\n")) for line in f]
        except UnicodeDecodeError as error:                         # does not name the file
            raise InputError(f"{path} is not UTF-8 text: {error.reason}") from None


def count_words(lines):
    """Count how often each word occurs in the lines, a Counter."""
    counts = Counter()
    for line in lines:
        counts.update(line.split())
    return counts


def load_corpus(folder):
    """Load the texts of a folder. Ids: <eos>, then the words of the training by falling count."""
    train, valid, test = [read_lines(token_file(folder, split)) for split in SPLITS]
    counts = count_words(train)
    counts.pop(EOS, None)                       # <eos> comes first, whatever its count
    # Words with equal counts keep the order of the text.
    words = sorted(counts, key=counts.get, reverse=True)
    vocab = Vocabulary([EOS, *words])
    return Corpus(vocab.encode_lines(train), vocab.encode_lines(valid),
                  vocab.encode_lines(test), vocab)


# --- other texts, written as token files ----------------------------------------------------------

def is_text_file(data_dir):
    """Return whether --data_dir was given and is no folder."""
    return bool(data_dir) and not Path(data_dir).is_dir()


def is_spaced(data_dir):
    """Return whether `separate_words` makes the lines of a text. Token files stay as they are.

    data_dir: a text file, None for pydoc, or a folder of token files.
    """
    return not data_dir or is_text_file(data_dir)


def prepare_text(data, data_dir):
    """Return the folder of token files for --data and --data_dir.

    A text file and the text pydoc are first converted to token files in out/cache.
    """
    if is_text_file(data_dir):                  # convert it each time: it may have changed
        path = Path(data_dir).resolve()
        folder = Path("out", "cache", f"{path.stem}_{zlib.crc32(os.fsencode(path)):08x}")
        parts = {}
        for split, paragraphs in split_text(data_dir).items():
            parts[split] = [separate_words(paragraph) for paragraph in paragraphs]
        write_tokens(folder, parts)
        return folder
    if data_dir:
        return Path(data_dir)
    if data == "pydoc":
        return pydoc_folder("out/cache")
    raise InputError(f"--data {data} needs --data_dir")


def separate_words(text):
    """Put one space between the words and punctuation marks of a text."""
    return " ".join(re.findall(r"\w+(?:'\w+)*|[^\w\s]", normalize("NFC", text)))


def token_line(line, counts):
    """Return a line of a token file, in which rare words become <unk>. counts: of the training."""
    words = [word if counts[word] >= MIN_COUNT else UNK for word in line.split()]
    return " ".join(["", *words, "\n"])                # as in WikiText: spaces at both ends


def write_tokens(folder, parts):
    """Write parts, {split: lines}, as wiki.*.tokens. Words that are rare in train become <unk>.

    valid and test may need <unk>, which is in the vocabulary only if it is in train. So if no word
    of train is rare, train gets another line, which contains <unk> only.
    """
    folder.mkdir(parents=True, exist_ok=True)
    counts = count_words(parts["train"])
    for split in SPLITS:
        lines = [token_line(line, counts) for line in parts[split]]
        if split == "train" and min(counts.values()) >= MIN_COUNT:
            lines.append(token_line(UNK, counts))
        with replacing(token_file(folder, split)) as tmp:
            tmp.write_bytes("".join(lines).encode())


def read_paragraphs(path):
    """Read the paragraphs of a text file that contain a word, a list.

    Blank lines separate paragraphs. If there are fewer than 20, every line is a paragraph.
    """
    text = "\n".join(read_lines(path))
    paragraphs = split_at(r"\n\s*\n", text)
    if len(paragraphs) < 20:
        paragraphs = split_at("\n", text)
    return paragraphs


def split_at(mark, text):
    """Split a text at each match of the regular expression `mark`; keep the parts with a word."""
    return [part for part in re.split(mark, text) if separate_words(part)]


def split_text(path):
    """Split the paragraphs of a text file: 90 % train, the next 5 % valid, the last 5 % test."""
    paragraphs = read_paragraphs(path)
    a = len(paragraphs) * 90 // 100
    b = len(paragraphs) * 95 // 100
    parts = dict(train=paragraphs[:a], valid=paragraphs[a:b], test=paragraphs[b:])
    if not all(parts.values()):
        raise InputError(f"{path} has {len(paragraphs)} lines with words, expected at least "
                         f"20, to train, validate and test on; if it has more, end the lines "
                         f"with \\n")
    return parts


def paragraph_hashes(paragraph):
    """Return the hashes of a paragraph and of its lines of LINE_WORDS or more words, a set.

    The hashes of lines find a paragraph whose lines are in another order or in other paragraphs.
    """
    pieces = [separate_words(paragraph)]
    for line in paragraph.split("\n"):
        if len(line.split()) >= LINE_WORDS:
            pieces.append(separate_words(line))
    return {zlib.crc32(piece.encode()) for piece in pieces}


def seen_hashes(data_dir):
    """Return the `paragraph_hashes` of a text file's paragraphs in train and valid, a list.

    Returns [] for token files and for pydoc. There rare words are <unk>, so no hash would match.
    """
    if not is_text_file(data_dir):
        return []
    parts = split_text(data_dir)
    seen = set()
    for paragraph in parts["train"] + parts["valid"]:
        seen |= paragraph_hashes(paragraph)
    return sorted(seen)


def lines_to_score(data, data_dir, seen, spaced=True):
    """Return the one or two texts to evaluate a language model on, {name: lines of tokens}.

    Token files and pydoc are two texts, "valid" and "test". A text file is one text. If `seen` is
    known, the text is "unseen": the paragraphs without a hash in `seen`. Otherwise it is "text":
    all paragraphs.
    seen: hashes of the training's paragraphs; [] if they are unknown. spaced: whether
    `separate_words` made the lines of the model's training; then it makes these lines, too.
    """
    if not is_text_file(data_dir):
        folder = prepare_text(data, data_dir)
        return {split: read_lines(token_file(folder, split)) for split in ("valid", "test")}
    paragraphs = read_paragraphs(data_dir)
    if not paragraphs:
        raise InputError(f"--data_dir {data_dir} contains no words, expected a text")
    seen = {*seen}
    unseen = [text for text in paragraphs if not paragraph_hashes(text) & seen]
    if not unseen:
        raise InputError(f"--data_dir {data_dir}: the model was trained on all paragraphs, "
                         f"expected new ones")
    if spaced:
        lines = [separate_words(paragraph) for paragraph in unseen]
    else:                                               # words are separated by spaces
        lines = [" ".join(paragraph.split()) for paragraph in unseen]
    name = "unseen" if seen else "text"
    return {name: lines}


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
    documents |= library_docstrings()
    parts = {split: [] for split in SPLITS}
    for name, texts in sorted(documents.items()):
        sixteenth = zlib.crc32(name.encode()) % 16
        split = "train"
        if sixteenth == 1:
            split = "valid"
        if sixteenth == 15:
            split = "test"
        for i, (title, text) in enumerate(texts):
            signs = "= =" if i else "="                 # around a WikiText heading: = title =
            parts[split] += ["", f"{signs} {separate_words(title)} {signs}", ""]
            parts[split] += [separate_words(paragraph) for paragraph in re.split(r"\n\s*\n", text)]
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
def sliding_nll(model, tokens, window, stride, batch_size=64, rank=0, world=1,
                progress=None):
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
        raise InputError(f"window {window}, stride {stride}: expected 1 <= stride <= "
                         f"window <= {M}, the number of targets in the text")
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
    training = model.training
    tokens = torch.as_tensor(tokens).long().to(device)
    nll = torch.zeros(M, device=device)
    model.eval()
    for starts, length, scored in bar(batches[rank::world], progress, leave=False):
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
    if scored is not None:
        nll = nll[scored]
    return nll.mean().exp().item()
