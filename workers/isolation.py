"""Users' code in a process of its own, which may raise, hang or die without harm to ours."""

import os
import socket
import subprocess
import sys


def start_isolated(module: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """`python -m module FD`, with this process's import path; FD is its end of a socket, ours is returned."""
    ours, theirs = socket.socketpair()
    with theirs:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    return process, ours
