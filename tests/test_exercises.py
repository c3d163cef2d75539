"""lecture/exercises/__main__.py: each hole, a right and a wrong solution get the line that helps; nothing ends in a traceback."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import lecture.exercises.__main__ as exercises

ROOT = Path(__file__).parent.parent
RIGHT = {
    1: ["x.sign() * (x.abs() - tau).clamp(min=0)"],
    2: ["H / (4 * k.abs().mean((2, 3), keepdim=True))", "lambd * mu"],
    3: ["shrink(k - L + Z)", "k - S - Z", "softmax_attention(K2, K2, v)", "k - S - L + Z"],
    4: ["x + alpha * eps * grad.sign()", "x.clamp(clean - eps, clean + eps).clamp(0, 1)"],
    5: ["K - K.mean(0) - K.mean(1, keepdim=True) + K.mean()"],
}
WRONG = {        # number: (hole, line, what the answer names)
    1: (0, "x.sign() * (x.abs() - tau)", "S, entry ("),
    2: (0, "1 / (4 * k.abs().mean((2, 3), keepdim=True))", "mu, entry (0, 0, 0, 0): "),
    3: (1, "k - S + Z", "step 2, K2, entry ("),
    4: (1, "x.clamp(0, 1)", "x, entry ("),
    5: (0, "K - K.mean()", "K~, entry ("),
}


def fill(folder, number, lines):
    """The given file with these lines in its holes."""
    name = exercises.EXERCISES[number][0]
    text = (ROOT / "lecture/exercises" / name).read_text()
    assert len(re.findall(r"(?<!\.)\.\.\.(?!\.)", text)) == len(lines)
    for line in lines:
        text = re.sub(r"(?<!\.)\.\.\.(?!\.)", lambda _: line, text, count=1)
    (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("number", RIGHT)
def test_the_given_file_a_right_and_a_wrong_solution(number, tmp_path):
    text, right = exercises.judge(number, ROOT / "lecture/exercises")
    assert not right and "is still a hole: put a line in place of ..." in text
    text, right = exercises.judge(number, fill(tmp_path, number, RIGHT[number]))
    assert right and "right: within 1e-07 of " in text and "20 random inputs" in text, text
    hole, line, named = WRONG[number]
    lines = [line if i == hole else own for i, own in enumerate(RIGHT[number])]
    text, right = exercises.judge(number, fill(tmp_path, number, lines))
    assert not right and named in text and re.search(r": -?[\d.e-]+, expected -?[\d.e-]+$", text), text


@pytest.mark.parametrize("line, named", [
    ("return x +", "line 11: invalid syntax"), ("return x[:1]", "S has shape (1, 5), expected (4, 5)"),
    ("return nothing", "line 11: NameError: name 'nothing' is not defined"), ("return 1.0", "S is a float"),
    ("return x.view(3, 7)", "line 11: RuntimeError: shape '[3, 7]'"), ("return x / 0", "S, entry (0, 0): "),
    ("raise ValueError('mine')", "line 11: mine")])
def test_a_file_that_cannot_run_gets_one_line(line, named, tmp_path):
    name = exercises.EXERCISES[1][0]
    given = (ROOT / "lecture/exercises" / name).read_text().splitlines()
    assert given[10].strip().startswith("return ...")
    (tmp_path / name).write_text("\n".join([*given[:10], "    " + line]) + "\n")
    text, right = exercises.judge(1, tmp_path)
    assert not right and named in text and "\n" not in text, text


def test_the_command_ends_for_a_file_that_never_returns_and_names_a_missing_one(tmp_path, monkeypatch):
    fill(tmp_path, 1, ["[0 for _ in iter(int, 1)]"])
    code = ("import sys, lecture.exercises.__main__ as exercises; exercises.SECONDS = 1; "
            f"sys.argv = ['lecture/exercises/__main__.py', '1', '--folder', {str(tmp_path)!r}]; exercises.main()")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stdout == "1: no answer after 1 seconds: does a loop never end?\n"
    assert not done.stderr
    monkeypatch.setattr(sys, "argv", ["lecture/exercises/__main__.py", "2", "--folder", str(tmp_path)])
    with pytest.raises(FileNotFoundError, match="no 2_mu_and_tau.py in"):
        exercises.main()
