"""Imports respect the boundaries of robust/, data/ and studies/."""

import ast

from fixtures import ROOT

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


def test_imports_in_functions_count(tmp_path):
    path = tmp_path / "a.py"
    path.write_text('"""import words of a docstring."""\ndef f():\n    from vit import ViT\n'
                    "    import robust.attacks as r, math\n")
    assert imports(path) == {"vit", "robust", "math"}


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
