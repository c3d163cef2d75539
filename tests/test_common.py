"""Test common.py: files survive kills; an error in the user's input is one line."""

import math
import os
import re
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest
import torch

import common
from common import InputError, load, save, start_log


# --- checkpoints ----------------------------------------------------------------------------------

def test_a_folders_best_checkpoint_is_loaded_unchanged(tmp_path, monkeypatch):
    state = dict(model={"w": torch.randn(3, 2)}, step=7, args=dict(lr=1e-3, lambd=math.inf),
                 layers=(0, 1))
    with monkeypatch.context() as patch:                                # as if saved on a GPU
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        save(tmp_path / "last.pt", state)
    for path in (tmp_path, str(tmp_path / "last.pt")):
        got = load(path)
        assert got["model"]["w"].device.type == "cpu"
        assert torch.equal(got.pop("model")["w"], state["model"]["w"])
        assert got == {k: state[k] for k in got} and len(got) == 3
    save(tmp_path / "best.pt", dict(step=8))
    save(tmp_path / "last.pt", dict(step=9))
    assert load(tmp_path) == dict(step=8) and load(tmp_path / "last.pt") == dict(step=9)


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
    whole = path.read_bytes()
    for content in (whole, whole[:-20], b"", b"a text\n"):
        path.write_bytes(content)
        with pytest.raises(InputError, match=f"^{path} cannot be loaded"):
            load(path)
    with pytest.raises(InputError, match="no checkpoint nowhere"):
        load("nowhere")


def test_a_resumed_optimiser_takes_this_commands_settings():
    """lr, weight decay and fused (GPU only) come from this command, not from the checkpoint."""
    def make(**how):
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters(), **how)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return optimizer
    was, now = make(lr=1.0, fused=True), make(lr=0.5, weight_decay=0.3)
    common.load_optimizer(now, was.state_dict())
    group = now.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["fused"]) == (0.5, 0.3, None)
    for a, b in zip(was.state.values(), now.state.values(), strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


# --- log ------------------------------------------------------------------------------------------

def test_a_log_is_cut_after_the_step(tmp_path):
    path = tmp_path / "new" / "log.jsonl"
    kept = [dict(step=0, args={}), dict(step=1, loss=1.5), dict(step=2, loss=0.9),
            dict(step=2, eval=dict(top1=50.0, name="é"))]
    start_log(path.parent, 0)
    for row in (*kept, dict(step=3)):
        common.append_row(path, row)
    start_log(path.parent, 3)
    assert os.listdir(path.parent) == ["log.jsonl"]
    assert common.read_log(path) == [*kept, dict(step=3)]
    common.append_row(start_log(path.parent, 2), dict(step=3, again=True))
    assert common.read_log(path) == [*kept, dict(step=3, again=True)]
    path.write_text('{"step": 0, "args": {}}\n{"step": 1}\n')
    start_log(path.parent, 0)                                       # a new run: its log is empty
    assert path.read_text() == ""


def test_numbers_not_finite_are_named(tmp_path):
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert common.finite_means(rows, 8) == [2, 3]
    rows[1, 1] = math.inf
    with pytest.raises(InputError, match="at step 8: loss 3, gradient norm inf"):
        common.finite_means(rows, 8)


# --- processes and messages -----------------------------------------------------------------------

ROOT = Path(common.__file__).parent


def test_the_users_own_spin_count_wins(monkeypatch):
    before_torch = (ROOT / "common.py").read_text().split("import torch")[0]
    for own, spins in (({}, "10000"), ({"GOMP_SPINCOUNT": "77"}, "77"),
                       ({"OMP_WAIT_POLICY": "passive"}, None)):
        monkeypatch.setattr(os, "environ", dict(own))
        exec(before_torch, {"__name__": "common"})
        assert os.environ.get("GOMP_SPINCOUNT") == spins


def test_scripts_import_common_before_torch():
    scripts = [text for path in ROOT.glob("*.py") if "common.run(" in (text := path.read_text())]
    assert len(scripts) >= 6
    for text in scripts:
        first = re.search(r"^(import|from) (common|torch|attention|vit|data)\b", text, re.M)
        assert first[2] == "common", text[:100]


def test_code_version_names_a_commit_or_no_git():
    version = common.code_version()
    assert version["torch"] == torch.__version__
    assert re.fullmatch(r"[0-9a-f]{12}(-dirty)?|no git", version["commit"])


def test_rpc_layers_are_read():
    for text, layers in (("0", (0,)), ("all", (0, 1, 2, 3)), ("0,2", (0, 2)), ("0,2-3", (0, 2, 3))):
        assert common.parse_layers(text, 4) == layers


def test_input_errors_are_one_line_bugs_are_tracebacks():
    def ended(error):
        with pytest.raises(SystemExit) as e:
            common.run(partial(fail, error))
        return e.value.code
    assert ended(InputError("--lr nan: a number")) == "error: --lr nan: a number"
    worker = "Caught InputError in DataLoader worker process 0.\n...\ncommon.InputError: no a.jpg"
    assert ended(InputError(worker)) == "error: no a.jpg"
    for bug in (KeyError("bug"), ValueError("too many values to unpack"), FileNotFoundError("x")):
        with pytest.raises(type(bug)):
            common.run(partial(fail, bug))


def fail(error):
    raise error
