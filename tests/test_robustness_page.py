"""The commands and the snippets of docs/robustness.md run as printed, at small scale."""

import re
import shlex

import pytest
import timm
import torch
from torchvision.io import write_png

import eval_robust
from fixtures import ROOT
from data.shapes import load_shapes
from golden_net import trained_network
from robust import checks
from runs import call
from test_eval_robust import make_checkpoint

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
    make_checkpoint(folder / "net.pt")
    call(eval_robust.main, "--device cpu --measures clean --limit 2 --ckpt",
         [folder / "net.pt", "--out_dir", folder / "out/shapes_rpc/robust"])
    return folder


@pytest.mark.parametrize("command", COMMANDS, ids=range(len(COMMANDS)))
def test_commands_run(place, monkeypatch, capsys, command):
    """Run a command at a scale of seconds: few images and steps."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(checks, "run_checks",
                        lambda model, images, labels, name, softmax: print("| checks of |", name))
    few = eval_robust.Attack(eval_robust.autoattack, dict(steps=2, queries=5, num_targets=1))
    monkeypatch.setitem(eval_robust.ATTACKS, "autoattack", few)
    _, script, *flags = shlex.split(command)
    if script == "-m":
        return call(checks.main, flags[1:])
    if "--table" not in flags:
        more = [] if "--measures" in flags else ["--measures", "clean", "fgsm"]
        flags += [*more, "--limit", 2, "--device", "cpu"]
        flags = [2 if flag == "40" else flag for flag in flags]
        if "data/imagenet" in flags:
            flags += ["--num_workers", 0]
    call(eval_robust.main, flags)
    assert "| " in capsys.readouterr().out


def test_snippets_run(place, monkeypatch):
    pytest.importorskip("torchattacks")
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: torch.nn.Flatten())
    own, builder, copies = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    model, images, labels = trained_network(20)
    names = dict(model=model, images=images, labels=labels)
    exec(own, names)
    assert names["right"]["worst"].sum() < names["right"]["clean"].sum()
    exec(builder, names)
    assert names["build"]()(images).shape == (20, images[0].numel())
    monkeypatch.chdir(place)
    exec(copies, {})
    assert len(list((place / "photos").glob("*.fog.png"))) == 4
