"""Pair differences by seed, put intervals around them, correct and judge them: for every study.

    python -m referee.stats      # how often the intervals hold the truth, simulated

Networks of several seeds are tested on the same images, so a difference of two arms varies for two
reasons: other seeds would give other networks, other images other hits and misses. An interval over
seeds alone holds the images fixed and is too narrow for a claim about images in general. `crossed`
adds up both variances. Anything simpler, one number a seed, is `paired_t`.
"""

from math import isclose, nan, sqrt
from typing import NamedTuple

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


def crossed(gaps, floor=True):
    """Test differences (seeds, images), where seeds and images both vary.

    In gap = mean + seed + image + rest, the variance of the seeds' means holds that of the seeds
    and of the rest, the images' means likewise; so their sum counts the rest twice, and it is
    subtracted once. Degrees of freedom: Satterthwaite's. Of few seeds their variance can come out
    below what the rest alone implies, and then hundreds of degrees of freedom seem to be there:
    so it is never taken for less (floor). Below three seeds there is no p.
    """
    gaps = np.asarray(gaps, float)
    S, I = gaps.shape
    if S < 2 or I < 2:
        return student(S if I > 1 else 1, gaps.mean(), nan, nan)
    seeds, images = gaps.mean(1), gaps.mean(0)
    rest = gaps - seeds[:, None] - images + gaps.mean()
    of_seeds, of_images = seeds.var(ddof=1) / S, images.var(ddof=1) / I
    of_rest = (rest ** 2).sum() / ((S - 1) * (I - 1)) / (S * I)
    if floor:
        of_seeds = max(of_seeds, of_rest)
    variance = max(of_seeds + of_images - of_rest, of_seeds, of_images)
    parts = [(of_seeds, S - 1), (of_images, I - 1), (of_rest, (S - 1) * (I - 1))]
    df = variance ** 2 / max(sum(part ** 2 / n for part, n in parts), 1e-300)
    found = student(S, gaps.mean(), variance, df)
    return found if S > 2 else found._replace(p=nan)


def interval(d, level):
    """Give the ends of a Difference's interval of another level than 95 %: that of .9 lies within
    ±margin where two one-sided tests at .05 find equality."""
    from scipy.stats import t
    half = t.ppf((1 + level) / 2, d.df) * d.error
    return d.mean - half, d.mean + half


# --- several tests, power -------------------------------------------------------------------------

def holm(p):
    """Correct {name: p} as Holm does, over all of them; nan stays out."""
    there = sorted((value, name) for name, value in p.items() if value == value)
    adjusted, least = dict.fromkeys(p, nan), 0.0
    for i, (value, name) in enumerate(there):
        least = adjusted[name] = max(least, min(1.0, (len(there) - i) * value))
    return adjusted


def detectable(error, df, tests=1):
    """Find the smallest difference that a two-sided t-test sees in 80 of 100 studies.

    tests: how many there are; the level is that of Holm's first step, .05 / tests.
    """
    from scipy.optimize import brentq
    from scipy.stats import nct, t
    if not error > 0:
        return nan
    limit = t.ppf(1 - 0.025 / tests, df)
    return error * brentq(lambda shift: nct.sf(limit, df, shift) - 0.8, 0.1, 5 * limit + 10)


# --- pairs ----------------------------------------------------------------------------------------

def pairs(first, second, what="the two arms"):
    """Subtract {seed: number or (images,)} where both have the seed: (n,) or (n, images).

    ValueError: no seed in common, or the arms were measured on different numbers of images.
    """
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        raise common.InputError(f"{what}: no seed in common, {sorted(first)} and {sorted(second)}")
    sizes = {np.shape(runs[seed]) for runs in (first, second) for seed in seeds}
    if len(sizes) > 1:
        counts = " and ".join(str(n) for n in sorted(size[0] if size else 1 for size in sizes))
        raise common.InputError(f"{what}: measured on {counts} images, expected the same for all")
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
    if d.low == d.low:
        text += f" ({d.low:+.{digits}f} to {d.high:+.{digits}f})"
    return f"**{text}**" if bold else text


def show_p(p):
    """Write a p value."""
    return "" if p != p else "< .001" if p < 0.001 else f"{p:.3f}".removeprefix("0")


# --- how often the intervals hold the truth -------------------------------------------------------

MIXES = {"seeds more": (2, 20, 30), "both alike": (1, 22, 30), "images more": (0.4, 30, 30)}


def simulate(seeds, spreads, floor=True, trials=2000, images=500, rng=0):
    """Simulate studies whose true mean is 0: coverage, and errors where df is above 20, in shares.

    spreads: standard deviations of the effects of seeds, of images and of the rest. Returns (share
    of intervals that hold 0; share that miss it among those with df > 20; share of df > 20).
    """
    rng, found = np.random.default_rng(rng), []
    for _ in range(trials):
        seed, image, rest = (sd * rng.standard_normal(shape) for sd, shape in
                             zip(spreads, ((seeds, 1), (1, images), (seeds, images))))
        d = crossed(seed + image + rest, floor)
        found.append((d.low <= 0 <= d.high, d.df > 20))
    held, many = np.array(found).T
    return held.mean(), (~held[many]).mean() if many.any() else nan, many.mean()


def main():
    rows = []
    for n in (2, 3, 5, 8, 10):
        for name, spreads in MIXES.items():
            cells = [f"{100 * share:.1f}" for floor in (False, True)
                     for share in simulate(n, spreads, floor)]
            rows.append([str(n), name, *(cell.replace("nan", "") for cell in cells)])
    print("2,000 simulated studies of 500 images, per cent: 95 % intervals that hold the truth;\n"
          "those that miss it among studies with df > 20; how many these are. Without, with "
          "floor\n")
    print(common.table(rows, ["seeds", "what varies", "held", "missed, df > 20", "df > 20",
                              "floor: held", "missed, df > 20", "df > 20"]))


if __name__ == "__main__":
    common.run(main)
