"""Rows of results.jsonl: which rows a summary uses, and the table over seeds."""

import json
import math
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

import common
import results
import train_lm
import train_seg
from fan import FANConfig
from fixtures import ROOT
from lm import LM, LMConfig
from runs import call
from segmenter import SegmenterConfig

PGD = dict(steps=20, eps=2 / 255)


def row(model="rpc, seed 0", name="clean", settings=None, top1=50.0, images=4, **fields):
    """Return a row; networks differ by their name."""
    return dict(weights=model, model_config=dict(attn=model.split(",")[0]), size=32, code="c",
                data="shapes", fingerprint="f", name=name, settings=settings or {}, seed=0,
                images=images, model=model, checkpoint=f"out/{model}", recipe="r",
                top1=top1) | fields


def attack(name, right, settings=None, **fields):
    right = torch.tensor(right)
    return row(name=name, settings=settings or PGD, top1=100 * right.double().mean().item(),
               images=len(right), right=results.pack(right), max_linf=0.1, **fields)


# --- summaries ------------------------------------------------------------------------------------

def test_worst_case_uses_complete_rows():
    few = attack("pgd", [True, False])
    many = attack("pgd", [True, True, True, False])
    other = attack("apgd", [True, True, False, True, True])
    for order in ((few, many, other), (other, many, few)):
        worst, = results.worst_cases(order)
        assert (worst["top1"], worst["images"]) == (50.0, 4)
    assert not list(results.worst_cases([few, many]))               # one attack, not two


def test_worst_case_omits_own_budgets_and_other_code():
    pgd = attack("pgd", [True])
    for other in (attack("noise", [True]), attack("mine", [True], own_eps=True),
                  attack("apgd", [True], code="d"), attack("apgd", [True], dict(eps=4 / 255)),
                  row(settings=dict(eps="inf"), right=pgd["right"])):
        assert not list(results.worst_cases([pgd, other]))
    assert list(results.worst_cases([pgd, attack("mine", [True], own_eps=False)]))


def test_worst_case_does_not_depend_on_row_order():
    first = [attack("pgd", [True]), attack("apgd", [True])]
    second = [attack("apgd", [True], model="b"), attack("pgd", [True], model="b")]
    table = results.rows_table([*first, *second])
    line, = (line for line in table.splitlines() if "| worst" in line)
    assert "of=apgd steps=20,pgd steps=20, top1" in line and line.count("100.00") == 2


def test_worst_cases_compare_equal_settings():
    """Longer PGD is another attack, so the first network has no number beside it."""
    long = dict(steps=200, eps=2 / 255)
    first = [attack("pgd", [True]), attack("apgd", [True])]
    second = [attack("pgd", [True], model="b"), attack("apgd", [True], model="b"),
              attack("pgd", [False], long, model="b")]
    table = results.rows_table(first + second)
    worst = [line for line in table.splitlines() if "| worst" in line]
    found = [("steps=200" in line, line.count("100.00")) for line in worst]
    assert found == [(False, 1), (True, 0)]


@pytest.mark.parametrize("change", [dict(classes=100), dict(size=32), dict(data="cifar10")])
def test_mce_needs_imagenet_at_full_size(change):
    rows = [row(name="corruptions", data="imagenet", size=224, classes=1000, top1=[40.0] * 5,
                settings=dict(type=name, severities=[1, 2, 3, 4, 5])) for name in results.NAMES]
    mean, = results.mean_rows(rows)
    assert "mce" in mean and mean["top1"] == 40
    mean, = results.mean_rows([other | change for other in rows])
    assert "mce" not in mean


def test_settings_are_printed_as_they_are():
    text = results.measure_text("mine", dict(share=0.2, alpha=0.5 / 255, eps=2 / 255, lr=0.1))
    assert text == "mine share=0.2 alpha=0.00196078431372549 eps=2/255 lr=0.1"
    assert results.measure_text("a", dict(eps=0.0313725)) != results.measure_text(
        "a", dict(eps=8 / 255))


def test_numbers_that_are_not_finite_are_shown(tmp_path):
    """JSON has no such numbers, so they are texts in the file."""
    path = tmp_path / "results.jsonl"
    settings = dict(radius=math.inf)
    common.append_row(path, row(settings=settings, top1=[math.inf, 1.0], loss=-math.inf))
    common.append_row(path, row(name="fog", top1=math.nan))

    def no_constant(name):
        raise AssertionError(f"{name} is no JSON")

    stored = [json.loads(line, parse_constant=no_constant)
              for line in path.read_text().splitlines()]
    assert stored[0]["top1"] == ["inf", 1.0] and stored[0]["loss"] == "-inf"
    table = results.rows_table(results.read_rows(path))
    assert "| clean radius=inf, top1 | 4      | inf " in table and "| nan " in table
    assert results.measure_text("mine", dict(eps=math.inf)) == "mine eps=inf"


def test_kinds_name_encoder_decoder_and_mu():
    pap = dict(n_iter=2)
    fan = FANConfig(attn="rpc", pap=pap)
    same, other = SegmenterConfig(attn="rpc", pap=pap), SegmenterConfig(
        attn="rpc", pap=pap, architecture="fan", decoder_attn="softmax")
    assert results.kind_of(fan) == "fan rpc 2iter/layer0"
    assert results.kind_of(same) == "rpc 2iter/layer0"
    assert results.kind_of(other) == "fan rpc 2iter/layer0, decoder softmax"
    for mu_over, text in (("seen", ""), ("token", ", mu_over token")):
        config = LMConfig(9, attn="rpc", rpc_layers=(0,), pap=pap | dict(mu_over=mu_over))
        assert results.kind_of(config) == "rpc 2iter/layer0" + text


def test_cw_prints_its_distance():
    table = results.rows_table([row(name="cw", settings=dict(steps=9), top1=0.0, median_l2=0.1234)])
    assert "| cw steps=9, median L2 distance in pixel values | 4      | 0.1234" in table


def test_rows_of_two_codes_have_two_lines():
    first, second = row(top1=10.0), row(top1=20.0, code="d")
    table = results.rows_table([first, second, row("softmax, seed 0", top1=30.0, code="d")])
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    assert lines == [["clean, top1, code c", "4", "10.00", ""],
                     ["clean, top1, code d", "4", "20.00", "30.00"]]
    assert "code" not in results.rows_table([first, row("softmax, seed 0", code="d")])


def test_missing_and_cut_rows_name_their_file(tmp_path):
    with pytest.raises(common.InputError, match="nowhere: no rows"):
        results.read_rows("nowhere")
    path = tmp_path / "robust" / "results.jsonl"
    path.parent.mkdir()
    common.append_row(path, row())
    common.append_row(path, row(top1=7.0))
    assert [one["top1"] for one in results.read_rows(tmp_path)] == [50.0, 7.0]
    whole = path.read_text()
    for cut in (20, 1):                                             # within the row; its end only
        path.write_text(whole[:-cut])
        with pytest.raises(common.InputError, match="results.jsonl, line 2: .* incomplete"):
            results.read_rows(tmp_path)
    path.write_text('{"step": 1}\n')
    with pytest.raises(common.InputError, match="no row of an evaluation"):
        results.read_rows(tmp_path)


# --- the table over seeds -------------------------------------------------------------------------

def test_t_quantile_equals_scipy():
    for df in (1, 1.01, 1.7, 2, 3.3, 4, 9.99, 30, 257.5, 1e4):
        assert results.t_quantile(df) == pytest.approx(stats.t.ppf(0.975, df), abs=1e-6)


RPC = {0: 70.0, 1: 74.5, 2: 72.0}
SOFTMAX = {0: 69.0, 1: 75.5, 2: 68.25}


def networks(kind, accuracies, **fields):
    return [row(f"{kind}, seed {seed}", top1=top1, **fields) for seed, top1 in accuracies.items()]


def cells(rows, line="clean, top1"):
    """Return the cells of the line of the table over seeds."""
    table = results.seeds_table(rows)
    found, = (text for text in table.splitlines() if text.startswith(f"| {line} "))
    return [cell.strip() for cell in found.split("|")[2:-1]]


def half_width(values):
    low, high = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))
    return (high - low) / 2


def test_means_and_paired_differences_equal_scipy():
    a, b = np.array(list(RPC.values())), np.array(list(SOFTMAX.values()))
    rows = networks("rpc", RPC) + networks("softmax", dict(reversed(SOFTMAX.items())))
    paired = stats.ttest_rel(b, a).confidence_interval()
    assert cells(rows) == [
        "4", f"{a.mean():.2f} ± {half_width(a):.2f}, n 3", f"{b.mean():.2f} ± "
        f"{half_width(b):.2f}, n 3", f"{(b - a).mean():+.2f} ± "
        f"{(paired.high - paired.low) / 2:.2f}, paired"]


def test_unequal_seeds_are_compared_by_welch():
    b = {5: 69.0, 6: 75.5, 7: 68.25, 8: 60.0}
    welch = stats.ttest_ind(list(b.values()), list(RPC.values()), equal_var=False)
    interval = welch.confidence_interval()
    *_, difference = cells(networks("rpc", RPC) + networks("softmax", b))
    mean = np.mean(list(b.values())) - np.mean(list(RPC.values()))
    assert difference == f"{mean:+.2f} ± {(interval.high - interval.low) / 2:.2f}, unpaired"


def test_one_seed_has_no_interval():
    _, _, one, difference = cells(networks("rpc", RPC) + networks("softmax", {0: 60.0}))
    assert one == "60.00, n 1" and difference == "-12.17, unpaired"
    assert results.seeds_table([row(), row("softmax, seed 0"), row("softmax, net")]) == ""


def test_other_images_are_left_out_and_named():
    rows = networks("rpc", RPC) + networks("softmax", SOFTMAX)
    rows[0] |= dict(images=9)
    table = results.seeds_table(rows)
    assert "| clean" not in table and "left out: clean, top1: " in table and "(4, 9 images)" in table
    rows[0] |= dict(images=4, fingerprint="g")
    assert "left out: clean, top1: " in results.seeds_table(rows)
    both = networks("rpc", RPC) + networks("rpc", RPC, images=9)    # two complete evaluations
    assert results.seeds_table(both).count("72.17") == 2


def test_kinds_differ_in_recipe_not_in_seed():
    same = [row(f"rpc, seed {seed}", recipe=results.recipe(
        dict(seed=seed, lr=0.1, out_dir=f"out/{seed}", init_from=f"out/a_s{seed}/last.pt"), None))
        for seed in (0, 1)]
    assert same[0]["recipe"] == same[1]["recipe"]
    assert (results.recipe(dict(warmup_epochs=1), None)
            == results.recipe(dict(warmup_epochs=1.0), None))
    longer = row("rpc, seed 2", recipe=results.recipe(dict(seed=2, lr=0.2), None))
    table = results.seeds_table([*same, longer])
    assert "rpc like out/rpc, seed 0" in table and ", n 2" in table and "n 1" in table
    twice = row("rpc, seed 0", weights="other", recipe=same[0]["recipe"])
    assert "2 networks have seed 0" in results.seeds_table([*same, twice, *networks("a", RPC)])


def test_networks_of_other_files_are_two_kinds():
    """The path of the folder does not matter. Rendered scenes follow from the flags."""
    def network(seed, data_dir, fingerprint):
        flags = dict(data="folder", seed=seed, data_dir=data_dir)
        return row(f"rpc, seed {seed}", recipe=results.recipe(flags, fingerprint))

    first = network(0, "photos_v1", ["a", "b"])
    assert results.seeds_table([first, network(1, "photos_v2", ["c", "d"])]) == ""
    assert "n 2" in results.seeds_table([first, network(1, "copy", ["a", "b"])])
    assert "n 2" in results.seeds_table([network(0, None, "a"), network(1, None, "b")])


def test_results_lie_beside_a_file_of_any_ending(tmp_path):
    """A folder may be called net.pt, and a file net.pth."""
    model = LM(LMConfig(9))
    checkpoint = dict(args=dict(seed=0), task="language modelling")
    (tmp_path / "net.pt").mkdir()
    for name, folder in (("net.pth", tmp_path), ("net.pt", tmp_path / "net.pt")):
        args = Namespace(eval_only=tmp_path / name, out_dir=None, seed=0)
        results.add_result(args, model, checkpoint, 0.0, fingerprint="f", name=name, settings={})
        assert [one["name"] for one in results.read_rows(folder)] == [name]


def test_rows_without_recipe_are_told_apart_by_folder():
    old = [row(f"rpc, seed {seed}", recipe=None, checkpoint=f"out/{arm}_s{seed}",
               weights=f"{arm}{seed}") for arm in ("short", "long") for seed in (0, 1)]
    assert results.seeds_table(old).count("n 2") == 2


def test_eval_only_rows_get_both_tables(tmp_path):
    for seed, iou in ((0, 40.0), (1, 44.0)):
        common.append_row(tmp_path / "results.jsonl", dict(
            model=f"rpc, seed {seed}", checkpoint="c", weights=str(seed), model_config={},
            task="segmentation", name="clean", images=8, settings={}, seed=0, mean_iou=iou,
            recipe="r"))
    rows = results.read_rows(tmp_path)
    assert "clean, mean IoU" in results.rows_table(rows)
    half = half_width([40.0, 44.0])
    assert cells(rows, "clean, mean IoU") == ["8", f"42.00 ± {half:.2f}, n 2"]


def eval_only_rows(script, weights, words, folder):
    """Return the rows of --eval_only on shipped weights, as if few scenes trained them."""
    checkpoint = common.load(ROOT / weights)
    checkpoint["args"]["num_images"] = 40
    common.save(folder / "net.pt", checkpoint)
    call(script.main, ["--device", "cpu", "--eval_only", folder / "net.pt", *words])
    return results.read_rows(folder)


def test_masks_of_other_images_are_another_row(tmp_path, monkeypatch):
    load = train_seg.load_test_images

    def changed_images(args, checkpoint, data, data_dir):
        test = load(args, checkpoint, data, data_dir)
        test.images[0] += 1
        return test

    words = ["--limit", 2, "--severities"]
    eval_only_rows(train_seg, "weights/seg_shapes_rpc.pt", words, tmp_path)
    monkeypatch.setattr(train_seg, "load_test_images", changed_images)
    first, second = eval_only_rows(train_seg, "weights/seg_shapes_rpc.pt", words, tmp_path)
    assert first["images"] == second["images"] == 2 and first["code"] == results.code_hash()
    table = results.rows_table([first, second])
    for one in (first, second):
        assert f"mean IoU, data {one['fingerprint']} " in table


def test_perplexity_of_another_text_is_another_row(tmp_path):
    for name, text in (("a.txt", "a list of names "), ("b.txt", "the name of a list ")):
        file = Path(tmp_path, name)
        file.write_text(20 * text)
        rows = eval_only_rows(train_lm, "weights/pydoc_rpc.pt",
                              ["--limit", 80, "--data_dir", file], tmp_path)
    first, second = rows
    assert first["images"] == second["images"] == 80 and first["code"] == results.code_hash()
    assert first["fingerprint"] != second["fingerprint"]
    assert results.row_key(first) != results.row_key(second)


def test_stored_rows_of_the_studies_stay_readable():
    """Rows of earlier versions have no code, and noise and CW have no own_eps."""
    rows = common.read_log(ROOT / "studies/results/line/flat.jsonl")
    table = results.rows_table(rows)
    assert "| clean, top1 " in table and "type=mean" in table and "| pgd " in table
    assert "n 3" in results.seeds_table(rows)
