"""Every command of bench.py runs with tiny settings, prints its table and writes its rows."""

import json
import sys

import numpy as np
import pytest
from PIL import Image

from studies import cost as bench
import common


def run(monkeypatch, tmp_path, *argv):
    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(sys, "argv", ["bench.py", *argv, "--device", "cpu", "--threads", "1", "--out", str(out)])
    bench.main()
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_models(monkeypatch, tmp_path, capsys):
    rows = run(monkeypatch, tmp_path, "--model", "nano", "--image_size", "16", "--batch_size", "2", "--rounds", "1",
               "--patch_size", "8")                                          # without a command: models
    assert {"softmax", "symmetric", "rpc 4iter/layer1", "rpc 2iter/all-layer"} <= {row["model"] for row in rows}
    assert all(row["train ms"] > 0 and row["hardware"] and row["torch"] and row["date"] for row in rows)
    assert "rpc 6iter/layer1" in capsys.readouterr().out


def test_memory_keeps_no_matrix(monkeypatch, tmp_path, capsys):
    rows = run(monkeypatch, tmp_path, "memory", "--tokens", "513", "--batch_size", "1", "--heads", "2",
               "--head_dim", "16", "--n_iter", "1", "2")
    kept = {row["attention"]: row["/ NxN"] for row in rows}
    assert kept["rpc n = 2"] - kept["rpc n = 1"] < 0.3 and kept["rpc n = 2, matrices"] > 2
    assert "symmetric, matrices" in capsys.readouterr().out


def test_input(monkeypatch, tmp_path, capsys):
    pytest.importorskip("timm")
    rng = np.random.default_rng(0)
    for i in range(4):
        folder = tmp_path / "val" / f"class{i % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (40, 60, 3), dtype=np.uint8)).save(folder / f"{i}.jpg")
    rows = run(monkeypatch, tmp_path, "input", "--data_dir", str(tmp_path), "--image_size", "32", "--num_images", "8",
               "--batch_size", "4", "--num_workers", "1", "--rounds", "1")
    assert [row.get("pipeline", row.get("stage")) for row in rows][:2] == ["ours, 1 workers", "timm, 1 workers"]
    assert rows[0]["times timm's"] > 0 and "ours: flip, RandAugment" in capsys.readouterr().out


def test_corruptions(monkeypatch, tmp_path, capsys):
    rows = run(monkeypatch, tmp_path, "corruptions", "--num_images", "2", "--image_size", "32", "--rounds", "1")
    alone = "imagecorruptions cannot be imported" in capsys.readouterr().out
    assert [row["type"] for row in rows] == [*bench.corruptions.NAMES, "sum"]
    assert all(row["ours ms"] > 0 and (row["ratio"] is None if alone else row["ratio"] > 0) for row in rows)


def test_language(monkeypatch, tmp_path):
    rows = run(monkeypatch, tmp_path, "language", "--vocab_size", "60", "--cutoffs", "20", "--batch_size", "2",
               "--rounds", "1")
    assert [row["model"] for row in rows] == ["plain", "softmax", "symmetric", "rpc 4iter/layer1-1"]
    assert all(row["step ms"] > 0 and row["to plain"] > 0 for row in rows)


def test_windows_and_sliding(monkeypatch, tmp_path):
    rows = run(monkeypatch, tmp_path, "sliding", "--vocab_size", "50", "--num_windows", "8", "--rounds", "1")
    rows = run(monkeypatch, tmp_path, "windows", "--window", "32", "--num_classes", "3", "--scales", "1", "1.5",
               "--rounds", "1")
    assert [row["what"] for row in rows] == ["sliding"] * 3 + ["windows"] * 3 and all(row["ratio"] > 0 for row in rows)


def test_help_and_errors(monkeypatch, tmp_path, capsys):
    commands = ("models", "memory", "input", "corruptions", "language", "sliding", "windows")
    for argv in (["--help"], *([name, "--help"] for name in commands)):
        with pytest.raises(SystemExit, match="0"):
            bench.get_args(argv)
    pytest.importorskip("timm")
    monkeypatch.setattr(sys, "argv", ["bench.py", "input", "--data_dir", str(tmp_path / "none"), "--device", "cpu"])
    with pytest.raises(SystemExit, match="has no folder 'val'"):
        common.run(bench.main)
