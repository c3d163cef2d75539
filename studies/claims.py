"""Check the numbers on the pages: compute each number again from the stored rows.

    python -m studies.claims            # prints nothing if all numbers agree
    python -m studies.claims --details  # writes the tables of every details.md again

claims.csv has one row per number:

    pages       the pages that state the number, separated by spaces
    key         the place of the number on the page. "row | column": this table cell. Other words:
                the table row, list item or paragraph that contains these words. Empty: anywhere
    number      the number with its interval; words and units between the two are ignored
    expression  a function of FUNCTIONS and its arguments, for example "gap; scenes; rpc4-l1; pgd"

You may rewrite a page freely as long as its numbers stay. An interval on a page that no row of
claims.csv contains is an error, too.
"""

import argparse
import csv
import difflib
import json
import math
import re
import statistics
import sys
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import numpy as np

import common
from studies import (arms, kernel_pca, language, left_out, line, perfect_s, pretrained,
                     pro_attention, probe, repetition, robust_pca, where_is_s, which_part)
from studies.stats import (accuracy, crossed, detectable, digits_of, holm, interval, paired_t,
                           show, show_p, spread)

ROOT = Path(__file__).parents[1]
RESULTS, CLAIMS = ROOT / "studies/results", ROOT / "studies/claims.csv"


# --- differences of pairs -------------------------------------------------------------------------

def key_of(name, pair, measure):
    """Return the key (measure, arm, baseline) of a pair in a comparison.

    pair: "arm" or "arm - baseline".
    """
    study, of = arms.comparison(name)
    short = {"pgd": study.primary[1], "corruptions": "15 corruptions", "budget": "median budget"}
    arm, _, base = pair.partition(" - ")
    base = base or next(b for a, b in study.comparisons[name].pairs if a == arm)
    return short.get(measure, measure), arm, base


def gap(name, pair, measure, what="difference"):
    """Describe a paired difference, or the accuracy of the "arm", its "baseline" or "both".

    what: "arm", "baseline", "both", or a key of `described`.
    """
    study, of = arms.comparison(name)
    measure, arm, base = key = key_of(name, pair, measure)
    if what in ("arm", "baseline", "both"):
        asked = {"arm": [arm], "baseline": [base], "both": [base, arm]}[what]
        seeds = study.comparisons[name].seeds
        return " -> ".join(accuracy(of.found, measure, each, seeds).split()[0] for each in asked)
    return described(of.gaps[key], what, of.p.get(key, np.nan), of.tests, digits_of(measure))


def on_those(name, arm, measure, slow):
    """Return an arm's accuracy by `measure` on those images that a slow measure was run on.

    slow: the slow measure, which was run on the first images only.
    """
    found = arms.comparison(name)[1].found
    return written([x[:len(found[slow][run])].mean() for run, x in found[measure].items()
                    if run[0] == arm and run in found[slow]], ".1f")


def described(d, what, holm=np.nan, tests=1, digits=1):
    """Format one part of a Difference d.

    what: "difference" (mean and 95 % interval), "mean", "interval", "seeds" (number of networks),
    "p", "holm" (p after Holm's correction) or "power" (the difference detected with 80 % power).
    """
    return {"difference": show(d, digits), "mean": f"{d.mean:+.{digits}f}",
            "interval": f"{d.low:+.{digits}f} to {d.high:+.{digits}f}", "seeds": str(d.n),
            "p": show_p(d.p), "holm": show_p(holm),
            "power": f"{detectable(d.error, d.df, tests):.{digits}f}"}[what]


def apart_in(name, first, second, measure, what="difference"):
    """Describe the difference of two arms of a comparison that are not a pair of its plan."""
    found = arms.comparison(name)[1].found[key_of(name, f"{first} - {second}", measure)[0]]
    one, other = ({seed: right for (arm, seed), right in found.items() if arm == wanted}
                  for wanted in (first, second))
    seeds = sorted(one.keys() & other.keys())
    return described(crossed([one[seed] - other[seed] for seed in seeds]), what)


def setting(name, arm, flag):
    """Return a flag of train_cls.py, as text, that an arm of a comparison has.

    name: the comparison. flag: its name without the dashes, for example "lr".
    """
    return f"{arms.comparison(name)[0].arms[arm][flag]:g}"


def most_fooled(name, measure):
    """Compare an attack with the same attack along other gradients ("adaptive_").

    name: a comparison. Returns three numbers: how many images more the adaptive attack fools, at
    most; the number of images; the number of networks.
    """
    found = arms.comparison(name)[1].found
    adaptive = found[f"adaptive_{measure}"]
    more = [(found[measure][run] - right).sum() / 100 for run, right in adaptive.items()]
    images = {len(right) for right in adaptive.values()}
    return f"{max(more):.0f} of {max(images)} in {len(more)}"


def judged_as(name, pair):
    """Return the outcome of a pair: below, above, equal (within its margins) or open."""
    study, of = arms.comparison(name)
    return arms.pair_outcome(study, name, of, key_of(name, pair, "pgd")[1:])


def rule():
    """Return how many published robust attentions meet the rule of their plan, as text."""
    return str(len(arms.meet_the_rule(arms.comparison("ten")[1])) or "none")


# --- the line -------------------------------------------------------------------------------------

@cache
def line_networks(name):
    networks = line.other_recipes() if name == "other" else line.stored(name)
    return networks, line.PICTURES["fresh" if name == "other" else name][3]


def full(name, measure):
    return dict(zip(("pgd", "corruptions"), line_networks(name)[1])).get(measure, measure)


def off(name, arm, measure, what="difference"):
    """Describe an arm's distance from the line.

    what: "accuracy" and "loss" (geometric mean of clean losses) return these means instead.
    """
    networks, measure = line_networks(name)[0], full(name, measure)
    own = line.of_arms(networks, arm)
    if what == "accuracy":
        return f"{np.mean([n.accuracy[measure] for n in own]):.1f}"
    if what == "loss":
        return f"{line.clean_loss(own):.3f}"
    of = line_networks("fresh")[0] if name == "other" else networks
    return described(line.distance(own, line.reference(of, arm), measure), what)


def apart(first, second, measure, what="difference"):
    """Describe the difference of two arms whose networks have different seeds."""
    two = (line.of_arms(line_networks("fresh")[0], arm) for arm in (first, second))
    return described(line.apart(*two, full("fresh", measure)), what)


def pooled(name, group, measure, what="difference"):
    """Describe the distance of a whole group from the line, for example "RPC that attends"."""
    found, p = grouped(name)
    key = group, full(name, measure)
    return described(found[key], what, p[key], len(p))


@cache
def grouped(name):
    return line.grouped(name, line_networks(name)[0])


def bent(name, group, measure, what="difference"):
    """Describe the distance of a whole group from a parabola instead of a line, see `pooled`."""
    networks = line_networks(name)[0]
    members = line.GROUPS[name][group]
    reference = line.reference(networks, *members, *line.KIN)
    own = line.of_arms(networks, *members)
    return described(line.distance(own, reference, full(name, measure), degree=2), what)


def adjusted(how, measure, what="difference"):
    """Describe RPC minus its baseline after 24 epochs, at equal clean loss.

    how: "own line" or "one slope", see line.adjusted.
    """
    return described(line.adjusted(line_networks("fresh")[0], how, full("fresh", measure)), what)


def fit(name, measure, what):
    """Return the line's correlation r with its interval, or (what="bend") the p of a bend."""
    of = line.reference(line_networks(name)[0])
    r, low, high, bend = line.correlation(of, full(name, measure))
    return show_p(bend) if what == "bend" else f"{r:+.2f} ({low:+.2f} to {high:+.2f})"


# --- other rows -----------------------------------------------------------------------------------

@cache
def rows_of(pattern):
    """Read the rows of all files that match a pattern: CSV, JSON lines, or one JSON object."""
    rows, root = [], ROOT if pattern.startswith("lecture/") else RESULTS
    for path in sorted(root.glob(pattern)):
        if path.suffix == ".csv":
            with open(path, newline="") as f:
                rows += csv.DictReader(f)
        elif path.suffix == ".jsonl":
            rows += common.read_log(path)
        else:
            found = json.loads(path.read_text())
            rows += found.get("rows", [found])
    return rows


def mean(files, *given):
    """Return the mean of a column, as text, over the rows that meet all conditions.

    given: conditions (column=pattern), then the column and a form of `written`. Only rows of the
    last training step count. A list in the column, for example one number per severity, counts as
    its mean.
    """
    *conditions, column, form = given
    rows = rows_of(files)
    for condition in conditions:
        name, pattern = condition.replace("[", "[[]").split("=", 1)
        rows = [row for row in rows if fnmatchcase(f"{row[name]:g}" if isinstance(
            row[name], float) else str(row[name]), pattern)]
    last = max(float(row.get("step", 0)) for row in rows)
    found = [row for row in rows if float(row.get("step", 0)) == last]
    for part in column.split("."):
        found = [row[int(part) if isinstance(row, list) else part] for row in found]
    values = [np.mean(np.asarray(entry, float)) for entry in found]
    return written(values, form)


def written(found, form):
    """Format the mean of numbers.

    form: ".2f": the mean. "±.2f": with the standard deviation. "ci2": two digits, with a t
    interval. "in2": the same without plus signs. "least.2f", "most.2f": the lowest or the highest
    number. "p.5": the p of a t test of the mean against .5.
    """
    if form.startswith("p"):
        return show_p(paired_t(np.array(found) - float(form[1:])).p)
    if form.startswith(("least", "most")):
        found = [min(found) if form.startswith("least") else max(found)]
        form = form.removeprefix("least").removeprefix("most")
    if form.startswith("±"):
        return spread(found, form[1:])
    if form.startswith(("ci", "in")):
        text = show(paired_t(found), int(form[2:]))
        return text if form.startswith("ci") else text.replace("+", "")
    return format(statistics.mean(found), form).replace("%", " %")


def kpca(table, run, measure, source, form, *more):
    """Return a number of results/kpca: the mean over layers, heads and images, as text."""
    return mean(f"kpca/{table}.csv", "layer=all", f"run={run}", f"measure={measure}",
                f"source={source}", *more, "mean", form)


def way(table, network, measure, form="ci1"):
    """Return the position of learned values between a random matrix (0) and the best one (100)."""
    rows = probe.read_csv(RESULTS / f"kpca/{table}.csv")
    return written(kernel_pca.closed(rows, network, measure), form)


def toward(table, network, measure, source, form="ci1"):
    """Return the position of values between a random matrix (0) and exact kernel PCA (100).

    source: "learned", or "best" for the best linear matrix.
    """
    rows = probe.read_csv(RESULTS / f"kpca/{table}.csv")
    names = "x W", f"fitted to {measure}" if source == "best" else source, "KPCA"
    random, own, exact = (kernel_pca.seed_means(rows, network, measure, name) for name in names)
    return written(100 * (own - random) / (exact - random), form)


def chosen(criterion):
    """Return the name of the RPC settings with the highest mean score over seeds.

    criterion: the score, a column of constants/choose.jsonl.
    """
    scores = {}
    for row in rows_of("constants/choose.jsonl"):
        name = f"{row['form']}-{row['lambd']:g}-n{row['n_iter']}"
        scores.setdefault(name, []).append(row[criterion])
    return max(scores, key=lambda name: np.mean(scores[name]))


def losses(file, first, second):
    """Subtract the held-out losses of two arms of forced values, seed by seed: (seeds,).

    first, second: arms, for example span-own.
    """
    of = {(row["arm"], row["seed"]): row["loss"] for row in rows_of(f"decider/{file}.jsonl")}
    return np.array([loss - of[second, seed] for (arm, seed), loss in of.items()
                     if arm == first and (second, seed) in of])


def nats(file, first, second):
    """Format the mean of the differences `losses`, with its interval over seeds."""
    return show(paired_t(losses(file, first, second)), 3)


def beyond(null):
    """Test whether own axes have a loss that is lower than a control's loss by more than .03.

    null: the control. Returns p after Holm's correction over the four controls. The margin .03 was
    fixed in results/decider/plan.md.
    """
    p = holm({name: paired_t(losses("constancy", "span-own", f"span-{name}") + 0.03).p
              for name in ("hashed", "image", "other", "x")})
    return show_p(p[null])


def where(network, measure, form, file="rows"):
    """Return a value of where_is_s after training, in a form of `written`.

    file: "rows", the first three networks; "ten", the networks of the second plan; "robust_pca",
    the networks of the third plan.
    """
    return written(where_group(network, file)[measure], form)


def where_group(network, file, seeds="all"):
    """Return {measure: one value per network} of where_is_s after training.

    seeds: "all", or "fresh" to leave out seed 0.
    """
    rows = rows_of(f"where_is_s/{file}.jsonl")
    groups = where_is_s.over_seeds([row for row in rows if seeds == "all" or row["seed"] > 0])
    return groups[network, where_is_s.last_steps(groups)[network]]


def where_gap(kind, first, second, what="difference", network="rpc 4iter/layer0", seeds="all"):
    """Describe the AUC of a score minus the AUC of another one, paired over networks.

    what: see `described`. "holm" is defined for the primary differences only. seeds: see
    `where_group`.
    """
    group = where_group(network, "robust_pca", seeds)
    d = where_is_s.difference(group, kind, first, second)
    p = math.nan
    if (first, second) == (where_is_s.ROBUST, where_is_s.PAP):
        p = where_is_s.primary(group).get(kind, (d, p))[1]
    return described(d, what, p, 2, 2)


def perfect(arm, kind, condition, what="difference", base="as trained"):
    """Describe a condition minus the condition `base` of studies.perfect_s; see `described`.

    what: also "arm" and "baseline", the accuracy under the condition and under the base, or "±",
    the accuracy with its standard deviation over seeds.
    """
    found = perfect_s.read_rows()
    key, base = (arm, kind, condition), (arm, kind, base)
    if what in ("arm", "baseline", "±"):
        values = [x.mean() for x in found[base if what == "baseline" else key].values()]
        return spread(values) if what == "±" else f"{np.mean(values):.1f}"
    p = perfect_s.adjusted(found)
    return described(perfect_s.gap(found, key, base), what, p.get(key, np.nan), 20)


def perfect_trained(kind, what="difference", tested="as trained"):
    """Describe training and testing with perfect S, minus training with the S of PAP.

    tested: the condition under which the networks trained with the S of PAP are tested.
    """
    d = perfect_s.gap(perfect_s.read_rows(), *perfect_s.trained_pair(kind, tested))
    return described(d, what)


def contrast(arm, kind, condition, base, what="difference"):
    """Describe a condition minus another one in the rows of the right contrast.

    what: see `described`; "arm" and "baseline" return the accuracies under the two conditions.
    """
    found = perfect_s.read_rows(perfect_s.CONTRAST_ROWS)
    if what in ("arm", "baseline"):
        values = found[arm, kind, condition if what == "arm" else base].values()
        return f"{np.mean([x.mean() for x in values]):.1f}"
    tested = perfect_s.contrasts(found).get((arm, kind, condition, base))
    d, p = tested or (perfect_s.gap(found, (arm, kind, condition), (arm, kind, base)), math.nan)
    return described(d, what, p, 16)


def rpca(pair, measure, what="difference"):
    """Describe the difference of two arms of studies.robust_pca, "arm - baseline".

    what: see `described`; "arm" and "baseline" return the mean accuracies. The names in
    robust_pca.PREDICTIONS return the difference at equal clean loss. "together" returns the
    interval that holds together with those of the other planned tests, "one test" the difference
    that this test alone detects with 80 % power.
    """
    found = robust_pca.read_rows()
    arm, base = pair.split(" - ")
    if what in robust_pca.PREDICTIONS:
        rows = common.read_log(robust_pca.ROWS)
        return show(robust_pca.at_equal_loss(rows, found, measure, arm, base, what))
    if what in ("arm", "baseline"):
        values = found[measure][arm if what == "arm" else base].values()
        return f"{np.mean([x.mean() for x in values]):.1f}"
    d = robust_pca.gap(found, measure, arm, base)
    if what == "together":
        low, high = interval(d, 1 - 0.05 / 6)
        return f"{low:+.1f} to {high:+.1f}"
    if what == "one test":
        return described(d, "power")
    p = robust_pca.primary_p(found).get((measure, arm, base), math.nan)
    return described(d, what, p, 6)


@cache
def pretrained_rows():
    return pretrained.Rows(rows_of("pretrained/rows.jsonl"))


def real(what, measure, source, layer, form, tokens="64", network="trained"):
    """Return a number of results/pretrained.

    what: "mean" of a source over texts and heads; "gap", learned minus the source, over texts;
    "heads", the same over heads; "position" of learned values in %; "whole", the position of the
    mean over all layers, over the unit `source`; "above", the heads above all random matrices;
    "outcome", the outcome in the words of the plan. layer: a number, "mean" or
    "all". form: a format, or the digits of an interval.
    """
    rows = pretrained_rows()
    if what == "outcome":
        return pretrained.outcome(rows, measure)
    at = dict(layer=int(layer) if layer.isdecimal() else layer, tokens=int(tokens),
              network=network)
    if what == "position":
        return show(rows.position(measure, **at), int(form))
    if what == "whole":
        at.pop("layer")
        return show(rows.position_of_mean(measure, source, **at), int(form))
    if what == "above":
        return rows.above(measure, **at)
    if what in ("gap", "heads"):
        unit = "heads" if what == "heads" else "texts"
        return show(rows.gap(measure, "learned", source, unit=unit, **at), int(form))
    units = rows.units(measure, source, **at)
    if form.isdecimal():
        return show(paired_t(units), int(form)).replace("+", "")
    return f"{np.nanmean(units):{form}}"


@cache
def repetition_rows():
    return common.read_log(repetition.ROWS)


def law(kind, n, score="", group=repetition.SCENES, form="interval"):
    """Return the AUC of a score in studies.repetition, the mean over networks.

    score: "" for robust PCA after one and four steps, "0.99 / 0.98". form: "interval", or a format
    of the mean alone.
    """
    if not score:
        return repetition.law(repetition_rows(), group, kind, int(n))
    values = repetition.image_aucs(repetition_rows(), group, kind, int(n), score)
    return repetition.cell(values) if form == "interval" else f"{values.mean():{form}}"


def law_gap(test, what="difference", score=repetition.ONE, n="6", group=repetition.SCENES):
    """Describe a contrast of studies.repetition; see `described`.

    "holm" is defined for robust PCA, one step, six corrupted tokens. test: see repetition.TESTS.
    """
    d = repetition.contrast(repetition_rows(), test, score, int(n), group)
    p = repetition.tests(repetition_rows())[test][1]
    return described(d, what, p, len(repetition.TESTS), 2)


def law_texts(kind, n, score, layer="mean"):
    """Return the AUC of a score in texts: of a layer, or the mean over layers with its interval."""
    row, = (row for row in repetition_rows() if row["data"] == "texts"
            and (row["kind"], row["n"]) == (kind, int(n)))
    if layer == "mean":
        return repetition.cell(row["auc"][score])
    return f"{row['layers'][score][int(layer)]:.2f}"


@cache
def left_out_rows(path, network):
    """Read rows of studies.left_out. network: "data, attention"."""
    return left_out.read_rows(path, *network.split(", "))


def left(kind, condition, what="difference", base="as trained", network="shapes, symmetric"):
    """Describe a condition of studies.left_out minus a base, in points of accuracy.

    condition, base: "as trained", "oracle", or a score with the threshold of rule 1; also "score,
    rule 2", and on clean images "score, windows". what: see `described`; "arm" is the accuracy.
    """
    found = left_out_rows(left_out.ROWS, network)
    test = kind, left_out_condition(condition), left_out_condition(base)
    if what == "arm":
        return f"{left_out.level(found, kind, test[1]).mean:.1f}"
    p = math.nan
    if what == "holm":
        p, = (p for name, (_, p) in left_out.tests(found).items()
              if left_out.TESTS[name] == test)
    return described(left_out.gap(found, *test), what, p, len(left_out.TESTS))


def left_out_condition(name):
    """Return the name of a condition in the rows of studies.left_out; see `left`."""
    score, _, rule = name.removesuffix(", windows").partition(", rule ")
    if score not in left_out.SCORES:
        return name
    windows = "; windows" if name.endswith(", windows") else ""
    return f"{score}; {left_out.RULES[int(rule or 1) - 1]}{windows}"


def left_auc(kind, score, data="shapes", attn="symmetric"):
    """Return the mean AUC of a score in studies.left_out over networks."""
    return mean("left_out/rows.jsonl", f"data={data}", f"network={attn}", f"kind={kind}",
                f"auc.{score}", ".2f")


def knowing(detector, condition):
    """Return the accuracy of networks with a detector under attacks that know it, in per cent.

    condition: of left_out.knowing_rows, for example "worst"; or "networks", their number.
    """
    found = left_out_rows(left_out.KNOWING, "shapes, symmetric")
    if condition == "networks":
        return str(len(found[detector, "worst"]))
    return show(left_out.level(found, detector, condition)).replace("+", "")


def paper(table, row, base, column, form):
    """Return a difference of two rows in the paper's tables (studies/reproduce/paper.csv).

    base: the row that is subtracted. form: "nats3" subtracts logarithms and shows three digits;
    other forms: see `written`.
    """
    with open(ROOT / "studies/reproduce/paper.csv", newline="") as f:
        found = {of["row"]: float(of["value"]) for of in csv.DictReader(f)
                 if (of["table"], of["column"]) == (table, column)}
    if form.startswith("nats"):
        return f"{math.log(found[row] / found[base]):+.{form[4:]}f}"
    return written([found[row] - found[base]], form)


def lm_gap(text, variant, baseline, measure="clean"):
    """Format a difference of studies.language, in nats per token."""
    rows = language.read_rows("rows.jsonl")
    return show(language.differences(rows, text, measure)[variant, baseline], 3)


def lm_perplexity(text, variant, measure="clean"):
    """Format the geometric mean of a variant's perplexities in studies.language."""
    found = [language.MEASURES[measure](row) for row in language.read_rows("rows.jsonl")
             if (row["text"], row["variant"]) == (text, variant)]
    return f"{math.exp(statistics.mean(found)):.1f}"


def pro(variant, measure, baseline=""):
    """Format the accuracy of a variant of studies.pro_attention, or its gap to a baseline.

    baseline: another variant, or another measure of the same variant.
    """
    found = pro_attention.outcomes(pro_attention.read_rows())
    own = pro_attention.of_variant(found, measure, variant)
    if not baseline:
        return f"{np.mean([*own.values()]):.1f}"
    other = (measure, baseline) if baseline in pro_attention.VARIANTS else (baseline, variant)
    return show(pro_attention.gap(own, pro_attention.of_variant(found, *other)))


@cache
def part_rows():
    return rows_of("which_part/rows.jsonl")


def part(network, measure, form):
    """Return a measure of studies.which_part in a form of `written`. network: of its GROUPS."""
    return written(which_part.group(part_rows(), *which_part.GROUPS[network])[measure], form)


def part_gap(network, kind, first, second, what="difference"):
    """Describe the AUC of a score minus the AUC of another one; see `described`."""
    values = which_part.group(part_rows(), *which_part.GROUPS[network])
    return described(which_part.gap(values, kind, first, second), what, digits=2)


def part_planned(contrast, network, what="difference", seeds="all"):
    """Describe a planned contrast of studies.which_part.

    what: see `described`; "outcome": in the words of the plan; "share": of the gap that centring
    closes, in %. seeds: "all", or "fresh" to leave out seed 0.
    """
    rows = [row for row in part_rows() if seeds == "all" or row["seed"] > 0]
    values = which_part.group(rows, "shapes", network)
    d, p = which_part.planned(rows)[contrast, network]
    if what == "outcome":
        return which_part.outcome(contrast, d, p, values)
    if what == "share":
        return show(which_part.closed(values), 0)
    return described(d, what, p, 10, 2)


FUNCTIONS = {f.__name__: f for f in (gap, apart_in, on_those, setting, most_fooled, judged_as, rule,
                                     off, apart, pooled, bent, adjusted, fit, mean, kpca, way,
                                     toward, chosen, nats, beyond, where, where_gap, perfect,
                                     perfect_trained, contrast, rpca, real, paper, lm_gap,
                                     lm_perplexity, pro, law, law_gap, law_texts, left, left_auc,
                                     knowing, part, part_gap, part_planned)}


def value(expression):
    """Compute the number of an expression of claims.csv, as text."""
    name, *given = [part.strip() for part in expression.split(";")]
    return FUNCTIONS[name](*given)


# --- pages ----------------------------------------------------------------------------------------

def read_claims(path=CLAIMS):
    """Read claims.csv: a list of (pages, key, number, expression)."""
    with open(path, newline="") as f:
        return [(row["pages"].split(), row["key"], row["number"], row["expression"])
                for row in csv.DictReader(f)]


NUMBER = re.compile(r"(?<![\w.,])[-+−]?(?:\d[\d,]*\.?\d*|\.\d+)(?:e[-+]?\d+)?")


def numbers(text):
    """List the numbers in a text in one notation: -3.3 for −3.3, 3.3 for +3.3, 0.27 for .27."""
    found = (x.rstrip(",.").replace("−", "-").replace(",", "") for x in NUMBER.findall(text))
    return [re.sub(r"^(-?)\.", r"\g<1>0.", x.removeprefix("+")) for x in found]


def plain_text(text):
    return " ".join(re.sub(r"[*`]", "", text).split())


def blocks(text):
    """Split a page into table rows, list items and paragraphs."""
    parts = re.split(r"\n\s*\n|\n(?=\s*[-*|>#] ?)|\n(?=\s*\d+\. )", text)
    return [plain_text(part) for part in parts if part.strip()]


def table_cells(text, row, column):
    """List the table cells whose row and column titles begin with these words."""
    found, titles = [], []
    for line in text.splitlines():
        line = [plain_text(cell) for cell in line.strip().split("|")[1:-1]]
        titles = (titles or line) if line else []           # the first line of a table has them
        found += [cell for cell, title in zip(line, titles)
                  if line[0].startswith(row) and title.startswith(column) and line != titles]
    return found


def places(text, key):
    """List the parts of a page where a number may stand, by the key of its claim.

    The parts are the cells "row | column", or the table rows, list items and paragraphs that
    contain the key.
    """
    if " | " in key:
        return table_cells(text, *key.split(" | "))
    return [block for block in blocks(text) if key in block]


def runs(text, n):
    """List every n consecutive numbers in a text."""
    found = numbers(text)
    return [found[i:i + n] for i in range(len(found) - n + 1)]


def faults(claims, root=ROOT):
    """Yield one line per claim that does not hold: page, expected number, found number."""
    for pages, key, number, expression in claims:
        given, expected = value(expression), numbers(number)
        if given != number:
            yield f"claims.csv: {number} on {pages[0]}: the rows give {given} ({expression})"
        for page in pages:
            parts = places((root / page).read_text(), key)
            near = [found for part in parts for found in runs(part, len(expected))]
            forms = [expected]
            if expected and all(x.startswith("-") for x in expected):
                # Also accept "3.3 points less (2.5 to 4.2)" for "-3.3 (-4.2 to -2.5)".
                forms.append([x.removeprefix("-") for x in [expected[0], *expected[:0:-1]]])
            stated = (any(form in near for form in forms) if expected else
                      any(number in part for part in parts))
            if not stated:
                found = max(near, default=["nothing"], key=lambda found: difflib.SequenceMatcher(
                    None, " ".join(found), " ".join(expected)).ratio())
                yield (f"{page}{key and f', {key}'}: expected {number}, found {' '.join(found)} "
                       f"({expression})")


DECIMAL = r"[-+−]?\d*\.\d+"
INTERVAL = re.compile(rf"{DECIMAL}[^\d|()]{{,40}}\({DECIMAL} to {DECIMAL}(?=[);,])")


def unsigned(text):
    """Return the numbers of an interval as a set without signs.

    "3.3 points worse (2.5 to 4.2)" and "-3.3 (-4.2 to -2.5)" give the same set.
    """
    return frozenset(number.lstrip("-") for number in numbers(text))


def unclaimed(claims, root=ROOT):
    """Yield one line per interval that no claim contains.

    Pages named plan.md are not searched, because a plan may quote earlier results.
    """
    known = {unsigned(number) for _, _, number, _ in claims}
    for page in dict.fromkeys(page for pages, *_ in claims for page in pages):
        if page.endswith("plan.md"):
            continue
        for block in blocks((root / page).read_text()):
            for found in INTERVAL.findall(block):
                if unsigned(found) not in known:
                    yield f"{page}: {found}) has no row in claims.csv"


def detail(*studies, pictures=()):
    """Write a page with the tables of studies, and of pictures of studies.line, as printed."""
    parts = []
    for name in studies:
        study = arms.STUDIES[name]
        text = arms.study_tables(study, arms.stored(study))
        parts.append((f"python -m studies.arms {name}", text))
    if pictures:
        text = "\n\n".join(line.page(name) for name in pictures)
        parts.append(("python -m studies.line", text))
    return "# Tables, written from the rows\n\n" + "\n\n".join(
        f"```sh\n{command}\n```\n\n{text}" for command, text in parts) + "\n"


DETAILS = {"robustness": ("robustness", "cifar10"), "constants": ("constants", "eighteen"),
           "control": ("control",), "finetune": ("finetune",), "line": ("line", "line-cifar10"),
           "criterion": ("criterion",)}


def robust_page(name):
    rows = rows_of(f"where_is_s/{name}.jsonl")
    groups = where_is_s.over_seeds(rows)
    return where_is_s.robust_tables(where_is_s.robust_groups(groups))


def contrast_page(name):
    return perfect_s.contrast_tables(perfect_s.read_rows(RESULTS / f"perfect_s/{name}.jsonl"))


def part_page(name):
    return which_part.tables(part_rows())


def pretrained_page(name):
    return pretrained.tables(rows_of(f"pretrained/{name}.jsonl"))


def repetition_page(name):
    return repetition.tables(rows_of(f"repetition/{name}.jsonl"))


def left_out_page(name):
    return left_out.tables()


# {page of results: (command that prints its tables, function, name of the rows)}
PAGES = {
    "where_is_s/robust_pca.md": ("python -m studies.where_is_s --rows "
                                 "studies/results/where_is_s/robust_pca.jsonl", robust_page,
                                 "robust_pca"),
    "where_is_s/robust_pca_shipped.md": ("python -m studies.where_is_s --rows "
                                         "studies/results/where_is_s/robust_pca_shipped.jsonl",
                                         robust_page, "robust_pca_shipped"),
    "perfect_s/contrast.md": ("python -m studies.perfect_s --contrast", contrast_page, "contrast"),
    "which_part/details.md": ("python -m studies.which_part", part_page, "rows"),
    "pretrained/details.md": ("python -m studies.pretrained", pretrained_page, "rows"),
    "repetition/details.md": ("python -m studies.repetition", repetition_page, "rows"),
    "left_out/details.md": ("python -m studies.left_out", left_out_page, "rows"),
}


def details():
    """Write the text of every page that has tables only: {page: text}."""
    found = {}
    for folder, studies in DETAILS.items():
        if arms.stored(arms.STUDIES[studies[0]]):
            pictures = line.PICTURES if folder == "line" else ()
            found[f"studies/results/{folder}/details.md"] = detail(*studies, pictures=pictures)
    for page, (command, function, name) in PAGES.items():
        if not rows_of(f"{Path(page).parent}/{name}.jsonl"):
            continue
        text = f"# Tables, written from the rows\n\n```sh\n{command}\n```\n\n{function(name)}\n"
        found[f"studies/results/{page}"] = text
    return found


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--details", action="store_true",
                   help="write every details.md with tables again")
    args = p.parse_args(argv)
    claims = read_claims()
    found = [*faults(claims), *unclaimed(claims)]
    for page, text in details().items():
        path = ROOT / page
        if args.details:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            found.append(f"{page} differs from the tables of the stored rows; write it again with: "
                         "python -m studies.claims --details")
    if found:
        sys.exit("\n".join(found))


if __name__ == "__main__":
    common.run(main)
