"""referee/constancy.py: forced values, what their losses say by the rules that were fixed."""

import json

import numpy as np
import pytest

from referee import constancy


def losses(**of):
    return {arm: dict(enumerate(values)) for arm, values in of.items()}


def test_the_rules_of_constancy(capsys):
    noise = np.array([0.0, 0.01, -0.01, 0.005])
    apart = dict(own=1.6 + noise, hashed=1.75 + noise[::-1], image=1.7 + noise, other=1.7 + noise,
                 x=1.71 + noise[::-1], random=1.58 + noise, mean=1.55 + noise)
    constancy.report(losses(**apart))
    shown = capsys.readouterr().out
    assert "axes help: yes" in shown and "constancy helps: yes" in shown
    constancy.report(losses(**apart | dict(other=1.62 + noise, random=1.76 + noise[::-1],
                                           mean=1.6 + noise)))
    shown = capsys.readouterr().out
    assert "axes help: not shown" in shown and "constancy helps: not shown" in shown


def test_a_difference_is_of_the_seeds_that_both_have_and_plain_belongs_to_every_family(tmp_path):
    rows = [dict(arm=arm, seed=seed, loss=seed + len(arm))
            for arm in ("plain", "span-own", "polar-x") for seed in (0, 2)]
    rows += [dict(arm="plain", seed=7, loss=0)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = constancy.families(tmp_path / "rows.jsonl")
    assert {family: set(of) for family, of in found.items()} == dict(
        span={"plain", "own"}, polar={"plain", "x"})
    assert constancy.gaps(found["span"], "own", "plain").tolist() == [3, 3]


def test_the_effect_of_constancy_is_the_mean_of_what_it_does_to_both_kinds_of_axes():
    found = constancy.families(constancy.ROWS)["span"]
    pairs = [constancy.gaps(found, *pair) for pair in (("mean", "own"), ("random", "hashed"))]
    assert constancy.constancy(found) == pytest.approx(np.mean(pairs, 0))
