"""The end of a server of forks is seen, before and after somebody waited for it."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests import fork_server
from tests.fork_guard import find_ended, server_ids


def test_a_server_that_has_ended_is_seen() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE
    ) as server:
        assert find_ended([server.pid]) == []
        server.kill()
        while not find_ended([server.pid]):
            pass  # the kernel ends it
        server.wait()
        assert find_ended([server.pid]) == [server.pid]


def test_servers_of_rays_workers_and_of_trials_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tests import trial_processes

    monkeypatch.setattr(fork_server, "SERVERS", [SimpleNamespace(pid=7)])
    monkeypatch.setattr(trial_processes.SERVER, "_forkserver_pid", 8)
    assert {7, 8} <= set(server_ids())
