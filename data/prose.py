"""Other texts, laid out as WikiText: a .txt of one's own, this Python's documentation.

    folder = text_folder("folder", "book.txt")           # a folder for data.text.load_corpus
    folder = text_folder("pydoc", None)
"""

import ast
import os
import platform
import re
import zlib
from collections import Counter
from pathlib import Path

from common import broadcast
from data.text import SPLITS, UNK, are_of, cache_name, read_text, write_whole

MIN_COUNT = 3                                   # rarer words are <unk>
# folders of the library whose documentation is no part of pydoc's text
NOT_PYDOC = {"test", "idlelib", "lib2to3", "turtledemo", "site-packages", "dist-packages"}


def text_folder(data, data_dir, rank=0):
    """The folder of token files that --data and --data_dir mean; rank 0 writes what is new.

    data_dir: a folder of wiki.*.tokens, a .txt, a folder with one .txt, or None for pydoc's text.
    Raises FileNotFoundError or ValueError, one line, if that is not there.
    """
    return broadcast([find_folder(data, data_dir) if rank == 0 else None])[0]


def find_folder(data, data_dir):
    """`text_folder` for one process."""
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
    """Words and punctuation marks of a text."""
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
    """Folder made of a .txt: 90 % of its paragraphs to train, then 5 % to valid, 5 % to test.

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
    """{name: [(title, text)]}: pydoc's topics and the docstrings of the parsed standard library."""
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
    """Folder of wiki.{train,valid,test}.tokens made of `pydoc_documents`; written if missing.

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
