"""Simulate a run's schedule: engines that decode, rewards that arrive, and a trainer, on a clock that only
computes.

    StalenessSchedule.admit --> Router --> engines --delay of the score--> finished --take--> phases of a step
            ^                                                                                      |
            '----------------------------- weights_updated <---------------------------------------'

The schedule and the router are the run's own classes. An engine makes a step, one token for each of its n
samples, in `step + sample * n` seconds. A new prompt stops it for `prompt_token` seconds a token. On a CPU,
engines and ranks share the cores: if more are busy than there are, all slow down alike.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from controller.engines.router import Router
from controller.engines.staleness_schedule import GroupState, Staleness, StalenessSchedule
from workers.engine.requests import SampleRequest, SampleResult


@dataclass(frozen=True)
class SimulatedSample:
    """Tokens of a response and of its prompt, and seconds from its end to its score."""

    response: int
    prompt: int
    delay: float


@dataclass(frozen=True)
class EngineSpeed:
    """Seconds of a step of an engine, of each sample in it, and of a prompt's token."""

    step: float
    sample: float
    prompt_token: float


@dataclass(frozen=True)
class Phase:
    """Seconds of a step's phase on free cores, and the cores that it keeps busy. pause: seconds that engines
    stop.
    """

    seconds: float
    cores: float = 1.0
    pause: float = 0.0


@dataclass(frozen=True)
class SimulatedRun:
    """Inputs of a simulation.

    groups: samples by number. released: groups without signal, which others replace. phases: of a step, from
    the numbers of its groups. engine_cores: that a busy engine uses. cores: that all share, infinite on GPUs.
    """

    staleness: Staleness
    engines: int
    max_concurrent: int
    groups: Sequence[Sequence[SimulatedSample]]
    released: frozenset[int]
    speed: EngineSpeed
    phases: Callable[[Sequence[int]], Sequence[Phase]]
    engine_cores: float = 1.0
    cores: float = inf

    @property
    def steps(self) -> int:
        return (len(self.groups) - len(self.released)) // self.staleness.prompts_per_step


@dataclass(frozen=True)
class SimulatedStep:
    """waited: seconds of the trainer, of all `seconds`. engines_idle: share of the engines' time. ages: of
    groups.
    """

    seconds: float
    waited: float
    engines_idle: float
    ages: tuple[int, ...]


class _Engine:
    """steps: made so far. stopped: seconds until the next. running: (step of its end, sample)."""

    def __init__(self, speed: EngineSpeed) -> None:
        self._speed = speed
        self.steps = 0.0
        self.stopped = 0.0
        self.running: list[tuple[float, tuple[int, int]]] = []
        self._prompts: set[int] = set()

    def begin(self, key: tuple[int, int], sample: SimulatedSample) -> None:
        if key[0] not in self._prompts:  # the prefix cache has the prompt of the group's others
            self._prompts.add(key[0])
            self.stopped += self._speed.prompt_token * sample.prompt
        heapq.heappush(self.running, (self.steps + max(1, sample.response), key))

    @property
    def _seconds(self) -> float:
        return self._speed.step + self._speed.sample * len(self.running)

    @property
    def next_end(self) -> float:
        return self.stopped + (self.running[0][0] - self.steps) * self._seconds if self.running else inf

    def advance(self, seconds: float) -> Iterator[tuple[int, int]]:
        """Decode, at most until the next end. Yields the samples that end."""
        stopped = min(self.stopped, seconds)
        self.stopped -= stopped
        if self.running and self._seconds:
            self.steps += (seconds - stopped) / self._seconds
        while self.running and self.running[0][0] <= self.steps + 1e-6:
            yield heapq.heappop(self.running)[1]


class _Simulation:
    def __init__(self, run: SimulatedRun) -> None:
        self._run = run
        self._now = 0.0
        self._version = 0
        self._schedule = StalenessSchedule(run.staleness, run.steps)
        self._router = Router(run.engines, run.max_concurrent, max_retries=0)
        self._engines = [_Engine(run.speed) for _ in range(run.engines)]
        self._scored: list[tuple[float, int]] = []  # (when, group)
        self._left = [len(group) for group in run.groups]
        self._admitted: dict[int, int] = {}  # version of the weights
        self._idle = 0.0

    def steps(self) -> Iterator[SimulatedStep]:
        self._admit()
        for _ in range(self._run.steps):
            began = self._now
            self._idle = 0.0
            while not (groups := self._schedule.take()):
                self._wait(inf, 0.0)
            ready = self._now
            for phase in self._run.phases(groups):
                self._train(phase)
            ages = tuple(self._version - self._admitted[group] for group in groups)
            self._version += 1
            self._schedule.weights_updated()
            self._admit()
            seconds = self._now - began
            idle = self._idle / (seconds * len(self._engines)) if seconds else 0.0
            yield SimulatedStep(seconds, ready - began, idle, ages)

    def _train(self, phase: Phase) -> None:
        for engine in self._engines:
            engine.stopped += phase.pause
        remaining_seconds = phase.seconds
        while remaining_seconds > 1e-9:
            remaining_seconds -= self._wait(remaining_seconds, phase.cores)

    def _wait(self, most: float, cores: float) -> float:
        """Let time pass until the next event. Returns the seconds of work that a phase with `most` left has
        made.
        """
        busy = cores + self._run.engine_cores * sum(bool(engine.running) for engine in self._engines)
        speed = min(1.0, self._run.cores / busy) if busy else 1.0
        work = min(most, *(engine.next_end for engine in self._engines))
        seconds = work / speed
        if self._scored:
            seconds = max(0.0, min(seconds, self._scored[0][0] - self._now))
        self._now += seconds
        self._idle += seconds * sum(not engine.running for engine in self._engines)
        for replica, engine in enumerate(self._engines):
            for key in engine.advance(seconds * speed):
                self._ended(replica, *key)
        while self._scored and self._scored[0][0] <= self._now + 1e-9:
            self._arrived(heapq.heappop(self._scored)[1])
        self._assign()
        return seconds * speed

    def _ended(self, replica: int, group: int, sample: int) -> None:
        self._router.finished(replica, SampleResult(f"{group}", sample, 0, 0, "stop", self._version))
        heapq.heappush(self._scored, (self._now + self._run.groups[group][sample].delay, group))

    def _arrived(self, group: int) -> None:
        self._left[group] -= 1
        if self._left[group]:
            return
        if group not in self._run.released:
            self._schedule.finished(group)
        running = self._schedule.in_state(GroupState.RUNNING)
        done = [number for number in running if not self._left[number]]
        if self._run.staleness.max_staleness or len(done) == len(
            running
        ):  # else a round is replaced as a whole
            for number in done:
                self._schedule.released(number)
            self._admit()

    def _admit(self) -> None:
        for group in self._schedule.admit():
            self._admitted[group] = self._version
            prompt = np.broadcast_to(
                np.int32(0), self._run.groups[group][0].prompt
            )  # the router reads its length
            self._router.submit(
                SampleRequest(f"{group}", sample, prompt, 0, priority=group)
                for sample in range(len(self._run.groups[group]))
            )
        self._assign()

    def _assign(self) -> None:
        for replica, requests in self._router.assign(range(len(self._engines))).items():
            for request in requests:
                group = int(request.uid)
                self._engines[replica].begin((group, request.sample), self._run.groups[group][request.sample])


def simulate(run: SimulatedRun) -> list[SimulatedStep]:
    """Simulate all steps for which there are groups."""
    return list(_Simulation(run).steps())
