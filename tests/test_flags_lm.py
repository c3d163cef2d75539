"""Every flag of train_lm.py does what it says. A run with every flag away from its default equals, in log and
weights, a plain loop over the words of the files; and each flag alone changes what the table says, no more."""

import math
import random
import re
from collections import Counter
from functools import partial
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
from runs import COUNT, LATER, RUN, assert_close, call, changed, observe, rows

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture(autouse=True)
def a_small_paper(alone, monkeypatch):
    monkeypatch.setitem(lm.SIZES, "paper", dict(context=24, embed_dim=16, depth=3, num_heads=2, mlp_dim=40))
    make_text("text", 0)


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
            rng.shuffle(text)                                                    # learning the order makes it worse
        Path(folder, f"wiki.{split}.tokens").write_text(" ".join(text) + " \n")


# --- the recipe as a plain loop ------------------------------------------------------------------------------------

def read_words(split):
    return Path("text", f"wiki.{split}.tokens").read_text().replace("\n", " <eos> ").split()


def plain_sample(f, model, vocab):
    """--prompt and --words more, drawn one by one, as text."""
    generator = torch.Generator().manual_seed(f.seed)
    ids = torch.tensor([[vocab.index(word) for word in ["<eos>", *f.prompt.split()]]])
    for _ in range(f.words):
        p = (model.log_probs(model.hidden(ids[:, -f.context:]))[:, -1] / f.temperature).softmax(-1)
        ids = torch.cat([ids, torch.multinomial(p, 1, generator=generator)], 1)
    text = " ".join(vocab[i] for i in ids[0, 1:]).replace("<eos>", "\n").replace(" @-@ ", "-")
    return re.sub(r"\s*\n\s*", "\n", text.replace(" ,", ",").replace(" .", ".")).strip()


@torch.no_grad()
def evaluated(f, model, vocab, valid):
    """Perplexity of the text cut into pieces, a sample, and what the keys were like."""
    model.eval()
    nats = []
    for i in range(0, len(valid) - 1, f.context):
        x, y = valid[i:i + f.context][:len(valid) - 1 - i], valid[i + 1:i + 1 + f.context]
        nats += F.nll_loss(model.log_probs(model.hidden(x[None]))[0], y, reduction="none").tolist()
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
    model = LM(LMConfig(len(vocab), f.context, 16, 3, 2, 40, attn="rpc", rpc_layers=(0, 2), n_iter=3, lambd=0.3,
                        form="paper", mu_over="token", norm="pre", dropout=0.2, cutoffs=(6, 15)))
    optimizer = torch.optim.Adam(model.parameters(), lr=f.lr, betas=(0.9, 0.999), eps=1e-8)
    rows, pending, best, lowest = [], [], None, math.inf
    for step in range(f.max_steps):
        lr = f.lr * (1 + math.cos(math.pi * step / f.steps)) / 2
        if step < f.warmup:
            lr = f.lr * (step + 1) / (f.warmup + 1)
        optimizer.param_groups[0]["lr"] = lr

        u = uniform(torch.arange(f.batch_size), 2, f.seed, 70, step).double()       # two numbers of 24 bits a window
        starts = ((u[:, 0] + u[:, 1] / 2 ** 24) * (len(tokens) - f.context)).long().tolist()
        windows = torch.stack([tokens[i:i + f.context + 1] for i in starts])
        torch.manual_seed(hash((f.seed, step, 0)) % 2 ** 63)                                       # dropout masks
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


# Every flag is away from its default and from its recipe, but LEFT_OUT: in the table or in test_train_lm.py.
FLAGS = dict(data="wikitext", data_dir="text", model="paper", context=12, rpc_layers="0,2", n_iter=3, lambd=0.3,
             form="paper", mu_over="token", norm="pre", dropout=0.2, cutoffs="6,15", steps=20, batch_size=6, accum=2,
             lr=0.05, warmup=3, clip=0.3, words=7, prompt="the cat", seed=5, temperature=0.8, device="cpu",
             max_steps=11, log_every=3, eval_every=4, save_every=5, out_dir="a")
LEFT_OUT = {"attn", "amp", "compile", "resume", "sample"}


def defaults(**flags):
    return vars(call(train_lm.get_args, **flags))


def test_every_flag_is_away_from_its_default():
    usual, wikitext = defaults(), defaults(data="wikitext", data_dir="text")
    assert not [name for name in FLAGS if str(usual[name]) == str(FLAGS[name])]
    assert {name for name in FLAGS if str(wikitext[name]) == str(FLAGS[name])} == {"data", "data_dir"}
    assert set(usual) == {*FLAGS, *LEFT_OUT} == {*TABLE, "resume", "sample"}


def test_a_run_equals_the_plain_loop(monkeypatch):
    saved, save = [], common.save

    def noting(path, checkpoint):
        saved.append((Path(path).name, checkpoint["step"]))
        save(path, checkpoint)
    monkeypatch.setattr(common, "save", noting)
    call(train_lm.main, **FLAGS)
    checkpoint, lowest = common.load("a"), common.load("a/best.pt")
    expected, model, (best, weights), vocab = plain_loop(SimpleNamespace(**FLAGS))
    for row, what in zip(rows("a"), expected, strict=True):
        assert_close(row, what)
    assert checkpoint["vocab"].split("\n") == vocab
    assert [step for name, step in saved if name == "last.pt"] == [4, 5, 8, 10, 11]
    assert max(step for name, step in saved if name == "best.pt") == best
    for got, want in ((checkpoint["model"], model.state_dict()), (lowest["model"], weights)):
        assert got.keys() == want.keys()
        for name, w in got.items():
            torch.testing.assert_close(w, want[name], rtol=0, atol=2e-5, msg=lambda m: f"{name}: {m}")


# --- a flag changes what it says and nothing else --------------------------------------------------------------------

BASE = dict(data="wikitext", data_dir="text", model="mini", context=8, lambd=0.3, batch_size=4, steps=4, lr=1e-3,
            words=6, warmup=0, clip=0, dropout=0, log_every=1, eval_every=2, out_dir="a")
CONFIG = RUN | {"config"}
TABLE = {
    "data": ("folder", {"recipe"}), "data_dir": ("other", RUN), "model": ("paper", CONFIG),
    "context": (12, CONFIG | {"batches"}), "attn": ("symmetric", CONFIG), "rpc_layers": ("1", CONFIG),
    "n_iter": (5, CONFIG), "lambd": (0.1, CONFIG), "form": ("paper", CONFIG), "mu_over": ("token", CONFIG),
    "norm": ("pre", CONFIG), "dropout": (0.5, CONFIG), "cutoffs": ("6,15", CONFIG),
    "steps": (5, LATER | COUNT | {"lr"}), "batch_size": (8, RUN | {"batches"}), "accum": (2, {"batches"}),
    "lr": (2e-3, LATER | {"lr"}), "warmup": (2, LATER | {"lr"}), "clip": (0.1, LATER), "words": (20, {"sample"}),
    "prompt": ("bob saw", {"sample"}), "temperature": (0.1, {"sample"}), "seed": (1, RUN),
    "device": ("cpu", {"asked for"}), "amp": (True, RUN), "compile": (True, {"compiled"}),
    "out_dir": ("b", {"folder"}), "max_steps": (3, LATER | COUNT), "log_every": (2, {"logged", "loss", "norm"}),
    "eval_every": (1, {"evaluated", "saved"}), "save_every": (1, {"saved"}),
}


def look(**flags):
    """What a run did; its first weights are large, so that keys reach the threshold."""
    normal = torch.nn.init.normal_
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.init, "normal_", lambda weight, mean=0.0, std=1.0: normal(weight, mean, 10 * std))
        return observe(train_lm, LM, ("embed.weight", "blocks.1.attn.qkv.weight"),
                       lambda row: row["eval"]["perplexity"], **flags)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("base"))
        make_text("text", 0)
        return look(**BASE)


@pytest.mark.parametrize("flag", TABLE)
def test_a_flag_changes_what_the_table_says(base, flag):
    make_text("other", 1)
    value, expected = TABLE[flag]
    seen = look(**{**BASE, flag: value})
    found = changed(base, seen, noise=1e-4)
    assert found - ({"sample"} if "weights" in found else set()) == expected                  # it may, it need not
    if flag == "lr":
        assert seen["lr"][0] == pytest.approx(2 * base["lr"][0], rel=1e-9)


def test_a_resumed_run_keeps_what_makes_its_model_its_batches_and_its_schedule():
    model = {flag for flag, (_, expected) in TABLE.items() if "config" in expected}
    assert set(train_lm.FIXED) == model | {"data", "batch_size", "steps", "seed"}


# --- recipes ---------------------------------------------------------------------------------------------------------

OURS = dict(attn="rpc", n_iter=4, lambd=4.0, form="released", mu_over="seen", norm="post", dropout=0.1, clip=0.25,
            seed=0)
SMALL = dict(OURS, model="mini", context=64, rpc_layers="0", cutoffs="none", batch_size=16, lr=2e-3, warmup=100)
PAPER = dict(OURS, model="paper", context=256, rpc_layers="0-3", cutoffs="20000,40000,200000", steps=500_000,
             batch_size=96, lr=2.5e-4, warmup=2000)


@pytest.mark.parametrize("name, recipe", [
    ("pydoc", dict(SMALL, steps=1000, eval_every=200)), ("wikitext", dict(SMALL, steps=2000, eval_every=250)),
    ("folder", dict(SMALL, steps=2000, eval_every=250)), ("wikitext103", PAPER)])
def test_recipes_are_the_papers_and_those_of_the_results(name, recipe):
    """The paper's is lmtool's small standard transformer on WikiText-103."""
    lm.SIZES["paper"]["context"] = 256                                                   # as it is: see test_lm.py
    assert {k: v for k, v in defaults(data=name, data_dir="text").items() if k in recipe} == recipe
    assert lm.SIZES["mini"] == dict(context=64, embed_dim=64, depth=4, num_heads=8, mlp_dim=256)
