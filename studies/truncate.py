"""What does a network lose if its values keep only some axes? --exp truncate of kernel_pca."""

import math
from functools import partial

import numpy as np
import torch

from kpca import attend
from studies.probe import attention_replaced, chunks, numbers, print_table
from studies.span import key_span, principal_axes, restrict

TRUNCATIONS = {
    "strict": "the first r principal axes, as kernel PCA has it",
    "affine": "the same and one constant row, what centring takes away",
    "affine random": "r random axes and the row",
    "affine bottom": "the last r axes and the row",
    "top r of x": "on the first r left singular vectors of the layer's input",
}


def truncated(heads, how, r):
    """Attention with truncated values, (B, H, N, D). how: of TRUNCATIONS, none, v = 0 or mean v."""
    q, k, v, N = heads.q, heads.k, heads.v, heads.k.shape[-2]
    mean = v.mean(-2, keepdim=True)
    whole = {"none": v, "v = 0": torch.zeros_like(v), "mean v": mean.expand_as(v)}
    if how in whole:
        return attend(q, k, whole[how])
    if how == "top r of x":
        Q = torch.linalg.svd(heads.x[:, None], full_matrices=False)[0][..., :r]
        return attend(q, k, Q @ (Q.mT @ v))

    span = key_span(q, k)
    u = principal_axes(span)[..., :N - 1, :]
    if how == "affine random":
        random = torch.Generator().manual_seed(r)
        order = torch.rand(u.shape[:-1], generator=random).argsort(-1).to(k.device)
        u = u.gather(-2, order[..., None].expand(u.shape))
    u = u[..., N - 1 - r:, :] if how == "affine bottom" else u[..., :r, :]
    return restrict(q, k, v, span, u, affine=how != "strict")


@torch.no_grad()
def truncate(point, ranks, device):
    """Accuracy with values cut down to r axes. Wants hundreds of --images.

    Returns rows (how, r, accuracy in percent, standard error), printed too; r = 0: no r.
    """
    model = point.model.to(device)
    cases = [(how, r) for r in ranks for how in TRUNCATIONS]
    right = {case: [] for case in [("none", 0), ("v = 0", 0), ("mean v", 0), *cases]}
    for _, images, labels in chunks(point, device):
        for (how, r), found in right.items():
            with attention_replaced(model, partial(truncated, how=how, r=r)):
                found.append((model(images).argmax(-1) == labels).cpu().numpy())
    rows = []
    for (how, r), t in right.items():
        t = 100.0 * np.concatenate(t)
        rows.append((how, r, t.mean(), t.std() / math.sqrt(len(t))))

    about = [f"{how}: {what}" for how, what in TRUNCATIONS.items()]
    text = ["Accuracy in percent with the values of all layers truncated to", *about]
    print_table(f"truncate: {point.where}", "\n".join(text), [
        ("accuracy", f"r = {r}" if r else "any r", how, mean, se) for how, r, mean, se in rows])
    return rows


def ranks_of(point, args):
    """The r of truncate, [] for a language model; a model that knows other classes is refused."""
    c = point.model.config
    if point.labels is None:
        if point.last:
            print(f"truncate needs classes and attention over all tokens: left out, {point.run} "
                  f"is a language model")
        return []
    if point.classes != c.num_classes:
        raise ValueError(f"truncate counts right answers, but the model knows {c.num_classes} "
                         f"classes, the data has {point.classes}")
    d, every = c.embed_dim // c.num_heads, c.num_tokens - 1
    usual = sorted({r for r in (d // 4, d, every) if 0 < r <= every})
    return numbers(args.ranks, "--ranks", every) if args.ranks else usual
