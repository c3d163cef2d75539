"""Without scipy or matplotlib, a command ends in one line with its install command."""

import subprocess
import sys

import pytest

from conftest import ROOT

BLOCK = ("import sys, runpy; sys.modules.update(dict.fromkeys(['scipy', 'matplotlib'])); "
         "sys.argv = sys.argv[1:]; run = runpy.run_path if sys.argv[0].endswith('.py') else "
         "runpy.run_module; run(sys.argv[0], run_name='__main__', **({} if run is runpy.run_path "
         "else dict(alter_sys=True)))")


@pytest.mark.parametrize("command", [
    "studies.claims", "studies.arms control", "studies.line", "studies.plot",
    "studies.kernel_pca --rows studies/results/kpca", "plot.py out/a"])
def test_missing_package_gives_one_line(command):
    done = subprocess.run([sys.executable, "-c", BLOCK, *command.split()], cwd=ROOT,
                          capture_output=True, text=True)
    line, = done.stderr.splitlines()
    assert done.returncode == 1 and line.startswith("error: ") and "pip install" in line
