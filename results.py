"""Rows of results.jsonl: their keys, their summaries, and the tables that compare networks.

eval_robust.py, train_seg.py --eval_only and train_lm.py --eval_only write one row per network and
measure. A row is a dict: what was measured (KEY_FIELDS), the numbers, and where they were computed.

    print(rows_table(read_rows("out/a")))          # one line per measure, one column per network
    print(seeds_table(read_rows("out/all")))       # mean and 95 % interval over seeds
"""

import base64
import functools
import hashlib
import json
import math
import os
import re
import sys
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

# A stored row is used again only if all its KEY_FIELDS are equal. `settings` contains the settings
# of the measure; `fingerprint` is a hash of the files or pixels, and of their labels; `code` is a
# hash of the program. The NETWORK_FIELDS identify the network.
NETWORK_FIELDS = ("weights", "model_config", "size")
KEY_FIELDS = (*NETWORK_FIELDS, "code", "data", "fingerprint", "name", "settings", "seed", "images")

# The fields of a row that are numbers of a table, and their names there. Perplexities are no per
# cent, but all other numbers are.
SHOWN = {
    "top1": "top1",
    "top5": "top5",                                     # on ImageNet only
    "aupr": "aupr",
    "mce": "mce",
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
SHARED_SETTINGS = ("eps", "conditions")                 # of all attacks in a worst case
# Attacks with their own budget, for rows of earlier versions, which have no field own_eps.
OWN_BUDGET = ("noise", "sld", "cw")
# Attacks that clip the normalised images to [0, 1] with --preset paper.
PAPER_CLIPS = ("square", "autoattack", "adaptive_autoattack")
PROJECT = Path(__file__).resolve().parent
# Flags of a training that do not change the kind of a network.
NOT_RECIPE = ("seed", "out_dir", "data_dir", "device", "download", "resume",
              "num_workers", "compile")


# --- rows -----------------------------------------------------------------------------------------

def row_key(row, fields=KEY_FIELDS):
    """Return the key of a row: the values of the fields as text."""
    return common.to_json([row.get(name) for name in fields], sort_keys=True)


def network_key(row):
    """Return the key of the network of a row."""
    return row_key(row, NETWORK_FIELDS)


# A path without symbolic links. Thousands of modules are loaded; each path is looked up once.
real_path = functools.cache(os.path.realpath)


def loaded_modules(folder):
    """Return {name: path} of the loaded modules below a folder, without installed libraries.

    A package without __init__.py has the path of its folder.
    """
    paths = {}
    start = os.path.join(folder, "")                    # ends with "/"
    for name, module in list(sys.modules.items()):
        place = getattr(module, "__file__", None)
        if place is None and hasattr(module, "__path__"):
            place = next(iter(module.__path__), None)
        if place is None:
            continue
        path = real_path(os.path.join(os.getcwd(), place))
        if path.startswith(start):
            path = Path(path)
            if "site-packages" not in path.parts:
                paths[name] = path
    return paths


def code_hash(*files):
    """Hash the sources of all loaded modules of the project, and of more files.

    A row belongs to the code that computed it: after an edit, rows are computed again.
    """
    sources = set(loaded_modules(PROJECT).values()) | set(files)
    texts = [(path.name, path.read_bytes()) for path in sources if path.is_file()]
    digest = hashlib.sha256()
    for name, text in sorted(texts):
        digest.update(f"{name} {len(text)} ".encode() + text)
    return digest.hexdigest()[:16]


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
    """Return `right`, (n,) bool, as text: one bit per image, in base64."""
    bits = np.packbits(right.cpu().numpy())
    return base64.b64encode(bits).decode()


def unpack(text, n):
    """Return (n,) bool from the text that `pack` returned for n images."""
    packed = np.frombuffer(base64.b64decode(text), np.uint8)
    bits = np.unpackbits(packed, count=n)
    return torch.from_numpy(bits).bool()


def add_result(args, model, checkpoint, began, *, fingerprint, **fields):
    """Append a row on the model of --eval_only to results.jsonl, in --out_dir or beside the model.

    began: the time.perf_counter() at which the measurement began. fingerprint: a hash of the test
    data. fields: the other fields of the row: name, settings, images, the numbers, ...
    """
    path = Path(args.eval_only)
    device = next(model.parameters()).device
    trained = checkpoint["args"]
    kind = kind_of(model.config)
    seconds = round(time.perf_counter() - began, 2)
    row = dict(model=f"{kind}, seed {trained['seed']}", kind=kind, checkpoint=str(path),
               weights=common.checksum(model), model_config=asdict(model.config),
               recipe=recipe(trained, checkpoint.get("fingerprint")),
               task=checkpoint["task"], **fields)
    row |= dict(fingerprint=fingerprint, code=code_hash(), seed=args.seed, seconds=seconds)
    row |= common.origin(device)
    beside = path if path.is_dir() else path.parent
    folder = Path(args.out_dir or beside)
    folder.mkdir(parents=True, exist_ok=True)
    common.append_row(folder / "results.jsonl", row)


# --- words ----------------------------------------------------------------------------------------

def kind_of(config):
    """Describe a network's attention in words, for example softmax or rpc 4iter/layer0."""
    encoder = getattr(config, "encoder_config", config)   # only a Segmenter has it
    text = getattr(encoder, "family", "") + config.attn   # the family of a FAN is "fan "
    if config.rpc_layers:
        layers = "layer" + ",".join(map(str, config.rpc_layers))
        if len(config.rpc_layers) == config.depth:
            layers = "all-layer"
        text += f" {config.pap['n_iter']}iter/{layers}"
        # mu_over="seen" is a language model's default; other networks have no mu_over.
        usual = default_settings(config.attn) | dict(mu_over="seen")
        for name, value in config.pap.items():
            if name != "n_iter" and value != usual.get(name):
                text += f", {name} {value}"
    decoder = getattr(config, "decoder_attn", config.attn)
    if decoder != config.attn:
        text += f", decoder {decoder}"
    return text


def without_seed(text, seed):
    """Replace s3 by sSEED in a text, if 3 is the seed: out/rpc_s3 becomes out/rpc_sSEED."""
    return re.sub(rf"(?<![A-Za-z0-9])s{seed}(?![0-9])", "sSEED", text)


def recipe(trained, fingerprint):
    """Return a hash of a training's flags without its seed, "" for networks of other programs.

    trained: the flags. fingerprint: of the training's data. Networks with the same recipe differ
    only in their seed. The path of --init_from may contain the seed, too.
    """
    if not trained:
        return ""
    flags = {name: value for name, value in trained.items() if name not in NOT_RECIPE}
    if trained.get("data_dir"):
        flags["fingerprint"] = fingerprint      # the files count, not the path of their folder
    for name, value in flags.items():
        # The same value is an int as a default, 1, and a float as a typed flag, 1.0.
        if isinstance(value, float) and value.is_integer():
            flags[name] = int(value)
    text = json.dumps(flags, sort_keys=True, default=str)
    text = without_seed(text, trained.get("seed"))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def setting_text(name, value):
    """Return the value of a setting in words.

    eps and alpha are written as k/255 if k is a whole number: 2/255.
    """
    if isinstance(value, list):
        return ",".join(map(str, value))
    if not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    levels = round(255 * value)
    if name in ("eps", "alpha") and 0 < levels < 255 and math.isclose(levels, 255 * value):
        return f"{levels}/255"
    return str(value).removesuffix(".0")


def measure_text(name, settings):
    """Return a measure in words: pgd steps=20 eps=2/255."""
    words = [f"{setting}={setting_text(setting, value)}" for setting, value in settings.items()]
    return " ".join([name, *words])


# --- summaries of several rows --------------------------------------------------------------------

def mean_value(value):
    """Return the mean of a row's number, or of its list of numbers, as a float.

    A row in a file has "inf", "-inf" and "nan" for numbers that are not finite.
    """
    return float(np.mean(np.array(value, dtype=float)))


def mean_settings(row):
    """Return the settings of the mean over the types of corruption, to which a row belongs."""
    settings = row["settings"] | dict(type="mean")
    settings.pop("frost", None)                           # a hash, in the rows of one type only
    if "released" in settings:
        settings["released"] = True                       # a hash, which differs per type
    return settings


def mean_rows(rows):
    """Yield one row per model with all 15 types of ImageNet-C: the mean over these types.

    For networks with ImageNet's 1,000 classes, at 224 px and with all five severities, the row also
    has mce, the mean error relative to AlexNet, which has 100 %. There is no mean if a type has
    several rows, as from two --corrupted_dir.
    """
    groups = {}                                           # {key without the type: rows}
    for row in rows:
        if row["name"] == "corruptions" and row["settings"]["type"] in NAMES:
            key = row_key(row | dict(settings=mean_settings(row)))
            groups.setdefault(key, []).append(row)
    for group in groups.values():
        types = [row["settings"]["type"] for row in group]
        if sorted(types) != sorted(NAMES):
            continue
        row_of = dict(zip(types, group))
        row = row_of[NAMES[0]] | dict(settings=mean_settings(group[0]))
        for field in SHOWN:
            if field in row:
                over_severities = [mean_value(row_of[name][field]) for name in NAMES]   # per type
                row[field] = mean_value(over_severities)
        comparable = (row.get("data") == "imagenet" and row.get("classes") == 1000
                      and row.get("size") == 224
                      and row["settings"].get("severities") == [1, 2, 3, 4, 5])
        if comparable:                                    # with AlexNet's errors
            errors = {name: 1 - mean_value(row_of[name]["top1"]) / 100 for name in NAMES}
            row["mce"] = metrics.mean_corruption_error(errors)
        yield row


def has_shared_budget(row):
    """Return whether a row belongs to an attack that runs for each budget of --eps."""
    own_eps = row.get("own_eps", row["name"] in OWN_BUDGET)
    return not own_eps and isinstance(row["settings"].get("eps"), float)


def worst_template(row):
    """Return the row of the worst case to which an attack's row belongs, without its numbers."""
    settings = row["settings"]
    shared = {name: settings[name] for name in SHARED_SETTINGS if name in settings}
    fields = (*KEY_FIELDS, "model", "checkpoint", "recipe")
    worst = {name: row.get(name) for name in fields}
    # None: attacks on fewer or more images belong to the same worst case.
    return worst | dict(name="worst", settings=shared, images=None)


def attack_text(row):
    """Return an attack in words, without the settings that a worst case shares: pgd steps=20."""
    settings = row["settings"]
    own = {name: settings[name] for name in settings if name not in SHARED_SETTINGS}
    return measure_text(row["name"], own)


def worst_cases(rows):
    """Yield rows with the worst case over attacks: an image must be right under every attack.

    There is one row per model and budget with at least two attacks. The same attack with other
    settings is another attack. Per attack, only the row with the most images counts. The worst case
    is over the images that all attacks share; the field images is their number.
    """
    groups = {}                                           # {key of the worst case: rows of attacks}
    for row in rows:
        if has_shared_budget(row) and "right" in row:
            groups.setdefault(row_key(worst_template(row)), []).append(row)
    for group in groups.values():
        largest = {}                                      # {attack: its row with the most images}
        for row in group:
            attack = attack_text(row)
            if attack not in largest or row["images"] > largest[attack]["images"]:
                largest[attack] = row
        if len(largest) < 2:
            continue
        n = min(row["images"] for row in largest.values())
        right = [unpack(row["right"], row["images"])[:n] for row in largest.values()]
        under_all = torch.stack(right).all(0)
        worst = worst_template(group[0])
        attacks = ",".join(sorted(largest))               # the order of the rows does not matter
        settings = worst["settings"] | dict(of=attacks)
        top1 = 100 * under_all.double().mean().item()
        yield worst | dict(settings=settings, images=n, top1=top1)


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
    rows = rows + list(mean_rows(rows)) + list(worst_cases(rows))
    sources = {(row.get("data"), row.get("seed")) for row in rows}
    cells = []
    for row in rows:
        text = measure_text(row["name"], row["settings"])
        if len(sources) > 1:                              # then each line names data set and seed
            text = f"{row.get('data')}, seed {row.get('seed')}: {text}"
        numbers = []                                      # (name, value, digits)
        for field, name in SHOWN.items():
            if field in row and (field != "top5" or row.get("data") == "imagenet"):
                numbers.append((name, mean_value(row[field]), 2))
        if "median_l2" in row and row["settings"].get("eps") is None:
            numbers.append((DISTANCE, mean_value(row["median_l2"]), 4))
        for name, value, digits in numbers:
            cell = Cell(network=network_key(row), text=f"{text}, {name}",
                        images=row.get("images"), fingerprint=row.get("fingerprint"),
                        code=row.get("code"), value=value, digits=digits)
            cells.append(cell)
    return cells


def by_images(cells):
    """Group Cells by their images: {(measure, images, fingerprint): cells}.

    The measures have the order of their first cells; groups of one measure are neighbours.
    """
    measures = list(dict.fromkeys(cell.text for cell in cells))     # each one once

    def number_of_measure(cell):
        return measures.index(cell.text)

    groups = {}
    for cell in sorted(cells, key=number_of_measure):     # cells of one measure keep their order
        groups.setdefault((cell.text, cell.images, cell.fingerprint), []).append(cell)
    return groups


def rows_table(rows):
    """Return rows as a Markdown table: one line per measure, one column per network."""
    networks = {network_key(row): row for row in rows}
    names = Counter(row["model"] for row in networks.values())
    titles = []
    for row in networks.values():
        title = row["model"]
        if names[title] > 1:                              # networks with the same name
            title += f", {row['checkpoint']}"
        titles.append(title)
    groups = by_images(all_cells(rows))
    counts = Counter((text, images) for text, images, _ in groups)
    body = []
    for (text, images, fingerprint), cells in groups.items():
        # If a measure has rows on two sets of images of equal size, each line names its data.
        if counts[text, images] > 1:
            text += f", data {fingerprint or 'unknown'}"
        # If a network has two numbers, from two versions of the code, each version has a line.
        has_versions = len({cell.network for cell in cells}) < len(cells)
        lines = {}                                        # {name: {network: number as text}}
        for cell in cells:
            name = text
            if has_versions:
                name += f", code {cell.code or 'unknown'}"
            numbers = lines.setdefault(name, {})
            numbers[cell.network] = f"{cell.value:.{cell.digits}f}"
        for name, numbers in lines.items():
            columns = [numbers.get(network, "") for network in networks]
            body.append([name, images, *columns])
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
    """Return the Estimate of a kind of network, None without a number. values: {seed: number}."""
    if not values:
        return None
    numbers = np.array(list(values.values()))
    n = len(numbers)
    half = None
    if n > 1:
        half = t_quantile(n - 1) * numbers.std(ddof=1) / math.sqrt(n)
    return Estimate(numbers.mean(), half, f"n {n}")


def difference_of_kinds(first, second):
    """Return the Estimate of mean(second) - mean(first). first, second: {seed: number}.

    Equal seeds are paired. Otherwise the interval is Welch's, with the Welch-Satterthwaite df. None
    if one kind has no number.
    """
    if not first or not second:
        return None
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
    """Return an Estimate in words: 96.80 ± 0.41, n 3. sign: "+" gives positive numbers a sign."""
    if estimate is None:
        return ""
    text = f"{estimate.mean:{sign}.{digits}f}"
    if estimate.half is not None:
        text += f" ± {estimate.half:.{digits}f}"
    return f"{text}, {estimate.note}"


class Kind(NamedTuple):
    """Networks that differ only in their seed."""
    title: str
    checkpoint: str                     # of the first network
    networks: dict                      # {seed: the network's key}


def kinds_of_network(rows):
    """Return the Kinds of the networks whose seed is known, and lines on networks left out."""
    first_row = {}                      # {key of the kind: (title, checkpoint) of its first row}
    seeds_of_kind = {}                  # {key of the kind: {network's key: seed}}
    for row in rows:
        title, _, seed = row["model"].rpartition(", seed ")
        if seed.isdecimal():
            # Rows of earlier versions have no recipe: their checkpoints differ only in the seed.
            path = without_seed(row["checkpoint"], seed)
            with_recipe = row | dict(recipe=row.get("recipe") or path)
            key = row_key(with_recipe, ("model_config", "size", "task", "recipe"))
            first_row.setdefault(key, (title, row["checkpoint"]))
            seeds_of_kind.setdefault(key, {})[network_key(row)] = int(seed)
    kinds = []
    notes = []
    for key, seed_of in seeds_of_kind.items():
        title, checkpoint = first_row[key]
        # {seed: network}. It is shorter than seed_of if two networks have the same seed.
        networks = {seed: network for network, seed in seed_of.items()}
        if len(networks) == len(seed_of):
            kinds.append(Kind(title, checkpoint, networks))
        else:
            seed, count = Counter(seed_of.values()).most_common(1)[0]
            notes.append(f"{title}: {count} networks have seed {seed}")
    titles = Counter(kind.title for kind in kinds)
    for i, kind in enumerate(kinds):
        if titles[kind.title] > 1:
            kinds[i] = kind._replace(title=f"{kind.title} like {kind.checkpoint}")
    return kinds, notes


def comparable_lines(cells):
    """Return {(measure, images): cells}, and lines on measures left out.

    A line is complete if each network that has this measure has exactly one number on these images.
    A measure without a complete line is left out.
    """
    measured = {}                       # {measure: the networks that have it}
    for cell in cells:
        measured.setdefault(cell.text, set()).add(cell.network)
    complete = {text: [] for text in measured}          # {measure: [(images, cells)]}
    for (text, images, _), group in by_images(cells).items():
        networks = {cell.network for cell in group}
        if len(networks) == len(group) == len(measured[text]):
            complete[text].append((images, group))
    lines = {}
    notes = []
    for text, groups in complete.items():
        for number, (images, group) in enumerate(groups, 1):
            name = text
            if len(groups) > 1:
                name += f", data {number}"
            lines[name, images] = group
        if not groups:
            sizes = sorted({str(cell.images) for cell in cells if cell.text == text})
            notes.append(f"{text}: the networks have rows on different images "
                         f"({', '.join(sizes)} images) or of different code")
    return lines, notes


def seeds_table(rows):
    """Return the table over seeds with its explanation; "" if no networks differ only in the seed.

    For each kind of network, the table has the mean over seeds, the half-width of its 95 % interval
    and the number of seeds; for each kind but the first, also the difference from the first kind.
    """
    kinds, notes = kinds_of_network(rows)
    if not any(len(kind.networks) > 1 for kind in kinds):
        return ""
    networks = set()
    for kind in kinds:
        networks |= set(kind.networks.values())
    cells = [cell for cell in all_cells(rows) if cell.network in networks]
    lines, more = comparable_lines(cells)
    notes += more
    first, *others = kinds
    header = ["mean over seeds", "images"]
    header += [kind.title for kind in kinds]
    header += [f"{kind.title} minus {first.title}" for kind in others]
    body = []
    for (text, images), group in lines.items():
        digits = group[0].digits
        values = {cell.network: cell.value for cell in group}
        by_kind = []                                      # {seed: value} per kind
        for kind in kinds:
            by_kind.append({seed: values[network] for seed, network in kind.networks.items()
                            if network in values})
        means = [mean_over_seeds(own) for own in by_kind]
        differences = [difference_of_kinds(by_kind[0], own) for own in by_kind[1:]]
        line = [text, images]
        line += [estimate_text(mean, digits) for mean in means]
        line += [estimate_text(difference, digits, "+") for difference in differences]
        body.append(line)
    text = ""
    if body:
        text = common.table(body, header) + "\n"
    text += ("±: half-width of the 95 % interval over seeds (Student's t). n: number "
             "of seeds; one seed has no interval.\nDifferences are paired if both "
             "kinds have the same seeds, else unpaired (Welch).")
    for note in notes:
        text += f"\nleft out: {note}"
    return text
