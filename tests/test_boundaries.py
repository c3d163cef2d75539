"""Imports respect the boundaries of robust/, data/ and studies/."""

import ast

from fixtures import ROOT

OURS = {path.stem for path in ROOT.glob("*.py")} | {"robust", "data", "studies", "lecture"}


def imports(path):
    """Return our modules that a file imports anywhere, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] in OURS}


def test_folders_import_only_what_they_may():
    """robust/ is a library, data/ imports no model, and the product imports no study."""
    library = ("robust.", "common.", "attention.", "data.rng.")
    for path in (ROOT / "robust").glob("*.py"):
        others = {name for name in imports(path) if not f"{name}.".startswith(library)}
        if path.name == "checks.py":                      # its main uses the evaluator's loaders
            others = {name for name in others if not name.startswith("eval_robust")}
        assert not others, path
    models = ("vit", "fan", "segmenter", "lm", "robust")
    for path in (ROOT / "data").glob("*.py"):
        assert not [name for name in imports(path) if name.split(".")[0] in models], path
    for folder in ("", "robust", "data"):
        for path in (ROOT / folder).glob("*.py"):
            assert not [name for name in imports(path) if name.startswith("studies")], path
