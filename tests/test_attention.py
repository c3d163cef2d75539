"""Compare attention.py with the released code and the equations; test ATTENTIONS and errors."""

import math

import pytest
import torch
import torch.nn.functional as F

import attention
from attention import (ATTENTIONS, FORMS, Attention, SelfAttention, every_pap, key_statistics,
                       layer_inputs, naive_attention, naive_rpc, penalty, rpc_attention,
                       softmax_attention, symmetric_attention)

OPTIONS = {"code": {}, "mu_head": dict(mu_dim="head"), "thr_over": dict(threshold="over"),
           "thr_over_mu_head": FORMS["paper"], "sign_plus": dict(dual_sign=1),
           "admm": FORMS["admm"],
           "causal_global_mu": dict(causal=True, mu_over="all"),
           "causal_cumulative_mu": dict(causal=True),
           "causal_token_mu": dict(causal=True, mu_over="token")}
KINDS = ("softmax", "symmetric", "rpc", "rpc_asym", "scaled_s", "scaled_alpha")
every_kind = pytest.mark.parametrize("kind", KINDS)


def close(got, expected, atol=1e-10):
    """Return True, or name the difference."""
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)
    return True


def qkv(gain=1.0):
    shape, generator = (3, 2, 3, 10, 8), torch.Generator().manual_seed(0)   # (q k v, B, H, N, D)
    q, k, v = torch.randn(shape, generator=generator, dtype=torch.float64)
    return q, k * gain, v


def layer(kind="softmax", **how):
    torch.manual_seed(0)
    return SelfAttention(24, 3, kind, num_tokens=10, **how).double()


def tokens():
    return torch.randn(2, 10, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def module(arrays, prefix, **kind):
    weights = {k[len(prefix):]: v for k, v in arrays.items() if k.startswith(prefix)}
    m = SelfAttention(weights["proj.weight"].shape[0], 3, num_tokens=17, **kind)
    m.load_state_dict(weights)
    return m.double()


def nonzero(trace):
    return torch.tensor([(step["S"].abs() > 1e-12).double().mean() for step in trace],
                        dtype=torch.float64)


def test_modules_and_gradients_equal_the_released_code(golden):
    a = golden("attention_a")
    for key in [k for k in a if k.endswith("_y64")]:
        group, *setting, _ = key.split("_")
        kind = dict(attn="symmetric")
        if setting[0] == "pap":
            kind = dict(attn="rpc", pap=dict(n_iter=int(setting[1][1:]),
                                             lambd=float(setting[2][3:])))
        m, x = module(a, f"{group}_sd/", **kind), a[f"{group}_x"].double().requires_grad_()
        y = m(x)
        assert close(y, a[key])
        (y * a[f"{group}_cotangent"]).sum().backward()
        for grad, name in ((x.grad, "gx"), (m.qkv.weight.grad, "gqkvw"),
                           (m.qkv.bias.grad, "gqkvb")):
            if key[:-3] + name in a:
                scale = a[key[:-3] + name].abs().max().clamp(min=1).item()
                assert close(grad, a[key[:-3] + name], atol=1e-10 * scale)


@pytest.mark.parametrize("prefix,alpha", [("S_rand/", None), ("alpha_0.25/", 0.25)])
def test_scaled_attention_equals_the_released_code(golden, prefix, alpha):
    a = golden("attention_scaled")
    weights = {k[len("S_rand/sd/"):]: v for k, v in a.items() if k.startswith("S_rand/sd/")}
    s = weights.pop("s")
    weights["learned.s"] = s if alpha is None else torch.tensor([alpha])
    m = module(weights, "", attn="scaled_s" if alpha is None else "scaled_alpha")
    assert close(m(a["x"].double()), a[f"{prefix}y64"])


def test_every_variant_of_algorithm_1_equals_its_reference(golden):
    a = golden("derived_options")
    q, k, v = a["q"], a["k"], a["v"]
    options = dict(OPTIONS, asym_q=dict(q=q), asym_causal_cumulative=dict(q=q, causal=True),
                   value_k={})
    keys = [x for x in a if x.startswith("n")]
    for key in keys:
        setting, option = key.split("/")
        n, lam = setting.split("_")
        values = k if option == "value_k" else v
        assert close(rpc_attention(k, values, n_iter=int(n[1:]), lambd=float(lam[3:]),
                                   **options[option]), a[key])
    assert len(keys) >= 12 and close(naive_attention(q, k, v), a["asym"])
    for causal, end in ((False, ""), (True, "_causal")):
        assert close(symmetric_attention(k, v, causal=causal), a["sym" + end])
        assert close(softmax_attention(q, k, v, causal=causal), a["asym" + end])


@pytest.mark.parametrize("form", FORMS)
def test_rpc_equals_algorithm_1_written_out_with_gradients(form):
    _, k, v = qkv()
    n, lambd, how = 5, dict(released=1.5, paper=0.1, admm=0.1)[form], FORMS[form]      # S is not 0
    k, v = k.requires_grad_(), v.requires_grad_()
    (_, H, N, D), steps = k.shape, []
    mu = N * (H * D if how["mu_dim"] == "model" else D) / (4 * k.abs().sum((-1, -2), keepdim=True))
    tau = lambd * mu if how["threshold"] == "times" else lambd / mu
    L = Y = torch.zeros_like(k)
    for _ in range(n):
        u = k - L + Y / mu
        S = u.sign() * (u.abs() - tau).clamp(min=0)
        K2 = k - S + how["dual_sign"] * Y / mu
        L = (K2 @ K2.mT / D ** 0.5).softmax(-1) @ v
        Y = Y + mu * (k - L - S)
    ours = rpc_attention(k, v, n, lambd, **how, trace=steps)
    assert close(ours, L, atol=1e-12) and close(steps[-1]["S"], S, atol=1e-12)
    w = torch.randn_like(L)
    for a, b in zip(torch.autograd.grad((ours * w).sum(), (k, v)),
                    torch.autograd.grad((L * w).sum(), (k, v))):
        assert close(a, b, atol=1e-9 * max(b.abs().max().item(), 1))


def test_naive_rpc_equals_rpc_attention():
    for gain in (0.5, 2.0):                                    # S is 0 almost nowhere, and often
        _, k, v = qkv(gain)
        assert close(naive_rpc(k, v), rpc_attention(k, v), atol=1e-12)
        assert close(naive_rpc(k.float(), v.float()), rpc_attention(k, v).float(), atol=1e-4)


def random_output(q, k, v, **kwargs):
    """Return random numbers instead of the attention output."""
    return torch.randn_like(v)


@pytest.mark.parametrize("line_4", ["values", "keys", "random"])
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("form", FORMS)
def test_summed_residuals_stay_bounded_for_any_L(form, sign, line_4, monkeypatch):
    """Check the theorem of docs/equations.md, and its consequence 3."""
    if line_4 == "random":
        monkeypatch.setattr(attention, "softmax_attention", random_output)
    _, K, V = qkv()
    how = FORMS[form] | dict(dual_sign=sign)
    lambd = 1.5 if form == "released" else 0.1                      # S is neither 0 nor full
    mu = penalty(K, mu_dim=how["mu_dim"])
    tau = lambd * mu if how["threshold"] == "times" else lambd / mu
    steps = []
    rpc_attention(K, K if line_4 == "keys" else V, 30, lambd, **how, trace=steps)

    Ls = [torch.zeros_like(K), torch.zeros_like(K)] + [step["L"] for step in steps]
    Z = last_X = torch.zeros_like(K)
    inside = raw = 0
    for step, before, last, L in zip(steps, Ls, Ls[1:], Ls[2:]):    # L_{t-2}, L_{t-1}, L_t
        X = K - last + Z
        Z = Z + K - L - step["S"]                                   # the sum of the residuals
        assert close(Z, X.clamp(-tau, tau) - (L - last))
        stays = (X.abs() > tau) & (last_X.abs() > tau) & (X.sign() == last_X.sign())
        assert close(step["S"][stays], (K - 2 * last + before)[stays])
        raw += stays.sum()
        inside += (X.abs() < tau).sum()
        last_X = X
    assert raw > 100 and inside > 100                               # both cases occur


def test_infinite_lambda_and_zero_keys_give_finite_gradients():
    for lambd in (4.0, math.inf):
        _, k, v = qkv(3.0)
        k[:, 1] = 0
        y = rpc_attention(k.requires_grad_(), v, 4, lambd)
        y.sum().backward()
        assert y.isfinite().all() and k.grad.isfinite().all()


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "scaled_s"])
def test_causal_outputs_do_not_depend_on_later_tokens(kind):
    m, x = layer(kind, pap=dict(lambd=0.5), causal=True, attn_drop=0.3), tokens()
    m.qkv.weight.data *= 8                                     # large keys, so that S is not 0
    if kind == "scaled_alpha":
        m.learned.s.data.fill_(0.7)  # with its initial value 0, S would be 0
    if kind.startswith("rpc"):
        assert all((step["S"] != 0).any() for step in m.trace(x))
    outputs = []
    for change in (1, 5):
        torch.manual_seed(0)  # the same dropout masks
        x[:, 7] *= change
        outputs.append(m.train()(x))
    before, after = outputs
    assert torch.equal(before[:, :7], after[:, :7]) and not torch.equal(before[:, 7:], after[:, 7:])


def test_under_autocast_the_state_stays_float32():
    torch.manual_seed(0)
    m, x = SelfAttention(48, 3, "rpc", pap=dict(n_iter=6)), torch.randn(2, 50, 48)
    once = SelfAttention(48, 3, "symmetric")
    once.load_state_dict(m.state_dict())
    exact, exact_once = m(x), once(x)
    with torch.autocast("cpu", torch.bfloat16):
        y, y_once, trace = m(x), once(x), m.trace(x)
        assert y.dtype == rpc_attention(*m.project(x)[1:]).dtype == torch.bfloat16
    assert all(s[name].dtype == torch.float32 for s in trace for name in ("S", "K2", "L"))
    error, error_once = ((a.float() - b).norm() / b.norm()
                         for a, b in ((y, exact), (y_once, exact_once)))
    assert error < 4 * error_once < 0.02


@every_kind
def test_dropout_acts_in_training_only(kind):
    x, plain = tokens(), layer(kind)
    for how in (dict(attn_drop=0.5), dict(proj_drop=0.5)):
        m = layer(kind, **how)
        assert torch.equal(m.eval()(x), plain(x)) and not torch.allclose(m.train()(x), plain(x))


def test_dropout_acts_in_the_last_step_only(monkeypatch):
    rates, sdpa = [], F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention",
                        lambda *a, dropout_p=0.0, **k: rates.append(dropout_p) or sdpa(*a, **k))
    rpc_attention(*qkv()[1:], n_iter=3, dropout_p=0.3)
    assert rates == [0.0, 0.0, 0.3]


@every_kind
def test_trace_and_key_statistics_equal_the_forward_pass(kind):
    m, x = layer(kind, pap=dict(lambd=0.3), causal=kind != "scaled_s"), 3 * tokens()
    two, first = torch.nn.Sequential(layer("scaled_alpha"), m), x
    x = two[0](first)                                           # the input of m
    trace, stats, (q, k, _) = m.trace(x), key_statistics(two.train(), first), m.project(x)
    layers, inputs = zip(*layer_inputs(two, first))
    assert layers == (*two,) and torch.equal(inputs[1], x)
    assert stats["mean_abs_key"][1] == round(k.abs().mean().item(), 4)
    assert len(stats["mean_abs_key"]) == 2 and two.training             # the mode is unchanged
    assert not m._forward_pre_hooks and list(stats["nonzero_S"]) == [1] * kind.startswith("rpc")
    if kind.startswith("rpc"):
        assert len(trace) == 4 and 0 < nonzero(trace)[-1] < 1
        assert torch.equal(m.proj(trace[-1]["L"].transpose(1, 2).flatten(2)), m(x))
        assert all(torch.equal(step["Q2"], step["K2"] if kind == "rpc" else q) for step in trace)
        assert stats["nonzero_S"][1] == pytest.approx(nonzero(trace).tolist(), abs=1e-4)
    else:
        assert trace == []


def test_a_failed_forward_pass_leaves_no_hooks():
    m = layer("rpc")
    with pytest.raises(RuntimeError):
        layer_inputs(m, torch.zeros(2, 10, 5).double())         # another width
    assert not m._forward_pre_hooks


def test_every_pap_changes_every_layer_of_one_model(monkeypatch):
    monkeypatch.setitem(ATTENTIONS, "mine", Attention(False, lambda q, k, v, layer: rpc_attention(
        k, v, **layer.pap | dict(lambd=0.3))))
    mine, rpc, plain, x, steps = layer("mine"), layer("rpc"), layer("symmetric"), 3 * tokens(), []
    m = torch.nn.Sequential(mine, rpc, plain)
    y, rpc_alone = m(x), rpc(x)
    assert len(mine.trace(x)) == 4 and list(key_statistics(m, x)["nonzero_S"]) == [0, 1]
    with every_pap(m, trace=steps, n_iter=2):
        changed = m(x)
        with every_pap(rpc, lambd=math.inf):
            h = rpc_attention(*rpc.project(x)[1:], 2, math.inf)
            assert torch.equal(rpc(x), rpc.proj(h.transpose(1, 2).flatten(2)))
        assert len(steps) == 6 and torch.equal(m(x), changed)      # the outer block still applies
        layer("rpc")(x)                                            # another model: not traced
    assert len(steps) == 10 and not torch.equal(changed, y)
    assert torch.equal(m(x), y) and torch.equal(rpc(x), rpc_alone) and len(steps) == 10


def test_compiled_rpc_is_one_graph_with_equal_outputs():
    m, x = layer("rpc", pap=dict(lambd=0.3, n_iter=2)), 3 * tokens()
    compiled = torch.compile(m, backend="eager", fullgraph=True)
    assert close(compiled(x), m(x), atol=1e-12)
    with every_pap(m, lambd=0.1):
        assert close(compiled(x), m(x), atol=1e-12)
    assert close(compiled(x), m(x), atol=1e-12)


def test_an_output_that_would_broadcast_is_an_error(monkeypatch):
    monkeypatch.setitem(ATTENTIONS, "mine", Attention(True, lambda q, k, v, layer: v[:, :, :1]))
    with pytest.raises(ValueError, match=r"mine.*returned .*expected .*\(2, 3, 10, 8\)"):
        layer("mine")(tokens())


def test_wrong_settings_and_broadcasting_arguments_are_errors():
    for how in (dict(mu_over="some"), dict(lambd=-1.0), dict(n_iter=0), dict(threshold="under"),
                dict(dual_sign=2)):
        with pytest.raises(ValueError, match=next(iter(how))):
            layer("rpc", pap=how)(tokens())
    q, k, v = qkv()
    with pytest.raises(ValueError, match="^v.* expected"):
        rpc_attention(k, v[..., :1])
    with pytest.raises(ValueError, match="^q.* expected"):
        rpc_attention(k, v, q=q[:, :, :1])
    with pytest.raises(ValueError, match="keep is"):            # a padding mask must be bool
        rpc_attention(k, v, keep=torch.ones(2, 10))
    with pytest.raises(ValueError, match="scaled_s"):
        layer("scaled_s", causal=True)
    with pytest.raises(ValueError, match="no layer .* pap"), every_pap(torch.nn.Linear(2, 2)):
        pass


def test_rpc_needs_no_identity_of_keys_and_queries():
    """A layer may rotate its queries and keys, which makes two equal tensors of one."""
    class Copies(SelfAttention):
        def project(self, x):
            q, k, v = super().project(x)
            return q.clone(), k, v
    one, x = layer("rpc", pap=dict(lambd=0.3)), 3 * tokens()
    two = Copies(one.dim, one.num_heads, "rpc", pap=dict(lambd=0.3)).double()
    two.load_state_dict(one.state_dict())
    assert torch.equal(one(x), two(x))
