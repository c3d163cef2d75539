"""referee/constants.py: what is chosen, and on which images."""

import pytest
import torch

from common import InputError
from data.batches import hold_out
from data.shapes import load_shapes
from robust import corruptions
from referee import arms, constants


def test_winners_have_the_highest_mean_over_both_seeds_and_bring_other_numbers_of_steps():
    rows = {arm: {seed: dict(clean=80 - i + 9 * (seed == 0 and arm == "released-16-n4"),        # lucky once
                             corruptions=50 + i) for seed in (0, 1)}
            for i, arm in enumerate(constants.GRID)}
    first, last = constants.GRID[0], constants.GRID[-1]
    assert (first, last) == ("released-0.5-n4", "paper-1-n4")
    assert constants.best(rows, constants.GRID) == dict(clean=first, corruptions=last)
    more = constants.tried(rows)[len(constants.GRID):]
    assert more == [f"{arm}-n{n}" for arm in ("released-0.5", "paper-1") for n in (2, 3, 6)]
    with pytest.raises(InputError, match="released-0.5-n2 has no score of every seed"):
        constants.best(rows, more)


def test_choose_trains_without_the_images_it_scores_on(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HELD", 8)
    monkeypatch.setattr(constants, "CORRUPTED", 4)
    monkeypatch.setattr(constants, "load_shapes", lambda split, n, size: load_shapes(split, 24, size))
    asked, corrupt = [], corruptions.corrupt
    monkeypatch.setattr(corruptions, "corrupt", lambda images, *how, **more: asked.append(
        (images, how[1], more["index"].tolist())) or corrupt(images, *how, **more))
    given, train = [], arms.train
    monkeypatch.setattr(arms, "train", lambda folder, flags: given.append(flags) or train(
        folder, flags, ["--num_images", 24, "--batch_size", 8]))
    constants.choose(tmp_path, ["paper-1-n4"], [3])
    assert given == [dict(attn="rpc", form="paper", lambd=1, n_iter=4, epochs=4, holdout=8, seed=3)]
    few = hold_out(load_shapes("train", 24, 32), 8)[1].images[:4]
    assert len(asked) == 15 * 3 and {severity for _, severity, _ in asked} == {1, 3, 5}
    assert all(torch.equal(images, few) for images, *_ in asked)
    assert all(index == [0, 1, 2, 3] for *_, index in asked)            # an image, a random number
    (arm, of), = constants.scores(tmp_path.glob("choose/*/score.json")).items()
    assert arm == "paper-1-n4" and 0 <= of[3]["corruptions"] <= 100 and of[3]["images"] == [8, 4]
