"""lecture/exercises: holes, right, wrong and half right answers get the line that helps."""

import re
from pathlib import Path

import pytest

import lecture.exercises.__main__ as exercises
from runs import call

ROOT = Path(__file__).parent.parent
RIGHT = {
    1: ["x.sign() * (x.abs() - tau).clamp(min=0)"],
    2: ["H / (4 * k.abs().mean((2, 3), keepdim=True))", "lambd * mu"],
    3: ["shrink(k - L + Z)", "k - S - Z", "softmax_attention(K2, K2, v)", "k - S - L + Z"],
    4: ["x + alpha * grad.sign()", "x.clamp(clean - eps, clean + eps).clamp(0, 1)"],
    5: ["G - G.mean(0) - G.mean(1, keepdim=True) + G.mean()"],
    6: ["U / sigma.sqrt()", "(a - a.mean(0)) / g"],
}
MISTAKES = [        # number, hole, a usual mistake, where it shows, what is said of it
    (1, 0, "x.sign() * (x.abs() - tau)", "S, entry (", "nothing stops entries"),
    (1, 0, "torch.zeros_like(x)", "S, entry (", None),
    (2, 0, "1 / (4 * k.abs().mean((2, 3), keepdim=True))", "mu, entry (0, 0, 0, 0): ", "a head's width"),
    (2, 1, "lambd / mu", "tau, entry (0, 0, 0, 0): ", "`released` has lambda times mu"),
    (2, 1, "lambd * mu * (1 + 1e-3)", "tau, entry (", None),
    (3, 0, "shrink(k)", "step 2, S, entry (", "left over is missing"),
    (3, 1, "k - S + Z", "step 2, K2, entry (", "reading `admm`"),
    (3, 2, "softmax_attention(k, K2, v)", "step 1, L, entry (", "the queries are K2"),
    (3, 3, "k - S - L", "step 2, Z, entry (", "it adds up"),
    (4, 0, "x - alpha * grad.sign()", "x, entry (", "minus the gradient"),
    (4, 1, "x.clamp(0, 1)", "x, entry (", "further than eps from `clean`"),
    (4, 1, "x", "x, entry (", "no projection"),
    (5, 0, "G - G.mean(0)", "G~, entry (", "one side only"),
    (5, 0, "G - G.mean()", "G~, entry (", "rows and columns have theirs"),
    (6, 0, "U", "a, entry (", "divide by its root"), (6, 1, "a * g", "v, entry (", "divide by g"),
]


def fill(folder, number, lines):
    """The given file with these lines in its holes."""
    name = exercises.EXERCISES[number][0]
    text = (ROOT / "lecture/exercises" / name).read_text()
    for line in lines:
        text = re.sub(r"(?<= )\.\.\.(?=\s)", lambda _: line, text, count=1)
    (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("number", RIGHT)
def test_the_given_file_has_holes_and_a_right_solution_is_right(number, tmp_path):
    text, right = exercises.judge(number)
    assert not right and "is still a hole" in text
    text, right = exercises.judge(number, fill(tmp_path, number, RIGHT[number]))
    assert right, text


@pytest.mark.parametrize("number, hole, line, where, hint", MISTAKES)
def test_a_wrong_line_is_found_in_its_line_and_a_usual_mistake_named(number, hole, line, where, hint, tmp_path):
    lines = [line if i == hole else own for i, own in enumerate(RIGHT[number])]
    text, right = exercises.judge(number, fill(tmp_path, number, lines))
    assert not right and where in text and (hint or "") in text, text
    assert hint or len(text.splitlines()) <= 2, text                        # no hint at random
    assert re.search(r"\n   there \w+ = -?[\d.]+", text) or where.startswith("step 1, L")   # what went in


def test_a_solution_that_is_right_once_only_is_wrong(tmp_path):
    once = RIGHT[1][0] + " if not vars(torch).setdefault('seen', []) and not torch.seen.append(1) else x"
    assert not exercises.judge(1, fill(tmp_path, 1, [once]))[1]


@pytest.mark.parametrize("line, named", [
    ("x +", "line 11"), ("nothing", "line 11, in shrink"), ("1.0", "S has shape (), expected (4, 5)"),
    ("x[:1]", "S has shape (1, 5), expected (4, 5)"), ("x / 0", "S, entry (0, 0): ")])
def test_a_file_that_cannot_run_is_named_with_its_line(line, named, tmp_path):
    text, right = exercises.judge(1, fill(tmp_path, 1, [line]))
    assert not right and text.startswith("not yet") and named in text, text


def test_predictions_are_compared_with_what_is_measured(tmp_path):
    text, right = exercises.judge(7)
    assert not right and "auc_of_S" in text
    text, right = exercises.judge(7, fill(tmp_path, 7, ["0.9", "3", "'rpc'"]))
    said = dict(re.findall(r"(\w+): you said [\w.]+, it is ([\w.]+);", text))
    assert right and float(said["auc_of_S"]) < 0.4 and 1 < float(said["entropy_after_four_steps"]) < 2.9
    assert said["falls_first"] in ("softmax", "symmetric", "rpc")


def test_the_command_lists_what_is_done(tmp_path, monkeypatch, capsys):
    for number in exercises.EXERCISES:
        fill(tmp_path, number, RIGHT[2] if number == 2 else [])
    monkeypatch.setattr(exercises.judge, "__defaults__", (tmp_path,))
    call(exercises.main)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == len(exercises.EXERCISES) and re.search(r"^2: .* done$", said[1]) and re.search(r"^3: .* not yet", said[2])
    with pytest.raises(SystemExit) as e:
        call(exercises.main, "3")
    assert e.value.code and "is still a hole" in capsys.readouterr().out
