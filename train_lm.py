"""Train a word-level language model with robust attention.

    python train_lm.py                                    # RPC on Python's own documentation
    python train_lm.py --attn symmetric                   # its baseline
    python train_lm.py --data_dir book.txt                # a text of your own
    python train_lm.py --data wikitext --data_dir data/wikitext-2
    torchrun --nproc_per_node=4 train_lm.py --data wikitext103 --data_dir data/wikitext-103
    python train_lm.py --resume out/pydoc_rpc             # go on exactly where it stopped
    python train_lm.py --sample out/pydoc_rpc --prompt "The function returns"
    python eval_robust.py --ckpt out/pydoc_rpc            # sliding and attacked perplexity

Paper: Teo & Nguyen 2024, section 4.2, Table 3, App. A.4; recipe: `IDSIA/lmtool-fwp`, small standard
transformer. Where this differs from that code: batches are random windows (there: consecutive
streams, always in the same order), the first update has the lowest learning rate (there: the full
one), unknown words are <unk> (there: an error), bf16 on a GPU. The checkpoint with the best valid
perplexity, best.pt, is the one to report.
Stopping and resuming changes no number, nor do more processes but for float noise and the masks of
dropout, which are per process: random numbers depend on (seed, step, process) alone.
"""

import argparse
import math
import re
import textwrap
import time
from pathlib import Path

import numpy as np
import torch

import common
from attention import ATTENTIONS, FORMS, LAYER_PATTERNS, key_statistics
from common import COUNT, NATURAL, REAL, SHARE, InputError
from data import text as data_text
from data.text import EOS, perplexity, sliding_nll, text_folder
from lm import LM, SIZES, LMConfig, lm_from_checkpoint

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
    """Read the flags; see common.parse."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=common.Help,
                                usage="%(prog)s [--flag value ...]", allow_abbrev=False)
    flag = p.add_argument_group("data").add_argument
    flag("--data", choices=RECIPES, help="the recipe; without it topics and docstrings of this "
         "Python (pydoc) or, with --data_dir, a text of your own (folder)")
    flag("--data_dir", help="wiki.train.tokens, wiki.valid.tokens, wiki.test.tokens, or one .txt")

    flag = p.add_argument_group("model").add_argument
    flag("--model", choices=SIZES, help="width, depth, heads, feed-forward and context")
    flag("--context", type=COUNT, help="tokens in a window; None: the model's")
    kinds = dict.fromkeys([*ATTENTIONS, *LAYER_PATTERNS])
    common.add_attention(flag, [name for name in kinds if name != "scaled_s"], FORMS)
    flag("--mu_over", choices=["seen", "token", "all"], default="seen", help="mean|k| over "
         "tokens <= t, t alone, or the window as printed: that lets the future leak, to compare")
    flag("--cutoffs", default="none", help="adaptive softmax: where its clusters start, "
         "20000,40000,200000; none: full")
    flag("--dropout", type=SHARE, default=0.1, help="rate")

    flag = p.add_argument_group("training").add_argument
    flag("--steps", type=COUNT, help="updates; the cosine ends there")
    flag("--batch_size", type=COUNT, help="windows per update, all processes and micro-batches")
    flag("--accum", type=COUNT, default=1, help="micro-batches per step and process")
    flag("--lr", type=REAL, help="peak learning rate (Adam, no weight decay)")
    flag("--warmup", type=NATURAL, help="updates of linear warm-up; the cosine counts from 0")
    flag("--clip", type=REAL, default=0.25, help="largest gradient norm; 0: any")
    flag("--eval_every", type=COUNT, help="steps between evaluations; a checkpoint follows each")

    flag = p.add_argument_group("sampling").add_argument
    flag("--sample", metavar="CKPT", help="no training: print words that this checkpoint, or a "
         "run's best.pt, goes on with after --prompt")
    flag("--words", type=NATURAL, default=40, help="of a sample, at evaluations too; 0: none")
    flag("--prompt", default="", help="what it goes on from: words between spaces, as in the text")

    common.add_running(p, "<data>_<attn>", "--steps")
    args = common.parse(p, RECIPES, "train_lm.py")
    args.context = args.context or SIZES[args.model]["context"]
    return args


# --- set-up ---------------------------------------------------------------------------------------

def build_config(args, vocab_size):
    """Build LMConfig from the flags."""
    size = {**SIZES[args.model], "context": args.context}
    try:
        cutoffs = () if args.cutoffs == "none" else tuple(map(int, args.cutoffs.split(",")))
    except ValueError:
        raise InputError(f"--cutoffs {args.cutoffs}: expected none or ids such as "
                         f"20000,40000,200000") from None
    layers = common.parse_layers(args.rpc_layers, size["depth"])
    return LMConfig(vocab_size, **size, attn=args.attn, rpc_layers=layers,
                    pap=common.pap_of(args), dropout=args.dropout, cutoffs=cutoffs)


def load_text(args):
    """Read the `Corpus` that the flags name; each of its texts is longer than a window."""
    folder = text_folder(args.data, args.data_dir)
    corpus = data_text.load_corpus(folder)
    for split in data_text.SPLITS:
        count = len(getattr(corpus, split))
        if count <= args.context:
            raise InputError(f"--context {args.context}: the {split} text in "
                             f"{args.data_dir or folder} has only {count} tokens, expected more "
                             f"than a window")
    common.print0(f"{folder}: {data_text.describe(corpus)}",
                  f"recipe {args.data}: {args.attn} LM-{args.model}, {args.steps} steps of "
                  f"{args.batch_size} x {args.context} tokens, lr {args.lr:g}")
    return corpus


def micro_batches(tokens, args, start, stop, rank, world, device):
    """Yield this rank's windows (b, context + 1) int64 per micro-batch, on the device."""
    b = args.batch_size // (world * args.accum)
    for step in range(start, stop):
        for micro in range(rank * args.accum, (rank + 1) * args.accum):
            part = slice(micro * b, (micro + 1) * b)
            windows = data_text.random_windows(tokens, step, args.batch_size, args.context,
                                               args.seed, part)
            if device.type == "cuda":
                windows = windows.pin_memory()
            yield windows.to(device, non_blocking=True)


def build(args, device):
    """Load the text, build model and optimiser; load what --resume names.

    Also returns the checkpoint of --resume, {} without one.
    """
    corpus = load_text(args)
    vocab = corpus.vocab
    prompt_ids(args.prompt, vocab)                                  # a word it does not know: now
    checkpoint = common.load_run(args, vocab="\n".join(vocab.words),
                                 train_tokens=len(corpus.train))
    torch.manual_seed(args.seed)
    model = LM(build_config(args, len(vocab))).to(device)
    # To freeze a part, say so here, `model.embed.requires_grad_(False)`: --resume passes by.

    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=args.lr,
                                 fused=device.type == "cuda")
    if checkpoint:
        common.restore(checkpoint, model, optimizer)
    return corpus, model, optimizer, checkpoint


# --- evaluation and samples -----------------------------------------------------------------------

def evaluate(model, corpus, args, device, rank, world):
    """Measure the segment-wise valid perplexity: exp of the mean of all tokens' nats.

    Returns the metrics and, on rank 0, a sample and whether the robust part acted.
    """
    nats = sliding_nll(model, corpus.valid, args.context, args.context, rank=rank, world=world,
                       progress="evaluating")
    metrics = dict(perplexity=perplexity(nats))
    if rank or not math.isfinite(metrics["perplexity"]):            # the log refuses it
        return metrics, {}
    wanted = args.words and not model.config.reads_the_future
    text = sample(model, corpus.vocab, args, device) if wanted else ""
    few = min(len(corpus.valid) // args.context, 8)
    windows = corpus.valid[:few * args.context].reshape(few, -1).astype(np.int64)
    keys = key_statistics(model, model.hidden, torch.from_numpy(windows).to(device))
    return metrics, dict(sample=text, **keys)


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


def print_sample(args):
    """Print what --sample asks for."""
    device, rank, _ = common.setup(args.device)
    path = Path(args.sample, "best.pt")
    checkpoint = common.load(path if path.exists() else args.sample)
    with common.error_prefix(f"--sample {args.sample}"):
        common.check_run(checkpoint, "train_lm.py")
        model = lm_from_checkpoint(checkpoint).to(device)
        text = sample(model, data_text.stored_vocabulary(checkpoint), args, device)
    if rank == 0:
        print(text)


# --- the run --------------------------------------------------------------------------------------

def main():
    # Flags, processes, text, then the model: a new one, or the one that --resume names.
    args = get_args()
    if args.sample:
        return print_sample(args)
    own = "text" if args.data == "folder" else args.data
    device, rank, world, out_dir = common.start(args, f"{own}_{args.attn}")
    corpus, model, optimizer, checkpoint = build(args, device)
    net = common.wrap(model, device, world, args.compile)
    first = checkpoint.get("step", 0)
    best = checkpoint.get("best", dict(step=0, perplexity=math.inf))
    log = common.begin(args, out_dir, first, model, device, rank, world,
                       train_tokens=len(corpus.train), vocab_size=len(corpus.vocab))

    # Windows are drawn one micro-batch ahead. --max_steps stops early, on the schedule of --steps.
    stop = max(first, min(args.steps, args.max_steps or args.steps))
    batches = micro_batches(corpus.train, args, first, stop, rank, world, device)
    batch = next(batches, None)
    bar = common.progress(first, stop, rank)
    clock, pending = time.time(), []
    for step in bar:
        # The learning rate rises during the warm-up, then falls along half a cosine to 0.
        lr = common.lr_at(step, args.steps, args.warmup, args.lr, 0.0, args.lr / (args.warmup + 1))
        for group in optimizer.param_groups:
            group["lr"] = lr

        # Forward and backward. The gradients of micro-batches add up; processes share theirs in
        # the last one. Dropout draws from a seed of this step, so a resumed run draws the same.
        torch.manual_seed(common.seed_of(args.seed, step, rank))
        loss = 0.0
        for micro in range(args.accum):
            net.require_backward_grad_sync = micro == args.accum - 1
            with common.autocast(device, args.amp):
                part = net(batch[:, :-1], batch[:, 1:]).mean() / args.accum
            part.backward()
            loss += part.detach()
            batch = next(batches, None)     # sent while the device is still at the backward

        # Clip the gradient and take the step.
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip or math.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        pending.append(torch.stack([loss, norm]) / world)           # stays on the device

        # What is due? By the step alone, so that all processes agree: an evaluation every few steps
        # and at the end; a row and a checkpoint then and every --save_every steps; more rows every
        # --log_every steps.
        done = step + 1
        evaluating = done == stop or common.every(done, args.eval_every)
        saving = evaluating or common.every(done, args.save_every)

        # Log the means since the last row. Reading them waits for the device.
        if saving or common.every(done, args.log_every):
            loss, norm = common.mean_of(pending, done)
            seconds = (time.time() - clock) / len(pending)
            rate = args.batch_size * args.context / seconds
            log.append(dict(step=done, loss=loss, grad_norm=norm, tokens_per_s=rate, lr=lr))
            common.show_progress(bar, done, loss, rate, "tokens", seconds)
            clock, pending = time.time(), []

        # Evaluate. The weights with the lowest perplexity go to best.pt.
        better = False
        if evaluating:
            metrics, more = evaluate(model, corpus, args, device, rank, world)
            log.append(dict(step=done, eval=metrics, **more))
            common.print0(textwrap.shorten(more.get("sample", ""), 100),
                          common.line(done, loss, metrics))
            better = metrics["perplexity"] < best["perplexity"]
            if better:
                best = dict(step=done, perplexity=metrics["perplexity"])
            clock = time.time()

        # Save; only rank 0 does, so here a clock may decide, too. last.pt is written last, so a run
        # killed earlier repeats the evaluation.
        if saving and rank == 0:
            checkpoint = common.state_of(
                "train_lm.py", model, optimizer, args, done, best=best,
                vocab="\n".join(corpus.vocab.words), train_tokens=len(corpus.train))
            if better:
                common.save(out_dir / "best.pt", {**checkpoint, "optimizer": None})
            common.save(out_dir / "last.pt", checkpoint)

    # The result is the best evaluation's.
    common.print0(f"{args.data} {model.config.attn}: valid perplexity {best['perplexity']:.2f} "
                  f"(segment-wise) with the weights of step {best['step']}",
                  f"next: python eval_robust.py --ckpt {out_dir}")


if __name__ == "__main__":
    common.run(main)
