"""Leave out at test time the patches that a score marks: is the network more accurate?

    python -m studies.left_out                                    # tables of the stored rows
    python -m studies.left_out --ckpt out/why/symmetric_s0 --out FILE
    python -m studies.left_out --ckpt weights/cifar10_symmetric.pt --data_dir data/cifar10 \\
        --out FILE
    python -m studies.left_out --knowing --ckpt out/why/symmetric_s0 --out FILE

Each test image has a few corrupted patches. A score of studies/scores.py marks patches, and no
token attends to a marked patch, in all layers. Nothing is trained. The oracle leaves out exactly the
corrupted patches: it is the ceiling. Thresholds come from clean training images. --knowing attacks
a network and its detector together. The question, the tests and the meaning of each outcome were
fixed in results/left_out/plan.md before the first row.
"""

import argparse
import base64
import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

import common
from data.images import read_image
from data.rng import PATCH_PLACES, epoch_order, uniform
from data.shapes import load_shapes
from studies import probe
from studies.perfect_s import LEFT_OUT, conditioned
from studies.scores import (FOUR, LENGTH, MAHALANOBIS, ONE, PAP, PURSUIT, VARIATION,
                            corrupt_patches, length, look, mahalanobis, outlier_pursuit,
                            pap_score, patches_to_pixels, pursuit_weight, random_block,
                            robust_pca_scores, row_sums, total_variation)
from studies.stats import (NONE, crossed, detectable, holm, paired_t, show, show_p,
                           unpack_bits)
from studies.where_is_s import auc

FOLDER = Path(__file__).parent / "results/left_out"
ROWS = FOLDER / "rows.jsonl"
KNOWING = FOLDER / "knowing.jsonl"
KINDS = ("noise", "gaussian", "white", "pasted", "adversarial")
BLOCKS = ("pasted", "adversarial")      # kinds whose corrupted patches form blocks of 2 x 2
FLATNESS = "flatness"                   # minus the total variation, so it marks smooth patches
SCORES = (ONE, FOUR, PURSUIT, MAHALANOBIS, PAP, LENGTH, VARIATION, FLATNESS)
DETECTORS = (ONE, FOUR, MAHALANOBIS, VARIATION)             # of the knowing attack
RULES = ("1 % of patches", "1 of 5 images")
TRAINED, ORACLE = "as trained", "oracle"
IMAGES = 500
CLEAN = 300                             # training images for the thresholds
KNOWING_IMAGES = 200
WEIGHTS = (3, 1, 10, 0.3, 30, 0.1)      # of the detector in the knowing attack, in this order
KNOWING_STEPS = 100


# --- images ---------------------------------------------------------------------------------------

def load_images(checkpoint, part, n, data_dir):
    """Load n images (n, 3, 32, 32) in [0, 1] and labels (n,) of the data set of a checkpoint.

    part: "train" or "test". data_dir: the folder with train/<class>/* and val/<class>/* of CIFAR-10
    as image files; rendered scenes need none.
    """
    if checkpoint["args"].get("data", "shapes") == "shapes":
        scenes = load_shapes(part, n)
        return scenes.images.float() / 255, scenes.labels
    if data_dir is None:
        raise common.InputError("this checkpoint needs --data_dir, the folder with "
                                "train/<class> and val/<class> of CIFAR-10")
    folder = "val" if part == "test" else part
    files = sorted(Path(data_dir, folder).glob("*/*"))
    some = [files[i] for i in epoch_order(len(files), 0, seed=0)[:n].tolist()]
    images = torch.stack([read_image(path) for path in some])               # (n, 3, 32, 32) uint8
    labels = [checkpoint["classes"].index(path.parent.name) for path in some]
    return images.float() / 255, torch.tensor(labels)


def paste(images, patch):
    """Paste two blocks of 2 x 2 patches of another image, at the same place, with soft edges.

    The outermost pixels of a block are a mixture of both images. Returns the images, and which
    patches are changed, (B, P) bool.
    """
    index = torch.arange(len(images))
    side = images.shape[-1] // patch
    hit = random_block(index, side) | random_block(index + len(images), side)
    inside = patches_to_pixels(hit, side, patch).float()
    outside = F.pad(1 - inside, (1, 1, 1, 1))
    share = inside * (1 - F.avg_pool2d(outside, 3, 1))          # mean of 3 x 3 pixels
    other = images.roll(len(images) // 2, 0)
    return images + share * (other - images), hit


def corrupted(model, images, labels, kind):
    """Corrupt images; return them and which patches are corrupted, (B, P) bool.

    kind: one of KINDS, or "clean": no patch is corrupted.
    """
    patch = model.config.patch_size
    if kind == "clean":
        side = images.shape[-1] // patch
        return images, torch.zeros(len(images), side * side, dtype=torch.bool)
    if kind == "pasted":
        return paste(images, patch)
    return corrupt_patches(images, kind, patch, model=model, labels=labels)


# --- detectors ------------------------------------------------------------------------------------

def over_windows(score):
    """Average a score (B, P) over windows of 2 x 2 patches.

    Each patch gets the largest average of the windows that contain it.
    """
    side = math.isqrt(score.shape[1])
    means = F.avg_pool2d(score.view(-1, 1, side, side), 2, 1)
    return F.max_pool2d(means, 2, 1, padding=1).flatten(1)


def one_score(name, images, k, v, patch):
    """Score the patches of images, (B, P), by one of SCORES. k, v: keys and values of layer 0."""
    match name:
        case "robust PCA, 1 step" | "robust PCA, 4 steps":
            one, four = robust_pca_scores(k)
            tokens = one if name == ONE else four
        case "outlier pursuit":
            S, _ = outlier_pursuit(k, pursuit_weight(1))
            tokens = row_sums(S)
        case "Mahalanobis":
            tokens = mahalanobis(k)
        case "PAP":
            tokens = pap_score(k, v)
        case "length":
            tokens = length(k)
        case "total variation":
            return total_variation(images, patch)
        case "flatness":
            return -total_variation(images, patch)
    return tokens[:, 1:]                                        # without the class token


@torch.no_grad()
def all_scores(model, images):
    """Return all scores of the patches, {score: (B, P)}."""
    _, k, v = look(model, images)
    patch = model.config.patch_size
    return {name: one_score(name, images, k, v, patch) for name in SCORES}


def thresholds(scores):
    """Return the thresholds of clean scores {score: (B, P)}: {(score, rule, windows): number}."""
    found = {}
    for name, score in scores.items():
        for windows in (False, True):
            values = over_windows(score) if windows else score
            found[name, RULES[0], windows] = values.flatten().quantile(0.99).item()
            found[name, RULES[1], windows] = values.amax(1).quantile(0.8).item()
    return found


# --- outcomes -------------------------------------------------------------------------------------

@torch.no_grad()
def right_without(model, images, labels, out):
    """Return which answers are right if no token attends to the patches `out`, (B, P) bool."""
    with conditioned(model, LEFT_OUT, out, out):
        return model(images).argmax(1) == labels


def outcomes(model, images, labels, kind, limits):
    """Corrupt images; return {condition: which answers are right (B,)} and {score: AUC}.

    limits: the result of `thresholds`. On clean images, patches are also marked by windows.
    """
    x, hit = corrupted(model, images, labels, kind)
    right = {TRAINED: model(x).argmax(1) == labels,
             ORACLE: right_without(model, x, labels, hit)}
    areas = {}
    for name, score in all_scores(model, x).items():
        values = over_windows(score) if kind in BLOCKS else score
        if kind != "clean":
            areas[name] = round(auc(values, hit).mean().item(), 4)
        for rule in RULES:
            out = values > limits[name, rule, kind in BLOCKS]
            right[f"{name}; {rule}"] = right_without(model, x, labels, out)
            if kind == "clean":
                out = over_windows(score) > limits[name, rule, True]
                right[f"{name}; {rule}; windows"] = right_without(model, x, labels, out)
    return right, areas


def packed(right):
    """Return outcomes {condition: (B,) bool} as base64 texts."""
    texts = {}
    for name, values in right.items():
        bits = np.packbits(values.numpy())
        texts[name] = base64.b64encode(bits).decode()
    return texts


class Measured(NamedTuple):
    """A network with its test images and the thresholds of its detectors."""
    model: torch.nn.Module
    images: torch.Tensor                # (B, 3, S, S)
    labels: torch.Tensor                # (B,)
    limits: dict                        # the result of `thresholds`
    about: dict                         # the fields of a row that name the network


def load(path, n, data_dir):
    """Load a checkpoint with n test images of its data set: a Measured."""
    model, checkpoint = probe.load_model(path)
    flags = checkpoint["args"]
    clean, _ = load_images(checkpoint, "train", CLEAN, data_dir)
    images, labels = load_images(checkpoint, "test", n, data_dir)
    about = dict(data=flags.get("data", "shapes"), network=model.config.attn,
                 seed=flags["seed"], images=n)
    return Measured(model, images, labels, thresholds(all_scores(model, clean)), about)


def measure(path, n, data_dir=None):
    """Yield one row per kind of corruption of a network."""
    model, images, labels, limits, about = load(path, n, data_dir)
    for kind in ("clean", *KINDS):
        right, areas = outcomes(model, images, labels, kind, limits)
        row = about | dict(kind=kind, auc=areas, right=packed(right))
        yield row | common.origin(torch.device("cpu"))


# --- attacks that know the detector ---------------------------------------------------------------

def defended(model, detector, limit, images, labels):
    """Return which answers are right if marked patches are left out. limit: the threshold."""
    with torch.no_grad():
        _, k, v = look(model, images)
        score = one_score(detector, images, k, v, model.config.patch_size)
    return right_without(model, images, labels, over_windows(score) > limit)


def objective(model, detector, limit, images, labels, hit, weight):
    """Return what the attack raises, (B,): the loss minus weight times the detector's excess.

    The excess of a corrupted patch is the share by which its score exceeds the threshold.
    """
    logits, k, v = look(model, images)
    score = over_windows(one_score(detector, images, k, v, model.config.patch_size))
    excess = (score / limit - 1).clamp_min(0) * hit
    return F.cross_entropy(logits, labels, reduction="none") - weight * excess.sum(1)


def attack_step(value, x, where, size):
    """Move the pixels `where` of x by `size` in the direction that raises the value."""
    gradient, = torch.autograd.grad(value.sum(), x)
    moved = (x.detach() + size * gradient.sign()).clamp(0, 1)
    return torch.where(where, moved, x.detach())


def survivors(model, detector, limit, images, labels, steps=KNOWING_STEPS,
              weights=WEIGHTS):
    """Return which images stay right under all knowing attacks, (B,) bool, by weight.

    Every attack changes one block of 2 x 2 patches, from grey, in steps that become smaller. An
    image counts as wrong if it is wrong after any weight, at the end or at every 20th step. Images
    that are wrong already are not attacked again. Returns {weight: (B,)}, from first to last.
    """
    patch = model.config.patch_size
    side = images.shape[-1] // patch
    hit = random_block(torch.arange(len(images)), side)
    where = patches_to_pixels(hit, side, patch)
    alive = torch.ones(len(images), dtype=torch.bool)
    found = {}
    for weight in weights:
        rows = alive.nonzero()[:, 0]
        x = images[rows].masked_fill(where[rows], 0.5)
        for step in range(steps):
            if not len(rows):
                break
            x.requires_grad_()
            value = objective(model, detector, limit, x, labels[rows], hit[rows],
                              weight)
            x = attack_step(value, x, where[rows], 0.2 * (1 - step / steps))
            if (step + 1) % 20 == 0:
                right = defended(model, detector, limit, x, labels[rows])
                alive[rows] &= right
                rows = rows[right]
                x = x[right]
        found[weight] = alive.clone()
    return found


def knowing_rows(path, n, data_dir=None):
    """Yield one row per detector: who survives the attacks that know it."""
    model, images, labels, limits, about = load(path, n, data_dir)
    x, hit = corrupted(model, images, labels, "adversarial")
    for detector in DETECTORS:
        at = model, detector, limits[detector, RULES[0], True]
        by_weight = survivors(*at, images, labels)
        right = {"clean": defended(*at, images, labels),
                 "attack without knowledge": defended(*at, x, labels),
                 ORACLE: right_without(model, images, labels, hit)}
        for weight, alive in by_weight.items():
            right[f"up to weight {weight:g}"] = alive
        right["worst"] = by_weight[WEIGHTS[-1]]
        row = about | dict(kind="knowing", detector=detector, steps=KNOWING_STEPS,
                           right=packed(right))
        yield row | common.origin(torch.device("cpu"))


# --- tables ---------------------------------------------------------------------------------------

def read_rows(path=ROWS, data="shapes", network="symmetric"):
    """Read rows as {(kind, condition): {seed: (images,) in per cent}}. network: of --attn.

    A row of a knowing attack has its detector as the kind.
    """
    found = {}
    for row in common.read_log(path):
        if (row["data"], row["network"]) == (data, network):
            for condition, text in row["right"].items():
                right = 100 * unpack_bits(text, row["images"])
                found.setdefault((row.get("detector", row["kind"]), condition), {})[
                    row["seed"]] = right
    return found


def gap(found, kind, first, second=TRAINED):
    """Subtract the outcomes of two conditions, seed by seed: a Difference, see `over`."""
    first = found.get((kind, first), {})
    second = found.get((kind, second), {})
    seeds = sorted(first.keys() & second.keys())
    return over([first[seed] - second[seed] for seed in seeds])


def level(found, kind, condition):
    """Return the accuracy under a condition as a Difference from 0, see `over`."""
    return over([*found[kind, condition].values()])


def over(outcomes):
    """Average outcomes (networks, images): a Difference over networks and images.

    With one network, the interval covers the images only.
    """
    if len(outcomes) == 1:
        return paired_t(outcomes[0])
    return crossed(outcomes) if outcomes else NONE


MARKED = f"{ONE}; {RULES[0]}"           # the condition of the tests
PIXELS = f"{VARIATION}; {RULES[0]}"
PRIMARY_KINDS = ("noise", "white", "pasted", "adversarial")
TESTS = {}                              # {name: (kind, condition, base)}
for _kind in PRIMARY_KINDS:
    TESTS[f"{_kind}: robust PCA minus as trained"] = (_kind, MARKED, TRAINED)
    TESTS[f"{_kind}: robust PCA minus total variation"] = (_kind, MARKED, PIXELS)


def tests(found):
    """Return the planned contrasts: {test: (Difference, p after Holm's correction over all)}."""
    gaps = {name: gap(found, *test) for name, test in TESTS.items()}
    known = {name: d.p for name, d in gaps.items() if math.isfinite(d.p)}
    p = holm(dict.fromkeys(TESTS, 1.0) | known)         # counts all tests, also without rows
    return {name: (d, p[name]) for name, d in gaps.items()}


def power(d):
    """Return the difference that a planned contrast detects with 80 % power."""
    return detectable(d.error, d.df, len(TESTS))


def tests_table(found):
    """Format the planned contrasts as Markdown: difference, p, ceiling and power."""
    body = []
    for name, (d, p) in tests(found).items():
        if d.n:
            ceiling = gap(found, TESTS[name][0], ORACLE, TESTS[name][2])
            body.append([name, show(d, bold=p < 0.05), show_p(p), show(ceiling),
                         f"{power(d):.1f}"])
    return common.table(body, ["points of accuracy", "difference", "p, Holm",
                               "oracle minus the same baseline",
                               "detectable with 80 % power"])


def accuracy_table(found, rule):
    """Format accuracy as trained, of the oracle, and of every score minus as trained."""
    kinds = [kind for kind in ("clean", *KINDS) if (kind, TRAINED) in found]
    lines = {TRAINED: [], f"{ORACLE} minus as trained": []}
    for kind in kinds:
        lines[TRAINED].append(f"{level(found, kind, TRAINED).mean:.1f}")
        lines[f"{ORACLE} minus as trained"].append(show(gap(found, kind, ORACLE)))
        for name in SCORES:
            lines.setdefault(f"{name} minus as trained", []).append(
                show(gap(found, kind, f"{name}; {rule}")))
    body = [[title, *cells] for title, cells in lines.items()]
    return common.table(body, [f"accuracy in %, threshold: {rule}", *kinds])


def auc_table(data, network):
    """Format the mean AUC of the scores, by kind."""
    rows = [row for row in common.read_log(ROWS)
            if (row["data"], row["network"]) == (data, network)]
    body = []
    for name in SCORES:
        cells = []
        for kind in KINDS:
            areas = [row["auc"][name] for row in rows if row["kind"] == kind]
            cells.append(f"{np.mean(areas):.2f}" if areas else "")
        body.append([name, *cells])
    return common.table(body, ["AUC", *KINDS])


def knowing_table(found):
    """Format the accuracy of defended networks, in %, under attacks that know the detector."""
    conditions = ("clean", "attack without knowledge", f"up to weight {WEIGHTS[0]:g}",
                  "worst", ORACLE)
    body = []
    for detector in DETECTORS:
        if (detector, "worst") in found:
            levels = [level(found, detector, name) for name in conditions]
            cells = [show(d).replace("+", "") for d in levels]
            body.append([detector, *cells])
    return common.table(body, ["detector", *conditions])


def clean_windows_table(found):
    """Format the clean accuracy minus as trained if windows are marked."""
    body = []
    for name in SCORES:
        gaps = [gap(found, "clean", f"{name}; {rule}; windows") for rule in RULES]
        body.append([name, *[show(d) for d in gaps]])
    return common.table(body, ["clean images, windows of 2 x 2 patches", *RULES])


GROUPS = [("shapes", "symmetric"), ("shapes", "softmax"), ("shapes", "rpc"),
          ("cifar10", "symmetric"), ("cifar10", "softmax"), ("cifar10", "rpc")]


def tables():
    """Format all stored rows as Markdown."""
    parts = []
    for data, network in GROUPS:
        found = read_rows(ROWS, data, network)
        if found:
            seeds = found["noise", TRAINED]
            parts.append(f"## {data}, {network}: {len(seeds)} network"
                         f"{'s' if len(seeds) > 1 else ''}")
            if (data, network) == GROUPS[0]:
                parts.append(tests_table(found))
            parts += [accuracy_table(found, rule) for rule in RULES]
            parts += [clean_windows_table(found), auc_table(data, network)]
        knowing = read_rows(KNOWING, data, network) if KNOWING.exists() else {}
        if knowing:
            parts.append(knowing_table(knowing))
    return "\n\n".join(parts)


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    flag = p.add_argument
    flag("--ckpt", nargs="+", default=[], help="measure these runs or checkpoints")
    flag("--images", type=int, help=f"test images per network (default: {IMAGES}; "
         f"--knowing: {KNOWING_IMAGES})")
    flag("--knowing", action="store_true",
         help="attack each network and its detector together")
    flag("--data_dir", help="the folder of CIFAR-10, for checkpoints of --data cifar10")
    flag("--out", type=Path,
         help="append the rows of --ckpt to this file (default: the stored rows)")
    args = p.parse_args(argv)
    if not args.ckpt:
        return print(tables())
    if args.knowing:
        rows_of, out, images = knowing_rows, KNOWING, KNOWING_IMAGES
    else:
        rows_of, out, images = measure, ROWS, IMAGES
    for path in args.ckpt:
        for row in rows_of(path, args.images or images, args.data_dir):
            with open(args.out or out, "a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    common.run(main)
