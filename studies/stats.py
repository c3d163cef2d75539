"""Turn evaluation rows into differences between variants, with intervals and tests.

An "arm" is a set of networks that differ only in their seed. The difference of two arms has two
sources of variance: the seeds and the test images. An interval over seeds alone treats the images
as fixed, so it is too narrow for a claim about images in general. `crossed` adds up both variances.
`paired_t` is for one number per seed.

Each study of studies.arms has two primary measures. A difference in a primary measure is
significant, and printed bold, if it survives Holm's correction over all pairs of its family and
both measures. All other numbers are exploratory and never bold. arms.py defines which arms are
compared.
"""

import base64
from math import isclose, nan, sqrt
from pathlib import Path
from typing import NamedTuple

import numpy as np

import common
from common import InputError
from robust import corruptions


INSTALL = "install it with: pip install -r studies/requirements.txt"


def scipy_stats():
    """Return scipy.stats; InputError with the install command if scipy is missing."""
    try:
        import scipy.stats
    except ModuleNotFoundError:
        raise InputError(f"this command needs scipy; {INSTALL}") from None
    return scipy.stats


class Difference(NamedTuple):
    """A mean difference over n seeds, with its 95 % interval and its test.

    low, high: the interval. p: two-sided. error: the standard error. df: degrees of freedom. With
    one seed, everything except n and mean is nan.
    """
    n: int
    mean: float
    low: float
    high: float
    p: float
    error: float
    df: float


NONE = Difference(0, *[nan] * 6)                            # no seeds


# --- intervals ------------------------------------------------------------------------------------

def student(n, mean, variance, df):
    """Make a Difference: mean / sqrt(variance) follows Student's t with df degrees of freedom."""
    t = scipy_stats().t
    if n < 2:
        return Difference(n, float(mean), nan, nan, nan, nan, nan)
    error = sqrt(variance)
    if error < 1e-12:                                  # all seeds agree on every image
        return Difference(n, float(mean), mean, mean, float(isclose(mean, 0, abs_tol=1e-9)), 0, df)
    half, p = t.ppf(0.975, df) * error, 2 * t.sf(abs(mean) / error, df)
    return Difference(n, float(mean), mean - half, mean + half, float(p), error, df)


def satterthwaite(variance, parts):
    """Return the degrees of freedom of a sum of variances (Satterthwaite).

    parts: a pair (variance, degrees of freedom) for each term of the sum.
    """
    return variance ** 2 / max(sum(v ** 2 / df for v, df in parts), 1e-300)


def paired_t(gaps):
    """Test one difference per seed, (n,), with the paired t-test."""
    gaps = np.asarray(gaps, float)
    n = len(gaps)
    return student(n, gaps.mean(), gaps.var(ddof=1) / n if n > 1 else nan, n - 1)


def crossed(gaps):
    """Test differences (seeds, images); both seeds and images are random.

    The model is gap = mean + seed + image + rest. The variance of the seed means contains the
    variances of seed and rest. The variance of the image means contains the variances of image and
    rest. The sum of both counts the rest twice, so the rest is subtracted once. With few seeds, the
    variance of the seed means can be smaller than the variance that the rest alone causes; it is
    then raised to this variance. Without this step, the test would use hundreds of degrees of
    freedom that do not exist. With fewer than three seeds, p is nan.
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
    """Return the ends of a Difference's interval at another level than 95 %.

    If the interval at level .9 lies within ±margin, two one-sided tests at .05 show equality.
    """
    half = scipy_stats().t.ppf((1 + level) / 2, d.df) * d.error
    return d.mean - half, d.mean + half


# --- several tests, power -------------------------------------------------------------------------

def holm(p):
    """Apply Holm's correction to {name: p}. A p of nan is not counted and stays nan."""
    there = sorted((value, name) for name, value in p.items() if value == value)
    adjusted, least = dict.fromkeys(p, nan), 0.0
    for i, (value, name) in enumerate(there):
        least = adjusted[name] = max(least, min(1.0, (len(there) - i) * value))
    return adjusted


def detectable(error, df, tests=1):
    """Return the difference that a two-sided t-test detects with 80 % power.

    tests: number of tests; the level is .05 / tests, the first step of Holm's correction.
    """
    stats = scipy_stats()
    from scipy.optimize import brentq
    if not error > 0:
        return nan
    limit = stats.t.ppf(1 - 0.025 / tests, df)
    return error * brentq(lambda shift: stats.nct.sf(limit, df, shift) - 0.8, 0.1, 5 * limit + 10)


def judged(gaps, p, margins, level=0.95):
    """Judge the primary differences of a pair: "below", "above", "equal" or "open".

    "below": at least one measure is significantly below the baseline, and none above. "above": the
    opposite. "equal": no measure differs significantly, and every interval of this level lies
    within ± its margin. "open": any other case, and fewer than three seeds.

    gaps: {measure: Difference}. p: {measure: p after Holm}. margins: {measure: number}.
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
    """One measurement of one network by the evaluator; accuracies in per cent."""
    name: str                   # name of the checkpoint's folder or file
    arm: str | None             # from a name <arm>_s<seed>; None for any other name
    seed: int | None
    kind: str                   # clean, corruptions, pgd, ...
    measure: str                # clean, fog, pgd 2/255, autoattack 4/255, ...
    eps: float                  # attack budget in 1/255 of the pixel range; 0 without an attack
    how: str                    # all settings
    images: int
    top1: float                 # mean over severities
    right: np.ndarray | None    # (images,) per cent of severities at which an image was right
    loss: float | None          # on clean images, in nats
    hardware: str
    deit: bool                  # a ViT of this repository with DeiT's initialisation


def unpack_bits(text, n):
    """Decode the outcomes of n images, one bit per image in base64: (n,) of 0 and 1."""
    return np.unpackbits(np.frombuffer(base64.b64decode(text), np.uint8), count=n).astype(float)


def arm_of(name):
    """Return the arm and the seed of a name <arm>_s<seed>; (None, None) for any other name."""
    arm, _, seed = name.rpartition("_s")
    return (arm, int(seed)) if arm and seed.isdecimal() else (None, None)


def words_of(kind, setting, seed):
    """Return the settings of a measurement in words. Two rows are comparable if these are equal."""
    words = [kind]
    for key in ("type", "severities", "steps", "conditions"):
        value = setting.get(key, "")
        if isinstance(value, list):                     # of a stored row
            value = ",".join(map(str, value))
        if value:
            words.append(f"{key}={value}")
    return " ".join([*words, f"seed={seed}"])


def row_of(row):
    """Turn a line of results.jsonl, of eval_robust.py or stored in studies/results, into a Row.

    Only this function and `stored_row` depend on the names of the fields.
    """
    if "settings" in row:
        return stored_row(row)
    name = Path(row["network"]).name
    kind, *pairs = row["measure"].split()
    setting = dict(pair.split("=", 1) for pair in pairs)
    eps = round(255 * common.fraction(row["eps"] or "0"), 6)
    measure = f"{row['name']} {eps:g}/255" if eps else row["name"]
    right = 100 * np.mean([[int(digit) for digit in text] for text in row["right"]], 0)
    return Row(name, *arm_of(name), kind, measure, eps, words_of(kind, setting, row["seed"]),
               row["images"], row["top1"], right, row["loss"], row["hardware"], deit=False)


def stored_row(row):
    """Turn a line that is stored in studies/results into a Row. Such lines have other fields."""
    name, kind, setting = Path(row["checkpoint"]).name, row["name"], row["settings"]
    eps = round(255 * (setting.get("eps") or 0), 6)
    measure = setting["type"] if kind == "corruptions" else f"{kind} {eps:g}/255" if eps else kind
    right = row.get("right")
    if right is not None:
        several = right if isinstance(right, list) else [right]
        right = 100 * np.mean([unpack_bits(text, row["images"]) for text in several], 0)
    config = row["model_config"]
    return Row(name, *arm_of(name), kind, measure, eps, words_of(kind, setting, row["seed"]),
               row["images"], float(np.mean(row.get("top1", nan))), right, row.get("loss"),
               row.get("hardware", ""), "embed_dim" in config and config.get("init") != "default")


def read(paths):
    """Read Rows from results.jsonl of the evaluator or its folders; other rows are left out."""
    rows = []
    for path in map(Path, paths):
        path = path / "results.jsonl" if path.is_dir() else path
        if not path.is_file():
            raise InputError(f"--rows {path}: no such file; expected results.jsonl or its folder")
        for row in common.read_log(path):
            of_evaluator = "settings" in row or "measure" in row and "right" in row
            rows += [row_of(row)] if of_evaluator else of_patches(row)
    return rows


def of_patches(row):
    """Turn a line of robust_attentions/patches.jsonl into Rows: accuracy on corrupted patches."""
    name = Path(row.get("checkpoint", "")).name
    arm, _, seed = name.rpartition("_s")
    return [Row(name, arm, int(seed), "patches", measure, 0.0, "", row["images"],
                100 * right.mean(), 100 * right, None, "", False)
            for measure, text in row.get("right", {}).items()
            for right in [unpack_bits(text, row["images"])]]


CORRUPTION_FAMILIES = {"15 corruptions": corruptions.NAMES, "noise": corruptions.NAMES[:3],
            "blur": corruptions.NAMES[3:7], "weather": corruptions.NAMES[7:11],
            "digital": corruptions.NAMES[11:]}


def outcomes(rows, limit):
    """Sort Rows into {measure: {(arm, seed): (images,) in per cent}}.

    Rows whose number of images is not `limit` form a separate measure. A family of corruptions is
    the mean of its types. The median budget needs clean images and at least three budgets of PGD.
    InputError if a network has two rows of a measure, or if a measure has two settings.
    """
    found, hows = {}, {}
    for row in rows:
        if row.arm is None or row.right is None:
            continue
        name = row.measure + (f", {row.images} images" if row.images != limit else "")
        if hows.setdefault(name, row.how) != row.how:
            raise InputError(f"{name} was measured with two settings, {hows[name]} and {row.how}; "
                             "keep the rows of one setting")
        of = found.setdefault(name, {})
        if (row.arm, row.seed) in of:
            raise InputError(f"{row.arm}, seed {row.seed} has two rows of {name}; keep one")
        of[row.arm, row.seed] = row.right

    runs = dict.fromkeys((row.arm, row.seed) for row in rows)
    means = {family: {run: np.mean([found[name][run] for name in names], 0) for run in runs
                      if all(run in found.get(name, ()) for name in names)}
             for family, names in CORRUPTION_FAMILIES.items()}
    budgets = sorted({row.eps for row in rows if row.kind == "pgd" and row.images == limit})
    curves = {0: "clean"} | {eps: f"pgd {eps:g}/255" for eps in budgets}
    means["median budget"] = {
        run: median_budget({eps: found[name][run] for eps, name in curves.items()})
        for run in runs if len(budgets) > 2
        and all(run in found.get(name, ()) for name in curves.values())}
    found = {name: of for name, of in found.items() if name not in corruptions.NAMES} | means
    return {name: of for name, of in found.items() if of}


def median_budget(curve):
    """Return the attack budget, in 1/255, at which half of the images are classified correctly.

    curve: {eps: (n,) in per cent}, with clean images at 0. Budgets are connected by straight lines.
    Let the mean accuracy cross one half at eps, between the budgets a and b with accuracies A and
    B. If the curve stays above one half, the last budget is returned.

    Returns:
        one number per image, (n,), whose mean is the median budget eps. Image i has eps + (r_i -
        1/2) (b - a) / (A - B), where r_i is its interpolated accuracy. The scatter of these numbers
        is the effect of drawing other images.
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
    """The differences of a family of pairs, and their tests."""
    found: dict                 # returned by `outcomes`
    primary: tuple              # the tested measures
    gaps: dict                  # {(measure, arm, baseline): Difference}
    p: dict                     # {(measure, arm, baseline): p after Holm}, tested pairs only
    tests: int                  # number of tests in the family


def shared(found, measure, arm, base, seeds=None):
    """List the seeds for which both arms have the measure. seeds: consider only these."""
    of = found.get(measure, {})
    both = {s for a, s in of if a == arm and (base, s) in of}
    return sorted(both if seeds is None else both & set(seeds))


def paired(found, measure, arm, base, seeds=None):
    """Subtract the baseline's outcomes from the arm's, seed by seed: (seeds, images)."""
    of, both = found.get(measure, {}), shared(found, measure, arm, base, seeds)
    sizes = {len(of[a, s]) for a in (arm, base) for s in both}
    if len(sizes) > 1:
        raise InputError(f"{arm} and {base}, {measure}: measured on "
                         f"{' and '.join(map(str, sorted(sizes)))} images; expected equal numbers")
    return np.array([of[arm, s] - of[base, s] for s in both])


def compare(found, pairs, primary, seeds=None, untested=()):
    """Compare pairs (arm, baseline) in every measure, over the seeds that both have.

    seeds: consider only these. untested: arms that another comparison tests. Holm's correction also
    counts pairs that have no rows yet.
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
    """Format numbers as mean ± standard deviation, or "" without numbers. form: of the mean."""
    if not len(values):
        return ""
    deviation = f" ± {np.std(values, ddof=1):{form.lstrip('+')}}" if len(values) > 1 else ""
    return f"{np.mean(values):{form}}{deviation}"


def show(d, digits=1, bold=False):
    """Format a Difference as +1.2 (-0.3 to +2.7)."""
    if not d.n:
        return ""
    text = f"{d.mean:+.{digits}f}"
    if d.low == d.low:
        text += f" ({d.low:+.{digits}f} to {d.high:+.{digits}f})"
    return f"**{text}**" if bold else text


def show_p(p):
    """Format a p value."""
    return "" if p != p else "< .001" if p < 0.001 else f"{p:.3f}".removeprefix("0")


def digits_of(measure):
    """Return the number of decimals with which a measure is printed."""
    return 2 if measure == "median budget" else 1


def accuracy(found, measure, arm, seeds=None):
    """Format an arm's mean ± standard deviation over seeds, and the number of seeds."""
    values = [x.mean() for (a, s), x in found.get(measure, {}).items()
              if a == arm and (seeds is None or s in seeds)]
    return f"{spread(values, f'.{digits_of(measure)}f')} ({len(values)})" if values else ""


def primary_table(of, seeds=None):
    """Format the primary measures as Markdown: one row per pair and measure, with its power."""
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
                               "p, Holm", "90 % interval", "detectable with 80 % power"])


def full_table(of, seeds=None):
    """Format every measure as Markdown: accuracies and differences."""
    arms = list(dict.fromkeys(arm for _, a, b in of.gaps for arm in (b, a)))
    pairs = list(dict.fromkeys(key[1:] for key in of.gaps))
    body = [[m, *(accuracy(of.found, m, arm, seeds) for arm in arms),
             *(show(of.gaps.get((m, *pair), NONE), digits_of(m)) for pair in pairs)]
            for m in of.found]
    return common.table([row for row in body if any(row[1:])],
                        ["measure", *arms, *(f"{a} minus {b}" for a, b in pairs)])
