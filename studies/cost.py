"""What does each attention cost? Time and memory of the models, speed of input, corruptions and evaluations.

    python bench.py                                        # models: every attention in a ViT-tiny at 224 px
    python bench.py models --compile --batch_size 256      # the same on a GPU, compiled
    python bench.py memory                                 # one attention at 1025 tokens: does memory grow by N x N?
    python bench.py input --data_dir data/imagenet         # images/s of our ImageNet pipeline and of timm's
    python bench.py corruptions                            # ms per image of our 15 types and of imagecorruptions'
    python bench.py language --batch_size 96 --model paper --vocab_size 267735 --cutoffs 20000 40000 200000 --compile
    python bench.py sliding                                # perplexity at stride 1: windows batched, and one at a time
    python bench.py windows --scales 0.5 1 1.5             # segmentation: views and windows batched, and one at a time

What is compared runs alternately in one process. A time is a median over rounds; a ratio is the median of the ratios
within a round, so that another program which slows a whole round down does not count. On a shared machine,
`--clock cpu --threads 1` measures CPU time, which waiting does not change. --out appends every row as a line of JSON.
"""

import argparse
import datetime
import gc
import math
import os
import platform
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from multiprocessing import get_context
from statistics import median
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from tqdm import tqdm

import attention
import common
from robust import corruptions
import data
import lm
import segmenter
from data.augment import augment_uint8, to_float
from data.text import sliding_nll
from vit import SIZES, ViT, ViTConfig

MB = 2 ** 20


def get_args(argv):
    """The flags; `models` is the default command."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                allow_abbrev=False)
    commands = p.add_subparsers(dest="what", required=True,
                                metavar="{models,memory,input,corruptions,language,sliding,windows}")
    boolean = argparse.BooleanOptionalAction

    def command(name, function, rounds=None):
        c = commands.add_parser(name, help=function.__doc__.splitlines()[0], description=function.__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
        c.set_defaults(function=function)
        c.add_argument("--device", default=None, help="cuda, mps or cpu; picked automatically")
        c.add_argument("--threads", type=int, default=1 if name in ("input", "corruptions") else None,
                       help="CPU threads of this process, %(default)s by default (None: torch's choice)")
        c.add_argument("--out", default=None, help="append the rows to this file, one JSON object a line")
        if rounds:
            c.add_argument("--rounds", type=int, default=rounds, help="counted rounds; one more warms up")
        return c.add_argument

    flag = command("models", models, rounds=15)
    flag("--model", choices=SIZES, default="tiny", help="width, depth and heads")
    flag("--image_size", type=int, default=224, help="pixels, a multiple of --patch_size")
    flag("--patch_size", type=int, default=16, help="pixels")
    flag("--batch_size", type=int, default=8, help="images per step; 256 or more keep a GPU busy")
    flag("--steps", type=int, default=1, help="steps per model and round")
    flag("--clock", choices=["wall", "cpu"], default="wall", help="cpu: CPU time of this process, all threads added up")
    flag("--amp", action=boolean, default=None, help="bf16 autocast; default: on GPUs")
    flag("--compile", action=boolean, default=False, help="torch.compile every model")

    flag = command("memory", memory)
    flag("--tokens", type=int, default=1025, help="N; 1025 is 512 px in patches of 16, with a class token")
    flag("--batch_size", type=int, default=8, help="B")
    flag("--heads", type=int, default=3, help="H")
    flag("--head_dim", type=int, default=64, help="D")
    flag("--n_iter", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6], help="PAP steps, one row each")

    flag = command("input", input_pipeline, rounds=5)
    flag("--data_dir", required=True, help="folder with <split>/<class>/*.JPEG")
    flag("--split", default="val", help="whose files to read, as if for training; a sample often has only val")
    flag("--num_images", type=int, default=1024, help="per pipeline and round; the files repeat if there are fewer")
    flag("--batch_size", type=int, default=128)
    flag("--image_size", type=int, default=224, help="pixels")
    flag("--num_workers", type=int, nargs="+", default=[2], help="decoding processes; several numbers: one by one")

    flag = command("corruptions", corruption_types, rounds=3)
    flag("--data_dir", default=None, help="folder with val/<class>/*.JPEG; default: scenes of data.load_shapes")
    flag("--num_images", type=common.number(int, 1), default=64, help="at most; a random sample of --data_dir")
    flag("--image_size", type=common.number(int, 32), default=224, help="pixels; imagecorruptions wants at least 32")
    flag("--clock", choices=["wall", "cpu"], default="wall", help="cpu: CPU time of this process, all threads added up")

    flag = command("language", language, rounds=15)
    flag("--model", choices=lm.SIZES, default="mini", help="width, depth, heads and context")
    flag("--vocab_size", type=common.number(int, 2), default=17510, help="words")
    flag("--cutoffs", type=int, nargs="*", default=[2000, 10000], help="of the adaptive softmax; none: full softmax")
    flag("--batch_size", type=common.number(int, 1), default=16, help="windows per step")
    flag("--clock", choices=["wall", "cpu"], default="wall", help="cpu: CPU time of this process, all threads added up")
    flag("--amp", action=boolean, default=None, help="bf16 autocast; default: on GPUs")
    flag("--compile", action=boolean, default=False, help="torch.compile every model")

    flag = command("sliding", sliding, rounds=5)
    flag("--model", choices=lm.SIZES, default="mini", help="width, depth, heads and context")
    flag("--vocab_size", type=common.number(int, 2), default=17510, help="words; full softmax")
    flag("--batch_size", type=common.number(int, 1), default=64, help="windows at a time")
    flag("--num_windows", type=common.number(int, 1), default=256, help="per model and round; an eighth one at a time")
    flag("--clock", choices=["wall", "cpu"], default="wall", help="cpu: CPU time of this process, all threads added up")

    flag = command("windows", windows, rounds=3)
    flag("--model", choices=SIZES, default="nano", help="width, depth and heads of the encoder")
    flag("--patch_size", type=common.number(int, 1), default=8, help="pixels")
    flag("--window", type=common.number(int, 1), default=96, help="pixels; also the short side at scale 1")
    flag("--num_classes", type=common.number(int, 2), default=150, help="K")
    flag("--scales", type=float, nargs="+", default=[0.5, 0.75, 1, 1.25, 1.5, 1.75], help="of the views, flipped too")
    flag("--batch_size", type=common.number(int, 1), default=8, help="windows at a time")
    flag("--clock", choices=["wall", "cpu"], default="wall", help="cpu: CPU time of this process, all threads added up")

    if not argv or argv[0].startswith("--") and argv[0] != "--help":
        argv = ["models", *argv]
    return p.parse_args(argv)


# --- measuring and printing -------------------------------------------------------------------------------------------

def synchronize(device):
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def seconds(function, device, clock=time.perf_counter):
    """Seconds that function() takes, until the device has finished."""
    synchronize(device)
    start = clock()
    function()
    synchronize(device)
    return clock() - start


def alternate(cases, rounds, measure):
    """{name: [measure(case) of every round]}; the cases take turns, in reverse order every other round.

    A first round warms up and is not counted: allocation, compilation, file cache.
    """
    times = {name: [] for name in cases}
    for i in range(rounds + 1):
        for name in list(cases)[::-1 if i % 2 else 1]:
            times[name].append(measure(cases[name]))
    return {name: t[1:] for name, t in times.items()}


def median_ratio(a, b):
    return median(x / y for x, y in zip(a, b))


def hardware(device):
    """The machine in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpu = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as f:
            cpu = next((line.split(": ")[1].strip() for line in f if line.startswith("model name")), cpu)
    return f"{device.type}, {cpu}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def report(args, device, title, rows):
    """Print rows (dicts with the same keys) as an aligned table; append them to --out. None is an empty cell."""
    def cell(x):
        return "" if x is None else f"{x:,.3f}" if isinstance(x, float) and x < 10 else f"{x:,.1f}" \
            if isinstance(x, float) else f"{x}"
    print(f"\n{title}\n{hardware(device)}; torch {torch.__version__}")
    table = [list(rows[0])] + [[cell(x) for x in row.values()] for row in rows]
    width = [max(map(len, column)) for column in zip(*table)]
    for line in table:
        print("  ".join(x.ljust(w) if i == 0 else x.rjust(w) for i, (x, w) in enumerate(zip(line, width))).rstrip())
    for row in rows if args.out else []:
        common.write_log(args.out, dict(command=" ".join(["bench.py", *sys.argv[1:]]), what=args.what,
                                        hardware=hardware(device), torch=torch.__version__,
                                        date=f"{datetime.date.today()}", **row))


# --- models -----------------------------------------------------------------------------------------------------------

def build_models(args):
    """{name: (model, name of what it is compared with)}."""
    shape = dict(image_size=args.image_size, patch_size=args.patch_size, **SIZES[args.model])

    def ours(attn, **kw):
        return ViT(ViTConfig(attn=attn, **shape, **kw))
    cases = {"softmax": (ours("softmax"), "timm softmax"),
             "symmetric": (ours("symmetric"), "softmax"),
             "rpc 4iter/layer1": (ours("rpc", n_iter=4), "symmetric"),
             "rpc 6iter/layer1": (ours("rpc", n_iter=6), "symmetric"),
             "rpc 2iter/all-layer": (ours("rpc", n_iter=2, lambd=3.0, rpc_layers=range(shape["depth"])), "symmetric")}
    try:
        from timm.models.vision_transformer import VisionTransformer         # tiny: timm's vit_tiny_patch16_224
        theirs = VisionTransformer(img_size=shape.pop("image_size"), **shape)
        return {"timm softmax": (theirs, "timm softmax"), **cases}
    except ImportError:
        print("timm is not installed: its row is left out")
        return {**cases, "softmax": (cases["softmax"][0], "softmax")}


def models(args, device):
    """Time of a training step's forward and backward pass, and of inference, for every attention.

    train ms: forward, cross-entropy, backward of one batch, without optimiser; eval ms: forward without gradients.
    ratio: to the model in the next column. peak MB (CUDA): of the training step, weights and gradients included.
    """
    amp = device.type == "cuda" if args.amp is None else args.amp
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    torch.manual_seed(0)
    images = torch.rand(args.batch_size, 3, args.image_size, args.image_size, device=device)
    labels = torch.randint(1000, (args.batch_size,), device=device)
    cases = build_models(args)
    nets = {name: torch.compile(m.to(device)) if args.compile else m.to(device) for name, (m, _) in cases.items()}

    def train(net):
        for _ in range(args.steps):
            net.zero_grad(set_to_none=True)
            with common.autocast(device, amp):
                loss = F.cross_entropy(net(images), labels)
            loss.backward()

    @torch.no_grad()
    def evaluate(net):
        with common.autocast(device, amp):
            for _ in range(args.steps):
                net(images)

    def peak(net):
        train(net)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()          # holds this net's weights and gradients, and the other nets'
        train(net)
        own = 2 * sum(p.numel() * p.element_size() for p in net.parameters())
        return (torch.cuda.max_memory_allocated() - before + own) / MB

    def timed(step):
        return alternate(nets, args.rounds, lambda net: seconds(lambda: step(net), device, clock) / args.steps)

    train_times = timed(train)
    for net in nets.values():
        net.eval().zero_grad(set_to_none=True)
    eval_times = timed(evaluate)
    rows = []
    for name, (model, reference) in cases.items():
        t, e, other = train_times[name], eval_times[name], name != reference
        rows.append({
            "model": name, "train ms": 1e3 * median(t), "images/s": args.batch_size / median(t),
            "ratio": median_ratio(t, train_times[reference]) if other else None, "to": reference if other else "",
            "eval ms": 1e3 * median(e), "eval images/s": args.batch_size / median(e),
            "eval ratio": median_ratio(e, eval_times[reference]) if other else None,
            **({"peak MB": peak(nets[name].train())} if device.type == "cuda" else {})})
    report(args, device, f"ViT-{args.model}, {args.image_size} px, patch {args.patch_size}, batch {args.batch_size}, "
           f"{'bf16 autocast' if amp else 'float32'}{', compiled' * args.compile}, {args.clock} clock, medians of "
           f"{args.rounds} rounds of {args.steps} step(s)", rows)


# --- memory -----------------------------------------------------------------------------------------------------------

def matrix_attention(q, k, v, **_):
    """softmax(q k^T / sqrt(D)) v written out, for comparison: autograd keeps N x N matrices."""
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v


def resident_bytes(field):
    """VmRSS (memory of this process now) or VmHWM (its maximum) in bytes; Linux."""
    with open("/proc/self/status") as f:
        return next(1024 * int(line.split()[1]) for line in f if line.startswith(field))


def measure_memory(shape, n_iter, matrices, device):
    """Bytes (kept for backward, peak) of one attention, forward and backward, beyond its inputs k and v.

    shape: (B, H, N, D). n_iter 0: symmetric attention. matrices: every step as `matrix_attention`. kept: the different
    storages that autograd saves, without the inputs. peak: of the CUDA allocator; on the CPU the growth of the
    process's largest resident size, for which the process must be a fresh one.
    """
    B, H, N, D = shape
    device = torch.device(device)
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    def forward_backward(tokens, count_kept=False):
        kv = torch.randn(B, tokens, 2, H, D, device=device).permute(2, 0, 3, 1, 4).requires_grad_()   # as in the module
        gradient = torch.ones(B, tokens, H, D, device=device).transpose(1, 2)
        synchronize(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        else:
            with open("/proc/self/clear_refs", "w") as f:
                f.write("5")                                                # the maximum starts again from here
            before = resident_bytes("VmRSS")
        attend = matrix_attention if matrices else attention.softmax_attention
        watch = saved_tensors_hooks(pack, lambda x: x) if count_kept else nullcontext()
        with watch, patch.object(attention, "softmax_attention", attend):
            if n_iter:
                out = attention.rpc_attention(kv[0], kv[1], n_iter)
            else:
                out = attention.symmetric_attention(kv[0], kv[1])
        kept.pop(kv.untyped_storage().data_ptr(), None)
        out.backward(gradient)
        synchronize(device)
        after = torch.cuda.max_memory_allocated() if device.type == "cuda" else resident_bytes("VmHWM")
        return sum(kept.values()) if count_kept else after - before

    forward_backward(16)                             # libraries load, threads start and allocate on their first use
    gc.collect()
    peak = forward_backward(N)
    return forward_backward(N, count_kept=True), peak


def memory(args, device):
    """Memory of one attention, forward and backward, in bytes and in units of a (B, H, N, D) and of an N x N tensor.

    kept: what autograd saves for the backward pass. peak: the largest use beyond the inputs k and v, gradients
    included; on the CPU it is the growth of a fresh process's resident memory, good to about one BHND (Linux
    only). BHND: one float32 tensor (B, H, N, D). NxN: one float32 tensor (B, H, N, N).
    "matrices" rows keep softmax(K2 K2^T): the same loop with the product written out.
    """
    if device.type not in ("cuda", "cpu") or device.type == "cpu" and not os.path.exists("/proc/self/clear_refs"):
        raise ValueError("bench.py memory needs CUDA, or Linux for measuring the CPU")
    shape = (args.batch_size, args.heads, args.tokens, args.head_dim)
    bhnd = 4 * math.prod(shape)
    matrix = 4 * args.batch_size * args.heads * args.tokens ** 2
    cases = {"symmetric": (0, False), **{f"rpc n = {n}": (n, False) for n in args.n_iter},
             "symmetric, matrices": (0, True), **{f"rpc n = {n}, matrices": (n, True) for n in args.n_iter[-1:]}}
    rows = []
    for name, (n_iter, matrices) in cases.items():
        how = (shape, n_iter, matrices, str(device))
        if device.type == "cpu":
            returns_memory = patch.dict(os.environ, MALLOC_MMAP_THRESHOLD_="65536")     # glibc: freed tensors at once
            with returns_memory, ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
                kept, peak = fresh.submit(measure_memory, *how).result()
        else:
            kept, peak = measure_memory(*how)
        rows.append({"attention": name, "kept MB": kept / MB, "/ BHND": kept / bhnd, "/ NxN": kept / matrix,
                     "peak MB": peak / MB, "peak / BHND": peak / bhnd, "peak / NxN": peak / matrix})
    report(args, device, f"one attention, (B, H, N, D) = {shape}, float32, forward and backward; one BHND is "
           f"{bhnd / MB:.1f} MB, one NxN {matrix / MB:.1f} MB", rows)


# --- input ------------------------------------------------------------------------------------------------------------

def timm_transform(image_size):
    """DeiT's training transform for one PIL image, as timm builds it; returns a normalised float tensor."""
    from timm.data import auto_augment, create_transform
    bits = auto_augment.LEVEL_TO_ARG["PosterizeIncreasing"]

    def at_least_one_bit(level, hparams):            # at level 10 timm asks PIL for 0 bits, which newer PIL refuses
        return max(1, bits(level, hparams)[0]),
    with patch.dict(auto_augment.LEVEL_TO_ARG, PosterizeIncreasing=at_least_one_bit):
        return create_transform(input_size=image_size, is_training=True, color_jitter=0.3, interpolation="bicubic",
                                auto_augment="rand-m9-mstd0.5-inc1", re_prob=0.25, re_mode="pixel", re_count=1)


class Endless(torch.utils.data.Sampler):
    """A new list of batches, each a list of (position, index), every time it is iterated: another epoch."""

    def __init__(self, files, num_images, batch_size, keys):
        self.files, self.num_batches, self.batch_size, self.keys = files, num_images // batch_size, batch_size, keys
        self.epoch = 0

    def __iter__(self):
        self.epoch += 1
        count = self.num_batches * self.batch_size
        order = data.epoch_order(count, self.epoch, seed=0) % self.files
        first = self.epoch * count
        for i in range(0, count, self.batch_size):
            batch = order[i:i + self.batch_size].tolist()
            yield list(zip(range(first + i, first + i + self.batch_size), batch)) if self.keys else batch

    def __len__(self):
        return self.num_batches


def input_pipeline(args, device):
    """Images/s of the training input: files to augmented float batches on the device, ours and timm's.

    ours: workers decode and crop (data.ImageTree); whole uint8 batches are augmented on the GPU or, without one, in the
    workers (augment.augment_uint8), then made float and erased on the device (augment.to_float). timm:
    DeiT's transform on PIL images in the workers of a torchvision ImageFolder loader. The same files, RandAugment,
    random erasing, batch size and number of workers; no mixup. "ours up to the crop": what workers have to do for a
    GPU. CPU ms: user and system time per image, all processes. Then the time per image of each stage by itself. On the
    CPU, one thread for this process (--threads) is best: more would take the cores from the workers.
    """
    try:
        import timm
        from torchvision.datasets import ImageFolder
    except ImportError:
        raise ValueError("bench.py input compares with timm and torchvision: pip install timm torchvision") from None
    if args.batch_size > args.num_images:
        raise ValueError(f"--num_images {args.num_images} is less than one batch of {args.batch_size}")
    tree = data.ImageTree(args.data_dir, args.split, size=args.image_size, train=True)
    folder = ImageFolder(tree.folder, timm_transform(args.image_size))

    def sampler(keys):
        return Endless(len(tree), args.num_images, args.batch_size, keys)

    on_cpu, transform = device.type == "cpu", partial(augment_uint8, seed=0)

    def run_ours(loader):
        for images, _, positions in loader:
            images = images.to(device, non_blocking=True)
            to_float(images if on_cpu else transform(images, positions), positions, seed=0)

    def run_timm(loader):
        for images, *_ in loader:
            images.to(device, non_blocking=True)

    def cpu_seconds(who):
        usage = resource.getrusage(who)
        return usage.ru_utime + usage.ru_stime

    rows = []
    for workers in args.num_workers:
        cpu = {"ours": 0.0, "timm": 0.0, "ours up to the crop": 0.0}
        cases = dict(ours=("ours", run_ours, data.imagenet_batches(tree, sampler(True), workers, device,
                                                                          transform=transform if on_cpu else None)),
                     timm=("timm", run_timm, torch.utils.data.DataLoader(
                         folder, batch_sampler=sampler(False), num_workers=workers, persistent_workers=workers > 0,
                         prefetch_factor=4 if workers else None, pin_memory=device.type == "cuda")))
        cases["ours up to the crop"] = ("ours up to the crop", run_timm,
                                        data.imagenet_batches(tree, sampler(True), workers, device))

        def measure(case):
            name, run, loader = case
            start = cpu_seconds(resource.RUSAGE_SELF)
            took = seconds(lambda: run(loader), device)
            cpu[name] += cpu_seconds(resource.RUSAGE_SELF) - start
            return took
        times = alternate(cases, args.rounds, measure)
        for name in list(cases):                     # a worker's CPU time is known once it has ended
            start = cpu_seconds(resource.RUSAGE_CHILDREN)
            del cases[name]
            gc.collect()
            cpu[name] += cpu_seconds(resource.RUSAGE_CHILDREN) - start
        count = args.num_images // args.batch_size * args.batch_size
        for name, t in times.items():
            rows.append({"pipeline": f"{name}, {workers} workers", "images/s": count / median(t),
                         "times timm's": median_ratio(times["timm"], t) if name != "timm" else None,
                         "CPU ms": 1e3 * cpu[name] / (count * (args.rounds + 1))})
    report(args, device, f"input pipeline, {len(tree)} files, {args.image_size} px, batch {args.batch_size}, timm "
           f"{timm.__version__}, medians of {args.rounds} rounds of {count} images", rows)

    n = min(64, args.num_images)
    keys = [(i, i % len(tree)) for i in range(n)]
    images = torch.stack([image for image, _, _ in tree.__getitems__(keys)]).to(device)
    stages = {"ours: read, decode, crop (worker)": lambda: tree.__getitems__(keys),
              "ours: flip, RandAugment (worker or GPU)": lambda: transform(images, torch.arange(n)),
              "ours: float, erase (main process)": lambda: to_float(images, torch.arange(n), seed=0),
              "timm: all (worker)": lambda: [folder[index] for _, index in keys]}
    times = alternate(stages, args.rounds, lambda stage: seconds(stage, device))
    report(args, device, "stages", [{"stage": name, "ms/image": 1e3 * median(t) / n} for name, t in times.items()])


# --- corruptions ------------------------------------------------------------------------------------------------------

def corruption_types(args, device):
    """ms per image of the 15 types in corruptions.py and in the package imagecorruptions, mean over severities 1 to 5.

    ours: the whole batch, already on the device. theirs: one numpy image after the other on the CPU; left out where the
    package cannot be imported. Both use ImageNet-C's constants for 224 px and imagecorruptions' elastic_transform. Its
    glass_blur is timed on 2 images unless numba compiles it. ratio: theirs to ours. images/s: corrupted ones, ours.
    """
    if args.data_dir:
        tree = data.ImageTree(args.data_dir, "val", size=args.image_size)
        images = torch.stack([tree[i][0] for i in data.epoch_order(len(tree), 0, 0)[:args.num_images].tolist()])
    else:
        images = data.load_shapes("test", args.num_images, args.image_size).images
    arrays, images = list(images.permute(0, 2, 3, 1).contiguous().numpy()), images.to(device)
    try:
        from imagecorruptions import corrupt, corruptions as package, gaussian
        package.cv2.setNumThreads(torch.get_num_threads())
    except ImportError as e:
        package = None
        print(f"imagecorruptions cannot be imported ({e}): its times are left out")
    times, clock = {}, time.process_time if args.clock == "cpu" else time.perf_counter
    torch.empty(30 * MB, dtype=torch.uint8)          # freed at once: from now on glibc keeps freed memory of this size

    def theirs(severity):                            # NumPy 2 has dropped a name, scikit-image has renamed an option
        with patch.object(package.np, "float_", float, create=True), patch.object(package, "gaussian", lambda *a, **kw:
                          gaussian(*a, channel_axis=-1 if kw.pop("multichannel", False) else None, **kw)):
            for x in few:
                corrupt(x, severity, name)

    for name in tqdm(corruptions.NAMES, leave=False, disable=None):
        few = arrays[:2] if name == "glass_blur" and not hasattr(package, "njit") else arrays
        cases = {"ours": (lambda s: corruptions.corrupt(images, name, s, table=224, elastic="i"), len(arrays)),
                 **({"theirs": (theirs, len(few))} if package else {})}
        times[name] = alternate(cases, args.rounds, lambda case: 1e3 / (5 * case[1]) * sum(
            seconds(partial(case[0], severity), device, clock) for severity in range(1, 6)))
    times["sum"] = {who: [sum(t) for t in zip(*(times[name][who] for name in corruptions.NAMES))] for who in cases}
    rows = [{"type": name, "ours ms": median(t["ours"]), "theirs ms": median(t["theirs"]) if package else None,
             "ratio": median_ratio(t["theirs"], t["ours"]) if package else None,
             "images/s": 1e3 * (15 if name == "sum" else 1) / median(t["ours"])} for name, t in times.items()]
    report(args, device, f"corruptions, {len(images)} images of {args.image_size} px, mean over severities 1 to 5, "
           f"{args.clock} clock, medians of {args.rounds} rounds", rows)


# --- language models --------------------------------------------------------------------------------------------------

class PlainAttention(torch.nn.Module):
    """Causal self-attention as nanoGPT writes it, without biases and dropout: what ours is compared with."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = torch.nn.Linear(dim, 3 * dim, bias=False), torch.nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.num_heads, C // self.num_heads).transpose(1, 2) for t in self.qkv(x).split(C, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


def language(args, device):
    """Time of a language model's training step, forward and backward, for every attention and a plain block.

    plain: the same network with `PlainAttention`. rpc: 4 iterations in the first quarter of the layers, the paper's
    layer1-4 of 16. peak MB (CUDA): of the step, beyond what weights of all models take.
    """
    amp = device.type == "cuda" if args.amp is None else args.amp
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    size, robust = lm.SIZES[args.model], range(max(1, lm.SIZES[args.model]["depth"] // 4))
    nets = {}
    for name in ("plain", "softmax", "symmetric", f"rpc 4iter/layer1-{len(robust)}"):
        attn = dict(plain="softmax").get(name, name.split()[0])
        net = lm.LM(lm.LMConfig(args.vocab_size, **size, attn=attn, rpc_layers=robust, cutoffs=args.cutoffs, dropout=0))
        for block in net.blocks if name == "plain" else ():
            block.attn = PlainAttention(size["embed_dim"], size["num_heads"])
        nets[name] = torch.compile(net.to(device)) if args.compile else net.to(device)
    text = torch.randint(args.vocab_size, (args.batch_size, size["context"] + 1), device=device)

    def train(net):
        net.zero_grad(set_to_none=True)
        with common.autocast(device, amp):
            loss = net(text[:, :-1], text[:, 1:]).mean()
        loss.backward()

    def peak(net):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        train(net)
        return (torch.cuda.max_memory_allocated() - before) / MB
    times = alternate(nets, args.rounds, lambda net: seconds(lambda: train(net), device, clock))
    rows = [{"model": name, "step ms": 1e3 * median(t), "tokens/s": args.batch_size * size["context"] / median(t),
             "to plain": median_ratio(t, times["plain"]), "to symmetric": median_ratio(t, times["symmetric"]),
             **({"peak MB": peak(nets[name])} if device.type == "cuda" else {})} for name, t in times.items()]
    report(args, device, f"LM-{args.model}, {args.vocab_size} words, batch {args.batch_size} x {size['context']}, "
           f"{'bf16' if amp else 'float32'}{', compiled' if args.compile else ''}, {args.clock} clock, medians of "
           f"{args.rounds} rounds", rows)


# --- evaluations by windows -------------------------------------------------------------------------------------------

def sliding(args, device):
    """ms per scored token of a language model's sliding evaluation at stride 1, windows batched and one at a time.

    one at a time: as the reference does it, each window by itself, all its positions through the output layer.
    batched: data_text.sliding_nll, --batch_size windows a forward pass, the output layer for scored positions only.
    """
    clock, rows = time.process_time if args.clock == "cpu" else time.perf_counter, []
    for attn in ("softmax", "symmetric", "rpc"):
        torch.manual_seed(0)
        config = lm.LMConfig(args.vocab_size, **lm.SIZES[args.model], attn=attn, rpc_layers=(0,))
        model, T = lm.LM(config).to(device).eval(), config.context
        text = torch.randint(args.vocab_size, (T + args.num_windows,))
        few = max(1, args.num_windows // 8)

        @torch.no_grad()
        def one_at_a_time():
            x = text.to(device)
            for i in range(few):
                model(x[None, i:i + T], x[None, i + 1:i + 1 + T])
        cases = {"one": (one_at_a_time, few),
                 "batched": (partial(sliding_nll, model, text, T, 1, args.batch_size), args.num_windows)}
        times = alternate(cases, args.rounds, lambda case: 1e3 * seconds(case[0], device, clock) / case[1])
        rows.append({"attention": attn, "one at a time ms": median(times["one"]),
                     "batched ms": median(times["batched"]), "ratio": median_ratio(times["one"], times["batched"])})
    report(args, device, f"sliding perplexity, LM-{args.model}, {args.vocab_size} words, stride 1, ms per scored "
           f"token, {args.clock} clock, medians of {args.rounds} rounds", rows)


def windows(args, device):
    """ms per image of a segmenter's multi-scale, flipped evaluation: segmenter.predict, and one window at a time.

    one at a time: each window by itself through model.forward, its logits upsampled, added to the view's canvas and
    divided by the number of windows there; then resized to the image, flipped back, softmax. The image is one and a
    half times as wide as high. predict: windows of all views batched, upsampling and merging as one matrix per axis.
    """
    clock, rows = time.process_time if args.clock == "cpu" else time.perf_counter, []
    side, stride = args.window, args.window // args.patch_size * 2 // 3 * args.patch_size
    image = torch.rand(3, side, side * 3 // 2, device=device)
    for attn in ("softmax", "symmetric", "rpc"):
        torch.manual_seed(0)
        model = segmenter.Segmenter(segmenter.SegmenterConfig(
            num_classes=args.num_classes, image_size=side, patch_size=args.patch_size, attn=attn, **SIZES[args.model]))
        model.to(device).eval()

        @torch.no_grad()
        def one_at_a_time():
            for scale in args.scales:
                for flip in (False, True):
                    x = segmenter.view(image, side, scale, side)
                    x = x.flip(2) if flip else x
                    canvas = torch.zeros(args.num_classes, *x.shape[1:], device=device)
                    count = torch.zeros_like(x[:1])
                    for top, left in segmenter.sliding_windows(*x.shape[1:], side, stride):
                        here = (slice(None), slice(top, top + side), slice(left, left + side))
                        canvas[here] += model(x[here][None])[0]
                        count[here] += 1
                    p = F.interpolate((canvas / count)[None], size=image.shape[1:], mode="bilinear")[0]
                    (p.flip(2) if flip else p).softmax(0)
        cases = {"one": one_at_a_time, "predict": partial(
            segmenter.predict, model, image, size=side, window=side, stride=stride, scales=args.scales, flip=True,
            batch_size=args.batch_size)}
        times = alternate(cases, args.rounds, lambda case: 1e3 * seconds(case, device, clock))
        rows.append({"attention": attn, "one at a time ms": median(times["one"]),
                     "predict ms": median(times["predict"]), "ratio": median_ratio(times["one"], times["predict"])})
    report(args, device, f"Segmenter-{args.model}, patch {args.patch_size}, window {side}, stride {stride}, "
           f"{args.num_classes} classes, {len(args.scales)} scales flipped, ms per image, {args.clock} clock, medians "
           f"of {args.rounds} rounds", rows)


def main():
    args = get_args(sys.argv[1:])
    if args.threads:
        torch.set_num_threads(args.threads)
    device = common.setup(args.device)[0]
    args.function(args, device)


if __name__ == "__main__":
    common.run(main)
