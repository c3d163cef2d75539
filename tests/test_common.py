"""Test common.py: files survive kills; an error in the user's input is one line."""

import math
import os
from argparse import Namespace
from fractions import Fraction
from functools import partial

import pytest
import torch

import common
from common import InputError, load, save, start_log
from processes import group


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


class Failed:
    def __reduce__(self):
        raise OSError("no space left")


def test_a_kill_while_saving_keeps_the_old_file(tmp_path):
    path = tmp_path / "last.pt"
    save(path, dict(step=1))
    for attempt in range(2):
        pid = os.fork()
        if pid == 0:
            save(path, dict(a=torch.zeros(1000), step=2, b=Killed()))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
        assert load(tmp_path) == dict(step=1)
    save(path, dict(step=3))                                # replaces what the kills have left
    assert os.listdir(tmp_path) == ["last.pt"] and load(tmp_path) == dict(step=3)
    with pytest.raises(OSError, match="no space"):
        save(path, dict(a=torch.zeros(1000), b=Failed()))
    assert os.listdir(tmp_path) == ["last.pt"] and load(tmp_path) == dict(step=3)


def test_broken_checkpoints_are_named(tmp_path):
    path = tmp_path / "t.pt"
    torch.save(dict(model=Fraction(1, 2)), path)                        # its code is not run
    for size in (path.stat().st_size, 100):
        path.write_bytes(path.read_bytes()[:size])
        with pytest.raises(InputError, match=f"^{path} cannot be loaded"):
            load(path)
    with pytest.raises(InputError, match="no checkpoint nowhere"):
        load("nowhere")


# --- the log --------------------------------------------------------------------------------------

def open_log(folder, step=0, resume=""):
    """Start a log; return its path."""
    args = Namespace(out_dir=str(folder), resume=resume)
    return start_log(args, step, torch.nn.Linear(1, 1), torch.device("cpu"))


def test_a_log_is_cut_after_the_step(tmp_path):
    rows = [dict(step=1, loss=1.5), dict(step=2, loss=0.9),
            dict(step=2, eval=dict(top1=50.0, name="é")), dict(step=3)]
    path = open_log(tmp_path / "new")
    for row in rows:
        common.append_row(path, row)
    with open(path, "a") as file:
        file.write('{"step": 3, "lo')                                   # killed while writing
    for step, kept in ((3, 4), (2, 3)):
        first, *found, last = common.read_log(open_log(path.parent, step, "yes"))
        assert [row for row in found if "args" not in row] == rows[:kept]
        assert (first["parameters"], last["step"]) == (2, step)
        assert first["commit"] and first["torch"] and first["hardware"]


def test_a_new_run_owns_its_folder(tmp_path):
    path = open_log(tmp_path)
    before = path.read_bytes()
    with pytest.raises(InputError, match="log.jsonl exists; choose another --out_dir"):
        open_log(tmp_path)
    assert path.read_bytes() == before
    path.unlink()
    row, = common.read_log(open_log(tmp_path, 7, "yes"))                # a lost log begins again
    assert row["step"] == 7


# --- the machine ----------------------------------------------------------------------------------

@pytest.mark.parametrize("missing", ["compiler", "triton", "capability", None])
def test_without_a_compiler_nothing_is_compiled(missing, monkeypatch, capsys):
    have = dict(compiler="/usr/bin/gcc", triton="spec", capability=(7, 0))
    without = have | {missing: dict(capability=(6, 1)).get(missing)}
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(common.shutil, "which", lambda name: without["compiler"])
    monkeypatch.setattr(common.importlib.util, "find_spec", lambda name: without["triton"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: without["capability"])
    cuda = torch.device("cuda")
    assert common.use_compile(None, cuda) is (missing is None)
    assert ("is not compiled" in capsys.readouterr().out) is (missing is not None)
    assert common.use_compile(True, cuda) and not common.use_compile(False, cuda)
    assert not common.use_compile(None, torch.device("cpu"))
    assert capsys.readouterr().out == ""


def test_devices_compute_in_float32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    assert common.start_processes("cpu") == (0, 1, torch.device("cpu"))
    assert not torch.backends.cudnn.allow_tf32                          # convolutions, too
    assert torch.get_float32_matmul_precision() == "highest"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("cuda", "gpu"):
        with pytest.raises(InputError, match=f"--device {name}: "):
            common.start_processes(name)


def compare(values):
    """Compare one value per process, also as a weight, and print the errors."""
    common.start_processes("cpu")
    value = values[int(os.environ["RANK"])]
    layer = torch.nn.Linear(1, 1, dtype=torch.bfloat16)
    torch.nn.init.constant_(layer.weight, value)
    torch.nn.init.zeros_(layer.bias)
    common.check_equal(1, "flags")
    for check in (partial(common.check_equal, value, "data"),
                  partial(common.check_equal_weights, [layer])):
        try:
            check()
        except InputError as error:
            print(error)


def test_processes_with_other_values_stop():
    assert group(partial(compare, [5, 5]), []) == ("", "")
    for printed in group(partial(compare, [5, 6]), []):
        assert printed.startswith("the processes have different data; expected the same")
        assert "the processes have different checkpoints" in printed


# --- messages -------------------------------------------------------------------------------------

def test_input_errors_are_one_line():
    worker = "Caught InputError in DataLoader worker process 0.\n...\ncommon.InputError: no a.jpg"
    for error, line in ((InputError("--lr nan: a number"), "--lr nan: a number"),
                        (InputError(worker), "no a.jpg"),
                        (FileNotFoundError(2, "No such file", "a.txt"), ".*a.txt'")):
        def main():
            raise error
        with pytest.raises(SystemExit, match=f"^error: {line}$"):
            common.run(main)


def test_an_accuracy_has_a_reference():
    """The largest class is named if its share is above 1.5 / classes."""
    for labels, classes, text in (
            ([0, 1, 1, 1], 2, ""), ([0, 1, 1, 1, 1], 2, "largest class 80.00"),
            ([2, 2, 2, 0, 1, 3], 4, "largest class 50.00"), ([0, 1, 2], 3, ""),
            ([1, 1], 2, "largest class 100.00")):               # all images are of one class
        assert common.largest_class(labels, classes) == text
