"""Measure whether S, the sparse part of RPC-Attention, contains the corrupted patches.

    python -m studies.where_is_s --ckpt weights/shapes_rpc.pt weights/shapes_symmetric.pt
    python -m studies.where_is_s --ckpt out/kpca/softmax_s50/step_*.pt         # over training
    python -m studies.where_is_s --rows studies/results/where_is_s/rows.jsonl  # the stored rows

If robust PCA works inside attention, then K = L + S, and S is large at corrupted tokens. Some
patches of each test image are corrupted. The score of a patch token is the sum of |S| over heads
and channels of layer 0, after each PAP step. AUC is the probability that a corrupted patch has a
higher score than another patch of its image, averaged over images; chance is 0.5. S is compared
with three scores that need no trained S: |k| of the token, its distance from the mean key of the
image, and the S that PAP computes from the keys of a symmetric network. Accuracy is measured on the
same corrupted images.

On clean images the study also measures the residual |K - S - L| / |K|, which is 0 at the end of
ADMM. It also measures |S| / |K|, because a small residual means nothing if S contains all of K.
The rank correlation of the scores S and |k| over the patches of an image shows whether S follows
the length of the key.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

import common
from attention import layer_inputs, rpc_attention
from results import kind_of
from studies import probe
from studies.stats import scipy_stats, spread
from robust.patches import corrupt_patches

ROWS = Path(__file__).parent / "results/where_is_s/rows.jsonl"
KINDS = ("noise", "black", "white", "gaussian", "pixels", "adversarial")


# --- scores of tokens -----------------------------------------------------------------------------

def location(S):
    """Score each patch token by the sum of |S| over heads and channels.

    S: (B, H, N, D). Returns (B, N - 1).
    """
    return S.abs().sum((1, 3))[:, 1:]


def key_scores(k):
    """Score each patch token without S, by the size of its key and its distance from the mean key.

    k: (B, H, N, D). Returns {score: (B, N - 1)}.
    """
    keys = k.transpose(1, 2).flatten(2)[:, 1:]                              # (B, P, C)
    return {"|k|": keys.norm(dim=2), "distance": (keys - keys.mean(1, keepdim=True)).norm(dim=2)}


def auroc(score, positive):
    """Return the AUC: how often a positive example has the larger score; a tie counts half."""
    pairs = score[positive][:, None] - score[~positive]
    return ((pairs > 0).double() + 0.5 * (pairs == 0)).mean().item()


def auc(score, hit):
    """Compute the AUC of each image, (B,), from score (B, P) and corrupted patches hit (B, P)."""
    areas = [auroc(s, h) for s, h in zip(score, hit)]
    return torch.tensor(areas, dtype=torch.float64)


def rank_correlation(a, b):
    """Compute Spearman's rank correlation over the patches of each image. a, b: (B, P) -> (B,)."""
    ranks = [torch.from_numpy(scipy_stats().rankdata(x, axis=1)) for x in (a, b)]
    a, b = (x - x.mean(1, keepdim=True) for x in ranks)
    return F.cosine_similarity(a, b)


def first_layer(model, images):
    """Return the keys of layer 0 (B, H, N, D) and the steps of PAP: dicts of S, K2, L.

    If layer 0 has no RPC-Attention, PAP runs on the keys of layer 0 with the settings of the
    model_config.
    """
    attn, x = layer_inputs(model, images)[0]
    (_, k, v), steps = attn.project(x), attn.trace(x)
    if not steps:
        rpc_attention(k, v, **attn.pap, trace=steps)
    return k, steps


def residuals(k, steps):
    """Compute |K - S - L| / |K| and |S| / |K| after each step: {measure: (B,)}."""
    def norm(x):
        return x.flatten(1).norm(dim=1)

    found = {}
    for i, step in enumerate(steps, 1):
        found[f"clean: residual, step {i}"] = norm(k - step["S"] - step["L"]) / norm(k)
        found[f"clean: |S| / |K|, step {i}"] = norm(step["S"]) / norm(k)
    return found


@torch.no_grad()
def examine(model, images, labels, kinds):
    """Measure residuals, AUC and accuracy of a model: {measure: (B,)}."""
    clean_k, steps = first_layer(model, images)
    lengths = key_scores(clean_k)["|k|"]
    found = residuals(clean_k, steps)
    for i, step in enumerate(steps, 1):
        name = f"clean: rank correlation of S and |k|, step {i}"
        found[name] = rank_correlation(location(step["S"]), lengths)
    found["clean: accuracy"] = model(images).argmax(1) == labels
    for kind in kinds:
        x, hit = corrupt_patches(images, kind, model.config.patch_size, model=model, labels=labels)
        k, steps = first_layer(model, x)
        scores = {f"S, step {i}": location(step["S"]) for i, step in enumerate(steps, 1)}
        for name, score in (scores | key_scores(k)).items():
            found[f"{kind}: AUC of {name}"] = auc(score, hit)
        found[f"{kind}: |k| / clean |k|"] = ((key_scores(k)["|k|"] * hit).sum(1)
                                             / (lengths * hit).sum(1))
        found[f"{kind}: accuracy"] = model(x).argmax(1) == labels
    return found


# --- rows and their table -------------------------------------------------------------------------

def checkpoint_row(path, args):
    """Measure a checkpoint: a row with its settings and {measure: mean over images}."""
    model, checkpoint = probe.load_model(path)
    images, labels = probe.load_test_images(checkpoint, model.config, args.images)
    values = examine(model, images, labels, args.kinds)
    return dict(run=path, step=checkpoint["step"], images=args.images, kinds=args.kinds,
                network=kind_of(model.config),
                seed=checkpoint["args"]["seed"],
                values={name: round(x.double().mean().item(), 5) for name, x in values.items()})


def over_seeds(rows):
    """Sort the values of rows into {(network, training step): {measure: [one value per seed]}}."""
    groups = {}
    for row in rows:
        group = groups.setdefault((row["network"], row["step"]), {})
        for name, value in row["values"].items():
            group.setdefault(name, {})[row["seed"]] = value     # the last row of a seed counts
    return {at: {name: list(of.values()) for name, of in group.items()}
            for at, group in groups.items()}


def auc_table(groups):
    """Format as Markdown: one row per measure, one column per network (trained and untrained)."""
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
    p.add_argument("--ckpt", nargs="+", default=[],
                   help="run folders or checkpoints of train_cls.py, all with the same data set")
    p.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="corruptions of "
                   "robust/patches.py (default: all); adversarial takes the longest")
    p.add_argument("--images", type=int, default=300,
                   help="number of test images (default: 300)")
    p.add_argument("--rows", type=Path, default=ROWS,
                   help="without --ckpt, print the rows of this file (default: the stored rows)")
    p.add_argument("--out", type=Path, help="append the rows of --ckpt to this file")
    args = p.parse_args(argv)
    if not args.rows.is_file():
        raise common.InputError(f"--rows {args.rows}: no such file; expected rows written by --out")
    rows = [checkpoint_row(path, args) for path in tqdm(args.ckpt, "checkpoints", disable=None)]
    if args.out:
        with open(args.out, "a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
    print(auc_table(over_seeds(rows or common.read_log(args.rows))))


if __name__ == "__main__":
    common.run(main)
