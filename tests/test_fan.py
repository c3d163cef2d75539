"""Compare fan.py with the published models; test the scripts with a FAN."""

import math
import zlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import common
import eval_robust
import look
import train_cls
from attention import SelfAttention
from fan import FAN, FAN_SIZES, FANConfig, stem
from models import SIZES, load_classifier
from processes import group
from runs import call, log

SMALL = dict(image_size=64, embed_dim=32, depth=2, num_heads=4, num_classes=10)
PAP = dict(n_iter=3, lambd=0.2)
KINDS = {"softmax": (dict(attn="softmax"), {}), "symmetric": (dict(attn="symmetric"), {}),
         "rpc": (dict(attn="rpc", rpc_layers=(0, 1), pap=PAP), {0: PAP, 1: PAP})}


def small(**kind):
    torch.manual_seed(0)
    return FAN(FANConfig(**{**SMALL, **kind})).eval()


def reference_model(weights, **kind):
    """Build our model in float64 with these weights, for normalised images."""
    m = small(mean=(0, 0, 0), std=(1, 1, 1), **kind)
    m.load_state_dict(weights)
    return m.double()


def linear(w, name, x):
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def layer_norm(w, name, x, eps=1e-6):
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps)


def batch_norm(w, name, x):
    return F.batch_norm(x, *(w[f"{name}.{end}"] for end in ("running_mean", "running_var", "weight",
                                                            "bias")))


def apart(x, heads):                                # (B, N, C) -> (B, H, N, D)
    return x.reshape(len(x), -1, heads, x.shape[-1] // heads).transpose(1, 2)


def attend(q, k, v, heads):
    q, k, v = (apart(x, heads) for x in (q, k, v))
    A = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    return (A @ v).transpose(1, 2).reshape(len(v), -1, heads * v.shape[-1])


def token_attention(w, name, z, heads, how):
    C = z.shape[-1]
    if f"{name}.q.weight" not in w:                                     # symmetric or RPC attention
        layer = SelfAttention(C, heads, "rpc" if how else "symmetric", pap=how)
        parts = {f"{ours}.{end}": w[f"{name}.{theirs}.{end}"]
                 for ours, theirs in (("qkv", "kv"), ("proj", "proj"))
                 for end in ("weight", "bias")}
        return torch.func.functional_call(layer, parts, z)
    kv = linear(w, f"{name}.kv", z)
    out = attend(linear(w, f"{name}.q", z), kv[..., :C], kv[..., C:], heads)
    return linear(w, f"{name}.proj", out)


def channel_attention(w, name, z, heads):
    B, N, C = z.shape
    gates = []
    for h, part in enumerate(z.split(C // heads, 2)):                   # head by head
        q = linear(w, f"{name}.q", z).split(C // heads, 2)[h].softmax(1)
        gate = torch.sigmoid((q * part.softmax(1).mean(2, keepdim=True)).sum(1))
        gates.append(gate * w[f"{name}.temperature"][h, 0])
    u = linear(w, f"{name}.mlp_v.fc1", z)
    grid, dw = u.mT.reshape(B, -1, round(N ** 0.5), round(N ** 0.5)), f"{name}.mlp_v.dwconv"
    for conv in ("conv1", "conv2"):
        grid = F.conv2d(grid, w[f"{dw}.{conv}.weight"], w[f"{dw}.{conv}.bias"], padding=1,
                        groups=u.shape[-1])
        grid = batch_norm(w, f"{dw}.bn", F.gelu(grid)) if conv == "conv1" else grid
    u = u + w[f"{name}.mlp_v.gamma"] * grid.reshape(B, -1, N).mT
    u = layer_norm(w, f"{name}.norm_v", linear(w, f"{name}.mlp_v.fc2", u), 1e-5)
    return u * torch.cat(gates, 1)[:, None]


def class_block(w, b, x, heads):
    z = layer_norm(w, f"{b}.norm1", x)
    query = "q" if f"{b}.attn.q.weight" in w else "k"       # symmetric: the class token's key
    parts = ((query, z[:, :1]), ("k", z), ("v", z))
    looked = attend(*(linear(w, f"{b}.attn.{name}", part) for name, part in parts), heads)
    x = x + w[f"{b}.gamma1"] * torch.cat([linear(w, f"{b}.attn.proj", looked), z[:, 1:]], 1)
    x = layer_norm(w, f"{b}.norm2", x)
    token = linear(w, f"{b}.mlp.fc2", F.gelu(linear(w, f"{b}.mlp.fc1", x[:, :1])))
    return torch.cat([x[:, :1] + w[f"{b}.gamma2"] * token, 2 * x[:, 1:]], 1)


def fan(w, x, pos, heads=4, rpc=None):
    """Return the logits of normalised images x, with the state dict w.

    pos: (patches, 64), the position code. rpc: {layer: settings}, the layers with RPC-Attention.
    """
    for i in range(0, 8, 2):
        x, name = F.gelu(x) if i else x, f"patch_embed.proj.{i}"
        x = batch_norm(w, f"{name}.1", F.conv2d(x, w[f"{name}.0.weight"], stride=2, padding=1))
    C, token = x.shape[1], "pos_embed.token_projection"
    x = x.flatten(2).mT + pos @ w[f"{token}.weight"].reshape(C, -1).T + w[f"{token}.bias"]

    for i in range(len({k.split(".")[1] for k in w if k.startswith("blocks.")})):
        b, how = f"blocks.{i}", (rpc or {}).get(i)
        z = layer_norm(w, f"{b}.norm1", x)
        x = x + w[f"{b}.gamma1"] * token_attention(w, f"{b}.attn", z, heads, how)
        z = layer_norm(w, f"{b}.norm2", x)
        x = x + w[f"{b}.gamma2"] * channel_attention(w, f"{b}.mlp", z, heads)
    x = torch.cat([w["cls_token"].expand(len(x), -1, -1), x], 1)
    for i in range(2):
        x = class_block(w, f"cls_attn_blocks.{i}", x, heads)
    return linear(w, "head", layer_norm(w, "norm", x)[:, 0])


def positions(side):
    """Return the sines and cosines of each patch's row and column, (side * side, 64)."""
    code = torch.zeros(side * side, 64, dtype=torch.float64)
    for token in range(side * side):
        for i in range(64):
            place = (token % side if i // 32 else token // side) + 1
            angle = 2 * math.pi * place / (side + 1e-6) / 10000 ** (2 * (i % 32 // 2) / 32)
            code[token, i] = math.cos(angle) if i % 2 else math.sin(angle)
    return code


@pytest.mark.parametrize("file, prefix, attn", [
    ("model_fan", "", "softmax"), ("model_fan_symmetric", "symmetric/", "symmetric"),
    ("model_fan_symmetric", "rpc/", "rpc")])
def test_logits_equal_the_released_code(golden, file, prefix, attn):
    """The images are normalised. The released code has the position code in float32."""
    a, start = golden(file), f"{prefix}sd/"
    model = small(attn=attn, mean=(0, 0, 0), std=(1, 1, 1))
    model.load_state_dict({k[len(start):]: v for k, v in a.items() if k.startswith(start)})
    code = a["pos_features"].T[None, :, :, None]
    torch.testing.assert_close(model.pos_embed.code, code, rtol=0, atol=1e-5)
    model.pos_embed.code = code
    found = model.double()(a[f"{prefix}x"].double())
    torch.testing.assert_close(found, a[f"{prefix}logits64"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_equal_the_model_written_out(kind):
    (settings, rpc), seen, weights = KINDS[kind], [], {}
    for name, v in small(**settings).state_dict().items():
        weights[name] = v + 0.2 * torch.randn(v.shape)          # norms and factors stay near 1
        if v.ndim > 1:
            weights[name] = torch.randn(v.shape) / v[0].numel() ** 0.5
    m, x = reference_model(weights, **settings), torch.randn(2, 3, 64, 64).double()
    theirs = {name: v.clone() for name, v in m.state_dict().items()}
    for name, _ in m.named_parameters():
        theirs[name].requires_grad_()
    m.blocks[0].attn.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    m.pos_embed.code = positions(4).T[None, :, :, None]         # in float64
    ours, logits = m(x), fan(theirs, x, positions(4), rpc=rpc)
    torch.testing.assert_close(ours, logits, rtol=0, atol=1e-10)
    for out in (logits, ours):
        (out * torch.arange(20).view(2, 10)).sum().backward()
    for name, p in m.named_parameters():
        assert p.grad.abs().max() > 0, name
        torch.testing.assert_close(p.grad, theirs[name].grad, rtol=1e-10, atol=1e-10, msg=name)
    if rpc:  # S is neither empty nor full
        assert 0.1 < (m.blocks[0].attn.trace(seen[0])[0]["S"] != 0).double().mean() < 0.999
    torch.testing.assert_close(small().pos_embed.code[0, :, :, 0].T.double(), positions(4), rtol=0,
                               atol=1e-5)


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


def test_drop_path_has_one_rate_in_patch_blocks():
    m = small(attn="softmax", drop_path=0.3).train()
    assert [block.drop_path for block in m.blocks] == [0.3, 0.3]
    x = torch.randn(2, 17, 32)
    assert torch.equal(m.cls_attn_blocks[0](x), m.cls_attn_blocks[0](x))
    x = torch.randn(1, 16, 32).expand(400, 16, 32)
    for block, other in zip(m.blocks, ("gamma1", "gamma2")):    # only one branch remains
        torch.nn.init.zeros_(getattr(block, other))
        assert 0.2 < (block(x) == x).all(2).all(1).float().mean() < 0.4


TINY = dict(embed_dim=32, depth=2, num_heads=4)
RUN = ("--model fan_tiny --num_images 32 --image_size 16 --patch_size 4 --batch_size 8 "
       "--device cpu")


@pytest.fixture
def tiny(alone, monkeypatch):
    """Make fan_tiny smaller, and log every step."""
    monkeypatch.setattr(common, "LOG_EVERY", 1)
    monkeypatch.setitem(SIZES, "fan_tiny", ("fan", TINY))


def test_resumed_fan_run_is_bit_identical(tiny):
    flags = f"{RUN} --epochs 2 --drop_path 0.2"
    call(train_cls.main, flags, "--out_dir whole")
    call(train_cls.main, flags, "--out_dir parts --max_steps 3")
    call(train_cls.main, "--resume parts")
    whole, parts = common.load("whole"), common.load("parts")
    assert all(torch.equal(v, parts["model"][k]) for k, v in whole["model"].items())
    assert whole["model"]["blocks.0.mlp.mlp_v.dwconv.bn.num_batches_tracked"] == 8
    assert log("whole") == log("parts") and len(log("whole")) == 8


def train_and_print_buffers():
    """Train, and print a checksum of the buffers at each evaluation."""
    evaluate = train_cls.evaluate

    def printing(model, *args):
        print(zlib.crc32(b"".join(b.numpy().tobytes() for b in model.buffers())))
        return evaluate(model, *args)
    train_cls.evaluate = printing
    train_cls.main()


def test_processes_evaluate_with_the_same_buffers(tiny):
    """Each process has its own BatchNorm; before an evaluation it gets the buffers of rank 0."""
    printed = group(train_and_print_buffers, [*RUN.split(), "--epochs", "2", "--out_dir", "two"])
    sums = [[line for line in text.splitlines() if line.isdigit()] for text in printed]
    assert sums[0] == sums[1] and len({*sums[0]}) == 2
    model = load_classifier(common.load("two"))
    assert sums[0][-1] == str(zlib.crc32(b"".join(b.numpy().tobytes() for b in model.buffers())))


def test_init_and_evaluation_accept_a_fan(tiny, capsys):
    call(train_cls.main, RUN, "--attn symmetric --out_dir sym --max_steps 2")
    call(train_cls.main, RUN, "--init_from sym --out_dir rpc --max_steps 2")  # App. E.6
    model = load_classifier(common.load("rpc"))
    config = model.config
    assert config.attn == "rpc" and model.cls_attn_blocks[0].attn.q is None     # symmetric
    assert (config.init, config.num_tokens) == ("trunc_normal", 16)
    assert isinstance(model, FAN)
    call(look.main, "--ckpt rpc --out look.png")
    shown = capsys.readouterr().out
    assert "| AUC of the noise" in shown and "\n| 0 " in shown and Path("look.png").exists()
    call(eval_robust.main, "--ckpt rpc sym --measures clean --limit 4 --out_dir e")
    table = capsys.readouterr().out
    assert "| rpc " in table and "| sym " in table


def test_stems_make_patches_of_four_sizes():
    for patch_size in (2, 4, 8, 16):
        image = torch.rand(1, 3, 48, 48)
        assert stem(patch_size, 16)(image).shape[2:] == (48 // patch_size, 48 // patch_size)
