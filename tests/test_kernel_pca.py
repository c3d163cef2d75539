"""studies/kernel_pca.py, probe.py, plot.py: golden numbers, theory, capture, the command, figures."""

import csv
import importlib
import io
import math
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import asdict

import numpy as np
import pytest
import torch
from torch import nn

import common
from data import images as data, shapes
import train_cls
from attention import ATTENTIONS, SelfAttention
from conftest import ROOT
from kpca import (a_hat, attend, basis, eigen_cosine, exact_scaling, kernel_pca, kernel_projections, log_g,
                  log_gram, log_kernel, log_phi2, projection_loss, theoretical_values)
from lm import LM, LMConfig
from studies import kernel_pca as study
from studies.kernel_pca import EXPERIMENTS, Layer, eigenvalue_statistics, measure
from studies.probe import (Heads, attention_replaced, capture, load_model, standardise, untrained)
from studies.published_scores import random_heads
from studies.span import (explained_variance, key_span, principal_axes, query_share, restrict,
                          value_axes)
from studies.truncate import TRUNCATIONS, truncated
from test_kpca import assert_close, cases, draw, sweep
from vit import SIZES, ViT, ViTConfig


def check_heads(z):
    """Every quantity of a case of kpca_small or kpca_vit."""
    q, k, v, d = z["q"], z["k"], z["v"], int(z["dv"])
    axes, lp, h = kernel_pca(k), log_phi2(q, k), attend(q, k, v)
    assert_close(axes.log_g, z["log_g"], 1e-10)
    assert_close(log_g(q, k), z["log_gq"], 1e-10)
    assert_close(axes.c[0], z["log_scale"], 1e-10)
    assert int(axes.rank) == int(z["rank"])
    mu = z["mu_scaled"]
    assert_close(axes.mu[:len(mu)], mu, 1e-6, 1e-9 * float(mu[0]))
    assert_close(lp, z["log_phi2"], 1e-10)
    assert_close(h.square().sum(-1), z["h2"], 1e-10)
    terms = projection_loss(lp, h)
    for ours, theirs in (("J", "jproj_signed"), ("phi2", "phi2_mean"), ("h2", "h2_mean"),
                         ("rel_phi", "rel_phi_of_means"), ("rel_h", "rel_h_of_means")):
        assert_close(terms[ours], z[theirs], 1e-10)
    assert_close((lp.exp() - h.square().sum(-1)).abs().mean(), z["jproj_abs"], 1e-10)
    V = theoretical_values(axes, d)
    assert_close(attend(q, k, V).square().sum(-1), z["h2_kpca"])
    assert_close(attend(q, k, V * (axes.mu[:d] / axes.c.exp()).sqrt()).square().sum(-1), z["h2_kpca_unit"])
    span = key_span(q, k)
    Q, u = basis(value_axes(span, v)), principal_axes(span)[:d].mT
    assert_close(query_share(span), z["frac_span"])
    assert_close(query_share(span, Q), z["frac_v"])
    assert_close(query_share(span, u), z["frac_kpca"])
    assert_close(explained_variance(span, Q), z["ev_v"])
    assert_close(explained_variance(span, u), z["ev_best"])
    assert_close(axes.mu[:d].sum() / axes.mu.sum(), z["ev_best"])
    g = eigen_cosine(axes, a_hat(v, axes.log_g))
    assert_close(g["eig_cos"], z["gamma_cos"])
    assert_close(g["rho"] / len(k), z["gamma_rayleigh_scaled"])
    assert_close(g["wstd"], z["gamma_wstd_scaled"])
    assert_close(g["wstd/lambda"], z["gamma_wstd_scaled"] / z["gamma_rayleigh_scaled"])
    gv = a_hat(v, axes.log_g, scaled=True)
    assert_close(gv.sum(-2).abs() / gv.abs().sum(-2), z["solvability"])


@pytest.mark.parametrize("case", ["explicit0", "explicit1", "gauss0", "gauss1"])
def test_small_heads_agree_with_golden(golden, case):
    z = cases(golden("kpca_small"))[case]
    check_heads(z)
    axes, d = kernel_pca(z["k"]), int(z["dv"])
    if "h" in z:
        assert_close(attend(z["q"], z["k"], z["v"]), z["h"], 1e-10)
        assert_close((log_gram(z["k"]) + axes.c).exp(), z["gram_scaled"], 1e-10)
        assert_close(axes.K, z["gram_centred_scaled"], 1e-10, 1e-12)
        U, V = axes.U[:, :d], theoretical_values(axes, d)
        assert_close(U @ U.mT, z["projector_top"], 1e-6, 1e-9)
        assert_close(V @ V.mT, z["vdot_gram"], 1e-6, 1e-9)


def test_trained_heads_agree_with_golden(golden):
    heads = [z for case, z in cases(golden("kpca_vit")).items() if case.startswith("vit_")]
    assert heads
    for z in heads:
        check_heads(z)


def test_eigenvalue_statistics_agree_with_golden(golden):
    z = cases(golden("kpca_vit"))["eigstats"]
    for k, name in ((z["k"], "stats"), (standardise(z["k"]), "stats_standardised")):
        axes = kernel_pca(k)
        mu = ((-axes.c).exp() * axes.mu)[..., :32].mean((0, 1))
        assert_close(torch.stack(list(eigenvalue_statistics(mu).values())), z[name])
    assert_close((-log_g(z["k"], z["k"]).amin(-1)).exp().flatten(), z["bound"], 1e-10)


def test_scaling_and_truncation_agree_with_golden(golden):
    z = cases(golden("kpca_small"))
    s, t = z["scaled"], z["truncation"]
    assert_close(exact_scaling(s["k"][None, None], s["v"][None, None])[0, 0], s["S"] @ s["v"], 1e-10, 1e-12)
    assert_close(s["v"] - exact_scaling(s["k"][None, None], s["v"][None, None])[0, 0], s["IminusS_v"], 1e-10, 1e-12)
    q, k, v, d = t["q"], t["k"], t["v"], int(t["dv"])
    axes = kernel_pca(k)
    span = key_span(q, k)
    u = principal_axes(span)
    for r, name in ((d, "dv"), (len(k) - 1, "full")):
        assert_close(restrict(q, k, v, span, u[:r]), t[f"h_strict_{name}"], 1e-6, 1e-9)
        assert_close(restrict(q, k, v, span, u[:r], affine=True), t[f"h_affine_{name}"], 1e-6, 1e-9)
        offset = kernel_projections(k, k, axes, r).mean(-2)
        assert_close(offset.abs(), t[f"b_offset_abs_{name}"], 1e-6, 1e-9)


@sweep
def test_kernel_pca_has_no_negative_loss_and_the_most_variance(seed, N, D, size):
    q, k, v = draw(seed, N, D, size=size)
    axes = kernel_pca(k)
    d = min(D, int(axes.rank))
    V, lp = theoretical_values(axes, d), log_phi2(q, k)
    h = attend(q, k, V)
    assert projection_loss(lp, h)["J"] >= 0 and (h.square().sum(-1) <= lp.exp() * (1 + 1e-9)).all()  # Bessel
    span = key_span(q, k)
    best = axes.mu[:d].clamp(min=0).sum() / axes.mu.clamp(min=0).sum()
    assert_close(explained_variance(span, basis(value_axes(span, V))), best, 1e-6)  # EV(V) is the best
    assert explained_variance(span, basis(value_axes(span, v[:, :d]))) <= best * (1 + 1e-9)
    frac = query_share(span, basis(value_axes(span, V)))
    assert_close(frac, h.square().sum(-1) / lp.exp(), 1e-6, 1e-9)
    assert (query_share(span, basis(value_axes(span, v))) <= query_share(span) + 1e-9).all()
    assert (query_share(span) <= 1 + 1e-9).all()


@sweep
def test_gauge_free_measures_ignore_any_invertible_map_of_the_values(seed, N, D, size):
    q, k, v = draw(seed, N, D, size=size)
    v = v[:, :3]
    R = torch.randn(v.shape[1], v.shape[1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    span = key_span(q, k)
    a, b = (basis(value_axes(span, x)) for x in (v, v @ R))
    assert_close(explained_variance(span, a), explained_variance(span, b), 1e-8)
    assert_close(query_share(span, a), query_share(span, b), 1e-7, 1e-12)


@pytest.mark.parametrize("size", [0.5, 1.0, 2.0, 3.0])
def test_all_axes_and_the_constant_row_give_attention_back_also_where_axes_are_not_resolved(size):
    q, k, v = draw(3, 24, 8, size=size)
    axes = kernel_pca(k)
    span = key_span(q, k)
    h = attend(q, k, v)
    assert_close(restrict(q, k, v, span, principal_axes(span)[:-1], affine=True), h, 1e-6, 1e-6)
    strict = restrict(q, k, v, span, principal_axes(span)[:-1])
    assert (strict - h).abs().max() > 0.01                                        # without the row
    assert size < 3 or axes.rank < 23


def test_axes_are_orthonormal_and_reach_the_most_variance():
    q, k, _ = draw(5)
    axes = kernel_pca(k)
    V = theoretical_values(axes, 8)
    assert_close(V.mT @ log_kernel(k, k).exp() @ V, torch.eye(8, dtype=torch.float64), 0, 1e-10)
    assert_close(attend(q, k, V), kernel_projections(q, k, axes, 8), 1e-9, 1e-12)
    span = key_span(q, k)
    assert_close(explained_variance(span, principal_axes(span)[:8].mT), axes.mu[:8].sum() / axes.mu.sum(), 1e-9)


@pytest.mark.parametrize("ratio", [50, 500, 5000])
def test_everything_stays_finite_for_very_long_keys(ratio):
    q, k, v = draw(7, 20, 8, batch=(2, 3))
    for t in (q, k):
        t *= (ratio * math.sqrt(8) / t.square().sum(-1).amax()).sqrt()
    heads = Heads(q, k, v, v, v.transpose(1, 2).flatten(2))
    layer = Layer(heads, "0")
    assert (layer.axes.rank < 19).all() == (ratio >= 500)                         # fewer axes than asked: it goes on
    for key, t in measure([layer], EXPERIMENTS).items():
        assert np.isfinite(t).all() or "by axis" in key[1], key
    for how in TRUNCATIONS:
        assert truncated(heads, how, 4).isfinite().all(), how


def tiny_heads(B=2, H=2, N=6, D=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, B, H, N, D, generator=g, dtype=torch.float64)
    return Heads(q, k, v, v, torch.randn(B, N, H * D, generator=g, dtype=torch.float64))


def test_exact_kernel_pca_has_eigen_cosine_one_in_any_gauge_and_noise_keeps_its_own():
    heads = random_heads()
    k = heads.k[None]
    R = torch.randn(16, 16, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    V = theoretical_values(kernel_pca(k), 16)[0]
    cosine = {}
    for name, v in (("KPCA", V), ("KPCA turned", V @ R), ("noise", heads.v), ("noise turned", heads.v @ R)):
        found = measure([Layer(heads._replace(v=v, raw=v))], {"gamma": EXPERIMENTS["gamma"]})
        cosine[name] = found["gamma", "eig_cos", "learned", ""]
        assert_close(found["gamma", "eig_cos", "KPCA", ""], np.ones(4), 1e-9)
    assert_close(cosine["KPCA"], np.ones(4), 1e-9)
    assert_close(cosine["KPCA turned"], np.ones(4), 1e-9)
    assert_close(cosine["noise turned"], cosine["noise"], 1e-9)
    assert cosine["noise"].max() < 0.9


@pytest.mark.parametrize("experiment", sorted(EXPERIMENTS.keys() - {"eigstats"}))
def test_another_heads_values_are_a_null_of_every_experiment(experiment):
    heads = tiny_heads(H=3)
    found = measure([Layer(heads)], {experiment: EXPERIMENTS[experiment]})
    moved = measure([Layer(heads._replace(v=heads.v.roll(1, 1), raw=heads.v.roll(1, 1)))],
                    {experiment: EXPERIMENTS[experiment]})
    compared = [key[1] for key in found if key[2] == "other" and "learned -" not in key[1]]
    assert compared
    for m in compared:
        if m not in ("h2", "J", "rel_phi", "rel_h", "above"):                      # |v| is another head's there
            assert_close(found[experiment, m, "other", ""], moved[experiment, m, "learned", ""], 1e-9)
    for key, t in found.items():
        if key[1].endswith(": learned -"):
            m = key[1].removesuffix(": learned -")
            difference = found[experiment, m, "learned", ""] - found[experiment, m, key[2], ""]
            assert_close(t, difference, 1e-9, 1e-12)
    assert "other" not in Layer(tiny_heads(H=1)).values


@pytest.mark.parametrize("size", [2, 4, 6, 8])
def test_restriction_is_attention_to_v_v_t_e_v_and_stays_bounded_for_long_keys(size):
    q, k, v = draw(3, 24, 8, size=size)
    span, axes = key_span(q, k), kernel_pca(k)
    h = restrict(q, k, v, span, principal_axes(span)[:3])
    V = theoretical_values(axes, 3)
    scale = axes.log_g.amax()
    E = (log_kernel(k, k) - scale).exp()
    if size < 6:
        assert_close(h, attend(q, k, V @ (V.mT @ (E * scale.exp()) @ v)), 1e-7, 1e-7)
    assert h.abs().max() < 100 * v.abs().max()


@pytest.mark.parametrize("case", ["zero keys", "v = 0", "x = 0", "D = 1", "N = 2", "N = 4", "N = 5"])
def test_degenerate_heads_are_measured_without_an_error(case):
    from studies import published_scores
    letter, _, number = case.partition(" = ")
    heads = tiny_heads(**{letter: int(number)}) if letter in "DN" else tiny_heads()
    if case == "zero keys":
        heads = heads._replace(q=0 * heads.q, k=0 * heads.k)
    if case == "v = 0":
        heads = heads._replace(v=0 * heads.v, raw=0 * heads.v)
    if case == "x = 0":
        heads = heads._replace(x=0 * heads.x)
    found = measure([Layer(heads)], EXPERIMENTS | published_scores.EXPERIMENTS)
    for m in ("EV", "frac"):
        assert np.isfinite(found["capture", m, "learned", ""]).all()
    assert not np.isinf(np.concatenate([t.ravel() for t in found.values()])).any()
    for how in TRUNCATIONS:
        assert truncated(heads, how, 1).isfinite().all()


def test_random_numbers_differ_between_layers_and_images_but_not_with_the_pieces():
    heads = tiny_heads(B=4)
    iid = {key: Layer(heads, key=key).values["iid"] for key in ((0, 0), (1, 0))}
    assert abs(torch.corrcoef(torch.stack([t.flatten() for t in iid.values()]))[0, 1]) < 0.3
    later = Layer(Heads(*(t[3:] for t in heads[:5])), key=(0, 3)).values["iid"]
    assert_close(later, iid[0, 0][:, 3:], 1e-12)
    assert abs(torch.corrcoef(iid[0, 0][0].flatten(1))[0, 1]) < 0.5


def test_nulls_of_scaled_attention_are_scaled_by_the_layers_own_matrix():
    heads = tiny_heads()
    S = 0.3 * torch.randn(1, 2, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    layer = Layer(heads._replace(v=heads.raw - S @ heads.raw, S=S))
    other = (torch.eye(6) - S) @ heads.raw.roll(1, 1)
    other = other / other.norm(dim=(-2, -1), keepdim=True) * layer.v[0].norm(dim=(-2, -1), keepdim=True)
    assert_close(layer.values["other"][0], other, 1e-9)
    assert "eig_cos, v = G a" in EXPERIMENTS["gamma"](layer)
    assert "eig_cos, v = G a" not in EXPERIMENTS["gamma"](Layer(heads))


class Wrapped(nn.Module):
    """Any module tree with attention in it will do."""

    def __init__(self, **kind):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.LayerNorm(24), SelfAttention(24, 3, **kind))

    def forward(self, x):
        return x + self.inner(x)


@pytest.mark.parametrize("kind", ATTENTIONS)
@pytest.mark.parametrize("causal", [False, True])
def test_captured_heads_reproduce_the_attention_of_every_kind(kind, causal):
    if kind == "scaled_s" and causal:
        return
    model = Wrapped(attn=kind, causal=causal, num_tokens=10).double()
    module = model.inner[1]
    if kind.startswith("scaled"):
        nn.init.normal_(module.s, std=0.3)
    x = torch.randn(2, 10, 24, dtype=torch.float64)
    heads, = capture(model, x)
    h = attend(heads.q, heads.k, heads.v, causal)
    with torch.no_grad():
        assert_close(module.proj(h.transpose(1, 2).flatten(2)), module(model.inner[0](x)), 1e-6, 1e-6)
        with attention_replaced(model, lambda heads: attend(heads.q, heads.k, heads.v, causal)):
            again = model(x)
        assert_close(again, model(x), 1e-6, 1e-6)
    assert torch.equal(heads.raw, heads.v) != kind.startswith("scaled")


def test_causal_layers_are_looked_at_on_prefixes():
    heads, = capture(Wrapped(causal=True), torch.randn(2, 12, 24))
    layer = Layer(heads, "0")
    assert [part.k.shape[-2] for part in layer.parts] == [3, 6, 12] and all(p.q.shape[-2] == 1 for p in layer.parts)
    part = layer.parts[1]
    assert_close(attend(part.q, part.k, part.v), attend(layer.q, layer.k, layer.v, True)[..., 5:6, :], 1e-10)
    found = measure([layer], EXPERIMENTS)
    assert all(t.shape[0] == 2 for t in found.values()) and ("jproj", "J", "learned", "0") in found


def test_null_values_have_the_size_of_the_learned_and_do_not_depend_on_the_batch():
    heads = random_heads(B=4)
    layer = Layer(heads, key=(2, 0))
    for name, v in layer.values.items():
        assert_close(v.norm(dim=(-2, -1)), layer.v.norm(dim=(-2, -1)).expand(v.shape[:3]), 1e-10)
    part = Layer(Heads(*(t[:2] for t in heads[:5])), key=(2, 0))
    assert_close(part.values["x W"], layer.values["x W"][:, :2], 1e-12)


def save_vit(path, attn="softmax", image_size=16, **change):
    torch.manual_seed(0)
    config = ViTConfig(image_size=image_size, patch_size=4, num_classes=10, embed_dim=24, depth=2, num_heads=3, attn=attn,
                       init="default")
    model = ViT(config)
    args = dict(data="shapes", data_dir=None, seed=0, init_from=None)
    torch.save({"task": "classification", "model": model.state_dict(), "model_config": asdict(config), "step": 7,
                "args": args, "classes": list(shapes.SHAPES), **change}, path)
    return str(path)


def run(monkeypatch, study, *argv):
    monkeypatch.setattr(sys, "argv", [study.__name__, *map(str, argv)])
    study.main()


def read(path):
    with open(path, newline="") as f:
        return list(csv.DictReader(f))


def studied(folder, attn):
    """All experiments on a small network: the folder of their tables, and what was printed."""
    ckpt, printed = save_vit(folder / "a.pt", attn), io.StringIO()
    with pytest.MonkeyPatch.context() as monkeypatch, redirect_stdout(printed):
        run(monkeypatch, study, "--ckpt", ckpt, "--images", 3, "--out_dir", folder,
            "--device", "cpu")
    return folder, printed.getvalue()


@pytest.fixture(scope="module")
def softmax_run(tmp_path_factory):
    return studied(tmp_path_factory.mktemp("softmax"), "softmax")


@pytest.mark.parametrize("attn", ["softmax", "rpc", "scaled_alpha"])
def test_command_writes_a_table_for_every_experiment_and_layer(request, tmp_path, attn):
    if attn == "softmax":
        folder, out = request.getfixturevalue("softmax_run")
    else:
        folder, out = studied(tmp_path, attn)
    for name in EXPERIMENTS:
        rows = read(folder / f"{name}.csv")
        assert f"=== {name}" in out
        shown = out.split(f"=== {name}")[1].split("===")[0]
        for layer in ("0", "1", "all"):
            assert re.search(rf"^    {layer} +\S", shown, re.M)
        for measure, layers in (("EV eta frac eig_cos", {"0", "1", "all"}), ("h2 output", {"all"})):
            mine = [r["layer"] for r in rows if r["measure"] in measure.split()]
            assert not mine or set(mine) == layers
        assert all(math.isfinite(float(r["mean"])) or r["measure"] == "eta" for r in rows), name
    rows = {(r["how"], r["r"]): float(r["accuracy"]) for r in read(folder / "truncate.csv")}
    assert rows["affine", "16"] == rows["none", "0"] and len(rows) == 3 + 3 * len(TRUNCATIONS)
    sources = {r["source"] for r in read(folder / "capture.csv") if r["measure"] == "EV"}
    assert sources == {"learned", "other", "x W", "iid", "KPCA", "best"}


def test_keys_too_long_to_resolve_all_axes_are_announced(monkeypatch, tmp_path, capsys):
    model, _ = load_model(save_vit(tmp_path / "a.pt"))
    weights = model.state_dict()
    weights["blocks.1.attn.qkv.weight"][24:48] *= 12
    ckpt = save_vit(tmp_path / "long.pt", model=weights)
    run(monkeypatch, study, "--ckpt", ckpt, "--images", 3, "--exp", "capture",
        "--out_dir", tmp_path)
    out = capsys.readouterr().out
    assert "layer 1: keys so long that float64 resolves" in out and "layer 0: keys so long" not in out


def test_command_tracks_a_training_run_and_the_figures_follow(monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    from studies import plot
    folder = tmp_path / "run"
    monkeypatch.setattr(sys, "argv", ["train_cls.py", "--num_images", "64", "--epochs", "2",
                                      "--image_size", "16", "--out_dir", str(folder), "--attn", "softmax", "--lr", "0",
                                      "--batch_size", "32", "--device", "cpu", "--set", "keep_every=1",
                                      "weight_decay=0", "min_lr=0"])
    train_cls.main()
    start, _ = untrained(common.read_checkpoint(folder), folder)
    end, _ = load_model(folder)
    for a, b in zip(start.parameters(), end.parameters()):                        # warm-up begins at 1e-6
        assert_close(a.detach(), b.detach(), 0, 1e-4)
    run(monkeypatch, study, "--ckpt", *sorted(folder.glob("*.pt")), "--untrained", "--images", 4,
        "--ranks", "2,16", "--layers", "0,3", "--out_dir", tmp_path)
    assert "over training" in capsys.readouterr().out
    assert {r["step"] for r in read(tmp_path / "jproj.csv")} == {"0", "2", "4"}   # last.pt is epoch 2 and counts once
    monkeypatch.setattr(sys, "argv", ["plot.py", "kpca", str(tmp_path)])
    plot.main()
    assert {p.stem for p in tmp_path.glob("*.png")} == set(plot.FIGURES["kpca"])
    monkeypatch.setattr(sys, "argv", ["plot.py", "kpca", str(folder)])
    with pytest.raises(SystemExit, match="no CSV"):
        plot.main()


def test_one_checkpoint_gives_every_figure_and_a_word_on_what_it_lacks(softmax_run, monkeypatch,
                                                                       tmp_path, capsys):
    pytest.importorskip("matplotlib")
    from studies import plot
    for path in softmax_run[0].glob("*.csv"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(sys, "argv", ["plot.py", "kpca", str(tmp_path)])
    plot.main()
    assert {p.stem for p in tmp_path.glob("*.png")} == set(plot.FIGURES["kpca"])
    loss, gamma = capsys.readouterr().out.splitlines()[:2]
    assert "several checkpoints" in loss and "exp losses" in loss and "exp gammas" in gamma
    figure, _ = plot.kpca_loss(tmp_path, "")
    assert [len(ax.patches) for ax in figure.axes] == [0, 2, 5, 4]                # bars: terms, frac, EV
    (tmp_path / "truncate.csv").unlink()
    monkeypatch.setitem(plot.FIGURES, "kpca", {"truncation": plot.kpca_truncation})
    plot.main()
    assert "truncation: skipped" in capsys.readouterr().out


def test_means_by_head_alone_are_no_curve_over_axes(tmp_path):
    pytest.importorskip("matplotlib")
    from studies import plot
    (tmp_path / "gamma_axes.csv").write_text("run,step,layer,measure,source,axis,mean,se\n"
                                             "a,1,0,eig_cos by head,learned,1,0.5,0.1\n")
    assert plot.kpca_gamma(tmp_path, "") == (None, "python -m studies.kernel_pca --exp gamma")


def test_plot_without_matplotlib_says_so_in_one_line(monkeypatch):
    for name in ("plot", "plot_robust", "look"):
        monkeypatch.delitem(sys.modules, f"studies.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="^error: studies.plot needs matplotlib"):
        importlib.import_module("studies.plot")


def test_deit_weights_are_recognised_by_their_shapes(monkeypatch, tmp_path):
    torch.manual_seed(0)
    model = ViT(ViTConfig(**SIZES["nano"], image_size=16, patch_size=8, num_classes=10))
    torch.save({"model": model.state_dict()}, tmp_path / "deit.pth")
    run(monkeypatch, study, "--ckpt", tmp_path / "deit.pth", "--exp", "capture", "--images", 3,
        "--out_dir", tmp_path)
    assert read(tmp_path / "capture.csv")[0]["run"] == "deit"


def test_bad_input_is_one_clear_line(monkeypatch, tmp_path):
    good, other = save_vit(tmp_path / "good.pt"), str(tmp_path / "other.pt")
    torch.save({"weights": torch.zeros(3)}, other)
    lm = save_vit(tmp_path / "lm.pt", task="segmentation")
    model = ViT(ViTConfig(image_size=16, patch_size=4, num_classes=10, embed_dim=24, depth=2, num_heads=3))
    broken = {name: t * math.nan for name, t in model.state_dict().items()}
    nan = save_vit(tmp_path / "nan.pt", model=broken)
    (tmp_path / "cifar").mkdir()
    for argv, message in (
            (["--ckpt", other], "neither a checkpoint of train_cls.py or train_lm.py nor ViT weights"),
            (["--ckpt", lm], "not a checkpoint of train_cls.py"),
            (["--ckpt", tmp_path / "none.pt"], "no checkpoint at"),
            (["--ckpt", good, "--layers", "2"], "--layers 2: expected whole numbers from 0 to 1"),
            (["--ckpt", good, "--ranks", "17"], "--ranks 17: expected whole numbers from 0 to 16"),
            (["--ckpt", good, "--data", "cifar10"], "needs --data_dir"),
            (["--ckpt", good, "--data", "cifar10", "--data_dir", tmp_path / "cifar"], "no CIFAR-10 test images"),
            (["--ckpt", nan], "not finite"),
            (["--exp", "magic"], "--exp magic: expected some of jproj"),
            (["--exp", "truncate"], "need a model"),
            (["--ckpt", other, "--untrained"], "neither")):
        monkeypatch.setattr(sys, "argv", ["kernel_pca", *map(str, argv)])
        with pytest.raises(SystemExit) as stop:
            common.run(study.main)
        assert str(stop.value.code).startswith("error: ") and message in stop.value.code, stop.value.code
        assert "\n" not in stop.value.code


def test_images_of_another_size_tokens_too_few_and_models_without_attention_are_refused(monkeypatch, tmp_path):
    model, _ = load_model(save_vit(tmp_path / "a.pt"))
    with pytest.raises(ValueError, match="expected float in"):
        capture(model, torch.rand(2, 3, 32, 32))
    with pytest.raises(ValueError, match="no attention.SelfAttention"):
        capture(nn.Linear(3, 3), torch.rand(2, 3))
    with pytest.raises(ValueError, match="at least two"):
        Layer(random_heads(N=1))


def test_help_lists_every_experiment(monkeypatch, capsys):
    with pytest.raises(SystemExit, match="0"):
        run(monkeypatch, study, "--help")
    out = capsys.readouterr().out
    assert all(name in out for name in (*EXPERIMENTS, "truncate"))


def test_a_language_model_is_measured_on_windows_of_its_test_text(tmp_path, monkeypatch, capsys):
    words = ["<eos>", *"abcdefgh"]
    torch.manual_seed(5)
    model = LM(LMConfig(len(words), context=12, embed_dim=16, depth=2, num_heads=2, mlp_dim=16, attn="rpc",
                        rpc_layers=(0,)))
    (tmp_path / "wiki.test.tokens").write_text("".join(" ".join("abcdefgh"[i % 5:][:4]) + "\n" for i in range(30)))
    common.save_checkpoint(tmp_path / "run" / "last.pt", dict(
        task="language modelling", model=model.state_dict(), model_config=asdict(model.config), step=3,
        vocab="\n".join(words), args=dict(seed=5, data_dir=str(tmp_path))))
    run(monkeypatch, study, "--ckpt", tmp_path / "run", "--images", 3, "--untrained",
        "--out_dir", tmp_path / "out")
    out = capsys.readouterr().out
    assert "3 windows of 12 tokens" in out and "truncate needs classes" in out
    start, _ = untrained(common.read_checkpoint(tmp_path / "run"), tmp_path)
    assert torch.equal(start.embed.weight, model.embed.weight)


@pytest.mark.parametrize("name", ["kernel_pca", "published_scores", "leak", "plot"])
def test_a_study_started_as_a_file_says_how_to_start_it(name):
    done = subprocess.run([sys.executable, f"studies/{name}.py"], cwd=ROOT, capture_output=True,
                          text=True)
    line = f"error: start this in the repository's folder, as: python -m studies.{name}\n"
    assert done.returncode == 1 and done.stderr == line
