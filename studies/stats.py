"""Rows into differences: what was measured, intervals around differences of arms, their tests.

Networks of several seeds are tested on the same images, so a difference of two arms varies for two
reasons: other seeds would give other networks, other images other hits and misses. An interval over
seeds alone holds the images fixed and is too narrow for a claim about images in general. `crossed`
adds up both variances. Anything simpler, one number a seed, is `paired_t`.

Two measures of a study are primary: a difference in them is significant, and bold, if it survives
Holm's correction over the family's pairs x 2. All other numbers are exploratory and never bold. No
study itself: what is compared with what stands in arms.py.
"""

import base64
from math import isclose, nan, sqrt
from pathlib import Path
from typing import NamedTuple

import numpy as np

import common
from common import InputError
from robust import corruptions
from robust.measures import number, parts


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


NONE = Difference(0, *[nan] * 6)                            # a difference that is not there


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


def satterthwaite(variance, parts):
    """Degrees of freedom of a variance that was put together from parts: (variance, its df)."""
    return variance ** 2 / max(sum(v ** 2 / df for v, df in parts), 1e-300)


def paired_t(gaps):
    """Test one difference a seed, (n,), with the paired t-test."""
    gaps = np.asarray(gaps, float)
    n = len(gaps)
    return student(n, gaps.mean(), gaps.var(ddof=1) / n if n > 1 else nan, n - 1)


def crossed(gaps):
    """Test differences (seeds, images), where seeds and images both vary.

    In gap = mean + seed + image + rest, the variance of the seeds' means holds that of the seeds
    and of the rest, the images' means likewise; so their sum counts the rest twice, and it is
    subtracted once. Of few seeds their variance can come out below what the rest alone implies, and
    then hundreds of degrees of freedom seem to be there: so it is never taken for less. Below three
    seeds there is no p.
    """
    gaps = np.asarray(gaps, float)
    S, I = gaps.shape
    if S < 2 or I < 2:
        return student(S if I > 1 else 1, gaps.mean(), nan, nan)
    seeds, images = gaps.mean(1), gaps.mean(0)
    rest = gaps - seeds[:, None] - images + gaps.mean()
    of_seeds, of_images = seeds.var(ddof=1) / S, images.var(ddof=1) / I
    of_rest = (rest ** 2).sum() / ((S - 1) * (I - 1)) / (S * I)
    of_seeds = max(of_seeds, of_rest)
    variance = max(of_seeds + of_images - of_rest, of_seeds, of_images)
    parts = (of_seeds, S - 1), (of_images, I - 1), (of_rest, (S - 1) * (I - 1))
    found = student(S, gaps.mean(), variance, satterthwaite(variance, parts))
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


def judged(gaps, p, margins, level=0.95):
    """Judge primary differences: "below" if one is significantly so and none above, "above" the
    other way round, "equal" if all intervals of this level lie within ± their margins, else "open".

    gaps, p: {measure: Difference}, {measure: p after Holm}; margins: {measure: number}. Fewer than
    three seeds decide nothing.
    """
    if set(gaps) != set(margins) or min(d.n for d in gaps.values()) < 3:
        return "open"
    signs = {np.sign(d.mean) for m, d in gaps.items() if p[m] < 0.05}
    if len(signs) == 1:
        return "below" if signs == {-1} else "above"
    inside = all(max(map(abs, interval(d, level))) < margins[m] for m, d in gaps.items())
    return "equal" if inside and not signs else "open"


# --- rows of the evaluator ------------------------------------------------------------------------

class Row(NamedTuple):
    """What the evaluator measured of a network, in per cent."""
    name: str                   # of its folder or file
    arm: str | None             # of <arm>_s<seed>; None of another name
    seed: int | None
    kind: str                   # clean, corruptions, pgd, ...
    measure: str                # clean, fog, pgd 2/255, autoattack 4/255, ...
    eps: float                  # in 1/255 of the pixel range, 0 where nothing moves
    how: str                    # every setting and condition
    images: int
    top1: float                 # a mean over severities
    right: np.ndarray | None    # (images,) how often each was right, a mean over severities
    loss: float | None          # of clean images, in nats
    hardware: str
    deit: bool                  # a ViT of ours with DeiT's initialisation


def unpack(text, n):
    """Read the outcomes of n images, one bit an image in base64: (n,) of 0 and 1."""
    return np.unpackbits(np.frombuffer(base64.b64decode(text), np.uint8), count=n).astype(float)


def row_of(row):
    """Make a Row of a line of results.jsonl: the one place that knows the evaluator's names."""
    name, (kind, setting) = Path(row["checkpoint"]).name, parts(row["measure"])
    arm, _, seed = name.rpartition("_s")
    arm, seed = (arm, int(seed)) if arm and seed.isdecimal() else (None, None)
    eps = round(255 * number(setting.get("eps", "0")), 6)
    measure = setting["type"] if kind == "corruptions" else f"{kind} {eps:g}/255" if eps else kind
    right = row.get("right")
    if right is not None:
        several = right if isinstance(right, list) else [right]
        right = 100 * np.mean([unpack(text, row["images"]) for text in several], 0)
    config = row["model_config"]
    return Row(name, arm, seed, kind, measure, eps,
               f"{row['measure']} seed={row['seed']} {row['precision']}", row["images"],
               float(np.mean(row.get("top1", nan))), right, row.get("loss"),
               row.get("hardware", ""), "embed_dim" in config and config.get("init") != "default")


def read(paths):
    """Read the Rows of files or folders of the evaluator; rows of other kinds are left out."""
    rows = []
    for path in map(Path, paths):
        path = path / "results.jsonl" if path.is_dir() else path
        if not path.is_file():
            raise InputError(f"--rows {path} is not a file")
        for row in common.read_log(path):
            rows += [row_of(row)] if "measure" in row else of_patches(row)
    return rows


def of_patches(row):
    """Make Rows of a line of robust_attentions/patches.jsonl: accuracy with corrupted patches."""
    name = Path(row.get("checkpoint", "")).name
    arm, _, seed = name.rpartition("_s")
    return [Row(name, arm, int(seed), "patches", measure, 0.0, "", row["images"],
                100 * unpack(text, row["images"]).mean(), 100 * unpack(text, row["images"]), None,
                "", False) for measure, text in row.get("right", {}).items()]


FAMILIES = {"15 corruptions": corruptions.NAMES, "noise": corruptions.NAMES[:3],
            "blur": corruptions.NAMES[3:7], "weather": corruptions.NAMES[7:11],
            "digital": corruptions.NAMES[11:]}


def outcomes(rows, limit):
    """Sort Rows into {measure: {(arm, seed): (images,) in per cent}}.

    InputError: two rows of one network and measure, or a measure taken in two ways. Rows of another
    number of images than limit are a measure apart. A family of corruptions is the mean of its
    types; the median budget comes from clean images and three budgets of PGD or more.
    """
    found, hows = {}, {}
    for row in rows:
        if row.arm is None or row.right is None:
            continue
        name = row.measure + (f", {row.images} images" if row.images != limit else "")
        if hows.setdefault(name, row.how) != row.how:
            raise InputError(f"{name} was measured in two ways, {hows[name]} and {row.how}: keep "
                             "the rows of one")
        of = found.setdefault(name, {})
        if (row.arm, row.seed) in of:
            raise InputError(f"{row.arm}, seed {row.seed} has two rows of {name}: keep one")
        of[row.arm, row.seed] = row.right

    runs = dict.fromkeys((row.arm, row.seed) for row in rows)
    means = {family: {run: np.mean([found[name][run] for name in names], 0) for run in runs
                      if all(run in found.get(name, ()) for name in names)}
             for family, names in FAMILIES.items()}
    budgets = sorted({row.eps for row in rows if row.kind == "pgd" and row.images == limit})
    curves = {0: "clean"} | {eps: f"pgd {eps:g}/255" for eps in budgets}
    means["median budget"] = {
        run: median_budget({eps: found[name][run] for eps, name in curves.items()})
        for run in runs if len(budgets) > 2
        and all(run in found.get(name, ()) for name in curves.values())}
    found = {name: of for name, of in found.items() if name not in corruptions.NAMES} | means
    return {name: of for name, of in found.items() if of}


def median_budget(curve):
    """The eps, in 1/255, at which half of the images are still right, as a mean over images: (n,).

    curve: {eps: (n,) in per cent}, 0 for clean images; joined by straight lines. Where it crosses
    one half, between budgets a and b with accuracies A and B, image i counts as eps +
    (r_i - 1/2) (b - a) / (A - B), r_i its interpolated rightness: their mean is that eps, and their
    scatter what another draw of images would change. A curve that never falls to one half counts as
    its last budget.
    """
    budgets = sorted(curve)
    for a, b in zip(budgets, budgets[1:]):
        A, B = curve[a].mean() / 100, curve[b].mean() / 100
        if A >= 0.5 > B:
            eps = a + (A - 0.5) / (A - B) * (b - a)
            right = (curve[a] + (curve[b] - curve[a]) * (eps - a) / (b - a)) / 100
            return eps + (right - 0.5) * (b - a) / (A - B)
    last = budgets[-1] if curve[budgets[0]].mean() >= 50 else 0
    return np.full(len(curve[budgets[0]]), float(last))


# --- pairs ----------------------------------------------------------------------------------------

class Compared(NamedTuple):
    """Pairs of arms, and the tests of their question, corrected together."""
    found: dict                 # of `outcomes`
    primary: tuple              # the measures that are tested
    gaps: dict                  # {(measure, arm, baseline): Difference}
    p: dict                     # {the same: p after Holm}, of what is tested
    tests: int                  # of the family


def shared(found, measure, arm, base, seeds=None):
    """List the seeds (of these) in which both arms have the measure."""
    of = found.get(measure, {})
    both = {s for a, s in of if a == arm and (base, s) in of}
    return sorted(both if seeds is None else both & set(seeds))


def paired(found, measure, arm, base, seeds=None):
    """Subtract the outcomes of a baseline from an arm's, seed by seed: (seeds, images)."""
    of, both = found.get(measure, {}), shared(found, measure, arm, base, seeds)
    sizes = {len(of[a, s]) for a in (arm, base) for s in both}
    if len(sizes) > 1:
        raise InputError(f"{arm} and {base}, {measure}: measured on "
                         f"{' and '.join(map(str, sorted(sizes)))} images, expected the same")
    return np.array([of[arm, s] - of[base, s] for s in both])


def compare(found, pairs, primary, seeds=None, untested=()):
    """Compare pairs (arm, baseline) in every measure, over the seeds (of these) that both have.

    untested: arms whose own question another comparison asks. Holm counts every pair that is
    tested, also while it is missing.
    """
    gaps = {}
    for measure in found:
        for arm, base in pairs:
            differences = paired(found, measure, arm, base, seeds)
            if len(differences):
                gaps[measure, arm, base] = crossed(differences)
    tests = {(m, arm, base): 1.0 for arm, base in pairs if arm not in untested for m in primary}
    known = {key: gaps[key].p for key in tests if key in gaps and gaps[key].n > 2}
    p = holm(tests | known)
    return Compared(found, tuple(primary), gaps, {key: p[key] for key in known}, len(tests))


# --- in words -------------------------------------------------------------------------------------

def spread(values, form=".1f"):
    """Write numbers as mean ± standard deviation; "" of none. form: of the mean, +.2f."""
    if not len(values):
        return ""
    deviation = f" ± {np.std(values, ddof=1):{form.lstrip('+')}}" if len(values) > 1 else ""
    return f"{np.mean(values):{form}}{deviation}"


def show(d, digits=1, bold=False):
    """Write a Difference as +1.2 (-0.3 to +2.7)."""
    if not d.n:
        return ""
    text = f"{d.mean:+.{digits}f}"
    if d.low == d.low:
        text += f" ({d.low:+.{digits}f} to {d.high:+.{digits}f})"
    return f"**{text}**" if bold else text


def show_p(p):
    """Write a p value."""
    return "" if p != p else "< .001" if p < 0.001 else f"{p:.3f}".removeprefix("0")


def digits_of(measure):
    return 2 if measure == "median budget" else 1


def accuracy(found, measure, arm, seeds=None):
    """Write mean ± standard deviation over the seeds (of these) of an arm, and their number."""
    values = [x.mean() for (a, s), x in found.get(measure, {}).items()
              if a == arm and (seeds is None or s in seeds)]
    return f"{spread(values, f'.{digits_of(measure)}f')} ({len(values)})" if values else ""


def primary_table(of, seeds=None):
    """Write Markdown: a pair and a primary measure a row, and what could have been found."""
    body = []
    for key, d in of.gaps.items():
        measure, arm, base = key
        if measure in of.primary:
            digits, p, known = digits_of(measure), of.p.get(key, nan), d.n > 2
            both = shared(of.found, measure, arm, base, seeds)
            ends = interval(d, 0.9) if known else ()
            power = detectable(d.error, d.df, of.tests) if known else nan
            body.append([
                f"{arm} minus {base}", measure, accuracy(of.found, measure, arm, both),
                accuracy(of.found, measure, base, both),
                show(d, digits, p < 0.05) if known else f"{d.mean:+.{digits}f}", show_p(d.p),
                show_p(p), " to ".join(f"{x:+.{digits}f}" for x in ends),
                f"{power:.{digits}f}".replace("nan", "")])
    return common.table(body, ["difference", "measure", "arm", "baseline", "95 % CI", "p",
                               "p, Holm", "90 % interval", "found with 80 % power"])


def everything(of, seeds=None):
    """Write Markdown: every measure, accuracies and differences; what is not primary explores."""
    arms = list(dict.fromkeys(arm for _, a, b in of.gaps for arm in (b, a)))
    pairs = list(dict.fromkeys(key[1:] for key in of.gaps))
    body = [[m, *(accuracy(of.found, m, arm, seeds) for arm in arms),
             *(show(of.gaps.get((m, *pair), NONE), digits_of(m)) for pair in pairs)]
            for m in of.found]
    return common.table([row for row in body if any(row[1:])],
                        ["measure", *arms, *(f"{a} minus {b}" for a, b in pairs)])
