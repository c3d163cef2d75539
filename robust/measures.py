"""What can be measured, and under which settings: names, defaults, presets, strings read.

    plan(["clean", "pgd eps=1/255,2/255 steps=40"], task, preset, eps)

A measure is a name and settings, NAME SETTING=VALUE ...; of several values, 1/255,2/255, each is
measured. Table 2 and Fig. 3 of Teo & Nguyen 2024 say which attacks, App. A.2 and E.4 how.
"""

import argparse
import itertools
from typing import NamedTuple

import torch

import common
from robust import adaptive, attacks, autoattack, corruptions

FOLDERS = ("imagenet_a", "imagenet_r", "imagenet_o")
ATTACKS = dict(noise=attacks.noise, fgsm=attacks.fgsm, pgd=attacks.pgd,
               adaptive_pgd=adaptive.adaptive_pgd, transfer=attacks.pgd, sld=attacks.sld,
               spsa=attacks.spsa, cw=attacks.cw, apgd=autoattack.apgd,
               adaptive_apgd=adaptive.adaptive_apgd, square=autoattack.square,
               autoattack=autoattack.autoattack,
               adaptive_autoattack=adaptive.adaptive_autoattack)
PGD = dict(eps=None, steps=20, alpha=0.15, random_start=True, restarts=1)
# The settings of each measure and their defaults; eps=None: what --eps or the preset says.
MEASURES = dict(
    clean={},
    corruptions=dict(type=list(corruptions.NAMES), jpeg85=False),
    imagenet_a={}, imagenet_r={}, imagenet_o={},
    noise=dict(scale=0.068, kind="uniform", draws=3, best_of=1),
    fgsm=dict(eps=None), pgd=dict(PGD, best=False), adaptive_pgd=PGD, transfer=PGD,
    sld=dict(eps=10.0, rescale=False),
    spsa=dict(eps=6 / 255, steps=40, centre="iterate"),
    cw=dict(confidence=0.0, steps=1000, lr=5e-3),
    apgd=dict(eps=None), adaptive_apgd=dict(eps=None),
    square=dict(eps=1 / 255, queries=5000),
    autoattack=dict(eps=1 / 255, queries=5000),
    adaptive_autoattack=dict(eps=1 / 255, queries=5000),
    perplexity=dict(split=["valid", "test"]),
)
KNOWN = {"classification": [name for name in MEASURES if name != "perplexity"],
         "segmentation": ["clean", "corruptions"], "language modelling": ["perplexity"]}
# What every attack has besides; and the paper's harness, where it differs.
CONDITIONS = dict(space="pixel", labels="true", clip=True)
PRESETS = {
    "default": dict(conditions=CONDITIONS, eps=[k / 255 for k in (1, 2, 4, 8)]),
    "paper": dict(conditions=dict(space="normalized", labels="pred", clip=False),
                  eps=[k / 255 for k in range(1, 7)], noise=dict(scale=0.3), sld=dict(rescale=True),
                  spsa=dict(eps=0.1, centre="legacy"), cw=dict(confidence=10.0)),
}
# These gather the images that still stand, so that batches stay full; and they keep to [0, 1] in
# any space, as the code of AutoAttack does, which the released harness calls on normalised images.
GATHERING = ("square", "autoattack", "adaptive_autoattack")
# Images per measure without --limit: minutes on the embedded scenes; elsewhere all, but for attacks
# that take hours.
SCENES = dict(dict.fromkeys(ATTACKS, 80), corruptions=320, noise=640, fgsm=640, pgd=160,
              transfer=160, sld=160, spsa=20, cw=40)
SLOW = dict(autoattack=1000, adaptive_autoattack=1000, square=1000, spsa=100, cw=100)


# --- settings in words ---------------------------------------------------------------------------

def budget(text):
    """8/255 or 0.0314 -> float; eps is in pixel units."""
    top, _, bottom = text.partition("/")
    if bottom and not float(bottom):
        raise argparse.ArgumentTypeError(f"{text}: division by zero, expected 8/255 or 0.0314, say")
    value = float(top) / float(bottom or 1)
    if not 0 <= value <= 1:
        hint = f"; was {text}/255 meant?" if value > 1 and not bottom else ""
        raise argparse.ArgumentTypeError(f"{text}: pixels are in [0, 1], so 0 <= eps <= 1{hint}")
    return value


def choice(*known):
    """Type for argparse: one of these words."""
    def parse(text):
        if text not in known:
            raise argparse.ArgumentTypeError(f"{text}, expected {' or '.join(known)}")
        return text
    return parse


def truth(text):
    """yes or no -> bool."""
    return choice("yes", "no")(text) == "yes"


COUNT, REAL, POSITIVE = common.number(int, 1), common.number(float, 0), common.number(float, 1e-9)
# name: (type, what it says)
SETTINGS = dict(
    eps=(budget, "L-inf budget, 8/255 or 0.031; of sld the L1 budget, any number: at "
         "224 px 10 is next to nothing, try 10,50,100"),
    scale=(REAL, "half width (uniform) or standard deviation (gaussian)"),
    kind=(choice("uniform", "gaussian"), "uniform or gaussian"),
    draws=(COUNT, "accuracy is the mean over so many draws"),
    best_of=(COUNT, "each image's worst of so many"),
    steps=(COUNT, "of cw: Adam steps in each of the 5 rounds of the search for c"),
    alpha=(POSITIVE, "step as a share of eps"),
    random_start=(truth, "yes or no"),
    restarts=(COUNT, "each image's worst of so many random starts"),
    best=(truth, "yes: any misclassified iterate is returned, not the last one"),
    rescale=(truth, "yes: scale down to the L1 ball as cleverhans does; no: project"),
    centre=(choice("iterate", "legacy"),
            "legacy: probe around 2x, as cleverhans 4.0.0 does"),
    confidence=(REAL, "kappa"),
    lr=(POSITIVE, "of Adam"),
    queries=(COUNT, "of Square, alone and in AutoAttack"),
    type=(choice(*corruptions.NAMES), "some of the 15 corruptions"),
    jpeg85=(truth, "yes: once through JPEG at quality 85, as ImageNet-C's files"),
    split=(choice("valid", "test"), "of the text"),
    space=(choice("pixel", "normalized"), "unit of the budgets: pixels in [0, 1], or "
           "normalised tensors"),
    labels=(choice("true", "pred"), "what an attack leads away from"),
    clip=(truth, "yes: attacked pixels stay in [0, 1]"),
)


def in_words(values):
    """{setting: value} as one would write it: eps=6/255 clip=no."""
    texts = []
    for name, value in values.items():
        if isinstance(value, bool):
            value = "yes" if value else "no"
        elif name == "eps" and value and value <= 1 and value == round(255 * value) / 255:
            value = f"{round(255 * value)}/255"
        if isinstance(value, list):
            value = "all" if len(value) > 4 else ",".join(map(str, value))
        texts.append(f"{name}={'--eps' if value is None else value}")
    return " ".join(texts)


def describe():
    """The measures, their settings and defaults, for --help."""
    lines = ["measures and the defaults of their settings; Segmenters have clean and corruptions, "
             "language models perplexity, classifiers the others:"]
    lines += [f"  {name:20} {in_words(values)}".rstrip() for name, values in MEASURES.items()]
    lines += ["settings, NAME=VALUE or NAME=VALUE,VALUE,...; attacks: space, labels, clip, too:"]
    lines += [f"  {name:20} {text}" for name, (_, text) in SETTINGS.items()]
    for name, preset in PRESETS.items():
        own = {k: v for k, v in preset.items() if k in MEASURES}
        texts = [in_words(preset["conditions"]), *(f"{k} {in_words(v)}" for k, v in own.items())]
        last = round(255 * preset["eps"][-1])
        lines += [f"--preset {name}: {'; '.join(texts)}; --eps up to {last}/255"]
    return "\n".join(lines)


def defaults(name, preset, eps):
    """{setting: value, or list of values} of a measure. eps: --eps, or None."""
    chosen = PRESETS[preset]
    values = {**MEASURES[name], **chosen.get(name, {})}
    if "eps" in values and name != "sld" and (eps or values["eps"] is None):
        values["eps"] = eps or chosen["eps"]
    if name in ATTACKS:
        values |= chosen["conditions"] | (dict(clip=True) if name in GATHERING else {})
    return values


class Measure(NamedTuple):
    """One thing to measure: {setting: value}, and of attacks {condition: value}."""
    name: str
    setting: dict
    conditions: dict


class Job(NamedTuple):
    """One measure, and what it is on."""
    measure: Measure
    images: object                   # a source: the test split, or that of --imagenet_a
    n: int                           # images, or tokens of a text
    index: torch.Tensor | None       # (n,) numbers of the images


def plan(texts, task, preset="default", eps=None):
    """["pgd eps=1/255,2/255", ...] -> [Measure, ...], one for each combination of the values.

    Raises ValueError naming what is unknown, out of range or said twice.
    """
    todo = []
    for text in texts:
        with common.error_prefix(f"--measures {text!r}"):
            name, *pairs = text.split() or [""]
            if name not in KNOWN[task]:
                raise ValueError(f"unknown; known are {', '.join(KNOWN[task])}, all")
            values = read_settings(name, pairs, defaults(name, preset, eps))
            for combination in itertools.product(*values.values()):
                setting = dict(zip(values, combination))
                conditions = {k: setting.pop(k, v)
                              for k, v in PRESETS[preset]["conditions"].items()}
                check_measure(name, setting, conditions)
                todo.append(Measure(name, setting, conditions))
    return todo


def read_settings(name, pairs, values):
    """Read ["eps=1/255,2/255", ...] of a measure: {setting: list of values}, as in `defaults`."""
    given = {}
    for setting, _, texts in (pair.partition("=") for pair in pairs):
        if setting not in values:
            known = f"known are {', '.join(values)}" if values else "there are none"
            raise ValueError(f"{setting} is no setting of {name}; {known}")
        if setting in given:
            raise ValueError(f"{setting} is given twice, expected {setting}=VALUE,VALUE for "
                             "several")
        kind = REAL if (name, setting) == ("sld", "eps") else SETTINGS[setting][0]
        try:
            given[setting] = [kind(text) for text in texts.split(",")]
        except (ValueError, argparse.ArgumentTypeError) as e:
            raise ValueError(f"{setting}={e}") from None
    return {k: v if isinstance(v, list) else [v] for k, v in {**values, **given}.items()}


def check_measure(name, setting, conditions):
    """Refuse settings that contradict each other."""
    if name in GATHERING and not conditions["clip"]:
        raise ValueError(f"{name} keeps to [0, 1] in any case, expected clip=yes")
    if setting.get("restarts", 1) > 1 and not setting["random_start"]:
        raise ValueError("restarts differ in their random start, expected random_start=yes")
    if setting.get("restarts") == 1:
        del setting["restarts"]               # rows from before there were restarts are the same
