"""Does RPC make a network more robust, and is it the robust part that does it?

    python -m studies.robustness                            # scenes: 3 hours on 2 idle CPU cores
    python -m studies.robustness --seeds 0 --arms symmetric rpc4-l1 --epochs 3      # a first look
    python -m studies.robustness --data cifar10 --data_dir data/cifar10 --model nano --epochs 12
    python -m studies.robustness --no-train                 # only what has finished so far

The arms are one network but for its attention: same seeds, batches and steps. Some lack a part of
RPC-Attention: what is left of its effect says which part has it. What --out_dir lacks is trained by
train_cls.py and evaluated by eval_robust.py on the same images; accuracies are compared with those
of the symmetric arm, paired by seed. An arm may also be a name of studies/robust_attentions.py.

A difference is called one only if its 95 % t-interval over seeds excludes 0. Beside it stands a
bootstrap: how far other test images could move the mean over these seeds. Flags that are not listed
go to train_cls.py. Rows that eval_robust.py adds to --out_dir/eval join the tables.
"""

import argparse
import subprocess
import sys
from pathlib import Path

if not __package__:
    sys.exit("error: start this in the repository's folder, as: python -m studies.robustness")

import numpy as np

import common
from robust import corruptions, metrics
from robust.rows import SEED_FLAGS, read_rows
from robust.tables import title
from studies.robust_attentions import ATTENTIONS
from studies.tables import half_width

BASELINE = "symmetric"
USUAL = {                                                  # flags of train_cls.py
    "softmax": dict(attn="softmax"),                                            # reference
    "symmetric": dict(attn="symmetric"),                                        # the baseline
    "rpc4-l1": dict(attn="rpc", n_iter=4),                                      # the paper's model
    "rpc2-all": dict(attn="rpc", rpc_layers="all", n_iter=2, lambd=3.0),        # its other model
    "no-shrink": dict(attn="rpc", n_iter=4, lambd=np.inf),                      # no sparse part
    "clamp": dict(attn="rpc", n_iter=1),                                        # no iteration
    "admm": dict(attn="rpc", n_iter=4, form="admm"),                            # right constants
}
ARMS = USUAL | {name: dict(attention=name, settings=settings)
                for name, (_, settings) in ATTENTIONS.items()}
MEASURES = ["clean", "corruptions", "fgsm eps=1/255,2/255", "pgd eps=1/255,2/255 steps=20",
            "apgd eps=1/255,2/255", "adaptive_pgd eps=2/255"]
FAMILIES = dict(noise=corruptions.NAMES[:3], blur=corruptions.NAMES[3:7],
                weather=corruptions.NAMES[7:11], digital=corruptions.NAMES[11:])

NONE = 0, np.nan, (np.nan, np.nan), (np.nan, np.nan)       # a difference that is not there


def get_args(argv=None):
    """The study's flags, and those for train_cls.py as a list."""
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out_dir", type=Path, default=Path("out/robustness"),
                   help="of the runs, <arm>_s<seed>, and the evaluator's rows, eval")
    p.add_argument("--arms", nargs="+", choices=ARMS, default=list(USUAL),
                   help="default: those of train_cls.py")
    p.add_argument("--seeds", nargs="+", type=common.number(int, 0), default=[0, 1, 2])
    p.add_argument("--clamp", type=common.number(float, 0), default=0.5, metavar="LAMBDA",
                   help="lambda of the arm clamp, chosen on held-out training images")
    p.add_argument("--limit", type=common.number(int, 1), default=500, help="images a measure")
    p.add_argument("--measures", nargs="+", default=MEASURES, help="as eval_robust.py takes them")
    p.add_argument("--train", action=argparse.BooleanOptionalAction, default=True)
    args, rest = p.parse_known_args(argv)
    if BASELINE not in args.arms:
        raise ValueError(f"--arms {' '.join(args.arms)}: expected {BASELINE} among them, with "
                         f"which the others are compared")
    ARMS["clamp"]["lambd"] = args.clamp
    return args, rest


# --- training and evaluating what is missing ------------------------------------------------------

def finished(folder, arm, seed):
    """Has this run all its epochs? ValueError if the folder holds a run of another arm or seed."""
    if not (folder / "last.pt").exists():
        return False
    checkpoint = common.read_checkpoint(folder)
    common.check_run(checkpoint, folder, "train_cls.py", "args", "step")
    trained = checkpoint["args"]
    for name, value in (ARMS[arm] | dict(seed=seed)).items():
        if trained.get(name) != value:
            raise ValueError(f"{folder} was trained with {name} {trained.get(name)}, expected "
                             f"{value} of the arm {arm}")
    rows = common.read_log(folder / "log.jsonl")
    last = [row for row in rows if "eval" in row and row["step"] == checkpoint["step"]]
    return bool(last) and last[0]["epoch"] >= trained["epochs"]


def check_recipe(folders):
    """ValueError unless networks differ in nothing but their arm and seed. {(arm, seed): folder}"""
    arm_flags = {"n_iter", "lambd", "rpc_layers", "study"}.union(*ARMS.values())
    seen = {}
    for folder in folders.values():
        trained = common.read_checkpoint(folder)["args"]
        for name in trained.keys() - arm_flags - {*SEED_FLAGS}:
            value, first = seen.setdefault(name, (trained[name], folder))
            if value != trained[name]:
                raise ValueError(f"{folder} was trained with {name} {trained[name]}, {first} with "
                                 f"{value}: choose another --out_dir for one of them")


def call(*command):
    """Run a script of ours; ValueError if it fails, after its own line that says why."""
    command = [str(part) for part in command]
    print("$ python", *command, flush=True)
    if subprocess.run([sys.executable, *command]).returncode:
        raise ValueError(f"{command[command[0] == '-m']} failed; what has finished is kept, start "
                         "again to go on")


def with_rpc(arm):
    """Has it RPC-Attention, whose gradients an adaptive attack replaces?"""
    return ARMS[arm].get("attn") == "rpc"


def train(folder, arm, seed, rest):
    """Train a run, or go on with one that was cut."""
    script = ["train_cls.py"]
    flags = [part for name, value in ARMS[arm].items() for part in (f"--{name}", value)]
    if arm in ATTENTIONS:
        script, flags = ["-m", "studies.robust_attentions", "train", arm], []
    new = [*rest, *flags, "--seed", seed, "--set", "keep_every=1", "--out_dir", folder]
    call(*script, *(["--resume", folder] if (folder / "last.pt").exists() else new))


def evaluate(folders, args):
    """Measure what no row has yet. folders: {(arm, seed): folder}."""
    how = ["--out_dir", args.out_dir / "eval", "--resume", "--limit", args.limit, "--measures"]
    adaptive = [text for text in args.measures if text.startswith("adaptive")]
    usual = [text for text in args.measures if text not in adaptive]
    robust = [folder for (arm, _), folder in folders.items() if with_rpc(arm)]
    for measures, models in ((usual, folders.values()), (adaptive, robust)):
        if measures and models:                            # without RPC an adaptive attack is PGD
            call("-m", "studies.robust_attentions", "evaluate", "--ckpt", *models, *how, *measures)


# --- differences ----------------------------------------------------------------------------------

def outcomes(rows, folders, limit):
    """{measure: {(arm, seed): how often each image was right (n,), in [0, 1]}}, in a fixed order.

    rows: of eval_robust.py. folders: {(arm, seed): folder}.
    """
    found = {name: {} for name in ("clean", "15 corruptions", *FAMILIES)}
    runs, types, hows = {str(folder): run for run, folder in folders.items()}, {}, {}
    for row in (row for row in rows if row["checkpoint"] in runs):
        run, name = runs[row["checkpoint"]], title(row)
        packed = row["right"] if isinstance(row["right"], list) else [row["right"]]
        right = np.mean([metrics.unpack(text, row["images"]).numpy() for text in packed], 0)
        if row["images"] != limit:
            name += f", {row['images']} images"
        how = row["setting"], row.get("conditions")
        if hows.setdefault(name, how) != how:
            raise ValueError(f"{name} was measured in two ways, {hows[name]} and {how}: keep the "
                             "rows of one")
        if row["measure"] == "corruptions":
            types.setdefault(run, {})[name] = right
        else:
            found.setdefault(name, {})[run] = right

    # means over the corruptions of a family; the adaptive attack on what hides no gradient is PGD
    for run, of in types.items():
        for family, names in {"15 corruptions": corruptions.NAMES, **FAMILIES}.items():
            if set(names) <= set(of):
                found[family][run] = np.mean([of[name] for name in names], 0)
    for name in [name for name in found if name.startswith("adaptive_pgd")]:
        plain = found.get(name.removeprefix("adaptive_"), {})
        found[name] |= {run: right for run, right in plain.items()
                        if not with_rpc(run[0])}
    return {name: runs for name, runs in found.items() if runs}


def difference(first, second):
    """Points of accuracy between paired runs. first, second: (seeds, images), in [0, 1].

    Returns (mean, its t-interval over seeds (low, high), nan for one seed, its bootstrap interval
    over images); all intervals 95 %.
    """
    gaps = 100 * (np.asarray(first, float) - np.asarray(second, float))
    mean, half = gaps.mean(), half_width(gaps.mean(1))
    return mean, (mean - half, mean + half), metrics.bootstrap(gaps.mean(0))


def compare(found, arms):
    """{(measure, arm): (number of pairs, mean, over seeds, over images)}, where there are pairs."""
    result = {}
    for name, runs in found.items():
        for arm in arms:
            seeds = sorted(s for a, s in runs if a == arm and (BASELINE, s) in runs)
            if arm != BASELINE and seeds:
                first, second = ([runs[which, s] for s in seeds] for which in (arm, BASELINE))
                result[name, arm] = (len(seeds), *difference(first, second))
    return result


# --- tables and figure ----------------------------------------------------------------------------

def tables(found, compared, arms):
    """Markdown: accuracies, differences with intervals over seeds, intervals over images."""
    def accuracy(name, arm):
        values = [100 * right.mean() for (a, _), right in found[name].items() if a == arm]
        std = f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
        return f"{np.mean(values):.1f}{std} ({len(values)})" if values else ""

    def over_seeds(name, arm):
        if (name, arm) not in compared:
            return ""
        n, mean, (low, high), _ = compared[name, arm]
        text = f"{mean:+.1f} ({low:+.1f} to {high:+.1f})" if n > 1 else f"{mean:+.1f}"
        return f"**{text}**" if low > 0 or high < 0 else text

    def over_images(name, arm):
        *_, (low, high) = compared.get((name, arm), NONE)
        return f"{low:+.1f} to {high:+.1f}".replace("+nan to +nan", "")

    def part(text, columns, cell):
        body = [[name, *(cell(name, arm) for arm in columns)] for name in found]
        return text + "\n\n" + common.table(body, ["measure", *columns])

    others = [arm for arm in arms if arm != BASELINE]
    return "\n\n".join([
        part("Accuracy in per cent, mean ± standard deviation (seeds):", arms, accuracy),
        part(f"Difference to {BASELINE} in points, paired by seed (95 % t-interval over seeds), "
             "bold where that excludes 0:", others, over_seeds),
        part("The same differences, 95 % bootstrap interval over images:", others, over_images)])


def draw(compared, arms, path):
    """Differences as points, arms in rows, measures in columns: thick over seeds, thin: images."""
    from studies.plot import WIDTH, plt
    arms = [arm for arm in arms if any(a == arm for _, a in compared)]
    names = list(dict.fromkeys(name for name, _ in compared))
    figure, axes = plt.subplots(2, (len(names) + 1) // 2, sharey=True, squeeze=False,
                                figsize=(1.3 * WIDTH, 1.6 + 0.62 * len(arms)))
    for ax, name in zip(axes.flat, names):
        ends = [0]
        for y, arm in enumerate(arms):
            n, mean, seeds, images = compared.get((name, arm), NONE)
            ends += [*images, *(seeds if n > 2 else ())]   # of two seeds: as wide as any panel
            colour = "tab:red" if seeds[0] > 0 or seeds[1] < 0 else "tab:blue"
            ax.plot(images, [y + 0.25] * 2, color="tab:gray", linewidth=1)
            ax.plot(seeds, [y, y], color="tab:blue", linewidth=2.5)
            ax.plot(mean, y, "o", color=colour, markersize=5)
        ax.axvline(0, color="black", linewidth=0.8)
        room = 0.05 * (np.nanmax(ends) - np.nanmin(ends)) + 0.1
        ax.set(title=name, ylim=(len(arms) - 0.5, -0.5), yticks=range(len(arms)), yticklabels=arms,
               xlim=(np.nanmin(ends) - room, np.nanmax(ends) + room))
    for ax in axes.flat[len(names):]:
        ax.set_visible(False)
    figure.supxlabel(f"points of accuracy more than {BASELINE}; blue: 95 % over seeds (red point: "
                     "without 0), gray: 95 % over images", fontsize=9)
    figure.savefig(path)


def main():
    args, rest = get_args()
    folders = {(a, seed): args.out_dir / f"{a}_s{seed}" for seed in args.seeds for a in args.arms}
    for (arm, seed), folder in folders.items():
        if args.train and not finished(folder, arm, seed):
            train(folder, arm, seed, rest)
            check_recipe({run: path for run, path in folders.items() if finished(path, *run)})
    folders = {run: folder for run, folder in folders.items() if finished(folder, *run)}
    check_recipe(folders)
    if not folders:
        raise ValueError(f"--out_dir {args.out_dir} holds no finished run of these arms and seeds")
    evaluate(folders, args)

    rows = read_rows(args.out_dir / "eval/results.jsonl").values()
    found = outcomes(rows, folders, args.limit)
    compared = compare(found, args.arms)
    text = tables(found, compared, args.arms)
    (args.out_dir / "differences.md").write_text(text + "\n")
    if compared:
        draw(compared, args.arms, args.out_dir / "differences.png")
    print(f"\n{text}\n\n{args.out_dir}: differences.md is this, differences.png draws it")


if __name__ == "__main__":
    common.run(main)
