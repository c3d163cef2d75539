"""Does robust PCA inside attention make a network more robust, or is softer attention enough?

    python -m studies.robust_pca                                  # tables of the stored rows
    python -m studies.robust_pca --arms symmetric rpca-4 --seeds 70    # trains, measures, appends
    python -m studies.robust_pca --measure out/robust_pca/rpca-4_s70   # measures, and prints
    python -m studies.robust_pca --cost                           # time and memory, in turn

PAP, the loop of RPC-Attention, computes L by attention; `--attn rpca` runs real robust PCA
(rpca_layer.py). Each arm is a kind of network; the controls have parts of `rpca` only. The
question, the arms and the meaning of each outcome were fixed in results/robust_pca/plan.md before
the first row.
"""

import argparse
import base64
import json
import runpy
import sys
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

import common
from attention import (ATTENTIONS, LAYER_PATTERNS, Attention, layer_inputs, rpc_attention,
                       symmetric_attention)
from data.shapes import load_shapes
from robust.adaptive import layers_with_pap, with_pap, zero_slope
from robust.attacks import pgd
from robust.autoattack import square
from robust.corruptions import NAMES, corrupt
from studies import cost, line, probe
from studies.patches import corrupt_patches
from studies.rpca_layer import SETTINGS, robust_pca
from studies.stats import (NONE, crossed, detectable, holm, interval, paired_t, show, show_p,
                           spread)
from studies.where_is_s import auc, location
from vit import SIZES, ViT, ViTConfig

FOLDER = Path(__file__).parent / "results/robust_pca"
ROWS = FOLDER / "rows.jsonl"
COSTS = FOLDER / "cost.jsonl"
OUT = Path("out/robust_pca")
KINDS = ("noise", "gaussian", "pixels", "white", "black", "adversarial")
EPS = 2 / 255
CLEAN, IMAGES, ATTACKED, SQUARED = 3200, 1000, 500, 200     # numbers of test images
SQUARE_SEEDS = (70, 71, 72)


# --- the arms: attentions that have parts of rpca -------------------------------------------------

def keys_of_s(k, layer):
    """Return the keys from which S is computed: without gradient in training, as in rpca."""
    constant = layer.pap.get("constant_s", layer.training)
    return k.detach() if constant else k


def sparse_part(k, layer):
    """Return S of robust PCA on the keys, with the settings of the layer."""
    return robust_pca(keys_of_s(k, layer), layer.pap["n_iter"], layer.pap["lambd"])


def head_size(x):
    """Return the Euclidean norm of each head of x (B, H, N, D): (B, H, 1, 1)."""
    return torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)


def attend_shrunk(q, k, v, layer):
    """Control: multiply the keys of each head by |K - S| / |K|. No S is removed."""
    K = keys_of_s(k, layer)
    factor = head_size(K - sparse_part(k, layer)) / head_size(K).clamp_min(1e-12)
    return symmetric_attention(factor * k, v)


def attend_moved(q, k, v, layer):
    """Control: subtract the S of another patch, half of all patches away."""
    S = sparse_part(k, layer)
    patches = S[:, :, 1:]
    half = patches.shape[2] // 2
    moved = torch.cat([S[:, :, :1], patches.roll(half, 2)], 2)      # the class token keeps its S
    return symmetric_attention(k - moved, v)


class Temperature(nn.Module):
    """Control: one learned factor of the scores per head, which starts at 1."""

    def __init__(self, layer):
        super().__init__()
        self.log_factor = nn.Parameter(torch.zeros(layer.num_heads, 1, 1))

    def forward(self, q, k, v, layer):
        return symmetric_attention((self.log_factor / 2).exp() * k, v)


class LeftOut(nn.Module):
    """Attend less to patches with a large S, in every layer.

    The score of a patch is its row sum of |S| over heads and channels of layer 0, divided by the
    mean over patches. A learned, non-negative strength per head times the score is subtracted from
    the attention scores for this patch. The score of the class token is 0.
    """
    score = None                        # (B, 1, 1, N) of the images of the current forward pass

    def __init__(self, layer):
        super().__init__()
        self.strength = nn.Parameter(torch.full((layer.num_heads, 1, 1), -2.0))

    def forward(self, q, k, v, layer):
        bias = -F.softplus(self.strength) * LeftOut.score           # (B, H, 1, N)
        return F.scaled_dot_product_attention(k, k, v, attn_mask=bias.to(v.dtype))


class LeftOutFirst(LeftOut):
    """The layer 0 of LeftOut, which computes the scores."""

    def forward(self, q, k, v, layer):
        size = location(sparse_part(k, layer))                      # (B, N - 1)
        score = size / size.mean(1, keepdim=True).clamp_min(1e-12)
        LeftOut.score = F.pad(score, (1, 0))[:, None, None]
        return super().forward(q, k, v, layer)


ATTENTIONS["shrunk keys"] = Attention(False, attend_shrunk, SETTINGS)
ATTENTIONS["moved S"] = Attention(False, attend_moved, SETTINGS)
ATTENTIONS["temperature"] = Attention(False, Temperature)
ATTENTIONS["left out"] = Attention(False, LeftOut, SETTINGS)
ATTENTIONS["left out first"] = Attention(False, LeftOutFirst, SETTINGS)
for _name in ("shrunk keys", "moved S", "temperature"):
    LAYER_PATTERNS[_name] = (_name, "symmetric")
LAYER_PATTERNS["left out"] = ("left out first", "left out")

RPCA = dict(attn="rpca", lambd=1)
ARMS = {                                # flags of train_cls.py; all arms: 8 epochs, lr 0.002
    "symmetric": dict(attn="symmetric"),
    "rpca-4": RPCA | dict(n_iter=4),
    "shrunk": dict(attn="shrunk keys", lambd=1, n_iter=4),
    "rpc": dict(attn="rpc"),
    "left-out": dict(attn="left out", lambd=1, n_iter=4),
    "temperature": dict(attn="temperature"),
    "rpca-1": RPCA | dict(n_iter=1),
    "moved": dict(attn="moved S", lambd=1, n_iter=4),
    "rpca-4-all": RPCA | dict(n_iter=4, rpc_layers="all"),
}
PRIMARY_PAIRS = (("rpca-4", "symmetric"), ("rpca-4", "shrunk"))
PRIMARY = ("15 corruptions", "patches: noise", "pgd, worst")
# The measures that studies/line.py has, too, and their names there.
PREDICTIONS = ("straight line", "parabola", "own slope")
LINE_MEASURES = {"15 corruptions": "15 corruptions", "pgd, true gradient": "pgd 2/255"}


# --- train ----------------------------------------------------------------------------------------

def train(arm, seed, more=()):
    """Train an arm in OUT/<arm>_s<seed>, or continue its run there. Returns the folder."""
    folder = OUT / f"{arm}_s{seed}"
    words = []
    for name, value in ARMS[arm].items():
        words += [f"--{name}", str(value)]
    start = "--resume" if (folder / "last.pt").exists() else "--out_dir"
    sys.argv = ["train_cls.py", *words, "--seed", str(seed), *more, start, str(folder)]
    root = Path(__file__).parent.parent
    runpy.run_path(str(root / "train_cls.py"), run_name="__main__")
    return folder


# --- measure --------------------------------------------------------------------------------------

def packed(right):
    """Return outcomes (n,), integers below 256, as base64 text."""
    values = right.to(torch.uint8).numpy()
    return base64.b64encode(values.tobytes()).decode()


def unpacked(text):
    """Return the outcomes of `packed` as float64."""
    return np.frombuffer(base64.b64decode(text), np.uint8).astype(float)


@torch.no_grad()
def is_right(model, images, labels):
    """Return which images the model classifies correctly, (n,) bool."""
    answers = [model(part).argmax(1) for part in images.split(250)]
    return torch.cat(answers) == labels


def attacked(model, follow, images, labels, seed, steps):
    """Return which images survive PGD along the gradient of `follow`, a twin of the model."""
    index = torch.arange(len(images))
    survive = is_right(model, images, labels)
    for rows in index.split(250):
        adv = pgd(follow, images[rows], labels[rows], EPS, steps=steps, seed=seed, index=rows)
        survive[rows] &= is_right(model, adv, labels[rows])
    return survive


def pgd_rows(model, images, labels, seed):
    """Measure PGD at 2/255 with the true gradient and with S constant, by 20 and by 60 steps.

    60 steps run only on images that survived all attacks before. "worst": survived everything.
    """
    twins = {"true gradient": model}
    layers = layers_with_pap(model, images)
    if model.config.attn == "rpc":                      # PAP: the slope of S counts as 0
        twins["S constant"] = with_pap(model, layers, shrink=zero_slope)
    elif model.config.attn not in ("symmetric", "temperature"):
        twins["S constant"] = with_pap(model, layers, constant_s=True)
    found = {}
    worst = torch.ones(len(images), dtype=torch.bool)
    for name, twin in twins.items():
        survive = attacked(model, twin, images, labels, seed, steps=20)
        found[f"pgd, {name}"] = survive
        worst &= survive
    for twin in twins.values():
        rows = worst.nonzero()[:, 0]
        if len(rows):
            worst[rows] &= attacked(model, twin, images[rows], labels[rows], seed + 1, steps=60)
    return found | {"pgd, worst": worst}


def corruption_counts(model, pixels, labels):
    """Count, per image, under how many of 15 corruptions x 3 severities the answer is right."""
    counts = torch.zeros(len(labels))
    index = torch.arange(len(labels))
    for kind in NAMES:
        for severity in (1, 3, 5):
            for rows in index.split(250):
                changed = corrupt(pixels[rows], kind, severity, seed=1, index=rows)
                counts[rows] += is_right(model, changed.float() / 255, labels[rows])
    return counts


@torch.no_grad()
def sparse_location(model, images):
    """Score each patch by the row sum of |S| in layer 0; None for networks without S."""
    layer, x = layer_inputs(model, images)[0]
    _, k, v = layer.project(x)
    if layer.attn == "rpc":
        steps = []
        rpc_attention(k, v, **layer.pap, trace=steps)
        return location(steps[-1]["S"])
    if layer.attn in ("symmetric", "temperature"):
        return location(robust_pca(k, 4))               # the S that robust PCA would find
    return location(sparse_part(k, layer))


def measure(folder):
    """Return the row of a trained network: outcomes of every measure, loss, AUC of S."""
    model, checkpoint = probe.load_model(folder)
    scenes = load_shapes("test", CLEAN)
    images = scenes.images.float() / 255
    labels = scenes.labels
    arm, _, seed = Path(folder).name.rpartition("_s")
    with torch.no_grad():
        logits = torch.cat([model(part) for part in images.split(250)])
    right = {"clean": logits.argmax(1) == labels}
    loss = F.cross_entropy(logits, labels).item()

    right["15 corruptions"] = corruption_counts(model, scenes.images[:IMAGES], labels[:IMAGES])
    areas = {}
    for kind in KINDS:
        x, hit = corrupt_patches(images[:IMAGES], kind, model.config.patch_size, model=model,
                                 labels=labels[:IMAGES])
        right[f"patches: {kind}"] = is_right(model, x, labels[:IMAGES])
        areas[kind] = auc(sparse_location(model, x[:300]), hit[:300]).mean().item()
    right |= pgd_rows(model, images[:ATTACKED], labels[:ATTACKED], seed=1)
    if int(seed) in SQUARE_SEEDS:
        index = torch.arange(SQUARED)
        adv = square(model, images[:SQUARED], labels[:SQUARED], EPS, queries=1000, index=index)
        right["square"] = is_right(model, adv, labels[:SQUARED])
    return dict(arm=arm, seed=int(seed), step=checkpoint["step"], loss=round(loss, 5),
                auc={kind: round(area, 4) for kind, area in areas.items()},
                right={name: packed(values) for name, values in right.items()},
                trained=checkpoint["args"], **common.origin(torch.device("cpu")))


# --- cost -----------------------------------------------------------------------------------------

def build(arm):
    """Return an untrained network of an arm: ViT-nano at 32 px, 10 classes."""
    settings = dict(ARMS[arm])
    config = dict(SIZES["nano"], image_size=32, patch_size=4, num_classes=10,
                  attn=settings.pop("attn"))
    if settings.pop("rpc_layers", None) == "all":
        config["rpc_layers"] = range(config["depth"])
    return ViT(ViTConfig(**config, pap=settings))


def cost_rows(batch_size=64, rounds=21):
    """Time a training step and an evaluation of each arm, in turn, by the CPU clock.

    Returns one row per arm: the median over rounds of the ratio to symmetric, the milliseconds per
    batch, and the MB per image that autograd keeps for the backward pass.
    """
    device = torch.device("cpu")
    torch.set_num_threads(1)                            # idle threads would count as CPU time
    nets = {arm: build(arm) for arm in ARMS}
    images = torch.rand(batch_size, 3, 32, 32)
    steps = {}
    for arm, net in nets.items():
        for what in cost.STEPS:
            steps[arm, what] = partial(cost.take, what, net, images)
    times = cost.alternate(SimpleNamespace(clock="cpu", rounds=rounds), device, steps)
    rows = []
    for arm, net in nets.items():
        row = dict(arm=arm, batch_size=batch_size, kept_mb=cost.kept(net, images[:1]) / cost.MB)
        for what in cost.STEPS:
            own = times[arm, what]
            base = times["symmetric", what]
            row[f"{what}_ms"] = 1000 * median(own)
            row[f"{what}_ratio"] = median(x / y for x, y in zip(own, base))
        rows.append(row | common.origin(device))
    return rows


def cost_table(rows):
    """Format the costs: one row per arm."""
    body = []
    for row in rows:
        body.append([row["arm"], f"{row['train_ratio']:.2f}", f"{row['test_ratio']:.2f}",
                     f"{row['train_ms']:.1f}", f"{row['test_ms']:.1f}", f"{row['kept_mb']:.2f}"])
    return common.table(body, ["arm", "training step : symmetric", "evaluation : symmetric",
                               "training step, ms", "evaluation, ms", "kept MB per image"])


# --- tables ---------------------------------------------------------------------------------------

def read_rows(path=ROWS):
    """Read rows as {measure: {arm: {seed: (images,) in per cent}}}."""
    found = {}
    for row in common.read_log(path):
        for name, text in row["right"].items():
            worth = 100 / 45 if name == "15 corruptions" else 100
            of = found.setdefault(name, {}).setdefault(row["arm"], {})
            of[row["seed"]] = worth * unpacked(text)
    return found


def gap(found, name, arm, base):
    """Compare two arms in a measure, seed by seed: a Difference over seeds and images."""
    first = found.get(name, {}).get(arm, {})
    second = found.get(name, {}).get(base, {})
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return NONE
    return crossed([first[seed] - second[seed] for seed in seeds])


def primary_p(found):
    """Return p after Holm's correction over the six planned tests: {(measure, arm, base): p}."""
    keys = [(name, *pair) for pair in PRIMARY_PAIRS for name in PRIMARY]
    p = {}
    for key in keys:
        value = gap(found, *key).p
        p[key] = value if value == value else 1.0
    return holm(p)


def prediction(how, rows, found, name):
    """Return a function from log clean loss to accuracy, for `at_equal_loss`.

    how: "straight line" and "parabola" are fitted through the baseline networks of results/line,
    which were trained for 4 to 24 epochs. "own slope" is the slope within this study: one slope for
    all arms, each with a mean of its own.
    """
    if how == "own slope":
        losses = {(row["arm"], row["seed"]): row["loss"] for row in rows}
        across = down = 0.0
        for arm, of in found[name].items():
            x = np.log([losses[arm, seed] for seed in of])
            y = np.array([right.mean() for right in of.values()])
            across += ((x - x.mean()) * (y - y.mean())).sum()
            down += ((x - x.mean()) ** 2).sum()
        return np.poly1d([across / down, 0])
    networks = line.reference(line.stored("fresh"))
    log_loss, accuracy = line.points(networks, LINE_MEASURES[name])
    degree = {"straight line": 1, "parabola": 2}[how]
    return np.poly1d(np.polyfit(log_loss, accuracy, degree))


def at_equal_loss(rows, found, name, arm, base, how="straight line"):
    """Compare two arms in a measure at equal clean loss, seed by seed: a Difference.

    From each difference of accuracies, this function subtracts the difference that `prediction`
    gives for the two clean losses. The interval is over seeds; the prediction counts as exact.
    """
    losses = {(row["arm"], row["seed"]): row["loss"] for row in rows}
    first = found[name].get(arm, {})
    second = found[name].get(base, {})
    predict = prediction(how, rows, found, name)
    gaps = []
    for seed in sorted(first.keys() & second.keys()):
        predicted = predict(np.log(losses[arm, seed])) - predict(np.log(losses[base, seed]))
        gaps.append(first[seed].mean() - second[seed].mean() - predicted)
    return paired_t(gaps) if gaps else NONE


def equal_loss_table(rows, found):
    """Format the differences from symmetric attention at equal clean loss: one row per arm."""
    columns = [(name, how) for name in LINE_MEASURES for how in PREDICTIONS]
    body = []
    for arm in ARMS:
        if arm != "symmetric" and arm in found["clean"]:
            cells = [show(at_equal_loss(rows, found, name, arm, "symmetric", how))
                     for name, how in columns]
            body.append([f"{arm} minus symmetric", *cells])
    titles = [f"{name}, {how}" for name, how in columns]
    return common.table(body, ["difference in points at equal clean loss", *titles])


def power_table(found):
    """Format the planned tests: intervals that hold together, and the power of each test.

    The intervals of all six tests together contain their true values with a probability of at least
    95 % (Bonferroni). Power: the difference that a test detects with a probability of 80 %.
    """
    tests = len(PRIMARY) * len(PRIMARY_PAIRS)
    body = []
    for arm, base in PRIMARY_PAIRS:
        for name in PRIMARY:
            d = gap(found, name, arm, base)
            low, high = interval(d, 1 - 0.05 / tests)
            alone, first = (f"{detectable(d.error, d.df, n):.1f}" for n in (1, tests))
            body.append([f"{arm} minus {base}", name, show(d), f"{low:+.1f} to {high:+.1f}",
                         alone, first])
    return common.table(body, ["planned test", "measure", "95 % interval",
                               f"{tests} intervals together", "detectable, one test",
                               f"detectable, first of {tests}"])


def accuracy_table(found):
    """Format accuracies: one row per measure, one column per arm that was measured."""
    arms = [arm for arm in ARMS if arm in found["clean"]]
    body = []
    for name, of in found.items():
        cells = []
        for arm in arms:
            values = [x.mean() for x in of.get(arm, {}).values()]
            cells.append(f"{spread(values)} ({len(values)})" if values else "")
        body.append([name, *cells])
    return common.table(body, ["accuracy in %, mean ± sd (seeds)", *arms])


def difference_table(found):
    """Format differences: from symmetric attention, and of rpca from its controls."""
    pairs = [(arm, "symmetric") for arm in ARMS if arm != "symmetric"]
    pairs += [("rpca-4", base) for base in ("shrunk", "temperature", "moved", "rpc")]
    p = primary_p(found)
    body = []
    for arm, base in pairs:
        if not {arm, base} <= found["clean"].keys():
            continue
        cells = []
        for name in found:
            key = (name, arm, base)
            difference = gap(found, *key)
            cell = show(difference, bold=p.get(key, 1) < 0.05)
            if key in p and difference.n > 2:
                cell += f" p {show_p(p[key])}"
            cells.append(cell)
        body.append([f"{arm} minus {base}", *cells])
    return common.table(body, ["difference in points (95 % interval)", *found])


def area_table(rows):
    """Format the AUC of S in layer 0 after training: one row per arm."""
    body = []
    for arm in ARMS:
        mine = [row for row in rows if row["arm"] == arm]
        cells = [spread([row["auc"][kind] for row in mine], ".2f") for kind in KINDS]
        losses = spread([row["loss"] for row in mine], ".4f")
        if mine:
            body.append([arm, len(mine), losses, *cells])
    return common.table(body, ["arm", "seeds", "clean loss", *(f"AUC, {kind}" for kind in KINDS)])


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    flag = p.add_argument
    flag("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="arms (default: all)")
    flag("--seeds", nargs="+", type=int, default=[], help="train and measure these seeds")
    flag("--measure", nargs="+", default=[], help="measure these folders <arm>_s<seed>")
    flag("--cost", action="store_true", help="time every arm; replaces cost.jsonl")
    flag("--rows", type=Path, default=ROWS, help="file of the rows (default: the stored rows)")
    args = p.parse_args(argv)

    done = {(row["arm"], row["seed"]) for row in common.read_log(args.rows)}
    for seed in args.seeds:
        for arm in tqdm(args.arms, f"seed {seed}", disable=None):
            if (arm, seed) not in done:
                common.append_row(args.rows, measure(train(arm, seed)))
    for folder in args.measure:
        row = measure(folder)
        print(json.dumps({name: unpacked(text).mean() for name, text in row["right"].items()}))
        print(json.dumps(row["auc"]))

    if args.cost:
        costs = cost_rows()
        COSTS.write_text("")
        for row in costs:
            common.append_row(COSTS, row)

    rows = common.read_log(args.rows)
    found = read_rows(args.rows)
    if rows:
        print(f"{accuracy_table(found)}\n\n{difference_table(found)}\n")
        print(f"{power_table(found)}\n\n{equal_loss_table(rows, found)}\n\n{area_table(rows)}\n")
    if COSTS.exists():
        print(cost_table(common.read_log(COSTS)))


if __name__ == "__main__":
    common.run(main)
