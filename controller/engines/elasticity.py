"""Decide which engines of a range, MIN..MAX, are asked for and started, without I/O, Ray or a clock.

    free --request--> requested --the cluster grants--> granted --start--> running
     ^  ^                 |                                |                  |
     |  '----release------'--------------------------------'                  |
     '------------------------------- lost <----------------------------------'

A place is the number of a replica, 0 to MAX - 1. Its room is what the cluster reserves for an engine.

Invariants: never more than MAX engines. A place is requested once at a time. Starts of places that had an
engine before are restarts, and never exceed the budget. A place whose engines died again and again gets none.
Without losses and new grants, the second decision changes nothing.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from workers.config.engine_range import EngineRange


@dataclass(frozen=True)
class Changes:
    """Places to request a room for, to start an engine in, and to release."""

    request: tuple[int, ...] = ()
    start: tuple[int, ...] = ()
    release: tuple[int, ...] = ()


@dataclass(frozen=True)
class EnginePlaces:
    """State of all places. running: with an engine that starts or is up.

    requested, granted: rooms without an engine. lost: places that have lost an engine. hopeless: places whose
    next engine would die too. restarts_left: of run.max_restarts.
    """

    engines: EngineRange
    running: Collection[int]
    requested: Collection[int] = ()
    granted: Collection[int] = ()
    lost: Collection[int] = field(default=frozenset())
    hopeless: Collection[int] = ()
    restarts_left: int = 0

    @property
    def usable(self) -> list[int]:
        """Places that have an engine, or may get one. Restarts go to places with a room first."""
        restarts_left = self.restarts_left
        usable = []
        by_room = sorted(range(self.engines.maximum), key=self._rank)
        for place in by_room:
            is_restart = place not in self.running and place in self.lost
            if place in self.hopeless or (is_restart and restarts_left <= 0):
                continue
            restarts_left -= is_restart
            usable.append(place)
        return sorted(usable)

    @property
    def is_lost(self) -> bool:
        """Whether the run can never have the engines again that it needs."""
        return len(self.usable) < self.engines.minimum

    def decide(self) -> Changes:
        """Return what to do now."""
        usable = set(self.usable)
        rooms = {*self.requested, *self.granted}
        return Changes(
            request=tuple(sorted(usable - rooms - set(self.running))),
            start=tuple(sorted(usable & set(self.granted) - set(self.running))),
            release=tuple(sorted(rooms - usable)),
        )

    def _rank(self, place: int) -> tuple[int, int]:
        for rank, places in enumerate((self.running, self.granted, self.requested)):
            if place in places:
                return rank, place
        return len((self.running, self.granted, self.requested)), place
