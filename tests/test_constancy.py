"""referee/constancy.py: forced values are their equations; what axes depend on; the rules."""

import json

import numpy as np
import pytest
import torch

import kpca
from attention import SelfAttention
from common import InputError
from data.batches import Split
from referee import constancy

N, D = 9, 4
ARMS = [f"span-{basis}" for basis in constancy.ARMS]


def keys(batch=3, seed=0):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(2, batch, 2, N, D, generator=random, dtype=torch.float64)


def parts(k):
    """E and g of theorem 1."""
    E = kpca.kernel(k, k)
    return E, E.sum(-1, keepdim=True)


def span(k, v, B):
    V0, M = constancy.orthonormal_values(*parts(k), B, v)
    return V0 @ M


def test_theoretical_values_in_any_gauge_are_left_as_they_are():
    q, k = keys()
    axes = kpca.kernel_pca(k)
    turn = torch.linalg.qr(keys(seed=1)[0, ..., :D, :]).Q
    v = kpca.theoretical_values(axes, D) @ turn
    found = kpca.attend(q, k, span(k, v, constancy.key_axes(*parts(k), D)))
    expected = kpca.kernel_projections(q, k, axes, D) @ turn
    assert (found - expected).abs().max() < 1e-10 * expected.abs().max()


def bases(k):
    x = keys(seed=2)[0].transpose(1, 2).flatten(2)                          # (B, N, C)
    own = constancy.key_axes(*parts(k), 3)
    return [own, own.roll(1, 1), constancy.input_axes(x, 3), constancy.random_axes(2, N, 3, 0)]


def test_on_every_basis_values_are_orthonormal_and_the_projection_is_the_one_that_is_written():
    v, k = keys()
    E, g = parts(k)
    K = kpca.centre(E / (g * g.mT))
    for B in bases(k):
        assert B.sum(-2).abs().max() < 1e-12                                # no constant component
        V0, M = constancy.orthonormal_values(E, g, B, v)
        assert (V0.mT @ E @ V0 - torch.eye(B.shape[-1])).abs().max() < 1e-10
        assert (V0.mT @ E @ v - M).abs().max() < 1e-10
        once = span(k, v, B)
        printed = B @ torch.linalg.inv(B.mT @ K @ B) @ B.mT @ (E / g) @ v / g
        assert (once - printed).abs().max() < 1e-10 and (span(k, once,
                                                              B) - once).abs().max() < 1e-10
        assert (once - v).abs().max() > 0.1


def test_values_depend_on_a_basis_through_its_span_only():
    v, k = keys()
    mix = keys(seed=3)[0, ..., :D, :]
    B = constancy.random_axes(2, N, D, 0)
    found, expected = span(k, v, B @ mix), span(k, v, B)
    assert (found - expected).abs().max() < 1e-9 * expected.abs().max()
    assert (span(k, v, constancy.random_axes(2, N, D, 1)) - expected).abs().max() > 0.1


def test_gradients_agree_with_finite_differences():
    v, k = keys(batch=1)
    B = constancy.random_axes(2, N, D, 0)
    k.requires_grad_()
    v.requires_grad_()
    assert torch.autograd.gradcheck(lambda k, v: span(k, v, B), (k, v))


def test_the_power_step_changes_no_value_but_brings_a_gradient():
    _, k = keys()
    k.requires_grad_()
    E, g = parts(k)
    moving, fixed = (constancy.key_axes(E, g, 3, power) for power in (True, False))
    assert (moving - fixed).abs().max() < 1e-10
    assert moving.requires_grad and not fixed.requires_grad


@pytest.mark.parametrize("arm", ARMS)
def test_tokens_that_hardly_differ_and_long_keys_keep_every_arm_finite(arm):
    module = constancy.ForcedAttention(SelfAttention(64, 8, "symmetric"), arm, 17, 0)
    x = torch.randn(3, 17, 64, generator=torch.Generator().manual_seed(0))
    x[0] = x[0, :1] + 1e-8 * x[0]                           # in float32: all tokens are one
    x[1] *= 5                                               # |k|^2 / sqrt(D) of about 100
    x.requires_grad_()
    module.numbers = torch.arange(3)
    out = module(x)
    out.sum().backward()
    assert out.isfinite().all() and x.grad.isfinite().all() and x.grad[1:].abs().amax((1, 2)).all()


# --- what axes depend on --------------------------------------------------------------------------

def axes_of(arm, k, numbers=None, training=False, module=None):
    """The basis of an arm for keys k (B, 2, N, D)."""
    module = module or constancy.ForcedAttention(SelfAttention(2 * D, 2, "symmetric"), arm, N, 0)
    module.train(training).numbers = numbers
    return module.axes(torch.ones(len(k), N, 2 * D), *parts(k))


def test_hashed_axes_belong_to_the_number_of_an_image_wherever_it_stands_in_whatever_batch():
    k, numbers = keys(4)[0], torch.tensor([5, 6, 7, 8])
    whole = axes_of("span-hashed", k, numbers)
    assert torch.allclose(axes_of("span-hashed", k[2:], numbers[2:]), whole[2:], atol=1e-10)
    assert torch.allclose(axes_of("span-hashed", k, numbers.flip(0)), whole.flip(0), atol=1e-10)
    other = constancy.ForcedAttention(SelfAttention(2 * D, 2, "symmetric"), "span-hashed", N, 1)
    assert (axes_of("", k, numbers, module=other) - whole).abs().max() > 0.1    # layer, or seed
    gaps = (whole[:, None] - whole).abs().amax((2, 3, 4)) + torch.eye(4)  # every image has its own
    assert gaps.min() > 0.1 and (whole[:, 0] - whole[:, 1]).abs().amax((1, 2)).min() > 0.1


def test_mean_axes_follow_the_keys_in_training_and_stay_as_they_are_in_evaluation():
    module = constancy.ForcedAttention(SelfAttention(2 * D, 2, "symmetric"), "span-mean", N, 0)
    batches = [keys(4, seed)[0] for seed in range(3)]
    grams = [kpca.centre(E / g / g.mT).mean(0) for E, g in map(parts, batches)]
    expected = grams[0]
    for k, gram in zip(batches[:2], grams[:2]):
        axes_of("", k, training=True, module=module)
        expected = 0.99 * expected + 0.01 * gram
    assert torch.allclose(module.gram, expected, rtol=1e-8)         # the second batch counts, too
    found = axes_of("", batches[2], module=module)
    assert torch.allclose(module.gram, expected, rtol=1e-8)
    assert torch.allclose(found, constancy.top_axes(expected, 2)[0], atol=1e-6)


def test_random_axes_are_those_of_a_seed_a_layer_and_a_head():
    first, other = (constancy.build("span-random", seed, 10).blocks for seed in (0, 1))
    bases = [*(axis for block in first for axis in block.attn.B), *other[0].attn.B]
    gaps = [(a - b).abs().max() for i, a in enumerate(bases) for b in bases[:i]]
    assert len(bases) == 5 * 8 and min(gaps) > 0.05
    assert torch.equal(constancy.build("span-random", 0, 10).blocks[1].attn.B, first[1].attn.B)


def test_other_and_image_take_the_axes_of_the_head_and_of_the_image_before():
    k = keys(4)[0]
    own = axes_of("span-own", k)
    assert torch.equal(axes_of("span-image", k), own.roll(1, 0))
    assert torch.equal(axes_of("span-other", k), own.roll(1, 1))


def test_arms_of_a_seed_share_their_initial_weights():
    reference = constancy.build("plain", 3, 10).state_dict()
    for arm in ARMS:
        weights = constancy.build(arm, 3, 10).state_dict()
        own = {name for name in weights if name.endswith("gram")}
        assert weights.keys() - own == reference.keys()
        assert all(torch.equal(weights[name], reference[name]) for name in reference)
    other = constancy.build("plain", 4, 10).state_dict()
    assert not torch.equal(other["head.weight"], reference["head.weight"])


# --- training, and what the rows say --------------------------------------------------------------

def tiny(n=20):
    """(training, held-out) images, each of the grey of its number."""
    images = torch.arange(n)[:, None, None, None].expand(n, 3, 32, 32).to(torch.uint8)
    split = Split(images, torch.arange(n) % 10, [str(i) for i in range(10)])
    return split, split


@pytest.fixture
def study(monkeypatch, tmp_path):
    """Call the study, which trains for 8 steps of 4 images: the rows."""
    monkeypatch.setattr(constancy, "load_data", lambda args, device: tiny())
    monkeypatch.setattr(constancy, "BATCH", 4)

    def run(*argv, out=tmp_path / "rows.jsonl"):
        constancy.main(["--data_dir", "nowhere", "--steps", "8", "--out", str(out), *argv])
        return [json.loads(line) for line in out.read_text().splitlines()]
    return run


def test_every_arm_of_a_seed_trains_on_the_same_images_with_their_numbers(study, monkeypatch):
    seen, forward = {}, constancy.run

    def watched(model, images, numbers):
        grey = (255 * images[:, 0, 16, 16]).round().long()
        seen.setdefault(model, []).append((grey.tolist(), numbers.tolist()))
        return forward(model, images, numbers)
    monkeypatch.setattr(constancy, "run", watched)
    rows = study("--seeds", "0", "1", "--arms", "plain", "hashed", "random")
    assert [(row["arm"], row["seed"]) for row in rows] == [
        (arm, seed) for seed in (0, 1) for arm in ("plain", "span-hashed", "span-random")]
    assert len({row["loss"] for row in rows}) == 6
    plain, hashed, _, other, *_ = seen.values()
    assert plain == hashed and plain != other
    *trained, (held_out, numbers) = hashed
    assert len(trained) == 8 and all(grey == [n % 20 for n in of] for grey, of in trained)
    assert held_out == list(range(20)) and not {*numbers} & {n for _, of in trained for n in of}


def test_a_killed_run_goes_on_where_it_stopped(study, monkeypatch, tmp_path):
    trained = []

    def train(arm, seed, args, *splits):
        if len(trained) == 3:
            raise KeyboardInterrupt
        trained.append((arm, seed))
        return dict(top1=50.0, loss=1.0 + seed, images=20)
    monkeypatch.setattr(constancy, "train", train)
    flags = ["--arms", "own", "x", "--seeds", "0", "1"]
    with pytest.raises(KeyboardInterrupt):
        study(*flags)
    with open(tmp_path / "rows.jsonl", "a") as file:
        file.write('{"data": "cifar10", "arm": "span-x')                    # cut while writing
    trained.clear()
    rows = study(*flags)
    assert trained == [("span-x", 1)] and len(rows) == 4
    with pytest.raises(InputError, match="other rows than those of 9 steps of cifar10"):
        study(*flags, "--steps", "9")


def losses(**of):
    return {arm: dict(enumerate(values)) for arm, values in of.items()}


def test_the_rules_of_constancy(capsys):
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


def test_a_difference_is_of_the_seeds_that_both_have_and_plain_belongs_to_every_family(tmp_path):
    rows = [dict(arm=arm, seed=seed, loss=seed + len(arm))
            for arm in ("plain", "span-own", "polar-x") for seed in (0, 2)]
    rows += [dict(arm="plain", seed=7, loss=0)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = constancy.families(tmp_path / "rows.jsonl")
    assert {family: set(of) for family, of in found.items()} == dict(
        span={"plain", "own"}, polar={"plain", "x"})
    assert constancy.gaps(found["span"], "own", "plain").tolist() == [3, 3]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows + rows[:1])))
    with pytest.raises(InputError, match="plain, seed 0 has two rows"):
        constancy.families(tmp_path / "rows.jsonl")


def test_batches_are_shifted_and_mirrored_by_their_position_in_the_run(tmp_path):
    split, recipe = tiny(200)[0], dict(pad=4, smoothing=0.1)
    found = list(constancy.batches(split, recipe, 3, 4))
    assert torch.equal(torch.cat([numbers for *_, numbers in found[:3]]).unique(),
                       torch.cat([numbers for *_, numbers in found[:3]]).sort().values)
    images, targets, numbers = found[3]                                     # the next epoch
    assert images.shape == (64, 3, 32, 32) and targets.sum(1).allclose(torch.ones(64))
    assert torch.equal(targets.argmax(1), numbers % 10)
    middle = images[:, 0, 16, 16] * 255
    assert middle.round().long().tolist() == (numbers % 256).tolist()
