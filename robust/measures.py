"""What `--measures` says, as `Measure`s: names, settings, presets, and on how many images.

    build_measures(["clean", "pgd eps=1/255,2/255 steps=40"], "classification")

A measure is a name and settings, NAME SETTING=VALUE ...; of several values, 1/255,2/255, each is
measured. The settings of an attack, their types and defaults are those of its function: see
ATTACKS in robust/__init__.py. Table 2 and Fig. 3 of Teo & Nguyen 2024 say which, App. A.2 how.
"""

import argparse
import itertools
from typing import NamedTuple

from common import COUNT, InputError
from robust import ATTACKS, find, parameters

CLS, SEG, LM = "classification", "segmentation", "language modelling"
FOLDERS = ("imagenet_a", "imagenet_r", "imagenet_o")
# What --measures is by default; classifiers: and the folders that are given.
USUAL = {CLS: ["clean", "corruptions", "noise", "fgsm", "pgd", "adaptive_pgd", "apgd"],
         SEG: ["clean", "corruptions"], LM: ["perplexity"]}
# Parameters of attacks that are no settings: the evaluator gives them to the attack.
OFFERED = ("clip", "seed", "index", "draw", "batch_size", "trace", "progress", "targets",
           "surrogates")
CHOICES = dict(space=("pixel", "normalized"), labels=("true", "pred"), split=("valid", "test"),
               kind=("uniform", "gaussian"), centre=("iterate", "legacy"), loss=("ce", "dlr"))
# What every attack has besides.
CONDITIONS = dict(space="pixel", labels="true", clip=True)
PRESETS = {
    "default": dict(conditions=CONDITIONS, eps=[k / 255 for k in (1, 2, 4, 8)]),
    # the paper's code, `rachtsy/KPCA_code:Attack`
    "paper": dict(conditions=dict(space="normalized", labels="pred", clip=False),
                  eps=[k / 255 for k in range(1, 7)], noise=dict(scale=0.3), sld=dict(rescale=True),
                  spsa=dict(eps=0.1, centre="legacy"), cw=dict(confidence=10.0)),
}
# Images per measure without --limit: minutes on the embedded scenes; elsewhere all, but for attacks
# that take hours.
SCENES = dict(dict.fromkeys(ATTACKS, 80), corruptions=320, noise=640, fgsm=640, pgd=160,
              transfer=160, sld=160, spsa=20, cw=40)
SLOW = dict(autoattack=1000, adaptive_autoattack=1000, square=1000, spsa=100, cw=100)


class Measure(NamedTuple):
    """One thing to measure: {setting: value}, and {condition: value} of attacks."""
    name: str
    setting: dict
    conditions: dict


def known(task):
    """The names of all measures of a task."""
    if task == CLS:
        return ["clean", "corruptions", *FOLDERS, *ATTACKS]
    return USUAL[task]


def settings_of(name):
    """{setting: default} of a measure. None: there is none (of eps: --eps)."""
    if name == "corruptions":
        from robust.corruptions import NAMES
        return dict(type=list(NAMES), jpeg85=False)
    if name == "perplexity":
        return dict(split=["valid", "test"])
    if name not in ATTACKS:
        return {}
    found = {key: None if p.default is p.empty else p.default
             for key, p in parameters(find(name)).items() if key not in OFFERED}
    return dict(found, draws=3) if name == "noise" else found      # its accuracy: the mean of three


# --- settings in words ---------------------------------------------------------------------------

def number(text):
    """8/255 or 0.0314 -> float."""
    top, _, bottom = text.partition("/")
    return float(top) / float(bottom or 1)


def budget(text):
    """An L-infinity budget in pixel units."""
    value = number(text)
    if not 0 <= value <= 1:
        hint = f"; was {text}/255 meant?" if value > 1 else ""
        raise argparse.ArgumentTypeError(f"{text}: pixels are in [0, 1], so 0 <= eps <= 1{hint}")
    return value


def read(setting, text, default):
    """The value of a setting: of the type of its default."""
    choices = {name: name for name in CHOICES.get(setting, ())}
    if isinstance(default, bool):
        choices = dict(yes=True, no=False)
    elif setting == "type":
        from robust.corruptions import CORRUPTIONS
        choices = {name: name for name in CORRUPTIONS}
    kind = budget if setting == "eps" else COUNT if isinstance(default, int) else number
    try:
        return choices[text] if choices else kind(text)
    except (KeyError, ValueError, ZeroDivisionError, argparse.ArgumentTypeError) as error:
        expected = f"expected {' or '.join(choices)}" if choices else error
        raise InputError(f"{setting}={text}: {expected}") from None


def in_words(values):
    """{setting: value} as one would write it: eps=6/255 clip=no."""
    def word(name, value):
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, list):
            return ",".join(word(name, v) for v in value) if len(value) < 6 else "all"
        k = round(255 * value) if name in ("eps", "alpha") else 0
        return f"{k}/255" if k and abs(k - 255 * value) < 1e-6 else str(value)
    return " ".join(f"{k}={word(k, v)}" for k, v in values.items() if v is not None)


def describe():
    """The measures, their settings and defaults, for --help."""
    lines = ["measures and the defaults of their settings:"]
    for name in (*known(CLS), *USUAL[LM]):
        missing = "".join(f" {k}=..." for k, v in settings_of(name).items() if v is None)
        lines.append(f"  {name:20} {in_words(settings_of(name))}{missing}".rstrip())
    lines.append("and of all attacks: space=pixel or normalized, labels=true or pred, clip=yes or "
                 "no;\nNAME=VALUE,VALUE,... measures each; what attacks mean by them: robust/")
    for name, preset in PRESETS.items():
        own = [f"{k} {in_words(v)}" for k, v in preset.items() if k in ATTACKS]
        lines.append(f"--preset {name}: {'; '.join([in_words(preset['conditions']), *own])}; "
                     f"--eps up to {round(255 * preset['eps'][-1])}/255")
    return "\n".join(lines)


def build_measures(texts, task, preset="default", eps=None, **conditions):
    """["pgd eps=1/255,2/255", ...] -> [Measure, ...], one for each combination of the values.

    eps: --eps, for all attacks that name none. conditions: what every measure has besides.
    """
    todo = []
    for text in texts:
        name, *pairs = text.split() or [""]
        if name not in known(task):
            raise InputError(f"--measures {text!r}: known are {', '.join(known(task))}, all")
        values = settings_of(name)
        values.update(PRESETS[preset].get(name, {}))
        if "eps" in values and (eps or values["eps"] is None):
            values["eps"] = eps or PRESETS[preset]["eps"]
        default = PRESETS[preset]["conditions"]
        if name in ATTACKS:
            values |= default
            if "batch_size" in parameters(find(name)):    # these keep to [0, 1] in any space, as
                values["clip"] = True                     # the code of AutoAttack does
        for pair in pairs:
            setting, _, given = pair.partition("=")
            if setting not in values:
                raise InputError(f"--measures {text!r}: {setting} is no setting of {name}; known "
                                 f"are {', '.join(values) or 'none'}")
            was = values[setting][0] if isinstance(values[setting], list) else values[setting]
            values[setting] = [read(setting, one, was) for one in given.split(",")]
        every = [v if isinstance(v, list) else [v] for v in values.values()]
        for combination in itertools.product(*every):
            setting = {k: v for k, v in zip(values, combination) if v is not None}
            own = {k: setting.pop(k, v) for k, v in default.items()}
            todo.append(Measure(name, setting, own | conditions))
    return todo
