"""Tools that every script uses: flags, one-line errors, the log, checkpoints, tables.

This file imports none of our modules, so every module can import it. A script imports this file
before torch, because torch reads the setting SPINS when it is imported.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import zlib
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path

# The number of times that a waiting thread of PyTorch's OpenMP library, libgomp, checks for new
# work before it sleeps. libgomp reads the variable when torch is imported. With libgomp's default,
# waiting threads take the processor from working threads if other programs run, too. docs/data.md
# has the speeds.
SPINS = "10000"
if "OMP_WAIT_POLICY" not in os.environ:                     # the user's own setting wins
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)

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
    try:
        main()
    except InputError as e:
        # An error in a DataLoader worker arrives with its traceback; the last line is the message.
        words = str(e).splitlines()[-1].removeprefix("common.InputError: ")
        sys.exit(f"error: {words}")


def is_first():
    """Return True in the process that prints and writes: rank 0 of torchrun, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def print0(*lines):
    """Print lines on rank 0 only, above the progress bar if there is one."""
    if is_first():
        tqdm.write("\n".join(lines))


def bar(items, text, **how):
    """Return a progress bar over items, for rank 0 in a terminal. how: more arguments of tqdm."""
    return tqdm(items, text, disable=not is_first() or None, **how)     # None: only in a terminal


# --- flags ----------------------------------------------------------------------------------------

def parse_flags(parser, recipes, default):
    """Parse the flags. Priority: command line, then the run of --resume, then the recipe of --data.

    recipes: {data set: {flag: value}}. default: the data set without --data and --data_dir.
    Returns (args, checkpoint): the flags, and the checkpoint of --resume or {}.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--data", "--data_dir", "--resume"):       # these choose the defaults of the rest
        first.add_argument(name)
    given, _ = first.parse_known_args()
    checkpoint = load(Path(given.resume, "last.pt")) if given.resume else {}
    # Flags that belong to one command or machine are not restored.
    once = ("device", "download", "max_steps", "out_dir", "resume")
    stored = {k: v for k, v in checkpoint.get("args", {}).items() if k not in once}
    data = given.data or stored.get("data") or ("folder" if given.data_dir else default)
    parser.set_defaults(**{"data": data, **recipes.get(data, {}), **stored})
    args = parser.parse_args()
    if args.data == "shapes" and args.data_dir:
        raise InputError(f"--data_dir {args.data_dir}: --data shapes renders its own images; leave "
                         f"--data_dir or --data shapes out")
    return args, checkpoint


def parse_layers(text, depth):
    """Turn "0", "all", "0,1,2" or "0-3" into a tuple of layers. InputError without a layer."""
    spans = [part.split("-") for part in text.replace("all", f"0-{depth - 1}").split(",")]
    layers = tuple(i for span in spans for i in range(int(span[0]), int(span[-1]) + 1))
    if not layers:
        raise InputError(f"--rpc_layers {text} names no layer; write for example 0-2")
    return layers


def new_run(folder):
    """Return `folder`. InputError if it already contains a run."""
    if Path(folder, "last.pt").exists():
        raise InputError(f"{folder} holds a run: continue it with --resume {folder}, or choose "
                         f"another --out_dir")
    return folder


# --- processes ------------------------------------------------------------------------------------

def start_processes(device_name):
    """Return this process's rank, the number of processes, and the device; connect the processes.

    torchrun starts one process per GPU, or several on a CPU, and gives each process a number, RANK.
    device_name: the value of --device; None chooses the best device that PyTorch finds.
    """
    device = torch.device(device_name or ("cuda" if torch.cuda.is_available() else
                                          "mps" if torch.backends.mps.is_available() else "cpu"))
    if "RANK" not in os.environ:
        return 0, 1, device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    # Tensors on the CPU are sent by gloo, and tensors on a GPU by nccl.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return dist.get_rank(), dist.get_world_size(), device


def check_batch_size(batch_size, world):
    """Raise InputError unless the processes can share a batch evenly."""
    if batch_size % world:
        raise InputError(f"--batch_size {batch_size}: expected a multiple of {world}, the number "
                         f"of processes")


# --- the log: one JSON object per line ------------------------------------------------------------

def to_json(row):
    """Return a row as a line of JSON, which has no infinity: lambda = inf becomes "inf"."""
    return json.dumps(row).replace("Infinity", '"inf"') + "\n"


def start_log(folder, step):
    """Create the folder and its log.jsonl; return the log's path.

    Every row of a log has a `step`. A resumed run keeps the rows up to `step`.
    """
    path = Path(folder, "log.jsonl")
    if is_first():
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [row for row in read_log(path) if row["step"] <= step] if step else []
        with replacing(path) as tmp:
            tmp.write_text("".join(map(to_json, rows)))
    return path


def append_row(path, row):
    """Append a row, a dict, to a file of JSON lines. Only the first process writes."""
    if is_first():
        with open(path, "a", encoding="utf-8") as f:
            f.write(to_json(row))


def read_log(path):
    """Return the rows of a log, a list of dicts; [] without a file."""
    path = Path(path)
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] \
        if path.exists() else []


def finite_means(pending, step):
    """Return the mean of each column of `pending`, (steps, n), as a list.

    Columns 0 and 1 are the loss and the gradient norm; more columns are your own numbers. step: the
    number of the step in the last row. InputError, with the step, if a loss or norm is not finite.
    """
    rows = pending.tolist()
    for i, (loss, norm, *_) in enumerate(rows, step - len(rows) + 1):
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise InputError(f"not finite at step {i}: loss {loss:.4g}, gradient norm {norm:.4g}; "
                             f"try a smaller --lr or --clip")
    return pending.mean(0).tolist()


def describe(device):
    """Return the name of the hardware. Logs contain it, because processors round differently."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    path = Path("/proc/cpuinfo")                                    # Linux
    cpu = dict(re.findall(r"(.+?)\s*: (.*)", path.read_text())) if path.exists() else {}
    name = f"{cpu.get('model name', '')} family {cpu.get('cpu family')} model {cpu.get('model')}"
    return f"{device.type}, {name}, {torch.get_num_threads()} threads"


@cache
def code_version():
    """Return {"commit": this code's commit or "no git", "torch": PyTorch's version}, for logs.

    The commit ends with "-dirty" if tracked files have uncommitted changes.
    """
    git = subprocess.run(["git", "--no-optional-locks", "describe", "--always", "--dirty",
                          "--abbrev=12", "--exclude=*"], cwd=Path(__file__).parent,
                         capture_output=True, text=True)
    return dict(commit=git.stdout.strip() or "no git", torch=torch.__version__)


# --- checkpoints ----------------------------------------------------------------------------------

@contextmanager
def replacing(path):
    """Yield the path of a temporary file, which replaces the file `path` when the block ends.

    So `path` never contains half a file.
    """
    tmp = Path(f"{path}.{os.getpid()}.tmp")
    try:
        yield tmp
        os.replace(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)


def save(path, checkpoint):
    """Write a checkpoint, a dict of plain types and tensors, completely or not at all."""
    with replacing(path) as tmp:
        torch.save(checkpoint, tmp)


def load(path):
    """Read a checkpoint, ours or another program's; return its dict, with tensors on the CPU.

    path: a file, or the folder of a run, where best.pt is preferred to last.pt. Code in the file
    does not run.
    """
    path = Path(path)
    if path.is_dir():
        path = path / ("best.pt" if (path / "best.pt").exists() else "last.pt")
    if not path.exists():
        raise InputError(f"there is no checkpoint {path}")
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):    # DeiT's files contain one
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:                                          # torch.load raises many types
        raise InputError(f"{path} cannot be loaded: {repr(e):.200}") from None


def check_unchanged(checkpoint, now):
    """Raise InputError if the resumed checkpoint stores another value for a name in `now`.

    now: {name: value}, settings of the data, of the model and of the batches.
    """
    about = {name: value for name, value in checkpoint.items() if name != "model"}    # the weights
    was = {**checkpoint["args"], **checkpoint["model_config"], **about}
    for name, value in now.items():
        if was.get(name) != value:
            raise InputError(f"--resume cannot change {name}: it was {was.get(name)!r:.60} and is "
                             f"{value!r:.60}")


def load_optimizer(optimizer, state):
    """Load a stored state into an optimiser, which keeps its own settings, such as weight decay."""
    groups = [{**now, "params": was["params"]}
              for now, was in zip(optimizer.param_groups, state["param_groups"], strict=True)]
    optimizer.load_state_dict({**state, "param_groups": groups})


def describe_model(model, checkpoint, path):
    """Return the fields of a row of results.jsonl that identify a model of our checkpoint."""
    c, args = model.config, checkpoint["args"]
    kind = c.attn
    if c.rpc_layers:
        kind += f" {c.pap['n_iter']}iter/layer{','.join(map(str, c.rpc_layers))}"
    weights = b"".join(t.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
                       for t in model.state_dict().values())
    return dict(model=f"{kind}, seed {args['seed']}", kind=kind, checkpoint=str(path),
                weights=f"{zlib.crc32(weights):08x}", model_config=asdict(c))


def add_result(folder, row):
    """Append a row to results.jsonl in a folder, or in the folder of a checkpoint FILE.pt."""
    folder = Path(folder) if Path(folder).suffix != ".pt" else Path(folder).parent
    folder.mkdir(parents=True, exist_ok=True)
    append_row(folder / "results.jsonl", row)


def absolute(path):
    """Return the absolute path, so that "photos" and "./photos" give the same row."""
    return str(Path(path).resolve()) if path else None


def table(rows, header):
    """Return a Markdown table with aligned columns. rows: lists of cells. header: its first row."""
    rows = [[str(cell).replace("|", r"\|") for cell in row] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths)) + " |" for row in rows]
    rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])
