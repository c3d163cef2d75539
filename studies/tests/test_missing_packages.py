"""Commands end in one line with an install command if scipy or matplotlib is missing."""

import sys
from functools import partial

import pytest

from fixtures import ROOT
from processes import finish, run_in, start


def run_without_packages(words):
    """Block all modules of scipy and matplotlib, then run a command."""
    for name in ["scipy", "matplotlib", *sys.modules]:
        if name.split(".")[0] in ("scipy", "matplotlib"):
            sys.modules[name] = None
    run_in(ROOT, words)


@pytest.mark.parametrize("command", ["-m studies.claims", "-m studies.plot"])
def test_missing_package_gives_one_line(command):
    code, _, err = finish(start(partial(run_without_packages, command.split()), []))
    line, = err.splitlines()
    assert code == 1 and line.startswith("error: ") and "pip install" in line
