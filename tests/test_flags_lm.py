"""Every flag of train_lm.py does what it says. A run with every flag away from its default equals,
in log and weights, a plain loop of torch's own parts over the words of the files; and each flag
alone changes what the table says, and nothing else."""

import math
import random
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import common
import lm
import train_lm
from data.rng import uniform
from lm import LM, LMConfig


@pytest.fixture(autouse=True)
def one_thread_an_empty_folder_and_a_small_paper(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny = dict(context=24, embed_dim=16, depth=3, num_heads=2, mlp_dim=40)
    monkeypatch.setitem(lm.SIZES, "paper", tiny)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    make_text("text", 0)
    yield
    torch.set_num_threads(threads)


def make_text(folder, seed):
    """WikiText's layout; the words and how often each comes are the same for every seed."""
    Path(folder).mkdir()
    for split, count in (("train", 40), ("valid", 5), ("test", 6)):
        rng = random.Random(count)
        lines = [f" the {rng.choice('cat dog cow hen'.split())} of {rng.choice('ann bob'.split())} saw "
                 f"{rng.randint(1, 9)} @-@ year old <unk> , and it ran . \n \n" for _ in range(count)]
        random.Random(seed).shuffle(lines)
        text = "".join(lines).split(" ")
        if split == "valid":
            rng.shuffle(text)                                        # learning the order makes it worse
        Path(folder, f"wiki.{split}.tokens").write_text(" ".join(text) + " \n")


def words(flags):
    """{flag or setting: value} as on the command line; True and False are --flag and --no-flag."""
    for name, value in flags.items():
        if name in train_lm.SETTINGS:
            yield from ("--set", f"{name}={value}")
        elif value is True or value is False:
            yield f"--{name}" if value else f"--no-{name}"
        else:
            yield from (f"--{name}", str(value))


def call(function, **flags):
    before = sys.argv
    sys.argv = ["train_lm.py", *words(flags)]
    try:
        return function()
    finally:
        sys.argv = before


def train(**flags):
    """Run main() with these flags. Returns the rows of its log and its checkpoint."""
    call(train_lm.main, **flags)
    rows = common.read_log(Path(flags["out_dir"], "log.jsonl"))
    return rows, common.read_checkpoint(flags["out_dir"])


def defaults(**flags):
    """What the flags are when only these are given."""
    return vars(call(train_lm.get_args, **flags))


# --- the recipe as a plain loop -------------------------------------------------------------------

def read_words(split):
    return Path("text", f"wiki.{split}.tokens").read_text().replace("\n", " <eos> ").split()


def plain_sample(f, model, vocab):
    """--prompt and --words more, drawn one by one, as text."""
    generator = torch.Generator().manual_seed(f.seed)
    ids = torch.tensor([[vocab.index(word) for word in ["<eos>", *f.prompt.split()]]])
    for _ in range(f.words):
        log_p = model.log_probs(model.hidden(ids[:, -f.context:]))[:, -1]
        p = (log_p / f.temperature).softmax(-1)
        ids = torch.cat([ids, torch.multinomial(p, 1, generator=generator)], 1)
    text = " ".join(vocab[i] for i in ids[0, 1:])
    text = text.replace("<eos>", "\n").replace(" @-@ ", "-")
    for mark in ",.":
        text = text.replace(f" {mark}", mark)
    return re.sub(r"\s*\n\s*", "\n", text).strip()


@torch.no_grad()
def evaluated(f, model, vocab, valid):
    """Perplexity of the text cut into pieces, a sample, and what the keys were like."""
    model.eval()
    nats = []
    for i in range(0, len(valid) - 1, f.context):
        x, y = valid[i:i + f.context][:len(valid) - 1 - i], valid[i + 1:i + 1 + f.context]
        log_p = model.log_probs(model.hidden(x[None]))[0]
        nats += F.nll_loss(log_p, y, reduction="none").tolist()
    windows = valid[:len(valid) // f.context * f.context].view(-1, f.context)[:8]
    keys = common.key_statistics(model, model.hidden, windows)
    text = plain_sample(f, model, vocab)
    model.train()
    return dict(eval=dict(perplexity=math.exp(np.mean(nats))), sample=text, **keys)


def plain_loop(f):
    """The recipe, with flags f. Returns the log, the last model and the weights of the best."""
    counts = Counter(read_words("train"))
    del counts["<eos>"]
    vocab = ["<eos>", *sorted(counts, key=lambda word: -counts[word])]
    tokens, valid = (torch.tensor([vocab.index(w) for w in read_words(s)]) for s in ("train", "valid"))
    torch.manual_seed(f.seed)
    model = LM(LMConfig(len(vocab), f.context, 16, 3, 2, 40, attn="rpc", rpc_layers=(0, 2), n_iter=3,
                        lambd=0.3, form="paper", mu="token", norm="pre", dropout=0.2, cutoffs=(6, 15)))
    optimizer = torch.optim.Adam(model.parameters(), lr=f.lr, betas=(0.9, 0.999), eps=1e-8)
    rows, pending, best, lowest = [], [], None, math.inf
    for step in range(f.max_steps):
        lr = f.lr * (1 + math.cos(math.pi * step / f.steps)) / 2
        if step < f.warmup:
            lr = f.lr * (step + 1) / (f.warmup + 1)
        optimizer.param_groups[0]["lr"] = lr

        # windows: two random numbers each, of 24 bits
        u = uniform(torch.arange(f.batch_size), 2, f.seed, 70, step).double()
        starts = ((u[:, 0] + u[:, 1] / 2 ** 24) * (len(tokens) - f.context)).long().tolist()
        windows = torch.stack([tokens[i:i + f.context + 1] for i in starts])
        torch.manual_seed(hash((f.seed, step, 0)) % 2 ** 63)                      # dropout masks
        loss = 0.0
        for part in windows.chunk(f.accum):
            log_p = model.log_probs(model.hidden(part[:, :-1]))
            part = F.nll_loss(log_p.flatten(0, 1), part[:, 1:].flatten()) / f.accum
            part.backward()
            loss += part.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), f.clip).item()
        optimizer.step()
        optimizer.zero_grad()

        step += 1
        pending.append((loss, norm))
        evaluate = step == f.max_steps or step % f.eval_every == 0
        if evaluate or step % f.log_every == 0 or step % f.save_every == 0:
            loss, norm = np.mean(pending, 0)
            rows.append(dict(step=step, loss=loss, grad_norm=norm, lr=lr))
            pending = []
        if evaluate:
            rows.append(dict(step=step, **evaluated(f, model, vocab, valid)))
            if rows[-1]["eval"]["perplexity"] < lowest:
                lowest = rows[-1]["eval"]["perplexity"]
                best = step, {name: w.clone() for name, w in model.state_dict().items()}
    return rows, model, best, vocab


# Every flag and setting is away from its default and from its recipe, but LEFT_OUT.
FLAGS = dict(data="wikitext", data_dir="text", model="paper", context=12, rpc_layers="0,2", n_iter=3,
             lambd=0.3, form="paper", mu="token", norm="pre", dropout=0.2, cutoffs="6,15", steps=20,
             batch_size=6, accum=2, lr=0.05, warmup=3, clip=0.3, words=7, prompt="the cat", seed=5,
             temperature=0.8, device="cpu", max_steps=11, log_every=3, eval_every=4, save_every=5,
             out_dir="a")
LEFT_OUT = {"attn", "amp", "compile", "resume", "sample"}            # in the table or test_train_lm


def assert_close(row, expected):
    """A row of the log beside the loop's, numbers within float noise."""
    assert {k for k in row if k != "tokens_per_s"} == set(expected)
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_close(row[key], {str(k): v for k, v in value.items()})
        elif isinstance(value, str):
            assert row[key] == value
        else:
            noise = 1.1e-4 if isinstance(value, list) else 1e-9                  # lists are rounded
            assert row[key] == pytest.approx(value, rel=5e-5, abs=noise), key


def test_every_flag_is_away_from_its_default():
    usual = defaults()
    wikitext = defaults(data="wikitext", data_dir="text")
    for name, value in FLAGS.items():
        assert str(usual[name]) != str(value), name
        assert str(wikitext[name]) != str(value) or name in ("data", "data_dir"), name
    assert set(usual) == {*FLAGS, *LEFT_OUT}


def test_a_run_equals_the_plain_loop(monkeypatch):
    saved, save = [], common.save_checkpoint

    def noting(path, checkpoint):
        saved.append((Path(path).name, checkpoint["step"]))
        save(path, checkpoint)
    monkeypatch.setattr(common, "save_checkpoint", noting)
    rows, checkpoint = train(**FLAGS)
    expected, model, (best, weights), vocab = plain_loop(SimpleNamespace(**FLAGS))
    for row, what in zip(rows[1:], expected, strict=True):
        assert_close(row, what)
    assert checkpoint["vocab"].split("\n") == vocab
    last = [step for name, step in saved if name == "last.pt"]
    assert last == [4, 5, 8, 10, 11] and max(s for n, s in saved if n == "best.pt") == best
    lowest = common.read_checkpoint("a/best.pt")
    for got, want in ((checkpoint["model"], model.state_dict()), (lowest["model"], weights)):
        assert got.keys() == want.keys()
        for name, w in got.items():
            torch.testing.assert_close(w, want[name], rtol=0, atol=2e-5, msg=lambda m: f"{name}: {m}")


# --- a flag changes what it says and nothing else -------------------------------------------------

BASE = dict(data="wikitext", data_dir="text", model="mini", context=8, lambd=0.3, batch_size=4,
            steps=4, lr=1e-3, words=6, warmup=0, clip=0, dropout=0, log_every=1, eval_every=2,
            out_dir="a")
RUN = {"loss", "norm", "weights", "score"}                           # from the first step on
LATER = {"weights", "score"}                                         # after the first step
COUNT = {"logged", "evaluated", "saved", "batches"}                  # another number of steps
TABLE = {
    "data": ("folder", {"recipe"}),
    "data_dir": ("other", RUN),
    "model": ("paper", RUN | {"config"}),
    "context": (12, RUN | {"config", "batches"}),
    "attn": ("symmetric", RUN | {"config"}),
    "rpc_layers": ("1", RUN | {"config"}),
    "n_iter": (5, RUN | {"config"}),
    "lambd": (0.1, RUN | {"config"}),
    "form": ("paper", RUN | {"config"}),
    "mu": ("token", RUN | {"config"}),
    "norm": ("pre", RUN | {"config"}),
    "dropout": (0.5, RUN | {"config"}),
    "cutoffs": ("6,15", RUN | {"config"}),
    "steps": (5, LATER | COUNT | {"lr"}),
    "batch_size": (8, RUN | {"batches"}),
    "accum": (2, {"batches"}),
    "lr": (2e-3, LATER | {"lr"}),
    "warmup": (2, LATER | {"lr"}),
    "clip": (0.1, LATER),
    "words": (20, {"sample"}),
    "prompt": ("bob saw", {"sample"}),
    "temperature": (0.1, {"sample"}),
    "seed": (1, RUN),
    "device": ("cpu", {"asked for"}),
    "amp": (True, RUN),
    "compile": (True, {"compiled"}),
    "out_dir": ("b", {"folder"}),
    "max_steps": (3, LATER | COUNT),
    "log_every": (3, {"logged", "loss", "norm"}),
    "eval_every": (1, {"evaluated", "saved"}),
    "save_every": (1, {"saved"}),
}


def observe(**flags):
    """Run main(); what can be seen of it, by name."""
    seen = dict(saved=set(), batches=[], compiled=0)
    with pytest.MonkeyPatch.context() as patch:
        real = dict(setup=common.setup, save=common.save_checkpoint, forward=LM.forward,
                    normal=torch.nn.init.normal_)

        def setup(device):
            seen["asked for"] = device
            return real["setup"]("cpu")

        def save(path, checkpoint):
            if Path(path).name == "last.pt":
                seen["saved"].add(checkpoint["step"])
            seen["folder"] = str(Path(path).parent)
            real["save"](path, checkpoint)

        def forward(model, tokens, targets):
            seen["batches"].append(tuple(tokens.shape))
            return real["forward"](model, tokens, targets)

        def compiled(model):
            def call(tokens, targets):
                seen["compiled"] += 1
                return model(tokens, targets)
            return call
        def large(weight, mean=0.0, std=1.0):                              # keys reach the threshold
            return real["normal"](weight, mean, 10 * std)
        patch.setattr(torch.nn.init, "normal_", large)
        patch.setattr(common, "setup", setup)
        patch.setattr(common, "save_checkpoint", save)
        patch.setattr(LM, "forward", forward)
        patch.setattr(torch, "compile", compiled)
        rows, checkpoint = train(**flags)

    steps = [row for row in rows if "loss" in row]
    last = [row for row in rows if "eval" in row][-1]
    names = "embed.weight", "blocks.1.attn.qkv.weight"
    return dict(seen, config=checkpoint["model_config"], recipe=checkpoint["args"]["data"],
                loss=steps[0]["loss"], norm=steps[0]["grad_norm"],
                lr=[row["lr"] for row in steps if row["step"] in (2, 3)][:1],
                weights=[checkpoint["model"][name] for name in names], sample=last["sample"],
                score=last["eval"]["perplexity"], logged=[row["step"] for row in steps],
                evaluated=[row["step"] for row in rows if "eval" in row])


def same(a, b):
    """Equal but for float noise."""
    if isinstance(a, float):
        return a == pytest.approx(b, rel=1e-5)
    if isinstance(a, list) and a and torch.is_tensor(a[0]):
        return all(x.shape == y.shape and (x - y).abs().max() < 1e-4 for x, y in zip(a, b))
    return a == b


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("base"))
        make_text("text", 0)
        return observe(**BASE)


@pytest.mark.parametrize("flag", TABLE)
def test_a_flag_changes_what_the_table_says(base, flag):
    make_text("other", 1)
    value, changes = TABLE[flag]
    seen = observe(**{**BASE, flag: value})
    changed = {name for name in base if not same(base[name], seen[name])}
    if "weights" in changed:
        changed -= {"sample"}                                        # it may, it need not
    if flag == "log_every":
        changed -= {"lr"}                                            # of another step
    assert changed == changes


def test_the_tables_name_every_flag():
    assert {*TABLE, "resume", "sample"} == set(defaults())


def test_a_resumed_run_keeps_what_makes_its_model_its_batches_and_its_schedule():
    model = {flag for flag, (_, changes) in TABLE.items() if "config" in changes}
    assert set(train_lm.FIXED) == model | {"data", "batch_size", "steps", "seed"}


@pytest.mark.parametrize("name, steps, eval_every", [
    ("pydoc", 1000, 200), ("wikitext", 2000, 250), ("folder", 2000, 250)])
def test_the_recipes_of_small_texts_are_those_of_the_results(name, steps, eval_every):
    recipe = dict(model="mini", context=64, attn="rpc", rpc_layers="0", n_iter=4, lambd=4.0,
                  form="released", mu="running", norm="post", dropout=0.1, cutoffs="none",
                  steps=steps, batch_size=16, lr=2e-3, warmup=100, clip=0.25,
                  eval_every=eval_every, seed=0)
    got = defaults(data=name, data_dir="text")
    assert {k: v for k, v in got.items() if k in recipe} == recipe
    mini = dict(context=64, embed_dim=64, depth=4, num_heads=8, mlp_dim=256)
    assert lm.SIZES["mini"] == mini


def test_the_default_is_the_papers_recipe():
    """lmtool's small standard transformer on WikiText-103, as the paper trains it."""
    recipe = dict(model="paper", context=256, attn="rpc", rpc_layers="0-3", n_iter=4, lambd=4.0,
                  form="released", mu="running", norm="post", dropout=0.1,
                  cutoffs="20000,40000,200000", steps=500_000, batch_size=96, lr=2.5e-4, warmup=2000,
                  clip=0.25, seed=0)
    lm.SIZES["paper"]["context"] = 256                               # as it is: see test_lm.py
    got = defaults(data="wikitext103", data_dir="text")
    assert {k: v for k, v in got.items() if k in recipe} == recipe
