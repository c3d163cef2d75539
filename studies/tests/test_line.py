"""Test studies/line.py: distances of networks from the line of robustness by clean loss."""


import numpy as np
import pytest
import scipy.stats

from studies import line, stats

M = "pgd 2/255"


def network(arm, seed, loss, off=0.0):
    noise = np.random.default_rng([seed, len(arm)]).normal(0, 0.5)
    return line.Network(arm, seed, loss, {M: 40 - 15 * np.log(loss) + off + noise})


def trained():
    epochs = {"symmetric-e4": 0.4, "symmetric-e8": 0.1, "symmetric-e16": 0.03}
    return [network(arm, seed, loss * (1 + seed / 20)) for arm, loss in epochs.items()
            for seed in range(4)]


def test_defence_is_off_the_line():
    slow = line.distance([network("slow", seed, 0.3) for seed in range(4)], trained(), M)
    adv = line.distance([network("symmetric-adv", s, 0.1, 20) for s in range(4)], trained(), M)
    assert slow.low < 0 < slow.high and slow.p > 0.05
    assert adv.low < 20 < adv.high and adv.p < 0.01
    r, low, high, bend = line.correlation(trained(), M)
    assert low < r < high < -0.9 and bend > 0.05


def test_points_of_parabola_are_off_a_line():
    def bent(arm, seed, loss):
        x = np.log(loss)
        noise = np.random.default_rng([seed, len(arm)]).normal(0, 0.5)
        return line.Network(arm, seed, loss, {M: 40 - 15 * x - 3 * x ** 2 + noise})

    losses = {"symmetric-e4": 0.4, "symmetric-e8": 0.1, "symmetric-e16": 0.03}
    of = [bent(arm, seed, loss) for arm, loss in losses.items() for seed in range(4)]
    own = [bent("slow", seed, 0.1) for seed in range(4)]
    straight, parabola = (line.distance(own, of, M, degree) for degree in (1, 2))
    assert straight.low > 0 and parabola.low < 0 < parabola.high


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
        t = scipy.stats.t(df)
        assert (d.low, d.high) == pytest.approx((mean + t.ppf(0.025) * variance ** 0.5,
                                                 mean + t.ppf(0.975) * variance ** 0.5))
        assert d.p == pytest.approx(2 * t.sf(abs(mean) / variance ** 0.5))
        assert d.p <= p[group, measure]


@pytest.mark.parametrize("measure", line.PICTURES["fresh"][3])
def test_adjusted_differences_equal_a_hand_computation(measure):
    networks = line.stored("fresh")

    def of(*names):
        return [n for n in networks if n.arm in names]

    rpc, base = of("long-rpc4-l1"), of("long-symmetric", "half-symmetric")
    mean, variance, df = by_hand(rpc, of("symmetric-e12", "symmetric-e16", "half-symmetric"),
                                 measure)
    d = line.adjusted(networks, "own line", measure)
    assert (d.mean, d.error ** 2, d.df) == pytest.approx((mean, variance, df))

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


@pytest.mark.parametrize("loss", [0.01, 2.0])
def test_nothing_is_tested_beyond_the_line(loss):
    far = line.distance([network("far", seed, loss, 30) for seed in (5, 6, 7)], trained(), M)
    assert far.mean == pytest.approx(30, abs=1.5) and np.isnan([far.low, far.high, far.p]).all()
    assert line.distance([network("near", s, 0.2, 30) for s in (5, 6, 7)], trained(), M).p < 0.01


def test_arms_are_tested_after_their_group(monkeypatch):
    groups = {"off": ("a", "b"), "on": ("c", "d")}
    monkeypatch.setitem(line.GROUPS, "fresh", groups)
    monkeypatch.setitem(line.PICTURES, "fresh", (*line.PICTURES["fresh"][:3], (M,)))
    networks = trained() + [network(arm, seed, 0.2, off) for arm, off in (
        ("a", -6), ("b", -5), ("c", 0), ("d", 0)) for seed in range(4)]
    found, p = line.grouped("fresh", networks)
    assert p["off", M] < 0.01 < p["on", M] and set(p) == {("off", M), ("on", M)}
    found, p = line.arm_distances("fresh", networks)
    assert set(p) == {("a", M), ("b", M)}
    assert p == pytest.approx(stats.holm({key: found[key].p for key in p}))
    assert "**off**" in line.line_tables("fresh", networks)
