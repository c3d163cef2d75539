"""Which part of RPC-Attention's loop keeps S from finding noise?

    python -m studies.which_part                                     # tables of the stored rows
    python -m studies.which_part --ckpt weights/shapes_rpc.pt        # measures, and prints
    python -m studies.which_part --ckpt out/rpc_s? --out rows.jsonl  # measures, and appends rows

PAP, the loop of RPC-Attention, and robust PCA differ in five parts: line 4 (how L is computed), the
order of the lines, the sign of Z in line 4, the threshold, and whether the mean key is subtracted
first. This study runs every combination of the parts on the same keys of layer 0, and measures how
well S finds corrupted patches. The score of a patch is the sum of |S| over heads and channels. AUC
is the probability that a corrupted patch has a higher score than an intact patch of its image.

The size of a key is the sum of its absolute entries over heads and channels, like the size of S.
No network is trained here, and nothing follows about accuracy. The plan is
results/which_part/plan.md.
"""

import argparse
import itertools
import math
from pathlib import Path
from typing import NamedTuple

import common  # before torch, because it sets GOMP_SPINCOUNT for torch's threads
import torch
import torch.nn.functional as F
from tqdm import tqdm

from attention import layer_inputs
from data.rng import PATCH_VALUES, uniform
from robust.patches import patches_to_pixels, random_places
from studies import probe
from studies.patches import corrupt_patches
from studies.scores import mahalanobis, total_variation
from studies.stats import detectable, holm, paired_t, scipy_stats, show, show_p

FOLDER = Path(__file__).parent / "results/which_part"
ROWS = FOLDER / "rows.jsonl"
KINDS = ("noise", "gaussian", "colours", "equal", "adversarial")
LAMBDA = 4                              # PAP's lambda
RATIOS = (0.6, 1.0, 1.4)                # size of noisy keys : size of intact keys
LONG = (1, 2, 3, 4, 12, 200)            # steps after which PAP's S, L and residual are compared


# --- the loops ------------------------------------------------------------------------------------

class Loop(NamedTuple):
    """A loop that splits K into L and S. Each field is a part in which PAP and robust PCA differ.

    line_4: "values" and "keys": attention to V and to K. "spectrum": shrink the singular values.
        "random", "constant": controls; random numbers with the mean and the standard deviation of
        V, drawn in each step or once.
    order: "S first" or "L first". sign: of Z in line 4. threshold: "released", 4 H mu, or
    "over", 1 / (mu sqrt(max(N, D))). keys: "raw", or "centred" (the mean key is subtracted).
    """
    line_4: str
    order: str
    sign: int
    threshold: str
    keys: str

    @property
    def name(self):
        sign = "+" if self.sign > 0 else "-"
        return f"{self.line_4}, {self.order}, {sign}, {self.threshold}, {self.keys}"


CHOICES = {"line_4": ("values", "keys", "spectrum"), "order": ("S first", "L first"),
           "sign": (-1, 1), "threshold": ("released", "over"), "keys": ("raw", "centred")}
LOOPS = [Loop(*parts) for parts in itertools.product(*CHOICES.values())]
PAP = Loop("values", "S first", -1, "released", "raw")
ROBUST_PCA = Loop("spectrum", "L first", 1, "over", "centred")
RANDOM = PAP._replace(line_4="random")
CONSTANT = PAP._replace(line_4="constant")


def shrink(x, tau):
    """Move each entry of x towards 0 by tau; entries with |x| <= tau become 0."""
    return x - x.clamp(-tau, tau)


def shrink_spectrum(X, tau):
    """Replace each singular value s of X (..., N, D) by max(s - tau, 0)."""
    eigenvalues, U = torch.linalg.eigh(X.mT @ X)
    s = eigenvalues.clamp_min(0).sqrt()
    tau = tau[..., 0]
    factors = 1 - tau / torch.maximum(s, tau)
    return X @ (U * factors[..., None, :]) @ U.mT


def low_rank(line_4, x, K, v, mu, step):
    """Compute L from x, the keys of line 4."""
    if line_4 == "spectrum":
        return shrink_spectrum(x, 1 / mu)
    if line_4 in ("random", "constant"):
        generator = torch.Generator().manual_seed(step if line_4 == "random" else 0)
        noise = torch.randn(v.shape, generator=generator, dtype=v.dtype)
        return v.mean() + v.std() * noise
    values = K if line_4 == "keys" else v
    return F.scaled_dot_product_attention(x, x, values)


def pursuit(loop, k, v, n_iter=4):
    """Run a Loop on keys and values (B, H, N, D); return the S and the L of every step."""
    K = k - k.mean(-2, keepdim=True) if loop.keys == "centred" else k
    _, H, N, D = K.shape
    mu = 1 / (4 * K.abs().mean((-2, -1), keepdim=True))                 # Def. 1, with W = D
    if loop.threshold == "released":
        tau = LAMBDA * H * mu                                           # lambda mu, with W = C
    else:
        tau = 1 / (mu * math.sqrt(max(N, D)))                           # lambda / mu
    S = L = Z = torch.zeros_like(K)
    all_S = []
    all_L = []
    for step in range(n_iter):
        if loop.order == "L first":
            L = low_rank(loop.line_4, K - S + loop.sign * Z, K, v, mu, step)
        S = shrink(K - L + Z, tau)
        if loop.order == "S first":
            L = low_rank(loop.line_4, K - S + loop.sign * Z, K, v, mu, step)
        Z = Z + K - L - S
        all_S.append(S)
        all_L.append(L)
    return all_S, all_L


# --- corruptions and scores -----------------------------------------------------------------------

def corrupt(images, kind, patch, model, labels):
    """Corrupt patches of images (B, 3, S, S); return the images, and which patches, (B, P) bool.

    "colours": each of six patches has another random colour. "equal": all six patches of an
    image contain the same noise. The other kinds: see studies/patches.py. All kinds except
    "adversarial" change the same patches.
    """
    if kind not in ("colours", "equal"):
        return corrupt_patches(images, kind, patch, model=model, labels=labels)
    per_row = images.shape[-1] // patch
    index = torch.arange(len(images))
    hit = random_places(index, 6, per_row ** 2)
    if kind == "colours":
        numbers = uniform(index, 3 * per_row ** 2, 1, PATCH_VALUES)
        new = F.interpolate(numbers.view(-1, 3, per_row, per_row), scale_factor=patch)
    else:
        numbers = uniform(index, 3 * patch ** 2, 1, PATCH_VALUES)
        new = numbers.view(-1, 3, patch, patch).repeat(1, 1, per_row, per_row)
    return torch.where(patches_to_pixels(hit, per_row, patch), new, images), hit


def size(x):
    """Return the size of each patch token of x (B, H, N, D): (B, N - 1)."""
    return x.abs().sum((1, 3))[:, 1:]


def auc(score, hit):
    """Return the AUC, a mean over images. score, hit: (B, P). A tie counts half."""
    above = (score[:, :, None] > score[:, None]).float()
    above += 0.5 * (score[:, :, None] == score[:, None])
    pair = hit[:, :, None] & ~hit[:, None]
    return ((above * pair).sum((1, 2)) / pair.sum((1, 2))).mean().item()


def rank_correlation(a, b):
    """Return Spearman's correlation over the patches of an image, a mean over images."""
    a, b = (torch.from_numpy(scipy_stats().rankdata(x, axis=1)) for x in (a, b))
    a, b = (x - x.mean(1, keepdim=True) for x in (a, b))
    return F.cosine_similarity(a, b).mean().item()


def areas(images, k, v, hit, patch):
    """Return {score: AUC} of all loops after 1 and 4 steps, and of the controls."""
    found = {}
    for loop in (*LOOPS, RANDOM, CONSTANT):
        S, _ = pursuit(loop, k, v)
        for step in (1, 4):
            found[f"{loop.name}, step {step}"] = auc(size(S[step - 1]), hit)
    K = k - k.mean(-2, keepdim=True)
    _, L = pursuit(ROBUST_PCA, k, v, 1)
    scores = {
        "K - L, no threshold": size(K - L[0]),
        "Mahalanobis": mahalanobis(k)[:, 1:],
        "total variation": total_variation(images, patch),
        "size of the key": size(k),
    }
    return found | {name: auc(score, hit) for name, score in scores.items()}


def resized(k, hit, ratio):
    """Multiply the keys of hit patches; their mean size becomes `ratio` times the other keys'."""
    sizes = size(k)
    of_hit = (sizes * hit).sum(1) / hit.sum(1)
    of_rest = (sizes * ~hit).sum(1) / (~hit).sum(1)
    factor = torch.where(hit, (ratio * of_rest / of_hit)[:, None], 1)
    return k * F.pad(factor, (1, 0), value=1)[:, None, :, None]             # the class token stays


def cosine(a, b):
    """Return the cosine of a and b, each (B, H, N, D), a mean over images."""
    each = F.cosine_similarity(a.flatten(1), b.flatten(1))
    return each.mean().item()


def relative(x, k):
    """Return |x| / |k| (Euclidean norms of all entries of an image), a mean over images."""
    each = x.flatten(1).norm(dim=1) / k.flatten(1).norm(dim=1)
    return each.mean().item()


def over_steps(k, v):
    """Compare S, L and the residual of PAP after the steps of LONG: {measure: number}."""
    found = {}
    loops = {"": PAP, "random L: ": RANDOM, "constant random L: ": CONSTANT}
    for name, loop in loops.items():
        parts = zip(*pursuit(loop, k, v, max(LONG)))
        total = torch.zeros_like(k)                         # the sum of the residuals
        for step, (S, L) in enumerate(parts, 1):
            residual = k - S - L
            total = total + residual
            if step not in LONG:
                continue
            common_part = L.mean(-2, keepdim=True).expand_as(L)
            follows = rank_correlation(size(S), size(k))
            numbers = {
                "residual": relative(residual, k),
                "mean residual": relative(total / step, k),
                "cosine of S and K - L": cosine(S, k - L),
                "cosine of S and K": cosine(S, k),
                "share of L that all tokens have": relative(common_part, L) ** 2,
                "share of S that is not 0": (S != 0).float().mean().item(),
                "rank correlation of the sizes of S and K": follows,
            }
            for measure, x in numbers.items():
                found[f"{name}{measure}, step {step}"] = x
    return found


# --- measure --------------------------------------------------------------------------------------

@torch.no_grad()
def keys_and_values(model, images):
    """Return the keys and values of layer 0, (B, H, N, D) each."""
    layer, x = layer_inputs(model, images)[0]
    _, k, v = layer.project(x)
    return k, v


def measure(path, n, data_dir=None):
    """Measure a network: a row with {measure: number}, rounded to four digits."""
    model, checkpoint = probe.load_model(path)
    trained = checkpoint["args"]
    if data_dir:
        trained = trained | dict(data_dir=data_dir)
    checkpoint = checkpoint | dict(args=trained)
    images, labels = probe.load_test_images(checkpoint, model.config, n)
    patch = model.config.patch_size
    k, v = keys_and_values(model, images)
    values = {f"clean: {name}": x for name, x in over_steps(k[:64], v[:64]).items()}
    for kind in KINDS:
        x, hit = corrupt(images, kind, patch, model, labels)
        k, v = keys_and_values(model, x)
        for name, area in areas(x, k, v, hit, patch).items():
            values[f"{kind}: {name}"] = area
        sizes = size(k)
        values[f"{kind}: size of the key, corrupted : intact"] = (
            sizes[hit].mean() / sizes[~hit].mean()).item()
        if kind == "noise":
            S, _ = pursuit(PAP, k, v)
            follows = rank_correlation(size(S[3]), sizes)
            values["noise: rank correlation of the sizes of S and K, step 4"] = follows
            for ratio in RATIOS:
                key = resized(k, hit, ratio)
                values[f"noise: PAP, noisy keys resized to {ratio}"] = auc(
                    size(pursuit(PAP, key, v)[0][3]), hit)
                values[f"noise: robust PCA, noisy keys resized to {ratio}"] = auc(
                    size(pursuit(ROBUST_PCA, key, v, 1)[0][0]), hit)
    rounded = {name: round(x, 4) for name, x in values.items()}
    return dict(run=Path(path).name, data=trained["data"], attn=model.config.attn,
                seed=trained["seed"], epochs=trained["epochs"], step=checkpoint["step"],
                images=n, values=rounded, **common.origin(torch.device("cpu")))


# --- planned contrasts ----------------------------------------------------------------------------

NETWORKS = ("rpc", "symmetric", "softmax")              # on scenes, ten networks of each
ROBUST_RAW = ROBUST_PCA._replace(keys="raw")            # robust PCA's loop, the mean key stays
V_RAW = ROBUST_RAW._replace(line_4="values")
V_CENTRED = V_RAW._replace(keys="centred")
K_RAW = V_RAW._replace(line_4="keys")
REPAIRED = PAP._replace(line_4="spectrum")
# {contrast: (score, score that is subtracted)}
CONTRASTS = {
    "line": (f"{REPAIRED.name}, step 4", f"{PAP.name}, step 4"),
    "values": (f"{K_RAW.name}, step 1", f"{V_RAW.name}, step 1"),
    "centring": (f"{V_CENTRED.name}, step 1", f"{V_RAW.name}, step 1"),
}
SIZE = ("PAP, noisy keys resized to 1.4", "PAP, noisy keys resized to 0.6")
TITLES = {
    "line": "robust PCA's line in PAP's own loop, minus PAP",
    "values": "attention to K minus attention to V, in robust PCA's loop",
    "centring": "mean key subtracted or not: attention to V in robust PCA's loop",
    "size": "PAP with noisy keys of size 1.4, minus size 0.6",
}
BELOW = {                               # outcomes of significant differences below 0
    "line": "the line makes PAP worse",
    "values": "keys as values are worse than V",
    "centring": "centring makes it worse",
    "size": "S is smaller where keys are larger",
}


def group(rows, data, attn=None):
    """Return the values of the networks of a group: {measure: [one value per network]}."""
    found = {}
    for row in rows:
        if row["data"] == data and attn in (None, row["attn"]):
            for name, value in row["values"].items():
                found.setdefault(name, []).append(value)
    return found


def gap(values, kind, first, second):
    """Subtract a score's AUC from another's, network by network: a Difference."""
    pairs = zip(values[f"{kind}: {first}"], values[f"{kind}: {second}"])
    return paired_t([a - b for a, b in pairs])


def planned(rows):
    """Return the planned contrasts, noise: {(contrast, attn): (Difference, p after Holm)}.

    Holm's correction counts all ten tests of the plan. With two networks there is no p value.
    """
    found = {}
    for attn in NETWORKS:
        values = group(rows, "shapes", attn)
        for name, scores in CONTRASTS.items():
            found[name, attn] = gap(values, "noise", *scores)
    found["size", "rpc"] = gap(group(rows, "shapes", "rpc"), "noise", *SIZE)
    tested = {key: d.p for key, d in found.items() if d.n > 2}
    p = holm(dict.fromkeys(found, 1.0) | tested)
    return {key: (d, p[key] if key in tested else math.nan) for key, d in found.items()}


def closed(values, kind="noise"):
    """Return the share of a gap that centring closes, in %: a Difference over networks.

    The gap is shrinkage minus attention to V in robust PCA's loop, raw keys, one step. The share is
    a ratio of means, with an interval by the delta method.
    """
    low, centred, high = (torch.tensor(values[f"{kind}: {loop.name}, step 1"])
                          for loop in (V_RAW, V_CENTRED, ROBUST_RAW))
    way = centred - low
    whole = high - low
    ratio = way.mean() / whole.mean()
    return paired_t(100 * (ratio + (way - ratio * whole) / whole.mean()))


def outcome(contrast, d, p, values):
    """Return the outcome of a planned contrast, in the words of the plan."""
    if d.n < 3:
        return "exploratory"
    if not p < 0.05:
        return "no difference found"
    if d.mean < 0:
        return BELOW[contrast]
    if contrast == "line":
        short = gap(values, "noise", CONTRASTS["line"][0], f"{ROBUST_PCA.name}, step 4")
        if short.low > -0.05:
            return "the line repairs PAP"
        return "the line repairs PAP in part"
    if contrast == "values":
        area = paired_t(values[f"noise: {CONTRASTS['values'][0]}"])
        if area.low > 0.5:
            return "attention to K finds noise, attention to V does not"
        return "K is better than V, but does not find noise"
    if contrast == "centring":
        share = closed(values)
        if share.low > 50:
            return "centring closes most of the gap"
        if share.high < 50:
            return "centring closes less than half of the gap"
        return "centring closes about half of the gap"
    return "S follows the size of the key"


# --- tables ---------------------------------------------------------------------------------------

def mean_of(numbers, digits=2):
    """Format the mean of numbers with its 95 % interval over networks."""
    return show(paired_t(numbers), digits).replace("+", "")


def contrast_table(rows):
    """Format the planned contrasts: estimate, interval, p, power, outcome."""
    body = []
    for (contrast, attn), (d, p) in planned(rows).items():
        words = outcome(contrast, d, p, group(rows, "shapes", attn))
        body.append([TITLES[contrast], attn, d.n, show(d, 2, p < 0.05), show_p(p),
                     f"{detectable(d.error, d.df, 10):.2f}", words])
    titles = ["planned contrast, AUC for noise", "networks", "n", "difference", "p, Holm",
              "detectable", "outcome"]
    return common.table(body, titles)


GROUPS = {"rpc": ("shapes", "rpc"), "symmetric": ("shapes", "symmetric"),
          "softmax": ("shapes", "softmax"), "CIFAR-10": ("cifar10", None)}
CONTROLS = ("K - L, no threshold", "Mahalanobis", "total variation", "size of the key",
            f"{RANDOM.name}, step 4", f"{CONSTANT.name}, step 4")


def changed_once(loop):
    """List (title, Loop): the loop itself, and the loop with one part changed."""
    found = [("unchanged", loop)]
    for part, choices in CHOICES.items():
        for choice in choices:
            if choice != getattr(loop, part):
                found.append((f"{part}: {choice}", loop._replace(**{part: choice})))
    return found


def mean_table(rows, title, names):
    """Format the means of measures, {row title: measure}: one column per group."""
    body = []
    for row_title, name in names.items():
        cells = [mean_of(group(rows, *where)[name]) for where in GROUPS.values()]
        body.append([row_title, *cells])
    return common.table(body, [title, *GROUPS])


def control_table(rows, kind):
    """Format the AUC of the controls: one row per control, one column per group."""
    names = {score: f"{kind}: {score}" for score in CONTROLS}
    return mean_table(rows, f"AUC, {kind}", names)


def change_table(rows, kind="noise", step=4):
    """Format PAP and robust PCA with one part changed: one row per change, a column per group."""
    names = {}
    for title, base in ("PAP", PAP), ("robust PCA", ROBUST_PCA):
        for change, loop in changed_once(base):
            names[f"{title}, {change}"] = f"{kind}: {loop.name}, step {step}"
    return mean_table(rows, f"AUC, {kind}, step {step}", names)


def loop_table(rows, kind):
    """Format the mean AUC of all loops after one and after four steps."""
    body = []
    for loop in LOOPS:
        cells = []
        for where in GROUPS.values():
            values = group(rows, *where)
            means = []
            for step in (1, 4):
                numbers = torch.tensor(values[f"{kind}: {loop.name}, step {step}"])
                means.append(f"{numbers.mean():.2f}")
            cells.append(" / ".join(means))
        body.append([loop.name, *cells])
    return common.table(body, [f"AUC, {kind}, step 1 / step 4", *GROUPS])


def step_table(rows):
    """Format S, L and residuals of PAP on clean images, the resized keys, and the sizes of keys."""
    words = ("clean: ", "sizes of S and K", "resized to", "corrupted : intact")
    names = [name for name in group(rows, *GROUPS["rpc"]) if any(word in name for word in words)]
    return mean_table(rows, "mean (95 % interval)", {name: name for name in names})


def share_table(rows):
    """Format the share of the gap that centring closes: one row per group."""
    body = []
    for name, where in GROUPS.items():
        values = group(rows, *where)
        cells = [show(closed(values, kind)) for kind in KINDS]
        body.append([name, *cells])
    return common.table(body, ["share of the gap that centring closes, %", *KINDS])


def tables(rows):
    """Format every table of the study as Markdown."""
    fresh = [row for row in rows if row["seed"] > 0]
    parts = ["## Planned contrasts", contrast_table(rows), "The same without seed 0:",
             contrast_table(fresh), share_table(rows)]
    parts += ["## One part changed", change_table(rows), change_table(rows, step=1),
              change_table(rows, "adversarial")]
    parts += ["## Controls"] + [control_table(rows, kind) for kind in KINDS]
    parts += ["## S and L of PAP", step_table(rows)]
    parts += ["## All loops"] + [loop_table(rows, kind) for kind in KINDS]
    return "\n\n".join(parts)


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    flag = p.add_argument
    flag("--ckpt", nargs="+", default=[], help="measure these run folders or checkpoints")
    flag("--images", type=int, default=200, help="number of test images (default: 200)")
    flag("--data_dir", help="folder of the data set (default: as in training)")
    flag("--out", type=Path, help="append the rows of --ckpt to this file")
    args = p.parse_args(argv)
    for path in tqdm(args.ckpt, "networks", disable=None):
        row = measure(path, args.images, args.data_dir)
        if args.out:
            common.append_row(args.out, row)
        else:
            print(common.table(row["values"].items(), [row["run"], ""]))
    if not args.ckpt:
        print(tables(common.read_log(ROWS)))


if __name__ == "__main__":
    common.run(main)
