"""Report slow work: its name and progress.

with log_if_slow(log, "loading x"): ...      "loading x" after 2 s, "loading x, for 12 s so far" every 10 s
for item in count_if_slow(items, "x", log)   "x: 12,000 of 90,000 after 2 s", then every 10 s, and at the end

`log` may be called in another thread.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Log = Callable[[str], None]
Item = TypeVar("Item")

SILENT_SECONDS = 2.0  # until the first line
EVERY_SECONDS = 10.0  # between lines


@contextmanager
def log_if_slow(
    log: Log,
    message: str | Callable[[], str],
    *,
    delay: float = SILENT_SECONDS,
    every: float = EVERY_SECONDS,
) -> Iterator[None]:
    """Log a block that takes more than `delay` seconds, then every `every` seconds with the time so far."""
    done = threading.Event()
    began = time.monotonic()

    def tell() -> None:
        if done.wait(delay):
            return
        log(_text(message))
        while not done.wait(every):
            log(f"{_text(message)}, for {time.monotonic() - began:.0f} s so far")

    thread = threading.Thread(target=tell, name="slow work", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _text(message: str | Callable[[], str]) -> str:
    return message if isinstance(message, str) else message()


def count_if_slow(
    items: Iterable[Item],
    label: str,
    log: Log,
    *,
    total: int | None = None,
    delay: float = SILENT_SECONDS,
    every: float = EVERY_SECONDS,
) -> Iterator[Item]:
    """Yield the items, and log how many are done, of `total` if known."""
    began = time.monotonic()
    last_time = 0.0
    count = 0
    total_text = "" if total is None else f" of {total:,}"
    for count, item in enumerate(items, start=1):
        yield item
        now = time.monotonic() - began
        if now >= (last_time + every if last_time else delay):
            last_time = now
            log(f"{label}: {count:,}{total_text} after {now:.0f} s")
    if last_time:
        log(f"{label}: {count:,} in {time.monotonic() - began:.0f} s")
