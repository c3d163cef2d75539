"""lecture/WALKTHROUGH.md says what the code says and what came out: lines, pictures, numbers."""

import ast
import builtins
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lecture import edits
from referee import claims

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "lecture/WALKTHROUGH.md").read_text()
CODE = (ROOT / "lecture/walkthrough.py").read_text()
NUMBERS = json.loads((ROOT / "lecture/pictures/numbers.json").read_text())
CELLS = CODE.split("\n# %% ")[1:]
# Numbers in the text that no picture gives: sizes, settings, chance, published ones ...
GIVEN = {"2024", "32", "64", "65", "40", "16", "300", "128", "95", "15", "10", "0.5", "0.6931",
         "648.46", "500", "255", "1e8", "90", "100", "12", "24", "1.8", "2025", "2011",
         "0.25", "60"}
# ... and those of the referee's pages.
GIVEN |= {number for page, _, expression in claims.read_claims() if "WALKTHROUGH" in page
          for number in re.findall(r"-?\d[\d.]*", claims.value(expression))}
GIVEN |= {"2.3", "0.9", "13", "0.27", "0.36", "0.06", "0.61", "0.55", "0.65", "0.32", "0.98", "0.82", "6.3",
          "80"}


def names_of_cells():
    return [name for name in re.findall(r'^if wanted\("(\w+)"\)', CODE, re.M)]


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
        prose = re.sub(r"```.*?```|\$\$.*?\$\$|\$[^$]+\$|`[^`]+`", " ", section, flags=re.S)
        prose = re.sub(r"\]\([^)]*\)|\b(eq\.|sec\.|section|Fig\.|Table) [\d.]+", " ", prose)
        yield re.findall(r"pictures/(\w+)\.png", section), prose


def unfounded(text, numbers=NUMBERS):
    """Numbers, 10 or more or with a point, that neither pictures so far, edits nor GIVEN hold."""
    found, known = [], []
    for pictures, prose in sections(text):
        known += [abs(x) for name in pictures or ["edits"] for x in numbers[name].values()]
        for shown in re.findall(r"(?<![\w.,])-?\d+(?:\.\d+)?(?:e-?\d+)?(?!\w|\.\d|,\d)", prose):
            small = re.fullmatch(r"\d", shown)
            digits = len(shown.partition("e")[0].partition(".")[2])
            form = f".{digits}e" if "e" in shown else f".{digits}f"
            rounded = [float(format(x, form)) for x in known]
            if not small and shown not in GIVEN and float(shown) not in rounded:
                found.append(shown)
    return found


def test_every_quoted_line_stands_in_the_file_it_names():
    assert TEXT.count("```python") > 10
    assert wrong_quotes(TEXT) == []


def test_a_quoted_line_that_the_file_does_not_hold_is_found():
    broken = TEXT.replace("S = shrink(K - L + Z, tau)", "S = shrink(K + L + Z, tau)", 1)
    assert [name for name, _ in wrong_quotes(broken)] == ["# attention.py"]


def test_every_picture_shown_is_drawn_by_a_cell_of_its_name():
    shown = set(re.findall(r"pictures/(\w+)\.png\)", TEXT))
    assert len(shown) >= 10 and shown == set(names_of_cells())


def test_the_claims_are_the_same_words_in_the_readme_the_talk_and_here():
    talk = (ROOT / "lecture/slides.md").read_text().partition("## What was found\n")[2]
    claims = re.findall(r"^- (.+)$", talk, re.M)
    assert len(claims) == 5
    for text in (TEXT, (ROOT / "README.md").read_text()):
        assert [claim for claim in claims if claim not in " ".join(text.split())] == []


def test_every_number_that_comes_from_a_run_is_in_numbers_json():
    assert unfounded(TEXT) == []


def test_a_number_that_no_run_gave_is_found():
    stated = re.search(r"passes 1e8 at step (\d+)", TEXT)
    broken = TEXT.replace(stated[0], "passes 1e8 at step 18")
    assert "18" in unfounded(broken)


def test_each_edit_names_a_passage_that_its_file_holds_once():
    assert [n for n, *_ in edits.edits()] == list(map(str, range(1, 11)))
    for n, file, old, new in edits.edits():
        assert (ROOT / file).read_text().count(old) == 1 and old != new, (n, file, old)


def test_an_edit_is_made_in_a_copy_and_measured_there(monkeypatch):
    seen = []
    monkeypatch.setattr(edits, "accuracies", lambda copy, attn: seen.append(
        (attn, (copy / "attention.py").read_text())))
    before = (ROOT / "attention.py").read_text()
    for name in ("1", "softmax", "6"):
        edits.measure(name)
    assert [attn for attn, _ in seen] == ["rpc", "softmax", "softmax"]
    assert seen[1][1] == before == (ROOT / "attention.py").read_text()
    assert "range(1)" in seen[0][1] and "range(n_iter)" not in seen[0][1]


def test_the_table_of_edits_shows_what_came_out():
    found = NUMBERS["edits"]
    row = r"^\| .*\| ([\d.]+) \| ([\d.]+) \| `python -m lecture.edits (\w+)` \|$"
    rows = re.findall(row, TEXT, re.M)
    assert len(rows) == 10
    for *shown, n in rows:
        assert [f"{found[f'{n} {name}']:.1f}" for name in ("clean", "attacked")] == shown, n


def test_each_cell_stands_alone_after_the_first():
    """It uses names that it or the first cell defines."""
    def names(tree, kind):
        return {node.id for node in ast.walk(tree)
                if isinstance(node, ast.Name) and isinstance(node.ctx, kind)}

    def bound(tree):
        found = names(tree, ast.Store)
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.arg)):
                found.add(node.name if isinstance(node, ast.FunctionDef) else node.arg)
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                found |= {a.asname or a.name for a in node.names}
        return found

    first, *others = [ast.parse("# " + cell) for cell in CELLS]
    assert len(others) == len(names_of_cells())
    for cell, name in zip(others, names_of_cells()):
        assert names(cell, ast.Load) <= bound(first) | bound(cell) | set(dir(builtins)), name


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """The folder, and the numbers, of some pictures drawn with an image of one's own."""
    out, names = tmp_path_factory.mktemp("drawn"), "projection gram values pcp pap hero".split()
    command = [sys.executable, "-m", "lecture.walkthrough", *names,
               "--image", "lecture/pictures/scene.png", "--out_dir", out]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "MPLBACKEND": "Agg"})
    return out, json.loads((out / "numbers.json").read_text())


def test_cells_draw_what_the_text_says(drawn):
    out, found = drawn
    for form in ("png", "svg"):
        assert sorted(found) == sorted(path.stem for path in out.glob(f"*.{form}"))
    for name in ("projection", "values", "pcp", "pap", "hero"):     # no image of one's own
        assert found[name] == pytest.approx(NUMBERS[name], rel=0.01, abs=1e-6), name
    assert found["gram"] != pytest.approx(NUMBERS["gram"], rel=0.01)    # of the image alone


def test_a_vector_picture_takes_the_text_colour_of_its_page(drawn):
    text = (drawn[0] / "gram.svg").read_text()
    assert '<svg fill="currentColor"' in text and "#000000" not in text
