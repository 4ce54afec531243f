"""Interrupts: Ctrl-C, the SIGTERM of `ray job stop`, a terminal that is closed stop a run where it can resume.

rollout, log-probs | update, weights, metrics, checkpoint |
  stops at once    |       hold: stops at its end         | release      a second interrupt always stops at once
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def heeded() -> list[signal.Signals]:
    """Those of `SIGNALS` that this process was not told to ignore, as `nohup` does with SIGHUP."""
    return [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


def in_main_thread() -> bool:
    """Whether signals are delivered here, and handlers may be set."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Put the handlers of `SIGNALS` back at the end of the block, as Ray sets its own; nothing in other threads."""
    found = {number: signal.getsignal(number) for number in SIGNALS} if in_main_thread() else {}
    try:
        yield
    finally:
        for number, handler in found.items():
            if handler is not None:  # one that Python did not set
                signal.signal(number, handler)


class Interrupts:
    """While entered, an interrupt raises KeyboardInterrupt; between `hold` and `release` it waits for `release`.

    Outside of the main thread, where Python delivers no signals, it changes nothing.
    """

    def __init__(self, log: Callable[[str], None]) -> None:
        """`log`: receives one line when a run will stop at the end of its step; in a thread of its own, because the
        main thread may hold a lock of the log when the interrupt comes."""
        self.held = False
        self._pending = False
        self._log = log
        self._lines: SimpleQueue[str | None] = SimpleQueue()  # whose `put` may be called in a handler
        self._handlers: dict[signal.Signals, Any] = {}

    def hold(self) -> None:
        """Call before the first model changes: until `release` the state is between two steps, not for checkpoints.

        Raises KeyboardInterrupt if one was lost before: Python drops what is raised in a destructor or a callback.
        """
        self._raise_pending()
        self.held = True

    def release(self) -> None:
        """Call when a step is complete. Raises KeyboardInterrupt if one arrived meanwhile."""
        self.held = False
        self._raise_pending()

    def _raise_pending(self) -> None:
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    def __enter__(self) -> "Interrupts":
        self._logging = threading.Thread(target=self._log_lines, name="interrupts", daemon=True)
        self._logging.start()
        if in_main_thread():
            self._handlers = {number: signal.signal(number, self._handle) for number in heeded()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._lines.put(None)
        self._logging.join()

    def _log_lines(self) -> None:
        for line in iter(self._lines.get, None):
            self._log(line)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        at_once, self._pending = not self.held or self._pending, True
        if at_once:
            raise KeyboardInterrupt
        self._lines.put("stopping when this step is complete; once more stops at once")
