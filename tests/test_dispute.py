"""Every number of docs/dispute.md is what the committed rows give, or the papers print."""

import csv
import json
import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/dispute.md").read_text()
PICTURES = json.loads((ROOT / "lecture/pictures/numbers.json").read_text())


def rows(name):
    return [json.loads(line) for line in (ROOT / "referee/results" / name).read_text().splitlines()]


def kpca(table, run, measure, source, step=-1):
    """What referee/results/kpca/<table>.csv holds of a network, over its layers; step: first, ..., last."""
    with open(ROOT / f"referee/results/kpca/{table}.csv") as f:
        found = {int(row["step"]): float(row["mean"]) for row in csv.DictReader(f)
                 if (row["run"], row["layer"], row["measure"], row["source"]) == (run, "all", measure, source)}
    return found[sorted(found)[step]]


def over_seeds(table, network, measure, source):
    return statistics.mean(kpca(table, f"{network}_s{seed}", measure, source) for seed in range(3))


def accuracy(name, arm, seeds, measure, eps=None):
    """Mean accuracy of an arm in a robustness study, per cent."""
    found = []
    for row in rows(f"robustness/{name}"):
        if row["checkpoint"].rpartition("/")[2] in {f"{arm}_s{seed}" for seed in seeds} and row["measure"] == measure:
            if eps is None or round(255 * row["setting"]["eps"]) == eps:
                found.append(statistics.mean(row["top1"]) if measure == "corruptions" else row["top1"])
    assert len(found) == len(seeds) * (15 if measure == "corruptions" else 1)
    return statistics.mean(found)


def lost(name, seeds, measure, eps=None):
    values = [accuracy(name, arm, seeds, measure, eps) for arm in ("symmetric", "rpc4-l1")]
    return f"{values[0] - values[1]:.1f}"


def gap(files, baseline, arm, measure, above, eps=2):
    """Points by which an arm is above or below a baseline in these files of rows, a seed each."""
    values = {baseline: [], arm: []}
    for row in (row for file in files for row in rows(file)):
        name = row["checkpoint"].rpartition("/")[2].rpartition("_s")[0]
        if name in values and row["measure"] == measure and (
                measure == "corruptions" or abs(row["setting"]["eps"] - eps / 255) < 1e-9):
            values[name].append(statistics.mean(row["top1"]) if measure == "corruptions" else row["top1"])
    assert len(set(map(len, values.values()))) == 1 and values[arm]
    points = statistics.mean(values[arm]) - statistics.mean(values[baseline])
    assert (points > 0) == above
    return f"{abs(points):.1f}"


def fresh(arm, seeds, *above):
    return [gap([f"constants/s{seed}.jsonl" for seed in seeds], "symmetric", arm, *of)
            for of in zip(("pgd", "corruptions"), above)]


def controlled(baseline, arm, above):
    files = [f"control/{name}_s{seed}.jsonl" for name in (baseline, arm) for seed in (5, 6, 7)]
    return gap(files, baseline, arm, "pgd", above)


def auc(name):
    """AUC after training in the RPC networks, mean over three seeds."""
    of = [row for row in rows("where_is_s/rows.jsonl") if "/rpc4-l1_s" in row["run"]]
    last = max(row["step"] for row in of)
    found = [row["values"][f"noise: AUC of {name}"] for row in of if row["step"] == last and "noise" in row["kinds"]]
    assert len(found) == 3
    return f"{statistics.mean(found):.2f}"


def perplexity(attn):
    """Clean test perplexity, sliding windows."""
    found = [json.loads((ROOT / f"referee/results/wikitext_small/{attn}_s{seed}.json").read_text()) for seed in range(3)]
    values = [row["sliding"] for run in found for row in run["rows"] if row["split"] == "test"]
    assert len(values) == 3
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


MEASURED = {
    "Theorem 1": lambda: [f"{PICTURES['projection']['difference']:.1e}"],
    "projection error falls": lambda: [
        f"{kpca('jproj', 'softmax_s0', 'J', 'learned', 0):.2f}", f"{kpca('jproj', 'softmax_s0', 'J', 'learned'):.2f}",
        f"{100 * kpca('jproj', 'softmax_s0', 'above', 'learned'):.0f} %"],
    "eigenvectors": lambda: [
        *(f"{over_seeds('gamma', 'softmax', 'eig_cos', source):.3f}" for source in ("learned", "x W", "other")),
        *(f"{over_seeds('gamma', 'scaled_s', 'eig_cos, v = G a', source):.3f}" for source in ("learned", "x W")),
        *(f"{kpca('attainable', 'softmax_s0', 'eig_cos', source):.3f}" for source in (
            "x W", "learned", "fitted to eig_cos")),
        *(f"{kpca('gammas', 'softmax_s0', 'numeric inverse', source):.1e}" for source in ("learned", "iid"))],
    "Eigenvalues": lambda: [f"{kpca('eigstats', 'softmax_s0', 'max', 'as they are'):.4f}",
                            f"{kpca('eigstats', 'softmax_s0', 'bound', 'as they are'):.4f}"],
    "do not match the theory": lambda: [
        f"{kpca('similarities', 'softmax_s0', 'optimal [R]', source):.2f}" for source in ("KPCA", "iid")] + [
        f"{kpca('values', 'softmax_s0', 'overlap', source):.3f}" for source in ("learned", "x W")],
    "orders of magnitude": lambda: [f"{kpca('jproj', 'softmax_s0', 'rel_phi', 'learned'):,.0f}"],
    "more robust": lambda: [lost("results.jsonl", range(5), "corruptions"), lost("results.jsonl", range(5), "pgd", 2),
                            lost("cifar10.jsonl", range(3), "corruptions"), lost("cifar10.jsonl", range(3), "pgd", 1),
                            *fresh("rpc4-l1", range(5, 13), False, False),
                            *fresh("paper-0.05-n4", range(10, 15), True, True),
                            *fresh("paper-0.05-n4", range(15, 20), True, False),
                            controlled("symmetric", "symmetric-adv", True),
                            controlled("symmetric-adv", "rpc4-l1-adv", False)],
    "S holds": lambda: [auc("S, step 4"), auc("distance")],
    "language model with RPC": lambda: [perplexity("rpc"), perplexity("symmetric")],
    "sees no later word": lambda: [f"{PICTURES['leak'][name]:.4f}" for name in ("all 0", "seen 0")],
    "budget": lambda: [f"{6 * statistics.mean((0.229, 0.224, 0.225)):.2f}/255"],
}


@pytest.mark.parametrize("claim", MEASURED)
def test_the_verdict_states_what_the_rows_give(claim):
    lines = [line for line in PAGE.splitlines() if line.startswith("| ") and claim in line.split("|")[1]]
    assert len(lines) == 1
    verdict = lines[0].split(" | ")[5]
    for number in MEASURED[claim]():
        assert re.search(rf"(?<![\d.]){re.escape(number.lstrip('-'))}(?![\d])", verdict), (claim, number, verdict)


def test_every_number_of_a_verdict_is_measured():
    for line in PAGE.splitlines():
        cells = line.split(" | ")
        if len(cells) == 7 and not set(cells[1]) <= set("- |") and "verdict" not in line:
            claim = next((name for name in MEASURED if name in cells[0]), None)
            known = " ".join(MEASURED[claim]()) if claim else ""
            for shown in re.findall(r"(?<![\w/])\d+[\d.,]*\d(?:e-\d+)?", cells[5].replace("CIFAR-10", "")):
                assert shown in known or shown in ("255", "0.5"), (claim, shown)


def test_numbers_said_to_be_printed_are_printed():
    for number in ("648.46", "40.07", "17.73"):
        assert number in PAGE
