"""The commands and the snippets of docs/robustness.md run as printed, at small scale."""

import re
import runpy
import shlex

import pytest
import timm
import torch
from torchvision.io import write_png

import eval_robust
from fixtures import ROOT
from data.shapes import load_shapes
from golden_net import trained_network
from studies import checks
from studies.reproduce import attacks as paper_attacks
from runs import call

PAGE = (ROOT / "docs" / "robustness.md").read_text()
COMMANDS = [line for line in re.search(r"```sh\n(.*?)```", PAGE, re.S)[1]
            .replace("\\\n", " ").splitlines() if not line.startswith("#")]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder with all files that the commands name."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "weights").symlink_to(ROOT / "weights")
    torch.save(timm.create_model("vit_tiny_patch16_224", depth=1).state_dict(),
               folder / "deit_tiny_patch16_224.pth")
    name = eval_robust.IMAGENET[7]
    (folder / "data/imagenet/val" / name).mkdir(parents=True)
    (folder / "photos").mkdir()
    for i, image in enumerate(load_shapes("test", 4, 240).images):
        write_png(image, str(folder / "data/imagenet/val" / name / f"{i}.png"))
        write_png(image, str(folder / f"photos/{i}.png"))
    call(eval_robust.main, "--device cpu --measures clean --limit 2 --ckpt",
         [ROOT / "weights/shapes_rpc.pt", "--out_dir", folder / "out/paper"])
    return folder


@pytest.mark.parametrize("command", COMMANDS, ids=range(len(COMMANDS)))
def test_commands_run(place, monkeypatch, capsys, tmp_path, command):
    """Run a command at a scale of seconds: few images and steps."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(checks, "run_checks",
                        lambda model, images, labels, name, softmax: print("| checks of |", name))
    few = eval_robust.autoattack, dict(steps=2, queries=5, num_targets=1)
    monkeypatch.setattr(eval_robust, "ATTACKS", eval_robust.ATTACKS | dict(autoattack=few))
    _, script, *flags = shlex.split(command)
    if script == "-m":
        script, *flags = flags
    more = [] if "--measures" in flags else ["--measures", "clean", "fgsm"]
    more += ["--limit", 2, "--device", "cpu", "--out_dir", tmp_path]
    flags = [2 if flag == "40" else flag for flag in flags]
    if "data/imagenet" in flags:
        more += ["--num_workers", 0]
    if script == "results":
        call(lambda: runpy.run_module("results", run_name="__main__"), flags)
    elif script == "studies.checks":
        call(checks.main, flags)
    elif script == "studies.reproduce.attacks":
        monkeypatch.setattr(eval_robust, "FLAGS", dict(eval_robust.FLAGS))
        monkeypatch.setattr(eval_robust, "attack", eval_robust.attack)
        call(paper_attacks.main, flags, more)
    else:
        call(eval_robust.main, flags, more)
    assert "| " in capsys.readouterr().out


def test_snippets_run(place, monkeypatch, capsys):
    pytest.importorskip("torchattacks")
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 224 ** 2, 1000))
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: net)
    own, networks, copies = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    model, images, labels = trained_network(20)
    names = dict(model=model, images=images, labels=labels)
    exec(own, names)
    assert names["right"]["worst"].sum() < names["right"]["clean"].sum()
    monkeypatch.chdir(place)
    few = '"--num_workers", "0", "--limit", "2", "--measures"'
    exec(networks.replace('"--measures"', few), names)
    assert {row["name"] for row in names["rows"]} == {"clean", "fog", "pgd"}
    assert "| resnet18" in capsys.readouterr().out
    exec(copies, {})
    assert len(list((place / "foggy").glob("*.png"))) == 4
