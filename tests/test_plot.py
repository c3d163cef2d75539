"""referee/plot.py: what the figures show of rows, logs and CSV files."""

import json

import pytest

pytest.importorskip("matplotlib")

import common  # noqa: E402
from referee import plot, published_scores, kernel_pca  # noqa: E402
from test_kernel_pca import run, save_vit  # noqa: E402

PIXEL = dict(space="pixel", labels="true", clip=True)
PAPER = dict(space="normalized", labels="pred", clip=False)


def row(arm, seed, measure, top1, conditions=PIXEL, images=50, size="nano", **setting):
    return dict(model=f"{arm}, seed {seed}", kind=arm, checkpoint=f"out/{size}_{arm}_s{seed}",
                weights=f"{size}{arm}{seed}", model_config=dict(attn=arm), recipe=size,
                task="classification", data="shapes", data_dir=None, imagenet1k=False,
                measure=measure, setting=setting, conditions=conditions, images=images, top1=top1)


def write(folder, rows):
    (folder / "results.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def sweep_rows(conditions, **more):
    """Two seeds: 90 and 80 clean, 60 and 40 at 1/255, 30 and 20 at 2/255."""
    found = []
    for seed, clean, near, far in ((0, 90, 60, 30), (1, 80, 40, 20)):
        found += [row("rpc", seed, "clean", clean, images=100, **more),
                  row("rpc", seed, "pgd", near, conditions, eps=1 / 255, **more),
                  row("rpc", seed, "pgd", far, conditions, eps=2 / 255, **more)]
    return found


def test_a_curve_is_of_one_way_to_attack_from_the_clean_accuracy_on_all_seeds_together(tmp_path):
    longer = [row("rpc", 0, "pgd", 9 - k, eps=k / 255, steps=100) for k in (1, 2)]
    other = [row("rpc", 0, "pgd", 0, eps=1 / 255, images=9), row("rpc", 0, "fgsm", 5, eps=1 / 255)]      # one budget
    assert len(plot.attacks(sweep_rows(PIXEL) + longer + other + sweep_rows(PAPER))) == 3
    found = plot.by_budget(sweep_rows(PIXEL), lambda row: row["kind"])
    assert {round(x): sorted(of) for x, of in found["rpc"].items()} == {0: [80, 90], 1: [40, 60], 2: [20, 30]}
    write(tmp_path, other)
    assert plot.sweep(tmp_path, "")[0] is None


def test_run_takes_the_networks_of_a_name(tmp_path):
    files = [r | dict(checkpoint=f"{r['checkpoint']}/last.pt") for r in sweep_rows(PIXEL, size="micro")]
    write(tmp_path, sweep_rows(PIXEL) + files)
    assert len(plot.sweep(tmp_path, "")[0].axes[0].lines) == 2
    plot.main(["robust", str(tmp_path), "--run", "micro", "other"])
    assert [path.name for path in tmp_path.glob("*.png")] == ["sweep_micro_other.png"]
    assert len(plot.sweep(tmp_path, ("micro", "other"))[0].axes[0].lines) == 1


# --- other figures, the command -------------------------------------------------------------------

def test_a_log_is_drawn_as_loss_evaluations_nonzero_s_and_speed(tmp_path, capsys):
    rows = [dict(step=2, loss=2.0, grad_norm=1.0, images_per_s=100.0, epoch=1.0, lr=0.1),
            dict(step=2, eval=dict(top1=30.0, loss=1.5, images=50), nonzero_S={"0": [0.5, 0.25]}),
            dict(step=4, loss=1.0, images_per_s=200.0, lr=0.1), dict(step=4, eval=dict(top1=60.0, loss=0.5, images=50))]
    for name, some in (("a", rows), ("b", rows[:2])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    curves = plot.log_curves(rows)
    assert curves.keys() == {"loss", "top1", "images a second", "share of nonzero S"}
    assert curves["loss"] == {"training": [(2, 2.0), (4, 1.0)], "evaluation": [(2, 1.5), (4, 0.5)]}
    assert curves["share of nonzero S"]["layer 0, PAP step 2"] == [(2, 0.25)]
    plot.main(["log", str(tmp_path / "a"), str(tmp_path / "b")])
    assert (tmp_path / "a" / "curves.png").stat().st_size > 5000
    (tmp_path / "c").mkdir()
    for argv, message in ((["log", tmp_path / "c"], "c holds no log.jsonl"), (["kpca", tmp_path / "c"], "holds no CSV"),
                          (["robust", tmp_path / "c"], "has no results.jsonl")):
        with pytest.raises(common.InputError, match=message):
            plot.main(list(map(str, argv)))


def test_one_checkpoint_gives_every_figure_of_kpca_and_a_word_on_what_it_lacks(tmp_path, capsys):
    ckpt = save_vit(tmp_path / "a.pt")
    flags = ["--ckpt", ckpt, "--images", 3, "--out_dir", tmp_path, "--device", "cpu", "--exp"]
    run(kernel_pca, *flags, "jproj,gamma,capture")
    capsys.readouterr()
    run(plot, "kpca", tmp_path)
    assert {p.stem for p in tmp_path.glob("*.png")} == set(plot.FIGURES["kpca"])
    loss, gamma, layers = capsys.readouterr().out.splitlines()
    assert "several checkpoints" in loss and "exp losses" in loss and "exp gammas" in gamma and "exp gammas" in layers
    run(published_scores, *flags, "gammas,losses")
    assert plot.kpca_gamma(tmp_path, "")[1] == "" and "exp losses" not in plot.kpca_loss(tmp_path, "")[1]
    (tmp_path / "gamma_axes.csv").write_text("run,step,layer,measure,source,axis,mean,se\n"
                                             "a,1,0,eig_cos by head,learned,1,0.5,0.1\n")    # by head: no curve
    assert plot.kpca_gamma(tmp_path, "") == (None, "python -m referee.kernel_pca --exp gamma")


