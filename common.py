"""What the scripts share: flags, processes, a run's folder and log, checkpoints, schedules.

The loops are in the scripts. Checkpoints are written whole or not at all, and read without running
code in them.
"""

import argparse
import json
import math
import os
import re
import socket
import sys
import textwrap
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from urllib.error import URLError

import torch
import torch.distributed as dist
import torch.distributed.nn           # once there is a group, it would keep that and its threads
from torch.nn.parallel import DistributedDataParallel as DDP
from tqdm import tqdm

from attention import FORMS

try:
    import fcntl
except ImportError:                   # Windows: folders are not locked there
    fcntl = None

TASKS = {"train_cls.py": "classification", "train_seg.py": "segmentation",
         "train_lm.py": "language modelling"}
PAP_FLAGS = ("n_iter", "lambd", "form", "mu_over")                  # one field, pap, in configs


class InputError(ValueError):
    """What the user's input got wrong: a flag, a path, a file's content. `run` shows its one line."""


# --- flags ----------------------------------------------------------------------------------------

def number(kind, low, high=1e30):
    """Make a type for argparse: an int or float from low to high (float32 holds 1e30)."""
    def parse(text):
        value = kind(text)
        if not low <= value <= high:
            expected = f"{kind.__name__} from {low} to {high}"
            raise argparse.ArgumentTypeError(f"{text}, expected {expected}")
        return value
    parse.__name__ = kind.__name__                             # argparse says "invalid float value"
    return parse


def one_of(name, value, known):
    """Refuse a setting that has none of the known values."""
    if value not in known:
        own = ("; one of your own is entered in attention.ATTENTIONS first, as "
               "referee.studies.robust_attentions does") if name == "attn" else ""
        raise InputError(f"{name}={value!r}, expected one of {', '.join(sorted(known))}{own}")


def path(text):
    """Be a type for argparse: a path, not the empty text of a variable that is not set."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty, expected a path")
    return text


def parse_layers(text, depth):
    """Read "0" | "all" | "0,1,2" | "0-3": a tuple of layer indices."""
    try:
        ends = [[int(n) for n in part.split("-")] for part in text.split(",")]
    except ValueError:
        ends = [[0, depth - 1]] if text == "all" else [[-1]]
    if not all(len(e) <= 2 and 0 <= e[0] <= e[-1] < depth for e in ends):
        raise InputError(f"--rpc_layers {text}: expected all, 0, 0,1,2 or 0-2, of layers 0 to "
                         f"{depth - 1}")
    return tuple(i for e in ends for i in range(e[0], e[-1] + 1))


COUNT, NATURAL = number(int, 1), number(int, 0)
REAL, SHARE = number(float, 0), number(float, 0, 0.999999)


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Show the script's docstring as it is written, and the default of every flag."""


def add_attention(flag, kinds):
    """Add the flags of a model's attention."""
    flag("--attn", choices=kinds, default="rpc",
         help="rpc: symmetric, with RPC-Attention in --rpc_layers")
    flag("--rpc_layers", default="0", help="from 0: 0 (the paper's layer1), all, 0,1,2 or 0-3")
    flag("--n_iter", type=COUNT, default=4, help="PAP steps; the paper: 4-6 in layer 0, 2 in all")
    flag("--lambd", type=number(float, 0, math.inf), default=4.0,
         help="PAP lambda; the paper: 4 in layer 0, 3 in all; inf: never shrink")
    flag("--form", choices=FORMS, default="released", help="reading of Algorithm 1: attention.py")


def pap_of(args):
    """Gather the flags of PAP that are set: what configs hold as `pap`."""
    return {name: value for name, value in vars(args).items()
            if name in PAP_FLAGS and value is not None}


def add_running(p, name, end):
    """Add how a script runs. name: of the run's folder. end: the flag its schedule ends with."""
    flag, boolean = p.add_argument_group("running").add_argument, argparse.BooleanOptionalAction
    flag("--log_every", type=COUNT, default=20, help="steps between lines of log.jsonl")
    flag("--save_every", type=NATURAL, default=0, help="steps between further saves; 0: none")
    flag("--seed", type=number(int, 0, 2 ** 31 - 1), default=0, help="of weights, order and noise")
    flag("--device", help="cuda, mps or cpu; None: the best there is")
    flag("--amp", action=boolean, help="bf16 autocast; None: on GPUs")
    flag("--compile", action=boolean, default=False, help="torch.compile the model")
    flag("--out_dir", type=path, help=f"None: out/{name}, numbered if it exists")
    flag("--resume", type=path, help="folder of a run to continue; its flags are remembered")
    flag("--max_steps", type=COUNT, help=f"stop early; the schedule stays that of {end}")


def parse(p, recipes, script, fixed):
    """Parse the flags. The command line wins over the run that --resume names, that over a recipe.

    recipes: {data: {flag: value}}: the first is that of no --data, "folder" that of --data_dir
    alone; (data, model) holds what such a model has other than data. fixed: what --resume refuses
    to change.
    """
    first, stored = argparse.ArgumentParser(add_help=False, allow_abbrev=False), {}
    for name in ("data", "data_dir", "model", "resume"):            # these decide on the defaults
        first.add_argument(f"--{name}")
    seen = first.parse_known_args()[0]
    if seen.resume:
        checkpoint = load(seen.resume)
        check_run(checkpoint, seen.resume, script, "args")
        new = {"resume", "sample", "out_dir", "max_steps", "device"}
        known = vars(p.parse_args([])).keys() - new
        stored = {name: value for name, value in checkpoint["args"].items() if name in known}
    data = seen.data or stored.get("data") or ("folder" if seen.data_dir else next(iter(recipes)))
    recipe = recipes.get(data, {})
    model = seen.model or stored.get("model") or recipe.get("model")
    p.set_defaults(**{"data": data, **recipe, **recipes.get((data, model), {}), **stored})
    args = p.parse_args()

    if args.resume and args.out_dir:
        raise InputError("--out_dir does not go with --resume, which continues in its own folder")
    for name in fixed if args.resume else ():
        value, was = getattr(args, name), stored.get(name, getattr(args, name))
        if value != was:
            raise InputError(f"--{name} {value} does not fit --resume {args.resume}, which was "
                             f"trained with --{name} {was}; a new run may start from its weights")
    return args


def fill(args, chosen):
    """Set what neither a flag nor a recipe has set."""
    for name, value in chosen.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


# --- processes and devices ------------------------------------------------------------------------

def setup(device=None):
    """Join the process group if torchrun started this process. Returns (device, rank, world size).

    device: "cuda", "mps" or "cpu"; None picks the best there is. nccl on GPUs, gloo elsewhere.
    """
    counts = dict(cuda=torch.cuda.device_count(), mps=int(torch.backends.mps.is_available()), cpu=1)
    known = [kind for kind, n in counts.items() if n]
    device = device or known[0]
    if device not in known + [f"{kind}:{i}" for kind in known for i in range(counts[kind])]:
        raise InputError(f"--device {device}: this PyTorch finds {', '.join(known)}")
    if "RANK" not in os.environ:
        return torch.device(device), 0, 1

    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        # torchrun's store still holds the addresses of the dead: each restart gets keys of its own
        store, rank, world = next(dist.rendezvous("env://"))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
        store = dist.PrefixStore(f"attempt_{attempt}", store)
        backend = "nccl" if device.startswith("cuda") else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world,
                                timeout=timedelta(hours=6))       # of a download, an attack
    return torch.device(device), dist.get_rank(), dist.get_world_size()


def all_sum(x):
    """Sum a tensor over all processes (the tensor itself in a single one)."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def broadcast(objects):
    """Give every process rank 0's list of plain objects."""
    if dist.is_initialized():
        dist.broadcast_object_list(objects)
    return objects


def say(*lines):
    """Print lines, once for all processes that torchrun starts, above a progress bar."""
    if os.environ.get("RANK", "0") == "0":
        tqdm.write("\n".join(lines))


def describe(device):
    """Name the hardware, for logs: on another CPU the same seed takes another path."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    path = Path("/proc/cpuinfo")                                    # Linux
    names = re.findall(r"model name\s*: (.*)", path.read_text()) if path.exists() else []
    return ", ".join([device.type, *names[:1], f"{torch.get_num_threads()} threads"])


def autocast(device, amp):
    """Choose bf16 autocast, or nothing."""
    return torch.autocast(device.type, torch.bfloat16) if amp else nullcontext()


def wrap(model, device, world, compiled):
    """Compile the model and share it over processes, as the flags and torchrun ask."""
    net = torch.compile(model) if compiled else model
    if world > 1:
        net = DDP(net, device_ids=[device.index] if device.type == "cuda" else None)
    return net


def run(main):
    """Call main(). An input error becomes one line and exit code 1; Ctrl-C one line and 130."""
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:                                 # who reads, `head` say, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (ValueError, OSError) as e:
        lines = str(e).strip().splitlines() or [type(e).__name__]       # a worker's: the last line
        sys.exit(f"error: {lines[-1].removeprefix('common.InputError: ').removeprefix('ValueError: ')}{what_is_saved()}")
    except KeyboardInterrupt:
        print(f"\nstopped by Ctrl-C{what_is_saved()}", file=sys.stderr)
        sys.exit(130)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


# --- the folder of a run --------------------------------------------------------------------------

training = None                       # the folder that this process trains in, once it has begun


def start(args, name):
    """Begin a training: device, rank, world size and the run's folder.

    Refuses a batch that cannot be dealt out; sets args.amp where the flag was not given. The
    folder is --resume's, else --out_dir, else out/<name>, numbered if it exists. Where torchrun
    restarted us, it is that of our own first attempt, known by its flags, and args.resume is set:
    the run of another command is neither continued nor overwritten.
    """
    device, rank, world = setup(args.device)
    accum = f" x --accum {args.accum}" if "accum" in args else ""
    if args.batch_size % (world * getattr(args, "accum", 1)):
        raise InputError(f"--batch_size {args.batch_size} is not divisible by {world} processes"
                         f"{accum}")
    args.amp = device.type == "cuda" if args.amp is None else args.amp
    if args.amp:
        torch.set_float32_matmul_precision("high")
    if args.resume:
        path = Path(args.resume)
        return device, rank, world, path if path.is_dir() else path.parent

    folders = [Path(args.out_dir or Path("out", name))]
    while not args.out_dir and folders[-1].exists():
        folders.append(Path("out", f"{name}_{len(folders) + 1}"))
    out_dir = folders[-1]
    ours = json.loads(json.dumps(vars(args)))                       # as the log has them
    for folder in reversed(folders) if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) else ():
        theirs = [row["args"] for row in read_log(folder / "log.jsonl") if "args" in row]
        if theirs and {**theirs[-1], "resume": None} == ours:
            if (folder / "last.pt").exists():
                out_dir, args.resume = folder, str(folder)
            break
    out_dir, args.resume = broadcast([out_dir, args.resume])
    if (out_dir / "last.pt").exists() and not args.resume:
        raise InputError(f"--out_dir {out_dir} already holds a run: continue it with --resume "
                         f"{out_dir} or choose another folder")
    return device, rank, world, out_dir


def begin(args, out_dir, step, model, device, rank, world, **about):
    """Make the run's folder, lock it, cut its log behind `step`. Returns the `Log`.

    about: what else its first row says. Only rank 0 writes; the rows of the others go nowhere.
    Raises ValueError if another process trains there.
    """
    global training
    if rank:
        return Log(os.devnull)
    out_dir.mkdir(parents=True, exist_ok=True)
    log = Log(out_dir / "log.jsonl")
    log.lock()
    log.cut(step if args.resume else -1)
    about.update(parameters=sum(p.numel() for p in model.parameters()), device=describe(device))
    log.append(dict(step=step, args=vars(args), torch=torch.__version__, world=world, **about))
    say(f"{about['parameters']:,} parameters | {world} x {about['device']} | {out_dir}"
        + (f" | resumed at step {step}" if step else ""))
    training = out_dir
    return log


def what_is_saved():
    """Say which step a stopped training has saved, and the command that goes on from there."""
    if training is None or not (training / "last.pt").exists():
        return "; nothing is saved yet" if training else ""
    return (f"; {training} holds step {load(training)['step']}, go on with: python "
            f"{os.path.relpath(sys.argv[0])} --resume {training}")


class Log:
    """A file of rows, one JSON object a line; those of a run have a `step`."""

    def __init__(self, path):
        self.path = Path(path)

    def append(self, row):
        """Write a row; ValueError at a number that is not finite."""
        for name, value in {**row, **row.get("eval", {})}.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise InputError(f"not finite at step {row.get('step')}: {name} {value}")
        try:
            with open(self.path, "a") as f:
                f.write(json.dumps(row) + "\n")
        except OSError as e:
            raise InputError(f"cannot write {self.path} ({e.strerror})") from None

    def cut(self, step):
        """Drop what was logged after `step`, and a line cut short by a kill."""
        rows = [row for row in read_log(self.path) if row.get("step", 0) <= step]
        with replacing(self.path) as tmp:
            tmp.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def lock(self, does="trains"):
        """Keep other processes out of this folder while the Log lives; ValueError names who has it.

        The system frees the lock of a process that dies, so none is left behind.
        """
        self.held = open(self.path.with_name("lock"), "a+")         # closing it frees the lock
        try:
            if fcntl:
                fcntl.lockf(self.held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            self.held.seek(0)
            raise InputError(f"{self.path.parent}: process {self.held.read()} {does} there; stop "
                             f"it first, or choose another --out_dir") from None
        self.held.truncate(0)
        print(f"{os.getpid()} on {socket.gethostname()}", end="", file=self.held, flush=True)


def read_log(path):
    """Read the rows of a log, without one cut short by a kill; ValueError names what is no log."""
    rows, path = [], Path(path)
    text = path.read_text("utf-8", "replace") if path.exists() else ""
    for i, line in enumerate(text.split("\n"), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if not isinstance(row, dict) or not isinstance(row.get("step", 0), int):
            raise InputError(f"{path}, line {i}: {line[:60]}, expected a JSON object whose step is "
                             f"a whole number")
        rows.append(row)
    return rows


# --- checkpoints ----------------------------------------------------------------------------------

@contextmanager
def replacing(path):
    """Give the name of a file to write, only this process's; put it in the place of `path`.

    At every moment path is the old file or the new one. Raises OSError naming it on a full disk.
    """
    path, tmp = Path(path), Path(f"{path}.{os.getpid()}.tmp")
    try:
        yield tmp
        os.replace(tmp, path)
    except (OSError, RuntimeError) as e:                            # torch.save hides the OSError
        if isinstance(e.__context__, KeyboardInterrupt):            # and a Ctrl-C
            raise KeyboardInterrupt from None
        why = getattr(e.__context__, "strerror", None) or getattr(e, "strerror", None) or e
        kept = "the previous one is untouched" if path.exists() else "there is none yet"
        raise InputError(f"cannot write {path} ({why}); {kept}") from None
    finally:
        with suppress(OSError):
            tmp.unlink()


def save(path, checkpoint):
    """Write a dict of plain types and tensors, whole or not at all; see `replacing`.

    Raises ValueError if a weight is not finite; the old file is untouched.
    """
    for name, weight in checkpoint.get("model", {}).items():
        if not weight.isfinite().all():
            raise InputError(f"not finite at step {checkpoint.get('step')}: the weight {name}")
    with replacing(path) as tmp:
        tmp.parent.mkdir(parents=True, exist_ok=True)
        with open(tmp, "wb") as f:
            torch.save(checkpoint, f)
            f.flush()
            os.fsync(f.fileno())


def load(path):
    """Read the dict in a checkpoint of ours, DeiT's or the released code's; tensors on the CPU.

    Runs nothing that it holds. path: a file, a folder with last.pt in it, or an https address.
    """
    read, path = torch.load, str(path)
    if path.startswith("https://"):
        read = torch.hub.load_state_dict_from_url
    else:
        path = Path(path, "last.pt") if Path(path).is_dir() else Path(path)
        if not path.exists():
            raise InputError(f"no checkpoint at {path}")
        open(path, "rb").close()                        # a file that may not be read says so itself
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):     # the released code's args
            checkpoint = read(path, map_location="cpu", weights_only=True)
    except Exception as e:                             # what odd bytes raise depends on the bytes
        why = str(e.reason) if isinstance(e, URLError) else "truncated, or no file of torch.save"
        if "GLOBAL" in str(e):
            why = f"it holds {str(e).split('GLOBAL')[1].split()[0]}, which is no plain data"
        raise InputError(f"{path} is not a readable checkpoint ({why})") from None
    if not isinstance(checkpoint, dict):
        raise InputError(f"{path} holds a {type(checkpoint).__name__}, expected a dict of weights")
    return checkpoint


def check_run(checkpoint, path, script, *parts):
    """Raise ValueError naming the file unless it is of this script and holds these parts."""
    kinds = dict(step=int, classes=list, vocab=str)
    if checkpoint.get("task") != TASKS[script]:
        raise InputError(f"{path} is not a checkpoint of {script}")
    for name in parts:
        value = checkpoint.get(name)
        if not isinstance(value, kinds.get(name, dict)) or (value == {} and name != "metrics"):
            hint = "; continue from last.pt" if name == "optimizer" else ""
            raise InputError(f"{path} is an incomplete checkpoint of {script}: it has no "
                             f"{name}{hint}")


def load_run(path, script, *parts, **data):
    """Load what --resume names, with these parts; ValueError if the data have changed.

    data: what the checkpoint has to say of the data, as classes=[...], training_images=100.
    """
    checkpoint = load(path)
    check_run(checkpoint, path, script, "model", "step", "optimizer", *parts)
    for name, value in data.items():
        was = checkpoint.get(name, value)
        if was != value:
            was, value = (textwrap.shorten(str(v), 60) for v in (was, value))
            raise InputError(f"--resume {path}: the data have changed, {name} was {was} and is "
                             f"{value}")
    return checkpoint


@contextmanager
def naming(what):
    """Begin input errors within with `what`, the flag and the file they are about."""
    try:
        yield
    except ValueError as e:
        raise InputError(f"{what}: {e}") from None


def stored_config(checkpoint, config):
    """Read a checkpoint's model_config as the dataclass `config`; a field it lacks has its default.

    Raises InputError at an unknown field. PAP's settings were fields of their own once.
    """
    stored = dict(checkpoint["model_config"])
    separate = {name: stored.pop(name) for name in PAP_FLAGS if name in stored}
    if separate:
        stored["pap"] = separate
    unknown = stored.keys() - {f.name for f in fields(config)}
    if unknown:
        raise InputError(f"its model_config has {', '.join(sorted(unknown))}, which is unknown to "
                         f"{config.__name__}")
    return config(**stored)


def rebuild(checkpoint, script, model, config):
    """Rebuild the model of a checkpoint of `script`, in eval mode. model, config: its classes."""
    check_run(checkpoint, "it", script, "model", "model_config")
    model = model(stored_config(checkpoint, config))
    load_strictly(model, checkpoint["model"])
    return model.eval()


def load_strictly(model, weights):
    """Call model.load_state_dict; weights that do not fit leave the model as it was."""
    before = {name: w.clone() for name, w in model.state_dict().items()}
    try:
        model.load_state_dict(weights)
    except RuntimeError as e:
        model.load_state_dict(before)
        raise InputError(f"weights do not fit the model: "
                         f"{textwrap.shorten(str(e), 250)}") from None


# --- steps of a training --------------------------------------------------------------------------

def every(step, n):
    """Tell whether step is a multiple of n; never, if n is 0."""
    return n > 0 and step % n == 0


def seed_of(seed, step, rank):
    """Choose the seed of the dropout masks of a step on a process."""
    return hash((seed, step, rank)) % 2 ** 63


def progress(first, stop, rank):
    """Show a bar for the steps from `first` to `stop`."""
    return tqdm(range(first, stop), "training", stop, initial=first, unit="step", disable=rank > 0,
                dynamic_ncols=True)


def line(step, loss, metrics):
    """Write the line that an evaluation prints."""
    numbers = [f"{name} {value:.2f}" for name, value in metrics.items() if type(value) is float]
    return "  ".join([f"step {step:6d}  training loss {loss:.4f} ", *numbers])


def mean_of(pending, step):
    """Average loss and gradient norm of the last steps, as floats. Waits for the device.

    pending: a tensor (2,), loss and norm, of each step up to `step`: this process's share of the
    sums over processes. Raises ValueError at the first step where one is not finite.
    """
    rows = all_sum(torch.stack(pending)).cpu()                      # (steps, 2)
    for i, (loss, norm) in enumerate(rows.tolist(), step - len(rows) + 1):
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise InputError(f"not finite at step {i}: loss {loss:.4g}, gradient norm {norm:.4g}; "
                             f"try a smaller --lr or --clip")
    return rows.mean(0).tolist()


def lr_at(step, total, warmup, lr, min_lr, warmup_lr=1e-6):
    """Raise lr linearly from warmup_lr in `warmup` steps, then half a cosine to min_lr at `total`.

    The cosine's phase counts from 0, as in DeiT's schedule (timm's CosineLRScheduler without
    warm-up prefix), per step instead of per epoch.
    """
    if step < warmup:
        return warmup_lr + (lr - warmup_lr) * step / warmup
    return min_lr + (lr - min_lr) * (1 + math.cos(math.pi * min(step / max(total, 1), 1))) / 2


def param_groups(model, weight_decay, no_decay=("pos_embed", "cls_token")):
    """Make the optimiser's two groups; 1-d tensors and those in no_decay are not decayed."""
    decay, keep = [], []
    for name, p in model.named_parameters():
        if p.requires_grad:
            (keep if p.ndim < 2 or name.split(".")[-1] in no_decay else decay).append(p)
    return [dict(params=decay, weight_decay=weight_decay), dict(params=keep, weight_decay=0.0)]


def table(rows, header):
    """Write lists of cells as a Markdown table, columns aligned."""
    rows = [[str(cell).replace("|", r"\|") for cell in row] for row in [header, *rows]]  # as in |S|
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths)) + " |" for row in rows]
    rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])
