"""README.md and all pages: commands and snippets run; names, flags, links and lines exist.

    PYTHONPATH=. python tests/test_pages.py      # writes today's line numbers into docs/equations.md
"""

import ast
import re
import runpy
import shlex
from importlib.util import find_spec
from platform import python_version

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.io import write_png

import eval_robust
from data.shapes import load_shapes
from fixtures import ROOT
from golden_net import trained_network
from processes import run_command
from runs import call
from studies import checks
from studies.reproduce import attacks as paper_attacks

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "lecture/WALKTHROUGH.md",
         *sorted(set(ROOT.glob("docs/*.md")) - {ROOT / "docs/change.md"}),      # has its own tests
         *sorted(ROOT.glob("studies/**/README.md"))]
OTHERS = ("--help", "--dist", "--standalone", "--nproc_per_node", "--nnodes", "--node_rank",
          "--master_addr", "--include", "--rdzv_id", "--no-deps", "--target")   # other programs
CODE = "".join(path.read_text() for path in ROOT.glob("**/*.py")
               if "tests" not in path.relative_to(ROOT).parts)


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


# --- docs/robustness.md ---------------------------------------------------------------------------

ROBUSTNESS = (ROOT / "docs/robustness.md").read_text()
COMMANDS = commands(ROBUSTNESS)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder with all files that the commands name."""
    timm, folder = pytest.importorskip("timm"), tmp_path_factory.mktemp("page")
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
def test_commands_of_robustness_run(place, monkeypatch, capsys, tmp_path, command):
    """Run a command at a scale of seconds: few images and steps."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(checks, "run_checks",
                        lambda model, images, labels, name, softmax: print("| checks of |", name))
    few = eval_robust.autoattack, dict(steps=2, queries=5, num_targets=1)
    monkeypatch.setattr(eval_robust, "ATTACKS", eval_robust.ATTACKS | dict(autoattack=few))
    script, *flags = command
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


def test_snippets_of_robustness_run(place, monkeypatch, capsys):
    timm = pytest.importorskip("timm")
    pytest.importorskip("torchattacks")
    net = torch.nn.Sequential(torch.nn.AvgPool2d(28), torch.nn.Flatten(), torch.nn.Linear(192, 1000))
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: net)
    own, networks, copies = blocks("python", ROBUSTNESS)
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


# --- docs/equations.md ----------------------------------------------------------------------------

EQUATIONS = ROOT / "docs/equations.md"
LINK = re.compile(r"\[`([^`]+)`\]\(\.\./(\w+\.py)#L(\d+)\)")        # name, file, line


def line_of(name, file):
    """Return the number of the first line with a tag ("# Eq. 1") or a definition ("lm.LM")."""
    word = re.escape(name.rpartition(".")[2])
    pattern = (rf"^ +\S.*{re.escape(name)}(?!\d)" if name.startswith("#") else
               rf"^(def|class) {word}\b|^{word} =")
    lines = (ROOT / file).read_text().splitlines()
    return next((n for n, line in enumerate(lines, 1) if re.search(pattern, line)), None)


def test_links_lead_to_the_lines():
    links = LINK.findall(EQUATIONS.read_text())
    assert len(links) > 30
    wrong = [(name, file, n) for name, file, n in links if line_of(name, file) != int(n)]
    assert not wrong, f"{wrong}: PYTHONPATH=. python tests/test_pages.py corrects the page"


# --- imports respect the boundaries of robust/, data/ and studies/ --------------------------------

MODELS = {"vit", "fan", "segmenter", "lm"}
SCRIPTS = {"train_cls", "train_seg", "train_lm", "eval_robust", "look", "plot"}


def imports(path):
    """Return the first names of the modules that a file imports anywhere, also in functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


def test_folders_import_only_what_they_may():
    """robust/ is a library, data/ imports no model, and the product imports no study."""
    for path in (ROOT / "robust").glob("*.py"):
        assert not imports(path) & (MODELS | SCRIPTS | {"studies"}), path
    for path in (ROOT / "data").glob("*.py"):
        assert not imports(path) & (MODELS | SCRIPTS | {"robust", "studies"}), path
    for path in ROOT.glob("*.py"):
        assert "studies" not in imports(path), path
        if path.stem not in SCRIPTS:
            assert not imports(path) & SCRIPTS, path
    assert imports(ROOT / "attention.py") == {"math", "contextlib", "typing", "torch"}


if __name__ == "__main__":
    EQUATIONS.write_text(LINK.sub(lambda m: f"[`{m[1]}`](../{m[2]}#L{line_of(m[1], m[2])})",
                             EQUATIONS.read_text()))
