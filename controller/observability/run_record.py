"""RunRecord: receives a run's events, and passes them to terminal, files, trackers and Prometheus.

with record.phase("update"):   terminal, Prometheus, timeline.jsonl, and the seconds in `time/update_s`
record.add(metrics)            metrics of the step
record.samples(rollout, ...)    Prometheus, completions on the terminal
record.trains_on(batch)        samples.jsonl
record.plans(plans, ...)       lengths.jsonl, `balance/`
record.add_failures(kind, ...) once a step: terminal, failures.jsonl
record.micro_steps(times)      timeline.jsonl, Prometheus
record.end_step(step, ...)     trackers, terminal
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from balancing import CostModel, Plan, plan_statistics
from balancing.analysis.lengths_file import plan_record
from controller.observability.console import Console
from controller.observability.failures import FailureCounts
from controller.observability.health import Health
from controller.observability.live_metrics import LiveMetrics
from controller.observability.run_folder import RunWriter
from controller.observability.timeline import TimelineRecorder
from workers.batch.remote_batch import RemoteBatch

if TYPE_CHECKING:
    from workers.model.timing import MicroStepTime

RECORDED_SAMPLES = 4  # number of each kind: first, slowest, longest


class Samples(Protocol):
    """The recorded part of `controller.rollout.samples.RolloutBatch`."""

    @property
    def batch(self) -> RemoteBatch: ...

    def without_tokens(self) -> "Samples": ...

    def examples(
        self, count: int, texts_of: Callable[[str], dict[str, str]], characters: int = ...
    ) -> list[dict[str, Any]]: ...


class RunRecord:
    """Reports to several places. `console`, `writer` and `timeline` are single ones.

    samples: whether engines sample from the policy while it learns. metrics: of the step. seconds: by
    finished phase of the step. rollout, trained: the step's samples, and the trained ones, without tokens.
    shows_all: whether `all_samples` will be called.
    """

    def __init__(
        self,
        console: Console,
        live: LiveMetrics,
        writer: RunWriter,
        *,
        samples: bool = True,
    ) -> None:
        self.console = console
        self.live = live
        self.writer = writer
        self.timeline = TimelineRecorder()
        self._health = Health(samples=samples)
        self._step, self._planned, self._unwritten = 0, False, False
        self._in_step = False
        self._failures = FailureCounts()
        self.metrics: dict[str, float] = {}
        self.seconds: dict[str, float] = {}
        self.rollout: Samples | None = None
        self.shows_all = False
        self.trained = RemoteBatch({}, {})

    @contextmanager
    def step(self, step: int, steps: int) -> Iterator[None]:
        """Record the block as step `step` of `steps`."""
        self.metrics = {}
        self.seconds = {}
        self.rollout = None
        self._step = step
        self._planned = False
        self._unwritten = False
        self._in_step = True
        self.console.begin_step(step, steps)
        try:
            with self.phase("step"):
                yield
        finally:
            self._in_step = False
            self._write_failures()
            self._write_examples()

    def add_failures(self, kind: str, failures: Iterable[str]) -> None:
        """Count drops, retries or failures, each a text of its place and cause, shown at the end of the step.

        Outside of a step, such as in a first validation, they are shown at once.
        """
        self._failures.add(kind, failures)
        if not self._in_step:
            self._write_failures()

    def _write_failures(self) -> None:
        for failures in self._failures.take():
            self.console.log(f"step {self._step}: {failures}")
            self.writer.failures(self._step, failures.kind, failures.count, failures.first)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as phase `name`, even if it raises. Phases nest."""
        start = time.perf_counter()
        try:
            with self.live.phase(name), self.console.phase(name):
                yield
        finally:
            end = time.perf_counter()
            self.timeline.phase(name, start, end)
            self.seconds[name] = self.seconds.get(name, 0.0) + end - start

    def times(self) -> dict[str, float]:
        """Return `seconds` under their metric names."""
        return {f"time/{name}_s": seconds for name, seconds in self.seconds.items()}

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add metrics of the step. The last value of a name counts."""
        self.metrics |= metrics

    def samples(
        self,
        rollout: Samples,
        trained: RemoteBatch,
        texts_of: Callable[[str], dict[str, str]],
    ) -> None:
        """Record a step's samples, some in samples.jsonl once their advantages are known. texts_of: texts of
        a prompt.
        """
        self.live.samples(rollout.batch)
        self.rollout = rollout.without_tokens()
        self._asked = texts_of
        self._unwritten = True
        self.trained = trained.light

    def trains_on(self, batch: RemoteBatch) -> None:
        """Record the light columns of the trained samples, with advantages."""
        self.trained = batch.light
        self._write_examples()

    def _write_examples(self) -> None:
        if self._unwritten:
            self._unwritten = False
            self.writer.samples(self._step, self._examples(RECORDED_SAMPLES))

    def _examples(self, count: int, *limit: int) -> list[dict[str, Any]]:
        """Return `RolloutBatch.examples` with advantages, None for a sample that is not trained."""
        rows = (
            []
            if self.rollout is None
            else self.rollout.examples(count, self._asked, *limit)
        )
        earned = advantages_of(self.trained)
        default = {"advantage": None} if earned else {}
        return [row | earned.get((row["uid"], row["sample"]), default) for row in rows]

    def completions(self, count: int) -> None:
        """Show the step's first `count` samples, with rewards and advantages."""
        self.console.completions(self._examples(count, sys.maxsize)[:count])

    def all_samples(self) -> list[dict[str, Any]]:
        """Return all samples of the step with full texts."""
        return self._examples(sys.maxsize, sys.maxsize)

    def plans(
        self, plans: Sequence[Plan], width: int | None = None, **columns: np.ndarray
    ) -> None:
        """Record the plans of a step's updates, one per epoch. Only the first call in a step counts.

        width: tokens of the longest possible sequence. columns: see `RunWriter.lengths`.
        """
        if self._planned:
            return
        self._planned = True
        self.writer.lengths(self._step, plan_record(plans[0]), **columns)
        summaries = [plan_statistics(plan, width) for plan in plans]
        for name in summaries[0]:
            self.add(
                {
                    f"balance/{name}": statistics.fmean(
                        summary[name] for summary in summaries
                    )
                }
            )

    def micro_steps(
        self, times: Mapping[str, Sequence["MicroStepTime"]], cost_model: CostModel
    ) -> None:
        """Record a step's micro-steps by actor, with the cost model of their plan."""
        self.timeline.micro_steps(times, cost_model)
        self.live.micro_steps(times, cost_model)

    def end_step(self, step: int, steps: int) -> None:
        """Write a step's metrics, then show them."""
        self._add_skipped_steps()
        self.writer.step(step, self.metrics)
        self.console.step(step, steps, self.metrics)
        for warning in self._health.see(step, self.metrics).values():
            self.console.log(warning)

    def _add_skipped_steps(self) -> None:
        for name, count in self.metrics.items():
            role, _, metric = name.partition("/")
            if metric == "skipped_steps":
                kind = f"optimiser steps skipped ({role}.optimizer.max_skipped_steps)"
                self.add_failures(
                    kind, ["loss or gradient is NaN or infinite"] * round(count)
                )

    def write_timeline(self, step: int) -> None:
        """Write the events since the last call as the timeline of `step`."""
        self.writer.timeline(step, self.timeline.take())


def advantages_of(batch: RemoteBatch) -> dict[tuple[str, int], dict[str, Any]]:
    """Return `advantage` of each sample, or `advantages` of its turns. Empty if they are per token."""
    keys = (
        list(zip(batch["uid"].tolist(), batch["sample"].tolist(), strict=True))
        if len(batch)
        else []
    )
    if "by_turn" in batch.columns:
        by_sample: dict[tuple[str, int], dict[str, Any]] = {
            key: {"advantages": []} for key in keys
        }
        for key, turns in zip(keys, batch["by_turn"], strict=True):
            by_sample[key]["advantages"] += [advantage for _, advantage in turns]
        return by_sample
    values = batch["advantages"].tolist() if "advantages" in batch.columns else []
    return {key: {"advantage": value} for key, value in zip(keys, values, strict=False)}
