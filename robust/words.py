"""The word-swap attack on a language model, and the perplexities that say what it did.

Paper: Teo & Nguyen 2024, section 4.2, Table 3: a share of the words of the evaluation text becomes
one meaningless word, `AAA`. The paper names the attack but no rate; per line and 0.015 are those of
`KurtPask/Elliptical-Attention:WordAttack/src_attack/utils/vocabulary.py`.

    lines, swapped = word_swap(read_lines("wiki.test.tokens"))
    (valid, test), word = load_texts(data_dir, vocab, window=256)
    score(model, test, window=256, stride=1)["attacked"]             # perplexity
"""

import random
import re
from typing import NamedTuple

import numpy as np
import torch

from common import InputError
from data.text import (perplexity, read_lines, sliding_nll, stored_vocabulary, text_folder,
                       token_file)
from robust.score import Images

RATE, WORD = 0.015, "AAA"
STOP_WORDS = frozenset("""
    i me my myself we our ours ourselves you your yours yourself yourselves he him his himself
    she her hers herself it its itself they them their theirs themselves what which who whom
    this that these those am is are was were be been being have has had having do does did doing
    a an the and but if or because as until while of at by for with about against between into
    through during before after above below to from up down in out on off over under again
    further then once here there when where why how all any both each few more most other some
    such no nor not only own same so than too very s t can will just don should now d ll m o re
    ve y ain aren couldn didn doesn hadn hasn haven isn ma mightn mustn needn shan shouldn wasn
    weren won wouldn
""".split())


# --- the attack -----------------------------------------------------------------------------------

def word_swap(lines, rate=RATE, seed=0, word=WORD):
    """Replace a share of the words by one meaningless word. Returns (lines, swapped).

    lines: strings of tokens with spaces between. Words are tokens with a letter or digit; stop
    words in lower case and <unk> stay. max(int(rate * words), 1) are swapped on every line, also
    of headings; rate 0 swaps none. swapped: a bool per token of the stream, an <eos> after every
    line included, so that the perplexity of the other targets can be told apart.
    """
    rng = random.Random(seed)
    parts = [re.split(r"(\s+)", line) for line in lines]           # tokens and what is between them
    chosen = set()                                                 # places: (line, part)
    for i, line in enumerate(parts):
        words = [j for j, token in enumerate(line) if any(map(str.isalnum, token))]
        free = [(i, j) for j in words
                if line[j] != "<unk>" and line[j].strip("'") not in STOP_WORDS]
        count = max(int(rate * len(words)), 1) if rate else 0
        chosen.update(rng.sample(free, min(count, len(free))))

    swapped = []
    for i, line in enumerate(parts):
        swapped += [(i, j) in chosen for j, token in enumerate(line) if token.strip()] + [False]
        parts[i] = "".join(word if (i, j) in chosen else token for j, token in enumerate(line))
    return parts, swapped


# --- what it does to a model ----------------------------------------------------------------------

class Text(NamedTuple):
    """A split to score."""
    split: str
    clean: np.ndarray                # (n,) uint32
    attacked: np.ndarray             # (n,) the same after the word-swap attack
    kept: torch.Tensor               # (n - 1,) bool: targets that the attack left alone


def load_texts(data_dir, vocab, window, seed=0):
    """The valid and test `Text` of a folder in this vocabulary, and the word that was swapped in.

    That word is the paper's, or the vocabulary's rarest where it does not know the paper's: <unk>,
    which many places of the text hold, would be no surprise.
    """
    word = WORD if WORD in vocab else vocab.words[-1]
    texts = []
    for split in ("valid", "test"):
        lines = read_lines(token_file(data_dir, split))
        attacked, swapped = word_swap(lines, seed=seed, word=word)
        text = Text(split, vocab.encode_lines(lines), vocab.encode_lines(attacked),
                    ~torch.tensor(swapped[1:]))
        if len(text.clean) <= window:
            raise InputError(f"--window {window} (default: --context): wiki.{split}.tokens in "
                             f"{data_dir} has only {len(text.clean)} tokens, expected more than a "
                             f"window")
        texts.append(text)
    return texts, word


def score(model, text, window, stride, batch_size=64, rank=0, world=1):
    """Perplexities of a `Text`, a dict: segment-wise, sliding, and sliding after the attack.

    attacked counts all targets, the swapped-in words too, which no model can foresee;
    attacked_unswapped the others, clean_unswapped the same targets in the clean text: the
    difference is what the attack does to the model. window: tokens of context at most; stride:
    targets scored per window.
    """
    def nats(tokens, stride, what):
        return sliding_nll(model, tokens, window, stride, batch_size, rank, world,
                           f"{text.split} {what}")

    clean = nats(text.clean, stride, "sliding")
    attacked = nats(text.attacked, stride, "attacked")
    segments = clean if stride == window else nats(text.clean, window, "segment-wise")
    return dict(swapped=int((~text.kept).sum()), segment=perplexity(segments),
                sliding=perplexity(clean), attacked=perplexity(attacked),
                attacked_unswapped=perplexity(attacked, text.kept),
                clean_unswapped=perplexity(clean, text.kept))


# --- for the evaluator ----------------------------------------------------------------------------

def load(models, args):
    """Load {split: Text} in the models' vocabulary, the first --limit tokens. Sets args.word, the
    one that is swapped in, and window, stride and batch_size where no flag does."""
    context = models[0].model.config.context
    args.window = args.window or context
    args.stride = args.stride or max(args.window // 4, 1)
    args.batch_size = args.batch_size or 64
    if args.window > context:
        raise InputError(f"--window {args.window} is more than the context of {context} tokens "
                         "that the model was trained with")
    if args.stride > args.window:
        raise InputError(f"--stride {args.stride} is more than --window {args.window}")
    vocabularies = [stored_vocabulary(m.checkpoint) for m in models]
    for m, vocabulary in zip(models, vocabularies):
        if vocabulary.words != vocabularies[0].words:
            raise InputError(f"{m.given} has another vocabulary than the first: perplexities would "
                             "not compare")
    folder = text_folder(args.data, args.data_dir)
    texts, args.word = load_texts(folder, vocabularies[0], args.window, args.seed)
    n, targets = args.limit, args.limit and args.limit - 1
    return {t.split: t._replace(clean=t.clean[:n], attacked=t.attacked[:n], kept=t.kept[:targets])
            for t in texts}


def text(measure, source, args):
    """The tokens of one split."""
    measure.setting.update(window=args.window, stride=args.stride)
    text = source[measure.setting["split"]]
    return Images(text, range(len(text.clean)), args.data_dir)


def perplexities(m, measure, images, args):
    """Perplexities of one split: segment-wise, sliding, words swapped."""
    row = score(m.model, images.source, args.window, args.stride, args.batch_size, args.rank,
                args.world)
    return dict(row, word=args.word)
