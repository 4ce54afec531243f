"""Interrupts: Ctrl-C, and the SIGTERM of `ray job stop`, stop a run where it can go on from later.

rollout, log-probs | update, weights, metrics, checkpoint |
  stops at once    |       hold: stops at its end         | release      a second interrupt always stops at once
"""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """While entered, an interrupt raises KeyboardInterrupt; between `hold` and `release` it waits for `release`.

    Outside of the main thread, where Python delivers no signals, it changes nothing.
    """

    def __init__(self, log: Callable[[str], None]) -> None:
        """`log`: told, once, that the run will stop."""
        self.held = False
        self._pending = False
        self._log = log
        self._handlers: dict[signal.Signals, Any] = {}

    def hold(self) -> None:
        """From here on the policy's state is between two steps, and no checkpoint of it would be one of a step."""
        self.held = True

    def release(self) -> None:
        """A step is complete. Raises KeyboardInterrupt if one has waited."""
        self.held = False
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.held or self._pending:
            raise KeyboardInterrupt
        self._pending = True
        self._log("stopping when this step is complete; once more stops at once")
