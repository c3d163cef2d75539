"""What does each attention cost? Time and memory of the models, and of one attention.

    python -m studies.cost                     # models: every attention in a ViT-tiny at 224 px
    python -m studies.cost models --compile --batch_size 256        # the same on a GPU, compiled
    python -m studies.cost memory              # one attention, 1025 tokens: does it grow by N x N?
    python -m studies.cost language --batch_size 96 --model paper --vocab_size 267735 \\
        --cutoffs 20000 40000 200000 --compile                      # a language model's step

What is compared runs alternately in one process. A time is a median over rounds; a ratio is the
median of the ratios within a round, so that another program which slows a whole round down does not
count. On a shared machine, `--clock cpu --threads 1` measures CPU time, which waiting does not
change. --out appends every row as a line of JSON.
"""

import argparse
import datetime
import gc
import math
import os
import platform
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context
from statistics import median
from unittest.mock import patch

if not __package__:
    sys.exit("error: start this in the repository's folder, as: python -m studies.cost")

import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

import attention
import common
import lm
from vit import SIZES, ViT, ViTConfig

MB = 2 ** 20


def get_args(argv):
    """The flags; `models` is the default command."""
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = p.add_subparsers(dest="what", required=True)
    whole = common.number(int, 1)

    def command(function):
        c = commands.add_parser(function.__name__, help=function.__doc__.splitlines()[0],
                                description=function.__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
        c.set_defaults(function=function)
        c.add_argument("--device", help="cuda, mps or cpu; picked automatically")
        c.add_argument("--threads", type=whole, help="CPU threads; torch's choice by default")
        c.add_argument("--out", help="append the rows to this file, one JSON object a line")
        return c.add_argument

    flag = command(models)
    timing_flags(flag)
    flag("--model", choices=SIZES, default="tiny", help="width, depth and heads")
    flag("--image_size", type=whole, default=224, help="pixels, a multiple of --patch_size")
    flag("--patch_size", type=whole, default=16, help="pixels")
    flag("--batch_size", type=whole, default=8, help="images per step; 256 keep a GPU busy")

    flag = command(memory)
    flag("--tokens", type=whole, default=1025, help="N; 512 px in patches of 16, class token")
    flag("--batch_size", type=whole, default=8, help="B")
    flag("--heads", type=whole, default=3, help="H")
    flag("--head_dim", type=whole, default=64, help="D")
    flag("--n_iter", type=whole, nargs="+", default=[1, 2, 3, 4, 5, 6], help="PAP steps, one a row")

    flag = command(language)
    timing_flags(flag)
    flag("--model", choices=lm.SIZES, default="mini", help="width, depth, heads and context")
    flag("--vocab_size", type=common.number(int, 2), default=17510, help="words")
    flag("--cutoffs", type=int, nargs="*", default=[2000, 10000], help="none: full softmax")
    flag("--batch_size", type=whole, default=16, help="windows per step")

    if not argv or argv[0].startswith("--") and argv[0] != "--help":
        argv = ["models", *argv]
    return p.parse_args(argv)


def timing_flags(flag):
    """What `models` and `language` share."""
    flag("--rounds", type=common.number(int, 1), default=15, help="counted; one more warms up")
    flag("--clock", choices=["wall", "cpu"], default="wall", help="cpu: of all threads, added up")
    flag("--amp", action=argparse.BooleanOptionalAction, help="bf16 autocast; default: on GPUs")
    flag("--compile", action="store_true", help="torch.compile every model")


# --- measuring and printing -----------------------------------------------------------------------

def synchronize(device):
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def alternate(args, device, cases, step):
    """{name: [seconds of step(case) in every round]}; in reverse order every other round.

    A first round warms up and is not counted: allocation, compilation, file cache.
    """
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    times = {name: [] for name in cases}
    for i in range(args.rounds + 1):
        names = list(cases)
        if i % 2:
            names.reverse()
        for name in names:
            synchronize(device)
            start = clock()
            step(cases[name])
            synchronize(device)
            times[name].append(clock() - start)
    return {name: t[1:] for name, t in times.items()}


def ratio(times, name, other):
    """Median of the ratios within a round."""
    return median(x / y for x, y in zip(times[name], times[other]))


def peak_mb(device, net, step):
    """A column of a table: what step(net) adds to the CUDA memory in use; none elsewhere."""
    if device.type != "cuda":
        return {}
    step(net)                                    # from here on net's gradients are in use
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(net)
    return {"peak MB": (torch.cuda.max_memory_allocated() - before) / MB}


def about(args, amp):
    """How it was measured, for a title."""
    number = "bf16 autocast" if amp else "float32"
    compiled = ", compiled" if args.compile else ""
    return f"{number}{compiled}, {args.clock} clock, medians of {args.rounds} rounds"


def hardware(device):
    """The machine in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    names = [platform.processor() or platform.machine()]
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as f:
            names += [line.split(": ")[1].strip() for line in f if line.startswith("model name")]
    cpu = names[-1]
    return f"{device.type}, {cpu}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def cell(x):
    """A cell of a table: numbers below 10 with three digits after the point; None is empty."""
    if isinstance(x, float):
        return f"{x:,.3f}" if x < 10 else f"{x:,.1f}"
    return "" if x is None else str(x)


def report(args, device, title, rows):
    """Print rows (dicts with the same keys) as a table; append them to --out."""
    print(f"\n{title}\n{hardware(device)}; torch {torch.__version__}\n")
    print(common.table([[cell(x) for x in row.values()] for row in rows], list(rows[0])))
    if args.out:
        command = " ".join(["python -m studies.cost", *sys.argv[1:]])
        for row in rows:
            common.write_log(args.out, dict(
                command=command, what=args.what, hardware=hardware(device),
                torch=torch.__version__, date=f"{datetime.date.today()}", **row))


# --- models ---------------------------------------------------------------------------------------

def build_models(args):
    """{name: (model, name of what it is compared with)}."""
    shape = dict(image_size=args.image_size, patch_size=args.patch_size, **SIZES[args.model])

    def ours(attn, **kw):
        return ViT(ViTConfig(attn=attn, **shape, **kw))

    layers = range(shape["depth"])
    cases = {"softmax": (ours("softmax"), "timm softmax"),
             "symmetric": (ours("symmetric"), "softmax"),
             "rpc 4iter/layer1": (ours("rpc", n_iter=4), "symmetric"),
             "rpc 6iter/layer1": (ours("rpc", n_iter=6), "symmetric"),
             "rpc 2iter/all-layer": (ours("rpc", n_iter=2, lambd=3.0, rpc_layers=layers),
                                     "symmetric")}
    try:
        from timm.models.vision_transformer import VisionTransformer
    except ImportError:
        print("timm is not installed: its row is left out")
        return {**cases, "softmax": (cases["softmax"][0], "softmax")}
    theirs = VisionTransformer(img_size=shape.pop("image_size"), **shape)
    return {"timm softmax": (theirs, "timm softmax"), **cases}


def models(args, device):
    """Time of a training step's forward and backward pass, and of inference, for every attention.

    train ms: forward, cross-entropy, backward of one batch, without optimiser; eval ms: forward
    without gradients. ratio: to the model in the next column. peak MB (CUDA): of the training step,
    weights and gradients included.
    """
    amp = device.type == "cuda" if args.amp is None else args.amp
    torch.manual_seed(0)
    images = torch.rand(args.batch_size, 3, args.image_size, args.image_size, device=device)
    labels = torch.randint(1000, (args.batch_size,), device=device)
    cases = build_models(args)
    nets = {name: model.to(device) for name, (model, _) in cases.items()}
    if args.compile:
        nets = {name: torch.compile(net) for name, net in nets.items()}

    def train(net):
        net.zero_grad(set_to_none=True)
        with common.autocast(device, amp):
            loss = F.cross_entropy(net(images), labels)
        loss.backward()

    @torch.no_grad()
    def evaluate(net):
        with common.autocast(device, amp):
            net(images)

    train_times = alternate(args, device, nets, train)
    for net in nets.values():
        net.eval().zero_grad(set_to_none=True)
    eval_times = alternate(args, device, nets, evaluate)

    rows = []
    for name, (model, other) in cases.items():
        t, e = median(train_times[name]), median(eval_times[name])
        row = {"model": name, "train ms": 1e3 * t, "images/s": args.batch_size / t,
               "ratio": ratio(train_times, name, other), "to": other,
               "eval ms": 1e3 * e, "eval images/s": args.batch_size / e,
               "eval ratio": ratio(eval_times, name, other)}
        for column, peak in peak_mb(device, nets[name].train(), train).items():
            own = 2 * sum(p.numel() * p.element_size() for p in model.parameters())
            row[column] = peak + own / MB
        rows.append(row)
    report(args, device, f"ViT-{args.model}, {args.image_size} px, patch {args.patch_size}, batch "
           f"{args.batch_size}, {about(args, amp)}", rows)


# --- memory ---------------------------------------------------------------------------------------

def naive(q, k, v, **_):
    """`attention.naive_attention` in the place of the fused one: autograd keeps N x N matrices."""
    return attention.naive_attention(q, k, v)


def resident_bytes(field):
    """VmRSS (memory of this process now) or VmHWM (its maximum) in bytes; Linux."""
    with open("/proc/self/status") as f:
        return next(1024 * int(line.split()[1]) for line in f if line.startswith(field))


def forward_backward(shape, n_iter, matrices, device, kept=None):
    """Bytes by which memory grows in one attention, forward and backward; see `measure_memory`.

    kept: a dict that receives {address: bytes} of what autograd saves.
    """
    B, H, N, D = shape
    kv = torch.randn(B, N, 2, H, D, device=device).permute(2, 0, 3, 1, 4)   # as in the module
    kv.requires_grad_()
    gradient = torch.ones(B, N, H, D, device=device).transpose(1, 2)
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        with open("/proc/self/clear_refs", "w") as f:
            f.write("5")                                            # the maximum starts again here
        before = resident_bytes("VmRSS")

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    attend = naive if matrices else attention.softmax_attention
    watch = nullcontext() if kept is None else saved_tensors_hooks(pack, lambda x: x)
    with watch, patch.object(attention, "softmax_attention", attend):
        if n_iter:
            out = attention.rpc_attention(kv[0], kv[1], n_iter)
        else:
            out = attention.symmetric_attention(kv[0], kv[1])
    if kept is not None:
        kept.pop(kv.untyped_storage().data_ptr(), None)             # the inputs do not count
    out.backward(gradient)
    synchronize(device)
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() - before
    return resident_bytes("VmHWM") - before


def measure_memory(shape, n_iter, matrices, device):
    """Bytes (kept for backward, peak) of one attention beyond its inputs k and v.

    shape: (B, H, N, D). n_iter 0: symmetric attention. matrices: every step as `naive`. kept: the
    different storages that autograd saves. peak: of the CUDA allocator; on the CPU the growth of
    the largest resident size, for which the process must be a fresh one.
    """
    B, H, N, D = shape
    device, kept = torch.device(device), {}
    forward_backward((B, H, 16, D), n_iter, matrices, device)       # libraries load, threads start
    gc.collect()
    peak = forward_backward(shape, n_iter, matrices, device)
    forward_backward(shape, n_iter, matrices, device, kept)
    return sum(kept.values()), peak


def measure_in_fresh_process(*how):
    """`measure_memory` in a process whose C library gives freed tensors back at once (glibc)."""
    with patch.dict(os.environ, MALLOC_MMAP_THRESHOLD_="65536"):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
            return fresh.submit(measure_memory, *how).result()


def memory(args, device):
    """Memory of one attention, forward and backward, in units of a (B, H, N, D) and of an N x N.

    kept: what autograd saves for the backward pass. peak: the largest use beyond the inputs k and
    v, gradients included; on the CPU it is the growth of a fresh process's resident memory, good to
    about one BHND (Linux only). BHND: one float32 tensor (B, H, N, D). NxN: one float32 tensor
    (B, H, N, N). "matrices" rows keep softmax(K2 K2^T): the same loop, the product written out.
    """
    linux = os.path.exists("/proc/self/clear_refs")
    if device.type not in ("cuda", "cpu") or device.type == "cpu" and not linux:
        raise ValueError("studies.cost memory needs CUDA, or Linux for measuring the CPU")
    shape = (args.batch_size, args.heads, args.tokens, args.head_dim)
    bhnd = 4 * math.prod(shape)
    matrix = 4 * args.batch_size * args.heads * args.tokens ** 2
    measure = measure_memory if device.type == "cuda" else measure_in_fresh_process
    cases = {"symmetric": (0, False), **{f"rpc n = {n}": (n, False) for n in args.n_iter}}
    most = args.n_iter[-1]
    cases.update({"symmetric, matrices": (0, True), f"rpc n = {most}, matrices": (most, True)})

    rows = []
    for name, (n_iter, matrices) in cases.items():
        kept, peak = measure(shape, n_iter, matrices, str(device))
        rows.append({"attention": name,
                     "kept MB": kept / MB, "/ BHND": kept / bhnd, "/ NxN": kept / matrix,
                     "peak MB": peak / MB, "peak / BHND": peak / bhnd, "peak / NxN": peak / matrix})
    report(args, device, f"one attention, (B, H, N, D) = {shape}, float32, forward and backward; "
           f"one BHND is {bhnd / MB:.1f} MB, one NxN {matrix / MB:.1f} MB", rows)


# --- language models ------------------------------------------------------------------------------

class PlainAttention(torch.nn.Module):
    """Causal self-attention as nanoGPT writes it, without biases and dropout: the yardstick."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = torch.nn.Linear(dim, 3 * dim, bias=False)
        self.proj = torch.nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        B, T, C = x.shape
        heads = (B, T, self.num_heads, C // self.num_heads)
        q, k, v = (t.view(heads).transpose(1, 2) for t in self.qkv(x).split(C, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


def build_language_models(args):
    """{name: model}; "plain" has `PlainAttention`, rpc 4 iterations in a quarter of the layers."""
    size, nets = lm.SIZES[args.model], {}
    robust = range(max(1, size["depth"] // 4))
    kinds = {"plain": "softmax", "softmax": "softmax", "symmetric": "symmetric",
             f"rpc 4iter/layer1-{len(robust)}": "rpc"}
    for name, attn in kinds.items():
        nets[name] = lm.LM(lm.LMConfig(args.vocab_size, **size, attn=attn, rpc_layers=robust,
                                       cutoffs=args.cutoffs, dropout=0))
    for block in nets["plain"].blocks:
        block.attn = PlainAttention(size["embed_dim"], size["num_heads"])
    return nets


def language(args, device):
    """Time of a language model's training step, forward and backward, for every attention.

    plain: the same network with `PlainAttention`. rpc: 4 iterations in the first quarter of the
    layers, the paper's layer1-4 of 16. peak MB (CUDA): of the step, beyond what weights of all
    models take.
    """
    amp = device.type == "cuda" if args.amp is None else args.amp
    context = lm.SIZES[args.model]["context"]
    nets = {name: net.to(device) for name, net in build_language_models(args).items()}
    if args.compile:
        nets = {name: torch.compile(net) for name, net in nets.items()}
    text = torch.randint(args.vocab_size, (args.batch_size, context + 1), device=device)

    def train(net):
        net.zero_grad(set_to_none=True)
        with common.autocast(device, amp):
            loss = net(text[:, :-1], text[:, 1:]).mean()
        loss.backward()

    times = alternate(args, device, nets, train)
    rows = []
    for name, t in times.items():
        row = {"model": name, "step ms": 1e3 * median(t),
               "tokens/s": args.batch_size * context / median(t),
               "to plain": ratio(times, name, "plain"),
               "to symmetric": ratio(times, name, "symmetric")}
        rows.append({**row, **peak_mb(device, nets[name], train)})
    report(args, device, f"LM-{args.model}, {args.vocab_size} words, batch {args.batch_size} x "
           f"{context}, {about(args, amp)}", rows)


def main():
    args = get_args(sys.argv[1:])
    if args.threads:
        torch.set_num_threads(args.threads)
    device = common.setup(args.device)[0]
    args.function(args, device)


if __name__ == "__main__":
    common.run(main)
