"""lecture/exercises: holes, right, wrong and half right answers get the line that helps."""

import re
from pathlib import Path

import pytest
import torch

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
MISTAKES = {        # (number, hole): {a usual mistake: how what is said of it begins}
    (1, 0): {"U": "|u_d|^2", "U / sigma": "divide by the root", "U * sigma.sqrt()": "divide, do"},
    (1, 1): {"a * g": "divide by g", "a": "g is missing",
             "a / g - (a / g).mean(0)": "the mean is of a, not"},
    (2, 0): {"g * v": "the mean is missing", "g * (v - v.mean(0))": "the mean is of g v",
             "v / g - (v / g).mean(0)": "Theorem 1 divides by g"},
    (2, 1): {"torch.cosine_similarity(a, a, dim=0)": "this is the cosine of a and a",
             "(a * (G @ a)).sum(0) / a.square().sum(0)": "the Rayleigh quotient"},
    (3, 0): {"shrink(k - L - Z)": "Z is added", "shrink(k)": "what the last step left over",
             "shrink(k - L)": "Z is missing"},
    (3, 1): {"k - S + Z": "plus Z is the reading `admm`", "k - S": "Z is missing",
             "k - Z": "S is missing", "k + S - Z": "S is added"},
    (3, 2): {"softmax_attention(k, K2, v)": "the queries are K2",
             "softmax_attention(k, k, v)": "these are the keys without PAP",
             "softmax_attention(K2, K2, k)": "the values are v"},
    (3, 3): {"k - S - L": "the Z so far is missing", "Z - (k - S - L)": "the sign: what is missing",
             "Z; Z += k - L - S": "Z += writes into one tensor"},
    (5, 0): {"x - alpha * grad.sign()": "minus the gradient", "x + alpha * grad": "only the sign",
             "x + eps * alpha * grad.sign()": "alpha is the step in pixel units",
             "x + eps * grad.sign()": "a step is alpha, not eps"},
    (5, 1): {"x.clamp(clean - eps, clean + eps)": "the result leaves [0, 1]",
             "x.clamp(0, 1)": "the result goes further than eps", "x": "no projection"},
    (6, 0): {"G - G.mean(0)": "centred on one side only", "G - G.mean()": "this takes out one mean",
             "G - G.mean(1, keepdim=True)": "centred on one side only, the other",
             "G - G.mean(0) - G.mean(1, keepdim=True)": "the mean of all entries has to be added"},
    (7, 0): {"x.sign() * (x.abs() - tau)": "nothing stops entries",
             "x.clamp(-tau, tau)": "this is what shrinkage takes away",
             "x * (x.abs() > tau)": "large entries have to move towards 0",
             "(x.abs() - tau).clamp(min=0)": "the sign is lost", "torch.zeros_like(x)": ""},
    (8, 0): {"1 / (4 * k.abs().mean((2, 3), keepdim=True))": "this has x = D",
             "H / k.abs().mean((2, 3), keepdim=True)": "the 4 is missing",
             "H * k.abs().mean((2, 3), keepdim=True) / 4": "m is in the numerator",
             "H / (4 * k.abs().sum((2, 3), keepdim=True))": "m is a mean of |k|, not a sum"},
    (8, 1): {"lambd / mu": "lambda / mu is the reading `paper`", "mu / lambd": "mu / lambda",
             "lambd * mu * (1 + 1e-3)": ""},
}


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


@pytest.mark.parametrize("number, hole", MISTAKES)
def test_every_usual_mistake_is_found_and_named(number, hole, tmp_path):
    for line, hint in MISTAKES[number, hole].items():
        lines = [line if i == hole else own for i, own in enumerate(RIGHT[number])]
        text, right = exercises.judge(number, fill(tmp_path, number, lines))
        assert not right and ", entry (" in text and ", expected " in text
        *_, said = text.split("\n   ")
        assert said.startswith(hint or ("there ", "S, ")), text         # no hint at random


def test_every_hint_is_one_of_those_mistakes(tmp_path):
    known = {number: [hint for (n, _), of in MISTAKES.items() if n == number for hint in of.values()
                      if hint] for number in RIGHT}
    for number, (_, name, check, _) in exercises.EXERCISES.items():
        if check:
            own = exercises.runpy.run_path(fill(tmp_path, number, RIGHT[number])
                                           / exercises.EXERCISES[number][0])[name]
            hints = {hint for *_, of in check(own, lambda *n: torch.randn(n).double())
                     for hint in of}
            assert [hint for hint in hints if not hint.startswith(tuple(known[number]))] == []


def test_the_first_departure_has_its_step_and_what_went_in(tmp_path):
    text, right = exercises.judge(3, fill(tmp_path, 3, ["shrink(k)", *RIGHT[3][1:]]))
    assert re.match(r"not yet: step 2, S, entry \(0, \d, \d, \d\): (\S+), expected (?!\1\n)\S+\n"
                    r"   there k = \S+, L = \S+, Z = \S+, tau = \S+\n", text), text


def test_a_solution_that_is_right_once_only_is_wrong(tmp_path):
    once = (RIGHT[7][0] + " if not vars(torch).setdefault('seen', [])"
            " and not torch.seen.append(1) else x")
    assert not exercises.judge(7, fill(tmp_path, 7, [once]))[1]


@pytest.mark.parametrize("line, named", [
    ("x +", "line 11"), ("nothing", "line 11, in shrink"),
    ("1.0", "S has shape (), expected (4, 5)"), ("x * float('nan')", "S, entry (0, 0): nan")])
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
