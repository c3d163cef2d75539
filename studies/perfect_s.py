"""Would RPC-Attention be more robust if S contained exactly the corrupted patches?

    python -m studies.perfect_s                                 # tables of the stored rows
    python -m studies.perfect_s --ckpt out/shapes_rpc           # measure your own networks
    python -m studies.perfect_s --contrast                      # the rows of the right contrast
    python -m studies.perfect_s --train perfect --seed 0 --out_dir out/trained-perfect_s0

Each condition of `attend` changes the attention of a trained network, which is told the corrupted
patches. So conditions are upper bounds, not defences. The study was planned in
results/perfect_s/plan.md. The planned differences are condition minus "as trained". But a perfect S
is 0 at intact patches, and a trained network needs its S there. So two contrasts change S at the
corrupted patches only: perfect S minus "S empty", and "own S elsewhere" minus "as trained". They
have a plan and rows of their own.
"""

import argparse
import base64
import itertools
import json
import math
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import common
from attention import (SelfAttention, layer_inputs, rpc_attention, soft_threshold,
                       softmax_attention)
from data.augment import augment_uint8, to_float_and_erase
from data.rng import PATCH_PLACES, PATCH_VALUES, epoch_order, uniform
from data.shapes import load_shapes
from robust.patches import patches_to_pixels
from studies import probe
from studies.patches import corrupt_patches
from studies.stats import NONE, crossed, holm, show, show_p, spread, unpack_bits
from vit import SIZES, ViT, ViTConfig

ROWS = Path(__file__).parent / "results/perfect_s/rows.jsonl"
CONTRAST_ROWS = ROWS.with_name("contrast.jsonl")
KINDS = "noise", "white", "black", "adversarial"
PERFECT, LEFT_OUT = "perfect S on keys", "left out in every layer"
EMPTY, OWN = "S empty", "own S elsewhere"
WITH_S = EMPTY, PERFECT, "perfect S on keys and values", OWN     # conditions of networks with PAP
CONDITIONS = ("as trained", *WITH_S, "left out in layer 0", LEFT_OUT,
              "control: intact patches left out", "farthest patches left out")
CONTRAST_CONDITIONS = "as trained", EMPTY, PERFECT, OWN, LEFT_OUT
CONTRAST_ARMS = "rpc4-l1", "rpc2-all"
CONTRASTS = (PERFECT, EMPTY), (OWN, "as trained")       # they differ at corrupted patches only


# --- conditions -----------------------------------------------------------------------------------

def attend(condition, hit, out, q, k, v, layer):
    """Attend as a function of ATTENTIONS does, under a condition. q, k, v: (B, H, N, D).

    hit: (B, N, 1), which tokens are corrupted. out: (B, N), which tokens to leave out, or None.
    """
    keep = None if out is None else ~out
    if layer.attn != "rpc":
        return softmax_attention(q, k, v, keep=keep)
    pap = dict(layer.pap)
    if condition == EMPTY:
        pap["lambd"] = math.inf
    elif condition in WITH_S:
        def shrink(x, tau):                         # S is all of x at corrupted patches
            elsewhere = soft_threshold(x, tau) if condition == OWN else torch.zeros_like(x)
            return torch.where(hit[:, None], x, elsewhere)

        pap["shrink"] = shrink
        if condition == "perfect S on keys and values":
            v = v * ~hit[:, None]
    return rpc_attention(k, v, **pap, keep=keep)


@contextmanager
def conditioned(model, condition, hit, out=None):
    """Run a ViT under a condition inside the block.

    hit, out: (B, P) bool, the corrupted patches, and the patches that no token attends to.
    """
    layers = [m for m in model.modules() if isinstance(m, SelfAttention)]
    hit, out = (None if x is None else F.pad(x, (1, 0)) for x in (hit, out))    # the class token
    for i, layer in enumerate(layers):
        here = None if condition == "left out in layer 0" and i else out
        layer.learned = partial(attend, condition, hit[:, :, None], here)
    try:
        yield
    finally:
        for layer in layers:
            layer.learned = None                    # the function of ATTENTIONS is back


def left_out(model, condition, images, hit):
    """Choose the patches to leave out, (B, P) bool, or None. Every choice has as many as hit."""
    if condition.startswith("left out"):
        return hit
    if condition.startswith("control"):             # random numbers, but 2 at corrupted patches
        score = uniform(torch.arange(len(hit)), hit.shape[1], 1, PATCH_PLACES) + 2 * hit
    elif condition.startswith("farthest"):
        attn, x = layer_inputs(model, images)[0]
        k = attn.project(x)[1]                                                  # (B, H, N, D)
        k = k.transpose(1, 2).flatten(2)[:, 1:]                                 # (B, P, C)
        score = -(k - k.mean(1, keepdim=True)).norm(dim=2)
    else:
        return None
    return score.argsort(1).argsort(1) < hit.sum(1, keepdim=True)               # lowest scores


@torch.no_grad()
def outcomes(model, images, labels, hit, condition):
    """Return which images a model classifies correctly under a condition, (B,) bool."""
    out = left_out(model, condition, images, hit)
    if condition == "as trained":
        return model(images).argmax(1) == labels
    with conditioned(model, condition, hit, out):
        return model(images).argmax(1) == labels


def measure(path, n, conditions=CONDITIONS):
    """Yield a row for each corruption and condition of a checkpoint."""
    model, checkpoint = probe.load_model(path)
    name = Path(path).name if Path(path).is_dir() else Path(path).stem
    arm, _, seed = name.rpartition("_s")
    scenes = load_shapes("test", n)
    images, labels = scenes.images.float() / 255, scenes.labels
    for kind in ("clean", *KINDS):
        x, hit = corrupt_patches(images, "noise" if kind == "clean" else kind,
                                 model.config.patch_size, model=model, labels=labels)
        for condition in conditions:
            if condition in WITH_S and model.config.attn != "rpc":
                continue
            right = outcomes(model, images if kind == "clean" else x, labels, hit, condition)
            yield dict(arm=arm, seed=int(seed) if seed.isdecimal() else None,
                       step=checkpoint["step"], kind=kind, condition=condition, images=n,
                       accuracy=round(100 * right.double().mean().item(), 2),
                       right=base64.b64encode(np.packbits(right.numpy())).decode(),
                       device=common.origin(torch.device("cpu"))["hardware"])


# --- training with corrupted patches --------------------------------------------------------------

def corrupt_half(images, position, seed, patch=4):
    """Corrupt 6 patches in half of the images, by noise, white or black.

    images: (B, 3, S, S) in [0, 1]. position: (B,), which determines all random numbers together
    with the seed. Returns the images, and which patches are corrupted, (B, P) bool.
    """
    side, key = images.shape[-1] // patch, 1000 + seed          # not the test images' numbers
    place = uniform(position, side * side + 2, key, PATCH_PLACES)
    chosen, kind = place[:, -2] < 0.5, (3 * place[:, -1]).long().view(-1, 1, 1, 1)
    hit = (place[:, :-2].argsort(1).argsort(1) < 6) & chosen[:, None]
    noise = uniform(position, images[0].numel(), key, PATCH_VALUES).view_as(images)
    new = torch.where(kind == 0, noise, (kind == 1).float())                    # else black
    return torch.where(patches_to_pixels(hit, side, patch), new, images), hit


def train(how, seed, out_dir, epochs=8, batch=64, lr=2e-3, n=16000):
    """Train rpc4-l1 with the recipe of train_cls.py on scenes with corrupted patches.

    how: "perfect" trains with perfect S on keys, "own" with the S of PAP.
    """
    scenes, steps = load_shapes("train", n), n // batch
    config = ViTConfig(**SIZES["nano"], image_size=32, patch_size=4, attn="rpc", init="default",
                       num_classes=len(scenes.classes))
    torch.manual_seed(seed)
    model = ViT(config)
    matrices = {p for name, p in model.named_parameters() if p.ndim > 1 and name.endswith("weight")}
    optimizer = torch.optim.AdamW([dict(params=[*matrices], weight_decay=0.05), dict(
        params=[p for p in model.parameters() if p not in matrices], weight_decay=0)])
    for step in range(epochs * steps):
        epoch, i = divmod(step, steps)
        rate = (1e-6 + (lr - 1e-6) * step / steps if step < steps else
                1e-5 + (lr - 1e-5) * (1 + math.cos(math.pi * step / (epochs * steps))) / 2)
        for group in optimizer.param_groups:
            group["lr"] = rate
        index = epoch_order(n, epoch, seed)[i * batch:(i + 1) * batch]
        position = step * batch + torch.arange(batch)
        images = augment_uint8(scenes.images[index], position, seed, flip=True)
        images = to_float_and_erase(images, position, seed)
        images, hit = corrupt_half(images, position, seed)
        with conditioned(model, PERFECT, hit) if how == "perfect" else nullcontext():
            loss = F.cross_entropy(model(images), scenes.labels[index])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 20 == 0:
            print(f"step {step + 1:6d}  loss {loss.item():.4f}", flush=True)
    Path(out_dir).mkdir(parents=True, exist_ok=True)
    common.save(Path(out_dir, "last.pt"), dict(
        task="classification", architecture="vit", model=model.state_dict(), step=step + 1,
        model_config=asdict(config), classes=scenes.classes, args=dict(data="shapes", seed=seed)))


# --- tables ---------------------------------------------------------------------------------------

def read_rows(path=ROWS):
    """Read rows as {(arm, kind, condition): {seed: (images,) in per cent}}."""
    found = {}
    for row in common.read_log(path):
        right = 100 * unpack_bits(row["right"], row["images"])
        found.setdefault((row["arm"], row["kind"], row["condition"]), {})[row["seed"]] = right
    return found


def gap(found, first, second):
    """Subtract outcomes (arm, kind, condition), seed by seed: a Difference over seeds and images.
    """
    first, second = (found.get(key, {}) for key in (first, second))
    seeds = sorted(first.keys() & second.keys())
    return crossed([first[s] - second[s] for s in seeds]) if seeds else NONE


def gaps(found):
    """Compare every condition with "as trained": {(arm, kind, condition): Difference}."""
    return {key: gap(found, key, (*key[:2], "as trained")) for key in found
            if key[2] != "as trained"}


def trained_pair(kind, tested="as trained"):
    """Return two keys of rows: trained and tested with perfect S; trained with its own S.

    tested: the condition under which the second networks are tested. On clean images no patch is
    corrupted, so perfect S is empty.
    """
    perfect = EMPTY if kind == "clean" else PERFECT
    return ("trained-perfect", kind, perfect), ("trained-own", kind, tested)


def adjusted(found):
    """Return the p values of the primary differences after Holm's correction: {key: p}.

    Holm's correction counts all 20 tests of the plan, also if a difference has no p value yet.
    """
    keys = [(arm, kind, condition) for arm in ("rpc4-l1", "rpc2-all", "symmetric")
            for kind in KINDS for condition in (PERFECT, LEFT_OUT)
            if condition == LEFT_OUT or arm != "symmetric"]
    known = {key: d.p for key, d in gaps(found).items() if key in keys and d.p == d.p}
    p = holm(dict.fromkeys(keys, 1.0) | known)
    return {key: p[key] for key in known}


def empty_table(found, arm):
    """Format as Markdown: both kinds of perfect S minus "S empty" of an arm. Not planned."""
    body = []
    for condition in (PERFECT, "perfect S on keys and values"):
        row = [condition]
        for kind in ("clean", *KINDS):
            row.append(show(gap(found, (arm, kind, condition), (arm, kind, EMPTY))))
        body.append(row)
    return common.table(body, ["minus S empty, points", "clean", *KINDS])


def contrasts(found):
    """Return the contrasts of the plan: {(arm, kind, condition, base): (Difference, p)}.

    p is after Holm's correction over all 16 tests of the plan, also if rows are missing; it is nan
    for clean images, which are no test, and with fewer than three seeds.
    """
    differences = {}
    for arm, kind in itertools.product(CONTRAST_ARMS, ("clean", *KINDS)):
        for condition, base in CONTRASTS:
            d = gap(found, (arm, kind, condition), (arm, kind, base))
            differences[arm, kind, condition, base] = d
    tested = {key: 1.0 for key in differences if key[1] != "clean"}
    known = {key: differences[key].p for key in tested if not math.isnan(differences[key].p)}
    p = holm(tested | known)
    results = {}
    for key, d in differences.items():
        results[key] = d, p[key] if key in known else math.nan
    return results


def contrast_tables(found):
    """Format the accuracies and the contrasts of the new networks as Markdown."""
    tested = contrasts(found)
    body = []
    for arm in CONTRAST_ARMS:
        seeds = found.get((arm, "clean", "as trained"))
        if not seeds:
            continue
        for condition in CONTRAST_CONDITIONS:
            cells = []
            for kind in ("clean", *KINDS):
                values = [right.mean() for right in found[arm, kind, condition].values()]
                cells.append(spread(values))
            body.append([f"{arm} ({len(seeds)}), {condition}", *cells])
        for condition, base in CONTRASTS:
            cells = []
            for kind in ("clean", *KINDS):
                d, p = tested[arm, kind, condition, base]
                text = show(d, bold=p < 0.05)
                cells.append(text if math.isnan(p) else f"{text}<br>p {show_p(p)}")
            body.append([f"{arm}, {condition} minus {base}", *cells])
    return common.table(body, ["accuracy in %, differences in points", "clean", *KINDS])


def tables(found):
    """Format accuracies and differences of every arm as Markdown."""
    p, of, parts = adjusted(found), gaps(found), []
    for arm in dict.fromkeys(arm for arm, _, _ in found):
        body = []
        for condition in CONDITIONS:
            cells = []
            for kind in ("clean", *KINDS):
                key = arm, kind, condition
                values = [x.mean() for x in found.get(key, {}).values()]
                cells.append("<br>".join(filter(None, [
                    spread(values), show(of.get(key, NONE), bold=p.get(key, 1) < 0.05),
                    f"p {show_p(p[key])}" if key in p else ""])))
            body += [[condition, *cells]] if any(cells) else []
        seeds = sorted(found[arm, "clean", "as trained"])
        parts.append(f"## {arm}, seeds {', '.join(map(str, seeds))}\n\n"
                     + common.table(body, ["accuracy in %", "clean", *KINDS]))
        if (arm, "clean", EMPTY) in found:
            parts.append(empty_table(found, arm))
    body = []
    for kind in ("clean", *KINDS):
        row = [kind]
        for tested in ("as trained", PERFECT):
            row.append(show(gap(found, *trained_pair(kind, tested))))
        body.append(row)
    parts.append("## Trained and tested with perfect S, minus trained with its own S\n\n"
                 + common.table(body, ["points of accuracy", "tested as trained",
                                       "tested with perfect S"]))
    return "\n\n".join(parts)


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    flag = p.add_argument
    flag("--ckpt", nargs="+", default=[], help="measure these run folders or checkpoints")
    flag("--images", type=int, default=1000, help="number of test images (default: 1000)")
    flag("--out", type=Path, help="append the rows of --ckpt to this file")
    flag("--contrast", action="store_true",
         help="measure only the conditions of the right contrast; without --ckpt, print its rows")
    flag("--train", choices=["perfect", "own"],
         help="train a network on corrupted patches, with perfect S or with the S of PAP")
    flag("--seed", type=int, default=0, help="seed of --train")
    flag("--out_dir", help="write the network of --train into this folder")
    args = p.parse_args(argv)
    if args.train:
        return train(args.train, args.seed, args.out_dir)
    conditions = CONTRAST_CONDITIONS if args.contrast else CONDITIONS
    for path in args.ckpt:
        rows = list(measure(path, args.images, conditions))
        if args.out:
            with open(args.out, "a") as file:
                file.write("".join(json.dumps(row) + "\n" for row in rows))
        else:
            body = [[row["kind"], row["condition"], row["accuracy"]] for row in rows]
            print(common.table(body, [path, "condition", "accuracy in %"]))
    if args.ckpt:
        return
    if args.contrast:
        print(contrast_tables(read_rows(CONTRAST_ROWS)))
    else:
        print(tables(read_rows()))


if __name__ == "__main__":
    common.run(main)
