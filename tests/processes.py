"""Run scripts in forked processes, which start without the seconds that imports take."""

import gc
import multiprocessing
import os
import re
import runpy
import socket
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

import common

if multiprocessing.parent_process() is None:
    # The first optimiser imports it. That takes 2 s in a fork; a spawned process needs none.
    import torch._dynamo  # noqa: F401


def child(main, flags, env, out, err, log_every):
    """Run main() as its script does; write its output to the files `out` and `err`.

    log_every: common.LOG_EVERY of the test, because a spawned process imports common again.
    """
    gc.freeze()                         # a collection would look at all modules of the parent
    sys.stdout, sys.stderr = open(out, "w"), open(err, "w")
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stderr.fileno(), 2)
    torch.set_num_threads(1)
    os.environ.update(env)
    common.LOG_EVERY = log_every
    sys.argv = ["script", *flags]
    common.run(main)


def start(main, flags, **env):
    """Start main() with these flags; `env` is added to its environment. Returns the process."""
    # A fork has all imports already, but it cannot use a GPU.
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    folder = tempfile.TemporaryDirectory()
    files = [Path(folder.name, name) for name in ("out", "err")]
    process = context.Process(target=child, args=(main, flags, env, *files, common.LOG_EVERY))
    process.start()
    process.folder, process.files = folder, files
    return process


def finish(process, timeout=300):
    """Return (exit code, stdout, stderr) after the end; kill the process if it takes too long."""
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()
    out, err = (file.read_text() for file in process.files)
    return process.exitcode, re.sub(r"\[Gloo\].*\n", "", out), err    # gloo of PyTorch 2.8 prints


ROOT = Path(__file__).parent.parent


def run_in(tree, words):
    """Import the modules of `tree` instead of the tested ones, and run a command of its scripts."""
    ours = set()                        # first parts of names, because folders have no file
    for name, module in sys.modules.items():
        file = getattr(module, "__file__", None) or ""
        if file.startswith(f"{ROOT}/") and not file.startswith(f"{ROOT}/tests/"):
            ours.add(name.partition(".")[0])
    for name in list(sys.modules):
        if name.partition(".")[0] in ours:
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
    return finish(start(partial(run_in, tree, words), []))


def group_results(main, flags, world=2, **env):
    """Start `world` processes as torchrun does; return (exit code, stdout, stderr) of each process.

    env: environment variables, which override torchrun's.
    """
    with socket.create_server(("localhost", 0)) as s:
        port = str(s.getsockname()[1])
    shared = dict(WORLD_SIZE=str(world), MASTER_ADDR="localhost", MASTER_PORT=port)
    processes = [start(main, flags, **{**shared, "RANK": str(i), "LOCAL_RANK": str(i), **env})
                 for i in range(world)]
    return [finish(process) for process in processes]


def group(main, flags, world=2, **env):
    """Start `world` processes, which must not fail; return the stdout of each process."""
    codes, printed, errors = zip(*group_results(main, flags, world, **env))
    assert not any(codes), errors
    return printed
