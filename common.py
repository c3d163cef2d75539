"""Tools that every script uses: flags, one-line errors, the log, checkpoints, tables.

This file imports none of our modules, so every module can import it. A script imports this file
before torch, because torch reads the setting SPINS when it is imported.
"""

import argparse
import json
import math
import os
import re
import shlex
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import cache, partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from urllib.error import URLError

# The number of times that a waiting thread of PyTorch's OpenMP library, libgomp, checks for new
# work before it sleeps. libgomp reads the variable when torch is imported. With libgomp's default,
# waiting threads take the processor from working threads if other programs run, too. docs/data.md
# has the speeds.
SPINS = "10000"
if "OMP_WAIT_POLICY" not in os.environ:                     # the user's own setting wins
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from tqdm import tqdm  # noqa: E402


class InputError(ValueError):
    """An error in the user's input: a flag, a path or the content of a file. `run` prints it."""


@contextmanager
def error_prefix(what):
    """Prefix every InputError raised inside with `what` (the flag and its file)."""
    try:
        yield
    except InputError as e:
        raise InputError(f"{what}: {e}") from None


def run(main):
    """Call a script's main(), and print its input errors.

    An InputError prints one line and ends the script with exit code 1. Ctrl-C prints one line and
    ends it with exit code 130. Every other exception is a bug, in our code or in your change, and
    shows its traceback.
    """
    torch.set_flush_denormal(True)      # for speed (docs/data.md), also in DataLoader workers
    for stream in (sys.stdout, sys.stderr):                     # print names that are not UTF-8
        with suppress(AttributeError):
            stream.reconfigure(errors="backslashreplace")
    rank = os.environ.get("RANK", "0")
    try:
        main()
    except KeyboardInterrupt:
        if rank == "0":
            print(f"\nstopped by Ctrl-C{go_on()}", file=sys.stderr)
        sys.exit(130)
    except InputError as e:
        # If all processes find the error, rank 0 prints the error, and torchrun ends the other
        # processes while they wait. If only one process finds the error, for example in a corrupt
        # image, this process prints the error.
        if rank != "0":
            time.sleep(WAIT)
        # An error in a DataLoader worker arrives with its traceback; the last line is the message.
        words = str(e).splitlines()[-1].removeprefix("common.InputError: ")
        sys.exit(f"error: {words}{go_on()}")


WAIT = 10                               # seconds that processes other than rank 0 wait in `run`


def go_on():
    """Return "; continue with: " and the command that resumes this process's run.

    Returns "" if the run has no checkpoint yet.
    """
    if Log.folder is None or not Path(Log.folder, "last.pt").exists():
        return ""
    return f"; continue with: {command(os.path.relpath(sys.argv[0]), '--resume', Log.folder)}"


def command(script, *words):
    """Return a command line that you can paste into a shell; names with spaces are quoted."""
    return f"python {shlex.join(map(str, [script, *words]))}"


def print0(*lines):
    """Print lines on rank 0 only, above the progress bar if there is one."""
    if os.environ.get("RANK", "0") == "0":
        tqdm.write("\n".join(lines))


# --- flags ----------------------------------------------------------------------------------------

class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Print the script's docstring unchanged; add defaults that the help texts do not contain."""

    def _get_help_string(self, action):
        explained = action.default is None or action.default is False or "(default" in action.help
        return action.help if explained else super()._get_help_string(action)


def number(kind, low, high=1e30):
    """Return a type for argparse: an int or float in [low, high]; 1e30 fits in float32."""
    def parse(text):
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text}, expected {kind.__name__} from {low} to "
                                             f"{high}")
        return value
    parse.__name__ = kind.__name__                      # for argparse's "invalid float value"
    return parse


# Types of flags: whole numbers from 1 or 0, floats from 0, shares from 0 to below 1, and seeds.
COUNT, NATURAL = number(int, 1), number(int, 0)
REAL, SHARE = number(float, 0), number(float, 0, 0.999999)
SEED = number(int, 0, 2 ** 31 - 1)


def device(name):
    """Return `name` if it is a device that this PyTorch can use; a type for argparse."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise argparse.ArgumentTypeError(f"{name}: this PyTorch has no such device; expected cpu, "
                                         f"cuda or mps") from None
    return name


def one_of(name, value, known):
    """Raise InputError unless `value` is one of `known`. name: the setting, for the message."""
    if value not in known:
        own = ("; add your own attention to attention.ATTENTIONS first, as in "
               "studies/robust_attentions.py") if name == "attn" else ""
        raise InputError(f"{name}={value!r}, expected one of {', '.join(sorted(set(known)))}{own}")


def parse_layers(text, depth):
    """Turn "0", "all", "0,1,2" or "0-3" into a tuple of layers, each from 0 to depth - 1."""
    try:
        spans = [part.split("-") for part in text.replace("all", f"0-{depth - 1}").split(",")]
        layers = tuple(i for span in spans for i in range(int(span[0]), int(span[-1]) + 1))
    except ValueError:
        layers = ()
    if layers and set(layers) <= set(range(depth)):
        return layers
    raise InputError(f"--rpc_layers {text}: expected layers from 0 to {depth - 1}, for example "
                     f"0 or 0,1 or 0-2 or all")


def resumed_run(parser, task):
    """Read the flags on the command line, and the run that --resume continues.

    task: the script's name for its task, as in its checkpoints.

    Returns:
        given: a Namespace with the flags on the command line
        checkpoint: the dict in the run's last.pt, or {} without --resume
        stored: a dict with the flags of that run, or {} without --resume
    InputError if the run has another task.
    """
    given = parser.parse_known_args()[0]
    if not given.resume:
        return given, {}, {}
    checkpoint = load(Path(given.resume, "last.pt"))
    if checkpoint.get("task") != task:
        raise InputError(f"--resume {given.resume}: its task is {checkpoint.get('task')}, expected "
                         f"{task}; resume it with the script that trained it")
    # Flags that belong to one command or machine are not restored.
    once = ("device", "download", "max_steps", "out_dir", "resume")
    stored = {name: value for name, value in checkpoint["args"].items() if name not in once}
    return given, checkpoint, stored


def parse_flags(parser, recipe, stored, fixed=()):
    """Parse the flags. Priority: command line, then the resumed run, then the recipe.

    recipe: {flag: default}. stored: {flag: value} of the resumed run, from `resumed_run`. fixed:
    names of flags that --resume cannot change. --resume cannot change --batch_size either, because
    the position in the data is counted in steps. Prints the flags that differ from `stored`.
    InputError if a flag is empty or must not change, or if --data_dir does not fit --data.
    """
    parser.set_defaults(**{**recipe, **stored})
    parser.add_argument("-h", "--help", action="help", help="print this text and exit")
    args = parser.parse_args()
    check_no_empty_value(args)
    changed = {name: getattr(args, name) for name in stored if getattr(args, name) != stored[name]}
    for name in ("batch_size", *fixed):
        if name in changed:
            raise InputError(f"--resume cannot change --{name}: it was {stored[name]} and is "
                             f"{changed[name]}; leave --{name} out, or start another run")
    if changed:
        print0(f"changed flags: {changed}")
    if args.data == "shapes" and args.data_dir:
        raise InputError(f"--data_dir {args.data_dir}: --data shapes renders its own images; leave "
                         f"--data_dir out, or choose another --data")
    if args.data == "folder" and not args.data_dir:
        raise InputError("--data folder needs --data_dir, the path of your images or your text")
    return args


def check_no_empty_value(args, allowed=("prompt",)):
    """Raise InputError if a flag is empty, for example because a shell variable in it is not set.

    allowed: flags that may be empty.
    """
    for name, value in vars(args).items():
        if name not in allowed and (value == "" or isinstance(value, list) and "" in value):
            raise InputError(f"--{name} has an empty value: give a value, or leave --{name} out")


def run_folder(args, default):
    """Return the run's folder: --resume, else --out_dir, else the default.

    InputError if a new run's folder already contains a run.
    """
    if args.out_dir and args.resume:
        raise InputError(f"--out_dir {args.out_dir} does not go with --resume, which writes into "
                         f"the folder of the run; leave one of them out")
    folder = args.resume or args.out_dir or default
    if Path(folder, "last.pt").exists() and not args.resume:
        raise InputError(f"{folder} holds a run: continue it with --resume {shlex.quote(folder)}, "
                         f"or choose another --out_dir")
    return folder


# --- processes ------------------------------------------------------------------------------------

def start_processes(device_name):
    """Return this process's rank, the number of processes, and the device; connect the processes.

    torchrun starts one process per GPU, or several on a CPU, and gives each process a number, RANK.
    device_name: the value of --device; None chooses the best device that PyTorch finds.
    """
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device(device_name or ("cuda" if torch.cuda.is_available() else
                                          "mps" if torch.backends.mps.is_available() else "cpu"))
    if "RANK" in os.environ:
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        # Tensors on the CPU are sent by gloo, and tensors on a GPU by nccl.
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return rank, world, device


def check_batch_size(batch_size, world):
    """Raise InputError unless the processes can share a batch evenly."""
    if batch_size % world:
        raise InputError(f"--batch_size {batch_size}: expected a multiple of {world}, the number "
                         f"of processes")


# --- the log: one JSON object per line ------------------------------------------------------------

class Log:
    """The log.jsonl of a run, locked by the process that trains. Every row has a `step`."""
    folder = None                           # the folder of this process's run; `go_on` needs it

    def __init__(self, folder, step):
        """Create the folder and the log. A resumed run keeps the rows up to `step`."""
        self.path = Path(folder, "log.jsonl")
        rows_kept = sum(row["step"] <= step for row in read_log(self.path)) if step else 0
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(self.path, "a+", encoding="utf-8")
            with suppress(ImportError):                             # not on Windows
                import fcntl
                fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.file.seek(0)
            self.file.truncate(sum(len(line.encode()) for line in islice(self.file, rows_kept)))
            for leftover in self.path.parent.glob("*.tmp"):         # from a killed process
                leftover.unlink()
        except BlockingIOError:
            raise InputError(f"another process trains in {folder}") from None
        except OSError as e:
            raise InputError(f"{folder} cannot be written to ({e.strerror}); choose another "
                             f"--out_dir") from None
        Log.folder = folder

    def append(self, row):
        """Write a row, a dict. InputError if a number is not finite, or if the disk is full."""
        for name, value in {**row, **row.get("eval", {})}.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise InputError(f"not finite at step {row['step']}: {name} {value}")
        try:
            print(json.dumps(row), file=self.file, flush=True)
        except OSError as e:
            raise InputError(f"{self.path} cannot be written ({e.strerror})") from None


def read_log(path):
    """Return the rows of a log, a list of dicts; [] without a file.

    An incomplete last line, which a killed process leaves, is ignored. InputError if any other line
    is not a JSON object.
    """
    rows, path = [], Path(path)
    lines = path.read_text("utf-8", "replace").split("\n") if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):                             # not the last line
                raise InputError(f"{path}, line {number} is not a JSON object: {line[:40]!r}; "
                                 f"delete that line, then resume") from None
    return rows


def finite_means(pending, step):
    """Return the mean of each column of `pending`, (steps, n), as a list.

    Columns 0 and 1 are the loss and the gradient norm; more columns are your own numbers. step: the
    number of the step in the last row. InputError, with the step, if a loss or norm is not finite.
    """
    rows = pending.tolist()
    for i, (loss, norm, *_) in enumerate(rows, step - len(rows) + 1):
        if not math.isfinite(loss) or not math.isfinite(norm):
            why = ("no update was made before, so look at the data and the model" if i == 1 else
                   "try a smaller --lr or --clip")
            raise InputError(f"not finite at step {i}: loss {loss:.4g}, gradient norm {norm:.4g}; "
                             f"{why}")
    return pending.mean(0).tolist()


def describe(device):
    """Return the name of the hardware. Logs contain it, because processors round differently."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    path = Path("/proc/cpuinfo")            # Linux; different processors can have the same name
    cpu = dict(re.findall(r"(.+?)\s*: (.*)", path.read_text())) if path.exists() else {}
    words = {"model name": "", "cpu family": "family ", "model": "model "}
    name = " ".join(word + cpu[key] for key, word in words.items() if key in cpu)
    return ", ".join([device.type, *filter(None, [name]), f"{torch.get_num_threads()} threads"])


@cache
def code_version():
    """Return {"commit": this code's commit or "no git", "torch": PyTorch's version}, for logs.

    The commit ends with "-dirty" if tracked files have uncommitted changes.
    """
    def git(*words):
        return subprocess.run(["git", "--no-optional-locks", "-C", Path(__file__).parent, *words],
                              check=True, capture_output=True, text=True).stdout.strip()
    try:
        git("ls-files", "--error-unmatch", "common.py")     # fails in a copy inside another project
        commit = git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        commit = "no git"
    return dict(commit=commit, torch=torch.__version__)


# --- checkpoints ----------------------------------------------------------------------------------

@contextmanager
def replacing(path):
    """Yield the path of a temporary file, which replaces the file `path` when the block ends.

    So `path` never contains half a file. InputError if the file cannot be written.
    """
    tmp = Path(f"{path}.{os.getpid()}.tmp")
    try:
        yield tmp
        os.replace(tmp, path)
    except OSError as e:
        raise InputError(f"{path} cannot be written ({e.strerror}); the previous file is "
                         f"kept") from None
    finally:
        tmp.unlink(missing_ok=True)


def save(path, checkpoint):
    """Write a checkpoint, a dict of plain types and tensors, completely or not at all.

    InputError if a weight in checkpoint["model"] is not finite, or if the disk is full.
    """
    for name, weight in checkpoint.get("model", {}).items():
        if not weight.isfinite().all():
            raise InputError(f"not finite at step {checkpoint.get('step')}: the weight {name}")
    with replacing(path) as tmp:
        try:
            torch.save(checkpoint, tmp)     # with an open file, not a path, torch would hide Ctrl-C
        except RuntimeError as e:                   # from torch's zip writer
            raise OSError(28, f"the disk may be full: {str(e)[:60]}") from None
        with open(tmp, "rb+") as f:
            os.fsync(f.fileno())


def load(path):
    """Read a checkpoint, ours or another program's; return its dict, with tensors on the CPU.

    path: a file, an https address (downloaded once), or the folder of a run, where best.pt is
    preferred to last.pt. Code in the file does not run. InputError if no dict can be read.
    """
    read, path = torch.load, str(path)
    if path.startswith("https://"):             # each address has its own file in the cache
        name = f"{sha256(path.encode()).hexdigest()[:16]}_{path.split('?')[0].split('/')[-1]}"
        show = sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"
        read = partial(torch.hub.load_state_dict_from_url, file_name=name, progress=show)
    else:
        path = Path(path)
        if path.is_dir():
            path = path / ("best.pt" if (path / "best.pt").exists() else "last.pt")
        if not path.exists():
            raise InputError(f"no checkpoint at {path}; expected a file written by torch.save, or "
                             f"the folder of a run, which contains best.pt or last.pt")
    try:
        # DeiT's checkpoints contain a Namespace.
        with torch.serialization.safe_globals([argparse.Namespace, *NUMPY]):
            checkpoint = read(path, map_location="cpu", weights_only=True)
    except URLError as e:
        raise InputError(f"{path} cannot be downloaded ({e.reason}); download the file in another "
                         f"way, and give its path") from None
    except Exception as e:                                          # torch.load raises many types
        unsafe = re.search(r"GLOBAL (\S+)", str(e))
        if unsafe:
            raise InputError(f"{path} holds an object of {unsafe[1]}, expected only tensors, "
                             f"numbers, text, lists and dicts; save these alone, for example with "
                             f"torch.save(model.state_dict(), FILE)") from None
        raise InputError(f"{path} is not a readable checkpoint ({type(e).__name__}), expected a "
                         f"file written by torch.save, or the folder of a run") from None
    if not isinstance(checkpoint, dict):
        raise InputError(f"{path} holds a {type(checkpoint).__name__}, expected a dict of weights")
    return checkpoint


# The types and functions in a pickled NumPy scalar or array. A function is a pair (function, its
# name in the file), because NumPy 1 and 2 give it different names.
NUMPY = [np.ndarray, np.dtype, *{type(np.dtype(code)) for code in "?" + np.typecodes["AllInteger"] +
                                 np.typecodes["AllFloat"] + "SU"}]
NUMPY += [(getattr(np._core.multiarray, name), f"numpy.{core}.multiarray.{name}")
          for name in ("scalar", "_reconstruct") for core in ("core", "_core")]


def check_unchanged(checkpoint, now):
    """Raise InputError if the resumed checkpoint stores another value for a name in `now`.

    now: {name: value}, settings of the data and the model.
    """
    was = {**checkpoint, **checkpoint["model_config"]}
    for name, value in now.items():
        if was.get(name) != value:
            raise InputError(f"--resume cannot change {name}: it was {was.get(name)!r:.60} and is "
                             f"{value!r:.60}; resume with the run's data and flags, or start "
                             f"another run")


def load_optimizer(optimizer, state):
    """Load a stored state into an optimiser, which keeps its own settings, such as weight decay.

    InputError if the state belongs to another kind of optimiser or to other parameters.
    """
    def layout(groups):
        return [(group.keys(), len(group["params"])) for group in groups]
    today, stored = optimizer.param_groups, state["param_groups"]
    if layout(today) != layout(stored):
        raise InputError("--resume: the checkpoint's optimiser has other settings or parameters; "
                         "expected the optimiser and the trained parameters of the run")
    groups = [{**now, "params": was["params"]} for now, was in zip(today, stored)]
    optimizer.load_state_dict({**state, "param_groups": groups})


def stored_config(checkpoint, config_class):
    """Return a checkpoint's model_config as an object of a dataclass, such as ViTConfig.

    Fields that the class does not have, for example from a subclass, are left out and printed.
    """
    stored = checkpoint["model_config"]
    unknown = stored.keys() - {f.name for f in fields(config_class)}
    if unknown:
        print0(f"left out, because {config_class.__name__} has no such field: "
               f"{', '.join(sorted(unknown))}")
    return config_class(**{name: value for name, value in stored.items() if name not in unknown})


def rebuild(checkpoint, task, model_class, config_class):
    """Return the model of a checkpoint, in eval mode. InputError if it belongs to another task."""
    if checkpoint.get("task") != task:
        raise InputError(f"its task is {checkpoint.get('task')}, expected {task}")
    model = model_class(stored_config(checkpoint, config_class))
    load_known(model, checkpoint["model"])
    return model.eval()


def load_known(model, weights):
    """Load weights, {name: tensor}, into a model.

    Extra weights outside the blocks, for example a second head, are left out and printed. Extra
    weights inside a block are an error, because without them the block would compute something
    else. Missing weights and other shapes are errors, too.
    """
    def first_three(names):
        return ", ".join(names[:3]) + f" ... ({len(names)} in all)" * (len(names) > 3)

    own = model.state_dict()
    left_out = [name for name in weights if name not in own and "blocks." not in name]
    extra = [name for name in weights if name not in own and name not in left_out]
    missing = [name for name in own if name not in weights]
    shapes = [f"{name} {tuple(weights[name].shape)}, expected {tuple(w.shape)}"
              for name, w in own.items() if name in weights and weights[name].shape != w.shape]
    problems = [words + first_three(names) for words, names in (
        ("it lacks ", missing), ("the model cannot use its ", extra),
        ("it has other shapes: ", shapes)) if names]
    if problems:
        raise InputError(f"the weights do not fit the {type(model).__name__}: "
                         f"{'; '.join(problems)}. Expected a checkpoint of the same kind of model")
    if left_out:
        print0(f"left out, because the model has no such weights: {', '.join(left_out)}"[:300])
    model.load_state_dict({name: w for name, w in weights.items() if name not in left_out})


def table(rows, header):
    """Return a Markdown table with aligned columns. rows: lists of cells. header: its first row."""
    rows = [[str(cell).replace("|", r"\|") for cell in row] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths)) + " |" for row in rows]
    rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])
