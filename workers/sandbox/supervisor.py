"""Process 1 of a bubblewrap sandbox: it runs commands, reads and writes files for the owner outside.

owner --stdin: a line of JSON, content--> supervisor --stdout: a line of JSON, content--> owner
                                              '-- commands, none of which can kill process 1

Its text is sent into the sandbox, so it imports the standard library alone.
"""

import json
import os
import resource
import select
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from threading import Thread
from typing import Any

CHUNK = 2**20
GATEWAY = "/run/gateway/socket"
LIMITED = ["/bin/sh", "-c", 'ulimit -v "$1" && shift && exec "$@"', "sh"]
# Of commands alone: the supervisor's relay has more address space, and nobody else controls it.


def main() -> None:
    if sys.argv[1].isdigit():  # in a container: the way to the gateway alone
        listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
        run_detached()
        relay(listener)
    settings = json.loads(sys.argv[1])
    for name, limit in settings["limits"].items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    if settings["gateway_port"]:
        start_relay(settings["gateway_port"])
    woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    answer({"started": True})
    requests = sys.stdin.buffer
    while line := requests.readline():
        request = json.loads(line)
        try:
            match request["do"]:
                case "run":
                    run(request, woken)
                case "read":
                    read_file(request)
                case "write":
                    write_file(request)
                case "end":
                    kill_all()
                    answer({})
        except OSError as error:
            answer({"error": f"{request.get('path', 'standard input')}: {error.strerror}"})


def run_detached() -> None:
    """Return in a process of its own. This one ends: whoever waits for it knows that the port listens."""
    if os.fork():
        raise SystemExit
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)


def answer(header: dict[str, Any], content: bytes = b"") -> None:
    sys.stdout.buffer.write(
        json.dumps(header | {"size": len(content)}).encode() + b"\n" + content
    )
    sys.stdout.buffer.flush()


def receive(size: int, file: Any = None) -> OSError | None:
    """Copy the content of a request, all of it even if the disk is full or there is no file."""
    failure = None
    while size:
        part = sys.stdin.buffer.read(min(size, CHUNK))
        if not part:
            raise SystemExit
        size -= len(part)
        try:
            if file is not None and failure is None:
                file.write(part)
        except OSError as error:
            failure = error
    return failure


def run(request: dict[str, Any], woken: int) -> None:
    # Without input no file is made: a command that makes room on a full disk must start.
    with tempfile.TemporaryFile() if request["size"] else open(os.devnull, "r+b") as stdin:
        if failure := receive(request["size"], stdin):
            raise failure
        stdin.flush()
        os.lseek(stdin.fileno(), 0, os.SEEK_SET)
        try:
            process = subprocess.Popen(
                [*LIMITED, str(request["memory_kib"]), *request["command"]],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=request["folder"],
                env=request["variables"],
                start_new_session=True,
            )
        except OSError as error:
            text = f"{error.filename or 'no process'}: {error.strerror}\n"
            answer({"exit_code": 126, "cut": False, "timed_out": False}, text.encode())
            return
    watch(process, request, woken)


def watch(process: "subprocess.Popen[bytes]", request: dict[str, Any], woken: int) -> None:
    """Collect output until the command ends or its time is over. Processes that it left may hold the pipe."""
    assert process.stdout is not None
    pipe = process.stdout.fileno()
    os.set_blocking(pipe, False)
    deadline = time.monotonic() + request["seconds"]
    output = bytearray()
    total = 0
    status = None
    streams = [woken, pipe]
    timed_out = False
    while status is None:
        rest_s = deadline - time.monotonic()
        if rest_s <= 0:
            timed_out = True
            kill_all()
            status = int(signal.SIGKILL)
        ready, _, _ = select.select(streams, [], [], max(0.0, min(rest_s, 1.0)))
        if woken in ready:
            os.read(woken, CHUNK)
        if status is None:
            status = reap(process.pid)
        total, ended = drain(pipe, output, total, request["output_bytes"])
        if ended and pipe in streams:
            streams.remove(pipe)
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stdout.close()
    code = process.returncode
    header = {"exit_code": 128 - code if code < 0 else code, "timed_out": timed_out}
    answer(header | {"cut": total > len(output)}, bytes(output))


def kill_all() -> None:
    """Kill every other process, and wait for all: the dead count as processes until then."""
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def reap(pid: int) -> int | None:
    """Bury dead processes, and return the status of one of them."""
    own_status = None
    with suppress(ChildProcessError):
        while True:
            dead, status = os.waitpid(-1, os.WNOHANG)
            if dead == 0:
                break
            if dead == pid:
                own_status = status
    return own_status


def drain(pipe: int, output: bytearray, total: int, longest: int) -> tuple[int, bool]:
    """Add what is in the pipe. Returns all bytes so far, and whether the pipe was closed."""
    for _ in range(64):  # not for ever: the time limit is looked at in between
        try:
            part = os.read(pipe, CHUNK)
        except BlockingIOError:
            return total, False
        if not part:
            return total, True
        total += len(part)
        output += part[: longest - len(output)]
    return total, False


def read_file(request: dict[str, Any]) -> None:
    # Without O_NONBLOCK, a named pipe would hold the supervisor for ever.
    descriptor = os.open(request["path"], os.O_RDONLY | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            answer({"error": f"{request['path']}: not a file"})
        elif status.st_size > request["longest"]:
            answer({"error": f"{request['path']}: more than {request['longest']:,} bytes"})
        else:
            size = status.st_size
            sys.stdout.buffer.write(json.dumps({"size": size}).encode() + b"\n")
            while size:
                # Shortened meanwhile.
                part = file.read(min(size, CHUNK)) or bytes(min(size, CHUNK))
                sys.stdout.buffer.write(part)
                size -= len(part)
            sys.stdout.buffer.flush()


def write_file(request: dict[str, Any]) -> None:
    path = request["path"]
    try:
        os.makedirs(os.path.dirname(path) or "/", exist_ok=True)
        descriptor = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o644
        )
    except OSError:
        receive(request["size"])
        raise
    with open(descriptor, "wb") as file:
        failure = receive(request["size"], file)
    if failure:
        raise failure
    answer({})


def start_relay(port: int) -> None:
    """Listen where the gateway of agents listens outside, and pass connections on through a file."""
    listener = socket.create_server(("127.0.0.1", port))
    Thread(target=relay, args=(listener,), daemon=True).start()


def relay(listener: socket.socket) -> None:
    while True:
        inner, _ = listener.accept()
        outer = socket.socket(socket.AF_UNIX)
        try:
            outer.connect(GATEWAY)
        except OSError:
            inner.close()
            continue
        for source, target in ((inner, outer), (outer, inner)):
            Thread(target=copy, args=(source, target), daemon=True).start()


def copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while part := source.recv(65_536):
            target.sendall(part)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    main()
