"""referee/studies/decider.py: forced values are what their equations say; arms differ in nothing else."""

import json
import sys
from argparse import Namespace

import pytest
import torch

import common
import kpca
from attention import SelfAttention
from data.batches import Split
from referee.studies import decider

N, D = 9, 4


def keys(batch=3, seed=0):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(2, batch, 2, N, D, generator=random, dtype=torch.float64)


def parts(k):
    """E and g of theorem 1."""
    E = kpca.kernel(k, k)
    return E, E.sum(-1, keepdim=True)


def span(k, v, B):
    V0, M = decider.orthonormal_values(*parts(k), B, v)
    return V0 @ M


def polar(k, v, B):
    V0, M = decider.orthonormal_values(*parts(k), B, v)
    return V0 @ decider.Polar.apply(M)


@pytest.mark.parametrize("forced", [span, polar])
def test_theoretical_values_in_any_gauge_are_left_as_they_are(forced):
    q, k = keys()
    axes = kpca.kernel_pca(k)
    turn = torch.linalg.qr(keys(seed=1)[0, ..., :D, :]).Q
    v = kpca.theoretical_values(axes, D) @ turn
    found = kpca.attend(q, k, forced(k, v, decider.key_axes(*parts(k), D)))
    expected = kpca.kernel_projections(q, k, axes, D) @ turn
    assert (found - expected).abs().max() < 1e-10 * expected.abs().max()
    V0, _ = decider.orthonormal_values(*parts(k), decider.key_axes(*parts(k), D), k)
    expected = kpca.theoretical_values(axes, D)                             # sign: with their signs
    assert (V0 - expected).abs().max() < 1e-10 * expected.abs().max()


def bases(k):
    x = keys(seed=2)[0].transpose(1, 2).flatten(2)                          # (B, N, C)
    own = decider.key_axes(*parts(k), 3)
    return [own, own.roll(1, 1), decider.input_axes(x, 3), decider.random_axes(2, N, 3, 0)]


def test_on_every_basis_values_are_orthonormal_and_the_projection_is_the_one_that_is_written():
    v, k = keys()
    E, g = parts(k)
    K = kpca.centre(E / (g * g.mT))
    for B in bases(k):
        assert B.sum(-2).abs().max() < 1e-12                                # no constant component
        V0, M = decider.orthonormal_values(E, g, B, v)
        V, unit = polar(k, v[..., :B.shape[-1]], B), torch.eye(B.shape[-1])
        assert (V0.mT @ E @ V0 - unit).abs().max() < 1e-10 and (V.mT @ E @ V - unit).abs().max() < 1e-9
        assert (V0.mT @ E @ v - M).abs().max() < 1e-10
        once = span(k, v, B)
        printed = B @ torch.linalg.inv(B.mT @ K @ B) @ B.mT @ (E / g) @ v / g
        assert (once - printed).abs().max() < 1e-10 and (span(k, once, B) - once).abs().max() < 1e-10
        assert (once - v).abs().max() > 0.1
    M = keys(seed=4)[0, ..., :D, :]
    U, _, Vh = torch.linalg.svd(M)
    assert (decider.Polar.apply(M) - U @ Vh).abs().max() < 1e-10


def test_values_depend_on_a_basis_through_its_span_only():
    v, k = keys()
    mix = keys(seed=3)[0, ..., :D, :]
    B = decider.random_axes(2, N, D, 0)
    for forced in (span, polar):
        found, expected = forced(k, v, B @ mix), forced(k, v, B)
        assert (found - expected).abs().max() < 1e-9 * expected.abs().max()
        assert (forced(k, v, decider.random_axes(2, N, D, 1)) - expected).abs().max() > 0.1


@pytest.mark.parametrize("forced", [span, polar])
def test_gradients_agree_with_finite_differences(forced):
    v, k = keys(batch=1)
    B = decider.random_axes(2, N, D, 0)
    k.requires_grad_()
    v.requires_grad_()
    assert torch.autograd.gradcheck(lambda k, v: forced(k, v, B), (k, v))


def test_the_power_step_changes_no_value_but_brings_a_gradient():
    _, k = keys()
    k.requires_grad_()
    E, g = parts(k)
    moving, fixed = (decider.key_axes(E, g, 3, power) for power in (True, False))
    assert (moving - fixed).abs().max() < 1e-10
    assert moving.requires_grad and not fixed.requires_grad


@pytest.mark.parametrize("arm", [arm for arm in decider.ARMS if "-" in arm or arm == "sign"])
def test_tokens_that_hardly_differ_and_long_keys_keep_every_arm_finite(arm):
    module = decider.ForcedAttention(SelfAttention(64, 8, "symmetric"), arm, 17, 0)
    x = torch.randn(3, 17, 64, generator=torch.Generator().manual_seed(0))
    x[0] = x[0, :1] + 1e-8 * x[0]                           # in float32: all tokens are one
    x[1] *= 5                                               # |k|^2 / sqrt(D) of about 100
    x.requires_grad_()
    out = module(x)
    out.sum().backward()
    assert out.isfinite().all() and x.grad.isfinite().all() and x.grad[1:].abs().amax((1, 2)).all()


def tiny(classes=10, n=20):
    """(training, held-out) images of noise."""
    random = torch.Generator().manual_seed(0)
    images = torch.randint(256, (n, 3, 32, 32), generator=random, dtype=torch.uint8)
    split = Split(images, torch.arange(n) % classes, [str(i) for i in range(classes)])
    return split, split


def run(monkeypatch, out, *argv, study=decider, splits=tiny):
    """The rows of a study that trains for 8 steps of 4 images."""
    argv = ["decider.py", "--data_dir", "nowhere", "--steps", "8", "--out", str(out), *argv]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(decider, "load_data", lambda args, device: splits())
    settings_of = decider.settings_of
    monkeypatch.setattr(decider, "settings_of", lambda *a: Namespace(**vars(settings_of(*a)) | dict(batch_size=4)))
    study.main()
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_arms_of_a_seed_share_their_initial_weights():
    reference = decider.build("plain", 3, 10).state_dict()
    for arm in decider.ARMS:
        weights = decider.build(arm, 3, 10).state_dict()
        gains = {name for name in weights if name.endswith("gain")}
        assert weights.keys() - gains == reference.keys()
        assert all(torch.equal(weights[name], reference[name]) for name in reference)
    other = decider.build("plain", 4, 10).state_dict()
    assert not torch.equal(other["head.weight"], reference["head.weight"])


def test_every_arm_trains_on_the_same_batches(monkeypatch, tmp_path):
    seen, build = {}, decider.build

    def watched(arm, seed, classes):
        model = build(arm, seed, classes)
        model.register_forward_pre_hook(
            lambda module, inputs: seen.setdefault((seed, arm), []).append(inputs[0].sum().item()))
        return model
    monkeypatch.setattr(decider, "build", watched)
    arms = ["rms1", "polar-random", "span-x"]
    rows = run(monkeypatch, tmp_path / "rows.jsonl", "--seeds", "2", "--arms", *arms)
    assert [(row["arm"], row["seed"]) for row in rows] == [(a, s) for s in (0, 1) for a in arms]
    for seed in (0, 1):
        assert all(seen[seed, arm] == seen[seed, "rms1"] for arm in arms)
    assert seen[0, "rms1"] != seen[1, "rms1"]
    assert len({row["loss"] for row in rows}) == len(rows)


def test_a_killed_run_goes_on_where_it_stopped(monkeypatch, tmp_path):
    out, trained = tmp_path / "rows.jsonl", []

    def train(arm, seed, args, *splits):
        if len(trained) == 3:
            raise KeyboardInterrupt
        trained.append((arm, seed))
        return dict(top1=50.0, loss=1.0 + seed, images=20)
    monkeypatch.setattr(decider, "train", train)
    flags = ["--arms", "rms1", "uniform", "--seeds", "2"]
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, out, *flags)
    with open(out, "a") as file:
        file.write('{"data": "cifar10", "arm": "unif')                      # cut while writing
    trained.clear()
    rows = run(monkeypatch, out, *flags)
    assert trained == [("uniform", 1)] and len(rows) == 4
    trained.clear()
    assert run(monkeypatch, out, *flags) == rows and not trained
    with pytest.raises(ValueError, match="other rows than those of 9 steps of cifar10"):
        run(monkeypatch, out, *flags, "--steps", "9")
    notes = tmp_path / "notes.txt"
    notes.write_text("not rows,\nbut dear to somebody\n")
    with pytest.raises(ValueError, match="notes.txt holds other rows"):
        run(monkeypatch, notes, *flags)
    assert notes.read_text().startswith("not rows")


# --- what the rows say ----------------------------------------------------------------------------

def test_a_difference_is_of_the_seeds_that_both_have_and_its_interval_is_that_of_the_t_distribution():
    a, b = {0: 1.1, 1: 1.2, 2: 1.6, 7: 9.0}, {0: 1.0, 1: 1.0, 2: 1.0, 5: 9.0}
    d = decider.paired_t(decider.gaps({"a": a, "b": b}, "a", "b"))
    assert d.n == 3 and d.mean == pytest.approx(0.3)                        # of 0.1, 0.2, 0.6
    assert d.high - d.mean == pytest.approx(4.302653 * 0.2645751 / 3 ** 0.5) == d.mean - d.low


def test_rows_are_reported_and_drawn_in_out_and_not_beside_them(tmp_path, monkeypatch, capsys):
    rows = [dict(arm=arm, seed=seed, loss=1.5 + 0.1 * seed - own, top1=36.0 + seed, cpu_seconds=took, data="cifar10",
                 step=800, images=3000) for arm, own in (("plain", 0), ("span-own", 0.05))
            for seed, took in enumerate([40, 50, 90])]
    path = tmp_path / "results" / "rows.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["decider", "--rows", str(path)])
    decider.main()
    shown = capsys.readouterr().out
    line = next(line for line in shown.splitlines() if "plain" in line)
    assert "| span-own - plain     | -0.050 (-0.050 to -0.050) | 3     |" in shown
    assert [cell.strip() for cell in line.split("|")[1:-1]] == ["plain", "3", "37.0 ± 1.0", "1.600 ± 0.100", "50"]
    assert [p.name for p in path.parent.iterdir()] == ["rows.jsonl"]
    assert (tmp_path / "out/decider/rows.png").exists()


@pytest.mark.parametrize("flags, message", [
    (["--data_dir", "nowhere"], "--data_dir nowhere is not a folder"),
    (["--rows", "nowhere"], "nowhere: expected rows")])
def test_bad_input_is_one_clear_line(monkeypatch, tmp_path, flags, message):
    monkeypatch.setattr(sys, "argv", ["decider.py", "--out", str(tmp_path / "rows.jsonl"), *flags])
    with pytest.raises(SystemExit, match=f"^error: {message}[^\n]*$"):
        common.run(decider.main)
