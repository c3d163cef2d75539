"""The commands and the snippets of docs/robustness.md run as printed, at small scale."""

import re
import shlex

import pytest
import timm
import torch
from torchvision.io import write_png

import corrupt_folder
import eval_robust
from conftest import ROOT
from data.shapes import SHAPES, load_shapes
from golden_net import trained_network
from robust import checks
from runs import call
from test_eval_robust import make_checkpoint

PAGE = (ROOT / "docs" / "robustness.md").read_text()
COMMANDS = [line for line in re.search(r"```sh\n(.*?)```", PAGE, re.S)[1]
            .replace("\\\n", " ").splitlines() if not line.startswith("#")]
MAINS = {"eval_robust.py": eval_robust.main, "corrupt_folder.py": corrupt_folder.main}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder with all files that the commands name."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "weights").symlink_to(ROOT / "weights")
    (folder / "out" / "ema").mkdir(parents=True)
    model = make_checkpoint(folder / "out" / "ema" / "last.pt")
    make_checkpoint(folder / "out" / "ema" / "last.pt", more=dict(ema=model.state_dict()))
    (folder / "book.txt").write_text("A function returns a list of names.\n\n" * 20)
    torch.save(timm.create_model("vit_tiny_patch16_224", depth=1).state_dict(),
               folder / "deit_tiny_patch16_224.pth")
    images = load_shapes("test", 4, 240).images
    for c, root in ((eval_robust.IMAGENET[7], "data/imagenet/val"),
                    (list(SHAPES)[0], "photos/val")):
        (folder / root / c).mkdir(parents=True)
        for i, image in enumerate(images):
            write_png(image, str(folder / root / c / f"{i}.png"))
    return folder


def smaller(command):
    """Return the flags of a command at a scale of seconds: few images, steps and queries."""
    command = command.replace("steps=20,40,100 restarts=5", "steps=2,3 restarts=2")
    command = command.replace('"autoattack', '"autoattack steps=2 num_targets=1 queries=5')
    _, script, *flags = shlex.split(command)
    if script != "eval_robust.py" or "--table" in flags:
        return script, flags
    if "pydoc" in command and "--data_dir" not in command:
        flags += ["--data_dir", "book.txt"]               # Python's documentation takes seconds
    if "pydoc" not in command and "--measures" not in flags:
        flags += ["--measures", "clean"]
    limit = 80 if "pydoc" in command else 4
    return script, [*flags, "--limit", limit, "--device", "cpu", "--num_workers", 0, "--seed", 2]


@pytest.mark.parametrize("command", COMMANDS, ids=range(len(COMMANDS)))
def test_commands_run(place, monkeypatch, capsys, command):
    monkeypatch.chdir(place)
    monkeypatch.setattr(checks, "run_checks",
                        lambda model, images, labels, name, **more: print("| checks of |", name))
    script, flags = smaller(command)
    call(MAINS[script], flags)
    assert "| " in capsys.readouterr().out or script == "corrupt_folder.py"


def test_snippets_run(monkeypatch):
    pytest.importorskip("torchattacks")
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: torch.nn.Flatten())
    own, builder = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    model, images, labels = trained_network(20)
    names = dict(model=model, images=images, labels=labels)
    exec(own, names)
    assert names["right"]["worst"].sum() < names["right"]["clean"].sum()
    exec(builder, names)
    assert names["build"]()(images).shape == (20, images[0].numel())
