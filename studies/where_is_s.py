"""Measure whether S, the sparse part of RPC-Attention, contains the corrupted patches.

    python -m studies.where_is_s --ckpt weights/shapes_rpc.pt weights/shapes_symmetric.pt
    python -m studies.where_is_s --ckpt out/kpca/softmax_s50/step_*.pt         # over training
    python -m studies.where_is_s --rows studies/results/where_is_s/rows.jsonl  # the stored rows
    python -m studies.where_is_s --one_line --ckpt weights/shapes_rpc.pt       # only line 4 differs

If robust PCA works inside attention, then K = L + S, and S is large at corrupted tokens. Some
patches of each test image are corrupted. The score of a patch token is the sum of |S| over heads
and channels of layer 0, after each PAP step. AUC is the probability that a corrupted patch has a
higher score than another patch of its image, averaged over images; chance is 0.5. S is compared
with scores of the same keys that need no trained S:

    |k|, distance       the Euclidean length of the key over all heads; its distance from the mean
                        key of the image
    robust PCA          S of real robust PCA, of studies/rpca_layer.py. It differs from PAP in five
                        parts; which_part.py runs every combination of them
    residual of PCA     what the leading directions of the keys leave; "equal rank": as many
                        directions as L of robust PCA has after its first step

If the network has no RPC-Attention, PAP runs on its keys, too. Accuracy is measured on the same
corrupted images.

On clean images the study also measures the residual |K - S - L| / |K|, which is 0 at the end of
ADMM. It also measures |S| / |K|, because a small residual means nothing if S contains all of K.
The rank correlation of a score and |k| over the patches of an image shows whether the score follows
the length of the key.
"""

import argparse
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

import common
from attention import (default_settings, layer_inputs, penalty, rpc_attention, soft_threshold,
                       symmetric_attention)
from studies import probe
from studies.patches import corrupt_patches
from studies.rpca_layer import robust_pca, shrink_singular_values
from studies.stats import holm, paired_t, scipy_stats, show, show_p, spread

ROWS = Path(__file__).parent / "results/where_is_s/rows.jsonl"
KINDS = ("noise", "black", "white", "gaussian", "pixels", "adversarial")
RANKS = (1, 4, 8)                       # of the residual of PCA
PAP, ROBUST, EQUAL = "S, step 4", "robust PCA, step 1", "residual of PCA, equal rank"
PRIMARY_KINDS = ("noise", "adversarial")
SCORES = ("S, step 1", "S, step 2", "S, step 3", PAP, ROBUST, "robust PCA, step 4", EQUAL,
          *(f"residual of PCA, rank {r}" for r in RANKS), "|k|", "distance")


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
    from_mean = keys - keys.mean(1, keepdim=True)
    return {"|k|": keys.norm(dim=2), "distance": from_mean.norm(dim=2)}


def pca_residual(k, rank):
    """Return what the first directions of the keys of each head leave of the centred keys.

    k: (B, H, N, D). rank: a number of directions, or (B, H) numbers. Returns (B, H, N, D).
    """
    centred = k - k.mean(-2, keepdim=True)
    _, _, directions = torch.linalg.svd(centred, full_matrices=False)       # (B, H, D, D), in rows
    number = torch.arange(directions.shape[-2])
    first = number < torch.as_tensor(rank)[..., None]                       # (B, H, D)
    kept = directions * first[..., None]
    return centred - centred @ kept.mT @ kept


def robust_parts(k):
    """Split the keys of each head by real robust PCA and by PCA; K without its low-rank part.

    k: (B, H, N, D). Returns {score: (B, H, N, D)} and the rank of L after the first step, (B, H).
    """
    k = k.double()
    steps = []
    robust_pca(k, n_iter=4, trace=steps)
    parts = {ROBUST: steps[0]["S"], "robust PCA, step 4": steps[3]["S"]}
    rank = torch.linalg.matrix_rank(steps[0]["L"], rtol=1e-9)
    parts[EQUAL] = pca_residual(k, rank)
    for r in RANKS:
        parts[f"residual of PCA, rank {r}"] = pca_residual(k, r)
    return parts, rank


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
    _, k, v = attn.project(x)
    steps = attn.trace(x)
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


def scores_of(k, steps):
    """Return all scores of the patches of images, {score: (B, N - 1)}.

    k: the keys of layer 0, (B, H, N, D). steps: the steps of PAP.
    """
    scores = {f"S, step {i}": location(step["S"]) for i, step in enumerate(steps, 1)}
    scores |= key_scores(k)
    parts, _ = robust_parts(k)
    for name, part in parts.items():
        scores[name] = location(part)
    return scores


def rank_correlations(scores, kind):
    """Compute the rank correlation of every score with |k|: {measure: (B,)}."""
    found = {}
    for score, values in scores.items():
        if score != "|k|":
            name, comma, detail = score.partition(", ")
            measure = f"{kind}: rank correlation of {name} and |k|{comma}{detail}"
            found[measure] = rank_correlation(values, scores["|k|"])
    return found


@torch.no_grad()
def examine(model, images, labels, kinds):
    """Measure residuals, AUC, rank correlations and accuracy of a model: {measure: (B,)}."""
    clean_k, steps = first_layer(model, images)
    scores = scores_of(clean_k, steps)
    lengths = scores["|k|"]
    found = residuals(clean_k, steps)
    found |= rank_correlations(scores, "clean")
    parts, rank = robust_parts(clean_k)
    found["clean: rank of L, robust PCA, step 1"] = rank.double().mean(1)
    all_S = {name: parts[name] for name in (ROBUST, "robust PCA, step 4")}
    all_S |= {f"step {i}": step["S"] for i, step in enumerate(steps, 1)}
    for name, S in all_S.items():
        found[f"clean: nonzero share of S, {name}"] = (S != 0).double().mean((1, 2, 3))
    found["clean: accuracy"] = model(images).argmax(1) == labels

    for kind in kinds:
        x, hit = corrupt_patches(images, kind, model.config.patch_size, model=model, labels=labels)
        scores = scores_of(*first_layer(model, x))
        for name, score in scores.items():
            found[f"{kind}: AUC of {name}"] = auc(score, hit)
        found |= rank_correlations(scores, kind)
        length = (scores["|k|"] * hit).sum(1)
        found[f"{kind}: |k| / clean |k|"] = length / (lengths * hit).sum(1)
        found[f"{kind}: accuracy"] = model(x).argmax(1) == labels
    return found


def attention_of(config):
    """Describe a network's attention in words, for example softmax or rpc 4iter/layer0."""
    text = config.attn
    if config.rpc_layers:
        layers = "layer" + ",".join(map(str, config.rpc_layers))
        if len(config.rpc_layers) == config.depth:
            layers = "all-layer"
        text += f" {config.pap['n_iter']}iter/{layers}"
        usual = default_settings(config.attn)
        for name, value in config.pap.items():
            if name != "n_iter" and value != usual.get(name):
                text += f", {name} {value}"
    return text


# --- two lines 4 in robust PCA's loop -------------------------------------------------------------

def pursuit(k, v, low_rank, n_iter, centred):
    """Run the loop of robust PCA with another line 4; return S.

    low_rank(x, v, mu): line 4, which computes L. Order, threshold, mu and the sign of Z are as
    in robust_pca. centred: subtract the mean key first, as robust_pca does.
    """
    K = k - k.mean(-2, keepdim=True) if centred else k
    mu = penalty(K, mu_dim="head")
    tau = 1 / math.sqrt(max(K.shape[-2:])) / mu
    S = Z = 0.0
    for _ in range(n_iter):
        L = low_rank(K - S + Z, v, mu)
        S = soft_threshold(K - L + Z, tau)
        Z = Z + K - L - S
    return S


def attend_to_values(x, v, mu):
    """Line 4 of PAP."""
    return symmetric_attention(x, v)


def shrink_spectrum(x, v, mu):
    """Line 4 of robust PCA."""
    return shrink_singular_values(x, 1 / mu)


LINES = {"attention": attend_to_values, "shrinkage": shrink_spectrum}


@torch.no_grad()
def one_line_row(path, args):
    """Measure the AUC of S of one loop with two lines 4: a row {measure: mean over images}."""
    model, checkpoint = probe.load_model(path)
    images, labels = probe.load_test_images(checkpoint, model.config, args.images)
    values = {}
    for kind in PRIMARY_KINDS:
        x, hit = corrupt_patches(images, kind, model.config.patch_size, model=model, labels=labels)
        layer, inputs = layer_inputs(model, x)[0]
        _, k, v = layer.project(inputs)
        for name, line in LINES.items():
            for centred in (False, True):
                for n_iter in (1, 4):
                    S = pursuit(k, v, line, n_iter, centred)
                    mean = "centred" if centred else "not centred"
                    measure = f"{kind}: AUC of S, line 4 {name}, {mean}, step {n_iter}"
                    values[measure] = round(auc(location(S), hit).mean().item(), 5)
    hardware = common.origin(torch.device("cpu"))["hardware"]
    return dict(run=path, step=checkpoint["step"], images=args.images, kinds=PRIMARY_KINDS,
                network=attention_of(model.config), seed=checkpoint["args"]["seed"], values=values,
                hardware=hardware)


# --- rows and their table -------------------------------------------------------------------------

def checkpoint_row(path, args):
    """Measure a checkpoint: a row with its settings and {measure: mean over images}."""
    model, checkpoint = probe.load_model(path)
    images, labels = probe.load_test_images(checkpoint, model.config, args.images)
    values = examine(model, images, labels, args.kinds)
    means = {}
    for name, x in values.items():
        means[name] = round(x.double().mean().item(), 5)
    flags = checkpoint["args"]
    return dict(run=path, step=checkpoint["step"], epochs=flags.get("epochs"), images=args.images,
                kinds=args.kinds, network=attention_of(model.config), seed=flags["seed"],
                values=means, hardware=common.origin(torch.device("cpu"))["hardware"])


def group_name(row):
    """Return the network of a row; networks that were not trained for 8 epochs name their epochs.
    """
    epochs = row.get("epochs") or 8                     # the earliest rows have no epochs
    return row["network"] if epochs == 8 else f"{row['network']}, {epochs} epochs"


def over_seeds(rows):
    """Sort the values of rows into {(network, training step): {measure: [one value per seed]}}."""
    groups = {}
    for row in rows:
        group = groups.setdefault((group_name(row), row["step"]), {})
        for name, value in row["values"].items():
            group.setdefault(name, {})[row["seed"]] = value     # the last row of a seed counts
    lists = {}
    for at, group in groups.items():
        lists[at] = {name: list(by_seed.values()) for name, by_seed in group.items()}
    return lists


def last_steps(groups):
    """Return {network: its last training step}."""
    last = {}
    for network, step in groups:
        last[network] = max(step, last.get(network, 0))
    return last


def auc_table(groups):
    """Format as Markdown: one row per measure, one column per network (trained and untrained)."""
    last = last_steps(groups)
    columns = [*last.items()]
    columns += [(network, 0) for network in last if last[network] and (network, 0) in groups]
    names = {}                                              # in order, each once
    for at in columns:
        names |= dict.fromkeys(groups[at])
    body = []
    for name in names:
        cells = []
        for at in columns:
            values = groups[at].get(name)
            cells.append(f"{spread(values, '.3f')} ({len(values)})" if values else "")
        body.append([name, *cells])
    titles = [f"{network}{'' if step else ', untrained'}" for network, step in columns]
    return common.table(body, ["mean ± standard deviation (seeds)", *titles])


def difference(group, kind, first, second):
    """Subtract the AUC of two scores, seed by seed: a Difference over networks."""
    first, second = (group[f"{kind}: AUC of {score}"] for score in (first, second))
    return paired_t([a - b for a, b in zip(first, second)])


def primary(group):
    """Return the primary differences of a group: {kind: (Difference, p after Holm's correction)}.

    The difference is the AUC of robust PCA (1 step) minus the AUC of S (PAP step 4).
    """
    found = {kind: difference(group, kind, ROBUST, PAP) for kind in PRIMARY_KINDS}
    p = holm({kind: d.p for kind, d in found.items()})
    return {kind: (d, p[kind]) for kind, d in found.items()}


def robust_groups(groups):
    """Choose trained networks with both primary measures: {network: {measure: values}}.

    Rows of earlier versions have no robust PCA.
    """
    found = {}
    for network, step in last_steps(groups).items():
        names = [f"{kind}: AUC of {ROBUST}" for kind in PRIMARY_KINDS]
        if all(name in groups[network, step] for name in names):
            found[network] = groups[network, step]
    return found


def primary_table(groups):
    """Format robust PCA (1 step) minus other scores as Markdown. groups: of `robust_groups`."""
    body = []
    for network, group in groups.items():
        for kind in [kind for kind in KINDS if f"{kind}: AUC of {ROBUST}" in group]:
            gaps = [show(difference(group, kind, ROBUST, other), 3)
                    for other in (PAP, EQUAL, "|k|", "distance")]
            body.append([network, kind, *gaps])
    return common.table(body, ["network", "AUC of robust PCA, step 1, minus", PAP, EQUAL, "|k|",
                               "distance"])


def kind_table(group, before, after=""):
    """Format measures "kind: before SCORE after" as Markdown: a row per score, a column per kind.

    Cells have the mean over networks and its 95 % interval.
    """
    kinds = [kind for kind in ("clean", *KINDS) if f"{kind}: {before}{PAP}{after}" in group]
    body = []
    for score in SCORES:
        cells = []
        for kind in kinds:
            values = group.get(f"{kind}: {before}{score}{after}")
            cells.append(show(paired_t(values), 2).replace("+", "") if values else "")
        if any(cells):
            body.append([score, *cells])
    return common.table(body, ["mean (95 % interval)", *kinds])


def robust_tables(groups):
    """Format AUC, rank correlations and tests of every group of `robust_groups` as Markdown."""
    parts = []
    for network, group in groups.items():
        correlations = {}
        for name, values in group.items():              # "rank correlation of S and |k|, step 4"
            if "rank correlation of " in name:
                kind, _, rest = name.partition(": rank correlation of ")
                score, _, detail = rest.partition(" and |k|")
                correlations[f"{kind}: {score}{detail}"] = values
        seeds = len(group[f"noise: AUC of {ROBUST}"])
        parts.append(f"## {network}: {seeds} network{'s' if seeds > 1 else ''}")
        parts.append("AUC:\n\n" + kind_table(group, "AUC of "))
        parts.append("Rank correlation with |k|:\n\n" + kind_table(correlations, ""))
        if seeds > 1:
            body = []
            for kind, (d, p) in primary(group).items():
                body.append([kind, show(d, 3), show_p(d.p), show_p(p)])
            title = "AUC of robust PCA, step 1, minus S, step 4"
            parts.append(common.table(body, [title, "difference", "p", "p, Holm"]))
    parts.append(primary_table(groups))
    return "\n\n".join(parts)


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--ckpt", nargs="+", default=[],
                   help="run folders or checkpoints of train_cls.py, all with the same data set")
    p.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="corruptions of "
                   "studies/patches.py (default: all); adversarial takes the longest")
    p.add_argument("--images", type=int, default=300,
                   help="number of test images (default: 300)")
    p.add_argument("--rows", type=Path, default=ROWS,
                   help="without --ckpt, print the rows of this file (default: the stored rows)")
    p.add_argument("--one_line", action="store_true", help="measure S of one loop with line 4 of "
                   "PAP and with line 4 of robust PCA; all else is equal")
    p.add_argument("--out", type=Path, help="append the rows of --ckpt to this file")
    args = p.parse_args(argv)
    if not args.rows.is_file():
        raise common.InputError(f"--rows {args.rows}: no such file; expected rows written by --out")
    rows = []
    for path in tqdm(args.ckpt, "checkpoints", disable=None):
        rows.append(one_line_row(path, args) if args.one_line else checkpoint_row(path, args))
        if args.out:                                    # after each network: a stop loses nothing
            with open(args.out, "a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    groups = over_seeds(rows or common.read_log(args.rows))
    print(auc_table(groups))
    robust = robust_groups(groups)
    if robust:
        print(f"\n{robust_tables(robust)}")


if __name__ == "__main__":
    common.run(main)
