"""Schedule: which groups are generated ahead, and which of the finished ones a step trains on.

    admit --> running --finished--> ready --take--> training --published--> gone
                 |        window: the W groups from the oldest that is not yet taken
                 '--released--> gone (no signal: another is admitted in its place)

A group is one prompt with all its samples. Groups have numbers in the order of the prompts: 0, 1, ... With P groups a
step and a target staleness S, at most B = (S + 1) P groups are active: admitted, and not yet released or trained with
the new weights published. A step takes P ready groups, the oldest first, each from the window of W = max(1, floor(f B))
numbers that begins at the oldest group not yet taken: a younger group may pass a slow one only within the window
(windowed FIFO; MiniMax, Forge, arXiv 2605.26494, section 6.2.4).

Invariants: every group is admitted once, and taken once or released; none is dropped for its age; the age of a group
when it is taken, in versions of the weights since its admission, is at most `max_age` = S + ceil((W - 1) / P), and 0
where S is 0; while steps are left and no P groups can be taken, one is running or can be admitted, or a step that was
taken has yet to be published.

Why the age is bounded: when a group is admitted at most B - 1 others are active, and at most W - 1 younger ones are
taken before it. So at most floor((B + W - 2) / P) = S + ceil((W - 1) / P) whole steps are taken between its admission
and its own step. Active must mean "not yet published": if a slot were free as soon as its group is trained on, the
bound would be one more.

Decides only; no I/O, no Ray, no clock.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from math import ceil, floor


class GroupState(Enum):
    """State of an active group."""

    RUNNING = "its samples are generated or scored"
    READY = "all its samples are there"
    TRAINING = "a step has taken it; the new weights are not yet published"


@dataclass(frozen=True)
class Staleness:
    """The settings of a schedule. prompts_per_step: P. max_staleness: S. window: f, in (0, 1]."""

    prompts_per_step: int
    max_staleness: int
    window: float

    @property
    def capacity(self) -> int:
        """B, the largest number of active groups."""
        return (self.max_staleness + 1) * self.prompts_per_step

    @property
    def window_groups(self) -> int:
        """W, the number of groups in the window."""
        return max(1, floor(self.window * self.capacity))

    @property
    def max_age(self) -> int:
        """The largest age at which a group is taken, in versions of the weights."""
        if self.max_staleness == 0:
            return 0  # a step takes every active group: no younger one goes first
        return self.max_staleness + ceil((self.window_groups - 1) / self.prompts_per_step)


class Schedule:
    """State of the groups of a run. An event that is impossible in a group's state raises ValueError."""

    def __init__(self, settings: Staleness, steps: int, *, admitted: int = 0, active: Iterable[int] = ()) -> None:
        """steps: those left to make; no group is admitted that none of them would take. admitted: the number of the
        next group. active: groups that are running, where a run resumes."""
        self.settings = settings
        self.admitted = admitted
        self._states = dict.fromkeys(sorted(active), GroupState.RUNNING)
        self._to_take = steps * settings.prompts_per_step
        self._unpublished: deque[list[int]] = deque()

    def state(self, group: int) -> GroupState | None:
        """State of the group; None if it is not active."""
        return self._states.get(group)

    def in_state(self, *states: GroupState) -> list[int]:
        """Active groups in one of the states, oldest first."""
        return [group for group, state in self._states.items() if state in states]

    def admit(self) -> list[int]:
        """The numbers of the groups to generate now: as many as there is room for."""
        waiting = len(self.in_state(GroupState.RUNNING, GroupState.READY))
        room = min(self.settings.capacity - len(self._states), self._to_take - waiting)
        new = list(range(self.admitted, self.admitted + max(0, room)))
        self._states |= dict.fromkeys(new, GroupState.RUNNING)
        self.admitted += len(new)
        return new

    def finished(self, group: int) -> None:
        """All samples of the group are there."""
        self._expect(group, GroupState.RUNNING)
        self._states[group] = GroupState.READY

    def released(self, group: int) -> None:
        """The group is not trained on, by a rule of the algorithm; another one is admitted in its place."""
        self._expect(group, GroupState.RUNNING)
        del self._states[group]

    def take(self) -> list[int]:
        """The groups of the next step, oldest first; empty while fewer than P can be taken."""
        size, running = self.settings.prompts_per_step, self.in_state(GroupState.RUNNING)
        ready = self.in_state(GroupState.READY)
        if running:  # the window cannot move beyond the oldest of them
            ready = [group for group in ready if group < running[0] + self.settings.window_groups]
        if len(ready) < size:
            return []
        taken = ready[:size]
        self._states |= dict.fromkeys(taken, GroupState.TRAINING)
        self._unpublished.append(taken)
        self._to_take -= size
        return taken

    def published(self) -> None:
        """Every engine has the weights that the oldest step made which was taken and not yet published."""
        if self._unpublished:
            for group in self._unpublished.popleft():
                del self._states[group]

    def _expect(self, group: int, state: GroupState) -> None:
        found = self.state(group)
        if found is not state:
            now = found.name.lower() if found else "not active"
            raise ValueError(f"group {group} is {now}, not {state.name.lower()}")
