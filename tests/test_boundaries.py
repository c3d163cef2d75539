"""Imports respect the boundaries of robust/, data/ and studies/."""

import ast
import subprocess
import sys

import pytest

from conftest import ROOT

OURS = {path.stem for path in ROOT.glob("*.py")} | {"robust", "data", "studies", "lecture"}
MODELS = {"vit", "fan", "segmenter", "lm"}


def imports(path):
    """Return our modules that a file imports anywhere, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in found if name.split(".")[0] in OURS}


def test_folders_import_only_what_they_may():
    """robust/ is a library, data/ imports no model, and the product imports no study."""
    library = ("robust.", "common.", "attention.", "data.rng.")
    for path in (ROOT / "robust").glob("*.py"):
        others = {name for name in imports(path) if not f"{name}.".startswith(library)}
        if path.name == "checks.py":                      # its main uses the evaluator's loaders
            others -= {"eval_robust"}
        assert others <= {"data"}, path                   # from data import rng
    for path in (ROOT / "data").glob("*.py"):
        tops = {name.split(".")[0] for name in imports(path)}
        assert not tops & (MODELS | {"robust"}), path
    product = [*ROOT.glob("*.py"), *(ROOT / "robust").glob("*.py"), *(ROOT / "data").glob("*.py")]
    for path in product:
        tops = {name.split(".")[0] for name in imports(path)}
        assert path.name == "conftest.py" or "studies" not in tops, path


@pytest.mark.parametrize("line, most", [("from robust.corruptions import corrupt", 7),
                                        ("from robust.attacks import pgd", 6)])
def test_library_loads_few_modules(line, most):
    """Count our modules that one import loads, packages included."""
    code = (f"{line}\nimport sys\nfiles = [str(getattr(m, '__file__', '')) for m in "
            f"[*sys.modules.values()]]\nprint(sum(f.startswith({str(ROOT)!r}) for f in files))")
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert int(found.stdout) <= most, found.stderr
