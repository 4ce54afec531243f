"""Servers of forks outlive every test: a test that ends them costs later ones their imports, or fails them."""

import sys
from collections.abc import Iterable
from multiprocessing import forkserver

import psutil


def server_ids() -> list[int]:
    """Return process ids of the servers that have started: of trials, of ranks, and of Ray's workers."""
    servers = [forkserver._forkserver]
    if "tests.trial_processes" in sys.modules:
        servers.append(sys.modules["tests.trial_processes"].SERVER)
    ids = [server._forkserver_pid for server in servers]
    if "tests.fork_server" in sys.modules:
        ids += [server.pid for server in sys.modules["tests.fork_server"].SERVERS]
    return [process_id for process_id in ids if process_id is not None]


def find_ended(process_ids: Iterable[int]) -> list[int]:
    return [process_id for process_id in process_ids if not is_running(process_id)]


def is_running(process_id: int) -> bool:
    """Tell whether a process runs. One that nobody has waited for does not."""
    try:
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
