"""Do the tests see small bugs? Puts each bug of a list alone into a copy of the tree; runs tests.

    python tests/mutants.py cls                   # the list tests/mutants/cls.txt
    python tests/mutants.py cls --only 3,7        # two of its bugs
    python tests/mutants.py cls seg lm eval       # several lists: minutes to hours

A bug is a block of lines; an empty line ends it. A line "tests: ..." names, for the blocks below
it, what pytest is given (files, -k and the like). `-` is a text that stands exactly once in the
file, `+` is put in its place; several of a kind make several lines:

    tests: tests/test_flags_cls.py

    # clip is ignored
    train_cls.py
    - clip_grad_norm_(model.parameters(), args.clip or math.inf)
    + clip_grad_norm_(model.parameters(), math.inf)

Ends in exit code 1 when a bug survives. A run without any bug comes first and has to pass.
"""

import argparse
import importlib
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def read_list(name):
    """The bugs of tests/mutants/<name>.txt; ValueError names one that does not fit the tree."""
    bugs, tests = [], []
    text = (ROOT / "tests" / "mutants" / f"{name}.txt").read_text()
    for block in re.split(r"\n\s*\n", text):
        parts = {mark: [] for mark in ("#", "-", "+", "tests:", "")}
        for line in block.splitlines():
            mark = next(mark for mark in parts if line.startswith(mark))
            parts[mark].append(line[len(mark) + 1:] if mark else line)
        if parts["tests:"]:
            tests = shlex.split(parts["tests:"][0])
        if not parts["-"]:                                   # a heading
            continue
        bug = dict(number=len(bugs) + 1, list=name, title=parts["#"][0], file=parts[""][0],
                   old="\n".join(parts["-"]), new="\n".join(parts["+"]), tests=tests)
        found = (ROOT / bug["file"]).read_text().count(bug["old"])
        if found != 1:
            raise ValueError(f"{name} {bug['number']}, {bug['title']}: its text stands {found} "
                             f"times in {bug['file']}, expected once")
        bugs.append(bug)
    return bugs


def copy_tree(tree):
    """Copy what git does not ignore; link the folder of shared data beside it, if there is one."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for file in subprocess.check_output(listing, cwd=ROOT, text=True).splitlines():
        if (ROOT / file).exists():
            (tree / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, tree / file)
    if (ROOT.parent / "shared").exists():
        (tree.parent / "shared").symlink_to((ROOT.parent / "shared").resolve())


def run_pytest(tree, tests, output):
    """In a process of its own: run pytest until a test fails, its output in a file."""
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(tree)
    sys.path.pop(0)                                          # this folder: the copy has its own
    code = pytest.main(["-x", "-q", "-n0", "-p", "no:cacheprovider", *tests])
    sys.stdout.flush()
    os._exit(code)


def run_tests(tree, tests, timeout=None):
    """Run pytest until a test fails. Returns its exit code (None: out of time) and its output."""
    output = tree.with_name("output.txt")
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=run_pytest, args=(tree, tests, output))
    process.start()
    process.join(timeout)
    code = process.exitcode
    if code is None:
        os.killpg(process.pid, signal.SIGKILL)               # what the tests started goes with them
        process.join()
    return code, output.read_text(errors="replace")


def verdict(code, output):
    """"killed" or "SURVIVED", and by what: only a test that fails, or hangs, has seen the bug."""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.M)
    if code is None:
        return "killed", "out of time"
    if code == 1 and failed:
        return "killed", failed[1].removeprefix("tests/")
    return "SURVIVED", "" if code == 0 else f"pytest ended with {code}: {output.strip()[-300:]}"


def try_all(bugs, tree):
    """Try each bug, print a line, return the survivors."""
    survivors = []
    limits = {}                                              # tests -> seconds they may take
    for i, bug in enumerate(bugs, 1):
        what, path = " ".join(bug["tests"]), tree / bug["file"]
        start = time.time()
        if what not in limits:
            code, output = run_tests(tree, bug["tests"])
            if code:
                raise ValueError(f"without any bug, pytest {what} fails:\n{output[-3000:]}")
            seconds = time.time() - start
            print(f"without any bug, pytest {what} passes in {seconds:.0f} s", flush=True)
            limits[what] = 60 + 5 * seconds

        start, whole = time.time(), path.read_text()
        path.write_text(whole.replace(bug["old"], bug["new"]))
        result, why = verdict(*run_tests(tree, bug["tests"], limits[what]))
        path.write_text(whole)
        survivors += [bug] if result == "SURVIVED" else []
        print(f"{i}/{len(bugs)}  {bug['list']} {bug['number']:<3} {result:8}  {bug['title']}  "
              f"[{bug['file']}, {time.time() - start:.0f} s]  {why}", flush=True)
    return survivors


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lists", nargs="+", help="names in tests/mutants/, without .txt")
    parser.add_argument("--only", help="numbers of the bugs to try, such as 3,7")
    parser.add_argument("--tests", help="give pytest this instead of what the list names")
    args = parser.parse_args()

    bugs = [bug for name in args.lists for bug in read_list(name)]
    if args.only:
        bugs = [bug for bug in bugs if str(bug["number"]) in args.only.split(",")]
    if args.tests:
        bugs = [{**bug, "tests": shlex.split(args.tests)} for bug in bugs]

    os.nice(10)
    os.environ.update(OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    sys.dont_write_bytecode = True                           # no .pyc of another bug is left behind
    for name in ("torch", "torchvision", "timm"):            # once: each bug starts from here
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        copy_tree(Path(folder, "tree"))
        survivors = try_all(bugs, Path(folder, "tree"))
    print(f"\n{len(survivors)} of {len(bugs)} bugs survived")
    for bug in survivors:
        print(f"  {bug['list']} {bug['number']}  {bug['title']}  [{bug['file']}]")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as e:
        sys.exit(f"error: {e}")
