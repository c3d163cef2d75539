"""Tools that every script uses: flags, processes, the log, checkpoints, tables.

This file imports none of our modules, so every module can import it.
"""

import argparse
import ctypes
import functools
import importlib.util
import io
import json
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from datetime import date, datetime
from pathlib import Path

# A waiting thread of PyTorch checks for work this many times, and then sleeps. Threads that never
# sleep slow down other programs (docs/data.md). PyTorch reads the variable when it is imported.
# Your own value of this variable, or of OMP_WAIT_POLICY, stays.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# Linux's C library keeps up to 1 GB of freed memory, instead of giving it back after every tensor.
# So a training step takes 5 to 10 % less processor time.
if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):
    ctypes.CDLL(None).mallopt(-3, 2 ** 25)              # M_MMAP_THRESHOLD
    ctypes.CDLL(None).mallopt(-1, 2 ** 30)              # M_TRIM_THRESHOLD

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402
from tqdm import tqdm  # noqa: E402

LOG_EVERY = 20                          # steps between two rows of a run's log
MIN_LR = 1e-5                           # the last learning rate of train_cls.py and train_seg.py
# Weight decay applies to matrices whose names end in one of these words: the weights of layers,
# a FAN's temperature, S of Scaled Attention, and the two projections of Segmenter's decoder.
MATRICES = ("weight", "mlp.temperature", "learned.s", "proj_patch", "proj_classes")


class InputError(ValueError):
    """An error in the user's input: a flag, a path or the content of a file. `run` prints it."""


def run(main):
    """Call a script's main(). Errors in the user's input print one line; others show a traceback.

    Errors in the user's input are InputErrors, and files that cannot be read or written.
    """
    # Numbers below 1e-38 become 0, because a CPU computes with them slowly (docs/data.md).
    # DataLoader workers inherit this setting.
    torch.set_flush_denormal(True)
    # If the terminal's encoding does not have a letter, print an escape, such as \u03bb.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        main()
        if dist.is_initialized():
            dist.destroy_process_group()
    except (InputError, OSError) as e:
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


@functools.cache
def print_once(line):
    """Print a line in the first process, unless the same line was printed before."""
    print0(line)


def bar(items, text, **options):
    """Return a progress bar over items, for the first process in a terminal. options: for tqdm."""
    disable = None if is_first() else True              # None: tqdm shows it in a terminal only
    return tqdm(items, text, disable=disable, **options)


def at_least_float32(x):
    """Convert bf16 and float16 to float32; keep float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# --- flags: a table {name: (default, help) or (default, help, allowed)} ---------------------------

# The flags that every trainer has. None: yes or no, as the machine allows.
RUNNING = dict(
    seed=(0, "seed of weights, order and random changes", (0, 2 ** 31 - 1)),
    out_dir=("", "folder of the run; without this flag out/<data>_<attn>"),
    device=("", "cuda, mps or cpu; without this flag the best found"),
    amp=(None, "bf16 autocast; without this flag on GPUs that support it"),
    compile=(None, "compile the model; without this flag on CUDA devices"),
    max_steps=(0, "stop at this step; the schedule stays the same; 0: never"),
)
# The flags of a resumed run: what belongs to the machine, where to stop, and the remedies for a
# loss that is not finite. The other settings come from the checkpoint.
OF_RESUME = ("resume", "data_dir", "num_workers", "device", "amp", "compile", "max_steps", "lr",
             "clip")
# Flags that may differ between the nodes of a run.
OF_NODE = ("data_dir", "num_workers", "device", "init_from", "backbone", "out_dir", "resume")
ONE_OR_MORE = (1, math.inf)                             # allowed values of a number
SHARE = (0, 1)


def new_parser(doc):
    """Return a parser of flags. --help begins with `doc`, the docstring of a script."""
    layout = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=doc, usage="%(prog)s [--flag value ...]",
                                   formatter_class=layout, allow_abbrev=False)


def first_flags(**choices):
    """Read the flags that choose which other flags exist. Returns a namespace; None: not given.

    choices: {flag: its values}; None allows any text.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name, values in choices.items():
        parser.add_argument(f"--{name}", choices=values)
    flags, _ = parser.parse_known_args()
    return flags


def parse(table, doc, words=None):
    """Parse flags. words: a list instead of the command line. Returns a namespace.

    table: {name: (default, help)}. A flag has the type of its default; a list takes several values.
    A third entry has the allowed values: (lowest, highest) of a number, by default (0, inf); or all
    values of a text.
    """
    parser = new_parser(doc)
    for name, entry in table.items():
        add_flag(parser, name, *entry)
    return parser.parse_args(words)


def parse_resumed(folder, task, make_table, doc):
    """Parse the command line of --resume. Returns the flags of the run, and its last checkpoint.

    Only the flags in OF_RESUME can be given. make_table: a function that returns the table of flags
    for the stored flags, {name: value}.
    """
    checkpoint = load(Path(folder, "last.pt"))
    check_task(checkpoint, task)
    stored = checkpoint["args"] | dict(resume=folder, out_dir=folder, device="", max_steps=0)
    table = make_table(stored)
    # The flags that can be given, with the stored values as defaults.
    allowed = {name: (stored[name], *table[name][1:]) for name in OF_RESUME if name in stored}
    given = parse(allowed, doc)
    return argparse.Namespace(**(stored | vars(given))), checkpoint


def with_recipe(table, recipe):
    """Return a table of flags with the defaults of a recipe.

    recipe: {name: default}. An entry of a table instead of a default adds a flag, or replaces one.
    """
    table = dict(table)
    for name, value in recipe.items():
        entry = value
        if not isinstance(value, tuple):
            entry = (value, *table[name][1:])
        table[name] = entry
    return table


def add_flag(parser, name, default, text, allowed=None):
    """Add a flag to a parser. The arguments are an entry of a table of flags."""
    how = dict(default=default)                         # the keywords of add_argument
    one = default                                       # one value, whose type the flag has
    if isinstance(default, list):
        how["nargs"] = "*"
        how["metavar"] = name.upper()
        one = default[0] if default else ""
    if one is None or isinstance(one, bool):
        how["action"] = argparse.BooleanOptionalAction  # --name and --no-name
    elif isinstance(one, str):
        how["choices"] = allowed
    else:
        how["type"] = functools.partial(number, whole=isinstance(one, int), allowed=allowed)
    shown = " ".join(map(str, default)) if isinstance(default, list) else str(default)
    if shown not in ("", "None", "False"):
        text += f" (default: {shown})"
    parser.add_argument(f"--{name}", help=text.replace("%", "%%"), **how)


def number(text, whole=False, allowed=None):
    """Return a number from text: 8, 0.1, 1e-3, inf or 2/255. A wrong text is argparse's error."""
    low, high = allowed or (0, math.inf)
    try:
        value = int(text) if whole else fraction(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:                        # NaN, too
        kind = "a whole number" if whole else "a number"
        limits = f"from {low} to {high}" if high < math.inf else f"of {low} or more"
        raise argparse.ArgumentTypeError(f"{text!r}: expected {kind} {limits}")
    return value


def fraction(text):
    """Return the number of a text such as 0.1 or 2/255; NaN for a text that is no number."""
    above, _, below = text.partition("/")
    try:
        return float(above) / float(below or 1)
    except (ValueError, ZeroDivisionError):
        return math.nan


def parse_layers(text, depth):
    """Turn "0", "0,1,2", "0-3" or "all" into a tuple of layers. InputError for other texts."""
    layers = set()
    for part in text.replace("all", f"0-{depth - 1}").split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        chosen = ()
        if match:
            first, last = match.groups()
            chosen = range(int(first), int(last or first) + 1)
        if not chosen:                                  # another text, or a range such as 3-1
            raise InputError(f"--rpc_layers {text}: expected 0 or 0,1,2 or 0-3 or all")
        layers |= set(chosen)
    if not layers or max(layers) >= depth:
        raise InputError(f"--rpc_layers {text}: expected layers from 0 to {depth - 1}")
    return tuple(sorted(layers))


def check_new_run(folder):
    """Raise InputError if a folder contains a run. This comes before the data are loaded."""
    if Path(folder, "log.jsonl").exists():
        raise InputError(f"{folder} contains a run; continue it with --resume "
                         f"{shlex.quote(folder)}, or choose another --out_dir")


def check_folder(folder, flag="data_dir"):
    """Raise InputError unless a folder exists. flag: the flag that names it."""
    if not Path(folder).is_dir():
        raise InputError(f"there is no folder {folder}; --{flag} selects it")


# --- processes ------------------------------------------------------------------------------------

def start_processes(device_name):
    """Connect the processes of torchrun. Returns this process's number, their count, the device.

    device_name: the value of --device; "" chooses the best device that PyTorch finds.
    """
    torch.backends.cudnn.allow_tf32 = False     # the default rounds the inputs of convolutions
    best = "cpu"
    if torch.backends.mps.is_available():
        best = "mps"
    if torch.cuda.is_available():
        best = "cuda"
    try:
        device = torch.device(device_name or best)
    except RuntimeError:
        raise InputError(f"--device {device_name}: expected cuda, mps or cpu") from None
    if device.type not in ("cpu", best):
        raise InputError(f"--device {device_name}: PyTorch finds no such device; choose {best}")
    if "RANK" not in os.environ:
        return 0, 1, device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    # Tensors on the CPU are sent by gloo, and tensors on a GPU by nccl.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend)
    return dist.get_rank(), dist.get_world_size(), device


def check_equal(value, what):
    """Raise InputError unless all processes have the same value. what: its name in the message."""
    if dist.is_initialized():
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        if any(other != values[0] for other in values):
            raise InputError(f"the processes have different {what}; expected the same "
                             f"files and flags on every node")


def check_same_run(args, first, crc):
    """Raise InputError unless all processes have the same flags, first step and data.

    crc: the checksum of the data.
    """
    flags = {name: value for name, value in vars(args).items() if name not in OF_NODE}
    check_equal((flags, first), "flags or checkpoints")
    check_equal(crc, "data")


def check_equal_weights(models):
    """Raise InputError unless all processes have the same weights: they sum the bytes of each."""
    sums = []
    for model in models:
        weights = [p.detach().flatten().view(torch.uint8) for p in model.parameters()]
        sums.append(sum(weight.sum().item() for weight in weights))
    check_equal(sums, "checkpoints")


def weight_decay_groups(model, weight_decay):
    """Return the optimiser's groups of trained parameters. Weight decay applies to matrices.

    A BatchNorm with frozen weights is put into eval mode, so its running means are frozen, too.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d) and not module.weight.requires_grad:
            module.eval()
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


def parallel(model, world, compiling):
    """Compile the model, and average gradients over processes. Returns (compiled, net).

    compiled: the model, compiled if `compiling`. net: `compiled`, whose backward pass also averages
    gradients over the `world` processes. All three have the same weights: `net` is trained, and
    `model` is evaluated and saved.
    """
    compiled = model
    if compiling:
        compiled = torch.compile(model, mode="reduce-overhead")     # with CUDA graphs
    net = compiled
    if world > 1:
        net = DDP(compiled, gradient_as_bucket_view=True)
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
    """Return whether to compute in bf16 autocast. wanted: the value of --amp, None by default."""
    if wanted is not None:
        return wanted
    if device.type != "cuda":
        return False
    return torch.cuda.is_bf16_supported(including_emulation=False)


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


def send(x, device):
    """Copy a tensor or list to the device; the CPU does not wait for the copy."""
    x = torch.as_tensor(x)
    if torch.device(device).type == "cuda" and x.device.type == "cpu":
        x = x.pin_memory()                   # the CPU waits while a GPU copies any other memory
    return x.to(device, non_blocking=True)


# --- the log: one JSON object per line ------------------------------------------------------------

def create_file(path):
    """Create an empty file and its folder, in the first process. InputError if it exists."""
    if is_first():
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            open(path, "x").close()
        except FileExistsError:
            raise InputError(f"{path} exists; choose another --out_dir") from None


def new_results(out_dir):
    """Create results.jsonl of an evaluation, in out_dir or else in out/eval_<time>; return it."""
    now = datetime.now().strftime("%Y%m%d_%H%M%S_%f")   # with microseconds, so no name occurs twice
    path = Path(out_dir or f"out/eval_{now}", "results.jsonl")
    create_file(path)
    return path


def start_log(args, first, model, device):
    """Create out_dir/log.jsonl, or cut the log of a resumed run after step `first`.

    Returns the path. A row is appended with the flags, the number of parameters and the machine.
    """
    path = Path(args.out_dir, "log.jsonl")
    if not args.resume:
        create_file(path)
    elif is_first():
        kept = [json.dumps(row) + "\n" for row in read_log(path) if row["step"] <= first]
        with replacing(path) as tmp:
            tmp.write_text("".join(kept), "utf-8")
    parameters = sum(p.numel() for p in model.parameters())
    machine = origin(device)
    append_row(path, dict(step=first, args=vars(args), parameters=parameters) | machine)
    print0(f"{parameters:,} parameters | {machine['processes']} x "
           f"{machine['hardware']} | {args.out_dir}, step {first}")
    return path


def append_row(path, row):
    """Append a row, a dict, to a file of JSON lines. Only the first process writes."""
    if is_first():
        with open(path, "a", encoding="utf-8") as f:
            f.write(json.dumps(row) + "\n")


def read_log(path):
    """Return the complete rows of a file of JSON lines, a list of dicts; [] without a file."""
    rows = []
    if os.path.exists(path):
        for line in Path(path).read_text("utf-8").splitlines(keepends=True):
            if line.endswith("\n"):                     # a kill leaves half a line
                rows.append(json.loads(line))
    return rows


def mean_over_processes(rows):
    """Return the means of numbers over steps and processes. rows: a tensor (n,) per step."""
    rows = torch.stack(rows)
    if dist.is_initialized():
        rows = rows / dist.get_world_size()
        dist.all_reduce(rows)                           # adds over processes
    return rows.cpu().mean(0).tolist()


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
    """Yield a temporary path, which replaces `path` at the end, so `path` is never half a file.

    An error removes the temporary file.
    """
    tmp = Path(f"{path}.{os.getpid()}.tmp")
    try:
        yield tmp
        os.replace(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)


def save(path, checkpoint):
    """Write a checkpoint, a dict of plain types and tensors, completely or not at all."""
    path = Path(path)
    for left in path.parent.glob(f"{path.name}.*.tmp"):             # by a kill while saving
        left.unlink()
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
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(checkpoint, dict):
            raise TypeError(f"found a {type(checkpoint).__name__}, no dict")
        return checkpoint
    except Exception as e:                                          # torch.load raises many types
        raise InputError(f"{path} cannot be loaded, expected a checkpoint by "
                         f"torch.save: {repr(e):.200}") from None


def note_step(path, checkpoint):
    """Print a line if a checkpoint was saved before the end of its training."""
    step = checkpoint.get("step", 0)                    # 0 in files of other programs
    total = checkpoint.get("total", 0)
    if step < total:
        print0(f"note: {path} is the network of step {step} of {total}")


SCRIPTS = {"classification": "train_cls.py", "segmentation": "train_seg.py",
           "language modelling": "train_lm.py"}


def check_task(checkpoint, task):
    """Raise InputError unless a checkpoint is for `task`, one of SCRIPTS."""
    own = checkpoint.get("task", "an unknown task")
    if own != task:
        raise InputError(f"the checkpoint is for {own}; expected one for {task}, which "
                         f"{SCRIPTS[task]} writes")


def first_difference(error):
    """Return the first difference that an error of load_state_dict lists, at most 120 letters.

    The error's first line names the network, and each further line has one difference.
    """
    return str(error).splitlines()[1].strip()[:120]


def largest_class(labels, classes):
    """Return the percentage of the largest class as text, or "" unless it is above 1.5 / classes.

    An accuracy has this reference: a network that always answers the largest class reaches it.
    labels: a list of class numbers. classes: how many classes the network has.
    """
    share = max(Counter(labels).values()) / len(labels)
    if share <= 1.5 / classes:
        return ""
    return f"largest class {100 * share:.2f}"


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
