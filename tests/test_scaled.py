"""referee/scaled.py: training with another rule, the exact S, the tables over seeds, the verdict."""

import csv
import math

import pytest
import torch

import common
from kpca import a_hat, exact_scaling, log_g
from referee import scaled
from referee.probe import RULES, Heads, attention_layers, load_model
from referee.scaled import exact_matrix, exp_centred, exp_scaling, printed_error
from referee.kernel_pca import exp_gamma
from referee.span import Layer
from test_kernel_pca import tiny_heads
from test_kpca import assert_close, draw


def trained(folder, rule, *flags, resume=False):
    start = "--num_images 64 --epochs 1 --image_size 16 --batch_size 32 --device cpu --out_dir"
    start = ["--resume"] if resume else start.split()
    scaled.main(["--train", rule, *start, str(folder), *flags])
    return load_model(folder)[0]


@pytest.mark.parametrize("rule", RULES)
def test_a_network_is_trained_with_another_rule_resumed_and_loaded_with_it(tmp_path, rule):
    model = trained(tmp_path / "run", rule, "--max_steps", "1")
    assert {layer.attn for layer in attention_layers(model)} == {rule}
    assert trained(tmp_path / "run", rule, resume=True).config.attn == rule
    assert common.load(tmp_path / "run")["step"] == 2
    with pytest.raises(ValueError, match="attn"):
        trained(tmp_path / "run", next(r for r in RULES if r != rule), resume=True)


def test_gradients_of_the_exact_scaling_go_through_values_and_keys():
    _, k, v = draw(2, 9, 4)
    k, v = k.requires_grad_(), v.requires_grad_()
    assert torch.autograd.gradcheck(lambda k, v: v - exact_scaling(k, v), (k, v))
    loss = (v - exact_scaling(k, v)).square().sum()
    assert all(g.abs().max() > 1e-3 for g in torch.autograd.grad(loss, (k, v)))


def test_exact_scaling_removes_what_the_pseudo_inverse_removes_so_the_answer_changes_no_eigen_cosine():
    heads = tiny_heads(N=12, D=4)
    S, lg = exact_matrix(heads.k), log_g(heads.k, heads.k)
    assert_close(a_hat(heads.v - S @ heads.v, lg), a_hat(heads.v, lg), 1e-9, 1e-12)
    assert_close(S @ S, S, 1e-9, 1e-12)                                           # a projection
    assert_close(exp_centred(Layer(heads))["eig_cos"]["learned"].mean(),
                 exp_gamma(Layer(heads))["eig_cos"]["learned"].mean(), 1e-9)


def test_distance_to_the_exact_s_is_zero_for_itself_and_one_for_zero_and_larger_when_permuted():
    heads = tiny_heads(N=12, D=4)
    for factor, distance in ((1.0, 0.0), (0.0, 1.0)):
        S = factor * exact_matrix(heads.k)
        found = exp_scaling(Layer(heads._replace(v=heads.raw - S @ heads.raw, S=S)))
        assert_close(found["distance"]["learned"], torch.full((1, 2, 2), distance), 1e-9, 1e-9)
        assert (found["distance"]["permuted"] > 0.1).all()


def test_printed_scaling_breaks_in_float32_where_attention_underflows_and_only_there():
    _, k, v = draw(1, 16, 8)
    assert printed_error(k.float(), v.float()) < 1e-4 and printed_error(k, v) < 1e-10
    long = 8 * k
    assert not printed_error(long.float(), v.float()).isfinite()
    found = exp_scaling(Layer(Heads(long[None, None], long[None, None], v[None, None], v[None, None], v[None])))
    assert found["broken"]["float32"] == 1


def table(folder, seeds, learned, trend=0.1, heads=None):
    """CSV files as referee.kernel_pca writes them, of a network scaled_s with given eigen-cosines."""
    m, rows, axes = scaled.CLAIM, [], []
    for seed in range(seeds):
        for step, shift in ((0, -trend), (9, 0.0)):
            for source, x in (("learned", learned + shift + 0.01 * seed), ("x W", 0.5), ("other", 0.5), ("iid", 0.3)):
                rows.append([f"scaled_s_s{seed}", step, "all", m, source, x, 0.01, 8])
                if source != "learned":
                    difference = learned + shift + 0.01 * seed - x
                    rows.append([f"scaled_s_s{seed}", step, "all", f"{m}: learned -", source, difference, 0.01, 8])
        for head, x in enumerate(heads or [learned] * 4):
            for source, y in (("learned", x), ("x W", 0.5), ("other", 0.5), ("iid", 0.3)):
                axes.append([f"scaled_s_s{seed}", 9, "0", f"{m} by head", source, head + 1, y, 0.01])
    head = ["run", "step", "layer", "measure", "source"]
    for name, header, found in (("gamma", [*head, "mean", "se", "images"], rows),
                                ("capture", [*head, "mean", "se", "images"], rows),
                                ("gamma_axes", [*head, "axis", "mean", "se"], axes)):
        with open(folder / f"{name}.csv", "w", newline="") as f:
            csv.writer(f).writerows([header, *found])


@pytest.mark.parametrize("learned, trend, heads, words", [
    (0.7, 0.1, None, "the claim holds"),
    (0.7, -0.1, None, "in between"),                                              # it falls
    (0.7, 0.1, [0.9, 0.55, 0.55, 0.55], "in between"),                            # in a quarter of the heads
    (0.5, 0.1, None, "in between"),                                               # noise is beaten
    (0.29, 0.1, None, "the claim does not hold")])
def test_verdict_follows_the_rule(monkeypatch, tmp_path, capsys, learned, trend, heads, words):
    table(tmp_path, 3, learned, trend, heads)
    monkeypatch.setattr(scaled, "tables", lambda *_: None)
    scaled.main(["--verdict", str(tmp_path)])
    assert f"Verdict: {words}" in capsys.readouterr().out


def test_no_verdict_without_the_network_before_training(tmp_path, monkeypatch):
    table(tmp_path, 1, 0.7)
    monkeypatch.setattr(scaled, "tables", lambda *_: None)
    rows = (tmp_path / "gamma.csv").read_text().splitlines(keepends=True)
    (tmp_path / "gamma.csv").write_text("".join(row for row in rows if "_s0,0," not in row))
    with pytest.raises(ValueError, match="gamma.csv: no step 0 of scaled_s"):
        scaled.verdict(tmp_path)


def test_intervals_are_over_seeds_and_of_one_seed_over_images(tmp_path, capsys):
    table(tmp_path, 3, 0.6)
    scaled.tables(tmp_path, "gamma", scaled.CLAIM)
    out = capsys.readouterr().out
    half = 4.303 * 0.01 / math.sqrt(3)
    assert f"+0.1100 (+{0.11 - half:.4f} to +{0.11 + half:.4f})" in out and "0.6100 ± 0.0100" in out
    table(tmp_path, 1, 0.6)
    scaled.tables(tmp_path, "gamma", scaled.CLAIM)
    assert "+0.1000 (+0.0804 to +0.1196 images)" in capsys.readouterr().out


def test_j_on_a_fixed_and_on_a_fresh_batch_is_shown_for_every_checkpoint(tmp_path, capsys):
    trained(tmp_path / "run", "exact_s", "--keep_every", "1")
    scaled.main(["--ckpt", str(tmp_path / "run"), "--untrained", "--exp", "fresh", "--images", "3"])
    lines = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| run ")]
    rows = [line for line in lines if "fixed" not in line[3]]
    assert [int(row[2]) for row in rows] == [0, 2] and all(row[3] != row[4] for row in rows)


def test_rules_and_rows_that_are_not_there_are_named():
    with pytest.raises(common.InputError, match="--train magic: expected one of exact_s"):
        scaled.main(["--train", "magic"])
    with pytest.raises(common.InputError, match="nowhere.*no such file"):
        scaled.main(["--verdict", "nowhere"])
