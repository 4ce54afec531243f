"""One server of forks of each kind for all processes of pytest-xdist: each imports for 8 to 10 CPU seconds.

    pytest -n 3 --start_servers--> servers of Ray's workers, trials and ranks
        |                              ^
        +--environment--> a process that runs tests: --use_servers--+

They end with the process that started them, and what forks print goes to OUTPUT: a terminal would show it between
dots. A process without pytest-xdist starts its own, when a test needs one.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import SimpleNamespace

from tests import fork_server, trial_processes
from tests.workers.model.ranks import PRELOADED

VARIABLE = "BALLAST_TEST_SERVERS"
OUTPUT = Path(__file__).parents[1] / ".pytest_cache" / "forks.log"
SERVERS = {"trials": trial_processes.SERVER, "ranks": forkserver._forkserver}


def start_servers() -> None:
    """Start all, and let processes that start later know them."""
    ForkServerContext().set_forkserver_preload(PRELOADED)
    known = {}
    with writing_to_file():
        for name, server in SERVERS.items():
            server.ensure_running()
            known[name] = (server._forkserver_address, server._forkserver_pid)
        known["workers"] = (fork_server.start_server(), fork_server.SERVERS[0].pid)
    os.environ[VARIABLE] = json.dumps(known)


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


def use_servers() -> None:
    """Let this process fork from them, if it was told of them."""
    known = json.loads(os.environ.get(VARIABLE, "{}"))
    if not known:
        return
    for name, server in SERVERS.items():
        server._forkserver_address, server._forkserver_pid = known[name]
        # Forks close it. To hold it open keeps a server alive, which only its starter is to do.
        server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
        server.ensure_running = lambda: None  # type: ignore[method-assign]  # it waits for a child
    address, process_id = known["workers"]
    fork_server.SERVERS.append(SimpleNamespace(pid=process_id))
    fork_server.start_server = lambda: address
