"""Imports respect the boundaries of robust/, data/ and studies/."""

import ast
import subprocess
import sys

import pytest

from conftest import ROOT

OURS = {path.stem for path in ROOT.glob("*.py")} | {"robust", "data", "studies", "lecture"}
MODELS = {"vit", "fan", "segmenter", "lm", "checkpoints"}


def imports(path):
    """Return our modules that a file imports anywhere, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in found if name.split(".")[0] in OURS}


@pytest.mark.parametrize("path", sorted((ROOT / "robust").glob("*.py")), ids=lambda p: p.name)
def test_robust_is_a_library(path):
    allowed = ("robust", "common", "attention", "data.rng")
    assert not {name for name in imports(path) if not (name + ".").startswith(
        tuple(f"{word}." for word in allowed))} - {"data"}


@pytest.mark.parametrize("path", sorted((ROOT / "data").glob("*.py")), ids=lambda p: p.name)
def test_data_import_no_model(path):
    assert not {name.split(".")[0] for name in imports(path)} & (MODELS | {"robust"})


def test_product_does_not_import_studies():
    product = [*ROOT.glob("*.py"), *(ROOT / "robust").glob("*.py"), *(ROOT / "data").glob("*.py")]
    for path in product:
        if path.name != "conftest.py":
            assert not {name for name in imports(path) if name.split(".")[0] == "studies"}, path


@pytest.mark.parametrize("line, most", [("from robust.corruptions import corrupt", 7),
                                        ("from robust.attacks import pgd", 6)])
def test_library_loads_few_modules(line, most):
    """Our modules, packages included."""
    code = (f"{line}\nimport sys\nfiles = [str(getattr(m, '__file__', '')) for m in "
            f"list(sys.modules.values())]\nprint(sum(f.startswith({str(ROOT)!r}) for f in files))")
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert int(found.stdout) <= most, found.stderr
