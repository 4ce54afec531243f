"""`python -m ballast whatif runs/NAME key.sub=value ...`: simulate a recorded run under other settings.

    timeline.jsonl --fit--> speed of engines and updates, samples, delays of scores --+
    lengths.jsonl  --Planner's arguments--> work of each step's update ---------------+--> simulation --> steps an hour

The run is simulated twice, as recorded and with the changes. The prediction is the recorded speed times the
ratio of the two. Times of validation and checkpoints do not count. Nothing is started, and no model is read.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import zip_longest
from math import inf
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from balancing import plan_batch
from balancing.analysis.lengths_file import check_lengths, has_step, json_records, recorded_arguments
from balancing.cost_model import non_negative_least_squares
from ballast.planning.simulation import (
    EngineSpeed,
    Phase,
    SimulatedRun,
    SimulatedSample,
    SimulatedStep,
    simulate,
)
from controller.config import Config, load
from controller.config.file import value_of
from controller.engines.staleness_schedule import Staleness
from controller.lifecycle.session import exit_code
from controller.observability.run_folder import RunFolder, check_run_folder
from controller.observability.timeline import read_timeline
from controller.planning.planner import draw_mini_batches, plan_arguments
from controller.preflight.arguments import OneLineParser
from workers.errors import ConfigError, DataError

T = TypeVar("T")
REPLAYED = (
    *("rollout.max_staleness", "rollout.out_of_order_window", "rollout.replicas", "rollout.max_concurrent"),
    *(
        "rollout.placement",
        "batch.prompts_per_step",
        "batch.mini_batches",
        "batch.split_by",
        "policy.data_parallel",
    ),
    *(
        "policy.max_tokens_per_micro_batch",
        "policy.max_sequences_per_micro_batch",
        "policy.min_micro_batches",
    ),
    *("balance.algorithm", "balance.order", "balance.count_multiple"),
)
"""Settings whose effect is computed. Others change the recorded times themselves."""
ON_RANKS = ("log_probs", "update", "advantages")
"""Phases in which all ranks compute."""
FITS = 5
"""Repetitions of a fit whose terms depend on its result."""
NOT_IN_A_STEP = ("step", "update", "validation", "checkpoint", "save")
WARM_UP_SHARE = 0.1
"""Share of the first steps, at least one, that do not count."""


@dataclass(frozen=True)
class Prediction:
    """Steps an hour: recorded, simulated as recorded, simulated with the changes. before, after: simulated
    steps.
    """

    recorded: float
    simulated: float
    changed: float
    before: Sequence[SimulatedStep]
    after: Sequence[SimulatedStep]

    @property
    def steps_per_hour(self) -> float:
        return self.recorded * self.changed / self.simulated


class RecordedRun:
    """The records of a run's folder. Raises DataError if one is missing, and ConfigError."""

    def __init__(self, folder: Path) -> None:
        check_run_folder(folder)
        self.config = load(folder / "config.yaml")
        self._metrics = {row["step"]: row for row in RunFolder(folder).metrics}
        lines = json_records(folder / "lengths.jsonl", has_step, check_lengths)
        self._lengths = {record["step"]: record for _, record in lines}
        self._records = read_timeline(folder)
        self._steps = [
            record for record in self._records if record["step"] in self._lengths and record["micro_steps"]
        ]
        if not self._steps or not all(len(row) > 3 for record in self._steps for row in _samples(record)):
            raise DataError(
                f"{folder} has no step with prompts in timeline.jsonl. Record the run with this version."
            )
        self._counted = _counted(self._steps)
        self._cores = inf if self.config.uses_gpus else float(len(os.sched_getaffinity(0)))

    @property
    def prompts(self) -> int:
        return len(self._numbers)

    @property
    def steps_per_hour(self) -> float:
        return _rate([self._metrics[record["step"]]["time/step_s"] for record in self._steps])

    def simulated(self, config: Config) -> SimulatedRun:
        """Return the inputs of a simulation with these settings."""
        staleness = Staleness(
            config.batch.prompts_per_step, config.rollout.max_staleness, config.rollout.out_of_order_window
        )
        return SimulatedRun(
            staleness,
            config.engines,
            config.rollout.max_concurrent,
            [self._samples[number] for number in self._numbers],
            self._released if config.algorithm.zero_variance_groups == "replace" else frozenset(),
            self.speed,
            partial(self._phases, config),
            self._engine_cores,
            self._cores,
        )

    @cached_property
    def _samples(self) -> dict[int, list[SimulatedSample]]:
        """Samples by their prompt's number, in the order of their start."""
        samples: dict[int, list[SimulatedSample]] = {}
        for record in self._steps:
            for _, _, response, prompt, number, delay in sorted(_samples(record), key=itemgetter(0)):
                if number >= 0:
                    samples.setdefault(number, []).append(SimulatedSample(response, prompt, delay))
        return samples

    @cached_property
    def _numbers(self) -> list[int]:
        return sorted(self._samples)

    @cached_property
    def _rows(self) -> dict[int, list[dict[str, Any]]]:
        """Columns of lengths.jsonl of each sequence, by its prompt's number."""
        rows: dict[int, list[dict[str, Any]]] = {}
        for record in self._lengths.values():
            names = [name for name in ("lengths", "images", "prefix_lengths") if name in record]
            columns = [record[name] for name in ("prompts", *names)]
            for number, *values in zip(*columns, strict=True):
                rows.setdefault(number, []).append(dict(zip(names, values, strict=True)))
        return rows

    @cached_property
    def _released(self) -> frozenset[int]:
        return frozenset(place for place, number in enumerate(self._numbers) if number not in self._rows)

    # --- times

    @property
    def _engine_cores(self) -> float:
        return self.config.rollout.threads or self._cores

    @property
    def _rank_cores(self) -> float:
        ranks = self.config.training_workers
        return ranks * (self.config.policy.threads or max(1.0, self._cores // ranks))

    @cached_property
    def _clock(self) -> tuple[np.ndarray, np.ndarray]:
        """Moments, and the seconds that would have passed until then with free cores."""
        spans = [
            (*span, self._engine_cores) for rows in _by_engine(self._records).values() for span in _busy(rows)
        ]
        for record in self._records:
            spans += [
                (start, end, self._rank_cores) for name, start, end in record["phases"] if name in ON_RANKS
            ]
        moments, cores = np.array([(t, c * sign) for a, b, c in spans for t, sign in ((a, 1.0), (b, -1.0))]).T
        order = np.argsort(moments, kind="stable")
        moments = moments[order]
        busy = np.cumsum(cores[order])[:-1]
        speed = np.minimum(1.0, self._cores / np.maximum(busy, 1e-9))
        return moments, np.append(0.0, np.cumsum(np.diff(moments) * speed))

    def _seconds(self, start: float, end: float) -> float:
        """Return the seconds of work on free cores between two moments."""
        return float(np.diff(np.interp([start, end], *self._clock))[0]) if self._cores < inf else end - start

    @cached_property
    def speed(self) -> EngineSpeed:
        """Fit the speed of engines to the duration of every sample, with relative errors.

        seconds ~ tokens * (step + sample * mean batch of its steps) + prompt_token * tokens of prompts that
        began meanwhile. The mean batch follows from the speed, so the fit is repeated.
        """
        speed = EngineSpeed(1.0, 0.0, 0.0)
        engines = _by_engine(self._records)
        for _ in range(FITS):
            terms = np.concatenate([self._terms(engine, rows, speed) for engine, rows in engines.items()])
            terms = terms[terms[:, 3] > 1e-3]
            speed = EngineSpeed(*_fitted(terms[:, :3], terms[:, 3]))
        return speed

    def _terms(self, engine: str, rows: np.ndarray, speed: EngineSpeed) -> np.ndarray:
        """Return the terms of `speed` and the seconds of each sample, [samples, 4]. rows: of the timeline, by
        start.
        """
        starts = rows[:, 0]
        ends = rows[:, 1]
        tokens = np.maximum(1.0, rows[:, 2])
        moments = np.concatenate([starts, ends])
        order = np.argsort(moments, kind="stable")
        batch = np.cumsum(np.repeat([1.0, -1.0], len(rows))[order])[:-1]
        moments = moments[order]
        steps = np.diff(moments) / np.maximum(1e-9, speed.step + speed.sample * batch)
        of_engine, of_samples = (
            np.diff(np.interp(rows[:, :2], moments, np.append(0.0, np.cumsum(increments))))[:, 0]
            for increments in (steps, steps * batch)
        )
        new = np.zeros(len(rows))
        new[np.unique(rows[:, 4], return_index=True)[1]] = (
            1.0  # the prefix cache has the prompt of a group's others
        )
        read = np.append(0.0, np.cumsum(rows[:, 3] * new))
        prefill_tokens = read[np.searchsorted(starts, ends)] - read[np.searchsorted(starts, starts)]
        loads = [load for record in self._records for load in record["weights"].get(engine, ())]
        seconds = [
            self._seconds(start, end)
            - sum(max(0.0, min(end, until) - max(start, since)) for since, until, _ in loads)
            for start, end in rows[:, :2]
        ]
        return np.column_stack(
            [tokens, tokens * of_samples / np.maximum(of_engine, 1e-12), prefill_tokens, seconds]
        )

    @cached_property
    def _pause(self) -> float:
        """Mean seconds of an engine's stop for new weights."""
        loads = [load for record in self._steps for rows in record["weights"].values() for load in rows]
        return float(np.mean([end - start for start, end, _ in loads])) if loads else 0.0

    @cached_property
    def _phase_seconds(self) -> dict[str, float]:
        """Mean seconds of each phase besides `update`, and of the end of `rollout`, in which the driver
        collects.
        """
        seconds: dict[str, float] = {}
        for record in self._counted:
            for name, start, end in record["phases"]:
                if name == "rollout":
                    start = min(end, max(start, *(row[1] + row[5] for row in _samples(record))))
                if name not in NOT_IN_A_STEP:
                    seconds[name] = seconds.get(name, 0.0) + self._seconds(start, end) / len(self._counted)
        return seconds

    @cached_property
    def _update(self) -> tuple[float, float, float]:
        """Seconds of an update: of a micro-step, of a unit of planned work, and of the rest."""
        terms = []
        lasted = []
        rest = []
        for step, record in enumerate(self._counted):
            numbers = set(self._lengths[record["step"]]["prompts"])
            times = [
                [self._seconds(*row[1:3]) for row in rows if row[0] == "update"]
                for actor, rows in record["micro_steps"].items()
                if actor.startswith("policy")
            ]
            if any(times):
                terms.append(self._work(self.config, sorted(numbers), step))
                lasted.append(sum(max(of_ranks) for of_ranks in zip_longest(*times, fillvalue=0.0)))
                phase = [row for row in record["phases"] if row[0] == "update"]
                rest.append(sum(self._seconds(*row[1:]) for row in phase) - lasted[-1])
        if not terms:
            return 0.0, 0.0, 0.0
        count, work = _fitted(np.array(terms), np.array(lasted))
        return count, work, max(0.0, float(np.mean(rest)))

    def _work(self, config: Config, numbers: Sequence[int], step: int) -> tuple[float, float]:
        """Plan the update of these prompts' sequences. Returns its micro-steps and its work in the plan's
        unit.
        """
        rows = [(number, row) for number in numbers for row in self._rows.get(number, ())]
        record: Mapping[str, Any] = next(iter(self._lengths.values()))
        if not rows:
            return 0.0, 0.0
        names = rows[0][1].keys() - {"lengths"}
        groups = np.array([number for number, _ in rows])
        arguments = plan_arguments(config, "policy.update")
        arguments |= {name: [row[name] for _, row in rows] for name in names}
        arguments |= {"prefix_groups": groups} if "prefix_lengths" in names else {}
        of_groups = groups if config.split_by == "group" else None
        drawn = draw_mini_batches(len(rows), config.mini_batches, config.run.seed, step, groups=of_groups)
        costs = recorded_arguments(record)["cost_model"]
        lengths = [row["lengths"] for _, row in rows]
        plan = plan_batch(lengths, mini_batches=drawn, cost_model=costs, **arguments)
        count = sum(part.steps for part in plan.mini_batches)
        return config.batch.epochs * count, config.batch.epochs * float(plan.predicted_makespans().sum())

    def _phases(self, config: Config, groups: Sequence[int]) -> list[Phase]:
        numbers = [self._numbers[place] for place in groups]
        count, work = self._work(config, numbers, groups[0])
        micro_step, unit, rest = self._update
        update = micro_step * count + unit * work + rest
        phases = [Phase(self._phase_seconds.get(name, 0.0)) for name in ("rollout", "plan")]
        ranks = self.config.policy.data_parallel / config.policy.data_parallel
        for name in self._phase_seconds.keys() - {"rollout", "plan", "weights"}:
            of_ranks = name in ON_RANKS
            phases.append(
                Phase(
                    self._phase_seconds[name] * (ranks if of_ranks else 1.0),
                    self._rank_cores if of_ranks else 1.0,
                )
            )
        return [
            *phases,
            Phase(update, self._rank_cores),
            Phase(self._phase_seconds.get("weights", 0.0), pause=self._pause),
        ]


def _fitted(terms: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Fit by relative errors, then scale to the same sum: noise only adds time. terms: [measurements,
    factors].
    """
    factors = non_negative_least_squares(terms / seconds[:, None], np.ones(len(seconds)))
    return list((factors * seconds.sum() / max(1e-12, float((terms @ factors).sum()))).tolist())


def _samples(record: Mapping[str, Any]) -> list[list[Any]]:
    return [row for rows in record["samples"].values() for row in rows]


def _by_engine(records: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    by_engine: dict[str, list[list[float]]] = {}
    for record in records:
        for engine, rows in record["samples"].items():
            by_engine.setdefault(engine, []).extend(rows)
    return {engine: np.array(sorted(rows)) for engine, rows in by_engine.items() if rows}


def _busy(rows: np.ndarray) -> Iterator[tuple[float, float]]:
    """Join the intervals of samples, sorted by start, to those in which an engine was busy."""
    until = np.maximum.accumulate(rows[:, 1])
    first = np.flatnonzero(np.append(True, rows[1:, 0] > until[:-1]))
    yield from zip(rows[first, 0], until[np.append(first[1:], len(rows)) - 1], strict=True)


def _counted(steps: Sequence[T]) -> Sequence[T]:
    return steps[max(1, round(WARM_UP_SHARE * len(steps))) :] or steps


def _rate(seconds: Sequence[float]) -> float:
    return 3600.0 / float(np.mean(_counted(seconds)))


def predict(folder: Path, overrides: Sequence[str]) -> Prediction:
    """Simulate a run as it was recorded, and with overrides. Raises ConfigError and DataError."""
    run = RecordedRun(folder)
    changed = load(folder / "config.yaml", overrides)
    for override in overrides:
        key = override.partition("=")[0]
        if key not in REPLAYED and value_of(changed, key) != value_of(run.config, key):
            raise ConfigError(f"{override}: changes the recorded times. whatif takes {', '.join(REPLAYED)}.")
    try:
        recorded = run.steps_per_hour
        recorded_steps, changed_steps = (simulate(run.simulated(config)) for config in (run.config, changed))
    except (ArithmeticError, LookupError, TypeError, ValueError):
        raise DataError(f"{folder}: timeline.jsonl or lengths.jsonl is damaged. Take another run.") from None
    if not recorded_steps or not changed_steps:
        wanted = max(run.config.batch.prompts_per_step, changed.batch.prompts_per_step)
        raise ConfigError(
            f"batch.prompts_per_step={wanted}: {folder} has {run.prompts} recorded prompts, too few. Lower "
            "it."
        )
    simulated, expected = (
        _rate([step.seconds for step in steps]) for steps in (recorded_steps, changed_steps)
    )
    return Prediction(recorded, simulated, expected, recorded_steps, changed_steps)


def table(prediction: Prediction) -> list[str]:
    """Write the prediction in lines of at most 80 characters."""
    columns = (prediction.before, prediction.after)
    waited = [sum(s.waited for s in steps) / sum(s.seconds for s in steps) for steps in columns]
    idle = [
        sum(s.engines_idle * s.seconds for s in steps) / sum(s.seconds for s in steps) for steps in columns
    ]
    ages = [[age for step in steps for age in step.ages] for steps in columns]
    row = "{:<26}{:>12}{:>12}{:>12}".format
    rates = (prediction.recorded, prediction.simulated, prediction.changed)
    gain = prediction.changed / prediction.simulated
    error = prediction.simulated / prediction.recorded - 1.0
    return [
        row("", "recorded", "simulated", "changed"),
        row("steps an hour", *(f"{rate:,.1f}" for rate in rates)),
        row("seconds a step", *(f"{3600 / rate:,.2f}" for rate in rates)),
        row("trainer waits", "", *(f"{share:.0%}" for share in waited)),
        row("engines idle", "", *(f"{share:.0%}" for share in idle)),
        row("age of groups, mean", "", *(f"{np.mean(group_ages):.1f}" for group_ages in ages)),
        row("age of groups, largest", "", *(f"{max(group_ages)}" for group_ages in ages)),
        f"predicted: {prediction.steps_per_hour:,.1f} steps an hour, {gain:.2f} times the recorded",
        f"error of the simulation, with the recorded settings: {error:+.1%}",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_code(partial(_whatif, arguments))


def _whatif(arguments: Sequence[str] | None) -> None:
    parser = OneLineParser(
        prog="python -m ballast whatif", description="A recorded run under other settings."
    )
    parser.add_argument("folder", type=Path, metavar="runs/NAME", help="folder of the run")
    parser.add_argument(
        "overrides", nargs="*", metavar="key.sub=value", help=f"changes: {', '.join(REPLAYED)}"
    )
    parsed = parser.parse_args(arguments)
    print("\n".join(table(predict(parsed.folder, parsed.overrides))))


if __name__ == "__main__":
    sys.exit(main())
