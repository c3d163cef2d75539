"""referee/line.py: who lies on the line of robustness against clean loss, and who leaves it."""

import json

import numpy as np
import pytest
import scipy.stats
import torch

from common import InputError
from referee import line, timm_vit
from referee.stats import holm
from robust import corruptions
from robust.results import pack


def network(arm, seed, loss, off=0.0):
    noise = np.random.default_rng([seed, len(arm)]).normal(0, 0.5)
    return line.Network(arm, seed, loss, {"pgd 2/255": 40 - 15 * np.log(loss) + off + noise})


def trained():
    epochs = {"symmetric-e4": 0.4, "symmetric-e8": 0.1, "symmetric-e16": 0.03}
    return [network(arm, seed, loss * (1 + seed / 20)) for arm, loss in epochs.items() for seed in range(4)]


def test_an_attention_on_the_line_is_not_told_from_it_and_a_defence_is():
    networks = trained() + [network("slow", seed, 0.3) for seed in range(4)]
    networks += [network("symmetric-adv", seed, 0.1, 20) for seed in range(4)]
    found, p = line.distances(networks, ["pgd 2/255"])
    slow, adv = found["slow", "pgd 2/255"], found["symmetric-adv", "pgd 2/255"]
    assert slow.low < 0 < slow.high and p["slow", "pgd 2/255"] > 0.05
    assert adv.low < 20 < adv.high and p["symmetric-adv", "pgd 2/255"] < 0.01
    assert all(d.low < d.mean < d.high and d.high - d.low < 5 for d in (slow, adv))
    r, low, high, bend = line.correlation(trained(), "pgd 2/255")
    assert low < r < high < -0.9 and bend > 0.05


def test_an_arm_s_interval_leaves_out_a_seed_of_its_own_or_of_the_line_at_a_time():
    own, networks = [network("slow", seed, 0.1 + seed / 20, seed) for seed in (1, 5, 6)], trained()

    def residual(own, line):
        x, y = np.log([n.loss for n in line]), [n.accuracy["pgd 2/255"] for n in line]
        slope, start = np.polyfit(x, y, 1)
        return np.mean([n.accuracy["pgd 2/255"] - start - slope * np.log(n.loss) for n in own])

    mine = [residual([n for n in own if n.seed != s], [n for n in networks if n.seed != s]) for s in (1, 5, 6)]
    theirs = [residual(own, [n for n in networks if n.seed != s]) for s in (0, 2, 3)]     # 1 is of both
    d = line.distance(own, networks, "pgd 2/255")
    assert d.mean == pytest.approx(residual(own, networks))
    assert d.error ** 2 == pytest.approx(2 * np.var(mine) + 2 * np.var(theirs))


def test_seeds_that_agree_by_luck_get_no_narrower_interval_than_the_line_s_own_scatter():
    def on(loss):
        return 40 - 15 * np.log(loss) + 1
    lucky = [network("slow", seed, 0.2)._replace(accuracy={"pgd 2/255": on(0.2)}) for seed in (5, 6, 7)]
    d = line.distance(lucky, trained(), "pgd 2/255")
    assert d == line.scattered(lucky, trained(), "pgd 2/255") and d.error > 0.15
    apart = [network("slow", seed, 0.2, seed) for seed in (5, 6, 7)]        # a floor narrows nothing
    d, floor = line.distance(apart, trained(), "pgd 2/255"), line.scattered(apart, trained(), "pgd 2/255")
    assert d.high - d.low > floor.high - floor.low and d.df < floor.df


def test_one_network_is_as_far_off_as_one_of_ours_may_lie_by_chance():
    near, far = ([network("timm", 0, 0.2, off)] for off in (0, 8))
    for own, inside in ((near, True), (far, False)):
        d = line.distance(own, trained(), "pgd 2/255")
        assert d.n == 1 and (d.low < 0 < d.high) == inside


@pytest.mark.parametrize("seeds", [(5, 6, 7), (5,)], ids=["three", "one"])
@pytest.mark.parametrize("loss", [0.01, 2.0])
def test_beyond_the_line_s_ends_nothing_is_judged(loss, seeds):
    arms = {name: [network(name, seed, at, 30) for seed in seeds] for name, at in (("far", loss), ("near", 0.2))}
    found, p = line.distances(trained() + arms["far"] + arms["near"], ["pgd 2/255"])
    d = found["far", "pgd 2/255"]
    assert d.mean == pytest.approx(30, abs=1.5) and np.isnan([d.low, d.high, p["far", "pgd 2/255"]]).all()
    near = "near", "pgd 2/255"
    assert p[near] == found[near].p < 0.01                              # and no test is counted for it
    rows = [text for text in line.tables(trained() + arms["far"], ["pgd 2/255"]).splitlines() if "far" in text]
    assert "beyond its end" in rows[0] and "30" not in rows[0].split("|", 5)[5]


def test_its_interval_is_that_of_a_prediction_by_the_line():
    own, networks = network("timm", 0, 0.2, 3), trained()
    x, y = np.log([n.loss for n in networks]), [n.accuracy["pgd 2/255"] for n in networks]
    left = y - np.polyval(np.polyfit(x, y, 1), x)
    error = np.sqrt((left ** 2).sum() / (len(x) - 2)
                    * (1 + 1 / len(x) + (np.log(own.loss) - x.mean()) ** 2 / ((x - x.mean()) ** 2).sum()))
    d = line.distance([own], networks, "pgd 2/255")
    assert d.error == pytest.approx(error) and d.df == len(x) - 2
    assert d.high - d.mean == pytest.approx(scipy.stats.t.ppf(0.975, len(x) - 2) * error)


@pytest.mark.parametrize("seeds", [range(4), range(1)], ids=["four", "one"])
def test_where_the_line_bends_a_parabola_gives_an_arm_s_own_distance(seeds):
    def bend(n, off=0):
        return n._replace(accuracy={"x": n.accuracy["pgd 2/255"] + off - 4 * (np.log(n.loss) + 2) ** 2})
    networks, own = [bend(n) for n in trained()], [bend(network("slow", seed, 0.13), 5) for seed in seeds]
    d = line.distance(own, networks, "x", degree=2)
    assert d.low < 5 < d.high and abs(d.mean - 5) < 1 < abs(line.distance(own, networks, "x").mean - 5)


def rows(name, loss=None):
    about = dict(checkpoint=name, model_config={})
    yield about | dict(measure="clean", setting={}, top1=90.0) | (dict(loss=loss) if loss else {})
    yield about | dict(measure="pgd", setting=dict(eps=2 / 255), top1=60.0)
    for kind in corruptions.NAMES:
        yield about | dict(measure="corruptions", setting=dict(type=kind), top1=[70.0, 80.0])


def test_networks_are_rows_with_a_clean_loss_their_own_or_that_of_training():
    both = [*rows("mine_s3", 0.25), *rows("other"), *rows("unknown")]
    found = {n.arm: n for n in line.networks_of(both, [dict(run="other", loss=0.5)])}
    assert set(found) == {"mine", "other"}
    assert found["mine"][1:3] == (3, 0.25) and found["other"].loss == 0.5
    assert found["mine"].accuracy == {"clean": 90, "pgd 2/255": 60, "15 corruptions": pytest.approx(75)}


def paired_rows(gaps, seeds, noise=2, hardware=lambda seed: ("AMD EPYC", "Intel Xeon")[seed % 2]):
    """Made-up rows: each arm's accuracy is symmetric-e8's plus its gap, with noise over seeds and images."""
    for seed in seeds:
        for i, (arm, gap) in enumerate({"symmetric-e8": 0, **gaps}.items()):
            rng = np.random.default_rng([seed, i])

            def packed():
                return pack(torch.tensor(rng.permutation(1000) < 600 + 10 * gap + rng.integers(-noise, noise + 1)))
            about = dict(checkpoint=f"out/line/{arm}_s{seed}", images=1000, data="shapes", conditions={},
                         hardware=f"cpu, {hardware(seed)}, 1 threads")
            yield about | dict(measure="pgd", setting=dict(eps=2 / 255), right=packed())
            for kind in corruptions.NAMES:
                yield about | dict(measure="corruptions", setting=dict(type=kind), right=[packed()])


@pytest.mark.parametrize("gap, seeds, noise, said", [
    (0.2, range(20, 28), 2, "equal"), (9, range(20, 28), 2, "differ"), (0.2, range(20, 28), 150, "open"),
    (0.2, (20, 21), 2, "open")])
def test_lambda_of_05_equals_lambda_0_by_two_one_sided_tests_differs_or_is_open(gap, seeds, noise, said):
    rows = list(paired_rows({"uniform-l0": 4, "paper-0.05-n4": 4 + gap, "softmax-e8": -5}, seeds, noise))
    gaps, p, where = line.paired(rows)
    assert line.verdict(gaps, p) == said and len(gaps) == 8
    if noise == 2:
        assert gaps["paper-0.05-n4", "uniform-l0", "pgd 2/255"].mean == pytest.approx(gap, abs=0.6)
        assert gaps["softmax-e8", "symmetric-e8", "pgd 2/255"].mean == pytest.approx(-5, abs=0.6)
    assert where == {"AMD EPYC": [s for s in seeds if s % 2 == 0], "Intel Xeon": [s for s in seeds if s % 2]}
    if len(seeds) > 2:                                      # Holm: over a group, not over both
        own = {key: d.p for key, d in gaps.items() if key[0] == "softmax-e8"}
        assert {key: p[key] for key in own} == pytest.approx(holm(own))
    assert f"**{said}**" in line.pair_table(gaps, p, where)


def test_pairs_are_of_one_seed_and_one_processor():
    rows = [*paired_rows({"uniform-l0": 0}, (20, 21)), *paired_rows({}, (22,))]
    assert line.paired(rows)[0]["uniform-l0", "symmetric-e8", "15 corruptions"].n == 2
    mixed = [*paired_rows({}, (20,)), *paired_rows({"uniform-l0": 0}, (20,), hardware=lambda seed: "Intel Xeon")]
    with pytest.raises(InputError, match="seed 20 has rows of AMD EPYC and Intel Xeon"):
        line.paired(mixed)
    assert "No pairs yet" in line.pair_table(*line.paired(list(paired_rows({}, (20,)))))


@pytest.mark.parametrize("gap, seeds, noise, said", [
    (-9, range(28, 36), 2, "RPC costs"), (-0.2, range(28, 36), 2, "training time"), (-0.2, range(28, 36), 150, "open"),
    (9, range(28, 36), 2, "open")])
def test_trained_out_rpc_costs_or_what_it_cost_was_training_time_or_it_is_open(gap, seeds, noise, said):
    def renamed(row):
        return row | dict(checkpoint=row["checkpoint"].replace("symmetric-e8", "long-symmetric"))
    gaps, p, _ = line.paired([renamed(row) for row in paired_rows({"long-rpc4-l1": gap}, seeds, noise)])
    assert said in line.long_verdict(gaps, p) and len(gaps) == 2
    six = holm({key: d.p for key, d in gaps.items()} | {i: 1.0 for i in range(4)})      # two arms are not in yet
    assert p == pytest.approx({key: six[key] for key in gaps})


@pytest.mark.parametrize("gap, noise, said", [
    (-9, 2, "costs robustness on CIFAR-10"), (9, 2, "gains"), (-0.2, 2, "no difference that matters"), (-0.2, 150, "open")])
def test_on_cifar_10_rpc_costs_gains_makes_no_difference_or_it_is_open(gap, noise, said):
    def renamed(row):
        row = row | dict(checkpoint=row["checkpoint"].replace("symmetric-e8", "symmetric-e12"), data="cifar10")
        return row | dict(setting=dict(eps=1 / 255)) if row["measure"] == "pgd" else row
    gaps, p, where = line.paired([renamed(row) for row in paired_rows({"rpc4-l1-e12": gap}, range(3, 8), noise)])
    assert said in line.second_verdict(gaps, p) and len(gaps) == 2
    assert p == pytest.approx(holm({key: d.p for key, d in gaps.items()}))
    assert "margin" not in line.pair_table(gaps, p, where)                  # that question is another's


@pytest.mark.parametrize("gap", [0, -4])
def test_at_equal_loss_what_comes_of_the_loss_alone_is_no_difference(gap):
    networks = [network(arm, seed, loss * (1 + seed % 3), off) for seed in range(6)
                for arm, loss, off in (("symmetric", 0.01, 0), ("rpc", 0.01 * (1 + seed / 4), gap))]
    d = line.at_equal_loss([*networks, network("rpc", 9, 0.5)], "rpc", "symmetric", "pgd 2/255")
    assert d.n == 6 and d.low < gap < d.high and d.high - d.low < 4
    gaps = [b.accuracy["pgd 2/255"] - a.accuracy["pgd 2/255"] for a, b in zip(networks[::2], networks[1::2])]
    peer = scipy.stats.linregress([np.log(b.loss / a.loss) for a, b in zip(networks[::2], networks[1::2])], gaps)
    assert (d.mean, d.error) == pytest.approx((peer.intercept, peer.intercept_stderr))
    assert np.mean(gaps) < gap - 5                                      # the losses are not equal


def test_tables_and_figure_of_the_committed_networks(tmp_path):
    networks = line.stored("cifar10")
    text = line.tables(networks, ("pgd 1/255", "15 corruptions"))
    assert "rpc4-l1" in text and "points when loss halves" in text
    line.draw(networks, ("pgd 1/255", "15 corruptions"), tmp_path / "x.pdf", "CIFAR-10")
    assert (tmp_path / "x.pdf").stat().st_size > 5000
    json.dumps([n._asdict() for n in networks])


def test_a_network_of_timm_s_is_trained_saved_and_what_model_asks_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    timm_vit.main(["--images", "80"])
    torch.manual_seed(0)
    first, trained = timm_vit.build(weights=None), timm_vit.build()
    assert trained(torch.rand(2, 3, 32, 32)).shape == (2, 10)
    assert not torch.equal(first.head.weight, trained.head.weight)
    timm_vit.main(["--images", "80", "--cosine"])
    assert not torch.equal(timm_vit.build_cosine().head.weight, trained.head.weight)
