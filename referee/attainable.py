"""How much could the measures of kernel PCA have shown? The best linear map, beside training's.

    python -m referee.attainable --ckpt out/softmax_s? --out_dir referee/results/kpca
    python -m referee.attainable --table referee/results/kpca

That trained values score as a random matrix of the input does means little if no matrix could score
more. So a map of the layer's input, v = x W + b, the same for all images as the trained one is (of
Scaled Attention (I - S)(x W + b), with the layer's S), is fitted for each head: to EV, the share of
the keys' variance that values catch; and to the overlap of span{a} with span{K~ a}, 1 if the
columns of a = H G^-1 v span eigenvectors, which the eigen-cosine asks for. It is fitted on training
images; numbers are of the test images of kernel_pca.py. A maximum that is found is a lower
bound of what can be had.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

import common
from data.shapes import load_shapes
from kpca import a_hat
from referee.kernel_pca import exp_capture, exp_gamma
from referee.probe import capture, checkpoints, chunks, get_args, summarise, write_csv
from referee.scaled import read, values
from referee.span import Layer, explained_variance, token_overlap, value_axes
from referee.stats import paired_t, show, spread

IMAGES, PIECE, ROUNDS = 1000, 50, 5                 # to fit on; in a step; rounds over all of them


def frame(A):
    """An orthonormal basis of A's columns, which autograd can follow. A: (..., N, d), full rank."""
    return torch.linalg.qr(A / A.norm(dim=-2, keepdim=True))[0]


def eigenvectors(layer, v):
    """Overlap of span{a} and span{K~ a}, (..., B, H): 1 if a's columns span eigenvectors."""
    Q = frame(a_hat(v, layer.axes.log_g))
    return token_overlap(Q, frame(layer.axes.G @ Q))


def variance(layer, v):
    """EV of span{w_d}, (..., B, H)."""
    return explained_variance(layer.span, frame(value_axes(layer.span, v)))


MEASURES = {"eig_cos": eigenvectors, "EV": variance}        # which is fitted to what


def mapped(layer, W):
    """v = x W + b of every head, (B, H, N, Dv), times I - S if scaled. W: (H, C + 1, Dv)."""
    v = F.pad(layer.heads.x, (0, 1), value=1.0)[:, None] @ W
    return v - layer.heads.S @ v if layer.scaled else v


def fit(score, pieces):
    """Find the W whose v = x W + b have the largest mean score on these Layers, by Adam."""
    dv, (_, heads, _, _), width = pieces[0].dv, pieces[0].heads.k.shape, pieces[0].heads.x.shape[-1]
    random = torch.Generator().manual_seed(1)
    W = torch.randn(heads, width + 1, dv, generator=random, dtype=torch.float64) / width ** 0.5
    W.requires_grad_()
    optimizer = torch.optim.Adam([W], lr=0.03)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, ROUNDS * len(pieces))
    for layer in tqdm(pieces * ROUNDS, leave=False):
        optimizer.zero_grad()
        (-score(layer, mapped(layer, W)[None]).mean()).backward()
        optimizer.step()
        schedule.step()
    return W.detach()


def measured(point, names):
    """Fit maps for every layer of a Point's network and measure them: rows of `summarise`."""
    training = load_shapes("train", IMAGES, point.model.config.image_size).images
    results = {}
    for i in range(point.model.config.depth):
        pieces = [Layer(capture(point.model, images.float() / 255)[i], str(i), (i, n * PIECE))
                  for n, images in enumerate(training.split(PIECE))]
        maps = {name: fit(MEASURES[name], pieces) for name in names}
        for start, images in chunks(point, torch.device("cpu")):
            layer = Layer(capture(point.model, images)[i], str(i), (i, start))
            layer.values |= {f"fitted to {m}": mapped(layer, W)[None] for m, W in maps.items()}
            found = {"eig_cos": exp_gamma(layer)["eig_cos"], "EV": exp_capture(layer)["EV"]}
            for m, sources in found.items():
                for source, t in sources.items():                   # (draws, B, H)
                    results.setdefault((m, source, str(i)), []).append(t.nanmean(0).nanmean(1))
    return summarise({key: torch.cat(t) for key, t in results.items()}, point)


def table(folder):
    """Print for each network what a random, the trained and the fitted map have."""
    rows = read(folder / "attainable.csv")
    for m, ideal in (("eig_cos", "KPCA"), ("EV", "best")):
        body = []
        for network in dict.fromkeys(row["network"] for row in rows):
            found = [values(rows, network, m, source)[:, 0] for source in
                     ("x W", "learned", f"fitted to {m}", ideal)]
            null, trained, best, _ = found
            closed = paired_t(100 * (trained - null) / (best - null))
            body.append([network, len(null), *(spread(x, ".4f") for x in found), show(closed)])
        print(f"\n{m}\n\n" + common.table(body, [
            "network", "n", "random matrix", "trained", "best linear map", "kernel PCA",
            "share of the attainable gap that training closed, %"]))


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--table"]:
        return table(Path(argv[1]))
    args, rows = get_args(__doc__, MEASURES, argv), []
    for point in checkpoints(args):
        rows += measured(point, args.exp)
        write_csv(Path(args.out_dir) / "attainable.csv", rows)
    table(Path(args.out_dir))


if __name__ == "__main__":
    torch.set_num_threads(1)
    common.run(main)
