"""Test README.md and all pages: every command runs; every name, flag and link exists."""

import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from platform import python_version

import numpy as np
import pytest
import torch
from PIL import Image

from data.shapes import load_shapes
from eval_robust import ATTACKS
from processes import run_command

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "lecture/WALKTHROUGH.md",
         *sorted(set(ROOT.glob("docs/*.md")) - {ROOT / "docs/change.md"}),      # has its own tests
         *sorted(ROOT.glob("studies/**/README.md"))]
OTHERS = ("--help", "--dist", "--standalone", "--nproc_per_node", "--nnodes", "--node_rank",
          "--master_addr", "--include", "--rdzv_id", "--no-deps", "--target")   # other programs
CODE = "".join(path.read_text() for path in ROOT.glob("**/*.py") if path.parent.name != "tests")


SCENES = "--num_images 64 --batch_size 16 --epochs 1 --max_steps 2"
SMALL = {"train_cls.py": "--max_steps 2",
         "eval_robust.py": "--measures clean pgd --eps 2/255 --steps 1 --limit 8",
         "train_seg.py": "--epochs 1 --max_steps 2 --batch_size 8 --num_workers 0",
         "train_lm.py": "--steps 2 --warmup 0 --context 16 --words 0"}      # per script
EVALUATION = {"train_seg.py": "--limit 4 --severities 3",
              "train_lm.py": "--limit 500"}                                 # with --eval_only


def blocks(language, text=README):
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)


def commands(section):
    """Return the python commands of a section as lists of words; && separates two commands."""
    lines = "".join(blocks("sh", section)).replace("\\\n", " ").splitlines()
    parts = [part for line in lines for part in line.split("&&")]
    words = [shlex.split(part, comments=True) for part in parts]
    return [command[1:] for command in words if command[:1] == ["python"]]


SECTIONS = {section.partition("\n")[0]: section for section in README.split("\n## ")
            if commands(section)}


@pytest.fixture(scope="module")
def tree(copy_programs, tmp_path_factory):
    """Copy the programs; add small photos, masks, a text and the README's attention."""
    tree = copy_programs(tmp_path_factory.mktemp("tree") / "tree")
    scenes = load_shapes("train", 48)
    for i, (image, label) in enumerate(zip(scenes.images, scenes.labels.tolist())):
        mask = Image.fromarray(np.full((32, 32), label % 2, np.uint8))
        folders = tree / f"photos/{label % 2}", tree / "masks/images", tree / "masks/annotations"
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(image.permute(1, 2, 0).numpy())
        picture.save(folders[0] / f"{i}.jpg")
        picture.save(folders[1] / f"{i}.jpg")
        mask.save(folders[2] / f"{i}.png")
    picture.save(tree / "photo.jpg")
    text = "".join(f"the cat sat on mat {i} and looked at the dog\n" for i in range(400))
    (tree / "notes.txt").write_text(text)
    pydoc = tree / f"out/cache/pydoc_{python_version()}"        # making this text takes seconds
    pydoc.mkdir(parents=True)
    for split in ("train", "valid", "test"):
        (pydoc / f"wiki.{split}.tokens").write_text(text)

    function, = re.findall(r"^def attend_mine.*\n(?: .*\n)+", README, re.M)
    entry, = re.findall(r'^ +"mine": .*,$', README, re.M)
    source, table = (tree / "attention.py").read_text(), "\nATTENTIONS = {\n"
    assert source.count(table) == 1
    changed = source.replace(table, f"\n{function}{table}{entry}\n")
    (tree / "attention.py").write_text(changed)
    return tree


@pytest.fixture(scope="module")
def done():
    """Return the list of commands that have run in the tree."""
    return []


@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
def test_commands_run_in_order(section, tree, done):
    for words in commands(section):
        if words[:2] == ["-m", "pytest"]:
            continue
        if words[:2] == ["-m", "lecture.page"] and not find_spec("markdown_it"):
            continue                                    # README installs it in the line before
        if words[:1] == ["plot.py"] and not find_spec("matplotlib"):
            continue
        flags = EVALUATION if "--eval_only" in words else SMALL
        small = flags.get(words[0], "").split()
        if words[0] == "train_cls.py" and not {"--data_dir", "--resume"} & set(words):
            small = SCENES.split()
        device = ["--device", "cpu"] if words[0] in SMALL else []
        if words not in done:                           # the page shows some commands twice
            done.append(words)
            given = []
            for word in words:                          # a shell replaces a pattern by its files
                matches = sorted(tree.glob(word)) if "?" in word else []
                given += map(str, matches or [word])
            code, out, err = run_command(tree, [*given, *small, *device])
            assert code == 0, (words, out, err)


def test_page_is_short_and_its_results_have_links():
    assert len(README.split()) <= 1900
    table = README.split("## What we found")[1].split("\n\n")[1].splitlines()[2:]
    results = [row.strip("| ").split(" | ")[1] for row in table]
    assert len(results) == 6
    for result in results:
        shown, link = re.fullmatch(r"(.*) \(\[[^]]+\]\(([^)#]+).*\)\)", result).groups()
        assert len(shown.split()) <= 20 and (ROOT / link).exists(), result
    for block in re.findall(r"^```\w*\n(.*?)^```$", README, re.S | re.M):
        assert max(map(len, block.splitlines())) <= 115, block


def test_attacks_are_counted():
    adaptive = {name for name in ATTACKS if name.startswith("adaptive_")}
    attacks = ATTACKS.keys() - adaptive - {"noise", "pgd_restarts"}
    words = {3: "Three"}[len(adaptive)]
    assert f"{len(attacks)} attacks. {words} attacks also have a form" in README


def test_snippets_run_as_printed(tmp_path, monkeypatch):
    torch.manual_seed(0)
    k, v = torch.randn(2, 2, 3, 7, 5)                               # (B, H, N, D), odd sizes
    images, labels = torch.rand(2, 3, 32, 32), torch.tensor([1, 2])
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10)).eval()
    (tmp_path / "weights").symlink_to(ROOT / "weights")
    monkeypatch.chdir(tmp_path)                                     # from another folder
    for code in blocks("python"):
        if "import" in code:
            names = dict(k=k, v=v, model=model, labels=labels, images=images)
            exec(code, names)
            shapes = [names[name].shape for name in ("h", "foggy") if name in names]
            shapes += [flags.shape for flags in names.get("right", {}).values()]
            assert set(shapes) <= {v.shape, images.shape, labels.shape}
            for name in ("classifier", "segments"):
                if name in names:
                    assert names[name](torch.rand(1, 3, 32, 32)).shape[1] in (10, 11)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_scripts_flags_and_links_on_pages_exist(page):
    text = page.read_text()
    shown = "\n".join(a or b for a, b in re.findall(r"```sh\n(.*?)```|`([^`\n]+)`", text, re.S))
    for module in re.findall(r"-m ((?:studies|lecture|robust)\.[\w.]+)", shown):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    for script in re.findall(r"python ([\w/]+\.py)(?=\s|$)", shown):
        assert (ROOT / script).exists(), script
    for flag in re.findall(r"(?<!\S)--[a-z][\w-]*", shown):
        name = flag.removeprefix("--").removeprefix("no-")
        made = (f'"{flag}"', f'"--{name}"', f'"{name}"', f" {name}=(",
                'f"--imagenet_' * ("imagenet_" in flag))
        assert flag in OTHERS or any(part and part in CODE for part in made), flag
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        published = link == "../../deployments/github-pages"    # of the repository on GitHub
        assert published or link.startswith("http") or (page.parent / link).exists(), link


def test_names_in_modules_exist():
    names = [name for page in PAGES for name in re.findall(r"`(\w+)\.(\w+)`", page.read_text())]
    modules = {name for name, _ in names} & {path.stem for path in ROOT.glob("*.py")}
    assert len(modules) > 5
    for module, name in names:
        if module in modules and name not in ("py", "png", "jsonl"):
            source = (ROOT / f"{module}.py").read_text()
            assert re.search(rf"^(def|class) {name}\b|^{name} =", source, re.M), f"{module}.{name}"
