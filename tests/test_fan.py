"""Compare fan.py with the published models; test the scripts with a FAN."""

import zlib
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import common
import eval_robust
import look
import train_cls
from fan import FAN, FAN_SIZES, FANConfig, stem
from models import SIZES, load_classifier
from processes import group
from runs import call, log

SMALL = dict(image_size=64, embed_dim=32, depth=2, num_heads=4, num_classes=10)
def small(**kind):
    torch.manual_seed(0)
    return FAN(FANConfig(**{**SMALL, **kind})).eval()


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


def test_symmetric_attention_has_its_keys_as_queries():
    """A symmetric FAN equals a FAN whose queries have the weights of the keys."""
    symmetric, plain = small(attn="symmetric"), small(attn="softmax")
    weights = symmetric.state_dict()
    for name in plain.state_dict().keys() - weights.keys():
        keys = name.replace(".q.", ".kv." if name.startswith("blocks") else ".k.")
        weights[name] = weights[keys][:32]
    plain.load_state_dict(weights)
    x = torch.rand(2, 3, 64, 64)
    torch.testing.assert_close(symmetric(x), plain(x), rtol=0, atol=1e-5)
    kinds = [block.attn.attn for block in small(attn="rpc", rpc_layers=(1,)).blocks]
    assert kinds == ["symmetric", "rpc"]


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
