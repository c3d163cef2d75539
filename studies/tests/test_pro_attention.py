"""Compare ProAttention with the released function; test its gradients and the tables."""

import pytest
import torch

import common
import vit
from studies import pro_attention as study
from studies.robust_attentions import PENALTIES, pro_attention

CASES = {"l1": dict(penalty="l1"), "mcp": dict(penalty="mcp"), "huber": dict(delta=1.0),
         "huber4": {}, "mcp_L1_t05": dict(penalty="mcp", steps=1, step=0.5, gamma=2.0)}


@pytest.mark.parametrize("group", "ab")
@pytest.mark.parametrize("name", CASES)
def test_output_equals_the_released_function(golden, group, name):
    z = {key[3:]: x for key, x in golden("pro_attention").items() if key.startswith(group)}
    for hide_gradient in (False, True):
        found = pro_attention(z["q"], z["k"], z["v"], **CASES[name], hide_gradient=hide_gradient)
        assert (found - z[name]).abs().max() < 1e-10


@pytest.mark.parametrize("penalty", PENALTIES)
def test_released_gradient_treats_weights_as_constants(penalty):
    """One step with fixed weights w is a weighted mean of the values, so its gradient is w."""
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 5, 4, generator=random, dtype=torch.float64, requires_grad=True)
               for _ in range(3))
    settings = dict(penalty=penalty, delta=1.0, gamma=2.0, steps=1, eps=0.01)
    A = (q @ k.mT / 2).softmax(-1).detach()
    d = torch.cdist(A @ v, v).detach() + 0.01
    w = A * PENALTIES[penalty](d, 2.0, 1.0, 0.01)
    expected = (w / w.sum(-1, keepdim=True)).sum(-2)[..., None].expand_as(v)

    def gradient(hide):
        h = pro_attention(q, k, v, **settings, hide_gradient=hide)
        return torch.autograd.grad(h.sum(), v)[0]
    assert torch.allclose(gradient(True), expected, atol=1e-12)
    assert not torch.allclose(gradient(False), expected, atol=1e-3)


def softmax_checkpoint():
    torch.manual_seed(0)
    config = dict(image_size=32, patch_size=8, num_classes=10, embed_dim=16, depth=2, num_heads=2,
                  attn="softmax")
    model = vit.ViT(vit.ViTConfig(**config))
    return dict(task="classification", model=model.state_dict(), model_config=config)


def test_stored_tables_match_the_rows():
    assert study.report(study.read_rows()) in (study.RESULTS / "details.md").read_text()


def test_stored_seeds_are_complete_on_one_processor():
    rows = study.read_rows()
    for seed in {row["seed"] for row in rows}:
        of = [row for row in rows if row["seed"] == seed]
        assert sorted(row["variant"] for row in of) == sorted(study.VARIANTS)
        assert len({row["device"] for row in of}) == 1


def test_run_skips_stored_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "RESULTS", tmp_path)
    monkeypatch.setattr(study, "VARIANTS", dict(softmax=None, l1=("penalty=l1",)))
    trained = []

    def train(folder, seed):
        folder.mkdir(exist_ok=True)
        trained.append(seed)
        common.save(folder / "last.pt", softmax_checkpoint())
    monkeypatch.setattr(study, "train", train)
    for _ in range(2):
        study.main(["--run", "--seeds", "3", "--limit", "2", "--out_dir", str(tmp_path)])
    assert [row["variant"] for row in study.read_rows()] == ["softmax", "l1"] and trained == [3]
