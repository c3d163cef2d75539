"""Draw every picture of lecture/WALKTHROUGH.md, one function per picture.

    python -m lecture.pictures                    # all: 3 minutes on one CPU core
    python -m lecture.pictures ruler leak         # some
    python -m lecture.pictures --out_dir lecture/pictures     # replace the pictures of the text

In a notebook: `from lecture import pictures`, then `pictures.draw_ruler()`. The networks come
from weights/. Nothing is trained except the toy of `leak`. Studies are read from stored rows.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.colors import to_rgb
from PIL import Image

import common
import kpca
from attention import (FORMS, layer_inputs, penalty, rpc_attention, soft_threshold,
                       symmetric_attention)
from data.masks import Scenes
from data.shapes import SHAPES, load_shapes
from models import load_classifier
from robust.attacks import pgd
from robust.corruptions import corrupt
from segmenter import evaluate, predict_classes, segmenter_from_checkpoint
from studies import arms, kernel_pca, leak, line, perfect_s, probe
from studies.colours import CONTROL, FAMILIES, FRAME, look
from studies.patches import corrupt_patches
from studies.published_scores import cka
from studies.rpca_layer import robust_pca
from studies.stats import paired_t
from studies.where_is_s import auroc, first_layer, location, rank_correlation

WEIGHTS = Path(common.__file__).with_name("weights")
PICTURES = ("idea vit projection ruler residual where attack equal_cost line "
            "gram recovery pcp pap values leak dense").split()
COLOUR = {name: colour for name, (colour, _) in FAMILIES.items()}
plt.rcParams.update({"figure.constrained_layout.use": True, "font.size": 13,
                     "figure.constrained_layout.h_pad": 0.08, "figure.titlesize": 15,
                     "figure.titleweight": "bold", "axes.titlesize": 13, "legend.frameon": False,
                     "axes.spines.top": False, "axes.spines.right": False, "image.cmap": "magma",
                     "image.interpolation": "none", "svg.hashsalt": "walkthrough"})
NOTEBOOK = "ipykernel" in sys.modules
torch.set_num_threads(1)                    # the numbers in the text were made with one thread

p = argparse.ArgumentParser(prog="python -m lecture.pictures", description=__doc__,
                            allow_abbrev=False,
                            formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("pictures", nargs="*", choices=[*PICTURES, "all"], default="all")
p.add_argument("--out_dir", default="out/walkthrough")
ARGS = p.parse_args(None if __name__ == "__main__" else [])


def network(attn):
    """Load the classifier with this attention from weights/, in eval mode."""
    checkpoint = common.load(WEIGHTS / f"shapes_{attn}.pt")
    return load_classifier(checkpoint).requires_grad_(False)


def scenes(n):
    """Return n test scenes: images (n, 3, 32, 32) in [0, 1], labels (n,)."""
    split = load_shapes("test", n)
    return split.images / 255, split.labels


def one_image():
    """Return the image (1, 3, 32, 32) of idea, vit, gram and pap: test scene 35."""
    return scenes(36)[0][-1:]


def weights(K2):
    """Return the attention matrix for keys K2 (B, H, N, D): (B, H, N, N)."""
    return kpca.log_kernel(K2, K2).softmax(-1)


def entropy(K2):
    """Return the mean entropy of the attention rows for keys K2, in nats."""
    return torch.special.entr(weights(K2)).sum(-1).mean()


def received(K2):
    """Return the attention that each token gets from other tokens, mean over heads: (B, N)."""
    A = weights(K2).mean(1)                                         # (B, N, N)
    return (A - torch.diag_embed(A.diagonal(dim1=1, dim2=2))).mean(1)


def over_patches(x):
    """Arrange one number per token, class token first, as a map: (..., 65) -> (..., 8, 8)."""
    return x[..., 1:].unflatten(-1, (8, 8))


def size(x):
    """Sum |x| over the heads and channels of each token: (B, H, N, D) -> (B, N)."""
    return x.abs().sum((1, 3))


def show(ax, x, title="", **how):
    """Draw an image (3, H, W) or a map (H, W) without axes."""
    ax.imshow(x.permute(1, 2, 0) if x.ndim == 3 else x, **how)
    ax.set(xticks=[], yticks=[], title=title)
    ax.spines[:].set_visible(False)


def outline(ax, hit, side=8):
    """Frame the patches where hit (64,) is True; side: width of the map or image in pixels."""
    for i in hit.nonzero()[:, 0].tolist():
        corner = (i % 8 * side / 8 - 0.5, i // 8 * side / 8 - 0.5)
        ax.add_patch(plt.Rectangle(corner, side / 8, side / 8, fill=False, color=FRAME,
                                   linewidth=1.5))


def scale(axes, label, **how):
    """Draw a colour bar for the last map in the last of these axes."""
    bar = axes[0].figure.colorbar(axes[-1].images[-1], ax=list(axes), label=label, **how)
    bar.outline.set_visible(False)


def attack_curve(rows, arm):
    """Return {budget in 1/255: accuracies in %, one per network} of a variant at equal cost."""
    curve = {}
    for row in rows:
        if row.arm == arm and row.seed < 45 and row.kind in ("clean", "pgd"):
            curve.setdefault(row.eps or 0, []).append(row.top1)
    return {eps: curve[eps] for eps in sorted(curve) if eps <= 8}


def save(figure, name, **numbers):
    """Write <out_dir>/<name>.png and .svg, and its numbers into <out_dir>/numbers.json."""
    out = Path(ARGS.out_dir)
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / f"{name}.svg", transparent=True, metadata=dict(Date=None))
    drawn = (out / f"{name}.svg").read_text(encoding="utf-8")
    drawn = drawn.replace("#000000", "currentColor")            # black becomes the page's colour
    drawn = drawn.replace("<svg ", '<svg fill="currentColor" ', 1)
    (out / f"{name}.svg").write_text(drawn, encoding="utf-8")
    figure.savefig(out / f"{name}.png")
    plt.close(figure)
    drawn = Image.open(out / f"{name}.png").convert("RGB").quantize(256)
    drawn.save(out / f"{name}.png", optimize=True)
    stored = out / "numbers.json"
    known = json.loads(stored.read_text(encoding="utf-8")) if stored.exists() else {}
    known[name] = {key: float(f"{float(x):.4g}") for key, x in numbers.items()}
    stored.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    print(out / name, *(f"{key}={x:g}" for key, x in known[name].items()), flush=True)
    if NOTEBOOK:
        from IPython.display import display
        display(drawn)


def draw_idea():
    """The question: an image with noise, what S should be, and an empty frame for what S is."""
    model = network("rpc")
    corrupted, hit = corrupt_patches(one_image(), "noise", patch=4)
    figure, (image, wish, found) = plt.subplots(1, 3, figsize=(8.6, 3.2))
    figure.suptitle("Does RPC-Attention find the noise?")
    show(image, corrupted[0], "noise in six patches")
    show(wish, hit[0].double().view(8, 8), "S should be")
    show(found, torch.full((8, 8), math.nan), "S is")
    found.set_facecolor((0.5, 0.5, 0.5, 0.15))
    found.text(4.5, 1.5, "?", ha="center", va="center", fontsize=40, color="0.5")
    outline(image, hit[0], 32)
    for ax in (wish, found):
        outline(ax, hit[0])
    millions = sum(w.numel() for w in model.parameters()) / 1e6
    save(figure, "idea", weights=millions)


def draw_vit():
    """A small vision transformer: which layer has RPC-Attention?"""
    figure, ax = plt.subplots(figsize=(9, 2.9))
    figure.suptitle("Where is RPC-Attention in the network?")
    ax.axis("off")
    ax.set(xlim=(0, 10.2), ylim=(0, 3))
    show(ax.inset_axes((0.01, 0.25, 0.13, 0.5)), one_image()[0])
    boxes = {"64 patches\n+ class token": 1.9, "layer 0": 3.9, "layer 1": 5.4, "layer 2": 6.9,
             "layer 3": 8.4}
    for name, x in boxes.items():
        colour = COLOUR["rpc"] if name == "layer 0" else "0.5"
        width = 1.5 if name.startswith("64") else 1.1
        ax.add_patch(plt.Rectangle((x, 1), width, 1, fill=False, edgecolor=colour, linewidth=2))
        ax.text(x + width / 2, 1.5, name, ha="center", va="center", color=colour)
        ax.annotate("", (x + width + 0.4, 1.5), (x + width, 1.5),
                    arrowprops=dict(arrowstyle="->", color="0.5"))
    ax.text(9.95, 1.5, "class", ha="left", va="center")
    ax.text(4.45, 0.35, "RPC-Attention: four steps\nsplit the keys, K = L + S", ha="center",
            color=COLOUR["rpc"], va="center")
    ax.text(7.45, 0.45, "symmetric attention", ha="center", color="0.5", va="center")
    save(figure, "vit")


def draw_projection():
    """1. Attention is a projection: kernel PCA as lines, attention as colour."""
    random = torch.Generator().manual_seed(3)
    centres = torch.tensor([[-1.6, -0.6], [0.3, 1.5], [1.5, -0.9]], dtype=torch.float64)
    noise = torch.randn(40, 2, generator=random, dtype=torch.float64)
    keys = centres[torch.arange(40) % 3] + 0.35 * noise

    # every point of the plane is a query
    x = torch.linspace(-3, 3, 121, dtype=torch.float64)
    queries = torch.cartesian_prod(x, x)
    projections, h = kpca.theorem_1(queries, keys, 3)
    values = torch.randn(40, 1, generator=random, dtype=torch.float64)
    learned = kpca.attend(queries, keys, values)

    figure, axes = plt.subplots(1, 4, figsize=(9, 3.1), sharey=True)
    figure.suptitle("When does attention (colour) follow kernel PCA (lines)?")
    for d, ax in enumerate(axes):
        colour = (h[:, d] if d < 3 else learned[:, 0]).view(121, 121).T
        ax.imshow(colour / colour.abs().max(), extent=(-3, 3, -3, 3), origin="lower",
                  cmap="RdBu_r", vmin=-1, vmax=1)
        lines = projections[:, d % 3].view(121, 121).T              # random values: axis 1
        ax.contour(x, x, lines, 10, colors="#111", linewidths=0.8, linestyles="solid")
        ax.plot(*keys.T, "o", color="white", markeredgecolor="#111", markersize=4)
        ax.set(xticks=[-2, 0, 2], yticks=[-2, 0, 2], aspect=1, xlabel="query, entry 1")
        ax.set_title(f"axis {d + 1}" if d < 3 else "random values, axis 1")
    axes[0].set_ylabel("query, entry 2")
    scale(axes, "output / largest", ticks=[-1, 0, 1], shrink=0.8)

    # Three formulas of stop 1, on some queries: the power series of the kernel as an inner
    # product of features; coefficients that sum to 0; h as an inner product of phi(q) and w.
    q, g = queries[::500], kpca.g(keys, keys)
    terms = [(q @ keys.mT / math.sqrt(2)) ** n / float(math.factorial(n)) for n in range(60)]
    series = (sum(terms) - kpca.kernel(q, keys)).abs().max() / kpca.kernel(q, keys).max()
    axes = kpca.kernel_pca(keys)
    a = kpca.coefficients(axes, 3)
    w = (g * values).mT @ kpca.features(keys, keys)                 # sum_j g(k_j) v_j phi(k_j)
    by_features = kpca.features(q, keys) @ w.mT
    four = torch.tensor([[1, 0], [0, 1], [-1, 0], [0, -1]], dtype=torch.float64)     # the board's
    four = math.sqrt(math.sqrt(2) * math.log(2)) * four
    on_board = kpca.kernel_pca(four)
    size_a = 1 / math.sqrt(2 * on_board.sigma[0] / on_board.c.exp())    # a = size_a (1, 0, -1, 0)
    save(figure, "projection", board_a=size_a, board_v=size_a / kpca.g(four, four)[0],
         difference=(h - projections).abs().max() / h.abs().max(),
         series=series, sum_of_a=a.sum(0).abs().max() / a.abs().sum(0).max(),
         w=(by_features - kpca.attend(q, keys, values)).abs().max())


def draw_ruler():
    """2. One ruler for trained values and their controls, from five softmax networks."""
    rows = probe.read_csv(arms.RESULTS / "kpca/trained.csv")
    sources = {"noise": "iid", "random matrix": "x W", "another head's": "other",
               "trained": "learned", "best linear": "fitted to eig_cos"}
    at = {name: kernel_pca.seed_means(rows, "softmax", "eig_cos", source).mean()
          for name, source in sources.items()}
    way = kernel_pca.closed(rows, "softmax", "eig_cos")             # per cent, of five networks
    half = 2.776 * way.std(ddof=1) / math.sqrt(5)                   # Student's t, 4 degrees
    figure, (whole, part) = plt.subplots(2, 1, figsize=(9, 4.2))
    figure.suptitle("How far does training move the values towards kernel PCA?")
    for ax in (whole, part):
        ax.set(yticks=[], ylim=(-1, 1))
        ax.spines["left"].set_visible(False)
        ax.axhline(0, color="black", linewidth=1)
    words = {"noise": (0.3, 0.3, "center", f"noise {at['noise']:.2f}"),
             "random matrix": (0.49, -0.65, "right", f"random matrix {at['random matrix']:.3f}"),
             "trained": (0.49, 0.3, "center", f"trained {at['trained']:.3f}"),
             "best linear": (0.535, -0.65, "left", f"best linear matrix {at['best linear']:.3f}"),
             "exact": (1, 0.3, "right", "exact kernel PCA 1")}
    for name, (x, y, side, said) in words.items():
        whole.plot({**at, "exact": 1}[name], 0, "o", color=COLOUR["softmax"], markersize=9,
                   fillstyle="full" if name == "trained" else "none")
        whole.text(x, y, said, ha=side)
    whole.set(xlim=(0, 1.02), xlabel="cosine of b and G\u0303b")
    for ax, ends in ((whole, (at["random matrix"], at["best linear"])), (part, (0, 100))):
        # the lower ruler enlarges this part; half transparent, so that it suits a dark page
        ax.axvspan(*ends, color="0.5", alpha=0.25, linewidth=0, zorder=0)
    part.errorbar(way.mean(), 0, xerr=half, fmt="o", color=COLOUR["softmax"], markersize=9,
                  capsize=6)
    part.text(way.mean() + 3, 0.3, f"trained {way.mean():.1f} ({way.mean() - half:.1f} to "
              f"{way.mean() + half:.1f})")
    part.set(xlim=(-1, 102), xlabel="% of the way from a random matrix to the best linear matrix")
    save(figure, "ruler", **at, way=way.mean(), way_low=way.mean() - half,
         way_high=way.mean() + half)


def cosine(a, b):
    """Return the cosine of the angle between two tensors."""
    return (a * b).sum() / (a.norm() * b.norm())


def draw_residual():
    """3. The residual and the share of S by step: variants of Algorithm 1, a random L, and ADMM."""
    attn, x = layer_inputs(network("rpc"), scenes(64)[0])[0]
    _, k, v = attn.project(x)
    last, numbers = 12, {}
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4))
    figure.suptitle("For which L does K \u2212 L \u2212 S vanish?")

    def draw(name, parts, keys, words, ups, **style):
        """Draw |K - L - S| / |K| and the share of entries of S that are not 0, for each step."""
        rest = [((keys - L - S).norm() / keys.norm()).item() for L, S in parts]
        share = [100 * (S != 0).double().mean().item() for _, S in parts]
        for ax, values, up in zip((left, right), (rest, share), ups):
            ax.plot(range(1, last + 1), values, **style)
            ax.text(last + 0.4, values[-1] + up, words, color=style["color"], va="center")
        numbers.update({f"{name} residual {i}": x for i, x in enumerate(rest, 1)})
        numbers.update({f"{name} share {i}": x for i, x in enumerate(share, 1)})

    styles = {"released": ("-", (0.09, -4)), "paper": ("--", (0.05, -5)), "admm": ("-.", (-0.07, 3))}
    for form, (style, ups) in styles.items():
        trace = []
        rpc_attention(k, v, n_iter=last, lambd=4, **FORMS[form], trace=trace)
        parts = [(step["L"], step["S"]) for step in trace]
        draw(form, parts, k, form, ups, **look("rpc", linestyle=style, markersize=5))
        if form == "released":
            for i, (L, S) in enumerate(parts[:4], 1):
                for name, x in {"K": k, "K - L": k - L}.items():
                    numbers[f"cosine of S and {name}, step {i}"] = cosine(S, x)
    # The released loop, but L is one random matrix, the same in each step
    L = k.std() * torch.randn(k.shape, generator=torch.Generator().manual_seed(0))
    tau, Z, last_L, parts = 4 * penalty(k), 0, 0, []
    for _ in range(last):
        S = soft_threshold(k - last_L + Z, tau)
        Z, last_L = Z + k - L - S, L
        parts.append((L, S))
    draw("random", parts, k, "random L", (0.06, 3), color="grey", marker="x", markersize=5)
    heads = k[:8].flatten(0, 1).double()                            # 16 matrices (65, D)
    parts = [[kpca.pcp(M, tol=0, max_iter=i) for M in heads] for i in range(1, last + 1)]
    parts = [[torch.stack(part) for part in zip(*of)] for of in parts]
    draw("pursuit", parts, heads, "real ADMM", (-0.01, 0), color="black", marker="s", markersize=5)
    left.set(title="|K \u2212 L \u2212 S| / |K|", ylim=(-0.03, 1.45))
    right.set(title="entries of S that are not 0, %", ylim=(-2, 104))
    for ax in (left, right):
        ax.set(xlabel="step", xlim=(0.7, 17.5), xticks=[1, 4, 8, 12])
        ax.axvline(4, **CONTROL)

    # Count the directions that hold 90 % of the sum of squares: is the output low-rank?
    for name, x in {"V": v, "L": symmetric_attention(k, v)}.items():
        squares = torch.linalg.svdvals(x.double()).square().cumsum(-1)
        below = squares < 0.9 * squares[..., -1:]
        numbers[f"directions of {name}"] = 1 + below.sum(-1).double().mean()
    save(figure, "residual", **numbers)


def draw_where():
    """4. Rank patches by RPC's S, by the S of real robust PCA, and by the size of the key."""
    model, (images, labels), numbers = network("rpc"), scenes(300), {}
    looks = {"S of RPC-Attention": look("rpc"),
             "S of robust PCA": dict(color="black", marker="s", linestyle="-"),
             "size of the key": dict(color="black", marker="|", linestyle="-.",
                                       markeredgewidth=3)}
    kinds = {"noise": "noise", "gaussian": "noise\nadded", "adversarial": "attacked",
             "pixels": "pixels", "white": "white", "black": "black"}
    figure, (roc, dots) = plt.subplots(1, 2, figsize=(9, 4.4), width_ratios=(1, 1.5))
    figure.suptitle("Is S larger on corrupted patches?")
    for row, kind in enumerate(kinds):
        n = 100 if kind == "adversarial" else 300
        corrupted, hit = corrupt_patches(images[:n], kind, patch=4, model=model, labels=labels[:n])
        k, trace = first_layer(model, corrupted)
        scores = [size(trace[3]["S"]), size(robust_pca(k, n_iter=1)), size(k)]
        for (name, style), score in zip(looks.items(), scores):
            score = score[:, 1:].flatten()
            area = numbers[f"{kind} {name}"] = auroc(score, hit.flatten())
            dots.plot(area, row, **style | dict(linestyle="", markersize=11))
            if row == 0:
                dots.plot([], [], **style, label=name)
                wrong = hit.flatten()[score.argsort(descending=True)].double()
                found, false = wrong.cumsum(0) / wrong.sum(), (1 - wrong).cumsum(0)
                roc.plot(false[::60] / false[-1], found[::60], **style | dict(marker=""))
    roc.plot([0, 1], [0, 1], **CONTROL)
    roc.set(title="noise: patches by their score", xlabel="share of the intact patches",
            ylabel="share of the noisy patches", aspect=1, xticks=[0, 0.5, 1], yticks=[0, 0.5, 1])
    dots.axvline(0.5, **CONTROL, label="chance")
    dots.set(title="AUC: corrupted patch above intact patch", xlim=(0.15, 1.03), ylim=(5.6, -0.6))
    dots.set_yticks(range(6), kinds.values())
    figure.legend(loc="outside lower center", ncols=4, columnspacing=1, handletextpad=0.4)

    # On clean images: does S follow the length of the key? Which share of robust PCA's S is not 0?
    k, trace = first_layer(model, images)
    for i, step in enumerate(trace, 1):
        order = rank_correlation(location(step["S"]), size(k)[:, 1:]).mean()
        numbers[f"rank correlation, step {i}"] = order
    numbers["share of robust PCA"] = 100 * (robust_pca(k, n_iter=1) != 0).double().mean()
    others = common.read_log(arms.RESULTS / "where_is_s/ten.jsonl")
    for row in others:                      # eight networks trained with other seeds
        if row["network"] == "rpc 4iter/layer0" and row["step"] == 2000:
            for kind in ("noise", "adversarial"):
                numbers[f"{kind} S, step 4, seed {row['seed']}"] = (
                    row["values"][f"{kind}: AUC of S, step 4"])
    for kind in ("noise", "adversarial"):
        own = [x for name, x in numbers.items() if name.startswith(f"{kind} S, step 4, seed")]
        numbers[f"{kind} S, step 4, seeds"] = np.mean(own)

    # Eight networks with a perfect S, with an empty S, and without the corrupted patches. In six
    # other networks a perfect S keeps the network's own S elsewhere.
    compared = [("own S elsewhere", perfect_s.CONTRAST_ROWS, perfect_s.OWN, "as trained"),
                ("perfect S", perfect_s.ROWS, perfect_s.PERFECT, perfect_s.EMPTY),
                ("left out", perfect_s.ROWS, perfect_s.LEFT_OUT, "as trained")]
    for kind in ("noise", "white", "adversarial"):
        for name, rows, condition, control in compared:
            found = perfect_s.read_rows(rows)
            d = perfect_s.gap(found, *(("rpc4-l1", kind, which) for which in (condition, control)))
            numbers.update({f"{kind}, {name}": d.mean, f"{kind}, {name} low": d.low,
                            f"{kind}, {name} high": d.high})

    # The boxes of the live page, on its network
    boxes = {"as trained": "as trained", "perfect S": perfect_s.OWN, "S empty": perfect_s.EMPTY,
             "left out": perfect_s.LEFT_OUT}
    images, labels = scenes(1000)
    corrupted, hit = corrupt_patches(images, "noise", patch=4)
    for name, condition in boxes.items():
        right = perfect_s.outcomes(model, corrupted, labels, hit, condition)
        numbers[f"noisy scenes, {name}"] = 100 * right.double().mean()
    save(figure, "where", **numbers)


def draw_attack():
    """5. One image under attack at four budgets."""
    budgets, (images, labels), names = (0, 2, 4, 8), scenes(128), list(SHAPES)
    figure, numbers, model = plt.figure(figsize=(9, 4.4)), {}, network("rpc")
    grid = figure.subplots(2, 4)
    figure.suptitle("Which change of the pixels changes the answer?")
    for (upper, lower), eps in zip(grid.T, budgets):
        x = pgd(model, images, labels, eps / 255, steps=10, alpha=0.25 * eps / 255)
        answers = model(x).argmax(1)
        numbers[f"rpc {eps}"] = 100 * (answers == labels).double().mean()
        show(upper, x[1], f"{eps}/255: \u201c{names[answers[1]]}\u201d")
        show(lower, (0.5 + 16 * (x[1] - images[1])).clamp(0, 1))
    grid[0, 0].set_ylabel("attacked image")
    grid[1, 0].set_ylabel("change \u00d7 16")

    # Compare the first-order rule, m > eps |grad m|_1, with the images that survive 2/255.
    eps, symmetric = 2 / 255, network("symmetric")
    x = images.clone().requires_grad_()
    logits = symmetric(x)
    right = torch.nn.functional.one_hot(labels, logits.shape[1]).bool()
    margin = logits[right] - logits.masked_fill(right, -torch.inf).amax(1)
    slope = torch.autograd.grad(margin.sum(), x)[0].abs().sum((1, 2, 3))
    survived = symmetric(pgd(symmetric, images, labels, eps, steps=10, alpha=0.25 * eps))
    survived = survived.argmax(1) == labels
    agree = 100 * ((margin > eps * slope) == survived).double().mean()
    save(figure, "attack", normalised=model.std.mean(), first_order=agree,
         survived=100 * survived.double().mean(), **numbers)


def draw_equal_cost():
    """5. Accuracy against the budget, at equal cost of training."""
    rows, numbers = arms.stored(arms.STUDIES["criterion"]), {}
    shown = {"symmetric": ("baseline, 24 epochs", "symmetric", (4.3, 66)),
             "rpc4-l1": ("RPC, 24 epochs", "rpc", (1.1, 60)),
             "symmetric-adv": ("baseline, 6 epochs of\nadversarial training", "adversarial",
                               (6.3, 47))}
    figure, ax = plt.subplots(figsize=(9, 4.2))
    figure.suptitle("At equal cost, which network is most robust?")
    for arm, (said, family, at) in shown.items():
        curve = attack_curve(rows, arm)
        ax.plot(list(curve), [np.mean(x) for x in curve.values()], **look(family))
        ax.fill_between(list(curve), [min(x) for x in curve.values()],
                        [max(x) for x in curve.values()], color=COLOUR[family], alpha=0.15,
                        linewidth=0)
        ax.text(*at, said, color=COLOUR[family])
        numbers.update({f"{arm} {eps:g}": np.mean(x) for eps, x in curve.items()})
    ax.axhline(10, **CONTROL)
    ax.text(0.1, 12, "chance")
    ax.set(xlabel="budget of the attack, PGD-20 (1/255)", ylabel="accuracy, %", ylim=(0, 103),
           xlim=(-0.1, 8.6), xticks=range(0, 9, 2))

    # differences and the accuracies that the text compares: pairs of one seed, seeds and images
    compared = {"long-rpc4-l1": ("24-epochs", ("15 corruptions", "pgd 2/255")),
                "rpc4-l1": ("cost-24", ("pgd 4/255",)),
                "symmetric-adv": ("cost-24", ("pgd 6/255", "15 corruptions")),
                "symmetric-adv-96": ("cost-96", ("pgd 6/255", "15 corruptions")),
                "paper-0.05-n4": ("lambda-0", ("pgd 2/255",))}      # against an averaging layer
    for arm, (comparison, measures) in compared.items():
        study, of = arms.comparison(comparison)
        base = next(b for a, b in study.comparisons[comparison].pairs if a == arm)
        for measure in measures:
            d = of.gaps[measure, arm, base]
            numbers.update({f"{arm} {measure} difference": d.mean, f"{arm} {measure} low": d.low,
                            f"{arm} {measure} high": d.high})
    study, of = arms.comparison("scenes")       # 8 epochs: RPC, and RPC without S
    for arm in ("rpc4-l1", "no-shrink"):
        d = of.gaps["pgd 2/255", arm, "symmetric"]
        numbers.update({f"8 epochs, {arm}": d.mean, f"8 epochs, {arm} low": d.low,
                        f"8 epochs, {arm} high": d.high})
    for arm in ("symmetric", "symmetric-adv", "symmetric-96", "symmetric-adv-96"):
        for measure in ("15 corruptions", "pgd 6/255"):
            found = arms.comparison("cost-96" if arm.endswith("96") else "cost-24")[1].found
            own = [100 * x.mean() if x.max() <= 1 else x.mean() for (name, seed), x
                   in found[measure].items() if name == arm and seed < 45]
            numbers[f"{arm} {measure}"] = np.mean(own)
    kinds = {"softmax": "softmax", "symmetric": "symmetric", "rpc": "rpc4-l1"}
    for name, arm in kinds.items():                         # the bars of the live page
        for eps in (1, 2, 4, 6, 8, 12):
            own = [float(row.top1) for row in rows if (row.arm, row.measure) ==
                   (arm, f"pgd {eps}/255") and row.seed in range(40, 45)]
            d = paired_t(own)
            ends = dict(mean=d.mean, low=d.low, high=d.high)
            numbers.update({f"{name} pgd {eps}/255 {end}": x for end, x in ends.items()})
    for arm in ("symmetric", "rpc4-l1"):    # PGD and AutoAttack on the same 500 images, two seeds
        runs = {row.seed: row.right for row in rows if (row.arm, row.measure) == (arm, "pgd 4/255")}
        strong = [row for row in rows if row.arm == arm and row.kind == "autoattack"]
        weak = np.mean([runs[row.seed][:row.images].mean() for row in strong])
        numbers[f"{arm} PGD of 500"] = weak
        numbers[f"{arm} AutoAttack of 500"] = np.mean([row.top1 for row in strong])
        numbers[f"{arm} overestimated"] = weak - numbers[f"{arm} AutoAttack of 500"]
    save(figure, "equal_cost", **numbers)


def draw_line():
    """5. Clean loss against accuracy, one mark per network."""
    networks, numbers = [n for n in line.stored("fresh") if not n.arm.startswith("half-")], {}
    looks = {"baseline": look("symmetric", linestyle="", alpha=0.8),
             "RPC": look("rpc", linestyle="", alpha=0.8)}

    def group(arm):
        """Return the group of an arm; RPC settings that only average are no RPC here."""
        arm = arm.removeprefix("long-")
        if arm.startswith("symmetric"):
            return "baseline"
        return "RPC" if arm in line.GROUPS["fresh"]["RPC that attends"] else "others"

    undefended = [n for n in networks if not n.arm.endswith("-adv")]
    of = {name: [n for n in undefended if group(n.arm) == name]
          for name in ("baseline", "RPC", "others")}
    epochs = {"symmetric-e4": "4", "symmetric-e6": "6", "symmetric-e8": "8",
              "symmetric-e12": "12", "symmetric-e16": "16", "long-symmetric": "24 epochs"}
    figure, ax = plt.subplots(figsize=(7, 3.9))
    figure.suptitle("What changes more: longer training or another attention?")
    x, y = line.points(of["others"], "pgd 2/255")                   # a band around their trend
    order, ends = np.polyfit(x, y, 2), np.linspace(x.min(), x.max(), 30)
    spread = 2 * (y - np.polyval(order, x)).std()
    ax.fill_between(np.exp(ends), np.polyval(order, ends) - spread,
                    np.minimum(np.polyval(order, ends) + spread, 100), color="0.5",
                    alpha=0.25, linewidth=0, zorder=0)
    for name, style in looks.items():
        x, y = line.points(of[name], "pgd 2/255")
        ax.plot(np.exp(x), y, markersize=6, **style)
    means = {arm: line.points([n for n in of["baseline"] if n.arm == arm], "pgd 2/255").mean(1)
             for arm in epochs}
    ax.plot(*zip(*((np.exp(x), y) for x, y in means.values())), color=COLOUR["symmetric"])
    for arm, (x, y) in means.items():
        numbers[f"{arm} pgd 2/255"] = y
        numbers[f"{arm} loss"] = np.exp(x)
        right = arm == "long-symmetric"
        ax.annotate(epochs[arm], (np.exp(x), y), (16, -30) if right else (-8, 10), ha="center",
                    color=COLOUR["symmetric"], textcoords="offset points")
    ax.set(xlabel="clean test loss, nats, falling \u2192", xscale="log", xlim=(0.62, 0.0022),
           ylabel="accuracy under PGD at 2/255, %", ylim=(25, 103), yticks=range(40, 101, 20))
    ax.set_xticks([0.4, 0.1, 0.03, 0.01, 0.003], ["0.4", "0.1", "0.03", "0.01", "0.003"])
    ax.set_xticks([], minor=True)
    ax.text(0.06, 45, "RPC", color=COLOUR["rpc"])
    ax.text(0.3, 75, "baseline", color=COLOUR["symmetric"])
    ax.text(0.03, 30, "grey band: other\nattentions", color="0.4")

    # the gain from 4 to 24 epochs, and how far RPC lies from the baseline's line
    gain = line.apart(*([n for n in networks if n.arm == arm] for arm in
                        ("long-symmetric", "symmetric-e4")), "pgd 2/255")
    group = "RPC that attends", "pgd 2/255"
    rpc = line.grouped("fresh", line.stored("fresh"))[0][group]
    for name, d in {"gain": gain, "RPC": rpc}.items():
        numbers.update({f"{name} difference": d.mean, f"{name} low": d.low, f"{name} high": d.high})
    save(figure, "line", **numbers)


def draw_gram():
    """A. The Gram matrix of one image's keys, its spectrum, its axes as maps."""
    image = one_image()
    k = first_layer(network("symmetric"), image)[0][0, 0].double()  # of one head: (65, D)
    axes = kpca.kernel_pca(k)

    # control: the same numbers, each channel in its own random order of tokens
    random = torch.Generator().manual_seed(0)
    order = torch.rand(k.shape, generator=random).argsort(0)
    shuffled = kpca.kernel_pca(k.gather(0, order))

    figure, grid = plt.subplot_mosaic("i12s;G34s", figsize=(9, 4.3), width_ratios=(1, 1, 1, 1.2))
    figure.suptitle("What do the axes of an image's keys show?")
    most = axes.G.abs().flatten().quantile(0.98)    # a few large entries would hide all others
    colours = dict(cmap="RdBu_r", vmin=-1, vmax=1)
    show(grid["i"], image[0], "image")
    show(grid["G"], axes.G / most, "Gram matrix", **colours)
    grid["G"].set(xlabel="column: a token", ylabel="row: a token")
    for d in range(4):
        u = axes.U[1:, d]
        show(grid[str(d + 1)], (u / u.abs().max()).view(8, 8), f"axis {d + 1}", **colours)
    scale([grid[i] for i in "i12G34"], "entry / largest", ticks=[-1, 0, 1], aspect=40,
          pad=0.02)
    grid["s"].semilogy(range(1, 65), axes.sigma[:64] / axes.sigma[0], color=COLOUR["symmetric"])
    grid["s"].semilogy(range(1, 65), shuffled.sigma[:64] / shuffled.sigma[0], **CONTROL)
    grid["s"].text(64, 1, "shuffled keys", ha="right")
    grid["s"].text(4, 1e-4, "keys of\nthe image", color=COLOUR["symmetric"])
    grid["s"].set(title="eigenvalue / largest", xlabel="axis", ylim=(1e-6, 3))
    held, control = (100 * mu.cumsum(0) / mu.sum() for mu in (axes.sigma, shuffled.sigma))
    save(figure, "gram", share=held[5], shuffled_share=control[5],
         axes_of_90=1 + (held < 90).sum(), shuffled_axes_of_90=1 + (control < 90).sum(),
         largest=axes.sigma[0] / axes.c.exp(),
         bound=1 / kpca.g(k, k).min())


def draw_recovery():
    """B. The error of principal component pursuit against the share of corrupted entries."""
    random = torch.Generator().manual_seed(0)
    draws = torch.randn(4, 80, 60, generator=random, dtype=torch.float64)
    shares, numbers = (2, 5, 10, 20, 30, 40, 50), {}
    figure, ax = plt.subplots(figsize=(9, 3.9))
    figure.suptitle("When does pursuit find the low-rank part?")
    cases = {"rank 3, scattered entries": (3, False, "-o"), "rank 20, scattered entries":
             (20, False, "-.s"), "rank 3, whole rows": (3, True, "--x")}
    for name, (rank, rows, style) in cases.items():
        U, sigma, Vt = torch.linalg.svd(draws[0])
        low, errors = 3 * (U[:, :rank] * sigma[:rank]) @ Vt[:rank], []
        for share in shares:
            order = torch.rand(80, 1 if rows else 60, generator=random).double()
            hit = order <= order.flatten().quantile(share / 100)
            M = low + torch.where(hit, 4 * draws[1], 0)
            L, _ = kpca.pcp(M, max_iter=300)
            errors.append((L - low).norm() / low.norm())
            numbers[f"{name} {share}"] = errors[-1]
            if rows:
                intact = ~hit[:, 0]
                numbers[f"intact rows {share}"] = (L - low)[intact].norm() / low[intact].norm()
        ax.semilogy(shares, errors, style, color="black", label=name, fillstyle="none")
    ax.set(xlabel="% of the entries or rows that are corrupted", ylabel="error of L / |L|")
    ax.legend(loc="lower right")
    save(figure, "recovery", **numbers)


def draw_pcp():
    """B. Algorithm 2 as printed, and with its two misprints corrected, in either order."""
    random = torch.Generator().manual_seed(0)
    low, spikes, place = torch.randn(3, 80, 60, generator=random, dtype=torch.float64)
    U, sigma, Vt = torch.linalg.svd(low)
    low = 3 * (U[:, :3] * sigma[:3]) @ Vt[:3]                       # rank 3
    spikes = torch.where(place > 1.645, 4 * spikes, 0)              # in 5 % of the entries
    M = low + spikes
    L, S = kpca.pcp(M)                                              # L first
    L_first = [kpca.pcp(M, tol=0, max_iter=steps) for steps in range(1, 51)]
    L_first = [(M - sum(parts)).norm() / M.norm() for parts in L_first]

    def S_first(threshold, sign):
        """Return |M - L - S| / |M| after each of 50 steps in the order of Algorithm 2."""
        now, Y, left = torch.zeros_like(M), torch.zeros_like(M), []
        for _ in range(50):
            sparse = kpca.soft_threshold(M - now + Y / mu, lambd / mu)
            U, sigma, Vt = torch.linalg.svd(M - sparse + sign * Y / mu, full_matrices=False)
            now = (U * kpca.soft_threshold(sigma, threshold)) @ Vt
            Y = Y + mu * (M - now - sparse)
            left.append((M - now - sparse).norm() / M.norm())
        return left

    lambd, mu = 80 ** -0.5, M.numel() / (4 * M.abs().sum())
    correct, printed = S_first(1 / mu, +1), S_first(mu, -1)
    figure, grid = plt.subplots(1, 4, figsize=(9, 3.3), width_ratios=(1, 1, 1, 1.9))
    figure.suptitle("Does Algorithm 2 find L and S?")
    for ax, x, title in zip(grid, (M, L, S), ("M", "L found", "S found")):
        show(ax, x, title, cmap="RdBu_r", vmin=-6, vmax=6)
        ax.set_xlabel("60 columns")
    grid[0].set_ylabel("80 rows")
    scale(grid[:3], "entries", ticks=[-6, 0, 6], extend="both", pad=0.02)
    ax = grid[3]
    for left, style in ((L_first, "-"), (correct, "-."), (printed, "--")):
        ax.semilogy(range(1, 51), left, color="black", linestyle=style)
    ax.text(24, 1e8, "as printed", ha="right")
    ax.text(19, 3e-2, "correct, S first")
    ax.text(21, 1e-10, "L first", ha="right")
    ax.set(title="|M \u2212 L \u2212 S| / |M|", xlabel="step", ylim=(1e-14, 1e12),
           yticks=[1e-10, 1, 1e10])
    save(figure, "pcp", error=(L - low).norm() / low.norm(),
         steps=1 + sum(r > 1e-7 for r in L_first), S_steps=1 + sum(r > 1e-7 for r in correct),
         printed_steps=1 + sum(r < 1e8 for r in printed))


def draw_pap():
    """C. Inside attention: four steps on the keys, in three variants."""
    model, many = network("rpc"), scenes(64)[0]
    images, hit = corrupt_patches(one_image(), "noise", patch=4)
    k, trace = first_layer(model, images)
    figure = plt.figure(figsize=(9, 4.2))
    figure.suptitle("What do the steps of Algorithm 1 do to attention?")
    left, right = figure.subfigures(1, 2, width_ratios=(1.4, 1))
    grid, ax, most = left.subplots(2, 3), right.subplots(), size(k).max()
    got = [received(step["K2"]) for step in trace]
    show(grid[0, 0], images[0], "image")
    show(grid[1, 0], over_patches(size(k) / most)[0], "|K|", vmin=0, vmax=1)
    for column, i in zip(grid[:, 1:].T, (1, 3)):
        S, A = size(trace[i]["S"]) / most, got[i] / max(x.max() for x in got)
        show(column[0], over_patches(S)[0], f"|S|, step {i + 1}", vmin=0, vmax=1)
        show(column[1], over_patches(A)[0], f"attention, {i + 1}", vmin=0, vmax=1)
        outline(column[0], hit[0])
        outline(column[1], hit[0])
    scale(grid[0], "of largest |K|", ticks=[0, 1])
    scale(grid[1], "of its largest", ticks=[0, 1])

    # three variants on 64 clean scenes; also with keys twice as long, and with S empty
    attn, x = layer_inputs(model, many)[0]
    _, k, v = attn.project(x)
    numbers, plain, uniform = {}, entropy(k), math.log(65)
    for (form, variant), style in zip(FORMS.items(), ("-", "--", "-.")):
        for name, keys, lambd in ((form, k, 4), (f"{form} twice", 2 * k, 4),
                                  (f"{form} empty", k, math.inf)):
            steps = []
            rpc_attention(keys, v, lambd=lambd, **variant, trace=steps)
            entropies = [entropy(step["K2"]) for step in steps]
            rest = (keys - steps[-1]["S"] - steps[-1]["L"]).norm() / keys.norm()
            share = 100 * (steps[-1]["S"] != 0).double().mean()
            numbers.update({f"{name} residual": rest, f"{name} share": share,
                            **{f"{name} entropy {i}": x for i, x in enumerate(entropies, 1)}})
            if name == form:
                ax.plot(range(1, 5), entropies, **look("rpc", linestyle=style))
                ax.text(4.15, entropies[-1] - 0.08, form, color=COLOUR["rpc"])
            elif name == "released empty":
                ax.plot(range(1, 5), entropies, **look("rpc", linestyle=":", fillstyle="none"))
                ax.text(4.15, entropies[-1] + 0.1, "released, S empty", color=COLOUR["rpc"])
    ax.set(title="entropy of attention, nats", xlabel="step", xticks=range(1, 5), ylim=(0, 5),
           xlim=(0.9, 7.6))
    ax.axhline(plain, color=COLOUR["symmetric"])
    ax.text(7.6, plain + 0.1, "symmetric", color=COLOUR["symmetric"], ha="right")
    ax.axhline(uniform, **CONTROL)
    ax.text(7.6, uniform + 0.1, "uniform", ha="right")

    save(figure, "pap", symmetric=plain, uniform=uniform, **numbers)


def draw_values():
    """D. The cosine beside its controls, and the two terms of J."""
    random, found = torch.Generator().manual_seed(0), {}

    def scores(values, axes, theory):
        """Return cosine of b and G\u0303b, and CKA with Theorem 1's values, per head: (2, H)."""
        a = kernel_pca.ritz(axes, kpca.a_hat(values, axes.log_g))
        cosine = kpca.eigen_cosine(axes, a).nanmean((0, 2))
        return torch.stack([cosine, cka(values, theory).mean(0)])

    for attn, x in layer_inputs(network("softmax"), scenes(16)[0]):
        q, k, v, x = (y.double() for y in (*attn.project(x), x[:, None]))
        axes = kpca.kernel_pca(k)
        one_over_g = (axes.log_g.amin(-1, keepdim=True) - axes.log_g).exp()[..., None]
        theory = one_over_g * axes.U[..., :v.shape[-1]]
        matrices = torch.randn(20, 2, x.shape[-1], v.shape[-1], generator=random, dtype=v.dtype)
        sources = {"trained": [v], "another head's": [v.flip(1)], "kernel PCA": [theory],
                   "random numbers": [torch.randn(v.shape, generator=random, dtype=v.dtype)],
                   "random matrix": [x @ matrix for matrix in matrices]}
        of = {name: torch.stack([scores(values, axes, theory) for values in draws]).mean(0)
              for name, draws in sources.items()}
        gv = kpca.a_hat(v, axes.log_g, scaled=True)                 # % of the largest sum possible
        of["sum"] = 100 * (gv.sum(-2).abs() / gv.abs().sum(-2)).mean((0, 2))
        for name, value in of.items():
            found.setdefault(name, []).append(value)
    for attn, x in layer_inputs(network("softmax"), scenes(32)[0]):      # as studies.kernel_pca
        q, k, v = (y.double() for y in attn.project(x))
        terms = kernel_pca.projection_loss(kpca.log_phi2(q, k), kpca.attend(q, k, v))
        for name in ("J", "phi2", "h2"):
            found.setdefault(name, []).append(terms[name].mean(0))
    found = {name: torch.cat(values, -1) for name, values in found.items()}     # eight heads

    looks = {"kernel PCA": (0, dict(color="black", linestyle="-")),
             "trained": (-0.2, dict(color=COLOUR["softmax"], marker="o", markersize=9)),
             "another head's": (0, dict(color="black", marker="x", markersize=7)),
             "random matrix": (0.2, dict(color="black", marker="+", markersize=9)),
             "random numbers": (0, CONTROL)}
    figure, (cosines, terms) = plt.subplots(1, 2, figsize=(9, 4.2), width_ratios=(1.3, 1))
    figure.suptitle("Do trained values score higher than random ones? Is J positive?")
    for name, (aside, style) in looks.items():
        cosines.plot(torch.arange(8) + aside, found[name][0], label=name,
                     **dict(linestyle="") | style)
    cosines.set(title="cosine of b and G\u0303b", ylim=(0, 1.05))
    terms.semilogy(found["h2"], "o", color=COLOUR["softmax"], markersize=9)
    terms.semilogy(found["phi2"], "D", color="black", fillstyle="none", markersize=8)
    terms.text(0, 1, "|h|\u00b2")
    terms.text(0, 0.008, "|\u03c6(q)|\u00b2")
    terms.set(title="the two terms of J", ylim=(5e-4, 50), yticks=(1e-3, 1e-2, 0.1, 1, 10),
              yticklabels=("0.001", "0.01", "0.1", "1", "10"))
    for ax in (cosines, terms):
        ax.set(xlabel="layer.head")
        ax.set_xticks(range(8), [f"{i}.{j}" for i in range(4) for j in range(2)])
    figure.legend(*cosines.get_legend_handles_labels(), loc="outside lower center", ncols=5,
                  columnspacing=1, handletextpad=0.3, handlelength=1.4)
    numbers = {f"{score} {name}": x.mean() for name in sources
               for score, x in zip(("cosine", "CKA"), found[name])}
    save(figure, "values", lead=numbers["cosine trained"] - numbers["cosine random matrix"],
         **numbers, **{name: found[name].mean() for name in ("sum", "J", "phi2", "h2")},
         ratio=found["h2"].mean() / found["phi2"].mean())


def draw_leak():
    """E. The loss of a causal model on a word that only later tokens determine."""
    (figure, ax), numbers, red = plt.subplots(figsize=(9, 3.9)), {}, dict(color=COLOUR["rpc"])
    figure.suptitle("Which \u00b5 lets a causal model read the future?")
    for mu, style in dict(token=dict(linewidth=6, alpha=0.3), seen={}, all={}).items():
        for seed in (0, 1):
            nats = leak.train(mu, seed)
            ax.plot(nats, **red, **style)
            numbers[f"{mu} {seed}"] = nats[-1]
    ax.axhline(math.log(2), **CONTROL)
    ax.text(400, 0.6, "chance, ln 2", ha="right")
    ax.text(400, 0.78, "\u00b5 over earlier tokens (thin), over one token (broad)", ha="right",
            **red)
    ax.text(110, 0.1, "\u00b5 over all tokens, as printed: two seeds", **red)
    ax.set(xlabel="training step", ylabel="loss, nats", ylim=(0, 1.2))
    save(figure, "leak", chance=math.log(2), **numbers)


def draw_dense():
    """F. Dense prediction: the output of Segmenter, clean and under fog."""
    model = segmenter_from_checkpoint(common.load(WEIGHTS / "seg_shapes_rpc.pt"))
    source = Scenes("test", 100, 32)
    how, shown = dict(size=32, window=32, stride=32), [31, 43]      # six classes in both together
    names = {"background": "#dddddd", "circle": "#cc79a7", "heart": "#e69f00", "ring": "#56b4e9",
             "square": "#0072b2", "star": "#f0e442"}
    painted = torch.tensor([to_rgb(names.get(name, "white")) for name in ("background", *SHAPES)])

    def fog(images, index):
        """Put fog of severity 3 in front of the images."""
        return corrupt(images, "fog", 3, index=index)

    figure, grid = plt.subplots(2, 5, figsize=(9, 4.3))
    figure.suptitle("Which objects does Segmenter find under fog?")
    numbers = {}
    for name, change, first in (("clean", None, 0), ("under fog", fog, 3)):
        numbers[name] = evaluate(model, source, **how, change=change)["mean_iou"]
        for row, i in zip(grid, shown):
            image, truth = source[i]
            image = change(image[None], [i])[0] if change else image
            show(row[first], image)
            show(row[first + 1], painted[predict_classes(model, image, **how)].permute(2, 0, 1))
            if change is None:
                show(row[2], painted[truth.long()].permute(2, 0, 1))
    for ax, title in zip(grid[0], ("image", "prediction", "truth", "under fog", "prediction")):
        ax.set_title(title)
    patches = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in names.values()]
    figure.legend(patches, names, loc="outside lower center", ncols=6, columnspacing=1.2)
    background = (source.labels == 0).double().mean() / 11          # if every pixel is background
    save(figure, "dense", background=100 * background, **numbers)


if __name__ == "__main__":
    for picture in PICTURES if "all" in ARGS.pictures else ARGS.pictures:
        globals()[f"draw_{picture}"]()
