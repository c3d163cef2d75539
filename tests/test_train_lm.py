"""Claims about train_lm.py: runs start, stop, go on and spread over processes without changing a
number; bad input ends in one line and loses nothing; and about robust/words.py: what is scored is
what a plain loop over the files gives. The real script, small settings."""

import argparse
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import common
import train_lm
from processes import Started, group
from data import text as data_text, text as prose
from robust.words import load_texts, score, word_swap
from lm import LM, lm_from_checkpoint

SCRIPT = Path(train_lm.__file__).resolve()
SMALL = ("--data_dir text --context 16 --batch_size 8 --steps 30 --words 5 "
         "--set warmup=5 log_every=1 eval_every=100").split()


def sentences(count, seed):
    """Lines of a tiny grammar in which much can be predicted, laid out like WikiText."""
    rng, lines = random.Random(seed), []
    for i in range(count):
        if i % 10 == 0:
            lines += ["", f"= {rng.choice('Winter Summer Autumn Spring'.split())} =", ""]
        who, what = rng.choice("cat dog bird fish horse".split()), rng.choice("red green blue small large".split())
        old = rng.randint(2, 9)
        lines.append(f"the {what} {who} saw {old} @-@ year old {who} s , and AAA <unk> the {what} {who} .")
    return "".join(f" {line} \n" if line else " \n" for line in lines)


@pytest.fixture(autouse=True)
def one_thread_and_a_folder_with_a_small_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_text("text")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)                                 # as the other processes, so that results agree bit for bit
    yield
    torch.set_num_threads(threads)


def write_text(folder, seed=0, **texts):
    Path(folder).mkdir(exist_ok=True)
    for i, (split, count) in enumerate(dict(train=100, valid=8, test=6).items()):
        Path(folder, f"wiki.{split}.tokens").write_text(texts.get(split, sentences(count, 10 * seed + i)))


def flags(*parts):
    return [flag for part in parts for flag in (part.split() if isinstance(part, str) else part)]


def train(*parts):
    """Run main() in this process."""
    argv, sys.argv = sys.argv, ["train_lm.py", *flags(*parts)]
    try:
        train_lm.main()
    finally:
        sys.argv = argv


def refused(*parts):
    """Run main() as the script does; returns the one line it must end in."""
    with pytest.raises(SystemExit) as e:
        argv, sys.argv = sys.argv, ["train_lm.py", *flags(*parts)]
        try:
            common.run(train_lm.main)
        finally:
            sys.argv = argv
    return e.value.code


def log(folder, what="loss"):
    """{step: value} of the rows that have it; no step may be there twice."""
    rows = [json.loads(line) for line in Path(folder, "log.jsonl").read_text().splitlines()]
    rows = [(row["step"], row[what]) for row in rows if what in row]
    assert len(dict(rows)) == len(rows), "a step is logged twice"
    return dict(rows)


def scored(folder, data_dir="text", window=16, stride=16, seed=0, name="best.pt", **how):
    """The rows of `score` for a run's weights, and the word that was swapped in."""
    checkpoint = common.read_checkpoint(Path(folder, name))
    vocab = data_text.stored_vocabulary(checkpoint)
    texts, word = load_texts(data_dir, vocab, window, seed)
    model = lm_from_checkpoint(checkpoint)
    return [dict(split=text.split, tokens=len(text.clean), **score(model, text, window, stride, **how))
            for text in texts], word


def assert_same_run(a, b, *names):
    assert log(a) == log(b) and log(a, "grad_norm") == log(b, "grad_norm") and log(a, "eval") == log(b, "eval")
    for name in names or ("last.pt", "best.pt"):
        x, y = (common.read_checkpoint(Path(folder, name)) for folder in (a, b))
        assert all(torch.equal(x["model"][k], y["model"][k]) for k in x["model"]) and x["best"] == y["best"]
        for p, state in (x["optimizer"] or {"state": {}})["state"].items():
            assert all(torch.equal(state[k], y["optimizer"]["state"][p][k]) for k in state)


def assert_same_rows(a, b, rel):
    for x, y in zip(a, b, strict=True):
        y = dict(y)
        assert x.pop("split") == y.pop("split") and x == pytest.approx(y, rel=rel)


# --- a run and what it leaves -----------------------------------------------------------------------------------------

def test_the_default_run_ends_in_its_result_and_needs_no_flag(monkeypatch, capsys):
    """Without flags but --max_steps; pydoc's documents are made fewer for the time it takes."""
    text = "The function returns a list of words.\n\nIt takes  one argument, n.\n" * 9
    topics = {f"topic {i}": [(f"name{i}", text)] for i in range(60)}
    monkeypatch.setattr(prose, "pydoc_documents", lambda: topics)
    train("--max_steps 2")
    lines = capsys.readouterr().out.strip().splitlines()
    assert re.match(r"out/cache/pydoc_3\S+: \d{3} paragraphs, .* training, .* unknown: \d\.\d % of", lines[0])
    assert lines[1].startswith("recipe pydoc: rpc LM-mini, 1000 steps of 16 x 64 tokens")
    rows, word = scored("out/pydoc_rpc", prose.text_folder("pydoc", None), 64)
    valid, test = rows
    assert lines[-1] == (f"pydoc rpc: valid perplexity {valid['segment']:.2f} (segment-wise) with the weights of "
                         f"step 2; next: python eval_robust.py --ckpt {os.path.join('out', 'pydoc_rpc')}")
    assert [row["split"] for row in rows] == ["valid", "test"] and word == "<unk>"
    assert log("out/pydoc_rpc", "sample")[2] and "2 1" not in log("out/pydoc_rpc", "sample")[2]
    checkpoint = common.read_checkpoint("out/pydoc_rpc")
    assert checkpoint["step"] == 2 and checkpoint["task"] == "language modelling"
    assert checkpoint["args"]["steps"] >= 500 and checkpoint["args"]["data"] == "pydoc"
    assert lm_from_checkpoint(checkpoint).config.rpc_layers == (0,)


def test_a_score_is_what_the_best_weights_give_on_the_files_and_in_float64_the_same():
    train(SMALL, "--out_dir a --steps 12 --set eval_every=4")
    model = lm_from_checkpoint(common.read_checkpoint("a/best.pt")).double()
    vocab = data_text.Vocabulary(common.read_checkpoint("a/best.pt")["vocab"].split("\n"))
    for row in scored("a", window=12, stride=3, seed=5)[0]:
        lines = data_text.read_lines(f"text/wiki.{row['split']}.tokens")
        attacked, swapped = word_swap(lines, seed=5)
        clean, attacked = (torch.tensor([vocab[w] for line in text for w in [*line.split(), "<eos>"]])
                           for text in (lines, attacked))
        assert row["tokens"] == len(clean) and row["swapped"] == sum(swapped) >= (clean != attacked).sum() > 0

        def nats(text):
            out = model(text[None, :12], text[None, 1:13])[0].tolist()
            while len(out) < len(text) - 1:                                   # another way to say: the last 3, or fewer
                count = min(3, len(text) - 1 - len(out))
                end = len(out) + count
                out += model(text[None, end - 12:end], text[None, end - 11:end + 1])[0, -count:].tolist()
            return np.array(out)
        with torch.no_grad():
            a, b, kept = nats(clean), nats(attacked), ~np.array(swapped[1:])
            pieces = zip(clean[:-1].split(12), clean[1:].split(12))
            segments = torch.cat([model(x[None], y[None])[0] for x, y in pieces]).numpy()
        expected = dict(sliding=a, attacked=b, attacked_unswapped=b[kept], clean_unswapped=a[kept], segment=segments)
        for key, value in expected.items():
            assert row[key] == pytest.approx(math.exp(value.mean()), rel=1e-5), key


@pytest.mark.parametrize("extra", ["--attn softmax", "--attn symmetric", "--rpc_layers all --n_iter 2 --lambd 3",
                                   "--form paper --mu token", "--set norm=pre clip=0",
                                   "--accum 2 --set cutoffs=5,10",
                                   "--mu global"])
def test_every_kind_trains_two_steps_and_its_checkpoint_alone_rebuilds_it(extra):
    train(SMALL, extra, "--max_steps 2 --out_dir a")
    config = lm_from_checkpoint(common.read_checkpoint("a")).config
    given = dict(zip(extra.split()[::2], extra.split()[1::2]))
    kinds = ("--attn", "--form", "--mu")
    assert all(str(getattr(config, k[2:])) == v for k, v in given.items() if k in kinds)
    assert config.norm == ("pre" if "norm" in extra else "post") and config.cutoffs == ((5, 10) if "5,10" in extra else ())
    assert config.context == 16 and list(log("a")) == [1, 2] and log("a")[1] != log("a")[2]
    assert bool(log("a", "sample")[2]) == (config.mu != "global")                      # a leaking model is not sampled


def test_training_learns_and_best_is_the_evaluation_with_the_lowest_valid_perplexity():
    shuffled = sentences(20, 1).split()
    random.Random(0).shuffle(shuffled)                                               # learning the order makes it worse
    write_text("text", valid=" " + " ".join(shuffled) + " \n")
    train(SMALL, "--out_dir a --steps 60 --lr 5e-3 --set eval_every=5")
    losses, evals = list(log("a").values()), {step: row["perplexity"] for step, row in log("a", "eval").items()}
    assert len(losses) == 60 and np.mean(losses[-10:]) < np.mean(losses[:5]) - 1
    step = min(evals, key=evals.get)
    best, last = common.read_checkpoint("a/best.pt"), common.read_checkpoint("a/last.pt")
    assert list(evals) == list(range(5, 61, 5)) and best["step"] == step < 60 == last["step"]
    assert best["best"] == last["best"] == dict(step=step, perplexity=evals[step]) and best["optimizer"] is None
    assert scored("a")[0][0]["segment"] == pytest.approx(evals[step], rel=1e-5)


def test_the_log_says_whether_the_robust_part_acted():
    for lambd, share in (("inf", 0.0), ("0", 1.0)):
        train(SMALL, "--max_steps 1 --rpc_layers 1-2 --n_iter 3 --out_dir", f"lambd_{lambd}", "--lambd", lambd)
        nonzero = log(f"lambd_{lambd}", "nonzero_S")[1]
        assert list(nonzero) == ["1", "2"] and nonzero["1"][0] == pytest.approx(share, abs=1e-3)
        assert len(nonzero["1"]) == 3 and len(log(f"lambd_{lambd}", "mean_abs_key")[1]) == 4


def test_the_learning_rate_is_lmtools_but_for_the_first_updates(golden):
    a = golden("lm_schedule")
    lr, warmup, total = (a[k].item() for k in ("base_lr", "warmup", "max_step"))
    train(SMALL, "--out_dir a --lr", str(lr), "--steps 12 --set warmup=4")               # what the loop does with the flags
    ours = [common.lr_at(k, 12, 4, lr, 0.0, lr / 5) for k in range(12)]
    assert list(log("a", "lr").values()) == ours and ours[:4] == pytest.approx([lr * (k + 1) / 5 for k in range(4)])
    ours = np.array([common.lr_at(k, total, warmup, lr, 0.0, lr / (warmup + 1)) for k in range(total)])
    theirs = a["lr_used_at_update"].numpy()
    np.testing.assert_allclose(ours[warmup:], theirs[warmup:], rtol=1e-9)
    assert np.abs(ours - theirs)[1:warmup].max() < lr / warmup and theirs[0] == lr  # lr k / w there, (k+1) / (w+1) here


# --- a checkpoint is scored and sampled -------------------------------------------------------------------------------

def test_a_score_is_the_same_again_in_any_batch_and_needs_no_cache():
    train(SMALL, "--out_dir a --steps 6")
    rows, word = scored("a")
    shutil.rmtree("text/cache")
    assert word == "AAA" and scored("a") == (rows, word)
    assert_same_rows(scored("a", batch_size=7)[0], rows, 1e-6)
    assert not Path("text/cache").exists() and scored("a", seed=1)[0][0]["attacked"] != rows[0]["attacked"]
    assert scored("a", stride=1)[0][0]["segment"] == rows[0]["segment"] != scored("a", stride=1)[0][0]["sliding"]


def test_another_text_is_read_with_the_checkpoints_vocabulary_and_needs_no_training_file():
    train(SMALL, "--out_dir a --steps 6")
    write_text("other", seed=1, valid=sentences(8, 1) + " a zebra unheard of \n", train="")
    Path("other/wiki.train.tokens").unlink()
    assert prose.text_folder("folder", "other") == Path("other")
    vocab = data_text.stored_vocabulary(common.read_checkpoint("a"))
    rows, _ = scored("a", "other", stride=1)
    text = (sentences(8, 1) + "a zebra unheard of \n").replace("\n", " <eos> ")
    assert rows[0]["tokens"] == len(text.split()) and "zebra" not in vocab
    model, own = lm_from_checkpoint(common.read_checkpoint("a/best.pt")), data_text.read_lines("other/wiki.test.tokens")
    nats = data_text.sliding_nll(model, vocab.encode_lines(own), 16, 1)
    assert rows[1]["sliding"] == pytest.approx(data_text.perplexity(nats), rel=1e-5)


@pytest.mark.parametrize("window,stride,word", [
    (0, 0, "window 0"), (17, 16, "17 tokens in a row, expected 1 to context=16"), (16, 0, "stride 0"),
    (16, 17, "window 16, stride 17"), (4, 5, "window 4, stride 5"), (16, -1, "stride -1")])
def test_windows_that_do_not_fit_are_refused(window, stride, word):
    train(SMALL, "--out_dir a --max_steps 1")
    with pytest.raises(ValueError, match=word):
        scored("a", window=window, stride=stride)


def test_a_score_that_is_not_finite_is_refused():
    train(SMALL, "--out_dir a --max_steps 1")
    checkpoint = common.read_checkpoint("a/best.pt")
    checkpoint["model"]["bias"][3] = float("inf")
    torch.save(checkpoint, "a/best.pt")
    with pytest.raises(ValueError, match="a perplexity of valid is not finite"):
        scored("a")


def test_a_text_as_short_as_a_window_is_named():
    train(SMALL, "--out_dir a --max_steps 1")
    for split in ("valid", "test"):
        write_text("short", **{split: " the cat \n" * 6})
        assert len(data_text.read_lines(f"short/wiki.{split}.tokens")) * 3 == 18
        scored("a", "short", window=16)
        write_text("short", **{split: " the cat \n" * 5 + "\n"})
        with pytest.raises(ValueError, match=rf"--window 16 \(default: --context\): wiki.{split}.tokens in short has only 16"):
            scored("a", "short", window=16)


def test_a_prompt_goes_on_the_same_way_each_time_and_unknown_words_are_named(capsys):
    train(SMALL, "--out_dir a --steps 40 --lr 1e-2")
    samples = []
    for extra in ("", "", "--seed 1", "--temperature 0.01"):
        capsys.readouterr()
        train("--sample a --words 12 --prompt", ["the red cat"], extra)
        samples.append(capsys.readouterr().out.strip())
    assert all(text.startswith("the red cat") for text in samples) and samples[0] == samples[1] != samples[2]
    assert "-year old" in samples[3]                                                                       # from @-@
    before = sorted(p.name for p in Path("a").iterdir())
    line = refused("--sample a --prompt", ["the purple cat meows"])
    assert line.startswith("error: --prompt: purple, meows not in the vocabulary") and "\n" not in line
    line = refused(SMALL, "--prompt", ["the purple cat"], "--out_dir b")                       # before any training
    assert "purple" in line and not Path("b").exists() and sorted(p.name for p in Path("a").iterdir()) == before


def test_sample_alone_prints_words_and_neither_scores_nor_needs_the_text(capsys, monkeypatch):
    train(SMALL, "--out_dir a --steps 40 --lr 1e-2")
    assert common.read_checkpoint("a/best.pt")["step"] == 40
    text = log("a", "sample")[40]
    shutil.rmtree("text")
    files = sorted(Path("a").iterdir())
    monkeypatch.setattr(train_lm, "sliding_nll", None)
    capsys.readouterr()
    train("--sample a --words 5")
    assert capsys.readouterr().out.strip() == text                                # that run's own sample, nothing else
    train("--sample a/best.pt --words 12 --seed 1 --prompt", ["the red cat"])
    assert capsys.readouterr().out.startswith("the red cat ") and sorted(Path("a").iterdir()) == files
    assert "--resume does not go with --sample" in refused("--sample a --resume a")
    assert "--attn does not go with --sample" in refused("--sample a --attn=softmax")
    assert "purple" in refused("--sample a --prompt", ["the purple cat"]) and "nowhere" in refused("--sample nowhere")


def test_a_model_that_reads_the_future_is_not_sampled():
    train(SMALL, "--out_dir a --max_steps 1 --mu global")
    assert "--mu global" in refused("--sample a")


def test_when_the_attacks_word_is_unknown_the_rarest_known_word_stands_for_it():
    write_text("text", train=sentences(100, 0).replace("AAA", "and") + " rare \n")
    train(SMALL, "--max_steps 1 --out_dir a")
    assert scored("a")[1] == "rare"
    vocab = data_text.stored_vocabulary(common.read_checkpoint("a"))
    for text in load_texts("text", vocab, 16)[0]:
        swapped = text.attacked[1:][~text.kept.numpy()]
        assert len(swapped) and (swapped == vocab["rare"]).all()


# --- stopping and going on --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("extra", ["--set eval_every=3",
                                   "--accum 2 --attn softmax --set save_every=3 cutoffs=5,10 log_every=2"])
def test_three_steps_and_three_resumed_equal_six_bit_for_bit_with_dropout(extra):
    train(SMALL, extra, "--max_steps 6 --out_dir whole")
    train(SMALL, extra, "--max_steps 3 --out_dir parts")
    shutil.copytree("parts", "copy")
    train("--resume parts --max_steps 6")                                                       # remembers its flags
    if "save_every" in extra:                             # the run of three had to evaluate at its end, the other not
        assert log("whole") == log("parts")
        a, b = (common.read_checkpoint(folder)["model"] for folder in ("whole", "parts"))
        assert all(torch.equal(a[k], b[k]) for k in a)
    else:
        assert_same_run("whole", "parts")
    assert common.read_checkpoint("copy")["step"] == 3 and common.read_checkpoint("parts")["args"]["dropout"] == 0.1


def test_a_run_killed_at_any_moment_resumes_to_the_same_losses_evaluations_and_weights():
    run = flags(SMALL, "--steps 40 --set save_every=1 eval_every=4")
    train(run, "--out_dir whole")
    process = Started(train_lm.main, [*run, "--out_dir", "killed"])
    end = time.time() + 240
    while not Path("killed/last.pt").exists():
        assert process.poll() is None and time.time() < end
        time.sleep(0.01)
    time.sleep(random.uniform(0, 0.5))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert 1 <= common.read_checkpoint("killed")["step"] <= 40                                # whole, whatever happened
    train("--resume killed")
    assert_same_run("whole", "killed")
    assert len(log("whole")) == 40 and scored("whole") == scored("killed")


def test_a_restart_by_torchrun_continues_its_own_run_and_never_touches_another(monkeypatch):
    train(SMALL, "--max_steps 2")                                                                # out/folder_rpc
    before = Path("out/folder_rpc/last.pt").read_bytes()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    train(SMALL, "--max_steps 2")
    assert [d.name for d in Path("out").iterdir() if d.name != "cache"] == ["folder_rpc"]
    train(SMALL, "--max_steps 2 --lr 0.1")
    assert Path("out/folder_rpc/last.pt").read_bytes() == before and log("out/folder_rpc_2")
    assert "already holds a run" in refused(SMALL, "--max_steps 2 --lr 0.1 --out_dir out/folder_rpc")


def test_flags_of_a_resumed_run_hold_or_are_refused_and_nothing_is_lost():
    train(SMALL, "--max_steps 1 --out_dir a")
    before = Path("a/last.pt").read_bytes()
    for bad in ("--attn symmetric", "--lambd 3", "--mu token", "--steps 9", "--seed 1", "--batch_size 16",
                "--context 8", "--out_dir b", "--data wikitext"):
        line = refused("--resume a", bad)
        assert line.startswith("error: ") and bad.split()[0] in line and "\n" not in line
    assert "best.pt holds no optimiser" in refused("--resume a/best.pt")
    for bad in ("dropout=0", "norm=pre", "cutoffs=5,10"):
        assert bad.split("=")[0] in refused("--resume a --set", bad)
    assert "rpc_layers" in refused("--resume a --rpc_layers all")
    assert Path("a/last.pt").read_bytes() == before and list(log("a")) == [1]


def test_a_run_of_before_the_flags_were_fewer_goes_on():
    """Then --sample was a number of words, and there were --cache_dir, --window, --stride, --top_k."""
    train(SMALL, "--max_steps 6 --out_dir whole")
    train(SMALL, "--max_steps 3 --out_dir old")
    checkpoint = common.read_checkpoint("old")
    own = dict(sample=40, cache_dir="text/cache", window=16, stride=16, eval_batch_size=64,
               attack_seed=0, top_k=None, eval_only=None)
    common.save_checkpoint("old/last.pt", {**checkpoint, "args": {**checkpoint["args"], **own}})
    train("--resume old --max_steps 6")
    assert log("whole") == log("old") and log("whole", "grad_norm") == log("old", "grad_norm")
    assert not {*own} - {"sample"} & common.read_checkpoint("old")["args"].keys()


def test_a_resumed_run_refuses_a_longer_text_of_the_same_words():
    train(SMALL, "--max_steps 1 --out_dir a")
    text = Path("text/wiki.train.tokens").read_text()
    Path("text/wiki.train.tokens").write_text(text * 2)
    assert "--resume a: the data have changed, train_tokens was" in refused("--resume a --max_steps 2")


def test_a_resumed_run_refuses_another_vocabulary():
    train(SMALL, "--max_steps 1 --out_dir a")
    before = Path("a/last.pt").read_bytes()
    write_text("text", train=sentences(100, 0) + " new words \n")
    line = refused("--resume a --max_steps 2")
    assert line.startswith("error: text has not the vocabulary of the run in a") and "\n" not in line
    assert Path("a/last.pt").read_bytes() == before and list(log("a")) == [1]


# --- processes --------------------------------------------------------------------------------------------------------

def train_and_score():
    train_lm.main()
    common.broadcast([None])                                     # rank 0 has written best.pt
    rank, world = dist.get_rank(), dist.get_world_size()
    rows, _ = scored("two", stride=3, rank=rank, world=world)
    if rank == 0:
        Path("rows.json").write_text(json.dumps(rows))
    print(torch.initial_seed())                                  # of the last step's masks


def test_two_processes_equal_one_without_dropout_and_the_scores_too():
    run = flags(SMALL, "--max_steps 10 --set dropout=0 eval_every=5")
    printed = group(train_and_score, [*run, "--accum", "2", "--out_dir", "two"])
    train(run, "--accum 2 --out_dir accumulated")
    train(run, "--out_dir one")
    two, accumulated, one = (np.array(list(log(folder).values())) for folder in ("two", "accumulated", "one"))
    assert len(one) == 10
    np.testing.assert_allclose(two, one, rtol=0, atol=1e-5)
    np.testing.assert_allclose(accumulated, one, rtol=0, atol=1e-5)
    norms = [list(log(folder, "grad_norm").values()) for folder in ("two", "one")]
    np.testing.assert_allclose(*norms, rtol=1e-3)
    assert [text.split()[-1] for text in printed] == [str(common.seed_of(0, 9, rank)) for rank in (0, 1)]
    assert_same_rows(json.loads(Path("rows.json").read_text()), scored("one", stride=3)[0], 1e-4)
    with open("two/log.jsonl") as rows:
        assert json.loads(next(rows))["world"] == 2
    assert log("two", "eval")[10]["perplexity"] == pytest.approx(log("one", "eval")[10]["perplexity"], rel=1e-4)


@pytest.mark.parametrize("world,accum", [(2, 1), (1, 2), (2, 2), (4, 2), (8, 1)])
def test_any_split_over_processes_and_accumulation_is_the_same_batch(world, accum):
    tokens, args = np.arange(1000, dtype="<u4"), argparse.Namespace(batch_size=16, context=8, seed=1, accum=1)
    whole = list(train_lm.micro_batches(tokens, args, 0, 5, 0, 1, torch.device("cpu")))
    args.accum = accum
    streams = [list(train_lm.micro_batches(tokens, args, 2, 5, rank, world, torch.device("cpu")))
               for rank in range(world)]
    for step in range(2, 5):                                                             # starting late changes nothing
        parts = [stream[(step - 2) * accum + micro] for stream in streams for micro in range(accum)]
        assert torch.equal(torch.cat(parts), whole[step])


# --- bad input --------------------------------------------------------------------------------------------------------

BAD = [("--data wikitext --data_dir nowhere", "nowhere"), ("--context 0", "context"),
       ("--context 100000", "context"), ("--batch_size 0", "batch_size"),
       ("--batch_size 9 --accum 2", "--accum 2"), ("--accum 0", "accum"), ("--steps 0", "steps"),
       ("--max_steps 0", "max_steps"), ("--lr nan", "lr"), ("--lr -1", "lr"), ("--set warmup=-1", "warmup"),
       ("--set clip=nan", "clip"), ("--set dropout=1", "dropout"), ("--n_iter 0", "n_iter"),
       ("--lambd -1", "lambd"), ("--rpc_layers 4", "rpc_layers"), ("--rpc_layers x", "rpc_layers"),
       ("--set cutoffs=5,x", "cutoffs"), ("--set cutoffs=10,5", "cutoffs"), ("--set cutoffs=5,99999", "cutoffs"),
       ("--set norm=rms", "norm"), ("--set speed=1", "speed"), ("--set clip", "clip"), ("--seed -1", "seed"),
       ("--device cdua", "device"), ("--resume nowhere", "nowhere"), ("--resume notes.pt", "notes.pt"),
       ("--sample nowhere", "does not go with --sample"), ("--out_dir notes.pt", "notes.pt"),
       ("--temperature 0", "temperature"), ("--words -1", "words"), ("--set eval_every=0", "eval_every"),
       ("--set log_every=0", "log_every"), ("--set save_every=-1", "save_every"), ("--model huge", "huge"),
       ("--data shapes", "shapes"), ("--mu mean", "mean"), ("--step 4", "--step")]


@pytest.mark.parametrize("bad,word", BAD, ids=[bad for bad, _ in BAD])
def test_bad_flags_end_in_one_line_that_names_them(bad, word, capsys):
    Path("notes.pt").write_text("not a checkpoint\n")
    code = refused(SMALL, "--max_steps 2", bad)
    line = code if isinstance(code, str) else capsys.readouterr().err.strip().splitlines()[-1]         # argparse's own
    assert "error: " in line and "\n" not in line and len(line) < 400 and word in line, line
    assert list(Path(".").rglob("*.pt")) == [Path("notes.pt")]
    assert Path("notes.pt").read_text() == "not a checkpoint\n"


def test_a_training_text_of_blank_lines_is_named():
    write_text("text", train=" \n\n  \n")
    line = refused(SMALL, "--out_dir a")
    assert "wiki.train.tokens holds no word" in line and "\n" not in line and not Path("a").exists()


def test_texts_that_are_missing_empty_or_too_short_are_named_before_training():
    assert "needs --data_dir" in refused("--data wikitext")
    for split in ("train", "valid", "test"):
        short = f"--context 16: the {split} text in text has only 5 tokens"
        for content, word in ((None, f"no wiki.{split}.tokens"), ("", f"wiki.{split}.tokens is empty"),
                              (" the cat AAA <unk> \n", short)):
            write_text("text")
            path = Path("text", f"wiki.{split}.tokens")
            path.unlink() if content is None else path.write_text(content)
            line = refused(SMALL, "--out_dir a")
            assert line.startswith("error: ") and word in line and "\n" not in line
            assert not Path("a/last.pt").exists()


def test_a_damaged_cache_stops_the_run_with_the_name_of_the_file():
    train(SMALL, "--max_steps 1 --out_dir a")
    path = Path("text/cache/train.bin")
    content, times = path.read_bytes(), path.stat()

    def damage(content):
        path.write_bytes(content)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    damage(content[:-2])
    assert f"train.bin has {len(content) - 2} bytes" in refused("--resume a --max_steps 2")
    damage(content[:-4] + b"\xff\xff\xff\x00")
    assert "train.bin holds ids up to 16777215" in refused("--resume a --max_steps 2")
    path.unlink()
    train("--resume a --max_steps 2")
    assert list(log("a")) == [1, 2]


def test_other_scripts_and_foreign_checkpoints_are_refused():
    for content in ({"task": "classification", "args": {}}, {"model": {"w": torch.zeros(2)}}):
        torch.save(content, "other.pt")
        for flag in ("--resume", "--sample"):
            line = refused(flag, "other.pt")
            assert line.startswith("error: other.pt is not a checkpoint of train_lm.py")
    train(SMALL, "--max_steps 1 --out_dir a")
    checkpoint = common.read_checkpoint("a/best.pt")
    torch.save({**checkpoint, "vocab": checkpoint["vocab"] + "\nmore"}, "a/best.pt")
    assert "--sample a: its vocabulary has" in refused("--sample a")
    with pytest.raises(ValueError, match="its vocabulary has"):
        scored("a")


def test_a_folder_that_holds_a_run_is_refused_and_kept_and_the_default_one_gets_a_number():
    train(SMALL, "--max_steps 1 --out_dir a")
    before = Path("a/last.pt").read_bytes()
    line = refused(SMALL, "--max_steps 2 --out_dir a")
    assert line.startswith("error: --out_dir a already holds a run") and Path("a/last.pt").read_bytes() == before
    for _ in range(2):
        train(SMALL, "--max_steps 1")
    assert sorted(d.name for d in Path("out").iterdir()) == ["folder_rpc", "folder_rpc_2"]


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_state(monkeypatch):
    forward, calls = LM.forward, []

    def diverging(model, *batch):
        calls.append(1)
        return forward(model, *batch) * (float("nan") if len(calls) == 5 else 1)
    monkeypatch.setattr(LM, "forward", diverging)
    line = refused(SMALL, "--max_steps 9 --out_dir a --set save_every=3 log_every=2")
    assert line.startswith("error: not finite at step 5") and "a holds step 3" in line
    checkpoint = common.read_checkpoint("a")
    assert checkpoint["step"] == 3 and all(w.isfinite().all() for w in checkpoint["model"].values())


def test_an_evaluation_that_is_not_finite_saves_nothing(monkeypatch):
    real = train_lm.sliding_nll
    for broken in (math.nan, math.inf):
        folder = f"a_{broken}"
        train(SMALL, "--max_steps 3 --out_dir", [folder])
        before = {path.name: path.read_bytes() for path in Path(folder).glob("*.pt")}
        with monkeypatch.context() as patch:
            patch.setattr(train_lm, "sliding_nll", lambda *args, **how: real(*args, **how) + broken)
            line = refused("--max_steps 5 --resume", [folder])
        assert f"not finite at step 5: perplexity {broken} in the evaluation. {folder} holds step 3" in line
        assert {path.name: path.read_bytes() for path in Path(folder).glob("*.pt")} == before


@pytest.mark.parametrize("name", ["best.pt", "last.pt"])
def test_an_evaluation_whose_best_could_not_be_written_is_repeated_and_writes_it(monkeypatch, name):
    train(SMALL, "--max_steps 6 --set eval_every=3 --out_dir whole")
    train(SMALL, "--max_steps 3 --set eval_every=3 --out_dir killed")
    real = common.save_checkpoint

    def full(path, checkpoint):
        if path.name == name and checkpoint["step"] == 6:
            monkeypatch.setattr(common, "save_checkpoint", real)
            raise OSError("full")
        real(path, checkpoint)
    monkeypatch.setattr(common, "save_checkpoint", full)
    assert "full" in refused("--resume killed --max_steps 6")
    train("--resume killed --max_steps 6")
    assert common.read_checkpoint("whole/best.pt")["step"] == 6
    assert_same_run("whole", "killed")


def test_the_script_itself_ends_in_one_error_line():
    ended = subprocess.run([sys.executable, str(SCRIPT), *SMALL, "--rpc_layers", "7"], text=True, capture_output=True)
    err = ended.stderr
    assert ended.returncode == 1 and err.startswith("error: ") and len(err.splitlines()) == 1 and "rpc_layers" in err


def test_ctrl_c_ends_in_one_line_and_a_run_that_resumes():
    process = Started(train_lm.main, flags(SMALL, "--steps 3000 --out_dir a --set save_every=1"))
    while not Path("a/last.pt").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.poll() != 0 and "Traceback" not in err
    step = common.read_checkpoint("a")["step"]
    train("--resume a --max_steps", str(step + 2))
    assert list(log("a")) == list(range(1, step + 3))
