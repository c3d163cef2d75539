"""Test what studies.left_out leaves out, its detectors, and its attack."""

import pytest
import torch

from studies import left_out, probe
from studies.scores import ONE, VARIATION


@pytest.fixture(scope="module")
def model():
    return probe.load_model("weights/shapes_symmetric.pt")[0]


@pytest.fixture(scope="module")
def scenes():
    checkpoint = dict(args=dict(data="shapes"))
    return left_out.load_images(checkpoint, "test", 6, None)


def logits_without(model, images, out):
    with torch.no_grad(), left_out.conditioned(model, left_out.LEFT_OUT, out, out):
        return model(images)


def test_leaving_out_nothing_changes_nothing(model, scenes):
    images, _ = scenes
    nothing = torch.zeros(len(images), 64, dtype=torch.bool)
    torch.testing.assert_close(logits_without(model, images, nothing), model(images),
                               rtol=1e-4, atol=1e-4)


def test_left_out_patches_do_not_matter(model, scenes):
    images, labels = scenes
    noisy, hit = left_out.corrupted(model, images, labels, "noise")
    torch.testing.assert_close(logits_without(model, noisy, hit),
                               logits_without(model, images, hit), rtol=1e-4, atol=1e-4)
    assert (model(noisy) - model(images)).abs().max() > 0.01


def test_paste_changes_only_its_patches(scenes):
    images, _ = scenes
    x, hit = left_out.paste(images, 4)
    where = left_out.patches_to_pixels(hit, 8, 4).expand_as(x)
    assert torch.equal(x[~where], images[~where])
    assert set(hit.sum(1).tolist()) <= {4, 6, 7, 8}             # two blocks, which may overlap
    other = images.roll(len(images) // 2, 0)
    share = (x - images).abs().sum() / (other - images).abs()[where].sum()
    assert 0.3 < share < 0.95                                    # edges are mixtures


def test_windows_agree_with_a_loop():
    score = torch.rand(1, 16)
    grid = score.view(4, 4)
    expected = torch.zeros(4, 4)
    for i in range(3):
        for j in range(3):
            mean = grid[i:i + 2, j:j + 2].mean()
            expected[i:i + 2, j:j + 2] = expected[i:i + 2, j:j + 2].maximum(mean)
    torch.testing.assert_close(left_out.over_windows(score), expected.view(1, 16))


def test_thresholds_mark_the_stated_shares():
    torch.manual_seed(0)
    score = torch.rand(500, 64)
    limits = left_out.thresholds({ONE: score})
    first, second = (limits[ONE, rule, False] for rule in left_out.RULES)
    assert (score > first).double().mean() == pytest.approx(0.01, abs=1e-3)
    assert (score.amax(1) > second).double().mean() == pytest.approx(0.2, abs=0.01)


def test_gradient_reaches_pixels_through_robust_pca(model, scenes):
    images, labels = scenes
    model = model.double()
    try:
        x = images[:1].double().requires_grad_()
        hit = torch.ones(1, 64, dtype=torch.bool)
        at = model, ONE, 0.5

        def value(x):
            return left_out.objective(*at, x, labels[:1], hit, weight=1.0).sum()

        gradient, = torch.autograd.grad(value(x), x)
        torch.manual_seed(0)
        direction = torch.randn_like(x)
        with torch.no_grad():
            h = 1e-6
            slope = (value(x + h * direction) - value(x - h * direction)) / (2 * h)
        torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-3, atol=1e-4)
    finally:
        model.float()


def test_attack_step_stays_in_the_block():
    x = torch.full((1, 3, 8, 8), 0.5, requires_grad=True)
    where = torch.zeros(1, 1, 8, 8, dtype=torch.bool)
    where[..., :4, :4] = True
    moved = left_out.attack_step(-x.sum(), x, where, 0.2)
    assert torch.equal(moved[..., :4, :4], torch.full((1, 3, 4, 4), 0.3))
    assert (moved == 0.5).sum() == 3 * (64 - 16)


def test_survivors_only_become_fewer(model, scenes):
    images, labels = scenes
    found = left_out.survivors(model, VARIATION, 0.3, images, labels, steps=20, weights=(1, 3))
    first, second = found.values()
    assert not (second & ~first).any()
    assert first.sum() < len(images)
