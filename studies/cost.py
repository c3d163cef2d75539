"""Measure the cost of RPC-Attention: Table 11 of the paper, counted and timed again.

    python -m studies.cost                          # ViT-tiny at 224 px: every row of the table
    python -m studies.cost --clock cpu --threads 1  # on a machine that also does other work
    python -m studies.cost --batch_size 256         # on a GPU

"1.22M flop/sample" in the paper means 1.22 G multiply-adds: the paper writes M for G, and counts
multiply-adds, not FLOPs, which are twice as many. Norms are counted as in fvcore, 5 N C each; with
this rule all five counts round to the paper's numbers. Softmax and other elementwise operations are
not counted. One more PAP step in one layer adds 2 N^2 C = 14.9 M multiply-adds, 1.3 % of the model;
its time depends on the machine. Table 11 has no row for FAN.

The paper's times cannot be throughput: at 0.079 s per image, an epoch of ImageNet would take 28
hours. So we compare them with the time of a single image, and report throughput in a separate
table. All models take turns in one process. A time is a median over rounds. A ratio is computed
within each round, and the median of the ratios is reported. So a program that slows down a whole
round does not change the ratio.

Memory is the size of the tensors that autograd keeps for one image until the backward pass. Fused
attention keeps only its inputs and its output. So a PAP step adds a few tensors (B, H, N, D), and
no N x N matrix.
"""

import argparse
import csv
import datetime
import json
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.flop_counter import FlopCounterMode

import common
import fan
from vit import SIZES, ViT, ViTConfig

MB, PIXELS = 2 ** 20, 224
MODELS = {                                              # {name: settings of ViTConfig or FANConfig}
    "softmax": dict(attn="softmax"),
    "symmetric": dict(attn="symmetric"),
    "rpc 4iter/layer1": dict(attn="rpc", pap=dict(n_iter=4)),
    "rpc 5iter/layer1": dict(attn="rpc", pap=dict(n_iter=5)),
    "rpc 6iter/layer1": dict(attn="rpc", pap=dict(n_iter=6)),
    "rpc 2iter/all-layer": dict(attn="rpc", pap=dict(n_iter=2, lambd=3.0), rpc_layers="all"),
}
MODELS |= {f"fan {name}": MODELS[name] for name in ("softmax", "symmetric", "rpc 4iter/layer1")}
NORMS = {nn.LayerNorm: 5, nn.BatchNorm2d: 2}            # operations per number, as in fvcore
PAPER_NUMBERS = Path(__file__).parent / "reproduce/paper.csv"


# --- time -----------------------------------------------------------------------------------------

def alternate(args, device, steps):
    """Time all steps in turn: {name: [seconds of steps[name]() in each round]}.

    Every second round runs in reverse order. The first round warms up and is not counted.
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


# --- the models of Table 11 -----------------------------------------------------------------------

def build_model(name, size="tiny"):
    """Build a model of the table. size: a key of vit.SIZES."""
    how = dict(MODELS[name])
    if how.get("rpc_layers") == "all":
        how["rpc_layers"] = range(SIZES[size]["depth"])
    if name.startswith("fan"):
        return fan.FAN(fan.FANConfig(**fan.FAN_SIZES[f"fan_{size}"], **how))
    return ViT(ViTConfig(**SIZES[size], **how))


def base_of(name):
    """Return the name of the model that `name` is compared with."""
    return "fan symmetric" if name.startswith("fan") else "symmetric"


def multiply_adds(model):
    """Count the multiply-adds of one image: PyTorch's counter plus the NORMS."""
    norms = []

    def add(module, args, out):
        norms.extend(each * out.numel() for kind, each in NORMS.items() if isinstance(module, kind))

    hook = register_module_forward_hook(add)
    # MATH computes attention as two products; some versions of PyTorch do not count fused
    # attention.
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model.eval()(torch.zeros(1, 3, PIXELS, PIXELS))
    hook.remove()
    return counter.get_total_flops() / 2 + sum(norms)


def kept(model, image):
    """Count the bytes that autograd keeps after a forward pass, without the weights."""
    sizes = {}

    def pack(x):
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        out = model.train()(image)                          # keeps the tensors alive
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    del out
    return sum(size for where, size in sizes.items() if where not in own)


STEPS = "train", "test"


def take(step, model, images):
    """Run a forward pass ("test") or forward and backward pass ("train"), without an optimiser.

    images: (B, 3, S, S). On a GPU, the passes run in bf16.
    """
    training = step == "train"
    model.train(training).zero_grad(set_to_none=True)
    bf16 = torch.autocast(images.device.type, torch.bfloat16, enabled=images.is_cuda)
    with torch.set_grad_enabled(training), bf16:
        logits = model(images)
    if training:
        F.cross_entropy(logits.float(), torch.zeros_like(logits[:, 0], dtype=torch.long)).backward()


COST_TABLES = {
    "Size; the paper as printed, its M of multiply-adds is G":
        ("model", "parameters", "paper: parameters", "G multiply-adds", "paper: flop/sample"),
    "A training step of one image, forward and backward; ratios to symmetric":
        ("model", "train ms", "paper: train ms", "train ratio", "paper: train ratio"),
    "A test step of one image":
        ("model", "test ms", "paper: test ms", "test ratio", "paper: test ratio"),
    "Throughput in batches; ratios of times to symmetric":
        ("model", "train images/s", "train batch ratio", "test images/s", "test batch ratio"),
    "Kept for the backward pass of one image; the paper's batch size is unknown":
        ("model", "kept MB", "kept MB more", "paper: train MB", "paper: train MB more"),
}


def paper_columns(name):
    """Return the paper's numbers for a model, and their ratios to SymViT: {column: number}.

    The result is empty if Table 11 has no row for this model.
    """
    with open(PAPER_NUMBERS, newline="") as file:
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


def measure_models(args, device):
    """Count and time every model, for one image and for a batch. Returns a row (dict) per model."""
    nets = {name: build_model(name) for name in MODELS}
    counted = {name: multiply_adds(net) / 1e9 for name, net in nets.items()}
    image = torch.rand(1, 3, PIXELS, PIXELS, device=device)
    times = alternate(args, device, {
        (name, what, n): partial(take, what, net.to(device), image.expand(n, -1, -1, -1))
        for n in {1, args.batch_size} for what in STEPS for name, net in nets.items()})
    memory, rows = {name: kept(net, image) / MB for name, net in nets.items()}, []
    for name, net in nets.items():
        row = {"model": name, "parameters": sum(p.numel() for p in net.parameters()),
               "G multiply-adds": counted[name], "kept MB": memory[name],
               "kept MB more": memory[name] - memory[base_of(name)]}
        for what in STEPS:
            for n, kind in ((1, "ratio"), (args.batch_size, "batch ratio")):
                own, base = times[name, what, n], times[base_of(name), what, n]
                row[f"{what} {kind}"] = median(x / y for x, y in zip(own, base))
            row[f"{what} ms"] = 1e3 * median(times[name, what, 1])
            row[f"{what} images/s"] = args.batch_size / median(times[name, what, args.batch_size])
        rows.append(row | paper_columns(name))
    return rows


def cost_cell(x):
    """Format a table cell: numbers below 10 with three decimals."""
    form = (",.3f" if x < 10 else ",.1f") if isinstance(x, float) else "," * isinstance(x, int)
    return format(x, form)


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--batch_size", type=int, default=8,
                   help="images per batch for throughput (default: 8)")
    p.add_argument("--rounds", type=int, default=15,
                   help="timed rounds, after one for warming up (default: 15)")
    p.add_argument("--clock", choices=["wall", "cpu"], default="wall",
                   help="wall time or CPU time of all threads (default: wall)")
    p.add_argument("--threads", type=int, help="CPU threads (default: PyTorch's)")
    p.add_argument("--device", choices=["cuda", "mps", "cpu"],
                   help="device to measure on (default: cuda in bf16 if there is one, else cpu)")
    p.add_argument("--out", help="append the rows to this file as JSON lines")
    args = p.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    rows = measure_models(args, device)
    print(f"ViT-tiny, {PIXELS} px, batches of {args.batch_size}, {args.clock} clock, "
          f"medians of {args.rounds} rounds\n{common.origin(device)['hardware']}; "
          f"torch {torch.__version__}")
    for what, columns in COST_TABLES.items():
        cells = [[cost_cell(row.get(column, "-")) for column in columns] for row in rows]
        print(f"\n{what}\n\n{common.table(cells, columns)}")
    about = dict(command=" ".join(["python -m studies.cost", *(argv or sys.argv[1:])]),
                 hardware=common.origin(device)["hardware"], torch=torch.__version__,
                 date=f"{datetime.date.today()}")
    if args.out:
        with open(args.out, "a") as file:
            file.write("".join(json.dumps(about | row) + "\n" for row in rows))


if __name__ == "__main__":
    common.run(main)
