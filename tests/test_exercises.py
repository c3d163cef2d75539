"""Test lecture/exercises: holes fail, right answers pass, common mistakes get their hint."""

import re
from pathlib import Path

import pytest

import lecture.exercises.__main__ as exercises
from data.shapes import load_shapes

ROOT = Path(__file__).parent.parent
RIGHT = {
    1: ["a / g - (E / g @ (a / g)).mean(0)"],
    2: ["torch.full_like(k, 1000.0)"],
    3: ["0.5", "2", "80", "1"],
    4: ["0.9", "0.1"],
    5: ["K * (1 - tau / K.norm(dim=-1, keepdim=True)).clamp(min=0)"],
    6: ["G - G.mean(0) - G.mean(1, keepdim=True) + G.mean()"],
    7: ["x.sign() * (x.abs() - tau).clamp(min=0)"],
    8: ["H / (4 * k.abs().mean((2, 3), keepdim=True))", "lambd * mu"],
    9: ["shrink(k - L + Z)", "k - S - Z", "softmax_attention(K2, K2, v)", "k - S - L + Z"],
}
MISTAKES = {        # (number, hole): {a common mistake: a word of its hint}
    (1, 0): {"a / g": "not centred", "a / g - (a / g).mean(0)": "its own weights"},
    (2, 0): {"torch.zeros_like(k)": "|h|^2"},
    (5, 0): {"K * (K.norm(dim=-1, keepdim=True) > tau)": "shorter",
             "K.sign() * (K.abs() - tau).clamp(min=0)": "single entries"},
    (6, 0): {"G - G.mean(0)": "only columns", "G - G.mean(1, keepdim=True)": "only rows"},
    (7, 0): {"x.sign() * (x.abs() - tau)": "must become 0", "(x.abs() - tau).clamp(min=0)": "sign"},
    (8, 0): {"1 / (4 * k.abs().mean((2, 3), keepdim=True))": "width D of a head"},
    (8, 1): {"lambd / mu": "variant `paper`"},
    (9, 0): {"shrink(k - L - Z)": "Z is added", "shrink(k - L)": "Z is missing"},
    (9, 1): {"k - S + Z": "variant `admm`"},
    (9, 3): {"k - S - L": "previous Z", "Z; Z += k - L - S": "Z +="},
}


def fill(folder, number, lines):
    """Write the exercise with these lines in its holes; return the folder."""
    name = exercises.EXERCISES[number][0]
    text = (ROOT / "lecture/exercises" / name).read_text()
    for line in lines:
        text = re.sub(r"(?<== )\.\.\.(?=\s)|(?<=return )\.\.\.(?=\s)", lambda _: line, text,
                      count=1)
    (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("number", sorted(RIGHT.keys() - exercises.MEASURED.keys()))
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


def test_broken_solution_is_named_with_its_line(tmp_path):
    for line, named in (("x +", "line 11"), ("1.0", "expected (4, 5)")):
        text, right = exercises.judge(7, fill(tmp_path, 7, [line]))
        assert not right and named in text, text


def test_predictions_stand_beside_measured_values(tmp_path, monkeypatch):
    text, _ = exercises.judge(3, fill(tmp_path, 3, RIGHT[3]))
    measured = [float(x) for x in re.findall(r"measured ([\d.]+)", text)]
    assert measured == pytest.approx([0.5, 2, 86, 0.9], rel=0.03)
    monkeypatch.setattr(exercises, "load_shapes", lambda split, n: load_shapes(split, n // 8))
    text, _ = exercises.judge(4, fill(tmp_path, 4, RIGHT[4]))
    measured = [float(x) for x in re.findall(r"measured ([\d.]+)", text)]
    assert 0.4 < measured[0] < 0.6 < measured[1] < 0.9
