"""Decide which engine may take requests, without I/O, Ray or a clock.

    absent --add--> starting (in a range of engines)

    starting --mark_started--> stale --mark_updated--> current --drain--> draining
        ^                 ^ ^                   |  ^---resume------'
        |                 | '----new_version----'
        |                 '--wake-- asleep <--sleep-- stale, current, draining
        '----restart---- dead <----lost---- any of them

Invariants: an engine serves only while it is current, and is current only with the fleet's version of the
weights. A dead engine stays dead until it is restarted. There are never more restarts than the budget allows,
and none of an engine that dies again and again before it finishes a sample.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

FRUITLESS_DEATHS = 2
"""Deaths in a row without a finished sample, after which an engine is not replaced."""


class State(Enum):
    STARTING = "loading its process or its model"
    STALE = "up, without the current weights: it serves nothing"
    CURRENT = "serving, with the current weights"
    DRAINING = "takes nothing new: it finishes its requests, or is found to be hung"
    ASLEEP = "without weights and KV cache, while training uses its GPUs"
    DEAD = "lost"
    ABSENT = "not started yet: a range of engines starts with its minimum"


UP = (State.STALE, State.CURRENT, State.DRAINING)
READY = (*UP, State.ASLEEP)
RUNNING = (State.STARTING, *READY)


@dataclass
class RestartBudget:
    """Restarts of a run: at most `limit`, which is run.max_restarts.

    engines: restarted rollout engines. recoveries: times the whole run resumed from its checkpoint.
    fruitless: by replica, deaths in a row without a finished sample.
    """

    limit: int
    engines: int = 0
    recoveries: int = 0
    fruitless: Counter[int] = field(default_factory=Counter)

    @property
    def left(self) -> int:
        return self.limit - self.engines - self.recoveries

    def metrics(self) -> dict[str, float]:
        return {
            "restarts/engines": float(self.engines),
            "restarts/recoveries": float(self.recoveries),
        }


class Fleet:
    """States of a run's engines. `version`: of the weights, 0 for the model's folder.

    Raises ValueError for an event that is impossible in an engine's state.
    """

    def __init__(
        self,
        replicas: int,
        budget: RestartBudget,
        changed: Callable[[int, State], None] = lambda replica, state: None,
        absent: int = 0,
    ) -> None:
        """replicas: started at once. absent: replicas that may be added."""
        self.version = 0
        self.budget = budget
        self._changed = changed
        self._states = [State.STARTING] * replicas + [State.ABSENT] * absent
        self._finished: set[int] = set()  # replicas whose engine has finished a sample
        for replica, state in enumerate(self._states):
            changed(replica, state)

    @property
    def size(self) -> int:
        """Number of replicas in any state."""
        return len(self._states)

    def state(self, replica: int) -> State:
        return self._states[replica]

    def in_state(self, *states: State) -> list[int]:
        return [replica for replica, state in enumerate(self._states) if state in states]

    @property
    def serving(self) -> list[int]:
        return self.in_state(State.CURRENT)

    def add(self, replica: int) -> None:
        """Record that the replica's first engine starts."""
        self._move(replica, State.STARTING, State.ABSENT)

    def mark_started(self, replica: int) -> None:
        """Record that the engine is up, with version 0."""
        self._move(replica, self._with_weights(0), State.STARTING)

    def mark_waiting(self, replica: int) -> None:
        """Record that the engine is up and serves nothing before it has got weights."""
        self._move(replica, State.STALE, State.STARTING)

    def mark_updated(self, replica: int, version: int) -> None:
        """Record that the engine has loaded `version`, which may be outdated."""
        self._move(replica, self._with_weights(version), State.STALE)

    def new_version(self, version: int) -> None:
        """Record new weights, which no engine has yet. Raises ValueError if `version` falls."""
        if version < self.version:
            raise ValueError(
                f"weights of version {version} after those of version {self.version}"
            )
        self.version = version
        for replica in self.in_state(State.CURRENT, State.DRAINING):
            self._move(replica, State.STALE, State.CURRENT, State.DRAINING)

    def drain(self, replica: int) -> None:
        self._move(replica, State.DRAINING, State.CURRENT)

    def resume(self, replica: int) -> None:
        self._move(replica, State.CURRENT, State.DRAINING)

    def sleep(self, replica: int) -> None:
        """Record that the engine drops its weights and KV cache."""
        self._move(replica, State.ASLEEP, *UP)

    def wake(self, replica: int) -> None:
        """Record that the engine has memory for weights again, but no weights."""
        self._move(replica, State.STALE, State.ASLEEP)

    def mark_finished_samples(self, replica: int) -> None:
        """Record that the engine has finished samples, even if it is now dead."""
        self._finished.add(replica)

    def mark_lost(self, replica: int) -> None:
        self._move(replica, State.DEAD, *RUNNING)
        self.budget.fruitless[replica] = (
            0 if replica in self._finished else self.budget.fruitless[replica] + 1
        )
        self._finished.discard(replica)

    def is_hopeless(self, replica: int) -> bool:
        """Whether a replacement would die too."""
        return self.budget.fruitless[replica] >= FRUITLESS_DEATHS

    def restart(self, replica: int) -> bool:
        """Replace a dead engine. Returns False, without effect, if hopeless or beyond the budget."""
        if self.budget.left <= 0 or self.is_hopeless(replica):
            return False
        self._move(replica, State.STARTING, State.DEAD)
        self.budget.engines += 1
        return True

    def _with_weights(self, version: int) -> State:
        return State.CURRENT if version == self.version else State.STALE

    def _move(self, replica: int, state: State, *allowed: State) -> None:
        old_state = self._states[replica]
        if old_state not in allowed:
            names = " or ".join(allowed_state.name.lower() for allowed_state in allowed)
            raise ValueError(f"engine {replica} is {old_state.name.lower()}, not {names}")
        self._states[replica] = state
        self._changed(replica, state)
