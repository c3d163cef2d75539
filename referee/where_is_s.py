"""Where is S? Does the sparse part of RPC-Attention hold the patches that were corrupted?

    python -m referee.where_is_s --ckpt out/shapes_rpc out/shapes_symmetric
    python -m referee.where_is_s --ckpt out/kpca/softmax_s50/step_*.pt         # over training
    python -m referee.where_is_s --rows referee/results/where_is_s/rows.jsonl

If robust PCA does inside attention what it is named for, K = L + S, and S is where a token was
corrupted. Some patches of each test image are corrupted; a patch token's score is the sum of |S|
over heads and channels of the first layer, after each PAP step. AUC: the chance that a corrupted
patch scores above an uncorrupted one of its image, mean over images; 0.5 says nothing. A score must
beat what needs no S: |k| of the token, its distance from the image's mean key, S before training,
and the S that PAP makes of a symmetric network's keys.

Also, on clean images, |K - S - L| / |K|: ADMM would end at 0. "rank one" is the share of L that all
tokens have alike, |mean over tokens| / rms of the rows; the more uniform attention is, the nearer
it is to 1. Such an L leaves at least the "floor", |K - S - mean of K - S over tokens| / |K|,
whatever the values are. A residual that is small because S holds all of K explains nothing: so
|S| / |K| stands beside it.

Also, what layer 1 receives: the cosine of a token in the corrupted and in the clean image, at
uncorrupted patches, with the shrinkage on and off (lambda = inf); its null is the cosine with
another clean image. Accuracy: of the same corrupted images. Rows: --out_dir/rows.jsonl; a network
that has one is not looked at again.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

import common
from attention import every_pap, rpc_attention
from robust import metrics
from robust.patches import KINDS, corrupt_patches
from robust.results import weights_of
from robust.sources import kind_of
from referee import probe
from referee.stats import spread


KEY = ("run", "step", "weights", "images")                  # what a row is of


def get_args(argv):
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--ckpt", nargs="+", default=[], help="runs or checkpoints of train_cls.py, "
                   "all of the same images")
    p.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS),
                   help="of corruption, see robust/patches.py; adversarial takes the longest")
    p.add_argument("--images", type=common.number(int, 1), default=300, help="test images")
    p.add_argument("--untrained", action=argparse.BooleanOptionalAction, default=True,
                   help="also look at each run before its first step")
    p.add_argument("--out_dir", type=Path, default=Path("out/where_is_s"))
    p.add_argument("--rows", type=Path, help="table and figure of the rows in this file")
    return p.parse_args(argv)


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


def second_input(model, images, labels):
    """What layer 1 receives, patch tokens (B, N - 1, C), and which images are right (B,)."""
    features = model.features(images)
    return features["blocks.0"][:, 1:], features["head"].argmax(1) == labels


def residuals(k, steps):
    """Of each step, (B,) each: |K - S - L| / |K|; how alike L's tokens are; the floor; sizes."""
    def norm(x):
        return x.flatten(1).norm(dim=1)

    def mean(x):
        return x.mean(2, keepdim=True).expand_as(k)

    found = {}
    for i, step in enumerate(steps, 1):
        R, L = k - step["S"], step["L"]
        found[f"clean: residual, step {i}"] = norm(R - L) / norm(k)
        found[f"clean: rank one, step {i}"] = norm(mean(L)) / norm(L)
        found[f"clean: floor, step {i}"] = norm(R - mean(R)) / norm(k)
        found[f"clean: |S| / |K|, step {i}"] = norm(step["S"]) / norm(k)
        found[f"clean: |L| / |K|, step {i}"] = norm(L) / norm(k)
    return found


@torch.no_grad()
def examine(model, images, labels, kinds):
    """{measure in words: its value for each image (B,)}."""
    c, forms = model.config, {"": {}}
    if c.layer_attn(0) in ("rpc", "rpc_asym"):
        forms[", shrinkage off"] = dict(lambd=math.inf)
    found, clean = residuals(*first_layer(model, images)), {}
    for form, settings in forms.items():
        with every_pap(**settings):
            clean[form], right = second_input(model, images, labels)
        other = F.cosine_similarity(clean[form], clean[form].roll(1, 0), dim=-1).mean(1)
        found |= {f"clean: accuracy{form}": right, f"clean: cosine, other image{form}": other}

    for kind in kinds:
        x, hit = corrupt_patches(images, kind, c.patch_size, model=model, labels=labels)
        k, steps = first_layer(model, x)
        scores = {f"S, step {i}": location(step["S"]) for i, step in enumerate(steps, 1)}
        scores |= null_scores(k)
        found |= {f"{kind}: AUC of {name}": auc(score, hit) for name, score in scores.items()}
        for form, settings in forms.items():
            with every_pap(**settings):
                h, right = second_input(model, x, labels)
            cosine = F.cosine_similarity(h, clean[form], dim=-1) * ~hit
            found[f"{kind}: cosine{form}"] = cosine.sum(1) / (~hit).sum(1)
            found[f"{kind}: accuracy{form}"] = right
    return found


# --- checkpoints, table, figure -------------------------------------------------------------------

def points(args):
    """(run, model, checkpoint) of each of --ckpt, and of each run before its first step."""
    fresh = set()
    for path in args.ckpt:
        model, checkpoint = probe.load_model(path)
        run = str(Path(path) if Path(path).is_dir() else Path(path).parent)
        if args.untrained and run not in fresh:
            fresh.add(run)
            yield run, *probe.untrained(model, checkpoint, path)
        yield run, model, checkpoint


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


def draw(groups, kinds, path):
    """Over training: AUC above and cosine below for each corruption; the residual on the left."""
    from referee.plot import WIDTH, legend, plt, save
    networks = list(dict.fromkeys(network for network, _ in groups))
    figure, axes = plt.subplots(2, len(kinds) + 1, figsize=(1.7 * WIDTH, 6), sharex=True)

    def curve(ax, network, name, style, label=None):
        steps = sorted(step for n, step in groups if n == network and name in groups[n, step])
        ax.plot(steps, [np.mean(groups[network, step][name]) for step in steps], style, marker=".",
                color=f"C{networks.index(network)}", label=label)

    for network in networks:
        names = {name for at, group in groups.items() if at[0] == network for name in group}
        last = max(int(name.split()[-1]) for name in names if "residual" in name)
        curve(axes[0][0], network, f"clean: residual, step {last}", "-")
        curve(axes[1][0], network, f"clean: rank one, step {last}", "-")
        for (top, bottom), kind in zip(axes.T[1:], kinds):
            curve(top, network, f"{kind}: AUC of S, step {last}", "-", f"{network}, step {last}")
            curve(top, network, f"{kind}: AUC of distance", ":")
            curve(bottom, network, f"{kind}: cosine", "-")
            curve(bottom, network, f"{kind}: cosine, shrinkage off", "--")
            top.set(title=f"{kind}: AUC of S\n(dotted: of distance)", ylim=(0, 1))
            bottom.set(title="layer 1's input, cosine\n(dashed: shrinkage off)")
            top.axhline(0.5, color="black", linewidth=0.7)
    axes[0][0].set(title="|K - S - L| / |K|", ylim=(0, None))
    axes[1][0].set(title="share of L that all\ntokens have alike", ylim=(0, 1.05))
    for ax in axes[1]:
        ax.set_xlabel("training step")
    legend(figure, axes[0][1], "lower center", ncols=4)
    save(figure, path)


def main(argv=None):
    args = get_args(argv)
    path, rows = args.out_dir / "rows.jsonl", {}
    stored = {tuple(row.get(name) for name in KEY): row for row in common.read_log(path)
              if row["kinds"] == args.kinds}
    for run, model, checkpoint in tqdm(points(args), "checkpoints", unit="checkpoint"):
        seed = checkpoint["args"]["seed"]
        row = dict(run=run, step=checkpoint["step"], weights=weights_of(model.state_dict()),
                   images=args.images, kinds=args.kinds, network=kind_of(model.config), seed=seed)
        key = tuple(row[name] for name in KEY)
        if key not in stored:
            images, labels, _ = probe.load_images(checkpoint, model.config, args.images)
            found = examine(model, images, labels, args.kinds)
            values = {name: round(x.double().mean().item(), 5) for name, x in found.items()}
            stored[key] = row | dict(values=values)
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "a") as file:
                file.write(json.dumps(stored[key]) + "\n")
        rows[key] = stored[key]                                 # once, if it was given twice

    shown = common.read_log(args.rows) if args.rows else rows.values()
    groups, args.kinds = over_seeds(shown), max((row["kinds"] for row in shown), key=len)
    args.out_dir.mkdir(parents=True, exist_ok=True)
    print(table(groups))
    draw(groups, args.kinds, args.out_dir / "where_is_s.png")
    print(f"\n{args.out_dir}: rows.jsonl, where_is_s.png")


if __name__ == "__main__":
    common.run(main)
