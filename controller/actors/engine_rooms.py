"""EngineRooms: a placement group for each engine of a range, so that each comes and goes alone.

MIN reserved at the start --strategy--> their actors
requested --Ray has placed it--> granted --strategy--> an actor --release--> gone
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from controller.actors.layout import Pool
from controller.actors.resources import Reservation


class EngineRooms:
    """Rooms of a run's engines, by replica."""

    def __init__(self, pool: Pool, request: Callable[[Pool], Reservation]) -> None:
        """pool: of the first engines. request: asks Ray for a pool, without waiting."""
        self._pool = pool
        self._request = request
        self._rooms: dict[int, Reservation] = {}

    @property
    def replicas(self) -> set[int]:
        """Replicas whose room was requested and not released."""
        return set(self._rooms)

    def pool_of(self, replica: int) -> Pool:
        """Return the room of one engine as a pool."""
        name = f"{self._pool.name} {replica}"
        return replace(self._pool, name=name, bundles=self._pool.bundles[:1])

    def is_granted(self, replica: int) -> bool:
        """Whether Ray has placed the room. A lost node takes this back."""
        return self._rooms[replica].is_placed

    def add(self, replica: int, room: Reservation) -> None:
        """Take a room that is reserved already."""
        self._rooms[replica] = room

    def request(self, replica: int) -> None:
        """Ask Ray for a room, without waiting."""
        self._rooms[replica] = self._request(self.pool_of(replica))

    def release(self, replica: int) -> None:
        """Give a room back, or withdraw its request."""
        self._rooms.pop(replica).release()

    def release_all(self) -> None:
        """Give all rooms back."""
        for replica in self.replicas:
            self.release(replica)

    def strategy(self, replica: int) -> Any:
        """Return the scheduling strategy of the replica's actor."""
        return self._rooms[replica].strategy(0)
