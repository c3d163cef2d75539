"""Compare vit.py with the published models; test weights from files, and errors."""

from argparse import Namespace

import pytest
import torch
import torch.nn.functional as F

import train_cls
from attention import ATTENTIONS, FORMS, LAYER_PATTERNS, Attention
from common import InputError
from models import load_timm
from segmenter import Segmenter, SegmenterConfig
from vit import SIZES, ViT, ViTConfig, resize_pos_embed

TINY = dict(image_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=10)


def small(**kind):
    torch.manual_seed(0)
    return ViT(ViTConfig(**{**TINY, **kind})).eval()


def test_timm_deit_weights_give_the_same_logits():
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    theirs = timm.create_model("deit_tiny_patch16_224").eval()
    for p in theirs.parameters():                                # no weight is 0 or 1
        torch.nn.init.normal_(p, std=0.05)
    ours = load_timm({"model": theirs.state_dict()})
    assert ours.config == ViTConfig(**SIZES["tiny"])
    norms = [m for net in (ours, theirs) for m in net.modules() if isinstance(m, torch.nn.LayerNorm)]
    assert len(norms) == 2 * 25 and {norm.eps for norm in norms} == {1e-6}
    images = torch.rand(2, 3, 224, 224)
    mean, std = (torch.tensor(theirs.default_cfg[x]).view(3, 1, 1) for x in ("mean", "std"))
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs((images - mean) / std), rtol=1e-4,
                                   atol=1e-4)


COUNTS = {"tiny": (5_717_416, 5_272_744, 7_114_540, 5_717_428),
          "small": (22_050_664, 20_276_584, 24_844_912, 22_050_676),
          "base": (86_567_656, 79_480_552, 92_156_152, 86_567_668)}


@pytest.mark.parametrize("size", COUNTS)
def test_parameter_counts_are_the_papers(size):
    def count(attn):
        with torch.device("meta"):
            return sum(p.numel() for p in ViT(ViTConfig(**SIZES[size], attn=attn)).parameters())
    assert tuple(map(count, ("softmax", "symmetric", "scaled_s", "scaled_alpha"))) == COUNTS[size]


def test_rpc_layers_choose_the_attention_per_layer(monkeypatch):
    for name in ("mine", "yours"):
        monkeypatch.setitem(ATTENTIONS, name, Attention(False, lambda q, k, v, layer: v))
    monkeypatch.setitem(LAYER_PATTERNS, "mine", ("mine", "symmetric"))
    for how, kinds in ((dict(attn="rpc", rpc_layers=(1,)), ["symmetric", "rpc"]),
                       (dict(attn="rpc_asym"), ["rpc_asym", "softmax"]),
                       (dict(attn="sym_asym"), ["rpc", "softmax"]),
                       (dict(attn="mine"), ["mine", "symmetric"]),
                       (dict(attn="yours", rpc_layers=(1,)), ["yours"] * 2)):
        m = small(**how, pap=dict(n_iter=3, lambd=0.7, form="admm"))
        assert [block.attn.attn for block in m.blocks] == kinds
        assert m.blocks[1].attn.pap == dict(n_iter=3, lambd=0.7, **FORMS["admm"])
    assert ViTConfig(attn="rpc", rpc_layers=(3, 0)).rpc_layers == (0, 3)       # sorted


def test_both_initialisations_have_their_standard_deviation():
    torch.manual_seed(0)
    std = {init: ViT(ViTConfig(attn="rpc", init=init)).blocks[0].attn.qkv.weight.std().item()
           for init in ("default", "trunc_normal")}
    assert abs(std["default"] - 0.0417) < 5e-4 and abs(std["trunc_normal"] - 0.02) < 3e-4
    m = ViT(ViTConfig(attn="scaled_s"))
    assert m.blocks[0].attn.learned.s.abs().max() == 0 and m.head.bias.abs().max() == 0
    assert abs(m.pos_embed.std() - 0.02) < 1e-3


def test_drop_path_drops_samples_and_grows_by_layer():
    torch.manual_seed(0)
    block, x = small(drop_path=0.4).blocks[1], torch.randn(1, 5, 48).expand(2000, 5, 48)
    with torch.no_grad():
        assert torch.equal(block.eval()(x), block(x))
        block.attn.proj.weight.zero_(), block.attn.proj.bias.zero_()  # only the mlp branch is left
        full, out = block(x[:1]) - x[:1], block.train()(x) - x
    dropped = out.abs().amax((1, 2)) < 1e-6
    assert 0.35 < dropped.float().mean() < 0.45
    torch.testing.assert_close(out[~dropped][:1], full / 0.6, rtol=1e-4, atol=1e-5)
    rates = [block.drop_path for block in small(depth=4, drop_path=0.3).blocks]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3])


def test_wrong_settings_and_images_are_errors():
    for bad in (dict(image_size=30), dict(attn="fog"), dict(rpc_layers=(7,), attn="rpc"),
                dict(pap=dict(n_iters=99), attn="rpc")):
        with pytest.raises(ValueError, match=next(iter(bad))):
            ViTConfig(**{**TINY, **bad})
    for images in (torch.zeros(2, 3, 40, 40), torch.zeros(2, 3, 32, 32, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="expected float"):
            small()(images)


def test_another_image_size_resizes_positions_as_deit(tmp_path, capsys):
    """--init_from reads timm's names, and keeps the head of a network for other classes."""
    how = dict(embed_dim=64, num_heads=1)
    big, model = small(image_size=56, num_classes=7, **how), small(**how)
    pos, own = model.pos_embed, {name: w.clone() for name, w in big.head.state_dict().items()}
    torch.save(dict(model=model.state_dict()), tmp_path / "deit.pt")
    train_cls.load_weights(big, tmp_path / "deit.pt")
    assert "head for 7 classes is new" in capsys.readouterr().out
    grid = pos[:, 1:].reshape(1, 4, 4, 64).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=(7, 7), mode="bicubic", align_corners=False)
    torch.testing.assert_close(big.pos_embed, torch.cat([pos[:, :1], grid.flatten(2).mT], 1))
    assert torch.allclose(resize_pos_embed(pos, (4, 4), "bicubic"), pos, atol=1e-6)
    assert torch.equal(big.blocks[0].mlp.fc1.weight, model.blocks[0].mlp.fc1.weight)
    assert all(torch.equal(w, own[name]) for name, w in big.head.state_dict().items())


def test_load_timm_reads_released_scaled_attention():
    model = small(embed_dim=64, num_heads=1, attn="scaled_s")
    for block in model.blocks:
        torch.nn.init.normal_(block.attn.learned.s)
    theirs = {name.replace("learned.", ""): w for name, w in model.state_dict().items()}
    again, x = load_timm(theirs), torch.rand(2, 3, 32, 32)
    assert "blocks.0.attn.s" in theirs and torch.equal(again(x), model(x))


@pytest.mark.parametrize("key", ["model", None])
def test_load_timm_reads_prefixes_and_wrapped_states(key):
    model = small(embed_dim=128, num_heads=2)
    state = {f"module._orig_mod.{name}": w for name, w in model.state_dict().items()}
    loaded, images = load_timm({key: state} if key else state), torch.rand(2, 3, 32, 32)
    assert loaded.config.num_heads == 2 and torch.equal(loaded(images), model(images))


@pytest.mark.parametrize("names, taken", [
    (("model", "model_ema"), "model"), (("state_dict", "state_dict_ema"), "state_dict_ema"),
    (("state_dict",), "state_dict")])
def test_one_of_several_sets_of_weights_is_named(names, taken, capsys):
    """DeiT evaluates "model"; timm evaluates the average of the weights."""
    models = {name: ViT(ViTConfig(32, 8, 10, 64, 1, 1, attn="softmax")).eval() for name in names}
    file = dict(model="its name") | {name: m.state_dict() for name, m in models.items()}
    found, x = load_timm(file), torch.rand(2, 3, 32, 32)
    assert torch.equal(found(x), models[taken](x))
    assert (f"{taken} is taken" in capsys.readouterr().out) == (len(names) > 1)


@pytest.mark.parametrize("layer,layers", [(0, (0,)), (-1, (0, 1))])
def test_load_timm_reads_the_released_settings(layer, layers):
    model = ViT(ViTConfig(embed_dim=64, depth=2, num_heads=1, image_size=64, attn="rpc",
                          rpc_layers=layers, pap=dict(n_iter=2, lambd=3.0)))
    args = Namespace(num_iter=2, lambd=3.0, robust=True, layer=layer)
    assert load_timm(dict(model=model.state_dict(), args=args)).config == model.config
    with pytest.raises(InputError, match="symmetric or RPC"):
        load_timm(model.state_dict())


def test_other_weights_than_a_vits_are_errors():
    state = small(embed_dim=64, num_heads=1).state_dict()
    for wrong, words in (({"conv1.weight": torch.zeros(1)}, "has no weight cls_token; expected"),
                         (state | dict(dist_token=torch.zeros(1, 1, 64)), "no ViT .*dist_token"),
                         (state | {"blocks.1.norm1.weight": torch.zeros(3)}, "no ViT .*norm1")):
        with pytest.raises(InputError, match=words):
            load_timm(wrong)


# --- the released code: its arrays are too large for a clone --------------------------------------

VIT = dict(image_size=32, patch_size=8, num_classes=10, embed_dim=48, depth=2, num_heads=3)
SEG = dict(num_classes=5, image_size=64, embed_dim=48, depth=2, num_heads=2, decoder_heads=2)
CASES = [                                           # file, prefix of the outputs, settings
    ("model_symvit", "sym/", dict(attn="symmetric")),
    ("model_symvit", "rpc_l0_n6_lam4/", dict(attn="rpc", pap=dict(n_iter=6))),
    ("model_symvit", "rpc_all_n2_lam3/", dict(attn="rpc", rpc_layers=(0, 1),
                                              pap=dict(n_iter=2, lambd=3.0))),
    ("model_scaled_S", "", dict(attn="scaled_s")),
    ("model_scaled_alpha", "", dict(attn="scaled_alpha")),
    ("model_vit_asym", "", dict(attn="softmax")),
    ("seg_mask", "", dict()),
    ("seg_mask_symmetric", "", dict(attn="symmetric")),
    ("seg_mask_rpc", "", dict(attn="rpc", pap=dict(n_iter=6, lambd=2.0)))]


@pytest.mark.parametrize("file, prefix, settings", CASES)
def test_logits_equal_the_released_code(golden, file, prefix, settings):
    a, how = golden(file), dict(settings, mean=(0, 0, 0), std=(1, 1, 1))    # normalised images
    model = Segmenter(SegmenterConfig(**SEG, **how)) if "seg" in file else ViT(ViTConfig(**VIT, **how))
    if file == "seg_mask_rpc":                      # recorded with another decoder than the fork's
        model.decoder.blocks[0].attn.attn = "symmetric"
    model.load_state_dict({k[3:].replace("attn.s", "attn.learned.s"): v
                           for k, v in a.items() if k.startswith("sd/")
                           and not (k.startswith("sd/encoder.head"))})      # unused
    if "seg" in file:
        for x, logits in (("input", "logits"), ("odd_input", "odd_logits")):
            torch.testing.assert_close(model.eval()(a[x]), a[logits], rtol=0, atol=1e-4)
        return
    x = a.get(f"{prefix}x", a.get("x")).double()
    torch.testing.assert_close(model.eval().double()(x), a[f"{prefix}logits64"], rtol=0, atol=1e-10)
