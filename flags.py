"""Flags of the scripts: recipes, what a resumed run remembers, what is refused; see `parse`."""

import argparse
import math

from attention import FORMS
from checkpoint import check_run, read_checkpoint


# --- types ----------------------------------------------------------------------------------------

def number(kind, low, high=1e30):
    """Type for argparse: an int or float from low to high; float32 holds 1e30 with ease."""
    def parse(text):
        value = kind(text)
        if not low <= value <= high:
            expected = f"{kind.__name__} from {low} to {high}"
            raise argparse.ArgumentTypeError(f"{text}, expected {expected}")
        return value
    parse.__name__ = kind.__name__                             # argparse says "invalid float value"
    return parse


def choice(*known):
    """Type for argparse and --set: one of these words."""
    def parse(text):
        if text not in known:
            raise argparse.ArgumentTypeError(f"{text}, expected {' or '.join(known)}")
        return text
    return parse


def parse_layers(text, depth):
    """"0" | "all" | "0,1,2" | "0-3" -> tuple of layer indices."""
    if text == "all":
        return tuple(range(depth))
    try:
        ends = [[int(n) for n in part.split("-")] for part in text.split(",")]
    except ValueError:
        ends = []
    if not ends or not all(len(e) <= 2 and 0 <= e[0] <= e[-1] < depth for e in ends):
        raise ValueError(f"--rpc_layers {text}: expected all, 0, 0,1,2 or 0-2, of layers 0 to "
                         f"{depth - 1}")
    return tuple(i for e in ends for i in range(e[0], e[-1] + 1))


COUNT, NATURAL = number(int, 1), number(int, 0)
REAL, SHARE = number(float, 0), number(float, 0, 0.999999)


# --- a training script's flags --------------------------------------------------------------------

# Numbers of every recipe that have no flag of their own: a type and --help's words; see `parser`.
SETTINGS = dict(
    clip=(REAL, "clip the gradient norm; 0: do not"),
    log_every=(COUNT, "steps between lines of log.jsonl"),
    save_every=(NATURAL, "steps between checkpoints besides those of epochs and evaluations"),
)


def parser(doc, recipes, settings):
    """An ArgumentParser whose --help ends with what --data selects and what --set may change.

    recipes: {name: {flag or setting: value}}; "any" holds what all of them share, the others are
    names of --data; "DATA --model MODEL" is what such a model has other than DATA. settings:
    {name: (type, help)}, numbers of a recipe that have no flag.
    """
    lines = ["numbers without a flag of their own, for --set NAME=VALUE ...:"]
    lines += [f"  {name:14} {text}" for name, (_, text) in settings.items()]
    for name, recipe in recipes.items():
        lines.append(f"--data {name}:" if name != "any" else "with every --data:")
        values = {name: "as fits" if value is None else value for name, value in recipe.items()}
        lines.append("  " + " ".join(f"{name}={value}" for name, value in values.items()))
    p = argparse.ArgumentParser(description=doc, epilog="\n".join(lines), allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--set", nargs="+", action="extend", metavar="NAME=VALUE",
                   help="other numbers of the recipe, see below")
    return p


def add_attention(flag, kinds):
    """The flags of a model's attention; a recipe says what they are where they are not given."""
    flag("--attn", choices=kinds, help="rpc: symmetric, with RPC-Attention in --rpc_layers")
    flag("--rpc_layers", help="from 0: 0 (the paper's layer1), all, 0,1,2 or 0-3")
    flag("--n_iter", type=COUNT, help="PAP steps; the paper: 4-6 in layer 0, 2 in all")
    flag("--lambd", type=number(float, 0, math.inf),
         help="PAP lambda; the paper: 4 in layer 0, 3 in all; inf: never shrink")
    flag("--form", choices=FORMS, help="reading of Algorithm 1: attention.py")


def add_running(p, name, end):
    """How a script runs. name: of the run's folder. end: the flag that its schedule ends with."""
    flag, boolean = p.add_argument_group("running").add_argument, argparse.BooleanOptionalAction
    flag("--seed", type=number(int, 0, 2 ** 31 - 1), default=0)
    flag("--device", help="cuda, mps or cpu; picked automatically")
    flag("--amp", action=boolean, help="bf16 autocast; default: on GPUs")
    flag("--compile", action=boolean, default=False, help="torch.compile the model")
    flag("--out_dir", help=f"default out/{name}, numbered if it exists")
    flag("--resume", help="folder of a run to continue; its flags are remembered")
    flag("--max_steps", type=COUNT, help=f"stop early; the schedule stays that of {end}")


def parse(p, recipes, settings, script, fixed):
    """The flags. What wins: the command line, then the run that --resume names, then the recipe.

    p: of `parser`; a flag that a recipe sets has no default of its own. recipes: the second is that
    of no --data and no --data_dir, "folder" that of --data_dir alone. script: whose checkpoints
    --resume may name. fixed: what --resume refuses to change. Returns a Namespace of all names.
    """
    default, given = vars(p.parse_args([])), given_flags(p)
    given |= read_settings(given.pop("set", []), settings)
    stored = stored_flags(given, settings, script, fixed) if "resume" in given else {}
    data = {**stored, **given}.get("data")
    if data is None:
        data = "folder" if "data_dir" in given else list(recipes)[1]
    model = {**recipes[data], **stored, **given}.get("model")
    recipe = recipes["any"] | recipes[data] | recipes.get(f"{data} --model {model}", {})
    args = {**default, **recipe, **stored, **given, "data": data}
    if data == "shapes" and args["data_dir"]:
        others = ", ".join(name for name in list(recipes)[2:] if " " not in name)
        raise ValueError(f"--data_dir {args['data_dir']} is not read: --data shapes renders its "
                         f"images; choose another --data: {others}")
    known = (default.keys() | settings.keys()) - {"set"}
    return argparse.Namespace(**{name: args[name] for name in args if name in known})


def given_flags(p):
    """{name: value} of the flags on the command line."""
    nothing = dict.fromkeys(vars(p.parse_args([])))
    given = vars(p.parse_args(namespace=argparse.Namespace(**nothing)))
    return {name: value for name, value in given.items() if value is not None}


def fill(args, chosen):
    """Set what neither a flag nor a recipe has set."""
    for name, value in chosen.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def read_settings(pairs, settings, flag="--set"):
    """["mixup=0.8", ...] -> {"mixup": 0.8, ...}; ValueError: a name or value out of range."""
    values = {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        if name not in settings:
            names = ", ".join(settings) or "none: it has no settings"
            raise ValueError(f"{flag} {pair}: expected NAME=VALUE with a name of {names}")
        try:
            values[name] = settings[name][0](text)
        except (ValueError, argparse.ArgumentTypeError) as e:
            raise ValueError(f"{flag} {name}: {e}") from None
    return values


def stored_flags(given, settings, script, fixed):
    """The flags of the run that --resume names; refuses flags that would make it another run."""
    for name in ("out_dir", "init_from"):
        if name in given:
            raise ValueError(f"--{name} does not go with --resume, which continues in its own "
                             f"folder")
    checkpoint = read_checkpoint(given["resume"])
    check_run(checkpoint, given["resume"], script, "args")
    own = ("resume", "sample", "out_dir", "max_steps", "device")
    stored = {name: value for name, value in checkpoint["args"].items() if name not in own}
    hint = "; to start a new run from its weights use --init_from" if "init_from" in stored else ""
    for name in fixed:
        if name in given and given[name] != stored[name]:
            flag = f"--set {name}=" if name in settings else f"--{name} "
            raise ValueError(f"{flag}{given[name]} does not fit --resume {given['resume']}, "
                             f"which was trained with {flag}{stored[name]}{hint}")
    return stored
