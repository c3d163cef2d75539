"""What the README tells a reader to type exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "WALKTHROUGH.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("results/**/README.md"))]
SHOWING = [page for page in PAGES if re.search(r"python (-m )?[a-z]", page.read_text())]
OTHERS = ("--help", "--standalone", "--nproc_per_node", "--nnodes", "--node_rank", "--master_addr", "--max_restarts")


def source_of(script):
    """A script's text and, of a training script, that of the flags it shares with the others."""
    text = (ROOT / script).read_text()
    passed_on = {"studies/robust_attentions.py": ("train_cls.py", "eval_robust.py"),
                 "studies/robustness.py": ("train_cls.py",)}
    text += "".join(source_of(other) for other in passed_on.get(script, ()))
    return text + ((ROOT / "flags.py").read_text() if script.startswith("train_") else "")


@pytest.mark.parametrize("page", SHOWING, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_script_and_flag_shown_exists(page):
    text = page.read_text().replace("\\\n", " ")
    shown = "\n".join(a or b for a, b in re.findall(r"```sh\n(.*?)```|`(python [^`]+)`", text, re.S))
    shown = re.sub(r"-m studies\.(\w+)", r"studies/\1.py", shown)
    commands = re.findall(r"([\w/]+\.py)([^\n|&#]*)", shown)
    assert commands
    for script, rest in commands:
        source = source_of(script)
        for shared in re.findall(r"^from studies\.(\w+) import", source, re.M):     # flags of two studies
            source += (ROOT / f"studies/{shared}.py").read_text()
        for flag in re.findall(r"(?<!\S)--[\w-]+", rest):
            name = flag.removeprefix("--").removeprefix("no-")
            assert f'"--{name}"' in source or f'"{name}"' in source or flag in OTHERS, f"{script} has no {flag}"
        for names in re.findall(r"--set ((?:\w+=\S+ ?)+)", rest):
            for name in re.findall(r"(\w+)=", names):
                assert re.search(rf"^ +{name}=\(", source, re.M), f"{script} has no setting {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_file_leads_to_one(page):
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert link.startswith("http") or (page.parent / link).exists(), link


def test_every_file_named_in_the_tables_has_what_they_name():
    names = [name for page in PAGES for name in re.findall(r"`(\w+)\.(\w+)`", page.read_text())]
    modules = {name for name, _ in names} & {path.stem for path in ROOT.glob("*.py")}
    assert len(modules) > 5
    for module, name in names:
        if module in modules and name != "py":
            source = (ROOT / f"{module}.py").read_text()
            assert re.search(rf"^(def|class) {name}\b|^{name} =", source, re.M), f"{module}.{name}"


def test_a_flag_recommended_for_trouble_exists_in_the_scripts_the_advice_is_for():
    """A line of advice is for the scripts it names in its first brackets, else for all that train."""
    section = (ROOT / "docs" / "data.md").read_text().partition("## Troubleshooting\n")[2].partition("\n## ")[0]
    advice = re.findall(r"^- \*(.+?)\*([^:]*):(.*)$", section, re.M)
    assert len(advice) > 2
    for trouble, scripts, text in advice:
        scripts = re.findall(r"\w+\.py", scripts) or sorted(p.name for p in ROOT.glob("train_*.py"))
        for flag in re.findall(r"`(--\w+)", text.partition("; train_")[0]):
            for script in scripts:
                assert f'"{flag}"' in source_of(script), f"{trouble}: {script} has no {flag}"


def test_every_address_in_docs_stands_in_a_line_of_code():
    table = (ROOT / "docs" / "equations.md").read_text()
    code = "\n".join(path.read_text() for path in ROOT.glob("*.py"))
    addresses = re.findall(r"`(# [A-Z][^`]*\d[^`]*|# App\. [A-Z])`", table)
    assert len(addresses) > 15
    for address in addresses:
        assert re.search(rf"^ +\S.*{re.escape(address)}(?!\d)", code, re.M), address
