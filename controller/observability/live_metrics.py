"""LiveMetrics: metrics that Prometheus gets while a step runs, or that are finer than a step.

    phases of the driver ------------+
    states of engines, their queues -+--> LiveMetrics --Export--> gauges and histograms of Ray (`metric_catalog`)
    samples, micro-steps of ranks ---+

Decides which values are exported; the exporter (`trackers.ray_metrics`) sends them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from balancing import CostModel
from controller.observability.declaration import Declaration
from controller.observability.live_catalog import (
    ENGINE_STATE,
    MICRO_STEP_SECONDS,
    PHASE,
    RANK_PREDICTED_SECONDS,
    RANK_SECONDS,
    REQUESTS_IN_FLIGHT,
    REQUESTS_WAITING,
    SAMPLE_REWARD,
    SAMPLE_SECONDS,
    SAMPLE_TOKENS,
)
from workers.remote_batch import RemoteBatch

if TYPE_CHECKING:
    from workers.model.timing import MicroStepTime

Labels = Mapping[str, str]
Export = Callable[[Declaration, Labels, float], None]
Entered = TypeVar("Entered")
QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)


def no_export(declaration: Declaration, labels: Labels, value: float) -> None:
    """An Export that drops all values."""
    del declaration, labels, value


class LiveMetrics:
    """Phases come from one thread; other values from any thread, one at a time."""

    def __init__(self, export: Export = no_export) -> None:
        self._export = export
        self._phases: list[str] = []
        self._exported: dict[tuple[str, ...], float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The block is phase `name`; at its end the phase around it is current again."""
        self._show_phase(False)
        self._phases.append(name)
        self._show_phase(True)
        try:
            yield
        finally:
            self._show_phase(False)
            self._phases.pop()
            self._show_phase(True)

    @contextmanager
    def entering(self, name: str, manager: AbstractContextManager[Entered]) -> Iterator[Entered]:
        """As `with manager`; entering it is phase `name`, the block is not."""
        with ExitStack() as stack:
            with self.phase(name):
                entered = stack.enter_context(manager)
            yield entered

    def _show_phase(self, entered: bool) -> None:
        if self._phases:
            self._export(PHASE, {"phase": self._phases[-1]}, float(entered))

    def engine_state(self, replica: int, state: Enum) -> None:
        """The engine is in that state, and in no other."""
        for known in type(state):
            self._gauge(ENGINE_STATE, {"replica": str(replica), "state": known.name.lower()}, float(known is state))

    def queues(self, waiting: int, in_flight: Sequence[int]) -> None:
        """Requests that wait for an engine, and those that each engine works on."""
        self._gauge(REQUESTS_WAITING, {}, waiting)
        for replica, requests in enumerate(in_flight):
            self._gauge(REQUESTS_IN_FLIGHT, {"replica": str(replica)}, requests)

    def _gauge(self, declaration: Declaration, labels: Labels, value: float) -> None:
        """Export a changed value. Unchanged ones are common: each answer of one engine reports the queues of all."""
        key = (declaration.name, *labels.values())
        if self._exported.get(key) != value:
            self._exported[key] = value
            self._export(declaration, labels, value)

    def samples(self, batch: RemoteBatch) -> None:
        """The samples of a step: columns `response_tokens`, `seconds`, `reward` [B]."""
        for declaration, name in ((SAMPLE_TOKENS, "response_tokens"), (SAMPLE_SECONDS, "seconds")):
            for value in batch[name].tolist():
                self._export(declaration, {}, value)
        for quantile, value in zip(QUANTILES, np.quantile(batch["reward"], QUANTILES).tolist(), strict=True):
            self._export(SAMPLE_REWARD, {"quantile": f"{quantile:g}"}, value)

    def micro_steps(self, times: Mapping[str, Sequence["MicroStepTime"]], cost_model: CostModel) -> None:
        """The micro-steps of a step, by the name of the rank's actor, and the costs that they were planned with."""
        for actor, found in times.items():
            for time in found:
                if time.tokens:
                    self._export(MICRO_STEP_SECONDS, rank_labels(actor, time.name), time.seconds)
        for (actor, name), (measured, predicted) in rank_seconds(times, cost_model).items():
            self._export(RANK_SECONDS, rank_labels(actor, name), measured)
            self._export(RANK_PREDICTED_SECONDS, rank_labels(actor, name), predicted)


def rank_labels(actor: str, name: str) -> dict[str, str]:
    """Labels of the pass `name` of an actor of a `WorkerGroup`: `policy dp=1 cp=0` is rank `dp=1 cp=0` of `policy`."""
    role, _, rank = actor.partition(" ")
    return {"role": role, "rank": rank, "phase": name}


def rank_seconds(
    times: Mapping[str, Sequence["MicroStepTime"]], cost_model: CostModel
) -> dict[tuple[str, str], tuple[float, float]]:
    """{(actor, pass): (seconds measured, seconds predicted)} of all micro-steps together.

    Predictions are of any unit: those of a role's pass are scaled by one factor, so that over its ranks they add up to
    what was measured. They differ from it where a rank took another share of the time than the plan gave it.
    """
    measured: dict[tuple[str, str], float] = {}
    costs: dict[tuple[str, str], float] = {}
    for actor, found in times.items():
        for time in found:
            key, cost = (actor, time.name), cost_model.linear * time.tokens + cost_model.quadratic * time.squared_tokens
            measured[key] = measured.get(key, 0.0) + time.seconds
            costs[key] = costs.get(key, 0.0) + cost
    seconds_of, cost_of = _by_role(measured), _by_role(costs)
    return {
        key: (seconds, costs[key] * seconds_of[_role(key)] / (cost_of[_role(key)] or 1.0))
        for key, seconds in measured.items()
    }


def _role(key: tuple[str, str]) -> tuple[str, str]:
    actor, name = key
    return actor.partition(" ")[0], name


def _by_role(values: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    total: dict[tuple[str, str], float] = {}
    for key, value in values.items():
        total[_role(key)] = total.get(_role(key), 0.0) + value
    return total
