"""Claims about common.py: schedules, and files that survive whatever happens while they are written."""

import json
import math
import os
import socket
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import nn

import common
from common import InputError, Log, load, lr_at, save
from vit import ViT, ViTConfig


# --- schedule --------------------------------------------------------------------------------------------------------

def test_learning_rate_warms_up_and_follows_the_cosine_of_the_papers_recipe():
    per_epoch, lr = 1251, 1e-3
    total, warmup = 300 * per_epoch, 5 * per_epoch

    def at(epoch):
        return lr_at(epoch * per_epoch, total, warmup, lr, 1e-5)
    assert at(0) == 1e-6
    for epoch in range(1, 5):                                                       # 2.0e-4, 4.0e-4, 6.0e-4, 8.0e-4
        assert at(epoch) == pytest.approx(1e-6 + (lr - 1e-6) * epoch / 5, rel=1e-12)
    assert at(6) == pytest.approx(9.99e-4, rel=1e-4)                     # the phase counts from 0, not from warm-up
    assert at(150) == pytest.approx((lr + 1e-5) / 2, rel=1e-12)
    assert at(299) == pytest.approx(1.0027e-5, rel=1e-3) and at(300) == pytest.approx(1e-5, rel=1e-12)
    values = [lr_at(step, total, warmup, lr, 1e-5) for step in range(warmup, total, 997)]
    assert values == sorted(values, reverse=True)
    assert lr_at(0, 10, 0, 1.0, 0.1) == 1.0                                                            # no warm-up
    assert lr_at(10, 10, 0, 1.0, 0.1) == pytest.approx(0.1) == lr_at(15, 10, 0, 1.0, 0.1)             # past the end


def test_matrices_of_layers_decay_and_nothing_else_does():
    """An attention's own temperature (H, 1, 1), tokens, norms and biases are kept; what is frozen is in no group."""
    model = ViT(ViTConfig(image_size=16, patch_size=8, embed_dim=48, depth=2, num_heads=3))
    model.blocks[0].attn.temperature = nn.Parameter(torch.ones(3, 1, 1))
    model.proj = nn.Parameter(torch.ones(3, 3))
    model.words = nn.Embedding(5, 3)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = common.param_groups(model, 0.05, also=("proj",))
    assert [g["weight_decay"] for g in groups] == [0.05, 0.0]
    decay, keep = ({names[id(p)] for p in g["params"]} for g in groups)
    assert decay | keep == set(names.values()) and not decay & keep
    assert decay == {"proj", "words.weight", "patch_embed.proj.weight", "head.weight", *(
        f"blocks.{i}.{n}.weight" for i in range(2) for n in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"))}
    model.patch_embed.requires_grad_(False)
    assert sum(len(g["params"]) for g in common.param_groups(model, 0.05)) == len(names) - 2


# --- checkpoints -----------------------------------------------------------------------------------------------------

class DiesHalfway:
    """Pickling it raises, or ends the process, after the tensors before it were handed over."""

    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        if self.error is None:
            os._exit(9)
        raise self.error


def test_a_checkpoint_comes_back_as_it_was(tmp_path, monkeypatch):
    state = dict(model={"w": torch.randn(3, 2)}, step=7, args=dict(lr=1e-3, lambd=math.inf, data=None), layers=(0, 1))
    with monkeypatch.context() as patch:                                               # as if it were of a GPU
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        save(tmp_path / "new" / "folder" / "last.pt", state)
    for path in (tmp_path / "new" / "folder", str(tmp_path / "new" / "folder" / "last.pt")):
        got = load(path)
        assert got["model"]["w"].device.type == "cpu"
        assert torch.equal(got.pop("model")["w"], state["model"]["w"]) and got == {k: state[k] for k in got}
        assert len(got) == 3


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), None])
def test_a_failure_or_a_kill_while_saving_leaves_the_old_file(tmp_path, error):
    path = tmp_path / "last.pt"
    save(path, dict(step=1))
    bad = dict(a=torch.zeros(1000), step=2, b=DiesHalfway(error))
    if error is None:
        pid = os.fork()
        if pid == 0:
            save(path, bad)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    else:
        with pytest.raises(type(error)):
            save(path, bad)
    assert load(tmp_path) == dict(step=1)
    save(path, dict(step=3))                                                           # what is left is not in the way
    assert load(path) == dict(step=3) and (error is None or os.listdir(tmp_path) == ["last.pt"])


def test_what_is_no_whole_checkpoint_is_refused_by_name_in_one_line(tmp_path):
    path = tmp_path / "t.pt"
    save(path, dict(task="classification", model={f"w{i}": torch.rand(1000) for i in range(20)}, step=3))
    whole, odd = path.read_bytes(), [b"", b"(i", b"\x80\x02.", b"PK\x03\x04" + b"\0" * 50, b"it was a text\n", bytes(range(256))]
    torch.save(dict(model=Fraction(1, 2)), path)                                                   # code is not run
    for content in (path.read_bytes(), *odd, *(whole[:n] for n in range(1, len(whole), 9999))):
        path.write_bytes(content)
        with pytest.raises(InputError, match=f"^{path} [^\n]*$"):
            load(path)
    with pytest.raises(InputError, match="nowhere"):
        load("nowhere")


def config_of(**stored):
    return common.stored_config({"model_config": stored}, ViTConfig)


def test_a_stored_config_may_lack_a_field_and_an_unknown_one_is_named(capsys):
    old = dict(embed_dim=48, n_iter=2, lambd=3.0, form="paper", attn="rpc")                         # before pap was one
    assert config_of(**old) == ViTConfig(embed_dim=48, attn="rpc", pap=dict(n_iter=2, lambd=3.0, form="paper"))
    assert config_of(dropuot=0.1) == ViTConfig() and "ViTConfig: dropuot" in capsys.readouterr().out


# --- log -------------------------------------------------------------------------------------------------------------

def test_a_log_is_cut_behind_a_step_and_a_line_cut_short_by_a_kill_goes(tmp_path):
    log = Log(tmp_path / "log.jsonl")
    log.cut(5)
    assert common.read_log(log.path) == []
    kept = [dict(step=0, args={}), dict(step=1, loss=1.5), dict(step=2, loss=0.9), dict(step=2, eval=dict(top1=50.0))]
    for row in (*kept, dict(step=3)):
        log.append(row)
    log.cut(3)
    assert common.read_log(log.path) == [*kept, dict(step=3)]
    log.cut(2)
    assert common.read_log(log.path) == kept
    for cut, steps in (('{"step": 2, "lo', [1, 3]), ("", [1, 3]), ('{"step": 2, "loss": 1}', [1, 2, 3])):
        Path(log.path).write_text('{"step": 1}\n' + cut)
        log.cut(2)
        log.append(dict(step=3))
        assert [json.loads(line)["step"] for line in Path(log.path).read_text().splitlines()] == steps


@pytest.mark.parametrize("row", [dict(loss=math.nan), dict(eval=dict(top1=-math.inf))])
def test_a_log_takes_no_number_that_is_not_finite(tmp_path, row):
    log = Log(tmp_path / "log.jsonl")
    with pytest.raises(InputError, match="not finite at step 1"):
        log.append(dict(step=1, **row))
    assert common.read_log(log.path) == []


# --- the end of a process, and words ---------------------------------------------------------------------------------

TRAINS = """
import sys
import weakref
import torch
import common
import train_cls
from pathlib import Path
from torch.nn.parallel import DistributedDataParallel as DDP

print([name for name in ("torchvision", "torch._dynamo") if name in sys.modules])

def main():
    print(len(names()))
    common.setup("cpu")
    print(weakref.ref(common.all_sum(torch.ones(1)))() is not None)
    net = DDP(torch.nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    print(len(names()))

def names():
    return [Path(task, "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]

common.run(main)
print(len(names()))
"""


def test_a_trainer_imports_no_more_than_it_needs_and_no_thread_of_the_process_group_outlives_its_run():
    """One that does can abort a finished worker at its exit, which torchrun then counts as failed; and one that frees a
    tensor meanwhile can stop it there, with PyTorch below 2.8."""
    with socket.create_server(("localhost", 0)) as s:
        port = str(s.getsockname()[1])
    env = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC")}
    env |= dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT=port,
                OMP_NUM_THREADS="1")
    done = subprocess.run([sys.executable, "-c", TRAINS], cwd=Path(common.__file__).parent, env=env, text=True,
                          capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    imported, before, kept, during, after = done.stdout.splitlines()
    assert imported == "[]" and kept == "True" and int(before) == int(after) < int(during)


def test_each_of_several_gpus_is_a_device_and_without_a_flag_the_first(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    for flag, device in ((None, "cuda"), ("cuda", "cuda"), ("cuda:0", "cuda:0"), ("cuda:2", "cuda:2"), ("cpu", "cpu")):
        assert common.setup(flag) == (torch.device(device), 0, 1)
    for flag in ("cuda:3", "cpu:1", "tpu"):
        with pytest.raises(InputError, match=f"--device {flag}"):
            common.setup(flag)


def test_rpc_layers_are_read():
    for text, layers in (("0", (0,)), ("all", (0, 1, 2, 3)), ("0,2", (0, 2)), ("0,2-3", (0, 2, 3))):
        assert common.parse_layers(text, 4) == layers


def test_a_reader_that_has_enough_ends_a_script_without_a_word():
    for lines in (1, 100000):                                       # seen at the end, and while it prints
        script = f"import common; common.run(lambda: print('x\\n' * {lines}))"
        process = subprocess.Popen([sys.executable, "-c", script], cwd=Path(common.__file__).parent, text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait() == 1


def test_input_errors_end_in_one_line_and_bugs_keep_their_traceback(monkeypatch):
    monkeypatch.setattr(common, "active_run_dir", None)                 # what a test before this one trained

    def ended(error):
        def main():
            raise error
        with pytest.raises(SystemExit) as e:
            common.run(main)
        return e.value.code
    assert ended(InputError("--lr nan: expected a number")) == "error: --lr nan: expected a number"
    worker = "Caught InputError in DataLoader worker process 0.\nOriginal ...\ncommon.InputError: cannot decode a.jpg"
    assert ended(InputError(worker)) == "error: cannot decode a.jpg"
    for bug in (KeyError("bug"), ValueError("too many values to unpack"), FileNotFoundError("x")):
        with pytest.raises(type(bug)):
            common.run(lambda: (_ for _ in ()).throw(bug))


def test_scripts_flush_denormals_in_every_thread():
    code = ("import torch, common; torch.set_num_threads(2)\n"
            "small = lambda: print(int((torch.full((2 ** 20,), 1e-38) * .01 > 0).sum()))\n"
            "common.run(small)")
    out = subprocess.run([sys.executable, "-c", code], cwd=Path(common.__file__).parent, capture_output=True, text=True)
    assert out.stdout.split() == ["0"], out.stderr


def test_a_bar_in_a_cell_of_a_table_is_no_border():
    assert common.table([["|S|", 1]], ["what", "n"]).splitlines()[2] == r"| \|S\| | 1 |"
