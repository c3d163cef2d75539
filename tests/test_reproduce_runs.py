"""referee/reproduce/: every script runs, at its smallest scale; one that was killed goes on."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from conftest import ROOT
from test_reproduce import SCRIPTS, run


@pytest.fixture(scope="module")
def python():
    """A Python that starts at once, for PYTHON; see warm.py."""
    with tempfile.TemporaryDirectory() as folder:                   # a short path, as sockets want
        command = [sys.executable, "tests/warm.py", "--serve", f"{folder}/address"]
        with subprocess.Popen(command, cwd=ROOT) as server:
            while not os.path.exists(f"{folder}/address"):
                assert server.poll() is None
                time.sleep(0.05)
            yield f"{sys.executable} -S tests/warm.py {folder}/address"
            server.kill()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """The folder of all scripts, with a blank: they share runs."""
    return tmp_path_factory.mktemp("o ut")


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_ends_in_its_table_at_the_smallest_scale(name, shared, python):
    """What the study of kernel PCA prints has no Markdown rule."""
    text = run(name, shared, SCALE="tiny", PYTHON=python)
    assert re.search(r"^\|[-|]+\|$|^CSV files in", text, re.M)


def test_a_script_that_was_killed_ends_in_the_table_of_one_that_was_not(tmp_path, python):
    whole = run("table5.sh", tmp_path / "whole", SCALE="tiny", PYTHON=python)
    env = os.environ | dict(SCALE="tiny", PYTHON=sys.executable, OUT=str(tmp_path / "cut"))
    with subprocess.Popen(["sh", "referee/reproduce/table5.sh"], cwd=ROOT, env=env, start_new_session=True,
                          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not (tmp_path / "cut" / "symmetric_s0" / "last.pt").exists():
            assert process.poll() is None
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    again = run("table5.sh", tmp_path / "cut", SCALE="tiny", PYTHON=python)
    assert again.split("# table5")[1] == whole.split("# table5")[1]
