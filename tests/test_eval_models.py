"""The evaluator on models that are not ours: files of timm, DeiT and the released code, and functions of one's own."""

import argparse

import pytest
import timm
import torch
from torchvision.io import write_png
from torchvision.transforms.v2.functional import InterpolationMode, center_crop, resize

from common import InputError
from data.shapes import load_shapes
from robust import corruptions, imagenet, sources
from test_eval_robust import error, make_checkpoint, rows_of, run

BUILDERS = '''
import timm, torch, torchvision
from torchvision.transforms.v2 import Normalize


def from_timm():
    return torch.nn.Sequential(Normalize([0.5] * 3, [0.5] * 3), timm.create_model("vit_tiny_patch16_224", img_size=32,
                                                                                  num_classes=10, depth=1))


def from_torchvision():
    return torchvision.models.squeezenet1_1(num_classes=10)


def few():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 5))


def probabilities():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 10), torch.nn.Softmax(1))


def thousand():
    torch.manual_seed(0)
    net = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
    net.head.weight.data.normal_()
    return net
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


@pytest.mark.parametrize("model", ["--ckpt timm.pt", "--ckpt released.pth", "--model my.py:from_timm --image_size 32",
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
    ("--model my.py:few", "--model my.py:few has 5 classes"),
    ("--ckpt headless.pt", "--ckpt headless.pt: it has no head.weight"),
    ("", "required: --ckpt or --model"),
])
def test_what_cannot_be_evaluated_is_one_line(files, monkeypatch, flags, words):
    monkeypatch.chdir(files[0])
    assert words in error(*flags.split(), "--data", "shapes", "--measures", "fgsm", "--limit", 4, "--out_dir", "bad")


def test_probabilities_for_logits_are_a_traceback(files, monkeypatch):
    monkeypatch.chdir(files[0])
    with pytest.raises(ValueError, match="probabilities"):
        run("--model", "my.py:probabilities", "--data", "shapes", "--measures", "fgsm", "--limit", 4, "--out_dir", "bad")


# --- some of ImageNet's classes --------------------------------------------------------------------------------------

def test_some_of_imagenets_folders_are_evaluated_over_all_thousand_logits(files, tmp_path, monkeypatch):
    """Timm's own prediction is right where it is the index of the folder's name among all 1,000."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(files[0])
    import my
    net, images = my.thousand().eval(), load_shapes("test", 12, 40).images
    torch.save(net.state_dict(), "timm.pt")
    x = torch.stack([center_crop(resize(image, [36], InterpolationMode.BICUBIC, antialias=True), [32])
                     for image in images]).float() / 255
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((.485, .456, .406), (.229, .224, .225)))
    own, normalised = net(x).argmax(1), net((x - mean) / std).argmax(1)
    labels = torch.where(torch.arange(12) % 3 == 0, own, torch.arange(12) * 80)           # some are right
    labels = torch.where(torch.arange(12) % 4 == 1, normalised, labels)
    for i, k in enumerate(labels.tolist()):
        (tmp_path / "val" / imagenet.CLASSES[k]).mkdir(parents=True, exist_ok=True)
        write_png(images[i], f"val/{imagenet.CLASSES[k]}/{i}.png")
    for model, predicted in ((f"--model {files[0]}/my.py:thousand --image_size 32", own), ("--ckpt timm.pt", normalised)):
        row, = rows_of(tmp_path / model[2:5], *model.split(), "--data_dir", ".", "--measures", "clean",
                       "--num_workers", 0)
        right = (predicted == labels).double().mean().item()
        assert 0 < right < 1 and row["images"] == 12 and row["imagenet1k"]
        assert row["top1"] == pytest.approx(100 * right, abs=1e-3)


# --- corrupted folders -----------------------------------------------------------------------------------------------

def corrupt_folder(monkeypatch, *flags):
    monkeypatch.setattr("sys.argv", ["corruptions", *map(str, flags)])
    corruptions.main()


@pytest.mark.parametrize("task, side, crop_pct", [("imagenet", 64, .875), ("folder", 32, 1)])
def test_a_corrupted_folder_read_back_has_the_numbers_of_jpeg_files_made_on_the_fly(tmp_path, monkeypatch, capsys, task,
                                                                                    side, crop_pct):
    images = load_shapes("test", 20, side).images
    for i, image in enumerate(images):
        (tmp_path / "val" / f"n{i % 10}").mkdir(parents=True, exist_ok=True)
        write_png(image, str(tmp_path / "val" / f"n{i % 10}" / f"{i}.png"))
    make_checkpoint(tmp_path / "m.pt", [f"n{i}" for i in range(10)], task=task)
    corrupt_folder(monkeypatch, tmp_path / "val", tmp_path / "c", "--types", "fog", "gaussian_noise",
                   "--severities", 5, 2, "--size", 32, "--crop_pct", crop_pct, "--seed", 3)
    assert sorted(p.name for p in (tmp_path / "c" / "fog").iterdir()) == ["2", "5"]
    how = ("--ckpt", tmp_path / "m.pt", "--data_dir", tmp_path, "--num_workers", 0, "--seed", 3)
    made = rows_of(tmp_path / "made", *how, "--severities", 2, 5, "--measures",
                   "corruptions type=gaussian_noise,fog jpeg85=yes")
    # of all types and severities those that are there; the others are named
    capsys.readouterr()
    read = rows_of(tmp_path / "read", *how, "--measures", "corruptions", "--corrupted_dir", tmp_path / "c")
    assert [row["setting"]["severities"] for row in read] == [[2, 5]] * 2
    assert [row["right"] for row in made] == [row["right"] for row in read]
    assert len({str(row["right"]) for row in made}) == 2 and made[0]["top1"] != made[0]["top5"]
    with pytest.raises(FileExistsError):
        corrupt_folder(monkeypatch, tmp_path / "val", tmp_path / "c")
    with pytest.raises(InputError, match="nowhere"):
        corrupt_folder(monkeypatch, tmp_path / "nowhere", tmp_path / "d")
