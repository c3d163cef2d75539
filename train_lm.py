"""Train a word-level language model with robust attention.

    python train_lm.py                                    # RPC on Python's own documentation
    python train_lm.py --attn symmetric                   # its baseline
    python train_lm.py --data_dir book.txt                # your own text
    python train_lm.py --data wikitext --data_dir data/wikitext-2
    torchrun --standalone --nproc_per_node=4 train_lm.py --data wikitext103 \\
        --data_dir data/wikitext-103                      # the paper's run
    python train_lm.py --resume out/pydoc_rpc             # continue exactly where the run stopped
    python train_lm.py --sample out/pydoc_rpc --prompt "The function returns"
    python train_lm.py --eval_only out/pydoc_rpc          # test on clean and attacked text

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
import textwrap
import time
import zlib
from dataclasses import asdict
from itertools import pairwise

import common  # before torch, because it sets GOMP_SPINCOUNT for torch's threads
import torch

from attention import (ATTENTIONS, FORMS, LAYER_PATTERNS, default_settings,
                       key_statistics)
from common import (InputError, bar, nonnegative_float, nonnegative_int, positive_int,
                    zero_to_one)
from data.images import send
from data.rng import DROPOUT, seed_from
from data.text import (EOS, SPLITS, UNK, Vocabulary, is_spaced, lines_to_score,
                       load_corpus, perplexity, prepare_text, random_windows, seen_hashes,
                       separate_words, sliding_nll)
from lm import LM, LM_SIZES, LMConfig, depends_on_later_words, lm_from_checkpoint
from results import add_result
from robust.words import WORD, word_swap

# The recipe that --data selects; flags on the command line override it.
RECIPES = {
    # the documentation of this Python; 2 minutes on 2 CPU cores
    "pydoc": dict(model="mini", steps=1000, batch_size=16, lr=2e-3, warmup=100,
                  eval_every=200),
    # a small WikiText; 6 minutes on a CPU core; symmetric attention has a test perplexity of 217.0
    # (mean of 3 seeds; standard deviation 5.3)
    "wikitext": dict(model="mini", steps=2000, batch_size=16, lr=2e-3, warmup=100,
                     eval_every=250),
    # the paper's run, which we did not repeat; the paper reports perplexity 38.37 (valid) and 36.36
    # (test) for symmetric attention; the two numbers are probably exchanged
    "wikitext103": dict(model="paper", rpc_layers="0-3", cutoffs="20000,40000,200000",
                        steps=500_000, batch_size=96, lr=2.5e-4, warmup=2000,
                        eval_every=4000),
    # your own text: the recipe of wikitext with symmetric attention
    "folder": dict(model="mini", steps=2000, batch_size=16, lr=2e-3, warmup=100,
                   eval_every=250, attn="symmetric"),
}
# Flags that act only in an evaluation, all flags that act in it, and all that act in sampling.
ONLY_IN_EVALUATION = {"window", "stride", "limit"}
IN_EVALUATION = ONLY_IN_EVALUATION | {
    "eval_only", "data", "data_dir", "seed", "device", "out_dir"}
IN_SAMPLING = {"sample", "words", "prompt", "seed", "device"}
# The numbers of an evaluation, see evaluate_only.
SCORES = ("segment", "sliding", "attacked", "attacked_unswapped", "clean_unswapped",
          "unknown")


def get_args():
    """Parse the flags. Returns them, and the checkpoint of --resume or {}."""
    p = common.new_parser(__doc__)
    # flag(...) adds a flag to a group of --help.
    flag = p.add_argument_group("data").add_argument
    flag("--data", choices=RECIPES, help="data set; its recipe sets defaults of other "
         "flags (default: folder, your own text, if --data_dir is given, else pydoc; "
         "with --eval_only the data set of the training)")
    flag("--data_dir", help="a text file, or a folder with wiki.train.tokens, "
         "wiki.valid.tokens and wiki.test.tokens; docs/data.md shows all layouts")

    flag = p.add_argument_group("model").add_argument
    flag("--model", choices=LM_SIZES, help="size of the transformer")
    flag("--context", type=positive_int,
         help="tokens per window (default: set by --model)")
    # Some values are layer patterns: one attention in --rpc_layers, another one elsewhere.
    # scaled_s is left out, because it needs a fixed number of tokens; rpca, because robust PCA
    # reads later tokens.
    attentions = ATTENTIONS.keys() | LAYER_PATTERNS.keys()
    common.attention_flags(flag, attentions - {"scaled_s", "rpca"}, FORMS)
    flag("--mu_over", choices=["seen", "token", "all"], default="seen", help="compute "
         "PAP's mu for token t from tokens 0 to t (seen), from token t alone (token), or "
         "from the whole window like the paper (all); with all, the model reads the "
         "future (default: seen)")
    flag("--cutoffs", default="none", help="adaptive softmax, whose clusters of words "
         "start at these ids, for example 20000,40000,200000 (default: none, the full "
         "softmax)")
    flag("--dropout", type=zero_to_one, default=0.1, help="dropout rate (default: 0.1)")

    flag = p.add_argument_group("training").add_argument
    flag("--steps", type=positive_int, help="length of the training and of its schedule")
    flag("--batch_size", type=positive_int, help="windows per step of all processes")
    flag("--lr", type=nonnegative_float,
         help="Adam's highest learning rate; there is no weight decay")
    flag("--warmup", type=nonnegative_int, help="steps of linear warm-up, fewer than "
         "--steps (default: set by --data; half of --steps if --steps is not larger)")
    flag("--clip", type=nonnegative_float, default=0.25,
         help="scale larger gradients down to this norm; 0: never (default: 0.25)")

    flag = p.add_argument_group("evaluation").add_argument
    flag("--eval_only", metavar="CKPT", help="evaluate this checkpoint, a file or the "
         "folder of a run, instead of training: perplexity of the clean text, and after "
         "the word swap")
    flag("--window", type=positive_int, help="tokens per window in the evaluation, at most "
         "the training's --context, which is the default")
    flag("--stride", type=positive_int, help="tokens between windows (default: a quarter of "
         "--window; the paper uses 1, which takes longest)")
    flag("--limit", type=positive_int,
         help="evaluate on this many tokens (default: all)")

    flag = p.add_argument_group("sampling").add_argument
    flag("--sample", metavar="CKPT", help="load this checkpoint, a file or the folder of "
         "a run, and continue --prompt instead of training")
    flag("--words", type=nonnegative_int, default=40,
         help="words per sample; 0: write no samples in training (default: 40)")
    flag("--prompt", default="", help="begin the sample with this text")

    flag = p.add_argument_group("running").add_argument
    flag("--seed", type=common.seed, default=0,
         help="seed of weights, windows and samples (default: 0)")
    flag("--eval_every", type=positive_int, help="evaluate and save after this many steps")
    flag("--out_dir", help="folder of the run (default: out/<data or text>_<attn>)")
    common.running_flags(flag)

    args, checkpoint = common.parse_flags(p, RECIPES, default="pydoc",
                                          task="language modelling")
    typed = common.typed_flags(p)
    if args.sample:
        common.reject_flags(typed - IN_SAMPLING, "with --sample")
        return args, checkpoint
    if args.eval_only:
        common.reject_flags(typed - IN_EVALUATION, "with --eval_only")
        if "data" not in typed:
            args.data = None                    # evaluation_data takes the training's data
        return args, checkpoint

    common.reject_flags(typed & ONLY_IN_EVALUATION, "without --eval_only")
    if args.data == "pydoc":
        common.reject_flags(typed & {"data_dir"}, "with --data pydoc")
    useless = common.useless_attention_flags(args.attn, LAYER_PATTERNS)
    common.reject_flags(typed & useless, f"with --attn {args.attn}")
    if args.mu_over == "all":                   # such a model cannot write samples
        common.reject_flags(typed & {"words"}, "with --mu_over all")
    common.set_missing(args, default_settings(args.attn))           # n_iter, lambd and form
    args.context = args.context or LM_SIZES[args.model]["context"]
    # A recipe's warm-up can be too long for your --steps.
    if args.warmup >= args.steps and "warmup" not in typed:
        args.warmup = args.steps // 2
    if args.warmup >= args.steps:
        raise InputError(f"--warmup {args.warmup}: expected fewer than --steps {args.steps}; "
                         f"otherwise the whole run is warm-up")
    if checkpoint:
        common.reject_flags(typed & {"out_dir"}, "with --resume")
        args.out_dir = args.resume
        return args, checkpoint

    name = "text" if args.data == "folder" else args.data
    args.out_dir = args.out_dir or f"out/{name}_{args.attn}"
    common.check_new_run(args.out_dir)
    return args, checkpoint


def parse_cutoffs(text, vocab_size):
    """Turn the value of --cutoffs into a tuple. InputError unless the ids increase."""
    if text == "none":
        return ()
    words = text.split(",")
    if all(word.isdecimal() for word in words):
        ids = [0, *map(int, words), vocab_size]
        if all(low < high for low, high in pairwise(ids)):
            return tuple(ids[1:-1])
    raise InputError(f"--cutoffs {text}: expected increasing ids from 1 to "
                     f"{vocab_size - 1}, such as 100,1000, or none")


# --- batches --------------------------------------------------------------------------------------

def train_batches(tokens, args, start, stop, device, rank, world):
    """Yield windows of the text, (b, context + 1) int64 on the device, for each step.

    Process `rank` gets a contiguous part of the batch, b = batch_size / world windows.
    """
    b = args.batch_size // world
    for step in range(start, stop):
        windows = random_windows(tokens, step, args.batch_size, args.context, args.seed,
                                 part=slice(rank * b, (rank + 1) * b))
        yield send(windows, device)


# --- evaluation and samples -----------------------------------------------------------------------

def evaluate(model, corpus, args, rank, world):
    """Return dict(perplexity): the segment-wise perplexity of the valid text.

    The text is cut into segments of --context tokens. Each token is predicted from the earlier
    tokens of its segment. The processes share the segments.
    """
    nats = sliding_nll(model, corpus.valid, window=args.context, stride=args.context,
                       rank=rank, world=world, progress="evaluating")
    return dict(perplexity=perplexity(nats))


def evaluate_only(args, rank, world, device):
    """Print the perplexities of a checkpoint, and append them to results.jsonl as rows.

    The fields of a row:
    segment: the clean text, in windows that do not overlap.
    sliding: the clean text, in windows that overlap.
    attacked: the text after the word swap, in windows that overlap. The loss of the inserted words
        counts, though no model can predict them.
    attacked_unswapped: like attacked, without the loss of the inserted words.
    clean_unswapped: like sliding, without the loss of the words that the swap replaces. So the
        difference from attacked_unswapped is the effect of the swap on the other words.
    unknown: per cent of the tokens that are <unk>. The <eos> of each line is a token, too.
    swapped: the number of replaced words. word: the word that replaces them.
    """
    checkpoint = common.load(args.eval_only)
    model = lm_from_checkpoint(checkpoint).to(device)
    trained = checkpoint["args"]
    vocab = Vocabulary(checkpoint["vocab"].split("\n"))
    data, data_dir = common.evaluation_data(args, trained, built_in="pydoc")
    context = model.config.context
    window = args.window or context
    stride = args.stride or max(window // 4, 1)
    if window > context:
        raise InputError(f"--window {window}: expected at most {context}, the --context "
                         f"of the training")
    # Insert the paper's word. If the vocabulary does not have this word, insert the rarest word,
    # because <unk> would be too easy to predict.
    word = WORD
    if WORD not in vocab:
        known = [entry for entry in vocab.words if entry != UNK]
        word = known[-1]
    table = []
    texts = lines_to_score(data, data_dir, checkpoint["seen"], was_spaced(checkpoint))
    for split, lines in texts.items():
        began = time.perf_counter()
        swapped_lines, swapped = word_swap(lines, seed=args.seed, word=word)    # one bool per token
        tokens = vocab.encode_lines(lines)[:args.limit]
        swapped_tokens = vocab.encode_lines(swapped_lines)[:args.limit]
        swapped = torch.tensor(swapped[1:len(tokens)])          # the first token has no loss

        def token_losses(text, step, title):
            return sliding_nll(model, text, window, step, rank=rank, world=world,
                               progress=f"{split} {title}")

        sliding = token_losses(tokens, stride, "sliding")
        attacked = token_losses(swapped_tokens, stride, "attacked")
        if stride == window:
            segments = sliding                                  # the windows do not overlap
        else:
            segments = token_losses(tokens, window, "segment-wise")
        unknown = 0.0
        if UNK in vocab:
            unknown = 100 * float((tokens == vocab[UNK]).mean())
        numbers = dict(segment=perplexity(segments), sliding=perplexity(sliding),
                       attacked=perplexity(attacked),
                       attacked_unswapped=perplexity(attacked, ~swapped),
                       clean_unswapped=perplexity(sliding, ~swapped),
                       unknown=round(unknown, 4))
        # The field `images` of a row counts examples, here the tokens.
        tokens_hash = f"{zlib.crc32(tokens.tobytes()):08x}"
        add_result(args, model, checkpoint, began, fingerprint=tokens_hash, data=data,
                   data_dir=data_dir, name="perplexity", images=len(tokens), **numbers, word=word,
                   settings=dict(split=split, window=window, stride=stride),
                   swapped=int(swapped.sum()))
        cells = [f"{numbers[name]:.2f}" for name in SCORES]
        table.append([split, len(tokens), *cells])
    common.print0(common.table(table, ["text", "tokens", *SCORES]))


def was_spaced(checkpoint):
    """Return whether `separate_words` made the lines of the training.

    If so, it must make the lines of an evaluation and of a prompt, too.
    Checkpoints of an earlier version do not have the field `spaced`. Their text was a text file,
    whose paragraphs `seen` names, or pydoc, or else token files.
    """
    if "spaced" in checkpoint:
        return checkpoint["spaced"]
    return bool(checkpoint["seen"]) or checkpoint["args"]["data"] == "pydoc"


def sample(model, vocab, args, device, spaced):
    """Return --prompt and the next --words words as prose. The same seed gives the same text.

    spaced: whether `separate_words` made the lines of the training; then it makes the prompt, too.
    """
    lines = args.prompt.split("\n")
    if spaced:
        lines = [separate_words(line) for line in lines]
    generator = torch.Generator(device).manual_seed(args.seed)
    # The prompt begins with an <eos>, like each line of the training, and does not end with one.
    prompt = vocab.encode_lines(["", *lines])[:-1].astype("int64")
    prompt = torch.from_numpy(prompt)[None].to(device)
    ids = model.eval().generate(prompt, args.words, generator=generator)[0, 1:]
    model.train()

    # Turn tokens into prose: "in @-@ word" becomes in-word, and "1 @,@ 000" becomes 1,000.
    text = " ".join(vocab.words[i] for i in ids.tolist()).replace(EOS, "\n")
    text = re.sub(r" @(\S)@ ", r"\1", text)
    text = re.sub(r" ([.,;:!?)\]])", r"\1", text)
    return re.sub(r" *\n[ \n]*", "\n", text).strip()


# --- the run --------------------------------------------------------------------------------------

def learning_rate(step, args):
    """Return the rate: linear warm-up, which replaces the first part of a cosine to 0."""
    if step < args.warmup:
        lowest = args.lr / (args.warmup + 1)
        return lowest + (args.lr - lowest) * step / args.warmup
    return args.lr * (1 + math.cos(math.pi * (step / args.steps))) / 2


def main():
    args, checkpoint = get_args()

    # torchrun starts `world` processes, one per GPU. Each trains on its part of every batch; only
    # rank 0 prints and writes. Without torchrun, rank is 0 and world is 1.
    rank, world, device = common.start_processes(args.device)
    if args.sample:
        checkpoint = common.load(args.sample)
        model = lm_from_checkpoint(checkpoint).to(device)
        vocab = Vocabulary(checkpoint["vocab"].split("\n"))
        common.print0(sample(model, vocab, args, device, was_spaced(checkpoint)))
        return
    if args.eval_only:
        common.use_bf16(False, device)                  # sets plain float32, without TF32
        return evaluate_only(args, rank, world, device)
    amp = common.use_bf16(args.amp, device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=amp)

    # Data.
    folder = prepare_text(args.data, args.data_dir)     # with wiki.*.tokens, written if needed
    corpus = load_corpus(folder)
    for split in SPLITS:                                # train, valid and test
        count = len(getattr(corpus, split))
        if count <= args.context:
            raise InputError(f"--context {args.context}: the {split} text in "
                             f"{args.data_dir or folder} has only {count} tokens")
    common.print0(f"{folder}: {len(corpus.train):,} training, {len(corpus.valid):,} "
                  f"valid, {len(corpus.test):,} test tokens, {len(corpus.vocab):,} words")
    vocab = corpus.vocab
    common.check_batch_size(args.batch_size, world)                 # a multiple of world

    # Model. The flags describe the model, also with --resume.
    size = LM_SIZES[args.model] | dict(context=args.context)
    config = LMConfig(vocab_size=len(vocab), **size, attn=args.attn, dropout=args.dropout,
                      rpc_layers=common.parse_layers(args.rpc_layers, size["depth"]),
                      pap=dict(n_iter=args.n_iter, lambd=args.lambd, form=args.form,
                               mu_over=args.mu_over),
                      cutoffs=parse_cutoffs(args.cutoffs, len(vocab)))
    torch.manual_seed(args.seed)
    model = LM(config).to(device)
    # With --mu_over all, a model reads the future on purpose. Otherwise later words must be masked.
    if not config.reads_the_future and depends_on_later_words(model):
        raise InputError(f"--attn {args.attn}: the output for a word depends on later words, "
                         f"expected a causal attention; mask them in attention.py if causal is "
                         f"true")
    # To freeze parameters, add a line here: model.embed.requires_grad_(False)

    # Optimiser.
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=args.lr, fused=device.type == "cuda")

    # Resume. The data, the model and the batch size must be the same as before; other flags may
    # change. Random numbers have no state: they depend on seed, step and place in the batch only.
    tokens = corpus.train.tobytes() + corpus.valid.tobytes()
    data_identity = dict(vocab="\n".join(vocab.words), train_tokens=len(corpus.train),
                         fingerprint=zlib.crc32(tokens))
    if checkpoint:
        fixed = data_identity | asdict(config) | dict(batch_size=args.batch_size)
        common.resume(checkpoint, fixed, model, optimizer)
    first = checkpoint.get("step", 0)
    metrics = checkpoint.get("metrics", {})     # printed at the end if the run is finished
    best = common.best_evaluation(checkpoint, args.out_dir)
    common.same_run(args, data_identity, first)
    seen = seen_hashes(args.data_dir)                    # for evaluations: paragraphs to leave out
    spaced = is_spaced(args.data_dir)

    # Compile the model, and average gradients over processes. `net` is trained; `model`, which has
    # the same weights, is evaluated and saved.
    compiling = common.use_compile(args.compile, device)
    if compiling and model.adaptive:            # the adaptive softmax has data-dependent shapes
        model.adaptive.nll = torch.compiler.disable(model.adaptive.nll)
    _, net = common.parallel(model, world, compiling)

    log = common.start_log(args, first, model, device, vocab_size=len(vocab),
                           train_tokens=len(corpus.train))

    # The loop. --max_steps stops it early, and does not change the schedule of --steps.
    # stop equals first if the run is finished.
    stop = max(first, min(args.steps, args.max_steps or args.steps))
    batches = train_batches(corpus.train, args, first, stop, device, rank, world)
    progress = bar(range(first, stop), "training", total=stop, initial=first,
                   unit="step")
    began = last_log = time.perf_counter()
    pending = []                                # loss and norm of each step not yet logged
    for step in progress:
        lr = learning_rate(step, args)
        for group in optimizer.param_groups:
            group["lr"] = lr

        windows = next(batches)

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
        pending.append(dict(loss=loss.detach(), grad_norm=norm))    # stays on the device

        # The step number decides when to evaluate, save and log, so all processes agree. Scheduled
        # evaluations choose best.pt; the evaluation where --max_steps stops the run does not.
        # Otherwise a run that was stopped and resumed could have another best.pt.
        done = step + 1
        scheduled = done == args.steps or done % args.eval_every == 0
        evaluating = scheduled or done == stop
        logging = evaluating or done % common.LOG_EVERY == 0

        # Log the means over the steps since the last row. This ends the run if a loss or gradient
        # norm is not finite.
        if logging:
            step_tokens = args.batch_size * args.context
            common.log_steps(log, done, pending, since=last_log, per_step=step_tokens,
                             unit="tokens", lr=lr)

        # Evaluate, and write a sample in the first process.
        if evaluating:
            with autocast:
                metrics = evaluate(model, corpus, args, rank, world)
            text = ""
            writes = args.words and not config.reads_the_future     # such a model cannot write
            if writes and rank == 0:
                text = sample(model, vocab, args, device, spaced)
            # Mean |k| and the share of nonzero entries of S in each layer, on a few windows of this
            # batch, show whether RPC acts.
            keys = key_statistics(model, windows[:8, :-1], forward=model.hidden)
            common.append_row(log, dict(step=done, eval=metrics, sample=text, **keys))
            common.print0(f"step {done:6d}  valid perplexity "
                          f"{metrics['perplexity']:.2f}  {textwrap.shorten(text, 80)}")

        # Save. A resumed run repeats what came after the last save.
        if evaluating and rank == 0:
            better = False
            if scheduled:
                better = metrics["perplexity"] < best.get("perplexity", math.inf)
            if better:
                best = dict(step=done, **metrics)
            state = dict(task="language modelling", args=vars(args), step=done,
                         model=model.state_dict(), optimizer=optimizer.state_dict(),
                         model_config=asdict(config), metrics=metrics, best=best,
                         **data_identity, seen=seen, spaced=spaced)
            if better:
                common.save(f"{args.out_dir}/best.pt", state)
            common.save(f"{args.out_dir}/last.pt", state)
        if logging:                             # the speed excludes evaluation and saving
            last_log = time.perf_counter()
            pending = []

    minutes = (time.perf_counter() - began) / 60
    common.print0(f"{args.data} {args.attn}: valid perplexity "
                  f"{metrics['perplexity']:.2f} (segment-wise), {minutes:.1f} minutes")
    if best:                                                        # in the first process
        common.print0(f"best.pt: step {best['step']}, lowest perplexity "
                      f"{best['perplexity']:.2f}")
    common.print0(f"next: python train_lm.py --eval_only {args.out_dir}")


if __name__ == "__main__":
    common.run(main)        # prints an InputError as one line
