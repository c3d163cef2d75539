"""Make the ten edits of lecture/WALKTHROUGH.md, appendix E, each in a copy of this tree; measure.

    python -m lecture.edits 4            # the fourth; softmax, rpc: without an edit
    python -m lecture.edits              # all, some minutes
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROW = re.compile(r"^\| (\d+) [^|]*\| \[([\w./]+)\]\([^)]*\) \| `(.+?)` \| `(.+?)` \|", re.M)
EVALUATE = ["eval_robust.py", "--measures", "clean", "pgd eps=2/255 steps=10", "--limit", "500"]
# Numbers 9 and 10 change what a picture shows: its name, and how what moves in it is called.
PICTURES = {"9": ("attack", "rpc "), "10": ("leak", "")}


def edits():
    """{number: (file, text, what it becomes)} of every row of the table."""
    text = (ROOT / "lecture/WALKTHROUGH.md").read_text()
    return {number: edit for number, *edit in ROW.findall(text)}


def copy_edited(number, copy):
    """Copy programs and networks into a folder, with the edit of this number, if there is one."""
    for name in subprocess.check_output(["git", "ls-files", "*.py", "*.jsonl", "weights"], cwd=ROOT,
                                        text=True).split():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    if number in edits():
        file, old, new = edits()[number]
        text = (copy / file).read_text()
        assert text.count(old) == 1, f"{file} holds {old!r} {text.count(old)} times"
        (copy / file).write_text(text.replace(old, new))


def measure(name):
    """What comes out of an edit, by its number, or of a network as it is, by its kind."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        copy_edited(name, copy)

        def run(*words):
            subprocess.run([sys.executable, *words, "--out_dir", "out"], cwd=copy, check=True,
                           stdout=sys.stderr)

        if name in PICTURES:
            picture, start = PICTURES[name]
            run("-m", "lecture.walkthrough", picture)
            numbers = json.loads((copy / "out/numbers.json").read_text())[picture]
            return {key: x for key, x in numbers.items() if key.startswith(start)}
        attn = "softmax" if name in ("softmax", "6") else "rpc"
        run(*EVALUATE, "--ckpt", f"weights/shapes_{attn}.pt")
        rows = (copy / "out/results.jsonl").read_text().splitlines()
        return dict(zip(("clean", "PGD 2/255"), (json.loads(row)["top1"] for row in rows)))


def main():
    names = ["rpc", "softmax", *edits()]
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("names", nargs="*", choices=[*names, "all"], default="all")
    args = p.parse_args()
    for name in names if "all" in args.names else args.names:
        print(name, *(f"{key}: {x:.4g}" for key, x in measure(name).items()), sep="  ", flush=True)


if __name__ == "__main__":
    main()
