"""What the training loops share: flags, processes, a run's folder and log, checkpoints, schedules.

The loops are in the scripts. Nothing of ours is imported here, so everything may import this.
"""

import argparse
import json
import math
import os
import re
import shutil
import sys
from collections import deque
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, fields
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn           # imported later, with a group there, it leaves threads behind
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from tqdm import tqdm

TASKS = {"train_cls.py": "classification", "train_seg.py": "segmentation",
         "train_lm.py": "language modelling"}
PAP_FLAGS = ("n_iter", "lambd", "form", "mu_over")                  # one field, pap, in configs


class InputError(ValueError):
    """What the user's input got wrong: a flag, a path, a file's content. `run` shows one line."""


# --- flags ----------------------------------------------------------------------------------------

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


def one_of(name, value, known):
    """Refuse a setting that has none of the known values."""
    if value not in known:
        own = ("; one of your own is entered in attention.ATTENTIONS first, as "
               "referee.studies.robust_attentions does") if name == "attn" else ""
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


COUNT, NATURAL = number(int, 1), number(int, 0)
REAL, SHARE = number(float, 0), number(float, 0, 0.999999)


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Show the script's docstring as it is written, and the default of every flag."""


def add_attention(flag, kinds, forms):
    """Add the flags of a model's attention. kinds, forms: what may be chosen."""
    flag("--attn", choices=kinds, default="rpc",
         help="rpc: symmetric, with RPC-Attention in --rpc_layers")
    flag("--rpc_layers", default="0", help="from 0: 0 (the paper's layer1), all, 0,1,2 or 0-3")
    flag("--n_iter", type=COUNT, default=4, help="PAP steps; the paper: 4-6 in layer 0, 2 in all")
    flag("--lambd", type=number(float, 0, math.inf), default=4.0,
         help="PAP lambda; the paper: 4 in layer 0, 3 in all; inf: never shrink")
    flag("--form", choices=forms, default="released", help="reading of Algorithm 1: attention.py")


def pap_of(args):
    """Gather the flags of PAP that are set: what configs hold as `pap`."""
    return {name: value for name, value in vars(args).items()
            if name in PAP_FLAGS and value is not None}


def add_running(p, name, end):
    """Add how a script runs. name: of the run's folder. end: the flag its schedule ends with."""
    flag, boolean = p.add_argument_group("running").add_argument, argparse.BooleanOptionalAction
    flag("--log_every", type=COUNT, default=20, help="steps between rows of log.jsonl")
    flag("--save_every", type=NATURAL, default=0, help="steps between further saves; 0: none")
    flag("--seed", type=number(int, 0, 2 ** 31 - 1), default=0, help="of weights, order and noise")
    flag("--device", help="cuda, mps or cpu; None: the best there is")
    flag("--amp", action=boolean, help="bf16 autocast; None: on GPUs")
    flag("--compile", action=boolean, default=False, help="torch.compile the model")
    flag("--out_dir", help=f"a new folder; None: out/{name}, numbered if it exists")
    flag("--resume", help="folder of a run to continue; its flags are remembered")
    flag("--max_steps", type=COUNT, help=f"stop early; the schedule stays that of {end}")


# Flags that --resume may change; with another value of any other it would be another run.
MAY_CHANGE = """accum amp clip compile data_dir download epochs eval_every keep_every log_every lr
    min_lr num_workers save_every save_images skip_bad_images stride warmup warmup_epochs
    weight_decay window words""".split()
NOT_STORED = "device max_steps out_dir prompt resume sample".split()       # of one command alone


def parse(p, recipes, script):
    """Parse the flags. The command line wins over the run that --resume names, that over a recipe.

    recipes: {data: {flag: value}}: the first is that of no --data, "folder" that of --data_dir
    alone; (data, model) holds what such a model has other than data.
    """
    first, stored = argparse.ArgumentParser(add_help=False, allow_abbrev=False), {}
    for name in ("data", "data_dir", "model", "resume"):            # these decide on the defaults
        first.add_argument(f"--{name}")
    seen = first.parse_known_args()[0]
    if seen.resume:
        with error_prefix(f"--resume {seen.resume}"):
            checkpoint = load(seen.resume)
            check_run(checkpoint, script)
        known = vars(p.parse_args([])).keys() - NOT_STORED
        stored = {name: value for name, value in checkpoint["args"].items() if name in known}
        if stored.get("amp"):                           # a GPU's default, not to be a CPU's
            stored["amp"] = None
    data = seen.data or stored.get("data") or ("folder" if seen.data_dir else next(iter(recipes)))
    recipe = recipes.get(data, {})
    model = seen.model or stored.get("model") or recipe.get("model")
    p.set_defaults(**{"data": data, **recipe, **recipes.get((data, model), {}), **stored})
    args = p.parse_args()

    if args.data == "shapes" and args.data_dir:
        raise InputError(f"--data_dir {args.data_dir}: --data shapes renders its own images")
    if args.data == "folder" and not args.data_dir:
        raise InputError("--data folder needs --data_dir")
    if args.resume and args.out_dir:
        raise InputError("--out_dir does not go with --resume, which continues in its own folder")
    for name, was in stored.items():
        if name not in MAY_CHANGE and getattr(args, name) != was:
            raise InputError(f"--{name} {getattr(args, name)}: the run in {args.resume} has {was}; "
                             f"--resume may change {', '.join(sorted(stored.keys() & MAY_CHANGE))}")
    return args


def set_missing(args, chosen):
    """Set what neither a flag nor a recipe has set; returns what each name now has, in words."""
    for name, value in chosen.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return " ".join(f"{name}={getattr(args, name)}" for name in chosen)


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
        # torchrun's store keeps stale addresses of workers: prefix keys by attempt
        store, rank, world = next(dist.rendezvous("env://"))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
        store = dist.PrefixStore(f"attempt_{attempt}", store)
        backend = "nccl" if device.startswith("cuda") else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world,
                                timeout=timedelta(hours=6))       # of a download, an attack
    return torch.device(device), dist.get_rank(), dist.get_world_size()


kept = deque(maxlen=8)                # the last tensors that were summed


def all_sum(x):
    """Sum a tensor over all processes (the tensor itself in a single one).

    The last ones are kept, so that none of them is freed by a thread of gloo's: that takes Python's
    lock, with which PyTorch below 2.8 waits for this thread at the end of the run, forever.
    """
    if dist.is_initialized():
        dist.all_reduce(x)
        kept.append(x)
    return x


def broadcast(objects):
    """Give every process rank 0's list of objects."""
    if dist.is_initialized():
        dist.broadcast_object_list(objects)
    return objects


def print0(*lines):
    """Print lines on rank 0 alone, above a progress bar."""
    if os.environ.get("RANK", "0") == "0":
        tqdm.write("\n".join(lines))


def describe(device):
    """Name the hardware, for logs: on another CPU the same seed takes another path."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    path = Path("/proc/cpuinfo")            # Linux; processors that differ may share their name
    cpu = dict(re.findall(r"(.+?)\s*: (.*)", path.read_text())) if path.exists() else {}
    words = {"model name": "", "cpu family": "family ", "model": "model "}
    name = " ".join(word + cpu[of] for of, word in words.items() if of in cpu)
    return ", ".join([device.type, *filter(None, [name]), f"{torch.get_num_threads()} threads"])


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
    """Call a script's main(). An InputError becomes one line and exit code 1, Ctrl-C one and 130.

    Every other exception is a bug, ours or of an edit, and keeps its traceback.
    """
    torch.set_flush_denormal(True)      # docs/data.md; threads and DataLoader workers inherit it
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:                                 # who reads, `head` say, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        print(f"\nstopped by Ctrl-C{what_is_saved()}", file=sys.stderr)
        sys.exit(130)
    except InputError as e:
        words = str(e).splitlines()[-1].removeprefix("common.InputError: ")     # of a worker
        sys.exit(f"error: {words}{what_is_saved()}")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


# --- the folder of a run --------------------------------------------------------------------------

active_run_dir = None                 # the folder that this process trains in, once it has begun


def start(args, name):
    """Begin a training: device, rank, world size and the run's folder; sets args.amp.

    The folder is --resume's, else --out_dir, else out/<name>, numbered if it exists. Where torchrun
    restarted us, it is the last one whose log has our flags, and args.resume is set.
    """
    device, rank, world = setup(args.device)
    if args.batch_size % (world * getattr(args, "accum", 1)):
        raise InputError(f"--batch_size {args.batch_size} is not divisible by {world} processes"
                         + (f" x --accum {args.accum}" if "accum" in args else ""))
    args.amp = device.type == "cuda" if args.amp is None else args.amp
    if args.amp:
        torch.set_float32_matmul_precision("high")
    if args.resume:
        path = Path(args.resume)
        return device, rank, world, path if path.is_dir() else path.parent

    folders = [Path(args.out_dir or Path("out", name))]
    while not args.out_dir and folders[-1].exists():
        folders.append(Path("out", f"{name}_{len(folders) + 1}"))
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):
        flags = json.loads(json.dumps(vars(args)))                          # as a log has them
        ours = [folder for folder in folders
                if flags in [row.get("args") for row in read_log(folder / "log.jsonl")]]
        folders = ours or folders
        if ours and (ours[-1] / "last.pt").exists():
            args.resume = str(ours[-1])
        elif ours and rank == 0:                                    # it died before its first save
            shutil.rmtree(ours[-1])
    out_dir, args.resume = broadcast([folders[-1], args.resume])
    if out_dir.exists() and not args.resume:
        raise InputError(f"--out_dir {out_dir} exists: go on with the run in it by --resume "
                         f"{out_dir}, or choose another folder")
    return device, rank, world, out_dir


def begin(args, out_dir, step, model, device, rank, world, **about):
    """Make the run's folder, or cut the log of a resumed run behind `step`. Returns the `Log`.

    about: what else its first row says. Only rank 0 writes; the rows of the others go nowhere.
    """
    global active_run_dir
    if rank:
        return Log(os.devnull)
    log = Log(out_dir / "log.jsonl")
    if args.resume:
        log.cut(step)
    else:
        try:
            out_dir.mkdir(parents=True)
        except OSError as e:
            raise InputError(f"--out_dir {out_dir} cannot be made ({e.strerror})") from None
    about.update(parameters=sum(p.numel() for p in model.parameters()), device=describe(device))
    log.append(dict(step=step, args=vars(args), torch=torch.__version__, world=world, **about))
    print0(f"{about['parameters']:,} parameters | {world} x {about['device']} | {out_dir}"
           + (f" | resumed at step {step}" if step else ""))
    active_run_dir = out_dir
    return log


def what_is_saved():
    """Say how to go on with a training that was stopped."""
    if active_run_dir is None or not (active_run_dir / "last.pt").exists():
        return "; nothing is saved yet" if active_run_dir else ""
    return f"; go on with: python {os.path.relpath(sys.argv[0])} --resume {active_run_dir}"


class Log:
    """A file of rows, one JSON object a line; those of a run have a `step`."""

    def __init__(self, path):
        self.path = Path(path)

    def append(self, row):
        """Write a row; InputError at a number that is not finite."""
        for name, value in {**row, **row.get("eval", {})}.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise InputError(f"not finite at step {row.get('step')}: {name} {value}")
        with open(self.path, "a") as f:
            f.write(json.dumps(row) + "\n")

    def cut(self, step):
        """Drop what was logged after `step`, and a last line cut short by a kill."""
        rows = [row for row in read_log(self.path) if row.get("step", 0) <= step]
        with replacing(self.path) as tmp:
            tmp.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_log(path):
    """Read the rows of a log: a list of dicts. The last line may be cut short by a kill."""
    rows, path = [], Path(path)
    lines = path.read_text("utf-8", "replace").split("\n") if path.exists() else []
    for line in lines:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            if line is not lines[-1]:                               # a whole line ends in a newline
                raise
    return rows


# --- checkpoints ----------------------------------------------------------------------------------

@contextmanager
def replacing(path):
    """Give the name of a temporary file that takes the place of `path`: never half a file there."""
    tmp = Path(f"{path}.{os.getpid()}.tmp")
    try:
        yield tmp
        os.replace(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)


def save(path, checkpoint):
    """Write a dict of plain types and tensors, whole or not at all; InputError at nan weights."""
    for name, weight in checkpoint.get("model", {}).items():
        if not weight.isfinite().all():
            raise InputError(f"not finite at step {checkpoint.get('step')}: the weight {name}")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as tmp:
        torch.save(checkpoint, tmp)                 # a path: given a file, torch hides a Ctrl-C
        with open(tmp, "rb+") as f:
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
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):     # the released code's args
            checkpoint = read(path, map_location="cpu", weights_only=True)
    except Exception as e:                                          # torch.load raises many types
        raise InputError(f"{path} is not a readable checkpoint ({type(e).__name__})") from None
    if not isinstance(checkpoint, dict):
        raise InputError(f"{path} holds a {type(checkpoint).__name__}, expected a dict of weights")
    return checkpoint


@contextmanager
def error_prefix(what):
    """Begin input errors within with `what`, the flag and the file they are about."""
    try:
        yield
    except InputError as e:
        raise InputError(f"{what}: {e}") from None


def check_run(checkpoint, script):
    """Raise InputError unless a checkpoint is of this script."""
    if checkpoint.get("task") != TASKS[script]:
        raise InputError(f"not a checkpoint of {script}")


def stored_config(checkpoint, config):
    """Read a checkpoint's model_config as the dataclass `config`; a field it lacks has its default.

    An unknown field, of a subclass say, is named and left out. PAP's settings were fields of their
    own once, and there were a choice of norms and one of decoders.
    """
    once = dict(norm="post", decoder="mask")
    stored = {k: v for k, v in checkpoint["model_config"].items() if once.get(k) != v}
    separate = {name: stored.pop(name) for name in PAP_FLAGS if name in stored}
    if separate:
        stored["pap"] = separate
    unknown = stored.keys() - {f.name for f in fields(config)}
    if unknown:
        print0(f"left out, as unknown to {config.__name__}: {', '.join(sorted(unknown))}")
    return config(**{name: value for name, value in stored.items() if name not in unknown})


def rebuild(checkpoint, script, model, config):
    """Rebuild the model of a checkpoint of `script`, in eval mode. model, config: its classes."""
    check_run(checkpoint, script)
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
    load_strictly(model, {name: w for name, w in weights.items() if name not in others})


def load_strictly(model, weights):
    """Call model.load_state_dict; InputError, in torch's words, if the weights do not fit."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as e:
        raise InputError(" ".join(str(e).split())[:300]) from None


def state_of(script, model, optimizer, args, step, **more):
    """Make the checkpoint after `step` steps, a dict of plain types and tensors."""
    return dict(task=TASKS[script], args=vars(args), step=step, model=model.state_dict(),
                model_config=asdict(model.config), optimizer=optimizer and optimizer.state_dict(),
                **more)


def load_run(args, **data):
    """Load the checkpoint that --resume names, {} without; InputError if the data have changed.

    data: what the checkpoint has to say of the data, as classes=[...], training_images=100.
    """
    checkpoint = load(args.resume) if args.resume else {}
    if args.resume and not checkpoint["optimizer"]:
        raise InputError(f"--resume {args.resume}: it has no optimizer; go on from last.pt")
    for name, value in data.items():
        was = checkpoint.get(name, value)
        if was != value:
            raise InputError(f"--resume {args.resume}: the data have changed, {name} was "
                             f"{was!r:.60} and is {value!r:.60}")
    return checkpoint


def restore(checkpoint, model, optimizer):
    """Put a run's weights and optimiser into a model and optimiser built like its own."""
    decays = [group["weight_decay"] for group in optimizer.param_groups]    # a flag may be new
    load_strictly(model, checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    for group, decay in zip(optimizer.param_groups, decays):
        group["weight_decay"] = decay


# --- steps of a training --------------------------------------------------------------------------

def every(step, *counts):
    """Tell whether step is a multiple of one of the counts; never of 0."""
    return any(n > 0 and step % n == 0 for n in counts)


def seed_of(seed, step, rank):
    """Choose the seed of the dropout masks of a step on a process."""
    return hash((seed, step, rank)) % 2 ** 63


def progress(first, stop, rank):
    """Show a bar for the steps from `first` to `stop`, on a terminal."""
    return tqdm(range(first, stop), "training", stop, initial=first, unit="step",
                disable=rank > 0 or None, dynamic_ncols=True)


def show_progress(bar, step, loss, rate, unit, seconds):
    """Show loss and speed beside the bar or, where output is redirected, in a line."""
    bar.set_postfix_str(f"loss {loss:.3f} {rate:.0f} {unit}/s")
    if bar.disable:
        print0(f"step {step:6d}  loss {loss:.4f}  {rate:.0f} {unit}/s  "
               f"{1000 * seconds:.1f} ms a step")


def line(step, loss, metrics):
    """Write the line that an evaluation prints."""
    numbers = [f"{name} {value:.2f}" for name, value in metrics.items() if type(value) is float]
    return "  ".join([f"step {step:6d}  training loss {loss:.4f} ", *numbers])


def mean_of(pending, step):
    """Average loss and gradient norm of the last steps, as floats. Waits for the device.

    pending: a tensor, (loss, norm, whatever else), of each step up to `step`: this process's share
    of the sums over processes, so all of them have to call this. InputError names the first step
    where loss or norm is not finite.
    """
    rows = all_sum(torch.stack(pending)).cpu()                      # (steps, 2 or more)
    for i, (loss, norm, *_) in enumerate(rows.tolist(), step - len(rows) + 1):
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


def param_groups(model, weight_decay, also=()):
    """Make the optimiser's two groups: weights of Linear, Conv and Embedding decay, the rest not.

    also: ends of names of further matrices that do. Frozen parameters are in neither group.
    """
    matrices = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Embedding)
    weights = {id(m.weight) for m in model.modules() if isinstance(m, matrices)}
    decay, keep = [], []
    for name, p in model.named_parameters():
        if p.requires_grad:
            decays = id(p) in weights or p.ndim > 1 and name.endswith(tuple(also))
            (decay if decays else keep).append(p)
    return [dict(params=decay, weight_decay=weight_decay), dict(params=keep, weight_decay=0.0)]


def table(rows, header):
    """Write lists of cells as a Markdown table, columns aligned."""
    rows = [[str(cell).replace("|", r"\|") for cell in row] for row in [header, *rows]]  # as in |S|
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths)) + " |" for row in rows]
    rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])
