"""The evaluator on models that are not ours: files of timm, DeiT and the released code, and functions of one's own."""

import argparse

import pytest
import timm
import torch
from torchvision.io import write_png

from data.shapes import load_shapes
from robust import corruptions, sources
from test_eval_robust import error, make_checkpoint, rows_of

BUILDERS = '''
import timm
import torch
import torchvision


class FromTimm(torch.nn.Module):
    """Pixels in [0, 1] -> logits."""

    def __init__(self):
        super().__init__()
        self.net = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10, depth=1)

    def forward(self, x):
        return self.net((x - 0.5) / 0.5)


def from_torchvision():
    return torchvision.models.squeezenet1_1(num_classes=10)


def few():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 5))


def probabilities():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 10), torch.nn.Softmax(1))


def nothing():
    return None
'''


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a ViT of timm's in three layouts, and a module of builders; and the network."""
    folder = tmp_path_factory.mktemp("foreign")
    torch.manual_seed(0)
    net = timm.create_model("vit_tiny_patch16_224", img_size=48, depth=2, num_classes=10).eval()
    weights = net.state_dict()
    torch.save(weights, folder / "timm.pt")
    torch.save(dict(model=weights, args=argparse.Namespace(lr=1)), folder / "deit.pth")
    released = {name: w[192:] if ".qkv." in name else w for name, w in weights.items()}        # keys are the queries
    torch.save(dict(model=released, args=argparse.Namespace(robust=True, num_iter=2, lambd=3.0, layer=1)),
               folder / "released.pth")
    torch.save({k: w for k, w in weights.items() if "head" not in k}, folder / "headless.pt")
    (folder / "my.py").write_text(BUILDERS)
    return folder, net


@pytest.mark.parametrize("name", ["timm.pt", "deit.pth"])
@pytest.mark.parametrize("normalize, mean, std", [("imagenet", (.485, .456, .406), (.229, .224, .225)),
                                                  ("half", (.5,) * 3, (.5,) * 3)])
def test_a_file_of_timm_or_deit_gives_timms_logits(files, name, normalize, mean, std):
    folder, net = files
    m = sources.load_model(folder / name, "cpu", normalize=normalize)
    x = torch.rand(3, 3, 48, 48)
    z = (x - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(m.model(x), net(z).detach(), atol=1e-5, rtol=0)
    assert m.about["normalize"] == normalize and m.size == 48 and m.about["model"] == f"{name[:4]}, softmax"


def test_a_file_of_the_released_code_says_its_attention(files):
    config = sources.load_model(files[0] / "released.pth", "cpu").model.config
    assert (config.attn, config.pap["n_iter"], config.pap["lambd"], config.rpc_layers) == ("rpc", 2, 3.0, (1,))


@pytest.mark.parametrize("model", ["--ckpt timm.pt", "--ckpt released.pth", "--model my.py:FromTimm --image_size 32",
                                   "--model my.py:from_torchvision --image_size 48"])
def test_models_of_others_are_measured_clean_corrupted_and_attacked(files, monkeypatch, tmp_path, model):
    monkeypatch.chdir(files[0])
    rows = rows_of(tmp_path, *model.split(), "--data", "shapes", "--measures", "clean", "corruptions type=fog",
                   "pgd steps=2", "adaptive_pgd steps=2", "--eps", "1/255", "--limit", 4)
    assert [row["measure"] for row in rows] == ["clean", "corruptions", "pgd", "adaptive_pgd"]
    assert rows[0]["checkpoint"] == model.split()[1] and rows[0].get("normalize") == (
        "imagenet" if "--ckpt" in model else None)


@pytest.mark.parametrize("flags, words", [
    ("--model my.py:absent", "my.py has no function absent"),
    ("--model my.py", "my.py has no function build"),
    ("--model none.py:build", "there is no file none.py, expected FILE.py:FUNCTION"),
    ("--model my.py:nothing", "nothing() returns a NoneType, expected a module"),
    ("--model my.py:few", "--model my.py:few: it gives 5 logits, --data shapes has 10 classes"),
    ("--model my.py:probabilities", "the model returns probabilities"),
    ("--model my.py:from_torchvision --preset paper", "space=normalized needs a model with .mean and .std"),
    ("--ckpt headless.pt", "--ckpt headless.pt: it has no head.weight"),
    ("", "required: --ckpt or --model"),
])
def test_what_cannot_be_evaluated_is_one_line(files, monkeypatch, flags, words):
    monkeypatch.chdir(files[0])
    assert words in error(*flags.split(), "--data", "shapes", "--measures", "fgsm", "--limit", 4, "--out_dir", "bad")


# --- corrupted folders -----------------------------------------------------------------------------------------------

def corrupt_folder(monkeypatch, *flags):
    monkeypatch.setattr("sys.argv", ["corruptions", *map(str, flags)])
    corruptions.main()


@pytest.mark.parametrize("task, side, crop_pct", [("imagenet", 64, .875), ("folder", 32, 1)])
def test_a_corrupted_folder_read_back_has_the_numbers_of_jpeg_files_made_on_the_fly(tmp_path, monkeypatch, capsys, task,
                                                                                    side, crop_pct):
    images = load_shapes("test", 40, side).images
    for i, image in enumerate(images):
        (tmp_path / "val" / f"n{i % 10}").mkdir(parents=True, exist_ok=True)
        write_png(image, str(tmp_path / "val" / f"n{i % 10}" / f"{i}.png"))
    make_checkpoint(tmp_path / "m.pt", [f"n{i}" for i in range(10)], task=task)
    corrupt_folder(monkeypatch, tmp_path / "val", tmp_path / "c", "--types", "fog", "gaussian_noise",
                   "--severities", 5, 2, "--size", 32, "--crop_pct", crop_pct, "--seed", 3)
    assert "40 images in 4 forms" in capsys.readouterr().out
    assert sorted(p.name for p in (tmp_path / "c" / "fog").iterdir()) == ["2", "5"]
    how = ("--ckpt", tmp_path / "m.pt", "--data_dir", tmp_path, "--num_workers", 0, "--severities", 2, 5, "--seed", 3)
    made = rows_of(tmp_path / "made", *how, "--measures", "corruptions type=fog,gaussian_noise jpeg85=yes")
    read = rows_of(tmp_path / "read", *how, "--measures", "corruptions type=fog,gaussian_noise",
                   "--corrupted_dir", tmp_path / "c")
    assert [row["right"] for row in made] == [row["right"] for row in read]
    assert len({str(row["right"]) for row in made}) == 2 and made[0]["top1"] != made[0]["top5"]
    with pytest.raises(ValueError, match="holds files already, expected a new folder"):
        corrupt_folder(monkeypatch, tmp_path / "val", tmp_path / "c")
    with pytest.raises(ValueError, match="nowhere"):
        corrupt_folder(monkeypatch, tmp_path / "nowhere", tmp_path / "d")
