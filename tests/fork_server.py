"""Ray's workers as forks of one process that has imported torch, transformers and vLLM.

    raylet --command--> script --command, environment, folder, descriptors--> fork server --fork--> Ray's worker

A new interpreter imports for 3 (a reward) to 10 (an engine) CPU seconds: most of what a small run takes. A worker
registers at the raylet by its own process id, so the script ends at once. Runs that a test starts by a command
have new interpreters, as users' runs do.
"""

import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from typing import Any

import pytest

from tests import ray_worker_script

# Nothing that imports numba: vLLM's search for Triton kernels in all modules fails at an object of llvmlite.
IMPORTED = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "peft",
    "vllm.v1.engine.async_llm",
    "workers.rollout.engine_actor",
    "workers.roles.reward",
)
REQUEST_BYTES = 2**17
SERVERS: list[subprocess.Popen[bytes]] = []
"""The one of this process: it ends when this process does, which closes its stdin."""


def fork_workers(patch: pytest.MonkeyPatch) -> None:
    """Let a Ray that starts before the patch ends fork its workers, as long as this process lives."""
    from ray._private import ray_constants

    # Ray joins this name to its own folder, and an absolute path stays as it is.
    patch.setattr(ray_constants, "SETUP_WORKER_FILENAME", ray_worker_script.__file__)
    patch.setenv(ray_worker_script.ADDRESS, start_server())


@functools.cache
def start_server() -> str:
    """Return its address at once: requests wait there until it has imported."""
    address = f"ballast-fork-server-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("\0" + address)
        listener.listen(64)
        descriptor = listener.fileno()
        command = [sys.executable, "-m", "tests.fork_server", str(descriptor)]
        server = subprocess.Popen(
            command, stdin=subprocess.PIPE, pass_fds=[descriptor], start_new_session=True
        )
    SERVERS.append(server)
    return address


def import_modules() -> None:
    """Import all but Ray: its library reads the worker's job from the environment when it is loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "ray", None)
        for name in IMPORTED:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


def serve(listener: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork for each request until stdin closes. Returns in each fork its request, and descriptors 0 to 2."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a fork
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            sys.exit()
        connection, _ = listener.accept()
        with connection:
            message, descriptors, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 3)
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return json.loads(message), descriptors
        for descriptor in descriptors:
            os.close(descriptor)


def become_worker(request: dict[str, Any], descriptors: list[int]) -> None:
    os.setsid()  # Ray ends a worker's group of processes with it
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.modules["numpy"].random.seed()  # otherwise all forks would draw the same
    sys.argv = request["command"]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    import_modules()
    become_worker(*serve(socket.socket(fileno=int(sys.argv[1]))))
