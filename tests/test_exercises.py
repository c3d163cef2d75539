"""lecture/exercises: holes, right, wrong and half right answers get the line that helps."""

import re
from pathlib import Path

import pytest

import lecture.exercises.__main__ as exercises
from runs import call

ROOT = Path(__file__).parent.parent
RIGHT = {
    1: ["U / sigma.sqrt()", "(a - a.mean(0)) / g"],
    2: ["g * v - (g * v).mean(0)", "torch.cosine_similarity(a, G @ a, dim=0)"],
    3: ["shrink(k - L + Z)", "k - S - Z", "softmax_attention(K2, K2, v)", "k - S - L + Z"],
    5: ["x + alpha * grad.sign()", "x.clamp(clean - eps, clean + eps).clamp(0, 1)"],
    6: ["G - G.mean(0) - G.mean(1, keepdim=True) + G.mean()"],
    7: ["x.sign() * (x.abs() - tau).clamp(min=0)"],
    8: ["H / (4 * k.abs().mean((2, 3), keepdim=True))", "lambd * mu"],
}
MISTAKES = [        # number, hole, a usual mistake, where it shows, what is said of it
    (1, 0, "U", "a, entry (", "divide by its root"), (1, 1, "a * g", "v, entry (", "divide by g"),
    (2, 0, "g * v", "a, entry (", "add up to 0"),
    (2, 0, "v / g - (v / g).mean(0)", "a, entry (", "undoing it multiplies"),
    (2, 1, "(a * (G @ a)).sum(0) / a.square().sum(0)", "cosine, entry (", "divide by both lengths"),
    (3, 0, "shrink(k)", "step 2, S, entry (", "left over is missing"),
    (3, 1, "k - S + Z", "step 2, K2, entry (", "reading `admm`"),
    (3, 2, "softmax_attention(k, K2, v)", "step 1, L, entry (", "the queries are K2"),
    (3, 3, "k - S - L", "step 2, Z, entry (", "it adds up"),
    (5, 0, "x - alpha * grad.sign()", "x, entry (", "minus the gradient"),
    (5, 1, "x.clamp(0, 1)", "x, entry (", "further than eps from `clean`"),
    (5, 1, "x", "x, entry (", "no projection"),
    (6, 0, "G - G.mean(0)", "G~, entry (", "one side only"),
    (6, 0, "G - G.mean()", "G~, entry (", "rows and columns have theirs"),
    (7, 0, "x.sign() * (x.abs() - tau)", "S, entry (", "nothing stops entries"),
    (7, 0, "torch.zeros_like(x)", "S, entry (", None),
    (8, 0, "1 / (4 * k.abs().mean((2, 3), keepdim=True))", "mu, entry (0, 0, 0, 0): ",
     "a head's width"),
    (8, 1, "lambd / mu", "tau, entry (0, 0, 0, 0): ", "`released` has lambda times mu"),
    (8, 1, "lambd * mu * (1 + 1e-3)", "tau, entry (", None),
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
def test_a_wrong_line_is_found_and_a_usual_mistake_named(number, hole, line, where, hint, tmp_path):
    lines = [line if i == hole else own for i, own in enumerate(RIGHT[number])]
    text, right = exercises.judge(number, fill(tmp_path, number, lines))
    assert not right and where in text and (hint or "") in text, text
    assert hint or len(text.splitlines()) <= 2, text                        # no hint at random
    if not where.startswith(("step 1, L", "cosine")):
        assert re.search(r"\n   there \w+ = -?[\d.]+", text)                # what went in


def test_a_dual_that_is_added_to_in_place_is_told_that_all_steps_share_it(tmp_path):
    fill(tmp_path, 3, [*RIGHT[3][:3], "Z; Z += k - L - S"])
    text, right = exercises.judge(3, tmp_path)
    assert not right and "step 1, Z, entry (" in text and "Z = Z + ... makes a new one" in text


def test_a_solution_that_is_right_once_only_is_wrong(tmp_path):
    once = (RIGHT[7][0] + " if not vars(torch).setdefault('seen', [])"
            " and not torch.seen.append(1) else x")
    assert not exercises.judge(7, fill(tmp_path, 7, [once]))[1]


@pytest.mark.parametrize("line, named", [
    ("x +", "line 11"), ("nothing", "line 11, in shrink"),
    ("1.0", "S has shape (), expected (4, 5)"),
    ("x[:1]", "S has shape (1, 5), expected (4, 5)"), ("x / 0", "S, entry (0, 0): ")])
def test_a_file_that_cannot_run_is_named_with_its_line(line, named, tmp_path):
    text, right = exercises.judge(7, fill(tmp_path, 7, [line]))
    assert not right and text.startswith("not yet") and named in text, text


def test_predictions_are_compared_with_what_is_measured(tmp_path):
    text, right = exercises.judge(4)
    assert not right and "auc_of_pixels, auc_of_attacked" in text
    text, right = exercises.judge(4, fill(tmp_path, 4, ["0.9", "0.1"]))
    said = dict(re.findall(r"(\w+): you said [\d.]+, it is ([\d.]+)", text))
    assert right and 0.4 < float(said["auc_of_pixels"]) < 0.6 < float(said["auc_of_attacked"]) < 0.9


def test_the_command_lists_what_is_done(tmp_path, monkeypatch, capsys):
    for number in exercises.EXERCISES:
        fill(tmp_path, number, RIGHT[8] if number == 8 else [])
    monkeypatch.setattr(exercises.judge, "__defaults__", (tmp_path,))
    call(exercises.main)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == len(exercises.EXERCISES)
    assert re.search(r"^8: .* done$", said[7]) and re.search(r"^3: .* not yet", said[2])
    with pytest.raises(SystemExit) as e:
        call(exercises.main, "3")
    assert e.value.code and "is still a hole" in capsys.readouterr().out
