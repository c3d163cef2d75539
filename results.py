"""Rows of results.jsonl: their keys, their summaries, and the tables that compare networks.

eval_robust.py, train_seg.py --eval_only and train_lm.py --eval_only write one row per network and
measure. A row is a dict: what was measured (KEY), the numbers, and where they were computed.

    print(rows_table(read_rows("out/a")))          # one line per measure, one column per network
    print(seeds_table(read_rows("out/all")))       # mean and 95 % interval over seeds
"""

import base64
import hashlib
import json
import math
import re
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import common  # before torch, because it sets GOMP_SPINCOUNT for torch's threads
import numpy as np
import torch

from attention import default_settings
from common import InputError
from robust import metrics
from robust.corruptions import NAMES

# A stored row is used again only if all fields of KEY are equal. `settings` contains the settings
# of the measure; `fingerprint` is a hash of the files or pixels, and of their labels; `code` is a
# hash of the program. MODEL identifies the network.
MODEL = ("weights", "model_config", "size")
KEY = (*MODEL, "code", "data", "fingerprint", "name", "settings", "seed", "images")

# The numbers of a row that a table shows, and how it names them. top5: on ImageNet only.
SHOWN = {
    "top1": "top1", "top5": "top5", "aupr": "aupr", "mce": "mce",
    "pixel_accuracy": "pixel accuracy",
    "mean_accuracy": "mean accuracy",
    "mean_iou": "mean IoU",
    "segment": "segment-wise, no per cent",             # perplexities
    "sliding": "sliding, no per cent",
    "attacked": "attacked, no per cent",
    "attacked_unswapped": "attacked unswapped, no per cent",
    "clean_unswapped": "clean unswapped, no per cent",
}
DISTANCE = "median L2 distance in pixel values"         # of an attack without a budget
OWN_BUDGET = ("noise", "sld", "cw")     # attacks with their own budget, in rows without `own_eps`
# Flags of a training that do not change the kind of a network.
NOT_RECIPE = ("seed", "out_dir", "data_dir", "device", "download", "resume",
              "num_workers", "compile")


# --- rows -----------------------------------------------------------------------------------------

def row_key(row, fields=KEY):
    """Return the key of a row, or of its model with fields=MODEL: the fields' values as text."""
    text = json.dumps([row.get(name) for name in fields], sort_keys=True)
    return text.replace("Infinity", '"inf"')              # as in results.jsonl


def read_rows(path):
    """Return the rows of a results.jsonl: of the file, or of a folder and its subfolder robust/.

    InputError if there is no row.
    """
    path = Path(path)
    files = [path]
    if path.is_dir():
        files = [path / "results.jsonl", path / "robust" / "results.jsonl"]
    rows = []
    for file in files:
        rows += common.read_log(file)
    if not rows:
        raise InputError(f"{path}: no rows, expected results.jsonl or the folder that "
                         "contains it")
    for row in rows:
        if not {"weights", "name", "settings"} <= row.keys():
            raise InputError(f"{path}: a row has no weights, name or settings, so it "
                             "is no row of an evaluation; expected results.jsonl")
    return rows


def pack(right):
    """Return (n,) bool, True for a correct answer, as text: one bit per image, in base64."""
    bits = np.packbits(right.cpu().numpy())
    return base64.b64encode(bits).decode()


def unpack(text, n):
    """Return (n,) bool from the text that `pack` returned for n images."""
    packed = np.frombuffer(base64.b64decode(text), np.uint8)
    bits = np.unpackbits(packed, count=n)
    return torch.from_numpy(bits).bool()


def add_result(args, model, checkpoint, began, **numbers):
    """Append a row on the model of --eval_only to results.jsonl, in --out_dir or beside the model.

    began: the time.perf_counter() at which the measurement of `numbers` began.
    """
    path = Path(args.eval_only)
    device = next(model.parameters()).device
    trained = checkpoint["args"]
    kind = kind_of(model.config)
    seconds = round(time.perf_counter() - began, 2)
    row = dict(model=f"{kind}, seed {trained['seed']}", kind=kind, checkpoint=str(path),
               weights=common.checksum(model), model_config=asdict(model.config),
               recipe=recipe(trained), task=checkpoint["task"], **numbers)
    row |= dict(seed=args.seed, seconds=seconds)
    row |= common.origin(device)
    beside = path.parent if path.suffix == ".pt" else path
    folder = Path(args.out_dir or beside)
    folder.mkdir(parents=True, exist_ok=True)
    common.append_row(folder / "results.jsonl", row)


# --- words ----------------------------------------------------------------------------------------

def kind_of(config):
    """Describe an attention: softmax, fan symmetric, rpc 4iter/layer0, rpc 2iter/all-layer."""
    kind = getattr(config, "family", "") + config.attn    # the family of a FAN is "fan "
    if not config.rpc_layers:
        return kind
    layers = "layer" + ",".join(map(str, config.rpc_layers))
    if len(config.rpc_layers) == config.depth:
        layers = "all-layer"
    text = f"{kind} {config.pap['n_iter']}iter/{layers}"
    usual = default_settings(config.attn)
    for name in ("lambd", "form"):
        if config.pap[name] != usual[name]:
            text += f", {name} {config.pap[name]}"
    return text


def recipe(trained):
    """Return a hash of a training's flags without its seed, "" for networks of other programs.

    Networks with the same recipe differ in their seed only. A path can contain the seed, for
    example out/rpc_s3/last.pt of --init_from; there the seed's number does not count.
    """
    if not trained:
        return ""
    seed = trained.get("seed")
    flags = {name: value for name, value in trained.items() if name not in NOT_RECIPE}
    text = json.dumps(flags, sort_keys=True, default=str)
    text = re.sub(rf"(?<=[^A-Za-z0-9]s){seed}(?![0-9])", "SEED", text)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def measure_text(name, settings):
    """Return a measure in words: pgd steps=20 eps=2/255."""
    words = [name]
    for setting, value in settings.items():
        if isinstance(value, list):
            value = ",".join(map(str, value))
        elif isinstance(value, float):
            text = f"{value:g}"
            levels = 255 * value
            whole = 0 < levels < 255 and abs(levels - round(levels)) < 1e-9
            if setting in ("eps", "alpha") and whole:
                text = f"{round(levels)}/255"             # a change of pixel values
            elif float(text) != value:
                text = str(value)                         # :g has rounded
            value = text
        words.append(f"{setting}={value}")
    return " ".join(words)


# --- summaries of several rows --------------------------------------------------------------------

def mean_rows(rows):
    """Yield one row per model with all 15 types of ImageNet-C: the mean over these types.

    For networks with ImageNet's 1,000 classes, at 224 px and with all five severities, the row also
    has mce, the mean error relative to AlexNet, which has 100 %. There is no mean if a type has
    several rows, as from two --corrupted_dir.
    """
    groups = {}                                           # {key without the type: {type: rows}}
    for row in rows:
        if row["name"] == "corruptions" and row["settings"]["type"] in NAMES:
            shared = row["settings"] | dict(type="mean")
            shared.pop("frost", None)
            if "released" in shared:                      # a fingerprint, which differs per type
                shared["released"] = True
            mean_row = row | dict(settings=shared)
            types = groups.setdefault(row_key(mean_row), {})
            types.setdefault(row["settings"]["type"], []).append(mean_row)
    for types in groups.values():
        if len(types) < len(NAMES) or any(len(group) > 1 for group in types.values()):
            continue
        first = types["fog"][0]                           # its numbers are replaced below
        mean = {}
        for field in SHOWN:
            if field in first:
                means = [np.mean(types[name][0][field]) for name in NAMES]
                mean[field] = float(np.mean(means))
        alexnets = first.get("data") == "imagenet" and first.get("classes") == 1000
        full_size = first.get("size") == 224
        severities = first["settings"].get("severities")
        if alexnets and full_size and severities == [1, 2, 3, 4, 5]:
            errors = {name: 1 - np.mean(types[name][0]["top1"]) / 100 for name in NAMES}
            mean["mce"] = metrics.mean_corruption_error(errors)
        yield first | mean


def has_shared_budget(row):
    """Return whether a row belongs to an attack that runs for each budget of --eps."""
    own_eps = row.get("own_eps", row["name"] in OWN_BUDGET)
    return not own_eps and isinstance(row["settings"].get("eps"), float)


def shared_settings(row):
    """Return the settings that the attacks of one worst case share: budget and conditions."""
    settings = row["settings"]
    return {name: settings[name] for name in ("eps", "conditions") if name in settings}


def worst_cases(rows):
    """Yield rows with the worst case over attacks: an image must be right under every attack.

    There is one row per model and budget with attacks of at least two names. Of each name, the row
    with the most images counts. Attacks can have different numbers of images in the same order, so
    the worst case uses the images that all attacks have: `images`.
    """
    groups = {}                                           # {key without the attack: {name: rows}}
    for row in rows:
        if has_shared_budget(row) and "right" in row:
            shared = shared_settings(row)
            worst = row | dict(name="worst", settings=shared, images=None)    # any number of images
            attacks = groups.setdefault(row_key(worst), {})
            attacks.setdefault(row["name"], []).append(row)
    for attacks in groups.values():
        if len(attacks) < 2:
            continue
        complete = []
        for group in attacks.values():
            most = max(row["images"] for row in group)
            complete += [row for row in group if row["images"] == most]
        n = min(row["images"] for row in complete)
        right = [unpack(row["right"], row["images"])[:n] for row in complete]
        under_all = torch.stack(right).all(0)
        top1 = 100 * under_all.double().mean().item()
        first = complete[0]
        settings = shared_settings(first) | dict(of=",".join(attacks))
        fields = (*KEY, "model", "checkpoint", "recipe")
        row = {name: first.get(name) for name in fields}
        yield row | dict(name="worst", settings=settings, images=n, top1=top1)


# --- the table of networks ------------------------------------------------------------------------

class Cell(NamedTuple):
    """A number of a table."""
    network: str                        # the network's key
    text: str                           # the measure in words
    images: int
    fingerprint: str
    code: str
    value: float                        # for several severities, their mean
    digits: int                         # after the point


def all_cells(rows):
    """Return the Cells of rows and of their summaries. Equal keys: the last row counts."""
    rows = list({row_key(row): row for row in rows}.values())
    if len(rows) > 1:
        rows = rows + list(mean_rows(rows)) + list(worst_cases(rows))
    sources = {(row.get("data"), row.get("seed")) for row in rows}
    cells = []
    for row in rows:
        text = measure_text(row["name"], row["settings"])
        if len(sources) > 1:                              # then lines name both
            text = f"{row.get('data')}, seed {row.get('seed')}: {text}"
        place = (row.get("images"), row.get("fingerprint"), row.get("code"))
        for field, name in SHOWN.items():
            if field in row and (field != "top5" or row.get("data") == "imagenet"):
                value = float(np.mean(row[field]))
                cells.append(Cell(row_key(row, MODEL), f"{text}, "
                                                       f"{name}", *place, value, 2))
        if "median_l2" in row and row["settings"].get("eps") is None:
            value = row["median_l2"]
            cells.append(Cell(row_key(row, MODEL), f"{text}, "
                                                   f"{DISTANCE}", *place, value, 4))
    return cells


def rows_table(rows):
    """Return rows as a Markdown table: one line per measure, one column per model.

    Networks of one name also show their checkpoint. A number for several severities is their mean.
    A line names its data if another line has the same measure on other data. If a network has two
    numbers in one line, from two versions of the code, the line is printed once per version.
    """
    networks = {row_key(row, MODEL): row for row in rows}
    names = Counter(row["model"] for row in networks.values())
    titles = []
    for row in networks.values():
        title = row["model"]
        if names[title] > 1:
            title += f", {row['checkpoint']}"
        titles.append(title)
    lines = {}                          # {(measure, images, fingerprint): {code: {network: cell}}}
    for cell in all_cells(rows):
        versions = lines.setdefault((cell.text, cell.images, cell.fingerprint), {})
        text = f"{cell.value:.{cell.digits}f}"
        versions.setdefault(cell.code, {})[cell.network] = text
    alike = Counter((text, images) for text, images, _ in lines)
    body = []
    for (text, images, fingerprint), versions in lines.items():
        if alike[text, images] > 1:
            text += f", data {fingerprint}"
        merged = {}
        for cells in versions.values():
            merged |= cells
        if len(merged) == sum(map(len, versions.values())):         # one number per network
            versions = {None: merged}
        for code, cells in versions.items():
            name = text if len(versions) == 1 else f"{text}, code {code or 'unknown'}"
            numbers = [cells.get(network, "") for network in networks]
            body.append([name, images, *numbers])
    return common.table(body, ["measure, in per cent", "images", *titles])


# --- the table over seeds -------------------------------------------------------------------------

def t_quantile(df):
    """Return the t for which |T| <= t has a probability of 95 %. T: Student's t, df >= 1.

    With t = sqrt(df) tan(u), this probability is the integral of cos(x)^(df - 1) from 0 to u, times
    2 / B(1/2, df/2). Bisection finds u; Gauss-Legendre nodes integrate.
    """
    nodes, weights = np.polynomial.legendre.leggauss(64)            # for an integral from -1 to 1
    log_beta = math.lgamma(0.5) + math.lgamma(df / 2) - math.lgamma((df + 1) / 2)
    low = 0.0
    high = math.atan(20 / math.sqrt(df))                            # 12.7 is the largest t, at df 1
    for _ in range(60):
        u = (low + high) / 2
        x = u * (nodes + 1) / 2
        integral = u / 2 * float(weights @ np.cos(x) ** (df - 1))
        if 2 * integral / math.exp(log_beta) < 0.95:
            low = u
        else:
            high = u
    return math.sqrt(df) * math.tan(low)


class Estimate(NamedTuple):
    """A mean, the half-width of its 95 % interval (None for one seed), and how it was computed."""
    mean: float
    half: float | None
    note: str


def mean_over_seeds(values):
    """Return the Estimate of a kind of network. values: {seed: number}."""
    numbers = np.array(list(values.values()))
    n = len(numbers)
    half = None
    if n > 1:
        half = t_quantile(n - 1) * numbers.std(ddof=1) / math.sqrt(n)
    return Estimate(numbers.mean(), half, f"n {n}")


def difference_of_kinds(first, second):
    """Return the Estimate of mean(second) - mean(first). first, second: {seed: number}.

    Equal seeds are paired. Otherwise the interval is Welch's, with the Welch-Satterthwaite df.
    """
    if first.keys() == second.keys():
        paired = {seed: second[seed] - first[seed] for seed in first}
        return mean_over_seeds(paired)._replace(note="paired")
    a = np.array(list(first.values()))
    b = np.array(list(second.values()))
    half = None
    if min(len(a), len(b)) > 1:
        va = a.var(ddof=1) / len(a)
        vb = b.var(ddof=1) / len(b)
        half = 0.0
        if va + vb > 0:
            df = (va + vb) ** 2 / (va ** 2 / (len(a) - 1) + vb ** 2 / (len(b) - 1))
            half = t_quantile(df) * math.sqrt(va + vb)
    return Estimate(b.mean() - a.mean(), half, "unpaired")


def estimate_text(estimate, digits, sign=""):
    """Return an Estimate in words: 96.80 ± 0.41, n 3. sign: "+" also marks positive numbers."""
    text = f"{estimate.mean:{sign}.{digits}f}"
    if estimate.half is not None:
        text += f" ± {estimate.half:.{digits}f}"
    return f"{text}, {estimate.note}"


class Kind(NamedTuple):
    """Networks that differ in their seed only."""
    title: str
    networks: dict                      # {seed: the network's key}


def kinds_of_network(rows):
    """Return the Kinds of the networks whose seed is known, and lines on networks left out."""
    found = {}                          # {key of the kind: {seed: {network's key: row}}}
    for row in rows:
        _, _, seed = row["model"].rpartition(", seed ")
        if seed.isdecimal():
            # Rows of earlier versions have no recipe: their names differ in the seed only.
            folder = re.sub(rf"s{seed}(?![0-9])", "", row["checkpoint"])
            kind = row | dict(recipe=row.get("recipe") or folder)
            key = row_key(kind, ("model_config", "size", "task", "recipe"))
            seeds = found.setdefault(key, {})
            seeds.setdefault(int(seed), {})[row_key(row, MODEL)] = row
    kinds = []
    notes = []
    for seeds in found.values():
        networks_of_seed = next(iter(seeds.values()))
        row = next(iter(networks_of_seed.values()))
        title = row["model"].rpartition(", seed ")[0]
        networks = {}
        for seed, group in seeds.items():
            networks[seed], *others = group
            if others:
                notes.append(f"{title}: {len(group)} networks have seed {seed}")
                break
        else:
            kinds.append((title, row["checkpoint"], networks))
    titles = Counter(title for title, _, _ in kinds)
    named = []
    for title, checkpoint, networks in kinds:
        if titles[title] > 1:
            title = f"{title} like {checkpoint}"
        named.append(Kind(title, networks))
    return named, notes


def comparable_lines(cells, networks):
    """Return {(measure, images, digits): {network: value}}, and lines on measures left out.

    A line compares networks on the same images. If the networks that have a measure were measured
    on different images, or one of them twice, no line is complete, and the measure is left out.
    """
    measures = {}                       # {measure: {(images, fingerprint): cells}}
    for cell in cells:
        if cell.network in networks:
            data = measures.setdefault((cell.text, cell.digits), {})
            data.setdefault((cell.images, cell.fingerprint), []).append(cell)
    lines = {}
    notes = []
    for (text, digits), data in measures.items():
        everyone = set()
        for group in data.values():
            everyone |= {cell.network for cell in group}
        complete = []
        for (images, _), group in data.items():
            values = {cell.network: cell.value for cell in group}
            if len(values) == len(group) == len(everyone):
                complete.append((images, values))
        for number, (images, values) in enumerate(complete, 1):
            name = text if len(complete) == 1 else f"{text}, data {number}"
            lines[name, images, digits] = values
        if not complete:
            sizes = ", ".join(sorted({str(images) for images, _ in data}))
            notes.append(f"{text}: the networks have rows on different images ({sizes} "
                         "images) or of different code")
    return lines, notes


def seeds_table(rows):
    """Return the table over seeds with its explanation; "" if no networks differ in the seed only.

    For each kind of network, the table has the mean over seeds, the half-width of its 95 % interval
    and the number of seeds; for each kind but the first, also the difference from the first kind.
    """
    kinds, notes = kinds_of_network(rows)
    if not any(len(kind.networks) > 1 for kind in kinds):
        return ""
    networks = set()
    for kind in kinds:
        networks |= set(kind.networks.values())
    lines, more = comparable_lines(all_cells(rows), networks)
    notes += more
    first, *others = kinds
    header = ["mean over seeds", "images"]
    header += [kind.title for kind in kinds]
    header += [f"{kind.title} minus {first.title}" for kind in others]
    body = []
    for (text, images, digits), values in lines.items():
        by_kind = []
        line = [text, images]
        for kind in kinds:
            own = {seed: values[network] for seed, network in kind.networks.items()
                   if network in values}
            by_kind.append(own)
            cell = ""
            if own:
                cell = estimate_text(mean_over_seeds(own), digits)
            line.append(cell)
        for own in by_kind[1:]:
            cell = ""
            if own and by_kind[0]:
                difference = difference_of_kinds(by_kind[0], own)
                cell = estimate_text(difference, digits, "+")
            line.append(cell)
        body.append(line)
    text = "" if not body else common.table(body, header) + "\n"
    text += ("±: half-width of the 95 % interval over seeds (Student's t). n: number "
             "of seeds; one seed has no interval.\nDifferences are paired if both "
             "kinds have the same seeds, else unpaired (Welch).")
    for note in notes:
        text += f"\nleft out: {note}"
    return text
