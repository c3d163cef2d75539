"""The tables of results pages are what the commands that the pages name print of the rows."""

from pathlib import Path

import pytest

from referee.studies import constants, control, outliers, robustness

RESULTS = Path(__file__).parents[1] / "referee/results"
SCENES, CIFAR10 = "robustness/results.jsonl", "robustness/cifar10.jsonl"
OTHERS = [f"robust_attentions/{name}.jsonl" for name in ("results", "patches", "cifar10")]
TEN = "rpc4-l1 rpc2-all rkde-huber rkde-hampel mom elliptical sinkhorn keys keys-rows weights"
# page, its file of all tables, study, rows, flags
PAGES = [
    ("robustness/README.md", "robustness/scenes_tables.md", robustness, [SCENES], []),
    ("robustness/cifar10.md", "robustness/cifar10_tables.md", robustness, [CIFAR10], []),
    ("robust_attentions/README.md", "robust_attentions/scenes_tables.md", outliers,
     [SCENES, *OTHERS[:2]], ["--seeds", *"01234", "--arms", "symmetric", *TEN.split()]),
    ("robust_attentions/cifar10.md", "robust_attentions/cifar10_tables.md", robustness,
     [CIFAR10, OTHERS[2]], "--arms symmetric rpc4-l1 keys-rows weights rkde-huber --references rpc4-l1".split()),
]


@pytest.mark.parametrize("page, tables, study, rows, flags", PAGES)
def test_tables_are_what_the_rows_say(page, tables, study, rows, flags, tmp_path):
    study.main(["--out_dir", str(tmp_path), "--rows", *(str(RESULTS / path) for path in rows), *flags])
    found = next(tmp_path.glob("*.md")).read_text()
    assert found == (RESULTS / tables).read_text()
    primary = found.split("\n\n")[1]
    assert primary in (RESULTS / page).read_text()


@pytest.mark.parametrize("page, study, rows", [("constants", constants, "constants/s*.jsonl"),
                                               ("control", control, "control/*_s?.jsonl")])
def test_printed_tables_are_what_the_rows_say(page, study, rows, tmp_path, capsys):
    study.main(["--out_dir", str(tmp_path), "--rows", *map(str, sorted(RESULTS.glob(rows)))])
    found = capsys.readouterr().out
    assert found == (RESULTS / page / "tables.md").read_text()
    for part in found.split("The primary measures")[1:]:
        assert part.split("\n\n")[1] in (RESULTS / page / "README.md").read_text()


def test_the_printed_choice_is_what_the_scores_say(capsys):
    constants.main(["choose", "--rows", str(RESULTS / "constants/choose.jsonl")])
    table, winners = capsys.readouterr().out.split("\n\n")
    page = (RESULTS / "constants/README.md").read_text()
    assert len(table.splitlines()) == 2 + 14 and table in page and winners in page
