"""Make the ten edits of lecture/WALKTHROUGH.md, appendix E, each in a copy of this tree; measure.

    python -m lecture.edits 4            # the fourth; softmax, rpc: without an edit
    python -m lecture.edits --write      # all, some minutes; renews lecture/pictures/numbers.json
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
OWN = ("rpc ", "seen ", "token ", "all ")       # of a picture's numbers those that an edit can move
EVALUATE = ["eval_robust.py", "--measures", "clean", "pgd eps=2/255 steps=10", "--limit", "500"]


def edits():
    """(number, file, text, what it becomes) of every row of the table."""
    text = (ROOT / "lecture/WALKTHROUGH.md").read_text()
    return ROW.findall(text)


def edited_copy(number):
    """A copy of the programs and the networks, with the edit of this number, if there is one."""
    copy = Path(tempfile.mkdtemp())
    for name in subprocess.check_output(["git", "ls-files", "*.py", "*.jsonl", "weights"], cwd=ROOT,
                                        text=True).split():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    for n, file, old, new in edits():
        if n == number:
            text = (copy / file).read_text()
            assert text.count(old) == 1, f"{file} holds {old!r} {text.count(old)} times"
            (copy / file).write_text(text.replace(old, new))
    return copy


def accuracies(copy, attn):
    """Clean accuracy and accuracy under PGD at 2/255, per cent."""
    where = ["--ckpt", f"weights/shapes_{attn}.pt", "--out_dir", "out/edit"]
    subprocess.run([sys.executable, *EVALUATE, *where], cwd=copy, check=True, stdout=sys.stderr)
    rows = (copy / "out/edit/results.jsonl").read_text().splitlines()
    clean, attacked = (json.loads(row)["top1"] for row in rows)
    return dict(clean=clean, attacked=attacked)


def picture(copy, name):
    """What one cell of lecture/walkthrough.py measures itself."""
    command = [sys.executable, "-m", "lecture.walkthrough", name, "--out_dir", "out/edit"]
    subprocess.run(command, cwd=copy, check=True, stdout=sys.stderr)
    numbers = json.loads((copy / "out/edit/numbers.json").read_text())[name]
    return {key: x for key, x in numbers.items() if key.startswith(OWN)}


def measure(name):
    """What comes out of an edit, by its number, or of a network as it is, by its kind."""
    copy = edited_copy(name)
    if name in ("9", "10"):
        found = picture(copy, "attack" if name == "9" else "leak")
    else:
        found = accuracies(copy, "softmax" if name in ("softmax", "6") else "rpc")
    shutil.rmtree(copy)
    return found


def main():
    names = ["rpc", "softmax", *map(str, range(1, 11))]
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("names", nargs="*", choices=[*names, "all"], default="all")
    p.add_argument("--write", action="store_true", help="into lecture/pictures/numbers.json")
    args = p.parse_args()
    path = ROOT / "lecture/pictures/numbers.json"
    for name in names if "all" in args.names else args.names:
        found = {f"{name} {key}": float(f"{x:.4g}") for key, x in measure(name).items()}
        print(*(f"{key}: {x}" for key, x in found.items()), flush=True)
        if args.write:
            numbers = json.loads(path.read_text())
            numbers["edits"].update(found)
            path.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
