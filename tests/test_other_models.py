"""The snippets of docs/other_models.md run as printed, each with its library."""

import re
import subprocess

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import eval_robust
from attention import rpc_attention, softmax_attention
from data.shapes import load_shapes
from fixtures import ROOT
from robust.adaptive import pap_steps
from runs import call

PAGE = (ROOT / "docs/other_models.md").read_text()
EXAMPLES = ROOT / "docs/examples"


def section(title, language="python"):
    """Return the code blocks of a section of the page."""
    text = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)


def executed(*blocks):
    """Execute these blocks; return the names that they define."""
    names = {}
    for block in blocks:
        exec(block, names)
    return names


def train_a_step(model, loss):
    """Check that one step of SGD with a gradient of every parameter lowers the loss."""
    before = loss_of(model, loss)
    model.train()
    loss().backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 1e-3 * p.grad
    assert loss_of(model, loss) < before


def loss_of(model, loss):
    """Return the loss without dropout."""
    model.eval()
    with torch.no_grad():
        return loss().item()


def reads_the_future(model, tokens):
    """Return whether outputs (B, N, C) of the first half depend on tokens of the second half."""
    other, half = tokens.clone(), tokens.shape[1] // 2
    other[:, half:] = tokens[:, half:].flip(1) + 1
    with torch.no_grad():
        a, b = model(tokens), model(other)
    assert not torch.allclose(a[:, half:], b[:, half:])
    return not torch.allclose(a[:, :half], b[:, :half], atol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padding", [slice(0, 3), slice(4, None)], ids=["left", "right"])
def test_padding_changes_no_other_token(causal, padding):
    k, v = torch.randn(2, 3, 2, 9, 8, generator=torch.Generator().manual_seed(0)).double()
    keep = torch.ones(3, 9, dtype=torch.bool)
    keep[1, padding] = False
    k.requires_grad_()
    h = rpc_attention(k, v, causal=causal, keep=keep)
    for i, real in enumerate(keep):
        alone = rpc_attention(k[i:i + 1, :, real], v[i:i + 1, :, real], causal=causal)
        torch.testing.assert_close(h[i, :, real], alone[0], atol=1e-10, rtol=0)
    h.transpose(1, 2)[keep].square().sum().backward()
    assert k.grad.isfinite().all() and (k.grad.transpose(1, 2)[~keep] == 0).all()


def test_some_heads_get_the_numbers_of_all():
    k, v = torch.randn(2, 3, 4, 9, 8, generator=torch.Generator().manual_seed(0)).double()
    whole = rpc_attention(3 * k, v)
    half = rpc_attention(3 * k[:, :2], v[:, :2], mu_dim="head", lambd=4.0 * 4)
    torch.testing.assert_close(half, whole[:, :2], atol=1e-12, rtol=0)
    assert not torch.allclose(rpc_attention(3 * k[:, :2], v[:, :2]), half)


# --- nanoGPT --------------------------------------------------------------------------------------

NANO = """import torch
import torch.nn as nn
from torch.nn import functional as F

class LayerNorm(nn.Module):
    pass

class CausalSelfAttention(nn.Module):
    # a stand-in for nanoGPT's class of this name, with its call of attention
    def __init__(self, n_embd, n_head, dropout):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.n_head, self.dropout = n_head, dropout

    def forward(self, x):
        q, k, v = self.c_attn(x).unflatten(2, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4)
        if True:
            # efficient attention using Flash Attention CUDA kernels
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=\
self.dropout if self.training else 0, is_causal=True)
        else:
            y = None
        return self.c_proj(y.transpose(1, 2).flatten(2))
"""


def test_nanogpt_trains_and_reads_no_future(tmp_path):
    (tmp_path / "model.py").write_text(NANO)
    subprocess.run(["git", "apply", "-"], input=section("nanoGPT", "diff")[0], cwd=tmp_path,
                   text=True, check=True)
    torch.manual_seed(0)
    model = executed((tmp_path / "model.py").read_text())
    layer, x = model["CausalSelfAttention"](16, 2, 0.1), torch.randn(2, 12, 16)
    train_a_step(layer, lambda: (layer(x) - x).square().mean())
    assert not reads_the_future(layer.eval(), x)
    q, k, v = layer.c_attn(x).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    h = rpc_attention(k, v, causal=True)
    torch.testing.assert_close(layer(x), layer.c_proj(h.transpose(1, 2).flatten(2)))


# --- timm -----------------------------------------------------------------------------------------

def test_timm_trains_keeps_weights_and_rejects_masks():
    timm = pytest.importorskip("timm")
    rpc = executed(*section("timm"))["RPC"]
    torch.manual_seed(0)
    how = dict(num_classes=3, img_size=32, patch_size=8, depth=2)
    plain, model = (timm.create_model("vit_tiny_patch16_224", **how, **more)
                    for more in ({}, {"attn_layer": rpc}))
    model.load_state_dict(plain.state_dict())
    images, labels = torch.rand(4, 3, 32, 32), torch.tensor([0, 1, 2, 0])
    assert not torch.allclose(plain.eval()(images), model.eval()(images), atol=1e-4)
    train_a_step(model, lambda: F.cross_entropy(model(images), labels))
    with torch.no_grad():
        before = plain.eval()(images)
        plain.blocks[0].attn.__class__ = rpc
        assert not torch.allclose(plain(images), before, atol=1e-4)
    with pytest.raises(ValueError, match="attn_mask"):
        model.blocks[0].attn(torch.randn(1, 4, 192), attn_mask=torch.zeros(4, 4))


# --- transformers ---------------------------------------------------------------------------------

@pytest.fixture
def transformers():
    found = pytest.importorskip("transformers")
    found.snippet = executed("\n".join(section("transformers")))
    torch.manual_seed(0)
    return found


def language_model(transformers, name, attention="rpc", **settings):
    """Return a small causal language model in eval mode: a function of tokens, and the model."""
    usual = dict(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                 bos_token_id=1, eos_token_id=2, pad_token_id=None)
    config = getattr(transformers, f"{name}Config")(**usual | settings)
    head = {"GPT2": "LMHeadModel", "Bert": "LMHeadModel"}.get(name, "ForCausalLM")
    family = getattr(transformers, name + head)
    model = family._from_config(config, attn_implementation=attention).eval()
    return lambda tokens, **more: model(tokens, use_cache=False, **more).logits, model


def test_transformers_gpt2_reads_no_future_and_generates(transformers):
    run, model = language_model(transformers, "GPT2")
    tokens = torch.randint(49, (2, 12))
    assert not reads_the_future(run, tokens)
    train_a_step(model, lambda: model(tokens, labels=tokens, use_cache=False).loss)
    longer = model.eval().generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False,
                                   max_new_tokens=3, min_new_tokens=3, use_cache=False)
    assert torch.equal(longer[:, -1], run(longer[:, :-1])[:, -1].argmax(-1))


FULL = torch.ones(2, 1, 12, 12, dtype=torch.bool)
TREE, PREFIX = FULL.tril(), FULL.tril()
TREE[0, 0, 9, 4], PREFIX[..., :4, :4] = False, True
MLP = dict(num_key_value_heads=4, intermediate_size=64)
EXPERTS = dict(num_local_experts=2, num_experts_per_tok=1)
CROSS = dict(encoder_hidden_states=torch.randn(2, 12, 32))              # as long as the tokens
DECODER = dict(d_model=32, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=32,
               is_decoder=True, add_cross_attention=True, pad_token_id=0)
PACKED = dict(cu_seq_lens_q=torch.tensor([0, 6, 12], dtype=torch.int32))
REFUSED = [                                 # family, settings, arguments of the call, words
    *(("GPT2", {}, dict(attention_mask=mask), "prefixes and other masks") for mask in (
        FULL, PREFIX, TREE, torch.zeros(2, 1, 12, 12), FULL.tril().float())),
    ("Bert", dict(intermediate_size=64), dict(attention_mask=FULL.tril()), "causal"),
    ("Llama", MLP | dict(num_key_value_heads=2), {}, "grouped queries"),
    ("Llama", MLP, PACKED, "passes cu_seq_lens_q"),
    ("Gemma2", dict(MLP, head_dim=8), {}, "softcap"),
    ("GptOss", dict(MLP, head_dim=8, **EXPERTS), {}, "s_aux"),
    ("Mistral", dict(MLP, sliding_window=4), {}, "windows"),
    ("GPT2", dict(add_cross_attention=True), CROSS, "no cross-attention"),
    ("Bert", dict(DECODER, intermediate_size=64), CROSS, "no cross-attention"),
    *((name, DECODER, CROSS, "no cross-attention") for name in ("Bart", "MBart", "Pegasus"))]


@pytest.mark.parametrize("name, settings, given, words", REFUSED)
def test_transformers_refuses_what_it_does_not_compute(transformers, name, settings, given, words):
    run, _ = language_model(transformers, name, **settings)
    with pytest.raises(ValueError, match=words):
        run(torch.randint(3, 49, (2, 12)), **given)


def test_transformers_refuses_caches_and_packing(transformers):
    tokens = torch.randint(3, 49, (2, 12))
    run, gpt = language_model(transformers, "GPT2")
    with pytest.raises(ValueError, match="use_cache=False"):
        gpt.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=3)
    with pytest.raises(ValueError, match="packing"):     # the mask appears in train mode only
        gpt.train()
        run(tokens, position_ids=torch.arange(6).repeat(2)[None].expand(2, -1))


def test_transformers_takes_usual_masks_and_keywords(transformers):
    tokens = torch.randint(3, 49, (2, 12))
    run, model = language_model(transformers, "Llama", "rpc_asym", **MLP | dict(num_key_value_heads=2))
    assert not reads_the_future(run, tokens)
    train_a_step(model, lambda: model(tokens, labels=tokens, use_cache=False).loss)
    run, _ = language_model(transformers, "Llama", **MLP)
    usual = dict(output_attentions=False, num_items_in_batch=3, cu_seq_lens_q=None)
    assert torch.equal(run(tokens, **usual), run(tokens))
    run, _ = language_model(transformers, "GPT2")
    torch.testing.assert_close(run(tokens, attention_mask=FULL.tril()), run(tokens))


@pytest.mark.parametrize("name", ["Bert", "Blip2Vision", "Dinov2", "GPT2", "LayoutLM", "Llama", "MarkupLM",
                                  "OPT", "Splinter", "ViT"])
def test_transformers_families_call_it_with_their_own_mask(transformers, name, monkeypatch):
    """With softmax attention in place of PAP, each family equals its own attention, also with padding."""
    sizes = dict(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=4, intermediate_size=64, ffn_dim=64, word_embed_proj_dim=32,
                 image_size=32, patch_size=8, pad_token_id=0)
    config = getattr(transformers, f"{name}Config")
    config = config(**{k: v for k, v in sizes.items() if hasattr(config(), k)})
    model = getattr(transformers, f"{name}Model")._from_config(config, attn_implementation="eager")
    inputs, shown, calls = dict(pixel_values=torch.rand(2, 3, 32, 32)), slice(None), []
    if hasattr(config, "vocab_size"):
        shown = torch.ones(2, 12, dtype=torch.bool)
        shown[0, 8:] = False
        inputs = dict(input_ids=torch.randint(2, 50, (2, 12)), attention_mask=shown.long())

    def softmax(k, v, q, dropout_p, **masks):
        calls.append(q)
        return softmax_attention(q, k, v, **masks)
    monkeypatch.setitem(transformers.snippet, "rpc_attention", softmax)
    expected = model.eval()(**inputs).last_hidden_state
    model.set_attn_implementation("rpc_asym")
    found = model(**inputs).last_hidden_state
    torch.testing.assert_close(found[shown], expected[shown], atol=1e-5, rtol=1e-4)
    assert len(calls) == 2


# --- PyTorch --------------------------------------------------------------------------------------

@pytest.fixture
def encoder():
    """Return two encoder layers with RPC-Attention in eval mode."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    for layer in model.layers:
        layer.self_attn.__class__ = executed(*section("PyTorch"))["RPC"]
    return model


def test_encoder_layers_train_and_evaluate_rpc(encoder):
    x = torch.randn(2, 10, 32)
    with torch.no_grad():
        attention = encoder.layers[0].self_attn
        qkv = F.linear(x, attention.in_proj_weight, attention.in_proj_bias)
        _, k, v = qkv.unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        h = attention.out_proj(rpc_attention(k, v).transpose(1, 2).flatten(2))
        torch.testing.assert_close(attention(x, x, x)[0], h)
        evaluated = encoder(x)
    torch.testing.assert_close(encoder.train()(x), evaluated)       # no fast path
    train_a_step(encoder, lambda: (encoder(x) - x).square().mean())


def test_encoder_layers_take_causal_and_padding_masks(encoder):
    x, mask = torch.randn(2, 10, 32), nn.Transformer.generate_square_subsequent_mask(10)
    assert not reads_the_future(lambda x: encoder(x, mask=mask), x)
    padding = torch.zeros(2, 10, dtype=torch.bool)
    padding[0, 7:] = True
    padded = encoder(x, src_key_padding_mask=padding)
    torch.testing.assert_close(padded[0, :7], encoder(x[:1, :7])[0], atol=1e-5, rtol=1e-4)


def test_encoder_layers_reject_other_masks_and_settings(encoder):
    x, attention = torch.randn(2, 10, 32), encoder.layers[0].self_attn
    later = torch.ones(10, 10, dtype=torch.bool).triu(1)
    window = later | later.T.roll(-2, 1)
    for how, word in ((dict(attn_mask=torch.zeros(10, 10)), "causal"),
                      (dict(attn_mask=window, is_causal=True), "causal"),
                      (dict(attn_mask=-0.5 * later), "0 and -inf"),
                      (dict(key_padding_mask=torch.full((2, 10), -0.5)), "0 and -inf")):
        with pytest.raises(ValueError, match=word):
            attention(x, x, x, **how)
    with pytest.raises(ValueError, match="one input"):
        attention(x, x + 1, x + 1)
    for how, word in ((dict(add_bias_kv=True), "add_bias_kv"), (dict(kdim=32, vdim=8), "no kdim"),
                      (dict(add_zero_attn=True), "add_zero_attn")):
        with pytest.raises(ValueError, match=word):
            type(attention)(32, 4, batch_first=True, **how)(x, x, x)


# --- evaluation -----------------------------------------------------------------------------------

@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_evaluator_attacks_the_examples(library, tmp_path, monkeypatch):
    pytest.importorskip(library)
    source = (EXAMPLES / f"{library}_rpc.py").read_text()
    snippet = re.search(r"^(?:class|def) .*?(?=\n\n)", section(library)[0], re.M | re.S)[0]
    assert snippet in source
    monkeypatch.setattr(eval_robust, "load_part", lambda part, flags, device, classes:
                        load_shapes("test", 9, flags.image_size))
    names = executed(source)
    call(names["main"], "--limit 2 --measures clean adaptive_pgd --eps 2/255 --steps 1 "
         "--device cpu --out_dir", [tmp_path])
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 2
    model = names["build"]().eval()
    assert pap_steps(model, torch.rand(1, 3, 32, 32)) == 4     # adaptive attacks change this PAP
