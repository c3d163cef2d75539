"""The evaluator's rows: which model and which measurement each is of; read again from disk.

A row is a dict: what was measured (data, measure, setting, conditions, images), of which model
(model, kind, checkpoint, weights, model_config, recipe), the numbers, and how they came about.
"""

import json
import zlib

from lm import LMConfig
from segmenter import SegmenterConfig
from vit import ViTConfig

# What model_config's fields are where a row does not say.
DEFAULTS = {"classification": vars(ViTConfig()), "segmentation": vars(SegmenterConfig(2)),
            "language modelling": vars(LMConfig(1))}
# Training flags that may differ between the seeds of one model; any other makes it another model.
SEED_FLAGS = ("seed", "data_dir", "download", "skip_bad_images", "num_workers", "device", "compile",
              "out_dir", "resume", "max_steps", "log_every", "eval_every", "save_every",
              "keep_every", "save_images", "sample", "words", "prompt", "temperature")


# --- which model, which row ----------------------------------------------------------------------

def kind_of(config):
    """A model in words: softmax, fan symmetric, rpc 4iter/layer1, rpc 2iter/all-layer, ..."""
    family = getattr(config, "family", "")
    if not config.rpc_layers:
        return family + config.attn
    layers = "layer" + ",".join(str(i + 1) for i in config.rpc_layers)
    if len(config.rpc_layers) == config.depth:
        layers = "all-layer"
    name = f"{family}{config.attn} {config.n_iter}iter/{layers}"
    if config.lambd != ViTConfig.lambd:
        name += f", lambda {config.lambd:g}"
    if config.form != ViTConfig.form:
        name += f", form {config.form}"
    return name


def checksum(data):
    """Eight hexadecimal digits for bytes."""
    return f"{zlib.crc32(data):08x}"


def weights_of(state_dict):
    """A checksum of a model's weights."""
    tensors = (t.cpu().contiguous().numpy().tobytes() for t in state_dict.values())
    return checksum(b"".join(tensors))


def describe_model(model, checkpoint, path):
    """What a row says of its model.

    weights, model_config (what differs from the defaults): which model it is; recipe: a checksum of
    how it was trained, but for the seed.
    """
    defaults, trained = DEFAULTS[checkpoint["task"]], checkpoint.get("args") or {}
    config = {k: v for k, v in vars(model.config).items() if v != defaults.get(k)}
    config = json.loads(json.dumps(config))               # as a row that is read back has it
    recipe = {k: v for k, v in trained.items() if k not in SEED_FLAGS}
    recipe["step"] = checkpoint.get("step")               # epoch 3 and epoch 8 are not two seeds
    if checkpoint["task"] == "language modelling":
        recipe["step"] = recipe.get("steps")              # best.pt is of another step in each seed
    kind = trained.get("attention") or kind_of(model.config)    # of studies/robust_attentions.py
    return dict(model=f"{kind}, seed {trained.get('seed', '?')}", kind=kind, checkpoint=str(path),
                weights=weights_of(model.state_dict()), model_config=config,
                recipe=checksum(json.dumps(recipe, sort_keys=True).encode()))


def identity(row):
    """What tells models apart: weights and model_config; in older rows weights, kind and path."""
    config = row.get("model_config", [row["kind"], row["checkpoint"]])
    return json.dumps([row["weights"], config], sort_keys=True)


def group(row):
    """What the seeds of one model have in common."""
    if "model_config" not in row:
        return row["kind"]
    return json.dumps([row["model_config"], row["recipe"]], sort_keys=True)


def key(row):
    """What tells rows apart."""
    parts = [row[k] for k in ("data", "measure", "setting", "conditions", "images")]
    return json.dumps([identity(row), row.get("data_dir"), *parts], sort_keys=True)


# --- on disk -------------------------------------------------------------------------------------

def read_rows(path, models=()):
    """The finished rows of an earlier run, {key: row}; a line cut short by a kill is dropped.

    models: descriptions; a row from before model_config was kept gets that of the model with its
    weights and path.
    """
    known = {(m["weights"], m["checkpoint"]): m for m in models}
    rows = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
            m = known.get((row["weights"], row["checkpoint"]))
            if m and "model_config" not in row:
                row.update(model_config=m["model_config"], recipe=m["recipe"])
            rows[key(row)] = row
        except (json.JSONDecodeError, KeyError, TypeError):
            continue
    return rows
