"""studies/claims.py: the numbers of the pages are those of the rows; what differs is said."""

import csv

import numpy as np
import pytest

from studies import claims
from studies.stats import Compared


def test_every_page_says_what_the_rows_say(capsys):
    assert claims.main([]) is None                  # SystemExit, in words, where one does not
    assert not any(capsys.readouterr())


PAGE, WORDS = "page.md", "RPC is [] points off"
EXPRESSION = "gap; confirmation; rpc4-l1; pgd; mean"


@pytest.mark.parametrize("text, said", [
    ("so RPC is -7.7 points off.", None), ("so RPC is\n-7.7 points\noff.", None),
    ("so RPC is -7.8 points off.", "has -7.8, expected -7.7"),                      # a digit
    ("so RPC is -7.7 points away.", "are missing, expected -7.7"),                  # the words
    ("RPC is -7.7 points off, RPC is -7.9 points off.", "has -7.9, expected -7.7")])
def test_a_changed_digit_and_missing_words_are_said_with_page_expected_and_found(tmp_path, text,
                                                                                 said):
    (tmp_path / PAGE).write_text(text)
    found = list(claims.faults([(PAGE, WORDS, EXPRESSION)], tmp_path))
    assert [PAGE in fault and said in fault for fault in found] == [True] * bool(said)


def test_a_number_in_a_table_is_found_by_its_line_and_its_column(tmp_path):
    table = "| of | clean | PGD |\n|---|---|---|\n| RPC | {} | {} |\n| RPC, too | 3 | 4 |\n"
    (tmp_path / PAGE).write_text(table.format("1", "-7.7") + "\n" + table.format("2", "5")
                                 .replace("PGD", "FGSM"))
    claim = PAGE, "RPC || PGD", EXPRESSION
    assert list(claims.faults([claim], tmp_path)) == []
    assert claims.cells((tmp_path / PAGE).read_text(), "RPC", "clean") == ["1", "2"]
    (tmp_path / PAGE).write_text(table.format("1", "-7.8"))
    fault, = claims.faults([claim], tmp_path)
    assert "has -7.8, expected -7.7" in fault


def test_a_changed_row_is_said(tmp_path, monkeypatch):
    results = tmp_path / "results"
    (results / "kpca").mkdir(parents=True)
    with open(claims.RESULTS / "kpca/jproj.csv", newline="") as f:
        rows = list(csv.DictReader(f))
    claim, = [c for c in claims.read_claims() if c[2] == "kpca; jproj; softmax_s0; J; learned; .2f"]
    for change, wrong in ((0, 0), (1, 1)):
        for row in rows:
            row["mean"] = float(row["mean"]) + change
        with open(results / "kpca/jproj.csv", "w", newline="") as f:
            writer = csv.DictWriter(f, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        monkeypatch.setattr(claims, "RESULTS", results)
        claims.rows_of.cache_clear()
        assert len(list(claims.faults([claim]))) == wrong
    claims.rows_of.cache_clear()


def test_beside_a_slow_measure_stands_the_accuracy_of_its_images_and_networks(monkeypatch):
    found = {"pgd": {("a", 0): np.array([100, 0, 100, 100]), ("a", 1): np.ones(4),
                     ("b", 0): np.zeros(4)}, "slow, 2 images": {("a", 0): np.zeros(2)}}
    monkeypatch.setattr(claims.arms, "comparison",
                        lambda name: (None, Compared(found, (), {}, {}, 0)))
    assert claims.on_those("gate", "a", "pgd", "slow, 2 images") == "50.0"
    assert claims.on_those("gate", "a", "slow, 2 images", "slow, 2 images") == "0.0"


def test_a_row_is_looked_up_by_its_fields_at_its_last_step(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "RESULTS", tmp_path)
    (tmp_path / "a.csv").write_text(
        "run,step,of,x\na_s0,0,J [R],9\na_s0,8,J [R],1\na_s1,8,J [R],2\nb_s0,8,J [R],7\n")
    assert claims.mean("a.csv", "run=a_s?", "of=J [R]", "x", ".2f") == "1.50"
    assert claims.mean("a.csv", "run=a_s?", "step=0", "x", ".0f") == "9"
    assert claims.mean("a.csv", "run=a*", "x", "±.1f") == "1.5 ± 0.7"
    assert claims.mean("a.csv", "x", "in1") == "3.3 (-4.7 to 11.3)"
    claims.rows_of.cache_clear()


def test_a_number_of_where_is_s_is_of_the_last_step_and_over_seeds(monkeypatch):
    rows = [dict(network="rpc", step=step, seed=seed, values={"clean: x": step + seed})
            for step in (0, 250) for seed in (0, 1, 2)]
    monkeypatch.setattr(claims, "rows_of", lambda file: rows)
    assert claims.where("rpc", "clean: x", "±.1f") == "251.0 ± 1.0"


def test_losses_of_forced_values_are_paired_by_the_seeds_that_both_have(monkeypatch):
    rows = [dict(arm=arm, seed=seed, loss=loss) for arm, seed, loss in (
        ("plain", 0, 2.0), ("plain", 1, 1.0), ("span-own", 1, 1.5), ("span-own", 2, 9.0))]
    monkeypatch.setattr(claims, "rows_of", lambda file: rows)
    assert claims.losses("constancy", "span-own", "plain").tolist() == [0.5]


def test_the_tables_that_were_not_written_anew_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "read_claims", lambda: [])
    monkeypatch.setattr(claims, "details", lambda: {"details.md": "a table\n"})
    monkeypatch.setattr(claims, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="details.md is not what the rows say"):
        claims.main([])
    claims.main(["--details"])
    claims.main([])
