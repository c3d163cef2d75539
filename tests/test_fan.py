"""Compare fan.py with the published models; test the scripts with a FAN."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import common
import eval_robust
import peers
import train_cls
from fixtures import SHARED
from fan import FAN, FAN_SIZES, BatchNorm, FANConfig, fan_from_checkpoint
from processes import group
from studies import probe
from runs import call, log

SMALL = dict(image_size=64, embed_dim=32, depth=2, num_heads=4, num_classes=10)
PAP = dict(n_iter=3, lambd=0.2)
KINDS = {"softmax": (dict(attn="softmax"), {}), "symmetric": (dict(attn="symmetric"), {}),
         "rpc": (dict(attn="rpc", pap=PAP), {0: PAP}),
         "rpc everywhere": (dict(attn="rpc", rpc_layers=(0, 1), pap=PAP), {0: PAP, 1: PAP})}


def small(**kind):
    torch.manual_seed(0)
    return FAN(FANConfig(**{**SMALL, **kind})).eval()


def reference_model(weights, pos_features, dtype, **kind):
    """Build our model with the reference's weights and position code; also return the weights."""
    m = small(mean=(0, 0, 0), std=(1, 1, 1), **kind)
    weights = {k: v for k, v in weights.items() if k in m.state_dict()}
    m.load_state_dict(weights)
    m.pos_embed.code = pos_features.T[None, :, :, None]
    return m.to(dtype), {k: v.to(dtype) for k, v in weights.items()}


def part(arrays, prefix):
    return {k[len(prefix):]: v for k, v in arrays.items() if k.startswith(prefix)}


# --- equal to the references --------------------------------------------------------------------

def test_logits_and_block_outputs_equal_the_reference(golden):
    a = golden("model_fan")
    assert part(a, "sd/").keys() == small(attn="softmax").state_dict().keys()
    m, _ = reference_model(part(a, "sd/"), a["pos_features"], torch.float64, attn="softmax")
    torch.testing.assert_close(m(a["x"].double()), a["logits64"], rtol=0, atol=1e-10)
    m, _ = reference_model(part(a, "sd/"), a["pos_features"], torch.float32, attn="softmax")
    got = []                                                    # the output of each block
    for block in (*m.blocks, *m.cls_attn_blocks):
        block.register_forward_hook(lambda block, inputs, output: got.append(output))
    torch.testing.assert_close(m(a["x"]), a["logits32"], rtol=0, atol=2e-5)
    assert len(got) == 4
    for i, x in enumerate(got):
        torch.testing.assert_close(x, a[f"stage{i}"], rtol=0, atol=2e-5)
    torch.testing.assert_close(small().pos_embed.code[0, :, :, 0].T, a["pos_features"], rtol=0,
                               atol=1e-6)


@pytest.mark.skipif(not (SHARED / "golden/model_fan_symmetric.npz").exists(),
                    reason="too large for a clone")
@pytest.mark.parametrize("kind", ["symmetric", "rpc"])
def test_symmetric_fans_and_gradients_equal_the_released_code(golden, kind):
    a = golden("model_fan_symmetric")
    weights = part(a, f"{kind}/sd/")
    assert set(weights) == set(small(attn=kind).state_dict())
    for dtype, bits, tol in ((torch.float32, 32, 2e-4), (torch.float64, 64, 1e-10)):
        m, _ = reference_model(weights, a["pos_features"], dtype, attn=kind)
        logits = m(a[f"{kind}/x"].to(dtype))
        torch.testing.assert_close(logits, a[f"{kind}/logits{bits}"], rtol=0, atol=tol)
    (logits.flatten() * torch.arange(20)).sum().backward()
    for name, grad in part(a, f"{kind}/grad/").items():
        torch.testing.assert_close(m.get_parameter(name).grad, grad, rtol=0,
                                   atol=1e-10 * grad.abs().max().item())


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_the_model_written_out(golden, kind):
    a, (settings, rpc), seen = golden("model_fan"), KINDS[kind], []
    m, weights = reference_model(part(a, "sd/"), a["pos_features"], torch.float64, **settings)
    theirs = {k: v.clone().requires_grad_("running" not in k and "tracked" not in k)
              for k, v in weights.items()}
    logits, _ = peers.fan(theirs, a["x"].double(), a["pos_features"].double(), rpc=rpc)
    m.blocks[0].attn.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    ours = m(a["x"].double())
    torch.testing.assert_close(ours, logits, rtol=0, atol=1e-10)
    for out in (logits, ours):
        (out * torch.arange(20).view(2, 10)).sum().backward()
    for name, p in m.named_parameters():
        assert p.grad.abs().max() > 0, name
        torch.testing.assert_close(p.grad, theirs[name].grad, rtol=1e-10, atol=1e-10, msg=name)
    if rpc:  # S is neither empty nor full
        assert 0.1 < (m.blocks[0].attn.trace(seen[0])[0]["S"] != 0).double().mean() < 0.999


def test_parameters_and_multiplications_are_the_published_ones():
    def build(attn, size="fan_tiny"):
        with torch.device("meta"):
            return FAN(FANConfig(**FAN_SIZES[size], attn=attn)).eval()

    def count(*which):
        return sum(p.numel() for p in build(*which).parameters())
    assert count("softmax") == 7_319_920 and count("symmetric") == count("rpc") == 6_801_136
    assert count("softmax", "fan_small") == 28_345_336
    assert count("symmetric", "fan_small") == 26_275_576
    with FlopCounterMode(display=False) as products:
        build("softmax")(torch.zeros(1, 3, 224, 224, device="meta"))
    assert abs(products.get_total_flops() / 2e9 - 1.4753) < 1e-4  # 1.49 with the norms


# --- the model -----------------------------------------------------------------------------------

@pytest.mark.parametrize("patch_size,widths,tokens",
                         [(16, [24, 48, 96, 192], 4), (4, [96, 192], 64)])
def test_small_stem_has_the_last_convolutions(patch_size, widths, tokens):
    with torch.device("meta"):
        m = FAN(FANConfig(**FAN_SIZES["fan_tiny"], image_size=32, patch_size=patch_size))
    assert [c.out_channels for c in m.patch_embed.modules()
            if isinstance(c, torch.nn.Conv2d)] == widths
    assert m.config.num_tokens == tokens


def test_drop_path_has_one_rate_in_patch_blocks():
    m = small(attn="softmax", drop_path=0.3).train()
    assert [block.drop_path for block in m.blocks] == [0.3, 0.3]
    x = torch.randn(2, 17, 32)
    assert torch.equal(m.cls_attn_blocks[0](x), m.cls_attn_blocks[0](x))
    x = torch.randn(1, 16, 32).expand(400, 16, 32)
    for block, other in zip(m.blocks, ("gamma1", "gamma2")):    # only one branch remains
        torch.nn.init.zeros_(getattr(block, other))
        assert 0.2 < (block(x) == x).all(2).all(1).float().mean() < 0.4


def test_initial_weights_and_the_eps_of_every_norm():
    m = FAN(FANConfig(**{**SMALL, "embed_dim": 192, "depth": 1}))
    mlp = m.blocks[0].mlp.mlp_v
    for conv in (mlp.dwconv.conv1, mlp.dwconv.conv2):
        assert abs(conv.weight.var() - 2 / 9) < 0.02 and conv.bias.abs().max() == 0
    for layer in (mlp.fc1, m.blocks[0].attn.kv, m.cls_attn_blocks[0].attn.q):
        assert abs(layer.weight.std() - 0.02) < 5e-4 and layer.bias.abs().max() == 0
    assert abs(m.cls_token.std() - 0.02) < 5e-3
    for how, eps in (({}, 1e-6), (dict(eps=1e-3), 1e-3)):
        norms = {name: m.eps for name, m in small(**how).named_modules()
                 if isinstance(m, torch.nn.LayerNorm)}
        assert norms == {name: 1e-5 if name.endswith("norm_v") else eps for name in norms}
        assert len(norms) == 11


def test_batch_norm_over_processes_equals_pytorch(monkeypatch):
    """Use eight values per channel, so that the variances of sample and population differ."""
    ours, theirs, x = BatchNorm(3), torch.nn.BatchNorm2d(3), torch.randn(2, 3, 2, 2)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(torch.distributed.nn, "all_reduce", lambda total: total)
    torch.testing.assert_close(ours(x), theirs(x))
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value)


def test_sync_batch_norm_replaces_every_norm():
    m, x = small().eval(), torch.rand(2, 3, 64, 64)
    before, logits = m.state_dict(), m(x)
    m = torch.nn.SyncBatchNorm.convert_sync_batchnorm(m)
    assert not any(isinstance(part, BatchNorm) for part in m.modules())
    assert m.state_dict().keys() == before.keys() and torch.equal(m(x), logits)


# --- the scripts ---------------------------------------------------------------------------------

TINY = dict(embed_dim=32, depth=2, num_heads=4)
RUN = ("--model fan_tiny --num_images 32 --image_size 16 --patch_size 4 --batch_size 8 "
       "--device cpu")


@pytest.fixture
def tiny(alone, monkeypatch):
    """Make fan_tiny smaller, and log every step."""
    monkeypatch.setattr(common, "LOG_EVERY", 1)
    monkeypatch.setitem(FAN_SIZES, "fan_tiny", TINY)


def test_resumed_fan_run_is_bit_identical(tiny):
    flags = f"{RUN} --epochs 2 --drop_path 0.2"
    call(train_cls.main, flags, "--out_dir whole")
    call(train_cls.main, flags, "--out_dir parts --max_steps 3")
    call(train_cls.main, "--resume parts")
    whole, parts = common.load("whole"), common.load("parts")
    assert all(torch.equal(v, parts["model"][k]) for k, v in whole["model"].items())
    assert whole["model"]["blocks.0.mlp.mlp_v.dwconv.bn.num_batches_tracked"] == 8
    assert log("whole") == log("parts") and len(log("whole")) == 8


def test_two_processes_equal_one(tiny):
    group(train_cls.main, [*RUN.split(), "--out_dir", "two", "--max_steps", "4"])
    call(train_cls.main, RUN, "--out_dir one --max_steps 4")
    losses = [list(log(name).values()) for name in ("two", "one")]
    np.testing.assert_allclose(*losses, rtol=0, atol=1e-4)
    assert len(losses[1]) == 4
    one, two = common.load("one")["model"], common.load("two")["model"]
    for name in ("patch_embed.proj.0.1.running_var", "blocks.1.mlp.mlp_v.dwconv.bn.running_mean"):
        torch.testing.assert_close(two[name], one[name], rtol=1e-3, atol=1e-4)


def test_init_evaluation_and_probe_accept_a_fan(tiny, capsys):
    call(train_cls.main, RUN, "--attn symmetric --out_dir sym --max_steps 2")
    call(train_cls.main, RUN, "--init_from sym --out_dir rpc --max_steps 2")  # App. E.6
    model = fan_from_checkpoint(common.load("rpc"))
    config = model.config
    assert config.attn == "rpc" and model.cls_attn_blocks[0].attn.q is None     # symmetric
    assert (config.init, config.num_tokens) == ("trunc_normal", 16)
    call(eval_robust.main, "--ckpt rpc sym --measures clean --limit 4 --out_dir e")
    table = capsys.readouterr().out
    assert "fan rpc 4iter/layer0" in table and "fan symmetric" in table
    heads = probe.capture(model, torch.rand(2, 3, 16, 16))
    assert [h.k.shape for h in heads] == [(2, 4, 16, 8)] * 2
