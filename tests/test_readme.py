"""What the README tells a reader to type exists, and does what it says."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data.shapes import load_shapes

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "lecture/WALKTHROUGH.md",
         *sorted(set(ROOT.glob("docs/*.md")) - {ROOT / "docs/change.md"}),      # has its own tests
         *sorted(ROOT.glob("studies/results/**/README.md"))]
OTHERS = ("--help", "--dist", "--standalone", "--nproc_per_node", "--nnodes", "--node_rank",
          "--master_addr", "--include")                                 # of other programs
CODE = {path: path.read_text() for path in ROOT.glob("**/*.py") if path.parent.name != "tests"}


def source_of(script):
    """The text of a script and of the modules of ours that it imports."""
    found, todo = {}, [ROOT / script]
    while todo:
        path = todo.pop()
        if path in CODE and path not in found:
            found[path] = CODE[path]
            imports = r"^ *(?:from ([\w.]+) )?import ([\w., (]+)"
            for package, names in re.findall(imports, CODE[path], re.M):
                modules = re.findall(r"[\w.]+", names)
                if package:
                    modules = [package, *(f"{package}.{name}" for name in modules)]
                todo += [ROOT / f"{name.replace('.', '/')}.py" for name in modules]
    assert found, script
    return "".join(found.values())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_script_and_flag_shown_exists(page):
    text = page.read_text().replace("\\\n", " ")
    shown = "\n".join(a or b for a, b in re.findall(r"```sh\n(.*?)```|`([^`\n]+)`", text, re.S))
    shown = re.sub(r"-m ((?:studies\.|lecture\.)[\w.]+)",
                   lambda m: m[1].replace(".", "/") + ".py", shown)
    shown = shown.replace("lecture/exercises.py", "lecture/exercises/__main__.py")
    for line in shown.splitlines():
        for command in re.split(r"[|&#]", line):
            script = re.search(r"(?<!\S)[\w/]+\.py(?=\s|$)", command)
            ours = script and "python" in command and "pytest" not in command
            source = source_of(script[0]) if ours else "".join(CODE.values())
            for flag in re.findall(r"(?<!\S)--[a-z][\w-]*", command):
                name = flag.removeprefix("--").removeprefix("no-")
                assert f'"--{name}"' in source or f'"{name}"' in source or flag in OTHERS, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_file_leads_to_one(page):
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert link.startswith("http") or (page.parent / link).exists(), link


def test_every_file_named_in_the_tables_has_what_they_name():
    names = [name for page in PAGES for name in re.findall(r"`(\w+)\.(\w+)`", page.read_text())]
    modules = {name for name, _ in names} & {path.stem for path in ROOT.glob("*.py")}
    assert len(modules) > 5
    for module, name in names:
        if module in modules and name not in ("py", "png"):
            source = (ROOT / f"{module}.py").read_text()
            assert re.search(rf"^(def|class) {name}\b|^{name} =", source, re.M), f"{module}.{name}"


def test_every_address_in_docs_stands_in_a_line_of_code():
    table = (ROOT / "docs" / "equations.md").read_text()
    code = "\n".join(path.read_text() for path in ROOT.glob("*.py"))
    addresses = re.findall(r"`(# [A-Z][^`]*\d[^`]*|# App\. [A-Z])`", table)
    assert len(addresses) > 15
    for address in addresses:
        assert re.search(rf"^ +\S.*{re.escape(address)}(?!\d)", code, re.M), address


# --- the commands and snippets, run ---------------------------------------------------------------

TINY = "--num_images 64 --batch_size 16 --epochs 1 --max_steps 2 --device cpu".split()
QUICK = "--measures clean --limit 8 --device cpu".split()


def blocks(language, text=README):
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)


def commands(line):
    """The python commands of a line of the README, as lists of words."""
    parts = line.split("#")[0].split("&&")
    return [shlex.split(part) for part in parts if part.split()[0] == "python"]


def run(words, cwd):
    """One command of the README, made small."""
    small = TINY if words[1].startswith("train_") else QUICK
    return started([*words[1:], *small], cwd)


def started(words, cwd):
    """Python's result with these words."""
    return subprocess.run([sys.executable, *words], cwd=cwd, capture_output=True, text=True)


@pytest.fixture(scope="module")
def tree(programs, tmp_path_factory):
    return shutil.copytree(programs, tmp_path_factory.mktemp("tree") / "tree")


def test_the_first_command_evaluates_what_it_trained_and_a_second_time_it_refuses_the_old_run(tree):
    first, line = blocks("sh")[0].splitlines()
    (look,), (train, evaluate) = commands(first), commands(line)
    done = started(look[1:], tree)
    assert done.returncode == 0 and (tree / "look.png").exists(), done.stderr
    assert evaluate[evaluate.index("--ckpt") + 1] == train[train.index("--out_dir") + 1]
    for words in (train, evaluate):
        done = run(words, tree)
        assert done.returncode == 0, done.stderr
    rows = (tree / "out/first/robust/results.jsonl").read_text().splitlines()
    named = {json.loads(row)["checkpoint"] for row in rows}
    assert named == {word for word in evaluate if word.startswith(("weights/", "out/"))}
    assert len(named) == 3
    again = run(train, tree)
    assert again.returncode and "--out_dir" in again.stderr and "Traceback" not in again.stderr


def test_an_attention_of_ones_own_is_one_entry_trained_and_evaluated_as_printed(tree):
    section = README.partition("## Change it\n")[2].partition("\n## ")[0]
    entry = blocks("python", section)[0].partition("\n")[2]
    source, table = (tree / "attention.py").read_text(), "\nATTENTIONS = {\n"
    assert source.count(table) == 1
    (tree / "attention.py").write_text(source.replace(table, table + entry))
    train, evaluate = commands(blocks("sh", section)[0].strip())
    done = run(train, tree)
    assert done.returncode == 0 and "shapes mine" in done.stdout, done.stdout + done.stderr
    done = run(evaluate, tree)
    assert done.returncode == 0 and "mine" in done.stdout, done.stdout + done.stderr


def test_the_commands_for_your_data_run_in_their_order(tree):
    scenes = load_shapes("train", 48)
    for i, (image, label) in enumerate(zip(scenes.images, scenes.labels.tolist())):
        of_class = tree / f"photos/{label % 2}"
        mask = Image.fromarray(np.full((32, 32), label % 2, np.uint8))
        for folder in (of_class, tree / "masks/images", tree / "masks/annotations"):
            folder.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(image.permute(1, 2, 0).numpy())
        picture.save(of_class / f"{i}.jpg")
        picture.save(tree / f"masks/images/{i}.jpg")
        mask.save(tree / f"masks/annotations/{i}.png")
    picture.save(tree / "photo.jpg")
    (tree / "notes.txt").write_text("the cat sat on the mat and looked at the dog\n" * 400)
    section = README.partition("## Your data\n")[2].partition("\n## ")[0]
    small = {"train_cls.py": "--max_steps 2", "eval_robust.py": "--measures clean",
             "train_lm.py": "--steps 2 --warmup 0 --context 16 --words 0",
             "train_seg.py": "--epochs 1 --max_steps 2 --batch_size 8 --num_workers 0"}
    for line in blocks("sh", section)[0].splitlines():
        if line.startswith("python"):
            words = shlex.split(line, comments=True)
            extra = [*small[words[1]].split(), "--device", "cpu"] if words[1] in small else []
            done = started([*words[1:], *extra], tree)
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    assert (tree / "out/folder_symmetric/best.pt").exists()


def test_the_snippets_run_as_printed(tmp_path, monkeypatch):
    torch.manual_seed(0)
    k, v = torch.randn(2, 2, 3, 7, 5)                               # (B, H, N, D), odd sizes
    images, labels = torch.rand(2, 3, 32, 32), torch.tensor([1, 2])
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10)).eval()
    (tmp_path / "weights").symlink_to(ROOT / "weights")
    monkeypatch.chdir(tmp_path)                                     # from another folder
    for code in blocks("python"):
        if "import" in code:
            names = dict(k=k, v=v, model=model, labels=labels,
                         images=(255 * images).byte() if "corrupt" in code else images)
            exec(code, names)
            shapes = [names[name].shape for name in ("h", "foggy") if name in names]
            shapes += [flags.shape for flags in names.get("right", {}).values()]
            assert set(shapes) <= {v.shape, images.shape, labels.shape}
            for name in ("classifier", "segments"):
                if name in names:
                    assert names[name](torch.rand(1, 3, 32, 32)).shape[1] in (10, 11)
