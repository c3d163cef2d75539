"""Test common.py: files survive kills and full disks; errors are one line."""

import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import common
import train_cls
from common import InputError, Log, load, save
from processes import Started, finish
from runs import refused
from vit import ViTConfig


# --- checkpoints ----------------------------------------------------------------------------------

class DiesHalfway:
    """An object whose pickling raises `error`, or ends the process, after tensors were written."""

    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        if self.error is None:
            os._exit(9)
        raise self.error


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


FULL = OSError(28, "No space left on device")


@pytest.mark.parametrize("error", [FULL, RuntimeError("unexpected pos 64 vs 0"),
                                   KeyboardInterrupt(), None])
def test_a_kill_while_saving_keeps_the_old_file(tmp_path, error):
    path = tmp_path / "last.pt"
    save(path, dict(step=1))
    bad = dict(a=torch.zeros(1000), step=2, b=DiesHalfway(error))
    if error is None:
        pid = os.fork()
        if pid == 0:
            save(path, bad)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    elif isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            save(path, bad)
    else:                                                           # the error is one line
        with pytest.raises(InputError, match=rf"^{path} cannot be written \([^\n]*kept$"):
            save(path, bad)
    assert load(path) == dict(step=1)
    assert error is None or os.listdir(tmp_path) == ["last.pt"]
    save(path, dict(step=3))                                        # remains do no harm
    assert load(path) == dict(step=3)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no file that is always full")
def test_log_on_a_full_disk_is_an_error(tmp_path):
    log = Log(tmp_path, 0)
    log.file = open("/dev/full", "a")
    with pytest.raises(InputError, match="log.jsonl cannot be written .No space left"):
        log.append(dict(step=1))


def test_broken_checkpoints_are_named(tmp_path):
    path = tmp_path / "t.pt"
    save(path, dict(task="classification", step=3,
                    model={f"w{i}": torch.rand(1000) for i in range(20)}))
    whole = path.read_bytes()
    odd = [b"", b"(i", b"\x80\x02.", b"PK\x03\x04" + b"\0" * 50, b"a text\n", bytes(range(256))]
    torch.save(dict(model=Fraction(1, 2)), path)                        # its code is not run
    for content in (path.read_bytes(), *odd, *(whole[:n] for n in range(1, len(whole), 9999))):
        path.write_bytes(content)
        with pytest.raises(InputError, match=f"^{path} [^\n]*$"):
            load(path)
    with pytest.raises(InputError, match="no checkpoint at nowhere; expected"):
        load("nowhere")


def test_unknown_fields_of_a_config_are_named(capsys):
    found = common.stored_config(dict(model_config=dict(dropuot=0.1, depth=3)), ViTConfig)
    assert found == ViTConfig(depth=3) and "dropuot" in capsys.readouterr().out


def test_a_resumed_optimiser_takes_this_commands_settings():
    """lr, weight decay and fused (GPU only) come from this command, not from the checkpoint."""
    def make(kind=torch.optim.AdamW, **how):
        model = torch.nn.Linear(2, 2)
        optimizer = kind(model.parameters(), **how)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return optimizer
    was, now = make(lr=1.0, fused=True), make(lr=0.5, weight_decay=0.3)
    common.load_optimizer(now, was.state_dict())
    group = now.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["fused"]) == (0.5, 0.3, None)
    for a, b in zip(was.state.values(), now.state.values(), strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)
    frozen = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    for other in (make(torch.optim.SGD), frozen):
        with pytest.raises(InputError, match="optimiser"):
            common.load_optimizer(other, was.state_dict())


# --- log ------------------------------------------------------------------------------------------

def test_a_log_is_cut_after_the_step(tmp_path):
    path = tmp_path / "new" / "log.jsonl"
    kept = [dict(step=0, args={}), dict(step=1, loss=1.5), dict(step=2, loss=0.9),
            dict(step=2, eval=dict(top1=50.0, name="é"))]
    log = Log(path.parent, 0)
    for row in (*kept, dict(step=3)):
        log.append(row)
    (path.parent / "last.pt.1.tmp").write_text("of a process that was killed")
    Log(path.parent, 3)
    assert os.listdir(path.parent) == ["log.jsonl"]
    assert common.read_log(path) == [*kept, dict(step=3)]
    Log(path.parent, 2).append(dict(step=3, again=True))
    assert common.read_log(path) == [*kept, dict(step=3, again=True)]
    for end, steps in (('{"step": 2, "lo', [1, 3]), ("", [1, 3]), ('{"step": 2}\n', [1, 2, 3])):
        path.write_text('{"step": 1}\n' + end)
        Log(path.parent, 2).append(dict(step=3))
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == steps
    path.write_text('{"step": 0, "args": {}}\n{"step": 1}\n')
    Log(path.parent, 0)                                             # a new run: its log is empty
    assert path.read_text() == ""


def test_a_broken_row_is_named_with_its_line(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo\n{"step": 3}\n')
    before = path.read_bytes()
    for read in (common.read_log, lambda path: Log(path.parent, 3)):
        with pytest.raises(InputError, match="log.jsonl, line 2 .*delete that line"):
            read(path)
    assert path.read_bytes() == before


def test_numbers_not_finite_are_named(tmp_path):
    log = Log(tmp_path, 0)
    for row in (dict(loss=math.nan), dict(eval=dict(top1=-math.inf))):
        with pytest.raises(InputError, match="not finite at step 1"):
            log.append(dict(step=1, **row))
    assert common.read_log(log.path) == []
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert common.finite_means(rows, 8) == [2, 3]
    rows[1, 1] = math.inf
    with pytest.raises(InputError, match="at step 8: loss 3, gradient norm inf"):
        common.finite_means(rows, 8)


def test_files_of_two_addresses_stay_apart(tmp_path, monkeypatch):
    """Two addresses may end in the same file name, as files of different models do."""
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))

    def download(address, path, *args, **how):
        downloaded.append(address)
        torch.save(dict(address=address), path)
    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    downloaded, addresses = [], [f"https://a.org/{name}/pytorch_model.bin?x=1" for name in "ab"]
    for address in 2 * addresses:
        assert load(address) == dict(address=address)
    assert downloaded == addresses                                  # each file once


def test_a_failed_download_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    with pytest.raises(InputError, match="https://127.0.0.1:9/a.pt cannot be downloaded"):
        load("https://127.0.0.1:9/a.pt")


def test_numpy_scalars_are_read_other_objects_named(tmp_path):
    state = dict(epoch=np.int64(3), best=np.float64(0.5), loss=np.float32(2), done=np.bool_(True),
                 losses=np.arange(3.0), model={"w": torch.ones(2)})
    torch.save(state, tmp_path / "numpy.pt")
    found = load(tmp_path / "numpy.pt")
    assert [found[name] for name in ("epoch", "best", "loss", "done")] == [3, 0.5, 2, True]
    assert found["losses"].tolist() == [0, 1, 2]
    torch.save(dict(config=Fraction(1, 2)), tmp_path / "object.pt")
    with pytest.raises(InputError, match="object.pt holds an object of fractions.Fraction"):
        load(tmp_path / "object.pt")


# --- processes and messages -----------------------------------------------------------------------

ROOT = Path(common.__file__).parent


def test_threads_spin_briefly_and_flush_denormals():
    """Read the settings that libgomp prints when it is loaded, if PyTorch uses libgomp."""
    code = ("import common, torch; torch.set_num_threads(2)\n"
            "small = lambda: print(int((torch.full((2 ** 20,), 1e-38) * .01 > 0).sum()))\n"
            "common.run(small)")
    env = {name: value for name, value in os.environ.items()
           if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True,
                          check=True, env={**env, "OMP_DISPLAY_ENV": "verbose"})
    assert done.stdout.split() == ["0"]
    spins = re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)
    assert spins in ([common.SPINS], [])                        # []: PyTorch has another OpenMP


def test_the_users_own_spin_count_wins(monkeypatch):
    before_torch = (ROOT / "common.py").read_text().split("import numpy")[0]
    for own, spins in (({}, common.SPINS), ({"GOMP_SPINCOUNT": "77"}, "77"),
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


def test_code_version_names_a_commit_or_no_git(tmp_path):
    version = common.code_version()
    assert version["torch"] == torch.__version__
    assert re.fullmatch(r"[0-9a-f]{12}(-dirty)?|no git", version["commit"])
    subprocess.run(["git", "init", "-q", tmp_path])     # common.py is not tracked here
    shutil.copy(common.__file__, tmp_path)
    spec = importlib.util.spec_from_file_location("common_copy", tmp_path / "common.py")
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    assert copy.code_version()["commit"] == "no git"


def test_empty_flags_are_errors():
    for flag in ("--data_dir", "--resume", "--init_from", "--out_dir"):
        assert f"{flag} has an empty value" in refused(train_cls, [flag, ""])


def test_rpc_layers_are_read():
    for text, layers in (("0", (0,)), ("all", (0, 1, 2, 3)), ("0,2", (0, 2)), ("0,2-3", (0, 2, 3))):
        assert common.parse_layers(text, 4) == layers


def test_input_errors_are_one_line_bugs_are_tracebacks(monkeypatch):
    monkeypatch.setattr(common.Log, "folder", None)         # forget earlier runs

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


def fail(error, wait=0):
    common.WAIT = wait
    raise error


def test_rank_0_alone_prints_an_input_error():
    """Rank 1 waits until torchrun ends the process; the error is printed only after this wait."""
    first, second, only = (Started(partial(fail, InputError("no a.jpg"), wait), [], RANK=rank)
                           for rank, wait in (("0", 99), ("1", 99), ("1", 0)))
    assert first.communicate()[1] == only.communicate()[1] == "error: no a.jpg\n"
    assert second.poll() is None
    second.send_signal(signal.SIGTERM)
    assert second.communicate()[1] == ""


def test_names_that_are_no_utf8_are_printed():
    name = os.fsdecode(b"caf\xe9")
    assert finish(Started(partial(common.print0, name), [])) == "caf\\udce9\n"


def test_bars_in_table_cells_are_escaped():
    assert common.table([["|S|", 1]], ["what", "n"]).splitlines()[2] == r"| \|S\| | 1 |"
