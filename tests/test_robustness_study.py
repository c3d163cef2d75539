"""studies/robustness.py: what is missing is trained and evaluated; differences are paired."""

import shutil
import sys

import numpy as np
import pytest
import torch

import common
import train_cls
from robust import corruptions
from robust.results import pack, weights_of
from studies import differences, robust_attentions, robustness
from studies.plot import plt


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


def test_a_row_twice_and_other_images_in_one_arm_are_refused():
    folders = {("symmetric", 0): "s", ("clamp", 0): "c"}
    with pytest.raises(ValueError, match="clamp, seed 0 has two rows of clean"):
        differences.outcomes([row("s", [True, False]), row("c", [True, False]),
                              row("c", [False, False])], folders, 2)
    with pytest.raises(ValueError, match="clean: clamp, seed 0 was measured on 1 images, symmetric"):
        differences.outcomes([row("s", [True, False]), row("c", [True])], folders, 2)


def test_two_ways_of_measuring_one_thing_are_not_mixed():
    def attacked(folder, steps):
        return row(folder, [True, False], "pgd", eps=2 / 255, steps=steps)
    folders = {("symmetric", 0): "s", ("clamp", 0): "c"}
    assert differences.outcomes([attacked("s", 20), attacked("c", 20)], folders, 2)
    with pytest.raises(ValueError, match="pgd 2/255.* was measured in two ways.*100"):
        differences.outcomes([attacked("s", 20), attacked("c", 100)], folders, 2)


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
    evaluate = ["-m", "studies.robust_attentions", "evaluate"]
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
    assert commands[1][:4] == ["-m", "studies.robust_attentions", "train", "keys-rows"]
    folder = tmp_path / "r" / "keys-rows_s0"
    assert common.load(folder)["model_config"]["attn"] == "keys-rows lambd=1 n_iter=4"
    folder.rename(tmp_path / "r" / "keys_s0")
    with pytest.raises(ValueError, match="keys_s0 was trained with attn keys-rows .*, expected keys lambd=0.5"):
        study("--arms", "symmetric", "keys", "--epochs", "1")
    everywhere = study("--arms", "symmetric", "keys-rows-all", "--measures", "clean", "--epochs", "1")[0]
    assert everywhere[:4] == ["-m", "studies.robust_attentions", "train", "keys-rows"]
    assert common.load(tmp_path / "r" / "keys-rows-all_s0")["model_config"]["rpc_layers"] == (0, 1, 2, 3)


def test_seeds_of_an_arm_have_the_same_settings_while_two_arms_may_differ(tmp_path):
    folders = {("rpc4-l1", 0): 4.0, ("rpc4-l1", 1): 4.0, ("clamp", 0): 0.5}
    for (arm, seed), lambd in folders.items():
        folder = folders[arm, seed] = tmp_path / f"{arm}_s{seed}"
        folder.mkdir()
        torch.save(dict(args=dict(attn="rpc", lambd=lambd, seed=seed)), folder / "last.pt")
    robustness.check_recipe(folders)
    torch.save(dict(args=dict(attn="rpc", lambd=3.0, seed=1)), tmp_path / "rpc4-l1_s1/last.pt")
    with pytest.raises(ValueError, match="rpc4-l1_s1 was trained with lambd 3.0, .*_s0 with 4.0"):
        robustness.check_recipe(folders)


def test_networks_that_began_from_the_network_of_their_seed_are_of_one_recipe(tmp_path):
    folders = {("symmetric", seed): tmp_path / f"symmetric_s{seed}" for seed in (0, 1)}
    for (arm, seed), folder in folders.items():
        folder.mkdir()
        args = dict(attn=arm, seed=seed, init_from=f"out/start_s{seed}", lr=1e-3)
        torch.save(dict(args=args), folder / "last.pt")
    robustness.check_recipe(folders)
    for change, words in ((dict(lr=2e-3), "lr 0.002, .* with 0.001"),
                          (dict(init_from=None), "fine-tuned False, .* with True")):
        torch.save(dict(args=args | change), folder / "last.pt")
        with pytest.raises(ValueError, match=f"was trained with {words}"):
            robustness.check_recipe(folders)
    folders = {("symmetric", 0): folders["symmetric", 0], ("clamp", 0): folder}
    torch.save(dict(args=args | dict(init_from="out/another_s0")), folder / "last.pt")
    with pytest.raises(ValueError, match="init_from out/another_s0, .* with out/start_s0"):
        robustness.check_recipe(folders)


@pytest.mark.parametrize("more, words", [
    (["--seeds", "77"], "results.jsonl: no row of these arms"),
    (["nowhere.jsonl"], "--rows nowhere.jsonl is not a file")])
def test_rows_that_are_not_there_are_named(more, words, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x", "--rows", "results/robustness/results.jsonl", *more])
    with pytest.raises(ValueError, match=words):
        robustness.main()
