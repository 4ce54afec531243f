"""Processes for users' code: no way to end leaves one behind, nor anything that it has started."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
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
        if request == "orphan":
            # A shell that ends at once leaves a process to nobody, in a session of its own.
            shell = f"setsid {shlex.join(SLEEP)} >/dev/null 2>&1 & echo $!"
            pid = int(subprocess.run(["sh", "-c", shell], stdout=subprocess.PIPE, check=True).stdout)
        else:
            pid = subprocess.Popen(SLEEP, start_new_session=request == "session").pid
        reply([payload, os.getpid(), pid])

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
    for process, told in ((source.fork(), "ended its process"), (source, "ended its process (exit code 7)")):
        process.send("exit")
        with refused(told, NoAnswerError):
            process.receive(60)
    with pytest.raises(NoAnswerError):
        source.fork()


STARTS = ["group", "session", "orphan"]


@pytest.mark.parametrize("start", STARTS)
def test_process_and_fork_end_with_the_owner(start: str) -> None:
    script = (
        f"import time; from {__name__} import started\n"
        f"source = started(); fork = source.fork(); fork.send({start!r}); source.send({start!r})\n"
        "print(*fork.receive(60)[1:], *source.receive(60)[1:], flush=True); time.sleep(1000)"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(pids) == 4 and all(psutil.pid_exists(pid) for pid in pids)
    owner.kill()
    owner.wait()
    assert living(pids, seconds=20) == []


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("end", ["exit", "kill", "end"])
def test_a_process_takes_what_it_has_started_along(start: str, end: str) -> None:
    process = started()
    process.send(start)
    _, pid, child = process.receive(60)
    if end == "exit":
        process.send("exit")
        with refused("ended its process (exit code 7)", NoAnswerError):
            process.receive(60)
    elif end == "kill":
        os.kill(pid, signal.SIGKILL)
        with refused("ended its process (killed by SIGKILL)", NoAnswerError):
            process.receive(60)
    else:
        process.end()
    assert living([pid, child], seconds=20) == []


def closing(path: str) -> Callable[[str, Any], None]:
    """Writes to a file at SIGTERM, later than at once."""

    def close(signum: int, frame: Any) -> None:
        time.sleep(1)
        Path(path).write_text("closed")
        sys.exit()

    def answer(request: str, reply: Callable[[Any], None]) -> None:
        signal.signal(signal.SIGTERM, close)
        reply(os.getpid())

    return answer


def test_a_fork_closes_what_it_holds_after_its_owner_was_killed(tmp_path: Path) -> None:
    script = (
        "import sys, time; from workers.user_code.process import UserProcess\n"
        f"source = UserProcess('{__name__}:closing', sys.argv[1]); source.receive(60)\n"
        "fork = source.fork(closes=True); fork.send('go'); "
        "print(fork.receive(60), flush=True); time.sleep(1000)"
    )
    closed = tmp_path / "closed"
    owner = subprocess.Popen([sys.executable, "-c", script, str(closed)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    owner.kill()
    owner.wait()
    assert living([pid], seconds=20) == [] and closed.read_text() == "closed"
