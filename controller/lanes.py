"""Lanes: training and sampling side by side, each in the order of its calls.

train   forward_backward --> step --> publish --> forward_backward          a thread
sample  samples, samples, all done ------^ weights --> samples              a thread, which owns the engines
"""

import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from controller.engines.engine_pool import EnginePool
from controller.rollout.buffer import SamplingRound
from controller.rollout.samples import RolloutBatch

Found = TypeVar("Found")
PUMP_SECONDS = 0.05  # until a new call is seen while engines are at work


@dataclass
class _Order:
    """A round to begin, or work that waits until all rounds before it are finished."""

    begin: Callable[[], SamplingRound] | None
    work: Callable[[], Any] | None
    future: Future[Any]


class Lanes:
    def __init__(self, engines: EnginePool, *, colocated: bool) -> None:
        """colocated: engines and ranks share GPUs, so that training waits for samples."""
        self._engines, self._colocated = engines, colocated
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._waiting, self._rounds = deque[_Order](), list[tuple[SamplingRound, Future[Any]]]()
        self._both = threading.Lock()
        self._training = ThreadPoolExecutor(1, "training")
        self._sampling = threading.Thread(target=self._sample_all, name="sampling", daemon=True)
        self._sampling.start()

    def train(self, work: Callable[[], Found]) -> Future[Found]:
        return self._alone(work) if self._colocated else self._training.submit(work)

    def sample(self, begin: Callable[[], SamplingRound]) -> Future[RolloutBatch]:
        return self._ordered(_Order(begin, None, Future()))

    def both(self, work: Callable[[], Found]) -> Future[Found]:
        """Do work that neither training nor sampling may overlap."""
        if self._colocated:
            return self._alone(work)
        trained, done = Future[None](), Future[Found]()

        def meet() -> Found:
            trained.result()
            return work()

        def let_in() -> None:
            trained.set_result(None)
            done.exception()  # waits

        with self._both:  # two of them must have the same order in both lanes
            self._ordered(_Order(None, meet, done))
            self._training.submit(let_in)
        return done

    def close(self) -> None:
        """Wait for training's calls, and give up samples."""
        self._training.shutdown()
        self._orders.put(None)
        self._sampling.join()

    def _alone(self, work: Callable[[], Found]) -> Future[Found]:
        return self._ordered(_Order(None, work, Future()))

    def _ordered(self, order: _Order) -> Future[Any]:
        self._orders.put(order)
        return order.future

    def _sample_all(self) -> None:
        try:
            while self._take_orders():
                self._begin()
                if self._rounds:
                    self._pump()
        finally:
            for future in [future for _, future in self._rounds] + [order.future for order in self._waiting]:
                future.cancel()

    def _take_orders(self) -> bool:
        while True:
            try:
                order = self._orders.get(block=not (self._rounds or self._waiting))
            except queue.Empty:
                return True
            if order is None:
                return False
            self._waiting.append(order)

    def _begin(self) -> None:
        """Begin rounds in order. Work waits for the rounds before it, and later rounds for the work."""
        while self._waiting and (self._waiting[0].begin or not self._rounds):
            order = self._waiting.popleft()
            try:
                if order.begin is not None:
                    self._rounds.append((order.begin(), order.future))
                else:
                    assert order.work is not None
                    order.future.set_result(order.work())
            except BaseException as error:
                order.future.set_exception(error)

    def _pump(self) -> None:
        try:
            self._engines.pump(PUMP_SECONDS)
        except BaseException as error:  # of an engine that cannot be replaced: no round will end
            for sampling_round, future in self._rounds:
                sampling_round.end()
                future.set_exception(error)
            self._rounds.clear()
            return
        for finished in [each for each in self._rounds if each[0].done]:
            self._rounds.remove(finished)
            sampling_round, future = finished
            sampling_round.end()
            try:
                future.set_result(sampling_round.result())
            except BaseException as error:
                future.set_exception(error)
