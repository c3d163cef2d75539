"""lecture/WALKTHROUGH.md quotes the code, and the cells compute all of its numbers."""

import csv
import json
import re

import pytest

from fixtures import ROOT
from processes import run_command

TEXT = (ROOT / "lecture/WALKTHROUGH.md").read_text()
SLIDES = (ROOT / "lecture/slides.md").read_text()
CODE = (ROOT / "lecture/pictures.py").read_text()
NUMBERS = json.loads((ROOT / "lecture/pictures/numbers.json").read_text())
NAMES = re.findall(r"^def draw_(\w+)", CODE, re.M)


def wrong_quotes(text):
    """List (file, first line) of quoted passages that their file does not contain."""
    wrong = []
    for block in re.findall(r"```python\n(.*?)```", text, re.S):
        name, *lines = [line.strip() for line in block.strip().splitlines()]
        file = ROOT / name.removeprefix("# ")
        held = "\n".join(line.strip() for line in file.read_text().splitlines())
        if "\n".join(lines) + "\n" not in held + "\n":
            wrong.append((name, lines[0]))
    return wrong


def published():
    """Return the numbers of the paper's tables."""
    with open(ROOT / "studies/reproduce/paper.csv") as file:
        return [abs(float(row["value"])) for row in csv.DictReader(file)
                if re.fullmatch(r"-?[\d.]+", row["value"])]


def unfounded(text):
    """List decimal numbers of the prose that neither a cell computed nor the paper prints."""
    prose = re.sub(r"```.*?```|\$\$.*?\$\$|\$[^$]+\$|`[^`]+`|\]\([^)]*\)|^!\[.*?$", " ", text,
                   flags=re.S | re.M)
    prose = re.sub(r"\b(eq\.|section|App\.) [\w.]+", " ", prose)
    known = [abs(x) for cell in NUMBERS.values() for x in cell.values()] + published() + [0.5]
    return [shown for shown in re.findall(r"(?<![\w.,/])\d+\.\d+(?![\d.])", prose)
            if float(shown) not in [round(x, len(shown.split(".")[1])) for x in known]]


def test_quoted_lines_stand_in_their_files():
    assert wrong_quotes(TEXT) == []
    broken = TEXT.replace("S = shrink(K - L + Z, tau)", "S = shrink(K + L + Z, tau)", 1)
    assert [name for name, _ in wrong_quotes(broken)] == ["# attention.py"]


def test_every_function_draws_one_picture_of_text():
    assert sorted(re.findall(r"pictures/(\w+)\.png\)", TEXT)) == sorted(NAMES) == sorted(NUMBERS)


def test_decimal_numbers_come_from_cells_or_paper():
    assert unfounded(TEXT) == [] == unfounded(SLIDES)
    assert unfounded(TEXT.replace("4.2 (2.5 to 5.9)", "4.3 (2.5 to 5.9)")) == ["4.3"]


# The other cells take longer; the executed notebook shows that they run.
def test_cells_compute_stored_numbers(tmp_path):
    code, _, err = run_command(ROOT, ["-m", "lecture.pictures", "projection", "ruler", "--out_dir",
                                      str(tmp_path)])
    assert code == 0, err
    found = json.loads((tmp_path / "numbers.json").read_text())
    assert sorted(found) == ["projection", "ruler"]
    for name in found:
        assert found[name] == pytest.approx(NUMBERS[name], rel=0.02, abs=1e-5), name
