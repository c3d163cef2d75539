"""Tools that every script uses: flags, processes, the log, checkpoints, tables.

This file imports none of our modules, so every module can import it.
"""

import argparse
import importlib.util
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
import zlib
from contextlib import contextmanager
from datetime import date
from pathlib import Path

# Waiting threads of PyTorch sleep after this many checks for work; otherwise they slow working
# threads down if other programs run, too (docs/data.md). Set before PyTorch is imported.
if "OMP_WAIT_POLICY" not in os.environ:                     # the user's own setting wins
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from tqdm import tqdm  # noqa: E402

LOG_EVERY = 20                          # steps between two rows of a run's log
MIN_LR = 1e-5                           # the last learning rate of train_cls.py and train_seg.py


class InputError(ValueError):
    """An error in the user's input: a flag, a path or the content of a file. `run` prints it."""


def run(main):
    """Call a script's main(). An InputError prints one line; other exceptions show a traceback."""
    torch.set_flush_denormal(True)      # for speed (docs/data.md), also in DataLoader workers
    if isinstance(sys.stdout, io.TextIOWrapper):        # letters that a terminal lacks: \u03bb
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        main()
        if dist.is_initialized():
            dist.destroy_process_group()
    except InputError as e:
        # An error in a DataLoader worker arrives with its traceback; the last line is the message.
        *_, words = str(e).splitlines()
        words = words.removeprefix("common.InputError: ")
        sys.exit(f"error: {words}")


def is_first():
    """Return True in the process that prints and writes: rank 0 of torchrun, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def print0(*lines):
    """Print lines in the first process only, above the progress bar if there is one."""
    if is_first():
        tqdm.write("\n".join(lines))


def bar(items, text, **options):
    """Return a progress bar over items, for the first process in a terminal. options: for tqdm."""
    hidden = not is_first() or None                     # None: show it in a terminal only
    return tqdm(items, text, disable=hidden, **options)


def wide(x):
    """Convert bf16 and float16 to float32; keep float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# --- flags ----------------------------------------------------------------------------------------

def new_parser(doc):
    """Return a parser of flags. --help begins with `doc`, the docstring of a script."""
    layout = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=doc, usage="%(prog)s [--flag value ...]",
                                   formatter_class=layout, allow_abbrev=False)


def parse_flags(parser, recipes, default):
    """Parse the flags. Priority: command line, then the run of --resume, then the recipe of --data.

    recipes: {data set: {flag: value}}. default: the data set without --data and --data_dir.
    Returns (args, checkpoint): the flags, and the checkpoint of --resume or {}.
    """
    # Three flags choose the defaults of the others.
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--data", "--data_dir", "--resume"):
        first.add_argument(name)
    given, _ = first.parse_known_args()
    checkpoint = {}
    if given.resume:
        checkpoint = load(Path(given.resume, "last.pt"))
    # Flags that belong to one command or machine are not restored.
    stored = dict(checkpoint.get("args", {}))
    for name in ("device", "download", "max_steps", "out_dir", "resume"):
        stored.pop(name, None)
    if given.data_dir:
        default = "folder"
    data = given.data or stored.get("data") or default
    parser.set_defaults(**(recipes.get(data, {}) | stored | dict(data=data)))
    args = parser.parse_args()
    return args, checkpoint


def positive(text):
    """Return a flag's whole number; an error below 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 or more")
    return value


def natural(text):
    """Return a flag's whole number; an error below 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text}: expected 0 or more")
    return value


def not_negative(text):
    """Return a flag's number; an error below 0."""
    value = float(text)
    if not value >= 0:                                  # NaN, too
        raise argparse.ArgumentTypeError(f"{text}: expected 0 or more")
    return value


def share(text):
    """Return a flag's number from 0 to 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a number from 0 to 1")
    return value


def typed_flags(parser):
    """Return the names of the flags that are on the command line, a set."""
    names = vars(parser.parse_args())
    empty = argparse.Namespace(**dict.fromkeys(names))  # argparse sets no default over a value
    values = vars(parser.parse_args(namespace=empty))
    return {name for name, value in values.items() if value is not None}


def reject_flags(names, why):
    """Raise InputError if there are names of flags, which would do nothing. why: with --resume."""
    if names:
        flags = ", ".join(f"--{name}" for name in sorted(names))
        raise InputError(f"{flags}: no effect {why}; remove it")


def parse_layers(text, depth):
    """Turn "0", "all", "0,1,2" or "0-3" into a tuple of layers."""
    layers = []
    for part in text.replace("all", f"0-{depth - 1}").split(","):
        if not re.fullmatch(r"\d+(-\d+)?", part):
            raise InputError(f"--rpc_layers {text}: expected 0 or 0,1,2 or 0-3 or all")
        first, _, last = part.partition("-")
        layers += range(int(first), int(last or first) + 1)
    if not layers:
        raise InputError(f"--rpc_layers {text} names no layer")
    return tuple(layers)


def new_run(folder):
    """Return `folder`. InputError if it already contains a run."""
    if Path(folder, "last.pt").exists():
        raise InputError(f"{folder} holds a run; use --resume {folder}, or another "
                         f"--out_dir")
    if Path(folder, "log.jsonl").exists():
        raise InputError(f"{folder} holds the log of a run that has no checkpoint yet; "
                         f"choose another --out_dir, or delete {folder}/log.jsonl if no "
                         f"run is active")
    return folder


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
    """Raise InputError unless all processes have the same value. what: its name in the message."""
    if dist.is_initialized():
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        if isinstance(value, dict):
            values = differing_entries(values)
        if any(other != values[0] for other in values):
            raise InputError(f"the processes have different {what}: {str(values):.300}; "
                             f"expected the same files and flags on every node")


def differing_entries(dicts):
    """Return dicts with the same keys without the entries that all of them have in common."""
    first = dicts[0]
    differ = []
    for name in first:
        if any(other[name] != first[name] for other in dicts):
            differ.append(name)
    return [dict(zip(differ, map(each.get, differ))) for each in dicts]


def share_buffers(model):
    """Copy the buffers of rank 0, such as the means of BatchNorm, to the other processes."""
    if dist.is_initialized():
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)


def allowed_cores():
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):                # Linux; containers and SLURM allow fewer
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_workers():
    """Return the default of --num_workers: one process per core, at most 10."""
    return min(allowed_cores(), 10)


def use_bf16(wanted, device):
    """Return whether to compute in bf16 autocast. wanted: the value of --amp.

    With bf16, the float32 matrix products and convolutions that remain are faster, too (TF32).
    """
    amp = wanted
    if wanted is None:
        amp = (device.type == "cuda"
               and torch.cuda.is_bf16_supported(including_emulation=False))
    precision = "high" if amp else "highest"
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = amp
    return amp


def use_compile(wanted, device):
    """Return whether to compile the model. wanted: the value of --compile.

    The default is to compile on a CUDA device. torch.compile generates code by Triton, which needs
    a C compiler and a GPU of compute capability 7.0; if one is missing, a line says so.
    """
    if wanted is not None or device.type != "cuda":
        return bool(wanted)
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
    """Create --out_dir and its log.jsonl; log and print the settings. Returns the log's path.

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
    """Keep the rows of a log up to `step`. The last line is left out if a kill has cut it."""
    if not path.exists():
        print0(f"{path} is missing; a new log begins after step {step}")
        return create_log(path)
    lines = path.read_text("utf-8").splitlines(keepends=True)
    complete = [line for line in lines if line.endswith("\n")]
    kept = [line for line in complete if json.loads(line)["step"] <= step]
    with replacing(path) as tmp:
        tmp.write_text("".join(kept), "utf-8")


def append_row(path, row):
    """Append a row, a dict, to a file of JSON lines. Only the first process writes.

    JSON has no infinity: lambda = inf becomes "inf".
    """
    if is_first():
        with open(path, "a", encoding="utf-8") as f:
            f.write(json.dumps(row).replace(": Infinity", ': "inf"') + "\n")


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
                raise InputError(f"{path}, line {number}: the row is not complete, because a "
                                 f"program or disk stopped; delete this line to use the others")
            rows.append(row)
    return rows


def log_steps(path, step, pending, clock, batch_size, unit, **numbers):
    """Log the mean loss, gradient norm and speed of the last steps; print loss and speed.

    pending: one dict of 0-d tensors per step: loss, grad_norm, your own numbers. Each mean is over
    steps and processes. clock: the time.perf_counter() before these steps. batch_size: how many
    units, such as "images", a step has. numbers: other fields of the row. In a step, the CPU waits
    for the device here only; with --adv_eps also in each attack, which checks the images and the
    logits. InputError if a loss or norm is not finite.
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
    rate = batch_size * len(pending) / (time.perf_counter() - clock)
    for i, (loss, norm, *_) in enumerate(recent.tolist(), step - len(pending) + 1):
        if not math.isfinite(loss + norm):
            raise InputError(f"not finite at step {i}: loss {loss:.4g}, gradient norm "
                             f"{norm:.4g}; try a smaller --lr or --clip")
    means = recent.mean(0).tolist()
    means = dict(zip(names, means))
    row = {"step": step} | means | {f"{unit}_per_s": rate} | numbers
    append_row(path, row)
    print0(f"step {step:6d}  loss {means['loss']:.4f}  {rate:.0f} {unit}/s")


def origin(device):
    """Return fields of a row: date, commit, PyTorch's version, hardware, number of processes.

    Processors round differently.
    """
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    else:
        threads = torch.get_num_threads()
        hardware = f"{device.type}, {processor()}, {threads} threads"
    processes = dist.get_world_size() if dist.is_initialized() else 1
    return dict(date=str(date.today()), commit=commit(), torch=torch.__version__,
                hardware=hardware, processes=processes)


def commit():
    """Return the commit of this code, with "-dirty" if files have changed, or "no git"."""
    if not shutil.which("git"):
        return "no git"
    command = ("git --no-optional-locks describe --always --dirty --abbrev=12 "
               "--exclude=*").split()
    folder = Path(__file__).parent
    git = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return git.stdout.strip() or "no git"


def processor():
    """Return name, family and model of the processor, as Linux reports them."""
    info = Path("/proc/cpuinfo")
    fields = {}
    if info.exists():
        fields = dict(re.findall(r"(.+?)\s*: (.*)", info.read_text()))
    return (f"{fields.get('model name', '')} family {fields.get('cpu family')} "
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
    """Read a checkpoint: a file, or best.pt, else last.pt, of a run's folder. Tensors: on the CPU.

    weights_only=True: code in the file does not run.
    """
    path = Path(path)
    if path.is_dir():
        best = path / "best.pt"
        path = best if best.exists() else path / "last.pt"
    if not path.exists():
        raise InputError(f"there is no checkpoint {path}")
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):    # DeiT's files contain one
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:                                          # torch.load raises many types
        raise InputError(f"{path} cannot be loaded: {repr(e):.200}") from None


def resume(checkpoint, current, model, optimizer):
    """Load the checkpoint of --resume. InputError if it has other values than `current`, a dict.

    The optimiser keeps its own settings, such as weight decay.
    """
    stored = checkpoint | checkpoint["args"] | checkpoint["model_config"]
    for name, value in current.items():
        if stored.get(name) != value:
            raise InputError(f"--resume cannot change {name}: it was "
                             f"{stored.get(name)!r:.60} and is {value!r:.60}; resume with "
                             f"the same data and settings")
    model.load_state_dict(checkpoint["model"])
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
    """Return the CRC-32 of a model's weights, which identifies them in a row: 8 hex digits."""
    crc = 0
    for tensor in model.state_dict().values():
        flat = tensor.cpu().contiguous().flatten()
        data = flat.view(torch.uint8).numpy()
        crc = zlib.crc32(data.tobytes(), crc)
    return f"{crc:08x}"


def table(rows, header):
    """Return a Markdown table with aligned columns. rows: lists of cells. header: its first row."""
    def escaped(row):
        return [str(cell).replace("|", r"\|") for cell in row]

    cells = [escaped(header)]
    for row in rows:
        cells.append(escaped(row))
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = []
    for row in cells:
        padded = [cell.ljust(width) for cell, width in zip(row, widths)]
        lines.append("| " + " | ".join(padded) + " |")
    dashes = ["-" * (width + 2) for width in widths]
    lines.insert(1, "|" + "|".join(dashes) + "|")
    return "\n".join(lines)
