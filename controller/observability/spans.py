"""TimelineRecorder: collects the times of a run on the driver, from results that it receives anyway.

    phases of the driver ------------------+
    start and end of every sample ---------+--> TimelineRecorder --take--> one line of timeline.jsonl a step
    micro-steps of every rank, weight loads+

Times are seconds since 1970 by the clock of the machine where something happened: on several nodes, keep the clocks
together (NTP).
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

from balancing import CostModel

if TYPE_CHECKING:
    from workers.model.timing import MicroStepTime
    from workers.rollout.requests import SampleResult, WeightLoad

Rows = dict[str, list[list[Any]]]
"""Rows of each actor, by its name."""

_ORIGIN = time.time() - time.perf_counter()
"""Read once per process: with two readings, an inner phase could seem to begin before the outer one."""


class TimelineRecorder:
    """Events since the last `take`; samples may come from another thread."""

    def __init__(self) -> None:
        self._phases: list[list[Any]] = []
        self._rows: dict[str, Rows] = {name: {} for name in ("samples", "weights", "micro_steps")}
        self._cost = (1.0, 0.0)
        self._lock = Lock()

    def phase(self, name: str, start: float, end: float) -> None:
        """Record a phase of the driver; times are of `time.perf_counter`."""
        self._phases.append([name, round(_ORIGIN + start, 6), round(_ORIGIN + end, 6)])

    def samples(self, results: Iterable["SampleResult"]) -> None:
        """Record time and engine of every sample; not of those that never reached an engine."""
        for result in results:
            if result.replica < 0:
                continue
            row = [*_interval(result.start, result.seconds), result.response_tokens]
            with self._lock:
                self._rows["samples"].setdefault(f"rollout {result.replica}", []).append(row)

    def weight_loads(self, loads: Mapping[str, Sequence["WeightLoad"]]) -> None:
        """Record the weight updates of each engine, by its actor's name."""
        for actor, found in loads.items():
            rows = [[*_interval(load.start, load.seconds), load.version] for load in found]
            self._rows["weights"].setdefault(actor, []).extend(rows)

    def micro_steps(self, times: Mapping[str, Sequence["MicroStepTime"]], cost_model: CostModel) -> None:
        """Record the micro-steps of each rank, by its actor's name, and the costs that they were planned with."""
        self._cost = (cost_model.linear, cost_model.quadratic)
        for actor, found in times.items():
            rows = [[t.name, *_interval(t.start, t.seconds), t.tokens, t.squared_tokens] for t in found]
            self._rows["micro_steps"].setdefault(actor, []).extend(rows)

    def take(self) -> dict[str, Any]:
        """Everything since the last call, ready for JSON; see `controller.observability.timeline` for its form."""
        phases, self._phases = self._phases, []
        with self._lock:
            rows, self._rows = self._rows, {name: {} for name in self._rows}
        return {"phases": phases, **rows, "cost": list(self._cost)}


def _interval(start: float, seconds: float) -> tuple[float, float]:
    """(start, end), rounded alike, so that what follows another still does."""
    return round(start, 6), round(start + seconds, 6)
