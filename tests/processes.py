"""Run scripts in forked processes, which start without the seconds that imports take."""

import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch._dynamo  # noqa: F401: the first optimiser imports it, which takes 2 s in a fork

import common


def child(main, flags, env, out, err):
    """Run main() as its script does; write its output to the files `out` and `err`."""
    sys.stdout, sys.stderr = open(out, "w"), open(err, "w")
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stderr.fileno(), 2)
    torch.set_num_threads(1)
    os.environ.update(env)
    sys.argv = ["script", *flags]
    common.run(main)


class Started:
    """Start main() with these flags; `env` is added to its environment."""

    def __init__(self, main, flags, **env):
        # A fork has all imports already, but it cannot use a GPU.
        context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
        self.folder = tempfile.TemporaryDirectory()
        self.files = [Path(self.folder.name, name) for name in ("out", "err")]
        self.process = context.Process(target=child, args=(main, flags, env, *self.files))
        self.process.start()

    def poll(self):
        return self.process.exitcode

    def communicate(self, timeout=300):
        """Return (stdout, stderr) after the end; kill the process if it takes too long."""
        self.process.join(timeout)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        return [file.read_text() for file in self.files]


ROOT = Path(__file__).parent.parent


def run_in(tree, words):
    """Import the modules of `tree` instead of the tested ones, and run a command of its scripts."""
    for name, module in list(sys.modules.items()):
        file = Path(getattr(module, "__file__", None) or "/")
        if ROOT in file.parents and ROOT / "tests" not in file.parents:
            del sys.modules[name]
    sys.path[:] = [str(tree), *(path for path in sys.path if path != str(ROOT))]
    os.chdir(tree)
    sys.argv = words[words[0] == "-m":]
    if words[0] == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")


def run_command(tree, words):
    """Run "python WORDS" in a copy of the repository. Returns (exit code, stdout, stderr)."""
    process = Started(partial(run_in, tree, words), [])
    out, err = process.communicate()
    return process.poll(), out, err


def finish(process):
    """Return the stdout of a process; fail if it did not end with exit code 0."""
    out, err = process.communicate()
    wrong = "\n".join(line for line in err.splitlines() if "rror" in line)
    assert process.poll() == 0, wrong[-3000:]
    return out


def group(main, flags, world=2, **env):
    """Start `world` processes as torchrun does; return the stdout of each process.

    env: environment variables, which override torchrun's.
    """
    with socket.create_server(("localhost", 0)) as s:
        port = str(s.getsockname()[1])
    shared = dict(WORLD_SIZE=str(world), MASTER_ADDR="localhost", MASTER_PORT=port)
    processes = [Started(main, flags, **{**shared, "RANK": str(i), "LOCAL_RANK": str(i), **env})
                 for i in range(world)]
    return [finish(process) for process in processes]
