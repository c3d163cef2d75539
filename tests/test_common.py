"""Test common.py: files survive kills; an error in the user's input is one line."""

import math
import os
from argparse import Namespace
from fractions import Fraction

import pytest
import torch

import common
from common import InputError, load, save, start_log


def test_a_folders_best_checkpoint_is_loaded(tmp_path, monkeypatch):
    state = dict(model={"w": torch.randn(3, 2)}, step=7, args=dict(lambd=math.inf), layers=(0, 1))
    with monkeypatch.context() as patch:                                # as if saved on a GPU
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        save(tmp_path / "last.pt", state)
    got = load(tmp_path)
    assert got["model"]["w"].device.type == "cpu"
    assert torch.equal(got["model"]["w"], state["model"]["w"])
    assert {**got, "model": 0} == {**state, "model": 0}
    save(tmp_path / "best.pt", dict(step=8))
    assert load(tmp_path) == dict(step=8) and load(tmp_path / "last.pt")["step"] == 7


class Killed:
    """An object whose pickling kills the process after tensors were written."""

    def __reduce__(self):
        os._exit(9)


def test_a_kill_while_saving_keeps_the_old_file(tmp_path):
    save(tmp_path / "last.pt", dict(step=1))
    pid = os.fork()
    if pid == 0:
        save(tmp_path / "last.pt", dict(a=torch.zeros(1000), step=2, b=Killed()))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert load(tmp_path) == dict(step=1)


def test_broken_checkpoints_are_named(tmp_path):
    path = tmp_path / "t.pt"
    torch.save(dict(model=Fraction(1, 2)), path)                        # its code is not run
    for size in (path.stat().st_size, 100):
        path.write_bytes(path.read_bytes()[:size])
        with pytest.raises(InputError, match=f"^{path} cannot be loaded"):
            load(path)
    with pytest.raises(InputError, match="no checkpoint nowhere"):
        load("nowhere")


def open_log(folder, step):
    """Start a log; return its path."""
    args = Namespace(out_dir=str(folder))
    return start_log(args, step, torch.nn.Linear(1, 1), torch.device("cpu"), images=3)


def test_a_log_is_cut_after_the_step(tmp_path):
    rows = [dict(step=1, loss=1.5), dict(step=2, loss=0.9),
            dict(step=2, eval=dict(top1=50.0, name="é")), dict(step=3)]
    path = open_log(tmp_path / "new", 0)
    for row in rows:
        common.append_row(path, row)
    for step, kept in ((3, 4), (2, 3)):
        first, *found, last = common.read_log(open_log(path.parent, step))
        assert [row for row in found if "args" not in row] == rows[:kept]
        assert (first["parameters"], first["images"], last["step"]) == (2, 3, step)
    assert len(common.read_log(open_log(path.parent, 0))) == 1          # a new run


def test_input_errors_are_one_line():
    worker = "Caught InputError in DataLoader worker process 0.\n...\ncommon.InputError: no a.jpg"
    for text, line in (("--lr nan: a number", "--lr nan: a number"), (worker, "no a.jpg")):
        def main():
            raise InputError(text)
        with pytest.raises(SystemExit, match=f"^error: {line}$"):
            common.run(main)


def test_numbers_not_finite_are_named(tmp_path):
    log = open_log(tmp_path, 0)
    pending = [dict(loss=torch.tensor(loss), grad_norm=torch.tensor(loss + 1)) for loss in (1., 3.)]
    common.log_steps(log, 8, pending, 0.0, 5, "images", lr=0.5)
    row = common.read_log(log)[-1]
    assert (row["step"], row["loss"], row["grad_norm"], row["lr"]) == (8, 2, 3, 0.5)
    assert row["images_per_s"] > 0
    pending[1]["grad_norm"] = torch.tensor(math.inf)
    with pytest.raises(InputError, match="at step 8: loss 3, gradient norm inf"):
        common.log_steps(log, 8, pending, 0.0, 5, "images")
