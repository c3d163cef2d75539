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


def test_contrasts_are_tested_together():
    g = torch.Generator().manual_seed(0)
    found = {}
    for arm in ("rpc4-l1", "rpc2-all"):
        for kind in ("clean", *perfect_s.KINDS):
            for condition in perfect_s.CONTRAST_CONDITIONS:
                shift = 30 if condition == perfect_s.PERFECT and kind == "white" else 0
                right = {seed: (100 * torch.rand(40, generator=g) + shift).numpy()
                         for seed in range(3)}
                found[arm, kind, condition] = right
    tested = perfect_s.contrasts(found)
    assert len(tested) == 20                        # 16 tests, and 4 differences on clean images
    d, p = tested["rpc4-l1", "white", perfect_s.PERFECT, perfect_s.EMPTY]
    gaps = [found["rpc4-l1", "white", perfect_s.PERFECT][s].mean()
            - found["rpc4-l1", "white", perfect_s.EMPTY][s].mean() for s in range(3)]
    assert d.mean == pytest.approx(sum(gaps) / 3) and d.p <= p <= 16 * d.p
    assert tested["rpc4-l1", "clean", perfect_s.PERFECT, perfect_s.EMPTY][1] != p
    assert "| rpc2-all, own S elsewhere minus as trained" in perfect_s.contrast_tables(found)


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


def test_stored_differences_are_paired_by_seed():
    found = perfect_s.read_rows()
    d = perfect_s.gap(found, ("rpc4-l1", "noise", perfect_s.LEFT_OUT),
                      ("rpc4-l1", "noise", "as trained"))
    seeds = sorted(found["rpc4-l1", "noise", "as trained"])
    gaps = [(found["rpc4-l1", "noise", perfect_s.LEFT_OUT][s]
             - found["rpc4-l1", "noise", "as trained"][s]).mean() for s in seeds]
    assert d.n == len(seeds) and d.mean == pytest.approx(sum(gaps) / len(gaps))
    assert len(perfect_s.adjusted(found)) <= 20


def test_table_subtracts_empty_S_from_perfect_S():
    found = perfect_s.read_rows()
    row = next(line for line in perfect_s.empty_table(found, "rpc2-all").splitlines()
               if line.startswith(f"| {perfect_s.PERFECT} "))
    cells = [cell.split()[0] for cell in row.strip("| ").split("|")[1:]]
    for kind, cell in zip(("clean", *perfect_s.KINDS), cells, strict=True):
        perfect, empty = (found["rpc2-all", kind, condition]
                          for condition in (perfect_s.PERFECT, perfect_s.EMPTY))
        gaps = [(perfect[seed] - empty[seed]).mean() for seed in empty]
        assert cell == f"{sum(gaps) / len(gaps):+.1f}"
