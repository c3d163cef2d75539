"""How many hours would these commands take on a node of 4 or 8 GPUs? From multiply-adds.

    SCALE=paper DATA=data/imagenet DRY=1 sh reproduce/table1.sh       # the commands come by stdin

Work is counted: images or tokens x passes x multiply-adds, a backward pass as two forward ones. The
rates are assumed, those of an A100 or H100 with 16 CPU cores each, and not measured: no GPU was at
hand. The slower of arithmetic and reading counts. Attacks are in float32, counted as if every image
stood to the end, so theirs are upper bounds.
"""

import shlex
import sys

import common
from robust.measures import plan
from studies.cost import formula
from vit import SIZES, ViTConfig

BF16, FLOAT32 = 60e12, 15e12            # operations a second and GPU, sustained
READ, READ_512 = 2500, 300              # images a second and GPU: decoded and cut to 224 or 512 px
TOKENS = 5e5                            # a second and GPU, forward and backward, 16 narrow layers
TRAIN, VAL = 1_281_167, 50_000          # images of ImageNet
MODELS = dict(small="small", fan="fan_tiny")    # of folders <kind>_... that another script trains
FOLDERS = dict(imagenet_a=7_500, imagenet_r=30_000, imagenet_o=52_000)      # O: val, too
# forward and backward passes per image
PASSES = dict(noise=(3, 0), fgsm=(2, 1), pgd=(21, 20), sld=(21, 20), spsa=(10_240, 0),
              cw=(5000, 5000), square=(5001, 0), autoattack=(7812, 1910))


def flags(words):
    """["--attn", "rpc", "--measures", "pgd steps=2", "cw"] -> {"attn": "rpc", ...}, last value."""
    found, name = {}, None
    for word in words:
        if word.startswith("--"):
            name = word[2:]
            found[name] = []
        elif name:
            found[name].append(word)
    return found


def one(found, name, default):
    """The value of a flag that has one."""
    return found.get(name, [default])[0]


def forward(found, image_size=224):
    """Multiply-adds of one image in the model that a training command describes."""
    model, attn = one(found, "model", "tiny"), one(found, "attn", "rpc")
    if model.startswith("fan"):
        return 1.49e9                                           # as published
    depth = SIZES[model]["depth"]
    layers = common.parse_layers(one(found, "rpc_layers", "0"), depth)
    return formula(ViTConfig(**SIZES[model], image_size=image_size, attn=attn, rpc_layers=layers,
                             n_iter=int(one(found, "n_iter", 4))))


def train_hours(script, found, gpus):
    """Of a training run."""
    if script == "train_lm.py":
        return 500_000 * 96 * 256 / (TOKENS * gpus) / 3600
    if script == "train_seg.py":
        decoder = 2 * (11 * 192 ** 2 * 1175 + 2 * 1175 ** 2 * 192)          # 2 layers, 150 classes
        work = 6 * (forward(found, 512) + decoder)
        return 64 * 20_210 * max(work / (BF16 / 3), 1 / READ_512) / gpus / 3600  # batches of 8
    images = TRAIN * int(one(found, "epochs", 300))
    return images * max(6 * forward(found) / BF16, 1 / READ) / gpus / 3600


def evaluation_hours(found, models, gpus):
    """Of an evaluation; models: {folder: multiply-adds}, of what was trained before."""
    kind = found["ckpt"][0].rsplit("/", 1)[-1].split("_")[0]
    if kind == "lm":                        # clean, segment-wise, attacked; a window scores a token
        return len(found["ckpt"]) * 3 * 500_000 * 256 / (3 * TOKENS * gpus) / 3600
    size, read = (2_000, READ_512) if kind == "seg" else (VAL, READ)
    task = "segmentation" if kind == "seg" else "classification"
    seconds = 0
    elsewhere = forward({"model": [MODELS.get(kind, "tiny")]})
    for folder in found["ckpt"]:
        macs = models.get(folder, elsewhere)
        for name, _, _ in plan(found["measures"], task, one(found, "preset", "default")):
            images, passes, rate = FOLDERS.get(name, size), (1, 0), BF16
            if name == "corruptions":                                       # five severities
                passes = (5, 0)
            if name in PASSES:
                passes, rate = PASSES[name], FLOAT32
            reads = passes[0] if name == "corruptions" else 1
            work = 2 * macs * (passes[0] + 2 * passes[1])
            seconds += images * max(work / rate, reads / read) / gpus
    return seconds / 3600


def main():
    models, total, rows = {}, {4: 0.0, 8: 0.0}, []
    for line in sys.stdin:
        words = shlex.split(line)
        script = next((word for word in words if word.endswith(".py")), None)
        if script is None:                              # a study: minutes
            continue
        found = flags(words[words.index(script) + 1:])
        what = one(found, "out_dir", "")
        if script != "eval_robust.py":
            models[what] = forward(found, 512 if script == "train_seg.py" else 224)
        hours = {}
        for gpus in total:
            hours[gpus] = (evaluation_hours(found, models, gpus) if script == "eval_robust.py"
                           else train_hours(script, found, gpus))
            total[gpus] += hours[gpus]
        rows.append([script, what, f"{hours[4]:.1f}", f"{hours[8]:.1f}"])
    rows.append(["all", "", f"{total[4]:.1f}", f"{total[8]:.1f}"])
    print(common.table(rows, ["script", "run", "hours, 4 GPUs", "hours, 8 GPUs"]))


if __name__ == "__main__":
    common.run(main)
