"""Run a script in new processes, without the seconds that imports take."""

import multiprocessing
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path

import torch

import common


def child(main, flags, env, out, err):
    """Run main() as its script does, with its output in files."""
    sys.stdout, sys.stderr = open(out, "w"), open(err, "w")
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stderr.fileno(), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    os.environ.update(env)
    sys.argv = ["script", *flags]
    common.run(main)


class Started:
    """Start main() with these flags; `env` is added to its environment."""

    def __init__(self, main, flags, **env):
        # forked: the imports are there; but a fork cannot use a GPU
        context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
        self.folder = tempfile.TemporaryDirectory()
        self.files = [Path(self.folder.name, name) for name in ("out", "err")]
        self.process = context.Process(target=child, args=(main, flags, env, *self.files))
        self.process.start()

    def poll(self):
        return self.process.exitcode

    def send_signal(self, number):
        os.kill(self.process.pid, number)

    def communicate(self, timeout=300):
        """Return (stdout, stderr) after the end; kill the process if it takes too long."""
        self.process.join(timeout)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        return [file.read_text() for file in self.files]


def finish(process):
    """Return the stdout of a process; fail if it did not end with exit code 0."""
    out, err = process.communicate()
    wrong = "\n".join(line for line in err.splitlines() if "rror" in line)
    assert process.poll() == 0, wrong[-3000:]
    return out


def group(main, flags, world=2, errors=False, **env):
    """Return the stdout of `world` processes, started like torchrun does; env has priority.

    errors: return (stdout, stderr) of each process.
    """
    with socket.create_server(("localhost", 0)) as s:
        port = str(s.getsockname()[1])
    shared = dict(WORLD_SIZE=str(world), MASTER_ADDR="localhost", MASTER_PORT=port)
    processes = [Started(main, flags, **{**shared, "RANK": str(i), "LOCAL_RANK": str(i), **env})
                 for i in range(world)]
    printed = [finish(process) for process in processes]
    return [process.communicate() for process in processes] if errors else printed
