"""Fixtures for tests/ and studies/tests/; load_golden reads the arrays of tests/golden/."""

import functools
import gc
import os
import shutil
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")   # one process per core, so one thread per process
# Hide the GPUs, on which runs are not bit-identical, unless test_gpu.py is named. The workers of
# xdist have no command line; they inherit the variable.
if "PYTEST_XDIST_WORKER" not in os.environ and not any("test_gpu" in word for word in sys.argv):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

gc.disable()                # until all tests are imported: collections take a fifth of that time

# The process that starts the workers of xdist loads this file, too. It needs no PyTorch, whose
# import takes seconds before the first worker starts. So the functions below import their modules.


def load_golden(name):
    """Read the arrays of a reference file as {name: tensor}; some files are too large for a clone.
    """
    import numpy as np
    import torch

    folders = ROOT / "tests/golden", ROOT.parent / "shared/golden"
    paths = [folder / f"{name}.npz" for folder in folders if (folder / f"{name}.npz").exists()]
    if not paths:
        pytest.skip("too large for a clone")
    with np.load(paths[0]) as z:
        return {k: torch.from_numpy(np.array(z[k])) for k in z.files
                if z[k].dtype.kind != "U"}                              # "meta" is text


def pytest_collection_finish():
    """Collect garbage from now on, but not among the imported modules: they live until the end."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def golden():
    return functools.cache(load_golden)


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    """Copy the repository without tests and stored rows. No test may change this copy."""
    import common

    tree = tmp_path_factory.mktemp("programs")
    listed = [".", ":!tests", ":!studies/tests", ":!studies/results"]
    for name in subprocess.check_output(["git", "ls-files", *listed], cwd=ROOT,
                                        text=True).splitlines():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    for path in tree.glob("weights/*shapes_*.pt"):           # few test scenes, for speed
        checkpoint = common.load(path)
        checkpoint["args"]["num_images"] = 400
        common.save(path, checkpoint)
    return tree


@pytest.fixture(scope="session")
def copy_programs(programs):
    """Return a function that makes another copy of `programs`, which a test may change."""
    def link_large_files(source, target):
        """Link the weights and the pictures, which no test changes; copy all other files."""
        if source.endswith((".pt", ".png", ".svg", ".ipynb")):
            return os.link(source, target)
        return shutil.copy2(source, target)

    return functools.partial(shutil.copytree, programs, copy_function=link_large_files)


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """Work in an empty folder with one thread, so that processes agree bit for bit."""
    import torch

    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def two_layers(monkeypatch):
    """Let the models nano and mini have a layer with RPC and a layer without it, for speed."""
    from lm import LM_SIZES
    from vit import SIZES

    monkeypatch.setitem(SIZES["nano"], "depth", 2)
    monkeypatch.setitem(LM_SIZES["mini"], "depth", 2)


def pytest_terminal_summary(terminalreporter):
    """Print a table of the measurements of test_gpu.py, if it was run by name."""
    if not any("test_gpu" in name for name in terminalreporter.config.args):
        return
    import torch

    import common

    reports = [r for of in terminalreporter.stats.values() for r in of
               if getattr(r, "when", "") == "call"]
    rows = [[*row, r.outcome] for r in reports for name, row in r.user_properties if name == "note"]
    if rows:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        terminalreporter.section(f"{common.origin(device)['hardware']}, torch {torch.__version__}")
        terminalreporter.write_line(common.table(rows, ["part", "found", "seconds", ""]))
