"""What the schedule is compared with: whole steps in order, and greedy with discards."""

from dataclasses import dataclass, field

from tests.benchmarks.schedule.simulator import Workload


@dataclass
class WholeSteps:
    """Each step trains on the groups that were admitted for it. ahead: steps generated before the weights they belong
    to are there: 0 is synchronous, 1 an overlap of generation with training."""

    workload: Workload
    ahead: int
    _admitted: int = 0
    _published: int = 0
    _taken: int = 0
    _finished: set[int] = field(default_factory=set)

    def admit(self) -> list[int]:
        """The steps up to `ahead` after the current one."""
        end = min(self.workload.groups, (self._published + 1 + self.ahead) * self.workload.prompts_per_step)
        new = list(range(self._admitted, end))
        self._admitted = end
        return new

    def finished(self, group: int) -> None:
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

    def published(self) -> None:
        """The engines have new weights."""
        self._published += 1


@dataclass
class GreedyWithDiscards:
    """A step trains on the first groups that are finished; those older than `eta` versions are discarded, finished or
    not. capacity: groups in generation, finished or in training."""

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

    def finished(self, group: int) -> None:
        """All samples of the group are there."""
        self._finished.add(group)

    def take(self) -> list[int]:
        """The oldest finished groups; the run's last step may have fewer."""
        size = self.workload.prompts_per_step
        is_last = self._next == self.workload.groups and len(self._finished) == len(self._admitted_at)
        if len(self._finished) < size and not is_last:
            return []
        self._training = sorted(self._finished)[:size]
        self._finished.difference_update(self._training)
        for group in self._training:
            del self._admitted_at[group]
        return self._training

    def published(self) -> list[int]:
        """The engines have new weights; returns the groups that are too old."""
        self._version += 1
        self._training = []
        stale = [group for group, version in self._admitted_at.items() if self._version - version > self.eta]
        self._finished.difference_update(stale)
        for group in stale:
            del self._admitted_at[group]
        return stale
