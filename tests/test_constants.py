"""referee/studies/constants.py and constancy.py: what is chosen, what an arm changes, the rules."""

import json

import numpy as np
import pytest
import torch

from common import InputError
from data.batches import Split
from data.shapes import load_shapes
from robust import corruptions
from referee.studies import arms, constancy, constants, decider
from test_decider import run


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
        (how[1], more["index"].tolist())) or corrupt(images, *how, **more))
    given, train = [], arms.train
    monkeypatch.setattr(arms, "train", lambda folder, flags: given.append(flags) or train(
        folder, flags, ["--num_images", 24, "--batch_size", 8]))
    constants.choose(tmp_path, ["paper-1-n4"], [3])
    assert given == [dict(attn="rpc", form="paper", lambd=1, n_iter=4, epochs=4, holdout=8, seed=3)]
    assert len(asked) == 15 * 3 and {severity for severity, _ in asked} == {1, 3, 5}
    assert all(index == [0, 1, 2, 3] for _, index in asked)             # an image, a random number
    (arm, of), = constants.scores(tmp_path.glob("choose/*/score.json")).items()
    assert arm == "paper-1-n4" and 0 <= of[3]["corruptions"] <= 100 and of[3]["images"] == [8, 4]


def images():
    return torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def test_hashed_axes_belong_to_the_number_of_an_image_and_mean_axes_to_none():
    x, numbers = images(), torch.tensor([5, 6, 7, 8])
    hashed, mean = (decider.build(f"span-{arm}", 0, 10).eval() for arm in ("hashed", "mean"))
    with torch.no_grad():
        whole = constancy.run(hashed, x, numbers)
        other = constancy.run(decider.build("span-image", 0, 10).eval(), x, numbers)
        own = decider.build("span-own", 0, 10).eval()
        assert not torch.allclose(other, own(x), atol=1e-5)
        twins = x[:1].expand(2, -1, -1, -1)                                     # the image before is the same
        assert torch.allclose(decider.build("span-image", 0, 10).eval()(twins), own(twins), atol=1e-6)
        assert torch.equal(constancy.run(hashed, x[2:], numbers[2:]), whole[2:])
        assert not torch.equal(constancy.run(hashed, x, numbers + 1), whole)
        constancy.run(mean.train(), x, numbers)
        before = mean.blocks[0].attn.gram.clone()
        alone = constancy.run(mean.eval(), x[:1], numbers[:1])
        assert torch.allclose(constancy.run(mean, x, numbers)[:1], alone, atol=1e-5)
    assert before.any() and torch.equal(mean.blocks[0].attn.gram, before)      # frozen


def losses(**of):
    return {arm: dict(enumerate(values)) for arm, values in of.items()}


def test_the_rules_of_constancy(capsys, tmp_path):
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
    row = dict(arm="own", seed=0, loss=1.0, top1=50.0, cpu_seconds=1.0, data="cifar10", step=800, images=10)
    for other, words in ((row, "own, seed 0 has two rows"), (row | dict(seed=1, images=9), "rows of several")):
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, (row, other))))
        with pytest.raises(ValueError, match=words):
            decider.read_losses(tmp_path / "rows.jsonl")


def test_an_arm_of_constancy_is_trained_on_the_images_of_its_numbers(monkeypatch, tmp_path):
    few = Split(torch.arange(20)[:, None, None, None].expand(20, 3, 32, 32).to(torch.uint8), torch.arange(20) % 10,
                [str(i) for i in range(10)])
    seen, forward = [], constancy.run
    monkeypatch.setattr(constancy, "run", lambda model, images, numbers: seen.append(
        ((255 * images[:, 0, 16, 16]).round().long(), numbers)) or forward(model, images, numbers))
    row, = run(monkeypatch, tmp_path / "rows.jsonl", "--arms", "hashed", "--seeds", "1", study=constancy,
               splits=lambda: (few, few))
    assert (row["arm"], row["seed"], row["images"]) == ("span-hashed", 1, 20)
    rows = run(monkeypatch, tmp_path / "rows.jsonl", "--arms", "hashed", "--seeds", "1", "--family", "polar",
               study=constancy, splits=lambda: (few, few))
    found = constancy.families({row["arm"]: {row["seed"]: row["loss"]} for row in rows})
    assert found == dict(span=dict(hashed={1: row["loss"]}), polar=dict(hashed={1: rows[1]["loss"]}))
    assert rows[1]["loss"] != row["loss"]
    seen = seen[:9]
    assert len(seen) == 9 and seen[-1][1].tolist() == [constancy.HELD_OUT + i for i in range(20)]
    assert all(torch.equal(image, number % 20) for image, number in seen[:-1])
