"""ElasticEnginePool: engines come and go within `rollout.replicas: MIN..MAX`, while the run goes on.

    cluster has room --> start --> current weights --> serves --lost--> its room is given back
          ^                                                                     |
          '------------------ asked again, up to MAX engines <------------------'

A lost engine's requests go to the others at once, as in every pool. The run ends only if it has fewer than
MIN engines and gets no others. `controller.engines.elasticity` decides, `Rooms` asks the cluster.
"""

import time
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from controller.engines.elasticity import EnginePlaces
from controller.engines.engine_calls import POLL_SECONDS, MakeActor
from controller.engines.engine_pool import EnginePool
from controller.engines.fleet import FRUITLESS_DEATHS, RUNNING, State
from workers.config.roles import RolloutConfig
from workers.errors import RolloutError


class Rooms(Protocol):
    """What the cluster reserves for engines, by replica."""

    @property
    def replicas(self) -> set[int]:
        """Replicas whose room was requested and not released."""

    def is_granted(self, replica: int) -> bool:
        """Whether the cluster has the room now."""

    def request(self, replica: int) -> None:
        """Ask the cluster for a room, without waiting."""

    def release(self, replica: int) -> None:
        """Give a room back, or withdraw its request."""


class ElasticEnginePool(EnginePool):
    """The engines of a run with a range of them. `adjust` is called between steps, and while waiting."""

    def __init__(
        self,
        make: MakeActor,
        config: RolloutConfig,
        rooms: Rooms,
        *,
        room_timeout_s: float,
        **options: Any,
    ) -> None:
        """rooms: those of the first engines are granted. room_timeout_s: resources.placement_timeout_s, for
        engines below the minimum. options: see `EnginePool`.
        """
        super().__init__(make, config, **options)
        self._rooms = rooms
        self._engines = config.engine_range
        self._room_timeout_s = room_timeout_s
        self._adjusted = time.monotonic()
        self._short_since: float | None = None  # when the run fell below its minimum

    @property
    def expects_engines(self) -> bool:
        """Whether engines start or load weights, or all wait for room."""
        return super().expects_engines or not self.actors

    @property
    def words(self) -> str:
        """The number of engines, such as `2 of 1..4 engines`."""
        return f"{len(self.fleet.in_state(*RUNNING))} of {self._engines} engines"

    def adjust(self) -> None:
        """Ask the cluster for room for further engines, and start those that have it. Raises RolloutError if
        fewer than the minimum are left for too long.
        """
        self._adjusted = time.monotonic()
        changes = self._places().decide()
        for replica in changes.release:
            self._rooms.release(replica)
        for replica in changes.start:
            self._add(replica)
        for replica in changes.request:
            self._rooms.request(replica)
        self._check_minimum()

    def replace(self, replica: int, lost: str, *, was_starting: bool) -> None:
        """Give the room of a lost engine back, and go on with the others. Raises RolloutError if the run can
        never have its minimum again.
        """
        del was_starting  # a start that fails costs its engine alone
        del self.actors[replica]
        self._rooms.release(replica)
        if self.fleet.is_hopeless(replica):
            lost = (
                f"{lost}; {FRUITLESS_DEATHS} engines in a row died before they finished a sample, so it is "
                "not replaced"
            )
        if self._places().is_lost:
            raise RolloutError(
                f"{lost}; {self.words} are left, and no other can be started (run.max_restarts="
                f"{self.fleet.budget.limit})."
            )
        self._log(f"{lost}; {self.words} are left")

    def wait(self, streams: Sequence[Any], timeout_s: float = POLL_SECONDS) -> Any | None:
        """Wait for a result or a call. See `RolloutEngines`."""
        if not self.actors:  # Ray has nothing to wait for
            time.sleep(min(timeout_s, POLL_SECONDS))
        return super().wait(streams, timeout_s)

    def check_deadlines(self, busy: Collection[int]) -> None:
        """Adjust if it is due. See `RolloutEngines`."""
        super().check_deadlines(busy)
        if time.monotonic() - self._adjusted >= POLL_SECONDS:
            self.adjust()

    def _places(self) -> EnginePlaces:
        running = self.fleet.in_state(*RUNNING)
        dead = self.fleet.in_state(State.DEAD)
        rooms = self._rooms.replicas.difference(running)
        granted = {replica for replica in rooms if self._rooms.is_granted(replica)}
        return EnginePlaces(
            self._engines,
            running=running,
            requested=rooms - granted,
            granted=granted,
            lost=dead,
            hopeless=[replica for replica in dead if self.fleet.is_hopeless(replica)],
            restarts_left=self.fleet.budget.left,
        )

    def _add(self, replica: int) -> None:
        if self.fleet.state(replica) is State.ABSENT:
            self.fleet.add(replica)
        else:
            self.fleet.restart(replica)
        self.make_actor(replica)
        self.start_later(replica)
        self._log(f"{self._name} replica {replica} starts: {self.words}")

    def _check_minimum(self) -> None:
        now = time.monotonic()
        if len(self.fleet.in_state(*RUNNING)) >= self._engines.minimum:
            self._short_since = None
            return
        if self._short_since is None:
            self._short_since = now
        if now - self._short_since > self._room_timeout_s:
            raise RolloutError(
                f"rollout.replicas={self._engines}: {self.words} are left, and the cluster had no room for "
                f"another within resources.placement_timeout_s={self._room_timeout_s:g}. Start more nodes, "
                "or lower the minimum."
            )
