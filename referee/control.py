"""Do the measures see a defence that works, and does RPC add to it? Adversarial training.

    python -m referee.control  # trains and evaluates what lacks
    python -m referee.control --arms rpc4-l1-adv --seeds 7   # one network, in --out_dir
    python -m referee.control --rows referee/results/control/*_s?.jsonl     # tables, curves

Symmetric attention and RPC with its published constants, each trained as usual and on images that
PGD moved by 2/255 (-adv). A network that is more robust has to look so in the study's measures, and
each curve of accuracy against budget has to fall to zero. What is compared and what each outcome
means was fixed before the runs: referee/results/control/README.md.
"""

import common
from referee import arms
from referee.constants import HOW, PUBLISHED
from referee.differences import outcomes, primary_of, report

ADV = dict(adv_eps=2 / 255, adv_steps=3)
ARMS = PUBLISHED | {f"{arm}-adv": flags | ADV for arm, flags in PUBLISHED.items()}
BUDGETS = (0.5, 1, 2, 3, 4, 6, 8, 12, 16)                              # in 1/255
PGD = f"pgd eps={','.join(f'{budget}/255' for budget in BUDGETS)} steps=20"
COMPARED = [("symmetric", "symmetric-adv"), ("symmetric-adv", "rpc4-l1-adv"),
            ("symmetric", "rpc4-l1")]                                  # baseline, arm


def draw(rows, path):
    """Draw accuracy against PGD's budget: means over seeds, bands from lowest to highest."""
    from referee.plot import WIDTH, by_budget, colour_of, curves, plt, save
    shown = by_budget([row for row in rows if row["measure"] in ("clean", "pgd")],
                      lambda row: arms.run_of(row)[0])
    figure, ax = plt.subplots(figsize=(WIDTH, 4))
    curves(ax, shown.items(),
           lambda arm: (colour_of(arm), "--" if arm.endswith("-adv") else "-"))
    ax.set_xscale("symlog", base=2, linthresh=BUDGETS[0])
    ax.set_xticks([0, *BUDGETS], [f"{x:g}" for x in (0, *BUDGETS)])
    ax.set(xlabel="PGD-20, budget in 1/255 of the pixel range", ylabel="accuracy in %",
           xlim=(-0.1, 1.1 * BUDGETS[-1]))
    save(figure, path)


def main(argv=None):
    args, rows = arms.run(__doc__, ARMS, argv, out_dir="out/control", seeds=(5, 6, 7), limit=1000,
                          measures=["clean", "corruptions", PGD], how=HOW)
    found = outcomes(rows, args.limit)
    found = {name.replace("0.00196", "0.5/255"): runs for name, runs in found.items()}
    report(found, COMPARED, primary_of(rows))
    args.out_dir.mkdir(parents=True, exist_ok=True)
    draw(rows, args.out_dir / "budgets.png")


if __name__ == "__main__":
    common.run(main)
