"""Pair differences by seed, put intervals around them, correct and judge them: for every study.

    python -m referee.studies.stats         # how often the intervals hold the truth, on simulated data

Networks of several seeds are tested on the same images, so a difference of two arms varies for two
reasons: other seeds would give other networks, other images other hits and misses. An interval over
seeds alone holds the images fixed and is too narrow for a claim about images in general. `crossed`
adds up both variances; `pigeonhole` resamples both (Owen 2007, Annals of Applied Statistics 1:386).
With few seeds the second is too narrow, as every percentile bootstrap of few values is: so tables
have the first. Anything simpler, one number a seed, is `paired_t`.
"""

import sys
from functools import lru_cache
from math import isclose, nan, sqrt
from typing import NamedTuple

if not __package__:
    sys.exit("error: start this in the repository's folder, as: python -m referee.studies.stats")

import numpy as np

import common


class Difference(NamedTuple):
    """What is known of a mean difference of n seeds: its 95 % interval, two-sided p, standard error
    and degrees of freedom. Of one seed all but n and mean are nan."""
    n: int
    mean: float
    low: float
    high: float
    p: float
    error: float
    df: float


# --- intervals ------------------------------------------------------------------------------------

def student(n, mean, variance, df):
    """Make the Difference whose mean / root of its variance follows Student's t."""
    from scipy.stats import t
    if n < 2:
        return Difference(n, float(mean), nan, nan, nan, nan, nan)
    error = sqrt(variance)
    if error < 1e-12:                                  # all seeds agree in every image
        return Difference(n, float(mean), mean, mean, float(isclose(mean, 0, abs_tol=1e-9)), 0, df)
    half, p = t.ppf(0.975, df) * error, 2 * t.sf(abs(mean) / error, df)
    return Difference(n, float(mean), mean - half, mean + half, float(p), error, df)


def paired_t(gaps):
    """Test one difference a seed, (n,), with the paired t-test."""
    gaps = np.asarray(gaps, float)
    n = len(gaps)
    return student(n, gaps.mean(), gaps.var(ddof=1) / n if n > 1 else nan, n - 1)


def crossed(gaps):
    """Test differences (seeds, images), where seeds and images both vary.

    In gap = mean + seed + image + rest, the variance of the seeds' means holds that of the seeds
    and of the rest, the images' means likewise; so their sum counts the rest twice, and it is
    subtracted once. Degrees of freedom: Satterthwaite's.
    """
    gaps = np.asarray(gaps, float)
    S, I = gaps.shape
    if S < 2 or I < 2:
        return student(S if I > 1 else 1, gaps.mean(), nan, nan)
    seeds, images = gaps.mean(1), gaps.mean(0)
    rest = gaps - seeds[:, None] - images + gaps.mean()
    parts = [(seeds.var(ddof=1) / S, S - 1), (images.var(ddof=1) / I, I - 1),
             ((rest ** 2).sum() / ((S - 1) * (I - 1)) / (S * I), (S - 1) * (I - 1))]
    (of_seeds, _), (of_images, _), (of_rest, _) = parts
    variance = max(of_seeds + of_images - of_rest, of_seeds, of_images)
    df = variance ** 2 / max(sum(part ** 2 / n for part, n in parts), 1e-300)
    return student(S, gaps.mean(), variance, df)


@lru_cache(maxsize=8)
def shares(n, draws, stream):
    """Draw n of n things with replacement: how often each came, / n, as (draws, n)."""
    rng = np.random.default_rng([stream, n])
    return rng.multinomial(n, np.full(n, 1 / n), draws).astype(np.float32) / n


def pigeonhole(gaps, draws=10000):
    """Bootstrap the mean of (seeds, images), both drawn anew: its 95 % percentile interval."""
    gaps = np.asarray(gaps, np.float32)
    S, I = gaps.shape
    means = ((shares(S, draws, 0) @ gaps) * shares(I, draws, 1)).sum(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return low.item(), high.item()


# --- several tests, power -------------------------------------------------------------------------

def holm(p):
    """Correct {name: p} as Holm does, over all of them; nan stays out."""
    there = sorted((value, name) for name, value in p.items() if value == value)
    adjusted, least = dict.fromkeys(p, nan), 0.0
    for i, (value, name) in enumerate(there):
        least = adjusted[name] = max(least, min(1.0, (len(there) - i) * value))
    return adjusted


def detectable(error, df):
    """Find the smallest difference that a two-sided t-test at 5 % sees in 80 of 100 studies."""
    from scipy.optimize import brentq
    from scipy.stats import nct, t
    if not error > 0:
        return nan
    limit = t.ppf(0.975, df)
    return error * brentq(lambda shift: nct.sf(limit, df, shift) - 0.8, 0.1, 5 * limit + 10)


# --- pairs ----------------------------------------------------------------------------------------

def pairs(first, second, what="the two arms"):
    """Subtract {seed: number or (images,)} where both have the seed: (n,) or (n, images).

    ValueError: no seed in common, or the arms were measured on different numbers of images.
    """
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        raise ValueError(f"{what}: no seed in common, {sorted(first)} and {sorted(second)}")
    sizes = {np.shape(runs[seed]) for runs in (first, second) for seed in seeds}
    if len(sizes) > 1:
        counts = " and ".join(str(n) for n in sorted(size[0] if size else 1 for size in sizes))
        raise ValueError(f"{what}: measured on {counts} images, expected the same for all")
    return np.stack([np.asarray(first[seed], float) - second[seed] for seed in seeds])


def missing(runs):
    """List the (arm, seed) that an arm lacks and another has. runs: the (arm, seed) that are in."""
    runs = dict.fromkeys(runs)
    arms, seeds = dict.fromkeys(a for a, _ in runs), sorted({s for _, s in runs})
    return [(arm, seed) for arm in arms for seed in seeds if (arm, seed) not in runs]


# --- in words -------------------------------------------------------------------------------------

def spread(values, form=".1f"):
    """Write numbers as mean ± standard deviation; "" of none. form: of the mean, +.2f."""
    if not len(values):
        return ""
    deviation = f" ± {np.std(values, ddof=1):{form.lstrip('+')}}" if len(values) > 1 else ""
    return f"{np.mean(values):{form}}{deviation}"


def show(d, digits=1, bold=False):
    """Write a Difference as +1.2 (-0.3 to +2.7)."""
    text = f"{d.mean:+.{digits}f}"
    if d.n > 1:
        text += f" ({d.low:+.{digits}f} to {d.high:+.{digits}f})"
    return f"**{text}**" if bold else text


def show_p(p):
    """Write a p value."""
    return "" if p != p else "< .001" if p < 0.001 else f"{p:.3f}".removeprefix("0")


# --- how often the intervals hold the truth -------------------------------------------------------

def coverage(seeds, images, spreads, trials=2000, rng=0):
    """Simulate studies whose true mean is 0: {interval: share of studies in which it holds 0}.

    spreads: standard deviations of the effects of seeds, of images and of the rest.
    """
    rng, held = np.random.default_rng(rng), dict(paired_t=0, crossed=0, pigeonhole=0)
    for _ in range(trials):
        seed, image, rest = (sd * rng.standard_normal(shape) for sd, shape in
                             zip(spreads, ((seeds, 1), (1, images), (seeds, images))))
        gaps = seed + image + rest
        ends = dict(paired_t=paired_t(gaps.mean(1))[2:4], crossed=crossed(gaps)[2:4],
                    pigeonhole=pigeonhole(gaps, 1000))
        for name, (low, high) in ends.items():
            held[name] += low <= 0 <= high
    return {name: count / trials for name, count in held.items()}


CASES = {"seeds alone": (2, 0, 5), "seeds more": (2, 20, 30), "both alike": (1, 22, 30),
         "images more": (0.4, 30, 30), "neither": (0, 0, 30)}     # points; 500 images


def main():
    rows = []
    for n in (3, 5, 8):
        for name, spreads in CASES.items():
            found = coverage(n, 500, spreads)
            rows.append([str(n), name, *(f"{100 * share:.1f}" for share in found.values())])
    print("Share of 2,000 simulated studies whose 95 % interval holds the truth, per cent;\n"
          "500 images; standard errors .5\n")
    print(common.table(rows, ["seeds", "what varies", "over seeds alone", "crossed",
                              "pigeonhole, percentiles"]))


if __name__ == "__main__":
    common.run(main)
