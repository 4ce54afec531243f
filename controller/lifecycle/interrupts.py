"""Interrupts: Ctrl-C, SIGTERM of `ray job stop` or a closed terminal stop a run where it can resume.

rollout, log-probs | update, weights, metrics, checkpoint |
  stops at once    |       hold: stops at its end         | release

A second interrupt always stops at once.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def heeded_signals() -> list[signal.Signals]:
    """Return `SIGNALS` except those ignored on purpose, as `nohup` ignores SIGHUP."""
    return [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


def in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Restore the handlers of `SIGNALS` after the block, because Ray replaces them. Only for the
    main thread.
    """
    handlers = (
        {number: signal.getsignal(number) for number in SIGNALS} if in_main_thread() else {}
    )
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:  # None: Python did not set it
                signal.signal(number, handler)


class Interrupts:
    """Turn interrupts into KeyboardInterrupt. Between `hold` and `release`, delay them until `release`.

    No effect outside the main thread, where Python delivers no signals.
    """

    def __init__(self, log: Callable[[str], None]) -> None:
        """log: called in a new thread, because the main thread may hold the log's lock."""
        self.held = False
        self._pending = False
        self._log = log
        # Whose `put` may be called in a handler.
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        self._handlers: dict[signal.Signals, Any] = {}

    def hold(self) -> None:
        """Call before the first model changes. Raises an interrupt that Python dropped in a destructor or
        callback.
        """
        self._raise_pending()
        self.held = True

    def release(self) -> None:
        """Call after a complete step. Raises KeyboardInterrupt if one arrived meanwhile."""
        self.held = False
        self._raise_pending()

    def _raise_pending(self) -> None:
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    def __enter__(self) -> "Interrupts":
        self._logging = threading.Thread(
            target=self._log_lines, name="interrupts", daemon=True
        )
        self._logging.start()
        if in_main_thread():
            self._handlers = {
                number: signal.signal(number, self._handle) for number in heeded_signals()
            }
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._lines.put(None)
        self._logging.join()

    def _log_lines(self) -> None:
        for line in iter(self._lines.get, None):
            self._log(line)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        at_once = not self.held or self._pending
        self._pending = True
        if at_once:
            raise KeyboardInterrupt
        self._lines.put("stopping when this step is complete. Press again to stop at once")
