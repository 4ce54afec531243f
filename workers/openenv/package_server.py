"""PackageServer: the server of a package, a child of the process whose sessions it plays.

    PackageServer(package) --install_package--> Python --launch.py--> a server on a free port of 127.0.0.1
    a process of episodes --serve_episodes--> class with the server's URL --fork--> sessions

The kernel kills a server with its parent. If a server ends by itself, a new one takes its socket, where new
sessions wait meanwhile.
"""

import mmap
import os
import select
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

from workers.errors import LONGEST_QUOTE, ConfigError
from workers.openenv.packages import foreign_environment, install_package, is_url
from workers.openenv.server import read_page
from workers.user_code.process import end_with_parent

LAUNCH = Path(__file__).with_name("launch.py")
START_SECONDS = 120.0  # for a server to import its environment and to answer
PROBE_SECONDS = 1.0  # for an answer, or to notice that the server has ended instead
END_SECONDS = 1.0  # until the end of a server is known to its sessions
WAIT_SECONDS = 0.1
MOST_WAITING = 4096  # sessions, until the server accepts them
TAIL_BYTES = 4096
PIPE_BYTES = 2**16
STDERR = 2  # a descriptor: `sys.stderr` has a lock, which a fork could inherit


class SharedEnd:
    """How often servers have ended, and the last line of the last. Forks of this process read it too."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 1 + LONGEST_QUOTE)

    @property
    def count(self) -> int:
        return self._memory[0]

    @property
    def last_line(self) -> str:
        return self._memory[1:].rstrip(b"\0").decode(errors="replace")

    def add(self, last_line: str) -> None:
        line = last_line.encode()[:LONGEST_QUOTE]
        self._memory[1:] = line.ljust(LONGEST_QUOTE, b"\0")
        self._memory[0] = (self._memory[0] + 1) % 256


class PackageServer:
    """Start the server of a package, and wait until it answers. Raises ConfigError."""

    def __init__(self, package: str) -> None:
        self._package = package
        self._python = install_package(package)
        self._end = SharedEnd()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_healthy = Event()
        self._is_left = Event()
        self._listener = socket.socket()  # bound here, so that nobody else takes the port
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(MOST_WAITING)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._keeper = Thread(target=self._keep, daemon=True)
        self._keeper.start()
        self._probe()
        if not self._is_healthy.is_set():
            ended = self._end.count > 0
            self.end()
            took = (
                "ended at its start"
                if ended
                else f"took more than {START_SECONDS:g} s to answer"
            )
            raise ConfigError(f"the server of {package} {took}: {self._end.last_line}")

    def end(self) -> None:
        self._is_left.set()
        if self._process is not None:
            self._process.kill()
        self._keeper.join()
        self._listener.close()

    def observe_end(self) -> Callable[[], str]:
        """Return what says why a server has ended since this call, or "" if none has. Both work in forks."""
        count = self._end.count

        def explain_end() -> str:
            until = time.monotonic() + END_SECONDS
            while self._end.count == count:
                if time.monotonic() > until:
                    return ""
                time.sleep(WAIT_SECONDS)
            return f"the server of {self._package} has ended: {self._end.last_line}"

        return explain_end

    def _keep(self) -> None:
        """Start the server, show its output, and start it again when it ends.

        No lock of Python is held meanwhile, which a fork could inherit. The kernel kills a child with the
        thread that started it, so this thread stays.
        """
        while True:
            self._process = self._start()
            if self._is_left.is_set():
                self._process.kill()
            self._end.add(self._show_until_exit(self._process))
            if self._is_left.is_set() or not self._is_healthy.is_set():
                return
            self._is_healthy.clear()
            Thread(target=self._probe_again, daemon=True).start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [str(self._python), "-I", str(LAUNCH), str(self._listener.fileno())],
            pass_fds=[self._listener.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=foreign_environment() | {"PYTHONUNBUFFERED": "1"},
            preexec_fn=end_with_parent,
        )

    def _show_until_exit(self, process: subprocess.Popen[bytes]) -> str:
        """Show a server's output until it ends. Returns its last line."""
        assert process.stdout is not None
        exited = os.pidfd_open(process.pid)
        pipe = process.stdout.fileno()
        os.set_blocking(pipe, False)
        events = select.poll()
        events.register(pipe, select.POLLIN)
        events.register(exited, select.POLLIN)
        tail = b""
        has_ended = False
        is_closed = False
        while not has_ended:
            has_ended = exited in {descriptor for descriptor, _ in events.poll()}
            output = _read_available(pipe)
            tail = (tail + (output or b""))[-TAIL_BYTES:]
            if output is None and not is_closed:
                events.unregister(pipe)
                is_closed = True
        os.close(exited)
        process.stdout.close()
        process.wait()
        lines = tail.decode(errors="replace").split("\n")
        written = [line.strip() for line in lines if line.strip()]
        return written[-1] if written else "it wrote nothing"

    def _probe(self) -> None:
        """Wait until the server answers. It has ended before, or is late, if it is not healthy then."""
        count = self._end.count
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and self._end.count == count:
            with suppress(ConfigError):
                read_page(self.url, "/health", timeout_s=PROBE_SECONDS)
                self._is_healthy.set()
                return
            time.sleep(WAIT_SECONDS)

    def _probe_again(self) -> None:
        """End this process if its server does not start again. Its owner then hears why at the next start."""
        self._probe()
        if not (self._is_healthy.is_set() or self._is_left.is_set()):
            os.write(STDERR, f"{self._package}: {self._end.last_line}\n".encode())
            os._exit(1)


def _read_available(pipe: int) -> bytes | None:
    """Show and return what a pipe holds. None if it is closed."""
    parts = []
    try:
        while output := os.read(pipe, PIPE_BYTES):
            parts.append(output)
            with suppress(OSError):
                os.write(STDERR, output)
    except BlockingIOError:
        return b"".join(parts)
    return b"".join(parts) or None


@contextmanager
def serving(name: str) -> Iterator[str]:
    """Yield the URL of a server: `name` itself, or the one of a package that is started for the block."""
    if is_url(name):
        yield name
        return
    server = PackageServer(name)
    try:
        yield server.url
    finally:
        server.end()
