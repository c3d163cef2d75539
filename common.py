"""Tools that every script uses: flags, processes, the log, checkpoints, tables.

This file imports none of our modules, so every module can import it.
"""

import argparse
import functools
import importlib.util
import io
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import zlib
from contextlib import contextmanager
from datetime import date
from fractions import Fraction
from pathlib import Path

# A waiting thread of PyTorch checks for work this many times, and then sleeps. Threads that never
# sleep slow down the working threads if other programs run, too (docs/data.md). PyTorch reads the
# variable when it is imported. A value that you set yourself stays. OMP_WAIT_POLICY chooses between
# checking and sleeping, too; if you set it, it counts.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402
from tqdm import tqdm  # noqa: E402

LOG_EVERY = 20                          # steps between two rows of a run's log
MIN_LR = 1e-5                           # the last learning rate of train_cls.py and train_seg.py
# Weight decay applies to matrices whose names end in one of these words: the weights of layers,
# a FAN's temperature, S of Scaled Attention, and the two projections of Segmenter's decoder.
MATRICES = ("weight", "mlp.temperature", "learned.s", "proj_patch", "proj_classes")
# Flags that --resume does not restore, because they belong to one command. --resume restores
# --data_dir and --num_workers; on another machine, give them again.
NOT_RESTORED = ("device", "download", "max_steps", "out_dir", "resume")
# Flags that may differ between the machines of one run.
PER_MACHINE = ("data_dir", "num_workers", "device", "init_from", "backbone", "out_dir",
               "resume")
# Attentions that read none of the flags --n_iter, --lambd, --form and --mu_over. Your own attention
# is not in this list, because it may read them.
WITHOUT_PAP = ("softmax", "symmetric", "scaled_s", "scaled_alpha")


class InputError(ValueError):
    """An error in the user's input: a flag, a path or the content of a file. `run` prints it."""


def run(main):
    """Call a script's main(). An InputError prints one line; other exceptions show a traceback."""
    # Numbers below 1e-38 become 0, because a CPU computes with them slowly (docs/data.md).
    # DataLoader workers inherit this setting.
    torch.set_flush_denormal(True)
    # Print a letter that the terminal's encoding lacks as an escape, such as \u03bb.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        main()
        if dist.is_initialized():
            dist.destroy_process_group()
    except InputError as e:
        # An error in a DataLoader worker arrives with its traceback; the last line is the message.
        message = str(e).splitlines()[-1]
        message = message.removeprefix("common.InputError: ")
        sys.exit(f"error: {message}")


def is_first():
    """Return True in the process that prints and writes: rank 0 of torchrun, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def print0(*lines):
    """Print lines in the first process only, above the progress bar if there is one."""
    if is_first():
        tqdm.write("\n".join(lines))


def bar(items, text, **options):
    """Return a progress bar over items, for the first process in a terminal. options: for tqdm."""
    disable = None if is_first() else True              # None: tqdm shows it in a terminal only
    return tqdm(items, text, disable=disable, **options)


def at_least_float32(x):
    """Convert bf16 and float16 to float32; keep float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# --- flags ----------------------------------------------------------------------------------------

def new_parser(doc):
    """Return a parser of flags. --help begins with `doc`, the docstring of a script."""
    layout = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=doc, usage="%(prog)s [--flag value ...]",
                                   formatter_class=layout, allow_abbrev=False)


def parse_flags(parser, recipes, default, task):
    """Parse the flags. Priority: command line, then the run of --resume, then the recipe of --data.

    recipes: {data set: {flag: value}}. default: the data set if neither --data nor --data_dir is
    given. task: what the script trains for; the checkpoint of --resume must have the same task.
    Returns (args, checkpoint): the flags, and the checkpoint of --resume or {}.
    """
    # Three flags choose the defaults of all others, so they are parsed first.
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--data", "--data_dir", "--resume"):
        first.add_argument(name)
    choices, _ = first.parse_known_args()
    checkpoint = {}
    if choices.resume:
        checkpoint = load(Path(choices.resume, "last.pt"))
        check_task(checkpoint, task, parser.prog)
    restored = dict(checkpoint.get("args", {}))
    for name in NOT_RESTORED:
        restored.pop(name, None)
    data = choices.data or restored.get("data")
    if not data:
        data = "folder" if choices.data_dir else default
    defaults = recipes.get(data, {}) | restored | dict(data=data)
    parser.set_defaults(**defaults)
    return parser.parse_args(), checkpoint


def check_range(text, value, low, high=math.inf):
    """Raise argparse's error unless low <= value <= high. text: the value on the command line."""
    if not low <= value <= high:                        # NaN, too
        expected = f"a number from {low} to {high}"
        if high == math.inf:
            expected = f"{low} or more"
        raise argparse.ArgumentTypeError(f"{text}: expected {expected}")


def positive_int(text):
    """Return a flag's whole number, 1 or more."""
    value = int(text)
    check_range(text, value, 1)
    return value


def nonnegative_int(text):
    """Return a flag's whole number, 0 or more."""
    value = int(text)
    check_range(text, value, 0)
    return value


def seed(text):
    """Return a flag's seed, a whole number from 0 to 2**31 - 1, because data/rng.py uses int32."""
    value = int(text)
    check_range(text, value, 0, 2 ** 31 - 1)
    return value


def nonnegative_float(text):
    """Return a flag's number, 0 or more; inf is allowed."""
    value = float(text)
    check_range(text, value, 0)
    return value


def zero_to_one(text):
    """Return a flag's number from 0 to 1."""
    value = float(text)
    check_range(text, value, 0, 1)
    return value


def below_one(text):
    """Return a flag's number, at least 0 and below 1."""
    value = zero_to_one(text)
    if value == 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a number below 1")
    return value


def fraction(text):
    """Return a flag's number from 0 to 1, which may be written as a fraction: 2/255."""
    try:
        value = float(Fraction(text))
    except ZeroDivisionError:
        value = math.inf
    check_range(text, value, 0, 1)
    return value


def typed_flags(parser, words=None):
    """Return the names of the flags on the command line, a set. words: a list instead of it."""
    names = vars(parser.parse_args(words))
    # argparse sets a default only if the namespace lacks the name. Here the namespace has all
    # names, with the value None. So only the flags on the command line get a value.
    empty = argparse.Namespace(**dict.fromkeys(names))
    values = vars(parser.parse_args(words, empty))
    return {name for name, value in values.items() if value is not None}


def reject_flags(names, why):
    """Raise InputError if a flag would do nothing.

    names: the names of such flags, a set. why: the reason, such as "with --resume".
    """
    if names:
        flags = ", ".join(f"--{name}" for name in sorted(names))
        raise InputError(f"{flags}: no effect {why}; remove it")


def set_missing(args, values):
    """Set the flags in `values`, {name: value}, that are None in args."""
    for name, value in values.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def attention_flags(flag, attentions, forms):
    """Add the flags --attn, --rpc_layers, --n_iter, --lambd and --form.

    flag: add_argument of a group of flags. attentions, forms: the values of --attn and of --form.
    """
    attn = "rpc is RPC-Attention in --rpc_layers, symmetric elsewhere"
    n_iter = "steps of PAP, the algorithm in RPC-Attention"
    lambd = "the larger lambda is, the fewer entries of PAP's S are not 0; inf keeps S at 0"
    factor = ""
    if "rpca" in attentions:
        attn += "; rpca has robust PCA in the place of PAP"
        n_iter += ", or of robust PCA"
        factor = "; for rpca a factor of robust PCA's 1 / sqrt(tokens) (default: 1)"
    flag("--attn", choices=sorted(attentions), default="rpc", help=f"{attn} (default: rpc)")
    flag("--rpc_layers", default="0", help="layers with RPC-Attention: 0 or 0,1,2 or "
         "0-3 or all; layer 0 is the first (default: 0)")
    flag("--n_iter", type=positive_int, help=f"{n_iter}; the paper: 4 to 6 with "
         "--rpc_layers 0, and 2 with all (default: 4)")
    flag("--lambd", type=nonnegative_float, help=f"{lambd}; the paper: 4 with "
         f"--rpc_layers 0, and 3 with all (default: 4){factor}")
    flag("--form", choices=forms, help="PAP as in the released code, as in the printed "
         "paper, or as in the paper with ADMM's sign (default: released)")


def useless_attention_flags(attn, layer_patterns):
    """Return the names of the flags that do nothing with --attn, a set.

    layer_patterns: the values of --attn that have --rpc_layers.
    """
    useless = set()
    if attn not in layer_patterns:
        useless.add("rpc_layers")
    if attn in WITHOUT_PAP:
        useless |= {"n_iter", "lambd", "form", "mu_over"}
    if attn == "rpca":
        useless.add("form")
    return useless


def running_flags(flag):
    """Add the flags --device, --amp, --compile, --max_steps and --resume to a group of flags."""
    boolean = argparse.BooleanOptionalAction            # --name and --no-name
    flag("--device", help="cuda, mps or cpu (default: the best found)")
    flag("--amp", action=boolean,
         help="bf16 autocast (default: on GPUs that support it)")
    flag("--compile", action=boolean, help="compile the model (default: on CUDA devices)")
    flag("--max_steps", type=positive_int,
         help="stop at this step of the run; the schedule stays the same")
    flag("--resume", help="continue the run in this folder, with its flags; a flag on the "
         "command line replaces the flag of the run")


def evaluation_data(args, trained, built_in):
    """Choose the data of --eval_only: those of the training, unless flags name others.

    args.data: None without --data. trained: the flags of the training. built_in: the data set that
    the program makes itself, without a folder. Returns (data, data_dir).
    """
    data = args.data or trained["data"]
    if data == built_in and args.data_dir:
        if args.data:
            raise InputError(f"--data_dir: no effect with --data {built_in}; remove it")
        data = "folder"
    data_dir = args.data_dir
    if not data_dir and data == trained["data"]:
        data_dir = trained["data_dir"]
    return data, data_dir


def parse_layers(text, depth):
    """Turn "0", "all", "0,1,2" or "0-3" into a tuple of layers."""
    layers = []
    for part in text.replace("all", f"0-{depth - 1}").split(","):
        if not re.fullmatch(r"\d+(-\d+)?", part):
            raise InputError(f"--rpc_layers {text}: expected 0 or 0,1,2 or 0-3 or all")
        first, _, last = part.partition("-")
        last = last or first                            # 2 means 2-2
        layers += range(int(first), int(last) + 1)
    if not layers:                                      # 3-1
        raise InputError(f"--rpc_layers {text}: expected a layer, such as 0 or 0-3")
    return tuple(sorted(set(layers)))


def check_new_run(folder):
    """Raise InputError if `folder` already contains a run.

    This check comes before the data are loaded. create_log checks again, because another run can
    begin in between.
    """
    if Path(folder, "last.pt").exists():
        raise InputError(f"{folder} contains a run; use --resume {folder}, or another "
                         f"--out_dir")
    if Path(folder, "log.jsonl").exists():
        raise InputError(f"{folder} contains the log of a run without a checkpoint; choose "
                         f"another --out_dir, or delete {folder}/log.jsonl if no run is "
                         f"active")


# --- processes ------------------------------------------------------------------------------------

def start_processes(device_name):
    """Connect the processes of torchrun. Returns this process's number, their count, the device.

    device_name: the value of --device; None chooses the best device that PyTorch finds.
    """
    best = "cpu"
    if torch.backends.mps.is_available():
        best = "mps"
    if torch.cuda.is_available():
        best = "cuda"
    device = torch.device(device_name or best)
    if "RANK" not in os.environ:
        return 0, 1, device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    # Tensors on the CPU are sent by gloo, and tensors on a GPU by nccl.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend)
    return dist.get_rank(), dist.get_world_size(), device


def from_first(value):
    """Return the value of rank 0 in every process. value: a plain Python object."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


def same_everywhere(value, what):
    """Raise InputError unless all processes have the same value. what: its name in the message.

    Dicts must have the same keys. The message shows the entries of a dict that differ.
    """
    if not dist.is_initialized():
        return
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    first = values[0]
    if all(other == first for other in values):
        return
    different = values
    if isinstance(value, dict):
        names = set()
        for other in values:
            names |= {name for name in first if other[name] != first[name]}
        different = []
        for other in values:
            different.append({name: other[name] for name in sorted(names)})
    raise InputError(f"the processes have different {what}: {str(different):.300}; expected "
                     f"the same files and flags on every node")


def same_run(args, data, first):
    """Raise InputError unless all processes have the same data, flags and first step."""
    same_everywhere(data, "data")
    flags = {name: value for name, value in vars(args).items() if name not in PER_MACHINE}
    same_everywhere(flags | dict(first_step=first), "flags")


def weight_decay_groups(model, weight_decay):
    """Return the optimiser's groups of trained parameters. Weight decay applies to matrices."""
    decay = []
    no_decay = []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if p.ndim > 1 and name.endswith(MATRICES):
            decay.append(p)
        else:
            no_decay.append(p)
    return [dict(params=decay, weight_decay=weight_decay),
            dict(params=no_decay, weight_decay=0)]


def parallel(model, world, compiling, mode="reduce-overhead"):
    """Compile the model, and average gradients over processes. Returns (compiled, net).

    compiled: the model, compiled if `compiling`. net: `compiled`, whose backward pass also averages
    gradients over the `world` processes. All three have the same weights: `net` is trained, and
    `model` is evaluated and saved. mode: of torch.compile; reduce-overhead runs CUDA graphs.
    """
    compiled = model
    if compiling:
        compiled = torch.compile(model, mode=mode)
    net = compiled
    if world > 1:
        net = DDP(compiled, gradient_as_bucket_view=True)
        # By default, DDP copies the buffers of rank 0 in each step. Only evaluations use buffers
        # that change (the means of a FAN's BatchNorm), and share_buffers copies them before an
        # evaluation. DDP's argument for it has another name in new versions of PyTorch; this
        # attribute exists in all versions.
        net.broadcast_buffers = False
    return compiled, net


def share_buffers(model):
    """Copy the buffers of rank 0, such as the means of BatchNorm, to the other processes."""
    if dist.is_initialized():
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)


def default_workers():
    """Return the default of --num_workers: one process per core that we may use, at most 10."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):                # on Linux; a container may allow fewer
        cores = len(os.sched_getaffinity(0))
    return min(cores, 10)


def use_bf16(wanted, device):
    """Set the precision of float32 products, and return whether to compute in bf16 autocast.

    wanted: the value of --amp, None by default. With bf16, the remaining products and convolutions
    are in TF32, otherwise in plain float32.
    """
    amp = wanted
    if amp is None:
        amp = False
        if device.type == "cuda":
            amp = torch.cuda.is_bf16_supported(including_emulation=False)
    precision = "high" if amp else "highest"
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = amp
    return amp


def use_compile(wanted, device):
    """Return whether to compile the model. wanted: the value of --compile, None by default.

    The default is to compile on a CUDA device. torch.compile generates code by Triton, which needs
    a C compiler and a GPU of compute capability 7.0. Prints a line if one of them is missing.
    """
    if wanted is not None:
        return wanted
    if device.type != "cuda":
        return False
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    triton = importlib.util.find_spec("triton")
    new_enough = torch.cuda.get_device_capability(device) >= (7, 0)
    if compiler and triton and new_enough:
        return True
    print0("the model is not compiled: torch.compile needs Triton, a C compiler (gcc or "
           "clang) and a GPU of compute capability 7.0 or more")
    return False


def check_batch_size(batch_size, world, n=math.inf):
    """Raise InputError unless the processes can share a batch evenly, and n images fill a batch."""
    if batch_size % world:
        raise InputError(f"--batch_size {batch_size}: expected a multiple of {world} "
                         f"processes")
    if batch_size > n:
        raise InputError(f"--batch_size {batch_size}: there are only {n} training "
                         f"images")


# --- the log: one JSON object per line ------------------------------------------------------------

def start_log(args, step, model, device, **numbers):
    """Create the log of a run, or continue it, and print a line. Returns the log's path.

    A row is appended with the flags, the number of parameters and the machine.
    step: 0, or the step of the checkpoint of a resumed run. numbers: other fields of the row.
    """
    path = Path(args.out_dir, "log.jsonl")
    if is_first():
        path.parent.mkdir(parents=True, exist_ok=True)
        if step == 0:
            create_log(path)
        else:
            cut_log(path, step)
    parameters = sum(p.numel() for p in model.parameters())
    machine = origin(device)
    settings = dict(step=step, args=vars(args), parameters=parameters)
    append_row(path, settings | machine | numbers)
    print0(f"{parameters:,} parameters | {machine['processes']} x "
           f"{machine['hardware']} | {args.out_dir}, step {step}")
    return path


def create_log(path):
    """Create an empty log. InputError if it exists, because a run owns its folder."""
    try:
        open(path, "x").close()
    except FileExistsError:
        raise InputError(f"{path} exists: another run has begun in this folder; choose "
                         f"another --out_dir") from None


def cut_log(path, step):
    """Keep the rows of a log up to `step`, without an incomplete last line, which a kill leaves."""
    if not path.exists():
        print0(f"{path} is missing; a new log begins after step {step}")
        return create_log(path)
    lines = path.read_text("utf-8").splitlines(keepends=True)
    complete = [line for line in lines if line.endswith("\n")]
    kept = [line for line in complete if json.loads(line)["step"] <= step]
    with replacing(path) as tmp:
        tmp.write_text("".join(kept), "utf-8")


def to_json(value, sort_keys=False):
    """Return a value of plain Python types as JSON.

    JSON has no infinity and no NaN: they become the texts "inf", "-inf" and "nan".
    """
    def finite(x):
        """Replace the infinities and NaNs in a value, at any depth."""
        if isinstance(x, dict):
            return {key: finite(entry) for key, entry in x.items()}
        if isinstance(x, (list, tuple)):
            return [finite(entry) for entry in x]
        if isinstance(x, float) and not math.isfinite(x):
            return str(x)
        return x

    return json.dumps(finite(value), sort_keys=sort_keys)


def append_row(path, row):
    """Append a row, a dict, to a file of JSON lines. Only the first process writes."""
    if is_first():
        with open(path, "a", encoding="utf-8") as f:
            f.write(to_json(row) + "\n")


def read_log(path):
    """Return the rows of a log, a list of dicts; [] without a file."""
    rows = []
    if os.path.exists(path):
        lines = Path(path).read_text("utf-8").splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                row = None
            if row is None or not line.endswith("\n"):
                raise InputError(f"{path}, line {number}: the row is incomplete, expected "
                                 f"one JSON object and a line break; delete this line")
            rows.append(row)
    return rows


def log_steps(path, step, pending, since, per_step, unit, **numbers):
    """Log the mean loss, gradient norm and speed of the last steps; print loss and speed.

    step: the number of the last step. pending: one dict of 0-d tensors per step: loss, grad_norm,
    your own numbers. Each mean is over steps and processes. since: the time.perf_counter() before
    these steps. per_step: the number of units per step. unit: for example "images". numbers:
    other fields of the row. InputError if a loss or norm is not finite.

    Here the CPU waits for the device. Other steps do not wait, unless --adv_eps is given: each
    attack waits to check the images and the logits.
    """
    names = list(pending[0])
    columns = []
    for name in names:
        columns.append(torch.stack([row[name] for row in pending]))
    recent = torch.stack(columns, 1)                                # (steps, n)
    if dist.is_initialized():
        recent = recent / dist.get_world_size()
        dist.all_reduce(recent)                                     # adds over processes
    recent = recent.cpu()
    per_second = per_step * len(pending) / (time.perf_counter() - since)
    first = step - len(pending) + 1
    for i, values in enumerate(recent.tolist(), first):
        of_step = dict(zip(names, values))
        loss = of_step["loss"]
        norm = of_step["grad_norm"]
        if not math.isfinite(loss + norm):
            raise InputError(f"not finite at step {i}: loss {loss:.4g}, gradient norm {norm:.4g}; "
                             f"try a smaller --lr or --clip")
    means = recent.mean(0).tolist()
    means = dict(zip(names, means))
    row = {"step": step} | means | {f"{unit}_per_s": per_second} | numbers
    append_row(path, row)
    print0(f"step {step:6d}  loss {means['loss']:.4f}  {per_second:.0f} {unit}/s")


def origin(device):
    """Return fields of a row: date, commit, PyTorch's version, hardware, number of processes.

    The hardware includes the processor's model, because processors round differently.
    """
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    else:
        threads = torch.get_num_threads()
        hardware = f"{device.type}, {processor()}, {threads} threads"
    processes = dist.get_world_size() if dist.is_initialized() else 1
    return dict(date=str(date.today()), commit=commit(), torch=torch.__version__,
                hardware=hardware, processes=processes)


@functools.cache
def commit():
    """Return the commit of this code, with "-dirty" if files have changed, or "no git".

    Git is asked once, because edits during a run do not change the code that is loaded.
    """
    if not shutil.which("git"):
        return "no git"
    # no lock: other programs can use git at the same time; --exclude=*: no tags
    command = ("git --no-optional-locks describe --always --dirty --abbrev=12 "
               "--exclude=*").split()
    folder = Path(__file__).parent
    git = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return git.stdout.strip() or "no git"


def processor():
    """Return name, family and model of the processor; only its type if Linux does not list them."""
    info = Path("/proc/cpuinfo")
    fields = {}
    if info.exists():
        fields = dict(re.findall(r"(.+?)\s*: (.*)", info.read_text()))
    if "model name" not in fields:                      # a Mac, Windows, ARM
        return platform.processor() or platform.machine()
    return (f"{fields['model name']} family {fields.get('cpu family')} "
            f"model {fields.get('model')}")


# --- checkpoints ----------------------------------------------------------------------------------

@contextmanager
def replacing(path):
    """Yield a temporary path, which replaces `path` at the end, so `path` is never half a file."""
    tmp = Path(f"{path}.{os.getpid()}.tmp")
    yield tmp
    os.replace(tmp, path)


def save(path, checkpoint):
    """Write a checkpoint, a dict of plain types and tensors, completely or not at all."""
    with replacing(path) as tmp:
        torch.save(checkpoint, tmp)


def load(path):
    """Read a checkpoint, with its tensors on the CPU.

    path: a file, or the folder of a run, whose best.pt is read if it exists, otherwise last.pt.
    """
    path = Path(path)
    if path.is_dir():
        best = path / "best.pt"
        path = best if best.exists() else path / "last.pt"
    if not path.exists():
        raise InputError(f"there is no checkpoint {path}")
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):    # DeiT's files contain one
            # weights_only=True: code in the file does not run.
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:                                          # torch.load raises many types
        raise InputError(f"{path} cannot be loaded, expected a checkpoint by torch.save: "
                         f"{repr(e):.200}") from None


def check_task(checkpoint, task, script):
    """Raise InputError unless a checkpoint is for `task`, so that `script` wrote it."""
    own = checkpoint.get("task", "an unknown task")
    if own != task:
        raise InputError(f"the checkpoint is for {own}; expected one for {task}, which "
                         f"{script} writes")


def first_difference(error):
    """Return the first difference that an error of load_state_dict lists, at most 120 letters.

    The error's first line names the network, and each further line has one difference.
    """
    return str(error).splitlines()[1].strip()[:120]


def resume(checkpoint, current, model, optimizer):
    """Load the checkpoint of --resume into the model and the optimiser.

    current: {name: value}, the settings and data that --resume must not change, for example
    classes, batch_size and attn. InputError if the checkpoint has another value.
    """
    # model_config comes last: in args, a flag that was not given is None.
    stored = checkpoint | checkpoint["args"] | checkpoint["model_config"]
    for name, value in current.items():
        if stored.get(name) != value:
            raise InputError(f"--resume cannot change {name}: it was "
                             f"{stored.get(name)!r:.60} and is {value!r:.60}; resume with "
                             f"the same data and settings")
    model.load_state_dict(checkpoint["model"])
    # load_state_dict would also load the settings of the groups. Keep the settings of the new
    # optimiser, which follow the flags of this command, such as another --weight_decay.
    state = checkpoint["optimizer"]
    groups = []
    for own, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        groups.append(own | dict(params=saved["params"]))
    optimizer.load_state_dict(state | dict(param_groups=groups))


def best_evaluation(checkpoint, folder):
    """Return the best evaluation of a resumed run, with its step; {} if best.pt is missing."""
    best = checkpoint.get("best", {})
    if best and not Path(folder, "best.pt").exists():
        print0(f"--resume {folder}: best.pt of step {best['step']} is missing; the best "
               f"of the next evaluations replaces it")
        return {}
    return best


def checksum(model):
    """Return the CRC-32 of a model's weights, 8 hex digits, by which rows name the weights."""
    crc = 0
    for tensor in model.state_dict().values():
        flat = tensor.cpu().contiguous().flatten()
        data = flat.view(torch.uint8).numpy()
        crc = zlib.crc32(data.tobytes(), crc)
    return f"{crc:08x}"


def table(rows, header):
    """Return a Markdown table with aligned columns. rows: lists of cells. header: its first row."""
    cells = []
    for row in [header, *rows]:
        cells.append([str(cell).replace("|", r"\|") for cell in row])
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = []
    for row in cells:
        padded = [cell.ljust(width) for cell, width in zip(row, widths)]
        lines.append("| " + " | ".join(padded) + " |")
    dashes = ["-" * (width + 2) for width in widths]
    lines.insert(1, "|" + "|".join(dashes) + "|")
    return "\n".join(lines)
