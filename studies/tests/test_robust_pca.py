"""Test studies/robust_pca.py (arms, measures, tables) and rpca_layer.py (the layer)."""

from pathlib import Path

import numpy as np
import pytest
import torch

import common
from attention import every_pap, symmetric_attention
from kpca import pcp
from robust import adaptive
from robust.attacks import cross_entropy, input_gradient
from studies import robust_pca as study
from studies.rpca_layer import attend_rpca, robust_pca, rpca_attention, shrink_singular_values
from test_attacks import with_large_keys
from test_attention import close, layer as attention_layer, tokens


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


# --- studies/rpca_layer.py: robust PCA in the layer -----------------------------------------------

def corrupted_keys():
    """Return keys (1, 2, 12, 5) of two directions and a few large entries, and values."""
    random = torch.Generator().manual_seed(0)
    rows, columns, v = (torch.randn(1, 2, *shape, generator=random, dtype=torch.float64)
                        for shape in ((12, 2), (2, 5), (12, 5)))
    k = rows @ columns
    k[..., 3, 1] += 4
    return k, v


@pytest.mark.parametrize("n_iter", (1, 4))
def test_robust_pca_equals_principal_component_pursuit(n_iter):
    k, _ = corrupted_keys()
    steps = []
    S = robust_pca(k, n_iter, trace=steps)
    for head in range(2):
        centred = k[0, head] - k[0, head].mean(0)
        L, expected = pcp(centred, tol=0, max_iter=n_iter)
        assert close(S[0, head], expected) and close(steps[-1]["L"][0, head], L)
    assert len(steps) == n_iter and 0 < (S != 0).double().mean() < 1
    assert close(robust_pca(k.float(), n_iter).double(), S, atol=1e-5)


def test_singular_values_are_shrunk_as_by_an_svd():
    X, tau = torch.randn(2, 3, 9, 5, dtype=torch.float64), torch.full((2, 3, 1, 1), 2.0).double()
    U, s, Vt = torch.linalg.svd(X, full_matrices=False)
    expected = (U * (s - 2).clamp_min(0)[..., None, :]) @ Vt
    assert (s < 2).any() and (s > 2).any()
    assert close(shrink_singular_values(X, tau), expected)


def test_gradients_of_robust_pca_are_true():
    k, v = (x.requires_grad_() for x in corrupted_keys())
    assert torch.autograd.gradcheck(lambda k, v: rpca_attention(k, v, 3), (k, v))
    basis, _ = torch.linalg.qr(torch.randn(8, 4, dtype=torch.float64))
    X = (basis * torch.tensor([3.0, 3.0, 3.0, 1.0])).requires_grad_()   # three equal values
    tau = torch.full((1, 1), 2.0, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(shrink_singular_values, (X, tau))
    loss = shrink_singular_values(X, tau).square().sum()
    first, = torch.autograd.grad(loss, X, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
    zeros = torch.zeros(6, 3, requires_grad=True)
    shrink_singular_values(zeros, torch.ones(1, 1)).sum().backward()
    assert (zeros.grad == 0).all()
    tiny = torch.zeros(6, 3, requires_grad=True)                    # the denominator underflows
    shrink_singular_values(tiny, torch.full((1, 1), 1e-9)).sum().backward()
    assert (tiny.grad == 0).all()


def test_rpca_layer_trains_with_constant_s():
    m, x = attention_layer("rpca"), 3 * tokens()
    q, k, v = m.project(x)
    y = m.train().proj(attend_rpca(q, k, v, m).transpose(1, 2).flatten(2))
    true = torch.autograd.grad(m.eval()(x).sum(), m.qkv.weight)[0]
    with every_pap(m, constant_s=True):
        constant = torch.autograd.grad(m(x).sum(), m.qkv.weight)[0]
    assert close(torch.autograd.grad(y.sum(), m.qkv.weight)[0], constant)
    assert not torch.allclose(true, constant)
    assert len(m.trace(x)) == 4 and m.pap["lambd"] == 1.0


def test_rpca_has_its_own_surrogates():
    model, images, labels = with_large_keys("rpca")

    def gradient(model, images, labels):
        return input_gradient(cross_entropy, model, images, labels)[2]

    (constant,), (no_s, _) = adaptive.find_surrogates(model, images)
    assert torch.equal(constant(images), model(images))
    with every_pap(model, constant_s=True):
        expected = gradient(model, images, labels)
    assert torch.equal(gradient(constant, images, labels), expected)
    assert not torch.allclose(expected, gradient(model, images, labels), rtol=0.1)
    assert gradient(no_s, images, labels).isfinite().all()
    assert constant(images).shape == (20, 10)
