"""Shared by the tests: the modules lie in the folder above, the reference arrays in golden/ or beside the clone."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"
sys.path.insert(0, str(ROOT))


def load_golden(name):
    """Arrays of a reference file by name, as tensors; the full file beside the clone wins over the part in golden/."""
    paths = [SHARED / "golden" / f"{name}.npz", ROOT / "tests" / "golden" / f"{name}.npz"]
    path = next((p for p in paths if p.exists()), None)
    if path is None:
        pytest.skip(f"{name}.npz is only in the full set of reference arrays")
    with np.load(path) as z:
        arrays = {k: np.array(z[k]) for k in z.files}
    return {k: torch.from_numpy(a) for k, a in arrays.items() if a.dtype.kind != "U"}        # "meta" is text


@pytest.fixture(scope="session")
def golden():
    cache = {}
    return lambda name: cache.setdefault(name, load_golden(name)) if name not in cache else cache[name]
