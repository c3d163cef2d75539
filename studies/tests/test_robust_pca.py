"""Test the arms, the measures and the tables of studies.robust_pca."""

from pathlib import Path

import numpy as np
import pytest
import torch

import common
from attention import symmetric_attention
from studies import robust_pca as study
from studies.rpca_layer import robust_pca


@pytest.fixture
def keys():
    torch.manual_seed(0)
    return torch.randn(2, 2, 65, 32)


@pytest.fixture
def layer():
    """A stand-in for SelfAttention: evaluation, two heads, the settings of rpca-4."""
    class Layer:
        num_heads = 2
        training = False
        pap = dict(n_iter=4, lambd=1.0)
    return Layer()


def attended_keys(monkeypatch, attend, k, layer):
    """Return the keys that an arm passes to symmetric attention."""
    seen = []
    monkeypatch.setattr(study, "symmetric_attention", lambda keys, v: seen.append(keys))
    attend(k, k, k, layer)
    return seen[0]


def test_shrunk_keys_are_as_long_as_cleaned_keys(monkeypatch, keys, layer):
    shrunk = attended_keys(monkeypatch, study.attend_shrunk, keys, layer)
    cleaned = keys - robust_pca(keys, 4)
    torch.testing.assert_close(study.head_size(shrunk), study.head_size(cleaned))
    angle = torch.cosine_similarity(shrunk.flatten(2), keys.flatten(2), dim=2)
    torch.testing.assert_close(angle, torch.ones(2, 2))             # only the length differs


def test_moved_s_belongs_to_another_patch(monkeypatch, keys, layer):
    moved = attended_keys(monkeypatch, study.attend_moved, keys, layer)
    S = robust_pca(keys, 4)
    removed = keys - moved
    torch.testing.assert_close(removed[:, :, 0], S[:, :, 0])        # the class token
    torch.testing.assert_close(removed[:, :, 33], S[:, :, 1])       # 64 patches: half is 32
    torch.testing.assert_close(removed[:, :, 1], S[:, :, 33])


def test_temperature_starts_as_symmetric_attention(keys, layer):
    module = study.Temperature(layer)
    out = module(keys, keys, keys, layer)
    torch.testing.assert_close(out, symmetric_attention(keys, keys))
    with torch.no_grad():
        module.log_factor.fill_(np.log(4))                          # scores times 4
    out = module(keys, keys, keys, layer)
    torch.testing.assert_close(out, symmetric_attention(2 * keys, keys))


def test_left_out_patches_get_less_attention(keys, layer):
    first = study.LeftOutFirst(layer)
    values = torch.eye(65).expand(2, 2, 65, 65)                     # the output is the weights
    weights = first(keys, keys, values, layer)
    score = study.LeftOut.score
    assert score.shape == (2, 1, 1, 65)
    assert (score[..., 0] == 0).all()                               # the class token
    torch.testing.assert_close(score[..., 1:].mean(-1), torch.ones(2, 1, 1))
    with torch.no_grad():
        first.strength.fill_(50.0)
    weights_of_strong = first(keys, keys, values, layer)
    worst = score.argmax(-1)[:, 0, 0]
    for image in range(2):
        column = (image, slice(None), slice(None), worst[image])
        assert weights[column].mean() > 1e-3
        assert weights_of_strong[column].mean() < 1e-6


def test_training_stops_gradients_through_s(keys, layer):
    layer.training = True
    k = keys.clone().requires_grad_()
    S = study.sparse_part(k, layer)
    assert not S.requires_grad
    layer.training = False
    assert study.sparse_part(k, layer).requires_grad


@pytest.mark.parametrize("arm", study.ARMS)
def test_each_arm_trains(arm):
    net = study.build(arm).train()
    images = torch.rand(2, 3, 32, 32)
    net(images).square().sum().backward()
    for name, parameter in net.named_parameters():
        if "strength" in name or "log_factor" in name:
            assert parameter.grad.abs().sum() > 0, name


@pytest.fixture
def small(monkeypatch):
    """Measure few images, so that a test needs seconds."""
    sizes = dict(CLEAN=40, IMAGES=20, ATTACKED=6, SQUARED=3)
    for name, size in sizes.items():
        monkeypatch.setattr(study, name, size)
    monkeypatch.setattr(study, "NAMES", study.NAMES[:2])


def test_a_row_has_every_measure(tmp_path, small):
    root = Path(__file__).parents[2]
    folder = tmp_path / "symmetric_s70"
    folder.mkdir()
    (folder / "last.pt").write_bytes((root / "weights/shapes_symmetric.pt").read_bytes())
    row = study.measure(folder)
    path = tmp_path / "rows.jsonl"
    common.append_row(path, row)
    found = study.read_rows(path)
    assert set(study.PRIMARY) <= found.keys()
    assert len(found["clean"]["symmetric"][70]) == 40
    assert len(found["square"]["symmetric"][70]) == 3
    worst = found["pgd, worst"]["symmetric"][70]
    assert (worst <= found["pgd, true gradient"]["symmetric"][70]).all()
    assert 0.9 < row["auc"]["noise"] <= 1
