"""Test studies/line.py: distances of networks from the line of robustness by clean loss."""


import numpy as np
import pytest
import scipy.stats

from studies import line

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
