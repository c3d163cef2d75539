"""Train a word-level language model with robust attention.

    python train_lm.py                                    # RPC on Python's own documentation
    python train_lm.py --attn symmetric                   # its baseline
    python train_lm.py --data_dir book.txt                # your own text
    python train_lm.py --data wikitext --data_dir data/wikitext-2
    torchrun --standalone --nproc_per_node=4 train_lm.py --data wikitext103 \\
        --data_dir data/wikitext-103                      # the paper's run
    python train_lm.py --resume out/pydoc_rpc             # continue exactly where the run stopped
    python train_lm.py --sample out/pydoc_rpc --prompt "The function returns"
    python train_lm.py --eval_only out/pydoc_rpc out/pydoc_symmetric    # clean and attacked text

Add --help to one of these commands to list its flags and their defaults. --resume, --sample and
--eval_only have few flags: the rest comes from the checkpoint. SETTINGS below are the flags of a
training. To change a recipe, edit RECIPES.

Paper: Teo & Nguyen 2024, section 4.2, Table 3, App. A.4. Recipe: the small standard transformer of
`IDSIA/lmtool-fwp`. Differences from that code:
- Batches are windows from random places of the text, not consecutive text in a fixed order.
- The warm-up includes the first update. In that code, the first update has the highest rate of
  all, because the warm-up begins after it.
- Unknown words become <unk> instead of an error.
- GPUs use bf16 (float32 with --no-amp).

The three trainers share about 100 similar lines on purpose: each script is self-contained.

Report the results of best.pt, the checkpoint with the lowest valid perplexity.

A resumed run is bit-identical on a CPU; docs/data.md describes GPUs and several processes.
"""

import math
import re
import shlex
import textwrap
import time
import zlib
from dataclasses import asdict
from functools import partial
from pathlib import Path

import common  # before torch, because it sets GOMP_SPINCOUNT for torch's threads
import numpy as np
import torch

from attention import (ATTENTIONS, LAYER_PATTERNS, attention_flags, default_settings,
                       eval_mode, key_statistics)
from common import ONE_OR_MORE, SHARE, InputError, bar, print0, send
from data.rng import DROPOUT, seed_from
from data.text import (EOS, EXPECTED, UNK, Vocabulary, load_corpus, perplexity, plain,
                       pydoc_folder, random_windows, read_prose, read_tokens,
                       separate_words, sliding_nll)
from data.words import WORD, word_swap
from lm import LM, LM_SIZES, LMConfig, depends_on_later_words, lm_from_checkpoint

TASK = "language modelling"
# name=(default, help) or (default, help, allowed values). Numbers are from 0 to inf by default.
SETTINGS = dict(
    # the model
    model=("mini", "size of the transformer", tuple(LM_SIZES)),
    context=(0, "tokens per window; 0: set by --model"),
    attn=("rpc", "attention; rpc: RPC-Attention in --rpc_layers, symmetric elsewhere"),
    rpc_layers=("0", "layers with RPC-Attention, from 0 on: 0 or 0,1,2 or 0-3 or all"),
    mu_over=("seen", "compute PAP's mu for token t from tokens 0 to t (seen), or from "
             "t alone (token); the paper's mu, from all tokens, reads the future: see "
             "studies/leak.py", ("seen", "token")),
    cutoffs=("", "adaptive softmax, whose clusters of words start at these ids, for "
             "example 20000,40000,200000; without this flag the full softmax"),
    dropout=(0.1, "dropout rate", SHARE),
    # the training
    steps=(2000, "length of the training and of its schedule", ONE_OR_MORE),
    batch_size=(16, "windows per step of all processes", ONE_OR_MORE),
    lr=(2e-3, "Adam's highest learning rate; there is no weight decay"),
    warmup=(100, "steps of linear warm-up; a run that is not longer than these steps "
            "warms up in its first half"),
    clip=(0.25, "scale larger gradients down to this norm; 0: never"),
    # the run
    eval_every=(250, "evaluate and save after this many steps", ONE_OR_MORE),
    words=(40, "words of the sample at each evaluation; 0: no sample"),
    prompt=("", "begin the sample with this text"),
) | common.RUNNING

# Other defaults, and the flags that only one data set has.
DATA_DIR = ("a text file; or a folder with train.txt, valid.txt and test.txt, or with "
            "wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens")
RECIPES = dict(
    # the documentation of this Python; 2 minutes on 2 CPU cores
    pydoc=dict(steps=1000, eval_every=200),
    # a small WikiText; 6 minutes on a CPU core; symmetric attention has a test perplexity of 217.0
    # (mean of 3 seeds; standard deviation 5.3)
    wikitext=dict(data_dir=("data/wikitext-2", DATA_DIR)),
    # the paper's run, which we did not repeat; the paper reports perplexity 38.37 (valid) and 36.36
    # (test) for symmetric attention; the two numbers are probably exchanged
    wikitext103=dict(
        data_dir=("data/wikitext-103", DATA_DIR),
        model="paper", rpc_layers="0-3", cutoffs="20000,40000,200000", steps=500_000,
        batch_size=96, lr=2.5e-4, warmup=2000, eval_every=4000),
    # your own text: the recipe of wikitext with symmetric attention
    folder=dict(data_dir=("book.txt", DATA_DIR), attn="symmetric"),
)
# The flags of --eval_only and of --sample.
EVALUATION = dict(
    eval_only=([], "evaluate these checkpoints: files, or folders of runs"),
    data_dir=("", "another text than in the training of the first network"),
    window=(0, "tokens per window, at most the --context of the networks; 0: their "
            "smallest --context"),
    stride=(0, "tokens between windows; 0: a quarter of --window; the paper uses 1, "
            "which takes longest"),
    limit=(0, "evaluate on this many tokens of each text, 2 or more; 0: all"),
    seed=common.RUNNING["seed"],
    out_dir=("", "folder of the new results.jsonl; without this flag out/eval_<time>"),
    device=common.RUNNING["device"],
)
SAMPLING = dict(
    sample=("", "write with this checkpoint: a file, or the folder of a run"),
    prompt=SETTINGS["prompt"],
    words=(40, "number of words"),
    seed=common.RUNNING["seed"],
    device=common.RUNNING["device"],
)


def attentions():
    """Return the values of --attn. scaled_s is left out, because its number of tokens is fixed."""
    return sorted((ATTENTIONS | LAYER_PATTERNS).keys() - {"scaled_s"})


def make_table(chosen):
    """Return the table of flags for chosen flags, {name: value}, among them data and attn."""
    table = common.with_recipe(SETTINGS, RECIPES[chosen["data"]])
    attn = chosen["attn"] or table["attn"][0]
    table["attn"] = (attn, table["attn"][1], attentions())
    first = dict(
        data=(chosen["data"], "data set; without this flag folder, your own text, if "
              "--data_dir is given, else pydoc", sorted(RECIPES)),
        resume=("", "continue the run in this folder; with --help: the flags for it"),
        eval_only=("", "evaluate networks; with --help: the flags for it"),
        sample=("", "write a text; with --help: the flags for it"))
    return first | table | attention_flags(attn)


def get_args():
    """Parse the flags of a training. Returns them, and the checkpoint of --resume or {}."""
    chosen = common.first_flags(data=RECIPES, data_dir=None, resume=None,
                                attn=attentions())
    if chosen.resume:
        return common.parse_resumed(chosen.resume, TASK, make_table, __doc__)
    chosen.data = chosen.data or ("folder" if chosen.data_dir else "pydoc")
    args = common.parse(make_table(vars(chosen)), __doc__)
    args.context = args.context or LM_SIZES[args.model]["context"]
    name = "text" if args.data == "folder" else args.data
    args.out_dir = args.out_dir or f"out/{name}_{args.attn}"
    common.check_new_run(args.out_dir)
    return args, {}


# --- evaluation and samples -----------------------------------------------------------------------

def evaluate(model, tokens, args, rank, world):
    """Return dict(perplexity): the segment-wise perplexity of a text.

    The text is cut into segments of --context tokens. Each token is predicted from the earlier
    tokens of its segment. The processes share the segments.
    """
    nats = sliding_nll(model, tokens, window=args.context, stride=args.context,
                       rank=rank, world=world, progress="evaluating")
    return dict(perplexity=perplexity(nats))


def load_network(path, device):
    """Return the language model of a checkpoint, its Vocabulary, and the flags of its training."""
    checkpoint = common.load(path)
    common.note_step(path, checkpoint)
    model = lm_from_checkpoint(checkpoint).to(device)
    vocab = Vocabulary(checkpoint["vocab"].split("\n"))
    return model, vocab, checkpoint["args"]


def load_texts(data_dir, vocab, word, args):
    """Return {split: (clean, attacked, swapped)} for the valid and the test text.

    clean, attacked: ids of the tokens, (n,), before and after the word swap, which inserts `word`.
    swapped: (n - 1,) bool, True for an inserted word. The first token, which has no loss, is left
    out.
    """
    splits = ("valid", "test")
    parts = read_tokens(data_dir, splits) or read_prose(data_dir, splits, known=vocab)
    if not parts:
        raise InputError(f"{data_dir} has no valid or test text; {EXPECTED}")
    texts = {}
    stop = args.limit or None
    for split, lines in parts.items():
        attacked, swapped = word_swap(lines, seed=args.seed, word=word)
        clean = vocab.encode_lines(lines)[:stop]
        attacked = vocab.encode_lines(attacked)[:stop]
        texts[split] = (clean, attacked, torch.tensor(swapped[1:len(clean)]))
    crc = [zlib.crc32(clean.tobytes()) for clean, _, _ in texts.values()]
    common.check_equal(crc, "texts")
    return texts


def evaluate_only():
    """Measure the perplexities of networks on the same texts, in one new file; print a table.

    The text is the text that the first network was trained on, unless --data_dir is given. The
    numbers of a row:
    segment: the clean text, in windows that do not overlap.
    sliding: the clean text, in windows that overlap.
    attacked: the text after the word swap, in windows that overlap. The loss of the inserted words
        counts, though no model can predict them.
    attacked_unswapped: like attacked, without the loss of the inserted words.
    clean_unswapped: like sliding, without the loss of the words that the swap replaces. So the
        difference from attacked_unswapped is the effect of the swap on the other words.
    unknown: per cent of the tokens that are <unk>. The <eos> of each line is a token, too.
    """
    from results import print_tables            # here, because a training needs no tables

    args = common.parse(EVALUATION, __doc__)
    rank, world, device = common.start_processes(args.device)
    loaded = [load_network(path, device) for path in args.eval_only]
    models, vocabularies, trainings = zip(*loaded)
    common.check_equal_weights(models)
    vocab = vocabularies[0]
    if any(other != vocab for other in vocabularies):
        raise InputError("the networks have different vocabularies, so you cannot compare "
                         "their perplexities; evaluate them one by one")
    context = min(model.config.context for model in models)
    window = args.window or context
    stride = args.stride or max(window // 4, 1)
    if not stride <= window <= context:
        raise InputError(f"--window {window} --stride {stride}: expected stride <= "
                         f"window <= {context}, the --context of the training")

    # The swap inserts the paper's word. If the vocabulary does not have this word, it inserts the
    # rarest word, because <unk> would be too easy to predict.
    known = [word for word in vocab.words if word != UNK]
    word = WORD if WORD in vocab else known[-1]
    data_dir = args.data_dir or trainings[0].get("data_dir") or pydoc_folder()
    texts = load_texts(data_dir, vocab, word, args)

    path = common.new_results(args.out_dir)
    print0(f"{data_dir} | {path}")
    rows = []
    for split, (clean, attacked, swapped) in texts.items():
        for network, model in zip(args.eval_only, models):
            began = time.perf_counter()
            nll = partial(sliding_nll, model, window=window, rank=rank, world=world,
                          progress=f"{split}, {network}")
            sliding = nll(clean, stride=stride)
            moved = nll(attacked, stride=stride)
            segments = nll(clean, stride=window)
            unknown = 100 * float((clean == vocab[UNK]).mean())
            row = dict(network=network, data=str(data_dir), measure=split,
                       window=window, stride=stride, seed=args.seed, word=word,
                       tokens=len(clean), swapped=int(swapped.sum()),
                       segment=perplexity(segments),
                       sliding=perplexity(sliding),
                       attacked=perplexity(moved),
                       attacked_unswapped=perplexity(moved, ~swapped),
                       clean_unswapped=perplexity(sliding, ~swapped),
                       unknown=round(unknown, 4),
                       seconds=round(time.perf_counter() - began, 2))
            rows.append(row)
            common.append_row(path, row | common.origin(device))
    if common.is_first():
        print_tables(rows)


def sample_only():
    """Write a text with a checkpoint."""
    args = common.parse(SAMPLING, __doc__)
    _, _, device = common.start_processes(args.device)
    model, vocab, _ = load_network(args.sample, device)
    print0(sample(model, vocab, args, device))


def sample(model, vocab, args, device):
    """Return --prompt and the next --words words as prose. The same seed gives the same text."""
    lines = plain(args.prompt).split("\n")
    lines = [separate_words(line, known=vocab) for line in lines]
    ids = torch.from_numpy(vocab.encode_lines(lines).astype("int64"))
    # Move the last <eos> to the front. So the first line follows an <eos>, as in the training, and
    # the sample continues the last line.
    prompt = ids.roll(1)[None].to(device)
    generator = torch.Generator(device).manual_seed(args.seed)
    with eval_mode(model):
        ids = model.generate(prompt, args.words, generator=generator)[0, 1:]

    # Turn tokens into prose: "in @-@ word" becomes in-word, and "1 @,@ 000" becomes 1,000.
    text = " ".join(vocab.words[i] for i in ids.tolist()).replace(EOS, "\n")
    text = re.sub(r" @(\S)@ ", r"\1", text)
    text = re.sub(r" ([.,;:!?)\]])", r"\1", text)
    return re.sub(r" *\n[ \n]*", "\n", text).strip()


# --- the run --------------------------------------------------------------------------------------

def learning_rate(step, args):
    """Return the rate: linear warm-up, which replaces the first part of a cosine to 0."""
    warmup = args.warmup if args.warmup < args.steps else args.steps // 2
    if step < warmup:
        lowest = args.lr / (warmup + 1)
        return lowest + (args.lr - lowest) * step / warmup
    return args.lr * (1 + math.cos(math.pi * (step / args.steps))) / 2


def train():
    """Train a language model, or continue its training."""
    args, checkpoint = get_args()

    # torchrun starts `world` processes, one per GPU. Each trains on its part of every batch; only
    # rank 0 prints and writes. Without torchrun, rank is 0 and world is 1.
    rank, world, device = common.start_processes(args.device)
    amp = common.use_bf16(args.amp, device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=amp)

    # Data.
    data_dir = pydoc_folder() if args.data == "pydoc" else args.data_dir
    corpus = load_corpus(data_dir)
    vocab = corpus.vocab
    words = "\n".join(vocab.words)
    crc = zlib.crc32(words.encode() + corpus.train.tobytes() + corpus.valid.tobytes())
    if len(corpus.train) <= args.context:
        raise InputError(f"--context {args.context}: the training text in {data_dir} "
                         f"has only {len(corpus.train)} tokens")
    if np.array_equal(corpus.train, corpus.valid):
        raise InputError(f"{data_dir}: the texts train and valid are equal")
    if args.batch_size % world:
        raise InputError(f"--batch_size {args.batch_size}: expected a multiple of the "
                         f"{world} processes")
    unknown = 100 * (corpus.valid == vocab[UNK]).mean()
    print0(f"{data_dir}: {len(corpus.train):,} training, {len(corpus.valid):,} valid "
           f"({unknown:.1f} % <unk>), {len(corpus.test):,} test tokens, {len(vocab):,} words")

    # Model.
    size = LM_SIZES[args.model] | dict(context=args.context)
    pap = {name: getattr(args, name) for name in default_settings(args.attn)}
    config = LMConfig(
        vocab_size=len(vocab), **size, attn=args.attn, dropout=args.dropout,
        rpc_layers=common.parse_layers(args.rpc_layers, size["depth"]),
        pap=pap | dict(mu_over=args.mu_over),
        cutoffs=[int(word) for word in args.cutoffs.split(",") if word])
    torch.manual_seed(args.seed)
    model = LM(config).to(device)
    if depends_on_later_words(model):
        raise InputError(f"--attn {args.attn}: the output for a word depends on later "
                         f"words, expected a causal attention; mask them in "
                         f"attention.py if causal is true")
    # To freeze parameters, add a line here: model.embed.requires_grad_(False)

    # Optimiser.
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=args.lr, fused=device.type == "cuda")

    # Resume. Random numbers have no state: they depend on seed, step and place in the batch only.
    first = 0
    best = math.inf                             # the lowest valid perplexity
    metrics = {}
    if checkpoint:
        if checkpoint["data_crc"] != crc:
            raise InputError(f"--resume: the text in {data_dir} has changed")
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        first = checkpoint["step"]
        if Path(args.out_dir, "best.pt").exists():      # a lost best.pt is written again
            best = checkpoint["best"]
    common.check_same_run(args, first, crc)

    # Compile the model, and average gradients over processes. `net` is trained; `model`, which has
    # the same weights, is evaluated and saved.
    compiling = common.use_compile(args.compile, device)
    if compiling and model.adaptive:            # the adaptive softmax has data-dependent shapes
        model.adaptive.nll = torch.compiler.disable(model.adaptive.nll)
    _, net = common.parallel(model, world, compiling)
    log = common.start_log(args, first, model, device)

    def save(name, step):
        """Write a checkpoint, with the present weights, into the folder of the run."""
        state = dict(task=TASK, args=vars(args), step=step, total=args.steps,
                     metrics=metrics, best=best,
                     model=model.state_dict(), optimizer=optimizer.state_dict(),
                     model_config=asdict(config), vocab=words, data_crc=crc)
        common.save(f"{args.out_dir}/{name}", state)

    if rank == 0 and not args.resume:           # so --resume works before the first evaluation
        save("last.pt", 0)

    # The loop. --max_steps stops it early, and does not change the schedule of --steps.
    stop = min(args.steps, args.max_steps or args.steps)
    b = args.batch_size // world
    own = slice(rank * b, (rank + 1) * b)       # the windows of this process in every batch
    since = time.perf_counter()
    pending = []                                # loss and norm of each step not yet logged
    steps = bar(range(first, stop), "training", total=stop, initial=first, unit="step")
    for step in steps:
        lr = learning_rate(step, args)
        for group in optimizer.param_groups:
            group["lr"] = lr

        windows = random_windows(corpus.train, step, args.batch_size, args.context,
                                 args.seed, part=own)
        windows = send(windows, device)                             # (b, context + 1) int64

        # Forward and backward. The seed of a step and process determines the masks of dropout, so a
        # resumed run draws the same masks. `net` returns one loss per token.
        torch.manual_seed(seed_from(args.seed, DROPOUT, step, rank))
        with autocast:
            loss = net(windows[:, :-1], windows[:, 1:]).mean()
        loss.backward()

        # Clip the gradient, and update the weights.
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip or math.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        pending.append(torch.stack([loss.detach(), norm]))          # stays on the device

        # Scheduled evaluations choose best.pt; the evaluation where --max_steps stops the run does
        # not. Otherwise a run that was stopped and resumed could have another best.pt.
        done = step + 1
        scheduled = done % args.eval_every == 0 or done == args.steps
        evaluating = scheduled or done == stop

        # Log the means over the steps since the last row.
        if evaluating or done % common.LOG_EVERY == 0:
            tokens = args.batch_size * args.context * len(pending)
            speed = tokens / (time.perf_counter() - since)
            mean_loss, mean_norm = common.mean_over_processes(pending)
            if not math.isfinite(mean_loss + mean_norm):
                raise InputError(f"not finite by step {done}: loss {mean_loss:.4g}, "
                                 f"norm {mean_norm:.4g}; try a smaller --lr or --clip")
            common.append_row(log, dict(step=done, loss=mean_loss, grad_norm=mean_norm,
                                        tokens_per_s=speed, lr=lr))
            print0(f"step {done:6d}  loss {mean_loss:.4f}  {speed:.0f} tokens/s")
            pending = []
            since = time.perf_counter()

        # Evaluate, write a sample, and save. A resumed run repeats what came after the last save.
        if evaluating:
            with autocast:
                metrics = evaluate(model, corpus.valid, args, rank, world)
            found = metrics["perplexity"]
            text = ""
            if args.words and rank == 0:
                text = sample(model, vocab, args, device)
            # Mean |k| and the share of nonzero entries of S in each layer, on a few windows of this
            # batch, show whether RPC acts.
            keys = key_statistics(model, windows[:8, :-1], forward=model.hidden)
            common.append_row(log, dict(step=done, eval=metrics, sample=text, **keys))
            print0(f"step {done:6d}  valid perplexity {found:.2f}  "
                   f"{textwrap.shorten(text, 80)}")
            better = scheduled and found < best
            if better:
                best = found
            # best.pt comes first: a run that is killed between the two repeats this evaluation.
            if rank == 0 and better:
                save("best.pt", done)
            if rank == 0:
                save("last.pt", done)
            since = time.perf_counter()                 # the speed excludes evaluation and saving

    print0(f"next: python train_lm.py --eval_only {shlex.quote(args.out_dir)}")


def main():
    chosen = common.first_flags(eval_only=None, sample=None)
    if chosen.eval_only:
        evaluate_only()
    elif chosen.sample:
        sample_only()
    else:
        train()


if __name__ == "__main__":
    common.run(main)        # prints an InputError as one line
