"""Train a word-level language model with robust attention, then score it clean and with swapped words.

    python train_lm.py                                             # RPC on Python's own documentation: minutes on a CPU
    python train_lm.py --attn symmetric                            # its baseline
    python train_lm.py --data wikitext --data_dir data/wikitext-2  # any folder with wiki.{train,valid,test}.tokens
    torchrun --standalone --nproc_per_node=4 train_lm.py --data wikitext103 --data_dir data/wikitext-103  # the paper's
    python train_lm.py --resume out/pydoc_rpc                      # go on exactly where it stopped
    python train_lm.py --eval_only out/pydoc_rpc --stride 1        # score it again, with the paper's stride
    python train_lm.py --sample out/pydoc_rpc --prompt "The function returns"    # seconds: words, and no evaluation

Paper: Teo & Nguyen 2024, section 4.2, Table 3, App. A.4; recipe: `IDSIA/lmtool-fwp`, small standard transformer. Where
this differs from that code: batches are random windows (there: consecutive streams, always in the same order), the
first update has the lowest learning rate (there: the full one), unknown words are <unk> (there: an error), bf16 on a
GPU. Final perplexities are float32. The checkpoint with the best validation perplexity, best.pt, is the one reported.
Every random number depends on (seed, step, process) alone, so stopping and resuming changes nothing; nor does the
number of processes but for float noise, with --dropout 0: dropout masks are drawn per process.
"""

import argparse
import json
import math
import re
import textwrap
import time
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from tqdm import tqdm

import common
import data_lm
from attacks import word_swap
from attention import FORMS, key_statistics
from data_lm import EOS, Vocabulary, perplexity, sliding_nll
from lm import LM, SIZES, LMConfig, lm_from_checkpoint
from vit import load_strictly, stored_config

# What --data selects; flags given on the command line win.
RECIPES = {
    "pydoc": dict(model="mini", rpc_layers="0", cutoffs="none", dropout=0.1, steps=1000, batch_size=16, lr=2e-3,
                  warmup=100, clip=0.25, eval_every=200, stride=16),
    "wikitext": dict(model="mini", rpc_layers="0", cutoffs="none", dropout=0.1, steps=2000, batch_size=16, lr=2e-3,
                     warmup=100, clip=0.25, eval_every=250, stride=16),
    "wikitext103": dict(model="paper", rpc_layers="0-3", cutoffs="20000,40000,200000", dropout=0.1, steps=500_000,
                        batch_size=96, lr=2.5e-4, warmup=2000, clip=0.25, eval_every=4000, stride=1),
}
# What --resume and --eval_only refuse to change: it would be another run, another model.
MODEL = ("model", "context", "attn", "rpc_layers", "n_iter", "lambd", "form", "mu", "norm", "dropout", "cutoffs")
FIXED = ("data", *MODEL, "steps", "batch_size", "seed")
OWN = ("resume", "sample", "out_dir", "max_steps", "device")                   # what a run does not hand on


def get_args():
    """The flags; the command line wins over the run that is resumed or evaluated, and that over the recipe."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                allow_abbrev=False, epilog="defaults that --data selects:\n" + "\n".join(
                                    f"  {name}: {' '.join(f'--{k} {v}' for k, v in recipe.items())}"
                                    for name, recipe in RECIPES.items()))
    flag, boolean = p.add_argument, argparse.BooleanOptionalAction
    count, natural = common.number(int, 1), common.number(int, 0)
    real, share = common.number(float, 0), common.number(float, 0, 0.999999)
    seed = common.number(int, 0, 2 ** 31 - 1)
    flag("--data", choices=RECIPES, default="pydoc", help="the recipe; pydoc: help topics and docstrings of this "
         "Python, nothing to download; wikitext: a small text; wikitext103: the paper's")
    flag("--data_dir", default=None, help="folder with wiki.train.tokens, wiki.valid.tokens, wiki.test.tokens")
    flag("--cache_dir", default=None, help="where the token ids go; default <data_dir>/cache, or out/cache/... if "
         "that is not writable")

    flag("--model", choices=SIZES, help="width, depth, heads, feed-forward and context")
    flag("--context", type=count, default=None, help="tokens in a window; default: the model's")
    flag("--attn", default="rpc", choices=["softmax", "symmetric", "rpc"],
         help="rpc: symmetric attention with RPC-Attention in --rpc_layers")
    flag("--rpc_layers", type=str, help="layers with RPC-Attention, from 0: 0-3 (the paper's layer1-4), all, 0, 0,1")
    flag("--n_iter", type=count, default=4, help="PAP steps")
    flag("--lambd", type=common.number(float, 0, math.inf), default=4.0, help="PAP lambda; inf: never shrink")
    flag("--form", choices=FORMS, default="released", help="which reading of Algorithm 1, see attention.py")
    flag("--mu", choices=["running", "token", "global"], default="running", help="mean|k| over tokens <= t, over t "
         "alone, or over the window as printed: that lets the future leak, for comparison only")
    flag("--norm", choices=["post", "pre"], default="post", help="layer norm after (the paper) or before each sublayer")
    flag("--dropout", type=share)
    flag("--cutoffs", type=str, help="adaptive softmax: ids at which its clusters start, such as 20000,40000,200000; "
         "none: full softmax, right below some 20,000 words")

    flag("--steps", type=count, help="updates; the cosine ends there")
    flag("--batch_size", type=count, help="windows per update, global: over all processes and accumulation steps")
    flag("--accum", type=count, default=1, help="gradient accumulation: micro-batches per step and process")
    flag("--lr", type=real, help="peak learning rate (Adam, no weight decay)")
    flag("--warmup", type=natural, help="updates of linear warm-up; the cosine counts from update 0")
    flag("--clip", type=real, help="clip the gradient norm; 0: do not")

    flag("--window", type=count, default=None, help="evaluation: tokens of context at most; default: --context")
    flag("--stride", type=count, help="evaluation: targets scored per window, the last ones; 1 is the paper's and the "
         "slowest, --window is segment-wise")
    flag("--eval_batch_size", type=count, default=64, help="windows at a time in evaluation; changes the speed only")
    flag("--attack_seed", type=seed, default=0, help="which words the word-swap attack swaps")
    flag("--sample", default=None, metavar="CKPT", help="no training, no evaluation: print words that this checkpoint, "
         "or a run's best.pt, goes on with after --prompt")
    flag("--words", type=natural, default=40, help="length of a sample, with --sample and at each evaluation; 0: none")
    flag("--prompt", default="", help="what a sample goes on from: words between spaces, as in the text")
    flag("--temperature", type=common.number(float, 1e-3), default=1.0, help="of the sample; below 1: likelier words")
    flag("--top_k", type=count, default=None, help="sample from the K likeliest words only")

    flag("--seed", type=seed, default=0)
    flag("--device", default=None, help="cuda, mps or cpu; picked automatically")
    flag("--amp", action=boolean, default=None, help="bf16 autocast in training; default: on GPUs")
    flag("--compile", action=boolean, default=False, help="torch.compile the model")
    flag("--out_dir", default=None, help="checkpoints, log.jsonl, results.json; default out/<data>_<attn>, numbered if "
         "it exists")
    flag("--resume", default=None, help="folder of a run to continue; its flags are remembered")
    flag("--eval_only", default=None, help="checkpoint, or folder of a run (then its best.pt), to score on --data_dir "
         "without training")
    flag("--max_steps", type=count, default=None, help="stop early (the schedule stays that of --steps)")
    flag("--log_every", type=count, default=20, help="steps between lines of log.jsonl")
    flag("--eval_every", type=count, help="steps between evaluations; each ends in a checkpoint")
    flag("--save_every", type=natural, default=0, help="steps between checkpoints besides those")

    default = vars(p.parse_args([]))
    given = p.parse_args(namespace=argparse.Namespace(**dict.fromkeys(default)))
    given = {k: v for k, v in vars(given).items() if v is not None}
    modes = [name for name in ("resume", "eval_only", "sample") if name in given]
    if len(modes) > 1:
        raise ValueError("--resume goes on training, --eval_only scores, --sample prints words: give one of them")
    stored = stored_args(given, modes[0]) if modes else {}
    recipe = RECIPES[given.get("data", stored.get("data", default["data"]))]
    args = argparse.Namespace(**{**default, **recipe, **stored, **given})
    args.context = args.context or SIZES[args.model]["context"]
    args.window = args.window or args.context
    if not args.stride <= args.window <= args.context:
        raise ValueError(f"--stride {args.stride}, --window {args.window}: expected stride <= window <= context, which "
                         f"is {args.context}")
    return args


def stored_args(given, what):
    """The flags of the run that --resume, --eval_only or --sample names; refuses flags that would make it another one."""
    fixed = FIXED if what == "resume" else MODEL
    checkpoint = read(given[what], best=what != "resume")
    if what == "resume" and "out_dir" in given:
        raise ValueError("--out_dir does not go with --resume, which continues in its own folder")
    if what == "resume" and not checkpoint.get("optimizer"):
        raise ValueError(f"--resume {given[what]}: best.pt holds no optimiser state; continue from last.pt")
    stored = {k: v for k, v in checkpoint["args"].items() if k not in OWN}
    for k in fixed:
        if k in given and given[k] != stored[k]:
            raise ValueError(f"--{k} {given[k]} does not fit --{what} {given[what]}, which was trained with --{k} "
                             f"{stored[k]}")
    if given.get("data", stored["data"]) != stored["data"]:
        del stored["data_dir"], stored["cache_dir"]                       # another text: these were the old one's
    return stored


def read(path, best=False):
    """A checkpoint of this script. path: a file, or a run's folder: its best.pt or last.pt."""
    path = Path(path, "best.pt") if best and Path(path, "best.pt").exists() else path
    checkpoint = common.read_checkpoint(path)
    parts = ("args", "model", "model_config", "vocab", "step", "best")
    common.check_run(checkpoint, path, "train_lm.py", *parts)
    return checkpoint


def read_with_vocabulary(path, args):
    """A checkpoint to score or to sample, best.pt of a folder, and its vocabulary, which holds --prompt's words."""
    checkpoint = read(path, best=True)
    with common.naming(path):
        size = stored_config(checkpoint, LMConfig).vocab_size
    vocab = Vocabulary(checkpoint["vocab"].split("\n"))
    if len(vocab) != size:
        raise ValueError(f"{path}: its vocabulary has {len(vocab)} words, its model {size}")
    prompt_ids(args, vocab)
    return checkpoint, vocab


# --- set-up ----------------------------------------------------------------------------------------------------------

def build_config(args, vocab_size):
    """LMConfig from the flags."""
    size = {**SIZES[args.model], "context": args.context}
    try:
        cutoffs = () if args.cutoffs == "none" else tuple(int(c) for c in args.cutoffs.split(","))
    except ValueError:
        raise ValueError(f"--cutoffs {args.cutoffs}: expected none or ids such as 20000,40000,200000") from None
    return LMConfig(vocab_size, **size, attn=args.attn, rpc_layers=common.parse_layers(args.rpc_layers, size["depth"]),
                    n_iter=args.n_iter, lambd=args.lambd, form=args.form, mu=args.mu, norm=args.norm,
                    dropout=args.dropout, cutoffs=cutoffs)


def text_folder(args, rank):
    """The folder of token files: --data_dir, or where pydoc's text was written."""
    if args.data_dir:
        return Path(args.data_dir)
    if args.data != "pydoc":
        raise ValueError(f"--data {args.data} needs --data_dir")
    return data_lm.pydoc_folder(args.cache_dir or "out/cache", build=rank == 0)


class Text(NamedTuple):
    """A split to score."""
    split: str
    clean: np.ndarray                # (n,) uint32
    attacked: np.ndarray             # (n,) the same after the word-swap attack
    kept: torch.Tensor               # (n - 1,) bool: targets that the attack left alone


def load_texts(data_dir, vocab, args):
    """The valid and test `Text` of a folder, encoded with this vocabulary, and the word that the attack swaps in."""
    word, texts = "AAA" if "AAA" in vocab else vocab.words[-1], []             # the paper's word, else the rarest one
    for split in ("valid", "test"):
        lines = data_lm.read_lines(data_lm.token_file(data_dir, split))
        attacked, swapped = word_swap(lines, seed=args.attack_seed, word=word)
        texts.append(Text(split, vocab.encode_lines(lines), vocab.encode_lines(attacked), ~torch.tensor(swapped[1:])))
        if len(texts[-1].clean) <= args.window:
            raise ValueError(f"--window {args.window} (default: --context): wiki.{split}.tokens in {data_dir} has only "
                             f"{len(texts[-1].clean)} tokens, expected more than a window")
    return texts, word


def micro_batches(tokens, args, start, stop, rank, world, device):
    """Windows (b, context + 1) int64 on the device: every micro-batch of this process, from step `start` to `stop`."""
    b, rest = divmod(args.batch_size, world * args.accum)
    if rest:
        raise ValueError(f"--batch_size {args.batch_size} is not divisible by {world} processes x --accum {args.accum}")
    for step in range(start, stop):
        for micro in range(rank * args.accum, (rank + 1) * args.accum):
            windows = data_lm.random_windows(tokens, step, args.batch_size, args.context, args.seed,
                                             slice(micro * b, (micro + 1) * b))
            windows = windows.pin_memory() if device.type == "cuda" else windows
            yield windows.to(device, non_blocking=True)


# --- evaluation ------------------------------------------------------------------------------------------------------

def prompt_ids(args, vocab):
    """<eos> and the ids of --prompt's words, (1, n) int64."""
    words = [EOS, *data_lm.split_words(args.prompt)]
    unknown = [word for word in words if word not in vocab]
    if unknown:
        raise ValueError(f"--prompt: {', '.join(unknown)} not in the vocabulary of {len(vocab)} words; known ones, "
                         f"separated by spaces, and <unk> can be used")
    return torch.tensor([[vocab[word] for word in words]])


def sample(model, vocab, args, device):
    """--prompt and --words words that the model goes on with, as text; the same weights give the same text."""
    if not args.words or model.config.mu == "global" and model.config.rpc_layers:       # no sampling with a leaking mu
        return ""
    generator = torch.Generator(device).manual_seed(args.seed)
    prompt = prompt_ids(args, vocab).to(device)
    ids = model.eval().generate(prompt, args.words, args.temperature, args.top_k, generator)[0, 1:]
    text = " ".join(vocab.words[i] for i in ids.tolist()).replace(EOS, "\n")
    text = re.sub(r" @(\S)@ ", r"\1", text)                                             # in @-@ word, 1 @,@ 000
    return re.sub(r" *\n[ \n]*", "\n", re.sub(r" ([.,;:!?)\]])", r"\1", text)).strip()


def score(model, texts, args, rank=0, world=1):
    """Perplexities of each split: segment-wise, sliding, and sliding after the word-swap attack. Returns [dict].

    attacked counts all targets, the swapped-in words too, which no model can foresee; attacked_unswapped the others,
    clean_unswapped the same targets in the clean text: the difference is what the attack does to the model.
    """
    rows = []
    for text in texts:
        def nats(tokens, stride, what):
            return sliding_nll(model, tokens, args.window, stride, args.eval_batch_size, rank, world,
                               f"{text.split} {what}")
        clean, attacked = nats(text.clean, args.stride, "sliding"), nats(text.attacked, args.stride, "attacked")
        segments = clean if args.stride == args.window else nats(text.clean, args.window, "segment-wise")
        rows.append(dict(split=text.split, tokens=len(text.clean), swapped=int((~text.kept).sum()),
                         segment=perplexity(segments), sliding=perplexity(clean), attacked=perplexity(attacked),
                         attacked_unswapped=perplexity(attacked, text.kept),
                         clean_unswapped=perplexity(clean, text.kept)))
        if not all(math.isfinite(value) for value in rows[-1].values() if not isinstance(value, str)):
            raise ValueError(f"a perplexity of {text.split} is not finite: {rows[-1]}")
    return rows


COLUMNS = dict(split="split", tokens="tokens", segment="segment-wise", sliding="sliding", attacked="attacked",
               attacked_unswapped="attacked, unswapped", clean_unswapped="clean, those", swapped="words swapped")


def show(rows, args, name, word):
    """The table of `score` for the screen, and as one Markdown row in the order of the paper's Table 3."""
    table = [list(COLUMNS.values())]
    for row in rows:
        table.append([f"{row[k]:.2f}" if isinstance(row[k], float) else str(row[k]) for k in COLUMNS])
    widths = [max(map(len, column)) for column in zip(*table)]
    numbers = [f"{row[k]:.2f}" for k in ("sliding", "attacked", "attacked_unswapped") for row in rows]
    return "\n".join([
        f"perplexity, window {args.window}; sliding and attacked with stride {args.stride}; the attack puts {word} for "
        f"words, seed {args.attack_seed}; unswapped, those: only targets that it left alone",
        *("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in table),
        "| model, stride | valid | test | attacked valid | attacked test | unswapped valid | unswapped test |",
        f"| {name}, {args.stride} | {' | '.join(numbers)} |"])


def finish(path, args, device, rank, world, texts, word, vocab, folder, started):
    """Score the checkpoint at `path` in float32, print sample and table, write results.json into `folder`."""
    torch.set_float32_matmul_precision("highest")
    checkpoint, began = read(path, best=True), time.time()
    with common.naming(path):
        model = lm_from_checkpoint(checkpoint).to(device)
    rows = score(model, texts, args, rank, world)
    if rank:
        return
    c, theirs = model.config, checkpoint["args"]
    kind = f"{c.attn} {c.n_iter}iter/{theirs['rpc_layers']}" if c.attn == "rpc" else c.attn
    text = sample(model, vocab, args, device)
    print(f"sample:\n{text}", show(rows, args, f"{theirs['data']} {args.model} {kind}", word), sep="\n")
    names = [folder / f"results{f'_{i}' if i > 1 else ''}.json" for i in range(1, 10000)]
    out = next(name for name in names if not name.exists()) if args.eval_only else names[0]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(dict(
        checkpoint=str(path), step=checkpoint["step"], args=vars(args), model_config=asdict(c), word=word, rows=rows,
        sample=text, seconds=time.time() - began, device=common.describe(device), world=world,
        torch=torch.__version__), indent=1) + "\n")
    valid, test = rows
    print(f"{theirs['data']} {kind}: valid perplexity {valid['sliding']:.2f}, test {test['sliding']:.2f}, attacked "
          f"{valid['attacked']:.2f} and {test['attacked']:.2f} (stride {args.stride}); weights of step "
          f"{checkpoint['step']}, {(time.time() - started) / 60:.1f} minutes; {out}")


# --- the run ---------------------------------------------------------------------------------------------------------

def main():
    started = time.time()
    args = get_args()
    device, rank, world = common.setup(args.device)
    master = rank == 0
    args.amp = device.type == "cuda" if args.amp is None else args.amp
    if args.amp:
        torch.set_float32_matmul_precision("high")
    if args.sample:
        checkpoint, vocab = read_with_vocabulary(args.sample, args)
        with common.naming(f"--sample {args.sample}"):
            model = lm_from_checkpoint(checkpoint).to(device)
        if model.config.mu == "global" and model.config.rpc_layers:
            raise ValueError(f"--sample {args.sample}: trained with --mu global, which reads the words to come")
        return print(sample(model, vocab, args, device)) if master else None
    folder = text_folder(args, rank)
    common.broadcast([None])                                                     # the others wait for rank 0

    if args.eval_only:
        checkpoint, vocab = read_with_vocabulary(args.eval_only, args)
        path = Path(args.eval_only)
        texts, word = load_texts(folder, vocab, args)
        out_dir = Path(args.out_dir) if args.out_dir else path if path.is_dir() else path.parent
        return finish(path, args, device, rank, world, texts, word, vocab, out_dir, started)

    out_dir = common.choose_out_dir(args, f"{args.data}_{args.attn}")
    if master:
        corpus = data_lm.load_corpus(folder, args.cache_dir)
    common.broadcast([None])
    corpus = corpus if master else data_lm.load_corpus(folder, args.cache_dir, build=False)
    vocab, stop = corpus.vocab, min(args.steps, args.max_steps or args.steps)
    texts, word = load_texts(folder, vocab, args)
    prompt_ids(args, vocab)

    torch.manual_seed(args.seed)
    model = LM(build_config(args, len(vocab))).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, betas=(0.9, 0.999), fused=device.type == "cuda")
    step, best, notes = 0, dict(step=0, perplexity=math.inf), [corpus.note] if corpus.note else []
    if args.resume:
        checkpoint = read(args.resume)
        if checkpoint["vocab"] != "\n".join(vocab.words):
            raise ValueError(f"{folder} has not the vocabulary of the run in {args.resume} "
                             f"({len(vocab)} words, there {len(checkpoint['vocab'].splitlines())}): "
                             f"the text has changed")
        with common.naming(f"--resume {args.resume}"):
            load_strictly(model, checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
        step, best = checkpoint["step"], checkpoint["best"]
        notes.append(f"resumed at step {step}")
    net = torch.compile(model) if args.compile else model
    if world > 1:
        net = DDP(net, device_ids=[device.index] if device.type == "cuda" else None)
    batches = micro_batches(corpus.train, args, step, stop, rank, world, device)
    batch = next(batches, None)

    log = out_dir / "log.jsonl"
    if master:
        out_dir.mkdir(parents=True, exist_ok=True)
        common.cut_log(log, step)
        about = dict(parameters=sum(p.numel() for p in model.parameters()), device=common.describe(device), world=world,
                     train_tokens=len(corpus.train), vocab_size=len(vocab))
        common.write_log(log, dict(step=step, args=vars(args), torch=torch.__version__, **about))
        print(f"{args.data}: {len(corpus.train):,} training, {len(corpus.valid):,} valid, {len(corpus.test):,} test "
              f"tokens, {len(vocab):,} words | {args.attn} LM-{args.model}, {about['parameters']:,} parameters | "
              f"{world} x {about['device']} | {out_dir}", *notes, sep="\n", flush=True)

    def save(name):
        common.save_checkpoint(out_dir / name, dict(
            task="language modelling", model=model.state_dict(), model_config=asdict(model.config),
            vocab="\n".join(vocab.words), args=vars(args), step=step, best=best,
            optimizer=optimizer.state_dict() if name == "last.pt" else None))

    pending, saved = [], step                            # pending: loss and gradient norm of the steps not logged yet
    clock = time.time()
    with tqdm(total=stop, initial=step, desc="training", unit="step", disable=not master, dynamic_ncols=True) as bar:
        while step < stop:
            lr = common.lr_at(step, args.steps, args.warmup, args.lr, 0.0, args.lr / (args.warmup + 1))
            for group in optimizer.param_groups:
                group["lr"] = lr
            torch.manual_seed(hash((args.seed, step, rank)) % 2 ** 63)                       # of the dropout masks
            losses = []
            for micro in range(args.accum):
                if world > 1:
                    net.require_backward_grad_sync = micro == args.accum - 1
                with common.autocast(device, args.amp):
                    loss = net(batch[:, :-1], batch[:, 1:]).mean() / args.accum
                loss.backward()
                losses.append(loss.detach())
                batch = next(batches, None)                                    # while the GPU is still at the backward
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip or math.inf)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            bar.update()
            pending.append(torch.stack([sum(losses), norm]) / world)

            eval_now = step == stop or step % args.eval_every == 0
            save_now = eval_now or (args.save_every and step % args.save_every == 0)
            if save_now or step % args.log_every == 0:            # before a save, so that no broken state is kept
                kept = f"{out_dir} holds step {saved}" if saved else "Nothing was saved yet"
                loss, norm = common.collect(pending, step, kept)
                rate = len(pending) * args.batch_size * args.context / (time.time() - clock)
                pending, clock = [], time.time()
                epoch = step * args.batch_size * args.context / len(corpus.train)
                bar.set_postfix_str(f"epoch {epoch:.2f} loss {loss:.3f} {rate:.0f} tokens/s")
                if master:
                    common.write_log(log, dict(step=step, epoch=epoch, loss=loss, grad_norm=norm, lr=lr,
                                               tokens_per_s=rate))
            if eval_now:
                valid = perplexity(sliding_nll(model, texts[0].clean, args.window, args.window, args.eval_batch_size,
                                               rank, world, "evaluating"))
                if not math.isfinite(valid):
                    raise ValueError(f"the valid perplexity is not finite at step {step}: try a smaller --lr")
                if master:
                    windows = texts[0].clean[:len(texts[0].clean) // args.window * args.window].reshape(-1, args.window)
                    keys = key_statistics(model.eval(), model.hidden, torch.from_numpy(windows[:8].astype(np.int64)).to(device))
                    text = sample(model, vocab, args, device)
                    model.train()
                    common.write_log(log, dict(step=step, eval=dict(perplexity=valid), sample=text, **keys))
                    tqdm.write(f"step {step:6d}  training loss {loss:.4f}  segment-wise valid perplexity {valid:.2f}  "
                               + textwrap.shorten(text, 60))
                if valid < best["perplexity"]:
                    best = dict(step=step, perplexity=valid)
                    if master:
                        save("best.pt")
                clock = time.time()
            if save_now:
                if master:
                    save("last.pt")                           # after best.pt: a kill in between repeats the evaluation
                saved = step
    common.broadcast([None])                                                         # best.pt is there for all
    finish(out_dir, args, device, rank, world, texts, word, vocab, out_dir, started)


if __name__ == "__main__":
    common.run(main)
