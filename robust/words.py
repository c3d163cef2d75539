"""The word-swap attack on the text that a language model is evaluated on.

    lines, swapped = word_swap(lines)

Teo & Nguyen 2024, section 4.2, Table 3: a meaningless word, `AAA`, replaces a share of the words.
The paper does not give the share. 0.015 per line comes from
`KurtPask/Elliptical-Attention:WordAttack/src_attack/utils/vocabulary.py`.
"""

import random
import re

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


def word_swap(lines, seed=0, word=WORD):
    """Replace max(int(RATE * words), 1) words per line, also in headings. Returns (lines, swapped).

    lines: strings of tokens with spaces between them. A word is a token with a letter or digit.
    Stop words in lower case and <unk> are never replaced. swapped: one bool per token; every line
    has an <eos> at its end.
    """
    rng = random.Random(seed)
    parts = [re.split(r"(\s+)", line) for line in lines]           # tokens and the spaces between
    chosen = set()                                                 # pairs (line, part)
    for i, line in enumerate(parts):
        words = [j for j, token in enumerate(line) if any(map(str.isalnum, token))]
        free = [(i, j) for j in words
                if line[j] != "<unk>" and line[j].strip("'") not in STOP_WORDS]
        count = max(int(RATE * len(words)), 1)
        count = min(count, len(free))
        chosen.update(rng.sample(free, count))

    new_lines = []
    swapped = []
    for i, line in enumerate(parts):
        new = list(line)
        for j, token in enumerate(line):
            if (i, j) in chosen:
                new[j] = word
            if token.strip():                                      # no spaces
                swapped.append((i, j) in chosen)
        swapped.append(False)                                      # the line's <eos>
        new_lines.append("".join(new))
    return new_lines, swapped
