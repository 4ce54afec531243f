"""Processes for users' code: no way to end leaves one behind, nor anything that it has started."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from tests.end_to_end.processes import living
from tests.refusals import refused
from workers.user_code.process import Connection, NoAnswerError, UserProcess

SLEEP = [sys.executable, "-c", "import time; time.sleep(1000)"]


def obedient(payload: str) -> Callable[[str, Any], None]:
    """Answers with its number and that of a process that it has started; hangs or exits when it
    is asked to.
    """

    def answer(request: str, reply: Callable[[Any], None]) -> None:
        if request == "hang":
            time.sleep(1000)
        if request == "exit":
            os._exit(7)
        reply([payload, os.getpid(), subprocess.Popen(SLEEP).pid])

    return answer


def started() -> UserProcess:
    process = UserProcess(f"{__name__}:obedient", "payload")
    process.receive(60)
    return process


@pytest.mark.parametrize("forked", [False, True], ids=["process", "fork"])
def test_a_process_that_hangs_is_killed_with_what_it_has_started(forked: bool) -> None:
    source = started()
    process: Connection = source.fork() if forked else source
    process.send("go")
    payload, *pids = process.receive(60)
    assert payload == "payload" and process.alive
    process.send("hang")
    with refused("took more than reward.timeout_s=0.01 s", NoAnswerError):
        process.receive(0.01, "reward.timeout_s")
    assert living(pids, seconds=20) == [] and not process.alive
    assert source.alive == forked
    source.end()


def test_an_exit_is_told_with_its_code_and_a_fork_ends_alone() -> None:
    source = started()
    for process, told in (
        (source.fork(), "ended its process"),
        (source, "ended its process (exit code 7)"),
    ):
        process.send("exit")
        with refused(told, NoAnswerError):
            process.receive(60)
    with pytest.raises(NoAnswerError):
        source.fork()


def test_process_and_fork_end_with_the_owner() -> None:
    script = (
        f"import time; from {__name__} import started\n"
        "source = started(); fork = source.fork(); fork.send('go'); source.send('go')\n"
        "print(*fork.receive(60)[1:], *source.receive(60)[1:], flush=True); time.sleep(1000)"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    children = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
    owner.kill()
    owner.wait()
    assert len(children) == 4
    # A source has no keeper, so what it has started goes on.
    *ended, started_by_source = children
    started_by_source.kill()
    assert living([child.pid for child in ended]) == []
