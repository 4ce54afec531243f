"""run.log: output of a run in its folder - console, prints of actors and users' code, and Ray's lines.

    Console ------------------------------------------+
    stdout, stderr of this process, but Ray's threads -+--> terminal
                     |                                 +--> run.log: plain lines, without secrets
    stdout, stderr of actors --Ray's log streaming------+

Ray's threads print the actors' output and its own notices on the driver. Both go only to the log.
"""

import io
import logging
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from controller.observability.run_folder import LOG
from controller.observability.shown_text import redact

if TYPE_CHECKING:
    from controller.observability.console import Console

RAYS_THREADS = ("ray_print_logs", "ray_listen_error_messages")
"""Threads of the driver in which Ray prints."""
CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07")
"""Escape sequences of a terminal."""


class RunLog(io.TextIOBase):
    """A file of whole, plain lines, each from one thread.

    A disk error is reported once on standard error and ends the log, not the run.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._parts = threading.local()
        self._file: TextIO | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8", errors="replace", buffering=1)
        except OSError as error:
            self._end(error)

    def _end(self, error: OSError) -> None:
        self._file = None
        stream = sys.__stderr__ or sys.stderr
        stream.write(
            f"{self._path} cannot be written ({error.strerror or error}). It ends here\n"
        )

    def write(self, text: str) -> int:
        *lines, rest = (getattr(self._parts, "rest", "") + text).split("\n")
        self._parts.rest = rest
        for line in lines:
            self._write_line(redact(CONTROL.sub("", line).rstrip("\r").rpartition("\r")[2]))
        return len(text)

    def _write_line(self, line: str) -> None:
        with self._lock:
            if self._file is None:
                return
            try:
                self._file.write(f"{line}\n")
            except OSError as error:
                self._end(error)

    def flush(self) -> None:
        """Do nothing, because lines are written at once."""

    def close(self) -> None:
        if getattr(self._parts, "rest", ""):
            self.write("\n")
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None
        super().close()


class _Routed:
    """A standard stream that also writes to the log. Lines of Ray's threads go only there."""

    def __init__(self, stream: TextIO, log: TextIO) -> None:
        self._stream = stream
        self._log = log

    def write(self, text: str) -> int:
        self._log.write(text)
        if threading.current_thread().name not in RAYS_THREADS:
            self._stream.write(text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def run_log(folder: Path, console: "Console") -> Iterator[None]:
    """Record the block's output, and the exception that ends it, in folder/run.log."""
    log = cast(TextIO, RunLog(folder / LOG))
    log.write(
        f"=== {datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z} {' '.join(sys.argv)}\n"
    )
    output, errors = (
        cast(TextIO, _Routed(stream, log)) for stream in (sys.stdout, sys.stderr)
    )
    try:
        with redirect_stdout(output), redirect_stderr(errors), console.keep_in(log):
            yield
    except BaseException as end:
        log.write(
            f"{'stopped' if isinstance(end, KeyboardInterrupt) else 'error'}: {end}\n"
        )
        raise
    finally:
        log.close()


@contextmanager
def rays_logging_in(log: TextIO) -> Iterator[None]:
    """Send Ray's Python logging to `log` during the block."""
    handlers = [
        handler
        for handler in logging.getLogger("ray").handlers
        if isinstance(handler, logging.StreamHandler)
    ]
    streams = [handler.setStream(log) for handler in handlers]
    try:
        yield
    finally:
        for handler, stream in zip(handlers, streams, strict=True):
            if stream is not None:
                handler.setStream(stream)
