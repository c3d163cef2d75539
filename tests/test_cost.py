"""Every command of studies/cost.py runs with tiny settings, prints a table, writes its rows."""

import json
import subprocess
import sys

import pytest

from conftest import ROOT
from studies import cost


def run(monkeypatch, tmp_path, *argv):
    out = tmp_path / "rows.jsonl"
    here = ["--device", "cpu", "--threads", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["cost.py", *argv, *here])
    cost.main()
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_models(monkeypatch, tmp_path, capsys):
    rows = run(monkeypatch, tmp_path, "--model", "nano", "--image_size", "16", "--batch_size", "2",
               "--rounds", "1", "--patch_size", "8")                   # without a command: models
    names = {row["model"] for row in rows}
    assert {"softmax", "symmetric", "rpc 4iter/layer1", "rpc 2iter/all-layer"} <= names
    assert all(row["train ms"] > 0 and row["eval ms"] > 0 and row["ratio"] > 0 for row in rows)
    assert all(row["hardware"] and row["torch"] and row["date"] for row in rows)
    assert rows[0]["command"].startswith("python -m studies.cost --model nano")
    assert "rpc 6iter/layer1" in capsys.readouterr().out


def test_memory_keeps_no_matrix(monkeypatch, tmp_path, capsys):
    in_process = cost.measure_memory                                   # a fresh one: only the peak
    monkeypatch.setattr(cost, "measure_in_fresh_process", in_process)
    rows = run(monkeypatch, tmp_path, "memory", "--tokens", "513", "--batch_size", "1",
               "--heads", "2", "--head_dim", "16", "--n_iter", "1", "2")
    kept = {row["attention"]: row["/ NxN"] for row in rows}
    assert kept["rpc n = 2"] - kept["rpc n = 1"] < 0.3 and kept["rpc n = 2, matrices"] > 2
    assert "symmetric, matrices" in capsys.readouterr().out


def test_the_peak_of_memory_is_measured_in_a_fresh_process():
    shape = (1, 2, 513, 16)
    kept, peak = cost.measure_in_fresh_process(shape, 2, True, "cpu")
    assert kept == cost.measure_memory(shape, 2, True, "cpu")[0]
    assert peak > 2 * 4 * 2 * 513 ** 2                                 # two N x N matrices a head


def test_language(monkeypatch, tmp_path):
    rows = run(monkeypatch, tmp_path, "language", "--vocab_size", "60", "--cutoffs", "20",
               "--batch_size", "2", "--rounds", "1")
    names = [row["model"] for row in rows]
    assert names == ["plain", "softmax", "symmetric", "rpc 4iter/layer1-1"]
    assert all(row["step ms"] > 0 and row["to plain"] > 0 for row in rows)


@pytest.mark.parametrize("argv", [["--help"], ["models", "--help"], ["memory", "--help"],
                                  ["language", "--help"]])
def test_help(argv):
    with pytest.raises(SystemExit, match="0"):
        cost.get_args(argv)


def test_started_as_a_file_it_says_how_to_start_it():
    script = ROOT / "studies" / "cost.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 1 and "python -m studies.cost" in done.stderr
    assert len(done.stderr.splitlines()) == 1
