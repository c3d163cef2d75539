"""Every change of docs/change.md applies to the current code, and its command runs."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from processes import run_command
from runs import log
from test_pages import blocks

ROOT = Path(__file__).parent.parent
SECTIONS = re.split(r"^### ", (ROOT / "docs/change.md").read_text(), flags=re.M)[1:]
SMALL = {"train_cls.py": "--num_images 64 --batch_size 16 --epochs 1 --max_steps 2 --device cpu",
         "train_lm.py": "--data_dir docs/change.md --context 16 --steps 3 --batch_size 4 "
                        "--words 0 --device cpu",
         "train_seg.py": "--num_images 32 --batch_size 16 --epochs 1 --max_steps 2 --device cpu",
         "eval_robust.py": "--limit 8 --device cpu"}


def shortened(words):
    """Return a command with flags for a run of seconds."""
    more = SMALL.get(words[1], "")
    if "--resume" in words:
        more = "--device cpu"
    if "digits" in words:                               # this data set has no --num_images
        more = more.replace("--num_images 64", "")
    return [*words[1:], *more.split()]


UNUSED = shutil.ignore_patterns("lecture", "studies")   # not copied, for speed


def apply(diff, tree):
    subprocess.run(["git", "apply", "-"], input=diff, cwd=tree, text=True, check=True)


def check_gradient_memory(path):
    """Insert an assertion into the trainer: each gradient keeps its memory in all steps."""
    pointers = "[p.grad.data_ptr() for p in model.parameters()]"
    text = path.read_text()
    for line, new in (("            p.grad = torch.zeros_like(p)\n", f"    memory = {pointers}\n"),
                      ("        optimizer.step()\n", f"        assert {pointers} == memory\n")):
        assert text.count(line) == 1
        text = text.replace(line, line + new)
    path.write_text(text)


def test_accumulated_gradients_equal_whole_batches(copy_programs, tmp_path):
    """The gradients keep their memory, as CUDA graphs need."""
    section, = [text for text in SECTIONS if text.startswith("Gradient accumulation")]
    losses = []
    for name in ("plain", "changed"):
        tree = copy_programs(tmp_path / name, ignore=UNUSED)
        if name == "changed":
            for diff in blocks("diff", section):
                apply(diff, tree)
            check_gradient_memory(tree / "train_cls.py")
        run = "train_cls.py --out_dir run " + SMALL["train_cls.py"]
        code, out, err = run_command(tree, run.split())
        assert code == 0, out + err
        losses.append(log(tree / "run"))
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


# packages that are not installed, or whose import takes seconds
STUBS = {
    "wandb.py":
        "def init(**settings): pass\n"
        "def log(row, step): assert row['step'] == step\n",
    "board_stub.py":
        "class SummaryWriter:\n"
        "    def __init__(self, folder): print('a board in', folder)\n"
        "    def add_scalar(self, name, value, step): print(name, float(value), int(step))\n",
    "sklearn/datasets.py":
        "import numpy as np\n"
        "def load_digits(return_X_y):\n"
        "    return np.arange(1540.0 * 64).reshape(1540, 64) % 17, np.arange(1540) % 10\n"}


@pytest.mark.parametrize("section", SECTIONS, ids=lambda text: text.splitlines()[0])
def test_change_applies_and_runs(section, copy_programs, tmp_path):
    tree = copy_programs(tmp_path / "tree", ignore=UNUSED)
    diffs = blocks("diff", section)
    assert diffs or blocks("sh", section)
    for diff in diffs:
        apply(diff, tree)
    script = tree / "train_cls.py"
    script.write_text(script.read_text().replace("torch.utils.tensorboard", "board_stub"))
    (tree / "sklearn").mkdir()
    for file, text in STUBS.items():
        (tree / file).write_text(text)
    for line in "".join(blocks("sh", section)).replace("\\\n", " ").splitlines():
        words = shlex.split(line.replace("--device mps", ""), comments=True)    # needs a Mac
        assert words[0] == "python", line
        code, out, err = run_command(tree, shortened(words))
        assert code == 0, out + err
        for said in re.findall(r"^prints `(.+?)`", section, re.M):
            assert said in out, (said, out)
