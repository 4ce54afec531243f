"""LiveMetrics: metrics exported to Prometheus during a step, or in finer detail than steps.

    phases of the driver ------------+
    states of engines, their queues -+--> LiveMetrics --Export--> gauges and histograms of Ray (metrics.yaml)
    samples, micro-steps of ranks ---+

Decides which values are exported, and `ray_metrics` sends them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from balancing import CostModel
from workers.batch.remote_batch import RemoteBatch

if TYPE_CHECKING:
    from workers.model.timing import MicroStepTime

Export = Callable[[str, float], None]
"""Takes a metric's full name and its value."""
QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)


class LiveMetrics:
    """Phases come from one thread, other values from any thread, one at a time."""

    def __init__(self, export: Export = lambda name, value: None) -> None:
        self._export = export
        self._phases: list[str] = []
        self._exported: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Set phase `name` during the block."""
        self._show_phase(False)
        self._phases.append(name)
        self._show_phase(True)
        try:
            yield
        finally:
            self._show_phase(False)
            self._phases.pop()
            self._show_phase(True)

    def _show_phase(self, entered: bool) -> None:
        if self._phases:
            self._export(f"phase/{self._phases[-1]}", float(entered))

    def engine_state(self, replica: int, state: Enum) -> None:
        for member in type(state):
            self._gauge(
                f"engine/state/{replica}/{member.name.lower()}", float(member is state)
            )

    def queues(self, waiting: int, in_flight: Sequence[int]) -> None:
        """Export the number of requests without an engine, and in each engine."""
        self._gauge("rollout/requests_waiting", waiting)
        for replica, requests in enumerate(in_flight):
            self._gauge(f"engine/requests_in_flight/{replica}", requests)

    def _gauge(self, name: str, value: float) -> None:
        """Export a value if it changed, because every engine's answer reports all queues."""
        if self._exported.get(name) != value:
            self._exported[name] = value
            self._export(name, value)

    def samples(self, batch: RemoteBatch) -> None:
        """Export a step's samples: columns `response_tokens`, `seconds`, `reward` [B]."""
        for name, column in (
            ("sample/response_tokens", "response_tokens"),
            ("sample/generation_s", "seconds"),
        ):
            for value in batch[column].tolist():
                self._export(name, value)
        for quantile, value in zip(
            QUANTILES, np.quantile(batch["reward"], QUANTILES).tolist(), strict=True
        ):
            self._export(f"sample/reward/{quantile:g}", value)

    def micro_steps(
        self, times: Mapping[str, Sequence["MicroStepTime"]], cost_model: CostModel
    ) -> None:
        """Export a step's micro-steps by the rank's actor, with their planned costs."""
        for actor, actor_times in times.items():
            for time in actor_times:
                if time.tokens:
                    self._export(f"micro_step/{rank_of(actor)}/{time.name}_s", time.seconds)
        for (actor, name), (measured, predicted) in rank_seconds(times, cost_model).items():
            self._export(f"rank/{rank_of(actor)}/{name}_s", measured)
            self._export(f"rank_predicted/{rank_of(actor)}/{name}_s", predicted)


def rank_of(actor: str) -> str:
    """Return ROLE/RANK: `policy/dp=1 cp=0` for the actor `policy dp=1 cp=0`."""
    return actor.replace(" ", "/", 1)


def rank_seconds(
    times: Mapping[str, Sequence["MicroStepTime"]], cost_model: CostModel
) -> dict[tuple[str, str], tuple[float, float]]:
    """Sum micro-steps: {(actor, pass): (seconds measured, seconds predicted)}.

    Predictions are scaled so that the sums of each role's pass over ranks are equal.
    """
    ranks: dict[tuple[str, str], np.ndarray] = defaultdict(lambda: np.zeros(2))
    roles: dict[tuple[str, str], np.ndarray] = defaultdict(lambda: np.zeros(2))
    for actor, actor_times in times.items():
        for time in actor_times:
            cost = np.dot(cost_model.coefficients, time.sums)
            for total in (
                ranks[actor, time.name],
                roles[actor.partition(" ")[0], time.name],
            ):
                total += (time.seconds, cost)
    predicted = {}
    for (actor, name), (seconds, cost) in ranks.items():
        role_seconds, role_cost = roles[actor.partition(" ")[0], name]
        predicted[actor, name] = (
            float(seconds),
            float(cost * role_seconds / (role_cost or 1.0)),
        )
    return predicted
