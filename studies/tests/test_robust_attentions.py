"""Robust attentions of others equal their definition or their code, alone and in networks."""

import numpy as np
import pytest
import torch

import common
from attention import ATTENTIONS, LAYER_PATTERNS
from lm import LM, LMConfig
from studies import pro_attention as pro, robust_attentions as study
from studies.robust_attentions import PENALTIES, ROBUST, pro_attention
from vit import ViT, ViTConfig

B, H, N, D = 2, 2, 7, 4


def qkv(scale=1.0):
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, H, N, D, generator=random, dtype=torch.float64) for _ in range(3))
    return q * scale, k * scale, v


def largest_gap(found, slow, *tensors):
    """Return the largest difference between `found` and slow(one head's (N, D) arrays)."""
    gaps = [np.abs(found[b, h].numpy() - slow(*(t[b, h].numpy() for t in tensors))).max()
            for b in range(B) for h in range(H)]
    return max(gaps, key=lambda gap: (gap != gap, gap))                     # NaN if any is NaN


def norm(x):
    return np.linalg.norm(x, axis=-1)


def exponentials(q, k):
    return np.array([[np.exp(x @ y / np.sqrt(D)) for y in k] for x in q])


def attention(q, k):
    """Return softmax(q k^T / sqrt(D)), row by row."""
    return np.array([row / row.sum() for row in exponentials(q, k)])


def slow_weights(points, psi, a, rounds, middle):
    points = [x / norm(x) for x in points]
    kappa = np.array([[np.exp((x @ y - 1) / np.sqrt(len(x))) for y in points] for x in points])
    w = np.full(N, 1 / N)
    for _ in range(rounds):
        d = np.array([np.sqrt(1 + middle * kappa[j] @ w + w @ kappa @ w) for j in range(N)])
        corner = a * sorted(d)[(N - 1) // 2]
        w = np.array([psi(x, corner) / x for x in d])
        w = w / w.sum()
    return w


def psi_huber(d, a):
    return min(d, a)


def psi_hampel(d, a):
    return d if d < a else a if d < 2 * a else max(3 * a - d, 0)


@pytest.mark.parametrize("joint, released", [(False, True), (True, False)])
@pytest.mark.parametrize("name, psi", [("huber", psi_huber), ("hampel", psi_hampel)])
def test_kernel_density_weights_equal_loops(name, psi, released, joint):
    _, k, v = qkv()

    def slow(key, value):
        below = slow_weights(key, psi, 0.6, 2, 1 if released else -2)
        both = slow_weights(np.concatenate([key, value], 1), psi, 0.6, 2, 1 if released else -2)
        above = both if joint else below
        return np.array([e * above @ value / (e * below).sum() for e in exponentials(key, key)])

    h = study.rkde(k, v, getattr(study, name), 0.6, 2, joint, released)
    assert largest_gap(h, slow, k, v) < 1e-10


def slow_median_of_means(key, value):
    block = torch.randperm(N, generator=torch.Generator().manual_seed(0)).numpy() % 3
    h = []
    for row in attention(key, key):
        sums = [row[block == m].sum() for m in range(3)]
        middle = sums.index(sorted(sums)[1])
        h.append(row[block == middle] @ value[block == middle] / sums[middle])
    return np.array(h)


def slow_elliptical(q, k, v, last):
    moved = np.mean([abs(x - y) for x, y in zip(v, last)], 0)
    return attention(q * (moved / moved.max()), k) @ v


def slow_sinkhorn(k, v):
    A = exponentials(k, k)
    A = A / A.sum(1, keepdims=True)
    A = A / A.sum(0, keepdims=True)
    return A / A.sum(1, keepdims=True) @ v


def slow_keys(rows):
    def slow(k, v):
        tau, S = 0.5 * (norm(k) if rows else abs(k)).mean(), np.zeros_like(k)
        for _ in range(4):
            R = k - attention(k - S, k - S) @ (k - S)
            size = norm(R)[:, None] if rows else abs(R)
            S = R * np.maximum(1 - tau / size, 0)
        return attention(k - S, k - S) @ v
    return slow


def slow_predicted(k, v):
    w = np.ones(N)
    for i in range(3):
        A = exponentials(k, k) * w
        A = A / A.sum(1, keepdims=True)
        if i < 2:                                                           # weights of two rounds
            guess = [sum(A[j, i] * k[i] for i in range(N) if i != j) for j in range(N)]
            r = norm(k - guess)
            w = np.minimum(1, r.mean() / r)
    return A @ v


Q, K, V = qkv()
LAST = V.flip(-1) * 0.3


@pytest.mark.parametrize("found, slow, given", [
    (study.mom(K, V, m=3, layer=torch.nn.Identity().eval()), slow_median_of_means, (K, V)),
    (study.elliptical(Q, K, V, LAST), slow_elliptical, (Q, K, V, LAST)),
    (study.elliptical(Q, K, V), lambda q, k, v: attention(q, k) @ v, (Q, K, V)),
    (study.sinkhorn(K, V), slow_sinkhorn, (K, V)),
    (study.sinkhorn(K, torch.ones_like(V), rounds=101), lambda k, v: v, (K, torch.ones_like(V))),
    *((study.keys(K, V, lambd=0.5, rows=rows), slow_keys(rows), (K, V)) for rows in (False, True)),
    (study.weights(K, V), slow_predicted, (K, V)),
    (study.sharp(K, V), lambda k, v: attention(4 * k, k) @ v, (K, V))])
def test_an_attention_equals_its_definition(found, slow, given):
    assert largest_gap(found, slow, *given) < 1e-10
    assert found.abs().sum() > 0


@pytest.mark.parametrize("name", ROBUST)
def test_gradients_stay_finite(name):
    function, settings = ROBUST[name]
    settings = settings | (dict(layer=torch.nn.Identity().eval()) if name == "mom" else {})
    for scale in (0.0, 300.0):
        _, k, v = (x.float().requires_grad_() for x in qkv(scale))
        h = function(k, v, **settings)
        h.sum().backward()
        assert h.isfinite().all() and k.grad.isfinite().all()


def nano(attn="symmetric", layers=(0,)):
    torch.manual_seed(0)
    return ViT(ViTConfig(image_size=32, patch_size=8, num_classes=10, embed_dim=16, depth=3,
                         num_heads=2, attn=attn, rpc_layers=layers))


@pytest.mark.parametrize("name, layers", [("elliptical", (0,)), ("keys", (0, 1, 2)),
                                          *((name, (0,)) for name in ROBUST)])
def test_chosen_layers_alone_attend_without_new_parameters(name, layers):
    base = nano("softmax" if name == "elliptical" else "symmetric").eval()
    model, images = nano(study.USUAL[name], layers).eval(), torch.rand(2, 3, 32, 32)
    assert list(model.state_dict()) == list(base.state_dict())
    model.load_state_dict(base.state_dict())
    assert not torch.allclose(model(images), base(images))
    assert torch.equal(model(images), model(images))        # evaluations are deterministic
    first = LAYER_PATTERNS[study.USUAL[name]][0]
    assert [block.attn.attn == first for block in model.blocks] == [i in layers for i in range(3)]


@torch.no_grad()
def test_elliptical_reads_values_of_the_previous_layer():
    model, images, last = nano("elliptical").eval(), torch.rand(2, 3, 32, 32), None
    nano("elliptical")(images)                              # leaves another network's values
    ends = []
    model.blocks[0].register_forward_hook(lambda block, inputs, output: ends.append(inputs[0]))
    model.blocks[2].register_forward_hook(lambda block, inputs, output: ends.append(output))
    model(images)
    x, found = ends
    for block in model.blocks:
        q, k, v = block.attn.project(block.norm1(x))
        x = x + block.attn.proj(study.elliptical(q, k, v, last).transpose(1, 2).flatten(2))
        x, last = x + block.mlp(block.norm2(x)), v
    assert torch.allclose(found, x, atol=1e-6)


def command(*words):
    study.main([str(word) for word in words])


FLAGS = "--num_images 64 --batch_size 16 --patch_size 8 --epochs 1 --device cpu".split()


def test_scripts_train_and_evaluate_a_robust_attention(tmp_path, capsys):
    command("train_cls.py", "--attn", "keys lambd=0.25", *FLAGS, "--max_steps", 2, "--out_dir",
            tmp_path)
    checkpoint, kind = common.load(tmp_path), "keys lambd=0.25 n_iter=4"
    assert checkpoint["model_config"]["attn"] == checkpoint["args"]["attn"] == kind

    # Without the setting, the script ends with an error that names it. With the setting, it runs.
    del ATTENTIONS[kind], LAYER_PATTERNS[kind]
    evaluate = ["eval_robust.py", "--ckpt", tmp_path, "--measures", "clean", "--limit", 8,
                "--device", "cpu"]
    with pytest.raises((SystemExit, ValueError), match=kind):
        command(*evaluate, "--out_dir", tmp_path / "lost")
    capsys.readouterr()
    command("keys lambd=0.25", *evaluate, "--out_dir", tmp_path / "found")
    assert "| clean, top1" in capsys.readouterr().out


def test_causal_networks_are_errors():
    model = LM(LMConfig(5, context=4, embed_dim=8, depth=1, num_heads=2, mlp_dim=8,
                        attn=study.USUAL["keys"], rpc_layers=(0,)))
    with pytest.raises(ValueError, match="keys lambd=0.5.*causal"):
        model.hidden(torch.tensor([[1, 2]]))


# --- ProAttention, and studies/pro_attention.py ---------------------------------------------------

PRO_CASES = {"l1": dict(penalty="l1"), "mcp": dict(penalty="mcp"), "huber": dict(delta=1.0),
         "huber4": {}, "mcp_L1_t05": dict(penalty="mcp", steps=1, step=0.5, gamma=2.0)}


@pytest.mark.parametrize("group", "ab")
@pytest.mark.parametrize("name", PRO_CASES)
def test_output_equals_the_released_function(golden, group, name):
    z = {key[3:]: x for key, x in golden("pro_attention").items() if key.startswith(group)}
    for hide_gradient in (False, True):
        found = pro_attention(z["q"], z["k"], z["v"], **PRO_CASES[name], hide_gradient=hide_gradient)
        assert (found - z[name]).abs().max() < 1e-10


@pytest.mark.parametrize("penalty", PENALTIES)
def test_released_gradient_treats_weights_as_constants(penalty):
    """One step with fixed weights w is a weighted mean of the values, so its gradient is w."""
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 5, 4, generator=random, dtype=torch.float64, requires_grad=True)
               for _ in range(3))
    settings = dict(penalty=penalty, delta=1.0, gamma=2.0, steps=1, eps=0.01)
    A = (q @ k.mT / 2).softmax(-1).detach()
    d = torch.cdist(A @ v, v).detach() + 0.01
    w = A * PENALTIES[penalty](d, 2.0, 1.0, 0.01)
    expected = (w / w.sum(-1, keepdim=True)).sum(-2)[..., None].expand_as(v)

    def gradient(hide):
        h = pro_attention(q, k, v, **settings, hide_gradient=hide)
        return torch.autograd.grad(h.sum(), v)[0]
    assert torch.allclose(gradient(True), expected, atol=1e-12)
    assert not torch.allclose(gradient(False), expected, atol=1e-3)


def softmax_checkpoint():
    torch.manual_seed(0)
    config = dict(image_size=32, patch_size=8, num_classes=10, embed_dim=16, depth=2, num_heads=2,
                  attn="softmax")
    model = ViT(ViTConfig(**config))
    return dict(task="classification", model=model.state_dict(), model_config=config)


def test_stored_tables_match_the_rows():
    assert pro.report(pro.read_rows()) in (pro.RESULTS / "details.md").read_text()


def test_run_skips_stored_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(pro, "RESULTS", tmp_path)
    monkeypatch.setattr(pro, "VARIANTS", dict(softmax=None, l1=("penalty=l1",)))
    trained = []

    def train(folder, seed):
        folder.mkdir(exist_ok=True)
        trained.append(seed)
        common.save(folder / "last.pt", softmax_checkpoint())
    monkeypatch.setattr(pro, "train", train)
    for _ in range(2):
        pro.main(["--run", "--seeds", "3", "--limit", "2", "--out_dir", str(tmp_path)])
    assert [row["variant"] for row in pro.read_rows()] == ["softmax", "l1"] and trained == [3]
