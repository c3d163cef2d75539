"""referee/arms.py and differences.py: what is missing is trained and evaluated, then paired by seed."""

import numpy as np
import pytest
import torch

import common
from common import InputError
from robust import corruptions
from robust.results import pack
from referee import arms, constants, control, differences, fresh, line, robust_attentions, robustness


def row(checkpoint, right, measure="clean", **setting):
    """A row of the evaluator. right: (n,) bool or, of several severities, a list of such."""
    several = isinstance(right[0], list)
    lists = right if several else [right]
    packed = [pack(torch.tensor(outcomes)) for outcomes in lists]
    return dict(checkpoint=checkpoint, measure=measure, setting=setting, images=len(lists[0]),
                right=packed if several else packed[0])


# --- from rows to tables --------------------------------------------------------------------------

def test_bold_is_what_is_primary_and_survives_holms_correction_over_arms_and_measures():
    images = np.random.default_rng(0).random(50) < 0.5
    found = {name: {("symmetric", s): images * 0.5 for s in range(5)} for name in "abc"}
    for arm, gaps in (("clamp", (10, 11, 12, 11, 10)), ("admm", (2, 11, 9, 14, 5))):
        for name in found:
            found[name] |= {(arm, s): images * 0.5 + x / 100 for s, x in enumerate(gaps)}
    names = ["symmetric", "clamp", "admm"]
    of = differences.family(found, names, primary=["a", "b"])
    assert set(of.p) == {(m, arm) for m in "ab" for arm in names[1:]}
    assert of.p["a", "admm"] == pytest.approx(2 * of.gaps["a", "admm"].p)   # 0.023 alone
    text = differences.tables(of)
    assert text.count("**+10.8") == 4 and "**+8.2" in text                  # two tables each
    alone = differences.tables(differences.family(found, names, primary=["a"]))
    assert alone.count("**+10.8") == 2 and "c " in alone
    apart = differences.family(found, names, primary=["a", "b"], references=["clamp"])
    assert set(apart.p) == {("a", "admm"), ("b", "admm")} and ("a", "clamp") in apart.gaps


def test_only_seeds_that_both_arms_have_are_paired_and_one_seed_has_no_interval():
    runs = {("symmetric", 0): np.zeros(4), ("symmetric", 1): np.ones(4),
            ("admm", 1): np.ones(4), ("admm", 2): np.ones(4)}
    of = differences.family({"clean": runs}, ["symmetric", "admm"], primary=["clean"])
    d = of.gaps["clean", "admm"]
    assert (d.n, d.mean) == (1, 0) and np.isnan(d.low)
    text = differences.tables(of)
    assert "Not there: symmetric seed 2, admm seed 0." in text and "**" not in text


def test_corruptions_are_means_over_types_and_severities():
    severities = [[True, True, False], [True, False, False]]
    rows = [row("admm_s0", severities, "corruptions", type=name) for name in corruptions.NAMES[1:]]
    rows += [row("admm_s0", [[True] * 3] * 2, "corruptions", type="gaussian_noise")]
    found = differences.outcomes(rows, 3)
    assert found["blur"]["admm", 0] == pytest.approx([1, 0.5, 0])
    assert found["noise"]["admm", 0] == pytest.approx([1, 2 / 3, 1 / 3])
    assert found["15 corruptions"]["admm", 0] == pytest.approx([1, 8 / 15, 1 / 15])
    assert "noise" not in differences.outcomes(rows[:-1], 3)                     # two of three


def test_a_family_of_corruptions_is_that_of_imagenet_c():
    rows = [row("admm_s0", [j < i for j in range(15)], "corruptions", type=name)
            for i, name in enumerate(corruptions.NAMES)]                    # i of 15 images are right
    found = {name: 15 * of["admm", 0].mean() for name, of in differences.outcomes(rows, 15).items()}
    assert found == pytest.approx({"15 corruptions": 7, "noise": 1, "blur": 4.5, "weather": 8.5, "digital": 12.5})


def test_the_adaptive_attack_on_a_network_without_rpc_is_pgd():
    rows = [row("out/s_s0", [True, False], "pgd", eps=2 / 255), row("r_s0", [True, True], "pgd", eps=2 / 255),
            row("r_s0", [False, False], "adaptive_pgd", eps=2 / 255), row("elsewhere", [True, True])]
    found = differences.outcomes(rows, 2, same=["s"])
    adaptive = found["adaptive_pgd 2/255"]
    assert adaptive["s", 0].tolist() == [1, 0] and adaptive["r", 0].tolist() == [0, 0]
    assert "clean" not in found                                            # no <arm>_s<seed>


def test_other_numbers_of_images_are_a_measure_apart_and_two_ways_of_one_are_refused():
    rows = [row("a_s0", [True, False], "pgd", eps=2 / 255, steps=20)]
    assert list(differences.outcomes(rows, 2)) == ["pgd 2/255"]
    assert list(differences.outcomes(rows, 3)) == ["pgd 2/255, 2 images"]
    for other, words in ((rows[0], "two rows of pgd 2/255"),
                         (row("a_s1", [True, False], "pgd", eps=2 / 255, steps=100), "two ways.*100")):
        with pytest.raises(InputError, match=words):
            differences.outcomes([*rows, other], 2)


# --- from arms to rows ----------------------------------------------------------------------------

def test_arms_of_a_table_differ_in_what_their_names_say():
    defence = dict(adv_eps=2 / 255, adv_steps=3)
    assert control.ARMS["rpc4-l1-adv"] == control.ARMS["rpc4-l1"] | defence
    assert control.ARMS["symmetric-adv"] == dict(attn="symmetric") | defence
    assert constants.ARMS["paper-0.05-n6"] == dict(attn="rpc", form="paper", lambd=0.05, n_iter=6)
    assert robustness.ARMS["keys-all"] == robustness.ARMS["keys"] | dict(rpc_layers="all")
    assert arms.flags_of({"late": dict(init_from="out/start_s{seed}", n_iter=2)}, "late", 3) == \
        dict(init_from="out/start_s3", n_iter=2, seed=3)


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Call the study of robustness in this process; returns the commands that it ran."""

    def run(*argv):
        commands = []

        def call(*command):
            commands.append([str(part) for part in command])
            robust_attentions.main(commands[-1][2 * (command[0] == "-m"):])

        monkeypatch.setattr(arms, "call", call)
        robustness.main([
            "--out_dir", str(tmp_path), "--arms", "symmetric", "clamp", "--seeds", "0", "--limit", "4",
            "--num_images", "32", "--batch_size", "16", "--epochs", "2", "--measures", "clean",
            "pgd eps=2/255 steps=1", "adaptive_pgd eps=2/255 steps=1", *argv])
        return [command[:3] for command in commands]

    return run


def test_a_study_does_what_is_missing_and_nothing_twice(study, tmp_path, capsys):
    clamp, symmetric = tmp_path / "clamp_s0", tmp_path / "symmetric_s0"
    assert [c[0] for c in study()] == ["train_cls.py", "eval_robust.py"] * 2
    args = common.load(clamp)["args"]
    assert dict(attn="rpc", n_iter=1, lambd=0.5, seed=0, num_images=32).items() <= args.items()
    rows = {file.parent.name: file.read_text() for file in tmp_path.glob("eval/*/results.jsonl")}
    assert "adaptive_pgd" in rows["clamp_s0"] and "adaptive_pgd" not in rows["symmetric_s0"]
    assert (tmp_path / "differences.png").stat().st_size > 5000
    shown = capsys.readouterr().out
    assert "adaptive_pgd 2/255" in shown and (tmp_path / "differences.md").read_text() in shown

    # a run that was cut after its first epoch goes on to the same weights; no other is trained
    end = common.load(clamp)["model"]
    (clamp / "epoch_1.pt").replace(clamp / "last.pt")
    lines = (clamp / "log.jsonl").read_text().splitlines(keepends=True)
    (clamp / "log.jsonl").write_text("".join(lines[:-1]))
    evaluated = [["eval_robust.py", "--ckpt", str(folder)] for folder in (symmetric, clamp)]
    assert study("--no-train") == evaluated[:1]
    assert study() == [evaluated[0], ["train_cls.py", "--resume", str(clamp)], evaluated[1]]
    assert rows == {file.parent.name: file.read_text() for file in tmp_path.glob("eval/*/results.jsonl")}
    assert all(torch.equal(t, end[name]) for name, t in common.load(clamp)["model"].items())
    with pytest.raises(SystemExit):
        study("--rows", *map(str, tmp_path.glob("eval/*/*.jsonl")))                  # and flags of train_cls.py
    robustness.main(["--out_dir", str(tmp_path), "--limit", "4", "--rows", *map(str, tmp_path.glob("eval/*/*.jsonl"))])

    # a folder of another arm, seed or recipe is refused
    symmetric.rename(tmp_path / "symmetric_s1")
    with pytest.raises(InputError, match="symmetric_s1 was trained with seed 0, expected 1"):
        study("--seeds", "1")
    with pytest.raises(InputError, match="was trained with epochs 2, .* with 3: choose"):
        study("--arms", "admm", "clamp", "--epochs", "3")
    clamp.rename(tmp_path / "no-shrink_s0")
    with pytest.raises(InputError, match="n_iter 1, expected 4"):
        study("--arms", "no-shrink")


def test_a_script_that_fails_ends_the_study():
    with pytest.raises(InputError, match="no_such_script.py failed"):
        arms.call("no_such_script.py")


def test_a_robust_attention_is_an_arm_in_one_layer_or_in_all(study, tmp_path):
    few = "--measures", "clean", "--epochs", "1", "--arms"
    train, evaluate = study(*few, "keys-rows-all")
    assert train == ["-m", "referee.robust_attentions", "train_cls.py"] and evaluate[2] == "eval_robust.py"
    config = common.load(tmp_path / "keys-rows-all_s0")["model_config"]
    assert (config["attn"], config["rpc_layers"]) == ("keys-rows lambd=1 n_iter=4", (0, 1, 2, 3))


def test_networks_of_a_study_differ_in_their_arms_flags_and_seed_alone(tmp_path):
    table = {"symmetric": dict(attn="symmetric"), "clamp": dict(attn="rpc", lambd=0.5)}
    folders = {(arm, seed): tmp_path / f"{arm}_s{seed}" for arm in table for seed in (0, 1)}
    for (arm, seed), folder in folders.items():
        folder.mkdir()
        torch.save(dict(args=dict(seed=seed, lambd=4.0, init="default") | table[arm]), folder / "last.pt")
    arms.check_recipe(table, folders)
    torch.save(dict(args=dict(seed=1, init="trunc_normal") | table["clamp"]), folder / "last.pt")
    with pytest.raises(InputError, match="clamp_s1 was trained with init trunc_normal, .* with default"):
        arms.check_recipe(table, folders)


@pytest.mark.parametrize("more, words", [(["--seeds", "77"], "no rows of these arms and seeds"),
                                         (["nowhere.jsonl"], "nowhere.jsonl is not a file")])
def test_rows_that_are_not_there_are_named(more, words):
    with pytest.raises(InputError, match=words):
        robustness.main(["--rows", "referee/results/robustness/results.jsonl", *more])


def test_arms_of_the_line_are_what_its_stored_networks_were_trained_as():
    paths = line.files(["line/s*.jsonl", "line/flat.jsonl", "line/long.jsonl", "line/robust.jsonl"])
    configs = {arms.run_of(row)[0]: row["model_config"] for row in arms.read(paths)}
    epochs = {row["run"].rpartition("_s")[0]: row["epoch"] for row in line.logged(line.files(["line/training.jsonl"]))}
    usual = dict(attn="softmax", n_iter=4, lambd=4.0, form="released")
    assert len(configs) > 12
    for arm, config in configs.items():
        own = usual | fresh.ARMS[arm]
        assert {name: (usual | config)[name] for name in usual} == {name: own[name] for name in usual}, arm
        assert config["init"] == "default" and epochs[arm] == own["epochs"]


def test_networks_of_the_line_are_trained_measured_and_paired(tmp_path, capfd):
    fresh.main(["--out_dir", str(tmp_path), "--seeds", "3", "--limit", "4", "--num_images", "32", "--batch_size", "16",
                "--measures", "clean", "pgd eps=2/255 steps=1"])
    assert "| uniform-l0 minus symmetric-e8 | 1 " in capfd.readouterr().out
    assert common.load(tmp_path / "uniform-l0_s3")["model_config"]["pap"]["lambd"] == 0
