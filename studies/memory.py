"""Does RPC-Attention's memory grow by an N x N matrix a step? No, by three tensors like the keys.

    python -m studies.memory                        # one attention, forward and backward: a minute
    python -m studies.memory --tokens 4097 --device cuda

Each PAP step attends once more, and autograd keeps what the backward pass will ask for. A fused
attention asks for its inputs and its output alone, so a step leaves S (of the shrinkage), K2 and L:
three tensors (B, H, N, D). Written out, a step keeps softmax(K2 K2^T) as well, (B, H, N, N): the
rows "matrices", the same loop with `attention.naive_attention`. D is 64, so N x N is the larger one
from N = 192 on; ViT-tiny at 512 px has N = 1025.
"""

import argparse
import gc
import math
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context
from unittest.mock import patch

if not __package__:
    sys.exit("error: start this in the repository's folder, as: python -m studies.memory")

import torch
from torch.autograd.graph import saved_tensors_hooks

import attention
import common
from studies.tables import report

MB = 2 ** 20
B, H, D = 8, 3, 64                                                  # ViT-tiny's heads, 8 images


def get_args():
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawTextHelpFormatter)
    whole = common.number(int, 1)
    p.add_argument("--tokens", type=whole, default=1025, help="N")
    p.add_argument("--n_iter", type=whole, nargs="+", default=[1, 2, 4, 6], help="PAP steps")
    p.add_argument("--device", help="cuda, mps or cpu; picked automatically")
    p.add_argument("--out", help="append the rows to this file, one JSON object a line")
    return p.parse_args()


# --- how much memory does something take? ---------------------------------------------------------

def fresh(function, cases):
    """[function(*case) of all cases] in a process whose C library gives freed tensors back at once.

    The library is glibc; in others the memory of one case may serve the next and go unseen.
    """
    with patch.dict(os.environ, MALLOC_MMAP_THRESHOLD_="65536"):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            return list(process.map(function, *zip(*cases)))


def resident(field):
    """VmRSS (memory of this process now) or VmHWM (its maximum) in bytes."""
    with open("/proc/self/status") as f:
        return next(1024 * int(line.split()[1]) for line in f if line.startswith(field))


def peak_growth(step, device):
    """Bytes by which step() raises the memory in use at its peak; nan where nobody counts them.

    CUDA: of PyTorch's allocator. CPU: of the resident memory, good to some MB; in a process of its
    own (`fresh`) in which such a step has run before: libraries load, threads start. Linux only.
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


# --- one attention --------------------------------------------------------------------------------

def forward_backward(shape, n_iter, matrices, device):
    """One attention on random k, v of shape (B, H, N, D); n_iter 0: symmetric attention.

    matrices: with `naive_attention`. Returns bytes that autograd kept, the inputs not counted.
    """
    B, H, N, D = shape
    kv = torch.randn(B, N, 2, H, D, device=device).permute(2, 0, 3, 1, 4)   # as in the module
    kv.requires_grad_()
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    def naive(q, k, v, **_):
        return attention.naive_attention(q, k, v)

    written_out = patch.object(attention, "softmax_attention", naive)
    with saved_tensors_hooks(pack, lambda x: x), written_out if matrices else nullcontext():
        if n_iter:
            out = attention.rpc_attention(kv[0], kv[1], n_iter)
        else:
            out = attention.symmetric_attention(kv[0], kv[1])
    kept.pop(kv.untyped_storage().data_ptr(), None)
    out.backward(torch.ones(B, N, H, D, device=device).transpose(1, 2))
    return sum(kept.values())


def measure(shape, n_iter, matrices, device):
    """Bytes (kept for the backward pass, peak with the inputs) of `forward_backward`."""
    device = torch.device(device)
    forward_backward((1, 1, 16, shape[-1]), n_iter, matrices, device)       # libraries load
    peak = peak_growth(lambda: forward_backward(shape, n_iter, matrices, device), device)
    return forward_backward(shape, n_iter, matrices, device), peak


def main():
    args = get_args()
    device = common.setup(args.device)[0]
    shape = B, H, args.tokens, D
    tensor, matrix = 4 * math.prod(shape), 4 * B * H * args.tokens ** 2
    cases = {"symmetric": (0, False), **{f"rpc n = {n}": (n, False) for n in args.n_iter}}
    most = args.n_iter[-1]
    cases |= {"symmetric, matrices": (0, True), f"rpc n = {most}, matrices": (most, True)}

    rows = []
    found = fresh(measure, [(shape, *case, str(device)) for case in cases.values()])
    for name, (kept, peak) in zip(cases, found):
        rows.append({"attention": name, "kept / BHND": kept / tensor, "kept / NxN": kept / matrix,
                     "kept MB": kept / MB, "peak MB": peak / MB})

    title = (f"One attention, (B, H, N, D) = {shape}, float32, forward and backward\n"
             f"BHND: a tensor (B, H, N, D), {tensor / MB:.1f} MB. NxN: one (B, H, N, N), "
             f"{matrix / MB:.1f} MB")
    report(title, device, rows, {"Kept for the backward pass, and the peak": list(rows[0])},
           args.out)


if __name__ == "__main__":
    common.run(main)
