"""lecture/WALKTHROUGH.md says what the code says and what came out: lines, pictures, numbers."""

import builtins
import json
import os
import re
import subprocess
import symtable
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lecture import edits
from studies import claims

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "lecture/WALKTHROUGH.md").read_text()
CODE = (ROOT / "lecture/walkthrough.py").read_text()
NUMBERS = json.loads((ROOT / "lecture/pictures/numbers.json").read_text())
CELLS = CODE.split("\n# %% ")[1:]
# Numbers in the text that no picture gives: sizes, settings, chance, published ones ...
GIVEN = {"2024", "32", "64", "65", "40", "16", "300", "128", "95", "15", "10", "0.5", "0.6931",
         "648.46", "500", "255", "1e8", "90", "100", "12", "24", "1.8", "2025", "2011",
         "0.25", "60", "60.2"}                          # the last: of an edit, that a test runs
# ... and those of the referee's pages.
GIVEN |= {number for page, _, expression in claims.read_claims() if "WALKTHROUGH" in page
          for number in re.findall(r"-?\d[\d.]*", claims.value(expression))}
GIVEN |= {"2.3", "0.9", "13", "0.27", "0.36", "0.06", "0.61", "0.55", "0.65", "0.32", "0.98",
          "0.82", "6.3", "80"}


NAMES = re.findall(r'^if wanted\("(\w+)"\)', CODE, re.M)            # of the cells after the first
MEASURED = re.compile(r"^\| .*\| ([\d.]+) \| ([\d.]+) \| `python -m lecture.edits (\w+)` \|$", re.M)


def wrong_quotes(text):
    """The quoted passages, file and first line, that their file lacks, indentation aside."""
    wrong = []
    for block in re.findall(r"```python\n(.*?)```", text, re.S):
        name, *lines = [line.strip() for line in block.strip().splitlines()]
        file = ROOT / name.removeprefix("# ")
        held = "\n".join(line.strip() for line in file.read_text().splitlines())
        if "\n".join(lines) + "\n" not in held + "\n":
            wrong.append((name, lines[0]))
    return wrong


def sections(text):
    """(names of its pictures, prose) of every section: without code, formulas and links."""
    for section in text.split("\n## ")[1:]:
        prose = MEASURED.sub(" ", section)
        prose = re.sub(r"```.*?```|\$\$.*?\$\$|\$[^$]+\$|`[^`]+`", " ", prose, flags=re.S)
        prose = re.sub(r"\]\([^)]*\)|\b(eq\.|sec\.|section|Fig\.|Table) [\d.]+", " ", prose)
        yield re.findall(r"pictures/(\w+)\.png", section), prose


def unfounded(text):
    """Numbers, 10 or more or with a point, that neither pictures so far nor GIVEN hold."""
    found, known = [], []
    for pictures, prose in sections(text):
        known += [abs(x) for name in pictures for x in NUMBERS[name].values()]
        for shown in re.findall(r"(?<![\w.,])-?\d+(?:\.\d+)?(?:e-?\d+)?(?!\w|\.\d|,\d)", prose):
            small = re.fullmatch(r"\d", shown)
            digits = len(shown.partition("e")[0].partition(".")[2])
            form = f".{digits}e" if "e" in shown else f".{digits}f"
            rounded = [float(format(x, form)) for x in known]
            if not small and shown not in GIVEN and float(shown) not in rounded:
                found.append(shown)
    return found


def test_every_quoted_line_stands_in_the_file_it_names():
    assert wrong_quotes(TEXT) == []
    broken = TEXT.replace("S = shrink(K - L + Z, tau)", "S = shrink(K + L + Z, tau)", 1)
    assert [name for name, _ in wrong_quotes(broken)] == ["# attention.py"]


def test_every_picture_shown_is_drawn_by_a_cell_of_its_name():
    assert sorted(re.findall(r"pictures/(\w+)\.png\)", TEXT)) == sorted(NAMES)


def test_the_claims_are_the_same_words_in_the_readme_the_talk_and_here():
    talk = (ROOT / "lecture/slides.md").read_text().partition("## What was found\n")[2]
    claims = re.findall(r"^- (.+)$", talk, re.M)
    assert len(claims) == 5
    for text in (TEXT, (ROOT / "README.md").read_text()):
        assert [claim for claim in claims if claim not in " ".join(text.split())] == []


def test_every_number_that_comes_from_a_run_is_in_numbers_json():
    assert unfounded(TEXT) == []
    stated = re.search(r"passes 1e8 at step (\d+)", TEXT)
    assert "18" in unfounded(TEXT.replace(stated[0], "passes 1e8 at step 18"))


def test_each_edit_names_a_passage_that_its_file_holds_once():
    assert list(edits.edits()) == list(map(str, range(1, 11)))
    for n, (file, old, new) in edits.edits().items():
        assert (ROOT / file).read_text().count(old) == 1 and old != new, (n, file, old)


def test_an_edit_is_made_in_a_copy_and_gives_what_its_row_says():
    before = (ROOT / "attention.py").read_text()
    rows = {n: list(map(float, shown)) for *shown, n in MEASURED.findall(TEXT)}
    assert len(rows) == 10                                  # two networks as they are, eight edits
    assert list(edits.measure("6").values()) == pytest.approx(rows["6"], abs=0.05)
    assert f"{edits.measure('9')['rpc 8']:.1f} %" in TEXT
    assert (ROOT / "attention.py").read_text() == before


def names_in(table):
    """(referred to from outside, made inside) of a symtable and the functions in it."""
    used = {s.get_name() for s in table.get_symbols() if s.is_referenced() and s.is_global()}
    made = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()}
    return used.union(*(names_in(inner)[0] for inner in table.get_children())), made


def test_each_cell_stands_alone_after_the_first():
    """It uses names that it or the first cell makes."""
    (_, first), *others = [names_in(symtable.symtable("# " + cell, "", "exec")) for cell in CELLS]
    assert len(others) == len(NAMES)
    for (used, made), name in zip(others, NAMES):
        assert used <= first | made | set(dir(builtins)), name


def draw(out, *flags):
    """The numbers of pictures that the command draws into a folder."""
    command = [sys.executable, "-m", "lecture.walkthrough", *flags, "--out_dir", out]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "MPLBACKEND": "Agg"})
    return json.loads((out / "numbers.json").read_text())


def test_cells_draw_the_pictures_and_the_numbers_that_the_text_has(tmp_path):
    found = draw(tmp_path)
    assert sorted(found) == sorted(NAMES) == sorted(NUMBERS)
    for name in NAMES:
        assert found[name] == pytest.approx(NUMBERS[name], rel=0.02, abs=1e-6), name
        folders = (tmp_path, ROOT / "lecture/pictures")
        new, old = (np.array(Image.open(folder / f"{name}.png").convert("RGB"), float)
                    for folder in folders)
        assert np.abs(new - old).mean() < 0.5, name         # another font moves edges of letters
        new, old = ((folder / f"{name}.svg").read_text() for folder in folders)
        words = r"<!-- (.*) -->"                            # what letters, drawn as paths, say
        assert re.findall(words, new) == re.findall(words, old) != [], name
        assert '<svg fill="currentColor"' in new and "#000000" not in new   # the page's own colour


def test_a_picture_of_ones_own_is_drawn_alone(tmp_path):
    found = draw(tmp_path, "gram", "--image", "lecture/pictures/scene.png")
    assert list(found) == ["gram"] and found["gram"] != pytest.approx(NUMBERS["gram"], rel=0.01)
