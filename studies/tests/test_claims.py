"""Test studies/claims.py: pages state the numbers that follow from the stored rows."""

import csv

import pytest

from studies import claims


def test_every_page_agrees_with_the_rows(capsys):
    assert claims.main([]) is None              # otherwise SystemExit, with one line per fault
    assert not any(capsys.readouterr())


PAGE, NUMBER = "page.md", "-7.7 (-12.7 to -2.8)"
CLAIM = [PAGE], "", NUMBER, "gap; confirmation; rpc4-l1; pgd"


@pytest.mark.parametrize("text, found", [
    ("RPC is -7.7 points\n(-12.7 to -2.8) off.", None),
    ("Rewritten: **-7.7** percentage points, interval −12.7 to −2.8.", None),
    ("RPC loses 7.7 points (2.8 to 12.7).", None),
    ("RPC is -7.8 points (-12.7 to -2.8) off.", "found -7.8 -12.7 -2.8"),
    ("RPC is -7.7 points (-12.7 to -2.9) off.", "found -7.7 -12.7 -2.9"),
    ("RPC is off.", "found nothing")])
def test_changed_digit_is_named_with_its_page(tmp_path, text, found):
    (tmp_path / PAGE).write_text(text)
    faults = list(claims.faults([CLAIM], tmp_path))
    assert [PAGE in fault and f"expected {NUMBER}, {found}" in fault
            for fault in faults] == [True] * bool(found)


@pytest.mark.parametrize("number", ["4.2 (2.5 to 5.9)", "-3.3 (-4.2 to -2.5)", "33.6",
                                    "-0.5 (-2.1 to +1.2)", "24.9 -> 44.3"])
def test_headlines_are_checked_on_every_page(number):
    checked = {page for pages, _, found, _ in claims.read_claims() if found == number
               for page in pages}
    assert checked >= {"studies/README.md", "docs/dispute.md", "lecture/WALKTHROUGH.md"}


def test_table_cell_is_found_by_row_and_column(tmp_path):
    table = "| of | clean | PGD |\n|---|---|---|\n| RPC | {} | {} |\n| no RPC | 3 | 4 |\n"
    claim = [PAGE], "RPC | PGD", NUMBER, CLAIM[3]
    (tmp_path / PAGE).write_text(table.format("1", NUMBER))
    assert list(claims.faults([claim], tmp_path)) == []
    (tmp_path / PAGE).write_text(table.format(NUMBER, "1"))             # the wrong column
    assert len(list(claims.faults([claim], tmp_path))) == 1


def test_interval_without_a_claim_is_named(tmp_path):
    (tmp_path / PAGE).write_text(f"First {NUMBER}, lower by 7.7 points (2.8 to 12.7); "
                                 "then -7.7 (-12.7 to -2.9).")
    fault, = claims.unclaimed([CLAIM], tmp_path)
    assert PAGE in fault and "-2.9" in fault


def test_changed_row_is_named(tmp_path, monkeypatch):
    (tmp_path / "kpca").mkdir(parents=True)
    with open(claims.RESULTS / "kpca/trained.csv", newline="") as f:
        rows = list(csv.DictReader(f))
    claim = next(c for c in claims.read_claims() if c[3].startswith("way; trained; softmax; eig"))
    for row in rows:
        row["mean"] = float(row["mean"]) * (1.1 if row["source"] == "x W" else 1)
    with open(tmp_path / "kpca/trained.csv", "w", newline="") as f:
        writer = csv.DictWriter(f, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    monkeypatch.setattr(claims, "RESULTS", tmp_path)
    claims.rows_of.cache_clear()
    faults = list(claims.faults([claim]))
    claims.rows_of.cache_clear()
    assert faults[0].startswith("claims.csv: ")


def test_lowest_highest_and_p_of_numbers():
    numbers = [0.5, 0.7, 0.9]
    assert [claims.written(numbers, form) for form in (".1f", "least.1f", "most.1f")] == [
        "0.7", "0.5", "0.9"]
    assert claims.written(numbers, "p.7") == "1.000"
    t = 0.7 / (0.2 / 3 ** 0.5)                              # two degrees of freedom
    assert claims.written(numbers, "p.0") == f"{1 - t / (2 + t * t) ** 0.5:.3f}"[1:]


def test_position_of_best_matrix_stays_below_kernel_pca():
    best = claims.toward("trained", "softmax", "eig_cos", "best", ".2f")
    learned = claims.toward("trained", "softmax", "eig_cos", "learned", ".2f")
    assert 0 < float(learned) < float(best) < 100
    assert claims.toward("trained", "softmax", "eig_cos", "KPCA", ".2f") == "100.00"
    assert claims.toward("trained", "softmax", "eig_cos", "x W", ".2f") == "0.00"


def test_gain_of_paper_is_a_difference_of_rows():
    gain = claims.paper("1", "RPC 4iter/layer1", "SymViT", "IN-C", "+.2f")
    assert gain == "+0.90"                                              # 42.35 - 41.45
    assert claims.paper("1", "SymViT", "RPC 4iter/layer1", "IN-C", "+.2f") == "-0.90"
    assert claims.paper("1", "SymViT", "SymViT", "IN-C", "nats3") == "+0.000"
