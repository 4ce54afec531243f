"""Report slow work: its name and progress.

with log_if_slow(log, "loading x"): ...         "loading x" after 2 s, "loading x, for 12 s so far" every 10 s
for item in count_if_slow(items, "x", log)     "x: 12,000 of 90,000 after 2 s", in the same rhythm, and a last
line

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
    log: Log, what: str | Callable[[], str], *, after: float = SILENT_SECONDS, every: float = EVERY_SECONDS
) -> Iterator[None]:
    """Log a block that takes more than `after` seconds, then every `every` seconds with the time so far."""
    done = threading.Event()
    began = time.monotonic()

    def tell() -> None:
        if done.wait(after):
            return
        log(_text(what))
        while not done.wait(every):
            log(f"{_text(what)}, for {time.monotonic() - began:.0f} s so far")

    thread = threading.Thread(target=tell, name="slow work", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _text(what: str | Callable[[], str]) -> str:
    return what if isinstance(what, str) else what()


def count_if_slow(
    items: Iterable[Item],
    what: str,
    log: Log,
    *,
    total: int | None = None,
    after: float = SILENT_SECONDS,
    every: float = EVERY_SECONDS,
) -> Iterator[Item]:
    """Yield the items, and log how many are done, of `total` if known."""
    began = time.monotonic()
    told = 0.0
    count = 0
    of = "" if total is None else f" of {total:,}"
    for count, item in enumerate(items, start=1):
        yield item
        now = time.monotonic() - began
        if now >= (told + every if told else after):
            told = now
            log(f"{what}: {count:,}{of} after {now:.0f} s")
    if told:
        log(f"{what}: {count:,} in {time.monotonic() - began:.0f} s")
