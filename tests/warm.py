"""A Python that starts at once: each command runs in a fork of one that has imported PyTorch.

    python tests/warm.py --serve FILE                             # once; FILE is its address
    python -S tests/warm.py FILE train_cls.py --epochs 1          # one command at a time
    python -S tests/warm.py FILE -m referee.leak

Importing torch and torchvision and tidying them up at the end takes 6 CPU seconds, many times what
a network of the smallest scale takes. A client that is killed leaves its command running.
"""

import json
import os
import socket
import sys


def ask(address, command):
    """Have the command run with the stdout and stderr of this process; its exit code."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        socket.send_fds(server, [json.dumps(command).encode()], [1, 2])
        return server.recv(1)[0]


def serve(address):
    """Run what clients ask for, until the process that started this one is gone."""
    parent = os.getppid()
    import multiprocessing
    import eval_robust, train_cls, train_lm, train_seg  # noqa: E401, F401: what forks need not do
    fork = multiprocessing.get_context("fork")
    with socket.create_server(address, family=socket.AF_UNIX) as server:
        server.settimeout(5)
        while os.getppid() == parent:
            try:
                client, _ = server.accept()
            except TimeoutError:
                continue
            command, files, *_ = socket.recv_fds(client, 2 ** 16, 2)
            process = fork.Process(target=run, args=(json.loads(command), files))
            process.start()
            process.join()
            client.send(bytes([process.exitcode & 255]))
            client.close()
            for file in files:
                os.close(file)


def run(command, files):
    """As `python COMMAND...` does; files: descriptors in the place of stdout and stderr."""
    import runpy
    for file, own in zip(files, (1, 2)):
        os.dup2(file, own)
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    first, *rest = sys.argv[1:]
    if first != "--serve":
        sys.exit(ask(first, rest))
    sys.path[0] = os.getcwd()
    serve(*rest)
