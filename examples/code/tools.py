"""A tool that runs Python which the policy wrote, in a sandbox made by bubblewrap.

    python(code) --> bwrap: namespaces of its own, no network, no files of this machine but /usr and Python
        --> system calls are filtered, limits are set --> the code, in an empty folder --> what it printed

Importing this file tries to break out of the sandbox. The import fails if that succeeds, or if bubblewrap is
missing.
"""

import os
import platform
import re
import shutil
import signal
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Timer
from typing import Any

__all__ = ["python"]

SECONDS = 5.0
MEMORY = 256 * 2**20  # bytes of a process
PROCESSES = 8  # threads count too
FILES = 64 * 2**20  # bytes of the folder, which is memory
OUTPUT = 2**16  # bytes
CODE = 2**16  # bytes, which a pipe holds
NOBODY = 65534  # root's processes have no limit on their number, so root starts the sandbox as this user

LIMITS = {
    "AS": MEMORY,
    "NPROC": PROCESSES + 1,  # with bubblewrap's own
    "CPU": int(SECONDS) + 1,
    "NOFILE": 64,
    "STACK": 2**23,
    "MSGQUEUE": 0,
    "CORE": 0,
}
RUNNER = f"""
import os, resource, sys
code = sys.stdin.read()
for name, limit in {LIMITS}.items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
os.write(1, b"\\0")
exec(compile(code, "<code>", "exec"), {{"__name__": "__main__"}})
"""

MACHINES = {
    "x86_64": (0xC000003E, 0),
    "aarch64": (0xC00000B7, 1),
}  # linux/audit.h, and a column of the numbers below
SOCKET, AF_UNIX = (41, 198), 1
REFUSED = {
    "memfd_create": (319, 279),  # this and the next three hold memory that no process has mapped
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
}
FIRST_NEW = 424  # calls since Linux 5.1, such as io_uring's: programs do without them
ALLOW, KILL, ENOSYS, EACCES = 0x7FFF0000, 0x80000000, 0x50026, 0x5000D  # linux/seccomp.h

BREAKOUT = f"""
import ctypes, os, resource, socket
libc, held = ctypes.CDLL(None), []
def holds(what, attempt, *arguments):
    try:
        if attempt(*arguments) == -1:
            raise OSError
    except (OSError, MemoryError, ValueError):
        held.append(what)
def fork():
    for _ in range({PROCESSES}):
        if not os.fork():
            os.execv("/usr/bin/env", ["env", "sleep", "1"])
holds("network", socket.create_connection, ("127.0.0.1", 9), 1)
holds("sockets", socket.socket, 40, socket.SOCK_STREAM)
holds("/usr", open, "/usr/written", "w")
holds("root", open, "/written", "w")
holds("home", os.listdir, {str(Path.home())!r})
holds("/proc", os.listdir, "/proc")
holds("namespaces", libc.unshare, 0x10000000)
holds("memory", bytearray, {MEMORY})
holds("memfd", libc.memfd_create, b"x", 0)
holds("shared memory", libc.shmget, 0, 4096, 0o1600)
holds("limits", resource.setrlimit, resource.RLIMIT_NPROC, (-1, -1))
holds("processes", fork)
print(*held, sep=", ")
"""
HELD = re.findall(r'holds\("(.*?)"', BREAKOUT)


class SandboxError(Exception):
    """The sandbox cannot be started, or does not hold."""


def python(code: str) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: The program.
    """
    return run(code)


def run(code: str, seconds: float = SECONDS, interpreter: str = "") -> str:
    """Return what a program printed and, unless it ended well, how it ended. Raises SandboxError."""
    program = code.encode(errors="replace")
    if len(program) > CODE:
        return f"[not run: more than {CODE:,} bytes]"
    with _start(interpreter or INTERPRETER) as process:
        assert process.stdin is not None and process.stdout is not None
        timer = Timer(seconds, _kill, [process])
        timer.start()
        try:
            with suppress(BrokenPipeError), process.stdin:  # of a sandbox that did not start
                process.stdin.write(program)
            said = process.stdout.read(OUTPUT + 2)
            if len(said) > OUTPUT + 1:
                _kill(process)
            exit_code = process.wait()
        finally:
            timer.cancel()
            _kill(process)
    if said[:1] != b"\0" and exit_code >= 0:  # not killed before it started
        raise SandboxError(f"the sandbox did not start: {said.decode(errors='replace').strip()}")
    if len(said) > OUTPUT + 1:
        end = f"[stopped: printed more than {OUTPUT:,} bytes]"
    elif exit_code < 0:
        end = f"[stopped: took more than {seconds:g} s]"
    else:
        end = f"[exit code {exit_code}]" if exit_code else ""
    text = said[1 : OUTPUT + 1].decode(errors="replace").rstrip("\n")
    return f"{text}\n{end}".strip("\n")


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill bubblewrap and its inner process. Until bubblewrap is set up, the inner one outlives the outer
    one.
    """
    if process.poll() is not None:
        return
    with suppress(OSError):  # each may have ended meanwhile
        inner = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.killpg(process.pid, signal.SIGKILL)  # with an inner process that has just begun
        for pid in inner:
            os.kill(int(pid), signal.SIGKILL)


def _start(interpreter: str) -> "subprocess.Popen[bytes]":
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxError("bwrap is not installed. Install bubblewrap 0.8 or later")
    reader, writer = os.pipe()
    os.write(writer, _filter(platform.machine()))
    os.close(writer)
    user: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
    program = [f"/python/bin/{Path(interpreter).name}", "-I", "-c", RUNNER]
    try:
        return subprocess.Popen(
            [bwrap, *_options(interpreter), "--seccomp", str(reader), *program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[reader],
            cwd="/",
            env={},
            start_new_session=True,
            **user,
        )
    finally:
        os.close(reader)


def _options(interpreter: str) -> list[str]:
    folders = [path for path in map(Path, ("/bin", "/lib", "/lib64")) if path.exists()]
    options = ["unshare-all", "unshare-user", "disable-userns", "die-with-parent", "new-session", "clearenv"]
    options += ["uid 1000", "gid 1000", "hostname box", "cap-drop ALL"]
    options += ["setenv HOME /box", "setenv LANG C.UTF-8", "setenv PATH /usr/bin:/bin", "ro-bind /usr /usr"]
    options += [f"symlink {os.readlink(path)} {path}" for path in folders if path.is_symlink()]
    options += [f"ro-bind {path} {path}" for path in folders if not path.is_symlink()]
    options += [f"dev-bind /dev/{name} /dev/{name}" for name in ("null", "zero", "random", "urandom")]
    options += ["ro-bind-try /etc/ld.so.cache /etc/ld.so.cache", f"size {FILES}", "tmpfs /box", "chdir /box"]
    words = [word for option in options for word in f"--{option}".split()]
    return [*words, "--ro-bind", str(Path(interpreter).parents[1]), "/python", "--remount-ro", "/"]


def _filter(machine: str) -> bytes:
    """Return the filter of system calls: a program of linux/bpf_common.h."""
    if machine not in MACHINES:
        raise SandboxError(f"there is no filter of system calls for {machine}")
    architecture, column = MACHINES[machine]
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06
    steps = [(load, 0, 0, 4), (equal, 1, 0, architecture), (answer, 0, 0, KILL)]
    steps += [(load, 0, 0, 0), (at_least, 0, 1, FIRST_NEW), (answer, 0, 0, ENOSYS)]
    for numbers in REFUSED.values():
        steps += [(equal, 0, 1, numbers[column]), (answer, 0, 0, EACCES)]
    steps += [(equal, 0, 3, SOCKET[column]), (load, 0, 0, 16), (equal, 1, 0, AF_UNIX), (answer, 0, 0, EACCES)]
    return b"".join(struct.pack("HBBI", *step) for step in [*steps, (answer, 0, 0, ALLOW)])


def _interpreter() -> str:
    """Return this Python, or the system's if the sandbox's user cannot read ours. Raises SandboxError."""
    ours, systems = (
        Path(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}"),
        Path("/usr/bin/python3"),
    )
    try:
        return _held(str(ours))
    except SandboxError:
        return _held(str(systems.resolve()))


def _held(interpreter: str) -> str:
    said = run(BREAKOUT, interpreter=interpreter)
    missing = [each for each in HELD if each not in said.split(", ")]
    if missing:
        raise SandboxError(f"the sandbox lets programs out: {', '.join(missing)}")
    return interpreter


INTERPRETER = _interpreter()
