"""Claims about train_lm.py: runs start, stop, go on and spread over processes without changing a number; what is scored
is what the table says; bad input ends in one line and loses nothing. The real script, small settings."""

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

import common
from data import text as data_text
import train_lm
from robust.words import word_swap
from lm import LM, LMConfig, lm_from_checkpoint

SCRIPT = Path(train_lm.__file__).resolve()
SMALL = ("--data_dir text --context 16 --batch_size 8 --steps 30 --warmup 5 --log_every 1 --eval_every 100 --words 5 "
         "--stride 16").split()


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
    torch.set_num_threads(1)                                 # as the subprocesses, so that results agree bit for bit
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


def start(*parts, launcher=()):
    env = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC")} | {"OMP_NUM_THREADS": "1"}
    module = ("-m", "torch.distributed.run", *launcher) if launcher else ()
    return subprocess.Popen([sys.executable, *module, str(SCRIPT), *flags(*parts)], env=env, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE,      # background jobs ignore SIGINT
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))


def finish(process):
    try:
        out, err = process.communicate(timeout=300)
    finally:
        process.terminate()                                          # torchrun takes its workers with it
    assert process.returncode == 0, "\n".join(line for line in err.splitlines() if "rror" in line)[-3000:]
    return out


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


def results(folder, name="results.json"):
    return json.loads(Path(folder, name).read_text())


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

def test_the_default_run_ends_in_table_sample_and_result_and_needs_no_flag(monkeypatch, capsys):
    """Without flags but --max_steps; pydoc's documents are made fewer for the time it takes."""
    topics = {f"topic {i}": [(f"name{i}", "The function returns a list of words.\n\nIt takes  one argument, n.\n" * 9)]
              for i in range(60)}
    monkeypatch.setattr(data_lm, "pydoc_documents", lambda: topics)
    train("--max_steps 2")
    out = capsys.readouterr().out
    assert "out/pydoc_rpc" in out and "sample:\n" in out and re.search(r"(?m)^ *split +tokens .*attacked", out)
    last, result = out.strip().splitlines()[-1], results("out/pydoc_rpc")
    valid, test = result["rows"]
    assert last.startswith(f"pydoc rpc 4iter/0: valid perplexity {valid['sliding']:.2f}, test {test['sliding']:.2f}")
    assert last.endswith(os.path.join("out", "pydoc_rpc", "results.json")) and "2 1" not in result["sample"]
    assert [row["split"] for row in result["rows"]] == ["valid", "test"] and result["args"]["stride"] == 16
    numbers = f"{valid['sliding']:.2f} | {test['sliding']:.2f} | {valid['attacked']:.2f} |"
    assert f"| pydoc mini rpc 4iter/0, 16 | {numbers}" in out
    checkpoint = common.read_checkpoint("out/pydoc_rpc")
    assert checkpoint["step"] == 2 and checkpoint["task"] == "language modelling" and checkpoint["args"]["steps"] >= 500
    assert lm_from_checkpoint(checkpoint).config.rpc_layers == (0,) and log("out/pydoc_rpc", "sample")[2]


def test_the_table_is_what_the_best_weights_give_on_the_files_and_in_float64_the_same():
    train(SMALL, "--out_dir a --stride 3 --window 12 --attack_seed 5 --steps 12 --eval_every 4")
    model = lm_from_checkpoint(common.read_checkpoint("a/best.pt")).double()
    vocab = data_text.Vocabulary(common.read_checkpoint("a/best.pt")["vocab"].split("\n"))
    for row in results("a")["rows"]:
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
                                   "--form paper --mu token", "--norm pre --clip 0", "--cutoffs 5,10 --accum 2",
                                   "--mu global"])
def test_every_kind_trains_two_steps_and_its_checkpoint_alone_rebuilds_it(extra):
    train(SMALL, extra, "--max_steps 2 --out_dir a")
    config = lm_from_checkpoint(common.read_checkpoint("a")).config
    given = dict(zip(extra.split()[::2], extra.split()[1::2]))
    kinds = ("--attn", "--form", "--mu", "--norm")
    assert all(str(getattr(config, k[2:])) == v for k, v in given.items() if k in kinds)
    assert config.context == 16 and list(log("a")) == [1, 2] and log("a")[1] != log("a")[2]
    assert bool(log("a", "sample")[2]) == (config.mu != "global")                      # a leaking model is not sampled


def test_training_learns_and_best_is_the_evaluation_with_the_lowest_valid_perplexity():
    shuffled = sentences(20, 1).split()
    random.Random(0).shuffle(shuffled)                                               # learning the order makes it worse
    write_text("text", valid=" " + " ".join(shuffled) + " \n")
    train(SMALL, "--out_dir a --steps 60 --eval_every 5 --lr 5e-3")
    losses, evals = list(log("a").values()), {step: row["perplexity"] for step, row in log("a", "eval").items()}
    assert len(losses) == 60 and np.mean(losses[-10:]) < np.mean(losses[:5]) - 1
    step = min(evals, key=evals.get)
    best, last = common.read_checkpoint("a/best.pt"), common.read_checkpoint("a/last.pt")
    assert list(evals) == list(range(5, 61, 5)) and best["step"] == step == results("a")["step"] < 60 == last["step"]
    assert best["best"] == last["best"] == dict(step=step, perplexity=evals[step]) and best["optimizer"] is None
    assert results("a")["rows"][0]["segment"] == pytest.approx(evals[step], rel=1e-5)


def test_the_log_says_whether_the_robust_part_acted():
    for lambd, share in (("inf", 0.0), ("0", 1.0)):
        train(SMALL, "--max_steps 1 --rpc_layers 1-2 --n_iter 3 --out_dir", f"lambd_{lambd}", "--lambd", lambd)
        nonzero = log(f"lambd_{lambd}", "nonzero_S")[1]
        assert list(nonzero) == ["1", "2"] and nonzero["1"][0] == pytest.approx(share, abs=1e-3)
        assert len(nonzero["1"]) == 3 and len(log(f"lambd_{lambd}", "mean_abs_key")[1]) == 4


def test_the_learning_rate_is_lmtools_but_for_the_first_updates(golden):
    a = golden("lm_schedule")
    lr, warmup, total = (a[k].item() for k in ("base_lr", "warmup", "max_step"))
    train(SMALL, "--out_dir a --lr", str(lr), "--warmup 4 --steps 12")               # what the loop does with the flags
    ours = [common.lr_at(k, 12, 4, lr, 0.0, lr / 5) for k in range(12)]
    assert list(log("a", "lr").values()) == ours and ours[:4] == pytest.approx([lr * (k + 1) / 5 for k in range(4)])
    ours = np.array([common.lr_at(k, total, warmup, lr, 0.0, lr / (warmup + 1)) for k in range(total)])
    theirs = a["lr_used_at_update"].numpy()
    np.testing.assert_allclose(ours[warmup:], theirs[warmup:], rtol=1e-9)
    assert np.abs(ours - theirs)[1:warmup].max() < lr / warmup and theirs[0] == lr  # lr k / w there, (k+1) / (w+1) here


# --- evaluation of a checkpoint ---------------------------------------------------------------------------------------

def test_eval_only_repeats_the_runs_own_table_and_keeps_it():
    train(SMALL, "--out_dir a --steps 6")
    before = Path("a/results.json").read_bytes()
    shutil.rmtree("text/cache")
    train("--eval_only a")
    train("--eval_only a/best.pt --eval_batch_size 7 --out_dir b")
    rows = results("a")["rows"]
    for again in (results("a", "results_2.json"), results("b")):
        assert_same_rows(again["rows"], rows, 1e-6)
        assert again["sample"] == results("a")["sample"]
    assert Path("a/results.json").read_bytes() == before and not Path("text/cache").exists()      # needs no cache


def test_another_text_is_read_with_the_checkpoints_vocabulary_and_needs_no_training_file(capsys):
    train(SMALL, "--out_dir a --steps 6")
    write_text("other", seed=1, valid=sentences(8, 1) + " a zebra unheard of \n", train="")
    Path("other/wiki.train.tokens").unlink()
    train("--eval_only a --data_dir other --stride 1 --out_dir b")
    vocab = data_text.Vocabulary(common.read_checkpoint("a")["vocab"].split("\n"))
    rows = results("b")["rows"]
    assert rows[0]["tokens"] == len((sentences(8, 1) + "a zebra unheard of \n").replace("\n", " <eos> ").split())
    model, own = lm_from_checkpoint(common.read_checkpoint("a/best.pt")), data_text.read_lines("other/wiki.test.tokens")
    nats = data_text.sliding_nll(model, vocab.encode_lines(own), 16, 1)
    assert rows[1]["sliding"] == pytest.approx(data_text.perplexity(nats), rel=1e-5)
    assert "stride 1" in capsys.readouterr().out and "zebra" not in vocab


def test_a_prompt_goes_on_the_same_way_each_time_and_unknown_words_are_named(capsys):
    train(SMALL, "--out_dir a --steps 40 --lr 1e-2")
    samples = []
    for extra in ("", "", "--seed 1", "--temperature 0.01 --top_k 1"):
        train("--eval_only a --words 12 --prompt", ["the red cat"], extra)
        samples.append(results("a", f"results_{len(samples) + 2}.json")["sample"])
    assert all(text.startswith("the red cat") for text in samples) and samples[0] == samples[1] != samples[2]
    assert "sample:\n" + samples[3] in capsys.readouterr().out and "-year old" in samples[3]               # from @-@
    before = sorted(p.name for p in Path("a").iterdir())
    line = refused("--eval_only a --prompt", ["the purple cat meows"])
    assert line.startswith("error: --prompt: purple, meows not in the vocabulary") and "\n" not in line
    line = refused(SMALL, "--prompt", ["the purple cat"], "--out_dir b")                       # before any training
    assert "purple" in line and not Path("b").exists() and sorted(p.name for p in Path("a").iterdir()) == before


def test_sample_alone_prints_words_and_neither_scores_nor_needs_the_text(capsys, monkeypatch):
    train(SMALL, "--out_dir a --steps 40 --lr 1e-2")
    text = results("a")["sample"]
    shutil.rmtree("text")
    files = sorted(Path("a").iterdir())
    monkeypatch.setattr(train_lm, "score", None)
    capsys.readouterr()
    train("--sample a --words 5")
    assert capsys.readouterr().out.strip() == text                                # that run's own sample, nothing else
    train("--sample a/best.pt --words 12 --seed 1 --prompt", ["the red cat"])
    assert capsys.readouterr().out.startswith("the red cat ") and sorted(Path("a").iterdir()) == files
    assert "give one of them" in refused("--sample a --eval_only a") and "attn" in refused("--sample a --attn softmax")
    assert "purple" in refused("--sample a --prompt", ["the purple cat"]) and "nowhere" in refused("--sample nowhere")


def test_a_model_that_reads_the_future_is_not_sampled():
    train(SMALL, "--out_dir a --max_steps 1 --mu global")
    assert "--mu global" in refused("--sample a")


def test_when_the_attacks_word_is_unknown_the_rarest_known_word_stands_for_it(capsys):
    write_text("text", train=sentences(100, 0).replace("AAA", "and") + " rare \n")
    train(SMALL, "--max_steps 1 --out_dir a")
    assert results("a")["word"] == "rare" and "the attack puts rare for words" in capsys.readouterr().out


# --- stopping and going on --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("extra", ["--eval_every 3",
                                   "--accum 2 --save_every 3 --attn softmax --cutoffs 5,10 --log_every 2"])
def test_three_steps_and_three_resumed_equal_six_bit_for_bit_with_dropout(extra):
    train(SMALL, extra, "--max_steps 6 --out_dir whole")
    train(SMALL, extra, "--max_steps 3 --out_dir parts")
    shutil.copytree("parts", "copy")
    train("--resume parts --max_steps 6")                                                       # remembers its flags
    if "--save_every" in extra:                             # the run of three had to evaluate at its end, the other not
        assert log("whole") == log("parts")
        a, b = (common.read_checkpoint(folder)["model"] for folder in ("whole", "parts"))
        assert all(torch.equal(a[k], b[k]) for k in a)
    else:
        assert_same_run("whole", "parts")
    assert common.read_checkpoint("copy")["step"] == 3 and common.read_checkpoint("parts")["args"]["dropout"] == 0.1


def test_a_run_killed_at_any_moment_resumes_to_the_same_losses_evaluations_and_weights():
    run = flags(SMALL, "--save_every 1 --eval_every 4 --steps 40")
    train(run, "--out_dir whole")
    process = start(run, "--out_dir killed")
    end = time.time() + 240
    while not Path("killed/last.pt").exists():
        assert process.poll() is None and time.time() < end
        time.sleep(0.01)
    time.sleep(random.uniform(0, 0.5))
    process.kill()
    process.communicate()
    assert 1 <= common.read_checkpoint("killed")["step"] <= 40                                # whole, whatever happened
    train("--resume killed")
    assert_same_run("whole", "killed")
    assert len(log("whole")) == 40 and results("whole")["rows"] == results("killed")["rows"]


def test_a_restart_by_torchrun_continues_its_own_run_and_never_touches_another(monkeypatch):
    train(SMALL, "--max_steps 2")                                                                # out/pydoc_rpc
    before = Path("out/pydoc_rpc/last.pt").read_bytes()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    train(SMALL, "--max_steps 2")
    assert [d.name for d in Path("out").iterdir() if d.name != "cache"] == ["pydoc_rpc"]
    train(SMALL, "--max_steps 2 --lr 0.1")
    assert Path("out/pydoc_rpc/last.pt").read_bytes() == before and log("out/pydoc_rpc_2")
    assert "already holds a run" in refused(SMALL, "--max_steps 2 --lr 0.1 --out_dir out/pydoc_rpc")


def test_flags_of_a_resumed_run_hold_or_are_refused_and_nothing_is_lost():
    train(SMALL, "--max_steps 1 --out_dir a")
    before = Path("a/last.pt").read_bytes()
    for bad in ("--attn symmetric", "--lambd 3", "--mu token", "--steps 9", "--seed 1", "--batch_size 16",
                "--context 8", "--out_dir b", "--eval_only a", "--data wikitext"):
        line = refused("--resume a", bad)
        assert line.startswith("error: ") and bad.split()[0] in line and "\n" not in line
    assert "best.pt holds no optimiser" in refused("--resume a/best.pt")
    for bad in ("--attn symmetric", "--rpc_layers all", "--dropout 0"):
        assert bad.split()[0] in refused("--eval_only a", bad)
    assert Path("a/last.pt").read_bytes() == before and list(log("a")) == [1]


def test_a_resumed_run_refuses_another_vocabulary():
    train(SMALL, "--max_steps 1 --out_dir a")
    before = Path("a/last.pt").read_bytes()
    write_text("text", train=sentences(100, 0) + " new words \n")
    line = refused("--resume a --max_steps 2")
    assert line.startswith("error: text has not the vocabulary of the run in a") and "\n" not in line
    assert Path("a/last.pt").read_bytes() == before and list(log("a")) == [1]


# --- processes --------------------------------------------------------------------------------------------------------

def test_two_processes_equal_one_without_dropout_and_the_table_too():
    run = flags(SMALL, "--dropout 0 --max_steps 10 --eval_every 5")
    finish(start(run, "--out_dir two", launcher=("--standalone", "--nproc_per_node=2")))
    train(run, "--accum 2 --out_dir accumulated")
    train(run, "--out_dir one")
    two, accumulated, one = (np.array(list(log(folder).values())) for folder in ("two", "accumulated", "one"))
    assert len(one) == 10
    np.testing.assert_allclose(two, one, rtol=0, atol=1e-5)
    np.testing.assert_allclose(accumulated, one, rtol=0, atol=1e-5)
    assert_same_rows(results("two")["rows"], results("one")["rows"], 1e-4)
    assert results("two")["world"] == 2


@pytest.mark.parametrize("world,accum", [(2, 1), (1, 2), (2, 2), (4, 2), (8, 1)])
def test_any_split_over_processes_and_accumulation_is_the_same_batch(world, accum):
    tokens, args = np.arange(1000, dtype="<u4"), train_lm.argparse.Namespace(batch_size=16, context=8, seed=1, accum=1)
    whole = list(train_lm.micro_batches(tokens, args, 0, 5, 0, 1, torch.device("cpu")))
    args.accum = accum
    streams = [list(train_lm.micro_batches(tokens, args, 2, 5, rank, world, torch.device("cpu")))
               for rank in range(world)]
    for step in range(2, 5):                                                             # starting late changes nothing
        parts = [stream[(step - 2) * accum + micro] for stream in streams for micro in range(accum)]
        assert torch.equal(torch.cat(parts), whole[step])


# --- bad input --------------------------------------------------------------------------------------------------------

BAD = [("--data wikitext --data_dir nowhere", "nowhere"), ("--context 0", "context"), ("--context 100000", "context"),
       ("--window 0", "window"), ("--window 17", "window 17"), ("--stride 0", "stride"), ("--stride 17", "stride 17"),
       ("--window 4 --stride 5", "stride 5"), ("--stride -1", "stride"), ("--batch_size 0", "batch_size"),
       ("--batch_size 9 --accum 2", "--accum 2"), ("--accum 0", "accum"), ("--steps 0", "steps"),
       ("--max_steps 0", "max_steps"), ("--lr nan", "lr"), ("--lr -1", "lr"), ("--warmup -1", "warmup"),
       ("--clip nan", "clip"), ("--dropout 1", "dropout"), ("--n_iter 0", "n_iter"), ("--lambd -1", "lambd"),
       ("--rpc_layers 4", "rpc_layers"), ("--rpc_layers x", "rpc_layers"), ("--cutoffs 5,x", "cutoffs"),
       ("--cutoffs 10,5", "cutoffs"), ("--cutoffs 5,99999", "cutoffs"), ("--seed -1", "seed"),
       ("--device cdua", "device"), ("--resume nowhere", "nowhere"), ("--resume notes.txt", "notes.txt"),
       ("--eval_only nowhere", "nowhere"), ("--eval_only notes.txt", "notes.txt"),
       ("--out_dir notes.txt", "notes.txt"), ("--temperature 0", "temperature"), ("--top_k 0", "top_k"),
       ("--words -1", "words"), ("--attack_seed -1", "attack_seed"), ("--eval_batch_size 0", "eval_batch_size"),
       ("--eval_every 0", "eval_every"), ("--log_every 0", "log_every"), ("--model huge", "huge"),
       ("--data shapes", "shapes"), ("--mu mean", "mean"), ("--strid 4", "--strid")]


@pytest.mark.parametrize("bad,word", BAD, ids=[bad for bad, _ in BAD])
def test_bad_flags_end_in_one_line_that_names_them(bad, word, capsys):
    Path("notes.txt").write_text("not a checkpoint\n")
    code = refused(SMALL, "--max_steps 2", bad)
    line = code if isinstance(code, str) else capsys.readouterr().err.strip().splitlines()[-1]         # argparse's own
    assert "error: " in line and "\n" not in line and len(line) < 400 and word in line, line
    assert not list(Path(".").rglob("*.pt")) and Path("notes.txt").read_text() == "not a checkpoint\n"


def test_a_training_text_of_blank_lines_is_named():
    write_text("text", train=" \n\n  \n")
    line = refused(SMALL, "--out_dir a")
    assert "wiki.train.tokens holds no word" in line and "\n" not in line and not Path("a").exists()


def test_texts_that_are_missing_empty_or_too_short_are_named_before_training():
    assert "needs --data_dir" in refused("--data wikitext")
    for split in ("train", "valid", "test"):
        short = "context 16" if split == "train" else f"--window 16 (default: --context): wiki.{split}.tokens"
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
    content = path.read_bytes()
    path.write_bytes(content[:-4])
    assert "train.bin has" in refused("--resume a --max_steps 2")
    path.write_bytes(content[:-4] + b"\xff\xff\xff\x00")
    assert "train.bin holds id 16777215" in refused("--resume a --max_steps 2")
    path.unlink()
    train("--resume a --max_steps 2")
    assert list(log("a")) == [1, 2]


def test_other_scripts_and_foreign_checkpoints_are_refused():
    for content in ({"task": "classification", "args": {}}, {"model": {"w": torch.zeros(2)}}):
        torch.save(content, "other.pt")
        for flag in ("--resume", "--eval_only"):
            line = refused(flag, "other.pt")
            assert line.startswith("error: other.pt is not a checkpoint of train_lm.py")
    train(SMALL, "--max_steps 1 --out_dir a")
    checkpoint = common.read_checkpoint("a/best.pt")
    torch.save({**checkpoint, "vocab": checkpoint["vocab"] + "\nmore"}, "a/best.pt")
    assert "its vocabulary has" in refused("--eval_only a")


def test_a_folder_that_holds_a_run_is_refused_and_kept_and_the_default_one_gets_a_number():
    train(SMALL, "--max_steps 1 --out_dir a")
    before = Path("a/last.pt").read_bytes()
    line = refused(SMALL, "--max_steps 2 --out_dir a")
    assert line.startswith("error: --out_dir a already holds a run") and Path("a/last.pt").read_bytes() == before
    for _ in range(2):
        train(SMALL, "--max_steps 1")
    assert sorted(d.name for d in Path("out").iterdir()) == ["pydoc_rpc", "pydoc_rpc_2"]


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_state(monkeypatch):
    forward, calls = LM.forward, []

    def diverging(model, *batch):
        calls.append(1)
        return forward(model, *batch) * (float("nan") if len(calls) == 5 else 1)
    monkeypatch.setattr(LM, "forward", diverging)
    line = refused(SMALL, "--max_steps 9 --save_every 3 --out_dir a --log_every 2")
    assert line.startswith("error: not finite at step 5") and "a holds step 3" in line
    checkpoint = common.read_checkpoint("a")
    assert checkpoint["step"] == 3 and all(w.isfinite().all() for w in checkpoint["model"].values())


def test_the_script_itself_ends_in_one_error_line():
    process = start(SMALL, "--rpc_layers 7")
    _, err = process.communicate(timeout=240)
    assert process.returncode == 1 and err.startswith("error: ") and len(err.splitlines()) == 1 and "rpc_layers" in err


def test_ctrl_c_ends_in_one_line_and_a_run_that_resumes():
    process = start(SMALL, "--steps 3000 --save_every 1 --out_dir a")
    while not Path("a/last.pt").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=240)
    assert process.returncode != 0 and "Traceback" not in err
    step = common.read_checkpoint("a")["step"]
    train("--resume a --max_steps", str(step + 2))
    assert list(log("a")) == list(range(1, step + 3))
