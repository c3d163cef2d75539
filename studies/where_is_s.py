"""Where is S? Does the sparse part of RPC-Attention hold the patches that were corrupted?

    python -m studies.where_is_s --ckpt out/shapes_rpc out/shapes_symmetric
    python -m studies.where_is_s --ckpt out/kpca/softmax_s50/step_*.pt         # over training
    python -m studies.where_is_s --rows studies/results/where_is_s/rows.jsonl  # what is stored

If robust PCA does inside attention what it is named for, K = L + S, and S is where a token was
corrupted. Some patches of each test image are corrupted; a patch token's score is the sum of |S|
over heads and channels of the first layer, after each PAP step. AUC: the chance that a corrupted
patch scores above an uncorrupted one of its image, mean over images; 0.5 says nothing. A score must
beat what needs no S: |k| of the token, its distance from the image's mean key, and the S that PAP
makes of a symmetric network's keys. Accuracy: of the same corrupted images.

Also, on clean images, |K - S - L| / |K|: ADMM would end at 0. A residual that is small because S
holds all of K explains nothing: so |S| / |K| stands beside it.
"""

import argparse
import json
from pathlib import Path

import torch
from tqdm import tqdm

import common
from attention import rpc_attention
from studies import probe
from studies.stats import spread
from robust import metrics
from robust.patches import KINDS, corrupt_patches
from eval_robust import kind_of

ROWS = Path(__file__).parent / "results/where_is_s/rows.jsonl"


# --- scores of tokens -----------------------------------------------------------------------------

def location(S):
    """Score of each patch token, sum |S| over heads and channels: (B, H, N, D) -> (B, N - 1)."""
    return S.abs().sum((1, 3))[:, 1:]


def null_scores(k):
    """Score each patch token, (B, N - 1), without S: by its key's size, and distance from the mean.

    k: (B, H, N, D).
    """
    keys = k.transpose(1, 2).flatten(2)[:, 1:]                              # (B, P, C)
    return {"|k|": keys.norm(dim=2), "distance": (keys - keys.mean(1, keepdim=True)).norm(dim=2)}


def auc(score, hit):
    """AUC of the score (B, P) for the corrupted patches (B, P) bool, image by image: (B,)."""
    areas = [metrics.auroc(s, h) for s, h in zip(score, hit)]
    return torch.tensor(areas, dtype=torch.float64)


def first_layer(model, images):
    """Keys of layer 0 (B, H, N, D) and the steps of PAP on them: dicts of S, K2, L.

    A network without RPC-Attention there gets PAP with its model_config's n_iter, lambd and form.
    """
    block = model.blocks[0]
    x = block.norm1(model.embed(images))
    (_, k, v), steps = block.attn.project(x), block.attn.trace(x)
    if not steps:
        rpc_attention(k, v, **block.attn.pap, trace=steps)
    return k, steps


def residuals(k, steps):
    """Of each step, (B,) each: |K - S - L| / |K|, and |S| / |K|."""
    def norm(x):
        return x.flatten(1).norm(dim=1)

    found = {}
    for i, step in enumerate(steps, 1):
        found[f"clean: residual, step {i}"] = norm(k - step["S"] - step["L"]) / norm(k)
        found[f"clean: |S| / |K|, step {i}"] = norm(step["S"]) / norm(k)
    return found


@torch.no_grad()
def examine(model, images, labels, kinds):
    """{measure in words: its value for each image (B,)}."""
    found = residuals(*first_layer(model, images))
    found["clean: accuracy"] = model(images).argmax(1) == labels
    for kind in kinds:
        x, hit = corrupt_patches(images, kind, model.config.patch_size, model=model, labels=labels)
        k, steps = first_layer(model, x)
        scores = {f"S, step {i}": location(step["S"]) for i, step in enumerate(steps, 1)}
        for name, score in (scores | null_scores(k)).items():
            found[f"{kind}: AUC of {name}"] = auc(score, hit)
        found[f"{kind}: accuracy"] = model(x).argmax(1) == labels
    return found


# --- rows and their table -------------------------------------------------------------------------

def row_of(path, args):
    """The row of a checkpoint: what it is of, and {measure: its mean over images}."""
    model, checkpoint = probe.load_model(path)
    images, labels = probe.load_images(checkpoint, model.config, args.images)
    values = examine(model, images, labels, args.kinds)
    return dict(run=path, step=checkpoint["step"], images=args.images, kinds=args.kinds,
                network=kind_of(model.config), seed=checkpoint["args"]["seed"],
                values={name: round(x.double().mean().item(), 5) for name, x in values.items()})


def over_seeds(rows):
    """Sort values by {(network, training step): {measure: [of each seed]}}."""
    groups = {}
    for row in rows:
        group = groups.setdefault((row["network"], row["step"]), {})
        for name, value in row["values"].items():
            group.setdefault(name, {})[row["seed"]] = value     # of two rounds the later one
    return {at: {name: list(of.values()) for name, of in group.items()}
            for at, group in groups.items()}


def table(groups):
    """Write Markdown: measures down, networks at their last step and before their first across."""
    last = {network: step for network, step in sorted(groups, key=lambda at: at[1])}
    columns = [*last.items(), *((n, 0) for n in last if last[n] and (n, 0) in groups)]
    body = []
    for name in dict.fromkeys(name for at in columns for name in groups[at]):
        values = [groups[at].get(name, []) for at in columns]
        body.append([name, *(f"{spread(x, '.3f')} ({len(x)})" if x else "" for x in values)])
    return common.table(body, ["mean ± standard deviation (seeds)",
                               *(f"{n}{'' if step else ', untrained'}" for n, step in columns)])


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--ckpt", nargs="+", default=[], help="runs or checkpoints of train_cls.py, "
                   "all of the same images")
    p.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS),
                   help="of corruption, see robust/patches.py; adversarial takes the longest")
    p.add_argument("--images", type=common.COUNT, default=300, help="test images")
    p.add_argument("--rows", type=Path, default=ROWS, help="without --ckpt: the rows of this file")
    p.add_argument("--out", type=Path, help="append the rows of --ckpt to this file")
    args = p.parse_args(argv)
    if not args.rows.is_file():
        raise common.InputError(f"--rows {args.rows} is not a file")
    rows = [row_of(path, args) for path in tqdm(args.ckpt, "checkpoints", unit="checkpoint")]
    if args.out:
        with open(args.out, "a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
    print(table(over_seeds(rows or common.read_log(args.rows))))


if __name__ == "__main__":
    common.run(main)
