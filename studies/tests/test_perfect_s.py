"""Test studies/perfect_s.py: its conditions, corrupted training images and differences."""

import pytest
import torch

from attention import SelfAttention, layer_inputs
from studies import perfect_s
from studies.patches import corrupt_patches
from test_where_is_s import small

RPC = dict(attn="rpc", rpc_layers=(0, 1), pap=dict(n_iter=3, lambd=1.0))


def under(model, condition, images, hit, out=None):
    with torch.no_grad(), perfect_s.conditioned(model, condition, hit, out):
        return model(images)


@pytest.mark.parametrize("config", [RPC, dict(attn="symmetric")])
def test_patches_left_out_do_not_matter(config):
    model, images, _ = small(**config)
    x, hit = corrupt_patches(images, "noise", 2)
    every = [under(model, perfect_s.LEFT_OUT, each, hit, hit) for each in (x, images)]
    torch.testing.assert_close(*every)
    first = [under(model, "left out in layer 0", each, hit, hit) for each in (x, images)]
    assert (first[0] - first[1]).abs().max() > 1e-4
    none = torch.zeros_like(hit)
    torch.testing.assert_close(under(model, perfect_s.LEFT_OUT, x, none, none), model(x))
    layers = [m for m in model.modules() if isinstance(m, SelfAttention)]
    assert not any(layer.learned for layer in layers)             # as before


def test_perfect_S_contains_only_the_corrupted_keys():
    model, images, _ = small(**RPC)
    x, hit = corrupt_patches(images, "noise", 2)
    steps = []
    for layer in (m for m in model.modules() if isinstance(m, SelfAttention)):
        layer.pap = {**layer.pap, "trace": steps}
    under(model, perfect_s.PERFECT, x, hit)
    assert len(steps) == 6                                          # 2 layers, 3 steps each
    for step in steps:
        S = step["S"].abs().amax((1, 3))                                                # (B, N)
        assert torch.equal(S[:, 1:] > 0, hit) and (S[:, 0] == 0).all()
    attn, inputs = layer_inputs(model, x)[0]
    k = attn.project(inputs)[1]
    torch.testing.assert_close(steps[0]["S"][:, :, 1:].mT[..., hit[0]][0],
                               k[:, :, 1:].mT[..., hit[0]][0])
    none = torch.zeros_like(hit)
    torch.testing.assert_close(under(model, perfect_s.PERFECT, x, none),
                               under(model, "S empty", x, none))


def test_own_S_elsewhere_differs_at_corrupted_patches_only():
    model, images, _ = small(**RPC)
    x, hit = corrupt_patches(images, "noise", 2)
    layers = [m for m in model.modules() if isinstance(m, SelfAttention)]
    steps = {}
    for condition in ("as trained", perfect_s.OWN, perfect_s.PERFECT):
        steps[condition] = []
        for layer in layers:
            layer.pap = {**layer.pap, "trace": steps[condition]}
        under(model, condition, x, hit)
    own, mixed, perfect = (parts[0]["S"][:, :, 1:] for parts in steps.values())  # step 1, layer 0
    where = hit[:, None, :, None]
    torch.testing.assert_close(mixed, torch.where(where, perfect, own))
    assert own.abs().sum() > 0 and not torch.equal(mixed, own)
    none = torch.zeros_like(hit)
    torch.testing.assert_close(under(model, perfect_s.OWN, x, none), model(x))


def test_control_leaves_out_as_many_intact_patches():
    model, images, _ = small(**RPC)
    x, hit = corrupt_patches(images, "noise", 2)
    control = perfect_s.left_out(model, "control: intact patches left out", x, hit)
    assert torch.equal(control.sum(1), hit.sum(1)) and not (control & hit).any()


def test_half_of_the_training_images_are_corrupted():
    images = torch.full((2000, 3, 32, 32), 0.5)
    x, hit = perfect_s.corrupt_half(images, torch.arange(2000), seed=0)
    assert set(hit.sum(1).tolist()) == {0, 6}
    assert hit.any(1).float().mean() == pytest.approx(0.5, abs=0.05)
    changed = torch.nn.functional.max_pool2d((x != images).any(1).float(), 4).flatten(1) > 0
    assert torch.equal(changed, hit)
    white, black = ((x == value).flatten(1).any(1).float().mean() for value in (1, 0))
    assert white == pytest.approx(1 / 6, abs=0.03) and black == pytest.approx(1 / 6, abs=0.03)
