"""Places of engines as a state machine: rooms come and go, engines are lost, and the bounds hold."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from controller.engines.elasticity import Changes, EnginePlaces
from workers.config.engine_range import EngineRange

RESTARTS = 3


class ElasticMachine(RuleBasedStateMachine):
    """A cluster that grants and takes rooms in any order, and a run that follows each decision."""

    @initialize(minimum=st.integers(1, 3), more=st.integers(1, 3))
    def begin(self, minimum: int, more: int) -> None:
        self.engines = EngineRange(minimum, minimum + more)
        self.running = set(range(minimum))
        self.requested: set[int] = set()
        self.granted: set[int] = set()
        self.lost: set[int] = set()
        self.hopeless: set[int] = set()
        self.restarts = 0
        self.first_starts = set(self.running)

    @property
    def places(self) -> EnginePlaces:
        return EnginePlaces(
            self.engines,
            self.running,
            self.requested,
            self.granted,
            self.lost,
            self.hopeless,
            RESTARTS - self.restarts,
        )

    def draw(self, data: st.DataObject, places: set[int]) -> int:
        return data.draw(st.sampled_from(sorted(places)))

    @precondition(lambda self: self.requested)
    @rule(data=st.data())
    def grant(self, data: st.DataObject) -> None:
        place = self.draw(data, self.requested)
        self.requested.remove(place)
        self.granted.add(place)

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def take_back(self, data: st.DataObject) -> None:
        """The node of a room is gone before an engine starts in it."""
        place = self.draw(data, self.granted)
        self.granted.remove(place)
        self.requested.add(place)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), dies_again=st.booleans())
    def lose(self, data: st.DataObject, dies_again: bool) -> None:
        place = self.draw(data, self.running)
        self.running.remove(place)
        self.lost.add(place)
        if dies_again:
            self.hopeless.add(place)

    @rule()
    def follow(self) -> None:
        changes = self.places.decide()
        assert not set(changes.request) & (self.running | self.requested | self.granted)
        assert set(changes.start) <= self.granted
        assert not set(changes.start + changes.request) & self.hopeless
        self.requested |= set(changes.request)
        self.requested -= set(changes.release)
        self.granted -= {*changes.release, *changes.start}
        self.running |= set(changes.start)
        self.restarts += len(self.lost & set(changes.start))
        assert not self.first_starts & (set(changes.start) - self.lost)
        self.first_starts |= set(changes.start)
        assert self.places.decide() == Changes(), "the next decision changes it again"
        waits = self.running | self.requested
        assert self.places.is_lost or len(waits) >= self.engines.minimum

    @invariant()
    def bounds_hold(self) -> None:
        places = self.places
        assert len(self.running | self.requested | self.granted) <= self.engines.maximum
        assert self.restarts <= RESTARTS
        if not places.is_lost:
            assert len(places.usable) >= self.engines.minimum


TestHistories = ElasticMachine.TestCase
TestHistories.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def test_a_new_run_asks_for_room_up_to_its_maximum() -> None:
    places = EnginePlaces(EngineRange(1, 4), {0}, restarts_left=RESTARTS)
    assert places.decide() == Changes(request=(1, 2, 3))


def test_restarts_that_are_left_go_to_places_with_a_room() -> None:
    places = EnginePlaces(
        EngineRange(1, 3), {1}, requested={0}, granted={2}, lost={0, 2}, restarts_left=1
    )
    assert places.decide() == Changes(start=(2,), release=(0,))


@pytest.mark.parametrize(("hopeless", "lost"), [((), False), ((1,), False), ((0, 1), True)])
def test_a_run_is_lost_if_its_minimum_cannot_run_again(
    hopeless: tuple[int, ...], lost: bool
) -> None:
    places = EnginePlaces(
        EngineRange(1, 2), (), lost={0, 1}, hopeless=hopeless, restarts_left=1
    )
    assert places.is_lost == lost
