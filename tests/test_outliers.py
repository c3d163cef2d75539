"""referee/outliers.py: who finds corrupted patches, who survives them, who meets the rule."""

import math

import numpy as np
import pytest
import torch

import common
from robust.results import unpack
from referee import outliers, robust_attentions
from referee.stats import Difference
from referee.where_is_s import location
from vit import ViT, ViTConfig


KEYS = robust_attentions.USUAL["keys"]


def nano(attn="symmetric", seed=0):
    torch.manual_seed(seed)
    config = ViTConfig(image_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2,
                       num_classes=10, attn=attn)
    return ViT(config).eval()


def test_p_values_are_paired_by_seed_and_need_two():
    runs = {("symmetric", seed): np.array([0.0, 1.0]) for seed in range(3)}
    runs |= {("keys", seed): np.full(2, 0.5 + gap) for seed, gap in enumerate((0.1, 0.2, 0.3))}
    runs["mom", 0] = np.ones(2)
    found = outliers.p_values(runs, ["symmetric", "keys", "mom"])
    t = 0.2 / (0.1 / math.sqrt(3))                          # of 2 degrees of freedom
    assert found == pytest.approx(dict(keys=1 - t / math.sqrt(t ** 2 + 2)))


@pytest.mark.parametrize("gaps, word", [
    (dict(), "yes"),
    ({"clean": -1.0}, "no: below on clean"),
    ({"autoattack 1/255": -1.0}, "no: below on autoattack 1/255"),
    ({"15 corruptions": -1.0}, "no: not above on 15 corruptions"),
    ({"6 patches noise": None}, "undecided: two seeds or more of 6 patches noise"),
])
def test_the_rule_is_met_only_with_every_condition(gaps, word):
    names = outliers.ABOVE + outliers.NOT_BELOW
    means = {name: 1.0 for name in names} | gaps
    compared = {(name, "keys"): Difference(3, mean, mean - 0.5, mean + 0.5, 0, 0.1, 2)
                for name, mean in means.items() if mean is not None}
    corrected = {name: {"keys": 0.01} for name in names if means[name] is not None}
    assert outliers.verdict("keys", compared, corrected) == word
    few = {(name.replace("1/255", "1/255, 50 images"), arm): of
           for (name, arm), of in compared.items()}
    assert outliers.verdict("keys", few, corrected) == word.replace("1/255", "1/255, 50 images")
    unsure = {name: {"keys": 0.06} for name in corrected}
    assert outliers.verdict("keys", compared, unsure) != "yes"


def test_scores_are_those_of_layer_0():
    images = torch.rand(3, 3, 16, 16)
    scores = outliers.token_scores(nano(), images)
    assert set(scores) == {"|k|", "distance"} and scores["|k|"].shape == (3, 16)

    model = nano(robust_attentions.USUAL["keys-rows"])
    own = outliers.token_scores(model, images)["own"]
    block = model.blocks[0]
    k = block.attn.project(block.norm1(model.embed(images)))[1]
    _, score = robust_attentions.keys(k, k, lambd=1.0, rows=True)
    assert torch.allclose(own, score.sum(1)[:, 1:]) and own.max() > 0

    model = nano("rpc")
    steps = model.blocks[0].attn.trace(model.blocks[0].norm1(model.embed(images)))
    assert torch.equal(outliers.token_scores(model, images)["own"], location(steps[-1]["S"]))


def test_a_null_is_the_same_score_with_other_weights(tmp_path):
    trained, symmetric, images = nano(KEYS), nano(seed=1), torch.rand(2, 3, 16, 16)
    checkpoint = dict(task="classification", model_config=vars(trained.config), model=trained.state_dict(),
                      args=dict(seed=3))
    folder, with_weights = tmp_path / "keys_s3", nano(KEYS)
    assert set(outliers.null_networks(trained, checkpoint, folder)) == {"own, untrained"}
    common.save(tmp_path / "symmetric_s3/last.pt", dict(model=symmetric.state_dict()))
    found = outliers.null_networks(trained, checkpoint, folder)
    with_weights.load_state_dict(symmetric.state_dict())
    for name, other in (("untrained", nano(KEYS, seed=3)), ("symmetric's weights", with_weights)):
        own = [outliers.token_scores(m, images)["own"] for m in (found[f"own, {name}"], other)]
        assert torch.equal(*own) and own[0].std() > 0


def test_the_study_looks_at_networks_once_and_says_what_is_missing(tmp_path, monkeypatch, capsys):
    study = ["--out_dir", str(tmp_path), "--arms", "symmetric", "keys", "elliptical", "--seeds", "0", "--limit", "6",
             "--measures", "clean", "--num_images", "32", "--batch_size", "16", "--epochs", "1"]
    outliers.main(study)
    shown, rows = capsys.readouterr().out, (tmp_path / "patches.jsonl").read_text()
    assert (tmp_path / "outliers.png").stat().st_size > 10_000
    assert "undecided: two seeds or more of 15 corruptions, 6 patches noise" in shown
    assert "| 16 patches white | own      " in shown and len(rows.splitlines()) == 3
    row, keys, other = common.read_log(tmp_path / "patches.jsonl")
    assert set(keys["auc"]["6 patches noise"]) == set(outliers.SCORES)
    assert 0 < keys["scored"] < 1 and row["scored"] == other["scored"] == 0
    for unscored in (row, other):                           # elliptical: no scores, other weights
        assert set(unscored["auc"]["6 patches noise"]) == {"|k|", "distance"}
    right = unpack(row["right"]["6 patches noise"], 6).double().mean()
    assert f"{100 * right:.1f} (1)" in shown
    monkeypatch.setattr(outliers.differences, "draw", lambda *_, **how: None)
    outliers.main([*study, "--no-train"])
    assert (tmp_path / "patches.jsonl").read_text() == rows
