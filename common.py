"""What the scripts share: processes, a training run; with what flags.py and checkpoint.py hold."""

import json
import math
import os
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn           # once there is a group, it would keep that and its threads
from torch.nn.parallel import DistributedDataParallel as DDP
from tqdm import tqdm

from attention import PAP, SelfAttention
from checkpoint import check_run, naming, read_checkpoint, read_run, save_checkpoint  # noqa: F401
from checkpoint import cut_log, read_log, write_log  # noqa: F401
from flags import COUNT, NATURAL, REAL, SETTINGS, SHARE, choice, number, parse_layers  # noqa: F401
from flags import add_attention, add_running, fill, given_flags, parse, parser  # noqa: F401


# --- processes and devices ------------------------------------------------------------------------

def setup(device=None):
    """Join the process group if torchrun started this process. Returns (device, rank, world size).

    device: "cuda", "mps" or "cpu"; None picks the best there is. nccl on GPUs, gloo elsewhere.
    """
    there = dict(cuda=torch.cuda.device_count(), mps=int(torch.backends.mps.is_available()), cpu=1)
    known = [name for kind, count in there.items() if count
             for name in (kind, *(f"{kind}:{i}" for i in range(count)))]
    device = known[0] if device is None else device
    if device not in known:
        raise ValueError(f"--device {device}: this PyTorch finds {', '.join(known)}; leave the "
                         f"flag out to pick what there is")
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


def start(args, name):
    """What every training script begins with: device, rank, world size and the run's folder.

    Sets args.amp where the flag was not given. name: of the folder, see `choose_out_dir`.
    """
    device, rank, world = setup(args.device)
    args.amp = device.type == "cuda" if args.amp is None else args.amp
    if args.amp:
        torch.set_float32_matmul_precision("high")
    return device, rank, world, choose_out_dir(args, name)


def all_sum(x):
    """Sum of a tensor over all processes (the tensor itself in a single one)."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def broadcast(objects):
    """Rank 0's list of plain objects, on every process."""
    if dist.is_initialized():
        dist.broadcast_object_list(objects)
    return objects


def describe(device):
    """The hardware in words, for logs."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"


def autocast(device, amp):
    """bf16 autocast, or nothing."""
    return torch.autocast(device.type, torch.bfloat16) if amp else nullcontext()


def run(main):
    """Call main(); an input error becomes one line on stderr and exit code 1."""
    try:
        main()
    except (ValueError, OSError) as e:
        lines = str(e).strip().splitlines() or [type(e).__name__]       # a worker's: the last line
        sys.exit(f"error: {lines[-1].removeprefix('ValueError: ')}")
    except KeyboardInterrupt:
        sys.exit("\nstopped by Ctrl-C")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def choose_out_dir(args, name):
    """Where a run lives: --resume's folder, else --out_dir, else out/<name>, numbered if it exists.

    Also sets args.resume when torchrun restarted us and there is something to resume: the run of
    another command is neither continued nor overwritten. The same on every process.
    """
    for flag in ("out_dir", "init_from"):
        if getattr(args, flag, None) == "":
            raise ValueError(f"--{flag} is empty, expected a path")
    if args.resume:
        path = Path(args.resume)
        return path if path.is_dir() else path.parent

    out_dir = Path(args.out_dir or Path("out", name))
    folders = [out_dir]
    while not args.out_dir and out_dir.exists():
        out_dir = Path("out", f"{name}_{len(folders) + 1}")
        folders.append(out_dir)
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    ours = json.loads(json.dumps(vars(args)))             # as the log has them
    for folder in reversed(folders):                      # our own is the last of these flags
        rows = read_log(folder / "log.jsonl") if restarted else []
        theirs = next((row["args"] for row in reversed(rows) if "args" in row), {})
        kept = (folder / "last.pt").exists()
        if {**theirs, "resume": None} == ours:
            if kept:
                out_dir, args.resume = folder, str(folder)
            break
        if kept and args.out_dir:
            raise ValueError(f"--out_dir {out_dir} already holds a run: continue it with --resume "
                             f"{out_dir} or choose another folder")
    out_dir, args.resume = broadcast([out_dir, args.resume])
    return out_dir


# --- a training run -------------------------------------------------------------------------------

class Run:
    """A training run on rank 0's disk: log.jsonl, checkpoints, the progress bar.

    about: numbers of the data, for the log; ValueError if they are others when the run is resumed.

        run = Run(args, out_dir, first, stop, device, rank, world, model)
        for step in run.steps(measure, state, "images", args.batch_size, epoch_steps):
            ...                                             # gradient, update
            run.end(step + 1, loss, norm, lr)
    """

    def __init__(self, args, out_dir, first, stop, device, rank, world, model, **about):
        self.args = args
        self.out_dir = out_dir
        self.log = out_dir / "log.jsonl"
        self.first = self.saved = first
        self.stop = stop
        self.master = rank == 0
        self.started = time.time()
        rows = []
        if self.master:
            try:
                out_dir.mkdir(parents=True, exist_ok=bool(args.resume or args.out_dir))
            except FileExistsError:                     # it was free when the command began
                if args.resume or args.out_dir:         # a file
                    raise
                raise ValueError(f"{out_dir}: another run has just begun there; start again, or "
                                 f"give each run an --out_dir") from None
            rows = cut_log(self.log, first if args.resume else -1)
        evaluations = {row["step"]: row["eval"] for row in rows if "eval" in row}
        theirs = {name: row[name] for row in rows for name in about if name in row}
        self.evaluations, theirs = broadcast([evaluations, theirs])
        for name, value in about.items():
            if theirs.get(name, value) != value:
                raise ValueError(f"--resume {args.resume}: the data have changed, {name} was "
                                 f"{theirs[name]} and is {value}")
        self.loss = next((row["loss"] for row in reversed(rows) if "loss" in row), math.nan)
        parameters = sum(p.numel() for p in model.parameters())
        self.row(step=first, args=vars(args), torch=torch.__version__, parameters=parameters,
                 device=describe(device), world=world, **about)
        self.print(f"{parameters:,} parameters | {world} x {describe(device)} | {out_dir}")
        if first:
            self.print(f"resumed at step {first}")

    def print(self, *lines):
        if self.master:
            for line in lines:
                tqdm.write(line)

    def row(self, **row):
        if self.master:
            write_log(self.log, row)

    def steps(self, measure, state, unit, size, epoch_steps=0):
        """The steps that are left, with a bar; before them an evaluation that was cut off.

        measure(step): an evaluation, and what else its row of the log holds. state(step): a
        checkpoint. A step goes through `size` images or tokens (unit). epoch_steps: 0 if there are
        no epochs; --eval_every counts epochs if there are.
        """
        self.measure, self.state, self.unit, self.size = measure, state, unit, size
        self.epoch_steps = epoch_steps
        if self.due(self.first):
            self.keep(self.first)
        self.bar = tqdm(range(self.first, self.stop), "training", self.stop, initial=self.first,
                        unit="step", disable=not self.master, dynamic_ncols=True)
        self.restart()
        return self.bar

    def restart(self):
        """Forget what waits, and measure speed from now on: evaluations do not count."""
        self.pending, self.clock = [], time.time()

    def end(self, step, loss, norm, lr):
        """The end of a step: log, evaluate and save what is due. step: 1 after the first.

        loss, gradient norm: this process's share of the sums over processes. Raises ValueError at
        one that is not finite.
        """
        self.pending.append(torch.stack([loss, norm]))
        epoch_ends = every(step, self.epoch_steps)
        save = epoch_ends or self.due(step) or every(step, self.args.save_every)
        if save or every(step, self.args.log_every):
            self.write(step, lr)
        if save:
            self.keep(step)

    def keep(self, step):
        """Evaluate if that is due, and save; last.pt at the end: a kill before repeats the rest."""
        if self.due(step):
            self.evaluate(step)
        epoch_ends = every(step, self.epoch_steps)
        if epoch_ends and every(step // self.epoch_steps, self.args.keep_every):
            self.save(f"epoch_{step // self.epoch_steps}.pt", self.state(step))
        self.save("last.pt", self.state(step))

    def write(self, step, lr):
        """Log means since the last row and what went by in a second. Waits for the device."""
        rows = all_sum(torch.stack(self.pending)).cpu()                 # (steps, 2): loss, norm
        bad = (~rows.isfinite().all(1)).nonzero().flatten().tolist()
        if bad:
            loss, norm = rows[bad[0]].tolist()
            self.refuse(step - len(rows) + bad[0] + 1, f"loss {loss:.4g}, gradient norm {norm:.4g}")
        self.loss, norm = rows.mean(0).tolist()
        rate = len(rows) * self.size / (time.time() - self.clock)
        epoch = dict(epoch=step / self.epoch_steps) if self.epoch_steps else {}
        self.row(step=step, loss=self.loss, grad_norm=norm, **{f"{self.unit}_per_s": rate}, **epoch,
                 lr=lr)
        self.bar.set_postfix_str(f"loss {self.loss:.3f} {rate:.0f} {self.unit}/s")
        self.restart()

    def due(self, step):
        """Is it time for an evaluation that the log does not have?"""
        wanted = step >= self.stop or every(step, self.args.eval_every * (self.epoch_steps or 1))
        return step > 0 and wanted and step not in self.evaluations

    def evaluate(self, step):
        """Log what measure(step) gives. Save after it: a kill between repeats it.

        An error in it (an unreadable image, Ctrl-C) saves state(step), and --resume evaluates it.
        """
        try:
            metrics, more = self.measure(step)
        except BaseException:
            self.save("last.pt", self.state(step))
            raise
        for name, value in metrics.items():
            if type(value) is float and not math.isfinite(value):
                self.refuse(step, f"{name} {value} in the evaluation")
        self.evaluations[step] = metrics
        self.row(step=step, eval=metrics, **more)
        numbers = [f"{name} {value:.2f}" for name, value in metrics.items() if type(value) is float]
        self.print("  ".join([f"step {step:6d}  training loss {self.loss:.4f} ", *numbers]))
        self.restart()

    def save(self, name, checkpoint):
        """Write out_dir/name, unless a weight is not finite."""
        if not all(w.isfinite().all() for w in checkpoint["model"].values()):
            self.refuse(checkpoint["step"], "a weight")
        if self.master:
            save_checkpoint(self.out_dir / name, checkpoint)
        self.saved = checkpoint["step"]

    def refuse(self, step, what):
        """ValueError for what is not finite; the files hold what was."""
        kept = f"{self.out_dir} holds step {self.saved}" if self.saved else "Nothing was saved yet"
        raise ValueError(f"not finite at step {step}: {what}. {kept}; try a smaller --lr or --set "
                         f"clip (now {self.args.clip:g}; 0: none)")


def every(step, n):
    """Is step a multiple of n? Never, if n is 0."""
    return n > 0 and step % n == 0


def wrap(model, device, world, compiled):
    """The model compiled and shared over processes, as the flags and torchrun ask."""
    net = torch.compile(model) if compiled else model
    if world > 1:
        net = DDP(net, device_ids=[device.index] if device.type == "cuda" else None)
    return net


def seed_of(seed, step, rank):
    """Seed of the dropout masks of a step on a process."""
    return hash((seed, step, rank)) % 2 ** 63


@torch.no_grad()
def key_statistics(model, forward, inputs):
    """Did the robust part act? mean_abs_key: per layer; nonzero_S: {RPC layer: share, each step}.

    forward(inputs) runs `model`; its SelfAttention modules count as layers 0, 1, ...
    """
    stats = dict(mean_abs_key=[], nonzero_S={})

    def look(m, inputs):
        """Before the forward of m, a SelfAttention: its row of the statistics."""
        _, k, _ = m.project(inputs[0])
        if m.attn in PAP:
            shares = [(step["S"] != 0).float().mean().item() for step in m.trace(inputs[0])]
            stats["nonzero_S"][len(stats["mean_abs_key"])] = [round(share, 4) for share in shares]
        stats["mean_abs_key"].append(round(k.abs().mean().item(), 4))

    layers = [m for m in model.modules() if isinstance(m, SelfAttention)]
    hooks = [m.register_forward_pre_hook(look) for m in layers]
    training = model.training
    model.eval()
    forward(inputs)
    model.train(training)
    for hook in hooks:
        hook.remove()
    return stats


def table(rows, header):
    """Lists of cells -> Markdown, columns aligned."""
    rows = [[str(cell).replace("|", r"\|") for cell in row] for row in [header, *rows]]  # as in |S|
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths)) + " |" for row in rows]
    rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def lr_at(step, total, warmup, lr, min_lr, warmup_lr=1e-6):
    """Linear from warmup_lr over `warmup` steps, then cosine to min_lr at `total`.

    The cosine's phase counts from 0, as in DeiT's schedule (timm's CosineLRScheduler without
    warm-up prefix), per step instead of per epoch.
    """
    if step < warmup:
        return warmup_lr + (lr - warmup_lr) * step / warmup
    return min_lr + (lr - min_lr) * (1 + math.cos(math.pi * min(step / max(total, 1), 1))) / 2


def param_groups(model, weight_decay, no_decay=("pos_embed", "cls_token")):
    """Two groups for the optimiser; 1-d tensors and those named in no_decay are not decayed."""
    decay, keep = [], []
    for name, p in model.named_parameters():
        if p.requires_grad:
            (keep if p.ndim < 2 or name.split(".")[-1] in no_decay else decay).append(p)
    return [dict(params=decay, weight_decay=weight_decay), dict(params=keep, weight_decay=0.0)]
