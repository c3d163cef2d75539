"""referee/studies/line.py: who lies on the line of robustness against clean loss, and who leaves it."""

import json

import numpy as np
import pytest
import torch

from attention import FORMS
from referee.studies import line
from robust import corruptions
from vit import ViT, ViTConfig


def network(arm, seed, loss, off=0.0):
    noise = np.random.default_rng([seed, len(arm)]).normal(0, 0.5)
    return line.Network(arm, seed, loss, {"pgd 2/255": 40 - 15 * np.log(loss) + off + noise})


def trained():
    epochs = {"symmetric-e4": 0.4, "symmetric-e8": 0.1, "symmetric-e16": 0.03}
    return [network(arm, seed, loss * (1 + seed / 20)) for arm, loss in epochs.items() for seed in range(4)]


def test_an_attention_on_the_line_is_not_told_from_it_and_a_defence_is():
    networks = trained() + [network("slow", seed, 0.3) for seed in range(4)]
    networks += [network("symmetric-adv", seed, 0.1, 20) for seed in range(4)]
    found, p = line.distances(networks, ["pgd 2/255"])
    slow, adv = found["slow", "pgd 2/255"], found["symmetric-adv", "pgd 2/255"]
    assert slow.low < 0 < slow.high and p["slow", "pgd 2/255"] > 0.05
    assert adv.low < 20 < adv.high and p["symmetric-adv", "pgd 2/255"] < 0.01
    r, low, high, bend = line.correlation(trained(), "pgd 2/255")
    assert low < r < high < -0.9 and bend > 0.05


def test_one_network_is_as_far_off_as_one_of_ours_may_lie_by_chance():
    near, far = ([network("timm", 0, 0.2, off)] for off in (0, 8))
    for own, inside in ((near, True), (far, False)):
        d = line.distance(own, trained(), "pgd 2/255")
        assert d.n == 1 and (d.low < 0 < d.high) == inside


def rows(name, loss=None):
    about = dict(checkpoint=name, model_config={})
    yield about | dict(measure="clean", setting={}, top1=90.0) | (dict(loss=loss) if loss else {})
    yield about | dict(measure="pgd", setting=dict(eps=2 / 255), top1=60.0)
    for kind in corruptions.NAMES:
        yield about | dict(measure="corruptions", setting=dict(type=kind), top1=[70.0, 80.0])


def test_networks_are_rows_with_a_clean_loss_their_own_or_that_of_training():
    both = [*rows("mine_s3", 0.25), *rows("other"), *rows("unknown")]
    found = {n.arm: n for n in line.networks_of(both, [dict(run="other", loss=0.5)])}
    assert set(found) == {"mine", "other"}
    assert found["mine"][1:3] == (3, 0.25) and found["other"].loss == 0.5
    assert found["mine"].accuracy == {"clean": 90, "pgd 2/255": 60, "15 corruptions": pytest.approx(75)}


def test_with_lambda_0_layer_0_gives_the_mean_of_its_values():
    model = ViT(ViTConfig(image_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2,
                          num_classes=10, attn="rpc")).eval()
    model.blocks[0].attn.pap = dict(n_iter=4, lambd=0, **FORMS["paper"])
    seen = line.attend(model, torch.rand(4, 3, 16, 16), torch.zeros(4, dtype=torch.long))
    assert seen["entropy"] == pytest.approx(seen["uniform"]) and seen["share"] > 0.99


def test_tables_and_figure_of_the_committed_networks(tmp_path):
    networks = line.stored("cifar10")
    text = line.tables(networks, ("pgd 1/255", "15 corruptions"))
    assert "rpc4-l1" in text and "points when loss halves" in text
    line.draw(networks, ("pgd 1/255", "15 corruptions"), tmp_path / "x.pdf", "CIFAR-10")
    assert (tmp_path / "x.pdf").stat().st_size > 5000
    json.dumps([n._asdict() for n in networks])
