"""Record a run's timeline on the driver, and write it as a trace for Chrome or Perfetto.

    phases of the driver ------------------+
    start and end of every sample ---------+--> TimelineRecorder --take--> timeline.jsonl, a line a step
    micro-steps of every rank, weight loads+
     timeline.jsonl --read_timeline--> a record a step --trace_events--> trace.json (https://ui.perfetto.dev)

    driver          step | rollout . plan . update . weights        validation      save
    rollout 0       generating, samples in flight, weights loaded
    policy dp=0     measured micro-steps over planned ones

A record holds, with times in seconds since 1970 and actors by their names: `phases` [name, start, end],
`samples` {actor: [start, end, response tokens, prompt tokens, prompt, score delay]}, `weights` {actor:
[start, end, version]}, `micro_steps` {actor: [pass, start, end, tokens, squared tokens, and these of
images]}, and `cost`, the coefficients of the cost model in this order. `prompt`: its number, -1 for samples
that no step trains on. `score delay`: seconds from the sample's end to its score. Times are by the clock of
the machine where something happened: on several nodes, keep the clocks together (NTP).

Planned widths are in proportion to what the cost model predicts, and each pass is scaled to its measured
duration. A planned bar longer than the measured bar above it means overestimated work.
"""

import json
import operator
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, zip_longest
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from balancing import CostModel
from balancing.analysis.lengths_file import has_step, json_records
from workers.errors import DataError

if TYPE_CHECKING:
    from workers.batch.score import Score
    from workers.engine.requests import SampleResult, WeightLoad
    from workers.model.timing import MicroStepTime

RECORD = "timeline.jsonl"
Event = dict[str, Any]
DRIVER = "driver"
OF_ACTORS = ("samples", "weights", "micro_steps")
THREADS = {
    DRIVER: {1: "phases"},
    "rollout": {1: "generate", 2: "weights"},
    "": {1: "measured", 2: "planned"},
}
"""Threads of a process by the first word of its name."""

_ORIGIN = time.time() - time.perf_counter()
"""Read once per process: with two readings, an inner phase could seem to begin before the outer one."""


class TimelineRecorder:
    """Collects events since the last `take`. Samples may come from another thread."""

    def __init__(self) -> None:
        self._phases: list[list[Any]] = []
        self._rows: dict[str, dict[str, list[list[Any]]]] = {kind: {} for kind in OF_ACTORS}
        self._cost = (1.0, 0.0, 0.0, 0.0)
        self._lock = Lock()

    def phase(self, name: str, start: float, end: float) -> None:
        """Record a phase of the driver, in times of `time.perf_counter`."""
        self._phases.append([name, round(_ORIGIN + start, 6), round(_ORIGIN + end, 6)])

    def samples(
        self,
        results: Iterable["SampleResult"],
        scores: Mapping[tuple[str, int], "Score"],
        *,
        trains: bool = True,
    ) -> None:
        """Record time and engine of every sample that reached an engine. trains: whether for a step's
        training.
        """
        for result in results:
            if result.replica >= 0:
                start, end = _interval(result.start, result.seconds)
                scored = scores[result.key].scored if result.key in scores else 0.0
                prompt = int(result.uid) if trains else -1
                delay = round(max(0.0, scored - end), 6)
                row = [
                    start,
                    end,
                    result.response_tokens,
                    result.prompt_tokens,
                    prompt,
                    delay,
                ]
                self._add("samples", f"rollout {result.replica}", [row])

    def weight_loads(self, loads: Mapping[str, Sequence["WeightLoad"]]) -> None:
        """Record each engine's weight updates, by its actor's name."""
        for actor, actor_loads in loads.items():
            self._add(
                "weights",
                actor,
                [
                    [*_interval(load.start, load.seconds), load.version]
                    for load in actor_loads
                ],
            )

    def micro_steps(
        self, times: Mapping[str, Sequence["MicroStepTime"]], cost_model: CostModel
    ) -> None:
        """Record each rank's micro-steps, by its actor's name, and the cost model of their plan."""
        self._cost = cost_model.coefficients
        for actor, actor_times in times.items():
            rows = [[t.name, *_interval(t.start, t.seconds), *t.sums] for t in actor_times]
            self._add("micro_steps", actor, rows)

    def _add(self, kind: str, actor: str, rows: Sequence[list[Any]]) -> None:
        with self._lock:
            self._rows[kind].setdefault(actor, []).extend(rows)

    def take(self) -> dict[str, Any]:
        """Return all events since the last call, ready for JSON."""
        phases = self._phases
        self._phases = []
        with self._lock:
            rows = self._rows
            self._rows = {kind: {} for kind in OF_ACTORS}
        return {"phases": phases, **rows, "cost": list(self._cost)}


def _interval(start: float, seconds: float) -> tuple[float, float]:
    """Round (start, end) so that consecutive intervals stay consecutive."""
    return round(start, 6), round(start + seconds, 6)


def _slice(
    process: int, thread: int, name: str, start: float, end: float, **arguments: Any
) -> Event:
    """Return a complete event in whole microseconds, rounded so that nested events stay nested."""
    begin = round(start * 1e6)
    track = {"ph": "X", "name": name, "cat": "ballast", "pid": process, "tid": thread}
    return track | {"ts": begin, "dur": round(end * 1e6) - begin, "args": arguments}


def read_timeline(folder: Path, steps: range | None = None) -> list[dict[str, Any]]:
    """Read a run's records in order, all or only of `steps`. Damaged ones are skipped with a warning.

    Raises DataError if nothing is recorded for these steps.
    """
    path = folder / RECORD
    if not path.is_file():
        raise DataError(f"{path} is missing. A run writes it with tracking.timeline=true.")
    records = [
        record
        for _, record in json_records(path, has_step, lambda record: trace_events([record]))
    ]
    chosen = [record for record in records if steps is None or record["step"] in steps]
    if not chosen:
        step_range = f"{records[0]['step']} to {records[-1]['step']}" if records else "none"
        raise DataError(
            f"{path} has no record of these steps. Choose --steps among its own: {step_range}."
        )
    return chosen


def trace_events(records: Sequence[Mapping[str, Any]]) -> list[Event]:
    """Build Chrome trace events: metadata that names the tracks, then slices and counters."""
    names = {name for record in records for kind in OF_ACTORS for name in record[kind]}
    process = {
        name: number
        for number, name in enumerate([DRIVER, *sorted(names, key=_natural)], start=1)
    }
    events = list(_metadata(process))
    for record in records:
        driver = process[DRIVER]
        step = record["step"]
        events += [
            _slice(driver, 1, name, start, end, step=step)
            for name, start, end in record["phases"]
        ]
        for actor, rows in record["samples"].items():
            events += _generation(process[actor], rows, step)
        for actor, rows in record["weights"].items():
            events += [
                _slice(process[actor], 2, "weights", start, end, version=version)
                for start, end, version in rows
            ]
        events += _micro_steps(process, record)
    return events


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort `rollout 10` after `rollout 9`."""
    return [
        (int(part), "") if part.isdigit() else (-1, part)
        for part in re.split(r"(\d+)", name)
    ]


def _metadata(process: Mapping[str, int]) -> Iterator[Event]:
    for name, number in process.items():
        yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}}
        yield {
            "ph": "M",
            "name": "process_sort_index",
            "pid": number,
            "args": {"sort_index": number},
        }
        for thread, title in THREADS.get(name.split()[0], THREADS[""]).items():
            yield {
                "ph": "M",
                "name": "thread_name",
                "pid": number,
                "tid": thread,
                "args": {"name": title},
            }


def _generation(process: int, rows: Sequence[list[float]], step: int) -> Iterator[Event]:
    """Return an engine's generation as a slice per uninterrupted stretch, and the number of samples at a
    time.
    """
    stretches: list[list[float]] = []  # start, end, samples, tokens
    for start, end, tokens, *_ in sorted(rows):
        if stretches and start <= stretches[-1][1]:
            last = stretches[-1]
            stretches[-1] = [last[0], max(last[1], end), last[2] + 1, last[3] + tokens]
        else:
            stretches.append([start, end, 1, tokens])
    for start, end, samples, tokens in stretches:
        yield _slice(
            process, 1, "generate", start, end, step=step, samples=samples, tokens=tokens
        )
    changes = sorted(
        [(start, 1) for start, *_ in rows] + [(end, -1) for _, end, *_ in rows]
    )
    running = 0
    for moment, group in groupby(changes, key=lambda change: round(change[0] * 1e6)):
        running += sum(change for _, change in group)
        counter = {
            "ph": "C",
            "name": "samples in flight",
            "pid": process,
            "tid": 0,
            "ts": moment,
        }
        yield counter | {"args": {"samples": running}}


def _micro_steps(process: Mapping[str, int], record: Mapping[str, Any]) -> Iterator[Event]:
    """Return measured and planned slices of every rank, by role and pass.

    Predictions are scaled to seconds: the sum over micro-steps of the slowest rank is the measured sum. A
    planned slice begins with the first rank's micro-step, but not before the rank's previous slice ends,
    whatever its pass.
    """
    passes: dict[tuple[str, str], dict[str, list[tuple[float, float, int, float]]]] = {}
    for actor, rows in record["micro_steps"].items():
        for name, start, end, *sums in rows:
            step = (start, end, sums[0], sum(map(operator.mul, record["cost"], sums)))
            passes.setdefault((actor.split()[0], name), {}).setdefault(actor, []).append(
                step
            )
    scales: dict[tuple[str, str], float] = {}
    begins: dict[tuple[str, str], list[float]] = {}
    by_actor: dict[str, list[tuple[float, float, int, float, str, str, int]]] = {}
    for (role, name), ranks in passes.items():
        begins[role, name] = []
        lasted = 0.0
        expected = 0.0
        for steps_of_ranks in zip_longest(*ranks.values()):
            steps = [step for step in steps_of_ranks if step]
            begins[role, name].append(min(start for start, *_ in steps))
            lasted += max(end - start for start, end, *_ in steps)
            expected += max(cost for *_, cost in steps)
        scales[role, name] = lasted / expected if expected else 0.0
        for actor, steps in ranks.items():
            by_actor.setdefault(actor, []).extend(
                (*step, role, name, number) for number, step in enumerate(steps)
            )
    for actor, rows in by_actor.items():
        free = 0.0
        for start, end, tokens, cost, role, name, number in sorted(rows):
            planned = cost * scales[role, name]
            title = f"{name} {number}"
            facts = {"tokens": tokens, "planned_s": round(planned, 6)}
            yield _slice(process[actor], 1, title, start, end, **facts)
            begin = max(free, begins[role, name][number])
            free = begin + planned
            yield _slice(
                process[actor],
                2,
                title,
                begin,
                free,
                measured_s=round(end - start, 6),
                **facts,
            )


def write_trace(output: Path, events: Sequence[Mapping[str, Any]]) -> None:
    with output.open("w", encoding="utf-8") as file:
        json.dump(
            {"traceEvents": events, "displayTimeUnit": "ms"}, file, separators=(",", ":")
        )
