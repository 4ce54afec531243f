"""Lookahead: the samples of the next step are generated while this step trains.

    driver    take(t)  begin(t + 1)  plan, update ...............  wait  weights  take(t + 1)
    thread             generate for t + 1, with the weights that step t started from ..^

Every step's samples are then one weight version old, always: which weights made them does not depend on who was faster.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Collected = TypeVar("Collected")


class Lookahead(Generic[Collected]):
    """At most one step ahead. What `collect` raises in the thread is raised by `wait` and `take`."""

    def __init__(self, collect: Callable[[int, int], Collected]) -> None:
        """`collect(step, position)`: all samples of a step, from prompts at `position` of the stream on."""
        self._collect = collect
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lookahead")
        self._begun: tuple[int, Future[Collected]] | None = None

    def begin(self, step: int, position: int) -> None:
        """Start to collect `step` and return at once."""
        assert self._begun is None, f"step {step} was begun before step {self._begun[0]} was taken"
        self._begun = step, self._thread.submit(self._collect, step, position)

    def wait(self) -> None:
        """Return when nothing is being collected: then the engines are idle."""
        if self._begun is not None:
            self._begun[1].result()

    def take(self, step: int, position: int) -> Collected:
        """The samples of `step`: those begun, or collected now where nothing was."""
        if self._begun is None:
            return self._collect(step, position)
        begun, future = self._begun
        assert begun == step, f"step {begun} was begun, step {step} is asked for"
        self._begun = None
        return future.result()
