"""Processes for users' code: no way to end leaves one behind, nor anything that it has started."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time

import psutil
import pytest

from tests.end_to_end.processes import living
from workers.isolation.forks import ForkPool
from workers.isolation.process import Channel, EndedError, Process, read_exactly, reply

SLEEP = [sys.executable, "-c", "import time; time.sleep(1000)"]


def start_and_hang(channel: Channel) -> None:
    """Starts a process of its own, tells its number, and never answers again."""
    reply(channel, [os.getpid(), subprocess.Popen(SLEEP).pid])
    time.sleep(1000)


def hang(channel: Channel) -> None:
    """Tells its number and never answers again."""
    reply(channel, os.getpid())
    time.sleep(1000)


def exit_with_seven(channel: Channel) -> None:
    channel.recv()
    os._exit(7)


class Hanging:
    """Answers with its number and that of a process that it has started; hangs when it is asked to."""

    def __init__(self, payload: bytes) -> None:
        self.payload = payload.decode()

    def __call__(self, request: str) -> str:
        if request == "hang":
            time.sleep(1000)
        return json.dumps([self.payload, os.getpid(), subprocess.Popen(SLEEP).pid])


def test_a_killed_process_takes_along_what_it_has_started() -> None:
    process = Process(f"{__name__}:start_and_hang")
    pids = process.receive(60)
    with pytest.raises(TimeoutError):
        process.receive(0.01)
    assert process.end() == "killed by SIGKILL"
    assert living(pids, seconds=20) == []


def test_an_exit_is_told_with_its_code() -> None:
    process = Process(f"{__name__}:exit_with_seven")
    process.send(b"now")
    with pytest.raises(EndedError, match="exit code 7"):
        process.receive(60)


def test_a_process_ends_with_its_owner() -> None:
    script = (
        "import time; from workers.isolation.process import Process\n"
        f"print(Process('{__name__}:hang').receive(60), flush=True); time.sleep(1000)"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    child = psutil.Process(int(owner.stdout.readline()))
    owner.kill()
    owner.wait()
    _, alive = psutil.wait_procs([child], timeout=20)
    assert alive == []


def test_a_killed_fork_takes_along_what_it_has_started() -> None:
    async def use() -> list[int]:
        pool = ForkPool(f"{__name__}:Hanging", b"payload")
        try:
            fork = await pool.take()
            payload, *pids = await fork.call("go", 60)
            assert payload == "payload"
            with pytest.raises(TimeoutError):
                await fork.call("hang", 0.01)
            fork.kill()
            return pids
        finally:
            await pool.stop()

    assert living(asyncio.run(use()), seconds=20) == []


def test_after_the_deadline_no_bytes_are_read_that_still_come() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"part")
        with pytest.raises(TimeoutError):
            read_exactly(ours, 4, deadline=time.monotonic() - 1)
        assert read_exactly(ours, 4, deadline=time.monotonic() + 60) == b"part"
