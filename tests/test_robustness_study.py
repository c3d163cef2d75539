"""referee/studies/robustness.py: what is missing is trained and evaluated; differences are paired."""

import shutil
import sys
from contextlib import nullcontext

import numpy as np
import pytest
import torch

import common
import train_cls
from robust import corruptions
from robust.results import pack, weights_of
from referee.studies import differences, robust_attentions, robustness
from referee.studies.plot import plt


def row(checkpoint, right, measure="clean", **setting):
    """A row of the evaluator. right: (n,) bool or, of several severities, a list of such."""
    several = isinstance(right[0], list)
    lists = right if several else [right]
    packed = [pack(torch.tensor(outcomes)) for outcomes in lists]
    return dict(checkpoint=checkpoint, measure=measure, setting=setting, images=len(lists[0]),
                right=packed if several else packed[0])


def test_one_seed_has_no_interval_and_no_bold_number():
    runs = {("symmetric", 0): np.zeros(20), ("clamp", 0): np.ones(20)}
    compared = differences.compare({"clean": runs}, list(robustness.ARMS))
    d = compared["clean", "clamp"]
    text = differences.tables({"clean": runs}, compared, ["symmetric", "clamp"], primary=["clean"])
    assert d.n == 1 and d.mean == 100 and np.isnan(d.low)
    assert "+100.0" in text and "**" not in text


def test_bold_is_what_is_primary_and_survives_holms_correction_over_arms_and_measures():
    images = np.random.default_rng(0).random(50) < 0.5
    found = {name: {("symmetric", s): images * 0.5 for s in range(5)} for name in "abc"}
    for arm, gaps in (("clamp", (10, 11, 12, 11, 10)), ("admm", (2, 11, 9, 14, 5))):
        for name in found:
            found[name] |= {(arm, s): images * 0.5 + x / 100 for s, x in enumerate(gaps)}
    arms = ["symmetric", "clamp", "admm"]
    compared = differences.compare(found, arms)
    p = differences.corrected(compared, ["a", "b"])
    assert set(p) == {(m, arm) for m in "ab" for arm in arms[1:]}
    assert p["a", "admm"] == pytest.approx(2 * compared["a", "admm"].p)     # 0.023 alone
    text = differences.tables(found, compared, arms, primary=["a", "b"])
    assert text.count("**+10.8") == 4 and "**+8.2" in text                  # two tables each
    alone = differences.tables(found, compared, arms, primary=["a"])
    assert alone.count("**+10.8") == 2 and "c " in alone


def test_a_measure_that_half_of_the_arms_lack_gets_no_panel(monkeypatch, tmp_path):
    arms = ["symmetric", "clamp", "admm"]
    runs = {(arm, s): np.full(10, 0.5) for arm in arms for s in range(2)}
    some = {run: right for run, right in runs.items() if run[0] != "admm"}
    compared = differences.compare({"clean": runs, "apgd": some}, arms)
    drawn = []
    monkeypatch.setattr(plt, "close", drawn.append)
    differences.draw(compared, arms, tmp_path / "figure.png")
    assert [ax.get_title() for ax in drawn[0].axes if ax.get_visible()] == ["clean"]
    assert (tmp_path / "figure.png").stat().st_size > 5000


def test_only_seeds_that_both_arms_have_are_paired():
    runs = {("symmetric", 0): np.zeros(4), ("symmetric", 1): np.ones(4),
            ("admm", 1): np.ones(4), ("admm", 2): np.ones(4)}
    d = differences.compare({"clean": runs}, ["admm"])["clean", "admm"]
    assert (d.n, d.mean) == (1, 0)
    assert "Not there: symmetric seed 2, admm seed 0." in differences.tables(
        {"clean": runs}, {}, ["symmetric", "admm"])


def test_corruptions_are_means_over_types_and_severities():
    severities = [[True, True, False], [True, False, False]]
    rows = [row("a", severities, "corruptions", type=name) for name in corruptions.NAMES[1:]]
    rows += [row("a", [[True] * 3] * 2, "corruptions", type="gaussian_noise")]
    found = differences.outcomes(rows, {("admm", 0): "a"}, 3)
    assert found["blur"]["admm", 0] == pytest.approx([1, 0.5, 0])
    assert found["noise"]["admm", 0] == pytest.approx([1, 2 / 3, 1 / 3])
    assert found["15 corruptions"]["admm", 0] == pytest.approx([1, 8 / 15, 1 / 15])
    assert "noise" not in differences.outcomes(rows[:-1], {("admm", 0): "a"}, 3)    # two of three


def test_the_adaptive_attack_on_a_network_without_rpc_is_pgd():
    rows = [row("s", [True, False], "pgd", eps=2 / 255), row("r", [True, True], "pgd", eps=2 / 255),
            row("r", [False, False], "adaptive_pgd", eps=2 / 255), row("elsewhere", [True, True])]
    found = differences.outcomes(rows, {("symmetric", 0): "s", ("rpc4-l1", 0): "r"}, 2,
                                 same=["symmetric"])
    adaptive = found["adaptive_pgd 2/255"]
    assert adaptive["symmetric", 0].tolist() == [1, 0] and adaptive["rpc4-l1", 0].tolist() == [0, 0]
    assert "clean" not in found                                            # of another folder


def test_rows_of_another_number_of_images_are_named():
    folders = {("softmax", 0): "s"}
    assert list(differences.outcomes([row("s", [True, False])], folders, 2)) == ["clean"]
    assert list(differences.outcomes([row("s", [True])], folders, 2)) == ["clean, 1 images"]


@pytest.mark.parametrize("more, words", [
    ([row("c", [False, False], "pgd", eps=2 / 255, steps=20)], "clamp, seed 0 has two rows of pgd 2/255"),
    ([row("c", [True])], "clean: clamp, seed 0 was measured on 1 images, symmetric"),
    ([row("c", [True, False], "pgd", eps=2 / 255, steps=100)], "pgd 2/255.* was measured in two ways.*100")])
def test_a_row_twice_other_images_and_two_ways_of_measuring_one_thing_are_refused(more, words):
    rows = [row("s", [True, False])]
    rows += [row(arm, [True, False], "pgd", eps=2 / 255, steps=20) for arm in "sc"]
    folders = {("symmetric", 0): "s", ("clamp", 0): "c"}
    assert len(differences.outcomes(rows, folders, 2)) == 2
    with pytest.raises(ValueError, match=words):
        differences.outcomes(rows + more, folders, 2)


def test_rows_from_before_a_run_was_trained_further_are_left_out(tmp_path):
    (tmp_path / "s").mkdir()
    torch.save(dict(model=dict(w=torch.ones(2))), tmp_path / "s" / "last.pt")
    before, now, other = (row(str(tmp_path / name), [True]) | dict(weights=weights_of(dict(w=w)))
                          for name, w in (("s", torch.zeros(2)), ("s", torch.ones(2)),
                                          ("t", torch.ones(2))))
    rows = [before, now, other]
    assert differences.current(rows, {("symmetric", 0): tmp_path / "s"}) == [now]


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Call the study in this process; returns the commands that it ran."""

    def run(*argv):
        commands = []

        def call(*command):
            commands.append([str(part) for part in command])
            study = commands[-1][0] == "-m"
            monkeypatch.setattr(sys, "argv", commands[-1][study:])
            (robust_attentions if study else train_cls).main()

        monkeypatch.setattr(robustness, "call", call)
        few = ["--out_dir", str(tmp_path / "r"), "--arms", "symmetric", "clamp", "--seeds", "0",
               "--limit", "4", "--num_images", "32", "--batch_size", "16", "--epochs", "2",
               "--measures", "clean", "pgd eps=2/255 steps=1", "adaptive_pgd eps=2/255 steps=1"]
        monkeypatch.setattr(sys, "argv", ["robustness.py", *few, *argv])
        robustness.main()
        return commands

    return run


def test_the_study_does_what_is_missing_and_nothing_twice(study, tmp_path, monkeypatch, capsys):
    out = tmp_path / "r"
    full = study("--clamp", "0.7")
    evaluate = ["-m", "referee.studies.robust_attentions", "evaluate"]
    assert [command[0] for command in full[:2]] == ["train_cls.py"] * 2
    assert [command[:3] for command in full[2:]] == [evaluate] * 2
    args = common.load(out / "clamp_s0")["args"]
    given = dict(attn="rpc", n_iter=1, lambd=0.7, seed=0, num_images=32, keep_every=1)
    assert given.items() <= args.items()
    assert str(out / "clamp_s0") in full[-1] and str(out / "symmetric_s0") not in full[-1]
    assert (out / "clamp_s0" / "epoch_2.pt").exists() and (out / "differences.png").exists()
    shown, rows = capsys.readouterr().out, (out / "eval" / "results.jsonl").read_text()
    assert "pgd 2/255" in shown and shown.count("adaptive_pgd 2/255") > 3
    assert (out / "differences.md").read_text() in shown

    # a run that was cut after its first epoch goes on to the same weights; no other is trained
    end = common.load(out / "clamp_s0")["model"]
    (out / "clamp_s0" / "epoch_1.pt").replace(out / "clamp_s0" / "last.pt")
    assert not robustness.finished(out / "clamp_s0", "clamp", 0)
    assert [command[:3] for command in study("--clamp", "0.7", "--no-train")] == [evaluate]
    again = study("--clamp", "0.7")
    assert again[0] == ["train_cls.py", "--resume", str(out / "clamp_s0")]
    assert [command[:3] for command in again[1:]] == [evaluate] * 2
    assert (out / "eval" / "results.jsonl").read_text() == rows
    resumed = common.load(out / "clamp_s0")["model"]
    assert all(torch.equal(t, resumed[name]) for name, t in end.items())

    # a folder of another arm, seed or recipe is refused
    (out / "symmetric_s0").rename(out / "symmetric_s1")
    with pytest.raises(ValueError, match="symmetric_s1 was trained with seed 0, expected 1"):
        study("--clamp", "0.7", "--seeds", "1")
    (out / "symmetric_s1").rename(out / "symmetric_s0")
    shutil.rmtree(out / "clamp_s0")
    with pytest.raises(ValueError, match="was trained with epochs [12], .* with [12]: choose"):
        study("--clamp", "0.7", "--epochs", "1")
    with pytest.raises(ValueError, match="clamp_s0 was trained with lambd 0.7, expected 0.5"):
        study()


def test_bad_flags_are_one_clear_line(study, tmp_path):
    with pytest.raises(ValueError, match="expected symmetric among them"):
        study("--arms", "clamp")
    with pytest.raises(ValueError, match="holds no finished run"):
        study("--no-train")


def test_a_script_that_fails_ends_the_study():
    with pytest.raises(ValueError, match="no_such_script.py failed"):
        robustness.call("no_such_script.py")


def test_a_robust_attention_is_an_arm_trained_by_its_study(study, tmp_path):
    commands = study("--arms", "symmetric", "keys-rows", "--measures", "clean", "--epochs", "1")
    assert commands[1][:4] == ["-m", "referee.studies.robust_attentions", "train", "keys-rows"]
    folder = tmp_path / "r" / "keys-rows_s0"
    assert common.load(folder)["model_config"]["attn"] == "keys-rows lambd=1 n_iter=4"
    folder.rename(tmp_path / "r" / "keys_s0")
    with pytest.raises(ValueError, match="keys_s0 was trained with attn keys-rows .*, expected keys lambd=0.5"):
        study("--arms", "symmetric", "keys", "--epochs", "1")
    everywhere = study("--arms", "symmetric", "keys-rows-all", "--measures", "clean", "--epochs", "1")[0]
    assert everywhere[:4] == ["-m", "referee.studies.robust_attentions", "train", "keys-rows"]
    assert common.load(tmp_path / "r" / "keys-rows-all_s0")["model_config"]["rpc_layers"] == (0, 1, 2, 3)


TUNED = dict(attn="symmetric", lr=1e-3, init_from="out/start_s0")


@pytest.mark.parametrize("runs, words", [
    ({("rpc4-l1", 0): dict(lambd=4.0), ("rpc4-l1", 1): dict(lambd=4.0), ("clamp", 0): dict(lambd=0.5)}, None),
    ({("rpc4-l1", 0): dict(lambd=4.0), ("rpc4-l1", 1): dict(lambd=3.0)},
     "rpc4-l1_s1 was trained with lambd 3.0, .*_s0 with 4.0"),
    ({("symmetric", 0): TUNED, ("symmetric", 1): TUNED | dict(init_from="out/start_s1")}, None),
    ({("symmetric", 0): TUNED, ("symmetric", 1): TUNED | dict(lr=2e-3)}, "with lr 0.002, .* with 0.001"),
    ({("symmetric", 0): TUNED, ("symmetric", 1): TUNED | dict(init_from=None)}, "with fine-tuned False, .* with True"),
    ({("symmetric", 0): TUNED, ("clamp", 0): TUNED | dict(init_from="out/another_s0")},
     "with init_from out/another_s0, .* with out/start_s0")])
def test_networks_differ_in_their_arm_their_seed_and_its_start_alone(runs, words, tmp_path):
    folders = {run: tmp_path / f"{run[0]}_s{run[1]}" for run in runs}
    for run, folder in folders.items():
        folder.mkdir()
        torch.save(dict(args=dict(seed=run[1]) | runs[run]), folder / "last.pt")
    with pytest.raises(ValueError, match=words) if words else nullcontext():
        robustness.check_recipe(folders)


@pytest.mark.parametrize("more, words", [
    (["--seeds", "77"], "results.jsonl: no row of these arms"),
    (["nowhere.jsonl"], "--rows nowhere.jsonl is not a file")])
def test_rows_that_are_not_there_are_named(more, words, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x", "--rows", "referee/results/robustness/results.jsonl", *more])
    with pytest.raises(ValueError, match=words):
        robustness.main()
