"""Compare segmenter.py with upstream's code; test its scores and its errors."""

import pytest
import torch
import torch.nn.functional as F

from vit import ViT, ViTConfig, resize_pos_embed
from common import InputError
from fan import FAN, FANConfig
from segmenter import (Segmenter, SegmenterConfig, backbone_settings, confusion, evaluate,
                       load_encoder, predict_classes, scores)

SMALL = dict(num_classes=4, image_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=2)


def small(**kind):
    torch.manual_seed(0)
    return Segmenter(SegmenterConfig(**{**SMALL, **kind})).eval()


def close(got, expected, atol=1e-4):
    torch.testing.assert_close(got, expected, rtol=0, atol=atol, check_dtype=False)


def test_logits_equal_the_model_written_out():
    m, x = small(), torch.rand(2, 3, 27, 50)                            # padded to 32 x 56
    e, d, (mean, std) = m.encoder, m.decoder, (m.encoder.mean, m.encoder.std)
    z = F.pad((x - mean) / std, (0, 6, 0, 5))
    pos = e.pos_embed[:, 1:].mT.unflatten(2, (4, 4))
    pos = F.interpolate(pos, (4, 7), mode="bilinear").flatten(2).mT
    z = torch.cat([(e.cls_token + e.pos_embed[:, :1]).expand(2, -1, -1), e.patch_embed(z) + pos], 1)
    z = e.norm(e.blocks[1](e.blocks[0](z)))[:, 1:]
    z = torch.cat([d.proj_dec(z), d.cls_emb.expand(2, -1, -1)], 1)
    z = d.decoder_norm(d.blocks[1](d.blocks[0](z)))
    patches, classes = (F.normalize(part @ weight, dim=2) for part, weight in
                        ((z[:, :-4], d.proj_patch), (z[:, -4:], d.proj_classes)))
    masks = d.mask_norm(patches @ classes.mT).mT.unflatten(2, (4, 7))
    close(m(x), F.interpolate(masks, (32, 56), mode="bilinear")[:, :, :27, :50], atol=1e-5)


def test_positions_are_resized_as_upstream(golden):
    a = golden("seg_pos_resize")
    close(resize_pos_embed(a["pos"], a["new_grid"].tolist(), "bilinear"), a["resized"], atol=1e-6)


def test_metrics_equal_upstreams_and_mmsegmentations(golden):
    a = golden("seg_metrics")
    m = sum(confusion(a[f"pred_{i}"], a[f"gt_{i}"], 6) for i in range(3))
    assert torch.equal(m, a["confusion_gt_rows"]) and m.dtype == torch.int64
    s = scores(m)
    for key, value in (("accuracy", a["acc"]), ("iou", a["iou"])):
        found = torch.tensor([float("nan") if x is None else x for x in s[key]], dtype=torch.double)
        torch.testing.assert_close(found, 100 * value, rtol=0, atol=6e-5, equal_nan=True)
    assert [round(s[k], 2) for k in ("pixel_accuracy", "mean_accuracy",
                                     "mean_iou")] == a["percent_rounded"].tolist()


def test_parameter_counts_equal_upstream():
    for kind, encoder, decoder in ((dict(), 5_683_392, 1_029_996),
                                   (dict(attn="rpc"), 5_238_720, 955_884)):
        with torch.device("meta"):
            m = Segmenter(SegmenterConfig(num_classes=150, **kind))
        assert [sum(p.numel() for p in part.parameters())
                for part in (m.encoder, m.decoder)] == [encoder, decoder]


@pytest.mark.parametrize("kind,encoder,decoder", [
    (dict(attn="rpc", rpc_layers=(0, 1)), "rpc rpc", "rpc symmetric"),
    (dict(attn="symmetric"), "symmetric symmetric", "symmetric symmetric"),
    (dict(attn="sym_asym"), "rpc softmax", "rpc softmax")])
def test_encoder_and_decoder_layers_have_their_attention(kind, encoder, decoder):
    m = small(**kind, drop_path=0.5, pap=dict(n_iter=3, lambd=0.7, form="paper"))
    assert [" ".join(block.attn.attn for block in part.blocks)
            for part in (m.encoder, m.decoder)] == [encoder, decoder]
    first, decoders = m.encoder.blocks[0].attn, m.decoder.blocks
    assert first.pap == decoders[0].attn.pap and first.pap["n_iter"] == 3
    assert [b.drop_path for b in (*m.encoder.blocks, *decoders)] == [0, 0.5, 0, 0]
    assert decoders[0].attn.attn_drop == decoders[0].mlp.drop.p == 0.1 and not first.attn_drop


@torch.no_grad()
def one_window_at_a_time(model, image, size, window, stride):
    """Predict by the definition: mean logits of all windows."""
    def resize(x, hw):
        return F.interpolate(x, size=hw, mode="bilinear", align_corners=False)
    h, w = image.shape[1:]
    f = min(4 * size / max(h, w), size / min(h, w))
    x = resize(image[None].float() / 255, (int(h * f + 0.5), int(w * f + 0.5)))
    if min(x.shape[2:]) < window:
        f = window / min(x.shape[2:])
        x = resize(x, [int(side * f + 1e-9) for side in x.shape[2:]])
    canvas, count = torch.zeros(1, 4, *x.shape[2:]), torch.zeros(x.shape[2:])
    for top in [*range(0, x.shape[2] - window, stride), x.shape[2] - window]:
        for left in [*range(0, x.shape[3] - window, stride), x.shape[3] - window]:
            at = ..., slice(top, top + window), slice(left, left + window)
            canvas[at] += model(x[at])
            count[at] += 1
    return resize(canvas / count, (h, w))[0]


@pytest.mark.parametrize("hw,how", [
    ((50, 70), dict(size=40, window=32, stride=24)),
    ((30, 30), dict(size=24, window=32, stride=32)),                # enlarged to the window
    ((20, 150), dict(size=48, window=24, stride=17))])              # the long side limits the size
def test_classes_equal_one_window_at_a_time(hw, how):
    m, image = small(), torch.randint(0, 256, (3, *hw), dtype=torch.uint8)
    expected = one_window_at_a_time(m, image, **how)
    first, second = expected.topk(2, dim=0).values
    for batch_size, x in ((1, image), (100, image / 255)):
        same = predict_classes(m, x, **how, batch_size=batch_size) == expected.argmax(0)
        assert same[first - second > 1e-5].all() and same.double().mean() > 0.99


def test_evaluation_uses_index_and_change_and_keeps_mode():
    torch.manual_seed(0)
    source = [(torch.randint(0, 256, (3, 32, 40), dtype=torch.uint8),
               torch.randint(0, 4, (32, 40), dtype=torch.uint8)) for _ in range(5)]
    m, how, seen = small(), dict(size=32, window=32, stride=32), []
    expected = [confusion(predict_classes(m, 255 - image, **how), label, 4)
                for image, label in source]

    def change(images, index):
        seen.extend(index)
        return 255 - images
    row = evaluate(m.train(), source, index=[3, 1], change=change, **how)
    assert row == scores(expected[3] + expected[1])
    assert seen == [3, 1] and m.training
    m.encoder.eval()                                                # as of a frozen encoder
    evaluate(m, source, index=[1], **how)
    assert m.decoder.training and not m.encoder.training
    parts = [evaluate(m, source, change=change, rank=rank, world=2, **how) for rank in (0, 1)]
    assert parts[0] == scores(expected[0] + expected[2] + expected[4])
    assert parts[1] == row


def test_wrong_settings_and_windows_are_errors():
    for bad in (dict(image_size=36), dict(attn="scaled_s")):
        with pytest.raises(ValueError, match=next(iter(bad))):
            SegmenterConfig(**{**SMALL, **bad})
    for bad in (dict(window=30), dict(stride=33)):
        with pytest.raises(ValueError, match=next(iter(bad))):
            predict_classes(small(), torch.rand(3, 40, 40),
                            **dict(size=32, window=32, stride=16) | bad)


@pytest.mark.parametrize("value", [255.0, -1.0, torch.nan])
def test_pixels_outside_zero_to_one_are_an_error(value):
    with pytest.raises(ValueError, match=f"the image has values from {value:g} to {value:g}"):
        predict_classes(small(), torch.full((3, 40, 40), value), size=32, window=32, stride=32)


def test_a_fan_encoder_has_the_classifiers_tokens():
    """The patch tokens are those that the classifier's first class block gets."""
    settings = dict(image_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=2, attn="rpc",
                    eps=1e-5)
    torch.manual_seed(1)
    fan, seen = FAN(FANConfig(**settings)).eval(), []
    m = small(architecture="fan", attn="rpc")
    load_encoder(m, fan)
    fan.cls_attn_blocks[0].register_forward_hook(lambda *call: seen.append(call[1][0]))
    x = torch.rand(2, 3, 32, 32)
    fan(x)
    tokens = m.encoder.tokens((x - fan.mean) / fan.std)
    close(tokens, fan.norm(seen[0][:, 1:]), atol=1e-6)
    assert m(x).shape == (2, 4, 32, 32)
    names = {name.split(".")[1] for name, _ in m.named_parameters() if name.startswith("encoder")}
    assert names == {"patch_embed", "pos_embed", "blocks", "norm"}      # DDP wants no unused ones


def test_a_backbone_computes_what_the_encoder_computes():
    settings = dict(image_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=2)
    backbone = ViT(ViTConfig(**settings, attn="rpc", pap=dict(n_iter=2))).eval()
    m = small(attn="rpc", pap=dict(n_iter=2), eps=1e-6)
    load_encoder(m, backbone)
    seen = []
    backbone.norm.register_forward_hook(lambda *call: seen.append(call[2]))
    x = torch.rand(2, 3, 32, 32)
    backbone(x)
    close(m.encoder.tokens((x - backbone.mean) / backbone.std), seen[0][:, 1:], atol=1e-6)
    expected = settings | dict(architecture="vit", attn="rpc", rpc_layers=(0,), mlp_ratio=4.0,
                               pap=backbone.config.pap)
    del expected["image_size"]
    assert backbone_settings(backbone.config) == expected


def test_a_model_of_your_own_is_no_encoder():
    class MyConfig(ViTConfig):
        """Settings of another network, which could have the names of a ViT's weights."""
    with pytest.raises(InputError, match="MyConfig, but the encoder of a Segmenter is a ViT or a"):
        backbone_settings(MyConfig())


def test_a_fan_encoder_reads_windows_of_any_size():
    m = small(architecture="fan")
    large = Segmenter(SegmenterConfig(**SMALL | dict(image_size=48, architecture="fan"))).eval()
    large.load_state_dict(m.state_dict())
    image = torch.rand(3, 60, 50)
    how = dict(size=48, window=48, stride=24)
    assert torch.equal(predict_classes(m, image, **how), predict_classes(large, image, **how))
