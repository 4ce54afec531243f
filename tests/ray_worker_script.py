"""Ray's raylet starts this script for each of its workers: see tests/fork_server.py. It imports little."""

import json
import os
import socket
import sys

ADDRESS = "BALLAST_TEST_FORK_SERVER"
"""Environment variable of Ray's processes: the name of the server's socket."""
RUNTIME_ENVIRONMENT = "--serialized-runtime-env-context="
OPTIONS_OF_RAYS_SCRIPT = (RUNTIME_ENVIRONMENT, "--language=")


def request_fork(command: list[str]) -> None:
    """Send the server what makes a process: command, environment, folder, and descriptors."""
    request = {
        "command": [
            word for word in command if not word.startswith(OPTIONS_OF_RAYS_SCRIPT)
        ],
        "environment": dict(os.environ),
        "folder": os.getcwd(),
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect("\0" + os.environ[ADDRESS])
        socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])


def needs_interpreter(command: list[str]) -> bool:
    """Tell whether the worker has a runtime environment: variables that imports may read, or another folder."""
    texts = [word for word in command if word.startswith(RUNTIME_ENVIRONMENT)]
    contexts = [json.loads(text.removeprefix(RUNTIME_ENVIRONMENT)) for text in texts]
    return any(
        context.get("env_vars") or context.get("command_prefix") for context in contexts
    )


def start_interpreter(command: list[str]) -> None:
    """Become the script of Ray that this one stands in for."""
    from ray._private.workers import __path__ as folders

    script = os.path.join(folders[0], "setup_worker.py")
    os.execv(sys.executable, [sys.executable, script, *command])


if __name__ == "__main__":
    start = start_interpreter if needs_interpreter(sys.argv[1:]) else request_fork
    start(sys.argv[1:])
