"""Lanes: training and sampling side by side, each in the order of its calls.

train   forward_backward --> step --> publish --> forward_backward          a thread
sample  samples, samples, all done ------^ weights --> samples              a thread, which owns the engines

When a LoRA policy is published, all samples go on but those of the version that leaves the engines.
"""

import queue
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from controller.engines.engine_pool import EnginePool
from controller.rollout.buffer import SamplingRound
from controller.rollout.samples import RolloutBatch

Found = TypeVar("Found")
PUMP_SECONDS = 0.05  # until a new call is seen while engines are at work


@dataclass
class _Order:
    """A round to begin, or work that waits until it may begin and until rounds before it are finished.

    adapter: the LoRA policy that is sampled or published, empty for the only one or the base model, None for
    all.
    replaced: returns versions of the policy that the work takes from the engines, None for all.
    """

    begin: Callable[[], SamplingRound] | None
    work: Callable[[], Any] | None
    adapter: str | None
    may_begin: Callable[[], bool] = lambda: True
    replaced: Callable[[], Collection[int]] | None = None
    future: Future[Any] = field(default_factory=Future)

    def meets(self, other: "_Order") -> bool:
        """Return whether both are about the same policy."""
        return None in (self.adapter, other.adapter) or self.adapter == other.adapter


class Lanes:
    def __init__(self, engines: EnginePool, *, colocated: bool) -> None:
        """colocated: engines and ranks share GPUs, so that training waits for samples."""
        self._engines = engines
        self._colocated = colocated
        # True wakes, False ends.
        self._orders: queue.SimpleQueue[_Order | bool] = queue.SimpleQueue()
        self._waiting = list[_Order]()
        self._rounds = list[tuple[SamplingRound, _Order]]()
        self._both = threading.Lock()
        self._training = ThreadPoolExecutor(1, "training")
        self._sampling = threading.Thread(
            target=self._sample_all, name="sampling", daemon=True
        )
        self._sampling.start()

    def train(self, work: Callable[[], Found]) -> Future[Found]:
        return self._alone(work) if self._colocated else self._training.submit(work)

    def sample(
        self, begin: Callable[[], SamplingRound], adapter: str = ""
    ) -> Future[RolloutBatch]:
        return self._ordered(_Order(begin, None, adapter))

    def both(
        self,
        work: Callable[[], Found],
        adapter: str | None = None,
        replaced: Callable[[], Collection[int]] | None = None,
    ) -> Future[Found]:
        """Do work that neither training may overlap nor samples of `adapter`, None for samples of all
        policies.

        replaced: see `_Order`.
        """
        if self._colocated:
            return self._alone(work)
        trained = threading.Event()
        order = _Order(None, work, adapter, trained.is_set, replaced)

        def let_in() -> None:
            trained.set()
            self._orders.put(True)
            order.future.exception()  # waits

        with self._both:  # two of them must have the same order in both lanes
            self._ordered(order)
            self._training.submit(let_in)
        return order.future

    def close(self) -> None:
        """Wait for training's calls, and give up samples."""
        self._training.shutdown()
        self._orders.put(False)
        self._sampling.join()

    def _alone(self, work: Callable[[], Found]) -> Future[Found]:
        return self._ordered(_Order(None, work, None))

    def _ordered(self, order: _Order) -> Future[Any]:
        self._orders.put(order)
        return order.future

    def _sample_all(self) -> None:
        try:
            while self._take_orders():
                self._begin()
                if self._rounds:
                    self._pump()
                    self._begin()
        finally:
            for order in [order for _, order in self._rounds] + self._waiting:
                order.future.cancel()

    def _take_orders(self) -> bool:
        """Take what was ordered, and wait for it if no round goes on: all that waits then, waits for
        training.
        """
        while True:
            try:
                order = self._orders.get(block=not self._rounds)
            except queue.Empty:
                return True
            if order is False:
                return False
            if isinstance(order, _Order):
                self._waiting.append(order)
            if not self._rounds:
                return True

    def _begin(self) -> None:
        """Begin what can begin. Work waits for earlier rounds of its policy, and later ones for the work."""
        waiting = self._waiting
        self._waiting = []
        for order in waiting:
            if self._waits(order):
                self._waiting.append(order)
                continue
            try:
                if order.begin is not None:
                    self._rounds.append((order.begin(), order))
                else:
                    assert order.work is not None
                    order.future.set_result(order.work())
            except BaseException as error:
                order.future.set_exception(error)

    def _waits(self, order: _Order) -> bool:
        if order.begin is not None:
            return any(
                earlier_order.work and earlier_order.meets(order)
                for earlier_order in self._waiting
            )
        if not order.may_begin() or any(
            earlier_order.work or earlier_order.meets(order)
            for earlier_order in self._waiting
        ):
            return True
        gone = None if order.replaced is None else order.replaced()
        met = [
            sampling_round
            for sampling_round, earlier_order in self._rounds
            if earlier_order.meets(order)
        ]
        return any(gone is None or sampling_round.adapter in gone for sampling_round in met)

    def _pump(self) -> None:
        try:
            self._engines.pump(PUMP_SECONDS)
        except (
            BaseException
        ) as error:  # of an engine that cannot be replaced: no round will end
            for sampling_round, order in self._rounds:
                sampling_round.end()
                order.future.set_exception(error)
            self._rounds.clear()
            return
        for finished in [entry for entry in self._rounds if entry[0].done]:
            self._rounds.remove(finished)
            sampling_round, order = finished
            sampling_round.end()
            try:
                order.future.set_result(sampling_round.result())
            except BaseException as error:
                order.future.set_exception(error)


def then(future: Future[Any], change: Callable[[Any], Any]) -> Future[Any]:
    """Return a future of a changed result."""
    changed = Future[Any]()

    def finish(done: Future[Any]) -> None:
        if done.cancelled():
            changed.cancel()
            return
        try:
            changed.set_result(change(done.result()))
        except BaseException as error:
            changed.set_exception(error)

    future.add_done_callback(finish)
    return changed
