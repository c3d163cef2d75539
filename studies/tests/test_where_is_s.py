"""Test studies/patches.py, where_is_s.py (location of S) and perfect_s.py (a perfect S)."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from attention import (SelfAttention, every_pap, layer_inputs, penalty, soft_threshold,
                       symmetric_attention)
from kpca import pcp
from studies import perfect_s, where_is_s
from studies.patches import corrupt_patches
from studies.rpca_layer import robust_pca
from vit import ViT, ViTConfig

RPC = dict(attn="rpc", pap=dict(n_iter=3, lambd=1.0))


def small(seed=0, **config):
    """Return a fresh ViT with 17 tokens, images of 8 x 8 pixels, and labels."""
    torch.manual_seed(seed)
    config = ViTConfig(image_size=8, patch_size=2, num_classes=10, embed_dim=16, depth=2,
                       num_heads=2, init="default", **config)
    return ViT(config).eval(), torch.rand(5, 3, 8, 8), torch.arange(5)


@pytest.mark.parametrize("kind", ["noise", "white"])
def test_only_six_patches_change(kind):
    images = 0.2 + 0.6 * torch.rand(30, 3, 32, 32)
    x, hit = corrupt_patches(images, kind, 4)
    changed = F.max_pool2d((x != images).any(1, keepdim=True).float(), 4).flatten(1) > 0
    assert (hit.sum(1) == 6).all() and torch.equal(changed, hit)
    # the places depend neither on the kind nor on the resolution
    assert torch.equal(hit, corrupt_patches(images[:, :, ::2, ::2], "white", 2)[1])
    assert len(hit.unique(dim=0)) == 30 and hit.any(0).sum() > 55
    assert 0 <= x.min() and x.max() <= 1


def test_token_score_is_the_sum_of_S():
    S = torch.zeros(1, 2, 4, 3)  # 2 heads, class token and 3 patches
    S[0, 0, 0] = torch.tensor([9.0, 9, 9])  # the class token is not a patch
    S[0, 0, 1] = torch.tensor([1.0, -2, 0])
    S[0, 1, 1] = torch.tensor([0.0, 0, -4])
    S[0, 1, 3] = torch.tensor([0.5, 0, 0])
    assert where_is_s.location(S).tolist() == [[7.0, 0.0, 0.5]]


@pytest.mark.parametrize("attn", ["rpc", "rpc_asym"])
def test_traced_steps_equal_the_layer(attn):
    model, images, _ = small(**{**RPC, "attn": attn})
    k, steps = where_is_s.first_layer(model, images)
    attn, inputs = layer_inputs(model, images)[0]
    h = attn.proj(steps[-1]["L"].transpose(1, 2).flatten(2))
    assert torch.allclose(h, attn(inputs), atol=1e-6)
    assert len(steps) == 3 and k.shape == steps[0]["S"].shape == (5, 2, 17, 8)
    symmetric, twin = (small(attn=kind, pap=dict(n_iter=2, lambd=0.5))[0]
                       for kind in ("symmetric", "rpc"))
    (_, ours), (_, theirs) = (where_is_s.first_layer(m, images) for m in (symmetric, twin))
    assert len(ours) == 2 and ours[1]["S"].any() and torch.equal(ours[1]["S"], theirs[1]["S"])


def test_measures_equal_a_hand_computation():
    model, images, labels = small(**RPC)
    found = where_is_s.examine(model.requires_grad_(False), images, labels, ["white", "noise"])
    x, hit = corrupt_patches(images, "white", 2)
    assert torch.equal(found["white: accuracy"], model(x).argmax(1) == labels)
    attn, inputs = layer_inputs(model, x)[0]
    keys = attn.project(inputs)[1].transpose(1, 2).flatten(2)[:, 1:]
    far = (keys - keys.mean(1, keepdim=True)).norm(dim=2)
    for name, sizes in (("distance", far), ("|k|", keys.norm(dim=2))):
        share = [(x[h][:, None] > x[~h]).float().mean().item() for h, x in zip(hit, sizes)]
        assert found[f"white: AUC of {name}"].tolist() == pytest.approx(share)
    assert {f"noise: AUC of S, step {i}" for i in (1, 2, 3)} <= found.keys()
    assert "black: AUC of S, step 4" in where_is_s.examine(*small(attn="symmetric"), ["black"])


def random_keys(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def test_robust_parts_equal_pcp_of_each_head():
    k = random_keys(2, 2, 17, 8) + 3                        # robust PCA subtracts the mean key
    parts, rank = where_is_s.robust_parts(k)
    for image in range(2):
        for head in range(2):
            K = k[image, head] - k[image, head].mean(0)
            for steps in (1, 4):
                L, S = pcp(K, max_iter=steps)
                mine = parts[f"robust PCA, step {steps}"][image, head]
                torch.testing.assert_close(mine, S, atol=1e-10, rtol=0)
                if steps == 1:
                    assert rank[image, head] == np.linalg.matrix_rank(L.numpy(), tol=1e-9)


def test_pca_residual_has_the_smallest_singular_values():
    k = random_keys(1, 2, 17, 8) + 3
    centred = k - k.mean(2, keepdim=True)
    sigma = torch.linalg.svdvals(centred)
    rank = torch.tensor([[0, 3]])
    for residual, kept in ((where_is_s.pca_residual(k, 2), (2, 2)),
                           (where_is_s.pca_residual(k, rank), (0, 3))):
        for head, r in enumerate(kept):
            left = torch.linalg.svdvals(residual[0, head])
            torch.testing.assert_close(left[:8 - r], sigma[0, head, r:])
            assert (left[8 - r:] < 1e-9).all()


def save(path, seed, step, **config):
    model, *_ = small(10 * step + seed, **config)
    args = dict(seed=seed, data="shapes", init_from=None, num_images=16)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(dict(task="classification", classes=list("abcdefghij"), args=args, step=step,
                    model=model.state_dict(), model_config=asdict(model.config)), path)


def test_command_prints_means_over_seeds(tmp_path, capsys):
    for seed in (0, 1):
        for step in (5, 9):
            save(tmp_path / f"rpc_s{seed}" / f"epoch_{step}.pt", seed, step, **RPC)
    paths = [str(path) for path in sorted(tmp_path.glob("*/*.pt"))]
    out = tmp_path / "rows.jsonl"
    where_is_s.main(["--kinds", "noise", "white", "--images", "6", "--out", str(out), "--ckpt",
                     *paths])
    shown = capsys.readouterr().out
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["seed"], row["step"]) for row in rows] == [(0, 5), (0, 9), (1, 5), (1, 9)]
    ends = [row["values"]["white: AUC of S, step 2"] for row in rows if row["step"] == 9]
    mean, std = sum(ends) / 2, abs(ends[0] - ends[1]) / 2 ** 0.5
    assert f"{mean:.3f} ± {std:.3f} (2)" in shown


def test_only_line_4_differs_between_the_loops():
    k, v = torch.randn(2, 1, 2, 9, 4, generator=torch.Generator().manual_seed(0))
    lines = where_is_s.LINES
    assert torch.equal(where_is_s.pursuit(k, v, lines["shrinkage"], 4, True), robust_pca(k, 4))
    S = where_is_s.pursuit(k, v, lines["attention"], 1, False)
    mu = penalty(k, mu_dim="head")
    expected = soft_threshold(k - symmetric_attention(k, v), 1 / 3 / mu)        # sqrt(9 tokens)
    torch.testing.assert_close(S, expected)


# --- studies/perfect_s.py -------------------------------------------------------------------------

BOTH = dict(attn="rpc", rpc_layers=(0, 1), pap=dict(n_iter=3, lambd=1.0))


def under(model, condition, images, hit, out=None):
    with torch.no_grad(), perfect_s.conditioned(model, condition, hit, out):
        return model(images)


@pytest.mark.parametrize("config", [BOTH, dict(attn="symmetric")])
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
    model, images, _ = small(**BOTH)
    x, hit = corrupt_patches(images, "noise", 2)
    steps = []
    with every_pap(model, trace=steps):
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
    model, images, _ = small(**BOTH)
    x, hit = corrupt_patches(images, "noise", 2)
    steps = {}
    for condition in ("as trained", perfect_s.OWN, perfect_s.PERFECT):
        steps[condition] = []
        with every_pap(model, trace=steps[condition]):
            under(model, condition, x, hit)
    own, mixed, perfect = (parts[0]["S"][:, :, 1:] for parts in steps.values())  # step 1, layer 0
    where = hit[:, None, :, None]
    torch.testing.assert_close(mixed, torch.where(where, perfect, own))
    assert own.abs().sum() > 0 and not torch.equal(mixed, own)
    none = torch.zeros_like(hit)
    torch.testing.assert_close(under(model, perfect_s.OWN, x, none), model(x))


def test_control_leaves_out_as_many_intact_patches():
    model, images, _ = small(**BOTH)
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
