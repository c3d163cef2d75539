"""referee/studies/constants.py, control.py and constancy.py: what is chosen, what an arm changes, the rules."""

import json

import numpy as np
import pytest
import torch

from data.batches import Split
from robust import corruptions
from robust.results import pack
from referee.studies import constancy, constants, control, decider
from test_decider import run


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


def test_the_arms_of_a_test_are_the_pilots_the_winners_or_those_that_are_named(tmp_path, monkeypatch):
    for setting in constants.GRID + [("paper", 1, n) for n in (2, 3, 6)]:
        for seed in (0, 1):
            scored(tmp_path, setting, seed, *((90, 90) if setting == ("paper", 1, 4) else (80, 50)))
    trained = []
    monkeypatch.setattr(constants, "train", lambda folder, *flags: trained.append((folder.name, flags[1:-4])))
    monkeypatch.setattr(constants, "call", lambda script, *flags: trained.append(list(flags[1:3])))
    for flags, arms in (([], ["symmetric", "rpc4-l1", "released-4-n2", "paper-0.1-n4"]),
                        (["--chosen"], ["symmetric", "rpc4-l1", "paper-1-n4"]),
                        (["--arms", "symmetric", "paper-0.05-n6"], ["symmetric", "paper-0.05-n6"])):
        monkeypatch.setattr("sys.argv", ["x", "test", "--out_dir", str(tmp_path), "--seeds", "7", *flags])
        trained.clear()
        constants.main()
        *runs, evaluated = trained
        assert [name for name, _ in runs] == [f"{arm}_s7" for arm in arms]
        assert evaluated == [tmp_path / name for name, _ in runs[:2]]
    assert runs[1][1] == ("rpc", "--form", "paper", "--lambd", 0.05, "--n_iter", 6)


def test_a_control_differs_from_its_twin_in_adversarial_training_alone(tmp_path, monkeypatch):
    commands = []
    for study in (control, constants):
        monkeypatch.setattr(study, "call", lambda *command: commands.append(list(map(str, command))))
    control.run(tmp_path, list(control.ARMS), [2])
    training, evaluation = ({c[-1 if c[0] == "train_cls.py" else 2].split("/")[-1]: c for c in commands
                             if c[0] == script} for script in ("train_cls.py", "eval_robust.py"))
    assert list(training) == list(evaluation) == [f"{arm}_s2" for arm in control.ARMS]
    defence = ["--adv_eps", "2/255", "--adv_steps", "3"]
    for arm in ("symmetric", "rpc4-l1"):
        twin, own = training[f"{arm}_s2"][:-1], training[f"{arm}-adv_s2"][:-1]
        where = own.index("--adv_eps")
        assert own[where:where + 4] == defence and own[:where] + own[where + 4:] == twin
        assert evaluation[f"{arm}_s2"][5:] == evaluation[f"{arm}-adv_s2"][5:]        # the same images


def test_the_control_compares_each_arm_with_its_own_baseline_and_draws_every_budget(tmp_path, capsys):
    rows, images = [], 1000
    for arm, rise in (("symmetric", 0), ("rpc4-l1", 0), ("symmetric-adv", 300), ("rpc4-l1-adv", 200)):
        for seed in range(4 if arm == "symmetric" else 3):                 # seed 3: alone, so in no table
            right = torch.arange(images) < (500 + rise + seed if seed < 3 else 0)
            about = dict(checkpoint=f"out/{arm}_s{seed}", images=images, right=pack(right), data="shapes",
                         model=arm, kind=arm, weights=f"{arm}{seed}", conditions={}, top1=50 + rise / 10,
                         model_config={}, recipe="", task="classification", data_dir=None, imagenet1k=False)
            rows += [about | dict(measure="clean", setting={})]
            rows += [about | dict(measure="pgd", setting=dict(eps=b / 255, steps=20)) for b in control.BUDGETS]
            rows += [about | dict(measure="corruptions", setting=dict(type=name)) for name in corruptions.NAMES]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    control.table([tmp_path / "rows.jsonl"], tmp_path / "budgets.png")
    shown = capsys.readouterr().out
    first, second, third = shown.split("The primary measures:")[1:]
    assert "+30.0" in first and "-10.0" in second and "+0.0" in third
    assert "symmetric, symmetric-adv, seeds 0, 1, 2." in shown and "50.1 ± 0.1 (3)" in first
    assert "difference to symmetric in" in first and "difference to symmetric-adv in" in second
    assert "| pgd 0.5/255 " in shown and (tmp_path / "budgets.png").stat().st_size > 5000


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
