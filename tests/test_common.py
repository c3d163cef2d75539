"""Test common.py: files survive kills; an error in the user's input is one line."""

import json
import math
import os
from argparse import ArgumentTypeError, Namespace
from fractions import Fraction

import pytest
import torch

import common
from common import InputError, load, save, start_log
from processes import finish, group, start


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


def test_a_new_run_owns_its_folder(tmp_path):
    path = open_log(tmp_path, 0)
    before = path.read_bytes()
    with pytest.raises(InputError, match="log.jsonl exists: another run has begun"):
        open_log(tmp_path, 0)
    assert path.read_bytes() == before
    with pytest.raises(InputError, match="contains the log of a run without a checkpoint"):
        common.check_new_run(tmp_path)
    save(tmp_path / "last.pt", dict(step=1))
    with pytest.raises(InputError, match="contains a run; use --resume"):
        common.check_new_run(tmp_path)


def test_a_cut_last_line_is_left_out(tmp_path):
    path = open_log(tmp_path, 0)
    common.append_row(path, dict(step=1, loss=1.5))
    for cut in ('{"step": 2, "lo', '{"step": 2}'):                      # killed while writing
        with open(path, "a") as file:
            file.write(cut)
        rows = common.read_log(open_log(tmp_path, 1))
        assert [row["loss"] for row in rows if "loss" in row] == [1.5]


def test_a_lost_log_begins_anew(tmp_path, capsys):
    row, = common.read_log(open_log(tmp_path, 7))
    assert row["step"] == 7 and "log.jsonl is missing; a new log" in capsys.readouterr().out


def test_a_lost_best_checkpoint_is_said(tmp_path, capsys):
    checkpoint = dict(best=dict(step=3, loss=0.5))
    assert common.best_evaluation(checkpoint, tmp_path) == {}
    assert "best.pt of step 3 is missing" in capsys.readouterr().out
    save(tmp_path / "best.pt", dict(step=3))
    assert common.best_evaluation(checkpoint, tmp_path) == checkpoint["best"]


def test_rows_need_no_git(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(common, "commit", common.commit.__wrapped__)        # without the cache
    assert common.origin(torch.device("cpu"))["commit"] == "no git"


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


@pytest.mark.parametrize("kind, bad", [
    (common.positive_int, ("0", "-1")), (common.nonnegative_int, ("-1",)),
    (common.nonnegative_float, ("-1", "nan")), (common.zero_to_one, ("-0.1", "2", "nan")),
    (common.fraction, ("1/0", "256/255", "-1/255"))])
def test_flags_reject_wrong_numbers(kind, bad):
    for text in bad:
        with pytest.raises(ArgumentTypeError, match=f"^{text}: expected"):
            kind(text)
    assert kind("1") == 1


def test_below_one_rejects_one():
    assert common.below_one("0") == 0 and common.below_one("0.9") == 0.9
    for text in ("1", "2", "nan", "-0.1"):
        with pytest.raises(ArgumentTypeError, match=f"^{text}: expected"):
            common.below_one(text)


def test_wrong_layers_are_one_line():
    for text in ("first", "1,", "0-", "a-b", "-1", "3-1"):
        with pytest.raises(InputError, match=f"^--rpc_layers {text}"):
            common.parse_layers(text, 4)
    assert common.parse_layers("0-1,3", 4) == (0, 1, 3) and common.parse_layers("all", 2) == (0, 1)
    assert common.parse_layers("1,0,0", 4) == (0, 1)                # each layer once, in order


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


def print_log_every():
    print(common.LOG_EVERY)


def test_spawned_processes_log_like_their_test(monkeypatch):
    """On a GPU, processes are spawned, so they import common again."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(common, "LOG_EVERY", 3)
    code, out, err = finish(start(print_log_every, []))
    assert (code, out) == (0, "3\n"), err


def test_the_suite_hides_the_gpu(pytestconfig):
    if any("test_gpu" in word for word in pytestconfig.args):
        pytest.skip("test_gpu.py is named, so the GPU is used")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def different_flags():
    """Compare values that differ in one entry, and print the error."""
    values = dict(lr=float(os.environ["RANK"]), clip=1.0)
    try:
        common.start_processes("cpu")
        common.same_everywhere(dict(clip=1.0), "flags")
        common.same_everywhere(values, "flags")
    except InputError as error:
        print(error)


def test_processes_name_the_entries_that_differ():
    for printed in group(different_flags, []):
        assert "the processes have different flags: [{'lr': 0.0}, {'lr': 1.0}];" in printed


def test_infinity_becomes_valid_json():
    row = dict(lambd=math.inf, steps=[math.inf, 1], args=dict(x=(2, math.inf)), name="a: Infinity")
    expected = dict(lambd="inf", steps=["inf", 1], args=dict(x=[2, "inf"]), name="a: Infinity")
    assert json.loads(common.to_json(row)) == expected
    assert common.to_json(dict(b=1, a=2), sort_keys=True) == '{"a": 2, "b": 1}'


def test_other_systems_name_their_processor(monkeypatch):
    monkeypatch.setattr(common.Path, "exists", lambda path: False)
    monkeypatch.setattr(common.platform, "processor", lambda: "arm")
    assert common.processor() == "arm"
    monkeypatch.setattr(common.platform, "processor", lambda: "")
    assert common.processor() == common.platform.machine()
