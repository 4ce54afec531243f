"""Bring the root cause of an engine's end to its actor.

vLLM's processes: logger.exception(...) --ErrorRecorder--> file named by an environment variable
actor: "Engine core initialization failed. See root cause above." --root_cause--> first error in the file
"""

import logging
import os
import re
import signal
import traceback
from collections.abc import Iterator
from pathlib import Path

FILE = "BALLAST_ENGINE_ERRORS"
POINTER = re.compile(r"root cause|EngineCore (failed|encountered)", re.IGNORECASE)
"""In texts of errors that only say that another process has failed."""
# pydantic's form, of vLLM's configuration.
CHECKED = re.compile(r"Value error, (.*?)(?: \[type=|$)")
EXIT_CODES = re.compile(r"'([^']+)': (-?\d+)")


def prepare_error_file() -> None:
    """Name a file in memory, which ends with this process. Call before vLLM starts processes."""
    if FILE not in os.environ:
        os.environ[FILE] = f"/proc/{os.getpid()}/fd/{os.memfd_create('engine-errors')}"


class ErrorRecorder(logging.Handler):
    """Writes exceptions that vLLM logs in a process of an engine, one a line."""

    def __init__(self, path: str) -> None:
        super().__init__(logging.ERROR)
        self.path = path

    def emit(self, record: logging.LogRecord) -> None:
        """Add the exception of a record, if it has one."""
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(f"{describe(error)}\n")


def record_errors() -> None:
    """Record what vLLM logs in this process, if an actor has named a file."""
    if path := os.environ.get(FILE):
        logging.getLogger("vllm").addHandler(ErrorRecorder(path))


def describe(error: BaseException) -> str:
    """Return type and text in one line. A library's assertion has no text, so its line is shown."""
    text = " ".join(str(error).split()) or _raising_line(error)
    if checked := CHECKED.search(text):
        return checked.group(1)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _raising_line(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return (
        f"{frames[-1].line} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"
        if frames
        else ""
    )


def root_cause(error: BaseException) -> str:
    """Return why an engine failed: its processes' first error, else the innermost error here."""
    chain = [describe(link) for link in _chain(error)]
    here = [line for line in reversed(chain) if not POINTER.search(line)]
    return (
        recorded_cause()
        or next(iter(here), "")
        or _exit_in_words(" ".join(chain))
        or chain[0]
    )


def recorded_cause() -> str:
    """Return the first error of the engine's processes that names no other process, or an empty text."""
    path = Path(os.environ.get(FILE, ""))
    lines = (
        path.read_text(encoding="utf-8", errors="replace").splitlines()
        if path.is_file()
        else []
    )
    return next((line for line in lines if not POINTER.search(line)), "")


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__


def _exit_in_words(text: str) -> str:
    """Say how processes ended that left no error, as the kernel's out-of-memory killer does."""
    codes = [(name, int(code)) for name, code in EXIT_CODES.findall(text)]
    for name, code in codes:
        if code == -signal.SIGKILL:
            return f"vLLM's process {name} was killed by SIGKILL, as when memory is short"
        if code < 0:
            return f"vLLM's process {name} was ended by {signal.Signals(-code).name}"
    return ""
