"""The lecture quotes the code and computes its numbers; exercises judge answers and mistakes."""

import csv
import json
import re

import pytest
import torch

import lecture.exercises.__main__ as exercises
from data.shapes import load_shapes
from fixtures import ROOT
from processes import run_command
from studies import arms

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


# --- exercises ------------------------------------------------------------------------------------

PHI = "(kpca.log_phi2(q, k).max() / 2).exp()"
RIGHT = {
    1: ["a / g - (E / g @ (a / g)).mean(0)"],
    2: [f"torch.full_like(k, {PHI} + 1)"],
    3: ["0.5", "2", "80", "1"],
    4: ["0.4", "0.95", "0.5", "0.6"],
    5: ["K * (1 - tau / K.norm(dim=-1, keepdim=True)).clamp(min=0)"],
    6: ["3", "34"],
    7: ["x.sign() * (x.abs() - tau).clamp(min=0)"],
    8: ["100", "4.17", "90", "3.5"],
    9: ["shrink(k - L + Z)", "k - S - Z", "softmax_attention(K2, K2, v)", "k - S - L + Z"],
    10: ["95", "88", "58", "58", "100"],
    11: ["(b - a).mean()", "t * (b - a).std() / len(a) ** 0.5"],
    12: ["0.9", "0.85", "0.7"],
}
MISTAKES = {        # (number, hole): {a common mistake: words of its message}
    (1, 0): {"a / g": "not centred", "a / g - (a / g).mean(0)": "its own weights",
             "a / g + (E / g @ (a / g)).mean(0)": "sign of the shift"},
    (2, 0): {"torch.zeros_like(k)": "|h|^2", "torch.ones_like(k)": "3 times longer",
             "torch.full_like(k, 1000.0)": "6 times longer",
             "torch.full_like(k, 1e90)": "many times longer",
             "torch.full_like(k, 1e150)": "far too large",
             "torch.full_like(k, torch.inf)": "not finite", "1e9 * q": "expected (6, 4)"},
    (3, 0): {"(...)": "no prediction yet for tau_released", "-1": "from 0 to 100",
             "'half'": "'half', expected a number"},
    (4, 0): {"(...)": "no prediction yet for auc_of_grey_noise", "7": "from 0 to 1",
             "float('nan')": "nan, expected a number"},
    (5, 0): {"K * (K.norm(dim=-1, keepdim=True) > tau)": "shorter",
             "K.sign() * (K.abs() - tau).clamp(min=0)": "single entries",
             "K * (1 - tau / K.norm(dim=-1, keepdim=True))": "backwards"},
    (12, 1): {"(...)": "no prediction yet for auc_of_six_different", "-1": "from 0 to 1",
              "None": "None, expected a number"},
    (6, 0): {"(...)": "no prediction yet for axes_of_black", "0": "from 1 to 64", "True": "True"},
    (7, 0): {"x.sign() * (x.abs() - tau)": "must become 0", "(x.abs() - tau).clamp(min=0)": "sign",
             "x * (x.abs() > tau)": "move towards 0", "x.abs_().sub(tau).clamp(min=0)": "sign"},
    (8, 1): {"(...)": "no prediction yet for entropy_of_lambda_0", "5": "from 0 to 4.174",
             "[4]": "[4], expected a number"},
    (9, 0): {"shrink(k - L - Z)": "Z is added", "shrink(k - L)": "Z is missing",
             "shrink(k)": "L and Z are missing"},
    (9, 1): {"k - S + Z": "variant `admm`"},
    (9, 3): {"k - S - L": "previous Z", "Z; Z += k - L - S": "Z +="},
    (11, 0): {"(a - b).mean()": "not a - b"},
    (11, 1): {"t * (b - a).std()": "root of n", "1.96 * (b - a).std() / 5 ** 0.5": "need t",
              "t * (b - a).std(correction=0) / 5 ** 0.5": "n - 1, not n",
              "t * (a.var() + b.var()).sqrt() / 5 ** 0.5": "these runs are pairs"},
}
PREDICTED = {number for number, exercise in exercises.EXERCISES.items() if exercise.measure}


def fill(folder, number, lines):
    """Write the exercise with these lines in its holes; return the folder."""
    name = exercises.EXERCISES[number].file
    text = (ROOT / "lecture/exercises" / name).read_text(encoding="utf-8")
    for line in lines:
        text = re.sub(r"(?<== )\.\.\.(?=\s)|(?<=return )\.\.\.(?=\s)", lambda _: line, text,
                      count=1)
    (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("number", sorted(RIGHT.keys() - PREDICTED))
def test_hole_fails_and_solution_passes(number, tmp_path):
    assert not exercises.judge(number)[1]
    text, right = exercises.judge(number, fill(tmp_path, number, RIGHT[number]))
    assert right, text


@pytest.mark.parametrize("number, hole", MISTAKES)
def test_common_mistake_gets_its_hint(number, hole, tmp_path):
    for line, hint in MISTAKES[number, hole].items():
        lines = [line if i == hole else own for i, own in enumerate(RIGHT[number])]
        text, right = exercises.judge(number, fill(tmp_path, number, lines))
        assert not right and hint in text.splitlines()[-1], text
    assert sum(map(len, (MISTAKES[n, i] for n, i in MISTAKES if n == number))) >= 3


def test_answer_may_change_its_arguments(tmp_path):
    in_place = {7: "x.sign().mul_(x.abs_().sub_(tau).clamp_(min=0))",
                1: "a.div_(g) - (E / g @ a).mean(0)"}
    for number, line in in_place.items():
        text, right = exercises.judge(number, fill(tmp_path, number, [line]))
        assert right, text


def test_broken_solution_is_named_with_its_line(tmp_path):
    for line, named in (("x +", "line 11"), ("1.0", "expected (4, 5)")):
        text, right = exercises.judge(7, fill(tmp_path, 7, [line]))
        assert not right and named in text, text


def measured(number, folder):
    """Return the message of a solved exercise and its measured numbers."""
    text, right = exercises.judge(number, fill(folder, number, RIGHT[number]))
    assert right, text
    return text, [float(x) for x in re.findall(r"measured ([\d.]+)", text)]


def test_predictions_stand_beside_measured_values(tmp_path, monkeypatch):
    text, numbers = measured(3, tmp_path)
    assert numbers == pytest.approx([0.5, 2, 86, 0.9], rel=0.03)
    assert text.count(": close") == 4
    monkeypatch.setitem(RIGHT, 3, ["2", "2", "8", "1"])
    text, _ = measured(3, tmp_path)
    assert text.count(": far") == text.count(": close") == 2
    assert measured(6, tmp_path)[1] == pytest.approx([3, 34], abs=1)
    assert measured(8, tmp_path)[1] == pytest.approx([100, 4.17, 86.6, 3.53], rel=0.01)


def test_robust_pca_finds_grey_noise_only(tmp_path):
    _, (grey, real_grey, pasted, real_pasted) = measured(4, tmp_path)
    assert grey < 0.5 and real_grey > 0.9
    assert 0.4 < pasted < 0.6 and 0.5 < real_pasted < 0.7


def test_repetition_hides_flat_patches(tmp_path, monkeypatch):
    text, (one, different, equal) = measured(12, tmp_path)
    assert one > different + 0.05 > equal + 0.15
    assert text.count(": close") == 3


def test_no_answer_gives_no_traceback(tmp_path):
    for number in RIGHT:
        text, right = exercises.judge(number, fill(tmp_path, number, ["None"] * len(RIGHT[number])))
        assert not right and "Traceback" not in text and "None" in text, text


def test_more_steps_of_attack_leave_less(tmp_path, monkeypatch):
    monkeypatch.setattr(exercises, "load_shapes", lambda split, n: load_shapes(split, n // 16))
    _, numbers = measured(10, tmp_path)
    assert numbers[:4] == sorted(numbers[:4], reverse=True) and numbers[0] > numbers[3] + 10
    answer = exercises.EXERCISES[10].file
    solved = (tmp_path / answer).read_text(encoding="utf-8").replace("steps=20", "steps=1")
    for old, new, hint in (("publish = 100", "publish = 7", "expected 1, 5, 20 or 100"),
                           ("return pgd(model, images, labels, eps,",
                            "return pgd(model, images, labels, 2 * eps,", "leaves the budget")):
        assert old in solved
        (tmp_path / answer).write_text(solved.replace(old, new), encoding="utf-8")
        text, right = exercises.judge(10, tmp_path)
        assert not right and hint in text, text


def test_pairs_of_runs_come_from_rows(tmp_path):
    answer = fill(tmp_path, 11, RIGHT[11]) / exercises.EXERCISES[11].file
    names = exercises.runpy.run_path(str(answer))
    rows = arms.stored(arms.STUDIES["criterion"])
    shown = []
    for a, b, eps in (("symmetric", "rpc", 2), ("symmetric", "softmax", 4)):
        pair = []
        for arm in (a, b):
            name = "rpc4-l1" if arm == "rpc" else arm
            runs = {row.seed: round(float(row.top1), 1) for row in rows
                    if (row.arm, row.measure) == (name, f"pgd {eps}/255")}
            own = names[f"{arm}_{eps}"]
            assert own == [runs[seed] for seed in range(40, 45)]
            pair.append(torch.tensor(own))
        mean, half = names["paired_interval"](*pair, 2.776)
        shown.append(f"{mean:+.1f} points ({mean - half:+.1f} to {mean + half:+.1f})")
    for text in shown:
        assert text in exercises.EXERCISES[11].why, shown
