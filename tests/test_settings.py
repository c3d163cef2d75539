"""Flags: tables of settings become parsers, recipes set defaults, and docs/data.md's commands parse."""

import re
import shlex

import pytest

import attention
import common
import eval_robust
import train_cls
import train_lm
import train_seg
from common import InputError
from fixtures import ROOT
from runs import call, refused

pytestmark = pytest.mark.usefixtures("alone")
SCRIPTS = {"train_cls.py": train_cls, "train_lm.py": train_lm, "train_seg.py": train_seg}
OURS = dict(attn="rpc", rpc_layers="0", n_iter=4, lambd=4.0, form="released", seed=0)
DEIT = dict(OURS, model="tiny", image_size=224, patch_size=16, drop_path=0.1, epochs=300,
            batch_size=1024, lr=5e-4 * 1024 / 512, warmup=5 / 300, weight_decay=0.05,
            clip=0, pad=0, num_ops=2, erase=0.25, mixup=0.8, cutmix=1.0,
            smoothing=0.1, repeats=3, flip=True, eval_every=5)
FAN = dict(DEIT, lr=2e-3, repeats=1)
RECIPES = {
    "train_cls.py --data imagenet": DEIT,
    "train_cls.py --data imagenet --model base": dict(DEIT, model="base", clip=1),
    "train_cls.py --data imagenet --model fan_tiny":
        dict(FAN, model="fan_tiny", batch_size=512, drop_path=0),
    "train_cls.py --data imagenet --model fan_small": dict(FAN, model="fan_small", drop_path=0.2),
    "train_lm.py --data wikitext103":
        dict(OURS, dropout=0.1, clip=0.25, model="paper", context=256,
             rpc_layers="0-3", steps=500_000, batch_size=96, cutoffs="20000,40000,200000",
             lr=2.5e-4, warmup=2000, eval_every=4000),
    "train_seg.py --data ade20k":
        dict(OURS, dropout=0.1, patch_size=16, model="tiny", lr=1e-3, weight_decay=0,
             optimizer="sgd", clip=0, drop_path=0.1, size=512, num_classes=150, epochs=64,
             batch_size=8),
}
TABLE = dict(steps=(8, "steps", common.ONE_OR_MORE), lr=(0.1, "rate"), share=(0.5, "part", (0, 1)),
             size=("nano", "size", ("nano", "tiny")), amp=(None, "bf16"), flip=(False, "mirror"),
             eps=(["1/255"], "budgets"), severities=([1, 2], "severities", (1, 5)))


def commands():
    """Return the commands of docs/data.md for the paper's runs, as words after torchrun's flags."""
    text = (ROOT / "docs/data.md").read_text().replace("\\\n", " ")
    found = re.findall(r"^torchrun .*?(train_\w+\.py .*)$", text, re.M)
    return [shlex.split(line, comments=True) for line in found if not line.endswith("...")]


def flags_of(script, words):
    return vars(call(SCRIPTS[script].get_args, words)[0])


def test_a_table_becomes_a_parser():
    """Each flag has the type of its default; a list takes several values."""
    words = ("--steps 3 --lr 2/255 --size tiny --no-amp --flip --eps 8/255 0.5 "
             "--severities 5").split()
    assert vars(common.parse(TABLE, "", words)) == dict(
        steps=3, lr=2 / 255, share=0.5, size="tiny", amp=False, flip=True, eps=["8/255", "0.5"],
        severities=[5])
    assert common.parse(TABLE, "", []).amp is None
    changed = common.with_recipe(TABLE, dict(lr=0.5, steps=(2, "few", (0, 3)), new=(1, "new")))
    args = common.parse(changed, "", ["--steps", "0"])
    assert (args.lr, args.steps, args.new) == (0.5, 0, 1) and TABLE["lr"][0] == 0.1


@pytest.mark.parametrize("words, expected", [
    ("--steps 0", "argument --steps: '0': expected a whole number of 1 or more"),
    ("--steps 1.5", "'1.5': expected a whole number"), ("--lr nan", "'nan': expected a number of 0"),
    ("--lr -1", "'-1': expected a number of 0 or more"), ("--lr 1/0", "'1/0': expected a number"),
    ("--share 2", "'2': expected a number from 0 to 1"), ("--severities 6", "from 1 to 5"),
    ("--size small", "invalid choice: 'small'"), ("--step 3", "unrecognized arguments: --step 3")])
def test_wrong_values_are_one_line(words, expected, capsys):
    with pytest.raises(SystemExit):
        common.parse(TABLE, "", words.split())
    assert expected in capsys.readouterr().err.splitlines()[-1]


def test_wrong_layers_are_one_line():
    for text in ("first", "1,", "0-", "a-b", "-1", "3-1"):
        with pytest.raises(InputError, match=f"^--rpc_layers {text}"):
            common.parse_layers(text, 4)
    assert common.parse_layers("0-1,3", 4) == (0, 1, 3) and common.parse_layers("all", 2) == (0, 1)
    assert common.parse_layers("1,0,0", 4) == (0, 1)                # each layer once, in order


@pytest.mark.parametrize("words", [
    "--data shapes --data_dir photos", "--data_dir p --num_images 9", "--data cifar10 --num_images 9",
    "--download", "--data cifar10 --data_dir p --num_workers 2", "--data imagenet --best",
    "--data cifar10 --best", "--attn softmax --temperature 2", "--holdout 3"])
def test_a_data_set_has_only_its_flags(words):
    assert "unrecognized arguments: --" in refused(train_cls, words)


def test_settings_of_pap_exist_for_every_attention(monkeypatch):
    """A loop over attentions in the shell has one line. An own setting is a flag, too."""
    for attn in ("softmax", "symmetric", "rpc", "rpc_asym", "sym_asym", "scaled_s", "scaled_alpha"):
        args = flags_of("train_cls.py", ["--attn", attn, "--n_iter", "2"])
        assert (args["attn"], args["n_iter"], args["lambd"]) == (attn, 2, 4.0)
    mine = attention.Attention(False, attention.attend_softmax,
                               attention.PAP_SETTINGS | dict(temperature=2.0, n_iter=1))
    monkeypatch.setitem(attention.ATTENTIONS, "mine", mine)
    args = flags_of("train_cls.py", ["--attn", "mine", "--temperature", "3"])
    assert (args["temperature"], args["n_iter"]) == (3.0, 1)


def test_your_own_folder_needs_one_flag():
    assert flags_of("train_cls.py", [])["data"] == "shapes"
    args = flags_of("train_cls.py", ["--data_dir", "p"])
    assert (args["data"], args["attn"], args["best"]) == ("folder", "symmetric", True)
    assert args["out_dir"] == "out/folder_symmetric"
    args = flags_of("train_cls.py", ["--data", "cifar10", "--data_dir", "p"])
    assert (args["data"], args["model"]) == ("cifar10", "micro")


def test_wrong_flags_of_an_evaluation_are_one_line():
    for words, expected in (("", "--ckpt is missing"), ("--ckpt a a", "names a network twice"),
                            ("--ckpt a --eps 3", "--eps 3: expected 0 to 1, for example 8/255"),
                            ("--ckpt a --severities", "--severities: expected one or more values"),
                            ("--ckpt a --measures pdg", "invalid choice: 'pdg'"),
                            ("--ckpt a --measures imagenet_a", "needs --imagenet_a, the folder"),
                            ("--ckpt a --severities 6", "expected a whole number from 1 to 5"),
                            ("--ckpt nowhere", "there is no checkpoint nowhere")):
        assert expected in refused(eval_robust, words)


@pytest.mark.parametrize("command", RECIPES)
def test_recipes_are_the_papers(command):
    """A FAN needs more flags than --data and --model; docs/data.md has its command."""
    script, *words = command.split()
    if words[-1].startswith("fan"):
        words = next(line[1:] for line in commands() if words[-1] in line)
    elif words[-1] == "base":
        words += ["--clip", "1"]
    found = flags_of(script, [*words, "--data_dir", "x"])
    wrong = {k: (found[k], v) for k, v in RECIPES[command].items() if found[k] != v}
    assert not wrong.keys() - {"attn"}, wrong


def test_only_recipes_that_say_so_mirror_images(monkeypatch):
    """The four data sets are mirrored. Another one is not: digits and signs would change."""
    for name in ("shapes", "cifar10", "imagenet", "folder"):
        assert flags_of("train_cls.py", ["--data", name])["flip"]
        assert not flags_of("train_cls.py", ["--data", name, "--no-flip"])["flip"]
    monkeypatch.setitem(train_cls.RECIPES, "digits", dict(model="nano"))
    assert not flags_of("train_cls.py", ["--data", "digits"])["flip"]
    assert flags_of("train_cls.py", ["--data", "digits", "--flip"])["flip"]


def test_commands_of_the_papers_runs_parse():
    assert len(commands()) >= 10
    for script, *words in commands():
        if "--init_from" not in words:                              # needs the file of a run
            assert flags_of(script, words)["data"] in ("imagenet", "wikitext103", "ade20k")
