"""Pages state the numbers that follow from the stored rows, and their commands run."""

import glob
import importlib
import re
import shlex

import pytest

from fixtures import ROOT
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


def test_changed_row_is_named(monkeypatch):
    claim = next(c for c in claims.read_claims() if c[3].startswith("way; trained; softmax; eig"))
    rows = claims.probe.read_csv(claims.RESULTS / "kpca/trained.csv")
    for row in rows:
        row["mean"] = float(row["mean"]) * (1.1 if row["source"] == "x W" else 1)
    monkeypatch.setattr(claims.probe, "read_csv", lambda path: rows)
    assert list(claims.faults([claim]))[0].startswith("claims.csv: ")


# --- commands on the pages ------------------------------------------------------------------------

PAGES = "\n".join(path.read_text().replace("\\\n", " ")
                  for path in (ROOT / "docs/dispute.md", *sorted(ROOT.glob("studies/**/*.md"))))
SHOWN = dict.fromkeys(re.sub(r"\s+", " ", command).strip() for command in re.findall(
    r"python -m (studies[.\w]* ?[^`|#\n]*)", PAGES))
OF_ROWS = [command for command in SHOWN if "--rows studies" in command
           or command.startswith("studies.arms") and "--" not in command]


@pytest.mark.parametrize("command", OF_ROWS)
def test_page_command_prints_its_tables(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)                                 # new figures go here
    (tmp_path / "studies").symlink_to(ROOT / "studies")
    study, *words = shlex.split(command)
    words = [path for word in words for path in (sorted(glob.glob(word)) or [word])]
    importlib.import_module(study).main(words)
    assert "|---" in capsys.readouterr().out


def test_every_named_study_exists():
    assert len(OF_ROWS) > 8
    for study in {command.split()[0] for command in SHOWN} - {"studies.reproduce"}:
        assert callable(importlib.import_module(study).main)
