"""One server of ranks for all processes of pytest-xdist: each imported for 8 CPU seconds.

    pytest -n 3 --start_server--> forks that become ranks
        |                              ^
        +--environment--> a process that runs tests: --use_server--+

It ends with the process that started it, and what ranks print goes to OUTPUT: a terminal would show it between dots.
Ray's workers and trials keep a server for each process: tests look for them among their own children.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

from tests.workers.model.ranks import PRELOADED

VARIABLE = "BALLAST_TEST_SERVER"
OUTPUT = Path(__file__).parents[1] / ".pytest_cache" / "ranks.log"
SERVER = forkserver._forkserver


def start_server() -> None:
    """Start it, and let processes that start later know it."""
    ForkServerContext().set_forkserver_preload(PRELOADED)
    with writing_to_file():
        SERVER.ensure_running()
    os.environ[VARIABLE] = json.dumps((SERVER._forkserver_address, SERVER._forkserver_pid))


@contextmanager
def writing_to_file() -> Iterator[None]:
    """Let processes that start in the block write to OUTPUT."""
    OUTPUT.parent.mkdir(exist_ok=True)
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    with OUTPUT.open("w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    yield
    for descriptor, copy in zip((1, 2), kept, strict=True):
        os.dup2(copy, descriptor)
        os.close(copy)


def use_server() -> None:
    """Let this process fork from it, if it was told of it."""
    if VARIABLE not in os.environ:
        return
    SERVER._forkserver_address, SERVER._forkserver_pid = json.loads(os.environ[VARIABLE])
    # Forks close it. To hold it open keeps a server alive, which only its starter is to do.
    SERVER._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
    SERVER.ensure_running = lambda: None  # type: ignore[method-assign]  # it waits for a child
