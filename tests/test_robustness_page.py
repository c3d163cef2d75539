"""The commands and the snippets of docs/robustness.md run as printed, made small."""

import re
import shlex

import pytest
import timm
import torch
from torchvision.io import write_png

import eval_robust
from conftest import ROOT
from data.shapes import SHAPES, load_shapes
from golden_net import trained_network
from robust import checks, corruptions, imagenet, results
from runs import call
from test_eval_robust import make_checkpoint
from test_eval_tasks import save_language_model, save_segmenter

PAGE = (ROOT / "docs" / "robustness.md").read_text()
COMMANDS = [line.split("#")[0] for line in re.search(r"```sh\n(.*?)```", PAGE, re.S)[1].splitlines()]
SMALL = "--limit 4 --device cpu --num_workers 0 --seed 2".split()
MAINS = {"eval_robust.py": eval_robust.main, "robust.results": results.main,
         "robust.corruptions": corruptions.main}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with everything that the commands name."""
    folder = tmp_path_factory.mktemp("page")
    for name, kind in (("a", "rpc"), ("b", "softmax")):
        (folder / "out" / name).mkdir(parents=True)
        model = make_checkpoint(folder / "out" / name / "last.pt", attn=kind)
        make_checkpoint(folder / "out" / name / "last.pt", attn=kind,
                        more=dict(ema=model.state_dict()))
    for name, save in (("seg_camvid_rpc", lambda to: save_segmenter(to / "last.pt")),
                       ("pydoc_rpc", lambda to: save_language_model(to, "last.pt"))):
        (folder / "out" / name).mkdir()
        save(folder / "out" / name)
    torch.save(timm.create_model("vit_tiny_patch16_224", depth=1).state_dict(),
               folder / "deit_tiny_patch16_224.pth")
    images = load_shapes("test", 4, 240).images
    for c, root in ((imagenet.CLASSES[7], "data/imagenet/val"), (list(SHAPES)[0], "photos/val")):
        (folder / root / c).mkdir(parents=True)
        for i, image in enumerate(images):
            write_png(image, str(folder / root / c / f"{i}.png"))
    return folder


@pytest.mark.parametrize("command", COMMANDS, ids=range(len(COMMANDS)))
def test_a_command_runs(place, monkeypatch, capsys, command):
    monkeypatch.chdir(place)
    monkeypatch.setattr(checks, "run", lambda *given: print("| checks of |", given[3]))
    _, *words = shlex.split(command)
    script, *flags = words[1:] if words[0] == "-m" else words
    if script == "eval_robust.py":
        flags += [*SMALL, "--resume"]
        if "pydoc" in command:
            flags += ["--limit", "40"]
        elif "--measures" not in flags or "all" in flags:                  # they take minutes
            flags += ["--measures", "clean"]
        flags = [word.replace("autoattack", "autoattack queries=5") for word in flags]
    call(MAINS[script], flags)
    assert "| " in capsys.readouterr().out or script == "robust.corruptions"


def test_the_snippets_run(monkeypatch):
    pytest.importorskip("torchattacks")
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: torch.nn.Flatten())
    own, builder = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    model, images, labels = trained_network(20)
    names = dict(model=model, images=images, labels=labels)
    exec(own, names)
    assert names["right"]["worst"].sum() < names["right"]["clean"].sum()
    exec(builder, names)
    assert names["build"]()(images).shape == (20, images[0].numel())
