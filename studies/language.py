"""Language at equal cost: where does the gain of RPC-Attention come from?

    python -m studies.language                                  # tables of the stored rows
    python -m studies.language --run --seeds 0 1                # train and score the missing runs
    python -m studies.language --run --seeds 2 --texts wikitext --wikitext data/wikitext
    python -m studies.language --cost                           # CPU seconds of a training step
    python -m studies.language train_lm.py --attn "symmetric x4"        # one variant by hand

Table 3 of the paper reports a lower perplexity for RPC than for symmetric attention, after the same
number of updates. This study splits the difference into parts. Each variant changes one thing: RPC
without its sparse part S, symmetric attention with larger scores, or an attention without RPC that
is trained for as much CPU time as RPC.

To continue a killed run, start the same command again. Each finished run appends one row to
studies/results/language/rows.jsonl. The plan, studies/results/language/plan.md, was fixed before
the runs and gives each outcome its meaning.
"""

import argparse
import json
import math
import platform
import resource
import runpy
import subprocess
import sys
from pathlib import Path
from statistics import mean, median

import torch

import common
from attention import ATTENTIONS, Attention, symmetric_attention
from common import InputError
from data.text import (Vocabulary, load_corpus, perplexity, pydoc_folder, random_windows,
                       read_lines, sliding_nll, token_file)
from data.words import WORD, word_swap
from lm import LM, LM_SIZES, LMConfig, lm_from_checkpoint
from studies.stats import detectable, holm, paired_t, show, show_p

RESULTS = Path(__file__).parent / "results/language"
STEPS, BATCH, CONTEXT, STRIDE = 1000, 8, 64, 16
MARGIN = 0.015                                          # nats; the paper's gain is 0.031
SHARED_FLAGS = dict(model="mini", context=CONTEXT, batch_size=BATCH, lr=2e-3, words=0,
                    device="cpu")                       # and the recipe's warm-up of 100 steps
TEXTS = {"pydoc": "1000", "wikitext": "2000,10000"}     # text: cutoffs of its adaptive softmax


# --- the variants ---------------------------------------------------------------------------------

def scaled_scores(k, v, causal, factor):
    """Symmetric attention whose scores k k^T / sqrt(D) are multiplied by `factor`."""
    return symmetric_attention(math.sqrt(factor) * k, v, causal=causal)


def symmetric_x2(q, k, v, layer):
    return scaled_scores(k, v, layer.causal, factor=2)


def symmetric_x4(q, k, v, layer):
    return scaled_scores(k, v, layer.causal, factor=4)


ATTENTIONS["symmetric x2"] = Attention(False, symmetric_x2)
ATTENTIONS["symmetric x4"] = Attention(False, symmetric_x4)
RPC = dict(attn="rpc", rpc_layers="all")
VARIANTS = {                                            # flags of train_lm.py
    "symmetric": dict(attn="symmetric"),
    "softmax": dict(attn="softmax"),
    "symmetric x2": dict(attn="symmetric x2"),
    "symmetric x4": dict(attn="symmetric x4"),
    "rpc n4": RPC | dict(n_iter=4, lambd=4.0),                      # as published, Table 3
    "rpc n4 no S": RPC | dict(n_iter=4, lambd=math.inf),            # S is empty
    "rpc n2": RPC | dict(n_iter=2, lambd=3.0),                      # as published, for all layers
    "symmetric, equal cost": dict(attn="symmetric"),                # as much CPU time as rpc n4
    "softmax, equal cost": dict(attn="softmax"),
}
EMPTY_S = "rpc n4", "rpc n4 no S"                       # this pair shows the effect of S
PAIRS = [                                               # (variant, baseline): all are tested
    ("rpc n4", "symmetric"), EMPTY_S, ("symmetric x4", "symmetric"),
    ("rpc n4", "symmetric x4"), ("rpc n4", "softmax"), ("rpc n2", "symmetric"),
    ("rpc n4", "symmetric, equal cost"), ("rpc n4", "softmax, equal cost")]


def steps_of(variant, text, costs):
    """Return the training steps of a variant.

    costs: rows of cost.jsonl. "equal cost" variants take as many steps as fit into RPC's CPU time.
    """
    if not variant.endswith("equal cost"):
        return STEPS
    plain = variant.removesuffix(", equal cost")
    row = next((row for row in costs if row["text"] == text), None)
    if row is None:
        raise InputError(f"{RESULTS}/cost.jsonl has no row for {text}; run with --cost first")
    return 10 * round(STEPS * row["ratio"]["rpc n4"] / row["ratio"][plain] / 10)


# --- cost -----------------------------------------------------------------------------------------

def cpu_seconds(who=resource.RUSAGE_SELF):
    """Return the user CPU seconds of this process, or of its finished children."""
    return resource.getrusage(who).ru_utime


def training_step(text, corpus, variant):
    """Build a variant's model and optimiser; return a function that trains one step."""
    flags = VARIANTS[variant]
    torch.manual_seed(0)
    pap = {name: flags[name] for name in ("n_iter", "lambd") if name in flags}
    model = LM(LMConfig(len(corpus.vocab), **LM_SIZES["mini"], attn=flags["attn"], pap=pap,
                        rpc_layers=range(LM_SIZES["mini"]["depth"]),
                        cutoffs=map(int, TEXTS[text].split(","))))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(number):
        windows = random_windows(corpus.train, number, BATCH, CONTEXT, seed=0)
        model(windows[:, :-1], windows[:, 1:]).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return step


def measure_cost(text, folder, rounds=20, steps=10):
    """Time training steps of all variants in turn: {text, seconds, ratio, device, ...}.

    seconds: the median user CPU seconds per step. ratio: the variant's seconds divided by the
    seconds of symmetric attention in the same round; the median over rounds. A busy machine slows
    both numbers of a round, so it hardly changes the ratio.
    """
    torch.set_num_threads(1)
    corpus = load_corpus(folder)
    variants = {name: training_step(text, corpus, name) for name in VARIANTS if "cost" not in name}
    seconds = {name: [] for name in variants}
    for i in range(rounds + 1):                         # round 0 warms up and does not count
        for name, step in variants.items():
            start = cpu_seconds()
            for number in range(steps):
                step(i * steps + number)
            seconds[name] += [(cpu_seconds() - start) / steps] * (i > 0)
    ratios = {name: median(a / b for a, b in zip(times, seconds["symmetric"]))
              for name, times in seconds.items()}
    return dict(text=text, seconds={name: round(median(x), 4) for name, x in seconds.items()},
                ratio={name: round(x, 3) for name, x in ratios.items()}, rounds=rounds,
                steps_per_round=steps, batch_size=BATCH, context=CONTEXT,
                device=common.origin(torch.device("cpu"))["hardware"], torch=torch.__version__)


# --- train and score the missing runs -------------------------------------------------------------

def read_rows(name):
    """Read the JSON lines of a file in the results folder; [] if there is no file."""
    path = RESULTS / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append_row(name, row):
    """Append one JSON line to a file in the results folder."""
    with open(RESULTS / name, "a") as f:
        f.write(json.dumps(row) + "\n")


def commit():
    """Return the commit of this code, or "no git"."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], text=True, capture_output=True,
                          cwd=Path(__file__).parent)
    return done.stdout.strip() or "no git"


def text_folder(text, wikitext):
    """Return the folder of the token files of a text. wikitext: the folder of wikitext."""
    return wikitext if text == "wikitext" else pydoc_folder()


def train(out_dir, text, folder, variant, seed, steps):
    """Train one network with train_lm.py, or continue its training."""
    flags = SHARED_FLAGS | VARIANTS[variant] | dict(
        data=text, seed=seed, steps=steps, eval_every=math.ceil(steps / 4),
        cutoffs=TEXTS[text], out_dir=out_dir)
    if text == "wikitext":
        flags["data_dir"] = folder
    if (out_dir / "last.pt").exists():
        flags = dict(resume=out_dir)
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "studies.language", "train_lm.py", *words]
    if subprocess.run(command).returncode:
        raise InputError(f"training {out_dir} failed; finished rows are kept: run again to "
                         f"continue")


def score_test_text(model, folder, vocabulary):
    """Compute perplexities of the test text, clean and attacked, as train_lm.py does.

    Returns (dict of perplexities, the word that replaces other words).
    """
    word = WORD if WORD in vocabulary else vocabulary.words[-1]
    lines = read_lines(token_file(folder, "test"))
    swapped_lines, swapped = word_swap(lines, word=word)
    kept = ~torch.tensor(swapped[1:])
    clean, attacked = vocabulary.encode_lines(lines), vocabulary.encode_lines(swapped_lines)
    sliding = sliding_nll(model, clean, CONTEXT, STRIDE)
    moved = sliding_nll(model, attacked, CONTEXT, STRIDE)
    segments = sliding_nll(model, clean, CONTEXT, CONTEXT)
    return dict(swapped=int((~kept).sum()), segment=perplexity(segments),
                sliding=perplexity(sliding), attacked=perplexity(moved),
                attacked_unswapped=perplexity(moved, kept),
                clean_unswapped=perplexity(sliding, kept)), word


def test_row(out_dir, folder):
    """Score best.pt on the test text, read the log, and return these parts of a row."""
    checkpoint = common.load(out_dir / "best.pt")
    model = lm_from_checkpoint(checkpoint)
    test, word = score_test_text(model, folder, Vocabulary(checkpoint["vocab"].split("\n")))
    log = common.read_log(out_dir / "log.jsonl")
    start, last = log[0], [row for row in log if "eval" in row][-1]
    corpus = load_corpus(folder)
    return dict(valid_segment=checkpoint["best"], best_step=checkpoint["step"],
                test=test, stride=STRIDE, word=word, device=start["hardware"],
                mean_abs_key=last["mean_abs_key"], nonzero_S=last["nonzero_S"],
                torch=start["torch"], parameters=start["parameters"],
                train_tokens=len(corpus.train), vocab_size=len(corpus.vocab))


def run(args):
    """Train and score each variant of each seed that has no row yet."""
    for seed in args.seeds:
        for text in args.texts:
            folder = text_folder(text, args.wikitext)
            for variant in VARIANTS:
                rows = [row for row in read_rows("rows.jsonl")
                        if (row["text"], row["seed"]) == (text, seed)]
                if any(row["variant"] == variant for row in rows):
                    continue
                here = common.origin(torch.device("cpu"))["hardware"]
                if any(row["device"] != here for row in rows):
                    raise InputError(f"seed {seed} of {text} has rows of {rows[0]['device']}, and "
                                     f"this is {here}: pairs need one processor; choose another "
                                     f"seed, or delete the stored rows of this seed")
                steps = steps_of(variant, text, read_rows("cost.jsonl"))
                name = variant.replace(", ", "_").replace(" ", "_")
                out_dir = args.out_dir / f"{text}_{name}_s{seed}"
                start = cpu_seconds(resource.RUSAGE_CHILDREN)
                train(out_dir, text, folder, variant, seed, steps)
                append_row("rows.jsonl", dict(
                    text=text, variant=variant, seed=seed, steps=steps, batch_size=BATCH,
                    context=CONTEXT, **test_row(out_dir, folder),
                    train_user_s=round(cpu_seconds(resource.RUSAGE_CHILDREN) - start, 1),
                    python=platform.python_version(), commit=commit()))


# --- tables ---------------------------------------------------------------------------------------

MEASURES = {                                            # nats per token of the test text
    "clean": lambda row: math.log(row["test"]["sliding"]),
    "attacked": lambda row: math.log(row["test"]["attacked"]),
    "attack effect": lambda row: math.log(row["test"]["attacked_unswapped"]
                                          / row["test"]["clean_unswapped"]),
}


def gaps(rows, text, measure, variant, baseline):
    """Compute variant minus baseline, in nats per token, for each seed that has both."""
    value = {(row["variant"], row["seed"]): MEASURES[measure](row) for row in rows
             if row["text"] == text}
    seeds = sorted(seed for name, seed in value if name == variant and (baseline, seed) in value)
    return [value[variant, seed] - value[baseline, seed] for seed in seeds]


def differences(rows, text, measure="clean"):
    """Compute {(variant, baseline): stats.Difference} for all pairs."""
    found = {pair: gaps(rows, text, measure, *pair) for pair in PAIRS}
    return {pair: paired_t(values) for pair, values in found.items() if values}


def corrected(found):
    """Correct the p values of `differences` as Holm does; nan below three seeds: no test."""
    return holm({pair: d.p if d.n > 2 else math.nan for pair, d in found.items()})


def variants_table(rows, text, costs):
    """Write Markdown: one line per variant, means over seeds."""
    ratio = next((row["ratio"] for row in costs if row["text"] == text), {})
    body = []
    for name in VARIANTS:
        of = [row for row in rows if (row["text"], row["variant"]) == (text, name)]
        if of:
            steps, values = of[0]["steps"], {m: mean(map(f, of)) for m, f in MEASURES.items()}
            cost = steps / STEPS * ratio.get(name.removesuffix(", equal cost"), math.nan)
            body.append([name, f"{steps:,}", f"{cost:.2f}", len(of), f"{values['clean']:.3f}",
                         f"{math.exp(values['clean']):.1f}", f"{math.exp(values['attacked']):.1f}",
                         f"{values['attack effect']:.3f}"])
    return common.table(body, ["variant", "steps", "CPU time", "seeds", "nats", "perplexity",
                               "attacked", "attack effect, nats"])


def pairs_table(rows, text):
    """Write Markdown: one line per pair; bold: significant after Holm's correction."""
    clean, others = differences(rows, text), [differences(rows, text, m) for m in
                                              ("attacked", "attack effect")]
    p = corrected(clean)
    body = [[f"{variant} minus {baseline}", d.n, show(d, 3, p[variant, baseline] < 0.05),
             show_p(p[variant, baseline]),
             f"{detectable(d.error, d.df, len(PAIRS)):.3f}" if d.n > 2 else "",
             *(show(other[variant, baseline], 3) for other in others)]
            for (variant, baseline), d in clean.items()]
    return common.table(body, ["difference, nats per token", "seeds", "clean", "p, Holm",
                               "found with 80 % power", "attacked", "attack effect"])


def outcomes(rows, text):
    """Apply the plan's table: {(variant, baseline): "better", "worse", "equal" or "open"}.

    better: the variant has significantly fewer nats (p below .05 after Holm's correction). equal:
    the 95 % interval lies within MARGIN. A pair can be both; then "better" or "worse" wins, except
    for the pair EMPTY_S, which is "equal". Pairs with fewer than three seeds have no outcome.
    """
    found = differences(rows, text)
    p = corrected(found)

    def outcome(pair, d):
        within = max(abs(d.low), abs(d.high)) < MARGIN
        if p[pair] < 0.05 and not (within and pair == EMPTY_S):
            return "better" if d.mean < 0 else "worse"
        return "equal" if within else "open"
    return {pair: outcome(pair, d) for pair, d in found.items() if d.n > 2}


def report(rows, costs):
    """Write Markdown: the tables of each text."""
    parts = []
    for text in TEXTS:
        if differences(rows, text):
            judged = outcomes(rows, text)
            parts += [f"## {text}", variants_table(rows, text, costs), pairs_table(rows, text),
                      "\n".join(f"- {a} minus {b}: {judged[a, b]}" for a, b in judged)
                      or "No outcomes below three seeds."]
    devices = sorted({row["device"] for row in rows})
    return "\n\n".join([*parts, f"Processors: {'; '.join(devices)}."]) if parts else "No pairs yet."


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0].endswith(".py"):        # run this script with the new ATTENTIONS
        sys.argv = argv
        return runpy.run_path(argv[0], run_name="__main__")
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--run", action="store_true", help="train and score runs that have no row")
    p.add_argument("--cost", action="store_true", help="measure the CPU time of a training step")
    p.add_argument("--seeds", nargs="+", type=int, default=[0],
                   help="seeds to train with --run (default: 0)")
    p.add_argument("--texts", nargs="+", choices=TEXTS, default=[*TEXTS],
                   help="texts to train on (default: all)")
    p.add_argument("--wikitext", default="data/wikitext", help="folder of the small WikiText")
    p.add_argument("--out_dir", type=Path, default=Path("out/language"),
                   help="folder for checkpoints (default: out/language)")
    args = p.parse_args(argv)
    if args.cost:
        for text in args.texts:
            folder = text_folder(text, args.wikitext)
            append_row("cost.jsonl", measure_cost(text, folder) | dict(commit=commit()))
    if args.run:
        run(args)
    print(report(read_rows("rows.jsonl"), read_rows("cost.jsonl")))


if __name__ == "__main__":
    common.run(main)
