"""Claims about common.py and data/rng.py: random numbers, the schedule, and files that survive whatever happens while
they are written."""

import importlib
import json
import math
import os
import resource
import socket
import subprocess
import sys
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from urllib.error import URLError

import pytest
import torch

import common
import train_cls
import train_lm
import train_seg
from common import InputError, Log, load, lr_at, save
from data.rng import uniform
from data.segmentation import Scenes
from data.shapes import SHAPES
from lm import LM, LMConfig, lm_from_checkpoint
from runs import call, refused
from segmenter import Segmenter, SegmenterConfig, segmenter_from_checkpoint
from vit import ViT, ViTConfig, classifier_from_checkpoint


# --- random numbers --------------------------------------------------------------------------------------------------

def test_numbers_are_uniform_and_those_of_columns_neighbours_and_keys_independent():
    """Every bound is five standard deviations."""
    index = torch.arange(20_000)
    u = uniform(index, 12, 3, 1)
    assert u.dtype == torch.float32 and u.shape == (20_000, 12) and u.min() >= 0 and u.max() < 1
    assert torch.equal(u * 2 ** 24, (u * 2 ** 24).round())
    n = u.numel()
    assert abs(u.double().mean() - 1 / 2) < 5 / math.sqrt(12 * n)
    counts = (u.flatten() * 256).long().bincount(minlength=256)
    assert abs(((counts - n / 256) ** 2 / (n / 256)).sum().item() - 255) < 5 * math.sqrt(2 * 255)            # chi^2

    keys = [uniform(index, 3, seed, purpose) for seed in (0, 1, 2) for purpose in (0, 1, 2, 20)]  # the order counts
    ends = torch.cat([torch.arange(2000), torch.arange(2 ** 31 - 2000, 2 ** 31), torch.arange(2 ** 30, 2 ** 30 + 2000)])
    ends = uniform(ends, 4, 2 ** 31 - 1, 2 ** 31 - 1)
    assert ends.min() >= 0 and ends.max() < 1 and len(ends[:, 0].unique()) > 0.999 * len(ends)
    for columns in (u, torch.cat([u[:-1], u[1:]], 1), torch.cat(keys, 1), ends):
        correlations = torch.corrcoef(columns.double().T).fill_diagonal_(0)
        assert correlations.abs().max() < 5 / math.sqrt(len(columns))


def test_a_number_depends_on_its_index_and_column_alone():
    index = torch.tensor([7, 0, 2 ** 31 - 1, 7, 123_456_789])
    u = uniform(index, 6, 1, 2)
    assert torch.equal(u[0], u[3]) and torch.equal(uniform(index[2:3], 6, 1, 2), u[2:3])
    assert torch.equal(uniform(index, 3, 1, 2), u[:, :3]) and torch.equal(uniform(index.flip(0), 6, 1, 2), u.flip(0))
    torch.manual_seed(5)
    assert torch.equal(uniform(index, 6, 1, 2), u)
    assert not torch.equal(uniform(index, 6, 1, 3), u) and not torch.equal(uniform(index, 6, 2, 2), u)
    assert uniform(index[:0], 6, 1).shape == (0, 6)
    index = torch.arange(5)                                                       # a key may be a tensor, too
    each = torch.cat([uniform(index[i:i + 1], 2, 4, i) for i in range(5)])
    assert torch.equal(uniform(index, 2, 4, index.int()), each)


def test_numbers_do_not_change_between_versions():
    """Pinned: a stopped run goes on with a newer file only if these stay. Made with this function."""
    got = (uniform(torch.tensor([0, 1, 2 ** 31 - 1]), 2, 0, 10) * 2 ** 24).long().tolist()
    assert got == [[7081562, 14558248], [100576, 14437633], [1565904, 1843712]]


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


def test_matrices_decay_and_biases_norms_tokens_and_alpha_do_not():
    matrices = {"patch_embed.proj.weight", "head.weight", *(f"blocks.{i}.{n}.weight" for i in range(2) for n in (
        "attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"))}
    for attn in ("softmax", "symmetric", "rpc", "scaled_alpha", "scaled_s"):
        model = ViT(ViTConfig(image_size=16, patch_size=8, embed_dim=48, depth=2, num_heads=3, attn=attn))
        names = {id(p): name for name, p in model.named_parameters()}
        groups = common.param_groups(model, 0.05)
        assert [g["weight_decay"] for g in groups] == [0.05, 0.0]
        decay, keep = ({names[id(p)] for p in g["params"]} for g in groups)
        assert decay | keep == set(names.values()) and not decay & keep
        learned = {"blocks.0.attn.learned.s", "blocks.1.attn.learned.s"} if attn == "scaled_s" else set()             # S is a matrix
        assert decay == matrices | learned


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


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("broke"), KeyboardInterrupt(),
                                   None])
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
        with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else ValueError):
            save(path, bad)
    assert load(tmp_path) == dict(step=1)
    save(path, dict(step=3))                                                           # what is left is not in the way
    assert load(path) == dict(step=3) and (error is None or os.listdir(tmp_path) == ["last.pt"])


def limited(size, function, *args):
    """Call with no file allowed to grow beyond size bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        return function(*args)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_ctrl_c_while_a_checkpoint_is_written_is_ctrl_c(tmp_path, monkeypatch):
    """torch.save turns it into an error of its own file format."""
    def interrupted(checkpoint, f):
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("unexpected pos 906880 vs 906772")
    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        common.save(tmp_path / "last.pt", {})
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_named_with_the_file_and_what_became_of_the_old_one(tmp_path):
    path, big = tmp_path / "last.pt", dict(a=torch.zeros(300_000), step=2)
    with pytest.raises(ValueError, match="last.pt.*none yet"):
        limited(500_000, save, path, big)
    save(path, dict(step=1))
    with pytest.raises(ValueError, match=r"last.pt \(.*too large.*\).*untouched") as e:               # the system's words
        limited(500_000, save, path, big)
    assert "\n" not in str(e.value) and load(path) == dict(step=1) and os.listdir(tmp_path) == ["last.pt"]
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file/last.pt"):                                       # no folder can be made
        save(tmp_path / "file" / "last.pt", dict(step=1))


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """The bytes of a checkpoint of about 80 kB."""
    path = tmp_path_factory.mktemp("large") / "last.pt"
    save(path, dict(task="classification", model={f"w{i}": torch.rand(1000) for i in range(20)}, step=3))
    return path.read_bytes()


ODD = [b"", b"PK", b"PK\x03\x04" + b"\0" * 50, b"root:x:0:0:root:/root\n", b"(i", b"\x80\x02.", b"{\"json\": 1}\n",
       b"\x89PNG\r\n\x1a\n" + b"\0" * 64, bytes(range(256)),
       *(f"{chr(i)}t was a text\n".encode() for i in range(32, 127))]


def test_what_is_no_whole_checkpoint_is_refused_by_name_in_one_line(tmp_path, large):
    path, last = tmp_path / "t.pt", len(large) - 1
    cut = [large[:n] for n in (*range(64), *range(64, last, 499), 5000, 20_000, 60_000, last)]
    for content in ODD + cut:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"^{path} is not a readable checkpoint") as e:
            load(path)
        assert not any(odd in str(e.value) for odd in ("\n", "\x1b", "weights_only")), e.value
    save(path, dict(model={"w": torch.arange(500.)}, step=3))
    whole = path.read_bytes()
    for i in range(0, len(whole), 41):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 0x55]) + whole[i + 1:])
        try:
            load(path)                                                             # some bytes of a zip mean nothing
        except ValueError as e:
            assert "t.pt" in str(e) and "\n" not in str(e)
    torch.save(dict(model=Fraction(1, 2)), path)
    with pytest.raises(ValueError, match="it holds fractions.Fraction"):                           # code is not run
        load(path)


def test_an_address_that_cannot_be_read_is_named(monkeypatch):
    def fails(address, **_):
        raise URLError("no route to host")
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", fails)
    with pytest.raises(ValueError, match="^https://a.b/c.pth is not a .*no route to host.$"):
        load("https://a.b/c.pth")


# --- what each script says of a checkpoint of ours that is not whole -------------------------------------------------

SIZE = dict(image_size=32, patch_size=8, embed_dim=16, depth=1, num_heads=1)
TASKS = dict(cls=(train_cls, ViT, ViTConfig(num_classes=10, **SIZE), classifier_from_checkpoint),
             seg=(train_seg, Segmenter, SegmenterConfig(11, **SIZE), segmenter_from_checkpoint),
             lm=(train_lm, LM, LMConfig(10, context=12, embed_dim=16, depth=1, num_heads=2, mlp_dim=16),
                 lm_from_checkpoint))


def checkpoint_of(task):
    """What the trainer of this task saves at its first step."""
    script, Model, config, _ = TASKS[task]
    model = Model(config)
    args = {**vars(call(script.get_args)), "num_images": 8, "batch_size": 4, "ema": 0.9}
    if task == "lm":
        args["data_dir"] = "text.txt"
    own = dict(cls=dict(task="classification", classes=list(SHAPES), ema=model.state_dict(), metrics={}),
               lm=dict(task="language modelling", vocab="\n".join("<eos> a b c d e f g h <unk>".split()), best=dict(step=1)),
               seg=dict(task="segmentation", classes=list(Scenes("test", 1, 32).classes), metrics={}))[task]
    optimizer = torch.optim.SGD(model.parameters(), 1.0).state_dict()
    return dict(model=model.state_dict(), model_config=asdict(config), args=args, step=1, optimizer=optimizer, **own)


# script, flag, the checkpoint's task, parts without which the script cannot go on
READERS = [
    ("train_cls", "--resume", "cls", "args model optimizer step classes ema metrics"),
    ("train_lm", "--resume", "lm", "args model optimizer step vocab best model_config"),
    ("train_lm", "--sample", "lm", "model vocab model_config"),
    ("train_seg", "--resume", "seg", "args model optimizer step classes metrics model_config"),
    ("eval_robust", "--ckpt", "cls", "model model_config"), ("eval_robust", "--ckpt", "seg", "model model_config"),
    ("eval_robust", "--ckpt", "lm", "model model_config vocab"),
    ("referee.studies.kernel_pca", "--ckpt", "cls", "model model_config"),
    ("referee.studies.kernel_pca", "--ckpt", "lm", "model model_config")]


@pytest.mark.parametrize("script, flag, task, parts", READERS)
def test_every_script_names_a_broken_checkpoint_and_what_it_lacks(alone, large, script, flag, task, parts):
    def ends(text):
        line = refused(importlib.import_module(script), f"{flag} broken.pt")
        assert "broken.pt" in line and text in line, line

    Path("text.txt").write_text("a b c d e f g h\n" * 200)
    whole = checkpoint_of(task)
    for content in (large[:20_000], b"root:x:0:0:root:/root\n"):
        Path("broken.pt").write_bytes(content)
        ends("not a readable checkpoint")
    for name in parts.split():
        for broken in ({k: v for k, v in whole.items() if k != name}, {**whole, name: None}):
            torch.save(broken, "broken.pt")
            ends(name[:6])                                                                # optimizer or optimiser
    if "model_config" in parts:
        torch.save({**whole, "model_config": {**whole["model_config"], "dropuot": 0.1}}, "broken.pt")
        ends("dropuot, which is unknown")


@pytest.mark.parametrize("task", TASKS)
def test_a_model_is_rebuilt_from_its_config_also_an_older_one_and_not_from_unknown_fields(alone, task):
    _, _, config, rebuild = TASKS[task]
    whole = checkpoint_of(task)
    model = rebuild(whole)
    assert model.config == config and not model.training
    assert all(torch.equal(w, whole["model"][name]) for name, w in model.state_dict().items())
    stored = whole["model_config"]
    separate = {name: value for name, value in stored.items() if name != "pap"} | stored["pap"]
    assert rebuild({**whole, "model_config": separate}).config == config
    known = {"eps", "norm", "init", "dropout", "decoder_depth"} & stored.keys()
    less = rebuild({**whole, "model_config": {k: v for k, v in stored.items() if k not in known}}).config
    assert known and all(getattr(less, name) == getattr(type(config), name) for name in known)
    with pytest.raises(InputError, match="temperature"):
        rebuild({**whole, "model_config": {**stored, "temperature": 1.0}})
    with pytest.raises(ValueError, match="^it is an incomplete checkpoint of .*: it has no model$"):
        rebuild({**whole, "model": {}})
    first, *others = model.state_dict()
    for weights in ({name: whole["model"][name] for name in others}, {**model.state_dict(), "more": torch.zeros(1)}):
        with pytest.raises(ValueError, match="^weights do not fit the model: [^\n]*$"):
            rebuild({**whole, "model": weights})
    with pytest.raises(InputError):                         # refused weights leave the model as it was
        common.load_strictly(model, {name: w + 1 for name, w in model.state_dict().items() if name != first})
    assert all(torch.equal(w, whole["model"][name]) for name, w in model.state_dict().items())


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
    for cut in ('{"step": 2, "lo', "{", '{"step"', "", '{"step": 2, "loss": 1}'):
        Path(log.path).write_text('{"step": 1}\n' + cut)
        log.cut(2)
        log.append(dict(step=3))
        steps = [json.loads(line)["step"] for line in Path(log.path).read_text().splitlines()]
        assert steps in ([1, 3], [1, 2, 3])


@pytest.mark.parametrize("line", [b"3", b"null", b"[1, 2]", b'{"step": null}', b'{"step": "2"}'])
def test_a_log_that_is_not_ours_is_named_and_kept(tmp_path, line):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b"\n")
    with pytest.raises(ValueError, match="log.jsonl") as e:
        Log(path).cut(1)
    assert "\n" not in str(e.value) and path.read_bytes() == b'{"step": 1}\n' + line + b"\n"


@pytest.mark.parametrize("row", [dict(loss=math.nan), dict(lr=math.inf), dict(eval=dict(top1=-math.inf))])
def test_a_log_takes_no_number_that_is_not_finite(tmp_path, row):
    log = Log(tmp_path / "log.jsonl")
    with pytest.raises(ValueError, match="not finite at step 1"):
        log.append(dict(step=1, **row))
    assert common.read_log(log.path) == []


# --- the end of a process, and words ---------------------------------------------------------------------------------

TRAINS = """
import sys
import torch
import common
import train_cls
from pathlib import Path
from torch.nn.parallel import DistributedDataParallel as DDP

print([name for name in ("torchvision", "torch._dynamo") if name in sys.modules])

def main():
    common.setup("cpu")
    net = DDP(torch.nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    print("in the run:", *names())

def names():
    return [Path(task, "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]

common.run(main)
print("after it:", *names())
"""


def test_a_trainer_imports_no_more_than_it_needs_and_no_thread_of_the_process_group_outlives_its_run():
    """One that does can abort a finished worker at its exit, which torchrun then counts as failed."""
    with socket.create_server(("localhost", 0)) as s:
        port = str(s.getsockname()[1])
    env = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC")}
    env |= dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT=port,
                OMP_NUM_THREADS="1")
    done = subprocess.run([sys.executable, "-c", TRAINS], cwd=Path(common.__file__).parent, env=env, text=True,
                          capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    imported, during, after = done.stdout.splitlines()
    assert imported == "[]" and "gloo" in during and "gloo" not in after


def test_each_of_several_gpus_is_a_device_and_without_a_flag_the_first(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    for flag, device in ((None, "cuda"), ("cuda", "cuda"), ("cuda:0", "cuda:0"), ("cuda:2", "cuda:2"), ("cpu", "cpu")):
        assert common.setup(flag) == (torch.device(device), 0, 1)
    for flag in ("cuda:3", "cpu:1", "tpu"):
        with pytest.raises(ValueError, match=f"^--device {flag}: this PyTorch finds cuda, cpu$"):
            common.setup(flag)


@pytest.mark.parametrize("text, layers", [("0", (0,)), ("all", (0, 1, 2, 3)), ("0,2", (0, 2)), ("1-3", (1, 2, 3)),
                                          ("0,2-3", (0, 2, 3))])
def test_rpc_layers_are_read(text, layers):
    assert common.parse_layers(text, 4) == layers


def test_a_reader_that_has_enough_ends_a_script_without_a_word():
    for lines in (1, 100000):                                       # seen at the end, and while it prints
        script = f"import common; common.run(lambda: print('x\\n' * {lines}))"
        process = subprocess.Popen([sys.executable, "-c", script], cwd=Path(common.__file__).parent, text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait() == 1


def test_input_errors_end_in_one_line_and_bugs_keep_their_traceback(monkeypatch):
    monkeypatch.setattr(common, "training", None)                       # what a test before this one trained

    def ended(error):
        def main():
            raise error
        with pytest.raises(SystemExit) as e:
            common.run(main)
        return e.value.code
    assert ended(ValueError("--lr nan: expected a number")) == "error: --lr nan: expected a number"
    worker = "Caught ValueError in DataLoader worker process 0.\nOriginal ...\nValueError: cannot decode a.jpg"
    assert ended(ValueError(worker)) == "error: cannot decode a.jpg"
    assert ended(FileNotFoundError("no checkpoint at x")) == "error: no checkpoint at x"
    assert ended(ValueError()).startswith("error: ")
    with pytest.raises(KeyError):
        common.run(lambda: {}["bug"])
    assert common.table([["|S|", 1]], ["what", "n"]).splitlines()[2] == r"| \|S\| | 1 |"  # a bar in a cell is no border
