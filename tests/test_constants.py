"""studies/constants.py and studies/constancy.py: what is chosen, what an arm changes, the rules."""

import json

import numpy as np
import pytest
import torch

from studies import constancy, constants, decider


def scored(folder, setting, seed, clean, corrupted):
    """A score as `choose` leaves it."""
    path = folder / "choose" / f"{constants.name_of(*setting)}_s{seed}" / "score.json"
    path.parent.mkdir(parents=True)
    row = dict(zip(("form", "lambd", "n_iter"), setting), seed=seed, clean=clean,
               corruptions=corrupted)
    path.write_text(json.dumps(row))


def test_winners_have_the_highest_mean_over_both_seeds_and_bring_other_numbers_of_steps(tmp_path):
    for i, setting in enumerate(constants.GRID):
        for seed in (0, 1):
            lucky = 9 * (seed == 0 and setting == ("released", 16, 4))     # in one seed only
            scored(tmp_path, setting, seed, 80 - i + lucky, 50 + i)
    rows = constants.scores(tmp_path)
    first, last = constants.GRID[0], constants.GRID[-1]
    assert constants.best(rows, constants.GRID) == dict(clean=first, corruptions=last)
    more = constants.tried(rows)[len(constants.GRID):]
    assert more == [(*setting[:2], n) for setting in (first, last) for n in (2, 3, 6)]
    with pytest.raises(ValueError, match="released-0.5-n2 has no score of every seed"):
        constants.best(rows, more)


def images():
    return torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def test_an_arm_changes_the_axes_alone():
    x, numbers = images(), torch.arange(4)
    for arm in ("own", "random", "other", "x"):
        ours, theirs = constancy.network(arm, 3, 10), decider.build(f"span-{arm}", 3, 10)
        assert torch.equal(constancy.run(ours, x, numbers), theirs(x))


def test_hashed_axes_belong_to_the_number_of_an_image_and_mean_axes_to_none():
    x, numbers = images(), torch.tensor([5, 6, 7, 8])
    hashed, mean = (constancy.network(arm, 0, 10).eval() for arm in ("hashed", "mean"))
    with torch.no_grad():
        whole = constancy.run(hashed, x, numbers)
        assert torch.equal(constancy.run(hashed, x[2:], numbers[2:]), whole[2:])
        assert not torch.equal(constancy.run(hashed, x, numbers + 1), whole)
        constancy.run(mean.train(), x, numbers)
        before = mean.blocks[0].attn.gram.clone()
        alone = constancy.run(mean.eval(), x[:1], numbers[:1])
        assert torch.allclose(constancy.run(mean, x, numbers)[:1], alone, atol=1e-5)
    assert before.any() and torch.equal(mean.blocks[0].attn.gram, before)      # frozen


def rows_of(**losses):
    return [dict(arm=arm, seed=s, loss=loss, data="cifar10", step=800, images=10)
            for arm, of in losses.items() for s, loss in enumerate(of)]


def test_the_rules_of_constancy(capsys):
    noise = np.array([0.0, 0.01, -0.01, 0.005])
    apart = dict(own=1.6 + noise, hashed=1.75 + noise[::-1], image=1.7 + noise, other=1.7 + noise,
                 x=1.71 + noise[::-1], random=1.58 + noise, mean=1.55 + noise)
    constancy.report(rows_of(**apart))
    shown = capsys.readouterr().out
    assert "axes help: yes" in shown and "constancy helps: yes" in shown
    constancy.report(rows_of(**apart | dict(other=1.62 + noise, random=1.76 + noise[::-1],
                                            mean=1.6 + noise)))
    shown = capsys.readouterr().out
    assert "axes help: not shown" in shown and "constancy helps: not shown" in shown
    with pytest.raises(ValueError, match="own, seed 0 has two rows"):
        constancy.report(rows_of(own=[1.0]) * 2)
