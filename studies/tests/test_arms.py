"""Test studies/arms.py (missing runs are trained and measured) and line.py (distances)."""

import numpy as np
import pytest
import scipy.stats

import common
from common import InputError
from studies import arms, line, robust_attentions, stats
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


# --- studies/line.py ------------------------------------------------------------------------------

M = "pgd 2/255"


def network(arm, seed, loss, off=0.0):
    noise = np.random.default_rng([seed, len(arm)]).normal(0, 0.5)
    return line.Network(arm, seed, loss, {M: 40 - 15 * np.log(loss) + off + noise})


def trained():
    epochs = {"symmetric-e4": 0.4, "symmetric-e8": 0.1, "symmetric-e16": 0.03}
    return [network(arm, seed, loss * (1 + seed / 20)) for arm, loss in epochs.items()
            for seed in range(4)]


def by_hand(own, of, measure):
    """Return a mean residual, its variance and its degrees of freedom (Welch), with numpy only."""
    x, y = (np.array(z) for z in zip(*((np.log(n.loss), n.accuracy[measure]) for n in of)))
    at, own_y = (np.array(z) for z in zip(*((np.log(n.loss), n.accuracy[measure]) for n in own)))
    slope = ((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum()
    start, n, m = y.mean() - slope * x.mean(), len(own), len(x)
    residual = own_y - start - slope * at
    spread = ((y - start - slope * x) ** 2).sum() / (m - 2)
    of_line = spread * (1 / m + (at.mean() - x.mean()) ** 2 / ((x - x.mean()) ** 2).sum())
    own_parts = [(residual.var(ddof=1) / n, n - 1)]
    seeds = sorted({network.seed for network in own})
    sums = [sum(r - residual.mean() for r, network in zip(residual, own) if network.seed == s)
            for s in seeds]
    k = len(seeds)
    own_parts.append((np.square(sums).sum() / n ** 2 * k / (k - 1), k - 1))
    variance, df = max(own_parts)
    if variance < spread / n:                               # use the line's scatter
        return residual.mean(), spread / n + of_line, m - 2
    total = variance + of_line
    return residual.mean(), total, total ** 2 / (variance ** 2 / df + of_line ** 2 / (m - 2))


@pytest.mark.parametrize("name, group", [("fresh", "RPC that attends"),
                                         ("scenes", "RPC that attends"),
                                         ("fresh", "attentions of others")])
def test_pooled_distances_equal_a_hand_computation(name, group):
    networks = line.stored(name)
    own = [n for n in networks if n.arm in line.GROUPS[name][group]]
    found, p = line.grouped(name, networks)
    for measure in line.PICTURES[name][3]:
        if name == "fresh":
            of = [n for n in networks if n.arm.startswith("symmetric-e")]
        else:
            of = [n for n in networks if n not in own and n.arm not in ("clamp", "sharp")]
        mean, variance, df = by_hand(own, of, measure)
        d = found[group, measure]
        assert (d.mean, d.error ** 2, d.df) == pytest.approx((mean, variance, df))
        assert d.p == pytest.approx(2 * scipy.stats.t(df).sf(abs(mean) / variance ** 0.5))
        assert d.p <= p[group, measure]


@pytest.mark.parametrize("measure", line.PICTURES["fresh"][3])
def test_adjusted_differences_equal_a_hand_computation(measure):
    networks = line.stored("fresh")

    def of(*names):
        return [n for n in networks if n.arm in names]

    rpc, base = of("long-rpc4-l1"), of("long-symmetric", "half-symmetric")
    # Fit one slope to both groups around their means. The remaining gap is attention's effect.
    x, y = (np.array([f(n) for n in rpc + base]) for f in (
        lambda n: np.log(n.loss), lambda n: n.accuracy[measure]))
    k = len(rpc)
    dx, dy = (np.r_[z[:k] - z[:k].mean(), z[k:] - z[k:].mean()] for z in (x, y))
    slope, gap = (dx * dy).sum() / (dx ** 2).sum(), x[:k].mean() - x[k:].mean()
    worth, left = y[:k].mean() - y[k:].mean() - slope * gap, dy - slope * dx
    spread = (left ** 2).sum() / (len(x) - 3)
    error = (spread * (1 / k + 1 / (len(x) - k) + gap ** 2 / (dx ** 2).sum())) ** 0.5
    d = line.adjusted(networks, "one slope", measure)
    assert (d.mean, d.error, d.df) == pytest.approx((worth, error, len(x) - 3))
