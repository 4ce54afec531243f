"""StalenessSchedule: which groups are generated ahead, and which finished groups a step trains on.

    admit --> running --finish--> ready --take--> training --weights_updated--> gone
                 |        window: the W groups from the oldest that is not yet taken
                 '--release--> gone (no signal: another is admitted in its place)

A group is one prompt with all its samples, numbered in the order of the prompts: 0, 1, ... With P groups a
step and a target staleness S, at most B = (S + 1) P groups are active: admitted, and not yet released, nor
trained with the new weights in the engines. A step takes the P oldest ready groups, each from the window of W
= max(1, floor(f B)) numbers that begins at the oldest group not yet taken. So a younger group may pass a slow
one only within the window (windowed FIFO, MiniMax, Forge, arXiv 2605.26494, section 6.2.4).

Invariants: every group is admitted once, and taken once or released. None is dropped for its age. A group's
age in versions of the weights, from admission to its step, is at most `max_age` = S + ceil((W - 1) / P), and
0 if S is 0. While steps are left and no P groups can be taken, a group is running or can be admitted, or the
engines await weights.

Why the age is bounded: at a group's admission at most B - 1 others are active, and at most W - 1 younger
groups are taken before it. So at most floor((B + W - 2) / P) = S + ceil((W - 1) / P) whole steps are taken in
between. If groups stopped being active when trained, before the engines have the new weights, the bound would
be one more.

It only decides, without I/O, Ray or a clock.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from math import ceil, floor


class GroupState(Enum):
    RUNNING = "its samples are generated or scored"
    READY = "all its samples are there"
    TRAINING = "a step has taken it; the engines have no new weights yet"


@dataclass(frozen=True)
class Staleness:
    """Settings of a schedule. prompts_per_step: P. max_staleness: S. window: f, in (0, 1]."""

    prompts_per_step: int
    max_staleness: int
    window: float

    @property
    def capacity(self) -> int:
        """B."""
        return (self.max_staleness + 1) * self.prompts_per_step

    @property
    def window_groups(self) -> int:
        """W."""
        return max(1, floor(self.window * self.capacity))

    @property
    def max_age(self) -> int:
        """Largest age of a taken group, in versions of the weights."""
        if self.max_staleness == 0:
            return 0  # a step takes every active group: no younger one goes first
        return self.max_staleness + ceil((self.window_groups - 1) / self.prompts_per_step)


class StalenessSchedule:
    """State of a run's groups. Raises ValueError for an event that is impossible in a group's state."""

    def __init__(
        self,
        settings: Staleness,
        steps: int,
        *,
        admitted: int = 0,
        active: Iterable[int] = (),
    ) -> None:
        """steps: number left, whose groups are admitted. admitted: number of the next group. active: running
        groups of a resumed run.
        """
        self.settings = settings
        self.admitted = admitted
        self._states = dict.fromkeys(sorted(active), GroupState.RUNNING)
        self._to_take = steps * settings.prompts_per_step
        self._taken_steps: deque[list[int]] = deque()

    def state(self, group: int) -> GroupState | None:
        return self._states.get(group)

    def in_state(self, *states: GroupState) -> list[int]:
        return [group for group, state in self._states.items() if state in states]

    def admit(self) -> list[int]:
        """Return the groups to generate now: as many as there is room for."""
        waiting = len(self.in_state(GroupState.RUNNING, GroupState.READY))
        room = min(self.settings.capacity - len(self._states), self._to_take - waiting)
        new = list(range(self.admitted, self.admitted + max(0, room)))
        self._states |= dict.fromkeys(new, GroupState.RUNNING)
        self.admitted += len(new)
        return new

    def finish(self, group: int) -> None:
        self._expect(group, GroupState.RUNNING)
        self._states[group] = GroupState.READY

    def release(self, group: int) -> None:
        """Drop a group by a rule of the algorithm. Another is admitted in its place."""
        self._expect(group, GroupState.RUNNING)
        del self._states[group]

    def take(self) -> list[int]:
        """Take the next step's groups, oldest first, or none while fewer than P are ready."""
        size = self.settings.prompts_per_step
        running = self.in_state(GroupState.RUNNING)
        ready = self.in_state(GroupState.READY)
        if running:  # the window cannot move beyond the oldest of them
            ready = [
                group for group in ready if group < running[0] + self.settings.window_groups
            ]
        if len(ready) < size:
            return []
        groups = ready[:size]
        self._states |= dict.fromkeys(groups, GroupState.TRAINING)
        self._taken_steps.append(groups)
        self._to_take -= size
        return groups

    def weights_updated(self) -> None:
        """Free the groups of the oldest taken step: every engine has its weights."""
        if self._taken_steps:
            for group in self._taken_steps.popleft():
                del self._states[group]

    def _expect(self, group: int, state: GroupState) -> None:
        current_state = self.state(group)
        if current_state is not state:
            now = current_state.name.lower() if current_state else "not active"
            raise ValueError(f"group {group} is {now}, not {state.name.lower()}")
