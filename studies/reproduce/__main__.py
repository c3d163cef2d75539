r"""Reproduce a table or figure of the paper: train, evaluate, and print its numbers next to ours.

    python -m studies.reproduce table1                      # small: the embedded scenes
    python -m studies.reproduce table1 --data_dir data/cifar10 --seeds 0 1 2
    python -m studies.reproduce table1 --scale paper --data_dir data/imagenet --gpus 4
    python -m studies.reproduce table1 --scale paper --data_dir data/imagenet --dry  # commands only

The command trains missing networks, evaluates all networks on the same images, and prints a table:
the paper's number, our number, and the difference of each from the first row. Numbers of two scales
cannot be compared; the signs of differences can. Interrupted runs continue. Hours per table, and
which tables were run: studies/reproduce/README.md.
"""

import argparse
import csv
import shlex
from collections import defaultdict
from pathlib import Path
from statistics import mean

import common
from studies.arms import call, evaluate_once, into
from studies.stats import spread
from robust.corruptions import NAMES
from robust.metrics import ALEXNET, mean_corruption_error

FOLDER = Path(__file__).parent
# {row of the paper: name of our run folder without _s<seed>}
VITS = {"SymViT": "symmetric", "RPC 4iter/layer1": "rpc4", "RPC 5iter/layer1": "rpc5",
        "RPC 6iter/layer1": "rpc6", "RPC 2iter/all-layer": "rpc2all"}
SMALL = {"SymViT-small": "small_symmetric", "RPC 4iter/layer1": "small_rpc4",
         "symmetric, as many more epochs": "small_control"}     # our own control
FANS = {"FAN-tiny": "fan_symmetric", "RPC-FAN-tiny 4iter/layer1": "fan_rpc4"}
SCALED = {"softmax": "softmax", "scaled_alpha": "scaled_alpha", "scaled_s": "scaled_s"}
SEVEN = "pgd fgsm spsa sld cw noise autoattack".split()
# {table: (networks, measures)}; measures: benchmarks, attacks by name, or experiments of a study
PAPER_TABLES = {
    "table1": (VITS, "benchmarks"), "table2": (VITS, SEVEN), "table4": (VITS, "benchmarks"),
    "table3": ({"Symlm": "lm_symmetric", "RPC-Symlm (4iter/layer1-4)": "lm_rpc4"}, "perplexity"),
    "table5": ({"SymViT": "symmetric", "RPC 6iter/layer1": "rpc6"}, ["square"]),
    "table6": ({row: f"seg_{arm}" for row, arm in VITS.items()}, "benchmarks"),
    "table7": (SMALL, "benchmarks"), "table8": (SMALL, ["pgd", "fgsm"]),
    "table9": (FANS, "benchmarks"), "table10": (FANS, ["pgd", "fgsm"]), "table11": ({}, "cost"),
    "table12": ({"ViT": "softmax", "RPC-AsymViT 4iter/layer1": "asym4",
                 "RPC-AsymViT Sym/Asym": "symasym"}, "benchmarks"),
    "fig1": ({"ViT-tiny": "softmax"}, "jproj"), "fig2": ({"ViT-tiny": "softmax"}, "gamma,eigstats"),
    "fig3": ({"SymViT": "symmetric", "RPC 6iter/layer1": "rpc6"}, ["pgd", "fgsm"]),
    "appE1": (SCALED, None)}                                # scaled_s: not in the paper
OWN_TABLES = ("table11", "fig1", "fig2", "fig3")            # their commands print tables themselves
# {column of the paper: (our measure, our number)}
PLAIN = {"top-1": ("clean", "top1"), "top-5": ("clean", "top5"), "IN-R": ("imagenet_r", "top1"),
         "IN-A": ("imagenet_a", "top1"), "IN-O AUPR": ("imagenet_o", "aupr"),
         "mean accuracy": ("clean", "mean_accuracy"), "mean IoU": ("clean", "mean_iou"),
         "corrupted mean accuracy": ("corruptions", "mean_accuracy"),
         "corrupted mean IoU": ("corruptions", "mean_iou")}


# --- commands -------------------------------------------------------------------------------------

TINY = "--num_images 64 --epochs 1 --max_steps 1"           # one step on embedded data
IMAGENET_FLAGS = "--data imagenet"
FAN_RECIPE = ("--model fan_tiny --batch_size 512 --lr 2e-3 --drop_path 0 "
              "--repeats 1")                                  # docs/data.md
# Flags of training: cls, small (ViT-small), tuned (its fine-tuning), fan, seg, lm. Flags of
# evaluation: few (benchmarks), attacked, tokens (perplexity), cost.
SCALES = {
    "tiny": dict(cls=TINY, small=f"{TINY} --model nano", tuned=f"{TINY} --model nano",
                 seg=f"{TINY} --backbone none", fan=f"{TINY} --batch_size 4 --model fan_tiny",
                 lm="--steps 1 --context 16 --words 0 --warmup 0", few="--limit 1 --severities 3",
                 attacked="--limit 1 --steps 1", tokens="--limit 40",
                 cost="--rounds 1 --batch_size 1"),
    "small": dict(cls="--model nano", small="--model micro --epochs 6",        # 6 to 8 CPU minutes
                  tuned="--model micro --epochs 2", seg="--backbone none", lm="",
                  fan="--model fan_tiny --num_images 2000 --epochs 2", few="--limit 200",
                  attacked="--limit 50", tokens="", cost=""),
    "paper": dict(cls=IMAGENET_FLAGS, small=f"{IMAGENET_FLAGS} --model small",
                  fan=f"{IMAGENET_FLAGS} {FAN_RECIPE}",
                  tuned=f"{IMAGENET_FLAGS} --model small --epochs 100 --warmup 5/100 --lr 1e-4",
                  seg="--data ade20k", lm="--data wikitext103", few="", attacked="--limit 50000",
                  tokens="--stride 1", cost="--batch_size 256")}
CIFAR = "--data cifar10"
OWN = SCALES["small"] | dict(           # small with --data_dir: CIFAR-10, CamVid, small WikiText
    cls=f"{CIFAR} --model nano --epochs 5", small=f"{CIFAR} --model micro --epochs 3",
    tuned=f"{CIFAR} --model micro --epochs 1", lm="--data wikitext",
    seg="--data camvid --epochs 60",
    fan=f"{CIFAR} --model fan_tiny --epochs 1 --max_steps 100")
ATTENTION = {"rpc2all": "--attn rpc --n_iter 2 --lambd 3 --rpc_layers all",
             "asym4": "--attn rpc_asym --n_iter 4", "symasym": "--attn sym_asym --n_iter 4",
             "control": "--attn symmetric",
             **{f"rpc{n}": f"--attn rpc --n_iter {n}" for n in (4, 5, 6)}}
SLOW = "cw", "spsa", "autoattack"                            # run at scale paper only
ATTACKS = "-m", "studies.reproduce.attacks"                 # in the paper's conditions


class Plan:
    """The commands of a table, in order: pairs (list of words, folder).

    The folder is None, or the folder of an evaluation, which is run if it does not exist.
    """

    def __init__(self, args):
        self.args, self.commands = args, []
        self.flags = OWN if args.scale == "small" and args.data_dir else SCALES[args.scale]
        where = args.scale + (f"_{Path(args.data_dir).name}" if self.flags is OWN else "")
        self.out = args.out_dir or Path("out/reproduce", where)

    def add(self, *words, done=None):
        """Append a command. At scale paper, torchrun starts one process per GPU."""
        alone = words[0] == "-m" and words[:2] != ATTACKS
        if self.args.scale == "paper" and not alone:
            words = ["-m", "torch.distributed.run", "--standalone",
                     f"--nproc_per_node={self.args.gpus}", *words]
        self.commands.append((words, done))

    def train(self, arm, seed):
        """Append the training of an arm and seed. A finished run does no further steps."""
        a, f, paper, script = self.args, self.flags, self.args.scale == "paper", "train_cls.py"
        named = arm.startswith(("small_", "fan_", "seg_", "lm_"))
        part, kind = arm.split("_", 1) if named else ("cls", arm)
        more = [*ATTENTION.get(kind, f"--attn {kind}").split(), "--seed", seed]
        if part == "lm":
            script = "train_lm.py"
            more += ["--rpc_layers", "0-3" if paper else "0"] * (kind == "rpc4")
        elif part == "seg":
            script = "train_seg.py"
            if paper:                                   # the backbone decides the attention
                more = ["--seed", seed, "--backbone", self.out / f"{kind}_s{seed}"]
        elif part == "small" and kind != "symmetric":                   # fine-tune
            part = "tuned"
            more += ["--init_from", self.out / f"small_symmetric_s{seed}/last.pt"]
        data = ["--data_dir", a.data_dir] if a.data_dir and a.scale != "tiny" else []
        self.add(script, *into(self.out / f"{arm}_s{seed}", *f[part].split(), *more, *data))

    def evaluate(self, arms, words, measures=(), command=("eval_robust.py",)):
        """Append the evaluations of all arms on the same images.

        Each network and measure has its own command and folder, so tables share them. words: flags.
        measures: for --measures of a classifier.
        """
        for run in [self.out / f"{arm}_s{seed}" for arm in arms for seed in self.args.seeds]:
            folder = self.out / "eval" / run.name
            task = run.name.split("_")[0]
            if task in ("seg", "lm"):
                self.add(f"train_{task}.py", "--eval_only", run, *words, done=folder / "test")
            for name in measures:
                done = folder / (f"paper_{name}" if command == ATTACKS else name)
                self.add(*command, "--ckpt", run, *words, "--measures", name, done=done)

    def make(self, table):
        """Append and return all commands of a table."""
        a, f = self.args, self.flags
        arms, measures = list(PAPER_TABLES[table][0].values()), PAPER_TABLES[table][1]
        for seed in a.seeds:
            for arm in arms:
                self.train(arm, seed)
        if measures == "benchmarks":
            words, names = f["few"].split(), ["clean", "corruptions"]
            if arms[0].startswith("seg_"):
                self.evaluate(arms, words)
                return self.commands
            words += ["--corrupted_dir", a.imagenet_c] if a.imagenet_c else []
            for name in ("imagenet_a", "imagenet_r", "imagenet_o"):
                if getattr(a, name):
                    names.append(name)
                    words += [f"--{name}", getattr(a, name)]
            self.evaluate(arms, words, names)
        elif isinstance(measures, list):
            names = [name for name in measures if a.scale == "paper" or name not in SLOW]
            self.evaluate(arms, f["attacked"].split(), names, ATTACKS)
        elif measures == "perplexity":
            self.evaluate(arms, f["tokens"].split())
        elif measures == "cost":
            self.add("-m", "studies.cost", *f["cost"].split())
        elif measures:
            self.add("-m", "studies.kernel_pca", "--exp", measures, "--out_dir", self.out / "kpca",
                     "--ckpt", *(self.out / f"softmax_s{seed}" for seed in a.seeds))
        return self.commands


# --- rows -----------------------------------------------------------------------------------------

def read_runs(folder):
    """Read all rows below a folder as {(arm, seed): [row]}."""
    rows = defaultdict(list)
    for path in sorted(Path(folder).rglob("*.jsonl")):
        for row in common.read_log(path):
            name = Path(row.get("network") or path.parent).name
            arm, _, seed = name.rpartition("_s")
            rows[arm, seed].append(row)
    return rows


def ours(rows, table, column):
    """Return one run's number for a column of the paper's table, None if it was not run."""
    def of(measure):
        return [r for r in rows if r.get("name") == measure]

    if table == "appE1":
        last = [r["eval"] for r in rows if "eval" in r][-1:]
        return last[0][{"top-1": "top1", "loss": "loss"}[column]] if last else None
    if table == "table3":
        kind, split = ["sliding", *column.split()][-2:]
        return next((r[kind] for r in rows if kind in r and r["measure"] == split), None)

    corrupted = {r["name"]: r for r in rows if r.get("name") in NAMES}
    measure, field = PLAIN.get(column, ("", ""))
    if measure == "corruptions" or column in ("IN-C", "mCE"):
        return of_all_corruptions(corrupted, column, field or "top1")
    if measure:
        return next((r[field] for r in of(measure)), None)

    # A corruption ("Fog top-1", "Fog CE") or an attack ("PGD top-5") at its largest budget.
    name, _, field = column.rpartition(" ")
    kind = name.lower().replace(" ", "_")
    kind = {"elastic": "elastic_transform", "jpeg": "jpeg_compression"}.get(kind, kind)
    if kind in corrupted:
        top1 = corrupted[kind]["top1"]
        if field == "top-1":
            return top1
        return (100 - top1) / ALEXNET[kind] if as_alexnet(corrupted[kind]) else None
    attacked = sorted(of(kind), key=lambda r: common.fraction(r["eps"] or "0"))
    return attacked[-1][field.replace("-", "")] if attacked else None


def as_alexnet(row):
    """Whether a row can be divided by AlexNet's errors: ImageNet at 224 px, all five severities."""
    return (row["data"], row["size"], row["severities"]) == ("imagenet", 224, 5)


def of_all_corruptions(corrupted, column, field):
    """The mean over the 15 corruptions, or the mCE; None if one of them is missing."""
    if not set(NAMES) <= set(corrupted):
        return None
    if column != "mCE":
        return mean(corrupted[name][field] for name in NAMES)
    errors = {name: 1 - corrupted[name]["top1"] / 100 for name in NAMES}
    return mean_corruption_error(errors) if all(map(as_alexnet, corrupted.values())) else None


# --- the table ------------------------------------------------------------------------------------

def lines(table, rows):
    """The cells of a table: dicts of row, column, paper, ours {seed: number}, note."""
    with open(FOLDER / "paper.csv", newline="") as file:
        name = "E.1" if table == "appE1" else table.removeprefix("table")
        cells = [r for r in csv.DictReader(file) if r["table"] == name]
    columns = dict.fromkeys(cell["column"] for cell in cells)
    names = PAPER_TABLES[table][0]
    extra = [row for row in names if row not in {cell["row"] for cell in cells}]
    cells += [dict(row=row, column=column, value="nan", note="not in the paper")
              for row in extra for column in columns]
    for cell in cells:
        found = {seed: ours(rows[arm, seed], table, cell["column"])
                 for arm, seed in sorted(rows) if arm == names[cell["row"]]}
        cell.update(paper=float(cell["value"]),
                    ours={seed: x for seed, x in found.items() if x is not None})
    return cells


def markdown(cells, scale):
    """Format cells as Markdown: the paper, ours, and the differences from the first row."""
    base = {c["column"]: c for c in reversed(cells)}           # the first row of each column
    head = ["row", "column", "paper", f"ours, {scale}", "n", "paper - first row",
            "ours - first row", "note"]
    body = []
    for c in cells:
        first = base[c["column"]]
        texts = ["", ""]
        if c is not first:
            texts[0] = f"{c['paper'] - first['paper']:+.2f}".replace("+nan", "")
            pairs = c["ours"].keys() & first["ours"].keys()
            gains = [c["ours"][s] - first["ours"][s] for s in pairs]
            texts[1] = spread(gains, "+.2f") or "not run"
        own = spread([*c["ours"].values()], ".2f") or "not run"
        numbers = [f"{c['paper']:g}".replace("nan", ""), own, str(len(c["ours"]))]
        body.append([c["row"], c["column"], *numbers, *texts, c["note"]])
    return common.table(body, head)


def report(table, rows, scale):
    """Format a table from a folder of runs as Markdown."""
    cells = lines(table, read_runs(rows))
    text = [f"# {table}, paper and ours at scale {scale}", markdown(cells, scale),
            f"{sum(bool(cell['ours']) for cell in cells)} of {len(cells)} cells were run."]
    if scale != "paper":
        text += ["Our data set and networks are smaller, so no number reproduces one of the paper. "
                 "Only the signs of differences can be compared."]
    return "\n\n".join(text)


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    flag = p.add_argument
    flag("table", choices=PAPER_TABLES, help="table or figure of the paper")
    flag("--scale", choices=SCALES, default="small",
         help="one step, minutes on a CPU, or the paper's experiment (default: small)")
    flag("--data_dir", metavar="FOLDER",
         help="small: CIFAR-10, CamVid or the small WikiText; paper: the paper's data")
    flag("--seeds", nargs="+", type=int, default=[0], help="seeds to run (default: 0)")
    flag("--out_dir", type=Path, help="folder for runs and tables (default: out/reproduce/<scale>, "
         "or out/reproduce/small_<folder> if --data_dir is given)")
    flag("--dry", action="store_true", help="print the commands, run nothing")
    flag("--gpus", type=int, default=4, help="GPUs at scale paper (default: 4)")
    for name in ("c", "a", "r", "o"):
        flag(f"--imagenet_{name}", metavar="FOLDER",
             help=f"also evaluate on this copy of ImageNet-{name.upper()}")
    args = p.parse_args(argv)
    plan = Plan(args)
    for words, done in plan.make(args.table):
        if args.dry:
            words = [*words, "--out_dir", done] if done else words
            print("$ python", *(shlex.quote(str(word)) for word in words))
        elif done:
            evaluate_once(done, *words)
        else:
            call(*words)
    if not args.dry and args.table not in OWN_TABLES:
        text = report(args.table, plan.out, args.scale)
        print(text)
        path = plan.out / f"tables/{args.table}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


if __name__ == "__main__":
    common.run(main)
