"""referee/reproduce/: the numbers are the printed ones, the plan is the paper's."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

import common
import eval_robust
import train_cls
import train_lm
import train_seg
from referee.reproduce import compare

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted({path.name for path in (ROOT / "referee/reproduce").glob("*.sh")} - {"common.sh"})
PARSERS = {"train_cls.py": train_cls, "train_lm.py": train_lm, "train_seg.py": train_seg,
           "eval_robust.py": eval_robust}


def run(script, folder, **env):
    """What a script prints."""
    done = finished(script, folder, **env)
    assert done.returncode == 0, (script, done.stdout[-2000:], done.stderr[-2000:])
    return done.stdout


def finished(script, folder, **env):
    env = {"PYTHON": sys.executable, "OUT": str(folder), **env}
    return subprocess.run(["sh", f"referee/reproduce/{script}"], cwd=ROOT, env=os.environ | env, text=True,
                          capture_output=True)


def printed():
    with open(ROOT / "referee/reproduce" / "paper.csv", newline="") as file:
        return list(csv.DictReader(file))


# --- paper.csv ------------------------------------------------------------------------------------

def test_a_number_stands_in_the_row_and_column_where_the_paper_has_it():
    cells = {(r["table"], r["row"], r["column"]): r["value"] for r in printed()}
    assert len(cells) == len(printed())
    assert cells["1", "RPC 6iter/layer1", "mCE"] == "73.03"
    assert cells["2", "RPC 2iter/all-layer", "SPSA top-5"] == "83.66"
    assert cells["4", "SymViT", "Zoom blur CE"] == "86.82"
    assert cells["6", "RPC 6iter/layer1", "corrupted mean IoU"] == "11.60"
    assert cells["12", "RPC-AsymViT Sym/Asym", "IN-R"] == "32.79"
    notes = {(r["table"], r["row"], r["column"]): r["note"] for r in printed()}
    assert "58.31" in notes["4", "SymViT", "Contrast CE"] and "swapped" in notes["8", "SymViT-small", "PGD top-1"]
    assert "swapped" in notes["3", "Symlm", "test"] and not notes["3", "Symlm", "attacked test"]
    for table in compare.ARMS:                                              # every row has an arm of ours
        cells = compare.lines(table, {})
        assert cells and not any(cell["ours"] for cell in cells)


# --- the comparison -------------------------------------------------------------------------------

def row(arm, seed, measure, **numbers):
    return {"checkpoint": f"out/{arm}_s{seed}", "measure": measure, "setting": {}, **numbers}


def test_differences_are_paired_by_seed_and_unpaired_seeds_left_out():
    rows = {("symmetric", "0"): [row("symmetric", 0, "clean", top1=60.0, top5=90.0)],
            ("symmetric", "1"): [row("symmetric", 1, "clean", top1=70.0, top5=90.0)],
            ("rpc4", "1"): [row("rpc4", 1, "clean", top1=71.0, top5=90.0)]}
    text = compare.markdown(compare.lines("table1", rows), "small")
    line = next(x for x in text.splitlines() if "4iter" in x and "top-1" in x)
    assert [c.strip() for c in line.split("|")[3:8]] == ["70.94", "71.00", "1", "+0.50", "+1.00"]
    assert "65.00 ± 7.07" in text and "not run" in text
    rows = {("softmax", "0"): [{"|eigenvalue| max": 0.00071}]}              # is not rounded to zero
    assert "| 7.1e-04 " in compare.markdown(compare.lines("fig2", rows), "small")
    rows = {("symmetric", "0"): [row("symmetric", 0, "clean", top1=0.0, top5=9.0)]}
    assert "| 0.00 " in compare.markdown(compare.lines("table1", rows), "small")


def test_an_attack_is_compared_at_its_largest_budget():
    rows = [dict(row("a", 0, "pgd", top1=t, top5=t), setting={"eps": e})
            for t, e in ((9.0, 0.02), (50.0, 0.004))]
    assert compare.ours(rows, "table2", "PGD top-1") == 9.0


def test_ce_and_mce_are_for_imagenet_alone():
    def corrupted(imagenet, severities=(1, 2, 3, 4, 5)):
        return [dict(row("a", 0, "corruptions", top1=[30.0, 50.0], imagenet1k=imagenet),
                     setting={"type": name, "severities": list(severities)})
                for name in compare.NAMES]
    assert compare.ours(corrupted(False), "table1", "IN-C") == 40
    assert compare.ours(corrupted(False), "table1", "mCE") is None
    assert compare.ours(corrupted(False)[:14], "table1", "IN-C") is None
    alexnet = compare.ALEXNET
    mce = sum(60 / alexnet[name] for name in alexnet) / 15
    assert compare.ours(corrupted(True), "table1", "mCE") == pytest.approx(mce)
    assert compare.ours(corrupted(True), "table4", "JPEG CE") == pytest.approx(60 / 0.6065)
    some = corrupted(True, [1, 3])                        # AlexNet's errors are of all five
    assert compare.ours(some, "table1", "mCE") is compare.ours(some, "table4", "JPEG CE") is None
    assert compare.ours(some, "table4", "JPEG top-1") == 40


# --- the paper's scale ----------------------------------------------------------------------------

FOLDERS = dict(IMAGENET_C="c c", IMAGENET_A="a a", IMAGENET_R="r r", IMAGENET_O="o o")


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """{script: the commands that it runs at the paper's scale, in words}: PYTHON only notes them.

    Folders have blanks, and a star that matches a file which must not be seen.
    """
    root, found = tmp_path_factory.mktemp("plan"), {}
    (root / "my d*ta").mkdir()
    (root / "my data").mkdir()
    noted = root / "note"
    noted.write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\t" "$word"; done >> "$SEEN"\necho >> "$SEEN"\n'
                     'while [ $# -gt 1 ]; do [ "$1" != --out_dir ] || { mkdir -p "$2"; touch "$2/epoch_1.pt"; }; '
                     'shift; done\n')
    noted.chmod(0o755)
    for name in SCRIPTS:
        seen = root / f"{name}.txt"
        run(name, root / f"o ut {name}", SCALE="paper", DATA=str(root / "my d*ta"), PYTHON=str(noted), SEEN=str(seen),
            **FOLDERS)
        found[name] = [line.split("\t")[:-1] for line in seen.read_text().splitlines()]
    return found


def of_script(plan, script):
    return [words for words in plan if script in words]


def parsed(words, monkeypatch):
    """(script, its flags) of a command, as the script itself reads them."""
    if "--init_from" in words:                              # a file, which is read at once
        words = words[:words.index("--init_from")] + words[words.index("--init_from") + 2:]
    script = next(word for word in words if word.endswith(".py"))
    monkeypatch.setattr(sys, "argv", words[words.index(script):])
    return script, PARSERS[script].get_args()


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_command_parses_and_blanks_and_stars_in_folders_stay_in_one_word(name, plans, monkeypatch):
    assert plans[name]
    paths = {flag: {words[i + 1] for words in plans[name] for i, word in enumerate(words) if word == flag}
             for flag in ("--data_dir", "--out_dir", "--imagenet_a", "--corrupted_dir", "--backbone", "--init_from")}
    assert all(path.endswith("/my d*ta") for path in paths["--data_dir"])
    ours = {path for flag in ("--out_dir", "--backbone", "--init_from") for path in paths[flag]}
    for words in plans[name]:
        if "--ckpt" in words:
            ours |= (last := set(words[words.index("--ckpt") + 1:]))
            assert last
        if any(word in PARSERS for word in words):
            parsed(words, monkeypatch)
    assert all(f"/o ut {name}/" in path and "*" not in path for path in ours)
    assert paths["--imagenet_a"] <= {"a a"} and paths["--corrupted_dir"] <= {"c c"}


def test_the_runs_of_table_1_are_the_papers(plans, monkeypatch):
    runs = [parsed(w, monkeypatch)[1] for w in of_script(plans["table1.sh"], "train_cls.py")]
    for args in runs:
        assert (args.data, args.model) == ("imagenet", "tiny")
        assert (args.image_size, args.patch_size) == (224, 16)
        assert (args.epochs, args.batch_size, args.lr, args.warmup_epochs) == (300, 1024, 1e-3, 5)
        assert (args.drop_path, args.mixup, args.cutmix, args.erase) == (0.1, 0.8, 1.0, 0.25)
        assert (args.repeats, args.num_ops, args.smoothing, args.form) == (3, 2, 0.1, "released")
    assert [(a.attn, a.n_iter, a.lambd, a.rpc_layers) for a in runs[1:]] == [
        ("rpc", 4, 4, "0"), ("rpc", 5, 4, "0"), ("rpc", 6, 4, "0"), ("rpc", 2, 3, "all")]
    assert runs[0].attn == "symmetric"


def test_the_runs_of_tables_3_and_6_are_the_papers(plans, monkeypatch):
    lm = [parsed(w, monkeypatch)[1] for w in of_script(plans["table3.sh"], "train_lm.py")]
    for args in lm:
        assert (args.model, args.steps, args.batch_size, args.lr) == ("paper", 500_000, 96, 2.5e-4)
        assert (args.warmup, args.cutoffs, args.clip) == (2000, "20000,40000,200000", 0.25)
    assert (lm[1].attn, lm[1].n_iter, lm[1].rpc_layers) == ("rpc", 4, "0-3")
    evaluated, = of_script(plans["table3.sh"], "eval_robust.py")
    assert parsed(evaluated, monkeypatch)[1].stride == 1
    seg = [parsed(w, monkeypatch)[1] for w in of_script(plans["table6.sh"], "train_seg.py")]
    for args in seg:
        assert (args.size, args.epochs, args.batch_size, args.lr) == (512, 64, 8, 1e-3)
        assert args.weight_decay == 0
        assert (args.drop_path, args.dropout) == (0.1, 0.1)
        assert args.backbone == args.out_dir.replace("seg_", "")


def test_table_2_attacks_as_the_papers_harness(plans, monkeypatch):
    words, = of_script(plans["table2.sh"], "eval_robust.py")
    args = parsed(words, monkeypatch)[1]
    assert args.preset == "paper" and args.limit == 50_000
    assert sorted(args.measures) == sorted("pgd fgsm spsa sld cw noise autoattack".split())


# --- folders, seeds, nodes ------------------------------------------------------------------------

def test_folders_scales_seeds_and_nodes_go_where_they_should(tmp_path):
    def where(**env):
        command = ["sh", "-c", '. referee/reproduce/common.sh; echo "$OUT|$TABLES"', "referee/reproduce/x.sh"]
        env = os.environ | {"OUT": "", "TABLES": "", "SCALE": "small", **env}
        return subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True).stdout.strip().split("|")

    assert where(DATA="") == ["out/reproduce/small", "out/reproduce/small/tables"]
    assert where(DATA="data/cifar10")[0] == "out/reproduce/small_cifar10"
    assert where(DATA="ade", SCALE="paper")[0] == "out/reproduce/paper"     # table6: table1's runs
    assert where(DATA="data/cifar10", OUT="else where", TABLES="t") == ["else where", "t"]
    plan = dict(SCALE="paper", DATA="d", DRY="1", PYTHON="true")
    for script in ("fig1.sh", "fig2.sh"):
        text = run(script, tmp_path, **plan, SEEDS="0 1")
        study, = (line for line in text.splitlines() if "referee.kernel_pca" in line)
        assert "softmax_s0" in study and "softmax_s1" in study
    text = run("table12.sh", tmp_path, **plan, NODES="2", NODE="1", HOST="h", GPUS="8")
    assert "--nnodes=2 --node_rank=1 --master_addr=h --nproc_per_node=8 train_cls.py" in text
    for env, said in ((dict(SCALE="huge"), "error: SCALE=huge, expected tiny, small or paper"),
                      (dict(SCALE="paper", DATA="nowhere"), "error: DATA=nowhere is no folder, "
                       "expected ImageNet: train/<wnid>/*.JPEG, val/<wnid>/*.JPEG")):
        done = finished("table1.sh", tmp_path, **env)
        assert done.returncode == 1 and done.stderr.strip() == said


def test_a_folder_that_holds_no_run_is_refused_and_a_table_is_not_written_over(tmp_path):
    (tmp_path / "runs").mkdir()
    kept = tmp_path / "table1.md"
    kept.write_text("dear to somebody")
    for rows in ("TYPO", "runs"):
        with pytest.raises(common.InputError, match=f"--rows .*{rows} holds no run of table1"):
            compare.main(["table1", "--rows", str(tmp_path / rows), "--scale", "small", "--out", str(kept)])
    assert kept.read_text() == "dear to somebody"
