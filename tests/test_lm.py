"""Compare lm.py with lmtool; test causality, probabilities of all words, and memory."""

import pytest
import torch
import torch.nn.functional as F

import lm
from attention import ATTENTIONS, Attention, symmetric_attention
from common import InputError
from lm import LM, LM_SIZES, LMConfig, chunked_nll, depends_on_later_words

SMALL = dict(context=12, embed_dim=16, depth=3, num_heads=2, mlp_dim=32)
LMTOOL = [f"lm_{output}{kind}" for output in ("full_softmax", "adaptive")
          for kind in ("", "_symmetric")]


def lmtool_model(arrays, name):
    """Return our model with the weights of the reference file `name`."""
    model = LM(LMConfig(53, 12, embed_dim=16, depth=2, num_heads=2, mlp_dim=40,
                        attn="symmetric" if "symmetric" in name else "softmax",
                        cutoffs=(8, 16, 32) if "adaptive" in name else ()))
    whole = {"word_emb.emb_layers.0.weight": "embed.weight", "crit.out_layers.0.bias": "bias",
             "crit.cluster_weight": "adaptive.cluster_weight",
             "crit.cluster_bias": "adaptive.cluster_bias"}
    part = {"dec_attn.layer_norm": "norm1", "dec_attn.kv_net": "attn.qkv",
            "dec_attn.o_net": "attn.proj", "pos_ff.layer_norm": "norm2",
            "pos_ff.CoreNet.0": "mlp.fc1", "pos_ff.CoreNet.3": "mlp.fc2"}
    state, ours = {k[3:]: v for k, v in arrays.items() if k.startswith("sd/")}, {}
    for name, value in state.items():
        if "q_net" in name or name in ("crit.out_layers.0.weight", "pos_emb.inv_freq"):
            continue
        if "kv_net" in name and name.replace("kv_net", "q_net") in state:
            value = torch.cat([state[name.replace("kv_net", "q_net")], value])
        if name.startswith("layers."):
            _, i, *middle, end = name.split(".")
            name = f"blocks.{i}.{part.get('.'.join(middle), '.'.join(middle))}.{end}"
        ours[whole.get(name, name)] = value
    model.load_state_dict(ours)
    return model


def small(seed=0, vocab_size=53, gain=1.0, **kind):
    """Build a float64 model in eval mode. gain multiplies the keys, so that S is not empty."""
    torch.manual_seed(seed)
    model = LM(LMConfig(vocab_size, **{**SMALL, **kind})).double().eval()
    for block in model.blocks:
        block.attn.qkv.weight.data *= gain
    return model


def words(B=2, T=12, vocab_size=53, seed=1):
    return torch.randint(vocab_size, (B, T), generator=torch.Generator().manual_seed(seed))


def assert_close(a, b, atol=1e-12):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


@pytest.mark.parametrize("name", LMTOOL)
def test_hidden_states_nats_and_gradients_equal_lmtools(golden, name):
    a = golden(name)
    model = lmtool_model(a, name).eval()
    hidden = model.hidden(a["tokens"].T)  # the files are time-major
    nats = model(a["tokens"].T, a["targets"].T)
    assert_close(hidden.transpose(0, 1), a["hidden"], 1e-5)
    assert_close(nats.T, a["nll"], 1e-5)
    # float32 numbers near 6.9 have steps of 5e-7
    assert_close(nats.mean().double(), a["loss"], 1e-5)
    nats.mean().backward()
    for theirs, ours in (("word_emb.emb_layers.0.weight", model.embed.weight),
                         ("layers.0.dec_attn.kv_net.weight", model.blocks[0].attn.qkv.weight),
                         ("layers.0.pos_ff.CoreNet.0.weight", model.blocks[0].mlp.fc1.weight),
                         ("layers.1.dec_attn.layer_norm.weight", model.blocks[1].norm1.weight)):
        # qkv: compare the last rows, keys and values
        assert_close(ours.grad[-len(a[f"grad/{theirs}"]):], a[f"grad/{theirs}"], 1e-5)


def test_parameter_counts_are_the_papers():
    def count(**kind):
        with torch.device("meta"):
            return sum(p.numel() for p in LM(LMConfig(267_735, **LM_SIZES["paper"],
                                                      **kind)).parameters())
    cutoffs = (20_000, 40_000, 200_000)
    assert count(cutoffs=cutoffs) == 44_018_394 and count() == 44_018_394 - 387
    assert {count(cutoffs=cutoffs, attn=attn) for attn in ("symmetric", "rpc")} == {43_756_250}


@pytest.mark.parametrize("mu_over", ["seen", "token", "all"])
def test_only_mu_over_all_tokens_reads_later_words(mu_over):
    """Test a network of PAP and symmetric layers; test_attention.py tests each attention."""
    model, seen = small(attn="rpc", rpc_layers=(0, 1), gain=50, pap=dict(mu_over=mu_over)), []
    model.embed.register_forward_hook(lambda *call: seen.append(call[-1]))
    hidden = model.hidden(words())
    grads = [torch.autograd.grad(hidden[:, t].square().sum(), seen[0], retain_graph=True)[0]
             for t in range(11)]
    assert all(g[:, t].ne(0).any() for t, g in enumerate(grads))
    later = max(g[:, t + 1:].abs().max() for t, g in enumerate(grads))
    assert later > 1e-4 if mu_over == "all" else later == 0
    assert depends_on_later_words(model) is (mu_over == "all")


def look_ahead(q, k, v, layer):
    """A masked attention that leaks: each value comes from the next word."""
    return symmetric_attention(k, v.roll(-1, 2), causal=layer.causal)


def one_maximum(q, k, v, layer):
    """Causal attention that subtracts the maximum of all scores: rounding errors, but no leak."""
    scores = k @ k.mT / k.shape[-1] ** 0.5
    weights = (scores - scores.amax((-2, -1), keepdim=True)).exp().tril()
    return weights @ v / weights.sum(-1, keepdim=True)


def leaks(size, attn="mine"):
    torch.manual_seed(0)
    model = LM(LMConfig(2000, **LM_SIZES[size], attn=attn, rpc_layers=(0,)))
    state = torch.random.get_rng_state()
    found = depends_on_later_words(model)
    assert model.training and torch.equal(state, torch.random.get_rng_state())
    return found


def test_a_missing_causal_mask_is_found(monkeypatch):
    kinds = ("softmax", "symmetric", "rpc", "rpc_asym", "scaled_alpha")
    assert not any(leaks("mini", kind) for kind in kinds)
    for mine, expected in ((lambda q, k, v, layer: symmetric_attention(k, v), True),
                           (look_ahead, True), (one_maximum, False)):
        monkeypatch.setitem(ATTENTIONS, "mine", Attention(False, mine))
        assert leaks("mini") is expected
    assert not leaks("paper")                                   # one_maximum, more rounding errors


@pytest.mark.parametrize("cutoffs", [(), (8, 16, 32), (1, 52)])
def test_probabilities_sum_to_one_and_equal_nats(cutoffs):
    model = small(cutoffs=cutoffs)
    torch.nn.init.normal_(model.bias)
    if cutoffs:
        torch.nn.init.normal_(model.adaptive.cluster_weight)
        torch.nn.init.normal_(model.adaptive.cluster_bias)
    h = torch.randn(4, 53, 16).double()
    log_p, t = model.log_probs(h), torch.arange(53).expand(4, 53)  # every word is a target
    assert log_p.shape == (4, 53, 53)
    assert_close(log_p.exp().sum(-1), torch.ones(4, 53).double())
    assert_close(model.nll(h, t), -log_p.gather(-1, t[..., None]).squeeze(-1))


@pytest.mark.parametrize("num_logits", [1, 100])
def test_chunks_keep_nats_and_gradients(num_logits, monkeypatch):
    monkeypatch.setitem(lm.CHUNK, "cpu", num_logits)
    monkeypatch.setattr(lm, "MIN_ROWS", 1)
    made, convert = [], lm.at_least_float32
    monkeypatch.setattr(lm, "at_least_float32", lambda x: made.append(x.numel()) or convert(x))
    torch.manual_seed(0)
    h, W, b = (torch.randn(*s).double().requires_grad_() for s in ((7, 4), (11, 4), (11,)))
    t, weight = torch.randint(11, (7,)), torch.randn(7).double()
    ours, plain = chunked_nll(h, W, b, t), F.cross_entropy(F.linear(h, W, b), t, reduction="none")
    assert_close(ours, plain)
    for x, y in zip(*(torch.autograd.grad(nats @ weight, (h, W, b)) for nats in (ours, plain))):
        assert_close(x, y)
    assert max(made) <= max(num_logits, 11) and sum(made) == 2 * 7 * 11    # forward, backward
    assert torch.autograd.gradcheck(lambda *x: chunked_nll(*x, t), (h, W, b))


def test_under_bf16_autocast_nats_are_float32_and_close():
    model = small(cutoffs=(8, 16, 32), attn="rpc", rpc_layers=(0, 1, 2)).float()
    t = words(seed=2)
    plain = model(words(), t)
    with torch.autocast("cpu", torch.bfloat16):
        nats, log_p = model(words(), t), model.log_probs(model.hidden(words()))
    assert nats.dtype == log_p.dtype == torch.float32
    assert_close(log_p.exp().sum(-1), torch.ones(2, 12), 1e-5)  # in bf16 it would be off by 1e-2
    assert_close(nats, plain, 0.02)
    grads = [torch.autograd.grad(x.mean(), (model.embed.weight, model.bias)) for x in (nats, plain)]
    for x, y in zip(*grads):
        assert x.dtype == torch.float32 and (x - y).norm() < 0.02 * y.norm()


GREEDY = 1e-6  # a temperature at which the likeliest word is certain


def test_greedy_text_takes_the_most_probable_words():
    model = small(attn="rpc", rpc_layers=(0,), cutoffs=(8, 16, 32))
    model.embed.weight.data *= 50                       # so that words matter more than positions
    for tokens in (words(T=9), words(T=30)):  # 30: the model reads the last 12
        text, n = model.generate(tokens, 6, GREEDY), tokens.shape[1]
        assert torch.equal(text[:, :n], tokens)
        for i in range(n, n + 6):
            log_p = model.log_probs(model.hidden(text[:, max(i - 12, 0):i]))[:, -1]
            assert torch.equal(text[:, i], log_p.argmax(-1))


def test_samples_follow_temperature_and_generator():
    model, tokens, temperature = small(), words(B=1, T=2).expand(4000, -1), 2.0
    torch.nn.init.normal_(model.bias)
    p = (model.log_probs(model.hidden(tokens[:1]))[0, -1] / temperature).softmax(-1)
    first, again = (model.generate(tokens, 1, temperature, torch.Generator().manual_seed(0))
                    for _ in range(2))
    assert (torch.bincount(first[:, -1], minlength=53) / 4000 - p).abs().max() < 0.03
    assert torch.equal(first, again)


def test_long_windows_and_unordered_cutoffs_are_errors():
    with pytest.raises(RuntimeError):
        small().hidden(words(T=13))
    for cutoffs in ((9, 5), (5, 5), (0, 5), (5, 53)):
        with pytest.raises(InputError, match="expected increasing ids from 1 to 52"):
            small(cutoffs=cutoffs)


@pytest.mark.parametrize("cutoffs", [(), (8, 16, 32)])
def test_a_target_without_a_word_is_refused(cutoffs):
    """PyTorch's default gives -100 the loss 0, which lowers the perplexity."""
    targets = words(seed=2)
    targets[:, 6:] = -100
    with pytest.raises(IndexError, match="Target -100 is out of bounds"):
        small(cutoffs=cutoffs)(words(), targets)
