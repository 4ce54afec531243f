"""A run as events: engines that decode, a trainer, and a policy that says what is generated and what is
trained on.

    admit -> waiting -> decoding on an engine -> group finished -> take -> training -> update -> published

An engine decodes a token of each of its samples in a + c * samples seconds. During an update of the weights
engines and trainer wait; what is half decoded goes on afterwards. With `drains`, an update waits until no
engine has anything left.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class Workload:
    """What is sampled and trained, and how fast. slots: samples that an engine decodes at once. a, c: see
    above.
    """

    steps: int = 100
    prompts_per_step: int = 32
    samples: int = 8
    median_length: int = 1500
    sigma: float = 1.0
    longest: int = 16_384
    engines: int = 4
    slots: int = 64
    a: float = 0.012
    c: float = 0.00012
    train_tokens_per_second: float = 14_000.0
    update_seconds: float = 1.0

    @property
    def groups(self) -> int:
        """Prompts of the whole run."""
        return self.steps * self.prompts_per_step

    def lengths(self, seed: int) -> np.ndarray:
        """Tokens of each response, [groups, samples]: those of a prompt are the same under every policy."""
        drawn = np.random.default_rng(seed).lognormal(
            np.log(self.median_length), self.sigma, (self.groups, self.samples)
        )
        return np.clip(drawn, 16, self.longest).astype(int)


class Policy(Protocol):
    """As `StalenessSchedule` is. weights_updated: may return groups that it discards."""

    def admit(self) -> list[int]: ...
    def finish(self, group: int) -> None: ...
    def take(self) -> list[int]: ...
    def weights_updated(self) -> Iterable[int] | None: ...


class Engines:
    """All engines and what waits for them. A sample is (end, group): it is complete when its engine has
    decoded `end` tokens for each of its samples.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._decoded = [0.0] * workload.engines
        # Heaps.
        self._samples: list[list[tuple[float, int]]] = [[] for _ in range(workload.engines)]
        self._waiting: deque[tuple[int, int]] = deque()

    def submit(self, group: int, lengths: Iterable[int]) -> None:
        """Responses to sample; each goes to the engine that has fewest, and waits while all are full."""
        self._waiting.extend((group, int(length)) for length in lengths)
        self._fill()

    def _fill(self) -> None:
        while self._waiting:
            engine = min(
                range(len(self._samples)), key=lambda engine: len(self._samples[engine])
            )
            if len(self._samples[engine]) == self._workload.slots:
                return
            group, length = self._waiting.popleft()
            heapq.heappush(self._samples[engine], (self._decoded[engine] + length, group))

    @property
    def decoding(self) -> int:
        """Responses that are decoded now."""
        return sum(map(len, self._samples))

    def _seconds_a_token(self, engine: int) -> float:
        return self._workload.a + self._workload.c * len(self._samples[engine])

    @property
    def next_end(self) -> float:
        """Seconds until a response is complete."""
        return min(
            (
                (heap[0][0] - self._decoded[i]) * self._seconds_a_token(i)
                for i, heap in enumerate(self._samples)
                if heap
            ),
            default=inf,
        )

    def decode(self, seconds: float) -> list[int]:
        """Decode for so long, at most until the next end; returns the groups of the completed responses."""
        ended = []
        for engine, heap in enumerate(self._samples):
            self._decoded[engine] += seconds / self._seconds_a_token(engine)
            while heap and heap[0][0] <= self._decoded[engine] + 1e-6:
                ended.append(heapq.heappop(heap)[1])
        self._fill()
        return ended

    def discard(self, group: int) -> float:
        """Stop the responses of a group; returns the tokens that they lack."""
        lacking = float(
            sum(length for waiting, length in self._waiting if waiting == group)
        )
        self._waiting = deque(waiting for waiting in self._waiting if waiting[0] != group)
        for engine, heap in enumerate(self._samples):
            lacking += sum(
                end - self._decoded[engine] for end, other in heap if other == group
            )
            self._samples[engine] = [sample for sample in heap if sample[1] != group]
            heapq.heapify(self._samples[engine])
        self._fill()
        return lacking


@dataclass(frozen=True)
class Step:
    """A step: when it was trained, on which groups, and their ages."""

    start: float
    end: float
    groups: list[int]
    ages: list[int]


@dataclass
class Record:
    """What happened in a run. lengths: [groups, samples]. decoding: the time and the samples that engines had
    from then on. discarded: groups, with the tokens that were decoded of them.
    """

    workload: Workload
    lengths: np.ndarray
    steps: list[Step] = field(default_factory=list)
    discarded: dict[int, float] = field(default_factory=dict)
    decoding: list[tuple[float, int]] = field(default_factory=list)

    def tokens(self, groups: Sequence[int]) -> int:
        """Tokens of all responses of the groups."""
        return int(self.lengths[list(groups)].sum())


class Simulation:
    """One run under a policy."""

    def __init__(
        self, policy: Policy, workload: Workload, seed: int, *, drains: bool = False
    ) -> None:
        self._policy, self._workload, self._drains = policy, workload, drains
        self._engines = Engines(workload)
        self._record = Record(workload, workload.lengths(seed))
        self._left = dict.fromkeys(range(workload.groups), workload.samples)
        self._admitted_at: dict[int, int] = {}
        self._now, self._version, self._trained_at, self._to_publish = 0.0, 0, inf, False

    def run(self) -> Record:
        """Until nothing is left to do."""
        while self._to_the_next_event():
            pass
        return self._record

    def _to_the_next_event(self) -> bool:
        self._admit()
        self._train()
        self._record.decoding.append((self._now, self._engines.decoding))
        if self._to_publish and not (self._drains and self._engines.decoding):
            self._publish()
            return True
        until = min(self._now + self._engines.next_end, self._trained_at)
        if until == inf:
            return False
        self._decode(until)
        if until == self._trained_at:
            self._trained_at, self._to_publish = inf, True
        return True

    def _admit(self) -> None:
        for group in self._policy.admit():
            self._admitted_at[group] = self._version
            self._engines.submit(group, self._record.lengths[group])

    def _train(self) -> None:
        """Begin a step, if the trainer is free and there is one."""
        if (
            self._trained_at < inf
            or self._to_publish
            or not (groups := self._policy.take())
        ):
            return
        self._trained_at = (
            self._now + self._record.tokens(groups) / self._workload.train_tokens_per_second
        )
        ages = [self._version - self._admitted_at[group] for group in groups]
        self._record.steps.append(Step(self._now, self._trained_at, groups, ages))

    def _decode(self, until: float) -> None:
        for group in self._engines.decode(until - self._now):
            self._left[group] -= 1
            if not self._left[group]:
                self._policy.finish(group)
        self._now = until

    def _publish(self) -> None:
        self._now += self._workload.update_seconds
        self._version, self._to_publish = self._version + 1, False
        for group in self._policy.weights_updated() or ():
            self._record.discarded[group] = self._record.tokens(
                [group]
            ) - self._engines.discard(group)
