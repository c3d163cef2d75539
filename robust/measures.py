"""What is measured, in words: "pgd eps=2/255 steps=40", and on how many images.

    build(["clean", "pgd eps=1/255,2/255 steps=40"], known, "default")     # [Measure, ...]

A measure is a name and settings, NAME SETTING=VALUE ...; of several values, 1/255,2/255, each is
measured. The settings of an attack, their types and defaults are those of its function: see
ATTACKS in robust/__init__.py. Table 2 and Fig. 3 of Teo & Nguyen 2024 say which, App. A.2 how.
"""

import argparse
import itertools
from typing import Literal, NamedTuple, get_args

from common import COUNT, InputError
from robust import ATTACKS, find, parameters
from robust.metrics import ALEXNET

CLS, SEG, LM = "classification", "segmentation", "language modelling"
FOLDERS = ("imagenet_a", "imagenet_r", "imagenet_o")
# What --measures is by default; classifiers: and the folders that are given.
USUAL = {CLS: ["clean", "corruptions", "noise", "fgsm", "pgd", "adaptive_pgd", "apgd"],
         SEG: ["clean", "corruptions"], LM: ["perplexity"]}
# Settings that are no keyword of an attack: (default, annotation).
SETTINGS = {"corruptions": dict(type=(list(ALEXNET), str), jpeg85=(False, bool)),
            "perplexity": dict(split=(["valid", "test"], Literal["valid", "test"])),
            "noise": dict(draws=(3, int))}                # its accuracy: the mean of so many
OF_ATTACKS = dict(space=("pixel", Literal["pixel", "normalized"]),
                  labels=("true", Literal["true", "pred"]), clip=(True, bool))
CONDITIONS = {key: default for key, (default, _) in OF_ATTACKS.items()}  # said where they are not
# Parameters of attacks that are no settings: the evaluator gives them to the attack.
OFFERED = ("clip", "seed", "index", "draw", "batch_size", "trace", "progress", "targets",
           "surrogates")
PRESETS = {                           # name: settings of all attacks, and of one by its name
    "default": dict(eps=[k / 255 for k in (1, 2, 4, 8)]),
    # the paper's code, `rachtsy/KPCA_code:Attack`; AutoAttack's keeps to [0, 1] in any space
    "paper": dict(space="normalized", labels="pred", clip=False, eps=[k / 255 for k in range(1, 7)],
                  noise=dict(scale=0.3), sld=dict(rescale=True), cw=dict(confidence=10.0),
                  spsa=dict(eps=0.1, centre="legacy"), square=dict(clip=True),
                  autoattack=dict(clip=True), adaptive_autoattack=dict(clip=True)),
}
# Images per measure without --limit: minutes on the embedded scenes; elsewhere all, but for attacks
# that take hours.
SCENES = dict(dict.fromkeys(ATTACKS, 80), corruptions=320, noise=640, fgsm=640, pgd=160,
              transfer=160, sld=160, spsa=20, cw=40)
SLOW = dict(autoattack=1000, adaptive_autoattack=1000, square=1000, spsa=100, cw=100)


class Measure(NamedTuple):
    """One thing to measure: {setting: value}."""
    name: str
    setting: dict

    def __str__(self):
        """As one would type it, complete: what rows are told apart by."""
        said = {k: v for k, v in self.setting.items() if CONDITIONS.get(k) != v}
        return f"{self.name} {in_words(said)}".strip()


def settings_of(name):
    """{setting: (default, annotation)} of a measure. None: there is no default (of eps: --eps)."""
    if name not in ATTACKS:
        return SETTINGS.get(name, {})
    own = {key: (None if p.default is p.empty else p.default, p.annotation)
           for key, p in parameters(find(ATTACKS[name])).items() if key not in OFFERED}
    return own | SETTINGS.get(name, {}) | OF_ATTACKS


# --- values and words ----------------------------------------------------------------------------

def number(text):
    """8/255 or 0.0314 -> float, 8 -> int."""
    top, _, bottom = text.partition("/")
    whole = text.removeprefix("-").isdecimal()
    return int(text) if whole else float(top) / float(bottom or 1)


def budget(text):
    """An L-infinity budget in pixel units."""
    value = number(text)
    if not 0 <= value <= 1:
        hint = f"; was {text}/255 meant?" if value > 1 else ""
        raise argparse.ArgumentTypeError(f"{text}: pixels are in [0, 1], so 0 <= eps <= 1{hint}")
    return value


def read(setting, text, default, annotation):
    """The value of a setting: a word where its default is one, else a number.

    A default of 1 says no more than that it is a number, 0.5 fits as well: int has to be annotated.
    """
    words = {word: word for word in get_args(annotation)}
    if isinstance(default, bool):
        words = dict(yes=True, no=False)
    kind = budget if setting == "eps" else COUNT if annotation is int else \
        str if str in (annotation, type(default)) else number
    try:
        return words[text] if words else kind(text)
    except (KeyError, ValueError, ZeroDivisionError, argparse.ArgumentTypeError) as error:
        expected = f"expected {' or '.join(words)}" if words else error
        raise InputError(f"{setting}={text}: {expected}") from None


def word(value):
    """A value as one types it, which reads back as the same: 2/255, 0.15, yes, 1,2,3."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(word, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float):
        return str(value)
    plain = f"{value:g}" if float(f"{value:g}") == value else str(value)
    share = f"{255 * value:g}/255"
    return share if number(share) == value and len(share) < len(plain) else plain


def in_words(values):
    """{setting: value} as one types it: eps=6/255 clip=no."""
    return " ".join(f"{key}={word(value)}" for key, value in values.items() if value is not None)


def parts(text):
    """"pgd eps=2/255 steps=20" -> ("pgd", {"eps": "2/255", "steps": "20"})."""
    name, *pairs = text.split()
    return name, dict(pair.partition("=")[::2] for pair in pairs)


def describe(known):
    """The measures, their settings and defaults, for --help."""
    lines = ["measures and the defaults of their settings:"]
    for name in known:
        usual = {key: "all" if key == "type" else "..." if default is None else default
                 for key, (default, _) in settings_of(name).items() if key not in CONDITIONS}
        lines.append(f"  {name:20} {in_words(usual)}".rstrip())
    lines.append("and of all attacks: space=pixel or normalized, labels=true or pred, clip=yes or "
                 "no;\nNAME=VALUE,VALUE,... measures each; what they mean, and presets: robust/")
    return "\n".join(lines)


# --- what --measures says ------------------------------------------------------------------------

def build(texts, known, preset="default", eps=None):
    """["pgd eps=1/255,2/255", ...] -> [Measure, ...], one for each combination of the values.

    known: the names that there are. eps: --eps, for all attacks that name none.
    """
    todo, preset = [], PRESETS[preset]
    for text in texts:
        name, *pairs = text.split() or [""]
        if name not in known:
            raise InputError(f"--measures {text!r}: known are {', '.join(known)}")
        kinds = settings_of(name)
        values = {key: default for key, (default, _) in kinds.items()}
        values |= {key: preset[key] for key in CONDITIONS if key in values and key in preset}
        values |= preset.get(name, {})
        if "eps" in values and (eps or values["eps"] is None):
            values["eps"] = eps or preset["eps"]
        for setting, _, given in (pair.partition("=") for pair in pairs):
            if setting not in values:
                raise InputError(f"--measures {text!r}: {setting} is no setting of {name}; known "
                                 f"are {', '.join(values) or 'none'}")
            values[setting] = [read(setting, one, *kinds[setting]) for one in given.split(",")]
        every = [v if isinstance(v, list) else [v] for v in values.values()]
        for combination in itertools.product(*every):
            todo.append(Measure(name, dict(zip(values, combination))))
    return todo
