"""What does RPC-Attention cost? Table 11 of the paper, counted and measured again.

    python -m studies.cost                              # ViT-tiny at 224 px: all rows, side by side
    python -m studies.cost --clock cpu --threads 1      # on a machine that does other work, too
    python -m studies.cost --batch_size 256             # a GPU wants more to do

The paper's "1.22M flop/sample" are 1.22 G multiply-adds: its M is G, and true FLOPs are twice that.
PyTorch's counter (torch.utils.flop_counter) finds in a ViT, for an image,

    (N - 1) 3 p^2 C             patches of p x p pixels; N tokens with the class token, C wide
    N C^2 (P + 1 + 8)           a layer: P projections (k, v; softmax: q too), output, MLP
    2 N^2 C n                   a layer: K K^T and A V, n times (n = 1 but for RPC-Attention)
    C classes                   the head

To this comes 5 N C for each of the 2 depth + 1 LayerNorms: so counts fvcore, and only so do all
five rows round to the paper's. Softmax and other elementwise work are left out. A step more in one
layer is 2 N^2 C = 14.9 M, 1.3 % of the model; what it takes of the clock is a question of the
machine. FAN (App. E.7) has no row in Table 11; here it is counted and measured alike.

The paper's times are not throughput: at 0.079 s an image ImageNet would take 28 hours an epoch. So
the time of one image alone stands beside them, and throughput in a table of its own.

What is compared runs alternately in one process. A time is a median over rounds, a ratio the median
of the ratios within a round: another program that slows a whole round down does not count.
"""

import argparse
import sys
import time
from functools import partial
from statistics import median

if not __package__:
    sys.exit("error: start this in the repository's folder, as: python -m studies.cost")

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import common
import fan
from studies.memory import MB, fresh, peak_growth
from studies.tables import report
from vit import SIZES, ViT, ViTConfig

PIXELS = 224
MODELS = {                                              # the settings of ViTConfig, of FANConfig
    "softmax": dict(attn="softmax"),
    "symmetric": dict(attn="symmetric"),
    "rpc 4iter/layer1": dict(attn="rpc", n_iter=4),
    "rpc 5iter/layer1": dict(attn="rpc", n_iter=5),
    "rpc 6iter/layer1": dict(attn="rpc", n_iter=6),
    "rpc 2iter/all-layer": dict(attn="rpc", n_iter=2, lambd=3.0, rpc_layers="all"),
    "fan softmax": dict(attn="softmax"),
    "fan symmetric": dict(attn="symmetric"),
    "fan rpc 4iter/layer1": dict(attn="rpc", n_iter=4),
}
NORMS = {nn.LayerNorm: 5, nn.BatchNorm2d: 2}            # operations a number, as fvcore counts
# Table 11: parameters, flop/sample, seconds per sample and MB, each in training and in test.
PAPER = {
    "symmetric": ("5.2M", "1.17M", 0.079, 0.010, 1435, 1181),
    "rpc 4iter/layer1": ("5.2M", "1.22M", 0.082, 0.010, 1441, 1181),
    "rpc 5iter/layer1": ("5.2M", "1.23M", 0.084, 0.010, 1443, 1181),
    "rpc 6iter/layer1": ("5.2M", "1.25M", 0.085, 0.011, 1443, 1181),
    "rpc 2iter/all-layer": ("5.2M", "1.35M", 0.092, 0.017, 1461, 1181),
}


def get_args():
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--model", choices=SIZES, default="tiny", help="width, depth and heads")
    p.add_argument("--batch_size", type=common.number(int, 1), default=8, help="for throughput")
    return timing_flags(p).parse_args()


def timing_flags(p):
    """How to measure; returns the parser."""
    whole = common.number(int, 1)
    p.add_argument("--rounds", type=whole, default=15, help="counted ones; one more warms up")
    p.add_argument("--clock", choices=["wall", "cpu"], default="wall",
                   help="cpu: of all threads, added up")
    p.add_argument("--threads", type=whole, help="CPU threads; torch's choice by default")
    p.add_argument("--device", help="cuda (then in bf16), mps or cpu; picked automatically")
    p.add_argument("--out", help="append the rows to this file, one JSON object a line")
    return p


# --- counting -------------------------------------------------------------------------------------

def build(name, size):
    """A model of the table. size: a key of vit.SIZES."""
    if name == "timm softmax":
        from timm.models.vision_transformer import VisionTransformer
        return VisionTransformer(**SIZES[size])
    how = dict(MODELS[name])
    if how.get("rpc_layers") == "all":
        how["rpc_layers"] = range(SIZES[size]["depth"])
    if name.startswith("fan"):
        shape = fan.SIZES.get(f"fan_{size}", SIZES[size])
        return fan.FAN(fan.FANConfig(**shape, **how))
    return ViT(ViTConfig(**SIZES[size], **how))


def formula(config):
    """Multiply-adds of one image, the formula above. config: of a ViT."""
    c, N, C = config, config.num_tokens, config.embed_dim
    layers = 0
    for i in range(c.depth):
        attn = c.layer_attn(i)
        projections = 2 if attn in ("symmetric", "rpc") else 3
        steps = c.n_iter if attn.startswith("rpc") else 1
        layers += N * C ** 2 * (projections + 1 + 2 * c.mlp_ratio) + 2 * N ** 2 * C * steps
    patches = (N - 1) * 3 * c.patch_size ** 2 * C
    norms = 5 * N * C * (2 * c.depth + 1)
    return patches + layers + C * c.num_classes + norms


def multiply_adds(model):
    """Multiply-adds of one image by PyTorch's counter, and what NORMS take."""
    norms, hooks = [], []
    for kind, each in NORMS.items():
        def add(module, args, out, each=each):
            norms.append(each * out.numel())

        hooks += [m.register_forward_hook(add) for m in model.modules() if isinstance(m, kind)]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(torch.zeros(1, 3, PIXELS, PIXELS))
    for hook in hooks:
        hook.remove()
    return counter.get_total_flops() / 2 + sum(norms)


# --- measuring ------------------------------------------------------------------------------------

def training_step(model, images):
    """Forward and backward pass, without an optimiser; bf16 on a GPU. images: (B, 3, S, S)."""
    labels = torch.zeros(len(images), dtype=torch.long, device=images.device)
    model.train().zero_grad(set_to_none=True)
    with common.autocast(images.device, images.is_cuda):
        loss = F.cross_entropy(model(images), labels)
    loss.backward()


@torch.no_grad()
def test_step(model, images):
    with common.autocast(images.device, images.is_cuda):
        model.eval()(images)


STEPS = {"train": training_step, "test": test_step}


def start(args):
    """The device, as --threads and --device ask."""
    if args.threads:
        torch.set_num_threads(args.threads)
    return common.setup(args.device)[0]


def alternate(args, device, steps):
    """{name: [seconds of steps[name]() in every round]}; in reverse order every other round.

    A first round warms up and is not counted: allocation, libraries, file cache.
    """
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    times = {name: [] for name in steps}
    for i in range(args.rounds + 1):
        for name in list(steps)[::-1 if i % 2 else 1]:
            start = clock()
            steps[name]()
            if device.type != "cpu":
                getattr(torch, device.type).synchronize()
            times[name].append(clock() - start)
    return {name: t[1:] for name, t in times.items()}


def about(args):
    """How time was measured, in words."""
    return f"{args.clock} clock, medians of {args.rounds} rounds"


def ratio(times, name, other):
    """Median of the ratios within a round."""
    return median(x / y for x, y in zip(times[name], times[other]))


def peak_mb(name, size, what, device):
    """The most memory of a step with one image, weights and gradients included; see peak_growth."""
    device = torch.device(device)
    model, image = build(name, size).to(device), torch.rand(1, 3, PIXELS, PIXELS, device=device)
    STEPS[what](model, image)
    model.zero_grad(set_to_none=True)
    weights = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    return (weights + peak_growth(lambda: STEPS[what](model, image), device)) / MB


# --- the models of Table 11 -----------------------------------------------------------------------

TABLES = {
    "Size; the paper as printed, its M of multiply-adds is G":
        ("model", "parameters", "paper: parameters", "G multiply-adds", "paper: flop/sample"),
    "A training step of one image, forward and backward; ratios to symmetric":
        ("model", "train ms", "paper: train ms", "train ratio", "paper: train ratio"),
    "A test step of one image":
        ("model", "test ms", "paper: test ms", "test ratio", "paper: test ratio"),
    "Throughput in batches; ratios of times to symmetric":
        ("model", "train images/s", "train batch ratio", "test images/s", "test batch ratio"),
    "Most memory with one image, and what it is more than symmetric":
        ("model", "train MB", "paper: train MB", "train MB more", "paper: train MB more",
         "test MB", "paper: test MB"),
}


def paper_columns(name):
    """Table 11's figures of a model, and what follows from them, by column; {} if it has none."""
    if name not in PAPER:
        return {}
    parameters, flop, *numbers = PAPER[name]
    base = PAPER["symmetric"][2:]
    row = {"paper: parameters": parameters, "paper: flop/sample": flop}
    for what, i in (("train", 0), ("test", 1)):
        row[f"paper: {what} ms"] = 1e3 * numbers[i]
        row[f"paper: {what} ratio"] = numbers[i] / base[i]
        row[f"paper: {what} MB"] = numbers[i + 2]
        row[f"paper: {what} MB more"] = numbers[i + 2] - base[i + 2]
    return row


def main():
    args = get_args()
    device = start(args)
    names = list(MODELS)
    try:
        import timm  # noqa: F401
        names.insert(0, "timm softmax")
    except ImportError:
        print("timm is not installed: its row is left out")
    nets = {name: build(name, args.model) for name in names}
    counts = {name: multiply_adds(net) for name, net in nets.items()}

    # A step of one image and one of a batch, of every model.
    steps = {}
    for n in (1, args.batch_size):
        images = torch.rand(n, 3, PIXELS, PIXELS, device=device)
        for what, step in STEPS.items():
            steps |= {(name, what, n): partial(step, net.to(device), images)
                      for name, net in nets.items()}
    times = alternate(args, device, steps)
    cases = [(name, args.model, what, str(device)) for name in names for what in STEPS]
    peaks = dict(zip(((case[0], case[2]) for case in cases), fresh(peak_mb, cases)))

    rows = []
    for name, net in nets.items():
        base = "fan symmetric" if name.startswith("fan") else "symmetric"
        row = {"model": name, "parameters": sum(p.numel() for p in net.parameters()),
               "G multiply-adds": counts[name] / 1e9}
        for what in STEPS:
            for n, kind in ((1, "ratio"), (args.batch_size, "batch ratio")):
                row[f"{what} {kind}"] = ratio(times, (name, what, n), (base, what, n))
            row[f"{what} ms"] = 1e3 * median(times[name, what, 1])
            row[f"{what} images/s"] = args.batch_size / median(times[name, what, args.batch_size])
            row[f"{what} MB"] = peaks[name, what]
            row[f"{what} MB more"] = peaks[name, what] - peaks[base, what]
        known = paper_columns(name) if args.model == "tiny" else {}
        rows.append(row | known)
    title = f"ViT-{args.model}, {PIXELS} px, batches of {args.batch_size}"
    report(f"{title}, {about(args)}", device, rows, TABLES, args.out)


if __name__ == "__main__":
    common.run(main)
