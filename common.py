"""Tools that every script uses: flags, one-line errors, the log, checkpoints, tables.

This file imports none of our modules, so every module can import it. A script imports it before
torch, so that SPINS applies.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import cache
from itertools import islice
from pathlib import Path

# How many times a thread of PyTorch's OpenMP checks for new work before it sleeps. libgomp reads
# the variable when torch is imported. With its default, threads that wait for each other take the
# processor from the thread that works, if other programs run, too (docs/data.md has the speeds).
SPINS = "10000"
if "OMP_WAIT_POLICY" not in os.environ:                     # the user's own setting wins
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)

import torch  # noqa: E402
from tqdm import tqdm  # noqa: E402


class InputError(ValueError):
    """What the user's input got wrong: a flag, a path, a file's content. `run` shows one line."""


@contextmanager
def error_prefix(what):
    """Begin input errors within with `what`, the flag and the file they are about."""
    try:
        yield
    except InputError as e:
        raise InputError(f"{what}: {e}") from None


def run(main):
    """Call a script's main(). An InputError becomes one line and exit code 1, Ctrl-C one and 130.

    Every other exception is a bug, ours or of an edit, and keeps its traceback.
    """
    torch.set_flush_denormal(True)      # docs/data.md; threads and DataLoader workers inherit it
    try:
        main()
    except KeyboardInterrupt:
        print(f"\nstopped by Ctrl-C{go_on()}", file=sys.stderr)
        sys.exit(130)
    except InputError as e:                                 # a worker's comes with its traceback
        words = str(e).splitlines()[-1].removeprefix("common.InputError: ")
        sys.exit(f"error: {words}{go_on()}")


def go_on():
    """Say how to go on with the run that this process logs, if it has saved something."""
    if Log.folder is None or not Path(Log.folder, "last.pt").exists():
        return ""
    return f"; go on with: python {os.path.relpath(sys.argv[0])} --resume {Log.folder}"


def print0(*lines):
    """Print lines on rank 0 alone, above a progress bar."""
    if os.environ.get("RANK", "0") == "0":
        tqdm.write("\n".join(lines))


# --- flags ----------------------------------------------------------------------------------------

class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Show the script's docstring as it is written, and the default of every flag."""


def number(kind, low, high=1e30):
    """Make a type for argparse: an int or float from low to high (float32 holds 1e30)."""
    def parse(text):
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text}, expected {kind.__name__} from {low} to "
                                             f"{high}")
        return value
    parse.__name__ = kind.__name__                             # argparse says "invalid float value"
    return parse


COUNT, NATURAL = number(int, 1), number(int, 0)
REAL, SHARE = number(float, 0), number(float, 0, 0.999999)


def device(name):
    """Check the name of a device, a type for argparse: it has to be there."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise argparse.ArgumentTypeError(f"{name}: this PyTorch has no such device") from None
    return name


def one_of(name, value, known):
    """Refuse a setting that has none of the known values."""
    if value not in known:
        own = ("; one of your own is entered in attention.ATTENTIONS first, as "
               "studies.robust_attentions does") if name == "attn" else ""
        raise InputError(f"{name}={value!r}, expected one of {', '.join(sorted(set(known)))}{own}")


def parse_layers(text, depth):
    """Read "0", "all", "0,1,2" or "0-3": a tuple of layer indices."""
    try:
        ends = [part.split("-") for part in text.replace("all", f"0-{depth - 1}").split(",")]
        layers = tuple(i for e in ends for i in range(int(e[0]), int(e[-1]) + 1))
    except ValueError:
        layers = ()
    if layers and set(layers) <= set(range(depth)):
        return layers
    raise InputError(f"--rpc_layers {text}: expected all, 0, 0,1 or 0-2 of layers 0 to {depth - 1}")


# --- the log: a JSON object a line ----------------------------------------------------------------

class Log:
    """A run's log.jsonl, locked by the process that trains there. Rows have a `step`."""
    folder = None                           # of this process's run: an error says how to go on

    def __init__(self, folder, step):
        """Make the folder or, behind `step`, cut the log of the run in it."""
        self.path = Path(folder, "log.jsonl")
        kept = sum(row["step"] <= step for row in read_log(self.path)) if step else 0
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(self.path, "a+")
            with suppress(ImportError):                             # Windows has none
                import fcntl
                fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.file.seek(0)
            self.file.truncate(sum(len(line.encode()) for line in islice(self.file, kept)))
            for leftover in self.path.parent.glob("*.tmp"):         # of a process that was killed
                leftover.unlink()
        except BlockingIOError:
            raise InputError(f"another process trains in {folder}") from None
        except OSError as e:
            raise InputError(f"{folder} cannot be written to ({e.strerror})") from None
        Log.folder = folder

    def append(self, row):
        """Write a row; InputError at a number that is not finite, or where the disk is full."""
        for name, value in {**row, **row.get("eval", {})}.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise InputError(f"not finite at step {row['step']}: {name} {value}")
        try:
            print(json.dumps(row), file=self.file, flush=True)
        except OSError as e:
            raise InputError(f"{self.path} cannot be written ({e.strerror})") from None


def read_log(path):
    """Read the rows of a log: a list of dicts. The last line may be cut short by a kill.

    InputError names a line within that is none, or half of one.
    """
    rows, path = [], Path(path)
    lines = path.read_text("utf-8", "replace").split("\n") if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):                                 # a whole line ends in a newline
                raise InputError(f"{path}, line {number} is not a row: delete that line and go on; "
                                 f"it begins with {line[:40]!r}") from None
    return rows


def finite_means(pending, step):
    """Average loss, gradient norm and what else the columns of (steps, n) hold; the last is `step`.

    InputError names the first step with a number that is not finite.
    """
    rows = pending.tolist()
    for i, (loss, norm, *_) in enumerate(rows, step - len(rows) + 1):
        if not math.isfinite(loss) or not math.isfinite(norm):
            why = ("before the first update: look at the data and the model" if i == 1 else
                   "try a smaller --lr or --clip")
            raise InputError(f"not finite at step {i}: loss {loss:.4g}, gradient norm {norm:.4g}; "
                             f"{why}")
    return pending.mean(0).tolist()


def describe(device):
    """Name the hardware, for logs: on another CPU the same seed takes another path."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    path = Path("/proc/cpuinfo")            # Linux; processors that differ may share their name
    cpu = dict(re.findall(r"(.+?)\s*: (.*)", path.read_text())) if path.exists() else {}
    words = {"model name": "", "cpu family": "family ", "model": "model "}
    name = " ".join(word + cpu[of] for of, word in words.items() if of in cpu)
    return ", ".join([device.type, *filter(None, [name]), f"{torch.get_num_threads()} threads"])


@cache
def code_version():
    """Return {"commit": this code's commit or "no git", "torch": PyTorch's version}, for logs.

    "-dirty" follows the commit if tracked files were changed since.
    """
    def git(*words):
        return subprocess.run(["git", "--no-optional-locks", "-C", Path(__file__).parent, *words],
                              check=True, capture_output=True, text=True).stdout.strip()
    try:
        git("ls-files", "--error-unmatch", "common.py")     # not a repository around a copy of it
        commit = git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        commit = "no git"
    return dict(commit=commit, torch=torch.__version__)


# --- checkpoints ----------------------------------------------------------------------------------

@contextmanager
def replacing(path):
    """Give the name of a temporary file that takes the place of `path`: never half a file there."""
    tmp = Path(f"{path}.{os.getpid()}.tmp")
    try:
        yield tmp
        os.replace(tmp, path)
    except OSError as e:
        raise InputError(f"{path} cannot be written ({e.strerror}); what was there is "
                         f"kept") from None
    finally:
        tmp.unlink(missing_ok=True)


def save(path, checkpoint):
    """Write a dict of plain types and tensors, whole or not at all; InputError at nan weights."""
    for name, weight in checkpoint.get("model", {}).items():
        if not weight.isfinite().all():
            raise InputError(f"not finite at step {checkpoint.get('step')}: the weight {name}")
    with replacing(path) as tmp:
        try:
            torch.save(checkpoint, tmp)             # a path: given a file, torch hides a Ctrl-C
        except RuntimeError as e:                   # of its zip writer
            raise OSError(28, f"is the disk full? {str(e)[:60]}") from None
        with open(tmp, "rb+") as f:
            os.fsync(f.fileno())


def load(path):
    """Read the dict in a checkpoint of ours, DeiT's or the released code's; tensors on the CPU.

    Runs nothing that it holds. path: a file, an https address, or a run's folder: of that best.pt,
    where there is one, else last.pt.
    """
    read, path = torch.load, str(path)
    if path.startswith("https://"):
        read = torch.hub.load_state_dict_from_url
    else:
        path = Path(path)
        if path.is_dir():
            path = path / ("best.pt" if (path / "best.pt").exists() else "last.pt")
        if not path.exists():
            raise InputError(f"no checkpoint at {path}")
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):     # the released code's args
            checkpoint = read(path, map_location="cpu", weights_only=True)
    except Exception as e:                                          # torch.load raises many types
        raise InputError(f"{path} is not a readable checkpoint ({type(e).__name__})") from None
    if not isinstance(checkpoint, dict):
        raise InputError(f"{path} holds a {type(checkpoint).__name__}, expected a dict of weights")
    return checkpoint


def load_optimizer(optimizer, state):
    """Give an optimiser the state of a checkpoint; lr, weight decay and so on stay as they are.

    InputError where it is the state of another kind of optimiser, or of other parameters.
    """
    def kind(groups):
        return [(group.keys(), len(group["params"])) for group in groups]
    today, stored = optimizer.param_groups, state["param_groups"]
    if kind(today) != kind(stored):
        raise InputError("--resume: the optimiser, or what it trains, is not the run's")
    groups = [{**now, "params": was["params"]} for now, was in zip(today, stored)]
    optimizer.load_state_dict({**state, "param_groups": groups})    # fused says where it goes


def stored_config(checkpoint, config):
    """Read a checkpoint's model_config as the dataclass `config`; a field that this has not, one of
    a subclass say, is named and left out."""
    stored = checkpoint["model_config"]
    unknown = stored.keys() - {f.name for f in fields(config)}
    if unknown:
        print0(f"left out, as unknown to {config.__name__}: {', '.join(sorted(unknown))}")
    return config(**{name: value for name, value in stored.items() if name not in unknown})


def rebuild(checkpoint, task, model, config):
    """Rebuild the model of a checkpoint of `task`, in eval mode. model, config: its classes."""
    if checkpoint.get("task") != task:
        raise InputError(f"its task is {checkpoint.get('task')}, not {task}")
    model = model(stored_config(checkpoint, config))
    load_known(model, checkpoint["model"])
    return model.eval()


def load_known(model, weights):
    """Load a model's weights. What else there is, a second head say, is named and left out.

    But not what a block has and the model's has not: without it the block would compute another
    thing. InputError, in torch's words, for that and for what is missing or of another shape.
    """
    own = model.state_dict()
    others = [name for name in weights if name not in own and "blocks." not in name]
    if others:
        print0(f"left out, as the model has no such weights: {', '.join(others)}"[:300])
    try:
        model.load_state_dict({name: w for name, w in weights.items() if name not in others})
    except RuntimeError as e:
        raise InputError(" ".join(str(e).split())[:300]) from None


def table(rows, header):
    """Write lists of cells as a Markdown table, columns aligned."""
    rows = [[str(cell).replace("|", r"\|") for cell in row] for row in [header, *rows]]  # as in |S|
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths)) + " |" for row in rows]
    rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])
