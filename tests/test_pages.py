"""referee/pages.py: the numbers of the pages are those of the rows, and marks are what it writes."""

import pytest

from referee import pages


@pytest.mark.parametrize("page", pages.pages(), ids=lambda path: str(path.relative_to(pages.ROOT)))
def test_writing_a_page_anew_changes_nothing(page):
    text = page.read_text()
    assert pages.fill(text) == text


def test_a_number_is_written_between_its_marks_and_a_wrong_one_corrected():
    mark = "rpc4-l1 is <!--=d; confirmation; rpc4-l1; pgd; mean-->{}<!--/--> points off."
    written = pages.fill(mark.format(""))
    assert pages.fill(mark.format("99")) == written and "-->-7.7<!--" in written


def test_a_family_of_tests_leaves_out_what_another_question_judges():
    of = pages.compared("ten")
    assert {arm for _, arm in of.p} == set(pages.TEN) - {"rpc4-l1", "rpc2-all"}
    assert {(m, "rpc4-l1") for m in of.primary} <= of.gaps.keys()


def test_a_row_is_looked_up_by_its_fields_at_its_last_step(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    (tmp_path / "a.csv").write_text("run,step,of,x\na_s0,0,J [R],9\na_s0,8,J [R],1\na_s1,8,J [R],2\nb_s0,8,J [R],7\n")
    assert pages.row("a.csv", "run=a_s?", "of=J [R]", "x", ".2f") == "1.50"
    assert pages.row("a.csv", "run=a_s?", "step=0", "x", ".0f") == "9" and pages.row("a.csv", "run=a*", "x", "±.1f") == "1.5 ± 0.7"


def test_a_number_of_where_is_s_is_of_the_last_step_and_over_seeds(monkeypatch):
    rows = [dict(network="rpc", step=step, seed=seed, values={"clean: x": step + seed})
            for step in (0, 250) for seed in (0, 1, 2)]
    monkeypatch.setattr(pages, "rows_of", lambda file: rows)
    pages.trained_last.cache_clear()
    assert pages.where("rpc", "clean: x", ".1f") == "251.0" and pages.where("rpc", "clean: x", "±.1f") == "251.0 ± 1.0"
    assert pages.where("rpc", "clean: x", "in1") == "251.0 (248.5 to 253.5)"
    pages.trained_last.cache_clear()


def test_the_forest_plot_has_every_primary_difference():
    there = {(title, arm) for title, rows in pages.differences() for arm, *_ in rows}
    assert ("adversarial training", "symmetric-adv") in there and len(there) >= 28
