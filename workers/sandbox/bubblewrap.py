"""A sandbox made by bubblewrap: namespaces, a filter of system calls, and limits. It needs no daemon and no
image.

    owner --> bwrap: no network, no files of this machine but /usr and Python, a root in limited memory
        '-- pipes --> supervisor, process 1 --> commands

It ends with the thread that started it, however that ends.
"""

import json
import os
import platform
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import SystemRandom
from threading import Event, RLock, Thread, Timer
from typing import Any

from workers.sandbox.gateway_relay import GatewayRelay
from workers.sandbox.protocol import (
    MIB,
    CommandResult,
    Sandbox,
    SandboxError,
    SandboxFileError,
    SandboxLabel,
    SandboxLimits,
    argument_list,
)

NOBODY = 65534  # root's processes have no limit on their number, so root starts the sandbox as this user
HOME = "/box"
PATH = "/usr/local/bin:/usr/bin:/bin:/python/bin"
GRACE_SECONDS = 10.0  # beyond a command's time, for a supervisor that does not answer
START_SECONDS = 60.0
WATCH_SECONDS = 0.25
OPEN_FILES = 1024
RELAY_THREADS = 128

# From linux/audit.h, with a column of the numbers below.
MACHINES = {
    "x86_64": (0xC000003E, 0),
    "aarch64": (0xC00000B7, 1),
}
SOCKET = (41, 198)
AF_UNIX = 1
AF_INET = 2
REFUSED = {
    # This and the next three hold memory that no process has mapped.
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "ptrace": (101, 117),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "sched_setaffinity": (203, 122),  # cores are a limit
}
FIRST_NEW = 424  # calls since Linux 5.1, such as io_uring's: programs do without them
ALLOW, KILL, ENOSYS, EACCES = 0x7FFF0000, 0x80000000, 0x50026, 0x5000D  # linux/seccomp.h

BREAKOUT = f"""
import ctypes, os, resource, socket
libc, refusals = ctypes.CDLL(None), []
def holds(name, attempt, *arguments):
    try:
        if attempt(*arguments) == -1:
            raise OSError
    except (OSError, MemoryError, ValueError):
        refusals.append(name)
def fork():
    for _ in range(16):
        if not os.fork():
            os.execv("/usr/bin/env", ["env", "sleep", "1"])
holds("network", socket.create_connection, ("127.0.0.1", 9), 1)
holds("sockets", socket.socket, 40, socket.SOCK_STREAM)
holds("/usr", open, "/usr/written", "w")
holds("home", os.listdir, {os.path.expanduser("~")!r})
holds("/proc", os.listdir, "/proc")
holds("disk", lambda: open("/box/large", "wb").write(bytes(2**21)))
holds("cores", os.sched_setaffinity, 0, range(os.cpu_count()))
holds("namespaces", libc.unshare, 0x10000000)
holds("memory", bytearray, 2**28)
holds("memfd", libc.memfd_create, b"x", 0)
holds("shared memory", libc.shmget, 0, 4096, 0o1600)
holds("limits", resource.setrlimit, resource.RLIMIT_NPROC, (-1, -1))
holds("processes", fork)
print(*refusals, sep=", ")
"""
CLAIMS = [
    line.split('"')[1] for line in BREAKOUT.splitlines() if line.startswith('holds("')
]
TRIAL_LIMITS = SandboxLimits(memory_mib=256, processes=8, disk_mib=1, command_s=30)
TRIAL_LABEL = SandboxLabel("", "trial")


class BubblewrapSandbox(Sandbox):
    """A sandbox of processes on this machine."""

    def __init__(
        self,
        limits: SandboxLimits,
        label: SandboxLabel,
        *,
        gateway: tuple[str, int] | None = None,
        folders: Sequence[str] = (),
        interpreter: str = "",
    ) -> None:
        """gateway: host and port outside that commands reach as 127.0.0.1 and this port. folders: of this
        machine, which commands may read. interpreter: Python of the sandbox, empty for a tried one.
        """
        super().__init__(limits, label)
        if limits.network:
            raise SandboxError("bubblewrap: it has no network. Use docker or another kind")
        self._gateway = gateway
        self._folders = folders
        self._interpreter = interpreter
        self._process: subprocess.Popen[bytes] | None = None
        self._relay: GatewayRelay | None = None
        self._turn = RLock()
        self._loss = ""

    @property
    def python(self) -> str:
        """Python's path inside."""
        return f"/python/bin/{Path(self._interpreter).name}"

    def start(self) -> None:
        self._interpreter = self._interpreter or find_interpreter()
        if self._gateway:
            self._relay = GatewayRelay(*self._gateway)
        self._process = self._start_process()
        timer = Timer(START_SECONDS, self._lose, ["it did not start in time"])
        timer.start()
        try:
            self._receive()
        finally:
            timer.cancel()

    def run(
        self,
        command: str | Sequence[str],
        *,
        stdin: bytes = b"",
        variables: Mapping[str, str] | None = None,
        folder: str = "",
        timeout_s: float | None = None,
    ) -> CommandResult:
        environment = {"HOME": HOME, "LANG": "C.UTF-8", "PATH": PATH, "PWD": folder or HOME}
        seconds = self.seconds_of(timeout_s)
        request = {
            "do": "run",
            "command": argument_list(command),
            "variables": environment | dict(variables or {}),
            "folder": folder or HOME,
            "seconds": seconds,
            "memory_kib": self.limits.memory_mib * 1024,
            "output_bytes": self.limits.output_bytes,
        }
        ended = Event()
        watcher = Thread(target=self._watch_memory, args=(ended,), daemon=True)
        watcher.start()
        try:
            header, output = self._ask(request, stdin, seconds + GRACE_SECONDS)
        finally:
            ended.set()
        return CommandResult(
            output, header["exit_code"], header["cut"], header["timed_out"]
        )

    def read(self, path: str) -> bytes:
        request = {
            "do": "read",
            "path": _inside(path),
            "longest": self.limits.disk_mib * MIB,
        }
        _, content = self._ask(request, b"", START_SECONDS)
        return content

    def write(self, path: str, content: bytes) -> None:
        self._ask({"do": "write", "path": _inside(path)}, content, START_SECONDS)

    def end_commands(self) -> None:
        self._ask({"do": "end"}, b"", START_SECONDS)

    def stop(self) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            self._lose("it was stopped")
            process.wait()
        with self._turn:
            if process is not None:
                for stream in (process.stdin, process.stdout):
                    with suppress(OSError):
                        stream and stream.close()
            if self._relay is not None:
                self._relay.close()
            self._process = None
            self._relay = None

    def _ask(
        self, request: dict[str, Any], content: bytes, seconds: float
    ) -> tuple[dict[str, Any], bytes]:
        with self._turn:
            if self._process is None:
                raise SandboxError(
                    f"the sandbox is not running: {self._loss or 'call start first'}"
                )
            timer = Timer(seconds, self._lose, [f"it did not answer in {seconds:g} s"])
            timer.start()
            try:
                header = json.dumps(request | {"size": len(content)}).encode() + b"\n"
                assert self._process.stdin is not None
                with suppress(BrokenPipeError):  # why it ended follows
                    self._process.stdin.write(header)
                    self._process.stdin.write(content)
                    self._process.stdin.flush()
                return self._receive()
            finally:
                timer.cancel()

    def _receive(self) -> tuple[dict[str, Any], bytes]:
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        try:
            header = json.loads(line)
            content = self._process.stdout.read(header.get("size", 0))
        except ValueError:
            self._lose("")
            code = self._process.wait()
            text = line.decode(errors="replace").strip()
            reason = self._loss or text or f"bwrap ended with code {code}"
            raise SandboxError(f"the sandbox ended: {reason}") from None
        if "error" in header:
            raise SandboxFileError(header["error"])
        return header, content

    def _lose(self, reason: str) -> None:
        """Kill bubblewrap and its inner process. Until bubblewrap is set up, the inner one outlives the outer
        one.
        """
        process = self._process
        if process is None or process.poll() is not None:
            return
        self._loss = self._loss or reason
        with suppress(OSError):  # each may have ended meanwhile
            inner = (
                Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            )
            # With an inner process that has just begun.
            os.killpg(process.pid, signal.SIGKILL)
            for pid in inner:
                os.kill(int(pid), signal.SIGKILL)

    def _watch_memory(self, ended: Event) -> None:
        """Kill the commands if all together have more memory than the limit, which the kernel holds for
        each.
        """
        import psutil

        while not ended.wait(WATCH_SECONDS):
            with suppress(psutil.Error, AttributeError):
                # bwrap, its inner process, which is the supervisor, and commands
                assert self._process is not None
                (supervisor,) = psutil.Process(self._process.pid).children()
                commands = supervisor.children(recursive=True)
                if (
                    sum(command.memory_info().rss for command in commands)
                    > self.limits.memory_mib * MIB
                ):
                    for command in commands:
                        command.kill()

    def _start_process(self) -> "subprocess.Popen[bytes]":
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise SandboxError("bwrap is not installed. Install bubblewrap 0.8 or later")
        reader, writer = os.pipe()
        os.write(writer, _filter(platform.machine(), AF_INET if self._gateway else AF_UNIX))
        os.close(writer)
        user: dict[str, Any] = {}
        if os.geteuid() == 0:
            user = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        source = Path(__file__).with_name("supervisor.py").read_text()
        program = [self.python, "-I", "-S", "-c", source, self._settings()]
        cores = _choose_cores(self.limits.cpus)
        command = [bwrap, *self._options(), "--seccomp", str(reader), *program]
        own_cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores)  # of this thread, for its children
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[reader],
                cwd="/",
                env={},
                start_new_session=True,
                **user,
            )
        except OSError as error:
            raise SandboxError(f"bwrap could not be started: {error}") from None
        finally:
            os.sched_setaffinity(0, own_cores)
            os.close(reader)

    def _settings(self) -> str:
        """Return what the supervisor needs to know, as JSON."""
        threads = RELAY_THREADS if self._gateway else 0
        limits = {
            "NPROC": self.limits.processes + threads + 1,  # with the supervisor
            "NOFILE": OPEN_FILES,
            "STACK": 8 * MIB,
            "MSGQUEUE": 0,
            "CORE": 0,
        }
        return json.dumps(
            {"limits": limits, "gateway_port": self._gateway[1] if self._gateway else 0}
        )

    def _options(self) -> list[str]:
        folders = [path for path in map(Path, ("/bin", "/lib", "/lib64")) if path.exists()]
        options = [
            "unshare-all",
            "unshare-user",
            "disable-userns",
            "die-with-parent",
            "new-session",
        ]
        options += [
            "clearenv",
            "as-pid-1",
            "uid 1000",
            "gid 1000",
            "hostname box",
            "cap-drop ALL",
        ]
        options += [f"size {self.limits.disk_mib * MIB}", "tmpfs /", "ro-bind /usr /usr"]
        options += [
            f"symlink {os.readlink(path)} {path}" for path in folders if path.is_symlink()
        ]
        options += [f"ro-bind {path} {path}" for path in folders if not path.is_symlink()]
        options += [
            f"dev-bind /dev/{name} /dev/{name}"
            for name in ("null", "zero", "random", "urandom")
        ]
        options += [
            "ro-bind-try /etc/ld.so.cache /etc/ld.so.cache",
            "dir /tmp",
            f"dir {HOME}",
        ]
        options += [f"chdir {HOME}"]
        words = [word for option in options for word in f"--{option}".split()]
        for folder in self._folders:
            words += ["--ro-bind", folder, folder]
        if self._relay is not None:
            words += ["--bind", self._relay.folder, "/run/gateway"]
        return [*words, "--ro-bind", str(Path(self._interpreter).parents[1]), "/python"]


def _inside(path: str) -> str:
    return os.path.normpath(os.path.join(HOME, path))


def _choose_cores(cpus: float) -> set[int]:
    """Return some of this process's cores, drawn so that many sandboxes use them all."""
    cores = sorted(os.sched_getaffinity(0))
    return set(SystemRandom().sample(cores, min(len(cores), max(1, round(cpus)))))


def _filter(machine: str, last_family: int) -> bytes:
    """Return the filter of system calls: a program of linux/bpf_common.h. last_family: of sockets, AF_UNIX or
    AF_INET, without the network's.
    """
    if machine not in MACHINES:
        raise SandboxError(f"there is no filter of system calls for {machine}")
    architecture, column = MACHINES[machine]
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06
    greater = 0x25
    steps = [(load, 0, 0, 4), (equal, 1, 0, architecture), (answer, 0, 0, KILL)]
    steps += [(load, 0, 0, 0), (at_least, 0, 1, FIRST_NEW), (answer, 0, 0, ENOSYS)]
    for numbers in REFUSED.values():
        steps += [(equal, 0, 1, numbers[column]), (answer, 0, 0, EACCES)]
    steps += [(equal, 0, 3, SOCKET[column]), (load, 0, 0, 16)]
    steps += [(greater, 0, 1, last_family), (answer, 0, 0, EACCES)]
    return b"".join(struct.pack("HBBI", *step) for step in [*steps, (answer, 0, 0, ALLOW)])


@cache
def find_interpreter() -> str:
    """Return this Python, or the system's if the sandbox's user cannot read ours, after a breakout from it
    failed.

    Raises SandboxError if no sandbox can be made here, or if it does not hold.
    """
    own_python = Path(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}")
    system_python = Path("/usr/bin/python3").resolve()
    try:
        return _try_breakout(str(own_python))
    except SandboxError:
        return _try_breakout(str(system_python))


def _try_breakout(interpreter: str) -> str:
    with BubblewrapSandbox(TRIAL_LIMITS, TRIAL_LABEL, interpreter=interpreter) as sandbox:
        result = sandbox.run([sandbox.python, "-I", "-c", BREAKOUT])
    refusals = result.text.strip().split(", ")
    missing = [claim for claim in CLAIMS if claim not in refusals]
    if missing:
        raise SandboxError(f"the sandbox lets programs out: {', '.join(missing)}")
    return interpreter
