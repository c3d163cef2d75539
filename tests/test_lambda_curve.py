"""referee/lambda_curve.py: what lambda does to layer 0, in networks as they are and trained so."""

import json

import pytest
import torch

from attention import FORMS
from common import InputError, read_log
from conftest import ROOT
from referee import lambda_curve, line
from vit import ViT, ViTConfig


def test_a_lambda_that_was_trained_is_a_point_of_the_curve(tmp_path, monkeypatch):
    (tmp_path / "line").mkdir()
    monkeypatch.setattr(line, "RESULTS", tmp_path)
    monkeypatch.setattr(lambda_curve, "stored", lambda name: [
        line.Network(arm, seed, loss, {"clean": top1, "pgd 2/255": 60.0}) for arm, seed, loss, top1 in (
            ("uniform-l0", 21, 0.5, 90.0), ("released-4-n4", 21, 0.2, 80.0), ("released-4-n4", 22, 0.4, 82.0),
            ("symmetric-e8", 21, 0.3, 95.0))])
    (tmp_path / "line/training.jsonl").write_text(json.dumps(
        dict(run="released-4-n4_s21", entropy=2.5, nonzero_S={"0": [0.1, 0.5]})))
    trained = lambda_curve.trained()
    assert trained[0] == {"form": "paper", "lambd": 0, "top1": 90, "loss": 0.5, "clean": 90, "pgd 2/255": 60}
    assert trained[1].items() > dict(form="released", lambd=4, entropy=2.5, share=0.5).items()
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in lambda_curve.table(trained).splitlines()[2:]]
    assert cells == [["paper", "0", "1", "0.500", "90.0", "60.0", "", "", ""],
                     ["released", "4", "2", "0.300", "81.0", "60.0", "", "2.50", "0.50"]]
    rows = [dict(network="shapes_rpc", form=form, lambd=x, top1=9, entropy=1, uniform=4, share=0.5)
            for form in FORMS for x in lambda_curve.LAMBDAS]
    lambda_curve.draw(rows, tmp_path / "x.png", trained)
    assert (tmp_path / "x.png").stat().st_size > 5000


def test_with_lambda_0_layer_0_gives_the_mean_of_its_values():
    model = ViT(ViTConfig(image_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2,
                          num_classes=10, attn="rpc")).eval()
    model.blocks[0].attn.pap = dict(n_iter=4, lambd=0, **FORMS["paper"])
    seen = lambda_curve.attend(model, torch.rand(4, 3, 16, 16), torch.zeros(4, dtype=torch.long))
    assert seen["entropy"] == pytest.approx(seen["uniform"]) and seen["share"] > 0.99


def test_a_network_s_own_layer_0_is_measured_as_it_was_trained_and_must_be_rpc(capsys):
    lambda_curve.main([str(ROOT / "weights/shapes_rpc.pt"), "--as_trained"])
    row, stored = json.loads(capsys.readouterr().out), read_log(line.RESULTS / "line/lambda.jsonl")
    same = [r for r in stored if (r["network"], r["form"], r["lambd"]) == ("shapes_rpc", "released", 4)]
    assert row["run"] == "shapes_rpc.pt"
    assert [row[name] for name in ("entropy", "share")] == pytest.approx([same[0]["entropy"], same[0]["share"]], abs=1e-3)
    with pytest.raises(InputError, match="layer 0"):
        lambda_curve.main([str(ROOT / "weights/shapes_symmetric.pt"), "--as_trained"])
