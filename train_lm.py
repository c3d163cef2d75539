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

import math
import re
import textwrap
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import common
from checkpoint import load_strictly
from common import COUNT, NATURAL, REAL, SHARE
from data import text as data_text
from data.text import text_folder
from data.text import EOS, perplexity, sliding_nll
from lm import LM, SIZES, LMConfig, lm_from_checkpoint

# What --data selects; flags and --set win.
RECIPES = {
    "any": dict(attn="rpc", n_iter=4, lambd=4.0, form="released", mu="running", norm="post",
                cutoffs="none", dropout=0.1, clip=0.25, log_every=20, save_every=0),
    # 2 minutes on 2 CPU cores
    "pydoc": dict(model="mini", rpc_layers="0", steps=1000, batch_size=16, lr=2e-3, warmup=100,
                  eval_every=200),
    # a small WikiText: 6 minutes on a CPU core; Symlm: test perplexity 217.0 ± 5.3
    "wikitext": dict(model="mini", rpc_layers="0", steps=2000, batch_size=16, lr=2e-3, warmup=100,
                     eval_every=250),
    # the paper's; not run here. Symlm there: valid 38.37, test 36.36 (probably exchanged)
    "wikitext103": dict(model="paper", rpc_layers="0-3", cutoffs="20000,40000,200000",
                        steps=500_000, batch_size=96, lr=2.5e-4, warmup=2000, eval_every=4000),
}
RECIPES["folder"] = RECIPES["wikitext"]         # --data_dir alone: a text of one's own
# Numbers of a recipe that have no flag of their own.
SETTINGS = dict(
    norm=(common.choice("post", "pre"), "layer norm after each sublayer, as the paper, or before"),
    cutoffs=(str, "adaptive softmax: where its clusters start, 20000,40000,200000; none: full"),
    dropout=(SHARE, "rate"),
    warmup=(NATURAL, "updates of linear warm-up; the cosine counts from update 0"),
    eval_every=(COUNT, "steps between evaluations; each ends in a checkpoint"),
    **common.SETTINGS)
# What --resume refuses to change: it would be another run.
FIXED = ("data", "model", "context", "attn", "rpc_layers", "n_iter", "lambd", "form", "mu", "norm",
         "dropout", "cutoffs", "steps", "batch_size", "seed")


def get_args():
    """The flags; see common.parse."""
    p = common.parser(__doc__, RECIPES, SETTINGS)

    flag = p.add_argument_group("data").add_argument
    flag("--data", choices=list(RECIPES)[1:], help="the recipe; default: pydoc, help topics and "
         "docstrings of this Python, or, with --data_dir, folder: a text of your own")
    flag("--data_dir", help="wiki.train.tokens, wiki.valid.tokens, wiki.test.tokens, or one .txt")

    flag = p.add_argument_group("model").add_argument
    flag("--model", choices=SIZES, help="width, depth, heads, feed-forward and context")
    flag("--context", type=COUNT, help="tokens in a window; default: the model's")
    common.add_attention(flag, ["softmax", "symmetric", "rpc"])
    flag("--mu", choices=["running", "token", "global"], help="mean|k| over "
         "tokens <= t, t alone, or the window as printed: that lets the future leak, to compare")

    flag = p.add_argument_group("training").add_argument
    flag("--steps", type=COUNT, help="updates; the cosine ends there")
    flag("--batch_size", type=COUNT, help="windows per update, all processes and micro-batches")
    flag("--accum", type=COUNT, default=1, help="micro-batches per step and process")
    flag("--lr", type=REAL, help="peak learning rate (Adam, no weight decay)")

    flag = p.add_argument_group("sampling").add_argument
    flag("--sample", metavar="CKPT", help="no training: print words that this checkpoint, or a "
         "run's best.pt, goes on with after --prompt")
    flag("--words", type=NATURAL, default=40, help="of a sample, at evaluations too; 0: none")
    flag("--prompt", default="", help="what it goes on from: words between spaces, as in the text")
    flag("--temperature", type=common.number(float, 1e-3), default=1.0,
         help="below 1: likelier words")

    common.add_running(p, "<data>_<attn>", "--steps")
    args = common.parse(p, RECIPES, SETTINGS, "train_lm.py", FIXED)
    args.context = args.context or SIZES[args.model]["context"]
    used = {"sample", "words", "prompt", "temperature", "seed", "device"}
    idle = common.given_flags(p).keys() - used
    if args.sample and idle:
        raise ValueError(f"--{min(idle)} does not go with --sample, which only prints words of a "
                         f"trained model: leave one of them out")
    return args


# --- set-up ---------------------------------------------------------------------------------------

def build_config(args, vocab_size):
    """LMConfig from the flags."""
    size = {**SIZES[args.model], "context": args.context}
    try:
        cutoffs = () if args.cutoffs == "none" else tuple(map(int, args.cutoffs.split(",")))
    except ValueError:
        raise ValueError(f"--set cutoffs={args.cutoffs}: expected none or ids such as "
                         f"20000,40000,200000") from None
    layers = common.parse_layers(args.rpc_layers, size["depth"])
    return LMConfig(vocab_size, **size, attn=args.attn, rpc_layers=layers, n_iter=args.n_iter,
                    lambd=args.lambd, form=args.form, mu=args.mu, norm=args.norm,
                    dropout=args.dropout, cutoffs=cutoffs)


def load_text(args, rank):
    """The `Corpus` that the flags name. Says what it found; each text is longer than a window."""
    folder = text_folder(args.data, args.data_dir, rank)
    corpus = data_text.load_corpus(folder, rank)
    for split in data_text.SPLITS:
        count = len(getattr(corpus, split))
        if count <= args.context:
            raise ValueError(f"--context {args.context}: the {split} text in "
                             f"{args.data_dir or folder} has only {count} tokens, expected more "
                             f"than a window")
    if rank == 0:
        tqdm.write(f"{folder}: {data_text.describe(corpus)}")
        tqdm.write(f"recipe {args.data}: {args.attn} LM-{args.model}, {args.steps} steps of "
                   f"{args.batch_size} x {args.context} tokens, lr {args.lr:g}")
    return corpus


def micro_batches(tokens, args, start, stop, rank, world, device):
    """Windows (b, context + 1) int64 on the device: every micro-batch of this process."""
    b, rest = divmod(args.batch_size, world * args.accum)
    if rest:
        raise ValueError(f"--batch_size {args.batch_size} is not divisible by {world} processes x "
                         f"--accum {args.accum}")
    for step in range(start, stop):
        for micro in range(rank * args.accum, (rank + 1) * args.accum):
            part = slice(micro * b, (micro + 1) * b)
            windows = data_text.random_windows(tokens, step, args.batch_size, args.context,
                                               args.seed, part)
            if device.type == "cuda":
                windows = windows.pin_memory()
            yield windows.to(device, non_blocking=True)


def build(args, device, rank):
    """Text, model, optimiser, step to go on from, best evaluation: new, or what --resume names."""
    checkpoint = None
    if args.resume:
        checkpoint = common.read_run(args, "train_lm.py", "model_config", "vocab", "best")
    corpus = load_text(args, rank)
    vocab = corpus.vocab
    prompt_ids(args.prompt, vocab)                                  # a word it does not know: now
    torch.manual_seed(args.seed)
    model = LM(build_config(args, len(vocab))).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=device.type == "cuda")
    if not checkpoint:
        return corpus, model, optimizer, 0, dict(step=0, perplexity=math.inf)

    if checkpoint["vocab"] != "\n".join(vocab.words):
        raise ValueError(f"{corpus.folder} has not the vocabulary of the run in {args.resume} "
                         f"({len(vocab)} words, there {len(checkpoint['vocab'].splitlines())}): "
                         f"the text has changed")
    with common.naming(f"--resume {args.resume}"):
        load_strictly(model, checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    return corpus, model, optimizer, checkpoint["step"], checkpoint["best"]


# --- evaluation and samples -----------------------------------------------------------------------

def evaluate(model, corpus, args, device, rank, world):
    """Segment-wise valid perplexity; also a sample, and whether the robust part acted."""
    nats = sliding_nll(model, corpus.valid, args.context, args.context, rank=rank, world=world,
                       progress="evaluating")
    metrics = dict(perplexity=perplexity(nats))
    if rank or not math.isfinite(metrics["perplexity"]):            # run.evaluate refuses it
        return metrics, {}
    text = sample(model, corpus.vocab, args, device)
    tqdm.write(textwrap.shorten(text, 100))
    few = min(len(corpus.valid) // args.context, 8)
    windows = corpus.valid[:few * args.context].reshape(few, -1).astype(np.int64)
    keys = common.key_statistics(model, model.hidden, torch.from_numpy(windows).to(device))
    return metrics, dict(sample=text, **keys)


def prompt_ids(prompt, vocab):
    """<eos> and the ids of the prompt's words, (1, n) int64."""
    words = [EOS, *data_text.split_words(prompt)]
    unknown = [word for word in words if word not in vocab]
    if unknown:
        raise ValueError(f"--prompt: {', '.join(unknown)} not in the vocabulary of {len(vocab)} "
                         f"words; known ones, separated by spaces, and <unk> can be used")
    return torch.tensor([[vocab[word] for word in words]])


def sample(model, vocab, args, device):
    """--prompt and --words words more, as text; the same weights and seed give the same text."""
    if not args.words or model.config.reads_the_future:
        return ""
    generator = torch.Generator(device).manual_seed(args.seed)
    prompt = prompt_ids(args.prompt, vocab).to(device)
    ids = model.eval().generate(prompt, args.words, args.temperature, generator=generator)[0, 1:]
    model.train()

    # tokens to prose: "in @-@ word" is in-word, "1 @,@ 000" is 1,000
    text = " ".join(vocab.words[i] for i in ids.tolist()).replace(EOS, "\n")
    text = re.sub(r" @(\S)@ ", r"\1", text)
    text = re.sub(r" ([.,;:!?)\]])", r"\1", text)
    return re.sub(r" *\n[ \n]*", "\n", text).strip()


def print_sample(args):
    """What --sample asks for."""
    device, rank, _ = common.setup(args.device)
    path = Path(args.sample, "best.pt")
    checkpoint = common.load(path if path.exists() else args.sample)
    common.check_run(checkpoint, args.sample, "train_lm.py", "model", "model_config", "vocab")
    with common.naming(f"--sample {args.sample}"):
        model = lm_from_checkpoint(checkpoint).to(device)
        vocab = data_text.stored_vocabulary(checkpoint)
        if model.config.reads_the_future:
            raise ValueError("trained with --mu global, which reads the words to come")
    if rank == 0:
        print(sample(model, vocab, args, device))


# --- the run --------------------------------------------------------------------------------------

def main():
    args = get_args()
    if args.sample:
        return print_sample(args)
    device, rank, world, out_dir = common.start(args, f"{args.data}_{args.attn}")

    # text, model, optimiser, windows
    corpus, model, optimizer, first, best = build(args, device, rank)
    net = common.wrap(model, device, world, args.compile)
    stop = min(args.steps, args.max_steps or args.steps)
    batches = micro_batches(corpus.train, args, first, stop, rank, world, device)
    batch = next(batches, None)
    run = common.Run(args, out_dir, first, stop, device, rank, world, model,
                     train_tokens=len(corpus.train), vocab_size=len(corpus.vocab))

    def state(step):
        return dict(task="language modelling", model=model.state_dict(), args=vars(args), step=step,
                    model_config=asdict(model.config), vocab="\n".join(corpus.vocab.words),
                    best=dict(best), optimizer=optimizer.state_dict())

    def measure(at):
        """What run.steps asks for after so many steps; the best weights go to best.pt."""
        metrics, more = evaluate(model, corpus, args, device, rank, world)
        if metrics["perplexity"] < best["perplexity"]:
            found = dict(step=at, perplexity=metrics["perplexity"])
            run.save("best.pt", dict(state(at), best=found, optimizer=None))        # to evaluate
            best.update(found)                                      # after it: a kill repeats both
        return metrics, more

    for step in run.steps(measure, state, "tokens", args.batch_size * args.context):
        lr = common.lr_at(step, args.steps, args.warmup, args.lr, 0.0, args.lr / (args.warmup + 1))
        for group in optimizer.param_groups:
            group["lr"] = lr
        torch.manual_seed(common.seed_of(args.seed, step, rank))    # dropout masks

        # forward, backward; the next windows are sent while the device is at the backward
        loss = 0.0
        for micro in range(args.accum):
            net.require_backward_grad_sync = micro == args.accum - 1
            with common.autocast(device, args.amp):
                part = net(batch[:, :-1], batch[:, 1:]).mean() / args.accum
            part.backward()
            loss += part.detach()
            batch = next(batches, None)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip or math.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        # log (waits for the device, stops at a loss that is not finite), evaluate, save
        run.end(step + 1, loss / world, norm / world, lr)

    run.print(f"{args.data} {args.attn}: valid perplexity {best['perplexity']:.2f} (segment-wise) "
              f"with the weights of step {best['step']}; "
              f"next: python eval_robust.py --ckpt {out_dir}")


if __name__ == "__main__":
    common.run(main)
