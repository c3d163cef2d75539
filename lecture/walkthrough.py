"""Draws every picture of lecture/WALKTHROUGH.md, one cell each.

    python -m lecture.walkthrough                    # all: 2 minutes on a CPU core
    python -m lecture.walkthrough gram leak          # some
    python -m lecture.walkthrough pap --image photo.jpg
    python -m lecture.walkthrough --out_dir lecture/pictures        # renews the pictures in the text
    python -m lecture.walkthrough --notebook     # or --page, --slides: text and pictures in one: lecture/page.py

An editor runs the cells one by one; each needs the first alone. The networks are those in weights/,
so nothing is trained but the toy of picture 7.
"""

# %% What the pictures share: flags, four small networks, colours.
import argparse
import json
import math
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from PIL import Image
from torchvision.transforms.v2.functional import center_crop, resize

import common
import kpca
from attention import FORMS
from data.files import decode, read_bytes
from data.segmentation import Scenes, palette
from data.shapes import SHAPES, load_shapes
from robust.adaptive import rewired
from robust.attacks import pgd
from robust.corruptions import corrupt
from robust.iou import evaluate, predictions
from robust.metrics import auroc, wilson
from robust.patches import corrupt_patches
from segmenter import segmenter_from_checkpoint
from referee.studies import leak
from referee.studies.span import explained_variance, key_span, value_axes
from vit import vit_from_checkpoint

WEIGHTS = Path(common.__file__).with_name("weights")
SCENE = 35                                  # the test scene of pictures 2 and 5
PICTURES = "projection gram values pcp pap hero where leak attack dense".split()
COLOUR = {"softmax": "0.55", "symmetric": "#1f6fb4", "rpc": "#c8352b"}
MARK = {"softmax": "o", "symmetric": "s", "rpc": "^"}               # for readers of grey prints
NULL = dict(color="black", linestyle=":")
STYLE = {"released": "-o", "paper": "--s", "admm": "-.^"}
plt.rcParams.update({"figure.dpi": 100, "figure.constrained_layout.use": True, "font.size": 9,
                     "axes.titlesize": 9, "axes.spines.top": False, "axes.spines.right": False,
                     "image.cmap": "magma", "legend.fontsize": 8, "legend.frameon": False})

p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                            formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("pictures", nargs="*", help=f"some of {', '.join(PICTURES)}; default: all")
p.add_argument("--ckpt", nargs="+", default=[], help="networks of train_cls.py on the scenes, used "
               "in place of those in weights/")
p.add_argument("--image", help="a picture of your own in gram, pap and hero")
p.add_argument("--out_dir", default="out/walkthrough")
for form in ("notebook", "page", "slides"):
    p.add_argument(f"--{form}", action="store_true", help="no pictures: see lecture/page.py")
NOTEBOOK = "ipykernel" in sys.modules
torch.set_num_threads(1)                    # the numbers in the text are those of one thread
ARGS = p.parse_args([] if NOTEBOOK else None)
if not set(ARGS.pictures) <= set(PICTURES):
    p.error(f"{' '.join(ARGS.pictures)}: expected some of {', '.join(PICTURES)}")
try:                                        # what cannot be done is refused before anything runs
    if ARGS.notebook or ARGS.page or ARGS.slides:
        import lecture.page as weave
        sys.exit(weave.main(ARGS))
    PHOTO = decode(read_bytes(ARGS.image), ARGS.image) if ARGS.image else None
    GIVEN = [common.load(path) for path in ARGS.ckpt]
except (OSError, ValueError) as e:
    sys.exit(f"error: {e}")


def wanted(name):
    """Has this picture been asked for? In a notebook: always."""
    return not ARGS.pictures or name in ARGS.pictures


def network(attn):
    """The classifier of this kind, in eval mode: of --ckpt, else of weights/."""
    same = [c for c in GIVEN if c.get("model_config", {}).get("attn") == attn]
    if same and same[0].get("classes") != list(SHAPES):
        sys.exit(f"error: --ckpt: the {attn} network was not trained on the scenes")
    checkpoint = same[0] if same else common.load(WEIGHTS / f"shapes_{attn}.pt")
    return vit_from_checkpoint(checkpoint).requires_grad_(False)


def scenes(n, start=0):
    """Test scenes: images (n, 3, 32, 32) in [0, 1], labels (n,)."""
    split = load_shapes("test", start + n)
    return split.images[start:] / 255, split.labels[start:]


def picture(start):
    """One image (1, 3, 32, 32) in [0, 1]: a test scene, or the middle of --image."""
    if PHOTO is None:
        return scenes(1, start)[0]
    return resize(center_crop(PHOTO[None] / 255, min(PHOTO.shape[1:])), [32, 32], antialias=True)


def layers(model, images):
    """Of each layer: its attention, and what goes into that, (B, N, C)."""
    x = model.embed(images)
    for block in model.blocks:
        yield block.attn, block.norm1(x)
        x = block(x)


def first_layer(model, images):
    """Keys of layer 1 (B, H, N, D) and the steps of PAP on them: dicts of S, K2, L."""
    attn, x = next(layers(model, images))
    return attn.project(x)[1], attn.trace(x)


def weights(K2):
    """Attention with keys K2 (B, H, N, D): (B, H, N, N)."""
    return kpca.log_kernel(K2, K2).softmax(-1)


def received(K2):
    """Attention that each token gets from the others, mean over heads, and its share of all."""
    A = weights(K2).mean(1)                                         # (B, N, N)
    A = A - torch.diag_embed(A.diagonal(dim1=1, dim2=2))            # not from itself
    return A.mean(1), A.sum((1, 2)) / A.shape[1]


def over_patches(x):
    """One number a token, the class token first: (..., 65) -> (..., 8, 8)."""
    return x[..., 1:].unflatten(-1, (8, 8))


def size(x):
    """How large a token is, summed over heads and channels: (B, H, N, D) -> (B, N)."""
    return x.abs().sum((1, 3))


def show(ax, x, title="", **how):
    """An image (3, H, W) or a map (H, W) without axes."""
    ax.imshow(x.permute(1, 2, 0) if x.ndim == 3 else x, **how)
    ax.set(xticks=[], yticks=[], title=title)
    ax.spines[:].set_visible(False)


def outline(ax, hit):
    """Frames around the patches of a map where hit (64,) is True."""
    for i in hit.nonzero()[:, 0].tolist():
        corner = (i % 8 - 0.5, i // 8 - 0.5)
        ax.add_patch(plt.Rectangle(corner, 1, 1, fill=False, color="#35d0ff", linewidth=1))


def save(figure, name, **numbers):
    """Write <out_dir>/<name>.png, and its numbers into <out_dir>/numbers.json."""
    out = Path(ARGS.out_dir)
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / f"{name}.png")
    with Image.open(out / f"{name}.png") as drawn:
        drawn.convert("RGB").quantize(256).save(out / f"{name}.png", optimize=True)
    path = out / "numbers.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    known[name] = {key: float(f"{float(x):.4g}") for key, x in numbers.items()}
    path.write_text(json.dumps(known, indent=1) + "\n")
    print(f"{out / name}.png", *(f"{key}={x:g}" for key, x in known[name].items()), flush=True)
    if not NOTEBOOK:
        plt.close(figure)


# %% 1. Attention is a projection: kernel PCA as lines, attention as colour.
if wanted("projection"):
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

    figure, axes = plt.subplots(1, 4, figsize=(9, 2.6), sharey=True)
    for d, ax in enumerate(axes):
        colour = (h[:, d] if d < 3 else learned[:, 0]).view(121, 121).T
        ax.contourf(x, x, colour, 20, cmap="RdBu_r" if d < 3 else "PuOr")
        if d < 3:
            ax.contour(x, x, projections[:, d].view(121, 121).T, 10, colors="black",
                       linewidths=0.7, linestyles="solid")
        ax.plot(*keys.T, "o", color="white", markeredgecolor="black", markersize=3)
        ax.set(xticks=[], yticks=[], aspect=1)
        ax.set_title(f"theoretical values: axis {d + 1}" if d < 3 else "random values: no axis")
        ax.spines[:].set_visible(False)
    save(figure, "projection", difference=(h - projections).abs().max() / h.abs().max())


# %% 2. The Gram matrix of one image's keys, its spectrum, its axes as maps.
if wanted("gram"):
    image = picture(SCENE)
    k = first_layer(network("symmetric"), image)[0][0, 0].double()  # of one head: (65, D)
    axes = kpca.kernel_pca(k)

    # the null: the same numbers, each channel in its own random order of tokens
    random = torch.Generator().manual_seed(0)
    order = torch.rand(k.shape, generator=random).argsort(0)
    null = kpca.kernel_pca(k.gather(0, order))

    figure = plt.figure(figsize=(9, 3.4))
    left, right = figure.subfigures(1, 2, width_ratios=(2, 1))
    grid, spectrum = left.subplots(2, 4), right.subplots()
    show(grid[0, 0], image[0], "image")
    top = axes.K[1:, 1:].abs().max()
    show(grid[1, 0], axes.K, "centred Gram matrix", cmap="RdBu_r", vmin=-top, vmax=top)
    for d, ax in enumerate(grid[:, 1:].flat):
        u = axes.U[:, d]
        show(ax, over_patches(u), f"axis {d + 1}", cmap="RdBu_r", vmin=-u[1:].abs().max(),
             vmax=u[1:].abs().max())
    spectrum.semilogy(range(1, 65), axes.mu[:64] / axes.mu[0], color=COLOUR["symmetric"],
                      label="keys of the image")
    spectrum.semilogy(range(1, 65), null.mu[:64] / null.mu[0], **NULL, label="null: shuffled")
    spectrum.set(title="eigenvalues, the largest = 1", xlabel="axis")
    spectrum.legend()
    held = [100 * mu.cumsum(0) / mu.sum() for mu in (axes.mu, null.mu)]    # by the first axes
    share, null_share, most, null_most = [h[5] for h in held] + [1 + (h < 90).sum() for h in held]
    save(figure, "gram", share=share, null_share=null_share, axes_of_90=most,
         null_axes_of_90=null_most, largest=axes.mu[0] / axes.c.exp(), bound=1 / kpca.g(k, k).min())


# %% 3. Are learned values those axes? Two measures, each beside its nulls.
if wanted("values"):
    model = network("softmax")
    random = torch.Generator().manual_seed(0)
    cosine, share = {}, {}                                          # of each (layer, head)
    for attn, x in layers(model, scenes(16)[0]):
        q, k, v, x = (y.double() for y in (*attn.project(x), x[:, None]))
        axes, span = kpca.kernel_pca(k), key_span(q, k)
        matrix = torch.randn(2, x.shape[-1], v.shape[-1], generator=random, dtype=v.dtype)
        sources = {"learned": v, "another head's": v.flip(1), "random matrix": x @ matrix,
                   "random numbers": torch.randn(v.shape, generator=random, dtype=v.dtype),
                   "kernel PCA": kpca.theoretical_values(axes, v.shape[-1])}
        for name, values in sources.items():
            a = kpca.ritz(axes, kpca.a_hat(values, axes.log_g))
            found = kpca.eigen_cosine(axes, a)["eig_cos"]
            cosine.setdefault(name, []).append(found.nanmean((0, 2)))
            found = explained_variance(span, kpca.basis(value_axes(span, values)))
            share.setdefault(name, []).append(found.mean(0))

    look = {"learned": dict(color=COLOUR["softmax"], marker="o", linestyle=""),
            "another head's": dict(**NULL, marker="x"), "random matrix": dict(**NULL, marker="+"),
            "random numbers": dict(**NULL), "kernel PCA": dict(color="black", linestyle="-")}
    figure, grid = plt.subplots(1, 2, figsize=(9, 2.8))
    for ax, title, found in ((grid[0], "cosine of a and K~ a", cosine),
                             (grid[1], "share of the keys' variance", share)):
        for name, per_layer in found.items():
            ax.plot(torch.cat(per_layer), label=name, **look[name])
        ax.set(title=title, ylim=(0, 1.03), xlabel="layer, two heads each")
        ax.set_xticks(range(0, 8, 2), range(1, 5))
    grid[1].legend(loc="lower left")
    numbers = {f"cosine {name}": torch.cat(x).mean() for name, x in cosine.items()}
    numbers.update({f"share {name}": torch.cat(x).mean() for name, x in share.items()})
    save(figure, "values", **numbers)


# %% 4. Robust PCA: the correct iteration, and Algorithm 2 as printed.
if wanted("pcp"):
    random = torch.Generator().manual_seed(0)
    low, spikes, place = torch.randn(3, 80, 60, generator=random, dtype=torch.float64)
    U, sigma, Vt = torch.linalg.svd(low)
    low = 3 * (U[:, :3] * sigma[:3]) @ Vt[:3]                       # rank 3
    spikes = torch.where(place > 1.645, 4 * spikes, 0)              # in 5 % of the entries
    M = low + spikes
    L, S = kpca.pcp(M)

    correct = []
    for steps in range(1, 51):
        parts = kpca.pcp(M, tol=0, max_iter=steps)
        correct.append((M - sum(parts)).norm() / M.norm())

    # as printed: threshold mu for 1/mu, and -Y/mu for +Y/mu
    lambd, mu = 80 ** -0.5, M.numel() / (4 * M.abs().sum())
    printed, now, Y = [], torch.zeros_like(M), torch.zeros_like(M)
    for _ in range(50):
        sparse = kpca.soft_threshold(M - now + Y / mu, lambd / mu)
        U, sigma, Vt = torch.linalg.svd(M - sparse - Y / mu, full_matrices=False)
        now = (U * kpca.soft_threshold(sigma, mu)) @ Vt
        Y = Y + mu * (M - now - sparse)
        printed.append((M - now - sparse).norm() / M.norm())

    figure, grid = plt.subplots(1, 4, figsize=(9, 3), width_ratios=(1, 1, 1, 2))
    for ax, x, title in zip(grid, (M, L, S), ("M", "L found", "S found")):
        show(ax, x, title, cmap="RdBu_r", vmin=-6, vmax=6)
    grid[3].semilogy(range(1, 51), correct, color=COLOUR["rpc"], label="correct ADMM")
    grid[3].semilogy(range(1, 51), printed, color="black", linestyle="--", label="as printed")
    grid[3].set(title="|M - L - S| / |M|", xlabel="step", ylim=(1e-17, 1e12))
    grid[3].legend()
    save(figure, "pcp", error=(L - low).norm() / low.norm(), printed_10=printed[9],
         steps=1 + sum(r > 1e-7 for r in correct), printed_steps=1 + sum(r < 1e8 for r in printed))


# %% 5. Inside attention: what four steps do to the keys, in the three readings.
if wanted("pap"):
    model = network("rpc")
    images, hit = corrupt_patches(picture(SCENE), "noise", patch=4)
    figure = plt.figure(figsize=(9, 4.8))
    upper, lower = figure.subfigures(2, 1, height_ratios=(1, 0.9))
    left, *groups = upper.subfigures(1, 4, width_ratios=(1, 4, 4, 4))
    given, lines, numbers = left.subplots(3, 1), lower.subplots(1, 2), {}
    for group, (form, reading) in zip(groups, FORMS.items()):
        k, trace = first_layer(rewired(model, **reading), images)
        group.suptitle(f"{form}: steps 1 to 4", fontsize=9)
        residuals, entropies, grid = [], [], group.subplots(3, 4)
        for column, step in zip(grid.T, trace):
            left_over, A = k - step["S"] - step["L"], weights(step["K2"])
            got, _ = received(step["K2"])
            maps = size(step["S"])[0], size(left_over)[0], got[0]
            for ax, x, most in zip(column, maps, (size(k).max(), size(k).max(), None)):
                show(ax, over_patches(x), vmin=0, vmax=most)
                outline(ax, hit[0])
            residuals.append(left_over.norm() / k.norm())
            entropies.append(torch.special.entr(A).sum(-1).mean())
        for ax, name in zip(grid[:, 0], ("|S|", "|K-S-L|", "attention")):
            ax.set_ylabel(name)
        for ax, values in zip(lines, (residuals, entropies)):
            ax.plot(range(1, 5), values, STYLE[form], color=COLOUR["rpc"], label=form)
        numbers.update({f"{form} residual": residuals[-1], f"{form} entropy": entropies[-1]})

    show(given[0], images[0], "image")
    show(given[1], over_patches(size(k)[0]), "|K|")
    given[2].axis("off")
    plain, uniform = torch.special.entr(weights(k)).sum(-1).mean(), math.log(65)
    lines[0].set(title="|K - S - L| / |K|, by step", xticks=range(1, 5), ylim=0)
    lines[1].set(title="entropy of the attention rows, nats, by step", xticks=range(1, 5))
    lines[1].axhline(plain, color=COLOUR["symmetric"], label="symmetric attention")
    lines[1].axhline(uniform, **NULL, label="null: uniform")
    lines[1].set_ylim(0, 6)
    lines[1].legend(loc="upper right", ncols=3)
    save(figure, "pap", symmetric=plain, uniform=uniform, **numbers)


# %% The picture of the README: S and attention over the steps, clean and damaged.
if wanted("hero"):
    model, scene, shares = network("rpc"), picture(SCENE), {}
    figure, grid = plt.subplots(2, 9, figsize=(9, 2.4))
    for row, kind, n in zip(grid, ("clean", "damaged"), (0, 6)):
        images, hit = corrupt_patches(scene, "noise", patch=4, n=n)
        k, trace = first_layer(model, images)
        show(row[0], images[0], kind)
        for i, step in enumerate(trace, 1):
            got, share = received(step["K2"])
            shares[f"{kind} {i}"] = 100 * share
            show(row[i], over_patches(size(step["S"])[0]), f"|S|, step {i}", vmin=0,
                 vmax=size(k).max())
            show(row[4 + i], over_patches(got[0]), f"attention {i}", vmin=0)
            outline(row[i], hit[0])
            outline(row[4 + i], hit[0])
    save(figure, "hero", **shares)


# %% 6. Where is S? Are damaged patches those with more of it?
if wanted("where"):
    model, images = network("rpc"), scenes(300)[0]
    looks = [dict(color=COLOUR["rpc"], alpha=alpha) for alpha in (0.25, 0.5, 0.75, 1)]
    looks += [NULL, dict(color="black", linestyle="--")]
    (figure, grid), numbers = plt.subplots(1, 4, figsize=(9, 2.9), sharey=True), {}
    for ax, kind in zip(grid, ("noise", "black", "white", "gaussian")):
        spoilt, hit = corrupt_patches(images, kind, patch=4)
        k, trace = first_layer(model, spoilt)
        scores = {f"S {i}": size(step["S"]) for i, step in enumerate(trace, 1)}
        scores["|k|"] = size(k)
        scores["distance"] = size(k - k[:, :, 1:].mean(2, keepdim=True))
        for look, (name, score) in zip(looks, scores.items()):
            score = score[:, 1:].flatten()
            damage = hit.flatten()[score.argsort(descending=True)].double()
            found, wrong = damage.cumsum(0) / damage.sum(), (1 - damage).cumsum(0)
            area = numbers[f"{kind} {name}"] = auroc(score, hit.flatten())
            ax.plot(wrong / wrong[-1], found, **look, label=f"{name} {area:.2f}")
        ax.set(title=kind, xlabel="undamaged patches, share", aspect=1)
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=2, columnspacing=1)
    grid[0].set_ylabel("damaged patches, share")
    save(figure, "where", **numbers)


# %% 7. Does mu leak the future? The loss on a word that only later tokens tell.
if wanted("leak"):
    figure, ax = plt.subplots(figsize=(9, 2.8))
    numbers = {}
    for (mu, meaning), style in zip(leak.KINDS.items(), ("-", "--", "-.")):
        for seed in (0, 1):
            nats = leak.train(mu, seed)
            ax.plot(nats, style, color=COLOUR["rpc"], alpha=1 - 0.4 * seed,
                    label=None if seed else f"{mu}: {meaning}")
            numbers[f"{mu} {seed}"] = nats[-1]
    ax.axhline(math.log(2), **NULL, label="chance, ln 2")
    ax.set(xlabel="training step", ylabel="nats", ylim=(0, 1.2))
    ax.legend(loc="upper right")
    save(figure, "leak", **numbers)


# %% 8. Is it robust? One image under attack; accuracy against the budget.
if wanted("attack"):
    budgets, (images, labels) = (1, 2, 4, 8), scenes(128)
    figure, names = plt.figure(figsize=(9, 2.7)), list(SHAPES)
    left, right = figure.subfigures(1, 2, width_ratios=(1.3, 1))
    grid, ax, numbers = left.subplots(2, 5), right.subplots(), {}
    for kind in ("softmax", "symmetric", "rpc"):
        model, shares = network(kind), []
        for column, eps in enumerate((0, *budgets)):
            x = pgd(model, images, labels, eps / 255, steps=10, alpha=0.25) if eps else images
            answers = model(x).argmax(1)
            shares.append((answers == labels).double().mean().item())
            numbers[f"{kind} {eps}"] = 100 * shares[-1]
            if kind == "rpc":
                show(grid[0, column], x[1], f"{eps}/255:\n{names[answers[1]]}")
                show(grid[1, column], (0.5 + 16 * (x[1] - images[1])).clamp(0, 1))
        ends = zip(*(wilson(s, len(images)) for s in shares))
        share, low, high = torch.tensor([shares, *ends])
        ax.errorbar((0, *budgets), share, torch.stack([share - low, high - share]),
                    color=COLOUR[kind], marker=MARK[kind], capsize=2, label=kind)
    scale = model.std.mean().item()
    other = ax.secondary_xaxis("top", (lambda e: e / scale, lambda e: e * scale))
    other.set_xlabel("the same as the released code counts, /255")
    ax.axhline(0.1, **NULL, label="null: chance")
    ax.set(xlabel="budget in pixel units, /255", ylabel="accuracy", ylim=0)
    ax.legend()
    save(figure, "attack", normalised=scale, **numbers)


# %% 9. Dense: what Segmenter sees, clean and under fog.
if wanted("dense"):
    model = segmenter_from_checkpoint(common.load(WEIGHTS / "seg_shapes_rpc.pt"))
    source = Scenes("test", 100, 32)
    how, colours, shown = dict(size=32, window=32, stride=32), palette(11), [0, 11, 12, 13]

    def fog(images, index):
        return corrupt(images, "fog", 3, index=index)

    figure, grid = plt.subplots(2, 10, figsize=(9, 2.3))
    cells, numbers = grid.reshape(4, 5), {}
    for name, change, first in (("clean", None, 0), ("fog", fog, 3)):
        numbers[name] = evaluate(model, source, **how, change=change)[0]["mean_iou"]
        found = predictions(model, source, shown, change=change, **how)
        for row, (image, truth, prediction) in zip(cells, found):
            show(row[first], image, name)
            show(row[first + 1], colours[prediction.long()].permute(2, 0, 1), "prediction")
            if change is None:
                show(row[2], colours[truth.long()].permute(2, 0, 1), "truth")
    background = (source.labels == 0).double().mean() / 11          # if all pixels are called so
    save(figure, "dense", null=100 * background, **numbers)
