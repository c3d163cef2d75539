"""Test studies/reproduce/: the paper's numbers, commands, results, and its code's attacks."""

import csv
import importlib
import shlex
import sys
from functools import partial

import pytest
import torch

import common
import eval_robust
import train_cls
import train_lm
import train_seg
from fixtures import ROOT
from golden_net import trained_network
from robust.attacks import fgsm, pgd
from runs import call
from studies import arms
from studies.reproduce import __main__ as reproduce, attacks
from studies.reproduce.attacks import PAPER_ATTACKS
from test_attacks import right

NETWORKS = {"--init_from": "shapes_symmetric.pt", "--backbone": "shapes_symmetric.pt",
            "--eval_only": "seg_shapes_rpc.pt"}
PARSERS = {"train_cls.py": train_cls, "train_lm.py": train_lm, "train_seg.py": train_seg,
           "eval_robust.py": eval_robust, "studies.reproduce.attacks": eval_robust}


def printed():
    with open(ROOT / "studies/reproduce/paper.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_paper_numbers_have_their_row_and_column():
    cells = {(r["table"], r["row"], r["column"]): r["value"] for r in printed()}
    assert len(cells) == len(printed())
    assert cells["1", "RPC 6iter/layer1", "mCE"] == "73.03"
    assert cells["6", "RPC 6iter/layer1", "corrupted mean IoU"] == "11.60"
    assert cells["12", "RPC-AsymViT Sym/Asym", "IN-R"] == "32.79"
    for table in reproduce.PAPER_TABLES.keys() - {*reproduce.OWN_TABLES}:     # every row has an arm
        cells = reproduce.lines(table, {})
        assert cells and not any(cell["ours"] for cell in cells)


def row(arm, seed, name, **fields):
    return dict(network=f"out/{arm}_s{seed}", name=name, measure=name, eps="") | fields


def test_differences_are_paired_by_seed():
    rows = {("symmetric", "0"): [row("symmetric", 0, "clean", top1=60.0, top5=90.0)],
            ("symmetric", "1"): [row("symmetric", 1, "clean", top1=70.0, top5=90.0)],
            ("rpc4", "1"): [row("rpc4", 1, "clean", top1=71.0, top5=90.0)]}
    text = reproduce.markdown(reproduce.lines("table1", rows), "small")
    line = next(x for x in text.splitlines() if "4iter" in x and "top-1" in x)
    assert [c.strip() for c in line.split("|")[3:8]] == ["70.94", "71.00", "1", "+0.50", "+1.00"]
    assert "65.00 ± 7.07" in text and "not run" in text


def test_columns_find_their_budget_and_split():
    rows = [row("a", 0, "pgd", eps=f"{e}/255", top1=t, top5=t) for t, e in ((9.0, 6), (50.0, 1))]
    assert reproduce.ours(rows, "table2", "PGD top-1") == 9.0           # the largest budget
    rows = [dict(network="out/a_s0", measure=split, sliding=x, attacked=x + 9)
            for split, x in (("valid", 30.0), ("test", 40.0))]
    assert [reproduce.ours(rows, "table3", column) for column in ("valid", "attacked test")] == [
        30, 49]


def test_mce_needs_imagenet_and_all_severities():
    def corrupted(imagenet, severities=5):
        return [row("a", 0, name, measure=f"corruptions type={name}", top1=40.0,
                    data="imagenet" if imagenet else "shapes", size=224, severities=severities)
                for name in reproduce.NAMES]
    assert reproduce.ours(corrupted(False), "table1", "IN-C") == 40
    assert reproduce.ours(corrupted(False), "table1", "mCE") is None
    assert reproduce.ours(corrupted(False)[:14], "table1", "IN-C") is None
    alexnet = reproduce.ALEXNET
    mce = sum(60 / alexnet[name] for name in alexnet) / 15
    assert reproduce.ours(corrupted(True), "table1", "mCE") == pytest.approx(mce)
    assert reproduce.ours(corrupted(True), "table4", "JPEG CE") == pytest.approx(60 / 0.6065)
    some = corrupted(True, severities=2)                    # AlexNet's errors average all five
    assert reproduce.ours(some, "table1", "mCE") is None
    assert reproduce.ours(some, "table4", "JPEG CE") is None
    assert reproduce.ours(some, "table4", "JPEG top-1") == 40


FOLDERS = ["--imagenet_c", "c c", "--imagenet_a", "a a", "--imagenet_r", "r r", "--imagenet_o",
           "o o"]


@pytest.fixture
def plan(tmp_path, capsys, monkeypatch):
    """Return the commands of a table at the paper's scale; all folder names contain spaces."""
    monkeypatch.setattr(common, "check_folder", lambda *named: None)        # they do not exist

    def of(table, *more):
        (tmp_path / "my data").mkdir(exist_ok=True)
        reproduce.main([table, "--scale", "paper", "--data_dir", str(tmp_path / "my data"), "--dry",
                        "--out_dir", str(tmp_path / "o ut"), *FOLDERS, *more])
        return [shlex.split(line)[2:] for line in capsys.readouterr().out.splitlines()]
    return of


def parsed(words, monkeypatch):
    """Parse a command with the parser of its script; return its flags."""
    for flag, stored in NETWORKS.items():                   # of a file that exists
        if flag in words:
            at = words.index(flag) + 1
            words = [*words[:at], str(ROOT / "weights" / stored), *words[at + 1:]]
    script = next(word for word in words if word in PARSERS)
    monkeypatch.setattr(sys, "argv", words[words.index(script):])
    if script == "train_lm.py" and "--eval_only" in words:
        return common.parse(train_lm.EVALUATION, "")
    args = PARSERS[script].get_args()
    return args[0] if isinstance(args, tuple) else args


@pytest.mark.parametrize("name", reproduce.PAPER_TABLES)
def test_every_planned_command_parses(name, plan, monkeypatch):
    for words in plan(name) + plan(name, "--scale", "small"):
        paths = dict(zip(words, words[1:]))
        if any(word in PARSERS for word in words):
            parsed(words, monkeypatch)
            assert "/o ut/" in paths["--out_dir"]
        assert paths.get("--data_dir", "/my data").endswith("/my data")
        assert {paths.get("--imagenet_a"), paths.get("--corrupted_dir")} <= {None, "a a", "c c"}


def runs(commands, script, monkeypatch):
    return [parsed(words, monkeypatch) for words in commands if script in words]


def test_tables_have_the_flags_of_the_paper(plan, monkeypatch):
    first, *rest = runs(plan("table1"), "train_cls.py", monkeypatch)
    assert {(args.data, args.model, args.form) for args in (first, *rest)} == {
        ("imagenet", "tiny", "released")}
    assert first.attn == "symmetric" and [(a.attn, a.n_iter, a.lambd, a.rpc_layers)
                                          for a in rest] == [
        ("rpc", 4, 4, "0"), ("rpc", 5, 4, "0"), ("rpc", 6, 4, "0"), ("rpc", 2, 3, "all")]

    attacked = runs(plan("table2"), "studies.reproduce.attacks", monkeypatch)
    assert {args.limit for args in attacked} == {50_000}
    assert [args.measures for args in attacked[:7]] == [[name] for name in reproduce.SEVEN]
    symmetric, rpc, *evaluated = runs(plan("table3"), "train_lm.py", monkeypatch)
    assert (rpc.data, rpc.attn, rpc.n_iter, rpc.rpc_layers) == ("wikitext103", "rpc", 4, "0-3")
    assert symmetric.attn == "symmetric" and [args.stride for args in evaluated] == [1, 1]
    for words in plan("table6"):
        if "--backbone" in words:
            encoder, own = (words[words.index(flag) + 1] for flag in ("--backbone", "--out_dir"))
            assert encoder == own.replace("seg_", "")
            assert parsed(words, monkeypatch).data == "ade20k"
    for args in runs(plan("table9"), "train_cls.py", monkeypatch):
        assert (args.model, args.batch_size, args.lr) == ("fan_tiny", 512, 2e-3)
        assert (args.drop_path, args.repeats) == (0, 1)

    # App. E.6: RPC and the control have the same number of additional epochs.
    start, *tuned = (words for words in plan("table7") if "train_cls.py" in words)
    weights = start[start.index("--out_dir") + 1] + "/last.pt"
    assert {words[words.index("--init_from") + 1] for words in tuned} == {weights}
    assert [(a.attn, a.epochs) for a in runs(tuned, "train_cls.py", monkeypatch)] == [
        ("rpc", 100), ("symmetric", 100)]


def test_seeds_and_gpus_reach_the_commands(plan, capsys):
    reproduce.main(["table1", "--data_dir", "data/cifar10", "--seeds", "0", "1", "--dry"])
    own = capsys.readouterr().out
    assert "--out_dir out/reproduce/small_cifar10/symmetric_s1" in own and "--data cifar10" in own
    words = plan("table12", "--gpus", "8")[0]
    assert words[2:5] == ["--standalone", "--nproc_per_node=8", "train_cls.py"]


def test_every_kind_of_table_runs(tmp_path, monkeypatch, capsys):
    """Commands run in this process, where PyTorch is loaded. Tables share their networks."""
    def run(*words):
        words = [str(word) for word in words]
        monkeypatch.setattr(sys, "argv", words[words[0] == "-m":])
        if words[0] == "-m":
            return importlib.import_module(words[1]).main(words[2:])
        PARSERS[words[0]].main()

    monkeypatch.chdir(ROOT)
    for module in (arms, reproduce):
        monkeypatch.setattr(module, "call", run)
    before = {}
    for name in ("fig1", "table6"):
        reproduce.main([name, "--scale", "tiny", "--out_dir", str(tmp_path / "o ut")])
        after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("last.pt")}
        assert "|---" in capsys.readouterr().out and before.items() <= after.items()
        before = after


# --- studies/reproduce/attacks.py -----------------------------------------------------------------

@pytest.fixture(scope="module")
def net():
    return trained_network()


def attacked(name, model, z, eps, **settings):
    run, usual = PAPER_ATTACKS[name]
    how = usual | dict(eps=eps, seed=0, index=torch.arange(len(z))) | settings
    return run(model, z, **how)


def test_accuracies_equal_recorded_runs(golden, net):
    """The released code used cleverhans on normalised images. SPSA was recorded on pixels."""
    g, (net, images, labels) = golden("robustness_attacks_a"), net
    model, z = net.normalized, (images - net.mean) / net.std
    attack = partial(attacked, model=model, z=z)
    for i, eps in enumerate(g["eps"].tolist()):
        adv = attack("fgsm", eps=eps)
        assert (right(model, adv, labels) == g[f"official_fgsm/{i}/robust"]).sum() >= 199
    accuracy = right(model, attack("pgd", eps=eps), labels).float().mean()      # the largest eps
    assert abs(accuracy - g[f"official_pgd/{i}/acc"].mean()) <= 0.015
    adv = attack("sld", eps=10.0)
    assert (right(model, adv, labels) == g["official_sld/robust"]).sum() >= 196
    draws = torch.cat([attack("noise", eps=0.3, seed=seed) for seed in range(5)])
    accuracy = right(model, draws, labels.repeat(5)).float().mean()
    assert abs(accuracy - g["official_noise/acc"].mean()) <= 0.015
    adv = attacked("cw", model, z[:10], None, confidence=0.03, steps=100, search_steps=3)
    assert (right(model, adv, labels[:10]) == g["official_cw/robust"][:10]).sum() >= 9
    adv = attacked("spsa", net, images[:4], eps, pairs=32)
    assert abs(right(net, adv, labels[:4]).sum() - g["spsa_cleverhans/2/robust"][:4].sum()) <= 1


@pytest.mark.parametrize("name, plain", [("fgsm", fgsm), ("pgd", partial(pgd, steps=5))])
def test_attacks_without_bounds_leave_the_range(net, name, plain):
    """Inside the range they equal the attacks of robust/, up to rounding."""
    model, images, labels = net
    settings = dict(steps=5) if name == "pgd" else {}
    inside = 0.25 + images[:20] / 2
    adv = attacked(name, model, inside, 0.02, **settings)
    expected = plain(model, inside, model(inside).argmax(1), 0.02)
    near = ((adv - expected).abs() < 1e-5).float().mean()
    assert near > 0.99                              # a sign of a gradient near 0 may differ
    adv = attacked(name, model, images[:20], 0.1, **settings)
    assert adv.min() < -0.05 or adv.max() > 1.05


def test_the_evaluator_attacks_normalised_images(tmp_path, monkeypatch, capsys):
    """A budget of 6/255 changes a pixel by 6/255 times std, about 0.226."""
    for name in ("ATTACKS", "FLAGS"):
        monkeypatch.setattr(eval_robust, name, dict(getattr(eval_robust, name)))
    monkeypatch.setattr(eval_robust, "attack", eval_robust.attack)
    moved = []
    scores = eval_robust.run_measure

    def run_measure(measure, network, index, args):
        (data, (change,)), = measure.sources
        images = data.images[index] / 255
        found = change(network.net, images, data.labels[index], index)
        moved.append((found - images).abs().amax().item())
        return scores(measure, network, index, args)

    monkeypatch.setattr(eval_robust, "run_measure", run_measure)
    call(attacks.main, "--ckpt weights/shapes_rpc.pt --measures fgsm --limit 2 --device cpu "
         "--eps 6/255 --out_dir", [tmp_path / "new"])
    assert moved == pytest.approx([6 / 255 * 0.229], abs=1e-4)
    assert "fgsm conditions=paper eps=6/255" in capsys.readouterr().out
