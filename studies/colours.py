"""The colours and marks of every figure in lecture/ and studies/.

Colours come from the palette of Okabe and Ito, which colour-blind readers can tell apart. Each
family also has its own mark. Adversarially trained networks have open marks and dashed lines.
"""

FAMILIES = {                                    # family: (colour, mark)
    "symmetric": ("#0072b2", "o"),              # the baseline
    "rpc": ("#d55e00", "^"),
    "softmax": ("black", "v"),
    "average": ("#666666", "s"),                # layer 0 only averages its tokens
    "others": ("#cc79a7", "D"),                 # published attentions of other authors
    "recipe": ("black", "x"),                   # other training recipes
    "adversarial": ("#009e73", "D"),            # the baseline, adversarially trained
}
CONTROL = dict(color="black", linestyle=":")    # chance, shuffled or random inputs
FRAME = "#35d0ff"                               # frames around corrupted patches


def look(family, **more):
    """Return the colour, mark and line style of a family as keywords of matplotlib's plot."""
    colour, mark = FAMILIES[family]
    defended = dict(linestyle="--", fillstyle="none") if family == "adversarial" else {}
    return dict(color=colour, marker=mark) | defended | more
