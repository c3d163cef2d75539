"""Do the measures see a defence that works, and does RPC add to it? Adversarial training.

    python -m referee.studies.control run                                # trains and evaluates what lacks
    python -m referee.studies.control run --arms rpc4-l1-adv --seeds 7   # one network, in --out_dir
    python -m referee.studies.control table --rows referee/results/control/*_s?.jsonl

Symmetric attention and RPC with its published constants, each trained as usual and on images that
PGD moved by 2/255 (-adv). A network that is more robust has to look so in the study's measures, and
each curve of accuracy against budget has to fall to zero. What is compared and what each outcome
means was fixed before the runs: referee/results/control/README.md. A run that was cut goes on.
"""

import argparse
import sys
from pathlib import Path

if not __package__:
    sys.exit("error: start this in the repository's folder, as: python -m referee.studies.control")

import common
from referee.studies.constants import PUBLISHED, SEVERITIES, train
from referee.studies.differences import outcomes, primary_of, report
from referee.studies.robustness import call, in_files, runs_of

ADV = ["--adv_eps", "2/255", "--adv_steps", 3]
ARMS = PUBLISHED | {f"{arm}-adv": flags + ADV for arm, flags in PUBLISHED.items()}
BUDGETS = (0.5, 1, 2, 3, 4, 6, 8, 12, 16)                              # in 1/255
PGD = f"pgd eps={','.join(f'{budget}/255' for budget in BUDGETS)} steps=20"
IMAGES = 1000
COMPARED = [("symmetric", "symmetric-adv"), ("symmetric-adv", "rpc4-l1-adv"),
            ("symmetric", "rpc4-l1")]                                  # baseline, arm


def run(out_dir, arms, seeds):
    """Train and evaluate networks one after another; each has a folder and rows of its own."""
    for arm, seed in ((arm, seed) for seed in seeds for arm in arms):
        folder = out_dir / f"{arm}_s{seed}"
        train(folder, *ARMS[arm], "--epochs", 8, "--seed", seed)
        call("eval_robust.py", "--ckpt", folder, "--out_dir", out_dir / f"eval_{arm}_s{seed}",
             "--resume", "--seed", 1, "--limit", IMAGES, "--severities", *SEVERITIES,
             "--measures", "clean", "corruptions", PGD)


def draw(rows, path):
    """Draw accuracy against PGD's budget: means over seeds, bands from lowest to highest."""
    from referee.studies.plot import WIDTH, by_budget, curves, plt
    shown = by_budget([row for row in rows if row["measure"] in ("clean", "pgd")],
                      lambda row: row["checkpoint"].rpartition("_s")[0])
    figure, ax = plt.subplots(figsize=(WIDTH, 4))
    curves(ax, shown.items())
    ax.set_xscale("symlog", base=2, linthresh=BUDGETS[0])
    ax.set_xticks([0, *BUDGETS], [f"{x:g}" for x in (0, *BUDGETS)])
    ax.set(xlabel="PGD-20, budget in 1/255 of the pixel range", ylabel="accuracy in %",
           xlim=(-0.1, 1.1 * BUDGETS[-1]))
    figure.savefig(path)
    plt.close(figure)


def table(paths, path):
    """Print each comparison of what is in, and draw the curves."""
    rows = in_files(paths)
    if not rows:
        raise ValueError(f"no rows of the evaluator beside {path} yet: `run` makes them")
    found = outcomes(rows, runs_of(rows), IMAGES)
    found = {name.replace("0.00196", "0.5/255"): runs for name, runs in found.items()}
    report(found, COMPARED, primary_of(rows))
    draw(rows, path)


def main():
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("task", choices=["run", "table"])
    p.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    p.add_argument("--seeds", nargs="+", type=common.number(int, 0), default=[5, 6, 7])
    p.add_argument("--out_dir", type=Path, default=Path("out/control"))
    p.add_argument("--rows", nargs="+", type=Path, help="table: files of the evaluator's rows")
    args = p.parse_args()
    if args.task == "run":
        return run(args.out_dir, args.arms, args.seeds)
    args.out_dir.mkdir(parents=True, exist_ok=True)
    table(args.rows or sorted(args.out_dir.glob("eval_*/results.jsonl")),
          args.out_dir / "budgets.png")


if __name__ == "__main__":
    common.run(main)
