"""referee/pages.py: the numbers of the pages are those of the rows, and marks are what it writes."""

import pytest

from referee import pages


@pytest.mark.parametrize("page", pages.pages(), ids=lambda path: str(path.relative_to(pages.ROOT)))
def test_writing_a_page_anew_changes_nothing(page):
    text = page.read_text()
    assert pages.fill(text) == text


def test_a_number_is_written_between_its_marks_and_a_wrong_one_corrected():
    mark = "rpc4-l1 is <!--=mean; confirmation; rpc4-l1; pgd-->{}<!--/--> points off."
    written = pages.fill(mark.format(""))
    assert pages.fill(mark.format("99")) == written and "-->-7.7<!--" in written


def test_a_family_of_tests_leaves_out_what_another_question_judges():
    _, gaps, p, primary = pages.compared("ten")
    assert {arm for _, arm in p} == set(pages.TEN) - {"rpc4-l1", "rpc2-all"}
    assert {(m, "rpc4-l1") for m in primary} <= gaps.keys()


def test_the_forest_plot_has_every_primary_difference(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(pages, "forest", lambda groups, path: drawn.extend(groups))
    monkeypatch.setattr(pages.line, "draw", lambda *a: None)
    monkeypatch.setattr(pages.line, "draw_lambda", lambda *a: None)
    pages.figures()
    there = {(title, arm) for title, rows in drawn for arm, *_ in rows}
    assert ("adversarial training", "symmetric-adv") in there and len(there) >= 28
