"""Claims about fan.py: the published model, its attention, its weights, and that every script takes it."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import common
import eval_robust
import peers
import train_cls
from attention import penalty
from checkpoint import load_weights, read_checkpoint, save_checkpoint
from processes import group
from studies import probe
from fan import FAN, SIZES, BatchNorm, FANConfig, classifier_from_checkpoint
from vit import ViT, ViTConfig

SMALL = dict(image_size=64, embed_dim=32, depth=2, num_heads=4, num_classes=10)
KINDS = {"softmax": (dict(attn="softmax"), {}), "symmetric": (dict(attn="symmetric"), {}),
         "rpc": (dict(attn="rpc", n_iter=4, lambd=0.2), {0: (4, 0.2)}),
         "rpc everywhere": (dict(attn="rpc", rpc_layers=(0, 1), n_iter=2, lambd=0.2), {0: (2, 0.2), 1: (2, 0.2)})}


def small(**kind):
    torch.manual_seed(0)
    return FAN(FANConfig(**{**SMALL, **kind})).eval()


def reference_model(arrays, dtype, attn="softmax", **kind):
    """Our model with the reference's weights and, as they are float32 numbers, its position code."""
    m = FAN(FANConfig(**SMALL, attn=attn, mean=(0, 0, 0), std=(1, 1, 1), **kind)).eval()
    weights = {k[3:]: v for k, v in arrays.items() if k.startswith("sd/")}
    if attn != "softmax":
        weights = {k: v for k, v in weights.items() if not re.match(r"blocks\.\d+\.attn\.q\.", k)}
    load_weights(m, weights)
    m.pos_embed.code = arrays["pos_features"].T[None, :, :, None]
    return m.to(dtype), {k: v.to(dtype) for k, v in weights.items()}


# --- equal to the reference --------------------------------------------------------------------------------------------------

def test_logits_and_the_tokens_after_each_block_are_the_references(golden):
    a = golden("model_fan")
    m, _ = reference_model(a, torch.float64)
    torch.testing.assert_close(m(a["x"].double()), a["logits64"], rtol=0, atol=1e-10)
    m, _ = reference_model(a, torch.float32)
    got = m.features(a["x"])
    torch.testing.assert_close(got["head"], a["logits32"], rtol=0, atol=2e-5)
    assert list(got) == ["embed", "blocks.0", "blocks.1", "cls_token", "cls_attn_blocks.0", "cls_attn_blocks.1", "norm", "head"]
    for i, name in enumerate(("blocks.0", "blocks.1", "cls_attn_blocks.0", "cls_attn_blocks.1")):
        torch.testing.assert_close(got[name], a[f"stage{i}"], rtol=0, atol=2e-5)


def test_the_position_code_is_the_references(golden):
    torch.testing.assert_close(small().pos_embed.code[0, :, :, 0].T, golden("model_fan")["pos_features"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_every_gradient_equals_that_of_the_model_written_out(golden, kind):
    a, (settings, rpc) = golden("model_fan"), KINDS[kind]
    m, weights = reference_model(a, torch.float64, **settings)
    x, pos = a["x"].double(), a["pos_features"].double()
    theirs = {k: v.clone().requires_grad_("running" not in k and "tracked" not in k) for k, v in weights.items()}
    logits, _ = peers.fan(theirs, x, pos, rpc=rpc)
    torch.testing.assert_close(m(x), logits, rtol=0, atol=1e-10)
    (logits * torch.arange(20).view(2, 10)).sum().backward()
    (m(x) * torch.arange(20).view(2, 10)).sum().backward()
    for name, p in m.named_parameters():
        assert p.grad.abs().max() > 0, name
        torch.testing.assert_close(p.grad, theirs[name].grad, rtol=1e-10, atol=1e-10, msg=name)


def test_the_shrinkage_acts_in_the_rpc_models_compared(golden):
    m, _ = reference_model(golden("model_fan"), torch.float64, attn="rpc", n_iter=4, lambd=0.2)
    m.blocks[0].attn.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    seen = []
    m(golden("model_fan")["x"].double())
    _, k, _ = m.blocks[0].attn.project(seen[0])
    share = (k.abs() > 0.2 * penalty(k)).double().mean()
    assert 0.1 < share < 0.999


def test_parameters_and_multiplications_are_the_published_ones():
    def build(attn, size="fan_tiny"):
        with torch.device("meta"):
            return FAN(FANConfig(**SIZES[size], attn=attn)).eval()

    def count(*which):
        return sum(p.numel() for p in build(*which).parameters())
    assert [count(attn) for attn in ("softmax", "symmetric", "rpc")] == [7_319_920, 6_875_248, 6_875_248]
    assert [count(attn, "fan_small") for attn in ("softmax", "symmetric")] == [28_345_336, 26_571_256]
    with FlopCounterMode(display=False) as products:
        build("softmax")(torch.zeros(1, 3, 224, 224, device="meta"))
    assert abs(products.get_total_flops() / 2e9 - 1.4753) < 1e-4
    normed = 192 * (36 * 196 + 5 * 197) + 768 * 12 * 196 + sum(192 // s * (14 * s) ** 2 for s in (1, 2, 4, 8))
    assert round((products.get_total_flops() / 2 + 5 * normed) / 1e9, 2) == 1.49        # five per value of a norm


def test_state_dict_names_are_the_references():
    def ends(*names):
        return [f"{name}.{end}" for name in names for end in ("weight", "bias")]
    bn = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    names = ["cls_token", *ends("pos_embed.token_projection", "norm", "head")]
    names += [f"patch_embed.proj.{i}.0.weight" for i in (0, 2, 4, 6)] + [f"patch_embed.proj.{i}.1.{b}" for i in (0, 2, 4, 6) for b in bn]
    for i in range(2):
        names += [f"{b}.{i}.{g}" for b in ("blocks", "cls_attn_blocks") for g in ("gamma1", "gamma2")]
        names += [f"blocks.{i}.{n}" for n in ends("norm1", "norm2", "attn.q", "attn.kv", "attn.proj", "mlp.q", "mlp.norm_v",
                                                  *(f"mlp.mlp_v.{n}" for n in ("fc1", "fc2", "dwconv.conv1", "dwconv.conv2")))]
        names += [f"blocks.{i}.mlp.{n}" for n in ("temperature", "mlp_v.gamma", *(f"mlp_v.dwconv.bn.{b}" for b in bn))]
        names += [f"cls_attn_blocks.{i}.{n}" for n in ends("norm1", "norm2", "mlp.fc1", "mlp.fc2",
                                                           *(f"attn.{n}" for n in ("q", "k", "v", "proj")))]
    assert sorted(small(attn="softmax").state_dict()) == sorted(names)
    assert set(names) - set(small(attn="rpc").state_dict()) == {f"blocks.{i}.{n}" for i in range(2) for n in ends("attn.q")}


# --- the model ---------------------------------------------------------------------------------------------------------------

def test_rpc_acts_on_the_patches_of_the_chosen_blocks_with_the_flags_settings():
    m = small(attn="rpc", rpc_layers=(1,), n_iter=3, lambd=0.7, form="paper")
    assert [block.attn.attn for block in m.blocks] == ["symmetric", "rpc"]
    assert m.blocks[1].attn.rpc["n_iter"] == 3 and m.blocks[1].attn.rpc["threshold"] == "over"
    shapes = []
    m.blocks[1].attn.register_forward_pre_hook(lambda module, inputs: shapes.append(inputs[0].shape))
    m(torch.rand(2, 3, 64, 64))
    assert shapes == [(2, 16, 32)] and m.config.num_tokens == 16                       # no class token among them
    k = torch.randn(2, 4, 196, 48)
    torch.testing.assert_close(penalty(k), 1 / k.abs().mean((2, 3), keepdim=True))      # four heads: mu = 1 / m


def test_a_stem_for_small_images_is_the_last_convolutions_of_the_large_one():
    def widths(patch_size):
        m = FAN(FANConfig(**SIZES["fan_tiny"], image_size=32, patch_size=patch_size))
        return [c.out_channels for c in m.patch_embed.modules() if isinstance(c, torch.nn.Conv2d)], m.config.num_tokens
    assert widths(16) == ([24, 48, 96, 192], 4)
    assert widths(4) == ([96, 192], 64)


def test_the_drop_path_rate_is_the_same_in_every_block_and_none_meets_the_class_token():
    m = small(attn="softmax", drop_path=0.3).train()
    assert [block.drop_path for block in m.blocks] == [0.3, 0.3]
    x = torch.randn(2, 17, 32)
    assert torch.equal(m.cls_attn_blocks[0](x), m.cls_attn_blocks[0](x))
    x = torch.randn(1, 16, 32).expand(400, 16, 32)
    for block, other in zip(m.blocks, ("gamma1", "gamma2")):    # one branch of two is left
        torch.nn.init.zeros_(getattr(block, other))
        dropped = (block(x) == x).all(2).all(1)
        assert 0.2 < dropped.float().mean() < 0.4


def test_depthwise_convolutions_start_with_variance_two_ninths_and_linear_layers_at_0_02():
    m = FAN(FANConfig(**{**SMALL, "embed_dim": 192, "depth": 1}))
    mlp = m.blocks[0].mlp.mlp_v
    for conv in (mlp.dwconv.conv1, mlp.dwconv.conv2):
        assert abs(conv.weight.var() - 2 / 9) < 0.02 and conv.bias.abs().max() == 0
    for layer in (mlp.fc1, m.blocks[0].attn.kv, m.cls_attn_blocks[0].attn.q):
        assert abs(layer.weight.std() - 0.02) < 5e-4 and layer.bias.abs().max() == 0
    assert abs(m.cls_token.std() - 0.02) < 5e-3 and m.blocks[0].mlp.norm_v.eps == 1e-5 and m.norm.eps == 1e-6


def test_every_norm_but_that_of_the_gates_has_the_eps_of_the_config():
    norms = {name: m.eps for name, m in small(attn="softmax", eps=1e-3).named_modules() if isinstance(m, torch.nn.LayerNorm)}
    assert norms == {name: 1e-5 if name.endswith("norm_v") else 1e-3 for name in norms} and len(norms) == 11


def test_batch_norm_over_processes_keeps_the_statistics_of_pytorchs(monkeypatch):
    """Of eight values, where a sample's variance is not a population's."""
    ours, theirs, x = BatchNorm(3), torch.nn.BatchNorm2d(3), torch.randn(2, 3, 2, 2)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(torch.distributed.nn, "all_reduce", lambda total: total)
    torch.testing.assert_close(ours(x), theirs(x))
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value)


def test_it_exports_with_a_batch_of_any_size():
    m, images = small(attn="rpc", patch_size=16), torch.rand(5, 3, 64, 64)
    program = torch.export.export(m, (images[:3],), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.testing.assert_close(program.module()(images), m(images), rtol=0, atol=1e-6)


@pytest.mark.parametrize("bad, word", [(dict(image_size=60), "not divisible"), (dict(patch_size=32), "2, 4, 8 or 16"),
                                       (dict(attn="rpc", rpc_layers=(2,)), "0..1"), (dict(attn="linear"), "linear")])
def test_what_cannot_be_built_is_refused_in_one_line(bad, word):
    with pytest.raises(ValueError, match=re.escape(word)) as e:
        FANConfig(**{**SMALL, **bad})
    assert "\n" not in str(e.value)


# --- weights from files ------------------------------------------------------------------------------------------------------

def test_files_of_the_fan_authors_load_and_other_classes_get_a_new_head(tmp_path):
    m = small(attn="softmax")
    torch.save(dict(epoch=300, arch="fan", state_dict=m.state_dict()), tmp_path / "fan.pth.tar")
    file, again = read_checkpoint(tmp_path / "fan.pth.tar"), small(attn="softmax", num_classes=7)
    with pytest.raises(ValueError, match="10 classes, the model for 7"):
        load_weights(again, file)
    assert load_weights(again, file, new_head=True) == ["new head for 7 classes (the file has 10)"]
    assert torch.equal(again.blocks[1].mlp.temperature, m.blocks[1].mlp.temperature)


def test_weights_of_another_model_are_refused_in_one_line_and_change_nothing():
    fan, vit = small(attn="rpc"), ViT(ViTConfig(image_size=64, num_classes=10, embed_dim=32, depth=2, num_heads=4, attn="rpc"))
    deep = small(attn="rpc", depth=3).state_dict()
    for load, model, weights, words in ((load_weights, fan, vit.state_dict(), "not FAN weights"), (load_weights, fan, {}, "got nothing"),
                                        (load_weights, vit, fan.state_dict(), "not ViT weights"),
                                        (load_weights, fan, small(attn="softmax").state_dict(), "blocks.0.attn.q.weight"),
                                        (load_weights, small(attn="softmax"), fan.state_dict(), "blocks.0.attn.q.weight"),
                                        (load_weights, fan, deep, "blocks.2"),
                                        (load_weights, fan, small(attn="rpc", patch_size=8).state_dict(), "patch_embed")):
        before = {k: v.clone() for k, v in model.state_dict().items()}
        with pytest.raises(ValueError, match=words) as e:
            load(model, {"model": weights})
        assert "\n" not in str(e.value) and all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_checkpoint_alone_says_whether_it_is_a_vit_or_a_fan(tmp_path):
    from dataclasses import asdict
    for m in (small(attn="rpc", rpc_layers=(1,), n_iter=2, form="admm"), ViT(ViTConfig(**SMALL, attn="rpc")).eval()):
        save_checkpoint(tmp_path / "last.pt", dict(task="classification", model=m.state_dict(), model_config=asdict(m.config)))
        again = classifier_from_checkpoint(read_checkpoint(tmp_path))
        x = torch.rand(2, 3, 64, 64)
        assert type(again) is type(m) and again.config == m.config and torch.equal(again(x), m(x))
    with pytest.raises(ValueError, match="train_cls.py"):
        classifier_from_checkpoint({"model": m.state_dict()})


# --- the scripts -------------------------------------------------------------------------------------------------------------

TINY = dict(embed_dim=32, depth=2, num_heads=4)
RUN = "--model fan_tiny --num_images 64 --image_size 16 --patch_size 4 --batch_size 8 --device cpu --set log_every=1".split()
@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """fan_tiny is even smaller here, on one thread, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(train_cls.MODELS, "fan_tiny", (FAN, FANConfig, TINY))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(threads)


def script(monkeypatch, module, *args):
    monkeypatch.setattr(sys, "argv", [module.__name__, *" ".join(map(str, args)).split()])
    module.main()


def train(monkeypatch, *args):
    script(monkeypatch, train_cls, *RUN, *args)


def refused(monkeypatch, module, *args):
    monkeypatch.setattr(sys, "argv", [module.__name__, *" ".join(map(str, args)).split()])
    with pytest.raises(SystemExit) as stop:
        common.run(module.main)
    assert "\n" not in stop.value.code
    return stop.value.code


def losses(folder):
    rows = [json.loads(line) for line in Path(folder, "log.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def test_a_run_that_was_stopped_goes_on_bit_for_bit_with_its_average_and_its_batch_norms(tiny, monkeypatch):
    flags = "--epochs 2 --set ema=0.9 drop_path=0.2".split()
    train(monkeypatch, *flags, "--out_dir whole")
    train(monkeypatch, *flags, "--out_dir parts --max_steps 5")
    script(monkeypatch, train_cls, "--resume parts --max_steps 11")
    script(monkeypatch, train_cls, "--resume parts")
    whole, parts = read_checkpoint("whole"), read_checkpoint("parts")
    for name in ("model", "ema"):
        assert all(torch.equal(v, parts[name][k]) for k, v in whole[name].items())
    assert whole["model"]["blocks.0.mlp.mlp_v.dwconv.bn.num_batches_tracked"] == 16
    assert losses("whole") == losses("parts") and len(losses("whole")) == 16


def train_tiny():
    train_cls.MODELS["fan_tiny"] = FAN, FANConfig, TINY
    train_cls.main()


def test_two_processes_equal_one_in_losses_and_in_batch_norms(tiny, monkeypatch):
    group(train_tiny, [*RUN, "--out_dir", "two", "--max_steps", "8"])
    train(monkeypatch, "--out_dir one --max_steps 8")
    np.testing.assert_allclose(losses("two"), losses("one"), rtol=0, atol=1e-4)
    assert len(losses("one")) == 8
    one, two = read_checkpoint("one")["model"], read_checkpoint("two")["model"]
    for name in ("patch_embed.proj.0.1.running_var", "blocks.1.mlp.mlp_v.dwconv.bn.running_mean"):
        torch.testing.assert_close(two[name], one[name], rtol=1e-3, atol=1e-4)


def test_the_recipe_of_the_fan_authors_holds_on_imagenet_unless_a_flag_says_otherwise(monkeypatch):
    def settings(*flags):
        monkeypatch.setattr(sys, "argv", ["train_cls.py", *" ".join(flags).split()])
        return train_cls.get_args()
    theirs = dict(lr=2e-3, min_lr=1e-6, drop_path=0.0, ema=0.99992, repeats=1, batch_size=1024, epochs=300, warmup_epochs=5,
                  weight_decay=0.05, erase=0.25, mixup=0.8, cutmix=1.0, smoothing=0.1, clip=0.0)
    imagenet = "--data imagenet --data_dir d"
    got = vars(settings(imagenet, "--model fan_tiny"))
    assert {k: got[k] for k in theirs} == theirs
    assert settings(imagenet, "--model fan_tiny --lr 1e-4").lr == 1e-4
    assert settings(imagenet).lr == 1e-3 and settings("--model fan_tiny").lr == 2e-3 and settings("--model fan_tiny").ema == 0
    with pytest.raises(SystemExit):
        settings("--data", "imagenet\\ --model\\ fan_tiny")


def test_every_consumer_of_a_classifier_takes_a_fan(tiny, monkeypatch):
    train(monkeypatch, "--attn symmetric --out_dir sym --max_steps 2")
    train(monkeypatch, "--init_from sym --out_dir rpc --max_steps 2")                                        # App. E.6
    config = classifier_from_checkpoint(read_checkpoint("rpc")).config
    assert (config.attn, config.init, config.num_tokens) == ("rpc", "trunc_normal", 16)
    script(monkeypatch, train_cls, "--model nano --num_images 64 --image_size 16 --patch_size 4 --batch_size 8",
           "--out_dir vit --max_steps 2")
    script(monkeypatch, eval_robust, "--ckpt rpc sym vit --measures clean pgd corruptions --severities 1 --limit 4 --out_dir e")
    table = Path("e/table.md").read_text()
    assert all(kind in table for kind in ("fan rpc 4iter/layer1", "fan symmetric", "| rpc 4iter/layer1"))
    model, checkpoint = probe.load_model("rpc")
    heads = probe.capture(model, torch.rand(2, 3, 16, 16))
    assert [h.k.shape for h in heads] == [(2, 4, 16, 8)] * 2
    fresh, _ = probe.untrained(checkpoint | {"args": checkpoint["args"] | {"init_from": None}}, "rpc")
    assert type(fresh) is FAN and not torch.equal(fresh.head.weight, model.head.weight)


def test_what_does_not_fit_is_refused_in_one_line_that_names_the_flag_or_the_file(tiny, monkeypatch):
    train(monkeypatch, "--out_dir fan --max_steps 1")
    vit = "--model nano --num_images 64 --image_size 16 --patch_size 4 --batch_size 8".split()
    script(monkeypatch, train_cls, *vit, "--out_dir vit --max_steps 1")
    for flags, words in ((("--image_size 18",), "image_size=18 is not divisible by patch_size=4"),
                         (("--image_size 15 --patch_size 5",), "patch_size=5, expected 2, 4, 8 or 16"),
                         (("--rpc_layers 2",), "--rpc_layers 2"), (("--init_from vit",), "--init_from vit: not FAN weights"),
                         (("--attn softmax --init_from fan",), "--init_from fan: the file has no blocks.0.attn.q.weight")):
        assert words in refused(monkeypatch, train_cls, *RUN, *flags)
    assert "--init_from fan: not ViT weights" in refused(monkeypatch, train_cls, *vit, "--init_from fan")
    assert "--model nano does not fit --resume fan" in refused(monkeypatch, train_cls, "--resume fan --model nano")
