"""The schedules that are compared, ours among them, and what is measured of a run."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from statistics import fmean, median
from typing import ClassVar

import numpy as np

from controller.engines.staleness_schedule import Staleness, StalenessSchedule
from tests.benchmarks.schedule.simulator import Policy, Record, Simulation, Workload

SYNCHRONOUS = "synchronous"
ONE_GROUP = 1e-9  # a window of one group


@dataclass
class WholeSteps:
    """Each step trains on the groups that were admitted for it. ahead: steps generated before the weights
    they belong to are there: 0 is synchronous, 1 an overlap of generation with training.
    """

    workload: Workload
    ahead: int
    _admitted: int = 0
    _published: int = 0
    _taken: int = 0
    _finished: set[int] = field(default_factory=set)

    def admit(self) -> list[int]:
        """The steps up to `ahead` after the current one."""
        end = min(
            self.workload.groups,
            (self._published + 1 + self.ahead) * self.workload.prompts_per_step,
        )
        new = list(range(self._admitted, end))
        self._admitted = end
        return new

    def finish(self, group: int) -> None:
        """All samples of the group are there."""
        self._finished.add(group)

    def take(self) -> list[int]:
        """The next step, once it is whole."""
        size = self.workload.prompts_per_step
        groups = list(range(self._taken * size, (self._taken + 1) * size))
        if not self._finished.issuperset(groups):
            return []
        self._taken += 1
        return groups

    def weights_updated(self) -> None:
        """The engines have new weights."""
        self._published += 1


@dataclass
class GreedyWithDiscards:
    """A step trains on the first groups that are finished; those older than `eta` versions are discarded,
    finished or not. capacity: groups in generation, finished or in training.
    """

    workload: Workload
    capacity: int
    eta: int
    _version: int = 0
    _next: int = 0
    _admitted_at: dict[int, int] = field(default_factory=dict)
    _finished: set[int] = field(default_factory=set)
    _training: list[int] = field(default_factory=list)

    def admit(self) -> list[int]:
        """As many as there is room for."""
        room = self.capacity - len(self._admitted_at) - len(self._training)
        new = list(range(self._next, min(self.workload.groups, self._next + room)))
        self._next += len(new)
        self._admitted_at |= dict.fromkeys(new, self._version)
        return new

    def finish(self, group: int) -> None:
        """All samples of the group are there."""
        self._finished.add(group)

    def take(self) -> list[int]:
        """The oldest finished groups; the run's last step may have fewer."""
        size = self.workload.prompts_per_step
        is_last = self._next == self.workload.groups and len(self._finished) == len(
            self._admitted_at
        )
        if len(self._finished) < size and not is_last:
            return []
        self._training = sorted(self._finished)[:size]
        self._finished.difference_update(self._training)
        for group in self._training:
            del self._admitted_at[group]
        return self._training

    def weights_updated(self) -> list[int]:
        """The engines have new weights; returns the groups that are too old."""
        self._version += 1
        self._training = []
        stale = [
            group
            for group, version in self._admitted_at.items()
            if self._version - version > self.eta
        ]
        self._finished.difference_update(stale)
        for group in stale:
            del self._admitted_at[group]
        return stale


@dataclass(frozen=True)
class Row:
    """A schedule. bound: the largest age that it allows. drains: whether engines are empty before
    an update.
    """

    name: str
    policy: Callable[[], Policy]
    bound: int
    drains: bool = False

    def run(self, workload: Workload, seed: int) -> Record:
        """One run under it."""
        return Simulation(self.policy(), workload, seed, drains=self.drains).run()


def windowed(workload: Workload, staleness: int, window: float, name: str = "") -> Row:
    """Our schedule."""
    settings = Staleness(workload.prompts_per_step, staleness, window)
    name = name or f"**ours, S = {staleness}, f = {window}**"
    return Row(name, lambda: StalenessSchedule(settings, workload.steps), settings.max_age)


def greedy(workload: Workload, staleness: int, eta: int) -> Row:
    """The same number of active groups, and no order."""
    capacity = (staleness + 1) * workload.prompts_per_step
    name = f"greedy, discards above {eta}, S = {staleness}"
    return Row(name, lambda: GreedyWithDiscards(workload, capacity, eta), eta)


def compared(workload: Workload) -> list[Row]:
    """All that are compared, the synchronous one first."""
    return [
        Row(SYNCHRONOUS, lambda: WholeSteps(workload, ahead=0), 0),
        Row(
            "one step ahead, drained", lambda: WholeSteps(workload, ahead=1), 1, drains=True
        ),
        windowed(workload, 1, ONE_GROUP, "in order, S = 1"),
        windowed(workload, 2, ONE_GROUP, "in order, S = 2"),
        greedy(workload, 2, 1),
        greedy(workload, 2, 2),
        windowed(workload, 1, 0.3),
        windowed(workload, 2, 0.3),
        windowed(workload, 3, 0.3),
    ]


@dataclass(frozen=True)
class Result:
    """Numbers of a run. mean_length, long_length: of all trained groups over all prompts. steady_length: of
    those trained in the steady part, over its prompts. discarded, wasted: shares of groups and of decoded
    tokens.
    """

    SKIPPED: ClassVar[int] = 10  # steps at either end that are not the steady part

    samples_per_second: float
    tokens_per_second: float
    trainer_busy: float
    mean_length: float
    steady_length: float
    long_length: float
    mean_age: float
    oldest: int
    discarded: float
    wasted: float


def result(record: Record) -> Result:
    """The numbers of one run."""
    before, steady, after = parts(record)
    seconds = steady[-1].end - before[-1].end
    groups = [group for step in steady for group in step.groups]
    trained = [group for step in record.steps for group in step.groups]
    prompts = range(min(steady[0].groups), min(after[0].groups))
    ages = [age for step in record.steps for age in step.ages]
    wasted = sum(record.discarded.values())
    return Result(
        samples_per_second=len(groups) * record.workload.samples / seconds,
        tokens_per_second=record.tokens(groups) / seconds,
        trainer_busy=sum(step.end - step.start for step in steady) / seconds,
        mean_length=_mean(record, trained) / float(record.lengths.mean()),
        steady_length=_mean(record, groups) / _mean(record, prompts),
        long_length=float(
            np.percentile(record.lengths[trained], 99) / np.percentile(record.lengths, 99)
        ),
        mean_age=fmean(ages),
        oldest=max(ages),
        discarded=len(record.discarded) / len(record.lengths),
        wasted=wasted / (wasted + record.tokens(trained)),
    )


def parts(record: Record) -> tuple[list, list, list]:
    """The steps before, in and after the steady part."""
    skipped = Result.SKIPPED
    return record.steps[:skipped], record.steps[skipped:-skipped], record.steps[-skipped:]


def _mean(record: Record, groups: range | list[int]) -> float:
    return float(record.lengths[list(groups)].mean())


def measured(row: Row, workload: Workload, seeds: range) -> Result:
    """Medians over runs; the oldest is that of all."""
    results = [result(row.run(workload, seed)) for seed in seeds]
    medians = {
        field.name: median(getattr(one, field.name) for one in results)
        for field in fields(Result)
    }
    return Result(**{**medians, "oldest": max(one.oldest for one in results)})
