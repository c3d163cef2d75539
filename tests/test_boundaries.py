"""Imports respect the boundaries of robust/, data/ and studies/."""

import re

from fixtures import ROOT


def imports(path):
    """Return the first names of the modules that a file imports anywhere, also in functions."""
    return {*re.findall(r"^ *(?:from|import) (\w+)", path.read_text(), re.M)}


def test_folders_import_only_what_they_may():
    """robust/ is a library, data/ imports no model, and the product imports no study."""
    models = {"vit", "fan", "segmenter", "lm"}
    for path in (ROOT / "robust").glob("*.py"):
        wrong = imports(path) & (models | {"eval_robust", "studies"})
        assert not wrong or path.name == "checks.py" and wrong == {"eval_robust"}, path
    for path in (ROOT / "data").glob("*.py"):
        assert not imports(path) & (models | {"robust", "studies"}), path
    for path in ROOT.glob("*.py"):
        assert "studies" not in imports(path), path
    assert imports(ROOT / "attention.py") == {"math", "contextlib", "torch"}
