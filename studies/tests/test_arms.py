"""Test studies/arms.py: it trains and measures missing runs, and compares rows in tables."""


import pytest

import common
from common import InputError
from studies import arms, robust_attentions, stats
from test_stats import row


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Return a function that calls `arms robustness` here and returns the commands that it ran."""
    commands = []

    def call(*command):
        commands.append([str(part) for part in command])
        robust_attentions.main(commands[-1][2 * (command[0] == "-m"):])

    def run(*argv):
        commands.clear()
        arms.main(["robustness", "--out_dir", str(tmp_path), "--seeds", "7", "--limit", "4",
                   "--measures", "clean", "pgd", "adaptive_pgd",
                   "--num_images", "32", "--batch_size", "16", "--epochs", "2", *argv])
        return [command[:3] for command in commands]

    monkeypatch.setattr(arms, "call", call)
    return run


def test_study_runs_only_missing_steps(study, tmp_path, capsys):
    pair = "--arms", "symmetric", "clamp"
    symmetric = tmp_path / "symmetric_s7"
    scripts = [c[0] for c in study(*pair)]
    assert scripts == ["train_cls.py", *["eval_robust.py"] * 2, "train_cls.py",
                       *["eval_robust.py"] * 3]
    args = common.load(tmp_path / "clamp_s7")["args"]
    assert dict(attn="rpc", n_iter=1, lambd=0.5, seed=7, num_images=32).items() <= args.items()
    folders = {path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("eval/*/*")}
    assert folders == {f"eval/{name}" for name in (
        "symmetric_s7/clean_4", "symmetric_s7/pgd_4",
        "clamp_s7/clean_4", "clamp_s7/pgd_4", "clamp_s7/adaptive_pgd_4")}
    assert "clamp minus symmetric" in capsys.readouterr().out

    # Nothing is missing: the finished trainings do no step, and nothing is measured again. An
    # evaluation that was killed is made again.
    before = (symmetric / "last.pt").stat().st_mtime_ns
    assert [c[0] for c in study(*pair)] == ["train_cls.py"] * 2
    (tmp_path / "eval/clamp_s7/pgd_4").rename(tmp_path / "eval/clamp_s7/unfinished")
    assert [c[0] for c in study(*pair)] == ["train_cls.py"] * 2 + ["eval_robust.py"]
    assert (symmetric / "last.pt").stat().st_mtime_ns == before

    # a folder of another arm or seed is an error
    symmetric.rename(tmp_path / "symmetric_s1")
    with pytest.raises(InputError, match="symmetric_s1 was trained with seed 7, expected 1"):
        study(*pair, "--seeds", "1")


def test_new_rows_are_comparable_with_stored_rows():
    new = dict(network="out/mine_s5", data="shapes", seed=1, name="pgd", eps="4/510",
               measure="pgd steps=20 eps=4/510", images=4, top1=75.0, loss=0.5,
               hardware="cpu, AMD EPYC, 1 threads", right=["1101"])
    old = row("a_s5", [True, True, False, True], "pgd", eps=2 / 255, steps=20)
    one, other = stats.row_of(new), stats.row_of(old)
    assert one.arm == "mine" and one.how == other.how and (one.right == other.right).all()
    for field in set(stats.Row._fields) - {"arm", "name", "right", "loss"}:
        assert getattr(one, field) == getattr(other, field), field
    fog = new | dict(name="fog", measure="corruptions type=fog severities=1,3,5", eps="",
                     right=["1101", "1001", "1000"])
    stored = row("a_s5", [[True, True, False, True], [True, False, False, True],
                          [True, False, False, False]], "corruptions", type="fog",
                 severities=[1, 3, 5])
    one, other = stats.row_of(fog), stats.row_of(stored)
    assert (one.kind, one.measure, one.how) == (other.kind, other.measure, other.how)
    assert list(one.right) == list(other.right)


def test_stored_networks_have_the_flags_of_their_arms():
    paths = arms.files(["line/s*.jsonl", "line/flat.jsonl", "line/long.jsonl", "line/robust.jsonl"])
    lines = [row for path in paths for row in common.read_log(path)]
    configs = {stats.row_of(row).arm: row["model_config"] for row in lines}
    usual = dict(attn="softmax", n_iter=4, lambd=4.0, form="released")
    assert len(configs) > 12
    for arm, config in configs.items():
        own = usual | arms.LINE_ARMS[arm]
        assert {k: (usual | config)[k] for k in usual} == {k: own[k] for k in usual}, arm
