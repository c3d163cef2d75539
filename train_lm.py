"""Train a word-level language model with robust attention.

    python train_lm.py                                    # RPC on Python's own documentation
    python train_lm.py --attn symmetric                   # its baseline
    python train_lm.py --data_dir book.txt                # a text of your own
    python train_lm.py --data wikitext --data_dir data/wikitext-2
    torchrun --standalone --nproc_per_node=4 train_lm.py --data wikitext103 \\
        --data_dir data/wikitext-103                      # the paper's run
    python train_lm.py --resume out/pydoc_rpc             # go on exactly where it stopped
    python train_lm.py --sample out/pydoc_rpc --prompt "The function returns"
    python eval_robust.py --ckpt out/pydoc_rpc            # sliding and attacked perplexity

Paper: Teo & Nguyen 2024, section 4.2, Table 3, App. A.4; recipe: `IDSIA/lmtool-fwp`, small standard
transformer. Where this differs from that code: batches are random windows (there: consecutive
streams, always in the same order), the first update has the lowest learning rate (there: the full
one), unknown words are <unk> (there: an error), bf16 on a GPU. The checkpoint with the best valid
perplexity, best.pt, is the one to report.
Stopping and resuming changes no number: what is random depends on (seed, step, place in the batch)
alone. Nor do more processes, but for float noise and the masks of dropout, which depend on the
process, too. To the last bit that holds on a CPU; on a GPU the backward of fused attention adds in
no fixed order.
"""

import argparse
import math
import os
import re
import textwrap
import time
from dataclasses import asdict
from pathlib import Path

import common  # before torch
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from tqdm import tqdm

from attention import ATTENTIONS, FORMS, LAYER_PATTERNS, key_statistics
from common import COUNT, NATURAL, REAL, SHARE, InputError
from data.text import (EOS, SPLITS, describe, load_corpus, perplexity, random_windows, sliding_nll,
                       stored_vocabulary, text_folder)
from lm import LM, SIZES, LMConfig, lm_from_checkpoint, reads_the_future

# What --data selects; flags win.
RECIPES = {
    # 2 minutes on 2 CPU cores
    "pydoc": dict(model="mini", steps=1000, batch_size=16, lr=2e-3, warmup=100, eval_every=200),
    # a small WikiText: 6 minutes on a CPU core; Symlm: test perplexity 217.0 ± 5.3
    "wikitext": dict(model="mini", steps=2000, batch_size=16, lr=2e-3, warmup=100, eval_every=250),
    # the paper's; not run here. Symlm there: valid 38.37, test 36.36 (probably exchanged)
    "wikitext103": dict(model="paper", rpc_layers="0-3", cutoffs="20000,40000,200000",
                        steps=500_000, batch_size=96, lr=2.5e-4, warmup=2000, eval_every=4000),
}
RECIPES["folder"] = RECIPES["wikitext"]         # --data_dir alone: a text of one's own


def get_args():
    """Read the flags: a recipe's are the defaults, then those of a run to resume. Flags win.

    Returns them and the checkpoint of --resume, {} without one.
    """
    p = argparse.ArgumentParser(description=__doc__, formatter_class=common.Help, add_help=False,
                                usage="%(prog)s [--flag value ...]", allow_abbrev=False)
    boolean = argparse.BooleanOptionalAction
    flag = p.add_argument_group("data").add_argument
    flag("--data", choices=RECIPES, help="the recipe; without it topics and docstrings of this "
         "Python (pydoc) or, with --data_dir, a text of your own (folder)")
    flag("--data_dir", help="wiki.train.tokens, wiki.valid.tokens, wiki.test.tokens, or one text")

    flag = p.add_argument_group("model").add_argument
    flag("--model", choices=SIZES, help="width, depth, heads, feed-forward and context")
    flag("--context", type=COUNT, help="tokens in a window; None: the model's")
    kinds = dict.fromkeys([*ATTENTIONS, *LAYER_PATTERNS])
    flag("--attn", choices=[name for name in kinds if name != "scaled_s"], default="rpc",
         help="rpc: symmetric, with RPC-Attention in --rpc_layers")
    flag("--rpc_layers", default="0", help="from 0: 0 (the paper's layer1), all, 0,1,2 or 0-3")
    flag("--n_iter", type=COUNT, default=4, help="PAP steps; the paper: 4-6 in layer 0, 2 in all")
    flag("--lambd", type=common.number(float, 0, math.inf), default=4.0,
         help="PAP lambda; the paper: 4 in layer 0, 3 in all; inf: never shrink")
    flag("--form", choices=FORMS, default="released", help="reading of Algorithm 1: attention.py")
    flag("--mu_over", choices=["seen", "token", "all"], default="seen", help="mean|k| over "
         "tokens <= t, t alone, or the window as printed: that lets the future leak, to compare")
    flag("--cutoffs", default="none", help="adaptive softmax: where its clusters start, "
         "20000,40000,200000; none: full")
    flag("--dropout", type=SHARE, default=0.1, help="rate")

    flag = p.add_argument_group("training").add_argument
    flag("--steps", type=COUNT, help="updates; the cosine ends there")
    flag("--batch_size", type=COUNT, help="windows per update, over all processes")
    flag("--lr", type=REAL, help="peak learning rate (Adam, no weight decay)")
    flag("--warmup", type=NATURAL, help="updates of linear warm-up; the cosine counts from 0")
    flag("--clip", type=REAL, default=0.25, help="largest gradient norm; 0: any")

    flag = p.add_argument_group("sampling").add_argument
    flag("--sample", metavar="CKPT", help="no training: print words that this checkpoint, or a "
         "run's best.pt, goes on with after --prompt")
    flag("--words", type=NATURAL, default=40, help="of a sample, at evaluations too; 0: none")
    flag("--prompt", default="", help="what it goes on from: words between spaces, as in the text")

    flag = p.add_argument_group("running").add_argument
    flag("--seed", type=common.number(int, 0, 2 ** 31 - 1), default=0, help="of weights, windows "
         "and noise")
    flag("--device", type=common.device, help="cuda, mps or cpu; None: the best there is")
    flag("--amp", action=boolean, help="bf16 autocast; None: on GPUs that have it")
    flag("--compile", action=boolean, default=False, help="torch.compile the model, to train")
    flag("--log_every", type=COUNT, default=20, help="steps between rows of log.jsonl")
    flag("--eval_every", type=COUNT, help="steps between evaluations; a checkpoint follows each")
    flag("--keep_best", action=boolean, default=True, help="also keep best.pt, of the evaluation "
         "with the lowest perplexity")
    flag("--max_steps", type=COUNT, help="stop early; the schedule stays that of --steps")
    flag("--out_dir", help="None: out/<data>_<attn>; of a text of your own out/text_<attn>")
    flag("--resume", help="folder of a run to continue; its flags are the defaults")

    # A setting is the command line's, else that of the run to resume, of the recipe, or the flag's
    # default.
    asked, checkpoint, stored = p.parse_known_args()[0], {}, {}
    if asked.resume:
        checkpoint = common.load(Path(asked.resume, "last.pt"))
        if checkpoint.get("task") != "language modelling":
            raise InputError(f"--resume {asked.resume}: its task is {checkpoint.get('task')}, not "
                             f"language modelling")
        # What is of one command or machine is not remembered.
        stored = {name: value for name, value in checkpoint["args"].items()
                  if name not in ("device", "max_steps", "out_dir", "resume")}
    data = asked.data or stored.get("data") or ("folder" if asked.data_dir else "pydoc")
    p.set_defaults(**{"data": data, **RECIPES[data], **stored})
    p.add_argument("-h", "--help", action="help", help="print this, with the recipe's defaults")
    args = p.parse_args()
    changed = {name: getattr(args, name) for name in stored if getattr(args, name) != stored[name]}
    if changed:
        common.print0(f"other flags: {changed}")

    if args.out_dir and args.resume:
        raise InputError("--out_dir does not go with --resume, which continues in its own folder")
    args.out_dir = args.resume or args.out_dir or (
        f"out/{'text' if data == 'folder' else data}_{args.attn}")
    if Path(args.out_dir, "last.pt").exists() and not args.resume and not args.sample:
        raise InputError(f"{args.out_dir} holds a run: go on with it by --resume {args.out_dir}, "
                         f"or choose another --out_dir")
    args.context = args.context or SIZES[args.model]["context"]
    return args, checkpoint


# --- batches --------------------------------------------------------------------------------------

def load_text(args):
    """Read the `Corpus` that the flags name; each of its texts is longer than a window."""
    folder = text_folder(args.data, args.data_dir)
    corpus = load_corpus(folder)
    for split in SPLITS:
        count = len(getattr(corpus, split))
        if count <= args.context:
            raise InputError(f"--context {args.context}: the {split} text in "
                             f"{args.data_dir or folder} has only {count} tokens, expected more "
                             f"than a window")
    common.print0(f"{folder}: {describe(corpus)}")
    return corpus


def train_batches(tokens, args, start, stop, device, rank, world):
    """Yield this rank's windows (b, context + 1) int64 of each step, on the device."""
    b = args.batch_size // world
    for step in range(start, stop):
        windows = random_windows(tokens, step, args.batch_size, args.context, args.seed,
                                 slice(rank * b, (rank + 1) * b))
        if device.type == "cuda":
            windows = windows.pin_memory()
        yield windows.to(device, non_blocking=True)


# --- evaluation and samples -----------------------------------------------------------------------

def evaluate(model, corpus, args, rank, world):
    """Measure the segment-wise valid perplexity: exp of the mean of all tokens' nats."""
    nats = sliding_nll(model, corpus.valid, args.context, args.context, rank=rank, world=world,
                       progress="evaluating")
    return dict(perplexity=perplexity(nats))


def prompt_ids(prompt, vocab):
    """Look up <eos> and the ids of the prompt's words, (1, n) int64."""
    words = [EOS, *prompt.replace("\n", f" {EOS} ").split()]
    unknown = [word for word in words if word not in vocab]
    if unknown:
        raise InputError(f"--prompt: {', '.join(unknown)} not in the vocabulary of {len(vocab)} "
                         f"words; known ones, separated by spaces, and <unk> can be used")
    return torch.tensor([[vocab[word] for word in words]])


def sample(model, vocab, args, device):
    """Write --prompt and --words words more; the same weights and seed give the same text."""
    generator = torch.Generator(device).manual_seed(args.seed)
    prompt = prompt_ids(args.prompt, vocab).to(device)
    ids = model.eval().generate(prompt, args.words, generator=generator)[0, 1:]
    model.train()

    # tokens to prose: "in @-@ word" is in-word, "1 @,@ 000" is 1,000
    text = " ".join(vocab.words[i] for i in ids.tolist()).replace(EOS, "\n")
    text = re.sub(r" @(\S)@ ", r"\1", text)
    text = re.sub(r" ([.,;:!?)\]])", r"\1", text)
    return re.sub(r" *\n[ \n]*", "\n", text).strip()


def print_sample(args, device):
    """Print what --sample asks for."""
    checkpoint = common.load(args.sample)
    with common.error_prefix(f"--sample {args.sample}"):
        model = lm_from_checkpoint(checkpoint).to(device)
        print(sample(model, stored_vocabulary(checkpoint), args, device))


# --- the run --------------------------------------------------------------------------------------

def learning_rate(step, args):
    """Rise linearly, then fall along half a cosine to 0, whose phase counts from step 0."""
    if step < args.warmup:
        lowest = args.lr / (args.warmup + 1)
        return lowest + (args.lr - lowest) * step / args.warmup
    return args.lr * (1 + math.cos(math.pi * (step / args.steps))) / 2


def main():
    args, checkpoint = get_args()

    # Processes. torchrun starts one a GPU (or some on a CPU) and says so in the environment; each
    # takes its share of every batch. Rank 0 alone prints and writes.
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else
                                          "mps" if torch.backends.mps.is_available() else "cpu"))
    if args.sample:
        return print_sample(args, device)
    if "RANK" in os.environ:
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    amp = has_bf16 if args.amp is None else args.amp
    torch.set_float32_matmul_precision("high" if amp else "highest")
    torch.backends.cudnn.allow_tf32 = amp                           # convolutions likewise
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=amp)

    # Data. A word of --prompt that it does not know is an error now, not at the first evaluation.
    corpus = load_text(args)
    vocab = corpus.vocab
    prompt_ids(args.prompt, vocab)
    if args.batch_size % world:
        raise InputError(f"--batch_size {args.batch_size}: expected a multiple of {world}, the "
                         f"number of processes")

    # Model. The flags describe it; a checkpoint's has to be the same.
    size = {**SIZES[args.model], "context": args.context}
    try:
        cutoffs = () if args.cutoffs == "none" else tuple(map(int, args.cutoffs.split(",")))
    except ValueError:
        raise InputError(f"--cutoffs {args.cutoffs}: expected none or ids such as "
                         f"20000,40000,200000") from None
    config = LMConfig(len(vocab), **size, attn=args.attn, dropout=args.dropout, cutoffs=cutoffs,
                      rpc_layers=common.parse_layers(args.rpc_layers, size["depth"]),
                      pap=dict(n_iter=args.n_iter, lambd=args.lambd, form=args.form,
                               mu_over=args.mu_over))
    torch.manual_seed(args.seed)
    model = LM(config).to(device)
    if not config.reads_the_future and reads_the_future(model):
        raise InputError(f"--attn {args.attn}: what it computes for a word depends on later words; "
                         f"where causal is true it has to mask them")
    # To freeze a part, say so here, `model.embed.requires_grad_(False)`: --resume passes by.

    # Optimiser.
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=args.lr,
                                 fused=device.type == "cuda")

    # Resume: weights and optimiser; random numbers need no state. Data and model have to be the
    # run's.
    about = dict(vocab="\n".join(vocab.words), train_tokens=len(corpus.train))
    if checkpoint:
        was = {**checkpoint, **checkpoint["model_config"]}
        for name, now in {**about, **asdict(config)}.items():
            if was.get(name) != now:
                raise InputError(f"--resume cannot change {name}: it was {was.get(name)!r:.60} and "
                                 f"is {now!r:.60}")
        model.load_state_dict(checkpoint["model"])
        common.load_optimizer(optimizer, checkpoint["optimizer"])
    first = checkpoint.get("step", 0)
    metrics, best = checkpoint.get("metrics", {}), checkpoint.get("best", {})

    # Compile; share gradients over processes. net is for training; model, of the same weights, is
    # evaluated and saved.
    if args.compile and model.adaptive:                             # its shapes depend on targets
        model.adaptive.nll = torch.compiler.disable(model.adaptive.nll)
    compiled = torch.compile(model) if args.compile else model
    net = compiled if world == 1 else DDP(compiled, broadcast_buffers=False,    # the same on all
                                          gradient_as_bucket_view=True)

    # The log, a JSON object a line; its first row says what was trained, by what, on what.
    out_dir = Path(args.out_dir)
    if rank == 0:
        log = common.Log(out_dir, first)
        parameters = sum(p.numel() for p in model.parameters())
        log.append(dict(step=first, args=vars(args), **common.code_version(), world=world,
                        device=common.describe(device), parameters=parameters,
                        train_tokens=len(corpus.train), vocab_size=len(vocab)))
        common.print0(f"{parameters:,} parameters | {world} x {common.describe(device)} | {out_dir}"
                      + f" | resumed at step {first}" * bool(first))

    # The loop. --max_steps stops early, on the schedule of --steps.
    stop = max(first, min(args.steps, args.max_steps or args.steps))
    batches = train_batches(corpus.train, args, first, stop, device, rank, world)
    bar = tqdm(range(first, stop), "training", stop, initial=first, unit="step",
               disable=rank > 0 or None, dynamic_ncols=True)        # None: if not in a terminal
    began = clock = time.time()
    pending = []
    for step in bar:
        lr = learning_rate(step, args)
        for group in optimizer.param_groups:
            group["lr"] = lr

        # A batch.
        windows = next(batches)

        # Forward and backward. Dropout draws from a seed of this step and process, so a resumed
        # run draws the same. (hash of numbers is the same in every Python.)
        torch.manual_seed(hash((args.seed, step, rank)) % 2 ** 63)
        with autocast:
            loss = net(windows[:, :-1], windows[:, 1:]).mean()
        loss.backward()

        # Clip the gradient and take the step.
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()
                                              if p.grad is not None])
        if args.clip:
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), args.clip, norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        pending.append(torch.stack([loss.detach(), norm]))          # stays on the device

        # What is due? By the step alone, so that all processes agree: an evaluation every few
        # steps and at the end; a checkpoint then; a row of the log then and every --log_every
        # steps.
        done = step + 1
        evaluating = done == stop or done % args.eval_every == 0
        saving = evaluating
        logging = saving or done % args.log_every == 0

        # Log the means, over processes and steps since the last row; what is not finite ends the
        # run here. Reading them waits for the device.
        if logging:
            recent = torch.stack(pending) / world                   # (steps, 2)
            if world > 1:
                dist.all_reduce(recent)
            loss, norm = common.finite_means(recent.cpu(), done)
            rate = args.batch_size * args.context * len(pending) / (time.time() - clock)
            if rank == 0:
                log.append(dict(step=done, loss=loss, grad_norm=norm, tokens_per_s=rate, lr=lr))
            bar.set_postfix_str(f"loss {loss:.3f} {rate:.0f} tokens/s")
            if bar.disable:
                common.print0(f"step {done:6d}  loss {loss:.4f}  {rate:.0f} tokens/s")

        # Evaluate, and write a sample. Did the robust part act?
        metrics = {}
        if evaluating:
            with autocast:
                metrics = evaluate(model, corpus, args, rank, world)
            if rank == 0:
                text = ""
                if args.words and not config.reads_the_future and metrics["perplexity"] < math.inf:
                    text = sample(model, vocab, args, device)
                log.append(dict(step=done, eval=metrics, sample=text,
                                **key_statistics(model, model.hidden, windows[:8, :-1])))
                if text:
                    common.print0(textwrap.shorten(text, 100))
            numbers = "  ".join(f"{name} {value:.2f}" for name, value in metrics.items()
                                if isinstance(value, float))
            common.print0(f"step {done:6d}  training loss {loss:.4f}   {numbers}")

        # Save, each file whole or not at all. A run killed before that repeats the evaluation.
        if saving and rank == 0:
            better = args.keep_best and metrics["perplexity"] < best.get("perplexity", math.inf)
            if better:
                best = dict(step=done, **metrics)
            state = dict(task="language modelling", args=vars(args), step=done, metrics=metrics,
                         best=best, model=model.state_dict(), optimizer=optimizer.state_dict(),
                         model_config=asdict(config), **about)
            if better:
                common.save(out_dir / "best.pt", state)
            common.save(out_dir / "last.pt", state)
        if logging:
            clock, pending = time.time(), []    # speed leaves out what evaluating and saving took

    # The result, where the last step was evaluated.
    if metrics:
        common.print0(f"{args.data} {args.attn}: valid perplexity {metrics['perplexity']:.2f} "
                      f"(segment-wise) after {stop} steps, {(time.time() - began) / 60:.1f} "
                      f"minutes")
        if best:
            common.print0(f"best.pt: the lowest perplexity, {best['perplexity']:.2f}, was after "
                          f"{best['step']} steps")
        common.print0(f"next: python eval_robust.py --ckpt {out_dir}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    common.run(main)
