"""What does RPC-Attention cost? Table 11 of the paper, counted and measured again.

    python -m referee.studies.cost                              # ViT-tiny at 224 px: all rows, side by side
    python -m referee.studies.cost --clock cpu --threads 1      # on a machine that does other work, too
    python -m referee.studies.cost --batch_size 256             # a GPU wants more to do
    python -m referee.studies.cost language                     # a training step of a language model
    python -m referee.studies.cost memory                       # what one attention keeps, step by step

The paper's "1.22M flop/sample" are 1.22 G multiply-adds: its M is G, and true FLOPs are twice that.
Norms are counted as fvcore does, 5 N C each: only so do all five rows round to the paper's. Softmax
and other elementwise work are left out. A step more in one layer is 2 N^2 C = 14.9 M, 1.3 % of the
model; what it takes of the clock is a question of the machine. FAN has no row in Table 11.

The paper's times are not throughput: at 0.079 s an image ImageNet would take 28 hours an epoch. So
the time of one image alone stands beside them, and throughput in a table of its own. What is
compared runs alternately in one process. A time is a median over rounds, a ratio the median of the
ratios within a round: another program that slows a whole round down does not count.

language: LM-mini, 17,510 words; "plain" is causal self-attention as nanoGPT writes it.
memory: autograd keeps what the backward pass will ask for. A fused attention asks for its inputs
and its output alone, so a PAP step leaves S, K2 and L: three tensors (B, H, N, D). "matrices" is
PyTorch's attention written out (SDPBackend.MATH), which keeps (B, H, N, N) as well.
"""

import argparse
import csv
import datetime
import gc
import math
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from statistics import median

if not __package__:
    sys.exit("error: start this in the repository's folder, as: python -m referee.studies.cost")

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.flop_counter import FlopCounterMode

import common
import fan
import lm
from attention import rpc_attention, symmetric_attention
from vit import SIZES, ViT, ViTConfig

MB, PIXELS = 2 ** 20, 224
MODELS = {                                              # the settings of ViTConfig, of FANConfig
    "softmax": dict(attn="softmax"),
    "symmetric": dict(attn="symmetric"),
    "rpc 4iter/layer1": dict(attn="rpc", pap=dict(n_iter=4)),
    "rpc 5iter/layer1": dict(attn="rpc", pap=dict(n_iter=5)),
    "rpc 6iter/layer1": dict(attn="rpc", pap=dict(n_iter=6)),
    "rpc 2iter/all-layer": dict(attn="rpc", pap=dict(n_iter=2, lambd=3.0), rpc_layers="all"),
    "fan softmax": dict(attn="softmax"),
    "fan symmetric": dict(attn="symmetric"),
    "fan rpc 4iter/layer1": dict(attn="rpc", pap=dict(n_iter=4)),
}
NORMS = {nn.LayerNorm: 5, nn.BatchNorm2d: 2}            # operations a number, as fvcore counts
PAPER = Path(__file__).parents[1] / "reproduce/paper.csv"


def get_args():
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    whole = common.number(int, 1)
    p.add_argument("what", nargs="?", choices=STUDIES, default="models")
    p.add_argument("--model", choices=SIZES, default="tiny", help="models: width, depth and heads")
    p.add_argument("--batch_size", type=whole, help="8 images for throughput, 16 windows a step")
    p.add_argument("--rounds", type=whole, default=15, help="counted ones; one more warms up")
    p.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: of all threads")
    p.add_argument("--threads", type=whole, help="of the CPU")
    p.add_argument("--device", help="cuda (then in bf16), mps or cpu; picked automatically")
    p.add_argument("--out", help="append the rows to this file, one JSON object a line")
    return p.parse_args()


# --- tables ---------------------------------------------------------------------------------------

def plain(x):
    """A cell: numbers below 10 with three digits after the point."""
    form = (",.3f" if x < 10 else ",.1f") if isinstance(x, float) else "," * isinstance(x, int)
    return format(x, form)


def report(title, device, rows, tables, out):
    """Print tables, {title: columns}, of rows (dicts); append the rows to the file `out`."""
    print(f"{title}\n{common.describe(device)}; torch {torch.__version__}")
    for what, columns in tables.items():
        cells = [[plain(row.get(column, "-")) for column in columns] for row in rows]
        print(f"\n{what}\n\n{common.table(cells, columns)}")
    about = dict(command=" ".join(["python -m referee.studies.cost", *sys.argv[1:]]),
                 hardware=common.describe(device), torch=torch.__version__,
                 date=f"{datetime.date.today()}")
    for row in rows if out else ():
        common.Log(out).append(about | row)


# --- time -----------------------------------------------------------------------------------------

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


def ratio(times, name, other):
    """Median of the ratios within a round."""
    return median(x / y for x, y in zip(times[name], times[other]))


# --- memory ---------------------------------------------------------------------------------------

def fresh(function, cases):
    """[function(*case) of all cases] in a process whose C library gives freed tensors back at once.

    The library is glibc; in others the memory of one case may serve the next and go unseen.
    """
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"          # read by a process when it starts
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return list(process.map(function, *zip(*cases)))


def resident(field):
    """VmRSS (memory of this process now) or VmHWM (its maximum) in bytes."""
    with open("/proc/self/status") as f:
        return next(1024 * int(line.split()[1]) for line in f if line.startswith(field))


def peak_growth(step, device):
    """Bytes by which step() raises the memory in use at its peak; nan where nobody counts them.

    CUDA: of PyTorch's allocator. CPU: of the resident memory, in a process of its own (`fresh`) in
    which such a step has run before. Linux only.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    if device.type != "cpu" or not os.path.exists("/proc/self/clear_refs"):
        return math.nan
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")                                                # the maximum starts again here
    before = resident("VmRSS")
    step()
    return resident("VmHWM") - before


def peak_mb(name, size, what, device):
    """MB of a step at most with one image, weights and gradients included; see peak_growth.

    Returns the median of three steps and their range, the noise.
    """
    device = torch.device(device)
    model, image = build(name, size).to(device), torch.rand(1, 3, PIXELS, PIXELS, device=device)

    def growth():
        model.zero_grad(set_to_none=True)
        return peak_growth(lambda: STEPS[what](model, image), device)

    growth()                                                # libraries load, threads start
    weights = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    found = [growth() for _ in range(3)]
    return (weights + median(found)) / MB, (max(found) - min(found)) / MB


def memory_columns(peaks, what, name):
    """Memory of a model and what it has more than symmetric, if above twice the widest range.

    peaks: {(model, "train" or "test"): (MB, range)}.
    """
    noise = max(wide for (_, of), (_, wide) in peaks.items() if of == what)
    mb, base = (peaks[of, what][0] for of in (name, base_of(name)))
    found = {f"{what} MB": mb, f"{what} MB more": mb - base}
    return {column: x for column, x in found.items() if abs(x) > 2 * noise}


# --- the models of Table 11 -----------------------------------------------------------------------

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


def base_of(name):
    """The model with which this one is compared."""
    return "fan symmetric" if name.startswith("fan") else "symmetric"


def multiply_adds(model):
    """Multiply-adds of one image by PyTorch's counter, and what NORMS take."""
    norms = []

    def add(module, args, out):
        norms.extend(each * out.numel() for kind, each in NORMS.items() if isinstance(module, kind))

    hook = register_module_forward_hook(add)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(torch.zeros(1, 3, PIXELS, PIXELS))
    hook.remove()
    return counter.get_total_flops() / 2 + sum(norms)


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
TABLES = {
    "Size; the paper as printed, its M of multiply-adds is G":
        ("model", "parameters", "paper: parameters", "G multiply-adds", "paper: flop/sample"),
    "A training step of one image, forward and backward; ratios to symmetric":
        ("model", "train ms", "paper: train ms", "train ratio", "paper: train ratio"),
    "A test step of one image":
        ("model", "test ms", "paper: test ms", "test ratio", "paper: test ratio"),
    "Throughput in batches; ratios of times to symmetric":
        ("model", "train images/s", "train batch ratio", "test images/s", "test batch ratio"),
    "Most memory with one image, and what it is more than symmetric; -: below the noise":
        ("model", "train MB", "paper: train MB", "train MB more", "paper: train MB more",
         "test MB", "paper: test MB"),
}


def paper_columns(name):
    """Table 11's figures of a model, and what follows from them, by column; {} if it has none."""
    with open(PAPER, newline="") as file:
        cells = {(row["row"], row["column"]): row["value"] for row in csv.DictReader(file)
                 if row["table"] == "11"}
    name, base = name.replace("symmetric", "SymViT").replace("rpc", "RPC"), "SymViT"
    if (name, "parameters (M)") not in cells:
        return {}
    row = {"paper: parameters": cells[name, "parameters (M)"] + "M",
           "paper: flop/sample": cells[name, "multiply-adds (G)"] + "M"}
    for what in STEPS:
        seconds, least = (float(cells[of, f"s/sample {what}"]) for of in (name, base))
        mb, fewest = (int(cells[of, f"memory {what} (MB)"]) for of in (name, base))
        row |= {f"paper: {what} ms": 1e3 * seconds, f"paper: {what} ratio": seconds / least,
                f"paper: {what} MB": mb, f"paper: {what} MB more": mb - fewest}
    return row


def models(args, device, timed):
    """Count and time every model of the table, a step of one image and one of a batch."""
    names, batch = list(MODELS), args.batch_size or 8
    if find_spec("timm"):
        names.insert(0, "timm softmax")
    else:
        print("timm is not installed: its row is left out")
    nets = {name: build(name, args.model) for name in names}
    rows = {name: {"model": name, "parameters": sum(p.numel() for p in net.parameters()),
                   "G multiply-adds": multiply_adds(net) / 1e9} for name, net in nets.items()}
    steps = {}
    for n in {1, batch}:
        images = torch.rand(n, 3, PIXELS, PIXELS, device=device)
        for what, step in STEPS.items():
            steps |= {(name, what, n): partial(step, net.to(device), images)
                      for name, net in nets.items()}
    times = alternate(args, device, steps)
    cases = [(name, what) for what in STEPS for name in names]
    peaks = fresh(peak_mb, [(name, args.model, what, str(device)) for name, what in cases])
    peaks = dict(zip(cases, peaks))
    for what in STEPS:
        for name, row in rows.items():
            for n, kind in ((1, "ratio"), (batch, "batch ratio")):
                row[f"{what} {kind}"] = ratio(times, (name, what, n), (base_of(name), what, n))
            row[f"{what} ms"] = 1e3 * median(times[name, what, 1])
            row[f"{what} images/s"] = batch / median(times[name, what, batch])
            row |= memory_columns(peaks, what, name)
            row |= paper_columns(name) if args.model == "tiny" else {}
    report(f"ViT-{args.model}, {PIXELS} px, batches of {batch}{timed}", device,
           list(rows.values()), TABLES, args.out)


# --- a language model -----------------------------------------------------------------------------

WORDS, CUTOFFS = 17510, (2000, 10000)                                   # a small WikiText
KINDS = {"plain": "softmax", "softmax": "softmax", "symmetric": "symmetric",
         "rpc 4iter/layer1": "rpc"}


class PlainAttention(nn.Module):
    """Causal self-attention as nanoGPT writes it, without biases and dropout."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        B, T, C = x.shape
        heads = (B, T, self.num_heads, C // self.num_heads)
        q, k, v = (t.view(heads).transpose(1, 2) for t in self.qkv(x).split(C, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


def language_model(name):
    """LM-mini with the attention of this name."""
    size = lm.SIZES["mini"]
    model = lm.LM(lm.LMConfig(WORDS, **size, attn=KINDS[name], rpc_layers=(0,),
                              cutoffs=CUTOFFS, dropout=0))
    for block in model.blocks if name == "plain" else ():
        block.attn = PlainAttention(size["embed_dim"], size["num_heads"])
    return model


def language_step(model, text):
    """Forward and backward pass. text: (B, T + 1) int64."""
    model.zero_grad(set_to_none=True)
    with common.autocast(text.device, text.is_cuda):
        loss = model(text[:, :-1], text[:, 1:]).mean()
    loss.backward()


def language(args, device, timed):
    """Time a training step of LM-mini with each kind of attention."""
    batch, context = args.batch_size or 16, lm.SIZES["mini"]["context"]
    text = torch.randint(WORDS, (batch, context + 1), device=device)
    steps = {name: partial(language_step, language_model(name).to(device), text) for name in KINDS}
    times = alternate(args, device, steps)
    rows = [{"model": name, "step ms": 1e3 * median(t), "tokens/s": batch * context / median(t),
             "to plain": ratio(times, name, "plain"),
             "to symmetric": ratio(times, name, "symmetric")} for name, t in times.items()]
    title = f"LM-mini, batches of {batch} windows of {context} tokens{timed}"
    report(title, device, rows, {"A training step, forward and backward": list(rows[0])}, args.out)


# --- one attention --------------------------------------------------------------------------------

SHAPE = 8, 3, 1025, 64                      # B, H, N, D: ViT-tiny's heads, 8 images of 512 px


def kept(shape, n_iter, matrices, device):
    """Bytes that autograd keeps of one attention on random k, v (B, H, N, D), inputs not counted.

    n_iter 0: symmetric attention. matrices: attention written out.
    """
    B, H, N, D = shape
    kv = torch.randn(B, N, 2, H, D, device=device).permute(2, 0, 3, 1, 4)   # as in the module
    kv.requires_grad_()
    sizes = {}

    def pack(x):
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    written_out = sdpa_kernel(SDPBackend.MATH) if matrices else nullcontext()
    with saved_tensors_hooks(pack, lambda x: x), written_out:
        if n_iter:
            rpc_attention(kv[0], kv[1], n_iter)
        else:
            symmetric_attention(kv[0], kv[1])
    sizes.pop(kv.untyped_storage().data_ptr(), None)
    return sum(sizes.values())


def memory(args, device, timed):
    """Count what one attention keeps for the backward pass."""
    tensor, matrix = 4 * math.prod(SHAPE), 4 * math.prod(SHAPE[:3]) * SHAPE[2]
    cases = {"symmetric": (0, False), **{f"rpc n = {n}": (n, False) for n in (1, 2, 4, 6)},
             "symmetric, matrices": (0, True), "rpc n = 6, matrices": (6, True)}
    found = {name: kept(SHAPE, *case, device) for name, case in cases.items()}
    rows = [{"attention": name, "kept / BHND": size / tensor, "kept / NxN": size / matrix,
             "kept MB": size / MB} for name, size in found.items()]
    title = (f"One attention, (B, H, N, D) = {SHAPE}, float32\n"
             f"BHND: a tensor (B, H, N, D), {tensor / MB:.1f} MB. NxN: one (B, H, N, N), "
             f"{matrix / MB:.1f} MB")
    report(title, device, rows, {"Kept for the backward pass": list(rows[0])}, args.out)


STUDIES = dict(models=models, language=language, memory=memory)


def main():
    args = get_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    device = common.setup(args.device)[0]
    timed = f", {args.clock} clock, medians of {args.rounds} rounds"
    STUDIES[args.what](args, device, timed)


if __name__ == "__main__":
    common.run(main)
