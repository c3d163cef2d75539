"""Claims about common.py: random numbers, the schedule, and files that survive whatever happens while they are written."""

import argparse
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
from data import images as data, shapes
import eval_robust
import train_cls
import train_lm
import train_seg
from common import cut_log, lr_at, read_checkpoint, save_checkpoint, write_log
from data.rng import uniform
from data.segmentation import Scenes
from lm import LM, LMConfig, lm_from_checkpoint
from segmenter import Segmenter, SegmenterConfig, segmenter_from_checkpoint
from studies import kernel_pca
from vit import ViT, ViTConfig, vit_from_checkpoint


# --- random numbers -------------------------------------------------------------------------------------------------------

def correlations(columns):
    """Largest absolute correlation between any two columns of (N, n), in units of its standard deviation 1 / sqrt(N)."""
    x = columns.double()
    x = (x - x.mean(0)) / x.std(0)
    c = x.T @ x / len(x)
    return (c - torch.eye(len(c))).abs().max().item() * math.sqrt(len(x))


def test_uniform_numbers_are_uniform():
    u = uniform(torch.arange(40_000), 8, 3, 1)
    assert u.dtype == torch.float32 and u.shape == (40_000, 8) and u.min() >= 0 and u.max() < 1
    assert torch.equal(u * 2 ** 24, (u * 2 ** 24).round())
    n = u.numel()
    assert abs(u.double().mean() - 1 / 2) < 5 / math.sqrt(12 * n)                               # five standard deviations
    assert abs(u.double().var() - 1 / 12) < 5 / math.sqrt(180 * n)
    counts = (u.flatten() * 256).long().bincount(minlength=256)
    chi2 = ((counts - n / 256) ** 2 / (n / 256)).sum().item()
    assert abs(chi2 - 255) < 5 * math.sqrt(2 * 255)
    assert all((column * 64).long().bincount(minlength=64).min() > 400 for column in u.T)           # 625 expected


def test_columns_neighbouring_rows_and_keys_are_independent():
    u = uniform(torch.arange(20_000), 12, 0, 5)
    assert correlations(u) < 5
    assert correlations(torch.cat([u[:-1], u[1:]], 1)) < 5                                          # a row and the next
    keys = [uniform(torch.arange(20_000), 3, seed, purpose) for seed in (0, 1, 2) for purpose in (0, 1, 20, 21)]
    assert correlations(torch.cat(keys, 1)) < 5
    swapped = torch.cat([uniform(torch.arange(20_000), 3, 1, 2), uniform(torch.arange(20_000), 3, 2, 1)], 1)
    assert correlations(swapped) < 5                                                              # the order of keys counts


def test_a_number_depends_on_its_index_and_column_alone():
    index = torch.tensor([7, 0, 2 ** 31 - 1, 7, 123_456_789])
    u = uniform(index, 6, 1, 2)
    assert torch.equal(u[0], u[3]) and torch.equal(uniform(index[2:3], 6, 1, 2), u[2:3])
    assert torch.equal(uniform(index, 3, 1, 2), u[:, :3]) and torch.equal(uniform(index.flip(0), 6, 1, 2), u.flip(0))
    torch.manual_seed(5)
    assert torch.equal(uniform(index, 6, 1, 2), u)
    assert not torch.equal(uniform(index, 6, 1, 3), u) and not torch.equal(uniform(index, 6, 2, 2), u)
    assert uniform(index[:0], 6, 1).shape == (0, 6)


def test_a_number_may_be_a_tensor_of_keys():
    index = torch.arange(5)
    assert torch.equal(uniform(index, 2, 4, index.int()), torch.cat([uniform(index[i:i + 1], 2, 4, i) for i in range(5)]))


def test_the_ends_of_the_integer_range_are_as_random_as_the_rest():
    index = torch.cat([torch.arange(2000), torch.arange(2 ** 31 - 2000, 2 ** 31), torch.arange(2 ** 30, 2 ** 30 + 2000)])
    u = uniform(index, 4, 2 ** 31 - 1, 2 ** 31 - 1)
    assert u.min() >= 0 and u.max() < 1 and abs(u.double().mean() - 0.5) < 5 / math.sqrt(12 * u.numel())
    assert len(u[:, 0].unique()) > 0.999 * len(index)
    assert correlations(u) < 5


def test_numbers_do_not_change_between_versions():
    """Pinned: a stopped run goes on with a newer file only if these stay. Made with this function."""
    got = (uniform(torch.tensor([0, 1, 2 ** 31 - 1]), 2, 0, 10) * 2 ** 24).long().tolist()
    assert got == [[7081562, 14558248], [100576, 14437633], [1565904, 1843712]]


# --- schedule --------------------------------------------------------------------------------------------------------------

def test_learning_rate_warms_up_and_follows_the_cosine_of_the_papers_recipe():
    per_epoch, lr = 1251, 1e-3
    total, warmup = 300 * per_epoch, 5 * per_epoch

    def at(epoch):
        return lr_at(epoch * per_epoch, total, warmup, lr, 1e-5)
    assert at(0) == 1e-6
    for epoch in range(1, 5):                                                   # 2.0e-4, 4.0e-4, 6.0e-4, 8.0e-4
        assert at(epoch) == pytest.approx(1e-6 + (lr - 1e-6) * epoch / 5, rel=1e-12)
        assert at(epoch) == pytest.approx(2e-4 * epoch, rel=0.01)
    assert at(6) == pytest.approx(9.99e-4, rel=1e-4)                            # the phase counts from 0, not from warm-up
    assert at(150) == pytest.approx((lr + 1e-5) / 2, rel=1e-12) and at(150) == pytest.approx(5.1e-4, rel=0.02)
    assert at(299) == pytest.approx(1.0027e-5, rel=1e-3) and at(300) == pytest.approx(1e-5, rel=1e-12)
    values = [lr_at(step, total, warmup, lr, 1e-5) for step in range(warmup, total, 997)]
    assert values == sorted(values, reverse=True)


def test_learning_rate_without_warmup_and_past_the_end():
    assert lr_at(0, 10, 0, 1.0, 0.1) == 1.0
    assert lr_at(10, 10, 0, 1.0, 0.1) == pytest.approx(0.1) and lr_at(15, 10, 0, 1.0, 0.1) == pytest.approx(0.1)


# --- checkpoints -----------------------------------------------------------------------------------------------------------

class DiesHalfway:
    """Pickling it raises, after the tensors before it were handed over."""
    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        raise self.error


def test_a_checkpoint_comes_back_as_it_was(tmp_path):
    state = dict(model={"w": torch.randn(3, 2)}, step=7, args=dict(lr=1e-3, lambd=math.inf, data=None), layers=(0, 1))
    save_checkpoint(tmp_path / "new" / "folder" / "last.pt", state)
    for path in (tmp_path / "new" / "folder", str(tmp_path / "new" / "folder" / "last.pt")):
        got = read_checkpoint(path)
        assert torch.equal(got.pop("model")["w"], state["model"]["w"]) and got == {k: state[k] for k in got}
        assert len(got) == 3


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("broke"), KeyboardInterrupt()])
def test_a_failure_while_saving_leaves_the_old_file(tmp_path, error):
    path = tmp_path / "last.pt"
    save_checkpoint(path, dict(step=1))
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else OSError):
        save_checkpoint(path, dict(a=torch.zeros(1000), step=2, b=DiesHalfway(error)))
    assert read_checkpoint(path) == dict(step=1)
    save_checkpoint(path, dict(step=3))                                                 # what is left is not in the way
    assert read_checkpoint(path) == dict(step=3) and os.listdir(tmp_path) == ["last.pt"]


def test_a_process_killed_while_saving_leaves_the_old_file(tmp_path):
    path = tmp_path / "last.pt"
    save_checkpoint(path, dict(step=1))

    class Dies:
        def __reduce__(self):
            os._exit(9)
    pid = os.fork()
    if pid == 0:
        save_checkpoint(path, dict(step=2, b=Dies()))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert read_checkpoint(tmp_path) == dict(step=1)


def limited(size, function, *args):
    """Call with no file allowed to grow beyond size bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        return function(*args)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_named_with_the_file_and_what_became_of_the_old_one(tmp_path):
    path = tmp_path / "last.pt"
    big = dict(a=torch.zeros(300_000), step=2)
    with pytest.raises(OSError, match="last.pt.*none yet"):
        limited(500_000, save_checkpoint, path, big)
    save_checkpoint(path, dict(step=1))
    with pytest.raises(OSError, match=r"last.pt \(.*too large.*\).*untouched") as e:             # the system's words
        limited(500_000, save_checkpoint, path, big)
    assert "\n" not in str(e.value) and read_checkpoint(path) == dict(step=1) and os.listdir(tmp_path) == ["last.pt"]


def test_a_folder_that_cannot_be_made_is_an_os_error_with_its_name(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file/last.pt"):
        save_checkpoint(tmp_path / "file" / "last.pt", dict(step=1))


@pytest.mark.parametrize("content", [b"", b"PK", b"PK\x03\x04" + b"\0" * 50, b"root:x:0:0:root:/root\n", b"(i", b"\x80\x02.",
                                     b"{\"json\": 1}\n", b"\x89PNG\r\n\x1a\n" + b"\0" * 64, bytes(range(256))],
                         ids=["empty", "PK", "zip", "passwd", "pickle0", "pickle2", "json", "png", "bytes"])
def test_a_file_that_is_no_checkpoint_is_refused_by_name_in_one_line(tmp_path, content):
    (tmp_path / "odd.pt").write_bytes(content)
    with pytest.raises(ValueError, match="odd.pt") as e:
        read_checkpoint(tmp_path / "odd.pt")
    assert "\n" not in str(e.value)


def test_a_checkpoint_cut_or_changed_anywhere_is_read_as_written_or_refused(tmp_path):
    path = tmp_path / "last.pt"
    save_checkpoint(path, dict(model={"w": torch.arange(500.)}, step=3))
    whole = path.read_bytes()
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="last.pt"):
            read_checkpoint(path)
    for i in range(0, len(whole), 41):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 0x55]) + whole[i + 1:])
        try:
            read_checkpoint(path)                                                    # some bytes of a zip mean nothing
        except ValueError as e:
            assert "last.pt" in str(e) and "\n" not in str(e)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """The bytes of a checkpoint of about 80 kB."""
    path = tmp_path_factory.mktemp("large") / "last.pt"
    weights = {f"w{i}": torch.rand(1000) for i in range(20)}
    save_checkpoint(path, dict(task="classification", model=weights, step=3))
    return path.read_bytes()


def refused(path, content):
    """The line with which a file of these bytes is refused."""
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{path} is not a readable checkpoint") as e:
        read_checkpoint(path)
    line = str(e.value)
    assert not any(odd in line for odd in ("\n", "\x1b", "weights_only")), line
    return line


def test_a_checkpoint_cut_to_any_length_is_refused_by_name_in_one_line(tmp_path, large):
    last = len(large) - 1
    for length in (*range(64), *range(64, last, 499), 5000, 20_000, 60_000, last):
        assert "t.pt" in refused(tmp_path / "t.pt", large[:length])


def test_a_text_file_is_refused_by_name_in_one_line_whatever_letter_it_starts_with(tmp_path):
    for letter in map(chr, range(32, 127)):
        assert "t.pt" in refused(tmp_path / "t.pt", f"{letter}t was a text\n".encode())


def test_a_file_that_holds_code_is_refused_by_the_name_of_what_it_holds(tmp_path):
    path = tmp_path / "odd.pt"
    torch.save(dict(model=Fraction(1, 2)), path)
    assert "it holds fractions.Fraction" in refused(path, path.read_bytes())


def test_an_address_that_cannot_be_read_is_named(monkeypatch):
    def fails(address, **_):
        raise URLError("no route to host")
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", fails)
    with pytest.raises(ValueError, match="^https://a.b/c.pth is not a .*no route to host.$"):
        read_checkpoint("https://a.b/c.pth")


def test_weights_saved_on_a_gpu_are_read_onto_the_cpu(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        save_checkpoint(tmp_path / "last.pt", dict(model={"w": torch.ones(3)}))
    assert read_checkpoint(tmp_path)["model"]["w"].device.type == "cpu"


# --- what each script says of a checkpoint of ours that is not whole -------------------------------

SIZE = dict(image_size=32, patch_size=8, embed_dim=16, depth=1, num_heads=1)
CONFIGS = dict(cls=ViTConfig(num_classes=10, **SIZE), seg=SegmenterConfig(11, **SIZE),
               lm=LMConfig(9, context=12, embed_dim=16, depth=1, num_heads=2, mlp_dim=16))


def checkpoint_of(task, monkeypatch):
    """What the trainer of this task saves at its first step."""
    script, config = dict(cls=train_cls, lm=train_lm, seg=train_seg)[task], CONFIGS[task]
    model = dict(cls=ViT, lm=LM, seg=Segmenter)[task](config)
    monkeypatch.setattr("sys.argv", ["train.py"])
    args = {**vars(script.get_args()), "num_images": 8, "batch_size": 4, "ema": 0.9}
    if task == "lm":
        args["data_dir"] = "text.txt"
    words = "\n".join("<eos> a b c d e f g h".split())
    own = dict(cls=dict(task="classification", classes=list(shapes.SHAPES), ema=model.state_dict()),
               lm=dict(task="language modelling", vocab=words, best=dict(step=1)),
               seg=dict(task="segmentation", classes=list(Scenes("test", 1, 32).classes)))[task]
    optimizer = torch.optim.SGD(model.parameters(), 1.0).state_dict()
    return dict(model=model.state_dict(), model_config=asdict(config), args=args, step=1,
                optimizer=optimizer, **own)


# script, flag, the checkpoint's task, parts without which the script cannot go on
READERS = [
    (train_cls, "--resume", "cls", "args model optimizer step classes ema"),
    (train_lm, "--resume", "lm", "args model optimizer step vocab best model_config"),
    (train_lm, "--sample", "lm", "model vocab model_config"),
    (train_seg, "--resume", "seg", "args model optimizer step classes model_config"),
    (eval_robust, "--ckpt", "cls", "model model_config"),
    (eval_robust, "--ckpt", "seg", "model model_config"),
    (eval_robust, "--ckpt", "lm", "model model_config vocab"),
    (kernel_pca, "--ckpt", "cls", "model model_config"),
    (kernel_pca, "--ckpt", "lm", "args model vocab step model_config")]


@pytest.mark.parametrize("script, flag, task, parts", READERS)
def test_every_script_names_a_broken_checkpoint_and_what_it_lacks(tmp_path, monkeypatch, large,
                                                                  script, flag, task, parts):
    def ends(text):
        monkeypatch.setattr("sys.argv", [script.__name__, flag, "broken.pt"])
        with pytest.raises(SystemExit) as e:
            common.run(script.main)
        line = str(e.value.code)
        assert line.startswith("error: ") and "broken.pt" in line and "\n" not in line, line
        assert text in line, line

    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("a b c d e f g h\n" * 200)
    whole = checkpoint_of(task, monkeypatch)
    for content in (large[:20_000], b"root:x:0:0:root:/root\n"):
        Path("broken.pt").write_bytes(content)
        ends("not a readable checkpoint")
    for name in parts.split():
        without = {k: v for k, v in whole.items() if k != name}
        for broken in (without, {**without, name: None}):
            torch.save(broken, "broken.pt")
            ends(name[:6])                                                # optimizer or optimiser
    if "model_config" in parts and (script, flag) != (train_lm, "--resume"):   # goes by flags
        config = {**whole["model_config"], "dropuot": 0.1}
        torch.save({**whole, "model_config": config}, "broken.pt")
        ends("dropuot is unknown")


@pytest.mark.parametrize("task, rebuild", [("cls", vit_from_checkpoint), ("lm", lm_from_checkpoint),
                                           ("seg", segmenter_from_checkpoint)])
def test_a_model_is_rebuilt_from_all_of_its_config_or_not_at_all(monkeypatch, task, rebuild):
    whole = checkpoint_of(task, monkeypatch)
    assert rebuild(whole).config == CONFIGS[task]
    for name in whole["model_config"]:
        without = {k: v for k, v in whole["model_config"].items() if k != name}
        for broken, what in ((without, f"{name} is missing"),
                             ({**without, name: None}, f"{name} is None instead of"),
                             ({**whole["model_config"], f"{name}s": 1}, f"{name}s is unknown")):
            with pytest.raises(ValueError, match=f"model_config is not a .*{what}"):
                rebuild({**whole, "model_config": broken})


# --- log -------------------------------------------------------------------------------------------------------------------

def steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_cutting_a_log_keeps_every_row_up_to_the_step(tmp_path):
    path = tmp_path / "log.jsonl"
    for row in (dict(step=0, args={}), dict(step=1, loss=1.0), dict(step=2, loss=0.9), dict(step=2, eval={}), dict(step=3)):
        write_log(path, row)
    text = path.read_text()
    cut_log(path, 3)
    assert path.read_text() == text
    cut_log(path, 2)
    assert path.read_text() == "".join(text.splitlines(True)[:4])
    cut_log(path, 0)
    assert steps(path) == [0]


def test_a_line_cut_short_by_a_kill_goes_and_the_next_one_stands_alone(tmp_path):
    path = tmp_path / "log.jsonl"
    for cut in ('{"step": 2, "lo', "{", '{"step"', "", '{"step": 2, "loss": 1}'):
        path.write_text('{"step": 1}\n' + cut)
        cut_log(path, 2)
        write_log(path, dict(step=3))
        assert steps(path) in ([1, 3], [1, 2, 3])


def test_cutting_a_log_that_is_not_there_makes_none_or_an_empty_one(tmp_path):
    cut_log(tmp_path / "log.jsonl", 5)
    assert not (tmp_path / "log.jsonl").exists() or (tmp_path / "log.jsonl").read_text() == ""


def test_cutting_a_log_on_a_full_disk_loses_nothing(tmp_path):
    path = tmp_path / "log.jsonl"
    for step in range(200):
        write_log(path, dict(step=step, loss=1 / 3))
    with pytest.raises(OSError):
        limited(1000, cut_log, path, 150)
    assert steps(path) in (list(range(200)), list(range(151)))


def test_cutting_a_log_returns_the_rows_that_stay(tmp_path):
    path = tmp_path / "log.jsonl"
    assert cut_log(path, 1) == []
    rows = [dict(step=0, args={}), dict(step=1, loss=1.5), dict(step=1, eval=dict(top1=50.0))]
    for row in (*rows, dict(step=2, loss=1.0)):
        write_log(path, row)
    assert cut_log(path, 1) == rows


@pytest.mark.parametrize("line", [b"3", b"null", b"[1, 2]", b'{"step": null}', b'{"step": "2"}', b'{"loss": "\xff"}'])
def test_a_log_that_is_not_ours_is_named_and_kept(tmp_path, line):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b"\n")
    with pytest.raises(ValueError, match="log.jsonl") as e:
        cut_log(path, 1)
    assert "\n" not in str(e.value) and path.read_bytes() == b'{"step": 1}\n' + line + b"\n"


def test_a_disk_that_is_full_while_logging_is_named(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text("x" * 1000)
    with pytest.raises(OSError, match="cannot write .*log.jsonl"):
        limited(1000, write_log, path, dict(step=1))


def test_the_rate_of_a_row_is_in_images_and_leaves_out_evaluations(tmp_path, monkeypatch):
    now, model = [0.0], torch.nn.Linear(1, 1)
    monkeypatch.setattr(common.time, "time", lambda: now[0])
    args = argparse.Namespace(resume=None, out_dir="a", log_every=2, save_every=0, eval_every=2)
    run = common.Run(args, tmp_path / "a", 0, 4, torch.device("cpu"), 0, 1, model)

    def measure(step):
        now[0] += 100
        return {}, {}

    def state(step):
        return dict(model=model.state_dict(), step=step)
    for step in run.steps(measure, state, "images", 8):
        now[0] += 0.5
        run.end(step + 1, torch.tensor(1.0), torch.tensor(1.0), 0.1)
    rows = common.read_log(tmp_path / "a" / "log.jsonl")
    assert [row["images_per_s"] for row in rows if "loss" in row] == [16, 16]


# --- the end of a process --------------------------------------------------------------------------

TRAINS = """
import torch
import common
from pathlib import Path
from torch.nn.parallel import DistributedDataParallel as DDP

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


def test_no_thread_of_the_process_group_outlives_the_run(tmp_path):
    """One that does can abort a finished worker at its exit, which torchrun then counts as failed."""
    with socket.create_server(("localhost", 0)) as s:
        port = s.getsockname()[1]
    env = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC")}
    env |= dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost",
                MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    folder = Path(common.__file__).parent
    done = subprocess.run([sys.executable, "-c", TRAINS], cwd=folder, env=env, text=True,
                          capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    during, after = done.stdout.splitlines()
    assert "gloo" in during and "gloo" not in after


# --- errors ----------------------------------------------------------------------------------------------------------------

def ended(error):
    def main():
        raise error
    with pytest.raises(SystemExit) as e:
        common.run(main)
    return e.value.code


@pytest.mark.parametrize("device", ["mps", "cpu:x", "cpu:", "", "cuda:x", "cuda:99", "cdua", "meta"])
def test_a_device_that_is_not_there_is_named(monkeypatch, device):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ValueError, match=f"--device {device}: "):
        common.setup(device)


@pytest.mark.parametrize("text", ["1e300", "1e31", "inf", "nan", "-1"])
def test_a_flag_takes_only_numbers_that_float32_can_hold(text):
    with pytest.raises(argparse.ArgumentTypeError, match=f"{text}, expected float from 0 to 1e.30"):
        common.number(float, 0)(text)


def test_input_errors_end_in_one_line_and_bugs_keep_their_traceback():
    assert ended(ValueError("--lr nan: expected a number")) == "error: --lr nan: expected a number"
    worker = "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback:\n  File ...\nValueError: cannot decode a.jpg"
    assert ended(ValueError(worker)) == "error: cannot decode a.jpg"
    assert ended(FileNotFoundError("no checkpoint at x")) == "error: no checkpoint at x"
    assert ended(ValueError()).startswith("error: ")
    with pytest.raises(KeyError):
        common.run(lambda: {}["bug"])


def test_a_bar_in_a_cell_is_no_border_of_the_table():
    assert common.table([["|S|", 1]], ["what", "n"]).splitlines()[2] == r"| \|S\| | 1 |"
