"""Claims about attention.py: equal to the released code, equal to the equations, and what the loop does."""

import math
import re

import pytest
import torch
import torch.nn.functional as F

from attention import (ATTENTIONS, FORMS, SelfAttention, naive_attention, penalty, rpc_attention,
                       scaled_attention, soft_threshold, softmax_attention, symmetric_attention)
from common import key_statistics
from conftest import ROOT
from kpca import exact_scaling, pcp

OPTIONS = {"code": {}, "mu_head": dict(mu_dim="head"), "thr_over": dict(threshold="over"),
           "thr_over_mu_head": FORMS["paper"], "sign_plus": dict(dual_sign=1), "admm": FORMS["admm"],
           "causal_global_mu": dict(causal=True, mu_over="all"), "causal_cumulative_mu": dict(causal=True),
           "causal_token_mu": dict(causal=True, mu_over="token")}


def qkv(gain=1.0, B=2, H=3, N=10, D=8, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, B, H, N, D, generator=g, dtype=dtype)
    return q, k * gain, v


def assert_close(a, b, atol=1e-10):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


def module(arrays, prefix, dtype, **kind):
    weights = {k[len(prefix):]: v for k, v in arrays.items() if k.startswith(prefix)}
    C = weights["proj.weight"].shape[0]
    m = SelfAttention(C, 3, num_tokens=17, **kind)
    m.load_state_dict(weights)
    return m.to(dtype)


# --- reference arrays -----------------------------------------------------------------------------------------------------

def test_rpc_equals_the_released_code_heads_outputs_and_shares_of_nonzero_S(golden):
    a = golden("attention_a")
    checked = 0
    for key in [k for k in a if k.endswith("_h64") and "_pap_" in k]:
        group, _, n, lam, _ = key.split("_")
        trace = []
        h = rpc_attention(a[f"{group}_k"], a[f"{group}_v"], int(n[1:]), float(lam[3:]), trace=trace)
        assert_close(h, a[key])
        assert_close(torch.tensor([(s["S"].abs() > 1e-12).double().mean() for s in trace], dtype=torch.float64),
              a[key[:-3] + "active"], 1e-9)
        checked += 1
    assert checked >= 5


def test_module_equals_the_released_code_in_both_precisions_with_gradients(golden):
    a = golden("attention_a")
    for key in [k for k in a if k.endswith("_y64") and "_pap_" in k]:
        group, _, n, lam, _ = key.split("_")
        kind = dict(attn="rpc", n_iter=int(n[1:]), lambd=float(lam[3:]))
        assert_close(module(a, f"{group}_sd/", torch.float32, **kind)(a[f"{group}_x"]), a[key[:-2] + "32"], 2e-5)
        m = module(a, f"{group}_sd/", torch.float64, **kind)
        x = a[f"{group}_x"].double().requires_grad_()
        y = m(x)
        assert_close(y, a[key])
        (y * a[f"{group}_cotangent"]).sum().backward()
        for grad, name in ((x.grad, "gx"), (m.qkv.weight.grad, "gqkvw"), (m.qkv.bias.grad, "gqkvb")):
            assert_close(grad, a[key[:-3] + name], 1e-10 * a[key[:-3] + name].abs().max().clamp(min=1).item())


def test_symmetric_attention_equals_the_released_code(golden):
    a = golden("attention_a")
    for group in {k.split("_")[0] for k in a if k.endswith("sym_h64")}:
        assert_close(symmetric_attention(a[f"{group}_k"], a[f"{group}_v"]), a[f"{group}_sym_h64"])
        for dtype, key, tol in ((torch.float64, "sym_y64", 1e-10), (torch.float32, "sym_y32", 2e-5)):
            m = module(a, f"{group}_sd/", dtype, attn="symmetric")
            assert_close(m(a[f"{group}_x"].to(dtype)), a[f"{group}_{key}"], tol)


def test_scaled_attention_equals_the_released_code(golden):
    a = golden("attention_scaled")
    cases = [("S_rand/", "scaled_s", None), ("alpha_0.25/", "scaled_alpha", 0.25), ("alpha_1/", "scaled_alpha", 1.0)]
    if "S_zero/y64" in a:
        cases.append(("S_zero/", "scaled_s", 0.0))             # its own file of s holds S_rand's; S is zero here
    for prefix, kind, alpha in cases:
        source = prefix if alpha is None else "S_rand/"
        weights = {k[len(source) + 3:]: v for k, v in a.items() if k.startswith(source + "sd/")}
        if alpha is not None:
            weights["s"] = torch.tensor([alpha]) if kind == "scaled_alpha" else torch.zeros(3, 17, 17)
        for dtype, suffix, tol in ((torch.float64, "64", 1e-10), (torch.float32, "32", 2e-5)):
            m = SelfAttention(48, 3, kind, num_tokens=17)
            m.load_state_dict(weights)
            m.to(dtype)
            q, k, v = m.project(a["x"].to(dtype))
            if prefix + "y" + suffix in a:
                assert_close(m(a["x"].to(dtype)), a[prefix + "y" + suffix], tol)
            if suffix == "64" and prefix + "h64" in a:
                assert_close(m.attend(q, k, v), a[prefix + "h64"])


def test_every_other_reading_of_algorithm_1_equals_its_reference(golden):
    a = golden("derived_options")
    q, k, v = a["q"], a["k"], a["v"]
    options = dict(OPTIONS, asym_q=dict(q=q), asym_causal_cumulative=dict(q=q, causal=True))
    checked = 0
    for key in [x for x in a if x.startswith("n")]:
        setting, option = key.split("/")
        n, lam = setting.split("_")
        how = dict(n_iter=int(n[1:]), lambd=float(lam[3:]))
        assert_close(rpc_attention(k, k, **how) if option == "value_k" else rpc_attention(k, v, **how, **options[option]), a[key])
        checked += 1
    assert checked >= 12
    assert_close(symmetric_attention(k, v), a["sym"])
    assert_close(symmetric_attention(k, v, causal=True), a["sym_causal"])
    assert_close(softmax_attention(q, k, v), a["asym"])
    assert_close(softmax_attention(q, k, v, causal=True), a["asym_causal"])


def test_exact_scaling_equals_its_reference_matrix(golden):
    a = golden("derived_options")
    k, S = a["exactS/k"], a["exactS/S"]
    assert_close(exact_scaling(k, a["v"]), S @ a["v"])
    assert_close(softmax_attention(a["q"], k, a["v"] - exact_scaling(k, a["v"])), a["exactS/h"])
    assert_close(scaled_attention(a["q"], k, a["v"], S), a["exactS/h"])


def test_pcp_equals_its_reference_and_recovers_both_parts(golden):
    a = golden("derived_options")
    L, S = pcp(a["pcp/M"], tol=1e-12)
    assert_close(L, a["pcp/L"])
    assert_close(S, a["pcp/S"])
    L, S = pcp(a["pcp/M"], max_iter=5)
    assert_close(L, a["pcp/L_after5"])
    assert_close(S, a["pcp/S_after5"])
    torch.manual_seed(0)
    low, gross = torch.randn(60, 2).double() @ torch.randn(2, 40).double(), torch.zeros(60, 40).double()
    gross[torch.rand(60, 40) < 0.05] = 10.0
    L, S = pcp(low + gross, max_iter=100)
    assert (L - low).norm() < 1e-6 * low.norm() and (S - gross).norm() < 1e-6 * gross.norm()


def test_pcp_as_printed_in_the_paper_diverges():
    torch.manual_seed(0)
    M = torch.randn(60, 2).double() @ torch.randn(2, 40).double()
    M[torch.rand(60, 40) < 0.05] += 10
    mu, lambd = M.numel() / (4 * M.abs().sum()), 60 ** -0.5
    L = Y = torch.zeros_like(M)
    for _ in range(60):
        S = soft_threshold(M - L + Y / mu, lambd / mu)
        U, sigma, Vt = torch.linalg.svd(M - S - Y / mu, full_matrices=False)                # threshold mu, sign -
        L = (U * soft_threshold(sigma, mu)) @ Vt
        Y = Y + mu * (M - L - S)
    assert (M - L - S).norm() > 1e8 * M.norm()


# --- the equations --------------------------------------------------------------------------------

ADDRESSES = [f"Eq. {n}" for n in (1, 2, 3, 12, 14)] + ["Def. 1", "App. E.1", "App. E.9"]


@pytest.mark.parametrize("address", ADDRESSES + [f"Alg. 1, line {n}" for n in (1, 2, 3, 4, 5, 7)])
def test_every_equation_is_one_line_of_code_that_grep_finds(address):
    source = (ROOT / "attention.py").read_text()
    lines = re.findall(rf"^( +\S.*?)# {re.escape(address)}(?!\d)", source, re.M)
    assert len(lines) == 1 and lines[0].strip(), address


def test_softmax_attention_equals_its_definition():
    q, k, v = qkv()
    assert_close(softmax_attention(q, k, v), (q @ k.mT / 8 ** 0.5).softmax(-1) @ v, 1e-12)
    assert_close(naive_attention(q, k, v), softmax_attention(q, k, v), 1e-12)
    mask = torch.ones(10, 10, dtype=torch.bool).tril()
    scores = (q @ k.mT / 8 ** 0.5).masked_fill(~mask, -math.inf)
    assert_close(softmax_attention(q, k, v, causal=True), scores.softmax(-1) @ v, 1e-12)


def test_soft_threshold_minimises_its_objective():
    x, tau = torch.linspace(-3, 3, 61).double(), 0.7
    grid = torch.linspace(-4, 4, 8001).double()
    best = grid[(tau * grid.abs() + 0.5 * (grid - x[:, None]) ** 2).argmin(1)]
    assert_close(soft_threshold(x, torch.tensor(tau)), best, 1e-3)
    assert soft_threshold(torch.tensor([0.7, -0.7]), 0.7).eq(0).all()


def test_soft_threshold_has_the_gradients_of_its_formula_also_the_second_and_under_vmap():
    torch.manual_seed(0)
    x, tau = torch.randn(2, 3, 5, 4).double().requires_grad_(), torch.rand(2, 3, 1, 1).double().requires_grad_()
    assert torch.autograd.gradcheck(soft_threshold, (x, tau)) and torch.autograd.gradgradcheck(soft_threshold, (x, tau))
    per_sample = torch.func.vmap(torch.func.grad(lambda x, t: soft_threshold(x, t).pow(2).sum()))(x, tau)
    assert_close(per_sample, torch.autograd.grad(soft_threshold(x, tau).pow(2).sum(), x)[0], 1e-12)


@pytest.mark.parametrize("gain", [1.0, 8.0])
@pytest.mark.parametrize("form", FORMS)
def test_the_loop_equals_algorithm_1_written_out_with_S_and_Y(gain, form):
    _, k, v = qkv(gain)
    n, lambd, how = 5, 1.5, FORMS[form]
    k, v = k.requires_grad_(), v.requires_grad_()
    B, H, N, D = k.shape
    mu = N * (H * D if how["mu_dim"] == "model" else D) / (4 * k.abs().sum((-1, -2), keepdim=True))
    tau = lambd * mu if how["threshold"] == "times" else lambd / mu
    L = Y = torch.zeros_like(k)
    for _ in range(n):
        u = k - L + Y / mu
        S = u.sign() * (u.abs() - tau).clamp(min=0)
        K2 = k - S + how["dual_sign"] * Y / mu
        L = (K2 @ K2.mT / D ** 0.5).softmax(-1) @ v
        Y = Y + mu * (k - L - S)
    ours = rpc_attention(k, v, n, lambd, **how)
    assert_close(ours, L, 1e-12)
    w = torch.randn_like(L)
    for a, b in zip(torch.autograd.grad((ours * w).sum(), (k, v)), torch.autograd.grad((L * w).sum(), (k, v))):
        assert_close(a, b, 1e-9 * max(b.abs().max().item(), 1))


def test_one_step_is_symmetric_attention_on_clamped_keys():
    _, k, v = qkv(3.0)
    tau = 4.0 * penalty(k)
    assert (k.abs() > tau).any()
    assert_close(rpc_attention(k, v, 1), symmetric_attention(k.clamp(-tau, tau), v), 1e-12)


def test_without_shrinkage_one_step_is_symmetric_attention_exactly():
    _, k, v = qkv(3.0)
    for form in FORMS.values():
        assert torch.equal(rpc_attention(k, v, 1, math.inf, **form), symmetric_attention(k, v))


def test_without_shrinkage_two_steps_attend_with_the_first_output():
    _, k, v = qkv(3.0)
    L1 = symmetric_attention(k, v)
    assert_close(rpc_attention(k, v, 2, math.inf), symmetric_attention(L1, v), 1e-12)


def test_without_shrinkage_gradients_are_finite():
    _, k, v = qkv(3.0)
    k.requires_grad_()
    rpc_attention(k, v, 4, math.inf).sum().backward()
    assert k.grad.isfinite().all()


def test_doubling_keys_halves_the_threshold_lambda_mu_and_doubles_lambda_over_mu():
    _, k, _ = qkv()
    assert_close(penalty(2 * k), penalty(k) / 2, 1e-12)
    assert_close(4 / penalty(2 * k), 2 * 4 / penalty(k), 1e-12)
    m = k.abs().mean((-1, -2), keepdim=True)
    k = k / m * 3 / 4                                     # mean|k| = H/4, H = 3: mu = 1, both rules agree
    assert_close(penalty(k), torch.ones(2, 3, 1, 1).double(), 1e-12)


def test_with_one_head_both_mu_dims_agree():
    _, k, v = qkv(H=1)
    assert_close(rpc_attention(k, v, mu_dim="head"), rpc_attention(k, v, mu_dim="model"), 1e-12)


def test_the_running_mu_begins_with_the_first_token_and_ends_with_the_mean_of_all():
    k = torch.randn(2, 3, 9, 8, dtype=torch.float64)
    running, token, whole = (penalty(k, mu_over=mu) for mu in ("seen", "token", "all"))
    assert_close(running[:, :, :1], token[:, :, :1])
    assert_close(running[:, :, -1:], whole)
    assert_close(running[:, :, 4:5], penalty(k[:, :, :5]))


def test_mu_is_n_times_width_over_four_sums():
    _, k, _ = qkv()
    B, H, N, D = k.shape
    assert_close(penalty(k)[1, 2, 0, 0], N * H * D / (4 * k[1, 2].abs().sum()), 1e-12)
    assert_close(penalty(k, mu_dim="head")[1, 2, 0, 0], N * D / (4 * k[1, 2].abs().sum()), 1e-12)
    running = penalty(k, mu_over="seen")
    assert_close(running[..., -1:, :], penalty(k), 1e-12)
    assert_close(running[..., :1, :], penalty(k, mu_over="token")[..., :1, :], 1e-12)


def test_exact_scaling_is_an_idempotent_projection_also_where_the_ratio_of_softmaxes_overflows():
    _, k, v = qkv()
    once = exact_scaling(k, v)
    assert_close(exact_scaling(k, once), once, 1e-12)
    _, k, v = qkv(gain=4.0, N=64, D=64, dtype=torch.float32)
    assert exact_scaling(k, v).isfinite().all()


def test_an_all_zero_head_is_finite_with_gradients():
    _, k, v = qkv()
    k[:, 1] = 0
    k.requires_grad_()
    y = rpc_attention(k, v)
    y.sum().backward()
    assert y.isfinite().all() and k.grad.isfinite().all()


# --- every kind ---------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", ATTENTIONS)
def test_permuting_tokens_permutes_the_output_of_every_kind_without_weights_per_position(kind):
    torch.manual_seed(0)
    m = SelfAttention(24, 3, kind, num_tokens=10).double()
    if kind.startswith("scaled"):
        torch.nn.init.normal_(m.s)
    x, order = torch.randn(2, 10, 24).double(), torch.randperm(10)
    same = torch.allclose(m(x)[:, order], m(x[:, order]), rtol=0, atol=1e-12)
    assert same == (kind != "scaled_s")


@pytest.mark.parametrize("kind", ["scaled_s", "scaled_alpha"])
def test_scaled_kinds_start_as_softmax_attention(kind):
    torch.manual_seed(0)
    m, x = SelfAttention(24, 3, kind, num_tokens=10).double(), torch.randn(2, 10, 24).double()
    assert_close(m.attend(*m.project(x)), softmax_attention(*m.project(x)), 1e-14)


@pytest.mark.parametrize("kind", [k for k in ATTENTIONS if k != "scaled_s"])
def test_changing_a_token_leaves_causal_outputs_before_it_unchanged_bit_for_bit(kind):
    torch.manual_seed(0)
    m = SelfAttention(24, 3, kind, lambd=0.5, causal=True).double()
    m.qkv.weight.data *= 8                                     # keys large enough that S acts
    if kind == "scaled_alpha":
        m.s.data.fill_(0.7)                                    # at its start, 0, the inner attention does nothing
    x = torch.randn(2, 12, 24).double()
    if kind.startswith("rpc"):
        trace = []
        rpc_attention(*m.project(x)[1:], lambd=0.5, causal=True, trace=trace)
        assert all((s["S"] != 0).any() for s in trace)
    changed = x.clone()
    changed[:, 7] *= 5
    assert torch.equal(m(x)[:, :7], m(changed)[:, :7])
    assert not torch.equal(m(x)[:, 7:], m(changed)[:, 7:])


def test_a_global_mu_leaks_the_future_in_causal_attention():
    _, k, v = qkv(4.0)
    changed = k.clone()
    changed[:, :, 7] *= 5
    leak = rpc_attention(k, v, causal=True, mu_over="all") - rpc_attention(changed, v, causal=True, mu_over="all")
    assert leak[:, :, :7].abs().max() > 1e-3


@pytest.mark.parametrize("kind,rows", [("softmax", 3), ("symmetric", 2), ("rpc", 2), ("rpc_asym", 3), ("scaled_s", 3),
                                       ("scaled_alpha", 3)])
def test_state_dict_names_and_shapes_are_timms(kind, rows):
    shapes = {k: tuple(v.shape) for k, v in SelfAttention(24, 3, kind, num_tokens=5).state_dict().items()}
    extra = {"scaled_s": {"s": (3, 5, 5)}, "scaled_alpha": {"s": (1,)}}.get(kind, {})
    assert shapes == {"qkv.weight": (rows * 24, 24), "qkv.bias": (rows * 24,), "proj.weight": (24, 24), "proj.bias": (24,),
                      **extra}


def test_under_autocast_the_state_stays_float32_and_six_steps_err_at_most_four_times_as_much_as_one():
    torch.manual_seed(0)
    m, x = SelfAttention(48, 3, "rpc", n_iter=6), torch.randn(2, 50, 48)
    once = SelfAttention(48, 3, "symmetric")
    once.load_state_dict(m.state_dict())
    exact, exact_once = m(x), once(x)
    with torch.autocast("cpu", torch.bfloat16):
        y, y_once = m(x), once(x)
        trace = []
        h = rpc_attention(*m.project(x)[1:], trace=trace)
    assert y.dtype == h.dtype == torch.bfloat16
    assert all(s[name].dtype == torch.float32 for s in trace for name in ("S", "K2", "L"))
    assert (y.float() - exact).norm() / exact.norm() < 4 * (y_once.float() - exact_once).norm() / exact_once.norm() < 0.02


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_dropout_acts_in_training_only_inside_and_after_the_attention(kind):
    torch.manual_seed(0)
    x, plain = torch.randn(2, 10, 24), SelfAttention(24, 3, kind, num_tokens=10)
    for how in (dict(attn_drop=0.5), dict(proj_drop=0.5)):
        m = SelfAttention(24, 3, kind, num_tokens=10, **how)
        m.load_state_dict(plain.state_dict())
        assert torch.equal(m.eval()(x), plain(x))
        assert not torch.allclose(m.train()(x), plain(x))
    dropped = m(x) == 0
    assert 0.4 < dropped.float().mean() < 0.6
    torch.testing.assert_close(m(x).abs().mean(), plain(x).abs().mean(), rtol=0.2, atol=0)


@pytest.mark.parametrize("kind", ["rpc", "rpc_asym"])
def test_key_statistics_are_those_of_the_forward_pass(kind, monkeypatch):
    torch.manual_seed(0)
    m, x = SelfAttention(24, 3, kind, lambd=0.3, causal=True), torch.randn(2, 12, 24) * 3
    stats = key_statistics(m, m, x)
    trace = []
    monkeypatch.setitem(m.rpc, "trace", trace)
    m(x)
    assert stats["nonzero_S"] == {0: [round((s["S"] != 0).float().mean().item(), 4) for s in trace]}
    assert 0 < stats["nonzero_S"][0][-1] < 1
    assert stats["mean_abs_key"] == [round(m.project(x)[1].abs().mean().item(), 4)]


def test_dropout_acts_in_the_last_step_only(monkeypatch):
    rates = []
    sdpa = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention",
                        lambda *a, dropout_p=0.0, **k: rates.append(dropout_p) or sdpa(*a, **k))
    rpc_attention(*qkv()[1:], n_iter=3, dropout_p=0.3)
    assert rates == [0.0, 0.0, 0.3]


@pytest.mark.parametrize("bad", [dict(threshold="minus"), dict(mu_dim="both"), dict(dual_sign=0), dict(mu_over="future"),
                                 dict(n_iter=0), dict(lambd=-1.0), dict(lambd=math.nan)])
def test_unknown_options_are_refused_by_name(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        rpc_attention(*qkv()[1:], **bad)


def test_tensors_of_another_shape_are_refused_by_name():
    q, k, v = qkv()
    for args, options, words in (((k[0], v[0]), {}, "k has shape"), ((k, v[:, :, :-1]), {}, "v has shape"),
                                 ((k, v), dict(q=q[0]), "q has shape")):
        with pytest.raises(ValueError, match=words + r" \(\d.*expected \(B, H, N, D\)"):
            rpc_attention(*args, **options)


@pytest.mark.parametrize("bad,word", [(dict(attn="linear"), "linear"), (dict(form="draft"), "draft"),
                                      (dict(num_heads=5), "divisible"),
                                      (dict(attn="scaled_s"), "num_tokens"),
                                      (dict(attn="scaled_s", num_tokens=5, causal=True), "causal")])
def test_module_refuses_bad_arguments_with_a_sentence(bad, word):
    with pytest.raises(ValueError, match=word):
        SelfAttention(**{"dim": 24, "num_heads": 3, **bad})
