"""Test studies/pretrained.py: the network, its texts, the truncation, positions and rows."""

import math

import pytest
import torch

from common import InputError
from kpca import attend, kernel_pca, kernel_projections
from studies import pretrained
from studies.span import Layer, key_span, query_coordinates
from test_kernel_pca import tiny_heads
from test_kpca import draw

CONFIG = dict(hidden_size=24, num_attention_heads=3, num_hidden_layers=2, intermediate_size=40,
              vocab_size=30, max_position_embeddings=16, layer_norm_eps=1e-12, hidden_act="gelu",
              hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def small_bert():
    """Return the weights of a small BERT with random numbers everywhere, in float64."""
    transformers = pytest.importorskip("transformers")
    model = transformers.BertModel(transformers.BertConfig(**CONFIG)).eval().double()
    g = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = 0.5 * torch.randn(parameter.shape, generator=g, dtype=torch.float64)
    return model, pretrained.Bert(model.state_dict(), CONFIG)


@torch.no_grad()
def test_network_equals_the_transformers_package():
    model, bert = small_bert()
    ids = torch.randint(30, (4, 9), generator=torch.Generator().manual_seed(1))
    theirs = model(input_ids=ids).last_hidden_state
    torch.testing.assert_close(bert(ids), theirs, atol=1e-10, rtol=0)
    heads = bert.capture(ids)
    hidden = model(input_ids=ids, output_hidden_states=True).hidden_states
    for layer, x in zip(heads, hidden):
        torch.testing.assert_close(layer.x, x, atol=1e-10, rtol=0)
    assert heads[1].q.shape == (4, 3, 9, 8) and not torch.equal(heads[1].q, heads[1].k)


def test_share_is_the_projection_on_the_span():
    q, k, v = draw(0, N=12, D=4)
    z = query_coordinates(key_span(k), q, k)
    size = q.shape[-1] ** 0.5

    def psi(x, y):                                          # psi(x).psi(y)
        return (-torch.cdist(x, y).square() / (2 * size)).exp()

    # The part of psi(q) in the span of all keys has the length b^T G^-1 b.
    b = psi(q, k)
    expected = (b * torch.linalg.solve(psi(k, k), b.mT).mT).sum(-1)
    torch.testing.assert_close(z.square().sum(-1), expected, atol=1e-8, rtol=0)
    of_keys = query_coordinates(key_span(k), k, k).square().sum(-1)     # keys lie in their span
    torch.testing.assert_close(of_keys, torch.ones(12, dtype=torch.float64), atol=1e-8, rtol=0)
    share = pretrained.exp_share(Layer(tiny_heads(N=12)))["share"]
    assert all((x <= share["ceiling"] + 1e-9).all() for x in share.values())


def test_projection_on_all_axes_is_the_attention():
    q, k, v = draw(0, N=12, D=4)
    projection = pretrained.Projection(q, k)
    everything = torch.eye(12, dtype=torch.float64)
    h = attend(q, k, v)
    torch.testing.assert_close(projection.attend(v, everything), h, atol=1e-8, rtol=1e-6)
    # On the top axes, the output is the sum over axes of (phi(q).u) (u.w).
    r = 3
    axes = kernel_pca(k)
    g = axes.log_g.exp()[:, None]
    w = kernel_projections(k, k, axes, r).mT @ (g * v)
    expected = kernel_projections(q, k, axes, r) @ w
    part = projection.attend(v, projection.rows("top", r))
    torch.testing.assert_close(part, expected, atol=1e-8, rtol=1e-6)
    for which in ("top", "bottom", "random"):
        rows = projection.rows(which, r)
        torch.testing.assert_close(rows @ rows.mT, torch.eye(r, dtype=torch.float64))


def test_attention_of_keys_needs_a_constant_row():
    _, k, v = draw(1, N=12, D=4)
    projection = pretrained.Projection(k, k)                # symmetric: queries are keys
    h = attend(k, k, v)
    part = projection.attend(v, projection.rows("top", 11))
    assert (part - h).norm() > 0.1 * h.norm()
    full = pretrained.with_constant(part, h)
    torch.testing.assert_close(full, h, atol=1e-8, rtol=1e-6)


class Words:
    """A tokenizer with one token per word."""

    def encode_batch(self, lines, add_special_tokens):
        assert not add_special_tokens
        return [type("Encoded", (), dict(ids=[len(word) for word in line.split()]))
                for line in lines]

    def token_to_id(self, token):
        return {"[CLS]": 101, "[SEP]": 102}[token]


def test_texts_have_one_length_and_one_order(tmp_path):
    lines = [" = Title = ", " "] + [" ".join(["word"] * n + ["a @-@ b <unk>"])
                                    for n in (10, 150, 200, 130)]
    path = tmp_path / "texts"
    path.write_text("\n".join(lines), encoding="utf-8")
    paragraphs = pretrained.read_paragraphs(path)
    assert len(paragraphs) == 4 and paragraphs[0].endswith("word a-b [UNK]")
    ids = pretrained.tokenise(Words(), paragraphs, 64, 3)
    assert ids.shape == (3, 64) and (ids[:, 0] == 101).all() and (ids[:, -1] == 102).all()
    longer = pretrained.tokenise(Words(), paragraphs, 128, 3)
    assert torch.equal(longer[:, :63], ids[:, :63])
    with pytest.raises(InputError, match="has 3 paragraphs"):
        pretrained.tokenise(Words(), paragraphs, 64, 4)


def test_steps_without_finite_gradient_are_skipped():
    from studies.kernel_pca import fit_values
    layer = Layer(tiny_heads(N=12, D=3))

    def score(layer, v):                            # the gradient of head 1 is not finite
        bad = torch.tensor([1.0, math.inf], dtype=torch.float64)
        return (v.square().sum((-2, -1)) * bad).clamp(max=1e9)

    skipped = []
    W = fit_values(score, [layer], 3, skipped)
    assert W.isfinite().all() and {head for _, head in skipped} == {1} and len(skipped) == 3
