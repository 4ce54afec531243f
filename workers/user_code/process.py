"""UserProcess: a process for users' code, which may raise, hang or die there.

    process = UserProcess("module:function", *arguments)     in the process: found = function(*arguments)
    process.receive(timeout_s)         <--JSON---            found, or None if it answers requests:
    process.send(request)              --pickle-->           found(request, reply)
    process.receive(timeout_s)         <--JSON---            reply(value), repeatedly
    process.fork()                     --socket-->           a copy of the process, with its own connection
    process.end()                                            killed, with all that it has started

    UserProcess --fork--> keeper --fork--> a copy, for users' code: the keeper kills what it leaves behind

Our process never unpickles users' data. A UserProcess ends with its parent and ignores Ctrl-C.
"""

import ctypes
import fcntl
import importlib
import io
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from io import BufferedReader
from threading import Lock, Thread
from typing import Any, TextIO

from workers.errors import LONGEST_QUOTE, BallastError, ConfigError, describe_error
from workers.user_code.session_keys import hide_session_keys

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
# For a process that has closed its connection to exit, and so to have an exit code.
EXIT_SECONDS = 1.0
START_SECONDS = 60.0  # for a process to start and read its request
HEADER = 8  # bytes: the size of a request
LONGEST_ANSWER = 2**24  # bytes, of a sample's score or an environment's turn
LONGEST_PICKLE = 2**30  # bytes of a function's pickle, or of an epoch's order
LONGEST_LINE = 2**16  # bytes that are shown of users' code at a time
# limit on users' output, and its period
SHOWN_BYTES = 10**6
SHOWN_SECONDS = 60.0
KILL_ROUNDS, KILL_SECONDS = 100, 0.01  # through a tree of processes that grows meanwhile
CLOSE_SECONDS = 10.0  # for a copy that catches SIGTERM to end by itself
FIRST_DESCRIPTOR = 500  # of a process's channel, above descriptors that careless code uses

RAISED = (Exception, KeyboardInterrupt, SystemExit)
"""Everything that users' code may raise: in its own process KeyboardInterrupt and SystemExit are nobody
else's.
"""


class NoAnswerError(Exception):
    """A process did not answer: it `took more than ...`, `ended its process (exit code 7)` or
    `raised ...`.
    """


class Connection:
    def __init__(self) -> None:
        self._socket, self._theirs = socket.socketpair()
        self._answers = self._socket.makefile("rb")
        self._ending = Lock()
        self._ended = False

    def send(self, request: Any) -> None:
        """Send an object, pickled. Raises NoAnswerError if the process has ended or does not read."""
        packed = pickle.dumps(request)
        try:
            self._socket.settimeout(START_SECONDS)
            self._socket.sendall(len(packed).to_bytes(HEADER) + packed)
        except OSError:
            raise self._no_answer() from None

    def receive(
        self,
        timeout_s: float,
        setting: str = "",
        *,
        late_s: float = 0.0,
        longest: int = LONGEST_ANSWER,
    ) -> Any:
        """Return the next answer. setting: names the time limit, to which `late_s` is added.

        Raises NoAnswerError if the function raised, or the process ended or was killed for being late,
        writing to the connection, or answering more than `longest` bytes. Raises ConfigError for a
        BallastError.
        """
        try:
            self._socket.settimeout(timeout_s + late_s)
            line = self._answers.readline(longest + 1)
        except TimeoutError:
            self.end()
            limit = f"{setting}={timeout_s:g}" if setting else f"{timeout_s:g}"
            raise NoAnswerError(f"took more than {limit} s") from None
        except OSError:
            raise self._no_answer() from None
        if len(line) > longest:
            raise self._no_answer(f"its answer has more than {longest:,} bytes")
        if not line.endswith(b"\n"):
            raise self._no_answer()
        try:
            ((kind, value),) = json.loads(line).items()
        except (ValueError, AttributeError):
            raise self._no_answer("it wrote to our connection") from None
        if kind == "failure":
            raise ConfigError(value)
        if kind == "raised":
            raise NoAnswerError(f"raised {hide_session_keys(value)}")
        return value

    def _no_answer(self, killed: str = "") -> NoAnswerError:
        end = self.end(0.0 if killed else EXIT_SECONDS)
        reason = f"killed: {killed}" if killed else end
        return NoAnswerError(
            f"ended its process ({reason})" if reason else "ended its process"
        )

    @property
    def alive(self) -> bool:
        try:
            self._socket.settimeout(0)
            return self._socket.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def end(self, exit_s: float = 0.0) -> str:
        """Kill the process and its children, unless it exits within `exit_s`. Return how it ended."""
        with self._ending:
            if not self._ended:
                self._ended = True
                self._how = self._kill(exit_s)
                self._socket.close()
            return self._how

    def _kill(self, exit_s: float) -> str:
        raise NotImplementedError


class UserProcess(Connection):
    def __init__(self, target: str, *arguments: Any, quiet: bool = False) -> None:
        super().__init__()
        self._kept = io.StringIO() if quiet else None
        with self._theirs:
            environment = os.environ | {
                "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)
            }
            # Shows output at once, even if the process is killed.
            environment["PYTHONUNBUFFERED"] = "1"
            # Sets have the same order in every process.
            environment.setdefault("PYTHONHASHSEED", "0")
            command = "from workers.user_code.process import main; main()"
            self._process = subprocess.Popen(
                [sys.executable, "-c", command, target, str(self._theirs.fileno())],
                pass_fds=[self._theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )
        outputs = (
            (self._process.stdout, sys.stdout),
            (self._process.stderr, self._kept or sys.stderr),
        )
        self._shown = [
            Thread(target=_show, args=streams, daemon=True) for streams in outputs
        ]
        for thread in self._shown:
            thread.start()
        self.send(arguments)

    def fork(self, *, closes: bool = False) -> "Fork":
        """Fork the process. closes: its end waits for what it does at SIGTERM. Raises NoAnswerError if it
        cannot.
        """
        return Fork(self._socket, closes=closes)

    @property
    def errors(self) -> str:
        return self._kept.getvalue() if self._kept else ""

    def _kill(self, exit_s: float) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(exit_s)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        for thread in self._shown:
            # Longer only if a process that has left the group holds the stream.
            thread.join(EXIT_SECONDS)
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        last = self.errors.strip().splitlines()[-1:]
        return f"{how}: {last[0][:LONGEST_QUOTE]}" if last else how


class Fork(Connection):
    """A forked process: starts in milliseconds, with its parent's imports."""

    def __init__(self, source: socket.socket, *, closes: bool) -> None:
        super().__init__()
        self._closes = closes
        self._pid = 0
        with self._theirs:
            try:
                socket.send_fds(source, [bytes(HEADER)], [self._theirs.fileno()])
            except OSError:
                raise self._no_answer() from None
        self._pid = self.receive(START_SECONDS)
        self._handle = os.pidfd_open(self._pid)  # which no later process can have

    @property
    def pid(self) -> int:
        """The keeper's, below which all processes of the fork are."""
        return self._pid

    def _kill(self, exit_s: float) -> str:
        if self._pid:
            if self._closes:
                _terminate(self._handle, CLOSE_SECONDS + EXIT_SECONDS)
            with suppress(ProcessLookupError):
                # The process lives, so that the group of its number is its own.
                signal.pidfd_send_signal(self._handle, 0)
                _kill_below(self._pid)
                os.killpg(self._pid, signal.SIGKILL)
            os.close(self._handle)
        return ""


def _terminate(handle: int, seconds: float) -> bool:
    """Send SIGTERM to a process. Returns whether it ended in time."""
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(handle, signal.SIGTERM)
    end = select.poll()  # select.select takes no descriptor above 1023
    end.register(handle, select.POLLIN)
    return bool(end.poll(1000 * seconds))


def _kill_below(pid: int, *, stop: bool = True) -> None:
    """Kill the descendants of a process, also those in groups of their own. stop: stop the process itself
    before.
    """
    import psutil

    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        if stop:
            root.suspend()  # it starts no others meanwhile
        for _ in range(KILL_ROUNDS):
            living = [
                child
                for child in root.children(recursive=True)
                if child.status() != psutil.STATUS_ZOMBIE
            ]
            for child in living:
                child.kill()
            if not living:
                return
            time.sleep(KILL_SECONDS)


def ask(function: str, *arguments: Any, timeout_s: float, setting: str) -> Any:
    """Return our `module:function`'s value in a new process. Raises as `UserProcess.receive`."""
    process = UserProcess(function, *arguments, quiet=True)
    try:
        value = process.receive(timeout_s, setting, longest=LONGEST_PICKLE)
    finally:
        process.end()
    sys.stderr.write(process.errors)  # only of a success
    return value


def _show(stream: BufferedReader, output: TextIO) -> None:
    room, until = 0, 0.0
    with stream:
        # Dropped output need not be split into lines, which would hold the process up.
        while (
            line := stream.readline(LONGEST_LINE)
            if room >= 0
            else stream.read1(LONGEST_LINE)
        ):
            if time.monotonic() > until:
                room = SHOWN_BYTES
                until = time.monotonic() + SHOWN_SECONDS
            room_before = room
            room = room - len(line)
            text = hide_session_keys(line.decode(errors="replace"))
            if room < 0:
                text = (
                    f"\n[more than {SHOWN_BYTES:,} bytes in {SHOWN_SECONDS:g} s: "
                    "what follows is not shown]\n"
                )
            if room_before >= 0:
                # A stream may be full or closed: the process must not wait for it.
                with suppress(OSError, ValueError):
                    output.write(text)
                    output.flush()


# The code below runs in the process.


class Channel:
    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(
            fileno=fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, FIRST_DESCRIPTOR)
        )
        os.close(descriptor)
        os.register_at_fork(after_in_child=self._socket.close)

    def receive(self) -> tuple[Any, list[int]]:
        """Return the next request, or None with a fork's descriptor. Raises EOFError when the other side is
        gone.
        """
        header, descriptors, _, _ = socket.recv_fds(self._socket, HEADER, 1)
        if not header:
            raise EOFError
        size = int.from_bytes(header)
        packed = bytearray()
        while len(packed) < size:
            part = self._socket.recv(min(size - len(packed), 2**20))
            if not part:
                raise EOFError
            packed += part
        return pickle.loads(packed) if packed else None, descriptors

    def reply(self, value: Any, kind: str = "value") -> None:
        self._socket.sendall(
            json.dumps({kind: value}, ensure_ascii=False).encode(errors="replace") + b"\n"
        )


def main() -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # hidden from users' code
    descriptor = int(sys.argv.pop())
    target = sys.argv.pop()
    channel = Channel(descriptor)
    try:
        arguments, _ = channel.receive()
        try:
            # SystemExit passes: the other side sees its code.
            outcome = resolve(target)(*arguments)
        except BallastError as error:
            channel.reply(str(error), "failure")
        else:
            sys.stdout.flush()
            sys.stderr.flush()
            channel.reply(None if callable(outcome) else outcome)
            _serve(channel, outcome)
    except EOFError:  # the other side is gone, maybe killed
        signal.raise_signal(signal.SIGTERM)


def _serve(channel: Channel, answer: Any) -> None:
    while True:
        request, descriptors = channel.receive()
        if descriptors:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
            if os.fork():
                os.close(descriptors[0])
            else:
                channel = _fork_below_keeper(descriptors[0])
            continue
        try:
            answer(request, channel.reply)
        except BallastError as error:
            channel.reply(str(error), "failure")
        except RAISED as error:
            channel.reply(describe_error(error), "raised")


def _fork_below_keeper(descriptor: int) -> Channel:
    """Fork once more, and return in the new process with its channel. This process becomes its keeper.

    Without a keeper, processes of a copy that crashed belong to nobody: they go on, and no limit counts them.
    """
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    end_with_parent(signal.SIGTERM)  # so that the keeper can still kill
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    keeper = os.getpid()
    copy = os.fork()
    if not copy:
        os.setsid()
        end_with_parent()
        channel = Channel(descriptor)
        channel.reply(keeper)
        return channel
    os.close(descriptor)  # else the other side would not notice that the copy has ended
    try:
        signal.signal(signal.SIGTERM, _exit)
        os.waitpid(copy, 0)
    except SystemExit:
        if not _terminate(os.pidfd_open(copy), CLOSE_SECONDS):
            sys.stderr.write(
                f"users' code was killed {CLOSE_SECONDS:g} s after SIGTERM, which it ignored\n"
            )
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with suppress(ChildProcessError):  # nothing is left
            os.waitpid(-1, os.WNOHANG)
            _kill_below(keeper, stop=False)
        os._exit(0)


def _exit(signum: int, frame: Any) -> None:
    raise SystemExit


def end_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when the thread that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by)


def resolve(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
