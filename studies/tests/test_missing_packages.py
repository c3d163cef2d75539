"""Commands end in one line with an install command if a package of the studies is missing."""

import sys
from functools import partial

import pytest

from fixtures import ROOT
from processes import finish, run_in, start


def run_without_packages(packages, words):
    """Block all modules of these packages, then run a command."""
    for name in [*packages, *sys.modules]:
        if name.split(".")[0] in packages:
            sys.modules[name] = None
    run_in(ROOT, words)


@pytest.mark.parametrize("packages, command", [
    (("scipy", "matplotlib"), "-m studies.claims"),
    (("scipy", "matplotlib"), "-m studies.plot"),
    (("safetensors",), "-m studies.pretrained --weights here --texts there"),
    (("tokenizers",), "-m studies.pretrained --weights here --texts there")])
def test_missing_package_gives_one_line(packages, command):
    run = partial(run_without_packages, packages, command.split())
    code, _, err = finish(start(run, []))
    line, = err.splitlines()
    assert code == 1 and line.startswith("error: ") and "pip install" in line
    assert any(package in line for package in packages)
