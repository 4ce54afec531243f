"""Tell an engine's processes to leave a transfer group of which a member was lost.

rollout actor --number of the group--> file in memory <--looks-- each process of its engine that receives

A process in a broadcast takes no call, so that vLLM's own ways do not reach it before its time-out.
"""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

FILE = "BALLAST_LEFT_GROUPS"
LOOK_SECONDS = 0.2


def prepare_file() -> Path:
    """Make a file in memory, which ends with this process. Call before vLLM starts processes."""
    path = Path(f"/proc/{os.getpid()}/fd/{os.memfd_create('left-groups')}")
    os.environ[FILE] = str(path)
    return path


def leave(file: Path, group: int) -> None:
    """Let processes of the engine leave this group and earlier ones. group: counted from 1."""
    file.write_text(str(group))


def last_left_group() -> int:
    """Return the newest group to leave, or 0."""
    path = os.environ.get(FILE)
    return int(Path(path).read_text() or 0) if path else 0


class GroupWatch:
    """Calls `abort` from a thread when a group is to be left, or after `timeout_s`, until the block ends.

    reason: why it was called, or empty.
    """

    def __init__(self, group: int, timeout_s: float, abort: Callable[[], None]) -> None:
        self.reason = ""
        self._group = group
        self._timeout_s = timeout_s
        self._abort = abort
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "GroupWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not self._ended.wait(min(LOOK_SECONDS, self._timeout_s)):
            if last_left_group() >= self._group:
                self.reason = "another member of the transfer group was lost."
            elif time.monotonic() >= deadline:
                self.reason = (
                    "the weights did not arrive within resources.collective_timeout_s="
                    f"{self._timeout_s:g} s, so a member of the transfer group is lost or hangs."
                )
            if self.reason:
                self._abort()
                return
