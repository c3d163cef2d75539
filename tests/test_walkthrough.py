"""lecture/WALKTHROUGH.md quotes the code, and the cells compute all of its numbers."""

import csv
import json
import re

import pytest

from fixtures import ROOT
from processes import run_command

TEXT = (ROOT / "lecture/WALKTHROUGH.md").read_text(encoding="utf-8")
SLIDES = (ROOT / "lecture/slides.md").read_text(encoding="utf-8")
TEACHING = (ROOT / "lecture/TEACHING.md").read_text(encoding="utf-8")
CODE = (ROOT / "lecture/pictures.py").read_text(encoding="utf-8")
NUMBERS = json.loads((ROOT / "lecture/pictures/numbers.json").read_text(encoding="utf-8"))
NAMES = re.findall(r"^def draw_(\w+)", CODE, re.M)


def wrong_quotes(text):
    """List (file, first line) of quoted passages that their file does not contain."""
    wrong = []
    for block in re.findall(r"```python\n(.*?)```", text, re.S):
        name, *lines = [line.strip() for line in block.strip().splitlines()]
        file = ROOT / name.removeprefix("# ")
        held = "\n".join(line.strip() for line in file.read_text(encoding="utf-8").splitlines())
        if "\n".join(lines) + "\n" not in held + "\n":
            wrong.append((name, lines[0]))
    return wrong


def published():
    """Return the numbers of the paper's tables."""
    with open(ROOT / "studies/reproduce/paper.csv", encoding="utf-8") as file:
        return [abs(float(row["value"])) for row in csv.DictReader(file)
                if re.fullmatch(r"-?[\d.]+", row["value"])]


def claimed():
    """Return the numbers of the lecture that studies.claims computes from the rows of a study."""
    found = []
    with open(ROOT / "studies/claims.csv", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if "lecture/" in row["pages"]:
                found += [float(x) for x in re.findall(r"\d+\.\d+", row["number"])]
    return found


def unfounded(text):
    """List decimal numbers of the prose that no cell and no study computed, nor the paper prints."""
    prose = re.sub(r"```.*?```|\$\$.*?\$\$|\$[^$]+\$|`[^`]+`|\]\([^)]*\)|^!\[.*?$", " ", text,
                   flags=re.S | re.M)
    prose = re.sub(r"\b(eq\.|section|App\.) [\w.]+", " ", prose)
    known = [abs(x) for cell in NUMBERS.values() for x in cell.values()] + published() + [0.5]
    known += claimed()
    return [shown for shown in re.findall(r"(?<![\w.,/])\d+\.\d+(?![\d.])", prose)
            if float(shown) not in [round(x, len(shown.split(".")[1])) for x in known]]


HOME = r"<details><summary>At home.*?</details>"
DERIVED = r"<!-- derived -->\s*(?:\$\$.*?\$\$|(?:\|[^\n]*\n)+)"
BOARD = r"^\| on the board.*?\n\n"
PICTURE = r"^!\[[^\n]*\n\n\*[^\n]*\*\n"                 # with its caption
FORMULA = r"(?:\$\$[^$]*\$\$\s*)+"                       # formulas in a row are one
CODE_BLOCK = r"```python\n.*?```"


def minutes(section):
    """Return the minutes that a section of the lecture takes, by the rules of TEACHING.md."""
    spoken, total = re.sub(HOME, "", section, flags=re.S), 0
    for pattern, each in ((DERIVED, 3), (BOARD, 2), (PICTURE, 1), (FORMULA, 1.5)):
        found = re.findall(pattern, spoken, flags=re.S | re.M)
        spoken = re.sub(pattern, "", spoken, flags=re.S | re.M)
        total += each * len(found)
    for block in re.findall(CODE_BLOCK, spoken, re.S):
        total += 0.2 * len(block.strip().splitlines()[2:-1])            # without the file's name
    spoken = re.sub(CODE_BLOCK, "", spoken, flags=re.S)
    total += 0.5 * spoken.count("Hands up") + 2 * spoken.count("**Live.**")
    words = re.findall(r"[\w$\\]\S*", re.sub(r"\]\([^)]*\)|<[^>]+>", "", spoken))
    return total + len(words) / 110


def test_hour_takes_fifty_minutes_as_planned():
    stops = re.split(r"^## ", TEXT.split("*Here the hour ends.*")[0], flags=re.M)
    stops[-2:] = ["".join(stops[-2:])]                  # stop 5, and what to take home
    planned = re.findall(r"^\| ([\d.]+) to ([\d.]+) \|.*\| ([\d.]+) \|$", TEACHING, re.M)
    counted = [minutes(stop) for stop in stops]
    assert len(planned) == len(counted) == 6
    for stop, (start, end, shown), count in zip(stops, planned, counted):
        assert float(shown) == pytest.approx(count, abs=0.06), stop[:40]
        assert count <= float(end) - float(start) + 0.5
    assert sum(counted) <= 50 == float(planned[-1][1])


def test_quoted_lines_stand_in_their_files():
    assert wrong_quotes(TEXT) == []
    broken = TEXT.replace("S = shrink(K - L + Z, tau)", "S = shrink(K + L + Z, tau)", 1)
    assert [name for name, _ in wrong_quotes(broken)] == ["# attention.py"]


def test_every_function_draws_one_picture_of_text():
    assert sorted(re.findall(r"pictures/(\w+)\.png\)", TEXT)) == sorted(NAMES) == sorted(NUMBERS)


def test_decimal_numbers_come_from_cells_or_paper():
    assert unfounded(TEXT) == [] == unfounded(SLIDES)
    assert unfounded(TEXT.replace("4.2 (2.5 to 5.9)", "4.37 (2.5 to 5.9)")) == ["4.37"]


# The other cells take longer; the executed notebook shows that they run.
def test_cells_compute_stored_numbers(tmp_path):
    code, _, err = run_command(ROOT, ["-m", "lecture.pictures", "projection", "ruler", "--out_dir",
                                      str(tmp_path)])
    assert code == 0, err
    found = json.loads((tmp_path / "numbers.json").read_text(encoding="utf-8"))
    assert sorted(found) == ["projection", "ruler"]
    for name in found:
        assert found[name] == pytest.approx(NUMBERS[name], rel=0.02, abs=1e-5), name
