"""studies/robust_attentions: each attention is its published definition, in a network or alone."""

import math
import statistics
import sys

import pytest
import torch

import common
from attention import ATTENTIONS, symmetric_attention
from lm import LM, LMConfig
from studies import robust_attentions as study
from studies.robust_attentions import ROBUST, register
from vit import RPC_KINDS, ViT, ViTConfig

B, H, N, D = 2, 2, 7, 4


def qkv(scale=1.0):
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, H, N, D, generator=random, dtype=torch.float64) for _ in range(3))
    return q * scale, k * scale, v


def heads(*tensors):
    """Every head's matrices, as lists of rows of numbers."""
    for b in range(B):
        for h in range(H):
            yield (b, h), [t[b, h].tolist() for t in tensors]


def dot(x, y):
    return sum(a * b for a, b in zip(x, y))


def attention(q, k):
    """Rows of softmax(q k^T / sqrt(D)), by loops."""
    rows = []
    for x in q:
        e = [math.exp(dot(x, y) / math.sqrt(len(y))) for y in k]
        rows.append([a / sum(e) for a in e])
    return rows


def times(A, v):
    return [[sum(a * y[d] for a, y in zip(row, v)) for d in range(len(v[0]))] for row in A]


def norm(x):
    return math.sqrt(dot(x, x))


def largest_gap(h, slow):
    """Of all heads; NaN if one has it."""
    gaps = [(h[at] - torch.tensor(rows, dtype=torch.float64)).abs().max()
            for at, rows in slow.items()]
    return torch.stack(gaps).max()


# --- against slow versions -----------------------------------------------------------------------

def slow_weights(points, psi, a, rounds, middle):
    points = [[c / norm(p) for c in p] for p in points]
    n = len(points)
    kappa = [[math.exp((dot(x, y) - 1) / math.sqrt(len(x))) for y in points] for x in points]
    w = [1 / n] * n
    for _ in range(rounds):
        mean2 = sum(w[i] * w[j] * kappa[i][j] for i in range(n) for j in range(n))
        d = [math.sqrt(1 + middle * sum(w[i] * kappa[i][j] for i in range(n)) + mean2)
             for j in range(n)]
        corner = a * sorted(d)[(n - 1) // 2]
        w = [psi(x, corner) / x for x in d]
        w = [x / sum(w) for x in w]
    return w


def psi_huber(d, a):
    return min(d, a)


def psi_hampel(d, a):
    return d if d < a else a if d < 2 * a else max(3 * a - d, 0)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("name, psi", [("huber", psi_huber), ("hampel", psi_hampel)])
def test_kernel_density_weights_are_those_of_loops(name, psi, released, joint):
    q, k, v = qkv()
    slow, middle = {}, 1 if released else -2
    for at, (key, value) in heads(k, v):
        below = slow_weights(key, psi, 0.6, 2, middle)
        both = [x + y for x, y in zip(key, value)]
        above = slow_weights(both, psi, 0.6, 2, middle) if joint else below
        slow[at] = []
        for x in key:
            e = [math.exp(dot(x, y) / math.sqrt(D)) for y in key]
            total = sum(a * w for a, w in zip(e, below))
            slow[at].append([sum(a * w * y[d] for a, w, y in zip(e, above, value)) / total
                             for d in range(D)])
    h, score = study.rkde(k, v, getattr(study, name), 0.6, 2, joint, released)
    assert largest_gap(h, slow) < 1e-10
    assert score.shape == (B, H, N)


def test_median_of_means_uses_the_block_whose_kernel_sum_is_the_median():
    q, k, v = qkv()
    block = (torch.randperm(N, generator=torch.Generator().manual_seed(3)) % 3).tolist()
    slow = {}
    for at, (key, value) in heads(k, v):
        slow[at] = []
        for row in attention(key, key):
            sums = [sum(a for a, b in zip(row, block) if b == m) for m in range(3)]
            chosen = sums.index(statistics.median(sums))
            kept = [a if b == chosen else 0 for a, b in zip(row, block)]
            slow[at] += times([[a / sums[chosen] for a in kept]], value)
    assert largest_gap(study.mom(k, v, m=3, seed=3)[0], slow) < 1e-10


def test_elliptical_attention_weighs_coordinates_by_how_values_moved():
    q, k, v = qkv()
    last = v.flip(-1) * 0.3
    slow = {}
    for at, (query, key, value, before) in heads(q, k, v, last):
        moved = [sum(abs(x[d] - y[d]) for x, y in zip(value, before)) / N for d in range(D)]
        M = [m / max(moved) for m in moved]
        slow[at] = times(attention([[x * m for x, m in zip(row, M)] for row in query], key), value)
    assert largest_gap(study.elliptical(q, k, v, last), slow) < 1e-10
    plain = {at: times(attention(x, y), z) for at, (x, y, z) in heads(q, k, v)}
    assert largest_gap(study.elliptical(q, k, v), plain) < 1e-10


def test_sinkhorn_normalises_rows_then_columns_then_rows():
    q, k, v = qkv()
    slow = {}
    for at, (key, value) in heads(k, v):
        A = [[math.exp(dot(x, y) / math.sqrt(D)) for y in key] for x in key]
        for _ in range(3):
            A = [[a / sum(row) for a in row] for row in A]
            A = [list(column) for column in zip(*A)]        # the next round normalises columns
        slow[at] = times([list(row) for row in zip(*A)], value)
    assert largest_gap(study.sinkhorn(k, v)[0], slow) < 1e-10
    even, _ = study.sinkhorn(k, torch.ones_like(v), rounds=101)
    assert torch.allclose(even, torch.ones_like(v))


@pytest.mark.parametrize("rows", [False, True])
def test_pap_on_the_keys_alone_is_that_of_loops(rows):
    q, k, v = qkv()
    slow, sizes = {}, {}
    for at, (key, value) in heads(k, v):
        size = [norm(x) for x in key] if rows else [abs(c) for x in key for c in x]
        tau = 0.5 * sum(size) / len(size)
        S = [[0.0] * D for _ in key]
        for _ in range(4):
            C = [[c - s for c, s in zip(*both)] for both in zip(key, S)]
            R = [[c - l for c, l in zip(*both)] for both in zip(key, times(attention(C, C), C))]
            S = [[c * max(1 - tau / (norm(r) if rows else abs(c)), 0) for c in r] for r in R]
        C = [[c - s for c, s in zip(*both)] for both in zip(key, S)]
        slow[at] = times(attention(C, C), value)
        sizes[at] = [[sum(map(abs, s))] for s in S]
    h, score = study.keys(k, v, lambd=0.5, rows=rows)
    assert largest_gap(h, slow) < 1e-10
    assert largest_gap(score[..., None], sizes) < 1e-10
    assert (score > 0).any()


def test_tokens_that_the_others_cannot_predict_count_less():
    q, k, v = qkv()
    slow = {}
    for at, (key, value) in heads(k, v):
        w = [1.0] * N
        for _ in range(3):
            A = [[a * b for a, b in zip(row, w)] for row in
                 [[math.exp(dot(x, y) / math.sqrt(D)) for y in key] for x in key]]
            A = [[a / sum(row) for a in row] for row in A]
            h = times(A, value)
            guess = [[sum(A[j][i] * key[i][d] for i in range(N) if i != j) for d in range(D)]
                     for j in range(N)]
            r = [norm([a - b for a, b in zip(x, y)]) for x, y in zip(key, guess)]
            w = [min(1, sum(r) / N / x) for x in r]
        slow[at] = h                                        # with the weights of two rounds
    assert largest_gap(study.weights(k, v)[0], slow) < 1e-10


def test_sharp_is_attention_with_four_times_the_logits_after_four_steps():
    q, k, v = qkv()
    slow = {at: times(attention([[4 * x for x in row] for row in key], key), value)
            for at, (_, key, value) in heads(q, k, v)}
    assert largest_gap(study.sharp(k, v)[0], slow) < 1e-10


# --- limits and gradients -------------------------------------------------------------------------

@pytest.mark.parametrize("name, settings", [
    ("rkde-huber", dict(a=1e9, rounds=0)), ("mom", dict(m=1)), ("sinkhorn", dict(rounds=1)),
    ("keys", dict(lambd=1e9)), ("keys-rows", dict(lambd=1e9)), ("weights", dict(rounds=0)), ("sharp", dict(n_iter=3))])
def test_without_its_robust_part_it_is_symmetric_attention(name, settings):
    _, k, v = qkv()
    assert torch.allclose(ROBUST[name][0](k, v, **settings)[0], symmetric_attention(k, v), atol=1e-12)


@pytest.mark.parametrize("name", ROBUST)
def test_gradients_are_those_of_finite_differences_and_large_and_zero_keys_stay_finite(name):
    function, settings = ROBUST[name]
    settings = settings | (dict(seed=0) if name == "mom" else {})
    if name.startswith("rkde"):             # the median of d, a constant, moves with k: a is fixed
        psi = getattr(study, name[5:])
        gradient = lambda k, v: study.rkde(k, v, lambda d, a: psi(d, 0.3))[0]
    else:
        gradient = lambda k, v: function(k, v, **settings)[0]
    k, v = (x[:1, :1].requires_grad_() for x in qkv()[1:])
    assert torch.autograd.gradcheck(gradient, (k, v), eps=1e-6, atol=1e-6)
    for scale in (0.0, 300.0):
        _, k, v = (x.float().requires_grad_() for x in qkv(scale))
        h, _ = function(k, v, **settings)
        h.sum().backward()
        assert h.isfinite().all() and k.grad.isfinite().all()


# --- in a network ---------------------------------------------------------------------------------

def nano(attn="symmetric", layers=(0,)):
    torch.manual_seed(0)
    return ViT(ViTConfig(image_size=32, patch_size=8, num_classes=10, embed_dim=16, depth=3, num_heads=2, attn=attn,
                         rpc_layers=layers))


@pytest.mark.parametrize("name, layers", [("elliptical", (0,)), *((n, x) for n in ROBUST for x in ((0,), (0, 1, 2)))])
def test_it_attends_in_its_layers_alone_and_no_parameter_comes_or_goes(name, layers):
    base = nano("softmax" if name == "elliptical" else "symmetric").eval()
    model, images = nano(study.USUAL[name], layers).eval(), torch.rand(2, 3, 32, 32)
    assert list(model.state_dict()) == list(base.state_dict())
    model.load_state_dict(base.state_dict())
    assert not torch.allclose(model(images), base(images))
    assert torch.equal(model(images), model(images))        # an evaluation is no lottery
    kinds = [block.attn.attn for block in model.blocks]
    assert [kind == RPC_KINDS[study.USUAL[name]][0] for kind in kinds] == [i in layers for i in range(3)]


@torch.no_grad()
def test_elliptical_compares_values_with_those_of_the_layer_before_in_the_same_network():
    model, images, last = nano("elliptical").eval(), torch.rand(2, 3, 32, 32), None
    nano("elliptical")(images)                              # another network's last values
    x = model.embed(images)
    for block in model.blocks:
        q, k, v = block.attn.project(block.norm1(x))
        x = x + block.attn.proj(study.elliptical(q, k, v, last).transpose(1, 2).flatten(2))
        x, last = x + block.mlp(block.norm2(x)), v
    assert torch.allclose(model.features(images)["blocks.2"], x, atol=1e-6)


def command(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["studies.robust_attentions", *map(str, words)])
    study.main()


FLAGS = "--num_images 64 --batch_size 16 --patch_size 8 --epochs 1 --device cpu".split()


def test_it_trains_resumes_and_is_evaluated_by_the_own_scripts(tmp_path, monkeypatch, capsys):
    for folder, steps in (("whole", 4), ("cut", 2)):
        command(monkeypatch, "train", "keys", "lambd=0.25", *FLAGS, "--out_dir", tmp_path / folder,
                "--max_steps", steps)
    with pytest.raises(ValueError, match="--attn|attn"):
        command(monkeypatch, "train", "mom", "--resume", tmp_path / "cut")
    command(monkeypatch, "train", "keys", "lambd=0.25", "--resume", tmp_path / "cut", "--max_steps", 4)
    whole, cut = (common.load(tmp_path / folder) for folder in ("whole", "cut"))
    assert all(torch.equal(whole["model"][k], cut["model"][k]) for k in whole["model"])
    kind = "keys lambd=0.25 n_iter=4"
    assert whole["model_config"]["attn"] == whole["args"]["attn"] == kind and whole["args"]["init"] == "default"
    capsys.readouterr()
    evaluate = ["--ckpt", tmp_path / "cut", "--measures", "clean", "--limit", 8, "--device", "cpu"]
    command(monkeypatch, "evaluate", *evaluate)             # the setting is in the table already
    assert kind in capsys.readouterr().out

    # A process that does not know the setting says what is missing; one that is told it goes on.
    del ATTENTIONS[kind], RPC_KINDS[kind]
    with pytest.raises(ValueError, match="keys lambd=0.25 n_iter=4"):
        command(monkeypatch, "evaluate", *evaluate, "--out_dir", tmp_path / "lost")
    command(monkeypatch, "evaluate", "keys", "lambd=0.25", *evaluate, "--out_dir", tmp_path / "again")


def test_a_setting_is_the_one_with_which_the_kind_attends():
    layer = nano(register("keys", ["lambd=0.25"])).blocks[0].attn
    q, k, v = layer.project(torch.randn(2, N, 16))
    assert torch.equal(layer.attend(q, k, v), study.keys(k, v, lambd=0.25)[0])
    assert not torch.allclose(layer.attend(q, k, v), study.keys(k, v, lambd=0.5)[0])


# --- bad input ------------------------------------------------------------------------------------

@pytest.mark.parametrize("words, message", [
    (["mean"], "attention 'mean': expected one of rkde-huber"),
    (["elliptical", "a=1"], "elliptical a=1: expected NAME=VALUE with a name of none: it has no"),
    (["keys", "lambd=-1"], "keys lambd: -1, expected float from 0"), (["mom", "m=0"], "mom m: 0, expected int from 1"),
    (["rkde-hampel", "a=0.3"], "rkde-hampel a: 0.3, expected float from 0.34"),
    (["rkde-huber", "a=wide"], "rkde-huber a: could not convert string to float"),
    (["keys", "lambd"], "keys lambd: expected NAME=VALUE"),
    (["elliptical", "--rpc_layers", "all"], "elliptical is in all layers"),
    (["weights", "lambd=1"], "weights lambd=1: expected NAME=VALUE with a name of rounds")])
def test_an_unknown_attention_or_setting_is_named_before_anything_is_read(monkeypatch, words, message):
    with pytest.raises(ValueError, match=message):
        command(monkeypatch, "train", *words)


def test_an_unknown_command_more_blocks_than_tokens_and_a_causal_network_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="tarin keys: expected train NAME or evaluate"):
        command(monkeypatch, "tarin", "keys")
    with pytest.raises(ValueError, match=f"mom m=8: expected at most a block a token, {N}"):
        study.mom(*qkv()[1:], m=N + 1)
    with pytest.raises(ValueError, match="attn='keys lambd=0.5 n_iter=4' is a function of k, v"):
        LM(LMConfig(5, context=4, embed_dim=8, depth=1, num_heads=2, mlp_dim=8, attn=study.USUAL["keys"]))
