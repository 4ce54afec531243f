"""Runs in processes of their own, and whether any of these is left."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from workers.network import GLOO, NCCL

ROOT = Path(__file__).parents[2]
MARK = "BALLAST_TEST_RUN"
# Seconds. When a driver is killed, Ray's two agents try for 60 s to reach the dead control service.
LAST_PROCESS_ENDS = 120


def marked_environment() -> dict[str, str]:
    """This environment with a mark that every process started from it inherits, and without a cluster of
    ours.

    Ray's workers get the priority of other processes, as in tests/conftest.py. The interface of collectives is
    left out: actors in the tests' own process have set it, to the machine's and not to this run's.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("RAY_") and name not in (GLOO, NCCL)
    }
    binaries = str(Path(sys.executable).parent)
    environment |= {"RAY_worker_niceness": "0"}
    return environment | {
        MARK: uuid.uuid4().hex,
        "PATH": f"{binaries}:{environment['PATH']}",
    }


def survivors(mark: str) -> list[psutil.Process]:
    """Living processes that carry the mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.environ().get(MARK) == mark
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
        except psutil.Error:
            continue
    return found


def listening(pid: int) -> list[tuple[str, str]]:
    """(process, address) of every TCP socket that the process and those below it listen on."""
    found = []
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with suppress(psutil.Error):
            sockets = process.net_connections(kind="tcp")
            found += [
                (process.name(), each.laddr.ip)
                for each in sockets
                if each.status == psutil.CONN_LISTEN
            ]
    return found


def living(pids: Iterable[int], seconds: float = 20.0) -> list[int]:
    """Which of the processes still run after at most `seconds`; one that nobody has waited for does not."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if _runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def all_end(mark: str, seconds: float = LAST_PROCESS_ENDS) -> list[str]:
    """What of the marked processes still lives after at most `seconds`; it is killed."""
    deadline = time.monotonic() + seconds
    while (left := survivors(mark)) and time.monotonic() < deadline:
        time.sleep(0.5)
    names = [" ".join(process.cmdline())[:200] for process in left if process.is_running()]
    for process in left:
        process.kill()
    return names


def begin(
    command: list[str], environment: dict[str, str], folder: Path = ROOT
) -> "subprocess.Popen[str]":
    """Start a command that heeds Ctrl-C, in a session of its own, with pipes for what it says.

    The shell of a suite in the background ignores SIGINT, and every process below inherits that.
    """
    pipes = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        text=True,
        start_new_session=True,
        preexec_fn=heed,
        **pipes,
    )


def settings_file(workspace: Path) -> list[str]:
    """An empty configuration file: everything comes from overrides."""
    file = workspace / "empty.yaml"
    file.write_text("{}\n")
    return ["--config", str(file)]


@dataclass(frozen=True)
class Stopped:
    """How a command ended: its exit code, its output, and the processes of its mark that still ran two
    minutes later.

    said: the lines of its output up to the one that it was stopped at. listening: on what it did then, see
    `listening`.
    """

    code: int
    said: list[str]
    errors: str
    left: list[str]
    listening: list[tuple[str, str]]


def stopped(
    stop: signal.Signals, said_last: str, command: list[str], environment: dict[str, str]
) -> Stopped:
    """Start the command, and send it the signal when it has said a line that begins so.

    environment: a marked one. Ctrl-C goes to the whole foreground group, as a terminal sends it.
    """
    run = begin(command, environment)
    said: list[str] = []
    for line in run.stdout:
        said.append(line)
        if line.startswith(said_last):
            break
    # Which takes as long as a step.
    sockets = [] if stop is signal.SIGKILL else listening(run.pid)
    if stop is signal.SIGINT:
        os.killpg(run.pid, stop)
    else:
        run.send_signal(stop)
    _, errors = run.communicate(timeout=120)
    return Stopped(run.returncode, said, errors, all_end(environment[MARK]), sockets)


def ports(shift: int) -> list[str]:
    """Options of `ray start`: ports unlike the defaults, which the session's own Ray may hold.

    Without a port for its agent no job would start.
    """
    places = {"port": 26379, "dashboard-port": 28265, "ray-client-server-port": 20001}
    places |= {"dashboard-agent-listen-port": 25365}
    return [f"--{name}={first + shift}" for name, first in places.items()]


class Cluster:
    """A Ray of `ray start --head`, with token authentication as it is by default, and further nodes on this
    machine.
    """

    def __init__(self, shift: int, cpus: int, *options: str, **environment: str) -> None:
        """shift: see `ports`. environment: set where Ray starts its workers."""
        self.environment = marked_environment() | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": uuid.uuid4().hex,
        }
        self.environment |= environment
        self._head = f"127.0.0.1:{26379 + shift}"
        self._ray("--head", f"--num-cpus={cpus}", *ports(shift), *options)

    @property
    def joined(self) -> dict[str, str]:
        """The environment of a run that joins it."""
        return self.environment | {"RAY_ADDRESS": self._head}

    def add_node(self, cpus: int) -> psutil.Process:
        """Start a node and return its raylet."""
        before = {process.pid for process in self.raylets()}
        self._ray(f"--address={self._head}", f"--num-cpus={cpus}")
        return next(process for process in self.raylets() if process.pid not in before)

    def raylets(self) -> list[psutil.Process]:
        return [
            process
            for process in survivors(self.environment[MARK])
            if process.name() == "raylet"
        ]

    def end(self) -> None:
        """End all of it; `ray stop` would end every Ray of this machine, the test session's too."""
        all_end(self.environment[MARK], 0)

    def _ray(self, *options: str) -> None:
        command = ["ray", "start", "--disable-usage-stats", *options]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, cwd=ROOT
        )
        assert done.returncode == 0, done.stdout + done.stderr
